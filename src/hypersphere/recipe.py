"""Recipes: everything that determines a run, as YAML checked before anything is built.

A recipe names its parts (data set, model, loss, regularisers) by their registry names; the options of each part are
checked against the signature of what the name stands for. Every mistake is reported with the line it stands on,
what is allowed there and the nearest known word.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.resources
import json
import os
import re
import types
import typing
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from torch import nn

from hypersphere.attacks import Attack, attacks
from hypersphere.data import datasets
from hypersphere.energy import energies
from hypersphere.errors import ArgumentError, HypersphereError
from hypersphere.evaluate import evaluations
from hypersphere.losses import losses
from hypersphere.models import models
from hypersphere.nn import operators
from hypersphere.nn.operators import RadiusOperator
from hypersphere.orthogonal import maps
from hypersphere.registry import Entry, Registry, UnknownNameError, did_you_mean

Location = tuple[str | int, ...]


class RecipeError(HypersphereError):
    """A recipe that cannot be used; the message lists every mistake with its place."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Part(BaseModel):
    """Something from a registry: its ``name``, and its options beside it."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    name: str

    @pydantic.model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def options(self) -> dict[str, Any]:
        """The options beside the name."""
        return dict(self.model_extra or {})


class Schedule(_Section):
    """A learning rate, or the weight of a regulariser, over the steps."""

    name: Literal["constant", "steps", "cosine", "linear"] = "constant"
    milestones: tuple[Annotated[int, Field(ge=1)], ...] = Field((), description="'steps': where it is multiplied")
    factor: float = Field(0.1, gt=0, le=1, description="'steps': what it is multiplied by")
    final: float = Field(0.0, ge=0, le=1, description="'cosine', 'linear': last value as a share of the first")
    warmup: int = Field(0, ge=0, description="steps of linear increase from 0")


class Regulariser(Part):
    """A term added to the loss: ``weight`` times an energy of weights.

    ``target`` says of which: the ``model``'s layers, all of them hidden ones; the ``head``'s, the output layer; or
    ``all`` of them.
    """

    weight: float = Field(1.0, ge=0)
    target: Literal["model", "head", "all"] = "model"
    schedule: Schedule | None = Field(None, description="of the weight; by default it stays as it is")


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

    skip: tuple[Literal["first", "last", "shortcut"], ...] = Field(
        ("shortcut",), description="places of layers to leave alone"
    )


class Orthogonal(LayerChoice):
    """Orthogonal training of the model's layers: the ``name`` of a map, its options, and what is turned how.

    Most keys are arguments of :func:`hypersphere.orthogonal.apply`. The classifier is no part of the model, so all
    layers are chosen by default.
    """

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

    share: float = Field(0.5, gt=0, le=1, description="of the batch that is attacked, by the model as it is")


class Project(_Section):
    """Projection of the decoupled kernels whose norm does not count, before the first step and then again."""

    every: int = Field(0, ge=0, description="steps between projections of decoupled kernels to norm s; 0: none")
    s: float = Field(1.0, gt=0, description="norm of the projected kernels")


class Augment(_Section):
    """Random changes of the training images, drawn anew for every image and step."""

    crop: int = Field(0, ge=0, description="padding of a random crop back to the original size")
    crop_mode: Literal["zeros", "reflect"] = Field(
        "zeros", description="'reflect' pads with the mirrored image, edge pixels included"
    )
    flip: bool = Field(False, description="mirror left and right with probability 1/2")
    vertical_flip: bool = Field(False, description="mirror up and down with probability 1/2")
    rotate: bool = Field(False, description="point clouds: turn about the vertical by any angle")
    tilt: float = Field(0.0, ge=0, description="point clouds: deviation of small turns about all axes, cut at 3 times")
    scale: float = Field(1.0, ge=1, description="point clouds: largest factor on the size, least is its inverse")
    shift: float = Field(0.0, ge=0, description="point clouds: largest shift along each axis")
    jitter: float = Field(0.0, ge=0, description="point clouds: deviation of each point's coordinates, cut at 5 times")
    shuffle: bool = Field(False, description="point clouds: points in a new order at every step")


class Imbalance(_Section):
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
        return {_key(str(key)): count for key, count in value.items()} if isinstance(value, Mapping) else value

    @pydantic.field_validator("keep")
    @classmethod
    def _counts_are_whole(cls, value: dict[int | str, float]) -> dict[int | str, float]:
        for name, count in value.items():
            if count > 1 and not count.is_integer():
                raise ValueError(f"must be whole numbers or shares below 1, got {count:g} for {name!r}")
        return value


class Data(Part):
    """The data set and how batches are drawn from it."""

    name: str = "digits"
    batch_size: int = Field(128, ge=1, description="images a step, over all processes")
    hold_out: tuple[int | str, ...] = Field((), description="classes kept out of training, for verification")
    imbalance: Imbalance = Imbalance()
    normalise: Literal["channel", "pixel", "half", "none"] = Field(
        "channel",
        description="subtract the mean of each channel (and divide by its spread) or of each pixel; "
        "'half': (byte - 127.5) / 128",
    )
    augment: Augment = Augment()
    workers: int = Field(0, ge=0, description="processes that decode image files")


class Rule(_Section):
    """What holds for some parameters alone: those whose name, such as ``model.features.0.bias``, fits ``match``."""

    match: str = Field(description="pattern of parameter names; of several rules the first that fits counts")
    lr: float = Field(1.0, ge=0, description="factor on the learning rate")
    weight_decay: float | None = Field(None, ge=0, description="in place of the optimiser's")


class Optimiser(_Section):
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
    rules: tuple[Rule, ...] = Field((), description="other rates and decays of parameters by name")


class Train(_Section):
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
    keep_checkpoints: int = Field(2, ge=1)
    tensorboard: bool = True


class Evaluate(_Section):
    """What is measured, and how often."""

    every: int = Field(0, ge=0, description="steps between evaluations; 0 evaluates at the end only")
    batch_size: int = Field(1000, ge=1)
    metrics: tuple[str | Part, ...] = ("classification", "angles", "verification", "energy")
    recalibrate: int = Field(
        0,
        ge=0,
        description="also measure the accuracy with normalisation statistics estimated anew from so many batches",
    )
    energy: bool = Field(False, description="also write down the energy of every layer, beside its least and random")


_HOUSEKEEPING: dict[str, Any] = {
    "name": True,
    "help": True,
    "data": {"workers"},
    "train": {"tensorboard", "keep_checkpoints"},
}

_LATER: dict[tuple[str, ...], Any] = {
    ("convert",): None,
    ("orthogonal",): None,
    ("adversary",): None,
    ("loss", "rotation"): None,
    ("loss", "probability_floor"): 0.0,
    ("project",): {"every": 0, "s": 1.0},
    ("data", "augment", "crop_mode"): "zeros",
    **{("data", "augment", key): value for key, value in (("rotate", False), ("shuffle", False), ("scale", 1.0))},
    **{("data", "augment", key): 0.0 for key in ("tilt", "shift", "jitter")},
    ("data", "imbalance"): {"keep": {}, "graded": 0, "seed": 0},
    ("optimiser", "rules"): [],
    ("evaluate", "recalibrate"): 0,
    ("evaluate", "energy"): False,
    **{
        ("model", option): value
        for option, value in {
            **{"stem": "none", "kernel": 3, "pool": "2x2", "pool_last": True, "hidden": [], "fc_bn": False},
            **{"fc_act": False, "fc_bias": False, "fc_decoupled": True, "slope": None, "init": "conv"},
            **{"bn_eps": None, "bn_momentum": None},
        }.items()
    },
}
"""Keys that were added after results had been recorded, with what means "as before": that is left out of the hash."""

_LATER_OF_REGULARISERS: dict[str, Any] = {
    **{"schedule": None, "hidden_weight": 1.0, "output_weight": 1.0, "angular": False, "eps": 0.0},
}
"""The same of every regulariser."""


class Recipe(_Section):
    """Everything that determines a run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    help: str = ""
    seed: int = Field(0, ge=0, lt=2**32)
    data: Data = Data()
    model: Part = Part(name="digits-cnn")
    convert: Convert | None = Field(None, description="a decoupled operator for the layers of the model")
    project: Project = Project()
    orthogonal: Orthogonal | None = Field(None, description="rotations of the layers of the model, in place of weights")
    adversary: Adversary | None = Field(None, description="attacks on the training images")
    loss: Part = Part(name="softmax")
    regularisers: tuple[Regulariser, ...] = ()
    optimiser: Optimiser = Optimiser()
    schedule: Schedule = Schedule()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()

    _places: dict[Location, str] = PrivateAttr(default_factory=dict)

    @property
    def hash(self) -> str:
        """Twelve hex digits that change with anything that determines the result and its rows of metrics."""
        return self._hash(_HOUSEKEEPING)

    @property
    def hash_without_seed(self) -> str:
        """The same for all seeds, for results that are means over seeds."""
        return self._hash(_HOUSEKEEPING | {"seed": True})

    def _hash(self, exclude: dict[str, Any]) -> str:
        content = self.model_dump(mode="json", exclude=exclude)
        for (*sections, key), before in _LATER.items():
            section = content
            for name in sections:
                section = section[name]
            if key in section and section[key] == before:
                del section[key]
        for part in content["regularisers"]:
            for key, before in _LATER_OF_REGULARISERS.items():
                if key in part and part[key] == before:
                    del part[key]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]

    def to_yaml(self) -> str:
        """The recipe with all defaults filled in; loads back to an equal recipe."""
        return yaml.dump(self.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)

    def build(self, registry: Registry[Any], location: Location, *args: Any) -> Any:
        """Create the part at ``location`` from ``registry``, blaming a bad option on its place in the recipe."""
        part: Any = self
        for key in location:
            part = part[key] if isinstance(key, int) else getattr(part, key)
        entry = registry[part.name]
        modules = {option.name: _module_type(option.annotation) for option in entry.options}
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
            raise RecipeError(_describe(self._places, place, str(error))) from error
        except TypeError as error:  # a layer that cannot stand where it was put
            raise RecipeError(_describe(self._places, place, f"cannot be built: {error}")) from error
        except ArgumentError as error:
            raise self.blame(error, *place) from error

    def blame(self, error: ArgumentError, *location: str | int) -> RecipeError:
        """The error of an argument that came from the section at ``location``, with its place in the recipe."""
        return RecipeError(_describe(self._places, (*location, error.argument), str(error)))


