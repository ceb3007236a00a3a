"""What a recipe may hold: its sections, and their keys with types, ranges and defaults."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Union

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from torch import nn

from hypersphere.attacks import attacks
from hypersphere.data import datasets
from hypersphere.energy import energies
from hypersphere.errors import ArgumentError
from hypersphere.evaluate import evaluations
from hypersphere.losses import losses
from hypersphere.models import models
from hypersphere.nn import operators
from hypersphere.orthogonal import maps
from hypersphere.recipe.explain import Location, RecipeError, describe, member_types
from hypersphere.recipe.hash import Housekeeping, Later, content, digests
from hypersphere.recipe.text import Dumper, key_of
from hypersphere.registry import Entry, Registry, UnknownNameError


class Section(BaseModel):
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

    def trial(self) -> tuple[Any, ...] | None:
        """Arguments with which it is built to check its ranges as soon as the recipe is read; ``None``: it is not."""
        return ()


class Schedule(Section):
    """A learning rate, or the weight of a regulariser, over the steps."""

    name: Literal["constant", "steps", "cosine", "linear"] = "constant"
    milestones: tuple[Annotated[int, Field(ge=1)], ...] = Field((), description="'steps': where it is multiplied")
    factor: float = Field(0.1, gt=0, le=1, description="'steps': what it is multiplied by")
    final: float = Field(0.0, ge=0, le=1, description="'cosine', 'linear': last value as a share of the first")
    warmup: int = Field(0, ge=0, description="steps of linear increase from 0")


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


class Regulariser(Part):
    """A term added to the loss: ``weight`` times an energy of weights.

    ``target`` says of which: the ``model``'s layers, all of them hidden ones; the ``head``'s, the output layer; or
    ``all`` of them.
    """

    registry: ClassVar[Registry[Any]] = energies
    weight: float = Field(1.0, ge=0)
    target: Literal["model", "head", "all"] = "model"
    schedule: Annotated[Schedule | None, Later(None)] = Field(
        None, description="of the weight; by default it stays as it is"
    )


class LayerChoice(Part):
    """A part that goes into some of the model's layers."""

    types: tuple[str, ...] | None = Field(None, description="patterns of the classes of the layers")
    include: tuple[str, ...] | None = Field(None, description="patterns of the names of the layers")
    exclude: tuple[str, ...] | None = Field(None, description="patterns of the names of layers to leave alone")
    skip: tuple[Literal["first", "last", "shortcut"], ...] = Field((), description="places of layers to leave alone")

    @pydantic.field_validator("types", "include", "exclude", "skip", mode="before")
    @classmethod
    def _one_alone(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @property
    def choice(self) -> dict[str, Any]:
        """Which layers: what is given of it, by argument."""
        keys = ("types", "include", "exclude", "skip")
        return {key: value for key in keys if (value := getattr(self, key)) is not None}


class Convert(LayerChoice):
    """A decoupled operator in the model's layers: its ``name``, its options, and which layers get it.

    The keys are arguments of :func:`hypersphere.nn.convert`. The classifier is no part of the model, so by default the
    last layer is converted, too.
    """

    registry: ClassVar[Registry[Any]] = operators
    skip: tuple[Literal["first", "last", "shortcut"], ...] = Field(
        ("shortcut",), description="places of layers to leave alone"
    )


class Orthogonal(LayerChoice):
    """Orthogonal training of the model's layers: the ``name`` of a map, its options, and what is turned how.

    Most keys are arguments of :func:`hypersphere.orthogonal.apply`. The classifier is no part of the model, so all
    layers are chosen by default.
    """

    registry: ClassVar[Registry[Any]] = maps
    init: Literal["kaiming", "xavier", "normal"] | None = Field(None, description="draw the neurons anew")
    mean: float = Field(0.0, description="mean of the numbers that init draws")
    unit_norm: bool = Field(False, description="set the norms of neurons to gain")
    gain: float = Field(1.0, gt=0, description="factor on the neurons")
    refine: int = Field(0, ge=0, description="steps that minimise the energy of the neurons before training")
    start: Literal["identity", "normal"] = Field("identity", description="first value of the free parameters")
    learn_neurons: bool = Field(False, description="train the neurons, too")
    blocks: int = Field(1, ge=1, description="blocks on the diagonal of a rotation")
    share_blocks: bool = Field(False, description="one block for all places on the diagonal")
    sample: float | None = Field(None, gt=0, description="coordinates turned at a time, a share below 1 or a number")
    sampling: Literal["uniform", "partition", "blocks", "channels"] = "uniform"
    sides: Literal["in", "both"] = Field("in", description="'both' turns the outputs, too")
    every: int = Field(0, ge=0, description="steps between two draws of coordinates; 0: never")
    lr: float = Field(1.0, ge=0, description="factor on the learning rate of rotations; 0: neurons stay as drawn")
    weight_decay: float = Field(0.0, ge=0, description="of the free parameters of rotations")
    penalty: float = Field(0.0, ge=0, description="weight of the distance from orthogonal matrices, for free ones")
    penalty_squared: bool = Field(True, description="the squared distance")

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of :func:`hypersphere.orthogonal.apply` beside the map."""
        others = {"name", "every", "lr", "weight_decay", "penalty", "penalty_squared"}
        keys = [key for key in type(self).model_fields if key not in others]
        return {key: value for key in keys if (value := getattr(self, key)) is not None}


class Adversary(Part):
    """Adversarial training: the ``name`` of an attack, its options, and how much of every batch it changes."""

    registry: ClassVar[Registry[Any]] = attacks
    share: float = Field(0.5, gt=0, le=1, description="of the batch that is attacked, by the model as it is")


class Project(Section):
    """Projection of the decoupled kernels whose norm does not count, before the first step and then again."""

    every: int = Field(0, ge=0, description="steps between projections of decoupled kernels to norm s; 0: none")
    s: float = Field(1.0, gt=0, description="norm of the projected kernels")


class Augment(Section):
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


class Imbalance(Section):
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
    normalise: Literal["channel", "pixel", "half", "none"] = Field(
        "channel",
        description="subtract the mean of each channel (and divide by its spread) or of each pixel; "
        "'half': (byte - 127.5) / 128",
    )
    augment: Augment = Augment()
    workers: Annotated[int, Housekeeping] = Field(0, ge=0, description="processes that decode image files")

    def trial(self) -> None:
        """Not built before the run needs it."""


class Rule(Section):
    """What holds for some parameters alone: those whose name, such as ``model.features.0.bias``, fits ``match``."""

    match: str = Field(description="pattern of parameter names; of several rules the first that fits counts")
    lr: float = Field(1.0, ge=0, description="factor on the learning rate")
    weight_decay: float | None = Field(None, ge=0, description="in place of the optimiser's")


class Optimiser(Section):
    """The optimiser and its constants."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
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


class Train(Section):
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


class Evaluate(Section):
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


class Recipe(Section):
    """Everything that determines a run."""

    name: Annotated[str, Housekeeping] = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    help: Annotated[str, Housekeeping] = ""
    seed: int = Field(0, ge=0, lt=2**32)
    data: Data = Data()
    model: Model = Model(name="digits-cnn")
    convert: Annotated[Convert | None, Later(None)] = Field(
        None, description="a decoupled operator for the layers of the model"
    )
    project: Annotated[Project, Later(Project())] = Project()
    orthogonal: Annotated[Orthogonal | None, Later(None)] = Field(
        None, description="rotations of the layers of the model, in place of weights"
    )
    adversary: Annotated[Adversary | None, Later(None)] = Field(None, description="attacks on the training images")
    loss: Loss = Loss(name="softmax")
    regularisers: tuple[Regulariser, ...] = ()
    optimiser: Optimiser = Optimiser()
    schedule: Schedule = Schedule()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()

    _places: dict[Location, str] = PrivateAttr(default_factory=dict)

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
        modules = {option.name: module_type(option.annotation) for option in entry.options}
        options = part.options
        place = location
        try:
            for key, value in options.items():
                if isinstance(value, Mapping) and (module := modules.get(key)):
                    place = (*location, key)
                    options[key] = module(**value)
            place = location
            return entry.factory(*args, **options)
        except UnknownNameError as error:  # a layer name, say
            raise RecipeError(describe(self._places, place, str(error))) from error
        except TypeError as error:  # a layer that cannot stand where it was put
            raise RecipeError(describe(self._places, place, f"cannot be built: {error}")) from error
        except ArgumentError as error:
            raise self.blame(error, *place) from error

    def blame(self, error: ArgumentError, *location: str | int) -> RecipeError:
        """The error of an argument that came from the section at ``location``, with its place in the recipe."""
        return RecipeError(describe(self._places, (*location, error.argument), str(error)))


def settings() -> Iterator[tuple[str, str, str]]:
    """Key, default and help of everything in a recipe that is not an option of a named part."""
    for name, field in Recipe.model_fields.items():
        sections = [
            kind for kind in member_types(field.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        if not isinstance(field.default, BaseModel):
            yield name, str(field.default), field.description or ""
        for section in sections:
            for key, inner in section.model_fields.items():
                default = getattr(field.default, key, None if inner.is_required() else inner.default)
                yield f"{name}.{key}", str(default), inner.description or ""


def options_model(entry: Entry[Any]) -> type[BaseModel]:
    """A strict pydantic model of a factory's options."""
    fields: dict[str, Any] = {
        option.name: (field_type(option.annotation), ... if option.required else option.default)
        for option in entry.options
    }
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    with warnings.catch_warnings():
        # An option may be called like one of pydantic's own methods; nothing here calls those.
        warnings.filterwarnings("ignore", message="Field name .* shadows an attribute")
        return pydantic.create_model(entry.name, __config__=config, **fields)


def module_type(annotation: Any) -> type[nn.Module] | None:
    """The module class an option takes (an annealer, say), if it takes one."""
    return next((c for c in member_types(annotation) if isinstance(c, type) and issubclass(c, nn.Module)), None)


def field_type(annotation: Any) -> Any:
    """The annotation as a recipe can express it: a module becomes the mapping of its options."""
    module = module_type(annotation)
    if module is None:
        return annotation
    nested = options_model(Entry(module.__name__, module, (), ()))
    others = [m for m in member_types(annotation) if not (isinstance(m, type) and issubclass(m, nn.Module))]
    return Union[(*others, nested)]
