"""A generator and a discriminator that are trained against each other, as one model for the one trainer.

Both players take their step at once: their losses come from the same weights and the same noise, and each is cut off
from the weights of the other player, so that one optimiser serves both. Alternating updates differ by one step: there
the second player meets the first one after its update, and its own noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm

from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.geometry import full_precision
from hypersphere.losses import GANLoss
from hypersphere.models.networks import Shape, models

WIDTHS = (64, 128, 256, 512)
"""Published channels, from the full size of an image down to its smallest maps."""
LEAST_SIDE = 4
"""Smallest side of a map that the default widths leave."""
KEPT, SHOWN = 8, 10
"""Times of a training that are kept for its report, and images of each."""
BATCH = 1000
"""Images that are generated at a time."""


def to_bytes(images: Tensor) -> Tensor:
    """Images in [-1, 1] as bytes: the inverse of (byte - 127.5) / 128, rounded.

    Example:
        >>> to_bytes(torch.tensor([-1.0, -127.5 / 128, 0.5 / 128, 1.0]))
        tensor([  0,   0, 128, 255], dtype=torch.uint8)
    """
    return (images.float() * 128 + 127.5).round().clamp(0, 255).to(torch.uint8)


def _initialise(model: nn.Module, std: float | None) -> None:
    """Normal weights of deviation ``std`` (``None``: the square root of 2 / fan-in), zero biases."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
            fan = layer.weight[0].numel()
            if isinstance(layer, nn.ConvTranspose2d):  # with stride 2 a quarter of the taps makes a pixel
                fan = layer.in_channels * layer.kernel_size[0] ** 2 // layer.stride[0] ** 2
            nn.init.normal_(layer.weight, std=(2 / fan) ** 0.5 if std is None else std)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


