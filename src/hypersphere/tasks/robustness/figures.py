"""Pictures of attacks: accuracy by budget, checks for masked gradients, features and images before and after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hypersphere import drawing
from hypersphere.drawing import Floats, colour
from hypersphere.report.figures import FRAME, Figure, coordinates, numbers, plotly_layout, plotly_legend, text
from hypersphere.report.sections import Picture, Section, figures
from hypersphere.tasks.robustness.evaluation import CHECKS, TITLES, explain

SIDE = 64
"""About the side of an image in a picture, in pixels of its own."""


def attack_pictures(artefacts: Mapping[str, Any]) -> list[Picture]:
    """All pictures of one run's attacks.

    Args:
        artefacts: ``curve_eps`` ``(E,)`` and ``curve_NAME`` ``(E,)`` the accuracies by budget, ``transfer_NAME`` a
            budget and the accuracy under it, ``checks`` the values of :data:`CHECKS`,
            ``natural`` and ``adversarial`` features ``(N, D)`` with ``labels`` and ``fooled`` ``(N,)``, ``images``
            ``(2, n, C, H, W)`` with ``classes`` ``(2, n)``, ``deepfool_l2`` and ``deepfool_linf`` sorted sizes, and
            ``names``, the names of the classes as lines of text; whatever is there.
    """
    found = {name: np.asarray(value) for name, value in artefacts.items()}
    names = bytes(found["names"].astype(np.uint8)).decode().split("\n") if "names" in found else []
    pictures = [_curve(found)] if "curve_eps" in found else []
    if "checks" in found and np.isfinite(found["checks"]).any():
        pictures.append(_checks(found["checks"]))
    if "natural" in found:
        pictures += _features(found, names)
    if "images" in found and found["images"].size:
        pictures.append(_images(found["images"], found["classes"].astype(np.int64), names))
    if "deepfool_l2" in found:
        pictures.append(_deepfool(found))
    return pictures


def _curve(found: Mapping[str, Any]) -> Picture:
    budgets = 255 * found["curve_eps"]
    traces: list[Figure] = []
    names = [name.removeprefix("curve_") for name in found if name.startswith("curve_") and name != "curve_eps"]
    for index, name in enumerate(sorted(names, key=lambda name: [*TITLES, name].index(name))):
        traces.append(
            {"type": "scatter", "mode": "lines+markers", "name": text(TITLES.get(name, name))}
            | {"x": numbers(budgets), "y": numbers(100 * found[f"curve_{name}"])}
            | {"line": {"color": colour(index), "width": 2}, "marker": {"color": colour(index)}}
            | {"hovertemplate": "%{y:.1f} % right, budget %{x:.3~g} of 255<extra>%{fullData.name}</extra>"}
        )
        if f"transfer_{name}" in found:
            budget, value = found[f"transfer_{name}"]
            traces.append(
                {"type": "scatter", "mode": "markers", "name": text(f"{TITLES.get(name, name)}, transfer")}
                | {"x": numbers([255 * budget]), "y": numbers([100 * value])}
                | {"marker": {"color": colour(index), "symbol": "diamond-open", "size": 11, "line": {"width": 2}}}
                | {"hovertemplate": "%{y:.1f} % right, made by another model<extra>%{fullData.name}</extra>"}
            )
    layout = plotly_layout(
        xaxis={"title": {"text": "budget of every pixel, of 255"}, "automargin": True, "rangemode": "tozero"},
        yaxis={"automargin": True, "ticksuffix": " %", "rangemode": "tozero"},
        hovermode="closest",
        legend=plotly_legend(y=1.02, yanchor="bottom"),
    )
    diamonds = " Diamonds: attacks made with the gradients of another model." if len(traces) > len(names) else ""
    caption = f"At budget 0 the images are as they were. A robust model falls late.{diamonds}"
    return Picture("accuracy by strength of the attack", {"data": traces, "layout": layout}, caption, "curve")


def _checks(values: Floats) -> Picture:
    metrics = {name: float(value) for name, value in zip(CHECKS, values, strict=False) if np.isfinite(value)}
    said = explain(metrics)
    titles = [CHECKS[name].title for name in metrics]
    trace = (
        {"type": "bar", "orientation": "h", "y": titles[::-1], "x": numbers([100 * v for v in metrics.values()][::-1])}
        | {"marker": {"color": [colour(1 if bad else 0) for bad, _ in said][::-1]}}
        | {"customdata": [words for _, words in said][::-1], "hovertemplate": "%{customdata}<extra></extra>"}
    )
    layout = plotly_layout(
        xaxis={"title": {"text": "percentage points"}, "automargin": True, "nticks": 6},
        yaxis={"automargin": True, "showgrid": False, "ticklabelstandoff": 6},
        showlegend=False,
    )
    signs = [words for bad, words in said if bad]
    if signs:
        caption = (
            f"Orange, {len(signs)} of {len(said)} checks, speaks against believing accuracies: {'; '.join(signs)}."
        )
    else:
        caption = f"None of {len(said)} checks speaks for masked gradients: {'; '.join(words for _, words in said)}."
    return Picture("checks for masked gradients", {"data": [trace], "layout": layout}, caption, "curve")


def _features(found: Mapping[str, Any], names: list[str]) -> list[Picture]:
    natural, adversarial = (found[name].astype(np.float64) for name in ("natural", "adversarial"))
    labels, fooled = found["labels"].astype(np.int64), found["fooled"].astype(bool)
    dimension, drawn = natural.shape[1], f"The 2-D features of {len(labels)} test images"
    if dimension != 2:
        middle = natural.mean(0)
        axes, kept = drawing.principal_axes(natural - middle, min(2, dimension))
        blank = ((0, 0), (0, 2 - axes.shape[1]))
        natural, adversarial = (np.pad((points - middle) @ axes, blank) for points in (natural, adversarial))
        drawn = (
            f"The {dimension}-D features of {len(labels)} test images on two principal axes of the natural ones, which "
            f"keep {kept:.0%} of their variance"
        )
    both = np.concatenate([natural, adversarial])
    low, high = both.min(0), both.max(0)
    margin = 0.05 * (high - low) + 1e-9
    captions = (
        f"{drawn}, coloured by their class.",
        "The same images after the attack, in the same place and scale, coloured by their true class; crosses are "
        f"taken for another one ({fooled.mean():.0%}).",
    )
    pictures = []
    for title, points, wrong, caption in zip(
        ("natural features", "adversarial features"),
        (natural, adversarial),
        (np.zeros_like(fooled), fooled),
        captions,
        strict=True,
    ):
        traces = [
            {"type": "scatter", "mode": "markers", "name": text(names[label] if label < len(names) else label)}
            | coordinates(points[labels == label])
            | {"marker": {"color": colour(label), "size": 5} | {"symbol": _symbols(wrong[labels == label])}}
            | {"hovertemplate": "<b>%{fullData.name}</b><extra></extra>"}
            for label in map(int, np.unique(labels))
        ]
        axis = {"showgrid": False, "automargin": True, "zeroline": True}
        layout = plotly_layout(
            xaxis=axis | {"range": [*numbers((low[0] - margin[0], high[0] + margin[0]))]},
            yaxis=axis | {"range": [*numbers((low[1] - margin[1], high[1] + margin[1]))]},
            hovermode="closest",
            legend=plotly_legend(y=-0.08, yanchor="top"),
        )
        pictures.append(Picture(title, {"data": traces, "layout": layout}, caption, "sphere"))
    return pictures


def _symbols(wrong: Any) -> list[str]:
    return np.where(wrong, "x", "circle").tolist()


def _images(images: Any, classes: Any, names: list[str]) -> Picture:
    """Rows: natural images, adversarial ones, and what was changed, grey where nothing was."""
    natural, adversarial = images.astype(np.float64)
    change = adversarial - natural
    largest = np.abs(change).max() or 1.0
    tiles = np.stack([natural, adversarial, 127.5 + 127.5 * change / largest]).transpose(0, 1, 3, 4, 2)
    tiles = tiles if tiles.shape[-1] == 3 else tiles.mean(-1, keepdims=True).repeat(3, axis=-1)
    zoom = max(1, SIDE // max(tiles.shape[2:4]))
    tiles = tiles.round().astype(int).repeat(zoom, axis=2).repeat(zoom, axis=3)
    tiles = np.pad(tiles, [(0, 0), (0, 0), (1, 1), (1, 1), (0, 0)], constant_values=FRAME[0])
    rows, count, tall, wide, _ = tiles.shape
    picture = tiles.transpose(0, 2, 1, 3, 4).reshape(rows * tall, count * wide, 3)

    def name(index: int) -> str:
        return text(names[index] if index < len(names) else index)

    labels = [
        {"x": (place + 0.5) * wide, "y": rows * tall, "yanchor": "top", "showarrow": False, "font": {"size": 11}}
        | {"text": f"{name(before)}<br>→ {name(after)}"}
        for place, (before, after) in enumerate(classes.T.tolist())
    ]
    hidden = {"visible": False, "automargin": False}
    layout = plotly_layout(
        xaxis=hidden,
        yaxis=hidden | {"scaleanchor": "x", "range": [rows * tall + 36, 0]},
        annotations=labels,
    )
    trace = {"type": "image", "colormodel": "rgb", "z": picture.tolist(), "hoverinfo": "skip"}
    caption = (
        "The images as they are, under the strongest of the attacks, and the change, whose largest, "
        f"{largest:.0f} of 255, is black or white; below, what the model takes them for before and after."
    )
    return Picture("images before and after", {"data": [trace], "layout": layout}, caption, "curve")


def _deepfool(found: Mapping[str, Any]) -> Picture:
    traces = []
    kinds = (("l2", "y", "of the image (l2)"), ("linf", "y2", "of a pixel (l-inf)"))
    for index, (norm, axis, title) in enumerate(kinds):
        sizes = found[f"deepfool_{norm}"].astype(np.float64)
        traces.append(
            {"type": "scatter", "mode": "lines", "name": title, "yaxis": axis, "y": numbers(sizes)}
            | {"x": numbers(100 * (np.arange(len(sizes)) + 0.5) / len(sizes))}
            | {"line": {"color": colour(index), "width": 2, "dash": "solid" if norm == "l2" else "dot"}}
            | {"hovertemplate": "%{x:.0f} % of the images need less than %{y:.3~g}<extra>%{fullData.name}</extra>"}
        )
    layout = plotly_layout(
        xaxis={"title": {"text": "images, sorted"}, "automargin": True, "ticksuffix": " %"},
        yaxis={"title": {"text": "l2"}, "automargin": True, "rangemode": "tozero", "nticks": 6},
        yaxis2={"title": {"text": "l-inf"}, "automargin": True, "rangemode": "tozero", "nticks": 6}
        | {"overlaying": "y", "side": "right", "showgrid": False, "tickmode": "auto"},
        hovermode="closest",
        legend=plotly_legend(y=1.02, yanchor="bottom"),
    )
    caption = (
        "Size of the smallest change that DeepFool finds for each image that is classified rightly, in units of the "
        "pixels' range; lines end where the images begin that it does not fool. It follows gradients, too: masked "
        "ones make it look large."
    )
    return Picture("smallest changes that fool", {"data": traces, "layout": layout}, caption, "curve")


@figures.register("attacks")
def section(artefacts: Mapping[str, Any]) -> Section:
    """Attacks."""
    return Section(
        "Attacks",
        "How the model stands up to images that were changed on purpose, and whether what attacks by gradient say can "
        "be believed: a model can lead gradients astray and look robust.",
        attack_pictures(artefacts),
    )


section.contract = {  # type: ignore[attr-defined]
    "artefacts": {
        **{"curve_eps": np.array([0.0, 0.1]), "curve_fgsm": np.array([0.9, 0.4]), "checks": np.full(len(CHECKS), 0.5)},
        **{"natural": np.eye(4, 3), "adversarial": np.eye(4, 3)[::-1], "labels": np.array([0, 0, 1, 1])},
        **{"fooled": np.array([0, 1, 0, 1]), "images": np.full((2, 3, 1, 8, 8), 0.5), "names": np.array([97, 10, 98])},
        **{"classes": np.zeros((2, 3)), "deepfool_l2": np.array([0.1, 0.2]), "deepfool_linf": np.array([0.01, 0.02])},
    }
}
