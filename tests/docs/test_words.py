"""One spelling of English, British, in public names, docstrings, help texts and pages."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from helpers.paths import ROOT

AMERICAN = re.compile(
    r"normaliz|optimiz|initializ|regulariz|regularis?er?ization|visualiz|generaliz|serializ|summariz|minimiz|maximiz|"
    r"parametriz|organiz|recogniz|quantiz|factoriz|symmetriz|penaliz|analyz|"
    r"color|center(?!ed)|centered|neighbor|behavior|favor|labeled|labeling|modeling|gray(?!code)|meter\b",
    re.IGNORECASE,
)
# Names of other people's: of losses in their papers, of torch, of matplotlib and Plotly, and what users may also write.
THEIRS = re.compile(
    r"CenterLoss|center-loss|SubcenterArcFace|subcenter-arcface|Sub-center|sub-center|optimizer`?\b|`optimizer|"
    r"torch\.nn\.utils\.parametrize|parametrizations?\b|parametrized|register_parametrization|Optimizer\b|"
    r"Riemannian Optimization|(upper|lower|center) (left|right|center)|color-scheme|"
    r"pytest\.mark\.parametrize|digits-64-center|\| center \||quantize_dynamic|"
    r"InstanceNorm|diameter|parameter|perimeter|#[0-9a-f]+",
    re.IGNORECASE,
)


def american(text: str) -> list[str]:
    """Words of a text with an American spelling that are nobody else's names."""
    found = re.findall(r"[\w.`-]+", THEIRS.sub("", re.sub(r"https?://\S+", "", text)))
    return [word for word in found if AMERICAN.search(word)]


def texts(path: Path) -> list[str]:
    """Public names and arguments, docstrings, and texts of several words in a file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            found.append(node.name)
            if isinstance(node, ast.FunctionDef):
                found += [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            found.append(re.sub(r"^ *(?:>>>|\.\.\.).*$", "", node.value, flags=re.MULTILINE))
    return found


SOURCES = sorted((ROOT / "src").rglob("*.py"))


@pytest.mark.parametrize("folder", sorted({file.parent for file in SOURCES}), ids=lambda folder: folder.name)
def test_sources(folder):
    found = {(file.name, word) for file in folder.glob("*.py") for text in texts(file) for word in american(text)}
    assert not found


@pytest.mark.parametrize(
    "page", [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"], ids=lambda page: page.name
)
def test_pages(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert not american(text)


def test_the_test_sees_american_words():
    text = "normalize the color of a center for optimizers; `torch.optim.Optimizer`, CenterLoss and parameters are fine"
    assert american(text) == ["normalize", "color", "center", "optimizers"]
