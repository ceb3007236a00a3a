r"""What training follows: the gradient of the target logit under the three settings of ``gradient``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from hypersphere.drawing import Floats, colour
from hypersphere.errors import check_range
from hypersphere.losses import ArcFace, ASoftmax, LambdaAnnealer, MarginSoftmax
from hypersphere.losses.spec import GRADIENTS
from hypersphere.plot.style import INK, MUTED, angle_axis, new_figure, styled

NORM = 10.0
"""Norm of the drawn feature, and ArcFace's scale, so that all lengths are comparable."""
DEGREES = (0.25, 180, 0.25)
"""At 0 and 180 themselves a change of the angle has no direction; 45, 90 and 135, where slopes vanish, are met."""
ARROWS = tuple(range(10, 180, 20))
LEAST = 1e-9
COLOURS = {"exact": colour(0), "cgd": INK, "caffe": colour(1)}
LOOKS: dict[str, dict[str, Any]] = {  # widths that let one curve be seen under another
    "exact": {"color": COLOURS["exact"], "lw": 3.6},
    "cgd": {"color": COLOURS["cgd"], "lw": 1.8, "ls": (0, (5, 2))},
    "caffe": {"color": COLOURS["caffe"], "lw": 1.5},
}
CAPTION = (
    "Gradient of the target logit by the feature x, with $\\|x\\|$ = 10 at the angle $\\theta$ from its class "
    "vector W, as training computes it. exact: the derivative\n"
    "of the formula. cgd (characteristic gradient detachment): the margin changes the value only, the slope in the "
    "angle stays that of the cosine. caffe: the\n"
    "exact direction a W + b x with the pair (a, b) scaled to length 1 before annealing, as in the released SphereFace "
    "layer; where the slope vanishes, b x alone\n"
    "is left, of length $\\|x\\|$: the spikes. Bottom: directions only, all arrows of equal length, at features on the "
    "half circle."
)


def target_gradient(head: MarginSoftmax, theta: Tensor, norm: float = NORM) -> Tensor:
    r"""Gradient of the target logit by a feature in the plane, as the head passes it back in training.

    Args:
        head: A head with ``dim`` 2; its first class vector is set to (1, 0), on a copy.
        theta: ``(P,)`` angles of the feature to the class vector, in radians.
        norm: Norm of the feature.

    Returns:
        ``(P, 2)`` gradients; the feature is ``norm`` times :math:`(\cos\theta, \sin\theta)`.

    Example:
        >>> from hypersphere.losses import WSoftmax
        >>> target_gradient(WSoftmax(2, 2), torch.tensor([0.5])).shape
        torch.Size([1, 2])
    """
    check_range("norm", norm, 0, open_low=True)
    probe = copy.deepcopy(head).to(theta.dtype).train()
    # The loss of a sample becomes its target logit, so that it is differentiated by the very path of training.
    probe.__dict__.update(sample_loss=lambda negatives, target: target, penalty=lambda batch: 0.0)
    probe.spec = replace(probe.spec, reduction="sum")
    with torch.no_grad():
        probe.weight[0] = probe.weight.new_tensor([1.0, 0.0])
    x = norm * torch.stack([theta.cos(), theta.sin()], 1)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(probe(x, torch.zeros(len(x), dtype=torch.int64)), x)
    return gradient / probe.loss_factor


def _constant(weight: float) -> LambdaAnnealer:
    return LambdaAnnealer(base=weight, gamma=0.0, minimum=0.0)


CASES: dict[str, Callable[[str], MarginSoftmax]] = {
    r"A-Softmax, $m$ = 4, $\lambda$ = 0": lambda gradient: ASoftmax(2, 2, m=4, gradient=gradient),
    r"A-Softmax, $m$ = 4, $\lambda$ = 5": lambda gradient: ASoftmax(
        2, 2, m=4, gradient=gradient, annealer=_constant(5)
    ),
    r"ArcFace, $m$ = 0.5, $s$ = 10": lambda gradient: ArcFace(2, 2, s=NORM, m=0.5, gradient=gradient),
}


