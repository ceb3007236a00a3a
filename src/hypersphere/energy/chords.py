r"""Directions of vectors, and the squared chords between them: one treatment of near pairs for all energies.

The squared chord of two directions is :math:`q = \|u - v\|^2 = 2 - 2 \langle u, v\rangle`. The second form is one
product for all pairs and loses the digits of the near ones; these are found from differences. Whatever the type, the
device and the order of the derivative, a chord z has a relative error of about :math:`\epsilon / z`, with
:math:`\epsilon` that of the type: what rounding the directions leaves of it.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch
from torch import Tensor

from hypersphere.geometry import exact_products, largest, normalise, scales, transformed

FLOOR = {torch.float32: 1e-8, torch.float64: 1e-12}
"""Least squared chord: closer pairs count as that far apart and have no gradient."""
NEAR = 0.01
"""Squared chords below this are computed once more without cancellation: ``2 - 2 cos`` has lost their digits."""
ORDINARY = 1e-30
"""Squared norms above, even in float32, have all their digits."""
FEW_NEAR = 2048
"""Pairs of a matrix up to which that is done one by one on a processor."""
GRID = {torch.float32: 2.0**11, torch.float64: 2.0**25}
"""Products of multiples of ``1 / GRID`` of unit vectors add up without any rounding."""


def unit_vectors(vectors: Tensor) -> Tensor:
    """:func:`hypersphere.geometry.normalise` for rows ``(..., n, d)`` of any norm that their type has."""
    return normalise(vectors * scales(vectors))


def _lengths_in_float64(vectors: Tensor) -> Tensor:
    """Norms ``(..., n, 1)``, of which no square overflows or vanishes where the vectors are in float32."""
    return torch.linalg.vector_norm(vectors, 2, -1, keepdim=True, dtype=torch.float64)


def present(vectors: Tensor) -> Tensor:
    """Which rows of ``(..., n, d)`` have a direction, ``(..., n)``: float32 has their norm, float64 its square."""
    return largest(vectors).squeeze(-1) >= _least(vectors.dtype)


def _least(dtype: torch.dtype) -> float:
    """Largest number of the shortest vectors that have a direction."""
    return torch.finfo(torch.float32).tiny if dtype == torch.float32 else math.sqrt(torch.finfo(dtype).tiny)


def directions(vectors: Tensor, eps: float, *, look: bool = False) -> tuple[Tensor, Tensor]:
    """Unit vectors and what a gradient by them is multiplied with, no gradient; both are 0 for zero vectors.

    Args:
        vectors: ``(b, n, d)``.
        eps: Added under the root of the norm.
        look: Whether the numbers may be looked at on a processor, to spare work where no norm is out of the ordinary.

    Returns:
        ``(b, n, d)`` and ``(b, n, 1)``.
    """
    watched = torch.compiler.is_compiling() or transformed()
    kernels = None if watched or vectors.dtype != torch.float32 else fused(vectors)
    if kernels and vectors.numel():
        units, inverse = kernels.directions(vectors, eps)
        return units, inverse
    squared = vectors.square().sum(-1, keepdim=True)
    ordinary = (squared > ORDINARY) & (squared < math.inf)
    inverse = (squared + eps).rsqrt()
    if not (look and not watched and not vectors.is_cuda and bool(ordinary.all())):
        inverse = torch.where(ordinary, inverse, _inverse_in_float64(vectors, eps))
    return vectors * inverse, inverse


def smooth_directions(vectors: Tensor, eps: float = 0.0) -> Tensor:
    """Unit vectors of the rows ``(..., n, d)``, differentiable as often as one likes; zero rows stay zero."""
    if eps == 0:
        return unit_vectors(vectors)
    # Of vectors far shorter than the root of eps nothing is left to be normalised.
    scale = scales(vectors).clamp(max=2.0**50)
    scaled = vectors * scale
    return scaled * (scaled.square().sum(-1, keepdim=True) + eps * scale * scale).rsqrt()


def _inverse_in_float64(vectors: Tensor, eps: float) -> Tensor:
    """Inverse lengths ``(..., n, 1)``; 0 for zero vectors."""
    length = _lengths_in_float64(vectors)
    there = length >= _least(vectors.dtype)
    return torch.where(there, (torch.where(there, length, 1.0).square() + eps).rsqrt(), 0.0).to(vectors.dtype)


def squared_chords(
    rows: Tensor,
    columns: Tensor,
    *,
    own: Tensor | None = None,
    mirrored: bool = False,
    gaps: tuple[Tensor, Tensor] | None = None,
    look: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Squared chords of every row with every column, and with its mirror image; no gradient.

    Args:
        rows: Directions ``(b, m, d)`` in float32 or float64; a zero row is orthogonal to everything.
        columns: Directions ``(b, n, d)``.
        own: For each row ``(m,)`` or ``(b, m)`` the column that is itself, whose chord nobody looks at: it becomes that
            of orthogonal directions. Numbers beyond the columns name none.
        mirrored: Whether the chords with the mirror images are wanted, too.
        gaps: By how much the squared lengths of rows ``(b, m, 1)`` and columns ``(b, n, 1)`` fall short of 1, where
            they do; the squared chord is always taken as 2 less twice the product.
        look: Whether the numbers may be looked at on a processor, to spare work where no pair is near.

    Returns:
        ``(b, m, n)``, and the same or ``None``.

    Example:
        >>> squared_chords(torch.eye(2)[None], torch.tensor([[[0.0, 1.0], [1.0, 1e-3]]]))[0]
        tensor([[[2.0000e+00, 1.0000e-06],
                 [0.0000e+00, 1.9980e+00]]])
    """
    rows, columns = rows.detach(), columns.detach()
    watched = torch.compiler.is_compiling() or transformed()
    kernels = None if watched else fused(rows)
    look = look and not watched and rows.device.type == "cpu"
    if kernels or look:
        q = torch.matmul(rows, columns.mT).mul_(-2).add_(2)
        _spare(q, own)
        p = 4 - q if mirrored else None
        if q.numel():
            if kernels:
                kernels.correct(q, p, rows, columns, gaps)
            else:
                _correct(q, rows, columns, 1, gaps)
                if p is not None:
                    _correct(p, rows, columns, -1, gaps)
        return q, p
    q, p = _exact(rows, columns, mirrored, gaps)
    if own is not None:
        spared = own.unsqueeze(-1) == torch.arange(columns.shape[-2], device=q.device)
        q, p = torch.where(spared, 2.0, q), None if p is None else torch.where(spared, 2.0, p)
    return q, p


