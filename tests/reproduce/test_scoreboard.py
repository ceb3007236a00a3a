"""The statistics of the scoreboard, against scipy and by hand, and the page of it."""

import dataclasses
import math

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.tables import TEXT
from hypersphere.reproduce import find
from hypersphere.reproduce.pages import markdown
from hypersphere.reproduce.rows import Row, read_rows, read_value, write_rows
from hypersphere.reproduce.scoreboard import ranks, scoreboard, summary, verdict
from hypersphere.reproduce.table import Measure
from hypersphere.reproduce.training import cell_recipe

LOWER, HIGHER = Measure(failed=90), Measure(better="higher", failed=10)


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "digits-table.yaml"
    file.write_text(TEXT)
    return find(str(file))


def row(cell, seed, value, scale="small", preset="paper", table=None, **changes):
    found = cell_recipe(table, cell, preset, scale, seed)[0].hash if table else "0" * 12
    status = "diverged" if value is None else "finished"
    words = {"commit": "abc1234", "recipe_hash": found, "data": "d" * 12, "device": "cpu", "date": "2026-01-01"}
    return Row(preset, scale, cell, seed, value, status, 12, 1.5, **{**words, **changes})


# ---------------------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize("seed", range(40))
def test_a_verdict_is_that_of_a_paired_interval(seed):
    generator = torch.Generator().manual_seed(seed)
    count = 2 + seed % 7
    shift = float(torch.randn((), generator=generator))
    noise = 0.6 * torch.randn(2, count, generator=generator, dtype=torch.float64)
    common = 30 + torch.randn(count, generator=generator, dtype=torch.float64)
    first, second = (common + noise[0]).tolist(), (common + shift + noise[1]).tolist()
    interval = scipy.stats.ttest_rel(second, first).confidence_interval(0.95)
    expected = "held" if interval.low > 0 else "reversed" if interval.high < 0 else "open"
    numbers = dict(enumerate(first)), dict(enumerate(second))
    assert verdict(LOWER, *numbers) == expected
    mirrored = {"held": "reversed", "reversed": "held", "open": "open"}[expected]
    assert verdict(HIGHER, *numbers) == verdict(LOWER, *numbers[::-1]) == mirrored


def test_verdicts_at_the_edges():
    assert verdict(LOWER, {0: 1.0}, {0: 50.0}) == "open"  # of one seed nothing is known
    assert verdict(LOWER, {0: 1.0, 1: 1.0}, {2: 5.0, 3: 5.0}) == "open"  # no seed in common
    assert verdict(LOWER, {0: 1.0, 1: 2.0}, {0: 2.0, 1: 3.0}) == "held"  # always by the same
    assert verdict(LOWER, {0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}) == "open"
    assert verdict(LOWER, {0: 1.0, 1: 2.0}, {0: None, 1: 95.0}) == "held"  # the other never converged
    assert verdict(LOWER, {0: None, 1: None}, {0: 3.0, 1: 4.0}) == "reversed"
    assert verdict(LOWER, {0: None, 1: 2.0}, {0: 3.0, 1: 4.0}) == "open"
    assert verdict(LOWER, {0: None, 1: None}, {0: None, 1: None}) == "open"
    assert verdict(HIGHER, {0: 80.0, 1: 81.0}, {0: 9.0, 1: 8.0}) == "held"
    assert verdict(LOWER, {0: math.nan, 1: math.nan}, {0: 3.0, 1: 4.0}) == "reversed"
    # Gains that are equal to the last bit, and smaller than anything that is printed.
    assert verdict(LOWER, {0: 1.0, 1: 2.0}, {0: 1.001, 1: 2.001}) == "open"
    # Of ten pairs one is open that alone is held.
    pair = {0: 1.0, 1: 1.1, 2: 0.9}, {0: 1.6, 1: 1.9, 2: 1.7}
    assert (verdict(LOWER, *pair), verdict(LOWER, *pair, level=0.995)) == ("held", "open")


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 4).map(float), min_size=1))
def test_ranks_are_those_of_scipy(values):
    for better, sign in (("lower", 1), ("higher", -1)):
        expected = scipy.stats.rankdata([sign * value for value in values.values()], method="min")
        assert list(ranks(values, better).values()) == expected.astype(int).tolist()


