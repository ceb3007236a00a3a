"""What accuracy a user gets: every member of every family in float64, float32, bfloat16 and float16.

Values and gradients of all registered losses, layers, energies and maps, and of the functions of geometry, at
ordinary places and where digits are lost most easily: next to and opposite to the own class, at near and at opposite
pairs of neurons, at patches along a kernel, at unconstrained matrices far from the start. An error is relative to
float64 on the very numbers that were given (rounded to the type first): of a value the largest one, of a gradient
that of its worst row. In float64 itself, where there is nothing wider to compare with, it is the largest change under
rotations of everything, which changes nothing but the rounding.

    python benchmarks/precision.py --output docs/rows/precision.json
"""

from __future__ import annotations

import argparse
import copy
import datetime
import math
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from layers import command_line
from torch import Tensor, nn

import hypersphere as hs
from hypersphere.results import ResultRow, write_rows
from hypersphere.runs import code_version
from hypersphere.testing import contract
from hypersphere.testing.contract import options as member_options

TYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROTATIONS = 4
NEAR = 1e-3
"""Radians between what is near, and from what is opposite."""
SUMMARY = "At a glance: the member with the largest error"
Outcome = tuple[Tensor, list[Tensor]]
"""Values, and gradients whose rows are judged one by one."""


@dataclass(frozen=True)
class Place:
    """Something to compute at some inputs.

    Args:
        group: Heading of its table.
        what: Name of its row.
        inputs: In float64.
        compute: From inputs (leaves, of one type) to values, and to the tensors to take gradients by.
        turns: Whether a rotation of the last axis of all inputs changes nothing but rotates vectors along.
        judge: What is wrong with values by themselves; by default they are compared.
        weights: Type of all inputs but the first where that has 16 bit; ``None``: the same.
    """

    group: str
    what: str
    inputs: Sequence[Tensor]
    compute: Callable[[list[Tensor]], tuple[Tensor, list[Tensor]]]
    turns: bool = True
    judge: Callable[[Tensor], float] | None = None
    weights: torch.dtype | None = None


def unit(*shape: int, seed: int) -> Tensor:
    """Directions in float64."""
    return hs.geometry.normalise(draw(*shape, seed=seed))


def draw(*shape: int, seed: int) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rotation(d: int, seed: int) -> Tensor:
    """A rotation in float64."""
    return torch.linalg.qr(draw(d, d, seed=1000 + seed)).Q


def beside(directions: Tensor, angle: float, seed: int) -> Tensor:
    """Directions at an angle to others."""
    other = draw(*directions.shape, seed=seed)
    tangent = hs.geometry.normalise(other - (other * directions).sum(-1, keepdim=True) * directions)
    return math.cos(angle) * directions + math.sin(angle) * tangent


# ------------------------------------------------------------------------------------------------------- families


def geometry_places() -> Iterator[Place]:
    """Functions of two vectors."""
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "cosine": hs.geometry.cosine,
        "angle": hs.geometry.angle,
        "arccos of the cosine": lambda x, y: hs.geometry.arccos(hs.geometry.cosine(x, y)),
        "norm of the difference": lambda x, y: hs.geometry.norm(x - y),
    }
    x = 3 * unit(64, 128, seed=1)
    for title, y in {
        "ordinary": unit(64, 128, seed=2),
        f"{NEAR:g} rad apart": beside(x / 3, NEAR, 3),
        f"{NEAR:g} rad from opposite": beside(-x / 3, NEAR, 4),
    }.items():
        for name, function in functions.items():

            def compute(leaves: list[Tensor], function: Any = function) -> tuple[Tensor, list[Tensor]]:
                return function(*leaves), leaves

            yield Place(f"Geometry of two vectors, {title}", name, [x, y], compute)


