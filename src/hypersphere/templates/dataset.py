r"""A data set of your own: samples to train on and to test on, with their labels.

hypersphere list datasets --plugin my_name.py
hypersphere train digits-softmax --plugin my_name.py data.name=my-name data.noise=40
"""

from __future__ import annotations

from pathlib import Path

import torch

from hypersphere.data import Dataset, TensorSplit, datasets
from hypersphere.errors import check_range


@datasets.register("my-name")
def my_name(root: Path | None = None, classes: int = 10, noise: float = 30.0, size: int = 8) -> Dataset:
    """Noisy copies of one random picture a class, drawn anew and always the same.

    Args:
        root: Folder of all data sets (``--data-root``), for one that reads files. Not used here.
        classes: Number of classes.
        noise: Deviation of the noise, of grey values from 0 to 255.
        size: Height and width.
    """
    check_range("classes", classes, 2)
    check_range("noise", noise, 0)
    check_range("size", size, 4)
    draws = torch.Generator().manual_seed(0)
    pictures = torch.rand(classes, 1, size, size, generator=draws) * 255

    def split(count: int) -> TensorSplit:
        labels = torch.arange(count) % classes
        images = pictures[labels] + noise * torch.randn(count, 1, size, size, generator=draws)
        # Bytes (N, C, H, W) are images: normalised and augmented as such. Samples of another type are left as they are.
        return TensorSplit(images.round().clamp(0, 255).to(torch.uint8), labels)

    return Dataset("my-name", tuple(f"picture {index}" for index in range(classes)), split(1000), split(300))
