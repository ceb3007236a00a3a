"""From the content of a recipe to one that is complete and free of contradictions."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

import pydantic

from hypersphere.attacks import Attack, attacks
from hypersphere.data import datasets
from hypersphere.energy import energies
from hypersphere.errors import ArgumentError
from hypersphere.evaluate import evaluations
from hypersphere.losses import losses
from hypersphere.models import models
from hypersphere.nn import operators
from hypersphere.orthogonal import maps
from hypersphere.recipe.explain import Location, RecipeError, describe, explain
from hypersphere.recipe.schema import Orthogonal, Part, Recipe, Schedule, options_model
from hypersphere.registry import Registry, UnknownNameError

_REQUIRED: dict[str, Registry[Any]] = {"data": datasets, "model": models, "loss": losses}


_OPTIONAL: dict[str, Registry[Any]] = {"convert": operators, "orthogonal": maps, "adversary": attacks}
"""Parts by name that every recipe has, and those that it may lack."""


def check(content: Mapping[str, Any], places: Mapping[Location, str] | None = None) -> Recipe:
    """Validate the content of a recipe and fill in every default.

    Args:
        content: The recipe as nested dictionaries.
        places: Where each key came from, for messages.

    Raises:
        RecipeError: With one line a mistake.
    """
    places = dict(places or {})
    try:
        recipe = Recipe.model_validate(content)
    except pydantic.ValidationError as error:
        raise RecipeError("\n".join(explain(error, Recipe, content, places))) from None
    mistakes: list[str] = []
    updates: dict[str, Any] = {}
    for key, registry in (_REQUIRED | _OPTIONAL).items():
        if (part := getattr(recipe, key)) is not None:
            updates[key] = _resolve(part, registry, (key,), places, mistakes)
    updates["regularisers"] = tuple(
        _resolve(part, energies, ("regularisers", index), places, mistakes)
        for index, part in enumerate(recipe.regularisers)
    )
    metrics = tuple(
        _resolve(Part(name=given) if isinstance(given, str) else given, evaluations, place, places, mistakes)
        for index, given in enumerate(recipe.evaluate.metrics)
        for place in [("evaluate", "metrics", index)]
    )
    updates["evaluate"] = recipe.evaluate.model_copy(
        update={"metrics": tuple(part if part.options else part.name for part in metrics)}
    )
    recipe = recipe.model_copy(update=updates)
    mistakes += _contradictions(recipe, places)
    if mistakes:
        raise RecipeError("\n".join(mistakes))
    recipe._places = places
    # Heads, energies and operators are cheap to build: ranges are checked now, not after the data has been loaded.
    # A list holds one number for each class; the data will tell whether there are as many.
    classes = next((len(value) for value in recipe.loss.options.values() if isinstance(value, list)), 2)
    recipe.build(losses, ("loss",), 2, max(classes, 1))
    for index in range(len(recipe.regularisers)):
        recipe.build(energies, ("regularisers", index))
    for key, registry in _OPTIONAL.items():
        if getattr(recipe, key) is not None:
            recipe.build(registry, (key,))
    return recipe


def _contradictions(recipe: Recipe, places: Mapping[Location, str]) -> list[str]:
    """Mistakes that take two values to see."""
    found = _schedule_mistakes(recipe.schedule, ("schedule",), recipe.train.steps, places)
    for index, part in enumerate(recipe.regularisers):
        place: Location = ("regularisers", index)
        if part.schedule is not None:
            found += _schedule_mistakes(part.schedule, (*place, "schedule"), recipe.train.steps, places)
        if part.target == "head" and part.options.get("half_space"):
            message = "must be false for the target 'head': an output layer is full space (use target all or model)"
            found.append(describe(places, (*place, "half_space"), message))
    if recipe.optimiser.nesterov and not recipe.optimiser.momentum:
        found.append(describe(places, ("optimiser", "nesterov"), "needs optimiser.momentum above 0"))
    if recipe.loss.options.get("reduction") == "none":
        message = "must be 'mean' or 'sum' for training, which needs one number, got 'none'"
        found.append(describe(places, ("loss", "reduction"), message))
    if recipe.loss.options.get("sparse"):
        message = "must be false: the trainer's optimisers take dense gradients (hypersphere.optim.RowSGD takes both)"
        found.append(describe(places, ("loss", "sparse"), message))
    weighting = "none" if recipe.convert is None else recipe.convert.options.get("weighting", "none")
    if recipe.project.every and weighting != "none":
        message = f"must be 0 with convert.weighting = {weighting!r}, where the norm of the kernels counts"
        found.append(describe(places, ("project", "every"), message))
    adversary = recipe.adversary
    if adversary is not None and adversary.name in attacks and not _attack(adversary.name).in_step:
        message = f"must be an attack of this library's own for training, got {adversary.name!r}"
        found.append(describe(places, ("adversary", "name"), message))
    if recipe.orthogonal is not None:
        found += _orthogonal_mistakes(recipe.orthogonal, recipe.train.ema, places)
    return found


def _attack(name: str) -> type[Attack]:
    """The class of an attack."""
    return typing.cast(type[Attack], attacks[name].factory)


def _orthogonal_mistakes(turned: Orthogonal, ema: float | None, places: Mapping[Location, str]) -> list[str]:
    """What does not go together in orthogonal training."""
    found = []
    if bool(turned.every) != (turned.sample is not None):
        message = "must be 0 without orthogonal.sample: there is nothing to draw"
        if not turned.every:
            message = "must be given with orthogonal.sample: the steps between two draws, such as 100"
        found.append(describe(places, ("orthogonal", "every"), message))
    direct = turned.name in maps and getattr(maps[turned.name].factory, "direct", False)
    if direct and ema is not None:
        message = "must not be given with orthogonal.name = 'direct': means of orthogonal matrices are not orthogonal"
        found.append(describe(places, ("train", "ema"), message))
    return found


def _schedule_mistakes(schedule: Schedule, location: Location, steps: int, places: Mapping[Location, str]) -> list[str]:
    """What is wrong with the schedule at ``location`` of a run of so many steps."""
    found = []
    if schedule.name == "steps" and not schedule.milestones:
        found.append(describe(places, (*location, "milestones"), "must be given for the schedule 'steps'"))
    if list(schedule.milestones) != sorted(set(schedule.milestones)):
        message = f"must increase, got {list(schedule.milestones)}"
        found.append(describe(places, (*location, "milestones"), message))
    if schedule.warmup > steps:
        message = f"must not exceed train.steps = {steps}, got {schedule.warmup}"
        found.append(describe(places, (*location, "warmup"), message))
    return found


def _resolve(
    part: Any, registry: Registry[Any], location: Location, places: Mapping[Location, str], mistakes: list[str]
) -> Any:
    """The part with all its options, typed and with defaults; mistakes are appended."""
    try:
        entry = registry[part.name]
    except UnknownNameError as error:
        named = location if location[:2] == ("evaluate", "metrics") and not part.options else (*location, "name")
        mistakes.append(describe(places, named, str(error)))
        return part
    model = options_model(entry)
    try:
        options = model.model_validate(registry.canonical(part.options)).model_dump()
    except ArgumentError as error:
        mistakes.append(describe(places, (*location, error.argument), str(error)))
        return part
    except pydantic.ValidationError as error:
        own = [name for name in type(part).model_fields if name != "name"]
        mistakes += explain(error, model, part.options, places, location, extra_keys=own)
        return part
    return type(part).model_validate({**part.model_dump(exclude=set(part.options)), **options})
