"""What a system puts out on a data set, what is measured of it, and the files that keep both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere import orthogonal
from hypersphere.data import Dataset, Split
from hypersphere.data.splits import evaluation_batches
from hypersphere.errors import ArgumentError
from hypersphere.evaluate import Metric, Outputs, evaluations, measure
from hypersphere.metrics import processes
from hypersphere.metrics.processes import Group, agreed, gathered, on_first
from hypersphere.neurons import is_sharded, whole
from hypersphere.nn import Decoupled, recalibrate, saturation
from hypersphere.recipe import Recipe
from hypersphere.recipe.seeds import epoch_order
from hypersphere.runs import artefacts
from hypersphere.runs.artefacts import ARTEFACT, layer_name, layer_parts
from hypersphere.runs.folder import RunFolder, atomic_write
from hypersphere.runs.read import EVALUATION, FEATURES
from hypersphere.runs.system import System


def outputs_of(system: System, data: Dataset, data_root: Path | None = None, group: Group | None = None) -> Outputs:
    """Features and scores of the test split, and of the unseen classes where there are any.

    Args:
        system: What is evaluated.
        data: The data set.
        data_root: Where evaluations look for other data sets.
        group: Processes that share the work, each with the system and the data: a process computes some of the
            batches, and all get the outputs of all. ``None``: this one alone.
    """
    features, logits, labels = _extract(system, data.test, group)
    unseen_features, unseen_labels = None, None
    if data.unseen is not None:
        unseen_features, _, unseen_labels = _extract(system, data.unseen, group)
    weight = system.head.class_vectors.float().clone()
    return Outputs(
        features,
        logits,
        labels,
        weight,
        unseen_features,
        unseen_labels,
        data.train.labels.bincount(minlength=len(data.class_names)),
        data=data,
        model=system.model,
        features_of=system.features,
        predict=system.scores,
        seed=system.recipe.seed,
        data_root=data_root,
        group=group,
        together=_held_together(system),
    )


def metrics_of(system: System, outputs: Outputs) -> dict[str, float]:
    """What the system's recipe asks to measure of its outputs; processes that have shared these share this, too.

    Args:
        system: What is evaluated.
        outputs: Of :func:`outputs_of`.
    """
    recipe, index = system.recipe, 0

    def chosen() -> Iterator[str | dict[str, Any]]:
        nonlocal index  # of the evaluation that is at work, for messages
        for index, part in enumerate(recipe.evaluate.metrics):  # noqa: B007
            yield part if isinstance(part, str) else {"name": part.name, **part.options}

    try:
        found = measure(outputs, chosen())
    except ArgumentError as error:
        place = () if error.argument == "metrics" else ("metrics", index)
        raise recipe.blame(error, "evaluate", *place) from error
    if recipe.evaluate.recalibrate and outputs.data is not None:
        found["accuracy_recalibrated"] = _recalibrated_accuracy(system, outputs.data, recipe, outputs.group)
    return found


def write_evaluation(
    run: RunFolder, system: System, outputs: Outputs, metrics: dict[str, float], step: int | None = None
) -> None:
    """Keep the metrics of a run, and the tensors that its report draws.

    Processes that have shared the outputs all call it, and the first one writes.

    Args:
        run: Where to.
        system: What was evaluated.
        outputs: What it put out, with its data set.
        metrics: What was measured.
        step: Of the weights; by default that of the system.
    """
    data = outputs.data
    if data is None:
        raise ArgumentError("outputs", "must have their data set, got None")
    tensors = {"features": outputs.features, "labels": outputs.labels, "centres": outputs.weight}
    tensors |= _of_classes(system, outputs)
    if outputs.unseen_features is not None and outputs.unseen_labels is not None:
        tensors |= {"unseen_features": outputs.unseen_features, "unseen_labels": outputs.unseen_labels}
    # Clones: a file holds no two tensors that share their memory, as an artefact and the features may.
    tensors |= {f"{ARTEFACT}{name}": value.detach().clone() for name, value in outputs.artefacts.items()}
    tensors |= _learned(system, data)
    facts = {"class_names": [*data.class_names], "unseen_names": [*data.unseen_names]}

    def write() -> None:
        with atomic_write(run.path / "evaluation.json") as file:
            json.dump({"step": system.step if step is None else step, "metrics": metrics}, file, indent=2)
        artefacts.write(run.path / FEATURES, EVALUATION, tensors, recipe=system.recipe.hash, facts=facts)

    on_first(write, outputs.group)


@torch.no_grad()
def _extract(system: System, split: Split, group: Group | None) -> tuple[Tensor, Tensor, Tensor]:
    """Features, scores and labels of a split."""
    system.model.eval()
    system.head.eval()
    size, labels = system.recipe.evaluate.batch_size, split.labels.to(system.device, copy=True)
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    own = processes.batches(len(split), size, group)
    # Weights that processes hold together are there when all ask for them: who has a batch less computes one in vain.
    most = -(-len(split) // (size * processes.place(group)[1])) if _held_together(system) else 0
    with agreed(group), orthogonal.cached(system.model):
        for number, rows in enumerate([*own, *[slice(0, size)] * (most - len(own))]):
            chosen = torch.arange(len(split))[rows]
            ((images, _),) = evaluation_batches(split.select(chosen, split.labels[chosen]), size, system.device)
            with system.autocast():
                features = system.model(system.preprocess(images))
            scores = system.head.logits(features)
            if number < len(own):
                found[0].append(features.float())
                found[1].append(scores)
        return gathered(found[0], group), gathered(found[1], group), labels


def _held_together(system: System) -> bool:
    """Whether processes hold the weights of a system together."""
    return any(is_sharded(parameter) for module in (system.model, system.head) for parameter in module.parameters())


evaluations.declare(
    Metric(
        "accuracy_recalibrated",
        "Test accuracy, statistics anew",
        unit="%",
        better="higher",
        curve="Test accuracy, statistics estimated anew (%)",
        help="Test accuracy with the running statistics of the layers replaced by those over training samples at "
        "the end, which running ones may lag behind. Higher is better.",
    ),
)


def _recalibrated_accuracy(system: System, data: Dataset, recipe: Recipe, group: Group | None) -> float:
    """Test accuracy with statistics over training images in place of the running ones, which may lag behind."""
    size = recipe.data.batch_size
    chosen = epoch_order(len(data.train), recipe.seed, 0)[: recipe.evaluate.recalibrate * size]
    part = data.train.select(chosen, data.train.labels[chosen])
    before = [buffer.clone() for buffer in system.model.buffers()]
    try:
        with system.autocast():
            batches = evaluation_batches(part, size, system.device)
            recalibrate(system.model, (system.preprocess(images) for images, _ in batches))
        _, logits, labels = _extract(system, data.test, group)
    finally:
        for buffer, value in zip(system.model.buffers(), before, strict=True):
            buffer.copy_(value)
    return float((logits.argmax(1) == labels).double().mean())


@torch.no_grad()
def _of_classes(system: System, outputs: Outputs) -> dict[str, Tensor]:
    """What pictures of the classes show: what each sample was taken for, and of each class its images and its bias."""
    found: dict[str, Tensor] = {}
    if outputs.logits.dim() == 2 and outputs.logits.shape[1]:
        found["predictions"] = outputs.logits.argmax(1)
    if outputs.class_counts is not None:
        found["class_counts"] = outputs.class_counts
    bias = getattr(system.head, "bias", None)  # a head that has no classes has no such attribute
    return found if bias is None else found | {"bias": whole(bias).float().clone()}


@torch.no_grad()
def learned_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Learned radii and steepnesses of the decoupled layers of a model, by :func:`~.artefacts.layer_name`.

    Example:
        >>> from hypersphere import nn as layers
        >>> model = nn.Sequential(layers.SphereConv2d(3, 4, 3, angular="sigmoid", learn_k="filter"))
        >>> {name: values.shape for name, values in learned_parameters(model).items()}
        {'k/00001/0': torch.Size([4])}
    """
    found: dict[str, Tensor] = {}
    for place, (name, layer) in enumerate(model.named_modules()):
        if isinstance(layer, Decoupled):
            learned = {
                "radius": layer.radius if getattr(layer.operator, "learn_radius", False) else None,
                "k": layer.k,
            }
            found |= {layer_name(key, place, name): whole(v).clone() for key, v in learned.items() if v is not None}
    return found


@torch.no_grad()
def _learned(system: System, data: Dataset) -> dict[str, Tensor]:
    """What the report shows of the layers: learned radii and steepnesses, and filters that are small pictures."""
    found = learned_parameters(system.model)
    radii = [part for part in map(layer_parts, found) if part is not None and part.quantity == "radius"]
    if radii:
        images, _ = next(evaluation_batches(data.test, system.recipe.evaluate.batch_size, system.device))
        with system.autocast():
            beyond = saturation(system.model, system.preprocess(images))
        found |= {
            layer_name("saturated", part.place, part.layer): beyond[part.layer]
            for part in radii
            if part.layer in beyond
        }
    first = next((layer for layer in system.model.modules() if isinstance(layer, nn.Conv2d)), None)
    if first is not None and first.groups == 1 and first.in_channels in (1, 3):
        found["filters"] = whole(first.weight).float().clone()
    return found
