"""Heads whose classes lie on 1 to 4 processes, against the same head on one with the whole batch."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hypersphere as hs
from helpers.worlds import worlds

B, D, C = 7, 5, 11  # no process has the same share of classes, sub-centres of one class lie on two
SIZES = {1: (7,), 2: (3, 4), 3: (4, 0, 3), 4: (2, 2, 1, 2)}
"""Samples on each process."""


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def batches(steps, classes, soft, dtype, ignored):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = 3 * torch.randn(B, D, generator=generator, dtype=torch.float64)
        labels = torch.randint(classes, (B,), generator=generator)
        if soft:
            labels = torch.rand(B, classes, generator=generator, dtype=torch.float64).softmax(1).to(dtype)
        elif ignored:
            labels[2:4] = -100
        yield x.to(dtype), labels


def build(name, classes, dtype, options):
    torch.manual_seed(0)
    head = hs.losses.create(name, D, classes, **options).to(dtype)
    if "rotation" in options:
        with torch.no_grad():
            head.rotation.free.add_(0.1 * torch.randn_like(head.rotation.free))
    return head


def numbers(head, loss, x):
    """Everything that one step gives; what has rows for classes in whole."""
    found = {"loss": loss.detach(), "x": x.grad}
    for key, parameter in head.named_parameters():
        if parameter.grad is not None:
            found[f"grad {key}"] = full(parameter.grad)
    return found | {key: full(value) for key, value in head.state_dict().items()}


def full(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def steps(name, classes, dtype, options, *, soft=False, ignored=False, sharded=True, equal=False, compiled=False):
    """Two steps of gradient descent, with this process' share of each batch, or with all of it."""
    world = dist.get_world_size() if sharded else 1
    head = build(name, classes, dtype, options)
    sizes = SIZES[world] if not equal else (B // world,) * world
    start = sum(sizes[: dist.get_rank()]) if sharded else 0
    own = slice(start, start + (sizes[dist.get_rank()] if sharded else sum(sizes)))
    if sharded:
        head.shard(mesh(), equal_batches=equal)
    call = torch.compile(head, backend="aot_eager") if compiled else head
    parameters = [p for p in head.parameters() if p.requires_grad]
    found = []
    for seed, (features, labels) in enumerate(batches(2, classes, soft, dtype, ignored)):
        torch.manual_seed(seed + 100 * dist.get_rank())
        x = features[own].clone().requires_grad_()
        loss = call(x, labels[own])
        total = loss if loss.dim() == 0 else loss.sum() * (world if sharded else 1)
        for parameter in parameters:
            parameter.grad = None
        if total.requires_grad:
            total.backward()
        if x.grad is not None:
            x.grad /= world  # which data-parallel models do
        else:
            x.grad = torch.zeros_like(x)
        found.append(numbers(head, loss, x))
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
    with torch.no_grad():
        head.eval()
        features, labels = next(batches(1, classes, soft, dtype, ignored))
        found.append({"loss": head(features[own], labels[own]), "logits": head.logits(features[own])})
    return found


def compare(size, *arguments, tolerance=1e-12, **options):
    """The same on so many processes as on one."""
    (whole,) = worlds(1).run(steps, *arguments, sharded=False, **options)
    parts = worlds(size).run(steps, *arguments, **options)
    for number, expected in enumerate(whole):
        rows = {key: torch.cat([part[number][key] for part in parts]) for key in ("x", "logits") if key in expected}
        if expected["loss"].dim():
            rows["loss"] = torch.cat([part[number]["loss"] for part in parts])
        for key, value in expected.items():
            for part in parts:
                given = rows.get(key, part[number].get(key))
                assert given is not None and given.shape == value.shape, (key, number)
                scale = value.abs().max().clamp(min=1) if value.numel() else 1
                error = (
                    ((given.to(torch.float64) - value.to(torch.float64)).abs().max() / scale) if value.numel() else 0
                )
                assert error <= tolerance, f"{key} of step {number}: off by {float(error):.2g}"


MEMBERS = sorted(entry.name for entry in hs.losses.losses.entries() if entry.name not in ("gan",))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MEMBERS)
def test_every_member_is_that_of_one_process(name, size):
    compare(size, name, C, torch.float64, {}, ignored=True)


