"""Orthogonal training from recipes: groups, logs, exact resume, resampling, what recipes say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.runs import SHAPES, StopAt, files, noise
from hypersphere import orthogonal, recipe, report
from hypersphere.energy import MHE
from hypersphere.optim import OGD
from hypersphere.recipe import RecipeError
from hypersphere.runs import RunFolder
from hypersphere.sections import orthogonal as section
from hypersphere.train import Interrupted, Trainer
from hypersphere.train import trainer as trainer_module

CPU = torch.device("cpu")
SHORT = [
    *("train.steps=12", "train.log_every=3", "train.checkpoint_every=4", "train.tensorboard=false"),
    *("data.batch_size=32", "model.width=4", "evaluate.every=6"),
]
FORMS = {
    "cayley": ["orthogonal.name=cayley"],
    "newton": ["orthogonal.name=cayley", "orthogonal.method=newton"],
    "gram-schmidt": ["orthogonal.name=gs", "orthogonal.method=newton", "orthogonal.start=normal"],
    "loewdin": ["orthogonal.name=ls", "orthogonal.method=newton-schulz"],
    "ogd": ["orthogonal.name=ogd"],
    "or": ["orthogonal.name=or", "orthogonal.penalty=0.1"],
    "s-opt": ["orthogonal.name=cp", "orthogonal.sample=0.25", "orthogonal.every=5"],
    "poet": [
        *("orthogonal.name=cp", "orthogonal.sides=both", "orthogonal.sample=9", "orthogonal.sampling=blocks"),
        "orthogonal.every=5",
    ],
    "average s-opt": ["orthogonal.name=cp", "orthogonal.sample=0.5", "orthogonal.every=5", "train.ema=0.9"],
    "blocks": ["orthogonal.name=cp", "orthogonal.blocks=2"],
    "average": ["orthogonal.name=cp", "orthogonal.method=newton", "train.ema=0.9"],
    "head": ["loss.rotation=cayley"],
}


def plan(*overrides: str) -> recipe.Recipe:
    return recipe.load("digits-softmax", [*SHORT, *overrides])


def trainer(folder: Path, chosen: recipe.Recipe, *callbacks) -> Trainer:
    return Trainer(chosen, RunFolder.create(folder, chosen, CPU), CPU, callbacks=callbacks)


def gram(run: Trainer) -> list[torch.Tensor]:
    with torch.no_grad():
        layers = [m for m in run.model.modules() if isinstance(m, (torch.nn.Conv2d, torch.nn.Linear))]
        rows = [layer.weight.double().flatten(1) for layer in layers]
    return [w @ w.T for w in rows]


@pytest.mark.parametrize("form", FORMS)
def test_an_interrupted_run_ends_as_an_uninterrupted_one(form, tmp_path, monkeypatch):
    monkeypatch.setattr(section, "RETRACT_EVERY", 4)
    chosen = plan(*FORMS[form])
    whole = trainer(tmp_path / "whole", chosen)
    whole.fit()
    with pytest.raises(Interrupted):
        trainer(tmp_path / "cut", chosen, StopAt(7)).fit()
    Trainer(chosen, RunFolder(tmp_path / "cut"), CPU).fit()
    assert files(tmp_path / "whole") == files(tmp_path / "cut")


@pytest.mark.parametrize("form", ["cayley", "newton", "gram-schmidt", "loewdin", "ogd", "s-opt", "blocks"])
def test_angles_and_norms_of_neurons_stay(form, tmp_path, monkeypatch):
    monkeypatch.setattr(section, "RETRACT_EVERY", 5)
    run = trainer(tmp_path / "run", plan(*FORMS[form], "evaluate.energy=true"))
    before = gram(run)
    run.fit()
    for old, new in zip(before, gram(run), strict=True):
        assert (new - old).abs().max() / old.abs().max() < 1e-5
    moved = [row for row in run.run.rows() if row["split"] == "orthogonality"]
    assert [row["step"] for row in moved] == [0, 6, 12]
    errors = [value for row in moved for key, value in row.items() if key.startswith("orthogonality/")]
    assert errors and max(errors) < 1e-5
    far = [value for key, value in moved[1].items() if key.startswith("moved/")]
    assert all(value > 0 for value in far)
    energies = [row for row in run.run.rows() if row["split"] == "energy"]
    for key in energies[0]:
        if key.startswith("energy/") and key != "energy/head":
            assert energies[-1][key] == pytest.approx(energies[0][key], rel=1e-5)


def test_averages_follow_redrawn_coordinates(tmp_path):
    """What was averaged before a draw was a turn of other coordinates; here the last step ends with a draw."""
    run = trainer(tmp_path / "run", plan(*FORMS["average s-opt"], "train.steps=10"))
    run.fit()
    averages = dict(zip(run.averages.parameters, run.averages.values, strict=True))
    turned = [rotation for _, rotation in orthogonal.rotations(run.model)]
    assert any(rotation.sampling for rotation in turned)
    for rotation in turned:
        assert bool((averages[rotation.free] == 0).all()) == bool(rotation.sampling)


def test_frozen_neurons_stay_and_only_the_rest_learns(tmp_path):
    run = trainer(tmp_path / "run", plan("orthogonal.name=cayley", "orthogonal.lr=0"))
    before = [m.weight.detach().clone() for m in run.model.modules() if isinstance(m, torch.nn.Conv2d)]
    run.fit()
    after = [m.weight for m in run.model.modules() if isinstance(m, torch.nn.Conv2d)]
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(old, new)


def test_groups_have_their_own_rate_and_decay(tmp_path):
    chosen = plan("orthogonal.name=cp", "orthogonal.lr=3", "orthogonal.weight_decay=0.01", "loss.rotation=cp")
    run = trainer(tmp_path / "a", chosen)
    run.prepare()
    groups = {group["name"]: group for group in run._step.optimiser.param_groups}
    assert groups["model-rotations"]["base_lr"] == pytest.approx(3 * chosen.optimiser.lr)
    assert groups["model-rotations"]["weight_decay"] == 0.01
    assert len(groups["model-rotations"]["params"]) == len(list(orthogonal.rotations(run.model)))
    assert "head-rotations" in groups
    assert groups["model"]["weight_decay"] == chosen.optimiser.weight_decay
    direct = trainer(tmp_path / "b", plan("orthogonal.name=ogd"))
    direct.prepare()
    assert isinstance(direct._step.optimiser, OGD)
    groups = {group["name"]: group for group in direct._step.optimiser.param_groups}
    assert groups["model-matrices"]["orthogonal"] and groups["model-matrices"]["weight_decay"] == 0
    assert not groups["model"].get("orthogonal")


def test_penalty_is_a_term_of_the_loss(tmp_path):
    run = trainer(tmp_path / "run", plan(*FORMS["or"]))
    run.fit()
    rows = [row for row in run.run.rows() if row["split"] == "train"]
    assert all(row["total"] == pytest.approx(row["loss"] + row["orthogonality"]) for row in rows)
    with torch.no_grad():
        expected = 0.1 * float(orthogonal.penalty(run.model))
        assert float(run._step.objective.added["orthogonality"]()) == pytest.approx(expected)
    assert rows[-1]["orthogonality"] > 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("orthogonal.name=caylay", "Did you mean 'cayley'"),
        ("orthogonal.methd=newton", "Did you mean 'method'"),
        ("orthogonal.method=exactly", "method must be one of 'solve'"),
        ("orthogonal.every=5", "nothing to draw"),
        ("orthogonal.sample=0.5", "orthogonal.every must be given"),
        ("orthogonal.sample=-1", "greater than 0"),
        ("orthogonal.include=nothing", "orthogonal.include must be the name or a pattern of features.0, "),
        ("orthogonal.exclude=['*']", "must have a layer that is chosen"),
    ],
)
def test_mistakes_name_themselves(override, message, tmp_path):
    with pytest.raises(RecipeError, match=message) as caught:
        trainer(tmp_path / "run", plan("orthogonal.name=cayley", override))
    assert "orthogonal" in str(caught.value)


@pytest.mark.parametrize("name", ["cifar100-cnn6-opt", "cifar100-resnet20-opt", "mnist-mlp-opt"])
def test_recipes_of_published_tasks_take_two_steps(name, tmp_path, monkeypatch):
    shrunk = ["train.steps=2", "train.tensorboard=false", "data.batch_size=4", "evaluate.batch_size=5"]
    small = {"cifar100-cnn6-opt": ["model.widths=[4, 6, 8]"], "cifar100-resnet20-opt": ["model.widths=[4, 6, 8]"]}
    chosen = recipe.load(name, [*shrunk, "train.precision=fp32", *small.get(name, [])])
    data = noise(SHAPES[chosen.data.name], [4, 4, 4])
    monkeypatch.setattr(trainer_module, "load_data", lambda *args, **options: data)
    run = trainer(tmp_path / "run", chosen)
    before = gram(run)
    run.fit()
    for old, new in zip(before, gram(run), strict=True):
        assert (new - old).abs().max() / old.abs().max() < 1e-5


def test_constants_of_the_published_schedules():
    cifar, mnist = recipe.load("cifar100-cnn6-opt"), recipe.load("mnist-mlp-opt")
    assert cifar.schedule.milestones == (30000, 50000, 64000) and cifar.train.steps == 75000
    assert (cifar.optimiser.lr, cifar.optimiser.momentum, cifar.optimiser.weight_decay) == (0.1, 0.9, 5e-4)
    assert cifar.data.normalise == "half" and cifar.data.batch_size == 128
    assert (mnist.optimiser.lr, mnist.data.batch_size, mnist.train.steps) == (0.01, 100, 100 * 600)


def test_old_recipes_keep_their_hashes():
    plain = recipe.load("digits-softmax")
    assert plain.orthogonal is None
    assert "orthogonal" in plain.to_yaml()
    assert recipe.load("digits-softmax", ["orthogonal.name=cayley"]).hash != plain.hash


def test_digits_recipe_learns_and_reports(tmp_path):
    chosen = recipe.load("digits-opt", ["train.tensorboard=false"])
    run = trainer(tmp_path / "run", chosen)
    metrics = run.fit()
    assert metrics["accuracy"] > 0.95
    page = report.write([tmp_path / "run"], tmp_path / "page.html")
    assert page is None or Path(tmp_path / "page.html").stat().st_size > 1000


@pytest.mark.parametrize("retract", [True, False])
def test_the_scale_of_unconstrained_matrices_stays_where_that_is_asked_for(retract, tmp_path, monkeypatch):
    monkeypatch.setattr(section, "RETRACT_EVERY", 5)
    chosen = plan("orthogonal.name=gs", "orthogonal.start=normal", f"orthogonal.retract={retract}".lower())
    run = trainer(tmp_path / "run", chosen)
    run.fit()
    for _, rotation in orthogonal.rotations(run.model):
        length = rotation.free.detach().norm(dim=-2).mean() / rotation.block**0.5
        expected = rotation.block**-0.5 if retract else 1.0
        assert float(length) == pytest.approx(expected, rel=0.3)
        assert float(orthogonal.orthogonality_error(rotation.matrices().detach()).max()) < 1e-4


def test_neurons_are_refined_by_options_of_the_descent(tmp_path):
    sums = []
    for refined in ("0", "20", "{steps: 20, half_space: true}"):
        run = trainer(tmp_path / str(len(sums)), plan("orthogonal.name=cayley", f"orthogonal.refine={refined}"))
        run.prepare()
        energies = MHE(half_space=True).layer_energies(run.model)
        sums.append(float(sum(energies.values()).detach()))
    assert max(sums[1:]) < sums[0] and sums[1] != sums[2]


def test_options_of_the_descent_must_be_some():
    with pytest.raises(RecipeError, match="greater than or equal to 0"):
        plan("orthogonal.refine=-1")
