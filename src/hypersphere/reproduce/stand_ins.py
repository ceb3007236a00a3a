"""A few samples of noise in the shape of a data set, on which a table runs through where its data are not there."""

from __future__ import annotations

import torch

from hypersphere.data import Dataset, TensorSplit
from hypersphere.recipe import Recipe
from hypersphere.reproduce.table import TableError
from hypersphere.tasks.few_shot.data import divide

IMAGES: dict[str, tuple[tuple[int, int, int], int]] = {
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "mnist": ((1, 28, 28), 10),
    "fashion-mnist": ((1, 28, 28), 10),
    "celeba-subset": ((3, 112, 96), 12),
    "image-folder": ((3, 64, 64), 10),
}
"""Shape of an image and number of classes."""

FEW_SHOT = {"cifar100-few-shot": (3, 32, 32), "mini-imagenet": (3, 84, 84), "omniglot": (1, 28, 28)}
GRAPHS = {"cora": 7, "citeseer": 6, "pubmed": 3}
CLOUDS = {"modelnet40": 40, "shapes": 8}

PER_CLASS = 2
"""Training samples a class, and test samples."""


def stand_in(recipe: Recipe) -> Dataset:
    """Noise in the shape of a recipe's data set; the same for every seed.

    Example:
        >>> from hypersphere import recipe
        >>> stand_in(recipe.load("cifar100-cnn9")).train.shape
        (3, 32, 32)
    """
    name = recipe.data.name
    generator = torch.Generator().manual_seed(0)
    if name in IMAGES:
        shape, classes = IMAGES[name]
        if name == "image-folder":
            shape = (3, *recipe.data.options.get("size", shape[1:]))
        return _images(name, shape, classes, generator).hold_out(_held_out(recipe, classes))
    if name in FEW_SHOT:
        whole = _images(name, FEW_SHOT[name], 20, generator, per_class=25)
        return divide(whole, ["10", "11", "12", "13", "14"], ["15", "16", "17", "18", "19"])
    if name in CLOUDS:
        points = recipe.data.options.get("points", 128)
        labels = torch.arange(CLOUDS[name]).repeat(PER_CLASS)
        clouds = torch.randn(len(labels), 3, min(points, 128), generator=generator).clamp(-1, 1) / 2
        split = TensorSplit(clouds, labels)
        return Dataset(name, _names(CLOUDS[name]), split, split)
    if name in GRAPHS:
        return _graph(name, GRAPHS[name], generator)
    raise TableError(f"there is no stand-in for the data set {name!r}: name its shape in stand_ins.py")


def _names(classes: int) -> tuple[str, ...]:
    return tuple(map(str, range(classes)))


def _held_out(recipe: Recipe, classes: int) -> list[int]:
    """The classes that a recipe holds out, of those that there are."""
    unseen = int(recipe.data.options.get("unseen_identities", 0))
    named = [index for index in recipe.data.hold_out if isinstance(index, int) and index < classes]
    return sorted({*named, *range(classes - min(unseen, 2), classes)})


def _images(
    name: str, shape: tuple[int, ...], classes: int, generator: torch.Generator, per_class: int = PER_CLASS
) -> Dataset:
    labels = torch.arange(classes).repeat(per_class)
    images = torch.randint(256, (len(labels), *shape), generator=generator, dtype=torch.uint8)
    split = TensorSplit(images, labels)
    return Dataset(name, _names(classes), split, split)


def _graph(name: str, classes: int, generator: torch.Generator) -> Dataset:
    """A ring of nodes with random words; the first nodes are trained on, the last ones tested."""
    nodes, words = 20 * classes, 30
    label = torch.arange(nodes) % classes
    ring = torch.arange(nodes)
    edges = torch.stack([ring, (ring + 1) % nodes])
    features = torch.rand(nodes, words, generator=generator)
    parts = torch.arange(nodes).split([10 * classes, 5 * classes, 5 * classes])
    train, validation, test = (TensorSplit(part, label[part]) for part in parts)
    context = {
        "features": features / features.sum(1, keepdim=True),
        "edges": torch.cat([edges, edges.flip(0)], 1),
        "labels": label,
        "validation": validation.images,
    }
    return Dataset(name, _names(classes), train, test, context=context)
