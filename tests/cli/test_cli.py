"""The command line: what each command prints, its exit code, and messages in place of tracebacks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import hypersphere
from helpers.command_line import process, words
from helpers.paths import SOURCE
from helpers.rows import ROW
from hypersphere import cli, recipe, results
from hypersphere.cli import commands, names, runs
from hypersphere.cli.commands import app
from hypersphere.cli.terminal import console
from hypersphere.data.sources import sources
from hypersphere.evaluate import evaluations
from hypersphere.runs import RunFolder
from hypersphere.train import DivergedError, Interrupted

TINY = ["train.steps=4", "train.log_every=2", "train.tensorboard=false", "model.width=4", "data.batch_size=32"]
COMMANDS = ["demo", "train", "resume", "evaluate", "report", "list", "data", "record", "docs"]
COMMANDS += ["attack", "embed", "verify", "identify", "new", "reproduce", "compare", "plan"]


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    """Tables that do not wrap."""
    monkeypatch.setattr(console, "width", 600)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A finished tiny run."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    arguments = ["train", "digits-softmax", *TINY, "--folder", str(folder), "--device", "cpu"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def run_folder(finished, tmp_path) -> Path:
    """A copy of the finished run that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


# ------------------------------------------------------------------------------------------------ plain commands


def test_version(start):
    assert start("--version") == (0, f"hypersphere {hypersphere.__version__} (torch {torch.__version__})\n", "")


def test_help_names_every_command(start):
    done = start("--help")
    assert done.code == 0 and all(f" {name} " in done.out for name in [*COMMANDS, "--debug", "--version"])
    registered = typer.main.get_command(app).list_commands(None)
    assert sorted(registered) == sorted([*COMMANDS, "plot", "gallery"])  # groups: see test_plot.py, test_faces_cli.py


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(name, start):
    for flag in ("--help", "-h"):
        done = start(name, flag)
        assert done.code == 0 and done.err == ""
        assert "Usage:" in done.out and name in done.out
    text = commands.COMMANDS[name][1]
    assert words(text.split(".")[0]) in re.sub(r"[│ ]+", " ", words(done.out))


def test_lines_of_the_help_are_those_of_the_commands():
    group = typer.main.get_command(app)
    for name, (_, text) in commands.COMMANDS.items():
        assert " ".join(group.commands[name].help.split()) == text, name
    assert "nonsense" not in group.commands and group.get_command(None, "nonsense") is None


