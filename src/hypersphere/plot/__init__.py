"""Pictures for papers and slides: margins, gradients, features and hardness as matplotlib figures.

Every function returns a :class:`matplotlib.figure.Figure` that belongs to no window and no global state; :func:`save`
writes it as PNG, SVG or PDF. The command line has the same: ``hypersphere plot --help``.

Example:
    >>> from hypersphere import losses
    >>> figure = margins({"ArcFace": losses.ArcFace(2, 2)})
    >>> [axes.get_title(loc="left").split(" ")[0] for axes in figure.axes[:3]]
    ['(a)', '(b)', '(c)']
"""

from hypersphere.plot.directions import gradients, target_gradient
from hypersphere.plot.heads import Curves, annealed, curves, margins, schedule
from hypersphere.plot.runs import features, hardness
from hypersphere.plot.style import save

__all__ = [
    "Curves",
    "annealed",
    "curves",
    "features",
    "gradients",
    "hardness",
    "margins",
    "save",
    "schedule",
    "target_gradient",
]
