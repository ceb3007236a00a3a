"""One training for a table: its data from a shelf, gone on with after a stop, and what a table needs of it."""

from __future__ import annotations

import gc
import hashlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hypersphere import recipe as recipes
from hypersphere.data import Dataset, FolderSplit, TensorSplit
from hypersphere.recipe import Recipe
from hypersphere.reproduce.stand_ins import stand_in
from hypersphere.runs import RunFolder, atomic_write, load_data
from hypersphere.train import Callback, Trainer
from hypersphere.train.records import DivergedError
from hypersphere.train.signals import Interrupted

RECORD = "reproduce.json"
"""File of a run's folder with what a table needs beside metrics: seconds, digest of the data, parameters."""

Tell = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Job:
    """A training for a worker, in words that another process understands.

    Args:
        command: Arguments of ``hypersphere train``: a recipe and changes.
        name: Name of the run.
        folder: Where it goes.
        stand_in: Whether noise stands in for the data.
        data_root: Where data sets are looked for.
    """

    command: tuple[str, ...]
    name: str
    folder: Path
    stand_in: bool = False
    data_root: Path | None = None

    def recipe(self) -> Recipe:
        """What is trained."""
        return recipes.load(self.command[0], [*self.command[1:], f"name={self.name}", "train.tensorboard=false"])


def data_digest(data: Dataset) -> str:
    """Twelve hex digits of all samples and labels; of files, of their names and sizes.

    Example:
        >>> from hypersphere.data import load
        >>> len(data_digest(load("digits")))
        12
    """
    found = hashlib.sha256()

    def add(name: str, tensor: Tensor) -> None:
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)

    for part in ("train", "test", "unseen"):
        split = getattr(data, part)
        if isinstance(split, TensorSplit):
            add(f"{part} samples", split.images)
            add(f"{part} labels", split.labels)
        elif isinstance(split, FolderSplit):
            for file, label in zip(split.files, split.labels.tolist(), strict=True):
                found.update(f"{part} {file.parent.name}/{file.name} {file.stat().st_size} {label}\n".encode())
    for name, tensor in sorted(data.context.items()):
        add(name, tensor)
    return found.hexdigest()[:12]


class Shelf:
    """Data sets that were read, so that trainings one after the other read each of them once.

    Args:
        size: How many are kept.
    """

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self._kept: dict[str, tuple[Dataset, str]] = {}

    def get(self, recipe: Recipe, data_root: Path | None, *, noise: bool) -> tuple[Dataset, str]:
        """The data set of a recipe, or noise in its shape, and its digest."""
        fields = {"batch_size", "normalise", "augment", "workers"}  # what is done with a data set, and not to it
        said = recipe.data.model_dump(mode="json", exclude=fields)
        key = json.dumps([said, noise, str(data_root)], sort_keys=True)
        if key not in self._kept:
            data = stand_in(recipe) if noise else load_data(recipe, data_root)
            while len(self._kept) >= self.size:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = data, data_digest(data)
        return self._kept[key]


class _Told(Callback):
    """Tells the steps of a training to whoever shows them."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell

    def on_start(self, trainer: Trainer, step: int) -> None:
        self.tell({"step": step, "steps": trainer.recipe.train.steps})

    def on_log(self, trainer: Trainer, row: Mapping[str, Any]) -> None:
        self.tell({"step": row["step"]})


def train(job: Job, device: torch.device, shelf: Shelf, tell: Tell = lambda _: None) -> str:
    """Train a job to its end, or from its last checkpoint on, and write down what a table needs of it.

    Args:
        job: What to train.
        device: Where.
        shelf: Data sets that are there.
        tell: Is called with how far the training is.

    Returns:
        ``"finished"``, ``"diverged"`` or ``"interrupted"``.
    """
    start = time.perf_counter()
    recipe = job.recipe()
    data, digest = shelf.get(recipe, job.data_root, noise=job.stand_in)
    run = RunFolder.create(job.folder, recipe, device, job.data_root)
    command = shlex.join(["hypersphere", "train", *job.command])
    run.write_facts(command=command)
    before = float(run.facts().get("seconds", 0.0))
    status = "finished"
    try:
        trainer = Trainer(recipe, run, device, data_root=job.data_root, data=data, callbacks=[_Told(tell)])
        trainer.fit()
    except DivergedError:
        status = "diverged"
    except Interrupted:
        status = "interrupted"
    finally:
        run.write_facts(seconds=before + time.perf_counter() - start)
    if status != "interrupted":
        parts = (trainer.model, trainer.head)
        trained = sum(p.numel() for part in parts for p in part.parameters() if p.requires_grad)
        turned: list[Any] = [part for whole in parts for part in whole.modules() if getattr(part, "is_rotation", False)]
        trained -= sum(int(part.free.numel()) - part.count for part in turned)  # of a skew matrix one triangle counts
        facts = {
            "status": status,
            "seconds": run.facts()["seconds"],
            "data": digest,
            "stand_in": job.stand_in,
            "trained_parameters": trained,
        }
        # Last: a folder with it holds a training that is done.
        with atomic_write(run.path / RECORD) as file:
            json.dump(facts, file)
    del trainer
    _forget(device, compiled=recipe.train.compile)
    return status


def _forget(device: torch.device, *, compiled: bool) -> None:
    """Give back what a training held, for the next one of this process."""
    if compiled and "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()  # graphs of one network count against the limit of the next
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
