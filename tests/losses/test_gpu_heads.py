"""Heads on a CUDA device: the kernels against float64, no synchronisation, capture, memory."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import hypersphere as hs
from hypersphere.errors import ArgumentError
from hypersphere.losses import head as head_module
from hypersphere.losses import losses
from hypersphere.losses.streaming import ClassProblem, class_statistics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MEMBERS = sorted(set(losses) - {"gan"})  # which is no head of classes
CLASSES, DIM, BATCH = 3000, 64, 48


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / wanted.norm().clamp(min=1e-12))


def statistics(x, w, y, scale, weights, unit, chunked=False, low=False):
    """Value and gradients of a weighted sum of all statistics."""
    x, w, scale = (t.detach().clone().requires_grad_() for t in (x, w, scale))
    found = class_statistics(ClassProblem(x, w, y, scale, unit=unit, low=low), chunked=chunked)
    total = (found.negatives * weights[0].to(x)).sum() + (found.target * weights[1].to(x)).sum()
    if not unit:
        total = total + (found.length * weights[2].to(x)).sum()
    total.backward()
    return {"negatives": found.negatives, "own": found.target, "x": x.grad, "w": w.grad, "scale": scale.grad}


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize(
    ("batch", "dim", "classes"), [(128, 64, 1000), (1, 8, 2), (7, 72, 999), (33, 128, 3), (300, 512, 70_001)]
)
def test_the_kernels_agree_with_float64(batch, dim, classes, unit):
    torch.manual_seed(0)
    w = torch.randn(classes, dim, device="cuda", dtype=torch.float64) * 0.02
    y = torch.randint(classes, (batch,), device="cuda")
    # Near their class: the sum of the others is then small beside the own class.
    x = F.normalize(torch.randn(batch, dim, device="cuda", dtype=torch.float64) + 8 * F.normalize(w[y]))
    scale = torch.rand(batch, device="cuda", dtype=torch.float64) * 60 + 4
    weights = [torch.randn(batch, device="cuda", dtype=torch.float64) for _ in range(3)]
    wanted = statistics(x, w, y, scale, weights, unit, chunked=True)
    got = statistics(x.float(), w.float(), y, scale.float(), weights, unit, chunked=True, low=True)
    for name, value in got.items():
        assert relative(value, wanted[name]) < (1e-6 if name == "own" else 3e-3), name


def build(name: str, path: str, **options) -> hs.losses.MarginSoftmax:
    torch.manual_seed(1)
    if name == "triplet":
        return losses.create(name, DIM, CLASSES).cuda()
    return losses.create(name, DIM, CLASSES, path=path, **options).cuda()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    labels = torch.randint(CLASSES, (BATCH // 2,), device="cuda").repeat(2)
    return torch.randn(BATCH, DIM, device="cuda") * 4, labels


@pytest.mark.parametrize("path", ["dense", "chunked"])
@pytest.mark.parametrize("name", MEMBERS)
def test_autocast_stays_close_to_float32_and_waits_for_nothing(name, path, monkeypatch):
    monkeypatch.setattr(head_module, "CAN_COMPILE", False)  # the plain code, which is also much faster to test
    x, y = batch()
    found = {}
    for enabled in (False, True):
        head, leaf = build(name, path), x.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            head(leaf, y)  # the first call may set things up
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
                loss = head(leaf, y)
            (loss * 1024).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(p.dtype == torch.float32 for p in head.parameters())
        found[enabled] = (loss.detach(), leaf.grad, *(p.grad for p in head.parameters()))
    for low, full in zip(found[True], found[False], strict=True):
        assert bool(low.isfinite().all())
        assert relative(low, full) < 2e-2


@pytest.mark.parametrize("path", ["dense", "chunked"])
@pytest.mark.parametrize("cosine", [0.5, 0.7, 0.95])
def test_well_classified_samples_keep_their_loss(path, cosine):
    torch.manual_seed(3)
    weight = torch.randn(20_000, 128, dtype=torch.float64)
    labels = torch.arange(32)
    noise = torch.randn(32, 128, dtype=torch.float64)
    own = F.normalize(weight[labels])
    noise = F.normalize(noise - (noise * own).sum(1, keepdim=True) * own)
    x = cosine * own + math.sqrt(1 - cosine**2) * noise
    cosines = x @ F.normalize(weight).T
    others = (64 * cosines).scatter(1, labels.unsqueeze(1), float("-inf")).logsumexp(1)
    wanted = torch.log1p((others - 64 * math.cos(math.acos(cosine) + 0.5)).exp()).mean()
    head = hs.losses.ArcFace(128, 20_000, path=path).cuda()
    with torch.no_grad():
        head.weight.copy_(weight)
    with torch.autocast("cuda", torch.bfloat16):
        loss = head(x.float().cuda(), labels.cuda())
    assert float(loss.detach()) == pytest.approx(float(wanted), rel=5e-3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("arcface", {"path": "chunked"}),
        ("arcface", {"path": "dense"}),
        ("arcface", {"path": "chunked", "sample_rate": 0.2}),
        ("curricularface", {"path": "chunked"}),
        ("sphereface2", {"path": "chunked"}),
        ("a-softmax", {"path": "chunked", "annealer": hs.losses.LambdaAnnealer(), "gradient": "caffe"}),
    ],
)
def test_a_step_is_captured(name, options, monkeypatch):
    """A replayed step gives the loss and the gradients of the plain one."""
    monkeypatch.setattr(head_module, "CAN_COMPILE", False)
    x, y = batch()
    head = build(name, **options)
    leaf = x.clone().requires_grad_()

    def step() -> torch.Tensor:
        leaf.grad = None
        head.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = head(leaf, y)
        loss.backward()
        return loss.detach()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    state = {key: value.clone() for key, value in head.state_dict().items()}
    torch.cuda.manual_seed(5)
    graph.replay()
    replayed, gradient = captured.clone(), head.weight.grad.clone()
    head.load_state_dict(state)
    torch.cuda.manual_seed(5)
    loss = step()
    assert float(replayed) == pytest.approx(float(loss), rel=0.2 if "sample_rate" in options else 1e-4)
    if "sample_rate" not in options:  # which classes are drawn differs between a graph and a plain step
        assert relative(gradient, head.weight.grad) < 1e-3


@pytest.mark.parametrize("name", ["arcface", "softmax", "adaface"])
def test_the_head_compiles_itself(name):
    """Many classes on a GPU run as compiled code without being asked; the result is that of the plain code."""
    head = losses.create(name, DIM, CLASSES).cuda()
    assert head.path == "compiled"
    plain = losses.create(name, DIM, CLASSES, path="dense").cuda()
    plain.load_state_dict(head.state_dict())
    x, y = batch()
    for _ in range(2):
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        loss, wanted = head(ours, y), plain(theirs, y)
        loss.backward()
        wanted.backward()
        torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)


def test_a_million_classes_fit():
    """Weights, gradient, a half-precision copy and half a GiB."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        head = hs.losses.ArcFace(512, 1_000_000)
    assert head.path == "chunked"
    x = torch.randn(1024, 512, device="cuda", requires_grad=True)
    y = torch.randint(1_000_000, (1024,), device="cuda")
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        head.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = head(x, y)
        loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 5.5 * 2**30
    estimate = hs.losses.memory_estimate(1024, 1_000_000, 512, low_precision=True)
    assert peak == pytest.approx(estimate.total - estimate.optimiser, rel=0.05)


def test_labels_are_checked_on_request():
    x, _ = batch()
    wrong = torch.full((BATCH,), CLASSES, device="cuda")
    with pytest.raises(ArgumentError, match="labels must lie in"):
        hs.losses.ArcFace(DIM, CLASSES, path="dense", validate=True).cuda()(x, wrong)
