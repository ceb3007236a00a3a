"""Faces: lists of pairs as LFW has them, landmarks, images that are aligned when they are read, and part of CelebA."""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hypersphere.data.sources import Layout, Source, content, datasets, labelled_images, locate, sources
from hypersphere.data.splits import (
    IMAGE_SUFFIXES,
    DataError,
    Dataset,
    FolderSplit,
    TensorSplit,
    decode_image,
    optional_module,
    stratified_split,
)
from hypersphere.errors import ArgumentError, check_range
from hypersphere.tasks.faces.align import align

# ------------------------------------------------------------------------------------------------------- pairs


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of images, each of one person or of two, in folds.

    Args:
        images: The different images as ``NAME/NAME_0001``, without a suffix.
        left: ``(P,)`` int64, the first image of each pair as its place in ``images``.
        right: ``(P,)`` int64, the second one.
        same: ``(P,)`` booleans, whether a pair is of one person.
        fold: ``(P,)`` int64, 0 to folds - 1.

    Example:
        >>> print(parse_pairs(["1", "Ann	1	2", "Ann	1	Bob	1"]))
        2 pairs (1 of one person, 1 of two) of 3 images of 2 people in 1 fold
    """

    images: tuple[str, ...]
    left: Tensor
    right: Tensor
    same: Tensor
    fold: Tensor

    def __len__(self) -> int:
        return len(self.same)

    @property
    def folds(self) -> int:
        """Number of folds."""
        return int(self.fold.max()) + 1

    @property
    def people(self) -> Tensor:
        """Number of the person in each of ``images``, ``(len(images),)`` int64, for intervals that draw people."""
        numbers: dict[str, int] = {}
        return torch.tensor([numbers.setdefault(image.partition("/")[0], len(numbers)) for image in self.images])

    def __str__(self) -> str:
        same, people = int(self.same.sum()), int(self.people.max()) + 1
        return (
            f"{len(self):,} pairs ({same:,} of one person, {len(self) - same:,} of two) of {len(self.images):,} images "
            f"of {people:,} people in {self.folds} fold{'s' * (self.folds > 1)}"
        )


def read_pairs(path: Path) -> Pairs:
    """Read a list of pairs in the form of LFW, ``pairs.txt`` or ``pairsDevTest.txt``; see :func:`parse_pairs`.

    Raises:
        DataError: It cannot be read or is not such a list; the message names the file and the line.

    Example:
        >>> read_pairs(Path("nowhere/pairs.txt"))
        Traceback (most recent call last):
        hypersphere.data.splits.DataError: nowhere/pairs.txt cannot be read ([Errno 2] No such file or directory: ...
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}).") from error
    return parse_pairs(lines, str(path))


