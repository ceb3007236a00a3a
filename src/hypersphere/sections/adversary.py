"""``adversary:``, adversarial training."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from hypersphere.attacks import AdversarialBatch, Attack, Scaling, attacks, evaluating
from hypersphere.recipe.explain import Location, RecipeError
from hypersphere.recipe.part import Part
from hypersphere.recipe.schema import Recipe
from hypersphere.recipe.section import Section, Training, Work, sections
from hypersphere.registry import Registry


@sections.register("adversary")
class Adversary(Section, Part):
    """Adversarial training: the ``name`` of an attack, its options, and how much of every batch it changes."""

    registry: ClassVar[Registry[Any]] = attacks
    contract: ClassVar[Mapping[str, Any]] = {"recipe": ("adversary.name=fgsm",)}
    share: float = Field(0.5, gt=0, le=1, description="of the batch that is attacked, by the model as it is")

    def mistakes(self, recipe: Recipe) -> Iterator[tuple[Location, str]]:
        """Attacks of other libraries are no device work."""
        if self.name in attacks and not typing.cast(type[Attack], attacks[self.name].factory).in_step:
            yield (
                ("adversary", "name"),
                f"must be an attack of this library's own for training, got {self.name!r}",
            )

    def train(self, run: Training) -> Work:
        """The attack on a share of every batch."""
        data = run.recipe.data
        if not run.data.train.holds_images:
            raise RecipeError(f"adversary must be left out for {data.name!r}, whose samples are no images")
        if data.normalise == "pixel" and (data.augment.crop or data.augment.flip or data.augment.vertical_flip):
            message = "where images are cropped or flipped together with the mean image: their pixels are not known"
            raise RecipeError(f"data.normalise must not be 'pixel' with an adversary {message}")
        scaling = typing.cast(Scaling, run.preprocess)
        return _Attacks(run, AdversarialBatch(run.recipe.build(attacks, ("adversary",)), self.share, scaling))


class _Attacks(Work):
    def __init__(self, run: Training, attack: AdversarialBatch) -> None:
        self.model, self.head, self.attack = run.model, run.head, attack

    def samples(self, samples: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        with evaluating(self.model, self.head):
            return self.attack(self._logits, samples, labels, generator)

    def _logits(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head.logits(self.model(images))  # type: ignore[operator]
        return scores