FIRST = """
import resource, sys
sys.argv = ["hypersphere", *sys.argv[1:]]
from hypersphere.cli import main
try:
    main()
except SystemExit as stopped:
    assert not stopped.code
heavy = {"torch", "numpy", "pydantic", "matplotlib", "sklearn", "hypersphere.recipe"} & set(sys.modules)
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, *heavy, file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [["--version"], ["--help"]])
def test_the_first_second(arguments):
    """Nothing heavy is imported; of several tries, since a busy machine takes time of everyone."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    seconds = []
    for _ in range(5):
        command = [sys.executable, "-c", FIRST, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        used, *heavy = done.stderr.split()
        assert not heavy
        seconds.append(float(used))
        if seconds[-1] < 0.5:
            return
    raise AssertionError(f"{min(seconds):.2f} s of CPU time")


def test_no_command_shows_the_help(start):
    done = start()
    assert "Usage:" in done.out + done.err and "train" in done.out + done.err


FAMILIES = names.families()


@pytest.mark.parametrize("family", FAMILIES)
def test_list_a_family(family, start):
    done = start("list", family)
    assert done.code == 0 and done.out.lstrip().startswith(family)
    lines = done.out.splitlines()
    # Options that a family shares are listed once, behind its members.
    shared = next((line for line in lines if line.startswith("any of these ")), "")
    for name in FAMILIES[family]:
        entry = FAMILIES[family][name]
        row = next(line for line in lines if line.startswith(f"{name} "))
        formulas = ":math:" in entry.help or "`" in entry.help
        assert (formulas or entry.help in row) and all(alias in row for alias in entry.aliases)
        assert entry.help.split(":math:")[0].split("`")[0] in row
        common = getattr(entry.factory, "shared_options", None)
        for option in entry.options:  # one that has another default than the others shows it
            takes = common is None or option.name in common
            assert str(option) in row or (takes and str(option) in shared), (name, option)
    assert not re.search(r"[\\`]|:math:", done.out)
    assert bool(shared) == (family in ("losses", "operators", "rules of negatives"))
    if family == "losses":
        assert "label_smoothing=0.0" in shared and "(but gan, triplet)" in shared and "gradient='exact'" in shared
        assert sum("label_smoothing" in line for line in lines) == 1


def test_list_operators_shows_formulas_and_each_option_once(start):
    lines = start("list", "operators").out.splitlines()
    tanh, sphere, shared = (
        next(line for line in lines if line.startswith(f"{name} ")) for name in ("tanh", "sphere", "any")
    )
    assert "radius=1.0, learn_radius=True" in tanh and "h(t) = alpha tanh(t / R)" in tanh
    assert "=" not in sphere.split("The angle alone")[0]
    assert "angular='cosine', weighting='none'" in shared and sum("angular=" in line for line in lines) == 1
    angulars = start("list", "angulars").out
    assert re.search(r"^sigmoid +k=0.3 +Sigmoid of the angle", angulars, re.MULTILINE)
    assert re.search(r"^sqcos +Square cosine .*g\(theta\) = cos theta \|cos theta\|", angulars, re.MULTILINE)


def test_list_recipes_and_everything(start):
    done = start("list", "recipes")
    for name, text in recipe.embedded().items():
        assert re.search(rf"^{re.escape(name)} +{re.escape(text)}", done.out, re.MULTILINE)
    assert "arc-softmax" not in done.out
    everything = start("list").out
    assert all(re.search(rf"^{title}", everything, re.MULTILINE) for title in [*FAMILIES, "settings", "recipes"])


@pytest.mark.parametrize("word", ["orthogonal", "maps", "MAP", "orthogonal_maps", "Orthogonal-Map", "orthogonal map"])
def test_a_family_has_many_spellings(word, start):
    assert start("list", word).out.startswith("orthogonal maps")


def test_every_registry_of_the_package_is_a_family():
    """Those that stand in the sources, found without importing anything."""
    made = re.compile(r"^(?!.*>>>).*Registry(?:\[[^\n]*\])?\(\s*\"([^\"]+)\"", re.MULTILINE)
    written = {name for file in (SOURCE / "hypersphere").rglob("*.py") for name in made.findall(file.read_text())}
    written.add("evaluation")  # of a class of its own
    assert len(written) > 10
    assert written == {registry.family for registry in FAMILIES.values()}


def test_list_unknown_family(start):
    done = start("list", "loses")
    assert done.code == 2 and done.out == ""
    known = ", ".join([*FAMILIES, "settings", "recipes"])
    assert "margins" in FAMILIES and "energies" in FAMILIES
    assert words(done.err) == f"error: unknown family 'loses'. Did you mean 'losses'? Known: {known}"


# ----------------------------------------------------------------------------------------------------------- data


def test_data_in_an_empty_root_says_where_to_get_the_sets(tmp_path, start):
    done = start("data", "--data-root", tmp_path)
    text = words(done.out)
    assert done.code == 0 and done.err == ""
    assert re.search(r"digits +embedded", text)
    assert {"cifar10", "cifar100", "mnist", "fashion-mnist"} <= set(sources)
    for source in (source for source in sources.values() if source.layouts):
        assert f"{source.name} missing how to get it: hypersphere data {source.name}" in text
        details = words(start("data", source.name, "--data-root", tmp_path).out)
        assert f"{source.name} missing {source.name} was not found" in details
        assert f"It is published at {source.home}. " in details and source.home.startswith("http")
    assert str(tmp_path / "cifar-10-batches-py") in words(start("data", "cifar10", "--data-root", tmp_path).out)
    assert start("data", "mnst", "--data-root", tmp_path).code == 2


def test_data_with_a_corrupt_set_fails(tmp_path, start):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin", "batches.meta.txt"]:
        (folder / name).write_bytes(b"broken")
    done = start("data", "--data-root", tmp_path)
    assert done.code == 1 and "cifar10 corrupt" in words(done.out)
    assert "data_batch_1.bin has the MD5" in words(done.out) and "expected 5dd7e06a14cb22eb9f671a540d1b7c25" in done.out
    unchecked = start("data", "--data-root", tmp_path, "--no-verify")
    assert unchecked.code == 0 and "7 files, not verified" in words(unchecked.out)


# ------------------------------------------------------------------------------------- training and what follows


def test_train_writes_a_run(finished):
    expected = {"recipe.yaml", "run.json", "metrics.jsonl", "metrics.csv", "evaluation.json", "report.html"}
    assert expected <= {file.name for file in finished.iterdir()}
    facts = json.loads((finished / "run.json").read_text())
    assert (facts["status"], facts["step"], facts["name"]) == ("finished", 4, "digits-softmax")
    assert not (finished / "tensorboard").exists()


def test_train_again_says_that_it_is_finished(run_folder, start):
    (run_folder / "report.html").unlink()
    before = (run_folder / "metrics.jsonl").read_bytes()
    done = start("train", "digits-softmax", *TINY, "--folder", run_folder, "--device", "cpu")
    assert done.code == 0 and f"{run_folder} is finished already" in done.out
    accuracy = json.loads((run_folder / "evaluation.json").read_text())["metrics"]["accuracy"]
    assert f"{accuracy:.2%}" in done.out and "digits-softmax" in done.out
    assert f"Report: {run_folder / 'report.html'}" in done.out and (run_folder / "report.html").exists()
    assert (run_folder / "metrics.jsonl").read_bytes() == before


def test_train_into_the_folder_of_another_recipe(run_folder, start):
    done = start("train", "digits-softmax", *TINY, "seed=9", "--folder", run_folder, "--device", "cpu")
    assert done.code == 2 and done.out == ""
    assert f"error: {run_folder} holds a run of another recipe" in words(done.err)
    assert f"hypersphere resume {run_folder}" in done.err


def test_train_without_a_recipe_takes_overrides(tmp_path, monkeypatch, start):
    monkeypatch.chdir(tmp_path)
    done = start("train", *TINY, "loss.m=0.2", "--device", "cpu")
    assert done.code == 0, done.err
    plan = recipe.load("digits-arcface", [*TINY, "loss.m=0.2"])
    folder = tmp_path / "runs" / f"digits-arcface-{plan.hash}"
    assert recipe.load(folder / "recipe.yaml").model_dump() == plan.model_dump()
    assert str(folder / "report.html") in done.out and "digits-arcface" in done.out
    # Both runs on one page, in the working folder unless another file is named.
    assert start("report", folder, folder).code == 0 and (tmp_path / "report.html").exists()


def test_resume_of_a_finished_run(run_folder, start):
    done = start("resume", run_folder, "--device", "cpu")
    assert done.code == 0 and "is finished already" in done.out and evaluations.metric("accuracy").title in done.out


def test_resume_goes_on(run_folder, start):
    facts = json.loads((run_folder / "run.json").read_text())
    (run_folder / "run.json").write_text(json.dumps(facts | {"status": "interrupted"}))
    (run_folder / "evaluation.json").unlink()
    shutil.rmtree(run_folder / "checkpoints")
    (run_folder / "checkpoints").mkdir()
    done = start("resume", run_folder, "--device", "cpu")
    assert done.code == 0, done.err
    assert json.loads((run_folder / "run.json").read_text())["status"] == "finished"
    assert (run_folder / "evaluation.json").exists()


@pytest.mark.parametrize("command", ["resume", "evaluate", "report"])
def test_folder_that_is_no_run(command, tmp_path, start):
    wrong = {
        tmp_path: "is not a run folder: it has no recipe.yaml",
        tmp_path / "nowhere": "does not exist: give a folder",
    }
    for folder, text in wrong.items():
        done = start(command, folder)
        assert done.code == 2 and done.out == ""
        assert words(done.err).startswith(f"error: {folder} {text}")


def test_evaluate_measures_the_checkpoint_again(run_folder, start):
    file = run_folder / "evaluation.json"
    before = json.loads(file.read_text())
    file.unlink()
    (run_folder / "features.safetensors").unlink()
    done = start("evaluate", run_folder, "--device", "cpu")
    assert done.code == 0, done.err
    after = json.loads(file.read_text())
    assert after["step"] == before["step"] == 4 and (run_folder / "features.safetensors").exists()
    assert after["metrics"] == pytest.approx(before["metrics"])
    assert f"{after['metrics']['accuracy']:.2%}" in done.out and evaluations.metric("eer").title in done.out


def test_evaluate_without_a_checkpoint(run_folder, start):
    shutil.rmtree(run_folder / "checkpoints")
    done = start("evaluate", run_folder, "--device", "cpu")
    assert done.code == 2 and f"{run_folder} has no checkpoint yet" in words(done.err)


def test_report_of_one_and_of_two_runs(run_folder, finished, tmp_path, monkeypatch, start):
    monkeypatch.chdir(tmp_path)
    (run_folder / "report.html").unlink()
    one = start("report", run_folder)
    assert one.code == 0 and one.out == f"Report: {run_folder / 'report.html'}\n"
    facts = json.loads((run_folder / "run.json").read_text())
    (run_folder / "run.json").write_text(json.dumps(facts | {"name": "other-name"}))
    two = start("report", finished, run_folder, "-o", "both.html")
    assert two.code == 0 and two.out == f"Report: {tmp_path / 'both.html'}\n"
    page = (tmp_path / "both.html").read_text()
    assert "digits-softmax" in page and "other-name" in page
    assert "other-name" not in (run_folder / "report.html").read_text()


def test_two_runs_in_the_table_of_metrics(run_folder, finished, capsys):
    facts = json.loads((run_folder / "run.json").read_text())
    (run_folder / "run.json").write_text(json.dumps(facts | {"name": "other-name"}))
    evaluation = json.loads((run_folder / "evaluation.json").read_text())
    evaluation["metrics"]["accuracy"] = 0.9876
    (run_folder / "evaluation.json").write_text(json.dumps(evaluation))
    runs.show_metrics([RunFolder(finished), RunFolder(run_folder)])
    lines = capsys.readouterr().out.splitlines()
    assert evaluations.metric("accuracy").title in lines[0] and len(lines) == 4
    loss = evaluation["metrics"]["cross_entropy"]
    assert lines[3] == f"Test cross-entropy: {loss:.4f}, {loss:.4f}"
    assert lines[1].startswith("digits-softmax ")
    assert lines[2].startswith("other-name ") and "98.76%" in lines[2]


# --------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits-softmax", "train.stepz=4"], "override 'train.stepz=4': train.stepz is not a known key."),
        (["digits-arcfac"], "no recipe file or embedded recipe 'digits-arcfac'. Did you mean 'digits-arcface'?"),
        (["digits-arcface", "loss.m=9"], "override 'loss.m=9': loss.m must be at least 0 and at most 3.14159, got 9.0"),
        (["digits-arcface", "loss.m"], "override 'loss.m': write key=value"),
        (["digits-softmax", "--device", "gpu"], "device must be 'auto', 'cpu', 'cuda', 'cuda:N' or 'mps', got 'gpu'"),
        (["digits-softmax", "model.dim=0"], "override 'model.dim=0': model.dim must be at least 1, got 0"),
        (["digits-softmax", "data.batch_size=100000"], "batch_size must be at most the"),
        (["digits-softmax", "data.name=cifar10", "model.name=plain-cnn"], "cifar10 was not found"),
        (["digits-softmax", "data.hold_out=[77]"], "hold_out has 77, which is no class of 'digits'"),
    ],
)
def test_wrong_training_input_is_exit_code_2(arguments, message, tmp_path, start, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = start("train", *arguments, "--data-root", tmp_path)
    assert done.code == 2
    assert message in words(done.err) and "Traceback" not in done.err and words(done.err).startswith("error: ")


def test_unknown_option_is_exit_code_2(start):
    done = start("train", "--no-such-option")
    assert done.code == 2 and "No such option" in words(done.err)
    assert start("nonsense").code == 2


def test_message_of_a_wrong_key_in_a_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("train:\n  steps: 4\n  stepz: [bold]\n")
    done = process("train", file)
    assert done.code == 2 and done.out == ""
    assert done.err.startswith(f"error: {file}, line 3: train.stepz is not a known key. Did you mean 'steps'? Allowed:")
    assert "Traceback" not in done.err and done.err.count("\n") == 1


def test_debug_shows_the_traceback():
    for arguments in (["--debug", "list", "loses"], ["list", "loses", "--debug"]):
        done = process(*arguments)
        assert done.code == 1
        assert "Traceback (most recent call last)" in done.err
        assert "UnknownNameError: unknown family 'loses'" in done.err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (DivergedError("training diverged at step 3 [bold]"), 1, "error: training diverged at step 3 [bold]\n"),
        (Interrupted("stopped after step 3", 15), 143, "\nstopped after step 3\n"),
        (KeyboardInterrupt(), 130, "\nstopped\n"),
    ],
)
def test_exit_codes(error, code, text, monkeypatch, capsys):
    def fail() -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["hypersphere"])
    with pytest.raises(SystemExit) as stopped:
        cli.main(fail)
    assert stopped.value.code == code
    assert capsys.readouterr().err == text


