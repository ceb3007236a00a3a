"""Losses without a margin: the linear classifier, and classifiers of directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hypersphere.angular import Angular, Sigmoid, create
from hypersphere.errors import ArgumentError
from hypersphere.losses.head import MarginSoftmax
from hypersphere.losses.registry import losses

STEEPNESS = 0.3
"""Of the sigmoid, where none is given."""


@losses.register("softmax")
class Softmax(MarginSoftmax):
    r"""Plain softmax cross-entropy on a linear classifier.

    .. math:: f_{ij} = \langle W_j, x_i \rangle + b_j

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        bias: Add a bias per class.
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> import torch
        >>> Softmax(3, 10)(torch.zeros(2, 3), torch.tensor([0, 1])).item()
        2.3025...
    """

    def __init__(self, dim: int, classes: int, *, bias: bool = True, **options: Any) -> None:
        super().__init__(dim, classes, unit_weights=False, bias=bias, **options)


@losses.register("w-softmax", aliases=("modified-softmax",))
class WSoftmax(MarginSoftmax):
    r"""W-Softmax: unit class weights, feature norm kept, no margin.

    .. math:: f_{ij} = \|x_i\| g(\theta_{ij})

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        g: Angular function: ``"cosine"``, ``"linear"``, ``"sigmoid"`` or ``"sqcos"``.
        k: Steepness of the sigmoid.
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> import torch
        >>> WSoftmax(3, 10, g="linear")(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    contract: ClassVar[Mapping[str, Any]] = {"variants": ({"g": "sigmoid"},)}

    def __init__(self, dim: int, classes: int, *, g: str | Angular = "cosine", k: float = 0.3, **options: Any) -> None:
        super().__init__(dim, classes, g=steep(g, k), **options)


@losses.register("s-softmax", aliases=("sphere-softmax",))
class SSoftmax(MarginSoftmax):
    r"""S-Softmax: unit class weights and features, constant scale, no margin.

    .. math:: f_{ij} = s\, g(\theta_{ij})

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        s: Scale; see :func:`suggest_scale`.
        g: Angular function: ``"cosine"``, ``"linear"``, ``"sigmoid"`` or ``"sqcos"``.
        k: Steepness of the sigmoid.
        learn_scale: Train the scale, from ``s`` on.
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> import torch
        >>> SSoftmax(3, 10)(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        s: float = 30.0,
        g: str | Angular = "cosine",
        k: float = 0.3,
        learn_scale: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(dim, classes, s=s, g=steep(g, k), learn_scale=learn_scale, **options)


@losses.register("normface", aliases=("norm-softmax",))
class NormFace(MarginSoftmax):
    r"""NormFace: softmax of scaled cosines with a learned scale and no margin.

    .. math:: f_{ij} = s \cos\theta_{ij}

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        s: Scale, or where it starts.
        learn_scale: Train the scale (at least 0.01 is kept).
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> import torch
        >>> NormFace(3, 10)(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    def __init__(self, dim: int, classes: int, *, s: float = 10.0, learn_scale: bool = True, **options: Any) -> None:
        super().__init__(dim, classes, s=s, learn_scale=learn_scale, **options)


def steep(g: str | Angular, k: float) -> Angular:
    """An angular function by name, the sigmoid of steepness ``k``, which no other one has.

    Example:
        >>> steep("sigmoid", 0.5)
        Sigmoid(k=0.5)
    """
    if g == "sigmoid":
        return Sigmoid(k)
    if k != STEEPNESS:
        raise ArgumentError("k", f"is the steepness of g='sigmoid' and has no meaning for {g!r}, got {k:g}")
    return create(g)
