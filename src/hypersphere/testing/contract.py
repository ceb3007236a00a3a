"""What a contract is: the checks that every member of a family passes, built-in or in a user's own file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import TracebackType
from typing import Any

from hypersphere.registry import Entry, Registry, UnknownNameError, did_you_mean

Check = Callable[[str], None]
"""A function of a member's name that raises where the member breaks its contract."""


@dataclass
class Contract:
    """The checks of one family.

    Args:
        family: What a member is called, in the singular, as its registry says.
        plural: What ``hypersphere list`` calls the family.
        place: Where the registry is: ``"package.module:name"``.
        checks: In the order in which they are run: what is particular to the family first.

    Example:
        >>> from hypersphere import testing
        >>> testing.contract("margins").family
        'margin'
    """

    family: str
    plural: str
    place: str
    checks: list[Check] = field(default_factory=list)

    @property
    def registry(self) -> Registry[Any]:
        """The family's registry, imported now."""
        module, _, name = self.place.partition(":")
        found: Registry[Any] = getattr(import_module(module), name)
        return found

    def entry(self, name: str) -> Entry[Any]:
        """A member's entry."""
        return self.registry[name]

    def check(self, function: Check) -> Check:
        """Decorator that adds a check; its first line of help says what a member promises."""
        self.checks.append(function)
        return function

    def run(self, name: str) -> None:
        """All checks of a member, to the first that fails; the error says which it was."""
        for check in self.checks:
            with _Named(self.family, name, check):
                check(name)

    def cases(self) -> list[tuple[str, Check]]:
        """Every member with every check."""
        return [(name, check) for name in self.registry for check in self.checks]

    def fact(self, name: str, key: str, default: Any = None) -> Any:
        """What a member says about itself, in a mapping ``contract`` that is an attribute of it."""
        facts: Mapping[str, Any] = getattr(self.entry(name).factory, "contract", {})
        return facts.get(key, default)


class _Named:
    """Adds to an error which check of which member it comes from."""

    def __init__(self, family: str, name: str, check: Check) -> None:
        self.text = f"{family} {name!r} breaks its contract: {check.__name__}: {(check.__doc__ or '').strip()}"

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            error.add_note(self.text)


def find(contracts: Mapping[str, Contract], family: str) -> Contract:
    """The contract of a family by its singular or plural name."""
    for contract in contracts.values():
        if _letters(family) in (_letters(contract.family), _letters(contract.plural)):
            return contract
    known = [contract.plural for contract in contracts.values()]
    raise UnknownNameError(f"unknown family {family!r}.{did_you_mean(family, known)} Known: {', '.join(known)}")


def _letters(name: str) -> str:
    """A name without what does not matter in it."""
    return re.sub(r"[\s_-]+", "", name.lower())


def options(contract: Contract, name: str) -> dict[str, Any]:
    """Options to build a member with: those that it declares to be tried; by default none.

    A member that cannot be built without says so: ``contract = {"options": {"path": "somewhere"}}``.
    """
    return dict(contract.fact(name, "options", {}))


def variants(contract: Contract, name: str) -> Iterator[dict[str, Any]]:
    """The options of :func:`options`, and those of every member of ``variants`` that the member declares."""
    base = options(contract, name)
    yield base
    for more in contract.fact(name, "variants", ()):
        yield {**base, **more}
