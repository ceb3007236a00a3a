r"""Angular functions :math:`g(\theta)`: what stands for the cosine in a layer's output or a head's logit.

Each decreases on [0, pi]. :meth:`Angular.__call__` takes angles, :meth:`Angular.of_cosine` takes cosines and avoids the
arccos wherever the function is one of the cosine itself.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hypersphere.errors import ArgumentError, check_range
from hypersphere.geometry import arccos, arccos_slope, at_least_float32, safe_sqrt
from hypersphere.registry import Member, Registry

_STEP = {torch.float32: 2.0**-23, torch.float64: 2.0**-52}
"""Distance from 1 at which an inverse stops."""


def create(name: str | Mapping[str, Any] | Angular, **options: Any) -> Angular:
    """Build an angular function by name, or from a mapping of its name and options; an instance is passed through.

    Example:
        >>> create("sigmoid", k=0.7), create({"name": "sigmoid", "k": 0.7})
        (Sigmoid(k=0.7), Sigmoid(k=0.7))
    """
    return angulars.resolve(name, **options)


@dataclass(frozen=True)
class Angular(metaclass=Member):
    """A function of an angle, given on angles or on cosines; a subclass defines at least one of the two."""

    def __call__(self, theta: Tensor) -> Tensor:
        """Value at angles in [0, pi], any shape."""
        return self.of_cosine(theta.cos())

    @property
    def of_angle(self) -> bool:
        """Whether it is made of the angle, whose digits near 0 and pi no cosine holds."""
        return type(self).__call__ is not Angular.__call__

    def of_cosine(self, cosines: Tensor) -> Tensor:
        """Value at the angles of these cosines, any shape, in float32 or wider."""
        return self(arccos(cosines))

    def slope_of_cosine(self, cosines: Tensor) -> Tensor:
        """Derivative of :meth:`of_cosine`, which a head with very many classes needs; same shape."""
        return arccos_slope(cosines) * self.slope(arccos(cosines))

    def slope(self, theta: Tensor) -> Tensor:
        """Derivative at angles in [0, pi], any shape."""
        raise NotImplementedError(f"{type(self).__name__} defines no slope")

    def cosine_at(self, values: Tensor) -> Tensor:
        """The cosine at which the function takes these values: the inverse of :meth:`of_cosine`, same shape.

        A layer keeps its output alone for the backward pass and finds the angles again by this. Where a function is
        flat, any cosine of the flat part will do.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no inverse")

    def slope_at(self, values: Tensor, cosines: Tensor) -> Tensor:
        """Derivative by the cosine where the function takes these values, at these cosines; same shape."""
        return self.slope_of_cosine(cosines)


def _slope_at(complement: Tensor) -> Tensor:
    """Derivative of the angle by its cosine from a right angle less the angle, bounded as that of ``arccos``."""
    return -1 / complement.cos().clamp(min=torch.finfo(complement.dtype).eps ** 0.5)


angulars: Registry[Angular] = Registry("angular function", kind=Angular)


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

    def cosine_at(self, values: Tensor) -> Tensor:
        """The values themselves."""
        return values


