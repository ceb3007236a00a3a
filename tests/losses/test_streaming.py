"""The chunked path: the same numbers as the whole matrix, in bounded memory."""

import copy
import gc
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import hypersphere as hs
from helpers.paths import SOURCE
from hypersphere.angular import Angular
from hypersphere.losses import LambdaAnnealer, MarginSoftmax, losses, streaming
from hypersphere.losses.head import CHUNKED_FROM
from hypersphere.losses.negatives import (
    Binary,
    CircleNegatives,
    Hardened,
    HingeNegatives,
    Negatives,
    OfAngle,
    Plain,
    Riesz,
    Widened,
    lookup,
)
from hypersphere.losses.streaming import ClassProblem, class_statistics

HEADS = [name for name in losses if losses[name].factory.shared_options]
SMOOTHED = [name for name in HEADS if name not in ("hinge", "sphereface2")]
SETTINGS = {"margin-softmax": {"psi": "additive-angle", "s": 16.0, "m": 0.3}}
VARIANTS = [
    *((name, {}) for name in HEADS),
    ("a-softmax", {"gradient": "caffe"}),
    ("a-softmax", {"gradient": "cgd"}),
    ("l-softmax", {"gradient": "cgd", "m": 2}),
    ("ga-softmax", {"g": "sqcos", "m": 2}),
    ("ga-softmax", {"g": "sigmoid", "m": 1.5, "gradient": "cgd"}),
    ("w-softmax", {"g": "linear"}),
    ("s-softmax", {"learn_scale": True}),
    ("sphereface-r", {"version": "v0", "feature_norm": "none"}),
    ("sphereface-r", {"version": "v1", "gradient": "exact"}),
    ("sphereface-r", {"version": "v2", "gradient": "exact", "feature_norm": "soft", "s": 3.0, "loss_weight": 2.0}),
    ("sphereface2", {"gradient": "exact"}),
    ("sphereface2", {"version": "A"}),
    ("sphereface2", {"version": "M", "gradient": "exact"}),
    ("sphereface-plus", {"energy_power": 0}),
    ("curricularface", {"gradient": "cgd"}),
    ("hinge", {"power": 2}),
    ("softmax", {"bias": False}),
]
each_variant = pytest.mark.parametrize(
    ("name", "options"), VARIANTS, ids=["-".join(map(str, (name, *o.values()))) for name, o in VARIANTS]
)
B, C, D = 12, 700, 8
Y = torch.arange(B) * 61 % C  # two of them in the last chunk
Y[5] = Y[0]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Three chunks of 256, 256 and 188 classes: 256 is the least that a chunk holds."""
    monkeypatch.setattr(streaming, "CHUNK_ELEMENTS", 1)


def build(name, path, dtype=torch.float64, **options):
    torch.manual_seed(3)
    settings = {**SETTINGS.get(name, {}), **options}
    if any(o.name == "s" for o in losses[name].options) and settings.get("feature_norm") != "none":
        settings.setdefault("s", 8.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # small scales leave every class a gradient that can be compared
        head = losses.create(name, D, C, path=path, **settings).to(dtype)
    if head.bias is not None:
        torch.nn.init.normal_(head.bias)
    if name == "curricularface":
        head.progress.fill_(0.3)
    if name == "adaface":
        head.norm_mean.fill_(3.0), head.norm_std.fill_(1.0)
    return head


def features(dtype=torch.float64):
    return (2 * torch.randn(B, D, generator=torch.Generator().manual_seed(4), dtype=torch.float64)).to(dtype)


def step(head, x, labels=Y):
    """Value of a training step, all its gradients, and the numbers that the head keeps."""
    x = x.clone().requires_grad_()
    loss = head(x, labels)
    loss.sum().backward()
    found = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "features": x.grad, **found, **{f"{k} kept": v for k, v in head.named_buffers()}}


def compare(name, dtype=torch.float64, labels=Y, tolerance=1e-10, **options):
    dense = step(build(name, "dense", dtype, **options), features(dtype), labels)
    chunked = step(build(name, "chunked", dtype, **options), features(dtype), labels)
    assert dense.keys() == chunked.keys()
    if "weight" in dense and name != "hinge":
        assert (dense["weight"] != 0).any(1).float().mean() > 0.3  # nothing is compared with nothing
    for key, value in dense.items():
        largest = float(value.abs().max()) if value.numel() else 0.0
        torch.testing.assert_close(chunked[key], value, rtol=tolerance, atol=tolerance * max(largest, 1e-3), msg=key)


# ------------------------------------------------------------------------------------------------ equality


def test_there_are_several_ragged_chunks():
    weight = torch.randn(C, D)
    found = list(streaming._chunks(weight, B, 1, True, torch.float32))
    assert [(chunk.start, chunk.stop) for chunk in found] == [(0, 256), (256, 512), (512, 700)]
    assert torch.allclose(torch.cat([chunk.weight for chunk in found]), F.normalize(weight))
    rows = list(streaming._chunks(torch.randn(3 * C, D), B, 3, True, torch.float32))
    assert [len(chunk.weight) for chunk in rows] == [768, 768, 564]
    assert len({chunk.start for y in Y for chunk in found if chunk.start <= y < chunk.stop}) == 3


@each_variant
def test_double_precision(name, options):
    compare(name, **options)


@each_variant
def test_single_precision(name, options):
    compare(name, torch.float32, tolerance=2e-4, **options)


@pytest.mark.parametrize("name", SMOOTHED)
def test_label_smoothing(name):
    compare(name, label_smoothing=0.2)


@pytest.mark.parametrize("name", HEADS)
def test_weights_margins_and_holes(name):
    labels = Y.clone()
    labels[[2, 7]] = -100
    more = {"class_weights": torch.linspace(0, 2, C)}
    if name in ("arcface", "cosface", "sphereface2", "circle", "curricularface", "adaface", "subcenter-arcface"):
        more["m"] = torch.linspace(0.1, 0.5, C)
    compare(name, labels=labels, reduction="sum", annealer=LambdaAnnealer(2.0, 0.0, minimum=0.0), **more)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("case", ["on the class", "opposite", "zero", "empty"])
def test_at_the_edges(name, case):
    kept = {}
    for path in ("dense", "chunked"):
        head = build(name, path)
        own = head.weight.detach().view(C, -1, D)[Y, 0]
        x = {"on the class": own, "opposite": -own, "zero": 0 * own, "empty": own[:0]}[case]
        kept[path] = step(head, x, Y[: len(x)])
    for key, value in kept["dense"].items():
        # On the class, the slope of the arccos makes of the last digit of a cosine its root.
        margin = 1e-5 if key in ("features", "weight") else 1e-7
        torch.testing.assert_close(kept["chunked"][key], value, rtol=1e-6, atol=margin, msg=key)


@pytest.mark.parametrize("name", HEADS)
def test_evaluation_and_separate_losses(name):
    found = [build(name, path, reduction="none").eval()(features(), Y) for path in ("dense", "chunked")]
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["arcface", "softmax", "subcenter-arcface", "sphereface2"])
def test_sampled(name):
    found = []
    for path in ("dense", "chunked"):
        head = build(name, path, sample_rate=0.8)
        torch.manual_seed(9)
        found.append(step(head, features()))
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-9, atol=1e-10, msg=key)
    assert 0 < (found[0]["weight"] == 0).all(1).float().mean() < 0.3  # some classes were left out


def test_half_of_the_classes_twice_counts_twice():
    """Duplicate labels: a class that two samples share gets both gradients, from inside and outside its chunk."""
    x = features()[:2]
    head = build("arcface", "chunked", reduction="sum")
    both = step(head, x, torch.tensor([300, 300]))["weight"]
    single = []
    for row in x:
        head = build("arcface", "chunked", reduction="sum")
        single.append(step(head, row.unsqueeze(0), torch.tensor([300]))["weight"])
    torch.testing.assert_close(both, single[0] + single[1], rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------------------------------------ accuracy


@pytest.fixture(scope="module")
def classes():
    generator = torch.Generator().manual_seed(0)
    return F.normalize(torch.randn(100_000, 64, generator=generator, dtype=torch.float64)).float()


@pytest.mark.parametrize("cosine", [0.5, 0.7, 0.95])
@pytest.mark.parametrize("path", ["dense", "chunked"])
def test_well_classified_samples_keep_their_digits(classes, cosine, path, monkeypatch):
    """At a loss of 1e-6 and below, a target subtracted from the sum over all classes would leave nothing of it."""
    monkeypatch.setattr(streaming, "CHUNK_ELEMENTS", 2**19)
    batch, s = 16, 64.0
    labels = torch.arange(batch) * 6111
    own = classes[labels]
    side = torch.randn(batch, 64, generator=torch.Generator().manual_seed(1))
    side = F.normalize(side - (side * own).sum(1, keepdim=True) * own)
    x = (cosine * own + math.sqrt(1 - cosine**2) * side).requires_grad_()
    head = MarginSoftmax(64, len(classes), s=s, reduction="none", path=path)
    head.weight.data.copy_(classes)
    loss = head(x, labels)
    loss.sum().backward()

    exact = x.detach().double().requires_grad_()
    weight = classes.double().requires_grad_()
    logits = s * F.normalize(exact) @ F.normalize(weight).mT
    others = logits.scatter(1, labels.unsqueeze(1), -math.inf).logsumexp(1)
    wanted = torch.log1p((others - logits.gather(1, labels.unsqueeze(1)).squeeze(1)).exp())
    wanted.sum().backward()
    if cosine == 0.95:
        assert wanted.min() < 1e-6  # smaller than the rounding of a sum that contains the target
    assert ((loss.double() - wanted) / wanted).abs().max() < 1e-4
    for found, expected in ((x.grad, exact.grad), (head.weight.grad[labels], weight.grad[labels])):
        relative = (found.double() - expected).norm(dim=1) / expected.norm(dim=1)
        assert relative.max() < 1e-3, relative
    rest = torch.ones(len(classes), dtype=torch.bool)
    rest[labels] = False
    scale = weight.grad[rest].norm()
    assert (head.weight.grad.double()[rest] - weight.grad[rest]).norm() / scale < 1e-3


# ------------------------------------------------------------------------------------------------ operations

RULES = {
    "plain": (Plain(), ()),
    "angle": (OfAngle(g=hs.angular.create("sigmoid")), ()),
    "widened": (Widened(), (1.4, 0.5)),
    "hardened": (Hardened(), (0.2, 0.3)),
    "circle": (CircleNegatives(), (0.25,)),
    "binary": (Binary(), (0.4,)),
    "hinge": (HingeNegatives(power=2), ()),
    "energy": (Riesz(s=2.0), ()),
}


def inputs(unit=True, centres=1, batch=3, count=5, dim=4):
    generator = torch.Generator().manual_seed(6)
    units = F.normalize(torch.randn(batch, dim, generator=generator, dtype=torch.float64))
    weight = torch.randn(count * centres, dim, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 4, 4])
    scale = torch.tensor([3.0, 2.0, 1.5], dtype=torch.float64)
    offset = torch.tensor(0.2, dtype=torch.float64)
    bias = torch.randn(count, generator=generator, dtype=torch.float64)
    return units, weight, labels, scale, offset, bias


# The gradient of the circle rule leaves out a factor by definition: it is compared with autograd above.
DIFFERENTIABLE = [(rule, unit) for rule in RULES if rule != "circle" for unit in (True, False)]
DIFFERENTIABLE = [(rule, unit) for rule, unit in DIFFERENTIABLE if unit or rule not in ("angle", "widened", "energy")]


@pytest.mark.parametrize(("rule", "unit"), DIFFERENTIABLE)
@pytest.mark.parametrize("centres", [1, 2])
def test_gradients_are_those_of_the_value(rule, unit, centres):
    rule, parameters = RULES[rule]
    units, weight, labels, scale, offset, bias = inputs(centres=centres)
    if isinstance(rule, Riesz):  # of chords, which have no other scale, and of single vectors
        scale, offset, bias = torch.ones_like(scale), 0 * offset, 0 * bias
        if centres > 1:
            return
    parameters = tuple(torch.tensor(p, dtype=torch.float64) for p in parameters)

    def values(units, weight, scale, offset, bias):
        units = F.normalize(units) if isinstance(rule, Riesz) else units  # the tangent part of a gradient is its own
        problem = ClassProblem(units, weight, labels, scale, rule, parameters, offset, bias, centres, unit, total=True)
        found = class_statistics(problem, chunked=True)
        # The target's numbers and lengths are differentiable, too; empty ones add nothing.
        return found.negatives, found.total, found.target, found.length.sum()

    leaves = [v.clone().requires_grad_() for v in (units, weight, scale, offset, bias)]
    assert torch.autograd.gradcheck(values, leaves, atol=1e-7)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("extras", [True, False])
def test_operators_are_well_formed(rule, extras):
    """Schema, shapes without data, autograd registration and functionalisation, as torch itself checks them."""
    rule, parameters = RULES[rule]
    units, weight, labels, scale, offset, bias = inputs(centres=2 if extras else 1)
    parameters = [torch.tensor(p, dtype=torch.float64) for p in parameters]
    leaves = [v.clone().requires_grad_() for v in (units, weight, scale, offset, bias)]
    units, weight, scale, offset, bias = leaves
    if not extras:
        offset = bias = None
    more = {
        "subcentres": 2 if extras else 1,
        "total": extras,
        "features": (3 * units).detach().requires_grad_() if extras else None,
    }
    more["class_weights"] = torch.linspace(0, 1, len(weight) // 2).double() if extras else None
    problem = ClassProblem(units, weight, labels, scale, rule, parameters, offset, bias, **more)
    assert ClassProblem.unpacked(problem.packed()) == problem
    forward = torch.ops.hypersphere.class_statistics.default
    assert [a.name for a in forward._schema.arguments] == [*ClassProblem._fields, "keep"]
    torch.library.opcheck(forward, (*problem.packed(), True))

    result, _, target, _, _, top, *_ = forward(*problem.packed(), True)
    ones = torch.ones(3).double()
    upstream = (ones, ones if extras else None, ones, None, ones if extras else None)
    kept = (result, top, target, torch.empty(0, dtype=torch.float16), torch.empty(0).double())
    backward = torch.ops.hypersphere.class_gradients.default
    arguments = (*upstream, *kept, *problem.packed(), True)
    torch.library.opcheck(backward, tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments))


def test_the_rest_of_the_statistics():
    units, weight, labels, scale, _, bias = inputs()
    for chunked in (True, False):
        problem = ClassProblem(units, weight, labels, scale, bias=bias, unit=False, total=True)
        found = class_statistics(problem, chunked=chunked)
        logits = scale.unsqueeze(1) * units @ weight.mT + bias
        others = torch.ones_like(logits, dtype=torch.bool).scatter(1, labels.unsqueeze(1), False)
        torch.testing.assert_close(found.total, torch.where(others, logits, 0).sum(1))
        torch.testing.assert_close(found.negatives, torch.where(others, logits, -math.inf).logsumexp(1))
        torch.testing.assert_close(found.target, (units * weight[labels]).sum(1))
        torch.testing.assert_close(found.length, weight[labels].norm(dim=1))


def test_every_rule_is_found_by_a_key_of_its_own():
    first, second = Binary(t=2.0), Binary(t=2.0)
    assert first == second and first.key != second.key
    assert lookup(first.key) is first and lookup(second.key) is second


def test_rules_go_with_their_heads():
    def alive():
        gc.collect()
        return sum(issubclass(type(found), Negatives) for found in gc.get_objects())

    x, y = torch.randn(2, 4), torch.tensor([0, 1])

    def use(count):
        for _ in range(count):
            hs.losses.CircleLoss(4, 5, path="chunked")(x, y).backward()

    use(200)  # as many as are looked up last stay
    before = alive()
    use(200)
    assert alive() <= before


def test_a_rule_outlives_its_head_until_the_backward_pass():
    x = torch.randn(2, 4, requires_grad=True)
    losses_ = [hs.losses.CircleLoss(4, 5, path="chunked")(x, torch.tensor([0, 1])) for _ in range(100)]
    gc.collect()
    torch.stack(losses_).sum().backward()
    assert x.grad.isfinite().all()


def test_angular_functions_that_print_alike_are_told_apart():
    """A plain subclass, whose number is no field of the data class."""

    class Steep(Angular):
        def __init__(self, power):
            object.__setattr__(self, "power", power)

        def of_cosine(self, cosines):
            return cosines * self.power

        def slope_of_cosine(self, cosines):
            return torch.full_like(cosines, self.power)

    for power in (1.0, 3.0):
        found = [step(build("w-softmax", path, g=Steep(power)), features()) for path in ("dense", "chunked")]
        for key in found[0]:
            torch.testing.assert_close(found[0][key], found[1][key])


def test_a_class_defined_anew_is_another_rule():
    """As in a notebook, where a cell is run again after a change: both print alike."""

    def define(power):
        class Custom(Angular):
            def of_cosine(self, cosines):
                return cosines.abs().pow(power) * cosines.sign()

            def slope_of_cosine(self, cosines):
                return power * cosines.abs().pow(power - 1)

        return Custom()

    first, second = define(3), define(5)
    assert repr(OfAngle(g=first)) == repr(OfAngle(g=second))
    for g in (first, second):
        found = [step(build("w-softmax", path, g=g), features()) for path in ("dense", "chunked")]
        for key in found[0]:
            torch.testing.assert_close(found[1][key], found[0][key], rtol=1e-9, atol=1e-10, msg=key)


# ------------------------------------------------------------------------------------------------ path and memory


def test_the_path_is_chosen_by_size_and_shown():
    limit = CHUNKED_FROM["cpu"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for count, path in ((limit - 1, "dense"), (limit, "chunked")):
            head = hs.losses.ArcFace(2, count)
            assert head.path == path and f"path={path!r}" in repr(head)
            assert hs.losses.ArcFace(2, count, path="dense").path == "dense"
            assert hs.losses.ArcFace(2, count, path="chunked").path == "chunked"
        assert hs.losses.ArcFace(2, 2 * limit, sample_rate=0.25).path == "dense"
        assert hs.losses.ArcFace(2, 2 * limit, sample_rate=0.5).path == "chunked"
        grown = hs.losses.ArcFace(2, limit - 1).add_classes(1)
        assert grown.path == "chunked"
    meta = copy.deepcopy(hs.losses.ArcFace(2, CHUNKED_FROM["cuda"])).to("meta")
    assert meta.path == "chunked"  # every device but the CPU has the lower limit


MEMORY = r"""
import re, sys, torch, hypersphere as hs
torch.set_num_threads(1)
batch, classes, dim = map(int, sys.argv[1:])
def step(head, x, y):
    loss = head(x, y)
    loss.backward()
    assert loss.isfinite() and head.weight.grad.sum().isfinite()  # without copies
def peak():  # of this process alone; ru_maxrss begins at the size of the one that started it
    return int(re.search(r"VmHWM:\s*(\d+) kB", open("/proc/self/status").read())[1]) * 1024
step(hs.losses.ArcFace(dim, 10, path="chunked"), torch.randn(4, dim), torch.arange(4))  # code is loaded
before = peak()
head = hs.losses.ArcFace(dim, classes)
assert head.path == "chunked"
step(head, torch.randn(batch, dim, requires_grad=True), torch.arange(batch) * (classes // batch))
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_memory_of_a_million_classes():
    batch, count, dim = 64, 1_000_000, 64
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(batch), str(count), str(dim)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    weights_and_gradient = 2 * count * dim * 4
    bound = weights_and_gradient + 512 * 2**20
    assert weights_and_gradient < int(done.stdout) < bound
    # Cosines, logits and their gradient alone would not fit on the dense path.
    assert weights_and_gradient + 3 * batch * count * 4 > bound
