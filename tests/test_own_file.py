"""One file of a user's own, with a member of seven families, from the command line to a model that is loaded again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hypersphere as hs
from helpers.command_line import process, words
from helpers.paths import SOURCE
from hypersphere import plugins
from hypersphere.cli.terminal import console

pytestmark = pytest.mark.usefixtures("no_plugins")

OWN = '''"""Everything of mine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

import hypersphere as hs
from hypersphere.data import Dataset, TensorSplit, datasets
from hypersphere.evaluate import evaluations
from hypersphere.models import models
from hypersphere.nn import operators
from hypersphere.nn.operators import Operator
from hypersphere.orthogonal import maps
from hypersphere.orthogonal.maps import Map, cayley


@hs.margins.margins.register("own-margin")
@dataclass(frozen=True)
class Margin(hs.margins.Margin):
    """A margin of mine."""

    def psi(self, theta: Tensor, *, m: float, **_: object) -> Tensor:
        return theta.cos() - m * theta.square()


@operators.register("own-operator")
@dataclass(frozen=True)
class SquareRoot(Operator):
    """An operator of mine."""

    power: float = 0.5

    def magnitude(self, t: Tensor, radius: Tensor | float = 1.0) -> Tensor:
        return self.alpha * t.pow(self.power)


@hs.energy.energies.register("own-energy")
class Energy(hs.energy.Regulariser):
    """An energy of mine."""

    def energy(self, vectors: Tensor, role: str = "hidden") -> Tensor:
        units = hs.geometry.normalise(vectors)
        return (units @ units.mT).square().mean((1, 2))


@maps.register("own-map")
@dataclass(frozen=True)
class Twice(Map):
    """A map of mine."""

    skew: ClassVar[bool] = True

    def evaluate(self, P: Tensor) -> Tensor:
        return cayley(P / 2) @ cayley(P / 2)


@models.register("own-model")
class Model(nn.Module):
    """A model of mine."""

    def __init__(self, shape: tuple[int, int, int], *, dim: int = 8) -> None:
        super().__init__()
        self.dim = dim
        self.conv = nn.Conv2d(shape[0], 4, 3, padding=1)
        self.hidden = nn.Linear(4 * shape[1] * shape[2], 16)
        self.out = nn.Linear(16, dim)

    def forward(self, images: Tensor) -> Tensor:
        return self.out(self.hidden(self.conv(images).flatten(1)).relu())


@datasets.register("own-data")
def data(root: Path | None = None, classes: int = 3) -> Dataset:
    """Images of mine."""
    draws = torch.Generator().manual_seed(0)
    pictures = torch.randint(256, (classes, 1, 6, 6), generator=draws)
    labels = torch.arange(60) % classes
    noise = torch.randint(-20, 20, (60, 1, 6, 6), generator=draws)
    split = TensorSplit((pictures[labels] + noise).clamp(0, 255).to(torch.uint8), labels)
    return Dataset("own-data", tuple(f"own {index}" for index in range(classes)), split, split)


@evaluations.register("own-evaluation")
def evaluation(outputs: hs.evaluate.Outputs) -> dict[str, float]:
    """Numbers of mine."""
    return {"own_norm": float(outputs.features.norm(dim=1).mean())}
