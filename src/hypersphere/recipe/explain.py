"""What is wrong with a recipe, in lines that name the place, what is allowed there and the nearest known word."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pydantic
from pydantic import BaseModel, RootModel

from hypersphere.errors import HypersphereError
from hypersphere.registry import did_you_mean

Location = tuple[str | int, ...]


class RecipeError(HypersphereError):
    """A recipe that cannot be used; the message lists every mistake with its place."""


def explain(
    error: pydantic.ValidationError,
    model: type[BaseModel],
    content: Mapping[str, Any],
    places: Mapping[Location, str],
    prefix: Location = (),
    extra_keys: Sequence[str] = (),
) -> list[str]:
    """One readable line for each mistake that pydantic found."""
    lines = []
    for item in _relevant(error.errors(), content):
        location = item["loc"] if item["type"] == "invalid_key" else _existing(item["loc"], content)
        if item["type"] == "missing":  # a key that is not there, in a section that may be one of several types
            location = (*_existing(item["loc"][:-1], content), *item["loc"][-1:])
        if item["type"] == "extra_forbidden":
            allowed = list(dict.fromkeys([*_fields(model, item["loc"][:-1]), *extra_keys]))
            word = str(item["loc"][-1])
            hint = did_you_mean(word, [*allowed, "name"] if extra_keys else allowed)  # a part has a name
            text = f"is not a known key.{hint} Allowed: {', '.join(allowed)}"
        elif item["type"] == "missing":
            text = "is missing"
        else:
            shown = item["msg"].removeprefix("Value error, ")
            text = f"{shown[0].lower()}{shown[1:]}, got {item['input']!r}"
            text = text.removeprefix("input ")
        lines.append(describe(places, (*prefix, *location), text))
    return list(dict.fromkeys(lines))


_PLAIN = ("int_type", "float_type", "string_type", "bool_type")
"""Pydantic's mistakes of values that are none of a plain type."""


def _relevant(errors: Sequence[Any], content: Mapping[str, Any]) -> list[Any]:
    """The mistakes without those of the other members of a union: of a number or a section, what was meant counts."""
    found: dict[Location, Any] = {}
    for item in errors:
        key = (
            (item["type"], *item["loc"])
            if item["type"] in ("missing", "extra_forbidden")
            else _existing(item["loc"], content)
        )
        field = item["loc"][:1]
        section = isinstance(content.get(str(field[0])) if field else None, Mapping)
        in_section = len(item["loc"]) > 2 or (len(item["loc"]) == 2 and item["type"] in ("missing", "extra_forbidden"))
        if section and not in_section and any(len(other["loc"]) > 2 and other["loc"][:1] == field for other in errors):
            continue
        if item["type"] in _PLAIN and found.get(key, item)["type"] in _PLAIN:
            key = (*key, item["type"])  # a number or a text, say: both are worth telling
        found.setdefault(key, item)
    return list(found.values())


def _existing(loc: Location, content: Any) -> Location:
    """``loc`` without the union members that pydantic appends (they are no keys of the recipe)."""
    for depth, key in enumerate(loc):
        try:
            content = content[key]
        except (LookupError, TypeError):
            return loc[:depth]
    return loc


def _fields(model: type[BaseModel], loc: Iterable[str | int]) -> list[str]:
    """The keys allowed in the section of ``model`` at ``loc``, or in what is around it."""
    for key in loc:
        model = (type_at(model, (key,)) if isinstance(key, str) else None) or model
    return list(model.model_fields)


def type_at(model: type[BaseModel], location: Iterable[str | int]) -> type[BaseModel] | None:
    """The type of the section at a place of a ``model``, an item of a list counting as the list."""
    for key in location:
        if isinstance(key, int):
            continue
        if key not in model.model_fields:
            return None
        found = _model_in(model.model_fields[key].annotation)
        if found is None:
            return None
        model = found
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The first model in an annotation; of one that is a list, the model of its items."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (
            _model_in(annotation.model_fields["root"].annotation) if issubclass(annotation, RootModel) else annotation
        )
    return next((found for part in typing.get_args(annotation) if (found := _model_in(part))), None)


def describe(places: Mapping[Location, str], location: Location, text: str) -> str:
    """``file, line n: key.key text``, with the line of the nearest place where the key itself has none."""
    known: list[str] = []
    for end in range(len(location), 0, -1):
        known += [places[location[:end]]] if location[:end] in places else []
        known += [place for key, place in places.items() if key[:end] == location[:end]]
    where = f"{known[0]}: " if known else ""
    path = ".".join(map(str, location))
    # Messages of ArgumentError start with the bare name of the argument.
    return f"{where}{path} {text.removeprefix(f'{location[-1]} ')}"


def member_types(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type that an annotation is."""
    union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    return typing.get_args(annotation) if union else (annotation,)
