"""Pair sums on NVIDIA GPUs, in Triton; the torch code in :mod:`pairs` computes the same and is the oracle.

Few vectors: cosines by a float32 product, then one kernel that turns them, in place, into slopes and adds up values.

Many vectors: product, values and slopes are one kernel on fp16 copies of the unit vectors (as many digits as TF32, at
twice the rate), and the gradient is a product of fp16 slopes with them. Pairs that are closer than the products can
tell, or whose slopes fp16 cannot hold, are left out of that and done in float32 in the same kernel, from differences.

Whatever else the torch code computes on these devices takes its short chords from :func:`correct`, without waiting.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from hypersphere import geometry
from hypersphere.energy import chords
from hypersphere.energy.potentials import Gaussian, Potential, Riesz, least_opposite
from hypersphere.energy.shards import corners

MANY = 4096
"""Vectors from which on the fp16 kernel serves."""
LEAST_DIM = 64
LARGEST_S = 8.0
"""Beyond these fp16 slopes would cover too small a range of distances."""
TILE = 128
DEPTH = 64
PANEL = 8192
"""Rows and columns of the slopes that are kept at a time: 128 MiB."""
PANEL_ELEMENTS = 2**25
"""Cosines of few vectors that are kept at a time, over the batch."""
FEW_ROWS, FEW_COLUMNS = 32, 64
NEAR = 0.2
"""Squared chords below this are found from differences, where cosines come from fp16 or TF32 products."""
FLOOR = tl.constexpr(chords.FLOOR[torch.float32])
OPPOSITE = tl.constexpr(least_opposite(torch.float32))
TINY = tl.constexpr(torch.finfo(torch.float32).tiny ** 2)
"""Squared norm of the shortest vectors that have a direction."""
HALF_RANGE = 3e4
"""Largest slope that is kept in fp16, in units of that of orthogonal vectors."""


@triton.jit
def _angle(q, p):
    """Angle at squared chords, and that with the mirror image, to float32's last digits also near 0 and half a turn."""
    behind = q > p
    x = tl.sqrt(tl.maximum(tl.minimum(q, p), 0.0)) * 0.5
    large = x > 0.5
    z = tl.where(large, (1 - x) * 0.5, x * x)
    y = tl.where(large, tl.sqrt(z), x)
    series = (((4.2163199048e-2 * z + 2.4181311049e-2) * z + 4.5470025998e-2) * z + 7.4953002686e-2) * z
    arcsine = (series + 1.6666752422e-1) * z * y + y
    small = tl.where(large, 3.141592653589793 - 4 * arcsine, 2 * arcsine)
    return tl.where(behind, 3.141592653589793 - small, small), tl.where(behind, small, 3.141592653589793 - small)


@triton.jit
def _power(z, s, KIND: tl.constexpr):
    """Riesz kernel of a distance, and its derivative; kinds: s = 0, 1, 2 or any."""
    if KIND == 0:
        value = -tl.log(z)
        slope = -1 / z
    elif KIND == 1:
        value = 1 / z
        slope = -value * value
    elif KIND == 2:
        inverse = 1 / z
        value = inverse * inverse
        slope = -2 * value * inverse
    else:
        value = tl.exp2(tl.log2(z) * -s)
        slope = -s * value / z
    return value, slope


@triton.jit
def _potential(q, s, KIND: tl.constexpr, SHAPE: tl.constexpr):
    """Value and slope at squared chords; shapes: Riesz kernel of the chord, Gaussian."""
    safe = tl.maximum(q, FLOOR)
    if SHAPE == 2:
        value = tl.exp(-s * safe)
        slope = -s * value
    elif KIND == 0:
        value = tl.log(safe) * -0.5
        slope = -0.5 / safe
    elif KIND == 1:
        value = tl.rsqrt(safe)
        slope = -0.5 * value / safe
    elif KIND == 2:
        value = 1 / safe
        slope = -value * value
    else:
        value = tl.exp2(tl.log2(safe) * (-0.5 * s))
        slope = -0.5 * s * value / safe
    return value, tl.where(q < FLOOR, 0.0, slope)


