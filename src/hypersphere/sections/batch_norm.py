"""``batch_norm:``, the momentum of batch normalisation over the steps of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hypersphere.recipe.explain import Location, RecipeError
from hypersphere.recipe.part import Keys
from hypersphere.recipe.schema import Recipe
from hypersphere.recipe.section import Section, Training, Work, sections


@sections.register("batch-norm")
class BatchNorm(Section, Keys):
    r"""A momentum of batch normalisation that decays: the weight of a new batch in the running statistics.

    .. math:: \max(\text{floor},\ \text{momentum} \cdot \text{factor}^{\lfloor t / \text{every} \rfloor})

    at step t, in place of the momentum of every layer. PointNet has the defaults (its decay is 1 minus that), with
    ``every`` 200,000 clouds: 6,250 steps of 32.

    Example:
        >>> [BatchNorm(every=10).at(step) for step in (0, 9, 10, 30, 1000)]
        [0.5, 0.5, 0.25, 0.0625, 0.01]
    """

    contract: ClassVar[Mapping[str, Any]] = {"recipe": ("batch_norm.every=2",)}
    momentum: float = Field(0.5, gt=0, le=1, description="at the start")
    factor: float = Field(0.5, gt=0, le=1, description="what it is multiplied by")
    every: int = Field(ge=1, description="steps between two multiplications")
    floor: float = Field(0.01, ge=0, le=1, description="least momentum")

    def at(self, step: int) -> float:
        """The momentum of a step, counted from 0."""
        return max(self.floor, self.momentum * self.factor ** (step // self.every))

    def mistakes(self, recipe: Recipe) -> Iterator[tuple[Location, str]]:
        """It cannot start below its floor."""
        if self.floor > self.momentum:
            yield ("batch_norm", "floor"), f"must not exceed batch_norm.momentum = {self.momentum}, got {self.floor}"

    def train(self, run: Training) -> Work:
        """The running statistics of every layer, updated with the momentum of the step."""
        return _Momentum(run, self)


class _Momentum(Work):
    """Running statistics that follow a number on the device.

    Torch takes the momentum as a number of Python, which a captured step would keep for ever. So the layers write the
    statistics of the batch alone (momentum 1), and hooks around them put what was there before back in.
    """

    def __init__(self, run: Training, part: BatchNorm) -> None:
        self.part = part
        self.momentum = torch.tensor(part.at(0), device=run.device)
        layers = [layer for module in (run.model, run.head) for layer in module.modules()]
        found = [layer for layer in layers if isinstance(layer, _BatchNorm) and layer.running_mean is not None]
        if not found:
            raise RecipeError(
                f"batch_norm must be left out for model.name = {run.recipe.model.name!r}, which has no batch "
                "normalisation with running statistics"
            )
        for layer in found:
            layer.momentum = 1.0
            around = _Around(self.momentum, _statistics(layer))
            layer.register_forward_pre_hook(around.keep)
            layer.register_forward_hook(around.mix)

    def before(self, step: int, rate: float) -> None:
        self.momentum.fill_(self.part.at(step))

    def logged(self) -> Mapping[str, float]:
        return {"batch_norm_momentum": float(self.momentum)}


class _Around:
    """What happens around the forward pass of a layer in training; statistics that are estimated anew are let alone."""

    def __init__(self, momentum: Tensor, statistics: tuple[Tensor, Tensor]) -> None:
        self.momentum = momentum
        self.kept = tuple(value.detach().clone() for value in statistics)

    def keep(self, layer: nn.Module, inputs: Any) -> None:
        if layer.training and layer.momentum == 1.0:
            for kept, now in zip(self.kept, _statistics(layer), strict=True):
                kept.copy_(now)

    def mix(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        if layer.training and layer.momentum == 1.0:
            for kept, now in zip(self.kept, _statistics(layer), strict=True):
                now.copy_(kept + (now - kept) * self.momentum)


def _statistics(layer: Any) -> tuple[Tensor, Tensor]:
    """Running mean and variance.

    As ``data``: the layer keeps both for its backward pass, which in training does not read them, and torch would
    take them for values that were overwritten.
    """
    return layer.running_mean.data, layer.running_var.data
