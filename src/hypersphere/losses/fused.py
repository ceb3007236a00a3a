"""The chunked statistics of :mod:`streaming` for plain cosines on Hopper GPUs and later, as Triton kernels.

The product with the class weights and what is made of its logits are one kernel each way: a logit never leaves the
chip. Operands are fp16 (unit vectors cannot overflow, and it is eight times as accurate as bf16 there), sums fp32.
The torch code in :mod:`streaming` computes the same and is what these kernels are tested against.

Probabilities are kept as fp16 times ``2**12``, so that those down to 1e-11 count, and without the own classes, whose
few rows are added in fp32 afterwards.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hypersphere.losses.memory import FUSED_ELEMENTS

TILE = 128
DEPTH = 64
WARPS = 4
STAGES = 3
WAVES = 2
"""Programs of the forward pass on each multiprocessor, which take tiles in turns: the sums of one tile overlap with the
product of the next. The backward kernels, which write what they compute, are faster with one program a tile."""
FORWARD_CLASSES = 2**20
BACKWARD_ELEMENTS = FUSED_ELEMENTS  # 512 MiB in fp16; with fewer the GPU would wait for the host
SHIFT = 12
LOG2E = tl.constexpr(1.4426950408889634)
SHIFT_ = tl.constexpr(float(SHIFT))
TINY = tl.constexpr(math.sqrt(torch.finfo(torch.float32).tiny))


@triton.jit
def _prepare_kernel(
    weight, half, inverse, classes, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr
):
    """fp16 copies of the weights, as unit vectors with their inverse norms where UNIT."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < classes)[:, None] & (column < DIM)[None, :]
    place = row[:, None].to(tl.int64) * DIM + column[None, :]
    values = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    if UNIT:
        largest = tl.max(tl.abs(values), 1)  # squares of tiny or huge values would leave the range
        safe = tl.where(largest > 0, largest, 1.0)
        values = values / safe[:, None]
        length = tl.sqrt(tl.sum(values * values, 1))
        direction = length * safe > TINY  # as normalise does
        values = values * tl.where(direction, 1 / length, 0.0)[:, None]
        tl.store(inverse + row, tl.where(direction, 1 / (length * safe), 0.0), mask=row < classes)
    tl.store(half + place, values.to(tl.float16), mask=inside)


