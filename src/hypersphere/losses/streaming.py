r"""What a head needs to know of all its classes, without ever holding a batch x classes matrix.

The logit of sample i for a class j that is not its target is

.. math:: z_{ij} = \text{scale}_i\,(\eta(c_{ij}) + \text{offset}) + b_j, \quad c_{ij} = \max_k \hat x_i \cdot w'_{jk}

with :math:`w'` the directions of the class weights (or the weights themselves), and a head needs of them one number a
sample: their log-sum-exp or a sum. A :class:`ClassProblem` says what is asked, and :func:`class_statistics` answers it,
together with the sample's target cosine, in one of two ways: ``"dense"``, plain autograd over the ``(B, C)`` matrix,
and ``"chunked"``, exact, over some classes at a time, with the logits computed anew in the backward pass. The target is
left out inside its chunk, never subtracted from the finished sum: the sum of a well classified sample would vanish in
the rounding of its target.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from hypersphere.energy.chords import smooth_chords, squared_chords
from hypersphere.geometry import at_least_float32, in_float64, norm, normalise, safe_sqrt, transformed
from hypersphere.losses.negatives import Negatives, Plain, lookup

CHUNK_ELEMENTS = 2**23
"""Logits of a chunk: 32 MiB in float32, about what the last cache of a large GPU holds."""


class ClassProblem(NamedTuple):
    """What a head asks of all its classes: the one list of what dense, chunked and fused code need to know.

    The fields are also the arguments of the operations ``hypersphere::class_statistics`` and
    ``hypersphere::class_gradients``, which know tensors, numbers and texts only: :meth:`packed` and :meth:`unpacked`
    stand between.

    Example:
        >>> problem = ClassProblem(torch.eye(2), torch.eye(2), torch.tensor([0, 1]), torch.full((2,), 5.0))
        >>> class_statistics(problem).negatives
        tensor([0., 0.])
    """

    units: Tensor
    """Directions of the features, ``(B, D)``, in float32 or wider."""
    weight: Tensor
    """Class weights, ``(C * subcentres, D)``."""
    labels: Tensor
    """Targets, ``(B,)`` in [0, C), or -1 where it is none of these classes: what is found of it means nothing then."""
    scale: Tensor
    """``(B,)``."""
    rule: Negatives = Plain()
    """What the non-target logits are and how they are reduced."""
    parameters: Sequence[Tensor] = ()
    """The rule's own parameters, scalars or ``(B, 1)``; they get no gradient."""
    offset: Tensor | None = None
    """Scalar added to every value."""
    bias: Tensor | None = None
    """``(C,)`` added to the logits."""
    subcentres: int = 1
    """Weight vectors of each class; the closest counts."""
    unit: bool = True
    """Whether the directions of the weights are used."""
    total: bool = False
    """Whether the logits are summed, too."""
    class_weights: Tensor | None = None
    """``(C,)``, what the logits of each class count in that sum; all the same by default."""
    low: bool = False
    """16-bit products with 32-bit sums; on a GPU only."""
    features: Tensor | None = None
    """``(B, D)`` of any length, given where the angles to the targets are wanted."""

    def packed(self) -> tuple[Any, ...]:
        """The arguments of the operations, which know the rule by its key."""
        return (*self[:4], self.rule.key, list(self.parameters), *self[6:])

    @classmethod
    def unpacked(cls, arguments: Sequence[Any]) -> ClassProblem:
        """The problem that :meth:`packed` wrote down."""
        units, weight, labels, scale, key, *others = arguments
        return cls(units, weight, labels, scale, lookup(key), *others)

    @property
    def classes(self) -> int:
        """Number of classes C."""
        return self.weight.shape[0] // self.subcentres

    @property
    def rows(self) -> Tensor:
        """A row for each target ``(B,)``, whatever it is where the target is none of these classes."""
        return self.labels.clamp(min=0)

    @property
    def has_lengths(self) -> bool:
        """Whether the norm of the target's weight is of use: of single vectors that are no unit vectors."""
        return not self.unit and self.subcentres == 1


