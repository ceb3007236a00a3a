"""Descent of many sets of points on the unit sphere at a time, each by itself: L-BFGS and steps along the gradient."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hypersphere.geometry import normalise

HISTORY = 12
FIRST_TURN = 0.05
"""Radians of the first step on a function that changes."""
MEMORY = 0.9
"""Share of what is known that stays in the mean of squared gradients."""

Objective = Callable[[Tensor], Tensor]
"""Energies ``(r,)`` of sets of points ``(r, n, d)``."""


def finite(values: Tensor) -> Tensor:
    """The values, infinite where they are no numbers."""
    return torch.where(values.isfinite(), values, math.inf)


def slope_at(objective: Objective, x: Tensor) -> tuple[Tensor, Tensor]:
    """Energies ``(r,)`` and gradient ``(r, n, d)``."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        values = objective(x)
        (gradient,) = torch.autograd.grad(values.sum(), x)
    return finite(values.detach()), gradient


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((1, 2), keepdim=True)


def _shortened(move: Tensor, x: Tensor, most: float) -> Tensor:
    """The move ``(r, n, d)`` of each start as a whole, scaled so that no point rotates by more than ``most``."""
    turn = (move.norm(dim=2) / x.norm(dim=2).clamp(min=torch.finfo(x.dtype).tiny)).amax(1)
    return move * (most / turn.clamp(min=most)).view(-1, 1, 1)


@torch.no_grad()
def lbfgs(
    objective: Objective, start: Tensor, steps: int, most: float, path: list[Tensor] | None, gain: float = 0.0
) -> Tensor:
    """L-BFGS of every start by itself, with backtracking, until no step gains more than that part of a value.

    An energy does not depend on the lengths of the vectors, so that these are free: no constraint is left.
    """
    x = start.clone()
    value, gradient = slope_at(objective, x)
    moves: list[Tensor] = []
    turns: list[Tensor] = []
    small = 10 * torch.finfo(x.dtype).eps
    quiet = 0
    for _ in range(steps):
        direction = _shortened(-_inverse_hessian(gradient, moves, turns), x, most)
        downhill = _dot(direction, gradient)
        direction = torch.where(downhill < 0, direction, _shortened(-gradient, x, most))
        downhill = _dot(direction, gradient).view(-1)
        done = -downhill <= small * (value.abs() + 1e-3)  # what is left to gain is rounding
        length = torch.ones_like(value)
        for _ in range(30):
            candidate = x + length.view(-1, 1, 1) * direction
            reached = finite(objective(candidate))
            enough = done | (reached <= value + 1e-4 * length * downhill + small * value.abs())
            if bool(enough.all()):
                break
            length = torch.where(enough, length, length / 2)
        moved = (enough & (reached <= value)).view(-1, 1, 1)
        candidate = torch.where(moved, candidate, x)
        new_value, new_gradient = slope_at(objective, candidate)
        moves.append(candidate - x)
        turns.append(new_gradient - gradient)
        del moves[:-HISTORY], turns[:-HISTORY]
        gained = bool((value - new_value > max(small, gain) * (value.abs() + 1e-3)).any())
        x, value, gradient = candidate, new_value, new_gradient
        if path is not None:
            path.append(normalise(x))
        if not gained:
            moves.clear()  # once more along the gradient itself
            turns.clear()
            if (quiet := quiet + 1) > 2:
                break
    return normalise(x)


def _inverse_hessian(gradient: Tensor, moves: list[Tensor], turns: list[Tensor]) -> Tensor:
    """Two-loop recursion; a pair that does not curve upwards is left out, for its start only."""
    result = gradient.clone()
    kept = []
    for move, turn in zip(reversed(moves), reversed(turns), strict=True):
        curvature = _dot(move, turn)
        good = curvature > 1e-12 * _dot(turn, turn)
        inverse = torch.where(good, 1 / torch.where(good, curvature, 1.0), 0.0)
        share = inverse * _dot(move, result)
        result -= share * turn
        kept.append((move, turn, inverse, share, good, curvature))
    if kept:
        _, turn, _, _, good, curvature = kept[0]
        result *= torch.where(good, curvature / torch.where(good, _dot(turn, turn), 1.0), 1.0)
    for move, turn, inverse, share, _, _ in reversed(kept):
        result += (share - inverse * _dot(turn, result)) * move
    return result


def _turned(x: Tensor, move: Tensor, most: float, arcs: bool) -> Tensor:
    """Points ``(r, n, d)`` that move, none by more than ``most``, along great circles or straight and back to them."""
    length = move.norm(dim=2, keepdim=True)
    capped = length.clamp(max=most)
    move = move * (capped / length.clamp(min=torch.finfo(x.dtype).tiny))
    if arcs:
        return normalise(x * capped.cos() + move * (capped.sin() / capped.clamp(min=1e-30)))
    return normalise(x + move)


@torch.no_grad()
def descend(
    objective: Objective,
    start: Tensor,
    steps: int,
    lr: float | None,
    most: float,
    arcs: bool,
    path: list[Tensor] | None,
) -> Tensor:
    """Gradient descent on the sphere; without ``lr`` no step raises the energy."""
    x = start
    value, gradient = slope_at(objective, x)
    rate = torch.full_like(value, 1.0 if lr is None else lr)
    if lr is None:  # a first step of about a hundredth of a radian
        rate = 0.01 / gradient.norm(dim=2).amax(1).clamp(min=1e-12)
    for _ in range(steps):
        candidate = _turned(x, -rate.view(-1, 1, 1) * gradient, most, arcs)
        reached, slope = slope_at(objective, candidate)
        if lr is None:
            better = reached <= value
            rate = torch.where(better, 1.2 * rate, rate / 2)
            keep = better.view(-1, 1, 1)
            candidate, slope = torch.where(keep, candidate, x), torch.where(keep, slope, gradient)
            reached = torch.where(better, reached, value)
        x, value, gradient = candidate, reached, slope
        if path is not None:
            path.append(x)
    return x


@torch.no_grad()
def follow(
    slope: Callable[[int, Tensor], Tensor],
    start: Tensor,
    steps: int,
    lr: float | None,
    most: float,
    arcs: bool,
    path: list[Tensor] | None,
) -> Tensor:
    """Gradient descent on a function that changes from step to step.

    Without ``lr`` the point that moves most turns by about ``FIRST_TURN`` at first and ever less later, so that what is
    random in the gradients averages out.

    Args:
        slope: Gradient ``(r, n, d)`` at the number of the step and the points.
        start: ``(r, n, d)``.
        steps: Number of steps.
        lr: Fixed step size.
        most: Most that a point moves in a step, in radians.
        arcs: Along great circles.
        path: Where the points are after each step is added to it.
    """
    x, mean = start, torch.zeros_like(start[:, :1, :1])
    for step in range(steps):
        gradient = slope(step, x)
        mean = MEMORY * mean + (1 - MEMORY) * gradient.square().sum(2, keepdim=True).amax(1, keepdim=True)
        typical = (mean / (1 - MEMORY ** (step + 1))).sqrt()
        turn = FIRST_TURN * (1 - step / steps) / typical.clamp(min=1e-30)
        x = _turned(x, -(turn if lr is None else lr) * gradient, most, arcs)
        if path is not None:
            path.append(x)
    return x
