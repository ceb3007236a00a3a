"""Sections of recipes: one of a user's own has every hook, and hooks are called in the stated order."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from pydantic import Field
from torch import nn

from helpers.runs import StopAt
from hypersphere import recipe, runs
from hypersphere.errors import check_range
from hypersphere.recipe import Section, Term, Work, sections
from hypersphere.recipe.part import Keys
from hypersphere.recipe.section import ORDER, kinds
from hypersphere.runs import RunFolder
from hypersphere.train import Callback, Interrupted, Trainer

CPU = torch.device("cpu")
SHORT = ("train.steps=6", "train.log_every=2", "train.checkpoint_every=3", "train.tensorboard=false")

CALLS: list[str] = []


class Pull(nn.Module):
    """The squared distance of a weight from a point that follows it."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.follower = weight.detach().clone()

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return (weight - self.follower).square().sum()


class Following(Work):
    """Pulls the head's weight to what it was, multiplies the batch and counts steps."""

    split = "follow"

    def __init__(self, run: recipe.Training, part: Follow) -> None:
        CALLS.append("train")
        self.run, self.part = run, part
        self.pull = Pull(run.head.weight)
        self.count = torch.zeros((), dtype=torch.int64)
        self.rates: list[float] = []

    def terms(self):
        CALLS.append("terms")
        return {"follow": Term(self.pull, self.run.head.weight, self.part.strength)}

    def group(self, groups):
        CALLS.append("group")
        for group in groups:
            if group["name"] == "head":
                group["base_lr"] *= self.part.factor

    def start(self, optimiser):
        CALLS.append("start")

    def before(self, step, rate):
        CALLS.append("before")
        self.rates.append(rate)

    def samples(self, samples, labels, generator):
        CALLS.append("samples")
        return samples + 0.01 * torch.rand(samples.shape, generator=generator)

    def after(self, step):
        CALLS.append("after")
        self.count += 1
        self.pull.follower.lerp_(self.run.head.weight.detach(), 0.5)

    def state(self):
        return {"count": self.count, "follower": self.pull.follower}

    def restored(self, state):
        CALLS.append(f"restored {int(state['count'])}")

    def logged(self):
        return {"followed": float(self.count)}

    def measured(self, step):
        self.run.keep("follow.json", {"count": int(self.count)})
        return {"follow/norm": float(self.pull.follower.norm())}


class Follow(Section, Keys):
    """A weight that is pulled to where it was."""

    strength: float = Field(0.1, ge=0)
    factor: float = 1.0

    def mistakes(self, recipe):
        if self.strength > recipe.train.steps:
            yield ("follow", "strength"), "must not exceed train.steps"

    def convert(self, model, recipe):
        CALLS.append("convert")
        return model

    def rotate(self, model, recipe):
        CALLS.append("rotate")
        return model

    def train(self, run):
        return Following(run, self)


@pytest.fixture
def follow():
    sections.register("follow")(Follow)
    CALLS.clear()
    yield
    sections.remove("follow")


def plan(*overrides: str) -> recipe.Recipe:
    return recipe.load("digits-softmax", [*SHORT, *overrides])


def trainer(folder: Path, chosen: recipe.Recipe, *callbacks: Callback) -> Trainer:
    return Trainer(chosen, RunFolder.create(folder, chosen, CPU), CPU, callbacks=callbacks)


def saved(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(RunFolder(folder).latest_checkpoint() / "state.safetensors")


# ---------------------------------------------------------------------------------------------- in a recipe


def test_every_section_stands_in_a_recipe_in_the_order_of_its_hooks():
    assert tuple(kinds()) == ORDER
    resolved = recipe.load("digits-softmax").model_dump()
    assert set(ORDER) <= set(resolved)
    full = recipe.load("digits-dcnet", ["orthogonal=cayley", "adversary=fgsm", "batch_norm.every=10", "early_stop={}"])
    assert tuple(full.sections()) == ORDER


def test_an_own_section_is_a_key_of_recipes(follow):
    before = recipe.load("digits-softmax").hash
    assert recipe.load("digits-softmax").follow is None
    chosen = plan("follow={}")
    assert chosen.follow.strength == 0.1 and tuple(chosen.sections())[-1] == "follow"
    assert (
        recipe.load("digits-softmax", ["follow=null"]).hash
        == before
        != recipe.load("digits-softmax", ["follow={}"]).hash
    )
    assert ("follow.strength", "0.1", "") in [*recipe.settings()]
    assert recipe.check(chosen.model_dump(mode="json")).follow == chosen.follow


def test_an_own_section_has_not_changed_the_hashes_of_others(follow):
    assert recipe.load("digits-a-softmax").hash == "2634f3acaadd"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "follow.strengh=1",
            r"follow\.strengh is not a known key\. Did you mean 'strength'\? Allowed: strength, factor",
        ),
        ("follow.strength=-1", r"follow\.strength should be greater than or equal to 0"),
        ("follow.strength=7", r"follow\.strength must not exceed train\.steps"),
    ],
)
def test_mistakes_in_an_own_section_are_placed(follow, override, message):
    with pytest.raises(recipe.RecipeError, match=rf"^override '{override}': {message}"):
        plan(override)


