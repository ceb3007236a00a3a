"""The unit sphere on paper: its outline with meridians and parallels, and curves on it."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Circle

from hypersphere.drawing import Floats
from hypersphere.plot.style import MUTED

REACH = 1.13
"""How far axes go, in radii of the sphere."""


def draw_ball(axes: Axes, frame: Floats) -> float:
    """The sphere, seen along the last row of a rotation; returns how far the axes should go.

    Args:
        axes: Where to.
        frame: ``(3, 3)``, rows are right, up and towards the reader.
    """
    axes.add_patch(Circle((0, 0), 1, fc="#f4f5f7", ec=MUTED, lw=0.9, zorder=0))
    for curve in graticule():
        draw_curve(axes, curve @ frame.T, color="#c3c7cd", lw=0.5, zorder=1)
    return REACH


def draw_curve(axes: Axes, turned: Floats, **look: Any) -> None:
    """A curve ``(T, 3)`` in coordinates of the reader: what lies behind the sphere is paler."""
    for back in (True, False):
        line = turned[:, :2].copy()
        line[(turned[:, 2] < 0) != back] = np.nan
        axes.plot(*line.T, alpha=0.35 if back else 1.0, **look)


def graticule() -> list[Floats]:
    """Meridians and parallels every 30 degrees, ``(181, 3)`` each.

    Example:
        >>> len(graticule())
        11
    """
    way = np.linspace(-np.pi, np.pi, 181)
    parallels = [
        np.stack([np.cos(h) * np.cos(way), np.cos(h) * np.sin(way), np.full_like(way, np.sin(h))], axis=1)
        for h in np.radians([-60, -30, 0, 30, 60])
    ]
    meridians = [
        np.stack([np.cos(way) * np.cos(t), np.cos(way) * np.sin(t), np.sin(way)], axis=1)
        for t in np.radians([0, 30, 60, 90, 120, 150])
    ]
    return parallels + meridians
