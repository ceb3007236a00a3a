"""Data sets for few-shot learning: base classes to train on, and new ones for choosing settings and for testing.

The classes that training does not see are the ``unseen`` ones of a :class:`FewShotDataset`, which also says which of
them are there for choosing settings.
"""

from __future__ import annotations

import csv
import io
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hypersphere.data.cifar import cifar100
from hypersphere.data.sources import Layout, Source, content, datasets, locate, sources
from hypersphere.data.splits import (
    DataError,
    Dataset,
    FolderSplit,
    TensorSplit,
    optional_module,
    stratified_split,
)
from hypersphere.errors import ArgumentError, check_range
from hypersphere.registry import did_you_mean


@dataclass(frozen=True, eq=False)
class FewShotDataset(Dataset):
    """A data set whose unseen classes are validation and novel ones.

    Args:
        validation: Names of the unseen classes that settings are chosen by; the other ones are novel.

    Example:
        >>> from hypersphere.data import load
        >>> parts = divide(load("digits"), validation=["8"], novel=["0", "9"])
        >>> parts.unseen_names, parts.validation, len(parts.class_names)
        (('0', '8', '9'), ('8',), 7)
    """

    validation: tuple[str, ...] = ()


def divide(data: Dataset, validation: Sequence[str], novel: Sequence[str]) -> FewShotDataset:
    """Hold classes out of training, some to choose settings by and some to test on.

    Args:
        data: The data set.
        validation: Names of the classes to choose settings by.
        novel: Names of the classes to test on.
    """
    held = data.hold_out([*validation, *novel])
    values = {field.name: getattr(held, field.name) for field in fields(Dataset)}
    return FewShotDataset(**values, validation=tuple(name for name in held.unseen_names if name in validation))


# ---------------------------------------------------------------------------------------------------- CIFAR-100

# The division of CIFAR-FS (Bertinetto et al., 2019): 64 base classes, 16 for validation, 20 novel ones.
_CIFAR_VALIDATION = (
    *("beaver", "beetle", "butterfly", "camel", "cattle", "crab", "crocodile", "flatfish", "lamp", "maple_tree"),
    *("motorcycle", "otter", "sea", "shark", "television", "tractor"),
)
_CIFAR_NOVEL = (
    *("baby", "bed", "bicycle", "chimpanzee", "fox", "leopard", "man", "pickup_truck", "plain", "poppy", "rocket"),
    *("rose", "snail", "sweet_pepper", "table", "telephone", "wardrobe", "whale", "woman", "worm"),
)


@datasets.register("cifar100-few-shot", aliases=("cifar-fs",))
def cifar100_few_shot(root: Path | None = None) -> FewShotDataset:
    """CIFAR-100 by classes: 64 to train on, 16 validation and 20 novel ones as in CIFAR-FS, 600 images each.

    The 500 published training images of a base class are trained on, and its 100 test images tested on.

    Args:
        root: Data root to search instead of the usual ones.
    """
    return divide(replace(cifar100(root), name="cifar100-few-shot"), _CIFAR_VALIDATION, _CIFAR_NOVEL)


# ----------------------------------------------------------------------------------------------------- Omniglot

_EVALUATION = "images_evaluation.zip"

sources["omniglot"] = Source(
    "omniglot",
    "https://github.com/brendenlake/omniglot/tree/master/python",
    (
        Layout(
            ("omniglot", "omniglot-py"),
            {
                "images_background.zip": "68d2efa1b9178cc56df9314c21c6e718",
                _EVALUATION: "6b91aef0f799c5bb55b94e3f2daec811",
            },
        ),
        Layout(
            ("omniglot",),
            {
                "images_background_small1.zip": "e704a628b5459e08445c13499850abc4",
                "images_background_small2.zip": "b75a71a51d3b13f821f212756fe481fd",
            },
        ),
    ),
)


@datasets.register("omniglot")
def omniglot(
    root: Path | None = None,
    size: int = 28,
    rotations: bool = False,
    validation_alphabets: tuple[str, ...] = ("Tagalog",),
    novel: tuple[str, ...] | None = None,
    test_fraction: float = 0.1,
    split_seed: int = 0,
) -> FewShotDataset:
    """Handwritten characters of many alphabets, 20 drawings each, bright on dark; whole alphabets are held out.

    Read from the published archives, the complete ones or the two small background sets with 242 characters.

    Args:
        root: Data root to search instead of the usual ones.
        size: Height and width to which the drawings (105x105) are brought.
        rotations: Make each character four classes, turned by 0, 90, 180 and 270 degrees.
        validation_alphabets: Alphabets to choose settings by.
        novel: Alphabets to test on; by default those of images_evaluation.zip, without it Balinese and Sanskrit.
        test_fraction: Share of the drawings of each trained character that is tested on.
        split_seed: Seed of that division.
    """
    check_range("size", size, 1)
    folder, layout = sources["omniglot"].find(root)
    drawings: dict[str, list[Tensor]] = {}  # by alphabet/character
    alphabets: dict[str, set[str]] = {}  # by archive
    for name in layout.md5:
        path = locate(folder, name)
        assert path is not None  # the folder was chosen because it holds it
        found = _read_drawings(path, size)
        alphabets[name] = {character.split("/")[0] for character in found}
        drawings |= found  # the small sets share alphabets, with the same drawings
    if novel is None:
        novel = tuple(sorted(alphabets.get(_EVALUATION, ("Balinese", "Sanskrit"))))
    known = sorted(set().union(*alphabets.values()))
    for argument, chosen in (("validation_alphabets", validation_alphabets), ("novel", novel)):
        for alphabet in chosen:
            if alphabet not in known:
                hint = did_you_mean(alphabet, known)
                raise ArgumentError(
                    argument, f"has {alphabet!r}, which is no alphabet here.{hint} There are {', '.join(known)}"
                )
    if both := set(validation_alphabets) & set(novel):
        found_in = f"got {', '.join(sorted(both))} in both"
        raise ArgumentError("validation_alphabets", f"must have no alphabet of novel, {found_in}")
    names = sorted(drawings)
    images = torch.stack([image for name in names for image in drawings[name]]).unsqueeze(1)
    labels = torch.arange(len(names)).repeat_interleave(torch.tensor([len(drawings[name]) for name in names]))
    if rotations:
        images = torch.cat([images.rot90(turns, (2, 3)) for turns in range(4)])
        labels = torch.cat([labels + turns * len(names) for turns in range(4)])
        names = [f"{name}/{angle}" for angle in (0, 90, 180, 270) for name in names]
    train, test = (
        TensorSplit(images[part], labels[part]) for part in stratified_split(labels, test_fraction, split_seed)
    )
    whole = Dataset("omniglot", tuple(names), train, test)
    chosen_names = [[name for name in names if name.split("/")[0] in part] for part in (validation_alphabets, novel)]
    return divide(whole, *chosen_names)