def loss_places() -> Iterator[Place]:
    """Every loss of classes: features in 16 bit, class weights in at least float32."""
    losses, classes, dim = contract("losses"), 200, 64
    labels = torch.arange(32) // 2 * 6  # two samples of each class
    for name in losses.registry:
        if not losses.fact(name, "classes", True):
            continue
        given = {"s": 16.0, "reduction": "sum"} | member_options(losses, name)
        torch.manual_seed(0)
        known = {option.name for option in losses.entry(name).options}
        head = hs.losses.create(name, dim, classes, **{k: v for k, v in given.items() if k in known}).double()
        if head.subcentres > 1:
            with torch.no_grad():  # the sub-centre that counts is the first
                head.weight.view(classes, -1, dim)[:, 1:] *= -1
        centres = hs.geometry.normalise(head.weight.detach().view(classes, -1, dim)[labels, 0])
        for title, x in {
            "ordinary features": 4 * unit(32, dim, seed=5),
            f"features {NEAR:g} rad from their class": 4 * beside(centres, NEAR, 6),
            f"features {NEAR:g} rad from opposite to their class": 4 * beside(-centres, NEAR, 7),
        }.items():

            def compute(leaves: list[Tensor], head: Any = head) -> tuple[Tensor, list[Tensor]]:
                features, weight = leaves
                own = copy.deepcopy(head).to(weight.dtype)
                with torch.no_grad():
                    own.weight.copy_(weight)
                return own(features, labels), [features, own.weight]

            yield Place(f"Losses, {title}", name, [x, head.weight.detach()], compute, weights=torch.float32)


def layer_places() -> Iterator[Place]:
    """Every operator with the cosine, and every angular function with the sphere's magnitude, in linear layers."""
    operators, angulars = contract("operators"), contract("angular functions")
    pairs = [(name, "cosine") for name in operators.registry]
    pairs += [("sphere", name) for name in angulars.registry if name != "cosine"]
    w = unit(48, 96, seed=8)
    for operator, angular in pairs:
        for title, x in {
            "ordinary patches": draw(32, 96, seed=9),
            f"patches {NEAR:g} rad from a kernel": 9 * beside(w[:32], NEAR, 10),
            f"patches {NEAR:g} rad from opposite to a kernel": 9 * beside(-w[:32], NEAR, 11),
        }.items():

            def compute(
                leaves: list[Tensor], operator: str = operator, angular: str = angular
            ) -> tuple[Tensor, list[Tensor]]:
                patches, weight = leaves
                layer: Any = hs.nn.create(operator, "linear", angular=angular)(96, 48, bias=False).to(weight.dtype)
                with torch.no_grad():
                    layer.weight.copy_(weight)
                return layer.eval()(patches), [patches, layer.weight]

            yield Place(f"Linear layers, {title}", f"{operator}, {angular}", [x, w], compute)


def energy_places() -> Iterator[Place]:
    """Every energy and other regulariser of one matrix."""
    energies = contract("energies")
    w = 2 * unit(48, 32, seed=12)
    near, opposite = w.clone(), w.clone()
    near[1], opposite[1] = 2 * beside(w[0] / 2, NEAR, 13), 2 * beside(-w[0] / 2, NEAR, 14)
    for name in energies.registry:
        for title, vectors in {
            "ordinary neurons": w,
            f"two neurons {NEAR:g} rad apart": near,
            f"two neurons {NEAR:g} rad from opposite": opposite,
        }.items():
            torch.manual_seed(0)
            energy = hs.energy.create(name, **member_options(energies, name))
            energy.eval().prepare(vectors.float())

            def compute(leaves: list[Tensor], energy: nn.Module = energy) -> tuple[Tensor, list[Tensor]]:
                (vectors,) = leaves
                wide = vectors.dtype if vectors.dtype == torch.float64 else torch.float32
                torch.manual_seed(0)
                return copy.deepcopy(energy).to(wide)(vectors), leaves

            turns = bool(energies.fact(name, "rotation", True))
            yield Place(f"Energies and other regularisers, {title}", name, [vectors], compute, turns)


def map_places() -> Iterator[Place]:
    """Every orthogonal map; the value is how far from orthogonal it is."""
    registered = contract("orthogonal maps")
    for name in registered.registry:
        variants: list[dict[str, Any]] = [{}, *registered.fact(name, "variants", ())]
        for options in variants:
            member = hs.orthogonal.create(name, **options)
            if not member.exact:
                continue
            method = " ".join(str(value) for value in options.values())
            for title, size in {"near the start": 0.02, "far from the start": 1.0}.items():
                P = member.start(96, dtype=torch.float64) + size * draw(96, 96, seed=15)

                def compute(leaves: list[Tensor], member: Any = member) -> tuple[Tensor, list[Tensor]]:
                    return member(leaves[0]), leaves

                judge = lambda R: float(hs.orthogonal.orthogonality_error(R.double()))  # noqa: E731
                yield Place(f"Orthogonal maps, {title}", f"{name} {method}".rstrip(), [P], compute, False, judge)


# ------------------------------------------------------------------------------------------------------ measurement


