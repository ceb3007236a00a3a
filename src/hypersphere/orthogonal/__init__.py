r"""Orthogonal training: maps to orthogonal matrices, rotations of any model's neurons, and fine-tuning by rotation."""

from hypersphere.orthogonal.apply import (
    Penalty,
    apply,
    cached,
    check,
    merge,
    parameter_groups,
    penalty,
    rebase,
    settle,
)
from hypersphere.orthogonal.maps import Map, create, maps, orthogonality_error
from hypersphere.orthogonal.rotation import Rotation, rotations
from hypersphere.orthogonal.stochastic import Resampling, poet

__all__ = [
    "Map",
    "Penalty",
    "Resampling",
    "Rotation",
    "apply",
    "cached",
    "check",
    "create",
    "maps",
    "merge",
    "orthogonality_error",
    "parameter_groups",
    "penalty",
    "poet",
    "rebase",
    "rotations",
    "settle",
]
