r"""Values of weights that are sharded over processes: gathered one by one, their pairs shared out.

Every process of the mesh gathers all rows of a weight, finds value and gradient, keeps its own shard of the gradient
and lets the rest go: however many layers there are, one of them is held at a time, and the backward pass needs no other
process. What is large (:mod:`hypersphere.energy.pairs`) is computed once by all processes together, not once by each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from hypersphere.energy.projections import uncompiled
from hypersphere.geometry import full_precision, transformed
from hypersphere.neurons import is_sharded, whole

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Mesh: TypeAlias = "DeviceMesh | None"
"""The processes that compute the same value, of whom each may take a part of the work; ``None`` for one alone."""


def mesh_of(weight: Any) -> Mesh:
    """The processes that hold a weight; ``None`` for one that is not sharded.

    Example:
        >>> mesh_of(torch.ones(2)) is None
        True
    """
    return weight.device_mesh if is_sharded(weight) else None


class _OfShards(torch.autograd.Function):
    """Forward finds value and gradient; a second derivative goes through the same value of a graph that is kept."""

    @staticmethod
    def forward(ctx: Any, value: Callable[[Tensor], Tensor], weight: Any, *others: Tensor) -> Tensor:
        leaf = whole(weight.detach()).detach().requires_grad_(weight.requires_grad)
        wanted = [index for index, x in enumerate((leaf, *others)) if x.requires_grad]
        inputs = [(leaf, *others)[index] for index in wanted]
        with (
            torch.enable_grad(),
            full_precision(leaf),
        ):  # autocast is for forward passes, and this is a backward one, too
            total = value(leaf)
            gradients = torch.autograd.grad(total, inputs, allow_unused=True) if total.requires_grad else ()
        found = dict(zip(wanted, gradients, strict=False))
        gradient = found.get(0)
        ctx.first = None if gradient is None else sharded_as(gradient, weight)
        ctx.rest = [found.get(index) for index in range(1, 1 + len(others))]
        ctx.value = value
        ctx.save_for_backward(weight, *others)
        return total.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        known = (ctx.first, *ctx.rest)
        if not torch.is_grad_enabled():
            return None, *(None if gradient is None else gradient * grads[0] for gradient in known)
        weight, *others = ctx.saved_tensors
        wanted = [index for index, gradient in enumerate(known) if gradient is not None]
        inputs = [(weight, *others)[index] for index in wanted]
        with torch.enable_grad():
            found = torch.autograd.grad(ctx.value(whole(weight)), inputs, grads[0], create_graph=True)
        by = dict(zip(wanted, found, strict=True))
        return None, *(by.get(index) for index in range(len(known)))


def sharded_as(values: Tensor, weight: Any) -> Tensor:
    """This process' part of what all processes of a mesh have, sharded as a weight is; as it is, where that is not.

    Example:
        >>> sharded_as(torch.ones(2), torch.zeros(2))
        tensor([1., 1.])
    """
    if not is_sharded(weight):
        return values
    from torch.distributed.tensor import DTensor, Replicate  # noqa: PLC0415 (only where torch is built with it)

    mesh = weight.device_mesh
    alike = DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)
    shard: Tensor = alike.redistribute(placements=weight.placements)
    return shard


def of_shards(value: Callable[[Tensor], Tensor], weight: Tensor, *others: Tensor) -> Tensor:
    """A value of a weight, ``()`` of a sharded one, which is held as a whole no longer than it takes.

    A derivative of the gradient evaluates it anew.

    Args:
        value: Function of the whole weight.
        weight: Sharded or not.
        others: What else the value depends on, the same on all processes.

    Example:
        >>> of_shards(lambda weight: weight.sum(), torch.ones(3))
        tensor(3.)
    """
    if not is_sharded(weight):
        return value(weight)
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed():
        return value(whole(weight))
    if not any(x.requires_grad for x in (weight, *others)):
        return value(whole(weight))
    total: Tensor = _OfShards.apply(value, weight, *others)
    return total


def place(mesh: Mesh) -> tuple[int, int]:
    """Number of this process among those of a mesh, and how many these are.

    Example:
        >>> place(None)
        (0, 1)
    """
    number, size = 0, 1
    if mesh is not None:
        for own, length in zip(mesh.get_coordinate() or (), mesh.shape, strict=True):
            number, size = number * length + own, size * length
    return number, size


def summed(values: Tensor, mesh: Mesh) -> Tensor:
    """Sum over the processes of a mesh, in place; without gradient.

    Example:
        >>> summed(torch.ones(2), None)
        tensor([1., 1.])
    """
    for group in () if mesh is None else mesh.get_all_groups():
        dist.all_reduce(values, group=group)
    return values


def agreed(values: Tensor, mesh: Mesh) -> Tensor:
    """What the first process of a mesh has, in place: for what each has drawn by itself; no part of a compiled graph.

    Example:
        >>> agreed(torch.ones(2), None)
        tensor([1., 1.])
    """
    return values if mesh is None else _broadcast(values, mesh)


@uncompiled
def _broadcast(values: Tensor, mesh: DeviceMesh) -> Tensor:
    for group in mesh.get_all_groups():
        dist.broadcast(values, group=group, group_src=0)
    return values


def corners(n: int, tile: int, part: int = 0, parts: int = 1) -> list[tuple[int, int]]:
    """First rows and columns of the tiles of all pairs of n, on and above the diagonal: those of one process of some.

    Example:
        >>> corners(3, 2), corners(3, 2, 1, 2)
        ([(0, 0), (0, 2), (2, 2)], [(0, 2)])
    """
    return [(i, j) for i in range(0, n, tile) for j in range(i, n, tile)][part::parts]
