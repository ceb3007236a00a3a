r"""The contract of optimisers: what a run needs of one beside that it goes downhill.

A member's own ``contract`` may declare ``options`` (to build it with), ``lr`` (a rate at which it goes downhill on a
bowl, by default 0.01) and what does not hold for it: ``proportional`` (``False`` where twice the rate is not twice the
first step) and ``decays`` (``False`` where weight decay does not shrink weights).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere.optimisers import optimisers
from hypersphere.testing import common, numeric
from hypersphere.testing.contract import Contract, options

CONTRACT = Contract("optimiser", "optimisers", "hypersphere.optimisers:optimisers")
SHAPES = ((4, 3), (3,), ())


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """A matrix, a vector and a number."""
    return [nn.Parameter(2 + numeric.draw(*shape, seed=i, dtype=dtype)) for i, shape in enumerate(SHAPES)]


def build(
    name: str, held: Sequence[nn.Parameter], *, lr: float | None = None, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """The member for one group, its rate a tensor, as runs build it."""
    chosen = CONTRACT.fact(name, "lr", 0.01) if lr is None else lr
    group = {"name": "model", "params": list(held), "weight_decay": weight_decay}
    return optimisers.create(
        name, [{**group, "lr": torch.tensor(chosen), "base_lr": chosen}], **options(CONTRACT, name)
    )


def bowl(held: Sequence[Tensor]) -> Tensor:
    """Half the squared distance from 1, along some coordinates more than along others."""
    return sum(
        ((p.float() - 1).square() * torch.linspace(0.5, 1.5, max(p.numel(), 1)).view(p.shape)).sum() / 2 for p in held
    )  # type: ignore[return-value]


def walk(optimiser: torch.optim.Optimizer, held: Sequence[nn.Parameter], steps: int) -> list[Tensor]:
    """Copies of the parameters after so many steps down the bowl."""
    for _ in range(steps):
        optimiser.zero_grad(set_to_none=True)
        bowl(held).backward()
        optimiser.step()
    return [p.detach().clone() for p in held]


def first_step(name: str, lr: float) -> list[Tensor]:
    """The first step from the same point."""
    held = parameters(torch.float64)
    before = [p.detach().clone() for p in held]
    after = walk(build(name, held, lr=lr), held, 1)
    return [new - old for new, old in zip(after, before, strict=True)]


def same(found: Sequence[Tensor], wanted: Sequence[Tensor], what: str) -> None:
    """Raise unless tensors are equal, bit by bit."""
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other), f"{what}: {one} should be {other}"


@CONTRACT.check
def goes_downhill(name: str) -> None:
    """Steps lower the loss, of every parameter by itself, and keep lowering it."""
    held = parameters()
    optimiser = build(name, held)
    losses = [[float(bowl([p])) for p in held]]
    for _ in range(3):
        walk(optimiser, held, 8)
        losses.append([float(bowl([p])) for p in held])
    for before, after in pairwise(losses):
        for old, new in zip(before, after, strict=True):
            assert new < old, f"the loss of a parameter went from {old:g} to {new:g}"


@CONTRACT.check
def goes_as_far_as_the_rate_says(name: str) -> None:
    """A rate of 0 changes nothing, and the first step at twice the rate is twice as long."""
    rate = CONTRACT.fact(name, "lr", 0.01)
    for step in first_step(name, 0.0):
        numeric.close(step, torch.zeros_like(step), 0, "a step at rate 0")
    if CONTRACT.fact(name, "proportional", True):
        for one, two in zip(first_step(name, rate / 2), first_step(name, rate), strict=True):
            numeric.close(two / rate, 2 * one / rate, 1e-6, "a step at twice the rate")


@CONTRACT.check
def reads_its_rate_at_every_step(name: str) -> None:
    """What is filled into the tensor of a rate counts from the next step on, and the tensor stays where it is."""
    held = parameters()
    optimiser = build(name, held)
    rate = optimiser.param_groups[0]["lr"]
    assert isinstance(rate, Tensor), "the rate is no tensor any more"
    walk(optimiser, held, 2)
    rate.fill_(0)
    before = [p.detach().clone() for p in held]
    same(walk(optimiser, held, 2), before, "a parameter at a rate that became 0")
    assert optimiser.param_groups[0]["lr"] is rate and float(rate) == 0


@CONTRACT.check
def decays_weights(name: str) -> None:
    """Where the loss is flat, weight decay shrinks weights, and without decay they stay as they are."""
    for decay, factor in ((0.0, 1.0), (0.5, None)):
        held = parameters()
        optimiser = build(name, held, weight_decay=decay)
        before = [p.detach().clone() for p in held]
        for p in held:
            p.grad = torch.zeros_like(p)
        optimiser.step()
        for new, old in zip(held, before, strict=True):
            if factor is not None:
                numeric.close(new, old, 0, "a parameter without gradient and decay")
            elif CONTRACT.fact(name, "decays", True):
                assert bool((new.abs() < old.abs()).all()), f"decay took {old} to {new}"


@CONTRACT.check
def state_begins_as_zeros(name: str) -> None:
    """A step without gradients and rate, after which all tensors of the state are zero again, leaves it as new.

    Runs create the state in this way before they load a checkpoint or capture a step.
    """
    fresh, prepared = parameters(), parameters()
    optimiser = build(name, prepared, weight_decay=0.1)
    rate = optimiser.param_groups[0]["lr"]
    kept = float(rate)
    rate.zero_()
    for p in prepared:
        p.grad = torch.zeros_like(p)
    optimiser.step()
    rate.fill_(kept)
    for state in optimiser.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()
    shapes = {key: tuple(v.shape) for p, s in optimiser.state.items() for key, v in _tensors(s, p)}
    wanted = walk(build(name, fresh, weight_decay=0.1), fresh, 4)
    same(walk(optimiser, prepared, 4), wanted, "a parameter after a state that was created first")
    after = {key: tuple(v.shape) for p, s in optimiser.state.items() for key, v in _tensors(s, p)}
    assert after == shapes, f"the state grows in later steps: {sorted(set(after) ^ set(shapes))}"


def _tensors(state: dict[str, Any], parameter: Tensor) -> list[tuple[tuple[int, str], Tensor]]:
    return [((id(parameter), key), value) for key, value in state.items() if isinstance(value, Tensor)]


@CONTRACT.check
def goes_on_where_it_was(name: str) -> None:
    """With its parameters and the tensors of its state restored, steps are those of a run that was not interrupted."""
    held, again = parameters(), parameters()
    optimiser = build(name, held, weight_decay=0.1)
    walk(optimiser, held, 3)
    saved = copy.deepcopy(optimiser.state_dict())
    values = [p.detach().clone() for p in held]
    wanted = walk(optimiser, held, 3)
    resumed = build(name, again, weight_decay=0.1)
    with torch.no_grad():
        for p, value in zip(again, values, strict=True):
            p.copy_(value)
    resumed.load_state_dict(saved)
    same(walk(resumed, again, 3), wanted, "a parameter after its state was restored")
    for state in saved["state"].values():
        loose = [key for key, value in state.items() if not isinstance(value, Tensor) and value is not None]
        assert not loose, f"{loose} of its state is no tensor, which checkpoints do not keep"


@CONTRACT.check
def leaves_what_has_no_gradient(name: str) -> None:
    """Parameters without a gradient stay as they are, and empty ones do no harm."""
    held = [*parameters(), nn.Parameter(torch.zeros(0, 3))]
    optimiser = build(name, held, weight_decay=0.1)
    before = held[0].detach().clone()
    for p in held[1:]:
        p.grad = torch.ones_like(p)
    optimiser.step()
    assert torch.equal(held[0], before), "a parameter without a gradient has moved"


@CONTRACT.check
def stays_finite(name: str) -> None:
    """Zero, tiny and large gradients leave parameters of every type finite and of their type."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for size in (0.0, 1e-30, 1e8):
            held = parameters(dtype)
            optimiser = build(name, held)
            for p in held:
                p.grad = torch.full_like(p, size)
            optimiser.step()
            numeric.finite(held, f"parameters of {dtype} after gradients of {size:g}")
            assert all(p.dtype == dtype for p in held)


@CONTRACT.check
def keeps_groups_apart(name: str) -> None:
    """Every group has its own rate and decay."""
    held, alone = parameters(), parameters()
    groups = [
        {"name": f"group {i}", "params": [p], "weight_decay": 0.1 * i, "lr": torch.tensor(0.01 * (i + 1))}
        for i, p in enumerate(held)
    ]
    found = walk(optimisers.create(name, groups, **options(CONTRACT, name)), held, 3)
    for i, p in enumerate(alone):
        wanted = walk(build(name, [p], lr=0.01 * (i + 1), weight_decay=0.1 * i), [p], 3)
        numeric.close(found[i], wanted[0], 1e-6, f"the parameter of group {i}")


@CONTRACT.check
def waits_for_nothing(name: str) -> None:
    """A step reads nothing off the device."""
    held = parameters()
    optimiser = build(name, held, weight_decay=0.1)
    walk(optimiser, held, 1)
    bowl(held).backward()
    with numeric.Host():
        optimiser.step()
    assert all(math.isfinite(float(p.detach().sum())) for p in held)


common.add(
    CONTRACT,
    build=lambda name: build(name, parameters()),
    recipe=lambda name: [f"optimiser.name={name}"],
)
