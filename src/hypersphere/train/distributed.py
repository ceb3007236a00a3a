"""One process or several (``torchrun``): who we are, and batch statistics over all processes."""

from __future__ import annotations

import datetime
import functools
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from hypersphere.errors import ArgumentError
from hypersphere.nn import Decoupled


@dataclass(frozen=True)
class World:
    """This process among all processes."""

    rank: int = 0
    size: int = 1

    @property
    def main(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.rank == 0

    def share(self, batch_size: int) -> slice:
        """The part of a batch that this process works on."""
        if batch_size % self.size:
            raise ArgumentError("batch_size", f"must be a multiple of the {self.size} processes, got {batch_size}")
        local = batch_size // self.size
        return slice(self.rank * local, (self.rank + 1) * local)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of a tensor over the processes."""
        if self.size == 1:
            return values
        values = values.clone()
        dist.all_reduce(values)
        return values / self.size

    def barrier(self) -> None:
        """Wait for the other processes."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def world(device: torch.device) -> Iterator[World]:
    """Join the processes that ``torchrun`` started; a single process needs nothing."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World()
        return
    # A long timeout: the other processes wait while the main one evaluates.
    hours = datetime.timedelta(hours=2)
    if device.type == "cuda":
        dist.init_process_group("nccl", timeout=hours, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=hours)
    try:
        yield World(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


class _SumOverProcesses(torch.autograd.Function):
    """All-reduce whose gradient is the all-reduce of the gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].clone()
        dist.all_reduce(total)
        return total


def _synchronised_forward(layer: _BatchNorm, x: Tensor) -> Tensor:
    """Batch normalisation with the mean and variance of the batches of all processes."""
    if not layer.training:
        return F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias, False, 0.0, layer.eps)
    axes = [axis for axis in range(x.dim()) if axis != 1]
    shape = [-1 if axis == 1 else 1 for axis in range(x.dim())]
    values = x.float()
    count = x.numel() // x.shape[1] * dist.get_world_size()
    mean = _SumOverProcesses.apply(values.sum(axes)) / count
    centred = values - mean.view(shape)
    variance = _SumOverProcesses.apply(centred.square().sum(axes)) / count
    if layer.running_mean is not None and layer.running_var is not None and layer.num_batches_tracked is not None:
        with torch.no_grad():
            layer.num_batches_tracked += 1
            rate = 1 / layer.num_batches_tracked.item() if layer.momentum is None else layer.momentum
            layer.running_mean.lerp_(mean, rate)
            layer.running_var.lerp_(variance * (count / max(count - 1, 1)), rate)
    result = centred * (variance + layer.eps).rsqrt().view(shape)
    if layer.affine:
        result = result * layer.weight.view(shape) + layer.bias.view(shape)
    return result.to(x.dtype)


def synchronise_statistics(module: nn.Module) -> None:
    """Make batch norm and decoupled layers use the statistics of the whole batch, not of this process' share.

    Torch's own ``SyncBatchNorm`` runs on accelerators only; this one also runs on CPUs, so that one and several
    processes train the same network everywhere.
    """
    for layer in module.modules():
        if isinstance(layer, Decoupled):
            layer.sync_mean = True
        if isinstance(layer, _BatchNorm):
            layer.forward = functools.partial(_synchronised_forward, layer)  # type: ignore[method-assign]


def sharded(objective: nn.Module, world: World) -> Any:
    """``objective`` as every process calls it for its share of a batch, with the gradients of the whole batch."""
    if world.size == 1:
        return objective
    synchronise_statistics(objective)
    with warnings.catch_warnings():
        # Newer torch has another name for the option, which older torch does not know.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers. is deprecated")
        return DistributedDataParallel(objective, broadcast_buffers=False)
