"""What happens beside training: progress on the terminal, TensorBoard, and whatever a user adds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from hypersphere.train.trainer import Trainer

Row = Mapping[str, Any]


class Callback:
    """Hooks into training; override what is needed. They run in the main process only.

    Example:
        >>> class Shout(Callback):
        ...     def on_evaluate(self, trainer, row):
        ...         print(row["accuracy"])
    """

    def on_start(self, trainer: Trainer, step: int) -> None:
        """Training begins, or goes on, at ``step``."""

    def on_step(self, trainer: Trainer, step: int) -> None:
        """``step`` steps are done (the device may still be at work on them)."""

    def on_log(self, trainer: Trainer, row: Row) -> None:
        """A row of training metrics was written."""

    def on_evaluate(self, trainer: Trainer, row: Row) -> None:
        """A row of test metrics was written."""

    def on_measure(self, trainer: Trainer, row: Row) -> None:
        """A row of what a section measures was written."""

    def on_checkpoint(self, trainer: Trainer, folder: Path) -> None:
        """A checkpoint was written."""

    def on_end(self, trainer: Trainer, status: str) -> None:
        """Training ended: ``"finished"``, ``"interrupted"`` or ``"diverged"``."""


class ProgressBar(Callback):
    """A live line with the loss, each regulariser apart, test accuracy, images a second and the time left."""

    def __init__(self, console: Console | None = None) -> None:
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[metrics]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._terms, self._accuracy, self._speed, self._since = "", "", "", (0, 0.0)

    def on_start(self, trainer: Trainer, step: int) -> None:
        """Show the bar."""
        recipe = trainer.recipe
        self._task = self.progress.add_task(recipe.name, total=recipe.train.steps, completed=step, metrics="")
        self._since = (step, time.perf_counter())
        self.progress.start()

    def on_step(self, trainer: Trainer, step: int) -> None:
        """Move the bar."""
        self.progress.update(self._task, completed=step)

    def on_log(self, trainer: Trainer, row: Row) -> None:
        """Show the terms and the speed since the last row."""
        first, start = self._since
        now = time.perf_counter()
        speed = (row["step"] - first) * trainer.recipe.data.batch_size / max(now - start, 1e-9)
        self._since = (row["step"], now)
        self._terms = "  ".join(f"{term} {row[term]:.4f}" for term in trainer.terms)
        self._speed = f"  {speed:,.0f} images/s"
        self._show()

    def on_evaluate(self, trainer: Trainer, row: Row) -> None:
        """Show the test accuracy."""
        if "accuracy" in row:
            self._accuracy = f"  test {row['accuracy']:.2%}"
        self._show()
        self._since = (row["step"], time.perf_counter())

    def _show(self) -> None:
        self.progress.update(self._task, metrics=f"{self._terms}{self._accuracy}{self._speed}")

    def on_end(self, trainer: Trainer, status: str) -> None:
        """Leave the last state of the bar on the terminal."""
        self.progress.stop()


class TensorBoard(Callback):
    """Writes every metric to ``tensorboard/`` in the run folder; a resumed run replaces what it repeats."""

    writer: Any = None

    def on_start(self, trainer: Trainer, step: int) -> None:
        """Open the event file."""
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (takes a second to import)

        self.writer = SummaryWriter(str(trainer.run.path / "tensorboard"), purge_step=step + 1)

    def write(self, row: Row) -> None:
        """Write a row of metrics."""
        for name, value in row.items():
            if name not in ("step", "split"):
                self.writer.add_scalar(f"{row['split']}/{name}", value, row["step"])
        self.writer.flush()  # a kill must not cost rows that no later step writes again

    def on_log(self, trainer: Trainer, row: Row) -> None:
        """Write the training metrics."""
        self.write(row)

    def on_evaluate(self, trainer: Trainer, row: Row) -> None:
        """Write the test metrics."""
        self.write(row)

    def on_measure(self, trainer: Trainer, row: Row) -> None:
        """Write what a section measures."""
        self.write(row)

    def on_end(self, trainer: Trainer, status: str) -> None:
        """Close the event file."""
        self.writer.close()
