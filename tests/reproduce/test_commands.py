"""``hypersphere reproduce``, ``compare`` and ``docs`` as a user calls them, and the grids of tables at smoke scale."""

import datetime
import json
import math
import re
import shutil

import pytest
import torch
from typer.main import get_command

from helpers.paths import DOCS
from helpers.tables import TEXT
from hypersphere import recipe as recipes
from hypersphere.cli.commands import app
from hypersphere.cli.terminal import console
from hypersphere.reproduce import tables, trainings
from hypersphere.reproduce.rows import read_rows, read_value
from hypersphere.reproduce.show import show
from hypersphere.reproduce.table import parse
from hypersphere.reproduce.work import RECORD, Job, Shelf, train
from hypersphere.runs import RunFolder
from hypersphere.runs.folder import read_json
from hypersphere.train import Trainer


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setattr(console, "width", 200)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tables") / "mine.yaml"
    path.write_text(TEXT.replace("digits-table", "mine-of-commands"))
    return path


def squeezed(text):
    return " ".join(text.split())


# ------------------------------------------------------------------------------------------------------- a table


def test_a_table_is_trained_shown_and_not_trained_again(file, tmp_path, start):
    words = ["reproduce", file, "--scale", "paper", "--seeds", 2, "--device", "cpu", "--output", tmp_path, "--jobs", 2]
    done = start(*words)
    assert done.code == 0, done.err
    rows = read_rows(tmp_path / "rows", "mine-of-commands")
    assert [(row.cell, row.seed) for row in rows] == [
        (cell, seed)
        for cell in ("softmax/error", "softmax/accuracy", "again/error", "arcface/error")
        for seed in (0, 1)
    ]
    mean = sum(row.value for row in rows if row.cell == "softmax/error") / 2
    text = squeezed(done.out)
    assert "mine-of-commands: Digits (thesis, nowhere), paper scale, as printed" in text
    assert f"Softmax 2.00 {mean:.2f} ±" in text and "Theirs 1.50" in text and f"{mean - 2:+.2f}" in text
    assert "margins help (paper scale" in text and "4 trainings of 120 steps on cpu" in text
    assert "4 of 4: " in text  # where there is no terminal for a bar
    page = (tmp_path / "scoreboard.html").read_text()
    assert "mine-of-commands" in page
    folders = sorted(tmp_path.glob("mine-of-commands-*"))
    times = [(folder / RECORD).stat().st_mtime_ns for folder in folders]
    assert len(folders) == 4 and start(*words).code == 0
    assert [(folder / RECORD).stat().st_mtime_ns for folder in folders] == times


def test_one_cell_with_another_preset(file, tmp_path, start):
    words = ["reproduce", file, "--cells", "arcface", "--preset", "fast", "--seeds", 1, "--output", tmp_path]
    assert start(*words, "--device", "cpu").code == 0
    ((row),) = read_rows(tmp_path / "rows", "mine-of-commands")
    assert (row.cell, row.preset, row.scale, row.steps) == ("arcface/error", "fast", "small", 12)


def test_a_search_shows_what_was_chosen(file, tmp_path, start):
    done = start("reproduce", file, "--search", "--device", "cpu", "--output", tmp_path)
    assert done.code == 0, done.err
    text = squeezed(done.out)
    assert "mine-of-commands: optimiser.lr" in text and "0.1 (chosen) softmax/error" in text and "0.05 softmax" in text


def test_runs_of_ones_own_beside_a_table(file, tmp_path, start):
    run = tmp_path / "mine"
    made = ("train", "digits-softmax", "train.steps=4", "train.tensorboard=false", "name=my-own", "--folder", run)
    assert start(*made, "--device", "cpu").code == 0
    value = 100 - 100 * RunFolder.open(run).evaluation()["metrics"]["accuracy"]
    done = start("compare", run, "--table", file)
    lines = [squeezed(line) for line in done.out.splitlines()]
    shown = ["ArcFace 1.00 published", "Theirs 1.50 published", f"my-own {value:.2f} {run}, digits, 4 steps"]
    assert done.code == 0 and [line for line in lines if line in shown] == shown and not done.err
    assert start("compare", run, "--table", file, "--column", "speed").code == 2


