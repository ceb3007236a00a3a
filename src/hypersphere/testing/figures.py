r"""The contract of figures: sections of the page that draw what an evaluation left.

A member's own ``contract`` declares ``artefacts``, arrays by name as its evaluation leaves them, without its prefix.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np

from hypersphere.testing import common
from hypersphere.testing.contract import Contract

CONTRACT = Contract("figure", "figures", "hypersphere.report.sections:figures")


def artefacts(name: str) -> dict[str, Any]:
    """What the member draws."""
    found = CONTRACT.fact(name, "artefacts")
    assert found, "declare contract['artefacts'], arrays of a few samples by name"
    return copy.deepcopy({key: np.asarray(value) for key, value in found.items()})


def draw(name: str) -> Any:
    """Its section of the page."""
    return CONTRACT.registry.create(name, artefacts(name))


@CONTRACT.check
def draws_pictures(name: str) -> None:
    """There are pictures, each with a title and a caption of its own, and the section says what it is about."""
    found = draw(name)
    assert found.title and len(found.text.split()) > 3, f"it says only {found.text!r}"
    assert found.pictures, "it draws nothing"
    titles = [picture.title for picture in found.pictures]
    assert all(titles) and len(set(titles)) == len(titles), f"titles {titles}"
    assert all(len(picture.caption.split()) > 1 for picture in found.pictures), "a picture has no caption"


@CONTRACT.check
def figures_are_plotly_data(name: str) -> None:
    """A figure is data and layout that JSON holds, without anything that is no number."""
    for picture in draw(name).pictures:
        figure = picture.figure
        assert figure["data"] and all("type" in trace for trace in figure["data"]), f"{picture.title}: no traces"
        assert isinstance(figure["layout"], dict), f"{picture.title}: no layout"
        text = json.dumps(figure, allow_nan=False)
        assert json.loads(text) == json.loads(json.dumps(json.loads(text)))


@CONTRACT.check
def leaves_what_it_is_given(name: str) -> None:
    """Arrays are not changed, and drawn again the pictures are the same."""
    given = artefacts(name)
    first = CONTRACT.registry.create(name, given)
    for key, value in artefacts(name).items():
        assert np.array_equal(given[key], value), f"{key} is changed"
    assert json.dumps(first, default=str) == json.dumps(draw(name), default=str), "drawn again it differs"


common.add(CONTRACT, example=False, signature=False)
