"""Hashes of recipes: what changes them, and that recorded ones are still recognised."""

from __future__ import annotations

import functools
import itertools
import json
import shlex

import pytest
import yaml

from helpers.paths import ROOT
from hypersphere import recipe
from hypersphere.energy import Regulariser, energies
from hypersphere.recipe import hash as hashes

NO_COMMIT_GIVES = {"e726c99cb09a"}
"""Recorded from a working tree between two commits."""


def recorded() -> dict[tuple[str, str], str]:
    """Hash and command of every committed row that is of a recipe."""
    rows = [row for file in sorted((ROOT / "docs/rows").glob("*.json")) for row in json.loads(file.read_text())]
    return {(row["recipe_hash"], row["command"]): row["what"] for row in rows if row.get("recipe_hash")}


@functools.cache
def plan_of(command: str) -> recipe.Recipe:
    """The recipe of a `hypersphere train` command."""
    program, verb, name, *words = shlex.split(command)
    assert (program, verb) == ("hypersphere", "train")
    options = {index + step for index, word in enumerate(words) if word.startswith("--") for step in (0, 1)}
    return recipe.load(name, [word for index, word in enumerate(words) if index not in options])


def test_hashes_in_committed_rows_are_recognised():
    rows = recorded()
    assert len(rows) > 100
    unknown = [hash_ for hash_, command in rows if not plan_of(command).matches(hash_)]
    assert set(unknown) == NO_COMMIT_GIVES


def test_a_hash_belongs_to_one_recipe_alone():
    rows = list(recorded())
    for (_, command), (other, different) in itertools.pairwise(rows):
        plan = plan_of(command)
        assert plan.matches(other) == (plan.hash_without_seed == plan_of(different).hash_without_seed)


@pytest.mark.parametrize("name", ["run-0.1", "run-0.1-layers"])
def test_run_folders_of_version_0_1_are_recognised(name):
    folder = ROOT / "tests/net/fixtures" / name
    content = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert recipe.check(content).matches(json.loads((folder / "run.json").read_text())["recipe_hash"])


def test_a_recorded_hash_is_recognised_with_and_without_its_seed():
    plan = recipe.load("digits-arcface", ["seed=3"])
    assert plan.matches(plan.hash) and plan.matches(plan.hash_without_seed)
    assert not plan.matches(recipe.load("digits-arcface", ["seed=4"]).hash)
    assert plan.matches(recipe.load("digits-arcface", ["seed=4"]).hash_without_seed)


def test_an_option_with_a_new_name_keeps_its_hash():
    old, new = (
        recipe.load("digits-64", ["loss.name=subcenter-arcface", f"loss.{key}=2", "loss.beyond=clip"])
        for key in ("centres", "k")
    )
    assert old.to_yaml() == new.to_yaml() and new.loss.options["k"] == 2
    assert new.hash == "5341204be6fe"  # as it was under the old name


@pytest.fixture
def member():
    """Registers an energy of which a test may have several versions."""

    def register(default: float, later: dict[str, float]) -> str:
        if "dull" in energies:
            energies.remove("dull")

        class Dull(Regulariser):
            """Zero."""

            later_options = later

            def __init__(self, *, pull: float = default, hidden_weight: float = 1.0) -> None:
                super().__init__(hidden_weight=hidden_weight)

        energies.register("dull")(Dull)
        return recipe.load("digits-softmax", ["regularisers=[dull]"]).hash

    yield register
    energies.remove("dull")


def test_a_changed_default_changes_the_hash(member):
    assert len({member(1.0, {}), member(2.0, {})}) == 2


def test_an_option_that_came_later_leaves_the_hash_alone_where_it_means_as_before(member):
    as_before = member(0.0, {"pull": 0.0})
    assert member(3.0, {"pull": 3.0}) == as_before  # whatever its absence means
    assert member(0.5, {"pull": 0.0}) != as_before  # the default is no longer as before
    assert recipe.load("digits-softmax", ["regularisers=[{name: dull, pull: 0}]"]).hash == as_before


def test_parents_say_of_their_options_that_they_came_later(member):
    member(1.0, {})
    plain = recipe.load("digits-softmax", ["regularisers=[dull]"]).hash
    assert recipe.load("digits-softmax", ["regularisers=[{name: dull, hidden_weight: 1}]"]).hash == plain
    assert "hidden_weight" in energies["dull"].later and "pull" not in energies["dull"].later


def test_a_new_schema_changes_the_hash_and_recognises_the_old_one(monkeypatch):
    old = recipe.load("digits-softmax")
    seeded, seedless, first = old.hash, old.hash_without_seed, "a959528be257"
    assert old.matches(first)  # of schema 0

    def halved(content):  # a rate meant twice as much before
        return {**content, "optimiser": {**content["optimiser"], "lr": content["optimiser"]["lr"] / 2}}

    monkeypatch.setattr(hashes, "EARLIER", (*hashes.EARLIER, halved))
    new = recipe.load("digits-softmax", [f"optimiser.lr={2 * old.optimiser.lr}"])
    assert new.hash not in (seeded, seedless)
    assert new.matches(seeded) and new.matches(seedless) and new.matches(first) and new.matches(new.hash)
    assert not recipe.load("digits-softmax").matches(seeded)
