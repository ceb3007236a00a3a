"""The command that says what a head of very many classes takes on several GPUs, before anything is built."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any

import typer
from rich.table import Table

from hypersphere.cli.terminal import console
from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.losses.plan import MEASURED, HeadPlan, plan_head

THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
BYTES = {f"{letter}{kind}": base**n for n, letter in enumerate("kmgt", 1) for kind, base in (("b", 1000), ("ib", 1024))}
MOST = 10**15


def count_of(name: str, text: str) -> int:
    """A whole number as people write it.

    Example:
        >>> [count_of("classes", text) for text in ("100e6", "100_000_000", "100M")]
        [100000000, 100000000, 100000000]
    """
    found = _number(text, THOUSANDS)
    if found is None or (found.is_finite() and found != found.to_integral_value()):
        raise ArgumentError(name, f"must be a whole number such as 1000000, 1e6, 1_000_000 or 1M, got {text!r}")
    check_range(name, found, 1, MOST)  # type: ignore[arg-type]
    return int(found)


def bytes_of(name: str, text: str) -> int:
    """A size with its unit, in bytes.

    Example:
        >>> bytes_of("memory", "80GB"), bytes_of("memory", "1 GiB")
        (80000000000, 1073741824)
    """
    found = _number(text, BYTES)
    if found is None:
        raise ArgumentError(name, f"must be a size with its unit, such as 80GB or 80GiB, got {text!r}")
    check_range(name, found, 1, MOST)  # type: ignore[arg-type]
    return int(found)


def _number(text: str, units: dict[str, int]) -> Decimal | None:
    """A number times its unit; ``None`` of what is none."""
    parts = re.fullmatch(r"\s*([-+.\d_]*\d\.?(?:[eE][-+]?\d{1,3})?)\s*([a-zA-Z]*)\s*", text)
    if parts is None or parts[2].lower() not in units:
        return None
    try:
        return Decimal(parts[1]) * units[parts[2].lower()]
    except InvalidOperation:
        return None


def plan(
    classes: Annotated[str, typer.Option(help="number of classes: 100000000, 100e6, 100_000_000 or 100M")],
    dim: Annotated[str, typer.Option(help="feature dimension")] = "512",
    gpus: Annotated[str, typer.Option(help="number of GPUs")] = "1",
    batch: Annotated[str, typer.Option(help="samples of each GPU in a step")] = "128",
    memory: Annotated[str, typer.Option(help="memory of a GPU, as 80GB or 80GiB")] = "80GB",
    optimiser: Annotated[str, typer.Option(help="sgd, with momentum, or adam")] = "sgd",
    sample_rate: Annotated[float, typer.Option(help="share of the classes that sampling compares with")] = 0.1,
    precision: Annotated[str, typer.Option(help="low: products in 16 bit, as under autocast; or fp32")] = "low",
    rate: Annotated[
        float | None,
        typer.Option(help="TFLOP/s of a step's three products (default: as measured on an H200, in 16 bit alone)"),
    ] = None,
    bandwidth: Annotated[float, typer.Option(help="GB/s that a GPU sends while it receives as much")] = 50.0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Say what a head of very many classes takes on each of several GPUs, and which ways to train it fit."""
    check_choice("precision", precision, ("low", "fp32"))
    check_range("bandwidth", bandwidth, 0, open_low=True)
    if rate is not None:
        check_range("rate", rate, 0, open_low=True)
    counts = {"classes": classes, "dim": dim, "gpus": gpus, "batch": batch}
    sizes = {name: count_of(name, text) for name, text in counts.items()}
    low, available = precision == "low", bytes_of("memory", memory)
    order = (sizes[name] for name in ("batch", "classes", "dim", "gpus"))
    plans = plan_head(*order, optimiser=optimiser, sample_rate=sample_rate, low_precision=low)
    given: dict[str, Any] = {**sizes, "memory": available, "optimiser": optimiser, "sample_rate": sample_rate}
    given |= {"precision": precision, "bandwidth": bandwidth} | ({} if rate is None else {"rate": rate})
    measured = {"rate": MEASURED.rate / 1e12, "row": MEASURED.source} if rate is None and low else {}
    speed = rate if rate is not None else measured.get("rate")
    ways = [_numbers(one, available, speed, bandwidth) for one in plans]  # type: ignore[arg-type]
    content = {"given": given, "measured": measured, "modelled": ways}
    if as_json:
        typer.echo(json.dumps(content, indent=2))
    else:
        _show(content)


def _numbers(plan: HeadPlan, available: int, rate: float | None, bandwidth: float) -> dict[str, Any]:
    """All that is modelled of a way to train a head."""
    return {
        "name": plan.name,
        "why": plan.why,
        "fits": plan.memory.total <= available,
        "memory": asdict(plan.memory) | {"total": plan.memory.total},
        "head_ms": None if rate is None else plan.operations / rate / 1e9,
        "exchanged": dict(plan.exchanged) | {"total": plan.bytes_exchanged},
        "exchange_ms": plan.bytes_exchanged / bandwidth / 1e6,
    }


def _show(content: dict[str, Any]) -> None:
    given, measured, ways = content["given"], content["measured"], content["modelled"]
    whole, many = given["batch"] * given["gpus"], "" if given["gpus"] == 1 else "s"
    console.print(
        f"A head of {given['classes']:,} classes, {given['dim']:,} dimensions, on {given['gpus']:,} GPU{many} with "
        f"{given['batch']:,} samples each ({whole:,} in all), {given['optimiser']}. Of each GPU:\n",
        highlight=False,
        soft_wrap=True,
    )
    grid = Table(box=None, pad_edge=False, padding=(0, 2))
    grid.add_column("")
    grid.add_column("is", style="dim")
    for way in ways:
        grid.add_column(way["name"], justify="right", no_wrap=True)

    def row(title: str, cell: Callable[[dict[str, Any]], str]) -> None:
        grid.add_row(title, "modelled", *map(cell, ways))

    for part in ("weights", "gradient", "optimiser", "work", "total"):
        row(f"{part}, GB", lambda way, part=part: f"{way['memory'][part] / 1e9:,.2f}")  # type: ignore[misc]
    row(f"fits {given['memory'] / 1e9:g} GB", lambda way: "yes" if way["fits"] else "no")
    row("products of a step, ms", lambda way: "?" if way["head_ms"] is None else f"{way['head_ms']:,.2f}")
    row("sent and received a step, MB", lambda way: f"{way['exchanged']['total'] / 1e6:,.2f}")
    row("exchange, ms", lambda way: f"{way['exchange_ms']:,.2f}")
    console.print(grid)
    console.print()
    for way in ways:
        fits = "fits" if way["fits"] else f"does not fit, {way['memory']['total'] / 1e9:,.0f} GB"
        console.print(f"{way['name']} ({fits}): {way['why']}.", highlight=False, soft_wrap=True)
    console.print()
    if measured:
        speed = (
            f"Rate: {measured['rate']:.0f} TFLOP/s, measured: {measured['row']}. With fewer samples in all than these "
            f"{MEASURED.batch:,} a step takes longer than this: weights are read and written whatever the batch."
        )
    elif "rate" in given:
        speed = f"Rate: {given['rate']:g} TFLOP/s, given."
    else:
        speed = "Rate: unknown: no head was measured in float32 on a GPU; give --rate."
    console.print(speed, highlight=False, soft_wrap=True)
    console.print(
        f"Bandwidth: {given['bandwidth']:g} GB/s, given or assumed, not measured.", highlight=False, soft_wrap=True
    )
    console.print("Not in it: the model, the optimiser's step, and what an exchange waits.", highlight=False)
