"""Schedules of a margin, kept as modules so that they are saved, restored and captured with the head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hypersphere.errors import check_range


@torch.library.custom_op("hypersphere::count_step", mutates_args={"steps"})
def _count_step(steps: Tensor) -> Tensor:
    """Add one to a counter and return its new value.

    One opaque operation, because a compiled backward pass may recompute what it needs from the counter itself, which
    by then has moved on.
    """
    steps += 1
    return steps.clone()


@_count_step.register_fake
def _(steps: Tensor) -> Tensor:
    return torch.empty_like(steps)


class LambdaAnnealer(nn.Module):
    r"""Weight of the plain cosine against the margin, falling over the training steps.

    .. math:: \lambda(t) = \max(\lambda_{min}, \text{base} (1 + \gamma t)^{-p}), \quad t = 1, 2, \dots

    A head with this annealer uses :math:`(\lambda \cos\theta + \psi(\theta)) / (1 + \lambda)` as its target value. The
    counter ``t`` is a buffer: it advances on the device and a resumed or fine-tuned run goes on where it stopped.

    Args:
        base: Start value; 0 switches annealing off.
        gamma: Speed of the decay per step.
        power: Exponent of the decay.
        minimum: Lowest value; the default is that of the released SphereFace models.

    Example:
        >>> annealer = LambdaAnnealer()
        >>> annealer.value(annealer.advance())
        tensor(892.8571)
    """

    steps: Tensor

    def __init__(self, base: float = 1000.0, gamma: float = 0.12, power: float = 1.0, minimum: float = 5.0) -> None:
        super().__init__()
        for name, value in (("base", base), ("gamma", gamma), ("power", power), ("minimum", minimum)):
            check_range(name, value, 0)
        self.base, self.gamma, self.power, self.minimum = base, gamma, power, minimum
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def advance(self) -> Tensor:
        """Count one training step and return the count."""
        return _count_step(self.steps)

    def value(self, steps: Tensor | None = None) -> Tensor:
        """The weight after ``steps`` steps (those counted so far by default), a scalar on the buffer's device."""
        count = self.steps if steps is None else steps
        decay = (1 + self.gamma * count.float()).pow(-self.power)
        return (self.base * decay).clamp(min=self.minimum if self.base else 0.0)

    def extra_repr(self) -> str:
        """The constants of the schedule."""
        return f"base={self.base:g}, gamma={self.gamma:g}, power={self.power:g}, minimum={self.minimum:g}"
