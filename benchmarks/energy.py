"""Time, memory and accuracy of hyperspherical energies, and what they add to a training step.

Energies are timed forward and backward: ours, and what a user would write (the matrix of all pairs, left to autograd;
``torch.pdist``), eager and compiled. Where every pair fits, values and gradients are compared with float64; beyond, the
gradients of a few rows. The whole-model term is timed in a captured training step of ResNet-32, ours and layer by
layer.

    python benchmarks/energy.py --output docs/rows/energy.json

On a CPU smaller cases run in float32 with one thread, and nothing is compiled or captured: good for ratios.
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from layers import WARM_UP, Entry, Network, autocast, capture, command_line, relative, show, take_turns, to_rows
from torch import Tensor, nn

import hypersphere as hs
from hypersphere.results import ResultRow, write_rows
from hypersphere.runs import code_version

CHECKED = 64
"""Rows whose gradients are compared with float64 where all pairs would not fit."""
EVERY_PAIR = 12_000
"""Vectors up to which value and gradient are compared as a whole."""


@dataclass(frozen=True)
class Case:
    """What is timed: n vectors in d dimensions, and which form of the energy."""

    n: int
    d: int
    form: str

    @property
    def title(self) -> str:
        """Heading of its table."""
        return f"Energy s = 2 ({self.form}) of {self.n:,} vectors in {self.d} dimensions, forward and backward"

    @property
    def options(self) -> dict[str, bool]:
        """Options of our energy."""
        return {"half_space": "half space" in self.form, "angular": "angles" in self.form}


def plain(vectors: Tensor, form: str) -> Tensor:
    """What a user would write: all pairs at once, the diagonal masked; in half space all of the 2n vectors."""
    units = F.normalize(vectors, dim=1)
    if "half space" in form:
        units = torch.cat([units, -units])
    n = len(units)
    own = torch.eye(n, dtype=torch.bool, device=units.device)
    cosines = (units @ units.T).masked_fill(own, 0.0)
    squared = cosines.clamp(-1 + 1e-6, 1 - 1e-6).acos().square() if "angles" in form else 2 - 2 * cosines
    return (1 / squared.clamp(min=1e-6)).masked_fill(own, 0.0).sum() / (n * (n - 1))


def by_distances(vectors: Tensor, form: str) -> Tensor:
    """With torch.pdist, as published uniformity losses do."""
    assert form == "chords"
    return F.pdist(F.normalize(vectors, dim=1)).clamp(min=1e-3).pow(-2).mean()


def oracle(vectors: Tensor, case: Case) -> tuple[Tensor | None, Tensor]:
    """Value (where every pair fits) and gradient of the first rows in float64, from differences of unit vectors."""
    x = vectors.detach().double()
    few = x if case.n <= EVERY_PAIR else x[:CHECKED]
    leaf = few.clone().requires_grad_()
    left = F.normalize(leaf, dim=1)
    total = 0.0
    images = (1, -1) if case.options["half_space"] else (1,)
    count = len(images) * case.n
    for rows in range(0, len(few), 256):
        part = F.normalize(leaf[rows : rows + 256], dim=1)
        everyone = (left if len(few) == case.n else F.normalize(x, dim=1)).detach()
        own = torch.zeros(len(part), case.n, dtype=torch.bool, device=x.device)
        own[torch.arange(len(part)), torch.arange(rows, rows + len(part))] = True
        share = torch.zeros((), dtype=torch.float64, device=x.device)
        for image in images:
            squared = (2 - 2 * image * part @ everyone.T).masked_fill(own, 4.0).clamp(min=1e-12)
            distance = (
                2 * (squared.sqrt() / 2).clamp(max=1 - 1e-15).asin() if case.options["angular"] else squared.sqrt()
            )
            share = share + distance.pow(-2).masked_fill(own, 0.0).sum() * len(images)
        # The other side of each pair moves as well, which doubles a row's gradient but not the sum.
        (2 * share / (count * (count - 1))).backward()
        total = total + share.detach() / (count * (count - 1))
    if case.options["half_space"]:
        mirror = torch.pi if case.options["angular"] else 2.0
        total = total + 2 * case.n * mirror**-2 / (count * (count - 1))
    assert leaf.grad is not None
    return (torch.as_tensor(total) if case.n <= EVERY_PAIR else None), leaf.grad


def providers(case: Case, gpu: bool, compiled: bool) -> dict[str, Callable[[Tensor], Tensor]]:
    """Who computes it, the reference first; those that need too much memory are left out."""
    energy = hs.energy.MHE(s=2, **case.options)
    found: dict[str, Callable[[Tensor], Tensor]] = {}
    pairs = case.n * (2 if case.options["half_space"] else 1)
    if pairs <= (60_000 if gpu else 4096):
        found["plain PyTorch"] = lambda x: plain(x, case.form)
        if compiled and case.form == "chords":
            call = torch.compile(plain, dynamic=False)
            found["plain PyTorch, compiled"] = lambda x: call(x, case.form)
    if case.form == "chords" and case.n <= 4096:  # its backward pass needs n x n x d numbers
        found["torch.pdist"] = lambda x: by_distances(x, case.form)
    return {**found, "ours": energy}


def time_case(case: Case, device: torch.device, repeats: int, compiled: bool) -> list[Entry]:
    """All providers on one set of vectors."""
    gpu = device.type == "cuda"
    torch.compiler.reset()
    if gpu:
        gc.collect()
        torch.cuda.empty_cache()
    generator = torch.Generator(device).manual_seed(0)
    vectors = torch.randn(case.n, case.d, generator=generator, device=device)
    vectors[1] = vectors[0] + 0.01 * vectors[2]  # a near pair, which products in low precision lose
    vectors.requires_grad_()
    wanted, wanted_gradient = oracle(vectors, case)
    entries = []
    for name, call in providers(case, gpu, compiled).items():
        entry = Entry(name)
        entries.append(entry)

        def step(call: Callable[[Tensor], Tensor] = call) -> Tensor:
            vectors.grad = None
            value = call(vectors)
            value.backward()
            return value.detach()

        def prepare(entry: Entry = entry, step: Callable[[], Tensor] = step) -> None:
            value = step()
            assert vectors.grad is not None
            if wanted is not None:
                entry.facts["output error"] = relative(value, wanted)
            off = vectors.grad[: len(wanted_gradient)] - wanted_gradient
            entry.facts["gradient error"] = float((off.norm(dim=1) / wanted_gradient.norm(dim=1)).max())
            for _ in range(WARM_UP - 1):
                step()
            vectors.grad = None
            if gpu:
                gc.collect()
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                step()
                torch.cuda.synchronize()
                entry.facts["GiB"] = torch.cuda.max_memory_allocated() / 2**30
            entry.step = step
            if gpu and case.n <= EVERY_PAIR:
                entry.replay = capture(step)

        entry.prepare("prepare", prepare)
    take_turns(entries, device, repeats)
    return entries


def layer_by_layer(model: nn.Module) -> Tensor:
    """The half-space term as a user would write it: a loop over layers."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    return torch.stack([plain(layer.weight.flatten(1), "half space") for layer in layers[:-1]]).sum()


