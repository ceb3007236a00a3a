"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from hypersphere.cli import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_python_blocks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert blocks("python")
    names: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)


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