@pytest.mark.filterwarnings("always:.*compared")
def test_a_run_on_other_data_is_not_compared_in_silence(finished, start):
    done = start("compare", finished, "--table", "thesis-5.1", "--column", "cifar100")
    assert done.code == 0 and "about cifar100, and a run here was measured on digits" in squeezed(done.err)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "mine"
    plan = recipes.load("digits-softmax", ["train.steps=2", "train.tensorboard=false", "name=mine"])
    Trainer(plan, RunFolder.create(folder, plan, torch.device("cpu")), torch.device("cpu")).fit()
    return folder


def test_numbers_are_never_cut(monkeypatch):
    """What does not fit the terminal goes into blocks of columns; what has no result is left out."""
    own = tables()["opt-6"]
    rows = [row for row in read_rows(DOCS / "rows/tables", "opt-6") if row.preset == "paper" and row.scale == "small"]
    for width in (60, 80, 120):
        monkeypatch.setattr(console, "width", width)
        with console.capture() as shown:
            show(own, "paper", "small", rows)
        text = shown.get()
        assert "…" not in text and "Baseline" in text and "SRIP" not in text
        for row in rows:
            published = own.published_at(row.cell)
            assert f"{published:.2f}" in text
        assert "9 rows more without results" in text


def test_a_mistake_in_another_preset_is_found_at_once(tmp_path, start):
    file = tmp_path / "own.yaml"
    file.write_text(TEXT.replace("digits-table", "own-presets").replace("optimiser.lr=0.2", "optimiser.lrr=0.2"))
    done = start("reproduce", file, "--output", tmp_path / "out")
    assert done.code == 2 and "preset fast" in done.err and "lrr" in done.err
    file.write_text(TEXT.replace("digits-table", "own-presets").replace("columns:\n", "colums:\n"))
    done = start("reproduce", file)
    assert done.code == 2 and "colums: is not a known key. Did you mean 'columns'?" in done.err


def test_what_cannot_be_done_says_what_can(file, tmp_path, start):
    cases = {
        ("reproduce",): "TABLE must be given: `hypersphere reproduce --list`",
        ("reproduce", "thesis-22"): "no table 'thesis-22'. Did you mean",
        ("reproduce", "thesis-5.1", "--data-root", tmp_path): "`hypersphere data cifar10",
        ("reproduce", "thesis-D.7"): "can be trained here",
        ("reproduce", "thesis-fig-5.1"): "is drawn and not trained",
        ("reproduce", file, "--scale", "tiny"): "scale must be one of",
        ("reproduce", file, "--preset", "mine"): "preset must be one of",
        ("reproduce", file, "--cells", "nothing"): "has no cell 'nothing'",
        ("reproduce", file, "--seeds", 0): "seeds must be at least 1",
        ("reproduce", file, "--jobs", 0): "jobs must be at least 1",
        ("reproduce", "--next", 0): "next must be",
        ("reproduce", "--next", 5, "--data-root", tmp_path): "`hypersphere data` shows what is missing",
        ("reproduce", "thesis-5.6", "--data-root", tmp_path): "ImageNet",
        ("reproduce", "thesis-2.2", "--search"): "these have: ",
        ("reproduce", "2.22"): "no table '2.22'",
        ("compare", tmp_path / "none", "--table", file): "does not exist",
    }
    for words, message in cases.items():
        done = start(*words, *(("--output", tmp_path / "out") if words[0] == "reproduce" else ()))
        assert done.code == 2 and message in done.err, (words, done.err)
    assert not (tmp_path / "out").exists()


def test_the_list(tmp_path, start):
    done = start("reproduce", "--list", "--output", tmp_path, "--data-root", tmp_path)
    assert done.code == 0 and all(f"\n{name} " in done.out for name in tables())
    shown = start("reproduce", "thesis-2.2", "--list", "--output", tmp_path)
    assert "l-softmax-4/error" in shown.out and "quoted from another work" in shown.out
    listed = json.loads(start("reproduce", "--list", "--json", "--output", tmp_path, "--data-root", tmp_path).out)
    assert [entry["id"] for entry in listed][: len(tables())] == [*tables()]
    entry = next(entry for entry in listed if entry["id"] == "thesis-2.2")
    assert entry["data"] == {"mnist": "missing"} and entry["runnable"] == 5 and entry["done"]["small"] == 0
    assert entry["missing_cells"]["small"] == 5 and entry["minutes"]["paper"] > entry["minutes"]["small"] > 0


