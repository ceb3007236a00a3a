"""The command that copies an example: new."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from hypersphere.cli.names import families, find_family
from hypersphere.cli.terminal import console
from hypersphere.errors import ArgumentError, HypersphereError


def examples() -> dict[str, str]:
    """Text of the example of every family that has one, and of a recipe, by the family in the singular."""
    found = {}
    for file in resources.files("hypersphere.templates").iterdir():
        stem, _, ending = file.name.rpartition(".")
        if ending in ("py", "yaml") and not stem.startswith("_"):
            found[stem.replace("_", " ")] = file.read_text(encoding="utf-8")
    return dict(sorted(found.items()))


def fill(text: str, name: str, file: Path | None = None) -> str:
    """An example with another name in place of ``my-name``, as a class, as a variable and as a file, too.

    Example:
        >>> fill("@register('my-name') class MyName; my_name.py", "Cubed cosine")
        "@register('cubed-cosine') class CubedCosine; cubed_cosine.py"
    """
    words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower())
    if not words or not words[0][0].isalpha() or re.search(r"[^\w\s-]", name):
        raise ArgumentError("name", f"must be letters, digits and hyphens, and begin with a letter, got {name!r}")
    filled = {} if file is None else {f"my_name{file.suffix}": str(file)}
    filled |= {"my-name": "-".join(words), "my_name": "_".join(words), "MyName": "".join(map(str.capitalize, words))}
    return re.sub("|".join(map(re.escape, filled)), lambda match: filled[match[0]], text)


def new(
    family: Annotated[str, typer.Argument(help="loss, margin, operator, energy, model, dataset, recipe, ...")],
    name: Annotated[str, typer.Argument(help="name of the new member")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="file to write (default: NAME.py, or NAME.yaml of a recipe)"),
    ] = None,
) -> None:
    """Copy a documented example of a loss, margin, model, ... into a file of your own, which works as it is."""
    texts = examples()
    chosen = find_family(family, texts)
    ending = "yaml" if chosen == "recipe" else "py"
    file = output or Path(fill("my_name", name) + f".{ending}")
    if file.suffix != f".{ending}":
        raise ArgumentError("output", f"must end in .{ending}, got {file.name!r}")
    own = fill("my-name", name)
    registry = next((one for one in families().values() if one.family == chosen), None)
    if registry is not None and own in registry:
        raise ArgumentError("name", f"must be new: {own!r} is a {chosen} already")
    text = fill(texts[chosen], name, file)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise HypersphereError(f"{file} is there already: give another name, or another file by -o") from None
    console.print(f"Wrote {file}. Try:", highlight=False, soft_wrap=True, markup=False)
    for line in re.findall(r"^(?:# )?(hypersphere .*)$", text, re.MULTILINE):
        console.print(f"  {line}", highlight=False, soft_wrap=True, markup=False)
