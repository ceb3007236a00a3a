"""Evaluations of any classifier or embedding: accuracy, angles, verification and energy."""

from __future__ import annotations

import math

import torch

from hypersphere.energy import hyperspherical_energy
from hypersphere.errors import ArgumentError, check_range
from hypersphere.evaluate.outputs import Outputs
from hypersphere.evaluate.registry import Metric, evaluations
from hypersphere.geometry import angle, angle_matrix
from hypersphere.metrics import accuracy, class_centres, equal_error_rate, pair_scores

MAX_PAIR_SAMPLES = 4000
"""Most samples of unseen classes that are compared pairwise (8 million pairs); evenly spaced ones are taken."""


@evaluations.register(
    "classification",
    metrics=(
        Metric(
            "accuracy",
            "Test accuracy",
            unit="%",
            better="higher",
            help="Share of test samples that get the right class. Higher is better.",
        ),
        Metric(
            "cross_entropy",
            "Test cross-entropy",
            form=".4f",
            better="lower",
            help="Mean cross-entropy of the scores without margin on the test samples. Lower is better.",
            detail=True,
        ),
    ),
)
def classification(outputs: Outputs) -> dict[str, float]:
    """Test accuracy and cross-entropy of the scores without margin."""
    loss = torch.nn.functional.cross_entropy(outputs.logits, outputs.labels)
    return {"accuracy": accuracy(outputs.logits, outputs.labels), "cross_entropy": float(loss)}


@evaluations.register(
    "top-k",
    metrics=(
        Metric(
            "top*_accuracy",
            "Top-{} accuracy",
            unit="%",
            better="higher",
            curve="Test accuracy, top {} (%)",
            help="Share of test samples whose class is among the {} with the highest scores. Higher is better.",
        ),
    ),
)
def top_k(outputs: Outputs, k: int = 5) -> dict[str, float]:
    """Share of test samples whose class is among the ``k`` with the highest scores, as ``top5_accuracy``.

    Args:
        outputs: What the model puts out.
        k: How many classes count, at most as many as there are.
    """
    classes = outputs.logits.shape[1]
    check_range("k", k, 1)
    if k > classes:
        raise ArgumentError("k", f"must be at most {classes}, the number of classes, got {k}")
    found = (outputs.logits.topk(k, 1).indices == outputs.labels.unsqueeze(1)).any(1)
    return {f"top{k}_accuracy": float(found.double().mean())}


top_k.contract = {"options": {"k": 2}}  # type: ignore[attr-defined]


@evaluations.register(
    "per-class",
    metrics=(
        Metric(
            "accuracy/*",
            "Test accuracy of class {}",
            unit="%",
            better="higher",
            help="Share of the test samples of class {} that get this class. Higher is better.",
            detail=True,
        ),
    ),
)
def per_class(outputs: Outputs) -> dict[str, float]:
    """Test accuracy of every class that has test samples: ``accuracy/0``, ``accuracy/1`` and so on."""
    counts, shares = class_accuracies(outputs)
    return {f"accuracy/{index}": shares[index] for index, count in enumerate(counts) if count}


@evaluations.register(
    "rare",
    metrics=(
        Metric(
            "rare_accuracy",
            "Rare-class accuracy",
            unit="%",
            better="higher",
            curve="Test accuracy of the rare classes (%)",
            help="Mean test accuracy of the classes with less than half the training images of the largest class. "
            "Higher is better.",
        ),
    ),
)
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
    """Number of test samples of each class, and the share of right answers among them."""
    classes = outputs.logits.shape[1]
    counts = outputs.labels.bincount(minlength=classes)
    right = outputs.labels[outputs.logits.argmax(1) == outputs.labels].bincount(minlength=classes)
    return counts.tolist(), (right.double() / counts.clamp(min=1)).tolist()


@evaluations.register(
    "angles",
    metrics=(
        Metric(
            "mean_angle",
            "Angle to own centre",
            unit="°",
            form=".1f",
            better="lower",
            curve="Mean test angle to own centre (°)",
            help="Mean angle between a test feature and the centre of its class (the mean direction of the class's "
            "test features). Lower means tighter classes.",
        ),
        Metric(
            "min_centre_angle",
            "Smallest centre angle",
            unit="°",
            form=".1f",
            better="higher",
            curve="Smallest angle between class centres (°)",
            help="Angle between the two class centres that are closest to each other. Larger means better separated "
            "classes.",
        ),
    ),
)
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


@evaluations.register(
    "verification",
    metrics=(
        Metric(
            "eer",
            "EER, unseen classes",
            unit="%",
            better="lower",
            curve="Verification EER on unseen classes (%)",
            help="Equal error rate when pairs of samples from classes that were never trained on are judged “same” or "
            "“different” by their angle: the error where both kinds of mistake are equally frequent. Lower is better.",
        ),
    ),
)
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


@evaluations.register(
    "energy",
    metrics=(
        Metric(
            "energy",
            "Classifier energy",
            form=".4f",
            better="lower",
            help="Mean hyperspherical energy (s = 2) of the classifier's weight vectors: how unevenly they are spread "
            "over the sphere. Lower is more even; comparable only between runs with the same number of classes and "
            "dimensions.",
        ),
    ),
)
def energy(outputs: Outputs) -> dict[str, float]:
    """Hyperspherical energy of the classifier: lower means more evenly spread class weights."""
    return {"energy": float(hyperspherical_energy(outputs.weight, s=2.0))}
