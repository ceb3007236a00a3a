r"""Energy as a tool: points that minimise it, better starts for layers, and places for classes.

The problems of Thomson (s = 1), Whyte (s = 0) and Tammes (s infinite) and their relatives on spheres of any dimension,
many starts at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hypersphere.energy.base import Regulariser, energies
from hypersphere.energy.mhe import hyperspherical_energy
from hypersphere.energy.uniformity import nearest
from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.geometry import angle, at_least_float32, full_precision, normalise

METHODS = ("lbfgs", "projected", "riemannian")
AGREE = 1e-8
"""Starts whose energies differ by less than this part of it have found the same minimum."""
PACKING = tuple(4.0**k for k in range(3, 11))
"""Powers through which the best packing is approached; from lower ones all starts fall into the same minimum."""
PACKING_AGREE = 1e-5
HISTORY = 12

Objective = Callable[[Tensor], Tensor]
"""Energies ``(r,)`` of sets of points ``(r, n, d)``."""


@dataclass(frozen=True)
class Minimum:
    """What :func:`minimise` has found.

    Args:
        points: Unit vectors ``(n, d)`` of the best start.
        energy: Its energy: the sum over ordered pairs, the value of the given regulariser, or for infinite s minus the
            smallest chord.
        agreeing: Number of starts that reached the same energy, up to 1e-8 of it (1e-5 for infinite s).
        smallest_angle: Smallest angle between two points in radians, in half space between two lines.
        trajectory: Where the points were at the start and after each step, ``(steps + 1, n, d)``, if asked for.
    """

    points: Tensor
    energy: float
    agreeing: int
    smallest_angle: float
    trajectory: Tensor | None = None


def minimise(
    points: Tensor | tuple[int, int],
    s: float = 2.0,
    *,
    half_space: bool = False,
    angular: bool = False,
    beta: Tensor | None = None,
    energy: str | Regulariser | None = None,
    method: str = "lbfgs",
    steps: int = 500,
    lr: float | None = None,
    restarts: int = 1,
    max_move: float = 0.2,
    trajectory: bool = False,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Minimum:
    r"""Move points on the unit sphere until their energy is least.

    All starts move at once, each by itself. ``"lbfgs"`` takes curvature into account and is what finds a minimum to all
    digits. ``"projected"`` (a step along the gradient, then back to the sphere) and ``"riemannian"`` (a step along the
    great circle) follow the gradient; without ``lr`` their step grows while the energy falls and halves where it does
    not, so that the energy never rises.

    Args:
        points: Start ``(n, d)``, or the sizes n and d for random starts in float64. Zero vectors stay where they are.
        s: Riesz exponent; 0 is the logarithmic energy, infinity the best packing (largest smallest distance), which is
            approached through growing powers, ``steps`` for each of them.
        half_space: Count the mirror image of every point as a point: lines, not points, repel each other.
        angular: Take angles as distances, not chords.
        beta: Lengths ``(n,)`` of the vectors in place of 1; longer ones move less.
        energy: Minimise this instead: a regulariser or its name, such as ``"koleo"``.
        method: ``"lbfgs"``, ``"projected"`` or ``"riemannian"``.
        steps: Most steps; it ends earlier where nothing moves any more.
        lr: Fixed step size of the gradient methods, by the gradient of the energy.
        restarts: Number of starts; all but the first one are random where ``points`` is a start.
        max_move: Most that a point moves in a step, in radians; a nearly doubled point would be thrown far.
        trajectory: Keep where the points were after each step.
        generator: Source of randomness.
        device: Where to create random starts.

    Example:
        >>> found = minimise((12, 3), s=1, restarts=4, generator=torch.Generator().manual_seed(0))
        >>> f"{found.energy:.6f}", f"{math.degrees(found.smallest_angle):.4f}"  # the icosahedron
        ('98.330506', '63.4349')
    """
    check_choice("method", method, METHODS)
    check_range("steps", steps, 0)
    check_range("restarts", restarts, 1)
    check_range("max_move", max_move, 0, open_low=True)
    if lr is not None:
        check_range("lr", lr, 0, open_low=True)
    start = _starts(points, restarts, generator, device)
    objectives = _objectives(start, s, half_space, angular, beta, energy)
    found, path = start, [start] if trajectory else None
    with full_precision(start):
        for objective in objectives:
            if method == "lbfgs":
                found = _lbfgs(objective, found, steps, max_move, path)
            else:
                found = _descend(objective, found, steps, lr, max_move, method == "riemannian", path)
        values = _finite(objectives[-1](found))
    best = int(values.argmin())
    least = values[best].item()
    final = found[best]
    return Minimum(
        final,
        least,
        int((values - least <= (PACKING_AGREE if s == math.inf else AGREE) * max(abs(least), 1e-3)).sum()),
        _smallest_angle(final, half_space),
        None if path is None else torch.stack([step[best] for step in path]),
    )


def _starts(
    points: Tensor | tuple[int, int],
    restarts: int,
    generator: torch.Generator | None,
    device: torch.device | str | None,
) -> Tensor:
    """Unit vectors ``(restarts, n, d)``."""
    if isinstance(points, Tensor):
        if points.dim() != 2:
            raise ArgumentError("points", f"must have shape (n, d), got {tuple(points.shape)}")
        given = at_least_float32(points.detach()).unsqueeze(0)
        restarts, dtype, device = restarts - 1, given.dtype, given.device
    else:
        n, d = points
        check_range("points", n, 1)
        check_range("points", d, 1)
        given, dtype = torch.empty(0, n, d, dtype=torch.float64, device=device), torch.float64
    source = "cpu" if generator is None else generator.device
    drawn = torch.randn(restarts, *given.shape[1:], generator=generator, dtype=dtype, device=source).to(device)
    return normalise(torch.cat([given, drawn]))


def _objectives(
    start: Tensor, s: float, half_space: bool, angular: bool, beta: Tensor | None, energy: str | Regulariser | None
) -> list[Objective]:
    """What to minimise, one after the other; the last one is reported."""
    if energy is not None:
        module = (
            energies.create(energy, **({"half_space": True} if half_space else {}))
            if isinstance(energy, str)
            else energy
        )
        if not isinstance(module, Regulariser):
            raise ArgumentError("energy", f"must be a regulariser or its name, got {type(module).__name__}")
        return [module.energy]
    if s == math.inf:
        if beta is not None:
            raise ArgumentError("beta", "must be None for infinite s")
        return [lambda x, p=p: _packing(x, p, half_space) for p in (*PACKING, math.inf)]  # type: ignore[misc]
    check_range("s", s, infinite=True)
    return [lambda x: hyperspherical_energy(x, s, half_space=half_space, angular=angular, beta=beta, reduction="sum")]


def _packing(x: Tensor, power: float, half_space: bool) -> Tensor:
    r"""Soft form of minus the smallest chord, :math:`\frac1p \log \sum \rho^{-p}`; all pairs at once."""
    units = normalise(x)
    q = 2 - 2 * units @ units.mT
    if half_space:
        q = torch.minimum(q, 4 - q)
    pairs = (units != 0).any(2)
    pairs = (pairs.unsqueeze(1) & pairs.unsqueeze(2)).tril(-1)
    logs = torch.where(pairs, -0.5 * torch.where(pairs, q, 1.0).clamp(min=1e-30).log(), -math.inf).flatten(1)
    if power == math.inf:
        return -(-logs.amax(1)).exp()
    return (power * logs).logsumexp(1) / power


def _finite(values: Tensor) -> Tensor:
    return torch.where(values.isfinite(), values, math.inf)


def _slope(objective: Objective, x: Tensor) -> tuple[Tensor, Tensor]:
    """Energies ``(r,)`` and gradient ``(r, n, d)``."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        values = objective(x)
        (gradient,) = torch.autograd.grad(values.sum(), x)
    return _finite(values.detach()), gradient


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((1, 2), keepdim=True)


