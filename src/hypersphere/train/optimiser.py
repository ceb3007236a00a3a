"""Optimisers whose state and learning rate live on the device, and learning rates by step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hypersphere import optim
from hypersphere.errors import ArgumentError
from hypersphere.optim import OGD
from hypersphere.optim.orthogonal import FORMS
from hypersphere.optimisers import Groups, optimisers
from hypersphere.recipe import Optimiser


def parameter_groups(
    model: nn.Module,
    head: nn.Module,
    recipe: Optimiser,
    device: torch.device,
) -> Groups:
    """Parameter groups with the names that messages and logs use, each with its learning rate as a device tensor.

    They are those of :func:`hypersphere.optim.parameter_groups`; a section may change rates and decays of its own.
    """
    groups = optim.parameter_groups(
        model,
        head,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        head_lr=recipe.lr * recipe.head_lr,
        decay=recipe.decay,
        rules=[
            optim.Rule(rule.match, rule.lr, rule.weight_decay, **({} if rule.layers is None else rule.layers.choice))
            for rule in recipe.rules
        ],
    )
    return [{**group, "lr": torch.tensor(group["lr"], device=device), "base_lr": group["lr"]} for group in groups]


def make_optimiser(groups: Groups, recipe: Optimiser) -> torch.optim.Optimizer:
    """The optimiser, fused, with all of its state created and zero.

    The state exists before the first step (rather than after it) so that a checkpoint always has somewhere to load
    into and a captured step never allocates.
    """
    optimiser: torch.optim.Optimizer
    if any(group.get("orthogonal") for group in groups):
        if recipe.name not in FORMS:
            allowed = f"must be one of {', '.join(FORMS)} where matrices of rotations are trained themselves"
            raise ArgumentError("name", f"{allowed}, got {recipe.name!r}")
        # The trainer looks at the drift itself: at the same steps in a resumed run, and outside a captured one.
        options: dict[str, Any] = {"form": recipe.name, "retraction": "exact", "check_every": 0}
        optimiser = OGD(groups, momentum=recipe.momentum, nesterov=recipe.nesterov, betas=recipe.betas, **options)
    else:
        entry = optimisers[recipe.name]
        optimiser = entry.factory(groups, **recipe.arguments_of(entry))
    _create_state(optimiser)
    return optimiser


def _create_state(optimiser: torch.optim.Optimizer) -> None:
    """Take one step with zero gradients and rate, which changes no parameter, and set the state back to zero."""
    rates = [group["lr"].clone() for group in optimiser.param_groups]
    for group in optimiser.param_groups:
        group["lr"].zero_()
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    for group, rate in zip(optimiser.param_groups, rates, strict=True):
        group["lr"].copy_(rate)
    for state in optimiser.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()
