"""Time and peak memory of the forward and backward pass of an ArcFace head, from 10 thousand to 10 million classes.

Ours against plain PyTorch (normalise, product, margin by gather and scatter, cross-entropy), the same under
``torch.compile``, and pytorch-metric-learning where it is installed and fits; a bare product of the same size says how
far the floor is. Each provider is first checked against float64, with features at known angles to their class.

    python benchmarks/margin_softmax.py --rows docs/rows/margin_softmax.json

On a GPU all of them run under bfloat16 autocast, as people train; on a CPU in float32 with up to 100 thousand classes.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import math
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hypersphere as hs
from hypersphere.results import ResultRow, write_rows
from hypersphere.runs import code_version

SCALE, MARGIN = 64.0, 0.5
Step = Callable[[], Tensor]


class PlainArcFace(nn.Module):
    """What a user would write: the margin on the target column by gather and scatter."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, dim) * 0.01)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Loss of a batch."""
        cosines = F.linear(F.normalize(features), F.normalize(self.weight)).float()
        own = labels.unsqueeze(1)
        target = cosines.gather(1, own).clamp(-1 + 1e-6, 1 - 1e-6)
        target = (target.acos() + MARGIN).clamp(max=math.pi).cos()
        return F.cross_entropy(SCALE * cosines.scatter(1, own, target), labels)


class ExactArcFace(PlainArcFace):
    """The same for float64, with the own class kept apart: the loss of a well classified sample keeps its digits."""

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Loss of a batch."""
        cosines = F.normalize(features) @ F.normalize(self.weight).T
        own = labels.unsqueeze(1)
        target = SCALE * (cosines.gather(1, own).acos() + MARGIN).clamp(max=math.pi).cos()
        others = (SCALE * cosines).scatter(1, own, float("-inf")).logsumexp(1, keepdim=True)
        return torch.log1p((others - target).exp()).mean()


def ours(dim: int, classes: int) -> nn.Module:
    """The head of this package."""
    return hs.losses.ArcFace(dim, classes, s=SCALE, m=MARGIN)


def metric_learning(dim: int, classes: int) -> nn.Module:
    """The head of pytorch-metric-learning; its margin is in degrees."""
    from pytorch_metric_learning.losses import ArcFaceLoss  # noqa: PLC0415 (optional)

    class Reordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss = ArcFaceLoss(classes, dim, margin=math.degrees(MARGIN), scale=SCALE)
            # Its weights are stored as columns.
            self.weight = self.loss.W

        def forward(self, features: Tensor, labels: Tensor) -> Tensor:
            return self.loss(features, labels)

    return Reordered()


PROVIDERS: dict[str, Callable[[int, int], nn.Module]] = {
    "ours": ours,
    "ours, compiled": ours,
    "ours, compiled and captured": ours,
    "plain PyTorch": PlainArcFace,
    "plain PyTorch, compiled": PlainArcFace,
    "plain PyTorch, compiled and captured": PlainArcFace,
    "pytorch-metric-learning": metric_learning,
}


def available(device: torch.device) -> list[str]:
    """The providers that can run here."""
    names = [name for name in PROVIDERS if device.type == "cuda" or "captured" not in name]
    try:
        import pytorch_metric_learning  # noqa: F401, PLC0415 (optional)
    except ImportError:
        names.remove("pytorch-metric-learning")
    return names


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """The precision in which a device is measured."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def build(name: str, batch: int, dim: int, classes: int, device: torch.device, weight: Tensor | None = None) -> Step:
    """A step of a provider: forward and backward pass; the gradients are left on the step as ``step.grads()``."""
    generator = torch.Generator().manual_seed(0)
    with torch.device(device):
        head = PROVIDERS[name](dim, classes).to(device)
    if weight is not None:
        with torch.no_grad():
            head.weight.copy_(weight.T if head.weight.shape != weight.shape else weight)
    features = torch.randn(batch, dim, generator=generator).to(device).requires_grad_()
    labels = torch.randint(classes, (batch,), generator=generator).to(device)
    call = torch.compile(head) if "compiled" in name else head

    def step() -> Tensor:
        features.grad = None
        head.zero_grad(set_to_none=True)
        with autocast(device):
            loss = call(features, labels)
        loss.backward()
        return loss.detach()

    if "captured" not in name:
        step.parts = (features, labels, head)
        return step
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    replay.parts = (features, labels, head)
    return replay


