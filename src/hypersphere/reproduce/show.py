"""What the commands print: boards of tables, the list of all of them, and progress."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table as Grid

from hypersphere.cli.terminal import console
from hypersphere.reproduce.rows import Row
from hypersphere.reproduce.scoreboard import NOT_CONVERGED, scoreboard
from hypersphere.reproduce.table import Table
from hypersphere.reproduce.training import SCALES, minutes_of

WORDS = {"smoke": "smoke: two steps on noise", "small": "small scale", "paper": "paper scale"}
COLOURS = {"held": "green", "reversed": "red", "open": "yellow"}


def title_of(table: Table) -> str:
    """What a table is called."""
    return f"{table.id}: {table.title} ({table.source.work}, {table.source.place})"


def plural(count: int, what: str) -> str:
    """A number of things.

    Example:
        >>> plural(1, "training"), plural(2, "training")
        ('1 training', '2 trainings')
    """
    return f"{count} {what}{'' if count == 1 else 's'}"


class Shown:
    """Progress on the terminal: all trainings together and each that is under way; elsewhere a line for each."""

    def __init__(self, total: int) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(),
            console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self.total, self.ended, self._tasks = total, 0, dict[str, TaskID]()

    def __enter__(self) -> Callable[[str, str, Mapping[str, Any]], None]:
        self.progress.start()
        self._all = self.progress.add_task("[bold]trainings", total=self.total)
        return self._tell

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def _tell(self, name: str, title: str, said: Mapping[str, Any]) -> None:
        if "steps" in said:
            self._tasks[name] = self.progress.add_task(escape(title), total=said["steps"])
        if "step" in said and name in self._tasks:
            self.progress.update(self._tasks[name], completed=said["step"])
        if ("ended" in said or "failed" in said) and name in self._tasks:
            self.progress.remove_task(self._tasks.pop(name))
        if said.get("ended") in ("finished", "diverged") or "failed" in said:
            self.ended += 1
            self.progress.advance(self._all)
            if not console.is_terminal:
                console.print(
                    f"{self.ended} of {self.total}: {title} {said.get('ended', 'failed')}",
                    highlight=False,
                    markup=False,
                )


# -------------------------------------------------------------------------------------------------------- a board


def show(table: Table, preset: str, scale: str, rows: Sequence[Row]) -> None:
    """Print a board: published numbers and ours side by side, in as many blocks of columns as the terminal needs."""
    own = [row for row in rows if (row.preset, row.scale) == (preset, scale)]
    board = scoreboard({table.id: own}, [table.id])["tables"][0]["boards"]
    cells: Mapping[str, Any] = board[0]["cells"] if board else {}
    console.print(
        f"{title_of(table)}, {WORDS[scale]}, {table.presets[preset].title or preset}", style="bold", highlight=False
    )
    if scale == "smoke":
        console.print(f"{plural(len(cells), 'cell')} ran through; numbers of two steps mean nothing", highlight=False)
        return
    columns = [one for one in table.columns if any(cell.endswith(f"/{one}") for cell in cells)]
    shown = [one for one in table.rows if any(cell.startswith(f"{one}/") for cell in cells) or table.rows[one].quoted]
    wide = console.options.update(max_width=10_000)  # what a grid wants, and not what it gets
    while columns:
        count = len(columns)
        while (
            count > 1
            and Measurement.get(console, wide, _grid(table, shown, columns[:count], cells)).maximum > console.width
        ):
            count -= 1
        console.print(_grid(table, shown, columns[:count], cells))
        columns = columns[count:]
    if left := len(table.rows) - len(shown):
        console.print(f"{plural(left, 'row')} more without results", style="dim", highlight=False)
    for one in board[0]["orderings"] if board else ():
        _show_ordering(one, scale, len({row.seed for row in own}))


def _show_ordering(one: Mapping[str, Any], scale: str, seeds: int) -> None:
    why = ""
    if one["verdict"] == "open":
        missing = f", {plural(one['unmeasured'], 'pair')} not measured" if one["unmeasured"] else ""
        why = "; one seed has no interval" if seeds < 2 else missing
    colour = COLOURS[one["verdict"]]
    console.print(f"[{colour}]{one['verdict']:8}[/] {escape(one['says'])} ({scale} scale{why})", highlight=False)


def _grid(table: Table, rows: Sequence[str], columns: Sequence[str], cells: Mapping[str, Any]) -> Grid:
    grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column("", style="cyan", no_wrap=True)
    with_difference = {one for one in columns if _differs(one, cells)}
    for column in columns:
        line = table.columns[column]
        measure = line.measure or table.measure
        unit = f" ({measure.unit})" if measure.unit else ""
        grid.add_column(f"{escape(line.title)}\npublished{unit}", justify="right", no_wrap=True)
        grid.add_column(f"\nmeasured{unit}", justify="right", no_wrap=True)
        if column in with_difference:
            grid.add_column("\ndifference", justify="right", no_wrap=True)
    for row in rows:
        texts = [escape(table.rows[row].title)]
        for column in columns:
            texts += _texts(table, f"{row}/{column}", cells, with_difference=column in with_difference)
        grid.add_row(*texts)
    return grid


def _differs(column: str, cells: Mapping[str, Any]) -> bool:
    return any(one["difference"] is not None for cell, one in cells.items() if cell.endswith(f"/{column}"))


def _texts(table: Table, cell: str, cells: Mapping[str, Any], *, with_difference: bool) -> list[str]:
    """Published number, ours, and how far apart they are."""
    measure, published, found = table.measure_of(cell), table.published_at(cell), cells.get(cell)
    shown = f"{published:.{measure.digits}f}" if isinstance(published, int | float) else published or ""
    texts = [shown, f"[bold]{found['text']}[/]" if found else ""]
    if with_difference:
        difference = found["difference"] if found else None
        texts.append("" if difference is None else f"{difference:+.{measure.digits}f}")
    return texts


# --------------------------------------------------------------------------------------------------------- the list


def list_tables(found: Sequence[tuple[Table, Sequence[Row]]], known: set[str], *, as_json: bool) -> None:
    """Print every table: what it needs, what is there, and what is done."""
    entries = [_entry(table, rows, known) for table, rows in found]
    if as_json:
        console.print_json(json.dumps(entries))
        return
    ready = sum(bool(entry["runnable"]) and entry["ready"] for entry in entries)
    console.print(f"{ready} of {plural(len(entries), 'table')} can be trained with the data that are here.\n")
    grid = Grid(box=None, pad_edge=False, padding=(0, 1), expand=True)
    for heading in ("table", "small", "paper", "min"):
        grid.add_column(heading, justify="left" if heading == "table" else "right", no_wrap=True)
    grid.add_column("what; data; verdicts so far", ratio=1, overflow="fold")
    for entry in entries:
        done = [f"{entry['done'][one]}/{entry['runnable']}" if entry["runnable"] else "-" for one in ("small", "paper")]
        minutes = f"{entry['minutes']['paper']:g}" if entry["minutes"]["paper"] else "-"
        verdicts = ", ".join(f"{count} {name}" for name, count in entry["verdicts"].items() if count)
        parts = [escape(entry["title"]), _state(entry), f"[bold]{verdicts}[/]" if verdicts else ""]
        grid.add_row(f"[cyan]{entry['id']}[/]", *done, minutes, "; ".join(filter(None, parts)))
    console.print(grid)
    console.print(
        "\nsmall, paper: cells with a result at that scale, of those that can be trained (those of this project: "
        "--rows docs/rows/tables in a checkout). min: minutes of one H200 for one seed of all cells at paper scale. "
        "`hypersphere reproduce TABLE --list` shows the cells of one, and what is missing.",
        style="dim",
        highlight=False,
    )


def _state(entry: Mapping[str, Any]) -> str:
    """The data of a table, and whether they are here."""
    words = [
        f"[green]{name} here[/]" if state == "found" else f"[yellow]{name} missing[/]"
        for name, state in entry["data"].items()
    ]
    if not words and entry["missing"]:
        words = ["[yellow]data missing[/]"]
    return ", ".join(words)


def _entry(table: Table, rows: Sequence[Row], known: set[str]) -> dict[str, Any]:
    """A table in the list."""
    preset = next(iter(table.presets))
    board = scoreboard({table.id: rows}, [table.id])["tables"][0]["boards"]
    verdicts = {
        f"{verdict} ({scale})": sum(
            one["verdict"] == verdict for found in board if found["scale"] == scale for one in found["orderings"]
        )
        for scale in ("paper", "small")
        for verdict in COLOURS
    }
    runnable = {cell for name in table.presets for cell in table.runnable(name)}
    done = {scale: len({row.cell for row in rows if row.scale == scale} & runnable) for scale in SCALES}
    return {
        "id": table.id,
        "title": table.title,
        "kind": table.kind,
        "also": [*table.also],
        "source": f"{table.source.work}, {table.source.place}",
        "chapter": table.chapter,
        "data": {name: "found" if name in known else "missing" for name in table.needs.data},
        "ready": set(table.needs.data) <= known,
        "missing": table.needs.missing,
        "surrogate": table.surrogate,
        "presets": [*table.presets],
        "cells": len(list(table.names())),
        "runnable": len(runnable),
        "done": done,
        "missing_cells": {scale: len(runnable) - count for scale, count in done.items()},
        "minutes": {
            scale: round(minutes_of(table, preset, scale) * len(table.runnable(preset)), 2)
            for scale in ("small", "paper")
        },
        "verdicts": verdicts,
        "pictures": [*table.pictures],
    }


def list_cells(table: Table) -> None:
    """Print the cells of a table, its presets, its claims, and what is missing."""
    grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("cell", "published", "presets, or why not"):
        grid.add_column(heading, overflow="fold")
    for cell in table.names():
        published = table.published_at(cell)
        why = table.why_not(cell)
        presets = [name for name in table.presets if cell in table.runnable(name)]
        grid.add_row(cell, "" if published is None else str(published), escape(why or ", ".join(presets)))
    console.print(grid)
    lines = [f"preset {name}: {preset.title}" for name, preset in table.presets.items()]
    lines += [f"claim: {one.says}" for one in table.orderings]
    lines += [f"needs: {table.needs.missing}"] if table.needs.missing else []
    lines += [f"surrogate: {table.surrogate}"] if table.surrogate else []
    lines += [f"picture: {one}" for one in table.pictures]
    if NOT_CONVERGED in map(table.published_at, table.names()):
        lines.append(f"{NOT_CONVERGED}: did not converge")
    for text in lines:
        console.print(text, style="dim", highlight=False, soft_wrap=True, markup=False)
