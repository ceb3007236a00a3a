"""Images with labels, and data sets of them with a training, a test and possibly an unseen part."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hypersphere.errors import ArgumentError, HypersphereError
from hypersphere.registry import did_you_mean


class DataError(HypersphereError):
    """Data that is missing or cannot be read; the message names the file and what to do."""


def optional_module(name: str, package: str) -> Any:
    """Import a module that only the workbench installs, so that the core runs without it.

    Args:
        name: Module to import (``"PIL.Image"``).
        package: What provides it, as it is installed (``"pillow"``).
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise DataError(
            f"this data needs {package}, which is not installed: pip install 'hypersphere[workbench]'"
        ) from error


def decode_image(file: Path) -> Any:
    """An image file as a PIL image of RGB, upright: turned as the orientation in its EXIF data says.

    Raises:
        DataError: The file is missing, damaged or cut short; the message names it.
    """
    image_module = optional_module("PIL.Image", "pillow")
    upright = optional_module("PIL.ImageOps", "pillow").exif_transpose
    try:
        with image_module.open(file) as image:
            return upright(image).convert("RGB")
    except FileNotFoundError as error:
        raise DataError(f"{file} does not exist: give an image file, or a folder of images.") from error
    except (OSError, SyntaxError, ValueError, struct.error, image_module.DecompressionBombError) as error:
        raise DataError(f"{file} cannot be decoded ({error}). Replace the file or delete it.") from error


IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm")
"""Endings of the names of files that are taken for images."""


def image_files(folder: Path) -> list[Path]:
    """The images in a folder and in its folders, in the order of their names, without hidden ones.

    Raises:
        DataError: There is none, or no such folder.
    """
    if not folder.exists():
        raise DataError(f"{folder} does not exist: give a folder of images.")
    files = (file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file())
    found = [file for file in sorted(files) if not any(part.startswith(".") for part in file.relative_to(folder).parts)]
    if not found:
        raise DataError(f"{folder} has no images (formats: {' '.join(IMAGE_SUFFIXES)}).")
    return found


def fit_image(picture: Any, size: tuple[int, int]) -> Tensor:
    """A PIL image of RGB as bytes ``(3, H, W)``: scaled to cover ``size``, then cropped at the centre."""
    fit = optional_module("PIL.ImageOps", "pillow").fit
    resampling = optional_module("PIL.Image", "pillow").Resampling.BILINEAR
    height, width = size
    return torch.from_numpy(np.array(fit(picture, (width, height), resampling))).permute(2, 0, 1).contiguous()


