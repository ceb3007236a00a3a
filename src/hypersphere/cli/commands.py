"""The commands by name. A command's module is imported when the command is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from importlib import import_module
from importlib.metadata import version
from pkgutil import iter_modules
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

import hypersphere
from hypersphere import plugins
from hypersphere.cli.terminal import console

COMMANDS = {
    "demo": ("train:demo", "Train softmax, A-Softmax and ArcFace on handwritten digits and compare them on one page."),
    "train": ("train:train", "Train a recipe. Started again after an interruption, it goes on where it was."),
    "resume": ("train:resume", "Continue an interrupted run from its last checkpoint."),
    "evaluate": (
        "runs:evaluate_run",
        "Measure the last checkpoint of a run again and show its metrics; under torchrun the processes share the work.",
    ),
    "report": ("runs:report_runs", "Write one page that shows a run, or several side by side."),
    "list": ("names:list_entries", "List what recipes can name, with the defaults and a line of help for each."),
    "new": (
        "new:new",
        "Copy a documented example of a loss, margin, model, ... into a file of your own, which works as it is.",
    ),
    "data": (
        "data:list_data",
        "List the data sets that are found, check them, and say where the missing ones come from.",
    ),
    "plan": (
        "plan:plan",
        "Say what a head of very many classes takes on each of several GPUs, and which ways to train it fit.",
    ),
    "record": ("results:record", "Write the results of finished runs, averaged over seeds, as rows for the docs."),
    "docs": (
        "hypersphere.reproduce.commands:docs",
        "Write the pages of results, benchmarks, precision and the scoreboard from the measured rows in docs/rows.",
    ),
    "reproduce": (
        "hypersphere.reproduce.commands:reproduce",
        "Train the cells of a published table and show them beside what was published.",
    ),
    "compare": ("hypersphere.reproduce.commands:compare", "Show runs of your own beside a published table."),
    "plot": ("plot:plot_app", "Draw pictures for papers and slides: PNG, SVG or PDF, by the ending of the file name."),
}
"""Where a command is defined, a function or a group, and the line that describes it (a test compares it)."""


def _of_tasks(members: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """The commands that every package of these has in its own ``COMMANDS``; its modules are not imported."""
    found: dict[str, tuple[str, str]] = {}
    for parent in members:
        for task in iter_modules(import_module(parent).__path__, f"{parent}."):
            own = getattr(import_module(task.name), "COMMANDS", {})
            found |= {name: (f"{task.name}.{place}", text) for name, (place, text) in own.items()}
    return found


COMMANDS |= _of_tasks(members=("hypersphere.tasks",))


class _Loaded(MutableMapping[str, Any]):
    """Commands that are imported when they are looked up."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._found:
            module, _, attribute = COMMANDS[name][0].partition(":")
            module = module if "." in module else f"hypersphere.cli.{module}"
            self._found[name] = _build(name, getattr(import_module(module), attribute))
        return self._found[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._found[name] = command

    def __delitem__(self, name: str) -> None:
        del self._found[name]

    def __contains__(self, name: object) -> bool:
        return name in COMMANDS

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


def _build(name: str, target: typer.Typer | Callable[..., None]) -> Any:
    """The command of a function or a group, with the option for plugins."""
    command = get_command(target) if isinstance(target, typer.Typer) else _command(target)
    command.name = name
    for one in (command, *getattr(command, "commands", {}).values()):
        one.params.extend(_command(_plugins).params)
    return command


def _command(function: Callable[..., None]) -> Any:
    alone = typer.Typer(add_completion=False)
    alone.command()(function)
    return get_command(alone)


def _load_plugins(context: typer.Context, named: list[str] | None) -> None:
    """Load what the user named and, where a command is about to look up names, what is installed."""
    if context.resilient_parsing:
        return
    for plugin in named or ():
        plugins.load(plugin)
    if not hasattr(context.command, "commands"):
        plugins.load_installed()


def _plugins(
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.py|MODULE",
            help="file or module that registers members of your own; may be given several times",
            callback=_load_plugins,
            expose_value=False,
        ),
    ] = None,
) -> None:
    """The option that every command has."""


class _Group(TyperGroup):
    """All commands; its help needs none of their modules."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.params.extend(_command(_plugins).params)
        self.commands = _Loaded()

    def format_help(self, ctx: Any, formatter: Any) -> None:
        shown: dict[str, Any] = {name: TyperCommand(name, help=text) for name, (_, text) in COMMANDS.items()}
        loaded, self.commands = self.commands, shown
        try:
            super().format_help(ctx, formatter)
        finally:
            self.commands = loaded


app = typer.Typer(
    cls=_Group,
    help="Deep learning on the hypersphere: train, evaluate and look at what was learned.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        console.print(f"hypersphere {hypersphere.__version__} (torch {version('torch')})", highlight=False)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="show the version and stop", callback=_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show the traceback of an error")] = False,
) -> None:
    pass
