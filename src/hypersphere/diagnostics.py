r"""Measurements of features and class centres: how hard a sample is, how tight and how far apart classes are.

Rules that hold for every function here:

* Half and bfloat16 input is computed in float32, also under autocast, and results stay in float32 or wider.
* A zero vector has cosine 0 and angle pi/2 with everything, so it never makes a result undefined.
* What is undefined for want of samples or classes (the mean over no pairs, say) is ``nan``.
* Labels are checked, which waits for the device: these are made for the time between steps of training.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from hypersphere.errors import ArgumentError, check_range
from hypersphere.geometry import angle, angle_matrix, at_least_float32, full_precision, norm, normalise


def _check_matrix(argument: str, x: Tensor, shape: str) -> None:
    """Raise unless ``x`` is a floating-point matrix."""
    if x.dim() != 2 or not x.is_floating_point():
        raise ArgumentError(
            argument, f"must be floating point of shape {shape}, got {x.dtype} of shape {tuple(x.shape)}"
        )


def _check_labels(labels: Tensor, samples: int, classes: int | None = None) -> None:
    """Raise unless there is one int64 label per sample, in [0, classes) where that is given."""
    if labels.dtype != torch.int64 or labels.shape != (samples,):
        raise ArgumentError(
            "labels", f"must be int64 of shape ({samples},), got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    if classes is None or not samples:
        return
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise ArgumentError("labels", f"must lie in [0, {classes}), got {low if low < 0 else high}")


def _units(x: Tensor) -> Tensor:
    """Directions in float32 or wider."""
    return normalise(at_least_float32(x))


def _class_sums(values: Tensor, index: Tensor, classes: int) -> Tensor:
    """Sums of the rows (or entries) of ``values`` over every class, ``(classes, ...)``."""
    return values.new_zeros(classes, *values.shape[1:]).index_add(0, index, values)


def angular_visual_hardness(features: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    r"""Share of the angle to the own class centre in the angles to all of them; lower is easier.

    .. math:: \mathrm{AVH}(x) = \frac{\theta(W_y, x)}{\sum_j \theta(W_j, x)}

    Neither the norms of features nor those of class centres matter. A zero feature has 1/C.

    Args:
        features: ``(B, D)``.
        weight: Class centres ``(C, D)``.
        labels: ``(B,)`` in [0, C).

    Returns:
        ``(B,)`` in [0, 1], in float32 or wider.

    Example:
        >>> angular_visual_hardness(torch.tensor([[1.0, 1.0], [3.0, 0.0]]), torch.eye(2), torch.tensor([0, 0]))
        tensor([0.5000, 0.0000])
    """
    _check_matrix("features", features, "(B, D)")
    _check_matrix("weight", weight, f"(C, {features.shape[1]})")
    if weight.shape[1] != features.shape[1]:
        raise ArgumentError("weight", f"must have shape (C, {features.shape[1]}), got {tuple(weight.shape)}")
    classes = len(weight)
    _check_labels(labels, len(features), classes)
    # The arccos of the matrix loses half of the digits of a small angle. In the sum that is lost among the angles to
    # the other classes; the own angle, small for an easy sample, is taken from the vectors.
    own = angle(features, weight[labels])
    total = own + angle_matrix(features, weight).scatter(1, labels.unsqueeze(1), 0.0).sum(1)
    # All angles are 0 only for a feature on coinciding centres: equal angles share equally.
    coinciding = total == 0
    return torch.where(coinciding, 1 / max(classes, 1), own / torch.where(coinciding, 1.0, total))


def model_confidence(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Softmax probability of the true class, :math:`e^{f_y} / \sum_j e^{f_j}`.

    Args:
        logits: ``(B, C)``, without margin.
        labels: ``(B,)`` in [0, C).

    Returns:
        ``(B,)`` in [0, 1], in float32 or wider.

    Example:
        >>> model_confidence(torch.tensor([[0.0, 0.0], [100.0, 0.0]]), torch.tensor([1, 0]))
        tensor([0.5000, 1.0000])
    """
    _check_matrix("logits", logits, "(B, C)")
    _check_labels(labels, len(logits), logits.shape[1])
    return at_least_float32(logits).softmax(1).gather(1, labels.unsqueeze(1)).squeeze(1)


