"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run")]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN", help="folders of runs")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="changes, e.g. loss.m=0.3")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
DataRoot = Annotated[
    Path | None, typer.Option(help="folder with the data sets (default: $HYPERSPHERE_DATA, ./data, the user's cache)")
]
RunDataRoot = Annotated[Path | None, typer.Option(help="folder with the data sets (default: that of the run)")]
