"""Losses of one binary problem a class, without a softmax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hypersphere import margins
from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.geometry import at_least_float32
from hypersphere.losses.head import MarginSoftmax
from hypersphere.losses.negatives import Binary, HingeNegatives, bend
from hypersphere.losses.registry import losses
from hypersphere.losses.state import MarginSize
from hypersphere.margins import Margin, Parameter


@losses.register("sphereface2")
class SphereFace2(MarginSoftmax):
    r"""SphereFace2: one binary problem a class, no softmax.

    .. math:: L = \frac{w}{s}\Big[\lambda \log(1 + e^{-z_y}) + (1 - \lambda)\sum_{j \ne y} \log(1 + e^{z_j})\Big],
        \quad z = s\,v + b, \quad g(u) = 2\big(\tfrac{u + 1}{2}\big)^t - 1

    ``"C"``: :math:`v_y = g(\cos\theta_y) - m` and :math:`v_j = g(\cos\theta_j) + m`. ``"A"``:
    :math:`v_y = g(\cos(\theta_y + m))`, ``"M"``: :math:`v_y = g(\cos(m\theta_y))`, both cut at pi and with
    :math:`v_j = g(\cos\theta_j)`.

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        version: ``"C"``, ``"A"`` or ``"M"``: where the margin goes.
        s: Scale.
        m: Margin; 0.4, 0.5 and 1.7 by default.
        t: Exponent of the similarity adjustment g.
        balance: Weight :math:`\lambda` of the target against all other classes, in (0, 1).
        loss_weight: Factor w.
        gradient: Detached by default, as in the reference.
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> SphereFace2(3, 10)(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    contract: ClassVar[Mapping[str, Any]] = {"logits": False, "variants": ({"version": "A"}, {"version": "M"})}

    DEFAULTS: ClassVar[dict[str, float]] = {"C": 0.4, "A": 0.5, "M": 1.7}

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        version: Literal["C", "A", "M"] = "C",
        s: float = 40.0,
        m: MarginSize | None = None,
        t: float = 3.0,
        balance: float = 0.7,
        loss_weight: float = 50.0,
        gradient: str = "cgd",
        **options: Any,
    ) -> None:
        check_choice("version", version, ("C", "A", "M"))
        check_range("t", t, 0, open_low=True)
        check_range("loss_weight", loss_weight, 0, open_low=True)
        if not 0 < balance < 1:
            raise ArgumentError("balance", f"must lie between 0 and 1, got {balance}")
        self.version, self.t, self.balance, self.loss_weight = version, t, balance, loss_weight
        inner = {
            "C": margins.NoMargin(),
            "A": margins.AdditiveAngle("clip"),
            "M": margins.ClippedMultiplicative(),
        }[version]
        m = self.DEFAULTS[version] if m is None else m
        psi, rule = _Bent(inner, t, version == "C"), Binary(t, version == "C")
        super().__init__(dim, classes, s=s, m=m, psi=psi, negatives=rule, gradient=gradient, **options)
        self.common_bias = nn.Parameter(torch.tensor(self._initial_bias()))

    def _initial_bias(self) -> float:
        """Bias that balances the two gradient sums when all cosines are 0."""
        assert self.s is not None
        m = sum(self.margin_bounds("m")) / 2
        own = float(self.spec.psi(torch.zeros(1, dtype=torch.float64), m=m)) * self.s
        other = float(bend(torch.zeros(1, dtype=torch.float64), self.t) + (m if self.version == "C" else 0)) * self.s
        ratio = self.balance / ((1 - self.balance) * max(self.classes - 1, 1))
        # log(1 - r + sqrt((1 - r)^2 + 4 r e^(own - other))), safe for large exponents.
        root = math.sqrt((1 - ratio) ** 2 + 4 * ratio * math.exp(min(own - other, 700.0)))
        # For r > 1 the difference is rationalised: it would cancel.
        inner = 1 - ratio + root if ratio <= 1 else 4 * ratio * math.exp(own - other) / (root + ratio - 1)
        return math.log(2 * ratio) - other - math.log(inner)

    def offset(self) -> Tensor | None:
        """The bias that all classes share."""
        assert self.s is not None
        return at_least_float32(self.common_bias) / self.s

    def plain_value(self, cosines: Tensor, angles: Tensor | None = None) -> Tensor:
        """The similarity adjustment g."""
        return bend(cosines, self.t)

    def details(self) -> dict[str, Any]:
        """The version, too."""
        return super().details() | {"version": self.version}

    @property
    def loss_factor(self) -> float:  # type: ignore[override]
        """The weight of the loss by the scale."""
        assert self.s is not None
        return self.loss_weight / self.s

    def sample_loss(self, negatives: Tensor, target: Tensor) -> Tensor:
        """The binary losses, balanced."""
        return self.balance * self.spec.negatives.target_term(target) + (1 - self.balance) * negatives


@losses.register("hinge")
class Hinge(MarginSoftmax):
    r"""One-versus-all hinge loss on a linear classifier.

    .. math:: L = \max(0, 1 - f_y)^p + \sum_{j \ne y} \max(0, 1 + f_j)^p, \quad f_j = \langle W_j, x \rangle + b_j

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        power: 1, or 2 for the squared hinge.
        bias: Add a bias per class.
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> Hinge(3, 10)(torch.zeros(2, 3), torch.tensor([0, 1])).item()
        10.0
    """

    contract: ClassVar[Mapping[str, Any]] = {"logits": False, "variants": ({"power": 2},)}

    def __init__(self, dim: int, classes: int, *, power: int = 1, bias: bool = True, **options: Any) -> None:
        check_range("power", power, 1, 2)
        if power != int(power):
            raise ArgumentError("power", f"must be 1 or 2, got {power}")
        self.power = power
        rule = HingeNegatives(power=power)
        super().__init__(dim, classes, unit_weights=False, bias=bias, negatives=rule, **options)


class _Bent(Margin):
    """SphereFace2's target: another margin under the similarity adjustment g."""

    def __init__(self, inner: Margin, t: float, subtract: bool) -> None:
        for name, value in (("inner", inner), ("t", t), ("subtract", subtract)):
            object.__setattr__(self, name, value)

    inner: Margin
    t: float
    subtract: bool

    def check(self, **m: float) -> None:
        margins.AdditiveCosine().check(**m) if self.subtract else self.inner.check(**m)

    def takes_angle(self, **m: Any) -> bool:
        return self.inner.takes_angle(**m)

    def psi(self, theta: Tensor, *, m: Parameter, **_: Any) -> Tensor:
        value = bend(self.inner.psi(theta, m=m), self.t)
        return value - m if self.subtract else value

    def __call__(self, cosines: Tensor, *, m: Parameter, **_: Any) -> Tensor:
        value = bend(self.inner(cosines, m=m), self.t)
        return value - m if self.subtract else value
