"""What makes two recipes the same run: the values that they resolve to, under the version of the schema.

A key that came after results had been recorded says beside itself what its absence means (:class:`Later` in a section,
``later_options`` beside the signature of a factory). With that value it is left out, so that these results still belong
to their recipes. Any other value, a default that was changed, say, is part of the hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, RootModel
from pydantic_core import to_jsonable_python

Content = dict[str, Any]

_SHARED_BY_HEADS = {
    **{"annealer": None, "class_weights": None, "frozen": False, "gradient": "exact", "ignore_index": -100},
    **{"label_smoothing": 0.0, "path": "auto", "reduction": "mean", "sample_rate": 1.0, "sparse": False},
    **{"validate": False, "start": 0, "beyond": "clip"},
}


def _before_heads_were_one_family(counted: Content) -> Content:
    """Schema 0 had no options that all heads share."""

    def before(options: Content) -> Content:
        kept = {key: value for key, value in options.items() if (key, value) not in _SHARED_BY_HEADS.items()}
        return {key: before(value) if isinstance(value, dict) else value for key, value in kept.items()}

    return {**counted, "loss": before(counted["loss"])}


EARLIER: tuple[Callable[[Content], Content], ...] = (_before_heads_were_one_family,)
"""What a recipe was under each schema before this one, from its content under the next; the first is schema 0.

A new meaning of a key that is already there adds an entry here, by which recorded hashes are still recognised.
"""


@dataclass(frozen=True)
class Later:
    """Marks a field that came after results had been recorded, with what its absence means."""

    means: Any


class Housekeeping:
    """Marks a field that changes no result."""


def schema() -> int:
    """Version of the schema."""
    return len(EARLIER)


def content(section: BaseModel) -> Any:
    """What counts of a section, as JSON."""
    found = section.model_dump(mode="json")
    if isinstance(section, RootModel):
        return _counted(section.root, found)
    if not isinstance(found, dict):  # a name alone
        return found
    for name, field in type(section).model_fields.items():
        later = [mark for mark in field.metadata if isinstance(mark, Later)]
        if Housekeeping in field.metadata or any(found[name] == to_jsonable_python(mark.means) for mark in later):
            del found[name]
        else:
            found[name] = _counted(getattr(section, name), found[name])
    registry = getattr(section, "registry", None)
    if registry is not None and found["name"] in registry:
        for name, means in registry[found["name"]].later.items():
            if name in found and found[name] == to_jsonable_python(means):
                del found[name]
        for before, name in registry[found["name"]].renamed.items():
            if name in found:
                found[before] = found.pop(name)
    return found


def _counted(value: Any, dumped: Any) -> Any:
    """What counts of a value: of sections in it, what counts of these."""
    if isinstance(value, BaseModel):
        return content(value)
    if isinstance(value, tuple):
        return [_counted(item, shown) for item, shown in zip(value, dumped, strict=True)]
    return dumped


def digest(counted: Content, version: int) -> str:
    """Twelve hex digits of a recipe's content under a version of the schema; the first two had no number."""
    numbered = counted if version <= 1 else {"schema": version, **counted}
    return hashlib.sha256(json.dumps(numbered, sort_keys=True).encode()).hexdigest()[:12]


def digests(counted: Content) -> Iterator[str]:
    """The digest of a recipe's content under this schema, and under every one before it."""
    yield digest(counted, schema())
    for version in range(schema() - 1, -1, -1):
        counted = EARLIER[version](counted)
        yield digest(counted, version)
