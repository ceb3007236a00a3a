"""The command line with plugins, and without the libraries of the workbench."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib

import pytest

from helpers.command_line import Result, process
from helpers.paths import ROOT
from helpers.plugins import MARGIN, write
from hypersphere import cli, plugins
from hypersphere.cli.commands import COMMANDS
from hypersphere.cli.terminal import console

pytestmark = pytest.mark.usefixtures("no_plugins")


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setattr(console, "width", 600)


# ------------------------------------------------------------------------------------------------------- plugins


def test_a_plugin_is_listed_with_its_name(tmp_path, start):
    one = write(tmp_path, "one.py", MARGIN.format(name="test-one"))
    two = write(tmp_path, "two.py", MARGIN.format(name="test-two") + "# 2\n")
    done = start("list", "margins", "--plugin", one, "--plugin", two)
    assert done.code == 0, done.err
    assert re.search(r"^test-one +A margin of mine. \(also test-one-too; plugin one\)", done.out, re.MULTILINE)
    assert re.search(r"^test-two .*plugin two", done.out, re.MULTILINE)
    assert "plugin" not in next(line for line in done.out.splitlines() if line.startswith("none "))


def test_a_plugin_may_stand_before_the_command_and_is_loaded_once(tmp_path, start):
    file = write(tmp_path, "one.py", MARGIN.format(name="test-one"))
    assert "test-one" in start("--plugin", file, "list", "margins", "--plugin", file).out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_plugins(name, tmp_path, start):
    """Also those of groups; it is loaded before anything else is looked at."""
    wrong = write(tmp_path, "wrong.py", "1 / 0\n")
    needed = {"record": ["-o", "x.json", "--group", "g"], "embed": ["-o", "x.npz"], "report": ["x"], "resume": ["x"]}
    needed |= {
        "identify": ["--gallery", "x", "--probes", "x"],
        "plot": ["gradients"],
        "gallery": ["list"],
        "compare": ["--table", "thesis-2.2"],
    }
    words = [*needed.get(name, []), "--plugin", wrong, *(["x"] * (name not in NO_ARGUMENTS))]
    words += ["y"] * (name in ("embed", "verify"))
    done = start(name, *words)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: plugin {wrong}, line 1: ZeroDivisionError: division by zero\n"
    assert "--plugin" in start(name, "--help").out


NO_ARGUMENTS = ("demo", "docs", "data", "list", "plot", "report", "resume")


def installed(monkeypatch, tmp_path, text):
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, "own_installed.py", text)
    point = importlib.metadata.EntryPoint("spheres", "own_installed", plugins.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: (point,) if group == plugins.GROUP else ())


def test_an_installed_plugin_is_found_by_every_command(tmp_path, monkeypatch, start):
    installed(monkeypatch, tmp_path, MARGIN.format(name="test-installed"))
    assert re.search(r"^test-installed .*plugin spheres", start("list", "margins").out, re.MULTILINE)


@pytest.mark.filterwarnings("always")
def test_an_installed_plugin_that_fails_is_left_out_with_a_warning(tmp_path, monkeypatch, start):
    installed(monkeypatch, tmp_path, MARGIN.format(name="test-half") + "1 / 0\n")
    done = start("--help")
    assert done.code == 0 and done.err == ""
    done = start("list", "margins")
    assert done.code == 0 and "arcface" not in done.err and "additive-angle" in done.out and "test-half" not in done.out
    assert done.err.startswith("warning: the installed plugin 'spheres' is left out: plugin ")
    assert "own_installed.py, line 15: ZeroDivisionError" in done.err
    assert start("list", "margins").err == ""  # said once a process


def test_a_plugin_that_is_not_there(tmp_path, start):
    done = start("list", "margins", "--plugin", tmp_path / "nowhere.py")
    assert done.code == 2 and done.out == "" and "there is no such file" in done.err


# ---------------------------------------------------------------------------------------------- missing libraries


def without(blocked: list[str], *arguments: str) -> Result:
    program = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); from hypersphere.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], [], ["train"], ["nonsense"]])
def test_without_the_workbench_it_says_what_to_install(arguments):
    for first in ("typer", "rich"):
        done = without([first, *set(cli.LIBRARIES) - {"click"}], *arguments)
        assert (done.code, done.out) == (2, "")
        assert re.fullmatch(
            r'error: (typer|rich) is not installed, which this needs: pip install "hypersphere\[workbench\]"\n',
            done.err,
        )


@pytest.mark.parametrize(
    ("library", "arguments"),
    [
        ("pydantic", ["list", "recipes"]),
        ("yaml", ["train", "digits-softmax"]),
        ("safetensors", ["gallery", "list", "nowhere.safetensors"]),
        ("matplotlib", ["plot", "gradients"]),
    ],
)
def test_without_one_library_a_command_names_it(library, arguments):
    done = without([library], *arguments)
    assert (done.code, done.out) == (2, "")
    package = cli.LIBRARIES[library]
    assert package in done.err and 'pip install "hypersphere[workbench]"' in done.err and done.err.startswith("error: ")
    assert without([library], "--help").code == 0


def test_a_mistake_of_the_program_keeps_its_traceback(tmp_path):
    """Also a module that is no library of ours, such as one that a plugin lacks: that is told with its line."""
    wrong = write(tmp_path, "wrong.py", "import no_such_module_at_all\n")
    done = process("list", "margins", "--plugin", wrong)
    assert done.code == 2 and f"plugin {wrong}, line 1: ModuleNotFoundError: No module named" in done.err


def test_libraries_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = {re.split("[><=]", one)[0] for one in project["optional-dependencies"]["workbench"]}
    assert set(cli.LIBRARIES.values()) == packages
