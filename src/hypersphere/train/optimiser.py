"""Optimisers whose state and learning rate live on the device, and learning rates by step."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere.errors import ArgumentError
from hypersphere.nn import Decoupled
from hypersphere.optim import OGD
from hypersphere.recipe import Optimiser
from hypersphere.recipe.section import Groups


def parameter_groups(
    model: nn.Module,
    head: nn.Module,
    recipe: Optimiser,
    device: torch.device,
) -> Groups:
    """Parameter groups with the names that messages and logs use, each with its learning rate as a device tensor.

    What weight decay spares is in groups of its own: ``-vectors``, the ``-kernels`` of decoupled layers whose norm does
    not count, the radii and steepnesses of their ``-operators``, and the ``-rotations``, whose section has a factor on
    the learning rate and a decay for them; ``-matrices`` are the matrices of rotations themselves, which the optimiser
    has to keep orthogonal. Parameters to which a rule of the recipe applies are in the group
    ``-PATTERN``, or ``-PATTERN-vectors`` where the rule leaves the decay as it is and it spares them; a rule that
    applies to none is a mistake.
    """
    groups: Groups = []
    rules = {f"-{rule.match}{usual}": rule for rule in reversed(recipe.rules) for usual in ("-vectors", "")}
    used: set[str] = set()
    for name, module, factor in (("model", model, 1.0), ("head", head, recipe.head_lr)):
        special = _decoupled_parameters(module) | _rotation_parameters(module)
        suffixes = ("", "-vectors", "-kernels", "-operators", "-rotations", "-matrices")
        members: dict[str, list[nn.Parameter]] = {suffix: [] for suffix in (*suffixes, *reversed(rules))}
        for own_name, p in module.named_parameters():
            usual = "-vectors" if recipe.decay == "weights" and p.dim() <= 1 else ""
            fitting = [rule for rule in recipe.rules if fnmatchcase(f"{name}.{own_name}", rule.match)]
            used.update(rule.match for rule in fitting if p not in special)
            if fitting:
                usual = f"-{fitting[0].match}{usual if fitting[0].weight_decay is None else ''}"
            if p.requires_grad:
                members[special.get(p, usual)].append(p)
        for suffix, parameters in members.items():
            if parameters:
                rule = rules.get(suffix)
                decay = 0.0 if suffix else recipe.weight_decay
                base = recipe.lr * factor
                if rule is not None:
                    base *= rule.lr
                    spared = suffix != f"-{rule.match}"
                    decay = (
                        rule.weight_decay if rule.weight_decay is not None else 0.0 if spared else recipe.weight_decay
                    )
                groups.append(
                    {
                        "name": f"{name}{suffix}",
                        "params": parameters,
                        "weight_decay": decay,
                        "lr": torch.tensor(base, device=device),
                        "base_lr": base,
                        **({"orthogonal": True} if suffix == "-matrices" else {}),
                    }
                )
    for unused in sorted({rule.match for rule in recipe.rules} - used):
        raise ArgumentError(
            "rules", f"has the pattern {unused!r}, which fits no parameter of the model or the head that rules apply to"
        )
    return groups


def _decoupled_parameters(module: nn.Module) -> dict[Tensor, str]:
    """The groups of those parameters of decoupled layers that weight decay does not suit."""
    found: dict[Tensor, str] = {}
    others: set[Tensor] = set()  # a weight that another layer has, too, is decayed for its sake
    for layer in module.modules():
        if isinstance(layer, Decoupled):
            found |= {p: "-operators" for p in (layer.radius_raw, layer.k_raw) if p is not None}
        if isinstance(layer, Decoupled) and layer.operator.weighting == "none":
            found[layer.weight] = "-kernels"
        else:
            others.update(p for name, p in layer.named_parameters(recurse=False) if name == "weight")
    return {p: group for p, group in found.items() if p not in others}


def _rotation_parameters(module: nn.Module) -> dict[Tensor, str]:
    """The groups of the free parameters of rotations, of layers and of class vectors."""
    turned: list[Any] = [part for part in module.modules() if getattr(part, "is_rotation", False)]
    return {part.free: "-matrices" if part.map.direct else "-rotations" for part in turned}


def make_optimiser(groups: Groups, recipe: Optimiser) -> torch.optim.Optimizer:
    """The optimiser, fused, with all of its state created and zero.

    The state exists before the first step (rather than after it) so that a checkpoint always has somewhere to load
    into and a captured step never allocates.
    """
    optimiser: torch.optim.Optimizer
    if any(group.get("orthogonal") for group in groups):
        # The trainer looks at the drift itself: at the same steps in a resumed run, and outside a captured one.
        options: dict[str, Any] = {"form": recipe.name, "retraction": "exact", "check_every": 0}
        optimiser = OGD(groups, momentum=recipe.momentum, nesterov=recipe.nesterov, betas=recipe.betas, **options)
    elif recipe.name == "sgd":
        optimiser = torch.optim.SGD(groups, momentum=recipe.momentum, nesterov=recipe.nesterov, fused=True)
    else:
        kind = torch.optim.Adam if recipe.name == "adam" else torch.optim.AdamW
        optimiser = kind(groups, betas=recipe.betas, fused=True, capturable=_on_cuda(groups))
    _create_state(optimiser)
    return optimiser


def _on_cuda(groups: Iterable[dict[str, object]]) -> bool:
    return any(isinstance(group["lr"], Tensor) and group["lr"].is_cuda for group in groups)


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
