"""Networks for point clouds ``(B, 3, P)``: PointNet and PointNet++, with the published widths.

Layers that see each point by itself are linear layers over rows, one for each point of each cloud, so whatever knows
linear layers (energies, rotations, decoupled operators) knows them. The last published layer is the head in
:mod:`hypersphere.losses`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hypersphere.errors import ArgumentError, check_range
from hypersphere.geometry import full_precision
from hypersphere.models.networks import Layer, check_each, models, set_batch_norm
from hypersphere.nn import factory
from hypersphere.orthogonal.algebra import product


class _Rows(nn.Sequential):
    """Linear layers over rows ``(rows, C)``, each followed by batch normalisation, activation and dropout."""

    def __init__(self, inputs: int, widths: Sequence[int], linear: Layer, act: Layer, dropout: Sequence[float]) -> None:
        layers: list[nn.Module] = []
        for width, share in zip(widths, dropout, strict=True):
            layers += [factory(linear)(inputs, width, bias=False), nn.BatchNorm1d(width), factory(act)()]
            layers += [nn.Dropout(share)] if share else []
            inputs = width
        super().__init__(*layers)


def _check_clouds(shape: tuple[int, ...]) -> None:
    if len(shape) != 2 or shape[0] != 3 or shape[1] < 1:
        raise ArgumentError("shape", f"must be (3, P), the coordinates of P points, got {tuple(shape)}")


class TNet(nn.Module):
    """A small PointNet that puts out one matrix for each cloud, the identity before it is trained.

    Args:
        size: Coordinates of a point, k.
        linear: Linear layer.
        act: Activation layer.

    Shape:
        ``(B, P, k) -> (B, k, k)``, in float32.

    Example:
        >>> TNet(3).eval()(torch.rand(2, 9, 3))[0]
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 1.]], grad_fn=<SelectBackward0>)
    """

    def __init__(self, size: int, *, linear: Layer = "linear", act: Layer = "relu") -> None:
        super().__init__()
        self.size = size
        self.points = _Rows(size, (64, 128, 1024), linear, act, (0, 0, 0))
        self.hidden = _Rows(1024, (512, 256), linear, act, (0, 0))
        self.matrix = nn.Linear(256, size * size)
        self.reset()

    def reset(self) -> None:
        """Make the matrix the identity, whatever the cloud."""
        with torch.no_grad():
            self.matrix.weight.zero_()
            self.matrix.bias.copy_(torch.eye(self.size).flatten())

    def forward(self, points: Tensor) -> Tensor:
        """Matrices ``(B, k, k)`` of points ``(B, P, k)``."""
        rows = self.points(points.flatten(0, 1)).unflatten(0, points.shape[:2])
        pooled = self.hidden(rows.max(1).values)
        with full_precision(pooled):  # the identity plus small numbers, most of which bfloat16 would round away
            matrices: Tensor = self.matrix(pooled.float()).unflatten(1, (self.size, self.size))
            return matrices


def orthogonality(matrices: Tensor) -> Tensor:
    r"""Half the mean squared distance of matrices from orthogonal ones: :math:`\frac12 \|A A^\top - I\|_F^2`.

    Args:
        matrices: ``(B, k, k)``.

    Returns:
        ``()``, in float32 or wider.

    Example:
        >>> orthogonality(2 * torch.eye(3)[None])
        tensor(13.5000)
    """
    with full_precision(matrices):
        wide = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
        distance = product(wide, wide.mT) - torch.eye(matrices.shape[-1], dtype=wide.dtype, device=wide.device)
        return 0.5 * distance.square().sum((1, 2)).mean()


@models.register("pointnet")
class PointNet(nn.Module):
    r"""PointNet: the same layers for each point, the maximum over the points, and fully connected layers.

    Without T-Nets the network is the basic one. With them, one turns the points, and one the features behind the second
    layer; training then also minimises :math:`\frac{\mu}{2} \|A A^\top - I\|_F^2` of the latter's matrix A, the mean
    over clouds. The published :math:`0.001` is the weight of the sum over a batch of 32 clouds, so here it is 0.032.

    Energies leave the layers of T-Nets alone. Rotations must, too (``exclude: "*_transform.*"``): the last layers start
    as zeros, which stay zeros however they are turned.

    Args:
        shape: Shape ``(3, P)`` of one cloud.
        t_nets: Add the T-Nets.
        widths: Outputs of the layers for each point.
        hidden: Outputs of the fully connected layers; the last are the features.
        dropout: Share of numbers dropped behind the last layer, with T-Nets behind every fully connected one.
        transform_weight: Weight :math:`\mu` of the distance from orthogonal matrices.
        bn_momentum: Momentum of batch normalisation; ``None`` keeps the layer's own.
        linear: Linear layer.
        act: Activation layer.

    Shape:
        ``(B, 3, P) -> (B, hidden[-1])``.

    Example:
        >>> PointNet((3, 64))(torch.rand(2, 3, 64)).shape
        torch.Size([2, 256])
    """

    later_options: ClassVar[Mapping[str, Any]] = {"bn_momentum": None}

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        t_nets: bool = False,
        widths: tuple[int, ...] = (64, 64, 64, 128, 1024),
        hidden: tuple[int, ...] = (512, 256),
        dropout: float = 0.3,
        transform_weight: float = 0.032,
        bn_momentum: float | None = None,
        linear: Layer = "linear",
        act: Layer = "relu",
    ) -> None:
        super().__init__()
        _check_clouds(shape)
        check_each("widths", widths)
        check_each("hidden", hidden)
        check_range("dropout", dropout, 0, 1)
        check_range("transform_weight", transform_weight, 0)
        if len(widths) < 1 + t_nets or not hidden:
            raise ArgumentError("widths" if hidden else "hidden", "must have at least one layer (with T-Nets: two)")
        split = 2 if t_nets else len(widths)
        self.input_transform = TNet(3, linear=linear, act=act) if t_nets else None
        self.first = _Rows(3, widths[:split], linear, act, [0] * split)
        self.feature_transform = TNet(widths[1], linear=linear, act=act) if t_nets else None
        self.second = _Rows(widths[split - 1], widths[split:], linear, act, [0] * len(widths[split:]))
        shares = [dropout if t_nets or place == len(hidden) - 1 else 0.0 for place in range(len(hidden))]
        self.hidden = _Rows(widths[-1], hidden, linear, act, shares)
        self.dim = hidden[-1]
        _finish(self, bn_momentum)
        if t_nets:
            self.transform_weight = transform_weight
            self.loss_names = ("loss", "transform")
            self.spared = ("input_transform.*", "feature_transform.*")

    def forward(self, clouds: Tensor) -> Tensor:
        """Features ``(B, D)`` of clouds ``(B, 3, P)``."""
        return self._features(clouds)[0]

    def _features(self, clouds: Tensor) -> tuple[Tensor, Tensor | None]:
        """Features, and the matrices of the second T-Net."""
        matrices = None
        points = clouds.transpose(1, 2)
        if self.input_transform is not None:
            turn = self.input_transform(points)
            # Elementwise: coordinates keep their digits whatever products of matrices are rounded to.
            points = (points.unsqueeze(3) * turn.unsqueeze(1)).sum(2)
        rows = self.first(points.flatten(0, 1))
        if self.feature_transform is not None:
            features = rows.unflatten(0, points.shape[:2])
            matrices = self.feature_transform(features)
            rows = torch.bmm(features, matrices.to(features.dtype)).flatten(0, 1)
        rows = self.second(rows)
        return self.hidden(rows.unflatten(0, points.shape[:2]).max(1).values), matrices

    def losses(self, clouds: Tensor, labels: Tensor, head: nn.Module) -> tuple[Tensor, Tensor]:
        """The head's loss, and the weighted distance of the feature transform from orthogonal matrices."""
        features, matrices = self._features(clouds)
        if matrices is None:
            raise ArgumentError("t_nets", "must be true for a loss of their matrices")
        return head(features, labels), self.transform_weight * orthogonality(matrices)