@triton.jit
def _log_sum_exp_kernel(
    x,
    w,
    scale,
    label,
    largest,
    total,
    samples,
    classes,
    first,
    tiles,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Largest logit (in base 2) and sum of exponentials of each sample in each tile of classes but its own class."""
    sample_tiles = tl.cdiv(samples, TILE)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        sample_tile = tile % sample_tiles
        class_tile = tile // sample_tiles
        i = sample_tile * TILE + tl.arange(0, TILE)
        j = class_tile * TILE + tl.arange(0, TILE)
        cosines = tl.zeros((TILE, TILE), tl.float32)
        for d in range(0, DIM, DEPTH):
            cosines = tl.dot(x.load([sample_tile * TILE, d]), w.load([class_tile * TILE, d]).T, cosines)
        factor = tl.load(scale + i, mask=i < samples, other=0.0) * LOG2E
        own = tl.load(label + i, mask=i < samples, other=-1) - first
        logits = cosines * factor[:, None]
        logits = tl.where((j[None, :] == own[:, None]) | (j[None, :] >= classes), float("-inf"), logits)
        top = tl.max(logits, 1)
        safe = tl.where(top == float("-inf"), 0.0, top)
        place = class_tile * samples + i
        tl.store(largest + place, top, mask=i < samples)
        tl.store(total + place, tl.sum(tl.exp2(logits - safe[:, None]), 1), mask=i < samples)


@triton.jit
def _probability_kernel(
    x,
    w,
    out,
    scale,
    label,
    result,
    share,
    along,
    samples,
    classes,
    first,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Probabilities ``(classes, samples)`` in fp16, and of each class the part of its gradient along itself."""
    sample_tiles = tl.cdiv(samples, TILE)
    tile = tl.program_id(0)
    sample_tile = tile % sample_tiles
    class_tile = tile // sample_tiles
    i = sample_tile * TILE + tl.arange(0, TILE)
    j = class_tile * TILE + tl.arange(0, TILE)
    cosines = tl.zeros((TILE, TILE), tl.float32)
    for d in range(0, DIM, DEPTH):
        cosines = tl.dot(w.load([class_tile * TILE, d]), x.load([sample_tile * TILE, d]).T, cosines)
    factor = tl.load(scale + i, mask=i < samples, other=0.0) * LOG2E
    own = tl.load(label + i, mask=i < samples, other=-1) - first
    shift = tl.load(result + i, mask=i < samples, other=0.0) * LOG2E - SHIFT_
    probability = tl.exp2(cosines * factor[None, :] - shift[None, :])
    probability = tl.where((j[:, None] == own[None, :]) | (i >= samples)[None, :], 0.0, probability)
    out.store([class_tile * TILE, sample_tile * TILE], probability.to(tl.float16))
    if UNIT:
        weight = tl.load(share + i, mask=i < samples, other=0.0)
        sums = tl.sum(probability * cosines * weight[None, :], 1)
        tl.store(along + sample_tile * classes + j, sums, mask=j < classes)


@triton.jit
def _weight_gradient_kernel(
    probability,
    x,
    w,
    out,
    along,
    inverse,
    factor,
    samples,
    classes,
    DIM: tl.constexpr,
    SAMPLE_TILES: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Gradient of the weights: the product with the samples, less its part along the weight, over the weight's norm."""
    column_tiles = tl.cdiv(DIM, TILE)
    tile = tl.program_id(0)
    column_tile = tile % column_tiles
    class_tile = tile // column_tiles
    j = class_tile * TILE + tl.arange(0, TILE)
    gradient = tl.zeros((TILE, TILE), tl.float32)
    for i in range(0, samples, DEPTH):
        gradient = tl.dot(probability.load([class_tile * TILE, i]), x.load([i, column_tile * TILE]), gradient)
    scale = tl.load(factor)
    if UNIT:
        sums = tl.zeros((TILE,), tl.float32)
        for part in tl.static_range(SAMPLE_TILES):
            sums += tl.load(along + part * classes + j, mask=j < classes, other=0.0)
        unit = w.load([class_tile * TILE, column_tile * TILE]).to(tl.float32)
        norms = tl.load(inverse + j, mask=j < classes, other=0.0)
        gradient = (gradient - sums[:, None] * unit) * (norms * scale)[:, None]
    else:
        gradient = gradient * scale
    out.store([class_tile * TILE, column_tile * TILE], gradient)


def supported(units: Tensor) -> bool:
    """Whether the kernels can serve: they need the tensor memory accelerator and rows of whole 16 bytes."""
    return torch.cuda.get_device_capability(units.device)[0] >= 9 and units.shape[1] % 8 == 0 and len(units) > 0


def _programs(device: torch.device) -> int:
    return WAVES * torch.cuda.get_device_properties(device).multi_processor_count


def _prepare(weight: Tensor, unit: bool) -> tuple[Tensor, Tensor]:
    classes, dim = weight.shape
    half = torch.empty(classes, dim, device=weight.device, dtype=torch.float16)
    inverse = torch.empty(classes if unit else 0, device=weight.device)
    rows = 4
    _prepare_kernel[(triton.cdiv(classes, rows),)](
        weight.contiguous(),
        half,
        inverse,
        classes,
        DIM=dim,
        WIDTH=triton.next_power_of_2(dim),
        ROWS=rows,
        UNIT=unit,
        num_warps=WARPS,
    )
    return half, inverse


def log_sum_exp(
    units: Tensor, weight: Tensor, labels: Tensor, scale: Tensor, unit: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exp of the non-target logits ``(B,)``, and the prepared weights for the backward pass.

    Args:
        units: Directions of the features, ``(B, D)`` in float32.
        weight: Class weights, ``(C, D)``.
        labels: Own classes, ``(B,)``.
        scale: ``(B,)``.
        unit: Use the directions of the weights.
        keep: Keep the prepared weights; otherwise they are made and dropped, some classes at a time.

    Returns:
        The log-sum-exp, and weights ``(C, D)`` in fp16 with inverse norms ``(C,)`` (empty unless kept).
    """
    samples, dim = units.shape
    scale, labels = scale.contiguous(), labels.contiguous()  # one number for all samples may be a view of it
    x = TensorDescriptor.from_tensor(units.to(torch.float16).contiguous(), [TILE, DEPTH])
    prepared = _prepare(weight, unit) if keep else None
    found = []
    for start in range(0, len(weight), FORWARD_CLASSES):
        stop = min(start + FORWARD_CLASSES, len(weight))
        half = prepared[0][start:stop] if prepared else _prepare(weight[start:stop], unit)[0]
        class_tiles = triton.cdiv(stop - start, TILE)
        largest = units.new_empty(class_tiles, samples)
        total = torch.empty_like(largest)
        tiles = class_tiles * triton.cdiv(samples, TILE)
        programs = min(_programs(units.device), tiles)
        _log_sum_exp_kernel[(programs,)](
            x,
            TensorDescriptor.from_tensor(half, [TILE, DEPTH]),
            scale,
            labels,
            largest,
            total,
            samples,
            stop - start,
            start,
            tiles,
            DIM=dim,
            TILE=TILE,
            DEPTH=DEPTH,
            PROGRAMS=programs,
            num_warps=WARPS,
            num_stages=STAGES,
        )
        found.append(total.log_().add_(largest, alpha=math.log(2)).logsumexp(0))
    result = found[0] if len(found) == 1 else torch.stack(found).logsumexp(0)
    half, inverse = prepared or (units.new_empty(0, dtype=torch.float16), units.new_empty(0))
    return result, half, inverse


def gradients(
    grad_result: Tensor,
    result: Tensor,
    units: Tensor,
    half: Tensor,
    inverse: Tensor,
    labels: Tensor,
    scale: Tensor,
    unit: bool,
    by_weight: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`log_sum_exp` by the units and the scale; that by the weights is written to ``by_weight``.

    Args:
        grad_result: ``(B,)``.
        result: What the forward pass gave, ``(B,)``.
        units: ``(B, D)`` in float32.
        half: Prepared weights ``(C, D)``.
        inverse: Their inverse norms ``(C,)``.
        labels: ``(B,)``.
        scale: ``(B,)``.
        unit: Whether the directions of the weights were used.
        by_weight: ``(C, D)`` in float32, or ``None`` where it is not wanted.
    """
    samples, dim = units.shape
    scale, labels, result = scale.contiguous(), labels.contiguous(), result.contiguous()
    share = grad_result * scale
    # Gradients scaled by a loss scaler or a mean over many samples must fit fp16: only their ratios are put in it.
    most = share.abs().amax()
    ratio = share / torch.where(most > 0, most, 1.0)
    factor = (most * 2.0**-SHIFT).reshape(1)
    x = TensorDescriptor.from_tensor(units.to(torch.float16).contiguous(), [TILE, DEPTH])
    scaled = (units * ratio.unsqueeze(1)).to(torch.float16).contiguous()
    scaled_tiles = TensorDescriptor.from_tensor(scaled, [DEPTH, TILE])
    sample_tiles = triton.cdiv(samples, TILE)
    width = triton.cdiv(samples, 8) * 8  # rows of whole 16 bytes
    size = max(BACKWARD_ELEMENTS // width // TILE, 1) * TILE
    probability = torch.empty(min(size, len(half)), width, device=units.device, dtype=torch.float16)
    along = units.new_empty(sample_tiles * len(probability))
    by_units = torch.zeros_like(units)
    settings: dict[str, Any] = {"TILE": TILE, "DEPTH": DEPTH, "num_warps": WARPS, "num_stages": STAGES}
    for start in range(0, len(half), size):
        part = half[start : start + size]
        classes = len(part)
        class_tiles = triton.cdiv(classes, TILE)
        here = probability[:classes]
        _probability_kernel[(class_tiles * sample_tiles,)](
            x,
            TensorDescriptor.from_tensor(part, [TILE, DEPTH]),
            TensorDescriptor(here, [classes, samples], [width, 1], [TILE, TILE]),
            scale,
            labels,
            result,
            ratio,
            along,
            samples,
            classes,
            start,
            DIM=dim,
            UNIT=unit,
            **settings,
        )
        by_units += torch.mm(here[:, :samples].T, part, out_dtype=torch.float32)
        if by_weight is None:
            continue
        _weight_gradient_kernel[(class_tiles * triton.cdiv(dim, TILE),)](
            TensorDescriptor(here, [classes, samples], [width, 1], [TILE, DEPTH]),
            scaled_tiles,
            TensorDescriptor.from_tensor(part, [TILE, TILE]),
            TensorDescriptor.from_tensor(by_weight[start : start + size], [TILE, TILE]),
            along,
            inverse[start : start + size] if unit else inverse,
            factor,
            samples,
            classes,
            DIM=dim,
            SAMPLE_TILES=sample_tiles,
            UNIT=unit,
            **settings,
        )
    by_units *= 2.0**-SHIFT
    by_scale = (by_units * units).sum(1) * grad_result
    return by_units * share.unsqueeze(1), by_scale
