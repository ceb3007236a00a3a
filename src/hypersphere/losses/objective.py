"""From a batch to its losses: what a head computes of size ``(B,)``, beside the reduction of its classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hypersphere.geometry import norm, normalise, transformed
from hypersphere.losses.batch import Batch
from hypersphere.losses.negatives import Negatives
from hypersphere.losses.spec import HeadSpec
from hypersphere.losses.streaming import (
    CHUNK_ELEMENTS,
    ClassProblem,
    class_angles,
    class_cosines,
    class_statistics,
    scaled,
    target_angles,
)
from hypersphere.margins import Margin, NoMargin

if TYPE_CHECKING:
    from hypersphere.losses.head import MarginSoftmax


def sample_losses(head: MarginSoftmax, batch: Batch, low_precision: bool = False) -> tuple[Tensor, Tensor]:
    r"""Loss of every sample, weighted, and what each counts in the mean, both ``(B,)``, before they are reduced.

    There is one definition of targets, that of :func:`torch.nn.functional.cross_entropy`. With :math:`\ell_y` the loss
    with y as the target (its margin on y, and the negatives that go with y), K classes, class weights w and label
    smoothing :math:`\varepsilon`,

    .. math:: L_y = (1 - \varepsilon)\,w_y\,\ell_y + \frac{\varepsilon}{K} \sum_c w_c\,\ell_{y,c}

    where :math:`\ell_{y,c}` is what predicting c would cost with the same logits. A hard label costs :math:`L_y`, and
    shares q of the classes cost their expectation :math:`\sum_y q_y L_y`. In the mean a hard label counts
    :math:`w_y`, and shares count 1.

    Args:
        head: A head.
        batch: A batch of its features, which are rotated already.
        low_precision: 16-bit products with 32-bit sums, on a GPU.

    Example:
        >>> from hypersphere.losses import Batch, Softmax
        >>> sample_losses(Softmax(2, 3), Batch.of(torch.zeros(1, 2), torch.tensor([0])))[0].item()
        1.0986...
    """
    head.make_unit()
    return _soft(head, batch) if batch.soft else _hard(head, batch, low_precision)


def _hard(head: MarginSoftmax, batch: Batch, low: bool) -> tuple[Tensor, Tensor]:
    """Of one target each."""
    spec, caffe, shards = head.spec, head.imitates_caffe, head.shards
    sizes, compared = head.margin_sizes(batch), head.compared(batch)
    bias, columns = compared.bias, compared.columns
    added = Added(head.offset(), bias)
    _, scale = _factors(head, batch, added)
    seen, offset, reach = _seen(head, batch, added, scale)
    units, _ = _factors(head, seen, added)
    parameters = head.rule_parameters(batch, sizes)
    problem = ClassProblem(
        units,
        compared.weight,
        columns,
        reach,
        spec.negatives,
        parameters,
        offset,
        bias,
        spec.subcentres,
        unit=spec.unit_weights and not head.keeps_unit_weights,
        total=spec.label_smoothing > 0 and not spec.all_logits,
        class_weights=compared.class_weights,
        low=low,
        features=seen.features if takes_angle(head, sizes) and not caffe else None,
    )
    found = class_statistics(problem, chunked=head.path == "chunked")
    target_bias = None
    if bias is not None:
        target_bias = bias[problem.rows] if len(bias) else torch.zeros_like(found.target)
    if shards is not None:
        found, target_bias = shards.put_together(found, columns, target_bias, softmax=spec.negatives.softmax)
    if caffe:
        target = _caffe_target(head, batch, found.target, scale, sizes, added)
    else:
        length = None if spec.unit_weights else found.length
        product, angles = found.target, None if problem.features is None else found.angle
        if head.keeps_unit_weights:
            product = _within(product)
            angles = None if angles is None else _of_product(angles, product)
        target = target_logits(head, batch, product, length, scale, sizes, added, angles)
    target, total = target if target_bias is None else target + target_bias, found.total
    if spec.all_logits:
        cosines = _of_all(head, class_cosines(units, compared.weight, spec.subcentres, problem.unit))
        logits = negative_logits(head, cosines, scale, parameters, added._replace(bias=_every_bias(head, bias)))
        total = _floored_total(head, logits, found.negatives, target, _is_target(batch.labels, logits))
    own = None if head.class_weights is None else head.class_weights.to(scale.dtype)[batch.labels]
    values = _weighted(head, batch, (found.reduced, total, target), own, compared.every, compared.number, found.top)
    counts = torch.ones_like(values) if own is None else own
    if batch.valid is None:
        return values, counts
    return torch.where(batch.valid, values, 0.0), torch.where(batch.valid, counts, 0.0)


class Added(NamedTuple):
    """What is added to the values of classes: each made once, so that 16-bit parameters get one gradient, rounded once.

    Example:
        >>> Added(torch.tensor(0.1), torch.zeros(3)).offset
        tensor(0.1000)
    """

    offset: Tensor | None
    """Scalar added to every value."""
    bias: Tensor | None
    """Added to the logits, of the classes compared with ``(K,)``."""


def _factors(head: MarginSoftmax, batch: Batch, added: Added) -> tuple[Tensor, Tensor]:
    """Vectors ``(B, D)`` and the scale ``(B,)`` of their products: directions, where the logits are not linear."""
    if not head.spec.linear or added.offset is not None:
        return batch.units, head.scale(batch.norms)
    # A linear function has its gradient at 0, too. Sizes are taken off as constants, so that 16 bit can hold the rest.
    size = batch.features.detach().abs().amax(1)
    size = torch.where(size > 0, size, 1.0)
    return batch.features / size.unsqueeze(1), size


def _seen(head: MarginSoftmax, batch: Batch, added: Added, scale: Tensor) -> tuple[Batch, Tensor | None, Tensor]:
    """A batch, the offset and the scale as the classes of this process see them.

    Where these are not all classes, their gradients are parts of the whole, which are summed up on the way back.
    """
    shards, offset = head.shards, added.offset
    if shards is None:
        return batch, offset, scale
    assert batch.part is not None
    seen = batch._replace(features=batch.part, units=normalise(batch.part))
    if offset is None:
        return seen, None, shards.entered(scale)[0]
    offset, scale = shards.entered(offset, scale)
    return seen, offset, scale


def _of_all(head: MarginSoftmax, values: Tensor) -> Tensor:
    """Columns of all classes, of those of this process."""
    shards = head.shards
    return values if shards is None else shards.of_all_classes(values)


def _every_bias(head: MarginSoftmax, bias: Tensor | None) -> Tensor | None:
    """Biases of all classes, of those of this process."""
    return None if bias is None else _of_all(head, bias.unsqueeze(0)).squeeze(0)


def _soft(head: MarginSoftmax, batch: Batch) -> tuple[Tensor, Tensor]:
    """Of shares of all classes."""
    spec, dtype = head.spec, batch.units.dtype
    added = Added(head.offset(), _every_bias(head, head.own_bias(dtype)))
    _, scale = _factors(head, batch, added)
    seen = _seen(head, batch, added, scale)[0]
    units, weight = _factors(head, seen, added)[0], head.own_weight
    raw = head.keeps_unit_weights
    cosines = _of_all(head, class_cosines(units, weight, spec.subcentres, spec.unit_weights and not raw))
    cosines = _within(cosines) if raw else cosines
    sizes = {name: _column(value) for name, value in head.margin_sizes(batch).items()}
    parameters = head.rule_parameters(batch, sizes, cosines)
    length = None if spec.unit_weights else norm(weight.to(dtype))
    if length is not None and spec.subcentres == 1:  # of several no margin asks for it
        length = _of_all(head, length.unsqueeze(0)).squeeze(0)
    angles = None
    if takes_angle(head, sizes):
        angles = _of_all(head, class_angles(seen.units, weight, spec.subcentres))
    angles = _of_product(angles, cosines) if raw and angles is not None else angles
    target = target_logits(head, batch, cosines, length, scale.unsqueeze(1), sizes, added, angles)
    if added.bias is not None:
        target = target + added.bias
    weights = None if head.class_weights is None else head.class_weights.to(dtype)
    if spec.all_logits or any(_of_target(p) for p in parameters):
        negatives, total = _by_target(head, cosines, scale, parameters, target, added)
    else:
        logits = negative_logits(head, cosines, scale, parameters, added)
        if spec.negatives.softmax:  # which does not change when all logits do; large ones would be rounded in it
            top = logits.detach().amax(1, keepdim=True)
            logits, target = logits - top, target - top
        negatives, weighted = others(spec.negatives, logits), logits if weights is None else logits * weights
        total = weighted.sum(1, keepdim=True) - weighted
    values = _weighted(head, batch, (negatives, total, target), weights, weights, head.classes)
    loss = (batch.labels * values).sum(1)
    return loss, torch.ones_like(loss)


def _within(products: Tensor) -> Tensor:
    """Products of unit vectors without their rounding beyond +-1, which cuts no gradient."""
    return products + (products.clamp(-1, 1) - products).detach()


def _of_product(angles: Tensor, products: Tensor) -> Tensor:
    """Angles with all their digits, and the gradient that they have as functions of the products with unit vectors."""
    exact = angles.detach()
    sine = exact.sin().clamp(min=torch.finfo(exact.dtype).eps ** 0.5)
    return exact - (products - products.detach()) / sine


def _weighted(
    head: MarginSoftmax,
    batch: Batch,
    found: tuple[Tensor, Tensor, Tensor],
    own: Tensor | None,
    weights: Tensor | None,
    compared: int,
    top: Tensor | float = 0.0,
) -> Tensor:
    """The losses :math:`L_y` of :func:`sample_losses`, of the shape of the target logits.

    Args:
        head: A head.
        batch: The batch.
        found: Reduction of the non-target logits, their sum under the class weights, and the target logits.
        own: Weights of the targets, which broadcast against their logits.
        weights: Weights of the classes compared with, ``(K,)``.
        compared: Their number K.
        top: What the reduction is less than that of the logits themselves.
    """
    negatives, total, target = found
    spec, factor = head.spec, head.loss_factor
    plain = head.sample_loss(negatives, target - top) if compared > 1 or not spec.negatives.softmax else 0 * target
    values = factor * plain + _column(head.penalty(batch), target)
    if own is not None:
        values = values * own
    if spec.label_smoothing and compared > 1:
        reached = -plain if spec.probability_floor else target
        if own is None or weights is None:
            spread = reached - (reached + total) / compared
        else:
            mean = weights.mean()
            spread = (mean - own) * plain + mean * reached - (own * reached + total) / compared
        values = values + factor * spec.label_smoothing * spread
    return values


def _of_target(parameter: Tensor) -> bool:
    """Whether a parameter of a rule is another one for each class as the target, ``(1, C)`` or ``(B, C)``."""
    return parameter.dim() == 2 and parameter.shape[1] > 1


def _by_target(
    head: MarginSoftmax,
    cosines: Tensor,
    scale: Tensor,
    parameters: tuple[Tensor, ...],
    target: Tensor,
    added: Added,
) -> tuple[Tensor, Tensor]:
    """What :func:`class_statistics` finds, with each class as the target, where the negatives depend on it: ``(B, C)``.

    Every target has C logits of its own, of which those of some targets are held at a time.
    """
    batch, classes = cosines.shape
    size = max(CHUNK_ELEMENTS // max(batch * classes, 1), 1)

    def some(start: int, cosines: Tensor, scale: Tensor, target: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        chosen = (p[:, start : start + size] if _of_target(p) else p for p in parameters)
        wider = tuple(p.unsqueeze(2) if p.dim() else p for p in chosen)
        logits = negative_logits(head, cosines.unsqueeze(1), scale.unsqueeze(1), wider, added)
        own = target[:, start : start + size]
        is_target = _is_target(torch.arange(start, start + own.shape[1], device=own.device), logits[0])
        rule = head.spec.negatives
        if rule.softmax:
            negatives = logits.masked_fill(is_target, float("-inf")).logsumexp(2)
        else:
            negatives = rule.term(logits).masked_fill(is_target, 0.0).sum(2)
        if head.spec.all_logits:
            return negatives, _floored_total(head, logits, negatives, own, is_target)
        return negatives, _weighted_sum(head, logits, is_target)

    given = (cosines, scale, target, *parameters)
    if size >= classes or not torch.is_grad_enabled() or transformed():
        found = [some(start, *given) for start in range(0, classes, size)]
    else:  # computed anew in the backward pass
        kept: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        found = [checkpoint(some, start, *given, **kept) for start in range(0, classes, size)]
    negatives, totals = zip(*found, strict=True)
    return torch.cat(negatives, 1), torch.cat(totals, 1)


def _is_target(labels: Tensor, logits: Tensor) -> Tensor:
    """Which logits ``(N, C)`` are those of the targets ``(N,)``."""
    return torch.arange(logits.shape[-1], device=labels.device) == labels.unsqueeze(1)


def _weighted_sum(head: MarginSoftmax, values: Tensor, is_target: Tensor) -> Tensor:
    """Sums over the classes but the target, under the class weights."""
    if head.class_weights is not None:
        values = values * head.class_weights.to(values.dtype)
    return values.masked_fill(is_target, 0.0).sum(-1)


def _floored_total(head: MarginSoftmax, logits: Tensor, negatives: Tensor, target: Tensor, is_target: Tensor) -> Tensor:
    """What stands for the sum of the non-target logits where probabilities have a floor: that of their logarithms."""
    whole = torch.logaddexp(negatives, target).unsqueeze(-1)
    logits = torch.where(is_target, target.unsqueeze(-1), logits)
    return _weighted_sum(head, ((logits - whole).exp() + head.spec.probability_floor).log(), is_target)


def negative_logits(
    head: MarginSoftmax, cosines: Tensor, scale: Tensor, parameters: tuple[Tensor, ...], added: Added
) -> Tensor:
    """Logits of all classes as non-targets, ``(B, C)``, from their cosines and the parameters of the rule."""
    values = head.spec.negatives.value(cosines, *parameters)
    return scaled(values, scale, *added)


def target_logits(
    head: MarginSoftmax,
    batch: Batch,
    products: Tensor,
    length: Tensor | None,
    scale: Tensor,
    sizes: Mapping[str, Any],
    added: Added,
    angles: Tensor | None = None,
) -> Tensor:
    """Logits of targets, without the bias.

    Args:
        head: A head.
        batch: The batch.
        products: Products with the targets, ``(B,)``, or with all classes, ``(B, C)``.
        length: Norms of the targets' weights where these are no unit vectors, ``(B,)`` or ``(C,)``.
        scale: ``(B,)`` or ``(B, 1)``.
        sizes: The margin's arguments.
        added: What is added.
        angles: Angles to the targets, where they are known and the margin is made of them.
    """
    if length is None:
        values = _target_value(head, batch, products, sizes, angles)
    elif isinstance(head.spec.psi, NoMargin):
        values = products
    else:
        cosines = _within(products / torch.where(length > 0, length, 1.0))
        values = _target_value(head, batch, cosines, sizes, angles) * length
    return _with_offset(added, values) * scale


def takes_angle(head: MarginSoftmax, sizes: Mapping[str, Any]) -> bool:
    """Whether targets are made of angles: by the margin, or by the plain function that it is blended with.

    Example:
        >>> from hypersphere.losses import ArcFace, CosFace
        >>> takes_angle(ArcFace(2, 3), {"m": 0.5}), takes_angle(CosFace(2, 3), {"m": 0.35})
        (True, False)
    """
    return head.spec.psi.takes_angle(**sizes) or (head.annealer is not None and head.spec.g.of_angle)


def _target_value(
    head: MarginSoftmax, batch: Batch, cosines: Tensor, sizes: Mapping[str, Any], angles: Tensor | None
) -> Tensor:
    psi = head.spec.psi
    value = psi(cosines, **sizes) if angles is None else psi.psi(angles, **sizes)
    value = annealed(value, head.plain_value(cosines, angles), batch.annealing)
    return cosines + (value - cosines).detach() if head.spec.gradient == "cgd" else value


def _with_offset(added: Added, values: Tensor) -> Tensor:
    return values if added.offset is None else values + added.offset


def _caffe_target(
    head: MarginSoftmax, batch: Batch, product: Tensor, scale: Tensor, sizes: Mapping[str, Any], added: Added
) -> Tensor:
    """Target logits with the gradient of the released SphereFace layer."""
    margin = head.spec.psi
    fixed = {name: v.detach() if isinstance(v, Tensor) else v for name, v in sizes.items()}
    with torch.no_grad():
        vectors = head.target_vectors(batch)
        closest = (vectors * batch.units.unsqueeze(1)).sum(2).argmax(1)
        own = vectors[torch.arange(len(vectors), device=vectors.device), closest]
        cosines, angles = product.clamp(-1, 1), None
        if margin.takes_angle(**fixed):
            angles = target_angles(batch.features, own).to(own.dtype)
        value = target_logits(head, batch, cosines, None, scale, sizes, added, angles)
    line, product = _by_cosines(margin, cosines, angles, fixed), _with_offset(added, product)
    return value + caffe_gradient(product, batch.units, scale, own, line, batch.annealing)


def _by_cosines(
    margin: Margin, cosines: Tensor, angles: Tensor | None, sizes: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """A margin's slope by the cosines ``(B,)``, and what a straight line of that slope has at cosine 0."""
    psi, at = (margin.__call__, cosines) if angles is None else (margin.psi, angles)
    value, pull = torch.func.vjp(lambda places: psi(places, **sizes), at)[:2]
    (slope,) = pull(torch.ones_like(value))
    if angles is not None:
        slope = -slope / angles.sin().clamp(min=torch.finfo(angles.dtype).tiny ** 0.5)
    return slope, value - cosines * slope