# ------------------------------------------------------------------------------------------------- PointNet++


def squared_distances(centres: Tensor, clouds: Tensor) -> Tensor:
    """Squared distances ``(B, S, P)`` between points ``(B, 3, S)`` and ``(B, 3, P)``, from their differences.

    Example:
        >>> squared_distances(torch.zeros(1, 3, 1), torch.ones(1, 3, 2))
        tensor([[[3., 3.]]])
    """
    return (centres.unsqueeze(3) - clouds.unsqueeze(2)).square().sum(1)


@torch.no_grad()
def farthest_points(clouds: Tensor, count: int) -> Tensor:
    """Points that cover each cloud: the first one, then again and again the point farthest from all before.

    The first points chosen from the chosen ones are these again, in the same order. Of several points equally far the
    first counts.

    Args:
        clouds: ``(B, 3, P)``.
        count: How many, 1 to P.

    Returns:
        Their places ``(B, count)`` int64.

    Example:
        >>> farthest_points(torch.tensor([[[0.0, 1.0, 9.0, 4.0]] * 3]), 3)
        tensor([[0, 2, 3]])
    """
    check_range("count", count, 1, clouds.shape[2])
    last = clouds.new_zeros(len(clouds), 1, dtype=torch.int64)
    chosen = [last]
    nearest = clouds.new_full((len(clouds), clouds.shape[2]), torch.inf)
    for _ in range(count - 1):
        point = clouds.gather(2, last.unsqueeze(1).expand(-1, 3, -1))
        nearest = torch.minimum(nearest, (clouds - point).square().sum(1))
        last = nearest.argmax(1, keepdim=True)
        chosen.append(last)
    return torch.cat(chosen, 1)


