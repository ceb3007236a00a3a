"""A learned rotation of fixed class vectors: a classifier whose parameters do not grow with the number of classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from hypersphere.errors import ArgumentError, check_range
from hypersphere.geometry import at_least_float32, transformed
from hypersphere.orthogonal.algebra import product
from hypersphere.orthogonal.maps import Map, create


class ClassRotation(nn.Module):
    r"""Rotates features so that fixed class vectors act as if they were rotated: :math:`\langle R v, x \rangle`.

    .. math:: \langle R v_c, x \rangle = \langle v_c, R^\top x \rangle, \qquad R = \text{map}(\text{free})

    The product with the features costs :math:`B d^2`, whatever the number of classes, and R keeps their norms. It is
    what ``rotation="cayley"`` makes in a head; see :class:`MarginSoftmax`.

    Args:
        dim: Feature dimension D.
        map: Orthogonal map, by name or as an instance; ``hypersphere list orthogonal`` prints the names.

    Shape:
        features ``(B, D)`` to the same.

    Example:
        >>> rotation = ClassRotation(4, "cayley")
        >>> rotation(torch.ones(2, 4)).shape, rotation.count
        (torch.Size([2, 4]), 6)
    """

    is_rotation: ClassVar[bool] = True
    """How parameter groups know the parameters that weight decay must spare: it would rotate the classes back."""
    carried: Tensor | None
    signs: Tensor | None

    def __init__(self, dim: int, map: str | Map = "cayley") -> None:
        super().__init__()
        check_range("dim", dim, 1)
        self.dim, self.map = dim, create(map) if isinstance(map, str) else map
        self.free = nn.Parameter(self.map.start(dim))
        self.register_buffer("signs", self.map.signs(dim), persistent=False)
        self.register_buffer("carried", self.map.warm_start(self.free.detach()))

    @property
    def count(self) -> int:
        """Number of unconstrained parameters; ``free`` may hold more numbers than its map reads."""
        return self.map.free(self.dim)

    @property
    def matrix(self) -> Tensor:
        """R, ``(D, D)`` in float32 or wider; the identity at the start."""
        free = at_least_float32(self.free)
        if self.carried is not None and self.training and torch.is_grad_enabled() and not transformed():
            found, carried = self.map.refine(free, at_least_float32(self.carried))
            with torch.no_grad():
                self.carried.copy_(carried)
        else:  # from the start: the parameter may be another one, a running average say
            found = self.map(free)
        return found if self.signs is None else found * self.signs

    def forward(self, features: Tensor) -> Tensor:
        r"""Turn features by :math:`R^\top`; in float32 or wider."""
        return self._product(features, self.matrix)

    def vectors(self, weight: Tensor) -> Tensor:
        r"""The class vectors :math:`R v` that fixed ones ``(C, D)`` act as; in float32 or wider."""
        return self._product(weight, self.matrix.mT)

    @staticmethod
    def _product(x: Tensor, matrix: Tensor) -> Tensor:
        x = at_least_float32(x)
        return product(x, matrix.to(x.dtype))

    def extra_repr(self) -> str:
        """The map, the size and the number of unconstrained parameters."""
        return f"{self.map}, dim={self.dim}, parameters={self.count}"


def make_rotation(dim: int, rotation: str | Callable[[Tensor], Tensor] | None) -> nn.Module | None:
    """What a head applies to its features: a module as it is, the name of an orthogonal map as a new rotation.

    Example:
        >>> make_rotation(4, "cayley").count
        6
    """
    turn = ClassRotation(dim, rotation) if isinstance(rotation, str) else rotation
    if isinstance(turn, ClassRotation):
        if turn.dim != dim:
            raise ArgumentError("rotation", f"must have dimension {dim}, got {turn.dim}")
        if not turn.map.orthogonal:  # lengths and angles would change, and with them what a head compares
            raise ArgumentError("rotation", f"must be an orthogonal map, got {turn.map}")
    elif turn is not None and not isinstance(turn, nn.Module):
        raise ArgumentError("rotation", f"must be the name of an orthogonal map or a module, got {turn!r}")
    return turn
