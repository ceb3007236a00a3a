"""The ``hypersphere attack`` command."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from hypersphere import recipe
from hypersphere.cli.options import Device, Run, RunDataRoot
from hypersphere.cli.terminal import console
from hypersphere.errors import ArgumentError
from hypersphere.evaluate import evaluations
from hypersphere.runs import RunFolder, artefacts, load_with_data
from hypersphere.runs.artefacts import ARTEFACT
from hypersphere.runs.evaluation import metrics_of, outputs_of, write_evaluation
from hypersphere.runs.read import EVALUATION, FEATURES
from hypersphere.tasks.robustness.evaluation import explain
from hypersphere.train.distributed import own_device, world


def attack_run(
    run: Run,
    attack: Annotated[
        list[str] | None, typer.Option("--attack", "-a", help="fgsm, bim, pgd or square; may be given several times")
    ] = None,
    eps: Annotated[str, typer.Option(help="budget of every pixel, of a range from 0 to 1: 0.03 or 8/255")] = "8/255",
    steps: Annotated[int, typer.Option(help="steps of bim and pgd")] = 20,
    queries: Annotated[int, typer.Option(help="squares that square tries, which needs no gradients")] = 300,
    images: Annotated[int, typer.Option(help="number of test images, evenly from the split; 0: all")] = 1000,
    source: Annotated[
        Path | None, typer.Option(metavar="RUN2", help="also attack with the gradients of this run's model")
    ] = None,
    masking: Annotated[bool, typer.Option(help="check whether the accuracies can be believed")] = True,
    deepfool: Annotated[int, typer.Option(help="number of images for the smallest change that fools; 0: none")] = 200,
    keep: Annotated[bool, typer.Option("--keep", help="write the results and pictures into the run")] = False,
    device: Device = "auto",
    data_root: RunDataRoot = None,
) -> None:
    """Attack the model of a run: accuracy under attack, and whether it can be believed."""
    folder = RunFolder.open(run)
    # Read first: without them there is nothing to add to, and attacks take long.
    before = folder.evaluation()["metrics"] if keep else {}
    options: dict[str, Any] = {"attacks": attack or ["fgsm", "bim", "pgd"], "eps": _budget(eps), "steps": steps}
    options |= {"images": images, "masking": masking, "queries": queries, "deepfool": deepfool}
    options |= {"source": None if source is None else str(source)}
    plan = folder.recipe()
    # The recipe's own check tells unknown attacks and bad numbers.
    content = plan.model_dump(mode="json")
    content["evaluate"]["metrics"] = [{"name": "attacks", **options}]
    checked = recipe.check(content)
    place = own_device(device)
    with world(place) as here:
        trained, data = load_with_data(run, data_root, device=place)
        system = replace(trained, recipe=checked)
        outputs = outputs_of(system, data, data_root or folder.data_root(), here.group)
        metrics = metrics_of(system, outputs)
        if here.main:
            _show(str(folder.facts()["name"]), metrics)
        if keep:
            outputs.artefacts.update(_other_pictures(folder))
            others = {name: value for name, value in before.items() if not is_of_attacks(name)}
            write_evaluation(folder, trained, outputs, others | metrics)
            if here.main:
                hint = f"see them with `hypersphere report {folder.path}`"
                console.print(f"Kept in {folder.path}; {hint}", highlight=False)


def is_of_attacks(name: str) -> bool:
    """Whether a metric is one of attacks, which other ones replace: of two budgets they would contradict each other."""
    return any(metric.of(name) for metric in evaluations.metrics("attacks"))


def _budget(value: str) -> float:
    """A number or a fraction as a number."""
    try:
        return float(Fraction(value))
    except (ValueError, ZeroDivisionError, OverflowError):
        raise ArgumentError("eps", f"must be a number or a fraction such as 8/255, got {value!r}") from None


def _other_pictures(folder: RunFolder) -> dict[str, Tensor]:
    """What other evaluations have left for the report."""
    file = folder.path / FEATURES
    if not file.is_file():
        return {}
    tensors = artefacts.read(file, EVALUATION, names=lambda name: name.startswith(ARTEFACT)).tensors
    found = {name.removeprefix(ARTEFACT): value for name, value in tensors.items()}
    return {name: value for name, value in found.items() if not name.startswith("attacks/")}


def _show(title: str, metrics: dict[str, float]) -> None:
    """Accuracies and smallest changes as a table, then the checks in words."""
    grid = Table(
        title=escape(title), title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2)
    )
    grid.add_column("", style="cyan", no_wrap=True)
    grid.add_column("", justify="right")
    for name, value in metrics.items():
        if name.startswith(("accuracy_", "deepfool_")):
            metric = evaluations.metric(name)
            grid.add_row(metric.title, metric.text(value))
    console.print(grid)
    said = explain(metrics)
    for bad, words in said:
        mark = "[bold yellow]sign of masking:[/] " if bad else "[green]fine:[/] "
        console.print(mark + escape(words), highlight=False, soft_wrap=True)