class Statistics(NamedTuple):
    """Of each sample, over the classes."""

    reduced: Tensor
    """``(B,)`` log-sum-exp of the non-target logits less the largest of them, or the sum of their terms."""
    total: Tensor
    """``(B,)`` sum of the non-target logits; empty unless asked for."""
    target: Tensor
    """``(B,)`` product with the target's weight, a cosine where the weights are unit vectors."""
    length: Tensor
    """``(B,)`` norm of the target's weight; empty for unit weights and several sub-centres."""
    angle: Tensor
    """``(B,)`` angle to the target, from both vectors, with all digits next to 0 and pi; empty unless asked for."""
    top: Tensor
    """``(B,)`` the largest non-target logit, no gradient; 0 where no softmax follows."""

    @property
    def negatives(self) -> Tensor:
        """``(B,)`` log-sum-exp of the non-target logits, or the sum of their terms."""
        return self.reduced + self.top


def class_statistics(problem: ClassProblem, *, chunked: bool = False) -> Statistics:
    """Reduce every sample's non-target logits to the numbers that a loss needs.

    Args:
        problem: Features, classes and what is asked of them.
        chunked: Never hold ``(B, C)`` values at once.

    Example:
        >>> units, weight = torch.eye(2), torch.tensor([[1.0, 0.0], [0.6, 0.8]])
        >>> class_statistics(ClassProblem(units, weight, torch.tensor([0, 1]), torch.ones(2)), chunked=True).target
        tensor([1.0000, 0.8000])
    """
    if problem.low and not problem.units.is_cuda:
        problem = problem._replace(low=False)
    if not problem.classes:
        return _nothing(problem)
    if not chunked or transformed():
        return _dense(problem)
    keep = torch.is_grad_enabled() and (problem.units.requires_grad or problem.weight.requires_grad)
    return Statistics(*_statistics(*problem.packed(), keep)[:6])


def _nothing(problem: ClassProblem) -> Statistics:
    """Of no classes at all, as a process may have them of a head with few; the gradients are zeros."""
    units, weight = problem.units, problem.weight
    # Each depends on what it depends on elsewhere, too: gradients are exchanged by all processes or by none.
    target = (units * 0).sum(1) + (weight * 0).sum().to(units.dtype)
    angle = None if problem.features is None else (problem.features * 0).sum(1).to(units.dtype) + (weight * 0).sum()
    nothing = target + problem.scale * 0
    for added in (problem.offset, problem.bias):
        nothing = nothing if added is None else nothing + (added * 0).sum()
    softmax, empty = problem.rule.softmax, units.new_empty(0)
    return Statistics(
        nothing + (_logarithm(torch.zeros_like(problem.scale)) if softmax else 0.0),
        nothing if problem.total else empty,
        target,
        target if problem.has_lengths else empty,
        empty if angle is None else angle.to(units.dtype),
        torch.full_like(nothing.detach(), torch.finfo(units.dtype).min if softmax else 0.0),
    )


def _dense(problem: ClassProblem) -> Statistics:
    """The same by autograd over the whole matrix."""
    units, weight, labels, rule = problem.units, problem.weight, problem.labels, problem.rule
    rows, angle = _class_rows(weight, units.dtype, problem.unit), units.new_empty(0)
    if problem.features is not None:
        own = own_rows(problem)
        if not transformed():
            given = weight.view_as(weight) if rows is weight else weight  # the compiler takes no tensor twice
            rows, angle = _TargetAngles.apply(rows, problem.features, given, own, problem.unit)
        else:
            angle = target_angles(problem.features, weight[own]).to(units.dtype)
    if rule.of_chords:
        cosines = smooth_chords(units.unsqueeze(0), rows.unsqueeze(0), own=labels)[0].squeeze(0)
    else:
        cosines = _products_with(units, rows, problem)
    logits = scaled(rule.value(cosines, *problem.parameters), problem.scale, problem.offset, problem.bias)
    is_target = torch.arange(cosines.shape[1], device=labels.device) == labels.unsqueeze(1)
    if rule.softmax:
        others = logits.masked_fill(is_target, float("-inf"))
        top = others.detach().amax(1).clamp(min=torch.finfo(logits.dtype).min)
        # Large logits are rounded: what is made of them must not be, or probabilities do not add up to 1.
        reduced = _logarithm(others.sub_(top.unsqueeze(1)).exp_().sum(1))
    else:
        reduced = rule.term(logits).masked_fill(is_target, 0.0).sum(1)
        top = torch.zeros_like(reduced.detach())
    if torch.compiler.is_compiling():  # a sum is part of the pass over the logits, a gather one of its own
        target = cosines.masked_fill(~is_target, 0.0).sum(1)
    else:
        target = cosines.gather(1, problem.rows.unsqueeze(1)).squeeze(1)
    if problem.low:  # the margin works on the target cosine, which deserves all its digits
        target = (
            target + (target_products(units, weight, problem.rows, problem.subcentres, problem.unit) - target).detach()
        )
    lengths, total = problem.has_lengths, logits.new_empty(0)
    if problem.total:
        weighted = logits if problem.class_weights is None else logits * problem.class_weights
        total = weighted.masked_fill(is_target, 0.0).sum(1)
    return Statistics(
        reduced,
        total,
        target,
        norm(weight.to(units.dtype))[problem.rows] if lengths else units.new_empty(0),
        angle,
        top,
    )