def test_the_campaign_takes_what_has_data_and_is_missing(tmp_path, start, monkeypatch):
    from hypersphere.reproduce import commands, plan

    monkeypatch.setattr(plan, "there", lambda root: {"mnist"})
    taken = []
    monkeypatch.setattr(
        commands.pool, "work", lambda jobs, **given: taken.append((jobs, given)) or commands.pool.Outcome()
    )
    done = start("reproduce", "--next", 2, "--jobs", 3, "--output", tmp_path)
    assert done.code == 0, done.err
    ((jobs, given),) = taken
    assert given["workers"] == 3 and given["deadline"] is not None
    assert {job.recipe().data.name for job in jobs[:2]} == {"mnist"} and "0 of" in done.out


@pytest.mark.filterwarnings("always:.*scoreboard")
def test_the_pages_of_the_docs_are_made_of_the_rows(tmp_path, start):
    folder = tmp_path / "docs"
    shutil.copytree(DOCS / "rows", folder / "rows")
    assert start("docs", "--folder", folder).code == 0
    for name in ("scoreboard.md", "scoreboard.html"):
        assert (folder / name).read_text() == (DOCS / name).read_text()
    assert start("docs", "--folder", folder, "--check").code == 0
    rows = folder / "rows/tables/thesis-5.1.csv"
    rows.write_text(rows.read_text().replace("0b28083a8333", "0" * 12))
    done = start("docs", "--folder", folder, "--check")
    assert "warning: 1 cells of the scoreboard are of recipes that have changed" in squeezed(done.err)
    assert done.code == 2 and "scoreboard.md" in done.err


# --------------------------------------------------------------------------------------------- the smoke grid

GRID = [
    (name, preset, cell) for name, one in tables().items() for preset in one.presets for cell in one.runnable(preset)
]


def smoke(name, preset, cells, folder):
    """Two steps of every training of some cells, on noise; every number that the table wants is there; how many."""
    shelf, ended = Shelf(), 0
    for one in trainings(tables()[name], "smoke", preset=preset, cells=cells, seeds=[0]):
        job = Job(one.command, one.recipe.name, folder / one.key, stand_in=True)
        ended += 1
        if train(job, torch.device("cpu"), shelf) == "diverged":
            continue
        measured, record = RunFolder.open(job.folder).rows(), read_json(job.folder / RECORD)
        for place in one.places:
            measure = tables()[name].measure_of(place.cell)
            if not measure.metric.startswith("lfw"):  # needs the files of LFW
                assert not math.isnan(read_value(measure, measured, record, job.folder)) or measure.failed is not None
    return ended


def rotating(parts, every):
    """A part that is another one every day."""
    today = datetime.datetime.now(datetime.UTC).date().toordinal()
    return [part for index, part in enumerate(parts) if (index + today) % every == 0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "preset", "cell"), rotating(GRID, 90))
def test_a_part_of_the_smoke_grid(name, preset, cell, tmp_path):
    assert smoke(name, preset, [cell], tmp_path) == 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "preset"), dict.fromkeys((name, preset) for name, preset, _ in GRID))
def test_the_smoke_grid(name, preset, tmp_path):
    assert smoke(name, preset, (), tmp_path)


# ------------------------------------------------------------------------------------------------------ the guide


def test_the_table_and_the_options_of_the_guide():
    text = (DOCS / "reproduction.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    shown = parse(example, "docs/reproduction.md")
    assert [one.places[0].cell for one in trainings(shown, "small", seeds=[0])] == ["softmax/error", "arcface/error"]
    known = {flag for one in get_command(app).commands["reproduce"].params for flag in one.opts}
    known |= {flag for one in get_command(app).commands["compare"].params for flag in one.opts}
    known |= {"--nproc-per-node"}
    assert set(re.findall(r"(?<!-)--[a-z-]+", text)) <= known
    for name in re.findall(r"hypersphere (?:reproduce|compare) (?:\S+ --table )?((?:thesis|opt)-[\w.]+)", text):
        assert name in tables()