def load(source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe by name (``hypersphere list recipes``) or from a file and apply ``key=value`` overrides.

    A file may start from another recipe with ``base: NAME_OR_PATH``.

    Args:
        source: Name of an embedded recipe or path of a YAML file.
        overrides: Strings like ``"loss.m=0.3"`` or ``"data.augment.flip=true"``; values are YAML.

    Example:
        >>> load("digits-arcface", ["loss.m=0.3"]).loss.options["m"]
        0.3
    """
    content, places = _read(source, ())
    for override in overrides:
        _apply(override, content, places)
    return check(content, places)


def embedded() -> dict[str, str]:
    """Names of the recipes that come with the package, with their help."""
    folder = importlib.resources.files("hypersphere.recipes")
    names = sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))
    return {name: load(name).help for name in names}


def settings() -> Iterator[tuple[str, str, str]]:
    """Key, default and help of everything in a recipe that is not an option of a named part."""
    for name, field in Recipe.model_fields.items():
        sections = [
            kind for kind in _member_types(field.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        if not isinstance(field.default, BaseModel):
            yield name, str(field.default), field.description or ""
        for section in sections:
            for key, inner in section.model_fields.items():
                default = getattr(field.default, key, None if inner.is_required() else inner.default)
                yield f"{name}.{key}", str(default), inner.description or ""


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
        raise RecipeError("\n".join(_explain(error, Recipe, content, places))) from None
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
            found.append(_describe(places, (*place, "half_space"), message))
    if recipe.optimiser.nesterov and not recipe.optimiser.momentum:
        found.append(_describe(places, ("optimiser", "nesterov"), "needs optimiser.momentum above 0"))
    if recipe.loss.options.get("reduction") == "none":
        message = "must be 'mean' or 'sum' for training, which needs one number, got 'none'"
        found.append(_describe(places, ("loss", "reduction"), message))
    if recipe.loss.options.get("sparse"):
        message = "must be false: the trainer's optimisers take dense gradients (hypersphere.optim.RowSGD takes both)"
        found.append(_describe(places, ("loss", "sparse"), message))
    weighting = "none" if recipe.convert is None else recipe.convert.options.get("weighting", "none")
    if recipe.project.every and weighting != "none":
        message = f"must be 0 with convert.weighting = {weighting!r}, where the norm of the kernels counts"
        found.append(_describe(places, ("project", "every"), message))
    adversary = recipe.adversary
    if adversary is not None and adversary.name in attacks and not _attack(adversary.name).in_step:
        message = f"must be an attack of this library's own for training, got {adversary.name!r}"
        found.append(_describe(places, ("adversary", "name"), message))
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
        found.append(_describe(places, ("orthogonal", "every"), message))
    direct = turned.name in maps and getattr(maps[turned.name].factory, "direct", False)
    if direct and ema is not None:
        message = "must not be given with orthogonal.name = 'direct': means of orthogonal matrices are not orthogonal"
        found.append(_describe(places, ("train", "ema"), message))
    return found


def _schedule_mistakes(schedule: Schedule, location: Location, steps: int, places: Mapping[Location, str]) -> list[str]:
    """What is wrong with the schedule at ``location`` of a run of so many steps."""
    found = []
    if schedule.name == "steps" and not schedule.milestones:
        found.append(_describe(places, (*location, "milestones"), "must be given for the schedule 'steps'"))
    if list(schedule.milestones) != sorted(set(schedule.milestones)):
        message = f"must increase, got {list(schedule.milestones)}"
        found.append(_describe(places, (*location, "milestones"), message))
    if schedule.warmup > steps:
        message = f"must not exceed train.steps = {steps}, got {schedule.warmup}"
        found.append(_describe(places, (*location, "warmup"), message))
    return found


# ------------------------------------------------------------------------------------------------ reading


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-3 as a number, as people mean it."""


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that the loader would read as numbers."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d+)([eE][-+]?\d+)$"),
        list("-+0123456789."),
    )


