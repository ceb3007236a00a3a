"""Layers by name, so that a model can be built with another layer family without touching the model.

A layer family is a pair of factories with the signatures of ``torch.nn.Conv2d`` and ``torch.nn.Linear``. Model
builders take ``conv=``, ``linear=``, ``norm=`` and ``act=``: a name from the registries here, or a factory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hypersphere.registry import Registry

LayerFactory = Callable[..., nn.Module]

layers: Registry[nn.Module] = Registry("layer", positional=())


def create(name: str, *args: Any, **options: Any) -> nn.Module:
    """Build a layer by name with the arguments of torch's layer of that kind.

    Example:
        >>> create("conv2d", 3, 8, 3, padding=1).weight.shape
        torch.Size([8, 3, 3, 3])
    """
    return layers[name].factory(*args, **options)


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
    "relu": nn.ReLU,
    "prelu": nn.PReLU,
}.items():
    layers.register(_name)(_layer)

__all__ = ["LayerFactory", "create", "factory", "layers"]
