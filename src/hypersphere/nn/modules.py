"""Decoupled layers: torch's convolutions and linear layer with a decoupled operator for the inner product.

Each subclasses torch's layer of that kind, takes all of its arguments and has its ``weight`` and ``bias``, so that
trained weights load and code that looks for ``nn.Conv2d`` finds it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from hypersphere.angular import Cosine, Sigmoid
from hypersphere.errors import ArgumentError, HypersphereError, check_range
from hypersphere.geometry import at_least_float32, full_precision
from hypersphere.neurons import is_sharded, whole
from hypersphere.nn import fused
from hypersphere.nn import operators as operators_module
from hypersphere.nn.functional import Window, decoupled
from hypersphere.nn.operators import Operator, RadiusOperator, measures_radius, operators
from hypersphere.nn.sharding import TAKE_A_WHOLE_ONE, alongside, check_unsharded, put

_FUSIONS = {fuse_conv_bn_eval.__code__, fuse_linear_bn_eval.__code__}
_OWN_STATE = ("radius_raw", "k_raw", "patch_norm_mean", "patch_norm_seen")
_FOLDED_STATE = ("folded_norms", "folded_radius", "folded_k")  # in place of these, see hypersphere.nn.fold


class Decoupled(nn.Module):
    r"""What all decoupled layers share: the operator, its learned parts and the norms of patches seen.

    Attributes:
        operator: The operator.
        radius_raw: Parameter ``(O,)`` with :math:`\rho = raw^2 + 10^{-4}`, for operators with a radius.
        k_raw: Parameter ``(O,)`` or ``(1,)`` where the steepness of the sigmoid is learned.
        patch_norm_mean: Moving average of the mean patch norm of each group, ``(groups,)``, for operators whose radius
            is measured by it.
        patch_norm_seen: Whether that average has begun, as a number.
        sync_mean: Whether the mean patch norm in training is that of the batches of all processes of
            ``torch.distributed``; by default each takes its own.
        folded: Whether the weight holds the directions of the kernels (:func:`hypersphere.nn.fold`).
    """

    operator: Operator
    weight: Tensor
    bias: Any  # a parameter, or None
    torch_class: type[nn.Module]
    radius_raw: nn.Parameter | None
    k_raw: nn.Parameter | None
    patch_norm_mean: Tensor
    patch_norm_seen: Tensor
    sync_mean: bool = False
    folded: bool
    folded_norms: Tensor
    folded_radius: Tensor | None
    folded_k: Tensor | None

    # ------------------------------------------------------------------------------------- state

    def set_operator(self, operator: str | Operator, **options: Any) -> None:
        """Take another operator, with its learned parts at their initial values."""
        op = _of_one_layer(operator, options)
        check_unsharded(self, "set its operator before fully_shard()")
        self._drop_state()
        self.operator, self.folded = op, False
        weight = next(itertools.chain(self.parameters(), self.buffers()))  # not self.weight: it may be computed
        device, dtype, kernels = weight.device, at_least_float32(weight[:0]).dtype, self._kernels()
        self.radius_raw = self.k_raw = None
        if isinstance(op, RadiusOperator):
            raw = torch.empty(kernels, device=device, dtype=dtype)
            self.radius_raw = nn.Parameter(raw, requires_grad=op.learn_radius)
            self.set_radius(op.radius)
        if op.learn_k is not None and isinstance(op.g, Sigmoid):
            count = kernels if op.learn_k == "filter" else 1
            self.k_raw = nn.Parameter(torch.empty(count, device=device, dtype=dtype))
            self.set_k(op.g.k)
        if measures_radius(op):
            self.register_buffer("patch_norm_mean", torch.ones(self._groups(), device=device, dtype=dtype))
            self.register_buffer("patch_norm_seen", torch.zeros((), dtype=torch.long, device=device))

    @classmethod
    def adopt(cls, module: nn.Module, operator: str | Operator, **options: Any) -> Decoupled:
        """Turn a layer of torch into its decoupled kind, in place.

        The object, its parameters and its hooks stay the same; only the class changes and the operator's own state is
        added. :meth:`release` undoes it.

        Args:
            module: A layer of one of the classes in :data:`KINDS`, of a subclass that has torch's forward pass, or a
                parametrised one.
            operator: The operator, by name or as an object.
            **options: Options of the operator.

        Example:
            >>> layer = nn.Conv2d(3, 8, 3)
            >>> Decoupled.adopt(layer, "tanh") is layer, type(layer).__name__
            (True, 'DecoupledConv2d')
        """
        op = _of_one_layer(operator, options)
        kind = type(module)
        parametrised = hasattr(module, "parametrizations")
        base = kind.__mro__[1] if parametrised else kind
        target = kind_of(base)
        if target is None:
            known = ", ".join(k.__name__ for k in KINDS)
            raise ArgumentError("module", f"must be one of {known}, got {kind.__name__}")
        if parametrised:  # a class of its own that holds the parametrised properties
            own = {name: value for name, value in vars(kind).items() if name not in ("__doc__", "__module__")}
            target = type(f"Parametrized{target.__name__}", (target,), own)
        module.__class__ = target
        assert isinstance(module, Decoupled)
        module.set_operator(op)
        return module

    def release(self) -> nn.Module:
        """Turn the layer back into torch's kind, in place; what its operator had learned is dropped.

        Example:
            >>> type(SphereConv2d(3, 8, 3).release())
            <class 'torch.nn.modules.conv.Conv2d'>
        """
        kind = type(self)
        check_unsharded(self, TAKE_A_WHOLE_ONE)
        self._drop_state()
        del self.operator, self.folded
        target = self.torch_class
        if hasattr(self, "parametrizations"):
            own = {name: value for name, value in vars(kind).items() if name not in ("__doc__", "__module__")}
            target = type(f"Parametrized{target.__name__}", (target,), own)
        self.__class__ = target  # type: ignore[assignment]
        return self

    def reset_parameters(self) -> None:
        """Initialise the weight as torch's layer does, and what the operator learns and measures as its options say."""
        super().reset_parameters()  # type: ignore[misc]
        if "operator" in self.__dict__:  # not yet where torch's constructor calls this
            if isinstance(self.operator, RadiusOperator):
                self.set_radius(self.operator.radius)
            if self.k_raw is not None and isinstance(self.operator.g, Sigmoid):
                self.set_k(self.operator.g.k)
            if measures_radius(self.operator):
                self.patch_norm_mean.fill_(1.0)
                self.patch_norm_seen.fill_(0)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Keep the average of patch norms in float32 at least: a small step would be rounded away in 16 bits."""
        before = self._buffers.get("patch_norm_mean")
        super()._apply(fn, recurse)
        if before is not None and self.patch_norm_mean.dtype in (torch.float16, torch.bfloat16):
            self.patch_norm_mean = before.to(self.patch_norm_mean.device, torch.float32)
        return self

    def _drop_state(self) -> None:
        for name in (*_OWN_STATE, *_FOLDED_STATE):
            for place in (self._parameters, self._buffers, self.__dict__):
                place.pop(name, None)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter; those of ``torch.nn.utils.fuse_conv_bn_eval`` are refused.

        It scales the kernels, which a decoupled layer takes directions of. Only a folded layer of the cosine is linear
        in what it keeps of them.
        """
        by = inspect.currentframe()
        for _ in range(2):  # torch's setattr, then who sets
            by = None if by is None else by.f_back
        if by is not None and by.f_code in _FUSIONS and not (self.folded and isinstance(self.operator.g, Cosine)):
            allowed = "a layer folded with the angular function 'cosine' can be (hypersphere.nn.fold)"
            raise ArgumentError(name, f"of a decoupled layer cannot be fused with batch normalisation: {allowed}")
        super().register_parameter(name, param)

    def train(self, mode: bool = True) -> Self:
        """Set the mode; a folded layer cannot be trained."""
        if mode and self.folded:
            raise ArgumentError("mode", "must be False: this layer was folded for inference (hypersphere.nn.fold)")
        return super().train(mode)

    @property
    def radius(self) -> Tensor | None:
        r"""Radius :math:`\rho` of each kernel, ``(O,)``, where the operator has one."""
        radius = self._radius()
        return None if radius is None else whole(radius)

    def _radius(self) -> Tensor | None:
        if self.folded:
            return self.folded_radius
        raw = self.radius_raw
        return None if raw is None else at_least_float32(raw).square() + RadiusOperator.RADIUS_MIN

    @torch.no_grad()
    def set_radius(self, value: float | Tensor) -> None:
        """Set the radius of all kernels, or of each."""
        if self.radius_raw is None:
            raise ArgumentError("value", f"cannot be set: the operator {self._name()} has no radius")
        low = RadiusOperator.RADIUS_MIN
        put(self.radius_raw, (_checked(value, self.radius_raw, low) - low).sqrt().expand(self.radius_raw.shape))

    @property
    def k(self) -> Tensor | None:
        """Learned steepness of the sigmoid, ``(O,)`` or ``(1,)``; ``None`` where it is not learned."""
        k = self._k()
        return None if k is None else whole(k)

    def _k(self) -> Tensor | None:
        if self.folded:
            return self.folded_k
        if self.k_raw is None:
            return None
        raw, low = at_least_float32(self.k_raw), self.operator.K_MIN
        if self.operator.k_param == "project":
            return raw + (raw.clamp(min=low) - raw).detach()  # below the limit it must be able to come back
        return (raw.abs() if self.operator.k_param == "abs" else F.softplus(raw)) + low

    @torch.no_grad()
    def set_k(self, value: float | Tensor) -> None:
        """Set the learned steepness of all kernels, or of each."""
        if self.k_raw is None:
            raise ArgumentError("value", f"cannot be set: the operator {self._name()} learns no k")
        low, projected = self.operator.K_MIN, self.operator.k_param == "project"
        value = _checked(value, self.k_raw, low, open_low=not projected)
        above = (value - low).expm1().log() if self.operator.k_param == "softplus" else value - low
        put(self.k_raw, (value if projected else above).expand(self.k_raw.shape))

    def _mean_norm(self) -> Tensor | None:
        """Mean patch norm of each group at test time, ``(groups,)``, where radii are in units of it."""
        if not measures_radius(self.operator):
            return None
        return torch.where(self.patch_norm_seen.bool(), self.patch_norm_mean, 1.0)

    def kernel_norms(self) -> Tensor:
        """Norm of each kernel, ``(O,)``."""
        kernels = self._by_kernel(at_least_float32(whole(self.weight)))
        return torch.linalg.vector_norm(kernels.flatten(2), dim=2).flatten()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        """Also load the state of torch's layer, which knows nothing of the operator's own: that stays as it is."""
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        if f"{prefix}weight" in state_dict or hasattr(self, "parametrizations"):
            own = [f"{prefix}{name}" for name in _OWN_STATE]
            if not any(name in state_dict for name in own):
                missing[:] = [name for name in missing if name not in own]

    def extra_repr(self) -> str:
        """The arguments of torch's layer, then the operator."""
        op = self.operator
        changed = [f for f in fields(op) if f.name != "angular" and getattr(op, f.name) != f.default]
        options = "".join(f", {f.name}={getattr(op, f.name)!r}" for f in changed)
        return f"{super().extra_repr()}, operator={self._name()}, angular={op.g!r}{options}"

    def _name(self) -> str:
        entry = operators.find(type(self.operator))
        return entry.name if entry else type(self.operator).__name__

    # ----------------------------------------------------------------------------------- geometry

    def _groups(self) -> int:
        return int(getattr(self, "groups", 1))

    def _kernels(self) -> int:
        return int(getattr(self, "out_channels", 0) or getattr(self, "out_features", 0))

    def _by_kernel(self, weight: Tensor) -> Tensor:
        """The weight as ``(groups, O / groups, ...)``, the rest being one kernel."""
        return weight.unflatten(0, (self._groups(), -1))

    def _directions(self, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Directions of the kernels in the layout of the weight, and their norms where they count, ``(O,)``."""
        weighted = self.operator.weighting != "none"
        if self.folded:
            return weight.to(dtype), at_least_float32(self.folded_norms) if weighted else None
        if self._kernels_fused(weight):
            return fused.direction(weight, self.operator, dtype), None
        with full_precision(weight):
            kernels = self._by_kernel(at_least_float32(weight))
            directions, norms = self.operator.direction(kernels, tuple(range(2, kernels.dim())))
        return self._by_layout(directions).to(dtype), norms.flatten() if weighted else None

    def _kernels_fused(self, weight: Tensor) -> bool:
        return fused.usable_for_kernels(weight, self.operator)

    def _by_layout(self, kernels: Tensor) -> Tensor:
        """The inverse of :meth:`_by_kernel`."""
        return kernels.flatten(0, 1)

    def _respond(self, x: Tensor, window: Window | None) -> Tensor:
        """The response to a batch, bias and moving average included."""
        dtype, weight = x.dtype, self.weight  # once: a parametrisation computes it anew each time
        if not x.is_meta and torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type) if dtype != torch.float64 else dtype
        elif x.dtype != weight.dtype:
            raise ArgumentError("input", f"must have the type of the weight, {weight.dtype}, got {x.dtype}")
        if self.operator.g.of_angle and is_sharded(weight):
            why = "whose kernels lie on several processes in its forward pass (tensor parallelism)"
            raise ArgumentError("angular", f"must be a function of the cosine in a layer {why}, got {self.operator.g}")
        directions, norms = self._directions(weight, dtype)
        op, mean = self.operator, None if self.training else self._mean_norm()
        y, batch_mean = decoupled(
            x.to(dtype),
            directions,
            op,
            window,
            radius=self._radius(),
            mean=mean,
            k=self._k(),
            kernel_norms=norms,
            sync=self.sync_mean,
        )
        if measures_radius(op) and self.training and batch_mean is not None and (x.numel() or self.sync_mean):
            self._observe(batch_mean.detach(), op)
        if self.bias is None:
            return y
        return y + self.bias.to(y.dtype).view(-1, *(1,) * (y.dim() - 2))

    @torch.no_grad()
    def _observe(self, batch_mean: Tensor, op: RadiusOperator) -> None:
        """Move the average of the patch norms towards that of a batch."""
        batch_mean = alongside(whole(batch_mean).to(self.patch_norm_mean.dtype), self.patch_norm_mean)
        moved = self.patch_norm_mean.lerp(batch_mean, 1 - op.mean_decay)
        first = batch_mean if op.mean_init == "first" else batch_mean * (1 - op.mean_decay)
        now = torch.where(self.patch_norm_seen.bool(), moved, first)
        try:
            self.patch_norm_mean.copy_(now)
            self.patch_norm_seen.fill_(1)
        except RuntimeError as error:  # transforms of torch.func forbid to change what they do not know of
            if not torch._C._are_functorch_transforms_active():
                raise
            raise HypersphereError(
                "a layer in training mode moves its average of patch norms, which transforms of torch.func do not "
                "allow: call eval() before, which takes the average as it is, or use mean_norm=False"
            ) from error


class _Conv(Decoupled):
    """A decoupled convolution of any dimension."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        operator: str | Operator = "sphere",
        **options: Any,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self.set_operator(operator, **options)

    def forward(self, input: Tensor) -> Tensor:
        """Responses ``(N, O, *output spatial)`` to ``(N, C, *spatial)``, or both without N."""
        layer: Any = self
        spatial = len(layer.kernel_size)
        _check_input(input, layer.in_channels, spatial)
        batch = input if input.dim() == spatial + 2 else input.unsqueeze(0)
        sides = layer._reversed_padding_repeated_twice
        padding = tuple(sides[::-2])
        if layer.padding_mode != "zeros":
            batch, padding = F.pad(batch, sides, mode=layer.padding_mode), (0,) * spatial
        elif sides[::2] != sides[1::2]:  # "same" with an even kernel
            batch, padding = F.pad(batch, sides), (0,) * spatial
        window = Window(layer.kernel_size, layer.stride, padding, layer.dilation, layer.groups)
        if min(window.output_size(tuple(batch.shape[2:]))) < 1:
            raise ArgumentError("input", f"must be at least as large as the kernel, got {tuple(input.shape)}")
        y = self._respond(batch, window)
        return y if input.dim() == spatial + 2 else y.squeeze(0)


class _ConvTranspose(Decoupled):
    """A decoupled transposed convolution of any dimension: a convolution over its input spread by the stride."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        bias: bool = False,
        dilation: Any = 1,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        operator: str | Operator = "sphere",
        **options: Any,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            output_padding,
            groups,
            bias,
            dilation,
            padding_mode,
            device,
            dtype,
        )
        self.set_operator(operator, **options)

    def _kernels_fused(self, weight: Tensor) -> bool:
        return False  # a kernel's taps do not lie side by side

    def _by_kernel(self, weight: Tensor) -> Tensor:
        return weight.unflatten(0, (self._groups(), -1)).transpose(1, 2)

    def _by_layout(self, kernels: Tensor) -> Tensor:
        return kernels.transpose(1, 2).flatten(0, 1)

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Responses ``(N, O, *output spatial)`` to ``(N, C, *spatial)``, or both without N."""
        layer: Any = self
        spatial = len(layer.kernel_size)
        _check_input(input, layer.in_channels, spatial)
        batch = input if input.dim() == spatial + 2 else input.unsqueeze(0)
        extra = layer._output_padding(
            batch, output_size, layer.stride, layer.padding, layer.kernel_size, spatial, layer.dilation
        )
        window = Window(layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups, tuple(extra))
        y = self._respond(batch, window)
        return y if input.dim() == spatial + 2 else y.squeeze(0)


def _of_one_layer(operator: str | Operator, options: Mapping[str, Any]) -> Operator:
    op = operators_module.operator(operator, **options)
    if op.learn_k == "network":
        raise ArgumentError("learn_k", "must be 'filter' or 'layer' for one layer: only convert() knows the network")
    return op


def _checked(value: float | Tensor, place: Tensor, low: float, *, open_low: bool = True) -> Tensor:
    """A value or values above ``low`` for a place, in float64."""
    # Numbers stay on the CPU, whatever the default device: their check must not wait for another one.
    try:
        given = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError):  # texts, lists of unequal length
        raise ArgumentError("value", f"must be a number or {len(place)} of them, got {value!r}") from None
    values = given.double()
    if values.shape not in ((), (1,), place.shape):
        wanted = f"be a number or have shape {tuple(place.shape)}"
        raise ArgumentError("value", f"must {wanted}, got shape {tuple(values.shape)}")
    for extreme in (values.min(), values.max()):
        check_range("value", float(extreme), low, open_low=open_low)
    return values


