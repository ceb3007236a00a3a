"""What a head takes on several processes: the model against bytes that were counted, and rows that were measured."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hypersphere as hs
from helpers.paths import BENCHMARKS, ROOT, SOURCE
from helpers.worlds import worlds
from hypersphere.errors import ArgumentError
from hypersphere.losses import memory_estimate, sharding
from hypersphere.losses.memory import classes_of_a_step
from hypersphere.losses.plan import MEASURED, divided_exchanges, plan_head

B, D, C = 6, 5, 11
OPTIMISERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
}


def held(tensors):
    """Bytes of the rows that this process has."""
    own = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in own)


def trained(options, optimiser):
    """Bytes of weights, gradients and optimiser of a divided head after a step, counted."""
    head = hs.losses.ArcFace(D, C, **options)
    if dist.get_world_size() > 1:
        head.shard(init_device_mesh("cpu", (dist.get_world_size(),)))
    learned = [p for p in head.parameters() if p.requires_grad]
    made = OPTIMISERS[optimiser](learned)
    head(torch.randn(B, D).requires_grad_(), torch.arange(B)).backward()
    made.step()
    state = [v for values in made.state.values() for v in values.values() if torch.is_tensor(v) and v.dim()]
    return held(head.parameters()), held(p.grad for p in learned), held(state)


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize("rotation", [False, True])
def test_memory_is_that_of_a_divided_head(processes, optimiser, rotation):
    found = worlds(processes).run(trained, {"rotation": "cayley"} if rotation else {}, optimiser)
    estimate = memory_estimate(B, C, D, processes=processes, optimiser=optimiser, rotation=rotation)
    # Of the process with most classes.
    assert tuple(map(max, zip(*found, strict=True))) == (estimate.weights, estimate.gradient, estimate.optimiser)


def sparse_rows():
    """Rows of the sparse gradient of each process, counted."""
    head = hs.losses.CosFace(D, 40, sample_rate=0.25, sparse=True)
    head.shard(init_device_mesh("cpu", (dist.get_world_size(),)))
    head(torch.randn(B // 2, D), torch.arange(B // 2)).backward()
    return held([head.weight.local_grad.coalesce().values()])


def test_a_sparse_gradient_is_that_of_all_processes():
    estimate = memory_estimate(B // 2, 40, D, processes=2, sample_rate=0.25, sparse=True)
    assert sum(worlds(2).run(sparse_rows)) == 2 * estimate.gradient == 10 * D * 4
    assert classes_of_a_step(B, 40, 0.25) == 10 and classes_of_a_step(24, 40, 0.25) == 24


def test_memory_by_hand():
    found = memory_estimate(128, 10**6, 64, processes=3)
    assert found.weights == found.gradient == found.optimiser == 333_334 * 64 * 4
    assert found.work == 128 * 2**20 + 384 * 64 * 4 * 10 + 5 * 384**2
    # The batch of all processes and the classes of one: all logits of 2 x 128 samples and 500 classes.
    dense = memory_estimate(128, 1000, 64, processes=2, path="dense")
    assert dense.work == 5 * 256 * 500 * 4 + 256 * 64 * 4 * 10 + 5 * 256**2
    low = memory_estimate(128, 1000, 64, processes=2, low_precision=True)
    assert low.work == 500 * 64 * 2 + 256 * 500 * 2 + 256 * 64 * 4 * 10 + 5 * 256**2
    # Numbers of all classes are drawn everywhere, however few a process has.
    assert memory_estimate(1, 10**9, 8, processes=1000, sample_rate=0.01).work == 64 * 10**9
    assert memory_estimate(128, 10**6, 64, processes=1) == memory_estimate(128, 10**6, 64)
    assert memory_estimate(1, 3, 4, processes=8).weights == 16  # a class at least


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"processes": 0}, "^processes must be at least 1, got 0$"),
        ({"processes": 1.5}, r"^processes must be a whole number, got 1\.5$"),
        ({"optimiser": "lion"}, "^optimiser must be one of 'sgd', 'adam', got 'lion'$"),
    ],
)
def test_nonsense_is_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        memory_estimate(1, 1, 1, **options)


# ------------------------------------------------------------------------------------------------ exchanges


def sent(dtype, options):
    """Bytes that a ring sends from each process in a step of a divided head, of what the head asks to be exchanged."""
    total, processes = 0, dist.get_world_size()
    gather, scatter, reduce, broadcast = sharding._all_gather, sharding._reduce_scatter, dist.all_reduce, dist.broadcast

    def counted(function, times):
        def call(*tensors, **keywords):
            nonlocal total
            total += round(times * tensors[-1].numel() * tensors[-1].element_size())
            return function(*tensors, **keywords)

        return call

    head = hs.losses.ArcFace(D, C, **options).shard(init_device_mesh("cpu", (processes,)))
    others = processes - 1
    sharding._all_gather = counted(gather, others)
    sharding._reduce_scatter = counted(scatter, others / processes)  # of what is summed up
    dist.all_reduce = counted(reduce, 2 * others / processes)
    dist.broadcast = counted(broadcast, 1)
    try:
        head(torch.randn(B, D, dtype=dtype).requires_grad_(), torch.arange(B)).backward()
    finally:
        sharding._all_gather, sharding._reduce_scatter, dist.all_reduce, dist.broadcast = (
            *(gather, scatter),
            *(reduce, broadcast),
        )
    return total


@pytest.mark.parametrize("processes", [2, 3, 4])
@pytest.mark.parametrize("low", [False, True])
def test_exchanges_are_those_of_a_step(processes, low):
    dtype = torch.bfloat16 if low else torch.float32
    divided, sampled, fixed = plan_head(B, C, D, processes, low_precision=low)[1:]
    for plan, options in (
        (divided, {}),
        (sampled, {"sample_rate": 0.1, "sparse": True}),
        (fixed, {"rotation": "cayley"}),
    ):
        assert worlds(processes).run(sent, dtype, options) == [plan.bytes_exchanged] * processes, plan.name


def test_exchanges_by_hand():
    # 3 others, to each of which go 6 rows of 5 numbers and a label; of 24 samples 4 numbers; and 6 rows of gradients.
    assert divided_exchanges(6, 5, 4) == {
        "sizes of batches": 96,
        "features and labels": 3 * 6 * 28,
        "statistics": 3 * 24 * 16,
        "gradient of the features": 3 * 6 * 20,
    }
    assert set(divided_exchanges(6, 5, 1).values()) == {0}
    replicated = plan_head(6, 11, 5, 4)[0]
    assert replicated.bytes_exchanged == 330  # twice 3/4 of 220 bytes
    assert [plan.bytes_exchanged for plan in plan_head(6, 11, 5)] == [0, 0, 0]


# ------------------------------------------------------------------------------------------------ time


def rows():
    content = json.loads((ROOT / "docs" / "rows" / "margin_softmax.json").read_text())
    return {(row["group"], row["what"]): row["mean"] for row in content if row["metric"] == "ms"}


GROUP = "Margin softmax, forward and backward, batch 1024, dimension 512, {} classes"


def test_the_rate_is_that_of_the_row_that_it_names():
    group = GROUP.format("10,000,000")
    assert MEASURED.milliseconds == rows()[group, "ours"]
    assert group in MEASURED.source and (MEASURED.batch, MEASURED.dim, MEASURED.classes) == (1024, 512, 10_000_000)
    assert 6 * 1024 * 512 * 1e7 / MEASURED.rate == pytest.approx(0.09613156, rel=1e-6)


def test_a_row_that_the_rate_was_not_taken_from():
    (plan, *_) = plan_head(1024, 1_000_000, 512)
    assert plan.operations / MEASURED.rate * 1e3 == pytest.approx(rows()[GROUP.format("1,000,000"), "ours"], rel=0.03)


def test_products_of_each_way():
    b, c, d, p = 16, 1001, 32, 4
    operations = {plan.name: plan.operations for plan in plan_head(b, c, d, p, sample_rate=0.1)}
    assert operations["replicated"] == 3 * 2 * b * d * c
    assert operations["divided"] == 3 * 2 * (b * p) * d * math.ceil(c / p)
    assert operations["sampled"] == 3 * 2 * (b * p) * d * 25  # 100 classes, a quarter here
    assert operations["fixed"] == 3 / 4 * operations["divided"]


def test_memory_of_each_way():
    plans = {plan.name: plan.memory for plan in plan_head(16, 1000, 32, 4, optimiser="adam", low_precision=False)}
    assert plans["replicated"] == memory_estimate(16, 1000, 32, optimiser="adam")
    assert plans["divided"] == memory_estimate(16, 1000, 32, processes=4, optimiser="adam")
    assert (plans["sampled"].gradient, plans["sampled"].optimiser) == (25 * 32 * 4, 2 * 250 * 32 * 4)
    assert plans["fixed"].weights == (250 * 32 + 32 * 32) * 4 and plans["fixed"].optimiser == 2 * 32 * 32 * 4


@pytest.mark.parametrize("argument", ["batch", "classes", "dim", "processes"])
def test_counts_are_whole(argument):
    with pytest.raises(ArgumentError, match=rf"^{argument} must be a whole number, got 2\.5$"):
        plan_head(**({"batch": 1, "classes": 2, "dim": 3, "processes": 4} | {argument: 2.5}))


def test_the_benchmark_plays_one_shard_of_many(tmp_path):
    file = tmp_path / "rows.json"
    sizes = ["--play", "8", "--classes", "64", "--dim", "4", "--batch", "2", "--repeat", "1", "--rows", str(file)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(BENCHMARKS / "scale.py"), *sizes],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = {(row["what"], row["metric"]): row["mean"] for row in json.loads(file.read_text())}
    shard = "one shard of 8, 2 samples each, no exchange"
    assert found[shard, "ms"] > 0 and found[shard, "modelled MB sent"] == 0
    assert found[shard, "modelled x"] == pytest.approx(1)  # 16 samples and 8 classes, or 2 samples and 64
    taken = pytest.approx(found["1 process", "ms"])
    assert found[shard, "modelled ms"] == taken and found["1 process", "modelled ms"] == taken
    assert f"| {shard} |" in done.stdout
