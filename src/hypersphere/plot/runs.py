"""Pictures of trained models: features on the circle or sphere, angles of pairs, hardness."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, FancyArrowPatch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import NullLocator
from torch import Tensor

from hypersphere import diagnostics, drawing
from hypersphere.drawing import MAX_CLASSES, MAX_POINTS, PALETTE, Floats, colour
from hypersphere.errors import ArgumentError
from hypersphere.evaluate import Outputs
from hypersphere.geometry import norm
from hypersphere.plot.sphere import draw_ball
from hypersphere.plot.style import FAINT, INK, MARKERS, MUTED, angle_axis, new_figure, plain, styled
from hypersphere.runs import RunError
from hypersphere.runs.read import Features, Run, load_run

BIN_DEGREES = 3
NOTE_WIDTH = 48
VIEWS = 400
"""Directions from which the sphere is looked at before the clearest is taken."""
LIGHT, DARK = PALETTE[0], PALETTE[1]
MAX_TICKS = 20
PLATE = {"fc": "white", "ec": "none", "alpha": 0.75, "pad": 1.0}
BINS = 24


# ------------------------------------------------------------------------------------------------ features


@dataclass(frozen=True)
class _View:
    """What is drawn of a run: positions on paper, and which of them lie behind the sphere."""

    points: Floats
    behind: Any
    arrows: Floats | None
    arrows_behind: Any
    axes: Floats | None  # of the sphere: rows are right, up and towards the reader
    note: str


@styled
def features(runs: Sequence[Path]) -> Figure:
    """Test features of runs by class, with the class vectors, and below them the angles of pairs of features.

    Two-dimensional features are drawn as they are, over their mean norm; of three-dimensional ones the directions, on
    the sphere as seen from where the class means are farthest apart. More dimensions are projected to their first
    three principal directions.

    Args:
        runs: Folders of evaluated training runs, side by side in this order.
    """
    if not runs:
        raise ArgumentError("runs", "must be at least one folder of a run, got none")
    found = [(load_run(Path(folder)), Path(folder)) for folder in runs]
    tests = [_test_features(run, folder) for run, folder in found]
    width = max(6.5, 3.6 * len(runs))
    figure = new_figure(width, 5.9)
    upper, lower = figure.subplots(2, len(runs), squeeze=False, height_ratios=[1.75, 1])
    shown: dict[str, Line2D] = {}
    notes = []
    for column, test in enumerate(tests):
        notes.append(textwrap.wrap(_draw_features(upper[column], test, shown), NOTE_WIDTH))
        _draw_pairs(lower[column], test)
    most = max(map(len, notes))
    for axes, (run, _), note in zip(upper, found, notes, strict=True):
        axes.set_title(plain(run.facts.get("name", run.folder)) + most * "\n", loc="center")
        axes.text(0.5, 1.01, "\n".join(note), transform=axes.transAxes, ha="center", fontsize=7.5, color=MUTED)
    tops = [axes.get_ylim()[1] for axes in lower]
    for axes in lower:
        axes.set_ylim(0, max(tops))
    lower[0].set_ylabel(f"share of pairs (%)\nper {BIN_DEGREES}°")
    arrow = Line2D([], [], color=INK, lw=1.6, marker=">", markersize=5, label="class vector")
    handles = [*(shown[name] for name in shown), *([arrow] if any(t.weights is not None for t in tests) else [])]
    columns = int((width - 0.6) / (0.42 + 0.075 * max(map(len, shown))))  # an entry's inches by its letters
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=max(1, min(len(handles), columns)),
        title="Class",
        columnspacing=1.2,
        handletextpad=0.4,
    )
    return figure


def _test_features(run: Run, folder: Path) -> Features:
    if run.test is None:
        raise RunError(f"{folder} has no test features: `hypersphere evaluate {folder}` makes them")
    if run.test.vectors.shape[1] < 2:
        raise RunError(f"{folder} has features of 1 dimension; directions need at least 2")
    return run.test


def _draw_features(axes: Axes, test: Features, shown: dict[str, Line2D]) -> str:
    """Draw one run; returns what the reader should know, and notes legend entries in ``shown``."""
    classes = np.unique(test.labels)
    drawn = classes[:MAX_CLASSES]
    candidates = np.flatnonzero(np.isin(test.labels, drawn))
    chosen = candidates[drawing.balanced_subset(test.labels[candidates], MAX_POINTS)]
    view = _flat_view(test) if test.vectors.shape[1] == 2 else _sphere_view(test)
    _draw_ground(axes, view)
    # Sub-centre heads store several vectors a class, one class after the other.
    per_class = 1 if view.arrows is None else max(1, len(view.arrows) // max(1, len(test.names) or len(classes)))
    for label in map(int, drawn):
        look: dict[str, Any] = {"marker": MARKERS[label // len(PALETTE) % len(MARKERS)], "color": colour(label)}
        own = chosen[test.labels[chosen] == label]
        for back in (True, False):
            some = own[view.behind[own] == back]
            size, alpha, order = (5, 0.28, 2) if back else (9, 0.85, 4)
            axes.scatter(
                view.points[some, 0], view.points[some, 1], s=size, alpha=alpha, zorder=order, linewidths=0, **look
            )
        name = plain(test.name(label))
        shown.setdefault(name, Line2D([], [], ls="", markersize=5, label=name, **look))
        if view.arrows is not None:
            for row in range(label * per_class, min((label + 1) * per_class, len(view.arrows))):
                _arrow(axes, view.arrows[row], colour(label), behind=bool(view.arrows_behind[row]))
    left_out = f"; {len(drawn)} of {len(classes)} classes" if len(drawn) < len(classes) else ""
    return view.note + left_out


def _flat_view(test: Features) -> _View:
    length = float(np.linalg.norm(test.vectors, axis=1).mean()) or 1.0
    arrows = None if test.weights is None else drawing.unit(test.weights)
    front = np.zeros(len(test.vectors), dtype=bool)
    note = rf"features / mean norm {length:.3g}, unit circle"
    return _View(test.vectors / length, front, arrows, np.zeros(0 if arrows is None else len(arrows), bool), None, note)


def _sphere_view(test: Features) -> _View:
    units = drawing.unit(test.vectors)
    weights = None if test.weights is None else drawing.unit(test.weights)
    dimension = units.shape[1]
    note = "directions of the 3-D features; paler: behind"
    if dimension > 3:
        axes, kept = drawing.principal_axes(units, 3)
        units = drawing.unit(units @ axes)
        weights = None if weights is None else drawing.unit(weights @ axes)
        note = f"{dimension}-D directions on 3 principal axes ({kept:.0%} of variance); paler: behind"
    frame = _clearest_view(units, test.labels)
    turned = units @ frame.T
    arrows = None if weights is None else weights @ frame.T
    return _View(
        points=turned[:, :2],
        behind=turned[:, 2] < 0,
        arrows=None if arrows is None else arrows[:, :2],
        arrows_behind=np.zeros(0, bool) if arrows is None else arrows[:, 2] < 0,
        axes=frame,
        note=note,
    )


def _clearest_view(units: Floats, labels: Any) -> Floats:
    """The rotation (rows: right, up, towards the reader) in which the class means are farthest apart on paper."""
    means = drawing.unit(np.stack([units[labels == label].mean(axis=0) for label in np.unique(labels)]))
    best, frame = -math.inf, np.eye(3)
    for index in range(VIEWS):
        # Points of a Fibonacci lattice are spread evenly over the sphere.
        height = 1 - (2 * index + 1) / VIEWS
        turn = index * math.pi * (3 - math.sqrt(5))
        side = math.sqrt(1 - height**2)
        towards = np.array([side * math.cos(turn), side * math.sin(turn), height])
        right = np.cross([0.0, 0.0, 1.0], towards)
        right /= np.linalg.norm(right)
        seen = np.stack([right, np.cross(towards, right), towards])
        flat = (means @ seen.T)[:, :2]
        gaps = np.linalg.norm(flat[:, None] - flat[None], axis=2) + 9 * np.eye(len(flat))
        from_middle = np.linalg.norm(flat, axis=1)  # an arrow straight away from the reader would be a dot
        score = min(gaps.min(), 1.5 * from_middle.min()) + 0.05 * (means @ towards).mean()  # and more classes in front
        if score > best:
            best, frame = score, seen
    return frame


def _draw_ground(axes: Axes, view: _View) -> None:
    """The unit circle with its axes, or the sphere with meridians and parallels."""
    axes.set_aspect("equal")
    if view.axes is None:
        axes.add_patch(Circle((0, 0), 1, fill=False, ec=MUTED, lw=0.9, zorder=1))
        axes.axhline(0, color=FAINT, lw=0.8, zorder=0)
        axes.axvline(0, color=FAINT, lw=0.8, zorder=0)
        reach = max(1.12, 1.05 * float(np.abs(view.points).max()))
        axes.grid(False)
    else:
        reach = draw_ball(axes, view.axes)
    axes.set_xlim(-reach, reach)
    axes.set_ylim(-reach, reach)
    axes.axis("off")


def _arrow(axes: Axes, tip: Floats, shade: str, *, behind: bool) -> None:
    arrow = FancyArrowPatch(
        (0, 0),
        (float(1.1 * tip[0]), float(1.1 * tip[1])),  # out of the cloud, so that it is seen
        arrowstyle="-|>",
        mutation_scale=9,
        shrinkA=0,
        shrinkB=0,
        color=shade,
        lw=1.5,
        alpha=0.4 if behind else 1.0,
        zorder=3 if behind else 5,
    )
    if not behind:
        arrow.set_path_effects([withStroke(linewidth=3.2, foreground="white")])
    axes.add_patch(arrow)


def _draw_pairs(axes: Axes, test: Features) -> None:
    """Shares of the angles of pairs of one class and of two classes."""
    positive, negative = diagnostics.pair_angles(torch.from_numpy(test.vectors), torch.from_numpy(test.labels))
    edges = np.arange(0, 180 + BIN_DEGREES, BIN_DEGREES)
    for name, angles, shade in (("same class", positive, colour(0)), ("two classes", negative, colour(1))):
        degrees = np.degrees(angles.numpy())
        shares = 100 * np.histogram(degrees, bins=edges)[0] / max(1, len(degrees))
        mean = f", mean {degrees.mean():.1f}°" if len(degrees) else ", none"
        axes.stairs(shares, edges, fill=True, color=shade, alpha=0.45)
        axes.stairs(shares, edges, color=shade, lw=1.3, label=f"{name}{mean}")
    angle_axis(axes, label="angle between two features (degrees)")
    axes.legend(loc="upper right", handlelength=1.2)


# ------------------------------------------------------------------------------------------------ hardness


@styled
def hardness(outputs: Outputs, names: Sequence[str] = (), title: str = "") -> Figure:
    """Angular visual hardness against confidence and feature norm, and the mean cosines between classes.

    Args:
        outputs: What a model puts out on its test split.
        names: Class names by label.
        title: Name of the run, for the heading.
    """
    vectors, labels = outputs.features.detach().cpu(), outputs.labels.cpu()
    classes = outputs.logits.shape[1]
    weight = _class_vectors(outputs.weight.detach().cpu(), vectors, labels, classes)
    hard = diagnostics.angular_visual_hardness(vectors, weight, labels).double().numpy()
    confidence = diagnostics.model_confidence(outputs.logits.detach().cpu(), labels).double().numpy()
    lengths = norm(vectors).double().numpy()
    figure = new_figure(11.0, 3.7)
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.2])
    top = _histogram(left, confidence, hard, "confidence (probability of the true class)", (0.0, 1.0))
    left.set_title(f"(a) Hardness and confidence: r = {_pearson(confidence, hard)}")
    _histogram(middle, lengths, hard, r"feature norm $\|x\|$", None)
    middle.set_title(f"(b) Hardness and norm: r = {_pearson(lengths, hard)}")
    left.set_ylabel("angular visual hardness\n(share of the angle to the own class)")
    for axes in (left, middle):
        axes.set_ylim(0, top)
        if top > 1 / classes:
            axes.axhline(1 / classes, color=MUTED, lw=0.9, ls=(0, (3, 1.6)))
            across = axes.get_yaxis_transform()  # along the axes in x, data in y
            text = f"1/{classes}: as far as the mean class"
            axes.text(0.02, 1 / classes, text, fontsize=7, va="bottom", color=INK, transform=across, bbox=PLATE)
    _heat_map(right, diagnostics.class_cosine_matrix(vectors, labels, classes), names)
    if title:
        text = f"{title}: {len(labels):,} test samples; r is Pearson's correlation"
        figure.suptitle(plain(text, 80), x=0.01, ha="left", fontsize=10)
    return figure


def _class_vectors(weight: Tensor, vectors: Tensor, labels: Tensor, classes: int) -> Tensor:
    """One vector a class, ``(C, D)``: of several centres the one that most of the class's samples are closest to."""
    centres = len(weight) // classes
    if centres == 1:
        return weight
    rows = torch.nn.functional.normalize(weight, dim=1).unflatten(0, (classes, centres))
    closest = torch.einsum("nd,nkd->nk", vectors, rows[labels]).argmax(1)
    votes = torch.zeros(classes, centres).index_put_((labels, closest), torch.ones(len(labels)), accumulate=True)
    return rows[torch.arange(classes), votes.argmax(1)]