def _check_input(x: Tensor, channels: int, spatial: int) -> None:
    if x.dim() not in (spatial + 1, spatial + 2) or x.shape[-spatial - 1] != channels:
        shape = ", ".join(["N", str(channels), *"DHW"[3 - spatial :]])
        raise ArgumentError("input", f"must have shape ({shape}), N left out or not, got {tuple(x.shape)}")


class DecoupledConv1d(_Conv, nn.Conv1d):
    """``nn.Conv1d`` with a decoupled operator (see :class:`DecoupledConv2d`).

    Example:
        >>> DecoupledConv1d(4, 8, 3, operator="log")(torch.randn(2, 4, 9)).shape
        torch.Size([2, 8, 7])
    """

    torch_class = nn.Conv1d


class DecoupledConv2d(_Conv, nn.Conv2d):
    r"""``nn.Conv2d`` whose filters answer with :math:`h(\|x\|)\, g(\theta)` in place of an inner product.

    Takes the arguments of ``nn.Conv2d`` (``bias`` is off by default and added after the operator), then the operator
    by name or as an object and its options (:class:`hypersphere.nn.operators.Operator`).

    Args:
        in_channels: Channels of the input.
        out_channels: Filters.
        kernel_size: Size of a filter.
        stride: As in torch.
        padding: As in torch, with all of its padding modes.
        dilation: As in torch.
        groups: As in torch; each group has its own patch norms.
        bias: Learn a bias.
        padding_mode: As in torch.
        device: As in torch.
        dtype: As in torch.
        operator: ``sphere``, ``ball``, ``tanh``, ``linear``, ``seg``, ``log``, ``mix``, or an object.
        **options: Options of the operator, e.g. ``angular="sqcos"``.

    Shape:
        ``(N, C, H, W) -> (N, O, H', W')``.

    Example:
        >>> DecoupledConv2d(3, 8, 3, padding=1, operator="tanh", angular="sqcos")(torch.randn(2, 3, 9, 9)).shape
        torch.Size([2, 8, 9, 9])
    """

    torch_class = nn.Conv2d


