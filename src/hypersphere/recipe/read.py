"""Recipes from files and names: inheritance, overrides, and the line of every key."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from hypersphere import plugins as plugin_files
from hypersphere.recipe.explain import Location, RecipeError, describe, type_at
from hypersphere.recipe.part import Part
from hypersphere.recipe.resolve import check
from hypersphere.recipe.schema import Recipe, recipe_type
from hypersphere.recipe.text import Loader, key_of, known
from hypersphere.registry import did_you_mean


def load(source: str | Path, overrides: Sequence[str] = (), *, plugins: bool = True) -> Recipe:
    """Read a recipe by name (``hypersphere list recipes``) or from a file and apply ``key=value`` overrides.

    A file may start from another recipe with ``base: NAME_OR_PATH``.

    Args:
        source: Name of an embedded recipe or path of a YAML file.
        overrides: Strings like ``"loss.m=0.3"`` or ``"data.augment.flip=true"``; values are YAML.
        plugins: Load the plugins that it names, files by their path from the recipe's folder. What a recipe that was
            resolved says of plugins is a record, by which nothing is ever loaded.

    Example:
        >>> load("digits-arcface", ["loss.m=0.3"]).loss.options["m"]
        0.3
    """
    content, places = _read(source, ())
    for override in overrides:
        _apply(override, content, places)
    if plugins:
        _load_plugins(content, places)
    try:
        return check(content, places)
    except RecipeError as error:
        raise RecipeError("\n".join([str(error), *_missing_plugins(content)])) from None


def _load_plugins(content: dict[str, Any], places: dict[Location, str]) -> None:
    """Load the plugins that a recipe names, and write down which they were."""
    named = content.get("plugins")
    for index, plugin in enumerate(named if isinstance(named, list) else ()):
        if isinstance(plugin, str):
            try:
                found = plugin_files.load(plugin)
            except plugin_files.PluginError as error:
                raise RecipeError(describe(places, ("plugins", index), str(error))) from error
            content["plugins"][index] = {"name": found.name, "path": str(found.path), "digest": found.digest}


def _missing_plugins(content: dict[str, Any]) -> Iterator[str]:
    """Hints at plugins with which a recipe was resolved and that are not loaded."""
    here = {plugin.digest for plugin in plugin_files.loaded()}
    named = content.get("plugins")
    for plugin in named if isinstance(named, list) else ():
        if isinstance(plugin, dict) and plugin.get("digest") not in here:
            yield (
                f"the recipe was resolved with the plugin {plugin.get('name')!r}, which is not loaded: name it with "
                f"--plugin {plugin.get('path')}"
            )


def names() -> list[str]:
    """Names of the recipes that come with the package, none of which is read.

    Example:
        >>> "digits-softmax" in names()
        True
    """
    return [*_files()]


def embedded() -> dict[str, str]:
    """Names of the recipes that come with the package, with their help."""
    return {name: load(name).help for name in _files()}


def _files(members: tuple[str, ...] = ("hypersphere.recipes", "hypersphere.tasks")) -> dict[str, Path]:
    """Files of the recipes that come with the package by name: of these packages, and of the tasks inside them."""
    roots = [Path(root) for member in members for root in import_module(member).__path__]
    files = [file for root in roots for pattern in ("*.yaml", "*/recipes/*.yaml") for file in root.glob(pattern)]
    return {file.stem: file for file in sorted(files, key=lambda file: file.stem)}


def _read(source: str | Path, seen: tuple[str, ...], where: str = "") -> tuple[dict[str, Any], dict[Location, str]]:
    """Content and places of a recipe file merged over its base; ``where`` is the place that names the file."""
    title, text = _find(source, where)
    if title in seen:
        raise RecipeError(f"{title}: recipes inherit in a circle: {' -> '.join((*seen, title))}")
    try:
        node = yaml.compose(text, Loader=Loader)
        content = {} if node is None else yaml.load(text, Loader=Loader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise RecipeError(f"{title}{line}: not valid YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(content, dict):
        raise RecipeError(f"{title}: a recipe is a mapping of keys to values, got {type(content).__name__}")
    places = {_spelled_place(place): line for place, line in _lines(node, (), title)} if node else {}
    content = _spelled(content, recipe_type(), title)
    if "plugins" in content:
        content["plugins"] = _from_folder(content["plugins"], Path(source).parent)
    base = content.pop("base", None)
    if base is None:
        return content, places
    relative = Path(os.path.normpath(Path(source).parent / str(base)))
    where = f"{places['base',]}: base: "
    parent, parent_places = _read(relative if relative.is_file() else str(base), (*seen, title), where)
    merged = _merge(parent, content)
    if isinstance(parent.get("plugins"), list) and isinstance(content.get("plugins"), list):
        merged["plugins"] = [*parent["plugins"], *content["plugins"]]  # what is inherited needs its own, too
    return merged, parent_places | places


def _from_folder(plugins: Any, folder: Path) -> Any:
    """Plugins of a recipe, files by their path from where we are and not from the recipe's folder."""
    plugins = [plugins] if isinstance(plugins, str) else plugins
    if not isinstance(plugins, list):
        return plugins  # which is a mistake
    files = [isinstance(one, str) and (one.endswith(".py") or "/" in one) for one in plugins]
    return [os.path.normpath(folder / one) if file else one for one, file in zip(plugins, files, strict=True)]


