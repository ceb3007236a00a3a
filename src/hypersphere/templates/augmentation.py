r"""An augmentation of your own: a random change of training samples, drawn anew for each of them and every step.

hypersphere list augmentations --plugin my_name.py
hypersphere train digits-softmax --plugin my_name.py 'data.augment.parts=[{name: my-name, size: 3}]'
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hypersphere.data.augmentations import Augmentation, augmentations
from hypersphere.errors import check_range


@augmentations.register("my-name")
@dataclass(frozen=True)
class MyName(Augmentation):
    """Cutout: a square of each image becomes grey.

    Args:
        size: Side of the square.
    """

    size: int = 2

    draws: ClassVar[int] = 2
    """Uniform numbers for each sample: here the place of the square."""

    def __post_init__(self) -> None:
        check_range("size", self.size, 1)

    def __call__(self, samples: Tensor, draws: Tensor) -> Tensor:
        """Changed images ``(b, C, H, W)``, normalised, so that 0 is grey, by the numbers ``(draws, b)``."""
        height, width = samples.shape[-2:]
        inside = []
        for draw, length in zip(draws, (height, width), strict=True):
            start = (draw * (length - self.size + 1)).floor().unsqueeze(1)
            place = torch.arange(length, device=samples.device)
            inside.append((place >= start) & (place < start + self.size))
        square = inside[0][:, None, :, None] & inside[1][:, None, None, :]
        return samples.masked_fill(square, 0.0)
