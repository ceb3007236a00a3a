"""Time and accuracy of orthogonal maps, and what they add to a training step.

Maps are timed forward and backward on one d x d matrix: ours, torch's own parametrisations, and those of geotorch and
peft where these are installed; eager and, where that is possible, as one CUDA graph. Beside every time stand the error
of orthogonality and that of the gradient against float64. Networks are timed as whole captured steps, plain and with
all layers of the backbone rotated by learned rotations, also compiled.

    python benchmarks/orthogonal.py --output docs/rows/orthogonal.json
    python benchmarks/orthogonal.py --only steps --compile  # the compiled steps alone, which take most of a run

On a CPU smaller cases run with one thread, and nothing is compiled or captured: good for ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.util
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from layers import WARM_UP, Entry, Network, autocast, command_line, relative, take_turns
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import hypersphere as hs
from hypersphere.orthogonal import Map
from hypersphere.orthogonal.rotation import BatchedRotations
from hypersphere.results import ResultRow, write_rows
from hypersphere.runs import code_version

SIZE, SPREAD = 0.5, 0.3
"""Spectral norms: of the skew matrices, and of the distance of other unconstrained matrices from the identity."""
MOVE, PLACES = 0.01, 8
"""Spectral norm by which an unconstrained matrix moves between two warm-started steps, round a loop of places."""
CHECKED = 1152
"""Size up to which gradients are compared with float64."""
TRIAL = 10
"""Steps whose matrices are looked at before a network is timed: training moves them most at its start."""
RATE = 0.01
"""Learning rate of rotations: CNN-6 learns a batch by heart in a few steps, and at ten times as much not at all."""
SLOW = 100.0
"""Milliseconds of a step from which it is timed a few times only, and not captured."""
ERROR = 1e-5
"""Error of orthogonality that no goal is met beyond."""
FIRST = "torch, cayley"

MAP_COLUMNS = (
    "ms",
    "captured ms",
    "x torch's Cayley",
    "captured x torch's Cayley",
    "speed-up over torch's",
    "largest R^T R - I",
    "gradient error",
)
STEP_COLUMNS = ("ms", "x plain", "compiled ms", "compiled x plain", "orthogonality error", "gram change")

Cells = dict[str, float | str]
Taken = tuple[Tensor, Tensor, Tensor]
"""What a step of a map leaves: the unconstrained tensor, the orthogonal matrix and the gradient."""


# ------------------------------------------------------------------------------------------------- float64 by hand


def skew(P: Tensor) -> Tensor:
    """Skew matrix of the strict upper triangle."""
    return P.triu(1) - P.triu(1).mT


def plain_cayley(P: Tensor) -> Tensor:
    """By a solve that is left to autograd."""
    W, one = skew(P), torch.eye(len(P)).to(P)
    return torch.linalg.solve(one - W, one + W)


def plain_exponential(P: Tensor) -> Tensor:
    """By torch's own exponential."""
    return torch.linalg.matrix_exp(skew(P))


def plain_gram_schmidt(P: Tensor) -> Tensor:
    """By QR that is left to autograd, signs fixed."""
    Q, T = torch.linalg.qr(P)
    return Q * T.detach().diagonal().sign()


def plain_householder(P: Tensor) -> Tensor:
    """Gram-Schmidt with the determinant of d - 1 reflections."""
    Q = plain_gram_schmidt(P)
    last = (-1) ** (len(P) - 1) * torch.linalg.slogdet(P.detach())[0]
    return torch.cat([Q[:, :-1], Q[:, -1:] * last], 1)


def plain_reflections(P: Tensor) -> Tensor:
    """By torch's own product of reflections."""
    V = P.tril(-1)
    return torch.linalg.householder_product(V, 2 / (1 + V.square().sum(0)))


def plain_loewdin(P: Tensor) -> Tensor:
    """By Newton's iteration with inverses, left to autograd."""
    for _ in range(9):
        P = (P + torch.linalg.inv(P).mT) / 2
    return P