class DecoupledConv3d(_Conv, nn.Conv3d):
    """``nn.Conv3d`` with a decoupled operator (see :class:`DecoupledConv2d`).

    Example:
        >>> DecoupledConv3d(2, 4, 3, operator="ball")(torch.randn(1, 2, 5, 5, 5)).shape
        torch.Size([1, 4, 3, 3, 3])
    """

    torch_class = nn.Conv3d


class DecoupledConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    """``nn.ConvTranspose1d`` with a decoupled operator (see :class:`DecoupledConvTranspose2d`).

    Example:
        >>> DecoupledConvTranspose1d(4, 8, 4, stride=2)(torch.randn(2, 4, 5)).shape
        torch.Size([2, 8, 12])
    """

    torch_class = nn.ConvTranspose1d


class DecoupledConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    """``nn.ConvTranspose2d`` with a decoupled operator.

    The patch of a place of the output is what reaches it of the input, as in the convolution over the input with
    zeros between its values that this layer is; a kernel's norm counts all of its taps.

    Example:
        >>> DecoupledConvTranspose2d(4, 8, 4, stride=2, padding=1)(torch.randn(2, 4, 5, 5)).shape
        torch.Size([2, 8, 10, 10])
    """

    torch_class = nn.ConvTranspose2d


