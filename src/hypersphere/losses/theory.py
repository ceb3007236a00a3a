r"""What margins and scales can reach: angles between two classes, lowest losses, smallest scales.

Everything here is a function of plain numbers, evaluated in double precision. Angles are in radians.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hypersphere.errors import ArgumentError, check_range

AngularFunction = Callable[[Tensor], Tensor]
"""Angles -> logits per unit of scale, elementwise."""


def angular_margin(m: float, theta12: float) -> float:
    r"""Angle between the regions of two classes under the multiplicative margin of A-Softmax.

    .. math:: \frac{m - 1}{m + 1}\,\theta_{12}

    Args:
        m: Multiplicative margin, at least 1.
        theta12: Angle between the two class centres, in [0, pi].

    Returns:
        The margin in radians; :func:`binary_margin` gives that of any other target function.

    Example:
        >>> round(math.degrees(angular_margin(4, math.pi / 2)), 6)
        54.0
    """
    check_range("m", m, 1)
    check_range("theta12", theta12, 0, math.pi)
    return (1 - 2 / (m + 1)) * theta12  # this form holds for an infinite m, too


def binary_margin(psi: AngularFunction, theta12: float, eta: AngularFunction = torch.cos) -> float:
    r"""Angle between the regions of two classes for any pair of angular functions.

    On the arc between the two centres, a sample at the angle :math:`a` from its own one is on the boundary where

    .. math:: \psi(a) = \eta(\theta_{12} - a), \qquad 0 \le a \le \theta_{12} / 2

    and the margin is the gap between both boundaries, :math:`\theta_{12} - 2a`. Where even the centre itself misses
    its target, :math:`\psi(0) < \eta(\theta_{12})`, no sample can satisfy the loss and the margin is the whole gap,
    :math:`\theta_{12}`. Where the functions ask for no gap at all, it is 0.

    Args:
        psi: Target function, non-increasing; called with a float64 scalar tensor.
        theta12: Angle between the two class centres, in [0, pi].
        eta: Function of the other class, non-increasing.

    Returns:
        The margin in radians, in [0, theta12].

    Example:
        >>> margin = binary_margin(lambda theta: (theta + 0.5).cos(), math.pi / 2)  # ArcFace
        >>> round(margin, 6)
        0.5
    """
    check_range("theta12", theta12, 0, math.pi)

    def excess(angle: float) -> float:
        own = float(psi(torch.tensor(angle, dtype=torch.float64)))
        other = float(eta(torch.tensor(theta12 - angle, dtype=torch.float64)))
        for argument, value in (("psi", own), ("eta", other)):
            if math.isnan(value):
                raise ArgumentError(argument, f"must give a number on [0, theta12 = {theta12:g}], got nan")
        return own - other

    low, high = 0.0, theta12 / 2
    if excess(low) < 0:
        return theta12
    for _ in range(60):  # pi/2 halved 60 times is below the last digit of any angle that matters
        middle = (low + high) / 2
        if excess(middle) < 0:
            high = middle
        else:
            low = middle
    return theta12 - 2 * high


def m_min(classes: int) -> float:
    r"""Smallest multiplicative margin with which every angle inside a class is below every angle between classes.

    Two classes: :math:`2 + \sqrt 3`, the root of :math:`m^2 - 4m + 1`. Three or more, evenly spaced in the plane: 3.

    Args:
        classes: Number of classes, at least 2.

    Returns:
        The bound; the smallest integer that meets it for any number of classes is 4.

    Example:
        >>> round(m_min(2), 6), m_min(10)
        (3.732051, 3.0)
    """
    check_range("classes", classes, 2)
    return 2 + math.sqrt(3) if classes == 2 else 3.0


def softmax_bound(classes: int, s: float) -> float:
    r"""Lowest mean cross-entropy of :math:`s\cos\theta` logits with classes of equal size.

    .. math:: \log\left(1 + (C - 1)\, e^{-sC/(C - 1)}\right)

    It is attained where the class centres form a regular simplex (which needs at least C - 1 dimensions) and every
    feature lies on its centre; no training gets below it, so a loss that stays high may only mean a small scale.

    Args:
        classes: Number of classes C, at least 1.
        s: Logit scale, at least 0.

    Returns:
        The bound; 0 for a single class.

    Example:
        >>> round(softmax_bound(10, 1), 6), round(softmax_bound(10, 10), 6)
        (1.376935, 0.000134)
    """
    check_range("classes", classes, 1)
    check_range("s", s, 0)
    if classes == 1:
        return 0.0
    return math.log1p((classes - 1) * math.exp(-s * classes / (classes - 1)))


def reachable_probability(classes: int, s: float) -> float:
    r"""Best probability that features on their class centres can get at a scale, the inverse of :func:`suggest_scale`.

    .. math:: p = \frac{1}{1 + (C - 1)\, e^{-sC/(C - 1)}}

    Args:
        classes: Number of classes C, at least 1.
        s: Logit scale, at least 0.

    Returns:
        The probability, from 1/C (at ``s=0``) to 1; an upper bound where C - 1 exceeds the dimension.

    Example:
        >>> round(reachable_probability(1000, 5), 4), round(reachable_probability(1000, 30), 4)
        (0.1299, 1.0)
    """
    return math.exp(-softmax_bound(classes, s))


def suggest_scale(classes: int, probability: float = 0.9) -> float:
    r"""Smallest logit scale at which features on their class centres can reach a probability.

    .. math:: s = \frac{C - 1}{C} \log \frac{(C - 1)\, p}{1 - p}

    Args:
        classes: Number of classes C, at least 1.
        probability: Wanted probability p of the target, between 0 and 1, both excluded.

    Returns:
        The scale, never below 0; 0 for a single class.

    Example:
        >>> round(suggest_scale(10572), 6)
        11.46201
    """
    check_range("classes", classes, 1)
    if not 0 < probability < 1:
        raise ArgumentError("probability", f"must be greater than 0 and less than 1, got {probability}")
    if classes == 1:
        return 0.0
    odds = math.log(classes - 1) + math.log(probability) - math.log1p(-probability)
    return max(0.0, (classes - 1) / classes * odds)


def adacos_scale(classes: int) -> float:
    r"""Fixed scale of AdaCos, :math:`\sqrt 2 \log(C - 1)`.

    Args:
        classes: Number of classes C, at least 2; the scale of two classes is 0, so the rule is of use from three on.

    Returns:
        The scale.

    Example:
        >>> round(adacos_scale(10572), 6)
        13.103919
    """
    check_range("classes", classes, 2)
    return math.sqrt(2) * math.log(classes - 1)


def largest_cosine_margin(classes: int, dim: int) -> float:
    r"""Largest additive cosine margin (CosFace) that evenly spread class centres can satisfy.

    .. math::
        1 - \cos\frac{2\pi}{C} \;\text{ in the plane}, \qquad \frac{C}{C - 1} \;\text{ for } C \le D + 1

    In the remaining case, :math:`C > D + 1 > 3`, no closed form is known. The second value is returned as an upper
    bound; the admissible margin is at most 1 there and falls towards 0 as classes are added.

    Args:
        classes: Number of classes C, at least 2.
        dim: Feature dimension D, at least 2.

    Returns:
        The margin, or its upper bound, in [0, 2].

    Example:
        >>> round(largest_cosine_margin(8, dim=2), 6), largest_cosine_margin(5, dim=4)
        (0.292893, 1.25)
    """
    check_range("classes", classes, 2)
    check_range("dim", dim, 2)
    if dim == 2:
        return 2 * math.sin(math.pi / classes) ** 2  # 1 - cos without its cancellation for many classes
    return classes / (classes - 1)


def magface_minimum_weight(
    s: float = 64.0, l_a: float = 10.0, u_a: float = 110.0, l_m: float = 0.45, u_m: float = 0.8
) -> float:
    r"""Smallest weight of MagFace's norm penalty for which the feature norms converge.

    .. math:: \lambda_g \ge s\,\frac{u_m - l_m}{u_a - l_a} \cdot \frac{u_a^2\, l_a^2}{u_a^2 - l_a^2}

    With it, the pull of :math:`g(a) = 1/a + a/u_a^2` towards longer features is at :math:`a = l_a` as strong as the
    most the growing margin can pull towards shorter ones.

    Args:
        s: Logit scale, at least 0.
        l_a: Lowest norm, greater than 0.
        u_a: Highest norm, greater than ``l_a``.
        l_m: Margin at the lowest norm, at least 0.
        u_m: Margin at the highest norm, at least ``l_m``.

    Returns:
        The weight.

    Example:
        >>> round(magface_minimum_weight(), 6)
        22.586667
    """
    check_range("s", s, 0)
    check_range("l_a", l_a, 0, open_low=True)
    check_range("u_a", u_a, l_a, open_low=True)
    check_range("l_m", l_m, 0)
    check_range("u_m", u_m, l_m)
    return s * (u_m - l_m) / (u_a - l_a) / (l_a**-2 - u_a**-2)


__all__ = [
    "adacos_scale",
    "angular_margin",
    "binary_margin",
    "largest_cosine_margin",
    "m_min",
    "magface_minimum_weight",
    "reachable_probability",
    "softmax_bound",
    "suggest_scale",
]
