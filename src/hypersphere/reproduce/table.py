"""A published table as a declaration: what is trained for each cell, what was published, and what should hold.

A table is a YAML file in ``tables/``. Its cells are the pairs of a row and a column; each of them names a recipe and
``key=value`` changes, those of the table first, then those of the column, the row, the cell and the preset. Cells whose
recipes resolve to the same values are one training, in whichever tables they stand.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import Field

from hypersphere.errors import HypersphereError
from hypersphere.recipe.part import Keys
from hypersphere.registry import did_you_mean

Changes = tuple[str, ...]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+_-]*$")]
Number = float | None


class TableError(HypersphereError):
    """A table that does not exist, or whose declaration cannot be used."""

    exit_code = 2


class Source(Keys):
    """Where the published numbers stand."""

    work: Literal["thesis", "OPT paper", "NIPS 2017 paper"]
    place: str = Field(description="'table 7.1', 'figure 5.4'")
    page: str = Field("", description="page of the work, or the section that holds it")
    also: tuple[str, ...] = Field((), description="the same table in other works: 'OPT paper, table 1'")


class Measure(Keys):
    """How the number of a cell is read from a finished training."""

    title: str = "Test error"
    unit: str = "%"
    metric: str = Field("accuracy", description="name of a metric; with a * the sum of all that fit")
    exclude: str = Field("", description="one that fits and does not count, such as energy/head")
    split: str = Field("test", description="which rows of metrics: test, train, energy, orthogonality, or run")
    at: Literal["last", "first", "best"] = "last"
    read: Literal["error", "percent", "plain"] = Field(
        "error", description="'error': 100 (1 - value); 'percent': 100 value; 'plain': the value"
    )
    factor: float = Field(1.0, gt=0, description="what the value is multiplied by")
    better: Literal["lower", "higher"] | None = "lower"
    digits: int = Field(2, ge=0)
    failed: float | None = Field(
        None, description="a value that is as bad or worse counts as not converged: an error of 99 % for 100 classes"
    )

    def value(self, found: float) -> float:
        """A metric in the unit of the table.

        Example:
            >>> round(Measure().value(0.75), 6)
            25.0
        """
        shares = {"error": 100 * (1 - found), "percent": 100 * found, "plain": found}
        return self.factor * shares[self.read]

    def has_failed(self, value: float) -> bool:
        """Whether a value is what chance gives, or worse.

        Example:
            >>> Measure(failed=98).has_failed(99.0), Measure(failed=98).has_failed(30.0)
            (True, False)
        """
        if self.failed is None:
            return False
        return value <= self.failed if self.better == "higher" else value >= self.failed


class Line(Keys):
    """A row or a column."""

    title: str
    recipe: str | None = Field(None, description="recipe of its cells, in place of the table's")
    set: Changes = Field((), description="changes to the recipe")
    measure: Measure | None = Field(None, description="of a column that shows another number of the same training")
    quoted: bool = Field(False, description="numbers that the work takes over from others: nothing is trained")
    absent: str = Field("", description="why nothing can be trained for it here")


class Preset(Keys):
    """Whose constants are taken: those of the text, of the released code, or one schedule for all methods."""

    title: str = ""
    set: Changes = ()
    rows: Mapping[str, Changes] = Field({}, description="row -> changes")
    columns: Mapping[str, Changes] = Field({}, description="column -> changes")
    only: tuple[str, ...] = Field((), description="patterns of the cells that it has; by default all")


class Ordering(Keys):
    """What the work says about its own numbers: from the best to the worst.

    An item is a cell, ``row/column``, or one of them with ``*`` for the other, which then is any that all items have.
    """

    says: str
    order: tuple[str, ...] = Field(min_length=2, description="items from the best to the worst")
    only: tuple[str, ...] = Field((), description="which rows or columns the * stands for; by default all")


class Deviation(Keys):
    """What is not as published."""

    text: str
    presets: tuple[str, ...] = Field((), description="of which presets; by default all")
    scales: tuple[Literal["smoke", "small", "paper"], ...] = Field((), description="at which scales; by default all")
    cells: tuple[str, ...] = Field((), description="patterns of cells; by default all")


class Scale(Keys):
    """How long the cells are trained at a scale."""

    share: float | None = Field(None, gt=0, le=1, description="share of the published steps")
    set: Changes = Field((), description="further changes")


class Search(Keys):
    """Values that the work does not give, chosen on a split of the training set."""

    key: str = Field(description="the key whose value was chosen")
    values: tuple[Any, ...]
    chosen: Any
    cells: tuple[str, ...] = Field(description="patterns of the cells that it was chosen on")
    preset: str = Field("", description="the preset; by default the first")
    scale: Literal["small", "paper"] = "small"
    set: Changes = Field(("data.validation=5000",), description="how the training set is divided")
    also: Changes = Field((), description="keys that follow the chosen one, as '{value}' in place of the number")


class Needs(Keys):
    """What must be there before a table can be trained."""

    data: tuple[str, ...] = Field((), description="data sets by name")
    missing: str = Field("", description="what nothing here can read, and how to get it")
    minutes: float = Field(0.0, ge=0, description="of one H200, all cells of a preset, one seed, at paper scale")


class Cell(Keys):
    """A cell that differs from what its row and column say."""

    recipe: str | None = None
    set: Changes = ()
    absent: str = ""


class Table(Keys):
    """A published table, or a group of figures."""

    id: Name
    kind: Literal["table", "figure"] = "table"
    also: tuple[Name, ...] = Field((), description="other names of the same table")
    title: str
    chapter: str
    source: Source
    surrogate: str = Field("", description="what stands in for data that are not to be had")
    needs: Needs = Needs()
    measure: Measure = Measure()
    recipe: str | None = None
    set: Changes = ()
    presets: Mapping[Name, Preset] = Field({"paper": Preset(title="as in the text")}, min_length=1)
    scales: Mapping[Literal["smoke", "small", "paper"], Scale] = Field({})
    rows: Mapping[Name, Line] = Field({})
    columns: Mapping[Name, Line] = Field({})
    cells: Mapping[str, Cell] = Field({}, description="row/column -> what is different there")
    published: Mapping[str, Mapping[str, float | str | None]] = Field(
        {}, description="row -> column -> number; 'N/C': did not converge; null: no such cell"
    )
    orderings: tuple[Ordering, ...] = ()
    deviations: tuple[Deviation, ...] = ()
    searches: tuple[Search, ...] = ()
    seeds: int = Field(3, ge=1, description="seeds of a cell where nobody says how many")
    curves: str = Field("", description="file in curves/ with the authors' released log")
    pictures: tuple[str, ...] = Field((), description="commands that draw a figure, {runs} stands for its runs")
    note: str = ""

    @pydantic.model_validator(mode="after")
    def _names_fit(self) -> Table:
        for problem in (*self._unknown_lines(), *self._wrong_claims()):
            raise ValueError(problem)
        return self

    def _unknown_lines(self) -> Iterator[str]:
        """Names that are none of a row, a column or a cell."""
        for row, cells in self.published.items():
            if row not in self.rows:
                yield f"published: {row!r} is no row"
            yield from (f"published: {column!r} is no column" for column in cells if column not in self.columns)
        yield from (f"cells: {name!r} is no cell: write row/column" for name in self.cells if not self.is_cell(name))
        for place, preset in self.presets.items():
            unknown = {*preset.rows} - {*self.rows} | {*preset.columns} - {*self.columns}
            yield from (f"presets.{place}: {name!r} is no row or column" for name in sorted(unknown))

    def _wrong_claims(self) -> Iterator[str]:
        """Orderings and searches that speak of what is not there."""
        for ordering in self.orderings:
            if not self.pairs(ordering):
                yield f"orderings: {' > '.join(ordering.order)} compares no cells of this table"
        for search in self.searches:
            if search.chosen not in search.values:
                yield f"searches: {search.chosen!r} is none of the values that were tried"

    def is_cell(self, name: str) -> bool:
        """Whether a name is one of a cell."""
        row, _, column = name.partition("/")
        return row in self.rows and column in self.columns

    def names(self) -> Iterator[str]:
        """Every cell of the grid, ``row/column``, that is not left empty in the work."""
        for row in self.rows:
            for column in self.columns:
                if column in self.published.get(row, {column: None}) or f"{row}/{column}" in self.cells:
                    yield f"{row}/{column}"

    def published_at(self, cell: str) -> float | str | None:
        """The published number of a cell."""
        row, _, column = cell.partition("/")
        return self.published.get(row, {}).get(column)

    def measure_of(self, cell: str) -> Measure:
        """How the number of a cell is read."""
        row, _, column = cell.partition("/")
        return self.columns[column].measure or self.rows[row].measure or self.measure

    def pairs(self, ordering: Ordering) -> list[tuple[str, str]]:
        """Every pair of cells of an ordering, the better one first: neighbours, and so the whole order."""
        known = set(self.names())
        found = []
        for better, worse in zip(ordering.order, ordering.order[1:], strict=False):
            stars = {part: name for part, name in enumerate(("row", "column")) if _part(better, part) == "*"}
            if stars != {part: name for part, name in enumerate(("row", "column")) if _part(worse, part) == "*"}:
                raise ValueError(f"orderings: {better} and {worse} must have their * in the same place")
            if not stars:
                found.append((better, worse))
                continue
            places = self.rows if 0 in stars else self.columns
            for name in ordering.only or places:
                pair = better.replace("*", name), worse.replace("*", name)
                if known.issuperset(pair):
                    found.append(pair)
        for cell in (cell for pair in found for cell in pair):
            if cell not in known:
                raise ValueError(f"orderings: {cell!r} is no cell.{did_you_mean(cell, known)}")
        return found

    def why_not(self, cell: str) -> str:
        """Why nothing is trained for a cell; empty where something is."""
        row, _, column = cell.partition("/")
        if self.rows[row].quoted or self.columns[column].quoted:
            return "quoted from another work"
        own = self.cells.get(cell, Cell())
        reason = own.absent or self.rows[row].absent or self.columns[column].absent
        if reason:
            return reason
        if (own.recipe or self.rows[row].recipe or self.columns[column].recipe or self.recipe) is None:
            return self.needs.missing or "no recipe"
        return ""

    def runnable(self, preset: str) -> list[str]:
        """The cells of a preset for which something can be trained."""
        only = self.presets[preset].only
        return [
            cell
            for cell in self.names()
            if not self.why_not(cell) and (not only or any(matches(cell, pattern) for pattern in only))
        ]

    def changes(self, cell: str, preset: str) -> tuple[str, Changes]:
        """Recipe and changes of a cell under a preset, before its scale."""
        row, _, column = cell.partition("/")
        own, lines, chosen = self.cells.get(cell, Cell()), (self.columns[column], self.rows[row]), self.presets[preset]
        recipe = own.recipe or lines[1].recipe or lines[0].recipe or self.recipe
        if recipe is None or self.why_not(cell):
            raise TableError(f"{self.id}: nothing can be trained for {cell}: {self.why_not(cell) or 'no recipe'}")
        parts = (self.set, lines[0].set, lines[1].set, own.set)
        of_preset = (chosen.set, chosen.columns.get(column, ()), chosen.rows.get(row, ()))
        return recipe, tuple(change for part in (*parts, *of_preset) for change in part)

    def deviations_of(self, cell: str, preset: str, scale: str) -> list[str]:
        """What is not as published in a cell."""
        return [
            one.text
            for one in self.deviations
            if (not one.presets or preset in one.presets)
            and (not one.scales or scale in one.scales)
            and (not one.cells or any(matches(cell, pattern) for pattern in one.cells))
        ]


def _part(item: str, part: int) -> str:
    row, _, column = item.partition("/")
    return (row, column)[part]


def matches(cell: str, pattern: str) -> bool:
    """Whether a cell fits a pattern: ``row``, ``row/column``, ``*/column``, with ``*`` for anything.

    Example:
        >>> matches("softmax/error", "soft*"), matches("softmax/error", "*/accuracy")
        (True, False)
    """
    whole = pattern if "/" in pattern else f"{pattern}/*"
    return re.fullmatch(".*".join(map(re.escape, whole.split("*"))), cell) is not None


# ------------------------------------------------------------------------------------------------------ reading


def parse(text: str, title: str) -> Table:
    """A table from the text of its file.

    Args:
        text: YAML.
        title: What messages call it.
    """
    try:
        content = yaml.load(text, Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except yaml.YAMLError as error:
        raise TableError(f"{title}: not valid YAML: {error}") from error
    try:
        return Table.model_validate(content)
    except pydantic.ValidationError as error:
        lines = [_explained(one) for one in error.errors()]
        raise TableError("\n".join(f"{title}: {line}" for line in lines)) from error


def _explained(error: Mapping[str, Any]) -> str:
    """A mistake that pydantic found, with its place and the nearest known word."""
    place = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        kinds = (Table, Source, Measure, Line, Preset, Ordering, Deviation, Scale, Search, Needs, Cell)
        keys = {key for kind in kinds for key in kind.model_fields}
        return f"{place}: is not a known key.{did_you_mean(str(error['loc'][-1]), keys)}"
    text = error["msg"].removeprefix("Value error, ")
    return f"{place}: {text}" if place else text


class _Loader(yaml.SafeLoader):
    """YAML in which numbers such as 5e-4 are numbers and keys stay texts."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    keys = [str(key.value) for key, _ in node.value]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise yaml.constructor.ConstructorError(None, None, f"{twice!r} is given twice", node.start_mark)
    return {key: loader.construct_object(value, deep=True) for key, (_, value) in zip(keys, node.value, strict=True)}


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


