"""Runs that stop, what they leave, and data of noise to run on."""

import os
import signal
from pathlib import Path

import torch

from hypersphere.data import Dataset, TensorSplit
from hypersphere.train import Callback

SHAPES = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32), "cifar100": (3, 32, 32)}


def noise(shape: tuple[int, ...], counts: list[int]) -> Dataset:
    """So many images of each class, all of them noise."""
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    images = torch.randint(256, (len(labels), *shape), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    split = TensorSplit(images, labels)
    return Dataset("noise", tuple(map(str, range(len(counts)))), split, split)


def files(folder: Path) -> dict[str, bytes]:
    last = sorted((folder / "checkpoints").glob("step-*"))[-1]
    chosen = [folder / "metrics.jsonl", folder / "evaluation.json", last / "state.safetensors"]
    return {file.name: file.read_bytes() for file in chosen}


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer, step):
        if step == self.step:
            os.kill(os.getpid(), signal.SIGINT)
