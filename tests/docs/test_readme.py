"""What the README shows works as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from helpers.paths import ROOT
from hypersphere.cli.commands import app

README = (ROOT / "README.md").read_text()


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/layers.md", "docs/energy.md"])
def test_python_blocks_run(tmp_path, page):
    """In a fresh interpreter: what other tests have imported must not help."""
    found = blocks("python", (ROOT / page).read_text())
    assert found
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(found)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", [line for block in blocks("bash") for line in block.splitlines() if line.strip()])
def test_commands_exist(line):
    words = line.split("#")[0].split()
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif "hypersphere" in words:
        assert words[words.index("hypersphere") + 1] in get_command(app).commands
    else:
        assert words[0] in ("source",)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


@pytest.mark.usefixtures("no_plugins")
def test_the_loss_in_an_own_file_trains(tmp_path, monkeypatch, start):
    monkeypatch.chdir(tmp_path)
    (text,) = [block for block in blocks("python") if block.startswith("# mine.py\n")]
    (line,) = [line for block in blocks("bash") for line in block.splitlines() if "--plugin mine.py" in line]
    assert text.count("\n") <= 12
    Path("mine.py").write_text(text)
    tiny = ["train.steps=2", "train.tensorboard=false", "schedule.milestones=[1]", "--device", "cpu", "--folder", "run"]
    done = start(*line.split()[1:], *tiny)
    assert done.code == 0, done.err
    assert "name: ring" in Path("run/recipe.yaml").read_text()
