"""Optimisers by name, as recipes name them.

A factory registered here takes parameter groups, each with a rate ``lr`` that is a tensor on the device and a
``weight_decay``, and gives a :class:`torch.optim.Optimizer` that follows both as they are filled in. All that a step
changes is a tensor in its ``state``, which begins as zeros; it does not wait for the device, so that a step can be
captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hypersphere.registry import Registry

Groups: TypeAlias = list[dict[str, Any]]
"""Parameter groups: each has ``name``, ``params``, ``weight_decay``, a rate ``lr`` on the device, and ``base_lr``."""

optimisers = Registry[torch.optim.Optimizer]("optimiser", positional=("groups",))
"""Makers of optimisers by name."""

Maker: TypeAlias = Callable[..., torch.optim.Optimizer]


def register(name: str, *, aliases: tuple[str, ...] = ()) -> Callable[[Maker], Maker]:
    """Decorator that adds a maker of optimisers under a name.

    Example:
        >>> @register("plain")
        ... def plain(groups: Groups) -> torch.optim.Optimizer:
        ...     '''SGD without momentum.'''
        ...     return torch.optim.SGD(groups)
        >>> "plain" in optimisers
        True
        >>> optimisers.remove("plain")
    """
    return optimisers.register(name, aliases=aliases)


def create(name: str, groups: Groups, **options: Any) -> torch.optim.Optimizer:
    """The optimiser called ``name`` of parameter groups.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> group = {"params": [weight], "weight_decay": 0.0, "lr": torch.tensor(0.1)}
        >>> type(create("adamw", [group])).__name__
        'AdamW'
    """
    return optimisers.create(name, groups, **options)


@register("sgd")
def sgd(groups: Groups, *, momentum: float = 0.9, nesterov: bool = False) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum.

    Args:
        groups: Parameter groups.
        momentum: Share of the last step that goes on.
        nesterov: Look ahead by the momentum.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.ones(2)
        >>> sgd([{"params": [weight], "lr": torch.tensor(0.1), "weight_decay": 0.0}]).step()
        >>> weight.detach()
        tensor([0.9000, 0.9000])
    """
    return torch.optim.SGD(groups, momentum=momentum, nesterov=nesterov, fused=True)


@register("adam")
def adam(groups: Groups, *, betas: tuple[float, float] = (0.9, 0.999)) -> torch.optim.Optimizer:
    """Adam, with weight decay added to the gradient.

    Args:
        groups: Parameter groups.
        betas: Decay of the means of gradients and of their squares.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.ones(2)
        >>> adam([{"params": [weight], "lr": torch.tensor(0.1), "weight_decay": 0.0}]).step()
        >>> weight.detach()
        tensor([0.9000, 0.9000])
    """
    return torch.optim.Adam(groups, betas=betas, fused=True, capturable=_on_cuda(groups))


@register("adamw")
def adamw(groups: Groups, *, betas: tuple[float, float] = (0.9, 0.999)) -> torch.optim.Optimizer:
    """Adam, with weight decay apart from the gradient.

    Args:
        groups: Parameter groups.
        betas: Decay of the means of gradients and of their squares.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.ones(2)
        >>> adamw([{"params": [weight], "lr": torch.tensor(0.1), "weight_decay": 0.0}]).step()
        >>> weight.detach()
        tensor([0.9000, 0.9000])
    """
    return torch.optim.AdamW(groups, betas=betas, fused=True, capturable=_on_cuda(groups))


def _on_cuda(groups: Iterable[dict[str, Any]]) -> bool:
    return any(isinstance(group["lr"], Tensor) and group["lr"].is_cuda for group in groups)
