"""Few-shot classification of unseen classes: accuracy in many episodes, each with a new classifier."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.evaluate import Metric, Outputs, evaluations
from hypersphere.metrics import Episodes, classify, mean_and_interval, sample_episodes
from hypersphere.metrics.episodes import CHUNK, Classifier

SHOWN = 2
"""Episodes that are kept for pictures."""
SHOWN_EACH = 5
"""Most support images, and most queries, of a class in a picture."""


@evaluations.register(
    "few-shot",
    metrics=(
        Metric(
            "few_shot_*",
            "{}-shot accuracy",
            unit="%",
            better="higher",
            help="Mean accuracy over episodes of classes that were never trained on, with so many labelled samples of "
            "every class ({}). Higher is better.",
        ),
        Metric(
            "few_shot_*_interval",
            "{}-shot accuracy, interval",
            unit="%",
            help="Half width of the 95 % confidence interval of that accuracy over the episodes ({} shots).",
            detail=True,
        ),
        Metric(
            "few_shot_nearest_*",
            "{}-shot accuracy, nearest mean",
            unit="%",
            better="higher",
            help="Mean accuracy over episodes of classes that were never trained on, with so many labelled samples of "
            "every class ({}) by the nearest mean of their directions. Higher is better.",
        ),
        Metric(
            "few_shot_nearest_*_interval",
            "{}-shot accuracy, nearest mean, interval",
            unit="%",
            help="Half width of the 95 % confidence interval of that accuracy over the episodes ({} shots).",
            detail=True,
        ),
    ),
)
def few_shot(
    outputs: Outputs,
    *,
    ways: int = 5,
    shots: int | tuple[int, ...] = (1, 5),
    queries: int = 15,
    episodes: int = 600,
    classifier: Classifier = "baseline",
    scale: float = 2.0,
    learn_norms: bool = False,
    epochs: int = 100,
    batch_size: int = 4,
    lr: float = 0.01,
    weight_decay: float = 1e-3,
    part: Literal["novel", "validation"] = "novel",
    key: str = "few_shot",
) -> dict[str, float]:
    """Accuracy in episodes of unseen classes: ``few_shot_1`` and ``few_shot_1_interval`` and so on by shots.

    Nothing where no classes were held out. Episodes depend on the run's seed alone, so that runs with the same seed are
    compared on the same ones.

    Args:
        outputs: What the model puts out.
        ways: Classes of an episode.
        shots: Labelled samples of each class, one number or several.
        queries: Samples of each class to classify.
        episodes: Number of episodes.
        classifier: ``"baseline"``, ``"baseline++"`` or ``"nearest"``, see :func:`~hypersphere.metrics.classify`.
        scale: Scale of the cosines of ``"baseline++"``.
        learn_norms: With ``"baseline++"``, also learn a factor for each class.
        epochs: Passes over the support.
        batch_size: Samples a step.
        lr: Learning rate.
        weight_decay: Weight decay.
        part: Test on the novel classes, or choose settings on the validation classes, where the data set has any.
        key: First part of the names of the metrics.
    """
    check_choice("part", part, ("novel", "validation"))
    features, labels = outputs.unseen_features, outputs.unseen_labels
    if features is None or labels is None:
        return {}
    chosen = _part(outputs, labels, part)
    features, labels = features[chosen], labels[chosen]
    numbers = (shots,) if isinstance(shots, int) else shots
    if not numbers:
        raise ArgumentError("shots", "must be a number or several, got none")
    check_range("shots", min(numbers), 1)
    drawn = sample_episodes(
        labels, ways=ways, shots=max(numbers), queries=queries, episodes=episodes, seed=outputs.seed
    )
    found: dict[str, float] = {}
    predictions = drawn.query
    for number in numbers:
        parts = [
            classify(
                features[drawn.support[start : start + CHUNK, :, :number]],
                features[drawn.query[start : start + CHUNK]],
                classifier,
                scale=scale,
                learn_norms=learn_norms,
                epochs=epochs,
                batch_size=batch_size,
                lr=lr,
                weight_decay=weight_decay,
                seed=outputs.seed + start,
            )
            for start in range(0, episodes, CHUNK)
        ]
        predictions = torch.cat(parts)
        right = predictions == torch.arange(ways, device=labels.device).unsqueeze(1)
        name = f"{key}_{number}"
        found[name], found[f"{name}_interval"] = mean_and_interval(right.double().mean((1, 2)), "normal")
    curve = [[number, found[f"{key}_{number}"], found[f"{key}_{number}_interval"]] for number in numbers]
    outputs.artefacts[f"few-shot/curve/{key}"] = torch.tensor(curve)
    _keep_pictures(outputs, drawn, predictions, chosen, numbers[-1])
    return found


def _part(outputs: Outputs, labels: Tensor, part: str) -> Tensor:
    """Places ``(M,)`` of the unseen samples whose classes belong to ``part``."""
    data = outputs.data
    validation: tuple[str, ...] = getattr(data, "validation", ())
    if data is None or not validation:
        if part == "validation":
            raise ArgumentError("part", "must be 'novel': the data set has no validation classes")
        return torch.arange(len(labels), device=labels.device)
    kept = torch.tensor([(name in validation) == (part == "validation") for name in data.unseen_names])
    return kept.to(labels.device)[labels].nonzero().flatten()


def _keep_pictures(outputs: Outputs, drawn: Episodes, predictions: Tensor, chosen: Tensor, shots: int) -> None:
    """Leave images of the first episodes, and what their queries were taken for, where the samples are images."""
    data = outputs.data
    unseen = None if data is None else data.unseen
    if data is None or unseen is None or not unseen.holds_images or "few-shot/episodes/support" in outputs.artefacts:
        return

    def images(places: Tensor) -> Tensor:
        wanted = chosen[places[:SHOWN, :, :SHOWN_EACH]].cpu()
        flat = wanted.flatten()
        read = unseen.images[flat.to(unseen.images.device)] if hasattr(unseen, "images") else None
        if read is None:
            read = torch.stack([unseen.read(place) for place in flat.tolist()])  # type: ignore[union-attr]
        return read.cpu().unflatten(0, wanted.shape)

    names = [data.unseen_names[label] for label in drawn.classes[:SHOWN].flatten().tolist()]
    outputs.artefacts.update(
        {
            "few-shot/episodes/support": images(drawn.support[:, :, :shots]),
            "few-shot/episodes/query": images(drawn.query),
            "few-shot/episodes/prediction": predictions[:SHOWN, :, :SHOWN_EACH].contiguous(),
            "few-shot/episodes/names": torch.tensor(list("\n".join(names).encode()), dtype=torch.uint8),
        }
    )
