"""The run report: one self-contained HTML page about one training run, or about several side by side.

Example:
    >>> from pathlib import Path
    >>> write([], Path("report.html"))
    Traceback (most recent call last):
    hypersphere.runs.artefacts.RunError: no run folder was given; name at least one folder of a training run
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hypersphere.report.page import render, write_page
from hypersphere.runs import RunError, load_run

__all__ = ["build", "write"]


def build(runs: Sequence[Path]) -> str:
    """The report as one HTML page that needs no network and no other file.

    Args:
        runs: Folders of training runs; several are shown side by side in this order.

    Raises:
        RunError: No folder was given, or a folder lacks what the report needs.
    """
    if not runs:
        raise RunError("no run folder was given; name at least one folder of a training run")
    return render([load_run(Path(folder)) for folder in runs])


def write(runs: Sequence[Path], output: Path) -> Path:
    """Write the report to ``output``, whole or not at all, and return ``output``.

    Args:
        runs: Folders of training runs, as for :func:`build`.
        output: The HTML file; folders above it are made.
    """
    return write_page(build(runs), Path(output))
