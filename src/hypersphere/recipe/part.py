"""What recipes are made of: keys with fixed names, and parts whose name stands in a registry."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Union

import pydantic
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from hypersphere.errors import ArgumentError
from hypersphere.recipe.explain import member_types
from hypersphere.registry import Entry, Option, Registry, registry_of
from hypersphere.schedules import Factor, schedules


class Keys(BaseModel):
    """Keys with fixed names."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Part(BaseModel):
    """Something from a registry: its ``name``, and its options beside it."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    name: str
    registry: ClassVar[Registry[Any] | None] = None
    """Where the name stands."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def options(self) -> dict[str, Any]:
        """The options beside the name."""
        return dict(self.model_extra or {})

    def arguments_of(self, entry: Entry[Any]) -> dict[str, Any]:
        """Options of the factory of its name, some of which may be keys that every part of its kind has."""
        shared = [option.name for option in entry.options if option.name in type(self).model_fields]
        return {name: getattr(self, name) for name in shared} | self.options

    def trial(self) -> tuple[Any, ...] | None:
        """Arguments with which it is built to check its ranges as soon as the recipe is read; ``None``: it is not."""
        return ()

    @classmethod
    def kept(cls, name: str) -> set[str]:
        """Options, beside the section's own keys, that a part called ``name`` takes over from another one."""
        return set()


class Schedule(Part):
    """A learning rate, or the weight of a regulariser, over the steps."""

    registry: ClassVar[Registry[Any]] = schedules
    name: str = "constant"
    milestones: tuple[Annotated[int, Field(ge=1)], ...] = Field((), description="'steps': where it is multiplied")
    factor: float = Field(0.1, gt=0, le=1, description="'steps': what it is multiplied by")
    final: float = Field(0.0, ge=0, le=1, description="'cosine', 'linear': last value as a share of the first")
    warmup: int = Field(0, ge=0, description="steps of linear increase from 0")

    @functools.cached_property
    def _factor(self) -> Factor:
        entry = schedules[self.name]
        return entry.factory(**self.arguments_of(entry))

    def at(self, step: int, steps: int) -> float:
        """Factor on what is scheduled at a step, counted from 0.

        Args:
            step: The step that is about to be taken.
            steps: Length of the run.

        Example:
            >>> Schedule(name="steps", milestones=(10, 20)).at(15, 30)
            0.1
        """
        if step < self.warmup:
            return (step + 1) / self.warmup
        return self._factor(step, (step - self.warmup) / max(steps - self.warmup, 1))

    def mistakes(self, steps: int) -> Iterator[tuple[str, str]]:
        """What is wrong with it in a run of so many steps: of which key, and what."""
        if list(self.milestones) != sorted(set(self.milestones)):
            yield "milestones", f"must increase, got {list(self.milestones)}"
        if self.warmup > steps:
            yield "warmup", f"must not exceed train.steps = {steps}, got {self.warmup}"


Place = Literal["first", "output", "last", "shortcut"]
"""Where a layer is that is left alone; ``last`` is an older word for the output."""


class Layers(Keys):
    """Which of the model's layers, in the words of :func:`hypersphere.selection.select`."""

    types: tuple[str, ...] | None = Field(None, description="patterns of the classes of the layers")
    include: tuple[str, ...] | None = Field(None, description="patterns of the names of the layers")
    exclude: tuple[str, ...] | None = Field(None, description="patterns of the names of layers to leave alone")
    skip: tuple[Place, ...] = Field((), description="places of layers to leave alone")

    @pydantic.field_validator("types", "include", "exclude", "skip", mode="before")
    @classmethod
    def _one_alone(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @property
    def choice(self) -> dict[str, Any]:
        """Which layers: what is given of it, by argument."""
        keys = ("types", "include", "exclude", "skip")
        # The classifier is a head apart, so the model has no output unless it is one of the places to leave alone.
        output = "auto" if {"output", "last"} & set(self.skip) else None
        return {key: value for key in keys if (value := getattr(self, key)) is not None} | {"output": output}


class LayerChoice(Layers, Part):
    """A part that goes into some of the model's layers."""


def options_model(entry: Entry[Any]) -> type[BaseModel]:
    """A strict pydantic model of a factory's options."""
    fields: dict[str, Any] = {
        option.name: (field_type(option.annotation), ... if option.required else _expressible(option))
        for option in entry.options
    }
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    with warnings.catch_warnings():
        # An option may be called like one of pydantic's own methods; nothing here calls those.
        warnings.filterwarnings("ignore", message="Field name .* shadows an attribute")
        return pydantic.create_model(entry.name, __config__=config, **fields)


def member_registry(annotation: Any) -> Registry[Any] | None:
    """The registry whose members an option takes (margins, say), if it takes such: by name, or with options."""
    return next((found for kind in member_types(annotation) if (found := registry_of(kind)) is not None), None)


def _expressible(option: Option) -> Any:
    """The default of an option; ``None`` for a member that has no name in it."""
    registry = member_registry(option.annotation)
    member = registry is not None and registry.kind is not None and isinstance(option.default, registry.kind)
    return None if member else option.default


def module_type(annotation: Any) -> type[nn.Module] | None:
    """The module class an option takes (an annealer, say), if it takes one."""
    return next((c for c in member_types(annotation) if isinstance(c, type) and issubclass(c, nn.Module)), None)


def field_type(annotation: Any) -> Any:
    """The annotation as a recipe can express it: a module becomes the mapping of its options, a member its name."""
    members = member_types(annotation)
    if member_registry(annotation) is not None:
        others = [kind for kind in members if registry_of(kind) is None and kind is not str]
        return Union[(*others, str, dict[str, Any], None)]  # None: the default, which has no name
    if any(member == tuple[int, int] for member in members):
        return Annotated[annotation, pydantic.BeforeValidator(_square)]
    module = module_type(annotation)
    if module is None:
        return annotation
    nested = options_model(Entry(module.__name__, module, (), ()))
    others = [m for m in members if not (isinstance(m, type) and issubclass(m, nn.Module))]
    return Union[(*others, nested)]


def built(entry: Entry[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with the members and modules that stand for their mappings; see :class:`BuildError`."""
    found = dict(options)
    for option in entry.options:
        value = found.get(option.name)
        if not isinstance(value, Mapping):
            continue
        try:
            if (registry := member_registry(option.annotation)) is not None:
                inner = registry[value["name"]]
                given = {key: part for key, part in value.items() if key != "name" and part is not None}
                found[option.name] = inner.factory(**built(inner, given))
            elif (module := module_type(option.annotation)) is not None:
                found[option.name] = module(**value)
        except BuildError as error:
            raise BuildError(error.error, (option.name, *error.place)) from error.error
        except ArgumentError as error:
            raise BuildError(error, (option.name,)) from error
    return found


class BuildError(Exception):
    """A wrong argument of something that stands inside of a part.

    Args:
        error: What was wrong.
        place: The keys inside of the part under which the argument stands.
    """

    def __init__(self, error: ArgumentError, place: tuple[str, ...]) -> None:
        super().__init__(str(error))
        self.error, self.place = error, place


def _square(value: Any) -> Any:
    """A height and a width, which may be given as one number."""
    return (value, value) if isinstance(value, int) and not isinstance(value, bool) else value
