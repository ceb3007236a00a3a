"""Pictures of the energy of layers while training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hypersphere.errors import ArgumentError
from hypersphere.plot.style import MUTED, color, new_figure, plain, styled
from hypersphere.report import ReportError
from hypersphere.report.geometry import Floats, Ints
from hypersphere.report.runs import Energies, load_run

MARKED = 25
"""Most points of a line that are marked."""


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
            raise ReportError(f"{folder} has no energies: train it with evaluate.energy=true")
        groups.setdefault(str(run.facts.get("name") or run.folder), []).append(run.energies)
    figure = new_figure(9.2, 3.5)
    left, right = figure.subplots(1, 2)
    for index, (name, members) in enumerate(groups.items()):
        several = f" ({len(members)} runs)" if len(members) > 1 else ""
        label = plain(name, 40) + several
        _draw(left, [(one.steps, one.excess.sum(axis=1)) for one in members], color(index), label)
        shares = [(one.steps, (100 * one.excess / one.level).mean(axis=1)) for one in members]
        _draw(right, shares, color(index), label)
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


def _draw(axes: Axes, members: Sequence[tuple[Ints, Floats]], shade: str, label: str) -> None:
    """One line of the steps that all members have, in their band."""
    steps = sorted(set.intersection(*({int(step) for step in found} for found, _ in members)))
    values = np.stack([[value[list(found).index(step)] for step in steps] for found, value in members])
    marker = "o" if len(steps) <= MARKED else None
    axes.plot(steps, values.mean(axis=0), color=shade, label=label, marker=marker, markersize=3)
    if len(members) > 1:
        axes.fill_between(steps, values.min(axis=0), values.max(axis=0), color=shade, alpha=0.2, lw=0)
