r"""Confidence intervals of shares and of means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal

import torch
from torch import Tensor

from hypersphere.errors import ArgumentError, check_choice, check_range

Interval = tuple[float, float]


def check_level(level: float) -> None:
    """Raise unless it is a confidence between 0 and 1."""
    if not 0 < level < 1:
        raise ArgumentError("level", f"must be between 0 and 1, got {level}")


def wilson_interval(successes: float, trials: int, level: float = 0.95) -> Interval:
    """Wilson's interval of a share of independent trials; not empty at shares 0 and 1.

    Example:
        >>> tuple(round(bound, 4) for bound in wilson_interval(0, 100))
        (0.0, 0.037)
    """
    check_range("trials", trials, 1)
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, weight = successes / trials, z * z / trials
    middle = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / trials + weight / (4 * trials))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def student_quantile(level: float, freedom: int) -> float:
    r"""Two-sided quantile of Student's t, the t with :math:`P(|T| \le t) = \mathrm{level}`.

    The distribution function is a finite sum for whole degrees of freedom; the quantile is found by bisection.

    Args:
        level: Between 0 and 1.
        freedom: Degrees of freedom, from 1.

    Example:
        >>> round(student_quantile(0.95, 4), 4)
        2.7764
    """
    check_level(level)
    check_range("freedom", freedom, 1)

    def inside(angle: float) -> float:
        # Abramowitz and Stegun 26.7.3 and 26.7.4, with t = sqrt(freedom) tan(angle).
        sine, square = math.sin(angle), math.cos(angle) ** 2
        odd = freedom % 2
        term = total = float(freedom > 1) * (math.cos(angle) if odd else 1.0)
        for n in range(2 + odd, freedom - 1, 2):
            term *= square * (n - 1) / n
            total += term
        return 2 / math.pi * (angle + sine * total) if odd else sine * total

    low, high = 0.0, math.pi / 2
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < level else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def mean_and_interval(
    values: Tensor | Sequence[float], rule: Literal["student", "normal"] = "student"
) -> tuple[float, float]:
    r"""Mean of repeated measurements and half width of its 95 % confidence interval.

    * ``"student"``: :math:`t_{n - 1}\, s / \sqrt n` with the divisor :math:`n - 1` in :math:`s`, right for the few
      seeds of a recipe; infinite for a single value, of which nothing can be said.
    * ``"normal"``: :math:`1.96\, \sigma / \sqrt n` with the divisor :math:`n` in :math:`\sigma`, as published few-shot
      results over hundreds of episodes have it; too narrow for few values.

    Args:
        values: ``(n,)``.
        rule: Which of the two.

    Example:
        >>> mean_and_interval([1.0, 2.0, 3.0])
        (2.0, 2.4841...)
        >>> mean_and_interval(torch.tensor([0.0, 1.0, 0.0, 1.0]), "normal")
        (0.5, 0.49)
    """
    check_choice("rule", rule, ("student", "normal"))
    values = torch.as_tensor(values, dtype=torch.float64)
    if values.dim() != 1 or not len(values):
        raise ArgumentError("values", f"must have shape (n,) and not be empty, got {tuple(values.shape)}")
    count, mean = len(values), float(values.mean())
    if rule == "normal":
        return mean, 1.96 * float(values.std(correction=0)) / math.sqrt(count)
    if count == 1:
        return mean, math.inf
    return mean, student_quantile(0.95, count - 1) * float(values.std()) / math.sqrt(count)
