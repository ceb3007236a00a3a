"""Heads on one process and on several, with the batch shared between them."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hypersphere as hs

B, D, C, STEPS = 8, 5, 4, 10
HEADS = ["adaface", "curricularface", "center", "triplet", "cosface", "magface", "circle"]


class Net(nn.Module):
    """A linear model and a head, which gets the features; alone, so that pairs are not split, for triplets."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.head = nn.Linear(D, D), hs.losses.create(name, D, C)

    def forward(self, x, labels):
        return self.head(self.model(x), labels)


def batches(*, ignored: bool = False):
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        labels = torch.randint(C, (B,), generator=generator)
        if ignored:  # more in one share than in the other
            labels[: B // 2 - 1] = -100
        yield 3 * torch.randn(B, D, generator=generator), labels


def trained(name: str, rank: int, size: int) -> dict[str, torch.Tensor]:
    """What ten steps of a head, and of what is before it, end with; the loss at every step."""
    net = Net(name)
    module = net if size == 1 else DistributedDataParallel(net, broadcast_buffers=False, find_unused_parameters=True)
    trainable = [p for p in net.parameters() if name != "triplet" or p is not net.head.weight]
    optimiser = torch.optim.SGD(trainable, lr=0.001)
    for x, labels in batches():
        share = slice(rank * B // size, (rank + 1) * B // size)
        optimiser.zero_grad()
        module(x[share], labels[share]).backward()
        if name != "triplet":  # whose loss compares the samples of a process
            optimiser.step()
    return {key: value.clone() for key, value in net.state_dict().items()}


def observed(name: str, rank: int, size: int, *, sync: bool = True) -> dict[str, torch.Tensor]:
    """What a head has seen after ten batches with samples that do not count."""
    torch.manual_seed(0)
    head = hs.losses.create(name, D, C)
    head.sync_statistics = sync
    for x, labels in batches(ignored=True):
        share = slice(rank * B // size, (rank + 1) * B // size)
        head(x[share], labels[share])
    return {key: value.clone() for key, value in head.state_dict().items()}


def everything(rank: int, size: int) -> dict[str, dict[str, torch.Tensor]]:
    found = {f"{name}/trained": trained(name, rank, size) for name in HEADS}
    found |= {f"{name}/observed": observed(name, rank, size) for name in HEADS}
    return found | {f"{name}/alone": observed(name, 0, 2, sync=False) for name in HEADS[:4]}


def work(rank: int, folder: str) -> None:
    """One of two processes."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = everything(rank, 2)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
