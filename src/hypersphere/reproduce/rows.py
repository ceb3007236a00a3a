"""What trainings gave for the cells of tables: read from their folders, kept as rows of one small file a table."""

from __future__ import annotations

import csv
import fcntl
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hypersphere.reproduce.table import Measure, Table, TableError, find
from hypersphere.reproduce.training import Place, Training
from hypersphere.reproduce.work import RECORD
from hypersphere.runs import RunFolder, atomic_write
from hypersphere.runs.folder import read_json


@dataclass(frozen=True)
class Row:
    """What one training gave for one cell.

    Attributes:
        preset: Whose constants.
        scale: How long.
        cell: ``row/column``.
        seed: Of the training.
        value: In the unit of the table; ``None`` where it diverged before there was one.
        status: ``"finished"``, or ``"diverged"``, which is a result, too.
        steps: Steps that were taken.
        seconds: How long they took, with all that stands around them.
        commit: Version of the code, by which the orderings were stated that it is held against. With a ``?`` behind
            it the version is not in the history, so nobody can look them up, and no two such rows decide an ordering.
        recipe_hash: Of the recipe.
        data: Digest of the data set.
        device: Where it was trained.
        date: When.
        curve: ``step:value`` at every evaluation.
    """

    preset: str
    scale: str
    cell: str
    seed: int
    value: float | None
    status: str
    steps: int
    seconds: float
    commit: str
    recipe_hash: str
    data: str
    device: str
    date: str
    curve: str = ""

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What there is one row of."""
        return self.preset, self.scale, self.cell, self.seed

    @property
    def dated(self) -> bool:
        """Whether the orderings can be looked up that stood before it was trained."""
        return not self.commit.endswith("?")

    def points(self) -> list[tuple[int, float]]:
        """The curve.

        Example:
            >>> Row("paper", "small", "a/b", 0, 1.0, "finished", 2, 1.0, "", "", "", "", "", "1:9.5 2:8").points()
            [(1, 9.5), (2, 8.0)]
        """
        return [(int(step), float(value)) for step, _, value in (part.partition(":") for part in self.curve.split())]


# ------------------------------------------------------------------------------------------------- from a folder


def folder_of(output: Path, training: Training) -> Path:
    """The folder of a training: one that is there under its hash, whatever its name, or a new one."""
    return next(iter(sorted(output.glob(f"*-{training.recipe.hash}"))), output / training.key)


def is_done(folder: Path) -> bool:
    """Whether a training has come to its end."""
    return (folder / RECORD).is_file()


def rows_of(folder: Path, training: Training) -> list[tuple[Place, Row]]:
    """The rows of a training that has come to its end, one for each of its cells."""
    run, record = RunFolder.open(folder), read_json(folder / RECORD)
    facts, measured = run.facts(), run.rows()
    found = []
    for place in training.places:
        measure = find(place.table).measure_of(place.cell)
        curve = _curve(measure, measured)
        diverged = record["status"] == "diverged"
        lost = diverged and measure.split != "run" and measure.at != "first"  # else it was known before
        row = Row(
            place.preset,
            place.scale,
            place.cell,
            training.recipe.seed,
            None if lost else read_value(measure, measured, record, folder),
            record["status"],
            int(facts["step"]) if diverged else training.recipe.train.steps,
            round(record["seconds"], 1),
            facts["version"].partition("+")[2] or facts["version"],
            training.recipe.hash,
            record["data"],
            re.sub(r"^\w+ \((.*)\)$", r"\1", facts["environment"]["device"]),
            str(facts["finished"])[:10],
            " ".join(f"{step}:{_short(value)}" for step, value in curve),
        )
        found.append((place, row))
    return found


def read_value(
    measure: Measure, measured: Sequence[Mapping[str, Any]], record: Mapping[str, Any], folder: Path
) -> float:
    """The number of a cell."""
    if measure.split == "run":
        if measure.metric not in record:
            raise TableError(f"{folder / RECORD} has no {measure.metric!r}; it has {', '.join(record)}")
        return measure.value(float(record[measure.metric]))
    curve = _curve(measure, measured)
    if not curve:
        names = sorted({name for row in measured if row["split"] == measure.split for name in row})
        raise TableError(f"{folder} measured no {measure.metric!r} ({measure.split}); it has {', '.join(names)}")
    values = [value for _, value in curve]
    if measure.at == "best":
        return max(values) if measure.better == "higher" else min(values)
    return values[0 if measure.at == "first" else -1]


def _curve(measure: Measure, measured: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """The number at every step at which it was measured."""
    pattern = re.compile(".*".join(map(re.escape, measure.metric.split("*"))))
    found = []
    for row in measured:
        names = [name for name in row if pattern.fullmatch(name) and name != measure.exclude]
        values = [float(row[name]) for name in names if row["split"] == measure.split and row[name] is not None]
        if values:
            found.append((int(row["step"]), measure.value(math.fsum(values))))
    return found


def _short(value: float) -> str:
    return f"{value:.4g}"


# --------------------------------------------------------------------------------------------------- of a table


def read_rows(folder: Path, table: str) -> list[Row]:
    """The recorded rows of a table; none where nothing was recorded."""
    file = folder / f"{table}.csv"
    if not file.exists():
        return []
    with file.open(newline="", encoding="utf-8") as opened:
        try:
            return [_parsed(entry) for entry in csv.DictReader(opened)]
        except (KeyError, TypeError, ValueError) as error:
            raise TableError(f"{file} is not a file of rows: {error!r}") from error


def _parsed(entry: Mapping[str, str]) -> Row:
    kinds: dict[str, Any] = {"seed": int, "steps": int, "seconds": float}
    values = {one.name: kinds.get(one.name, str)(entry[one.name]) for one in fields(Row) if one.name != "value"}
    return Row(value=float(entry["value"]) if entry["value"] else None, **values)


def write_rows(folder: Path, table: Table, rows: Iterable[Row]) -> None:
    """Put rows beside the recorded ones of a table; one of the same cell, preset, scale and seed is replaced."""
    order = {cell: number for number, cell in enumerate(table.names())}
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder), atomic_write(folder / f"{table.id}.csv") as file:
        kept = {row.key: row for row in read_rows(folder, table.id)}
        kept |= {row.key: row for row in rows}
        writer = csv.DictWriter(file, [one.name for one in fields(Row)], lineterminator="\n")
        writer.writeheader()
        for row in sorted(kept.values(), key=lambda row: (row.scale, row.preset, order.get(row.cell, -1), row.seed)):
            entry = asdict(row)
            entry["value"] = "" if row.value is None else f"{row.value:.6g}"
            writer.writerow(entry)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process reads, changes and writes rows meanwhile; the lock ends with the process, however it ends."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def by_table(found: Iterable[tuple[Place, Row]]) -> Iterator[tuple[Table, list[Row]]]:
    """Rows sorted into the tables that they belong to."""
    sorted_rows: dict[str, list[Row]] = {}
    for place, row in found:
        sorted_rows.setdefault(place.table, []).append(row)
    for name, rows in sorted_rows.items():
        yield find(name), rows
