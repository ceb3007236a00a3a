"""How good generated images are, by the features and probabilities of a classifier: scores and distances."""

from __future__ import annotations

import torch
from torch import Tensor

from hypersphere.errors import ArgumentError, check_range


def generation_score(probabilities: Tensor, splits: int = 10) -> tuple[float, float]:
    r"""Inception-style score of a classifier's probabilities: how sure they are of each image, and how varied over all.

    .. math:: \exp \frac{1}{n} \sum_i \mathrm{KL}(p(y | x_i) \,\|\, p(y)), \qquad p(y) = \frac{1}{n} \sum_i p(y | x_i)

    It lies between 1 and the number of classes.

    Args:
        probabilities: ``(N, C)``, each row adding up to 1.
        splits: Parts of equal size, one after the other, that are scored by themselves; what is left over does not
            count. Published scores take 10 of 50,000 images.

    Returns:
        Mean and standard deviation over the parts.

    Example:
        >>> generation_score(torch.eye(4), splits=1)
        (4.0, 0.0)
    """
    if probabilities.dim() != 2 or probabilities.shape[1] < 1:
        raise ArgumentError("probabilities", f"must have shape (N, C), got {tuple(probabilities.shape)}")
    check_range("splits", splits, 1, max(len(probabilities), 1))
    if not len(probabilities):
        raise ArgumentError("probabilities", "must not be empty")
    size = len(probabilities) // splits
    parts = probabilities[: splits * size].double().unflatten(0, (splits, size))
    marginal = parts.mean(1, keepdim=True)
    # xlogy: a class of probability 0 adds nothing.
    divergence = torch.xlogy(parts, parts).sum(2) - torch.xlogy(parts, marginal).sum(2)
    scores = divergence.mean(1).exp()
    return float(scores.mean()), float(scores.std(correction=0))


def frechet_distance(mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor) -> float:
    r"""Squared Fréchet (2-Wasserstein) distance of two normal distributions.

    .. math:: \|m - m'\|^2 + \mathrm{tr}\bigl(S + S' - 2 (S^{1/2} S' S^{1/2})^{1/2}\bigr)

    All roots are those of symmetric matrices, by their eigenvalues in float64; singular matrices are fine.

    Args:
        mean: ``(D,)``.
        covariance: ``(D, D)``, symmetric with eigenvalues of at least 0.
        other_mean: ``(D,)``.
        other_covariance: ``(D, D)``.

    Example:
        >>> eye = torch.eye(2)
        >>> frechet_distance(torch.zeros(2), eye, torch.tensor([3.0, 4.0]), 4 * eye)
        27.0
    """
    if not mean.shape == other_mean.shape == covariance.shape[1:] == other_covariance.shape[1:]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (mean, covariance, other_mean, other_covariance))
        raise ArgumentError("mean", f"and the others must have the shapes (D,), (D, D), (D,) and (D, D), got {shapes}")
    covariance, other_covariance = covariance.double(), other_covariance.double()
    values, vectors = torch.linalg.eigh(covariance)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.mT
    between = torch.linalg.eigvalsh(root @ other_covariance @ root).clamp(min=0).sqrt().sum()
    shift = (mean.double() - other_mean.double()).square().sum()
    distance = shift + covariance.trace() + other_covariance.trace() - 2 * between
    return max(float(distance), 0.0)  # rounding alone brings it below 0


def feature_distance(features: Tensor, others: Tensor) -> float:
    """Fréchet distance of two sets of features ``(N, D)`` and ``(M, D)``, each taken as a normal distribution.

    Example:
        >>> x = torch.randn(20, 3)
        >>> round(feature_distance(x, x + 2), 6)
        12.0
    """
    for name, rows in (("features", features), ("others", others)):
        if rows.dim() != 2 or len(rows) < 2:
            raise ArgumentError(name, f"must have shape (N, D) with two rows or more, got {tuple(rows.shape)}")
    if features.shape[1] != others.shape[1]:
        raise ArgumentError("others", f"must have {features.shape[1]} columns like features, got {others.shape[1]}")
    first, second = features.double(), others.double()
    covariances = [torch.cov(rows.mT).view(rows.shape[1], -1) for rows in (first, second)]
    return frechet_distance(first.mean(0), covariances[0], second.mean(0), covariances[1])


def class_balance(shares: Tensor) -> float:
    r"""How evenly classes occur: :math:`\exp(H) / C` of their shares, 1 for equal ones, 1/C where there is but one.

    Example:
        >>> class_balance(torch.tensor([0.5, 0.5, 0.0, 0.0]))
        0.5
    """
    if shares.dim() != 1 or not shares.any():
        raise ArgumentError("shares", f"must have shape (C,) and not be all 0, got {shares.tolist()}")
    shares = shares.double() / shares.double().sum()
    return float((-torch.xlogy(shares, shares).sum()).exp() / len(shares))