# --------------------------------------------------------------------------------------------------------- providers


@dataclass(frozen=True)
class Goal:
    """At most this multiple of another's time."""

    factor: float
    reference: str = FIRST


@dataclass(frozen=True)
class Provider:
    """A map from somewhere.

    ``build`` takes an unconstrained matrix and returns how to compute, and the tensor that gradients are taken of.
    ``plain`` is the map in float64 by hand; what is built on a float64 matrix, where there is none.
    """

    name: str
    build: Callable[[Tensor], tuple[Callable[[], Tensor], Tensor]]
    plain: Callable[[Tensor], Tensor] | None = None
    near: str = "zero"
    goal: Goal | None = None
    counterpart: str = ""
    map: Map | None = None
    measures: bool = False
    """Whether it waits for the device outside a capture only."""
    limit: float = math.inf
    """Largest size on a GPU."""


def ours(
    name: str,
    plain: Callable[[Tensor], Tensor],
    goal: Goal | None = None,
    *,
    near: str = "zero",
    limit: float = math.inf,
    measures: bool = False,
    **options: Any,
) -> Provider:
    """One of our maps, named by its method."""
    map = hs.orthogonal.create(name, **options)
    method = " ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in options.values())
    counterpart = goal.reference if goal is not None and goal.reference != FIRST else ""

    def build(P: Tensor) -> tuple[Callable[[], Tensor], Tensor]:
        leaf = P.clone().requires_grad_()
        return (lambda: map(leaf)), leaf

    title = f"ours, {name} {method}".rstrip()
    return Provider(title, build, plain, near, goal, counterpart, map, measures, limit)


def torch_map(kind: str, base: bool = True) -> Provider:
    """The parametrisation that torch puts on a layer's weight."""

    def build(P: Tensor) -> tuple[Callable[[], Tensor], Tensor]:
        layer: Any = nn.Linear(*P.shape, bias=False, device=P.device, dtype=P.dtype)
        nn.init.eye_(layer.weight)
        parametrizations.orthogonal(layer, "weight", kind, use_trivialization=base)
        leaf = layer.parametrizations.weight.original
        with torch.no_grad():
            leaf.copy_(P)
        return (lambda: layer.weight), leaf

    name = f"torch, {kind}" + ("" if base else ", no base")
    return Provider(name, build, near="reflectors" if kind == "householder" else "zero")


def geotorch_map(kind: str) -> Provider:
    """The group of rotations of geotorch."""

    def build(P: Tensor) -> tuple[Callable[[], Tensor], Tensor]:
        import geotorch  # noqa: PLC0415 (optional)

        group = geotorch.SO(P.shape, triv=kind)
        nn.init.eye_(group.base)
        group = group.to(P)
        leaf = P.clone().requires_grad_()
        return (lambda: group(leaf)), leaf

    return Provider(f"geotorch, {kind}", build, counterpart="torch, matrix_exp" if kind == "expm" else "")