def annealed(value: Tensor, plain: Tensor, weight: Tensor | None) -> Tensor:
    r"""A margin's value blended with the plain one, :math:`(\lambda\,\text{plain} + \text{value}) / (1 + \lambda)`.

    Example:
        >>> annealed(torch.tensor(0.0), torch.tensor(1.0), torch.tensor(3.0))
        tensor(0.7500)
    """
    return value if weight is None else (weight * plain + value) / (1 + weight)


def cross_entropy(spec: HeadSpec, negatives: Tensor, target: Tensor) -> Tensor:
    r"""Cross-entropy of targets from the log-sum-exp of the non-target logits and the target logits, of one shape.

    .. math:: \mathrm{softplus}(\mathrm{logsumexp}_{j \ne y} z_j - z_y)

    with the spec's probability floor.

    Example:
        >>> cross_entropy(HeadSpec(), torch.zeros(1), torch.zeros(1))
        tensor([0.6931])
    """
    if spec.probability_floor:
        return -((target - negatives).sigmoid() + spec.probability_floor).log()
    return F.softplus(negatives - target, threshold=50)


def others(rule: Negatives, logits: Tensor) -> Tensor:
    """For each class of ``(B, C)`` the reduction of all other classes' logits, as each may be a target.

    Example:
        >>> from hypersphere.losses.negatives import Plain
        >>> others(Plain(), torch.tensor([[1.0, 2.0]]))
        tensor([[2., 1.]])
    """
    # Nothing is subtracted from a sum that it makes up most of.
    if rule.softmax:
        top = logits.argmax(1, keepdim=True)
        is_top = _is_target(top.squeeze(1), logits)
        without_top = logits.masked_fill(is_top, float("-inf")).logsumexp(1, keepdim=True)
        whole = logits.logsumexp(1, keepdim=True)
        shares = (logits - whole).masked_fill(is_top, float("-inf")).exp()
        return torch.where(is_top, without_top, whole + (-shares).log1p())
    terms = rule.term(logits)
    left = F.pad(terms[:, :-1].cumsum(1), (1, 0))
    return left + F.pad(terms[:, 1:].flip(1).cumsum(1).flip(1), (0, 1))


