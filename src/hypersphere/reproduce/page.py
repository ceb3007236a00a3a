"""The scoreboard as one HTML page that needs no other file."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from hypersphere.drawing import PALETTE
from hypersphere.report.page import write_page as write_whole

TITLE = "Scoreboard"


def write_page(board: Mapping[str, Any], output: Path) -> Path:
    """Write the page of a scoreboard, whole or not at all; folders above it are made.

    Args:
        board: What :func:`hypersphere.reproduce.scoreboard.scoreboard` gives.
        output: The file.

    Returns:
        ``output``.
    """
    return write_whole(render(board), output)


def render(board: Mapping[str, Any]) -> str:
    """The whole page: everything in it is built in the browser out of the JSON that it carries."""
    script = _asset("hypersphere.reproduce", "page.js")
    colours = "".join(f"--seed-{index}: {value};" for index, value in enumerate(PALETTE))
    style = _asset("hypersphere.report", "page.css") + _asset("hypersphere.reproduce", "page.css")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{TITLE}</title>
<link rel="icon" href="data:,">
<style>:root {{{colours}}}
{style}</style>
</head>
<body>
<header>
<h1>{TITLE}</h1>
<p class="lead">What this package measures, cell by cell, beside what the thesis and its papers print, and which of
their orderings hold.</p>
<div id="counts" class="counts"></div>
<div id="legend"></div>
</header>
<form id="filters" class="filters" role="search" aria-label="Filter the tables"></form>
<main id="tables"></main>
<dialog id="cell" aria-labelledby="cell-title"></dialog>
<noscript><p>The tables need JavaScript.</p></noscript>
<script type="application/json" id="board">{embedded(board)}</script>
<script>{script}</script>
</body>
</html>
"""


def embedded(value: object) -> str:
    r"""JSON that is safe inside a script element: no tag or comment begins or ends in it.

    A number that is not finite, which JSON does not have, becomes ``null``.

    Example:
        >>> embedded({"title": "</script>", "value": float("nan")})
        '{"title":"\\u003c/script\\u003e","value":null}'
    """
    text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    for character in "<>&":  # U+2028 and U+2029 are not ASCII, and so escaped already
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def _policy(script: str) -> str:
    """What the page may do: run its own script, and load nothing."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _asset(package: str, name: str) -> str:
    return (resources.files(package) / name).read_text(encoding="utf-8")
