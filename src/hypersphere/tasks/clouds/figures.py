"""Point clouds as the report draws them: seen from a fixed place, coloured by what each point adds to the loss."""

from __future__ import annotations

import math

import numpy as np

from hypersphere.drawing import Floats
from hypersphere.report.figures import numbers, plotly_layout, text
from hypersphere.report.sections import Artefacts, Picture, Section, figures

COLUMNS = 6
CELL = 2.25
TURN, RISE = math.radians(35), math.radians(20)
LOUD = 0.9
"""Share of a cloud's points whose contribution is less than that of the strongest colour."""


def cloud_pictures(artefacts: Artefacts) -> list[Picture]:
    """The clouds of one run in a grid, wrong ones first."""
    points, contribution = artefacts["points"], artefacts["contribution"]
    names = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in artefacts["names"].astype(np.uint8)]
    labels, predicted = artefacts["labels"].astype(int), artefacts["predicted"].astype(int)
    if not len(points):
        return []
    across, up, colours, annotations = [], [], [], []
    for index, (cloud, values) in enumerate(zip(points, contribution, strict=True)):
        row, column = divmod(index, COLUMNS)
        x, y, depth = project(cloud.astype(np.float64))
        order = np.argsort(depth)  # near points are drawn over far ones
        across.append(x[order] + CELL * column)
        up.append(y[order] - 1.4 * CELL * row)
        colours.append(strength(values.astype(np.float64))[order])
        right, sure = labels[index] == predicted[index], artefacts["confidence"][index]
        title = f"✓ {text(names[labels[index]])}" if right else f"<b>✗ {text(names[labels[index]])}</b>"
        judged = f"{sure:.0%}" if right else f"taken for<br>{text(names[predicted[index]])}, {sure:.0%}"
        annotations.append(
            {"x": CELL * column, "y": 1.12 - 1.4 * CELL * row, "text": f"{title}<br>{judged}", "showarrow": False}
            | {"yanchor": "bottom", "font": {"size": 11}}
        )
    scale = [[0, "#3f90da"], [0.5, "rgba(136,136,136,.35)"], [1, "#e76300"]]
    bar = {"orientation": "h", "y": -0.02, "yanchor": "top", "thickness": 8, "len": 0.6, "outlinewidth": 0}
    ticks = {"tickvals": [-1, 0, 1], "ticktext": ["speaks for its class", "no effect", "speaks against it"]}
    trace = (
        {"type": "scatter", "mode": "markers", "hoverinfo": "skip", "showlegend": False}
        | {"x": numbers(np.concatenate(across)), "y": numbers(np.concatenate(up))}
        | {
            "marker": {"size": 4, "color": numbers(np.concatenate(colours), 2), "colorscale": scale}
            | {"cmin": -1, "cmax": 1, "showscale": True, "colorbar": bar | ticks}
        }
    )
    rows = -(-len(points) // COLUMNS)
    hidden = {"visible": False, "automargin": False}
    layout = plotly_layout(
        xaxis=hidden | {"range": [-1.15, CELL * (min(len(points), COLUMNS) - 1) + 1.15]},
        yaxis=hidden | {"range": [-1.15 - 1.4 * CELL * (rows - 1), 2.1], "scaleanchor": "x"},
        annotations=annotations,
    )
    wrong = int((labels != predicted).sum())
    caption = (
        f"{wrong} test clouds with a wrong answer, the surest first, and {len(points) - wrong} with the right one. "
        "Blue points lower the loss by being where they are, orange ones raise it (to first order, each cloud on its "
        "own scale), and grey ones do not matter."
    )
    return [Picture("clouds by error", {"data": [trace], "layout": layout}, caption, "large")]


def project(cloud: Floats) -> tuple[Floats, Floats, Floats]:
    """A cloud ``(3, P)`` seen from the side and a little above: to the right, up, and towards the eye."""
    x, y, z = cloud
    right, away = math.cos(TURN) * x + math.sin(TURN) * y, math.cos(TURN) * y - math.sin(TURN) * x
    return right, math.cos(RISE) * z + math.sin(RISE) * away, math.sin(RISE) * z - math.cos(RISE) * away


def strength(values: Floats) -> Floats:
    """Contributions between -1 and 1, the loudest tenth of those that are not 0 at full strength."""
    size = np.abs(values[values != 0])
    limit = np.quantile(size, LOUD) if len(size) else 1.0
    return np.clip(values / limit, -1, 1)


@figures.register("clouds")
def section(artefacts: Artefacts) -> Section:
    """Point clouds."""
    return Section(
        "Point clouds",
        "Test clouds with the class that the network gives them, and which of their points led it there.",
        cloud_pictures(artefacts),
    )


section.contract = {  # type: ignore[attr-defined]
    "artefacts": {
        **{"points": np.eye(3, 4)[None].repeat(2, 0), "contribution": np.array([[0.0, 1, -1, 2], [0.0, 0, 0, 0]])},
        **{"names": np.array([[97, 0], [98, 0]]), "labels": np.array([0, 1]), "predicted": np.array([0, 0])},
        "confidence": np.array([0.9, 0.6]),
    }
}