class DecoupledConvTranspose3d(_ConvTranspose, nn.ConvTranspose3d):
    """``nn.ConvTranspose3d`` with a decoupled operator (see :class:`DecoupledConvTranspose2d`).

    Example:
        >>> DecoupledConvTranspose3d(2, 4, 2, stride=2)(torch.randn(1, 2, 3, 3, 3)).shape
        torch.Size([1, 4, 6, 6, 6])
    """

    torch_class = nn.ConvTranspose3d


class DecoupledLinear(Decoupled, nn.Linear):
    """``nn.Linear`` with a decoupled operator: the whole input is one patch.

    Args:
        in_features: Size of the input.
        out_features: Number of kernels.
        bias: Learn a bias, added after the operator.
        device: As in torch.
        dtype: As in torch.
        operator: The operator, by name or as an object.
        **options: Options of the operator.

    Shape:
        ``(..., in_features) -> (..., out_features)``.

    Example:
        >>> DecoupledLinear(16, 4, operator="sphere", angular="linear")(torch.randn(2, 5, 16)).shape
        torch.Size([2, 5, 4])
    """

    torch_class = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        operator: str | Operator = "sphere",
        **options: Any,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)
        self.set_operator(operator, **options)

    def forward(self, input: Tensor) -> Tensor:
        """Responses ``(..., out_features)`` to ``(..., in_features)``."""
        if input.dim() < 1 or input.shape[-1] != self.in_features:
            raise ArgumentError("input", f"must have shape (..., {self.in_features}), got {tuple(input.shape)}")
        # Neither -1, which would not do for an empty batch, nor numel(), which would fix the size of an exported batch.
        rows = input.reshape(math.prod(input.shape[:-1]), self.in_features)
        return self._respond(rows, None).view(*input.shape[:-1], self.out_features)


