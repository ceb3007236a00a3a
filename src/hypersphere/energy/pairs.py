r"""Exact sums of a potential over all pairs of directions, and their gradient, in one pass over tiles.

Of n vectors in d dimensions nothing of size n x n is kept: a tile of cosines becomes its share of the sum and of the
gradient before the next one is computed. Pairs (i, j) and (j, i) are one computation. A vector that is zero has no
direction: it is left out of every pair, and of the number of vectors. Batches of matrices are therefore padded with
zero rows and columns, which change nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hypersphere.energy import chords
from hypersphere.energy.chords import FLOOR, directions, present, smooth_chords, smooth_directions, squared_chords
from hypersphere.energy.potentials import Potential, decode
from hypersphere.energy.shards import Mesh, corners, place, summed
from hypersphere.geometry import full_precision, transformed

TILE = 512
TILE_ELEMENTS = 2**20
"""Largest tile of the torch code, over the batch: what stays in a processor's cache."""
GPU_TILE_ELEMENTS = 2**26
SHARED = 2048
"""Vectors from which on processes that have the same ones share their pairs out."""


def both_chords(potential: Potential, half_space: bool) -> bool:
    """Whether squared chords with mirror images are needed beside those of the pairs."""
    return half_space or potential.mirrored


def seen_by(potential: Potential, mirrored: Tensor | None) -> tuple[Tensor, ...]:
    """What value and slope of a potential take beside squared chords: of some those with mirror images."""
    return (mirrored,) if potential.mirrored and mirrored is not None else ()