@triton.jit
def _terms(q, p, s, scale, offset, factor, KIND: tl.constexpr, SHAPE: tl.constexpr, HALF: tl.constexpr):
    """Value and slope of a pair with squared chords q and, to the mirror image, p; shape 1: kernels of the angle."""
    if SHAPE == 1:
        angle, mirrored_angle = _angle(tl.maximum(q, FLOOR), tl.maximum(p, FLOOR))
        spread = tl.rsqrt(tl.maximum(q, FLOOR) * tl.maximum(p, OPPOSITE)) * scale
        value, slope = _power(angle * scale + offset, s, KIND)
        slope = tl.where(q < FLOOR, 0.0, slope)
        if HALF:
            mirrored, mirrored_slope = _power(mirrored_angle * scale + offset, s, KIND)
            value = 2 * (value + mirrored)
            slope = 2 * (slope - tl.where(p < FLOOR, 0.0, mirrored_slope))
        slope *= spread
    else:
        value, slope = _potential(q, s, KIND, SHAPE)
        if HALF:
            mirrored, mirrored_slope = _potential(p, s, KIND, SHAPE)
            value = 2 * (value + mirrored)
            slope = 2 * (slope - mirrored_slope)
    return value * factor, slope * factor


@triton.jit
def _from_differences(
    q, left, right, i, j, m, n, dim, left_gaps, right_gaps, near, BOTH: tl.constexpr, PADDED: tl.constexpr
):
    """Squared chords, also with mirror images, the short ones computed once more without cancellation."""
    p = 4 - q
    close = tl.zeros_like(q)
    if PADDED:
        close += tl.load(left_gaps + i, mask=i < m, other=0.0)[:, None]
        close += tl.load(right_gaps + j, mask=j < n, other=0.0)[None, :]
    opposite = close
    left += i.to(tl.int64) * dim
    right += j.to(tl.int64) * dim
    for start in range(0, dim, 8):
        for step in tl.static_range(8):  # loads that do not wait for each other
            k = start + step
            a = tl.load(left + k, mask=(i < m) & (k < dim), other=0.0)[:, None]
            b = tl.load(right + k, mask=(j < n) & (k < dim), other=0.0)[None, :]
            close += (a - b) * (a - b)
            if BOTH:
                opposite += (a + b) * (a + b)
    if BOTH:
        p = tl.where(p < near, opposite, p)
    return tl.where(q < near, close, q), p


