"""The page of a verification: curves, scores, the calibrated threshold, and the pairs that were hardest."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from hypersphere.drawing import Floats, colour, evenly
from hypersphere.metrics import Calibration, Verification, det, roc
from hypersphere.report.figures import Figure, numbers, plotly_layout, plotly_legend
from hypersphere.report.page import frame, plot_box, titled_section, write_page
from hypersphere.tasks.faces.data import Pairs

HARDEST = 12
"""Pairs of each kind that are shown."""
MAX_CURVE_POINTS = 2000
BINS = 80
_GREY = "rgba(136,136,136,.9)"
_DET_TICKS = (0.0001, 0.001, 0.01, 0.05, 0.2, 0.5, 0.8, 0.95)
_MEANINGS = {
    "Genuine, impostor": "A genuine pair is of one person, an impostor pair of two.",
    "TAR, FAR": "Share of genuine and of impostor pairs that are accepted, which means taken for one person.",
    "FRR": "Share of genuine pairs that are refused: 1 - TAR.",
    "Equal-error rate": "The error at the threshold where FAR and FRR are equal. Lower is better.",
    "Interval": "Where the number would lie with other people of the same kind, in so many cases of a hundred.",
}


@dataclass(frozen=True, eq=False)
class VerificationPage:
    """What the page of a verification shows.

    Attributes:
        name: What was verified.
        pairs: The pairs.
        scores: ``(P,)``, higher for pairs that are more alike.
        results: Numbers with intervals, by name.
        calibration: The threshold.
        how: How scores were made, in words.
        read: The image ``(3, H, W)`` of bytes at a place in ``pairs.images``, as the network sees it.
        skipped: Images that were left out.
    """

    name: str
    pairs: Pairs
    scores: Tensor
    results: Mapping[str, Verification]
    calibration: Calibration
    how: str
    read: Callable[[int], Tensor]
    skipped: Sequence[object] = ()


def write_verification(found: VerificationPage, output: Path) -> Path:
    """Write the page of a verification, which needs no network and no other file, and return ``output``.

    Args:
        found: What to show.
        output: The HTML file; folders above it are made.
    """
    return write_page(render_verification(found), output)


def render_verification(found: VerificationPage) -> str:
    """The whole page."""
    title = f"Verification: {found.name}"
    plots: dict[str, Figure] = {}
    body = "".join((_summary(found), _curves(found, plots), _scores(found, plots), _hardest(found), _details(found)))
    return frame(title, body, plots, resources.files(__package__).joinpath("faces.css").read_text("utf-8"))


def _summary(found: VerificationPage) -> str:
    rows = [(value.title, _value(value), value.interval, value.words) for value in found.results.values()]
    line = found.calibration
    cells = "".join(
        f'<tr><th scope="row">{escape(title)}</th><td>{escape(value)}</td><td>{low:.2%} to {high:.2%}</td>'
        f'<td class="words">{escape(words)}</td></tr>'
        for title, value, (low, high), words in rows
    )
    cells += (
        f'<tr><th scope="row">Threshold</th><td>{line.threshold:.4f}</td><td>{line.interval[0]:.4f} to '
        f'{line.interval[1]:.4f}</td><td class="words">{escape(line.words)}</td></tr>'
    )
    level = f"{line.level:.0%} interval"
    legend = "".join(f"<dt>{escape(word)}</dt><dd>{escape(text)}</dd>" for word, text in _MEANINGS.items())
    table = (
        '<div class="scroll" tabindex="0" role="region" aria-labelledby="summary"><table class="summary"><thead><tr>'
        f'<th scope="col">Measure</th><th scope="col">Value</th><th scope="col">{level}</th>'
        f'<th scope="col">What was computed</th></tr></thead><tbody>{cells}</tbody></table></div>'
        f"<details><summary>What the words mean</summary><dl>{legend}</dl></details>"
    )
    accepted = (
        f"With the threshold for a FAR of {line.target_far:g}, pairs with a score above {line.threshold:.4f} are taken "
        f"for one person: {line.tar:.2%} of the genuine and {line.far:.3%} of the impostor pairs here."
    )
    return titled_section("summary", "Summary", f"{escape(str(found.pairs))}; {escape(found.how)}. {accepted}", table)


def _value(found: Verification) -> str:
    error = "" if math.isnan(found.standard_error) else f" ± {found.standard_error:.2%}"
    return f"{found.value:.2%}{error}"


# ------------------------------------------------------------------------------------------------------- curves


def _curves(found: VerificationPage, plots: dict[str, Figure]) -> str:
    content = plot_box(plots, *_titled(roc_figure(found.scores, found.pairs.same, found.calibration), "ROC"))
    content += plot_box(plots, *_titled(det_figure(found.scores, found.pairs.same, found.calibration), "DET"))
    return titled_section(
        "curves",
        "Curves",
        "What every threshold gives: the share of genuine pairs accepted (ROC) and refused (DET) at each share of "
        "impostors accepted. The diamond is the calibrated threshold, its bars the intervals there.",
        f'<div class="grid">{content}</div>',
    )


def _titled(drawn: tuple[Figure, str], title: str) -> tuple[Figure, str, str, str]:
    figure, caption = drawn
    return figure, "curve tall", title, caption


def _thinned(columns: Sequence[Floats]) -> list[Floats]:
    """Points of a curve that are enough to draw it: evenly along it on an axis of logarithms, where there are many."""
    chosen = evenly(len(columns[0]), MAX_CURVE_POINTS)
    return [column[chosen] for column in columns]


def roc_figure(scores: Tensor, same: Tensor, line: Calibration) -> tuple[Figure, str]:
    """TAR against FAR, the latter on an axis of logarithms, with the threshold as a diamond.

    Args:
        scores: ``(P,)``.
        same: ``(P,)`` booleans.
        line: The threshold.
    """
    curve = roc(scores, same, simplify=True)
    impostors = int((~same).sum())
    least = 0.5 / impostors  # no false accept has no place on the axis: half of one stands for it
    far, tar, thresholds = _thinned([column.double().numpy() for column in curve])
    traces = [
        _line("ROC", np.maximum(far, least), 100 * tar, thresholds, 0)
        | {"hovertemplate": "TAR %{y:.2f} %, FAR %{x:.3~g}<br>threshold %{customdata:.4f}<extra></extra>"},
        _diamond(max(line.far, least), 100 * line.tar, *_bars(line, least)),
    ]
    # A good curve lives in the upper part of the axis: the picture begins a little below its first point.
    low = max(0.0, min(95.0, 100 - 1.4 * 100 * (1 - float(curve.tar[curve.far == 0].max()))))
    layout = plotly_layout(
        xaxis={"type": "log", "title": _name("FAR"), "automargin": True, "range": [math.log10(least), 0]}
        | {"exponentformat": "power", "dtick": 1},
        yaxis={"title": _name("TAR"), "ticksuffix": " %", "automargin": True, "nticks": 8}
        | {"range": [low, 100 + (100 - low) / 20]},
        hovermode="closest",
        showlegend=False,
    )
    return {"data": traces, "layout": layout}, f"The left edge is half a pair of {impostors:,} impostor pairs."


def det_figure(scores: Tensor, same: Tensor, line: Calibration) -> tuple[Figure, str]:
    """FRR against FAR, both on axes of normal quantiles, with the threshold as a diamond.

    Args:
        scores: ``(P,)``.
        same: ``(P,)`` booleans.
        line: The threshold.
    """
    curve = det(scores, same, simplify=True)
    genuine, impostors = int(same.sum()), int((~same).sum())
    least = (0.5 / impostors, 0.5 / genuine)
    far, frr, thresholds = _thinned([column.double().numpy() for column in curve])
    x, y = _deviate(np.clip(far, least[0], 1 - least[0])), _deviate(np.clip(frr, least[1], 1 - least[1]))
    shown = np.stack([100 * far, 100 * frr, thresholds], 1)
    rates = (line.far, 1 - line.tar)
    point = [float(_deviate(np.clip([rate], low, 1 - low))[0]) for rate, low in zip(rates, least, strict=True)]
    ends = (float(_deviate(np.array([min(least)]))[0]), float(_deviate(np.array([0.6]))[0]))
    traces = [
        {"type": "scatter", "mode": "lines", "x": list(ends), "y": list(ends), "hoverinfo": "skip"}
        | {"line": {"color": _GREY, "width": 1, "dash": "dash"}},
        _line("DET", x, y, thresholds, 0)
        | {
            "customdata": [numbers(row) for row in shown],
            "hovertemplate": "FAR %{customdata[0]} %, FRR %{customdata[1]} %<br>threshold %{customdata[2]}"
            "<extra></extra>",
        },
        _diamond(point[0], point[1]),
    ]
    ticks = [tick for tick in _DET_TICKS if min(least) / 2 < tick < 0.6]
    axis = {
        "tickvals": numbers(_deviate(np.array(ticks))),
        "ticktext": [f"{100 * tick:g} %" for tick in ticks],
        "range": list(ends),
        "automargin": True,
        "zeroline": False,
    }
    layout = plotly_layout(
        xaxis=axis | {"title": _name("FAR")},
        yaxis=axis | {"title": _name("FRR")},
        hovermode="closest",
        showlegend=False,
    )
    return {"data": traces, "layout": layout}, "Axes of normal quantiles; the dashed line has FAR = FRR."


def _deviate(rates: Floats) -> Floats:
    """Normal quantiles of rates between 0 and 1."""
    return torch.special.ndtri(torch.from_numpy(rates)).numpy()


def _name(text: str) -> Figure:
    return {"text": text, "standoff": 8}


def _line(name: str, x: Floats, y: Floats, thresholds: Floats, index: int) -> Figure:
    return {"type": "scatter", "mode": "lines", "name": name, "x": numbers(x, 5), "y": numbers(y, 6)} | {
        "customdata": numbers(thresholds, 5),
        "line": {"color": colour(index), "width": 2},
    }


def _diamond(x: float, y: float, x_bars: Figure | None = None, y_bars: Figure | None = None) -> Figure:
    found: Figure = {"type": "scatter", "mode": "markers", "name": "threshold", "x": [x], "y": [y]}
    found |= {"marker": {"color": colour(1), "symbol": "diamond", "size": 11}, "hoverinfo": "name"}
    return found | ({"error_x": x_bars} if x_bars else {}) | ({"error_y": y_bars} if y_bars else {})


def _bars(line: Calibration, least: float) -> tuple[Figure, Figure]:
    """Intervals of FAR and TAR as bars around the threshold's point."""
    style = {"color": colour(1), "thickness": 1.5, "width": 4}
    far = max(line.far, least)
    low, high = (max(bound, least) for bound in line.far_interval)
    x = {"type": "data", "symmetric": False, "array": [high - far], "arrayminus": [far - low]}
    up, down = line.tar_interval[1] - line.tar, line.tar - line.tar_interval[0]
    y = {"type": "data", "symmetric": False, "array": [100 * up], "arrayminus": [100 * down]}
    return x | style, y | style


