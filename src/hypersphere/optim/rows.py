"""Optimisation of the few rows of a weight that have a gradient, as those of heads with very many classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hypersphere.errors import ArgumentError, check_range


class RowSGD(Optimizer):
    r"""SGD with momentum and weight decay that touches only the rows that have a gradient.

    For parameters with a sparse gradient (a head with ``sample_rate`` below 1 and ``sparse=True``) the rows of the
    gradient are updated exactly as :class:`torch.optim.SGD` would, and all others are left alone, with their momentum:
    a step costs what its sampled classes cost. Parameters with a dense gradient are updated as usual, so that one
    optimiser serves a whole model.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        momentum: Momentum.
        weight_decay: Weight decay, added to the gradient.
        nesterov: Nesterov momentum.

    Example:
        >>> import hypersphere as hs
        >>> head = hs.losses.CosFace(8, 1000, sample_rate=0.1, sparse=True)
        >>> optimiser = RowSGD(head.parameters(), lr=0.1, momentum=0.9)
        >>> head(torch.randn(4, 8), torch.tensor([1, 2, 3, 4])).backward()
        >>> optimiser.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        check_range("lr", float(lr), 0)
        check_range("momentum", momentum, 0)
        check_range("weight_decay", weight_decay, 0)
        if nesterov and not momentum:
            raise ArgumentError("nesterov", "needs momentum above 0")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if group["momentum"] and "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient = parameter.grad
        assert gradient is not None
        if not gradient.is_sparse:
            parameter.sub_(group["lr"] * self._direction(parameter, gradient, state.get("momentum_buffer"), group))
            return
        gradient = gradient if gradient.is_coalesced() else gradient.coalesce()
        rows, values = gradient._indices()[0], gradient._values()
        buffer = state["momentum_buffer"][rows] if group["momentum"] else None
        present = parameter[rows]
        parameter.index_copy_(0, rows, present - group["lr"] * self._direction(present, values, buffer, group))
        if buffer is not None:
            state["momentum_buffer"].index_copy_(0, rows, buffer)

    @staticmethod
    def _direction(values: Tensor, gradient: Tensor, buffer: Tensor | None, group: dict[str, Any]) -> Tensor:
        """Where to go; the momentum buffer is updated in place."""
        gradient = gradient.add(values, alpha=group["weight_decay"])
        if buffer is None:
            return gradient
        buffer.mul_(group["momentum"]).add_(gradient)
        return gradient.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
