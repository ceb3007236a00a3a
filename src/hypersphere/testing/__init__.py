"""Contracts: what every member of a family promises, as checks that a member of your own passes through, too.

A loss, margin, operator, energy, map, model or whatever else is registered is held to the same checks as those that
come with the package: finite values and gradients at the edges, types, autocast, compiled code, no waiting for the
device, copies, slopes that are derivatives, the invariances of its family, and its entries in help, recipes and command
line. In a test of your own::

    import pytest
    import hypersphere as hs
    import my_margins  # registers "square"

    @pytest.mark.parametrize("check", hs.testing.checks("margins"))
    def test_square(check):
        check("square")

:func:`check` runs all of them at once, :func:`cases` gives every member of a family with every check. A member may
declare facts about itself that its family's contract verifies, in an attribute ``contract``; the module of each family
lists them. The workbench is needed, pytest is not.

Example:
    >>> check("margin", "additive-cosine")
"""

from __future__ import annotations

from importlib import import_module

from hypersphere.errors import without_workbench
from hypersphere.testing.contract import Check, Contract, find

__all__ = ["Check", "Contract", "cases", "check", "checks", "contract", "contracts"]

_MODULES = (
    *("losses", "margins", "negatives", "angular", "operators", "layers", "potentials", "energies", "maps", "attacks"),
    *("models", "datasets", "augmentations", "optimisers", "schedules", "evaluations", "protocols"),
    *("sections", "figures"),
)


def contracts() -> dict[str, Contract]:
    """The contract of every family, by the family's plural name.

    Example:
        >>> "margins" in contracts()
        True
    """
    try:
        found = [import_module(f"{__name__}.{module}").CONTRACT for module in _MODULES]
    except ModuleNotFoundError as error:
        raise without_workbench("hypersphere.testing", error) from error
    return {contract.plural: contract for contract in found}


def contract(family: str) -> Contract:
    """The contract of a family, by its name in the singular or plural.

    Example:
        >>> contract("margin") is contract("margins")
        True
    """
    return find(contracts(), family)


def checks(family: str) -> list[Check]:
    """The checks of a family: functions of a member's name.

    Example:
        >>> checks("margins")[0].__name__
        'is_finite_everywhere'
    """
    return list(contract(family).checks)


def cases(family: str) -> list[tuple[str, Check]]:
    """Every member of a family with every check, to parametrise a test with.

    Example:
        >>> ("additive-angle", checks("margins")[0]) in cases("margins")
        True
    """
    return contract(family).cases()


def check(family: str, name: str) -> None:
    """Run all checks of a member; the error of the first that fails says which it was.

    Args:
        family: ``"loss"``, ``"margin"`` and so on, as in ``hypersphere list``.
        name: Of the member.

    Example:
        >>> check("angular function", "cosine")
    """
    contract(family).run(name)
