"""Time and memory of exact search in a large gallery, and of TAR at FAR, against what a user would write.

The search is timed beside the bare products of its tiles, which any exact search has to compute, beside chunks with
``topk`` and beside FAISS where it is installed; TAR at FAR beside scikit-learn's ``roc_curve``. Answers are compared.

    python benchmarks/identification.py --output docs/rows/identification.json

On a CPU a smaller gallery is searched with one thread: good for ratios.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from layers import Entry, command_line, show, take_turns, to_rows
from torch import Tensor

from hypersphere.metrics import search, tar_at_far
from hypersphere.results import ResultRow, write_rows
from hypersphere.runs import code_version

CHUNK = 65_536
"""Gallery vectors of one product in the plain searches."""


def products(probes: Tensor, gallery: Tensor) -> Tensor:
    """The products alone, nothing done with them: what an exact search cannot do without."""
    out = probes.new_empty(len(probes), min(CHUNK, len(gallery)))
    for part in gallery.split(CHUNK):
        torch.mm(probes, part.mT, out=out if len(part) == out.shape[1] else None)
    return out


def chunks(probes: Tensor, gallery: Tensor, k: int) -> Tensor:
    """What a user would write: products of chunks, the best of each, the best of these."""
    values, places = [], []
    for start in range(0, len(gallery), CHUNK):
        best = (probes @ gallery[start : start + CHUNK].mT).topk(k)
        values.append(best.values)
        places.append(best.indices + start)
    chosen = torch.cat(values, 1).topk(k).indices
    return torch.cat(places, 1).gather(1, chosen)


def unit(rows: int, dim: int, device: torch.device, seed: int) -> Tensor:
    """Random directions."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(rows, dim, device=device, generator=generator))


def time_search(sizes: tuple[int, int, int], k: int, device: torch.device, repeats: int) -> list[Entry]:
    """Searches of the same gallery."""
    count, stored, dim = sizes
    probes, gallery = unit(count, dim, device, 0), unit(stored, dim, device, 1)
    expected = chunks(probes, gallery, k)
    kinds: dict[str, torch.dtype | None] = {"ours": None}
    if device.type == "cuda":
        kinds |= {"ours, float16 products": torch.float16, "ours, bfloat16 products": torch.bfloat16}
    entries = [Entry("products alone"), Entry("chunks and topk"), *(Entry(name) for name in kinds)]
    entries[0].step = lambda: products(probes, gallery)
    entries[1].step = lambda: chunks(probes, gallery, k)
    for entry, dtype in zip(entries[2:], kinds.values(), strict=True):
        entry.step = lambda dtype=dtype: search(probes, gallery, k, dtype=dtype)[1]
    if device.type == "cpu" and importlib.util.find_spec("faiss"):
        entries.append(Entry("FAISS, flat index"))
        entries[-1].step = lambda: search(probes, gallery, k, backend="faiss")[1]
    for entry in entries:
        step = entry.step
        assert step is not None
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        found = step()
        if device.type == "cuda":
            entry.facts["GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        if entry is not entries[0]:
            entry.facts["other answers"] = float((found != expected).double().mean())
    take_turns(entries, device, repeats)
    return entries


def time_rate(pairs: int, repeats: int) -> list[Entry]:
    """TAR at FAR 1e-4 of random scores, on the CPU."""
    from sklearn.metrics import roc_curve  # noqa: PLC0415 (only this table needs it)

    generator = torch.Generator().manual_seed(0)
    same = torch.rand(pairs, generator=generator) < 0.5
    scores = torch.randn(pairs, generator=generator) + 4 * same
    entries = [Entry("scikit-learn roc_curve"), Entry("ours")]

    def by_curve() -> Tensor:
        far, tar, _ = roc_curve(same.numpy(), scores.numpy())
        return torch.tensor(tar[far <= 1e-4].max())

    def by_statistic() -> Tensor:
        return torch.tensor(tar_at_far(scores, same, 1e-4)[0].tar)

    entries[0].step, entries[1].step = by_curve, by_statistic
    for entry in entries:
        assert entry.step is not None
        entry.facts["TAR"] = float(entry.step())
    take_turns(entries, torch.device("cpu"), repeats)
    return entries


def main(arguments: Sequence[str] | None = None) -> int:
    """Time, print, and write rows where asked; 1 where a provider failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=("search", "rates"), help="one of the tables")
    parser.add_argument("--repeat", type=int, default=10, help="timed repetitions")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--output", type=Path, help="JSON file for docs/rows")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    device = torch.device(options.device)
    gpu = device.type == "cuda"
    torch.set_num_threads(1)
    hardware = f"{torch.cuda.get_device_name() if gpu else 'CPU'}, torch {torch.__version__}"
    print(f"{hardware}, {code_version()}", flush=True)
    repeats = 2 if options.quick else options.repeat
    command = command_line(sys.argv[1:] if arguments is None else arguments, "identification")
    rows: list[ResultRow] = []
    tables: dict[str, list[Entry]] = {}
    if options.only != "rates":
        sizes = (20, 500, 16) if options.quick else (3530, 1_000_000, 512) if gpu else (200, 200_000, 256)
        title = f"Exact search: {sizes[0]:,} probes, {sizes[1]:,} gallery vectors, {sizes[2]} dimensions, the best 10"
        tables[title] = time_search(sizes, 10, device, repeats)
    if options.only != "search":
        pairs = 20_000 if options.quick else 2_000_000
        tables[f"TAR at FAR 1e-4 from {pairs:,} scores, on the CPU"] = time_rate(pairs, repeats)
    for title, entries in tables.items():
        place = "" if gpu or "CPU" in title else " (CPU)"
        show(title + place, entries)
        rows += to_rows(title + place, entries, command, hardware, f"median of {repeats} interleaved repetitions")
    if options.output:
        write_rows(options.output, rows)
    return int(any(entry.failure for entries in tables.values() for entry in entries))


if __name__ == "__main__":
    sys.exit(main())
