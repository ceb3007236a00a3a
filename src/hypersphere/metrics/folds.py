r"""Verification by folds: accuracies whose thresholds come from the other folds, and the protocols of LFW and YTF."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.geometry import normalise
from hypersphere.metrics.basic import (
    check_both_kinds,
    check_pairs,
    flip_features,
    operating_points,
)
from hypersphere.metrics.intervals import check_level, student_quantile, wilson_interval
from hypersphere.metrics.verification import Verification


def _check_folds(folds: Tensor, pairs: int) -> int:
    """Number of folds; raise unless each has pairs."""
    if folds.dtype != torch.int64 or folds.shape != (pairs,):
        raise ArgumentError("folds", f"must be int64 of shape ({pairs},), got {folds.dtype} {tuple(folds.shape)}")
    if not pairs or int(folds.min()) < 0:
        raise ArgumentError("folds", "must be numbers from 0, one for every pair")
    sizes = folds.bincount()
    if len(sizes) < 2:
        raise ArgumentError("folds", "must be at least two, for a threshold comes from the others")
    if not bool(sizes.all()):
        raise ArgumentError("folds", f"must not be empty, got none for fold {int((sizes == 0).nonzero()[0, 0])}")
    return len(sizes)


def _middles(scores: Tensor, train: Tensor) -> Tensor:
    """Thresholds between neighbouring training scores, and beyond both ends: ``(F, P + 1)``, NaN for no more."""
    ordered = torch.where(train, scores, torch.inf).sort(1).values
    low, high = ordered[:, :-1], ordered[:, 1:]
    middle = low + (high - low) / 2
    middle = torch.where(middle < high, middle, low)  # no number lies between; the lower one separates all the same
    middle = torch.where((low < high) & high.isfinite(), middle, torch.nan)
    top = torch.where(train, scores, -torch.inf).amax(1, keepdim=True)
    infinity = scores.new_tensor(torch.inf)
    return torch.cat([ordered[:, :1].nextafter(-infinity), middle, top.nextafter(infinity)], 1)


def _right_answers(scores: Tensor, same: Tensor, use: Tensor, thresholds: Tensor, strict: bool) -> Tensor:
    """Number of right answers among the pairs in ``use``, ``(F, T)``, for scores ``(1 or F, P)``."""
    ordered, order = (x.expand_as(use).contiguous() for x in scores.sort(1))
    same, use = same[order], use.gather(1, order)
    # How many of the lowest n scores are of a kind, for n from 0.
    genuine, impostors = (torch.nn.functional.pad((use & kind).cumsum(1), (1, 0)) for kind in (same, ~same))
    up_to = torch.searchsorted(ordered, thresholds, right=True)
    below = torch.searchsorted(ordered, thresholds) if strict else up_to
    return genuine[:, -1:] - genuine.gather(1, up_to) + impostors.gather(1, below)


def fold_accuracy(
    scores: Tensor,
    same: Tensor,
    folds: Tensor,
    *,
    thresholds: Tensor | None = None,
    ties: Literal["mean", "first", "last"] = "mean",
    strict: bool = False,
    level: float = 0.95,
    words: str = "",
) -> Verification:
    r"""Accuracy on every fold with the threshold that is best on the others, all folds at once.

    The interval is :math:`\bar a \pm t\, \sigma / \sqrt F` over the F folds, with Student's t and the standard
    deviation :math:`\sigma` with F - 1 in the denominator.

    Args:
        scores: ``(P,)``, or ``(F, P)`` where the scores depend on the training folds; finite.
        same: ``(P,)`` booleans.
        folds: ``(P,)`` in [0, F), F of at least 2.
        thresholds: Candidates ``(T,)``. Default: half-way between neighbouring training scores, which with the ends
            are all that differ on the training folds.
        ties: The mean, first or last of the best candidates, in the order given.
        strict: A score equal to the threshold is wrong for both kinds of pairs. Default: it means different.
        level: Confidence of the interval.
        words: What the scores are, for the result.

    Example:
        >>> scores = torch.tensor([0.9, 0.1, 0.8, 0.3, 0.7, 0.75])
        >>> print(fold_accuracy(scores, torch.tensor([1, 0] * 3), torch.tensor([0, 0, 1, 1, 2, 2])))
        83.33% ± 16.67%, 95% interval [11.62%, 100.00%]: mean accuracy of 3 folds, threshold from the other folds
        (3 genuine and 3 impostor pairs)
    """
    check_choice("ties", ties, ("mean", "first", "last"))
    check_level(level)
    if scores.dim() == 1:
        scores = scores.unsqueeze(0)
    if scores.dim() != 2 or not len(scores):
        raise ArgumentError("scores", f"must have shape (P,) or (F, P), got {tuple(scores.shape)}")
    if not bool(scores.isfinite().all()):
        raise ArgumentError("scores", "must be finite")
    _, same = check_pairs(scores[0], same)
    scores, folds = scores.detach().double(), folds.to(scores.device)
    count = _check_folds(folds, len(same))
    if len(scores) not in (1, count):
        raise ArgumentError("scores", f"must have a row for each of {count} folds, got {len(scores)}")
    test = folds == torch.arange(count, device=folds.device).unsqueeze(1)
    train = ~test
    for kind, name in ((same, "same"), (~same, "different")):
        if not bool((train & kind).any(1).all()):
            raise ArgumentError("same", f"needs {name}-class pairs in the training folds of every fold")
    if thresholds is None:
        candidates = _middles(scores, train)
    else:
        if thresholds.dim() != 1 or not len(thresholds) or not bool(thresholds.isfinite().all()):
            raise ArgumentError("thresholds", f"must be a vector of finite numbers, got {tuple(thresholds.shape)}")
        candidates = thresholds.to(scores).repeat(count, 1)
    chosen = _best_threshold(_right_answers(scores, same, train, candidates.nan_to_num(), strict), candidates, ties)
    line = chosen.unsqueeze(1)
    answers = torch.where(same, scores > line, (scores < line) if strict else (scores <= line))
    accuracies = (answers & test).sum(1).double() / test.sum(1)
    value, error = float(accuracies.mean()), float(accuracies.std()) / math.sqrt(count)
    half = student_quantile(level, count - 1) * error
    genuine = int(same.count_nonzero())
    return Verification(
        "accuracy",
        value,
        (max(value - half, 0.0), min(value + half, 1.0)),
        genuine,
        len(same) - genuine,
        f"mean accuracy of {count} folds, threshold from the other folds{', ' + words if words else ''}",
        level,
        tuple(chosen.tolist()),
        tuple(accuracies.tolist()),
        error,
    )


def _best_threshold(right: Tensor, candidates: Tensor, ties: str) -> Tensor:
    """The candidate of each row with most right answers, ``(F,)``; NaN is no candidate."""
    right = torch.where(candidates.isnan(), -1, right)
    best = right == right.amax(1, keepdim=True)
    if ties == "mean":
        return torch.where(best, candidates, 0.0).sum(1) / best.sum(1)
    places = torch.arange(best.shape[1], device=best.device)
    index = torch.where(best, places, best.shape[1]).amin(1) if ties == "first" else (best * places).amax(1)
    return candidates.gather(1, index.unsqueeze(1)).squeeze(1)


class _Variant(NamedTuple):
    """How a published evaluation turns features into an accuracy."""

    flip: Literal["concatenate", "add"] | None
    centre: bool
    thresholds: Tensor | None
    ties: Literal["mean", "first", "last"]
    strict: bool
    words: str


def _variants() -> dict[str, _Variant]:
    fine, coarse = torch.arange(-10000, 10001).double() / 10000, torch.arange(400).double()
    words = {
        "sphereface": "20001 thresholds on [-1, 1], mean of the best",
        "clcarwin": "cosine with 1e-5 in the denominator, thresholds in steps of 0.005, last of the best",
        "insightface": "negative squared distance of unit features, thresholds in steps of 0.01, first of the best",
        "opensphere": "cosine, the best of all thresholds on all pairs: none was held out",
    }
    return {
        "sphereface": _Variant("concatenate", True, fine, "mean", True, words["sphereface"]),
        "clcarwin": _Variant(None, False, coarse * 0.005 - 1, "last", False, words["clcarwin"]),
        "insightface": _Variant("add", False, -coarse * 0.01, "first", False, words["insightface"]),
        "opensphere": _Variant("add", False, None, "first", False, words["opensphere"]),
    }


def _ratio(products: Tensor, squares: Tensor) -> Tensor:
    """``products / sqrt(squares)`` in [-1, 1], and 0 where the square is 0."""
    zero = squares <= 0
    return torch.where(zero, 0.0, products / torch.where(zero, 1.0, squares).sqrt()).clamp(-1, 1)


def _centred_cosines(left: Tensor, right: Tensor, folds: Tensor, count: int) -> Tensor:
    """Cosines after the mean of each fold's training features is taken off, ``(F, P)``, without copies of features."""
    # Near the mean of all, which is close to those of the training folds, the expanded products lose no digits.
    middle = (left + right).mean(0) / 2
    left, right = left - middle, right - middle
    sums = left.new_zeros(count, left.shape[1]).index_add_(0, folds, left + right)
    means = (sums.sum(0) - sums) / (2 * (len(folds) - folds.bincount())).unsqueeze(1)
    of_left, of_right, square = means @ left.T, means @ right.T, means.square().sum(1, keepdim=True)
    lengths = [
        (side.square().sum(1) - 2 * product + square).clamp(min=0)
        for side, product in ((left, of_left), (right, of_right))
    ]
    return _ratio((left * right).sum(1) - of_left - of_right + square, lengths[0] * lengths[1])


