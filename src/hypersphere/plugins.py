"""Plugins: a user's own file, module or installed package that registers members of any family.

A plugin is ordinary Python that decorates its definitions with the ``register`` of a family
(``hs.margins.margins.register("mine")``). It is loaded by name (``--plugin FILE.py``, ``plugins:`` in a recipe) or
found as an entry point of the group ``hypersphere.plugins``. One that fails leaves nothing registered.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from hypersphere.errors import HypersphereError
from hypersphere.registry import Entry, Registry, did_you_mean, registries

GROUP = "hypersphere.plugins"
"""Group of the entry points under which installed packages bring plugins."""


class PluginError(HypersphereError):
    """A plugin that is not there or that fails; the message names its file and line."""


@dataclass(frozen=True)
class Plugin:
    """A loaded plugin.

    Args:
        name: Name of its file, module or entry point.
        path: File that was run, or folder of the package.
        digest: SHA-256 of its source.
        members: Family and name of everything that it registered.
    """

    name: str
    path: Path
    digest: str
    members: tuple[tuple[str, str], ...] = ()

    def record(self) -> dict[str, Any]:
        """What a run keeps of it: name, path, digest and members, as JSON.

        Example:
            >>> Plugin("mine", Path("mine.py"), "ab12", (("margin", "cubic"),)).record()["members"]
            [['margin', 'cubic']]
        """
        return asdict(self) | {"path": str(self.path), "members": [list(member) for member in self.members]}


_loaded: dict[str, Plugin] = {}  # by digest: a copy of a file brings the same members
_named: dict[str, str] = {}  # digests by what was asked for
_failed: set[str] = set()  # installed plugins about which a warning was given


def loaded() -> tuple[Plugin, ...]:
    """The plugins of this process, in the order in which they were loaded."""
    return tuple(_loaded.values())


def plugin_of(registry: Registry[Any], name: str) -> Plugin | None:
    """The plugin that registered a member, or ``None`` for one of the package's own."""
    member = (registry.family, registry[name].name)
    return next((plugin for plugin in loaded() if member in plugin.members), None)


def load(spec: str | Path) -> Plugin:
    """Load a plugin, once a process: a file ``NAME.py``, an installed plugin's name, or a module.

    Args:
        spec: Path of a file, name of an entry point of the group ``hypersphere.plugins``, or dotted module.

    Example:
        >>> load("nowhere.py")
        Traceback (most recent call last):
        hypersphere.plugins.PluginError: plugin 'nowhere.py': there is no such file
    """
    if isinstance(spec, Path) or spec.endswith(".py") or "/" in spec:
        return _load_file(Path(spec))
    installed = {point.name: point for point in entry_points(group=GROUP)}
    if spec in installed:
        return _load_module(spec, installed[spec].module)
    if spec not in _named and not _exists(spec):
        known = f" Installed plugins: {', '.join(sorted(installed))}." if installed else ""
        raise PluginError(
            f"plugin {spec!r}: there is no installed plugin or module of this name.{did_you_mean(spec, installed)}"
            f"{known} A file is given by its path, such as ./{spec}.py"
        )
    return _load_module(spec, spec)


def load_installed() -> tuple[Plugin, ...]:
    """Load every plugin that an installed package brings as an entry point of the group ``hypersphere.plugins``.

    Nobody named them, so one that fails is left out with a warning, once a process.
    """
    found = []
    for point in entry_points(group=GROUP):
        if point.name in _failed:
            continue
        try:
            found.append(load(point.name))
        except PluginError as error:
            _failed.add(point.name)
            warnings.warn(f"the installed plugin {point.name!r} is left out: {error}", stacklevel=2)
    return tuple(found)


def _exists(module: str) -> bool:
    """Whether there is a module; its parents are imported."""
    parent = module.rpartition(".")[0]
    return all(map(str.isidentifier, module.split("."))) and (
        (not parent or _exists(parent)) and find_spec(module) is not None
    )


def _load_file(path: Path) -> Plugin:
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        raise PluginError(f"plugin {str(path)!r}: there is no such file") from None
    path = path.resolve()
    key = str(path)
    digest = hashlib.sha256(source).hexdigest()
    if key in _named and _named[key] != digest:
        raise PluginError(f"plugin {key!r} has changed since it was loaded: start a new process")
    if digest in _loaded:
        return _loaded[digest]
    name = f"hypersphere_plugin_{path.stem}_{digest[:8]}"
    spec = spec_from_file_location(name, path)
    if spec is None:
        raise PluginError(f"plugin {key!r}: must be a file NAME.py")
    module = module_from_spec(spec)

    def run() -> None:
        sys.modules[name] = module  # dataclasses and pickle look there
        exec(compile(source, key, "exec"), vars(module))  # noqa: S102 - the file that the user named

    return _commit(Plugin(path.stem, path, digest), key, name, run)


def _load_module(name: str, module: str) -> Plugin:
    if name in _named:
        return _loaded[_named[name]]
    path, digest = _source(module)
    if digest in _loaded:
        return _loaded[digest]

    return _commit(Plugin(name, path, digest), name, module, lambda: importlib.import_module(module))


def _source(module: str) -> tuple[Path, str]:
    """Place of a module and the digest of its file, or of all files of its package."""
    spec = find_spec(module) if _exists(module) else None
    if spec is None or spec.origin is None:
        raise PluginError(f"plugin module {module!r} has no source file")
    file = Path(spec.origin)
    if not spec.submodule_search_locations:
        return file, hashlib.sha256(file.read_bytes()).hexdigest()
    folder = file.parent
    parts = ((str(one.relative_to(folder)), one.read_bytes()) for one in sorted(folder.rglob("*.py")))
    lines = (f"{hashlib.sha256(text).hexdigest()}  {name}\n" for name, text in parts)
    return folder, hashlib.sha256("".join(lines).encode()).hexdigest()


def _commit(plugin: Plugin, key: str, module: str, run: Callable[[], object]) -> Plugin:
    """Run a plugin and note what it registered, all or nothing."""
    before = {registry: {entry.name for entry in registry.entries()} for registry in registries()}
    with _undone(before, plugin, module):
        run()
    members = tuple((registry.family, entry.name) for registry, entry in _new(before))
    _loaded[plugin.digest] = replace(plugin, members=members)
    _named[key] = plugin.digest
    return _loaded[plugin.digest]


def _new(before: dict[Registry[Any], set[str]]) -> Iterator[tuple[Registry[Any], Entry[Any]]]:
    """Members that are new, without those of the package itself, which it may have imported on the way."""
    for registry in registries():
        for entry in registry.entries():
            if entry.name not in before.get(registry, ()) and entry.module.partition(".")[0] != "hypersphere":
                yield registry, entry


@contextmanager
def _undone(before: dict[Registry[Any], set[str]], plugin: Plugin, module: str) -> Iterator[None]:
    """Take back what a plugin registered if it fails, and say where it did."""
    try:
        yield
    except Exception as error:
        modules = {module}
        for registry, entry in list(_new(before)):
            registry.remove(entry.name)
            modules.add(entry.module)
        for name in modules:
            sys.modules.pop(name, None)
        text = str(error) if isinstance(error, HypersphereError) else f"{type(error).__name__}: {error}"
        raise PluginError(f"plugin {_place(error, plugin.path)}: {text}") from error


def _place(error: Exception, path: Path) -> str:
    """File and line of a plugin where an error came up."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _inside(frame.filename, path)]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else str(path)


def _inside(filename: str, path: Path) -> bool:
    file = Path(filename)
    return file == path or (path.is_dir() and file.is_relative_to(path))
