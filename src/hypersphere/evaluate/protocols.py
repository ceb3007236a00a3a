"""Named groups of metrics over what a trained model puts out, and how they are shown to people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hypersphere.energy import hyperspherical_energy
from hypersphere.evaluate.metrics import accuracy, class_centres, equal_error_rate, pair_scores
from hypersphere.geometry import angle, angle_matrix
from hypersphere.registry import Registry

MAX_PAIR_SAMPLES = 4000
"""Most samples of unseen classes that are compared pairwise (8 million pairs); evenly spaced ones are taken."""


@dataclass(frozen=True)
class Outputs:
    """What a model and its head put out on the test split, and on classes that training did not see.

    Attributes:
        features: ``(N, D)`` test features.
        logits: ``(N, C)`` scores without margin.
        labels: ``(N,)``.
        weight: ``(C, D)`` class weights.
        unseen_features: ``(M, D)`` features of held-out classes.
        unseen_labels: ``(M,)``.
    """

    features: Tensor
    logits: Tensor
    labels: Tensor
    weight: Tensor
    unseen_features: Tensor | None = None
    unseen_labels: Tensor | None = None


@dataclass(frozen=True)
class Metric:
    """How a metric is shown: its column title, unit, which direction is better, and what it says."""

    title: str
    unit: Literal["%", "°", ""]
    better: Literal["higher", "lower"]
    help: str

    def format(self, value: float) -> str:
        """The value as people read it."""
        return f"{100 * value:.2f} %" if self.unit == "%" else f"{value:.2f}{self.unit}"


METRICS: dict[str, Metric] = {
    "accuracy": Metric("test accuracy", "%", "higher", "share of test images that get their own class"),
    "mean_angle": Metric(
        "angle to own centre", "°", "lower", "mean angle between a test feature and the mean direction of its class"
    ),
    "min_centre_angle": Metric(
        "closest centres", "°", "higher", "smallest angle between the mean directions of two classes"
    ),
    "eer": Metric(
        "EER, unseen classes",
        "%",
        "lower",
        "equal error rate of telling same from different on pairs of classes that training did not see",
    ),
    "energy": Metric(
        "classifier energy", "", "lower", "mean hyperspherical energy (s = 2) of the class weights' directions"
    ),
}

evaluations: Registry[dict[str, float]] = Registry("evaluation", positional=("outputs",))


@evaluations.register("classification")
def classification(outputs: Outputs) -> dict[str, float]:
    """Test accuracy and cross-entropy of the scores without margin."""
    loss = torch.nn.functional.cross_entropy(outputs.logits, outputs.labels)
    return {"accuracy": accuracy(outputs.logits, outputs.labels), "cross_entropy": float(loss)}


@evaluations.register("angles")
def angles(outputs: Outputs) -> dict[str, float]:
    """How tight the classes are and how far apart, in degrees."""
    centres = class_centres(outputs.features, outputs.labels, len(outputs.weight))
    own = angle(outputs.features, centres[outputs.labels])
    result = {"mean_angle": math.degrees(float(own.mean()))}
    present = centres[outputs.labels.unique()]
    if len(present) > 1:
        between = angle_matrix(present, present).fill_diagonal_(math.inf)
        result["min_centre_angle"] = math.degrees(float(between.min()))
    return result


@evaluations.register("verification")
def verification(outputs: Outputs) -> dict[str, float]:
    """Equal-error rate over all pairs of samples of unseen classes; nothing where none were held out."""
    features, labels = outputs.unseen_features, outputs.unseen_labels
    if features is None or labels is None or len(labels.unique()) < 2:
        return {}
    if len(labels) > MAX_PAIR_SAMPLES:
        chosen = torch.linspace(0, len(labels) - 1, MAX_PAIR_SAMPLES, device=labels.device).long()
        features, labels = features[chosen], labels[chosen]
    return {"eer": equal_error_rate(*pair_scores(features, labels))}


@evaluations.register("energy")
def energy(outputs: Outputs) -> dict[str, float]:
    """Hyperspherical energy of the classifier: lower means more evenly spread class weights."""
    return {"energy": float(hyperspherical_energy(outputs.weight, s=2.0))}


def measure(outputs: Outputs, names: Iterable[str]) -> dict[str, float]:
    """All metrics of the named evaluations.

    Example:
        >>> eye = torch.eye(3)
        >>> measure(Outputs(eye, eye, torch.arange(3), eye), ["classification", "angles"])["accuracy"]
        1.0
    """
    result: dict[str, float] = {}
    for name in names:
        result |= evaluations.create(name, outputs)
    return result


def table(rows: Mapping[str, Mapping[str, float]]) -> tuple[list[str], list[list[str]], list[list[bool]]]:
    """Titles, formatted cells and which cells are the best of their column, for runs by name.

    Only metrics that some row has are shown, in the order of :data:`METRICS`.
    """
    keys = [key for key in METRICS if any(key in row for row in rows.values())]
    titles = [METRICS[key].title for key in keys]
    cells = [[METRICS[key].format(row[key]) if key in row else "-" for key in keys] for row in rows.values()]
    best = [
        [len(rows) > 1 and row.get(key) == _best(key, list(rows.values())) for key in keys] for row in rows.values()
    ]
    return titles, cells, best


def _best(key: str, rows: Sequence[Mapping[str, float]]) -> float:
    values = [row[key] for row in rows if key in row]
    return max(values) if METRICS[key].better == "higher" else min(values)
