"""Energies on a CUDA device: the kernels against float64, near pairs, no synchronisation, capture, memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hypersphere as hs
from hypersphere.energy import pairs
from hypersphere.energy.potentials import Gaussian, Riesz

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

POTENTIALS = [
    Riesz(0.0),
    Riesz(1.0),
    Riesz(2.0),
    Riesz(0.7),
    Riesz(5.0),
    Riesz(0.0, angular=True),
    Riesz(2.0, angular=True),
    Riesz(1.0, angular=True, half_turns=True, offset=1e-4),
    Gaussian(2.0),
]


def vectors(batch, n, d):
    """Random ones with a zero vector, a near pair, a nearly opposite pair and a cluster."""
    torch.manual_seed(n + d)
    x = torch.randn(batch, n, d, device="cuda", dtype=torch.float64)
    if n > 30:
        x[:, 5] = 0
        x[:, 7] = x[:, 6] + 1e-2 * x[:, 10]
        x[:, 9] = -x[:, 8] + 1e-2 * x[:, 11]
        x[:, 20:30] = x[:, 19:20] + 0.1 * x[:, 20:30]
    return x.float().double()


def value_and_gradient(x, potential, half_space):
    x = x.clone().requires_grad_()
    total = pairs.pair_sums(x, potential, half_space=half_space)
    total.sum().backward()
    return total.detach(), x.grad


@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize("potential", POTENTIALS, ids=range(len(POTENTIALS)))
@pytest.mark.parametrize("shape", [(3, 37, 20), (1, 2, 3), (5, 300, 96), (1, 6000, 16), (1, 9000, 72)])
def test_kernels_agree_with_float64(shape, potential, half_space):
    x = vectors(*shape)
    wanted, wanted_gradient = value_and_gradient(x, potential, half_space)  # the torch code
    found, gradient = value_and_gradient(x.float(), potential, half_space)
    many = shape[1] > 4096 and shape[2] >= 64
    assert float(((found - wanted) / wanted).abs().max()) < (2e-4 if many else 3e-5)
    lengths = wanted_gradient.norm(dim=2)
    off = (gradient - wanted_gradient).norm(dim=2)
    assert bool((off <= 1e-2 * lengths + 1e-3 * lengths.median()).all())
    assert float(off.norm() / lengths.norm()) < (3e-3 if many else 3e-4)
    assert shape[1] <= 30 or not gradient[:, 5].any()


def test_gradients_of_many_wide_vectors():
    x = vectors(1, 10_000, 512)
    wanted, wanted_gradient = value_and_gradient(x, Riesz(2.0), True)
    found, gradient = value_and_gradient(x.float(), Riesz(2.0), True)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)
    assert float((gradient - wanted_gradient).norm() / wanted_gradient.norm()) < 1e-3


@pytest.mark.parametrize("n", [300, 5000])
def test_collapsed_vectors_keep_their_digits(n):
    torch.manual_seed(0)
    centre = torch.randn(1, 1, 128, device="cuda", dtype=torch.float64)
    x = centre + 0.02 * torch.randn(1, n, 128, device="cuda", dtype=torch.float64)
    wanted, wanted_gradient = value_and_gradient(x, Riesz(2.0), False)
    found, gradient = value_and_gradient(x.float(), Riesz(2.0), False)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=0)
    assert float((gradient - wanted_gradient).norm() / wanted_gradient.norm()) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{"beta": True}, {"eps": 1e-6}, {"half_space": True, "beta": True}, {}])
def test_near_pairs_keep_their_digits_with_and_without_a_graph(dtype, options):
    gap = 1e-2 if dtype == torch.float32 else 3e-6
    x = torch.randn(5, 7, dtype=torch.float64)
    away = x[2] - (x[2] @ x[0]) / (x[0] @ x[0]) * x[0]
    x[1] = 3 * (x[0] + gap * x[0].norm() * away / away.norm())
    x = x.to(dtype)
    beta = torch.tensor([1.5, 1.5, 0.7, 1.0, 2.0]) if options.get("beta") else None
    found = []
    for device in ("cpu", "cuda"):
        leaf = x.to(device).requires_grad_()
        where = None if beta is None else beta.to(device)
        value = hs.energy.hyperspherical_energy(leaf, **{**options, "beta": where})
        found.append(
            [
                torch.autograd.grad(value, leaf, create_graph=graph, retain_graph=True)[0].detach().cpu()
                for graph in (False, True)
            ]
        )
    (wanted, _), others = found
    for gradient in (found[0][1], *others):
        assert float((gradient - wanted).norm() / wanted.norm()) < 30 * torch.finfo(dtype).eps / gap


def test_near_pairs_of_weighted_vectors_wait_for_nothing():
    x = torch.randn(300, 16, device="cuda", requires_grad=True)
    rows = torch.cat([x, x + 1e-3])
    torch.cuda.set_sync_debug_mode("error")
    try:
        energy = hs.energy.hyperspherical_energy(rows, beta=torch.ones_like(rows[:, 0]))
        torch.autograd.grad(energy + hs.energy.OrthoReg()(rows), x)
        torch.autograd.grad(hs.energy.batch_versus_all(rows, torch.arange(64, device="cuda")), x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("n", [200, 5000])
def test_nothing_waits_and_a_graph_replays(n):
    x = torch.randn(n, 64, device="cuda", requires_grad=True)
    energy = hs.energy.MHE(half_space=True)
    energy(x).backward()
    wanted = x.grad.clone()
    torch.cuda.set_sync_debug_mode("error")
    try:
        energy(x).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        energy(x).backward()
    x.grad.zero_()
    graph.replay()
    torch.testing.assert_close(x.grad, wanted, rtol=1e-4, atol=1e-9)


def test_memory_stays_linear():
    x = torch.randn(50_000, 512, device="cuda", requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    hs.energy.MHE()(x).backward()
    assert torch.cuda.max_memory_allocated() < 1.5 * 2**30
    assert bool(x.grad.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_on_the_device_agrees_with_the_cpu(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.Conv2d(16, 24, 3, groups=2),
        nn.ConvTranspose2d(24, 8, 2),
        nn.Flatten(),
        nn.Linear(40, 10),
    ).to(dtype)
    for options in ({}, {"half_space": True, "s": 0}, {"angular": True}):
        energy = hs.energy.MHE(**options)
        on_cpu = energy(model.cpu())
        with torch.autocast("cuda", torch.bfloat16):
            on_gpu = energy(model.cuda())
        assert on_gpu.dtype == torch.float32
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-5, atol=1e-6)


def test_compiled_energy():
    x = F.normalize(torch.randn(500, 64, device="cuda"))
    energy = hs.energy.MHE(half_space=True)
    torch.testing.assert_close(torch.compile(energy, fullgraph=True)(x), energy(x))
