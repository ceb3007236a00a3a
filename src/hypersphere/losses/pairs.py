"""Functions of pairs of features: contrastive, triplet and circle loss, and the running centres of classes."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from hypersphere.errors import check_choice
from hypersphere.geometry import at_least_float32, cosine_matrix, full_precision, in_float64, norm, transformed
from hypersphere.losses.schedules import refuse_vmap


def contrastive(x: Tensor, y: Tensor, same: Tensor, margin: float = 1.0) -> Tensor:
    r"""Contrastive loss of pairs: equal ones are pulled together, others pushed apart up to a distance.

    .. math:: \tfrac12 \big[ \text{same}\; d^2 + (1 - \text{same}) \max(0, \text{margin} - d)^2 \big], \quad
        d = \|x - y\|

    Args:
        x: ``(..., D)``.
        y: ``(..., D)``, broadcastable to ``x``.
        same: ``(...)``, whether a pair is of one class.
        margin: Distance beyond which unequal pairs cost nothing.

    Returns:
        Loss of each pair, ``(...)``.

    Example:
        >>> contrastive(torch.zeros(2), torch.tensor([3.0, 4.0]), torch.tensor(True))
        tensor(12.5000)
    """
    distance = norm(at_least_float32(x) - at_least_float32(y))
    return torch.where(same, distance.square(), (margin - distance).relu().square()) / 2


def squared_distances(x: Tensor) -> Tensor:
    r"""Squared distances of all pairs of rows: ``(B, D) -> (B, B)``, in the type of ``x``.

    They come from differences, of which none is kept, and their gradient from products in float64: so near pairs keep
    their digits, in value and gradient, however long they are and whatever lies far from them.

    Example:
        >>> squared_distances(torch.tensor([[1000.0, 0.0], [1000.0, 0.5]]))
        tensor([[0.0000, 0.2500],
                [0.2500, 0.0000]])
    """
    wide = in_float64(x)
    wide = wide - wide.detach().mean(0)
    squares = wide.square().sum(1)
    squared = squares.unsqueeze(0) + squares.unsqueeze(1) - 2 * wide @ wide.mT
    if transformed():  # which does not know what follows
        return squared.clamp(min=0).to(x.dtype)
    fixed = wide.detach()
    exact = torch.cdist(fixed, fixed, compute_mode="donot_use_mm_for_euclid_dist").square()
    return (exact + (squared - squared.detach())).to(x.dtype)


def triplet(anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 0.2) -> Tensor:
    r"""Triplet loss :math:`\max(0, \|a - p\|^2 - \|a - n\|^2 + \text{margin})`.

    Args:
        anchor: ``(..., D)``.
        positive: ``(..., D)``, of the anchor's class.
        negative: ``(..., D)``, of another class.
        margin: By how much the negative must be farther.

    Returns:
        Loss of each triplet, ``(...)``.

    Example:
        >>> triplet(torch.zeros(2), torch.ones(2), torch.tensor([1.0, 0.0]))
        tensor(1.2000)
    """
    anchor, positive, negative = at_least_float32(anchor), at_least_float32(positive), at_least_float32(negative)
    # The difference of the squares as a product: of long anchors they would have its digits rounded.
    difference = ((negative - positive) * ((anchor - positive) + (anchor - negative))).sum(-1)
    return (difference + margin).relu()


def circle_pairs(
    features: Tensor, labels: Tensor, m: float = 0.25, s: float = 256.0, pairs: Literal["batch", "anchor"] = "batch"
) -> Tensor:
    r"""Circle loss on the pairs of a batch.

    .. math:: \log\Big(1 + \sum_n e^{s\,[c_n + m]_+ (c_n - m)} \sum_p e^{-s\,[1 + m - c_p]_+ (c_p - 1 + m)}\Big)

    over the cosines :math:`c_p` of equal and :math:`c_n` of unequal pairs; the brackets count as constants.

    Args:
        features: ``(B, D)``.
        labels: ``(B,)``.
        m: Relaxation.
        s: Scale, the paper's gamma.
        pairs: ``"batch"``: all pairs in one term; ``"anchor"``: one term for each sample that has both kinds of pairs,
            averaged over the terms that are not 0.

    Returns:
        Scalar; 0 where one kind of pairs is missing.

    Example:
        >>> circle_pairs(torch.eye(3)[[0, 0, 1]], torch.tensor([0, 0, 1]), s=32.0)
        tensor(0.0360)
    """
    check_choice("pairs", pairs, ("batch", "anchor"))
    with full_precision(features):
        cosines = cosine_matrix(features, features)
    same = labels.unsqueeze(0) == labels.unsqueeze(1)
    # Each pair once for the whole batch; every other sample for an anchor.
    considered = (
        torch.ones_like(same).triu(1)
        if pairs == "batch"
        else ~torch.eye(len(labels), dtype=torch.bool, device=same.device)
    )
    own = -s * (1 + m - cosines.detach()).relu() * (cosines - 1 + m)
    other = s * (cosines.detach() + m).relu() * (cosines - m)
    lowest = torch.finfo(cosines.dtype).min / 4
    positives = torch.where(considered & same, own, lowest)
    negatives = torch.where(considered & ~same, other, lowest)
    if pairs == "batch":
        both = positives.flatten().logsumexp(0) + negatives.flatten().logsumexp(0)
        return nn.functional.softplus(both, threshold=50)
    terms = nn.functional.softplus(positives.logsumexp(1) + negatives.logsumexp(1), threshold=50)
    return terms.sum() / (terms > 0).sum().clamp(min=1)


@torch.library.custom_op("hypersphere::move_centres", mutates_args={"centres"})
def move_centres(centres: Tensor, features: Tensor, labels: Tensor, valid: Tensor, rate: float) -> Tensor:
    """Move the centres of a batch's classes towards its features; returns each sample's centre before that.

    ``c_j += rate * sum_{y_i = j} (x_i - c_j) / (1 + n_j)``. One opaque operation, because a compiled backward pass may
    read a buffer again after it has changed.
    """
    own = centres[labels]
    share = valid.to(features.dtype).unsqueeze(1)
    sums = torch.zeros_like(centres).index_add_(0, labels, share * (features - own))
    counts = centres.new_zeros(len(centres)).index_add_(0, labels, share.squeeze(1))
    centres += rate * sums / (1 + counts).unsqueeze(1)
    return own


@move_centres.register_fake
def _(centres: Tensor, features: Tensor, labels: Tensor, valid: Tensor, rate: float) -> Tensor:
    return features.new_empty(features.shape)


move_centres.register_vmap(refuse_vmap)
