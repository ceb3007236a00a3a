r"""Pictures of decoupled operators: their curves, what they do to the plane, and what a network learned of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.patches import Arc, Circle
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn

from hypersphere import angular as angulars
from hypersphere.angular import Angular
from hypersphere.drawing import PALETTE, Floats, colour
from hypersphere.errors import ArgumentError, check_range
from hypersphere.nn import Decoupled, Operator, operator, operators
from hypersphere.plot.style import FAINT, INK, MUTED, angle_axis, new_figure, plain, styled

OPERATORS = ("sphere", "ball", "tanh", "linear", "seg", "log", "mix")
"""Bounded ones first, then by growth; an operator that is not named here comes last."""
ANGULARS: Mapping[str, Mapping[str, float]] = {
    "cosine": {},
    "linear": {},
    "sigmoid, k = 0.1": {"k": 0.1},
    "sigmoid, k = 0.3": {"k": 0.3},
    "sigmoid, k = 0.7": {"k": 0.7},
    "sqcos": {},
    "relucos": {},
}
RADIUS = 1.0
LONGEST = 4.0
"""Largest norm of the magnitude curves."""
INPUTS = ((150.0, 0.5), (75.0, 1.5))
"""Direction in degrees and length of the short and the long input that the operators move."""
KERNEL = -20.0
"""Direction of the kernel in the same picture."""
GEOMETRY_TITLE = r"Where a short and a long input x go: $\varphi(x) = h(\|x\|)\, x/\|x\|$, radius 1, on the unit circle"
EXTENT, PIXELS = 2.5, 101
"""Half the width of the plane of the response fields, and points on a side."""
LEVELS = np.arange(-2.125, 2.2, 0.25)  # zero is in the middle of a step
DIVERGING = LinearSegmentedColormap.from_list("responses", [PALETTE[0], "#ffffff", PALETTE[1]])
BINS = 20
MOST_PANELS = 24
STEEPNESS, RADII = "steepness k", r"radius $\rho$"
SHADES = (*PALETTE[:6], PALETTE[9], *PALETTE[6:9])
"""The palette with its pale colours last, which make poor lines."""


def _named(names: Sequence[str] | None) -> dict[str, Operator]:
    """Operators of exact norms by name; without names all that are registered."""
    if names is None:
        names = sorted(operators, key=lambda name: (*OPERATORS, name).index(name))
    if not names:
        raise ArgumentError("operators", "must be at least one name, got none")
    if len(names) > len(PALETTE):
        raise ArgumentError("operators", f"must be at most {len(PALETTE)} at once, got {len(names)}")
    return {operators[name].name: operator(name, eps=0.0) for name in names}


def _angulars() -> dict[str, Angular]:
    return {label: angulars.create(label.split(",")[0], **options) for label, options in ANGULARS.items()}


@styled
def plot_operators(names: Sequence[str] | None = None) -> Figure:
    r"""The operators at a glance: magnitude curves, angular curves, and how inputs are moved along their rays.

    Args:
        names: The operators; by default all.

    Example:
        >>> [axes.get_title(loc="left")[:3] for axes in plot_operators(["tanh", "seg"]).axes[:2]]
        ['(a)', '(b)']
    """
    chosen = _named(names)
    figure = new_figure(11.0, 6.5)
    halves = figure.add_gridspec(2, 1, height_ratios=[3.4, 3.1])
    upper, lower = (figure.add_subfigure(halves[half]) for half in (0, 1))
    left, right = upper.subplots(1, 2)
    _draw_magnitudes(left, chosen)
    _draw_angulars(right)
    left.set_title(f"(a) {left.get_title(loc='left')}")
    right.set_title(f"(b) {right.get_title(loc='left')}")
    _draw_geometry(lower, chosen)
    lower.suptitle(f"(c) {GEOMETRY_TITLE}", x=0.035, ha="left", fontsize=10)
    return figure


@styled
def plot_magnitudes(names: Sequence[str] | None = None) -> Figure:
    r"""Magnitude functions :math:`h(\|x\|)` with radius 1 and the default factors.

    Args:
        names: The operators; by default all.

    Example:
        >>> len(plot_magnitudes(["sphere", "tanh"]).axes[0].get_legend().get_texts())
        2
    """
    figure = new_figure(5.4, 3.6)
    _draw_magnitudes(figure.subplots(), _named(names))
    return figure


@styled
def plot_angulars() -> Figure:
    r"""Angular functions :math:`g(\theta)`, the sigmoid with three steepnesses.

    Example:
        >>> [text.get_text() for text in plot_angulars().axes[0].get_legend().get_texts()][:3]
        ['cosine', 'linear', 'sigmoid, k = 0.1']
    """
    figure = new_figure(5.4, 3.6)
    _draw_angulars(figure.subplots())
    return figure


def _draw_magnitudes(axes: Axes, chosen: Mapping[str, Operator]) -> None:
    t = torch.linspace(0, LONGEST, 401, dtype=torch.float64)
    widths = np.linspace(4.5, 1.6, len(chosen))  # some curves lie on others, which stay seen below
    for index, (name, one) in enumerate(chosen.items()):
        looks: dict[str, Any] = {"ls": "-" if one.bounded else (0, (5, 1.5)), "lw": widths[index]}
        axes.plot(t.numpy(), one.magnitude(t, RADIUS).numpy(), color=SHADES[index], **looks, label=name)
    if any(one.has_radius for one in chosen.values()):
        axes.axvline(RADIUS, color=MUTED, lw=0.9, ls=(0, (1, 1.5)), zorder=1)
        axes.text(RADIUS, 1, r" radius $\rho$", transform=axes.get_xaxis_transform(), va="top", fontsize=8, color=MUTED)
    axes.set_xlim(0, LONGEST)
    axes.set_ylim(0, LONGEST)
    axes.set_xlabel(r"norm $\|x\|$ of the input")
    axes.set_ylabel(r"magnitude $h(\|x\|)$")
    axes.set_title("Magnitudes: bounded (solid) and unbounded (dashed)")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), handlelength=2.6)


def _draw_angulars(axes: Axes) -> None:
    theta = torch.linspace(0, math.pi, 361, dtype=torch.float64)
    for index, (label, g) in enumerate(_angulars().items()):
        width, dashes = {"cosine": (4.0, "-"), "relucos": (1.8, (0, (3, 1.2)))}.get(label, (1.8, "-"))  # equal to 90°
        axes.plot(theta.rad2deg().numpy(), g(theta).numpy(), color=SHADES[index], label=label, lw=width, ls=dashes)
    angle_axis(axes, label=r"angle $\theta$ of kernel and input (degrees)")
    axes.set_ylabel(r"$g(\theta)$")
    axes.set_title("Angular functions")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), handlelength=2.6)


# ------------------------------------------------------------------------------------------------ geometry


@styled
def plot_operator_geometry(names: Sequence[str] | None = None) -> Figure:
    r"""How each operator moves a short and a long input along its ray, beside the unit circle.

    With the cosine as angular function the response is the inner product of the unit kernel and
    :math:`\varphi(x) = h(\|x\|)\, x / \|x\|`.

    Args:
        names: The operators; by default all.

    Example:
        >>> [axes.get_title(loc="center") for axes in plot_operator_geometry(["sphere", "ball"]).axes]
        ['sphere', 'ball']
    """
    chosen = _named(names)
    figure = new_figure(11.0, 3.1)
    _draw_geometry(figure, chosen)
    figure.suptitle(GEOMETRY_TITLE, x=0.01, ha="left", fontsize=10)
    return figure


def _draw_geometry(figure: Figure | SubFigure, chosen: Mapping[str, Operator]) -> None:
    panels = figure.subplots(1, len(chosen), squeeze=False)[0]
    for axes, (name, one) in zip(panels, chosen.items(), strict=True):
        axes.add_patch(Circle((0, 0), 1, fill=False, ec=MUTED, lw=0.9, ls=(0, (3, 1.6))))
        axes.plot(0, 0, ".", color=MUTED, ms=3)
        _arrow(axes, (0, 0), _point(KERNEL, 1), color=INK, lw=1.3)
        axes.text(*_point(KERNEL, 1.25), "w", ha="center", va="center", fontsize=8)
        for degrees, length in INPUTS:
            x = _point(degrees, length)
            moved = one.phi(torch.from_numpy(x), RADIUS).numpy()
            axes.plot(*zip((0, 0), _point(degrees, 3.2), strict=True), color=FAINT, lw=0.8, zorder=0)
            if np.linalg.norm(moved - x) > 0.15:
                _arrow(axes, x, moved, color=MUTED, lw=1.0, mutation_scale=8)
            axes.scatter(*moved, s=30, color=PALETTE[1], zorder=4, linewidths=0)
            axes.scatter(*x, s=30, facecolors="none", edgecolors=PALETTE[0], linewidths=1.4, zorder=5)
        axes.set_title(name, loc="center", fontsize=9)
        axes.set_aspect("equal")
        axes.set_xlim(-1.12, 1.3)
        axes.set_ylim(-1.05, 2.5)
        axes.axis("off")
    marks: dict[str, Any] = {"ls": "none", "marker": "o", "ms": 5.5}
    handles = [
        Line2D([], [], mec=PALETTE[0], mfc="none", mew=1.4, label="input x", **marks),
        Line2D([], [], mec="none", mfc=PALETTE[1], label=r"$\varphi(x)$", **marks),
        Line2D([], [], color=INK, lw=1.3, label="direction w of the kernel"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)


def _point(degrees: float, length: float) -> Floats:
    return length * np.array([math.cos(math.radians(degrees)), math.sin(math.radians(degrees))])


def _arrow(axes: Axes, start: Any, end: Any, **looks: Any) -> None:
    axes.annotate("", tuple(end), tuple(start), arrowprops={"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0} | looks)


# -------------------------------------------------------------------------------------------------- fields


@styled
def plot_operator_field(names: Sequence[str] | None = None) -> Figure:
    r"""Response :math:`f(w, x)` over the plane of inputs, for each operator (rows) and angular function (columns).

    The kernel points to the right; radius 1.

    Args:
        names: The operators; by default all.

    Example:
        >>> len(plot_operator_field(["tanh"]).axes)  # five angular functions and the colour bar
        6
    """
    chosen = _named(names)
    columns = {label: g for label, g in _angulars().items() if g not in (angulars.Sigmoid(0.1), angulars.Sigmoid(0.7))}
    side = np.linspace(-EXTENT, EXTENT, PIXELS)
    x = torch.from_numpy(np.stack(np.meshgrid(side, side), -1))
    w = x.new_tensor([1.0, 0.0])
    figure = new_figure(6.4, 0.9 + 1.2 * len(chosen))
    grid = figure.subplots(len(chosen), len(columns), squeeze=False)
    for row, name in zip(grid, chosen, strict=True):
        for axes, g in zip(row, columns.values(), strict=True):
            values = operator(name, eps=0.0, angular=g)(w, x, radius=RADIUS)
            filled = axes.contourf(side, side, values.numpy(), levels=LEVELS, cmap=DIVERGING, extend="both")
            axes.add_patch(Circle((0, 0), 1, fill=False, ec=MUTED, lw=0.7, ls=(0, (3, 1.6))))
            _arrow(axes, (0, 0), (1, 0), color=INK, lw=1.0, mutation_scale=7)
            axes.set_aspect("equal")
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set(visible=True, color=FAINT)
        row[0].set_ylabel(name, fontsize=9)
    for axes, label in zip(grid[0], columns, strict=True):
        axes.set_title(label, loc="center", fontsize=9)
    bar = figure.colorbar(filled, ax=grid, orientation="horizontal", shrink=0.6, aspect=30, pad=0.01)
    bar.set_ticks([-2, -1, 0, 1, 2])
    bar.set_label(r"response $f(w, x)$ to the input at this place; arrow: w, circle: radius 1", fontsize=8)
    return figure


# ---------------------------------------------------------------------------------------------- angle step


@styled
def plot_angle_step(norms: tuple[float, float] = (1.0, 2.0), step: float = 0.8) -> Figure:
    r"""The same step rotates a short kernel further than a long one.

    The gradient of an operator that ignores the kernel's norm is orthogonal to the kernel, so a step of length
    :math:`d` rotates a kernel of norm :math:`\|w\|` by :math:`\arctan(d / \|w\|)`.

    Args:
        norms: Norms of the short and the long kernel.
        step: Length of the step.

    Example:
        >>> [text.get_text() for text in plot_angle_step().axes[0].texts if "=" in text.get_text()]
        ['$\\theta_2$ = 21.8°', '$\\theta_1$ = 38.7°']
    """
    short, long = norms
    check_range("norms", short, 0, open_low=True)
    check_range("step", step, 0, open_low=True)
    if not long > short:
        raise ArgumentError("norms", f"must be the smaller one first, got {norms}")
    figure = new_figure(5.6, 3.4)
    axes = figure.subplots()
    for index, size, bend in ((2, long, 0.62 * long), (1, short, 0.5 * short)):  # the short one on the long one
        shade = colour(index - 1)
        turned = math.degrees(math.atan(step / size))
        axes.add_patch(Circle((0, 0), size, fill=False, ec=MUTED, lw=0.9, ls=(0, (3, 1.6))))
        _arrow(axes, (0, 0), (size, 0), color=shade, lw=2.0)
        _arrow(axes, (size, 0), (size, step), color=INK, lw=1.8)
        axes.plot((0, size), (0, step), color=shade, lw=1.4)
        axes.add_patch(Arc((0, 0), 2 * bend, 2 * bend, theta2=turned, color=shade, lw=1.4))
        axes.text(0.97 * size, -0.03 * long, f"$w_{index}$", ha="right", va="top", color=shade)
        x, y = _point(turned, bend) if index == 1 else _point(turned / 2, bend)
        side, shift = ("right", -0.03) if index == 1 else ("left", 0.03)
        axes.text(x + shift * long, y, rf"$\theta_{index}$ = {turned:.1f}°", ha=side, va="center", color=shade)
        axes.text(size + 0.02 * long, 0.7 * step, "step", ha="left", va="center")
    axes.set_aspect("equal")
    axes.set_xlim(-0.3 * long, 1.2 * long)
    axes.set_ylim(-0.16 * long, max(1.15 * step, 0.62 * long))
    axes.axis("off")
    return figure


# ------------------------------------------------------------------------------------------------- filters


@styled
def plot_filters(weight: Tensor, columns: int | None = None) -> Figure:
    """The filters of a first layer as small images, each scaled by its largest value.

    Args:
        weight: Kernels ``(O, C, kH, kW)`` with 1 channel (blue negative, orange positive) or 3 channels (grey is zero).
        columns: How many beside each other; by default about as many as rows.

    Example:
        >>> plot_filters(torch.randn(6, 3, 7, 7)).axes[0].images[0].get_array().shape  # 2 x 3 of them, with gaps
        (15, 23, 3)
    """
    if weight.ndim != 4 or weight.shape[1] not in (1, 3) or not weight.numel():
        raise ArgumentError("weight", f"must be (O, 1, kH, kW) or (O, 3, kH, kW), got {tuple(weight.shape)}")
    count, channels, height, width = weight.shape
    columns = math.ceil(math.sqrt(count)) if columns is None else columns
    check_range("columns", columns, 1)
    rows = math.ceil(count / columns)
    filters = weight.detach().double().cpu()
    filters = filters / filters.abs().amax((1, 2, 3), keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    # Colours first, so that the gaps are white whatever zero looks like.
    shades = (filters.permute(0, 2, 3, 1) + 1) / 2  # (O, kH, kW, C)
    if channels == 1:
        shades = torch.from_numpy(DIVERGING(shades[..., 0].numpy())[..., :3])
    mosaic = torch.ones(rows, columns, height + 1, width + 1, 3, dtype=torch.float64)
    mosaic.flatten(0, 1)[:count, :height, :width] = shades
    image = mosaic.permute(0, 2, 1, 3, 4).flatten(0, 1).flatten(1, 2)[:-1, :-1]
    inches = min(6.0, 0.5 * columns) / (columns * (width + 1))
    figure = new_figure(image.shape[1] * inches, image.shape[0] * inches)
    axes = figure.subplots()
    axes.imshow(image.numpy(), interpolation="nearest")
    axes.axis("off")
    return figure


# ---------------------------------------------------------------------------------------------- parameters


@styled
def plot_parameters(model: nn.Module, layers: Sequence[str] | None = None) -> Figure:
    r"""Histograms of the learned steepness k and radius :math:`\rho` in the decoupled layers of a model.

    Args:
        model: A model with layers that learn k or the radius.
        layers: Names of some of its layers; by default all, at most 24.

    Example:
        >>> from hypersphere.nn import create
        >>> net = nn.Sequential(create("tanh")(3, 8, 3), create("sphere", angular="sigmoid", learn_k="filter")(8, 8, 3))
        >>> [axes.get_title(loc="left") for axes in plot_parameters(net).axes]
        ['1: steepness k', '0: radius $\\rho$']
    """
    found = _learned(model, layers)
    kinds = [kind for kind in (STEEPNESS, RADII) if any(one[1] == kind for one in found)]
    groups = {kind: [one for one in found if one[1] == kind] for kind in kinds}
    columns = min(4, max(map(len, groups.values())))
    rows = sum(math.ceil(len(group) / columns) for group in groups.values())
    figure = new_figure(max(3.6, 2.7 * columns), 0.3 + 2.0 * rows)
    grid = iter(figure.subplots(rows, columns, squeeze=False).ravel())
    for shade, group in enumerate(groups.values()):
        end = 1.05 * max(max(values.max(), start) for *_, values, start in group)
        for name, kind, values, start in group:
            axes = next(grid)
            shares, edges = np.histogram(values, BINS, (0, end))
            axes.stairs(100 * shares / len(values), edges, fill=True, color=colour(shade))
            axes.axvline(start, color=INK, lw=1.1, ls=(0, (3, 1.6)))
            axes.set_xlim(0, end)
            axes.set_title(f"{plain(name or type(model).__name__)}: {kind}", fontsize=9)
            axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        for _ in range(-len(group) % columns):  # the next kind begins a row
            next(grid).remove()
    figure.supylabel("share of filters (%)", fontsize=9)
    handle = Line2D([], [], color=INK, lw=1.1, ls=(0, (3, 1.6)), label="initial value")
    figure.legend(handles=[handle], loc="outside lower center")
    return figure


def _learned(model: nn.Module, layers: Sequence[str] | None) -> list[tuple[str, str, Floats, float]]:
    """Layer, what it learns, the values of its filters, and what they began with."""
    modules: dict[str, Any] = {name: part for name, part in model.named_modules() if isinstance(part, Decoupled)}
    for name in layers or ():
        if name not in modules:
            raise ArgumentError("layers", f"must name decoupled layers ({', '.join(modules)}), got {name!r}")
    found = []
    for name in layers or modules:
        op = modules[name].operator
        if op.learn_k is not None:
            found.append((name, STEEPNESS, _array(modules[name].k), float(op.angular.k)))
        if op.has_radius and op.learn_radius:
            found.append((name, RADII, _array(modules[name].radius), float(op.radius)))
    if not found:
        raise ArgumentError("model", "must have decoupled layers that learn k or a radius, got none")
    if len(found) > MOST_PANELS:
        raise ArgumentError("layers", f"must be fewer: {len(found)} histograms, at most {MOST_PANELS}")
    return found


def _array(values: Tensor) -> Floats:
    array: Floats = values.detach().double().cpu().numpy()
    return array
