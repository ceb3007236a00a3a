"""Decoupled layers and what turns a model into one made of them.

Model builders take ``conv=``, ``linear=``, ``norm=`` and ``act=``: the name of one of torch's layers (``layers``), or a
factory such as :func:`create` gives.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from hypersphere.nn import modules
from hypersphere.nn.convert import Report, Row, convert, fold, report, revert
from hypersphere.nn.functional import Window, decoupled
from hypersphere.nn.modules import *  # noqa: F403
from hypersphere.nn.norm import SphereNorm
from hypersphere.nn.operators import Operator, operator, operators
from hypersphere.nn.optimise import WeightProjection, init_from, project_weights, recalibrate, saturation
from hypersphere.registry import Registry

LayerFactory = Callable[..., nn.Module]

layers: Registry[nn.Module] = Registry("layer")


def factory(layer: str | LayerFactory) -> LayerFactory:
    """The layer factory called ``layer``, or ``layer`` itself where it is a factory already.

    Example:
        >>> factory("relu")()
        ReLU()
    """
    return layers[layer].factory if isinstance(layer, str) else layer


for _name, _layer in {
    "conv2d": nn.Conv2d,
    "linear": nn.Linear,
    "batchnorm2d": nn.BatchNorm2d,
    "identity": nn.Identity,
    "sphere-norm": SphereNorm,
    "relu": nn.ReLU,
    "prelu": nn.PReLU,
}.items():
    layers.register(_name)(_layer)

__all__ = [
    "LayerFactory",
    "Operator",
    "Report",
    "Row",
    "SphereNorm",
    "WeightProjection",
    "Window",
    "convert",
    "decoupled",
    "factory",
    "fold",
    "init_from",
    "layers",
    "operator",
    "operators",
    "project_weights",
    "recalibrate",
    "report",
    "revert",
    "saturation",
]
__all__ += modules.__all__
