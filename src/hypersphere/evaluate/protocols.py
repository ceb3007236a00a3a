"""Named groups of metrics over what a trained model puts out, and how they are shown to people."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from hypersphere.data import Dataset
from hypersphere.energy import hyperspherical_energy
from hypersphere.errors import ArgumentError
from hypersphere.geometry import angle, angle_matrix
from hypersphere.metrics.basic import accuracy, class_centres, equal_error_rate, pair_scores
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
        class_counts: ``(C,)`` number of training images of each class.
        data: The data set, for evaluations that look at samples.
        model: The model, in evaluation mode.
        features_of: Samples as the data set holds them, but images as floats in [0, 1], to features ``(B, D)``;
            differentiable.
        predict: The same to scores ``(B, C)``.
        seed: The run's seed, for what an evaluation draws.
        data_root: Where data sets are looked for, where that was said.
        load: From the folder of another run to its system, on the same device.
        artefacts: Where an evaluation leaves tensors for the pictures of the report, as ``section/name``.
    """

    features: Tensor
    logits: Tensor
    labels: Tensor
    weight: Tensor
    unseen_features: Tensor | None = None
    unseen_labels: Tensor | None = None
    class_counts: Tensor | None = None
    data: Dataset | None = None
    model: nn.Module | None = None
    features_of: Callable[[Tensor], Tensor] | None = None
    predict: Callable[[Tensor], Tensor] | None = None
    seed: int = 0
    data_root: Path | None = None
    load: Callable[[str | Path], Any] | None = None
    artefacts: dict[str, Tensor] = field(default_factory=dict)

    @property
    def images(self) -> Tensor | None:
        """Test samples as the data set holds them, where they are one tensor."""
        return None if self.data is None else getattr(self.data.test, "images", None)


@dataclass(frozen=True)
class Metric:
    """How a metric is shown: its column title, format, which direction is better, and what it says."""

    title: str
    form: str
    better: Literal["higher", "lower"]
    help: str


METRICS: dict[str, Metric] = {
    "accuracy": Metric(
        "Test accuracy", "{:.2%}", "higher", "Share of test samples that get the right class. Higher is better."
    ),
    "class_accuracy": Metric(
        "Mean class accuracy",
        "{:.2%}",
        "higher",
        "Mean over the classes of the share of their test samples that get the right class. Higher is better.",
    ),
    "validation_accuracy": Metric(
        "Validation accuracy",
        "{:.2%}",
        "higher",
        "Share of the validation nodes of a graph that get the right class. Higher is better.",
    ),
    "mean_angle": Metric(
        "Angle to own centre",
        "{:.1f}°",
        "lower",
        "Mean angle between a test feature and the centre of its class (the mean direction of the class's test "
        "features). Lower means tighter classes.",
    ),
    "min_centre_angle": Metric(
        "Smallest centre angle",
        "{:.1f}°",
        "higher",
        "Angle between the two class centres that are closest to each other. Larger means better separated classes.",
    ),
    "eer": Metric(
        "EER, unseen classes",
        "{:.2%}",
        "lower",
        "Equal error rate when pairs of samples from classes that were never trained on are judged “same” or "
        "“different” by their angle: the error where both kinds of mistake are equally frequent. Lower is better.",
    ),
    "lfw_accuracy": Metric(
        "LFW accuracy",
        "{:.2%}",
        "higher",
        "Share of LFW's 6,000 pairs of faces that are rightly judged “same” or “different”, each fold with the "
        "threshold that is best on the other nine. Higher is better.",
    ),
    "lfw_eer": Metric(
        "LFW EER",
        "{:.2%}",
        "lower",
        "Equal error rate on LFW's pairs of faces. Lower is better.",
    ),
    "few_shot_1": Metric(
        "1-shot accuracy",
        "{:.2%}",
        "higher",
        "Mean accuracy over episodes of classes that were never trained on, each with one labelled sample of every "
        "class. Higher is better.",
    ),
    "few_shot_5": Metric(
        "5-shot accuracy",
        "{:.2%}",
        "higher",
        "Mean accuracy over episodes of classes that were never trained on, each with five labelled samples of every "
        "class. Higher is better.",
    ),
    **{
        f"accuracy_{name}": Metric(
            f"Under {title}",
            "{:.2%}",
            "higher",
            f"Share of test images that get the right class after {what}. Higher is better.",
        )
        for name, title, what in (
            ("fgsm", "FGSM", "one step along the sign of the gradient"),
            ("bim", "BIM", "many small steps along the sign of the gradient"),
            ("pgd", "PGD", "many small steps along the sign of the gradient from a random start"),
            ("strongest", "any attack", "the strongest of all attacks that were tried, with and without gradients"),
        )
    },
    "masking_signs": Metric(
        "Signs of masking",
        "{:.0f}",
        "lower",
        "How many checks say that gradients lead attacks astray, so that the model looks more robust than it is.",
    ),
    "energy": Metric(
        "Classifier energy",
        "{:.4f}",
        "lower",
        "Mean hyperspherical energy (s = 2) of the classifier's weight vectors: how unevenly they are spread over the "
        "sphere. Lower is more even; comparable only between runs with the same number of classes and dimensions.",
    ),
    "classifier_score": Metric(
        "Classifier score",
        "{:.3f}",
        "higher",
        "How sure a classifier that was trained on the same data is of each generated image, and how varied it finds "
        "all of them: between 1 and the number of classes. An inception score by another network. Higher is better.",
    ),
    "classifier_frechet": Metric(
        "Fréchet distance",
        "{:.3f}",
        "lower",
        "Distance between that classifier's features of generated and of test images, each taken as a normal "
        "distribution. Lower is better; comparable only with the same classifier.",
    ),
    "class_balance": Metric(
        "Class balance",
        "{:.1%}",
        "higher",
        "How evenly the classes occur among generated images, as that classifier sees them: 100% where all are equally "
        "frequent. Higher is better.",
    ),
}
MISSING = "—"

