"""Images in folders, one folder for each class."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hypersphere.data.sources import data_roots, datasets
from hypersphere.data.splits import (
    IMAGE_SUFFIXES,
    DataError,
    Dataset,
    FolderSplit,
    decode_image,
    optional_module,
    stratified_split,
)
from hypersphere.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class WindowedSplit(FolderSplit):
    """Images that are decoded larger than a model sees them: preprocessing cuts a window of ``size`` out.

    Args:
        files: One image file per label.
        labels: ``(N,)`` int64.
        size: ``(H, W)`` of the window.
        whole: ``(H, W)`` to which every image is stretched, whatever its proportions.

    Example:
        >>> images = WindowedSplit((Path("cat.jpg"),), torch.tensor([0]), (224, 224), (256, 256))
        >>> images.shape
        (3, 224, 224)
    """

    whole: tuple[int, int]

    def select(self, indices: Tensor, labels: Tensor) -> WindowedSplit:
        """The images at ``indices`` ``(M,)`` with new ``labels`` ``(M,)``."""
        return WindowedSplit(tuple(self.files[i] for i in indices.tolist()), labels, self.size, self.whole)

    def join(self, other: FolderSplit, labels: Tensor) -> WindowedSplit:
        """These images and then those of ``other``, with new ``labels``."""
        return WindowedSplit(self.files + other.files, labels, self.size, self.whole)

    def read(self, index: int) -> Tensor:
        """Decode one image: upright RGB, stretched to ``whole``.

        Returns:
            ``(3, H, W)`` uint8, of the height and width of ``whole``.

        Raises:
            DataError: The file is missing, damaged or cut short; the message names it.
        """
        resampling = optional_module("PIL.Image", "pillow").Resampling.BILINEAR
        stretched = decode_image(self.files[index]).resize(self.whole[::-1], resampling)
        return torch.from_numpy(np.array(stretched)).permute(2, 0, 1).contiguous()


@datasets.register("image-folder")
def image_folder(
    root: Path | None,
    path: str,
    size: tuple[int, int],
    test_fraction: float = 0.3,
    split_seed: int = 0,
    stretch: tuple[int, int] | None = None,
) -> Dataset:
    """Your own images: path/train/CLASS/* with path/test/CLASS/* (or val), or path/CLASS/* to be divided.

    Args:
        root: Where a relative ``path`` is looked for after the working folder.
        path: Folder of the data set.
        size: Height and width to which every image is brought.
        test_fraction: Share of each class that is tested on, where there is no test folder.
        split_seed: Seed of that division.
        stretch: Height and width to which every image is stretched first, whatever its proportions. The model then
            sees a window of ``size``: a random one in training, the central one otherwise.
    """
    if len(size) != 2 or min(size) < 1:
        raise ArgumentError("size", f"must be a height and a width of at least 1, got {size}")
    if stretch is not None and (len(stretch) != 2 or stretch[0] < size[0] or stretch[1] < size[1]):
        raise ArgumentError("stretch", f"must be a height and a width of at least size = {size}, got {stretch}")
    height, width = size
    folder = _find(path, root)
    skipped: list[Path] = []
    train_folder = folder / "train"
    if train_folder.is_dir():
        test_folder = next((folder / name for name in ("test", "val") if (folder / name).is_dir()), None)
        if test_folder is None:
            raise DataError(
                f"{folder} has a folder train but neither test nor val. Add one, or move the class folders from "
                "train into it to have them divided."
            )
        class_names = _class_names(train_folder)
        if different := set(class_names) ^ set(_class_names(test_folder)):
            raise DataError(
                f"{train_folder} and {test_folder} must have the same class folders; only one of them has "
                f"{', '.join(sorted(different))}."
            )
        train = _scan(train_folder, class_names, (height, width), skipped)
        test = _scan(test_folder, class_names, (height, width), skipped)
    else:
        class_names = _class_names(folder)
        everything = _scan(folder, class_names, (height, width), skipped)
        train, test = (
            everything.select(part, everything.labels[part])
            for part in stratified_split(everything.labels, test_fraction, split_seed)
        )
    if skipped:
        listed = "\n".join(f"  {file}" for file in skipped)
        warnings.warn(f"{len(skipped)} unreadable image(s) left out of {folder}:\n{listed}", stacklevel=2)
    if stretch is not None:
        train, test = (WindowedSplit(part.files, part.labels, part.size, stretch) for part in (train, test))
    return Dataset("image-folder", class_names, train, test)


def _find(path: str, root: Path | None) -> Path:
    given = Path(path).expanduser()
    looked = [given] if given.is_absolute() else [given, *(base / given for base in data_roots(root))]
    for folder in looked:
        if folder.is_dir():
            return folder
    raise DataError(f"there is no image folder {path!r}. Looked for {', '.join(map(str, looked))}.")


def _class_names(folder: Path) -> tuple[str, ...]:
    names = sorted(item.name for item in folder.iterdir() if item.is_dir() and not item.name.startswith("."))
    if not names:
        raise DataError(f"{folder} has no class folders. Put the images of each class into a folder of its own there.")
    return tuple(names)


def _scan(folder: Path, class_names: Sequence[str], size: tuple[int, int], skipped: list[Path]) -> FolderSplit:
    """The images of every class; files that are no images are added to ``skipped``."""
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(class_names):
        candidates = sorted(file for file in (folder / name).rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
        unreadable = [file for file in candidates if not _has_image_header(file)]
        readable = [file for file in candidates if file not in unreadable]
        if not readable:
            raise DataError(
                f"class folder {folder / name} has no readable image ({len(unreadable)} unreadable, formats: "
                f"{' '.join(IMAGE_SUFFIXES)}). Add images or delete the folder."
            )
        skipped += unreadable
        files += readable
        labels += [label] * len(readable)
    return FolderSplit(tuple(files), torch.tensor(labels), size)


def _has_image_header(file: Path) -> bool:
    image_module = optional_module("PIL.Image", "pillow")
    try:
        with image_module.open(file):
            return True
    except (OSError, SyntaxError, ValueError, struct.error, image_module.DecompressionBombError):
        return False


image_folder.later_options = {"stretch": None}  # type: ignore[attr-defined]
image_folder.contract = {"options": {"path": "photographs", "size": (8, 8)}}  # type: ignore[attr-defined]
