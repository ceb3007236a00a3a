r"""Who is it: exact search of probes in galleries that are too large for a score matrix, and what the ranks say.

Scores are computed in tiles whose size follows from ``memory``; of a tile only the best scores of every probe are
kept. Conventions of this module:

* A higher score means more alike: the cosine, minus the angle (``kind="angle"``) or minus the distance
  (``kind="euclidean"``). Half and bfloat16 features are compared in float32 unless ``dtype`` says otherwise.
* A score is accepted when it is greater than the threshold.
* Equal scores go to the lower gallery index. Scores are those of the matrix product with its rounding: copies of one
  vector tie exactly only where the product rounds them alike.
* A zero vector has cosine 0 with everything; a feature that is not finite is an error.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple
from warnings import warn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hypersphere.errors import ArgumentError, HypersphereError, check_choice, check_range
from hypersphere.geometry import arccos, at_least_float32, full_precision, normalise
from hypersphere.metrics.verification import wilson_interval

Kind = Literal["cosine", "angle", "euclidean"]
KINDS: tuple[str, ...] = ("cosine", "angle", "euclidean")
MEMORY = 900 * 2**20
"""Default of ``memory``: bytes that a search may take beyond its arguments and its results."""

_CPU_TILE = 2**23  # larger tiles of scores leave the cache, and the product itself gets slower
_MIN_BLOCK = 8  # shorter rows of scores are sorted as they are


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


# --------------------------------------------------------------------------------------------------- exact search


def search(
    probes: Tensor,
    gallery: Tensor | Iterable[Tensor],
    k: int = 1,
    *,
    kind: Kind = "cosine",
    memory: int = MEMORY,
    dtype: torch.dtype | None = None,
    backend: Literal["torch", "faiss"] = "torch",
) -> tuple[Tensor, Tensor]:
    """The ``k`` most similar gallery vectors of every probe, exactly, without the score matrix.

    Args:
        probes: ``(P, D)``; the search runs on their device.
        gallery: ``(G, D)``, or parts of it one after the other; parts on another device are moved tile by tile.
        k: Number of neighbours, at most G.
        kind: ``"cosine"``, ``"angle"`` or ``"euclidean"``; see the module for their signs.
        memory: Bytes that may be used beyond the arguments and the result.
        dtype: Type of the products; by default that of the probes, at least float32. Half types are faster on a GPU
            and round the scores.
        backend: ``"faiss"`` asks the FAISS library for a flat index (all on the CPU, ``memory`` not held).

    Returns:
        Scores ``(P, k)`` in descending order and the gallery indices ``(P, k)``. Among equal scores the lower
        index comes first.

    Example:
        >>> search(torch.eye(2), torch.tensor([[0.0, 3.0], [1.0, 0.0], [2.0, 0.0]]), 2)
        (tensor([[1., 1.],
                 [1., 0.]]), tensor([[1, 2],
                 [0, 1]]))
    """
    check_choice("backend", backend, ("torch", "faiss"))
    if backend == "faiss":
        return _faiss_search(probes, gallery, k, kind)
    found = _scan(probes, ((part, None) for part in _parts(gallery)), k, kind=kind, memory=memory, dtype=dtype)
    if found.scores.shape[1] < k:
        raise ArgumentError("gallery", f"must hold at least k = {k} vectors, got {found.size}")
    return found.scores, found.columns


class _Found(NamedTuple):
    """What a pass over a gallery leaves: see :func:`_scan`."""

    mates: Tensor
    scores: Tensor
    columns: Tensor
    size: int


@torch.no_grad()
def _scan(
    probes: Tensor,
    parts: Iterable[tuple[Tensor, Tensor | None]],
    k: int,
    *,
    kind: str,
    memory: int,
    dtype: torch.dtype | None,
    ids: Tensor | None = None,
    tail: _Tail | None = None,
) -> _Found:
    """One pass over a gallery: the best score with a mate, and the ``k`` best scores with all others.

    ``parts`` are features ``(g, D)`` with their identities ``(g,)``, or None where nobody of ``ids`` is among them.
    Without any mate the first is -inf; where a probe has fewer than ``k`` others, -inf follows.
    """
    _check_features("probes", probes)
    check_choice("kind", kind, KINDS)
    check_range("k", k, 1)
    dtype = dtype or at_least_float32(probes).dtype
    rows, width = _tile(len(probes), probes.shape[1], memory, dtype, probes.device)
    tiles = [slice(start, start + rows) for start in range(0, max(1, len(probes)), rows)]
    # With several tiles of probes a copy of all of them could be as large as the gallery: made again when needed.
    ready = _operand(probes, kind, dtype, "probe") if len(tiles) == 1 else None
    mates = probes.new_full((len(probes),), -math.inf, dtype=dtype)
    best = [_Best(k) for _ in tiles]
    seen = 0
    order = ids.argsort(stable=True) if ids is not None else None
    for chunk, owners in _chunks(parts, width, probes):
        other = _operand(chunk.to(probes.device, non_blocking=True), kind, dtype, "gallery")
        pairs = _same(ids, order, owners) if ids is not None and order is not None and owners is not None else None
        for tile, kept in zip(tiles, best, strict=True):
            with full_precision(probes):
                found = (_operand(probes[tile], kind, dtype, "probe") if ready is None else ready) @ other.mT
            if pairs is not None:
                _take_mates(found, mates, pairs, tile.start)
            if tail is not None:
                tail.push(found)
            kept.push(found, seen)
        seen += len(chunk)
    scores = torch.cat([kept.scores for kept in best]) if seen else mates.new_empty(len(probes), 0)
    columns = torch.cat([kept.columns for kept in best]) if seen else scores.long()
    if bool(torch.cat([scores.flatten(), mates]).isnan().any()):
        where = "probes" if bool((~probes.isfinite()).any()) else "gallery"
        raise ArgumentError(where, "must hold finite features only, got NaN, infinity or a norm that overflows")
    return _Found(_reported(mates, kind), _reported(scores, kind), columns, seen)


def _tile(probes: int, dim: int, memory: int, dtype: torch.dtype, device: torch.device) -> tuple[int, int]:
    """Rows and columns of a tile of scores: the tile, what is kept of it and the operands fit in ``memory``."""
    check_range("memory", memory, 1)
    size = torch.empty((), dtype=dtype).element_size()
    # Operands: the vectors in the type of the products and one intermediate; scores: half as much again for maxima.
    operand, score = 2 * max(size, 4) * (dim + 2), 1.5 * size + 1
    if memory < 2 * operand + score:
        raise ArgumentError("memory", f"must be at least {int(2 * operand + score) + 1} bytes, got {memory}")
    budget = min(memory, max(_CPU_TILE, 4 * operand)) if device.type == "cpu" else memory
    # A square tile does most arithmetic per operand: side s with score s^2 + 2 operand s = budget.
    side = (math.sqrt(operand**2 + score * budget) - operand) / score
    rows = max(1, min(probes, int(side)))
    columns = max(1, int((budget - rows * operand) / (rows * score + operand)))
    return rows, columns - columns % 64 if columns > 64 else columns  # whole vector registers


def _operand(x: Tensor, kind: str, dtype: torch.dtype, side: str) -> Tensor:
    """What is multiplied: directions, or for distances vectors whose product is ``-|x - y|^2 / 2``."""
    x = at_least_float32(x)
    if dtype == torch.float64:
        x = x.double()
    if kind != "euclidean":
        return normalise(x).to(dtype)
    half = x.square().sum(1, keepdim=True) / 2
    half = torch.where(half.isfinite(), half, math.nan)  # a product with infinity may be -inf, which would go unseen
    one = torch.ones_like(half)
    return torch.cat([x, one, -half] if side == "probe" else [x, -half, one], 1).to(dtype)


def _reported(scores: Tensor, kind: str) -> Tensor:
    """Scores as users see them, from the products of the operands; -inf stays."""
    scores = at_least_float32(scores)
    if kind == "euclidean":
        return -(-2 * scores).clamp(min=0).sqrt()
    bounded = scores.clamp(-1, 1) if kind == "cosine" else -arccos(scores.clamp(-1, 1))
    return torch.where(scores == -math.inf, scores, bounded)


class _Best:
    """The ``k`` best of every row of a stream of scores, in order, and their columns; equal ones by column."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.scores, self.columns = torch.empty(0), torch.empty(0)

    def push(self, scores: Tensor, first: int) -> None:
        """Go on with the columns from ``first``."""
        k = min(self.k, scores.shape[1])
        if not first:
            self.scores, self.columns = _best(scores, k)
        elif self.scores.shape[1] < self.k:
            self._add(slice(None), *_best(scores, k), first)
        else:
            # Once k are known, few blocks of few rows hold anything better: these are all that is looked at.
            maxima, size = _maxima(scores, math.isqrt(scores.shape[1]))
            floor = self.scores[:, -1:]
            rows, blocks = _above(maxima, floor, self.k)
            if len(rows):
                values, columns = _inside(scores, rows, blocks, size)
                _, places = _above(values, floor[rows], self.k)
                self._add(rows, values.gather(1, places), columns.gather(1, places), first)

    def _add(self, rows: Tensor | slice, values: Tensor, columns: Tensor, first: int) -> None:
        values = torch.cat([self.scores[rows], values], 1)
        columns = torch.cat([self.columns[rows], columns + first], 1)
        values, order = _sorted(values, min(self.k, values.shape[1]))
        columns = columns.gather(1, order)
        if isinstance(rows, slice):
            self.scores, self.columns = values, columns
        else:
            self.scores[rows], self.columns[rows] = values, columns


