"""Recipes as YAML text."""

from __future__ import annotations

import re
from collections.abc import Collection

import yaml

_SPELLINGS = (("iz", "is"), ("color", "colour"), ("center", "centre"))


class Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-3 as a number, as people mean it."""


class Dumper(yaml.SafeDumper):
    """Quotes the texts that the loader would read as numbers."""


for _class in (Loader, Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d+)([eE][-+]?\d+)$"),
        list("-+0123456789."),
    )


def key_of(text: str) -> str | int:
    """A key of a section, or an index of a list."""
    return int(text) if text.isdecimal() else text


def british(word: str) -> str:
    """A word in British spelling, where it is one that has two.

    Example:
        >>> british("optimizer"), british("normalize")
        ('optimiser', 'normalise')
    """
    for american, own in _SPELLINGS:
        word = word.replace(american, own)
    return word


def known(word: str, words: Collection[str]) -> str:
    """``word``, or its British spelling where that alone is one of ``words``."""
    return british(word) if word not in words and british(word) in words else word
