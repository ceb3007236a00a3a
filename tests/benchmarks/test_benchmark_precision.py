"""The table of precision measures what it says, of every member."""

from __future__ import annotations

import importlib.util
import math
import sys

import pytest
import torch

from helpers.paths import BENCHMARKS, DOCS
from hypersphere.results import read_rows
from hypersphere.testing import contract


@pytest.fixture(scope="module")
def bench():
    """The script as a module; it imports from its neighbours."""
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("benchmark_precision", BENCHMARKS / "precision.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    yield module
    del sys.modules[spec.name], sys.modules["layers"]


def test_errors_are_those_of_a_known_function(bench):
    x = bench.unit(8, 16, seed=1)

    def third(leaves):
        return leaves[0].sum(1) / 3, leaves

    def shortened(leaves):
        return (leaves[0] * (1 - 2**-20)).square().sum(1), leaves

    value, gradient = bench.errors(bench.Place("", "", [x], shortened, turns=True), torch.float32)
    assert value < 1e-6 and gradient < 1e-6  # the reference is the same function in float64

    def careless(leaves):
        scale = 1.25 if leaves[0].dtype == torch.float32 else 1.0
        return scale * leaves[0].square().sum(1), leaves

    assert bench.errors(bench.Place("", "", [x], careless), torch.float32) == pytest.approx((0.25, 0.25), rel=1e-5)
    value, gradient = bench.errors(bench.Place("", "", [x], third), torch.float64)  # a sum is no invariant
    assert value > 0.1 and gradient > 0.1
    assert bench.errors(bench.Place("", "", [x], third, turns=False), torch.float64) == (None, None)
    assert bench.errors(bench.Place("", "", [x], third, turns=False, judge=lambda v: 7.0), torch.float64)[0] == 7.0


def test_a_lost_angle_is_seen(bench):
    places = {(p.group, p.what): p for p in bench.geometry_places()}
    near = f"Geometry of two vectors, {bench.NEAR:g} rad apart"
    lost, _ = bench.errors(places[near, "arccos of the cosine"], torch.float32)
    kept, _ = bench.errors(places[near, "angle"], torch.float32)
    assert kept < 1e-4 < 1e-2 < lost


def test_one_table_prints_and_writes_its_rows(bench, tmp_path, capsys):
    assert bench.main(["--only", "geometry", "--output", str(tmp_path / "precision.json")]) == 0
    rows = read_rows(tmp_path)
    assert "norm of the difference" in capsys.readouterr().out
    assert {row.kind for row in rows} == {"precision"} and all(row.command.endswith("--only geometry") for row in rows)
    worst = {(row.what, row.metric): row.mean for row in rows if row.group == bench.SUMMARY}
    for (group, metric), error in worst.items():
        assert error == max(r.mean for r in rows if r.group == group and r.metric == metric)


def test_the_committed_table_has_every_member():
    rows = [row for row in read_rows(DOCS / "rows") if row.kind == "precision"]
    shown = {row.what for row in rows}
    losses = contract("losses")
    members = [name for name in losses.registry if losses.fact(name, "classes", True)]
    members += [*contract("energies").registry]
    members += [f"{name}, cosine" for name in contract("operators").registry]
    members += [f"sphere, {name}" for name in contract("angular functions").registry]
    assert not [name for name in members if name not in shown]
    assert not [row for row in rows if math.isnan(row.mean)]