def parse_pairs(lines: Sequence[str], source: str = "pairs") -> Pairs:
    """The pairs of a list in the form of LFW.

    The first line is the number of folds and that of pairs of one person in each, or the latter alone where there is
    one fold. Each fold has so many lines ``NAME i j``, images i and j of one person, and as many lines
    ``NAME i OTHER j``. Columns are separated by tabs, or by blanks where a line has no tab.

    Args:
        lines: The lines.
        source: What messages call the list.

    Example:
        >>> pairs = parse_pairs(["1 1", "Ann 1 2", "Ann 1 Bob 1"])
        >>> pairs.images, pairs.right.tolist(), pairs.same.tolist()
        (('Ann/Ann_0001', 'Ann/Ann_0002', 'Bob/Bob_0001'), [1, 2], [True, False])
    """
    header = lines[0].split() if lines else []
    if len(header) not in (1, 2) or not all(word.isdecimal() and int(word) for word in header):
        raise DataError(
            f"{source}, line 1: expected the number of folds and of pairs of one person in each (10 300 in LFW), got "
            f"{lines[0] if lines else 'an empty list'!r}."
        )
    each, folds = int(header[-1]), int(header[0]) if len(header) == 2 else 1
    body = lines[1:]
    while body and not body[-1].strip():
        body = body[:-1]
    if len(body) != 2 * folds * each:
        raise DataError(
            f"{source} has {len(body):,} pairs, but its first line announces {2 * folds * each:,}: {folds} folds of "
            f"{each} of one person and {each} of two. It was cut short or changed."
        )
    places: dict[str, int] = {}
    rows = []
    for number, line in enumerate(body):
        same = number // each % 2 == 0
        names = _pair(line, same, f"{source}, line {number + 2}")
        rows.append([*(places.setdefault(name, len(places)) for name in names), same, number // (2 * each)])
    left, right, kind, fold = torch.tensor(rows).T.contiguous()
    return Pairs(tuple(places), left, right, kind.bool(), fold)


def _pair(line: str, same: bool, place: str) -> tuple[str, str]:
    """The two images of a line."""
    words = [word.strip() for word in line.split("\t")] if "\t" in line else line.split()
    expected = "NAME i j" if same else "NAME i OTHER j"
    numbers = (words[1], words[-1]) if len(words) == len(expected.split()) else ()
    if not numbers or not all(number.isdecimal() for number in numbers) or not (words[0] and words[-2]):
        raise DataError(f"{place}: expected {expected}, got {line!r}.")
    names = (words[0], words[0] if same else words[2])
    if not same and names[0] == names[1]:
        raise DataError(f"{place}: expected a pair of two people, got {names[0]} twice.")
    first, second = (f"{name}/{name}_{int(number):04d}" for name, number in zip(names, numbers, strict=True))
    return first, second


# ---------------------------------------------------------------------------------------- images and landmarks


def find_images(folder: Path, images: Iterable[str]) -> dict[str, Path]:
    """The files of images below a folder, whatever their format; those that are not there are left out.

    Args:
        folder: Such as the one of LFW, with ``NAME/NAME_0001.jpg``.
        images: Names, with or without a suffix.

    Raises:
        DataError: There is no such folder.

    Example:
        >>> find_images(Path("."), ["Nobody/Nobody_0001"])
        {}
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}.")
    found = {}
    for name in images:
        stem = folder / name
        for path in (stem, *(stem.with_name(stem.name + suffix) for suffix in IMAGE_SUFFIXES)):
            if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file():
                found[name] = path
                break
    return found


def read_landmarks(path: Path) -> dict[str, Tensor]:
    """Landmarks by image: a line for each, its name and x and y of the five points.

    Columns are separated by tabs, or by blanks where a line has no tab. A suffix of an image is left out of its name,
    so that names are those of :class:`Pairs`.

    Returns:
        ``(5, 2)`` for each image.

    Raises:
        DataError: The file cannot be read or a line is not of that form; the message names it.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w") as file:
        ...     _ = file.write("Ann/Ann_0001.jpg 40 80 84 85 65 102 31 120 84 126")
        ...     file.flush()
        ...     read_landmarks(Path(file.name))["Ann/Ann_0001"][0]
        tensor([40., 80.])
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}).") from error
    found = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name, *words = [word.strip() for word in line.split("\t")] if "\t" in line else line.split()
        try:
            values = [float(word) for word in words]
        except ValueError:
            values = []
        if len(values) != 10 or not all(map(math.isfinite, values)):
            raise DataError(
                f"{path}, line {number}: expected the name of an image and 10 numbers, x and y of left eye, right eye, "
                f"nose, left and right corner of the mouth, got {line!r}."
            )
        found[_without_suffix(name)] = torch.tensor(values).view(5, 2)
    return found


def write_landmarks(path: Path, landmarks: Mapping[str, Tensor]) -> None:
    """Write landmarks ``(5, 2)`` of images in the form that :func:`read_landmarks` reads.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_landmarks(Path(folder) / "landmarks.txt", {"Ann/Ann_0001.jpg": torch.ones(5, 2)})
        ...     len(read_landmarks(Path(folder) / "landmarks.txt"))
        1
    """
    lines = (
        "\t".join([name, *(f"{value:g}" for value in points.flatten().tolist())]) for name, points in landmarks.items()
    )
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _without_suffix(name: str) -> str:
    return name[: -len(Path(name).suffix)] if Path(name).suffix.lower() in IMAGE_SUFFIXES else name


@dataclass(frozen=True, eq=False)
class AlignedSplit(FolderSplit):
    """Faces that are decoded and aligned when they are needed.

    Args:
        files: One image file per label.
        labels: ``(N,)`` int64.
        size: ``(H, W)`` of the aligned images.
        landmarks: ``(N, 5, 2)`` in each image as it is shown, upright; see :func:`hypersphere.tasks.faces.align.align`.

    Example:
        >>> faces = AlignedSplit((Path("ann.jpg"),), torch.tensor([0]), (112, 96), torch.rand(1, 5, 2))
        >>> len(faces), faces.shape
        (1, (3, 112, 96))
    """

    landmarks: Tensor

    def select(self, indices: Tensor, labels: Tensor) -> AlignedSplit:
        """The images at ``indices`` ``(M,)`` with new ``labels`` ``(M,)``."""
        files = tuple(self.files[i] for i in indices.tolist())
        return AlignedSplit(files, labels, self.size, self.landmarks[indices])

    def join(self, other: FolderSplit, labels: Tensor) -> AlignedSplit:
        """These images and then those of ``other``, with new ``labels``."""
        if not isinstance(other, AlignedSplit):
            raise ArgumentError("splits", "of one data set must all be aligned or none of them")
        points = torch.cat([self.landmarks, other.landmarks])
        return AlignedSplit(self.files + other.files, labels, self.size, points)

    def read(self, index: int) -> Tensor:
        """Decode and align one image.

        Returns:
            ``(3, H, W)`` uint8.

        Raises:
            DataError: The file is missing, damaged or cut short, or its landmarks are at one place; the message names
                it.
        """
        face = torch.from_numpy(np.array(decode_image(self.files[index]))).permute(2, 0, 1)[None]
        try:
            return align(face, self.landmarks[index, None], self.size)[0]
        except ArgumentError as error:
            raise DataError(f"{self.files[index]} cannot be aligned: {error}.") from error


