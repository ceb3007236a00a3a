"""The small geometry that the report draws: directions, class centres, angles in degrees and projections."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


def unit(vectors: Floats) -> Floats:
    """Each row scaled to length one; a zero row stays zero."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def degrees(cosines: Floats) -> Floats:
    """Angles of cosines, which rounding may have put slightly beyond ±1."""
    return np.degrees(np.arccos(np.clip(cosines, -1, 1)))


def centre_angles(vectors: Floats, labels: Ints) -> tuple[Floats, Floats]:
    """Angle of each feature to its own class centre and to the nearest other one.

    A class centre is the mean direction of the class's features. With a single class there is no other centre, and
    the second array is empty.
    """
    units = unit(vectors)
    classes, own = np.unique(labels, return_inverse=True)
    centres = unit(np.stack([units[labels == label].mean(axis=0) for label in classes]))
    cosines = units @ centres.T
    rows = np.arange(len(units))
    own_angles = degrees(cosines[rows, own])
    if len(classes) == 1:
        return own_angles, np.empty(0)
    cosines[rows, own] = -np.inf
    return own_angles, degrees(cosines.max(axis=1))


def pair_angles(vectors: Floats, labels: Ints, limit: int) -> tuple[Floats, Floats]:
    """Angles of all genuine (same class) and impostor (other class) pairs among at most ``limit`` features."""
    chosen = balanced_subset(labels, limit)
    units, labels = unit(vectors[chosen]), labels[chosen]
    first, second = np.triu_indices(len(chosen), k=1)
    angles = degrees((units @ units.T)[first, second])
    genuine = labels[first] == labels[second]
    return angles[genuine], angles[~genuine]


def evenly(count: int, limit: int) -> Ints:
    """At most ``limit`` indices spread evenly over ``range(count)``, both ends among them."""
    return np.linspace(0, count - 1, min(count, limit)).round().astype(np.int64)


def balanced_subset(labels: Ints, limit: int) -> Ints:
    """At most ``limit`` indices with equal shares of the classes.

    Where there are too many classes for that, it is ten of each of the first classes: with fewer, a subset of many
    small classes would hold no genuine pairs.
    """
    classes = np.unique(labels)
    share = max(10, limit // max(1, len(classes)))
    members = [np.flatnonzero(labels == label) for label in classes[: max(1, limit // share)]]
    return np.concatenate([m[evenly(len(m), share)] for m in members])


def principal_axes(units: Floats, count: int) -> tuple[Floats, float]:
    """The first principal axes (as columns) of unit features and the share of variance that they keep.

    The axes go through the origin, not through the mean, so that the middle of the sphere stays where it is.
    """
    variances, axes = np.linalg.eigh(units.T @ units)
    axes = axes[:, ::-1][:, :count]
    largest = axes[np.abs(axes).argmax(axis=0), np.arange(count)]
    # The sign of an eigenvector is arbitrary: fix it, so that the same features always give the same picture.
    return axes * np.sign(largest), float(variances[::-1][:count].sum() / variances.sum())
