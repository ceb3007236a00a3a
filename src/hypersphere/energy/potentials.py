r"""Potentials of a pair of directions, as functions of their squared chord.

The squared chord :math:`q = \|u - v\|^2 = 2 - 2\cos\theta` keeps its digits where two directions nearly meet, which
the cosine does not; every potential here is therefore a function of q, together with its slope.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from hypersphere.errors import ArgumentError, check_range
from hypersphere.registry import Member, Registry


def create(name: str | Potential, **options: float) -> Potential:
    """Build a potential by name; an instance is passed through.

    Example:
        >>> create("riesz", s=1.0)(torch.tensor(4.0))
        tensor(0.5000)
    """
    return name if isinstance(name, Potential) else potentials.create(name, **options)


@dataclass(frozen=True)
class Potential(metaclass=Member):
    """What a pair of directions adds to an energy; a subclass defines value and slope.

    Example:
        >>> Riesz(2.0)(torch.tensor([2.0, 4.0]))
        tensor([0.5000, 0.2500])
    """

    @property
    def mirrored(self) -> bool:
        """Whether value and slope take, as a second argument, the squared chord with the mirror image.

        It is 4 less that of the pair, but keeps the digits of pairs that are nearly opposite, which the other loses.
        """
        return False

    def code(self) -> tuple[str, list[float]]:
        """A name and numbers that :func:`decode` turns back into the potential: operations take no objects."""
        entry = potentials.find(type(self))
        if entry is None:
            raise ArgumentError("potential", f"must be of a registered class (potentials.register), got {self!r}")
        return entry.name, [float(value) for value in astuple(self)]

    def __call__(self, q: Tensor) -> Tensor:
        """Value at squared chords ``q`` > 0, same shape; differentiable."""
        raise NotImplementedError

    def slope(self, q: Tensor) -> Tensor:
        """Derivative of the value by ``q``, same shape."""
        raise NotImplementedError

    def both(self, q: Tensor, *mirrored: Tensor) -> tuple[Tensor, Tensor]:
        """Value and slope, without repeating what they share."""
        return self(q, *mirrored), self.slope(q, *mirrored)


potentials: Registry[Potential] = Registry("potential", kind=Potential)


@potentials.register("riesz")
@dataclass(frozen=True)
class Riesz(Potential):
    r"""Riesz kernel :math:`z^{-s}`, or :math:`\log(1/z)` for s = 0, or :math:`-z^{-s}` for s < 0, of a distance z.

    Args:
        s: Exponent.
        angular: Take the angle as distance, not the chord.
        half_turns: Measure angles in half turns, not in radians.
        offset: Added to an angle.
        factor: Multiplies the value.

    Example:
        >>> Riesz(1.0)(torch.tensor([1.0, 4.0]))
        tensor([1.0000, 0.5000])
    """

    contract: ClassVar[Mapping[str, Any]] = {
        "variants": (
            *({"s": s, "angular": angular} for s in (-1.0, 0.0, 1.0, 2.5) for angular in (False, True)),
            {"angular": True, "half_turns": True, "offset": 1e-2, "factor": 2.0},
        )
    }

    s: float = 2.0
    angular: bool = False
    half_turns: bool = False
    offset: float = 0.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_range("s", self.s)
        if math.isinf(self.s):
            raise ArgumentError("s", f"must be finite, got {self.s}")

    @property
    def mirrored(self) -> bool:
        """Angles have all their digits where both chords of a pair have."""
        return self.angular

    def __call__(self, q: Tensor, p: Tensor | None = None) -> Tensor:
        """Value at squared chords."""
        base, s = q, self.s / 2
        if self.angular:
            p = _image(q, p)
            # Opposite directions are moved apart in the derivative alone.
            root = (p + (least_opposite(p.dtype) - p).clamp(min=0).detach()).sqrt()
            root = root - (root - p.sqrt()).detach()
            base, s = 2 * self._unit * torch.atan2(q.sqrt(), root) + self.offset, self.s
        if self.s == 0:
            return base.log() * (-self.factor if self.angular else -self.factor / 2)
        return base.pow(-s) * math.copysign(self.factor, self.s)

    def slope(self, q: Tensor, p: Tensor | None = None) -> Tensor:
        """Derivative by the squared chord."""
        if self.angular:
            return self._angular(q, _image(q, p))[1]
        return q.pow(-self.s / 2 - 1) * (-self.factor * (abs(self.s) or 1.0) / 2)

    def both(self, q: Tensor, *mirrored: Tensor) -> tuple[Tensor, Tensor]:
        """Value and slope; powers are slow, so the common exponents do without."""
        if self.angular:
            return self._angular(q, _image(q, *mirrored))
        if self.s not in (1, 2):
            return super().both(q)
        value = q.rsqrt() if self.s == 1 else q.reciprocal()
        slope = (value / q).mul_(-self.factor * self.s / 2)
        return value if self.factor == 1 else value * self.factor, slope

    @property
    def _unit(self) -> float:
        """What a radian is."""
        return 1 / math.pi if self.half_turns else 1.0

    def _angular(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """Value and slope of angles at both squared chords."""
        angle = torch.atan2(q.sqrt(), p.sqrt()).mul_(2 * self._unit).add_(self.offset)
        spread = (q * p.clamp(min=least_opposite(p.dtype))).rsqrt_()
        value = angle.log() if self.s == 0 else angle.pow(-self.s)
        rate = spread.div_(angle) if self.s == 0 else spread.div_(angle).mul_(value)
        rate.mul_(-self.factor * (abs(self.s) or 1.0) * self._unit)
        return value.mul_(math.copysign(self.factor, self.s) if self.s else -self.factor), rate


def least_opposite(dtype: torch.dtype) -> float:
    """Least squared chord with a mirror image: the slope of an angle by the chord grows no further.

    At opposite directions it would be infinite, but there no direction's gradient has a tangent part.

    Example:
        >>> least_opposite(torch.float64)
        1e-14
    """
    return max(torch.finfo(dtype).eps / 1000, 1e-14)


def _image(q: Tensor, p: Tensor | None = None) -> Tensor:
    """Squared chords with the mirror images, taken from those of the pairs where they are not known."""
    return (4 - q).clamp(min=0) if p is None else p


@potentials.register("gaussian")
@dataclass(frozen=True)
class Gaussian(Potential):
    r"""Gaussian kernel :math:`\exp(-t z^2)` of the chord z.

    Args:
        t: Sharpness, greater than 0.

    Example:
        >>> Gaussian(0.5)(torch.tensor([0.0, 2.0]))
        tensor([1.0000, 0.3679])
    """

    contract: ClassVar[Mapping[str, Any]] = {"variants": ({"t": 0.5},)}

    t: float = 2.0

    def __post_init__(self) -> None:
        check_range("t", self.t, 0, open_low=True)

    def __call__(self, q: Tensor) -> Tensor:
        """Value at squared chords."""
        return (-self.t * q).exp()

    def slope(self, q: Tensor) -> Tensor:
        """Derivative by the squared chord."""
        return (-self.t * q).exp() * -self.t


@potentials.register("softplus")
@dataclass(frozen=True)
class Softplus(Potential):
    r"""Smooth hinge of the cosine, :math:`\log(1 + \exp(L (c - 1)))` with :math:`c = 1 - z^2 / 2`.

    Args:
        steepness: L, greater than 0.

    Example:
        >>> Softplus()(torch.tensor([0.0, 4.0]))
        tensor([6.9315e-01, 2.0612e-09])
    """

    contract: ClassVar[Mapping[str, Any]] = {"variants": ({"steepness": 1.0},)}

    steepness: float = 10.0

    def __post_init__(self) -> None:
        check_range("steepness", self.steepness, 0, open_low=True)

    def __call__(self, q: Tensor) -> Tensor:
        """Value at squared chords."""
        return functional.softplus(-self.steepness / 2 * q, threshold=50)

    def slope(self, q: Tensor) -> Tensor:
        """Derivative by the squared chord."""
        return -self.steepness / 2 * (-self.steepness / 2 * q).sigmoid()


def decode(name: str, numbers: Sequence[float]) -> Potential:
    """The potential with this code."""
    return potentials[name].factory(*numbers)
