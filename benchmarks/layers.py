"""Time, memory and accuracy of decoupled layers against ``nn.Conv2d``, and of whole training steps made of them.

Layers are timed forward and backward, with gradients of input and weights: ours, ours under ``torch.compile``, and
what a user would write (a filter of ones over the squared input, a division, an arccos; left to autograd), eager and
compiled. Each is also timed as one CUDA graph, since launches cost more than small layers do, and is compared with
float64 on what it was given to time. Networks are timed as whole steps, compiled and captured, ordinary and decoupled.

    python benchmarks/layers.py --output docs/rows/layers.json

On a CPU smaller cases run in float32 with one thread, and networks neither compiled nor captured: good for ratios.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hypersphere as hs
from hypersphere.results import ResultRow, write_rows
from hypersphere.runs import code_version

EPS, STEEPNESS = 1e-4, 0.3
WARM_UP = 3
CHECKED = 2
"""Samples that are compared with float64."""

OURS = (
    ("sphere", "cosine"),
    ("sphere", "sigmoid"),
    ("sphere", "linear"),
    ("tanh", "cosine"),
    ("ball", "cosine"),
    ("seg", "sqcos"),
)
COMPILED = (("sphere", "cosine"), ("sphere", "sigmoid"), ("tanh", "cosine"))
"""Those of ours that are compiled too, and that networks are made of: compiling takes most of a run."""

PRECISIONS = {"bf16": "bfloat16", "autocast": "bfloat16 autocast", "fp32": "float32"}
Step = Callable[[], Tensor]


class PlainSphereConv2d(nn.Conv2d):
    """What a user would write, 3x3; the angle in float32, because bfloat16 has no number between 0.996 and 1."""

    def __init__(self, channels: int, angular: str) -> None:
        super().__init__(channels, channels, 3, padding=1, bias=False)
        self.angular = angular
        self.register_buffer("ones", torch.ones(1, channels, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Responses, the shape of ``x``."""
        patch_norms = (F.conv2d(x * x, self.ones, padding=1) + EPS).sqrt()
        kernel_norms = (self.weight.square().sum((1, 2, 3)) + EPS).sqrt()
        cosines = F.conv2d(x, self.weight, padding=1) / (patch_norms * kernel_norms[:, None, None])
        if self.angular == "sigmoid":
            angles = cosines.float().clamp(-1 + 1e-6, 1 - 1e-6).acos()
            cosines = torch.tanh((math.pi / 2 - angles) / (2 * STEEPNESS)) / math.tanh(math.pi / (4 * STEEPNESS))
        return cosines.to(x.dtype)


@dataclass(frozen=True)
class Provider:
    """A 3x3 layer from somewhere."""

    origin: str
    operator: str = ""
    angular: str = ""
    compiled: bool = False

    @property
    def name(self) -> str:
        """How the table calls it."""
        kind = f", {self.operator} {self.angular}" if self.operator else ""
        return self.origin + kind + (", compiled" if self.compiled else "")

    def build(self, channels: int) -> nn.Module:
        """The layer, not compiled."""
        if self.origin == "ours":
            return hs.nn.create(self.operator, angular=self.angular)(channels, channels, 3, padding=1)
        if self.origin == "plain PyTorch":
            return PlainSphereConv2d(channels, self.angular)
        return nn.Conv2d(channels, channels, 3, padding=1, bias=False)


def providers(compiled: bool) -> list[Provider]:
    """All of them, the reference first."""
    ours = [Provider("ours", *kind) for kind in OURS]
    plain = [Provider("plain PyTorch", "sphere", angular) for angular in ("cosine", "sigmoid")]
    fast = [*(provider for provider in ours if (provider.operator, provider.angular) in COMPILED), *plain]
    return [Provider("nn.Conv2d"), *ours, *plain, *(replace(provider, compiled=True) for provider in fast if compiled)]


@dataclass(frozen=True)
class Case:
    """Where layers are timed."""

    batch: int
    channels: int
    size: int
    precision: str

    @property
    def title(self) -> str:
        """Heading of its table."""
        shape = f"3x3, {self.channels} to {self.channels} channels at {self.size}x{self.size}, batch {self.batch}"
        return f"Layer, forward and backward, {shape}, {PRECISIONS[self.precision]}"