def test_without_its_plugin_the_section_is_unknown():
    with pytest.raises(recipe.RecipeError, match=r"follow is not a known key"):
        plan("follow={}")


# ------------------------------------------------------------------------------------------------- in a run


def test_hooks_are_called_in_the_stated_order(follow, tmp_path):
    run = trainer(tmp_path / "run", plan("follow={}", "train.steps=2"))
    run.fit()
    step = ["before", "samples", "after"]
    assert ["convert", "rotate", "train", "terms", "group", "start", *step, *step] == CALLS


def test_an_own_section_trains_and_is_logged(follow, tmp_path):
    run = trainer(tmp_path / "run", plan("follow={factor: 0.5}"))
    rate = run.recipe.optimiser.lr
    run.fit()
    groups = {group["name"]: group for group in run._step.optimiser.param_groups}
    assert groups["head"]["base_lr"] == 0.5 * rate and groups["model"]["base_lr"] == rate
    rows = run.run.rows()
    train = [row for row in rows if row["split"] == "train"]
    assert [row["followed"] for row in train] == [2, 4, 6]
    assert all(row["total"] == pytest.approx(row["loss"] + row["follow"]) for row in train) and train[-1]["follow"] > 0
    assert [row["step"] for row in rows if row["split"] == "follow"] == [0, 6]
    assert (tmp_path / "run/follow.json").read_text() == '{"count": 6}'
    assert len(run.works["follow"].rates) == 6 and max(run.works["follow"].rates) == rate


def test_the_state_of_an_own_section_is_resumed_to_the_bit(follow, tmp_path):
    chosen = plan("follow={}")
    trainer(tmp_path / "whole", chosen).fit()
    with pytest.raises(Interrupted):
        trainer(tmp_path / "cut", chosen, StopAt(4)).fit()
    assert int(saved(tmp_path / "cut")["follow.count"]) == 4
    CALLS.clear()
    Trainer(chosen, RunFolder(tmp_path / "cut"), CPU).fit()
    assert "restored 4" in CALLS and CALLS.count("after") == 2
    whole, cut = saved(tmp_path / "whole"), saved(tmp_path / "cut")
    assert list(whole) == list(cut) and all(torch.equal(whole[name], cut[name]) for name in whole)
    read = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "cut")]
    assert read[0] == read[1]


def test_hooks_change_what_they_say(follow, tmp_path):
    plain = trainer(tmp_path / "plain", plan())
    plain.fit()
    for name, option in {"term": "follow={strength: 5}", "rate": "follow={strength: 0, factor: 2}"}.items():
        other = trainer(tmp_path / name, plan(option))
        other.fit()
        assert not torch.equal(other.head.weight, plain.head.weight)


def test_an_own_section_changes_the_model_and_its_mistakes_are_placed():
    class Widen(Section, Keys):
        """Longer features."""

        factor: float = 2.0

        def convert(self, model, recipe):
            check_range("factor", self.factor, 1)
            model.register_forward_hook(lambda module, inputs, output: self.factor * output)
            return model

    images = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)

    def features(*overrides):
        model, _, preprocess = runs.build(plan(*overrides), (1, 8, 8), 10)
        return model.eval()(preprocess(images))

    sections.register("widen")(Widen)
    try:
        torch.testing.assert_close(features("widen.factor=3"), 3 * features())
        with pytest.raises(
            recipe.RecipeError, match=r"^override 'widen\.factor=0\.5': widen\.factor must be at least 1"
        ):
            features("widen.factor=0.5")
    finally:
        sections.remove("widen")
