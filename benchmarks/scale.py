"""A step of an ArcFace head whose classes are divided among processes, and the model of it beside.

    python benchmarks/scale.py --processes 1,2,4 --play 8,64 --rows docs/rows/scale.json
    torchrun --nproc-per-node N benchmarks/scale.py --gpus N --classes 10000000 --dim 512 --batch 128

On a CPU, processes on one host take turns, step by step, with those of other numbers, and what counts is the processor
time of each: the host may be shared. Batches are fixed on each process, and in all. The model takes its rate from the
step of one process. ``--play W`` measures one shard of W processes, with the batch of all of them and no exchange. On
GPUs (bfloat16 autocast) the step is measured as it is and without exchange, and the model's rate is that of
``hypersphere plan``.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import hypersphere as hs
from hypersphere.losses.plan import MEASURED, plan_head
from hypersphere.results import ResultRow, write_rows
from hypersphere.runs import code_version

Step = Callable[[], None]


class Case(NamedTuple):
    """What is measured: a head on so many processes, each with a batch."""

    name: str
    processes: int
    batch: int
    classes: int
    dim: int

    def operations(self) -> float:
        """Those of a process, by the model."""
        plans = {plan.name: plan for plan in plan_head(self.batch, self.classes, self.dim, self.processes)}
        return plans["divided" if self.processes > 1 else "replicated"].operations

    def exchanged(self, low: bool) -> int:
        """Bytes that each process sends, by the model."""
        plans = plan_head(self.batch, self.classes, self.dim, self.processes, low_precision=low)
        return sum(plan.bytes_exchanged for plan in plans if plan.name == "divided")


def head_of(case: Case, device: str) -> nn.Module:
    """The head of a process. No process ever holds all classes, and the last one may get some that nobody asked for."""
    share = -(-case.classes // case.processes)
    with torch.device(device):
        head = hs.losses.ArcFace(case.dim, share, path="chunked")
    if case.processes > 1:
        mesh = init_device_mesh(device.partition(":")[0], (case.processes,))
        head.weight = nn.Parameter(DTensor.from_local(head.weight.detach(), mesh, [Shard(0)]))
        head.classes = share * case.processes
        head.sync_statistics, head.equal_batches = False, True
    return head


def step_of(case: Case, device: str = "cpu") -> Step:
    """Forward and backward pass of a process."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    head = head_of(case, device)
    features = torch.randn(case.batch, case.dim, device=device).requires_grad_()
    labels = torch.randint(head.classes, (case.batch,), device=device)
    kind = device.partition(":")[0]

    def step() -> None:
        features.grad = None
        head.zero_grad(set_to_none=True)
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            # As a model gives them: in 16 bit under autocast.
            loss = head(features.bfloat16() if kind == "cuda" else features, labels)
        loss.backward()

    return step


# ------------------------------------------------------------------------------------------------ processes on a CPU


def serve(rank: int, processes: int, backend: str, folder: str, pipe: Connection) -> None:
    """A process: makes the step of a case, or takes one and answers with its processor seconds."""
    torch.set_num_threads(1)
    if backend == "fake":  # exchanges nothing: what others would send is what this one has
        from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
    else:
        store = dist.FileStore(str(Path(folder) / f"store-{processes}"), processes)
        dist.init_process_group(backend, store=store, rank=rank, world_size=processes)
    steps: dict[str, Step] = {}
    while (case := pipe.recv()) is not None:
        if case.name not in steps:
            steps[case.name] = step_of(case)
            steps[case.name]()
            steps[case.name]()
        begin = time.process_time()
        steps[case.name]()
        pipe.send(time.process_time() - begin)
    pipe.send(None)
    pipe.recv()  # until all have come so far
    os._exit(0)


