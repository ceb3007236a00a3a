"""Where published data sets lie on disk, how they are found, checked and loaded."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from hypersphere.data.splits import DataError, Dataset, TensorSplit
from hypersphere.registry import Registry

ROOT_VARIABLE = "HYPERSPHERE_DATA"

#: Every data set by name; a factory takes the data root (or ``None``) and its own options.
datasets: Registry[Dataset] = Registry("dataset", positional=("root",), members=("hypersphere.tasks.*.data",))


def load(
    name: str,
    root: Path | None = None,
    *,
    hold_out: Sequence[int | str] = (),
    imbalance: Mapping[str, Any] | None = None,
    held_back: int = 0,
    **options: Any,
) -> Dataset:
    """Load a data set.

    Args:
        name: One of ``datasets``.
        root: Data root to search instead of the usual ones (see :func:`data_roots`).
        hold_out: Classes, by index or name, to keep for open-set verification (see :meth:`Dataset.hold_out`).
        imbalance: Arguments of :meth:`Dataset.imbalanced`, which makes classes rare in training.
        held_back: How many training images are tested on in place of the test images
            (see :meth:`Dataset.with_validation`); they are taken before classes are made rare.
        **options: Options of that data set.

    Example:
        >>> digits = load("digits", test_fraction=0.2)
        >>> digits.train.shape, len(digits.class_names)
        ((1, 8, 8), 10)
    """
    data = datasets.create(name, root, **options).with_validation(held_back)
    data = (data.imbalanced(**imbalance) if imbalance else data).hold_out(hold_out)
    for part, split in (("training", data.train), ("test", data.test)):
        if not len(split):
            raise DataError(f"{name} has no {part} images: add some, or change test_fraction")
    return data


def data_roots(root: Path | None) -> tuple[Path, ...]:
    """The folders searched for data sets, in this order.

    They are ``root`` where it is given, else the environment variable ``HYPERSPHERE_DATA`` where it is set, else
    ``./data`` and ``~/.cache/hypersphere/data``.

    Example:
        >>> [folder.as_posix() for folder in data_roots(Path("elsewhere"))]
        ['elsewhere']
    """
    if root is not None:
        return (root,)
    if variable := os.environ.get(ROOT_VARIABLE):
        return (Path(variable).expanduser(),)
    return Path("data"), Path.home() / ".cache" / "hypersphere" / "data"


def locate(folder: Path, name: str) -> Path | None:
    """The file ``name`` of ``folder``, plain or with ``.gz`` added, or ``None``."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def content(path: Path) -> bytes:
    """The bytes of a file, decompressed where it ends in ``.gz``."""
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} is not a complete gzip file ({error}). Get the file again or put the decompressed one there."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}).") from error


def labelled_images(
    images: NDArray[np.uint8], labels: NDArray[np.uint8], class_names: Sequence[str], path: Path
) -> TensorSplit:
    """A split of these arrays; ``path`` is named where a label has no class.

    Args:
        images: ``(N, C, H, W)``.
        labels: ``(N,)``.
        class_names: Name of each class.
        path: The file that the labels come from.
    """
    if len(labels) and labels.max() >= len(class_names):
        raise DataError(
            f"{path} has the label {labels.max()} at image {labels.argmax()}, expected 0 to {len(class_names) - 1}. "
            "The file is damaged or belongs to another data set."
        )
    # The arrays may be views of read-only bytes, which PyTorch does not take.
    return TensorSplit(torch.from_numpy(images.copy()), torch.from_numpy(labels.astype(np.int64)))


