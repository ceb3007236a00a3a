r"""The contract of schedules: factors that are functions of the step alone.

A member's own ``contract`` may declare ``options`` and ``variants`` (to build it with), ``first`` (its factor at the
start, by default 1; ``None`` where it depends on the run) and ``most`` (the largest factor, by default 1).
"""

from __future__ import annotations

import math

from hypersphere.schedules import Factor, schedules
from hypersphere.testing import common
from hypersphere.testing.contract import Contract, variants

CONTRACT = Contract("schedule", "schedules", "hypersphere.schedules:schedules")
STEPS = 50


def members(name: str) -> list[Factor]:
    """The member with each of the options to be tried."""
    return [schedules.create(name, **options) for options in variants(CONTRACT, name)]


def run(factor: Factor, steps: int = STEPS) -> list[float]:
    """The factors of a run of so many steps, and the one behind its end."""
    return [factor(step, step / steps) for step in range(steps + 1)]


@CONTRACT.check
def gives_factors(name: str) -> None:
    """Factors are finite numbers of Python from 0 to the largest."""
    most = CONTRACT.fact(name, "most", 1.0)
    for factor in members(name):
        for steps in (1, 3, STEPS, 100_000):
            for at in {0, 1, steps // 3, steps // 2, steps - 1, steps}:
                value = factor(at, at / steps)
                assert type(value) in (int, float), f"{value!r} is no number of Python"
                assert math.isfinite(value), f"{value} at step {at} of {steps}"
                assert -1e-12 <= value <= most + 1e-9, f"{value} at step {at} of {steps}, not within 0 and {most:g}"


@CONTRACT.check
def begins_with_the_whole_rate(name: str) -> None:
    """The first factor is 1, unless it declares another."""
    first = CONTRACT.fact(name, "first", 1.0)
    for factor in members(name):
        if first is not None:
            assert abs(factor(0, 0.0) - first) < 1e-9, f"it begins with {factor(0, 0.0)}, not with {first}"


@CONTRACT.check
def is_a_function_of_the_step(name: str) -> None:
    """Asked again, in any order and of another one that was built alike, factors are the same: a resumed run is."""
    for factor, other in zip(members(name), members(name), strict=True):
        wanted = run(factor)
        assert run(factor) == wanted, "asked again it gives other factors"
        backwards = [other(step, step / STEPS) for step in reversed(range(STEPS + 1))][::-1]
        assert backwards == wanted, "factors depend on those that were asked before"


common.add(
    CONTRACT,
    recipe=lambda name: [
        f"schedule.name={name}",
        *(
            f"schedule.{key}={list(v) if isinstance(v, tuple) else v}"
            for key, v in next(variants(CONTRACT, name)).items()
        ),
    ],
)
