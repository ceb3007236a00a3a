"""Orthogonal maps by name: functions from a free ``(..., d, d)`` tensor to an orthogonal one."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hypersphere.registry import Registry

maps: Registry[Callable[[Tensor], Tensor]] = Registry("orthogonal map")

__all__ = ["maps"]
