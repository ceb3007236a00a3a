"""The folder of a run: recipe, facts, metrics and checkpoints, each written so that a kill leaves it usable."""

from __future__ import annotations

import csv
import datetime
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

import hypersphere
from hypersphere import plugins
from hypersphere import recipe as recipes
from hypersphere.recipe import Recipe, RecipeError
from hypersphere.runs import artefacts
from hypersphere.runs.artefacts import RunError
from hypersphere.runs.conditions import differences, environment

CHECKPOINT = "checkpoint"
"""Schema of the tensors of a checkpoint."""
STATE = "state.safetensors"
"""File of the tensors of a checkpoint."""


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[str]]:
    """Write a text file that appears whole or not at all."""
    temporary = path.with_name(f".writing-{path.name}")
    with temporary.open("w", newline="") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def code_version() -> str:
    """The package's version, with the commit where it runs from a checkout or ``HYPERSPHERE_COMMIT`` names it."""
    if commit := os.environ.get("HYPERSPHERE_COMMIT"):
        return f"{hypersphere.__version__}+{commit}"
    source = Path(__file__).resolve().parents[3]
    if not (source / ".git").exists():
        return hypersphere.__version__
    git = shutil.which("git")
    if git is None:
        return hypersphere.__version__
    described = subprocess.run(  # noqa: S603 (fixed arguments)
        [git, "-C", str(source), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    commit = described.stdout.strip()
    return f"{hypersphere.__version__}+{commit}" if commit else hypersphere.__version__


class RunFolder:
    """Paths and files of one run.

    Args:
        path: The folder; :meth:`create` makes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path, recipe: Recipe, device: torch.device, data_root: Path | None = None) -> RunFolder:
        """A new run, or the existing one of the same recipe to go on with."""
        run = cls(path)
        if run.recipe_file.exists():
            run.check(recipe)
            return run
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        run.write_facts(
            name=recipe.name,
            recipe_hash=recipe.hash,
            seed=recipe.seed,
            version=code_version(),
            command=shlex.join(["hypersphere", *sys.argv[1:]]),
            environment=environment(device),
            plugins=[plugin.record() for plugin in plugins.loaded()],
            data_root=None if data_root is None else str(data_root.resolve()),
            started=_now(),
            finished=None,
            status="running",
            step=0,
        )
        # Last: a folder with a recipe is a run.
        with atomic_write(run.recipe_file) as file:
            file.write(recipe.to_yaml())
        return run

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run."""
        run = cls(path)
        if not run.path.exists():
            raise RunError(f"{path} does not exist: give a folder that a training run wrote")
        if not run.recipe_file.is_file():
            raise RunError(f"{path} is not a run folder: it has no {run.recipe_file.name}")
        return run

    def check(self, recipe: Recipe) -> None:
        """Raise :class:`RunError` unless this is a run of ``recipe``."""
        existing = self.recipe()
        if existing.hash != recipe.hash:
            raise RunError(
                f"{self.path} holds a run of another recipe ({existing.hash}, not {recipe.hash}): choose another "
                f"--folder, delete it, or continue it as it is with `hypersphere resume {self.path}`"
            )

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.yaml"

    @property
    def metrics_file(self) -> Path:
        """Metrics, one JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def report_file(self) -> Path:
        """The run's page."""
        return self.path / "report.html"

    def recipe(self) -> Recipe:
        """The resolved recipe of the run, which loads no code.

        Raises:
            RunError: It cannot be read, or needs a plugin that is not loaded.
        """
        plugins.load_installed()
        try:
            return recipes.load(self.recipe_file, plugins=False)
        except RecipeError as error:
            here = {plugin.digest for plugin in plugins.loaded()}
            missing = [one for one in self.facts().get("plugins", ()) if one["digest"] not in here]
            if not missing:
                raise RunError(
                    f"{error}\n{self.path} cannot be used with this recipe. Where a part of it came from a plugin, "
                    "name it: --plugin FILE.py (plugins=[...] in Python)"
                ) from error
            named = ", ".join(f"{one['name']} ({one['path']})" for one in missing)
            options = " ".join(f"--plugin {one['path']}" for one in missing)
            raise RunError(
                f"{self.path} was trained with plugins that are not loaded: {named}. Code is never loaded from a run: "
                f"name them with {options} (plugins=[...] in Python)"
            ) from error

    def check_plugins(self) -> None:
        """Raise :class:`RunError` where a plugin with which the run began is another one now."""
        here = {plugin.name: plugin.digest for plugin in plugins.loaded()}
        for one in self.facts().get("plugins", ()):
            if here.get(one["name"], one["digest"]) != one["digest"]:
                raise RunError(
                    f"the plugin {one['name']!r} ({one['path']}) has changed since {self.path} began: go on with it "
                    "as it was, or start a new run"
                )

    def note_conditions(self, device: torch.device, step: int) -> None:
        """Note under which conditions the run goes on from a step, and warn where they are not those of before."""
        facts, now = self.facts(), environment(device)
        before = (facts.get("resumed") or [facts])[-1]
        version = code_version()
        changed = differences(
            {"version": before["version"], **before.get("environment", {})}, {"version": version, **now}
        )
        if changed:
            warnings.warn(
                f"{self.path} goes on from step {step} under other conditions ({'; '.join(changed)}): the result will "
                "not be that of an uninterrupted run bit for bit",
                stacklevel=2,
            )
        noted = {"step": step, "at": _now(), "version": version, "environment": now}
        self.write_facts(resumed=[*facts.get("resumed", []), noted])

    def facts(self) -> dict[str, Any]:
        """What is known about the run."""
        return read_json(self.path / "run.json")

    def write_facts(self, **changes: Any) -> None:
        """Change some of the facts."""
        file = self.path / "run.json"
        facts = self.facts() if file.exists() else {}
        with atomic_write(file) as output:
            json.dump(facts | changes, output, indent=2)

    def data_root(self) -> Path | None:
        """The data root that the run was started with."""
        root = self.facts().get("data_root")
        return None if root is None else Path(root)

    def evaluation(self) -> dict[str, Any]:
        """The last evaluation: its step and metrics."""
        file = self.path / "evaluation.json"
        if not file.is_file():
            raise RunError(f"{self.path} has no evaluation yet: `hypersphere evaluate {self.path}` makes one")
        return read_json(file, f"`hypersphere evaluate {self.path}` writes it again")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training in this folder; the lock ends with the process, however it ends."""
        folder = os.open(self.checkpoints, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise RunError(f"{self.path} is being trained by another process") from error
        finally:
            os.close(folder)

    def finish(self, status: str, step: int) -> None:
        """Note how the run ended."""
        self.write_facts(status=status, step=step, finished=_now())

    # -------------------------------------------------------------------------------------------- metrics

    def rows(self) -> list[dict[str, Any]]:
        """All complete metric rows; a last line cut short by a kill is left out."""
        if not self.metrics_file.exists():
            return []
        lines = self.metrics_file.read_text(encoding="utf-8", errors="replace").split("\n")
        rows = []
        for number, line in enumerate(lines[:-1], 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                message = f"{self.metrics_file}, line {number} is not valid JSON ({error}); remove that line"
                raise RunError(message) from error
            if not isinstance(row, dict) or "step" not in row:
                raise RunError(f"{self.metrics_file}, line {number} is not an object with a step; remove that line")
            rows.append(row)
        return rows

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a metric row."""
        with self.metrics_file.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def rewind(self, step: int) -> None:
        """Forget the metric rows after ``step``, which the resumed run will write again."""
        rows = [row for row in self.rows() if row["step"] <= step]
        with atomic_write(self.metrics_file) as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def write_csv(self) -> None:
        """The metric rows as a table, for spreadsheets."""
        rows = self.rows()
        columns = list(dict.fromkeys(key for row in rows for key in row))
        with atomic_write(self.path / "metrics.csv") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)

    # ---------------------------------------------------------------------------------------- checkpoints

    def save_checkpoint(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], keep: int) -> Path:
        """Write a checkpoint that appears whole or not at all, and delete old ones beyond ``keep``.

        The files go to a temporary folder that is renamed when they are complete and on disk.
        """
        target = self.checkpoints / f"step-{step:08d}"
        if target.exists():
            return target
        folder = Path(tempfile.mkdtemp(prefix=".writing-", dir=self.checkpoints))
        recipe = str(state.get("recipe_hash", ""))
        artefacts.write(folder / STATE, CHECKPOINT, tensors, recipe=recipe, facts={"step": step})
        (folder / "state.json").write_text(json.dumps({"step": step, **state}))
        for file in folder.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        folder.chmod(0o755)  # mkdtemp makes it private
        folder.rename(target)
        for old in self._complete()[:-keep]:
            shutil.rmtree(old)
        return target

    def _complete(self) -> list[Path]:
        return sorted(self.checkpoints.glob("step-*"))

    def clean(self) -> None:
        """Delete what a kill in mid-write left behind."""
        for leftover in [*self.checkpoints.glob(".writing-*"), *self.path.glob(".writing-*")]:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    def latest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint."""
        complete = self._complete()
        return complete[-1] if complete else None


def load_checkpoint(folder: Path, into: Mapping[str, Tensor], recipe: Recipe | None = None) -> dict[str, Any]:
    """Copy a checkpoint's tensors into existing ones, all or none; nothing in the files is ever executed.

    Args:
        folder: A checkpoint folder.
        into: Live tensors by name; each must be in the checkpoint with the same shape and type.
        recipe: Which the checkpoint must be of.

    Returns:
        The JSON state beside the tensors.
    """
    again = f"delete {folder} to go on from the checkpoint before"
    found = artefacts.read(folder / STATE, CHECKPOINT, names=into.__contains__, again=again)
    state = read_json(folder / "state.json", again)
    if found.facts.get("step", state.get("step")) != state.get("step"):
        raise RunError(f"{folder} has files of two steps, {found.facts['step']} and {state.get('step')}: {again}")
    stored = found.recipe or str(state.get("recipe_hash", ""))
    if recipe is not None and stored and not recipe.matches(stored):
        raise RunError(
            f"checkpoint {folder} is of another recipe ({stored}, not {recipe.hash}): {again}, or put back the "
            "recipe.yaml that it was written with"
        )
    found.copy_into(into)
    return state


def read_json(file: Path, again: str = "restore it, or train again in another folder") -> dict[str, Any]:
    """The JSON object in a file; ``again`` says what to do where there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(f"{file} is missing: {again}") from error
    except OSError as error:
        raise RunError(f"{file} cannot be read ({error}): {again}") from error
    except ValueError as error:
        raise RunError(f"{file} is not valid JSON ({error}): {again}") from error
    if not isinstance(content, dict):
        raise RunError(f"{file} must hold a JSON object, got {type(content).__name__}: {again}")
    return content


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
