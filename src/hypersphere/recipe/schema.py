"""What a recipe may hold: its sections, and their keys with types, ranges and defaults."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

import pydantic
import yaml
from pydantic import BaseModel, Field, PrivateAttr

from hypersphere.data import datasets
from hypersphere.data.augmentations import augmentations
from hypersphere.errors import ArgumentError
from hypersphere.evaluate import evaluations
from hypersphere.losses import losses
from hypersphere.models import models
from hypersphere.optimisers import optimisers
from hypersphere.recipe.explain import Location, RecipeError, describe, member_types
from hypersphere.recipe.hash import Housekeeping, Later, content, digests
from hypersphere.recipe.part import BuildError, Keys, Layers, Part, Schedule, built
from hypersphere.recipe.section import Section, kinds
from hypersphere.recipe.text import Dumper, key_of
from hypersphere.registry import Registry, UnknownNameError


class Model(Part):
    """The network, up to its features."""

    registry: ClassVar[Registry[Any]] = models

    def trial(self) -> None:
        """Not built before the run needs it."""


class Loss(Part):
    """The loss, with the layer of class vectors that it needs."""

    registry: ClassVar[Registry[Any]] = losses

    def trial(self) -> tuple[Any, ...]:
        """Features of two numbers; a list holds one number for each class, the data tells whether there are as many."""
        classes = next((len(value) for value in self.options.values() if isinstance(value, list)), 2)
        return 2, max(classes, 1)


class Measurement(Part):
    """An evaluation with its options."""

    registry: ClassVar[Registry[Any]] = evaluations

    def trial(self) -> None:
        """Not built before the run needs it."""

    @pydantic.model_serializer(mode="wrap")
    def _name_alone_where_that_is_all(self, handler: pydantic.SerializerFunctionWrapHandler) -> Any:
        return handler(self) if self.options else self.name


class Augmentation(Part):
    """A random change of training samples: its name and options."""

    registry: ClassVar[Registry[Any]] = augmentations


class Augment(Keys):
    """Random changes of the training images, drawn anew for every image and step."""

    crop: int = Field(0, ge=0, description="padding of a random crop back to the original size")
    crop_mode: Annotated[Literal["zeros", "reflect"], Later("zeros")] = Field(
        "zeros", description="'reflect' pads with the mirrored image, edge pixels included"
    )
    flip: bool = Field(False, description="mirror left and right with probability 1/2")
    vertical_flip: bool = Field(False, description="mirror up and down with probability 1/2")
    rotate: Annotated[bool, Later(False)] = Field(
        False, description="point clouds: turn about the vertical by any angle"
    )
    tilt: Annotated[float, Later(0.0)] = Field(
        0.0, ge=0, description="point clouds: deviation of small turns about all axes, cut at 3 times"
    )
    scale: Annotated[float, Later(1.0)] = Field(
        1.0, ge=1, description="point clouds: largest factor on the size, least is its inverse"
    )
    shift: Annotated[float, Later(0.0)] = Field(0.0, ge=0, description="point clouds: largest shift along each axis")
    jitter: Annotated[float, Later(0.0)] = Field(
        0.0, ge=0, description="point clouds: deviation of each point's coordinates, cut at 5 times"
    )
    shuffle: Annotated[bool, Later(False)] = Field(
        False, description="point clouds: points in a new order at every step"
    )
    parts: Annotated[tuple[Augmentation, ...], Later(())] = Field((), description="other changes, by their names")

    def changed(self) -> list[str]:
        """Names of the changes that are made, but for those of ``parts``."""
        fields = {key: field for key, field in type(self).model_fields.items() if key != "parts"}
        return [key for key, field in fields.items() if getattr(self, key) != field.default]


class Imbalance(Keys):
    """Classes that are made rare: the arguments of :meth:`hypersphere.data.Dataset.imbalanced`."""

    keep: dict[int | str, Annotated[float, Field(gt=0)]] = Field(
        {}, description="class -> how many of its training images are left, or below 1 which share"
    )
    graded: int = Field(0, ge=0, description="class k is left with k + 1 times so many; 0: with all")
    seed: int = Field(0, ge=0, description="seed of the choice, apart from that of the run")

    @pydantic.field_validator("keep", mode="before")
    @classmethod
    def _whole_numbers_are_indices(cls, value: Any) -> Any:
        # JSON has no keys but texts, and a recipe is to come back as it was.
        return {key_of(str(key)): count for key, count in value.items()} if isinstance(value, Mapping) else value

    @pydantic.field_validator("keep")
    @classmethod
    def _counts_are_whole(cls, value: dict[int | str, float]) -> dict[int | str, float]:
        for name, count in value.items():
            if count > 1 and not count.is_integer():
                raise ValueError(f"must be whole numbers or shares below 1, got {count:g} for {name!r}")
        return value


class Data(Part):
    """The data set and how batches are drawn from it."""

    registry: ClassVar[Registry[Any]] = datasets
    name: str = "digits"
    batch_size: int = Field(128, ge=1, description="images a step, over all processes")
    hold_out: tuple[int | str, ...] = Field((), description="classes kept out of training, for verification")
    imbalance: Annotated[Imbalance, Later(Imbalance())] = Imbalance()
    validation: Annotated[int, Later(0)] = Field(
        0,
        ge=0,
        description="so many training images, the same for every seed, are tested on in place of the test images, to "
        "choose settings by",
    )
    normalise: Literal["channel", "pixel", "half", "none"] = Field(
        "channel",
        description="subtract the mean of each channel (and divide by its spread) or of each pixel; "
        "'half': (byte - 127.5) / 128",
    )
    augment: Augment = Augment()
    workers: Annotated[int, Housekeeping] = Field(0, ge=0, description="processes that decode image files")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _alphabets_were_called_validation(cls, value: Any) -> Any:
        # Before every data set had this key it was the one of omniglot's options that names alphabets.
        if isinstance(value, Mapping) and isinstance(value.get("validation"), list | tuple):
            return {"validation_alphabets" if key == "validation" else key: part for key, part in value.items()}
        return value

    def trial(self) -> None:
        """Not built before the run needs it."""


class Rule(Keys):
    """What holds for some parameters alone: those whose name, such as ``model.features.0.bias``, fits ``match``.

    With ``layers`` they are those of the model's layers that it chooses, with the words of the other sections.
    """

    match: str = Field("*", description="pattern of parameter names; of several rules the first that fits counts")
    layers: Annotated[Layers | None, Later(None)] = Field(
        None,
        description="of which of the model's layers (types, include, exclude, skip); by default of all parts",
    )
    lr: float = Field(1.0, ge=0, description="factor on the learning rate")
    weight_decay: float | None = Field(None, ge=0, description="in place of the optimiser's")


class Optimiser(Part):
    """The optimiser and its constants."""

    registry: ClassVar[Registry[Any]] = optimisers
    name: str = "sgd"
    lr: float = Field(0.1, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1, description="sgd only")
    nesterov: bool = Field(False, description="sgd only")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    weight_decay: float = Field(5e-4, ge=0)
    decay: Literal["all", "weights"] = Field(
        "all",
        description="'weights' spares biases and normalisation; decoupled kernels whose norm does not count, radii and "
        "k are spared in any case",
    )
    head_lr: float = Field(1.0, gt=0, description="factor on the learning rate of the head")
    rules: Annotated[tuple[Rule, ...], Later(())] = Field(
        (), description="other rates and decays of parameters by name"
    )

    def trial(self) -> None:
        """Not built before there are parameters."""


class Parallel(Keys):
    """How several processes (torchrun) divide the work."""

    head: Literal["replicate", "shard"] | None = Field(
        None, description="whole on every process, or its classes divided among them; by default by their number"
    )


class Train(Keys):
    """Length, precision and housekeeping of the training loop."""

    steps: int = Field(1000, ge=1)
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    channels_last: bool = False
    compile: bool = Field(False, description="torch.compile the forward pass")
    capture: bool | None = Field(None, description="the whole step as one CUDA graph; by default wherever possible")
    clip_norm: float | None = Field(None, gt=0, description="largest norm of the whole gradient")
    ema: float | None = Field(None, gt=0, lt=1, description="decay of a moving average of the weights")
    log_every: int = Field(100, ge=1)
    checkpoint_every: int = Field(1000, ge=1)
    keep_checkpoints: Annotated[int, Housekeeping] = Field(2, ge=1)
    tensorboard: Annotated[bool, Housekeeping] = True
    parallel: Annotated[Parallel, Housekeeping] = Parallel()


class Evaluate(Keys):
    """What is measured, and how often."""

    every: int = Field(0, ge=0, description="steps between evaluations; 0 evaluates at the end only")
    batch_size: int = Field(1000, ge=1)
    metrics: tuple[Measurement, ...] = tuple(
        Measurement(name=name) for name in ("classification", "angles", "verification", "energy")
    )
    recalibrate: Annotated[int, Later(0)] = Field(
        0,
        ge=0,
        description="also measure the accuracy with normalisation statistics estimated anew from so many batches",
    )
    energy: Annotated[bool, Later(False)] = Field(
        False, description="also write down the energy of every layer, beside its least and random"
    )


class PluginRecord(Keys):
    """A plugin with which a recipe was resolved."""

    name: str
    path: str = ""
    digest: str = ""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class Recipe(Keys):
    """Everything that determines a run; the sections of :func:`hypersphere.recipe.section.kinds` are keys, too."""

    name: Annotated[str, Housekeeping] = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    help: Annotated[str, Housekeeping] = ""
    seed: int = Field(0, ge=0, lt=2**32)
    plugins: Annotated[tuple[PluginRecord, ...], Housekeeping] = Field(
        (), description="files, from the recipe's folder, or modules that bring parts of its own"
    )
    data: Data = Data()
    model: Model = Model(name="digits-cnn")
    loss: Loss = Loss(name="softmax")
    optimiser: Optimiser = Optimiser()
    schedule: Schedule = Schedule()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()

    _places: dict[Location, str] = PrivateAttr(default_factory=dict)

    def sections(self) -> dict[str, Section]:
        """The sections that act in the run, in the order in which they are called."""
        return {key: section for key in kinds() if (section := getattr(self, key, None)) is not None}

    @property
    def hash(self) -> str:
        """Twelve hex digits that change with anything that determines the result and its rows of metrics."""
        return next(digests(content(self)))

    @property
    def hash_without_seed(self) -> str:
        """The same for all seeds, for results that are means over seeds."""
        return next(digests(self._seedless()))

    def matches(self, stored: str) -> bool:
        """Whether a recorded hash, with or without the seed, is this recipe's under any version of the schema.

        Example:
            >>> from hypersphere import recipe
            >>> plan = recipe.load("digits-softmax")
            >>> plan.matches(plan.hash_without_seed), plan.matches("0123456789ab")
            (True, False)
        """
        return stored in {*digests(content(self)), *digests(self._seedless())}

    def _seedless(self) -> dict[str, Any]:
        return {key: value for key, value in content(self).items() if key != "seed"}

    def to_yaml(self) -> str:
        """The recipe with all defaults filled in; loads back to an equal recipe."""
        return yaml.dump(self.model_dump(mode="json"), Dumper=Dumper, sort_keys=False)

    def build(self, registry: Registry[Any], location: Location, *args: Any) -> Any:
        """Create the part at ``location`` from ``registry``, blaming a bad option on its place in the recipe."""
        part: Any = self
        for key in location:
            part = part[key] if isinstance(key, int) else getattr(part, key)
        entry = registry[part.name]
        try:
            return entry.factory(*args, **built(entry, part.arguments_of(entry)))
        except UnknownNameError as error:  # a layer name, say
            raise RecipeError(describe(self._places, location, str(error))) from error
        except TypeError as error:  # a layer that cannot stand where it was put
            raise RecipeError(describe(self._places, location, f"cannot be built: {error}")) from error
        except BuildError as error:
            raise self.blame(error.error, *location, *error.place) from error.error
        except ArgumentError as error:
            raise self.blame(error, *location) from error

    @contextmanager
    def blamed(self, *location: str | int) -> Iterator[None]:
        """Whatever argument is wrong in here came from the section at ``location``."""
        try:
            yield
        except ArgumentError as error:
            raise self.blame(error, *location) from error

    def blame(self, error: ArgumentError, *location: str | int) -> RecipeError:
        """The error of an argument that came from the section at ``location``, with its place in the recipe."""
        return RecipeError(describe(self._places, (*location, error.argument), str(error)))


def recipe_type() -> type[Recipe]:
    """The recipe with a key for every section that is registered."""
    return _with_sections(tuple(kinds().items()))


@functools.cache
def _with_sections(found: tuple[tuple[str, type[Section]], ...]) -> type[Recipe]:
    fields: dict[str, Any] = {key: kind.field() for key, kind in found}
    return pydantic.create_model("Recipe", __base__=Recipe, **fields)


def settings() -> Iterator[tuple[str, str, str]]:
    """Key, default and help of everything in a recipe that is not an option of a named part."""
    for name, field in recipe_type().model_fields.items():
        sections = [
            kind for kind in member_types(field.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        if not isinstance(field.default, BaseModel):
            yield name, str(field.default), field.description or ""
        for section in sections:
            for key, inner in section.model_fields.items():
                default = getattr(field.default, key, None if inner.is_required() else inner.default)
                yield f"{name}.{key}", str(default), inner.description or ""
