"""Deep learning on the hypersphere: losses, layers, regularisers and training on directions.

The core (everything importable from here) needs torch and numpy only; the workbench (``hypersphere.train``,
``hypersphere.data``, ``hypersphere.cli`` and so on) comes with ``pip install "hypersphere[workbench]"``.

Example:
    >>> import torch, hypersphere as hs
    >>> head = hs.losses.ArcFace(16, 10)
    >>> loss = head(torch.randn(4, 16), torch.tensor([0, 3, 3, 9]))
    >>> loss.shape, head.logits(torch.randn(4, 16)).shape
    (torch.Size([]), torch.Size([4, 10]))
"""

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
    nn,
    optim,
    orthogonal,
    registry,
)

__version__ = "0.1.0"

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
    "nn",
    "optim",
    "orthogonal",
    "registry",
]
