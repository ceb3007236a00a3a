r"""Pictures of heads alone, without data: target functions, logits, decision boundaries and annealing."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from hypersphere.drawing import PALETTE, Floats, colour
from hypersphere.errors import ArgumentError, check_range
from hypersphere.losses import LambdaAnnealer, MarginSoftmax, Schedule, binary_margin
from hypersphere.plot.style import FAINT, INK, MUTED, angle_axis, new_figure, styled

POINTS = 361
"""Angles of a curve, every half degree; the boundaries take every other one."""
THETA12 = math.pi / 2
"""Angle between the two class centres for which the margin is given as a number."""
NORM = 30.0
"""Feature norm at which members that keep it are drawn."""
OVERLAID = 3
"""Up to so many heads share one panel of boundaries; more get a small one each."""
PER_ROW = 7


@dataclass(frozen=True)
class Curves:
    r"""A head as functions of the angle.

    Attributes:
        theta: ``(P,)`` angles in radians from 0 to pi.
        psi: ``(P,)`` target value without annealing.
        annealed: ``(P,)`` target value as the head is annealed now; the same as ``psi`` without an annealer.
        target: ``(P,)`` logit of the own class, biases of classes left out.
        other: ``(P,)`` logit of another class at this angle, for a sample on its own centre, likewise.
        grid: ``(Q,)`` angles of the plane of both angles, in radians.
        excess: ``(Q, Q)`` by how much the own class is ahead at :math:`\theta_1` (rows) and :math:`\theta_2`
            (columns), per unit of scale.
        margin: Angle in radians between the regions of two classes whose centres are at :data:`THETA12`.
    """

    theta: Floats
    psi: Floats
    annealed: Floats
    target: Floats
    other: Floats
    grid: Floats
    excess: Floats
    margin: float


def annealed(head: MarginSoftmax, weight: float | None) -> MarginSoftmax:
    """A copy of the head in which the plain angular function has this weight against the margin.

    Args:
        head: The head.
        weight: The annealer's lambda, at least 0; ``None`` for no annealer at all.
    """
    if weight is not None:
        check_range("lambda", weight, 0)
    changed = copy.deepcopy(head)
    changed.annealer = None if weight is None else LambdaAnnealer(base=weight, gamma=0.0, minimum=0.0)
    return changed


@torch.no_grad()
def curves(head: MarginSoftmax, norm: float = NORM) -> Curves:
    """What is drawn of a head.

    Args:
        head: A head with a target function.
        norm: Feature norm, the scale of members that keep it. The norms of class weights are taken as 1.

    Raises:
        ArgumentError: The head is no function of an angle, such as a triplet loss.
    """
    check_range("norm", norm, 0, open_low=True)
    if type(head).forward is not MarginSoftmax.forward:
        raise ArgumentError(
            "head", f"must have a target function psi, got {type(head).__name__}, a loss of pairs of features"
        )
    theta = torch.linspace(0, math.pi, POINTS, dtype=torch.float64)
    grid = theta[::2]
    plain = annealed(head, None).psi(theta, norm=norm)
    value = head.psi(theta, norm=norm)
    scale = float(head.scale(torch.tensor([norm])))
    offset = head.offset()
    shift = 0.0 if offset is None else float(offset)

    # Some members' values of the other classes depend on the own angle, hence a row at a time.
    excess = torch.stack([_ahead(head, angle, grid, norm) for angle in grid])
    return Curves(
        theta=theta.numpy(),
        psi=plain.numpy(),
        annealed=value.numpy(),
        target=(scale * (value + shift)).numpy(),
        other=(scale * (head.eta(theta) + shift)).numpy(),
        grid=grid.numpy(),
        excess=excess.numpy(),
        margin=_margin(head, norm),
    )


def _ahead(head: MarginSoftmax, own: Tensor, other: Tensor, norm: float) -> Tensor:
    """By how much the own class at angle ``own``, a scalar, is ahead of another one at angles ``other``."""
    return head.psi(own, norm=norm) - head.eta(other, target=math.cos(float(own)))


def _margin(head: MarginSoftmax, norm: float) -> float:
    """Angle between the regions of two classes at :data:`THETA12`."""
    return binary_margin(lambda own: _ahead(head, own, THETA12 - own, norm), THETA12, torch.zeros_like)


@styled
def margins(heads: Mapping[str, MarginSoftmax], *, norm: float = NORM) -> Figure:
    r"""Target functions, logits and two-class decision boundaries of heads.

    The boundary of class 1 is where the logits of both classes are equal for a sample of class 1 (biases left out),
    as a curve over the angles :math:`\theta_1` and :math:`\theta_2` to the two centres; that of class 2 is its mirror
    image. The strip between them, in which a sample satisfies the loss of neither class, is the margin. The legend
    gives its width for two centres at a right angle, with the sample on the arc between them. What a loss adds beside
    the logits (an energy, a pull on the norm, pairs of features) is not drawn.

    Args:
        heads: The heads by the names they get in the legend, at most ten.
        norm: Feature norm at which members that keep it, or whose margin depends on it, are drawn.
    """
    if not 1 <= len(heads) <= len(PALETTE):
        raise ArgumentError("losses", f"must be 1 to {len(PALETTE)} at once, got {len(heads)}")
    found = {name: curves(head, norm) for name, head in heads.items()}
    lambdas = {name: _lambda(head) for name, head in heads.items()}
    figure, (top, middle, planes, right) = _margin_axes(len(heads))
    _draw_psi(top, found, lambdas)
    _draw_logits(middle, found, any(head.s is None and head.learned_scale is None for head in heads.values()), norm)
    if len(heads) <= OVERLAID:
        _draw_plane(planes[0], list(found.values()), list(range(len(found))))
        planes[0].set_title("(c) Decision boundaries of two classes")
    else:
        for index, (axes, (name, one)) in enumerate(zip(planes, found.items(), strict=True)):
            _draw_plane(axes, [one], [index], small=True)
            axes.set_title(f"{name.split(' (')[0]}\n{_degrees(one)}", fontsize=8)
    _margin_legend(right, found, lambdas)
    return figure


def _degrees(one: Curves) -> str:
    """The margin as people read it."""
    return f"{math.degrees(one.margin):.1f}°{'' if one.margin < THETA12 else ' (never met)'}"


def _lambda(head: MarginSoftmax) -> float | None:
    return None if head.annealer is None else float(head.annealer.value())


def _margin_axes(count: int) -> tuple[Figure, tuple[Axes, Axes, list[Axes], Axes]]:
    """Figure, the panels of targets and logits, those of the boundaries, and the place of the legend."""
    if count <= OVERLAID:
        figure = new_figure(11.0, 4.4)
        grid = figure.add_gridspec(2, 3, height_ratios=[3.6, 0.6])
        panels = [figure.add_subplot(grid[0, column]) for column in range(3)]
        legend = figure.add_subplot(grid[1, :])
        return figure, (panels[0], panels[1], panels[2:], legend)
    rows = math.ceil(count / PER_ROW)
    columns = math.ceil(count / rows)
    # The small panels are square, so their height follows from how many share the width.
    height = 0.55 + rows * (min(2.2, 10.4 / columns - 0.4) + 0.55)
    figure = new_figure(11.0, 3.5 + height)
    halves = figure.add_gridspec(2, 1, height_ratios=[3.5, height])
    upper, lower = (figure.add_subfigure(halves[half]) for half in (0, 1))
    left, middle, right = upper.subplots(1, 3, width_ratios=[1, 1, 0.62])
    small = lower.subplots(rows, columns, squeeze=False).ravel()
    title = "(c) Regions of class 1 and class 2 with the margin between them, and its width on the dotted line"
    lower.suptitle(title, x=0.043, ha="left", fontsize=10)
    lower.supxlabel(r"angle $\theta_1$ to the centre of class 1 (degrees)", fontsize=9)
    lower.supylabel(r"angle $\theta_2$ (degrees)", fontsize=9)
    for axes in small[count:]:
        axes.remove()
    return figure, (left, middle, list(small[:count]), right)


def _draw_psi(axes: Axes, found: Mapping[str, Curves], lambdas: Mapping[str, float | None]) -> None:
    degrees = np.degrees(next(iter(found.values())).theta)
    axes.plot(degrees, np.cos(np.radians(degrees)), color="#9aa0a6", lw=3.5, alpha=0.6, label="cosine", zorder=1)
    for index, (name, one) in enumerate(found.items()):
        hidden = sum(np.allclose(other.psi, one.psi) for other in list(found.values())[:index])
        # Equal curves would cover each other: the later ones leave gaps.
        axes.plot(degrees, one.psi, color=colour(index), label=name, ls=(0, (4, 4 * hidden)) if hidden else "-")
        if lambdas[name] is not None:
            axes.plot(degrees, one.annealed, color=colour(index), ls=(0, (5, 1.5, 1, 1.5)), lw=1.3)
    angle_axis(axes, label=r"angle $\theta$ to the own class centre (degrees)")
    axes.set_ylabel(r"target value $\psi(\theta)$")
    axes.set_title(r"(a) Target functions")
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))


def _draw_logits(axes: Axes, found: Mapping[str, Curves], norm_kept: bool, norm: float) -> None:
    for index, one in enumerate(found.values()):
        degrees = np.degrees(one.theta)
        axes.plot(degrees, one.target, color=colour(index))
        twins = [other for other in found.values() if np.allclose(other.other, one.other)]
        if twins[0] is one:  # a curve that several heads have in common belongs to none of them
            shade = colour(index) if len(twins) == 1 else INK
            axes.plot(degrees, one.other, color=shade, ls=(0, (3, 1.6)), lw=1.1)
    angle_axis(axes, label=r"angle $\theta$ to that class centre (degrees)")
    axes.set_ylabel("logit")
    stated = rf" ($\|x\| = {norm:g}$ where kept)" if norm_kept else ""
    axes.set_title(f"(b) Logits{stated}")
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.legend(
        handles=[
            Line2D([], [], color=INK, lw=1.8, label="own class"),
            Line2D([], [], color=INK, lw=1.1, ls=(0, (3, 1.6)), label="other class"),
        ],
        loc="upper right",
    )


def _draw_plane(axes: Axes, found: Sequence[Curves], indices: Sequence[int], small: bool = False) -> None:
    """Boundaries of both classes over the two angles, with the strip between them shaded."""
    for index, one in zip(indices, found, strict=True):
        degrees = np.degrees(one.grid)
        first, second = one.excess.T, one.excess  # rows of the picture are theta_2
        neither = -np.maximum(first, second)
        if (neither > 0).any():
            axes.contourf(degrees, degrees, neither, levels=[0, np.inf], colors=[colour(index)], alpha=0.25)
        for ahead in (first, second):
            if ahead.min() < 0 < ahead.max():
                axes.contour(degrees, degrees, ahead, levels=[0], colors=[colour(index)], linewidths=1.4)
    right_angle = math.degrees(THETA12)
    axes.plot([0, right_angle], [right_angle, 0], color=MUTED, lw=0.9, ls=(0, (1, 1.5)), zorder=3)
    for which in ("x", "y"):
        angle_axis(axes, which, step=90 if small else 45)
    axes.set_aspect("equal", anchor="N")
    axes.grid(color=FAINT, lw=0.5)
    size, word = (8, "") if small else (9, "class ")
    axes.text(0.04, 0.96, f"{word}1", transform=axes.transAxes, ha="left", va="top", fontsize=size)
    axes.text(0.96, 0.04, f"{word}2", transform=axes.transAxes, ha="right", va="bottom", fontsize=size)
    if small:
        axes.tick_params(labelsize=7)
    else:
        axes.set_xlabel(r"angle $\theta_1$ to the centre of class 1 (degrees)")
        axes.set_ylabel(r"angle $\theta_2$ to the centre of class 2 (degrees)")


def _margin_legend(axes: Axes, found: Mapping[str, Curves], lambdas: Mapping[str, float | None]) -> None:
    """Names with the margins as numbers, in place of the axes."""
    axes.axis("off")
    handles = [Line2D([], [], color="#9aa0a6", lw=3.5, alpha=0.6, label="cosine, no margin")]
    for index, (name, one) in enumerate(found.items()):
        handles.append(Line2D([], [], color=colour(index), lw=2.2, label=f"{name}: {_degrees(one)}"))
    blended = {weight for weight in lambdas.values() if weight is not None}
    if blended:
        text = "annealed, as in (b) and (c): " + ", ".join(rf"$\lambda$ = {weight:g}" for weight in sorted(blended))
        handles.append(Line2D([], [], color=INK, lw=1.3, ls=(0, (5, 1.5, 1, 1.5)), label=text))
    handles.append(
        Line2D([], [], color=MUTED, lw=0.9, ls=(0, (1, 1.5)), label=r"$\theta_1 + \theta_2 = 90°$: the arc between")
    )
    low = len(found) <= OVERLAID
    axes.legend(
        handles=handles,
        loc="center" if low else "center left",
        ncols=3 if low else 1,
        title=r"Loss: angular margin at $\theta_{12} = 90°$",
        title_fontsize=9,
        alignment="left",
        borderaxespad=0,
        labelspacing=0.45 if low else 0.75,
    )


@styled
def schedule(head: MarginSoftmax, annealer: Schedule, steps: int, *, norm: float = NORM) -> Figure:
    """The annealer's weight over the training steps, and how much of the margin is in force.

    Args:
        head: A head with a target function.
        annealer: Its annealer.
        steps: Last training step of the picture, at least 1.
        norm: Feature norm, for members whose margin depends on it.
    """
    check_range("steps", steps, 1)
    full = curves(annealed(head, None), norm).margin  # refuses what has no target function
    at = np.unique(np.geomspace(1, steps, 121).round().astype(np.int64))
    weights = np.array([float(annealer.value(torch.tensor(int(step)))) for step in at])
    # The margin is a smooth function of the weight alone, so equal weights are taken once.
    known = {weight: _margin(annealed(head, weight), norm) for weight in dict.fromkeys(weights.tolist())}
    in_force = np.degrees([known[weight] for weight in weights.tolist()])
    figure = new_figure(8.0, 3.2)
    left, right = figure.subplots(1, 2)
    left.plot(at, weights, color=colour(0))
    left.set_yscale("log" if (weights > 0).all() else "linear")
    left.set_ylabel(r"annealer's weight $\lambda$")
    left.set_title("(a) Annealing")
    right.plot(at, in_force, color=colour(1), label="as annealed")
    right.axhline(math.degrees(full), color=MUTED, lw=1, ls=(0, (3, 1.6)), label="without annealing")
    right.set_ylim(0, max(1.0, 1.1 * math.degrees(full)))
    right.set_ylabel(r"margin at $\theta_{12} = 90°$ (degrees)")
    right.set_title("(b) Angular margin in force")
    right.legend(loc="center right")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("training step")
    return figure
