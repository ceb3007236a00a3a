"""The commands that train: demo, train and resume."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from hypersphere import recipe, report
from hypersphere.cli.options import DataRoot, Device, Overrides, Run, RunDataRoot
from hypersphere.cli.runs import show_metrics, write_report
from hypersphere.cli.terminal import console
from hypersphere.runs import RunFolder
from hypersphere.train import ProgressBar, Trainer
from hypersphere.train.distributed import own_device, world

DEMO = ("digits-softmax", "digits-a-softmax", "digits-arcface")


def demo(
    output: Annotated[Path, typer.Option(help="folder for the runs and the page")] = Path("runs/demo"),
    device: Device = "auto",
) -> None:
    """Train softmax, A-Softmax and ArcFace on handwritten digits and compare them on one page."""
    plans = [recipe.load(name) for name in DEMO]
    runs = [_train(plan, output / f"{plan.name}-{plan.hash}", device, None) for plan in plans]
    show_metrics(runs)
    write_report(runs, output / "report.html")


def train(
    source: Annotated[str, typer.Argument(metavar="RECIPE", help="name or YAML file")] = "digits-arcface",
    overrides: Overrides = None,
    folder: Annotated[Path | None, typer.Option(help="folder of the run (default: runs/NAME-HASH)")] = None,
    device: Device = "auto",
    data_root: DataRoot = None,
) -> None:
    """Train a recipe. Started again after an interruption, it goes on where it was."""
    if "=" in source and not Path(source).exists():
        source, overrides = "digits-arcface", [source, *(overrides or [])]
    plan = recipe.load(source, overrides or [])
    run = _train(plan, folder or Path("runs") / f"{plan.name}-{plan.hash}", device, data_root)
    if _is_main():
        _show_run(run)


def resume(run: Run, device: Device = "auto", data_root: RunDataRoot = None) -> None:
    """Continue an interrupted run from its last checkpoint."""
    folder = RunFolder.open(run)
    _train(folder.recipe(), run, device, data_root or folder.data_root())
    if _is_main():
        _show_run(folder)


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _train(plan: recipe.Recipe, path: Path, device_name: str, data_root: Path | None) -> RunFolder:
    device = own_device(device_name)
    with world(device) as here:
        run = RunFolder(path)
        if run.recipe_file.exists():
            run.check(plan)
            if run.facts()["status"] == "finished":
                if here.main:
                    console.print(f"{path} is finished already; delete the folder to train again", highlight=False)
                    report.write([path], run.report_file)
                return run
        trainer = Trainer(plan, run, device, data_root=data_root, callbacks=[ProgressBar(console)], world=here)
        # Only now, so that a start that fails leaves nothing behind.
        if here.main:
            RunFolder.create(path, plan, device, data_root)
            last = run.latest_checkpoint()
            going_on = f", going on from {last.name}" if last else ""
            console.print(f"Training {plan.name} on {device} in {path}{going_on}", highlight=False, soft_wrap=True)
            if here.size > 1:
                console.print(trainer.division, highlight=False, soft_wrap=True)
        here.barrier()
        try:
            trainer.fit()
        finally:  # a run that stopped or diverged has curves to look at, too
            if here.main and run.metrics_file.exists():
                report.write([path], run.report_file)
    return run


def _show_run(run: RunFolder) -> None:
    show_metrics([run])
    console.print(f"Report: {run.report_file.resolve()}", highlight=False, soft_wrap=True)