def lfw_pairs(root: Path | None = None, size: tuple[int, int] = (112, 96)) -> tuple[Pairs, AlignedSplit]:
    """LFW's pairs and the faces that they are of, aligned by their landmarks.

    Args:
        root: Data root with a folder ``lfw``, which holds ``images``, ``landmarks.txt`` and ``pairs.txt``.
        size: ``(H, W)`` of the aligned faces.

    Returns:
        The pairs, and their faces in the order of ``Pairs.images``.

    Raises:
        DataError: The folder, an image or its landmarks are missing.

    Example:
        >>> pairs, faces = lfw_pairs()  # doctest: +SKIP
        >>> len(pairs), faces.shape  # doctest: +SKIP
        (6000, (3, 112, 96))
    """
    folder, _ = sources["lfw"].find(root)
    pairs, landmarks = read_pairs(folder / "pairs.txt"), read_landmarks(folder / "landmarks.txt")
    files = find_images(folder / "images", pairs.images)
    for what, known in (("image", files), ("line in landmarks.txt", landmarks)):
        lacking = [image for image in pairs.images if image not in known]
        if lacking:
            raise DataError(f"{folder} has no {what} for {len(lacking):,} faces of pairs.txt, such as {lacking[0]}.")
    points = torch.stack([landmarks[image] for image in pairs.images])
    return pairs, AlignedSplit(tuple(files[image] for image in pairs.images), pairs.people, size, points)


sources["lfw"] = Source(
    "lfw",
    "http://vis-www.cs.umass.edu/lfw (with landmarks of the faces and LFW's own list of pairs)",
    (Layout(("lfw",), {"pairs.txt": None, "landmarks.txt": None}),),
    lambda root: str(lfw_pairs(root)[0]),
)


# ------------------------------------------------------------------------------------------------- part of CelebA

_CELEBA = "celeba_subset_train_aligned112x96.npz"

sources["celeba-subset"] = Source(
    "celeba-subset",
    "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html (this is a part of it, aligned and packed)",
    (Layout(("celeba-subset", "faces"), {_CELEBA: "b5d227da4f48f2628280f37505dcda2d"}),),
)


@datasets.register("celeba-subset")
def celeba_subset(
    root: Path | None = None, test_fraction: float = 0.1, split_seed: int = 0, unseen_identities: int = 0
) -> Dataset:
    """Faces of 282 people of CelebA, aligned to 112x96 colour, 6,194 in all; a class is a person.

    Args:
        root: Data root to search instead of the usual ones.
        test_fraction: Share of the images of each person that is tested on.
        split_seed: Seed of the division into training and test images.
        unseen_identities: Number of people, the last ones, kept out of training for open-set verification.
    """
    folder, _ = sources["celeba-subset"].find(root)
    path = locate(folder, _CELEBA)
    assert path is not None  # the folder was chosen because it holds it
    try:
        with np.load(io.BytesIO(content(path))) as packed:
            images = _unpack(packed["webp"], packed["offset"], (112, 96), 10)[: len(packed["person"])]
            people, names = packed["person"], tuple(map(str, packed["celeba_identity"].tolist()))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is not the packed part of CelebA ({error}). Get the file again.") from error
    if len(images) != len(people):
        raise DataError(f"{path} has {len(images):,} images, but {len(people):,} labels. Get the file again.")
    check_range("unseen_identities", unseen_identities, 0, len(names) - 1)
    whole = labelled_images(images, people, names, path)
    train, test = (
        TensorSplit(whole.images[part], whole.labels[part])
        for part in stratified_split(whole.labels, test_fraction, split_seed)
    )
    return Dataset("celeba-subset", names, train, test).hold_out(range(len(names) - unseen_identities, len(names)))


def _unpack(
    packed: NDArray[np.uint8], offsets: NDArray[np.int64], size: tuple[int, int], side: int
) -> NDArray[np.uint8]:
    """Images ``(N, 3, H, W)`` from mosaics of ``side`` times ``side`` of them that lie end to end."""
    image_module = optional_module("PIL.Image", "pillow")
    height, width = size
    parts = []
    for piece in np.split(packed, offsets[1:-1]):
        with image_module.open(io.BytesIO(piece.tobytes())) as image:
            mosaic = np.asarray(image.convert("RGB")).reshape(side, height, side, width, 3)
        parts.append(mosaic.transpose(0, 2, 4, 1, 3).reshape(-1, 3, height, width))
    return np.concatenate(parts)
