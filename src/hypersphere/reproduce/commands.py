"""The commands ``hypersphere reproduce``, ``compare`` and ``docs``."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table as Grid

from hypersphere import results
from hypersphere.cli.options import DataRoot, Device, Runs
from hypersphere.cli.terminal import console
from hypersphere.data import DataError
from hypersphere.errors import ArgumentError, HypersphereError, check_choice, check_range
from hypersphere.reproduce import plan, pool
from hypersphere.reproduce.page import render, write_page
from hypersphere.reproduce.pages import markdown
from hypersphere.reproduce.rows import folder_of, read_rows, read_value
from hypersphere.reproduce.scoreboard import read_all, scoreboard, summary
from hypersphere.reproduce.show import Shown, list_cells, list_tables, plural, show, title_of
from hypersphere.reproduce.table import Table, TableError, every, find, tables
from hypersphere.reproduce.training import Training, cell_recipe, preset_of, search_trainings, trainings
from hypersphere.reproduce.work import RECORD, Job
from hypersphere.runs import RunFolder, load_data
from hypersphere.runs.folder import read_json

OUTPUT = Path("runs/reproduce")

RowsFolder = Annotated[Path | None, typer.Option(help="folder of the recorded rows (default: OUTPUT/rows)")]
Output = Annotated[Path, typer.Option("--output", "-o", help="folder for the runs, the rows and the page")]


def reproduce(
    table: Annotated[
        str | None, typer.Argument(metavar="TABLE", help="id of a table, such as thesis-2.2, or a file")
    ] = None,
    scale: Annotated[
        str, typer.Option(help="smoke (runs through on noise), small (a tenth of the steps) or paper (all of them)")
    ] = "small",
    preset: Annotated[
        str | None, typer.Option(help="whose constants: paper, released, ... (default: the first)")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="number of seeds, from 0 on (default: the table's, mostly 3)")
    ] = None,
    cells: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="only these: row, row/column, */column; several times")
    ] = None,
    jobs: Annotated[int, typer.Option(help="trainings at once; on a GPU they share it by MPS where it is found")] = 1,
    following: Annotated[
        float | None, typer.Option("--next", metavar="MINUTES", help="what is missing of the campaign, for so long")
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="what the table's constants were chosen by, on a split of the training set")
    ] = False,
    listing: Annotated[bool, typer.Option("--list", help="show all tables, or the cells of one")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the list as JSON")] = False,
    output: Output = OUTPUT,
    rows: RowsFolder = None,
    device: Device = "auto",
    data_root: DataRoot = None,
) -> None:
    """Train the cells of a published table and show them beside what was published."""
    if seeds is not None:
        check_range("seeds", seeds, 1)
    check_range("jobs", jobs, 1)
    recorded = plan.Rows(rows or output / "rows")
    if listing or as_json:
        listed = every() if table is None else [find(table)]
        found_rows = [(one, read_rows(recorded.folder, one.id)) for one in listed]
        list_tables(found_rows, plan.there(data_root), as_json=as_json)
        if table is not None and not as_json:
            list_cells(listed[0])
        return
    if following is not None:
        _next(following, recorded, output, jobs, device, data_root)
        return
    if table is None:
        raise ArgumentError("TABLE", "must be given: `hypersphere reproduce --list` shows all of them")
    wanted = find(table)
    chosen = preset_of(wanted, preset)
    if search:
        _search(wanted, recorded, output, seeds or 1, jobs, device, data_root)
        return
    if not wanted.runnable(chosen):
        raise TableError(_nothing(wanted))
    found = trainings(wanted, scale, preset=chosen, cells=cells or (), seeds=range(seeds or wanted.seeds))
    if table.endswith((".yaml", ".yml")):
        _check_presets(wanted, scale)
    _check_device(device)
    if scale != "smoke":
        _check_data(wanted, found, data_root)
    share = _share(found)
    failed: list[str] = []
    try:
        failed += _train(share, recorded, output, jobs, device, data_root, noise=scale == "smoke")
    finally:  # also of what was stopped: something may have ended before
        failed += _record(share, recorded, output)
        show(wanted, chosen, scale, read_rows(recorded.folder, wanted.id))
        _write_page(recorded, output)
    _raise(failed)


def compare(
    runs: Runs,
    table: Annotated[str, typer.Option(help="id of a table, such as thesis-2.2")],
    column: Annotated[str | None, typer.Option(help="column of the table (default: the first)")] = None,
) -> None:
    """Show runs of your own beside a published table."""
    wanted = find(table)
    name = column or next(iter(wanted.columns), None)
    if name is None:
        raise TableError(f"{wanted.id} has no columns to compare with")
    if name not in wanted.columns:
        check_choice("column", str(column), tuple(wanted.columns))
    measure = wanted.columns[name].measure or wanted.measure
    entries: list[tuple[float, str, str]] = []
    for row, line in wanted.rows.items():
        published = wanted.published_at(f"{row}/{name}")
        if isinstance(published, int | float):
            entries.append((float(published), escape(line.title), "published"))
    others = set()
    for path in runs:
        run = RunFolder.open(path)
        recipe, record = run.recipe(), read_json(path / RECORD) if (path / RECORD).is_file() else {}
        value = read_value(measure, run.rows(), record, path)
        where = f"{path}, {recipe.data.name}, {run.facts()['step']:,} steps"
        entries.append((value, f"[bold green]{escape(str(run.facts().get('name', path.name)))}[/]", escape(where)))
        others |= {recipe.data.name} - {_data_of(wanted, name)}
    entries.sort(key=lambda entry: entry[0], reverse=measure.better == "higher")
    unit = f" ({measure.unit})" if measure.unit else ""
    console.print(f"{title_of(wanted)}, {wanted.columns[name].title}", style="bold", highlight=False)
    grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("", f"{measure.title}{unit}", "where"):
        grid.add_column(heading, justify="right" if heading.startswith(measure.title) else "left", overflow="fold")
    for value, title, where in entries:
        grid.add_row(title, f"{value:.{measure.digits}f}", where)
    console.print(grid)
    for data in sorted(others):
        warnings.warn(
            f"the column is about {_data_of(wanted, name)}, and a run here was measured on {data}: these numbers "
            "cannot be compared",
            stacklevel=2,
        )


def _data_of(table: Table, column: str) -> str:
    """Name of the data set of a column."""
    for preset in table.presets:
        for cell in table.runnable(preset):
            if cell.endswith(f"/{column}"):
                return cell_recipe(table, cell, preset, "paper")[0].data.name
    return ", ".join(table.needs.data)


def docs(
    folder: Annotated[Path, typer.Option(help="folder with rows/ and the pages made from them")] = Path("docs"),
    check: Annotated[bool, typer.Option(help="only say whether the pages are up to date")] = False,
) -> None:
    """Write the pages of results, benchmarks, precision and the scoreboard from the measured rows in docs/rows."""
    board = scoreboard(read_all(folder / "rows" / "tables"), [*tables()])
    stale = results.write_pages(folder, check=check)
    for name, text in (("scoreboard.md", markdown(board)), ("scoreboard.html", render(board))):
        file = folder / name
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            stale.append(file)
            if not check:
                file.write_text(text, encoding="utf-8")
    changed = [
        f"{table['id']} {cell} ({one['scale']}, {one['preset']})"
        for table in board["tables"]
        for one in table["boards"]
        for cell, found in one["cells"].items()
        if found["stale"]
    ]
    if changed:
        warnings.warn(
            f"{len(changed)} cells of the scoreboard are of recipes that have changed, and are struck out: "
            f"{'; '.join(changed)}",
            stacklevel=2,
        )
    if check and stale:
        raise HypersphereError(f"{', '.join(map(str, stale))}: out of date, run `hypersphere docs`")
    console.print(f"{'Checked' if check else 'Wrote'} the pages in {folder}", highlight=False)


# ------------------------------------------------------------------------------------------------------ training


def _nothing(table: Table) -> str:
    """Why nothing of a table can be trained."""
    why = table.needs.missing or "; ".join(dict.fromkeys(filter(None, map(table.why_not, table.names()))))
    drawn = "".join(f"\n  {command}" for command in table.pictures)
    if drawn:
        return f"{table.id} is drawn and not trained:{drawn}"
    return f"nothing of {table.id} ({table.title}) can be trained here: {why or 'it has no cells'}"


def _check_data(table: Table, found: Sequence[Training], data_root: Path | None) -> None:
    """Say what is missing before anything begins."""
    known = plan.there(data_root)
    for one in found:
        name = plan.data_of(one)
        if name == "image-folder":
            try:
                load_data(one.recipe, data_root)
            except DataError as error:
                raise TableError(f"{error}\n{table.id} needs {table.needs.missing or 'these images'}") from error
            return  # the folder of one is that of all
        if name not in known:
            raise TableError(
                f"{table.id} needs the data set {name!r}, which was not found: `hypersphere data {name}` says how to "
                "get it. `--scale smoke` runs through without it"
            )


def _check_device(device: str) -> None:
    """Before there are processes; whether CUDA is there is asked without beginning to use it."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ArgumentError("device", f"is {device!r}, but torch sees no CUDA device here")


