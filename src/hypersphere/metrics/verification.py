r"""Verification: are two samples of one identity? Exact numbers from scores, with intervals and in words.

Rules that hold for every function here:

* A score is higher the more alike a pair is (see :func:`~hypersphere.metrics.basic.pair_similarity`). Pairs of one
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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hypersphere.errors import ArgumentError, check_range
from hypersphere.metrics.basic import (
    check_both_kinds,
    check_pairs,
    crossing_rate,
    equal_error_rate,
    operating_points,
)
from hypersphere.metrics.intervals import Interval, check_level, wilson_interval
from hypersphere.metrics.processes import Group, agreed, gathered, share

BOOTSTRAP_ELEMENTS = 2**22
"""Most pair weights of the bootstrap that are held at a time (draws times pairs)."""

BLOCK = 64
"""Scores of which only the largest is looked at first."""


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
    check_range("threshold", threshold, infinite=True)
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


def _order_statistic(
    scores: Tensor, same: Tensor | None, top: Tensor, genuine: int, impostors: int, far: float, k: int
) -> OperatingPoint:
    """Operating point from scores and the largest impostor scores in falling order, at least k + 1 of them.

    ``same`` says which of the scores are genuine; without it all of them are.
    """
    threshold = top[k] if k < impostors else top.new_tensor(-torch.inf)
    above = scores > threshold
    right = int((above if same is None else above.logical_and_(same)).count_nonzero())
    accepted = int((top > threshold).count_nonzero())
    return OperatingPoint(far, float(threshold), accepted / impostors, right / genuine)


def _largest(values: Tensor, count: int) -> Tensor:
    """The ``count`` largest of ``(N,)`` in falling order.

    None of them is below the largest but ``count`` - 1 of the maxima of blocks, which are found at the speed of memory.
    """
    whole = len(values) // BLOCK * BLOCK
    if whole < 16 * count * BLOCK:
        return values.topk(count).values
    bound = values[:whole].view(-1, BLOCK).amax(1).topk(count).values[-1]
    return values[values >= bound].topk(count).values


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
    genuine = int(same.count_nonzero())
    impostors = len(scores) - genuine
    check_both_kinds(genuine, impostors)
    targets = _check_fars(fars, impostors)
    count = min(max(k for _, k in targets) + 1, impostors)
    top = _largest(scores.masked_fill(same, -torch.inf), count)
    return [_order_statistic(scores, same, top, genuine, impostors, far, k) for far, k in targets]


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
        target_far: The FAR at which a TAR is; ``None`` for the others.
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
    target_far: float | None = None

    @property
    def title(self) -> str:
        """What the number is called in tables."""
        titles = {"accuracy": "Accuracy", "auc": "Area under the ROC curve", "eer": "Equal-error rate"}
        return f"TAR at FAR {self.target_far:g}" if self.target_far is not None else titles[self.name]

    def __str__(self) -> str:
        error = "" if math.isnan(self.standard_error) else f" ± {self.standard_error:.2%}"
        low, high = self.interval
        return (
            f"{self.value:.2%}{error}, {self.level:.0%} interval [{low:.2%}, {high:.2%}]: {self.words} "
            f"({self.genuine:,} genuine and {self.impostors:,} impostor pairs)"
        )


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
    group: Group | None = None,
) -> Iterator[_Draws]:
    """Draws of the bootstrap over identities, or over pairs where they are not known, as many at a time as fit.

    The draws are made on the CPU, so that they are the same for every device, and by all processes of a ``group``, each
    of which goes on with its share: sums of whole numbers are exact, however many draws are summed together.
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
        drawn = drawn[share(len(drawn), group)]
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


def _percentiles(values: list[Tensor], valid: list[Tensor], level: float, group: Group | None = None) -> Interval:
    """Interval that leaves out equal shares of the draws at both ends; draws without pairs of both kinds do not count.

    Bounds are values of draws, so that infinite ones do no harm.
    """
    kept = gathered(values, group)[gathered(valid, group)].sort().values
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
    group: Group | None = None,
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
        group: Processes that share the draws, all of which make the same call and get the same result; ``None``: this
            one alone.

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
    check_level(level)
    genuine = int(same.count_nonzero())
    impostors = len(same) - genuine
    points = tar_at_far(scores, same, fars) if fars else []
    values: dict[str, float] = {"auc": auc(scores, same), "eer": equal_error_rate(scores, same)}
    values |= {f"tar@far={point.target_far:g}": point.tar for point in points}
    drawn: dict[str, list[Tensor]] = {key: [] for key in values}
    valid: list[Tensor] = []
    with agreed(group):
        for draws in _bootstrap(scores, same, identities, samples, seed, corners=True, group=group):
            valid.append((draws.false_accepts[:, -1] > 0) & (draws.true_accepts[:, -1] > 0))
            drawn["auc"].append(_area(draws.false_accepts, draws.true_accepts))
            drawn["eer"].append(_draw_eer(draws))
            for point in points:
                drawn[f"tar@far={point.target_far:g}"].append(_draw_tar(draws, point.target_far))
    words = {"auc": "area under the ROC curve", "eer": "equal-error rate"}
    words |= {f"tar@far={point.target_far:g}": f"TAR at a FAR of at most {point.target_far:g}" for point in points}
    by_key = {f"tar@far={point.target_far:g}": point for point in points}
    how = _drawn_from(identities, samples)
    return {
        key: Verification(
            key.split("@")[0],
            value,
            _percentiles(drawn[key], valid, level, group),
            genuine,
            impostors,
            f"{words[key]}, {how}",
            level,
            (by_key[key].threshold,) if key in by_key else (),
            target_far=by_key[key].target_far if key in by_key else None,
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
    group: Group | None = None,
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
        group: As for :func:`verification_summary`.

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
    check_level(level)
    (point,) = tar_at_far(scores, same, target_far)
    genuine = int(same.count_nonzero())
    thresholds, fars, tars, valid = [], [], [], []
    with agreed(group):
        for draws in _bootstrap(scores, same, identities, samples, seed, group=group):
            # The first operating point that accepts too many impostors is at an impostor's score: the order statistic.
            thresholds.append(
                draws.thresholds[(_allowed_index(draws, target_far) + 1).clamp(max=len(draws.thresholds) - 1)]
            )
            above = int((draws.thresholds > point.threshold).count_nonzero()) - 1
            fars.append(draws.false_accepts[:, above] / draws.false_accepts[:, -1])
            tars.append(draws.true_accepts[:, above] / draws.true_accepts[:, -1])
            valid.append((draws.false_accepts[:, -1] > 0) & (draws.true_accepts[:, -1] > 0))
    low, high = _percentiles(fars, valid, level, group)
    impostors = len(same) - genuine
    least, most = wilson_interval(round(point.far * impostors), impostors, level)
    return Calibration(
        point.threshold,
        _percentiles(thresholds, valid, level, group),
        target_far,
        point.far,
        (min(low, least), max(high, most)),
        point.tar,
        _percentiles(tars, valid, level, group),
        genuine,
        impostors,
        level,
        score,
        f"lowest threshold with a FAR of at most {target_far:g}, {_drawn_from(identities, samples)}",
    )