def _shortened(move: Tensor, x: Tensor, most: float) -> Tensor:
    """The move ``(r, n, d)`` of each start as a whole, scaled so that no point rotates by more than ``most``."""
    turn = (move.norm(dim=2) / x.norm(dim=2).clamp(min=torch.finfo(x.dtype).tiny)).amax(1)
    return move * (most / turn.clamp(min=most)).view(-1, 1, 1)


@torch.no_grad()
def _lbfgs(objective: Objective, start: Tensor, steps: int, most: float, path: list[Tensor] | None) -> Tensor:
    """L-BFGS of every start by itself, with backtracking.

    An energy does not depend on the lengths of the vectors, so that these are free: no constraint is left.
    """
    x = start.clone()
    value, gradient = _slope(objective, x)
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
            reached = _finite(objective(candidate))
            enough = done | (reached <= value + 1e-4 * length * downhill + small * value.abs())
            if bool(enough.all()):
                break
            length = torch.where(enough, length, length / 2)
        moved = (enough & (reached <= value)).view(-1, 1, 1)
        candidate = torch.where(moved, candidate, x)
        new_value, new_gradient = _slope(objective, candidate)
        moves.append(candidate - x)
        turns.append(new_gradient - gradient)
        del moves[:-HISTORY], turns[:-HISTORY]
        gained = bool((value - new_value > small * (value.abs() + 1e-3)).any())
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


