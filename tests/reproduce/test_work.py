"""Trainings of a table, in this process and by workers: gone on with after any stop, and told what they gave."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from helpers.paths import SOURCE
from helpers.tables import TEXT
from hypersphere.data import load as load_data
from hypersphere.errors import ArgumentError
from hypersphere.reproduce import find, plan, pool, trainings
from hypersphere.reproduce.rows import folder_of, is_done, read_rows, rows_of
from hypersphere.reproduce.work import RECORD, Job, Shelf, data_digest, train
from hypersphere.runs import RunFolder

CPU = torch.device("cpu")


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "digits-table.yaml"
    file.write_text(TEXT)
    return find(str(file))


def jobs(own, output, *cells, noise=False, seeds=(0,)):
    found = trainings(own, "paper", cells=cells, seeds=seeds)
    return found, [Job(one.command, one.recipe.name, folder_of(output, one), noise) for one in found]


# ------------------------------------------------------------------------------------------------- one training


def test_a_training_leaves_its_rows(own, tmp_path):
    (one,), (job,) = jobs(own, tmp_path, "softmax")
    steps = []
    assert train(job, CPU, Shelf(), lambda said: steps.append(said["step"])) == "finished"
    assert steps[0] == 0 and steps[-1] == 120 and is_done(job.folder)
    rows = {place.cell: row for place, row in rows_of(job.folder, one)}
    accuracy = RunFolder.open(job.folder).evaluation()["metrics"]["accuracy"]
    assert rows["softmax/error"].value == pytest.approx(100 - 100 * accuracy)
    assert rows["softmax/accuracy"].value == pytest.approx(100 * accuracy)
    first = rows["softmax/error"]
    assert (first.status, first.steps, first.recipe_hash) == ("finished", 120, one.recipe.hash)
    assert first.data == data_digest(load_data("digits", hold_out=one.recipe.data.hold_out)) and first.seconds > 0
    assert [step for step, _ in first.points()] == [*range(6, 121, 6)]
    assert first.points()[-1][1] == pytest.approx(first.value, abs=0.01)
    record = json.loads((job.folder / RECORD).read_text())
    system = RunFolder.open(job.folder)
    assert record["trained_parameters"] > 0 and not record["stand_in"] and system.facts()["status"] == "finished"


def test_a_training_that_diverges_is_a_result(own, tmp_path):
    found = trainings(own, "paper", cells=["softmax"], seeds=[0])[0]
    job = Job((*found.command, "optimiser.lr=1e30"), "hot", tmp_path / f"hot-{found.recipe.hash}")
    assert train(job, CPU, Shelf()) == "diverged" and is_done(job.folder)
    (_, row), *_ = rows_of(job.folder, found)
    assert row.value is None and row.status == "diverged" and row.steps < 120


def test_a_shelf_reads_each_data_set_once(own, monkeypatch):
    reads = []
    monkeypatch.setattr("hypersphere.reproduce.work.load_data", lambda *given: reads.append(1) or load_data("digits"))
    shelf = Shelf(size=1)
    soft, arc = (one.recipe for one in trainings(own, "paper", seeds=[0]))
    first = shelf.get(soft, None, noise=False)
    assert shelf.get(arc, None, noise=False) is first and len(reads) == 1
    other = soft.model_copy(update={"data": soft.data.model_copy(update={"hold_out": (1,)})})
    shelf.get(other, None, noise=False)
    shelf.get(soft, None, noise=False)  # which had to go
    assert len(reads) == 3


def test_a_digest_is_that_of_the_content():
    digits, others = load_data("digits"), load_data("digits", hold_out=[3])
    assert data_digest(digits) == data_digest(load_data("digits")) != data_digest(others)


# --------------------------------------------------------------------------------------------------- the workers


def metrics(folder: Path) -> bytes:
    return (folder / "metrics.jsonl").read_bytes()


def test_workers_train_and_one_failure_stops_nothing(own, tmp_path):
    found, todo = jobs(own, tmp_path, seeds=(0, 1))
    broken = Job(("digits-softmax", "train.steps=two"), "broken", tmp_path / "broken")
    told = []
    outcome = pool.work([broken, *todo], workers=2, device="cpu", tell=lambda name, said: told.append((name, said)))
    assert outcome.ended == dict.fromkeys((job.folder.name for job in todo), "finished") and not outcome.left
    assert list(outcome.failed) == ["broken"] and "train.steps" in outcome.failed["broken"]
    assert {name for name, said in told if said.get("step") == 120} == {job.folder.name for job in todo}
    rows = plan.Rows(tmp_path / "rows")
    assert not any(map(rows.has, found))
    rows.take(tmp_path, found)
    assert all(map(rows.has, found)) and plan.missing(found, rows, tmp_path / "elsewhere") == []
    assert len(read_rows(tmp_path / "rows", own.id)) == 2 * 4


def test_a_deadline_leaves_what_a_second_call_finishes(own, tmp_path):
    """And what it ends with is what an uninterrupted training ends with."""
    found, todo = jobs(own, tmp_path / "stopped", "softmax")
    late = time.monotonic() + 3600
    stopping = {"deadline": late}

    def tell(name, said):
        if said.get("step", 0) >= 30:
            stopping["deadline"] = 0.0

    class Soon(float):
        def __le__(self, other):  # asked at every turn whether it is late
            return stopping["deadline"] <= other

        __rge__ = __le__

    outcome = pool.work(todo, device="cpu", deadline=Soon(late), tell=tell)
    assert outcome.left == [todo[0].folder.name] and not is_done(todo[0].folder)
    step = RunFolder.open(todo[0].folder).facts()["step"]
    assert 30 <= step < 120
    assert pool.work(todo, device="cpu").ended == {todo[0].folder.name: "finished"}
    _, whole = jobs(own, tmp_path / "whole", "softmax")
    pool.work(whole, device="cpu")
    assert metrics(todo[0].folder) == metrics(whole[0].folder)
    assert next(row for _, row in rows_of(todo[0].folder, found[0])).value is not None


def test_a_worker_that_is_killed_costs_its_training_alone(own, tmp_path):
    _, todo = jobs(own, tmp_path, seeds=(0, 1))
    victim = todo[0].folder.name
    killed = []

    def tell(name, said):
        if name == victim and said.get("step") == 10 and not killed:
            mine = {int(line.split()[0]) for line in _processes() if line.split()[1] == str(os.getpid())}
            busy = [pid for pid in mine if _holds(pid, todo[0].folder)]
            killed.extend(busy)
            for pid in busy:
                os.kill(pid, signal.SIGKILL)

    outcome = pool.work(todo, workers=1, device="cpu", tell=tell)
    if not killed:
        pytest.skip("no /proc to find the worker by")
    assert victim in outcome.failed and "-9" in outcome.failed[victim]
    assert len(outcome.ended) == len(todo) - 1


def _processes():
    return subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout.splitlines()[1:]


def _holds(pid, folder):
    try:
        return any(str(folder) in str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def test_an_interrupted_command_leaves_no_process_and_goes_on(tmp_path):
    table = tmp_path / "mine.yaml"
    table.write_text(TEXT.replace("digits-table", "mine-again").replace("train.steps=120", "train.steps=4000"))
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hypersphere", "reproduce", str(table), "--scale", "paper", "--cells", "softmax"]
    command += ["--seeds", "1", "--device", "cpu", "--output", str(tmp_path / "out")]
    running = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        patience = time.monotonic() + 120
        while not any((tmp_path / "out").glob("*/metrics.jsonl")) and time.monotonic() < patience:
            assert running.poll() is None, running.stdout.read()
            time.sleep(0.1)
        running.send_signal(signal.SIGINT)
        text, _ = running.communicate(timeout=90)
    finally:
        running.kill()
    assert running.returncode == 130, text
    (folder,) = (tmp_path / "out").glob("mine-again-*")
    facts = RunFolder.open(folder).facts()
    assert facts["status"] == "interrupted" and 0 < facts["step"] < 4000
    assert RunFolder.open(folder).latest_checkpoint() is not None
    left = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True).stdout
    assert str(running.pid) not in [line.split()[0] for line in left.splitlines()[1:]]


# ------------------------------------------------------------------------------------------------------- shares


def test_shares_of_several_processes_are_disjoint_and_complete(own):
    found = trainings(own, "paper", seeds=range(5))
    for size in (1, 2, 3, 4):
        parts = []
        for rank in range(size):
            mine, of = pool.share_of_processes({"RANK": str(rank), "WORLD_SIZE": str(size)})
            parts += found[mine::of]
        assert sorted(one.recipe.hash for one in parts) == sorted(one.recipe.hash for one in found)


def test_numbers_of_a_launcher_that_mean_nothing():
    with pytest.raises(ArgumentError, match="RANK must be from 0 to 1 of 2 processes, got 2"):
        pool.share_of_processes({"RANK": "2", "WORLD_SIZE": "2"})
    uneven = {"SLURM_ARRAY_TASK_ID": "4", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "9"}
    with pytest.raises(ArgumentError, match="even steps"):
        pool.share_of_processes({**uneven, "SLURM_ARRAY_TASK_COUNT": "3"})
    assert pool.share_of_processes({"SLURM_PROCID": "1", "SLURM_NTASKS": "3"}) == (1, 3)


def test_workers_may_have_processes_of_their_own(tmp_path):
    """Which decode images."""
    for split in ("train", "test"):
        for person in ("a", "b"):
            folder = tmp_path / "faces" / split / person
            folder.mkdir(parents=True)
            for number in range(4):
                pixels = torch.randint(256, (8, 8, 3), dtype=torch.uint8).numpy()
                Image.fromarray(pixels).save(folder / f"{number}.png")
    words = ["data.name=image-folder", f"data.path={tmp_path / 'faces'}", "data.size=[8,8]", "data.workers=1"]
    words += ["data.hold_out=[]", "data.batch_size=4", "train.steps=2", "evaluate.metrics=[classification]"]
    job = Job(("digits-softmax", *words), "folders", tmp_path / "run")
    outcome = pool.work([job], device="cpu")
    assert outcome.ended == {"run": "finished"}, outcome.failed


def test_threads_do_not_depend_on_how_much_is_left(own, tmp_path):
    """One training of a call that has two workers has the threads that each of two has."""
    _, (job,) = jobs(own, tmp_path, "softmax")
    pool.work([job], workers=2, device="cpu")
    threads = RunFolder.open(job.folder).facts()["environment"]["threads"]
    assert threads == str(max(1, os.cpu_count() // 2))


def test_each_process_of_a_host_has_its_own_gpu(own, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pool.device_of_process("cuda") == "cuda:1" and pool.device_of_process("cpu") == "cpu"
    seen = []
    monkeypatch.setattr(pool, "_Worker", lambda context, setting: seen.append(setting.device) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pool.work(jobs(own, tmp_path, "softmax")[1], device="cuda")
    assert seen == ["cuda:1"]


def test_two_processes_that_record_lose_nothing(own, tmp_path):
    program = f"""
