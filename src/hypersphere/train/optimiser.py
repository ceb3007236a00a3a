"""Optimisers whose state and learning rate live on the device, and learning rates by step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hypersphere import optim
from hypersphere.errors import ArgumentError
from hypersphere.neurons import is_sharded
from hypersphere.optim import OGD, row_parameters
from hypersphere.optim.orthogonal import FORMS
from hypersphere.optim.rows import BY_NAME
from hypersphere.optimisers import Groups, optimisers
from hypersphere.recipe import Optimiser


def parameter_groups(
    model: nn.Module,
    head: nn.Module,
    recipe: Optimiser,
    device: torch.device,
) -> Groups:
    """Parameter groups with the names that messages and logs use, each with its learning rate as a device tensor.

    They are those of :func:`hypersphere.optim.parameter_groups`, with ``sparse`` where a gradient holds some rows
    alone, and without torch's fused operations where a parameter is sharded, which these do not know; a section may
    change rates and decays of its own.
    """
    rows = set(row_parameters(nn.ModuleList([model, head])).values())
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
    return [
        {**group, "lr": torch.tensor(group["lr"], device=device), "base_lr": group["lr"]}
        | ({} if rows.isdisjoint(group["params"]) else {"sparse": True})
        | ({"fused": False, "foreach": False} if any(map(is_sharded, group["params"])) else {})
        for group in groups
    ]


def make_optimiser(groups: Groups, recipe: Optimiser) -> torch.optim.Optimizer:
    """The optimiser, fused, with all of its state created and zero.

    The state exists before the first step (rather than after it) so that a checkpoint always has somewhere to load
    into and a captured step never allocates.
    """
    optimiser: torch.optim.Optimizer
    orthogonal, sparse = (any(group.get(key) for group in groups) for key in ("orthogonal", "sparse"))
    if sparse and recipe.name not in BY_NAME:
        raise ArgumentError("name", f"must be one of {', '.join(BY_NAME)} for sparse gradients, got {recipe.name!r}")
    if sparse and orthogonal:
        why = "has no form for sparse gradients where matrices of rotations are trained themselves"
        raise ArgumentError("name", f"{why}, got {recipe.name!r}")
    if orthogonal:
        if recipe.name not in FORMS:
            allowed = f"must be one of {', '.join(FORMS)} where matrices of rotations are trained themselves"
            raise ArgumentError("name", f"{allowed}, got {recipe.name!r}")
        # The trainer looks at the drift itself: at the same steps in a resumed run, and outside a captured one.
        options: dict[str, Any] = {"form": recipe.name, "retraction": "exact", "check_every": 0}
        optimiser = OGD(groups, momentum=recipe.momentum, nesterov=recipe.nesterov, betas=recipe.betas, **options)
    else:
        entry = optimisers[recipe.name]
        maker = BY_NAME[recipe.name] if sparse else entry.factory
        optimiser = maker(groups, **recipe.arguments_of(entry))
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
