"""What was measured beside what was published, and which of the published orderings hold.

:func:`scoreboard` gives one JSON object, of which the page and ``docs/scoreboard.md`` are made.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from hypersphere.metrics import mean_and_interval
from hypersphere.metrics.intervals import student_quantile
from hypersphere.reproduce.rows import Row, read_rows
from hypersphere.reproduce.table import Measure, Ordering, Table, every, find
from hypersphere.reproduce.training import cell_recipe

Verdict = Literal["held", "reversed", "open"]
NOT_CONVERGED = "N/C"


@dataclass(frozen=True)
class Summary:
    """The seeds of a cell together.

    Attributes:
        seeds: Number of trainings.
        failed: How many of them diverged, or ended where chance does.
        mean: Of the others; ``None`` where there are none.
        interval: Half width of the 95 % interval of the mean over the seeds, from two on.
    """

    seeds: int
    failed: int
    mean: float | None
    interval: float | None

    def text(self, measure: Measure) -> str:
        """As people read it.

        Example:
            >>> Summary(3, 0, 28.5, 0.31).text(Measure()), Summary(3, 3, None, None).text(Measure())
            ('28.50 ± 0.31', 'N/C')
            >>> Summary(3, 1, 28.5, None).text(Measure())
            '28.50 (N/C 1 of 3)'
        """
        if self.mean is None:
            return NOT_CONVERGED
        spread = "" if self.interval is None else f" ± {self.interval:.{measure.digits}f}"
        failed = f" ({NOT_CONVERGED} {self.failed} of {self.seeds})" if self.failed else ""
        return f"{self.mean:.{measure.digits}f}{spread}{failed}"


def summary(measure: Measure, rows: Sequence[Row]) -> Summary:
    """The seeds of one cell, preset and scale together."""
    good = [value for row in rows if (value := _good(measure, row.value)) is not None]
    if not good:
        return Summary(len(rows), len(rows), None, None)
    mean, interval = mean_and_interval(good)
    return Summary(len(rows), len(rows) - len(good), mean, interval if math.isfinite(interval) else None)


def verdict(
    measure: Measure, better: Mapping[int, float | None], worse: Mapping[int, float | None], level: float = 0.95
) -> Verdict:
    """Whether one cell is better than another over the seeds that both have, by a paired 95 % interval.

    A training that did not converge counts as worse than any that did; where that decides some seeds and not all,
    nothing is decided.

    Args:
        measure: Says which direction is better.
        better: Seed -> value of the cell that was published as the better one.
        worse: Seed -> value of the other one.
        level: Of the interval.

    Example:
        >>> verdict(Measure(), {0: 20.0, 1: 21.0, 2: 20.5}, {0: 25.0, 1: 26.0, 2: 25.2})
        'held'
        >>> verdict(Measure(), {0: 20.0, 1: 21.0}, {0: 19.0, 1: 23.0})
        'open'
        >>> verdict(Measure(), {0: None, 1: None}, {0: 19.0, 1: 23.0})
        'reversed'
    """
    seeds = sorted(better.keys() & worse.keys())
    if len(seeds) < 2:
        return "open"
    sign = -1.0 if measure.better == "higher" else 1.0
    gains: list[float] = []
    for seed in seeds:
        first, second = _good(measure, better[seed]), _good(measure, worse[seed])
        if first is None or second is None:
            gains.append(0.0 if first is None and second is None else math.inf if second is None else -math.inf)
        else:
            gains.append(sign * (second - first))
    if any(math.isinf(gain) for gain in gains):
        return "held" if min(gains) == math.inf else "reversed" if max(gains) == -math.inf else "open"
    mean, interval = mean_and_interval(gains)
    interval *= student_quantile(level, len(gains) - 1) / student_quantile(0.95, len(gains) - 1)
    # What a table does not print is no difference, however alike the seeds are.
    if not math.isfinite(interval) or abs(mean) <= max(interval, 0.5 * 10**-measure.digits):
        return "open"
    return "held" if mean > 0 else "reversed"


def _good(measure: Measure, value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) or measure.has_failed(value) else value


def ranks(values: Mapping[str, float], better: str | None) -> dict[str, int]:
    """Place of each among all, 1 for the best; equal ones share the better place.

    Example:
        >>> ranks({"a": 3.0, "b": 1.0, "c": 3.0}, "lower")
        {'a': 2, 'b': 1, 'c': 2}
    """
    sign = -1 if better == "higher" else 1
    return {name: 1 + sum(sign * other < sign * value for other in values.values()) for name, value in values.items()}


# ------------------------------------------------------------------------------------------------- one object


def scoreboard(rows: Mapping[str, Sequence[Row]], chosen: Iterable[str] | None = None) -> dict[str, Any]:
    """Everything that the scoreboard shows, as one JSON object.

    Args:
        rows: Id of a table -> its rows.
        chosen: Ids of the tables to show; by default all.

    Returns:
        ``{"tables": [TABLE, ...]}``. A ``TABLE`` has the words of its declaration (``id``, ``title``, ``chapter``,
        ``kind``, ``source``, ``also``, ``needs``, ``surrogate``, ``note``, ``pictures``), ``rows`` and ``columns`` as
        lists of ``{name, title, quoted}``, ``published`` (cell -> number), ``measures`` (cell -> measure),
        ``untrained`` (cell -> why), and ``boards``: one for each preset and scale with a result, ``{preset, title,
        scale, stale, undated, cells: {cell: CELL}, orderings: [ORDERING]}``, where ``undated`` says of
        which versions no ordering is known to have stood before. An ``ORDERING`` has ``says``, ``verdict``,
        ``pairs`` as ``[better, worse, verdict]``, and ``unmeasured``, the number of other pairs. A ``CELL``
        has ``text``, ``mean``, ``interval``, ``seeds``, ``failed``, ``difference`` from the published number, ``rank``
        and ``published_rank`` in its column, ``stale`` (its recipe is another one today), ``command``, ``recipe``
        (the first seed's as YAML; ``None`` where stale), ``deviations``, and ``runs``: a list of rows, each
        with a ``stale`` of its own.
    """
    wanted = every() if chosen is None else map(find, chosen)
    return {"tables": [_table(table, rows.get(table.id, ())) for table in wanted]}


def read_all(folder: Path) -> dict[str, list[Row]]:
    """The recorded rows of every table."""
    return {table.id: read_rows(folder, table.id) for table in every()}


def _table(table: Table, rows: Sequence[Row]) -> dict[str, Any]:
    names = list(table.names())
    boards = [
        _board(table, preset, scale, [row for row in rows if (row.preset, row.scale) == (preset, scale)])
        for preset, scale in dict.fromkeys((row.preset, row.scale) for row in rows)
        if preset in table.presets
    ]
    return {
        **{key: getattr(table, key) for key in ("id", "title", "chapter", "kind", "surrogate", "note")},
        "source": table.source.model_dump(),
        "also": [*table.also],
        "needs": table.needs.model_dump(mode="json"),
        "pictures": [*table.pictures],
        "presets": {name: preset.title for name, preset in table.presets.items()},
        "rows": [{"name": name, "title": line.title, "quoted": line.quoted} for name, line in table.rows.items()],
        "columns": [{"name": name, "title": line.title, "quoted": line.quoted} for name, line in table.columns.items()],
        "published": {cell: table.published_at(cell) for cell in names},
        "measures": {cell: table.measure_of(cell).model_dump() for cell in names},
        "untrained": {cell: why for cell in names if (why := table.why_not(cell))},
        "runnable": {preset: len(table.runnable(preset)) for preset in table.presets},
        "claims": [one.says for one in table.orderings],
        "reference": reference(table.curves) if table.curves else {},
        "boards": sorted(boards, key=lambda one: (_SCALES.index(one["scale"]), [*table.presets].index(one["preset"]))),
    }


_SCALES = ("paper", "small", "smoke")


def _board(table: Table, preset: str, scale: str, rows: Sequence[Row]) -> dict[str, Any]:
    by_cell: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.seed):
        by_cell.setdefault(row.cell, []).append(row)
    cells = {cell: _cell(table, preset, scale, cell, by_cell[cell]) for cell in table.names() if cell in by_cell}
    for column in table.columns:
        _rank(table, {cell: found for cell, found in cells.items() if cell.partition("/")[2] == column})
    values = {cell: {row.seed: row.value for row in found} for cell, found in by_cell.items()}
    dated = {cell for cell, found in by_cell.items() if all(row.dated for row in found)}
    orderings = [_ordering(table, preset, ordering, values, dated) for ordering in table.orderings]
    return {
        "preset": preset,
        "title": table.presets[preset].title,
        "scale": scale,
        "cells": cells,
        "orderings": [one for one in orderings if one["pairs"]],
        "undated": undated(rows) if orderings else "",
        "stale": any(found["stale"] for found in cells.values()),
    }


def undated(rows: Sequence[Row]) -> str:
    """Why some rows decide no ordering among themselves; nothing where there are none.

    Example:
        >>> undated([Row("paper", "small", "a/b", 0, 1.0, "finished", 2, 1.0, "0123abc?", "", "", "", "")])
        'version 0123abc is not in the history: orderings between its rows are open until they are measured again'
    """
    versions = dict.fromkeys(row.commit.removesuffix("?") for row in rows if not row.dated)
    if not versions:
        return ""
    names = ", ".join(versions)
    return f"version {names} is not in the history: orderings between its rows are open until they are measured again"


def _ordering(
    table: Table, preset: str, ordering: Ordering, values: Mapping[str, Mapping[int, float | None]], dated: set[str]
) -> dict[str, Any]:
    """An ordering with the verdict on each of its pairs that were trained.

    It is held where all of its pairs are that the preset has, and reversed where one of so many is, by an interval
    that is the wider the more of them there are: of twenty pairs one is reversed by chance.
    """
    trained = set(table.runnable(preset))
    pairs = [pair for pair in table.pairs(ordering) if trained.issuperset(pair)]
    seen = [pair for pair in pairs if pair[0] in values and pair[1] in values]

    def judged(better: str, worse: str, level: float) -> Verdict:
        if dated.isdisjoint((better, worse)):
            return "open"
        return verdict(table.measure_of(better), values[better], values[worse], level)

    found = [(better, worse, judged(better, worse, 0.95)) for better, worse in seen]
    whole: Verdict = "open"
    if any(judged(*pair, 1 - 0.05 / len(seen)) == "reversed" for pair in seen):
        whole = "reversed"
    elif found and len(seen) == len(pairs) and all(one == "held" for *_, one in found):
        whole = "held"
    return {"says": ordering.says, "verdict": whole, "pairs": found, "unmeasured": len(pairs) - len(seen)}


def _cell(table: Table, preset: str, scale: str, cell: str, rows: Sequence[Row]) -> dict[str, Any]:
    measure = table.measure_of(cell)
    found = summary(measure, rows)
    published = table.published_at(cell)
    difference = None
    if found.mean is not None and isinstance(published, int | float):
        difference = found.mean - published
    stale = [todays_hash(table.id, cell, preset, scale, row.seed) != row.recipe_hash for row in rows]
    return {
        "text": found.text(measure),
        **asdict(found),
        "difference": difference,
        "rank": None,
        "published_rank": None,
        "stale": any(stale),
        "command": _command(table, cell, preset, scale, rows[0].seed),
        "recipe": None if any(stale) else cell_recipe(table, cell, preset, scale, rows[0].seed)[0].to_yaml(),
        "deviations": table.deviations_of(cell, preset, scale),
        "runs": [{**asdict(row), "stale": old} for row, old in zip(rows, stale, strict=True)],
    }


def _rank(table: Table, cells: Mapping[str, dict[str, Any]]) -> None:
    """Place in the column, ours and the published one, among the cells that have both numbers."""
    ours = {cell: found["mean"] for cell, found in cells.items() if found["difference"] is not None}
    if len(ours) < 2:
        return
    better = table.measure_of(next(iter(ours))).better
    if better is None:
        return
    theirs = {cell: number for cell in ours if isinstance(number := table.published_at(cell), int | float)}
    own, published = ranks(ours, better), ranks(theirs, better)
    for cell in ours:
        cells[cell]["rank"], cells[cell]["published_rank"] = own[cell], published[cell]


@functools.cache
def todays_hash(table: str, cell: str, preset: str, scale: str, seed: int) -> str | None:
    """Hash of the recipe of a cell as it is today; ``None`` where it has none any more."""
    declared = find(table)
    if cell not in declared.runnable(preset):
        return None
    return cell_recipe(declared, cell, preset, scale, seed)[0].hash


def _command(table: Table, cell: str, preset: str, scale: str, seed: int) -> str:
    """What trains a cell alone."""
    chosen = "" if preset == next(iter(table.presets)) else f" --preset {preset}"
    seeds = f" --seeds {seed + 1}"
    return f"hypersphere reproduce {table.id} --scale {scale}{chosen} --cells '{cell}'{seeds}"


@functools.cache
def reference(name: str) -> dict[str, list[tuple[int, float]]]:
    """The authors' released curves: cell -> points."""
    text = (resources.files("hypersphere.reproduce") / "curves" / name).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found: dict[str, list[tuple[int, float]]] = {}
    for entry in csv.DictReader(lines):
        found.setdefault(entry["cell"], []).append((int(entry["step"]), float(entry["value"])))
    return found
