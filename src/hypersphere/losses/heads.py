"""The margin-softmax head and its named members."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypersphere.errors import ArgumentError, check_range
from hypersphere.geometry import at_least_float32, cosine_matrix, full_precision, norm
from hypersphere.losses.annealing import LambdaAnnealer
from hypersphere.margins import Margin, additive_angle, multiplicative
from hypersphere.registry import Registry

losses: Registry[MarginSoftmax] = Registry("loss", positional=("dim", "classes"))


def create(name: str, dim: int, classes: int, **options: Any) -> MarginSoftmax:
    """Build a head by name; ``hypersphere list losses`` prints the names and their options.

    Args:
        name: Name or alias; hyphens and underscores are the same.
        dim: Feature dimension D.
        classes: Number of classes C.
        **options: The member's own options.

    Example:
        >>> create("sphereface", 64, 10, m=3).classes
        10
    """
    return losses.create(name, dim, classes, **options)


class MarginSoftmax(nn.Module):
    r"""Softmax cross-entropy over logits made of a scale and a (margin) cosine.

    .. math:: f_{ij} = \text{scale}_{ij} \cdot
        \begin{cases} \psi(\theta_{ij}) & j = y_i \\ \cos\theta_{ij} & \text{else} \end{cases}

    The scale is :math:`s` where given, else the feature norm :math:`\|x_i\|`. Without ``unit_weights`` it is
    :math:`\|W_j\| \|x_i\|` (and a bias is possible): the plain linear classifier.

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        s: Constant scale; ``None`` keeps the feature norm.
        margin: Function of the ``(B,)`` target cosines; ``None`` is no margin.
        unit_weights: Compare with the directions of the class weights only.
        bias: Add a bias per class (only without ``unit_weights``).
        annealer: Blends the margin in over the first training steps.

    Shape:
        features ``(B, D)``, labels ``(B,)`` in [0, C), weight ``(C, D)``, loss ``()``.

    Example:
        >>> head = MarginSoftmax(8, 3, s=16.0, margin=lambda c: c - 0.35)
        >>> head(torch.randn(4, 8), torch.tensor([0, 1, 2, 2])).shape
        torch.Size([])
    """

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        s: float | None = None,
        margin: Margin | None = None,
        unit_weights: bool = True,
        bias: bool = False,
        annealer: LambdaAnnealer | None = None,
    ) -> None:
        super().__init__()
        check_range("dim", dim, 1)
        check_range("classes", classes, 1)
        if s is not None:
            check_range("s", s, 0, open_low=True)
        if bias and unit_weights:
            raise ArgumentError("bias", "needs unit_weights=False: a bias is not a direction")
        self.dim, self.classes, self.s = dim, classes, s
        self.margin, self.unit_weights, self.annealer = margin, unit_weights, annealer
        self.weight = nn.Parameter(torch.empty(classes, dim))
        self.bias = nn.Parameter(torch.empty(classes)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform class weights, zero bias."""
        nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def cosines(self, features: Tensor) -> Tensor:
        """Cosines to every class weight: ``(B, D) -> (B, C)``, in float32 or wider."""
        self._check_features(features)
        return cosine_matrix(features, self.weight)

    def _scaled(self, cosines: Tensor, features: Tensor) -> Tensor:
        scale: Tensor | float = norm(features, keepdim=True) if self.s is None else self.s
        logits = scale * cosines
        if not self.unit_weights:
            logits = logits * norm(self.weight)
        return logits if self.bias is None else logits + at_least_float32(self.bias)

    def logits(self, features: Tensor) -> Tensor:
        """Scores without margin, for prediction: ``(B, D) -> (B, C)``, in float32 or wider."""
        return self._scaled(self.cosines(features), features)

    def margin_logits(self, features: Tensor, labels: Tensor, steps: Tensor | None = None) -> Tensor:
        """Scores with the margin on each sample's own class: ``(B, D), (B,) -> (B, C)``.

        The margin is annealed as after ``steps`` training steps, by default those taken so far.
        """
        self._check_labels(features, labels)
        cosines = self.cosines(features)
        if self.margin is not None:
            own = labels.unsqueeze(1)
            plain = cosines.gather(1, own)
            target = self.margin(plain)
            if self.annealer is not None:
                weight = self.annealer.value(steps).to(plain.dtype)
                target = (weight * plain + target) / (1 + weight)
            cosines = cosines.scatter(1, own, target)
        return self._scaled(cosines, features)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of a batch: ``(B, D), (B,) -> ()``; 0 for an empty batch."""
        steps = None
        if self.annealer is not None and self.training:
            self._check_labels(features, labels)  # a rejected batch is no step
            steps = self.annealer.advance()
        with full_precision(features):
            total = F.cross_entropy(self.margin_logits(features, labels, steps), labels, reduction="sum")
        return total / max(len(labels), 1)

    def _check_features(self, features: Tensor) -> None:
        if features.dim() != 2 or features.shape[1] != self.dim:
            raise ArgumentError("features", f"must have shape (B, {self.dim}), got {tuple(features.shape)}")

    def _check_labels(self, features: Tensor, labels: Tensor) -> None:
        self._check_features(features)
        if labels.dtype != torch.int64 or labels.shape != features.shape[:1]:
            raise ArgumentError(
                "labels",
                f"must be int64 of shape ({features.shape[0]},), got {labels.dtype} of shape {tuple(labels.shape)}",
            )
        # Reading values would synchronise a GPU or break a compiled graph.
        if labels.device.type != "cpu" or torch.compiler.is_compiling() or not labels.numel():
            return
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= self.classes:
            raise ArgumentError("labels", f"must lie in [0, {self.classes}), got {low if low < 0 else high}")

    def extra_repr(self) -> str:
        """Sizes and scale."""
        return f"dim={self.dim}, classes={self.classes}, s={self.s}, unit_weights={self.unit_weights}"


@losses.register("softmax")
class Softmax(MarginSoftmax):
    r"""Plain softmax cross-entropy on a linear classifier.

    .. math:: f_{ij} = \langle W_j, x_i \rangle + b_j

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        bias: Add a bias per class.

    Example:
        >>> Softmax(3, 10)(torch.zeros(2, 3), torch.tensor([0, 1]))
        tensor(2.3026, grad_fn=<DivBackward0>)
    """

    def __init__(self, dim: int, classes: int, *, bias: bool = True) -> None:
        super().__init__(dim, classes, unit_weights=False, bias=bias)

    def logits(self, features: Tensor) -> Tensor:
        """Scores ``(B, D) -> (B, C)``; one product, the same value as scale times cosine."""
        self._check_features(features)
        with full_precision(features):
            x = at_least_float32(features)
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return F.linear(x, self.weight.to(x.dtype), bias)

    def margin_logits(self, features: Tensor, labels: Tensor, steps: Tensor | None = None) -> Tensor:
        """The plain scores: this member has no margin."""
        self._check_labels(features, labels)
        return self.logits(features)


@losses.register("a-softmax", aliases=("sphereface", "angular-softmax"))
class ASoftmax(MarginSoftmax):
    r"""A-Softmax (SphereFace): unit class weights, feature norm kept, multiplicative angular margin.

    .. math:: f_{i,y} = \|x_i\| \psi(\theta), \quad \psi(\theta) = \cos(m\theta - k\pi) - 2k

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        m: Margin, at least 1.
        annealer: Schedule that blends the margin in; none by default.

    Example:
        >>> ASoftmax(3, 10, m=4, annealer=LambdaAnnealer())(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    def __init__(self, dim: int, classes: int, *, m: float = 4.0, annealer: LambdaAnnealer | None = None) -> None:
        check_range("m", m, 1)
        super().__init__(dim, classes, margin=functools.partial(multiplicative, m=m), annealer=annealer)


@losses.register("arcface", aliases=("arc-softmax",))
class ArcFace(MarginSoftmax):
    r"""ArcFace: unit class weights and features, constant scale, additive angular margin.

    .. math:: f_{i,y} = s \cos(\min(\theta + m, \pi))

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        s: Scale.
        m: Margin in radians, in [0, pi].
        annealer: Schedule that blends the margin in; none by default. With few feature dimensions the margin can push
            an untrained network's features away from every class at once, and this prevents it.

    Example:
        >>> ArcFace(3, 10, s=16.0)(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    def __init__(
        self, dim: int, classes: int, *, s: float = 64.0, m: float = 0.5, annealer: LambdaAnnealer | None = None
    ) -> None:
        check_range("m", m, 0, torch.pi)
        super().__init__(dim, classes, s=s, margin=functools.partial(additive_angle, m=m), annealer=annealer)