@angulars.register("linear")
@dataclass(frozen=True, repr=False)
class Linear(Angular):
    r"""Linear in the angle: :math:`g(\theta) = a\theta + b`, by default :math:`1 - 2\theta/\pi`.

    Args:
        a: Slope, less than 0.
        b: Value at angle 0.

    Example:
        >>> Linear().of_cosine(torch.tensor([1.0, 0.0, -1.0]))
        tensor([ 1.,  0., -1.])
    """

    a: float = -2 / math.pi
    b: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("a", self.a), ("b", self.b)):
            if not isinstance(value, numbers.Real) or not math.isfinite(value):
                raise ArgumentError(name, f"must be a finite number, got {value!r}")
        if self.a >= 0:
            raise ArgumentError("a", f"must be less than 0: the value falls with the angle, got {self.a}")

    def __repr__(self) -> str:
        usual = (type(self).a, type(self).b)
        return "Linear()" if (self.a, self.b) == usual else f"Linear(a={self.a}, b={self.b})"

    def __call__(self, theta: Tensor) -> Tensor:
        """Value at angles, any shape."""
        return self.b + theta * self.a

    def slope(self, theta: Tensor) -> Tensor:
        """Derivative at angles, the same everywhere."""
        return torch.full_like(theta, self.a)

    def slope_of_cosine(self, cosines: Tensor) -> Tensor:
        """Derivative by the cosine."""
        return arccos_slope(cosines) * self.a

    def cosine_at(self, values: Tensor) -> Tensor:
        """The cosine at which the function takes these values."""
        return self._complement_at(values).sin()

    def slope_at(self, values: Tensor, cosines: Tensor) -> Tensor:
        """Derivative by the cosine where the function takes these values, which tell the angle better than cosines."""
        return _slope_at(self._complement_at(values)) * self.a

    def _complement_at(self, values: Tensor) -> Tensor:
        """A right angle less the angle at which the function takes these values."""
        middle = self.b + self.a * (math.pi / 2)  # the value at a right angle
        return ((values - middle) * (-1 / self.a)).clamp(-math.pi / 2, math.pi / 2)


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

    def __call__(self, theta: Tensor, k: Tensor | None = None) -> Tensor:
        """Value at angles, any shape; the tanh form cannot overflow. A ``k`` that broadcasts replaces the own one."""
        steepness = self.k if k is None else k
        return ((math.pi / 2 - theta) / (2 * steepness)).tanh() / self._largest(k)

    def of_cosine(self, cosines: Tensor, k: Tensor | None = None) -> Tensor:
        """Value at the angles of these cosines."""
        return self(arccos(cosines), k)

    def slope(self, theta: Tensor, k: Tensor | None = None) -> Tensor:
        """Derivative at angles."""
        steepness = self.k if k is None else k
        tanh = ((math.pi / 2 - theta) / (2 * steepness)).tanh()
        return (tanh.square() - 1) / (2 * steepness * self._largest(k))

    def slope_of_cosine(self, cosines: Tensor, k: Tensor | None = None) -> Tensor:
        """Derivative by the cosine."""
        return arccos_slope(cosines) * self.slope(arccos(cosines), k)

    def cosine_at(self, values: Tensor, k: Tensor | None = None) -> Tensor:
        """The cosine at which the function takes these values; beyond the precision of a saturated value, +-1."""
        return self._complement_at(values, k).sin()

    def slope_at(self, values: Tensor, cosines: Tensor, k: Tensor | None = None) -> Tensor:
        """Derivative by the cosine where the function takes these values, at these cosines."""
        scale = -2 * (self.k if k is None else k) * self._largest(k)
        return (1 - self._tanh_at(values, k).square()) * _slope_at(self._complement_at(values, k)) / scale

    def k_slope_at(self, values: Tensor, k: Tensor) -> Tensor:
        """Derivative by ``k`` where the function takes these values."""
        tanh, largest = self._tanh_at(values, k), self._largest(k)
        edge = (1 - largest.square()) * (math.pi / 4) / (k * largest)
        return (edge * tanh - (1 - tanh.square()) * tanh.atanh()) / (k * largest)

    def _complement_at(self, values: Tensor, k: Tensor | None) -> Tensor:
        """A right angle less the angle at which the function takes these values."""
        steepness = self.k if k is None else k
        return (2 * steepness * self._tanh_at(values, k).atanh()).clamp(-math.pi / 2, math.pi / 2)

    def _tanh_at(self, values: Tensor, k: Tensor | None) -> Tensor:
        """The tanh of the formula where the function takes these values, short of +-1."""
        limit = 1 - _STEP[values.dtype]
        return (values * self._largest(k)).clamp(-limit, limit)

    def _largest(self, k: Tensor | None) -> Any:
        """Tanh at angle 0, by which the function is divided."""
        return math.tanh(math.pi / (4 * self.k)) if k is None else (math.pi / (4 * k)).tanh()


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

    def cosine_at(self, values: Tensor) -> Tensor:
        """The cosine at which the function takes these values."""
        return values.sign() * safe_sqrt(values.abs())


@angulars.register("relucos", aliases=("relu-cosine",))
@dataclass(frozen=True)
class ReluCosine(Angular):
    r"""A cosine and a ReLU in one: :math:`g(\theta) = \max(0, \cos\theta)`.

    Example:
        >>> ReluCosine().of_cosine(torch.tensor([0.5, -0.5]))
        tensor([0.5000, 0.0000])
    """

    contract: ClassVar[Mapping[str, Any]] = {"ends": (1.0, 0.0)}

    def of_cosine(self, cosines: Tensor) -> Tensor:
        """Value at the angles of these cosines."""
        return at_least_float32(cosines).relu()

    def slope(self, theta: Tensor) -> Tensor:
        """Derivative at angles."""
        return torch.where(theta < math.pi / 2, -theta.sin(), 0.0)

    def slope_of_cosine(self, cosines: Tensor) -> Tensor:
        """Derivative by the cosine."""
        return (cosines > 0).to(cosines.dtype)

    def cosine_at(self, values: Tensor) -> Tensor:
        """The values themselves; 0 stands for every negative cosine."""
        return values
