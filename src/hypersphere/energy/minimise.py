r"""Energy as a tool: points that minimise it, better starts for layers, and places for classes.

The problems of Thomson (s = 1), Whyte (s = 0) and Tammes (s infinite) and their relatives on spheres of any dimension,
many starts at a time.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere.energy.base import Regulariser, energies
from hypersphere.energy.chords import unit_vectors
from hypersphere.energy.compressive import START_RATE
from hypersphere.energy.descent import Objective, descend, finite, follow, lbfgs
from hypersphere.energy.mhe import hyperspherical_energy
from hypersphere.energy.shards import agreed, mesh_of, sharded_as
from hypersphere.energy.uniformity import MHS, nearest
from hypersphere.errors import ArgumentError, check_choice, check_count, check_flag, check_range
from hypersphere.geometry import angle, at_least_float32, full_precision, normalise, scales
from hypersphere.neurons import whole

METHODS = ("lbfgs", "projected", "riemannian")
AGREE = 1e-8
"""Starts whose energies differ by less than this part of it have found the same minimum."""
PASSING, SETTLED = 1e-6, 1e-9
"""Gain of a step, as a part of the value, at which a smooth form of a value with kinks has served; that of the last."""
PACKING_AGREE = 1e-5


@dataclass(frozen=True)
class Minimum:
    """What :func:`minimise` has found.

    Args:
        points: Unit vectors ``(n, d)`` of the best start.
        energy: Its energy: the sum over ordered pairs, for infinite s minus the smallest chord, or the value of the
            given regulariser at these points, ``regulariser.objective(points[None])``.
        agreeing: Number of starts that reached the same energy, up to 1e-8 of it (1e-5 for infinite s and for
            regularisers with kinks or projections).
        smallest_angle: Smallest angle between two points in radians, in half space between two lines.
        trajectory: Where the points were at the start and after each step, ``(steps + 1, n, d)``, if asked for.
        regulariser: A copy of the given one, with the projections under which the points have that energy.
    """

    points: Tensor
    energy: float
    agreeing: int
    smallest_angle: float
    trajectory: Tensor | None = None
    regulariser: Regulariser | None = None


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
        energy: Minimise this instead: a regulariser, with its own options, or the name of one, such as ``"koleo"``, of
            unit vectors, as for a hidden layer. One with kinks (the nearest neighbour, the worst place on the sphere)
            is approached through smooth forms, ``steps`` for each. One whose projections are drawn or move in training
            takes ``steps`` of falling size along its gradient, whatever the method, the projections drawn and moved
            before each as the member says; its energy is that under the last ones. It is copied: its own state stays as
            it is.
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
    check_flag("half_space", half_space)
    check_range("steps", steps, 0)
    check_range("restarts", restarts, 1)
    check_range("max_move", max_move, 0, open_low=True)
    if lr is not None:
        check_range("lr", lr, 0, open_low=True)
    start = _starts(points, restarts, generator, device)
    _check_space(s, half_space, angular, beta, energy)
    member = _member(s, half_space, energy)
    search = _Search(method, steps, lr, max_move, trajectory)
    members: list[Regulariser] = []
    with full_precision(start):
        if member is not None and member.moves:
            found, values, path, members = search.following(member, start)
        else:
            found, values, path = search.down(_objectives(member, s, half_space, angular, beta), start)
    best = int(values.argmin())
    least = values[best].item()
    agree = PACKING_AGREE if member is not None and (member.powers or member.moves) else AGREE
    return Minimum(
        found[best],
        least,
        int((values - least <= agree * max(abs(least), 1e-3)).sum()),
        _smallest_angle(found[best], half_space or bool(getattr(member, "half_space", False))),
        torch.stack([places[best] for places in path]) if trajectory else None,
        members[best] if members else member,
    )


@dataclass(frozen=True)
class _Search:
    """How :func:`minimise` moves its points, as its arguments say."""

    method: str
    steps: int
    lr: float | None
    most: float
    trajectory: bool

    def down(self, objectives: Sequence[Objective], start: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Points ``(r, n, d)`` where one function after the other is least, values ``(r,)`` of the last, the path."""
        found, places = start, [start]
        path = places if self.trajectory else None
        *forms, exact = objectives
        for number, objective in enumerate(forms or objectives, 1):
            if self.method == "lbfgs":
                gain = 0.0 if not forms else PASSING if number < len(forms) else SETTLED
                found = lbfgs(objective, found, self.steps, self.most, path, gain)
            else:
                found = descend(objective, found, self.steps, self.lr, self.most, self.method == "riemannian", path)
        values = finite(exact(found).detach())
        if forms:  # what is least of a smooth form might be worse than the start
            before = finite(exact(start).detach())
            found = torch.where((values <= before).view(-1, 1, 1), found, start)
            values = torch.minimum(values, before)
        return found, values, places

    def following(self, member: Regulariser, start: Tensor) -> tuple[Tensor, Tensor, list[Tensor], list[Regulariser]]:
        """The same of a member that draws, moves or learns, as in training; every start has one of its own."""
        members = [copy.deepcopy(member) for _ in start]
        paths = [[x] for x in start.split(1)]
        found = [self._follow(own, path) for own, path in zip(members, paths, strict=True)]
        values = [_of_directions(own)(x).detach() for own, x in zip(members, found, strict=True)]
        return torch.cat(found), finite(torch.cat(values)), [torch.cat(x) for x in zip(*paths, strict=True)], members

    def _follow(self, member: Regulariser, places: list[Tensor]) -> Tensor:
        """The points ``(1, n, d)`` after the last step from the one place."""
        (start,) = places
        member.train().prepare(start[0])
        learned, objective = list(member.parameters()), _of_directions(member)

        def slope(step: int, x: Tensor) -> Tensor:
            member.advance(step, 0, START_RATE)
            leaf = x.detach().requires_grad_()
            with torch.enable_grad():
                gradient, *others = torch.autograd.grad(objective(leaf).sum(), [leaf, *learned])
            for parameter, other in zip(learned, others, strict=True):
                parameter.sub_(START_RATE * other)
            return gradient

        path = places if self.trajectory else None
        found = follow(slope, start, self.steps, self.lr, self.most, self.method == "riemannian", path)
        member.eval()
        return found


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
        if not isinstance(points, Sequence) or len(points) != 2:
            raise ArgumentError("points", f"must be a tensor (n, d) or the two sizes n and d, got {points!r}")
        n, d = points
        check_count("points", n)
        check_count("points", d)
        given, dtype = torch.empty(0, n, d, dtype=torch.float64, device=device), torch.float64
    source = "cpu" if generator is None else generator.device
    drawn = torch.randn(restarts, *given.shape[1:], generator=generator, dtype=dtype, device=source).to(device)
    return unit_vectors(torch.cat([given, drawn]))


