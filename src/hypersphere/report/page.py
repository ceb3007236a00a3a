"""The HTML page of the report."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from hypersphere.drawing import colour
from hypersphere.evaluate import MISSING, columns, table
from hypersphere.report import figures
from hypersphere.report.figures import Figure
from hypersphere.report.sections import sections
from hypersphere.runs.read import Features, Run

LOSS_MEANING = "The loss that the classifier was trained with."


def render(runs: Sequence[Run]) -> str:
    """The whole page."""
    names = run_names(runs)
    title = f"Run report: {names[0]}" if len(runs) == 1 else f"Run report: {len(runs)} runs side by side"
    plots: dict[str, Figure] = {}  # filled by the sections, in the order of the page
    body = "".join(
        (
            _summary(runs, names),
            _spheres(runs, names, plots),
            _angles(runs, names, plots),
            _layers(runs, names, plots),
            _energies(runs, names, plots),
            _tasks(runs, names, plots),
            _curves(runs, names, plots),
            _details(runs, names),
        )
    )
    return frame(title, body, plots)


def frame(title: str, body: str, plots: dict[str, Figure], *styles: str) -> str:
    """A page that needs no other file.

    Args:
        title: Its title, and heading.
        body: HTML of its sections.
        plots: What ``page.js`` draws into them.
        styles: Style sheets beside the page's own.
    """
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{"".join((_asset("page.css"), *styles))}</style>
</head>
<body>
<header><h1>{escape(title)}</h1></header>
<main>{body}</main>
<noscript><p>The plots need JavaScript.</p></noscript>
<script>{get_plotlyjs()}</script>
<script type="application/json" id="plots">{_json(plots)}</script>
<script>{_asset("page.js")}</script>
</body>
</html>
"""


def write_page(page: str, output: Path) -> Path:
    """Write a page to ``output``, whole or not at all, and return ``output``; folders above it are made."""
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(f"{output}.{os.getpid()}.tmp")  # beside the target: a rename is atomic within a file system only
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)
    return output


