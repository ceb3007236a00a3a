r"""What a head needs to know of all its classes, without ever holding a batch x classes matrix.

The logit of sample i for a class j that is not its own is

.. math:: z_{ij} = \text{scale}_i\,(\eta(c_{ij}) + \text{offset}) + b_j, \quad c_{ij} = \max_k \hat x_i \cdot w'_{jk}

with :math:`w'` the directions of the class weights (or the weights themselves), and a head needs of them one number a
sample: their log-sum-exp or a sum. :func:`class_statistics` gives it, together with the sample's own cosine, in one of
two ways: ``"dense"``, plain autograd over the ``(B, C)`` matrix, and ``"chunked"``, exact, over some classes at a time,
with the logits computed anew in the backward pass. The own class is left out inside its chunk, never subtracted from
the finished sum: the sum of a well classified sample would vanish in the rounding of its own class.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hypersphere.geometry import normalise
from hypersphere.losses.negatives import Negatives, Plain, lookup

CHUNK_ELEMENTS = 2**23
"""Logits of a chunk: 32 MiB in float32, about what the last cache of a large GPU holds."""


class Statistics(NamedTuple):
    """Of each sample, over the classes."""

    negatives: Tensor
    """``(B,)`` log-sum-exp of the non-target logits, or the sum of their terms."""
    total: Tensor
    """``(B,)`` sum of the non-target logits; empty unless asked for."""
    own: Tensor
    """``(B,)`` product with the own class, a cosine where the weights are unit vectors."""
    length: Tensor
    """``(B,)`` norm of the own class' weight; empty for unit weights and several centres."""


def class_statistics(
    units: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor,
    rule: Negatives,
    parameters: Sequence[Tensor] = (),
    *,
    offset: Tensor | None = None,
    bias: Tensor | None = None,
    centres: int = 1,
    unit: bool = True,
    total: bool = False,
    chunked: bool = False,
    low_precision: bool = False,
) -> Statistics:
    """Reduce every sample's non-target logits to the numbers that a loss needs.

    Args:
        units: Directions of the features, ``(B, D)``, in float32 or wider.
        weight: Class weights, ``(C * centres, D)``.
        labels: Own classes, ``(B,)`` in [0, C).
        scale: ``(B,)``.
        rule: What the non-target logits are and how they are reduced.
        parameters: The rule's own parameters, scalars or ``(B, 1)``; they get no gradient.
        offset: Scalar added to every value.
        bias: ``(C,)`` added to the logits.
        centres: Weight vectors of each class; the closest counts.
        unit: Use the directions of the weights.
        total: Sum the logits, too.
        chunked: Never hold ``(B, C)`` values at once.
        low_precision: 16-bit products with 32-bit sums, on a GPU.

    Example:
        >>> from hypersphere.losses.negatives import Plain
        >>> one = torch.ones(2)
        >>> class_statistics(torch.eye(2), torch.eye(2), torch.tensor([0, 1]), 5 * one, Plain()).negatives
        tensor([0., 0.])
    """
    if not chunked:
        low = low_precision and units.is_cuda
        return _dense(units, weight, labels, scale, rule, parameters, offset, bias, centres, unit, total, low)
    found = _statistics(
        units,
        weight,
        labels,
        scale,
        offset,
        bias,
        list(parameters),
        rule.key,
        centres,
        unit,
        total,
        low_precision and units.is_cuda,
        torch.is_grad_enabled() and (units.requires_grad or weight.requires_grad),
    )
    return Statistics(*found[:4])


