"""``project:``, the norms of decoupled kernels that do not count, set back now and then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import nn

from hypersphere.nn import project_weights
from hypersphere.recipe.explain import Location
from hypersphere.recipe.hash import Later
from hypersphere.recipe.part import Keys, Layers
from hypersphere.recipe.schema import Recipe
from hypersphere.recipe.section import Section, Training, Work, sections


@sections.register("project")
class Project(Section, Keys):
    """Projection of the decoupled kernels whose norm does not count, before the first step and then again."""

    contract: ClassVar[Mapping[str, Any]] = {"recipe": ("convert.name=sphere", "project.every=2")}
    every: int = Field(0, ge=0, description="steps between projections of decoupled kernels to norm s; 0: none")
    s: float = Field(1.0, gt=0, description="norm of the projected kernels")
    layers: Annotated[Layers | None, Later(None)] = Field(
        None, description="which layers (types, include, exclude, skip); by default all that are decoupled"
    )

    @classmethod
    def field(cls) -> tuple[Any, Any]:
        """Every recipe has it."""
        return Annotated[cls, Later(cls())], cls()

    def mistakes(self, recipe: Recipe) -> Iterator[tuple[Location, str]]:
        """There is nothing to project where norms count."""
        converted = recipe.sections().get("convert")
        weighting = getattr(converted, "options", {}).get("weighting", "none")
        if self.every and weighting != "none":
            yield (
                ("project", "every"),
                f"must be 0 with convert.weighting = {weighting!r}, where the norm of the kernels counts",
            )

    def convert(self, model: Any, recipe: Recipe) -> Any:
        """The model, its kernels projected."""
        if self.every:
            with recipe.blamed("project", "layers"):
                project_weights(model, self.s, **self.choice)
        return model

    @property
    def choice(self) -> dict[str, Any]:
        """Which layers, by argument of :func:`hypersphere.nn.project_weights`."""
        return {} if self.layers is None else self.layers.choice

    def train(self, run: Training) -> Work | None:
        """The projection every so many steps."""
        return _Projection(run.model, self) if self.every else None


class _Projection(Work):
    def __init__(self, model: nn.Module, part: Project) -> None:
        self.model, self.part = model, part

    def after(self, step: int) -> None:
        if step % self.part.every == 0:
            # In place, behind the step: a captured one stays as it is.
            project_weights(self.model, self.part.s, **self.part.choice)