@torch.no_grad()
def _descend(
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
    value, gradient = _slope(objective, x)
    rate = torch.full_like(value, 1.0 if lr is None else lr)
    if lr is None:  # a first step of about a hundredth of a radian
        rate = 0.01 / gradient.norm(dim=2).amax(1).clamp(min=1e-12)
    for _ in range(steps):
        move = -rate.view(-1, 1, 1) * gradient
        length = move.norm(dim=2, keepdim=True)
        capped = length.clamp(max=most)
        move = move * (capped / length.clamp(min=torch.finfo(x.dtype).tiny))
        candidate = (
            normalise(x * capped.cos() + move * (capped.sin() / capped.clamp(min=1e-30)))
            if arcs
            else normalise(x + move)
        )
        reached, slope = _slope(objective, candidate)
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


def _smallest_angle(points: Tensor, half_space: bool) -> float:
    """Smallest angle between two of the points ``(n, d)``, or of the lines through them; NaN if there are no two."""
    index, sign, counted = (found[0] for found in nearest(points.unsqueeze(0), half_space))
    angles = angle(points, points[index] * sign.unsqueeze(1))[counted]
    return angles.min().item() if angles.numel() else math.nan


def refine(weight: Tensor, steps: int = 100, **options: Any) -> Tensor:
    r"""A better start for a layer: the same norms, with directions moved towards the minimum of an energy.

    Args:
        weight: Neurons along the first axis, ``(n, ...)``; left as it is. Zero neurons stay zero.
        steps: Most steps.
        **options: Those of :func:`minimise`.

    Returns:
        Same shape and type.

    Example:
        >>> layer = torch.nn.Linear(3, 4)
        >>> better = refine(layer.weight)
        >>> torch.allclose(better.norm(dim=1), layer.weight.norm(dim=1))
        True
    """
    rows = at_least_float32(weight.detach()).flatten(1)
    found = minimise(rows, steps=steps, **options).points
    return (found * rows.norm(dim=1, keepdim=True)).view(weight.shape).to(weight.dtype)


def prototypes(
    classes: int,
    dim: int,
    *,
    s: float = 2.0,
    steps: int = 300,
    restarts: int = 1,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    r"""Places for classes, as far apart as they can be: hyperspherical prototypes.

    Up to dim + 1 classes get the corners of a simplex and 2 dim classes those of a cross-polytope, which are optimal
    for every s and cost nothing. Other numbers are optimised; with ``generator=None`` always from the same start.

    Args:
        classes: Number of classes C.
        dim: Dimension D; at least 2 for more than two classes.
        s: Riesz exponent of the energy that is minimised.
        steps: Most steps.
        restarts: Number of random starts.
        generator: Source of randomness.
        device: Where to create them.
        dtype: Floating-point type.

    Returns:
        Unit vectors ``(C, D)``.

    Example:
        >>> points = prototypes(4, 3)
        >>> (points @ points.T)[0]
        tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
    """
    check_range("classes", classes, 1)
    check_range("dim", dim, 1 if classes <= 2 else 2)
    if classes <= dim + 1:
        return _simplex(classes, dim).to(device=device, dtype=dtype)
    if classes == 2 * dim:
        eye = torch.eye(dim, dtype=dtype, device=device)
        return torch.cat([eye, -eye])
    generator = generator or torch.Generator().manual_seed(0)
    return minimise((classes, dim), s, steps=steps, restarts=restarts, generator=generator, device=device).points.to(
        dtype
    )


def _simplex(count: int, dim: int) -> Tensor:
    """Corners of a regular simplex in its first ``count - 1`` coordinates: unit vectors ``(count, dim)``."""
    points = torch.zeros(count, dim, dtype=torch.float64)
    corners = count - 1
    if not corners:
        points[0, 0] = 1
        return points
    # The unit vectors, and the point on their axis that is as far from each of them as they are from each other.
    points[:corners, :corners] = torch.eye(corners, dtype=torch.float64)
    points[corners, :corners] = (1 - math.sqrt(count)) / corners
    return normalise(points - points.mean(0))