def _spelled(content: Any, kind: type[BaseModel] | None, title: str) -> Any:
    """Content of a section with keys in the spelling that they have here."""
    if isinstance(content, list):
        return [_spelled(item, kind, title) for item in content]
    if not isinstance(content, dict) or kind is None:
        return content
    found: dict[Any, Any] = {}
    for key, value in content.items():
        own = known(key, kind.model_fields) if isinstance(key, str) else key
        if own in found or (own != key and own in content):
            raise RecipeError(f"{title}: {key} is another spelling of {own!r}: give one of them")
        found[own] = _spelled(value, type_at(kind, (own,)), title)
    return found


def _spelled_place(location: Location) -> Location:
    """A place in a recipe with keys in the spelling that they have here."""
    found: Location = ()
    kind: type[BaseModel] | None = recipe_type()
    for key in location:
        own = known(key, kind.model_fields) if isinstance(key, str) and kind else key
        kind = type_at(kind, (own,)) if kind else None
        found = (*found, own)
    return found


def _find(source: str | Path, where: str) -> tuple[str, str]:
    """Title and text of a recipe."""
    path = Path(source)
    if path.is_file():
        try:
            return str(path), path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{where}{path} cannot be read as text: {error}") from error
    files = _files()
    if str(source) in files:
        return f"recipe {source}", files[str(source)].read_text(encoding="utf-8")
    hint = did_you_mean(str(source), files)
    raise RecipeError(f"{where}no recipe file or embedded recipe {str(source)!r}.{hint} Embedded: {', '.join(files)}")


def _lines(node: yaml.Node, location: Location, title: str) -> Iterable[tuple[Location, str]]:
    """The line of every key; a key given twice is an error, which YAML would let pass."""
    if isinstance(node, yaml.MappingNode):
        seen: dict[Hashable, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            place = (*location, key_of(key.value))
            if key.value in seen:
                path = ".".join(map(str, place))
                raise RecipeError(f"{title}, line {line}: {path} is given twice, first on line {seen[key.value]}")
            seen[key.value] = line
            yield place, f"{title}, line {line}"
            yield from _lines(value, place, title)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*location, index), f"{title}, line {value.start_mark.line + 1}"
            yield from _lines(value, (*location, index), title)


def _merge(base: dict[str, Any], over: dict[str, Any], location: Location = ()) -> dict[str, Any]:
    """``over`` on top of ``base``, section by section."""
    merged = dict(base)
    for key, value in over.items():
        old, place = merged.get(key), (*location, key)
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _merge(_renamed(old, value.get("name"), place), value, place)
        else:
            merged[key] = value
    return merged


def _renamed(section: dict[str, Any], name: Any, location: Location) -> dict[str, Any]:
    """``section`` for a part called ``name``: of the old one it keeps the section's own keys, not the options.

    But those options stay, too, that mean the same for both.
    """
    if name is None or name == section.get("name"):
        return section
    kind = type_at(recipe_type(), location)
    own = set(kind.model_fields) if kind else set()
    if kind and issubclass(kind, Part) and isinstance(name, str):
        own |= kind.kept(name)
    return {key: value for key, value in section.items() if key in own}


def _parsed(override: str) -> tuple[tuple[Any, ...], Any]:
    """Keys and value of one ``key.key=value``."""
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise RecipeError(f"override {override!r}: write key=value, for example loss.m=0.3")
    try:
        value = yaml.load(text, Loader=Loader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as error:
        raise RecipeError(f"override {override!r}: {getattr(error, 'problem', error)}") from None
    keys = _spelled_place(tuple(map(key_of, path.split("."))))
    value = _spelled(value, type_at(recipe_type(), keys), f"override {override!r}")
    return keys, _from_folder(value, Path()) if keys == ("plugins",) else value


def _apply(override: str, content: dict[str, Any], places: dict[Location, str]) -> None:
    """Put one ``key.key=value`` into the content."""
    keys, value = _parsed(override)
    target: Any = content
    for depth, key in enumerate(keys):
        above = ".".join(map(str, keys[:depth]))
        if not isinstance(target, dict | list):
            raise RecipeError(f"override {override!r}: {above} is a value, not a section")
        if isinstance(target, list) and not (isinstance(key, int) and key < len(target)):
            raise RecipeError(f"override {override!r}: {above} is a list of {len(target)}, got the index {key!r}")
        if depth < len(keys) - 1:
            if isinstance(target, dict) and target.get(key) is None:
                target[key] = {}  # a section that is not there, or off
            target = target[key]
    last = keys[-1]
    if last == "name" and len(keys) > 1 and isinstance(target, dict):
        # What another override gave stays, whichever of the two comes first.
        given = {place[len(keys) - 1] for place, text in places.items() if _under(place, keys[:-1], text)}
        kept = _renamed(target, value, keys[:-1]) | {key: old for key, old in target.items() if key in given}
        target.clear()
        target.update(kept)
    target[last] = value
    for place in [place for place in places if place[: len(keys)] == keys]:
        del places[place]
    places[keys] = f"override {override!r}"


def _under(place: Location, section: Location, text: str) -> bool:
    """Whether ``place`` is a key of ``section`` that an override gave."""
    return len(place) > len(section) and place[: len(section)] == section and text.startswith("override ")
