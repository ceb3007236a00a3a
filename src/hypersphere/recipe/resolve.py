"""From the content of a recipe to one that is complete and free of contradictions."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

import pydantic
from pydantic import BaseModel

from hypersphere.attacks import Attack, attacks
from hypersphere.errors import ArgumentError
from hypersphere.orthogonal import maps
from hypersphere.recipe.explain import Location, RecipeError, describe, explain
from hypersphere.recipe.schema import Orthogonal, Part, Recipe, Schedule, options_model
from hypersphere.registry import Registry, UnknownNameError


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
    recipe = _resolved(recipe, (), places, mistakes)
    mistakes += _contradictions(recipe, places)
    if mistakes:
        raise RecipeError("\n".join(mistakes))
    recipe._places = places
    _try(recipe, recipe, ())
    return recipe


def _resolved(value: Any, location: Location, places: Mapping[Location, str], mistakes: list[str]) -> Any:
    """The value with all options of the parts in it, typed and with defaults; mistakes are appended."""
    if isinstance(value, tuple):
        return tuple(_resolved(item, (*location, index), places, mistakes) for index, item in enumerate(value))
    if not isinstance(value, BaseModel):
        return value
    parts = {
        key: _resolved(getattr(value, key), (*location, key), places, mistakes) for key in type(value).model_fields
    }
    value = value.model_copy(update={key: part for key, part in parts.items() if part is not getattr(value, key)})
    if isinstance(value, Part) and value.registry is not None:
        return _with_options(value, value.registry, location, places, mistakes)
    return value


def _try(recipe: Recipe, value: Any, location: Location) -> None:
    """Build what is cheap to build: ranges are checked now, not after the data has been loaded."""
    if isinstance(value, tuple):
        for index, item in enumerate(value):
            _try(recipe, item, (*location, index))
    elif isinstance(value, BaseModel):
        if isinstance(value, Part) and value.registry is not None and (trial := value.trial()) is not None:
            recipe.build(value.registry, location, *trial)
        for key in type(value).model_fields:
            _try(recipe, getattr(value, key), (*location, key))


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


def _with_options(
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
    return type(part).model_validate({**{key: getattr(part, key) for key in type(part).model_fields}, **options})