def _pearson(x: Floats, y: Floats) -> str:
    """Correlation as text; there is none with a constant."""
    # Norms of unit features differ by rounding alone, and its correlation would pass for a finding.
    if len(x) < 2 or any(values.std() <= 1e-6 * np.abs(values).max() for values in (x, y)):
        return "undefined"
    return _signed(np.corrcoef(x, y)[0, 1])


def _signed(value: float) -> str:
    """Two decimals with a true minus sign, and none before zero."""
    return f"{round(float(value), 2) + 0.0:.2f}".replace("-", "\N{MINUS SIGN}")


def _histogram(axes: Axes, x: Floats, y: Floats, label: str, limits: tuple[float, float] | None) -> float:
    """Numbers of samples over two measurements; returns how high the second goes."""
    top = 1.08 * max(float(y.max()), 1e-6)
    low, high = limits or (float(x.min()), float(x.max()))
    span = high - low or 1.0
    low, high = (low, high) if limits else (low - 0.03 * span, high + 0.03 * span)
    counts, xs, ys = np.histogram2d(x, y, bins=BINS, range=((low, high), (0, top)))
    shown = np.ma.masked_equal(counts.T, 0)  # nothing is drawn where nothing is
    mesh = axes.pcolormesh(xs, ys, shown, cmap="viridis", norm=LogNorm(1, max(2.0, counts.max())))
    bar = axes.figure.colorbar(mesh, ax=axes, pad=0.02, aspect=28)
    steps = [mantissa * 10**power for power in range(9) for mantissa in (1, 2, 5)]
    bar.set_ticks([step for step in steps if step <= max(2.0, counts.max())], minor=False)
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.yaxis.set_major_formatter("{x:,.0f}")
    bar.set_label("samples", fontsize=8)
    bar.outline.set_visible(False)
    axes.set_xlabel(label)
    axes.set_xlim(low, high)
    return top


def _heat_map(axes: Axes, matrix: Tensor, names: Sequence[str]) -> None:
    """Mean cosines of every pair of classes."""
    image = axes.imshow(matrix.numpy(), cmap="PuOr_r", vmin=-1, vmax=1, interpolation="nearest")
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, aspect=28)
    bar.set_label("mean cosine", fontsize=8)
    bar.outline.set_visible(False)
    classes = len(matrix)
    texts = [plain(names[i]) if i < len(names) else str(i) for i in range(classes)]
    if classes <= MAX_TICKS:
        long = max(map(len, texts)) > 3
        axes.set_xticks(range(classes), texts, rotation=90 if long else 0)
        axes.set_yticks(range(classes), texts)
    if classes <= 10:
        for i, j in np.ndindex(classes, classes):
            value = float(matrix[i, j])
            shade = "white" if abs(value) > 0.52 else INK
            axes.text(j, i, _signed(value), ha="center", va="center", fontsize=6.5, color=shade)
    axes.grid(False)
    axes.set_xlabel("class")
    axes.set_ylabel("class")
    axes.set_title("(c) Mean cosine between classes")