def _read(source: str | Path, seen: tuple[str, ...], where: str = "") -> tuple[dict[str, Any], dict[Location, str]]:
    """Content and places of a recipe file merged over its base; ``where`` is the place that names the file."""
    title, text = _find(source, where)
    if title in seen:
        raise RecipeError(f"{title}: recipes inherit in a circle: {' -> '.join((*seen, title))}")
    try:
        node = yaml.compose(text, Loader=_Loader)
        content = {} if node is None else yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise RecipeError(f"{title}{line}: not valid YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(content, dict):
        raise RecipeError(f"{title}: a recipe is a mapping of keys to values, got {type(content).__name__}")
    places = dict(_lines(node, (), title)) if node else {}
    base = content.pop("base", None)
    if base is None:
        return content, places
    relative = Path(os.path.normpath(Path(source).parent / str(base)))
    where = f"{places['base',]}: base: "
    parent, parent_places = _read(relative if relative.is_file() else str(base), (*seen, title), where)
    return _merge(parent, content), parent_places | places


def _find(source: str | Path, where: str) -> tuple[str, str]:
    """Title and text of a recipe."""
    path = Path(source)
    if path.is_file():
        try:
            return str(path), path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{where}{path} cannot be read as text: {error}") from error
    resource = importlib.resources.files("hypersphere.recipes") / f"{source}.yaml"
    if path.name == str(source) and resource.is_file():
        return f"recipe {source}", resource.read_text(encoding="utf-8")
    folder = importlib.resources.files("hypersphere.recipes")
    names = sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))
    hint = did_you_mean(str(source), names)
    raise RecipeError(f"{where}no recipe file or embedded recipe {str(source)!r}.{hint} Embedded: {', '.join(names)}")


