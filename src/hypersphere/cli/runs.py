"""The commands that look at runs: evaluate and report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from hypersphere import evaluate, report
from hypersphere.cli.options import Device, Run, RunDataRoot, Runs
from hypersphere.cli.terminal import console
from hypersphere.runs import RunFolder, described, load_with_data
from hypersphere.runs.evaluation import metrics_of, outputs_of, write_evaluation
from hypersphere.train.distributed import own_device, world


def evaluate_run(run: Run, device: Device = "auto", data_root: RunDataRoot = None) -> None:
    """Measure the last checkpoint of a run again and show its metrics; under torchrun the processes share the work."""
    folder = RunFolder.open(run)
    place = own_device(device)
    with world(place) as here:
        system, data = load_with_data(run, data_root, device=place)
        outputs = outputs_of(system, data, data_root or folder.data_root(), here.group)
        write_evaluation(folder, system, outputs, metrics_of(system, outputs))
        if here.main:
            folder.write_facts(**described(data))  # runs of older versions do not say it
            show_metrics([folder])


def report_runs(
    runs: Runs, output: Annotated[Path | None, typer.Option("--output", "-o", help="file to write")] = None
) -> None:
    """Write one page that shows a run, or several side by side."""
    folders = [RunFolder.open(run) for run in runs]
    default = folders[0].report_file if len(folders) == 1 else Path("report.html")
    write_report(folders, output or default)


def show_metrics(runs: list[RunFolder]) -> None:
    """Print the metrics of runs side by side, the best ones in bold."""
    found = [run.evaluation()["metrics"] for run in runs]
    titles = [escape(metric.title) for metric in evaluate.columns(found).values()]
    names = [escape(run.facts()["name"]) for run in runs]
    cells = [
        [f"[bold green]{cell.text}[/]" if cell.best else cell.text for cell in row] for row in evaluate.table(found)
    ]
    corner = "Run"
    if len(titles) > 5 and len(runs) < len(titles):  # a terminal is higher than it is wide
        corner, titles, names, cells = "", names, titles, [list(row) for row in zip(*cells, strict=True)]
    grid = Table(box=None, pad_edge=False, padding=(0, 2))
    grid.add_column(corner, style="cyan", no_wrap=True)
    for title in titles:
        grid.add_column(title, justify="right")
    for name, row in zip(names, cells, strict=True):
        grid.add_row(name, *row)
    console.print(grid)
    for title, texts in evaluate.details(found):
        console.print(f"{title}: {', '.join(texts)}", style="dim", highlight=False, markup=False, soft_wrap=True)


def write_report(runs: list[RunFolder], output: Path) -> None:
    """Write the page of runs and say where it is."""
    page = report.write([run.path for run in runs], output)
    console.print(f"Report: {page.resolve()}", highlight=False, soft_wrap=True)
