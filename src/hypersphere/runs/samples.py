"""What people have, files, pictures, arrays and tensors, as batches of samples that a model takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hypersphere.data.splits import decode_image, fit_image, image_files, optional_module
from hypersphere.errors import ArgumentError

Sample: TypeAlias = Any
"""A path, a PIL image, an array or a tensor."""
GREY = (0.299, 0.587, 0.114)
"""Luminance of the colours."""
FORMS = "paths, PIL images, arrays or tensors"


def batches(given: Sample | Sequence[Sample], shape: tuple[int, ...], images: bool, size: int) -> Iterator[Tensor]:
    """Batches ``(b, ...)`` of samples, images as bytes or as floats in [0, 1].

    Args:
        given: One sample or several; a folder is all images in it.
        shape: Of a sample.
        images: Whether samples are images.
        size: Most samples of a batch.
    """
    if isinstance(given, str | Path) and Path(given).is_dir():
        given = image_files(Path(given))
    if isinstance(given, Tensor | np.ndarray) and not is_single(given, shape, images):
        for start in range(0, len(given), size):
            yield _checked(given[start : start + size], shape, images, batch=True)
        return
    several = list(given) if isinstance(given, list | tuple) else [given]
    for start in range(0, len(several), size):
        found = [_checked(one, shape, images) for one in several[start : start + size]]
        floats = any(one.is_floating_point() for one in found) and images
        yield torch.stack([one.float() / 255 if floats and one.dtype == torch.uint8 else one for one in found])


def is_single(given: Any, shape: tuple[int, ...], images: bool) -> bool:
    """Whether this is one sample, and not several."""
    if isinstance(given, list | tuple):
        return False
    if isinstance(given, Tensor):
        return given.dim() == len(shape)
    if isinstance(given, np.ndarray):
        if not images:
            return given.ndim == len(shape)
        return given.ndim == 2 or (given.ndim == 3 and given.shape[-1] in (1, 3))
    return not Path(given).is_dir() if isinstance(given, str | Path) else True


def grey(images: Tensor) -> Tensor:
    """Luminance ``(..., 1, H, W)`` of colour images ``(..., 3, H, W)``, of the same type."""
    weights = torch.tensor(GREY, device=images.device).view(3, 1, 1)
    mixed = (images * weights).sum(-3, keepdim=True)
    return mixed.round().to(torch.uint8) if images.dtype == torch.uint8 else mixed


def _checked(given: Any, shape: tuple[int, ...], images: bool, batch: bool = False) -> Tensor:
    """A sample, or a batch of them in one tensor or array, with the shape that the model takes."""
    if images:
        found = _image(given, (shape[0], shape[1], shape[2]), batch)
    elif isinstance(given, Tensor | np.ndarray):
        found = given if isinstance(given, Tensor) else torch.from_numpy(given)
        found = found.float() if found.is_floating_point() else found
    else:
        raise ArgumentError("samples", f"must be tensors or arrays of shape {shape}, got {type(given).__name__}")
    if found.shape[batch:] != shape:
        raise ArgumentError(
            "images" if images else "samples", f"must have shape {shape} each, got {tuple(found.shape[batch:])}"
        )
    return found


def _image(given: Any, shape: tuple[int, int, int], batch: bool) -> Tensor:
    """Bytes or floats in [0, 1] ``(C, H, W)``; files, pictures and arrays of bytes are brought to the size."""
    if isinstance(given, str | Path):
        found = fit_image(decode_image(Path(given)), shape[1:])
    elif isinstance(given, Tensor):
        found = given
    elif isinstance(given, np.ndarray):
        found = _array(given, shape, batch)
    elif hasattr(given, "convert") and hasattr(given, "getbands"):
        found = fit_image(given.convert("RGB"), shape[1:])
    else:
        raise ArgumentError("images", f"must be {FORMS}, got {type(given).__name__}")
    if found.is_floating_point():
        found = found.float()
        if found.numel() and not (float(found.min()) >= 0 and float(found.max()) <= 1):
            raise ArgumentError("images", "must lie in [0, 1] as floating-point numbers, or be bytes (uint8)")
    elif found.dtype != torch.uint8:
        raise ArgumentError("images", f"must be bytes (uint8) or floating-point numbers, got {found.dtype}")
    if found.dim() >= 3 and (found.shape[-3], shape[0]) == (3, 1):
        return grey(found)
    if found.dim() >= 3 and (found.shape[-3], shape[0]) == (1, 3):
        return found.expand(*found.shape[:-3], 3, -1, -1)
    return found


def _array(given: Any, shape: tuple[int, int, int], batch: bool) -> Tensor:
    """An array ``(H, W)`` or ``(H, W, C)`` of one image, with the channels first; bytes are scaled to the size."""
    if batch:
        return torch.stack([_array(one, shape, batch=False) for one in given])
    if given.ndim == 2:
        given = given[..., None]
    if given.ndim != 3 or given.shape[-1] not in (1, 3):
        raise ArgumentError("images", f"must be (H, W), (H, W, 1) or (H, W, 3) as arrays, got {given.shape}")
    found = torch.from_numpy(np.ascontiguousarray(given)).permute(2, 0, 1)
    if found.dtype == torch.uint8 and tuple(found.shape[1:]) != shape[1:]:
        picture = optional_module("PIL.Image", "pillow").fromarray(found.expand(3, -1, -1).permute(1, 2, 0).numpy())
        return fit_image(picture, shape[1:])
    return found
