"""Losses with a factor on the angle: the SphereFace family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hypersphere import margins
from hypersphere.angular import Angular
from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.geometry import normalise
from hypersphere.losses.batch import Batch
from hypersphere.losses.head import MarginSoftmax
from hypersphere.losses.members.plain import steep
from hypersphere.losses.negatives import Riesz
from hypersphere.losses.registry import losses
from hypersphere.losses.state import Kept, MarginSize, bounds
from hypersphere.losses.streaming import ClassProblem, class_statistics
from hypersphere.margins import Margin


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

    def check_margins(self, sizes: Mapping[str, Kept]) -> None:
        """At least 1, and integers."""
        super().check_margins(sizes)
        for size, per_class in sizes.values():
            ends = bounds(size, None) if per_class is None else per_class.tolist()
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

    contract: ClassVar[Mapping[str, Any]] = {"variants": ({"g": "sqcos", "m": 2},)}

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        m: MarginSize = 4,
        g: str | Angular = "linear",
        k: float = 0.3,
        s: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dim, classes, s=s, m=m, psi="multiplicative", g=steep(g, k), **options)


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


@losses.register("sphereface-r", aliases=("sphereface-revived",))
class SphereFaceR(MarginSoftmax):
    r"""SphereFace-R: multiplicative margins made trainable, on the target or on the non-targets.

    .. math:: v0: \psi = \cos(m\theta - k\pi) - 2k \qquad v1: \psi = \cos(\min(m\theta, \pi)) \qquad
        v2: \eta = \cos(\theta / m)

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        version: ``"v0"``, ``"v1"`` or ``"v2"``.
        feature_norm: ``"hard"`` scales unit features by ``s``; ``"none"`` keeps the feature norm; ``"soft"`` keeps it
            and pulls it towards ``s``.
        s: Scale, or the norm that soft normalisation pulls to; 60 (hard) or 30 (soft) by default, refused with
            ``"none"``, which has neither.
        m: Margin, at least 1.
        loss_weight: The cross-entropy is multiplied by ``loss_weight / s``, or where there is no s by ``loss_weight``;
            ``None`` leaves it.
        pull: Weight of the pull :math:`|\|x\| - s|` of soft normalisation.
        gradient: Detached by default, as in the reference.
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> SphereFaceR(3, 10, version="v1")(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    contract: ClassVar[Mapping[str, Any]] = {"variants": ({"version": "v0"}, {"version": "v1"})}

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
        if feature_norm == "none" and s is not None:
            raise ArgumentError("s", f"has no meaning with feature_norm='none', which keeps the norm, got {s:g}")
        if loss_weight is not None:
            check_range("loss_weight", loss_weight, 0, open_low=True)
        self.radius = radius
        self.loss_factor = 1.0 if loss_weight is None else loss_weight / (1.0 if radius is None else radius)
        psis: dict[str, str | Margin] = {
            "v0": "multiplicative",
            "v1": "clipped-multiplicative",
            "v2": _Unmargined(),
        }
        hard = radius if feature_norm == "hard" else None
        rule = "widened" if version == "v2" else "plain"
        super().__init__(dim, classes, s=hard, m=m, psi=psis[version], negatives=rule, gradient=gradient, **options)

    def details(self) -> dict[str, Any]:
        """Version and feature norm, too."""
        return super().details() | {"version": self.version, "feature_norm": self.feature_norm}

    def penalty(self, batch: Batch) -> Tensor | float:
        """The pull of soft normalisation."""
        if self.feature_norm != "soft" or self.radius is None:
            return 0.0
        return self.pull * (batch.norms - self.radius).abs()


@losses.register("sphereface-plus", aliases=("sphereface+",))
class SphereFacePlus(ASoftmax):
    r"""SphereFace+: A-Softmax plus the hyperspherical energy of the batch's classes against all others.

    .. math:: L = L_{A} + \frac{\lambda}{N (C-1)} \sum_i \sum_{j \ne y_i} \|\hat W_{y_i} - \hat W_j\|^{-2}

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        m: Margin, any number from 1 on.
        energy_weight: Weight of the energy.
        energy_power: Riesz exponent of the energy. Chords keep their digits down to where directions are no longer
            told apart (5e-7 in float32); nearer ones count as that long and have no gradient.
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> SphereFacePlus(3, 10)(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    contract: ClassVar[Mapping[str, Any]] = {"logits": False, "variants": ({"energy_power": 0.0},)}

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

    def penalty(self, batch: Batch) -> Tensor | float:
        """The energy of the batch's classes against all others."""
        if self.classes == 1:
            return 0.0
        shards, weight, labels = self.shards, self.own_weight, batch.labels
        own = torch.arange(self.classes, device=labels.device) if batch.soft else labels
        columns, rows = own, weight.to(batch.units.dtype)
        units = normalise(rows[own] if shards is None else shards.chosen(rows, columns := shards.columns(own)))
        seen = units if shards is None else shards.entered(units)[0]
        problem = ClassProblem(seen, weight, columns, units.new_ones(len(units)), self.energy)
        found = class_statistics(problem, chunked=True)  # near pairs are looked for there, and cost nothing elsewhere
        if shards is not None:
            found, _ = shards.put_together(found, columns, None, softmax=False)
        energy = self.energy_weight * found.negatives / (self.classes - 1)
        return energy.unsqueeze(0) if batch.soft else energy


class _Unmargined(margins.NoMargin):
    """No margin on the target: it stands on the non-targets, with the same limits."""

    def check(self, **m: float) -> None:
        check_range("m", m["m"], 1)
