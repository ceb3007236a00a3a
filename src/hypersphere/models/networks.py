"""Convolutional backbones, each built from exchangeable ``conv``, ``linear``, ``norm`` and ``act`` layers.

A layer argument is a name from :data:`hypersphere.nn.layers` or a factory with the signature of torch's layer of
that kind (``conv(in, out, kernel, stride=, padding=, bias=)``, ``linear(in, out)``, ``norm(channels)``, ``act()``).
By default no activation follows the last layer: a ReLU there would leave only one orthant of the sphere to the
features. The classifier is no part of a backbone: it is the head in :mod:`hypersphere.losses`.

Layers that a conversion may want to leave alone are known by their names: the fully connected layers are ``hidden.*``
and ``embed``, the 1x1 convolutions of projection shortcuts are ``features.*.project.0``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.nn import LayerFactory, factory
from hypersphere.registry import Registry

Layer = str | LayerFactory
Shape = tuple[int, int, int]
Init = Literal["conv", "he", "xavier", "normal", "sphereface"]

models: Registry[nn.Module] = Registry("model", positional=("shape",), members=("hypersphere.tasks.*.models",))


def create(name: str, shape: Shape, **options: Any) -> nn.Module:
    """Build a backbone by name; ``hypersphere list models`` prints the names and their options.

    Args:
        name: Name or alias.
        shape: Shape ``(C, H, W)`` of one image.
        **options: The model's own options.

    Example:
        >>> create("plain-cnn", (3, 32, 32), dim=64)(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 64])
    """
    return models.create(name, shape, **options)


# Kernel and stride of the convolution in front, and whether 3x3 max pooling with stride 2 follows it.
_STEMS = {"none": (0, 1, False), "3x3": (3, 1, False), "3x3-stride2": (3, 2, False), "imagenet": (7, 2, True)}
_POOLS: dict[str, dict[str, Any]] = {
    "2x2": {"kernel_size": 2},
    "2x2-ceil": {"kernel_size": 2, "ceil_mode": True},
    "3x3": {"kernel_size": 3, "stride": 2, "padding": 1},
}
_INITS: dict[str, Callable[[Tensor], Tensor]] = {
    "conv": nn.init.kaiming_normal_,
    "he": nn.init.kaiming_normal_,
    "xavier": nn.init.xavier_normal_,
    "normal": nn.init.normal_,
    "sphereface": nn.init.xavier_uniform_,
}


def activation(act: Layer, channels: int, slope: float | None) -> nn.Module:
    """The activation layer; a PReLU with a given slope has one slope for each channel.

    Example:
        >>> activation("prelu", 8, 0.25).weight.shape
        torch.Size([8])
    """
    made = factory(act)
    return nn.PReLU(channels, init=slope) if made is nn.PReLU and slope is not None else made()


def conv_block(
    inputs: int,
    outputs: int,
    conv: Layer,
    norm: Layer,
    act: Layer,
    *,
    kernel: int = 3,
    stride: int = 1,
    slope: float | None = None,
) -> list[nn.Module]:
    """Convolution that keeps the size but for its stride, normalisation, activation.

    Args:
        inputs: Channels that come in.
        outputs: Channels that go out.
        conv: Convolution.
        norm: Normalisation.
        act: Activation.
        kernel: Side of the kernel.
        stride: Step of the kernel.
        slope: Of a PReLU at the start, one for each channel; ``None`` is the layer's own.

    Example:
        >>> nn.Sequential(*conv_block(3, 8, "conv2d", "batchnorm2d", "relu", stride=2))(torch.rand(2, 3, 6, 6)).shape
        torch.Size([2, 8, 3, 3])
    """
    return [
        factory(conv)(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False),
        factory(norm)(outputs),
        activation(act, outputs, slope),
    ]


def _stem(
    stem: str, inputs: int, outputs: int, conv: Layer, norm: Layer, act: Layer, slope: float | None
) -> list[nn.Module]:
    kernel, stride, pool = _STEMS[stem]
    if not kernel:
        return []
    block = conv_block(inputs, outputs, conv, norm, act, kernel=kernel, stride=stride, slope=slope)
    return [*block, nn.MaxPool2d(**_POOLS["3x3"])] if pool else block


def _stem_factor(stem: str) -> int:
    """What the stem divides the sides of the image by."""
    _, stride, pool = _STEMS[stem]
    return 2 * stride if pool else stride


class OnMaps(nn.Sequential):
    """Layers for maps ``(B, C, H, W)``, applied to features ``(B, C)``.

    Example:
        >>> OnMaps(nn.BatchNorm2d(3))(torch.rand(2, 3)).shape
        torch.Size([2, 3])
    """

    def forward(self, features: Tensor) -> Tensor:
        """Features ``(B, C)`` as maps of one pixel through the layers."""
        return super().forward(features[:, :, None, None]).flatten(1)


def _initialise(model: nn.Module, init: str) -> None:
    """Set the first weights as :class:`PlainCNN` says."""
    check_choice("init", init, tuple(_INITS))
    inside = {layer for unit in model.modules() if isinstance(unit, ResidualUnit) for layer in unit.modules()}
    for module in model.modules():
        if not isinstance(module, nn.Conv2d if init == "conv" else (nn.Conv2d, nn.Linear)):
            continue
        if init == "sphereface" and module in inside:
            nn.init.normal_(module.weight, std=0.01)
        else:
            _INITS[init](module.weight)
        if init != "conv" and module.bias is not None:
            nn.init.zeros_(module.bias)


def set_batch_norm(model: nn.Module, eps: float | None, momentum: float | None) -> None:
    """Set the constants of batch normalisation, in all layers of a model, where they are given.

    Example:
        >>> layer = nn.BatchNorm1d(4)
        >>> set_batch_norm(layer, 1e-3, None)
        >>> layer.eps, layer.momentum
        (0.001, 0.1)
    """
    if eps is not None:
        check_range("bn_eps", eps, 0, open_low=True)
    if momentum is not None:
        check_range("bn_momentum", momentum, 0, 1)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eps = module.eps if eps is None else eps
            module.momentum = module.momentum if momentum is None else momentum


def _check_size(shape: Shape, factor: int) -> None:
    if min(shape[1:]) < factor:
        raise ArgumentError("shape", f"must be at least {factor} pixels high and wide here, got {shape}")


def check_each(argument: str, values: tuple[int, ...], low: int = 1) -> None:
    """Raise :class:`ArgumentError` unless each of several sizes is at least ``low``.

    Example:
        >>> check_each("widths", (8, 0))
        Traceback (most recent call last):
        hypersphere.errors.ArgumentError: widths must be at least 1, got 0
    """
    for value in values:
        check_range(argument, value, low)


@models.register("plain-cnn")
class PlainCNN(nn.Module):
    """Plain CNN: units of convolutions, each followed by max pooling, then linear layers.

    Each convolution is followed by normalisation and activation.

    Args:
        shape: Shape ``(C, H, W)`` of one image.
        dim: Feature dimension; ``None`` takes the last map as it is, flattened.
        convs_per_unit: Convolutions in each unit; 3 units of 1, 3 and 6 are CNN-3, CNN-9 and CNN-18.
        widths: Filters of each unit.
        stem: One convolution in front of the units, with the filters of the first: ``"3x3"``, ``"3x3-stride2"``, or
            ``"imagenet"``, which is 7x7 with stride 2 and 3x3 max pooling with stride 2.
        kernel: Side of the kernels in the units.
        pool: Pooling, always with stride 2; ``"2x2-ceil"`` and ``"3x3"`` round an odd side up, not down.
        pool_last: Also pool after the last unit.
        hidden: Sizes of linear layers in front of the last, each followed by normalisation and activation.
        fc_bn: Normalise the output of the last linear layer.
        fc_act: Apply the activation to the output of the last linear layer.
        fc_bias: Give the linear layers biases.
        fc_decoupled: Build the linear layers with ``linear``; otherwise they are ordinary ones.
        slope: First slope of PReLU activations, one for each channel; ``None``: 0.25, one for each layer.
        init: First weights. ``"he"``: normal with variance 2 / fan-in; ``"conv"``: the same, but linear layers keep
            their own; ``"xavier"``: normal with variance 2 / (fan-in + fan-out); ``"normal"``: standard normal;
            ``"sphereface"``: uniform Xavier, normal with deviation 0.01 in residual units.
        bn_eps: Epsilon of batch normalisation; ``None`` keeps the layer's own.
        bn_momentum: Momentum of batch normalisation; ``None`` keeps the layer's own.
        conv: Convolution layer.
        linear: Linear layer.
        norm: Normalisation layer.
        act: Activation layer.

    Shape:
        ``(B, C, H, W) -> (B, dim)``.

    Example:
        >>> PlainCNN((3, 32, 32), dim=256)(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 256])
    """

    later_options: ClassVar[Mapping[str, Any]] = {
        **{
            "stem": "none",
            "kernel": 3,
            "pool": "2x2",
            "pool_last": True,
            "hidden": (),
            "fc_bn": False,
            "fc_act": False,
        },
        **{"fc_bias": False, "fc_decoupled": True, "slope": None, "init": "conv", "bn_eps": None, "bn_momentum": None},
    }

    def __init__(
        self,
        shape: Shape,
        *,
        dim: int | None = 256,
        convs_per_unit: int = 3,
        widths: tuple[int, ...] = (64, 96, 128),
        stem: Literal["none", "3x3", "3x3-stride2", "imagenet"] = "none",
        kernel: int = 3,
        pool: Literal["2x2", "2x2-ceil", "3x3"] = "2x2",
        pool_last: bool = True,
        hidden: tuple[int, ...] = (),
        fc_bn: bool = False,
        fc_act: bool = False,
        fc_bias: bool = False,
        fc_decoupled: bool = True,
        slope: float | None = None,
        init: Init = "conv",
        bn_eps: float | None = None,
        bn_momentum: float | None = None,
        conv: Layer = "conv2d",
        linear: Layer = "linear",
        norm: Layer = "batchnorm2d",
        act: Layer = "relu",
    ) -> None:
        super().__init__()
        check_choice("stem", stem, tuple(_STEMS))
        check_choice("pool", pool, tuple(_POOLS))
        check_range("convs_per_unit", convs_per_unit, 1)
        check_each("widths", widths)
        check_each("hidden", hidden)
        if kernel < 1 or kernel % 2 == 0:
            raise ArgumentError("kernel", f"must be odd and at least 1, got {kernel}")
        if stem != "none" and not widths:
            raise ArgumentError("stem", f"needs units: it has the filters of the first, got {stem!r} and no widths")
        pools = max(len(widths) - (not pool_last), 0)
        _check_size(shape, _stem_factor(stem) * 2**pools)

        channels = widths[0] if stem != "none" else shape[0]
        layers = _stem(stem, shape[0], channels, conv, norm, act, slope)
        for unit, filters in enumerate(widths):
            for _ in range(convs_per_unit):
                layers += conv_block(channels, filters, conv, norm, act, kernel=kernel, slope=slope)
                channels = filters
            if unit < pools:
                layers.append(nn.MaxPool2d(**_POOLS[pool]))
        self.features = nn.Sequential(*layers)

        inputs = channels
        for side in shape[1:]:
            inner = -(-side // _stem_factor(stem))
            inputs *= inner // 2**pools if pool == "2x2" else -(-inner // 2**pools)
        fully_connected = factory(linear if fc_decoupled else "linear")
        layers = []
        for outputs in hidden:
            layers.append(fully_connected(inputs, outputs, bias=fc_bias))
            layers += [OnMaps(factory(norm)(outputs)), activation(act, outputs, slope)]
            inputs = outputs
        self.hidden = nn.Sequential(*layers)
        self.dim = inputs if dim is None else dim
        check_range("dim", self.dim, 1)
        self.embed = nn.Identity() if dim is None else fully_connected(inputs, dim, bias=fc_bias)
        self.after = nn.Sequential(
            OnMaps(factory(norm)(self.dim)) if fc_bn else nn.Identity(),
            activation(act, self.dim, slope) if fc_act else nn.Identity(),
        )
        _initialise(self, init)
        set_batch_norm(self, bn_eps, bn_momentum)

    def forward(self, images: Tensor) -> Tensor:
        """Features ``(B, dim)`` of images ``(B, C, H, W)``."""
        return self.after(self.embed(self.hidden(self.features(images).flatten(1))))


@models.register("digits-cnn")
class DigitsCNN(PlainCNN):
    """Small CNN for 8x8 to 28x28 digits: two units of two convolutions with PReLU.

    Args:
        shape: Shape ``(C, H, W)`` of one image.
        dim: Feature dimension; 3 can be drawn on a sphere.
        width: Filters of the first unit; the second has twice as many.
        conv: Convolution layer.
        linear: Linear layer.
        norm: Normalisation layer.
        act: Activation layer.

    Shape:
        ``(B, C, H, W) -> (B, dim)``.

    Example:
        >>> DigitsCNN((1, 8, 8))(torch.randn(2, 1, 8, 8)).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        shape: Shape,
        *,
        dim: int = 3,
        width: int = 32,
        conv: Layer = "conv2d",
        linear: Layer = "linear",
        norm: Layer = "batchnorm2d",
        act: Layer = "prelu",
    ) -> None:
        check_range("width", width, 1)
        super().__init__(
            shape,
            dim=dim,
            convs_per_unit=2,
            widths=(width, 2 * width),
            conv=conv,
            linear=linear,
            norm=norm,
            act=act,
        )


