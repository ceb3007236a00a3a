"""The command that lists what recipes can name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from hypersphere import angular, data, energy, evaluate, losses, models, nn, orthogonal, recipe
from hypersphere.attacks import attacks
from hypersphere.cli.terminal import console
from hypersphere.registry import Registry, UnknownNameError, did_you_mean

FAMILIES: dict[str, Registry[Any]] = {
    "losses": losses.losses,
    "layers": nn.layers,
    "operators": nn.operators,
    "angulars": angular.angulars,
    "energies": energy.energies,
    "orthogonal": orthogonal.maps,
    "attacks": attacks,
    "models": models.models,
    "datasets": data.datasets,
    "evaluations": evaluate.evaluations,
    "protocols": evaluate.named_protocols,
}


def list_entries(
    family: Annotated[
        str | None, typer.Argument(help=f"{', '.join(FAMILIES)}, settings or recipes; all by default")
    ] = None,
) -> None:
    """List what recipes can name, with the defaults and a line of help for each."""
    known = [*FAMILIES, "settings", "recipes"]
    if family is not None and family not in known:
        raise UnknownNameError(f"unknown family {family!r}.{did_you_mean(family, known)} Known: {', '.join(known)}")
    for name in known if family is None else [family]:
        grid = Table(title=name, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2))
        grid.add_column("name", style="cyan", no_wrap=True)
        grid.add_column("options and defaults", style="dim", ratio=2)
        grid.add_column("what it is", ratio=3)
        for row in _entries(name):
            grid.add_row(*row)
        console.print(grid)
        console.print()


def _entries(family: str) -> Iterator[tuple[str, str, str]]:
    """Name, options and help of every member of a family."""
    if family == "recipes":
        yield from ((name, "", escape(text)) for name, text in recipe.embedded().items())
    elif family == "settings":
        yield from ((key, escape(default), escape(text)) for key, default, text in recipe.settings())
    elif not len(FAMILIES[family]):
        yield "none yet", "", ""
    else:
        entries = [FAMILIES[family][name] for name in FAMILIES[family]]
        # Shared options are listed once, with the defaults of the class that defines them, or of all where all agree.
        sharing = [entry for entry in entries if vars(entry.factory).get("shared_options")]
        shared = {str(o) for e in sharing for o in e.options if o.name in e.factory.shared_options}  # type: ignore[attr-defined]
        if not sharing and len(entries) > 2:
            shared = set.intersection(*({str(option) for option in entry.options} for entry in entries))
        without = []
        for entry in entries:
            also = f" [dim](also {', '.join(entry.aliases)})[/]" if entry.aliases else ""
            takes = not sharing or bool(getattr(entry.factory, "shared_options", ()))
            own = [str(option) for option in entry.options if not (takes and str(option) in shared)]
            without += [] if takes else [entry.name]
            yield entry.name, escape(", ".join(own)), escape(_plain(entry.help)) + also
        if shared:
            those = [str(option) for option in (sharing or entries)[0].options if str(option) in shared]
            but = f" (but {', '.join(without)})" if without else ""
            yield "any of these", escape(", ".join(those)), f"what every one of them takes, too{but}"


def _plain(text: str) -> str:
    """A docstring's line without the markup of its formulas."""
    words = re.sub(r":math:`([^`]*)`", r"\1", text).replace("``", "").replace(r"\|", "|").replace(r"\,", " ")
    return re.sub(r"\\mathrm|[{}]", "", re.sub(r"(?<=[A-Za-z0-9])\\", " ", words)).replace("\\", "")