def _logarithm(sums: Tensor) -> Tensor:
    """Of sums that are 0 where there is no class but the target."""
    return sums.clamp(min=torch.finfo(sums.dtype).tiny).log()


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


def class_cosines(units: Tensor, weight: Tensor, subcentres: int = 1, unit: bool = True) -> Tensor:
    """Products of ``(B, D)`` directions with every class, the closest sub-centre of each: ``(B, C)``."""
    rows = _class_rows(weight, units.dtype, unit)
    return _products_with(units, rows, ClassProblem(units, weight, units, units, subcentres=subcentres, unit=unit))


def _class_rows(weight: Tensor, dtype: torch.dtype, unit: bool) -> Tensor:
    """Class weights as features are compared with them."""
    prepared = weight.to(dtype)
    return normalise(prepared) if unit else prepared


def _products_with(units: Tensor, rows: Tensor, problem: ClassProblem) -> Tensor:
    products = _LowProduct.apply(units, rows) if problem.low else units @ rows.mT
    if problem.unit:  # rounding beyond +-1 is removed without cutting the gradient
        products = products + (products.clamp(-1, 1) - products).detach()
    return products if problem.subcentres == 1 else products.unflatten(1, (-1, problem.subcentres)).max(2).values


def target_products(units: Tensor, weight: Tensor, labels: Tensor, subcentres: int = 1, unit: bool = True) -> Tensor:
    """Products of ``(B, D)`` directions with their targets, the closest sub-centre of each, no gradient: ``(B,)``."""
    products = _own_products(units, weight, labels, subcentres, unit).amax(1)
    return products.clamp(-1, 1) if unit else products


def _own_products(units: Tensor, weight: Tensor, labels: Tensor, subcentres: int, unit: bool) -> Tensor:
    """Products with all sub-centres of the targets, no gradient: ``(B, subcentres)``."""
    rows = weight.detach().unflatten(0, (-1, subcentres))[labels].to(units.dtype)
    return ((normalise(rows) if unit else rows) * units.detach().unsqueeze(1)).sum(2)


# ------------------------------------------------------------------------------------------------ angles to targets


def target_angles(features: Tensor, vectors: Tensor) -> Tensor:
    """Angles of features ``(B, D)`` with their targets' weights ``(B, D)``: ``(B,)``, in float64 where there is such.

    A few numbers a sample may cost what a matrix must not: in float64 they have all digits of their type next to 0
    and pi, where the arccos of a cosine has half of them, and so has the direction of their gradient.

    Example:
        >>> target_angles(torch.tensor([[1.0, 1e-5]]), torch.tensor([[2.0, 0.0]])).float()
        tensor([1.0000e-05])
    """
    u, v = _wide_direction(features)[0], _wide_direction(vectors)[0]
    difference, total = norm(u - v), norm(u + v)
    none = difference + total == 0  # two zero vectors, which meet at pi / 2
    return 2 * torch.atan2(torch.where(none, 1.0, difference), torch.where(none, 1.0, total))


