r"""Rules of negatives: what happens to the logits of the non-target classes, those a sample does not belong to.

A rule gives the value :math:`\eta` that stands in the logit :math:`\text{scale}_i\,\eta_{ij}` of a non-target class,
and how the logits of all non-target classes become one number per sample: their log-sum-exp (softmax members) or the
sum of a term of each (binary members).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from hypersphere import angular
from hypersphere.angular import Angular, Cosine
from hypersphere.geometry import arccos, arccos_slope
from hypersphere.margins import AdditiveAngle, Parameter
from hypersphere.registry import Member, Registry

_known: WeakValueDictionary[str, Negatives] = WeakValueDictionary()
_count = itertools.count()
_COSINE = Cosine()  # where none is given: another cosine is a choice


@lru_cache(maxsize=64)
def lookup(key: str) -> Negatives:
    """The rule with this key, which is known from the moment it is built for as long as it is used.

    Nothing but the rule's head keeps it, and a backward pass that is still to come. A compiled one cannot, so the rules
    looked up last stay, too.
    """
    return _known[key]


def create(name: str | Mapping[str, Any] | Negatives, **options: Any) -> Negatives:
    """Build a rule by name, or from a mapping of its name and options; an instance is passed through.

    Example:
        >>> create("hinge", power=2), create({"name": "hinge", "power": 2})
        (HingeNegatives(detach=False, power=2), HingeNegatives(detach=False, power=2))
    """
    return rules.resolve(name, **options)


@dataclass(frozen=True)
class Negatives(metaclass=Member):
    r"""A rule of the non-target classes; a subclass defines the value and its slope.

    A rule of your own is a frozen dataclass. It defines ``_value`` and ``_slope``, its derivative by the cosine, and
    where these take more than cosines, :meth:`parameters`; where no softmax follows, ``softmax = False``, :meth:`term`,
    :meth:`term_slope` and :meth:`target_term`::

        @negatives.register("squared")
        @dataclass(frozen=True)
        class Squared(Negatives):
            '''Only the strength of a similarity counts, not its sign.'''

            def _value(self, cosines, *parameters):
                return cosines.square()

            def _slope(self, cosines, *parameters):
                return 2 * cosines

        MarginSoftmax(512, 1000, s=64.0, negatives="squared")

    Args:
        detach: Characteristic gradient detachment: the value is used, the slope is that of the cosine. Heads set
            it by their ``gradient``.

    Example:
        >>> Plain().value(torch.tensor([0.5]))
        tensor([0.5000])
    """

    detach: bool = field(default=False, kw_only=True)

    key: str = field(init=False, repr=False, compare=False)
    """The name under which operations that take only tensors and texts find the rule."""

    plain: ClassVar[bool] = False
    """Whether the value is the cosine itself."""
    softmax: ClassVar[bool] = True
    """Reduction: log-sum-exp of the logits, or the sum of :meth:`term` of each."""
    of_chords: ClassVar[bool] = False
    """Whether it is given squared chords, which keep the digits of near directions, in place of cosines."""
    needs_target: ClassVar[bool] = False
    """Whether :meth:`parameters` depends on the target cosines."""

    def __post_init__(self) -> None:
        # A number of its own: rules that print and compare alike may differ in a user's angular function.
        key = f"{type(self).__name__} {next(_count)}"
        _known[key] = self
        object.__setattr__(self, "key", key)

    def __reduce__(self) -> tuple[Any, ...]:
        # Built anew where it is unpickled, so that it is known there.
        return _rebuild, (type(self), {f.name: getattr(self, f.name) for f in fields(self) if f.init})

    def of(self, g: Angular) -> Negatives:
        """The same rule of the angular function of a head, where it has none of its own."""
        return self

    def detached(self, detach: bool = True) -> Negatives:
        """The same rule with the slope of the cosine, or with its own."""
        return self if self.detach == detach else replace(self, detach=detach)

    def parameters(self, sizes: Mapping[str, Any], target: Tensor, annealing: Tensor | None) -> tuple[Tensor, ...]:
        """What value and slope take beside cosines: scalars or columns ``(B, 1)``; see :func:`as_column`.

        With soft labels every class is a target: what depends on the target is then ``(1, C)`` or ``(B, C)``.

        Args:
            sizes: The head's margins by name, each a number, a scalar, ``(B,)``, ``(B, 1)`` or ``(1, C)``.
            target: ``(B,)`` or ``(B, C)`` target cosines, which get no gradient; empty unless ``needs_target``.
            annealing: Weight of the plain function against the margin, if there is an annealer.
        """
        return ()

    @property
    def takes_parameters(self) -> bool:
        """Whether there are any, of which the margin may be one."""
        return type(self).parameters is not Negatives.parameters

    def value(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        """Value at cosines ``(B, k)``; parameters are scalars or broadcast."""
        value = self._value(cosines, *parameters)
        return cosines + (value - cosines).detach() if self.detach else value

    def _value(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        raise NotImplementedError

    def slope(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        """Derivative of :meth:`value` by the cosines, same shape."""
        return torch.ones_like(cosines) if self.detach else self._slope(cosines, *parameters)

    def _slope(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        raise NotImplementedError

    def term(self, logits: Tensor) -> Tensor:
        """What one logit adds to the sum, where the reduction is a sum."""
        raise NotImplementedError

    def term_slope(self, logits: Tensor) -> Tensor:
        """Derivative of :meth:`term`, same shape."""
        raise NotImplementedError

    def target_term(self, logits: Tensor) -> Tensor:
        """What the target logit adds, where the reduction is a sum; same shape."""
        raise NotImplementedError


def _rebuild(rule: type[Negatives], options: dict[str, Any]) -> Negatives:
    return rule(**options)


rules: Registry[Negatives] = Registry("rule of negatives", kind=Negatives)
register = rules.register


@register("plain", aliases=("cosine",))
@dataclass(frozen=True)
class Plain(Negatives):
    r"""The cosine: :math:`\eta = \cos\theta`.

    Example:
        >>> Plain().value(torch.tensor([[0.5, -0.5]]))
        tensor([[ 0.5000, -0.5000]])
    """

    plain: ClassVar[bool] = True

    def of(self, g: Angular) -> Negatives:
        """The cosine, or the angular function of a head."""
        return self if isinstance(g, Cosine) else OfAngle(g=g)

    def value(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        """The cosines themselves."""
        return cosines


@register("angular")
@dataclass(frozen=True)
class OfAngle(Negatives):
    r"""An angular function: :math:`\eta = g(\theta)`.

    Args:
        g: Angular function, by name or as an instance; by default that of the head, or the cosine.

    Example:
        >>> OfAngle(g="sqcos").value(torch.tensor([[0.5, -0.5]]))
        tensor([[ 0.2500, -0.2500]])
    """

    g: Angular = _COSINE

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "g", angular.create(self.g))

    def of(self, g: Angular) -> Negatives:
        """The same of the angular function of a head, where it has none of its own."""
        return replace(self, g=g) if self.g is _COSINE else self

    def _value(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        return self.g.of_cosine(cosines)

    def _slope(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        return self.g.slope_of_cosine(cosines)


@register("widened")
@dataclass(frozen=True)
class Widened(Negatives):
    r"""SphereFace-R v2: :math:`\eta = \cos(\theta / m)`; the parameters are m and the annealing weight.

    Example:
        >>> Widened().value(torch.tensor([[0.5, -0.5]]), torch.tensor(2.0), torch.tensor(0.0))
        tensor([[0.8660, 0.5000]])
    """

    def parameters(self, sizes: Mapping[str, Any], target: Tensor, annealing: Tensor | None) -> tuple[Tensor, ...]:
        """M and the annealing weight."""
        return as_column(sizes["m"], target), as_column(0.0 if annealing is None else annealing, target)

    def _value(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        m, weight = parameters
        return (weight * cosines + (arccos(cosines) / m).cos()) / (1 + weight)

    def _slope(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        m, weight = parameters
        return (weight - (arccos(cosines) / m).sin() / m * arccos_slope(cosines)) / (1 + weight)


@register("hardened")
@dataclass(frozen=True)
class Hardened(Negatives):
    r"""CurricularFace: a class closer than the margin allows weighs more; the parameters are the threshold and T.

    .. math:: \eta = c \text{ if } c \le \text{threshold, else } c\,(T + c)

    Args:
        progress: T; the loss CurricularFace has a running mean of the target cosines in its place.

    Example:
        >>> Hardened().value(torch.tensor([[0.5, -0.5]]), torch.tensor(0.2), torch.tensor(1.0))
        tensor([[ 0.7500, -0.5000]])
    """

    contract: ClassVar[Mapping[str, Any]] = {"rises": False}

    progress: float = 0.0
    needs_target: ClassVar[bool] = True

    def parameters(self, sizes: Mapping[str, Any], target: Tensor, annealing: Tensor | None) -> tuple[Tensor, ...]:
        """The target value under an additive angular margin m, and T."""
        threshold = AdditiveAngle("raw")(target, m=sizes["m"])
        return as_column(threshold, target), as_column(self.progress, target)

    def _value(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        threshold, progress = parameters
        return torch.where(cosines > threshold, cosines * (progress + cosines), cosines)

    def _slope(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        threshold, progress = parameters
        return torch.where(cosines > threshold, progress + 2 * cosines, 1.0)


@register("circle")
@dataclass(frozen=True)
class CircleNegatives(Negatives):
    r"""Circle loss: :math:`\eta = \alpha (c - m)`, :math:`\alpha = [c + m]_+` constant; the parameter is m.

    Example:
        >>> CircleNegatives().value(torch.tensor([[0.5, -0.5]]), torch.tensor(0.25))
        tensor([[0.1875, -0.0000]])
    """

    contract: ClassVar[Mapping[str, Any]] = {"derivative": False, "rises": False}

    def parameters(self, sizes: Mapping[str, Any], target: Tensor, annealing: Tensor | None) -> tuple[Tensor, ...]:
        """The margin m."""
        return (as_column(sizes["m"], target),)

    def _value(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        (m,) = parameters
        return (cosines.detach() + m).relu() * (cosines - m)

    def _slope(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        (m,) = parameters
        return (cosines + m).relu()


@register("binary")
@dataclass(frozen=True)
class Binary(Negatives):
    r"""SphereFace2: :math:`\eta = g(c) + m`, :math:`g(u) = 2((u + 1)/2)^t - 1`, each class a binary problem of its own.

    The parameter is the margin of the non-targets.

    Args:
        t: Exponent of the similarity adjustment g.
        margin: Whether the non-targets have the head's margin; blended with the plain function, it is a smaller one.

    Example:
        >>> Binary().value(torch.tensor([[0.5, -0.5]]), torch.tensor(0.4))
        tensor([[ 0.2438, -0.5688]])
    """

    t: float = 3.0
    margin: bool = True
    softmax: ClassVar[bool] = False

    def parameters(self, sizes: Mapping[str, Any], target: Tensor, annealing: Tensor | None) -> tuple[Tensor, ...]:
        """The margin of the non-targets."""
        m: Parameter = sizes["m"] if self.margin else 0.0
        return (as_column(m if annealing is None else m / (1 + annealing), target),)

    def _value(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        (m,) = parameters
        return bend(cosines, self.t) + m

    def _slope(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        return self.t * ((cosines + 1) / 2).clamp(min=0).pow(self.t - 1)

    def term(self, logits: Tensor) -> Tensor:
        """Logistic loss of a class that the sample does not belong to."""
        return F.softplus(logits, threshold=50)

    def term_slope(self, logits: Tensor) -> Tensor:
        """Derivative of the term."""
        return logits.sigmoid()

    def target_term(self, logits: Tensor) -> Tensor:
        """Logistic loss of the target."""
        return F.softplus(-logits, threshold=50)


@register("hinge")
@dataclass(frozen=True)
class HingeNegatives(Plain):
    r"""One-versus-all hinge: each non-target logit adds :math:`\max(0, 1 + f)^p`.

    Args:
        power: Exponent p, 1 or 2.

    Example:
        >>> HingeNegatives(power=2).term(torch.tensor([0.5, -2.0]))
        tensor([2.2500, 0.0000])
    """

    power: int = 1
    softmax: ClassVar[bool] = False

    def term(self, logits: Tensor) -> Tensor:
        """Hinge of a class that the sample does not belong to."""
        return (1 + logits).relu().pow(self.power)

    def term_slope(self, logits: Tensor) -> Tensor:
        """Derivative of the term."""
        return self.power * (1 + logits).relu().pow(self.power - 1) * (logits > -1)

    def target_term(self, logits: Tensor) -> Tensor:
        """Hinge of the target."""
        return (1 - logits).relu().pow(self.power)


@dataclass(frozen=True)
class Riesz(Negatives):
    r"""Energy of unit vectors: a pair of squared chord q adds :math:`q^{-s/2}`, or :math:`-\frac12\log q` (s = 0).

    Chords at which the directions are no longer told apart count as the least that are, and have no gradient.
    """

    s: float = 2.0
    softmax: ClassVar[bool] = False
    of_chords: ClassVar[bool] = True

    def value(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        """The squared chords, which it is given in place of cosines."""
        return cosines

    def slope(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        """Derivative of squared chords by cosines."""
        return torch.full_like(cosines, -2.0)

    def term(self, logits: Tensor) -> Tensor:
        """Energy of a pair at a squared chord."""
        squared = logits.clamp(min=self._least(logits))
        return -0.5 * squared.log() if self.s == 0 else squared.pow(-self.s / 2)

    def term_slope(self, logits: Tensor) -> Tensor:
        """Derivative of the term."""
        least = self._least(logits)
        slope = (-self.s / 2 or -0.5) * logits.clamp(min=least).pow(-self.s / 2 - 1)
        return torch.where(logits > least, slope, 0.0)

    def _least(self, logits: Tensor) -> float:
        """What rounding leaves of 0, or more where the slope would overflow."""
        numbers = torch.finfo(logits.dtype)
        return float(max((4 * numbers.eps) ** 2, numbers.max ** (-0.8 / (self.s / 2 + 1))))


def as_column(value: Parameter, like: Tensor) -> Tensor:
    """A rule's parameter as a scalar tensor or a column ``(B, 1)``.

    Example:
        >>> as_column(torch.ones(3), torch.ones(3)).shape
        torch.Size([3, 1])
    """
    # Filled on the device: a copy from the host would be waited for.
    tensor = value.detach().to(like.dtype) if isinstance(value, Tensor) else like.new_full((), value)
    return tensor.unsqueeze(1) if tensor.dim() == 1 else tensor


def bend(cosines: Tensor, t: float) -> Tensor:
    r"""SphereFace2's similarity adjustment :math:`g(u) = 2((u + 1)/2)^t - 1`, increasing on [-1, 1].

    Example:
        >>> bend(torch.tensor([1.0, 0.0, -1.0]), 3)
        tensor([ 1.0000, -0.7500, -1.0000])
    """
    return 2 * ((cosines + 1) / 2).clamp(min=0).pow(t) - 1
