"""From a recipe to the parts of a system: a model, a head and the preprocessing of its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hypersphere import data
from hypersphere.data import Dataset
from hypersphere.data.augmentations import augmentations
from hypersphere.data.preprocess import Preprocess
from hypersphere.errors import ArgumentError
from hypersphere.losses import MarginSoftmax, losses
from hypersphere.models import models
from hypersphere.recipe import Recipe
from hypersphere.recipe.seeds import derive_seed


def build(
    recipe: Recipe, shape: Sequence[int], classes: int, context: Mapping[str, Any] | None = None
) -> tuple[nn.Module, MarginSoftmax, Preprocess]:
    """What a recipe trains, as it is before the first step, on the CPU.

    Everything random is a function of the recipe's seed; the state of the default generator is left as it was.

    Args:
        recipe: What to build.
        shape: Shape of a sample, ``(C, H, W)`` of an image.
        classes: Number of classes that are trained on.
        context: What all samples share, such as the edges of a graph; the model takes it by ``attach``.

    Returns:
        The model, its head, and the preprocessing, whose constants are not measured yet.

    Example:
        >>> from hypersphere import recipe
        >>> model, head, preprocess = build(recipe.load("digits-softmax"), (1, 8, 8), 10)
        >>> head.logits(model(preprocess(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)))).shape
        torch.Size([2, 10])
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(recipe.seed, "initialise"))
        model = recipe.build(models, ("model",), tuple(shape))
        if context:
            model.attach(**context)
        for phase in ("convert", "rotate"):
            for key, section in recipe.sections().items():
                with recipe.blamed(key):
                    model = getattr(section, phase)(model, recipe)
        head = recipe.build(losses, ("loss",), model.dim, classes)
    with recipe.blamed("data", "augment"):
        places = [("data", "augment", "parts", index) for index in range(len(recipe.data.augment.parts))]
        parts = [recipe.build(augmentations, place) for place in places]
        preprocess = Preprocess(tuple(shape), recipe.data.normalise, recipe.data.augment, parts)
    if recipe.train.channels_last:
        model = model.to(memory_format=torch.channels_last)
    return model, head, preprocess


def load_data(recipe: Recipe, root: Path | None = None) -> Dataset:
    """The data set of a recipe.

    Args:
        recipe: What names it.
        root: Where data sets are looked for.

    Example:
        >>> from hypersphere import recipe
        >>> load_data(recipe.load("digits-softmax")).train.shape
        (1, 8, 8)
    """
    part = recipe.data
    try:
        return data.load(
            part.name,
            root,
            hold_out=part.hold_out,
            imbalance=part.imbalance.model_dump(),
            held_back=part.validation,
            **part.options,
        )
    except ArgumentError as error:
        section = ("data", "imbalance") if error.argument in ("keep", "graded") else ("data",)
        raise recipe.blame(error, *section) from error
