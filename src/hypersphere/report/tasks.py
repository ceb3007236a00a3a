"""Pictures of what evaluations left beside their metrics: attacks, clouds, graphs, episodes, samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hypersphere.report.figures import Figure

Artefacts = Mapping[str, Any]
"""Name -> array, as an evaluation left it, without its prefix."""


class Picture(NamedTuple):
    """A picture of one run: title, figure as Plotly data and layout, what it shows, and its size, flat or large."""

    title: str
    figure: Figure
    caption: str
    kind: str = "flat"


FIGURES: dict[str, tuple[str, str, Callable[[Artefacts], list[Picture]]]] = {}
"""First part of artefacts' names -> title and introduction of the section on the page, and what draws its pictures."""


def pictures(artefacts: Artefacts) -> dict[str, list[Picture]]:
    """The pictures of one run by section; ``attacks/curve`` is the artefact ``curve`` of the section ``attacks``."""
    found: dict[str, list[Picture]] = {}
    for prefix, (_, _, draw) in FIGURES.items():
        own = {name.split("/", 1)[1]: value for name, value in artefacts.items() if name.startswith(f"{prefix}/")}
        if own:
            found[prefix] = draw(own)
    return found