def _best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest of every row and their columns, in order; equal ones by column.

    Rows are cut into blocks. By value and then column, the ``k`` best lie in the ``k`` blocks with the best maxima:
    the maximum of each of these comes before anything in another block. Block maxima cost one fast pass, where a
    selection in the whole row would cost more than the product.
    """
    size = math.isqrt(scores.shape[1] // k)
    if size < _MIN_BLOCK:
        return _sorted(scores, k)
    maxima, size = _maxima(scores, size)
    blocks = _best(maxima, k)[1].sort(1).values
    values, columns = _inside(scores, torch.arange(len(scores), device=scores.device), blocks, size)
    values, places = _sorted(values, k)
    return values, columns.gather(1, places)


def _sorted(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """:func:`_best` for short rows."""
    if k == 1:
        return scores.max(1, keepdim=True)  # the first of equal ones
    values, columns = scores.sort(dim=1, descending=True, stable=True)
    return values[:, :k].contiguous(), columns[:, :k].contiguous()


def _maxima(scores: Tensor, size: int) -> tuple[Tensor, int]:
    """Maxima of blocks of ``size`` columns, the last of which may be shorter."""
    whole = scores.shape[1] - scores.shape[1] % size
    maxima = scores[:, :whole].unflatten(1, (-1, size)).amax(2)
    return maxima if whole == scores.shape[1] else torch.cat([maxima, scores[:, whole:].amax(1, True)], 1), size


def _inside(scores: Tensor, rows: Tensor, blocks: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Scores of ``rows`` in their ``blocks``, and the columns; -inf beyond the last column."""
    columns = (blocks.unsqueeze(2) * size + torch.arange(size, device=scores.device)).flatten(1)
    width = scores.shape[1]
    values = scores[rows.unsqueeze(1), columns.clamp(max=width - 1)]
    return torch.where(columns < width, values, -math.inf), columns


