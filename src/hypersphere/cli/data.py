"""The command that looks for data sets."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from hypersphere import data
from hypersphere.cli.options import DataRoot
from hypersphere.cli.terminal import console


def list_data(
    name: Annotated[str | None, typer.Argument(help="one data set, with all details")] = None,
    data_root: DataRoot = None,
    verify: Annotated[bool, typer.Option(help="check contents against the published checksums")] = True,
) -> None:
    """List the data sets that are found, check them, and say where the missing ones come from."""
    statuses = data.inventory(data_root, verify=verify)
    if name is not None:
        exactly = [status for status in statuses if status.name == name]  # some are no data sets to train on
        statuses = exactly or [status for status in statuses if status.name == data.datasets[name].name]
    grid = Table(box=None, pad_edge=False, padding=(0, 2))
    grid.add_column("data set", style="cyan", no_wrap=True)
    grid.add_column("state", no_wrap=True)
    grid.add_column("details", overflow="fold")
    colours = {"found": "green", "embedded": "green", "missing": "yellow", "corrupt": "red"}
    for status in statuses:
        details = f"{status.folder}: {status.detail}" if status.folder else status.detail
        if status.state == "missing" and name is None:
            details = f"how to get it: hypersphere data {status.name}"
        grid.add_row(status.name, f"[{colours[status.state]}]{status.state}[/]", escape(details))
    console.print(grid)
    if any(status.state == "corrupt" for status in statuses):
        raise typer.Exit(1)