def _check_space(
    s: float, half_space: bool, angular: bool, beta: Tensor | None, energy: str | Regulariser | None
) -> None:
    """Refuse options of the Riesz energy that would say nothing of what is minimised in its place."""
    if energy is None:
        check_range("s", s, infinite=True)
        given, other = {"beta": s == math.inf and beta is not None}, "infinite s"
    else:
        given = {"s": s != 2, "half_space": half_space and not isinstance(energy, str)}
        given |= {"angular": angular, "beta": beta is not None}
        other = "energy=, whose own options count"
    for name in (name for name, is_given in given.items() if is_given):
        raise ArgumentError(name, f"must not be given with {other}")


def _member(s: float, half_space: bool, energy: str | Regulariser | None) -> Regulariser | None:
    """A regulariser to minimise, apart from any that somebody else holds; ``None`` for the Riesz energy."""
    if energy is None:
        return MHS(distance="chord", half_space=half_space).eval() if s == math.inf else None
    module: nn.Module | str = energy
    if isinstance(energy, str):
        module = energies.create(energy, **({"half_space": True} if half_space else {}))
    if not isinstance(module, Regulariser):
        raise ArgumentError("energy", f"must be a regulariser or its name, got {type(module).__name__}")
    return copy.deepcopy(module).eval()


def _objectives(
    member: Regulariser | None, s: float, half_space: bool, angular: bool, beta: Tensor | None
) -> list[Objective]:
    """What to minimise, one after the other; the last one is reported."""
    if member is None:
        return [
            lambda x: hyperspherical_energy(x, s, half_space=half_space, angular=angular, beta=beta, reduction="sum")
        ]
    return [_of_directions(member, power) for power in (*member.powers, math.inf)]


def _of_directions(member: Regulariser, power: float = math.inf) -> Objective:
    """What a member minimises, as a function that does not depend on the lengths of the vectors."""
    if member.counts_lengths:
        return lambda x: member.objective(normalise(x), power)
    return lambda x: member.objective(x, power)


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
    rows = at_least_float32(whole(weight.detach())).flatten(1)
    scale = scales(rows)
    found = minimise(rows, steps=steps, **options).points
    better = (found * ((rows * scale).norm(dim=1, keepdim=True) / scale)).view(weight.shape).to(weight.dtype)
    return sharded_as(agreed(better, mesh_of(weight)), weight)


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