def _lines(node: yaml.Node, location: Location, title: str) -> Iterable[tuple[Location, str]]:
    """The line of every key; a key given twice is an error, which YAML would let pass."""
    if isinstance(node, yaml.MappingNode):
        seen: dict[Hashable, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            place = (*location, _key(key.value))
            if key.value in seen:
                path = ".".join(map(str, place))
                raise RecipeError(f"{title}, line {line}: {path} is given twice, first on line {seen[key.value]}")
            seen[key.value] = line
            yield place, f"{title}, line {line}"
            yield from _lines(value, place, title)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*location, index), f"{title}, line {value.start_mark.line + 1}"
            yield from _lines(value, (*location, index), title)


def _key(text: str) -> str | int:
    """A key of a section, or an index of a list."""
    return int(text) if text.isdecimal() else text


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``over`` on top of ``base``, section by section."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _merge(_renamed(old, value.get("name"), key), value)
        else:
            merged[key] = value
    return merged


def _renamed(section: dict[str, Any], name: Any, kind: str | int) -> dict[str, Any]:
    """``section`` for a part called ``name``: another part does not inherit the options of the old one.

    But another operator does where it has them, too, if they mean the same for all of them.
    """
    if name is None or name == section.get("name"):
        return section
    parts = (Data, Convert, Adversary, Regulariser, Optimiser, Schedule)
    own = {key for part in parts for key in part.model_fields}
    if kind == "convert" and isinstance(name, str) and name in operators:
        common = {field.name for field in dataclasses.fields(RadiusOperator)}
        own |= common & {option.name for option in operators[name].options}
    return {key: value for key, value in section.items() if key in own}


