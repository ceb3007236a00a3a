"""Sharded parameters: what of ``torch.distributed.tensor`` and ``fully_shard`` the rest of the package has to know.

Under ``fully_shard`` a parameter is whole inside of the forward pass of the module that was wrapped, and a ``DTensor``
everywhere else, of which each process holds a part. What reads a parameter outside of a forward pass takes it by
:func:`hypersphere.neurons.whole`, and what changes one writes by :func:`put`. Neither does anything else to an ordinary
tensor. Reading is a collective operation: all processes have to read the same parameters in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hypersphere.errors import ArgumentError
from hypersphere.neurons import is_sharded, whole
from hypersphere.selection import check_model

TAKE_A_WHOLE_ONE = (
    "load its state (torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True) into one "
    "that was made alike and is not sharded, and take that"
)
"""What to do where the layers of a sharded model would have to become others."""


def local(tensor: Tensor) -> Tensor:
    """The part that this process holds, in the same memory and without a gradient; of an ordinary tensor all of it.

    Example:
        >>> local(nn.Parameter(torch.ones(2)))
        tensor([1., 1.])
    """
    bare = tensor.detach()
    found: Tensor = bare.to_local() if is_sharded(bare) else bare  # type: ignore[attr-defined]
    return found


@torch.no_grad()
def put(place: Tensor, value: Tensor) -> None:
    """Write a value into a tensor in place, of one that processes hold together the own part.

    Args:
        place: The tensor.
        value: The whole value, the same on all processes, or one that is sharded as ``place`` is.

    Example:
        >>> place = torch.zeros(2)
        >>> put(place, torch.ones(2))
        >>> place
        tensor([1., 1.])
    """
    if is_sharded(place) and not is_sharded(value):
        sharded: Any = place
        same: Any = alongside(value.to(place.device, place.dtype), place)
        value = same.redistribute(sharded.device_mesh, sharded.placements)  # which cuts, and sends nothing
    place.copy_(value)


def alongside(value: Tensor, other: Tensor) -> Tensor:
    """A tensor that is the same on all processes as one that another can be multiplied by, which may be sharded.

    Example:
        >>> alongside(torch.ones(2), torch.zeros(2))
        tensor([1., 1.])
    """
    if is_sharded(value) or not is_sharded(other):
        return value
    from torch.distributed.tensor import DTensor, Replicate  # noqa: PLC0415 (slow, and there already)

    sharded: Any = other
    mesh = sharded.device_mesh
    found: Tensor = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return found


def gathered(part: Tensor, like: Tensor) -> Tensor:
    """What all processes have found for their parts of a tensor, one behind the other as the parts lie.

    Args:
        part: What this process has found, ``(first axes of the own part of like)``.
        like: The tensor, none of whose other axes is sharded.

    Returns:
        ``(first axes of like)``; of an ordinary tensor ``part`` itself.

    Example:
        >>> gathered(torch.ones(2), torch.ones(2, 3, 3))
        tensor([1., 1.])
    """
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    sharded: Any = like
    shape = like.shape[: part.dim()]
    stride = torch.empty(shape, device="meta").stride()
    parts = DTensor.from_local(
        part.contiguous(), sharded.device_mesh, sharded.placements, run_check=False, shape=shape, stride=stride
    )
    return whole(parts)


def is_wrapped(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called with a module.

    Example:
        >>> is_wrapped(nn.Linear(3, 4))
        False
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # slow to import, and nothing is wrapped before
    return isinstance(module, getattr(fsdp, "FSDPModule", ()))


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before ``fully_shard``.

    Example:
        >>> plain_class(nn.Linear(3, 4)).__name__
        'Linear'
    """
    return type(module).__mro__[2] if is_wrapped(module) else type(module)


def settle(model: nn.Module) -> None:
    """Let a model have its own, sharded parameters, as after a backward pass.

    After a forward pass alone some are whole, and what would be written into these would be lost.

    Example:
        >>> settle(nn.Linear(3, 4))
    """
    check_model(model)
    for module in model.modules():
        if is_wrapped(module):
            module.reshard()  # type: ignore[operator]


def check_unsharded(model: nn.Module, instead: str) -> None:
    """Raise for a model that is sharded, of which parameters can be neither added nor taken away.

    Args:
        model: The model.
        instead: What to do instead.

    Example:
        >>> check_unsharded(nn.Linear(3, 4), "convert it before fully_shard()")
    """
    if any(map(is_wrapped, model.modules())) or any(map(is_sharded, model.parameters())):
        raise ArgumentError("model", f"must not be sharded, got one that processes hold together: {instead}")


@contextmanager
def writes(model: nn.Module) -> Iterator[bool]:
    """Whether this process is to write a file: one of those that hold a sharded model together. The others wait.

    Args:
        model: The model.

    Example:
        >>> with writes(nn.Linear(3, 4)) as here:
        ...     here
        True
    """
    settle(model)
    sharded: Any = next(filter(is_sharded, model.parameters()), None)
    if sharded is None:
        yield True
        return
    mesh = sharded.device_mesh
    try:
        yield not any(mesh.get_coordinate())
    finally:
        for axis in range(mesh.ndim):
            dist.barrier(mesh.get_group(axis))
