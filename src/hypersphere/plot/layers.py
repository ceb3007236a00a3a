"""Pictures of what decoupled layers learned beside their weights: steepnesses and radii."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from hypersphere.drawing import Floats, colour
from hypersphere.errors import ArgumentError, check_range
from hypersphere.plot.style import INK, new_figure, plain, styled
from hypersphere.registry import did_you_mean
from hypersphere.runs import RunError, load
from hypersphere.runs.artefacts import layer_parts
from hypersphere.runs.evaluation import learned_parameters
from hypersphere.runs.read import load_run

COLUMNS = 4
QUANTITIES = {"k": ("steepness", "k", 0), "radius": ("radius", r"\rho", 1)}
"""What layers learn: name, letter, and place in the palette."""


@styled
def learned(run: Path, *, layers: Sequence[str] = (), bins: int = 30) -> Figure:
    r"""Histograms of the steepness :math:`k` that each layer learned, and of the radius :math:`\rho` where it has one.

    All layers of a quantity have the same bins and the same height. Heights are percentages of the values of the layer:
    one for each of its kernels, or a single one where the kernels share it. The dashed line is the mean.

    Args:
        run: Folder of a training run with decoupled layers. Without an evaluation its last checkpoint is read.
        layers: Names of layers, or patterns such as ``"body.*"``; by default all.
        bins: Number of bins.
    """
    check_range("bins", bins, 1)
    found = {name: _chosen(values, layers) for name, values in _values(Path(run)).items()}
    if not any(found.values()):
        known = list(dict.fromkeys(layer for values in _values(Path(run)).values() for layer in values))
        hint = did_you_mean(layers[0], known)
        raise ArgumentError("layers", f"has {', '.join(map(repr, layers))}, no layer.{hint} Layers: {', '.join(known)}")
    shown = {name: values for name, values in found.items() if values}
    columns = min(COLUMNS, max(map(len, shown.values())))
    rows = [math.ceil(len(values) / columns) for values in shown.values()]
    figure = new_figure(max(4.2, 2.5 * columns), 0.5 + 1.95 * sum(rows))
    parts = figure.subfigures(len(rows), 1, height_ratios=rows, squeeze=False)[:, 0]
    for part, count, (name, values) in zip(parts, rows, shown.items(), strict=True):
        _draw(part, name, values, (count, columns), bins)
    return figure


def _values(run: Path) -> dict[str, dict[str, Floats]]:
    """What the layers learned, by quantity and layer: as the evaluation stored it, or of the last checkpoint."""
    found = load_run(run)
    values = found.layers
    if found.test is None:
        values = {}
        for key, tensor in learned_parameters(load(run).model).items():
            part = layer_parts(key)
            if part is not None:
                values.setdefault(part.quantity, {})[part.layer] = tensor.double().cpu().numpy()
    values = {name: values[name] for name in QUANTITIES if name in values}
    if not values:
        raise RunError(f"{run} has learned no steepness and no radius: train it with convert.learn_k=filter, say")
    return values


def _chosen(values: dict[str, Floats], patterns: Sequence[str]) -> dict[str, Floats]:
    if not patterns:
        return values
    return {layer: each for layer, each in values.items() if any(fnmatch.fnmatchcase(layer, text) for text in patterns)}


def _draw(part: SubFigure, name: str, values: dict[str, Floats], shape: tuple[int, int], bins: int) -> None:
    title, letter, place = QUANTITIES[name]
    every = np.concatenate(list(values.values()))
    low, high = float(every.min()), float(every.max())
    margin = 0.02 * (high - low) or 0.05 * max(abs(high), 1e-6)  # values that are all equal lie in a bin of their own
    edges = np.linspace(low - margin, high + margin, bins + 1)
    panels = part.subplots(*shape, sharex=True, sharey=True, squeeze=False)
    for axes, (layer, each) in zip(panels.flat, values.items(), strict=False):
        shares = 100 * np.histogram(each, bins=edges)[0] / len(each)
        axes.stairs(shares, edges, fill=True, color=colour(place), alpha=0.45)
        axes.stairs(shares, edges, color=colour(place), lw=1.2)
        axes.axvline(each.mean(), color=INK, lw=1.0, ls=(0, (3, 1.6)))
        axes.set_title(f"{plain(layer)} ({len(each)})\nmean {each.mean():.3g}, sd {each.std():.2g}", fontsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(4))
    panels[0, 0].set_ylim(0, None)  # of all: they share it
    for empty in panels.flat[len(values) :]:
        empty.remove()
    for axes in panels.flat[max(0, len(values) - shape[1]) : len(values)]:  # the lowest of each column
        axes.tick_params(labelbottom=True)
    part.suptitle(f"Learned {title} ${letter}$ by layer (values)", x=0.01, ha="left", fontsize=10)
    part.supxlabel(f"${letter}$", fontsize=9)
    part.supylabel("share of the values (%)", fontsize=9)
