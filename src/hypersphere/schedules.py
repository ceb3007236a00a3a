"""Schedules: by which factor a learning rate, or the weight of a regulariser, changes over the steps of a run.

A schedule is a function of the step, counted from 0, and of the progress, the share in [0, 1] of the steps behind the
warm-up that have been taken. A factory registered here makes one, and its arguments are its options.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from hypersphere.errors import ArgumentError
from hypersphere.registry import Registry

Factor: TypeAlias = Callable[[int, float], float]
"""From step and progress to a factor."""

schedules = Registry[Factor]("schedule")
"""Makers of schedules by name."""


def register(name: str, *, aliases: tuple[str, ...] = ()) -> Callable[[Callable[..., Factor]], Callable[..., Factor]]:
    """Decorator that adds a maker of schedules under a name.

    Example:
        >>> @register("square-root")
        ... def square_root() -> Factor:
        ...     '''The inverse root of the number of steps.'''
        ...     return lambda step, progress: (step + 1) ** -0.5
        >>> create("square-root")(3, 0.5)
        0.5
        >>> schedules.remove("square-root")
    """
    return schedules.register(name, aliases=aliases)


def create(name: str, **options: object) -> Factor:
    """The schedule called ``name``.

    Example:
        >>> create("cosine", final=0.5)(50, 0.5)
        0.75
    """
    return schedules.create(name, **options)


@register("constant")
def constant() -> Factor:
    """The same throughout.

    Example:
        >>> constant()(15, 0.5)
        1.0
    """
    return lambda step, progress: 1.0


@register("steps")
def steps(*, milestones: tuple[int, ...] = (), factor: float = 0.1) -> Factor:
    """Multiplied by a factor at each of some steps.

    Args:
        milestones: The steps.
        factor: What it is multiplied by.

    Example:
        >>> steps(milestones=(10, 20))(15, 0.5)
        0.1
    """
    if not milestones:
        raise ArgumentError("milestones", "must be given for the schedule 'steps'")
    return lambda step, progress: factor ** sum(step >= milestone for milestone in milestones)


steps.contract = {"options": {"milestones": (10, 20)}}  # type: ignore[attr-defined]


@register("cosine")
def cosine(*, final: float = 0.0) -> Factor:
    """Half a cosine from 1 to a last value.

    Args:
        final: The last value, as a share of the first.

    Example:
        >>> cosine(final=0.5)(15, 0.5)
        0.75
    """
    return lambda step, progress: final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


@register("linear")
def linear(*, final: float = 0.0) -> Factor:
    """A straight line from 1 to a last value.

    Args:
        final: The last value, as a share of the first.

    Example:
        >>> linear(final=0.5)(15, 0.25)
        0.875
    """
    return lambda step, progress: final + (1 - final) * (1 - progress)
