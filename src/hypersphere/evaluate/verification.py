r"""Verification: are two samples of one identity? Exact numbers from scores, with intervals and in words.

Rules that hold for every function here:

* A score is higher the more alike a pair is (see :func:`~hypersphere.evaluate.metrics.pair_similarity`). Pairs of one
  identity are *genuine*, the others *impostors*. TAR is the share of genuine pairs that are accepted, FAR the share of
  impostors.
* A threshold accepts scores strictly **above** it. Curves, as usual, have a point for every distinct score, at which
  scores equal to it are accepted too.
* Scores may lie on any device and are never transformed. Infinite ones are in order where only the order counts; NaN
  and pairs of a single kind are errors.
* Intervals come from a bootstrap over identities: whole identities are drawn with replacement, a genuine pair counts
  as often as its identity was drawn, and an impostor pair as often as the product for its two identities (a two-way
  bootstrap). Pairs that share an identity are thereby drawn together, as they must be: they are not independent. It
  tends to be slightly wide. Protocols with folds state the standard error over the folds instead.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.evaluate.metrics import (
    check_both_kinds,
    check_pairs,
    crossing_rate,
    equal_error_rate,
    flip_features,
    operating_points,
)
from hypersphere.geometry import normalise

BOOTSTRAP_ELEMENTS = 2**22
"""Most pair weights of the bootstrap that are held at a time (draws times pairs)."""

Interval = tuple[float, float]


# ------------------------------------------------------------------------------------------------------- curves


class Roc(NamedTuple):
    """Receiver operating characteristic: one point for every distinct score, from accepting nothing to everything.

    Attributes:
        far: False-accept rates ``(T,)`` in float64, from 0 to 1.
        tar: True-accept rates ``(T,)`` in float64, from 0 to 1.
        thresholds: ``(T,)``, falling from infinity; a point accepts scores at or above its threshold.
    """

    far: Tensor
    tar: Tensor
    thresholds: Tensor

    def interpolate(self, far: Tensor) -> Tensor:
        """TAR on the straight lines between points. Optimistic: no threshold may reach it (see :func:`tar_at_far`).

        Example:
            >>> curve = roc(torch.tensor([0.9, 0.7, 0.5, 0.3]), torch.tensor([True, False, True, False]))
            >>> curve.interpolate(torch.tensor([0.25, 1.0]))
            tensor([0.5000, 1.0000], dtype=torch.float64)
        """
        far = far.to(self.far)
        left = (torch.searchsorted(self.far, far, right=True) - 1).clamp(0, len(self.far) - 2)
        width = self.far[left + 1] - self.far[left]
        share = torch.where(width > 0, (far - self.far[left]) / torch.where(width > 0, width, 1.0), 1.0)
        return torch.lerp(self.tar[left], self.tar[left + 1], share)


class Det(NamedTuple):
    """Detection error trade-off: the two kinds of error at every distinct score.

    Attributes:
        far: False-accept rates ``(T,)`` in float64.
        frr: False-reject rates ``(T,)`` in float64.
        thresholds: As in :class:`Roc`.
    """

    far: Tensor
    frr: Tensor
    thresholds: Tensor

    def deviates(self) -> tuple[Tensor, Tensor]:
        """Both rates as quantiles of the normal distribution, the axes of a DET plot; infinite at rates 0 and 1."""
        return torch.special.ndtri(self.far), torch.special.ndtri(self.frr)


def _roc(thresholds: Tensor, false_accepts: Tensor, true_accepts: Tensor) -> Roc:
    impostors, genuine = int(false_accepts[-1]), int(true_accepts[-1])
    check_both_kinds(genuine, impostors)
    return Roc(false_accepts.double() / impostors, true_accepts.double() / genuine, thresholds)


def roc(scores: Tensor, same: Tensor, simplify: bool = False) -> Roc:
    """The ROC curve.

    Args:
        scores: ``(P,)``.
        same: ``(P,)`` booleans.
        simplify: Leave out points on the straight line between their neighbours; the drawn line stays the same.

    Example:
        >>> curve = roc(torch.tensor([0.9, 0.7, 0.5, 0.3]), torch.tensor([True, False, True, False]))
        >>> curve.tar.tolist()
        [0.0, 0.5, 0.5, 1.0, 1.0]
    """
    thresholds, false_accepts, true_accepts = operating_points(scores, same)
    if simplify:
        run, rise = false_accepts.diff(), true_accepts.diff()
        corner = torch.nn.functional.pad(run[1:] * rise[:-1] != run[:-1] * rise[1:], (1, 1), value=True)
        thresholds, false_accepts, true_accepts = thresholds[corner], false_accepts[corner], true_accepts[corner]
    return _roc(thresholds, false_accepts, true_accepts)


def det(scores: Tensor, same: Tensor, simplify: bool = False) -> Det:
    """The DET curve: false rejects against false accepts.

    Args:
        scores: ``(P,)``.
        same: ``(P,)`` booleans.
        simplify: As for :func:`roc`.

    Example:
        >>> det(torch.tensor([0.9, 0.7, 0.5, 0.3]), torch.tensor([True, False, True, False])).frr.tolist()
        [1.0, 0.5, 0.5, 0.0, 0.0]
    """
    far, tar, thresholds = roc(scores, same, simplify)
    return Det(far, 1 - tar, thresholds)


def _area(false_accepts: Tensor, true_accepts: Tensor) -> Tensor:
    """Area under the curve through counts ``(..., T)``; the sum is exact for integers."""
    doubled = (false_accepts.diff() * (true_accepts[..., 1:] + true_accepts[..., :-1])).sum(-1)
    return doubled.double() / (2.0 * false_accepts[..., -1].double() * true_accepts[..., -1].double())


def auc(scores: Tensor, same: Tensor) -> float:
    r"""Area under the ROC curve, :math:`P(s_+ > s_-) + \frac{1}{2} P(s_+ = s_-)`.

    Args:
        scores: ``(P,)``.
        same: ``(P,)`` booleans.

    Example:
        >>> auc(torch.tensor([0.9, 0.5, 0.5]), torch.tensor([True, True, False]))
        0.75
    """
    _, false_accepts, true_accepts = operating_points(scores, same)
    check_both_kinds(int(true_accepts[-1]), int(false_accepts[-1]))
    return float(_area(false_accepts, true_accepts))


def rates_at(scores: Tensor, same: Tensor, threshold: float) -> tuple[float, float]:
    """FAR and TAR when scores above ``threshold`` are accepted.

    Args:
        scores: ``(P,)``.
        same: ``(P,)`` booleans.
        threshold: Any number.

    Example:
        >>> rates_at(torch.tensor([0.9, 0.7, 0.5, 0.3]), torch.tensor([True, False, True, False]), 0.5)
        (0.5, 0.5)
    """
    scores, same = check_pairs(scores, same)
    check_range("threshold", threshold)
    genuine = int(same.count_nonzero())
    check_both_kinds(genuine, len(same) - genuine)
    accepted = scores.double() > threshold
    true_accepts = int((accepted & same).count_nonzero())
    return (int(accepted.count_nonzero()) - true_accepts) / (len(same) - genuine), true_accepts / genuine


# --------------------------------------------------------------------------------------------------- TAR at FAR


@dataclass(frozen=True)
class OperatingPoint:
    """What a threshold for a wanted FAR gives.

    Attributes:
        target_far: The FAR that was asked for.
        threshold: Scores above it are accepted.
        far: The FAR that is reached, at most ``target_far``.
        tar: The share of genuine pairs accepted.
    """

    target_far: float
    threshold: float
    far: float
    tar: float

    def __str__(self) -> str:
        return f"TAR {self.tar:.2%} at FAR {self.far:.3g} (at most {self.target_far:g}), threshold {self.threshold:.4f}"


def _allowed(far: float, impostors: int) -> int:
    """The largest number k with ``k / impostors <= far``; the product alone rounds 0.29 * 100 down to 28."""
    k = min(math.floor(far * impostors) + 1, impostors)
    while k / impostors > far:
        k -= 1
    return k


def _check_fars(fars: float | Sequence[float], impostors: int) -> list[tuple[float, int]]:
    """The wanted rates, each with the number of impostors that may be accepted."""
    targets: list[float] = torch.as_tensor(fars, dtype=torch.float64).flatten().tolist()
    if not targets:
        raise ArgumentError("fars", "must hold at least one rate")
    for far in targets:
        check_range("fars", far, 0, 1)
    if min(targets) * impostors < 10:
        warnings.warn(
            f"a FAR of {min(targets):g} is less than 10 of {impostors} impostor pairs; its threshold is unreliable",
            stacklevel=3,
        )
    return [(far, _allowed(far, impostors)) for far in targets]


def _order_statistic(genuine: Tensor, top: Tensor, impostors: int, far: float, k: int) -> OperatingPoint:
    """Operating point from genuine scores and the largest impostor scores in falling order, at least k + 1 of them."""
    threshold = top[k] if k < impostors else top.new_tensor(-torch.inf)
    accepted, right = int((top > threshold).count_nonzero()), int((genuine > threshold).count_nonzero())
    return OperatingPoint(far, float(threshold), accepted / impostors, right / len(genuine))


def tar_at_far(scores: Tensor, same: Tensor, fars: float | Sequence[float]) -> list[OperatingPoint]:
    r"""TAR at the lowest threshold whose FAR is at most the wanted one, by the exact order statistic.

    With N impostors and :math:`k = \lfloor \mathrm{FAR} \cdot N \rfloor`, the threshold is the (k + 1)-th largest
    impostor score, and scores above it are accepted; nothing is interpolated. Only the largest k + 1 impostor scores
    are put in order. Warns where k is below 10.

    Args:
        scores: ``(P,)``.
        same: ``(P,)`` booleans.
        fars: One or more rates in [0, 1].

    Returns:
        One point per rate.

    Example:
        >>> scores = torch.arange(100) / 100
        >>> print(tar_at_far(scores, torch.arange(100) % 5 == 4, [0.125])[0])
        TAR 15.00% at FAR 0.125 (at most 0.125), threshold 0.8600
    """
    scores, same = check_pairs(scores, same)
    genuine = scores[same]
    impostors = len(scores) - len(genuine)
    check_both_kinds(len(genuine), impostors)
    targets = _check_fars(fars, impostors)
    count = min(max(k for _, k in targets) + 1, impostors)
    top = torch.where(same, -torch.inf, scores).topk(count).values
    return [_order_statistic(genuine, top, impostors, far, k) for far, k in targets]


# ------------------------------------------------------------------------------------------------------ results


@dataclass(frozen=True)
class Verification:
    """A number with its interval and what was computed in words.

    Attributes:
        name: ``"accuracy"``, ``"auc"``, ``"eer"`` or ``"tar"``.
        value: The number.
        interval: Lower and upper bound.
        genuine: Number of genuine pairs.
        impostors: Number of impostor pairs.
        words: How value and interval were computed.
        level: Confidence of the interval.
        thresholds: The threshold, or that of each fold; empty for numbers over all thresholds.
        folds: The number on each fold; empty where there are no folds.
        standard_error: Of the mean over folds; ``nan`` where there are no folds.
    """

    name: str
    value: float
    interval: Interval
    genuine: int
    impostors: int
    words: str
    level: float = 0.95
    thresholds: tuple[float, ...] = ()
    folds: tuple[float, ...] = ()
    standard_error: float = math.nan

    def __str__(self) -> str:
        error = "" if math.isnan(self.standard_error) else f" ± {self.standard_error:.2%}"
        low, high = self.interval
        return (
            f"{self.value:.2%}{error}, {self.level:.0%} interval [{low:.2%}, {high:.2%}]: {self.words} "
            f"({self.genuine:,} genuine and {self.impostors:,} impostor pairs)"
        )


def wilson_interval(successes: float, trials: int, level: float = 0.95) -> Interval:
    """Wilson's interval of a share of independent trials; not empty at shares 0 and 1.

    Example:
        >>> tuple(round(bound, 4) for bound in wilson_interval(0, 100))
        (0.0, 0.037)
    """
    check_range("trials", trials, 1)
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, weight = successes / trials, z * z / trials
    middle = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / trials + weight / (4 * trials))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _student_quantile(level: float, freedom: int) -> float:
    """Two-sided quantile of Student's t: closed forms for 1 and 2 degrees of freedom, else within 0.2 % at 95 %."""
    if freedom == 1:
        return math.tan(math.pi * level / 2)
    if freedom == 2:
        return level * math.sqrt(2 / (1 - level * level))
    z = NormalDist().inv_cdf((1 + level) / 2)  # and its expansion in 1 / freedom
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ArgumentError("level", f"must be between 0 and 1, got {level}")


