r"""An optimiser of your own: what a training step does with the gradients.

hypersphere list optimisers --plugin my_name.py
hypersphere train digits-softmax --plugin my_name.py 'optimiser={name: my-name, lr: 0.001, decay_rate: 0.9}'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hypersphere.errors import check_range
from hypersphere.optimisers import Groups, optimisers


class Sign(torch.optim.Optimizer):
    """Steps by the sign of a running mean of gradients, as those of Lion; all of a step is work of the device."""

    def __init__(self, groups: Groups, decay_rate: float) -> None:
        super().__init__(groups, {"lr": 1e-3, "weight_decay": 0.0})
        self.decay_rate = decay_rate

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step; rates are tensors that change from step to step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"], group["weight_decay"])

    def _update(self, parameter: Tensor, gradient: Tensor, lr: Tensor | float, weight_decay: float) -> None:
        state = self.state[parameter]
        if not state:  # begins as zeros
            state["mean"] = torch.zeros_like(parameter)
        state["mean"].lerp_(gradient, 1 - self.decay_rate)
        parameter.mul_(1 - lr * weight_decay).sub_(lr * state["mean"].sign())


@optimisers.register("my-name")
def my_name(groups: Groups, *, decay_rate: float = 0.95) -> torch.optim.Optimizer:
    """Steps of one length for every number, in the direction of a running mean of gradients.

    Args:
        groups: Parameter groups, each with ``params``, ``lr`` and ``weight_decay``.
        decay_rate: Of the running mean.
    """
    check_range("decay_rate", decay_rate, 0, 1)
    return Sign(groups, decay_rate)
