"""Pictures for papers and slides: heads, operators, training, features and classes of runs, as matplotlib figures.

Every function returns a :class:`matplotlib.figure.Figure` that belongs to no window and no global state; :func:`save`
writes it as PNG, SVG or PDF. The command line has the same: ``hypersphere plot --help``.

Example:
    >>> from hypersphere import losses
    >>> figure = margins({"ArcFace": losses.ArcFace(2, 2)})
    >>> [axes.get_title(loc="left").split(" ")[0] for axes in figure.axes[:3]]
    ['(a)', '(b)', '(c)']
"""

from hypersphere.plot.classes import class_size, confusion
from hypersphere.plot.directions import gradients, target_gradient
from hypersphere.plot.energy import dynamics, energy_curves
from hypersphere.plot.heads import Curves, annealed, curves, margins, schedule
from hypersphere.plot.landscape import landscapes, run_landscape
from hypersphere.plot.layers import learned
from hypersphere.plot.operators import (
    plot_angle_step,
    plot_angulars,
    plot_filters,
    plot_magnitudes,
    plot_operator_field,
    plot_operator_geometry,
    plot_operators,
    plot_parameters,
)
from hypersphere.plot.rates import recognition, recognition_curves
from hypersphere.plot.runs import features, hardness
from hypersphere.plot.style import save
from hypersphere.plot.weighted import weighted_energy, weighted_paths

__all__ = [
    "Curves",
    "annealed",
    "class_size",
    "confusion",
    "curves",
    "dynamics",
    "energy_curves",
    "features",
    "gradients",
    "hardness",
    "landscapes",
    "learned",
    "margins",
    "plot_angle_step",
    "plot_angulars",
    "plot_filters",
    "plot_magnitudes",
    "plot_operator_field",
    "plot_operator_geometry",
    "plot_operators",
    "plot_parameters",
    "recognition",
    "recognition_curves",
    "run_landscape",
    "save",
    "schedule",
    "target_gradient",
    "weighted_energy",
    "weighted_paths",
]
