"""Losses with a margin added to the angle or taken off the cosine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hypersphere import margins
from hypersphere.errors import check_count
from hypersphere.geometry import normalise
from hypersphere.losses.head import MarginSoftmax
from hypersphere.losses.registry import losses
from hypersphere.losses.state import MarginSize
from hypersphere.neurons import whole


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

    .. math:: f_{i,y} = s \cos(\theta + m)

    and a straight line for angles above :math:`\pi - 2m`, where the cosine would soon turn and leave features without a
    pull towards their class (``beyond``).

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        s: Scale.
        m: Margin in radians, in [0, pi].
        beyond: Past pi: ``"tangent"``, ``"clip"``, ``"fallback"``, ``"raw"`` or ``"easy"``; see
            :class:`hypersphere.margins.AdditiveAngle`.
        **options: See :class:`MarginSoftmax`. With few feature dimensions the margin can push an untrained network's
            features away from every class at once; an ``annealer`` prevents it.

    Example:
        >>> ArcFace(3, 10, s=16.0)(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    def __init__(
        self, dim: int, classes: int, *, s: float = 64.0, m: MarginSize = 0.5, beyond: str = "tangent", **options: Any
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


@losses.register("subcenter-arcface", aliases=("sub-centre-arcface", "subcentre-arcface", "sub-center-arcface"))
class SubcenterArcFace(ArcFace):
    r"""Sub-centre ArcFace: several sub-centres a class, of which the closest counts, so that noisy labels find one.

    .. math:: \cos\theta_{ij} = \max_k \hat x_i \cdot \hat W_{jk}, \quad f_{i,y} = s \cos(\theta + m)

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        k: Sub-centres of each class.
        s: Scale.
        m: Margin in radians, in [0, pi].
        beyond: Past pi, see :class:`hypersphere.margins.AdditiveAngle`.
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> SubcenterArcFace(3, 10)(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    renamed_options: ClassVar[Mapping[str, str]] = {"centres": "k"}

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        k: int = 3,
        s: float = 64.0,
        m: MarginSize = 0.5,
        beyond: str = "tangent",
        **options: Any,
    ) -> None:
        check_count("k", k)
        super().__init__(dim, classes, s=s, m=m, beyond=beyond, subcentres=k, **options)

    @torch.no_grad()
    def clean(self, features: Tensor, labels: Tensor, threshold: float = math.radians(75)) -> Tensor:
        """Which samples to keep for training with one sub-centre a class.

        Per class the sub-centre that most samples are closest to is the dominant one; samples at least ``threshold``
        away from it are taken for mislabelled.

        Args:
            features: ``(N, D)``.
            labels: ``(N,)``.
            threshold: Angle in radians.

        Returns:
            ``(N,)`` booleans.
        """
        cosines, dominant = self._dominant(features, labels)
        counted = labels != self.spec.ignore_index
        closest = cosines.gather(1, dominant[torch.where(counted, labels, 0)].unsqueeze(1)).squeeze(1)
        return (closest > math.cos(threshold)) & counted

    @torch.no_grad()
    def dominant_weight(self, features: Tensor, labels: Tensor) -> Tensor:
        """The dominant sub-centre of each class, ``(C, D)``: the weights of an :class:`ArcFace` head to go on with."""
        _, dominant = self._dominant(features, labels)
        rows = self.rotated_weight().unflatten(0, (-1, self.subcentres))
        return rows[torch.arange(self.classes, device=rows.device), dominant].clone()

    def _dominant(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines to the sub-centres of each sample's target ``(N, k)``, and each class' dominant sub-centre."""
        self.check(features, labels, soft=False)
        counted = labels != self.spec.ignore_index
        own = torch.where(counted, labels, 0)
        units = normalise(self.rotated(features))
        rows = normalise(whole(self.weight.detach()).to(units.dtype)).unflatten(0, (-1, self.subcentres))
        cosines = (rows[own] * units.unsqueeze(1)).sum(2)
        votes = torch.zeros(self.classes, self.subcentres, device=labels.device)
        votes.index_put_((own, cosines.argmax(1)), counted.to(votes.dtype), accumulate=True)
        return cosines, votes.argmax(1)
