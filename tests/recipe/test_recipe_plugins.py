"""Plugins that a recipe names, and the spellings and short forms that recipes take."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from hypersphere import plugins, recipe
from hypersphere.losses import losses
from hypersphere.recipe import RecipeError
from hypersphere.runs import RunError, RunFolder
from hypersphere.train import Trainer

CPU = torch.device("cpu")
MARGIN = """
from hypersphere.losses import losses
from hypersphere.losses import Softmax

@losses.register("{name}")
class Own(Softmax):
    '''Softmax under another name.'''
"""


pytestmark = pytest.mark.usefixtures("no_plugins")


@pytest.fixture
def write(tmp_path: Path):
    def save(text: str, name: str = "recipe.yaml") -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return file

    return save


def own(write, name: str, file: str = "parts/mine.py") -> Path:
    return write(MARGIN.format(name=name), file)


# -------------------------------------------------------------------------------------------------- plugins


def test_a_recipe_loads_the_plugins_that_it_names_from_its_folder(write, monkeypatch):
    file = own(write, "own-1")
    monkeypatch.chdir("/")
    plan = recipe.load(write("plugins: [../parts/mine.py]\nloss: own-1\n", "recipes/mine.yaml"))
    assert plan.loss.name == "own-1" and "own-1" in losses
    (record,) = plan.plugins
    assert (record.name, record.path) == ("mine", str(file.resolve())) and len(record.digest) == 64


def test_a_plugin_may_stand_alone_or_in_an_override(write, monkeypatch, tmp_path):
    own(write, "own-2", "mine.py")
    assert recipe.load(write("plugins: ./mine.py\nloss: own-2\n")).plugins[0].name == "mine"
    monkeypatch.chdir(tmp_path)
    assert recipe.load("digits-softmax", ["plugins=[mine.py]", "loss=own-2"]).loss.name == "own-2"


def test_a_recipe_keeps_the_plugins_of_its_base(write):
    own(write, "own-3", "base/one.py")
    own(write, "own-4", "child/two.py")
    write("plugins: [one.py]\nloss: own-3\n", "base/base.yaml")
    plan = recipe.load(write("base: ../base/base.yaml\nplugins: [two.py]\n", "child/recipe.yaml"))
    assert [one.name for one in plan.plugins] == ["one", "two"] and plan.loss.name == "own-3"


def test_plugins_do_not_change_the_hash(write):
    own(write, "own-5")
    plain = recipe.load(write("seed: 1\n"))
    assert recipe.load(write("seed: 1\nplugins: [parts/mine.py]\n")).hash == plain.hash


def test_a_plugin_that_is_missing_is_placed(write):
    file = write("seed: 1\nplugins:\n  - nowhere.py\n")
    with pytest.raises(
        RecipeError, match=rf"^{file}, line 3: plugins\.0 plugin .*nowhere\.py.*: there is no such file"
    ):
        recipe.load(file)
    with pytest.raises(RecipeError, match=r"plugins should be a valid tuple"):
        recipe.load(write("plugins: 3\n"))


def test_a_recipe_that_was_resolved_loads_nothing_and_says_what_to_pass(write):
    file = own(write, "own-6")
    resolved = recipe.load(write("plugins: [parts/mine.py]\nloss: own-6\n")).to_yaml()
    losses.remove("own-6")
    plugins._loaded.clear()
    plugins._named.clear()
    for trusted in (True, False):
        with pytest.raises(RecipeError, match=rf"unknown loss 'own-6'(.|\n)*--plugin {file}"):
            recipe.load(write(resolved, "resolved.yaml"), plugins=trusted)
    assert plugins.loaded() == ()
    plugins.load(file)
    assert recipe.load(write(resolved, "resolved.yaml"), plugins=False).loss.name == "own-6"


def test_a_recipe_in_a_run_folder_loads_no_code(write, tmp_path):
    marker = tmp_path / "ran"
    write(f"open({str(marker)!r}, 'w').close()\n", "run/evil.py")
    write("plugins: [evil.py]\n", "run/recipe.yaml")
    RunFolder.open(tmp_path / "run").recipe()
    assert not marker.exists()
    recipe.load(tmp_path / "run/recipe.yaml")
    assert marker.exists()  # which a user may ask for


def test_a_run_goes_on_with_its_plugin_alone(write, tmp_path):
    file = own(write, "own-7")
    overrides = [
        "train.steps=4",
        "train.checkpoint_every=2",
        "train.tensorboard=false",
        f"plugins=[{file}]",
        "loss=own-7",
    ]
    plan = recipe.load("digits-softmax", overrides)
    run = RunFolder.create(tmp_path / "run", plan, CPU)
    Trainer(plan, run, CPU).fit()
    (kept,) = run.facts()["plugins"]
    assert (kept["name"], kept["members"]) == ("mine", [["loss", "own-7"]])
    losses.remove("own-7")
    plugins._loaded.clear()
    plugins._named.clear()
    with pytest.raises(RunError, match=rf"--plugin {file}"):
        run.recipe()
    file.write_text(file.read_text() + "# another\n")
    plugins.load(file)
    again = run.recipe()
    with pytest.raises(RunError, match=r"the plugin 'mine' .* has changed since .* began"):
        Trainer(again, run, CPU).fit()


# ------------------------------------------------------------------------------------- spellings, short forms


def test_american_spellings_of_keys_are_taken(write):
    british = recipe.load(write("optimiser: {lr: 0.3}\ndata: {name: digits, normalise: half}\n"))
    american = recipe.load(write("optimizer: {lr: 0.3}\ndata: {name: digits, normalize: half}\n"))
    assert american.model_dump() == british.model_dump() and "optimizer" not in american.to_yaml()
    again = recipe.load("digits-softmax", ["optimizer.lr=0.3", "data.normalize=half"])
    assert again.hash == recipe.load("digits-softmax", ["optimiser.lr=0.3", "data.normalise=half"]).hash
    regularised = recipe.load("digits-softmax", ["regularizers=[{name: orthogonal, normalized: true}]"])
    assert regularised.regularisers[0].options["normalised"] is True


def test_a_base_and_a_recipe_may_spell_differently(write):
    write("optimiser: {lr: 0.3, momentum: 0.5}\n", "base.yaml")
    plan = recipe.load(write("base: base.yaml\noptimizer: {lr: 0.2}\n"))
    assert (plan.optimiser.lr, plan.optimiser.momentum) == (0.2, 0.5)


def test_two_spellings_of_one_key_are_a_mistake(write):
    file = write("optimiser: {lr: 0.3}\noptimizer: {lr: 0.2}\n")
    with pytest.raises(RecipeError, match="optimizer is another spelling of 'optimiser': give one of them"):
        recipe.load(file)


def test_mistakes_under_another_spelling_are_placed(write):
    file = write("seed: 1\noptimizer:\n  lr: -1\n")
    with pytest.raises(RecipeError, match=rf"^{file}, line 3: optimiser\.lr should be greater than 0"):
        recipe.load(file)


def test_one_number_is_a_square():
    options = ["data.name=image-folder", "data.path=here"]
    square = recipe.load("digits-softmax", [*options, "data.size=16"])
    assert square.data.options["size"] == (16, 16)
    assert square.hash == recipe.load("digits-softmax", [*options, "data.size=[16, 16]"]).hash
    with pytest.raises(RecipeError, match=r"data\.size"):
        recipe.load("digits-softmax", [*options, "data.size=true"])
