"""What the page on orthogonal training says is so: its code, its tables of maps and options, recipes and commands."""

from __future__ import annotations

import contextlib
import inspect
import io
import re

import pytest

import hypersphere as hs
from helpers.paths import ROOT
from hypersphere import recipe
from hypersphere.orthogonal import maps
from hypersphere.orthogonal.adapters import adapt

PAGE = (ROOT / "docs" / "orthogonal.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def section(title: str) -> str:
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]


def test_code_prints_what_stands_there(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        for block in blocks("python"):
            exec(compile(block, "docs/orthogonal.md", "exec"), names)
    assert output.getvalue() == "".join(blocks("text"))
    assert not (names["rotated"] - names["plain"](names["features"])).abs().max() > 1e-5


def test_links_and_pictures_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
    headings = {title.lower().replace(" ", "-") for title in re.findall(r"^## (.*)$", PAGE, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= headings


@pytest.mark.parametrize("name", maps)
def test_the_table_has_every_map_and_alias(name):
    rows = [row.split("|")[1] for row in re.findall(r"^\| `.*$", section("Which map"), re.MULTILINE)]
    named = name.replace("-", "_")
    found = [row for row in rows if f"`{named}`" in row]
    assert found
    for alias in maps[name].aliases:
        assert f"`{alias}`" in found[0]


def test_options_in_the_tables_exist():
    for row in rows_of("Which map"):
        name = re.match(r"\| `([a-z_]+)`", row)[1]
        for option, value in re.findall(r"`([a-z_]+)=(\"?[a-z-]+\"?)`", row.split("|")[1]):
            maps.create(name, **{option: value.strip('"')})
    known = set(inspect.signature(hs.orthogonal.apply).parameters)
    for row in rows_of("What the neurons are"):
        for option in re.findall(r"`([a-z_]+)", row.split("|")[1]):
            assert option in known
    known = set(inspect.signature(adapt).parameters)
    for option in re.findall(r"\b([a-z_]+)=", "".join(rows_of("Fine-tuning"))):
        assert option in known, option


def rows_of(title: str) -> list[str]:
    table = re.search(r"^\| (?:map|option|method).*\n\|[-|]+\n((?:\|.*\n)+)", section(title), re.MULTILINE)
    return table[1].splitlines()


def test_recipes_and_commands_exist(tmp_path):
    for name in re.findall(r"^\| (`(?:digits|mnist|cifar)[^|]*) \|", PAGE, re.MULTILINE):
        for one in name.replace("`", "").split(", "):
            assert recipe.load(one).orthogonal is not None
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    assert lines
    for line in lines:
        program, command, name, *overrides = line.split("#")[0].split()
        assert (program, command) == ("hypersphere", "train")
        assert recipe.load(name, overrides).name == name
    (text,) = blocks("yaml")
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    assert recipe.load(str(file)).orthogonal.name == "cayley"


def test_files_of_the_page_exist():
    files = re.findall(r"`((?:examples|tests)/[a-z_/]+\.py)`", PAGE)
    assert files
    assert all((ROOT / file).is_file() for file in files)
