"""The trainer: exact resume after any interruption, one process against two, divergence, averages, run folders."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

import hypersphere as hs
from helpers.paths import SOURCE
from hypersphere import recipe, report
from hypersphere.errors import ArgumentError
from hypersphere.nn.optimise import decoupled_layers
from hypersphere.runs import RunError, RunFolder, load_checkpoint, pick_device
from hypersphere.runs.conditions import differences
from hypersphere.train import Callback, DivergedError, Interrupted, Trainer
from hypersphere.train.distributed import World
from hypersphere.train.optimiser import parameter_groups

CPU = torch.device("cpu")

# Everything that has state or randomness: augmentation, annealing, schedule with warm-up, averages, a regulariser.
EVERYTHING = [
    "train.steps=24",
    "train.log_every=5",
    "train.checkpoint_every=4",
    "train.tensorboard=false",
    "train.ema=0.9",
    "data.batch_size=64",
    "data.augment.crop=1",
    "data.augment.flip=true",
    "model.width=8",
    "schedule.name=cosine",
    "schedule.warmup=5",
    "evaluate.every=7",
    "regularisers=[{name: mhe, weight: 0.1, target: head}, {name: mhe, weight: 0.01, s: 1, hidden_weight: 1}]",
]


def plan(*overrides: str, name: str = "digits-a-softmax") -> recipe.Recipe:
    return recipe.load(name, [*EVERYTHING, *overrides])


def trainer(folder: Path, chosen: recipe.Recipe, *callbacks: Callback) -> Trainer:
    return Trainer(chosen, RunFolder.create(folder, chosen, CPU), CPU, callbacks=callbacks)


def command(folder: Path, *overrides: str) -> list[str]:
    arguments = ["digits-a-softmax", *EVERYTHING, *overrides, "--folder", str(folder), "--device", "cpu"]
    return [sys.executable, "-m", "hypersphere", "train", *arguments]


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **extra}


def on_two_processes(folder: Path, *options: str) -> None:
    """Train with torchrun."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    line = [*start, *command(folder, *options)[1:]]
    done = subprocess.run(line, env=environment(), capture_output=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr.decode()


def files(folder: Path) -> dict[str, bytes]:
    """All that a run measured and learned, byte for byte."""
    last = sorted((folder / "checkpoints").glob("step-*"))[-1]
    chosen = [folder / "metrics.jsonl", folder / "evaluation.json", last / "state.safetensors"]
    return {file.name: file.read_bytes() for file in chosen}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    subprocess.run(command(folder), check=True, env=environment(), capture_output=True)
    return files(folder)


class StopAt(Callback):
    """Sends a signal to this process after a step."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def on_step(self, trainer, step):
        if step == self.step:
            os.kill(os.getpid(), self.number)


def test_the_same_recipe_twice_gives_the_same_bytes(tmp_path, uninterrupted):
    subprocess.run(command(tmp_path / "run"), check=True, env=environment(), capture_output=True)
    assert files(tmp_path / "run") == uninterrupted


def test_another_seed_gives_other_metrics(tmp_path, uninterrupted):
    subprocess.run(command(tmp_path / "run", "seed=1"), check=True, env=environment(), capture_output=True)
    assert files(tmp_path / "run")["metrics.jsonl"] != uninterrupted["metrics.jsonl"]


# Runs the command line with a fault: the process kills itself, without any clean-up, at a chosen call of a function.
FAULT = """
import os, signal, sys
import hypersphere.runs.folder as run
import safetensors.torch, pathlib
kind, count = sys.argv.pop(1), int(sys.argv.pop(1))
def deadly(function, partial=None):
    calls = 0
    def wrapper(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == count:
            if partial:
                partial(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return wrapper
if kind == "step":
    from hypersphere.train.step import Step
    Step.run = deadly(Step.run)
elif kind == "mid-checkpoint":   # half of the tensors' file is on disk
    half = lambda file, schema, tensors: file.write_bytes(safetensors.torch.save(tensors)[:1000])
    run.artefacts.write = deadly(run.artefacts.write, half)
elif kind == "before-rename":
    pathlib.Path.rename = deadly(pathlib.Path.rename)
elif kind == "mid-metrics":      # half a line is on disk
    def half(folder, row):
        with folder.metrics_file.open("a") as file:
            file.write('{"step": 9, "spl')
    run.RunFolder.append = deadly(run.RunFolder.append, half)
elif kind == "mid-facts":
    pathlib.Path.replace = deadly(pathlib.Path.replace)
from hypersphere.cli import main
main()
"""


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        ("step", [random.Random(1).randint(1, 23), random.Random(2).randint(1, 12)]),
        ("mid-checkpoint", [1, 3]),
        ("before-rename", [2]),
        ("mid-metrics", [2, 6]),
        ("mid-facts", [1, 2, 5]),  # the first two are the making of the run folder
    ],
)
def test_killed_and_started_again_it_repeats_the_uninterrupted_run(tmp_path, uninterrupted, kind, counts):
    folder = tmp_path / "run"
    start = [sys.executable, "-c", FAULT]
    for count in counts:
        killed = subprocess.run(
            [*start, kind, str(count), *command(folder)[3:]], env=environment(), capture_output=True, check=False
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    finished = subprocess.run(command(folder), env=environment(), capture_output=True, check=False)
    assert finished.returncode == 0, finished.stderr.decode()
    assert files(folder) == uninterrupted
    assert not list(folder.rglob(".writing-*"))
    assert RunFolder.open(folder).facts()["status"] == "finished"


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path, uninterrupted):
    draw = random.Random(0)
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        for _ in range(3):
            kind = draw.choice(["step", "mid-checkpoint", "before-rename", "mid-metrics", "mid-facts"])
            fault = [sys.executable, "-c", FAULT, kind, str(draw.randint(1, 12))]
            subprocess.run([*fault, *command(folder)[3:]], env=environment(), capture_output=True, check=False)
        subprocess.run(command(folder), check=True, env=environment(), capture_output=True)
        assert files(folder) == uninterrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_polite_stop_saves_and_resumes_exactly(tmp_path, number):
    chosen = plan()
    trainer(tmp_path / "whole", chosen).fit()
    with pytest.raises(Interrupted, match="stopped after step 9; go on with `hypersphere resume"):
        trainer(tmp_path / "stopped", chosen, StopAt(9, number)).fit()
    run = RunFolder.open(tmp_path / "stopped")
    assert run.facts()["status"] == "interrupted"
    assert run.latest_checkpoint().name == "step-00000009"
    trainer(tmp_path / "stopped", chosen).fit()
    assert files(tmp_path / "stopped") == files(tmp_path / "whole")


def test_two_processes_give_the_metrics_of_one(tmp_path):
    # A small rate: large ones amplify the rounding of sums in another order within a few steps.
    options = ["optimiser.lr=0.01", "evaluate.every=0"]
    subprocess.run(command(tmp_path / "one", *options), check=True, env=environment(), capture_output=True)
    on_two_processes(tmp_path / "two", *options)
    one, two = (RunFolder.open(tmp_path / name).rows() for name in ("one", "two"))
    assert [row.keys() for row in one] == [row.keys() for row in two]
    for first, second in zip(one, two, strict=True):
        for key in first.keys() - {"split", "eer", "accuracy"}:
            assert first[key] == pytest.approx(second[key], rel=2e-3), (first["step"], key)
    assert one[-1]["accuracy"] == pytest.approx(two[-1]["accuracy"], abs=0.01)


def test_batch_size_must_divide_among_processes():
    assert World(1, 2).share(6) == slice(3, 6)
    with pytest.raises(ArgumentError, match="batch_size must be a multiple of the 2 processes, got 5"):
        World(0, 2).share(5, even=True)
    assert [World(rank, 3).share(5) for rank in range(3)] == [slice(0, 1), slice(1, 3), slice(3, 5)]


class Poison(Callback):
    """Spoils a weight after a step."""

    def __init__(self, step: int, part: str) -> None:
        self.step, self.part = step, part

    def on_step(self, trainer, step):
        if step == self.step:
            parameter = next(iter(getattr(trainer, self.part).parameters()))
            with torch.no_grad():
                parameter.fill_(float("nan"))


@pytest.mark.parametrize("part", ["model", "head"])
def test_a_loss_that_is_no_number_stops_and_keeps_the_last_checkpoint(tmp_path, part):
    with pytest.raises(DivergedError) as caught:
        trainer(tmp_path / "run", plan(), Poison(9, part)).fit()
    message = str(caught.value)
    assert "diverged at step 10" in message
    # The head looks at its features before it computes a loss of them.
    assert ("the features became non-finite" if part == "model" else "'loss' became nan") in message
    assert "parameter group" in message and f"'{part}'" in message
    assert "step-00000008" in message and "optimiser.lr" in message
    run = RunFolder.open(tmp_path / "run")
    assert run.facts()["status"] == "diverged"
    saved = safetensors.torch.load_file(run.latest_checkpoint() / "state.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in saved.values() if tensor.is_floating_point())
    assert all(row["step"] < 10 for row in run.rows())


def test_the_term_that_diverges_is_named(tmp_path):
    class Spoil(Callback):
        def on_start(self, trainer, step):
            trainer._step.objective.added["mhe"].weight.fill_(float("inf"))

    with pytest.raises(DivergedError, match=r"step 1: 'mhe' became inf"):
        trainer(tmp_path / "run", plan(), Spoil()).fit()


def test_the_schedule_of_a_margin_is_logged(tmp_path):
    ramp = "loss.m={start: 0, end: 0.4, length: 8}"
    steps = ["train.steps=4", "train.log_every=2", "schedule.warmup=0"]
    chosen = plan(*steps, "loss.name=cosface", "loss.s=10", ramp, "regularisers=[]")
    trainer(tmp_path / "run", chosen).fit()
    rows = [row for row in RunFolder.open(tmp_path / "run").rows() if row["split"] == "train"]
    assert [row["m"] for row in rows] == pytest.approx([0.1, 0.2])


def test_moving_averages_are_what_is_evaluated(tmp_path):
    chosen = plan("train.steps=6", "train.checkpoint_every=6", "regularisers=[]")
    seen: list[list[torch.Tensor]] = []

    class Watch(Callback):
        def on_step(self, trainer, step):
            seen.append([p.detach().clone() for p in trainer.averages.parameters])

    run = trainer(tmp_path / "run", chosen, Watch())
    start = [p.detach().clone() for p in run.averages.parameters]
    run.fit()
    expected = start
    for weights in seen:
        expected = [0.9 * average + 0.1 * weight for average, weight in zip(expected, weights, strict=True)]
    for average, reference in zip(run.averages.values, expected, strict=True):
        torch.testing.assert_close(average, reference, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(run.outputs().weight, run.averages.values[-1])
    for parameter, last in zip(run.averages.parameters, seen[-1], strict=True):  # evaluation put the weights back
        torch.testing.assert_close(parameter.detach(), last)


def test_one_step_equals_plain_torch(tmp_path):
    chosen = plan(
        "train.steps=5",
        "train.ema=null",
        "train.clip_norm=0.5",
        "data.augment.crop=0",
        "data.augment.flip=false",
        "train.log_every=1",
    )
    run = trainer(tmp_path / "run", chosen)
    reference = trainer(tmp_path / "reference", chosen)
    parameters = reference.averages.parameters
    optimiser = torch.optim.SGD(parameters, lr=1.0, momentum=0.9, weight_decay=5e-4)
    run.fit()
    losses = []
    from hypersphere.energy import hyperspherical_energy
    from hypersphere.train.batches import BatchOrder

    reference.model.train()
    order = BatchOrder(len(reference.data.train), 64, 0)
    for step, factor in enumerate([0.2, 0.4, 0.6, 0.8, 1.0]):
        indices = order.indices(step)
        images = reference.data.train.images[indices].float() / 255
        images = (images - reference.preprocess.mean) / reference.preprocess.std
        loss = reference.head(reference.model(images), reference.data.train.labels[indices])
        weights = [
            m.weight.flatten(1) for m in reference.model.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)
        ]
        total = loss + 0.1 * hyperspherical_energy(reference.head.weight)
        total = total + 0.01 * sum(hyperspherical_energy(weight, 1.0) for weight in weights)
        optimiser.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        for group in optimiser.param_groups:
            group["lr"] = 0.05 * factor
        optimiser.step()
        losses.append(total.item())
    rows = [row for row in run.run.rows() if row["split"] == "train"]
    assert [row["total"] for row in rows] == pytest.approx(losses, rel=1e-5)
    for mine, other in zip(run.averages.parameters, parameters, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.precision=bf16"],
        ["train.channels_last=true"],
        ["optimiser.name=adamw", "optimiser.lr=0.01"],
        ["optimiser.decay=weights"],
        ["data.normalise=pixel"],
    ],
)
def test_options_train(tmp_path, overrides):
    chosen = plan("train.steps=30", "loss.name=softmax", "train.ema=null", "data.augment.flip=false", *overrides)
    run = trainer(tmp_path / "run", chosen)
    run.fit()
    losses = [row["loss"] for row in run.run.rows() if row["split"] == "train"]
    assert losses[-1] < 0.7 * losses[0]
    assert all(p.dtype == torch.float32 for p in run.averages.parameters)


@pytest.mark.slow
def test_a_compiled_run_matches(tmp_path):
    plain, compiled = (
        trainer(tmp_path / str(flag), plan(f"train.compile={flag}", "train.steps=6")) for flag in ("false", "true")
    )
    plain.fit()
    compiled.fit()
    for first, second in zip(plain.run.rows(), compiled.run.rows(), strict=True):
        assert first["total" if "total" in first else "energy"] == pytest.approx(
            second["total" if "total" in second else "energy"], rel=1e-3
        )


def test_a_finished_run_holds_everything(tmp_path):
    chosen = recipe.load("digits-softmax", ["train.steps=4", "train.log_every=2"])
    metrics = trainer(tmp_path / "run", chosen).fit()
    folder = tmp_path / "run"
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "recipe.yaml",
        "run.json",
        "metrics.jsonl",
        "metrics.csv",
        "checkpoints",
        "evaluation.json",
        "features.safetensors",
        "tensorboard",
    }
    assert recipe.load(folder / "recipe.yaml").hash == chosen.hash
    facts = json.loads((folder / "run.json").read_text())
    assert (
        facts["seed"] == 0
        and facts["status"] == "finished"
        and facts["step"] == 4
        and facts["environment"]["torch"] == torch.__version__
    )
    rows = RunFolder.open(folder).rows()
    assert [(row["step"], row["split"]) for row in rows] == [(2, "train"), (4, "train"), (4, "test")]
    header, *lines = (folder / "metrics.csv").read_text().splitlines()
    assert header.startswith("step,split,total,loss") and len(lines) == 3
    assert rows[-1]["accuracy"] == metrics["accuracy"]
    features = safetensors.torch.load_file(folder / "features.safetensors")
    assert features["features"].shape[1] == 3 and features["centres"].shape == (7, 3)
    assert len(features["unseen_features"]) == len(features["unseen_labels"]) > 100
    assert list((folder / "tensorboard").iterdir())


def test_old_checkpoints_are_deleted(tmp_path):
    trainer(tmp_path / "run", plan("train.keep_checkpoints=3")).fit()
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000016", "step-00000020", "step-00000024"]


def test_another_recipe_in_the_folder_is_refused(tmp_path):
    RunFolder.create(tmp_path / "run", plan(), CPU)
    with pytest.raises(RunError, match="holds a run of another recipe"):
        RunFolder.create(tmp_path / "run", plan("seed=5"), CPU)


def test_a_folder_without_a_recipe_is_no_run(tmp_path):
    with pytest.raises(RunError, match="is not a run folder"):
        RunFolder.open(tmp_path)


def test_damaged_checkpoints_are_named(tmp_path):
    run = RunFolder.create(tmp_path / "run", plan(), CPU)
    folder = run.save_checkpoint(3, {"a": torch.ones(2)}, {}, keep=1)
    target = {"a": torch.zeros(2)}
    assert load_checkpoint(folder, target)["step"] == 3
    assert target["a"].tolist() == [1, 1]
    with pytest.raises(RunError, match=r"has no tensor 'b'"):
        load_checkpoint(folder, {"b": torch.zeros(2)})
    later = {"a": torch.zeros(2), "b.gram": torch.zeros(1)}  # that no checkpoint had before
    load_checkpoint(folder, later)
    assert later["a"].tolist() == [1, 1]
    assert later["b.gram"].tolist() == [0]
    with pytest.raises(RunError, match=r"'a' has the shape \(2,\), this run needs \(3,\)"):
        load_checkpoint(folder, {"a": torch.zeros(3)})
    (folder / "state.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(RunError, match="cannot be read"):
        load_checkpoint(folder, target)


def test_two_processes_do_not_share_a_run(tmp_path):
    run = RunFolder.create(tmp_path / "run", plan(), CPU)
    with run.locked(), pytest.raises(RunError, match="is being trained by another process"):
        trainer(tmp_path / "run", plan()).fit()
    trainer(tmp_path / "run", plan("train.tensorboard=false")).fit()


def test_weights_that_leave_the_numbers_are_noticed_at_once(tmp_path):
    chosen = plan(
        "optimiser.lr=1e38", "schedule.warmup=0", "schedule.name=constant", "train.clip_norm=null", "evaluate.every=1"
    )
    with pytest.raises(DivergedError, match=r"diverged at step 1: the weights became non-finite .*'model'"):
        trainer(tmp_path / "run", chosen).fit()
    assert RunFolder.open(tmp_path / "run").latest_checkpoint() is None


def test_damaged_run_files_are_named(tmp_path):
    run = RunFolder.create(tmp_path / "run", plan(), CPU)
    run.metrics_file.write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2 is not valid JSON"):
        run.rows()
    (run.path / "run.json").write_text("{")
    with pytest.raises(RunError, match=r"run\.json is not valid JSON"):
        run.facts()
    with pytest.raises(RunError, match="has no evaluation yet"):
        run.evaluation()


def test_a_failing_callback_leaves_the_status_failed(tmp_path):
    class Fail(Callback):
        def on_step(self, trainer, step):
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        trainer(tmp_path / "run", plan(), Fail()).fit()
    assert RunFolder.open(tmp_path / "run").facts()["status"] == "failed"


def test_devices_are_checked(monkeypatch):
    assert pick_device("cpu") == CPU
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("mps").type == "mps"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ArgumentError, match="device is 'mps', but torch sees no Metal device here"):
        pick_device("mps")
    for name in ("gpu7", "meta"):
        with pytest.raises(ArgumentError, match="device must be"):
            pick_device(name)
    with pytest.raises(ArgumentError, match=r"torch sees \d CUDA devices"):
        pick_device("cuda:9")


def test_capture_needs_a_gpu(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(recipe.RecipeError, match=r"train\.capture needs a CUDA device"):
        trainer(tmp_path / "run", plan("train.capture=true")).fit()


# ------------------------------------------------------------------------------------------- decoupled layers

# A running mean, learned radii, one k that all layers share, projection, orthogonality.
DECOUPLED = [
    "convert={name: tanh, angular: sigmoid, learn_k: network, exclude: [embed]}",
    "project.every=3",
    "regularisers=[{name: orthogonal, normalised: true, weight: 0.01}]",
]


def test_decoupled_layers_resume_exactly(tmp_path):
    chosen = plan(*DECOUPLED)
    trainer(tmp_path / "whole", chosen).fit()
    with pytest.raises(Interrupted, match="stopped after step 10"):
        trainer(tmp_path / "stopped", chosen, StopAt(10, signal.SIGINT)).fit()
    trainer(tmp_path / "stopped", chosen).fit()
    assert files(tmp_path / "stopped") == files(tmp_path / "whole")
    saved = safetensors.torch.load(files(tmp_path / "whole")["state.safetensors"])
    assert saved["model.features.3.patch_norm_mean"] > 0 and bool(saved["model.features.3.patch_norm_seen"])
    assert saved["model.features.3.radius_raw"].shape == (8,)
    assert [name for name in saved if name.startswith("model") and name.endswith("k_raw")] == ["model.features.0.k_raw"]
    assert "optimiser.model.features.0.k_raw.momentum_buffer" in saved


def test_some_kernels_are_projected(tmp_path):
    options = ["project={every: 2, s: 0.25, layers: {skip: first}}", "train.steps=4", "schedule.warmup=0"]
    run = trainer(tmp_path / "run", plan(*DECOUPLED, *options, "convert={name: sphere, exclude: [embed]}"))
    run.fit()
    away = [(layer.kernel_norms() - 0.25).abs().max().item() for _, layer in decoupled_layers(run.model)]
    assert away[0] > 0.01 and max(away[1:]) < 1e-6


def test_kernels_are_projected_at_the_start_and_every_so_often(tmp_path):
    seen: list[list[torch.Tensor]] = []

    class Watch(Callback):
        def on_start(self, trainer, step):
            seen.append([layer.kernel_norms().detach() for _, layer in decoupled_layers(trainer.model)])

        on_step = on_start

    options = ["project.s=0.25", "train.steps=7", "schedule.warmup=0", "convert={name: sphere, exclude: [embed]}"]
    chosen = plan(*DECOUPLED, *options)
    run = trainer(tmp_path / "run", chosen, Watch())
    ordinary = run.model.embed.weight.detach().norm()
    run.fit()
    assert len(seen) == 8 and all(len(norms) == 4 for norms in seen)
    for step, norms in enumerate(seen):
        away = max(float((norm - 0.25).abs().max()) for norm in norms)
        assert away < 1e-6 if step % 3 == 0 else away > 1e-5, step
    assert ordinary > 0.3 and type(run.model.embed) is torch.nn.Linear


def test_decay_spares_decoupled_kernels_radii_and_k():
    model = torch.nn.Sequential(
        hs.nn.TanhConv2d(3, 4, 3, bias=True, angular="sigmoid", learn_k="filter"),
        torch.nn.BatchNorm2d(4),
        hs.nn.BallConv2d(4, 4, 3, weighting="linear"),
        hs.nn.SegConv2d(4, 4, 3, learn_radius=False),
        torch.nn.Conv2d(4, 4, 1, bias=False),
    )
    names = {id(p): name for name, p in model.named_parameters()}
    head = torch.nn.Linear(4, 2, bias=False)
    groups = {
        decay: {
            group["name"]: (group["weight_decay"], sorted(names.get(id(p), "head") for p in group["params"]))
            for group in parameter_groups(model, head, recipe.Optimiser(decay=decay, weight_decay=0.5), CPU)
        }
        for decay in ("all", "weights")
    }
    spared = {
        "model-kernels": (0, ["0.weight", "3.weight"]),
        "model-operators": (0, ["0.k_raw", "0.radius_raw", "2.radius_raw"]),
    }
    vectors = ["0.bias", "1.bias", "1.weight"]
    assert groups["all"] == {
        "model": (0.5, sorted([*vectors, "2.weight", "4.weight"])),
        **spared,
        "head": (0.5, ["head"]),
    }
    assert groups["weights"] == {
        "model": (0.5, ["2.weight", "4.weight"]),
        "model-vectors": (0, vectors),
        **spared,
        "head": (0.5, ["head"]),
    }


@pytest.mark.parametrize("operator", ["sphere", "tanh"])
def test_two_processes_train_decoupled_layers(tmp_path, operator):
    options = ["optimiser.lr=0.01", "evaluate.every=0", "train.steps=8", "train.checkpoint_every=8", *DECOUPLED]
    options.append(f"convert={{name: {operator}, exclude: [embed]}}")
    subprocess.run(command(tmp_path / "one", *options), check=True, env=environment(), capture_output=True)
    on_two_processes(tmp_path / "two", *options)
    one, two = (RunFolder.open(tmp_path / name) for name in ("one", "two"))
    for first, second in zip(one.rows(), two.rows(), strict=True):
        for key in first.keys() - {"split", "eer", "accuracy"}:
            assert first[key] == pytest.approx(second[key], rel=2e-3), key
    states = [safetensors.torch.load_file(run.latest_checkpoint() / "state.safetensors") for run in (one, two)]
    norms = [state["model.features.0.weight"].flatten(1).norm(dim=1) for state in states]
    torch.testing.assert_close(*norms, rtol=1e-3, atol=1e-4)


def test_what_layers_learned_is_kept_for_the_report(tmp_path):
    chosen = plan(*DECOUPLED, "convert={name: ball, angular: sigmoid, learn_k: filter}", "train.steps=5")
    run = trainer(tmp_path / "run", chosen)
    run.fit()
    kept = safetensors.torch.load_file(tmp_path / "run" / "features.safetensors")
    with run.averages.in_place(), torch.no_grad():
        assert torch.equal(kept["filters"], run.model.features[0].weight)
        names = {name for name in kept if "/" in name}
        assert {name.split("/")[0] for name in names} == {"radius", "saturated", "k"} and len(names) == 15
        images = run.preprocess(run.data.test.images[: run.recipe.evaluate.batch_size])
        shares = hs.nn.saturation(run.model, images)
        for name in names:
            quantity, _, layer = name.split("/")
            own = shares[layer] if quantity == "saturated" else getattr(run.model.get_submodule(layer), quantity)
            assert torch.equal(kept[name], own)
    order = [name.split("/")[2] for name in sorted(names) if name.startswith("k/")]
    assert order == ["features.0", "features.3", "features.7", "features.10", "embed"]
    page = report.build([tmp_path / "run"])
    assert "Radius: digits-a-softmax" in page and "Filters: digits-a-softmax" in page
    assert "Patches beyond the radius (share): digits-a-softmax" in page


def test_fixed_radii_are_not_shown(tmp_path):
    chosen = plan("convert={name: ball, learn_radius: false}", "train.steps=5")
    trainer(tmp_path / "run", chosen).fit()
    kept = safetensors.torch.load_file(tmp_path / "run" / "features.safetensors")
    assert "filters" in kept and not any("/" in name for name in kept)


def test_a_conversion_that_finds_no_layer_is_blamed_on_the_recipe(tmp_path):
    override = "convert={name: tanh, include: [nothing]}"
    with pytest.raises(recipe.RecipeError, match=r"^override 'convert=.*': convert\.include must be .*, got 'nothing'"):
        trainer(tmp_path / "run", plan(override))


def test_accuracy_with_statistics_estimated_anew(tmp_path):
    """The running statistics hardly move here: with them the network is near chance, with exact ones it is not."""
    slow = "convert={name: tanh, exclude: [embed], mean_decay: 0.9999, mean_init: zero}"
    options = [slow, "regularisers=[]", "train.ema=null", "train.steps=24", "loss=softmax", "evaluate.recalibrate=5"]
    run = trainer(tmp_path / "run", plan(*options))
    for module in run.model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1e-3
    metrics = run.fit()
    assert metrics["accuracy_recalibrated"] > metrics["accuracy"] + 0.2
    rows = [row for row in run.run.rows() if row["split"] == "test"]
    assert all(0 <= row["accuracy_recalibrated"] <= 1 for row in rows) and len(rows) == 4
    before = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
    assert run.metrics(run.outputs()) == metrics
    for name, buffer in run.model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    with pytest.raises(recipe.RecipeError, match=r"evaluate\.recalibrate needs a single process"):
        Trainer(run.recipe, run.run, CPU, world=World(0, 2))


@pytest.mark.slow
def test_margins_make_digit_classes_tighter_and_further_apart(tmp_path):
    """What the demo shows, as means over three seeds."""
    means: dict[str, dict[str, float]] = {}
    for name in ("digits-softmax", "digits-a-softmax", "digits-arcface"):
        seeds = []
        for seed in range(3):
            chosen = recipe.load(name, [f"seed={seed}", "train.tensorboard=false"])
            seeds.append(trainer(tmp_path / f"{name}-{seed}", chosen).fit())
        means[name] = {key: sum(metrics[key] for metrics in seeds) / 3 for key in seeds[0]}
    softmax = means.pop("digits-softmax")
    for name, margin in means.items():
        assert margin["accuracy"] > 0.97, name
        assert margin["mean_angle"] < 0.85 * softmax["mean_angle"], name
        assert margin["min_centre_angle"] > softmax["min_centre_angle"] + 1, name
        assert margin["energy"] < softmax["energy"], name


def test_a_run_that_goes_on_under_other_conditions_says_what_differs(tmp_path):
    chosen, threads = plan(), torch.get_num_threads()
    with pytest.raises(Interrupted):
        trainer(tmp_path / "run", chosen, StopAt(9, signal.SIGINT)).fit()
    run = RunFolder.open(tmp_path / "run")
    recorded = run.facts()["environment"]
    assert recorded["threads"] == str(threads) and "deterministic=False" in recorded["flags"]
    with pytest.raises(Interrupted):  # under the same conditions it says nothing: a warning would be an error here
        trainer(tmp_path / "run", chosen, StopAt(12, signal.SIGINT)).fit()
    torch.set_num_threads(threads + 1)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.warns(UserWarning, match="goes on from step 12 under other conditions") as caught:
            trainer(tmp_path / "run", chosen).fit()
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    said = str(caught[0].message)
    assert f"threads: {threads} before, {threads + 1} now" in said
    assert "deterministic=False" in said and "deterministic=True" in said and "processes" not in said
    assert [one["step"] for one in run.facts()["resumed"]] == [9, 12]


def test_an_older_run_without_some_conditions_goes_on():
    old = {"torch": "2.13.0", "device": "cpu (x86_64)", "threads": "1"}
    assert differences(old, {**old, "processor": "another", "flags": "deterministic=False"}) == []
    assert differences(old, {**old, "torch": "2.14.0"}) == ["torch: 2.13.0 before, 2.14.0 now"]
