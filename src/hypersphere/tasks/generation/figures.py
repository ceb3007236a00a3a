"""Pictures of generated images: a grid beside real ones, the same noise over training, and how classes occur."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hypersphere.drawing import colour
from hypersphere.report.figures import Figure, numbers, plotly_layout
from hypersphere.report.sections import Artefacts, Picture, Section, figures, png

GAP = 1
ZOOM_TO = 256
"""About the side of a picture in pixels of its own; smaller ones are enlarged, so that browsers do not blur them."""


def tiles(images: Any, columns: int) -> Any:
    """Images ``(n, C, H, W)`` of bytes side by side as one ``(H', W', 4)`` with transparent gaps, row by row.

    Example:
        >>> tiles(np.zeros((6, 1, 8, 8), np.uint8), columns=3).shape
        (17, 26, 4)
    """
    count, _, height, width = images.shape
    rows = -(-count // columns)
    cells = np.zeros((rows * columns, height + GAP, width + GAP, 4), np.uint8)
    cells[:count, :height, :width, :3] = images.transpose(0, 2, 3, 1)  # grey becomes three equal channels
    cells[:count, :height, :width, 3] = 255
    whole = cells.reshape(rows, columns, height + GAP, width + GAP, 4).swapaxes(1, 2)
    return whole.reshape(rows * (height + GAP), columns * (width + GAP), 4)[:-GAP, :-GAP]


def _image(pixels: Any) -> Figure:
    """A trace of an image."""
    zoom = max(1, ZOOM_TO // max(pixels.shape[:2]))
    source = png(pixels.repeat(zoom, axis=0).repeat(zoom, axis=1))
    return {"type": "image", "source": source, "hoverinfo": "skip", "dx": 1 / zoom, "dy": 1 / zoom}


def sample_grid(images: Any) -> Figure:
    """Images ``(n, C, H, W)`` of bytes as a grid that is about square."""
    columns = math.ceil(math.sqrt(len(images) * images.shape[2] / images.shape[3]))
    hidden = {"visible": False}
    return {
        "data": [_image(tiles(images, columns))],
        "layout": plotly_layout(xaxis=hidden, yaxis=hidden | {"scaleanchor": "x", "autorange": "reversed"}),
    }


def sample_progress(steps: Any, images: Any) -> Figure:
    """What became of the same noise: a row for each step, a column for each noise.

    Args:
        steps: ``(T,)``.
        images: ``(T, n, C, H, W)`` of bytes.
    """
    times, count, channels, height, width = images.shape
    pixels = tiles(images.reshape(times * count, channels, height, width), count)
    places = [row * (height + GAP) + (height - 1) / 2 for row in range(times)]
    axis = {"showgrid": False, "zeroline": False, "automargin": True}
    rows = {"tickvals": places, "ticktext": [f"{step:,}" for step in steps]}
    return {
        "data": [_image(pixels)],
        "layout": plotly_layout(
            xaxis={"visible": False}, yaxis=axis | rows | {"scaleanchor": "x", "autorange": "reversed"}
        ),
    }


def class_shares(shares: Any) -> Figure:
    """How often a classifier finds each class among generated images, and the share of equal ones."""
    even = 100 / len(shares)
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": even, "y1": even}
    bars = {"type": "bar", "x": list(range(len(shares))), "y": numbers(100 * shares, 3), "marker": {"color": colour(0)}}
    return {
        "data": [bars | {"hovertemplate": "class %{x}: %{y} %<extra></extra>"}],
        "layout": plotly_layout(
            xaxis={"title": {"text": "class"}, "automargin": True, "dtick": max(1, len(shares) // 10)},
            yaxis={"ticksuffix": " %", "automargin": True, "nticks": 5, "rangemode": "tozero"},
            shapes=[line | {"line": {"color": "rgba(136,136,136,.9)", "width": 1.5, "dash": "dash"}}],
        ),
    }


def draw(artefacts: Artefacts) -> list[Picture]:
    """The pictures of what the evaluation ``generation`` left."""
    found = []
    if "grid" in artefacts:
        grid = artefacts["grid"]
        text = f"{len(grid)} images, not selected, of a noise that is the same in every run."
        found.append(Picture("generated images", sample_grid(grid), text, "sphere"))
    if "real" in artefacts:
        found.append(Picture("test images", sample_grid(artefacts["real"]), "For comparison.", "sphere"))
    if len(artefacts.get("steps", ())) > 1:
        order = np.argsort(artefacts["steps"])
        figure = sample_progress(artefacts["steps"][order], artefacts["progress"][order])
        found.append(Picture("over training", figure, "A row is a step, a column one noise.", "sphere"))
    if "classes" in artefacts:
        text = "Classes of generated images as the classifier sees them; dashed: all equally frequent."
        found.append(Picture("classes", class_shares(artefacts["classes"]), text, "histogram"))
    return found


@figures.register("samples")
def section(artefacts: Artefacts) -> Section:
    """Generated images."""
    return Section(
        "Generated images",
        "What the generator makes of noise, beside images of the test set. Look for images that could be of the test "
        "set, for all of its classes, and for few that are alike.",
        draw(artefacts),
    )


_IMAGES = np.arange(4 * 3 * 8 * 8, dtype=np.uint8).reshape(4, 3, 8, 8)
section.contract = {  # type: ignore[attr-defined]
    "artefacts": {
        **{"grid": _IMAGES, "real": _IMAGES, "classes": np.array([0.2, 0.5, 0.3])},
        **{"steps": np.array([2, 1]), "progress": np.stack([_IMAGES, _IMAGES])},
    }
}