KINDS: dict[type[nn.Module], type[Decoupled]] = {
    kind.torch_class: kind
    for kind in (
        DecoupledConv1d,
        DecoupledConv2d,
        DecoupledConv3d,
        DecoupledConvTranspose1d,
        DecoupledConvTranspose2d,
        DecoupledConvTranspose3d,
        DecoupledLinear,
    )
}
"""Torch's layers and what each becomes."""


@functools.cache
def kind_of(base: type[nn.Module]) -> type[Decoupled] | None:
    """What a class of layers becomes; ``None`` for one that computes something of its own.

    A subclass of torch's layer that is only built differently becomes a class of both.

    Example:
        >>> kind_of(nn.Conv2d).__name__, kind_of(nn.LazyConv2d), kind_of(nn.ReLU)
        ('DecoupledConv2d', None, None)
    """
    if base in KINDS:
        return KINDS[base]
    parent = next((kind for kind in base.__mro__ if kind in KINDS), None)
    if parent is None or issubclass(base, (Decoupled, LazyModuleMixin)):
        return None
    for name in ("__call__", "forward", "_conv_forward"):
        if getattr(base, name, None) is not getattr(parent, name, None):
            return None
    own = {"torch_class": base, "__module__": __name__, "__reduce_ex__": _reduce_made}
    return type(f"Decoupled{base.__name__}", (KINDS[parent], base), own)


