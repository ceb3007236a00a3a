"""Measured rows and the pages made of them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

from helpers.paths import DOCS
from helpers.rows import ROW
from hypersphere import recipe, results
from hypersphere.errors import ArgumentError
from hypersphere.metrics import mean_and_interval
from hypersphere.results import RowError, read_rows, write_pages, write_rows
from hypersphere.runs import RunFolder

BENCHMARK = dataclasses.replace(
    ROW,
    kind="benchmark",
    group="Speed",
    what="step",
    metric="images a second",
    unit="",
    mean=123456.7,
    interval=None,
    seeds=(),
    recipe=None,
    recipe_hash=None,
    published=None,
    note=None,
)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    write_rows(tmp_path / "rows" / "b.json", [BENCHMARK])
    write_rows(tmp_path / "rows" / "a.json", [ROW, dataclasses.replace(ROW, what="softmax", published=None)])
    return tmp_path


@pytest.mark.parametrize("count", [2, 3, 5, 10, 11, 12, 20, 50, 1000])
def test_interval_is_that_of_students_t(count):
    values = np.random.default_rng(count).normal(3, 2, count)
    mean, interval = mean_and_interval(values.tolist())
    assert mean == pytest.approx(values.mean())
    expected = scipy.stats.t.ppf(0.975, count - 1) * scipy.stats.sem(values)
    assert interval == pytest.approx(expected, rel=1e-12)


def test_interval_of_one_value():
    assert mean_and_interval([2.5]) == (2.5, math.inf)
    assert mean_and_interval([2.0, 2.0]) == (2.0, 0.0)


def test_rows_round_trip(tmp_path):
    file = tmp_path / "deep" / "rows" / "x.json"
    write_rows(file, [ROW, BENCHMARK])
    assert read_rows(file.parent) == [ROW, BENCHMARK]
    write_rows(file, [BENCHMARK])
    assert read_rows(file.parent) == [BENCHMARK]


def test_rows_come_in_the_order_of_files(docs):
    assert [row.what for row in read_rows(docs / "rows")] == ["ArcFace", "softmax", "step"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{", "is not a list of result rows: "),
        ("\x00", "is not a list of result rows: "),
        ("{}x", "is not a list of result rows: "),
        ('{"kind": "result"}', "is not a list of result rows: "),
        ("3", "is not a list of result rows: "),
        ("[3]", "is not a list of result rows: "),
        ('[{"kind": "result"}]', "is not a list of result rows: 'seeds'"),
        ('[{"kind": "result", "seeds": []}]', "is not a list of result rows: .*group"),
        (json.dumps([dataclasses.asdict(ROW) | {"extra": 1}]), "is not a list of result rows: .*extra"),
        (json.dumps([dataclasses.asdict(ROW) | {"seeds": 3}]), "is not a list of result rows: "),
        (json.dumps([dataclasses.asdict(ROW) | {"kind": "rumour"}]), ": unknown kind of row 'rumour'; known: result"),
    ],
)
def test_bad_row_file_is_named(docs, text, message):
    (docs / "rows" / "b-bad.json").write_text(text)
    with pytest.raises(RowError, match=f"b-bad.json ?{message}"):
        write_pages(docs)
    assert not (docs / "results.md").exists()  # nothing is written from half of the rows


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(RowError, match=f"there is no folder {tmp_path / 'nowhere' / 'rows'}"):
        write_pages(tmp_path / "nowhere")


def test_pages_and_check_mode(docs):
    pages = [docs / "results.md", docs / "benchmarks.md", docs / "precision.md"]
    assert write_pages(docs, check=True) == pages
    assert not any(page.exists() for page in pages)  # checking writes nothing
    assert write_pages(docs) == pages
    texts = [page.read_bytes() for page in pages]
    assert write_pages(docs) == [] == write_pages(docs, check=True)
    for page in pages:
        page.unlink()
    write_pages(docs)
    assert [page.read_bytes() for page in pages] == texts
    pages[1].write_text("edited")
    assert write_pages(docs, check=True) == [pages[1]]
    assert pages[1].read_text() == "edited"
    assert write_pages(docs) == [pages[1]] and pages[1].read_bytes() == texts[1]


def test_results_page(docs):
    write_pages(docs)
    lines = (docs / "results.md").read_text(encoding="utf-8").splitlines()
    assert lines == [
        "# Results",
        "",
        "What the recipes give, as measured. Made by `hypersphere docs` from `docs/rows/*.json`; do not edit.",
        "",
        "## Digits",
        "",
        "| | test accuracy |",
        "|---|---:|",
        "| ArcFace | 98.13 ± 0.20 % (published: 98.5 (paper)) |",
        "| softmax | 98.13 ± 0.20 % |",
        "",
        "- Command: `hypersphere train digits-arcface`",
        "- Hardware: one CPU",
        "- Version: 0.1.0+abc, 2025-01-02",
        "- Seeds: 0, 1, 2",
        "- Recipes: digits-arcface (0123456789ab)",
        "- Note: a note",
        "- ± is the half width of the 95 % confidence interval over the seeds.",
    ]


def test_benchmark_page_has_no_empty_facts(docs):
    write_pages(docs)
    text = (docs / "benchmarks.md").read_text(encoding="utf-8")
    assert "| | images a second |\n|---|---:|\n| step | 123,457 |\n" in text
    for absent in ("Seeds", "Recipes", "Note", "±", "published", "ArcFace"):
        assert absent not in text


def test_groups_keep_their_order_and_gather_their_rows(tmp_path):
    groups = ["B", "A", "B"]
    rows = [dataclasses.replace(ROW, group=group, what=f"row{i}") for i, group in enumerate(groups)]
    write_rows(tmp_path / "rows" / "x.json", rows)
    write_pages(tmp_path)
    text = (tmp_path / "results.md").read_text(encoding="utf-8")
    found = [text.index(word) for word in ("## B", "| row0", "| row2", "## A", "| row1")]
    assert found == sorted(found) and text.count("## B") == 1


@pytest.mark.parametrize(
    ("mean", "interval", "unit", "text"),
    [
        (0.0, None, "", "0.00"),
        (0.001234, 0.00056, "s", "0.0012 ± 0.00056 s"),
        (-0.5, 0.0, "%", "-0.50 ± 0.00 %"),
        (999.994, None, "x", "999.99 x"),
        (1234567.8, 1000.2, "images/s", "1,234,568 ± 1,000 images/s"),
    ],
)
def test_numbers_as_people_read_them(mean, interval, unit, text):
    row = dataclasses.replace(ROW, mean=mean, interval=interval, unit=unit, published=None)
    assert results._value(row) == text


# ------------------------------------------------------------------------------------------------ rows from runs


@pytest.fixture
def make_run(tmp_path):
    """Writes the folder of a finished run with given metrics."""

    def make(folder: str, metrics: dict[str, float], *overrides: str, status: str = "finished") -> RunFolder:
        plan = recipe.load("digits-softmax", overrides)
        run = RunFolder.create(tmp_path / folder, plan, torch.device("cpu"))
        run.write_facts(status=status, finished="2025-03-04T05:06:07+00:00", version="9.9")
        (run.path / "evaluation.json").write_text(json.dumps({"step": 1, "metrics": metrics}))
        return run

    return make


def test_rows_average_the_seeds_of_each_recipe(make_run):
    runs = [
        make_run("a", {"accuracy": 0.5, "mean_angle": 10.0, "cross_entropy": 1.0}, "seed=2"),
        make_run("c", {"accuracy": 0.9, "mean_angle": 30.0}, "optimiser.lr=0.5", "name=other"),
        make_run("b", {"accuracy": 0.6, "mean_angle": 20.0, "eer": 0.1}, "seed=1"),
    ]
    rows = results.rows_from_runs(runs, "Digits")
    assert [(row.what, row.metric) for row in rows] == [
        (name, title) for name in ("digits-softmax", "other") for title in ("Test accuracy", "Angle to own centre")
    ]
    accuracy, angle, single, _ = rows
    assert accuracy.mean == pytest.approx(55) and accuracy.unit == "%"
    expected = scipy.stats.t.ppf(0.975, 1) * scipy.stats.sem([50, 60])
    assert accuracy.interval == pytest.approx(expected, rel=1e-12) and accuracy.seeds == (1, 2)
    assert (angle.mean, angle.unit) == (pytest.approx(15), "°")
    assert (single.mean, single.interval, single.seeds) == (pytest.approx(90), None, (0,))
    assert accuracy.recipe_hash == angle.recipe_hash != single.recipe_hash
    assert {(row.kind, row.group, row.version, row.date) for row in rows} == {("result", "Digits", "9.9", "2025-03-04")}
    assert all(f"torch {torch.__version__}" in row.hardware for row in rows)


def test_one_metric_of_many_runs_as_a_matrix(make_run):
    runs = [
        make_run("a", {"accuracy": 0.5, "mean_angle": 10.0}, "name=plain"),
        make_run("b", {"accuracy": 0.6, "mean_angle": 20.0}, "name=tanh-cosine", "optimiser.lr=0.5"),
        make_run("c", {"accuracy": 0.7, "mean_angle": 30.0}, "name=tanh-sqcos", "optimiser.lr=0.6"),
    ]
    rows = results.rows_from_runs(runs, "Operators", matrix="accuracy")
    assert [(row.what, row.metric, row.mean) for row in rows] == [
        ("plain", "Test accuracy", pytest.approx(50)),
        ("tanh", "cosine", pytest.approx(60)),
        ("tanh", "sqcos", pytest.approx(70)),
    ]
    with pytest.raises(ArgumentError, match=r"^matrix must be one of "):
        results.rows_from_runs(runs, "Operators", matrix="acuracy")


def test_published_values_stand_beside_the_metric_they_are_of(make_run):
    runs = [
        make_run("a", {"accuracy": 0.5, "mean_angle": 10.0}, "name=m-0.5"),
        make_run("b", {"accuracy": 0.6, "mean_angle": 20.0}, "name=m-0.6", "optimiser.lr=0.5"),
    ]
    rows = results.rows_from_runs(runs, "Digits", published={"m-0.5": "51.2", "m-0.6.mean_angle": "about 19"})
    assert [row.published for row in rows] == ["51.2", None, None, "about 19"]
    for name in ("m-0.7", "m-0.5.eer", "m-0"):
        with pytest.raises(RowError, match=f"published value of '{name}' is of no run here"):
            results.rows_from_runs(runs, "Digits", published={name: "1"})
    nothing = make_run("c", {}, "name=none")
    with pytest.raises(RowError, match="published value of 'none'"):
        results.rows_from_runs([nothing], "Digits", published={"none": "1"})


@pytest.mark.parametrize("status", ["running", "interrupted", "diverged"])
def test_only_finished_runs_are_recorded(make_run, status):
    run = make_run("a", {"accuracy": 0.5}, status=status)
    with pytest.raises(RowError, match=f"^{run.path} is not finished"):
        results.rows_from_runs([run], "Digits")


@pytest.mark.skipif(not list((DOCS / "rows").glob("*.json")), reason="no measured rows yet")
def test_committed_pages_are_up_to_date():
    assert write_pages(DOCS, check=True) == []


def test_a_page_names_the_first_of_many_commands(tmp_path):
    rows = [dataclasses.replace(ROW, what=f"loss {i}", command=f"train {i}") for i in range(9)]
    results.write_rows(tmp_path / "rows" / "a.json", rows)
    results.write_pages(tmp_path)
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "- Command: `train 0`; `train 1`; `train 2`; and 6 more in `docs/rows`" in page
    assert all(f"| loss {i} |" in page for i in range(9))
