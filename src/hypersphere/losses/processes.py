"""A batch that several processes share (data-parallel training): what a head learns of it is that of the whole."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def shared(sync: bool) -> bool:
    """Whether a batch is shared with other processes of ``torch.distributed``, where ``sync`` says that it counts.

    Example:
        >>> shared(True)
        False
    """
    return sync and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def whole_sums(*sums: Tensor, sync: bool) -> tuple[Tensor, ...]:
    """Scalar sums over the batch of all processes, of sums over the share of each; without gradient, in one call.

    Example:
        >>> whole_sums(torch.tensor(1.0), torch.tensor(2.0), sync=True)
        (tensor(1.), tensor(2.))
    """
    return _summed(torch.stack(sums).detach()).unbind() if shared(sync) else sums


def whole_batch(values: Tensor, sync: bool) -> Tensor:
    """The rows of all processes, ``(P * B, ...)``, of ``(B, ...)``; without gradient. All have equally many.

    Example:
        >>> whole_batch(torch.ones(2, 3), True).shape
        torch.Size([2, 3])
    """
    return _gathered(values.detach(), dist.get_world_size()) if shared(sync) else values


def own_share(values: Tensor, batch: int, sync: bool) -> Tensor:
    """The rows of this process, ``(B, ...)``, of those of all.

    Example:
        >>> own_share(torch.ones(2, 3), 2, True).shape
        torch.Size([2, 3])
    """
    return values.narrow(0, dist.get_rank() * batch, batch) if shared(sync) else values


# Opaque, so that compiled code does not take them apart; NCCL's can be captured in a CUDA graph.


@torch.library.custom_op("hypersphere::sum_over_processes", mutates_args=())
def _summed(values: Tensor) -> Tensor:
    total = values.clone()
    dist.all_reduce(total)
    return total


@_summed.register_fake
def _(values: Tensor) -> Tensor:
    return torch.empty_like(values)


@torch.library.custom_op("hypersphere::gather_over_processes", mutates_args=())
def _gathered(values: Tensor, size: int) -> Tensor:
    found = [torch.empty_like(values) for _ in range(size)]
    dist.all_gather(found, values.contiguous())
    return torch.cat(found)


@_gathered.register_fake
def _(values: Tensor, size: int) -> Tensor:
    return values.new_empty(size * values.shape[0], *values.shape[1:])