@dataclass(frozen=True, eq=False)
class TensorSplit:
    """Images, or other samples, that are resident as one tensor.

    Args:
        images: ``(N, C, H, W)`` uint8; samples of another kind are ``(N, ...)`` of another type.
        labels: ``(N,)`` int64.

    Example:
        >>> split = TensorSplit(torch.zeros(3, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 1]))
        >>> len(split), split.shape
        (3, (1, 8, 8))
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, ...]:
        """``(C, H, W)`` of one image, or the shape of one sample of another kind."""
        return tuple(self.images.shape[1:])

    @property
    def holds_images(self) -> bool:
        """Whether the samples are images, as bytes."""
        return self.images.dtype == torch.uint8

    def select(self, indices: Tensor, labels: Tensor) -> TensorSplit:
        """The images at ``indices`` ``(M,)`` with new ``labels`` ``(M,)``."""
        return TensorSplit(self.images[indices], labels)


@dataclass(frozen=True, eq=False)
class FolderSplit:
    """Images that are decoded from their files when they are needed.

    Args:
        files: One image file per label.
        labels: ``(N,)`` int64.
        size: ``(H, W)`` to which every image is brought.
    """

    files: tuple[Path, ...]
    labels: Tensor
    size: tuple[int, int]

    def __len__(self) -> int:
        return len(self.files)

    @property
    def shape(self) -> tuple[int, ...]:
        """``(3, H, W)`` of one image."""
        return 3, *self.size

    @property
    def holds_images(self) -> bool:
        """Whether the samples are images, as bytes."""
        return True

    def select(self, indices: Tensor, labels: Tensor) -> FolderSplit:
        """The images at ``indices`` ``(M,)`` with new ``labels`` ``(M,)``."""
        return FolderSplit(tuple(self.files[i] for i in indices.tolist()), labels, self.size)

    def join(self, other: FolderSplit, labels: Tensor) -> FolderSplit:
        """These images and then those of ``other``, with new ``labels``."""
        return FolderSplit(self.files + other.files, labels, self.size)

    def read(self, index: int) -> Tensor:
        """Decode one image: upright RGB, scaled by its shorter side to cover ``size``, then cropped at the centre.

        Returns:
            ``(3, H, W)`` uint8.

        Raises:
            DataError: The file is missing, damaged or cut short; the message names it.
        """
        return fit_image(decode_image(self.files[index]), self.size)


Split: TypeAlias = TensorSplit | FolderSplit


@dataclass(frozen=True, eq=False)
class Dataset:
    """A classification data set.

    Args:
        name: Its name in the registry.
        class_names: Name of each class; label ``i`` of ``train`` and ``test`` is class ``i``.
        train: Images to train on.
        test: Images to test on.
        unseen: Images of classes that are in neither ``train`` nor ``test``, for open-set verification.
        unseen_names: Name of each class of ``unseen``.
        context: Tensors that all samples share, such as the edges of a graph; a model takes them by ``attach``.
    """

    name: str
    class_names: tuple[str, ...]
    train: Split
    test: Split
    unseen: Split | None = None
    unseen_names: tuple[str, ...] = ()
    context: Mapping[str, Tensor] = field(default_factory=dict)

    def hold_out(self, classes: Sequence[int | str]) -> Dataset:
        """Move classes out of training and testing, for open-set verification.

        The other classes are relabelled ``0..K-1`` and the held-out ones ``0..U-1``, both in the order of
        ``class_names``; ``unseen`` gets the training and then the test images of the held-out classes. Classes
        that were held out before keep their labels and their place in front.

        Args:
            classes: Indices or names of the classes.

        Returns:
            The data set without these classes; the data set itself where none are given.

        Example:
            >>> from hypersphere.data import load
            >>> part = load("digits").hold_out([0, "7"])
            >>> part.class_names
            ('1', '2', '3', '4', '5', '6', '8', '9')
            >>> part.unseen_names, len(part.unseen)
            (('0', '7'), 357)
        """
        held = sorted({self._class_index(name) for name in classes})
        if not held:
            return self
        kept = [i for i in range(len(self.class_names)) if i not in held]
        if not kept:
            raise ArgumentError("hold_out", f"must leave at least one class of {self.name!r} to train on")
        unseen = _join(self._pick(self.train, held), self._pick(self.test, held))
        if self.unseen is not None:
            unseen = unseen.select(torch.arange(len(unseen)), unseen.labels + len(self.unseen_names))
            unseen = _join(self.unseen, unseen)
        return replace(
            self,
            class_names=tuple(self.class_names[i] for i in kept),
            train=self._pick(self.train, kept),
            test=self._pick(self.test, kept),
            unseen=unseen,
            unseen_names=(*self.unseen_names, *(self.class_names[i] for i in held)),
        )

    def imbalanced(self, keep: Mapping[int | str, float], *, graded: int = 0, seed: int = 0) -> Dataset:
        """Leave only part of the training images of some classes.

        Which images are left of a class depends on the seed and on how many, not on the other classes, and of two
        numbers the larger leaves those of the smaller one, too. Testing stays as it is.

        Args:
            keep: Index or name of a class -> how many of its images are left, or below 1 which share.
            graded: Number of images left of class 0; class k is left ``graded * (k + 1)``. 0: all.
            seed: Seed of the choice.

        Example:
            >>> from hypersphere.data import load
            >>> load("digits").imbalanced({0: 5}).train.labels.bincount()[:3].tolist()
            [5, 127, 124]
        """
        labels = self.train.labels
        counts = labels.bincount(minlength=len(self.class_names))
        left = torch.arange(1, len(counts) + 1) * graded if graded else counts.clone()
        for name, amount in keep.items():
            index = self._class_index(name, "keep")
            left[index] = amount if amount >= 1 else round(amount * int(counts[index]))
        for index in (left > counts).nonzero().flatten().tolist():
            raise ArgumentError(
                "graded" if graded else "keep",
                f"asks for {left[index]} images of {self.class_names[index]!r}, which has {counts[index]}",
            )
        chosen = _some_of_each(labels, left, seed)
        return replace(self, train=self.train.select(chosen, labels[chosen]))

    def with_validation(self, count: int, *, seed: int = 0) -> Dataset:
        """Test on images that leave training, so that settings are chosen without a look at the real test images.

        They are those of a seed, whatever a run draws, with the same share of each class up to one image; at least one
        image of each class stays. The test images that were are gone.

        Args:
            count: How many; 0: all stays as it is.
            seed: Seed of the choice.

        Example:
            >>> from hypersphere.data import load
            >>> part = load("digits").with_validation(100)
            >>> len(part.train), len(part.test), part.test.labels.bincount().tolist()
            (1158, 100, [10, 10, 10, 10, 10, 10, 10, 10, 10, 10])
        """
        if not count:
            return self
        labels = self.train.labels
        if self.context:
            shared = ", ".join(self.context)
            raise ArgumentError("validation", f"must be 0 for {self.name!r}, whose samples share {shared}, got {count}")
        if self.unseen is not None:
            message = f"must be 0 for {self.name!r}, which has classes to choose or test by already, got {count}"
            raise ArgumentError("validation", message)
        if labels.dim() != 1 or labels.is_floating_point():
            raise ArgumentError("validation", f"must be 0 for {self.name!r}, which has no labels of classes")
        counts = labels.bincount(minlength=len(self.class_names))
        room = (counts - 1).clamp(min=0)
        if not 0 < count <= int(room.sum()):
            raise ArgumentError(
                "validation",
                f"must be between 0 and {int(room.sum())} for the {len(labels)} training images of {self.name!r}, of "
                f"which one of each class stays, got {count}",
            )
        taken = _shares(counts.tolist(), room.tolist(), count)
        chosen = _some_of_each(labels, torch.tensor(taken), seed)
        stays = torch.ones(len(labels), dtype=torch.bool)
        stays[chosen] = False
        left = stays.nonzero().flatten()
        return replace(
            self, train=self.train.select(left, labels[left]), test=self.train.select(chosen, labels[chosen])
        )

    def _class_index(self, name: int | str, argument: str = "hold_out") -> int:
        if isinstance(name, str) and name in self.class_names:
            return self.class_names.index(name)
        if isinstance(name, int) and 0 <= name < len(self.class_names):
            return name
        hint = did_you_mean(name, self.class_names) if isinstance(name, str) else ""
        listed = ", ".join(f"{i} {known}" for i, known in enumerate(self.class_names))
        raise ArgumentError(argument, f"has {name!r}, which is no class of {self.name!r}.{hint} Classes: {listed}")

    def _pick(self, split: Split, classes: Sequence[int]) -> Split:
        """The images of ``classes``, each labelled with the position of its class there."""
        position = torch.full((len(self.class_names),), -1)
        position[list(classes)] = torch.arange(len(classes))
        labels = position[split.labels]
        indices = (labels >= 0).nonzero().flatten()
        return split.select(indices, labels[indices])


def _some_of_each(labels: Tensor, numbers: Tensor, seed: int) -> Tensor:
    """Places, ascending, of so many images of each class: the first in an order that depends on the seed alone."""
    counts = labels.bincount(minlength=len(numbers))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    by_class = order[labels[order].argsort(stable=True)]
    place = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[by_class]]  # within the class
    return by_class[place < numbers[labels[by_class]]].sort().values


def _shares(counts: Sequence[int], room: Sequence[int], total: int) -> list[int]:
    """``total`` in the proportions of ``counts``, none above its ``room``; what rounding leaves goes by remainders."""
    everything = sum(counts)
    shares = [total * count // everything for count in counts]
    by_remainder = sorted(range(len(counts)), key=lambda index: -(total * counts[index] % everything))
    left = total - sum(shares)
    while left:
        for index in by_remainder:
            if left and shares[index] < room[index]:
                shares[index] += 1
                left -= 1
    return shares


def _join(first: Split, second: Split) -> Split:
    labels = torch.cat([first.labels, second.labels])
    if isinstance(first, TensorSplit) and isinstance(second, TensorSplit):
        return TensorSplit(torch.cat([first.images, second.images]), labels)
    if isinstance(first, FolderSplit) and isinstance(second, FolderSplit):
        return first.join(second, labels)
    raise ArgumentError("splits", "of one data set must be of one kind, got a TensorSplit and a FolderSplit")


def evaluation_batches(split: Split, batch_size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """All samples and labels of a split in order."""
    for start in range(0, len(split), batch_size):
        chosen = slice(start, start + batch_size)
        if isinstance(split, TensorSplit):
            images = split.images[chosen]
        else:
            images = torch.stack([split.read(i) for i in range(len(split))[chosen]])
        yield images.to(device), split.labels[chosen].to(device)


def stratified_split(labels: Tensor, test_fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Divide images into a training and a test part with the same share of each class.

    Every class with two or more images is in both parts; a single image goes into training.

    Args:
        labels: ``(N,)`` int64.
        test_fraction: Share of each class that is tested on, between 0 and 1.
        seed: The same seed gives the same parts.

    Returns:
        Indices of the training and of the test part, each in ascending order.

    Example:
        >>> train, test = stratified_split(torch.tensor([0, 0, 0, 1, 1, 1]), 1 / 3, seed=0)
        >>> len(train), len(test)
        (4, 2)
    """
    if not 0 < test_fraction < 1:
        raise ArgumentError("test_fraction", f"must be between 0 and 1, got {test_fraction}")
    generator = torch.Generator().manual_seed(seed)
    tested = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero().flatten()
        count = min(max(1, round(len(members) * test_fraction)), len(members) - 1)
        tested[members[torch.randperm(len(members), generator=generator)[:count]]] = True
    return (~tested).nonzero().flatten(), tested.nonzero().flatten()
