"""The pointwise passes of decoupled layers on NVIDIA GPUs, in Triton; the torch code in functional.py is the oracle.

A layer runs four small kernels beside its convolutions: squared norms of the patches, the response (in place of the
convolution's output), the gradients of both by the output, and what the input's gradient receives through the norms.
Each reads and writes a map once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hypersphere import angular
from hypersphere.geometry import at_least_float32
from hypersphere.nn.operators import Ball, Linear, Log, Mix, Seg, Sphere, Tanh

if TYPE_CHECKING:
    from hypersphere.nn.functional import Window
    from hypersphere.nn.operators import Operator

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ImportError:  # pragma: no cover
    triton = None

MAGNITUDES = {
    Sphere: 0,
    Linear: 1,
    Log: 2,
    Mix: 3,
    Ball: 4,
    Tanh: 5,
    Seg: 6,
}
ANGULARS = {
    angular.Cosine: 0,
    angular.SquareCosine: 1,
    angular.ReluCosine: 2,
    angular.Linear: 3,
    angular.Sigmoid: 4,
}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 8192  # channels that one program holds
PROGRAMS = 132 * 16  # at most, where each adds up sums for every channel


def usable(x: Tensor, kernels: int, operator: Operator, window: Window | None) -> bool:
    """Whether this code serves: a GPU, no groups, not transposed, at most two spatial axes, operators known here.

    Compiled code does better without: it joins these passes with what comes before and after.
    """
    return (
        x.is_cuda
        and triton is not None
        and not torch.compiler.is_compiling()
        and x.device.index == torch.cuda.current_device()
        and torch.version.hip is None
        and x.dtype in _DTYPES
        and x.numel() > 0
        and max(x.shape[1], kernels) <= WIDEST
        and (window is None or (window.groups == 1 and not window.transposed and len(window.kernel) < 3))
        and type(operator) in MAGNITUDES
        and type(operator.angular) in ANGULARS
        and (operator.angular == angular.Linear() or not isinstance(operator.angular, angular.Linear))
        and getattr(operator, "parts", None) is None
    )


def usable_for_kernels(weight: Tensor, operator: Operator) -> bool:
    """Whether :func:`direction` serves."""
    return (
        weight.is_cuda
        and triton is not None
        and not torch.compiler.is_compiling()
        and weight.device.index == torch.cuda.current_device()
        and torch.version.hip is None
        and weight.dtype in _DTYPES
        and weight.numel() > 0
        and operator.weighting == "none"
        and not torch._C._are_functorch_transforms_active()
    )


def squared_norm(x: Tensor, window: Window | None) -> Tensor:
    """Squared norms of all patches, ``(N, 1, *output spatial)`` in float32."""
    if window is None:
        return _squared_norms(x, [1, 1], [1, 1], [0, 0], [1, 1], [1, 1])
    size = window.output_size(tuple(x.shape[2:]))
    flat = len(window.kernel) == 1
    two = [[1, *v] if flat else list(v) for v in (window.kernel, window.stride, window.dilation, size)]
    padding = [0, *window.padding] if flat else list(window.padding)
    return _squared_norms(x, two[0], two[1], padding, two[2], two[3]).view(x.shape[0], 1, *size)


def respond(
    products: Tensor, squared_norms: Tensor, radius: Tensor | None, k: Tensor | None, operator: Operator
) -> Tensor:
    """The response, written over ``products``."""
    products = _dense(products)
    _respond(products, squared_norms, radius, k, *_constants(operator))
    return products


def direction(weight: Tensor, operator: Operator, dtype: torch.dtype) -> Tensor:
    """Kernels ``(O, ...)`` divided by their norms, in ``dtype``; gradients are weighted where the operator says so."""
    return _Direction.apply(weight, operator, dtype)


class _Direction(torch.autograd.Function):
    """One pass over the kernels each way."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, operator: Operator, dtype: torch.dtype) -> Tensor:
        given, weight = weight, _dense(weight)
        out = torch.empty_like(weight, dtype=dtype)
        kernels, size = weight.shape[0], math.prod(weight.shape[1:])
        inverse = torch.empty(kernels, dtype=torch.float32, device=weight.device)
        block = min(_power_of_2(size), 2048)
        _direction_kernel[(kernels,)](weight, out, inverse, size, operator.eps, BLOCK=block, num_warps=4)
        ctx.save_for_backward(given, inverse)
        ctx.operator = operator
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        weight, inverse = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # a derivative of this one is wanted
            weight = weight.view_as(weight)
            again, _ = ctx.operator.direction(at_least_float32(weight), tuple(range(1, weight.dim())))
            return *torch.autograd.grad(again, weight, grads[0].to(again.dtype), create_graph=True), None, None
        weight = _dense(weight)
        gradient = grads[0].contiguous(memory_format=_format(weight))
        d_weight = torch.empty_like(weight)
        size = math.prod(weight.shape[1:])
        block = min(_power_of_2(size), 2048)
        _direction_backward_kernel[(weight.shape[0],)](
            weight,
            gradient,
            inverse,
            d_weight,
            size,
            WEIGHTED=ctx.operator.weighted_gradients,
            BLOCK=block,
            num_warps=4,
        )
        return d_weight, None, None


