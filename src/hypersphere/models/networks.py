"""Small convolutional backbones, each built from exchangeable ``conv``, ``linear``, ``norm`` and ``act`` layers.

A layer argument is a name from :data:`hypersphere.nn.layers` or a factory with the signature of torch's layer of
that kind (``conv(in, out, kernel, stride=, padding=, bias=)``, ``linear(in, out)``, ``norm(channels)``, ``act()``).
No activation follows the last layer: a ReLU there would leave only one orthant of the sphere to the features.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.nn import LayerFactory, factory
from hypersphere.registry import Registry

Layer = str | LayerFactory
Shape = tuple[int, int, int]

models: Registry[nn.Module] = Registry("model", positional=("shape",))


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


def _conv_block(inputs: int, outputs: int, conv: Layer, norm: Layer, act: Layer) -> list[nn.Module]:
    """3x3 convolution that keeps the size, normalisation, activation."""
    return [
        factory(conv)(inputs, outputs, 3, padding=1, bias=False),
        factory(norm)(outputs),
        factory(act)(),
    ]


def _initialise(model: nn.Module) -> None:
    """He initialisation of every convolution; the other layers keep their own."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")


def _check_size(shape: Shape, halvings: int) -> None:
    if min(shape[1:]) < 2**halvings:
        raise ArgumentError("shape", f"must be at least {2**halvings} pixels high and wide here, got {shape}")


@models.register("plain-cnn")
class PlainCNN(nn.Module):
    """Plain CNN: units of 3x3 convolutions, each followed by 2x2 max pooling, then one linear layer.

    Args:
        shape: Shape ``(C, H, W)`` of one image.
        dim: Feature dimension.
        convs_per_unit: Convolutions in each unit; 3 units of 1, 3 and 6 are CNN-3, CNN-9 and CNN-18.
        widths: Filters of each unit.
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

    def __init__(
        self,
        shape: Shape,
        *,
        dim: int = 256,
        convs_per_unit: int = 3,
        widths: tuple[int, ...] = (64, 96, 128),
        conv: Layer = "conv2d",
        linear: Layer = "linear",
        norm: Layer = "batchnorm2d",
        act: Layer = "relu",
    ) -> None:
        super().__init__()
        check_range("dim", dim, 1)
        check_range("convs_per_unit", convs_per_unit, 1)
        _check_size(shape, len(widths))
        self.dim = dim
        layers: list[nn.Module] = []
        channels, height, width = shape
        for filters in widths:
            check_range("widths", filters, 1)
            for _ in range(convs_per_unit):
                layers += _conv_block(channels, filters, conv, norm, act)
                channels = filters
            layers.append(nn.MaxPool2d(2))
            height, width = height // 2, width // 2
        self.features = nn.Sequential(*layers)
        self.embed = factory(linear)(channels * height * width, dim, bias=False)
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        """Features ``(B, dim)`` of images ``(B, C, H, W)``."""
        return self.embed(self.features(images).flatten(1))


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


class _ResidualUnit(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, shortcut: str, conv: Layer, norm: Layer, act: Layer
    ) -> None:
        super().__init__()
        self.conv1 = factory(conv)(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = factory(norm)(outputs)
        self.act1 = factory(act)()
        self.conv2 = factory(conv)(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = factory(norm)(outputs)
        self.act2 = factory(act)()
        self.stride, self.extra = stride, outputs - inputs
        self.project: nn.Module | None = None
        if shortcut == "projection" and (stride != 1 or inputs != outputs):
            self.project = nn.Sequential(
                factory(conv)(inputs, outputs, 1, stride=stride, bias=False), factory(norm)(outputs)
            )

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.project is not None:
            return self.project(x)
        if self.stride != 1:
            x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, 0, self.extra)) if self.extra else x

    def forward(self, x: Tensor) -> Tensor:
        y = self.act1(self.norm1(self.conv1(x)))
        return self.act2(self.norm2(self.conv2(y)) + self._shortcut(x))


@models.register("cifar-resnet", aliases=("resnet-cifar",))
class CifarResNet(nn.Module):
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
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ArgumentError("depth", f"must be 6n + 2 with n >= 1 (8, 14, 20, 32, ...), got {depth}")
        check_choice("shortcut", shortcut, ("pad", "projection"))
        if shortcut == "pad" and sorted(widths) != list(widths):
            raise ArgumentError("widths", f"must not decrease with shortcut='pad', got {widths}")
        for filters in widths:
            check_range("widths", filters, 1)
        if dim is not None:
            check_range("dim", dim, 1)
        _check_size(shape, 2)
        stem = _conv_block(shape[0], widths[0], conv, norm, act)
        units: list[nn.Module] = []
        channels = widths[0]
        for stage, filters in enumerate(widths):
            for unit in range((depth - 2) // 6):
                stride = 2 if stage and not unit else 1
                units.append(_ResidualUnit(channels, filters, stride, shortcut, conv, norm, act))
                channels = filters
        self.features = nn.Sequential(*stem, *units)
        self.embed = nn.Identity() if dim is None else factory(linear)(channels, dim)
        self.dim = channels if dim is None else dim
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        """Features ``(B, dim)`` of images ``(B, C, H, W)``."""
        return self.embed(torch.mean(self.features(images), dim=(2, 3)))
