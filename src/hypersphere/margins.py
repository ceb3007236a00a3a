r"""Margins: what a head puts in place of :math:`\cos\theta_y` for the target, the class that a sample belongs to.

A margin maps the angle to the target's weight to a smaller target value :math:`\psi(\theta) \le \cos\theta`, so that
training goes on until the class is tighter than correct classification alone needs. Margins act on ``(B,)`` target
values only: their cost does not depend on the number of classes.

A margin is called on cosines, its :meth:`Margin.psi` on angles; ``m`` is a number or a tensor that broadcasts.
A margin of your own is a subclass (or :func:`register` around a function of the angle) and can be used in every head::

    @margins.register("square")
    class Square(Margin):
        '''theta -> cos(theta) - m theta^2.'''

        def psi(self, theta: Tensor, m: Parameter) -> Tensor:
            return theta.cos() - m * theta.square()

    MarginSoftmax(512, 1000, psi="square", m=0.1, s=64)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from hypersphere import angular
from hypersphere.angular import Angular, Cosine
from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.geometry import arccos, at_least_float32
from hypersphere.registry import Member, Registry

Parameter: TypeAlias = float | Tensor
"""A margin's size: one number, or a tensor that broadcasts against the target values."""

BEYOND = ("tangent", "clip", "fallback", "raw", "easy")


def create(name: str | Mapping[str, Any] | Margin, **options: Any) -> Margin:
    """Build a margin by name, or from a mapping of its name and options; an instance is passed through.

    Example:
        >>> create("additive-angle", beyond="easy"), create({"name": "additive-angle", "beyond": "easy"})
        (AdditiveAngle(beyond='easy'), AdditiveAngle(beyond='easy'))
    """
    return margins.resolve(name, **options)


def register(name: str, psi: Callable[..., Tensor]) -> None:
    """Make a function ``psi(theta, m)`` of the angle a margin that heads can name.

    Example:
        >>> register("shifted", lambda theta, m: theta.cos() - m * (theta > 1))
        >>> create("shifted").psi(torch.tensor(2.0), m=0.5)
        tensor(-0.9161)
    """
    custom = type("Custom", (Margin,), {"psi": lambda self, theta, **m: psi(theta, **m), "__doc__": psi.__doc__})
    margins.register(name)(custom)


@dataclass(frozen=True)
class Margin(metaclass=Member):
    """A target function; a subclass defines it on angles and, where that is cheaper, on cosines."""

    def psi(self, theta: Tensor, **m: Any) -> Tensor:
        """Target value at angles in [0, pi]."""
        raise NotImplementedError

    def __call__(self, cosines: Tensor, **m: Any) -> Tensor:
        """Target value at the angles of these cosines, same shape, in float32 or wider."""
        return self.psi(arccos(cosines), **m)

    def takes_angle(self, **m: Any) -> bool:
        """Whether the value is made of the angle, whose digits near 0 and pi no cosine holds."""
        return type(self).__call__ is Margin.__call__

    def slope(self, theta: Tensor, **m: Any) -> Tensor:
        """Derivative of :meth:`psi` by the angle, same shape.

        Example:
            >>> AdditiveCosine().slope(torch.tensor(torch.pi / 2), m=0.35)
            tensor(-1.)
        """
        with torch.enable_grad():
            leaf = theta.detach().clone().requires_grad_()
            return torch.autograd.grad(self.psi(leaf, **m).sum(), leaf)[0]

    def check(self, **m: float) -> None:
        """Raise :class:`ArgumentError` for a size that the margin does not allow."""

    def of(self, g: Angular) -> Margin:
        """The same margin of the angular function of a head, where it has none of its own."""
        return self


margins: Registry[Margin] = Registry("margin", kind=Margin)
_COSINE = Cosine()  # where none is given: another cosine is a choice


