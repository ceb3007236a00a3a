"""Runs whose head has a sparse gradient: against the dense one, on several processes, interrupted."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers.worlds import worlds
from hypersphere import recipe
from hypersphere.recipe import RecipeError
from hypersphere.runs import RunFolder
from hypersphere.train import Callback, Interrupted, Trainer
from hypersphere.train.distributed import World

CPU = torch.device("cpu")
# Batches of fewer samples than classes, of which steps see a half.
OPTIONS = [
    "loss={name: cosface, sample_rate: 0.5, sparse: true}",
    "data.batch_size=4",
    "model.width=8",
    "optimiser.lr=0.01",
    "train.steps=20",
    "train.log_every=5",
    "train.clip_norm=1",
    "train.ema=0.9",
    "train.tensorboard=false",
]
# With which the rows that were not sampled stay under dense gradients, too.
STILL = ["optimiser.momentum=0", "optimiser.weight_decay=0"]


def plan(*overrides: str) -> recipe.Recipe:
    return recipe.load("digits-softmax", [*OPTIONS, *overrides])


def trained(folder: Path, *overrides: str) -> Trainer:
    chosen = plan(*overrides)
    trainer = Trainer(chosen, RunFolder.create(folder, chosen, CPU), CPU)
    trainer.fit()
    return trainer


def agree(first: Path, second: Path, rel: float = 1e-3) -> None:
    one, two = (RunFolder.open(folder).rows() for folder in (first, second))
    assert [row.keys() for row in one] == [row.keys() for row in two]
    for row, other in zip(one, two, strict=True):
        for key in row.keys() - {"split", "eer", "accuracy"}:
            assert row[key] == pytest.approx(other[key], rel=rel), (row["step"], key)


def test_the_sparse_gradient_trains_as_the_dense_one(tmp_path):
    sparse = trained(tmp_path / "sparse", *STILL)
    trained(tmp_path / "dense", *STILL, "loss.sparse=false")
    assert type(sparse._step.optimiser).__name__ == "RowSGD" and sparse.head.weight.grad.is_sparse
    agree(tmp_path / "sparse", tmp_path / "dense")


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_an_interrupted_run_repeats_itself(tmp_path, name):
    class Stop(Callback):
        def on_step(self, trainer, step):
            if step == 9:
                os.kill(os.getpid(), signal.SIGINT)

    chosen = plan(f"optimiser.name={name}")
    trained(tmp_path / "whole", f"optimiser.name={name}")
    with pytest.raises(Interrupted):
        Trainer(chosen, RunFolder.create(tmp_path / "stopped", chosen, CPU), CPU, callbacks=[Stop()]).fit()
    Trainer(chosen, RunFolder.open(tmp_path / "stopped"), CPU).fit()
    last = "checkpoints/step-00000020/state.safetensors"
    for file in ("metrics.jsonl", "evaluation.json", last):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "stopped" / file).read_bytes()


def trained_together(folder: Path, *overrides: str) -> None:
    """What ``torchrun`` does, in a process that is one of several."""
    world, chosen = World(dist.get_rank(), dist.get_world_size()), plan(*overrides)
    if world.main:
        RunFolder.create(folder, chosen, CPU)
    world.barrier()
    Trainer(chosen, RunFolder.open(folder), CPU, world=world).fit()


def test_two_processes_with_samples_of_their_own(tmp_path):
    """As with dense gradients, which DistributedDataParallel averages."""
    for folder, kind in (("sparse", "true"), ("dense", "false")):
        worlds(2).run(trained_together, tmp_path / folder, *STILL, f"loss.sparse={kind}")
    agree(tmp_path / "sparse", tmp_path / "dense")


def test_two_processes_train_like_one(tmp_path):
    """Where steps have more samples than there are classes, so that all of these are sampled."""
    options = ["optimiser.name=adamw", "optimiser.lr=0.001", "data.batch_size=60"]
    trained(tmp_path / "one", *options)
    worlds(2).run(trained_together, tmp_path / "many", *options)
    agree(tmp_path / "one", tmp_path / "many", 2e-3)


def test_what_cannot_be(tmp_path):
    with pytest.raises(
        RecipeError, match=r"optimiser\.name must be one of sgd, adamw for loss\.sparse=true, got 'adam'"
    ):
        plan("optimiser.name=adam")
    with pytest.raises(RecipeError, match=r"train\.capture needs a CUDA device, a single process and dense gradients"):
        trained(tmp_path / "captured", "train.capture=true")
