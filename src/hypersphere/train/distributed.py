"""One process or several (``torchrun``): who we are, and batch statistics over all processes."""

from __future__ import annotations

import datetime
import functools
import os
import signal
import sys
import threading
import time
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
from hypersphere.geometry import at_least_float32
from hypersphere.losses import MarginSoftmax
from hypersphere.metrics.processes import Group, is_agreed
from hypersphere.neurons import is_sharded, whole
from hypersphere.nn import Decoupled
from hypersphere.optim import row_parameters
from hypersphere.runs.device import pick_device


@dataclass(frozen=True)
class World:
    """This process among all processes."""

    rank: int = 0
    size: int = 1

    @property
    def main(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.rank == 0

    @property
    def group(self) -> Group | None:
        """The processes that share an evaluation; ``None`` for one alone."""
        return dist.group.WORLD if self.size > 1 else None

    def share(self, batch_size: int, even: bool = False) -> slice:
        """The part of a batch that this process works on.

        Args:
            batch_size: Samples over all processes.
            even: Whether all parts must have one size.
        """
        if batch_size % self.size and even:
            why = f"must be a multiple of the {self.size} processes, got {batch_size}"
            raise ArgumentError("batch_size", f"{why}; with train.parallel.head=shard it need not be")
        return slice(self.rank * batch_size // self.size, (self.rank + 1) * batch_size // self.size)

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
    # A long timeout: the other processes wait while the main one measures what is not shared.
    hours = datetime.timedelta(hours=2)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    options: dict[str, Any] = {"timeout": hours} | _of_this_attempt(hours)
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device, **options)
    else:
        dist.init_process_group("gloo", **options)
    try:
        yield World(dist.get_rank(), dist.get_world_size())
    except Exception as error:
        if is_agreed(error):  # torchrun ends all when one ends, and the main one may still be writing
            dist.barrier()
        raise
    finally:
        dist.destroy_process_group()


def _of_this_attempt(timeout: datetime.timedelta) -> dict[str, Any]:
    """Where the processes find each other, apart from those that ``torchrun`` started before and that were killed.

    Its store outlives them, so that addresses of dead processes would be found in it. Of several agents the number of
    attempts differs: there ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` gives each attempt a store (docs/scale.md).
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return {}
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    of_attempt = dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
    return {"store": of_attempt, "rank": rank, "world_size": size}


def _end_with(parent: int, seconds: float = 0.5) -> None:
    """End this process when the agent of ``torchrun`` is gone that started it: nobody would restart or stop it."""
    while os.getppid() == parent:
        time.sleep(seconds)
    sys.stderr.write("error: torchrun, which started this process, is gone; the last checkpoint stands\n")
    sys.stderr.flush()
    os._exit(128 + signal.SIGTERM)


def own_device(name: str) -> torch.device:
    """The device called ``name``; under ``torchrun`` that of this process, which becomes the current one."""
    device = pick_device(name)
    if device.type == "cuda" and "LOCAL_RANK" in os.environ:
        device = pick_device(f"cuda:{os.environ['LOCAL_RANK']}")
    return device


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
    if not layer.training and layer.running_mean is not None:
        return F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias, False, 0.0, layer.eps)
    axes = [axis for axis in range(x.dim()) if axis != 1]
    shape = [-1 if axis == 1 else 1 for axis in range(x.dim())]
    values = at_least_float32(x)
    here = values.new_full((1,), x.numel() // x.shape[1])  # not as many on every process
    *_, sums, count = _SumOverProcesses.apply(torch.cat([values.sum(axes), here])).tensor_split([0, x.shape[1]])
    mean = sums / count
    centred = values - mean.view(shape)
    variance = _SumOverProcesses.apply(centred.square().sum(axes)) / count
    if (
        layer.training
        and layer.running_mean is not None
        and layer.running_var is not None
        and layer.num_batches_tracked is not None
    ):
        with torch.no_grad():
            layer.num_batches_tracked += 1
            rate = 1 / layer.num_batches_tracked.item() if layer.momentum is None else layer.momentum
            unbiased = variance * (count / (count - 1).clamp(min=1))
            layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), rate)
            layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), rate)
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


SHARDED_FROM = 20_000
"""Classes of each process from which they are divided where nobody says how. By arithmetic, not measured: comparing
with fewer takes a modern GPU no longer than the exchanges do."""


def divides_head(asked: str | None, classes: int, world: World) -> bool:
    """Whether the classes of a head are divided among processes.

    Args:
        asked: ``"shard"``, ``"replicate"``, or ``None``: by the number of classes.
        classes: That number.
        world: This process among all.

    Example:
        >>> [divides_head(None, classes, World(0, 4)) for classes in (10, 100_000)]
        [False, True]
    """
    return world.size > 1 and (asked == "shard" or (asked is None and classes >= SHARDED_FROM * world.size))


@contextmanager
def whole_head(head: MarginSoftmax) -> Iterator[None]:
    """Put all classes of a divided head on every process meanwhile: an evaluation reads them as those of any head."""
    if getattr(head, "shards", None) is None:  # a loss of two players has no classes
        yield
        return
    kept = {name: getattr(head, name) for name in head.class_rows if getattr(head, name) is not None}
    with torch.no_grad():
        every = {name: whole(tensor).clone() for name, tensor in kept.items()}
    for name, tensor in every.items():
        setattr(head, name, nn.Parameter(tensor) if isinstance(kept[name], nn.Parameter) else tensor)
    try:
        yield
    finally:
        for name, tensor in kept.items():
            setattr(head, name, tensor)


def sharded(objective: nn.Module, world: World) -> Any:
    """``objective`` as every process calls it for its share of a batch, with the gradients of the whole batch.

    But for sparse gradients, which the step gathers itself.
    """
    if world.size == 1:
        return objective
    synchronise_statistics(objective)
    divided = [name for name, tensor in _tensors(objective) if is_sharded(tensor)]
    alone = {*divided, *row_parameters(objective)}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(objective, alone)
    with warnings.catch_warnings():
        # Newer torch has another name for the option, which older torch does not know.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers. is deprecated")
        return DistributedDataParallel(objective, broadcast_buffers=False)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