def lfw10(
    left: Tensor,
    right: Tensor,
    same: Tensor,
    folds: Tensor,
    *,
    mirrored: tuple[Tensor, Tensor] | None = None,
    variant: Literal["sphereface", "clcarwin", "insightface", "opensphere"] = "sphereface",
    centre: bool | None = None,
    level: float = 0.95,
) -> Verification:
    """Verification accuracy on pairs in folds, as on LFW's 6,000 pairs in 10 folds.

    The variants are those of published evaluation code. Their results differ by 0.05 to 0.2 points on the same
    features, so the variant belongs to the number:

    * ``"sphereface"``: features of image and mirror image side by side, minus the mean of the training folds; cosine;
      20,001 thresholds from -1 to 1; mean of the best; a score on the threshold is wrong.
    * ``"clcarwin"``: features of the image alone; cosine with 1e-5 in the denominator; 400 thresholds from -1 in steps
      of 0.005; last of the best.
    * ``"insightface"``: direction of the sum with the mirror image's; negative squared distance; 400 thresholds from 0
      down in steps of 0.01; first of the best.
    * ``"opensphere"``: direction of the sum; cosine; the best threshold on all pairs at once, which is optimistic. Its
      interval is Wilson's over pairs.

    Args:
        left: Features of the first images ``(P, D)``.
        right: Features of the second images ``(P, D)``.
        same: ``(P,)`` booleans.
        folds: ``(P,)`` in [0, F).
        mirrored: Features of the mirror images of both sides. Without them ``left`` and ``right`` are used as they
            are, and the words of the result say so.
        variant: Name of the evaluation.
        centre: Take off the mean of the training folds; default: as published. Only ``"sphereface"`` can.
        level: Confidence of the interval.

    Example:
        >>> left = torch.tensor([[1.0, 0.1], [1.0, 0.0], [0.2, 1.0], [0.0, 1.0]])
        >>> right = torch.tensor([[1.0, 0.2], [0.0, 1.0], [0.1, 1.0], [1.0, 0.1]])
        >>> lfw10(left, right, torch.tensor([1, 0, 1, 0]), torch.tensor([0, 0, 1, 1])).folds
        (1.0, 1.0)
    """
    known = _variants()
    check_choice("variant", variant, tuple(known))
    rule = known[variant]
    if left.dim() != 2 or left.shape != right.shape:
        raise ArgumentError("left", f"and right must both be (P, D), got {tuple(left.shape)} and {tuple(right.shape)}")
    if centre and not rule.centre:
        raise ArgumentError("centre", f"is of variant 'sphereface', got variant {variant!r}")
    words = [f"variant {variant}: {rule.words}"]
    left, right = left.detach().double(), right.detach().double()
    if rule.flip and mirrored is not None:
        left, right = (
            flip_features(side, other.detach().double(), rule.flip)
            for side, other in zip((left, right), mirrored, strict=True)
        )
        words.append("image and mirror image")
    else:
        words.append("features as given" if rule.flip else "without mirror images")
    folds, same = folds.to(left.device), same.to(left.device)
    centred = rule.centre if centre is None else centre
    if rule.centre:
        words.append("centred by the training folds" if centred else "not centred")
    scores = _lfw_scores(left, right, folds, variant, centred)
    if variant == "opensphere":
        return _best_accuracy(scores, same, level, ", ".join(words))
    return fold_accuracy(
        scores,
        same,
        folds,
        thresholds=rule.thresholds,
        ties=rule.ties,
        strict=rule.strict,
        level=level,
        words=", ".join(words),
    )


