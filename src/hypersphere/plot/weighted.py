"""Pictures of weighted hyperspherical energy: how far heavy points on the sphere move."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch

from hypersphere.drawing import Floats, colour
from hypersphere.energy import minimise
from hypersphere.errors import ArgumentError, check_range
from hypersphere.plot.sphere import draw_ball, draw_curve
from hypersphere.plot.style import INK, MUTED, new_figure, styled

BETAS = (1.0, 2.0, 4.0, 10.0)
TILT = (0.45, 0.35)
"""How far right and up of the middle the heavy points start on paper."""


@dataclass(frozen=True)
class Paths:
    r"""Gradient descent of the weighted energy.

    Attributes:
        beta: Weight of the heavy points.
        places: Where the points were at the start and after each step, ``(steps + 1, n, 3)``; the heavy ones first.
        energy: The energy at the end.
    """

    beta: float
    places: Floats
    energy: float

    def lengths(self) -> Floats:
        """Length of the way of each point in degrees, ``(n,)``."""
        chords = np.linalg.norm(np.diff(self.places, axis=0), axis=2)
        return np.degrees(2 * np.arcsin(np.minimum(chords / 2, 1))).sum(axis=0)


def weighted_paths(
    beta: float, *, points: int = 10, heavy: int = 1, s: float = 2.0, steps: int = 300, lr: float = 4e-3, seed: int = 0
) -> Paths:
    r"""Riemannian gradient descent of :math:`\sum_{i \ne j} \|\beta_i u_i - \beta_j u_j\|^{-s}` from random points.

    The first ``heavy`` points have :math:`\beta_i = \beta`, the others 1. The start depends on the seed alone.

    Args:
        beta: Weight of the heavy points, above 0.
        points: Number of points on the sphere.
        heavy: How many of them are heavy.
        s: Riesz exponent; 0 is the logarithmic energy.
        steps: Number of steps.
        lr: Step size.
        seed: Of the start.

    Example:
        >>> found = weighted_paths(10.0, steps=20)
        >>> found.places.shape, bool(found.lengths()[0] < found.lengths()[1:].mean())
        ((21, 10, 3), True)
    """
    check_range("beta", beta, 0, open_low=True)
    check_range("points", points, 2)
    check_range("heavy", heavy, 1, points)
    check_range("steps", steps, 1)
    start = torch.randn(points, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    weights = torch.ones(points, dtype=torch.float64)
    weights[:heavy] = beta
    found = minimise(start, s, beta=weights, method="riemannian", lr=lr, steps=steps, trajectory=True)
    if found.trajectory is None:
        raise ArgumentError("steps", "must leave a trajectory")
    return Paths(beta, found.trajectory.numpy(), found.energy)


@styled
def weighted_energy(
    betas: Sequence[float] = BETAS,
    *,
    points: int = 10,
    heavy: int = 1,
    s: float = 2.0,
    steps: int = 300,
    lr: float = 4e-3,
    seed: int = 0,
) -> Figure:
    r"""Ways of points on the sphere under gradient descent of the weighted energy, a sphere for each :math:`\beta`.

    Every sphere has the same start and the same number of equal steps. Ways are dashed, of heavy points in colour, and
    arrows end where these are at last.

    Args:
        betas: Weights of the heavy points, one a sphere.
        points: As for :func:`weighted_paths`, as all that follows.
        heavy: How many points are heavy.
        s: Riesz exponent.
        steps: Number of steps.
        lr: Step size.
        seed: Of the start.
    """
    if not betas:
        raise ArgumentError("betas", "must be at least one number, got none")
    found = [weighted_paths(beta, points=points, heavy=heavy, s=s, steps=steps, lr=lr, seed=seed) for beta in betas]
    figure = new_figure(max(4.0, 2.6 * len(found)), 3.5)
    figure.set_layout_engine("compressed")  # spheres keep their shape, and titles their place
    frame = _frame(found, heavy)
    for axes, paths in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        _draw(axes, paths, frame, heavy)
    handles = [
        Line2D([], [], color=colour(0), ls="--", lw=1.4, label="way of a heavy point"),
        Line2D([], [], color=colour(0), lw=1.8, marker=">", markersize=5, label="heavy point at the end"),
        Line2D([], [], color=MUTED, ls="--", lw=0.8, marker="o", markersize=4, label=r"others ($\beta$ = 1)"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def _frame(found: Sequence[Paths], heavy: int) -> Floats:
    """The rotation (rows: right, up, towards the reader) in which the ways of the heavy points are in front."""
    ways = np.concatenate([paths.places[:, :heavy].reshape(-1, 3) for paths in found])
    middle = ways.mean(axis=0)
    length = np.linalg.norm(middle)
    # What comes straight towards the reader would be a dot: the middle of the ways is off that of the picture.
    goal = np.array([*TILT, math.sqrt(1 - TILT[0] ** 2 - TILT[1] ** 2)])
    return _basis(goal).T @ _basis(middle / length if length > 1e-6 else ways[0])


def _basis(direction: Floats) -> Floats:
    """A rotation ``(3, 3)`` whose last row is a unit vector."""
    first = np.cross(np.eye(3)[np.abs(direction).argmin()], direction)
    first /= np.linalg.norm(first)
    return np.stack([first, np.cross(direction, first), direction])


def _draw(axes: Axes, paths: Paths, frame: Floats, heavy: int) -> None:
    turned = paths.places @ frame.T
    reach = draw_ball(axes, frame)
    for index in reversed(range(turned.shape[1])):
        way, tip = turned[:, index], turned[-1, index]
        shade = colour(index) if index < heavy else MUTED
        draw_curve(axes, way, color=shade, lw=1.4 if index < heavy else 0.8, ls="--", zorder=4 if index < heavy else 2)
        alpha = 0.35 if tip[2] < 0 else 1.0
        if index >= heavy:
            axes.plot(*tip[:2], marker="o", markersize=3.5, color=shade, alpha=alpha, zorder=3, ls="")
            continue
        axes.plot(*way[0, :2], marker="o", markersize=4, mfc="white", mec=shade, zorder=5, ls="")
        axes.add_patch(
            FancyArrowPatch(
                (0, 0),
                (float(tip[0]), float(tip[1])),
                arrowstyle="-|>",
                mutation_scale=10,
                shrinkA=0,
                shrinkB=0,
                color=shade,
                lw=1.8,
                alpha=alpha,
                zorder=5,
            )
        )
    axes.plot(0, 0, marker=".", color=INK, markersize=3, zorder=5)
    moved = " and ".join(f"{length:.1f}°" for length in paths.lengths()[:heavy])
    axes.set_title(rf"$\beta$ = {paths.beta:g}" + f"\nway {moved}", loc="center", fontsize=9)
    axes.set_aspect("equal")
    axes.set_xlim(-reach, reach)
    axes.set_ylim(-reach, reach)
    axes.axis("off")