@dataclass(frozen=True)
class Layout:
    """One form in which a data set is published.

    Args:
        folders: Names of the folder below a data root, the recommended one first.
        md5: MD5 of the (decompressed) content of each file, ``None`` where none is known.
        records: Gives a file's images and labels in one canonical form, however the file packs them.
        records_md5: MD5 of that form, for files that may be packed in more than one way.
    """

    folders: tuple[str, ...]
    md5: Mapping[str, str | None]
    records: Callable[[Path], bytes] = content
    records_md5: Mapping[str, str] = field(default_factory=dict)

    def candidates(self, root: Path) -> Iterator[Path]:
        """The folders to look in: those below ``root``, and ``root`` itself where it is such a folder."""
        for folder in self.folders:
            yield root / folder
            names = Path(folder).parts
            if root.absolute().parts[-len(names) :] == names:
                yield root

    def verify(self, folder: Path) -> str:
        """Compare every file with its checksum and return the result in words.

        Raises:
            DataError: A file is damaged; the message names it.
        """
        repacked = []
        for name, expected in self.md5.items():
            path = locate(folder, name)
            assert path is not None  # only folders that hold every file are verified
            found = _md5(content(path))
            if expected in (None, found):
                continue
            if name not in self.records_md5 or _md5(self.records(path)) != self.records_md5[name]:
                raise DataError(f"{path} has the MD5 {found}, expected {expected}. Get the file again.")
            repacked.append(name)
        return f"content ok (not the published file: {', '.join(repacked)})" if repacked else "checksums ok"


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Source:
    """Where a data set comes from: a published one that users put on their disk themselves, or one without files.

    Args:
        name: Its name in the registry.
        home: Address of its official page.
        layouts: The forms in which it is read, the preferred one first; none: it needs no files, and ``home`` says why.
        contents: Reads it below a data root and says what is there; by default as the data set of that name.
    """

    name: str
    home: str
    layouts: tuple[Layout, ...]
    contents: Callable[[Path | None], str] | None = None

    def find(self, root: Path | None) -> tuple[Path, Layout]:
        """The first folder that holds every file of a layout, and that layout.

        Raises:
            DataError: There is none; the message says where the set is published and where its files belong.
        """
        looked = []
        for base in data_roots(root):
            for layout in self.layouts:
                for folder in layout.candidates(base):
                    lacking = [name for name in layout.md5 if locate(folder, name) is None]
                    if not lacking:
                        return folder, layout
                    exists = folder.is_dir()
                    looked.append(f"{folder} ({'lacks ' + ', '.join(lacking) if exists else 'no such folder'})")
        raise DataError("\n".join([f"{self.name} was not found. Looked in:", *_indent(looked), *self._advice(root)]))

    def _advice(self, root: Path | None) -> Iterator[str]:
        yield f"It is published at {self.home}. Its files and their MD5 belong"
        for number, layout in enumerate(self.layouts):
            yield f"{'or ' if number else ''}into {data_roots(root)[0] / layout.folders[0]}:"
            yield from _indent(f"{md5 or 'no MD5 known':32}  {name}" for name, md5 in layout.md5.items())
        folders = " or ".join(layout.folders[0] for layout in self.layouts)
        yield f"Or give the folder that holds {folders} as --data-root or in {ROOT_VARIABLE}."


def _indent(lines: Sequence[str] | Iterator[str]) -> list[str]:
    return [f"  {line}" for line in lines]


#: The published sets by name.
sources: dict[str, Source] = {}


@dataclass(frozen=True)
class Status:
    """What :func:`inventory` found of one data set."""

    name: str
    state: Literal["found", "missing", "corrupt", "embedded"]
    folder: Path | None
    detail: str


def inventory(root: Path | None, *, verify: bool) -> list[Status]:
    """Say for each data set with a fixed place whether it is there.

    Args:
        root: Data root to search instead of the usual ones.
        verify: Also read every file and compare checksums, image counts and label ranges (takes seconds).

    Example:
        >>> [(row.name, row.state) for row in inventory(Path("nowhere"), verify=False)][:2]
        [('celeba-subset', 'missing'), ('cifar10', 'missing')]
    """
    len(datasets)  # reads all of its members, which bring their sources along
    rows = [_status(source, root, verify=verify) for source in sources.values()]
    return sorted(rows, key=lambda row: row.name)


def _status(source: Source, root: Path | None, *, verify: bool) -> Status:
    if not source.layouts:
        return Status(source.name, "embedded", None, source.home)
    try:
        folder, layout = source.find(root)
    except DataError as error:
        return Status(source.name, "missing", None, str(error))
    if not verify:
        return Status(source.name, "found", folder, f"{len(layout.md5)} files, not verified")
    try:
        result = layout.verify(folder)
        counts = source.contents(root) if source.contents is not None else _counts(datasets.create(source.name, root))
    except DataError as error:
        return Status(source.name, "corrupt", folder, str(error))
    return Status(source.name, "found", folder, f"{len(layout.md5)} files, {counts}, {result}")


def _counts(data: Dataset) -> str:
    return f"{len(data.train):,} training and {len(data.test):,} test images"