def class_angles(units: Tensor, weight: Tensor, subcentres: int = 1) -> Tensor:
    """Angles of ``(B, D)`` directions with every class, the closest sub-centre of each: ``(B, C)``.

    They come from chords, which near pairs take from differences, and have the digits that directions leave.

    Example:
        >>> class_angles(torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0], [1e-5, 1.0]]))
        tensor([[1.5708e+00, 1.0000e-05]])
    """
    rows = _class_rows(weight, units.dtype, True)
    near, far = smooth_chords(units.unsqueeze(0), rows.unsqueeze(0), mirrored=True)
    assert far is not None
    near, far = near.squeeze(0), far.squeeze(0)
    if subcentres > 1:
        near = near.unflatten(1, (-1, subcentres)).min(2).values
        far = far.unflatten(1, (-1, subcentres)).max(2).values
    return 2 * torch.atan2(safe_sqrt(near), safe_sqrt(far))


def _wide_direction(x: Tensor) -> tuple[Tensor, Tensor]:
    """Directions in float64, and one by the lengths ``(B, 1)``; 0 for what is a zero vector in the type of ``x``."""
    least = torch.finfo(at_least_float32(x).dtype).tiny
    wide = in_float64(at_least_float32(x))
    length = norm(wide, keepdim=True)
    inverse = torch.where(length > least, 1 / torch.where(length > least, length, 1.0), 0.0)
    return wide * inverse, inverse


def _angle_slopes(features: Tensor, vectors: Tensor, by_angle: Tensor, unit: bool) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`target_angles` by features and by weights, or with ``unit`` by the weights' directions."""
    (u, by_length), (v, by_weight) = _wide_direction(features), _wide_direction(vectors)
    cosine = (u * v).sum(1, keepdim=True)
    sine = (norm(u - v) * norm(u + v) / 2).unsqueeze(1)
    factor = torch.where(sine > 0, -by_angle.unsqueeze(1) / torch.where(sine > 0, sine, 1.0), 0.0)
    dtype, along = by_angle.dtype, factor * (u - cosine * v)
    return (factor * (v - cosine * u) * by_length).to(dtype), (along if unit else along * by_weight).to(dtype)