def run_names(runs: Sequence[Run]) -> list[str]:
    """What the runs are called on the page: their names, with the folder where a name is not unique."""
    names = [str(run.facts.get("name") or run.folder) for run in runs]
    count = Counter(names)
    return [name if count[name] == 1 else f"{name} ({run.folder})" for name, run in zip(names, runs, strict=True)]


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _json(value: object) -> str:
    """JSON that is safe inside a script element: no tag can begin in it."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def titled_section(anchor: str, title: str, text: str, content: str) -> str:
    """HTML of a section of the page: a heading that can be linked to, what it is about, and HTML of its content.

    Example:
        >>> titled_section("energy", "Energy", "Of all layers.", "<p>0.7</p>")[-17:]
        '0.7</p></section>'
    """
    return (
        f'<section aria-labelledby="{anchor}"><h2 id="{anchor}">{title}</h2><p class="lead">{text}</p>'
        f"{content}</section>"
    )


def plot_box(plots: dict[str, Figure], figure: Figure, kind: str, title: str, caption: str = "") -> str:
    """HTML of a titled box that ``page.js`` draws the figure into.

    Args:
        plots: Figures of the page, to which this one is added.
        figure: Plotly's data and layout.
        kind: Its size: flat, curve, histogram, sphere or large.
        title: Above it.
        caption: Below it.
    """
    identity = f"plot-{len(plots)}"
    plots[identity] = figure
    foot = f'<p class="caption">{escape(caption)}</p>' if caption else ""
    return (
        f'<figure><figcaption><h3>{escape(title)}</h3></figcaption><div class="plot {kind}" id="{identity}" '
        f'role="group" aria-label="{escape(f"Plot: {title}. {caption}")}"></div>{foot}</figure>'
    )


def _summary(runs: Sequence[Run], names: Sequence[str]) -> str:
    metrics = list(columns([run.results for run in runs]).values())
    heads = "".join(
        f'<th scope="col" title="{escape(meaning)}">{escape(title)}</th>'
        for title, meaning in [("Loss", LOSS_MEANING), *((m.title, m.help) for m in metrics)]
    )
    cells = table([run.results for run in runs])
    rows = "".join(
        f'<tr><th scope="row">{_swatch(i)}{escape(names[i])}{_status(run)}</th><td>{escape(run.loss or MISSING)}</td>'
        + "".join(f"<td>{f'<b class=best>{cell.text}</b>' if cell.best else cell.text}</td>" for cell in cells[i])
        + "</tr>"
        for i, run in enumerate(runs)
    )
    further = columns([run.results for run in runs], detail=True).values()
    legend = "".join(f"<dt>{escape(m.title)}</dt><dd>{escape(m.help)}</dd>" for m in [*metrics, *further])
    best = " The best value of each column is marked." if len(runs) > 1 else ""
    summary = (
        f'<div class="scroll" tabindex="0" role="region" aria-labelledby="summary"><table class="summary">'
        f'<thead><tr><th scope="col">Run</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
        f"<details><summary>What the columns mean</summary><dl><dt>Loss</dt><dd>{LOSS_MEANING}</dd>{legend}</dl>"
        f"</details>{_further(runs, names)}"
    )
    return titled_section("summary", "Summary", f"Results on the test set at the end of training.{best}", summary)


def _further(runs: Sequence[Run], names: Sequence[str]) -> str:
    """The details of all runs, a metric a row; nothing where there are none."""
    found = [run.results for run in runs]
    heads = "".join(f'<th scope="col">{_swatch(index)}{escape(name)}</th>' for index, name in enumerate(names))
    cells = zip(*table(found, detail=True), strict=True)
    rows = "".join(
        f'<tr><th scope="row" title="{escape(metric.help)}">{escape(metric.title)}</th>'
        + "".join(f"<td>{f'<b class=best>{cell.text}</b>' if cell.best else cell.text}</td>" for cell in row)
        + "</tr>"
        for metric, row in zip(columns(found, detail=True).values(), cells, strict=True)
    )
    if not rows:
        return ""
    return (
        '<details><summary>Further metrics</summary><div class="scroll"><table class="summary"><thead><tr>'
        f'<th scope="col">Metric</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div></details>'
    )


def _swatch(index: int) -> str:
    return f'<i class="swatch" style="background:{colour(index)}"></i>'


def _status(run: Run) -> str:
    status = str(run.facts.get("status", "finished"))
    return "" if status == "finished" else f' <small class="status">{escape(status)}</small>'


def _spheres(runs: Sequence[Run], names: Sequence[str], plots: dict[str, Figure]) -> str:
    content = ""
    for name, run in zip(names, runs, strict=True):
        if run.test is not None:
            figure, caption = figures.sphere(run.test)
            content += plot_box(plots, figure, "sphere", name, caption)
    if not content:
        return ""
    return titled_section(
        "features",
        "Features on the sphere",
        "Each dot is a test sample, coloured by class; a line with a diamond is the classifier's weight vector of the "
        "class. Look for tight clusters, one a class and around its diamond, that are spread far apart. Click "
        "a class to hide it, double-click to see it alone.",
        f'<div class="grid">{content}</div>',
    )


def _angles(runs: Sequence[Run], names: Sequence[str], plots: dict[str, Figure]) -> str:
    to_centres = _histograms([run.test for run in runs], names, figures.centre_histogram, plots)
    of_pairs = _histograms([run.unseen for run in runs], names, figures.pair_histogram, plots)
    if not to_centres:
        return ""
    content = f'<div class="grid">{to_centres}</div>'
    if of_pairs:
        content += (
            '<p class="lead">Pairs of samples from classes that were never trained on: genuine pairs are of one class, '
            "impostor pairs of two. The less the two overlap, the better an angle tells whether two samples belong "
            f'together.</p><div class="grid">{of_pairs}</div>'
        )
    return titled_section(
        "angles",
        "Angles",
        "How far test features are from the centre of their class and from the nearest other centre. Good features "
        "have a narrow own-centre hill on the left and a gap before the other.",
        content,
    )


def _histograms(
    features: Sequence[Features | None],
    names: Sequence[str],
    draw: Callable[[Features], tuple[Figure, str]],
    plots: dict[str, Figure],
) -> str:
    drawn = [(name, *draw(f)) for name, f in zip(names, features, strict=True) if f is not None]
    figures.share_ranges([figure for _, figure, _ in drawn])
    return "".join(plot_box(plots, figure, "histogram", name, caption) for name, figure, caption in drawn)


LAYER_TITLES = {"radius": "Radius", "saturated": "Patches beyond the radius (share)", "k": "Steepness k"}


def _layers(runs: Sequence[Run], names: Sequence[str], plots: dict[str, Figure]) -> str:
    drawn = [
        (f"{title}: {name}", *figures.layer_histograms(run.layers[quantity]), "histogram")
        for quantity, title in LAYER_TITLES.items()
        for name, run in zip(names, runs, strict=True)
        if quantity in run.layers
    ]
    if drawn:
        text = (
            "What decoupled layers learned besides their kernels: the stronger the colour of a box, the more kernels "
            "of the layer have a value near there. The share of patches is of the first test images: at 1 a radius of "
            "ball does not learn and one of tanh hardly, at 0 one of seg does not. Then the filters of the first "
            "convolution."
        )
    else:
        text = "The filters of the first convolution."
    drawn += [
        (f"Filters: {name}", *figures.filter_grid(run.filters), "filters")
        for name, run in zip(names, runs, strict=True)
        if run.filters is not None
    ]
    if not drawn:
        return ""
    content = "".join(plot_box(plots, figure, kind, title, caption) for title, figure, caption, kind in drawn)
    return titled_section("layers", "Layers", text, f'<div class="grid">{content}</div>')


def _energies(runs: Sequence[Run], names: Sequence[str], plots: dict[str, Figure]) -> str:
    measured = [(name, run.energies) for name, run in zip(names, runs, strict=True) if run.energies is not None]
    if not measured:
        return ""
    content = "".join(
        plot_box(plots, figure, "curve", f"Layers: {name}", caption)
        for name, (figure, caption) in ((name, figures.layer_energies(energies)) for name, energies in measured)
    )
    content += plot_box(plots, figures.energy_sums(runs, names), "curve", "Sum over the layers: energy above the least")
    return titled_section(
        "energy",
        "Energy of the layers",
        "How unevenly the neurons of a layer are spread over the sphere: their energy above the least that so many can "
        "have. Wide layers start close to that, so that the difference alone tells something. 0 % is as even as can "
        "be, 100 % what random directions have, where layers start.",
        f'<div class="grid">{content}</div>',
    )


def _tasks(runs: Sequence[Run], names: Sequence[str], plots: dict[str, Figure]) -> str:
    drawn = [sections(run.artefacts) for run in runs]
    content = ""
    for key, shown in sorted({key: section for found in drawn for key, section in found.items()}.items()):
        boxes = "".join(
            plot_box(plots, picture.figure, picture.kind, f"{name}: {picture.title}", picture.caption)
            for name, found in zip(names, drawn, strict=True)
            if key in found
            for picture in found[key].pictures
        )
        content += titled_section(key, shown.title, shown.text, f'<div class="grid">{boxes}</div>') if boxes else ""
    return content


def _curves(runs: Sequence[Run], names: Sequence[str], plots: dict[str, Figure]) -> str:
    curves = figures.curves(runs, names)
    if not curves:
        return ""
    content = "".join(plot_box(plots, c.figure, "curve log" if c.log else "curve", c.title) for c in curves)
    buttons = "".join(
        f'<button type="button" data-run="{i}" aria-pressed="true">{_swatch(i)}{escape(name)}</button>'
        for i, name in enumerate(names)
        if len(runs) > 1
    )
    controls = (
        f'<div class="controls">{buttons}<label><input type="checkbox" id="log"> logarithmic losses, rates and '
        "norms</label></div>"
    )
    return titled_section(
        "training",
        "Training curves",
        "What was measured while training, by step. Drag to zoom in, double-click to zoom out.",
        f'{controls}<div class="grid">{content}</div>',
    )


def _details(runs: Sequence[Run], names: Sequence[str]) -> str:
    content = "".join(
        f"<details><summary>{_swatch(i)}{escape(names[i])}</summary>"
        f'<div class="scroll"><table class="facts">{_fact_rows(run.facts)}</table></div>'
        f"<h3>Resolved recipe</h3><pre>{escape(run.recipe)}</pre></details>"
        for i, run in enumerate(runs)
    )
    return titled_section("details", "Run facts and recipes", "What is needed to repeat each run.", content)


def _fact_rows(facts: dict[str, Any]) -> str:
    return "".join(
        _fact_rows(value)
        if isinstance(value, dict)
        else f'<tr><th scope="row">{escape(str(key)).replace("_", " ")}</th><td>'
        f"{escape(MISSING if value is None else str(value))}</td></tr>"
        for key, value in facts.items()
    )