def _reduce_made(self: Decoupled, protocol: Any) -> Any:
    """How to pickle a layer whose class :func:`kind_of` has made: by the class it was made from."""
    reduced: Any = nn.Module.__reduce_ex__(self, protocol)
    return _new_made, (self.torch_class,), *reduced[2:]


def _new_made(base: type[nn.Module]) -> Decoupled:
    kind: Any = kind_of(base)  # type: ignore[arg-type]
    return kind.__new__(kind)


L = TypeVar("L", bound=Decoupled)


def _preset(base: type[L], operator: str) -> type[L]:
    """``base`` with another default operator, under the operator's name."""
    name = base.__name__.replace("Decoupled", operator.capitalize())

    def initialise(self: Any, *args: Any, operator: str | Operator = operator, **options: Any) -> None:
        base.__init__(self, *args, operator=operator, **options)

    doc = f"``nn.{base.torch_class.__name__}`` with the operator ``{operator}`` (see :class:`{base.__name__}`)."
    return type(name, (base,), {"__init__": initialise, "__doc__": doc, "__module__": __name__, "__qualname__": name})


def _presets(
    operator: str,
) -> tuple[
    type[DecoupledConv1d],
    type[DecoupledConv2d],
    type[DecoupledConv3d],
    type[DecoupledConvTranspose1d],
    type[DecoupledConvTranspose2d],
    type[DecoupledConvTranspose3d],
    type[DecoupledLinear],
]:
    """The layers of all kinds with one operator."""
    return (
        _preset(DecoupledConv1d, operator),
        _preset(DecoupledConv2d, operator),
        _preset(DecoupledConv3d, operator),
        _preset(DecoupledConvTranspose1d, operator),
        _preset(DecoupledConvTranspose2d, operator),
        _preset(DecoupledConvTranspose3d, operator),
        _preset(DecoupledLinear, operator),
    )


