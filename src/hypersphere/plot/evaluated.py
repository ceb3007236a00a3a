"""What several pictures of evaluated runs share: how they are read and what they are called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypersphere.errors import ArgumentError
from hypersphere.plot.style import plain
from hypersphere.runs import RunError
from hypersphere.runs.read import Features, Run, load_run


@dataclass(frozen=True)
class Evaluated:
    """An evaluated run.

    Attributes:
        title: Its name, with its folder where another run of the picture has the same name.
        folder: Where it lies, as it was given.
        run: What the folder holds.
        test: Its test features.
    """

    title: str
    folder: Path
    run: Run
    test: Features

    def needs(self, value: Any, what: str) -> Any:
        """The value; where an older evaluation did not store it, an error that says what makes it."""
        if value is None:
            raise RunError(f"{self.folder} has no {what}: `hypersphere evaluate {self.folder}` makes them")
        return value


def evaluated(runs: Sequence[Path], limit: int = 28) -> list[Evaluated]:
    """The runs of a picture, in the order given.

    Args:
        runs: Folders of evaluated training runs, at least one.
        limit: Most letters of a title.
    """
    if not runs:
        raise ArgumentError("runs", "must be at least one folder of a run, got none")
    folders = [Path(folder) for folder in runs]
    read = [load_run(folder) for folder in folders]
    names = [str(run.facts.get("name") or run.folder) for run in read]
    found = []
    for folder, run, name in zip(folders, read, names, strict=True):
        if run.test is None:
            raise RunError(f"{folder} has no test features: `hypersphere evaluate {folder}` makes them")
        # Overrides do not change the name of a recipe; folders of runs do differ.
        title = name if names.count(name) == 1 else run.folder
        found.append(Evaluated(plain(title, limit), folder, run, run.test))
    return found
