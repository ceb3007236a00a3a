r"""What is known of hyperspherical energies: optimal and random values, limits, bounds, and what projections do.

Dimensions ``d`` are those of the vectors: directions lie on the sphere of dimension d - 1. Numbers are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from hypersphere.energy.potentials import Riesz
from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.geometry import normalise

_MOST_NODES = 100
"""Of a quadrature: more points than it is meant for are taken as so many."""


def _kernel(s: float, angular: bool = False) -> Callable[[float], float]:
    """Riesz kernel as a function of the cosine."""
    riesz = Riesz(s, angular)
    return lambda cosine: riesz(torch.tensor(2 - 2 * cosine, dtype=torch.float64)).item()


def _with_images(pairs: float, n: int | None, s: float, angular: bool) -> float:
    """Mean over the ordered pairs of n vectors and their mirror images, from that over pairs that are not opposite."""
    if n is None:
        return pairs
    own = _kernel(s, angular)(-1.0)
    share = 1 / (2 * n - 1)
    return own if n == 1 else (1 - share) * pairs + share * own


def _check(n: int | None, d: int, s: float) -> None:
    check_range("s", s, 0)
    check_range("d", d, 2)
    if n is not None:
        check_range("n", n, 0)


# ------------------------------------------------------------------------------------------------- energies


@cache
def random_energy(s: float, d: int, *, half_space: bool = False, angular: bool = False, n: int | None = None) -> float:
    r"""Expected mean energy of random directions in d dimensions.

    .. math:: I_s = \frac{2^{p-s-1}\,\Gamma(\frac{p+1}{2})\,\Gamma(\frac{p-s}{2})}{\sqrt\pi\;\Gamma(p-\frac s2)}, \qquad
        I_0 = \tfrac12(\psi(p) - \psi(\tfrac p2)) - \log 2, \qquad p = d - 1

    It is infinite for s >= d - 1. Layers start here: for s = 2 at (d - 2) / (2d - 6), whatever their width.

    Args:
        s: Riesz exponent, at least 0.
        d: Dimension of the vectors, at least 2.
        half_space: With the mirror image of every vector. Pairs of a vector and its own image have a share of
            1 / (2n - 1) in the mean, which is left out without ``n``.
        angular: With angles as distances (a numerical integral).
        n: Number of vectors; with fewer than 2 in full space, and none in half space, there is no pair and the value 0.

    Example:
        >>> round(random_energy(2, 576), 5)
        0.50087
    """
    _check(n, d, s)
    if n is not None and n < (1 if half_space else 2):
        return 0.0
    p = d - 1
    if s >= p:
        value = math.inf
    elif angular:
        value = _mean_over_angles(s, d)
    elif s == 0:
        difference = torch.tensor([p, p / 2], dtype=torch.float64).digamma()
        value = (difference[0] - difference[1]).item() / 2 - math.log(2)
    else:
        logs = math.lgamma((p + 1) / 2) + math.lgamma((p - s) / 2) - math.lgamma(p - s / 2)
        value = math.exp((p - s - 1) * math.log(2) + logs) / math.sqrt(math.pi)
    return _with_images(value, n, s, angular) if half_space else value


def _mean_over_angles(s: float, d: int) -> float:
    """Mean of the kernel of the angle between random directions, by tanh-sinh quadrature."""
    x = torch.linspace(-6, 6, 1201, dtype=torch.float64)
    # From 0 to a right angle, as a share of that, 1 / (1 + exp(-pi sinh x)), which keeps its digits near 0, where the
    # kernel may be infinite. Angles that differ from a right one by 12 standard deviations do not count.
    share = torch.sigmoid(math.pi * x.sinh())
    low = max(0.0, math.pi / 2 - 12 / math.sqrt(d))
    angle = low + (math.pi / 2 - low) * share
    weight = share * torch.sigmoid(-math.pi * x.sinh()) * x.cosh()
    kernel = -angle.log() - (math.pi - angle).log() if s == 0 else angle.pow(-s) + (math.pi - angle).pow(-s)
    density = weight * angle.sin().pow(d - 2)
    return (torch.where(density > 0, kernel * density, 0.0).sum() / density.sum()).item() / 2


@cache
def floor_energy(n: int, d: int, s: float, *, half_space: bool = False, angular: bool = False) -> float:
    r"""A mean energy that no n vectors in d dimensions fall below.

    In full space and in half space it is the universal lower bound of Boyvalenkov, Dragnev, Hardin, Saff and Stoyanova:
    the energy that cosines at the nodes of Levenshtein's quadrature would have. Very regular sets attain it: the
    simplex (n <= d + 1), the cross-polytope (n = 2d), the icosahedron; in half space orthogonal vectors (n <= d) and
    equiangular tight frames (for d < n <= d (d + 1) / 2 it is Welch's bound); on the circle the regular polygon. In
    other cases it is close and in general not attained.

    The angular energy in full space has no such bound. There it is that of the simplex, made convex in the squared
    chord: attained for n <= d + 1 where the simplex' angle is small enough (s = 2: always), and on the circle.

    Args:
        n: Number of vectors; with fewer than 2 in full space, and none in half space, there is no pair and the value 0.
        d: Dimension of the vectors, at least 2.
        s: Riesz exponent, at least 0.
        half_space: With the mirror image of every vector, as in :func:`hypersphere.energy.hyperspherical_energy`.
        angular: With angles as distances.

    Example:
        >>> round(floor_energy(64, 576, 2), 5), round(floor_energy(1152, 576, 2), 5)
        (0.49219, 0.49978)
    """
    _check(n, d, s)
    if n < (1 if half_space else 2):
        return 0.0
    if d == 2:
        total = 2 * n if half_space else n
        return polygon_energy(total, s, angular=angular) / (total * (total - 1))
    if angular and not half_space:
        return _below_simplex(n, s)
    kernel = _kernel(s, angular)
    if n <= (d if half_space else d + 1):
        nodes, weights = [-1.0 if half_space else -1 / (n - 1)], [1.0]
    else:
        nodes, weights = _quadrature(n, d, lines=half_space)
    if not half_space:
        return math.fsum(weight * kernel(node) for node, weight in zip(nodes, weights, strict=True))
    cosines = [math.sqrt(max((1 + node) / 2, 0.0)) for node in nodes]
    cross = math.fsum(w * (kernel(c) + kernel(-c)) / 2 for c, w in zip(cosines, weights, strict=True))
    return _with_images(cross, n, s, angular)


def _quadrature(n: int, d: int, *, lines: bool) -> tuple[list[float], list[float]]:
    r"""Nodes below 1 and weights (of sum 1) of Levenshtein's quadrature for n points.

    With weight 1/n at 1 the rule integrates polynomials over the sphere up to the degree that n points allow. Nodes are
    cosines, or, of lines, :math:`2\cos^2 - 1`.
    """

    def least(degree: int) -> int:
        """Least number of points that are a design of this strength."""
        if lines:
            return math.comb(d + degree - 1, degree)
        half = degree // 2
        return math.comb(d + half - 1, half) + math.comb(d + (degree - 1) // 2 - 1, (degree - 1) // 2)

    degree = 1
    while degree < 2 * _MOST_NODES and least(degree + 1) <= n:
        degree += 1
    # The mean energy of the best n points grows with n, so that fewer points than there are give a bound.
    n = min(n, least(degree + 1))
    k = (degree + 1) // 2
    a, b = (d - 3) / 2, -0.5 if lines else (d - 3) / 2
    jacobi = _jacobi_matrix(k + 2, a, b)
    at_one = torch.ones(k, dtype=torch.float64)  # the orthonormal polynomials at 1, by their recurrence
    for i in range(1, k):
        below = jacobi[i - 1, i - 2] * at_one[i - 2] if i > 1 else 0.0
        at_one[i] = ((1 - jacobi[i - 1, i - 1]) * at_one[i - 1] - below) / jacobi[i, i - 1]
    point = torch.outer(at_one, at_one) / n
    gram, shift = torch.eye(k, dtype=torch.float64) - point, jacobi[:k, :k] - point
    fixed = degree % 2 == 0  # then -1 is a node too, and the others are those of the weight 1 + x
    if fixed:
        gram, shift = gram + shift, shift + (jacobi @ jacobi)[:k, :k] - point
    inverse = torch.linalg.inv(torch.linalg.cholesky(gram))
    nodes, vectors = torch.linalg.eigh(inverse @ shift @ inverse.T)
    weights = (gram[0] @ inverse.T @ vectors).square()
    if fixed:
        weights = weights / (1 + nodes)
        nodes = torch.cat([nodes, -torch.ones(1, dtype=torch.float64)])
        weights = torch.cat([weights, 1 - 1 / n - weights.sum(0, keepdim=True)])
    return nodes.tolist(), (weights * n / (n - 1)).tolist()


def _jacobi_matrix(size: int, a: float, b: float) -> Tensor:
    """Recurrence of the orthonormal polynomials of the weight (1 - x)^a (1 + x)^b, as a symmetric matrix."""
    i = torch.arange(size, dtype=torch.float64)
    total = 2 * i + a + b
    diagonal = (b * b - a * a) / (total * (total + 2))
    diagonal[0] = (b - a) / (a + b + 2)
    j, total = i[1:], total[1:]
    squared = 4 * j * (j + a) * (j + b) * (j + a + b) / (total**2 * (total + 1) * (total - 1))
    squared[0] = 4 * (1 + a) * (1 + b) / ((a + b + 2) ** 2 * (a + b + 3))
    beside = squared.sqrt()
    return torch.diag(diagonal.nan_to_num()) + torch.diag(beside, 1) + torch.diag(beside, -1)


def _below_simplex(n: int, s: float) -> float:
    """Largest convex function of the squared chord below the angular kernel, at the mean squared chord of a simplex."""
    kernel = _kernel(s, angular=True)

    def rise(angle: float) -> float:  # of the tangent at an angle, where it meets opposite directions, above the kernel
        slope = (s or 1.0) * angle ** (-s - 1) / math.tan(angle / 2)
        return kernel(math.cos(angle)) - slope - kernel(-1.0)

    low, high = 1e-3, math.pi - 1e-3
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rise(middle) < 0 else (low, middle)
    simplex, touch = -1 / (n - 1), math.cos(low)
    if simplex >= touch:
        return kernel(simplex)
    share = (touch - simplex) / (touch + 1)
    return (1 - share) * kernel(touch) + share * kernel(-1.0)


def polygon_energy(n: int, s: float, *, angular: bool = False) -> float:
    """Energy of the regular polygon, the least of n directions in the plane: a sum over ordered pairs.

    In half space the best n directions are every other one of 2n, and the energy is that of the polygon of 2n.

    Example:
        >>> round(polygon_energy(5, 2), 12)
        10.0
    """
    k = torch.arange(1, n, dtype=torch.float64)
    chords = (2 * (math.pi * torch.minimum(k, n - k) / n).sin()).square()
    return n * Riesz(s, angular)(chords).sum().item()


def simplex_energy(n: int, s: float) -> float:
    """Energy of the regular simplex, the least of n directions in n - 1 or more dimensions: a sum over ordered pairs.

    Example:
        >>> simplex_energy(4, 2)
        4.5
    """
    return n * (n - 1) * _kernel(s)(-1 / (n - 1))


def cross_polytope_energy(d: int, s: float) -> float:
    """Energy of the 2d directions along the axes, the least of so many: a sum over ordered pairs.

    Also that of d or more orthogonal vectors in half space, which is the least of d vectors.

    Example:
        >>> cross_polytope_energy(3, 2)
        13.5
    """
    kernel = _kernel(s)
    return 2 * d * kernel(-1.0) + 2 * d * (2 * d - 2) * kernel(0.0)


def icosahedron_energy(s: float) -> float:
    """Energy of the icosahedron, the least of 12 directions in space: a sum over ordered pairs.

    Example:
        >>> round(icosahedron_energy(2), 12)
        78.0
    """
    kernel, near = _kernel(s), 1 / math.sqrt(5)
    return 12 * (kernel(-1.0) + 5 * kernel(near) + 5 * kernel(-near))


def asymptotic_energy(n: int, d: int, s: float) -> float:
    r"""Leading term of the least energy of many directions: a sum over ordered pairs.

    .. math:: I_s\, n^2 \;(s < p), \qquad
        \frac{\Gamma(\frac{p+1}2)}{\sqrt\pi\, p\, \Gamma(\frac p2)}\; n^2 \log n \;(s = p), \qquad
        \frac{2\,\zeta(s)}{(2\pi)^s}\; n^{1+s} \;(s > p = 1), \qquad p = d - 1

    Args:
        n: Number of directions.
        d: Dimension of the vectors.
        s: Riesz exponent, at most d - 1 for d > 2: beyond, no constant is known.

    Example:
        >>> round(asymptotic_energy(1000, 2, 2) / polygon_energy(1000, 2), 5)
        1.0
    """
    _check(n, d, s)
    p = d - 1
    if s < p:
        return random_energy(s, d) * n**2
    if s == p:
        return sphere_constant(p) * n**2 * math.log(n)
    check_range("s", s, 0, math.inf if p == 1 else p)
    zeta = torch.special.zeta(torch.tensor(s, dtype=torch.float64), 1.0).item()
    return 2 * zeta / (2 * math.pi) ** s * float(n) ** (1 + s)


def crowded_energy(n: int, d: int, mean: float, deviation: float) -> float:
    r"""Expected half-space energy (s = 2) of n vectors of normal numbers whose mean is not 0: to leading order.

    .. math:: \frac{d - 2}{2 (d - 3) (1 - c^2)}, \qquad c = \frac{\mu^2}{\mu^2 + \sigma^2}

    for two of them, with the share of a vector and its own image as in :func:`random_energy`. Their cosine is about c,
    and a mean of a few hundredths is enough to crowd the neurons of a wide layer.

    Args:
        n: Number of vectors.
        d: Their dimension, more than 3.
        mean: Mean :math:`\mu` of the numbers.
        deviation: Their standard deviation :math:`\sigma`; :math:`\sqrt{2 / d}` in layers as He et al. draw them.

    Example:
        >>> [round(crowded_energy(64, 576, mean, math.sqrt(2 / 576)), 4) for mean in (0.0, 0.05)]
        [0.4989, 0.6045]
    """
    check_range("n", n, 1)
    check_range("d", d, 3, open_low=True)
    check_range("deviation", deviation, 0, open_low=True)
    cosine = mean**2 / (mean**2 + deviation**2)
    return _with_images(random_energy(2, d) / (1 - cosine**2), n, 2, False)


# --------------------------------------------------------------------------------------- holes between directions


def sphere_constant(m: int) -> float:
    r"""Volume of the unit ball in m dimensions, divided by the area of the sphere of m dimensions around the origin.

    .. math:: \kappa_m = \frac{\Gamma(\frac{m+1}2)}{m \sqrt\pi\; \Gamma(\frac m2)}, \qquad
        \kappa_m \kappa_{m-1} = \frac1{2 \pi m}

    A small cap of radius r on that sphere has the share :math:`\kappa_m r^m` of its area.

    Example:
        >>> round(sphere_constant(2), 12)
        0.25
    """
    check_range("m", m, 1)
    return math.exp(math.lgamma((m + 1) / 2) - math.lgamma(m / 2)) / (m * math.sqrt(math.pi))


def expected_holes(n: int, d: int, power: float = 0.0) -> float:
    r"""Holes between n random directions: the expected sum of powers of their radii, to leading order in n.

    Holes are the empty caps above the facets of the convex hull; their radius :math:`\rho` is a chord.

    .. math:: \mathrm E \sum \rho^p = B_m\, \kappa_m^{-p/m}\,
        \frac{\Gamma(m + \frac pm)\,\Gamma(n + 1)}{\Gamma(m)\,\Gamma(n + \frac pm)} \left(1 + O(n^{-2/m})\right), \qquad
        B_m = \frac2{m+1} \frac{\kappa_{m^2}}{\kappa_m^m}, \qquad m = d - 1

    (Brauchart, Reznikov, Saff, Sloan, Wang and Womersley, "Random point sets on the sphere - hole radii, covering, and
    separation", 2018.)

    Args:
        n: Number of directions.
        d: Dimension of the vectors.
        power: Power p of the radii; 0 counts the holes.

    Example:
        >>> round(expected_holes(100, 3), 9), round(expected_holes(100, 3, power=2), 9)
        (200.0, 16.0)
    """
    check_range("n", n, 1)
    check_range("d", d, 2)
    check_range("power", power, 0)
    m = d - 1
    kappa = math.log(sphere_constant(m))
    share = power / m
    logs = math.log(2 / (m + 1)) + math.log(sphere_constant(m * m)) - (m + share) * kappa
    logs += math.lgamma(m + share) - math.lgamma(m) + math.lgamma(n + 1) - math.lgamma(n + share)
    return math.exp(logs)


def uniform_limit(d: int, t: float = 2.0) -> float:
    r"""Uniformity loss of the uniform distribution: :math:`\log {}_0F_1(; d/2; t^2) - 2t`, the least there is.

    Args:
        d: Dimension of the vectors.
        t: Factor in the Gaussian potential.

    Example:
        >>> round(uniform_limit(128), 4)
        -3.9375
    """
    check_range("d", d, 1)
    check_range("t", t, 0, open_low=True)
    k = torch.arange(int(8 * t) + 100, dtype=torch.float64)
    logs = 2 * k * math.log(t) - torch.lgamma(k + d / 2) + math.lgamma(d / 2) - torch.lgamma(k + 1)
    return torch.logsumexp(logs, 0).item() - 2 * t


# ----------------------------------------------------------------------------------------- diverse neurons


class DiversityBound(NamedTuple):
    """A two-layer network's error against its gradient.

    Attributes:
        loss: The squared error, halved, as a mean over samples.
        sigma_min: Least singular value of the matrix that maps residuals to the gradient.
        residual: Norm of the residuals, divided by their number.
        gradient: Norm of the loss' gradient by the hidden weights.
        bound: ``gradient / sigma_min``, which ``residual`` does not exceed.
    """

    loss: float
    sigma_min: float
    residual: float
    gradient: float
    bound: float


def diversity_bound(
    weights: Tensor,
    output_weights: Tensor,
    inputs: Tensor,
    targets: Tensor,
    activation: Callable[[Tensor], Tensor] = torch.relu,
) -> DiversityBound:
    r"""How far the error of :math:`f(x) = \sum_k v_k\, \sigma(w_k \cdot x)` is bounded by its gradient.

    With :math:`r_i = (f(x_i) - y_i) / m` the gradient of :math:`L = \frac1{2m} \sum_i (f(x_i) - y_i)^2` by the hidden
    weights is D r, where D has the blocks :math:`v_k\, \sigma'(w_k \cdot x_j)\, x_j`. Diverse neurons make the least
    singular value of D large, and then a small gradient means a small error: :math:`|r| \le |D r| / \sigma_\min(D)`.

    Args:
        weights: Hidden neurons ``(n, d)``.
        output_weights: Their weights in the output, ``(n,)``.
        inputs: Samples ``(m, d)``.
        targets: What the output should be, ``(m,)``.
        activation: Function of the responses, differentiable.

    Example:
        >>> found = diversity_bound(torch.eye(2), torch.ones(2), torch.eye(2), torch.zeros(2))
        >>> found.sigma_min, found.residual <= found.bound
        (1.0, True)
    """
    w, v, x, y = (tensor.detach().double() for tensor in (weights, output_weights, inputs, targets))
    if w.dim() != 2 or v.shape != w.shape[:1]:
        raise ArgumentError("output_weights", f"must have shape ({len(w)},), got {tuple(v.shape)}")
    if x.shape[1:] != w.shape[1:] or y.shape != x.shape[:1]:
        shapes = f"{tuple(x.shape)} and {tuple(y.shape)}"
        raise ArgumentError("inputs", f"and targets must have shapes (m, {w.shape[1]}) and (m,), got {shapes}")
    with torch.enable_grad():
        responses = (x @ w.T).requires_grad_()
        active = activation(responses)
        (slopes,) = torch.autograd.grad(active.sum(), responses)
    error = active.detach() @ v - y
    residual = error / len(y)
    strength = slopes * v
    # D^T D, of size m x m: D itself has n d rows.
    gram = (strength @ strength.T) * (x @ x.T)
    sigma = torch.linalg.eigvalsh(gram)[0].clamp(min=0).sqrt().item()
    gradient = (residual @ gram @ residual).clamp(min=0).sqrt().item()
    loss = error.square().mean().item() / 2
    return DiversityBound(loss, sigma, residual.norm().item(), gradient, gradient / sigma if sigma else math.inf)


def activation_kernel_mean(d: int) -> float:
    r"""Mean of :math:`k^2` over two random directions, :math:`k = \frac12 - \frac\theta{2\pi}`.

    .. math:: \frac1{16} + \frac{\psi'(\frac d2)}{8 \pi^2}

    k is the share of inputs to which both neurons of an angle :math:`\theta` answer where their activation is a ReLU.

    Example:
        >>> round(activation_kernel_mean(3), 6)
        0.074339
    """
    check_range("d", d, 2)
    trigamma = torch.special.polygamma(1, torch.tensor(d / 2, dtype=torch.float64)).item()
    return 1 / 16 + trigamma / (8 * math.pi**2)


def activation_discrepancy(weights: Tensor) -> Tensor:
    r"""How far neurons are from uniform ones, as a hidden layer of ReLUs sees them; at least 0.

    .. math:: \frac1{n^2} \sum_{i,j} k(w_i, w_j)^2 - \mathrm E\, k(u, v)^2, \qquad k = \frac12 - \frac\theta{2\pi}

    It enters the bound by which a small gradient means a small error (:func:`diversity_bound`), and rotations of all
    neurons together do not change it. (Xie, Liang and Song, "Diverse Neural Network Learns True Target Functions",
    2017.)

    Args:
        weights: Neurons ``(n, d)``; norms do not matter.

    Example:
        >>> round(activation_discrepancy(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])).item(), 4)
        0.0417
    """
    if weights.dim() != 2 or not len(weights):
        raise ArgumentError("weights", f"must have shape (n, d), got {tuple(weights.shape)}")
    units = normalise(weights.detach().double())
    kernel = 0.5 - (units @ units.T).clamp(-1, 1).acos() / (2 * math.pi)
    kernel.fill_diagonal_(0.5)  # where the cosine has lost its digits
    return kernel.square().mean() - activation_kernel_mean(weights.shape[1])


# ------------------------------------------------------------------------------------------- projections


def _cosines(cosine: Tensor | float) -> Tensor:
    return torch.as_tensor(cosine, dtype=torch.float64)


def pair_energy(cosine: Tensor | float, s: float = 2.0) -> Tensor:
    """What a pair adds to the mean energy in half space: the mean of the kernels of it and of its mirror image.

    Args:
        cosine: Cosines of any shape.
        s: Riesz exponent.

    Example:
        >>> pair_energy(0.0), pair_energy(0.6)
        (tensor(0.5000, dtype=torch.float64), tensor(0.7812, dtype=torch.float64))
    """
    c, riesz = _cosines(cosine), Riesz(s)
    return (riesz(2 - 2 * c) + riesz(2 + 2 * c)) / 2


def projected_energy_mean(cosine: Tensor | float, k: int, s: float = 2.0) -> Tensor:
    r"""Expected half-space energy of a pair after a random Gaussian projection to k dimensions.

    .. math:: \mathrm E\, h_2(c') = \frac{k\, h_2(c) - 1}{k - 3}, \qquad
        \mathrm E\, h_0(c') = h_0(c) + \tfrac14\left(\psi(\tfrac k2) - \psi(\tfrac{k-1}2)\right)

    where h is :func:`pair_energy`. In expectation a projection therefore changes nothing but the weight of the energy.

    Args:
        cosine: Cosines before the projection, any shape.
        k: Dimension of the projection; more than 3, for s = 0 more than 1: below the mean is infinite.
        s: Riesz exponent, 0 or 2.

    Example:
        >>> projected_energy_mean(0.0, 30)
        tensor(0.5185, dtype=torch.float64)
    """
    if s == 0:
        check_range("k", k, 1, open_low=True)
        half = torch.tensor([k / 2, (k - 1) / 2], dtype=torch.float64).digamma()
        return pair_energy(cosine, 0.0) + (half[0] - half[1]) / 4
    if s != 2:
        raise ArgumentError("s", f"must be 0 or 2, got {s}")
    check_range("k", k, 3, open_low=True)
    return (k * pair_energy(cosine) - 1) / (k - 3)


def projected_energy_variance(cosine: Tensor | float, k: int) -> Tensor:
    r"""Variance of a pair's half-space energy (s = 2) over random Gaussian projections to k > 5 dimensions.

    .. math:: \tfrac14\left(\frac{e_2}{q^2 (k-3)(k-5)} - \frac{e_1^2}{q^2 (k-3)^2}\right), \qquad q = 1 - c^2,\;
        e_1 = k c^2 + q,\; e_2 = k(k+2)\, c^4 + 6 k c^2 q + 3 q^2

    Args:
        cosine: Cosines before the projection, any shape.
        k: Dimension of the projection.

    Example:
        >>> projected_energy_variance(0.0, 10)
        tensor(0.0163, dtype=torch.float64)
    """
    check_range("k", k, 5, open_low=True)
    squared = _cosines(cosine).square()
    q = 1 - squared
    first = k * squared + q
    second = k * (k + 2) * squared.square() + 6 * k * squared * q + 3 * q.square()
    return (second / (q.square() * (k - 3) * (k - 5)) - (first / (q * (k - 3))).square()) / 4


_THEOREMS = ("product", "product_printed", "chord")


def preserved_cosine(cosine: float, e: float, theorem: str = "product") -> tuple[float, float]:
    r"""Bounds of a pair's cosine after a random Gaussian projection, for the tolerance e.

    ``"product"`` follows from two norms and an inner product that a projection keeps up to e; the published form
    (``"product_printed"``), :math:`(\frac{c-e}{1+e}, \frac{c+e}{1-e})`, has the wrong denominator where a numerator is
    negative, and fails near opposite directions. ``"chord"`` follows from two norms and a chord:
    :math:`(\frac{1+e}{1-e} c - \frac{2e}{1-e},\; \frac{1-e}{1+e} c + \frac{1+2e-\sqrt{1-e^2}}{1+e})`.

    Args:
        cosine: The cosine before the projection.
        e: Tolerance, between 0 and 1.
        theorem: Which bounds.

    Returns:
        The lower and the upper bound.

    Example:
        >>> low, high = preserved_cosine(0.5, 0.1)
        >>> round(low, 4), round(high, 4)
        (0.3636, 0.6667)
    """
    check_range("cosine", cosine, -1, 1)
    _check_tolerance(e)
    check_choice("theorem", theorem, _THEOREMS)
    c = cosine
    if theorem == "chord":
        offset = (1 + 2 * e - math.sqrt(1 - e * e)) / (1 + e)
        return ((1 + e) * c - 2 * e) / (1 - e), (1 - e) / (1 + e) * c + offset
    printed = theorem == "product_printed"
    low = (c - e) / (1 + e if printed or c >= e else 1 - e)
    high = (c + e) / (1 - e if printed or c >= -e else 1 + e)
    return low, high


def preservation_probability(k: int, e: float, theorem: str = "product") -> float:
    r"""Probability with which the bounds of :func:`preserved_cosine` hold, at least; of the printed form: as stated.

    .. math:: 1 - 6 e^{-k e^2 / 8}, \qquad (1 - 2 e^{-k e^2 / 8})^2, \qquad 1 - 6 e^{-\frac k2 (e^2/2 - e^3/3)}

    for ``"product"``, ``"product_printed"`` and ``"chord"``. They say nothing (are below 0) for the small k that serve
    best: with k = 30 and e = 0.5 the second is 0.047.

    Args:
        k: Dimension of the projection.
        e: Tolerance, between 0 and 1.
        theorem: Which bounds.

    Example:
        >>> round(preservation_probability(1000, 0.2), 4)
        0.9596
    """
    check_range("k", k, 1)
    _check_tolerance(e)
    check_choice("theorem", theorem, _THEOREMS)
    if theorem == "chord":
        return 1 - 6 * math.exp(-k / 2 * (e**2 / 2 - e**3 / 3))
    tail = math.exp(-k * e**2 / 8)
    return (1 - 2 * tail) ** 2 if theorem == "product_printed" else 1 - 6 * tail


def preservation_crossover(e: float) -> tuple[float, float]:
    """Cosines below which the bounds by products are tighter than those by chords: for the lower and the upper bound.

    It compares with the lower bound as for c >= e and with the upper as for c >= -e.

    Example:
        >>> low, high = preservation_crossover(0.1)
        >>> round(low, 4), round(high, 4)
        (0.4194, 0.2569)
    """
    _check_tolerance(e)
    return (1 + 3 * e) / (3 + e), (1 - 3 * e * e - (1 - e) * math.sqrt(1 - e * e)) / (3 * e - e * e)


def _check_tolerance(e: float) -> None:
    if not 0 < e < 1:
        raise ArgumentError("e", f"must be between 0 and 1, got {e}")


def coordinate_cdf(y: Tensor | float, d: int) -> Tensor:
    r"""Probability that a coordinate of a random direction in d dimensions is at most y.

    Its density is proportional to :math:`(1 - y^2)^{(d-3)/2}`.

    Args:
        y: Values of any shape.
        d: Dimension, at least 2.

    Example:
        >>> coordinate_cdf(0.1, 5)
        tensor(0.5747, dtype=torch.float64)
    """
    check_range("d", d, 2)
    sine = _cosines(y).clamp(-1, 1)
    cosine2 = (1 - sine) * (1 + sine)
    # R_p = integral of cos^p from 0 over that to a right angle; R_p = R_(p-2) + sin cos^(p-1) / (p c_p), with c_p the
    # latter: a sum of terms of one sign.
    if d % 2:
        ratio, term = sine.clone(), sine * cosine2 / 2
        first = 3
    else:
        ratio, term = 2 / math.pi * sine.asin(), 2 / math.pi * sine * cosine2.sqrt()
        first = 2
    for p in range(first, d - 1, 2):
        ratio += term
        term = term * cosine2 * (p / (p + 1))
    return (1 + ratio) / 2


def projected_uniformity(vectors: Tensor, directions: Tensor) -> Tensor:
    r"""Distance of vectors from uniform ones, as seen along random directions: that of Kolmogorov and Smirnov.

    The law of :math:`p \cdot u` for a random p determines that of u, so that u is uniform where :math:`p \cdot u` is
    distributed as a coordinate of a uniform direction. Zero vectors are an error of the caller: they have none.

    Args:
        vectors: ``(n, d)``; norms do not matter.
        directions: ``(d,)``, or several ``(m, d)``, whose distances are averaged.

    Returns:
        ``()``, between 0 and 1.

    Example:
        >>> projected_uniformity(torch.eye(2), torch.tensor([1.0, 0.0]))
        tensor(0.5000, dtype=torch.float64)
    """
    if vectors.dim() != 2 or directions.shape[-1:] != vectors.shape[1:]:
        raise ArgumentError("directions", f"must have shape ({vectors.shape[-1]},), got {tuple(directions.shape)}")
    n, d = vectors.shape
    p = normalise(directions.double().reshape(-1, d))
    expected = coordinate_cdf((p @ normalise(vectors.double()).T).sort(1).values, d)
    steps = torch.arange(n + 1, dtype=torch.float64, device=vectors.device) / n
    gaps = torch.maximum(expected - steps[:-1], steps[1:] - expected)
    return gaps.amax(1).mean()