def _above(values: Tensor, floor: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Rows with values above the ``floor`` of the row, and the columns of all these values, at most the ``k`` best.

    Columns come in ascending order, and as many for each row as the row with most needs.
    """
    counts = (~(values <= floor)).sum(1)  # NaN counts as well, so that it is not lost
    rows = counts.nonzero().squeeze(1)
    if not len(rows):
        return rows, rows
    most = int(counts.max())
    # All above the floor are taken if they are few, so ties do not matter; if they are many, the best by column are.
    columns = values[rows].topk(most).indices if most <= k else _best(values[rows], k)[1]
    return rows, columns.sort(1).values


def _same(ids: Tensor, order: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
    """All (probe, gallery) index pairs of one identity; ``order`` sorts ``ids``."""
    ordered = ids[order]
    first, last = torch.searchsorted(ordered, owners), torch.searchsorted(ordered, owners, right=True)
    counts = last - first
    columns = torch.arange(len(owners), device=ids.device).repeat_interleave(counts)
    offsets = torch.arange(len(columns), device=ids.device) - (counts.cumsum(0) - counts)[columns]
    return order[first[columns] + offsets], columns


def _take_mates(scores: Tensor, mates: Tensor, pairs: tuple[Tensor, Tensor], start: int) -> None:
    """Move the scores with mates out of a tile: their maximum into ``mates``, -inf in their place."""
    inside = (pairs[0] >= start) & (pairs[0] < start + len(scores))
    rows, columns = pairs[0][inside], pairs[1][inside]
    mates.scatter_reduce_(0, rows, scores[rows - start, columns], "amax")
    scores[rows - start, columns] = -math.inf


class _Tail:
    """The ``n`` largest of a stream of scores, -inf left out; at most ``2 n`` and a tile are held."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.kept: Tensor | None = None
        self.floor = -math.inf

    def push(self, scores: Tensor) -> None:
        size = max(1, math.isqrt(scores.shape[1]))
        whole = scores.shape[1] - scores.shape[1] % size
        blocks = scores[:, :whole].unflatten(1, (-1, size))
        # Few blocks reach the floor once the stream has run for a while; only these are looked at.
        near = blocks[blocks.amax(2) > self.floor].flatten(), scores[:, whole:].flatten()
        found = [part[part > self.floor] for part in near]
        self.kept = torch.cat(found if self.kept is None else [self.kept, *found])
        if len(self.kept) > 2 * self.n:
            self.kept = self.kept.topk(self.n).values
            self.floor = float(self.kept[-1])

    def values(self) -> Tensor:
        """In descending order."""
        kept = torch.empty(0) if self.kept is None else self.kept
        return kept.sort(descending=True).values[: self.n]


def _parts(gallery: Tensor | Iterable[Tensor]) -> Iterable[Tensor]:
    return [gallery] if isinstance(gallery, Tensor) else gallery


def _chunks(
    parts: Iterable[tuple[Tensor, Tensor | None]], width: int, probes: Tensor
) -> Iterator[tuple[Tensor, Tensor | None]]:
    for features, owners in parts:
        _check_features("gallery", features)
        if features.shape[1] != probes.shape[1]:
            raise ArgumentError(
                "gallery", f"must have the dimension of the probes, {probes.shape[1]}, got {features.shape[1]}"
            )
        for start in range(0, len(features), width):
            here = slice(start, start + width)
            yield features[here], None if owners is None else owners[here]


def _check_features(name: str, x: Tensor) -> None:
    if x.dim() != 2 or not x.is_floating_point():
        raise ArgumentError(name, f"must be a matrix (N, D) of floating point numbers, got {tuple(x.shape)} {x.dtype}")


def _faiss_search(
    probes: Tensor, gallery: Tensor | Iterable[Tensor], k: int, kind: str
) -> tuple[Tensor, Tensor]:  # pragma: no cover - run where FAISS is installed, and with a stand-in by the tests
    try:
        faiss: Any = importlib.import_module("faiss")
    except ImportError:
        raise HypersphereError(
            'backend="faiss" needs FAISS, which is not installed: pip install faiss-cpu, or backend="torch"'
        ) from None
    _check_features("probes", probes)
    check_choice("kind", kind, KINDS)
    check_range("k", k, 1)
    euclidean = kind == "euclidean"
    index = (faiss.IndexFlatL2 if euclidean else faiss.IndexFlatIP)(probes.shape[1])

    def vectors(x: Tensor) -> NDArray[np.float32]:
        x = x.detach().cpu().float()
        x = (x if euclidean else normalise(x)).contiguous()
        if not bool(x.isfinite().all()):
            raise ArgumentError("features", "must be finite, got NaN or infinity")
        return x.numpy()

    for part, _ in _chunks(((part, None) for part in _parts(gallery)), 2**16, probes):
        index.add(vectors(part))
    if index.ntotal < k:
        raise ArgumentError("gallery", f"must hold at least k = {k} vectors, got {index.ntotal}")
    found, places = index.search(vectors(probes), k)
    scores, columns = torch.from_numpy(-found / 2 if euclidean else found), torch.from_numpy(places)
    columns, order = columns.sort(1)  # lower index first among equal scores
    scores, again = scores.gather(1, order).sort(dim=1, descending=True, stable=True)
    return _reported(scores, kind).to(probes.device), columns.gather(1, again).to(probes.device)


# ------------------------------------------------------------------------------------------------- identification


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

    Example:
        >>> gallery = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> found = identify(torch.tensor([[1.0, 0.1], [1.0, 0.2]]), ["ann", "bob"], gallery, ["ann", "bob"])
        >>> found.rank, found.cmc[:2]
        (tensor([1, 2]), tensor([0.5000, 1.0000], dtype=torch.float64))
    """
    names, own, owners = _identities(probes, probe_ids, gallery, gallery_ids)
    depth = _depth(ranks, ties)
    nobody = ((part, None) for part in _parts(() if distractors is None else distractors))
    found = _scan(
        probes, itertools.chain([(gallery, owners)], nobody), depth, kind=kind, memory=memory, dtype=dtype, ids=own
    )
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
    pieces = list(_parts(distractors)) if isinstance(distractors, Tensor) else distractors
    here = len(probes) * sum(len(piece) for piece in pieces)
    for far in fars:
        check_range("fars", far, 0, 1)
    tail = _Tail(min(here, math.floor(max(fars, default=0.0) * (negatives or here) * (1 + 1e-12)) + 1))
    if 8 * tail.n * probes.element_size() > memory and fars:
        raise ArgumentError("memory", f"must hold the {tail.n} largest scores eight times over, got {memory} bytes")
    parts = ((piece, None) for piece in pieces)
    found = _scan(probes, parts, depth, kind=kind, memory=memory, dtype=dtype, tail=tail if fars else None)
    mates, first = _same(own, own.argsort(stable=True), own)
    other = mates != first
    mates, first = mates[other], first[other]
    scores = score_pairs(probes, probes, torch.stack([first, mates], 1), kind=kind, memory=memory, dtype=dtype)
    return Identification(
        names[first.cpu().numpy()],
        scores.cpu(),
        _padded(found.scores, depth)[first.cpu()],
        found.size,
        kind,
        ties,
        "pair",
        _reported(tail.values(), kind).cpu() if fars else torch.empty(0),
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


# ------------------------------------------------------------------------------------------------------ templates


def pool_templates(
    features: Tensor, templates: Tensor | Sequence[Any], media: Tensor | Sequence[Any], *, unit: bool = True
) -> tuple[list[Any], Tensor]:
    r"""One direction for every template, from images that come in media (a photograph, the frames of a video).

    An image weighs :math:`1 / (\text{images of its medium in the template} \cdot \text{media of the template})`, so
    that a long video counts as much as a photograph.

    Args:
        features: ``(N, D)``.
        templates: ``(N,)`` template of each image: whole numbers or names.
        media: ``(N,)`` medium of each image; the same medium in two templates is two media.
        unit: Average directions. Otherwise the features as they are, so that long ones weigh more.

    Returns:
        The T templates in the order of their first image, and unit vectors ``(T, D)`` (zero where directions cancel).

    Example:
        >>> photo_and_video = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> pool_templates(photo_and_video, ["ann"] * 3, [1, 2, 2])
        (['ann'], tensor([[0.7071, 0.7071]]))
    """
    _check_features("features", features)
    lists = [x.tolist() if isinstance(x, Tensor | np.ndarray) else list(x) for x in (templates, media)]
    for name, values in zip(("templates", "media"), lists, strict=True):
        if len(values) != len(features):
            raise ArgumentError(name, f"must name each of {len(features)} features, got {len(values)}")
    if not bool(features.isfinite().all()):
        raise ArgumentError("features", "must be finite, got NaN or infinity")
    names: dict[Any, int] = {}
    groups: dict[tuple[int, Any], int] = {}
    owner = [names.setdefault(x, len(names)) for x in lists[0]]
    group = [groups.setdefault(x, len(groups)) for x in zip(owner, lists[1], strict=True)]
    owner_of_group = torch.tensor([x for x, _ in groups], dtype=torch.long, device=features.device)
    x = normalise(at_least_float32(features)) if unit else at_least_float32(features)
    inside = _group_means(x, torch.tensor(group, dtype=torch.long, device=x.device), len(groups))
    return list(names), normalise(_group_means(inside, owner_of_group, len(names))).to(features.dtype)


def _group_means(x: Tensor, group: Tensor, groups: int) -> Tensor:
    counts = group.bincount(minlength=groups).unsqueeze(1)
    return x.new_zeros(groups, x.shape[1]).index_add_(0, group, x) / counts


@torch.no_grad()
def score_pairs(
    first: Tensor,
    second: Tensor,
    pairs: Tensor,
    *,
    kind: Kind = "cosine",
    memory: int = MEMORY,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Scores of listed pairs, gathered in chunks: for 1:1 verification of features or templates.

    Args:
        first: ``(N, D)``.
        second: ``(M, D)``.
        pairs: ``(L, 2)`` row of ``first``, row of ``second``.
        kind: As in :func:`search`.
        memory: As in :func:`search`.
        dtype: As in :func:`search`.

    Returns:
        ``(L,)``.

    Example:
        >>> score_pairs(torch.eye(2), torch.eye(2), torch.tensor([[0, 0], [0, 1]]))
        tensor([1., 0.])
    """
    _check_features("first", first)
    _check_features("second", second)
    check_choice("kind", kind, KINDS)
    if pairs.dim() != 2 or pairs.shape[1] != 2:
        raise ArgumentError("pairs", f"must be (L, 2) row numbers, got {tuple(pairs.shape)}")
    if first.shape[1] != second.shape[1]:
        raise ArgumentError("second", f"must have dimension {first.shape[1]}, got {second.shape[1]}")
    dtype = dtype or at_least_float32(first).dtype
    check_range("memory", memory, 1)
    budget = min(memory, _CPU_TILE) if first.device.type == "cpu" else memory
    step = max(1, budget // (6 * 4 * (first.shape[1] + 2) * max(1, dtype.itemsize // 4)))
    scores = [
        (_operand(first[a], kind, dtype, "probe") * _operand(second[b], kind, dtype, "gallery")).sum(1)
        for a, b in (chunk.unbind(1) for chunk in pairs.split(step))
    ]
    result = _reported(torch.cat(scores), kind) if len(pairs) else at_least_float32(first.new_empty(0))
    if bool(result.isnan().any()):
        raise ArgumentError("features", "must be finite, got NaN, infinity or a norm that overflows")
    return result
