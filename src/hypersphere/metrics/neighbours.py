r"""Exact nearest-neighbour search of probes in galleries that are too large for a score matrix.

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
import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hypersphere.errors import ArgumentError, HypersphereError, check_choice, check_range
from hypersphere.geometry import arccos, at_least_float32, full_precision, normalise
from hypersphere.metrics.processes import Group, agreed, batches, gathered, place

Kind = Literal["cosine", "angle", "euclidean"]
KINDS: tuple[str, ...] = ("cosine", "angle", "euclidean")
MEMORY = 900 * 2**20
"""Default of ``memory``: bytes that a search may take beyond its arguments and its results."""

_CPU_TILE = 2**23  # larger tiles of scores leave the cache, and the product itself gets slower
_MIN_BLOCK = 8  # shorter rows of scores are sorted as they are


def search(
    probes: Tensor,
    gallery: Tensor | Iterable[Tensor],
    k: int = 1,
    *,
    kind: Kind = "cosine",
    memory: int = MEMORY,
    dtype: torch.dtype | None = None,
    backend: Literal["torch", "faiss"] = "torch",
    group: Group | None = None,
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
        group: Processes that share the search, all of which make the same call and get the same result: each searches
            its rows of the gallery, and the best of all are put together. ``None``: this one alone.

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
        if group is not None:
            raise ArgumentError("group", "must be None with the backend 'faiss', which has threads of its own")
        return _faiss_search(probes, gallery, k, kind)
    parts = ((part, None) for part in parts_of(gallery))
    found = scan(probes, parts, k, kind=kind, memory=memory, dtype=dtype, group=group)
    if found.scores.shape[1] < k:
        raise ArgumentError("gallery", f"must hold at least k = {k} vectors, got {found.size}")
    return found.scores, found.columns


class _Found(NamedTuple):
    """What a pass over a gallery leaves: see :func:`scan`."""

    mates: Tensor
    scores: Tensor
    columns: Tensor
    size: int


@torch.no_grad()
def scan(
    probes: Tensor,
    parts: Iterable[tuple[Tensor, Tensor | None]],
    k: int,
    *,
    kind: str,
    memory: int,
    dtype: torch.dtype | None,
    ids: Tensor | None = None,
    tail: Tail | None = None,
    group: Group | None = None,
) -> _Found:
    """One pass over a gallery: the best score with a mate, and the ``k`` best scores with all others.

    ``parts`` are features ``(g, D)`` with their identities ``(g,)``, or None where nobody of ``ids`` is among them.
    Without any mate the first is -inf; where a probe has fewer than ``k`` others, -inf follows. Processes of a
    ``group`` take the chunks of the gallery in turn, so that each product is that of one process.
    """
    check_features("probes", probes)
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
    rank, size = place(group)
    with agreed(group):
        for number, (chunk, owners) in enumerate(_chunks(parts, width, probes)):
            first, seen = seen, seen + len(chunk)
            if number % size != rank:
                continue
            other = _operand(chunk.to(probes.device, non_blocking=True), kind, dtype, "gallery")
            pairs = None
            if ids is not None and order is not None and owners is not None:
                pairs = matching_pairs(ids, order, owners)
            for tile, kept in zip(tiles, best, strict=True):
                with full_precision(probes):
                    found = (_operand(probes[tile], kind, dtype, "probe") if ready is None else ready) @ other.mT
                if pairs is not None:
                    _take_mates(found, mates, pairs, tile.start)
                if tail is not None:
                    tail.push(found)
                kept.push(found, first)
        known = best[0].columns.dim() == 2
        scores = torch.cat([kept.scores for kept in best]) if known else mates.new_empty(len(probes), 0)
        columns = torch.cat([kept.columns for kept in best]) if known else scores.long()
        if group is not None:
            mates = gathered([mates.unsqueeze(0)], group).amax(0)
            scores, columns = _merged(gathered([scores.mT], group).mT, gathered([columns.mT], group).mT, k)
            if tail is not None:
                tail.take(gathered([tail.values().to(mates)], group))
    if bool(torch.cat([scores.flatten(), mates]).isnan().any()):
        where = "probes" if bool((~probes.isfinite()).any()) else "gallery"
        raise ArgumentError(where, "must hold finite features only, got NaN, infinity or a norm that overflows")
    return _Found(reported(mates, kind), reported(scores, kind), columns, seen)


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


def reported(scores: Tensor, kind: str) -> Tensor:
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
        if self.columns.dim() < 2:
            self.scores, columns = _best(scores, k)
            self.columns = columns + first
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


def _merged(scores: Tensor, columns: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` best of every row of what several processes found, by value and then column."""
    columns, order = columns.sort(1)
    scores, places = _sorted(scores.gather(1, order), k) if scores.shape[1] else (scores, order)
    return scores, columns.gather(1, places)


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


