"""Pictures of graphs: the features of all nodes in the plane, and the edges between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hypersphere import drawing
from hypersphere.drawing import MAX_POINTS, Floats, Ints, colour
from hypersphere.report.figures import Figure, coordinates, plotly_layout, plotly_legend, text
from hypersphere.report.sections import Picture, Section, figures

MAX_EDGES = 6000


def embedding(artefacts: Mapping[str, Any]) -> list[Picture]:
    """The nodes of a graph by class: directions of their features on two principal axes.

    Args:
        artefacts: ``features`` ``(N, D)``, ``edges`` ``(2, E)``, ``labels`` and ``predicted`` ``(N,)``, ``trained``
            ``(N,)`` and ``classes``, the names of the classes as lines of text.
    """
    labels, predicted = (np.asarray(artefacts[key]).astype(np.int64) for key in ("labels", "predicted"))
    trained = np.asarray(artefacts["trained"]).astype(bool)
    units = drawing.unit(np.asarray(artefacts["features"], dtype=np.float64))
    centred = units - units.mean(0)  # a ReLU leaves one orthant, whose middle would be the first axis
    axes, kept = drawing.principal_axes(centred, min(2, centred.shape[1]))
    points = np.zeros((len(units), 2))
    points[:, : axes.shape[1]] = centred @ axes
    known = np.flatnonzero(labels >= 0)
    shown = known[drawing.balanced_subset(labels[known], MAX_POINTS)]
    shown = np.union1d(shown, np.flatnonzero(trained & (labels >= 0)))
    names = bytes(np.asarray(artefacts["classes"]).astype(np.uint8)).decode().split("\n")
    edges, count = _between(np.asarray(artefacts["edges"]).astype(np.int64), shown, len(labels))
    traces: list[Figure] = [
        {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": False}
        | {"line": {"color": "rgba(136,136,136,.18)", "width": 1}}
        | coordinates(_lines(points, edges))
    ]
    for label in map(int, np.unique(labels[shown])):
        members = shown[labels[shown] == label]
        right = predicted[members] == label
        chosen = [names[index] if index < len(names) else str(index) for index in predicted[members]]
        style = {
            "color": colour(label),
            "symbol": np.where(right, "circle", "x").tolist(),
            "size": np.where(trained[members], 11, 5).tolist(),
            "line": {"width": np.where(trained[members], 1.5, 0).tolist(), "color": "#888"},
        }
        traces.append(
            {"type": "scatter", "mode": "markers", "name": text(names[label] if label < len(names) else label)}
            | coordinates(points[members])
            | {"marker": style, "customdata": [[int(i), text(name)] for i, name in zip(members, chosen, strict=True)]}
            | {"hovertemplate": "<b>%{fullData.name}</b><br>node %{customdata[0]}, taken for %{customdata[1]}"}
        )
    hidden = {"visible": False}
    layout = plotly_layout(xaxis=hidden, yaxis=hidden | {"scaleanchor": "x"}, legend=plotly_legend(y=0, yanchor="top"))
    share = float((predicted[known] == labels[known]).mean())
    caption = (
        f"Directions of the {units.shape[1]}-D features on two principal axes, which keep {kept:.0%} of the variance. "
        f"Large points were trained on, crosses are taken for another class ({1 - share:.0%} of all nodes). "
        f"{len(shown):,} of {len(labels):,} nodes and {edges.shape[1]:,} of the {count:,} edges between them are drawn."
    )
    return [Picture("nodes by class", {"data": traces, "layout": layout}, caption, "sphere")]


def _between(edges: Ints, shown: Ints, nodes: int) -> tuple[Ints, int]:
    """The edges between nodes that are shown, evenly spaced ones where there are many, and how many there are."""
    drawn = np.isin(np.arange(nodes), shown)
    inner = edges[:, drawn[edges].all(0)]
    return inner[:, drawing.evenly(inner.shape[1], MAX_EDGES)], inner.shape[1]


def _lines(points: Floats, edges: Ints) -> Floats:
    """Ends of edges one after another, with a gap after each, ``(3 E, 2)``."""
    ends = points[edges.T]
    return np.concatenate([ends, np.full((len(ends), 1, 2), np.nan)], axis=1).reshape(-1, 2)


@figures.register("graph")
def section(artefacts: Mapping[str, Any]) -> Section:
    """Graph."""
    return Section(
        "Graph",
        "Where a network puts the nodes of its graph: neighbours get similar features, and classes that cite each "
        "other touch.",
        embedding(artefacts),
    )


section.contract = {  # type: ignore[attr-defined]
    "artefacts": {
        **{"features": np.eye(4, 3), "edges": np.array([[0, 1, 2], [1, 2, 3]]), "labels": np.array([0, 0, 1, -1])},
        **{"predicted": np.array([0, 1, 1, 0]), "trained": np.array([1, 0, 1, 0])},
        "classes": np.frombuffer(b"one\nother", np.uint8),
    }
}
