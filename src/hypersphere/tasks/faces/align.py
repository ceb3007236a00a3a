"""Faces in their standard place: the similarity transform of five landmarks, and the image that it gives."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hypersphere.errors import ArgumentError

#: Places (x, y) of left eye, right eye, nose, left and right corner of the mouth in an image 112 high and 96 wide.
LANDMARKS = ((30.2946, 51.6963), (65.5318, 51.5014), (48.0252, 71.7366), (33.5493, 92.3655), (62.7299, 92.2041))


def template(size: tuple[int, int] = (112, 96)) -> Tensor:
    """Standard places of the five landmarks ``(5, 2)`` as (x, y), a pixel's centre being at whole numbers.

    Other sizes than 112x96 scale with the height, with the face in the middle: 112x112 moves it right by 8 pixels.

    Args:
        size: Height and width of the aligned image.

    Example:
        >>> template((112, 112))[0]
        tensor([38.2946, 51.6963])
    """
    height, width = _checked(size)
    scale = height / 112
    places = (torch.tensor(LANDMARKS, dtype=torch.float64) + 0.5) * scale - 0.5
    return (places + torch.tensor([(width - 96 * scale) / 2, 0])).float()


def similarity_transform(points: Tensor, target: Tensor) -> Tensor:
    r"""Rotation, scale and shift that bring points closest to others, without a reflection.

    Minimises :math:`\sum_k \|A p_k + t - q_k\|^2` over :math:`A = \begin{pmatrix} a & -b \\ b & a \end{pmatrix}` and t.
    With p and q taken from their means,
    :math:`a = \sum_k p_k \cdot q_k / \sum_k \|p_k\|^2` and :math:`b = \sum_k p_k \times q_k / \sum_k \|p_k\|^2`.

    Args:
        points: ``(..., K, 2)`` as (x, y), K at least 2.
        target: ``(..., K, 2)``, where they belong.

    Returns:
        Matrices ``(..., 2, 3)``, the last column being t; at least float32.

    Example:
        >>> similarity_transform(torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([[1.0, 1.0], [1.0, 3.0]]))
        tensor([[ 0., -2.,  1.],
                [ 2.,  0.,  1.]])
    """
    if points.dim() < 2 or points.shape[-1] != 2 or points.shape[-2] < 2 or points.shape[-2:] != target.shape[-2:]:
        raise ArgumentError(
            "points", f"must be (..., K, 2) like target, K at least 2, got {tuple(points.shape)}, {tuple(target.shape)}"
        )
    dtype = torch.promote_types(torch.promote_types(points.dtype, target.dtype), torch.float32)
    p, q = points.to(dtype), target.to(dtype)
    p_mean, q_mean = p.mean(-2), q.mean(-2)
    p, q = p - p_mean.unsqueeze(-2), q - q_mean.unsqueeze(-2)
    spread = p.square().sum((-2, -1))
    if not bool(((spread > 0) & spread.isfinite()).all()):
        raise ArgumentError("points", "must be finite and not all at one place: there is no transform of such a face")
    a = (p * q).sum((-2, -1)) / spread
    b = (p[..., 0] * q[..., 1] - p[..., 1] * q[..., 0]).sum(-1) / spread
    turn = torch.stack([torch.stack([a, -b], -1), torch.stack([b, a], -1)], -2)
    shift = q_mean.unsqueeze(-1) - turn @ p_mean.unsqueeze(-1)
    return torch.cat([turn, shift], -1)


def warp(images: Tensor, transform: Tensor, size: tuple[int, int] = (112, 96)) -> Tensor:
    """Images after an affine transform, by bilinear interpolation; black where there was no image.

    Args:
        images: ``(B, C, H, W)``, bytes or floats.
        transform: ``(B, 2, 3)`` or ``(2, 3)``: where each place (x, y) of an image goes.
        size: Height and width of the result.

    Returns:
        ``(B, C, *size)`` of the same type, bytes being rounded.

    Example:
        >>> image = torch.arange(6.0).view(1, 1, 2, 3)
        >>> warp(image, torch.tensor([[1.0, 0.0, -1.0], [0.0, 1.0, 0.0]]), (2, 3))
        tensor([[[[1., 2., 0.],
                  [4., 5., 0.]]]])
    """
    height, width = _checked(size)
    if images.dim() != 4:
        raise ArgumentError("images", f"must be (B, C, H, W), got {tuple(images.shape)}")
    # Half precision cannot tell the pixels of a large image apart.
    values = images.to(torch.promote_types(images.dtype, torch.float32))
    matrix = transform.to(values).expand(len(images), 2, 3)
    rows = torch.arange(height, device=values.device, dtype=values.dtype)
    columns = torch.arange(width, device=values.device, dtype=values.dtype)
    places = torch.stack(torch.broadcast_tensors(columns, rows[:, None]), -1).view(1, -1, 2)
    origins = torch.linalg.solve(matrix[..., :2], (places - matrix[:, None, :, 2]).mT).mT
    # grid_sample counts from -1 at the left edge of the first pixel to 1 at the right edge of the last.
    sides = values.new_tensor([images.shape[3], images.shape[2]])
    grid = ((2 * origins + 1) / sides - 1).view(len(images), height, width, 2)
    found = F.grid_sample(values, grid, align_corners=False)
    return found.to(images.dtype) if images.is_floating_point() else found.round().to(images.dtype)


def align(images: Tensor, landmarks: Tensor, size: tuple[int, int] = (112, 96)) -> Tensor:
    """Faces in their standard place.

    Args:
        images: ``(B, C, H, W)``, bytes or floats.
        landmarks: ``(B, 5, 2)``: (x, y) of left eye, right eye, nose, left and right corner of the mouth in each image,
            left and right being those of the image.
        size: Height and width of the result; the published ones are 112x96 and 112x112.

    Returns:
        ``(B, C, *size)`` of the same type.

    Example:
        >>> face = torch.rand(1, 3, 112, 96)
        >>> torch.allclose(align(face, template()[None]), face, atol=1e-4)
        True
    """
    return warp(images, similarity_transform(landmarks, template(size).to(landmarks.device)), size)


def _checked(size: tuple[int, int]) -> tuple[int, int]:
    if len(size) != 2 or min(size) < 1:
        raise ArgumentError("size", f"must be a height and a width of at least 1, got {size}")
    return size