@torch.no_grad()
def ball_query(centres: Tensor, clouds: Tensor, radius: float, count: int) -> Tensor:
    """The first points of each cloud that are closer than a radius to each centre.

    Where there are fewer than ``count``, the first of them stands in the other places; without any it is point 0.

    Args:
        centres: ``(B, 3, S)``.
        clouds: ``(B, 3, P)``.
        radius: Radius of the balls.
        count: Points in each ball.

    Returns:
        Places ``(B, S, count)`` int64 of points in the cloud.

    Example:
        >>> ball_query(torch.zeros(1, 3, 1), torch.tensor([[[5.0, 0.1, 0.0]] * 3]), radius=1.0, count=3)
        tensor([[[1, 2, 1]]])
    """
    check_range("count", count, 1)
    size = clouds.shape[2]
    places = torch.arange(size, device=clouds.device, dtype=torch.int32)
    inside = squared_distances(centres, clouds) < radius**2
    # Places are their own order: the smallest ones of those inside are the first.
    found = torch.where(inside, places, size).topk(min(count, size), largest=False).values
    first = found[..., :1] % size
    found = torch.where(found == size, first, found)
    if count > size:
        found = torch.cat([found, first.expand(-1, -1, count - size)], 2)
    return found.long()


@models.register("pointnet2", aliases=("pointnet++",))
class PointNet2(nn.Module):
    """PointNet++ with one scale: PointNets of balls around points that cover the cloud, level by level.

    Each level but the last chooses centres (:func:`farthest_points`), takes the points in a ball around each
    (:func:`ball_query`), gives their positions relative to the centre and their features to the same layers and keeps
    the maximum over the ball. The last level does so with all that is left. Fully connected layers follow. In a cloud
    with no more points than a level has centres each of them is one.

    Args:
        shape: Shape ``(3, P)`` of one cloud.
        centres: Centres of each level.
        radii: Radius of the balls of each level.
        samples: Points in each ball.
        widths: Outputs of the layers of each level, of the last one, too.
        hidden: Outputs of the fully connected layers; the last are the features.
        dropout: Share of numbers dropped behind every fully connected layer.
        bn_momentum: Momentum of batch normalisation; ``None`` keeps the layer's own.
        linear: Linear layer.
        act: Activation layer.

    Shape:
        ``(B, 3, P) -> (B, hidden[-1])``.

    Example:
        >>> PointNet2((3, 64), centres=(16, 4))(torch.rand(2, 3, 64)).shape
        torch.Size([2, 256])
    """

    later_options: ClassVar[Mapping[str, Any]] = {"bn_momentum": None}

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        centres: tuple[int, ...] = (512, 128),
        radii: tuple[float, ...] = (0.2, 0.4),
        samples: tuple[int, ...] = (32, 64),
        widths: tuple[tuple[int, ...], ...] = ((64, 64, 128), (128, 128, 256), (256, 512, 1024)),
        hidden: tuple[int, ...] = (512, 256),
        dropout: float = 0.5,
        bn_momentum: float | None = None,
        linear: Layer = "linear",
        act: Layer = "relu",
    ) -> None:
        super().__init__()
        _check_clouds(shape)
        for name, values in (("centres", centres), ("samples", samples), ("hidden", hidden)):
            check_each(name, values)
        for radius in radii:
            check_range("radii", radius, 0, open_low=True)
        if not len(centres) == len(radii) == len(samples) == len(widths) - 1:
            raise ArgumentError(
                "widths", "must have one entry more than centres, radii and samples, got "
                f"{len(widths)}, {len(centres)}, {len(radii)} and {len(samples)}"
            )  # fmt: skip
        check_range("dropout", dropout, 0, 1)
        self.centres, self.radii, self.samples = centres, radii, samples
        self.levels = nn.ModuleList()
        channels = 0
        for level in widths:
            check_each("widths", level)
            self.levels.append(_Rows(3 + channels, level, linear, act, [0] * len(level)))
            channels = level[-1]
        self.hidden = _Rows(channels, hidden, linear, act, [dropout] * len(hidden))
        self.dim = hidden[-1]
        _finish(self, bn_momentum)

    def forward(self, clouds: Tensor) -> Tensor:
        """Features ``(B, D)`` of clouds ``(B, 3, P)``."""
        features: Tensor | None = None
        ordered = False  # whether the points are those that farthest_points chose, in its order
        for level, count, radius, samples in zip(self.levels, self.centres, self.radii, self.samples, strict=False):
            size = clouds.shape[2]
            if count >= size:
                centres = clouds
            elif ordered:
                centres = clouds[:, :, :count]
            else:
                chosen = farthest_points(clouds, count).unsqueeze(1).expand(-1, 3, -1)
                centres, ordered = clouds.gather(2, chosen), True
            balls = ball_query(centres, clouds, radius, samples)
            rows = _ball_rows(centres, clouds, features, balls)
            # A ball is a row of points: their maximum is what it is known by.
            features = level(rows).unflatten(0, balls.shape).max(2).values
            clouds = centres
        points = clouds.transpose(1, 2)
        rows = points if features is None else torch.cat([points, features.to(points.dtype)], 2)
        rows = self.levels[-1](rows.flatten(0, 1))
        return self.hidden(rows.unflatten(0, points.shape[:2]).max(1).values)


def _ball_rows(centres: Tensor, clouds: Tensor, features: Tensor | None, balls: Tensor) -> Tensor:
    """Positions relative to the centre, and features, of all points in balls ``(B, S, K)``: ``(B S K, 3 + C)``."""
    batch, size = len(clouds), clouds.shape[2]
    starts = torch.arange(batch, device=balls.device).view(-1, 1, 1) * size
    places = (balls + starts).flatten()
    points = clouds.transpose(1, 2).flatten(0, 1).index_select(0, places)
    relative = (points.view(*balls.shape, 3) - centres.transpose(1, 2).unsqueeze(2)).view(-1, 3)
    if features is None:
        return relative
    # Summed up in float32 on the way back, whatever the features were computed in.
    table = features.flatten(0, 1).to(torch.promote_types(features.dtype, torch.float32))
    return torch.cat([relative.to(table.dtype), table.index_select(0, places)], 1)


def _finish(model: nn.Module, bn_momentum: float | None) -> None:
    """First weights as published: uniform Xavier ones, and T-Nets that change nothing."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    for part in model.modules():
        if isinstance(part, TNet):
            part.reset()
    set_batch_norm(model, None, bn_momentum)
