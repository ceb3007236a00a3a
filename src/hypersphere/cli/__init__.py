"""The command line."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import hypersphere
from hypersphere import angular, data, energy, evaluate, losses, models, nn, orthogonal, recipe, report, results
from hypersphere.attacks import attacks
from hypersphere.cli.attack import attack_run
from hypersphere.cli.faces import COMMANDS, gallery_app
from hypersphere.cli.plot import plot_app
from hypersphere.errors import ArgumentError, HypersphereError
from hypersphere.registry import Registry, UnknownNameError, did_you_mean
from hypersphere.train import DivergedError, Interrupted, ProgressBar, RunFolder, Trainer, pick_device
from hypersphere.train.distributed import world

app = typer.Typer(
    help="Deep learning on the hypersphere: train, evaluate and look at what was learned.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(plot_app, name="plot")
app.command("attack")(attack_run)
app.add_typer(gallery_app, name="gallery")
console = Console()
errors = Console(stderr=True)

DEMO = ("digits-softmax", "digits-a-softmax", "digits-arcface")

Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
DataRoot = Annotated[
    Path | None, typer.Option(help="folder with the data sets (default: $HYPERSPHERE_DATA, ./data, the user's cache)")
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="changes, e.g. loss.m=0.3")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run")]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN", help="folders of runs")]


def _version(asked: bool) -> None:
    if asked:
        console.print(f"hypersphere {hypersphere.__version__} (torch {torch.__version__})", highlight=False)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="show the version and stop", callback=_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show the traceback of an error")] = False,
) -> None:
    pass


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="folder for the runs and the page")] = Path("runs/demo"),
    device: Device = "auto",
) -> None:
    """Train softmax, A-Softmax and ArcFace on handwritten digits and compare them on one page."""
    plans = [recipe.load(name) for name in DEMO]
    runs = [_train(plan, output / f"{plan.name}-{plan.hash}", device, None) for plan in plans]
    _show_metrics(runs)
    _write_report(runs, output / "report.html")


@app.command()
def train(
    source: Annotated[str, typer.Argument(metavar="RECIPE", help="name or YAML file")] = "digits-arcface",
    overrides: Overrides = None,
    folder: Annotated[Path | None, typer.Option(help="folder of the run (default: runs/NAME-HASH)")] = None,
    device: Device = "auto",
    data_root: DataRoot = None,
) -> None:
    """Train a recipe. Started again after an interruption, it goes on where it was."""
    if "=" in source and not Path(source).exists():
        source, overrides = "digits-arcface", [source, *(overrides or [])]
    plan = recipe.load(source, overrides or [])
    run = _train(plan, folder or Path("runs") / f"{plan.name}-{plan.hash}", device, data_root)
    if _is_main():
        _show_run(run)


@app.command()
def resume(run: Run, device: Device = "auto", data_root: DataRoot = None) -> None:
    """Continue an interrupted run from its last checkpoint."""
    folder = RunFolder.open(run)
    _train(folder.recipe(), run, device, data_root or folder.data_root())
    if _is_main():
        _show_run(folder)


@app.command("evaluate")
def evaluate_run(run: Run, device: Device = "auto", data_root: DataRoot = None) -> None:
    """Measure the last checkpoint of a run again and show its metrics."""
    folder = RunFolder.open(run)
    trainer = Trainer(folder.recipe(), folder, pick_device(device), data_root=data_root or folder.data_root())
    trainer.load_weights()
    outputs = trainer.outputs()
    trainer.write_evaluation(outputs, trainer.metrics(outputs))
    _show_metrics([folder])


@app.command("report")
def report_runs(
    runs: Runs, output: Annotated[Path | None, typer.Option("--output", "-o", help="file to write")] = None
) -> None:
    """Write one page that shows a run, or several side by side."""
    folders = [RunFolder.open(run) for run in runs]
    default = folders[0].report_file if len(folders) == 1 else Path("report.html")
    _write_report(folders, output or default)


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


@app.command("list")
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


@app.command("data")
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


@app.command()
def record(
    runs: Runs,
    output: Annotated[Path, typer.Option("--output", "-o", help="JSON file, usually docs/rows/NAME.json")],
    group: Annotated[str, typer.Option(help="heading of the rows on the results page")],
    note: Annotated[str | None, typer.Option(help="what a reader should know about these numbers")] = None,
    matrix: Annotated[
        str | None, typer.Option(metavar="METRIC", help="one metric of runs called ROW-COLUMN, as a matrix")
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
    rows = results.rows_from_runs([RunFolder.open(run) for run in runs], group, note, matrix, values)
    results.write_rows(output, rows)
    console.print(f"Wrote {len(rows)} rows to {output}", highlight=False)


@app.command()
def docs(
    folder: Annotated[Path, typer.Option(help="folder with rows/ and the pages made from them")] = Path("docs"),
    check: Annotated[bool, typer.Option(help="only say whether the pages are up to date")] = False,
) -> None:
    """Write docs/results.md and docs/benchmarks.md from the measured rows in docs/rows."""
    stale = results.write_pages(folder, check=check)
    if check and stale:
        raise HypersphereError(f"{', '.join(map(str, stale))}: out of date, run `hypersphere docs`")
    console.print(f"{'Checked' if check else 'Wrote'} the pages in {folder}", highlight=False)


for _command in COMMANDS:
    app.command()(_command)


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _train(plan: recipe.Recipe, path: Path, device_name: str, data_root: Path | None) -> RunFolder:
    device = pick_device(device_name)
    if device.type == "cuda" and "LOCAL_RANK" in os.environ:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    with world(device) as here:
        run = RunFolder(path)
        if run.recipe_file.exists():
            run.check(plan)
            if run.facts()["status"] == "finished":
                if here.main:
                    console.print(f"{path} is finished already; delete the folder to train again", highlight=False)
                    report.write([path], run.report_file)
                return run
        trainer = Trainer(plan, run, device, data_root=data_root, callbacks=[ProgressBar(console)], world=here)
        # Only now, so that a start that fails leaves nothing behind.
        if here.main:
            RunFolder.create(path, plan, device, data_root)
            last = run.latest_checkpoint()
            going_on = f", going on from {last.name}" if last else ""
            console.print(f"Training {plan.name} on {device} in {path}{going_on}", highlight=False, soft_wrap=True)
        here.barrier()
        try:
            trainer.fit()
        finally:  # a run that stopped or diverged has curves to look at, too
            if here.main and run.metrics_file.exists():
                report.write([path], run.report_file)
    return run


def _show_metrics(runs: list[RunFolder]) -> None:
    found = [run.evaluation()["metrics"] for run in runs]
    titles = [metric.title for metric in evaluate.columns(found).values()]
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


def _show_run(run: RunFolder) -> None:
    _show_metrics([run])
    console.print(f"Report: {run.report_file.resolve()}", highlight=False, soft_wrap=True)


def _write_report(runs: list[RunFolder], output: Path) -> None:
    page = report.write([run.path for run in runs], output)
    console.print(f"Report: {page.resolve()}", highlight=False, soft_wrap=True)


@contextmanager
def _messages(debug: bool) -> Iterator[None]:
    """Errors of the user's making become a message and an exit code, warnings one readable line."""

    def show_warning(message: Warning | str, *args: Any, **options: Any) -> None:
        errors.print("[bold yellow]warning:[/] ", end="")
        errors.print(str(message), highlight=False, soft_wrap=True, markup=False)

    warnings.showwarning = show_warning
    try:
        yield
    except Interrupted as error:
        errors.print(f"\n{error}", highlight=False, soft_wrap=True, markup=False)
        sys.exit(128 + error.signal_number)
    except KeyboardInterrupt:
        errors.print("\nstopped", highlight=False)
        sys.exit(130)
    except (HypersphereError, OSError) as error:
        if debug:
            raise
        errors.print("[bold red]error:[/] ", end="")
        text = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error)
        errors.print(text, highlight=False, soft_wrap=True, markup=False)
        sys.exit(1 if isinstance(error, DivergedError) else 2)


def main(run: Callable[[], None] = app) -> None:
    """Entry point: exit code 0 fine, 1 the run failed, 2 wrong input, 128 + n stopped by signal n."""
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]  # accepted anywhere on the line
    with _messages(debug):
        run()