class ResidualUnit(nn.Module):
    """Residual unit: convolutions and a shortcut around them; :class:`ResNet` says what the kinds are.

    Example:
        >>> ResidualUnit(3, 8, 2, "pad", "conv2d", "batchnorm2d", "relu")(torch.rand(2, 3, 6, 6)).shape
        torch.Size([2, 8, 3, 3])
    """

    conv1: nn.Module
    norm1: nn.Module
    act1: nn.Module
    conv2: nn.Module
    norm2: nn.Module
    act2: nn.Module

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int,
        shortcut: str,
        conv: Layer,
        norm: Layer,
        act: Layer,
        *,
        kind: str = "basic",
        slope: float | None = None,
        shortcut_conv: Layer | None = None,
    ) -> None:
        super().__init__()
        plan = [(inputs, outputs, 3, stride), (outputs, outputs, 3, 1)]
        if kind == "bottleneck":
            narrow = outputs // 4
            plan = [(inputs, narrow, 1, 1), (narrow, narrow, 3, stride), (narrow, outputs, 1, 1)]
        self.before = kind == "preactivation"
        self.convs = len(plan)
        for number, (now, then, kernel, step) in enumerate(plan, 1):
            channels = now if self.before else then
            layer = factory(conv)(now, then, kernel, stride=step, padding=kernel // 2, bias=False)
            self.add_module(f"conv{number}", layer)
            self.add_module(f"norm{number}", factory(norm)(channels))
            last = kind == "sphereface" and number == self.convs
            self.add_module(f"act{number}", nn.Identity() if last else activation(act, channels, slope))
        self.stride, self.extra = stride, outputs - inputs
        self.project: nn.Module | None = None
        if shortcut == "projection" and (stride != 1 or inputs != outputs):
            made = factory(conv if shortcut_conv is None else shortcut_conv)
            self.project = nn.Sequential(made(inputs, outputs, 1, stride=stride, bias=False))
            if not self.before:
                self.project.append(factory(norm)(outputs))

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.project is not None:
            return self.project(x)
        if self.stride != 1:
            x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, 0, self.extra)) if self.extra else x

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(B, outputs, H / stride, W / stride)`` of maps ``(B, inputs, H, W)``."""
        if self.before:
            y = self.act1(self.norm1(x))
            shortcut = self._shortcut(x if self.project is None else y)
            return self.conv2(self.act2(self.norm2(self.conv1(y)))) + shortcut
        *inner, (conv, norm, act) = (
            [getattr(self, f"{part}{number}") for part in ("conv", "norm", "act")]
            for number in range(1, self.convs + 1)
        )
        y = x
        for layers in inner:
            for layer in layers:
                y = layer(y)
        return act(norm(conv(y)) + self._shortcut(x))


@models.register("resnet")
class ResNet(nn.Module):
    """ResNet: a stem, stages of residual units, average pooling.

    The units by ``unit``, with ``[...]`` for what the shortcut goes around:

    * ``"basic"``: ``act([3x3, norm, act, 3x3, norm] + shortcut)``;
    * ``"bottleneck"``: ``act([1x1, norm, act, 3x3, norm, act, 1x1, norm] + shortcut)``, four times as wide outside as
      inside, with the stride in the 3x3 convolution;
    * ``"preactivation"``: ``[norm, act, 3x3, norm, act, 3x3] + shortcut``, and a last ``norm, act``;
    * ``"sphereface"``: ``[3x3, norm, act, 3x3, norm] + identity``; a convolution in front of the units of a stage
      changes the size.

    Args:
        shape: Shape ``(C, H, W)`` of one image.
        units: Residual units of each stage.
        widths: Filters of each stage.
        strides: Stride of the first convolution of each stage; ``None`` is 1 for the first stage and 2 for the others.
        stem: Convolution in front, with the filters of the first stage: ``"3x3"``, ``"3x3-stride2"``, or
            ``"imagenet"``, which is 7x7 with stride 2 and 3x3 max pooling with stride 2.
        unit: Kind of residual unit.
        shortcut: ``"pad"`` subsamples and adds zero channels; ``"projection"`` is a 1x1 convolution with normalisation
            where the shape changes. Its module is called ``project``, by which a conversion can leave it alone.
        shortcut_decoupled: Build the 1x1 convolutions with ``conv`` (v1 of the SphereNets); otherwise they are ordinary
            ones (v2).
        root_relu: Apply the activation to the output of the stem.
        dim: Feature dimension; ``None`` takes the pooled channels as they are.
        slope: First slope of PReLU activations, one for each channel; ``None``: 0.25, one for each layer.
        init: First weights, see :class:`PlainCNN`.
        bn_eps: Epsilon of batch normalisation; ``None`` keeps the layer's own.
        bn_momentum: Momentum of batch normalisation; ``None`` keeps the layer's own.
        conv: Convolution layer.
        linear: Linear layer, used where ``dim`` is given.
        norm: Normalisation layer.
        act: Activation layer.

    Shape:
        ``(B, C, H, W) -> (B, dim)``.

    Example:
        >>> ResNet((3, 64, 64), units=(1, 1), widths=(8, 16))(torch.randn(2, 3, 64, 64)).shape
        torch.Size([2, 16])
    """

    later_options: ClassVar[Mapping[str, Any]] = {
        **{"stem": "none", "slope": None, "init": "conv", "bn_eps": None, "bn_momentum": None},
    }

    def __init__(
        self,
        shape: Shape,
        *,
        units: tuple[int, ...] = (2, 2, 2, 2),
        widths: tuple[int, ...] = (64, 128, 256, 512),
        strides: tuple[int, ...] | None = None,
        stem: Literal["3x3", "3x3-stride2", "imagenet"] = "imagenet",
        unit: Literal["basic", "bottleneck", "preactivation", "sphereface"] = "basic",
        shortcut: Literal["pad", "projection"] = "projection",
        shortcut_decoupled: bool = False,
        root_relu: bool = True,
        dim: int | None = None,
        slope: float | None = None,
        init: Init = "he",
        bn_eps: float | None = None,
        bn_momentum: float | None = None,
        conv: Layer = "conv2d",
        linear: Layer = "linear",
        norm: Layer = "batchnorm2d",
        act: Layer = "relu",
    ) -> None:
        super().__init__()
        strides = (1, *[2] * (len(widths) - 1)) if strides is None else strides
        check_choice("stem", stem, tuple(_STEMS)[1:])
        check_choice("unit", unit, ("basic", "bottleneck", "preactivation", "sphereface"))
        check_choice("shortcut", shortcut, ("pad", "projection"))
        _check_stages(units, widths, strides, unit)
        if shortcut == "pad" and sorted(widths) != list(widths):
            raise ArgumentError("widths", f"must not decrease with shortcut='pad', got {widths}")
        if dim is not None:
            check_range("dim", dim, 1)
        _check_size(shape, _stem_factor(stem) * math.prod(strides))

        before = unit == "preactivation"
        channels = widths[0]
        outside: tuple[Layer, Layer] = ("identity", "identity") if before else (norm, act if root_relu else "identity")
        layers = _stem(stem, shape[0], channels, conv, *outside, slope)
        for filters, count, stride in zip(widths, units, strides, strict=True):
            step = stride
            if unit == "sphereface" and (step != 1 or channels != filters):
                layers += conv_block(channels, filters, conv, norm, act, stride=step, slope=slope)
                channels, step = filters, 1
            for _ in range(count):
                outputs = 4 * filters if unit == "bottleneck" else filters
                ordinary = None if shortcut_decoupled else "conv2d"
                options: dict[str, Any] = {"kind": unit, "slope": slope, "shortcut_conv": ordinary}
                layers.append(ResidualUnit(channels, outputs, step, shortcut, conv, norm, act, **options))
                channels, step = outputs, 1
        if before:
            layers += [factory(norm)(channels), activation(act, channels, slope)]
        self.features = nn.Sequential(*layers)
        self.embed = nn.Identity() if dim is None else factory(linear)(channels, dim)
        self.dim = channels if dim is None else dim
        _initialise(self, init)
        set_batch_norm(self, bn_eps, bn_momentum)

    def forward(self, images: Tensor) -> Tensor:
        """Features ``(B, dim)`` of images ``(B, C, H, W)``."""
        return self.embed(torch.mean(self.features(images), dim=(2, 3)))


def _check_stages(units: tuple[int, ...], widths: tuple[int, ...], strides: tuple[int, ...], unit: str) -> None:
    """One number for each stage, and none too small."""
    for name, values, low in (
        ("widths", widths, 1),
        ("units", units, 0 if unit == "sphereface" else 1),
        ("strides", strides, 1),
    ):
        if not values or len(values) != len(widths):
            raise ArgumentError(
                name, f"must hold one number for each of the {max(len(widths), 1)} stages, got {values}"
            )
        check_each(name, values, low)


@models.register("cifar-resnet", aliases=("resnet-cifar",))
class CifarResNet(ResNet):
    """CIFAR ResNet: a 3x3 convolution, three stages of residual units, average pooling.

    Args:
        shape: Shape ``(C, H, W)`` of one image.
        depth: Number of layers, 6n + 2 (20, 32, 44, 56, 110).
        widths: Filters of the three stages.
        shortcut: ``"pad"`` subsamples and adds zero channels; ``"projection"`` is a 1x1 convolution.
        dim: Feature dimension; ``None`` takes the pooled channels as they are.
        conv: Convolution layer.
        linear: Linear layer, used where ``dim`` is given.
        norm: Normalisation layer.
        act: Activation layer.

    Shape:
        ``(B, C, H, W) -> (B, dim)``.

    Example:
        >>> CifarResNet((3, 32, 32), depth=20)(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 64])
    """

    def __init__(
        self,
        shape: Shape,
        *,
        depth: int = 20,
        widths: tuple[int, int, int] = (16, 32, 64),
        shortcut: Literal["pad", "projection"] = "pad",
        dim: int | None = None,
        conv: Layer = "conv2d",
        linear: Layer = "linear",
        norm: Layer = "batchnorm2d",
        act: Layer = "relu",
    ) -> None:
        if depth < 8 or (depth - 2) % 6:
            raise ArgumentError("depth", f"must be 6n + 2 with n >= 1 (8, 14, 20, 32, ...), got {depth}")
        super().__init__(
            shape,
            units=((depth - 2) // 6,) * 3,
            widths=widths,
            stem="3x3",
            shortcut=shortcut,
            shortcut_decoupled=True,
            dim=dim,
            init="conv",
            conv=conv,
            linear=linear,
            norm=norm,
            act=act,
        )