# ------------------------------------------------------------------------------------------------------- scores


def _scores(found: VerificationPage, plots: dict[str, Figure]) -> str:
    figure, caption = score_histogram(found.scores, found.pairs.same, found.calibration)
    content = plot_box(plots, figure, "histogram tall", "Scores", caption)
    figure, caption = threshold_figure(found.scores, found.pairs.same, found.calibration)
    content += plot_box(plots, figure, "curve tall", "Errors by threshold", caption)
    return titled_section(
        "scores",
        "Scores and threshold",
        "Left, the scores of both kinds of pairs: the less they overlap, the better. Right, the two error rates by "
        "threshold, from which another threshold can be read. The dashed line is the calibrated one, the band its "
        "interval.",
        f'<div class="grid">{content}</div>',
    )


def _marked(line: Calibration, **parts: object) -> Figure:
    """A layout with the threshold and its interval."""
    band = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "x0": line.interval[0], "x1": line.interval[1]}
    rule = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": line.threshold, "x1": line.threshold}
    return plotly_layout(
        shapes=[
            band | {"fillcolor": "rgba(136,136,136,.16)", "line": {"width": 0}, "layer": "below"},
            rule | {"line": {"color": _GREY, "width": 1.5, "dash": "dash"}},
        ],
        legend=plotly_legend(y=1.02, yanchor="bottom"),
        **parts,
    )