def check(names: list[str], device: torch.device) -> None:
    """Compare every provider's loss and gradients with float64 where samples are badly and well classified."""
    batch, dim, classes = 64, 512, 20_000
    torch.manual_seed(1)
    weight = torch.randn(classes, dim)
    print(f"{'against float64: cosine to own class':40s} " + " ".join(f"{c:>20}" for c in (0.0, 0.5, 0.7, 0.95)))
    for name in names:
        cells = []
        for cosine in (0.0, 0.5, 0.7, 0.95):
            step = build(name, batch, dim, classes, device, weight)
            features, labels, head = step.parts
            own = F.normalize(weight[labels.cpu()].double())
            noise = torch.randn(batch, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
            noise = F.normalize(noise - (noise * own).sum(1, keepdim=True) * own)
            with torch.no_grad():
                features.copy_(20 * (cosine * own + math.sqrt(1 - cosine**2) * noise))
            truth = ExactArcFace(dim, classes).double()
            with torch.no_grad():
                truth.weight.copy_(weight)
            exact = features.detach().cpu().double().requires_grad_()
            expected = truth(exact, labels.cpu())
            expected.backward()
            loss = step()
            gradient = head.weight.grad.cpu().double()
            gradient = gradient.T if gradient.shape != truth.weight.shape else gradient
            error = float((loss.cpu().double() - expected).abs() / expected.abs())
            slip = float((gradient - truth.weight.grad).norm() / truth.weight.grad.norm())
            cells.append(f"{error:9.1e} / {slip:7.1e}")
        print(f"{name:40s} " + " ".join(f"{cell:>20}" for cell in cells))
    print("(relative error of the loss / of the gradient of the weights)\n")


def milliseconds(step: Step, device: torch.device, repeats: int) -> float:
    """Time of one step, averaged over some."""
    if device.type == "cpu":
        start = time.process_time()
        for _ in range(repeats):
            step()
        return (time.process_time() - start) * 1e3 / repeats
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def floor(batch: int, dim: int, classes: int, device: torch.device) -> float:
    """Three bare products of the head's size, one after the other, in milliseconds."""
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    some = min(classes, 2**20)
    x, w = torch.randn(batch, dim, device=device, dtype=kind), torch.randn(some, dim, device=device, dtype=kind)
    out = torch.empty(batch, some, device=device, dtype=kind)

    def products() -> Tensor:
        torch.mm(x, w.T, out=out)
        torch.mm(out.T, x)
        return torch.mm(out, w)

    for _ in range(3):
        products()
    return milliseconds(products, device, 10 if device.type == "cuda" else 2) * classes / some


def peak_gib(name: str, batch: int, dim: int, classes: int, device: torch.device, step: Step | None) -> float:
    """Peak memory of a step with its weights and gradients; on a CPU what a fresh process takes beyond the imports."""
    if device.type == "cuda":
        assert step is not None
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / 2**30
    child = [sys.executable, __file__, "--peak", name, str(batch), str(dim), str(classes)]
    return float(subprocess.run(child, check=True, capture_output=True, text=True).stdout.split()[-1])


def child_peak(name: str, batch: int, dim: int, classes: int) -> None:
    """Print the growth of this process' peak memory over one step."""
    torch.set_num_threads(1)
    build(name, 2, 8, 16, torch.device("cpu"))()
    before = high_water()
    build(name, batch, dim, classes, torch.device("cpu"))()
    print((high_water() - before) / 2**20)


def high_water() -> int:
    """Most memory that this process has held, in KiB (the figure of ``getrusage`` would begin at the parent's)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1])


def fits(name: str, batch: int, classes: int, device: torch.device) -> bool:
    """Whether a provider that holds several matrices of logits can run at this size at all."""
    matrices = 0 if name.startswith("ours") else 6
    if device.type == "cpu":
        return True
    free = torch.cuda.get_device_properties(device).total_memory * 0.9
    return matrices * batch * classes * 4 + 3 * classes * 512 * 4 < free


def timed(
    names: list[str], batch: int, dim: int, classes: int, device: torch.device
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Times in milliseconds and peak memory of all providers at one size; small ones take turns."""
    gpu = device.type == "cuda"
    rounds, repeats = (7, 10 if classes <= 10**6 else 3) if gpu else (3, 1)
    together = not gpu or classes <= 10**5
    steps: dict[str, Step] = {}
    times: dict[str, list[float]] = {name: [] for name in names if fits(name, batch, classes, device)}
    peaks: dict[str, float] = {}
    for name in times:
        if gpu:
            gc.collect()
            torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated() if gpu else 0
        step = build(name, batch, dim, classes, device)
        for _ in range(4 if gpu else 1):
            step()
        # The memory of a captured graph is not among what is counted as allocated.
        if "captured" not in name:
            peaks[name] = peak_gib(name, batch, dim, classes, device, step) - before / 2**30
        if together:
            steps[name] = step
        else:
            times[name] = [milliseconds(step, device, repeats) for _ in range(rounds)]
        del step
    if together:
        for _ in range(rounds):
            for name, step in steps.items():
                times[name].append(milliseconds(step, device, repeats))
    return times, peaks


def measure(
    names: list[str], batch: int, dim: int, classes: int, device: torch.device, rows: list[ResultRow], hardware: str
) -> None:
    """Time all providers at one size, print the table and record it."""
    gpu = device.type == "cuda"
    torch.compiler.reset()
    times, peaks = timed(names, batch, dim, classes, device)
    bare = floor(batch, dim, classes, device)
    print(f"batch {batch}, dimension {dim}, {classes:,} classes; three bare products take {bare:.2f} ms")
    title = f"Margin softmax, forward and backward, batch {batch}, dimension {dim}, {classes:,} classes"
    title += "" if gpu else " (CPU)"
    for name, values in times.items():
        middle = sorted(values)[len(values) // 2]
        spread = (max(values) - min(values)) / middle
        memory = f"{peaks[name]:8.2f} GiB" if name in peaks else " " * 12
        print(f"  {name:38s} {middle:10.2f} ms {middle / bare:6.2f} x bare {memory}  spread {spread:.0%}")
        for metric, value in (("ms", middle), *([("GiB", peaks[name])] if name in peaks else [])):
            rows.append(
                ResultRow(
                    kind="benchmark",
                    group=title,
                    what=name,
                    metric=metric,
                    unit="",
                    mean=value,
                    interval=None,
                    seeds=(0,),
                    command="python benchmarks/margin_softmax.py" + ("" if gpu else " --device cpu"),
                    version=code_version(),
                    hardware=hardware,
                    date=datetime.datetime.now(datetime.UTC).date().isoformat(),
                    note=f"ArcFace; median of {len(values)} repetitions; "
                    + ("bfloat16 autocast; " if gpu else "float32, one thread, processor time; ")
                    + f"memory with weights and gradients; three bare products of this size take {bare:.2f} ms",
                )
            )
    print(flush=True)


def main() -> None:
    """Check, time, print, and write rows where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--classes", type=int, nargs="+", help="numbers of classes")
    parser.add_argument("--rows", type=Path, help="JSON file for docs/rows")
    parser.add_argument("--peak", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.peak:
        child_peak(arguments.peak[0], *map(int, arguments.peak[1:]))
        return
    device = torch.device(arguments.device)
    gpu = device.type == "cuda"
    if not gpu:
        torch.set_num_threads(1)
    hardware = f"{torch.cuda.get_device_name() if gpu else 'CPU'}, torch {torch.__version__}"
    print(f"{hardware}, {code_version()}")
    names = available(device)
    check(names, device)
    rows: list[ResultRow] = []
    sizes = arguments.classes or ((10_000, 100_000, 1_000_000, 10_000_000) if gpu else (10_000, 50_000, 100_000))
    for classes in sizes:
        measure(names, 1024 if gpu else 256, 512, classes, device, rows, hardware)
        if arguments.rows:
            write_rows(arguments.rows, rows)


if __name__ == "__main__":
    main()