# ---------------------------------------------------------------------------------------------------- bootstrap


class _Draws(NamedTuple):
    """Numbers of accepted pairs in draws of the bootstrap, at every distinct score: ``(B, T + 1)`` in float64."""

    thresholds: Tensor
    false_accepts: Tensor
    true_accepts: Tensor


def _identity_index(scores: Tensor, same: Tensor, identities: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, int]:
    """Identities of both sides as numbers from 0, and how many there are."""
    first, second = (side.to(scores.device) for side in identities)
    if first.shape != scores.shape or second.shape != scores.shape:
        raise ArgumentError(
            "identities", f"must be two vectors of {len(scores)}, got {tuple(first.shape)} and {tuple(second.shape)}"
        )
    if not torch.equal(first == second, same):
        raise ArgumentError("identities", "must be equal for the pairs marked as same and for no others")
    people, index = torch.cat([first, second]).unique(return_inverse=True)
    return index[: len(first)], index[len(first) :], len(people)


def _corners(genuine: Tensor, last: Tensor) -> Tensor:
    """Those of the last places of equal scores that are not within a run of pairs of one kind.

    Areas, crossings and rates are the same without the others: the curve runs straight on there.
    """
    before = torch.nn.functional.pad(genuine.cumsum(0)[last], (1, 0)).diff()
    sizes = torch.nn.functional.pad(last + 1, (1, 0)).diff()
    kind = torch.where(before == 0, 0, torch.where(before == sizes, 1, 2))
    return last[torch.nn.functional.pad((kind[1:] != kind[:-1]) | (kind[1:] == 2), (0, 1), value=True)]


