"""Plotly figures as plain dictionaries; ``page.js`` adds the colours of the light or dark theme."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from hypersphere import drawing
from hypersphere.drawing import MAX_CLASSES, MAX_POINTS, PALETTE, Floats, colour
from hypersphere.evaluate import evaluations
from hypersphere.runs.read import Energies, Features, Run

Figure: TypeAlias = dict[str, Any]

SYMBOLS = ("circle", "square", "cross")  # a further round through the palette has another shape
MAX_CURVE_POINTS = 1000
MAX_PAIR_FEATURES = 1000
BIN_DEGREES = 2
LAYER_BINS = 30
MAX_FILTERS = 256
GRID_PIXELS = 128  # about the side of a grid of filters, in pixels of its own
FRAME = (136, 136, 136, 1)
NORMS = ("grad_norm/", "weight_norm/")
SCHEDULED = {"lr", "lambda", "m", "m1", "m2", "m3"}
WEIGHT = "weight/"
NOT_TERMS = {"step", "split", "total", *SCHEDULED}
TRAIN_TITLES = {
    "total": "Total loss",
    "lr": "Learning rate",
    "lambda": "Annealing λ",
    "m": "Margin m",
    "m1": "Margin m1",
    "m2": "Margin m2",
    "m3": "Margin m3",
}
"""What a step records; the titles of metrics are declared by their evaluations."""


@dataclass(frozen=True)
class Curve:
    """A figure of one metric over the steps; ``log`` says whether a logarithmic axis makes sense."""

    title: str
    figure: Figure
    log: bool


def text(value: object) -> str:
    """A string from a file, so that Plotly shows it as it is: it would take tags for markup."""
    plain = str(value)
    return html.escape(plain if len(plain) <= 28 else f"{plain[:27]}…")


def numbers(values: Iterable[float], digits: int = 4) -> list[float | None]:
    """Numbers with few significant digits, which keeps the page small; JSON has no NaN, so that becomes ``None``."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in map(float, values)]


