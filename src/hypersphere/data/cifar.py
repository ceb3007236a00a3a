"""CIFAR-10 and CIFAR-100 from their original Python or binary files.

Both forms are brought to the records of the binary one: for each image its label bytes, then 32x32 bytes of red,
of green and of blue.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from hypersphere.data.sources import Layout, Source, content, datasets, labelled_images, locate, sources
from hypersphere.data.splits import DataError, Dataset, TensorSplit
from hypersphere.errors import check_choice

_HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"
_PIXELS = 3 * 32 * 32

# File: MD5 of the Python file, MD5 of the binary file (and so of the records).
_SUMS_10 = {
    "data_batch_1": ("c99cafc152244af753f735de768cd75f", "5dd7e06a14cb22eb9f671a540d1b7c25"),
    "data_batch_2": ("d4bba439e000b95fd0a9bffe97cbabec", "5ea93a67294ea407fff1d09f752e9692"),
    "data_batch_3": ("54ebc095f3ab1f0389bbae665268c751", "942cd6a4bcdd0dd3c604fbe906cb4421"),
    "data_batch_4": ("634d18415352ddfa80567beed471001a", "ae636b3ba5c66a11e91e8cb52e771fcb"),
    "data_batch_5": ("482c414d41f54cd18b22e5b47cb7c3cb", "53f37980c15c3d472c316c40844f3f0d"),
    "test_batch": ("40351d587109b95175f43aff81a1287e", "803d5f7f4d78ea53de84dbe85f74fb6d"),
}
_SUMS_100 = {
    "train": ("16019d7e3df5f24257cddd939b257f8d", "6172c7755cfe09b2fe270c85cebc1b15"),
    "test": ("f0ef6b0ae62326f3e7ffdfab6717acfc", "4499cfba6c016c1be1438163640a0898"),
}
# Label lists of the Python files, in the order in which the binary records hold them.
_LABELS_10 = ("labels",)
_LABELS_100 = ("coarse_labels", "fine_labels")


def _layouts(
    folders: tuple[str, str],
    sums: dict[str, tuple[str, str]],
    label_keys: tuple[str, ...],
    python_names: dict[str, str],
    binary_names: tuple[str, ...],
) -> tuple[Layout, Layout]:
    return (
        Layout(
            (folders[0],),
            {name: python for name, (python, _) in sums.items()} | python_names,
            lambda path: _read_records(path, label_keys).tobytes(),
            {name: binary for name, (_, binary) in sums.items()},
        ),
        Layout(
            (folders[1],),
            {f"{name}.bin": binary for name, (_, binary) in sums.items()} | dict.fromkeys(binary_names),
        ),
    )


sources["cifar10"] = Source(
    "cifar10",
    _HOME,
    _layouts(
        ("cifar-10-batches-py", "cifar-10-batches-bin"),
        _SUMS_10,
        _LABELS_10,
        {"batches.meta": "5ff9c542aee3614f3951f8cda6e48888"},
        ("batches.meta.txt",),
    ),
)
sources["cifar100"] = Source(
    "cifar100",
    _HOME,
    _layouts(
        ("cifar-100-python", "cifar-100-binary"),
        _SUMS_100,
        _LABELS_100,
        {"meta": "7973b15100ade9c7d40fb424638fde48"},
        ("coarse_label_names.txt", "fine_label_names.txt"),
    ),
)


@datasets.register("cifar10")
def cifar10(root: Path | None = None) -> Dataset:
    """Photographs of 10 kinds of things, 32x32 colour, 50,000 to train on and 10,000 to test on."""
    folder, _ = sources["cifar10"].find(root)
    names = _read_names(folder, "batches.meta", "label_names", "batches.meta.txt")
    batches = [f"data_batch_{number}" for number in range(1, 6)]
    train, test = (_read_split(folder, files, _LABELS_10, "labels", names) for files in (batches, ["test_batch"]))
    return Dataset("cifar10", names, train, test)


@datasets.register("cifar100")
def cifar100(root: Path | None = None, labels: Literal["fine", "coarse"] = "fine") -> Dataset:
    """Photographs of 100 kinds of things, 32x32 colour, 50,000 to train on and 10,000 to test on.

    Args:
        root: Data root to search instead of the usual ones.
        labels: The 100 fine classes or the 20 coarse ones.
    """
    check_choice("labels", labels, ("fine", "coarse"))
    folder, _ = sources["cifar100"].find(root)
    names = _read_names(folder, "meta", f"{labels}_label_names", f"{labels}_label_names.txt")
    train, test = (_read_split(folder, [file], _LABELS_100, f"{labels}_labels", names) for file in ("train", "test"))
    return Dataset("cifar100", names, train, test)


def _read_split(
    folder: Path, files: Sequence[str], label_keys: tuple[str, ...], label: str, class_names: Sequence[str]
) -> TensorSplit:
    parts = []
    for file in files:
        path = locate(folder, file) or locate(folder, f"{file}.bin")
        assert path is not None  # the folder was chosen because it holds them
        records = _read_records(path, label_keys)
        images = records[:, len(label_keys) :].reshape(-1, 3, 32, 32)
        parts.append(labelled_images(images, records[:, label_keys.index(label)], class_names, path))
    return TensorSplit(torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]))


def _read_names(folder: Path, python_file: str, key: str, text_file: str) -> tuple[str, ...]:
    path = locate(folder, python_file)
    if path is not None:
        names = _unpickle(path).get(key)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise DataError(f"{path} has no list of names {key!r}. Get the file again.")
    else:
        path = locate(folder, text_file)
        assert path is not None  # the folder was chosen because it holds it
        names = content(path).decode("latin1").split()
    if not names:
        raise DataError(f"{path} has no class names. Get the file again.")
    return tuple(names)


def _read_records(path: Path, label_keys: tuple[str, ...]) -> NDArray[np.uint8]:
    """The records ``(N, labels + pixels)`` of a file of either form."""
    width = len(label_keys) + _PIXELS
    if ".bin" in path.suffixes:
        raw = content(path)
        if not raw or len(raw) % width:
            raise DataError(
                f"{path} has {len(raw):,} bytes, expected a multiple of {width:,}, one record for each image: it was "
                "cut short or changed. Get the file again."
            )
        return np.frombuffer(raw, np.uint8).reshape(-1, width)
    batch = _unpickle(path)
    pixels = batch.get("data")
    if not isinstance(pixels, _ByteArray) or pixels.values.shape[1:] != (_PIXELS,):
        raise DataError(f"{path} has no array 'data' of {_PIXELS:,} bytes for each image. Get the file again.")
    columns = [_label_column(path, key, batch.get(key), len(pixels.values)) for key in label_keys]
    return np.hstack([*columns, pixels.values])


def _label_column(path: Path, key: str, labels: object, count: int) -> NDArray[np.uint8]:
    if not isinstance(labels, list) or not all(isinstance(label, int) and 0 <= label < 256 for label in labels):
        raise DataError(f"{path} has no list of labels {key!r}. Get the file again.")
    if len(labels) != count:
        raise DataError(f"{path} has {count} images but {len(labels)} {key!r}. Get the file again.")
    return np.array(labels, np.uint8)[:, None]


class _ByteArray:
    """Stands in for ``numpy.ndarray`` and its maker, so that a file can build byte arrays and nothing else."""

    def __init__(self, *_: object) -> None:
        self.values: NDArray[np.uint8] = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[object, tuple[int, ...], _ByteType, bool, bytes | str]) -> None:
        _, shape, kind, fortran, raw = state
        if not isinstance(kind, _ByteType):
            raise pickle.UnpicklingError("it has an array without a type")
        # Files of Python 2 hold text where Python 3 has bytes.
        data = raw.encode("latin1") if isinstance(raw, str) else raw
        self.values = np.frombuffer(data, np.uint8).reshape(shape, order="F" if fortran else "C")


class _ByteType:
    """Stands in for ``numpy.dtype`` and takes no type but uint8."""

    def __init__(self, code: str, *_: object) -> None:
        if code not in ("u1", "|u1"):
            raise pickle.UnpicklingError(f"it has an array of type {code!r} where uint8 belongs")

    def __setstate__(self, state: object) -> None:
        """Byte order and the like, which bytes have no use for."""


def _encode(text: str, _: str) -> bytes:
    """Stands in for ``_codecs.encode``, with which Python 3 writes bytes for Python 2."""
    return text.encode("latin1")


_STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _ByteArray,
    ("numpy._core.multiarray", "_reconstruct"): _ByteArray,
    ("numpy", "ndarray"): _ByteArray,
    ("numpy", "dtype"): _ByteType,
    ("_codecs", "encode"): _encode,
}


class _ArrayUnpickler(pickle.Unpickler):
    """Reads plain values and byte arrays; whatever else a file asks for is refused, so it can run nothing."""

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for ``module.name``."""
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file needs")
        return _STAND_INS[module, name]


def _unpickle(path: Path) -> dict[str, Any]:
    try:
        found = _ArrayUnpickler(io.BytesIO(content(path)), encoding="latin1").load()
    except (
        pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError, ValueError, OverflowError, MemoryError
    ) as error:  # fmt: skip
        raise DataError(
            f"{path} is not a Python CIFAR file ({error}), expected a pickle of plain values and byte arrays. Nothing "
            "in it was executed. Get the file again."
        ) from error
    if not isinstance(found, dict):
        raise DataError(f"{path} holds a {type(found).__name__}, expected a dictionary. Get the file again.")
    return {key.decode("latin1") if isinstance(key, bytes) else str(key): value for key, value in found.items()}