class World:
    """Processes of one number; of a fake world only the first."""

    def __init__(self, processes: int, backend: str, folder: str) -> None:
        context = mp.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(1 if backend == "fake" else processes):
            ours, theirs = context.Pipe()
            child = context.Process(target=serve, args=(rank, processes, backend, folder, theirs), daemon=True)
            child.start()
            self.pipes.append(ours)
            self.processes.append(child)

    def ask(self, case: Case | None) -> list[float]:
        """Processor seconds of a step on each process."""
        for pipe in self.pipes:
            pipe.send(case)
        return [pipe.recv() for pipe in self.pipes]

    def end(self) -> None:
        """Let the processes end."""
        self.ask(None)
        for pipe in self.pipes:
            pipe.send(None)
        for child in self.processes:
            child.join()


def measured_on_cpu(cases: Sequence[tuple[Case, str]], repeats: int) -> dict[str, float]:
    """Median processor seconds of a step on the slowest process, of cases that take turns."""
    with tempfile.TemporaryDirectory() as folder:
        worlds = {key: World(*key, folder) for key in {(case.processes, backend) for case, backend in cases}}
        found: dict[str, list[list[float]]] = {case.name: [] for case, _ in cases}
        for _ in range(repeats):
            for case, backend in cases:
                found[case.name].append(worlds[case.processes, backend].ask(case))
        for world in worlds.values():
            world.end()
    return {
        name: max(statistics.median(own) for own in zip(*times, strict=True)) for name, times in found.items() if times
    }


def on_cpu(arguments: argparse.Namespace) -> list[ResultRow]:
    """Measure on a CPU, print the table, and give its rows."""
    batch, classes, dim = arguments.batch, arguments.classes, arguments.dim
    base = Case("1 process", 1, batch, classes, dim)
    cases = [(base, "gloo")]
    for processes in arguments.processes:
        if processes == 1:
            continue
        cases.append((Case(f"{processes} processes, {batch} samples each", processes, batch, classes, dim), "gloo"))
        if batch % processes == 0:
            each = batch // processes
            cases.append((Case(f"{processes} processes, {batch} in all", processes, each, classes, dim), "gloo"))
    for world in arguments.play:
        name = f"one shard of {world}, {batch} samples each, no exchange"
        cases.append((Case(name, world, batch, classes, dim), "fake"))
    seconds = measured_on_cpu(cases, arguments.repeat)
    rate = base.operations() / seconds[base.name]
    title = f"Divided head, forward and backward, dimension {dim}, {classes:,} classes (CPU)"
    print(f"{title}, {batch} samples; a rate of {rate / 1e9:.1f} GFLOP/s\n")
    lines, rows = [], []
    for case, backend in cases:
        numbers = {
            "ms": 1e3 * seconds[case.name],
            "modelled ms": 1e3 * case.operations() / rate,
            "x 1 process": seconds[case.name] / seconds[base.name],
            "modelled x": case.operations() / base.operations(),
            "modelled MB sent": 0.0 if backend == "fake" else case.exchanged(low=False) / 1e6,
        }
        lines.append((case.name, numbers))
        note = f"median of {arguments.repeat} steps in turns; float32, one thread, processor time of a process"
        rows += rows_of(title, case.name, numbers, f"{note}; modelled by the rate of 1 process", arguments.command)
    table(lines)
    return rows


# ------------------------------------------------------------------------------------------------ GPUs