def _spare(squared: Tensor, own: Tensor | None) -> None:
    """Set the chord of each row with its own column to that of orthogonal directions, in place."""
    if own is None or not squared.numel():
        return
    last = squared.shape[-1] - 1
    column = own.clamp(0, last).expand(squared.shape[:-1]).unsqueeze(-1)
    inside = ((own >= 0) & (own <= last)).unsqueeze(-1)
    squared.scatter_(-1, column, torch.where(inside, 2.0, squared.gather(-1, column)))


def fused(x: Tensor) -> Any:
    """The module of fused kernels, or ``None`` where there is no Triton for the device of a tensor."""
    if not x.is_cuda or torch.version.hip is not None or x.device.index != torch.cuda.current_device():
        return None
    if importlib.util.find_spec("triton") is None:
        return None
    from hypersphere.energy import fused  # noqa: PLC0415 (needs triton, which comes with torch for CUDA only)

    return fused


def smooth_chords(
    rows: Tensor,
    columns: Tensor,
    *,
    own: Tensor | None = None,
    mirrored: bool = False,
    gaps: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The same numbers as :func:`squared_chords`, differentiable as often as one likes."""
    q, p = squared_chords(rows, columns, own=own, mirrored=mirrored, gaps=gaps)
    # The derivative of the product needs no difference of near numbers.
    doubled = 2 * (rows @ columns.mT)
    moving = doubled - doubled.detach()
    return q - moving, None if p is None else p + moving


def _correct(squared: Tensor, rows: Tensor, columns: Tensor, sign: int, gaps: tuple[Tensor, Tensor] | None) -> None:
    """Compute the short ones of squared distances once more, in place: alone where they are few, else all."""
    if squared.amin() >= NEAR:
        return
    near = squared < NEAR
    if int(near.sum()) <= squared.shape[0] * FEW_NEAR:
        matrix, i, j = near.nonzero(as_tuple=True)
        short = (rows[matrix, i] - sign * columns[matrix, j]).square().sum(1)
        if gaps is not None:
            short += gaps[0][matrix, i, 0] + gaps[1][matrix, j, 0]
        squared[matrix, i, j] = short
    else:
        plain, mirrored = _exact(rows, columns, sign < 0, gaps)
        torch.where(near, plain if mirrored is None else mirrored, squared, out=squared)


def _exact(
    rows: Tensor, columns: Tensor, mirrored: bool, gaps: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor | None]:
    """All squared chords by products that keep the digits of their difference."""
    wider = rows.dtype == torch.float32 and rows.device.type == "cpu"  # elsewhere float64 is slow, or unknown
    with exact_products():
        lengths, products = (_doubled if wider else _split)(rows, columns)
    small, large = lengths[0] - products[0], lengths[0] + products[0]
    if gaps is not None:
        small, large = small + (gaps[0] + gaps[1].mT), large + (gaps[0] + gaps[1].mT)
    for length, product in zip(lengths[1:], products[1:], strict=True):
        small, large = small + (length - product), large + (length + product)
    return small.to(rows.dtype), large.to(rows.dtype) if mirrored else None


def _lengths(x: Tensor, squared: Tensor) -> Tensor:
    """Squared lengths ``(b, n, 1)``; a zero vector passes for a unit vector, which it is orthogonal to."""
    return torch.where((x == 0).all(-1, keepdim=True), 1.0, squared.sum(-1, keepdim=True))


def _doubled(rows: Tensor, columns: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Sums of squared lengths and doubled products of all pairs, in float64."""
    rows, columns = rows.double(), columns.double()
    lengths = _lengths(rows, rows.square()) + _lengths(columns, columns.square()).mT
    return [lengths], [2 * (rows @ columns.mT)]


def _split(rows: Tensor, columns: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The same in two parts: of multiples of the grid, of which nothing is rounded, and what they leave."""
    grid = GRID[rows.dtype]
    high, high_columns = ((x * grid).round() / grid for x in (rows, columns))
    low, low_columns = rows - high, columns - high_columns
    lengths = [
        _lengths(rows, high.square()) + _lengths(columns, high_columns.square()).mT,
        ((high + rows) * low).sum(-1, keepdim=True) + ((high_columns + columns) * low_columns).sum(-1, keepdim=True).mT,
    ]
    products = [
        2 * (high @ high_columns.mT),
        2 * (torch.cat([high, low], -1) @ torch.cat([low_columns, columns], -1).mT),
    ]
    return lengths, products