def score_histogram(scores: Tensor, same: Tensor, line: Calibration) -> tuple[Figure, str]:
    """Scores of genuine and impostor pairs, with the threshold.

    Args:
        scores: ``(P,)``.
        same: ``(P,)`` booleans.
        line: The threshold.
    """
    values, genuine = scores.double().numpy(), same.numpy()
    low, high = float(values.min()), float(values.max())
    edges = np.linspace(low, high if high > low else low + 1, BINS + 1)
    width = float(edges[1] - edges[0])
    traces = []
    for index, (name, chosen) in enumerate((("genuine pairs", genuine), ("impostor pairs", ~genuine))):
        shares = 100 * np.histogram(values[chosen], bins=edges)[0] / max(1, int(chosen.sum()))
        traces.append(
            {"type": "bar", "name": name, "x0": low + width / 2, "dx": width, "y": numbers(shares)}
            | {"marker": {"color": colour(index)}, "opacity": 0.7}
            | {"hovertemplate": "%{y:.2f} % near %{x:.3f}<extra>%{fullData.name}</extra>"}
        )
    means = f"genuine {values[genuine].mean():.3f}, impostor {values[~genuine].mean():.3f}"
    layout = _marked(
        line,
        barmode="overlay",
        bargap=0,
        xaxis={"title": _name(f"{line.score} score"), "automargin": True},
        yaxis={"ticksuffix": " %", "automargin": True, "nticks": 5},
    )
    return {"data": traces, "layout": layout}, f"Mean: {means}. Threshold {line.threshold:.4f}."


