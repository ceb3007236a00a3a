r"""Identification: who is it? Ranks of probes in a gallery, and the rates that follow from them.

Scores are those of :mod:`hypersphere.metrics.neighbours`; a score is accepted when it is greater than the threshold.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple
from warnings import warn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.metrics.intervals import wilson_interval
from hypersphere.metrics.neighbours import MEMORY, Kind, Tail, matching_pairs, parts_of, reported, scan, score_pairs
from hypersphere.metrics.processes import Group


class Rate(NamedTuple):
    """A share with its confidence interval.

    Example:
        >>> print(Rate(0.975, 0.95, 0.99))
        97.50% [95.00%, 99.00%]
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2%} [{self.low:.2%}, {self.high:.2%}]"


@dataclass(frozen=True)
class Identification:
    r"""Scores of probes with their mates and with the nearest others, and the rates that follow from them.

    The rank of a probe is :math:`1 + \#\{\text{gallery entries of others with } s > s_{mate}\}`, where
    :math:`s_{mate}` is the best score with an entry of its own identity (``ties="pessimistic"``: :math:`s \ge`).
    Ranks are exact up to the number K of others that were kept; a rank beyond is K + 1.

    Intervals are percentiles of a bootstrap that draws whole identities of probes with replacement; for a rate of 0
    or 1, of which every draw would say the same, Wilson's with one trial an identity that has a mate.

    Attributes:
        ids: ``(P,)`` identity of every probe.
        mates: ``(P,)`` best score with an entry of the same identity; -inf for a probe without one.
        impostors: ``(P, K)`` best scores with entries of other identities, descending; -inf where there are fewer.
        size: Number of gallery entries, with distractors.
        kind: Kind of the scores.
        ties: Whether a rank counts entries that score the same as the mate.
        trial: What a row is, in words.
        tail: Largest scores of all probes with others, descending, for :meth:`tar_at_far`.
        negatives: How many scores the tail was taken from.
        ranks: Ranks that ``str`` reports.
        fpirs: False positive identification rates that ``str`` reports.
        fars: False accept rates that ``str`` reports.
    """

    ids: NDArray[Any]
    mates: Tensor
    impostors: Tensor
    size: int
    kind: str = "cosine"
    ties: str = "optimistic"
    trial: str = "probe"
    tail: Tensor = field(default_factory=lambda: torch.empty(0))
    negatives: int = 0
    ranks: tuple[int, ...] = (1,)
    fpirs: tuple[float, ...] = ()
    fars: tuple[float, ...] = ()

    @property
    def mated(self) -> Tensor:
        """``(P,)`` booleans: whether the gallery holds an entry of the probe's identity."""
        return self.mates > -math.inf

    @property
    def rank(self) -> Tensor:
        """``(P,)`` rank of the mate; K + 1 beyond K and for a probe without mate."""
        mates = self.mates.unsqueeze(1)
        above = self.impostors > mates if self.ties == "optimistic" else self.impostors >= mates
        return torch.where(self.mated, 1 + above.sum(1), self.impostors.shape[1] + 1)

    @property
    def cmc(self) -> Tensor:
        """``(K,)`` cumulative match characteristic: share of mated probes with rank at most 1, ..., K."""
        mated = self._mated_rows()
        counts = torch.bincount(self.rank[mated], minlength=self.impostors.shape[1] + 2)
        return counts[1:-1].cumsum(0).double() / int(mated.sum())

    def rank_k(self, k: int = 1, *, level: float = 0.95, samples: int = 1000, seed: int = 0) -> Rate:
        """Share of mated probes whose mate is among the ``k`` best.

        Args:
            k: From 1 to K.
            level: Confidence of the interval.
            samples: Draws of the bootstrap.
            seed: Seed of the draws.

        Example:
            >>> found = identify(torch.eye(2), [0, 1], torch.eye(2), [0, 1], ranks=(1,))
            >>> found.rank_k(1).value
            1.0
        """
        check_range("k", k, 1, self.impostors.shape[1])
        mated = self._mated_rows()
        return self._linear((self.rank <= k) & mated, mated, level, samples, seed)

    def dir_at_fpir(
        self, fpir: float, *, rank: int = 1, level: float = 0.95, samples: int = 1000, seed: int = 0
    ) -> Rate:
        r"""Detection and identification rate at a false positive identification rate.

        The threshold is the :math:`\lceil f N\rceil`-th largest best score of the N probes without mate, so that
        fewer than :math:`f N` of them are accepted. Where every probe has a mate, all probes take that part, each
        with its mates left out of the gallery. The rate is the share of mated probes whose mate has at most the
        given rank and a score above the threshold.

        Args:
            fpir: In (0, 1].
            rank: Worst rank that counts as identified.
            level: Confidence of the interval.
            samples: Draws of the bootstrap; every draw has a threshold of its own.
            seed: Seed of the draws.

        Example:
            >>> found = identify(torch.eye(3), [0, 1, 9], torch.eye(3)[:2], [0, 1])
            >>> found.dir_at_fpir(0.5).value
            1.0
        """
        check_range("fpir", fpir, 0, 1, open_low=True)
        check_range("rank", rank, 1, self.impostors.shape[1])
        mated = self._mated_rows().numpy()
        unmated = ~mated if not mated.all() else np.ones_like(mated)
        scores, mates = self.impostors[:, 0].double().numpy(), self.mates.double().numpy()
        negatives = np.flatnonzero(unmated)
        negatives = negatives[np.argsort(-scores[negatives], kind="stable")]
        found = np.flatnonzero(mated & (self.rank <= rank).numpy())
        found = found[np.argsort(-mates[found], kind="stable")]

        def rate(weights: NDArray[Any]) -> NDArray[Any]:
            accepted = weights[:, negatives].cumsum(1)
            allowed = np.maximum(1, np.ceil(fpir * accepted[:, -1:] * (1 - 1e-12)))
            first = np.minimum((accepted < allowed).sum(1), len(negatives) - 1)
            above = np.searchsorted(-mates[found], -scores[negatives[first]], side="left")
            hits = np.pad(weights[:, found].cumsum(1), ((0, 0), (1, 0)))[np.arange(len(weights)), above]
            return _ratio(hits, weights[:, mated].sum(1))

        value = float(rate(np.ones((1, len(mated)), np.int64))[0])
        _, group = np.unique(self.ids, return_inverse=True)
        trials = len(np.unique(group[mated]))
        return _bootstrap(value, trials, group, lambda counts: rate(counts[:, group]), level, samples, seed)

    def threshold_at_far(self, far: float) -> float:
        r"""The :math:`(\lfloor f N\rfloor + 1)`-th largest of the N scores with others; accept above it.

        Args:
            far: False accept rate, at most the largest that was asked for when the scores were made. Warns where it
                lets fewer than 10 scores through.

        Example:
            >>> probes, distractors = torch.eye(2).repeat(10, 1), torch.tensor([[0.6, 0.8]])
            >>> round(megaface(probes, list(range(20)), distractors, fars=(0.5,)).threshold_at_far(0.5), 4)
            0.6
        """
        check_range("far", far, 0, 1)
        place = math.floor(far * self.negatives * (1 + 1e-12))
        if place >= self.negatives and self.negatives:
            return -math.inf
        if place >= len(self.tail):
            raise ArgumentError(
                "far", f"needs the {place + 1} largest of {self.negatives} scores, of which {len(self.tail)} were kept"
            )
        if far * self.negatives < 10:
            warn(f"false accept rate {far:g} of {self.negatives} scores: fewer than 10 false accepts", stacklevel=2)
        return float(self.tail[place])

    def tar_at_far(self, far: float, *, level: float = 0.95, samples: int = 1000, seed: int = 0) -> Rate:
        """Share of scores with mates above :meth:`threshold_at_far`; the interval is for that fixed threshold.

        Args:
            far: False accept rate, at most the largest that was asked for when the scores were made.
            level: Confidence of the interval.
            samples: Draws of the bootstrap.
            seed: Seed of the draws.

        Example:
            >>> points = torch.tensor([[1.0, 0.0], [0.8, 0.6]])
            >>> megaface(points, [0, 0], torch.tensor([[0.0, 1.0]]), fars=(0.5,)).tar_at_far(1.0).value
            1.0
        """
        mated = self._mated_rows()
        return self._linear(mated & (self.mates > self.threshold_at_far(far)), mated, level, samples, seed)

    def merge(self, other: Identification, over: Literal["gallery", "probes"] = "gallery") -> Identification:
        """Put the results of two processes together: the same probes in two parts of a gallery, or two sets of probes.

        Args:
            other: Result with the same settings.
            over: What was divided. Over ``"gallery"`` the probes must be the same, in the same order.

        Example:
            >>> left = identify(torch.eye(2), [0, 1], torch.eye(2)[:1], [0])
            >>> left.merge(identify(torch.eye(2), [0, 1], torch.eye(2)[1:], [1])).rank
            tensor([1, 1])
        """
        check_choice("over", over, ("gallery", "probes"))
        same = (self.kind, self.ties, self.trial, self.impostors.shape[1])
        if same != (other.kind, other.ties, other.trial, other.impostors.shape[1]):
            raise ArgumentError("other", "must have been made with the same kind, ties and ranks")
        # What one part has dropped bounds what is known of the union.
        known = min([len(x.tail) for x in (self, other) if len(x.tail) < x.negatives], default=None)
        tail = torch.cat([self.tail, other.tail]).sort(descending=True).values[:known]
        negatives = self.negatives + other.negatives
        if over == "probes":
            if self.size != other.size:
                raise ArgumentError("other", f"must be of the same gallery, of {self.size} entries, got {other.size}")
            return replace(
                self,
                ids=np.concatenate([self.ids, other.ids]),
                mates=torch.cat([self.mates, other.mates]),
                impostors=torch.cat([self.impostors, other.impostors]),
                tail=tail,
                negatives=negatives,
            )
        if not np.array_equal(self.ids, other.ids):
            raise ArgumentError("other", "must be of the same probes in the same order")
        impostors = torch.cat([self.impostors, other.impostors], 1).sort(1, descending=True).values
        return replace(
            self,
            mates=torch.maximum(self.mates, other.mates),
            impostors=impostors[:, : self.impostors.shape[1]],
            size=self.size + other.size,
            tail=tail,
            negatives=negatives,
        )

    def __str__(self) -> str:
        mated = int(self.mated.sum())
        lines = [
            f"{len(self.ids)} {self.trial}s of {len(np.unique(self.ids))} identities, {mated} with a mate, against "
            f"{self.size} gallery entries; {self.kind} scores, {self.ties} ties",
        ]
        lines += [f"rank-{k} identification: {self.rank_k(k)}" for k in self.ranks if mated]
        who = "probes without mate" if mated < len(self.ids) else "probes with their mates left out"
        lines += [f"DIR (rank 1) at FPIR {f:g} of {who}: {self.dir_at_fpir(f)}" for f in self.fpirs if mated]
        lines += [f"TAR at FAR {f:g} of {self.negatives} scores: {self.tar_at_far(f)}" for f in self.fars if mated]
        return "\n".join([*lines, "in brackets: 95% interval, bootstrap over identities"])

    def _mated_rows(self) -> Tensor:
        if not bool(self.mated.any()):
            raise ArgumentError("probe_ids", "must have a mate in the gallery for at least one probe, got none")
        return self.mated

    def _linear(self, hits: Tensor, rows: Tensor, level: float, samples: int, seed: int) -> Rate:
        """A share of rows, whose bootstrap needs only two numbers an identity."""
        _, group = np.unique(self.ids, return_inverse=True)
        up, down = (np.bincount(group, x.double().numpy()) for x in (hits, rows))
        value = float(up.sum() / down.sum())
        trials = int((down > 0).sum())
        return _bootstrap(value, trials, group, lambda counts: _ratio(counts @ up, counts @ down), level, samples, seed)


