"""The small digits that scikit-learn brings along."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from hypersphere.data.sources import Source, datasets, sources
from hypersphere.data.splits import Dataset, TensorSplit, optional_module, stratified_split

sources["digits"] = Source("digits", "comes with scikit-learn", ())


@datasets.register("digits")
def digits(root: Path | None = None, test_fraction: float = 0.3, split_seed: int = 0) -> Dataset:
    """Handwritten digits of scikit-learn, 8x8 grey, 1,797 in all; needs no files.

    Args:
        root: Not used.
        test_fraction: Share of each class that is tested on.
        split_seed: Seed of the division into training and test images.
    """
    found = optional_module("sklearn.datasets", "scikit-learn").load_digits()
    images = torch.from_numpy(np.round(found.images * 255 / 16).astype(np.uint8))[:, None]  # values are 0 to 16
    labels = torch.from_numpy(found.target.astype(np.int64))
    train, test = (
        TensorSplit(images[part], labels[part]) for part in stratified_split(labels, test_fraction, split_seed)
    )
    return Dataset("digits", tuple(map(str, range(10))), train, test)
