"""Metrics of runs as tables for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hypersphere.evaluate.registry import Metric, evaluations

MISSING = "—"
FEW = 8
"""Most members of a family of metrics that are named one by one."""


class Cell(NamedTuple):
    """A metric of a run as text, and whether it is the best of its column."""

    text: str
    best: bool


def columns(rows: Sequence[Mapping[str, float]], *, detail: bool = False) -> dict[str, Metric]:
    """The metrics that at least one run has, in the order in which they were measured.

    Args:
        rows: Metrics of runs.
        detail: Those that are details, and not the others.

    Example:
        >>> list(columns([{"accuracy": 0.9, "cross_entropy": 0.3}, {"eer": 0.1, "my_score": 3.0}]))
        ['accuracy', 'eer', 'my_score']
    """
    names = dict.fromkeys(name for row in rows for name in row)
    found = {name: evaluations.metric(name) for name in names}
    return {name: metric for name, metric in found.items() if metric.detail == detail}


def table(rows: Sequence[Mapping[str, float]], *, detail: bool = False) -> list[list[Cell]]:
    """The metrics of runs as people read them: a row a run, a column an entry of :func:`columns`.

    Values that look the same are equally good, and a single value is not marked.

    Args:
        rows: Metrics of runs.
        detail: Those that are details, and not the others.

    Example:
        >>> [row[0] for row in table([{"accuracy": 0.9}, {"accuracy": 0.95}])]
        [Cell(text='90.00%', best=False), Cell(text='95.00%', best=True)]
    """
    texts_by_column = []
    for key, metric in columns(rows, detail=detail).items():
        values = [row.get(key, math.nan) for row in rows]
        finite = [value for value in values if math.isfinite(value)]
        marked = None
        if metric.better is not None and len(finite) > 1:
            marked = metric.text((max if metric.better == "higher" else min)(finite))
        texts = [metric.text(value) if math.isfinite(value) else MISSING for value in values]
        texts_by_column.append([Cell(text, text == marked) for text in texts])
    return [[column[index] for column in texts_by_column] for index in range(len(rows))]


def details(rows: Sequence[Mapping[str, float]]) -> list[tuple[str, list[str]]]:
    """The details of runs in few lines: a title, and a text for each run.

    Of a family of more than :data:`FEW` members, such as the accuracy of every class, the least and the largest value
    stand for all.

    Args:
        rows: Metrics of runs.

    Example:
        >>> details([{"accuracy": 0.9, "cross_entropy": 0.25}])
        [('Test cross-entropy', ['0.2500'])]
        >>> details([{f"accuracy/{index}": index / 10 for index in range(10)}])
        [('Test accuracy of class *', ['0.00% to 90.00% (10)'])]
    """
    families: dict[str, list[str]] = {}
    for name in columns(rows, detail=True):
        families.setdefault(evaluations.declared(name).name, []).append(name)
    lines = []
    for pattern, names in families.items():
        shown = {name: [name] for name in names} if len(names) <= FEW else {pattern: names}
        for name, members in shown.items():
            metric = evaluations.metric(name)
            lines.append((metric.title, [_shown(row, members, metric) for row in rows]))
    return lines


def _shown(row: Mapping[str, float], names: Sequence[str], metric: Metric) -> str:
    """What a run has of a family, as one text."""
    values = [row[name] for name in names if math.isfinite(row.get(name, math.nan))]
    if not values:
        return MISSING
    if len(names) == 1:
        return metric.text(values[0])
    return f"{metric.text(min(values))} to {metric.text(max(values))} ({len(values)})"
