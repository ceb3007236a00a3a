"""Pictures of training: energy of layers, test error and orthogonality over the steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hypersphere.drawing import Floats, Ints, colour
from hypersphere.errors import ArgumentError
from hypersphere.plot.style import MUTED, new_figure, plain, styled
from hypersphere.runs import RunError, RunFolder
from hypersphere.runs.read import Energies, Run, load_run

MARKED = 25
"""Most points of a line that are marked."""
COLUMNS = 4
"""Panels of layers in a row."""

Curve = tuple[Ints, Floats]


@styled
def energy_curves(runs: Sequence[Path]) -> Figure:
    """Energy of the layers of runs over the steps, above the least there is.

    On the left the sum over the layers, on the right the mean over them in percent of what random directions have.
    Runs of one name, of several seeds, say, are one line, the mean, in a band from the least to the largest.

    Args:
        runs: Folders of runs with ``evaluate.energy`` on.
    """
    if not runs:
        raise ArgumentError("runs", "must be at least one folder of a run, got none")
    groups: dict[str, list[Energies]] = {}
    for folder in map(Path, runs):
        run = load_run(folder)
        if run.energies is None:
            raise RunError(f"{folder} has no energies: train it with evaluate.energy=true")
        groups.setdefault(str(run.facts.get("name") or run.folder), []).append(run.energies)
    figure = new_figure(9.2, 3.5)
    left, right = figure.subplots(1, 2)
    for index, (name, members) in enumerate(groups.items()):
        several = f" ({len(members)} runs)" if len(members) > 1 else ""
        label = plain(name, 40) + several
        _draw(left, [(one.steps, one.excess.sum(axis=1)) for one in members], colour(index), label)
        shares = [(one.steps, (100 * one.excess / one.level).mean(axis=1)) for one in members]
        _draw(right, shares, colour(index), label)
    right.axhline(100, color=MUTED, lw=1.0, ls=(0, (3, 1.6)))
    across = right.get_yaxis_transform()  # along the axes in x, data in y
    right.text(0.99, 100, "random directions", fontsize=7, va="bottom", ha="right", color=MUTED, transform=across)
    kinds = {one.kind for members in groups.values() for one in members}
    for axes, title in ((left, "(a) Sum over the layers"), (right, "(b) Mean over the layers, of random")):
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.set_ylim(0, None)
    left.set_ylabel("energy above the least" + (f"\n({kinds.pop()})" if len(kinds) == 1 else ""))
    right.set_ylabel("%")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(len(groups), 3))
    return figure


@styled
def dynamics(runs: Sequence[Path], *, layers: bool = False) -> Figure:
    """Energy and test error of runs over the training steps, and the orthogonality error where it was measured.

    Energies are means over pairs of neurons, summed over the hidden layers; of the orthogonality errors of the layers
    the largest is drawn. Runs of one recipe, apart from the seed, are one line, the mean, in a band from the least to
    the largest. A quantity that no run has gets no panel.

    Args:
        runs: Folders of runs; energies need ``evaluate.energy``.
        layers: Below, the energy of every layer on its own.
    """
    if not runs:
        raise ArgumentError("runs", "must be at least one folder of a run, got none")
    groups = _recipes([Path(folder) for folder in runs])
    every = [run.energies for members in groups.values() for run in members if run.energies is not None]
    kinds = {one.kind for one in every}
    found = [
        ("Energy, sum over the hidden layers", f"energy ({', '.join(sorted(kinds))})", _curves(groups, _energy)),
        ("Test error", "%", _curves(groups, _error)),
        ("Orthogonality error", r"largest $\|R^\top R - I\|_F\,/\,\sqrt{d}$", _curves(groups, _orthogonality)),
    ]
    panels = [panel for panel in found if panel[2]]
    if not panels:
        raise RunError("the runs have no test errors and no energies: train with evaluate.energy=true")
    names = list(dict.fromkeys(name for one in every for name in one.layers)) if layers else []
    below = math.ceil(len(names) / COLUMNS)
    figure = new_figure(4.6 * max(len(panels), 2 if below else 1), 3.5 + 2.1 * below)
    parts: Any = figure.subfigures(2, 1, height_ratios=[3.5, 2.1 * below]) if below else [figure]
    shades = {label: colour(index) for index, label in enumerate(groups)}
    upper = parts[0].subplots(1, len(panels), squeeze=False)[0]
    for index, (axes, (title, unit, lines)) in enumerate(zip(upper, panels, strict=True)):
        _panel(axes, f"({'abc'[index]}) {title}", lines, shades)
        axes.set_ylabel(unit)
        if title == "Test error":
            axes.set_ylim(0, None)
        elif title == "Orthogonality error":
            low, high = np.floor(np.log10(axes.dataLim.intervaly))
            axes.set_yscale("log")
            axes.set_ylim(10**low, 10 ** (high + 1))  # whole decades, in which rounding does not look like an event
    for index, name in enumerate(names):
        axes = parts[1].add_subplot(below, min(COLUMNS, len(names)), index + 1)
        _panel(axes, plain(name), _curves(groups, functools.partial(_energy, layer=name)), shades)
        axes.title.set_fontsize(8)
    handles = [Line2D([], [], color=shade, label=label) for label, shade in shades.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(len(groups), 3))
    return figure


def _recipes(folders: Sequence[Path]) -> dict[str, list[Run]]:
    """Runs by what is written of their recipe, those that differ in the seed alone together."""
    groups: dict[str, list[Run]] = {}
    for folder in folders:
        groups.setdefault(RunFolder.open(folder).recipe().hash_without_seed, []).append(load_run(folder))
    names = [str(members[0].facts.get("name") or members[0].folder) for members in groups.values()]
    labels = {}
    for name, members in zip(names, groups.values(), strict=True):
        # Overrides do not change the name of a recipe; folders of runs do differ.
        shown = name if names.count(name) == 1 else f"{name}, {members[0].folder}"
        labels[plain(shown, 40) + (f" ({len(members)} runs)" if len(members) > 1 else "")] = members
    return labels


def _curves(groups: dict[str, list[Run]], read: Callable[[Run], Curve | None]) -> dict[str, list[Curve]]:
    """Curves of the groups, where there are any."""
    found = {label: [curve for run in members if (curve := read(run)) is not None] for label, members in groups.items()}
    return {label: curves for label, curves in found.items() if curves}


def _energy(run: Run, layer: str | None = None) -> Curve | None:
    """Energy of a layer, or the sum over the hidden ones: the head is trained as always, whatever they do."""
    one = run.energies
    if one is None or (layer is not None and layer not in one.layers):
        return None
    chosen = [index for index, name in enumerate(one.layers) if name == layer or (layer is None and name != "head")]
    return (one.steps, one.values[:, chosen].sum(axis=1)) if chosen else None


def _error(run: Run) -> Curve | None:
    rows = [row for row in run.metrics if row.get("split") == "test" and row.get("accuracy") is not None]
    return _curve(rows, [100 * (1 - row["accuracy"]) for row in rows])


def _orthogonality(run: Run) -> Curve | None:
    rows = [row for row in run.metrics if row.get("split") == "orthogonality"]
    largest = [max((v for k, v in row.items() if k.startswith("orthogonality/")), default=math.nan) for row in rows]
    # The identity has no error, and zero no logarithm.
    shown = [value if 0 < value < math.inf else math.nan for value in largest]
    return None if all(map(math.isnan, shown)) else _curve(rows, shown)


def _curve(rows: Sequence[dict[str, Any]], values: Sequence[float]) -> Curve | None:
    return (np.array([row["step"] for row in rows]), np.array(values, dtype=np.float64)) if rows else None


def _panel(axes: Axes, title: str, lines: dict[str, list[Curve]], shades: dict[str, str]) -> None:
    for label, members in lines.items():
        _draw(axes, members, shades[label], label)
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.ticklabel_format(useOffset=False)


def _draw(axes: Axes, members: Sequence[Curve], shade: str, label: str) -> None:
    """One line of the steps that all members have, in their band."""
    steps = sorted(set.intersection(*({int(step) for step in found} for found, _ in members)))
    values = np.stack([[value[list(found).index(step)] for step in steps] for found, value in members])
    marker = "o" if len(steps) <= MARKED else None
    axes.plot(steps, values.mean(axis=0), color=shade, label=label, marker=marker, markersize=3)
    if len(members) > 1:
        axes.fill_between(steps, values.min(axis=0), values.max(axis=0), color=shade, alpha=0.2, lw=0)