@pytest.mark.parametrize("code", [0, 3])
def test_one_of_several_processes_ends_whatever_threads_are_left(code):
    program = (
        "import sys, threading, time; from hypersphere import cli\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        f"def work(): print('done'); sys.exit({code})\n"
        "cli.main(work)"
    )
    several = {**os.environ, "WORLD_SIZE": "2", "RANK": "0"}
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, env=several, capture_output=True, text=True, timeout=40, check=False)
    assert (done.returncode, done.stdout) == (code, "done\n")


def test_errors_of_the_programmer_keep_their_traceback(monkeypatch):
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(sys, "argv", ["hypersphere"])
    with pytest.raises(ZeroDivisionError):
        cli.main(fail)


# ------------------------------------------------------------------------------------------------------------- docs


def test_docs(tmp_path, start):
    results.write_rows(tmp_path / "rows" / "a.json", [ROW])
    stale = start("docs", "--folder", tmp_path, "--check")
    assert stale.code == 2 and "results.md" in stale.err and "out of date, run `hypersphere docs`" in stale.err
    assert not (tmp_path / "results.md").exists()
    assert start("docs", "--folder", tmp_path) == (0, f"Wrote the pages in {tmp_path}\n", "")
    assert ROW.what in (tmp_path / "results.md").read_text(encoding="utf-8")
    assert start("docs", "--folder", tmp_path, "--check") == (0, f"Checked the pages in {tmp_path}\n", "")
    (tmp_path / "rows" / "a.json").write_text("[")
    broken = start("docs", "--folder", tmp_path)
    assert broken.code == 2 and "a.json is not a list of result rows" in words(broken.err)


