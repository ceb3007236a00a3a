"""What all pictures share: the look, the colours and how they are written."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from hypersphere.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")

FORMATS = ("png", "svg", "pdf")
DPI = 130
HEAVY = 200_000
"""Bytes from which on a PNG gets fewer colours."""
INK, MUTED, FAINT = "#222222", "#717581", "#d9dce0"
MARKERS = ("o", "s", "X")
"""A further round through the palette has another shape."""

STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "figure.facecolor": "white",
    # Texts stay texts in vector files, and the same figure gives the same file.
    "svg.fonttype": "none",
    "svg.hashsalt": "hypersphere",
    "pdf.fonttype": 42,
}


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Decorator: draw with :data:`STYLE`, whatever the user's own settings are, and leave these alone."""

    @functools.wraps(draw)
    def inner(*args: P.args, **options: P.kwargs) -> R:
        with mpl.rc_context():
            mpl.rcdefaults()
            for name, value in STYLE.items():
                mpl.rcParams[name] = value
            return draw(*args, **options)

    return inner


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches, outside of pyplot."""
    return Figure(figsize=(width, height), layout="constrained")


@styled
def save(figure: Figure, output: Path) -> Path:
    """Write a figure, whole or not at all; the ending of the name says as what.

    Args:
        figure: The figure.
        output: File that ends in ``.png``, ``.svg`` or ``.pdf``; folders above it are made.

    Returns:
        ``output``.
    """
    output = Path(output)
    kind = output.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise ArgumentError("output", f"must end in {', '.join(f'.{f}' for f in FORMATS)}, got {output.name!r}")
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".writing-{os.getpid()}-{output.name}")
    try:
        if kind == "png":
            _write_png(figure, temporary)
        else:
            undated: dict[str, Any] = {"Date": None} if kind == "svg" else {"CreationDate": None}
            figure.savefig(temporary, format=kind, metadata=undated)
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)
    return output


def _write_png(figure: Figure, file: Path) -> None:
    """A PNG, of 256 colours where one of all colours would be heavy on a page."""
    pixels = io.BytesIO()
    figure.savefig(pixels, format="png", dpi=DPI)
    picture = Image.open(pixels).convert("RGB")
    picture.save(file, format="png", optimize=True, dpi=(DPI, DPI))
    if file.stat().st_size > HEAVY:
        fewer = picture.quantize(256, dither=Image.Dither.NONE)
        fewer.save(file, format="png", optimize=True, dpi=(DPI, DPI))


def plain(text: object, limit: int = 28) -> str:
    """A name from a file, so that matplotlib shows it as it is: it would take dollars for formulas.

    Example:
        >>> plain("a name that is far too long for a legend")
        'a name that is far too long…'
    """
    shown = str(text)
    shown = (shown if len(shown) <= limit else f"{shown[: limit - 1]}…").replace("$", r"\$")
    # Legends leave out what begins with an underscore.
    return f"\N{ZERO WIDTH SPACE}{shown}" if shown.startswith("_") else shown


def angle_axis(axes: Axes, which: str = "x", end: int = 180, step: int = 45, label: str | None = None) -> None:
    """Degrees from 0 to ``end`` on an axis."""
    ticks = list(range(0, end + 1, step))
    if which == "x":
        axes.set_xlim(0, end)
        axes.set_xticks(ticks)
    else:
        axes.set_ylim(0, end)
        axes.set_yticks(ticks)
    if label is not None:
        (axes.set_xlabel if which == "x" else axes.set_ylabel)(label)
