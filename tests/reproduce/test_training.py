"""From cells to trainings: seeds, scales, what several cells share, and searches."""

import pytest

from helpers.tables import table
from hypersphere import recipe as recipes
from hypersphere.errors import ArgumentError
from hypersphere.reproduce import TableError, cell_recipe, find, trainings
from hypersphere.reproduce.plan import Entry, campaign
from hypersphere.reproduce.stand_ins import CLOUDS, FEW_SHOT, GRAPHS, IMAGES, stand_in
from hypersphere.reproduce.training import chosen_cells, preset_of, search_trainings


def test_cells_of_one_recipe_are_one_training():
    found = trainings(table(), "paper", seeds=range(2))
    cells = [[place.cell for place in one.places] for one in found]
    assert cells == 2 * [["softmax/error", "softmax/accuracy", "again/error"], ["arcface/error"]]
    assert len({one.recipe.hash for one in found}) == 4


def test_the_command_trains_the_same():
    for one in trainings(table(), "small", preset="fast", seeds=[3]):
        assert recipes.load(one.command[0], one.command[1:]).hash == one.recipe.hash
        assert one.recipe.seed == 3


def test_a_seed_changes_nothing_else():
    first, second = (cell_recipe(find("thesis-5.1"), "mhe-2/cifar100", "released", "paper", seed)[0] for seed in (0, 7))
    assert second.seed == 7 and first.hash != second.hash and first.hash_without_seed == second.hash_without_seed


def test_a_scale_shrinks_whatever_is_counted_in_steps():
    whole, _ = cell_recipe(find("thesis-2.2"), "l-softmax-4/error", "paper", "paper")
    small, _ = cell_recipe(find("thesis-2.2"), "l-softmax-4/error", "paper", "small")
    assert (whole.train.steps, small.train.steps) == (18000, 1800)
    assert whole.schedule.milestones == (12000, 15000) and small.schedule.milestones == (1200, 1500)
    # Lambda at the same share of the training is the same: base (1 + gamma step)^-power.
    before, after = (plan.loss.options["annealer"] for plan in (whole, small))
    assert before["gamma"] * 9000 == pytest.approx(after["gamma"] * 900)
    assert whole.evaluate.every == 900 and small.evaluate.every == 90
    draws, _ = cell_recipe(find("opt-11"), "p-d-4/error", "paper", "small")
    long, _ = cell_recipe(find("opt-11"), "p-d-4/error", "paper", "paper")
    assert long.train.steps / long.orthogonal.every == pytest.approx(draws.train.steps / draws.orthogonal.every)


def test_half_precision_is_compiled_at_paper_scale_and_nothing_else_is():
    compiled = {
        (scale, name): cell_recipe(find(name), cell, "paper", scale)[0].train.compile
        for scale in ("smoke", "small", "paper")
        for name, cell in (("thesis-5.1", "baseline/cifar100"), ("thesis-2.2", "softmax/error"))
    }
    assert [key for key, value in compiled.items() if value] == [("paper", "thesis-5.1")]


def test_a_smoke_run_is_two_steps():
    plan, _ = cell_recipe(find("thesis-2.2"), "l-softmax-2/error", "paper", "smoke")
    assert plan.train.steps == 2 and plan.data.batch_size == 4 and plan.schedule.milestones == ()


def test_equal_cells_of_two_tables_are_one_training():
    """The baseline of MHE stands in five tables."""
    names = [("thesis-5.1", "baseline/cifar100"), ("thesis-5.2", "baseline/w64"), ("thesis-5.3", "baseline/cnn9")]
    assert len({cell_recipe(find(name), cell, "paper", "paper")[0].hash for name, cell in names}) == 1


def test_words_that_fit_nothing():
    with pytest.raises(TableError, match=r"has no cell 'sofmax'. Did you mean 'softmax'\?.*: softmax/error"):
        trainings(table(), cells=["sofmax"])
    with pytest.raises(TableError, match=r"nothing can be trained for 'elsewhere': quoted"):
        trainings(table(), cells=["elsewhere"])
    with pytest.raises(TableError, match="not one of the preset 'fast'"):
        trainings(table(), preset="fast", cells=["softmax/accuracy"])
    with pytest.raises(ArgumentError, match="scale must be one of 'smoke', 'small', 'paper', got 'tiny'"):
        trainings(table(), "tiny")
    with pytest.raises(ArgumentError, match="preset must be one of 'paper', 'fast'"):
        preset_of(table(), "released")


def test_patterns():
    assert chosen_cells(table(), "paper", ["again", "*/accuracy"]) == ["softmax/accuracy", "again/error"]


def test_a_search_tries_values_on_a_split_of_the_training_set():
    found = table()
    tried = search_trainings(found, found.searches[0])
    assert [value for value, _ in tried] == [0.05, 0.1]
    assert [one.recipe.optimiser.lr for _, one in tried] == [0.05, 0.1]
    assert all(one.recipe.data.validation == 200 for _, one in tried)
    assert [one.places[0].preset for _, one in tried] == ["search optimiser.lr=0.05", "search optimiser.lr=0.1"]


def test_the_campaign_names_what_there_is():
    entries = campaign()
    assert entries[0] == Entry(table="thesis-5.1", scale="paper", preset="paper", cells=("baseline/cifar100",))
    for entry in entries:
        found = find(entry.table)
        assert chosen_cells(found, preset_of(found, entry.preset), entry.cells)


@pytest.mark.parametrize("name", [*IMAGES, *FEW_SHOT, *GRAPHS, *CLOUDS])
def test_stand_ins_have_the_shape_of_their_data(name):
    options = {"image-folder": ["data.path=nowhere", "data.size=[32,48]"]}.get(name, [])
    kind = "digits-softmax" if name in {**IMAGES, **FEW_SHOT} else "cora-gcn" if name in GRAPHS else "shapes-pointnet"
    data = stand_in(recipes.load(kind, [f"data.name={name}", *options]))
    assert len(data.train) and len(data.test) and data.name == name
    assert (name in GRAPHS) == bool(data.context)
    if name == "image-folder":
        assert data.train.shape == (3, 32, 48)