def cases(gpu: bool, quick: bool, with_autocast: bool) -> list[Case]:
    """The layers that are timed on a device."""
    sizes = ((128, 256, 56), (128, 96, 32)) if gpu else ((16, 64, 32), (16, 256, 8))
    kinds = ("bf16", *(("autocast",) if with_autocast else ())) if gpu else ("fp32",)
    return [Case(*size, kind) for kind in kinds for size in (((4, 8, 6),) if quick else sizes)]


@dataclass
class Entry:
    """A row of a table: how to take a step, and what was measured."""

    name: str
    step: Step | None = None
    replay: Step | None = None
    times: list[float] = field(default_factory=list)
    captured: list[float] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)
    failure: str = ""

    def attempt(self, what: str, part: Callable[[], None]) -> bool:
        """Whether ``part`` ran; a failure is kept for the table, and the other providers go on."""
        try:
            part()
        except Exception as error:  # noqa: BLE001 (whatever it is, it belongs into the table)
            lines = str(error).strip().splitlines() or [""]
            self.failure = f"{what}: {type(error).__name__}: {lines[0][:200]}"
            return False
        return True

    def prepare(self, what: str, part: Callable[[], None]) -> bool:
        """The same with a line of progress: compiling takes its time."""
        start = time.perf_counter()
        done = self.attempt(what, part)
        took = time.perf_counter() - start
        print(f"  {what}: {self.name} ({took:.1f} s)", "" if done else "FAILED", file=sys.stderr, flush=True)
        return done

    def time_once(self, device: torch.device) -> None:
        """One more time of the step, and of its captured form."""
        if self.step is not None:
            self.times.append(milliseconds(self.step, device))
        if self.replay is not None:
            self.captured.append(milliseconds(self.replay, device))


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context of a step; the cast weights of a captured step must not outlive it, hence no cache."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "autocast", cache_enabled=False)