def time_networks(device: torch.device, repeats: int, compiled: bool, quick: bool) -> tuple[str, list[Entry]]:
    """A training step of ResNet-32 without and with the energy of all its layers."""
    gpu = device.type == "cuda"
    network = Network("ResNet-32 (16/32/64)", "cifar-resnet", {"depth": 8 if quick else 32}, 128 if gpu else 16)
    terms: dict[str, Callable[[nn.Module], Tensor] | None] = {
        "no regulariser": None,
        "ours, half space": hs.energy.MHE(half_space=True),
        "ours, full space": hs.energy.MHE(),
        "ours, random projections": hs.energy.create("rp-comhe"),
        "plain PyTorch, half space": layer_by_layer,
    }
    entries = []
    for name, term in terms.items():
        entry = Entry(name)
        entries.append(entry)

        def prepare(entry: Entry = entry, term: Callable[[nn.Module], Tensor] | None = term) -> None:
            torch.compiler.reset()
            torch.manual_seed(0)
            layout = torch.channels_last if gpu else torch.contiguous_format
            net = network.build(None).to(device).to(memory_format=layout)
            if isinstance(term, hs.energy.Regulariser):
                term.to(device).prepare(net)
            optimiser = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
            images = torch.randn(network.batch, 3, 32, 32, device=device).contiguous(memory_format=layout)
            labels = torch.randint(100, (network.batch,), device=device)
            call = torch.compile(net, dynamic=False) if compiled else net

            def step() -> Tensor:
                optimiser.zero_grad(set_to_none=True)
                with autocast(device, "autocast" if gpu else "fp32"):
                    logits = call(images)
                loss = F.cross_entropy(logits.float(), labels)
                if term is not None:
                    loss = loss + term(net)
                loss.backward()
                optimiser.step()
                return loss.detach()

            entry.step = capture(step) if gpu else step

        entry.prepare("prepare", prepare)
    take_turns(entries, device, repeats)
    precision = "bfloat16 autocast" if gpu else "float32"
    return f"Training step with an energy of all layers, {network.title}, batch {network.batch}, {precision}", entries


def cases(gpu: bool, quick: bool) -> list[Case]:
    """Sizes and forms."""
    forms = ("chords", "chords, half space", "angles", "angles, half space")
    if quick:
        return [Case(40, 8, form) for form in forms]
    if not gpu:
        return [Case(512, 576, form) for form in forms] + [Case(2048, 1152, "chords")]
    large = [Case(n, 512, form) for n in (50_000, 200_000) for form in forms]
    return [Case(512, 1152, "chords"), Case(10_000, 512, "chords"), *large]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=("energies", "nets"), help="one half of the tables")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--repeat", type=int, default=10, help="timed repetitions")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and nothing compiled: does it run?")
    parser.add_argument("--output", "--rows", type=Path, help="JSON file for docs/rows")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    device = torch.device(options.device)
    gpu = device.type == "cuda"
    if not gpu:
        torch.set_num_threads(1)
    compiled = gpu and not (options.quick or options.eager)
    repeats = 2 if options.quick else options.repeat
    hardware = f"{torch.cuda.get_device_name() if gpu else 'CPU'}, torch {torch.__version__}"
    print(f"{hardware}, {code_version()}", flush=True)
    rows: list[ResultRow] = []
    failed = False

    def finish(title: str, entries: Sequence[Entry], note: str) -> None:
        nonlocal failed, rows
        title += "" if gpu else " (CPU)"
        show(title, entries)
        command = command_line(sys.argv[1:] if arguments is None else arguments, "energy")
        rows += to_rows(title, entries, command, hardware, f"median of {repeats} interleaved repetitions; {note}")
        failed |= any(entry.failure for entry in entries)
        if options.output:
            write_rows(options.output, rows)

    if options.only != "nets":
        note = "float32 vectors, products of the others at torch's default precision; "
        note += "errors relative to float64, of the gradient that of the worst row"
        note += "" if gpu else "; one thread, processor time"
        for case in cases(gpu, options.quick):
            finish(case.title, time_case(case, device, repeats, compiled), note)
    if options.only != "energies":
        title, entries = time_networks(device, repeats, compiled, options.quick)
        note = "SGD with momentum; " + ("compiled, in one CUDA graph" if compiled else "one thread" if not gpu else "")
        finish(title, entries, note)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
