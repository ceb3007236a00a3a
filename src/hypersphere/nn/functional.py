r"""Decoupled operators over all patches of a map: one convolution, one norm map, one pointwise pass.

With directions :math:`\hat w` of the kernels and :math:`E = \|x\|^2` of the patches (one map for each group of
channels, a sum of squares over channels and then over windows), the response is a pointwise function of the convolution
:math:`z = \hat w * x` and of :math:`E`. The custom backward pass needs the output and :math:`E` only, from which
it finds the angles again, and costs one more pass over the activations than that of a convolution.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hypersphere.angular import Angular, Cosine
from hypersphere.geometry import (
    at_least_float32,
    full_precision,
    in_forward_mode,
    patch_squared_norms,
    safe_sqrt,
    window_sums,
)
from hypersphere.nn import fused
from hypersphere.nn.operators import Operator, is_zero, measures_radius
from hypersphere.nn.sharding import alongside

CACHED = 2**16
"""Elements of a map that are worked on together on a CPU."""


class Window(NamedTuple):
    """Where the patches of a convolution lie; a transposed one sees its input spread out by the stride."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    output_padding: tuple[int, ...] | None = None  # of a transposed convolution

    @property
    def transposed(self) -> bool:
        """Whether this is a transposed convolution."""
        return self.output_padding is not None

    def axes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Size, step, padding and spacing along each axis."""
        return tuple(zip(self.kernel, self.stride, self.padding, self.dilation, strict=True))

    def output_size(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """Spatial size of the output for an input of this spatial size."""
        if self.output_padding is None:
            return tuple(
                (n + 2 * p - (k - 1) * d - 1) // s + 1 for n, (k, s, p, d) in zip(size, self.axes(), strict=True)
            )
        return tuple(
            (n - 1) * s - 2 * p + (k - 1) * d + o + 1
            for n, (k, s, p, d), o in zip(size, self.axes(), self.output_padding, strict=True)
        )


def decoupled(
    x: Tensor,
    directions: Tensor,
    operator: Operator,
    window: Window | None = None,
    *,
    radius: Tensor | None = None,
    mean: Tensor | None = None,
    k: Tensor | None = None,
    kernel_norms: Tensor | None = None,
    sync: bool = False,
) -> tuple[Tensor, Tensor | None]:
    r"""The operator for every patch of ``x`` and every kernel.

    Args:
        x: ``(N, C, *spatial)``, or ``(N, C)`` without a window.
        directions: Kernels divided by their norms (:meth:`Operator.direction`) in the type of ``x``:
            ``(O, C / groups, *kernel)``, of a transposed convolution ``(C, O / groups, *kernel)``; ``(O, C)`` without a
            window.
        operator: The operator.
        window: Stride, padding, dilation and groups; ``None`` is a linear layer.
        radius: Radius :math:`\rho` of each kernel, ``(O,)``, for the operators that have one.
        mean: Mean patch norm of each group by which the radius is multiplied, ``(groups,)``; ``None`` takes the mean
            over this batch where the operator asks for one.
        k: Steepness of the sigmoid, ``(O,)`` or ``(1,)``; by default the operator's own.
        kernel_norms: Norms of the kernels, ``(O,)``, for a ``weighting`` other than ``"none"``.
        sync: Take the mean over the batches of all processes of ``torch.distributed``.

    Returns:
        The responses, ``(N, O, *output spatial)`` in the type of ``x``, and the mean patch norm of each group over the
        batch, ``(groups,)``, where it was needed.

    Example:
        >>> from hypersphere.nn.operators import Sphere
        >>> w, _ = Sphere().direction(torch.randn(5, 4, 3, 3), (1, 2, 3))
        >>> decoupled(torch.randn(2, 4, 8, 8), w, Sphere(), Window((3, 3), (1, 1), (1, 1), (1, 1)))[0].shape
        torch.Size([2, 5, 8, 8])
    """
    with full_precision(x):
        if _by_hand(operator):
            y, _, batch_mean = _Decoupled.apply(x, directions, radius, mean, k, operator, window, sync)
            return y, batch_mean if batch_mean.numel() else None
        return _composed(x, directions, radius, mean, k, operator, window, sync, kernel_norms)


def _composed(
    x: Tensor,
    directions: Tensor,
    radius: Tensor | None,
    mean: Tensor | None,
    k: Tensor | None,
    operator: Operator,
    window: Window | None,
    sync: bool,
    kernel_norms: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The response as torch's own operations, which autograd, export and function transforms see through."""
    squared_norm = _squared_norms(x, window)
    batch_mean = _batch_mean(squared_norm, operator, sync) if mean is None and radius is not None else None
    if batch_mean is not None:
        mean = batch_mean.detach() if measures_radius(operator) and operator.detach_mean else batch_mean
    products = at_least_float32(_product(x, directions, window))
    groups, shape = squared_norm.shape[1], _per_kernel(squared_norm)
    y = operator.response(
        _by_group(products, groups),
        _by_group(squared_norm, groups),
        1.0 if radius is None else _scaled(radius, mean).view(shape),
        None if k is None else k.expand(products.shape[1]).view(shape),
        None if kernel_norms is None else kernel_norms.view(shape),
        None if radius is None else radius.view(shape),
    )
    y = y.reshape(products.shape).to(x.dtype)
    if window is None and operator.g.of_angle and len(directions):
        scaled = None if radius is None else _scaled(radius, mean)
        nearest, exact = _nearest(products, x, directions, squared_norm, scaled, k, operator, kernel_norms, radius)
        y = y.scatter(1, nearest, exact.to(y.dtype))
    return y, batch_mean