def oracle(provider: Provider, weight: Tensor, x: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """Output and gradient of the input of the first samples in float64, every patch copied out.

    Only the mean norm of the patches, which scales a radius, looks at the other samples.
    """
    few = x[:CHECKED].detach().double().requires_grad_()
    kernels = weight.detach().double().flatten(1)
    patches = F.unfold(few, 3, padding=1)
    y = kernels @ patches
    if provider.operator:
        norms = (patches.square().sum(1, keepdim=True) + EPS).sqrt()
        others = x[CHECKED:].detach().double().square().sum(1, keepdim=True)
        others = (F.unfold(others, 3, padding=1).sum(1) + EPS).sqrt()
        radius = (norms.sum() + others.sum()) / (norms.numel() + others.numel())
        magnitude = {
            "sphere": lambda: torch.ones_like(norms),
            "tanh": lambda: torch.tanh(norms / radius),
            "ball": lambda: torch.minimum(norms, radius) / radius,
            "seg": lambda: torch.where(norms <= radius, norms, 0.5 * norms + 0.5 * radius),
        }[provider.operator]()
        cosines = y / norms / (kernels.square().sum(1, keepdim=True) + EPS).sqrt()
        angular = {
            "cosine": lambda c: c,
            "sigmoid": lambda c: (
                ((math.pi / 2 - c.acos()) / (2 * STEEPNESS)).tanh() / math.tanh(math.pi / (4 * STEEPNESS))
            ),
            "linear": lambda c: 1 - c.acos() * (2 / math.pi),
            "sqcos": lambda c: c * c.abs(),
        }[provider.angular]
        y = magnitude * angular(cosines)
    y = y.unflatten(2, few.shape[2:])
    (gradient,) = torch.autograd.grad(y, few, upstream[:CHECKED].double())
    return y.detach(), gradient


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference relative to the expected norm."""
    return float((found.detach().double() - expected).norm() / expected.norm())


def capture(step: Step) -> Step:
    """The step as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay(kept: Step = step) -> Tensor:  # with the step live the tensors that the graph reads
        graph.replay()
        return result

    return replay


def milliseconds(step: Step, device: torch.device) -> float:
    """Time of one step: on a GPU between events around several, on a CPU that of the processor."""
    if device.type == "cpu":
        start = time.process_time()
        step()
        return (time.process_time() - start) * 1e3
    repeats = 5
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def take_turns(entries: Sequence[Entry], device: torch.device, repeats: int) -> None:
    """Time all of them round-robin: a change of clocks meets every one alike."""
    for _ in range(repeats):
        for entry in entries:
            if not entry.attempt("time", lambda: entry.time_once(device)):  # noqa: B023
                entry.step = entry.replay = None


def prepare_layer(provider: Provider, case: Case, x: Tensor, upstream: Tensor, entry: Entry) -> Callable[[], None]:
    """Build, check, warm up and weigh a provider; returns what drops the gradients of its last step."""
    device = x.device
    module = provider.build(case.channels).to(device)
    module = module.to(torch.bfloat16 if case.precision == "bf16" else torch.float32)
    if device.type == "cuda":
        module = module.to(memory_format=torch.channels_last)
    call = torch.compile(module, dynamic=False) if provider.compiled else module

    def drop() -> None:
        x.grad = None
        module.zero_grad(set_to_none=True)

    with autocast(device, case.precision), torch.no_grad():
        upstream = upstream.to(module(x).dtype)

    def step(given: Tensor = upstream) -> Tensor:
        drop()
        with autocast(device, case.precision):
            y = call(x)
        y.backward(given)
        return y.detach()

    first = upstream.clone()
    first[CHECKED:] = 0
    y = step(first)
    expected, gradient = oracle(provider, module.weight, x, first)
    assert x.grad is not None
    facts = {"output error": relative(y[:CHECKED], expected), "gradient error": relative(x.grad[:CHECKED], gradient)}
    limit = 1e-4 if case.precision == "fp32" else 0.03
    if not all(error < limit for error in facts.values()):  # also where one is NaN
        entry.failure = f"check: more than {limit:g} away from float64"
    del first, y, expected, gradient
    for _ in range(WARM_UP):
        step()
    drop()
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        facts = {"GiB": torch.cuda.max_memory_allocated() / 2**30, **facts}
        drop()
    entry.facts, entry.step = facts, step
    return drop


def time_layers(chosen: Sequence[Provider], case: Case, device: torch.device, repeats: int) -> list[Entry]:
    """All providers on one input."""
    torch.compiler.reset()
    gpu = device.type == "cuda"
    if gpu:  # the graphs of an earlier case keep their memory until then
        gc.collect()
        torch.cuda.empty_cache()
    generator = torch.Generator(device).manual_seed(0)
    shape = (case.batch, case.channels, case.size, case.size)
    kind = torch.float32 if case.precision == "fp32" else torch.bfloat16
    layout = torch.channels_last if gpu else torch.contiguous_format
    x, upstream = (
        torch.randn(shape, generator=generator, device=device).to(kind).contiguous(memory_format=layout)
        for _ in range(2)
    )
    x.requires_grad_()
    torch.manual_seed(0)
    entries = [Entry(provider.name) for provider in chosen]
    drops: list[Callable[[], None]] = []
    for provider, entry in zip(chosen, entries, strict=True):
        entry.prepare("prepare", lambda: drops.append(prepare_layer(provider, case, x, upstream, entry)))  # noqa: B023
        for drop in drops:
            drop()
    for entry in [entry for entry in entries if gpu and entry.step is not None]:
        entry.prepare("capture", lambda: setattr(entry, "replay", capture(entry.step)))  # noqa: B023
    take_turns(entries, device, repeats)
    return entries


@dataclass(frozen=True)
class Network:
    """A network whose training step is timed."""

    title: str
    model: str
    options: dict[str, object]
    batch: int
    decouple_linear: bool = False

    def heading(self, precision: str) -> str:
        """Heading of its table."""
        return f"Training step, {self.title} at 32x32, batch {self.batch}, {PRECISIONS[precision]}"

    def build(self, kind: tuple[str, str] | None) -> nn.Module:
        """The network with an ordinary classifier; all other layers of this kind."""
        options = dict(self.options)
        if kind is not None:
            operator, angular = kind
            options["conv"] = hs.nn.create(operator, angular=angular)
            if self.decouple_linear:
                options["linear"] = hs.nn.create(operator, layer="linear", angular=angular)
        backbone = hs.models.create(self.model, (3, 32, 32), **options)
        return nn.Sequential(backbone, nn.Linear(backbone.dim, 100))


def networks(gpu: bool, quick: bool, wide: bool) -> list[Network]:
    """CNN-9, ResNet-32, and its wide form where asked."""
    if quick:
        return [
            Network("tiny CNN", "plain-cnn", {"dim": 8, "widths": (4, 6), "convs_per_unit": 1}, 4, True),
            Network("tiny ResNet", "cifar-resnet", {"depth": 8, "widths": (4, 6, 8)}, 4),
        ]
    batch = 128 if gpu else 16
    wider = {"depth": 32, "widths": (96, 192, 384), "shortcut": "projection"}
    return [
        Network("CNN-9 (64/96/128)", "plain-cnn", {"dim": 256}, batch, True),
        Network("ResNet-32 (16/32/64)", "cifar-resnet", {"depth": 32}, batch),
        *([Network("ResNet-32 (96/192/384)", "cifar-resnet", wider, batch)] if wide else []),
    ]


def prepare_network(
    network: Network, kind: tuple[str, str] | None, precision: str, device: torch.device, compiled: bool
) -> Step:
    """A warm training step, captured on a GPU; it returns the loss."""
    torch.compiler.reset()
    torch.manual_seed(0)
    gpu = device.type == "cuda"
    layout = torch.channels_last if precision == "autocast" else torch.contiguous_format
    net = network.build(kind).to(device).to(memory_format=layout)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
    images = torch.randn(network.batch, 3, 32, 32, device=device).contiguous(memory_format=layout)
    labels = torch.randint(100, (network.batch,), device=device)
    call = torch.compile(net, dynamic=False) if compiled else net

    def step() -> Tensor:
        optimiser.zero_grad(set_to_none=True)
        with autocast(device, precision):
            logits = call(images)
        loss = F.cross_entropy(logits.float(), labels)
        loss.backward()
        optimiser.step()
        return loss.detach()

    if gpu:
        return capture(step)
    for _ in range(WARM_UP):
        step()
    return step


def time_networks(
    names: dict[str, tuple[str, str] | None],
    network: Network,
    precision: str,
    device: torch.device,
    compiled: bool,
    repeats: int,
) -> list[Entry]:
    """One network, ordinary and decoupled."""
    entries = [Entry(name) for name in names]
    for entry in entries:

        def prepare(entry: Entry = entry) -> None:
            entry.step = prepare_network(network, names[entry.name], precision, device, compiled)

        def trained(entry: Entry = entry) -> None:
            if not math.isfinite(float(entry.step())):
                raise ArithmeticError("the loss is not finite")

        if entry.prepare("prepare", prepare):
            entry.attempt("one step", trained)
    take_turns(entries, device, repeats)
    return entries


COLUMNS = (
    *("ms", "20 %", "80 %", "x", "captured ms", "captured x", "GiB", "GiB x", "output error", "gradient error"),
    *("other answers", "TAR"),
)


def measured(entry: Entry) -> dict[str, float]:
    """The figures of an entry by itself."""
    found = dict(entry.facts)
    if entry.times:
        ordered = sorted(entry.times)
        found["ms"] = statistics.median(ordered)
        found["20 %"], found["80 %"] = (ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.8))
    if entry.captured:
        found["captured ms"] = statistics.median(entry.captured)
    return found