def _apply(override: str, content: dict[str, Any], places: dict[Location, str]) -> None:
    """Put one ``key.key=value`` into the content."""
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise RecipeError(f"override {override!r}: write key=value, for example loss.m=0.3")
    try:
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as error:
        raise RecipeError(f"override {override!r}: {getattr(error, 'problem', error)}") from None
    keys: tuple[Any, ...] = tuple(map(_key, path.split(".")))
    target: Any = content
    for depth, key in enumerate(keys):
        above = ".".join(map(str, keys[:depth]))
        if not isinstance(target, dict | list):
            raise RecipeError(f"override {override!r}: {above} is a value, not a section")
        if isinstance(target, list) and not (isinstance(key, int) and key < len(target)):
            raise RecipeError(f"override {override!r}: {above} is a list of {len(target)}, got the index {key!r}")
        if depth < len(keys) - 1:
            if isinstance(target, dict) and target.get(key) is None:
                target[key] = {}  # a section that is not there, or off
            target = target[key]
    last = keys[-1]
    if last == "name" and len(keys) > 1 and isinstance(target, dict):
        # What another override gave stays, whichever of the two comes first.
        given = {place[len(keys) - 1] for place, text in places.items() if _under(place, keys[:-1], text)}
        kept = _renamed(target, value, keys[-2]) | {key: old for key, old in target.items() if key in given}
        target.clear()
        target.update(kept)
    target[last] = value
    for place in [place for place in places if place[: len(keys)] == keys]:
        del places[place]
    places[keys] = f"override {override!r}"


def _under(place: Location, section: Location, text: str) -> bool:
    """Whether ``place`` is a key of ``section`` that an override gave."""
    return len(place) > len(section) and place[: len(section)] == section and text.startswith("override ")


