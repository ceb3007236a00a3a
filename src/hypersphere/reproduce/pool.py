"""Long-lived worker processes: several trainings at once on a device, stopped together, each kept where it was."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from hypersphere import plugins
from hypersphere.errors import ArgumentError, HypersphereError
from hypersphere.reproduce.work import Job, Shelf, train
from hypersphere.train.signals import Interrupted

MPS = "nvidia-cuda-mps-control"
GRACE = 60.0
"""Seconds in which a training that is asked to stop must have written its checkpoint."""

_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Outcome:
    """How the jobs of a pool ended, by the names of their folders.

    Attributes:
        ended: ``"finished"`` or ``"diverged"``.
        failed: What went wrong, of those that failed.
        left: Jobs that were stopped or never begun.
    """

    ended: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


@contextmanager
def shared_gpu(jobs: int, device: str) -> Iterator[bool]:
    """Let the processes of this one share a GPU by NVIDIA's MPS, where it is found and several want to.

    Yields:
        Whether they share it so.
    """
    control = shutil.which(MPS)
    alone = jobs < 2 or device == "cpu" or not torch.cuda.is_available()
    if control is None or alone or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield "CUDA_MPS_PIPE_DIRECTORY" in os.environ
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        os.environ.update(own)
        try:
            started = subprocess.run([control, "-d"], capture_output=True, check=False)  # noqa: S603 (fixed arguments)
            if started.returncode:
                for name in own:
                    del os.environ[name]
            yield started.returncode == 0
        finally:
            subprocess.run([control], input=b"quit\n", capture_output=True, check=False)  # noqa: S603
            for name in own:
                os.environ.pop(name, None)


@contextmanager
def compile_caches(folder: Path) -> Iterator[None]:
    """One cache of compiled code for all processes, and for those of later times."""
    places = {"TORCHINDUCTOR_CACHE_DIR": folder / "inductor", "TRITON_CACHE_DIR": folder / "triton"}
    own = {name: str(place.resolve()) for name, place in places.items() if name not in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)


def share_of_processes(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Which of how many shares of the work is this process': under ``torchrun`` or ``srun``, or of a job array.

    Raises:
        ArgumentError: The numbers of a job array are not evenly spaced, so that nobody knows which share is whose.

    Example:
        >>> share_of_processes({"RANK": "1", "WORLD_SIZE": "4"}), share_of_processes({})
        ((1, 4), (0, 1))
        >>> share_of_processes({f"SLURM_ARRAY_TASK_{key}": n for key, n in {"ID": "9", "MIN": "5", "MAX": "9",
        ...                                                                 "STEP": "2", "COUNT": "3"}.items()})
        (2, 3)
    """

    def number(name: str, default: str = "") -> int:
        return int(environment.get(name, default))

    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, size = number("RANK"), number("WORLD_SIZE")
    elif "SLURM_ARRAY_TASK_ID" in environment and "SLURM_ARRAY_TASK_COUNT" in environment:
        size, first, step = (
            number(f"SLURM_ARRAY_TASK_{key}", default) for key, default in (("COUNT", "1"), ("MIN", "0"), ("STEP", "1"))
        )
        last = number("SLURM_ARRAY_TASK_MAX", str(first + step * (size - 1)))
        rank, rest = divmod(number("SLURM_ARRAY_TASK_ID") - first, step)
        if rest or last != first + step * (size - 1):
            raise ArgumentError("SLURM_ARRAY_TASK_ID", "must be of an array with even steps, such as --array=0-7")
    elif "SLURM_PROCID" in environment and "SLURM_NTASKS" in environment:
        rank, size = number("SLURM_PROCID"), number("SLURM_NTASKS")
    else:
        return 0, 1
    if not 0 <= rank < size:
        raise ArgumentError("RANK", f"must be from 0 to {size - 1} of {size} processes, got {rank}")
    return rank, size


def device_of_process(device: str, environment: Mapping[str, str] = os.environ) -> str:
    """The device of this process: where a launcher numbers those of a host, the GPU of that number.

    Example:
        >>> device_of_process("cuda", {"LOCAL_RANK": "3"}), device_of_process("cpu", {"LOCAL_RANK": "3"})
        ('cuda:3', 'cpu')
    """
    local = environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID"))
    if local is None or device not in ("auto", "cuda") or (device == "auto" and not torch.cuda.is_available()):
        return device
    return f"cuda:{int(local) % max(1, torch.cuda.device_count())}" if torch.cuda.is_available() else f"cuda:{local}"


# ---------------------------------------------------------------------------------------------------- a worker


@dataclass(frozen=True)
class _Setting:
    """What every worker has to know."""

    device: str
    threads: int
    plugins: tuple[str, ...]


def _worker(channel: Connection, setting: _Setting) -> None:
    """Train what comes in until ``None`` does; a signal ends the training under way at its next step, and this."""
    from hypersphere.runs import pick_device  # noqa: PLC0415 (CUDA begins in this process, after MPS)

    for name in _OF_LAUNCHERS:
        os.environ.pop(name, None)
    os.setpgrp()  # Ctrl-C in a terminal goes to the first process, which stops this one: twice would be at once
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(setting.threads)
    shelf = Shelf()
    try:
        for plugin in setting.plugins:
            plugins.load(plugin)
        device = pick_device(setting.device)
        while (job := channel.recv()) is not None:
            try:
                status = train(job, device, shelf, channel.send)
            except (HypersphereError, OSError) as error:
                channel.send({"failed": str(error)})
                continue
            except Exception:  # noqa: BLE001 (whatever it is, it is told, and the other trainings go on)
                channel.send({"failed": traceback.format_exc()})
                continue
            channel.send({"ended": status})
            if status == "interrupted":
                return
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        return


