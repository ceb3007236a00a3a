"""The benchmark of orthogonal maps measures what it says."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from helpers.paths import BENCHMARKS
from hypersphere.results import read_rows

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench():
    """The script as a module; it imports from its neighbours."""
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("benchmark_orthogonal", BENCHMARKS / "orthogonal.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    yield module
    del sys.modules[spec.name], sys.modules["layers"]


@pytest.fixture
def own(bench, monkeypatch):
    """Our maps and torch's, without packages that take seconds to import."""
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    return bench.providers()


def test_every_map_equals_its_float64_form(bench, own):
    for d in (6, 7):
        drawn = bench.noise(d, torch.Generator().manual_seed(1)).double()
        for provider in own:
            call, leaf = provider.build(bench.free_matrix(provider.near, drawn))
            R = call().detach()
            series = "neumann" in provider.name
            assert bench.defect(R) < (0.01 if series else 1e-10), provider.name
            if provider.plain is not None:
                torch.testing.assert_close(provider.plain(leaf.detach()), R, rtol=0, atol=0.05 if series else 1e-10)


def test_missing_packages_are_skipped_and_named(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    names = [provider.name for provider in bench.providers()]
    assert len(set(names)) == len(names) and {name.split(",")[0] for name in names} == {"torch", "ours"}
    assert capsys.readouterr().err.splitlines() == [f"  skip: {name} is not installed" for name in ("geotorch", "peft")]


def test_a_loop_moves_as_far_at_each_step(bench):
    P = torch.zeros(200, 200)
    places = bench.loop(P, torch.Generator().manual_seed(0))
    moves = torch.linalg.matrix_norm(places - places.roll(1, 0), 2)
    assert len(places) == bench.PLACES and (moves - bench.MOVE).abs().max() < 0.1 * bench.MOVE
    torch.testing.assert_close(places.mean(0), P, rtol=0, atol=1e-6)


def test_followed_maps_do_real_work(bench, own):
    """A step that did not refine what it carries would be off by as much as the matrix moves."""
    provider = next(provider for provider in own if provider.name == "ours, cayley newton")
    generator = torch.Generator().manual_seed(0)
    P = bench.free_matrix("zero", bench.noise(24, generator))
    step = bench.map_step(provider, P, torch.ones(24, 24), generator)
    taken = [step() for _ in range(2 * bench.PLACES)]
    for (free, R, _), (later, *_) in pairwise(taken):
        wanted = bench.plain_cayley(free.detach().double())
        assert (R - wanted).abs().max() < 1e-6
        assert (bench.plain_cayley(later.detach().double()) - wanted).abs().max() > 1e-4
    torch.testing.assert_close(taken[0][0], taken[bench.PLACES][0])  # round the loop


def test_gradient_error_sees_a_wrong_gradient(bench, own):
    generator = torch.Generator().manual_seed(0)
    provider = next(provider for provider in own if provider.name == "ours, cayley solve")
    P, upstream = bench.free_matrix("zero", bench.noise(6, generator)), torch.randn(6, 6, generator=generator)
    taken = bench.map_step(provider, P, upstream, generator)()
    assert bench.gradient_error(provider, taken, P, upstream) < 1e-6
    assert bench.gradient_error(replace(provider, plain=bench.plain_exponential), taken, P, upstream) > 0.1
    assert bench.gradient_error(provider, (taken[0], taken[1], 1.01 * taken[2]), P, upstream) == pytest.approx(
        0.01, rel=1e-3
    )


def test_defect_is_the_largest_entry(bench):
    R = torch.diag(torch.tensor([1.0, 1.0, 3.0]))
    R[0, 1] = 0.5
    assert bench.defect(R) == 8
    assert bench.defect(R[:2, :2]) == 0.5


@pytest.mark.parametrize(
    ("own_ms", "captured", "reference", "factor", "error", "text"),
    [
        (2.0, math.nan, 4.0, 0.5, 1e-6, "met: 0.5 <= 0.5"),
        (2.1, math.nan, 4.0, 0.5, 1e-6, "missed: 0.525 > 0.5"),
        (2.1, 1.0, 4.0, 0.5, 1e-6, "met captured: 0.25 <= 0.5"),
        (2.1, 2.1, 4.0, 0.5, 1e-6, "missed: 0.525 > 0.5"),
        (1.0, math.nan, 4.0, 0.5, 2e-5, "missed: error above 1e-05"),
        (1.0, math.nan, 4.0, 0.5, math.nan, "missed: error above 1e-05"),
        (1.0, math.nan, math.nan, 0.5, 1e-6, ""),
    ],
)
def test_verdict(bench, own_ms, captured, reference, factor, error, text):
    assert bench.verdict(own_ms, captured, reference, factor, error) == text


def test_map_table_ratios(bench, own):
    names = ["torch, cayley", "torch, matrix_exp", "ours, exponential 3.14"]
    entries = [
        bench.Timed(name, times=[ms, ms, 9 * ms], facts={"orthogonality error": 1e-6}, captured=[1.0] * (ms == 3))
        for name, ms in zip(names, (2.0, 12.0, 3.0), strict=True)
    ]
    entries[0].note = "RuntimeError: it waits"
    table = bench.map_table(entries, own)
    assert table["torch, cayley"]["captured ms"] == "no" and table["torch, cayley"]["x torch's Cayley"] == 1
    assert "goal" not in table["torch, matrix_exp"]
    found = table["ours, exponential 3.14"]
    assert found["x torch's Cayley"] == 1.5 and found["captured x torch's Cayley"] == 0.5
    assert found["speed-up over torch's"] == 4 and found["goal"] == "met: 0.25 <= 0.25"


def test_a_failing_map_is_told_and_the_others_go_on(bench, own, capsys):
    def broken(P):
        raise ArithmeticError("no such map\nand more")

    reference = own[0]
    entries = bench.time_maps([replace(reference, name="broken", build=broken), reference], 5, CPU, 2)
    assert entries[0].failure == "prepare: ArithmeticError: no such map" and not entries[0].times
    assert not entries[1].failure and len(entries[1].times) == 2
    assert entries[1].facts["orthogonality error"] < 1e-6 and entries[1].facts["gradient error"] < 1e-6
    assert "FAILED: broken, prepare: ArithmeticError: no such map" in capsys.readouterr().err
    bench.show("title", bench.map_table(entries, [replace(reference, name="broken"), reference]), entries)
    assert "FAILED prepare: ArithmeticError" in capsys.readouterr().out


class TestSteps:
    @pytest.fixture
    def network(self, bench):
        return bench.networks(gpu=False, quick=True)[1]

    @pytest.mark.parametrize("name", ["cayley newton", "S-OPT d/4, cayley solve"])
    def test_table(self, bench, network, name):
        variants = [variant for variant in bench.VARIANTS if variant.name == name]
        entries = bench.time_steps(variants, network, "fp32", CPU, [False], 2)
        assert not [entry.failure for entry in entries if entry.failure]
        table = bench.step_table(entries, variants)
        assert list(table) == ["plain network", name]
        assert table["plain network"].keys() == {"ms", "x plain"}  # nothing is turned
        found = table[name]
        assert found["x plain"] == found["ms"] / table["plain network"]["ms"]
        assert found["gram change"] < 1e-5 and found["orthogonality error"] < 1e-4
        assert re.match(r"(met|missed): ", found["goal"])

    def test_errors_are_those_of_the_matrices_in_use(self, bench, network, monkeypatch):
        """At a large learning rate the matrices that are followed are off, while those computed anew are not."""
        monkeypatch.setattr(bench, "RATE", 3.0)
        entries = bench.time_steps(bench.VARIANTS[:1], network, "fp32", CPU, [False], 1)
        assert entries[1].facts["orthogonality error"] > 1e-3 and entries[1].facts["gram change"] < 1e-4

    def test_a_loss_that_is_not_finite_is_a_failure(self, bench, network, monkeypatch, capsys):
        apply = bench.hs.orthogonal.apply

        def spoiled(model, *arguments, **options):
            found = apply(model, *arguments, **options)
            for _, rotation in bench.hs.orthogonal.rotations(model):
                for parameter in rotation.parameters():
                    torch.nn.init.constant_(parameter, math.nan)
            return found

        monkeypatch.setattr(bench.hs.orthogonal, "apply", spoiled)
        entries = bench.time_steps(bench.VARIANTS[:1], network, "fp32", CPU, [False], 1)
        assert "the loss is not finite" in entries[1].failure and not entries[0].failure
        assert "FAILED: cayley newton" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_failed_capture_leaves_nothing_behind(bench):
    x, stream = torch.ones(4, device="cuda"), torch.cuda.current_stream()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="captur"):
            bench.capture(lambda: x.sum().item())
        assert torch.cuda.current_stream() == stream
        replay = bench.capture(lambda: x * 2)
        x.add_(1)
        assert replay().tolist() == (2 * x).tolist()
        assert torch.randn(3, device="cuda").isfinite().all()
    assert "synchronizing" in bench.waits(lambda: x.sum().item())
    assert bench.waits(lambda: x * 2) == ""
    assert x.sum().item() == 12  # waiting is allowed again


@pytest.mark.slow
def test_whole_script(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "orthogonal.py"), "--quick", "--device", "cpu"]
    options = ["--providers", "ours", "cayley newton", "--output", str(tmp_path / "rows.json")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, env=environment, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    for word in (
        "torch, cayley",
        "ours, householder product",
        "ours, exponential 3.14",
        "plain network",
        "goal",
        "x plain",
    ):
        assert word in done.stdout
    assert "FAILED" not in done.stdout + done.stderr
    rows = read_rows(tmp_path)
    assert {row.group.split(",")[0] for row in rows} == {"Orthogonal maps", "Training step"}
    assert {row.command for row in rows} == {
        "python benchmarks/orthogonal.py --quick --device cpu --providers ours cayley newton"
    }
    for row in rows:
        if row.metric == "largest R^T R - I" and "neumann" not in row.what:
            assert row.mean < 1e-5
