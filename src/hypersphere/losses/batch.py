"""A batch as a head sees it: what its extension points are given."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from hypersphere.errors import ArgumentError
from hypersphere.geometry import norm, normalise

Steps: TypeAlias = dict[str, Tensor] | None
"""Counts of a training step's schedules; ``None`` outside of training, where margins stand as they are."""


class Batch(NamedTuple):
    """Features and labels of a batch, checked, rotated, in float32 or wider.

    Example:
        >>> batch = Batch.of(torch.tensor([[3.0, 4.0]]), torch.tensor([2]))
        >>> batch.norms, batch.soft
        (tensor([5.]), False)
    """

    features: Tensor
    """``(B, D)``."""
    units: Tensor
    """Directions of the features, ``(B, D)``."""
    norms: Tensor
    """``(B,)``."""
    labels: Tensor
    """Targets, ``(B,)`` in [0, C), or soft labels ``(B, C)``."""
    valid: Tensor | None = None
    """``(B,)``, which samples count; ``None``: all. The others have the label 0."""
    steps: Steps = None
    """Counts of the schedules in a training step; ``None`` outside of training."""
    annealing: Tensor | None = None
    """Weight of the plain function against the margin, where there is an annealer."""
    part: Tensor | None = None
    """``(B, D)`` the features once more, where classes lie on several processes: for what each has of its own."""

    @classmethod
    def of(
        cls,
        features: Tensor,
        labels: Tensor,
        ignore_index: int | None = None,
        steps: Steps = None,
        annealing: Tensor | None = None,
    ) -> Batch:
        """The batch of features ``(B, D)`` and labels; those of ``ignore_index`` are masked."""
        valid = None
        if labels.dim() == 2:
            labels = labels.to(features.dtype)
        elif ignore_index is not None:
            valid = labels != ignore_index
            labels = torch.where(valid, labels, 0)
        norms, units = norm(features), normalise(features)
        return cls(features, units, norms, labels, valid, steps, annealing)

    @property
    def soft(self) -> bool:
        """Whether the labels are soft."""
        return self.labels.dim() == 2

    def step(self, name: str) -> Tensor | None:
        """Steps that a schedule has counted; ``None`` outside of training."""
        return None if self.steps is None else self.steps.get(name)


def check_features(features: Tensor, dim: int) -> None:
    """Raise :class:`ArgumentError` for features that are not a tensor ``(B, D)`` of floating-point numbers.

    Example:
        >>> check_features(torch.ones(2, 3), 4)
        Traceback (most recent call last):
        hypersphere.errors.ArgumentError: features must have shape (B, 4), got (2, 3)
    """
    if not isinstance(features, Tensor):
        raise ArgumentError("features", f"must be a tensor, got {type(features).__name__}")
    if features.dim() != 2 or features.shape[1] != dim:
        raise ArgumentError("features", f"must have shape (B, {dim}), got {tuple(features.shape)}")
    if not features.is_floating_point():
        raise ArgumentError("features", f"must be floating-point, got {features.dtype}")


def check_angles(theta: Tensor) -> None:
    """Raise :class:`ArgumentError` for angles that are not a tensor of floating-point numbers.

    Example:
        >>> check_angles([0.0, 1.0])
        Traceback (most recent call last):
        hypersphere.errors.ArgumentError: theta must be a tensor of floating-point numbers, got list
    """
    if not isinstance(theta, Tensor) or not theta.is_floating_point():
        given = theta.dtype if isinstance(theta, Tensor) else type(theta).__name__
        raise ArgumentError("theta", f"must be a tensor of floating-point numbers, got {given}")


def check_labels(labels: Tensor, batch: int, classes: int) -> None:
    """Raise :class:`ArgumentError` for labels that are neither targets ``(B,)`` nor soft ``(B, C)``, by their shape.

    Example:
        >>> check_labels(torch.tensor([0, 1]), 3, 5)
        Traceback (most recent call last):
        hypersphere.errors.ArgumentError: labels must be int64 of shape (3,), got torch.int64 of shape (2,)
    """
    if not isinstance(labels, Tensor):
        raise ArgumentError("labels", f"must be a tensor, got {type(labels).__name__}")
    shares = labels.is_floating_point()
    if labels.shape != ((batch, classes) if shares else (batch,)) or not (shares or labels.dtype == torch.int64):
        allowed = f"int64 of shape ({batch},){f', or shares of shape ({batch}, {classes})' * shares}"
        raise ArgumentError("labels", f"must be {allowed}, got {labels.dtype} of shape {tuple(labels.shape)}")


def check_values(features: Tensor, labels: Tensor, classes: int, ignore_index: int) -> None:
    """Raise :class:`ArgumentError` for values that are not finite, no classes or no soft labels; waits for a device.

    Example:
        >>> check_values(torch.ones(1, 2), torch.tensor([7]), 5, -100)
        Traceback (most recent call last):
        hypersphere.errors.ArgumentError: labels must lie in [0, 5), got 7 in row 0
    """
    features, labels = features.detach(), labels.detach()
    if not bool(features.isfinite().all()):
        row = int((~features.isfinite().all(1)).nonzero()[0])
        of = f", of class {int(labels[row])}" if labels.dim() == 1 else ""
        value = float(features[row][~features[row].isfinite()][0])
        raise ArgumentError("features", f"must be finite, got {value} in row {row}{of}")
    if labels.dim() == 2:
        wrong = ~((labels >= 0).all(1) & ((labels.sum(1) - 1).abs() < 1e-2))
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            found = f"got the sum {float(labels[row].sum()):g} and the least {float(labels[row].min()):g} in row {row}"
            raise ArgumentError("labels", f"must be at least 0 and add up to 1 in every row, {found}")
        return
    wrong = (labels != ignore_index) & ((labels < 0) | (labels >= classes))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ArgumentError("labels", f"must lie in [0, {classes}), got {int(labels[row])} in row {row}")
