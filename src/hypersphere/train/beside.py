"""Other networks that a run is measured with: another run's, or one that is trained for it."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path

import torch

from hypersphere import recipe as recipes
from hypersphere.data import Dataset
from hypersphere.errors import ArgumentError
from hypersphere.recipe import Recipe
from hypersphere.runs import RunError, RunFolder, System, load
from hypersphere.train.records import DivergedError
from hypersphere.train.trainer import Trainer

_kept: tuple[str, torch.device, Dataset, System] | None = None
"""The last one that was trained here: every evaluation of a run, and of its neighbours, asks for the same."""


def names_recipe(words: str) -> bool:
    """Whether words are a recipe of the package and changes, and not the folder of a run.

    Example:
        >>> names_recipe("mnist-cnn train.steps=100"), names_recipe("runs/mnist-cnn")
        (True, False)
    """
    first = (words.split() or [""])[0]
    return first in recipes.names() and not Path(words).expanduser().exists()


def trained(words: str, data: Dataset | None, device: torch.device, *, option: str) -> System:
    """What a recipe with changes makes of a data set that is there; nothing of it stays but the network.

    The random numbers of whoever asks are as they were.

    Args:
        words: Name of a recipe, and changes: ``"mnist-cnn seed=1"``.
        data: The data set, which must be the recipe's own.
        device: Where to compute.
        option: Whose value it is, for messages.
    """
    global _kept  # noqa: PLW0603
    name, *changes = shlex.split(words)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():  # even to read a recipe builds parts of it
        plan = recipes.load(name, [*changes, "train.tensorboard=false"])
        if data is None or data.name != plan.data.name:
            known = "no data set" if data is None else repr(data.name)
            message = f"must be a recipe for the data of the run, {known}; {name} is for {plan.data.name!r}"
            raise ArgumentError(option, message)
        if _kept is None or _kept[:2] != (plan.hash, device) or _kept[2] is not data:
            _kept = plan.hash, device, data, _fit(plan, data, device)
    return _kept[3]


def _fit(plan: Recipe, data: Dataset, device: torch.device) -> System:
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder.create(Path(folder) / "run", plan, device)
        try:
            Trainer(plan, run, device, data=data).fit()
        except DivergedError as error:  # else it would be taken for that of the run that asks
            raise RunError(f"{plan.name}, trained to measure another run with, diverged: {error}") from error
        return load(run.path, device=device, data=data)


def other(words: str | Path, data: Dataset | None, device: torch.device, *, option: str) -> System:
    """The network of a run, or of a recipe with changes, which is trained first.

    Args:
        words: Folder of a run, or name of a recipe with changes.
        data: The data set, for a recipe.
        device: Where to compute.
        option: Whose value it is, for messages.
    """
    return trained(str(words), data, device, option=option) if names_recipe(str(words)) else load(words, device=device)
