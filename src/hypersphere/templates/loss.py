r"""A loss of your own: a head, which owns the class vectors and turns features and labels into a number.

hypersphere list losses --plugin my_name.py
hypersphere train digits-64 --plugin my_name.py loss.name=my-name loss.m=0.2
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

import hypersphere as hs
from hypersphere.errors import check_range
from hypersphere.geometry import norm


@hs.losses.losses.register("my-name")
class MyName(hs.losses.MarginSoftmax):
    r"""CosFace with a ring: features are drawn to one length, :math:`\lambda\,(\|x\| / s - 1)^2`.

    Args:
        dim: Feature dimension.
        classes: Number of classes.
        s: Scale, and the length to which features are drawn.
        m: Margin that is subtracted from the cosine to the own class.
        ring: The weight :math:`\lambda`.
        **options: What all heads take, such as ``label_smoothing``.
    """

    def __init__(
        self, dim: int, classes: int, *, s: float = 16.0, m: float = 0.35, ring: float = 0.1, **options: Any
    ) -> None:
        check_range("ring", ring, 0)
        super().__init__(dim, classes, s=s, m=m, psi="additive-cosine", **options)
        self.length, self.ring = s, ring

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Loss of features ``(B, D)`` with labels ``(B,)``: the margin softmax, and the distance from the ring."""
        distance = (norm(embeddings) / self.length - 1).square()
        return super().forward(embeddings, labels) + self.ring * distance.mean()
