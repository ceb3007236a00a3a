"""Everything that a step changes, as named tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere.losses.sharding import Shards, local
from hypersphere.recipe import Recipe, Work
from hypersphere.runs import load_checkpoint
from hypersphere.train.step import Step


def state_of(weights: Mapping[str, Tensor], works: Mapping[str, Work], step: Step) -> dict[str, Tensor]:
    """Every tensor that a step changes, by name: weights, what sections hold, the optimiser's state, the loss scale.

    Args:
        weights: What a trained model consists of.
        works: What sections do in training; the names of their tensors begin with the section.
        step: The step.
    """
    found = dict(weights)
    for key, work in works.items():
        found |= {f"{key}.{name}": value for name, value in work.state().items()}
    names: dict[Tensor, str] = {tensor: name for name, tensor in found.items() if isinstance(tensor, nn.Parameter)}
    for parameter, values in step.optimiser.state.items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                found[f"optimiser.{names[parameter]}.{key}"] = value
    scaler = step.scaler
    if scaler.is_enabled():
        assert scaler._scale is not None and scaler._growth_tracker is not None
        found |= {"scaler.scale": scaler._scale, "scaler.growth": scaler._growth_tracker}
    return found


def load_divided(folder: Path, into: Mapping[str, Tensor], recipe: Recipe) -> dict[str, Any]:
    """Copy a checkpoint into tensors of which some are divided among processes; see :func:`load_checkpoint`.

    A checkpoint holds whole tensors, so that any number of processes goes on from it.
    """
    places = {name: Shards.of(tensor) for name, tensor in into.items()}
    every = {
        name: tensor if places[name] is None else torch.empty(tensor.shape, dtype=tensor.dtype)
        for name, tensor in into.items()
    }
    state = load_checkpoint(folder, every, recipe)
    with torch.no_grad():
        for name, shards in places.items():
            if shards is not None:
                local(into[name]).copy_(every[name][slice(*shards.bounds())])
    return state


def tell_restored(works: Mapping[str, Work], state: Mapping[str, Tensor]) -> None:
    """Tell sections that their tensors have the values of a checkpoint."""
    for key, work in works.items():
        prefix = f"{key}."
        work.restored({name.removeprefix(prefix): v for name, v in state.items() if name.startswith(prefix)})