def _lfw_scores(left: Tensor, right: Tensor, folds: Tensor, variant: str, centred: bool) -> Tensor:
    """Scores ``(P,)`` of a variant, or ``(F, P)`` where features are centred by folds."""
    if centred:
        return _centred_cosines(left, right, folds, _check_folds(folds, len(left)))
    if variant == "insightface":
        return -(normalise(left) - normalise(right)).square().sum(1)
    product = (left * right).sum(1)
    if variant == "clcarwin":
        return product / (left.norm(dim=1) * right.norm(dim=1) + 1e-5)
    return _ratio(product, left.square().sum(1) * right.square().sum(1))


def _best_accuracy(scores: Tensor, same: Tensor, level: float, words: str) -> Verification:
    """Accuracy at the best of all thresholds on all pairs."""
    check_level(level)
    thresholds, false_accepts, true_accepts = operating_points(scores, same)
    genuine, impostors = int(true_accepts[-1]), int(false_accepts[-1])
    check_both_kinds(genuine, impostors)
    right = true_accepts - false_accepts + impostors
    best = int(right.argmax())
    total, count = genuine + impostors, int(right[best])
    return Verification(
        "accuracy",
        count / total,
        wilson_interval(count, total, level),
        genuine,
        impostors,
        f"best accuracy, {words}",
        level,
        (float(thresholds[best].nextafter(thresholds.new_tensor(-torch.inf))),),
    )