def _check_presets(table: Table, scale: str) -> None:
    """A mistake in any preset of a file of one's own is found now, and not when that preset is asked for."""
    for preset in table.presets:
        if table.runnable(preset):
            trainings(table, scale, preset=preset, seeds=[0])


def _record(found: Sequence[Training], recorded: plan.Rows, output: Path) -> list[str]:
    """Record what is done; what cannot be read is said, and stops nothing."""
    failed = []
    for one in found:
        try:
            if not recorded.has(one):
                recorded.take(output, [one])
        except HypersphereError as error:
            failed.append(f"{one.places[0].cell}: {error}")
    return failed


def _raise(failed: Sequence[str]) -> None:
    if failed:
        lines = list(dict.fromkeys(failed))
        raise HypersphereError(
            "\n".join([f"{len(lines)} trainings failed; the same command tries them again:", *lines])
        )


def _write_page(recorded: plan.Rows, output: Path) -> None:
    kept = {name: [row for row in rows if row.scale != "smoke"] for name, rows in read_all(recorded.folder).items()}
    page = write_page(scoreboard(kept), output / "scoreboard.html")
    console.print(f"Page: {page.resolve()}", highlight=False, soft_wrap=True)


def _share(found: Sequence[Training]) -> Sequence[Training]:
    """The part of this process, where a launcher started several."""
    rank, size = pool.share_of_processes()
    return found[rank::size]