def peft_map(neumann: bool) -> Provider:
    """The rotation of peft's OFT as one block; its exact form and its series turn in opposite directions."""

    def build(P: Tensor) -> tuple[Callable[[], Tensor], Tensor]:
        from peft.tuners.oft.layer import OFTRotationModule  # noqa: PLC0415 (optional)

        d = len(P)
        module: Any = OFTRotationModule(1, d * (d - 1) // 2, d, d, use_cayley_neumann=neumann).to(P)
        with torch.no_grad():
            module.weight.copy_(P[module.rows, module.cols].unsqueeze(0))
        return module.get_weight, module.weight

    def plain(vector: Tensor) -> Tensor:
        d = (1 + math.isqrt(1 + 8 * vector.numel())) // 2
        rows, columns = torch.triu_indices(d, d, 1, device=vector.device)
        P = vector.new_zeros(d, d).index_put((rows, columns), vector[0])
        return plain_cayley(P if neumann else -P)

    return Provider("peft, cayley neumann" if neumann else "peft, cayley", build, plain)


def providers() -> list[Provider]:
    """All of them, the reference first."""
    exponential, reflections = Goal(1 / 4, "torch, matrix_exp"), Goal(1 / 20, "torch, householder")
    found = [
        torch_map("cayley"),
        torch_map("cayley", base=False),
        torch_map("matrix_exp"),
        torch_map("householder"),
    ]
    others = {
        "geotorch": [geotorch_map("cayley"), geotorch_map("expm")],
        "peft": [peft_map(neumann=False), peft_map(neumann=True)],
    }
    for package, members in others.items():
        if importlib.util.find_spec(package) is None:
            print(f"  skip: {package} is not installed", file=sys.stderr)
        else:
            found += members
    one: dict[str, Any] = {"near": "identity"}
    return [
        *found,
        ours("cayley", plain_cayley, Goal(1.0), method="solve"),
        ours("cayley", plain_cayley, Goal(1 / 2), method="newton"),
        ours("cayley", plain_cayley, method="neumann"),
        ours("gram_schmidt", plain_gram_schmidt, Goal(1.3), method="qr", **one),
        ours("gram_schmidt", plain_gram_schmidt, Goal(1.3), method="newton", **one),
        ours("householder", plain_householder, reflections, form="qr", **one),
        ours("householder", plain_householder, reflections, form="newton", **one),
        ours("householder", plain_reflections, reflections, near="reflectors", form="product"),
        ours("loewdin", plain_loewdin, method="svd", limit=CHECKED, **one),
        ours("loewdin", plain_loewdin, method="newton-schulz", **one),
        ours("exponential", plain_exponential, exponential, max_norm=math.pi),
        ours("exponential", plain_exponential, exponential, measures=True),
    ]


# ---------------------------------------------------------------------------------------------- timing and capturing


@dataclass
class Timed(Entry):
    """A row of a table whose failures are told at once, and which is timed less often where it is slow."""

    inner: int = 5
    note: str = ""
    after: list[Callable[[], None]] = field(default_factory=list)
    """What is measured behind the last timed step."""

    def attempt(self, what: str, part: Callable[[], None]) -> bool:
        """Whether ``part`` ran."""
        done = super().attempt(what, part)
        if not done:
            print(f"  FAILED: {self.name}, {self.failure}", file=sys.stderr, flush=True)
        return done

    def time_once(self, device: torch.device) -> None:
        """One more time of the step, and of its captured form."""
        if self.inner == 1 and len(self.times) >= 3:
            return
        for step, times in ((self.step, self.times), (self.replay, self.captured)):
            if step is not None:
                times.append(milliseconds(step, device, self.inner))


def milliseconds(step: Callable[[], object], device: torch.device, inner: int) -> float:
    """Time of one step: on a GPU between events around several, on a CPU that of the processor."""
    if device.type == "cpu":
        start = time.process_time()
        step()
        return (time.process_time() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(inner):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / inner


def reason(error: Exception) -> str:
    """The first line of what an error says."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def waits(step: Callable[[], object]) -> str:
    """Why a step cannot be captured because it waits for the device; found without a capture that fails."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return reason(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


_broken: list[torch.cuda.CUDAGraph] = []


def capture(step: Callable[[], Any]) -> Callable[[], Any]:
    """The step as a CUDA graph; where that fails, later captures are none the worse."""
    before = torch.cuda.current_stream()
    stream = torch.cuda.Stream()
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    before.wait_stream(stream)
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool=pool):
            result = step()
    except Exception as error:  # noqa: BLE001 (raised again)
        # torch leaves its stream the current one, the allocator waiting for the end of the capture and asking the
        # graph, which must live on for it, and the error to be met again by the next call.
        _broken.append(graph)
        torch.cuda.set_stream(before)
        for clear in (
            lambda: torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool),
            torch.cuda.synchronize,
            lambda: torch.zeros(1, device="cuda").add_(1),
        ):
            with contextlib.suppress(Exception):
                clear()
        raise (error.__context__ or error) from None  # what went wrong in the step, not that the capture ended early

    def replay(kept: Callable[[], Any] = step) -> Any:  # with the step live the tensors that the graph reads
        graph.replay()
        return result

    return replay