import sys
sys.path[:0] = {[str(SOURCE), str(SOURCE.parent / "tests")]!r}
from pathlib import Path
from hypersphere.reproduce import find
from hypersphere.reproduce.rows import Row, write_rows
table = find({str(tmp_path / "digits-table.yaml")!r})
for seed in range(int(sys.argv[1]), 20, 2):
    row = Row("paper", "small", "softmax/error", seed, 1.0, "finished", 2, 1.0, *5 * ["x"])
    write_rows(Path({str(tmp_path / "rows")!r}), table, [row])
"""
    both = [subprocess.Popen([sys.executable, "-c", program, str(first)]) for first in (0, 1)]
    assert [one.wait(timeout=120) for one in both] == [0, 0]
    assert [row.seed for row in read_rows(tmp_path / "rows", own.id)] == list(range(20))


def test_what_was_known_before_a_divergence_is_kept(tmp_path):
    file = tmp_path / "early.yaml"
    start = "columns:\n  start: {title: Start, measure: {at: first}}\n  size: {title: Size, measure: {split: run, "
    file.write_text(
        TEXT.replace("digits-table", "early-table")
        .replace("columns:\n", start + "metric: trained_parameters, read: plain}}\n")
        .replace("accuracy: 98.0}", "accuracy: 98.0, start: null, size: null}")
        .replace("train.steps=120", "train.steps=40, evaluate.every=2, optimiser.lr=1e4")
    )
    found = trainings(find(str(file)), "paper", cells=["softmax"], seeds=[0])[0]
    job = Job(found.command, "early", tmp_path / f"early-{found.recipe.hash}")
    status = train(job, CPU, Shelf())
    rows = {place.cell: row for place, row in rows_of(job.folder, found)}
    assert rows["softmax/size"].value > 0 and rows["softmax/start"].value is not None
    assert (rows["softmax/error"].value is None) == (status == "diverged")


def test_a_gpu_is_not_shared_without_one():
    with pool.shared_gpu(4, "cpu") as shared:
        assert not shared and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_caches_of_compiled_code_are_where_they_are_wanted(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    with pool.compile_caches(tmp_path):
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
    assert "TRITON_CACHE_DIR" not in os.environ