def threshold_figure(scores: Tensor, same: Tensor, line: Calibration) -> tuple[Figure, str]:
    """FAR and FRR by threshold, on an axis of logarithms.

    Args:
        scores: ``(P,)``.
        same: ``(P,)`` booleans.
        line: The threshold.
    """
    curve = det(scores, same)
    far, frr, thresholds = (column.double().numpy()[1:] for column in curve)  # the first threshold is infinite
    far, frr, thresholds = _thinned([far, frr, thresholds])
    least = 0.5 / min(int(same.sum()), int((~same).sum()))
    traces = [
        {"type": "scatter", "mode": "lines", "name": name, "x": numbers(thresholds, 5)}
        | {"y": numbers(np.where(rate > 0, 100 * rate, np.nan), 5), "line": {"color": colour(index), "width": 2}}
        | {"hovertemplate": "%{y:.3~g} %"}
        for index, (name, rate) in enumerate((("FRR", frr), ("FAR", far)))
    ]
    layout = _marked(
        line,
        xaxis={"title": _name("threshold"), "automargin": True},
        yaxis={"type": "log", "ticksuffix": " %", "automargin": True, "range": [math.log10(100 * least), 2]}
        | {"exponentformat": "none", "dtick": 1},
        hovermode="x unified",
    )
    low, high = line.interval
    return {"data": traces, "layout": layout}, f"Threshold {line.threshold:.4f}, interval {low:.4f} to {high:.4f}."


# ------------------------------------------------------------------------------------------------ hardest pairs


def hardest(scores: Tensor, same: Tensor, count: int = HARDEST) -> tuple[list[int], list[int]]:
    """The genuine pairs with the lowest scores and the impostor pairs with the highest, hardest first.

    Example:
        >>> hardest(torch.tensor([0.9, 0.1, 0.3, 0.8]), torch.tensor([True, True, False, False]), 1)
        ([1], [3])
    """
    order = scores.argsort(stable=True)
    genuine, impostors = order[same[order]], order[~same[order]].flip(0)
    return genuine[:count].tolist(), impostors[:count].tolist()


def _hardest(found: VerificationPage) -> str:
    genuine, impostors = hardest(found.scores, found.pairs.same)
    content = ""
    for title, chosen in (
        ("Genuine pairs with the lowest scores", genuine),
        ("Impostor pairs with the highest scores", impostors),
    ):
        content += f'<h3 class="list">{title}</h3><ul class="pairs">{"".join(_pair(found, i) for i in chosen)}</ul>'
    return titled_section(
        "hardest",
        "Hardest pairs",
        "As the network sees them. Wrong labels, bad alignment and poor photographs are found here first.",
        content,
    )


def _pair(found: VerificationPage, index: int) -> str:
    pairs, score = found.pairs, float(found.scores[index])
    same = bool(pairs.same[index])
    wrong = (score > found.calibration.threshold) != same
    verdict = "accepted" if wrong != same else "refused"
    mark = f'<span class="wrong">wrongly {verdict}</span>' if wrong else f"rightly {verdict}"
    sides = [int(side[index]) for side in (pairs.left, pairs.right)]
    names = [pairs.images[side] for side in sides]
    pictures = "".join(
        f'<img src="{thumbnail(found.read(side))}" alt="{escape(name)}">'
        for side, name in zip(sides, names, strict=True)
    )
    words = " / ".join(escape(name.rpartition("/")[2]) for name in names)
    return f'<li><div class="two">{pictures}</div><p><b>{score:.4f}</b> {mark}<br>{words}</p></li>'


def thumbnail(image: Tensor) -> str:
    """An image ``(3, H, W)`` of bytes as a data URI.

    Example:
        >>> thumbnail(torch.zeros(3, 8, 8, dtype=torch.uint8))[:23]
        'data:image/jpeg;base64,'
    """
    content = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(content, "jpeg", quality=88)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"


def _details(found: VerificationPage) -> str:
    lines = "".join(f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in found.results.items())
    lines += f"<dt>threshold</dt><dd>{escape(str(found.calibration))}</dd>"
    content = f"<details><summary>All numbers in words</summary><dl>{lines}</dl></details>"
    if found.skipped:
        left_out = "\n".join(map(str, found.skipped))
        content += (
            f"<details><summary>{len(found.skipped)} images were left out</summary><pre>{escape(left_out)}</pre>"
            "</details>"
        )
    return titled_section("details", "Details", "What is needed to say these numbers to others.", content)