def _few_frames(videos: Tensor, most: int, seed: int) -> Tensor:
    """Positions of at most so many random frames of each video."""
    shuffled = torch.randperm(len(videos), generator=torch.Generator().manual_seed(seed)).to(videos.device)
    ordered, order = videos[shuffled].sort(stable=True)
    starts = torch.nn.functional.pad(ordered.bincount().cumsum(0), (1, 0))
    place = torch.arange(len(videos), device=videos.device) - starts[ordered]
    return shuffled[order[place < most]]


def video_similarity(
    frames: Tensor,
    videos: Tensor,
    first: Tensor,
    second: Tensor,
    how: Literal["mean_feature", "mean_score"] = "mean_feature",
    centre: Tensor | None = None,
) -> Tensor:
    """One score for every pair of videos (or other sets of images).

    ``"mean_feature"`` is the cosine of the mean features; ``"mean_score"`` is the mean of the cosines of all pairs of
    frames, which is the inner product of the mean directions.

    Args:
        frames: Features of all frames ``(M, D)``.
        videos: The video of each frame, ``(M,)`` in [0, V).
        first: First videos of the pairs, ``(P,)``.
        second: Second videos of the pairs, ``(P,)``.
        how: Which of the two.
        centre: A vector ``(D,)`` that is taken off every frame first.

    Returns:
        ``(P,)`` in [-1, 1], in float64.

    Example:
        >>> frames = torch.tensor([[3.0, 0.0], [0.0, 1.0], [2.0, 0.0]])
        >>> pair = torch.tensor([0]), torch.tensor([1])
        >>> video_similarity(frames, torch.tensor([0, 0, 1]), *pair, "mean_score")
        tensor([0.5000], dtype=torch.float64)
    """
    check_choice("how", how, ("mean_feature", "mean_score"))
    if frames.dim() != 2 or videos.shape != (len(frames),) or first.shape != second.shape or first.dim() != 1:
        raise ArgumentError(
            "frames", f"must be (M, D) with a video for each, got {tuple(frames.shape)} and {tuple(videos.shape)}"
        )
    if any(len(numbers) and int(numbers.min()) < 0 for numbers in (videos, first, second)):
        raise ArgumentError("videos", "must be numbers from 0")
    frames = frames.detach().double()
    if centre is not None:
        frames = frames - centre
    if how == "mean_score":
        frames = normalise(frames)
    counts = videos.bincount(minlength=int(max(first.max(), second.max())) + 1 if len(first) else 0)
    if not bool((counts[first] * counts[second]).all()):
        raise ArgumentError("videos", "must have at least one frame for every video of a pair")
    means = frames.new_zeros(len(counts), frames.shape[1]).index_add_(0, videos, frames)
    means = means / counts.clamp(min=1).unsqueeze(1)
    if how == "mean_feature":
        means = normalise(means)
    return (means[first] * means[second]).sum(1).clamp(-1, 1)