def _ratio(up: NDArray[Any], down: NDArray[Any]) -> NDArray[Any]:
    """NaN for a draw without mated probes."""
    return np.where(down > 0, up / np.maximum(down, 1), np.nan)


def _bootstrap(
    value: float,
    trials: int,
    group: NDArray[Any],
    statistic: Callable[[NDArray[Any]], NDArray[Any]],
    level: float,
    samples: int,
    seed: int,
) -> Rate:
    """Percentile interval of ``statistic(counts)``, with counts ``(b, I)`` how often an identity was drawn.

    Where nothing or everything is right, every draw says the same: Wilson's interval for as many trials as
    identities take part in the share.
    """
    check_range("level", level, 0, 1)
    check_range("samples", samples, 1)
    generator = np.random.default_rng(seed)
    identities = int(group.max()) + 1
    if value in (0, 1):
        return Rate(value, *wilson_interval(value * trials, trials, level))
    batch = max(1, 2**22 // len(group))
    draws = [
        statistic(generator.multinomial(identities, np.full(identities, 1 / identities), min(batch, samples - done)))
        for done in range(0, samples, batch)
    ]
    low, high = np.nanquantile(np.concatenate(draws), [(1 - level) / 2, (1 + level) / 2])
    return Rate(value, float(low), float(high))


def identify(
    probes: Tensor,
    probe_ids: Tensor | Sequence[Any],
    gallery: Tensor,
    gallery_ids: Tensor | Sequence[Any],
    distractors: Tensor | Iterable[Tensor] | None = None,
    *,
    ranks: Sequence[int] = (1, 5, 10),
    fpirs: Sequence[float] = (),
    ties: Literal["optimistic", "pessimistic"] = "optimistic",
    kind: Kind = "cosine",
    memory: int = MEMORY,
    dtype: torch.dtype | None = None,
    group: Group | None = None,
) -> Identification:
    """Look for every probe in a gallery, in one pass over the gallery and the distractors.

    A gallery may hold several entries of an identity: the best of them is the mate, none of them counts against the
    probe, and every entry of another identity counts.

    Args:
        probes: ``(P, D)``.
        probe_ids: ``(P,)`` whole numbers or names. A probe of an identity that is not in the gallery has no mate: it
            counts for the false positives of :meth:`Identification.dir_at_fpir` only.
        gallery: ``(G, D)``.
        gallery_ids: ``(G,)``.
        distractors: Further entries of nobody's identity, ``(M, D)`` or parts of them one after the other.
        ranks: Ranks to report; the largest is how many scores with others are kept of each probe.
        fpirs: False positive identification rates to report.
        ties: ``"optimistic"``: an entry must score higher than the mate to be before it; ``"pessimistic"``: as high.
        kind: As in :func:`search`.
        memory: As in :func:`search`.
        dtype: As in :func:`search`.
        group: As in :func:`search`.

    Example:
        >>> gallery = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> found = identify(torch.tensor([[1.0, 0.1], [1.0, 0.2]]), ["ann", "bob"], gallery, ["ann", "bob"])
        >>> found.rank, found.cmc[:2]
        (tensor([1, 2]), tensor([0.5000, 1.0000], dtype=torch.float64))
    """
    names, own, owners = _identities(probes, probe_ids, gallery, gallery_ids)
    depth = _depth(ranks, ties)
    nobody = ((part, None) for part in parts_of(() if distractors is None else distractors))
    parts = itertools.chain([(gallery, owners)], nobody)
    found = scan(probes, parts, depth, kind=kind, memory=memory, dtype=dtype, ids=own, group=group)
    return Identification(
        names, found.mates.cpu(), _padded(found.scores, depth), found.size, kind, ties, ranks=tuple(ranks),
        fpirs=tuple(fpirs),
    )  # fmt: skip


def megaface(
    probes: Tensor,
    probe_ids: Tensor | Sequence[Any],
    distractors: Tensor | Sequence[Tensor],
    *,
    ranks: Sequence[int] = (1, 10),
    fars: Sequence[float] = (1e-6,),
    ties: Literal["optimistic", "pessimistic"] = "optimistic",
    kind: Kind = "cosine",
    memory: int = MEMORY,
    dtype: torch.dtype | None = None,
    negatives: int | None = None,
    group: Group | None = None,
) -> Identification:
    """MegaFace's first challenge: find one photograph of a person among distractors.

    A trial is an ordered pair of different images (probe, mate) of one person; its gallery is the mate and the
    distractors, without other images of that person and without the other probe people. Verification takes the same
    pairs as genuine ones, and all pairs of a probe and a distractor as impostors. Only their largest scores are kept,
    as many as the largest of ``fars`` needs.

    Args:
        probes: ``(P, D)``.
        probe_ids: ``(P,)`` whole numbers or names. Somebody with one image has no trial.
        distractors: ``(M, D)``, or parts of them one after the other.
        ranks: Ranks to report.
        fars: False accept rates to report.
        ties: As in :func:`identify`.
        kind: As in :func:`search`.
        memory: As in :func:`search`.
        dtype: As in :func:`search`.
        negatives: Number of all pairs of a probe and a distractor, where this process has a part of them and results
            are put together with :meth:`Identification.merge`.
        group: As in :func:`search`: each process has all distractors and compares some of them.

    Returns:
        One row a trial, by probe and then by mate.

    Example:
        >>> angles = torch.tensor([0.0, 0.5, 1.0])
        >>> circle = torch.stack([angles.cos(), angles.sin()], 1)
        >>> megaface(circle, [0, 0, 0], torch.tensor([[0.8, 0.6]])).rank
        tensor([1, 2, 2, 2, 2, 2])
    """
    names, own, _ = _identities(probes, probe_ids, probes[:0], [])
    depth = _depth(ranks, ties)
    pieces = list(parts_of(distractors)) if isinstance(distractors, Tensor) else distractors
    here = len(probes) * sum(len(piece) for piece in pieces)
    for far in fars:
        check_range("fars", far, 0, 1)
    tail = Tail(min(here, math.floor(max(fars, default=0.0) * (negatives or here) * (1 + 1e-12)) + 1))
    if 8 * tail.n * probes.element_size() > memory and fars:
        raise ArgumentError("memory", f"must hold the {tail.n} largest scores eight times over, got {memory} bytes")
    parts = ((piece, None) for piece in pieces)
    found = scan(probes, parts, depth, kind=kind, memory=memory, dtype=dtype, tail=tail if fars else None, group=group)
    mates, first = matching_pairs(own, own.argsort(stable=True), own)
    other = mates != first
    mates, first = mates[other], first[other]
    pairs = torch.stack([first, mates], 1)
    scores = score_pairs(probes, probes, pairs, kind=kind, memory=memory, dtype=dtype, group=group)
    return Identification(
        names[first.cpu().numpy()],
        scores.cpu(),
        _padded(found.scores, depth)[first.cpu()],
        found.size,
        kind,
        ties,
        "pair",
        reported(tail.values(), kind).cpu() if fars else torch.empty(0),
        here if fars else 0,
        tuple(ranks),
        fars=tuple(fars),
    )


def _depth(ranks: Sequence[int], ties: str) -> int:
    check_choice("ties", ties, ("optimistic", "pessimistic"))
    check_range("ranks", min(ranks, default=0), 1)
    return max(ranks)


def _padded(scores: Tensor, depth: int) -> Tensor:
    """``(P, depth)`` on the CPU; -inf where the gallery is smaller."""
    return torch.nn.functional.pad(scores.cpu(), (0, depth - scores.shape[1]), value=-math.inf)


def _identities(
    probes: Tensor, probe_ids: Tensor | Sequence[Any], gallery: Tensor, gallery_ids: Tensor | Sequence[Any]
) -> tuple[NDArray[Any], Tensor, Tensor]:
    """Names of the probes, and both lists as whole numbers on the device of the probes."""
    for name, features, ids in (("probe_ids", probes, probe_ids), ("gallery_ids", gallery, gallery_ids)):
        if len(features) != len(ids):
            raise ArgumentError(name, f"must name each of {len(features)} features, got {len(ids)}")
    if not len(probes):
        raise ArgumentError("probes", "must hold at least one feature, got none")
    if isinstance(probe_ids, Tensor) and isinstance(gallery_ids, Tensor):  # a million of them stay where they are
        own, owners = (x.to(probes.device, torch.long) for x in (probe_ids, gallery_ids))
        return own.cpu().numpy(), own, owners
    lists = [x.tolist() if isinstance(x, Tensor | np.ndarray) else list(x) for x in (probe_ids, gallery_ids)]
    codes: dict[Any, int] = {}
    own, owners = (torch.tensor([codes.setdefault(x, len(codes)) for x in ids], dtype=torch.long) for ids in lists)
    return np.asarray(lists[0]), own.to(probes.device), owners.to(probes.device)
