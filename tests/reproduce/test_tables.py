"""Declarations of tables: what they may say, and that those of the package agree with themselves and with the works."""

import datetime
import re
import subprocess
from pathlib import Path

import pytest

from helpers.paths import ROOT
from helpers.tables import TEXT, table
from hypersphere.reproduce import TableError, cell_recipe, find, tables, trainings
from hypersphere.reproduce.rows import read_rows
from hypersphere.reproduce.scoreboard import reference
from hypersphere.reproduce.table import Measure, matches, parse

THESIS = (
    *("2.2", "2.3", "2.4", "2.5", "2.8", "2.9", "2.10", "3.1", "3.2", "3.3", "3.4.3", "3.4"),
    *("4.1", "4.2", "4.3", "4.4", "4.5", "4.6", "4.7", "4.8"),
    *("5.1", "5.2", "5.3", "5.4", "5.5", "5.6", "5.7", "5.8", "5.9", "5.10"),
    *("6.1", "6.2", "6.3", "6.4", "6.5", "6.6", "6.7", "6.8"),
    *("7.1", "7.2", "7.3", "7.4", "7.5", "7.6", "7.7", "7.8", "7.9", "7.10", "7.11", "7.12"),
    *("A.1", "A.2", "C.2", "D.3", "D.4", "D.6", "D.6-text", "D.7", "D.8", "E.4", "E.5", "E.6", "E.8", "F.4", "F.5"),
)
PAPER = ("6", "7", "8", "9", "10", "11", "12", "13")
DECLARED = [f"thesis-{number}" for number in THESIS] + [f"opt-{number}" for number in PAPER]
FIGURES = (
    *(
        "1.1",
        "1.2",
        "1.3",
        "2.2",
        "2.5",
        "2.7",
        "2.10",
        "2.11",
        "2.12",
        "3.3",
        "3.4",
        "3.5",
        "3.6",
        "4.4",
        "5.1",
        "5.3",
    ),
    *("5.4", "6.1", "6.2", "6.3", "7.3", "A.1", "A.2", "C.1", "C.2", "C.4", "D.1", "D.3", "D.4", "D.5"),
    *("E.2", "E.3", "E.4", "E.5"),
)
SAME = {
    **{f"opt-{number}": f"thesis-7.{place}" for number, place in ((1, 1), (2, 6), (3, 7), (4, 2), (5, 5))},
    **{f"nips-{number}": f"thesis-3.{number}" for number in (1, 2, 3, 4)},
    **{"opt-19": "thesis-F.4", "opt-20": "thesis-F.5"},
}


# ------------------------------------------------------------------------------------------ those of the package


def test_every_results_table_is_declared():
    assert len(DECLARED) == 73
    assert sorted(name for name, one in tables().items() if one.kind == "table") == sorted(DECLARED)
    figures = {name for name, one in tables().items() if one.kind == "figure"}
    assert figures == {f"thesis-fig-{number}" for number in FIGURES} | {"opt-fig-4", "opt-fig-7"}


@pytest.mark.parametrize(("other", "name"), SAME.items())
def test_tables_that_works_share_are_one_with_two_names(other, name):
    assert find(other) is find(name)


# Typed from the works, and not from the files.
PRINTED = {
    ("thesis-2.2", "l-softmax-4/error"): 0.31,
    ("thesis-3.3", "conv/accuracy"): 80.73,
    ("thesis-5.1", "half-mhe-2/cifar100"): 25.61,
    ("thesis-5.1", "baseline/cifar10"): 7.75,
    ("thesis-7.1", "upt-learned/cnn-6"): 48.47,
    ("thesis-7.2", "mean-2e-2/error"): 53.89,
    ("thesis-7.2", "mean-2e-2/energy"): 3.5531,
    ("thesis-7.2", "mean-3e-2/error"): "N/C",
    ("opt-6", "gs/cnn-6"): 33.02,
    ("opt-6", "hr/resnet-32"): 29.56,
    ("opt-11", "p-3/error"): 45.22,
    ("thesis-F.4", "k-64/cp"): 67.36,
    ("thesis-F.4", "k-2/ogd"): 35.06,
}


