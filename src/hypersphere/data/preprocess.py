"""From samples as they are kept to what a model sees: normalised, and changed at random in training."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from hypersphere.data.augmentations import Augmentation, augmentations
from hypersphere.data.splits import FolderSplit, Split, evaluation_batches
from hypersphere.errors import ArgumentError

CLOUD_CHANGES = ("rotate", "tilt", "scale", "shift", "jitter", "shuffle")
"""Random changes that are for point clouds; the others are for images."""


class Changes(Protocol):
    """Which of the changes that every recipe knows are made: ``data.augment``."""

    @property
    def crop(self) -> int:
        """Padding of a random crop back to the original size."""

    @property
    def crop_mode(self) -> str:
        """What is padded with, ``"zeros"`` or ``"reflect"``."""

    @property
    def flip(self) -> bool:
        """Mirror left and right with probability 1/2."""

    @property
    def vertical_flip(self) -> bool:
        """Mirror up and down with probability 1/2."""

    def changed(self) -> Collection[str]:
        """Names of the changes that are made."""


class Preprocess(nn.Module):
    r"""Brings images from bytes to what the model sees: :math:`(x / 255 - \mu) / \sigma`.

    The constants are buffers, measured on the training images and saved with the model. Samples that are no bytes
    are no images, and stay as they are. Of images that are larger than ``shape`` a window of that size is taken: a
    random one in training, the central one otherwise.

    Args:
        shape: ``(C, H, W)`` of one image, or of whatever else a sample is.
        normalise: ``"channel"`` mean and standard deviation, ``"pixel"`` mean image, ``"half"`` for bytes less 127.5
            over 128, or ``"none"``.
        augment: Random changes of training images.
        parts: Other random changes, after these.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        shape: tuple[int, ...],
        normalise: Literal["channel", "pixel", "half", "none"],
        augment: Changes,
        parts: Sequence[Augmentation] = (),
    ) -> None:
        super().__init__()
        self.shape, self.normalise, self.augment = shape, normalise, augment
        changed = augment.changed()
        for key in changed:
            kind, dimensions = ("point clouds", 2) if key in CLOUD_CHANGES else ("images", 3)
            if len(shape) != dimensions:
                raise ArgumentError(key, f"must be left out here: it changes {kind}")
        for index, part in enumerate(parts):
            if part.dimensions not in (None, len(shape)):
                message = f"must be left out here: it changes samples of {part.dimensions} dimensions, not {len(shape)}"
                raise ArgumentError(f"parts.{index}", message)
        clouds = {key: getattr(augment, key) for key in CLOUD_CHANGES if key in changed}
        self.parts = [*([augmentations.create("clouds", **clouds)] if clouds else []), *parts]
        mean, std = (0.5, 128 / 255) if normalise == "half" else (0.0, 1.0)
        channels = (*shape[:1], 1, 1)
        self.register_buffer("mean", torch.full(shape if normalise == "pixel" else channels, mean))
        self.register_buffer("std", torch.full(channels, std))

    def measure(self, split: Split, at_most: int = 100_000) -> None:
        """Set the constants from training images (evenly spaced ones where there are more than ``at_most``)."""
        if self.normalise in ("half", "none"):
            return
        if isinstance(split, FolderSplit):
            at_most = min(at_most, 1000)
        chosen = torch.linspace(0, len(split) - 1, min(len(split), at_most), dtype=torch.float64).long()
        part = split.select(chosen, split.labels[chosen])
        total = torch.zeros(split.shape, dtype=torch.float64)
        squares = torch.zeros(split.shape, dtype=torch.float64)
        for images, _ in evaluation_batches(part, 1000, torch.device("cpu")):
            pixels = self._central(images).double() / 255
            total += pixels.sum(0)
            squares += pixels.square().sum(0)
        mean, square = total / len(part), squares / len(part)
        if self.normalise == "pixel":
            self.mean.copy_(mean)
            return
        mean, square = mean.mean((1, 2), keepdim=True), square.mean((1, 2), keepdim=True)
        self.mean.copy_(mean)
        # A constant channel (blank images) carries nothing; dividing by its spread would make it NaN, and dividing by
        # the rounding of its spread (1e-9) would blow up any image that differs.
        std = (square - mean.square()).clamp(min=0).sqrt()
        self.std.copy_(torch.where(std > 1e-6, std, 1.0))

    def forward(self, images: Tensor) -> Tensor:
        """``(B, C, H, W)`` bytes to floats."""
        return self.scaled(self._central(images).float() / 255) if images.dtype == torch.uint8 else images

    def _is_larger(self, images: Tensor) -> bool:
        """Whether a window is taken: images ``(B, C, H, W)`` are larger than what the model sees, nowhere smaller."""
        if images.dim() != 4 or len(self.shape) != 3:
            return False
        spare = [whole - side for whole, side in zip(images.shape[2:], self.shape[1:], strict=True)]
        return min(spare) >= 0 and max(spare) > 0

    def _central(self, images: Tensor) -> Tensor:
        """The central window ``(B, C, H, W)`` of larger images."""
        if not self._is_larger(images):
            return images
        top, left = ((whole - side) // 2 for whole, side in zip(images.shape[2:], self.shape[1:], strict=True))
        return images[:, :, top : top + self.shape[1], left : left + self.shape[2]]

    def _window(self, images: Tensor, draws: Tensor) -> Tensor:
        """Windows ``(b, C, H, W)`` of larger images, where draws ``(2, b)`` in [0, 1) say."""
        sample = torch.arange(len(images), device=images.device).view(-1, 1, 1)
        places = []
        for draw, whole, side in zip(draws, images.shape[2:], self.shape[1:], strict=True):
            first = (draw * (whole - side + 1)).long()
            places.append(first.unsqueeze(1) + torch.arange(side, device=images.device))
        rows, columns = places
        # Advanced indices around a slice put the channels last: (b, H, W, C).
        return images[sample, :, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)

    def scaled(self, images: Tensor) -> Tensor:
        """The same of images that are floats in [0, 1]."""
        return (images - self.mean) / self.std

    def augmented(self, images: Tensor, generator: torch.Generator, batch_size: int, share: slice) -> Tensor:
        """Normalised images, each with its own window, crop and flips, or clouds with theirs, without a loop.

        Args:
            images: ``(b, C, H, W)`` bytes, or clouds ``(b, 3, P)``, this process' share of the batch.
            generator: Source of the draws; every process makes all of them, so that their number does not matter.
            batch_size: Images over all processes.
            share: Which of them ``images`` are.
        """
        crop, flip, vertical = self.augment.crop, self.augment.flip, self.augment.vertical_flip
        if images.dtype == torch.uint8 and self._is_larger(images):
            where = torch.rand(2, batch_size, generator=generator, device=images.device)[:, share]
            images = self._window(images, where)
        draws = None
        if images.dtype == torch.uint8 and (crop or flip or vertical):
            draws = torch.rand(4, batch_size, generator=generator, device=images.device)[:, share]
        changed = self.change(images, draws)
        for part in self.parts:
            changed = part.change(changed, generator, batch_size, share)
        return changed

    def change(self, images: Tensor, draws: Tensor | None) -> Tensor:
        """Normalise, and crop and flip as ``draws`` ``(4, b)`` in [0, 1) say: a pure function, fused when compiled."""
        if draws is None:
            return self(images)
        crop, (height, width) = self.augment.crop, images.shape[2:]
        rows = torch.arange(height, device=images.device).expand(len(images), -1)
        columns = torch.arange(width, device=images.device).expand(len(images), -1)
        mirror, upend, down, right = draws.unsqueeze(2)
        if self.augment.flip:
            columns = torch.where(mirror < 0.5, width - 1 - columns, columns)
        if self.augment.vertical_flip:
            rows = torch.where(upend < 0.5, height - 1 - rows, rows)
        rows = rows + (down * (2 * crop + 1)).long() - crop
        columns = columns + (right * (2 * crop + 1)).long() - crop
        if self.augment.crop_mode == "reflect":
            rows, columns = _mirrored(rows, height), _mirrored(columns, width)
        sample = torch.arange(len(images), device=images.device).view(-1, 1, 1)
        row, column = rows.clamp(0, height - 1).unsqueeze(2), columns.clamp(0, width - 1).unsqueeze(1)
        # Advanced indices around a slice put the channels last: (b, H, W, C).
        normalised = self(images)[sample, :, row, column].permute(0, 3, 1, 2)
        inside = ((rows >= 0) & (rows < height)).unsqueeze(2) & ((columns >= 0) & (columns < width)).unsqueeze(1)
        return normalised * inside.unsqueeze(1)


def _mirrored(places: Tensor, size: int) -> Tensor:
    """Places along an axis that goes on as its mirror image at both ends, however far."""
    places = places % (2 * size)
    return torch.minimum(places, 2 * size - 1 - places)