def _end_with(parent: int) -> None:
    """Stop this process when the first one is gone, however it went."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


class _Worker:
    """A process, the channel to it, and what it is at work on.

    No daemon, which could have no processes of its own to decode images; it ends with the first process all the same.
    """

    def __init__(self, context: Any, setting: _Setting) -> None:
        self.channel, theirs = context.Pipe()
        self.process = context.Process(target=_worker, args=(theirs, setting))
        self.process.start()
        theirs.close()
        self.job: Job | None = None

    def give(self, job: Job) -> None:
        """Let it train."""
        self.job = job
        self.channel.send(job)

    def stop(self) -> None:
        """Ask it to stop after its step."""
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGTERM)

    def dismiss(self) -> None:
        """Let an idle one end."""
        with suppress(OSError):  # it may be gone already
            self.channel.send(None)
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class _Stopped(BaseException):
    """The user, or whoever runs this process, wants it to stop."""

    def __init__(self, number: int) -> None:
        self.number = number


# ---------------------------------------------------------------------------------------------------- the pool


def work(
    jobs: Sequence[Job],
    *,
    workers: int = 1,
    device: str = "auto",
    deadline: float | None = None,
    tell: Callable[[str, Mapping[str, Any]], None] = lambda name, what: None,
) -> Outcome:
    """Train jobs, in their order, by so many processes at once.

    Nothing is lost whenever it stops: a training goes on from its last checkpoint when it is asked for again.

    Args:
        jobs: What to train.
        workers: Processes.
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``, of all of them.
        deadline: Value of :func:`time.monotonic` at which all are stopped.
        tell: Is called with the name of a job's folder and ``{"step": ...}``, ``{"ended": status}`` or
            ``{"failed": why}``.

    Returns:
        How each of them ended.

    Raises:
        Interrupted: A signal asked to stop; everything was stopped first, each training with a checkpoint.
    """
    found = Outcome()
    waiting = list(jobs)
    # By what was asked for, so that a call that goes on with the last one has as many, and repeats it bit for bit.
    threads = max(1, (os.cpu_count() or 1) // workers)
    workers = min(workers, len(waiting))
    setting = _Setting(
        device_of_process(device),
        threads,
        tuple(str(one.path) if one.path.is_file() else one.name for one in plugins.loaded()),
    )
    context = multiprocessing.get_context("spawn")
    team: list[_Worker] = []
    stopped: int | None = None
    with _signals():
        try:
            team = [_Worker(context, setting) for _ in range(workers)]
            while _hand_out(team, waiting, deadline) or any(one.job for one in team):
                for one in list(team):
                    if not _listen(one, found, tell):
                        team.remove(one)  # a closed channel would always be ready
                        if waiting:
                            team.append(_Worker(context, setting))
                if deadline is not None and time.monotonic() >= deadline:
                    break
                wait([one.channel for one in team], timeout=0.5)
        except _Stopped as signalled:
            stopped = signalled.number
        finally:
            _gather(team, found, tell)
    found.left += [job.folder.name for job in waiting]
    if stopped is not None:
        raise Interrupted("stopped; the same command goes on where it was", stopped)
    return found


def _hand_out(team: Sequence[_Worker], waiting: list[Job], deadline: float | None) -> bool:
    """Give the idle ones something to do; whether anything was left to give."""
    for one in team:
        late = deadline is not None and time.monotonic() >= deadline
        if one.job is None and waiting and one.process.is_alive() and not late:
            try:
                one.give(waiting[0])
            except OSError:  # it has just died, and another one takes its place
                one.job = None
                continue
            del waiting[0]
    return bool(waiting)


def _listen(one: _Worker, found: Outcome, tell: Callable[[str, Mapping[str, Any]], None]) -> bool:
    """Take what a worker has to say; whether it is still there."""
    try:
        while one.channel.poll():
            said = one.channel.recv()
            name = one.job.folder.name if one.job is not None else ""
            if "failed" in said:
                found.failed[name], one.job = said["failed"], None
            elif said.get("ended") == "interrupted":
                found.left.append(name)
                one.job = None
            elif "ended" in said:
                found.ended[name], one.job = said["ended"], None
            tell(name, said)
    except (EOFError, ConnectionResetError):
        one.process.join(1)
        if one.job is not None:
            name, why = one.job.folder.name, f"its process ended with exit code {one.process.exitcode}"
            found.failed[name], one.job = why, None
            tell(name, {"failed": why})
        return False
    return True


def _gather(team: Sequence[_Worker], found: Outcome, tell: Callable[[str, Mapping[str, Any]], None]) -> None:
    """Stop what is under way, wait for its checkpoints, and end all processes."""
    busy = [one for one in team if one.job is not None]
    for one in busy:
        one.stop()
    patience = time.monotonic() + GRACE
    while any(one.job for one in busy) and time.monotonic() < patience:
        for one in busy:
            if one.job is not None:
                _end(one, found, tell)
        time.sleep(0.05)
    for one in busy:
        if one.job is not None:
            found.left.append(one.job.folder.name)
            one.process.kill()
    for one in team:
        one.dismiss()


def _end(one: _Worker, found: Outcome, tell: Callable[[str, Mapping[str, Any]], None]) -> None:
    """Listen to a worker that was asked to stop: one that ended before its training began leaves the job."""
    name = one.job.folder.name if one.job is not None else ""
    _listen(one, found, tell)
    if name in found.failed and one.process.exitcode in (-signal.SIGTERM, -signal.SIGINT, 0):
        del found.failed[name]
        found.left.append(name)


@contextmanager
def _signals() -> Iterator[None]:
    """A signal to stop becomes an exception, once."""

    def note(number: int, frame: types.FrameType | None) -> None:
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.SIG_IGN)
        raise _Stopped(number)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread, which alone receives them
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