evaluations: Registry[dict[str, float]] = Registry(
    "evaluation", positional=("outputs",), members=("hypersphere.tasks.*.evaluation",)
)


@evaluations.register("classification")
def classification(outputs: Outputs) -> dict[str, float]:
    """Test accuracy and cross-entropy of the scores without margin."""
    loss = torch.nn.functional.cross_entropy(outputs.logits, outputs.labels)
    return {"accuracy": accuracy(outputs.logits, outputs.labels), "cross_entropy": float(loss)}


@evaluations.register("per-class")
def per_class(outputs: Outputs) -> dict[str, float]:
    """Test accuracy of every class that has test samples: ``accuracy/0``, ``accuracy/1`` and so on."""
    counts, shares = class_accuracies(outputs)
    return {f"accuracy/{index}": shares[index] for index, count in enumerate(counts) if count}


@evaluations.register("rare")
def rare(outputs: Outputs) -> dict[str, float]:
    """Mean test accuracy of the classes with less than half the training images of the largest; none: no metric."""
    trained = outputs.class_counts
    if trained is None:
        return {}
    counts, shares = class_accuracies(outputs)
    few = (2 * trained < trained.max()).tolist()
    found = [share for share, count, is_rare in zip(shares, counts, few, strict=True) if is_rare and count]
    return {"rare_accuracy": sum(found) / len(found)} if found else {}


def class_accuracies(outputs: Outputs) -> tuple[list[int], list[float]]:
    """Number of test samples of each class, and the share of right answers among them.

    Example:
        >>> class_accuracies(Outputs(torch.eye(2), torch.eye(2), torch.tensor([0, 0]), torch.eye(2)))
        ([2, 0], [0.5, 0.0])
    """
    classes = outputs.logits.shape[1]
    counts = outputs.labels.bincount(minlength=classes)
    right = outputs.labels[outputs.logits.argmax(1) == outputs.labels].bincount(minlength=classes)
    return counts.tolist(), (right.double() / counts.clamp(min=1)).tolist()


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
    scores, same = pair_scores(features, labels)
    return {"eer": equal_error_rate(scores, same)} if bool(same.any()) else {}


@evaluations.register("energy")
def energy(outputs: Outputs) -> dict[str, float]:
    """Hyperspherical energy of the classifier: lower means more evenly spread class weights."""
    return {"energy": float(hyperspherical_energy(outputs.weight, s=2.0))}


def measure(outputs: Outputs, names: Iterable[str | Mapping[str, Any]]) -> dict[str, float]:
    """All metrics of the named evaluations.

    Args:
        outputs: What the model puts out.
        names: Names, or mappings of a ``name`` and options.

    Example:
        >>> eye = torch.eye(3)
        >>> measure(Outputs(eye, eye, torch.arange(3), eye), ["classification", "angles"])["accuracy"]
        1.0
    """
    result: dict[str, float] = {}
    for given in names:
        name, options = (given, {}) if isinstance(given, str) else (given["name"], {**given})
        options.pop("name", None)
        found = evaluations.create(name, outputs, **options)
        for key in result.keys() & found.keys():
            raise ArgumentError("metrics", f"has two evaluations that give {key!r}; the second is {name!r}")
        result |= found
    return result


class Cell(NamedTuple):
    """A metric of a run as text, and whether it is the best of its column."""

    text: str
    best: bool


def columns(rows: Sequence[Mapping[str, float]]) -> dict[str, Metric]:
    """The entries of :data:`METRICS` that at least one run has.

    Example:
        >>> list(columns([{"accuracy": 0.9, "cross_entropy": 0.3}, {"eer": 0.1}]))
        ['accuracy', 'eer']
    """
    return {key: metric for key, metric in METRICS.items() if any(key in row for row in rows)}


def table(rows: Sequence[Mapping[str, float]]) -> list[list[Cell]]:
    """The metrics of runs as people read them: a row a run, a column an entry of :func:`columns`.

    Values that look the same are equally good, and a single value is not marked.

    Example:
        >>> [row[0] for row in table([{"accuracy": 0.9}, {"accuracy": 0.95}])]
        [Cell(text='90.00%', best=False), Cell(text='95.00%', best=True)]
    """
    texts_by_column = []
    for key, metric in columns(rows).items():
        values = [row.get(key, math.nan) for row in rows]
        finite = [value for value in values if math.isfinite(value)]
        best = max(finite, default=0.0) if metric.better == "higher" else min(finite, default=0.0)
        marked = metric.form.format(best) if len(finite) > 1 else None
        texts = [metric.form.format(value) if math.isfinite(value) else MISSING for value in values]
        texts_by_column.append([Cell(text, text == marked) for text in texts])
    return [[column[index] for column in texts_by_column] for index in range(len(rows))]
