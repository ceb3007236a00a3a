"""The command line as a user starts it, and what it leaves behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import NamedTuple

from helpers.paths import SOURCE


class Result(NamedTuple):
    code: int
    out: str
    err: str


def process(*arguments: object) -> Result:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hypersphere", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    return Result(done.returncode, done.stdout, done.stderr)


def words(text: str) -> str:
    """The text without line ends and colours."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())
