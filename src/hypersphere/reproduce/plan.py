"""What is to be done: trainings that are missing, in the order of a campaign, and whether their data are there."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, TypeAdapter

from hypersphere import data
from hypersphere.recipe.part import Keys
from hypersphere.reproduce.rows import by_table, folder_of, is_done, read_rows, rows_of, write_rows
from hypersphere.reproduce.table import Table, find
from hypersphere.reproduce.training import Place, Training, trainings


class Entry(Keys):
    """Some cells of a table, in a campaign."""

    table: str
    scale: Literal["small", "paper"]
    preset: str | None = None
    cells: tuple[str, ...] = ()
    seeds: int | None = Field(None, ge=1, description="by default the table's")


def campaign() -> list[Entry]:
    """The campaign of the package, most wanted first."""
    text = (resources.files("hypersphere.reproduce") / "campaign.yaml").read_text(encoding="utf-8")
    return TypeAdapter(list[Entry]).validate_python(yaml.safe_load(text))


def there(data_root: Path | None) -> set[str]:
    """Names of the data sets that can be loaded."""
    return {one.name for one in data.inventory(data_root, verify=False) if one.state in ("found", "embedded")}


def data_of(training: Training) -> str:
    """Name of the data set that a training needs; few-shot data are a division of another one."""
    name = training.recipe.data.name
    return {"cifar100-few-shot": "cifar100"}.get(name, name)


class Rows:
    """Recorded rows, and which trainings they are of.

    Args:
        folder: Where they are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, set[tuple[Place, str]]] = {}

    def has(self, training: Training) -> bool:
        """Whether there is a row of today's recipe for every cell of a training."""
        return all((place, training.recipe.hash) in self._of(place.table) for place in training.places)

    def _of(self, table: str) -> set[tuple[Place, str]]:
        if table not in self._known:
            rows = read_rows(self.folder, table)
            self._known[table] = {(Place(table, one.preset, one.scale, one.cell), one.recipe_hash) for one in rows}
        return self._known[table]

    def take(self, output: Path, found: Sequence[Training]) -> None:
        """Record the rows of those trainings that are done; their folders are below ``output``."""
        done = [(one, folder_of(output, one)) for one in found]
        pairs = [pair for one, folder in done if is_done(folder) for pair in rows_of(folder, one)]
        for table, rows in by_table(pairs):
            write_rows(self.folder, table, rows)
            self._known.pop(table.id, None)


def missing(found: Sequence[Training], rows: Rows, output: Path) -> list[Training]:
    """The trainings of which there is neither a row nor a folder that is done."""
    return [one for one in found if not is_done(folder_of(output, one)) and not rows.has(one)]


def campaign_trainings(known: Collection[str]) -> Iterator[Training]:
    """The trainings of the campaign whose data are there, in its order, each once with all its cells there.

    Args:
        known: Names of the data sets that can be loaded.
    """
    seen: dict[str, Training] = {}
    for entry in campaign():
        table: Table = find(entry.table)
        seeds = range(entry.seeds or table.seeds)
        for one in trainings(table, entry.scale, preset=entry.preset, cells=entry.cells, seeds=seeds):
            if one.recipe.hash in seen:
                seen[one.recipe.hash].places += one.places
            elif data_of(one) in known:
                seen[one.recipe.hash] = one
    yield from seen.values()
