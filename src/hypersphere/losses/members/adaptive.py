"""Losses whose margin or weights follow the sample: its norm, its hardness, how far training is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor

from hypersphere import margins
from hypersphere.errors import ArgumentError, check_range
from hypersphere.losses.batch import Batch
from hypersphere.losses.head import MarginSoftmax
from hypersphere.losses.processes import whole_sums
from hypersphere.losses.registry import losses
from hypersphere.losses.schedules import moving_average
from hypersphere.losses.state import MarginSize


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

    contract: ClassVar[Mapping[str, Any]] = {"features": False, "gradient": "weights"}

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

    def margin_sizes(self, batch: Batch) -> dict[str, Any]:
        """The margin m and the quality z of each sample."""
        norms = batch.norms
        safe = norms.detach().clamp(1e-3, 100)
        mean, std = self.norm_mean, self.norm_std
        if batch.steps is not None:
            share = torch.ones_like(safe) if batch.valid is None else batch.valid.to(safe.dtype)
            count, total = whole_sums(share.sum(), (share * safe).sum(), sync=self.sync_statistics)
            batch_mean = total / count
            (squares,) = whole_sums((share * (safe - batch_mean).square()).sum(), sync=self.sync_statistics)
            variance = squares / (count - 1).clamp(min=0)  # of no sample or one there is none
            mean = moving_average(self.norm_mean, batch_mean, self.rate)
            std = moving_average(self.norm_std, variance.sqrt(), self.rate)
        quality = (self.h * (safe - mean) / (std + 1e-3)).clamp(-1, 1).to(norms.dtype)
        return super().margin_sizes(batch) | {"z": quality}

    def typical_norm(self) -> float:
        """The running mean."""
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

    contract: ClassVar[Mapping[str, Any]] = {"logits": False}

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
        self.ends, self.norms, self.norm_weight = _ends(m), tuple(norms), norm_weight
        super().__init__(dim, classes, s=s, m=self.ends[0], psi=margins.AdditiveAngle(beyond), **options)

    def set_margin(self, **sizes: Any) -> None:
        """Change ``m``, the margins at the lowest and the highest norm."""
        given = losses.canonical(sizes)
        if set(given) != {"m"}:
            raise ArgumentError(next(iter(set(given) - {"m"}), "m"), "is no margin of this head, which has m")
        self.ends = _ends(given["m"])
        self.m = self.ends[0]

    def margin_sizes(self, batch: Batch) -> dict[str, Any]:
        """The margin of each sample, by its norm."""
        share = (batch.norms.clamp(*self.norms) - self.norms[0]) / (self.norms[1] - self.norms[0])
        return {"m": self.ends[0] + (self.ends[1] - self.ends[0]) * share}

    def typical_norm(self) -> float:
        """The middle of the norms."""
        return sum(self.norms) / 2

    def details(self) -> dict[str, Any]:
        """Margins at both ends."""
        return super().details() | {"m": self.ends}

    def penalty(self, batch: Batch) -> Tensor | float:
        """The pull on the norm."""
        a = batch.norms.clamp(*self.norms)
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
        psi = margins.AdditiveAngle(beyond)
        super().__init__(dim, classes, s=s, m=m, psi=psi, negatives="hardened", **options)
        self.register_buffer("progress", torch.tensor(0.0))

    def rule_parameters(
        self, batch: Batch, sizes: Mapping[str, Any], target: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The threshold of each sample, and T, which a training step moves."""
        target = self.target_cosines(batch) if target is None else target.detach()
        progress = self.progress
        if batch.steps is not None:
            share = torch.ones_like(target) if batch.valid is None else batch.valid.to(target.dtype)
            if batch.soft:
                share = batch.labels
            total, count = whole_sums((share * target).sum(), share.sum(), sync=self.sync_statistics)
            progress = moving_average(self.progress, total / count, self.rate)
        threshold, _ = super().rule_parameters(batch, sizes, target)
        return threshold, progress.to(target.dtype)


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

    contract: ClassVar[Mapping[str, Any]] = {"gradient": False, "derivative": False}

    def __init__(self, dim: int, classes: int, *, s: float = 256.0, m: MarginSize = 0.25, **options: Any) -> None:
        super().__init__(dim, classes, s=s, m=m, psi="circle", negatives="circle", **options)


def _ends(m: Any) -> tuple[float, float]:
    """MagFace's margins at both ends, checked."""
    numbers = isinstance(m, tuple | list) and len(m) == 2 and all(isinstance(end, Real) for end in m)
    if not numbers or not 0 <= m[0] <= m[1] <= math.pi:
        raise ArgumentError("m", f"must be two numbers in [0, pi] that do not fall, got {m}")
    return float(m[0]), float(m[1])
