"""The published losses as presets of :class:`MarginSoftmax`, each with the constants of its reference."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypersphere import angular, margins
from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.geometry import normalise
from hypersphere.losses.head import MarginSize, MarginSoftmax, Steps, losses
from hypersphere.losses.negatives import (
    Binary,
    CircleNegatives,
    Hardened,
    HingeNegatives,
    Negatives,
    Riesz,
    Widened,
    bend,
)
from hypersphere.losses.schedules import moving_average
from hypersphere.losses.streaming import class_statistics
from hypersphere.margins import Margin, Parameter

# ------------------------------------------------------------------------------------------------ thesis


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
        >>> Softmax(3, 10)(torch.zeros(2, 3), torch.tensor([0, 1])).item()
        2.3025...
    """

    def __init__(self, dim: int, classes: int, *, bias: bool = True, **options: Any) -> None:
        super().__init__(dim, classes, unit_weights=False, bias=bias, **options)


@losses.register("l-softmax", aliases=("large-margin-softmax",))
class LSoftmax(MarginSoftmax):
    r"""L-Softmax: a multiplicative angular margin, with the norms of weights and features kept.

    .. math:: f_{i,y} = \|W_y\| \|x_i\| \psi(\theta), \quad \psi(\theta) = \cos(m\theta - k\pi) - 2k

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        m: Margin, an integer of at least 1 (a schedule may pass between integers).
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> LSoftmax(8, 10, m=2)(torch.randn(2, 8), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    def __init__(self, dim: int, classes: int, *, m: MarginSize = 4, **options: Any) -> None:
        super().__init__(dim, classes, m=m, psi="multiplicative", unit_weights=False, **options)
        ends = self._margin_bounds("m") if self.m_by_class is None else tuple(map(float, self.m_by_class))
        for end in ends:
            if not float(end).is_integer():
                raise ArgumentError("m", f"must be an integer (a-softmax takes any number from 1 on), got {end:g}")

    def reset_parameters(self) -> None:
        """Gaussian class weights of variance 2/D, as the released layer begins."""
        nn.init.kaiming_normal_(self.weight)


@losses.register("a-softmax", aliases=("sphereface", "angular-softmax"))
class ASoftmax(MarginSoftmax):
    r"""A-Softmax (SphereFace): unit class weights, feature norm kept, multiplicative angular margin.

    .. math:: f_{i,y} = \|x_i\| \psi(\theta), \quad \psi(\theta) = \cos(m\theta - k\pi) - 2k

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        m: Margin, any number from 1 on.
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> ASoftmax(3, 10, m=4)(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    def __init__(self, dim: int, classes: int, *, m: MarginSize = 4, **options: Any) -> None:
        super().__init__(dim, classes, m=m, psi="multiplicative", **options)


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
        >>> WSoftmax(3, 10, g="linear")(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    def __init__(
        self, dim: int, classes: int, *, g: str | angular.Angular = "cosine", k: float = 0.3, **options: Any
    ) -> None:
        super().__init__(dim, classes, g=_angular(g, k), **options)


@losses.register("ga-softmax", aliases=("generalised-angular-softmax",))
class GASoftmax(MarginSoftmax):
    r"""GA-Softmax: A-Softmax with any angular function.

    .. math:: f_{i,y} = \|x_i\| \psi(\theta), \quad \psi(\theta) = g(m\theta - k\pi) - 2k, \quad
        f_{ij} = \|x_i\| g(\theta_{ij})

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        m: Margin, any number from 1 on.
        g: Angular function: ``"linear"``, ``"cosine"``, ``"sigmoid"`` or ``"sqcos"``.
        k: Steepness of the sigmoid.
        s: Constant scale; by default the feature norm is kept.
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> GASoftmax(3, 10, m=2)(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        m: MarginSize = 4,
        g: str | angular.Angular = "linear",
        k: float = 0.3,
        s: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dim, classes, s=s, m=m, psi="multiplicative", g=_angular(g, k), **options)


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
        >>> SSoftmax(3, 10)(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        s: float = 30.0,
        g: str | angular.Angular = "cosine",
        k: float = 0.3,
        learn_scale: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(dim, classes, s=s, g=_angular(g, k), learn_scale=learn_scale, **options)


@losses.register("m-softmax", aliases=("multiplicative-softmax",))
class MSoftmax(MarginSoftmax):
    r"""Multiplicative margin on the sphere: unit weights and features, constant scale.

    .. math:: f_{i,y} = s\, \psi(\theta), \quad \psi(\theta) = \cos(m\theta - k\pi) - 2k

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        s: Scale.
        m: Margin, any number from 1 on.
        gradient: Detached by default: with the exact gradient, a large margin and no annealing it collapses.
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> MSoftmax(3, 10)(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        s: float = 30.0,
        m: MarginSize = 1.5,
        gradient: str = "cgd",
        **options: Any,
    ) -> None:
        super().__init__(dim, classes, s=s, m=m, psi="multiplicative", gradient=gradient, **options)


# ------------------------------------------------------------------------------------------------ descendants


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
        >>> NormFace(3, 10)(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    def __init__(self, dim: int, classes: int, *, s: float = 10.0, learn_scale: bool = True, **options: Any) -> None:
        super().__init__(dim, classes, s=s, learn_scale=learn_scale, **options)


@losses.register("cosface", aliases=("am-softmax", "additive-margin-softmax"))
class CosFace(MarginSoftmax):
    r"""CosFace (AM-Softmax): unit weights and features, constant scale, additive margin on the cosine.

    .. math:: f_{i,y} = s\, (\cos\theta - m)

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        s: Scale.
        m: Margin, at least 0.
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> CosFace(3, 10, s=30)(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    def __init__(self, dim: int, classes: int, *, s: float = 64.0, m: MarginSize = 0.35, **options: Any) -> None:
        super().__init__(dim, classes, s=s, m=m, psi="additive-cosine", **options)


@losses.register("arcface", aliases=("arc-softmax", "aam-softmax"))
class ArcFace(MarginSoftmax):
    r"""ArcFace: unit class weights and features, constant scale, additive angular margin.

    .. math:: f_{i,y} = s \cos(\min(\theta + m, \pi))

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        s: Scale.
        m: Margin in radians, in [0, pi].
        beyond: Past pi: ``"clip"``, ``"fallback"``, ``"raw"`` or ``"easy"``; see
            :class:`hypersphere.margins.AdditiveAngle`.
        **options: See :class:`MarginSoftmax`. With few feature dimensions the margin can push an untrained network's
            features away from every class at once; an ``annealer`` prevents it.

    Example:
        >>> ArcFace(3, 10, s=16.0)(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    def __init__(
        self, dim: int, classes: int, *, s: float = 64.0, m: MarginSize = 0.5, beyond: str = "clip", **options: Any
    ) -> None:
        super().__init__(dim, classes, s=s, m=m, psi=margins.AdditiveAngle(beyond), **options)


@losses.register("combined", aliases=("combined-margin",))
class CombinedMargin(MarginSoftmax):
    r"""Combined margin: multiplicative, additive angular and additive cosine margins at once.

    .. math:: f_{i,y} = s\, (\cos(\min(m_1\theta + m_2, \pi)) - m_3)

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        s: Scale.
        m1: Factor on the angle, greater than 0.
        m2: Margin added to the angle, in [0, pi].
        m3: Margin taken off the cosine, at least 0.
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> CombinedMargin(3, 10, m1=0.9, m2=0.4, m3=0.15)(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        s: float = 64.0,
        m1: MarginSize = 1.0,
        m2: MarginSize = 0.3,
        m3: MarginSize = 0.2,
        **options: Any,
    ) -> None:
        sizes: Any = {"m1": m1, "m2": m2, "m3": m3}
        super().__init__(dim, classes, s=s, m=sizes, psi="combined", **options)


@losses.register("sphereface-r", aliases=("sphereface-revived",))
class SphereFaceR(MarginSoftmax):
    r"""SphereFace-R: multiplicative margins made trainable, on the own class or on the others.

    .. math:: v0: \psi = \cos(m\theta - k\pi) - 2k \qquad v1: \psi = \cos(\min(m\theta, \pi)) \qquad
        v2: \eta = \cos(\theta / m)

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        version: ``"v0"``, ``"v1"`` or ``"v2"``.
        feature_norm: ``"hard"`` scales unit features by ``s``; ``"none"`` keeps the feature norm; ``"soft"`` keeps it
            and pulls it towards ``s``.
        s: Scale, or the norm that soft normalisation pulls to; 60 (hard) or 30 (soft) by default.
        m: Margin, at least 1.
        loss_weight: The cross-entropy is multiplied by ``loss_weight / s``; ``None`` leaves it.
        pull: Weight of the pull :math:`|\|x\| - s|` of soft normalisation.
        gradient: Detached by default, as in the reference.
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> SphereFaceR(3, 10, version="v1")(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        version: Literal["v0", "v1", "v2"] = "v2",
        feature_norm: Literal["none", "hard", "soft"] = "hard",
        s: float | None = None,
        m: MarginSize = 1.4,
        loss_weight: float | None = None,
        pull: float = 0.01,
        gradient: str = "cgd",
        **options: Any,
    ) -> None:
        check_choice("version", version, ("v0", "v1", "v2"))
        check_choice("feature_norm", feature_norm, ("none", "hard", "soft"))
        check_range("pull", pull, 0)
        self.version, self.feature_norm, self.pull = version, feature_norm, pull
        radius = s if s is not None else {"hard": 60.0, "soft": 30.0, "none": None}[feature_norm]
        if radius is not None:
            check_range("s", radius, 0, open_low=True)
        self.radius = radius
        self.loss_factor = 1.0 if loss_weight is None or radius is None else loss_weight / radius
        psis: dict[str, str | Margin] = {
            "v0": "multiplicative",
            "v1": "clipped-multiplicative",
            "v2": _Unmargined(),
        }
        hard = radius if feature_norm == "hard" else None
        super().__init__(dim, classes, s=hard, m=m, psi=psis[version], gradient=gradient, **options)

    def _negatives(self) -> Negatives:
        return Widened(detach=self.gradient == "cgd") if self.version == "v2" else super()._negatives()

    def _rule_parameters(
        self, own: Tensor, parameters: dict[str, Any], steps: Steps, valid: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        if self.version != "v2":
            return ()
        weight = self._annealing(steps, own)
        return _as_column(parameters["m"], own), _as_column(0.0 if weight is None else weight, own)

    def _details(self) -> dict[str, Any]:
        return super()._details() | {"version": self.version, "feature_norm": self.feature_norm}

    def _sample_loss(self, negatives: Tensor, total: Tensor, target: Tensor, compared: int) -> Tensor:
        return super()._sample_loss(negatives, total, target, compared) * self.loss_factor

    def _penalty(self, x: Tensor, norms: Tensor, labels: Tensor, valid: Tensor | None) -> Tensor | float:
        if self.feature_norm != "soft" or self.radius is None:
            return 0.0
        return self.pull * (norms - self.radius).abs()


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
        balance: Weight :math:`\lambda` of the own class against all others, in (0, 1).
        loss_weight: Factor w.
        gradient: Detached by default, as in the reference.
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> SphereFace2(3, 10)(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    softmax_scale: ClassVar[bool] = False
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
            "A": margins.AdditiveAngle(),
            "M": margins.ClippedMultiplicative(),
        }[version]
        m = self.DEFAULTS[version] if m is None else m
        super().__init__(dim, classes, s=s, m=m, psi=_Bent(inner, t, version == "C"), gradient=gradient, **options)
        self.common_bias = nn.Parameter(torch.tensor(self._initial_bias()))

    def _rule_is_softmax(self) -> bool:
        return False

    def _initial_bias(self) -> float:
        """Bias that balances the two gradient sums when all cosines are 0."""
        assert self.s is not None
        m = sum(self._margin_bounds("m")) / 2
        own = float(self.psi_function(torch.zeros(1, dtype=torch.float64), m=m)) * self.s
        other = float(bend(torch.zeros(1, dtype=torch.float64), self.t) + (m if self.version == "C" else 0)) * self.s
        ratio = self.balance / ((1 - self.balance) * max(self.classes - 1, 1))
        # log(1 - r + sqrt((1 - r)^2 + 4 r e^(own - other))), safe for large exponents.
        root = math.sqrt((1 - ratio) ** 2 + 4 * ratio * math.exp(min(own - other, 700.0)))
        # For r > 1 the difference is rationalised: it would cancel.
        inner = 1 - ratio + root if ratio <= 1 else 4 * ratio * math.exp(own - other) / (root + ratio - 1)
        return math.log(2 * ratio) - other - math.log(inner)

    def _negatives(self) -> Negatives:
        return Binary(t=self.t, detach=self.gradient == "cgd")

    def _offset(self) -> Tensor | None:
        assert self.s is not None
        return self.common_bias / self.s

    def _rule_parameters(
        self, own: Tensor, parameters: dict[str, Any], steps: Steps, valid: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        margin: Parameter = parameters["m"] if self.version == "C" else 0.0
        weight = self._annealing(steps, own)
        # Blended with the plain function like the own class, an additive margin is a smaller one.
        return (_as_column(margin if weight is None else margin / (1 + weight), own),)

    def _plain(self, cosines: Tensor) -> Tensor:
        return bend(cosines, self.t)

    def _details(self) -> dict[str, Any]:
        return super()._details() | {"version": self.version}

    def _sample_loss(self, negatives: Tensor, total: Tensor, target: Tensor, compared: int) -> Tensor:
        assert self.s is not None
        own = self.balance * F.softplus(-target, threshold=50)
        return self.loss_weight / self.s * (own + (1 - self.balance) * negatives)


@losses.register("sphereface-plus", aliases=("sphereface+",))
class SphereFacePlus(ASoftmax):
    r"""SphereFace+: A-Softmax plus the hyperspherical energy of the batch's classes against all others.

    .. math:: L = L_{A} + \frac{\lambda}{N (C-1)} \sum_i \sum_{j \ne y_i} \|\hat W_{y_i} - \hat W_j\|^{-2}

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        m: Margin, any number from 1 on.
        energy_weight: Weight of the energy.
        energy_power: Riesz exponent of the energy.
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> SphereFacePlus(3, 10)(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        m: MarginSize = 4,
        energy_weight: float = 1.0,
        energy_power: float = 2.0,
        **options: Any,
    ) -> None:
        check_range("energy_weight", energy_weight, 0)
        check_range("energy_power", energy_power, 0)
        if options.get("sparse"):
            raise ArgumentError("sparse", "must be False for sphereface-plus: the energy gives every class a gradient")
        self.energy_weight, self.energy = energy_weight, Riesz(s=energy_power)
        super().__init__(dim, classes, m=m, **options)

    def _penalty(self, x: Tensor, norms: Tensor, labels: Tensor, valid: Tensor | None) -> Tensor | float:
        if self.classes == 1:
            return 0.0
        weight = self.weight.to(x.dtype)
        own = torch.arange(self.classes, device=labels.device) if labels.dim() == 2 else labels
        chunked = self._path_for(self.classes) == "chunked"  # the energy is of all classes, also where few are sampled
        units = normalise(weight[own]) if chunked else normalise(weight)[own]
        found = class_statistics(units, self.weight, own, units.new_ones(len(units)), self.energy, chunked=chunked)
        energy = self.energy_weight * found.negatives / (self.classes - 1)
        return labels @ energy if labels.dim() == 2 else energy


@losses.register("subcenter-arcface", aliases=("sub-centre-arcface", "subcentre-arcface", "sub-center-arcface"))
class SubcenterArcFace(ArcFace):
    r"""Sub-centre ArcFace: several centres a class, of which the closest counts, so that noisy labels find one.

    .. math:: \cos\theta_{ij} = \max_k \hat x_i \cdot \hat W_{jk}, \quad f_{i,y} = s \cos(\min(\theta + m, \pi))

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        centres: Centres of each class.
        s: Scale.
        m: Margin in radians, in [0, pi].
        beyond: Past pi, see :class:`hypersphere.margins.AdditiveAngle`.
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> SubcenterArcFace(3, 10)(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        centres: int = 3,
        s: float = 64.0,
        m: MarginSize = 0.5,
        beyond: str = "clip",
        **options: Any,
    ) -> None:
        check_range("centres", centres, 1)
        self.centres = centres
        super().__init__(dim, classes, s=s, m=m, beyond=beyond, **options)

    @torch.no_grad()
    def clean(self, features: Tensor, labels: Tensor, threshold: float = math.radians(75)) -> Tensor:
        """Which samples to keep for training with one centre a class.

        Per class the centre that most samples are closest to is the dominant one; samples at least ``threshold`` away
        from it are taken for mislabelled.

        Args:
            features: ``(N, D)``.
            labels: ``(N,)``.
            threshold: Angle in radians.

        Returns:
            ``(N,)`` booleans.
        """
        cosines, dominant = self._dominant(features, labels)
        counted = labels != self.ignore_index
        closest = cosines.gather(1, dominant[torch.where(counted, labels, 0)].unsqueeze(1)).squeeze(1)
        return (closest > math.cos(threshold)) & counted

    @torch.no_grad()
    def dominant_weight(self, features: Tensor, labels: Tensor) -> Tensor:
        """The dominant centre of each class, ``(C, D)``: the weights of an :class:`ArcFace` head to go on with."""
        _, dominant = self._dominant(features, labels)
        rows = self._turned_weight().unflatten(0, (-1, self.centres))
        return rows[torch.arange(self.classes, device=rows.device), dominant].clone()

    def _dominant(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines to the centres of each sample's own class ``(N, centres)``, and each class' dominant centre."""
        self._check(features, labels, shares=False)
        counted = labels != self.ignore_index
        own = torch.where(counted, labels, 0)
        units = normalise(self._turned(features))
        rows = normalise(self.weight.to(units.dtype)).unflatten(0, (-1, self.centres))
        cosines = (rows[own] * units.unsqueeze(1)).sum(2)
        votes = torch.zeros(self.classes, self.centres, device=labels.device)
        votes.index_put_((own, cosines.argmax(1)), counted.to(votes.dtype), accumulate=True)
        return cosines, votes.argmax(1)


@losses.register("adaface")
class AdaFace(MarginSoftmax):
    r"""AdaFace: the margin follows the image quality, read off the feature norm.

    .. math:: \psi(\theta) = \cos(\theta - m z) - (m + m z), \quad
        z = \mathrm{clip}\Big(h\,\frac{\|x\| - \mu}{\sigma}, -1, 1\Big)

    with running mean and standard deviation of the norms. A norm at the mean gives CosFace, a low one ArcFace.

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        s: Scale.
        m: Margin.
        h: Steepness of the quality z.
        rate: Share of a new batch in the running statistics.
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> AdaFace(3, 10)(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    norm_mean: Tensor
    norm_std: Tensor

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        s: float = 64.0,
        m: MarginSize = 0.4,
        h: float = 0.333,
        rate: float = 0.01,
        **options: Any,
    ) -> None:
        check_range("h", h, 0)
        check_range("rate", rate, 0, 1)
        self.h, self.rate = h, rate
        super().__init__(dim, classes, s=s, m=m, psi="adaptive", **options)
        self.register_buffer("norm_mean", torch.tensor(20.0))
        self.register_buffer("norm_std", torch.tensor(100.0))

    def _margins(
        self, norms: Tensor, labels: Tensor | None, steps: Steps, valid: Tensor | None = None
    ) -> dict[str, Any]:
        found = super()._margins(norms, labels, steps, valid)
        safe = norms.detach().clamp(1e-3, 100)
        mean, std = self.norm_mean, self.norm_std
        if steps is not None and norms.numel():
            share = torch.ones_like(safe) if valid is None else valid.to(safe.dtype)
            count = share.sum()
            batch_mean = (share * safe).sum() / count
            variance = (share * (safe - batch_mean).square()).sum() / (count - 1)
            mean = moving_average(self.norm_mean, batch_mean, self.rate)
            std = moving_average(self.norm_std, variance.sqrt(), self.rate)
        quality = (self.h * (safe - mean) / (std + 1e-3)).clamp(-1, 1).to(norms.dtype)
        return found | {"z": quality}

    def _typical_norm(self) -> float:
        return float(self.norm_mean)


@losses.register("magface")
class MagFace(MarginSoftmax):
    r"""MagFace: an ArcFace margin that grows with the feature norm, and a pull on the norm: it becomes a quality score.

    .. math:: \psi(\theta) = \cos(\theta + m(a)), \quad m(a) = l_m + \frac{u_m - l_m}{u_a - l_a} (a - l_a), \quad
        a = \mathrm{clip}(\|x\|, l_a, u_a), \quad L \mathrel{+}= \lambda_g (1/a + a/u_a^2)

    Norms outside [l_a, u_a] get no gradient from it: end the network in a batch normalisation.

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        s: Scale.
        m: Margins at the lowest and the highest norm.
        norms: The lowest and the highest norm.
        norm_weight: Weight of the pull on the norm; see :func:`magface_minimum_weight`.
        beyond: Past pi, see :class:`hypersphere.margins.AdditiveAngle`; ``"easy"`` is the reference's choice.
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> MagFace(3, 10)(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        s: float = 64.0,
        m: tuple[float, float] = (0.45, 0.8),
        norms: tuple[float, float] = (10.0, 110.0),
        norm_weight: float = 35.0,
        beyond: str = "clip",
        **options: Any,
    ) -> None:
        check_range("norm_weight", norm_weight, 0)
        if not 0 < norms[0] < norms[1]:
            raise ArgumentError("norms", f"must be two increasing numbers above 0, got {norms}")
        if not isinstance(m, tuple | list) or len(m) != 2 or not 0 <= m[0] <= m[1] <= math.pi:
            raise ArgumentError("m", f"must be two numbers in [0, pi] that do not fall, got {m}")
        self.ends, self.norms, self.norm_weight = tuple(m), tuple(norms), norm_weight
        super().__init__(dim, classes, s=s, m=m[0], psi=margins.AdditiveAngle(beyond), **options)

    def _margins(
        self, norms: Tensor, labels: Tensor | None, steps: Steps, valid: Tensor | None = None
    ) -> dict[str, Any]:
        share = (norms.clamp(*self.norms) - self.norms[0]) / (self.norms[1] - self.norms[0])
        return {"m": self.ends[0] + (self.ends[1] - self.ends[0]) * share}

    def _typical_norm(self) -> float:
        return sum(self.norms) / 2

    def _details(self) -> dict[str, Any]:
        return super()._details() | {"m": self.ends}

    def _penalty(self, x: Tensor, norms: Tensor, labels: Tensor, valid: Tensor | None) -> Tensor | float:
        a = norms.clamp(*self.norms)
        return self.norm_weight * (1 / a + a / self.norms[1] ** 2)


@losses.register("curricularface", aliases=("curricular-face",))
class CurricularFace(MarginSoftmax):
    r"""CurricularFace: ArcFace with hard classes weighted up as training gets better.

    .. math:: \eta(\theta_j) = c_j \text{ if } c_j \le \cos(\theta_y + m), \text{ else } c_j (T + c_j)

    with T the running mean of the target cosines.

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        s: Scale.
        m: Margin in radians, in [0, pi].
        rate: Share of a new batch in T.
        beyond: Past pi, see :class:`hypersphere.margins.AdditiveAngle`; the reference's choice by default.
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> CurricularFace(3, 10)(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    progress: Tensor

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        s: float = 64.0,
        m: MarginSize = 0.5,
        rate: float = 0.01,
        beyond: str = "fallback",
        **options: Any,
    ) -> None:
        check_range("rate", rate, 0, 1)
        self.rate = rate
        super().__init__(dim, classes, s=s, m=m, psi=margins.AdditiveAngle(beyond), **options)
        self.register_buffer("progress", torch.tensor(0.0))

    def _negatives(self) -> Negatives:
        return Hardened(detach=self.gradient == "cgd")

    def _own_cosines(self, units: Tensor, labels: Tensor) -> Tensor:
        return (units * normalise(self.weight[labels].to(units.dtype))).sum(1).detach()

    def _rule_parameters(
        self, own: Tensor, parameters: dict[str, Any], steps: Steps, valid: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        own = own.detach()
        progress = self.progress
        if steps is not None and own.numel():
            share = torch.ones_like(own) if valid is None else valid.to(own.dtype)
            progress = moving_average(self.progress, (share * own).sum() / share.sum(), self.rate)
        threshold = margins.AdditiveAngle("raw")(own, m=_flat(parameters["m"]))
        return _as_column(threshold, own), progress.to(own.dtype)


@losses.register("circle", aliases=("circle-loss",))
class CircleLoss(MarginSoftmax):
    r"""Circle loss on classes: each similarity is pulled as hard as it is far from its goal.

    .. math:: f_y = s\,\alpha_p (c_y - (1 - m)),\ f_j = s\,\alpha_n (c_j - m), \quad
        \alpha_p = [1 + m - c_y]_+,\ \alpha_n = [c_j + m]_+

    with constant :math:`\alpha`. On pairs of features it is :func:`circle_pairs`.

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        s: Scale, the paper's gamma.
        m: Relaxation, in [0, 1].
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> CircleLoss(3, 10)(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    def __init__(self, dim: int, classes: int, *, s: float = 256.0, m: MarginSize = 0.25, **options: Any) -> None:
        super().__init__(dim, classes, s=s, m=m, psi="circle", **options)

    def _negatives(self) -> Negatives:
        return CircleNegatives(detach=self.gradient == "cgd")

    def _rule_parameters(
        self, own: Tensor, parameters: dict[str, Any], steps: Steps, valid: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        return (_as_column(parameters["m"], own),)


# ------------------------------------------------------------------------------------------------ baselines


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

    softmax_scale: ClassVar[bool] = False

    def __init__(self, dim: int, classes: int, *, power: int = 1, bias: bool = True, **options: Any) -> None:
        check_range("power", power, 1, 2)
        if power != int(power):
            raise ArgumentError("power", f"must be 1 or 2, got {power}")
        self.power = power
        super().__init__(dim, classes, unit_weights=False, bias=bias, **options)

    def _rule_is_softmax(self) -> bool:
        return False

    def _negatives(self) -> Negatives:
        return HingeNegatives(power=self.power)

    def _sample_loss(self, negatives: Tensor, total: Tensor, target: Tensor, compared: int) -> Tensor:
        return (1 - target).relu().pow(self.power) + negatives


# ------------------------------------------------------------------------------------------------ pieces


def _angular(g: str | angular.Angular, k: float) -> angular.Angular:
    return angular.Sigmoid(k) if g == "sigmoid" else angular.create(g)


def _as_column(value: Parameter, like: Tensor) -> Tensor:
    """A rule's parameter as a scalar tensor or a column ``(B, 1)``."""
    # Filled on the device: a copy from the host would be waited for.
    tensor = value.detach().to(like.dtype) if isinstance(value, Tensor) else like.new_full((), value)
    return tensor.unsqueeze(1) if tensor.dim() == 1 else tensor


def _flat(value: Parameter) -> Parameter:
    """A column ``(B, 1)`` as ``(B,)``, for values that were made columns for shares of classes."""
    return value.squeeze(1) if isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == 1 else value


class _Unmargined(margins.NoMargin):
    """No margin on the own class: it stands on the others, with the same limits."""

    def check(self, **m: float) -> None:
        check_range("m", m["m"], 1)


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

    def psi(self, theta: Tensor, *, m: Parameter, **_: Any) -> Tensor:
        value = bend(self.inner.psi(theta, m=m), self.t)
        return value - m if self.subtract else value

    def __call__(self, cosines: Tensor, *, m: Parameter, **_: Any) -> Tensor:
        value = bend(self.inner(cosines, m=m), self.t)
        return value - m if self.subtract else value
