"""Decoupled layers on a GPU: the Triton passes against float64 on the CPU, layouts, precisions, capture, compile."""

import itertools

import pytest
import torch
from torch import nn

import hypersphere as hs
from helpers.decoupled_reference import ANGULARS
from hypersphere.nn import fused

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    """TF32 would hide mistakes of the size of its rounding."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def layer_and_input(operator, angular, *, kind="conv2d", size=(3, 7, 11, 9), kernels=10, learn_k=True, **arguments):
    torch.manual_seed(0)
    options = {"learn_k": "filter"} if angular == "sigmoid" and learn_k else {}
    factory = hs.nn.create(operator, kind, angular=angular, **options)
    layer = factory(size[1], kernels, **arguments).double()
    x = torch.randn(size, dtype=torch.double)
    x[0] = x[0].relu()
    if x.dim() == 4:
        x[1, :, :5, :5] = 0
    if layer.radius_raw is not None:
        layer.set_radius(torch.linspace(0.5, 1.5, kernels))
    if layer.k_raw is not None:
        layer.set_k(torch.linspace(0.2, 0.8, kernels))
    return layer, x


def run(layer, x, upstream):
    x = x.detach().requires_grad_()
    y = layer(x)
    grads = torch.autograd.grad(y, [x, *layer.parameters()], upstream.to(y))
    return [y, *grads]


def compare(layer, x, dtype, channels_last=False, forward=None):
    upstream = torch.randn_like(layer(x)).detach()
    if layer.training and hasattr(layer, "patch_norm_seen"):
        layer.patch_norm_seen.fill_(False)
    wide_x = x.to(dtype).double()
    expected = run(layer, wide_x, upstream.to(dtype).double())
    mine = layer.to("cuda", torch.float32)
    x = x.to("cuda", dtype)
    upstream = upstream.to("cuda", dtype)
    if channels_last:
        x, upstream = (t.contiguous(memory_format=torch.channels_last) for t in (x, upstream))
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        found = run(forward(mine) if forward else mine, x, upstream) if not forward else None
        if forward:
            compiled = forward(mine)
            x = x.detach().requires_grad_()
            y = compiled(x)
            found = [y, *torch.autograd.grad(y, [x, *mine.parameters()], upstream.to(y))]
    assert found[0].dtype == dtype
    if channels_last and getattr(layer, "padding_mode", "zeros") == "zeros":  # torch's reflection leaves the format
        assert found[0].is_contiguous(memory_format=torch.channels_last)
    for name, a, b in zip(["output", "x", *(n for n, _ in mine.named_parameters())], found, expected, strict=True):
        assert a.isfinite().all(), name
        error = (a.double().cpu() - b).norm() / b.norm().clamp(min=1e-6)
        assert error < TOLERANCE[dtype], f"{name}: {error:.1e}"


@pytest.mark.parametrize("angular", ANGULARS)
@pytest.mark.parametrize("operator", list(hs.nn.operators))
def test_every_operator(operator, angular):
    for dtype, last in ((torch.float32, True), (torch.bfloat16, True), (torch.float16, False)):
        layer, x = layer_and_input(operator, angular, kernel_size=3, padding=1)
        assert fused.usable(x.to("cuda", dtype), 10, layer.operator, hs.nn.Window((3, 3), (1, 1), (1, 1), (1, 1)))
        compare(layer, x, dtype, last)


@pytest.mark.parametrize(
    "arguments",
    [
        {"kernel_size": 1},
        {"kernel_size": 1, "stride": 2},
        {"kernel_size": (3, 5), "stride": (2, 1), "padding": (0, 3)},
        {"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 2},
        {"kernel_size": 3, "stride": 3},
        {"kernel_size": 4, "padding": "same"},
        {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
        {"kernel_size": (11, 9)},
        {"kernel_size": 3, "padding": 1, "bias": True},
    ],
    ids=str,
)
def test_geometry(arguments):
    for last, (operator, angular) in itertools.product((False, True), (("sphere", "cosine"), ("tanh", "sigmoid"))):
        compare(*layer_and_input(operator, angular, **arguments), torch.float32, last)


@pytest.mark.parametrize("kernels", [1, 33, 96, 512, 1500])
def test_widths(kernels):
    compare(*layer_and_input("seg", "cosine", kernel_size=1, kernels=kernels), torch.float32)
    compare(*layer_and_input("ball", "linear", kernel_size=3, kernels=kernels), torch.float32, channels_last=True)


def test_linear_and_other_kinds():
    for operator, angular in (("sphere", "sigmoid"), ("tanh", "sqcos"), ("log", "linear")):
        compare(*layer_and_input(operator, angular, kind="linear", size=(70, 33)), torch.float32)
        compare(
            *layer_and_input(operator, angular, kind="conv1d", size=(3, 5, 17), kernel_size=3, stride=2), torch.float32
        )
        compare(
            *layer_and_input(operator, angular, kind="conv3d", size=(2, 3, 4, 5, 6), kernel_size=2, kernels=4),
            torch.float32,
        )
        compare(
            *layer_and_input(operator, angular, kernel_size=3, groups=2, size=(2, 6, 7, 7), kernels=4), torch.float32
        )
        compare(
            *layer_and_input(operator, angular, kind="convtranspose2d", kernel_size=4, stride=2, padding=1),
            torch.float32,
        )


def test_evaluation_uses_the_moving_average():
    layer, x = layer_and_input("tanh", "cosine", kernel_size=3)
    layer(x)
    layer.eval()
    expected = layer(x * 3)
    found = layer.to("cuda", torch.float32)((x * 3).to("cuda", torch.float32))
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_zero_patches(dtype):
    for operator, angular in itertools.product(hs.nn.operators, ANGULARS):
        layer = hs.nn.create(operator, angular=angular)(8, 8, 3, padding=1).cuda()
        x = torch.zeros(2, 8, 5, 5, device="cuda", dtype=dtype, requires_grad=True)
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            y = layer(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert (y == 0).all() and (gradient == 0).all(), (operator, angular)


def test_second_derivatives_take_the_torch_path():
    layer, x = layer_and_input("tanh", "sqcos", kernel_size=3)
    layer, x = layer.to("cuda", torch.float32), x.to("cuda", torch.float32).requires_grad_()
    (first,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    cpu, xc = layer.double().cpu(), x.detach().double().cpu().requires_grad_()
    (first,) = torch.autograd.grad(cpu(xc).sum(), xc, create_graph=True)
    (expected,) = torch.autograd.grad(first.square().sum(), xc)
    assert (second.double().cpu() - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize(("operator", "angular"), [("sphere", "cosine"), ("tanh", "sigmoid"), ("seg", "sqcos")])
def test_compiled(operator, angular):
    layer, x = layer_and_input(operator, angular, kernel_size=3, padding=1)
    compare(layer, x, torch.float32, True, forward=lambda layer: torch.compile(layer, fullgraph=True))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_training_step_is_captured(compiled):
    torch.manual_seed(0)
    conv = hs.nn.create("tanh", angular="sigmoid", learn_k="filter")
    model = nn.Sequential(conv(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), conv(16, 8, 3, stride=2)).cuda()
    x = torch.randn(4, 3, 8, 8, device="cuda")
    forward = torch.compile(model, fullgraph=True) if compiled else model
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    def step():
        optimiser.zero_grad(set_to_none=True)
        loss = forward(x).square().mean()
        loss.backward()
        optimiser.step()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    model.load_state_dict(start)
    graph.replay()
    captured = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(start)
    step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(captured[name], value, rtol=1e-5, atol=1e-7, msg=name)
    assert any((captured[name] != start[name]).any() for name in start)