def _nearest(
    products: Tensor,
    x: Tensor,
    directions: Tensor,
    squared_norm: Tensor,
    scaled: Tensor | None,
    k: Tensor | None,
    operator: Operator,
    kernel_norms: Tensor | None = None,
    radius: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The kernel next to the line of every sample of a linear layer, ``(N, 1)``, and the response of that one.

    A cosine next to 1 or -1 leaves half of the digits of its angle. Unless kernels lie on each other, one of them at
    most comes there, whose angle is taken of the vectors.
    """
    nearest = products.detach().abs().argmax(1)

    def own(of_kernels: Tensor | None) -> Tensor | None:
        return None if of_kernels is None else of_kernels.expand(len(directions)).index_select(0, nearest).unsqueeze(1)

    direction, x = at_least_float32(directions.index_select(0, nearest)), at_least_float32(x)
    lost = (1 - direction.square().sum(1)).clamp(min=0)
    if not operator.eps:
        lost = lost.round()  # of a kernel of zeros all, of others what rounding has left
    exact = operator.response(
        (direction * x).sum(1, keepdim=True),
        squared_norm,
        1.0 if scaled is None else own(scaled),  # type: ignore[arg-type]
        own(k),
        own(kernel_norms),
        own(radius),
        operator.angle(direction, x, squared_norm.squeeze(1), lost).unsqueeze(1),
    )
    return nearest.unsqueeze(1), exact


def _by_hand(operator: Operator) -> bool:
    """Whether the custom backward pass serves: unweighted, with the slopes of h and an invertible g."""
    # Up to torch 2.11 is_exporting() is True inside torch.compile, too, which the flag is not.
    if torch.compiler._is_exporting_flag or torch._C._are_functorch_transforms_active() or in_forward_mode():
        return False
    known = type(operator.g).cosine_at is not Angular.cosine_at
    return known and operator.weighting == "none" and operator.knows_slopes


def _product(x: Tensor, weight: Tensor, window: Window | None) -> Tensor:
    """The inner products of all patches and kernels."""
    if window is None:
        return x @ weight.mT
    return torch.ops.aten.convolution(
        x,
        weight,
        None,
        window.stride,
        window.padding,
        window.dilation,
        window.transposed,
        window.output_padding or (0,) * len(window.kernel),
        window.groups,
    )


def _squared_norms(x: Tensor, window: Window | None) -> Tensor:
    """Squared norms of all patches, ``(N, groups, *output spatial)``."""
    if window is None:
        return at_least_float32(x).square().sum(1, keepdim=True)
    size = window.output_size(tuple(x.shape[2:])) if window.transposed else None
    return patch_squared_norms(
        x, window.kernel, window.stride, window.padding, window.dilation, window.groups, output_size=size
    )


def _over_processes(mean: Tensor, sync: bool) -> Tensor:
    """The mean of what all processes have, which is also how its gradient travels back."""
    if not (sync and dist.is_available() and dist.is_initialized()):
        return mean
    from torch.distributed.nn.functional import all_reduce  # noqa: PLC0415 (only where torch is built with it)

    return all_reduce(mean) / dist.get_world_size()


def _batch_mean(squared_norm: Tensor, operator: Operator, sync: bool) -> Tensor | None:
    """Mean norm of the patches of each group over a batch, ``(groups,)``; 1 for an empty batch."""
    if not measures_radius(operator):
        return None
    if not squared_norm.numel():
        return _over_processes(squared_norm.new_ones(squared_norm.shape[1]), sync)
    norms = (squared_norm + operator.eps).sqrt() if operator.eps else safe_sqrt(squared_norm)
    return _over_processes(norms.mean((0, *range(2, squared_norm.dim()))), sync)


def _by_group(maps: Tensor, groups: int) -> Tensor:
    """``(N, O, *spatial)`` as ``(N, groups, O / groups, *spatial)``; of one group as it is.

    Squared norms, ``(N, groups, *spatial)``, broadcast to it in the same form. (With an axis of length 1 for one group,
    torch.compile would not keep channels-last maps channels-last.)
    """
    return maps if groups == 1 else maps.unflatten(1, (groups, -1))


def _per_kernel(squared_norm: Tensor) -> tuple[int, ...]:
    """Shape in which one number a kernel broadcasts to maps :func:`_by_group`."""
    groups, after = squared_norm.shape[1], (1,) * (squared_norm.dim() - 2)
    return (-1, *after) if groups == 1 else (groups, -1, *after)


def _scaled(radius: Tensor, mean: Tensor | None) -> Tensor:
    """Effective radius of each kernel: its radius in units of its group's mean norm."""
    if mean is None:
        return radius
    # A mean of 0 (a batch of zeros) must not make 0 / 0 of responses that are 0 in any case.
    mean = alongside(torch.where(mean > torch.finfo(mean.dtype).tiny ** 0.5, mean, 1.0), radius)
    return (radius.unflatten(0, (len(mean), -1)) * mean.unsqueeze(1)).flatten()


class _Decoupled(torch.autograd.Function):
    """The response with a custom backward pass, which keeps the input, the output and the norm map."""

    @staticmethod
    def forward(
        x: Tensor,
        directions: Tensor,
        radius: Tensor | None,
        mean: Tensor | None,
        k: Tensor | None,
        operator: Operator,
        window: Window | None,
        sync: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernels = fused.usable(x, directions.shape[0], operator, window)
        squared_norm = fused.squared_norm(x, window) if kernels else _squared_norms(x, window)
        batch_mean = _batch_mean(squared_norm, operator, sync) if mean is None and radius is not None else None
        scaled = None if radius is None else _scaled(radius, mean if batch_mean is None else batch_mean)
        products = _product(x, directions, window)
        if kernels:
            y = fused.respond(products, squared_norm, scaled, k, operator)
        else:
            groups, shape = squared_norm.shape[1], _per_kernel(squared_norm)
            scaled_view = 1.0 if scaled is None else scaled.view(shape)
            k_view = None if k is None else k.expand(products.shape[1]).view(shape)
            # No view: it may be changed in place. And torch.compile keeps what was copied; else it would keep the
            # products to find the output again, at the cost of another response in every layer behind.
            y = torch.empty_like(products)
            for s in _slices(products):
                part = operator.response(
                    at_least_float32(_by_group(products[s], groups)),
                    _by_group(squared_norm[s], groups),
                    scaled_view,
                    k_view,
                )
                y[s].copy_(part.reshape(y[s].shape))
        if window is None and operator.g.of_angle and len(directions):
            nearest, exact = _nearest(products, x, directions, squared_norm, scaled, k, operator)
            y.scatter_(1, nearest, exact.to(y.dtype))
        return y, squared_norm, squared_norm.new_empty(0) if batch_mean is None else batch_mean

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        x, directions, radius, mean, k, operator, window, sync = inputs
        y, squared_norm, batch_mean = output
        ctx.operator, ctx.window, ctx.sync = operator, window, sync
        ctx.mark_non_differentiable(squared_norm, batch_mean)
        ctx.set_materialize_grads(False)
        ctx.saved_output = _saves_output(y)
        if ctx.saved_output:
            ctx.save_for_backward(x, directions, radius, mean, k, squared_norm, batch_mean, y)
        else:
            # Saved like the others, the output could not be changed in place, as an nn.ReLU(inplace=True) wants to.
            ctx.output, ctx.version = y.detach(), y._version
            ctx.save_for_backward(x, directions, radius, mean, k, squared_norm, batch_mean)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        operator, window = ctx.operator, ctx.window
        if grads[0] is None:
            return (None,) * 8
        saved = ctx.saved_tensors  # once: a checkpoint computes them anew each time
        x, directions, radius, mean, k, squared_norm, batch_mean = saved[:7]
        if not torch.compiler.is_compiling() and (torch.is_grad_enabled() or _is_batched(grads[0])):
            inputs = (x, directions, radius, mean, k)
            return *_differentiable_gradients(inputs, operator, window, ctx.sync, grads[0]), None, None, None
        if ctx.saved_output:
            y = saved[7]
        else:
            y, ctx.output = ctx.output, None  # let go of now, not with the graph
            if y is None or y._version != ctx.version:  # a second pass through the graph, or changed in place
                own_mean = batch_mean if batch_mean.numel() else mean
                with full_precision(x):
                    y, _, _ = _Decoupled.forward(x, directions, radius, own_mean, k, operator, window, False)
        with full_precision(x):
            from_batch = batch_mean.numel() > 0
            scaled = None if radius is None else _scaled(radius, batch_mean if from_batch else mean)
            kernels = fused.usable(x, directions.shape[0], operator, window)
            respond = fused.respond_backward if kernels else _respond_backward
            d_products, d_squared_norm, d_scaled, d_k = respond(grads[0], y, squared_norm, scaled, k, operator)
            d_radius = d_norms = None
            if radius is not None and scaled is not None and d_scaled is not None:
                d_radius = d_scaled * scaled / radius
                if from_batch and not operator.detach_mean:
                    d_mean = _over_processes((d_scaled * radius).unflatten(0, (len(batch_mean), -1)).sum(1), ctx.sync)
                    d_norms = d_mean / max(squared_norm.numel() // squared_norm.shape[1], 1)
            d_x, d_directions = _product_backward(d_products, x, directions, window, ctx.needs_input_grad[:2])
            if d_x is not None:
                add = fused.add_norm_gradient if kernels else _add_norm_gradient
                d_x = add(d_x, x, d_squared_norm, window, squared_norm, d_norms, operator.eps)
        return d_x, d_directions, d_radius, None, d_k, None, None, None


def _is_batched(grad: Tensor) -> bool:
    """Whether it stands for many gradients: ``is_grads_batched`` of torch, which knows torch's own operations only."""
    return torch._C._functorch.is_legacy_batchedtensor(grad)


def _saves_output(y: Tensor) -> bool:
    """Whether the output is saved the usual way: where what is saved may be computed again or kept elsewhere."""
    return (
        torch.compiler.is_compiling()
        or y.is_inference()
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    )


def _differentiable_gradients(
    inputs: tuple[Tensor | None, ...], operator: Operator, window: Window | None, sync: bool, d_y: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs by way of torch's own operations, which can be differentiated again."""
    again = torch.is_grad_enabled()
    with full_precision(d_y), torch.enable_grad():
        # Aliases: one input may have been computed from another, and that path is not ours to follow.
        inputs = tuple(t.view_as(t) if t is not None and t.requires_grad else t for t in inputs)
        wanted = [t for t in inputs if t is not None and t.requires_grad]
        x, directions, radius, mean, k = inputs
        assert x is not None and directions is not None
        y, _ = _composed(x, directions, radius, mean, k, operator, window, sync)
    found = iter(torch.autograd.grad(y, wanted, d_y, create_graph=again, allow_unused=True))
    return tuple(next(found) if t is not None and t.requires_grad else None for t in inputs)


def _slices(maps: Tensor) -> list[slice]:
    """Samples that are worked on together: on a CPU as many as its cache holds with all that is computed of them."""
    count = len(maps)
    if maps.device.type != "cpu" or torch.compiler.is_compiling() or maps.numel() <= CACHED:
        return [slice(count)]
    step = max(CACHED * count // maps.numel(), 1)
    return [slice(first, first + step) for first in range(0, count, step)]


def _respond_backward(
    d_y: Tensor, y: Tensor, squared_norm: Tensor, radius: Tensor | None, k: Tensor | None, operator: Operator
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of the products, the squared norms, the effective radius and k, from the output alone."""
    parts = [_respond_backward_part(d_y[s], y[s], squared_norm[s], radius, k, operator) for s in _slices(y)]
    if len(parts) == 1:
        return parts[0]
    d_products, d_squared_norm, d_radius, d_k = zip(*parts, strict=True)
    return (
        torch.cat(d_products),
        torch.cat(d_squared_norm),
        None if radius is None else torch.stack(d_radius).sum(0),
        None if k is None else torch.stack(d_k).sum(0),
    )


def _respond_backward_part(
    d_y: Tensor, y: Tensor, squared_norm: Tensor, radius: Tensor | None, k: Tensor | None, operator: Operator
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The same for some samples."""
    g: Any = operator.g
    groups, shape = squared_norm.shape[1], _per_kernel(squared_norm)
    kernel_axis, place_axes = 1 - squared_norm.dim(), [0, *range(2 - squared_norm.dim(), 0)]  # of maps by group
    own_k = () if k is None else (k.expand(y.shape[1]).view(shape),)
    scaled: Any = 1.0 if radius is None else radius.view(shape)
    squared = _by_group(squared_norm, groups)
    t, inverse = operator.norms(squared)
    upstream, value = (at_least_float32(_by_group(part, groups)) for part in (d_y, y))
    h = operator.magnitude(t, scaled)
    d_radius = d_k = None
    if type(g) is Cosine:
        # The output is the products over t / h; this is the gradient of t / h, times -1.
        exact = upstream * (h * inverse)
        d_products = exact.to(y.dtype)
        # Made of what is written in any case: the sums over kernels and over places each read that anew. (But what
        # float16 rounds to 0 may count in a sum.)
        against = (exact if y.dtype == torch.float16 else at_least_float32(d_products)) * value
        by_norm, by_radius = operator.divisor_slopes(t, scaled)
        if radius is None:
            d_norm = against.sum(kernel_axis, keepdim=True) * -by_norm
        else:
            d_norm = -(against * by_norm).sum(kernel_axis, keepdim=True)
            d_radius = -(against * by_radius).sum(place_axes).flatten()
    else:
        upstream = torch.where(is_zero(squared), 0.0, upstream)
        value = value / h
        cosines = g.cosine_at(value, *own_k)
        slope = h * g.slope_at(value, cosines, *own_k) * inverse
        d_products = (upstream * slope).to(y.dtype)
        by_norm = operator.magnitude_slope(t, scaled) * value - slope * cosines
        d_norm = (upstream * by_norm).sum(kernel_axis, keepdim=True)
        if radius is not None:
            d_radius = (upstream * operator.radius_slope(t, scaled) * value).sum(place_axes).flatten()
        if k is not None:
            d_k = (upstream * h * g.k_slope_at(value, *own_k)).sum(place_axes).flatten().sum_to_size(k.shape)
    return d_products.reshape(y.shape), (d_norm * (inverse / 2)).reshape(squared_norm.shape), d_radius, d_k


def _product_backward(
    d_y: Tensor, x: Tensor, weight: Tensor, window: Window | None, needed: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the input and the weight of :func:`_product`."""
    if window is None:
        return d_y @ weight if needed[0] else None, d_y.mT @ x if needed[1] else None
    d_x, d_weight, _ = torch.ops.aten.convolution_backward(
        d_y,
        x,
        weight,
        None,
        window.stride,
        window.padding,
        window.dilation,
        window.transposed,
        window.output_padding or (0,) * len(window.kernel),
        window.groups,
        [needed[0], needed[1], False],
    )
    return d_x, d_weight


def _add_norm_gradient(
    d_x: Tensor,
    x: Tensor,
    d_squared_norm: Tensor,
    window: Window | None,
    squared_norm: Tensor,
    d_norms: Tensor | None,
    eps: float,
) -> Tensor:
    """``d_x`` plus what reaches ``x`` through the squared norms of its patches.

    ``d_norms`` is the gradient of every patch norm of a group through their mean, ``(groups,)``.
    """
    if d_norms is not None:
        inverse = torch.where(
            is_zero(squared_norm), 1.0, squared_norm + eps
        ).rsqrt()  # where x is 0 this does not count
        d_squared_norm = d_squared_norm + (d_norms / 2).view(-1, *(1,) * (squared_norm.dim() - 2)) * inverse
    if window is not None:
        if window.transposed:
            visible: Any = (..., *(slice(n) for n in x.shape[2:]))
            d_squared_norm = window_sums(d_squared_norm, window.axes())[visible]
        else:
            d_squared_norm = window_sums(d_squared_norm, window.axes(), x.shape[2:])
    share = _by_group(d_squared_norm, d_squared_norm.shape[1])
    grouped_x, grouped_d_x = (_by_group(part, d_squared_norm.shape[1]) for part in (x, d_x))
    if x.dtype == d_squared_norm.dtype:
        return torch.addcmul(grouped_d_x, grouped_x, share, value=2).reshape(x.shape)
    return (grouped_d_x + (2 * at_least_float32(grouped_x) * share).to(x.dtype)).reshape(x.shape)