def reduced(values: Tensor, counts: Tensor, reduction: str) -> Tensor:
    """The sum of weighted losses ``(B,)``, by what they count the mean, or the losses; 0 where nothing counts.

    Example:
        >>> reduced(torch.tensor([2.0, 4.0]), torch.tensor([2.0, 1.0]), "mean")
        tensor(2.)
    """
    if reduction == "none":
        return values
    if reduction == "sum":
        return values.sum()
    total = counts.sum()
    return values.sum() / torch.where(total > 0, total, 1.0)


def caffe_gradient(
    product: Tensor,
    units: Tensor,
    scale: Tensor,
    own: Tensor,
    line: tuple[Tensor, Tensor],
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
        own: ``(B, D)`` weights of the targets, no gradient.
        line: ``(B,)`` slope of the margin by the cosine, and its value less the cosine times that, no gradient.
        weight: Weight of the plain function against the margin.
    """
    inputs = units * scale.unsqueeze(1)
    slope, along = line
    along = along / torch.where(scale > 0, scale, 1.0).detach()
    length = torch.hypot(slope, along)
    inverse = torch.where(length > 0, 1 / torch.where(length > 0, length, 1.0), 0.0).unsqueeze(1)
    direction = (slope.unsqueeze(1) * own + along.unsqueeze(1) * inputs.detach()) * inverse
    if weight is not None:
        direction = (direction + weight * own) / (1 + weight)
    surrogate = product * scale + (inputs * (direction - own).detach()).sum(1)
    return surrogate - surrogate.detach()


def _column(value: Any, like: Tensor | None = None) -> Any:
    """A value of each sample ``(B,)`` as a column (beside a matrix); numbers, scalars and rows ``(1, C)`` stay."""
    if not isinstance(value, Tensor) or value.dim() != 1:
        return value
    return value.unsqueeze(1) if like is None or like.dim() == 2 else value
