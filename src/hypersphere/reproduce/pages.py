"""``docs/scoreboard.md``: the scoreboard as a page to read in a repository."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

WORDS = {"held": "held", "reversed": "**reversed**", "open": "open"}
SCALES = ("paper", "small")


def markdown(board: Mapping[str, Any], page: str = "scoreboard.html") -> str:
    """The scoreboard as Markdown.

    Args:
        board: What :func:`hypersphere.reproduce.scoreboard.scoreboard` gives.
        page: The page with curves, commands and recipes, to be linked.
    """
    tables = board["tables"]
    measured = [table for table in tables if any(one["scale"] in SCALES for one in table["boards"])]
    lines = [
        "# Scoreboard",
        "",
        "Every results table of the thesis and its papers: what was measured beside what was published, and which of",
        "the published orderings hold. Made by `hypersphere docs` from `docs/rows/tables/*.csv`; do not edit. The same",
        f"with curves, commands and recipes: [{page}]({page}).",
        "",
        f"{len(tables)} tables and groups of figures are declared, {len(measured)} of them have results.",
        "",
        *_counts(measured),
        "",
        "An ordering is **held** or **reversed** where a paired 95 % interval over the seeds says so of all or any of",
        "its pairs, otherwise *open*. A small scale is a short training; what it says holds for that scale alone.",
        "A number is a mean over seeds with its 95 % interval, then the published one, and the difference, measured",
        "less published, in the unit of the table. ~~Struck out~~: the recipe is another one today, and the number is",
        "to be measured again.",
        "",
    ]
    for table in measured:
        lines += _table(table)
    lines += ["## Without results so far", "", "| table | what | needs | cells |", "|---|---|---|---:|"]
    for table in tables:
        if table not in measured:
            cells = max(table["runnable"].values(), default=0)
            lines.append(f"| `{table['id']}` | {_safe(table['title'])} | {_needs(table)} | {cells or ''} |")
    return "\n".join(lines) + "\n"


def _counts(measured: list[dict[str, Any]]) -> Iterator[str]:
    """How many cells and orderings there are, scale by scale."""
    yield "| scale | cells measured | orderings held | reversed | open |"
    yield "|---|---:|---:|---:|---:|"
    for scale in SCALES:
        boards = [one for table in measured for one in table["boards"] if one["scale"] == scale]
        found = Counter(ordering["verdict"] for one in boards for ordering in one["orderings"])
        cells = sum(
            len({cell for one in table["boards"] if one["scale"] == scale for cell in one["cells"]})
            for table in measured
        )
        yield f"| {scale} | {cells} | {found['held']} | {found['reversed']} | {found['open']} |"


def _needs(table: Mapping[str, Any]) -> str:
    data = ", ".join(table["needs"]["data"])
    return _safe("; ".join(filter(None, (data, table["needs"]["missing"]))))


def _safe(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _table(table: Mapping[str, Any]) -> Iterator[str]:
    source = table["source"]
    page = f", page {source['page']}" if source["page"] else ""
    also = f"; {', '.join(source['also'])}" if source["also"] else ""
    yield f"## {table['id']}: {_safe(table['title'])}"
    yield ""
    yield f"{source['work']}, {source['place']}{page}{also}."
    for text in (table["surrogate"], table["note"]):
        if text:
            yield from ("", _safe(text.strip()))
    yield ""
    for board in table["boards"]:
        if board["scale"] in SCALES:
            yield from _board(table, board)


def _board(table: Mapping[str, Any], board: Mapping[str, Any]) -> Iterator[str]:
    """A grid of measured numbers, and the orderings under it."""
    columns = [one for one in table["columns"] if any(cell.endswith(f"/{one['name']}") for cell in board["cells"])]
    rows = [one for one in table["rows"] if any(cell.startswith(f"{one['name']}/") for cell in board["cells"])]
    yield f"**{board['scale'].capitalize()} scale**, preset `{board['preset']}` ({_safe(board['title'])})"
    yield ""
    yield f"| | {' | '.join(_safe(_heading(table, rows, one)) for one in columns)} |"
    yield f"|---|{'---:|' * len(columns)}"
    for row in rows:
        cells = [_cell(table, board, f"{row['name']}/{column['name']}") for column in columns]
        yield f"| {_safe(row['title'])} | {' | '.join(cells)} |"
    yield ""
    for one in board["orderings"]:
        pairs = Counter(verdict for *_, verdict in one["pairs"])
        counts = [f"{pairs[name]} {name}" for name in WORDS if pairs[name]]
        counts += [f"{one['unmeasured']} not measured"] if one["unmeasured"] else []
        of = ", ".join(counts) if len(one["pairs"]) + one["unmeasured"] > 1 else ""
        yield f"- {WORDS[one['verdict']]} ({board['scale']}{f'; pairs: {of}' if of else ''}): {_safe(one['says'])}"
    if board["undated"]:
        yield f"- {board['undated']}"
    deviations = dict.fromkeys(text for found in board["cells"].values() for text in found["deviations"])
    if deviations:
        yield f"- not as published: {_safe('; '.join(deviations))}"
    runs = [run for found in board["cells"].values() for run in found["runs"]]
    commits = ", ".join(dict.fromkeys(f"`{run['commit']}`" for run in runs))
    devices = ", ".join(dict.fromkeys(run["device"] for run in runs))
    seeds = len({run["seed"] for run in runs})
    yield f"- {seeds} seeds, {devices}, version {commits}, {max(run['date'] for run in runs)}"
    yield ""


def _heading(table: Mapping[str, Any], rows: list[dict[str, Any]], column: Mapping[str, Any]) -> str:
    measures = [table["measures"].get(f"{row['name']}/{column['name']}") for row in rows]
    measure = next(filter(None, measures))
    unit = f" ({measure['unit']})" if measure["unit"] else ""
    return f"{column['title']}: {measure['title'].lower()}{unit}"


def _cell(table: Mapping[str, Any], board: Mapping[str, Any], cell: str) -> str:
    """Ours, the published number, and how far apart they are."""
    found, published = board["cells"].get(cell), table["published"].get(cell)
    if found is None:
        return "" if published is None else f"(published {published})"
    digits = table["measures"][cell]["digits"]
    text = f"~~{found['text']}~~" if found["stale"] else found["text"]
    if published is None:
        return text
    shown = f"{published:.{digits}f}" if isinstance(published, int | float) else published
    difference = "" if found["difference"] is None else f", {found['difference']:+.{digits}f}"
    return f"{text} ({shown}{difference})"