def _job(output: Path, training: Training, data_root: Path | None, *, noise: bool) -> Job:
    folder = folder_of(output, training)
    return Job(training.command, training.recipe.name, folder, noise, data_root)


def _train(
    found: Sequence[Training],
    recorded: plan.Rows,
    output: Path,
    jobs: int,
    device: str,
    data_root: Path | None,
    *,
    noise: bool = False,
    minutes: float | None = None,
) -> list[str]:
    """Train what is missing; what ends is recorded at once. What failed is returned, in words."""
    mine = plan.missing(found, recorded, output)
    by_name = {folder_of(output, one).name: one for one in mine}
    todo = [_job(output, one, data_root, noise=noise) for one in mine]
    if not todo:
        return []
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    steps = {one.recipe.train.steps for one in mine}
    most = f"{min(steps):,}" if len(steps) == 1 else f"{min(steps):,} to {max(steps):,}"
    where = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    console.print(
        f"{plural(len(todo), 'training')} of {most} steps on {where}; Ctrl-C keeps what is done", highlight=False
    )
    failed: list[str] = []
    with Shown(len(todo)) as told, pool.compile_caches(output / ".compiled"), pool.shared_gpu(jobs, device):

        def tell(name: str, said: Mapping[str, Any]) -> None:
            if "ended" in said and said["ended"] != "interrupted":
                failed.extend(_record([by_name[name]], recorded, output))
            told(name, by_name[name].places[0].cell if name in by_name else name, said)

        outcome = pool.work(todo, workers=jobs, device=device, deadline=deadline, tell=tell)
    failed += [f"{by_name[name].places[0].cell} ({name}): {why}" for name, why in outcome.failed.items()]
    if outcome.left:
        console.print(
            f"{plural(len(outcome.ended), 'training')} ended, {len(outcome.left)} left: the same command goes on",
            highlight=False,
        )
    return failed


def _next(minutes: float, recorded: plan.Rows, output: Path, jobs: int, device: str, data_root: Path | None) -> None:
    """Fill the time with what is missing of the campaign."""
    check_range("next", minutes, 0, open_low=True)
    _check_device(device)
    found = list(plan.campaign_trainings(plan.there(data_root)))
    if not found:
        raise TableError("none of the campaign has its data here: `hypersphere data` shows what is missing")
    todo = plan.missing(found, recorded, output)
    console.print(
        f"{len(found) - len(todo)} of {plural(len(found), 'training')} of the campaign are done; the next ones for "
        f"{minutes:g} min",
        highlight=False,
    )
    # Shared before it is looked at what is missing, which the processes of a launcher see at different times.
    failed = _train(_share(found), recorded, output, jobs, device, data_root, minutes=minutes)
    for name in dict.fromkeys(place.table for one in found for place in one.places):
        table = find(name)
        rows = read_rows(recorded.folder, name)
        for preset, scale in dict.fromkeys((row.preset, row.scale) for row in rows):
            if any(row.recipe_hash in {one.recipe.hash for one in todo} for row in rows):
                show(table, preset, scale, rows)
    _write_page(recorded, output)
    _raise(failed)


def _search(
    table: Table, recorded: plan.Rows, output: Path, seeds: int, jobs: int, device: str, data_root: Path | None
) -> None:
    """Try the values of every search of a table, and show which is best beside the chosen one."""
    if not table.searches:
        others = ", ".join(one.id for one in every() if one.searches)
        raise TableError(f"{table.id} has no constants that were searched for; these have: {others}")
    _check_device(device)
    for search in table.searches:
        found = search_trainings(table, search, range(seeds))
        _check_data(table, [one for _, one in found], data_root)
        every_one = [one for _, one in found]
        failed = _train(_share(every_one), recorded, output, jobs, device, data_root)
        failed += _record(every_one, recorded, output)
        rows = read_rows(recorded.folder, table.id)
        grid = Grid(box=None, pad_edge=False, padding=(0, 2), title=f"{table.id}: {search.key}", title_justify="left")
        for heading in (search.key, "cell", "on a split of the training set"):
            grid.add_column(heading)
        for value, one in found:
            place = one.places[0]
            own = [row for row in rows if (row.preset, row.cell) == (place.preset, place.cell)]
            mark = " (chosen)" if value == search.chosen else ""
            if own and one.recipe.seed == 0:
                text = summary(table.measure_of(place.cell), own).text(table.measure_of(place.cell))
                grid.add_row(f"{value}{mark}", place.cell, text)
        console.print(grid)
        _raise(failed)