def compared(entries: Sequence[Entry]) -> dict[str, dict[str, float]]:
    """The figures of all entries, also as multiples of the first one's."""
    base = measured(entries[0])
    table = {entry.name: measured(entry) for entry in entries}
    for found in table.values():
        for key, ratio in (("ms", "x"), ("captured ms", "captured x"), ("GiB", "GiB x")):
            if key in found and key in base:
                found[ratio] = found[key] / base[key]
    return {name: {key: found[key] for key in COLUMNS if key in found} for name, found in table.items()}


def show(title: str, entries: Sequence[Entry]) -> None:
    """Print a table; errors come last in a row."""
    table = compared(entries)
    titles = [key for key in COLUMNS if any(key in found for found in table.values())]
    width = max(len(entry.name) for entry in entries)
    print(f"\n{title} (x: multiple of {entries[0].name})")
    print(" " * width, *(f"{key:>14}" for key in titles))
    for entry in entries:
        cells = [table[entry.name].get(key) for key in titles]
        texts = ["" if cell is None else f"{cell:.1e}" if cell < 0.01 else f"{cell:.2f}" for cell in cells]
        print(f"{entry.name:{width}s}", *(f"{text:>14}" for text in texts), f" {entry.failure}".rstrip())
    sys.stdout.flush()


