"""Recipes of decoupled networks: what they build, and that those on embedded data learn."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import hypersphere as hs
from hypersphere import recipe, report
from hypersphere.data import Dataset, TensorSplit
from hypersphere.runs import RunFolder
from hypersphere.train import Trainer
from hypersphere.train import trainer as trainer_module

CPU = torch.device("cpu")
# That of ImageNet has images of another size, and tests of its own.
CONVERTED = [
    name for name in recipe.names() if not name.startswith("imagenet-") and recipe.load(name).convert is not None
]
COMPARED = ["cifar100-cnn9", "cifar100-cnn9-dc", "cifar100-resnet32-dc"]


def train(plan: recipe.Recipe, folder: Path) -> Trainer:
    return Trainer(plan, RunFolder.create(folder, plan, CPU), CPU)


@pytest.fixture
def built(tmp_path, monkeypatch):
    """Builds the model of a recipe as the trainer does, for a few images that are noise."""

    def build(name: str, *overrides: str) -> Trainer:
        plan = recipe.load(name, ["train.tensorboard=false", "data.batch_size=4", *overrides])
        if plan.data.name != "digits":
            draw = torch.Generator().manual_seed(0)
            images = torch.randint(256, (20, 3, 32, 32), generator=draw, dtype=torch.uint8)
            split = TensorSplit(images, torch.arange(20) % 10)
            data = Dataset(plan.data.name, tuple(map(str, range(10))), split, split)
            monkeypatch.setattr(trainer_module, "load_data", lambda *args, **options: data)
        return train(plan, tmp_path / name)

    return build


def kinds(model: nn.Module) -> dict[str, bool]:
    """Every convolution and linear layer by name, and whether it is decoupled."""
    layers = (nn.Conv2d, nn.Linear)
    return {name: isinstance(m, hs.nn.Decoupled) for name, m in model.named_modules() if isinstance(m, layers)}


def test_the_recipes_are_there():
    assert {
        *("cifar100-cnn9-dc", "cifar100-cnn9-dc-short", "cifar100-resnet32-dc"),
        *("cifar10-spherenet", "cifar10-spherenet-learnable-k", "cifar10-spherenet-released"),
        *("digits-dcnet", "digits-spherenet"),
        *("cifar10-robust-dc", "mnist-robust-dc"),
    } == set(CONVERTED)


@pytest.mark.parametrize("operator", hs.nn.operators)
def test_any_operator_can_be_put_into_the_compared_network(operator, built):
    run = built("cifar100-cnn9-dc-short", f"convert.name={operator}", "convert.angular=linear")
    assert list(kinds(run.model).values()) == [True] * 10
    assert {layer._name() for layer in run.model.modules() if isinstance(layer, hs.nn.Decoupled)} == {operator}
    norms = torch.cat([layer.kernel_norms() for layer in run.model.modules() if isinstance(layer, hs.nn.Decoupled)])
    torch.testing.assert_close(norms, torch.ones_like(norms))


def test_networks_of_the_recipes(built):
    assert kinds(built("cifar100-cnn9").model) == dict.fromkeys(kinds(built("cifar100-cnn9").model), False)
    resnet = kinds(built("cifar100-resnet32-dc").model)
    shortcuts = [name for name in resnet if ".project." in name]
    assert len(shortcuts) == 2 and len(resnet) == 33
    assert all(decoupled == (name not in shortcuts) for name, decoupled in resnet.items())
    sphere = built("cifar10-spherenet").model
    assert list(kinds(sphere).values()) == [True] * 10 and sphere.features[0].operator.angular.k == 0.3
    learned = built("cifar10-spherenet-learnable-k").model
    for layer in (learned.features[0], learned.embed):
        torch.testing.assert_close(layer.k, torch.full((len(layer.weight),), 0.5))
    released = built("cifar10-spherenet-released").model
    assert released.features[0].out_channels == 128 and isinstance(released.features[1], nn.BatchNorm2d)
    assert (released.features[1].eps, released.features[1].momentum) == (1e-3, 1e-3)
    for name in ("digits-dcnet", "digits-spherenet"):
        model = built(name).model
        assert kinds(model) == {name: name != "embed" for name in kinds(model)}


@pytest.mark.parametrize("name", COMPARED)
def test_constants_of_the_published_comparison(name):
    plan = recipe.load(name)
    assert plan.schedule.milestones == (20000, 30000, 37500) and plan.train.steps == 42500
    assert (plan.optimiser.name, plan.optimiser.lr, plan.optimiser.weight_decay) == ("adam", 1e-3, 5e-4)
    assert plan.data.normalise == "half" and plan.data.augment.crop_mode == "reflect" and plan.data.augment.crop == 4
    if plan.convert is not None:
        (penalty,) = plan.regularisers
        assert (penalty.name, penalty.weight, penalty.options["normalised"]) == ("orthogonal", 5e-6, True)
        assert (plan.project.every, plan.project.s) == (100, 1.0)


@pytest.mark.parametrize("name", ["cifar100-cnn9", "cifar100-cnn9-dc"])
def test_short_recipes_have_the_schedule_of_the_long_ones(name):
    long, short = recipe.load(name), recipe.load(f"{name}-short")
    assert short.train.steps < long.train.steps / 10
    scaled = [milestone / long.train.steps * short.train.steps for milestone in long.schedule.milestones]
    assert short.schedule.milestones == pytest.approx(scaled, abs=1)


def test_spherenet_has_no_projection_and_an_orthonormality_term():
    plan = recipe.load("cifar10-spherenet")
    (penalty,) = plan.regularisers
    assert (penalty.name, penalty.weight, penalty.options["normalised"]) == ("orthonormal", 1e-4, False)
    assert plan.project.every == 0 and plan.loss.name == "w-softmax" and plan.loss.options["g"] == "cosine"


def test_another_operator_keeps_the_options_that_it_has(tmp_path):
    given = recipe.load("digits-dcnet").convert
    assert (given.name, given.options["angular"], given.options["mean_decay"]) == ("tanh", "sqcos", 0.95)
    seg = recipe.load("digits-dcnet", ["convert.name=seg"]).convert
    assert seg.options["angular"] == "sqcos" and seg.options["mean_decay"] == 0.95 and seg.exclude == ("embed",)
    sphere = recipe.load("digits-dcnet", ["convert.name=sphere", "convert.angular=linear"]).convert
    assert sphere.options["angular"] == "linear" and "mean_decay" not in sphere.options
    # Other operators have another beta.
    assert recipe.load("digits-dcnet", ["convert={name: seg, beta: 0.2}"]).convert.options["beta"] == 0.2
    base = recipe.load("digits-dcnet", ["convert={name: seg, beta: 0.2}"]).to_yaml()
    (tmp_path / "base.yaml").write_text(base)
    assert recipe.load(tmp_path / "base.yaml", ["convert.name=mix"]).convert.options["beta"] == 1.0
    for name in ("foo", "[seg]"):
        with pytest.raises(hs.errors.HypersphereError, match=r"convert\.name"):
            recipe.load("digits-dcnet", [f"convert.name={name}"])


def test_the_released_spherenet_has_its_loss():
    loss = recipe.load("cifar10-spherenet-released").loss
    assert (loss.name, loss.options["bias"]) == ("softmax", False)
    assert (loss.options["label_smoothing"], loss.options["probability_floor"]) == (0.01, 1e-4)


LONG = ["cifar100-cnn9", *(name for name in CONVERTED if not re.match("digits-|.*-robust", name))]


@pytest.mark.parametrize("name", LONG)
def test_recipes_of_published_tasks_take_two_steps(name, built):
    run = built(name, "train.steps=2", "model.widths=[4, 6, 8]", "evaluate.batch_size=5")
    assert 0 <= run.fit()["accuracy"] <= 1
    rows = [row for row in run.run.rows() if row["split"] == "train"]
    assert rows[-1]["step"] == 2 and rows[-1]["grad_norm/model"] > 0


@pytest.mark.parametrize("name", ["digits-dcnet", "digits-spherenet"])
def test_recipes_on_embedded_data_take_steps(name, tmp_path):
    plan = recipe.load(name, ["train.steps=4", "train.log_every=2", "model.width=4", "schedule.milestones=[3]"])
    run = train(plan, tmp_path / "run")
    run.fit()
    (row,) = [row for row in run.run.rows() if row["split"] == "test"]
    assert 0 <= row["accuracy"] <= 1
    terms = {"digits-dcnet": "orthogonal", "digits-spherenet": "orthonormal"}
    (last,) = [row for row in run.run.rows() if row["split"] == "train" and row["step"] == 4]
    assert last["total"] == pytest.approx(last["loss"] + last[terms[name]]) and last[terms[name]] > 0
    assert last["grad_norm/model-kernels"] > 0 and last["grad_norm/model-operators"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits-dcnet", "digits-spherenet"])
def test_recipes_on_embedded_data_learn(name, tmp_path):
    run = train(recipe.load(name), tmp_path / "run")
    assert run.fit()["accuracy"] > 0.97
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    values = [row["loss"] for row in rows if row["split"] == "train"]
    assert values[-1] < 0.05 * values[0]
    learned = {"digits-dcnet": "radius", "digits-spherenet": "k"}[name]
    first = getattr(run.model.features[0], learned).detach()
    assert first.std() > 0.003  # each kernel has found its own
    page = report.build([tmp_path / "run"])
    assert {"radius": "Radius", "k": "Steepness k"}[learned] in page and "Filters: " in page


def test_one_place_or_pattern_needs_no_list():
    plan = recipe.load("digits-dcnet", ["convert.skip=last", "convert.exclude=emb*"])
    assert plan.convert.skip == ("last",) and plan.convert.exclude == ("emb*",)
    with pytest.raises(
        recipe.RecipeError, match=r"convert\.skip\.0 should be 'first', 'output', 'last' or 'shortcut', got 'lst'"
    ):
        recipe.load("digits-dcnet", ["convert.skip=lst"])
