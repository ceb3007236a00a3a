"""What pictures of any kind share: colours, subsets that are small enough, angles in degrees, projections."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from hypersphere.geometry import angle_matrix, arccos, normalise
from hypersphere.metrics import class_centres, pair_scores

# The ten colours of M. A. Petroff (arXiv:2107.02270), made to be told apart with any colour vision; greys last.
PALETTE = (
    *("#3f90da", "#e76300", "#832db6", "#ffa90e", "#bd1f01"),
    *("#a96b59", "#92dadd", "#b9ac70", "#94a4a2", "#717581"),
)
MAX_POINTS = 2000
"""Most features of a picture."""
MAX_CLASSES = 20
"""Most classes of a picture."""

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


def colour(index: int) -> str:
    """The palette's colour of a class or run; after the last one the first again.

    Example:
        >>> colour(0) == colour(10)
        True
    """
    return PALETTE[index % len(PALETTE)]


def unit(vectors: Floats) -> Floats:
    """Each row scaled to length one; a zero row stays zero."""
    return normalise(torch.from_numpy(vectors)).numpy()


def centre_angles(vectors: Floats, labels: Ints) -> tuple[Floats, Floats]:
    """Angle in degrees of each feature to its own class centre and to the nearest other one.

    A class centre is the mean direction of the class's features. With a single class there is no other centre, and
    the second array is empty.
    """
    classes, own = np.unique(labels, return_inverse=True)
    features, index = torch.from_numpy(vectors), torch.from_numpy(own)
    angles = np.degrees(angle_matrix(features, class_centres(features, index, len(classes))).numpy())
    rows = np.arange(len(own))
    own_angles = angles[rows, own]
    if len(classes) == 1:
        return own_angles, np.empty(0)
    angles[rows, own] = np.inf
    return own_angles, angles.min(axis=1)


def pair_angles(vectors: Floats, labels: Ints, limit: int) -> tuple[Floats, Floats]:
    """Angles in degrees of all pairs of one class and of two classes among at most ``limit`` features."""
    chosen = balanced_subset(labels, limit)
    cosines, same = pair_scores(torch.from_numpy(vectors[chosen]), torch.from_numpy(labels[chosen]))
    angles, genuine = np.degrees(arccos(cosines).numpy()), same.numpy()
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