def matching_pairs(ids: Tensor, order: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
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


class Tail:
    """The ``n`` largest of a stream of scores, -inf left out; at most ``2 n`` and a tile are held."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.kept: Tensor | None = None
        self.floor = -math.inf

    def push(self, scores: Tensor) -> None:
        """Take further scores."""
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

    def take(self, scores: Tensor) -> None:
        """Hold these, the largest of several streams, in place of those of one."""
        self.kept = scores

    def values(self) -> Tensor:
        """In descending order."""
        kept = torch.empty(0) if self.kept is None else self.kept
        return kept.sort(descending=True).values[: self.n]


def parts_of(gallery: Tensor | Iterable[Tensor]) -> Iterable[Tensor]:
    """The parts of a gallery, one after the other."""
    return [gallery] if isinstance(gallery, Tensor) else gallery


def _chunks(
    parts: Iterable[tuple[Tensor, Tensor | None]], width: int, probes: Tensor
) -> Iterator[tuple[Tensor, Tensor | None]]:
    for features, owners in parts:
        check_features("gallery", features)
        if features.shape[1] != probes.shape[1]:
            raise ArgumentError(
                "gallery", f"must have the dimension of the probes, {probes.shape[1]}, got {features.shape[1]}"
            )
        for start in range(0, len(features), width):
            here = slice(start, start + width)
            yield features[here], None if owners is None else owners[here]


def check_features(name: str, x: Tensor) -> None:
    """Raise unless it is a matrix of floating point numbers."""
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
    check_features("probes", probes)
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

    for part, _ in _chunks(((part, None) for part in parts_of(gallery)), 2**16, probes):
        index.add(vectors(part))
    if index.ntotal < k:
        raise ArgumentError("gallery", f"must hold at least k = {k} vectors, got {index.ntotal}")
    found, places = index.search(vectors(probes), k)
    scores, columns = torch.from_numpy(-found / 2 if euclidean else found), torch.from_numpy(places)
    columns, order = columns.sort(1)  # lower index first among equal scores
    scores, again = scores.gather(1, order).sort(dim=1, descending=True, stable=True)
    return reported(scores, kind).to(probes.device), columns.gather(1, again).to(probes.device)


@torch.no_grad()
def score_pairs(
    first: Tensor,
    second: Tensor,
    pairs: Tensor,
    *,
    kind: Kind = "cosine",
    memory: int = MEMORY,
    dtype: torch.dtype | None = None,
    group: Group | None = None,
) -> Tensor:
    """Scores of listed pairs, gathered in chunks: for 1:1 verification of features or templates.

    Args:
        first: ``(N, D)``.
        second: ``(M, D)``.
        pairs: ``(L, 2)`` row of ``first``, row of ``second``.
        kind: As in :func:`search`.
        memory: As in :func:`search`.
        dtype: As in :func:`search`.
        group: Processes that share the pairs, all of which make the same call and get the same result; ``None``: this
            one alone.

    Returns:
        ``(L,)``.

    Example:
        >>> score_pairs(torch.eye(2), torch.eye(2), torch.tensor([[0, 0], [0, 1]]))
        tensor([1., 0.])
    """
    check_features("first", first)
    check_features("second", second)
    check_choice("kind", kind, KINDS)
    if pairs.dim() != 2 or pairs.shape[1] != 2:
        raise ArgumentError("pairs", f"must be (L, 2) row numbers, got {tuple(pairs.shape)}")
    if first.shape[1] != second.shape[1]:
        raise ArgumentError("second", f"must have dimension {first.shape[1]}, got {second.shape[1]}")
    dtype = dtype or at_least_float32(first).dtype
    check_range("memory", memory, 1)
    budget = min(memory, _CPU_TILE) if first.device.type == "cpu" else memory
    step = max(1, budget // (6 * 4 * (first.shape[1] + 2) * max(1, dtype.itemsize // 4)))
    with agreed(group):
        scores = [
            (_operand(first[a], kind, dtype, "probe") * _operand(second[b], kind, dtype, "gallery")).sum(1)
            for a, b in (pairs[rows].unbind(1) for rows in batches(len(pairs), step, group))
        ]
        result = reported(gathered(scores, group), kind) if len(pairs) else at_least_float32(first.new_empty(0))
    if bool(result.isnan().any()):
        raise ArgumentError("features", "must be finite, got NaN, infinity or a norm that overflows")
    return result
