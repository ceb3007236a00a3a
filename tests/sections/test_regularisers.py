"""Regularisers in training: what they are energies of, weights by step, state, exact resume, energies by layer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from helpers.pages import Page
from helpers.runs import StopAt, files
from hypersphere import plot, recipe, report, selection
from hypersphere.data import load
from hypersphere.energy import MHE, Regulariser, energies
from hypersphere.errors import ArgumentError
from hypersphere.losses import losses
from hypersphere.recipe import Term
from hypersphere.runs import RunError, RunFolder, load_run
from hypersphere.sections.regularisers import layer_energies, layers_of
from hypersphere.train import Callback, Interrupted, Trainer
from hypersphere.train.objective import Objective

CPU = torch.device("cpu")
SHORT = [
    *("train.steps=10", "train.log_every=2", "train.checkpoint_every=4", "train.tensorboard=false"),
    *("data.batch_size=32", "model.width=4", "evaluate.every=5"),
]


def plan(*overrides: str, name: str = "digits-softmax") -> recipe.Recipe:
    return recipe.load(name, [*SHORT, *overrides])


def trainer(folder: Path, chosen: recipe.Recipe, *callbacks: Callback) -> Trainer:
    return Trainer(chosen, RunFolder.create(folder, chosen, CPU), CPU, callbacks=callbacks)


def train_rows(run: Trainer) -> list[dict]:
    return [row for row in run.run.rows() if row["split"] == "train"]


def plain_energy(rows: torch.Tensor, s: float = 2.0, half_space: bool = False) -> float:
    """Mean over ordered pairs, written out."""
    units = (rows.double() / rows.double().norm(dim=1, keepdim=True)).numpy()
    if half_space:
        units = np.concatenate([units, -units])
    pairs = [np.linalg.norm(units[i] - units[j]) ** -s for i in range(len(units)) for j in range(len(units)) if i != j]
    return float(np.mean(pairs))


# ------------------------------------------------------------------------------------------------ what it is of


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


class TestTargets:
    def terms(self, target: str, head: nn.Module, **options) -> float:
        energy = MHE(**options)
        objective = Objective(self.model, head, {"mhe": Term(energy, layers_of(energy, target, self.model, head), 0.5)})
        images, labels = torch.randn(4, 6), torch.tensor([0, 1, 2, 3])
        return objective(images, labels)[1].item()

    def setup_method(self):
        self.model = small()
        self.first, self.last = self.model[1].weight.detach(), self.model[3].weight.detach()
        self.head = losses.create("softmax", 3, 4)
        self.centres = self.head.weight.detach()

    def test_the_layers_of_the_model_are_all_hidden(self):
        expected = 10 * (plain_energy(self.first) + plain_energy(self.last))
        assert self.terms("model", self.head) == pytest.approx(0.5 * expected, rel=1e-5)

    def test_the_head_is_the_output_layer(self):
        assert self.terms("head", self.head, output_weight=3) == pytest.approx(
            1.5 * plain_energy(self.centres), rel=1e-5
        )

    def test_all_of_them_in_half_space_but_the_head(self):
        expected = sum(plain_energy(w, half_space=True) for w in (self.first, self.last))
        expected += 2 * plain_energy(self.centres)
        found = self.terms("all", self.head, half_space=True, output_weight=2)
        assert found == pytest.approx(0.5 * expected, rel=1e-5)

    def test_weights_that_do_not_train_are_left_out(self):
        self.head.weight.requires_grad_(False)
        assert self.terms("head", self.head) == 0.0

    @pytest.mark.parametrize("target", ["head", "all"])
    def test_heads_that_have_no_matrix_of_weights(self, target):
        several = losses.create("subcenter-arcface", 3, 4)
        with pytest.raises(ArgumentError, match=f"target must be 'model' with a head of several .*{target}"):
            layers_of(MHE(), target, self.model, several)
        with pytest.raises(ArgumentError, match="target must be 'model' with a head that has no matrix"):
            layers_of(MHE(), target, self.model, nn.Identity())

    @pytest.mark.parametrize(
        ("words", "target", "expected"),
        [
            ("include: 'features.*'", "model", ["features.0", "features.3", "features.7", "features.10"]),
            ("types: linear", "all", ["embed", "head"]),
            ("exclude: embed, skip: first", "model", ["features.3", "features.7", "features.10"]),
            ("skip: [output, first], types: [conv2d, linear]", "all", None),
            ("{}", "model", None),
        ],
    )
    @pytest.mark.parametrize("name", ["mhe", "mhe-gan"])
    def test_layers_are_chosen_in_the_words_of_the_other_sections(self, tmp_path, name, words, target, expected):
        """They are those that the selector says; what an energy includes by itself gives way to ``include``."""
        choice = words if words == "{}" else f"{{{words}}}"
        own = ", include: '*'" if name == "mhe-gan" else ""
        chosen = plan(f"regularisers=[{{name: {name}{own}, target: {target}, layers: {choice}}}]")
        run = trainer(tmp_path / "run", chosen)
        run.prepare()
        (term,) = run._step.objective.added.values()
        found = [layer.name for layer in term.target]
        words_of = chosen.regularisers[0].layers.choice
        rows = selection.select(run.model, **words_of)
        assert found == [row.name for row in rows if row.chosen] + ["head"] * (target == "all")
        assert expected is None or found == expected

    def test_an_energy_of_some_layers_is_the_sum_over_these(self):
        value, choice, expected = MHE(s=1.0), {"include": "1"}, 10 * plain_energy(self.first, 1.0)
        assert value(value.select(self.model, **choice)).item() == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize(
        ("words", "text"),
        [
            ("layers: {include: nothing}", r"regularisers\.0\.layers\.include must be the name or a pattern of feat"),
            (
                "layers: {types: conv2d, exclude: 'f*'}",
                r"regularisers\.0\.layers\.model must have a layer that is chosen",
            ),
            ("target: head, layers: {skip: first}", r"regularisers\.0\.layers must not be given for the target 'head'"),
            ("layers: {skip: middle}", r"regularisers\.0\.layers\.skip"),
        ],
    )
    def test_a_choice_that_cannot_be_is_blamed_on_its_place(self, tmp_path, words, text):
        with pytest.raises(recipe.RecipeError, match=text):
            trainer(tmp_path / "run", plan(f"regularisers=[{{name: mhe, {words}}}]")).prepare()

    def test_layers_that_are_not_chosen_are_not_part_of_the_hash(self):
        before = plan("regularisers=[{name: mhe}]")
        assert plan("regularisers=[{name: mhe, layers: null}]").hash == before.hash
        assert plan("regularisers=[{name: mhe, layers: {skip: first}}]").hash != before.hash

    def test_a_mistake_is_blamed_on_its_place(self, tmp_path):
        chosen = plan("loss=subcenter-arcface", "regularisers=[{name: orthogonal}, {name: mhe, target: all}]")
        with pytest.raises(recipe.RecipeError, match=r"regularisers\.1\.target must be 'model' with a head of several"):
            trainer(tmp_path / "run", chosen).prepare()


# ------------------------------------------------------------------------------------------------ weights by step


def test_weights_follow_their_schedules(tmp_path):
    linear = "{name: mhe, target: head, weight: 2, schedule: {name: linear, warmup: 4, final: 0.1}}"
    chosen = plan(f"regularisers=[{linear}, {{name: orthogonal, weight: 0.5}}]", "train.log_every=1")
    run = trainer(tmp_path / "run", chosen)
    values: list[float] = []

    class Watch(Callback):
        def on_step(self, trainer, step):
            values.append(plain_energy(before[-1]))
            before.append(trainer.head.weight.detach().clone())

    before = [run.head.weight.detach().clone()]
    run.callbacks.append(Watch())
    run.fit()
    rows = train_rows(run)
    expected = [0.5, 1.0, 1.5, 2.0, *(2 * (0.1 + 0.9 * (1 - step / 6)) for step in range(6))]
    assert [row["weight/mhe"] for row in rows] == pytest.approx(expected)
    assert [row["mhe"] for row in rows] == pytest.approx(
        [weight * value for weight, value in zip(expected, values, strict=True)], rel=1e-4
    )
    assert "weight/orthogonal" not in rows[0]
    titles = [text for text in Page(report.build([tmp_path / "run"])).words if "mhe" in text]
    assert "Weight of mhe" in titles and "Loss term: mhe" in titles


def test_a_weight_that_has_fallen_to_nothing_changes_nothing(tmp_path):
    """From the milestone on the weight is a millionth: the steps are those of a run without the term."""
    term = "{name: mhe, weight: 1e-9, schedule: {name: steps, milestones: [1], factor: 1e-9}}"
    with_term = trainer(tmp_path / "with", plan(f"regularisers=[{term}]"))
    without = trainer(tmp_path / "without", plan("regularisers=[]"))
    assert with_term.fit() == pytest.approx(without.fit(), rel=1e-3)


@pytest.mark.parametrize(
    ("regulariser", "message"),
    [
        ("{name: mhe, schedule: {name: steps}}", "schedule.milestones must be given for the schedule 'steps'"),
        ("{name: mhe, schedule: {warmup: 11}}", "schedule.warmup must not exceed train.steps = 10, got 11"),
        ("{name: mhe, schedule: {name: steps, milestones: [5, 3]}}", "schedule.milestones must increase, got [5, 3]"),
        ("{name: mhe, schedule: {nam: steps}}", "schedule.nam is not a known key. Did you mean 'name'?"),
        ("{name: mhe, target: heat}", "target should be 'model', 'head' or 'all', got 'heat'"),
        (
            "{name: mhe, target: head, half_space: true}",
            "half_space must be false for the target 'head': an output layer is full space (use target all or model)",
        ),
        ("{name: rp-comhe, target: head}", "half_space must be false for the target 'head'"),
    ],
)
def test_mistakes_in_a_regulariser(regulariser, message):
    with pytest.raises(recipe.RecipeError) as caught:
        plan(f"regularisers=[{regulariser}]")
    assert f"regularisers.0.{message}" in str(caught.value)


# ------------------------------------------------------------------------------------------------ state


class Drawing(Regulariser):
    """The length of weights along a direction that is drawn at every step, and a memory of all of them."""

    seen: ClassVar[list[tuple[int, int, float, bool]]] = []

    def prepare(self, target):
        (first, *_) = target
        self.register_buffer("direction", torch.zeros(first.matrices().shape[2]))
        self.register_buffer("memory", torch.zeros(first.matrices().shape[2]))
        self.register_buffer("rate", torch.zeros(()))

    def advance(self, step, seed, rate):
        self.seen.append((step, seed, rate, self.training))
        self.direction.copy_(torch.randn(len(self.direction), generator=torch.Generator().manual_seed(seed + step)))
        self.rate.fill_(rate)

    def forward(self, target):
        (first, *_) = target
        with torch.no_grad():
            self.memory.mul_(0.9).add_(self.direction)
        return (first.matrices() @ (self.direction + self.rate * self.memory)).square().mean()


class Learning(Regulariser):
    """Weights along a direction that is learned with them."""

    def prepare(self, target):
        (first, *_) = target
        self.direction = nn.Parameter(torch.ones(first.matrices().shape[2]))

    def forward(self, target):
        (first, *_) = target
        return (first.matrices() @ self.direction).square().mean()


@pytest.fixture
def registered(monkeypatch):
    for held in ("_entries", "_aliases"):
        monkeypatch.setattr(energies, held, dict(getattr(energies, held)))
    monkeypatch.setattr(Drawing, "seen", [])
    energies.register("drawing")(Drawing)
    energies.register("learning")(Learning)


STATEFUL = [
    "drawing",
    "learning",
    "rp-comhe",
    "ap-comhe",
    "adv-comhe",
    "naive-comhe",
    "group-comhe",
    "mhp",
    "mhc",
    "srip",
]


@pytest.mark.parametrize("name", STATEFUL)
def test_a_resumed_run_repeats_the_uninterrupted_one(name, registered, tmp_path):
    chosen = plan(f"regularisers=[{{name: {name}, weight: 0.1}}]", "train.ema=0.9", "schedule.milestones=[3]")
    trainer(tmp_path / "whole", chosen).fit()
    with pytest.raises(Interrupted, match="stopped after step 7"):
        trainer(tmp_path / "stopped", chosen, StopAt(7)).fit()
    trainer(tmp_path / "stopped", chosen).fit()
    assert files(tmp_path / "stopped") == files(tmp_path / "whole")


def test_what_a_regulariser_is_told_before_every_step(registered, tmp_path):
    chosen = plan("regularisers=[{name: drawing}, {name: drawing}]", "schedule.milestones=[3]", "optimiser.lr=0.5")
    trainer(tmp_path / "run", chosen).fit()
    assert [seen[0] for seen in Drawing.seen] == [step for step in range(10) for _ in range(2)]
    assert {seen[1] for seen in Drawing.seen[::2]}.isdisjoint({seen[1] for seen in Drawing.seen[1::2]})
    assert len({seen[1] for seen in Drawing.seen}) == 2  # one seed each, the same at all steps
    rates = [0.5 * chosen.schedule.at(step, 10) for step in range(10)]
    assert [seen[2] for seen in Drawing.seen[::2]] == pytest.approx(rates)
    assert all(seen[3] for seen in Drawing.seen)
    Drawing.seen.clear()
    other = plan("regularisers=[{name: drawing}]", "seed=1", "train.steps=2", "schedule={name: constant}")
    trainer(tmp_path / "other", other).fit()
    assert len({seen[1] for seen in Drawing.seen}) == 1


def test_what_regularisers_learn_is_trained_without_decay_and_saved(registered, tmp_path):
    chosen = plan("regularisers=[{name: learning, weight: 0.1}]", "optimiser.weight_decay=0.1")
    run = trainer(tmp_path / "run", chosen)
    run.fit()
    (group,) = [group for group in run._step.optimiser.param_groups if group["name"] == "regularisers"]
    assert group["weight_decay"] == 0 and [p.shape for p in group["params"]] == [torch.Size([9])]
    assert (group["params"][0] - 1).abs().max() > 1e-4
    assert train_rows(run)[-1]["grad_norm/regularisers"] > 0
    saved = safetensors.torch.load(files(tmp_path / "run")["state.safetensors"])
    assert torch.equal(saved["regularisers.learning.direction"], group["params"][0].detach())
    assert "optimiser.regularisers.learning.direction.momentum_buffer" in saved


@pytest.mark.parametrize("name", sorted(set(energies) - set(STATEFUL) - {"mhe-gan"}))  # which is of a GAN
def test_every_regulariser_trains_by_its_name(name, tmp_path):
    target = "model" if name == "bp-lowrank" else "all"
    run = trainer(tmp_path / "run", plan(f"regularisers=[{{name: {name}, weight: 0.01, target: {target}}}]"))
    run.fit()
    assert all(math.isfinite(row[name]) for row in train_rows(run))


# ------------------------------------------------------------------------------------------------ energies by layer


def test_energies_of_the_layers_are_written_down(tmp_path):
    run = trainer(tmp_path / "run", plan("evaluate.energy=true", "train.ema=0.9"))
    start = {
        name: layer.weight.detach().flatten(1)
        for name, layer in run.model.named_modules()
        if hasattr(layer, "weight") and layer.weight.dim() > 1
    }
    expected = {f"energy/{name}": plain_energy(weight, half_space=True) for name, weight in start.items()}
    expected["energy/head"] = plain_energy(run.head.weight.detach())
    run.fit()
    rows = [row for row in run.run.rows() if row["split"] == "energy"]
    assert [row["step"] for row in rows] == [0, 5, 10]
    first = {key: value for key, value in rows[0].items() if key not in ("step", "split")}
    assert first == pytest.approx(expected, rel=1e-5)
    with run.averages.in_place():  # what is evaluated is what is measured
        last = plain_energy(run.head.weight.detach())
    assert rows[-1]["energy/head"] == pytest.approx(last, rel=1e-5)
    facts = json.loads((tmp_path / "run" / "energy.json").read_text())
    assert (facts["s"], facts["half_space"], facts["angular"]) == (2.0, True, False)
    assert list(facts["layers"]) == [key.removeprefix("energy/") for key in first]
    head = facts["layers"]["head"]
    assert (head["role"], head["n"], head["d"]) == ("output", 7, 3)
    # 64 neurons of 9 or more numbers start near what random directions have, and nothing is below the floor.
    for name, layer in facts["layers"].items():
        assert layer["floor"] <= min(row[f"energy/{name}"] for row in rows) + 1e-6
        assert layer["floor"] < layer["random"]


def test_energies_reach_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer(tmp_path / "run", plan("train.steps=1", "evaluate.energy=true", "train.tensorboard=true")).fit()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("energy/energy/embed")] == [0, 1]


def test_energies_are_the_same_for_all_runs_or_what_is_asked_for(tmp_path):
    chosen = plan(
        "regularisers=[{name: orthogonal, weight: 1e-5}, {name: mhe, s: 1, target: head}]",
        "train.steps=1",
        "evaluate.energy=true",
    )
    run = trainer(tmp_path / "run", chosen)
    weight = run.model.embed.weight.detach().clone()
    run.fit()
    (first, _) = [row for row in run.run.rows() if row["split"] == "energy"]
    assert first["energy/embed"] == pytest.approx(plain_energy(weight, half_space=True), rel=1e-5)
    asked = trainer(tmp_path / "asked", plan("train.steps=1"))
    rows = {row.name: row.energy for row in layer_energies(asked.model, asked.head, MHE(s=4, half_space=True)).rows}
    assert rows["embed"] == pytest.approx(plain_energy(weight, 4.0, half_space=True), rel=1e-5)


def test_a_run_stopped_and_resumed_has_the_same_rows(tmp_path):
    chosen = plan("evaluate.energy=true")
    trainer(tmp_path / "whole", chosen).fit()
    for step in (1, 7):
        with pytest.raises(Interrupted):
            trainer(tmp_path / "stopped", chosen, StopAt(step)).fit()
    trainer(tmp_path / "stopped", chosen).fit()
    assert files(tmp_path / "stopped") == files(tmp_path / "whole")


def test_a_head_of_several_centres_is_left_out(tmp_path):
    run = trainer(tmp_path / "run", plan("evaluate.energy=true", "loss=subcenter-arcface", "train.steps=1"))
    run.fit()
    rows = [row for row in run.run.rows() if row["split"] == "energy"]
    assert "energy/embed" in rows[0] and "energy/head" not in rows[0]


def write_energies(folder: Path, name: str, values: list[list[float]], **layers: tuple[float, float]) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("loss: {name: softmax}\n")
    (folder / "run.json").write_text(json.dumps({"name": name}))
    facts = {
        key: {"role": "hidden", "n": 4, "d": 9, "floor": low, "random": high} for key, (low, high) in layers.items()
    }
    (folder / "energy.json").write_text(json.dumps({"s": 2, "half_space": True, "angular": False, "layers": facts}))
    rows = [
        {"step": 10 * index, "split": "energy"} | {f"energy/{key}": v for key, v in zip(layers, row, strict=True)}
        for index, row in enumerate(values)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_report_draws_excess_over_the_floor(tmp_path):
    layers = {"first": (0.5, 0.7), "head": (0.25, math.inf)}
    one = write_energies(tmp_path / "one", "one", [[0.7, 0.75], [0.6, 0.5], [0.55, 0.3]], **layers)
    two = write_energies(tmp_path / "two", "two", [[0.9, 0.35], [0.5, 0.25]], **layers)
    page = Page(report.build([one, two]))
    assert "Energy of the layers" in page.text
    first, _, sums = page.of_kind("curve")
    assert [trace["name"] for trace in first["data"]] == ["first", "head"]
    assert first["data"][0]["y"] == pytest.approx([100, 50, 25])  # of random directions
    assert first["data"][1]["y"] == pytest.approx([100, 50, 10])  # these have none: of the start
    assert [shape["y0"] for shape in first["layout"]["shapes"]] == [100]
    assert sums["data"][0]["y"] == pytest.approx([0.7, 0.35, 0.1]) and sums["data"][0]["x"] == [0, 10, 20]
    assert sums["data"][1]["y"] == pytest.approx([0.5, 0.0])


def test_energies_that_do_not_fit_are_an_error(tmp_path):
    folder = write_energies(tmp_path / "run", "run", [[0.7]], first=(0.5, 0.6))
    (folder / "energy.json").write_text(json.dumps({"s": 2, "half_space": True, "angular": False, "layers": {"x": {}}}))
    with pytest.raises(RunError, match="does not fit the metrics"):
        load_run(folder)


def test_the_picture_has_a_line_for_every_name_and_a_band_for_seeds(tmp_path):
    layers = {"first": (0.5, 0.7), "second": (0.5, 0.9)}
    runs = [
        write_energies(tmp_path / "a0", "a", [[0.7, 0.9], [0.6, 0.7]], **layers),
        write_energies(tmp_path / "a1", "a", [[0.7, 0.9], [0.56, 0.6]], **layers),
        write_energies(tmp_path / "b", "b", [[0.7, 0.9], [0.7, 0.5]], **layers),
    ]
    figure = plot.energy_curves(runs)
    left, right = figure.axes
    assert [line.get_label() for line in left.lines] == ["a (2 runs)", "b"]
    assert left.lines[0].get_ydata() == pytest.approx([0.6, (0.3 + 0.16) / 2])
    assert right.lines[0].get_ydata() == pytest.approx([100, (50 + 50 + 30 + 25) / 4])
    (band,) = left.collections
    heights = band.get_paths()[0].vertices
    assert {0.3, 0.16} <= {round(float(y), 6) for x, y in heights if x == 10}
    assert right.lines[2].get_ydata()[0] == 100


def test_the_command_draws_and_says_what_is_missing(tmp_path):
    from typer.testing import CliRunner

    from hypersphere.cli.plot import plot_app

    folder = write_energies(tmp_path / "run", "run", [[0.7], [0.6]], first=(0.5, 0.6))
    done = CliRunner().invoke(plot_app, ["energy", str(folder)])
    assert done.exit_code == 0, done.output
    assert (folder / "energy.png").stat().st_size > 5000
    (folder / "energy.json").unlink()
    failed = CliRunner().invoke(plot_app, ["energy", str(folder)])
    assert isinstance(failed.exception, RunError) and "evaluate.energy=true" in str(failed.exception)


# ------------------------------------------------------------------------------------------------ rare classes


def test_classes_are_left_with_what_was_asked_for():
    whole = load("digits")
    before = whole.train.labels.bincount().tolist()
    rare = load("digits", imbalance={"keep": {0: 5, "3": 0.1}})
    after = rare.train.labels.bincount().tolist()
    assert (after[0], after[3]) == (5, round(0.1 * before[3]))
    assert [after[k] for k in range(10) if k not in (0, 3)] == [before[k] for k in range(10) if k not in (0, 3)]
    assert len(rare.test) == len(whole.test)
    graded = whole.imbalanced({9: 7}, graded=10)
    assert graded.train.labels.bincount().tolist() == [10, 20, 30, 40, 50, 60, 70, 80, 90, 7]


def rows_of(split) -> set[bytes]:
    return {
        image.numpy().tobytes() + bytes([int(label)]) for image, label in zip(split.images, split.labels, strict=True)
    }


def test_which_images_are_left_depends_on_the_seed_and_the_number_alone():
    whole = load("digits")
    one, again = (whole.imbalanced({0: 5}, seed=3).train for _ in range(2))
    assert torch.equal(one.images, again.images) and torch.equal(one.labels, again.labels)
    other = whole.imbalanced({0: 5}, seed=4).train
    assert rows_of(other) != rows_of(one) and rows_of(one) <= rows_of(whole.train)
    assert rows_of(one) - rows_of(whole.imbalanced({0: 9}, seed=3).train) == set()
    both = whole.imbalanced({0: 5, 1: 8}, seed=3).train
    assert torch.equal(both.images[both.labels == 0], one.images[one.labels == 0])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("keep: {0: 500}", r"data\.imbalance\.keep asks for 500 images of '0', which has \d+"),
        ("keep: {zero: 5}", r"data\.imbalance\.keep has 'zero', which is no class of 'digits'"),
        ("graded: 100", r"data\.imbalance\.graded asks for 200 images of '1', which has \d+"),
    ],
)
def test_numbers_that_the_data_does_not_have(section, message, tmp_path):
    with pytest.raises(recipe.RecipeError, match=message):
        trainer(tmp_path / "run", plan(f"data.imbalance={{{section}}}", "data.hold_out=[]"))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{keep: {0: 0}}", "data.imbalance.keep.0 should be greater than 0, got 0"),
        ("{keep: {0: 2.5}}", "data.imbalance.keep must be whole numbers or shares below 1, got 2.5 for 0"),
        ("{gradd: 3}", "data.imbalance.gradd is not a known key. Did you mean 'graded'?"),
    ],
)
def test_mistakes_in_the_section(section, message):
    with pytest.raises(recipe.RecipeError) as caught:
        plan(f"data.imbalance={section}")
    assert message in str(caught.value)


def test_the_section_comes_back_as_it_was(tmp_path):
    chosen = plan("data.imbalance={keep: {0: 5, five: 0.25}, seed: 2}", "data.imbalance.keep.7=3")
    assert chosen.data.imbalance.keep == {0: 5, "five": 0.25, 7: 3}
    (tmp_path / "recipe.yaml").write_text(chosen.to_yaml())
    back = recipe.load(tmp_path / "recipe.yaml")
    assert back.model_dump() == chosen.model_dump() and back.hash == chosen.hash != plan().hash


def test_accuracy_of_rare_classes_is_that_of_the_confusions(tmp_path):
    chosen = plan("data.imbalance.keep={0: 5, 1: 20}", "data.hold_out=[]", "evaluate.metrics=[per-class, rare]")
    run = trainer(tmp_path / "run", chosen)
    metrics = run.fit()
    outputs = run.outputs()
    guesses = outputs.logits.argmax(1)
    shares = [float((guesses[outputs.labels == k] == k).double().mean()) for k in range(10)]
    assert [metrics[f"accuracy/{k}"] for k in range(10)] == pytest.approx(shares)
    assert metrics["rare_accuracy"] == pytest.approx((shares[0] + shares[1]) / 2)