def to_rows(title: str, entries: Sequence[Entry], command: str, hardware: str, note: str) -> list[ResultRow]:
    """The table as rows for the documentation."""
    return [
        ResultRow(
            kind="benchmark",
            group=title,
            what=name,
            metric=f"{metric} {entries[0].name}" if metric.endswith("x") else metric,
            unit="",
            mean=value,
            interval=None,
            seeds=(0,),
            command=command,
            version=code_version(),
            hardware=hardware,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            note=note,
        )
        for name, found in compared(entries).items()
        for metric, value in found.items()
    ]


def command_line(arguments: Sequence[str], script: str = "layers") -> str:
    """The command of a run; where its rows go is no part of how they came about."""
    given = list(arguments)
    for name in {"--output", "--rows"} & set(given):
        del given[given.index(name) : given.index(name) + 2]
    return " ".join([f"python benchmarks/{script}.py", *given])


def main(arguments: Sequence[str] | None = None) -> int:
    """Time, print, and write rows where asked; 1 where a provider failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=("layers", "nets"), help="one half of the tables")
    parser.add_argument("--providers", nargs="+", help="words of which a provider's name must contain one")
    parser.add_argument("--eager", action="store_true", help="layers without torch.compile, which takes most of a run")
    parser.add_argument("--repeat", type=int, default=20, help="timed repetitions")
    parser.add_argument("--autocast", action="store_true", help="layers with float32 weights under autocast, too")
    parser.add_argument("--precision", choices=("autocast", "fp32"), help="one precision of the networks")
    parser.add_argument("--wide", action="store_true", help="ResNet-32 with 96/192/384 filters, too")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and nothing compiled: does it run?")
    parser.add_argument("--output", "--rows", type=Path, help="JSON file for docs/rows")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    device = torch.device(options.device)
    gpu = device.type == "cuda"
    if not gpu:
        torch.set_num_threads(1)
    hardware = f"{torch.cuda.get_device_name() if gpu else 'CPU'}, torch {torch.__version__}"
    print(f"{hardware}, {code_version()}", flush=True)
    repeats = 2 if options.quick else options.repeat
    rows: list[ResultRow] = []
    failed = False

    def chosen(name: str) -> bool:
        return not options.providers or any(word in name for word in options.providers)

    def finish(title: str, entries: Sequence[Entry], note: str) -> None:
        nonlocal failed, rows
        title += "" if gpu else " (CPU)"
        show(title, entries)
        command = command_line(sys.argv[1:] if arguments is None else arguments)
        rows += to_rows(title, entries, command, hardware, f"median of {repeats} interleaved repetitions; {note}")
        failed |= any(entry.failure for entry in entries)
        if options.output:
            write_rows(options.output, rows)

    if options.only != "nets":
        reference, *others = providers(compiled=not (options.quick or options.eager))
        layers = [reference, *(provider for provider in others if chosen(provider.name))]
        note = "channels-last; captured: in one CUDA graph; " if gpu else "one thread, processor time; "
        note += "memory with input, output gradient and weights; " if gpu else ""
        for case in cases(gpu, options.quick, options.autocast):
            finish(case.title, time_layers(layers, case, device, repeats), note + "errors relative to float64")
    if options.only != "layers":
        kinds = {" ".join(kind): kind for kind in COMPILED if chosen(" ".join(kind))}
        compiled = gpu and not options.quick
        note = f"SGD with momentum; {'compiled, ' if compiled else ''}{'in one CUDA graph' if gpu else 'one thread'}"
        for precision in ("autocast", "fp32") if gpu else ("fp32",):
            for network in networks(gpu, options.quick, options.wide) if options.precision in (None, precision) else ():
                entries = time_networks({"ordinary": None, **kinds}, network, precision, device, compiled, repeats)
                finish(network.heading(precision), entries, note)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
