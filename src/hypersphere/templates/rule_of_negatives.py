r"""A rule of negatives of your own: what stands in the logit of a class that a sample does not belong to.

hypersphere list negatives --plugin my_name.py
hypersphere train digits-64-margin-softmax --plugin my_name.py 'loss.negatives={name: my-name, strength: 0.3}'
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hypersphere.errors import check_range
from hypersphere.losses.negatives import Negatives, rules


@rules.register("my-name")
@dataclass(frozen=True)
class MyName(Negatives):
    r"""Near classes weigh more: :math:`\eta = c + a\,[c]_+^2` of the cosine c.

    Args:
        strength: The factor a.
    """

    strength: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("strength", self.strength, 0)

    def _value(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        return cosines + self.strength * cosines.relu().square()

    def _slope(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        return 1 + 2 * self.strength * cosines.relu()
