r"""Energies of output layers with many classes, from the classes of a batch, and of a random subset of neurons.

The inter-class term of SphereFace+ is :func:`batch_versus_all`; :class:`InterClass` adds it to any head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere.energy.chords import (
    FLOOR,
    directions,
    present,
    smooth_chords,
    smooth_directions,
    squared_chords,
    unit_vectors,
)
from hypersphere.energy.mhe import hyperspherical_energy
from hypersphere.energy.pairs import both_chords, pairs_and_images, smooth_terms, tile_terms
from hypersphere.energy.potentials import Potential, Riesz
from hypersphere.energy.shards import agreed, mesh_of
from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.geometry import at_least_float32, full_precision, transformed
from hypersphere.neurons import whole

CHUNK_ELEMENTS = 2**23
"""Pairs computed at a time."""


def _sweep(
    anchors: tuple[Tensor, Tensor], rows: tuple[Tensor, Tensor], own: Tensor, potential: Potential, half_space: bool
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Some rows at a time: which, and values and slopes of their pairs with all anchors ``(b, m, some)``."""
    (a, a_inverse), (r, r_inverse) = anchors, rows
    step = max(CHUNK_ELEMENTS // max(a.shape[0] * a.shape[1], 1), 1)
    for start in range(0, r.shape[1], step):
        part = slice(start, start + step)
        places = torch.arange(start, min(start + step, r.shape[1]), device=a.device)
        counted = (own.unsqueeze(-1) != places) & (r_inverse[:, part] != 0).mT & (a_inverse != 0)
        q, p = squared_chords(a, r[:, part], own=own - start, mirrored=both_chords(potential, half_space))
        value, slope = tile_terms(q, p, potential, half_space, None, FLOOR[a.dtype])
        yield part, torch.where(counted, value, 0.0), torch.where(counted, slope, 0.0)


def _sums(
    anchors: Tensor, rows: Tensor, own: Tensor, share: Tensor | None, potential: Potential, half_space: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Sums of the anchors ``(b, m)`` in float64, and, where shares ``(b, m)`` are given, gradients of what is shared.

    The pairs are never held at once.
    """
    a, r = directions(anchors, 0.0), directions(rows, 0.0)
    total = torch.zeros(anchors.shape[:2], dtype=torch.float64, device=anchors.device)
    by = [torch.zeros_like(a[0]), torch.zeros_like(r[0])]
    for part, value, slope in _sweep(a, r, own, potential, half_space):
        total += value.sum(2, dtype=torch.float64)
        if share is not None:
            force = -2 * slope * share.unsqueeze(2)
            by[0] += force @ r[0][:, part]
            by[1][:, part] = force.mT @ a[0]
    if share is None:
        return total, ()
    return total, tuple(
        (gradient - (gradient * units).sum(-1, keepdim=True) * units) * inverse
        for gradient, (units, inverse) in zip(by, (a, r), strict=True)
    )


class _CrossSums(torch.autograd.Function):
    """Sums of the anchors; where their weights are known, forward finds the gradients in the same pass."""

    @staticmethod
    def forward(
        ctx: Any,
        anchors: Tensor,
        rows: Tensor,
        own: Tensor,
        weights: Tensor | None,
        potential: Potential,
        half_space: bool,
    ) -> Tensor:
        total, gradients = _sums(anchors, rows, own, weights, potential, half_space)
        ctx.save_for_backward(anchors, rows, own, weights, *gradients)
        ctx.options = (potential, half_space)
        return (total if weights is None else (total * weights).sum(1)).to(anchors.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        anchors, rows, own, weights, *known = ctx.saved_tensors
        gradients: Sequence[Tensor | None]
        if torch.is_grad_enabled():
            gradients = _smooth_gradients(grads[0], anchors, rows, own, weights, *ctx.options)
        elif weights is None:
            gradients = _sums(anchors, rows, own, grads[0], *ctx.options)[1]
        else:
            gradients = [gradient * grads[0].view(-1, 1, 1) for gradient in known]
        return gradients[0], gradients[1], None, None, None, None


def _smooth_gradients(
    grad: Tensor,
    anchors: Tensor,
    rows: Tensor,
    own: Tensor,
    weights: Tensor | None,
    potential: Potential,
    half_space: bool,
) -> list[Tensor | None]:
    """The same gradients as part of a graph that goes on."""
    with full_precision(anchors):
        # Views, so that each has a gradient of its own even where anchors are the rows.
        inputs = [x.view_as(x) for x in (anchors, rows)]
        total = _dense(inputs[0], inputs[1], own, weights, potential, half_space)
        wanted = [index for index in (0, 1) if inputs[index].requires_grad]
        found = torch.autograd.grad(total, [inputs[index] for index in wanted], grad, create_graph=True)
    gradients: list[Tensor | None] = [None, None]
    for index, gradient in zip(wanted, found, strict=True):
        gradients[index] = gradient
    return gradients


def _dense(
    anchors: Tensor, rows: Tensor, own: Tensor, weights: Tensor | None, potential: Potential, half_space: bool
) -> Tensor:
    """The same sums by plain differentiable code that keeps every pair: what derivatives of the gradient need."""
    places = torch.arange(rows.shape[1], device=rows.device)
    counted = (own.unsqueeze(-1) != places) & present(anchors).unsqueeze(2) & present(rows).unsqueeze(1)
    mirrored = both_chords(potential, half_space)
    q, p = smooth_chords(smooth_directions(anchors), smooth_directions(rows), own=own, mirrored=mirrored)
    total = anchors.new_zeros(anchors.shape[:2], dtype=torch.float64)
    for squared, other in pairs_and_images(q, p, half_space):
        total = total + smooth_terms(squared, other, potential, counted).sum(2, dtype=torch.float64)
    total = 2 * total if half_space else total
    return (total if weights is None else (total * weights).sum(1)).to(anchors.dtype)


def cross_sums(
    anchors: Tensor,
    rows: Tensor,
    own: Tensor,
    potential: Potential,
    half_space: bool = False,
    *,
    weights: Tensor | None = None,
) -> Tensor:
    r"""Sums of a potential over pairs of an anchor with the rows, :math:`\sum_{j \ne y_i} f(q_{ij})`, of each anchor.

    No matrix of all pairs is kept unless a derivative of the gradient is wanted.

    Args:
        anchors: ``(b, m, d)`` in float32 or float64; zero vectors are left out.
        rows: ``(b, n, d)``; zero vectors are left out.
        own: ``(m,)`` or ``(b, m)``, the row :math:`y_i` that an anchor is not compared with.
        potential: f, of the squared chord.
        half_space: Take :math:`2 (f(q) + f(4 - q))`: pairs of vectors and mirror images, without a vector's own.
        weights: ``(b, m)``, constants :math:`a_i`: the weighted sum over the anchors is wanted, which spares a pass.

    Returns:
        ``(b, m)``; with weights ``(b,)``.

    Example:
        >>> rows = torch.eye(3).unsqueeze(0)
        >>> cross_sums(rows[:, :2], rows, torch.tensor([0, 1]), Riesz(2.0))
        tensor([[1., 1.]])
    """
    if transformed():
        with full_precision(anchors):
            return _dense(anchors, rows, own, weights, potential, half_space)
    total: Tensor = _CrossSums.apply(anchors, rows, own, weights, potential, half_space)
    return total


def _first(labels: Tensor) -> Tensor:
    """Which of ``labels`` ``(m,)`` are the first of their class; shapes do not depend on the labels."""
    return ~(labels.unsqueeze(1) == labels).tril(-1).any(1)


def batch_versus_all(
    weight: Tensor,
    labels: Tensor,
    s: float = 2.0,
    *,
    half_space: bool = False,
    angular: bool = False,
    gradient: str = "both",
    unique: bool = False,
    ignore_index: int | None = None,
) -> Tensor:
    r"""Energy of the classes of a batch against all classes, the inter-class term of SphereFace+.

    .. math:: \frac{1}{m (C - 1)} \sum_{i=1}^m \sum_{j \ne y_i} \rho(u_{y_i}, u_j)^{-s}

    It costs m C pairs in place of C², none of them kept; its expectation over uniform labels is the mean energy of all
    classes. A class that occurs twice counts twice.

    Args:
        weight: Class vectors ``(C, d)``; norms do not matter and zero vectors are left out.
        labels: Classes of the batch ``(m,)``.
        s: Riesz exponent; 0 is the logarithmic energy.
        half_space: Count the mirror image of every vector as a vector.
        angular: Take angles as distances, not chords.
        gradient: ``"both"``, or ``"anchor"``: only the classes of the batch are pushed, half of the gradient in
            expectation.
        unique: Let every class of the batch count once.
        ignore_index: Labels with this value count for nothing.

    Returns:
        Scalar in float32 or wider; 0 where there is no pair.

    Example:
        >>> batch_versus_all(torch.eye(4), torch.tensor([0, 2, 2]))
        tensor(0.5000)
    """
    check_choice("gradient", gradient, ("both", "anchor"))
    check_range("s", s, 0)
    _check(weight, labels)
    rows = at_least_float32(whole(weight, own=True))
    with full_precision(rows):
        counts = torch.ones_like(labels, dtype=torch.bool) if ignore_index is None else labels != ignore_index
        own = torch.where(counts, labels, 0)
        anchors = rows[own]
        valid = present(rows)
        counts = counts & valid[own] & (_first(labels) if unique else True)
        share = counts.to(rows.dtype) / counts.sum().clamp(min=1)
        potential = Riesz(s, angular)
        others = rows.detach() if gradient == "anchor" else rows
        total = cross_sums(
            anchors.unsqueeze(0), others.unsqueeze(0), own, potential, half_space, weights=share.unsqueeze(0)
        ).squeeze(0)
        n = valid.sum()
        if half_space:  # of the four signs of a pair two have the anchor's own; its mirror image is a vector, too
            return (total / 2 + potential(4 * share.new_ones(())) * share.sum()) / (2 * n - 1).clamp(min=1)
        return total / (n - 1).clamp(min=1)


def batch_pairs(
    weight: Tensor, labels: Tensor, s: float = 2.0, *, half_space: bool = False, angular: bool = True
) -> Tensor:
    r"""Mean energy of the distinct classes of a batch among themselves.

    Args:
        weight: Class vectors ``(C, d)``.
        labels: Classes of the batch ``(m,)``.
        s: Riesz exponent; 0 is the logarithmic energy.
        half_space: Count the mirror image of every vector as a vector.
        angular: Take angles as distances, as the public heads with this term do, not chords.

    Returns:
        Scalar in float32 or wider; 0 with fewer than two classes.

    Example:
        >>> batch_pairs(torch.eye(4), torch.tensor([0, 2, 2]), angular=False)
        tensor(0.5000)
    """
    check_range("s", s, 0)
    _check(weight, labels)
    # What comes again is zero, which the energy leaves out: no shape depends on the labels.
    rows = torch.where(_first(labels).unsqueeze(1), whole(weight, own=True)[labels], 0.0)
    return hyperspherical_energy(rows, s, half_space=half_space, angular=angular)


def subset(vectors: Tensor, size: int, generator: torch.Generator | None = None) -> Tensor:
    """Rows drawn without replacement: their mean energy is an unbiased estimate of that of all, gradient included.

    Args:
        vectors: ``(n, d)``.
        size: Number of rows, at least 2; all rows where there are no more.
        generator: Source of randomness, on any device.

    Returns:
        ``(size, d)``.

    Example:
        >>> subset(torch.randn(100, 8), 10).shape
        torch.Size([10, 8])
    """
    check_range("size", size, 2)
    device = vectors.device if generator is None else generator.device
    order = torch.randperm(len(vectors), generator=generator, device=device).to(vectors.device)
    return whole(vectors)[agreed(order, mesh_of(vectors))[:size]]


class InterClass(nn.Module):
    r"""Any head plus the energy of its class vectors: SphereFace+ is this around A-Softmax.

    .. math:: L = L_\text{head} + \lambda E

    Args:
        head: Head that is called with features and labels and has class vectors ``weight`` ``(C, d)``.
        weight: :math:`\lambda`, to be tuned between 0.1 and 10.
        form: ``"all"`` for :func:`batch_versus_all`, ``"pairs"`` for :func:`batch_pairs`.
        **options: Those of that function.

    Shape:
        features ``(B, d)``, labels ``(B,)``, loss as that of the head.

    Example:
        >>> import hypersphere as hs
        >>> head = InterClass(hs.losses.create("arcface", 8, 10), weight=0.5)
        >>> head(torch.randn(4, 8), torch.tensor([0, 1, 2, 2])).shape
        torch.Size([])
    """

    def __init__(self, head: nn.Module, weight: float = 1.0, form: str = "all", **options: Any) -> None:
        super().__init__()
        check_range("weight", weight, 0)
        check_choice("form", form, ("all", "pairs"))
        if not isinstance(getattr(head, "weight", None), Tensor) or getattr(head, "subcentres", 1) != 1:
            raise ArgumentError("head", f"must have one class vector a class, as 'weight', got {type(head).__name__}")
        if form == "all" and getattr(head, "ignore_index", None) is not None:
            options.setdefault("ignore_index", head.ignore_index)
        self.head, self.energy_weight, self.form, self.options = head, weight, form, options

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """The head's loss with the energy added to it (to the loss of every sample, where these are not reduced)."""
        energy = batch_versus_all if self.form == "all" else batch_pairs
        loss: Tensor = self.head(features, labels)
        weight = self.head.weight
        assert isinstance(weight, Tensor)
        return loss + self.energy_weight * energy(weight, labels, **self.options)

    def extra_repr(self) -> str:
        """The options."""
        return f"weight={self.energy_weight:g}, form={self.form!r}"


@torch.no_grad()
def caffe_inter_class(weight: Tensor, labels: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    r"""What the inter-class layer of the released SphereFace+ code adds to the gradient, taken at face value.

    Not the gradient of the energy: every sample adds :math:`-\frac{4\alpha}{m S^2 + 10^{-5}} (u_{y_i} - \hat u)` to the
    gradient of its class, with :math:`\hat u` the mean of all class directions over the root of its squared norm plus
    1e-5, and S the mean over classes of the summed squared chords to the batch's classes. For comparisons only; for
    training take :func:`batch_versus_all`.

    Args:
        weight: Class vectors ``(C, d)``; their directions are used.
        labels: Classes of the batch ``(m,)``.
        alpha: Strength; its scale has nothing to do with that of an energy's weight.

    Returns:
        S ``()``, and what is added to the gradient of the directions ``(C, d)``.

    Example:
        >>> distance, gradient = caffe_inter_class(torch.eye(3), torch.tensor([0]), alpha=10.0)
        >>> distance, gradient[1:].count_nonzero()
        (tensor(1.3333), tensor(0))
    """
    _check(weight, labels)
    units = unit_vectors(at_least_float32(whole(weight)))
    own, mean = units[labels], units.mean(0)
    m = len(own)
    # Squared chords of unit vectors, of which the products add up to those of the sums.
    distance = 2 * (m - own.sum(0) @ mean)
    aim = mean * (mean.square().sum() + 1e-5).rsqrt()
    strength = -4 * alpha / (m * distance.square() + 1e-5)
    return distance, torch.zeros_like(units).index_add_(0, labels, strength * (own - aim))


def _check(weight: Tensor, labels: Tensor) -> None:
    if weight.dim() != 2:
        raise ArgumentError("weight", f"must have shape (C, d), got {tuple(weight.shape)}")
    if labels.dim() != 1:
        raise ArgumentError("labels", f"must have shape (m,), got {tuple(labels.shape)}")