def outcome(place: Place, inputs: Sequence[Tensor]) -> Outcome:
    """Values and gradients at inputs as they are; values that are many are weighted by fixed numbers."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    values, by = place.compute(leaves)
    by = [x for x in by if x.requires_grad]
    wanted = draw(*values.shape, seed=16).to(values.dtype) if values.dim() else torch.ones_like(values)
    if place.group.startswith("Geometry"):
        wanted = torch.ones_like(values)
    grads = torch.autograd.grad(values, by, wanted, allow_unused=True) if values.requires_grad else ()
    return values.detach(), [torch.zeros_like(b) if g is None else g for g, b in zip(grads, by, strict=False)]


def errors(place: Place, dtype: torch.dtype) -> tuple[float | None, float | None]:
    """Error of the values, and of the gradient in its worst row, of one type."""
    weights = place.weights if place.weights is not None and dtype.itemsize == 2 else dtype
    inputs = [x.to(weights if index else dtype) for index, x in enumerate(place.inputs)]
    found = outcome(place, inputs)
    own = None if place.judge is None else place.judge(found[0])
    if dtype != torch.float64:
        value, gradient = relative(found, outcome(place, [x.double() for x in inputs]))
        return value if own is None else own, gradient
    if not place.turns:
        return own, None
    pairs = []
    for seed in range(ROTATIONS):
        Q = rotation(inputs[0].shape[-1], seed)
        values, grads = outcome(place, [x @ Q for x in inputs])
        pairs.append(relative((values, [g @ Q.mT for g in grads]), found))
    return max(value for value, _ in pairs), max(gradient for _, gradient in pairs)


def relative(found: Outcome, wanted: Outcome) -> tuple[float, float]:
    """Error of the values relative to the largest, and of the gradient's worst row relative to that row."""
    (a, da), (b, db) = found, wanted
    value = float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-300))
    rows = [0.0]
    for x, y in ((x.double(), y.double()) for x, y in zip(da, db, strict=True)):
        length = y.norm(dim=-1)
        counted = length > 1e-3 * length.max()  # the rest would be zero but for rounding
        rows += ((x - y).norm(dim=-1)[counted] / length[counted]).tolist()
    return value, max(rows)


def rows_of(places: Sequence[Place], command: str, show: Callable[[str], None]) -> list[ResultRow]:
    """All errors as rows, those of the worst member of each table first."""
    worst: dict[tuple[str, str], float] = {}
    cells: list[tuple[str, str, str, float]] = []
    for place in places:
        line = [f"{place.group}: {place.what}".ljust(100)]
        for name, dtype in TYPES.items():
            for metric, error in zip((name, f"{name} gradient"), errors(place, dtype), strict=True):
                line.append(f"{error:8.1e}" if error is not None else " " * 8)
                if error is None:
                    continue
                cells.append((place.group, place.what, metric, error))
                known = worst.get((place.group, metric), 0.0)
                worst[place.group, metric] = max(known, error) if not math.isnan(error) else error
        show(" ".join(line))
    notes = {place.group: NOTE + (MAPS if place.judge else "") + (WEIGHTS if place.weights else "") for place in places}
    summary = [(SUMMARY, group, metric, error) for (group, metric), error in worst.items()]
    return [
        ResultRow(
            kind="precision",
            group=group,
            what=what,
            metric=metric,
            unit="",
            mean=error,
            interval=None,
            seeds=(0,),
            command=command,
            version=code_version(),
            hardware=f"{platform.machine()} CPU, torch {torch.__version__}",
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            note=notes.get(group, NOTE),
        )
        for group, what, metric, error in [*summary, *cells]
    ]


NOTE = (
    "relative to float64 on the same numbers, of a gradient in its worst row; fp64: largest change under "
    f"{ROTATIONS} rotations of everything, empty where rotations change more than the rounding"
)
MAPS = "; values: largest entry of R^T R - I"
WEIGHTS = "; 16 bit: of the features, with class weights in float32"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write rows where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="words of which a table's heading must contain one")
    parser.add_argument("--output", "--rows", type=Path, help="JSON file for docs/rows")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    families = (geometry_places, loss_places, layer_places, energy_places, map_places)
    places = [place for family in families for place in family()]
    order = list(dict.fromkeys(place.group for place in places))
    places.sort(key=lambda place: order.index(place.group))
    if options.only:
        places = [p for p in places if any(word.lower() in p.group.lower() for word in options.only)]
    command = command_line(sys.argv[1:] if arguments is None else arguments, "precision")
    rows = rows_of(places, command, print)
    if options.output:
        write_rows(options.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
