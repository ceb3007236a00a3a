"""``convert:``, decoupled operators in the layers of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from hypersphere.nn import convert, operators
from hypersphere.nn.operators import RadiusOperator
from hypersphere.recipe.part import LayerChoice, Place
from hypersphere.recipe.schema import Recipe
from hypersphere.recipe.section import Section, sections
from hypersphere.registry import Registry


@sections.register("convert")
class Convert(Section, LayerChoice):
    """A decoupled operator in the model's layers: its ``name``, its options, and which layers get it.

    The keys are arguments of :func:`hypersphere.nn.convert`. The classifier is no part of the model, so by default the
    last layer is converted, too.
    """

    contract: ClassVar[Mapping[str, Any]] = {"recipe": ("convert.name=sphere",)}
    registry: ClassVar[Registry[Any]] = operators
    skip: tuple[Place, ...] = Field(("shortcut",), description="places of layers to leave alone")

    @classmethod
    def kept(cls, name: str) -> set[str]:
        """Options of operators with a radius mean the same for all of them."""
        common = {field.name for field in dataclasses.fields(RadiusOperator)}
        return common & {option.name for option in operators[name].options} if name in operators else set()

    def convert(self, model: Any, recipe: Recipe) -> Any:
        """The model with the operator in its layers."""
        return convert(model, recipe.build(operators, ("convert",)), **self.choice)
