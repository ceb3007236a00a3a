"""Sections of the page that draw what evaluations left beside their metrics: attacks, clouds, graphs, samples.

A task brings its own: a function from artefacts to a :class:`Section`, registered under the first part of their names.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any, NamedTuple

from PIL import Image

from hypersphere.registry import Registry
from hypersphere.report.figures import Figure

Artefacts = Mapping[str, Any]
"""Name -> array, as an evaluation left it, without its prefix."""


class Picture(NamedTuple):
    """A picture of one run: title, figure as Plotly data and layout, what it shows, and its size, flat or large."""

    title: str
    figure: Figure
    caption: str
    kind: str = "flat"


class Section(NamedTuple):
    """A section of the page: its title, what it is about, and the pictures of one run."""

    title: str
    text: str
    pictures: list[Picture]


figures: Registry[Section] = Registry(
    "figure",
    positional=("artefacts",),
    kind=Section,
    members=("hypersphere.tasks.*.figures",),
)
"""First part of artefacts' names -> what draws the section of those artefacts."""


def sections(artefacts: Artefacts) -> dict[str, Section]:
    """The sections of one run by name; ``attacks/curve`` is the artefact ``curve`` of the section ``attacks``."""
    parts: dict[str, dict[str, Any]] = {}
    for name, value in artefacts.items():
        prefix, _, own = name.partition("/")
        parts.setdefault(prefix, {})[own] = value
    return {name: figures.create(name, parts[name]) for name in figures if name in parts}


def png(pixels: Any) -> str:
    """The address of an image ``(H, W, 4)`` as a PNG, a hundredth of the numbers that it stands for."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
