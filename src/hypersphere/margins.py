r"""Margins: what a head puts in place of :math:`\cos\theta_y` for the class that a sample belongs to.

A margin maps the cosine to the own class centre to a smaller target value :math:`\psi(\theta) \le \cos\theta`, so that
training goes on until the class is tighter than correct classification alone needs. Margins act on ``(B,)`` target
cosines only: their cost does not depend on the number of classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hypersphere.errors import check_range
from hypersphere.geometry import arccos, at_least_float32

Margin = Callable[[Tensor], Tensor]
"""Target cosines ``(B,)`` -> target values ``(B,)``."""


def multiplicative(cosines: Tensor, m: float) -> Tensor:
    r"""Multiplicative angular margin of L-Softmax and A-Softmax, extended so that it decreases on [0, pi].

    .. math:: \psi(\theta) = \cos(m\theta - k\pi) - 2k, \quad k = \lfloor m\theta/\pi \rfloor

    An integer ``m`` uses the Chebyshev polynomial of the cosine, so no angle is taken and the slope is finite
    everywhere; other values go through the angle.

    Args:
        cosines: Cosines to the own class, any shape.
        m: Margin, at least 1; 1 is no margin.

    Returns:
        Target values in [1 - 2m, 1], same shape, in float32 or wider.

    Example:
        >>> multiplicative(torch.tensor([1.0, 0.0, -1.0]), 4)
        tensor([ 1., -3., -7.])
    """
    check_range("m", m, 1)
    c = at_least_float32(cosines)
    if m == 1:
        return c
    if float(m).is_integer():
        # T_m by its recurrence; k counts the branch points cos(j pi / m) at or above c.
        previous, polynomial = torch.ones_like(c), c
        for _ in range(int(m) - 1):
            previous, polynomial = polynomial, 2 * c * polynomial - previous
        k = sum((c <= math.cos(j * math.pi / m)).to(c.dtype) for j in range(1, int(m)))
        return (1 - 2 * (k % 2)) * polynomial - 2 * k
    theta = arccos(c)
    k = (m * theta.detach() / math.pi).floor().clamp(0, math.ceil(m) - 1)
    return (m * theta - k * math.pi).cos() - 2 * k


def additive_angle(cosines: Tensor, m: float) -> Tensor:
    r"""Additive angular margin of ArcFace, :math:`\psi(\theta) = \cos(\min(\theta + m, \pi))`.

    Args:
        cosines: Cosines to the own class, any shape.
        m: Margin in radians, in [0, pi]; 0 is no margin.

    Returns:
        Target values in [-1, cos m], same shape, in float32 or wider.

    Example:
        >>> additive_angle(torch.tensor([1.0, 0.0, -1.0]), 0.5)
        tensor([ 0.8776, -0.4794, -1.0000])
    """
    check_range("m", m, 0, math.pi)
    c = at_least_float32(cosines)
    if m == 0:
        return c
    return (arccos(c) + m).clamp(max=math.pi).cos()
