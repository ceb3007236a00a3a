"""Networks for aligned faces: those of SphereFace, and MobileFaceNet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.models.networks import (
    Layer,
    OnMaps,
    ResidualUnit,
    Shape,
    activation,
    check_each,
    conv_block,
    models,
)
from hypersphere.nn import factory

_SLOPE = 0.25  # of PReLU at the start, one for each channel


class _FaceUnit(ResidualUnit):
    """Two convolutions with the second activation in front of the sum, and none after it."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.act1(self.norm1(self.conv1(x)))
        return x + self.act2(self.norm2(self.conv2(y)))


class SphereFaceNet(nn.Module):
    r"""Network of SphereFace: four stages, each a 3x3 convolution with stride 2 and residual units, then one FC layer.

    With ``variant="sphereface"`` a unit is :math:`x + a(K_2 * a(K_1 * x))`, a being PReLU and the kernels 3x3: the
    activation stands in front of the sum and none follows it. Only the convolutions with stride 2 and the FC layer have
    biases. They start uniform in :math:`\pm\sqrt{3 / \text{fan-in}}`, the kernels of units normal with deviation 0.01,
    biases at 0.

    ``variant="opensphere"`` is the later one of OpenSphere: ReLU, a unit is :math:`a(x + K_2 * a(K_1 * x))`, every
    convolution has a bias unless normalisation follows it, the features are normalised where the rest is, with a first
    factor of 0.1, and kernels start normal with variance 2 / fan-out.

    Args:
        shape: Shape ``(C, H, W)`` of one image, by design ``(3, 112, 96)`` or ``(3, 112, 112)``.
        dim: Feature dimension.
        widths: Filters of each stage.
        variant: ``"sphereface"`` as published, or ``"opensphere"``.
        conv: Convolution layer.
        linear: Linear layer.
        norm: Normalisation layer, behind every convolution; the published networks have none.
        act: Activation layer; ``None`` is PReLU with one slope for each channel, or the ReLU of OpenSphere.
        fc_relu: Apply a ReLU to the features, as networks had it before SphereFace.

    Shape:
        ``(B, C, H, W) -> (B, dim)``.

    Example:
        >>> import torch
        >>> SFNet4((3, 112, 96), widths=(4, 8, 8, 8), dim=16)(torch.randn(2, 3, 112, 96)).shape
        torch.Size([2, 16])
    """

    units: ClassVar[tuple[int, ...]]
    """Residual units of each stage."""

    later_options: ClassVar[Mapping[str, Any]] = {"fc_relu": False}

    def __init__(
        self,
        shape: Shape,
        *,
        dim: int = 512,
        widths: tuple[int, ...] = (64, 128, 256, 512),
        variant: Literal["sphereface", "opensphere"] = "sphereface",
        conv: Layer = "conv2d",
        linear: Layer = "linear",
        norm: Layer = "identity",
        act: Layer | None = None,
        fc_relu: bool = False,
    ) -> None:
        super().__init__()
        check_range("dim", dim, 1)
        check_choice("variant", variant, ("sphereface", "opensphere"))
        if len(widths) != len(self.units):
            raise ArgumentError(
                "widths", f"must hold one number for each of the {len(self.units)} stages, got {widths}"
            )
        check_each("widths", widths)
        later, plain = variant == "opensphere", factory(norm) is nn.Identity
        if act is None:
            act = "relu" if later else "prelu"
        options: dict[str, Any] = {"slope": _SLOPE}

        def with_bias(*sizes: int, **more: Any) -> nn.Module:
            return factory(conv)(*sizes, **{**more, "bias": plain or not later})

        inside = with_bias if later and plain else conv
        unit = ResidualUnit if later else _FaceUnit
        layers: list[nn.Module] = []
        channels = shape[0]
        for filters, count in zip(widths, self.units, strict=True):
            layers += conv_block(channels, filters, with_bias, norm, act, stride=2, **options)
            layers += [unit(filters, filters, 1, "pad", inside, norm, act, **options) for _ in range(count)]
            channels = filters
        self.features = nn.Sequential(*layers)
        inputs = channels * math.prod(-(-side // 2 ** len(widths)) for side in shape[1:])
        self.embed = factory(linear)(inputs, dim, bias=True)
        self.after = OnMaps(factory(norm)(dim)) if later else nn.Identity()
        self.last = nn.ReLU() if fc_relu else nn.Identity()
        self.dim = dim
        self._initialise(later)

    def _initialise(self, later: bool) -> None:
        inside = {layer for unit in self.modules() if isinstance(unit, _FaceUnit) for layer in unit.modules()}
        for module in self.modules():
            if not isinstance(module, nn.Conv2d | nn.Linear):
                continue
            if later:
                if isinstance(module, nn.Conv2d):
                    nn.init.kaiming_normal_(module.weight, mode="fan_out")
                continue
            if module in inside:
                nn.init.normal_(module.weight, std=0.01)
            else:
                nn.init.kaiming_uniform_(module.weight, nonlinearity="linear")  # +-sqrt(3 / fan-in)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, weight in self.after.named_parameters():
            if name.endswith("weight"):
                nn.init.constant_(weight, 0.1)

    def forward(self, images: Tensor) -> Tensor:
        """Features ``(B, dim)`` of images ``(B, C, H, W)``."""
        return self.last(self.after(self.embed(self.features(images).flatten(1))))


@models.register("sfnet-4")
class SFNet4(SphereFaceNet):
    """SphereFace's network with 4 convolutions for aligned faces, and FC 512."""

    units = (0, 0, 0, 0)


@models.register("sfnet-10")
class SFNet10(SphereFaceNet):
    """SphereFace's network with 10 convolutions for aligned faces, and FC 512."""

    units = (0, 1, 2, 0)


@models.register("sfnet-20")
class SFNet20(SphereFaceNet):
    """SphereFace's network with 20 convolutions for aligned faces, and FC 512."""

    units = (1, 2, 4, 1)


@models.register("sfnet-36")
class SFNet36(SphereFaceNet):
    """SphereFace's network with 36 convolutions for aligned faces, and FC 512."""

    units = (2, 4, 8, 2)


@models.register("sfnet-64")
class SFNet64(SphereFaceNet):
    """SphereFace's network with 64 convolutions for aligned faces, and FC 512."""

    units = (3, 8, 16, 3)


class _ConvBlock(nn.Module):
    """Convolution, normalisation and, unless it is linear, activation."""

    def __init__(self, inputs: int, outputs: int, conv: Layer, norm: Layer, act: Layer | None, **window: Any) -> None:
        super().__init__()
        self.conv = factory(conv)(inputs, outputs, bias=False, **window)
        self.bn = factory(norm)(outputs)
        self.prelu = None if act is None else activation(act, outputs, _SLOPE)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        return y if self.prelu is None else self.prelu(y)


class _Bottleneck(nn.Module):
    """Inverted bottleneck: 1x1 to more channels, 3x3 of each channel, 1x1 without activation; a shortcut if it fits."""

    def __init__(
        self, inputs: int, outputs: int, inner: int, stride: int, conv: Layer, norm: Layer, act: Layer
    ) -> None:
        super().__init__()
        make = factory(conv)
        self.conv = nn.Sequential(
            make(inputs, inner, 1, bias=False),
            factory(norm)(inner),
            activation(act, inner, _SLOPE),
            make(inner, inner, 3, stride=stride, padding=1, groups=inner, bias=False),
            factory(norm)(inner),
            activation(act, inner, _SLOPE),
            make(inner, outputs, 1, bias=False),
            factory(norm)(outputs),
        )
        self.connect = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.connect else self.conv(x)


# Of each group of bottlenecks: how much wider they are inside, channels, number, stride of the first.
_BOTTLENECKS = ((2, 64, 5, 2), (4, 128, 1, 2), (2, 128, 6, 1), (4, 128, 1, 2), (2, 128, 2, 1))


@models.register("mobilefacenet")
class MobileFaceNet(nn.Module):
    """MobileFaceNet for aligned faces: inverted bottlenecks, and a weight for each place of the last map.

    A global depthwise convolution stands where others average: the middle of a face says more than its edge. Kernels
    start normal with variance 2 / fan-out. The names of parameters are those of the widespread PyTorch weights.

    Args:
        shape: Shape ``(C, H, W)`` of one image, by design ``(3, 112, 96)`` or ``(3, 112, 112)``.
        dim: Feature dimension.
        conv: Convolution layer; it must take ``groups``.
        norm: Normalisation layer.
        act: Activation layer.

    Shape:
        ``(B, C, H, W) -> (B, dim)``.

    Example:
        >>> import torch
        >>> MobileFaceNet((3, 112, 96))(torch.randn(2, 3, 112, 96)).shape
        torch.Size([2, 128])
    """

    def __init__(
        self,
        shape: Shape,
        *,
        dim: int = 128,
        conv: Layer = "conv2d",
        norm: Layer = "batchnorm2d",
        act: Layer = "prelu",
    ) -> None:
        super().__init__()
        check_range("dim", dim, 1)
        kinds = (conv, norm, act)
        self.conv1 = _ConvBlock(shape[0], 64, *kinds, kernel_size=3, stride=2, padding=1)
        self.dw_conv1 = _ConvBlock(64, 64, *kinds, kernel_size=3, padding=1, groups=64)
        blocks: list[nn.Module] = []
        channels = 64
        for wider, filters, count, first in _BOTTLENECKS:
            for number in range(count):
                blocks.append(_Bottleneck(channels, filters, wider * channels, 1 if number else first, *kinds))
                channels = filters
        self.blocks = nn.Sequential(*blocks)
        self.conv2 = _ConvBlock(channels, 512, *kinds, kernel_size=1)
        last = tuple(-(-side // 16) for side in shape[1:])
        self.linear7 = _ConvBlock(512, 512, conv, norm, None, kernel_size=last, groups=512)
        self.linear1 = _ConvBlock(512, dim, conv, norm, None, kernel_size=1)
        self.dim = dim
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, images: Tensor) -> Tensor:
        """Features ``(B, dim)`` of images ``(B, C, H, W)``."""
        maps = self.conv2(self.blocks(self.dw_conv1(self.conv1(images))))
        return self.linear1(self.linear7(maps)).flatten(1)