CASES = {
    "smoothing": ("arcface", {"label_smoothing": 0.1}, {}),
    "class weights": ("cosface", {"class_weights": [0.5 + i / 10 for i in range(C)], "label_smoothing": 0.2}, {}),
    "margin by class": ("arcface", {"m": [0.1 + i / 30 for i in range(C)]}, {}),
    "annealed": ("a-softmax", {"annealer": "annealer"}, {}),
    "floor": ("softmax", {"probability_floor": 1e-4}, {}),
    "floor and smoothing": ("softmax", {"probability_floor": 1e-4, "label_smoothing": 0.01}, {}),
    "soft": ("arcface", {}, {"soft": True}),
    "soft linear": ("softmax", {"label_smoothing": 0.1}, {"soft": True}),
    "soft binary": ("sphereface2", {"version": "A"}, {"soft": True}),
    "soft curriculum": ("curricularface", {}, {"soft": True}),
    "soft and plus": ("sphereface-plus", {}, {"soft": True}),
    "none": ("arcface", {"reduction": "none"}, {"ignored": True}),
    "sum": ("magface", {"reduction": "sum"}, {"ignored": True}),
    "caffe": ("a-softmax", {"gradient": "caffe"}, {}),
    "cgd": ("arcface", {"gradient": "cgd"}, {}),
    "raw": ("arcface", {"weight_gradient": "raw"}, {}),
    "chunked": ("arcface", {"path": "chunked"}, {"ignored": True}),
    "chunked linear": ("softmax", {"path": "chunked", "label_smoothing": 0.1}, {}),
    "chunked binary": ("sphereface2", {"path": "chunked"}, {}),
    "chunked curriculum": ("curricularface", {"path": "chunked"}, {}),
    "chunked sub-centres": ("subcenter-arcface", {"k": 3, "path": "chunked"}, {}),
    "sub-centres and biases": ("margin-softmax", {"subcentres": 3, "unit_weights": False, "bias": True}, {}),
    "rotation": ("arcface", {"rotation": "cayley"}, {}),
    "frozen": ("cosface", {"frozen": True}, {}),
    "learned scale": ("s-softmax", {"s": 8.0, "learn_scale": True}, {}),
    "angular function": ("s-softmax", {"g": "linear"}, {}),
    "sampled": ("cosface", {"sample_rate": 0.7}, {"ignored": True}),
    "sampled, weighted": ("arcface", {"sample_rate": 0.7, "class_weights": [1 + i / 10 for i in range(C)]}, {}),
    "sampled sub-centres": ("subcenter-arcface", {"k": 2, "sample_rate": 0.7}, {}),
    "sampled linear": ("softmax", {"sample_rate": 0.7, "label_smoothing": 0.1}, {}),
    "hard norms": ("sphereface-r", {"feature_norm": "soft"}, {}),
}


def case(name):
    member, options, more = CASES[name]
    if "annealer" in options:
        options = options | {"annealer": hs.losses.LambdaAnnealer()}
    return member, options, more


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_every_option_is_that_of_one_process(name, size):
    member, options, more = case(name)
    compare(size, member, C, torch.float64, options, **more)


FEW = {"arcface": {}, "softmax": {"label_smoothing": 0.1}, "subcenter-arcface": {"k": 3}, "center": {}, "triplet": {}}


@pytest.mark.parametrize("path", ["dense", "chunked"])
@pytest.mark.parametrize(("name", "classes", "size"), [*itertools.product(FEW, (1, 2, 3, 5), (2, 4))])
def test_classes_that_do_not_divide_evenly(name, classes, size, path):
    options = FEW[name] if name == "triplet" else FEW[name] | {"path": path}
    compare(size, name, classes, torch.float64, options)


@pytest.mark.parametrize("name", ["arcface", "softmax", "adaface", "sphereface2", "subcenter-arcface"])
def test_float32(name):
    compare(3, name, C, torch.float32, {}, tolerance=1e-5)


@pytest.mark.parametrize("name", ["arcface", "softmax", "center"])
def test_batches_of_one_size_need_no_agreement(name):
    compare(1, name, C, torch.float64, {}, equal=True)
