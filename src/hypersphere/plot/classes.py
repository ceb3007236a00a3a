"""Pictures of classes: which are taken for which, and what the head has learned of large and small ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from hypersphere import diagnostics
from hypersphere.drawing import Floats, colour
from hypersphere.errors import check_choice
from hypersphere.metrics import confusion_matrix
from hypersphere.plot.evaluated import Evaluated, evaluated
from hypersphere.plot.style import FAINT, INK, MARKERS, new_figure, plain, styled
from hypersphere.runs import RunError

MEASURES = ("shares", "cosines")
NAMED = 20
"""Most classes whose names stand at the axes, or beside their points."""
WRITTEN = 10
"""Most classes whose cells hold their number."""
SHARES = LinearSegmentedColormap.from_list("shares", ["#ffffff", "#bcd9f3", "#3f90da", "#123a66"])
COSINES = "PuOr_r"


# ---------------------------------------------------------------------------------------------- confusion


@styled
def confusion(runs: Sequence[Path], *, hide_diagonal: bool = False, measure: str = "shares") -> Figure:
    r"""Confusion matrices of the test split of runs side by side, all in one scale.

    .. math:: P_{ij} = \#\{n : y_n = i, \hat y_n = j\} \,/\, \#\{n : y_n = i\}

    Rows are true classes. A class without test samples has an empty row.

    Args:
        runs: Folders of evaluated training runs, in this order.
        hide_diagonal: Leave the own classes out, so that the scale is that of the mistakes.
        measure: ``"shares"``, or ``"cosines"`` for the mean cosine between features of two classes, what the
            literature on margins also calls a confusion matrix.
    """
    check_choice("measure", measure, MEASURES)
    found = evaluated(runs)
    matrices = [_shares(one) if measure == "shares" else _cosines(one) for one in found]
    shown = [_hidden(matrix) if hide_diagonal else matrix for matrix in matrices]
    scale, colours, label = _common_colours(shown, measure)
    figure = new_figure(3.9 * len(found) + 0.8, 4.2)
    figure.set_layout_engine("compressed")  # squares side by side, and the scale as high as they are
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    image: Any = None
    for axes, one, matrix, cells in zip(panels, found, matrices, shown, strict=True):
        image = axes.imshow(cells, cmap=colours, norm=scale, interpolation="nearest")
        axes.set_facecolor(FAINT)  # where there is no number
        _label_classes(axes, [one.test.name(index) for index in range(len(cells))])
        if len(cells) <= WRITTEN:
            _write(axes, cells, scale, measure)
        axes.set_title(f"{one.title}\n{_summary(one, matrix, measure)}", loc="center", fontsize=9)
    panels[0].set_ylabel("true class" if measure == "shares" else "class")
    bar: Any = figure.colorbar(image, ax=list(panels), pad=0.02, aspect=28)
    bar.set_label(label, fontsize=8)
    bar.outline.set_visible(False)
    for axes in panels:
        axes.set_xlabel("taken for" if measure == "shares" else "class")
    return figure


def _shares(one: Evaluated) -> Floats:
    """Percentages ``(C, C)``, each row of a sum of 100."""
    test = one.test
    predictions = one.needs(test.predictions, "predictions of the test split")
    classes = max(len(test.names), int(test.labels.max()) + 1, int(predictions.max()) + 1)
    counts = confusion_matrix(torch.from_numpy(predictions), torch.from_numpy(test.labels), classes).numpy()
    sizes = counts.sum(axis=1, keepdims=True)
    return np.where(sizes > 0, 100.0 * counts / np.maximum(sizes, 1), np.nan)


def _cosines(one: Evaluated) -> Floats:
    """Mean cosines ``(C, C)``, of a class with itself over its pairs."""
    classes = max(len(one.test.names), int(one.test.labels.max()) + 1)
    vectors, labels = torch.from_numpy(one.test.vectors), torch.from_numpy(one.test.labels)
    return diagnostics.class_cosine_matrix(vectors, labels, classes).double().numpy()


def _hidden(matrix: Floats) -> Floats:
    hidden = matrix.copy()
    np.fill_diagonal(hidden, np.nan)
    return hidden


def _common_colours(shown: Sequence[Floats], measure: str) -> tuple[Normalize, str | Colormap, str]:
    """Common colours of all matrices, and what they mean."""
    if measure == "cosines":
        return Normalize(-1, 1), COSINES, "mean cosine"
    every = np.concatenate([cells[np.isfinite(cells)] for cells in shown])
    high = float(every.max()) if len(every) else 0.0
    return Normalize(0, high or 1.0), SHARES, "share of the class (%)"  # where nothing is wrong all is white


def _summary(one: Evaluated, matrix: Floats, measure: str) -> str:
    """What is known of a matrix as a whole, in words."""
    if measure == "shares":
        wrong = 100 * float(np.not_equal(one.needs(one.test.predictions, "predictions"), one.test.labels).mean())
        return f"error {wrong:.2f} % of {len(one.test.labels):,}"
    own = float(np.nanmean(np.diag(matrix)))
    other = matrix[~np.eye(len(matrix), dtype=bool)]
    return f"own class {_signed(own)}, others {_signed(float(np.nanmean(other)))}" if len(other) else ""


def _signed(value: float) -> str:
    """Two decimals with a true minus sign, and none before zero."""
    return f"{round(value, 2) + 0.0:.2f}".replace("-", "\N{MINUS SIGN}")


def _label_classes(axes: Axes, names: Sequence[str]) -> None:
    axes.grid(False)
    axes.spines[["top", "right"]].set_visible(True)
    if len(names) <= NAMED:
        texts = [plain(name, 14) for name in names]
        axes.set_xticks(range(len(texts)), texts, rotation=90 if max(map(len, texts)) > 2 else 0)
        axes.set_yticks(range(len(texts)), texts)
        axes.tick_params(length=0)


def _write(axes: Axes, cells: Floats, scale: Normalize, measure: str) -> None:
    """Numbers in the cells; shares that round to zero are left out."""
    for i, j in np.ndindex(*cells.shape):
        value = float(cells[i, j])
        if not math.isfinite(value) or (measure == "shares" and value < 0.05):
            continue
        dark = abs(value) > 0.52 if measure == "cosines" else float(scale(value)) > 0.55
        text = _signed(value) if measure == "cosines" else f"{value:.1f}" if value < 99.95 else "100"
        axes.text(j, i, text, ha="center", va="center", fontsize=6, color="white" if dark else INK)


# ---------------------------------------------------------------------------------------------- class sizes


@styled
def class_size(runs: Sequence[Path]) -> Figure:
    r"""Norm :math:`\|W_j\|` and bias :math:`b_j` of each class vector against the number of training images.

    Each point is a class; r is Pearson's correlation (:func:`hypersphere.diagnostics.norm_count_correlation`).
    Heads that take vectors as directions do not use their norms; where no run has a bias there is no panel for it.

    Args:
        runs: Folders of evaluated runs whose classes are of different sizes, as with ``data.imbalance``.
    """
    found = evaluated(runs, limit=40)
    sizes = [_sizes(one) for one in found]
    norms = [np.linalg.norm(one.needs(one.test.weights, "class vectors"), axis=1) for one in found]
    panels = [("Norm of the class vector", r"$\|W_j\|$", norms)]
    if any(one.run.bias is not None for one in found):
        panels.append(("Bias of the class", r"$b_j$", [one.run.bias for one in found]))
    width = 4.6 * max(len(panels), 1)
    figure = new_figure(width + (0.6 if len(panels) == 1 else 0), 3.6)
    for place, (axes, (title, unit, values)) in enumerate(
        zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True)
    ):
        for index, (one, size, value) in enumerate(zip(found, sizes, values, strict=True)):
            if value is not None:
                _scatter(axes, one, size, value, index, named=len(found) == 1)
        if max(map(max, sizes)) > 10 * min(int(size[size > 0].min()) for size in sizes if (size > 0).any()):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_title(f"({'ab'[place]}) {title}")
        axes.set_xlabel("training images of the class")
        axes.set_ylabel(unit)
        axes.margins(x=0.08, y=0.12)
        axes.legend(loc="best", frameon=True, framealpha=0.85, edgecolor="none", handletextpad=0.3)
    return figure


def _sizes(one: Evaluated) -> Any:
    """Numbers of training images ``(C,)``, which differ."""
    counts = one.needs(one.run.class_counts, "numbers of training images")
    if len(np.unique(counts)) < 2:
        raise RunError(
            f"{one.folder} has {int(counts[0]):,} training images of every class: give a run with data.imbalance, e.g. "
            "data.imbalance.graded=5"
        )
    return counts


def _scatter(axes: Axes, one: Evaluated, sizes: Any, values: Floats, index: int, *, named: bool) -> None:
    if len(sizes) != len(values):
        raise RunError(f"{one.folder} has {len(values)} class vectors of {len(sizes)} classes")
    label = f"{one.title}: r = {_correlation(values, sizes)}"
    marker = MARKERS[index % len(MARKERS)]
    axes.scatter(sizes, values, s=22, marker=marker, color=colour(index), alpha=0.8, linewidths=0, label=label)
    if named and len(sizes) <= NAMED:
        for label_index, (x, y) in enumerate(zip(sizes, values, strict=True)):
            axes.annotate(
                plain(one.test.name(label_index), 12), (x, y), (3, 3), textcoords="offset points", fontsize=6.5
            )


def _correlation(values: Floats, sizes: Any) -> str:
    """Pearson's correlation as text: that of the diagnostics, for which shifted numbers are norms."""
    shifted = torch.from_numpy(values - values.min()).unsqueeze(1)
    found = float(diagnostics.norm_count_correlation(shifted, torch.from_numpy(sizes)))
    return "undefined" if math.isnan(found) else _signed(found)