@styled
def gradients() -> Figure:
    """How ``gradient="exact"``, ``"cgd"`` and ``"caffe"`` differ: length and direction of a feature's gradient."""
    figure = new_figure(10.0, 7.5)
    rows = figure.subplots(3, 3, height_ratios=[1, 1, 0.8])
    degrees = np.arange(*DEGREES)
    for column, (title, make) in enumerate(CASES.items()):
        found = {kind: target_gradient(make(kind), _radians(degrees)).numpy() for kind in GRADIENTS}
        _draw_lengths(rows[0, column], degrees, found)
        _draw_directions(rows[1, column], degrees, found, labelled=column == len(CASES) - 1)
        _draw_arrows(rows[2, column], make)
        rows[0, column].set_title(title)
    rows[0, 0].set_ylabel("length of the gradient")
    rows[1, 0].set_ylabel("direction, measured from W\n(degrees)")
    handles, labels = rows[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=9, handlelength=3)
    figure.supxlabel(CAPTION, fontsize=8, x=0.01, ha="left", linespacing=1.4)
    return figure


def _radians(degrees: Floats) -> Tensor:
    return torch.from_numpy(np.radians(degrees))


def _draw_lengths(axes: Axes, degrees: Floats, found: Mapping[str, Floats]) -> None:
    for kind, vectors in found.items():
        axes.plot(degrees, np.linalg.norm(vectors, axis=1), **LOOKS[kind], label=f'"{kind}"')
    angle_axis(axes)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelbottom=False)


def _draw_directions(axes: Axes, degrees: Floats, found: Mapping[str, Floats], *, labelled: bool) -> None:
    for turn, meaning in ((90, "towards W on the circle"), (180, "towards the origin")):
        axes.plot(degrees, degrees - turn, color=MUTED, lw=0.9, ls=(0, (1, 1.5)), zorder=1)
        if labelled:
            axes.text(
                *(105, 105 - turn - 19),
                meaning,
                rotation=45,
                rotation_mode="anchor",
                transform_rotates_text=True,
                ha="center",
                va="center",
                fontsize=7.5,
                color=MUTED,
            )
    for kind, vectors in found.items():
        angles = np.degrees(np.arctan2(vectors[:, 1], vectors[:, 0]))
        angles[np.linalg.norm(vectors, axis=1) < LEAST] = np.nan  # no gradient, no direction
        axes.plot(degrees, angles, **LOOKS[kind])
    angle_axis(axes, label=r"angle $\theta$ of x to W (degrees)")
    axes.set_ylim(-185, 95)
    axes.set_yticks([-180, -90, 0, 90])


def _draw_arrows(axes: Axes, make: Callable[[str], MarginSoftmax]) -> None:
    """Directions at features on a half circle around the origin, the class vector to the right."""
    angles = _radians(np.array(ARROWS, dtype=np.float64))
    places = torch.stack([angles.cos(), angles.sin()], 1).numpy()
    circle = np.linspace(0, np.pi, 91)
    axes.plot(np.cos(circle), np.sin(circle), color=MUTED, lw=0.9, zorder=1)
    axes.annotate(
        "", (1, 0), (0, 0), arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.4, "shrinkA": 0, "shrinkB": 0}
    )
    axes.text(0.5, -0.04, "W", ha="center", va="top")
    for order, kind in enumerate(GRADIENTS):
        vectors = target_gradient(make(kind), angles).numpy()
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        seen = lengths[:, 0] > LEAST
        axes.quiver(
            *places[seen].T,
            *(0.36 * vectors[seen] / lengths[seen]).T,
            color=COLOURS[kind],
            width=(0.016, 0.007, 0.0055)[order],
            angles="xy",
            scale_units="xy",
            scale=1,
            zorder=3 + order,
        )
    axes.scatter(places[:, 0], places[:, 1], s=14, color="white", edgecolors=INK, linewidths=0.8, zorder=6)
    axes.set_aspect("equal")
    axes.set_xlim(-1.1, 1.45)
    axes.set_ylim(-0.3, 1.08)
    axes.axis("off")