omniglot.renamed_options = {"validation": "validation_alphabets"}  # type: ignore[attr-defined]


def _read_drawings(path: Path, size: int) -> dict[str, list[Tensor]]:
    """The drawings ``(size, size)`` of an archive by ``alphabet/character``, in the order of their files."""
    image_module = optional_module("PIL.Image", "pillow")
    found: dict[str, list[Tensor]] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(content(path))) as archive:
            for member in sorted(archive.namelist()):
                parts = member.split("/")
                if len(parts) != 4 or not member.endswith(".png"):
                    continue
                with image_module.open(io.BytesIO(archive.read(member))) as image:
                    # Strokes are black on white, and thin: averaging keeps all of a stroke when it is made smaller.
                    small = image.convert("L").resize((size, size), image_module.Resampling.BOX)
                drawing = torch.from_numpy(255 - np.asarray(small))
                found.setdefault(f"{parts[1]}/{parts[2]}", []).append(drawing)
    except (OSError, ValueError, SyntaxError, struct.error, zlib.error, zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"{path} is not a complete archive of drawings ({error}). Get the file again.") from error
    if not found:
        raise DataError(f"{path} has no drawings as SET/ALPHABET/CHARACTER/*.png. Get the file again.")
    return found


# ------------------------------------------------------------------------------------------------- Mini-ImageNet

_CSV = {"train": "train.csv", "validation": "val.csv", "novel": "test.csv"}

sources["mini-imagenet"] = Source(
    "mini-imagenet",
    "https://github.com/twitter/meta-learning-lstm (the lists; their images, from https://image-net.org, go into a "
    "folder named images beside them)",
    (Layout(("mini-imagenet", "miniImagenet"), dict.fromkeys(_CSV.values())),),
)


@datasets.register("mini-imagenet")
def mini_imagenet(
    root: Path | None = None, size: int = 84, test_fraction: float = 0.1, split_seed: int = 0
) -> FewShotDataset:
    """Mini-ImageNet: photographs of 64 classes to train on, 16 validation and 20 novel ones, 600 each.

    Read from the published lists train.csv, val.csv and test.csv (filename,label) and the folder images beside them.

    Args:
        root: Data root to search instead of the usual ones.
        size: Height and width to which every image is brought.
        test_fraction: Share of the images of each trained class that is tested on.
        split_seed: Seed of that division.
    """
    check_range("size", size, 1)
    folder, _ = sources["mini-imagenet"].find(root)
    lists = {part: _read_list(folder, name) for part, name in _CSV.items()}
    owner: dict[str, str] = {}
    for part, rows in lists.items():
        for _, label in rows:
            if owner.setdefault(label, part) != part:
                raise DataError(
                    f"{folder / _CSV[part]} has the class {label!r}, which {_CSV[owner[label]]} has, too: the parts "
                    "must have no class in common. Get the files again."
                )
    names = sorted(owner)
    number = {name: index for index, name in enumerate(names)}
    files = [file for rows in lists.values() for file, _ in rows]
    labels = torch.tensor([number[label] for rows in lists.values() for _, label in rows])
    whole = FolderSplit(tuple(files), labels, (size, size))
    train, test = (whole.select(part, labels[part]) for part in stratified_split(labels, test_fraction, split_seed))
    held = ([name for name in names if owner[name] == part] for part in ("validation", "novel"))
    return divide(Dataset("mini-imagenet", tuple(names), train, test), *held)


def _read_list(folder: Path, name: str) -> list[tuple[Path, str]]:
    """Image files and class names of one list."""
    path = locate(folder, name)
    assert path is not None  # the folder was chosen because it holds it
    try:
        lines = list(csv.reader(io.StringIO(content(path).decode("utf-8"))))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is no list of images ({error}). Get the file again.") from error
    if not lines or lines[0] != ["filename", "label"] or len(lines) < 2:
        raise DataError(f"{path} must begin with the line 'filename,label' and name images, got {lines[:1]}.")
    images = folder / "images"
    present = {file.name for file in images.iterdir()} if images.is_dir() else set()
    rows = []
    for number, line in enumerate(lines[1:], 2):
        if len(line) != 2:
            raise DataError(f"{path}, line {number}: expected a file and its class, got {','.join(line)!r}.")
        if line[0] not in present:
            raise DataError(f"{images / line[0]} is missing, which {path}, line {number}, names. Put the images there.")
        rows.append((images / line[0], line[1]))
    return rows
