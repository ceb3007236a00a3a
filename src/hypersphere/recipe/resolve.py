"""From the content of a recipe to one that is complete and free of contradictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pydantic
from pydantic import BaseModel, RootModel

from hypersphere.errors import ArgumentError
from hypersphere.optim.rows import BY_NAME
from hypersphere.recipe.explain import Location, RecipeError, describe, explain
from hypersphere.recipe.part import Part, member_registry, options_model
from hypersphere.recipe.schema import Recipe, recipe_type
from hypersphere.recipe.text import known
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
        recipe = recipe_type().model_validate(content)
    except pydantic.ValidationError as error:
        raise RecipeError("\n".join(explain(error, recipe_type(), content, places))) from None
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
    if isinstance(value, RootModel):
        return type(value)(_resolved(value.root, location, places, mistakes))
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
    elif isinstance(value, RootModel):
        _try(recipe, value.root, location)
    elif isinstance(value, BaseModel):
        if isinstance(value, Part) and value.registry is not None and (trial := value.trial()) is not None:
            recipe.build(value.registry, location, *trial)
        for key in type(value).model_fields:
            _try(recipe, getattr(value, key), (*location, key))


def _contradictions(recipe: Recipe, places: Mapping[Location, str]) -> list[str]:
    """Mistakes that take two values to see."""
    found: list[tuple[Location, str]] = [
        (("schedule", key), text) for key, text in recipe.schedule.mistakes(recipe.train.steps)
    ]
    if recipe.optimiser.nesterov and not recipe.optimiser.momentum:
        found.append((("optimiser", "nesterov"), "needs optimiser.momentum above 0"))
    if recipe.loss.options.get("reduction") == "none":
        message = "must be 'mean' or 'sum' for training, which needs one number, got 'none'"
        found.append((("loss", "reduction"), message))
    if recipe.loss.options.get("sparse") and recipe.optimiser.name not in BY_NAME:
        message = f"must be one of {', '.join(BY_NAME)} for loss.sparse=true, got {recipe.optimiser.name!r}"
        found.append((("optimiser", "name"), message))
    for section in recipe.sections().values():
        found += section.mistakes(recipe)
    return [describe(places, location, text) for location, text in found]


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
        given = {known(key, model.model_fields): value for key, value in part.options.items()}
        # Keys that all parts of a kind have may be options of this one, with its own default.
        shared = type(part).model_fields.keys() & model.model_fields.keys()
        given |= {key: getattr(part, key) for key in part.model_fields_set & shared}
        given = registry.canonical(given, entry)
        for option in entry.options:
            if option.name in given and (inner := member_registry(option.annotation)) is not None:
                given[option.name] = _member(given[option.name], inner, (*location, option.name), places, mistakes)
        options = model.model_validate(given).model_dump()
    except ArgumentError as error:
        mistakes.append(describe(places, (*location, error.argument), str(error)))
        return part
    except pydantic.ValidationError as error:
        own = [name for name in type(part).model_fields if name != "name"]
        mistakes += explain(error, model, given, places, location, extra_keys=own)
        return part
    return type(part).model_validate({**{key: getattr(part, key) for key in type(part).model_fields}, **options})


def _member(
    value: Any, registry: Registry[Any], location: Location, places: Mapping[Location, str], mistakes: list[str]
) -> Any:
    """A member given as an option: a name as it is, a mapping of its name and options with all of them."""
    if isinstance(value, Mapping):
        if isinstance(value.get("name"), str):
            return _with_options(Part.model_validate(value), registry, location, places, mistakes).model_dump()
        mistakes.append(describe(places, (*location, "name"), f"must be given, the name of the {registry.family}"))
    elif isinstance(value, str) and value not in registry:
        try:
            registry[value]
        except UnknownNameError as error:
            mistakes.append(describe(places, location, str(error)))
    return value
