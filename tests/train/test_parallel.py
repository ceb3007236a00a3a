"""Runs on several processes with a head divided among them: killed, resumed on other numbers, restarted, orphaned."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.paths import SOURCE

OPTIONS = [
    *("train.steps=40", "train.checkpoint_every=10", "train.log_every=10", "evaluate.every=20", "data.batch_size=50"),
    *(
        "train.tensorboard=false",
        "train.parallel.head=shard",
        "evaluate.metrics=[classification]",
        "schedule.warmup=10",
    ),
]


def start(
    processes: int, folder: Path, *options: str, elastic: tuple[str, ...] = ("--standalone",), agent: bool = False
) -> subprocess.Popen:
    """``hypersphere train`` on so many processes, in a group of its own; one is started by an agent if asked for."""
    line = [sys.executable]
    if processes > 1 or agent:
        line += ["-m", "torch.distributed.run", *elastic, f"--nproc-per-node={processes}"]
    line += ["-m", "hypersphere", "train", "digits-arcface", "--device", "cpu", "--folder", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*line, *OPTIONS, *options], env=environment, start_new_session=True, **pipes)


def finish(run: subprocess.Popen) -> str:
    text, _ = run.communicate(timeout=200)
    assert run.returncode == 0, text
    return text


def wait_for(path: Path, seconds: float = 100) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} does not come"
        time.sleep(0.02)


def measured(folder: Path) -> dict[tuple[int, str], dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {(row["step"], row["split"]): row for row in rows}


def agree(folder: Path, expected: dict[tuple[int, str], dict[str, float]]) -> None:
    found = measured(folder)
    assert found.keys() == expected.keys()
    for place, row in expected.items():
        numbers = {key: value for key, value in row.items() if key != "split"}
        assert {key: found[place][key] for key in numbers} == pytest.approx(numbers, rel=1e-3), place


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    finish(start(1, folder))
    return measured(folder)


def test_killed_on_two_processes_resumed_on_three_and_on_one(one, tmp_path):
    """50 samples do not divide by 3."""
    folder = tmp_path / "run"
    run = start(2, folder)
    wait_for(folder / "checkpoints/step-00000010")
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    run = start(3, folder)
    wait_for(folder / "checkpoints/step-00000030")
    os.killpg(run.pid, signal.SIGKILL)
    text, _ = run.communicate()
    assert "going on from step-" in text and "divided among them" in text
    finish(start(1, folder))
    agree(folder, one)


def test_a_killed_process_brings_the_world_back(one, tmp_path):
    folder = tmp_path / "run"
    run = start(2, folder, elastic=("--standalone", "--max-restarts=1"))
    wait_for(folder / "checkpoints/step-00000010")
    workers = [int(name) for name in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
    os.kill(workers[-1], signal.SIGKILL)
    finish(run)
    agree(folder, one)


@pytest.mark.slow
def test_what_is_left_goes_on_without_a_lost_agent(one, tmp_path, monkeypatch):
    """Two agents on one host, of which the second is killed with its process."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = f"--rdzv-endpoint=localhost:{free.getsockname()[1]}"
    conditions = ("--rdzv-backend=c10d", place, "--rdzv-id=7", "--rdzv-conf=last_call_timeout=3,join_timeout=60")
    folder = tmp_path / "run"
    elastic = ("--nnodes=1:2", "--max-restarts=3", *conditions)
    first, second = (start(1, folder, elastic=elastic, agent=True) for _ in range(2))
    wait_for(folder / "checkpoints/step-00000010")
    os.killpg(second.pid, signal.SIGKILL)
    second.communicate()
    text = finish(first)
    assert "2 processes share each batch" in text and "going on from step-" in text
    agree(folder, one)


def test_processes_end_with_the_agent_that_started_them(tmp_path):
    folder = tmp_path / "run"
    run = start(2, folder, "train.steps=100000")
    wait_for(folder / "checkpoints/step-00000010")
    workers = [int(name) for name in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
    assert len(workers) == 2
    run.kill()
    end = time.monotonic() + 30
    while any(Path(f"/proc/{worker}").exists() and _alive(worker) for worker in workers):
        assert time.monotonic() < end, "the processes train on"
        time.sleep(0.1)
    run.communicate()


def _alive(process: int) -> bool:
    """Whether a process is more than an entry that nobody has asked for yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
