"""Load a trained run as a system, from its folder alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hypersphere import plugins as plugin_files
from hypersphere.data import Dataset
from hypersphere.recipe import Recipe
from hypersphere.runs import artefacts
from hypersphere.runs.artefacts import RunError
from hypersphere.runs.build import build, load_data
from hypersphere.runs.device import pick_device
from hypersphere.runs.folder import CHECKPOINT, STATE, RunFolder, load_checkpoint
from hypersphere.runs.read import EVALUATION, FEATURES
from hypersphere.runs.system import System, described, parameters


def load(
    path: str | Path,
    *,
    plugins: Sequence[str | Path] = (),
    device: str | torch.device = "cpu",
    size: tuple[int, int] | None = None,
    data: Dataset | None = None,
) -> System:
    """A trained run as a model with head and preprocessing, ready for images; data set and trainer are not needed.

    Weights are the moving averages where the run has them. Nothing in the folder is executed.

    Args:
        path: Folder of a run, whose last checkpoint is taken, or one of its checkpoints.
        plugins: Files or modules of plugins that the recipe needs.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:N"`` or ``"auto"``.
        size: Height and width of images, for a network that takes any, or for a run that does not say its own.
        data: The run's data set, which says what a run of an older version did not write down.

    Raises:
        RunError: It is no run, a file of it is damaged or of another recipe, or a plugin is missing.

    Example:
        >>> load("nowhere")
        Traceback (most recent call last):
        hypersphere.runs.artefacts.RunError: nowhere does not exist: give the folder of a run or a checkpoint
    """
    for plugin in plugins:
        plugin_files.load(plugin)
    run, checkpoint = _located(Path(path))
    recipe = run.recipe()
    place = device if isinstance(device, torch.device) else pick_device(device)
    facts = run.facts() | ({} if data is None else described(data))
    shape = _shape(run, recipe, facts, checkpoint, size)
    classes = _classes(run, facts, checkpoint)
    context = _placeholders(run, facts) if data is None else data.context
    model, head, preprocess = build(recipe, shape, len(classes), context)
    images = bool(facts.get("images", len(shape) == 3 and shape[0] in (1, 3)))
    missing = () if data is not None else tuple(context)
    name = str(facts.get("name", run.path.name))
    system = System(model, head, preprocess, classes, recipe, shape, images, place, name, missing=missing)
    state = _take_weights(system, checkpoint, size)
    system.step = int(state["step"])
    for module in (model, head, preprocess):
        module.to(place).eval()
    return system


def _located(path: Path) -> tuple[RunFolder, Path]:
    """The run and the checkpoint that a path means."""
    if not path.exists():
        raise RunError(f"{path} does not exist: give the folder of a run or a checkpoint")
    folder = path.parent if path.name == STATE else path
    if (folder / STATE).is_file() or path.name == STATE:
        return RunFolder.open(folder.parent.parent), folder
    run = RunFolder.open(path)
    checkpoint = run.latest_checkpoint()
    if checkpoint is None:
        raise RunError(f"{path} has no checkpoint yet: train it first, `hypersphere resume {path}`")
    return run, checkpoint


def _take_weights(system: System, checkpoint: Path, size: tuple[int, int] | None) -> dict[str, Any]:
    """Copy the weights of a checkpoint into a system, or their moving averages where the run has them."""
    try:
        state = load_checkpoint(checkpoint, system.weights(), system.recipe)
        if system.recipe.train.ema is not None:
            averages = {f"average.{i}": p for i, p in enumerate(parameters(system.model, system.head))}
            load_checkpoint(checkpoint, averages, system.recipe)
    except RunError as error:
        if size is None:
            raise
        raise RunError(f"{error}. Where images have another size, give it as HEIGHTxWIDTH.") from error
    return state


def _shape(
    run: RunFolder, recipe: Recipe, facts: dict[str, Any], checkpoint: Path, size: tuple[int, int] | None
) -> tuple[int, ...]:
    """Shape of the samples, as the run says; height and width may be given instead."""
    shape = facts.get("shape")
    if shape is None:  # of weights that came from elsewhere
        size = size or recipe.data.options.get("size")
        if size is None:
            raise RunError(
                f"{run.path} does not say how large its images are. Give the size as HEIGHTxWIDTH (in Python "
                f"size=(height, width)), or let `hypersphere evaluate {run.path}` ask the data set"
            )
        shape = [len(_tensor(checkpoint, "preprocess.mean")), *size]
    if size is None:
        return tuple(shape)
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise RunError(f"{run.path} is not of a network for images: it takes samples of the shape {tuple(shape)}")
    return (shape[0], *size)


def _classes(run: RunFolder, facts: dict[str, Any], checkpoint: Path) -> tuple[str, ...]:
    """Names of the classes; where nobody wrote them down, their numbers."""
    found = facts.get("class_names")
    if found is None and (run.path / FEATURES).is_file():
        found = artefacts.read(run.path / FEATURES, EVALUATION, names=lambda name: False).facts.get("class_names")
    if found is None:
        weight = _tensor(checkpoint, "head.weight")
        found = [str(number) for number in range(len(weight))]
    return tuple(found)


def _tensor(checkpoint: Path, name: str) -> Tensor:
    again = f"`hypersphere evaluate {checkpoint.parent.parent}` writes down what it does not say"
    file = checkpoint / STATE
    return artefacts.read(file, CHECKPOINT, names=name.__eq__, needed=(name,), again=again).tensors[name]


def _placeholders(run: RunFolder, facts: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors of zeros in the place of what all samples share, for the sizes of a model that depend on it."""
    try:
        return {
            name: torch.zeros(shape, dtype=getattr(torch, kind))
            for name, (kind, shape) in facts.get("context", {}).items()
        }
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise RunError(
            f"{run.path / 'run.json'} has a context that is none ({error}): evaluate the run again"
        ) from error


def load_with_data(
    path: str | Path,
    data_root: Path | None = None,
    *,
    plugins: Sequence[str | Path] = (),
    device: str | torch.device = "cpu",
) -> tuple[System, Dataset]:
    """A trained run and its data set, to measure the one on the other.

    Args:
        path: As of :func:`load`.
        data_root: Where data sets are looked for; by default where the run found its own.
        plugins: As of :func:`load`.
        device: As of :func:`load`.
    """
    for plugin in plugins:
        plugin_files.load(plugin)
    run, _ = _located(Path(path))
    data = load_data(run.recipe(), data_root or run.data_root())
    return load(path, device=device, data=data), data
