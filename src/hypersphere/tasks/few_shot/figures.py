"""Pictures of few-shot evaluations: accuracy by shots, and episodes with what their queries were taken for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hypersphere.drawing import colour
from hypersphere.report.figures import Figure, numbers, plotly_layout, plotly_legend, text
from hypersphere.report.sections import Artefacts, Picture, Section, figures, png

TILE = 32
"""Least side of an image in the picture, in pixels."""
GAP = 3
RIGHT, WRONG = (46, 160, 67, 255), (207, 34, 46, 255)
"""Frames of queries."""


def few_shot_figures(artefacts: Artefacts) -> list[Picture]:
    """The pictures of one run's artefacts: ``curve/KEY`` and ``episodes/...``."""
    drawn = []
    curves = {name.split("/", 1)[1]: value for name, value in artefacts.items() if name.startswith("curve/")}
    if curves:
        drawn.append(accuracy_by_shots(curves))
    if "episodes/support" in artefacts:
        drawn += episodes(artefacts)
    return drawn


def accuracy_by_shots(curves: dict[str, NDArray[np.float64]]) -> Picture:
    """Mean accuracy over episodes against the number of shots, with 95 % confidence intervals.

    Args:
        curves: First part of the metrics' names -> ``(S, 3)`` shots, accuracy and half width of its interval.
    """
    traces = []
    for index, (key, curve) in enumerate(sorted(curves.items())):
        shots, accuracy, interval = curve[np.argsort(curve[:, 0])].T
        traces.append(
            {"type": "scatter", "mode": "lines+markers", "name": text(key)}
            | {"x": shots.astype(int).tolist(), "y": numbers(100 * accuracy), "showlegend": len(curves) > 1}
            | {"error_y": {"type": "data", "array": numbers(100 * interval), "thickness": 1.5, "width": 5}}
            | {"line": {"color": colour(index), "width": 2}, "marker": {"color": colour(index), "size": 7}}
            | {"hovertemplate": "%{y:.2f} ± %{error_y.array:.2f} %, %{x} shots<extra>%{fullData.name}</extra>"}
        )
    shown = sorted({int(shot) for curve in curves.values() for shot in curve[:, 0]})
    layout = plotly_layout(
        xaxis={"title": {"text": "shots"}, "automargin": True, "tickvals": shown},
        yaxis={"automargin": True, "nticks": 6, "ticksuffix": " %"},
        hovermode="closest",
        legend=plotly_legend(y=1.02, yanchor="bottom"),
    )
    caption = "Mean over episodes; bars are 95 % confidence intervals of the mean over episodes."
    return Picture("accuracy by shots", {"data": traces, "layout": layout}, caption)


def episodes(artefacts: Artefacts) -> list[Picture]:
    """A picture of each kept episode: a class a row, its support, then its queries framed by right and wrong."""
    support, query, prediction = (
        np.asarray(artefacts[f"episodes/{name}"]) for name in ("support", "query", "prediction")
    )
    names = bytes(np.asarray(artefacts["episodes/names"], np.uint8)).decode().split("\n")
    ways = support.shape[1]
    return [
        _episode(number, support[number], query[number], prediction[number], names[number * ways : (number + 1) * ways])
        for number in range(len(support))
    ]


def _episode(
    number: int, support: NDArray[Any], query: NDArray[Any], prediction: NDArray[Any], names: list[str]
) -> Picture:
    ways, shots = support.shape[:2]
    right = prediction == np.arange(ways)[:, None]
    tiles = np.concatenate([support, query], axis=1)
    zoom = math.ceil(TILE / tiles.shape[3])
    tall, wide = (zoom * side + 2 * GAP for side in tiles.shape[3:])
    lefts = [column * wide + (3 * GAP if column >= shots else 0) for column in range(tiles.shape[1])]
    picture = np.zeros((ways * tall, lefts[-1] + wide, 4), np.uint8)  # transparent in between
    told = []
    for row, name in enumerate(names):
        for column, left in enumerate(lefts):
            box = picture[row * tall : (row + 1) * tall, left : left + wide]
            if column < shots:
                told.append(f"support: {text(name)}")
            else:
                hit = right[row, column - shots]
                box[:] = RIGHT if hit else WRONG
                guess = text(names[int(prediction[row, column - shots])])
                told.append(f"query: {text(name)}" + ("" if hit else f"<br>taken for {guess}"))
            inner = box[GAP:-GAP, GAP:-GAP]
            inner[:, :, :3] = tiles[row, column].repeat(zoom, axis=1).repeat(zoom, axis=2).transpose(1, 2, 0)
            inner[:, :, 3] = 255
    traces: list[Figure] = [
        {"type": "image", "source": png(picture), "hoverinfo": "skip"},
        # What the pointer says: an image alone would tell colours.
        {"type": "scatter", "mode": "markers", "hovertemplate": "%{customdata}<extra></extra>", "showlegend": False}
        | {"x": [left + wide // 2 for left in lefts] * ways, "customdata": told}
        | {"y": [row * tall + tall // 2 for row in range(ways) for _ in lefts]}
        | {"marker": {"size": 24, "opacity": 0}},
    ]
    height, width = picture.shape[:2]
    layout = plotly_layout(
        xaxis={"visible": False, "range": [0, width]},
        yaxis={"range": [height, 0], "scaleanchor": "x", "automargin": True, "showgrid": False, "zeroline": False}
        | {"tickvals": [row * tall + tall // 2 for row in range(ways)], "ticktext": [text(name) for name in names]},
        hovermode="closest",
    )
    caption = (
        f"A class a row: {shots} labelled image{'s' * (shots > 1)}, then queries, framed green where they were "
        f"classified right ({right.sum()} of {right.size} of these) and red where wrong."
    )
    return Picture(f"episode {number + 1}", {"data": traces, "layout": layout}, caption)


@figures.register("few-shot")
def section(artefacts: Artefacts) -> Section:
    """Few-shot episodes."""
    return Section(
        "Few-shot episodes",
        "Every episode has new classes, with a few labelled images each (shots) to make a classifier of, and queries "
        "to test it with. The features stay as they were trained, on other classes.",
        few_shot_figures(artefacts),
    )


section.contract = {  # type: ignore[attr-defined]
    "artefacts": {
        "curve/5_way": np.array([[1, 0.6, 0.02], [5, 0.8, 0.01]]),
        "episodes/support": np.full((1, 2, 1, 3, 8, 8), 200, np.uint8),
        "episodes/query": np.full((1, 2, 2, 3, 8, 8), 100, np.uint8),
        "episodes/prediction": np.array([[[0, 1], [1, 1]]]),
        "episodes/names": np.frombuffer(b"one\nother", np.uint8),
    }
}
