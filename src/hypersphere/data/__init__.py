"""Data sets: the digits of scikit-learn, MNIST and CIFAR in their published formats, faces, and folders of images.

Example:
    >>> from hypersphere.data import load
    >>> digits = load("digits", hold_out=["8", "9"])
    >>> len(digits.class_names), digits.unseen_names
    (8, ('8', '9'))
"""

from hypersphere.data import cifar, digits, folder, idx  # noqa: F401  (each registers its data sets)
from hypersphere.data.sources import Status, data_roots, datasets, inventory, load
from hypersphere.data.splits import DataError, Dataset, FolderSplit, Split, TensorSplit

__all__ = [
    "DataError",
    "Dataset",
    "FolderSplit",
    "Split",
    "Status",
    "TensorSplit",
    "data_roots",
    "datasets",
    "inventory",
    "load",
]
