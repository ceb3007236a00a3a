"""Losses that compare features with features or with running centres: baselines of the margin-softmax family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from hypersphere.errors import ArgumentError, check_range
from hypersphere.geometry import at_least_float32, full_precision, in_float64, normalise, safe_sqrt
from hypersphere.losses.batch import Batch
from hypersphere.losses.head import MarginSoftmax
from hypersphere.losses.members.plain import Softmax
from hypersphere.losses.pairs import squared_distances
from hypersphere.losses.registry import losses
from hypersphere.losses.state import Kept


@losses.register("contrastive", aliases=("softmax-contrastive",))
class Contrastive(Softmax):
    r"""Softmax plus the contrastive loss of all pairs of a batch.

    .. math:: L = L_{softmax} + w \cdot \text{mean}_{i<j}\, \tfrac12 [\text{same}\; d_{ij}^2 +
        (1 - \text{same}) \max(0, m - d_{ij})^2]

    In float32 the square of a distance above 1.8e19 is infinite, and so is the loss; distances below 1e-21 have a
    gradient that is off by 1e-3 and more, or none.

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        m: Distance beyond which unequal pairs cost nothing.
        pair_weight: Weight w of the pairs.
        bias: Add a bias per class.
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> Contrastive(3, 10)(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    contract: ClassVar[Mapping[str, Any]] = {"logits": False}
    takes_soft_labels = False

    def __init__(
        self, dim: int, classes: int, *, m: float = 1.0, pair_weight: float = 0.1, bias: bool = True, **options: Any
    ) -> None:
        check_range("pair_weight", pair_weight, 0)
        self.pair_weight = pair_weight
        super().__init__(dim, classes, m=m, bias=bias, **options)

    def check_margins(self, sizes: Mapping[str, Kept]) -> None:
        """One distance, at least 0."""
        check_distance(sizes)

    def penalty(self, batch: Batch) -> Tensor | float:
        """The mean loss of the batch's pairs."""
        labels, valid = batch.labels, batch.valid
        counted = torch.ones_like(labels, dtype=torch.bool) if valid is None else valid
        pairs = (counted.unsqueeze(0) & counted.unsqueeze(1)).triu(1)
        same = labels.unsqueeze(0) == labels.unsqueeze(1)
        squared = squared_distances(batch.features)
        loss = torch.where(same, squared, (distance_of(self) - safe_sqrt(squared)).relu().square()) / 2
        return self.pair_weight * torch.where(pairs, loss, 0.0).sum() / pairs.sum().clamp(min=1)

    def details(self) -> dict[str, Any]:
        """The margin of the pairs."""
        return super().details() | {"m": self.m}


@losses.register("center", aliases=("centre", "center-loss", "centre-loss"))
class CenterLoss(Softmax):
    r"""Softmax plus the centre loss: features are drawn to the running centre of their class.

    .. math:: L = L_{softmax} + \frac{w}{2} \text{mean}_i \|x_i - c_{y_i}\|^2, \quad
        c_j \leftarrow c_j + \alpha \frac{\sum_{y_i = j} (x_i - c_j)}{1 + n_j}

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        centre_weight: Weight w; 0.008 for faces, 0.01 for digits in the reference.
        centre_rate: Step :math:`\alpha` of the centres.
        bias: Add a bias per class.
        **options: See :class:`MarginSoftmax`.

    Example:
        >>> CenterLoss(3, 10)(torch.randn(2, 3), torch.tensor([0, 1])).shape
        torch.Size([])
    """

    contract: ClassVar[Mapping[str, Any]] = {"logits": False}
    takes_soft_labels = False
    class_rows = ("weight", "bias", "class_centres")
    narrow_buffers = ("class_centres",)
    class_centres: Tensor

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        centre_weight: float = 0.01,
        centre_rate: float = 0.5,
        bias: bool = True,
        **options: Any,
    ) -> None:
        check_range("centre_weight", centre_weight, 0)
        check_range("centre_rate", centre_rate, 0, 1)
        self.centre_weight, self.centre_rate = centre_weight, centre_rate
        super().__init__(dim, classes, bias=bias, **options)
        self.register_buffer("class_centres", torch.zeros(classes, dim))

    def add_classes(self, classes: int, features: Tensor | None = None, labels: Tensor | None = None) -> Self:
        """See :meth:`MarginSoftmax.add_classes`; the running centres of new classes begin at 0."""
        if self.shards is not None:  # which comes here again, unsharded
            return super().add_classes(classes, features, labels)
        super().add_classes(classes, features, labels)
        self.class_centres = torch.cat([self.class_centres, self.class_centres.new_zeros(classes, self.dim)])
        return self

    def penalty(self, batch: Batch) -> Tensor | float:
        """Half the weighted square of the distance to the running centre, which a training step moves."""
        x, labels, valid = batch.features, batch.labels, batch.valid
        if self.training and valid is not None:
            own = self.moved(self.class_centres, x, labels, valid, self.centre_rate)
        else:
            own = self.centres_of(self.class_centres, labels)
        return self.centre_weight / 2 * (x - own.to(x.dtype)).square().sum(1)


