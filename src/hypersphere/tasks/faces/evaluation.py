"""Verification of faces of another data set while a network is trained: LFW's pairs."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from hypersphere.data import DataError
from hypersphere.diagnostics import angular_fisher_score
from hypersphere.evaluate import Metric, Outputs, evaluations
from hypersphere.metrics.basic import equal_error_rate, pair_similarity
from hypersphere.metrics.folds import lfw10
from hypersphere.metrics.processes import batches, gathered
from hypersphere.tasks.faces.data import AlignedSplit, Pairs, lfw_pairs

BATCH = 500
"""Faces that go through the network together."""


@lru_cache(maxsize=1)
def _pairs(size: tuple[int, int], root: Path | None) -> tuple[Pairs, AlignedSplit]:
    return lfw_pairs(root, size)


@lru_cache(maxsize=1)
def _faces(size: tuple[int, int], root: Path | None, chosen: tuple[tuple[int, int], ...]) -> list[Tensor]:
    """Batches of aligned faces ``(B, 3, H, W)``, decoded once for all evaluations of a process."""
    faces = _pairs(size, root)[1]
    return [torch.stack([faces.read(index) for index in range(*rows)]) for rows in chosen]


@evaluations.register(
    "lfw",
    metrics=(
        Metric(
            "lfw_accuracy",
            "LFW accuracy",
            unit="%",
            better="higher",
            help="Share of LFW's 6,000 pairs of faces that are rightly judged “same” or “different”, each fold with "
            "the threshold that is best on the other nine. Higher is better.",
        ),
        Metric(
            "lfw_standard_error",
            "LFW accuracy, standard error",
            unit="%",
            help="Standard error of the LFW accuracy over its folds.",
            detail=True,
        ),
        Metric(
            "lfw_eer",
            "LFW EER",
            unit="%",
            better="lower",
            help="Equal error rate on LFW's pairs of faces. Lower is better.",
        ),
    ),
    shares=True,
)
@torch.no_grad()
def lfw(
    outputs: Outputs,
    *,
    variant: Literal["sphereface", "clcarwin", "insightface", "opensphere"] = "sphereface",
    folder: str = "",
) -> dict[str, float]:
    """Accuracy on LFW's pairs of faces, the threshold from the other folds, with the standard error over the folds.

    Args:
        outputs: Outputs of a network of colour faces.
        variant: How features are compared, see :func:`~hypersphere.metrics.lfw10`.
        folder: Data root with the folder ``lfw`` of ``images``, ``landmarks.txt`` and ``pairs.txt``; by default it is
            looked for where the training data is.
    """
    if outputs.features_of is None or outputs.data is None:
        return {}
    shape = outputs.data.test.shape
    if len(shape) != 3 or shape[0] != 3:
        raise DataError(f"LFW needs a network of colour images, but this one takes samples of the shape {shape}.")
    place = (shape[1], shape[2]), Path(folder) if folder else outputs.data_root
    pairs, faces = _pairs(*place)
    device = outputs.features.device
    chosen = tuple((rows.start, rows.stop) for rows in batches(len(faces), BATCH, outputs.group))
    sides: tuple[list[Tensor], list[Tensor]] = ([], [])
    for images in _faces(*place, chosen):
        scaled = images.to(device).float() / 255
        sides[0].append(outputs.features_of(scaled))
        sides[1].append(outputs.features_of(scaled.flip(3)))
    plain, mirrored = (gathered(parts, outputs.group) for parts in sides)
    left, right = pairs.left.to(device), pairs.right.to(device)
    same = pairs.same.to(device)
    found = lfw10(
        plain[left], plain[right], same, pairs.fold, mirrored=(mirrored[left], mirrored[right]), variant=variant
    )
    both = torch.cat([plain, mirrored], 1)
    scores = pair_similarity(both[left], both[right])
    return {
        "lfw_accuracy": found.value,
        "lfw_standard_error": found.standard_error,
        "lfw_eer": equal_error_rate(scores, same),
    }


@evaluations.register(
    "fisher",
    metrics=(
        Metric(
            "angular_fisher_score",
            "Angular Fisher score",
            form=".4f",
            better="lower",
            help="Scatter of the directions of test features within classes over that between classes. Lower is "
            "better.",
        ),
    ),
)
def fisher(outputs: Outputs) -> dict[str, float]:
    """Angular Fisher score of the test features: how tight classes are against how far apart."""
    return {"angular_fisher_score": float(angular_fisher_score(outputs.features, outputs.labels))}
