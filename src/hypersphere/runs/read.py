"""Read a run folder: recipe, facts, metrics and, where the run was evaluated, results and test features."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from hypersphere.drawing import Floats, Ints
from hypersphere.runs import artefacts
from hypersphere.runs.artefacts import ARTEFACT, RunError, layer_parts
from hypersphere.runs.folder import RunFolder, read_json

FEATURES = "features.safetensors"
"""File of what an evaluation found."""
EVALUATION = "evaluation"
"""Schema of its tensors."""


@dataclass(frozen=True)
class Features:
    """Features of a test set with their classes, and the classifier's weights where it has any.

    Attributes:
        vectors: One raw feature a row.
        labels: Class of each feature.
        names: Class names by label.
        weights: Classifier weights, a row a class.
        predictions: Class that each feature was taken for, where that was stored.
    """

    vectors: Floats
    labels: Ints
    names: list[str] = field(default_factory=list)
    weights: Floats | None = None
    predictions: Ints | None = None

    def name(self, label: int) -> str:
        """The class's name, or its number where no name was stored."""
        return str(self.names[label]) if 0 <= label < len(self.names) else f"class {label}"


@dataclass(frozen=True)
class Energies:
    """Energies of layers while training.

    Attributes:
        steps: Steps ``(T,)``.
        values: Mean energies over pairs of neurons ``(T, layers)``.
        floor: What a layer of that size does not fall below, ``(layers,)``.
        random: What random directions have on average, ``(layers,)``; may be infinite.
        layers: Names of the layers.
        kind: Which energy, in words.
    """

    steps: Ints
    values: Floats
    floor: Floats
    random: Floats
    layers: list[str]
    kind: str

    @property
    def excess(self) -> Floats:
        """Energies above the floor, ``(T, layers)``."""
        return self.values - self.floor

    @property
    def level(self) -> Floats:
        """Excess of random directions ``(layers,)``; where that is infinite or none, the excess at the first step."""
        chance = self.random - self.floor
        known = np.isfinite(chance) & (chance > 1e-9)
        first = self.excess[0]
        return np.where(known, chance, np.where(first > 0, first, 1.0))


@dataclass(frozen=True)
class Run:
    """What a run folder holds.

    Attributes:
        folder: Name of the folder.
        facts: Contents of ``run.json``.
        recipe: Text of ``recipe.yaml``.
        loss: Name of the loss in the recipe.
        metrics: Rows of ``metrics.jsonl``.
        results: Final metrics; empty before the first evaluation.
        test: Test features; ``None`` before the first evaluation.
        unseen: Features of classes that were held out of training, where there are any.
        layers: What decoupled layers learned, by quantity (``radius``, ``k``) and name of the layer: a number a kernel.
        energies: Energy of every layer at some steps; ``None`` where it was not written down.
        artefacts: What evaluations left for pictures, by name.
        class_counts: Number of training images of each class, where that was stored.
        bias: Bias of each class, where the head has them and they were stored.
        filters: Filters of the first convolution ``(n, channels, height, width)``, where it sees grey or colour images.
    """

    folder: str
    facts: dict[str, Any]
    recipe: str
    loss: str
    metrics: list[dict[str, Any]]
    results: dict[str, float]
    test: Features | None
    unseen: Features | None
    layers: dict[str, dict[str, Floats]] = field(default_factory=dict)
    filters: Floats | None = None
    energies: Energies | None = None
    artefacts: dict[str, Any] = field(default_factory=dict)
    class_counts: Ints | None = None
    bias: Floats | None = None


