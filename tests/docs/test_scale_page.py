"""The examples of docs/scale.md, run by two processes as torchrun starts them."""

import os
import re
import subprocess
import sys

import pytest

from helpers.paths import ROOT, SOURCE

TEXT = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_an_example_runs_on_two_processes(number, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(BLOCKS[number] + "\nimport os\nos._exit(0)\n")  # threads of process groups may abort at an exit
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


def test_there_are_examples():
    assert len(BLOCKS) == 2 and "train.parallel.head=shard" in TEXT
