r"""An orthogonal map of your own: from unconstrained parameters to the matrix that rotates the neurons of a layer.

hypersphere list maps --plugin my_name.py
hypersphere train digits-opt --plugin my_name.py orthogonal.name=my-name orthogonal.times=3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hypersphere.errors import check_range
from hypersphere.orthogonal import maps
from hypersphere.orthogonal.maps import Map, cayley


@maps.register("my-name")
@dataclass(frozen=True)
class MyName(Map):
    r"""A power of the Cayley map, :math:`R = (\mathrm{cayley}(P / k))^k`, which reaches angles that one does not.

    Args:
        times: The power k.
    """

    times: int = 2

    skew: ClassVar[bool] = True
    """Only the strict upper triangle of ``P`` is read, and R is the identity where it is 0."""

    def __post_init__(self) -> None:
        check_range("times", self.times, 1)

    def evaluate(self, P: Tensor) -> Tensor:
        """``R`` ``(..., d, d)`` of a ``P`` of the same shape, in float32 or wider."""
        part = cayley(P / self.times)
        found = part
        for _ in range(self.times - 1):
            found = found @ part
        return found
