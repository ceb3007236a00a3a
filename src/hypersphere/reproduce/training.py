"""From the cells of a table to trainings: one for each recipe and seed, however many cells show a number of it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypersphere import recipe as recipes
from hypersphere.errors import check_choice
from hypersphere.recipe import Recipe, RecipeError
from hypersphere.registry import did_you_mean
from hypersphere.reproduce.table import Changes, Scale, Search, Table, TableError, matches

SCALES: Mapping[str, Scale] = {
    "smoke": Scale(share=None),
    "small": Scale(share=0.1),
    "paper": Scale(share=1.0),
}
"""What a scale is where a table says nothing else: ``smoke`` only runs through, on stand-ins for the data."""

SMOKE: Changes = (
    *("train.steps=2", "data.batch_size=4", "train.precision=fp32", "train.compile=false", "train.channels_last=false"),
    *("evaluate.every=0", "evaluate.batch_size=16", "evaluate.recalibrate=0"),
    *("data.workers=0", "schedule.warmup=0", "train.log_every=2", "train.checkpoint_every=2"),
)
"""What a recipe becomes to be run through in a second on two cores; its result means nothing."""

LONGEST = 20_000
"""Most steps between two checkpoints, which are what a kill can cost."""

POINTS = 20
"""Evaluations along a training, which are the points of its curve."""


@dataclass(frozen=True)
class Place:
    """A cell of a table, at a scale, under a preset."""

    table: str
    preset: str
    scale: str
    cell: str


@dataclass
class Training:
    """A recipe with a seed, and the cells that show a number of it.

    Args:
        recipe: What is trained.
        command: Arguments of ``hypersphere train`` that do the same.
        places: The cells.
        minutes: What it may take on one H200.
    """

    recipe: Recipe
    command: tuple[str, ...]
    places: list[Place] = field(default_factory=list)
    minutes: float = 0.0

    @property
    def key(self) -> str:
        """Name of its folder."""
        return f"{self.recipe.name}-{self.recipe.hash}"


def preset_of(table: Table, preset: str | None) -> str:
    """A preset of a table; ``None`` is its first one."""
    if preset is None:
        return next(iter(table.presets))
    check_choice("preset", preset, tuple(table.presets))
    return preset


def scale_of(table: Table, scale: str) -> Scale:
    """What a scale means for a table: its own words, and for what it does not say those of all tables."""
    check_choice("scale", scale, tuple(SCALES))
    own, usual = table.scales.get(scale, Scale()), SCALES[scale]  # type: ignore[call-overload]
    return Scale(share=own.share or usual.share, set=(*usual.set, *own.set))


def cell_recipe(
    table: Table, cell: str, preset: str, scale: str, seed: int = 0, also: Changes = ()
) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe of a cell, and the arguments of ``hypersphere train`` that give it.

    Seeds are all that two trainings of a cell differ in: recipes are read once and not for each.

    Args:
        table: The table.
        cell: ``row/column``.
        preset: Whose constants.
        scale: How long.
        seed: Of the run.
        also: Changes after all others.

    Raises:
        TableError: A change of the table does not fit its recipe.
    """
    plan, command = _unseeded(table.model_dump_json(), cell, preset, scale, also)
    return plan.model_copy(update={"seed": seed}), (*command, f"seed={seed}")