(
    SphereConv1d,
    SphereConv2d,
    SphereConv3d,
    SphereConvTranspose1d,
    SphereConvTranspose2d,
    SphereConvTranspose3d,
    SphereLinear,
) = _presets("sphere")
(
    BallConv1d,
    BallConv2d,
    BallConv3d,
    BallConvTranspose1d,
    BallConvTranspose2d,
    BallConvTranspose3d,
    BallLinear,
) = _presets("ball")
(
    TanhConv1d,
    TanhConv2d,
    TanhConv3d,
    TanhConvTranspose1d,
    TanhConvTranspose2d,
    TanhConvTranspose3d,
    TanhLinear,
) = _presets("tanh")
(
    LinearConv1d,
    LinearConv2d,
    LinearConv3d,
    LinearConvTranspose1d,
    LinearConvTranspose2d,
    LinearConvTranspose3d,
    LinearLinear,
) = _presets("linear")
(
    SegConv1d,
    SegConv2d,
    SegConv3d,
    SegConvTranspose1d,
    SegConvTranspose2d,
    SegConvTranspose3d,
    SegLinear,
) = _presets("seg")
(
    LogConv1d,
    LogConv2d,
    LogConv3d,
    LogConvTranspose1d,
    LogConvTranspose2d,
    LogConvTranspose3d,
    LogLinear,
) = _presets("log")
(
    MixConv1d,
    MixConv2d,
    MixConv3d,
    MixConvTranspose1d,
    MixConvTranspose2d,
    MixConvTranspose3d,
    MixLinear,
) = _presets("mix")