@margins.register("none")
@dataclass(frozen=True)
class NoMargin(Margin):
    r"""No margin: :math:`\psi = g`.

    Args:
        g: Angular function, by name or as an instance; by default that of the head, or the cosine.

    Example:
        >>> NoMargin()(torch.tensor(0.5))
        tensor(0.5000)
    """

    g: Angular = _COSINE

    def __post_init__(self) -> None:
        object.__setattr__(self, "g", angular.create(self.g))

    def of(self, g: Angular) -> Margin:
        """The same of the angular function of a head, where it has none of its own."""
        return replace(self, g=g) if self.g is _COSINE else self

    def takes_angle(self, **m: Any) -> bool:
        """As g is."""
        return self.g.of_angle

    def psi(self, theta: Tensor, **m: Any) -> Tensor:
        """Value of g."""
        return self.g(theta)

    def __call__(self, cosines: Tensor, **m: Any) -> Tensor:
        """Value of g at the angles of these cosines."""
        return self.g.of_cosine(cosines)


@margins.register("multiplicative")
@dataclass(frozen=True)
class Multiplicative(Margin):
    r"""Multiplicative angular margin of L-Softmax, A-Softmax and GA-Softmax, extended to decrease on [0, pi].

    .. math:: \psi(\theta) = g(m\theta - k\pi) - 2k, \quad k = \lfloor m\theta/\pi \rfloor

    For the cosine and an integer ``m`` it is evaluated as the Chebyshev polynomial of the cosine, so no angle is taken
    and the slope is finite everywhere. ``m >= 1``; 1 is no margin. Values lie in [1 - 2m, 1].

    Args:
        g: Angular function, by name or as an instance; by default that of the head, or the cosine.

    Example:
        >>> Multiplicative()(torch.tensor([1.0, 0.0, -1.0]), m=4)
        tensor([ 1., -3., -7.])
    """

    g: Angular = _COSINE

    def __post_init__(self) -> None:
        object.__setattr__(self, "g", angular.create(self.g))
        if isinstance(self.g, angular.Linear) and self.g != angular.Linear():
            raise ArgumentError("g", f"must fall from 1 to -1 to be extended beyond pi, got {self.g}")

    def of(self, g: Angular) -> Margin:
        """The same of the angular function of a head, where it has none of its own."""
        return replace(self, g=g) if self.g is _COSINE else self

    def check(self, **m: float) -> None:
        """At least 1."""
        check_range("m", m["m"], 1)

    def takes_angle(self, *, m: Parameter, **_: Any) -> bool:
        """But for polynomials of the cosine."""
        if isinstance(m, Tensor):
            return True
        return self.g.of_angle if m == 1 else not (isinstance(self.g, Cosine) and float(m).is_integer())

    def psi(self, theta: Tensor, *, m: Parameter, **_: Any) -> Tensor:
        """Target value at angles."""
        turns = (m * theta.detach() / math.pi).floor()
        # No tensor is made of a number here: on a GPU that would be a copy to wait for.
        last = torch.minimum(turns, m.ceil() - 1) if isinstance(m, Tensor) else turns.clamp(max=math.ceil(m) - 1)
        k = last.clamp(min=0)
        return self.g(m * theta - k * math.pi) - 2 * k

    def __call__(self, cosines: Tensor, *, m: Parameter, **_: Any) -> Tensor:
        """Target value at the angles of these cosines."""
        if isinstance(m, Tensor):
            return self.psi(arccos(cosines), m=m)
        if m == 1:
            return self.g.of_cosine(cosines)
        if not (isinstance(self.g, Cosine) and float(m).is_integer()):
            return self.psi(arccos(cosines), m=m)
        # T_m by its recurrence; k counts the branch points cos(j pi / m) at or above c.
        c = at_least_float32(cosines)
        previous, polynomial = torch.ones_like(c), c
        for _step in range(int(m) - 1):
            previous, polynomial = polynomial, 2 * c * polynomial - previous
        k = sum((c <= math.cos(j * math.pi / m)).to(c.dtype) for j in range(1, int(m)))
        return (1 - 2 * (k % 2)) * polynomial - 2 * k