def test_many_metrics_are_shown_one_below_the_other(finished, monkeypatch, capsys):
    run = RunFolder(finished)
    monkeypatch.setattr(console, "width", 80)
    many = {"accuracy": 0.9, "eer": 0.1, "few_shot_1": 0.5, "few_shot_5": 0.7, "lfw_accuracy": 0.8, "lfw_eer": 0.25}
    monkeypatch.setattr(RunFolder, "evaluation", lambda self: {"metrics": many})
    runs.show_metrics([run])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and lines[0].split() == [run.facts()["name"]]
    shown = {line.rsplit(None, 1)[0].strip(): line.split()[-1] for line in lines[1:]}
    assert shown == {evaluations.metric(key).title: f"{value:.2%}" for key, value in many.items()}


def test_record(finished, tmp_path, start):
    file = tmp_path / "rows" / "digits.json"
    done = start("record", finished, "-o", file, "--group", "Digits", "--note", "a caution")
    rows = results.read_rows(file.parent)
    assert done == (0, f"Wrote {len(rows)} rows to {file}\n", "")
    found = json.loads((finished / "evaluation.json").read_text())["metrics"]
    assert [row.metric for row in rows] == [evaluations.metric(key).title for key in found if key != "cross_entropy"]
    accuracy = json.loads((finished / "evaluation.json").read_text())["metrics"]["accuracy"]
    assert rows[0].mean == pytest.approx(100 * accuracy) and rows[0].group == "Digits" and rows[0].seeds == (0,)
    assert all(row.note == "a caution" for row in rows)


def test_record_with_published_values(finished, tmp_path, start):
    file, name = tmp_path / "rows" / "digits.json", RunFolder.open(finished).recipe().name
    values = ("--published", f"{name}=99.1", "--published", f"{name}.energy=0.5 (s=2)")
    assert start("record", finished, "-o", file, "--group", "Digits", *values).code == 0
    found = {row.metric: row.published for row in results.read_rows(file.parent)}
    assert found.pop("Test accuracy") == "99.1" and found.pop("Classifier energy") == "0.5 (s=2)"
    assert found and set(found.values()) == {None}
    for wrong in (name, f"{name}=", "=1"):
        done = start("record", finished, "-o", file, "--group", "Digits", "--published", wrong)
        assert done.code == 2 and f"must be NAME=VALUE or NAME.METRIC=VALUE, got '{wrong}'" in words(done.err)


def test_docs_without_rows(tmp_path, start):
    done = start("docs", "--folder", tmp_path / "nowhere")
    assert done.code == 2 and words(done.err).startswith("error: there is no folder")