# --------------------------------------------------------------------------------------------------------------- maps


def noise(d: int, generator: torch.Generator) -> Tensor:
    """Normal numbers; the spectral norm of the matrix, and of the skew one of its upper triangle, is about 1."""
    return torch.randn(d, d, generator=generator, device=generator.device) / (2 * math.sqrt(d))


def free_matrix(near: str, drawn: Tensor) -> Tensor:
    """Where a map is timed."""
    one = torch.eye(len(drawn)).to(drawn)
    if near == "identity":
        return one + SPREAD * drawn
    # torch's parametrisation reads signs off the diagonal.
    return drawn.tril(-1) + one if near == "reflectors" else SIZE * drawn


def loop(P: Tensor, generator: torch.Generator) -> Tensor:
    """Places around a matrix ``(places, d, d)``, each as far from the next as a step of training moves it."""
    angles = torch.arange(PLACES, device=P.device) * (2 * math.pi / PLACES)
    a, b = noise(len(P), generator), noise(len(P), generator)
    radius = MOVE / (2 * math.sin(math.pi / PLACES))
    return P + radius * (angles.cos()[:, None, None] * a + angles.sin()[:, None, None] * b)


def map_step(provider: Provider, P: Tensor, upstream: Tensor, generator: torch.Generator) -> Callable[[], Taken]:
    """Forward and backward; a map with a warm start has its matrix moved and refines it."""
    map = provider.map
    if map is None or not map.warm_starts:
        call, leaf = provider.build(P)

        def fixed() -> Taken:
            R = call()
            return leaf, R.detach(), torch.autograd.grad(R, leaf, upstream)[0]

        return fixed
    places = loop(P, generator)
    place = torch.zeros(1, dtype=torch.long, device=P.device)
    carried = map.warm_start(places[0])
    assert carried is not None

    def refined() -> Taken:
        place.add_(1).remainder_(PLACES)
        leaf = places.index_select(0, place)[0].requires_grad_()
        R, found = map.refine(leaf, carried)
        carried.copy_(found)
        return leaf, R.detach(), torch.autograd.grad(R, leaf, upstream)[0]

    return refined


def gradient_error(provider: Provider, taken: Taken, P: Tensor, upstream: Tensor) -> float:
    """Distance of a gradient from that in float64, relative."""
    free, _, gradient = taken
    if provider.plain is None:
        call, leaf = provider.build(P.double())
        R = call()
    else:
        leaf = free.detach().double().requires_grad_()
        R = provider.plain(leaf)
    return relative(gradient, torch.autograd.grad(R, leaf, upstream.double())[0])


def defect(R: Tensor) -> float:
    """Largest entry of R^T R - I, computed in float64."""
    R = R.double()
    return float((R.mT @ R - torch.eye(len(R)).to(R)).abs().max())


def prepare_map(provider: Provider, P: Tensor, upstream: Tensor, generator: torch.Generator, entry: Timed) -> None:
    """Build, check, warm up and capture a provider."""
    gpu = P.is_cuda
    step = map_step(provider, P, upstream, generator)
    taken = step()
    if len(P) <= CHECKED:
        entry.facts["gradient error"] = gradient_error(provider, taken, P, upstream)
    del taken
    spent = milliseconds(step, P.device, 1)
    slow = gpu and spent > SLOW
    entry.inner = 1 if slow else 5
    for _ in range(0 if slow else WARM_UP - 2):
        step()
    entry.step = step
    if not gpu:
        entry.after.append(lambda: note_largest(entry, defect(step()[1])))
        return
    entry.note = "not tried" if slow else "" if provider.measures else waits(step)
    if not entry.note:
        try:
            replay = capture(step)
            entry.replay = replay
        except Exception as error:  # noqa: BLE001 (whatever it is, it belongs into the table)
            entry.note = reason(error)
    if entry.note:
        print(f"  not captured: {provider.name}: {entry.note}", file=sys.stderr, flush=True)
    # The largest of both: what is captured may have taken another way.
    for last in (step, entry.replay):
        if last is not None:
            entry.after.append(lambda last=last: note_largest(entry, defect(last()[1])))  # type: ignore[misc]


