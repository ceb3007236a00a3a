"""Recipes with energies: what they say, that they run, and what the rare class gains."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from helpers.examples import example
from helpers.runs import SHAPES, noise
from hypersphere import recipe, report
from hypersphere.energy.theory import polygon_energy
from hypersphere.runs import RunFolder
from hypersphere.sections.regularisers import layer_energies
from hypersphere.train import Trainer
from hypersphere.train import trainer as trainer_module

CPU = torch.device("cpu")
LONG = [
    *("cifar100-cnn9-mhe", "cifar100-cnn9-comhe", "cifar100-imbalanced-mhe", "cifar10-imbalanced-mhe"),
    "mnist-imbalanced-mhe",
]


def energies_of(run: Trainer):
    with run.averages.in_place():
        return layer_energies(run.model, run.head).rows


def train(plan: recipe.Recipe, folder: Path) -> Trainer:
    return Trainer(plan, RunFolder.create(folder, plan, CPU), CPU)


@pytest.mark.parametrize("name", LONG)
def test_recipes_of_published_tasks_take_two_steps(name, tmp_path, monkeypatch):
    shrunk = ["train.steps=2", "train.tensorboard=false", "data.batch_size=4", "evaluate.batch_size=5"]
    plan = recipe.load(name, [*shrunk, "model.widths=[4, 6, 8]", "train.precision=fp32"])
    counts = [1, 4, 4, 4] if "imbalanced" in name else [4, 4, 4, 4]
    monkeypatch.setattr(trainer_module, "load_data", lambda *args, **options: noise(SHAPES[plan.data.name], counts))
    run = train(plan, tmp_path / "run")
    metrics = run.fit()
    (row,) = [row for row in run.run.rows() if row["split"] == "train"]
    term = plan.regularisers[0].name
    assert row["total"] == pytest.approx(row["loss"] + row[term]) and row[term] > 0
    assert ("rare_accuracy" in metrics) == ("imbalanced" in name)
    assert any(row["split"] == "energy" for row in run.run.rows()) == plan.evaluate.energy


def test_constants_of_the_published_schedules():
    mhe, comhe = recipe.load("cifar100-cnn9-mhe"), recipe.load("cifar100-cnn9-comhe")
    assert mhe.schedule.milestones == (20000, 30000, 37500) and mhe.train.steps == 42500
    assert comhe.schedule.milestones == (30000, 50000, 65000) and comhe.train.steps == 75000
    for plan, decay in ((mhe, 1e-4), (comhe, 5e-4)):
        assert (plan.optimiser.name, plan.optimiser.lr, plan.optimiser.momentum) == ("sgd", 0.1, 0.9)
        assert plan.optimiser.weight_decay == decay and plan.data.batch_size == 128
        assert (plan.data.augment.crop, plan.data.augment.flip) == (4, True)
        (term,) = plan.regularisers
        assert (term.target, term.weight) == ("all", 1.0)
    assert comhe.regularisers[0].options["half_space"] and comhe.regularisers[0].options["output_weight"] == 10
    other = recipe.load("cifar100-cnn9-mhe", ["regularisers.0.name=ap-comhe"])
    assert (other.regularisers[0].name, other.regularisers[0].target) == ("ap-comhe", "all")


# Images that are left of each class, and in all, as published.
@pytest.mark.parametrize(
    ("name", "overrides", "counts", "total"),
    [
        ("cifar10-imbalanced-mhe", [], [500, *[5000] * 9], 45_500),
        (
            "cifar10-imbalanced-mhe",
            ["data.imbalance={graded: 500}"],
            [500, 1000, 1500, 2000, 2500, 3000, 3500, 4000, 4500, 5000],
            27_500,
        ),
        ("cifar100-imbalanced-mhe", [], list(range(5, 501, 5)), 25_250),
        (
            "cifar100-imbalanced-mhe",
            ["data.imbalance={keep: {0: .1, 1: .1, 2: .1, 3: .1, 4: .1, 5: .1, 6: .1, 7: .1, 8: .1, 9: .1}}"],
            [*[50] * 10, *[500] * 90],
            45_500,
        ),
        ("mnist-imbalanced-mhe", [], [100, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949], 54_177),
    ],
)
def test_the_published_imbalances(name, overrides, counts, total):
    plan = recipe.load(name, overrides)
    whole = {"cifar10": [5000] * 10, "cifar100": [500] * 100, "mnist": [5923, *counts[1:]]}[plan.data.name]
    left = noise((1, 1, 1), whole).imbalanced(**plan.data.imbalance.model_dump()).train
    assert left.labels.bincount().tolist() == counts and len(left) == total


@pytest.mark.parametrize("name", ["digits-mhe", "digits-rare-class"])
def test_recipes_on_embedded_data_take_steps(name, tmp_path):
    short = ["train.steps=4", "train.log_every=2", "schedule={name: constant}", "evaluate.every=2"]
    run = train(recipe.load(name, [*short, "train.tensorboard=false"]), tmp_path / "run")
    assert 0 <= run.fit()["accuracy"] <= 1
    rows = [row for row in run.run.rows() if row["split"] == "train"]
    assert rows[-1]["total"] == pytest.approx(rows[-1]["loss"] + rows[-1]["mhe"]) and rows[-1]["mhe"] > 0
    assert ("Energy of the layers" in report.build([tmp_path / "run"])) == (name == "digits-mhe")


@pytest.mark.slow
def test_energy_falls_below_that_of_random_directions_on_digits(tmp_path):
    run = train(recipe.load("digits-mhe"), tmp_path / "run")
    assert run.fit()["accuracy"] > 0.97
    rows = {row.name: row for row in energies_of(run)}
    plain = train(recipe.load("digits-mhe", ["regularisers=[]", "train.steps=200"]), tmp_path / "plain")
    plain.fit()
    assert sum(row.excess for row in rows.values()) < 0.7 * sum(row.excess for row in energies_of(plain))


rare_class = example("rare_class")


def test_the_example_draws(tmp_path, capsys):
    found = rare_class.main(["--seeds", "2", "--steps", "3", "-o", str(tmp_path / "rare.png")])
    assert (tmp_path / "rare.png").stat().st_size > 10_000
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4 and printed[2].startswith("MHE on the classifier")
    result = found["with"][0]
    assert result.features.shape == (len(result.labels), 2) and result.weights.shape == (10, 2)
    cosines = torch.nn.functional.cosine_similarity(result.weights[:1], result.weights[1:])
    assert result.gap == pytest.approx(math.degrees(math.acos(cosines.max())), rel=1e-3)


def test_networks_side_by_side_are_networks():
    """One of them, written with torch's own layers, gives the same features; clipping is of each by itself."""
    networks = rare_class.Networks(3, torch.Generator().manual_seed(0))
    images = torch.randn(3, 16, 64)
    features = networks(images)
    for index in range(3):
        x = images[index]
        for layer, norm in zip(networks.layers, networks.norms, strict=False):
            own = slice(64 * index, 64 * (index + 1))
            x = torch.nn.functional.batch_norm(x @ layer[index], None, None, norm.weight[own], norm.bias[own], True)
            x = x.relu()
        torch.testing.assert_close(features[index], x @ networks.layers[2][index], rtol=1e-4, atol=1e-5)
    ((features @ networks.classifier.mT).square().mean((1, 2)) * torch.tensor([1e-4, 10.0, 100.0])).sum().backward()
    before = [p.grad.clone().view(3, -1) for p in networks.parameters()]
    networks.clip_gradients()
    after = torch.cat([p.grad.view(3, -1) for p in networks.parameters()], 1)
    assert after.norm(dim=1)[1:].tolist() == pytest.approx([0.5, 0.5], rel=1e-5)
    torch.testing.assert_close(after[0], torch.cat(before, 1)[0])


