"""The command line: ``hypersphere COMMAND``, for which the workbench has to be installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import NoReturn

INSTALL = 'pip install "hypersphere[workbench]"'
LIBRARIES = {
    "PIL": "pillow",
    "annotated_doc": "typer",
    "click": "typer",
    "matplotlib": "matplotlib",
    "plotly": "plotly",
    "pydantic": "pydantic",
    "rich": "rich",
    "safetensors": "safetensors",
    "sklearn": "scikit-learn",
    "tensorboard": "tensorboard",
    "typer": "typer",
    "yaml": "PyYAML",
}
"""Modules of the workbench's libraries, and the packages that bring them."""


def missing(error: ImportError) -> str | None:
    """What to do about a library that is not installed, or ``None`` where the error is about something else.

    Example:
        >>> missing(ModuleNotFoundError("No module named 'yaml'", name="yaml"))
        'PyYAML is not installed, which this needs: pip install "hypersphere[workbench]"'
        >>> missing(ModuleNotFoundError("No module named 'own'", name="own"))
    """
    library = LIBRARIES.get((error.name or "").partition(".")[0])
    return f"{library} is not installed, which this needs: {INSTALL}" if library else None


def main(run: Callable[[], None] | None = None) -> None:
    """Entry point: exit code 0 fine, 1 the run failed, 2 wrong input, 128 + n stopped by signal n."""
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]  # accepted anywhere on the line
    try:
        messages = import_module("hypersphere.cli.terminal").messages
        run = run or import_module("hypersphere.cli.commands").app
    except ModuleNotFoundError as error:
        text = missing(error)
        if text is None or debug:
            raise
        sys.stderr.write(f"error: {text}\n")
        sys.exit(2)
    try:
        with messages(debug):
            run()
    except BaseException as end:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            raise
        if not isinstance(end, SystemExit):
            sys.excepthook(type(end), end, end.__traceback__)
            _leave(1)
        _leave(end.code)


def _leave(code: object) -> NoReturn:
    """End one of several processes at once, with all that it printed.

    While the interpreter is taken down, threads of torch's process groups, which no call joins, now and then abort the
    process or keep it for ever, and ``torchrun`` then reports a run as failed that has written everything.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
