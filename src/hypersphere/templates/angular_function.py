r"""An angular function of your own: what stands for the cosine in a layer's response or a head's logit.

hypersphere list angulars --plugin my_name.py
hypersphere train digits-softmax --plugin my_name.py convert.name=sphere convert.angular=my-name
hypersphere train digits-64-margin-softmax --plugin my_name.py loss.g=my-name
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

import hypersphere as hs
from hypersphere.angular import Angular
from hypersphere.errors import check_range


@hs.angular.angulars.register("my-name")
@dataclass(frozen=True)
class MyName(Angular):
    r"""A blend of cosine and cubed cosine: :math:`g(\theta) = (1 - a)\cos\theta + a\cos^3\theta`, falling on [0, pi].

    Args:
        a: Share of the cube, from 0 to 1.
    """

    a: float = 0.5

    def __post_init__(self) -> None:
        check_range("a", self.a, 0, 1)

    def of_cosine(self, cosines: Tensor) -> Tensor:
        """Value at the angles of these cosines, any shape; from here the value at angles follows."""
        return cosines * (1 - self.a + self.a * cosines.square())

    def slope_of_cosine(self, cosines: Tensor) -> Tensor:
        """Derivative of :meth:`of_cosine`, which heads with very many classes need."""
        return 1 - self.a + 3 * self.a * cosines.square()

    def slope(self, theta: Tensor) -> Tensor:
        """Derivative at angles."""
        return -theta.sin() * self.slope_of_cosine(theta.cos())
