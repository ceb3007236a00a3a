"""Networks that are trained to measure another run with."""

import pytest
import torch

from hypersphere import recipe
from hypersphere.data import load as load_data
from hypersphere.errors import ArgumentError
from hypersphere.evaluate import evaluations
from hypersphere.recipe import RecipeError
from hypersphere.runs import RunError, RunFolder, load
from hypersphere.train import DivergedError, Interrupted, Trainer, beside

CPU = torch.device("cpu")
SHORT = "digits-softmax data.hold_out=[] train.steps=3 schedule.milestones=[2] model.width=2"


@pytest.fixture
def digits():
    return load_data("digits")


def fit(folder, name, *changes):
    plan = recipe.load(name, [*changes, "train.tensorboard=false"])
    trainer = Trainer(plan, RunFolder.create(folder, plan, CPU), CPU)
    return trainer, trainer.fit()


def test_it_is_the_run_of_that_recipe(tmp_path, digits):
    _, *changes = SHORT.split()
    fit(tmp_path / "run", "digits-softmax", *changes)
    system = beside.trained(SHORT, digits, CPU, option="source")
    same = load(tmp_path / "run")
    images = digits.test.images[:20]
    assert torch.equal(system.scores(images.float() / 255), same.scores(images.float() / 255))
    assert not system.model.training


def test_it_is_kept_for_the_same_data_and_recipe(digits, monkeypatch):
    first = beside.trained(SHORT, digits, CPU, option="source")
    monkeypatch.setattr(beside, "_fit", lambda *_: "another")
    assert beside.trained(SHORT, digits, CPU, option="source") is first
    assert beside.trained(SHORT, load_data("digits"), CPU, option="source") == "another"
    assert beside.trained(f"{SHORT} seed=1", digits, CPU, option="source") == "another"
    beside._kept = None


def test_random_numbers_stay_as_they_were(digits):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with torch.no_grad():
        beside.trained(f"{SHORT} seed=2", digits, CPU, option="source")
    assert torch.equal(torch.rand(3), expected)


def test_what_it_cannot_be(tmp_path, digits):
    with pytest.raises(ArgumentError, match="'digits'; mnist-cnn is for 'mnist'"):
        beside.trained("mnist-cnn", digits, CPU, option="source")
    with pytest.raises(ArgumentError, match="no data set"):
        beside.trained(SHORT, None, CPU, option="source")
    with pytest.raises(RecipeError, match="bananas"):
        beside.trained("digits-softmax bananas=1", digits, CPU, option="source")
    with pytest.raises(RunError, match="does not exist"):
        beside.other(tmp_path / "nowhere", digits, CPU, option="source")


def test_a_folder_of_the_name_of_a_recipe_is_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert beside.names_recipe("digits-softmax seed=3") and not beside.names_recipe("")
    (tmp_path / "digits-softmax").mkdir()
    assert not beside.names_recipe("digits-softmax")


def test_it_diverges_for_itself(digits, monkeypatch):
    def diverge(self):
        raise DivergedError("the loss is nan")

    monkeypatch.setattr(Trainer, "fit", diverge)
    with pytest.raises(RunError, match="to measure another run with, diverged: the loss is nan"):
        beside.trained(f"{SHORT} seed=9", digits, CPU, option="source")


def test_a_stop_of_it_stops_the_run(tmp_path, monkeypatch):
    def stop(self):
        raise Interrupted("stopped", 15)

    monkeypatch.setattr(Trainer, "metrics", lambda self, outputs: stop(self))
    constant = ("schedule.name=constant", "schedule.milestones=[]")
    plan = recipe.load("digits-softmax", ["train.steps=1", *constant, "train.tensorboard=false"])
    run = RunFolder.create(tmp_path / "run", plan, CPU)
    with pytest.raises(Interrupted):
        Trainer(plan, run, CPU).fit()
    assert run.facts()["status"] == "interrupted" and run.latest_checkpoint() is not None


def test_evaluations_take_a_recipe(tmp_path, digits):
    small = ("train.steps=1", "model.widths=[3,5]", "model.latent=4", "data.batch_size=16")
    gan, _ = fit(tmp_path / "gan", "digits-gan", *small)
    found = evaluations.create("generation", gan.outputs(), classifier=SHORT, samples=40, splits=2)
    assert found["classifier_score"] >= 1
    target, _ = fit(tmp_path / "target", "digits-robust", "train.steps=1", "evaluate.metrics=[classification]")
    options = {"attacks": ("fgsm",), "masking": False, "deepfool": 0, "images": 20}
    found = evaluations.create("attacks", target.outputs(), source="digits-robust train.steps=2", **options)
    assert 0 <= found["accuracy_transfer_fgsm"] <= 1
    beside._kept = None
