"""``orthogonal:``, rotations of the layers of the model in place of their weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field

from hypersphere import orthogonal
from hypersphere.optim import OGD
from hypersphere.optimisers import Groups
from hypersphere.orthogonal import maps
from hypersphere.recipe.explain import Location
from hypersphere.recipe.hash import Later
from hypersphere.recipe.part import LayerChoice
from hypersphere.recipe.schema import Recipe
from hypersphere.recipe.section import Section, Term, Training, Work, sections
from hypersphere.recipe.seeds import derive_seed
from hypersphere.registry import Registry

RETRACT_EVERY = 100
"""Steps between two retractions of the matrices of rotations."""


@sections.register("orthogonal")
class Orthogonal(Section, LayerChoice):
    """Orthogonal training of the model's layers: the ``name`` of a map, its options, and what is rotated how.

    Most keys are arguments of :func:`hypersphere.orthogonal.apply`. The classifier is no part of the model, so all
    layers are chosen by default.
    """

    registry: ClassVar[Registry[Any]] = maps
    contract: ClassVar[Mapping[str, Any]] = {"recipe": ("orthogonal={name: cayley, sample: 0.5, every: 1}",)}
    init: Literal["kaiming", "xavier", "normal"] | None = Field(None, description="draw the neurons anew")
    mean: float = Field(0.0, description="mean of the numbers that init draws")
    unit_norm: bool = Field(False, description="set the norms of neurons to gain")
    gain: float = Field(1.0, gt=0, description="factor on the neurons")
    refine: Annotated[int, Field(ge=0)] | dict[str, Any] = Field(
        0, description="steps that minimise the energy of the neurons before training, or options of energy.refine"
    )
    start: Literal["identity", "normal"] = Field("identity", description="first value of the unconstrained parameters")
    learn_neurons: bool = Field(False, description="train the neurons, too")
    blocks: int = Field(1, ge=1, description="blocks on the diagonal of a rotation")
    share_blocks: bool = Field(False, description="one block for all places on the diagonal")
    sample: float | None = Field(None, gt=0, description="coordinates rotated at a time, a share below 1 or a number")
    sampling: Literal["uniform", "partition", "blocks", "channels"] = Field(
        "uniform", description="how the coordinates to rotate are drawn"
    )
    sides: Literal["in", "both"] = Field("in", description="'both' rotates the outputs, too")
    every: int = Field(0, ge=0, description="steps between two draws of coordinates; 0: never")
    lr: float = Field(1.0, ge=0, description="factor on the learning rate of rotations; 0: neurons stay as drawn")
    weight_decay: float = Field(0.0, ge=0, description="of the unconstrained parameters of rotations")
    penalty: float = Field(
        0.0, ge=0, description="weight of the distance of unconstrained matrices from orthogonal ones"
    )
    penalty_squared: bool = Field(True, description="the squared distance")
    retract: Annotated[bool, Later(True)] = Field(
        True,
        description="every hundred steps go on from P = R where the scale of P changes nothing but the size of steps",
    )

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of :func:`hypersphere.orthogonal.apply` beside the map."""
        others = {"name", "every", "lr", "weight_decay", "penalty", "penalty_squared", "retract"}
        keys = [key for key in type(self).model_fields if key not in others]
        return {key: value for key in keys if (value := getattr(self, key)) is not None} | self.choice

    def mistakes(self, recipe: Recipe) -> Iterator[tuple[Location, str]]:
        """Coordinates are drawn where some are rotated at a time; means of orthogonal matrices are not orthogonal."""
        if bool(self.every) != (self.sample is not None):
            message = "must be 0 without orthogonal.sample: there is nothing to draw"
            if not self.every:
                message = "must be given with orthogonal.sample: the steps between two draws, such as 100"
            yield ("orthogonal", "every"), message
        direct = self.name in maps and getattr(maps[self.name].factory, "direct", False)
        if direct and recipe.train.ema is not None:
            means = "means of orthogonal matrices are not orthogonal"
            yield ("train", "ema"), f"must not be given with orthogonal.name = 'direct': {means}"

    def rotate(self, model: Any, recipe: Recipe) -> Any:
        """The model with rotations in its layers."""
        seed = derive_seed(recipe.seed, "rotations")
        return orthogonal.apply(model, recipe.build(maps, ("orthogonal",)), seed=seed, **self.arguments)

    def train(self, run: Training) -> Work:
        """Rates of rotations, the penalty of unconstrained ones, new coordinates, and the upkeep of matrices."""
        return _Rotations(run, self)

    @classmethod
    def without(cls, run: Training) -> Work:
        """A head may have rotations, too."""
        return _Upkeep(run)


class _Upkeep(Work):
    """Sets right what rounding has done to the matrices of model and head, and to those of an optimiser."""

    scale = True
    """Whether the unconstrained matrices of the model lose theirs."""

    def __init__(self, run: Training) -> None:
        self.run = run

    def start(self, optimiser: torch.optim.Optimizer) -> None:
        self.optimiser = optimiser

    def after(self, step: int) -> None:
        if step % RETRACT_EVERY == 0:
            orthogonal.retract(self.run.model, scale=self.scale)
            orthogonal.retract(self.run.head)
            if isinstance(self.optimiser, OGD):
                self.optimiser.orthogonalise()


class _Rotations(_Upkeep):
    r"""Orthogonal training.

    A row of the metrics with the split ``orthogonality`` holds :math:`\|R^T R - I\|_F / \sqrt{d}` of each layer as
    ``orthogonality/LAYER`` and :math:`\|R - I\|_F / \sqrt{d}` as ``moved/LAYER``.
    """

    split = "orthogonality"

    def __init__(self, run: Training, part: Orthogonal) -> None:
        super().__init__(run)
        self.part, self.scale = part, part.retract

    def terms(self) -> Mapping[str, Term]:
        if not self.part.penalty:
            return {}
        distance = orthogonal.Penalty(squared=self.part.penalty_squared)
        return {"orthogonality": Term(distance, self.run.model, self.part.penalty).to(self.run.device)}

    def group(self, groups: Groups) -> None:
        for group in groups:
            if group["name"].endswith(("-rotations", "-matrices")):
                group["base_lr"] *= self.part.lr
                group["lr"].fill_(group["base_lr"])
            if group["name"].endswith("-rotations"):
                group["weight_decay"] = self.part.weight_decay

    def start(self, optimiser: torch.optim.Optimizer) -> None:
        super().start(optimiser)
        if self.part.every:
            seed = derive_seed(self.run.recipe.seed, "coordinates")
            self.resampling = orthogonal.Resampling(self.run.model, self.part.every, optimiser, seed)

    def after(self, step: int) -> None:
        if self.part.every and step % self.part.every == 0:
            self.resampling.draw(step // self.part.every)
            self.run.replaced(self.resampling.parameters())  # these rotate other coordinates now
        super().after(step)

    def measured(self, step: int) -> Mapping[str, Any]:
        row: dict[str, Any] = {}
        for layer in orthogonal.check(self.run.model).rows:
            row |= {f"orthogonality/{layer.name}": layer.error, f"moved/{layer.name}": layer.moved}
        return row