def test_a_summary_is_a_mean_with_students_interval():
    rows = [row("a/b", seed, value) for seed, value in enumerate((20.0, 21.0, 25.0))]
    found = summary(LOWER, rows)
    low, high = scipy.stats.t.interval(0.95, 2, loc=22, scale=scipy.stats.sem([20, 21, 25]))
    assert found.mean == pytest.approx(22) and found.interval == pytest.approx((high - low) / 2)
    assert found.text(LOWER) == f"22.00 ± {(high - low) / 2:.2f}"
    failed = summary(LOWER, [*rows, row("a/b", 3, None), row("a/b", 4, 95.0)])
    assert (failed.seeds, failed.failed, failed.mean) == (5, 2, pytest.approx(22))
    assert failed.text(LOWER).endswith("(N/C 2 of 5)")
    assert summary(LOWER, [row("a/b", 0, None)]).text(LOWER) == "N/C"
    assert summary(LOWER, [row("a/b", 0, 20.0)]).text(LOWER) == "20.00"


# ------------------------------------------------------------------------------------------------------- rows


MEASURED = [
    {"step": 0, "split": "energy", "energy/features.0": 1.0, "energy/head": 5.0},
    {"step": 10, "split": "train", "accuracy": 0.1},
    {"step": 10, "split": "test", "accuracy": 0.5},
    {"step": 10, "split": "energy", "energy/features.0": 2.0, "energy/features.3": 0.5, "energy/head": 7.0},
    {"step": 20, "split": "test", "accuracy": 0.75},
    {"step": 30, "split": "test", "accuracy": 0.7},
]


@pytest.mark.parametrize(
    ("measure", "value"),
    [
        (Measure(), 30.0),
        (Measure(at="first"), 50.0),
        (Measure(at="best"), 25.0),
        (Measure(at="best", better="higher", read="percent"), 75.0),
        (Measure(metric="energy/*", split="energy", read="plain"), 9.5),
        (Measure(metric="energy/*", split="energy", read="plain", exclude="energy/head"), 2.5),
        (Measure(metric="energy/*", split="energy", read="plain", exclude="energy/head", at="first"), 1.0),
        (Measure(metric="seconds", split="run", read="plain", factor=0.5), 21.0),
    ],
)
def test_numbers_are_read_as_a_table_says(measure, value, tmp_path):
    assert read_value(measure, MEASURED, {"seconds": 42.0}, tmp_path) == pytest.approx(value)


def test_a_number_that_was_not_measured_is_named(tmp_path):
    for measure in (Measure(metric="eer"), Measure(metric="minutes", split="run")):
        with pytest.raises(Exception, match=measure.metric):
            read_value(measure, MEASURED, {"seconds": 42.0}, tmp_path)


def test_rows_come_back_and_replace_their_own(own, tmp_path):
    first = [row("softmax/error", seed, value, curve="1:9.5 2:8") for seed, value in ((1, 2.5), (0, None))]
    write_rows(tmp_path, own, first)
    assert read_rows(tmp_path, own.id) == sorted(first, key=lambda one: one.seed)
    write_rows(tmp_path, own, [row("softmax/error", 1, 3.5), row("arcface/error", 0, 1.0)])
    assert [(one.cell, one.seed, one.value) for one in read_rows(tmp_path, own.id)] == [
        *(("softmax/error", 0, None), ("softmax/error", 1, 3.5), ("arcface/error", 0, 1.0)),
    ]
    assert read_rows(tmp_path, "nothing") == []
    (tmp_path / f"{own.id}.csv").write_text("preset,scale\npaper,small\n")
    with pytest.raises(Exception, match="is not a file of rows"):
        read_rows(tmp_path, own.id)


# ------------------------------------------------------------------------------------------------ the scoreboard


def rows_of(own):
    values = {
        "softmax/error": (2.0, 2.2, 2.1),
        "arcface/error": (1.0, 1.1, None),
        "softmax/accuracy": (98.0, 97.8, 97.9),
    }
    return [row(cell, seed, value, table=own) for cell, found in values.items() for seed, value in enumerate(found)]


