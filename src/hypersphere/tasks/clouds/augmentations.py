"""Random changes of point clouds ``(b, 3, P)``, whose third coordinate points up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hypersphere.data.augmentations import Augmentation, register
from hypersphere.errors import check_range

TILT_LIMIT = 3.0
"""Largest angle of a tilt, in units of its deviation: 0.18 for the published 0.06."""
JITTER_LIMIT = 5.0
"""Largest displacement of a point by jitter, in units of its deviation: 0.05 for the published 0.01."""


def change_clouds(
    clouds: Tensor,
    generator: torch.Generator,
    *,
    rotate: bool = False,
    tilt: float = 0.0,
    scale: float = 1.0,
    shift: float = 0.0,
    jitter: float = 0.0,
    shuffle: bool = False,
    batch_size: int | None = None,
    share: slice = slice(None),
) -> Tensor:
    """Random changes of clouds, one for each, as PointNet and PointNet++ are trained with; no wait for the device.

    PointNet has ``rotate`` and ``jitter=0.01``; PointNet++ besides ``tilt=0.06``, ``scale=1.25``, ``shift=0.1`` and
    ``shuffle``. The changes happen in the order of the arguments.

    Args:
        clouds: ``(b, 3, P)``.
        generator: Source of the draws, on the device of the clouds.
        rotate: Turn about the third axis, which points up, by any angle.
        tilt: Deviation of the angles of small turns about all three axes, which are at most 3 times as large.
        scale: Largest factor on the size, at least 1; factors are drawn between its inverse and itself.
        shift: Largest shift along each axis.
        jitter: Deviation of each coordinate of each point, which moves by at most 5 times as much.
        shuffle: Bring the points into a random order, the same in all clouds.
        batch_size: Clouds over all processes, each of which draws for all; by default those given.
        share: Which of them are given.

    Returns:
        ``(b, 3, P)``.

    Example:
        >>> clouds = torch.rand(2, 3, 5)
        >>> turned = change_clouds(clouds, torch.Generator().manual_seed(0), rotate=True)
        >>> torch.equal(turned[:, 2], clouds[:, 2])
        True
    """
    check_range("scale", scale, 1)
    total = len(clouds) if batch_size is None else batch_size
    drawn: dict[str, Any] = {"generator": generator, "device": clouds.device, "dtype": clouds.dtype}
    if rotate:
        angle = 2 * math.pi * torch.rand(total, **drawn)[share]
        x, y, z = clouds.unbind(1)
        clouds = torch.stack([*_turned(x, y, angle), z], 1)
    if tilt:
        angles = tilt * torch.randn(3, total, **drawn)[:, share].clamp(-TILT_LIMIT, TILT_LIMIT)
        x, y, z = clouds.unbind(1)
        y, z = _turned(y, z, angles[0])
        z, x = _turned(z, x, angles[1])
        x, y = _turned(x, y, angles[2])
        clouds = torch.stack([x, y, z], 1)
    if scale != 1:
        clouds = clouds * (1 / scale + (scale - 1 / scale) * torch.rand(total, 1, 1, **drawn)[share])
    if shift:
        clouds = clouds + shift * (2 * torch.rand(total, 3, 1, **drawn)[share] - 1)
    if jitter:
        noise = torch.randn(total, *clouds.shape[1:], **drawn)[share]
        clouds = clouds + jitter * noise.clamp(-JITTER_LIMIT, JITTER_LIMIT)
    if shuffle:
        clouds = clouds[:, :, torch.rand(clouds.shape[2], **drawn).argsort()]
    return clouds


def _turned(first: Tensor, second: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    """Coordinates ``(b, P)`` along two axes, turned from the first towards the second by ``angle`` ``(b,)``."""
    cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
    return cos * first - sin * second, sin * first + cos * second


@register("clouds")
@dataclass(frozen=True)
class CloudChanges(Augmentation):
    """Random changes of point clouds, drawn for each of them: turns, tilts, sizes, shifts, jitter and order.

    Args:
        rotate: Turn about the third axis by any angle.
        tilt: Deviation of the angles of small turns about all three axes.
        scale: Largest factor on the size.
        shift: Largest shift along each axis.
        jitter: Deviation of each coordinate of each point.
        shuffle: Bring the points into a random order.

    Example:
        >>> CloudChanges(jitter=0.01).change(torch.zeros(2, 3, 5), torch.Generator(), 2, slice(None)).shape
        torch.Size([2, 3, 5])
    """

    contract: ClassVar[Mapping[str, Any]] = {
        "variants": (
            {"rotate": True},
            {"tilt": 0.06, "scale": 1.25, "shift": 0.1},
            {"jitter": 0.01},
            {"rotate": True, "tilt": 0.06, "scale": 1.25, "shift": 0.1, "jitter": 0.01},
            {"shuffle": True},
        )
    }
    rotate: bool = False
    tilt: float = 0.0
    scale: float = 1.0
    shift: float = 0.0
    jitter: float = 0.0
    shuffle: bool = False
    dimensions: ClassVar[int | None] = 2

    def change(self, samples: Tensor, generator: torch.Generator, batch_size: int, share: slice) -> Tensor:
        """The clouds of one process ``(b, 3, P)``, changed."""
        return change_clouds(samples, generator, **vars(self), batch_size=batch_size, share=share)