def note_largest(entry: Timed, error: float) -> None:
    """Keep the largest error of orthogonality, NaN if there was one."""
    before = entry.facts.get("orthogonality error", 0.0)
    entry.facts["orthogonality error"] = before if before > error or math.isnan(before) else error


def finish_timing(entries: Iterable[Timed]) -> None:
    """Measure what is measured behind the last timed step."""
    for entry in entries:
        for part in entry.after:
            entry.attempt("check", part)
        entry.step = entry.replay = None
        entry.after.clear()


def time_maps(chosen: Sequence[Provider], d: int, device: torch.device, repeats: int) -> list[Timed]:
    """All providers on matrices of one size."""
    gpu = device.type == "cuda"
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
    generator = torch.Generator(device).manual_seed(0)
    drawn = noise(d, generator)
    # The time of torch's exponential goes with the size of the gradient: one d times smaller halves it.
    upstream = torch.randn(d, d, generator=generator, device=device)
    entries = []
    for provider in chosen:
        if gpu and d > provider.limit:
            print(f"  skip: {provider.name} at {d}", file=sys.stderr)
            continue
        entry = Timed(provider.name)
        entries.append(entry)
        P = free_matrix(provider.near, drawn)
        entry.prepare("prepare", lambda: prepare_map(provider, P, upstream, generator, entry))  # noqa: B023
    take_turns(entries, device, repeats)
    finish_timing(entries)
    return entries


def median(times: Sequence[float]) -> float:
    """The median, NaN where nothing was timed."""
    return statistics.median(times) if times else math.nan


def verdict(own: float, captured: float, reference: float, factor: float, error: float) -> str:
    """Whether a goal is met, by the ratio of times; eager by itself, or with the captured form of ours."""
    ratio, best = own / reference, captured / reference
    if math.isnan(ratio):
        return ""
    if not error <= ERROR:
        return f"missed: error above {ERROR:g}"
    if ratio > factor and best <= factor:
        return f"met captured: {best:.3g} <= {factor:.3g}"
    return f"met: {ratio:.3g} <= {factor:.3g}" if ratio <= factor else f"missed: {ratio:.3g} > {factor:.3g}"


def map_table(entries: Sequence[Timed], chosen: Sequence[Provider]) -> dict[str, Cells]:
    """The figures of all maps, with the ratios that goals are about."""
    eager = {entry.name: median(entry.times) for entry in entries}
    known = {provider.name: provider for provider in chosen}
    first = eager.get(FIRST, math.nan)
    table: dict[str, Cells] = {}
    for entry in entries:
        provider, own, captured = known[entry.name], eager[entry.name], median(entry.captured)
        error = entry.facts.get("orthogonality error", math.nan)
        values = (
            own,
            "not tried" if entry.note == "not tried" else "no" if entry.note else captured,
            own / first,
            captured / first,
            eager.get(provider.counterpart, math.nan) / own,
            error,
            entry.facts.get("gradient error", math.nan),
        )
        cells: Cells = dict(zip(MAP_COLUMNS, values, strict=True))
        if provider.goal is not None:
            reference = eager.get(provider.goal.reference, math.nan)
            cells["goal"] = verdict(own, captured, reference, provider.goal.factor, error)
        table[entry.name] = kept(cells)
    return table


# -------------------------------------------------------------------------------------------------------------- steps


@dataclass(frozen=True)
class Variant:
    """A network with rotations: the map, the options of :func:`hypersphere.orthogonal.apply`, and the goal."""

    name: str
    map: str
    options: dict[str, Any]
    factor: float = 5.0


