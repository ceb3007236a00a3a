"""Deep learning on the hypersphere: losses, layers, regularisers and training on directions.

The core (everything importable from here but ``load`` and ``testing``) needs torch and numpy only; the workbench
(``hypersphere.train``, ``hypersphere.data``, ``hypersphere.cli`` and so on) comes with
``pip install "hypersphere[workbench]"``. Nothing is imported before it is used.

Example:
    >>> import torch, hypersphere as hs
    >>> head = hs.losses.ArcFace(16, 10)
    >>> loss = head(torch.randn(4, 16), torch.tensor([0, 3, 3, 9]))
    >>> loss.shape, head.logits(torch.randn(4, 16)).shape
    (torch.Size([]), torch.Size([4, 10]))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hypersphere import (
        angular,
        attacks,
        diagnostics,
        energy,
        errors,
        geometry,
        landscape,
        losses,
        margins,
        metrics,
        neurons,
        nn,
        optim,
        optimisers,
        orthogonal,
        registry,
        schedules,
        selection,
    )
    from hypersphere import testing as testing
    from hypersphere.optim import parameter_groups
    from hypersphere.runs import load as load

__version__ = "0.2.0"

__all__ = [
    "__version__",
    "angular",
    "attacks",
    "diagnostics",
    "energy",
    "errors",
    "geometry",
    "landscape",
    "losses",
    "margins",
    "metrics",
    "neurons",
    "nn",
    "optim",
    "optimisers",
    "orthogonal",
    "parameter_groups",
    "registry",
    "schedules",
    "selection",
]

_FUNCTIONS = {"load": "hypersphere.runs", "parameter_groups": "hypersphere.optim"}
_MODULES = {*__all__, "testing"} - {*_FUNCTIONS, "__version__"}


def __getattr__(name: str) -> Any:
    try:
        if name in _FUNCTIONS:
            return getattr(import_module(_FUNCTIONS[name]), name)
        if name in _MODULES:
            return import_module(f"hypersphere.{name}")
    except ModuleNotFoundError as error:
        if name != "load":
            raise
        raise import_module("hypersphere.errors").without_workbench("hypersphere.load", error) from error
    raise AttributeError(f"module 'hypersphere' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_FUNCTIONS, *_MODULES})