def test_the_scoreboard_of_a_table(own):
    rows = [*rows_of(own), row("softmax/error", 0, 1.5, scale="paper", table=own)]
    found = scoreboard({own.id: rows}, [own.id])["tables"][0]
    paper, small = found["boards"]
    assert (paper["scale"], small["scale"]) == ("paper", "small")
    cell = small["cells"]["softmax/error"]
    assert cell["mean"] == pytest.approx(2.1) and cell["difference"] == pytest.approx(0.1)
    assert (cell["rank"], cell["published_rank"], cell["stale"]) == (2, 2, False)
    assert small["cells"]["arcface/error"]["failed"] == 1
    assert paper["cells"]["softmax/error"]["rank"] is None  # alone in its column
    assert "--scale small" in cell["command"] and "'softmax/error'" in cell["command"]
    assert cell["deviations"] == ["shorter"] and paper["cells"]["softmax/error"]["deviations"] == []
    # One seed of arcface did not converge, so that the seeds disagree.
    assert [(one["says"], one["verdict"]) for one in small["orderings"]] == [("margins help", "open")]
    assert paper["orderings"] == []  # of one of its cells there is nothing at that scale


def test_rows_of_a_lost_version_decide_nothing_among_themselves(own):
    lost = [dataclasses.replace(one, commit="abc1234?") for one in rows_of(own) if one.seed < 2]
    board = scoreboard({own.id: lost}, [own.id])["tables"][0]["boards"][0]
    assert [one["verdict"] for one in board["orderings"]] == ["open"] and "abc1234 is not in" in board["undated"]
    assert "abc1234 is not in the history" in markdown(scoreboard({own.id: lost}, [own.id]))
    again = [dataclasses.replace(one, commit="def5678") if one.cell == "arcface/error" else one for one in lost]
    board = scoreboard({own.id: again}, [own.id])["tables"][0]["boards"][0]
    assert [one["verdict"] for one in board["orderings"]] == ["held"] and board["undated"]
    assert not scoreboard({own.id: rows_of(own)}, [own.id])["tables"][0]["boards"][0]["undated"]


def test_a_changed_recipe_is_stale(own):
    rows = [row("softmax/error", 0, 2.0, table=own), row("softmax/error", 1, 2.0)]
    cell = scoreboard({own.id: rows}, [own.id])["tables"][0]["boards"][0]["cells"]["softmax/error"]
    assert cell["stale"] and cell["recipe"] is None
    assert [run["stale"] for run in cell["runs"]] == [False, True]


def test_the_page_to_read(own):
    good = [one for one in rows_of(own) if one.seed < 2]
    text = markdown(scoreboard({own.id: good}, [own.id]))
    assert "| Softmax | 2.10 ± 1.27 (2.00, +0.10) | 97.90 ± 1.27 (98.00, -0.10) |" in text
    assert "| small | 3 | 1 | 0 | 0 |" in text and "| paper | 0 | 0 | 0 | 0 |" in text
    assert "- held (small): margins help" in text and "`abc1234`" in text
    stale = markdown(scoreboard({own.id: [row("softmax/error", 0, 2.0)]}, [own.id]))
    assert "~~2.00~~ (2.00, +0.00)" in stale
    assert math.isfinite(len(text))


def test_orderings_that_were_trained_in_part_cannot_hold(tmp_path):
    file = tmp_path / "digits-table.yaml"
    text = TEXT.replace("order: [arcface/*, softmax/*], only: [error]", "order: [arcface/*, softmax/*]")
    file.write_text(text.replace("arcface/accuracy: {absent: not asked for}", "arcface/accuracy: {}"))
    own = find(str(file))
    rows = [one for one in rows_of(own) if one.seed < 2 and one.cell.endswith("error")]
    found = scoreboard({own.id: rows}, [own.id])["tables"][0]["boards"][0]["orderings"][0]
    assert (found["verdict"], found["unmeasured"]) == ("open", 1)
    assert found["pairs"] == [("arcface/error", "softmax/error", "held")]
