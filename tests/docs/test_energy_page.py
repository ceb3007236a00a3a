"""What the page on energies says is so: its code, its table of members, its recipes, commands and pictures."""

from __future__ import annotations

import contextlib
import io
import re

import pytest
import yaml

from helpers.paths import ROOT
from hypersphere import recipe
from hypersphere.energy import BPLowRank, Compressive, energies

PAGE = (ROOT / "docs" / "energy.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_code_prints_what_stands_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        for block in blocks("python"):
            exec(compile(block, "docs/energy.md", "exec"), names)
    assert output.getvalue() == "".join(blocks("text"))


def test_links_and_pictures_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target


def test_links_within_the_page_lead_to_headings():
    headings = {title.lower().replace(" ", "-") for title in re.findall(r"^## (.*)$", PAGE, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= headings


@pytest.mark.parametrize("name", energies)
def test_the_tables_have_every_name_alias_default_and_weight(name):
    (row,) = re.findall(rf"^\| `{re.escape(name)}`.*$", PAGE, re.MULTILINE)
    entry = energies[name]
    for alias in entry.aliases:
        assert f"`{alias}`" in row
    built = energies.create(name)
    assert f"| {built.hidden_weight:g} / {built.output_weight:g} |" in row
    compressive = isinstance(built, Compressive | BPLowRank)  # what these share is said above their table
    for option in entry.options:
        if option.name not in ("hidden_weight", "output_weight"):
            shared = compressive and option.name in Compressive.shared_options
            assert f"`{option}`" in (PAGE if shared else row), str(option)
    named = {text.split("=")[0] for text in re.findall(r"`([a-z_]+=[^`]+)`", row.split("|")[3])}
    assert named <= {option.name for option in entry.options}


def test_recipes_and_commands_exist(tmp_path):
    for name in re.findall(r"^\| (`(?:digits|mnist|cifar)[^|]*) \|", PAGE, re.MULTILINE):
        for one in name.replace("`", "").split(", "):
            assert recipe.load(one).name == one
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    assert lines
    for line in lines:
        program, command, name, *overrides = line.split("#")[0].split()
        assert (program, command) == ("hypersphere", "train")
        assert recipe.load(name, overrides).name == name
    (text,) = blocks("yaml")
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    plan = recipe.load(str(file))
    assert [part.name for part in plan.regularisers] == [part["name"] for part in yaml.safe_load(text)["regularisers"]]
    for index in range(len(plan.regularisers)):
        plan.build(energies, ("regularisers", index))


def test_scripts_of_the_page_exist():
    scripts = re.findall(r"^\| `([a-z_]+\.py)` \|", PAGE, re.MULTILINE)
    assert scripts and all((ROOT / "examples" / script).is_file() for script in scripts)