@losses.register("triplet", aliases=("triplet-loss",))
class TripletLoss(MarginSoftmax):
    r"""Triplet loss of unit features, with semi-hard negatives mined in the batch.

    .. math:: \text{mean}\; \max(0, \|a - p\|^2 - \|a - n\|^2 + m)

    over all pairs (a, p) of one class, n the closest sample of another class that is farther than p (or the farthest
    there is). It trains no class weights: ``weight`` holds the running means of the classes, for prediction.

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        m: By how much a negative must be farther, in squared distance.
        centre_rate: Step of the running means.
        s: Scale of the logits at prediction.
        reduction: ``"mean"`` over all pairs (a, p), their ``"sum"``, or ``"none"``: for each anchor the mean over its
            pairs, 0 where it has none.
        ignore_index: Samples with this label count for nothing.
        validate: Check labels and features on every device.

    Example:
        >>> TripletLoss(3, 10)(torch.randn(4, 3), torch.tensor([0, 1, 0, 1])).shape
        torch.Size([])
    """

    contract: ClassVar[Mapping[str, Any]] = {"logits": False, "target": False, "single": False}

    takes_soft_labels = False
    shared_options = ()
    narrow_buffers = ("weight",)
    softmax_scale = False
    weight: Tensor  # type: ignore[assignment]

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        m: float = 0.2,
        centre_rate: float = 0.5,
        s: float = 30.0,
        reduction: str = "mean",
        ignore_index: int = -100,
        validate: bool = False,
    ) -> None:
        check_range("centre_rate", centre_rate, 0, 1)
        self.centre_rate = centre_rate
        super().__init__(
            dim, classes, m=m, s=s, reduction=reduction, ignore_index=ignore_index, validate=validate, path="dense"
        )
        weight = self.weight.detach().clone()
        del self.weight
        self.register_buffer("weight", weight)

    def check_margins(self, sizes: Mapping[str, Kept]) -> None:
        """One distance, at least 0."""
        check_distance(sizes)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Loss of a batch: ``(B, D), (B,) -> ()``; 0 where there is no triplet."""
        shards, own = self.shards, slice(None)
        if shards is None:
            self.check(features, labels, soft=False)
        else:
            features, _, labels, own = self.whole_batch(shards, features, labels)
        with full_precision(features):
            units = normalise(at_least_float32(features))
            valid = labels != self.spec.ignore_index
            safe = torch.where(valid, labels, 0)
            if self.training:
                self.moved(self.weight, units, safe, valid, self.centre_rate)
            both = valid.unsqueeze(0) & valid.unsqueeze(1)
            same = (safe.unsqueeze(0) == safe.unsqueeze(1)) & both
            positive = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
            # In float64: which negative is the next one is decided by small differences of small distances.
            distance = squared_distances(normalise(in_float64(at_least_float32(features))))
            loss = self._mined(distance, positive, both & ~same).to(units.dtype)
        return loss if shards is None or loss.dim() == 0 else shards.own_losses(loss, own)

    def psi(self, theta: Tensor, label: int = 0, norm: float | None = None) -> Tensor:
        """There is none: a triplet has no target logit."""
        raise ArgumentError("theta", "has no target value here: the triplet loss compares features, not classes")

    def details(self) -> dict[str, Any]:
        """The margin of the pairs."""
        return super().details() | {"m": self.m}

    def _mined(self, distance: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Loss from squared distances ``(B, B)`` and which pairs are of one class and of two."""
        if not len(distance):
            return distance.sum()
        far = float("inf")
        ordered, order = torch.where(negative, distance, far).detach().sort(1)
        first = torch.searchsorted(ordered, distance.detach().contiguous(), right=True)
        last = negative.sum(1, keepdim=True) - 1
        chosen = order.gather(1, torch.minimum(first, last.clamp(min=0)))
        loss = (distance - distance.gather(1, chosen) + distance_of(self)).relu()
        counted = positive & (last >= 0)
        loss = torch.where(counted, loss, 0.0)
        if self.spec.reduction == "sum":
            return loss.sum()
        if self.spec.reduction == "none":
            return loss.sum(1) / counted.sum(1).clamp(min=1)
        return loss.sum() / counted.sum().clamp(min=1)


def check_distance(sizes: Mapping[str, Kept]) -> None:
    """Raise :class:`ArgumentError` unless a margin between features is one number of at least 0.

    Example:
        >>> check_distance({"m": (-1.0, None)})
        Traceback (most recent call last):
        hypersphere.errors.ArgumentError: m must be at least 0, got -1.0
    """
    for name, (size, _) in sizes.items():
        if not isinstance(size, float):
            raise ArgumentError(name, "must be one number: pairs of features have no class and no schedule")
        check_range(name, size, 0)


def distance_of(head: MarginSoftmax) -> float:
    """The margin between features, which :func:`check_distance` let pass.

    Example:
        >>> distance_of(TripletLoss(3, 10))
        0.2
    """
    assert isinstance(head.m, float)
    return head.m
