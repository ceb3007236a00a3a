"""Metrics as pure functions of features, scores and labels."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.geometry import angle, at_least_float32, cosine, cosine_matrix, norm, normalise


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


def confusion_matrix(predictions: Tensor, labels: Tensor, classes: int) -> Tensor:
    r"""How many samples of each class are taken for which, :math:`N_{ij} = \#\{n : y_n = i, \hat y_n = j\}`.

    Args:
        predictions: ``(N,)`` in [0, classes).
        labels: ``(N,)`` in [0, classes).
        classes: Number of classes C.

    Returns:
        Whole numbers ``(C, C)``; rows are true classes.

    Example:
        >>> confusion_matrix(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), 2)
        tensor([[1, 1],
                [0, 1]])
    """
    check_range("classes", classes, 1)
    if predictions.shape != labels.shape or labels.dim() != 1:
        shapes = f"{tuple(predictions.shape)} and {tuple(labels.shape)}"
        raise ArgumentError("predictions", f"and labels must be equally long vectors, got {shapes}")
    for name, given in (("predictions", predictions), ("labels", labels)):
        if len(given) and not 0 <= int(given.min()) <= int(given.max()) < classes:
            raise ArgumentError(name, f"must be in [0, {classes}), got {int(given.min())} to {int(given.max())}")
    return (labels * classes + predictions).bincount(minlength=classes**2).view(classes, classes)


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


def pair_similarity(a: Tensor, b: Tensor, kind: Literal["cosine", "angle", "euclidean"] = "cosine") -> Tensor:
    r"""How alike vectors are; higher is more alike for every kind.

    .. math::
        \cos\angle(a, b), \qquad -\angle(a, b) \text{ in radians}, \qquad -\|a - b\|

    The first two order pairs alike; so does the third for unit vectors. Distances take vectors as they are, with their
    lengths.

    Args:
        a: ``(..., D)``.
        b: ``(..., D)``, broadcastable to ``a``.
        kind: Which of the three.

    Returns:
        ``(...)`` in float32 or wider.

    Example:
        >>> pair_similarity(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]]), "euclidean")
        tensor([-5.])
    """
    check_choice("kind", kind, ("cosine", "angle", "euclidean"))
    if kind == "cosine":
        return cosine(a, b)
    return -angle(a, b) if kind == "angle" else -norm(at_least_float32(a) - at_least_float32(b))


def flip_features(features: Tensor, mirrored: Tensor, how: Literal["concatenate", "add"] = "concatenate") -> Tensor:
    r"""One feature from those of an image and of its mirror image.

    ``"concatenate"`` keeps both, ``(..., 2 D)`` with their lengths; ``"add"`` gives the direction of their sum, which
    is that of their mean.

    Args:
        features: ``(..., D)``.
        mirrored: Same shape.
        how: Which of the two.

    Example:
        >>> flip_features(torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 2.0]]), "add")
        tensor([[0.7071, 0.7071]])
    """
    check_choice("how", how, ("concatenate", "add"))
    if features.shape != mirrored.shape:
        raise ArgumentError("mirrored", f"must have shape {tuple(features.shape)}, got {tuple(mirrored.shape)}")
    return torch.cat([features, mirrored], -1) if how == "concatenate" else normalise(features + mirrored)


def check_pairs(scores: Tensor, same: Tensor) -> tuple[Tensor, Tensor]:
    """Scores in float32 or wider and booleans on the same device; raise unless they can be judged.

    Args:
        scores: ``(P,)`` without NaN.
        same: ``(P,)`` booleans, or integers 0 and 1.

    Example:
        >>> check_pairs(torch.tensor([1, 2]), torch.tensor([0, 1]))
        (tensor([1., 2.], dtype=torch.float64), tensor([False,  True]))
    """
    for name, given in (("scores", scores), ("same", same)):
        if not isinstance(given, Tensor):
            raise ArgumentError(name, f"must be a tensor, got {type(given).__name__}")
    if scores.shape != same.shape or scores.dim() != 1:
        raise ArgumentError("scores", f"and same must be equally long vectors, got {scores.shape} and {same.shape}")
    if same.dtype != torch.bool:
        if not bool(((same == 0) | (same == 1)).all()):
            raise ArgumentError("same", "must be booleans, or numbers 0 and 1")
        same = same.bool()
    scores = at_least_float32(scores.detach()) if scores.is_floating_point() else scores.double()
    if len(scores) and bool(scores.max().isnan()):  # the largest of numbers with a NaN among them is NaN
        raise ArgumentError("scores", "must not contain NaN")
    return scores, same.to(scores.device)


def check_both_kinds(genuine: int, impostors: int) -> None:
    """Raise unless there are pairs of both kinds."""
    if not genuine or not impostors:
        raise ArgumentError("same", f"needs pairs of both kinds, got {genuine} same and {impostors} different")


def operating_points(scores: Tensor, same: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How many pairs of each kind are accepted at every distinct score.

    Args:
        scores: ``(P,)``; higher means more alike.
        same: ``(P,)`` booleans.

    Returns:
        Thresholds from infinity (nothing is accepted) downwards, the numbers of different-class pairs with scores at
        or above them, and those of same-class pairs: ``(T + 1,)`` for T distinct scores.

    Example:
        >>> operating_points(torch.tensor([0.9, 0.2, 0.2]), torch.tensor([True, True, False]))
        (tensor([   inf, 0.9000, 0.2000]), tensor([0, 0, 1]), tensor([0, 1, 2]))
    """
    scores, same = check_pairs(scores, same)
    ordered, order = scores.sort(descending=True)
    # Only the last of equal scores is a reachable operating point.
    last = torch.cat([ordered[1:] != ordered[:-1], ordered.new_ones(min(len(ordered), 1), dtype=torch.bool)])
    zero = last.new_zeros(1, dtype=torch.int64)
    true_accepts = torch.cat([zero, same[order].cumsum(0)[last]])
    accepts = torch.cat([zero, last.nonzero().squeeze(1) + 1])
    return torch.cat([ordered.new_full((1,), torch.inf), ordered[last]]), accepts - true_accepts, true_accepts


def crossing_rate(far: Tensor, tar: Tensor) -> Tensor:
    """Where lines through operating points have as many false accepts as false rejects.

    Args:
        far: False-accept rates from 0 to 1, ``(..., T)``, not decreasing.
        tar: True-accept rates from 0 to 1, same shape.

    Returns:
        ``(...)``.

    Example:
        >>> crossing_rate(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.0, 0.5, 1.0]))
        tensor(0.3333)
    """
    gap = far + tar - 1  # from -1 to 1, not decreasing
    after = (gap < 0).sum(-1, keepdim=True).clamp(max=gap.shape[-1] - 1)
    before = after - 1
    share = -gap.gather(-1, before) / (gap.gather(-1, after) - gap.gather(-1, before))
    return torch.lerp(far.gather(-1, before), far.gather(-1, after), share).squeeze(-1)


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
    _, false_accepts, true_accepts = operating_points(scores, same)
    genuine, impostors = int(true_accepts[-1]), int(false_accepts[-1])
    check_both_kinds(genuine, impostors)
    return float(crossing_rate(false_accepts.double() / impostors, true_accepts.double() / genuine))