def tile_terms(
    q: Tensor,
    p: Tensor | None,
    potential: Potential,
    half_space: bool,
    spread: tuple[Tensor, Tensor] | None,
    floor: float,
) -> tuple[Tensor, Tensor]:
    """Values of the pairs of a tile, and their derivatives by the squared chord.

    Args:
        q: Squared chords.
        p: Those with the mirror images, where :func:`both_chords` says that they are needed.
        potential: What a pair adds.
        half_space: Whether the pairs with mirror images count as well.
        spread: Of weighted vectors: squared difference and product of the two weights.
        floor: Least squared distance.
    """

    def one(squared: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        if spread is not None:
            squared = spread[0] + spread[1] * squared
        value, slope = potential.both(squared.clamp(min=floor), *others)
        slope = slope.masked_fill_(squared < floor, 0.0)
        return value, slope if spread is None else slope * spread[1]

    value, slope = one(q, *seen_by(potential, p))
    if half_space and p is not None:
        mirrored, mirrored_slope = one(p, *seen_by(potential, q))
        value, slope = value.add_(mirrored).mul_(2), slope.sub_(mirrored_slope).mul_(2)
    return value, slope


def pairs_and_images(q: Tensor, p: Tensor | None, half_space: bool) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Squared chords that count, each with that to the other's mirror image where it is known."""
    yield q, p
    if half_space and p is not None:
        yield p, q


def smooth_terms(distance: Tensor, mirrored: Tensor | None, potential: Potential, pairs: Tensor) -> Tensor:
    """Values of the ``pairs`` that count at squared distances, differentiable as often as one likes; else 0."""
    floor = FLOOR[distance.dtype]
    kept = pairs & (distance >= floor)
    others = [torch.where(kept, other, 4.0) for other in seen_by(potential, mirrored)]
    return torch.where(pairs, potential(torch.where(kept, distance, floor), *others), 0.0)


def _tiled(
    units: Tensor,
    valid: Tensor,
    beta: Tensor | None,
    gaps: Tensor | None,
    potential: Potential,
    half_space: bool,
    grad: bool,
    part: int = 0,
    parts: int = 1,
) -> tuple[Tensor, Tensor]:
    """Sums ``(b,)`` in float64, and their gradient by the units ``(b, n, d)`` but for the part along them.

    Of several parts, which add up to the whole, one.
    """
    batch, n, _ = units.shape
    elements = GPU_TILE_ELEMENTS if units.is_cuda else TILE_ELEMENTS
    tile = max(n, 1) if batch * n * n <= elements else max(math.isqrt(elements // max(batch, 1)), TILE)
    if parts > 1:
        tile = min(tile, max(-(-n // (2 * parts)), TILE))  # 2 parts + 1 tiles for each
    floor, both = FLOOR[units.dtype], both_chords(potential, half_space)
    total = torch.zeros(batch, dtype=torch.float64, device=units.device)
    gradient = torch.zeros_like(units) if grad else units.new_empty(0)
    for i, j in corners(n, tile, part, parts):
        rows, columns = units[:, i : i + tile], units[:, j : j + tile]
        short = None if gaps is None else (gaps[:, i : i + tile], gaps[:, j : j + tile])
        own = torch.arange(rows.shape[1], device=units.device) if i == j else None
        q, p = squared_chords(rows, columns, own=own, mirrored=both, gaps=short, look=True)
        spread = None
        if beta is not None:
            a, b = beta[:, i : i + tile].unsqueeze(2), beta[:, j : j + tile].unsqueeze(1)
            spread = ((a - b).square(), a * b)
        value, slope = tile_terms(q, p, potential, half_space, spread, floor)
        if i == j:
            value.diagonal(dim1=-2, dim2=-1).zero_()
            slope.diagonal(dim1=-2, dim2=-1).zero_()
        left, right = valid[:, i : i + tile], valid[:, j : j + tile]
        # A zero vector adds nothing to a gradient and gets none, so that only values need to be masked.
        share = (torch.matmul(value, right.unsqueeze(2)).squeeze(2) * left).sum(1, dtype=torch.float64)
        total += share if i == j else 2 * share
        if grad:
            slope.mul_(-4)
            gradient[:, i : i + tile].baddbmm_(slope, columns)
            if i != j:
                gradient[:, j : j + tile].baddbmm_(slope.mT, rows)
    return total, gradient


def tangent(gradient: Tensor, units: Tensor, inverse: Tensor, factor: Tensor) -> Tensor:
    """Gradients by the vectors of those by their directions, times a factor of each matrix ``(b,)``."""
    along = (gradient * units).sum(-1, keepdim=True)
    return (gradient - along * units) * (inverse * factor.view(-1, 1, 1))


@torch.library.custom_op("hypersphere::pair_sums", mutates_args=())
def _pair_sums(
    vectors: Tensor,
    beta: Tensor | None,
    name: str,
    numbers: Sequence[float],
    half_space: bool,
    eps: float,
    mean: bool,
    grad: bool,
    part: int = 0,
    parts: int = 1,
) -> tuple[Tensor, Tensor]:
    potential = decode(name, numbers)
    vectors = vectors.contiguous()
    fused: Any = chords.fused(vectors)
    served = fused is not None and fused.usable(vectors, potential, beta)
    units, inverse = directions(vectors, eps, look=True)
    valid = (inverse != 0).squeeze(2).to(vectors.dtype)
    gaps = eps * inverse.square() if eps else None
    with full_precision(vectors):
        if served:
            total, gradient = fused.tiled(units, valid, gaps, potential, half_space, grad, part, parts)
        else:
            total, gradient = _tiled(units, valid, beta, gaps, potential, half_space, grad, part, parts)
    count, radial = valid.sum(1), None
    if half_space:
        # Every vector with its own mirror image: a constant, unless short vectors are shortened.
        if part:
            pass  # one of the parts is enough
        elif beta is None and eps == 0:
            total = total + count * float(2 * potential(torch.tensor(4.0, dtype=torch.float64)))
        else:
            own = _own_image(potential, gaps.squeeze(2) if gaps is not None else 0.0 * valid, beta)
            total = total + 2 * (potential(*own) * valid).sum(1)
            if grad and gaps is not None:
                rate = 8 * potential.slope(*own) * (1.0 if beta is None else beta.square())
                radial = rate.unsqueeze(2) * gaps * inverse * units
        count = 2 * count
    factor = torch.ones_like(count)
    if mean:
        factor = (count * (count - 1)).clamp(min=1).reciprocal()
        total = total * factor
    if grad:
        gradient = (fused if served else _THIS).tangent(gradient, units, inverse, factor)
        if radial is not None:
            gradient = gradient + radial * factor.view(-1, 1, 1)
    return total.to(vectors.dtype), gradient


def _own_image(potential: Potential, gap: Tensor, beta: Tensor | None) -> tuple[Tensor, ...]:
    """Squared distances ``(b, n)`` of vectors and their own mirror images, and what else a potential takes.

    Args:
        potential: What a pair adds.
        gap: What the squared lengths of the directions fall short of 1.
        beta: Lengths instead.
    """
    own = 4 - 2 * gap
    own = own if beta is None else (own * beta.square()).clamp(min=FLOOR[gap.dtype])
    return own, *seen_by(potential, 2 * gap)


@_pair_sums.register_fake
def _(
    vectors: Tensor,
    beta: Tensor | None,
    name: str,
    numbers: Sequence[float],
    half_space: bool,
    eps: float,
    mean: bool,
    grad: bool,
    part: int = 0,
    parts: int = 1,
) -> tuple[Tensor, Tensor]:
    return vectors.new_empty(vectors.shape[0]), vectors.new_empty(vectors.shape if grad else (0,))


def _dense(
    vectors: Tensor, beta: Tensor | None, potential: Potential, half_space: bool, eps: float, mean: bool
) -> Tensor:
    """The same sums by plain differentiable code that keeps every pair: what derivatives of the gradient need."""
    valid, units = present(vectors), smooth_directions(vectors, eps)
    gaps = eps * directions(vectors.detach(), eps)[1].square() if eps else None
    places = torch.arange(vectors.shape[1], device=vectors.device)
    short = None if gaps is None else (gaps, gaps)
    q, p = smooth_chords(units, units, own=places, mirrored=both_chords(potential, half_space), gaps=short)
    pairs = valid.unsqueeze(2) & valid.unsqueeze(1) & (places != places.unsqueeze(1))
    scale, offset = 1.0 + torch.zeros_like(q), torch.zeros_like(q)
    if beta is not None:
        scale = beta.unsqueeze(2) * beta.unsqueeze(1)
        offset = (beta.unsqueeze(2) - beta.unsqueeze(1)).square()
    total = vectors.new_zeros(vectors.shape[0], dtype=torch.float64)
    for squared, other in pairs_and_images(q, p, half_space):
        value = smooth_terms(offset + scale * squared, other, potential, pairs)
        total = total + value.sum((1, 2), dtype=torch.float64)
    total = total.to(vectors.dtype)
    if half_space:
        gap = eps / (vectors.square().sum(-1) + eps) if eps else units.new_zeros(units.shape[:-1])
        total = 2 * total + 2 * (potential(*_own_image(potential, gap, beta)) * valid).sum(1)
    return total / pair_counts(vectors, half_space) if mean else total


_THIS: Any = sys.modules[__name__]


class _PairEnergy(torch.autograd.Function):
    """Forward finds sum and gradient together; a second derivative goes through the dense form."""

    @staticmethod
    def forward(
        ctx: Any,
        vectors: Tensor,
        beta: Tensor | None,
        potential: Potential,
        half_space: bool,
        eps: float,
        mean: bool,
        mesh: Mesh,
    ) -> Tensor:
        part = () if mesh is None else place(mesh)
        code = potential.code()
        total, gradient = _pair_sums(vectors, beta, *code, half_space, eps, mean, vectors.requires_grad, *part)
        total = summed(total, mesh)
        if vectors.requires_grad:
            gradient = summed(gradient, mesh)
        ctx.save_for_backward(vectors, beta, gradient)
        ctx.options = (potential, half_space, eps, mean)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        vectors, beta, gradient = ctx.saved_tensors
        if torch.is_grad_enabled():
            with torch.enable_grad(), full_precision(vectors):
                total = _dense(vectors, beta, *ctx.options)
                (gradient,) = torch.autograd.grad(total.sum(), vectors, create_graph=True)
        return gradient * grads[0].view(-1, 1, 1), None, None, None, None, None, None


def pair_sums(
    vectors: Tensor,
    potential: Potential,
    *,
    half_space: bool = False,
    beta: Tensor | None = None,
    eps: float = 0.0,
    mean: bool = False,
    mesh: Mesh = None,
) -> Tensor:
    r"""Sum of a potential over the ordered pairs of the rows of each matrix.

    .. math:: \sum_{i \ne j} f(\|u_i - u_j\|^2), \qquad u_i = w_i / \sqrt{\|w_i\|^2 + \epsilon}

    Args:
        vectors: ``(b, n, d)`` in float32 or float64; zero rows are left out.
        potential: f, of the squared chord.
        half_space: Count every vector's mirror image as another vector: all ordered pairs of the 2n vectors.
        beta: Lengths ``(b, n)`` that the vectors get instead of 1; constants.
        eps: Added under the root of the norm.
        mean: Divide by the number of pairs; without any the mean is 0.
        mesh: Processes that all call this with the same vectors: they share the pairs of many out.

    Returns:
        ``(b,)``, type of ``vectors``.

    Example:
        >>> from hypersphere.energy.potentials import Riesz
        >>> pair_sums(torch.eye(3).unsqueeze(0), Riesz(2.0))
        tensor([3.])
    """
    if not torch.is_grad_enabled():
        vectors = vectors.detach()  # within the function a parameter would look as if its gradient were wanted
    if transformed():
        with full_precision(vectors):
            return _dense(vectors, beta, potential, half_space, eps, mean)
    if mesh is not None and (vectors.shape[1] < max(SHARED, mesh.size()) or torch.compiler.is_compiling()):
        mesh = None
    total: Tensor = _PairEnergy.apply(vectors, beta, potential, half_space, eps, mean, mesh)
    return total


def pair_counts(vectors: Tensor, half_space: bool = False) -> Tensor:
    """Number of ordered pairs of the rows that have a direction, of each matrix ``(b, n, d)``: ``(b,)``, at least 1."""
    n = present(vectors).sum(-1)
    if half_space:
        n = 2 * n
    return (n * (n - 1)).clamp(min=1).to(vectors.dtype)