def _one_minus_cosine(x: Tensor, y: Tensor) -> Tensor:
    """1 - cos of the angle between rows, to all digits where the angle is small."""
    return 2 * (angle(x, y) / 2).sin().square()


def angular_fisher_score(features: Tensor, labels: Tensor, normalise: bool = False) -> Tensor:
    r"""Scatter of directions within classes over that between classes; lower is better.

    .. math::
        \frac{S_w}{S_b}, \qquad S_w = \sum_i \sum_{x \in \text{class } i} (1 - \cos\langle x, m_i \rangle), \qquad
        S_b = \sum_i n_i\, (1 - \cos\langle m_i, m \rangle)

    with the mean :math:`m_i` of each class and :math:`m` of all features. The score does not change with a common
    factor of all features, but means of raw features follow the longest ones. It says little about features that
    surround the origin: their mean has no reliable direction, and a warning is given where its norm is below a
    thousandth of the mean norm of the class means. It grows without bound as the class means turn to one direction.

    Args:
        features: ``(N, D)``.
        labels: ``(N,)``; any integers, only equality counts.
        normalise: Average directions instead of raw features, so that norms do not matter at all.

    Returns:
        Scalar, in float32 or wider; ``nan`` with fewer than two classes.

    Example:
        >>> features = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
        >>> angular_fisher_score(features, torch.tensor([0, 0, 1, 1]))
        tensor(0.)
    """
    _check_matrix("features", features, "(N, D)")
    _check_labels(labels, len(features))
    x = _units(features) if normalise else at_least_float32(features)
    present, index, counts = labels.unique(return_inverse=True, return_counts=True)
    if len(present) < 2:
        return x.new_full((), float("nan"))
    means = _class_sums(x, index, len(present)) / counts.unsqueeze(1)
    mean = x.mean(0)
    if bool(norm(mean) < 1e-3 * norm(means).mean()):
        warnings.warn(
            "the mean of the features is close to the origin, so its direction and the angular Fisher score are "
            "unreliable",
            stacklevel=2,
        )
    within = _one_minus_cosine(x, means[index]).sum()
    between = (counts * _one_minus_cosine(means, mean)).sum()
    return within / between


def class_cosine_matrix(features: Tensor, labels: Tensor, classes: int | None = None) -> Tensor:
    r"""Mean cosine between the samples of every pair of classes, a sample never being paired with itself.

    With the sums :math:`s_a` of the directions :math:`u_i` of a class of :math:`n_a` samples,

    .. math::
        M_{ab} = \frac{\langle s_a, s_b \rangle}{n_a n_b}, \qquad
        M_{aa} = \frac{\|s_a\|^2 - \sum_{i \in a} \|u_i\|^2}{n_a (n_a - 1)}

    so no cosine of a single pair is ever computed.

    Args:
        features: ``(N, D)``.
        labels: ``(N,)`` in [0, C).
        classes: Number of classes C; one more than the largest label by default.

    Returns:
        ``(C, C)``, symmetric, in float32 or wider. Rows and columns of classes without samples, and the diagonal of
        classes with one, are ``nan``.

    Example:
        >>> class_cosine_matrix(torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 0, 1]))
        tensor([[1., 0.],
                [0., nan]])
    """
    _check_matrix("features", features, "(N, D)")
    if classes is not None:
        check_range("classes", classes, 0)
    _check_labels(labels, len(features), torch.iinfo(torch.int64).max if classes is None else classes)
    if classes is None:
        classes = int(labels.max()) + 1 if len(labels) else 0
    with full_precision(features):
        units = _units(features)
        sums = _class_sums(units, labels, classes)
        counts = _class_sums(torch.ones_like(labels), labels, classes).to(units.dtype)
        # Not the count: a zero vector has no cosine of 1 with itself.
        self_pairs = _class_sums(units.square().sum(1), labels, classes)
        totals = sums @ sums.mT - self_pairs.diag()
    pairs = counts.unsqueeze(1) * counts - counts.diag()
    # Without a pair the total is 0 only up to rounding, so the quotient may be infinite instead of nan.
    return (totals / pairs).masked_fill(pairs == 0, float("nan")).clamp(-1, 1)