@margins.register("clipped-multiplicative")
@dataclass(frozen=True)
class ClippedMultiplicative(Margin):
    r"""Multiplicative margin cut at the end: :math:`\psi(\theta) = \cos(\min(m\theta, \pi))`, :math:`m \ge 1`.

    Example:
        >>> ClippedMultiplicative()(torch.tensor([1.0, 0.0, -1.0]), m=1.5)
        tensor([ 1.0000, -0.7071, -1.0000])
    """

    def check(self, **m: float) -> None:
        """At least 1."""
        check_range("m", m["m"], 1)

    def takes_angle(self, *, m: Parameter, **_: Any) -> bool:
        """Where there is a margin."""
        return isinstance(m, Tensor) or m != 1

    def psi(self, theta: Tensor, *, m: Parameter, **_: Any) -> Tensor:
        """Target value at angles."""
        return (m * theta).clamp(max=math.pi).cos()

    def __call__(self, cosines: Tensor, *, m: Parameter, **_: Any) -> Tensor:
        """Target value at the angles of these cosines."""
        if not isinstance(m, Tensor) and m == 1:
            return at_least_float32(cosines)
        return self.psi(arccos(cosines), m=m)


@margins.register("additive-cosine")
@dataclass(frozen=True)
class AdditiveCosine(Margin):
    r"""Additive margin on the cosine: :math:`\psi(\theta) = \cos\theta - m`, :math:`m \ge 0`.

    Example:
        >>> AdditiveCosine()(torch.tensor([1.0, 0.0]), m=0.25)
        tensor([ 0.7500, -0.2500])
    """

    def check(self, **m: float) -> None:
        """At least 0."""
        check_range("m", m["m"], 0)

    def psi(self, theta: Tensor, *, m: Parameter, **_: Any) -> Tensor:
        """Target value at angles."""
        return theta.cos() - m

    def __call__(self, cosines: Tensor, *, m: Parameter, **_: Any) -> Tensor:
        """Target value at the angles of these cosines."""
        return at_least_float32(cosines) - m


@margins.register("additive-angle")
@dataclass(frozen=True)
class AdditiveAngle(Margin):
    r"""Additive margin on the angle: :math:`\psi(\theta) = \cos(\theta + m)`, :math:`m \in [0, \pi]`.

    Past :math:`\theta = \pi - m` the cosine would rise again. ``beyond`` says what happens there. With ``"tangent"``
    the target falls everywhere, and smoothly: a straight line takes over where the cosine still falls with the slope
    :math:`-\sin\bar m`,

    .. math:: \psi(\theta) = \cos(\min(\theta, \theta_0) + m) - \sin\bar m\,[\theta - \theta_0]_+, \quad
        \theta_0 = \pi - 2 \bar m, \quad \bar m = \min(m, \pi / 2)

    down to :math:`-\cos m - 2m \sin m` at pi (for :math:`m \le \pi / 2`), which is below -1. ``"clip"`` stays at -1
    (decreasing and continuous), ``"fallback"`` is :math:`\cos\theta - m \sin m` (decreasing, with a step down),
    ``"raw"`` lets it rise, ``"easy"`` puts the margin on angles below pi/2 only (not decreasing either). Each of these
    is flat somewhere, and a feature there is not pulled towards its class.

    Args:
        beyond: ``"tangent"``, ``"clip"``, ``"fallback"``, ``"raw"`` or ``"easy"``.

    Example:
        >>> AdditiveAngle()(torch.tensor([1.0, 0.0, -1.0]), m=0.5)
        tensor([ 0.8776, -0.4794, -1.3570])
    """

    beyond: str = "tangent"

    def __post_init__(self) -> None:
        check_choice("beyond", self.beyond, BEYOND)

    def check(self, **m: float) -> None:
        """In [0, pi]."""
        if m["m"] >= 10:
            meant = f"{m['m']:g} degrees are {math.radians(m['m']):.3g}"
            raise ArgumentError("m", f"is in radians and must be at most {math.pi:g}, got {m['m']:g} ({meant})")
        check_range("m", m["m"], 0, math.pi)

    def takes_angle(self, *, m: Parameter, **_: Any) -> bool:
        """Where there is a margin."""
        return isinstance(m, Tensor) or m != 0

    def psi(self, theta: Tensor, *, m: Parameter, **_: Any) -> Tensor:
        """Target value at angles."""
        turned = theta + m
        if self.beyond == "clip":
            return turned.clamp(max=math.pi).cos()
        if self.beyond == "fallback":
            drop = m * (m.sin() if isinstance(m, Tensor) else math.sin(m))
            return torch.where(turned < math.pi, turned.cos(), theta.cos() - drop)
        if self.beyond == "easy":
            return torch.where(theta < math.pi / 2, turned.cos(), theta.cos())
        if self.beyond == "tangent":
            # As a margin pi/2 leaves no angle to the cosine, a larger one has the line from the start.
            angle = m.clamp(max=math.pi / 2) if isinstance(m, Tensor) else min(m, math.pi / 2)
            slope = angle.sin() if isinstance(angle, Tensor) else math.sin(angle)
            past = (theta - (math.pi - 2 * angle)).clamp(min=0)  # with the slope of the line where it begins
            return (theta - past + m).cos() - slope * past
        return turned.cos()

    def __call__(self, cosines: Tensor, *, m: Parameter, **_: Any) -> Tensor:
        """Target value at the angles of these cosines."""
        if not isinstance(m, Tensor) and m == 0:
            return at_least_float32(cosines)
        return self.psi(arccos(cosines), m=m)


