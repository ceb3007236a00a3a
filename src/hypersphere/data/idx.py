"""MNIST and Fashion-MNIST from their idx files."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hypersphere.data.sources import Layout, Source, content, datasets, labelled_images, locate, sources
from hypersphere.data.splits import DataError, Dataset, TensorSplit

_FASHION_NAMES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"
)  # fmt: skip

sources["mnist"] = Source(
    "mnist",
    "http://yann.lecun.com/exdb/mnist/",
    (
        Layout(
            ("mnist", "MNIST/raw"),
            {
                "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
                "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
                "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
                "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
            },
        ),
    ),
)
sources["fashion-mnist"] = Source(
    "fashion-mnist",
    "https://github.com/zalandoresearch/fashion-mnist",
    (
        Layout(
            ("fashion-mnist", "FashionMNIST/raw"),
            {
                "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
                "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
                "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
                "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
            },
        ),
    ),
)


@datasets.register("mnist")
def mnist(root: Path | None = None) -> Dataset:
    """Handwritten digits, 28x28 grey, 60,000 to train on and 10,000 to test on (idx files, plain or .gz)."""
    return _load("mnist", root, tuple(map(str, range(10))))


@datasets.register("fashion-mnist")
def fashion_mnist(root: Path | None = None) -> Dataset:
    """Articles of clothing, 28x28 grey, 60,000 to train on and 10,000 to test on (idx files, plain or .gz)."""
    return _load("fashion-mnist", root, _FASHION_NAMES)


def _load(name: str, root: Path | None, class_names: tuple[str, ...]) -> Dataset:
    folder, _ = sources[name].find(root)
    train, test = (_read_split(folder, prefix, class_names) for prefix in ("train", "t10k"))
    return Dataset(name, class_names, train, test)


def _read_split(folder: Path, prefix: str, class_names: tuple[str, ...]) -> TensorSplit:
    image_file = locate(folder, f"{prefix}-images-idx3-ubyte")
    label_file = locate(folder, f"{prefix}-labels-idx1-ubyte")
    assert image_file is not None and label_file is not None  # the folder was chosen because it holds them
    images, labels = _read_idx(image_file, 3), _read_idx(label_file, 1)
    if len(images) != len(labels):
        raise DataError(
            f"{image_file} has {len(images)} images but {label_file} has {len(labels)} labels, expected as many of "
            "each. Get both files again."
        )
    return labelled_images(images[:, None], labels, class_names, label_file)


def _read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an idx file of bytes: a magic number, one big-endian size for each dimension, then the bytes."""
    raw = content(path)
    magic = bytes((0, 0, 8, dimensions))
    if raw[:4] != magic:
        raise DataError(
            f"{path} begins with 0x{raw[:4].hex()}, expected 0x{magic.hex()}: it is not an idx file of bytes with "
            f"{dimensions} dimension(s). Get the file again."
        )
    start = 4 + 4 * dimensions
    shape = [int.from_bytes(raw[at : at + 4], "big") for at in range(4, start, 4)]
    if len(raw) != start + math.prod(shape):
        raise DataError(
            f"{path} has {len(raw):,} bytes, expected {start + math.prod(shape):,} by its header: it was cut short or "
            "changed. Get the file again."
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)
