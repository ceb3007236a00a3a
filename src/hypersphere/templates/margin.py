r"""A margin of your own: the target value in place of the cosine of the angle to a sample's own class.

hypersphere list margins --plugin my_name.py
hypersphere train digits-64-margin-softmax --plugin my_name.py loss.psi=my-name loss.m=0.3
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import hypersphere as hs
from hypersphere.errors import check_range
from hypersphere.margins import Margin, Parameter


@hs.margins.margins.register("my-name")
@dataclass(frozen=True)
class MyName(Margin):
    r"""A margin that grows with the angle: :math:`\psi(\theta) = \cos\theta - m\,\theta / \pi`, :math:`m \ge 0`."""

    def check(self, **m: float) -> None:
        """At least 0: below the cosine, a target is a harder one."""
        check_range("m", m["m"], 0)

    def psi(self, theta: Tensor, *, m: Parameter, **_: Any) -> Tensor:
        """Target value at angles in [0, pi], any shape; ``m`` is a number or a tensor that broadcasts."""
        return theta.cos() - m * theta / math.pi