@margins.register("combined")
@dataclass(frozen=True)
class Combined(Margin):
    r"""All three margins at once: :math:`\psi(\theta) = \cos(\min(m_1\theta + m_2, \pi)) - m_3`.

    :math:`m_1 > 0` (below 1 only together with :math:`m_2`), :math:`m_2 \in [0, \pi]`, :math:`m_3 \ge 0`.

    Example:
        >>> Combined()(torch.tensor([1.0, 0.0]), m1=1.0, m2=0.3, m3=0.2)
        tensor([ 0.7553, -0.4955])
    """

    contract: ClassVar[Mapping[str, Any]] = {"sizes": {"m1": (1.0, 1.5), "m2": (0.0, 0.3, 0.8), "m3": (0.0, 0.2)}}

    def check(self, **m: float) -> None:
        """The ranges above."""
        check_range("m1", m["m1"], 0, open_low=True)
        check_range("m2", m["m2"], 0, math.pi)
        check_range("m3", m["m3"], 0)

    def psi(self, theta: Tensor, **m: Any) -> Tensor:
        """Target value at angles, with ``m1``, ``m2`` and ``m3``."""
        return (m["m1"] * theta + m["m2"]).clamp(max=math.pi).cos() - m["m3"]


@margins.register("adaptive")
@dataclass(frozen=True)
class Adaptive(Margin):
    r"""AdaFace's margin, from an angular to a cosine margin with the quality :math:`z \in [-1, 1]` of the sample.

    .. math:: \psi(\theta) = \cos(\mathrm{clip}(\theta - m z, 0, \pi)) - (m + m z)

    Example:
        >>> Adaptive()(torch.tensor([0.0, 0.0]), m=0.4, z=torch.tensor([0.0, -1.0]))
        tensor([-0.4000, -0.3894])
    """

    contract: ClassVar[Mapping[str, Any]] = {"sizes": {"m": (0.2, 0.4), "z": (-1.0, 0.0, 0.7)}}

    def check(self, **m: float) -> None:
        """In [0, pi]."""
        check_range("m", m["m"], 0, math.pi)

    def psi(self, theta: Tensor, *, m: Parameter, z: Parameter = 0.0, **_: Any) -> Tensor:
        """Target value at angles."""
        shift = m * z
        return (theta - shift).clamp(0, math.pi).cos() - (m + shift)


@margins.register("circle")
@dataclass(frozen=True)
class Circle(Margin):
    r"""Circle loss' target: :math:`\alpha (\cos\theta - (1 - m))`, :math:`\alpha = [1 + m - \cos\theta]_+`.

    The bracket counts as a constant: slopes are those of training, with it held fixed.

    Example:
        >>> Circle()(torch.tensor([1.0, 0.0]), m=0.25)
        tensor([ 0.0625, -0.9375])
    """

    contract: ClassVar[Mapping[str, Any]] = {"neutral": None, "derivative": False, "sizes": {"m": (0.1, 0.25, 0.4)}}

    def check(self, **m: float) -> None:
        """In [0, 1]."""
        check_range("m", m["m"], 0, 1)

    def psi(self, theta: Tensor, *, m: Parameter, **_: Any) -> Tensor:
        """Target value at angles."""
        return self(theta.cos(), m=m)

    def __call__(self, cosines: Tensor, *, m: Parameter, **_: Any) -> Tensor:
        """Target value at the angles of these cosines."""
        c = at_least_float32(cosines)
        return (1 + m - c.detach()).relu() * (c - 1 + m)