def norm_count_correlation(weight: Tensor, counts: Tensor) -> Tensor:
    r"""Pearson correlation of the norms of class centres with the number of samples per class.

    Args:
        weight: Class centres ``(C, D)``.
        counts: Samples per class ``(C,)``, integer or floating point.

    Returns:
        Scalar in [-1, 1], in float32 or wider; ``nan`` with fewer than two classes, equal counts, or norms that are
        equal up to rounding.

    Example:
        >>> norm_count_correlation(torch.diag(torch.tensor([1.0, 2.0, 3.0])), torch.tensor([10, 20, 30]))
        tensor(1.)
    """
    _check_matrix("weight", weight, "(C, D)")
    if counts.shape != weight.shape[:1]:
        raise ArgumentError("counts", f"must have shape ({len(weight)},), got {tuple(counts.shape)}")
    norms = norm(weight)
    if len(norms) < 2:
        return norms.new_full((), float("nan"))

    def centred(values: Tensor) -> Tensor:
        values = values.double()  # counts beyond 2^24 are no float32 numbers
        # To unit range first: the correlation does not depend on it, and squares of anything stay finite.
        low, high = values.aminmax()
        values = (values - low) / (high - low)
        return values - values.mean()

    x, y = centred(norms), centred(counts)
    result = ((x * y).sum() / (norm(x) * norm(y))).clamp(-1, 1).to(norms.dtype)
    # Norms of directions differ by rounding alone, and its correlation would pass for a finding.
    equal = norms.max() - norms.min() <= 16 * torch.finfo(norms.dtype).eps * norms.max()
    return result.masked_fill(equal, float("nan"))


def quadrant_occupancy(features: Tensor) -> tuple[Tensor, Tensor]:
    """Share of two-dimensional features in every quadrant and at the origin.

    A coordinate of 0 counts as positive, so that what a ReLU puts on an axis is in the first quadrant.

    Args:
        features: ``(N, 2)``, without NaN.

    Returns:
        The shares of the first to the fourth quadrant ``(4,)``, counterclockwise, and the share of features that are
        exactly zero, ``()``. All five add up to 1; without features they are ``nan``.

    Example:
        >>> quadrant_occupancy(torch.tensor([[1.0, 2.0], [0.0, 3.0], [-1.0, -1.0], [0.0, 0.0]]))
        (tensor([0.5000, 0.0000, 0.2500, 0.0000]), tensor(0.2500))
    """
    _check_matrix("features", features, "(N, 2)")
    if features.shape[1] != 2:
        raise ArgumentError("features", f"must have shape (N, 2), got {tuple(features.shape)}")
    if bool(features.isnan().any()):
        raise ArgumentError("features", "must not contain NaN")
    left, below = (features < 0).unbind(1)
    zero = (features == 0).all(1)
    quadrant = torch.where(below, 3 - left.long(), left.long())
    shares = _class_sums(torch.ones_like(quadrant), quadrant.masked_fill(zero, 4), 5)
    shares = shares.to(at_least_float32(features).dtype) / len(features)
    return shares[:4], shares[4]


def pair_angles(features: Tensor, labels: Tensor, limit: int = 1000) -> tuple[Tensor, Tensor]:
    """Angles of the pairs of samples of one class and of those of two classes.

    With more than ``limit`` samples, that many are taken, spread evenly over the batch: the same ones every time and
    whatever the labels. The number of pairs grows with the square of the limit.

    Args:
        features: ``(N, D)``.
        labels: ``(N,)``; any integers, only equality counts.
        limit: Largest number of samples to pair, at least 2.

    Returns:
        Radians of the positive and of the negative pairs, each ``(P,)``, in float32 or wider; every unordered pair of
        different samples is in one of them.

    Example:
        >>> pair_angles(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 0, 1]))
        (tensor([0.]), tensor([1.5708, 1.5708]))
    """
    _check_matrix("features", features, "(N, D)")
    _check_labels(labels, len(features))
    check_range("limit", limit, 2)
    count = len(features)
    if count > limit:
        chosen = torch.arange(limit, device=features.device) * (count - 1) // (limit - 1)
        features, labels, count = features[chosen], labels[chosen], limit
    first, second = torch.triu_indices(count, count, offset=1, device=features.device)
    angles = angle_matrix(features, features)[first, second]
    same = labels[first] == labels[second]
    return angles[same], angles[~same]


__all__ = [
    "angular_fisher_score",
    "angular_visual_hardness",
    "class_cosine_matrix",
    "model_confidence",
    "norm_count_correlation",
    "pair_angles",
    "quadrant_occupancy",
]
