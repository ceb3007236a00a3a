"""Worlds of several gloo processes, each started once and asked again and again: ``worlds(3).run(function, ...)``."""

from __future__ import annotations

import atexit
import io
import multiprocessing as mp
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SLOW = ("hypersphere", "torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo")
"""What takes long to import, and does so once for all processes."""
SECONDS = 120


class World:
    """Some processes that wait for work.

    Args:
        size: How many.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        context = mp.get_context("forkserver")  # which has imported torch already
        context.set_forkserver_preload(["helpers.worlds", *SLOW])
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self._folder, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """What ``function(*args, **kwargs)`` returns on every process, in the order of their ranks.

        The function stands in a module; within it ``torch.distributed`` is initialised. Where a process raises, all of
        them end, and so they do where they take longer than two minutes.
        """
        sent = _packed((function, args, kwargs))
        for pipe in self._pipes:
            pipe.send_bytes(sent)
        found: dict[int, Any] = {}
        left = dict(enumerate(self._pipes))
        while left:
            ready = wait(list(left.values()), SECONDS)
            if not ready:
                self.end()
                raise AssertionError(f"processes {sorted(left)} of {self.size} wait for something that does not come")
            for rank, pipe in list(left.items()):
                if pipe in ready:
                    del left[rank]
                    found[rank] = self._answer(rank, pipe)
        return [found[rank] for rank in range(self.size)]

    def _answer(self, rank: int, pipe: Connection) -> Any:
        try:
            done, value = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
        except EOFError:
            done, value = False, "it ended"
        if not done:
            self.end()
            raise AssertionError(f"process {rank} of {self.size}: {value}")
        return value

    def end(self) -> None:
        """Kill the processes; another world of this size is made when one is asked for."""
        _started.pop(self.size, None)
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()


_started: dict[int, World] = {}


def worlds(size: int) -> World:
    """The world of so many processes; started where there is none, and kept."""
    if size not in _started:
        _started[size] = World(size)
    return _started[size]


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _serve(rank: int, size: int, folder: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    while True:
        try:
            function, args, kwargs = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
        except EOFError:  # the tests are over
            os._exit(0)
        torch.manual_seed(0)
        try:
            answer = True, function(*args, **kwargs)
        except BaseException:  # noqa: BLE001 - shown by the test that asked
            answer = False, traceback.format_exc()
        pipe.send_bytes(_packed(answer))
