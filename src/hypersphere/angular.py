r"""Angular functions :math:`g(\theta)`: what stands for the cosine in a layer's output or a head's logit.

Each decreases on [0, pi]. :meth:`Angular.__call__` takes angles, :meth:`Angular.of_cosine` takes cosines and avoids the
arccos wherever the function is one of the cosine itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hypersphere.errors import check_range
from hypersphere.geometry import arccos, arccos_slope, at_least_float32
from hypersphere.registry import Registry

angulars: Registry[Angular] = Registry("angular function")


def create(name: str | Angular, **options: Any) -> Angular:
    """Build an angular function by name; an instance is passed through.

    Example:
        >>> create("sigmoid", k=0.7)
        Sigmoid(k=0.7)
    """
    return name if isinstance(name, Angular) else angulars.create(name, **options)


@dataclass(frozen=True)
class Angular:
    """A function of an angle, given on angles or on cosines; a subclass defines at least one of the two."""

    def __call__(self, theta: Tensor) -> Tensor:
        """Value at angles in [0, pi], any shape."""
        return self.of_cosine(theta.cos())

    def of_cosine(self, cosines: Tensor) -> Tensor:
        """Value at the angles of these cosines, any shape, in float32 or wider."""
        return self(arccos(cosines))

    def slope_of_cosine(self, cosines: Tensor) -> Tensor:
        """Derivative of :meth:`of_cosine`, which a head with very many classes needs; same shape."""
        return arccos_slope(cosines) * self.slope(arccos(cosines))

    def slope(self, theta: Tensor) -> Tensor:
        """Derivative at angles in [0, pi], any shape."""
        raise NotImplementedError(f"{type(self).__name__} defines no slope")


@angulars.register("cosine", aliases=("cos",))
@dataclass(frozen=True)
class Cosine(Angular):
    r"""The cosine: :math:`g(\theta) = \cos\theta`.

    Example:
        >>> Cosine().of_cosine(torch.tensor([0.5]))
        tensor([0.5000])
    """

    def of_cosine(self, cosines: Tensor) -> Tensor:
        """The cosines themselves."""
        return at_least_float32(cosines)

    def slope(self, theta: Tensor) -> Tensor:
        """Derivative at angles."""
        return -theta.sin()

    def slope_of_cosine(self, cosines: Tensor) -> Tensor:
        """1 everywhere."""
        return torch.ones_like(cosines)


@angulars.register("linear")
@dataclass(frozen=True)
class Linear(Angular):
    r"""Linear in the angle: :math:`g(\theta) = 1 - 2\theta/\pi`, with the same slope everywhere.

    Example:
        >>> Linear().of_cosine(torch.tensor([1.0, 0.0, -1.0]))
        tensor([ 1.,  0., -1.])
    """

    def __call__(self, theta: Tensor) -> Tensor:
        """Value at angles, any shape."""
        return 1 - theta * (2 / math.pi)

    def slope(self, theta: Tensor) -> Tensor:
        """Derivative at angles, the same everywhere."""
        return torch.full_like(theta, -2 / math.pi)


@angulars.register("sigmoid")
@dataclass(frozen=True)
class Sigmoid(Angular):
    r"""Sigmoid of the angle, from a step (small k) to linear (large k).

    .. math:: g(\theta) = \tanh\Big(\frac{\pi/2 - \theta}{2k}\Big) \Big/ \tanh\Big(\frac{\pi}{4k}\Big)

    Args:
        k: Steepness, greater than 0.

    Example:
        >>> Sigmoid(0.3)(torch.tensor(1.0))
        tensor(0.7483)
    """

    k: float = 0.3

    def __post_init__(self) -> None:
        check_range("k", self.k, 0, open_low=True)

    def __call__(self, theta: Tensor) -> Tensor:
        """Value at angles, any shape; the tanh form cannot overflow."""
        return ((math.pi / 2 - theta) / (2 * self.k)).tanh() / math.tanh(math.pi / (4 * self.k))

    def slope(self, theta: Tensor) -> Tensor:
        """Derivative at angles."""
        tanh = ((math.pi / 2 - theta) / (2 * self.k)).tanh()
        return (tanh.square() - 1) / (2 * self.k * math.tanh(math.pi / (4 * self.k)))


@angulars.register("sqcos", aliases=("square-cosine",))
@dataclass(frozen=True)
class SquareCosine(Angular):
    r"""Square cosine with the sign kept: :math:`g(\theta) = \cos\theta\,|\cos\theta|`.

    Example:
        >>> SquareCosine().of_cosine(torch.tensor([0.5, -0.5]))
        tensor([ 0.2500, -0.2500])
    """

    def of_cosine(self, cosines: Tensor) -> Tensor:
        """Value at the angles of these cosines."""
        c = at_least_float32(cosines)
        return c * c.abs()

    def slope(self, theta: Tensor) -> Tensor:
        """Derivative at angles."""
        return -2 * theta.cos().abs() * theta.sin()

    def slope_of_cosine(self, cosines: Tensor) -> Tensor:
        """Derivative by the cosine."""
        return 2 * cosines.abs()


@angulars.register("relucos", aliases=("relu-cosine",))
@dataclass(frozen=True)
class ReluCosine(Angular):
    r"""A cosine and a ReLU in one: :math:`g(\theta) = \max(0, \cos\theta)`.

    Example:
        >>> ReluCosine().of_cosine(torch.tensor([0.5, -0.5]))
        tensor([0.5000, 0.0000])
    """

    def of_cosine(self, cosines: Tensor) -> Tensor:
        """Value at the angles of these cosines."""
        return at_least_float32(cosines).relu()

    def slope(self, theta: Tensor) -> Tensor:
        """Derivative at angles."""
        return torch.where(theta < math.pi / 2, -theta.sin(), 0.0)

    def slope_of_cosine(self, cosines: Tensor) -> Tensor:
        """Derivative by the cosine."""
        return (cosines > 0).to(cosines.dtype)