@triton.jit
def _near_kernel(
    squared,
    mirrored,
    left,
    right,
    left_gaps,
    right_gaps,
    m,
    n,
    dim,
    left_stride,
    right_stride,
    near,
    BOTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Squared chords ``(b, m, n)``, and those with mirror images, without cancellation, in place."""
    batch = tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (i < m)[:, None] & (j < n)[None, :]
    place = (batch * m + i[:, None]) * n + j[None, :]
    q = tl.load(squared + place, mask=inside, other=2.0)
    narrow = tl.minimum(q, 4 - q) if BOTH else q
    if tl.min(narrow) < near:
        left += batch * left_stride
        right += batch * right_stride
        if PADDED:
            left_gaps += batch * m
            right_gaps += batch * n
        q, p = _from_differences(q, left, right, i, j, m, n, dim, left_gaps, right_gaps, near, BOTH, PADDED)
        tl.store(squared + place, q, mask=inside)
        if BOTH:
            tl.store(mirrored + place, p, mask=inside)


@triton.jit
def _unit_kernel(vectors, units, inverse, dim, eps, BLOCK: tl.constexpr):
    """Directions, and inverse lengths: 0 for a zero vector."""
    row = tl.program_id(0).to(tl.int64)
    squared = tl.zeros((BLOCK,), tl.float64)  # of which no norm in float32 is out of range
    for start in range(0, dim, BLOCK):
        k = start + tl.arange(0, BLOCK)
        value = tl.load(vectors + row * dim + k, mask=k < dim, other=0.0).to(tl.float64)
        squared += value * value
    total = tl.sum(squared)
    factor = tl.where(total > TINY, tl.rsqrt(total + eps), 0.0).to(tl.float32)
    tl.store(inverse + row, factor)
    for start in range(0, dim, BLOCK):
        k = start + tl.arange(0, BLOCK)
        value = tl.load(vectors + row * dim + k, mask=k < dim, other=0.0)
        tl.store(units + row * dim + k, value * factor, mask=k < dim)


@triton.jit
def _tangent_kernel(gradient, units, inverse, factor, dim, n, BLOCK: tl.constexpr):
    """Gradients by the units become those by the vectors, in place: less the part along them, over their lengths."""
    row = tl.program_id(0).to(tl.int64)
    along = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, dim, BLOCK):
        k = start + tl.arange(0, BLOCK)
        unit = tl.load(units + row * dim + k, mask=k < dim, other=0.0)
        along += unit * tl.load(gradient + row * dim + k, mask=k < dim, other=0.0)
    part = tl.sum(along)
    scale = tl.load(inverse + row) * tl.load(factor + row // n)
    for start in range(0, dim, BLOCK):
        k = start + tl.arange(0, BLOCK)
        unit = tl.load(units + row * dim + k, mask=k < dim, other=0.0)
        value = tl.load(gradient + row * dim + k, mask=k < dim, other=0.0)
        tl.store(gradient + row * dim + k, (value - part * unit) * scale, mask=k < dim)


@triton.jit
def _few_kernel(
    cosines,
    units,
    valid,
    gaps,
    partial,
    n,
    dim,
    first,
    rows,
    near,
    s,
    scale,
    offset,
    factor,
    KIND: tl.constexpr,
    SHAPE: tl.constexpr,
    HALF: tl.constexpr,
    BOTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Cosines ``(b, rows, n)`` become slopes in place; each program leaves the sum of its values."""
    batch = tl.program_id(2)
    local = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = first + local
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (local < rows)[:, None] & (j < n)[None, :]
    place = cosines + (batch.to(tl.int64) * rows + local[:, None]) * n + j[None, :]
    q = 2 - 2 * tl.load(place, mask=inside, other=0.0)
    both = tl.load(valid + batch * n + i, mask=local < rows, other=0.0)[:, None]
    both *= tl.load(valid + batch * n + j, mask=j < n, other=0.0)[None, :]
    pair = inside & (i[:, None] != j[None, :]) & (both > 0)
    q = tl.where(pair, q, 2.0)
    p = 4 - q
    narrow = tl.minimum(q, p) if BOTH else q
    if tl.min(narrow) < near:
        here = units + batch.to(tl.int64) * n * dim
        short = gaps + batch * n
        q, p = _from_differences(q, here, here, i, j, n, n, dim, short, short, near, BOTH, PADDED)
    value, slope = _terms(q, p, s, scale, offset, factor, KIND, SHAPE, HALF)
    tl.store(place, tl.where(pair, slope, 0.0), mask=inside)
    program = (batch * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(1) + tl.program_id(1)
    tl.store(partial + program, tl.sum(tl.where(pair, value, 0.0)))


@triton.jit
def _add_gradient(target, weights, vectors, i, j, n, dim, WIDTH: tl.constexpr):
    """Add ``weights @ vectors[j]`` to the rows i of the target."""
    for start in range(0, dim, WIDTH):
        k = start + tl.arange(0, WIDTH)
        source = vectors + j.to(tl.int64)[:, None] * dim + k[None, :]
        block = tl.load(source, mask=(j < n)[:, None] & (k < dim)[None, :], other=0.0)
        product = tl.dot(weights, block, input_precision="ieee")
        place = target + i.to(tl.int64)[:, None] * dim + k[None, :]
        tl.atomic_add(place, product, mask=(i < n)[:, None] & (k < dim)[None, :])


@triton.jit
def _many_kernel(
    half,
    units,
    valid,
    gaps,
    slopes,
    gradient,
    partial,
    n,
    dim,
    first_row,
    first_column,
    rows,
    columns,
    near,
    s,
    scale,
    offset,
    factor,
    strength,
    KIND: tl.constexpr,
    SHAPE: tl.constexpr,
    HALF: tl.constexpr,
    BOTH: tl.constexpr,
    PADDED: tl.constexpr,
    GRAD: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A panel of fp16 slopes times ``strength``, the sums of its values, and the gradient of its near pairs."""
    tiles = tl.cdiv(columns, TILE)
    row_tiles = tl.cdiv(rows, TILE)
    # Programs that run at the same time share rows and columns.
    program = tl.program_id(0)
    group = program // (GROUP * tiles)
    height = min(row_tiles - group * GROUP, GROUP)
    row_tile = group * GROUP + (program % (GROUP * tiles)) % height
    column_tile = (program % (GROUP * tiles)) // height
    row = row_tile * TILE + tl.arange(0, TILE)
    column = column_tile * TILE + tl.arange(0, TILE)
    i = first_row + row
    j = first_column + column
    depth = tl.arange(0, DEPTH)
    left = half + i.to(tl.int64)[:, None] * WIDTH + depth[None, :]
    right = half + j.to(tl.int64)[None, :] * WIDTH + depth[:, None]
    cosines = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, WIDTH, DEPTH):
        cosines = tl.dot(tl.load(left + start), tl.load(right + start), cosines)
    q = 2 - 2 * cosines
    both = tl.load(valid + i, mask=i < n, other=0.0)[:, None] * tl.load(valid + j, mask=j < n, other=0.0)[None, :]
    pair = (i[:, None] != j[None, :]) & (both > 0)
    q = tl.where(pair, q, 2.0)
    p = 4 - q
    narrow = tl.minimum(q, p) if BOTH else q
    far = pair & (narrow >= near)
    value, slope = _terms(q, p, s, scale, offset, factor, KIND, SHAPE, HALF)
    total = tl.sum(tl.where(far, value, 0.0))
    if GRAD:
        place = slopes + row.to(tl.int64)[:, None] * columns + column[None, :]
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        tl.store(place, tl.where(far, slope * strength, 0.0).to(tl.float16), mask=inside)
    if tl.min(narrow) < near:
        q, p = _from_differences(q, units, units, i, j, n, n, dim, gaps, gaps, near, BOTH, PADDED)
        value, slope = _terms(q, p, s, scale, offset, factor, KIND, SHAPE, HALF)
        nearby = pair & (narrow < near)
        total += tl.sum(tl.where(nearby, value, 0.0))
        if GRAD:
            weights = tl.where(nearby, slope * strength, 0.0)
            _add_gradient(gradient, weights, units, i, j, n, dim, 32)
            if first_column > first_row:
                _add_gradient(gradient, tl.trans(weights), units, j, i, n, dim, 32)
    tl.store(partial + program, total)


def usable(vectors: Tensor, potential: Potential, beta: Tensor | None) -> bool:
    """Whether these kernels serve: float32, a potential known here, no weights."""
    return (
        vectors.dtype == torch.float32 and vectors.numel() > 0 and beta is None and type(potential) in (Riesz, Gaussian)
    )


def _constants(potential: Potential) -> tuple[int, int, float, float, float, float]:
    """Kind of power, shape, exponent, unit of angles, offset and factor for the kernels."""
    if isinstance(potential, Gaussian):
        return 3, 2, potential.t, 1.0, 0.0, 1.0
    assert isinstance(potential, Riesz)
    kind = {0.0: 0, 1.0: 1, 2.0: 2}.get(potential.s, 3)
    scale = 1 / math.pi if potential.half_turns else 1.0
    factor = math.copysign(potential.factor, potential.s)
    return kind, int(potential.angular), potential.s, scale, potential.offset, factor


def correct(q: Tensor, p: Tensor | None, rows: Tensor, columns: Tensor, gaps: tuple[Tensor, Tensor] | None) -> None:
    """Squared chords ``(b, m, n)`` found from products, and those with mirror images: the short ones anew, in place.

    Args:
        q: Squared chords.
        p: Those with the mirror images.
        rows: Directions ``(b, m, d)``.
        columns: Directions ``(b, n, d)``.
        gaps: What the squared lengths of both fall short of 1 ``(b, m, 1)`` and ``(b, n, 1)``, where they do.
    """
    batch, m, n = q.shape
    rows, columns = (x if x[0].is_contiguous() else x.contiguous() for x in (rows, columns))
    short = (rows, columns) if gaps is None else tuple(gap.contiguous() for gap in gaps)
    _near_kernel[(triton.cdiv(m, FEW_ROWS), triton.cdiv(n, FEW_COLUMNS), batch)](
        q,
        q if p is None else p,
        rows,
        columns,
        *short,
        m,
        n,
        rows.shape[2],
        rows.stride(0),
        columns.stride(0),
        _near(),
        BOTH=p is not None,
        PADDED=gaps is not None,
        ROWS=FEW_ROWS,
        COLUMNS=FEW_COLUMNS,
    )


def _near() -> float:
    """The squared chord below which those from products are not good enough."""
    return NEAR if geometry.tf32_products() else chords.NEAR


def tiled(
    units: Tensor,
    valid: Tensor,
    gaps: Tensor | None,
    potential: Potential,
    half_space: bool,
    grad: bool,
    part: int = 0,
    parts: int = 1,
) -> tuple[Tensor, Tensor]:
    """Sums over ordered pairs ``(b,)`` in float64, and their gradient by the units ``(b, n, d)``.

    Args:
        units: Directions ``(b, n, d)`` in float32, zero where there is none.
        valid: 1 where there is one ``(b, n)``.
        gaps: What the squared lengths of the directions fall short of 1 ``(b, n, 1)``, where they do.
        potential: What a pair adds.
        half_space: Whether mirror images count.
        grad: Whether the gradient is wanted.
        part: Which of the parts that add up to the whole; no more parts than vectors.
        parts: How many there are.
    """
    _, n, dim = units.shape
    steep = isinstance(potential, Riesz) and not -1 <= potential.s <= LARGEST_S
    if n < MANY or dim < LEAST_DIM or steep:
        return _few(units, valid, gaps, potential, half_space, grad, part, parts)
    short = [None] * len(units) if gaps is None else gaps
    of = potential, half_space, grad, part, parts
    found = [_many(u, v, g, *of) for u, v, g in zip(units, valid, short, strict=True)]
    if len(found) == 1:
        return found[0][0].view(1), found[0][1].view(units.shape if grad else 0)
    return torch.stack([total for total, _ in found]), torch.stack([gradient for _, gradient in found])


def directions(vectors: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As in :mod:`pairs`, in one pass."""
    batch, n, dim = vectors.shape
    vectors = vectors.contiguous()
    units, inverse = torch.empty_like(vectors), vectors.new_empty(batch, n, 1)
    _unit_kernel[(batch * n,)](vectors, units, inverse, dim, eps, BLOCK=min(triton.next_power_of_2(dim), 1024))
    return units, inverse


def tangent(gradient: Tensor, units: Tensor, inverse: Tensor, factor: Tensor) -> Tensor:
    """As in :mod:`pairs`, in one pass and in place."""
    batch, n, dim = units.shape
    block = min(triton.next_power_of_2(dim), 1024)
    _tangent_kernel[(batch * n,)](gradient, units, inverse, factor.contiguous(), dim, n, BLOCK=block)
    return gradient


def _few(
    units: Tensor,
    valid: Tensor,
    gaps: Tensor | None,
    potential: Potential,
    half_space: bool,
    grad: bool,
    part: int,
    parts: int,
) -> tuple[Tensor, Tensor]:
    batch, n, dim = units.shape
    kind, shape, *constants = _constants(potential)
    units, valid, gaps = units.contiguous(), valid.contiguous(), None if gaps is None else gaps.contiguous()
    step = min(max(PANEL_ELEMENTS // (batch * n), 1), n)
    start, stop = n * part // parts, n * (part + 1) // parts
    sums, gradients = [], []
    for first in range(start, stop, step):
        rows = min(step, stop - first)
        cosines = units[:, first : first + rows] @ units.mT
        grid = (triton.cdiv(rows, FEW_ROWS), triton.cdiv(n, FEW_COLUMNS), batch)
        partial = units.new_empty(batch, grid[0] * grid[1])
        _few_kernel[grid](
            cosines,
            units,
            valid,
            valid if gaps is None else gaps,
            partial,
            n,
            dim,
            first,
            rows,
            _near(),
            *constants,
            KIND=kind,
            SHAPE=shape,
            HALF=half_space,
            BOTH=half_space or shape == 1,
            PADDED=gaps is not None,
            ROWS=FEW_ROWS,
            COLUMNS=FEW_COLUMNS,
        )
        sums.append(partial.sum(1, dtype=torch.float64))
        if grad:
            gradients.append(torch.bmm(cosines, units))
    total = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
    if not grad:
        return total, units.new_empty(0)
    gradient = gradients[0] if len(gradients) == 1 else torch.cat(gradients, 1)
    gradient = gradient.mul_(-4)
    return total, gradient if parts == 1 else F.pad(gradient, (0, 0, start, n - stop))


def _strength(potential: Potential) -> tuple[float, float]:
    """What slopes are multiplied with to fit fp16, and the squared chord below which they still do not."""
    if isinstance(potential, Gaussian):
        return 1 / potential.t, NEAR
    assert isinstance(potential, Riesz)
    reference = abs(float(potential.slope(torch.tensor(2.0, dtype=torch.float64))))
    near = 2 * HALF_RANGE ** (-1 / (potential.s / 2 + 1))
    return 1 / reference, max(NEAR, near)


def _many(
    units: Tensor,
    valid: Tensor,
    gaps: Tensor | None,
    potential: Potential,
    half_space: bool,
    grad: bool,
    part: int,
    parts: int,
) -> tuple[Tensor, Tensor]:
    n, dim = units.shape
    kind, shape, *constants = _constants(potential)
    strength, near = _strength(potential)
    units, valid, gaps = units.contiguous(), valid.contiguous(), None if gaps is None else gaps.contiguous()
    width = triton.cdiv(dim, DEPTH) * DEPTH
    # Zero rows and columns fill up the last tiles, so that no load needs a mask.
    half = torch.zeros(triton.cdiv(n, TILE) * TILE, width, dtype=torch.float16, device=units.device)
    half[:n, :dim] = units
    # Of several parts each has 2 parts + 1 panels.
    panel = min(PANEL, triton.cdiv(n, TILE * (1 if parts == 1 else 2 * parts)) * TILE)
    slopes = torch.empty(panel * panel if grad else 0, dtype=torch.float16, device=units.device)
    gradient = torch.zeros_like(units) if grad else units.new_empty(0)
    sums = []
    for i, j in corners(n, panel, part, parts):
        rows = min(panel, n - i)
        columns = min(panel, n - j)
        stride = triton.cdiv(columns, 8) * 8  # rows of whole 16 bytes, which fast products need
        programs = triton.cdiv(rows, TILE) * triton.cdiv(stride, TILE)
        partial = units.new_empty(programs)
        _many_kernel[(programs,)](
            half,
            units,
            valid,
            valid if gaps is None else gaps,
            slopes,
            gradient,
            partial,
            n,
            dim,
            i,
            j,
            rows,
            stride,
            near,
            *constants,
            strength,
            KIND=kind,
            SHAPE=shape,
            HALF=half_space,
            BOTH=half_space or shape == 1,
            PADDED=gaps is not None,
            GRAD=grad,
            WIDTH=width,
            TILE=TILE,
            DEPTH=DEPTH,
            GROUP=8,
            num_warps=8,
            num_stages=3,
        )
        sums.append(partial.sum(dtype=torch.float64) * (1 if i == j else 2))
        if grad:
            tile = slopes[: rows * stride].view(rows, stride)
            gradient[i : i + rows] += torch.mm(tile, half[j : j + stride], out_dtype=torch.float32)[:, :dim]
            if i != j:
                back = torch.mm(tile.mT, half[i : i + rows], out_dtype=torch.float32)
                gradient[j : j + columns] += back[:columns, :dim]
    total = torch.stack(sums).sum() if sums else units.new_zeros((), dtype=torch.float64)
    return total, gradient.mul_(-4 / strength) if grad else gradient
