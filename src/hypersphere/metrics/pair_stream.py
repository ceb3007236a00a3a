r"""Verification of pairs that come in parts: exact numbers in bounded memory, over passes and processes."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hypersphere.errors import ArgumentError, check_range
from hypersphere.metrics.basic import (
    check_both_kinds,
    check_pairs,
    crossing_rate,
    operating_points,
)
from hypersphere.metrics.processes import Group, collected
from hypersphere.metrics.verification import (
    OperatingPoint,
    Roc,
    _area,
    _check_fars,
    _order_statistic,
    _roc,
)


class PairScores:
    """Exact verification metrics from scores that come in chunks, in bounded memory.

    All genuine scores are kept (there are few), and the ``capacity`` largest impostor scores: at most three times
    ``capacity`` scores beside the chunk at hand. While all impostors fit, everything is exact. After that
    :meth:`tar_at_far` still is for rates whose threshold is among those kept, at least for ``capacity`` false accepts
    less one. What needs all impostors (:meth:`auc`, :meth:`equal_error_rate`, :meth:`roc`, larger rates) needs a
    second pass over the same chunks, which counts impostors between the genuine scores; between two of those the ROC
    is a straight line, so the counts are all there is to know. Anything else is an error, never an estimate.

    Several processes each feed their own chunks and ask for what :meth:`all` of them have seen, or :meth:`merge`
    objects that came another way (they can be pickled). For a second pass, do so first, then let each process feed
    its own :meth:`second_pass` of the whole, and do so again.

    Args:
        capacity: Most genuine scores, and most impostor scores, that are kept.

    Example:
        >>> from hypersphere.metrics import tar_at_far
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
        if not isinstance(other, PairScores):
            raise ArgumentError("other", f"must be PairScores, got {type(other).__name__}")
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

    def all(self, group: Group | None = None) -> PairScores:
        """What all processes have seen, merged in the order of their ranks: a new one on the CPU, the same everywhere.

        Args:
            group: The processes, all of which call this; ``None``: this one alone.

        Example:
            >>> found = PairScores()
            >>> found.update(torch.tensor([0.9, 0.1]), torch.tensor([True, False]))
            >>> found.all().auc()
            1.0
        """
        own = copy.copy(self)
        own._genuine, own._kept = ([part.cpu() for part in parts] for parts in (self._genuine, self._kept))
        own._levels, own._cells = self._levels.cpu(), self._cells.cpu().clone()
        return functools.reduce(PairScores.merge, collected(own, group))

    def second_pass(self) -> PairScores:
        """An empty one that counts impostors between these genuine scores; feed it the same chunks again.

        Example:
            >>> from hypersphere.metrics import auc
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
                points.append(_order_statistic(genuine, None, top, len(genuine), self.impostors, far, k))
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
        """As :func:`~hypersphere.metrics.basic.equal_error_rate` of all scores."""
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