@pytest.mark.parametrize(("place", "number"), PRINTED.items())
def test_printed_numbers(place, number):
    assert find(place[0]).published_at(place[1]) == number


def _number(published):
    return float("inf") if published == "N/C" else float(published)


@pytest.mark.parametrize("name", sorted(tables()))
def test_orderings_agree_with_the_published_numbers(name):
    found = tables()[name]
    for ordering in found.orderings:
        for better, worse in found.pairs(ordering):
            measure = found.measure_of(better)
            first, second = found.published_at(better), found.published_at(worse)
            if first is None or second is None:
                continue
            if measure.better == "higher":
                assert first != "N/C" and (second == "N/C" or float(first) > float(second)), (better, worse)
            else:
                assert _number(first) < _number(second), (better, worse)


@pytest.mark.parametrize("name", sorted(tables()))
def test_a_table_can_be_trained_or_says_why_not(name):
    found = tables()[name]
    if not any(found.runnable(preset) for preset in found.presets):
        assert found.needs.missing or found.pictures or all(map(found.why_not, found.names()))
    if found.curves:
        assert set(reference(found.curves)) <= set(found.names())
    for preset in found.presets:
        assert found.presets[preset].title
        for pattern in (*found.presets[preset].only, *(cell for one in found.deviations for cell in one.cells)):
            assert any(matches(cell, pattern) for cell in found.names()), pattern
    for one in found.deviations:
        assert set(one.presets) <= set(found.presets)


def _cells():
    return [(name, preset) for name, one in tables().items() for preset in one.presets if one.runnable(preset)]


def _rotating(parts):
    """A part of a list that is another one every day, and all of it in a fortnight."""
    today = datetime.datetime.now(datetime.UTC).date().toordinal()
    return [part for index, part in enumerate(parts) if (index + today) % 14 == 0]


def _resolve(name, preset):
    for scale in ("small", "paper"):
        for one in trainings(tables()[name], scale, preset=preset, seeds=[0]):
            schedule, steps = one.recipe.schedule, one.recipe.train.steps
            assert all(step < steps for step in schedule.milestones) and schedule.warmup < steps
            assert len(set(schedule.milestones)) == len(schedule.milestones)


@pytest.mark.parametrize(("name", "preset"), _rotating(_cells()))
def test_every_recipe_resolves_at_every_scale(name, preset):
    _resolve(name, preset)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_recipe_of_every_table_resolves():
    for name, preset in _cells():
        _resolve(name, preset)


RECORDED = sorted(file.stem for file in (ROOT / "docs/rows/tables").glob("*.csv"))


def _git(*arguments):
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", RECORDED)
def test_orderings_were_committed_before_anything_was_trained(name):
    """The file at the version that a row names states every ordering as it is stated now.

    Rows of a version that is not in the history say so, and decide nothing among themselves.
    """
    if _git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("needs the history of a checkout")
    now = [(one.order, one.only) for one in tables()[name].orderings]
    for commit in {row.commit for row in read_rows(ROOT / "docs/rows/tables", name) if row.dated}:
        assert re.fullmatch("[0-9a-f]{7,40}", commit), f"{commit} is no commit, or not a clean one"
        shown = _git("show", f"{commit}:src/hypersphere/reproduce/tables/{name}.yaml")
        assert shown.returncode == 0, f"{commit} has no declaration of {name}"
        then = [(one.order, one.only) for one in parse(shown.stdout, f"{name} at {commit}").orderings]
        assert all(ordering in then for ordering in now), commit


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_rows_are_of_cells_of_their_tables(name):
    found = tables()[name]
    rows = read_rows(ROOT / "docs/rows/tables", name)
    assert rows and len({row.key for row in rows}) == len(rows)
    for row in rows:
        assert row.cell in found.runnable(row.preset) and row.scale in ("small", "paper")
        assert row.value is not None or row.status == "diverged"


# ------------------------------------------------------------------------------------------------ what they may say