def _bootstrap(
    scores: Tensor,
    same: Tensor,
    identities: tuple[Tensor, Tensor] | None,
    samples: int,
    seed: int,
    corners: bool = False,
) -> Iterator[_Draws]:
    """Draws of the bootstrap over identities, or over pairs where they are not known, as many at a time as fit.

    The draws are made on the CPU, so that they are the same for every device.
    """
    check_range("samples", samples, 2)
    ordered, order = scores.sort(descending=True)
    genuine = same[order]
    last = torch.cat([ordered[1:] != ordered[:-1], same.new_ones(1)]).nonzero().squeeze(1)
    last = _corners(genuine, last) if corners else last
    thresholds = torch.cat([ordered.new_full((1,), torch.inf), ordered[last]])
    # How many of each kind are accepted at each point, to look up in the sums of their weights.
    places = [torch.nn.functional.pad(kind.cumsum(0)[last], (1, 0)) for kind in (~genuine, genuine)]
    if identities is None:
        first, units = order, len(scores)
    else:
        first, second, units = _identity_index(scores, same, identities)
        first, second = first[order], second[order][~genuine]
    of_impostors, of_genuine = first[~genuine], first[genuine]
    generator = torch.Generator().manual_seed(seed)
    rows = max(1, BOOTSTRAP_ELEMENTS // max(len(scores), units))
    for start in range(0, samples, rows):
        drawn = torch.randint(units, (min(rows, samples - start), units), generator=generator)
        counts = torch.zeros(drawn.shape, dtype=torch.float64)
        counts.scatter_add_(1, drawn, torch.ones_like(counts))
        counts = counts.to(scores.device)
        weights = [counts[:, of_impostors], counts[:, of_genuine]]
        if identities is not None:
            weights[0] *= counts[:, second]
        sums = [
            torch.nn.functional.pad(weight.cumsum(1), (1, 0))[:, place]
            for weight, place in zip(weights, places, strict=True)
        ]
        yield _Draws(thresholds, *sums)


def _allowed_index(draws: _Draws, far: float) -> Tensor:
    """Last operating point of every draw with a FAR of at most ``far``, ``(B,)``."""
    # The weights are whole numbers: the slack only undoes rounding of the product.
    limit = far * draws.false_accepts[:, -1:] * (1 + 1e-12)
    return (draws.false_accepts <= limit).sum(1) - 1


def _draw_tar(draws: _Draws, far: float) -> Tensor:
    """TAR at a FAR of every draw."""
    index = _allowed_index(draws, far).unsqueeze(1)
    return draws.true_accepts.gather(1, index).squeeze(1) / draws.true_accepts[:, -1]


def _draw_eer(draws: _Draws) -> Tensor:
    """Equal-error rate of every draw."""
    rates = (counts / counts[:, -1:].clamp(min=1) for counts in (draws.false_accepts, draws.true_accepts))
    return crossing_rate(*rates)


def _percentiles(values: list[Tensor], valid: list[Tensor], level: float) -> Interval:
    """Interval that leaves out equal shares of the draws at both ends; draws without pairs of both kinds do not count.

    Bounds are values of draws, so that infinite ones do no harm.
    """
    kept = torch.cat(values)[torch.cat(valid)].sort().values
    if not len(kept):
        raise ArgumentError("samples", "gave no draw with pairs of both kinds; there are too few identities")
    tail = (1 - level) / 2 * (len(kept) - 1)
    return float(kept[math.floor(tail)]), float(kept[math.ceil(len(kept) - 1 - tail)])


def _drawn_from(identities: tuple[Tensor, Tensor] | None, samples: int) -> str:
    """What was drawn, in words."""
    if identities is None:
        return f"interval from {samples} bootstrap draws of pairs, too narrow where identities recur"
    return f"interval from {samples} bootstrap draws of {len(torch.cat(identities).unique())} identities"


def verification_summary(
    scores: Tensor,
    same: Tensor,
    *,
    fars: Sequence[float] = (1e-3, 1e-2),
    identities: tuple[Tensor, Tensor] | None = None,
    samples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, Verification]:
    """AUC, equal-error rate and TAR at rates, with intervals.

    Args:
        scores: ``(P,)``.
        same: ``(P,)`` booleans.
        fars: Rates for :func:`tar_at_far`; may be empty.
        identities: Integer identities of the first and second samples, each ``(P,)``. Without them pairs are drawn
            as if they were independent, which gives too narrow intervals where identities recur.
        samples: Number of draws.
        level: Confidence of the intervals.
        seed: Of the draws.

    Returns:
        ``"auc"``, ``"eer"`` and ``"tar@far=RATE"`` for every rate.

    Example:
        >>> first, second = torch.triu_indices(6, 6, 1) // 2
        >>> scores = torch.tensor([0.6, 0.3, 0.2, 0.4, 0.1, 0.3, 0.5, 0.0, 0.2, 0.8, 0.7, 0.1, 0.2, 0.6, 0.9])
        >>> found = verification_summary(scores, first == second, fars=[], identities=(first, second), samples=100)
        >>> print(found["auc"])
        95.83%, 95% interval [95.83%, 100.00%]: area under the ROC curve, interval from 100 bootstrap draws of
        3 identities (3 genuine and 12 impostor pairs)
    """
    scores, same = check_pairs(scores, same)
    _check_level(level)
    genuine = int(same.count_nonzero())
    impostors = len(same) - genuine
    points = tar_at_far(scores, same, fars) if fars else []
    values: dict[str, float] = {"auc": auc(scores, same), "eer": equal_error_rate(scores, same)}
    values |= {f"tar@far={point.target_far:g}": point.tar for point in points}
    drawn: dict[str, list[Tensor]] = {key: [] for key in values}
    valid: list[Tensor] = []
    for draws in _bootstrap(scores, same, identities, samples, seed, corners=True):
        valid.append((draws.false_accepts[:, -1] > 0) & (draws.true_accepts[:, -1] > 0))
        drawn["auc"].append(_area(draws.false_accepts, draws.true_accepts))
        drawn["eer"].append(_draw_eer(draws))
        for point in points:
            drawn[f"tar@far={point.target_far:g}"].append(_draw_tar(draws, point.target_far))
    words = {"auc": "area under the ROC curve", "eer": "equal-error rate"}
    words |= {f"tar@far={point.target_far:g}": f"TAR at a FAR of at most {point.target_far:g}" for point in points}
    thresholds = {f"tar@far={point.target_far:g}": (point.threshold,) for point in points}
    how = _drawn_from(identities, samples)
    return {
        key: Verification(
            key.split("@")[0],
            value,
            _percentiles(drawn[key], valid, level),
            genuine,
            impostors,
            f"{words[key]}, {how}",
            level,
            thresholds.get(key, ()),
        )
        for key, value in values.items()
    }


@dataclass(frozen=True)
class Calibration:
    """A threshold for a wanted FAR, with what is known about it; plain numbers, to be stored as JSON.

    Attributes:
        threshold: Scores above it are accepted.
        interval: Of the threshold.
        target_far: The FAR that was asked for.
        far: The FAR on the calibration pairs, at most ``target_far``.
        far_interval: Of the FAR at this threshold.
        tar: The share of genuine calibration pairs accepted.
        tar_interval: Of the TAR at this threshold.
        genuine: Number of genuine pairs.
        impostors: Number of impostor pairs.
        level: Confidence of the intervals.
        score: The kind of score that the threshold is for.
        words: How it was computed.
    """

    threshold: float
    interval: Interval
    target_far: float
    far: float
    far_interval: Interval
    tar: float
    tar_interval: Interval
    genuine: int
    impostors: int
    level: float = 0.95
    score: str = "cosine"
    words: str = ""

    def accept(self, scores: Tensor) -> Tensor:
        """Whether each pair is taken to be of one identity: booleans of the shape of ``scores``."""
        return scores.double() > self.threshold  # a float32 tensor would round the threshold

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; :meth:`from_dict` reads them."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Calibration:
        """A calibration from :meth:`to_dict`.

        Example:
            >>> scores = torch.linspace(0, 1, 200)
            >>> found = calibrate(scores, scores > 0.5, target_far=0.1)
            >>> Calibration.from_dict(found.to_dict()) == found
            True
        """
        fields = dataclasses.fields(cls)
        wrong = {field.name for field in fields} ^ values.keys()
        if wrong:
            raise ArgumentError(
                "values", f"must have the fields of a calibration, got wrong or missing {sorted(wrong)}"
            )
        plain: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in values.items()}
        return cls(**plain)

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"accept {self.score} scores above {self.threshold:.4f} [{low:.4f}, {high:.4f}]: "
            f"FAR {self.far:.3g} [{self.far_interval[0]:.3g}, {self.far_interval[1]:.3g}], "
            f"TAR {self.tar:.2%} [{self.tar_interval[0]:.2%}, {self.tar_interval[1]:.2%}]; "
            f"{self.level:.0%} intervals, {self.words} ({self.genuine:,} genuine and {self.impostors:,} impostor pairs)"
        )