VARIANTS = (
    Variant("cayley newton", "cayley", {"method": "newton"}, 2.5),
    Variant("cayley solve", "cayley", {}),
    Variant("gram_schmidt newton", "gram_schmidt", {"method": "newton"}),
    Variant("gram_schmidt qr", "gram_schmidt", {}),
    Variant("householder newton", "householder", {"form": "newton"}),
    Variant("loewdin newton-schulz", "loewdin", {"method": "newton-schulz", "steps": 4, "scale": "none"}),
    Variant("exponential 3.14", "exponential", {"max_norm": math.pi}),
    Variant("S-OPT d/4, cayley solve", "cayley", {"sample": 0.25}, 2.0),
    Variant("S-OPT d/4, cayley newton", "cayley", {"sample": 0.25, "method": "newton"}, 2.0),
    Variant("PE-OPT 4 blocks, cayley solve", "cayley", {"blocks": 4}),
    Variant("PE-OPT 4 blocks, cayley newton", "cayley", {"blocks": 4, "method": "newton"}),
)
PLAIN = "plain network"


def networks(gpu: bool, quick: bool) -> list[Network]:
    """CNN-6 and ResNet-20."""
    if quick:
        return [
            Network("tiny CNN", "plain-cnn", {"dim": 8, "widths": (4, 6), "convs_per_unit": 1}, 4),
            Network("tiny ResNet", "cifar-resnet", {"depth": 8, "widths": (4, 4, 8)}, 4),
        ]
    batch = 128 if gpu else 16
    return [
        Network("CNN-6 of OPT (cnn6-opt)", "cnn6-opt", {}, batch),
        Network("ResNet-20 (16/32/64)", "cifar-resnet", {"depth": 20}, batch),
    ]


def prepare_step(
    network: Network, variant: Variant | None, precision: str, device: torch.device, compiled: bool, entry: Timed
) -> Callable[[], Tensor]:
    """A warm training step, captured on a GPU; it returns the loss."""
    gpu = device.type == "cuda"
    torch.manual_seed(0)
    layout = torch.channels_last if precision == "autocast" else torch.contiguous_format
    net: Any = network.build(None)
    if variant is not None:
        hs.orthogonal.apply(net[0], variant.map, skip=None, seed=0, **variant.options)
    # Drawn on the CPU: after a capture that failed, the GPU's source takes another one for still going on.
    images = torch.randn(network.batch, 3, 32, 32).to(device).contiguous(memory_format=layout)
    labels = torch.randint(100, (network.batch,)).to(device)
    net = net.to(device).to(memory_format=layout)
    optimiser = torch.optim.SGD(hs.parameter_groups(net, lr=0.01, rotation_lr=RATE), momentum=0.9, fused=True)
    together = BatchedRotations(rotation for _, rotation in hs.orthogonal.rotations(net))
    if compiled:
        torch.compiler.reset()
    call = torch.compile(net, dynamic=False) if compiled else net
    used: list[Tensor] = []

    def step() -> Tensor:
        optimiser.zero_grad(set_to_none=True)
        with autocast(device, precision):
            together.compute()
            logits = call(images)
        loss = F.cross_entropy(logits.float(), labels)
        loss.backward()
        used[:] = [rotation.matrices().detach() for rotation in together.rotations]
        together.forget()
        optimiser.step()
        return loss.detach()

    def note_errors() -> None:
        # Of the matrices that a step used: those that were refined are not those that are computed anew.
        for R in used:
            note_largest(entry, float(hs.orthogonal.orthogonality_error(R.double()).max()))

    for _ in range(TRIAL if gpu else WARM_UP):
        step()
        note_errors()
    final: Callable[[], Tensor] = capture(step) if gpu else step

    def check() -> None:
        if not math.isfinite(float(final())):
            raise ArithmeticError("the loss is not finite")
        note_errors()
        if used:
            entry.facts["gram change"] = hs.orthogonal.check(net).gram

    check()
    entry.after.append(check)
    return final