def ytf10(
    frames: Tensor,
    videos: Tensor,
    first: Tensor,
    second: Tensor,
    same: Tensor,
    folds: Tensor,
    *,
    how: Literal["mean_feature", "mean_score"] = "mean_feature",
    centre: bool | None = None,
    most_frames: int | None = None,
    seed: int = 0,
    level: float = 0.95,
) -> Verification:
    """Verification accuracy on pairs of videos in folds, as on the 5,000 pairs in 10 folds of YouTube Faces.

    The threshold follows the rule of :func:`lfw10`'s variant ``"sphereface"``.

    Args:
        frames: Features of all frames ``(M, D)``.
        videos: The video of each frame, ``(M,)`` in [0, V).
        first: First videos of the pairs, ``(P,)``.
        second: Second videos of the pairs, ``(P,)``.
        same: ``(P,)`` booleans.
        folds: ``(P,)`` in [0, F).
        how: Score of a pair, see :func:`video_similarity`.
        centre: Take off the mean of all frames of the training folds' pairs, with repeats; default: for
            ``"mean_score"``.
        most_frames: Use at most so many random frames of a video; default: all.
        seed: Of the random frames.
        level: Confidence of the interval.

    Example:
        >>> frames = torch.tensor([[1.0, 0.1], [1.0, 0.0], [0.2, 1.0], [0.0, 1.0]])
        >>> pairs = torch.tensor([0, 0, 2, 1]), torch.tensor([1, 2, 3, 3])
        >>> ytf10(frames, torch.arange(4), *pairs, torch.tensor([1, 0, 1, 0]), torch.tensor([0, 0, 1, 1])).value
        1.0
    """
    if most_frames is not None:
        check_range("most_frames", most_frames, 1)
        chosen = _few_frames(videos, most_frames, seed)
        frames, videos = frames[chosen], videos[chosen]
    frames = frames.detach().double()
    centred = how == "mean_score" if centre is None else centre
    scores = video_similarity(frames, videos, first, second, how)  # also checks the arguments
    if centred:
        folds = folds.to(frames.device)
        rows = []
        for fold in range(_check_folds(folds, len(first))):
            used = torch.cat([first[folds != fold], second[folds != fold]])
            repeats = used.bincount(minlength=int(videos.max()) + 1)[videos].double()
            mean = repeats @ frames / repeats.sum()
            rows.append(video_similarity(frames, videos, first, second, how, mean))
        scores = torch.stack(rows)
    words = {"mean_feature": "cosine of the mean features", "mean_score": "mean cosine of all pairs of frames"}[how]
    some = "all frames" if most_frames is None else f"at most {most_frames} random frames a video"
    return fold_accuracy(
        scores,
        same,
        folds,
        thresholds=_variants()["sphereface"].thresholds,
        strict=True,
        level=level,
        words=f"{words}, {some}, {'centred by the training folds' if centred else 'not centred'}",
    )
