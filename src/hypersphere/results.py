"""Measured numbers: committed JSON rows, and the pages that are made of them.

Every number in the documentation comes from a row in ``docs/rows/*.json``; ``hypersphere docs`` turns the rows into
``docs/results.md``, ``docs/benchmarks.md`` and ``docs/precision.md``. A file holds a list of rows with these keys:

``kind``: ``"result"``, ``"benchmark"`` or ``"precision"``; ``group``: heading on the page; ``what``: what was
measured, ``metric`` and ``unit``; ``mean`` and ``interval`` (half width, or ``None``); ``seeds``; ``recipe`` and
``recipe_hash`` where there is one; ``command`` that prints the number; ``version`` of the code; ``hardware``;
``date``; ``published`` value where a paper has one, and a ``note``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hypersphere.errors import HypersphereError, check_choice
from hypersphere.evaluate import columns
from hypersphere.metrics import mean_and_interval
from hypersphere.recipe import Recipe
from hypersphere.runs import RunFolder

PAGES = {
    "result": ("results.md", "Results", "What the recipes give, as measured."),
    "benchmark": ("benchmarks.md", "Benchmarks", "How fast it is, as measured."),
    "precision": ("precision.md", "Precision", "How many digits hold, by type and place, as measured."),
}


MANY = 6
"""Commands, versions and so on of one table beyond which a page names only the first."""


class RowError(HypersphereError):
    """A row file that cannot be used."""


@dataclass(frozen=True)
class ResultRow:
    """One measured number and all that is needed to measure it again."""

    kind: str
    group: str
    what: str
    metric: str
    unit: str
    mean: float
    interval: float | None
    seeds: tuple[int, ...]
    command: str
    version: str
    hardware: str
    date: str
    recipe: str | None = None
    recipe_hash: str | None = None
    published: str | None = None
    note: str | None = None


def read_rows(folder: Path) -> list[ResultRow]:
    """All rows of ``folder/*.json`` in the order of file names."""
    if not folder.is_dir():
        raise RowError(f"there is no folder {folder} with result rows")
    rows = []
    for file in sorted(folder.glob("*.json")):
        try:
            entries = json.loads(file.read_text())
            found = [ResultRow(**{**entry, "seeds": tuple(entry["seeds"])}) for entry in entries]
        except (ValueError, TypeError, KeyError) as error:
            raise RowError(f"{file} is not a list of result rows: {error}") from error
        for row in found:
            if row.kind not in PAGES:
                raise RowError(f"{file}: unknown kind of row {row.kind!r}; known: {', '.join(PAGES)}")
        rows += found
    return rows


def write_rows(file: Path, rows: Sequence[ResultRow]) -> None:
    """Write a file of rows, replacing an older one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def rows_from_runs(
    runs: Sequence[RunFolder],
    group: str,
    note: str | None = None,
    matrix: str | None = None,
    published: Mapping[str, str] | None = None,
    details: Sequence[str] = (),
) -> list[ResultRow]:
    """The final metrics of finished runs, averaged over the seeds of each recipe.

    Args:
        runs: The runs.
        group: Heading of the rows.
        note: What a reader should know.
        matrix: A metric to make a matrix of: a run called ``tanh-cosine`` is in the row ``tanh``, column ``cosine``.
        published: Name of a run, or ``NAME.METRIC``, -> the published value of its first metric, or of that one.
        details: Metrics that are details elsewhere and are wanted here, too.

    Returns:
        A row for each recipe and metric.

    Raises:
        RowError: A run is not finished, or a published value is of no run or metric here.
    """
    published, placed = published or {}, set[str]()
    by_recipe: dict[str, list[tuple[Recipe, RunFolder]]] = {}
    for run in runs:
        if run.facts()["status"] != "finished":
            raise RowError(f"{run.path} is not finished: `hypersphere resume {run.path}` goes on with it")
        recipe = run.recipe()
        by_recipe.setdefault(recipe.hash_without_seed, []).append((recipe, run))
    measured = {run: run.evaluation()["metrics"] for members in by_recipe.values() for _, run in members}
    every = columns(list(measured.values())), columns(list(measured.values()), detail=True)
    known_metrics = every[0] | every[1]
    for name, chosen in (("matrix", [matrix] if matrix is not None else []), ("details", details)):
        for key in chosen:
            check_choice(name, key, tuple(known_metrics))
    wanted = [matrix] if matrix is not None else [*every[0], *details]
    rows = []
    for recipe_hash, members in by_recipe.items():
        recipe, first = members[0]
        facts = first.facts()
        values = [measured[run] for _, run in members]
        shown = [key for key in wanted if all(key in metrics for metrics in values)]
        for key in shown:
            metric = known_metrics[key]
            names = [f"{recipe.name}.{key}", *([recipe.name] if key == shown[0] else [])]
            known = next((name for name in names if name in published), "")
            placed.add(known)
            mean, interval = mean_and_interval([metrics[key] * metric.scale for metrics in values])
            rows.append(
                ResultRow(
                    kind="result",
                    group=group,
                    what=recipe.name if matrix is None else recipe.name.partition("-")[0],
                    metric=(matrix and recipe.name.partition("-")[2]) or metric.title,
                    unit=metric.unit,
                    mean=mean,
                    interval=interval if math.isfinite(interval) else None,
                    seeds=tuple(sorted(member.seed for member, _ in members)),
                    command=facts["command"],
                    version=facts["version"],
                    hardware=f"{facts['environment']['device']}, torch {facts['environment']['torch']}",
                    date=facts["finished"][:10],
                    recipe=recipe.name,
                    recipe_hash=recipe_hash,
                    published=published.get(known),
                    note=note,
                )
            )
    for name in sorted(published.keys() - placed):
        raise RowError(f"the published value of {name!r} is of no run here, or of none of its metrics")
    return rows


def write_pages(folder: Path, *, check: bool = False) -> list[Path]:
    """Write the pages from ``folder/rows``; returns those that changed (with ``check``, without writing)."""
    rows = read_rows(folder / "rows")
    changed = []
    for kind, (name, title, intro) in PAGES.items():
        text = _page(title, intro, [row for row in rows if row.kind == kind])
        file = folder / name
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            changed.append(file)
            if not check:
                file.write_text(text, encoding="utf-8")
    return changed


def _page(title: str, intro: str, rows: Sequence[ResultRow]) -> str:
    lines = [f"# {title}", "", f"{intro} Made by `hypersphere docs` from `docs/rows/*.json`; do not edit.", ""]
    for group in dict.fromkeys(row.group for row in rows):
        members = [row for row in rows if row.group == group]
        metrics = dict.fromkeys(row.metric for row in members)
        cells = {(row.what, row.metric): _value(row) for row in members}
        lines += [f"## {group}", "", f"| | {' | '.join(metrics)} |", f"|---|{'---:|' * len(metrics)}"]
        for what in dict.fromkeys(row.what for row in members):
            lines.append(f"| {what} | {' | '.join(cells.get((what, metric), '') for metric in metrics)} |")
        lines += ["", *_provenance(members), ""]
    return "\n".join(lines)


def _value(row: ResultRow) -> str:
    spread = f" ± {_number(row.interval)}" if row.interval is not None else ""
    published = f" (published: {row.published})" if row.published else ""
    return f"{_number(row.mean)}{spread} {row.unit}".strip() + published


def _number(value: float) -> str:
    if value and abs(value) < 0.01:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"


def _listed(values: Sequence[str]) -> str:
    """All of a few values; of many the first ones: the rows hold the rest."""
    if len(values) <= MANY:
        return "; ".join(values)
    return f"{'; '.join(values[:3])}; and {len(values) - 3} more in `docs/rows`"


def _provenance(rows: Sequence[ResultRow]) -> list[str]:
    """How the numbers of a group came about, each fact once."""
    facts = {
        "Command": [f"`{row.command}`" for row in rows],
        "Hardware": [row.hardware for row in rows],
        "Version": [f"{row.version}, {row.date}" for row in rows],
        "Seeds": [", ".join(map(str, row.seeds)) for row in rows],
        "Recipes": [f"{row.recipe} ({row.recipe_hash})" for row in rows if row.recipe],
        "Note": [row.note for row in rows if row.note],
    }
    lines = [f"- {title}: {_listed(list(dict.fromkeys(values)))}" for title, values in facts.items() if any(values)]
    if any(row.interval is not None for row in rows):
        lines.append("- ± is the half width of the 95 % confidence interval over the seeds.")
    return lines
