"""Checks that are the same in every family: help, example, copies, the command line and recipes."""

from __future__ import annotations

import copy
import doctest
import inspect
import pickle
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor, nn

from hypersphere.testing.contract import Contract

WORKBENCH = ("pydantic", "yaml", "typer", "rich")


def add(
    contract: Contract,
    *,
    build: Callable[[str], Any] | None = None,
    recipe: Callable[[str], list[str]] | None = None,
    example: bool = True,
    signature: bool = True,
) -> None:
    """Add the checks that every family has.

    Args:
        contract: Of which family.
        build: Builds a member with its defaults, to be copied; ``None`` where members are plain functions.
        recipe: Overrides of a recipe that name a member; ``None`` where recipes name none.
        example: Whether the help of a member must end with an example.
        signature: Whether a member's options are the arguments of its factory.
    """

    @contract.check
    def has_help(name: str) -> None:
        """The first line of its help is a sentence, and every option of its own is explained and has a type."""
        entry = contract.entry(name)
        if any(
            kind.__module__.startswith("torch.nn.modules.") and kind is not nn.Module
            for kind in _kinds(entry.factory)[:2]
        ):
            return  # others wrote it
        assert re.match(r"\S.*[.)]$", entry.help), f"the help begins with {entry.help!r}, which is no sentence"
        assert not entry.help.startswith("dict("), "the help is that of a built-in type"
        own = vars(entry.factory).get("shared_options", ()) if inspect.isclass(entry.factory) else ()
        for option in entry.options if signature else ():
            assert option.annotation is not inspect.Parameter.empty, f"the option {option.name} has no type"
            assert option.help or option.name in own or _inherited(entry.factory, option.name), (
                f"the option {option.name} is not explained in 'Args:'"
            )

    if example:

        @contract.check
        def example_holds(name: str) -> None:
            """The example in its help prints what stands there."""
            run_example(contract.entry(name).factory)

    if build is not None:
        make = build

        @contract.check
        def can_be_copied(name: str) -> None:
            """A copy and a pickled one have the same state and are of the same class, and it can be printed."""
            member = make(name)
            for other in (copy.deepcopy(member), pickle.loads(pickle.dumps(member))):
                assert type(other) is type(member)
                same_state(other, member)
            assert type(member).__name__ in repr(member) or isinstance(member, nn.Module)

    @contract.check
    def is_listed(name: str) -> None:
        """``hypersphere list`` shows its name, its options and its help."""
        entry, text = contract.entry(name), listing(contract)
        assert entry.name in text, f"hypersphere list {contract.plural} does not show {entry.name}"
        for option in entry.options if signature else ():
            assert option.name in text, f"hypersphere list {contract.plural} does not show {option.name}"
        words = re.findall(r"[A-Za-z]{5,}", re.sub(r":\w+:`[^`]*`", "", entry.help))
        assert all(word in text for word in words), f"hypersphere list {contract.plural} does not show {entry.help!r}"

    if recipe is not None:
        overrides = recipe

        @contract.check
        def can_be_named_by_recipes(name: str) -> None:
            """A recipe that names it is understood, and is the same again when it is written and read."""
            resolve(overrides(contract.entry(name).name))


def _kinds(factory: Any) -> tuple[Any, ...]:
    """A factory and the classes that it extends."""
    return getattr(factory, "__mro__", (factory,))


def _inherited(factory: Any, option: str) -> bool:
    """Whether a class that a factory extends explains an option."""
    return any(re.search(rf"^\s+{option}: ", parent.__doc__ or "", re.M) for parent in _kinds(factory))


def same_state(one: Any, other: Any) -> None:
    """Raise unless two objects have the same state."""
    if isinstance(one, nn.Module):
        mine, theirs = one.state_dict(), other.state_dict()
        assert list(mine) == list(theirs), f"the copy has {list(mine)}, should have {list(theirs)}"
        for key, value in mine.items():
            if isinstance(value, Tensor):
                assert torch.equal(value.nan_to_num(), theirs[key].nan_to_num()), f"the copy differs in {key}"
    elif "__eq__" in {name for kind in type(one).__mro__[:-1] for name in vars(kind)}:
        assert one == other, f"the copy is {one}, should be {other}"


def run_example(factory: Any) -> None:
    """Run the example in the help of a factory, in which its name stands for this very factory."""
    text = inspect.getdoc(factory) or ""
    test = doctest.DocTestParser().get_doctest(text, _names(factory), factory.__name__, None, None)
    assert test.examples, "its help has no example"
    shown: list[str] = []
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    result = doctest.DocTestRunner(verbose=False, optionflags=flags).run(test, out=shown.append)
    assert not result.failed, "".join(shown)


def _names(factory: Any) -> dict[str, Any]:
    """What an example can name: what the modules of its class and of those that it extends have, and itself."""
    found: dict[str, Any] = {"torch": torch}
    for kind in reversed(_kinds(factory)):
        found |= vars(sys.modules.get(kind.__module__, torch)) if kind.__module__ != "builtins" else {}
    return {**found, factory.__name__: factory}


def needs_workbench() -> None:
    """Skip what the core cannot do without the workbench."""
    from importlib.util import find_spec

    missing = [name for name in WORKBENCH if find_spec(name) is None]
    if missing:
        raise SkipTest(f"needs the workbench, of which {', '.join(missing)} is not installed")


def listing(contract: Contract) -> str:
    """What ``hypersphere list`` prints of a family, in one line."""
    registry = contract.registry
    return _listing(contract.plural, tuple((name, registry[name].factory) for name in registry))


@lru_cache(1)  # a member that is registered later is listed, too
def _listing(plural: str, _: Any) -> str:
    needs_workbench()
    from typer.testing import CliRunner

    from hypersphere.cli.commands import app

    result = CliRunner().invoke(app, ["list", plural], env={"COLUMNS": "2000"})
    if result.exception is not None:
        raise result.exception
    return re.sub(r"\s+", " ", result.output)


def resolve(overrides: list[str]) -> None:
    """Read a recipe with these overrides, and once more from what it is written as."""
    needs_workbench()
    from hypersphere import recipe

    first = recipe.load("digits-softmax", overrides)
    assert first.hash == recipe.load("digits-softmax", overrides).hash