def load_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        RunError: The folder or a needed file is missing, or a file cannot be read.
    """
    if not folder.exists():
        raise RunError(f"{folder} does not exist: give a folder that a training run wrote")
    for needed in ("recipe.yaml", "run.json", "metrics.jsonl"):
        if not (folder / needed).is_file():
            raise RunError(f"{folder} has no {needed}, so it is not a run; give a folder that a training run wrote")
    recipe = (folder / "recipe.yaml").read_text(encoding="utf-8")
    evaluation = folder / "evaluation.json"
    metrics = RunFolder(folder).rows()
    tensors, metadata = _read_tensors(folder / FEATURES)
    return Run(
        folder=folder.resolve().name,
        facts=RunFolder(folder).facts(),
        recipe=recipe,
        loss=_loss_name(folder / "recipe.yaml", recipe),
        metrics=metrics,
        results=RunFolder(folder).evaluation().get("metrics", {}) if evaluation.is_file() else {},
        test=_features(tensors, "", metadata),
        unseen=_features(tensors, "unseen_", metadata),
        layers=_layers(tensors),
        energies=_energies(folder, metrics),
        artefacts={key.split("/", 1)[1]: value for key, value in tensors.items() if key.startswith(ARTEFACT)},
        class_counts=tensors.get("class_counts"),
        bias=tensors["bias"].astype(np.float64) if _drawable(tensors.get("bias")) else None,
        filters=tensors["filters"].astype(np.float64) if _drawable(tensors.get("filters")) else None,
    )


def _loss_name(path: Path, text: str) -> str:
    try:
        recipe = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RunError(f"{path} is not valid YAML ({error}); restore it from the recipe of the run") from error
    loss = recipe.get("loss") if isinstance(recipe, dict) else None
    return str(loss.get("name", "")) if isinstance(loss, dict) else ""


def _read_tensors(path: Path) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Tensors of an evaluation, and the names of its classes; nothing where there was none."""
    if not path.is_file():
        return {}, {}
    again = "evaluate the run again"
    found = artefacts.read(path, EVALUATION, needed=("features", "labels"), again=again)
    if "unseen_features" in found.tensors and "unseen_labels" not in found.tensors:
        raise RunError(f"{path} has no tensor 'unseen_labels': {again}")
    return {name: _array(tensor) for name, tensor in found.tensors.items()}, found.facts


def _array(tensor: Tensor) -> Any:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _energies(folder: Path, metrics: list[dict[str, Any]]) -> Energies | None:
    """Energies of the layers, from the rows of their split and the file that says what they compare with."""
    rows = [row for row in metrics if row.get("split") == "energy"]
    if not rows or not (folder / "energy.json").is_file():
        return None
    facts = read_json(folder / "energy.json")
    try:
        layers = facts["layers"]
        values = np.array([[float(row[f"energy/{name}"]) for name in layers] for row in rows])
        floor, random = (np.array([float(layer[key]) for layer in layers.values()]) for key in ("floor", "random"))
        space = "half space" if facts["half_space"] else "full space"
        kind = f"s = {facts['s']:g}, {'angles, ' if facts['angular'] else ''}{space}"
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{folder / 'energy.json'} does not fit the metrics of the run ({error!r})") from error
    finite = np.isfinite(values).all(axis=1)
    if not finite.any():
        return None
    steps = np.array([row["step"] for row in rows])
    return Energies(steps[finite], values[finite], floor, random, list(layers), kind)


def _features(tensors: dict[str, Any], prefix: str, metadata: dict[str, list[str]]) -> Features | None:
    if f"{prefix}features" not in tensors:
        return None
    vectors = tensors[f"{prefix}features"].astype(np.float64)
    finite = np.isfinite(vectors).all(axis=1)  # a diverged model has features that cannot be drawn
    if not finite.any():
        return None
    weights = None if prefix or "centres" not in tensors else tensors["centres"].astype(np.float64)
    names = metadata.get(f"{prefix or 'class_'}names", [])
    predictions = None if prefix or "predictions" not in tensors else tensors["predictions"][finite]
    return Features(vectors[finite], tensors[f"{prefix}labels"][finite], names, weights, predictions)


def _drawable(values: Any) -> bool:
    """Whether these are numbers; those of a diverged model may be none."""
    return values is not None and bool(np.isfinite(values).all())


def _layers(tensors: dict[str, Any]) -> dict[str, dict[str, Floats]]:
    """What decoupled layers learned, in the order of the layers."""
    found: dict[str, dict[str, Floats]] = {}
    for key in sorted(tensors):
        part = layer_parts(key)
        if part is not None and _drawable(tensors[key]):
            found.setdefault(part.quantity, {})[part.layer] = tensors[key].astype(np.float64)
    return found
