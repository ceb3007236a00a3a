r"""Exact sums of a potential over all pairs of directions, and their gradient, in one pass over tiles.

Of n vectors in d dimensions nothing of size n x n is kept: a tile of cosines becomes its share of the sum and of the
gradient before the next one is computed. Pairs (i, j) and (j, i) are one computation. A vector that is zero has no
direction: it is left out of every pair, and of the number of vectors. Batches of matrices are therefore padded with
zero rows and columns, which change nothing.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hypersphere.energy.potentials import Potential, decode
from hypersphere.geometry import full_precision

FLOOR = {torch.float32: 1e-6, torch.float64: 1e-12}
"""Least squared chord: closer pairs count as that far apart and have no gradient."""
NEAR = 0.01
"""Squared chords below this are computed once more from differences: ``2 - 2 cos`` has lost their digits."""
FEW_NEAR = 2048
"""Pairs of a matrix up to which that is done one by one."""
TILE = 512
TILE_ELEMENTS = 2**20
"""Largest tile of the torch code, over the batch: what stays in a processor's cache."""
GPU_TILE_ELEMENTS = 2**26


def directions(vectors: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Unit vectors ``(b, n, d)``, and what a gradient by them is multiplied with ``(b, n, 1)``: 0 for zero vectors."""
    squared = vectors.square().sum(-1, keepdim=True)
    inverse = torch.where(squared > torch.finfo(vectors.dtype).tiny, (squared + eps).rsqrt(), 0.0)
    return vectors * inverse, inverse


def present(vectors: Tensor) -> Tensor:
    """Which rows of ``(..., n, d)`` have a direction, ``(..., n)``."""
    return vectors.detach().square().sum(-1) > torch.finfo(vectors.dtype).tiny


def smooth_directions(vectors: Tensor, eps: float = 0.0) -> Tensor:
    """Unit vectors of the rows ``(..., n, d)``, differentiable as often as one likes; zero rows stay zero."""
    squared = vectors.square().sum(-1, keepdim=True)
    valid = present(vectors).unsqueeze(-1)
    return vectors * torch.where(valid, (torch.where(valid, squared, 1.0) + eps).rsqrt(), 0.0)


def separation(rows: Tensor, columns: Tensor, exact: bool, mirrored: bool) -> tuple[Tensor, Tensor | None]:
    """Squared chords of a tile and, mirrored, those with the mirror images; short ones from differences."""
    q = torch.matmul(rows, columns.mT).mul_(-2).add_(2)
    p = 4 - q if mirrored else None
    if exact and q.dtype == torch.float32 and q.device.type == "cpu" and q.numel():
        _correct(q, rows, columns, 1)
        if p is not None:
            _correct(p, rows, columns, -1)
    return q, p


def _correct(squared: Tensor, rows: Tensor, columns: Tensor, sign: int) -> None:
    """Compute the short ones of squared distances once more, in place: alone where they are few, else all."""
    if squared.amin() >= NEAR:
        return
    near = squared < NEAR
    if int(near.sum()) <= squared.shape[0] * FEW_NEAR:
        matrix, i, j = near.nonzero(as_tuple=True)
        squared[matrix, i, j] = (rows[matrix, i] - sign * columns[matrix, j]).square().sum(1)
    else:
        a, b = rows.double(), columns.double()
        lengths = a.square().sum(-1, keepdim=True) + b.square().sum(-1).unsqueeze(-2)
        torch.where(near, (lengths - 2 * sign * (a @ b.mT)).to(squared.dtype), squared, out=squared)


def tile_terms(
    q: Tensor,
    potential: Potential,
    half_space: bool,
    spread: tuple[Tensor, Tensor] | None,
    floor: float,
    p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Values of the pairs of a tile, and their derivatives by the squared chord.

    Args:
        q: Squared chords.
        potential: What a pair adds.
        half_space: Add the pair with the mirror image.
        spread: Of weighted vectors: squared difference and product of the two weights.
        floor: Least squared distance.
        p: Squared chords with the mirror images, where ``4 - q`` would lose digits.
    """

    def one(squared: Tensor) -> tuple[Tensor, Tensor]:
        if spread is not None:
            squared = spread[0] + spread[1] * squared
        value, slope = potential.both(squared.clamp(min=floor))
        slope = slope.masked_fill_(squared < floor, 0.0)
        return value, slope if spread is None else slope * spread[1]

    value, slope = one(q)
    if half_space:
        mirrored, mirrored_slope = one(4 - q if p is None else p)
        value, slope = value.add_(mirrored).mul_(2), slope.sub_(mirrored_slope).mul_(2)
    return value, slope


def _tiled(
    units: Tensor, valid: Tensor, beta: Tensor | None, potential: Potential, half_space: bool, exact: bool, grad: bool
) -> tuple[Tensor, Tensor]:
    """Sums ``(b,)`` in float64, and their gradient by the units ``(b, n, d)`` but for the part along them."""
    batch, n, _ = units.shape
    elements = GPU_TILE_ELEMENTS if units.is_cuda else TILE_ELEMENTS
    tile = max(n, 1) if batch * n * n <= elements else max(math.isqrt(elements // max(batch, 1)), TILE)
    floor = FLOOR[units.dtype]
    total = torch.zeros(batch, dtype=torch.float64, device=units.device)
    gradient = torch.zeros_like(units) if grad else units.new_empty(0)
    for i in range(0, n, tile):
        for j in range(i, n, tile):
            rows, columns = units[:, i : i + tile], units[:, j : j + tile]
            q, p = separation(rows, columns, exact, half_space)
            if i == j:
                for chords in (q,) if p is None else (q, p):
                    chords.diagonal(dim1=-2, dim2=-1).fill_(2.0)
            spread = None
            if beta is not None:
                a, b = beta[:, i : i + tile].unsqueeze(2), beta[:, j : j + tile].unsqueeze(1)
                spread = ((a - b).square(), a * b)
            value, slope = tile_terms(q, potential, half_space, spread, floor, p)
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


def _kernels() -> Any:
    """The module of fused kernels, or ``None`` where there is no Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from hypersphere.energy import fused  # noqa: PLC0415 (needs triton, which comes with torch for CUDA only)

    return fused


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
) -> tuple[Tensor, Tensor]:
    potential = decode(name, numbers)
    vectors = vectors.contiguous()
    fused: Any = _kernels() if vectors.is_cuda else None
    served = fused is not None and fused.usable(vectors, potential, beta)
    units, inverse = (fused if served else _THIS).directions(vectors, eps)
    valid = (inverse != 0).squeeze(2).to(vectors.dtype)
    with full_precision(vectors):
        if served:
            total, gradient = fused.tiled(units, valid, potential, half_space, eps == 0, grad)
        else:
            total, gradient = _tiled(units, valid, beta, potential, half_space, eps == 0, grad)
    count = valid.sum(1)
    if half_space:
        # Every vector with its own mirror image: a constant, unless short vectors are shortened.
        if beta is None and eps == 0:
            total = total + count * float(2 * potential(torch.tensor(4.0, dtype=torch.float64)))
        else:
            own = 2 + 2 * units.square().sum(-1) if eps else 4.0 * valid
            own = (own if beta is None else own * beta.square()).clamp(min=FLOOR[vectors.dtype])
            total = total + 2 * (potential(own) * valid).sum(1)
            if grad and eps:
                rate = 8 * potential.slope(own) * (1.0 if beta is None else beta.square())
                gradient = gradient + rate.unsqueeze(2) * units
        count = 2 * count
    factor = torch.ones_like(count)
    if mean:
        factor = (count * (count - 1)).clamp(min=1).reciprocal()
        total = total * factor
    if grad:
        gradient = (fused if served else _THIS).tangent(gradient, units, inverse, factor)
    return total.to(vectors.dtype), gradient


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
) -> tuple[Tensor, Tensor]:
    return vectors.new_empty(vectors.shape[0]), vectors.new_empty(vectors.shape if grad else (0,))


def _dense(
    vectors: Tensor, beta: Tensor | None, potential: Potential, half_space: bool, eps: float, mean: bool
) -> Tensor:
    """The same sums by plain differentiable code that keeps every pair: what derivatives of the gradient need."""
    valid, units = present(vectors), smooth_directions(vectors, eps)
    q = 2 - 2 * units @ units.mT
    own = torch.eye(vectors.shape[1], dtype=torch.bool, device=vectors.device)
    pairs = valid.unsqueeze(2) & valid.unsqueeze(1) & ~own
    scale, offset = 1.0 + torch.zeros_like(q), torch.zeros_like(q)
    if beta is not None:
        scale = beta.unsqueeze(2) * beta.unsqueeze(1)
        offset = (beta.unsqueeze(2) - beta.unsqueeze(1)).square()
    total = vectors.new_zeros(vectors.shape[0])
    floor = FLOOR[vectors.dtype]
    for chord in (q, 4 - q) if half_space else (q,):
        distance = offset + scale * chord
        value = potential(torch.where(pairs & (distance >= floor), distance, floor))
        total = total + torch.where(pairs, value, 0.0).sum((1, 2))
    if half_space:
        own = (2 + 2 * units.square().sum(-1)) if eps else units.new_full(units.shape[:-1], 4.0)
        own = own if beta is None else own * beta.square()
        total = 2 * total + 2 * (potential(own) * valid).sum(1)
    return total / pair_counts(vectors, half_space) if mean else total


_THIS: Any = sys.modules[__name__]


class _PairEnergy(torch.autograd.Function):
    """Forward finds sum and gradient together; a second derivative goes through the dense form."""

    @staticmethod
    def forward(
        ctx: Any, vectors: Tensor, beta: Tensor | None, potential: Potential, half_space: bool, eps: float, mean: bool
    ) -> Tensor:
        total, gradient = _pair_sums(vectors, beta, *potential.code(), half_space, eps, mean, vectors.requires_grad)
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
        return gradient * grads[0].view(-1, 1, 1), None, None, None, None, None


def pair_sums(
    vectors: Tensor,
    potential: Potential,
    *,
    half_space: bool = False,
    beta: Tensor | None = None,
    eps: float = 0.0,
    mean: bool = False,
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

    Returns:
        ``(b,)``, type of ``vectors``.

    Example:
        >>> from hypersphere.energy.potentials import Riesz
        >>> pair_sums(torch.eye(3).unsqueeze(0), Riesz(2.0))
        tensor([3.])
    """
    if not torch.is_grad_enabled():
        vectors = vectors.detach()  # within the function a parameter would look as if its gradient were wanted
    total: Tensor = _PairEnergy.apply(vectors, beta, potential, half_space, eps, mean)
    return total


def pair_counts(vectors: Tensor, half_space: bool = False) -> Tensor:
    """Number of ordered pairs of the rows that have a direction, of each matrix ``(b, n, d)``: ``(b,)``, at least 1."""
    n = present(vectors).sum(-1)
    if half_space:
        n = 2 * n
    return (n * (n - 1)).clamp(min=1).to(vectors.dtype)