'''
OWN = OWN.replace("hs.evaluate.Outputs", "Outputs").replace("import evaluations", "import Outputs, evaluations")

RECIPE = """
name: own
data: {name: own-data, batch_size: 20}
model: {name: own-model, dim: 8}
loss: {name: margin-softmax, psi: own-margin, m: 0.05, s: 8}
convert: {name: own-operator, types: Conv2d, power: 0.6}
orthogonal: {name: own-map, include: hidden}
regularisers: [{name: own-energy, weight: 0.1}]
optimiser: {lr: 0.05}
train: {steps: 30, log_every: 10, tensorboard: false}
evaluate: {metrics: [classification, own-evaluation]}
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The file, and a recipe that names all that is in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "width", 600)
    Path("own.py").write_text(OWN)
    Path("own.yaml").write_text(RECIPE)
    return tmp_path / "own.py"


def test_from_the_command_line_to_a_loaded_model(own, start):
    done = start("train", "own.yaml", "--plugin", "own.py", "--folder", "run", "--device", "cpu")
    assert done.code == 0, done.err
    (plugin,) = plugins.loaded()
    facts = json.loads(Path("run/run.json").read_text())
    assert facts["status"] == "finished" and facts["plugins"] == [plugin.record()]
    families = {family for family, _ in plugin.members}
    assert families == {"margin", "operator", "energy", "orthogonal map", "model", "dataset", "evaluation"}
    assert (facts["plugins"][0]["path"], facts["plugins"][0]["digest"]) == (str(own), plugin.digest)

    before = json.loads(Path("run/evaluation.json").read_text())["metrics"]
    assert before["accuracy"] > 0.9 and before["own_norm"] > 0  # own pictures, own network: it learns
    Path("run/evaluation.json").unlink()
    done = start("evaluate", "run", "--device", "cpu", "--plugin", own)
    assert done.code == 0, done.err
    after = json.loads(Path("run/evaluation.json").read_text())["metrics"]
    assert after == pytest.approx(before) and f"{after['accuracy']:.2%}" in done.out
    assert re.search(r"own.norm", done.out, re.IGNORECASE)  # a metric that nobody declared is shown, too

    Path("run/report.html").unlink()
    assert start("report", "run", "--plugin", own).code == 0
    assert "own_norm" in Path("run/report.html").read_text() or "Own norm" in Path("run/report.html").read_text()

    system = hs.load("run", plugins=[own])
    assert system.classes == ("own 0", "own 1", "own 2")
    images = system_images()
    assert system(images).shape == (6, 3) and system.embed(images).shape == (6, 8)
    found = [prediction[0] for prediction in system.predict(images)]
    assert sum(name == f"own {index % 3}" for index, name in enumerate(found)) >= 5


def system_images():
    """Some of the images that it was trained on, from its own data set."""
    from hypersphere.data import load

    return load("own-data").test.images[:6]


def test_without_the_plugin_it_says_which_one_to_name(own, start):
    train = ["train", "own.yaml", "--folder", "run", "--device", "cpu"]
    done = start(*train, "--plugin", "own.py")
    assert done.code == 0, done.err
    for command in ("resume", "evaluate"):  # each in a process where nothing is loaded
        done = process(command, "run")
        assert (done.code, done.out) == (2, ""), done
        assert f"--plugin {own}" in words(done.err) and "Traceback" not in done.err
    program = "import hypersphere as hs, sys\ntry:\n    hs.load('run')\nexcept hs.errors.HypersphereError as error:\n"
    program += "    print(error)\nelse:\n    sys.exit(1)"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0 and f"--plugin {own}" in words(run.stdout), run
    own.unlink()  # the folder holds none of the code
    assert not [file for file in Path("run").rglob("*") if file.suffix == ".py"]
    assert process("resume", "run").code == 2


def test_a_mistake_in_a_recipe_is_told_with_own_names(own, start):
    for change, message in (
        ("loss.psi=own-margn", "Did you mean 'own-margin'?"),
        ("convert.powr=1", "Did you mean 'power'?"),
        ("data.classes=none", "data.classes should be a valid integer"),
        ("model.name=own-data", "unknown model 'own-data'"),
    ):
        done = start("train", "own.yaml", change, "--plugin", "own.py", "--folder", "run")
        assert done.code == 2 and message in words(done.err), done.err


def test_the_plugin_is_torch_code_as_any_other(own):
    plugins.load(own)
    head = hs.losses.MarginSoftmax(4, 3, psi="own-margin", m=0.1, s=8.0)
    assert head(torch.randn(5, 4), torch.arange(5) % 3).isfinite()
    layer = hs.nn.create("own-operator", "conv2d", power=0.7)(2, 3, 3)
    assert layer(torch.randn(1, 2, 5, 5)).shape == (1, 3, 3, 3)
