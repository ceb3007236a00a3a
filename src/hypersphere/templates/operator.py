r"""A decoupled operator of your own: how the norm of a patch enters the response of a layer.

hypersphere list operators --plugin my_name.py
hypersphere train digits-softmax --plugin my_name.py convert.name=my-name convert.half=2.0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hypersphere.errors import check_range
from hypersphere.nn import operators
from hypersphere.nn.operators import Operator


@operators.register("my-name")
@dataclass(frozen=True)
class MyName(Operator):
    r"""A magnitude that saturates: :math:`h(t) = \alpha\, t / (t + c)`.

    Args:
        half: The norm c at which half of the largest response is reached.
    """

    half: float = 1.0

    bounded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("half", self.half, 0, open_low=True)

    def magnitude(self, t: Tensor, radius: Tensor | float = 1.0) -> Tensor:
        """Magnitude at norms ``t``, any shape; the radius is that of operators that have one."""
        return self.alpha * t / (t + self.half)

    def magnitude_slope(self, t: Tensor, radius: Tensor | float = 1.0) -> Tensor:
        """Derivative by the norm. Without it layers are left to autograd, which keeps more for the backward pass."""
        return self.alpha * self.half / (t + self.half).square()