def test_the_grid():
    found = table()
    assert list(found.names()) == [
        *("softmax/error", "softmax/accuracy", "again/error"),
        *("arcface/error", "arcface/accuracy", "elsewhere/error"),
    ]
    assert found.runnable("paper") == ["softmax/error", "softmax/accuracy", "again/error", "arcface/error"]
    assert found.runnable("fast") == ["softmax/error", "again/error", "arcface/error"]
    assert found.why_not("elsewhere/error") == "quoted from another work"
    assert found.why_not("arcface/accuracy") == "not asked for" and not found.why_not("softmax/error")


def test_changes_come_in_order():
    recipe, changes = table().changes("arcface/error", "fast")
    assert recipe == "digits-arcface" and changes[-2:] == ("optimiser.lr=0.2", "loss.m=0.2")


def test_deviations_of_a_cell():
    found = table()
    assert found.deviations_of("arcface/error", "fast", "small") == ["shorter", "faster"]
    assert found.deviations_of("softmax/error", "fast", "paper") == []


MISTAKES = {
    "a row": (("  arcface: {error: 1.0", "  arcfase: {error: 1.0"), "published: 'arcfase' is no row"),
    "a column": (("elsewhere: {error: 1.5}", "elsewhere: {eror: 1.5}"), "published: 'eror' is no column"),
    "a cell": (("arcface/accuracy: {absent", "arcface/acuracy: {absent"), "cells: 'arcface/acuracy' is no cell"),
    "a claim": (("order: [arcface/*, softmax/*]", "order: [arcface/*, sofmax/*]"), "compares no cells"),
    "stars": (
        ("order: [arcface/*, softmax/*]", "order: [arcface/*, '*/error']"),
        "must have their * in the same place",
    ),
    "a preset": (("rows: {arcface: [loss.m=0.2]}", "rows: {arc: [loss.m=0.2]}"), "presets.fast: 'arc' is no row"),
    "a search": (("chosen: 0.1", "chosen: 0.2"), "searches: 0.2 is none of the values"),
    "a key": (("title: Digits\n", "titel: Digits\n"), "titel: is not a known key. Did you mean 'title'?"),
    "a key twice": (("chapter: own\n", "chapter: own\nchapter: 2\n"), "'chapter' is given twice"),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes_are_named(kind):
    change, message = MISTAKES[kind]
    with pytest.raises(TableError, match=re.escape(message)):
        table(change=change)


def test_a_file_of_ones_own(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(TEXT.replace("digits-table", "mine-of-a-test"))
    assert find(str(file)).title == "Digits" and find("mine-of-a-test").id == "mine-of-a-test"
    with pytest.raises(TableError, match="there is no file"):
        find(str(tmp_path / "other.yaml"))
    file.write_text(TEXT.replace("digits-table", "thesis-2.2"))
    with pytest.raises(TableError, match="is that of a published table"):
        find(str(file))


def test_a_name_that_is_none():
    assert find("2.2") is find("thesis-2.2")
    with pytest.raises(TableError, match=r"no table 'thesis-22'.*--list"):
        find("thesis-22")


def test_a_change_that_does_not_fit_names_table_cell_and_key():
    found = table(change=("train.steps=120", "train.stebs=120"))
    with pytest.raises(TableError, match=r"digits-table, softmax/error, preset paper, scale small: .*stebs"):
        cell_recipe(found, "softmax/error", "paper", "small")


def test_measures():
    assert Measure(factor=10, read="plain").value(0.5) == 5
    assert Measure(failed=15, better="higher").has_failed(15) and not Measure(failed=15, better="higher").has_failed(16)
    assert not Measure().has_failed(100)


def test_the_files_are_part_of_the_package():
    text = (ROOT / "pyproject.toml").read_text()
    for kind in ("tables/*.yaml", "curves/*.csv", "*.css", "*.js", "*.yaml"):
        assert f'"reproduce/{kind}"' in text
    assert Path(ROOT / "src/hypersphere/reproduce/campaign.yaml").is_file()