class Generator(nn.Sequential):
    """Noise to images: a dense layer to small maps, then transposed convolutions that double their sides.

    Args:
        shape: Shape ``(C, H, W)`` of an image.
        latent: Dimension of the noise.
        widths: Channels from full size down; each but the last is the result of a doubling.
        dense_norm: Normalise and rectify the dense layer, too.

    Shape:
        ``(B, latent) -> (B, C, H, W)`` in [-1, 1].

    Example:
        >>> Generator((1, 28, 28), latent=16, widths=(4, 8))(torch.randn(2, 16)).shape
        torch.Size([2, 1, 28, 28])
    """

    def __init__(self, shape: Shape, latent: int, widths: tuple[int, ...], dense_norm: bool = True) -> None:
        channels, *sides = shape
        small = tuple(side // 2 ** (len(widths) - 1) for side in sides)
        width = widths[-1]
        size = width * small[0] * small[1]
        layers: list[nn.Module] = [nn.Linear(latent, size, bias=False)]
        if dense_norm:
            layers += [nn.BatchNorm1d(size, eps=2e-5), nn.ReLU(inplace=True)]
        layers.append(nn.Unflatten(1, (width, *small)))
        for narrower in reversed(widths[:-1]):
            layers += [
                nn.ConvTranspose2d(width, narrower, 4, stride=2, padding=1, bias=False),  # the norm has one
                nn.BatchNorm2d(narrower, eps=2e-5),
                nn.ReLU(inplace=True),
            ]
            width = narrower
        super().__init__(*layers, nn.Conv2d(width, channels, 3, padding=1), nn.Tanh())


class Discriminator(nn.Module):
    """Images to one score each, high for real ones: pairs of convolutions, the second of stride 2, and a dense layer.

    Args:
        shape: Shape ``(C, H, W)`` of an image.
        widths: Channels from full size down.
        widen: Which convolution of a pair brings the channels to the next width: that of stride 1, which is the first
            of the next pair, or that of stride 2.
        slope: Slope of the leaky ReLU below 0.
        spectral: Divide every weight by its largest singular value, as one step of a power iteration finds it.
        std: Deviation of the first weights; ``None``: the square root of 2 / fan-in.

    Shape:
        ``(B, C, H, W) -> (B,)``.

    Example:
        >>> Discriminator((3, 8, 8), widths=(4, 8), spectral=True)(torch.randn(2, 3, 8, 8)).shape
        torch.Size([2])
    """

    def __init__(
        self,
        shape: Shape,
        widths: tuple[int, ...],
        *,
        widen: str = "stride1",
        slope: float = 0.1,
        spectral: bool = False,
        std: float | None = 0.02,
    ) -> None:
        super().__init__()
        channels, *sides = shape
        layers: list[nn.Module] = []
        for level, width in enumerate(widths):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.LeakyReLU(slope, inplace=True)]
            channels = width
            if level < len(widths) - 1:
                channels = widths[level + 1] if widen == "stride2" else width
                layers += [nn.Conv2d(width, channels, 4, stride=2, padding=1), nn.LeakyReLU(slope, inplace=True)]
        self.features = nn.Sequential(*layers)
        shrunk = [side // 2 ** (len(widths) - 1) for side in sides]
        self.score = nn.Linear(channels * shrunk[0] * shrunk[1], 1, bias=False)
        _initialise(self, std)
        if spectral:  # after the first weights, whose vectors it looks for
            for layer in list(self._layers()):
                spectral_norm(layer)
        self.train()

    def _layers(self) -> Iterator[Any]:
        return (layer for layer in self.modules() if isinstance(layer, nn.Conv2d | nn.Linear))

    def _norms(self) -> list[tuple[Any, nn.Module]]:
        """The layers with a spectral norm, and what keeps its vectors."""
        return [(x, x.parametrizations["weight"][0]) for x in self._layers() if parametrize.is_parametrized(x)]

    def train(self, mode: bool = True) -> Discriminator:
        """As ever, but spectral norms stay in evaluation mode: :meth:`advance` alone moves their vectors."""
        super().train(mode)
        for _, norm in self._norms():
            norm.eval()
        return self

    @torch.no_grad()
    def advance(self) -> None:
        """One step of the power iteration of every spectral norm: once a training step, however often one looks."""
        with full_precision(self.score.weight):
            for layer, norm in self._norms():
                norm.train()
                _ = layer.weight
                norm.eval()

    @contextmanager
    def _weights(self, images: Tensor) -> Iterator[None]:
        """Where normalised weights are computed once, and in float32 also under autocast."""
        with parametrize.cached():
            with full_precision(images):
                for layer, _ in self._norms():
                    _ = layer.weight
            yield

    def maps(self, images: Tensor) -> Tensor:
        """The last maps of images, ``(B, width, h, w)``."""
        with self._weights(images):
            found: Tensor = self.features(images)
        return found

    def forward(self, images: Tensor) -> Tensor:
        """Scores ``(B,)`` of images ``(B, C, H, W)``."""
        with self._weights(images):
            found: Tensor = self.score(self.features(images).flatten(1)).squeeze(1)
        return found


@models.register("dcgan")
class DCGAN(nn.Module):
    r"""Generator and discriminator of the published CIFAR-10 experiment, for images of any even sides.

    Train it with the loss ``gan`` on images in [-1, 1] (``data.normalise: half``). The features of an image are the
    means of the discriminator's last maps. Noise is drawn from the device's default generator.

    Args:
        shape: Shape ``(C, H, W)`` of one image.
        latent: Dimension of the noise, standard normal.
        widths: Channels from full size down, one more than there are halvings; ``None``: as many of 64, 128, 256, 512
            as leave maps with sides of 4 or more (28x28: 64, 128, 256, with 7x7 maps).
        widen: Which convolution of the discriminator brings the next width: ``"stride1"`` as printed, ``"stride2"`` as
            in the released code.
        slope: Slope of the discriminator's leaky ReLU.
        spectral: Spectral normalisation of all layers of the discriminator.
        dense_norm: Normalise and rectify the generator's dense layer, as in the released code.
        std: Deviation of the first weights; ``None``: the square root of 2 / fan-in, better where widths are small.

    Shape:
        ``(B, C, H, W) -> (B, dim)``.

    Example:
        >>> model = DCGAN((1, 28, 28), widths=(4, 8), latent=16)
        >>> discriminator, generator = model.losses(torch.rand(2, 1, 28, 28), torch.zeros(2), GANLoss(8, 10))
        >>> model(torch.rand(2, 1, 28, 28)).shape, model.sample(3, seed=0).shape
        (torch.Size([2, 8]), torch.Size([3, 1, 28, 28]))
    """

    loss_names = ("discriminator", "generator")
    steps: Tensor
    kept_steps: Tensor
    kept_images: Tensor

    def __init__(
        self,
        shape: Shape,
        *,
        latent: int = 128,
        widths: tuple[int, ...] | None = None,
        widen: Literal["stride1", "stride2"] = "stride1",
        slope: float = 0.1,
        spectral: bool = False,
        dense_norm: bool = True,
        std: float | None = 0.02,
    ) -> None:
        super().__init__()
        if len(shape) != 3:
            raise ArgumentError("shape", f"must be that of an image, (C, H, W), got {tuple(shape)}")
        check_range("latent", latent, 1)
        check_choice("widen", widen, ("stride1", "stride2"))
        check_range("slope", slope, 0, 1)
        if std is not None:
            check_range("std", std, 0, open_low=True)
        if widths is None:
            widths = WIDTHS[: 1 + min(_halvings(side) for side in shape[1:])]
        for width in widths:
            check_range("widths", width, 1)
        factor = 2 ** (len(widths) - 1)
        if len(widths) < 2 or any(side % factor for side in shape[1:]):
            message = f"must be 2 or more, and halve the sides of {shape} once less than there are, got {widths}"
            raise ArgumentError("widths", message)
        self.shape, self.latent, self.dim = tuple(shape), latent, widths[-1]
        # First, so that the first convolution of the model, whose filters a report shows, is one that sees images.
        self.discriminator = Discriminator(shape, widths, widen=widen, slope=slope, spectral=spectral, std=std)
        self.generator = Generator(shape, latent, widths, dense_norm)
        _initialise(self.generator, std)
        # What a run has shown so far is part of its state, so that one that is resumed still has it.
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("kept_steps", torch.full((KEPT,), -1))
        size = self.shape[0] * self.shape[1] * self.shape[2]
        self.register_buffer("kept_images", torch.zeros(KEPT, SHOWN, size, dtype=torch.uint8))

    def forward(self, images: Tensor) -> Tensor:
        """Features ``(B, dim)`` of images ``(B, C, H, W)``: what the discriminator sees in them."""
        return self.discriminator.maps(images).mean((2, 3))

    def losses(self, images: Tensor, labels: Tensor, head: GANLoss) -> tuple[Tensor, Tensor]:
        """Losses of discriminator and generator, each of which reaches the weights of its own player alone.

        Args:
            images: Real images ``(B, C, H, W)`` in [-1, 1].
            labels: Not looked at.
            head: The loss.
        """
        if not hasattr(head, "discriminator"):
            raise ArgumentError("loss", f"must be 'gan' for a model of two players, got {type(head).__name__}")
        self.steps += 1
        self.discriminator.advance()
        noise = torch.randn(len(images), self.latent, dtype=images.dtype, device=images.device)
        made = self.generator(noise)
        # Nothing in a discriminator mixes images, so that real and generated ones can be judged at once.
        real, fake = self.discriminator(torch.cat([images, made.detach().to(images.dtype)])).chunk(2)
        frozen = {name: parameter.detach() for name, parameter in self.discriminator.named_parameters()}
        judged = torch.func.functional_call(self.discriminator, frozen, (made,))
        return head.discriminator(real, fake), head.generator(judged)

    @torch.no_grad()
    def sample(self, count: int, seed: int) -> Tensor:
        """So many generated images as bytes ``(count, C, H, W)``, the same noise for the same seed on every device."""
        check_range("count", count, 0)
        source = torch.Generator().manual_seed(seed)
        like, mode = next(self.generator.parameters()), self.training
        self.eval()
        noise = torch.randn(count, self.latent, generator=source)
        try:
            found = [to_bytes(self.generator(part.to(like))) for part in noise.split(BATCH)]
        finally:
            self.train(mode)
        return torch.cat(found)

    @torch.no_grad()
    def keep(self, images: Tensor) -> None:
        """Keep the first images ``(N, C, H, W)`` of a sample as those of the present step; of many times, every other.

        Args:
            images: Bytes; of the same noise every time.
        """
        steps = self.kept_steps.tolist()
        place = next((i for i, step in enumerate(steps) if step in (-1, int(self.steps))), None)
        if place is None:  # full: make room
            for kept in (self.kept_steps, self.kept_images):
                kept[: KEPT // 2] = kept[::2].clone()
            self.kept_steps[KEPT // 2 :] = -1
            place = KEPT // 2
        self.kept_steps[place] = self.steps
        self.kept_images[place, : len(images)] = images[:SHOWN].flatten(1)

    def kept(self) -> tuple[Tensor, Tensor]:
        """Steps ``(T,)`` and images ``(T, 10, C, H, W)`` that were kept while training."""
        there = self.kept_steps >= 0
        return self.kept_steps[there], self.kept_images[there].unflatten(2, self.shape)


def _halvings(side: int) -> int:
    """How often a side can be halved, at most three times, to no less than 4."""
    times = 0
    while times < len(WIDTHS) - 1 and side % 2 == 0 and side // 2 >= LEAST_SIDE:
        side, times = side // 2, times + 1
    return times
