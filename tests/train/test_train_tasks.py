"""What lets one trainer serve other tasks: samples of any kind, shared tensors, several losses, options, artefacts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from hypersphere import recipe, report
from hypersphere.data import Dataset, TensorSplit, datasets
from hypersphere.data.preprocess import Preprocess
from hypersphere.errors import ArgumentError
from hypersphere.evaluate import Outputs, evaluations, measure
from hypersphere.models import models
from hypersphere.nn import convert, operators
from hypersphere.recipe import Augment, Optimiser, RecipeError, Rule
from hypersphere.report.sections import Picture, Section, figures
from hypersphere.runs import RunError, RunFolder, load_run
from hypersphere.train import Trainer
from hypersphere.train.optimiser import parameter_groups

CPU = torch.device("cpu")


class Lookup(nn.Module):
    """Rows of a shared table, weighted; two losses."""

    loss_names = ("loss", "pull")

    def __init__(self, shape: tuple[int, ...], pull: float = 0.01) -> None:
        super().__init__()
        assert shape == ()
        self.dim, self.pull = 3, pull
        self.scale = nn.Parameter(torch.ones(3))
        self.bias = nn.Parameter(torch.zeros(3))

    def attach(self, table: torch.Tensor) -> None:
        self.register_buffer("table", table, persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.table[rows] * self.scale + self.bias

    def losses(self, rows, labels, head):
        return head(self(rows), labels), self.pull * self.scale.square().sum()


def rows(root: Path | None = None) -> Dataset:
    """Row numbers of a shared table."""
    table = torch.eye(3).repeat(10, 1) + 0.01 * torch.arange(90.0).view(30, 3) / 90
    split = TensorSplit(torch.arange(30), torch.arange(30) % 3)
    return Dataset("rows", ("a", "b", "c"), split, split, context={"table": table})


@pytest.fixture
def registered():
    before = {registry: set(registry) for registry in (models, datasets, evaluations, figures)}
    models.register("lookup")(Lookup)
    datasets.register("rows")(rows)

    @evaluations.register("reach")
    def reach(outputs, *, factor: float = 1.0):
        """Largest score, by way of the samples."""
        samples = outputs.images.to(outputs.features.device)
        torch.testing.assert_close(outputs.features_of(samples), outputs.features)
        torch.testing.assert_close(outputs.predict(samples), outputs.logits)
        assert outputs.model is not None and not outputs.model.training and outputs.seed == 3
        outputs.artefacts["reach/scores"] = outputs.logits
        return {"reach": factor * float(outputs.logits.max())}

    @figures.register("reach")
    def draw(artefacts):
        picture = Picture("Scores", {"data": [], "layout": {}}, str(artefacts["scores"].shape))
        return Section("Reach", "How far.", [picture])

    yield
    for registry, names in before.items():
        for name in set(registry) - names:
            registry.remove(name)


SETTINGS = [
    *("data={name: rows, batch_size: 30, normalise: none}", "model={name: lookup}", "loss={name: softmax}", "seed=3"),
    *("train.steps=20", "train.log_every=10", "train.tensorboard=false", "optimiser.weight_decay=0"),
    "evaluate.metrics=[classification, {name: reach, factor: 2}]",
]


def train(folder: Path, *more: str) -> tuple[Trainer, dict[str, float]]:
    plan = recipe.load("digits-softmax", [*SETTINGS, *more])
    trainer = Trainer(plan, RunFolder.create(folder, plan, CPU), CPU)
    return trainer, trainer.fit()


def test_samples_of_another_kind_train_and_are_reported(registered, tmp_path):
    trainer, metrics = train(tmp_path / "run")
    assert metrics["accuracy"] > 0.6
    logits = trainer.outputs().logits
    assert metrics["reach"] == pytest.approx(2 * float(logits.max()))
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first = logged[0]
    assert first["total"] == pytest.approx(first["loss"] + first["pull"])
    assert not any("table" in name for name in trainer.weights())
    run = load_run(tmp_path / "run")
    assert run.artefacts["reach/scores"].shape == (30, 3) and not run.layers
    page = report.build([tmp_path / "run"])
    assert "How far." in page and "(30, 3)" in page


def test_the_losses_of_the_model_are_what_is_minimised(registered, tmp_path):
    """A stronger pull leaves smaller scales."""
    sizes = [
        float(train(tmp_path / str(pull), f"model.pull={pull}")[0].model.scale.detach().norm()) for pull in (0.0, 1.0)
    ]
    assert sizes[0] > 1.5 > 0.7 > sizes[1]


def test_only_images_are_normalised(registered, tmp_path):
    with pytest.raises(RecipeError, match=r"data\.normalise must be 'none' for 'rows', whose samples are no images"):
        train(tmp_path, "data.normalise=channel")
    numbers = torch.arange(5)
    assert Preprocess((), "none", Augment())(numbers) is numbers
    clouds = torch.randn(2, 3, 7)
    preprocess = Preprocess((3, 7), "none", Augment())
    assert preprocess.augmented(clouds, torch.Generator(), 2, slice(2)) is clouds
    images = torch.randint(256, (4, 2, 3, 3), dtype=torch.uint8)
    half = Preprocess((2, 3, 3), "half", Augment())
    torch.testing.assert_close(half(images), half.scaled(images.double() / 255).float())


def test_options_of_evaluations_are_checked(registered):
    with pytest.raises(RecipeError, match=r"evaluate\.metrics\.0\.facto.*Did you mean 'factor'"):
        recipe.load("digits-softmax", ["evaluate.metrics=[{name: reach, facto: 2}]"])
    with pytest.raises(
        RecipeError, match=r"evaluate\.metrics\.0\.name unknown evaluation 'rech'. Did you mean 'reach'"
    ):
        recipe.load("digits-softmax", ["evaluate.metrics=[{name: rech, factor: 2}]"])
    plan = recipe.load("digits-softmax", ["evaluate.metrics=[classification, {name: reach, factor: 2}]"])
    assert plan.evaluate.metrics[0].name == "classification" and plan.evaluate.metrics[1].options == {"factor": 2.0}
    assert recipe.check(plan.model_dump(mode="json")).to_yaml() == plan.to_yaml()
    assert plan.hash != recipe.load("digits-softmax", ["evaluate.metrics=[classification, reach]"]).hash


def test_two_evaluations_do_not_overwrite_each_other():
    outputs = Outputs(torch.eye(2), torch.eye(2), torch.arange(2), torch.eye(2))
    with pytest.raises(ArgumentError, match="metrics has two evaluations that give 'energy'; the second is 'energy'"):
        measure(outputs, ["energy", {"name": "energy"}])


def test_rules_set_rates_and_decay_by_name():
    model, head = Lookup(()), nn.Linear(3, 2)
    rules = (Rule(match="model.b*", lr=2, weight_decay=0), Rule(match="*.bias", lr=3))
    groups = parameter_groups(model, head, Optimiser(lr=0.1, weight_decay=0.01, rules=rules), CPU)
    found = {g["name"]: (len(g["params"]), round(g["base_lr"], 6), g["weight_decay"]) for g in groups}
    assert found == {
        "model": (1, 0.1, 0.01),
        "model-model.b*": (1, 0.2, 0.0),
        "head": (1, 0.1, 0.01),
        "head-*.bias": (1, 0.3, 0.01),
    }
    assert {id(p) for g in groups for p in g["params"]} == {id(p) for m in (model, head) for p in m.parameters()}


def test_rules_choose_layers_in_the_words_of_the_other_sections():
    model, head = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Linear(3, 3)), nn.Linear(3, 2)
    rules = (Rule(layers={"types": "conv2d"}, lr=2), Rule(match="*.bias", lr=3))
    groups = parameter_groups(model, head, Optimiser(lr=0.1, weight_decay=0.01, rules=rules), CPU)
    assert {g["name"]: (len(g["params"]), round(g["base_lr"], 6)) for g in groups} == {
        "model": (1, 0.1),
        "model-types=conv2d": (2, 0.2),
        "model-*.bias": (1, 0.3),
        "head": (1, 0.1),
        "head-*.bias": (1, 0.3),
    }


def test_a_rule_of_rates_leaves_the_decay_as_it_is():
    model, head = Lookup(()), nn.Linear(3, 2)
    rules = (Rule(match="*.bias", lr=2), Rule(match="head.*", lr=3))
    groups = parameter_groups(model, head, Optimiser(lr=0.1, weight_decay=0.01, decay="weights", rules=rules), CPU)
    found = {g["name"]: (round(g["base_lr"], 6), g["weight_decay"]) for g in groups}
    assert found == {
        "model-vectors": (0.1, 0.0),
        "model-*.bias-vectors": (0.2, 0.0),
        "head-*.bias-vectors": (0.2, 0.0),
        "head-head.*": (0.3, 0.01),
    }


def test_a_rule_for_what_rules_do_not_change_is_a_mistake():
    layer = convert(nn.Sequential(nn.Conv2d(1, 2, 1, bias=False)), operators.create("sphere"))
    with pytest.raises(ArgumentError, match=r"'model\.0\.\*', which fits no parameter .* that rules apply to"):
        parameter_groups(layer, nn.Linear(2, 2), Optimiser(rules=(Rule(match="model.0.*", lr=2),)), CPU)


@pytest.mark.parametrize("steps", [5, 20])
def test_training_is_kept_where_an_evaluation_fails(registered, tmp_path, steps):
    """Resumed when what it lacks is there, the run has the rows and results of one that never failed."""
    calls = []

    @evaluations.register("fickle")
    def fickle(outputs, *, factor: float = 1.0):
        """Fails the first time."""
        calls.append(factor)
        if len(calls) == 1:
            raise ArgumentError("factor", "must be another one")
        return {"most": float(outputs.logits.max())}

    more = [
        *(f"evaluate.every={steps}", "train.checkpoint_every=1000"),
        "evaluate.metrics=[classification, {name: fickle, factor: 2}]",
    ]
    with pytest.raises(RunError, match=rf"evaluate\.metrics\.1\.factor.*\n.*up to step {steps}: .*hypersphere resume"):
        train(tmp_path / "run", *more)
    run = RunFolder.open(tmp_path / "run")
    assert run.latest_checkpoint().name == f"step-{steps:08}" and run.facts()["status"] == "failed"
    _, found = train(tmp_path / "run", *more)
    assert len(calls) == 1 + 20 // steps
    assert run.facts()["status"] == "finished" and run.facts()["shape"] == []
    _, expected = train(tmp_path / "whole", *more)
    assert found == expected and run.rows() == RunFolder.open(tmp_path / "whole").rows()


def test_two_evaluations_of_one_metric_are_a_mistake(registered, tmp_path):
    with pytest.raises(RunError, match=r"evaluate\.metrics .*two evaluations that give 'reach'"):
        train(tmp_path, "evaluate.metrics=[{name: reach, factor: 1}, {name: reach, factor: 2}]")


def test_an_artefact_may_be_what_is_kept_anyway(registered, tmp_path):
    @evaluations.register("same")
    def same(outputs):
        """Leaves the features and a part of them."""
        outputs.artefacts.update({"same/all": outputs.features, "same/part": outputs.features[:4]})
        return {}

    train(tmp_path / "run", "evaluate.metrics=[same]")
    kept = load_run(tmp_path / "run").artefacts
    assert kept["same/all"].shape == (30, 3) and (kept["same/part"] == kept["same/all"][:4]).all()


def test_a_change_for_other_samples_is_named_with_its_place(registered, tmp_path):
    with pytest.raises(RecipeError, match=r"data\.augment\.flip.* must be left out here: it changes images"):
        train(tmp_path, "data.augment.flip=true")


def test_rule_that_fits_nothing_is_a_mistake(registered, tmp_path):
    with pytest.raises(RecipeError, match=r"optimiser\.rules.*'model\.nothing', which fits no parameter"):
        train(tmp_path, "optimiser.rules=[{match: model.nothing}]")