def _sums_at(rows: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Rows at these places and all values ``(B, D)`` of the same place: nothing depends on an order of additions."""
    same = (places.unsqueeze(0) == places.unsqueeze(1)).to(values.dtype)
    return rows[places] + (same @ values).to(rows.dtype)


def own_rows(problem: ClassProblem) -> Tensor:
    """The row of the weights that stands for each sample's target, the closest of its sub-centres: ``(B,)``."""
    if problem.subcentres == 1:
        return problem.rows
    products = _own_products(problem.units, problem.weight, problem.rows, problem.subcentres, problem.unit)
    return problem.rows * problem.subcentres + products.argmax(1)


class _TargetAngles(torch.autograd.Function):
    """The rows of all classes as they are, and the angles to the targets.

    The angles' gradient is added to that of the rows in their product: a gradient of its own would be as large as the
    weights again.
    """

    @staticmethod
    def forward(rows: Tensor, features: Tensor, weight: Tensor, own: Tensor, unit: bool) -> tuple[Tensor, Tensor]:
        return rows.view_as(rows), target_angles(features, weight[own]).to(features.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, features, weight, own, ctx.unit = inputs
        ctx.save_for_backward(features, weight, own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, own = ctx.saved_tensors
        by_rows, by_angle = grads
        by_features, along = _angle_slopes(features, weight[own], by_angle, ctx.unit)
        if not ctx.needs_input_grad[0]:
            return None, by_features, None, None, None
        put = by_rows.index_copy if torch.is_grad_enabled() else by_rows.index_copy_
        return put(0, own, _sums_at(by_rows, own, along)), by_features, None, None, None


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


def _chunks(weight: Tensor, batch: int, subcentres: int, unit: bool, dtype: torch.dtype) -> Any:
    """The classes in order, a bounded number at a time."""
    classes = weight.shape[0] // subcentres
    # A chunk of weights is copied, too: of a small batch it would be larger than the logits.
    size = max(CHUNK_ELEMENTS // (max(batch, weight.shape[1]) * subcentres), 256)
    for start in range(0, classes, size):
        stop = min(start + size, classes)
        rows = weight[start * subcentres : stop * subcentres].to(dtype)
        if not unit:
            yield _Chunk(start, stop, rows, None)
            continue
        norms, least = norm(rows, keepdim=True), torch.finfo(dtype).tiny
        least = least if rows.device.type == "cpu" else math.sqrt(least)
        inverse = torch.where(norms > least, 1 / norms, 0.0)  # as normalise does
        yield _Chunk(start, stop, rows * inverse, inverse)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``a @ b``; with ``dtype`` of 16-bit operands, summed and returned in 32 bit."""
    if dtype is None:
        return a @ b
    return torch.mm(a.to(dtype), b.to(dtype), out_dtype=torch.float32)


def _part(values: Tensor | None, chunk: _Chunk) -> Tensor | None:
    """A chunk of numbers of all classes, where there are any."""
    return None if values is None else values[chunk.start : chunk.stop]


def _compared(problem: ClassProblem, chunk: _Chunk, low_type: torch.dtype | None) -> Tensor:
    """Products with a chunk's rows, or squared chords."""
    if not problem.rule.of_chords:
        return _product(problem.units, chunk.weight.mT, low_type)
    own, rows = problem.labels - chunk.start, chunk.weight.unsqueeze(0)
    return squared_chords(problem.units.unsqueeze(0), rows, own=own, look=True)[0].squeeze(0)


def _place(labels: Tensor, chunk: _Chunk) -> tuple[Tensor, Tensor]:
    """Column of each sample's target in a chunk ``(B, 1)``, and whether it is in it at all ``(B, 1)``."""
    column = (labels - chunk.start).unsqueeze(1)
    inside = (column >= 0) & (column < chunk.stop - chunk.start)
    return column.clamp(0, chunk.stop - chunk.start - 1), inside


def _put(matrix: Tensor, place: tuple[Tensor, Tensor], value: Tensor | float) -> Tensor:
    """Set the targets' entries of a chunk in place."""
    column, inside = place
    return matrix.scatter_(1, column, torch.where(inside, value, matrix.gather(1, column)))


def _fused(problem: ClassProblem) -> Any:
    """The module of fused kernels where they can serve, else ``None``."""
    added = problem.offset is not None or problem.bias is not None or problem.total
    plain = type(problem.rule) is Plain and problem.subcentres == 1 and not added
    if not plain or importlib.util.find_spec("triton") is None:
        return None
    from hypersphere.losses import fused  # noqa: PLC0415 (needs triton, which comes with torch for CUDA only)

    return fused if fused.supported(problem.units) else None


class _Kept(NamedTuple):
    """What the backward pass needs of the forward pass."""

    result: Tensor
    top: Tensor
    target: Tensor
    half: Tensor
    inverse: Tensor


class _Upstream(NamedTuple):
    """Gradients that arrive at the statistics."""

    result: Tensor
    total: Tensor | None
    target: Tensor
    length: Tensor | None
    angle: Tensor | None


_KINDS: dict[Any, str] = {
    **{Tensor: "Tensor", Tensor | None: "Tensor?", Sequence[Tensor]: "Tensor[]"},
    **{Negatives: "str", int: "int", bool: "bool"},
}


def _schema(kind: Any, prefix: str = "") -> str:
    """The fields of a tuple as arguments of an operation."""
    return ", ".join(f"{_KINDS[annotation]} {prefix}{name}" for name, annotation in get_type_hints(kind).items())


_PROBLEM = _schema(ClassProblem)
_TENSORS = ("units", "weight", "labels", "scale", "offset", "bias", "class_weights", "features")
_SIX, _EIGHT = (f"({', '.join(['Tensor'] * count)})" for count in (6, 8))


@torch.library.custom_op(
    "hypersphere::class_statistics",
    mutates_args=(),
    schema=f"({_PROBLEM}, bool keep) -> {_EIGHT}",
)
def _statistics(*arguments: Any) -> tuple[Tensor, ...]:
    problem, keep = ClassProblem.unpacked(arguments[:-1]), arguments[-1]
    units, weight, labels, rule = problem.units, problem.weight, problem.labels, problem.rule
    target = target_products(units, weight, problem.rows, problem.subcentres, problem.unit)
    length = target.new_empty(0)
    if problem.has_lengths:
        length = norm(weight[problem.rows].to(units.dtype))
    angle = units.new_empty(0)
    if problem.features is not None:
        angle = target_angles(problem.features, weight[own_rows(problem)]).to(units.dtype)
    half, inverse = units.new_empty(0, dtype=torch.float16), units.new_empty(0)
    if problem.low and (fused := _fused(problem)):
        result, half, inverse = fused.log_sum_exp(units, weight, labels, problem.scale, problem.unit, keep)
        return result, target.new_empty(0), target, length, angle, torch.zeros_like(result), half, inverse
    low_type = torch.float16 if problem.low else None
    result = units.new_zeros(len(units))
    top = torch.full_like(result, torch.finfo(result.dtype).min if rule.softmax else 0.0)
    totals = torch.zeros_like(result) if problem.total else result.new_empty(0)
    for chunk in _chunks(weight, len(units), problem.subcentres, problem.unit, units.dtype):
        cosines = _compared(problem, chunk, low_type)
        if problem.subcentres > 1:
            cosines = cosines.unflatten(1, (-1, problem.subcentres)).amax(2)
        logits = _logits(cosines, problem, chunk)
        place = _place(labels, chunk)
        if problem.total:
            part = _part(problem.class_weights, chunk)
            totals += _put(logits.clone() if part is None else logits * part, place, 0.0).sum(1)
        if rule.softmax:
            others, before = _put(logits, place, float("-inf")), top
            top = torch.maximum(before, others.amax(1))
            result.mul_((before - top).exp_()).add_(others.sub_(top.unsqueeze(1)).exp_().sum(1))
        else:
            result += _put(rule.term(logits), place, 0.0).sum(1)
    return _logarithm(result) if rule.softmax else result, totals, target, length, angle, top, half, inverse


def _logits(cosines: Tensor, problem: ClassProblem, chunk: _Chunk) -> Tensor:
    """Logits of a chunk; the memory of plain cosines is used again."""
    part = _part(problem.bias, chunk)
    if problem.rule.plain and problem.offset is None:
        logits = cosines.mul_(problem.scale.unsqueeze(1))
        return logits if part is None else logits.add_(part)
    return scaled(problem.rule.value(cosines, *problem.parameters), problem.scale, problem.offset, part)


@_statistics.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    problem, keep = ClassProblem.unpacked(arguments[:-1]), arguments[-1]
    units, weight = problem.units, problem.weight
    kept = problem.low and keep and _fused(problem) is not None  # the kernels' copy of the weights
    per_sample = units.new_empty(len(units))
    empty = units.new_empty(0)
    return (
        per_sample,
        torch.empty_like(per_sample) if problem.total else empty,
        torch.empty_like(per_sample),
        torch.empty_like(per_sample) if problem.has_lengths else torch.empty_like(empty),
        torch.empty_like(empty) if problem.features is None else torch.empty_like(per_sample),
        torch.empty_like(per_sample),
        weight.new_empty(weight.shape if kept else 0, dtype=torch.float16),
        units.new_empty(len(weight) if kept and problem.unit else 0),
    )


@torch.library.custom_op(
    "hypersphere::class_gradients",
    mutates_args=(),
    schema=f"({_schema(_Upstream, 'grad_')}, {_schema(_Kept)}, {_PROBLEM}, bool weight_too) -> {_SIX}",
)
def _gradients(*arguments: Any) -> tuple[Tensor, ...]:
    """Gradients by units, weight, scale, offset, bias, features (empty where there is nothing to differentiate by)."""
    upstream, kept, problem, weight_too = _read(arguments)
    found = _class_gradients(upstream, kept, problem, weight_too)
    by_weight, by_features = found[1], problem.units.new_empty(0)
    if upstream.angle is not None and problem.features is not None:
        own = own_rows(problem)
        by_features, along = _angle_slopes(problem.features, problem.weight[own], upstream.angle, False)
        if weight_too:
            by_weight.index_copy_(0, own, _sums_at(by_weight, own, along))
    elif problem.features is not None:
        by_features = torch.zeros_like(problem.features)
    return *found, by_features


def _class_gradients(
    upstream: _Upstream, kept: _Kept, problem: ClassProblem, weight_too: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same but for the angles to the targets."""
    units, weight, labels, scale = problem.units, problem.weight, problem.labels, problem.scale
    if kept.half.numel():
        by_units, by_weight, by_scale = _fused_gradients(upstream, kept, problem, weight_too)
        return by_units, by_weight, by_scale, units.new_empty(0), units.new_empty(0)
    rule, offset, bias, subcentres = problem.rule, problem.offset, problem.bias, problem.subcentres
    by_units = torch.zeros_like(units)
    by_weight = torch.empty_like(weight) if weight_too else units.new_empty(0)
    by_scale = torch.zeros_like(scale)
    by_offset = units.new_empty(0) if offset is None else torch.zeros_like(offset)
    by_bias = units.new_empty(0) if bias is None else torch.empty_like(bias)
    forward_type, backward_type = (torch.float16, torch.bfloat16) if problem.low else (None, None)
    for chunk in _chunks(weight, len(units), subcentres, problem.unit, units.dtype):
        products = _compared(problem, chunk, forward_type)
        cosines, closest = products.unflatten(1, (-1, subcentres)).max(2) if subcentres > 1 else (products, None)
        values = rule.value(cosines, *problem.parameters)
        place = _place(labels, chunk)
        logits = scaled(values, scale, offset, _part(bias, chunk))
        by_logits = _by_logits(rule, logits, kept, upstream, _part(problem.class_weights, chunk))
        by_logits = _put(by_logits, place, 0.0)
        if bias is not None:
            by_bias[chunk.start : chunk.stop] = by_logits.sum(0)
        by_scale += torch.linalg.vecdot(by_logits, values if offset is None else values + offset)
        by_cosines = by_logits.mul_(scale.unsqueeze(1))
        if offset is not None:
            by_offset += by_cosines.sum()
        if not rule.plain:
            by_cosines.mul_(rule.slope(cosines, *problem.parameters))
        _put(by_cosines, place, upstream.target.unsqueeze(1))
        if closest is not None:
            spread = by_cosines.new_zeros(*by_cosines.shape, subcentres)
            by_cosines = spread.scatter_(2, closest.unsqueeze(2), by_cosines.unsqueeze(2)).flatten(1)
        by_units += _product(by_cosines, chunk.weight, backward_type)
        if weight_too:
            by_rows = _product(by_cosines.mT, units, backward_type)
            by_weight[chunk.start * subcentres : chunk.stop * subcentres] = _tangent(by_rows, chunk)
    if weight_too and upstream.length is not None:
        _add_length(by_weight, weight, problem.rows, upstream.length)
    return by_units, by_weight, by_scale, by_offset, by_bias


def _read(arguments: Sequence[Any]) -> tuple[_Upstream, _Kept, ClassProblem, bool]:
    """The arguments of the gradients' operation."""
    return _Upstream(*arguments[:5]), _Kept(*arguments[5:10]), ClassProblem.unpacked(arguments[10:-1]), arguments[-1]


def _fused_gradients(
    upstream: _Upstream, kept: _Kept, problem: ClassProblem, weight_too: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by units, weight and scale from the kernels, with the targets, which these leave out."""
    from hypersphere.losses import fused  # noqa: PLC0415 (needs triton, which comes with torch for CUDA only)

    units, weight, labels, scale, unit = problem.units, problem.weight, problem.labels, problem.scale, problem.unit
    own = problem.rows
    by_weight = torch.empty_like(weight, dtype=torch.float32) if weight_too else None
    by_units, by_scale = fused.gradients(
        upstream.result, kept.result, units, kept.half, kept.inverse, labels, scale, unit, by_weight
    )
    rows = weight[own].to(units.dtype)
    aim = normalise(rows) if unit else rows
    by_units += upstream.target.unsqueeze(1) * aim
    if by_weight is None:
        return by_units, units.new_empty(0), by_scale
    tangent = units
    if unit:
        tangent = (units - kept.target.unsqueeze(1) * aim) * kept.inverse[own].unsqueeze(1)
    by_weight.index_add_(0, own, upstream.target.unsqueeze(1) * tangent)
    if upstream.length is not None:
        _add_length(by_weight, weight, own, upstream.length)
    return by_units, by_weight.to(weight.dtype), by_scale


def _tangent(by_rows: Tensor, chunk: _Chunk) -> Tensor:
    """Gradient of the weights from that of their directions; the memory is used again."""
    if chunk.inverse is None:
        return by_rows
    along = torch.linalg.vecdot(by_rows, chunk.weight).unsqueeze(1)
    return by_rows.addcmul_(chunk.weight, along, value=-1).mul_(chunk.inverse)


def _by_logits(rule: Negatives, logits: Tensor, kept: _Kept, upstream: _Upstream, weights: Tensor | None) -> Tensor:
    """Gradient of the reductions by every logit; the memory of the logits may be used again."""
    if rule.softmax:
        share = upstream.result * (-kept.result).exp()
        gradient = logits.sub_(kept.top.unsqueeze(1)).exp_().mul_(share.unsqueeze(1))
    else:
        gradient = rule.term_slope(logits).mul_(upstream.result.unsqueeze(1))
    if upstream.total is None:
        return gradient
    by_total = upstream.total.unsqueeze(1)
    return gradient.add_(by_total if weights is None else by_total * weights)


def _add_length(by_weight: Tensor, weight: Tensor, labels: Tensor, grad_length: Tensor) -> None:
    """Add the gradient through the norms of the samples' target weights."""
    rows = normalise(weight[labels].to(grad_length.dtype)) * grad_length.unsqueeze(1)
    by_weight.index_add_(0, labels, rows.to(by_weight.dtype))


@_gradients.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    _, _, problem, weight_too = _read(arguments)
    empty = problem.units.new_empty(0)
    return (
        torch.empty_like(problem.units),
        torch.empty_like(problem.weight) if weight_too else empty,
        torch.empty_like(problem.scale),
        torch.empty_like(empty) if problem.offset is None else torch.empty_like(problem.offset),
        torch.empty_like(empty) if problem.bias is None else torch.empty_like(problem.bias),
        torch.empty_like(empty) if problem.features is None else torch.empty_like(problem.features),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    problem = ClassProblem.unpacked(inputs[:-1])
    result, _, target, *_, top, half, inverse = output
    ctx.mark_non_differentiable(top, half, inverse)
    ctx.set_materialize_grads(False)  # a zero gradient of what is kept would be as large as the weights
    tensors = [getattr(problem, name) for name in _TENSORS]
    ctx.save_for_backward(result, top, target, half, inverse, *tensors, *problem.parameters)
    # With the rule itself, which so lives until the backward pass, whatever becomes of its head.
    ctx.settings = {name: value for name, value in problem._asdict().items() if name not in (*_TENSORS, "parameters")}


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    kept = _Kept(*ctx.saved_tensors[:5])
    tensors = dict(zip(_TENSORS, ctx.saved_tensors[5:], strict=False))
    problem = ClassProblem(**tensors, **ctx.settings, parameters=ctx.saved_tensors[5 + len(tensors) :])
    result, total, target, length, angle = grads[:5]
    if torch.is_grad_enabled():  # a gradient that is differentiated again
        return _smooth_backward(problem, grads[:6])
    upstream = _Upstream(
        torch.zeros_like(kept.result) if result is None else result.contiguous(),
        total if problem.total else None,
        torch.zeros_like(kept.target) if target is None else target.contiguous(),
        length if problem.has_lengths else None,
        None if angle is None or problem.features is None else angle.contiguous(),
    )
    weight_too = ctx.needs_input_grad[1]
    by_units, by_weight, by_scale, by_offset, by_bias, by_features = _gradients(
        *upstream, *kept, *problem.packed(), weight_too
    )
    found = dict.fromkeys(ClassProblem._fields) | {
        "units": by_units,
        "weight": by_weight if weight_too else None,
        "scale": by_scale,
        "parameters": [None] * len(problem.parameters),
        "offset": None if problem.offset is None else by_offset,
        "bias": None if problem.bias is None else by_bias,
        "features": None if problem.features is None else by_features,
    }
    return (*found.values(), None)  # the last of whether to keep


def _smooth_backward(problem: ClassProblem, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """The same gradients by autograd, with all logits at once, differentiable as often as one likes."""
    every = {name: getattr(problem, name) for name in _TENSORS}
    # As views: features count by themselves, and not once more for the directions that were made of them.
    by = {name: value.view_as(value) for name, value in every.items() if value is not None and value.requires_grad}
    statistics = _dense(problem._replace(low=False, **by))
    found = [(v, grad) for v, grad in zip(statistics, grads, strict=True) if grad is not None and v.requires_grad]
    values, given = zip(*found, strict=True) if found else ((), ())
    gradients = torch.autograd.grad(values, list(by.values()), given, create_graph=True, allow_unused=True)
    none: dict[str, Any] = dict.fromkeys(ClassProblem._fields) | {"parameters": [None] * len(problem.parameters)}
    return (*(none | dict(zip(by, gradients, strict=True))).values(), None)


_statistics.register_autograd(_backward, setup_context=_setup)
