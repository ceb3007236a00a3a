"""Names for things: one registry a family, from which recipes, the command line and the docs are served.

A registry maps a name to a factory (a class or a function). The factory's signature is the list of options with
their types and defaults, its docstring is the help: a new variant is one decorated definition, and it appears in
``create``, in recipes and in ``hypersphere list`` by itself. Packages that register members are imported when a name
is first looked up, so that a new member is a new file and nobody imports what is not needed.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Generic, TypeVar, get_type_hints
from weakref import WeakSet, WeakValueDictionary

from hypersphere.errors import ArgumentError, HypersphereError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class UnknownNameError(HypersphereError, LookupError):
    """A name that is not in the registry."""

    def __str__(self) -> str:
        return str(self.args[0])  # LookupError would quote the message


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word closest in spelling, or ``None`` where nothing is close.

    Example:
        >>> nearest("arcfase", ["softmax", "arcface"])
        'arcface'
    """
    found = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.5)
    return found[0] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` or an empty string."""
    match = nearest(word, known)
    return f" Did you mean {match!r}?" if match else ""


@dataclass(frozen=True)
class Option:
    """One option of a registered factory."""

    name: str
    annotation: Any
    default: Any  # inspect.Parameter.empty where the option must be given
    help: str

    @property
    def required(self) -> bool:
        """Whether the option has no default."""
        return self.default is inspect.Parameter.empty

    def __str__(self) -> str:
        return self.name if self.required else f"{self.name}={self.default!r}"


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A registered factory with its help and its options (read off its signature and docstring)."""

    name: str
    factory: Callable[..., T]
    aliases: tuple[str, ...]
    positional: tuple[str, ...]  # arguments that the caller supplies, not the user's options
    option_aliases: Mapping[str, str] = field(default_factory=dict)
    module: str = ""  # whose import registered it

    @property
    def help(self) -> str:
        """First line of the factory's docstring."""
        return (inspect.getdoc(self.factory) or "").split("\n", 1)[0]

    @property
    def options(self) -> tuple[Option, ...]:
        """The options a user may set, in the order of the signature."""
        own = _options(self.factory, self.positional)
        names = {option.name for option in own}
        shared = getattr(self.factory, "shared_options", ())
        # A class that passes **options on takes the shared options of the class that defines them, too.
        for parent in getattr(self.factory, "__mro__", ())[1:]:
            if "shared_options" in vars(parent):
                own += tuple(o for o in _options(parent, self.positional) if o.name in shared and o.name not in names)
        return own

    @property
    def later(self) -> dict[str, Any]:
        """Options that came after results had been recorded, with what the absence of each means.

        A factory says so in ``later_options`` beside its signature; a class adds to those of its parents. Recipes in
        which such an option has this value have the hash that they had before.
        """
        owners = reversed(getattr(self.factory, "__mro__", (self.factory,)))
        return {key: value for owner in owners for key, value in vars(owner).get("later_options", {}).items()}

    @property
    def renamed(self) -> dict[str, str]:
        """Options that had another name when results were recorded: the old name and the one of today.

        A factory says so in ``renamed_options`` beside its signature. Recipes may have either name, and their hash is
        that of the old one.
        """
        return dict(getattr(self.factory, "renamed_options", {}))

    def check(self, options: Iterable[str], *, called: bool = False) -> None:
        """Raise :class:`ArgumentError` for the first option that the factory does not take.

        Args:
            options: Names of options.
            called: Whether the arguments that the calling code supplies may be among them.
        """
        known = [*(self.positional if called else ()), *(option.name for option in self.options)]
        for option in options:
            if option not in known:
                allowed = f"allowed: {', '.join(known)}" if known else "it has no options"
                words = [*known, *(alias for alias, own in self.option_aliases.items() if own in known)]
                raise ArgumentError(
                    option, f"is not an option of {self.name!r}.{did_you_mean(option, words)} ({allowed})"
                )


class Registry(Generic[T]):
    """Factories of one family by name.

    Hyphens, underscores, spaces and case do not matter in names.

    Args:
        family: What the entries are called, in the singular (``"loss"``).
        positional: Names of the arguments that the calling code supplies, which are no options.
        option_aliases: Other names of options that every entry understands.
        kind: Class that members are or return: an option annotated with it can be given by the name of a member
            (:func:`registry_of` finds the registry).
        members: Dotted packages whose modules register members, imported at the first look-up. A ``*`` stands for
            every package there: ``"hypersphere.tasks.*.models"``.

    Example:
        >>> shapes = Registry[float]("shape")
        >>> @shapes.register("unit-circle", aliases=("circle",))
        ... def circle(r: float = 1.0) -> float:
        ...     '''Length of a circle.'''
        ...     return 6.28 * r
        >>> shapes.create("Unit_Circle", r=2.0)
        12.56
        >>> shapes.create("circel")
        Traceback (most recent call last):
        hypersphere.registry.UnknownNameError: unknown shape 'circel'. Did you mean 'circle'? Known: unit-circle
    """

    def __init__(
        self,
        family: str,
        positional: tuple[str, ...] = (),
        option_aliases: Mapping[str, str] | None = None,
        *,
        kind: type[Any] | None = None,
        members: tuple[str, ...] = (),
    ) -> None:
        self.family = family
        if kind is not None and kind in _BY_KIND:
            raise ArgumentError("kind", f"{kind.__name__} already has the registry of every {_BY_KIND[kind].family}")
        self.positional = positional
        self.option_aliases = dict(option_aliases or {})
        self.kind = kind
        self.members = members
        self.module = _importing()  # that made it
        self._entries: dict[str, Entry[T]] = {}
        self._aliases: dict[str, str] = {}
        self._unread = list(members)
        self._reading = False
        _ALL.add(self)
        if kind is not None:
            _BY_KIND[kind] = self

    def _read(self) -> None:
        """Import what registers members, once; a look-up from inside sees what is there so far."""
        if self._reading or not self._unread:
            return
        self._reading = True
        try:
            while self._unread:  # one whose import fails is tried again at the next look-up
                for module in _modules(self._unread[0]):
                    importlib.import_module(module)
                del self._unread[0]
        finally:
            self._reading = False

    @staticmethod
    def _key(name: str) -> str:
        return re.sub(r"[\s_-]+", "", name.lower())

    def find(self, factory: Callable[..., Any]) -> Entry[T] | None:
        """The entry that a factory was registered as, if it was."""
        self._read()
        return next((entry for entry in self._entries.values() if entry.factory is factory), None)

    def register(self, name: str, *, aliases: tuple[str, ...] = ()) -> Callable[[F], F]:
        """Decorator that adds a factory under ``name`` and ``aliases``."""

        def add(factory: F) -> F:
            names = [n.lower().replace("_", "-") for n in (name, *aliases)]
            module = _importing()
            if module.partition(".")[0] not in {package.partition(".")[0] for package in self.members}:
                self._read()  # a name that is taken is refused here, and not when the members are read
            for word in names:
                if self._key(word) in self._aliases:
                    raise ArgumentError("name", f"{word!r} is already a registered {self.family}")
            self._entries[names[0]] = Entry(
                names[0], factory, tuple(names[1:]), self.positional, self.option_aliases, module
            )
            self._aliases.update(dict.fromkeys(map(self._key, names), names[0]))
            return factory

        return add

    def entries(self) -> tuple[Entry[T], ...]:
        """Members registered so far; imports nothing."""
        return tuple(self._entries.values())

    def remove(self, name: str) -> None:
        """Take a member out, with its aliases.

        Example:
            >>> shapes = Registry[float]("shape")
            >>> _ = shapes.register("circle", aliases=("round",))(float)
            >>> shapes.remove("circle")
            >>> "round" in shapes
            False
        """
        entry = self[name]
        del self._entries[entry.name]
        self._aliases = {key: own for key, own in self._aliases.items() if own != entry.name}

    def __getitem__(self, name: str) -> Entry[T]:
        if name not in self:
            known = ", ".join(self) or "none yet"
            words = [word for entry in self._entries.values() for word in (entry.name, *entry.aliases)]
            hint = did_you_mean(str(name).lower().replace("_", "-"), words)
            raise UnknownNameError(f"unknown {self.family} {name!r}.{hint} Known: {known}")
        return self._entries[self._aliases[self._key(name)]]

    def __contains__(self, name: object) -> bool:
        self._read()
        return isinstance(name, str) and self._key(name) in self._aliases

    def __iter__(self) -> Iterator[str]:
        self._read()
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        self._read()
        return len(self._entries)

    def canonical(self, options: Mapping[str, Any], entry: Entry[T] | None = None) -> dict[str, Any]:
        """Options under their own names, those of today of an entry."""
        aliases = self.option_aliases | (entry.renamed if entry is not None else {})
        found: dict[str, Any] = {}
        for given, value in options.items():
            option = aliases.get(given, given)
            if option in found:
                other = next(name for name, own in aliases.items() if own == option)
                raise ArgumentError(other, f"is another name of {option!r}: give one of them")
            found[option] = value
        return found

    def create(self, name: str, *args: Any, **options: Any) -> T:
        """Build the entry called ``name``; ``args`` are the family's positional arguments."""
        entry = self[name]
        options = self.canonical(options, entry)
        entry.check(option for option in options if option not in self.positional)
        return entry.factory(*args, **options)

    def resolve(self, given: str | Mapping[str, Any] | T, **options: Any) -> T:
        """A member given by its name, as a mapping of its name and options, or as it is.

        Example:
            >>> shapes = Registry[float]("shape")
            >>> _ = shapes.register("square")(lambda side=1.0: side**2)
            >>> shapes.resolve("square"), shapes.resolve({"name": "square", "side": 3.0}), shapes.resolve(2.0)
            (1.0, 9.0, 2.0)
        """
        if isinstance(given, Mapping):
            if "name" not in given:
                raise ArgumentError("name", f"must be given: the name of the {self.family}, got {dict(given)}")
            return self.create(**given, **options)
        if isinstance(given, self.kind or object) and not isinstance(given, str):
            return given
        return self.create(typing.cast(str, given), **options)


class Member(type):
    """The class of the families' base classes: a member built with an unknown option answers with all that there are.

    Example:
        >>> class Shape(metaclass=Member): ...
        >>> shapes = Registry[Shape]("shape", kind=Shape)
        >>> @shapes.register("square")
        ... class Square(Shape):
        ...     def __init__(self, side: float = 1.0) -> None: ...
        >>> Square(radius=2.0)
        Traceback (most recent call last):
        hypersphere.errors.ArgumentError: radius is not an option of 'square'. (allowed: side)
    """

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Build a member."""
        try:
            return super().__call__(*args, **options)
        except TypeError:
            refusal = _refusal(cls, options)
            if refusal is None:
                raise
            raise refusal from None

    @property
    def __signature__(cls) -> inspect.Signature:
        """That of ``__init__``, for help and editors, which would see the one above."""
        start = next(vars(kind)["__init__"] for kind in cls.__mro__ if "__init__" in vars(kind))
        signature = inspect.signature(start)
        return signature.replace(parameters=list(signature.parameters.values())[1:], return_annotation=cls)


def _refusal(factory: Callable[..., Any], options: Iterable[str]) -> ArgumentError | None:
    """What is wrong with the names of options, if something is, by the entry of a factory that is registered."""
    for entry in (entry for registry in _ALL for entry in registry.entries() if entry.factory is factory):
        try:
            entry.check(options, called=True)
        except ArgumentError as error:
            return error
    return None


_ALL: WeakSet[Registry[Any]] = WeakSet()
_BY_KIND: WeakValueDictionary[type[Any], Registry[Any]] = WeakValueDictionary()


def registries() -> list[Registry[Any]]:
    """Every registry of the process, by family."""
    return sorted(_ALL, key=lambda registry: registry.family)


def registry_of(kind: Any) -> Registry[Any] | None:
    """The registry whose members are, or return, a ``kind``; ``None`` where there is none.

    Example:
        >>> class Shape: ...
        >>> shapes = Registry[Shape]("shape", kind=Shape)
        >>> registry_of(Shape) is shapes, registry_of(float)
        (True, None)
    """
    return _BY_KIND.get(kind) if isinstance(kind, type) else None


def _importing() -> str:
    """The module whose code runs at its top level now, however many functions it went through."""
    frame = sys._getframe(1)
    while frame.f_code.co_name != "<module>" and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


def _modules(package: str) -> Iterator[str]:
    """Names of a package and of the modules right inside it; with ``a.*.b``, ``b`` of every package of ``a``."""
    before, star, after = package.partition(".*.")
    if star:
        path = importlib.import_module(before).__path__
        found = (f"{before}.{found.name}.{after}" for found in pkgutil.iter_modules(path) if found.ispkg)
        yield from (name for name in found if find_spec(name))
        return
    yield package
    path = getattr(importlib.import_module(package), "__path__", [])
    yield from (f"{package}.{found.name}" for found in pkgutil.iter_modules(path))


def _hints(factory: Callable[..., Any]) -> dict[str, Any]:
    """Types of a factory's arguments, each resolved in the module of the class that wrote it down."""
    if not inspect.isclass(factory):
        return get_type_hints(factory, include_extras=True)
    owner = next(kind for kind in factory.__mro__ if "__init__" in vars(kind))
    start = vars(owner)["__init__"]
    names = set(inspect.signature(start).parameters) - {"self"}
    # The __init__ that a dataclass writes has the annotations of inherited fields as texts, but not their modules.
    if names <= vars(owner).get("__dataclass_fields__", {}).keys() and names:
        return get_type_hints(owner, include_extras=True)
    return get_type_hints(start, include_extras=True)


def _options(factory: Callable[..., Any], hidden: tuple[str, ...]) -> tuple[Option, ...]:
    """The options in a factory's own signature."""
    target = factory.__init__ if inspect.isclass(factory) else factory
    hints = _hints(factory)
    texts: dict[str, str] = {}
    # A class inherits the help of its parents' arguments, of which a dataclass takes all.
    for owner in reversed(factory.__mro__) if inspect.isclass(factory) else (factory,):
        texts |= _argument_help(inspect.cleandoc(owner.__doc__ or ""))
    return tuple(
        Option(p.name, hints.get(p.name, Any), p.default, texts.get(p.name, ""))
        for p in list(inspect.signature(target).parameters.values())[inspect.isclass(factory) :]
        if p.name not in hidden and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    )


def _argument_help(doc: str) -> dict[str, str]:
    """The texts of a Google-style ``Args:`` section by argument."""
    section = re.search(r"^Args:\n((?:(?: +.*)?\n?)*)", doc, re.MULTILINE)
    if not section:
        return {}
    found = re.findall(r"^ {4}(\w+)(?: \([^)]*\))?: ((?:.*)(?:\n {8}.*)*)", section[1], re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).strip() for name, text in found}
