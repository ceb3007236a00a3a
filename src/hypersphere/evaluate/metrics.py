"""Metrics as pure functions of features, scores and labels."""

from __future__ import annotations

import torch
from torch import Tensor

from hypersphere.errors import ArgumentError
from hypersphere.geometry import cosine_matrix, normalise


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of samples whose largest score is their own class.

    Args:
        logits: ``(N, C)``.
        labels: ``(N,)``.

    Example:
        >>> accuracy(torch.tensor([[2.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 0]))
        0.5
    """
    return float((logits.argmax(1) == labels).double().mean())


def class_centres(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Mean direction of every class; zero for a class without samples.

    Args:
        features: ``(N, D)``.
        labels: ``(N,)`` in [0, classes).
        classes: Number of classes C.

    Returns:
        Unit vectors ``(C, D)``.

    Example:
        >>> class_centres(torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 0, 1]), 2)
        tensor([[1., 0.],
                [0., 1.]])
    """
    sums = features.new_zeros(classes, features.shape[1])
    return normalise(sums.index_add_(0, labels, normalise(features)))


def pair_scores(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine of every unordered pair of samples, and whether the pair is of one class.

    Args:
        features: ``(N, D)``.
        labels: ``(N,)``.

    Returns:
        Scores and booleans, both ``(N (N - 1) / 2,)``.

    Example:
        >>> pair_scores(torch.eye(2), torch.tensor([0, 0]))
        (tensor([0.]), tensor([True]))
    """
    first, second = torch.triu_indices(len(labels), len(labels), offset=1, device=labels.device)
    return cosine_matrix(features, features)[first, second], labels[first] == labels[second]


def equal_error_rate(scores: Tensor, same: Tensor) -> float:
    """Error rate at the threshold where false accepts and false rejects are equally frequent.

    Exact: one operating point per distinct score, with linear interpolation between the two points around the
    crossing.

    Args:
        scores: ``(P,)``; higher means more alike.
        same: ``(P,)`` booleans, whether a pair is of one class.

    Example:
        >>> equal_error_rate(torch.tensor([0.9, 0.2, 0.8, 0.1]), torch.tensor([True, True, False, False]))
        0.5
    """
    if scores.shape != same.shape or scores.dim() != 1:
        raise ArgumentError("scores", f"and same must be equally long vectors, got {scores.shape} and {same.shape}")
    if bool(scores.isnan().any()):
        raise ArgumentError("scores", "must not contain NaN")
    positives = int(same.sum())
    negatives = len(same) - positives
    if not positives or not negatives:
        raise ArgumentError("same", f"needs pairs of both kinds, got {positives} same and {negatives} different")
    ordered, order = scores.sort(descending=True)
    accepted_same = same[order].double().cumsum(0)
    accepted = torch.arange(1, len(scores) + 1, dtype=torch.float64, device=scores.device)
    # Only the last of equal scores is a reachable operating point; the first point accepts nothing.
    last = torch.cat([ordered[1:] != ordered[:-1], ordered.new_ones(1, dtype=torch.bool)])
    zero = accepted.new_zeros(1)
    false_accept = torch.cat([zero, (accepted - accepted_same)[last] / negatives])
    false_reject = torch.cat([zero + 1, 1 - accepted_same[last] / positives])
    crossing = int((false_accept >= false_reject).double().argmax())
    gap_before = float(false_reject[crossing - 1] - false_accept[crossing - 1])
    gap_after = float(false_accept[crossing] - false_reject[crossing])
    share = gap_before / (gap_before + gap_after)
    return float(false_accept[crossing - 1] + share * (false_accept[crossing] - false_accept[crossing - 1]))