def milliseconds(step: Step, repeats: int) -> float:
    """Median time of a step on this GPU."""
    times = []
    for _ in range(3):
        step()
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def on_gpus(arguments: argparse.Namespace) -> list[ResultRow]:
    """Measure on the GPUs of a torchrun, or with ``--play`` shards on one; print the table, and give its rows."""
    play, device = arguments.play, f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    torch.cuda.set_device(device)
    batch, classes, dim = arguments.batch, arguments.classes, arguments.dim
    title = f"Divided head, forward and backward, dimension {dim}, {classes:,} classes, {batch} samples on each GPU"
    lines: list[tuple[str, dict[str, float]]] = []

    def add(case: Case, time: float, sent: int) -> None:
        modelled = 1e3 * case.operations() / MEASURED.rate
        lines.append((case.name, {"ms": time, "modelled ms": modelled, "modelled MB sent": sent / 1e6}))

    if play:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

        for world in play:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
            case = Case(f"one shard of {world}, no exchange", world, batch, classes, dim)
            add(case, milliseconds(step_of(case, device), arguments.repeat), 0)
            dist.destroy_process_group()
            torch.cuda.empty_cache()
    else:
        if int(os.environ.get("WORLD_SIZE", "1")) != arguments.gpus:
            raise SystemExit(f"start it by torchrun --nproc-per-node {arguments.gpus}")
        dist.init_process_group("nccl")
        share = -(-classes // arguments.gpus)
        alone = Case("the same products without exchange", 1, batch * arguments.gpus, share, dim)
        add(alone, milliseconds(step_of(alone, device), arguments.repeat), 0)
        whole = Case(f"{arguments.gpus} GPUs", arguments.gpus, batch, classes, dim)
        add(whole, milliseconds(step_of(whole, device), arguments.repeat), whole.exchanged(low=True))
        rank = dist.get_rank()
        dist.destroy_process_group()
        if rank:
            return []
    print(f"{title}; modelled by {MEASURED.rate / 1e12:.0f} TFLOP/s\n")
    table(lines)
    note = f"median of {arguments.repeat} steps; bfloat16 autocast; modelled by the rate of `hypersphere plan`"
    return [row for name, numbers in lines for row in rows_of(title, name, numbers, note, arguments.command)]


# ------------------------------------------------------------------------------------------------ what is found


def table(lines: Sequence[tuple[str, dict[str, float]]]) -> None:
    """Print Markdown."""
    print("| | " + " | ".join(lines[0][1]) + " |")
    print("|---|" + "---:|" * len(lines[0][1]))
    for name, numbers in lines:
        print(f"| {name} | " + " | ".join(f"{number:,.2f}" for number in numbers.values()) + " |")


def rows_of(title: str, name: str, numbers: dict[str, float], note: str, command: str) -> list[ResultRow]:
    """The numbers of a line as rows."""
    gpu = "(CPU)" not in title
    common = {
        "kind": "benchmark",
        "group": title,
        "what": name,
        "unit": "",
        "interval": None,
        "seeds": (0,),
        "command": command,
        "version": code_version(),
        "hardware": f"{torch.cuda.get_device_name() if gpu else 'CPU'}, torch {torch.__version__}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "note": note,
    }
    return [ResultRow(metric=metric, mean=value, **common) for metric, value in numbers.items()]


def main() -> None:
    """Measure, print, and write rows where asked."""
    numbers = lambda text: [int(number) for number in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="under torchrun, with as many processes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of --play")
    parser.add_argument("--processes", type=numbers, default=[], help="on a CPU, as 1,2,4; always beside one")
    parser.add_argument("--play", type=numbers, default=[], help="one shard of so many processes, as 8,64")
    parser.add_argument("--classes", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=64, help="samples of each process")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--rows", type=Path, help="JSON file for docs/rows")
    arguments = parser.parse_args()
    if arguments.gpus and arguments.play:
        parser.error("--gpus and --play are two measurements: give one of them")
    gpu = bool(arguments.gpus) or (arguments.device == "cuda" and arguments.play)
    listed = {name: ",".join(map(str, getattr(arguments, name))) for name in ("processes", "play")}
    given = {"gpus": arguments.gpus, "device": "cuda" if gpu and not arguments.gpus else None, **listed}
    given |= {name: getattr(arguments, name) for name in ("classes", "dim", "batch", "repeat")}
    start = f"torchrun --nproc-per-node {arguments.gpus}" if arguments.gpus else "python"
    arguments.command = " ".join([start, "benchmarks/scale.py", *(f"--{k} {v}" for k, v in given.items() if v)])
    rows = on_gpus(arguments) if gpu else on_cpu(arguments)
    if arguments.rows and rows:
        write_rows(arguments.rows, rows)


if __name__ == "__main__":
    main()