def create(operator: str | Operator, layer: str = "conv2d", **options: Any) -> Callable[..., Decoupled]:
    """A factory of layers with this operator, which takes the arguments of torch's layer of that kind.

    Args:
        operator: The operator, by name (``hypersphere list operators``) or as an object.
        layer: ``conv1d``, ``conv2d``, ``conv3d``, ``convtranspose1d``, ``convtranspose2d``, ``convtranspose3d`` or
            ``linear``.
        **options: Options of the operator.

    Example:
        >>> create("tanh", angular="sqcos")(3, 8, 3, padding=1)
        DecoupledConv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False, operator=tanh, ...)
        >>> create("sphere", "linear")(16, 4).weight.shape
        torch.Size([4, 16])
    """
    kinds = {torch_class.__name__.lower(): kind for torch_class, kind in KINDS.items()}
    key = layer.lower().replace("-", "").replace("_", "")
    if key not in kinds:
        raise ArgumentError("layer", f"must be one of {', '.join(kinds)}, got {layer!r}")
    return functools.partial(kinds[key], operator=operators_module.operator(operator, **options))


__all__ = [
    "KINDS",
    "BallConv1d",
    "BallConv2d",
    "BallConv3d",
    "BallConvTranspose1d",
    "BallConvTranspose2d",
    "BallConvTranspose3d",
    "BallLinear",
    "Decoupled",
    "DecoupledConv1d",
    "DecoupledConv2d",
    "DecoupledConv3d",
    "DecoupledConvTranspose1d",
    "DecoupledConvTranspose2d",
    "DecoupledConvTranspose3d",
    "DecoupledLinear",
    "LinearConv1d",
    "LinearConv2d",
    "LinearConv3d",
    "LinearConvTranspose1d",
    "LinearConvTranspose2d",
    "LinearConvTranspose3d",
    "LinearLinear",
    "LogConv1d",
    "LogConv2d",
    "LogConv3d",
    "LogConvTranspose1d",
    "LogConvTranspose2d",
    "LogConvTranspose3d",
    "LogLinear",
    "MixConv1d",
    "MixConv2d",
    "MixConv3d",
    "MixConvTranspose1d",
    "MixConvTranspose2d",
    "MixConvTranspose3d",
    "MixLinear",
    "SegConv1d",
    "SegConv2d",
    "SegConv3d",
    "SegConvTranspose1d",
    "SegConvTranspose2d",
    "SegConvTranspose3d",
    "SegLinear",
    "SphereConv1d",
    "SphereConv2d",
    "SphereConv3d",
    "SphereConvTranspose1d",
    "SphereConvTranspose2d",
    "SphereConvTranspose3d",
    "SphereLinear",
    "TanhConv1d",
    "TanhConv2d",
    "TanhConv3d",
    "TanhConvTranspose1d",
    "TanhConvTranspose2d",
    "TanhConvTranspose3d",
    "TanhLinear",
    "create",
]
