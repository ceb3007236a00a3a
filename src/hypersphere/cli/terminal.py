"""What commands print on: standard output, and standard error for messages."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from hypersphere.cli import missing
from hypersphere.errors import HypersphereError

console = Console()
errors = Console(stderr=True)


@contextmanager
def messages(debug: bool) -> Iterator[None]:
    """Errors of the user's making become a message and an exit code, warnings one readable line."""

    def show_warning(message: Warning | str, *args: Any, **options: Any) -> None:
        errors.print("[bold yellow]warning:[/] ", end="")
        errors.print(str(message), highlight=False, soft_wrap=True, markup=False)

    warnings.showwarning = show_warning
    try:
        yield
    except KeyboardInterrupt:
        errors.print("\nstopped", highlight=False)
        sys.exit(130)
    except (HypersphereError, OSError, ModuleNotFoundError) as error:
        text, code = _text(error), getattr(error, "exit_code", 2)
        if text is None or (debug and code < 128):
            raise
        errors.print("\n" if code > 128 else "[bold red]error:[/] ", end="")
        errors.print(text, highlight=False, soft_wrap=True, markup=False)
        sys.exit(code)


def _text(error: Exception) -> str | None:
    """What an error has to say to a user; ``None`` where it is a mistake of the program."""
    if isinstance(error, ModuleNotFoundError):
        return missing(error)
    return f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error)