# ------------------------------------------------------------------------------------------------ checking


def _resolve(
    part: Any, registry: Registry[Any], location: Location, places: Mapping[Location, str], mistakes: list[str]
) -> Any:
    """The part with all its options, typed and with defaults; mistakes are appended."""
    try:
        entry = registry[part.name]
    except UnknownNameError as error:
        named = location if location[:2] == ("evaluate", "metrics") and not part.options else (*location, "name")
        mistakes.append(_describe(places, named, str(error)))
        return part
    model = _options_model(entry)
    try:
        options = model.model_validate(registry.canonical(part.options)).model_dump()
    except ArgumentError as error:
        mistakes.append(_describe(places, (*location, error.argument), str(error)))
        return part
    except pydantic.ValidationError as error:
        own = [name for name in type(part).model_fields if name != "name"]
        mistakes += _explain(error, model, part.options, places, location, extra_keys=own)
        return part
    return type(part).model_validate({**part.model_dump(exclude=set(part.options)), **options})


def _options_model(entry: Entry[Any]) -> type[BaseModel]:
    """A strict pydantic model of a factory's options."""
    fields: dict[str, Any] = {
        option.name: (_field_type(option.annotation), ... if option.required else option.default)
        for option in entry.options
    }
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    with warnings.catch_warnings():
        # An option may be called like one of pydantic's own methods; nothing here calls those.
        warnings.filterwarnings("ignore", message="Field name .* shadows an attribute")
        return pydantic.create_model(entry.name, __config__=config, **fields)


def _member_types(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type that an annotation is."""
    union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    return typing.get_args(annotation) if union else (annotation,)


def _module_type(annotation: Any) -> type[nn.Module] | None:
    """The module class an option takes (an annealer, say), if it takes one."""
    return next((c for c in _member_types(annotation) if isinstance(c, type) and issubclass(c, nn.Module)), None)


def _field_type(annotation: Any) -> Any:
    """The annotation as a recipe can express it: a module becomes the mapping of its options."""
    module = _module_type(annotation)
    if module is None:
        return annotation
    nested = _options_model(Entry(module.__name__, module, (), ()))
    others = [m for m in _member_types(annotation) if not (isinstance(m, type) and issubclass(m, nn.Module))]
    return typing.Union[(*others, nested)]


def _explain(
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
            allowed = [*_fields(model, item["loc"][:-1]), *extra_keys]
            word = str(item["loc"][-1])
            text = f"is not a known key.{did_you_mean(word, allowed)} Allowed: {', '.join(allowed)}"
        elif item["type"] == "missing":
            text = "is missing"
        else:
            shown = item["msg"].removeprefix("Value error, ")
            text = f"{shown[0].lower()}{shown[1:]}, got {item['input']!r}"
            text = text.removeprefix("input ")
        lines.append(_describe(places, (*prefix, *location), text))
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
    """The keys allowed in the section of ``model`` at ``loc``."""
    for key in loc:
        if isinstance(key, str) and key in model.model_fields:
            annotation = model.model_fields[key].annotation
            found = next(
                (
                    c
                    for c in (annotation, *typing.get_args(annotation))
                    if isinstance(c, type) and issubclass(c, BaseModel)
                ),
                None,
            )
            model = found or model
    return list(model.model_fields)


def _describe(places: Mapping[Location, str], location: Location, text: str) -> str:
    """``file, line n: key.key text``, with the line of the nearest place where the key itself has none."""
    known: list[str] = []
    for end in range(len(location), 0, -1):
        known += [places[location[:end]]] if location[:end] in places else []
        known += [place for key, place in places.items() if key[:end] == location[:end]]
    where = f"{known[0]}: " if known else ""
    path = ".".join(map(str, location))
    # Messages of ArgumentError start with the bare name of the argument.
    return f"{where}{path} {text.removeprefix(f'{location[-1]} ')}"
