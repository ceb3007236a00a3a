r"""A model of your own: a backbone, from samples to features. The classifier is the loss's.

hypersphere list models --plugin my_name.py
hypersphere train digits-softmax --plugin my_name.py model.name=my-name model.dim=16
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from hypersphere.errors import check_range
from hypersphere.models import models
from hypersphere.nn import factory


@models.register("my-name")
class MyName(nn.Module):
    """Two fully connected layers.

    Args:
        shape: Shape ``(C, H, W)`` of one image.
        dim: Feature dimension.
        width: Neurons of the hidden layer.
        linear: Linear layer, by name or as a class.
    """

    def __init__(self, shape: tuple[int, int, int], *, dim: int = 64, width: int = 32, linear: str = "linear") -> None:
        super().__init__()
        check_range("dim", dim, 1)
        check_range("width", width, 1)
        make = factory(linear)
        self.dim = dim  # the loss asks for it
        self.layers = nn.Sequential(nn.Flatten(), make(math.prod(shape), width), nn.ReLU(), make(width, dim))

    def forward(self, images: Tensor) -> Tensor:
        """Features ``(B, dim)`` of images ``(B, C, H, W)``, or of samples of any other shape."""
        return self.layers(images)
