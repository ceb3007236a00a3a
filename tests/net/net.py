"""What must not change when code moves: trajectories, hashes and names, computed anew to be compared with golden files.

``python tests/net/net.py`` writes the golden files again, after a change that is meant to change them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn

import hypersphere as hs
from hypersphere import models, recipe
from hypersphere.cli import main
from hypersphere.nn import layers, operators

GOLDEN = Path(__file__).parent / "golden"
SHORT = (
    "train.steps=6",
    "train.log_every=2",
    "train.checkpoint_every=3",
    "train.tensorboard=false",
    "data.batch_size=32",
)
RUNS: dict[str, tuple[str, ...]] = {
    "digits-softmax": (),
    "digits-arcface": ("train.ema=0.9", "train.clip_norm=1"),
    "digits-64-a-softmax": ("optimiser.name=adamw", "optimiser.decay=weights", "schedule.name=cosine"),
    "digits-64-sphereface-plus": (),
    "digits-dcnet": ("project.every=2", "evaluate.recalibrate=2"),
    "digits-spherenet": (),
    "digits-mhe": ("evaluate.energy=true",),
    "digits-rare-class": ("regularisers.0.schedule={name: linear}",),
    "digits-opt": ("orthogonal.sample=0.5", "orthogonal.every=2", "orthogonal.start=normal"),
    "digits-robust-fgsm": (),
    "shapes-pointnet": (),
    "cora-gcn-opt": ("evaluate.every=3",),
    "digits-few-shot": (),
    "digits-gan": (),
}
"""One short run of every kind of recipe, with what else it takes."""


def machine() -> str:
    """What the last bits of a result may depend on."""
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"


def write_graph(root: Path) -> None:
    """A small graph in the place of Cora."""
    rng = np.random.default_rng(0)
    nodes, width, classes = 60, 12, 7
    dense = rng.integers(0, 3, (nodes, width)).astype(np.float32)
    rows, columns = np.nonzero(dense)
    edges = np.unique(np.sort(rng.integers(0, nodes, (2, 150)), axis=0), axis=1)
    (root / "planetoid").mkdir(parents=True, exist_ok=True)
    np.savez(
        root / "planetoid/cora.npz",
        indptr=np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=nodes))]).astype(np.int32),
        indices=columns.astype(np.int16),
        values=dense[rows, columns],
        shape=dense.shape,
        edges=edges[:, edges[0] != edges[1]].astype(np.int32),
        label=(np.arange(nodes) % classes).astype(np.int16),
        train=np.arange(32),
        val=np.arange(32, 44),
        test=np.arange(44, nodes),
    )


def command(*words: str) -> None:
    """A command of the command line, in this process."""
    before, sys.argv = sys.argv, ["hypersphere", *words]
    try:
        main()
    except SystemExit as error:
        assert not error.code, f"hypersphere {' '.join(words)} ended with {error.code}"
    finally:
        sys.argv = before


def trajectory(name: str, folder: Path) -> dict[str, Any]:
    """Rows of metrics, evaluation and checkpoint of a short run."""
    write_graph(folder / "data")
    where = ("--folder", str(folder / name), "--device", "cpu", "--data-root", str(folder / "data"))
    command("train", name, *SHORT, *RUNS[name], *where)
    run = folder / name
    state = safetensors.torch.load_file(run / "checkpoints/step-00000006/state.safetensors")
    return {
        "rows": [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()],
        "evaluation": json.loads((run / "evaluation.json").read_text())["metrics"],
        "tensors": {key: [*value.shape, str(value.dtype).removeprefix("torch.")] for key, value in state.items()},
        "sums": {key: float(value.double().abs().sum()) for key, value in state.items()},
        "bytes": hashlib.sha256(b"".join(state[key].numpy().tobytes() for key in sorted(state))).hexdigest(),
    }


def recipe_hashes() -> dict[str, list[str]]:
    """Hash of every embedded recipe, with and without its seed."""
    plans = {name: recipe.load(name) for name in recipe.embedded()}
    return {name: [plan.hash, plan.hash_without_seed] for name, plan in plans.items()}


def described(module: nn.Module) -> str:
    """Names, shapes and types of a module's state: how many, and their digest."""
    lines = [f"{name} {tuple(value.shape)} {value.dtype}" for name, value in module.state_dict().items()]
    return f"{len(lines)} {hashlib.sha256(chr(10).join(sorted(lines)).encode()).hexdigest()[:16]}"


def _small(dim: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, dim, 3), nn.ReLU(), nn.Conv2d(dim, dim, 3, groups=2), nn.Flatten(), nn.Linear(dim, 4)
    )


def _heads() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    for name in hs.losses.losses:
        yield f"loss {name}", lambda name=name: hs.losses.create(name, 8, 5)


def _layers() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    for name in layers:
        yield f"layer {name}", lambda name=name: _layer(name)
    for name in operators:
        yield f"operator {name}", lambda name=name: hs.nn.convert(_small(), name)


def _layer(name: str) -> nn.Module:
    if "norm" in name:
        return layers.create(name, 8)
    return layers.create(name, 8, 4, *(() if "linear" in name else (3,)))


def _maps() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    for name in hs.orthogonal.maps:
        yield f"map {name}", lambda name=name: hs.orthogonal.apply(_small(), name)
    for name in ("oft", "boft"):
        yield f"adapter {name}", lambda name=name: hs.orthogonal.adapt(_small(), name)


def _energies() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    def prepared(name: str) -> nn.Module:
        energy = hs.energy.create(name)
        energy.prepare(_small())
        return energy

    for name in hs.energy.energies:
        yield f"energy {name}", lambda name=name: prepared(name)


def _models() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    for name in models.models:
        for shape in ((3, 32, 32), (1, 28, 28), (3, 112, 96), (64, 3), (12,)):
            yield f"model {name} {shape}", lambda name=name, shape=shape: models.create(name, shape)


def state_names() -> dict[str, str]:
    """What the state of every head, layer, operator, map, energy and model is called."""
    found = {}
    for family in (_heads, _layers, _maps, _energies, _models):
        for title, build in family():
            with torch.random.fork_rng(devices=[]), torch.device("meta" if title.startswith("model") else "cpu"):
                torch.manual_seed(0)
                try:
                    found[title] = described(build())
                except (hs.errors.HypersphereError, TypeError, RuntimeError, NotImplementedError, ValueError) as error:
                    found[title] = f"refused: {type(error).__name__}"
    return found


def write() -> None:
    """Write the golden files."""
    import tempfile

    GOLDEN.mkdir(exist_ok=True)
    files: dict[str, Any] = {"recipes": recipe_hashes(), "states": state_names()}
    with tempfile.TemporaryDirectory() as folder:
        for name in RUNS:
            torch.set_num_threads(1)
            files[f"run-{name}"] = {"machine": machine(), **trajectory(name, Path(folder))}
    for name, content in files.items():
        (GOLDEN / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    write()