def sphere(features: Features) -> tuple[Figure, str]:
    """Test features by class on the circle or sphere, and a caption that says what is drawn."""
    shown_classes = np.unique(features.labels)[:MAX_CLASSES]
    candidates = np.flatnonzero(np.isin(features.labels, shown_classes))
    chosen = candidates[drawing.balanced_subset(features.labels[candidates], MAX_POINTS)]
    own_angles, _ = drawing.centre_angles(features.vectors, features.labels)
    norms = np.linalg.norm(features.vectors, axis=1)
    points, weights, caption = _drawn_positions(features)
    flat = points.shape[1] == 2
    kind = {"type": "scatter"} if flat else {"type": "scatter3d"}
    traces = [_circle(norms[chosen].max())] if flat else _globe()
    for label in map(int, shown_classes):
        members = chosen[features.labels[chosen] == label]
        style = {"color": colour(label), "symbol": SYMBOLS[label // len(PALETTE) % len(SYMBOLS)]}
        shared = kind | {"name": text(features.name(label)), "legendgroup": str(label)}
        traces.append(
            shared
            | coordinates(points[members])
            | {
                "mode": "markers",
                "marker": style | {"size": 5 if flat else 3.2},
                "customdata": [[int(i), *numbers((norms[i], own_angles[i]), 3)] for i in members],
                "hovertemplate": "<b>%{fullData.name}</b><br>feature %{customdata[0]}<br>norm %{customdata[1]}"
                "<br>%{customdata[2]}° to its class centre<extra></extra>",
            }
        )
        if weights is not None and label < len(weights):
            tip = weights[label] * (norms[chosen].max() if flat else 1.12)  # outside the cloud, so that it is seen
            traces.append(
                shared
                | coordinates(np.stack([np.zeros_like(tip), tip]))
                | {
                    "mode": "lines+markers",
                    "showlegend": False,
                    "line": {"color": colour(label), "width": 2 if flat else 4},
                    "marker": {"color": colour(label), "symbol": "diamond", "size": [0, 11 if flat else 7]},
                    "hovertemplate": "<b>%{fullData.name}</b><br>classifier weight<extra></extra>",
                }
            )
    total = len(np.unique(features.labels))
    if total > MAX_CLASSES:
        caption += f" The first {MAX_CLASSES} of {total} classes are shown."
    if len(chosen) < len(candidates):
        caption += f" {len(chosen)} of {len(candidates)} features are drawn."
    return {"data": traces, "layout": _flat_layout() if flat else _scene_layout()}, caption


def curves(runs: Sequence[Run], names: Sequence[str]) -> list[Curve]:
    """One figure a metric with all runs in it: losses first, then test metrics, learning rate and gradient norms.

    Args:
        runs: The runs.
        names: What to call them, in the same order.
    """
    train = [[row for row in run.metrics if row.get("split") == "train"] for run in runs]
    test = [[row for row in run.metrics if row.get("split") == "test"] for run in runs]
    train_keys = _keys(train)
    terms = [key for key in train_keys if key not in NOT_TERMS and not key.startswith((*NORMS, WEIGHT))]
    losses = ["total"] if "total" in train_keys else []
    if len(terms) > 1 or not losses:  # a single term is the total
        losses += terms
    others = [key for key in train_keys if key in SCHEDULED or key.startswith((*NORMS, WEIGHT))]
    # What was measured once, at the end, is no curve; the loss of a run that has only begun still is one.
    several = [[row for row in rows if len(rows) > 1] for rows in test]
    tests = [key for key in _keys(several) if key not in ("step", "split")]
    return (
        [_curve(key, TRAIN_TITLES.get(key, f"Loss term: {key}"), train, names, log=True) for key in losses]
        + [_metric_curve(key, test, names) for key in tests]
        + [
            _curve(
                key,
                TRAIN_TITLES.get(key, key)
                .replace("grad_norm/", "Gradient norm: ")
                .replace("weight_norm/", "Weight norm: ")
                .replace(WEIGHT, "Weight of "),
                train,
                names,
                log=True,
            )
            for key in others
        ]
    )


def centre_histogram(features: Features) -> tuple[Figure, str]:
    """Angles of test features to their own and to the nearest other class centre."""
    own, other = drawing.centre_angles(features.vectors, features.labels)
    return _histogram({"own centre": own, "nearest other centre": other})


def pair_histogram(features: Features) -> tuple[Figure, str]:
    """Angles of genuine and impostor pairs of unseen classes."""
    genuine, impostor = drawing.pair_angles(features.vectors, features.labels, MAX_PAIR_FEATURES)
    return _histogram({"genuine pairs": genuine, "impostor pairs": impostor})


def share_ranges(figures: Sequence[Figure]) -> None:
    """Give histograms the same axes, so that runs can be compared by eye."""
    heights = [height for figure in figures for trace in figure["data"] for height in trace["y"]]
    last = max((i for f in figures for t in f["data"] for i, height in enumerate(t["y"]) if height), default=0)
    for figure in figures:
        figure["layout"]["xaxis"]["range"] = [0, (last + 2) * BIN_DEGREES]
        figure["layout"]["yaxis"]["range"] = [0, round(1.05 * max(heights, default=1), 2)]


def layer_histograms(layers: Mapping[str, Floats]) -> tuple[Figure, str]:
    """How what decoupled layers learned, a number a kernel, is distributed: a column of shades for each layer.

    Args:
        layers: Name of the layer -> values, in the order of the network.
    """
    values = np.concatenate(list(layers.values()))
    low, high = values.min(), values.max()
    margin = 0.02 * (high - low) or 0.05 * max(abs(high), 1e-6)  # values that are all equal lie in a bin of their own
    edges = np.linspace(low - margin, high + margin, LAYER_BINS + 1)
    shares = [100 * np.histogram(each, bins=edges)[0] / len(each) for each in layers.values()]
    names, places = [text(name) for name in layers], list(range(1, len(layers) + 1))
    template = "<b>layer %{x}</b>: %{customdata}<br>"
    traces = [
        {"type": "heatmap", "x": places, "y": numbers((edges[:-1] + edges[1:]) / 2)}
        | {"z": [numbers(row, 3) for row in np.stack(shares, axis=1)], "customdata": [names] * LAYER_BINS}
        | {"showscale": False, "hovertemplate": f"{template}%{{z}} % of its kernels near %{{y}}<extra></extra>"},
        {"type": "scatter", "mode": "lines+markers", "name": "mean", "x": places, "customdata": names}
        | {"y": numbers(each.mean() for each in layers.values())}
        | {"line": {"color": colour(1), "width": 2}, "marker": {"color": colour(1), "size": 6}}
        | {"showlegend": False, "hovertemplate": f"{template}mean %{{y}}<extra></extra>"},
    ]
    layout = plotly_layout(
        xaxis={"title": {"text": "layer"}, "automargin": True, "showgrid": False, "zeroline": False}
        | {"tick0": 1, "dtick": -(-len(layers) // 12)},
        yaxis={"automargin": True, "nticks": 6, "showgrid": False, "zeroline": False},
        hovermode="closest",
    )
    return {"data": traces, "layout": layout}, f"From {low:.3g} to {high:.3g}; the line is the mean of each layer."


def layer_energies(energies: Energies) -> tuple[Figure, str]:
    """Excess energy of every layer over the steps, in percent of that of random directions."""
    shares = 100 * energies.excess / energies.level
    count = len(energies.layers)
    traces = [
        {"type": "scatter", "mode": "lines" if len(energies.steps) > 1 else "markers", "name": text(name)}
        | {
            "x": energies.steps.tolist(),
            "y": numbers(shares[:, index]),
            "customdata": numbers(energies.values[:, index], 6),
        }
        | {"line": {"color": shade(index, count), "width": 2}, "marker": {"color": shade(index, count)}}
        | {"showlegend": False}
        | {"hovertemplate": f"%{{y:.3~g}} % (energy %{{customdata}}, least {energies.floor[index]:.5g})"}
        for index, name in enumerate(energies.layers)
    ]
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 100, "y1": 100}
    layout = plotly_layout(
        xaxis={"title": {"text": "step"}, "automargin": True, "nticks": 6},
        yaxis={"automargin": True, "nticks": 6, "ticksuffix": " %", "rangemode": "tozero"},
        hovermode="closest",
        shapes=[line | {"line": {"color": "rgba(136,136,136,.9)", "width": 1.5, "dash": "dash"}}],
    )
    ends = f"from {energies.layers[0]} (blue) to {energies.layers[-1]} (orange)" if count > 1 else energies.layers[0]
    started = [name for name, value in zip(energies.layers, energies.random, strict=True) if not math.isfinite(value)]
    rest = f" These have no mean energy in {', '.join(started)}: there 100 % is the start." if started else ""
    return {
        "data": traces,
        "layout": layout,
    }, f"{count} layers, {ends}; {energies.kind}. Dashed: random directions.{rest}"


def energy_sums(runs: Sequence[Run], names: Sequence[str]) -> Figure:
    """Excess energy summed over the layers of each run, by step."""
    traces = [
        {"type": "scatter", "mode": "lines" if len(run.energies.steps) > 1 else "markers", "name": text(name)}
        | {"x": run.energies.steps.tolist(), "y": numbers(run.energies.excess.sum(axis=1), 5)}
        | {"line": {"color": colour(index), "width": 2}, "marker": {"color": colour(index)}}
        | {"showlegend": len(runs) > 1, "hovertemplate": "%{y:.4~g}"}
        for index, (name, run) in enumerate(zip(names, runs, strict=True))
        if run.energies is not None
    ]
    layout = plotly_layout(
        xaxis={"title": {"text": "step"}, "automargin": True, "nticks": 6},
        yaxis={"automargin": True, "nticks": 6, "rangemode": "tozero"},
        hovermode="x unified",
        legend=plotly_legend(y=1.02, yanchor="bottom"),
    )
    return {"data": traces, "layout": layout}


def shade(index: int, count: int) -> str:
    """Colour of a layer by its depth: from blue over violet to orange, in equal steps."""
    share = index / max(1, count - 1)
    low, middle, high = ((63, 144, 218), (131, 45, 182), (231, 99, 0))
    first, last, part = (low, middle, 2 * share) if share < 0.5 else (middle, high, 2 * share - 1)
    mixed = (round(a + (b - a) * part) for a, b in zip(first, last, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def filter_grid(filters: Floats) -> tuple[Figure, str]:
    """First-layer filters side by side, each scaled so that 0 is grey and its largest weight black or white.

    Args:
        filters: ``(n, channels, height, width)`` with 1 or 3 channels.
    """
    shown = filters[:MAX_FILTERS]
    count, _, height, width = shown.shape
    scale = np.abs(shown).max(axis=(1, 2, 3), keepdims=True)
    pixels = np.round(127.5 + 127.5 * shown / np.where(scale > 0, scale, 1)).transpose(0, 2, 3, 1)
    pixels = np.concatenate([np.broadcast_to(pixels, (*pixels.shape[:3], 3)), np.ones((*pixels.shape[:3], 1))], axis=3)
    # Weights are drawn as squares with a frame around each filter, which black and white would not show by themselves.
    zoom = max(1, GRID_PIXELS // (math.ceil(math.sqrt(count)) * (max(height, width) + 1)))
    tiles = pixels.repeat(zoom, axis=1).repeat(zoom, axis=2)
    frame = np.full((count, zoom * height + 2, zoom * width + 2, 4), FRAME, dtype=int)
    frame[:, 1:-1, 1:-1] = tiles
    columns = math.ceil(math.sqrt(1.6 * count * height / width))
    tall, wide = (side + 1 for side in frame.shape[1:3])
    image = np.zeros((-(-count // columns) * tall, columns * wide, 4), dtype=int)  # transparent between the filters
    for index, tile in enumerate(frame):
        row, column = divmod(index, columns)
        image[row * tall :, column * wide :][: tall - 1, : wide - 1] = tile
    image = image[:-1, :-1]
    trace = {"type": "image", "colormodel": "rgba", "z": image.tolist(), "hoverinfo": "skip"}
    hidden = {"visible": False, "automargin": False}
    layout = plotly_layout(xaxis=hidden, yaxis=hidden | {"scaleanchor": "x", "autorange": "reversed"})
    which = f"The first {MAX_FILTERS} of {len(filters)}" if len(filters) > MAX_FILTERS else f"All {count}"
    return {"data": [trace], "layout": layout}, f"{which} filters, {height}x{width}; grey is 0, each on its own scale."


def _drawn_positions(features: Features) -> tuple[Floats, Floats | None, str]:
    """Where features and classifier weights are drawn, and what the caption says about it."""
    units = drawing.unit(features.vectors)
    weights = None if features.weights is None else drawing.unit(features.weights)
    dimension = units.shape[1]
    if dimension == 2:
        return features.vectors, weights, "The 2-D features as they are, with their lengths."
    if dimension == 3:
        return units, weights, "The 3-D features, scaled to unit length. Drag to turn."
    axes, kept = drawing.principal_axes(units, 3)
    caption = (
        f"The {dimension}-D unit features on their first 3 principal axes, which keep {kept:.0%} of the variance, "
        "scaled back to unit length: what looks mixed here may be apart in the other dimensions. Drag to turn."
    )
    return drawing.unit(units @ axes), None if weights is None else drawing.unit(weights @ axes), caption


def coordinates(points: Floats) -> dict[str, list[float | None]]:
    """Points ``(N, 2)`` or ``(N, 3)`` by axis, as a trace takes them.

    Example:
        >>> coordinates(np.array([[0.0, 1.0], [2.0, 3.0]]))
        {'x': [0.0, 2.0], 'y': [1.0, 3.0]}
    """
    return {axis: numbers(values) for axis, values in zip("xyz", points.T, strict=False)}


def _circle(radius: float) -> Figure:
    angles = np.linspace(0, 2 * np.pi, 121)
    return (
        {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": False}
        | {"line": {"color": "rgba(136,136,136,.5)", "width": 1}}
        | coordinates(radius * np.stack([np.cos(angles), np.sin(angles)], axis=1))
    )


def _globe() -> list[Figure]:
    """A translucent ball with meridians and parallels, a little inside the features; the theme colours it."""
    longitude, latitude = np.meshgrid(np.linspace(0, 2 * np.pi, 49), np.linspace(-np.pi / 2, np.pi / 2, 25))
    grid = 0.99 * np.stack(
        [np.cos(latitude) * np.cos(longitude), np.cos(latitude) * np.sin(longitude), np.sin(latitude)]
    )
    gap = np.full((3, 1), np.nan)
    parallels = [np.hstack([grid[:, row], gap]) for row in range(4, 24, 4)]
    meridians = [np.hstack([grid[:, :, column], gap]) for column in range(0, 48, 4)]
    decoration = {"hoverinfo": "skip", "showlegend": False}
    ball = {axis: [numbers(row, 3) for row in values] for axis, values in zip("xyz", 0.99 * grid, strict=True)}
    return [
        {"type": "surface", "showscale": False, "opacity": 0.35}
        | {"lighting": {"ambient": 1, "diffuse": 0, "specular": 0, "fresnel": 0}}
        | decoration
        | ball,
        {"type": "scatter3d", "mode": "lines", "line": {"width": 1}}
        | decoration
        | coordinates(np.hstack(parallels + meridians).T),
    ]


def plotly_layout(**parts: Any) -> Figure:
    """What all figures of the page have in their layout, and ``parts`` of Plotly's layout besides.

    Example:
        >>> plotly_layout(hovermode="closest")["hovermode"]
        'closest'
    """
    return {"margin": {"l": 0, "r": 0, "t": 0, "b": 0}, "font": {"size": 12}} | parts


def plotly_legend(**parts: Any) -> Figure:
    """A legend in one line in the middle, and ``parts`` of Plotly's legend besides; give ``y`` and ``yanchor``.

    Example:
        >>> plotly_legend(y=0, yanchor="top")["orientation"]
        'h'
    """
    return {"orientation": "h", "x": 0.5, "xanchor": "center", "itemsizing": "constant"} | parts


def _scene_layout() -> Figure:
    axis = {"visible": False, "range": [-1.13, 1.13], "showspikes": False}
    scene = {"xaxis": axis, "yaxis": axis, "zaxis": axis, "aspectmode": "cube", "dragmode": "orbit"}
    camera = {"eye": {"x": 0.91, "y": 0.91, "z": 0.6}}
    return plotly_layout(scene=scene | {"camera": camera}, legend=plotly_legend(y=0, yanchor="top", maxheight=0.25))


def _flat_layout() -> Figure:
    axis = {"zeroline": True, "showgrid": False, "automargin": True}
    return plotly_layout(
        xaxis=axis,
        yaxis=axis | {"scaleanchor": "x"},
        legend=plotly_legend(y=-0.08, yanchor="top", maxheight=0.25),
        hovermode="closest",
    )


def _histogram(groups: dict[str, Floats]) -> tuple[Figure, str]:
    edges = np.arange(0, 180 + BIN_DEGREES, BIN_DEGREES)
    traces = []
    for index, (name, angles) in enumerate(groups.items()):
        shares = 100 * np.histogram(angles, bins=edges)[0] / max(1, len(angles))
        traces.append(
            {"type": "bar", "name": name, "x0": BIN_DEGREES / 2, "dx": BIN_DEGREES, "y": numbers(shares)}
            | {"marker": {"color": colour(index)}, "opacity": 0.7}
            | {"hovertemplate": f"%{{y:.2f}} % within {BIN_DEGREES / 2:g}° of %{{x}}°<extra>%{{fullData.name}}</extra>"}
        )
    means = [f"{name} {angles.mean():.1f}°" for name, angles in groups.items() if len(angles)]
    layout = plotly_layout(
        barmode="overlay",
        bargap=0,
        xaxis={"ticksuffix": "°", "automargin": True},
        yaxis={"ticksuffix": " %", "automargin": True, "nticks": 5},
        legend=plotly_legend(y=1.02, yanchor="bottom"),
    )
    return {"data": traces, "layout": layout}, f"Mean: {', '.join(means)}."


def _keys(rows_of_runs: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    """Names of the numeric columns in the order in which they first appear."""
    cells = (cell for rows in rows_of_runs for row in rows for cell in row.items())
    return list(dict.fromkeys(key for key, value in cells if isinstance(value, int | float)))


def _metric_curve(key: str, rows_of_runs: Sequence[Sequence[dict[str, Any]]], names: Sequence[str]) -> Curve:
    metric = evaluations.metric(key)
    return _curve(key, metric.curve, rows_of_runs, names, log=False, scale=metric.scale)


def _curve(
    key: str,
    title: str,
    rows_of_runs: Sequence[Sequence[dict[str, Any]]],
    names: Sequence[str],
    *,
    log: bool,
    scale: int = 1,
) -> Curve:
    traces = []
    for index, (name, all_rows) in enumerate(zip(names, rows_of_runs, strict=True)):
        rows = [row for row in all_rows if isinstance(row.get(key), int | float)]
        rows = [rows[i] for i in drawing.evenly(len(rows), MAX_CURVE_POINTS)]
        traces.append(
            {"type": "scatter", "mode": "lines" if len(rows) > 1 else "markers", "name": text(name)}
            | {"x": [row["step"] for row in rows], "y": numbers((scale * row[key] for row in rows), 5)}
            | {"line": {"color": colour(index), "width": 2}, "marker": {"color": colour(index)}}
            | {"showlegend": False, "hovertemplate": "%{y:.4~g}"}
        )
    layout = plotly_layout(
        xaxis={"title": {"text": "step"}, "automargin": True, "nticks": 6},
        yaxis={"automargin": True, "nticks": 6},
        hovermode="x unified",
    )
    return Curve(title, {"data": traces, "layout": layout}, log)
