r"""Directions, norms and angles: the one place where precision and degenerate vectors are dealt with.

Rules that hold for every function here:

* Half and bfloat16 input is computed in float32, also under autocast, and results that measure something
  (norms, cosines, angles) stay in float32: the float just below 1 is 5 degrees away in bfloat16.
* The zero vector has direction 0, cosine 0 with everything, angle pi/2 to everything, and passes no gradient through
  its direction; second derivatives are finite there, too. A vector counts as zero whose largest number is below
  ``tiny`` of its type (1e-38 in float32).
* On a processor every other norm is right. Where looking at numbers would mean to wait or to do more work - on a GPU
  and in compiled code -, norms must lie between the square roots of ``tiny`` and of the largest number (1e-19 to 1.8e19
  in float32): a shorter vector counts as zero there, and directions, cosines and angles of a longer one are NaN.
* An angle of two vectors keeps all digits next to 0 and pi; that of a cosine is right to the square root of the
  precision there (5e-4 in float32). The gradients of both are finite.
* No function but :func:`von_mises_fisher` waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from hypersphere.errors import ArgumentError, check_range

EPS = 1e-4
"""Default of every ``eps=`` argument that is added to a norm before a division (the layers' convention)."""


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` itself, or in float32 where its type has fewer digits."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def in_float64(x: Tensor) -> Tensor:
    """``x`` in float64, for what is small and loses digits; as it is on a device that has no such numbers.

    Example:
        >>> in_float64(torch.ones(2)).dtype
        torch.float64
    """
    return x if x.device.type == "mps" else x.double()


def full_precision(x: Tensor) -> torch.autocast:
    """Context in which autocast is off for the device of ``x``: products inside keep their operands' type."""
    return torch.autocast(x.device.type if x.device.type != "meta" else "cpu", enabled=False)


_BACKENDS: tuple[Any, ...] = (torch.backends.cuda, torch.backends.mkldnn)
_MATMUL = tuple(backend.matmul for backend in _BACKENDS)
"""What says how float32 products are rounded on a GPU and on a CPU."""
_BY_NAME = all(hasattr(settings, "fp32_precision") for settings in _MATMUL)
"""Whether these settings have names. The older switch for TF32 must not be read then: it raises an error once the newer
setting was changed; and setting it changes both."""


def _products(*precisions: Any) -> tuple[Any, ...]:
    """How float32 products are rounded on a GPU and on a CPU until now, and from now on where that is given."""
    name, settings = ("fp32_precision", _MATMUL) if _BY_NAME else ("allow_tf32", _MATMUL[:1])
    before = tuple(getattr(setting, name) for setting in settings)
    for setting, precision in zip(settings, precisions, strict=False):
        setattr(setting, name, precision if _BY_NAME or isinstance(precision, bool) else precision == "tf32")
    return before


def products_precision() -> str:
    """How float32 products are rounded on a GPU and on a CPU, in torch's words.

    Example:
        >>> with exact_products():
        ...     "tf32" in products_precision()
        False
    """
    return "/".join(map(str, _products()))


@contextmanager
def exact_products(precision: str = "ieee") -> Iterator[None]:
    """Context in which float32 products are not rounded to TF32 or bfloat16, whatever the process allows elsewhere.

    With ``precision="tf32"`` they are on a GPU, for products whose errors the next ones set right.

    A compiled graph keeps the setting of the process (``torch.set_float32_matmul_precision``), which it cannot change.
    Either of torch's two interfaces may have made that setting.

    Example:
        >>> with exact_products():
        ...     tf32_products()
        False
    """
    if torch.compiler.is_compiling():
        yield
        return
    before = _products(precision, "ieee")
    try:
        yield
    finally:
        _products(*before)


def tf32_products() -> bool:
    """Whether float32 products on a GPU are rounded to TF32 now.

    Example:
        >>> with exact_products("tf32"):
        ...     tf32_products()
        True
    """
    return bool(_products()[0] in ("tf32", True))


def safe_sqrt(x: Tensor) -> Tensor:
    r"""Square root with gradient 0, not infinity, where ``x`` is 0 or below.

    Example:
        >>> x = torch.tensor([0.0, 4.0], requires_grad=True)
        >>> torch.autograd.grad(safe_sqrt(x).sum(), x)[0]
        tensor([0.0000, 0.2500])
    """
    flat = x <= 0  # false for NaN, which must not pass for 0
    return torch.where(flat, 0.0, torch.where(flat, 1.0, x).sqrt())


def largest(numbers: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """Largest absolute value along axes, which are kept with length 1; 0 of none. A constant.

    Example:
        >>> largest(torch.tensor([[1.0, -3.0]]))
        tensor([[3.]])
    """
    sizes = numbers.detach().abs()
    return sizes.amax(dim, keepdim=True) if sizes.numel() else sizes.sum(dim, keepdim=True)


def scales(numbers: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """Powers of two that bring the largest of the numbers along ``dim`` near 1, whatever its size; constants.

    What is multiplied with them loses nothing, and its squares neither overflow nor vanish. Kept axes have length 1.

    Example:
        >>> scales(torch.tensor([[3e-30, 1e-30], [1e30, 0.0]])).log2()
        tensor([[100.],
                [-98.]])
    """
    info = torch.finfo(numbers.dtype)
    return torch.exp2(1 - largest(numbers, dim).clamp(info.tiny, info.max).log2().floor())


def _least(dtype: torch.dtype) -> float:
    """Norm above which squares are normal numbers."""
    return math.sqrt(torch.finfo(dtype).tiny)


def _recorded() -> bool:
    """Whether a program is made of the operations, which must serve for other numbers, too."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


_Vectors = Literal["ordinary", "ordinary or zero", "any"]


def _vectors(x: Tensor, length: Tensor, dim: int) -> _Vectors:
    """What is known of vectors with these norms, which are looked at where no device or tracer stands between."""
    if transformed():
        return "any"
    if x.device.type != "cpu" or torch._C._len_torch_dispatch_stack() or not length.numel():
        return "ordinary or zero"
    length = length.detach()
    shortest, longest = torch.aminmax(length)
    if float(shortest) > _least(x.dtype) and float(longest) < math.inf:
        return "ordinary"
    short = x.detach().movedim(dim, -1)[(length <= _least(x.dtype)).squeeze(dim)]
    return "any" if float(longest) == math.inf or bool(short.any()) else "ordinary or zero"


def _rescaled(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors of ordinary norms, what they were multiplied with, and which vectors are zero (they become ones)."""
    rough, size = torch.linalg.vector_norm(x.detach(), dim=dim, keepdim=True), largest(x, dim)
    scale = torch.where((rough > _least(x.dtype)) & (rough < math.inf), 1.0, scales(x, dim))
    zero = size < torch.finfo(x.dtype).tiny
    # With ones in their place no derivative of any order is infinite.
    return torch.where(zero, 1.0, x * scale), scale, zero


def _any_norm(x: Tensor, dim: int) -> Tensor:
    rescaled, scale, zero = _rescaled(x, dim)
    return torch.where(zero, 0.0, torch.linalg.vector_norm(rescaled, dim=dim, keepdim=True) / scale)


def _any_direction(x: Tensor, dim: int) -> Tensor:
    rescaled, _, zero = _rescaled(x, dim)
    return torch.where(zero, 0.0, rescaled * (1 / torch.linalg.vector_norm(rescaled, dim=dim, keepdim=True)))


def _inverse(length: Tensor) -> Tensor:
    """Inverse norms: 0 where they are too short to be told from 0, NaN where the square has overflown."""
    nonzero = length > _least(length.dtype)
    inverse = torch.where(nonzero, 1 / torch.where(nonzero, length, 1.0), 0.0)
    return torch.where(length == math.inf, math.nan, inverse)


class _Norm(torch.autograd.Function):
    """Norms of ordinary and zero vectors: torch's first derivatives, and second ones that are finite at zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, length: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(x, length)
        ctx.dim = dim
        return length.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        x, length = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _again(_any_norm, x, ctx.dim, grads[0]), None, None
        return grads[0] * (x / length).masked_fill_(length == 0, 0), None, None


class _Direction(torch.autograd.Function):
    """The same for directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, length: Tensor, dim: int) -> Tensor:
        inverse = _inverse(length)
        ctx.save_for_backward(x, length, inverse)
        ctx.dim = dim
        return x * inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        x, length, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _again(_any_direction, x, ctx.dim, grads[0]), None, None
        by_length = (grads[0] * x).sum(ctx.dim, keepdim=True) * -(inverse * inverse)
        d_x = grads[0] * inverse
        d_x += by_length * (x / length).masked_fill_(length == 0, 0)
        return d_x, None, None


def _again(function: Callable[[Tensor, int], Tensor], x: Tensor, dim: int, upstream: Tensor) -> Tensor:
    """Gradient of a function by way of torch's own operations, which can be differentiated again."""
    x = x.view_as(x)  # it may have been computed from the others, and that path is not ours to follow
    return torch.autograd.grad(function(x, dim), x, upstream, create_graph=True)[0]


def norm(x: Tensor, dim: int = -1, keepdim: bool = False) -> Tensor:
    r"""Euclidean norm :math:`\|x\|`, in float32 or wider, with all derivatives 0 at the zero vector.

    Args:
        x: Vectors along ``dim``, ``(..., D)``.
        dim: The axis of a vector.
        keepdim: Keep that axis with length 1.

    Returns:
        ``(...)``, or ``(..., 1)`` with ``keepdim``.

    Example:
        >>> norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([5., 0.])
    """
    x = at_least_float32(x)
    length = _norm(x, dim)
    return length if keepdim else length.squeeze(dim)


def _norm(x: Tensor, dim: int) -> Tensor:
    """The same with the axis kept."""
    length = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
    known = "ordinary" if _recorded() else _vectors(x, length, dim)
    if known == "ordinary":
        return length
    return _any_norm(x, dim) if known == "any" else _Norm.apply(x, length.detach(), dim)


def _direction(x: Tensor, dim: int) -> Tensor:
    """Unit vectors in float32 or wider; zero for the zero vector."""
    x = at_least_float32(x)
    length = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
    if _recorded():
        return x * _inverse(length)
    known = _vectors(x, length, dim)
    if known == "ordinary":
        return x * (1 / length)
    return _any_direction(x, dim) if known == "any" else _Direction.apply(x, length.detach(), dim)


def normalise(x: Tensor, dim: int = -1) -> Tensor:
    r"""Direction :math:`x / \|x\|`; the zero vector stays zero and gets no gradient.

    Args:
        x: Vectors along ``dim``, ``(..., D)``.
        dim: The axis of a vector.

    Returns:
        Same shape and type as ``x``.

    Example:
        >>> normalise(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    return _direction(x, dim).to(x.dtype)


def cosine(x: Tensor, y: Tensor, dim: int = -1) -> Tensor:
    r"""Cosine :math:`\langle x, y\rangle / (\|x\| \|y\|)` of vectors that broadcast against each other, in [-1, 1].

    Args:
        x: ``(..., D)``.
        y: ``(..., D)``, broadcastable to ``x``.
        dim: The axis of a vector.

    Returns:
        ``(...)`` in float32 or wider.

    Example:
        >>> cosine(torch.tensor([2.0, 0.0]), torch.tensor([[1.0, 1.0], [-3.0, 0.0]]))
        tensor([ 0.7071, -1.0000])
    """
    return _saturate((_direction(x, dim) * _direction(y, dim)).sum(dim))


def cosine_matrix(x: Tensor, y: Tensor) -> Tensor:
    r"""Cosines of every row of ``x`` with every row of ``y``, in [-1, 1].

    Args:
        x: ``(..., N, D)``.
        y: ``(..., C, D)``.

    Returns:
        ``(..., N, C)`` in float32 or wider, also under autocast.

    Example:
        >>> cosine_matrix(torch.eye(2), torch.tensor([[0.0, 5.0]]))
        tensor([[0.],
                [1.]])
    """
    with full_precision(x):
        return _saturate(_direction(x, -1) @ _direction(y, -1).mT)


def _saturate(cosines: Tensor) -> Tensor:
    """Remove the rounding beyond +-1 without cutting the gradient, as a clamp would."""
    return cosines + (cosines.clamp(-1, 1) - cosines).detach()


class _Arccos(torch.autograd.Function):
    """arccos with its exact value and a slope bounded by ``1 / sqrt(eps)`` of the type."""

    generate_vmap_rule = True

    @staticmethod
    def forward(cosines: Tensor) -> Tensor:
        return cosines.clamp(-1, 1).arccos()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (cosines,) = ctx.saved_tensors
        return grads[0] * arccos_slope(cosines)


def _arccos_by_operations(cosines: Tensor) -> Tensor:
    """The same by torch's operations: a function with a jvp of its own has no second one, and does not compile."""
    eps = torch.finfo(cosines.dtype).eps
    inside = (1 - cosines) * (1 + cosines) > eps
    pole = cosines.detach().clamp(-1, 1).arccos() - (cosines - cosines.detach()) * eps**-0.5
    return torch.where(inside, torch.where(inside, cosines, 0.0).arccos(), pole)


def in_forward_mode() -> bool:
    """Whether derivatives travel with the values now (``torch.func.jvp``, ``torch.autograd.forward_ad``)."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def transformed() -> bool:
    """Whether ``torch.func`` or forward mode is at work, which look into plain operations only."""
    return not torch.compiler.is_compiling() and (torch._C._are_functorch_transforms_active() or in_forward_mode())


def arccos_slope(cosines: Tensor) -> Tensor:
    r"""Derivative of :func:`arccos`: :math:`-1/\sqrt{1 - c^2}`, bounded near :math:`c = \pm 1`.

    Args:
        cosines: Any shape, in float32 or wider.

    Returns:
        Same shape and type.

    Example:
        >>> arccos_slope(torch.tensor([0.0, 0.6]))
        tensor([-1.0000, -1.2500])
    """
    squared_sine = ((1 - cosines) * (1 + cosines)).clamp(min=torch.finfo(cosines.dtype).eps)
    return -squared_sine.rsqrt()


def arccos(cosines: Tensor) -> Tensor:
    r"""Angle of a cosine, :math:`\arccos c \in [0, \pi]`, with a finite gradient at :math:`c = \pm 1`.

    The value is exact; the slope :math:`-1/\sqrt{1 - c^2}` is bounded where it exceeds :math:`1/\sqrt{\epsilon}`
    (about 2900 in float32, i.e. for angles within 0.02 degrees of a pole). Where both vectors are at hand,
    :func:`angle` keeps more digits.

    Args:
        cosines: Any shape; values beyond [-1, 1] are taken as the bound.

    Returns:
        Same shape, in float32 or wider.

    Example:
        >>> arccos(torch.tensor([1.0, 0.0, -1.0]))
        tensor([0.0000, 1.5708, 3.1416])
    """
    cosines = at_least_float32(cosines)
    return _arccos_by_operations(cosines) if in_forward_mode() else _Arccos.apply(cosines)


def angle(x: Tensor, y: Tensor, dim: int = -1) -> Tensor:
    r"""Angle between vectors, :math:`2\,\mathrm{atan2}(\|u - v\|, \|u + v\|)` of their directions.

    This form keeps all digits near 0 and :math:`\pi`, where the arccos of a cosine loses half of them, and its
    gradient is finite everywhere.

    Args:
        x: ``(..., D)``.
        y: ``(..., D)``, broadcastable to ``x``.
        dim: The axis of a vector.

    Returns:
        Radians in [0, pi], ``(...)``, in float32 or wider.

    Example:
        >>> angle(torch.tensor([1.0, 0.0]), torch.tensor([[5.0, 0.0], [0.0, 2.0], [-1.0, 0.0]]))
        tensor([0.0000, 1.5708, 3.1416])
    """
    u, v = torch.broadcast_tensors(_direction(x, dim), _direction(y, dim))
    difference, total = norm(u - v, dim), norm(u + v, dim)
    # Two zero vectors leave atan2(0, 0), whose gradient is NaN; by rule they meet at pi/2.
    degenerate = difference + total == 0
    return 2 * torch.atan2(torch.where(degenerate, 1.0, difference), torch.where(degenerate, 1.0, total))


def angle_matrix(x: Tensor, y: Tensor) -> Tensor:
    """Angles of every row of ``x`` with every row of ``y``: :func:`arccos` of :func:`cosine_matrix`.

    Args:
        x: ``(..., N, D)``.
        y: ``(..., C, D)``.

    Returns:
        Radians, ``(..., N, C)``, in float32 or wider; near 0 and pi to about the square root of the precision.

    Example:
        >>> angle_matrix(torch.eye(2), torch.eye(2))
        tensor([[0.0000, 1.5708],
                [1.5708, 0.0000]])
    """
    return arccos(cosine_matrix(x, y))


def geodesic_distance(x: Tensor, y: Tensor, radius: float = 1.0, dim: int = -1) -> Tensor:
    r"""Length of the great arc between the projections of ``x`` and ``y`` on a sphere, :math:`r\,\theta(x, y)`.

    Args:
        x: ``(..., D)``.
        y: ``(..., D)``, broadcastable to ``x``.
        radius: Radius of the sphere.
        dim: The axis of a vector.

    Returns:
        ``(...)`` in float32 or wider.

    Example:
        >>> geodesic_distance(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), radius=2.0)
        tensor(3.1416)
    """
    check_range("radius", radius, 0, open_low=True)
    return radius * angle(x, y, dim)


def patch_squared_norms(
    x: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    output_size: Sequence[int] | None = None,
) -> Tensor:
    r"""Squared norm of every patch that a convolution with these settings would see, zero padding included.

    One sum of squares over the channels, then sums over windows of one channel: no patch is ever copied out.

    Args:
        x: ``(N, C, *spatial)`` with one, two or three spatial axes.
        kernel_size: Size of the window.
        stride: Step of the window.
        padding: Zeros on both sides.
        dilation: Spacing inside the window.
        groups: Channel groups; each has patches of its own.
        output_size: Spatial size of the output of a transposed convolution, whose patches these then are: the
            input values that reach a place of the output.

    Returns:
        ``(N, groups, *output spatial)`` in float32 or wider.

    Example:
        >>> patch_squared_norms(torch.ones(1, 4, 3, 3), kernel_size=3)
        tensor([[[[36.]]]])
    """
    spatial = x.dim() - 2
    if spatial not in (1, 2, 3):
        raise ArgumentError("x", f"must have shape (N, C, *spatial) with 1 to 3 spatial axes, got {tuple(x.shape)}")
    if groups < 1 or x.shape[1] % groups:
        raise ArgumentError("groups", f"must divide the {x.shape[1]} channels of x, got {groups}")

    def per_axis(argument: str, value: int | Sequence[int]) -> tuple[int, ...]:
        values = (value,) * spatial if isinstance(value, int) else tuple(value)
        if len(values) != spatial:
            raise ArgumentError(argument, f"must have {spatial} entries for x of shape {tuple(x.shape)}, got {values}")
        return values

    windows = zip(
        per_axis("kernel_size", kernel_size),
        per_axis("stride", stride),
        per_axis("padding", padding),
        per_axis("dilation", dilation),
        strict=True,
    )
    sums = at_least_float32(x).unflatten(1, (groups, -1)).square().sum(2)
    return window_sums(sums, tuple(windows), output_size)


def window_sums(
    maps: Tensor, windows: Sequence[tuple[int, int, int, int]], output_size: Sequence[int] | None = None
) -> Tensor:
    """Sums over windows of each map, or, with ``output_size``, the transpose of that: each value on all its window.

    A box is separable, and sums of windows are exact where a convolution might run in TF32.

    Args:
        maps: ``(N, G, *spatial)``.
        windows: Size, step, padding and spacing of the window along each spatial axis.
        output_size: Spatial size of what the maps are window sums of; gives the transpose.

    Returns:
        ``(N, G, *output spatial)``.

    Example:
        >>> window_sums(torch.ones(1, 1, 4), [(3, 1, 1, 1)])
        tensor([[[2., 3., 3., 2.]]])
        >>> window_sums(torch.ones(1, 1, 2), [(3, 2, 0, 1)], output_size=[5])
        tensor([[[1., 1., 2., 1., 1.]]])
    """
    for axis, (size, step, pad, spacing) in enumerate(windows, start=2):
        if (size, step, pad) == (1, 1, 0) and (output_size is None or output_size[axis - 2] == maps.shape[axis]):
            continue
        inner = (0, 0) * (maps.dim() - 1 - axis)
        extent, stride = (size - 1) * spacing, step
        left, right = pad, pad
        if output_size is not None:
            if step > 1:  # zeros between the values
                maps = F.pad(maps.unsqueeze(axis + 1), (*inner, 0, step - 1)).flatten(axis, axis + 1)
            left = extent - pad
            right = output_size[axis - 2] + pad - maps.shape[axis]
            stride = 1
        maps = F.pad(maps, (*inner, left, right))
        if transformed():  # torch.vmap has no rule for the derivative of unfold
            places = torch.arange(0, maps.shape[axis] - extent, stride, device=maps.device)
            taps = [maps.index_select(axis, places + tap * spacing) for tap in range(size)]
            maps = torch.stack(taps).sum(0)
        else:
            maps = maps.unfold(axis, extent + 1, stride)[..., ::spacing].sum(-1)
    return maps


def patch_norm(
    x: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    r"""Norm of every patch that a convolution with these settings would see: the root of :func:`patch_squared_norms`.

    Args:
        x: ``(N, C, *spatial)`` with one, two or three spatial axes.
        kernel_size: Size of the window.
        stride: Step of the window.
        padding: Zeros on both sides.
        dilation: Spacing inside the window.
        groups: Channel groups; each has norms of its own.

    Returns:
        ``(N, groups, *output spatial)`` in float32 or wider, with gradient 0 at an all-zero patch.

    Example:
        >>> patch_norm(torch.ones(1, 4, 3, 3), kernel_size=3)
        tensor([[[[6.]]]])
    """
    return safe_sqrt(patch_squared_norms(x, kernel_size, stride, padding, dilation, groups))


def uniform_directions(
    count: int,
    dim: int,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Independent uniform points on the unit sphere: Gaussian vectors, normalised.

    Args:
        count: Number of points.
        dim: Dimension D of the space.
        generator: Source of randomness.
        device: Where to create them.
        dtype: Floating-point type.

    Returns:
        ``(count, dim)``.

    Example:
        >>> uniform_directions(2, 5).shape
        torch.Size([2, 5])
    """
    check_range("count", count, 0)
    check_range("dim", dim, 1)
    return normalise(torch.randn(count, dim, generator=generator, device=device, dtype=dtype))


def von_mises_fisher(
    mean: Tensor, concentration: float, count: int, *, generator: torch.Generator | None = None
) -> Tensor:
    r"""Points around a mean direction, density :math:`\propto \exp(\kappa \langle \mu, x \rangle)` on the sphere.

    Wood's rejection sampler for the cosine to the mean, all points at once; the number of rounds depends on the
    draws, so this waits for the device.

    Args:
        mean: Mean direction, ``(D,)`` with D >= 2, not zero; its norm does not matter.
        concentration: Concentration :math:`\kappa \in [0, 10^{12}]`; 0 is uniform.
        count: Number of points.
        generator: Source of randomness.

    Returns:
        ``(count, D)`` in the type of ``mean``.

    Example:
        >>> points = von_mises_fisher(torch.tensor([0.0, 0.0, 1.0]), 1e6, 4)
        >>> bool((points[:, 2] > 0.99).all())
        True
    """
    check_range("concentration", concentration, 0, 1e12)  # beyond, cosines in float64 cannot tell points apart
    check_range("count", count, 0)
    if mean.dim() != 1 or mean.shape[0] < 2:
        raise ArgumentError("mean", f"must have shape (D,) with D >= 2, got {tuple(mean.shape)}")
    if not bool(norm(mean) > 0):
        raise ArgumentError("mean", "must not be the zero vector")
    # The rejection test compares logarithms that nearly cancel for large kappa: float64 throughout.
    cosines = _wood_cosines(mean.shape[0] - 1, concentration, count, mean.device, generator)
    centre = normalise(mean.double())
    noise = torch.randn(count, mean.shape[0], generator=generator, device=mean.device, dtype=torch.float64)
    tangent = normalise(noise - (noise @ centre).unsqueeze(1) * centre)
    points = cosines.unsqueeze(1) * centre + safe_sqrt(1 - cosines.square()).unsqueeze(1) * tangent
    return points.to(mean.dtype)


def _wood_cosines(
    sphere_dim: int, concentration: float, count: int, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Cosines to the mean of a von Mises-Fisher distribution on the sphere of dimension ``sphere_dim``."""

    def squared_norms(n: int) -> Tensor:
        noise = torch.randn(n, sphere_dim, generator=generator, device=device, dtype=torch.float64)
        return noise.square().sum(1)

    ratio = sphere_dim / (2 * concentration + math.hypot(2 * concentration, sphere_dim))
    peak = (1 - ratio) / (1 + ratio)
    offset = concentration * peak + sphere_dim * math.log1p(-peak * peak)
    result = torch.empty(count, device=device, dtype=torch.float64)
    missing = torch.arange(count, device=device)
    # Beta(a, a) as a ratio of squared Gaussian norms needs no sampler that lacks a generator argument.
    while missing.numel():
        left, right = squared_norms(len(missing)), squared_norms(len(missing))
        beta = left / (left + right)
        proposal = (1 - (1 + ratio) * beta) / (1 - (1 - ratio) * beta)
        chance = torch.rand(len(missing), generator=generator, device=device, dtype=torch.float64).log()
        accepted = concentration * proposal + sphere_dim * torch.log1p(-peak * proposal) - offset >= chance
        result[missing[accepted]] = proposal[accepted]
        missing = missing[~accepted]
    return result


def spherical_mean(x: Tensor, weights: Tensor | None = None, *, intrinsic_steps: int = 0) -> Tensor:
    r"""Mean direction of vectors, whatever their norms.

    By default the direction of the sum of the unit vectors. With ``intrinsic_steps`` it is refined towards the
    Frechet mean, which minimises the squared arc lengths, by that many steps along the mean tangent vector.

    Args:
        x: ``(..., N, D)``.
        weights: ``(..., N)`` non-negative, all 1 by default; all 0 gives a zero mean.
        intrinsic_steps: Number of refinement steps; 10 reach float32 precision for points within 60 degrees of
            their mean, wider sets need more.

    Returns:
        Unit vectors ``(..., D)`` in the type of ``x``; zero where the unit vectors cancel.

    Example:
        >>> spherical_mean(torch.tensor([[1.0, 0.0], [0.0, 9.0]]))
        tensor([0.7071, 0.7071])
    """
    check_range("intrinsic_steps", intrinsic_steps, 0)
    units = _direction(x, -1)
    share = units.new_ones(units.shape[:-1]) if weights is None else weights.to(units.dtype)
    total = share.sum(-1, keepdim=True)
    share = (share / torch.where(total > 0, total, 1.0)).unsqueeze(-1)
    mean = _direction((share * units).sum(-2), -1)
    for _ in range(intrinsic_steps):
        base = mean.unsqueeze(-2)
        tangents = _direction(units - (units * base).sum(-1, keepdim=True) * base, -1) * angle(units, base).unsqueeze(
            -1
        )
        step = (share * tangents).sum(-2)
        length = norm(step, keepdim=True)
        mean = _direction(length.cos() * mean + length.sin() * _direction(step, -1), -1)
    return mean.to(x.dtype)


def slerp(x: Tensor, y: Tensor, t: float | Tensor) -> Tensor:
    r"""Point at fraction ``t`` of the great arc from the direction of ``x`` to that of ``y``.

    :math:`\cos(t\theta)\,u + \sin(t\theta)\,w` with :math:`w` the unit tangent at :math:`u` towards :math:`v`. Between
    opposite points every arc is shortest; one fixed arc is taken.

    Args:
        x: ``(..., D)``.
        y: ``(..., D)``, broadcastable to ``x``.
        t: Fraction, a number or a tensor ``(...)``; outside [0, 1] the arc is continued.

    Returns:
        Unit vectors ``(..., D)`` in the type of ``x``.

    Example:
        >>> slerp(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), 0.5)
        tensor([0.7071, 0.7071])
    """
    u, v = torch.broadcast_tensors(_direction(x, -1), _direction(y, -1))
    theta = angle(u, v).unsqueeze(-1)
    tangent = v - (u * v).sum(-1, keepdim=True) * u
    # For opposite vectors the tangent is rounding noise: use the axis least aligned with u instead.
    axis = F.one_hot(u.abs().argmin(-1), u.shape[-1]).to(u.dtype)
    fallback = axis - (axis * u).sum(-1, keepdim=True) * u
    opposite = math.pi - theta < 10 * torch.finfo(u.dtype).eps
    tangent = _direction(torch.where(opposite, fallback, tangent), -1)
    # Near opposite vectors the rounding along u is not small against the tangent: take it off once more.
    tangent = _direction(tangent - (u * tangent).sum(-1, keepdim=True) * u, -1)
    fraction = t.unsqueeze(-1) if isinstance(t, Tensor) else t
    position = torch.as_tensor(fraction * theta)
    return (position.cos() * u + position.sin() * tangent).to(x.dtype)