@pytest.mark.slow
def test_mhe_rescues_a_rare_class():
    """As published: the rare class is never recognised without, mostly with, and all classes together gain."""
    plain, regularised = (rare_class.train(16, regularised=flag) for flag in (False, True))

    def mean(results, key):
        return sum(getattr(result, key) for result in results) / len(results)

    assert mean(plain, "rare") < 0.1 and mean(regularised, "rare") > 0.45
    assert mean(regularised, "accuracy") > mean(plain, "accuracy") + 0.04
    assert mean(plain, "gap") < 25 and mean(regularised, "gap") == pytest.approx(36, abs=1)
    for result in regularised:  # ten directions in the plane are spread best as a regular polygon
        chords = torch.pdist(torch.nn.functional.normalize(result.weights.double(), dim=1))
        assert 2 * float((chords**-2).sum()) == pytest.approx(polygon_energy(10, 2), rel=0.03)


def test_the_example_and_the_recipe_have_the_same_constants():
    plan = recipe.load("digits-rare-class")
    found = (plan.optimiser.lr, plan.optimiser.momentum, plan.optimiser.weight_decay, plan.train.clip_norm)
    expected = (rare_class.LEARNING_RATE, rare_class.MOMENTUM, rare_class.WEIGHT_DECAY, rare_class.CLIP)
    assert found == expected and (plan.train.steps, plan.data.batch_size) == (rare_class.STEPS, rare_class.BATCH)
    assert plan.data.imbalance.keep == {rare_class.RARE: rare_class.LEFT} and plan.data.normalise == "pixel"
    assert list(plan.model.options["hidden"]) == [rare_class.WIDTH] * 2
