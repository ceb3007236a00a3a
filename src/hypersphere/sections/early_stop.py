"""``early_stop:``, weights that stay as they are once the loss of samples that are not trained on rises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from hypersphere.attacks import evaluating
from hypersphere.data import TensorSplit
from hypersphere.recipe.explain import RecipeError
from hypersphere.recipe.part import Keys
from hypersphere.recipe.section import Section, Term, Training, Work, sections


@sections.register("early-stop")
class EarlyStop(Section, Keys):
    """Learning that ends by the published rule of GCN; the steps that are left change no weight.

    It ends with the first step after ``patience`` + 1 steps whose loss is above the mean of the ``patience`` losses
    before it. The loss is the cross-entropy of the validation nodes of a graph, or of the images that
    ``data.validation`` keeps back, with all that training adds to it: as published the penalty of weight decay, and the
    terms of other sections. Without these it would rise, and learning end, because an energy lets weights grow. From
    then on the learning rates are 0: at its end the run has the test accuracy of that step.
    """

    contract: ClassVar[Mapping[str, Any]] = {"recipe": ("early_stop.patience=1", "data.validation=200")}
    patience: int = Field(10, ge=1, description="losses in the mean that a loss must not exceed")

    def train(self, run: Training) -> Work:
        """The loss after every step, and the end of learning."""
        return _Stop(run, self)


class _Stop(Work):
    def __init__(self, run: Training, part: EarlyStop) -> None:
        self.run, self.part = run, part
        samples, labels = _validation(run)
        self.seen, self.labels = samples.to(run.device), labels.to(run.device)
        self.losses = torch.full((part.patience,), torch.nan, device=run.device)
        self.end = torch.zeros((), dtype=torch.int64, device=run.device)  # the last step that learned; 0: not yet
        self.ended = 0  # the same on the host
        self.added: Mapping[str, Term] = {}

    def joined(self, terms: Mapping[str, Term]) -> None:
        self.added = terms

    def start(self, optimiser: torch.optim.Optimizer) -> None:
        self.groups = optimiser.param_groups

    def state(self) -> Mapping[str, Tensor]:
        return {"losses": self.losses, "end": self.end}

    def restored(self, state: Mapping[str, Tensor]) -> None:
        self.ended = int(self.end)

    def before(self, step: int, rate: float) -> None:
        if self.ended:
            for group in self.groups:
                group["lr"].zero_()

    def after(self, step: int) -> None:
        if self.ended:
            return
        loss = self._loss()
        if step > self.part.patience + 1 and bool(loss > self.losses.mean()):
            self.ended = step
            self.end.fill_(step)
        self.losses.copy_(torch.cat([self.losses[1:], loss.view(1)]))

    @torch.no_grad()
    def _loss(self) -> Tensor:
        size = self.run.recipe.evaluate.batch_size
        with evaluating(self.run.model, self.run.head):
            scores = [
                self.run.head.logits(self.run.model(self.run.preprocess(part)))  # type: ignore[operator]
                for part in self.seen.split(size)
            ]
        loss = F.cross_entropy(torch.cat(scores).float(), self.labels) + sum(term() for term in self.added.values())
        for group in self.groups:
            for weight in group["params"] if group["weight_decay"] else ():
                loss = loss + group["weight_decay"] / 2 * weight.float().square().sum()
        return loss

    def logged(self) -> Mapping[str, float]:
        return {"early_stop": float(self.ended)}


def _validation(run: Training) -> tuple[Tensor, Tensor]:
    """Samples that are neither trained on nor tested, and their labels."""
    context = run.data.context
    if {"labels", "validation"} <= context.keys():
        return context["validation"], context["labels"][context["validation"]]
    if run.recipe.data.validation and isinstance(run.data.test, TensorSplit):
        return run.data.test.images, run.data.test.labels
    name = run.recipe.data.name
    raise RecipeError(f"early_stop needs validation nodes or data.validation, and {name!r} has neither")