def calibrate(
    scores: Tensor,
    same: Tensor,
    target_far: float = 1e-3,
    *,
    identities: tuple[Tensor, Tensor] | None = None,
    score: str = "cosine",
    samples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Calibration:
    """The threshold for a wanted FAR, by the exact order statistic of :func:`tar_at_far`.

    The interval of the threshold is that of the threshold found anew in every draw of the bootstrap; those of FAR and
    TAR are for the returned threshold. No draw shows a false accept where the pairs had none, so the interval of the
    FAR is widened to Wilson's.

    Args:
        scores: ``(P,)``, finite.
        same: ``(P,)`` booleans.
        target_far: Between 0 and 1.
        identities: As for :func:`verification_summary`.
        score: The kind of score, stored with the threshold.
        samples: Number of draws.
        level: Confidence of the intervals.
        seed: Of the draws.

    Example:
        >>> scores = torch.linspace(0, 1, 200)
        >>> round(calibrate(scores, torch.arange(200) % 2 == 0, target_far=0.1).threshold, 4)
        0.8995
    """
    scores, same = check_pairs(scores, same)
    if bool(scores.isinf().any()):
        raise ArgumentError("scores", "must be finite")
    check_range("target_far", target_far, 0, open_low=True)
    if target_far >= 1:
        raise ArgumentError("target_far", f"must be less than 1, got {target_far}")
    _check_level(level)
    (point,) = tar_at_far(scores, same, target_far)
    genuine = int(same.count_nonzero())
    thresholds, fars, tars, valid = [], [], [], []
    for draws in _bootstrap(scores, same, identities, samples, seed):
        # The first operating point that accepts too many impostors is at an impostor's score: the order statistic.
        thresholds.append(
            draws.thresholds[(_allowed_index(draws, target_far) + 1).clamp(max=len(draws.thresholds) - 1)]
        )
        above = int((draws.thresholds > point.threshold).count_nonzero()) - 1
        fars.append(draws.false_accepts[:, above] / draws.false_accepts[:, -1])
        tars.append(draws.true_accepts[:, above] / draws.true_accepts[:, -1])
        valid.append((draws.false_accepts[:, -1] > 0) & (draws.true_accepts[:, -1] > 0))
    low, high = _percentiles(fars, valid, level)
    impostors = len(same) - genuine
    least, most = wilson_interval(round(point.far * impostors), impostors, level)
    return Calibration(
        point.threshold,
        _percentiles(thresholds, valid, level),
        target_far,
        point.far,
        (min(low, least), max(high, most)),
        point.tar,
        _percentiles(tars, valid, level),
        genuine,
        impostors,
        level,
        score,
        f"lowest threshold with a FAR of at most {target_far:g}, {_drawn_from(identities, samples)}",
    )


# ---------------------------------------------------------------------------------------------- folds, LFW, YTF


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
    _check_level(level)
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
    half = _student_quantile(level, count - 1) * error
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
    _check_level(level)
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


# ---------------------------------------------------------------------------------------------------- streaming


class PairScores:
    """Exact verification metrics from scores that come in chunks, in bounded memory.

    All genuine scores are kept (there are few), and the ``capacity`` largest impostor scores: at most three times
    ``capacity`` scores beside the chunk at hand. While all impostors fit, everything is exact. After that
    :meth:`tar_at_far` still is for rates whose threshold is among those kept, at least for ``capacity`` false accepts
    less one. What needs all impostors (:meth:`auc`, :meth:`equal_error_rate`, :meth:`roc`, larger rates) needs a
    second pass over the same chunks, which counts impostors between the genuine scores; between two of those the ROC
    is a straight line, so the counts are all there is to know. Anything else is an error, never an estimate.

    Several processes each feed their own chunks and :meth:`merge` the results (objects can be pickled, as by
    ``torch.distributed.all_gather_object``). For a second pass, merge first, then let each process feed its own
    :meth:`second_pass` of the merged object, and merge these.

    Args:
        capacity: Most genuine scores, and most impostor scores, that are kept.

    Example:
        >>> scores, same = torch.linspace(0, 1, 1000), torch.arange(1000) % 4 == 0
        >>> found = PairScores(capacity=300)
        >>> for part in range(0, 1000, 100):
        ...     found.update(scores[part : part + 100], same[part : part + 100])
        >>> found.tar_at_far(0.1) == tar_at_far(scores, same, 0.1)
        True
    """

    def __init__(self, capacity: int = 2**20) -> None:
        check_range("capacity", capacity, 1)
        self.capacity = capacity
        self.genuine = 0
        self.impostors = 0
        self._dtype: torch.dtype | None = None
        self._genuine: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._floor = -math.inf  # impostors up to here may have been dropped
        self._expected: tuple[int, int] | None = None  # in a second pass: genuine and impostors of the first
        self._levels = self._cells = torch.empty(0)  # in a second pass: distinct genuine scores; impostors on, between

    def update(self, scores: Tensor, same: Tensor) -> None:
        """Add pairs.

        Args:
            scores: ``(P,)``, finite, and of one type in all chunks; a chunk may be empty.
            same: ``(P,)`` booleans.
        """
        scores, same = check_pairs(scores, same)
        if not bool(scores.isfinite().all()):
            raise ArgumentError("scores", "must be finite")
        genuine, impostors = scores[same], scores[~same]
        self._check_fits(len(genuine), scores.dtype)
        self.genuine += len(genuine)
        self.impostors += len(impostors)
        if self._expected is None:
            self._genuine.append(genuine)
        else:
            levels = self._levels.to(impostors.device)
            cells = torch.searchsorted(levels, impostors) + torch.searchsorted(levels, impostors, right=True)
            self._cells += cells.bincount(minlength=len(self._cells)).to(self._cells.device)
        self._keep(impostors)

    def merge(self, other: PairScores) -> PairScores:
        """Add what another one, of the same capacity and pass, has seen; returns itself.

        Example:
            >>> first, second = PairScores(), PairScores()
            >>> first.update(torch.tensor([0.9]), torch.tensor([True]))
            >>> second.update(torch.tensor([0.1, 0.2]), torch.tensor([False, False]))
            >>> first.merge(second).auc()
            1.0
        """
        if other.capacity != self.capacity or other._expected != self._expected:
            raise ArgumentError("other", "must have the same capacity and be of the same pass")
        if other._dtype is not None:
            self._check_fits(other.genuine, other._dtype)
        self.genuine += other.genuine
        self.impostors += other.impostors
        if self._expected is None:
            self._genuine += other._genuine
        else:
            self._cells += other._cells.to(self._cells.device)
        self._keep(*other._kept)
        self._floor = max(self._floor, other._floor)  # only now: the other's scores at its own floor are needed
        return self

    def second_pass(self) -> PairScores:
        """An empty one that counts impostors between these genuine scores; feed it the same chunks again.

        Example:
            >>> scores, same = torch.linspace(0, 1, 1000), torch.arange(1000) % 250 == 0
            >>> first = PairScores(capacity=10)
            >>> first.update(scores, same)
            >>> second = first.second_pass()
            >>> second.update(scores, same)
            >>> second.auc() == auc(scores, same)
            True
        """
        check_both_kinds(self.genuine, self.impostors)
        if self._expected is not None:
            raise ArgumentError("second_pass", "must follow a first pass, got a second one")
        new = PairScores(self.capacity)
        new._expected = (self.genuine, self.impostors)
        new._dtype = self._dtype
        new._genuine = [self._joined(self._genuine)]
        new._levels = new._genuine[0].unique()
        new._cells = torch.zeros(2 * len(new._levels) + 1, dtype=torch.int64, device=new._levels.device)
        return new

    def tar_at_far(self, fars: float | Sequence[float]) -> list[OperatingPoint]:
        """As :func:`tar_at_far` of all scores.

        Where a threshold is below the impostor scores kept, a second pass gives the exact TAR; threshold and FAR are
        then those of accepting just these genuine scores.

        Args:
            fars: One or more rates in [0, 1].
        """
        self._check_complete()
        targets = _check_fars(fars, self.impostors)
        genuine = self._joined(self._genuine)
        top = self._joined(self._kept).to(genuine.device).sort(descending=True).values
        reach = len(top) if self._floor == -math.inf else int((top >= self._floor).count_nonzero())
        points = []
        for far, k in targets:
            if k < reach or reach == self.impostors:
                points.append(_order_statistic(genuine, top, self.impostors, far, k))
            else:
                points.append(self._counted_point(far, k))
        return points

    def roc(self) -> Roc:
        """The ROC curve; after a second pass without the points on straight lines between genuine scores."""
        return _roc(*self._operating_points(f"capacity of {self.impostors}"))

    def auc(self) -> float:
        """As :func:`auc` of all scores."""
        _, false_accepts, true_accepts = self._operating_points(f"capacity of {self.impostors}")
        return float(_area(false_accepts, true_accepts))

    def equal_error_rate(self) -> float:
        """As :func:`~hypersphere.evaluate.metrics.equal_error_rate` of all scores."""
        curve = self.roc()
        return float(crossing_rate(curve.far, curve.tar))

    def _counted_point(self, far: float, k: int) -> OperatingPoint:
        thresholds, false_accepts, true_accepts = self._operating_points(f"capacity of {k + 1}")
        index = int((false_accepts <= k).sum()) - 1
        # Points accept scores at their threshold, and operating points only those above.
        threshold = thresholds[index].nextafter(thresholds.new_tensor(-torch.inf))
        accepted, right = int(false_accepts[index]), int(true_accepts[index])
        return OperatingPoint(far, float(threshold), accepted / self.impostors, right / int(true_accepts[-1]))

    def _operating_points(self, need: str) -> tuple[Tensor, Tensor, Tensor]:
        """Thresholds and counts as :func:`operating_points` has them, less those on straight lines."""
        self._check_complete()
        genuine, kept = self._joined(self._genuine), self._joined(self._kept)
        if len(kept) == self.impostors:
            same = torch.arange(len(genuine) + len(kept), device=genuine.device) < len(genuine)
            return operating_points(torch.cat([genuine, kept.to(genuine.device)]), same)
        if self._expected is None:
            raise ArgumentError("capacity", f"is too small: this needs a {need}, got {self.capacity}, or a second pass")
        levels, counts = genuine.unique(return_counts=True)
        infinity = levels.new_tensor(torch.inf)
        # Cells in falling order: above the highest level, on it, between it and the next, ..., below the lowest.
        gaps = torch.cat([-infinity.unsqueeze(0), levels.nextafter(infinity)])
        thresholds = levels.new_empty(len(self._cells))
        thresholds[0::2], thresholds[1::2] = gaps, levels
        accepted = torch.zeros_like(self._cells)
        accepted[1::2] = counts
        start = self._cells.new_zeros(1)
        impostors, genuine = (torch.cat([start, numbers.flip(0).cumsum(0)]) for numbers in (self._cells, accepted))
        return torch.cat([infinity.unsqueeze(0), thresholds.flip(0)]), impostors, genuine

    def _check_fits(self, more: int, dtype: torch.dtype) -> None:
        if self._dtype not in (None, dtype):
            raise ArgumentError("scores", f"must all have one type, got {dtype} after {self._dtype}")
        self._dtype = dtype
        if self._expected is None and self.genuine + more > self.capacity:
            raise ArgumentError(
                "capacity", f"must hold every genuine score, got {self.capacity} and {self.genuine + more} scores"
            )

    def _check_complete(self) -> None:
        check_both_kinds(len(self._joined(self._genuine)), self.impostors)
        if self._expected is None:
            return
        genuine, impostors = self._expected
        if self.impostors != impostors or self.genuine not in (0, genuine):
            raise ArgumentError(
                "second_pass",
                f"must see all {impostors} impostor and all or none of {genuine} genuine pairs of the first pass, "
                f"got {self.impostors} and {self.genuine}",
            )

    def _keep(self, *impostors: Tensor) -> None:
        """Add impostor scores, and drop the lowest ones beyond the capacity now and then."""
        self._kept += [part[part > self._floor] if self._floor > -math.inf else part for part in impostors]
        if sum(map(len, self._kept)) > 2 * self.capacity:
            self._kept = [self._joined(self._kept).topk(self.capacity).values]
            self._floor = float(self._kept[0][-1])

    @staticmethod
    def _joined(parts: list[Tensor]) -> Tensor:
        return torch.cat([part.to(parts[0].device) for part in parts]) if parts else torch.empty(0)