def time_steps(
    chosen: Sequence[Variant],
    network: Network,
    precision: str,
    device: torch.device,
    ways: Sequence[bool],
    repeats: int,
) -> list[Timed]:
    """One network, plain and with rotations; compiled steps are what others call captured."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    entries = []
    for variant in (None, *chosen):
        entry = Timed(PLAIN if variant is None else variant.name)
        entries.append(entry)
        for compiled in ways:

            def prepare(entry: Timed = entry, variant: Variant | None = variant, compiled: bool = compiled) -> None:
                final = prepare_step(network, variant, precision, device, compiled, entry)
                setattr(entry, "replay" if compiled else "step", final)

            entry.prepare("compile" if compiled else "prepare", prepare)
    take_turns(entries, device, repeats)
    finish_timing(entries)
    return entries


def step_table(entries: Sequence[Timed], chosen: Sequence[Variant]) -> dict[str, Cells]:
    """The figures of all steps; the first entry is the plain network."""
    factors = {variant.name: variant.factor for variant in chosen}
    plain, plain_compiled = median(entries[0].times), median(entries[0].captured)
    table: dict[str, Cells] = {}
    for entry in entries:
        own, compiled = median(entry.times), median(entry.captured)
        error = entry.facts.get("orthogonality error", math.nan)
        gram = entry.facts.get("gram change", math.nan)
        values = (own, own / plain, compiled, compiled / plain_compiled, error, gram)
        cells: Cells = dict(zip(STEP_COLUMNS, values, strict=True))
        if entry.name in factors:
            factor = factors[entry.name]
            goals = {
                "": verdict(own, math.nan, plain, factor, error),
                "compiled ": verdict(compiled, math.nan, plain_compiled, factor, error),
            }
            cells["goal"] = "; ".join(way + text for way, text in goals.items() if text)
        table[entry.name] = kept(cells)
    return table


# ------------------------------------------------------------------------------------------------------------- tables


def kept(cells: Cells) -> Cells:
    """Cells that hold something."""
    return {name: cell for name, cell in cells.items() if (cell if isinstance(cell, str) else not math.isnan(cell))}


def text_of(cell: float | str | None) -> str:
    """A cell as printed."""
    if cell is None or isinstance(cell, str):
        return cell or ""
    return f"{cell:.1e}" if 0 < abs(cell) < 0.01 else f"{cell:.2f}"


def show(title: str, table: dict[str, Cells], entries: Sequence[Timed]) -> None:
    """Print a table; goals and failures come last in a row."""
    columns = [name for name in (*MAP_COLUMNS, *STEP_COLUMNS) if any(name in cells for cells in table.values())]
    columns = list(dict.fromkeys(columns))
    width = max(len(name) for name in table)
    print(f"\n{title}")
    print(" " * width, *(f"{name:>{max(9, len(name))}}" for name in columns), " goal")
    for entry in entries:
        cells = table[entry.name]
        texts = [f"{text_of(cells.get(name)):>{max(9, len(name))}}" for name in columns]
        failure = f" FAILED {entry.failure}" if entry.failure else ""
        print(f"{entry.name:{width}s}", *texts, f" {cells.get('goal', '')}{failure}".rstrip())
    sys.stdout.flush()


def to_rows(title: str, table: dict[str, Cells], command: str, hardware: str, note: str) -> list[ResultRow]:
    """The numbers of a table as rows for the documentation."""
    return [
        ResultRow(
            kind="benchmark",
            group=title,
            what=name,
            metric=metric,
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
        for name, cells in table.items()
        for metric, value in cells.items()
        if not isinstance(value, str)
    ]


def arguments_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=("maps", "steps"), help="one half of the tables")
    parser.add_argument("--providers", nargs="+", help="words of which the name of a map or step must contain one")
    parser.add_argument("--sizes", nargs="+", type=int, help="sizes d of the maps")
    parser.add_argument("--nets", nargs="+", help="words of which a network's name must contain one")
    parser.add_argument("--precision", choices=("autocast", "fp32"), help="one precision of the networks")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="the compiled steps alone, or none of them; by default both on a GPU",
    )
    parser.add_argument("--repeat", type=int, help="timed repetitions; by default 10 on a GPU, 5 on a CPU")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and nothing compiled: does it run?")
    parser.add_argument("--output", "--rows", type=Path, help="JSON file for docs/rows")
    return parser.parse_args(arguments)


@dataclass
class Report:
    """Where tables go: the screen, and rows for the documentation."""

    options: argparse.Namespace
    command: str
    gpu: bool
    repeats: int
    hardware: str
    rows: list[ResultRow] = field(default_factory=list)
    failed: bool = False

    def add(self, title: str, table: dict[str, Cells], entries: Sequence[Timed], note: str) -> None:
        """Print a table and keep it."""
        title += "" if self.gpu else " (CPU)"
        show(title, table, entries)
        note = f"median of {self.repeats} interleaved repetitions; {note}"
        self.rows += to_rows(title, table, self.command, self.hardware, note)
        self.failed |= any(entry.failure for entry in entries)
        if self.options.output:
            write_rows(self.options.output, self.rows)


def matches(name: str, words: Sequence[str] | None) -> bool:
    """Whether a name contains one of the words, where there are any."""
    return not words or any(word in name for word in words)


def run_maps(report: Report, device: torch.device) -> None:
    """The tables of maps."""
    options, gpu = report.options, report.gpu
    maps = [one for one in providers() if one.name == FIRST or matches(one.name, options.providers)]
    sizes = options.sizes or ((8, 9) if options.quick else (576, 1152, 3456) if gpu else (64, 256, 512))
    note = (
        f"x and speed-up of eager torch; skew matrices of spectral norm {SIZE:g}; maps by newton follow a matrix that "
    )
    note += f"moves by {MOVE:g} at each step; gradient errors relative to float64, of a series to the exact map"
    note += "; captured: in one CUDA graph" if gpu else "; one thread, processor time"
    for d in sizes:
        entries = time_maps(maps, d, device, report.repeats)
        title = f"Orthogonal maps, forward and backward of one {d} x {d} matrix, float32"
        report.add(title, map_table(entries, maps), entries, note)


def run_steps(report: Report, device: torch.device) -> None:
    """The tables of training steps."""
    options, gpu = report.options, report.gpu
    ways = [False] if not gpu or options.quick else [False, True] if options.compile is None else [options.compile]
    variants = [one for one in VARIANTS if matches(one.name, options.providers)]
    note = (
        f"SGD with momentum, learning rate of rotations {RATE:g}; {'in one CUDA graph' if gpu else 'one thread'}; all "
    )
    note += "layers of the backbone turned; largest error of the matrices that the first and the last steps used"
    for precision in ("autocast", "fp32") if gpu else ("fp32",):
        for network in networks(gpu, options.quick) if options.precision in (None, precision) else ():
            if matches(network.title, options.nets):
                entries = time_steps(variants, network, precision, device, ways, report.repeats)
                report.add(network.heading(precision), step_table(entries, variants), entries, note)


def main(arguments: Sequence[str] | None = None) -> int:
    """Time, print, and write rows where asked; 1 where a provider failed."""
    options = arguments_of(arguments)
    warnings.filterwarnings("ignore")
    device = torch.device(options.device)
    gpu = device.type == "cuda"
    if not gpu:
        torch.set_num_threads(1)
    hardware = f"{torch.cuda.get_device_name() if gpu else 'CPU'}, torch {torch.__version__}"
    print(f"{hardware}, {code_version()}", flush=True)
    command = command_line(sys.argv[1:] if arguments is None else arguments, "orthogonal")
    repeats = 2 if options.quick else options.repeat or (10 if gpu else 5)
    report = Report(options, command, gpu, repeats, hardware)
    if options.only != "steps":
        run_maps(report, device)
    if options.only != "maps":
        run_steps(report, device)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
