"""Pictures of loss landscapes: surfaces and contours over two directions, curves along one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from torch import Tensor, nn

from hypersphere.data import Dataset
from hypersphere.data.splits import evaluation_batches
from hypersphere.drawing import Floats, colour
from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.landscape import Landscape, landscape
from hypersphere.orthogonal import cached
from hypersphere.plot.style import INK, MUTED, new_figure, plain, styled
from hypersphere.runs import System

COLOURS = "viridis"
LEVELS = 24
WIDE = 30.0
"""Ratio of the largest value to the least from which on a scale is logarithmic."""


def run_landscape(
    system: System,
    dataset: Dataset,
    *,
    split: str = "test",
    images: int | None = None,
    head: bool = True,
    progress: Callable[[], object] = lambda: None,
    **options: Any,
) -> Landscape:
    """The landscape of a trained run: ``loss``, the mean of what was minimised, and ``error``, the share of mistakes.

    A margin counts in the loss and not in the error, as in training; regularisers and augmentation are left out. Where
    features are no longer finite the loss is infinite and the answer wrong. With a running average of the weights this
    is what moves.

    Args:
        system: The trained run.
        dataset: Its data set.
        split: ``"test"`` or ``"train"`` images.
        images: How many of them, evenly from the whole split; by default all. They are kept on the device.
        head: Move the weights of the head as well.
        progress: Called after every point.
        **options: Options of :func:`hypersphere.landscape.landscape`.
    """
    check_choice("split", split, ("test", "train"))
    data = dataset.test if split == "test" else dataset.train
    if images is not None:
        check_range("images", images, 1)
        chosen = torch.arange(min(images, len(data))) * len(data) // min(images, len(data))
        data = data.select(chosen, data.labels[chosen])
    batches = list(evaluation_batches(data, system.recipe.evaluate.batch_size, system.device))
    parts = nn.ModuleList([system.model, system.head])
    frozen = [] if head else [p for p in system.head.parameters() if p.requires_grad]

    def measure() -> dict[str, Tensor]:
        total: Any = 0.0
        wrong: Any = 0.0
        with cached(system.model):
            for batch, labels in batches:
                with system.autocast():
                    features = system.model(system.preprocess(batch))
                finite = features.isfinite().all(1)
                features = features.where(finite.unsqueeze(1), 0.0)
                loss = system.head(features, labels).double()
                total = total + len(labels) * loss.masked_fill(~finite.all(), float("inf"))
                wrong = wrong + ((system.head.logits(features).argmax(1) != labels) | ~finite).double().sum()
        progress()
        return {"loss": total / len(data), "error": wrong / len(data)}

    for p in frozen:
        p.requires_grad_(False)
    try:
        return landscape(parts, measure, **options)
    finally:
        for p in frozen:
            p.requires_grad_(True)


class _Scale:
    """Common colours and heights of one quantity over all runs: linear, or logarithmic where values differ widely."""

    def __init__(self, name: str, values: Sequence[Floats]) -> None:
        factor = 100.0 if name == "error" else 1.0
        self.title = "error (%)" if name == "error" else name
        every = factor * np.concatenate([v.ravel() for v in values])
        every = every[np.isfinite(every)]
        if not len(every):
            raise ArgumentError("landscapes", f"must have finite values, got none of {name!r}")
        positive = every[every > 0]
        # An error ends at 100 %: it needs no logarithm, and is drawn from 0.
        self.log = name != "error" and len(positive) > 0 and every.min() >= 0 and every.max() > WIDE * every.min()
        self.least = float(positive.min()) if self.log else 0.0
        self.factor = factor
        low, high = float(self(every / factor).min()), float(self(every / factor).max())
        if name == "error":
            low, high = 0.0, 100.0
        self.low, self.high = low, high if high > low else low + 1
        self.norm = Normalize(self.low, self.high)
        self.levels = np.linspace(self.low, self.high, LEVELS + 1)
        self.ticks = MaxNLocator(5, integer=self.log)
        self.labels = FuncFormatter(self._label)

    def __call__(self, values: Floats) -> Floats:
        """Heights; what is not finite is not a number."""
        scaled = np.where(np.isfinite(values), self.factor * values, np.nan)
        return np.log10(np.maximum(scaled, self.least)) if self.log else scaled

    def _label(self, height: float, _: object) -> str:
        return rf"$10^{{{height:g}}}$" if self.log else f"{height:g}"


@styled
def landscapes(found: Sequence[Landscape], titles: Sequence[str]) -> Figure:
    """Landscapes side by side, every quantity in one scale: surfaces above contours, or curves along one direction.

    Losses that differ by more than a factor of 30 are drawn in a logarithmic scale, the error always from 0 to 100 %.

    Args:
        found: Landscapes of the same quantities in as many dimensions.
        titles: Names of the runs, in the same order.
    """
    if not found:
        raise ArgumentError("landscapes", "must be at least one, got none")
    if len({(one.dimensions, tuple(one.values)) for one in found}) > 1:
        raise ArgumentError("landscapes", "must be of the same quantities in as many dimensions")
    scales = {name: _Scale(name, [one.values[name].numpy() for one in found]) for name in found[0].values}
    return (_curves if found[0].dimensions == 1 else _surfaces)(found, titles, scales)


def _curves(found: Sequence[Landscape], titles: Sequence[str], scales: dict[str, _Scale]) -> Figure:
    figure = new_figure(4.6 * len(scales), 3.5)
    for place, (axes, (name, scale)) in enumerate(
        zip(figure.subplots(1, len(scales), squeeze=False)[0], scales.items(), strict=True)
    ):
        for index, (one, title) in enumerate(zip(found, titles, strict=True)):
            values = one.values[name].numpy()
            label = f"{plain(title)}: {_mean(scale, values)}"
            axes.plot(one.coordinates, scale(values), color=colour(index), label=label)
        axes.axvline(0, color=MUTED, lw=0.8, ls=(0, (3, 1.6)))
        axes.set_title(f"({'abcdefgh'[place]}) {name.capitalize()}")
        axes.set_xlabel(r"$\alpha$")
        axes.set_ylabel(scale.title)
        axes.yaxis.set_major_locator(scale.ticks)
        axes.yaxis.set_major_formatter(scale.labels)
        if name == "error":
            axes.set_ylim(0, 102)
        axes.legend(loc="best", fontsize=7, frameon=True, framealpha=0.85, edgecolor="none")
    return figure


def _surfaces(found: Sequence[Landscape], titles: Sequence[str], scales: dict[str, _Scale]) -> Figure:
    """Columns are runs, and of a single run surface and contour."""
    alone = len(found) == 1
    rows, columns = (len(scales), 2) if alone else (2 * len(scales), len(found))
    figure = new_figure(max(7.0, 3.5 * columns), 3.1 * rows)
    for quantity, (name, scale) in enumerate(scales.items()):
        drawn = []
        for index, (one, title) in enumerate(zip(found, titles, strict=True)):
            values = one.values[name].numpy()
            place = quantity * 2 + 1 if alone else 2 * quantity * columns + index + 1
            above: Any = figure.add_subplot(rows, columns, place, projection="3d")
            below = figure.add_subplot(rows, columns, place + (1 if alone else columns))
            _surface(above, one, scale, values)
            _contour(below, one, scale, values)
            above.set_title(f"{plain(title, 32)}\n{name}: {_mean(scale, values)}", loc="center", fontsize=9)
            drawn += [above, below]
        bar = figure.colorbar(ScalarMappable(scale.norm, COLOURS), ax=drawn, pad=0.02, aspect=34, fraction=0.05)
        bar.locator, bar.formatter = scale.ticks, scale.labels
        bar.update_ticks()
        bar.set_label(scale.title, fontsize=8)
        bar.outline.set_visible(False)
    return figure


def _mean(scale: _Scale, values: Floats) -> str:
    """Mean over the grid, and the value of the weights themselves, in words."""
    unit = " %" if scale.factor > 1 else ""
    text = f"mean {scale.factor * values.mean():.3g}{unit}"
    middle = values[tuple(size // 2 for size in values.shape)]
    return f"{text}, trained {scale.factor * middle:.3g}{unit}" if len(values) % 2 else text


def _surface(axes: Any, one: Landscape, scale: _Scale, values: Floats) -> None:
    first, second = np.meshgrid(one.coordinates, one.coordinates, indexing="ij")
    axes.plot_surface(
        first, second, scale(values), cmap=COLOURS, norm=scale.norm, rstride=1, cstride=1, lw=0.2, edgecolor="#ffffff55"
    )
    axes.set_zlim(scale.low, scale.high)
    axes.zaxis.set_major_locator(scale.ticks)
    axes.zaxis.set_major_formatter(scale.labels)
    axes.set_xlabel(r"$\alpha$", labelpad=-6)
    axes.set_ylabel(r"$\beta$", labelpad=-6)
    axes.tick_params(labelsize=7, pad=-2)
    axes.view_init(elev=28, azim=-55)


def _contour(axes: Axes, one: Landscape, scale: _Scale, values: Floats) -> None:
    heights = scale(values).T  # rows are the vertical axis, the second direction
    axes.contourf(one.coordinates, one.coordinates, heights, scale.levels, cmap=COLOURS, norm=scale.norm)
    inner = [level for level in scale.levels[::2] if np.nanmin(heights) < level < np.nanmax(heights)]
    if inner:
        axes.contour(one.coordinates, one.coordinates, heights, inner, colors=INK, linewidths=0.35, alpha=0.6)
    axes.plot(0, 0, marker="+", color="white", markersize=7, mew=1.4)
    axes.set_aspect("equal")
    axes.grid(False)
    axes.set_xlabel(r"$\alpha$")
    axes.set_ylabel(r"$\beta$")
