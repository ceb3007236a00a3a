"""`hypersphere new`: every example is copied, loaded, listed, trained with, evaluated and reported as it is."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from helpers.command_line import words
from helpers.paths import ROOT
from hypersphere.cli.names import families
from hypersphere.cli.new import examples, fill
from hypersphere.cli.terminal import console
from hypersphere.errors import ArgumentError

pytestmark = pytest.mark.usefixtures("no_plugins")

EXAMPLES = examples()
MEMBERS = [family for family in EXAMPLES if family != "recipe"]
TINY = ["train.steps=4", "train.log_every=2", "train.tensorboard=false", "schedule.warmup=0"]


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "width", 600)


def commands(text: str) -> list[list[str]]:
    """The command lines that an example shows, without the name of the program."""
    return [shlex.split(line)[1:] for line in re.findall(r"^(?:# )?(hypersphere .*)$", text, re.MULTILINE)]


@pytest.mark.parametrize("family", MEMBERS)
def test_an_example_works_as_it_is(family, start, tmp_path):
    done = start("new", family, "Own Thing")
    assert done.code == 0 and done.err == ""
    file = tmp_path / "own_thing.py"
    text = file.read_text()
    assert "my" not in re.findall(r"[a-z]+", re.sub("(?i)my own", "", text).lower())
    shown = [shlex.split(line)[1:] for line in done.out.splitlines()[1:]]
    assert done.out.startswith("Wrote own_thing.py") and shown == commands(text)
    listed, *trained = shown
    assert listed[0] == "list" and trained
    assert re.search(r"^own-thing .*plugin own_thing", start(*listed).out, re.MULTILINE)
    for index, line in enumerate(trained):
        assert line[0] == "train"
        done = start(*line, *TINY, "--device", "cpu", "--folder", f"runs/{index}")
        assert done.code == 0, done.err
        assert "own-thing" in Path(f"runs/{index}/recipe.yaml").read_text()
        again = start("evaluate", f"runs/{index}", "--device", "cpu", "--plugin", file)
        assert again.code == 0, again.err
        assert start("report", f"runs/{index}", "--plugin", file).code == 0
        found = json.loads(Path(f"runs/{index}/evaluation.json").read_text())["metrics"]
        assert found["accuracy"] >= 0 and (family != "evaluation" or -1 <= found["own_thing"] <= 1)


def test_the_example_of_a_recipe(start):
    assert start("new", "recipe", "mine").code == 0
    (line,) = commands(Path("mine.yaml").read_text())
    assert line == ["train", "mine.yaml"]
    done = start(*line, *TINY, "--device", "cpu", "--folder", "run")
    assert done.code == 0, done.err
    assert start("report", "run").code == 0


def test_every_example_belongs_to_a_family_and_most_families_have_one():
    known = {registry.family for registry in families().values()}
    assert set(MEMBERS) <= known
    without = {"figure", "layer", "protocol", "section"}  # those which no recipe names, and sections of recipes
    assert known - without == set(MEMBERS)


def test_nothing_is_overwritten(start, tmp_path):
    Path("mine.py").write_text("precious")
    done = start("new", "margin", "mine")
    assert (done.code, done.out) == (2, "") and "mine.py is there already" in done.err
    assert Path("mine.py").read_text() == "precious"
    done = start("new", "margin", "mine", "-o", tmp_path / "folder" / "other.py")
    assert done.code == 0 and "--plugin" in done.out
    text = (tmp_path / "folder" / "other.py").read_text()
    assert f"--plugin {tmp_path}/folder/other.py loss.psi=mine" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["margn", "mine"], "unknown family 'margn'. Did you mean 'margin'? Known: angular function, attack, "),
        (["margin", "additive-angle"], "name must be new: 'additive-angle' is a margin already"),
        (["losses", "ArcFace"], "name must be new: 'arc-face' is a loss already"),
        (["margin", "2fast"], "name must be letters, digits and hyphens, and begin with a letter, got '2fast'"),
        (["margin", "a/b"], "name must be letters, digits and hyphens, and begin with a letter, got 'a/b'"),
        (["margin", "mine", "-o", "mine.txt"], "output must end in .py, got 'mine.txt'"),
        (["recipe", "mine", "-o", "mine.py"], "output must end in .yaml, got 'mine.py'"),
    ],
)
def test_what_cannot_be_made(arguments, message, start):
    done = start("new", *arguments)
    assert (done.code, done.out) == (2, "") and message in words(done.err)
    assert not list(Path().iterdir())


def test_names():
    text = "my-name my_name MyName my_name.py"
    for name in ("CubedCosine", "cubed_cosine", "cubed-cosine", "Cubed cosine"):
        assert fill(text, name) == "cubed-cosine cubed_cosine CubedCosine cubed_cosine.py"
    with pytest.raises(ArgumentError, match="must be letters"):
        fill(text, "")


def test_the_page_shows_the_examples():
    page = (ROOT / "docs" / "extending.md").read_text()
    shown = re.findall(r"```(?:python|yaml)\n(.*?)```", page, re.DOTALL)
    assert len(shown) > 1 and all(text in EXAMPLES.values() for text in shown)
    for family in EXAMPLES:
        assert f"`hypersphere new {family.replace(' ', '-')} NAME`" in page
