"""The command that writes measured numbers: record."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hypersphere import results
from hypersphere.cli.options import Runs
from hypersphere.cli.terminal import console
from hypersphere.errors import ArgumentError
from hypersphere.runs import RunFolder


def record(
    runs: Runs,
    output: Annotated[Path, typer.Option("--output", "-o", help="JSON file, usually docs/rows/NAME.json")],
    group: Annotated[str, typer.Option(help="heading of the rows on the results page")],
    note: Annotated[str | None, typer.Option(help="what a reader should know about these numbers")] = None,
    matrix: Annotated[
        str | None, typer.Option(metavar="METRIC", help="one metric of runs called ROW-COLUMN, as a matrix")
    ] = None,
    detail: Annotated[
        list[str] | None, typer.Option(metavar="METRIC", help="a metric that is a detail elsewhere, to record as well")
    ] = None,
    published: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[.METRIC]=VALUE", help="published value of a run's first metric, or of that one"),
    ] = None,
) -> None:
    """Write the results of finished runs, averaged over seeds, as rows for the docs."""
    for pair in published or ():
        if not all(pair.rpartition("=")):
            raise ArgumentError("published", f"must be NAME=VALUE or NAME.METRIC=VALUE, got {pair!r}")
    values = dict(pair.split("=", 1) for pair in published or ())
    rows = results.rows_from_runs([RunFolder.open(run) for run in runs], group, note, matrix, values, detail or ())
    results.write_rows(output, rows)
    console.print(f"Wrote {len(rows)} rows to {output}", highlight=False)
