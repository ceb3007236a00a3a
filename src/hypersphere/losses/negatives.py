r"""What happens to the classes that a sample does not belong to: rules of the non-target logits.

A rule gives the value :math:`\eta` that stands in the logit :math:`\text{scale}_i\,\eta_{ij}` of a non-target class,
and how the logits of all non-target classes become one number per sample: their log-sum-exp (softmax members) or the
sum of a term of each (binary members).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from hypersphere.angular import Angular, Cosine
from hypersphere.geometry import arccos, arccos_slope
from hypersphere.margins import Parameter

_known: WeakValueDictionary[str, Negatives] = WeakValueDictionary()
_count = itertools.count()


@lru_cache(maxsize=64)
def lookup(key: str) -> Negatives:
    """The rule with this key, which is known from the moment it is built for as long as it is used.

    Nothing but the rule's head keeps it, and a backward pass that is still to come. A compiled one cannot, so the rules
    looked up last stay, too.
    """
    return _known[key]


@dataclass(frozen=True)
class Negatives:
    """A rule of the non-target classes; a subclass defines the value and its slope.

    Args:
        detach: Characteristic gradient detachment: the value is used, the slope is that of the cosine.

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

    def __post_init__(self) -> None:
        # A number of its own: rules that print and compare alike may differ in a user's angular function.
        key = f"{type(self).__name__} {next(_count)}"
        _known[key] = self
        object.__setattr__(self, "key", key)

    def __reduce__(self) -> tuple[Any, ...]:
        # Built anew where it is unpickled, so that it is known there.
        return _rebuild, (type(self), {f.name: getattr(self, f.name) for f in fields(self) if f.init})

    def value(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        """Value at cosines ``(B, k)``; parameters are scalars or ``(B, 1)``."""
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


def _rebuild(rule: type[Negatives], options: dict[str, Any]) -> Negatives:
    return rule(**options)


@dataclass(frozen=True)
class Plain(Negatives):
    r"""The cosine: :math:`\eta = \cos\theta`."""

    plain: ClassVar[bool] = True

    def value(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        """The cosines themselves."""
        return cosines


@dataclass(frozen=True)
class OfAngle(Negatives):
    r"""An angular function: :math:`\eta = g(\theta)`."""

    g: Angular = field(default_factory=Cosine)

    def _value(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        return self.g.of_cosine(cosines)

    def _slope(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        return self.g.slope_of_cosine(cosines)


@dataclass(frozen=True)
class Widened(Negatives):
    r"""SphereFace-R v2: :math:`\eta = \cos(\theta / m)`; the parameters are m and the annealing weight."""

    def _value(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        m, weight = parameters
        return (weight * cosines + (arccos(cosines) / m).cos()) / (1 + weight)

    def _slope(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        m, weight = parameters
        return (weight - (arccos(cosines) / m).sin() / m * arccos_slope(cosines)) / (1 + weight)


@dataclass(frozen=True)
class Hardened(Negatives):
    r"""CurricularFace: a class closer than the margin allows weighs more; the parameters are the threshold and T.

    .. math:: \eta = c \text{ if } c \le \text{threshold, else } c\,(T + c)
    """

    def _value(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        threshold, progress = parameters
        return torch.where(cosines > threshold, cosines * (progress + cosines), cosines)

    def _slope(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        threshold, progress = parameters
        return torch.where(cosines > threshold, progress + 2 * cosines, 1.0)


@dataclass(frozen=True)
class CircleNegatives(Negatives):
    r"""Circle loss: :math:`\eta = \alpha (c - m)`, :math:`\alpha = [c + m]_+` constant; the parameter is m."""

    def _value(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        (m,) = parameters
        return (cosines.detach() + m).relu() * (cosines - m)

    def _slope(self, cosines: Tensor, *parameters: Tensor) -> Tensor:
        (m,) = parameters
        return (cosines + m).relu()


@dataclass(frozen=True)
class Binary(Negatives):
    r"""SphereFace2: :math:`\eta = g(c) + m`, :math:`g(u) = 2((u + 1)/2)^t - 1`, each class a binary problem of its own.

    The parameter is the margin of the non-targets.
    """

    t: float = 3.0
    softmax: ClassVar[bool] = False

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


@dataclass(frozen=True)
class HingeNegatives(Plain):
    r"""One-versus-all hinge: each non-target logit adds :math:`\max(0, 1 + f)^p`."""

    power: int = 1
    softmax: ClassVar[bool] = False

    def term(self, logits: Tensor) -> Tensor:
        """Hinge of a class that the sample does not belong to."""
        return (1 + logits).relu().pow(self.power)

    def term_slope(self, logits: Tensor) -> Tensor:
        """Derivative of the term."""
        return self.power * (1 + logits).relu().pow(self.power - 1) * (logits > -1)


@dataclass(frozen=True)
class Riesz(Plain):
    r"""Energy of unit vectors: each pair adds :math:`(2 - 2c)^{-s/2}`, or :math:`-\frac12\log(2 - 2c)` for s = 0."""

    s: float = 2.0
    softmax: ClassVar[bool] = False

    def term(self, logits: Tensor) -> Tensor:
        """Energy of a pair; equal directions count as slightly apart."""
        squared = (2 - 2 * logits).clamp(min=self._least(logits))
        return -0.5 * squared.log() if self.s == 0 else squared.pow(-self.s / 2)

    def term_slope(self, logits: Tensor) -> Tensor:
        """Derivative of the term."""
        squared = 2 - 2 * logits
        slope = (self.s or 1.0) * squared.clamp(min=self._least(logits)).pow(-self.s / 2 - 1)
        return torch.where(squared > self._least(logits), slope, 0.0)

    @staticmethod
    def _least(logits: Tensor) -> float:
        return 8 * torch.finfo(logits.dtype).eps


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
