"""From a batch to its losses: what a head computes of size ``(B,)``, beside the reduction of its classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hypersphere.geometry import norm
from hypersphere.losses.batch import Batch
from hypersphere.losses.negatives import Negatives
from hypersphere.losses.spec import HeadSpec
from hypersphere.losses.streaming import ClassProblem, class_cosines, class_statistics, scaled
from hypersphere.margins import NoMargin

if TYPE_CHECKING:
    from hypersphere.losses.head import MarginSoftmax


def sample_losses(head: MarginSoftmax, batch: Batch, low_precision: bool = False) -> tuple[Tensor, Tensor]:
    """Loss and weight of every sample, both ``(B,)``, before they are reduced.

    Args:
        head: A head.
        batch: A batch of its features, which are rotated already.
        low_precision: 16-bit products with 32-bit sums, on a GPU.

    Example:
        >>> from hypersphere.losses import Batch, Softmax
        >>> sample_losses(Softmax(2, 3), Batch.of(torch.zeros(1, 2), torch.tensor([0])))[0].item()
        1.0986...
    """
    return _soft(head, batch) if batch.soft else _hard(head, batch, low_precision)


def _hard(head: MarginSoftmax, batch: Batch, low: bool) -> tuple[Tensor, Tensor]:
    """Loss and weight of every sample with one target each."""
    spec, caffe = head.spec, head.imitates_caffe
    scale, sizes = head.scale(batch.norms), head.margin_sizes(batch)
    weight, columns, bias = head.compared(batch)
    parameters = head.rule_parameters(batch, sizes)
    problem = ClassProblem(
        batch.units,
        weight,
        columns,
        scale,
        spec.negatives,
        parameters,
        head.offset(),
        bias,
        spec.subcentres,
        unit=spec.unit_weights and not caffe,
        total=spec.label_smoothing > 0 and not spec.all_logits,
        low=low,
    )
    found = class_statistics(problem, chunked=head.path == "chunked")
    if caffe:
        target = _caffe_target(head, batch, found.target, scale, sizes)
    else:
        target = target_logits(head, batch, found.target, None if spec.unit_weights else found.length, scale, sizes)
    target, total = target + head.target_bias(batch), found.total
    if spec.all_logits:
        cosines = class_cosines(batch.units, weight, spec.subcentres, problem.unit)
        logits = negative_logits(head, cosines, scale, parameters)
        total = floored_total(logits, target, batch.labels, spec.probability_floor)
    values = head.sample_loss(found.negatives, total, target, len(weight) // spec.subcentres) + head.penalty(batch)
    weights = torch.ones_like(values) if batch.valid is None else batch.valid.to(values.dtype)
    if head.class_weights is not None:
        weights = weights * head.class_weights.to(values.dtype)[batch.labels]
    return values if batch.valid is None else torch.where(batch.valid, values, 0.0), weights


def _soft(head: MarginSoftmax, batch: Batch) -> tuple[Tensor, Tensor]:
    """Loss and weight of every sample with soft labels: the expectation of the loss of each target."""
    spec, shares, dtype = head.spec, batch.labels, batch.units.dtype
    scale = head.scale(batch.norms)
    cosines = class_cosines(batch.units, head.weight, spec.subcentres, spec.unit_weights)
    sizes = {name: _column(value) for name, value in head.margin_sizes(batch).items()}
    # Margins of each class (1, C) count by their shares, as a hard label takes that of its target.
    expected = {name: _expected(value, shares) for name, value in sizes.items()}
    logits = negative_logits(head, cosines, scale, head.rule_parameters(batch, expected, (shares * cosines).sum(1)))
    length = None if spec.unit_weights else norm(head.weight.to(dtype))
    target = target_logits(head, batch, cosines, length, scale.unsqueeze(1), sizes)
    if head.bias is not None:
        target = target + head.bias.to(dtype)
    total = logits.sum(1, keepdim=True) - logits
    values = head.sample_loss(others(spec.negatives, logits), total, target, head.classes)
    loss = (shares * values).sum(1) + head.penalty(batch)
    if head.class_weights is None:
        return loss, torch.ones_like(loss)
    return loss, shares @ head.class_weights.to(dtype)


def negative_logits(head: MarginSoftmax, cosines: Tensor, scale: Tensor, parameters: tuple[Tensor, ...]) -> Tensor:
    """Logits of all classes as non-targets, ``(B, C)``, from their cosines and the parameters of the rule."""
    values = head.spec.negatives.value(cosines, *parameters)
    return scaled(values, scale, head.offset(), head.class_bias(cosines.dtype))


def target_logits(
    head: MarginSoftmax,
    batch: Batch,
    products: Tensor,
    length: Tensor | None,
    scale: Tensor,
    sizes: Mapping[str, Any],
) -> Tensor:
    """Logits of targets, without the bias.

    Args:
        head: A head.
        batch: The batch.
        products: Products with the targets, ``(B,)``, or with all classes, ``(B, C)``.
        length: Norms of the targets' weights where these are no unit vectors, ``(B,)`` or ``(C,)``.
        scale: ``(B,)`` or ``(B, 1)``.
        sizes: The margin's arguments.
    """
    if length is None:
        return _with_offset(head, _target_value(head, batch, products, sizes)) * scale
    if isinstance(head.spec.psi, NoMargin):
        return products * scale
    cosines = (products / torch.where(length > 0, length, 1.0)).clamp(-1, 1)
    return _target_value(head, batch, cosines, sizes) * length * scale


def _target_value(head: MarginSoftmax, batch: Batch, cosines: Tensor, sizes: Mapping[str, Any]) -> Tensor:
    value = annealed(head.spec.psi(cosines, **sizes), head.plain_value(cosines), batch.annealing)
    return cosines + (value - cosines).detach() if head.spec.gradient == "cgd" else value


def _with_offset(head: MarginSoftmax, values: Tensor) -> Tensor:
    offset = head.offset()
    return values if offset is None else values + offset


def _caffe_target(
    head: MarginSoftmax, batch: Batch, product: Tensor, scale: Tensor, sizes: Mapping[str, Any]
) -> Tensor:
    """Target logits with the gradient of the released SphereFace layer."""
    with torch.no_grad():
        cosines = product.clamp(-1, 1)
        value = target_logits(head, batch, cosines, None, scale, sizes)
    vectors = head.weight.detach().unflatten(0, (-1, head.subcentres))[batch.labels].to(batch.units.dtype)
    fixed = {name: v.detach() if isinstance(v, Tensor) else v for name, v in sizes.items()}
    product, margin = _with_offset(head, product), head.spec.psi
    gradient = caffe_gradient(
        product, batch.units, scale, vectors, cosines, lambda c: margin(c, **fixed), batch.annealing
    )
    return value + gradient


def annealed(value: Tensor, plain: Tensor, weight: Tensor | None) -> Tensor:
    r"""A margin's value blended with the plain one, :math:`(\lambda\,\text{plain} + \text{value}) / (1 + \lambda)`.

    Example:
        >>> annealed(torch.tensor(0.0), torch.tensor(1.0), torch.tensor(3.0))
        tensor(0.7500)
    """
    return value if weight is None else (weight * plain + value) / (1 + weight)


def cross_entropy(spec: HeadSpec, negatives: Tensor, total: Tensor, target: Tensor, compared: int) -> Tensor:
    r"""Cross-entropy of each sample from the log-sum-exp of the non-target logits and the target logit.

    .. math:: \mathrm{softplus}(\mathrm{logsumexp}_{j \ne y} z_j - z_y)

    with the spec's label smoothing and probability floor.

    Args:
        spec: Spec of the head.
        negatives: ``(B,)`` log-sum-exp of the non-target logits.
        total: ``(B,)`` their sum (of logarithms of probabilities, where these have a floor).
        target: ``(B,)`` target logits.
        compared: Number of classes compared with.

    Example:
        >>> cross_entropy(HeadSpec(), torch.zeros(1), torch.zeros(0), torch.zeros(1), 2)
        tensor([0.6931])
    """
    if compared == 1:
        return 0 * target
    if spec.probability_floor:
        target = ((target - negatives).sigmoid() + spec.probability_floor).log()  # as total is of the others
        loss = -target
    else:
        loss = F.softplus(negatives - target, threshold=50)
    if spec.label_smoothing:
        loss = loss + spec.label_smoothing * (target - (target + total) / compared)
    return loss


def others(rule: Negatives, logits: Tensor) -> Tensor:
    """For each class of ``(B, C)`` the reduction of all other classes' logits, as each may be a target.

    Example:
        >>> from hypersphere.losses.negatives import Plain
        >>> others(Plain(), torch.tensor([[1.0, 2.0]]))
        tensor([[2., 1.]])
    """
    # From both sides: nothing is subtracted from a sum that contains it.
    if rule.softmax:
        left = F.pad(logits[:, :-1].logcumsumexp(1), (1, 0), value=float("-inf"))
        right = F.pad(logits[:, 1:].flip(1).logcumsumexp(1).flip(1), (0, 1), value=float("-inf"))
        return torch.logaddexp(left, right) if logits.shape[1] > 1 else left
    terms = rule.term(logits)
    left = F.pad(terms[:, :-1].cumsum(1), (1, 0))
    return left + F.pad(terms[:, 1:].flip(1).cumsum(1).flip(1), (0, 1))


def floored_total(logits: Tensor, target: Tensor, labels: Tensor, floor: float) -> Tensor:
    """What stands for the sum of the non-target logits where probabilities have a floor: that of their logarithms.

    Example:
        >>> floored_total(torch.zeros(1, 2), torch.zeros(1), torch.tensor([0]), 0.5)
        tensor([0.])
    """
    place = labels.unsqueeze(1)
    shares = logits.scatter(1, place, target.unsqueeze(1)).softmax(1)
    return (shares + floor).log().scatter(1, place, 0.0).sum(1)


def reduced(values: Tensor, weights: Tensor, reduction: str) -> Tensor:
    """The weighted mean or sum of losses ``(B,)``, or the weighted losses themselves; 0 where nothing counts.

    Example:
        >>> reduced(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 1.0]), "mean")
        tensor(2.)
    """
    weighted = values * weights
    if reduction == "none":
        return weighted
    if reduction == "sum":
        return weighted.sum()
    total = weights.sum()
    return weighted.sum() / torch.where(total > 0, total, 1.0)


def caffe_gradient(
    product: Tensor,
    units: Tensor,
    scale: Tensor,
    vectors: Tensor,
    cosines: Tensor,
    psi: Callable[[Tensor], Tensor],
    weight: Tensor | None,
) -> Tensor:
    r"""Zeros with the gradient of a target logit in the released SphereFace layer.

    The layer's input is :math:`x' = \text{scale}\,\hat x`. By the weights it differentiates the plain product; by
    :math:`x'` it takes the true direction :math:`a W_y + b x'` of the margin's gradient, divides the pair (a, b) by
    its length, and blends the result with the plain product's :math:`W_y` as the annealer says.

    Args:
        product: ``(B,)`` plain target values, with their gradient.
        units: ``(B, D)`` directions of the features.
        scale: ``(B,)``.
        vectors: ``(B, k, D)`` weights of the targets, no gradient.
        cosines: ``(B,)`` target cosines, no gradient.
        psi: The margin as a function of cosines.
        weight: Weight of the plain function against the margin.
    """
    inputs = units * scale.unsqueeze(1)
    closest = (vectors * units.detach().unsqueeze(1)).sum(2).argmax(1)
    own = vectors[torch.arange(len(vectors), device=vectors.device), closest]
    value, pull = torch.func.vjp(psi, cosines)[:2]
    (slope,) = pull(torch.ones_like(value))
    along = (value - cosines * slope) / torch.where(scale > 0, scale, 1.0).detach()
    length = torch.hypot(slope, along)
    inverse = torch.where(length > 0, 1 / torch.where(length > 0, length, 1.0), 0.0).unsqueeze(1)
    direction = (slope.unsqueeze(1) * own + along.unsqueeze(1) * inputs.detach()) * inverse
    if weight is not None:
        direction = (direction + weight * own) / (1 + weight)
    surrogate = product * scale + (inputs * (direction - own).detach()).sum(1)
    return surrogate - surrogate.detach()


def _column(value: Any) -> Any:
    """A per-sample value ``(B,)`` as a column; numbers, scalars and rows ``(1, C)`` as they are."""
    return value.unsqueeze(1) if isinstance(value, Tensor) and value.dim() == 1 else value


def _expected(value: Any, shares: Tensor) -> Any:
    """A row ``(1, C)`` of numbers of each class as the mean ``(B, 1)`` under shares ``(B, C)``; others as they are."""
    per_class = isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == shares.shape[1]
    return (shares * value).sum(1, keepdim=True) if per_class else value