@functools.cache
def tables() -> dict[str, Table]:
    """Every table by its id, in the order of chapters."""
    folder = resources.files("hypersphere.reproduce") / "tables"
    files = sorted(file.name for file in folder.iterdir() if file.name.endswith(".yaml"))
    found = {}
    for name in files:
        table = parse((folder / name).read_text(encoding="utf-8"), f"tables/{name}")
        if table.id != name.removesuffix(".yaml"):
            raise TableError(f"tables/{name}: id must be the name of the file, got {table.id!r}")
        found[table.id] = table
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def _order(name: str) -> tuple[Any, ...]:
    """Thesis before papers, chapters before appendices, numbers as numbers, tables before figures."""
    work, _, place = name.partition("-")
    number = place.removeprefix("fig-")
    parts = re.findall(r"\d+|[A-Za-z]+", number)
    found = [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]
    return work != "thesis", found[:1], number != place, found


_own: dict[str, Table] = {}  # tables of a user's own files, by id


def find(name: str) -> Table:
    """A table by its id or another of its names, or from a YAML file of one's own.

    Example:
        >>> find("thesis-2.2").source.place
        'table 2.2'
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise TableError(f"there is no file {name}: give the YAML file of a table, or the id of one")
        table = parse(path.read_text(encoding="utf-8"), name)
        if table.id in tables():
            raise TableError(f"{name}: id {table.id!r} is that of a published table: choose another one")
        _own[table.id] = table
        return table
    known = {alias: table for table in (*tables().values(), *_own.values()) for alias in (table.id, *table.also)}
    name = f"thesis-{name}" if f"thesis-{name}" in known else name
    if name not in known:
        hint = did_you_mean(name, known)
        raise TableError(f"no table {name!r}.{hint} `hypersphere reproduce --list` shows all of them")
    return known[name]


def every() -> list[Table]:
    """All published tables, and those of one's own files that were read."""
    return [*tables().values(), *_own.values()]
