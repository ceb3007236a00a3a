"""A new task is a new folder: its data, model, evaluation, figure, command and recipe work with no edit elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.command_line import words
from helpers.paths import SOURCE
from hypersphere import recipe
from hypersphere.cli.commands import COMMANDS
from hypersphere.data import datasets

FILES = {
    "__init__.py": '''
        """Waves: which of three frequencies a short signal has."""

        COMMANDS = {"waves": ("commands:waves", "Say how many waves a run knows.")}
    ''',
    "data.py": '''
        import torch

        from hypersphere.data import Dataset, TensorSplit, datasets
        from hypersphere.data.sources import Source, sources

        sources["waves"] = Source("waves", "drawn", ())

        @datasets.register("waves")
        def waves(root=None, length: int = 16):
            """Sine waves of three frequencies, each with another phase; drawn, needs no files.

            Args:
                root: Not used.
                length: Samples of each wave.
            """
            parts = []
            for start in (0.0, 0.5):
                labels = torch.arange(3).repeat(40)
                phase = start + torch.arange(120) / 20
                time = torch.arange(length) / length * 6.2832
                waves = ((1 + labels)[:, None] * time + phase[:, None]).sin()
                parts.append(TensorSplit(waves, labels))
            return Dataset("waves", ("slow", "middle", "fast"), *parts)
    ''',
    "models.py": '''
        import torch
        from torch import nn

        from hypersphere.models import models

        @models.register("spectrum")
        class Spectrum(nn.Module):
            """Amplitudes of a signal, through one layer.

            Args:
                shape: Shape ``(N,)`` of one signal.
                dim: Features.
            """

            def __init__(self, shape, dim: int = 4) -> None:
                super().__init__()
                self.dim = dim
                self.layer = nn.Linear(shape[0] // 2 + 1, dim)

            def forward(self, signals):
                return self.layer(torch.fft.rfft(signals).abs())
    ''',
    "evaluation.py": '''
        from hypersphere.evaluate import Metric, evaluations

        METRIC = Metric("loudness", "Loudness", form=".3f", better="higher", help="Mean length of features.")

        @evaluations.register("waves", metrics=(METRIC,))
        def waves(outputs):
            """Mean length of the features."""
            outputs.artefacts["waves/lengths"] = outputs.features.norm(dim=1)
            return {"loudness": float(outputs.features.norm(dim=1).mean())}
    ''',
    "figures.py": '''
        from hypersphere.report.sections import Picture, Section, figures

        @figures.register("waves")
        def section(artefacts):
            """How loud waves are."""
            trace = {"type": "scatter", "y": artefacts["lengths"].tolist()}
            return Section("Waves", "How loud they are.", [Picture("lengths of waves", {"data": [trace]}, "All.")])
    ''',
    "commands.py": '''
        from typing import Annotated

        import typer

        from hypersphere.cli.options import Run
        from hypersphere.cli.terminal import console
        from hypersphere.runs import load

        def waves(run: Run) -> None:
            """Say how many waves a run knows."""
            console.print(f"{len(load(run).classes)} waves")
    ''',
    "recipes/waves-spectrum.yaml": """
        base: digits-softmax
        name: waves-spectrum
        help: Frequencies of waves
        data: {name: waves, hold_out: [], batch_size: 30, normalise: none}
        model: {name: spectrum, dim: 3}
        schedule: {name: constant}
        train: {steps: 40, tensorboard: false}
        evaluate: {every: 0, metrics: [classification, waves]}
    """,
}
START = """
import json, sys
import hypersphere.tasks
from hypersphere.cli import main
commands, folders = map(json.loads, sys.argv[1:])
hypersphere.tasks.__path__ += folders
for command in commands:
    sys.argv = ["hypersphere", *command]
    try:
        main()
    except SystemExit as stopped:
        assert not stopped.code, command
"""


def start(commands: list[list[object]], folder: Path, *, beside: bool) -> str:
    """What commands print, one after another in one process, with a folder of tasks beside the package's own or not."""
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}:{folder}", "OMP_NUM_THREADS": "1"}
    texts = [json.dumps([list(map(str, command)) for command in commands]), json.dumps([str(folder)] * beside)]
    command = [sys.executable, "-c", START, *texts]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def tasks(tmp_path):
    """A folder of tasks with one task in it."""
    for name, text in FILES.items():
        file = tmp_path / "tasks" / "waves" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").splitlines()
        file.write_text("\n".join(line[8:] for line in lines) + "\n")
    return tmp_path / "tasks"


def check_run(run: Path) -> None:
    """A run of the recipe measured what the task says, and its report shows it."""
    metrics = json.loads((run / "evaluation.json").read_text())["metrics"]
    assert metrics["accuracy"] > 0.9 and metrics["loudness"] > 0
    page = (run.parent / "page.html").read_text()
    assert "How loud they are." in page and "lengths of waves" in page and ">Loudness<" in page


def test_a_folder_is_a_task(tasks, tmp_path):
    run = tmp_path / "run"
    commands = [["train", "waves-spectrum", "--folder", run], ["evaluate", run]]
    commands += [
        ["report", run, "-o", tmp_path / "page.html"],
        ["waves", run],
        ["data"],
        ["list", "recipes"],
        ["--help"],
    ]
    said = start(commands, tasks, beside=True)
    check_run(run)
    assert "\n3 waves\n" in said and re.search(r"waves +embedded +drawn", said)
    assert "Say how many waves a run knows." in words(said)


def test_without_the_folder_there_is_no_such_task():
    with pytest.raises(recipe.RecipeError, match="no recipe file or embedded recipe 'waves-spectrum'"):
        recipe.load("waves-spectrum")
    assert "waves" not in COMMANDS and "waves" not in datasets


def test_the_members_of_a_folder_are_a_plugin(tasks, tmp_path):
    """Without a place among the tasks: a file that imports the folder's modules registers them, too."""
    plugin, run = tmp_path / "mine.py", tmp_path / "run"
    plugin.write_text("from waves import data, evaluation, figures, models\n")
    file = tasks / "waves" / "recipes" / "waves-spectrum.yaml"
    commands = [["train", file, "--folder", run], ["evaluate", run], ["report", run, "-o", tmp_path / "page.html"]]
    start([[*command, "--plugin", plugin] for command in commands], tasks, beside=False)
    check_run(run)
