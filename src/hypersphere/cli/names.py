"""The command that lists what recipes can name."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

import hypersphere
from hypersphere import plugins, recipe
from hypersphere.cli.terminal import console
from hypersphere.registry import Entry, Registry, UnknownNameError, did_you_mean, registries

NO_FAMILIES = ("__main__", "cli", "plot", "testing")
"""Modules of the package that hold no registry and need not be imported to list one."""

Row = tuple[str, str, str]


def families() -> dict[str, Registry[Any]]:
    """Every registry by what its members are called, in the plural.

    Example:
        >>> [name for name in families() if name.startswith("m")]
        ['margins', 'models']
    """
    for module in pkgutil.iter_modules(hypersphere.__path__):
        if module.name not in NO_FAMILIES:
            import_module(f"hypersphere.{module.name}")
    own = [registry for registry in registries() if registry.module.startswith("hypersphere.")]
    return {_plural(registry.family): registry for registry in own}


def _plural(word: str) -> str:
    first, of, rest = word.partition(" of ")
    if of:
        return f"{_plural(first)} of {rest}"
    noun, of, more = word.partition(" of ")
    ending = "ies" if noun.endswith("y") else "es" if noun.endswith("s") else "s"
    return f"{noun.removesuffix('y') if ending == 'ies' else noun}{ending}{of}{more}"


def _key(word: str) -> str:
    return re.sub(r"[\s_-]+", "", word.lower())


def find_family(word: str, known: Iterable[str]) -> str:
    """The family that a word means: its name in the singular or plural, or one word of it that no other has.

    Example:
        >>> known = ["orthogonal maps", "losses", "data sets"]
        >>> find_family("map", known), find_family("Orthogonal", known), find_family("datasets", known)
        ('orthogonal maps', 'orthogonal maps', 'data sets')
        >>> find_family("loses", known)
        Traceback (most recent call last):
        hypersphere.registry.UnknownNameError: unknown family 'loses'. Did you mean 'losses'? Known: ...
    """
    known = list(known)
    forms = {_key(word), _key(_plural(word))}
    for parts in ([(name,) for name in known], [name.split() for name in known]):
        found = [
            name
            for name, words in zip(known, parts, strict=True)
            if forms & {form for part in words for form in (_key(part), _key(_plural(part)))}
        ]
        if len(found) == 1:
            return found[0]
    raise UnknownNameError(f"unknown family {word!r}.{did_you_mean(word, known)} Known: {', '.join(known)}")


def list_entries(
    family: Annotated[
        str | None, typer.Argument(help="losses, margins, energies, recipes, settings, ...; all by default")
    ] = None,
) -> None:
    """List what recipes can name, with the defaults and a line of help for each."""
    tables: dict[str, Callable[[], Iterator[Row]]] = {
        name: partial(_members, registry) for name, registry in families().items()
    }
    tables |= {"settings": _settings, "recipes": _recipes}
    for name in tables if family is None else [find_family(family, tables)]:
        grid = Table(title=name, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2))
        grid.add_column("name", style="cyan", no_wrap=True)
        grid.add_column("options and defaults", style="dim", ratio=2)
        grid.add_column("what it is", ratio=3)
        for row in tables[name]():
            grid.add_row(*row)
        console.print(grid)
        console.print()


def _recipes() -> Iterator[Row]:
    yield from ((name, "", escape(text)) for name, text in recipe.embedded().items())


def _settings() -> Iterator[Row]:
    yield from ((key, escape(default), escape(text)) for key, default, text in recipe.settings())


def _members(registry: Registry[Any]) -> Iterator[Row]:
    """Name, options and help of every member of a family."""
    entries = [registry[name] for name in registry]
    if not entries:
        yield "none yet", "", ""
        return
    # Shared options are listed once, with the defaults of the class that defines them, or of all where all agree.
    sharing = [entry for entry in entries if vars(entry.factory).get("shared_options")]
    shared = {str(o) for e in sharing for o in e.options if o.name in e.factory.shared_options}  # type: ignore[attr-defined]
    if not sharing and len(entries) > 2:
        shared = set.intersection(*({str(option) for option in entry.options} for entry in entries))
    without = []
    for entry in entries:
        takes = not sharing or bool(getattr(entry.factory, "shared_options", ()))
        own = [str(option) for option in entry.options if not (takes and str(option) in shared)]
        without += [] if takes else [entry.name]
        yield entry.name, escape(", ".join(own)), escape(_plain(entry.help)) + _notes(registry, entry)
    if shared:
        those = [str(option) for option in (sharing or entries)[0].options if str(option) in shared]
        but = f" (but {', '.join(without)})" if without else ""
        yield "any of these", escape(", ".join(those)), f"what every one of them takes, too{but}"


def _notes(registry: Registry[Any], entry: Entry[Any]) -> str:
    """Other names of a member, and the plugin that brought it."""
    notes = [f"also {', '.join(entry.aliases)}"] if entry.aliases else []
    plugin = plugins.plugin_of(registry, entry.name)
    notes += [f"plugin {plugin.name}"] if plugin else []
    return f" [dim]({escape('; '.join(notes))})[/]" if notes else ""


def _plain(text: str) -> str:
    """A docstring's line without the markup of its formulas."""
    words = re.sub(r":math:`([^`]*)`", r"\1", text).replace("``", "").replace(r"\|", "|").replace(r"\,", " ")
    return re.sub(r"\\mathrm|[{}]", "", re.sub(r"(?<=[A-Za-z0-9])\\", " ", words)).replace("\\", "")