def respond_backward(
    d_y: Tensor, y: Tensor, squared_norms: Tensor, radius: Tensor | None, k: Tensor | None, operator: Operator
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of the products, the squared norms, the effective radius and k, from the output alone."""
    y = _dense(y)
    d_y = d_y.to(y.dtype).contiguous(memory_format=_format(y))
    d_products, d_squared_norm, d_radius, d_k = _respond_backward(
        d_y, y, squared_norms, radius, k, *_constants(operator)
    )
    return (
        d_products,
        d_squared_norm,
        None if radius is None else d_radius,
        None if k is None else d_k.sum_to_size(k.shape),
    )


def add_norm_gradient(
    d_x: Tensor,
    x: Tensor,
    d_squared_norm: Tensor,
    window: Window | None,
    squared_norms: Tensor | None = None,
    d_norms: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """``d_x`` plus what reaches ``x`` through the squared norms of its patches, written over ``d_x``.

    ``d_norms``, one number, is the gradient of every patch norm through their mean, on top of ``d_squared_norm``.
    """
    d_x = _dense(d_x)
    x = x.contiguous(memory_format=_format(d_x))
    mean = (
        d_squared_norm if squared_norms is None else squared_norms,
        d_squared_norm if d_norms is None else d_norms,
        eps,
    )
    with_mean = d_norms is not None
    if window is None:
        _add_norm_gradient(d_x, x, d_squared_norm, *mean, with_mean, [1, 1], [1, 1], [0, 0], [1, 1], [1, 1], [1, 1])
        return d_x
    flat = len(window.kernel) == 1
    values = (window.kernel, window.stride, window.padding, window.dilation, x.shape[2:], d_squared_norm.shape[2:])
    kernel, stride, padding, dilation, size, out = [[*v] for v in values]
    if flat:
        kernel, stride, padding, dilation = [1, *kernel], [1, *stride], [0, *padding], [1, *dilation]
        size, out = [1, *size], [1, *out]
    _add_norm_gradient(d_x, x, d_squared_norm, *mean, with_mean, kernel, stride, padding, dilation, size, out)
    return d_x


def _constants(operator: Operator) -> tuple[int, int, float, float, float, float]:
    """Numbers that say which operator a kernel computes."""
    g: Any = operator.angular
    beta = float(getattr(operator, "beta", 0.0))
    kind = MAGNITUDES[type(operator)]
    return kind, ANGULARS[type(g)], operator.alpha, beta, operator.eps, float(getattr(g, "k", 1.0))


def _format(x: Tensor) -> torch.memory_format:
    """Channels-last where the tensor is laid out so and not otherwise, too."""
    if x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def _dense(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=_format(x))


def _layout(x: Tensor) -> tuple[int, int, int, bool]:
    """Rows (images x places), places, channels, and whether the channels of a row lie side by side."""
    places = math.prod(x.shape[2:])
    last = x.dim() == 2 or places == 1 or _format(x) == torch.channels_last
    return x.shape[0] * places, places, x.shape[1], last


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _ceil(n: int, unit: int) -> int:
    return -(-n // unit)


def _tile(channels: int, last: bool, elements: int) -> tuple[int, int]:
    """Rows and channels of a tile."""
    width = min(_power_of_2(channels), WIDEST)
    return max(_power_of_2(max(elements // width, 1)), 1 if last else 32), width


if triton is not None:

    @triton.jit
    def _offsets(rows, columns, places, channels, LAST: tl.constexpr):
        if LAST:
            return rows.to(tl.int64)[:, None] * channels + columns[None, :]
        image = (rows // places).to(tl.int64) * (channels * places) + rows % places
        return image[:, None] + columns[None, :] * places

    @triton.jit
    def _square_sums_kernel(
        x, sums, count, places, channels, LAST: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
    ):
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        columns = tl.arange(0, WIDTH)
        mask = (rows < count)[:, None] & (columns < channels)[None, :]
        values = tl.load(x + _offsets(rows, columns, places, channels, LAST), mask=mask, other=0.0).to(tl.float32)
        tl.store(sums + rows, tl.sum(values * values, axis=1), mask=rows < count)

    @triton.jit
    def _window_kernel(
        sums, out, count, H, W, OH, OW, SH, SW, PH, PW, DH, DW, KH: tl.constexpr, KW: tl.constexpr, ROWS: tl.constexpr
    ):
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        image, place = rows // (OH * OW), rows % (OH * OW)
        top, left = place // OW * SH - PH, place % OW * SW - PW
        total = tl.zeros([ROWS], tl.float32)
        for tap in range(KH * KW):
            i, j = top + tap // KW * DH, left + tap % KW * DW
            inside = (rows < count) & (i >= 0) & (i < H) & (j >= 0) & (j < W)
            total += tl.load(sums + (image * H + i) * W + j, mask=inside, other=0.0)
        tl.store(out + rows, total, mask=rows < count)

    @triton.jit
    def _tanh(u):  # u >= 0
        decayed = tl.exp(-2 * u)
        return (1 - decayed) / (1 + decayed)

    @triton.jit
    def _sin(v):  # |v| <= pi / 2, where its series to the 11th power is exact to float32
        s = v * v
        p = -2.505210838544172e-08 * s + 2.755731922398589e-06
        p = p * s - 0.0001984126984126984
        p = p * s + 0.008333333333333333
        p = p * s - 0.16666666666666666
        return v + v * s * p

    @triton.jit
    def _magnitude(t, radius, inverse, alpha, beta, KIND: tl.constexpr):
        """Magnitude and its derivatives by the norm and the radius; ``inverse`` is that of the radius."""
        by_radius = tl.zeros_like(t)
        if KIND == 0:
            h, by_t = tl.full(t.shape, 1.0, tl.float32) * alpha, tl.zeros_like(t)
        elif KIND == 1:
            h, by_t = alpha * t, tl.full(t.shape, 1.0, tl.float32) * alpha
        elif KIND == 2:
            h, by_t = alpha * libdevice.log1p(t), alpha / (1 + t)
        elif KIND == 3:
            h, by_t = alpha * t + beta * libdevice.log1p(t), alpha + beta / (1 + t)
        elif KIND == 4:
            ratio, unit = t * inverse, alpha * inverse
            h = alpha * tl.minimum(ratio, 1.0)
            by_t = tl.where(ratio < 1, unit, 0.0)
            by_radius = -ratio * by_t
        elif KIND == 5:
            ratio, unit = t * inverse, alpha * inverse
            decayed = tl.exp(-2 * ratio)
            share = 1 / (1 + decayed)
            h = alpha * (1 - decayed) * share
            by_t = unit * 4 * decayed * share * share
            by_radius = -ratio * by_t
        else:
            within = t <= radius
            h = tl.where(within, alpha * t, beta * t + (alpha - beta) * radius)
            by_t = tl.where(within, alpha, beta)
            by_radius = tl.where(within, 0.0, alpha - beta)
        return h, by_t, by_radius

    @triton.jit
    def _angle_value(c, k, KIND: tl.constexpr):
        if KIND == 0:
            return c
        if KIND == 1:
            return c * tl.abs(c)
        if KIND == 2:
            return tl.maximum(c, 0.0)
        c = tl.minimum(tl.maximum(c, -1.0), 1.0)
        towards = libdevice.asin(c)
        if KIND == 3:
            return towards * 0.6366197723675814
        size = _tanh(tl.abs(towards) / (2 * k)) / _tanh(0.7853981633974483 / k)
        return tl.where(towards < 0, -size, size)

    @triton.jit
    def _angle_slopes(g, k, KIND: tl.constexpr):
        """Cosine at which the angular function is ``g``, and its derivatives there by the cosine and by k."""
        by_k = tl.zeros_like(g)
        if KIND == 0:
            return g, tl.full(g.shape, 1.0, tl.float32), by_k
        if KIND == 1:
            size = tl.sqrt(tl.abs(g))
            return tl.where(g < 0, -size, size), 2 * size, by_k
        if KIND == 2:
            return g, tl.where(g > 0, 1.0, 0.0), by_k
        g = tl.minimum(tl.maximum(g, -1.0), 1.0)
        if KIND == 3:
            c = _sin(g * 1.5707963267948966)
            slope = tl.full(g.shape, 0.6366197723675814, tl.float32)
        else:
            edge = 0.7853981633974483 / k
            largest = _tanh(edge)
            u = g * largest
            u = tl.minimum(tl.maximum(u, -0.9999998807907104), 0.9999998807907104)
            own = 0.5 * tl.log((1 + u) / (1 - u))
            slope = (1 - u * u) * (1 / (2 * k * largest))
            by_k = ((1 - largest * largest) * edge * u / largest - (1 - u * u) * own) / (k * largest)
            towards = tl.minimum(tl.maximum(2 * k * own, -1.5707963267948966), 1.5707963267948966)
            c = _sin(towards)
        return c, slope * tl.rsqrt(tl.maximum((1 - c) * (1 + c), 1.1920928955078125e-07)), by_k

    @triton.jit
    def _respond_kernel(
        z,
        squared_norms,
        radius,
        k,
        count,
        places,
        channels,
        alpha,
        beta,
        eps,
        own_k,
        MAGNITUDE: tl.constexpr,
        ANGULAR: tl.constexpr,
        K_STEP: tl.constexpr,
        LAST: tl.constexpr,
        ROWS: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        columns = tl.arange(0, WIDTH)
        inside = (rows < count)[:, None] & (columns < channels)[None, :]
        at = _offsets(rows, columns, places, channels, LAST)
        products = tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
        e = tl.load(squared_norms + rows, mask=rows < count, other=0.0)
        zero = e <= 1.1754943508222875e-38
        t = tl.sqrt(tl.where(zero, 1.0, e + eps))[:, None]
        inverse = tl.where(zero, 0.0, 1.0)[:, None] / t
        r = 1.0
        if MAGNITUDE >= 4:
            r = tl.load(radius + columns, mask=columns < channels, other=1.0)[None, :]
        steepness = own_k
        if K_STEP >= 0:
            steepness = tl.load(k + columns * K_STEP, mask=columns < channels, other=1.0)[None, :]
        h, _, _ = _magnitude(t, r, 1 / r, alpha, beta, MAGNITUDE)
        y = h * _angle_value(products * inverse, steepness, ANGULAR)
        tl.store(z + at, y.to(z.dtype.element_ty), mask=inside)

    @triton.jit
    def _respond_backward_kernel(
        d_y,
        y,
        squared_norms,
        radius,
        k,
        d_z,
        d_squared_norms,
        d_radius,
        d_k,
        count,
        places,
        channels,
        tiles_each,
        alpha,
        beta,
        eps,
        own_k,
        MAGNITUDE: tl.constexpr,
        ANGULAR: tl.constexpr,
        K_STEP: tl.constexpr,
        LAST: tl.constexpr,
        ROWS: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        program = tl.program_id(0)
        columns = tl.arange(0, WIDTH)
        r = 1.0
        if MAGNITUDE >= 4:
            r = tl.load(radius + columns, mask=columns < channels, other=1.0)[None, :]
        steepness = own_k
        if K_STEP >= 0:
            steepness = tl.load(k + columns * K_STEP, mask=columns < channels, other=1.0)[None, :]
        inverse_r = 1 / r
        # Added up element by element; across rows once, at the end.
        sum_radius = tl.zeros([ROWS, WIDTH], tl.float32)
        sum_k = tl.zeros([ROWS, WIDTH], tl.float32)
        for tile in range(tiles_each):
            rows = (program * tiles_each + tile) * ROWS + tl.arange(0, ROWS)
            inside = (rows < count)[:, None] & (columns < channels)[None, :]
            at = _offsets(rows, columns, places, channels, LAST)
            value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
            upstream = tl.load(d_y + at, mask=inside, other=0.0).to(tl.float32)
            e = tl.load(squared_norms + rows, mask=rows < count, other=0.0)
            zero = (e <= 1.1754943508222875e-38)[:, None]
            t = tl.sqrt(tl.where(zero, 1.0, e[:, None] + eps))
            upstream = tl.where(zero, 0.0, upstream)
            inverse_t = 1 / t
            h, by_t, by_radius = _magnitude(t, r, inverse_r, alpha, beta, MAGNITUDE)
            g = value * (1 / h)
            c, slope, by_k = _angle_slopes(g, steepness, ANGULAR)
            d = upstream * (h * inverse_t) * slope
            tl.store(d_z + at, d.to(d_z.dtype.element_ty), mask=inside)
            d_e = tl.sum(upstream * by_t * g - d * c, axis=1)[:, None] * (0.5 * inverse_t)
            tl.store(d_squared_norms + rows, tl.sum(d_e, axis=1), mask=rows < count)
            if MAGNITUDE >= 4:
                sum_radius += upstream * by_radius * g
            if K_STEP >= 0:
                sum_k += upstream * h * by_k
        if MAGNITUDE >= 4:
            tl.store(d_radius + program * channels + columns, tl.sum(sum_radius, axis=0), mask=columns < channels)
        if K_STEP >= 0:
            tl.store(d_k + program * channels + columns, tl.sum(sum_k, axis=0), mask=columns < channels)

    @triton.jit
    def _add_kernel(
        d_x,
        x,
        d_squared_norms,
        squared_norms,
        d_norms,
        eps,
        count,
        places,
        channels,
        H,
        W,
        OH,
        OW,
        SH,
        SW,
        PH,
        PW,
        DH,
        DW,
        KH: tl.constexpr,
        KW: tl.constexpr,
        MEAN: tl.constexpr,
        LAST: tl.constexpr,
        ROWS: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        columns = tl.arange(0, WIDTH)
        image, place = rows // (H * W), rows % (H * W)
        bottom, right = place // W + PH, place % W + PW
        total = tl.zeros([ROWS], tl.float32)
        norm = 0.0
        if MEAN:
            norm = 0.5 * tl.load(d_norms)
        for tap in range(KH * KW):
            i, j = bottom - tap // KW * DH, right - tap % KW * DW
            reached = (rows < count) & (i >= 0) & (j >= 0) & (i % SH == 0) & (j % SW == 0)
            i, j = i // SH, j // SW
            reached = reached & (i < OH) & (j < OW)
            at = (image * OH + i) * OW + j
            total += tl.load(d_squared_norms + at, mask=reached, other=0.0)
            if MEAN:
                e = tl.load(squared_norms + at, mask=reached, other=0.0)
                total += tl.where(e <= 1.1754943508222875e-38, 0.0, norm * tl.rsqrt(e + eps))
        inside = (rows < count)[:, None] & (columns < channels)[None, :]
        at = _offsets(rows, columns, places, channels, LAST)
        values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(d_x + at, mask=inside, other=0.0).to(tl.float32)
        gradient += 2 * values * total[:, None]
        tl.store(d_x + at, gradient.to(d_x.dtype.element_ty), mask=inside)

    @triton.jit
    def _direction_kernel(w, out, inverse, size, eps, BLOCK: tl.constexpr):
        kernel = tl.program_id(0)
        start = kernel.to(tl.int64) * size
        total = tl.zeros([BLOCK], tl.float32)
        for first in range(0, size, BLOCK):
            at = first + tl.arange(0, BLOCK)
            values = tl.load(w + start + at, mask=at < size, other=0.0).to(tl.float32)
            total += values * values
        squared_norm = tl.sum(total, axis=0) + eps
        scale = tl.where(squared_norm <= 1.1754943508222875e-38, 0.0, 1 / tl.sqrt(squared_norm))
        tl.store(inverse + kernel, scale)
        for first in range(0, size, BLOCK):
            at = first + tl.arange(0, BLOCK)
            values = tl.load(w + start + at, mask=at < size, other=0.0).to(tl.float32)
            tl.store(out + start + at, (values * scale).to(out.dtype.element_ty), mask=at < size)

    @triton.jit
    def _direction_backward_kernel(w, gradient, inverse, d_w, size, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
        kernel = tl.program_id(0)
        start = kernel.to(tl.int64) * size
        scale = tl.load(inverse + kernel)
        total = tl.zeros([BLOCK], tl.float32)
        for first in range(0, size, BLOCK):
            at = first + tl.arange(0, BLOCK)
            values = tl.load(w + start + at, mask=at < size, other=0.0).to(tl.float32)
            total += values * tl.load(gradient + start + at, mask=at < size, other=0.0).to(tl.float32)
        along = tl.sum(total, axis=0) * scale * scale
        factor = scale
        if WEIGHTED:
            factor = tl.where(scale > 0, 1.0, 0.0)
        for first in range(0, size, BLOCK):
            at = first + tl.arange(0, BLOCK)
            values = tl.load(w + start + at, mask=at < size, other=0.0).to(tl.float32)
            upstream = tl.load(gradient + start + at, mask=at < size, other=0.0).to(tl.float32)
            result = factor * (upstream - along * values)
            tl.store(d_w + start + at, result.to(d_w.dtype.element_ty), mask=at < size)

    def _warps(rows: int, width: int) -> int:
        return 8 if rows * width > 4096 else 4

    def _squared_norms(
        x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], size: list[int]
    ) -> Tensor:
        x = _dense(x)
        count, places, channels, last = _layout(x)
        rows, width = _tile(channels, last, 2048)
        sums = torch.empty(x.shape[0], places, dtype=torch.float32, device=x.device)
        _square_sums_kernel[(_ceil(count, rows),)](
            x, sums, count, places, channels, LAST=last, ROWS=rows, WIDTH=width, num_warps=_warps(rows, width)
        )
        if kernel == [1, 1] and stride == [1, 1] and padding == [0, 0]:
            return sums.view(x.shape[0], 1, *x.shape[2:])
        h, w = (1, x.shape[2]) if x.dim() == 3 else (x.shape[2], x.shape[3])
        out = torch.empty(x.shape[0], 1, *size, dtype=torch.float32, device=x.device)
        _window_kernel[(_ceil(out.numel(), 256),)](
            sums, out, out.numel(), h, w, *size, *stride, *padding, *dilation, KH=kernel[0], KW=kernel[1], ROWS=256
        )
        return out

    def _respond(
        z: Tensor,
        squared_norms: Tensor,
        radius: Tensor | None,
        k: Tensor | None,
        magnitude: int,
        angular: int,
        alpha: float,
        beta: float,
        eps: float,
        own_k: float,
    ) -> None:
        count, places, channels, last = _layout(z)
        rows, width = _tile(channels, last, 2048)
        step = -1 if k is None else int(k.numel() > 1)
        _respond_kernel[(_ceil(count, rows),)](
            z,
            squared_norms,
            z if radius is None else radius,
            z if k is None else k,
            count,
            places,
            channels,
            alpha,
            beta,
            eps,
            own_k,
            MAGNITUDE=magnitude,
            ANGULAR=angular,
            K_STEP=step,
            LAST=last,
            ROWS=rows,
            WIDTH=width,
            num_warps=_warps(rows, width),
        )

    def _respond_backward(
        d_y: Tensor,
        y: Tensor,
        squared_norms: Tensor,
        radius: Tensor | None,
        k: Tensor | None,
        magnitude: int,
        angular: int,
        alpha: float,
        beta: float,
        eps: float,
        own_k: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count, places, channels, last = _layout(y)
        rows, width = _tile(channels, last, 1024)
        tiles = _ceil(count, rows)
        sums = radius is not None or k is not None
        tiles_each = _ceil(tiles, PROGRAMS) if sums else 1
        programs = _ceil(tiles, tiles_each)
        d_z, d_squared_norms = torch.empty_like(y), torch.empty_like(squared_norms)
        d_radius = squared_norms.new_empty((programs if radius is not None else 0, channels))
        d_k = squared_norms.new_empty((programs if k is not None else 0, channels))
        _respond_backward_kernel[(programs,)](
            d_y,
            y,
            squared_norms,
            y if radius is None else radius,
            y if k is None else k,
            d_z,
            d_squared_norms,
            d_radius,
            d_k,
            count,
            places,
            channels,
            tiles_each,
            alpha,
            beta,
            eps,
            own_k,
            MAGNITUDE=magnitude,
            ANGULAR=angular,
            K_STEP=-1 if k is None else int(k.numel() > 1),
            LAST=last,
            ROWS=rows,
            WIDTH=width,
            num_warps=_warps(rows, width),
        )
        return d_z, d_squared_norms, d_radius.sum(0), d_k.sum(0)

    def _add_norm_gradient(
        d_x: Tensor,
        x: Tensor,
        d_squared_norms: Tensor,
        squared_norms: Tensor,
        d_norms: Tensor,
        eps: float,
        with_mean: bool,
        kernel: list[int],
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        size: list[int],
        out: list[int],
    ) -> None:
        count, places, channels, last = _layout(x)
        rows, width = _tile(channels, last, 2048)
        _add_kernel[(_ceil(count, rows),)](
            d_x,
            x,
            d_squared_norms,
            squared_norms,
            d_norms,
            eps,
            count,
            places,
            channels,
            *size,
            *out,
            *stride,
            *padding,
            *dilation,
            KH=kernel[0],
            KW=kernel[1],
            MEAN=with_mean,
            LAST=last,
            ROWS=rows,
            WIDTH=width,
            num_warps=_warps(rows, width),
        )