@functools.lru_cache(maxsize=4096)
def _unseeded(declared: str, cell: str, preset: str, scale: str, also: Changes) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe and command of a cell, but for the seed; by the whole declaration, which may be a changed file."""
    table = Table.model_validate_json(declared)
    name, changes = table.changes(cell, preset)
    meant = scale_of(table, scale)
    try:
        whole = recipes.load(name, changes)
        changes = (*changes, *_scaled(whole, scale, meant), *meant.set, *also)
        return recipes.load(name, [*changes, f"name={table.id}"]), (name, *changes)
    except RecipeError as error:
        raise TableError(f"{table.id}, {cell}, preset {preset}, scale {scale}: {error}") from error


def _scaled(whole: Recipe, scale: str, meant: Scale) -> Changes:
    """Changes that bring a recipe to a scale: its steps, and whatever is counted in steps or happens at some."""
    if scale == "smoke":
        return SMOKE + _without_milestones(whole)
    share = meant.share or 1.0
    steps = max(1, round(whole.train.steps * share))
    every = max(1, steps // POINTS)
    found = [f"evaluate.every={every}", f"train.checkpoint_every={max(min(steps // 4, LONGEST), min(every, LONGEST))}"]
    if steps == whole.train.steps:
        # Half precision is for GPUs, where hours are saved by the minute that compilation takes.
        return (*found, *(() if whole.train.precision == "fp32" else ("train.compile=true",)))
    found += [f"train.steps={steps}", f"train.log_every={max(1, min(whole.train.log_every, steps // 10))}"]
    if (
        whole.schedule.warmup > steps // 10
    ):  # else it stays as it is: what it cures does not take longer in a longer run
        found.append(f"schedule.warmup={max(1, steps // 10)}")
    if whole.schedule.milestones:
        found.append(f"schedule.milestones={_shrunk(whole.schedule.milestones, share)}")
    for index, part in enumerate(whole.regularisers):  # type: ignore[attr-defined]
        if part.schedule is not None and part.schedule.milestones:
            found.append(f"regularisers.{index}.schedule.milestones={_shrunk(part.schedule.milestones, share)}")
    annealer = whole.loss.options.get("annealer")
    if isinstance(annealer, Mapping) and "gamma" in annealer:
        found.append(f"loss.annealer.gamma={annealer['gamma'] / share!r}")
    orthogonal = getattr(whole, "orthogonal", None)
    if orthogonal is not None and orthogonal.every:
        found.append(f"orthogonal.every={max(1, round(orthogonal.every * share))}")
    batch_norm = getattr(whole, "batch_norm", None)
    if batch_norm is not None:
        found.append(f"batch_norm.every={max(1, round(batch_norm.every * share))}")
    return tuple(found)


def _shrunk(milestones: Iterable[int], share: float) -> list[int]:
    return sorted({max(1, round(step * share)) for step in milestones})


def _without_milestones(whole: Recipe) -> Changes:
    """A schedule without steps that a run of two never reaches."""
    found = ["schedule.name=constant", "schedule.milestones=[]"]
    for index, part in enumerate(whole.regularisers):  # type: ignore[attr-defined]
        if part.schedule is not None:
            found.append(f"regularisers.{index}.schedule=null")
    return tuple(found)


def trainings(
    table: Table,
    scale: str = "small",
    *,
    preset: str | None = None,
    cells: Sequence[str] = (),
    seeds: Iterable[int] = range(3),
) -> list[Training]:
    """The trainings of a table, seed by seed, each with the cells that show a number of it.

    Args:
        table: The table.
        scale: ``"smoke"``, ``"small"`` or ``"paper"``.
        preset: Whose constants; by default the table's first.
        cells: Patterns of cells: ``row``, ``row/column``, ``*/column``; by default all.
        seeds: Seeds of the runs.

    Example:
        >>> from hypersphere.reproduce import find
        >>> [one.places[0].cell for one in trainings(find("thesis-2.2"), cells=["l-softmax-*"], seeds=[0])]
        ['l-softmax-2/error', 'l-softmax-3/error', 'l-softmax-4/error']
    """
    preset = preset_of(table, preset)
    chosen = chosen_cells(table, preset, cells)
    found: dict[str, Training] = {}
    for seed in seeds:
        for cell in chosen:
            plan, command = cell_recipe(table, cell, preset, scale, seed)
            one = found.setdefault(plan.hash, Training(plan, command))
            one.places.append(Place(table.id, preset, scale, cell))
    minutes = minutes_of(table, preset, scale)
    for one in found.values():
        one.minutes = minutes
    return list(found.values())


def chosen_cells(table: Table, preset: str, patterns: Sequence[str]) -> list[str]:
    """The cells that fit one of the patterns and can be trained."""
    runnable = table.runnable(preset)
    if not patterns:
        return runnable
    for pattern in patterns:
        fitting = [cell for cell in table.names() if matches(cell, pattern)]
        if not fitting:
            hint = did_you_mean(pattern, [*table.rows, *table.names()])
            raise TableError(f"{table.id} has no cell {pattern!r}.{hint} `--list` shows all: {_few(table)}")
        if not any(cell in runnable for cell in fitting):
            why = table.why_not(fitting[0]) or f"not one of the preset {preset!r}"
            raise TableError(f"{table.id}: nothing can be trained for {pattern!r}: {why}")
    return [cell for cell in runnable if any(matches(cell, pattern) for pattern in patterns)]


def _few(table: Table) -> str:
    """The first cells of a table."""
    names = list(table.names())
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def minutes_of(table: Table, preset: str, scale: str) -> float:
    """What one training of a table may take on one H200, as the table says of all of them together."""
    share = scale_of(table, scale).share
    count = max(1, len(table.runnable(preset)))
    return table.needs.minutes / count * (share if share is not None and scale != "smoke" else 1e-3)


def search_trainings(table: Table, search: Search, seeds: Iterable[int] = range(1)) -> list[tuple[Any, Training]]:
    """The trainings of a search, each with the value that it tries."""
    preset = preset_of(table, search.preset or None)
    found = []
    for seed in seeds:
        for value in search.values:
            for cell in chosen_cells(table, preset, search.cells):
                also = (f"{search.key}={value}", *(change.replace("{value}", str(value)) for change in search.also))
                plan, command = cell_recipe(table, cell, preset, search.scale, seed, (*also, *search.set))
                place = Place(table.id, f"search {search.key}={value}", search.scale, cell)
                found.append((value, Training(plan, command, [place], minutes_of(table, preset, search.scale))))
    return found
