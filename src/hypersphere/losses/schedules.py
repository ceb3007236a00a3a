"""Schedules of a margin, kept as modules so that they are saved, restored and captured with the head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hypersphere.errors import ArgumentError, check_count, check_range


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


@torch.library.custom_op("hypersphere::moving_average", mutates_args={"average"})
def moving_average(average: Tensor, value: Tensor, rate: float) -> Tensor:
    """Move ``average`` towards ``value`` by the share ``rate`` and return it; opaque like the counter above.

    A batch without samples (``value`` not finite) leaves it as it is.
    """
    average.copy_(torch.where(value.isfinite(), average.lerp(value.to(average.dtype), rate), average))
    return average.clone()


@moving_average.register_fake
def _(average: Tensor, value: Tensor, rate: float) -> Tensor:
    return torch.empty_like(average)


def refuse_vmap(*_: Any) -> tuple[Any, Any]:
    """What an operation does under ``torch.func.vmap`` that moves numbers of a head by whole batches."""
    why = "must be a whole batch where a head in training keeps means of them"
    raise ArgumentError("features", f"{why}, and torch.func.vmap takes it apart: call head.eval() before")


moving_average.register_vmap(refuse_vmap)


class Schedule(nn.Module):
    """A number that depends on how many training steps a head has taken.

    The counter is a buffer: it advances on the device, is saved with the head, and a resumed or fine-tuned run goes on
    where it stopped.
    """

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def advance(self) -> Tensor:
        """Count one training step and return the count."""
        return _count_step(self.steps)

    def value(self, steps: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """The number after ``steps`` steps (those counted so far by default), a scalar on the buffer's device.

        Args:
            steps: Count of steps.
            dtype: Type of the number, in which it is computed.
        """
        return self._at((self.steps if steps is None else steps).to(dtype))

    def _at(self, steps: Tensor) -> Tensor:
        raise NotImplementedError

    def bounds(self) -> tuple[float, float]:
        """Least and largest number of the whole schedule."""
        raise NotImplementedError


class LambdaAnnealer(Schedule):
    r"""Weight of the plain cosine against the margin, falling over the training steps.

    .. math:: \lambda(t) = \max(\lambda_{min}, \text{base} (1 + \gamma t)^{-p}), \quad t = 1, 2, \dots

    A head with this annealer uses :math:`(\lambda \cos\theta + \psi(\theta)) / (1 + \lambda)` as its target value.

    Args:
        base: Start value; 0 switches annealing off.
        gamma: Speed of the decay per step.
        power: Exponent of the decay.
        minimum: Lowest value; the default is that of the released SphereFace models.
        start: Steps already counted when it begins, as for a model that was trained before.

    Example:
        >>> annealer = LambdaAnnealer()
        >>> annealer.value(annealer.advance())
        tensor(892.8571)
    """

    def __init__(
        self, base: float = 1000.0, gamma: float = 0.12, power: float = 1.0, minimum: float = 5.0, start: int = 0
    ) -> None:
        super().__init__()
        for name, value in (("base", base), ("gamma", gamma), ("power", power), ("minimum", minimum), ("start", start)):
            check_range(name, value, 0)
        self.base, self.gamma, self.power, self.minimum = base, gamma, power, minimum
        self.steps.fill_(start)

    def _at(self, steps: Tensor) -> Tensor:
        decay = (1 + self.gamma * steps).pow(-self.power)
        return (self.base * decay).clamp(min=self.minimum if self.base else 0.0)

    def bounds(self) -> tuple[float, float]:
        """From ``minimum`` to ``base``."""
        return (self.minimum, max(self.base, self.minimum)) if self.base else (0.0, 0.0)

    def extra_repr(self) -> str:
        """The constants of the schedule."""
        return f"base={self.base:g}, gamma={self.gamma:g}, power={self.power:g}, minimum={self.minimum:g}"


class Ramp(Schedule):
    r"""A margin that grows from ``start`` to ``end``, evenly over ``length`` steps or by jumps at ``milestones``.

    .. math:: m(t) = \text{start} + (\text{end} - \text{start}) \cdot \min(t / \text{length}, 1)

    or, with milestones, the share of them that lie at or before ``t``.

    Args:
        start: Value before the first step.
        end: Value from the last step on.
        length: Steps from one to the other.
        milestones: Steps at which it jumps, each by the same amount; in place of ``length``.

    Example:
        >>> ramp = Ramp(0.0, 0.4, length=8000)
        >>> ramp.value(torch.tensor(2000))
        tensor(0.1000)
    """

    def __init__(
        self, start: float, end: float, length: int | None = None, milestones: tuple[int, ...] | None = None
    ) -> None:
        super().__init__()
        if (length is None) == (not milestones):
            raise ArgumentError("length", f"or milestones must be given (one of them), got {length} and {milestones}")
        if length is not None:
            check_count("length", length)
        for milestone in milestones or ():
            check_count("milestones", milestone, 0)
        check_range("start", start)
        check_range("end", end)
        self.start, self.end, self.length = start, end, length
        self.milestones = None if milestones is None else tuple(milestones)
        # Integers: a head that is moved to 16 bit must not round them.
        marks = torch.tensor(self.milestones or (length,), dtype=torch.int64)
        self.register_buffer("marks", marks, persistent=False)

    marks: Tensor

    def _at(self, steps: Tensor) -> Tensor:
        passed = steps >= self.marks
        share = passed.to(steps.dtype).mean() if self.milestones else (steps / self.marks[0]).clamp(max=1)
        return self.start + (self.end - self.start) * share

    def bounds(self) -> tuple[float, float]:
        """From the smaller to the larger end."""
        return min(self.start, self.end), max(self.start, self.end)

    def extra_repr(self) -> str:
        """The constants of the schedule."""
        how = f"milestones={self.milestones}" if self.milestones else f"length={self.length}"
        return f"start={self.start:g}, end={self.end:g}, {how}"