def _dense(
    units: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor,
    rule: Negatives,
    parameters: Sequence[Tensor],
    offset: Tensor | None,
    bias: Tensor | None,
    centres: int,
    unit: bool,
    total: bool,
    low: bool,
) -> Statistics:
    """The same by autograd over the whole matrix."""
    cosines = class_cosines(units, weight, centres, unit, low)
    logits = scaled(rule.value(cosines, *parameters), scale, offset, bias)
    is_own = torch.arange(cosines.shape[1], device=labels.device) == labels.unsqueeze(1)
    if rule.softmax:
        negatives = logits.masked_fill(is_own, float("-inf")).logsumexp(1)
    else:
        negatives = rule.term(logits).masked_fill(is_own, 0.0).sum(1)
    if torch.compiler.is_compiling():  # a sum is part of the pass over the logits, a gather one of its own
        own = cosines.masked_fill(~is_own, 0.0).sum(1)
    else:
        own = cosines.gather(1, labels.unsqueeze(1)).squeeze(1)
    if low:  # the margin works on the own cosine, which deserves all its digits
        own = own + (own_products(units, weight, labels, centres, unit) - own).detach()
    return Statistics(
        negatives,
        logits.masked_fill(is_own, 0.0).sum(1) if total else logits.new_empty(0),
        own,
        units.new_empty(0) if unit or centres > 1 else torch.linalg.vector_norm(weight.to(units.dtype), dim=1)[labels],
    )


class _LowProduct(torch.autograd.Function):
    """``a @ b.T`` of fp16 copies (unit vectors fit it), with bf16 copies in the backward pass (gradients do not)."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a.half(), b.half().mT).to(a.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        a, b = ctx.saved_tensors
        grad = grads[0].bfloat16()
        by_b = torch.mm(grad.mT, a.bfloat16()).to(b.dtype) if ctx.needs_input_grad[1] else None  # None: fixed classes
        return torch.mm(grad, b.bfloat16()).to(a.dtype), by_b


def class_cosines(units: Tensor, weight: Tensor, centres: int = 1, unit: bool = True, low: bool = False) -> Tensor:
    """Products of ``(B, D)`` directions with every class, the closest centre of each: ``(B, C)``."""
    prepared = weight.to(units.dtype)
    rows = normalise(prepared) if unit else prepared
    products = _LowProduct.apply(units, rows) if low else units @ rows.mT
    if unit:  # rounding beyond +-1 is removed without cutting the gradient
        products = products + (products.clamp(-1, 1) - products).detach()
    return products if centres == 1 else products.unflatten(1, (-1, centres)).max(2).values


def own_products(units: Tensor, weight: Tensor, labels: Tensor, centres: int = 1, unit: bool = True) -> Tensor:
    """Products of ``(B, D)`` directions with their own classes, the closest centre of each, no gradient: ``(B,)``."""
    rows = weight.detach().unflatten(0, (-1, centres))[labels].to(units.dtype)
    products = ((normalise(rows) if unit else rows) * units.detach().unsqueeze(1)).sum(2).amax(1)
    return products.clamp(-1, 1) if unit else products


def scaled(values: Tensor, scale: Tensor, offset: Tensor | None, bias: Tensor | None) -> Tensor:
    """Logits ``(B, C)`` of values ``(B, C)``."""
    logits = (values if offset is None else values + offset) * scale.unsqueeze(1)
    return logits if bias is None else logits + bias


# ------------------------------------------------------------------------------------------------ chunked, exact


class _Chunk(NamedTuple):
    """Some classes, prepared for the products."""

    start: int
    stop: int
    weight: Tensor
    inverse: Tensor | None  # 1 / norm of each row, of unit weights only


def _chunks(weight: Tensor, batch: int, centres: int, unit: bool, dtype: torch.dtype) -> Any:
    """The classes in order, a bounded number at a time."""
    classes = weight.shape[0] // centres
    # A chunk of weights is copied, too: of a small batch it would be larger than the logits.
    size = max(CHUNK_ELEMENTS // (max(batch, weight.shape[1]) * centres), 256)
    for start in range(0, classes, size):
        stop = min(start + size, classes)
        rows = weight[start * centres : stop * centres].to(dtype)
        if not unit:
            yield _Chunk(start, stop, rows, None)
            continue
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        inverse = torch.where(norms > math.sqrt(torch.finfo(dtype).tiny), 1 / norms, 0.0)  # as normalise does
        yield _Chunk(start, stop, rows * inverse, inverse)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``a @ b``; with ``dtype`` of 16-bit operands, summed and returned in 32 bit."""
    if dtype is None:
        return a @ b
    return torch.mm(a.to(dtype), b.to(dtype), out_dtype=torch.float32)


def _place(labels: Tensor, chunk: _Chunk) -> tuple[Tensor, Tensor]:
    """Column of each sample's class in a chunk ``(B, 1)``, and whether the class is in it at all ``(B, 1)``."""
    column = (labels - chunk.start).unsqueeze(1)
    inside = (column >= 0) & (column < chunk.stop - chunk.start)
    return column.clamp(0, chunk.stop - chunk.start - 1), inside


def _put(matrix: Tensor, place: tuple[Tensor, Tensor], value: Tensor | float) -> Tensor:
    """Set the own class' entries of a chunk in place."""
    column, inside = place
    return matrix.scatter_(1, column, torch.where(inside, value, matrix.gather(1, column)))


def _fused(
    units: Tensor, rule: Negatives, offset: Tensor | None, bias: Tensor | None, centres: int, total: bool
) -> Any:
    """The module of fused kernels where they can serve, else ``None``."""
    plain = type(rule) is Plain and offset is None and bias is None and centres == 1 and not total
    if not plain or importlib.util.find_spec("triton") is None:
        return None
    from hypersphere.losses import fused  # noqa: PLC0415 (needs triton, which comes with torch for CUDA only)

    return fused if fused.supported(units) else None


@torch.library.custom_op("hypersphere::class_statistics", mutates_args=())
def _statistics(
    units: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    bias: Tensor | None,
    parameters: Sequence[Tensor],
    rule_key: str,
    centres: int,
    unit: bool,
    total: bool,
    low: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    rule = lookup(rule_key)
    own = own_products(units, weight, labels, centres, unit)
    if unit or centres > 1:
        length = own.new_empty(0)
    else:
        length = torch.linalg.vector_norm(weight[labels].to(units.dtype), dim=1)
    half, inverse = units.new_empty(0, dtype=torch.float16), units.new_empty(0)
    if low and (fused := _fused(units, rule, offset, bias, centres, total)):
        result, half, inverse = fused.log_sum_exp(units, weight, labels, scale, unit, keep)
        return result, own.new_empty(0), own, length, half, inverse
    low_type = torch.float16 if low else None
    result = units.new_full((len(units),), float("-inf") if rule.softmax else 0.0)
    totals = torch.zeros_like(result) if total else result.new_empty(0)
    for chunk in _chunks(weight, len(units), centres, unit, units.dtype):
        cosines = _product(units, chunk.weight.mT, low_type)
        if centres > 1:
            cosines = cosines.unflatten(1, (-1, centres)).amax(2)
        logits = _logits(cosines, rule, parameters, scale, offset, bias, chunk)
        place = _place(labels, chunk)
        if total:
            totals += _put(logits.clone(), place, 0.0).sum(1)
        if rule.softmax:
            torch.logaddexp(result, _put(logits, place, float("-inf")).logsumexp(1), out=result)
        else:
            result += _put(rule.term(logits), place, 0.0).sum(1)
    return result, totals, own, length, half, inverse


def _logits(
    cosines: Tensor,
    rule: Negatives,
    parameters: Sequence[Tensor],
    scale: Tensor,
    offset: Tensor | None,
    bias: Tensor | None,
    chunk: _Chunk,
) -> Tensor:
    """Logits of a chunk; the memory of plain cosines is used again."""
    part = None if bias is None else bias[chunk.start : chunk.stop]
    if rule.plain and offset is None:
        logits = cosines.mul_(scale.unsqueeze(1))
        return logits if part is None else logits.add_(part)
    return scaled(rule.value(cosines, *parameters), scale, offset, part)


@_statistics.register_fake
def _(
    units: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    bias: Tensor | None,
    parameters: Sequence[Tensor],
    rule_key: str,
    centres: int,
    unit: bool,
    total: bool,
    low: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    per_sample = units.new_empty(len(units))
    empty = units.new_empty(0)
    return (
        per_sample,
        torch.empty_like(per_sample) if total else empty,
        torch.empty_like(per_sample),
        torch.empty_like(empty) if unit or centres > 1 else torch.empty_like(per_sample),
        *_kept_shapes(units, weight, lookup(rule_key), offset, bias, centres, unit, total, low, keep),
    )


def _kept_shapes(
    units: Tensor,
    weight: Tensor,
    rule: Negatives,
    offset: Tensor | None,
    bias: Tensor | None,
    centres: int,
    unit: bool,
    total: bool,
    low: bool,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """What the forward pass keeps for the backward pass, as far as its shapes."""
    kept = low and keep and _fused(units, rule, offset, bias, centres, total) is not None
    return (
        weight.new_empty(weight.shape if kept else 0, dtype=torch.float16),
        units.new_empty(len(weight) if kept and unit else 0),
    )


@torch.library.custom_op("hypersphere::class_gradients", mutates_args=())
def _gradients(
    grad_result: Tensor,
    grad_total: Tensor | None,
    grad_own: Tensor,
    grad_length: Tensor | None,
    result: Tensor,
    own: Tensor,
    half: Tensor,
    inverse: Tensor,
    units: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    bias: Tensor | None,
    parameters: Sequence[Tensor],
    rule_key: str,
    centres: int,
    unit: bool,
    low: bool,
    weight_too: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients by units, weight, scale, offset and bias (empty where there is nothing to differentiate by)."""
    if half.numel():
        by_units, by_weight, by_scale = _fused_gradients(
            grad_result,
            grad_own,
            grad_length,
            result,
            own,
            half,
            inverse,
            units,
            weight,
            labels,
            scale,
            unit,
            weight_too,
        )
        return by_units, by_weight, by_scale, units.new_empty(0), units.new_empty(0)
    rule = lookup(rule_key)
    by_units = torch.zeros_like(units)
    by_weight = torch.empty_like(weight) if weight_too else units.new_empty(0)
    by_scale = torch.zeros_like(scale)
    by_offset = units.new_empty(0) if offset is None else torch.zeros_like(offset)
    by_bias = units.new_empty(0) if bias is None else torch.empty_like(bias)
    forward_type, backward_type = (torch.float16, torch.bfloat16) if low else (None, None)
    for chunk in _chunks(weight, len(units), centres, unit, units.dtype):
        products = _product(units, chunk.weight.mT, forward_type)
        cosines, closest = products.unflatten(1, (-1, centres)).max(2) if centres > 1 else (products, None)
        values = rule.value(cosines, *parameters)
        place = _place(labels, chunk)
        logits = scaled(values, scale, offset, None if bias is None else bias[chunk.start : chunk.stop])
        by_logits = _put(_by_logits(rule, logits, result, grad_result, grad_total), place, 0.0)
        if bias is not None:
            by_bias[chunk.start : chunk.stop] = by_logits.sum(0)
        by_scale += torch.linalg.vecdot(by_logits, values if offset is None else values + offset)
        by_cosines = by_logits.mul_(scale.unsqueeze(1))
        if offset is not None:
            by_offset += by_cosines.sum()
        if not rule.plain:
            by_cosines.mul_(rule.slope(cosines, *parameters))
        _put(by_cosines, place, grad_own.unsqueeze(1))
        if closest is not None:
            spread = by_cosines.new_zeros(*by_cosines.shape, centres)
            by_cosines = spread.scatter_(2, closest.unsqueeze(2), by_cosines.unsqueeze(2)).flatten(1)
        by_units += _product(by_cosines, chunk.weight, backward_type)
        if weight_too:
            by_rows = _product(by_cosines.mT, units, backward_type)
            by_weight[chunk.start * centres : chunk.stop * centres] = _tangent(by_rows, chunk)
    if weight_too and grad_length is not None:
        _add_length(by_weight, weight, labels, grad_length)
    return by_units, by_weight, by_scale, by_offset, by_bias


def _fused_gradients(
    grad_result: Tensor,
    grad_own: Tensor,
    grad_length: Tensor | None,
    result: Tensor,
    own: Tensor,
    half: Tensor,
    inverse: Tensor,
    units: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor,
    unit: bool,
    weight_too: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by units, weight and scale from the kernels, with the own classes, which these leave out."""
    from hypersphere.losses import fused  # noqa: PLC0415 (needs triton, which comes with torch for CUDA only)

    by_weight = torch.empty_like(weight, dtype=torch.float32) if weight_too else None
    by_units, by_scale = fused.gradients(grad_result, result, units, half, inverse, labels, scale, unit, by_weight)
    rows = weight[labels].to(units.dtype)
    aim = normalise(rows) if unit else rows
    by_units += grad_own.unsqueeze(1) * aim
    if by_weight is None:
        return by_units, units.new_empty(0), by_scale
    tangent = (units - own.unsqueeze(1) * aim) * inverse[labels].unsqueeze(1) if unit else units
    by_weight.index_add_(0, labels, grad_own.unsqueeze(1) * tangent)
    if grad_length is not None:
        _add_length(by_weight, weight, labels, grad_length)
    return by_units, by_weight.to(weight.dtype), by_scale


def _tangent(by_rows: Tensor, chunk: _Chunk) -> Tensor:
    """Gradient of the weights from that of their directions; the memory is used again."""
    if chunk.inverse is None:
        return by_rows
    along = torch.linalg.vecdot(by_rows, chunk.weight).unsqueeze(1)
    return by_rows.addcmul_(chunk.weight, along, value=-1).mul_(chunk.inverse)


def _by_logits(
    rule: Negatives, logits: Tensor, result: Tensor, grad_result: Tensor, grad_total: Tensor | None
) -> Tensor:
    """Gradient of the reductions by every logit; the memory of the logits may be used again."""
    if rule.softmax:
        gradient = logits.sub_(result.unsqueeze(1)).exp_().mul_(grad_result.unsqueeze(1))
    else:
        gradient = rule.term_slope(logits).mul_(grad_result.unsqueeze(1))
    return gradient if grad_total is None else gradient.add_(grad_total.unsqueeze(1))


def _add_length(by_weight: Tensor, weight: Tensor, labels: Tensor, grad_length: Tensor) -> None:
    """Add the gradient through the norms of the samples' own class weights."""
    rows = normalise(weight[labels].to(grad_length.dtype)) * grad_length.unsqueeze(1)
    by_weight.index_add_(0, labels, rows.to(by_weight.dtype))


@_gradients.register_fake
def _(
    grad_result: Tensor,
    grad_total: Tensor | None,
    grad_own: Tensor,
    grad_length: Tensor | None,
    result: Tensor,
    own: Tensor,
    half: Tensor,
    inverse: Tensor,
    units: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    bias: Tensor | None,
    parameters: Sequence[Tensor],
    rule_key: str,
    centres: int,
    unit: bool,
    low: bool,
    weight_too: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    empty = units.new_empty(0)
    return (
        torch.empty_like(units),
        torch.empty_like(weight) if weight_too else empty,
        torch.empty_like(scale),
        torch.empty_like(empty) if offset is None else torch.empty_like(offset),
        torch.empty_like(empty) if bias is None else torch.empty_like(bias),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    units, weight, labels, scale, offset, bias, parameters, *settings = inputs
    result, _, own, _, half, inverse = output
    ctx.mark_non_differentiable(half, inverse)
    ctx.set_materialize_grads(False)  # a zero gradient of what is kept would be as large as the weights
    ctx.save_for_backward(result, own, half, inverse, units, weight, labels, scale, offset, bias, *parameters)
    ctx.settings = settings


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | list[None] | None, ...]:
    result, own, half, inverse, units, weight, labels, scale, offset, bias, *parameters = ctx.saved_tensors
    rule_key, centres, unit, total, low, _ = ctx.settings
    grad_result, grad_total, grad_own, grad_length = grads[:4]
    by_units, by_weight, by_scale, by_offset, by_bias = _gradients(
        torch.zeros_like(result) if grad_result is None else grad_result.contiguous(),
        grad_total if total else None,
        torch.zeros_like(own) if grad_own is None else grad_own.contiguous(),
        None if unit or centres > 1 else grad_length,
        result,
        own,
        half,
        inverse,
        units,
        weight,
        labels,
        scale,
        offset,
        bias,
        parameters,
        rule_key,
        centres,
        unit,
        low,
        ctx.needs_input_grad[1],
    )
    return (
        by_units,
        by_weight if ctx.needs_input_grad[1] else None,
        None,
        by_scale,
        None if offset is None else by_offset,
        None if bias is None else by_bias,
        [None] * len(parameters),
        *([None] * len(ctx.settings)),
    )


_statistics.register_autograd(_backward, setup_context=_setup)
