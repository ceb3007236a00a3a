"""Heads: the options that every member shares, bad input, and numbers at the edges."""

import copy
import dataclasses
import inspect
import math
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hypersphere as hs
from helpers.paths import SOURCE
from hypersphere import recipe
from hypersphere.errors import ArgumentError
from hypersphere.losses import (
    LambdaAnnealer,
    MarginSoftmax,
    Ramp,
    Schedule,
    losses,
    memory_estimate,
    objective,
    streaming,
    suggest_scale,
)
from hypersphere.losses.streaming import CHUNK_ELEMENTS
from hypersphere.registry import UnknownNameError
from hypersphere.testing.contract import variants

NAMES = [name for name in losses if name != "gan"]  # which is no head of classes: test_generation
HEADS = [name for name in NAMES if losses[name].factory.shared_options]  # all but the triplet loss
SOFT = [name for name in HEADS if name not in ("contrastive", "center")]
SOFTMAX = [name for name in SOFT if name not in ("hinge", "sphereface2")]
SETTINGS = {"margin-softmax": {"psi": "additive-angle", "s": 16.0, "m": 0.3}, "contrastive": {"m": 3.0}}

# What heads with these options promise by themselves, their contract checks.
VARIANTS = [
    *((name, options) for name in NAMES for options in variants(hs.testing.contract("losses"), name)),
    ("sphereface-r", {"gradient": "exact", "feature_norm": "soft", "s": 3.0}),
    ("a-softmax", {"gradient": "caffe"}),
]
each_head = pytest.mark.parametrize("name", HEADS)

D, C = 6, 5
Y = torch.tensor([0, 4, 2, 2, 1, 3])
W = torch.linspace(0.5, 2, C)


def build(name, dim=D, classes=C, **options):
    """A head with the same weights every time; small scales, so that no loss is saturated."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scales that are small on purpose
        settings = SETTINGS.get(name, {}) | ({"s": 4.0} if takes(name, "s") and name != "magface" else {}) | options
        return losses.create(name, dim, classes, **settings)


def takes(name, option):
    return any(o.name == option for o in losses[name].options)


def features(batch=6, dim=D, seed=2, **options):
    return torch.randn(batch, dim, generator=torch.Generator().manual_seed(seed)).to(**options)


def per_sample(head, x, y):
    """Loss of every sample, each one alone in its batch, without training."""
    head = copy.deepcopy(head).eval()
    return torch.stack([head(x[i : i + 1], y[i : i + 1]) for i in range(len(y))])


def gradients(head, loss, x):
    head.zero_grad()
    x.grad = None
    loss.sum().backward()
    found = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
    return found | {"features": x.grad}


def assert_finite(head, x, loss):
    assert loss.isfinite().all(), loss
    for name, gradient in gradients(head, loss, x).items():
        assert gradient is not None and gradient.isfinite().all(), (name, gradient)


# ------------------------------------------------------------------------------------------------ margins

# Margins that each member takes as number, tensor or schedule, with two sizes that it allows.
SIZES = {"l-softmax": (1.0, 5.0), "a-softmax": (1.0, 2.5), "sphereface-plus": (1.0, 2.5), "ga-softmax": (1.0, 2.5)}
SIZES |= {"m-softmax": (1.0, 2.0), "sphereface-r": (1.0, 1.7)}
MARGINS = [
    (name, option.name)
    for name in NAMES
    for option in losses[name].options
    if "Ramp" in str(option.annotation) and option.name.startswith("m")
]
each_margin = pytest.mark.parametrize(("name", "option"), MARGINS)


def sizes(name, option):
    return (1.0, 1.5) if option == "m1" else SIZES.get(name, (0.1, 0.6))


def test_the_margins_are_found():
    assert len(MARGINS) >= 15
    assert {"m1", "m2", "m3"} == {option for name, option in MARGINS if name == "combined"}


@each_margin
def test_a_margin_for_each_class_is_that_of_the_sample(name, option):
    low, high = sizes(name, option)
    wanted = torch.where(torch.arange(C) % 2 == 0, high, low)
    head = build(name, **{option: wanted}, reduction="none").eval()
    x = features()
    found = head(x, Y)
    expected = torch.stack([per_sample(build(name, **{option: float(wanted[y])}), x, Y)[i] for i, y in enumerate(Y)])
    if name == "sphereface2":
        # Its offset begins at the middle of the margins; here only the margin is compared.
        heads = [build(name, **{option: float(wanted[y])}) for y in Y]
        for other in heads:
            other.common_bias.data.copy_(head.common_bias.data)
        expected = torch.stack([per_sample(other, x, Y)[i] for i, other in enumerate(heads)])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, build(name, **{option: low}, reduction="none").eval()(x, Y), atol=1e-4)
    if name != "sphereface-r":  # its margin stands on the other classes
        assert f"{option}=per class" in repr(head)
    as_list = build(name, **{option: wanted.tolist()}, reduction="none").eval()
    assert torch.equal(as_list(x, Y), found)
    torch.testing.assert_close(head(x, F.one_hot(Y, C).float()), found, rtol=1e-5, atol=1e-5)


@each_margin
def test_a_margin_by_schedule(name, option):
    low, high = sizes(name, option)
    x = features()
    head = build(name, **{option: Ramp(low, high, length=4)}, reduction="none")
    schedule = getattr(head, option)
    for step in range(1, 7):
        found = head(x, Y)
        other = build(name, **{option: low + (high - low) * min(step / 4, 1)}, reduction="none")
        _same_state(head, other)
        torch.testing.assert_close(found, other.eval()(x, Y), rtol=2e-5, atol=2e-5)
        assert int(schedule.steps) == step


def _same_state(head, other):
    """Give another head of the same member this one's numbers that are no margins."""
    state = {k: v for k, v in head.state_dict().items() if not k.endswith("steps")}
    other.load_state_dict(state, strict=False)


@each_margin
def test_schedules_are_saved_and_stand_still_in_evaluation(name, option, tmp_path):
    low, high = sizes(name, option)
    x = features()

    def fresh():
        return build(name, **{option: Ramp(low, high, length=10)}, annealer=LambdaAnnealer(10.0, 0.5, minimum=0.0))

    head = fresh()
    for _ in range(3):
        head(x, Y)
    head.eval()
    before = [head(x, Y), head.psi(torch.tensor(1.0))]
    assert [head(x, Y), head.psi(torch.tensor(1.0))] == before
    assert int(head.annealer.steps) == int(getattr(head, option).steps) == 3
    torch.save(head.state_dict(), tmp_path / "head.pt")
    resumed = fresh()
    resumed.load_state_dict(torch.load(tmp_path / "head.pt", weights_only=True))
    assert resumed.eval()(x, Y) == before[0]
    for _ in range(3):
        assert torch.equal(head.train()(x, Y), resumed.train()(x, Y))
    assert int(resumed.annealer.steps) == int(getattr(resumed, option).steps) == 6


# ------------------------------------------------------------------------------------------------ names


def test_other_names_of_margin_and_scale():
    for make in (hs.losses.ArcFace, lambda *a, **k: hs.losses.create("arcface", *a, **k)):
        head = make(4, 3, margin=0.2, scale=9.0)
        assert (head.m, head.s) == (0.2, 9.0)
        for both in ({"m": 0.1, "margin": 0.2}, {"s": 8.0, "scale": 9.0}):
            with pytest.raises(ArgumentError, match=r"is another name of '[ms]': give one of them"):
                make(4, 3, **both)
    head = MarginSoftmax(4, 3, psi="additive-cosine", margin=0.2, scale=9.0)
    assert (head.m, head.s) == (0.2, 9.0)
    plan = recipe.check({"loss": {"name": "arcface", "margin": 0.2, "scale": 9.0}})
    assert (plan.loss.options["m"], plan.loss.options["s"]) == (0.2, 9.0)
    with pytest.raises(recipe.RecipeError, match=r"loss\.margin is another name of 'm'"):
        recipe.check({"loss": {"name": "arcface", "m": 0.1, "margin": 0.2}})


def test_recipes_take_margins_of_every_kind():
    ramp = {"start": 0.0, "end": 0.4, "length": 100}
    plan = recipe.check({"loss": {"name": "arcface", "m": ramp}})
    head = plan.build(losses, ("loss",), 4, 3)
    assert isinstance(head.m, Ramp) and (head.m.end, head.m.length) == (0.4, 100)
    plan = recipe.check({"loss": {"name": "arcface", "m": [0.1, 0.2, 0.3], "class_weights": [1, 2, 3]}})
    head = plan.build(losses, ("loss",), 4, 3)
    assert head.m_by_class.tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert head.class_weights.tolist() == [1, 2, 3]
    with pytest.raises(recipe.RecipeError, match=r"^loss\.m must have shape \(4,\), got \(3,\)$"):
        plan.build(losses, ("loss",), 4, 4)
    with pytest.raises(recipe.RecipeError, match=r"^loss\.m\.end is missing$"):
        recipe.check({"loss": {"name": "arcface", "m": {"start": 0.0, "length": 3}}})
    with pytest.raises(recipe.RecipeError, match=r"^loss\.m\.length or milestones must be given"):
        recipe.check({"loss": {"name": "arcface", "m": {"start": 0.0, "end": 0.3}}})


# ------------------------------------------------------------------------------------------------ targets


def test_class_weights_are_those_of_cross_entropy():
    head = build("softmax", class_weights=[1.0, 0.5, 2.0, 0.0, 3.0])
    x = features()
    for reduction in ("mean", "sum", "none"):
        head.spec = dataclasses.replace(head.spec, reduction=reduction)
        wanted = F.cross_entropy(head.logits(x), Y, weight=head.class_weights, reduction=reduction)
        torch.testing.assert_close(head(x, Y), wanted)


@each_head
def test_class_weights_multiply_each_sample(name):
    weights = torch.tensor([1.0, 0.5, 2.0, 0.0, 3.0])
    x = features()
    plain = build(name, reduction="none").eval()(x, Y)
    assert torch.equal(build(name, reduction="none", class_weights=weights).eval()(x, Y), plain * weights[Y])
    mean = build(name, class_weights=weights).eval()(x, Y)
    torch.testing.assert_close(mean, (plain * weights[Y]).sum() / weights[Y].sum())
    assert build(name, class_weights=torch.zeros(C)).eval()(x, Y) == 0


@pytest.mark.parametrize("name", SOFTMAX)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_label_smoothing_is_that_of_cross_entropy(name, reduction):
    # Members that add a penalty or a factor to the cross-entropy are compared without it.
    without = {"sphereface-plus": {"energy_weight": 0.0}, "magface": {"norm_weight": 0.0}}.get(name, {})
    head = build(name, label_smoothing=0.2, reduction=reduction, **without).eval()
    x = features(dtype=torch.float64)
    head.double()
    wanted = F.cross_entropy(head.margin_logits(x, Y), Y, label_smoothing=0.2, reduction=reduction)
    torch.testing.assert_close(head(x, Y), wanted, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["hinge", "sphereface2"])
@pytest.mark.parametrize("option", ["label_smoothing", "probability_floor"])
def test_smoothing_and_floors_need_a_softmax(name, option):
    with pytest.raises(ArgumentError, match=rf"^{option} has no meaning for"):
        build(name, **{option: 0.1})


@pytest.mark.parametrize("name", SOFTMAX)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_probability_floor(name, smoothing):
    without = {"sphereface-plus": {"energy_weight": 0.0}, "magface": {"norm_weight": 0.0}}.get(name, {})
    options = {"label_smoothing": smoothing, "probability_floor": 0.01, "reduction": "none", **without}
    head = build(name, **options).double().eval()
    x = features(dtype=torch.float64).requires_grad_()
    shares = (1 - smoothing) * F.one_hot(Y, C).double() + smoothing / C
    wanted = -(shares * (head.margin_logits(x, Y).softmax(1) + 0.01).log()).sum(1)
    found = head(x, Y)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    expected = gradients(head, wanted, x)
    for key, gradient in gradients(head, found, x).items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-7, atol=1e-9, msg=key)
    assert found.max() <= -math.log(0.01)
    soft = head(x, F.one_hot(Y, C).double())
    torch.testing.assert_close(soft, found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("gradient", ["exact", "cgd", "caffe"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_floor_that_is_next_to_none_changes_nothing(gradient, smoothing):
    found = []
    for floor in (0.0, 1e-14):
        options = {"m": 2, "gradient": gradient, "label_smoothing": smoothing, "probability_floor": floor}
        head = build("a-softmax", **options).double().train()
        x = features(dtype=torch.float64).requires_grad_()
        found.append(gradients(head, head(x, Y), x))
    for key, gradient_ in found[0].items():
        torch.testing.assert_close(found[1][key], gradient_, rtol=1e-7, atol=1e-9, msg=key)


def test_probability_floor_of_the_released_code():
    """Smoothing 0.01 and a floor of 1e-4: the published vectors, and what the loss of ten classes falls to."""

    def loss(logits, labels):
        head = hs.losses.create(
            "softmax", len(logits[0]), len(logits[0]), bias=False, label_smoothing=0.01, probability_floor=1e-4
        ).double()
        with torch.no_grad():
            head.weight.copy_(torch.eye(len(logits[0])))
        return head(torch.as_tensor(logits, dtype=torch.float64), torch.tensor(labels)).item()

    chirp = 3 * (0.9 * torch.arange(8.0, dtype=torch.float64) ** 2 + 0.3).sin().view(2, 4)
    assert loss(chirp, [1, 3]) == pytest.approx(1.49545397537, abs=1e-10)
    assert loss([[2.0, 0.0, -1.0]], [0]) == pytest.approx(0.186384128166, abs=1e-11)
    gaps = torch.linspace(0, 20, 2001, dtype=torch.float64)
    least = min(loss([[gap, *(0.0,) * 9]], [0]) for gap in gaps.tolist())
    assert least == pytest.approx(0.070129675128, abs=1e-6)
    with pytest.raises(ArgumentError, match=r"^probability_floor needs sample_rate=1"):
        hs.losses.create("cosface", 4, 50, sample_rate=0.5, probability_floor=1e-4)
    both = {"label_smoothing": 0.01, "probability_floor": 1e-4}
    with pytest.raises(ArgumentError, match=r"^path must not be 'chunked'"):
        hs.losses.create("cosface", 4, 50, path="chunked", **both)
    assert hs.losses.create("cosface", 4, 40_000, **both).path == "dense"
    assert hs.losses.create("cosface", 4, 40_000, probability_floor=1e-4).path == "chunked"


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", SOFT)
def test_one_hot_shares_are_hard_labels(name, smoothing):
    options = {"label_smoothing": smoothing} if name in SOFTMAX else {}
    head = build(name, **options).double().eval()
    head.spec = dataclasses.replace(head.spec, reduction="none")
    x = features(dtype=torch.float64).requires_grad_()
    hard, soft = head(x, Y), head(x, F.one_hot(Y, C).double())
    torch.testing.assert_close(soft, hard, rtol=1e-9, atol=1e-9)
    expected = gradients(head, hard, x)
    found = gradients(head, soft, x)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-7, atol=1e-9, msg=key)


def test_shares_are_compared_with_some_targets_at_a_time(monkeypatch):
    """Where the negatives depend on the target, in chunks of targets: the same numbers and gradients."""
    x, shares = features(dtype=torch.float64), F.softmax(features(len(Y), C, 3).double(), 1)
    for name in ("curricularface", "circle", "sphereface2"):
        found = []
        for size in (2**23, 2 * len(Y) * C):
            monkeypatch.setattr(objective, "CHUNK_ELEMENTS", size)
            head = build(name, m=torch.linspace(0.1, 0.5, C), class_weights=torch.linspace(0.5, 2, C)).double().eval()
            leaf = x.clone().requires_grad_()
            loss = head(leaf, shares)
            found.append({"loss": loss, **gradients(head, loss, leaf)})
        for key, value in found[0].items():
            torch.testing.assert_close(found[1][key], value, rtol=1e-12, atol=1e-14, msg=f"{name} {key}")


def test_a_step_with_shares_moves_the_progress_of_curricularface_by_the_expected_own_cosine():
    head = build("curricularface", rate=0.25).double().train()
    x, shares = features(dtype=torch.float64), F.softmax(features(len(Y), C, 3).double(), 1)
    head(x, shares)
    assert head.progress.item() == pytest.approx(
        0.25 * float((shares * head.cosines(x).detach()).sum(1).mean()), rel=1e-12
    )


def test_shares_are_those_of_cross_entropy():
    head = build("softmax")
    x = features()
    shares = F.softmax(features(len(Y), C, 3), 1)
    for reduction in ("mean", "sum", "none"):
        head.spec = dataclasses.replace(head.spec, reduction=reduction)
        torch.testing.assert_close(head(x, shares), F.cross_entropy(head.logits(x), shares, reduction=reduction))
        for options in ({"label_smoothing": 0.1}, {"class_weights": W}, {"label_smoothing": 0.1, "class_weights": W}):
            other = build("normface", reduction=reduction, **options)
            own = {"label_smoothing": options.get("label_smoothing", 0), "weight": options.get("class_weights")}
            wanted = F.cross_entropy(other.logits(x), shares, **own, reduction=reduction)
            torch.testing.assert_close(other(x, shares), wanted)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["softmax", "l-softmax"])
def test_long_features_in_half_precision_have_the_gradients_of_hard_labels(name, seed):
    torch.manual_seed(seed)
    head = build(name).half().eval()
    x = (1e4 * torch.randn(3, D)).clamp(-6e4, 6e4).half().requires_grad_()
    labels = torch.randint(C, (3,))
    hard, soft = head(x, labels), head(x, F.one_hot(labels, C).float())
    torch.testing.assert_close(soft, hard)
    expected = gradients(head, hard, x)
    for key, gradient in gradients(head, soft, x).items():
        torch.testing.assert_close(gradient, expected[key], rtol=2e-3, atol=2e-3 * float(expected[key].abs().max()))


@pytest.mark.parametrize("sampled", [1.0, 0.3])
def test_weighted_smoothing_of_sampled_classes_is_that_of_cross_entropy(sampled):
    """Of the classes compared with, on both paths."""
    for path in ("dense", "chunked"):
        options = {"sample_rate": sampled, "label_smoothing": 0.2, "s": 8.0, "m": 0.2, "path": path}
        torch.manual_seed(0)
        head = hs.losses.CosFace(D, 40, class_weights=torch.linspace(0, 2, 40), **options).double().train()
        x, rows = features(dtype=torch.float64), torch.arange(40)
        if sampled < 1:
            torch.manual_seed(5)
            rows = head.sample(Y)
            torch.manual_seed(5)
        logits = head.margin_logits(x, Y)[:, rows]
        columns = torch.searchsorted(rows, Y)
        wanted = F.cross_entropy(logits, columns, weight=head.class_weights[rows], label_smoothing=0.2)
        torch.testing.assert_close(head(x, Y), wanted)


@pytest.mark.parametrize("name", ["contrastive", "center", "triplet", "a-softmax"])
def test_members_that_need_one_class(name):
    head = build(name, **({"gradient": "caffe"} if name == "a-softmax" else {}))
    with pytest.raises(ArgumentError, match=r"^labels must be classes \(6,\), got soft labels of shape \(6, 5\)$"):
        head(features(), torch.full((6, C), 1 / C))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("index", [-100, -1, 2])
def test_ignored_samples_count_for_nothing(name, index):
    x = features(8)
    labels = torch.tensor([0, 4, 1, 0, 1, 3, 4, 3])
    kept = torch.tensor([0, 1, 3, 4, 5, 7])
    holes = labels.clone()
    holes[[2, 6]] = index
    head, other = build(name, ignore_index=index), build(name)
    full = x.clone().requires_grad_()
    part = x[kept].clone().requires_grad_()
    loss, wanted = head(full, holes), other(part, labels[kept])
    torch.testing.assert_close(loss, wanted)
    found, expected = gradients(head, loss, full), gradients(other, wanted, part)
    torch.testing.assert_close(found["features"][kept], expected["features"], rtol=1e-4, atol=1e-6)
    assert (found["features"][[2, 6]] == 0).all()
    for key in expected.keys() - {"features"}:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-5, msg=key)
    for key, value in other.state_dict().items():  # running statistics, too
        torch.testing.assert_close(head.state_dict()[key], value, msg=key)
    nothing = torch.full_like(labels, index)
    before = copy.deepcopy(head.state_dict())
    assert head(x, nothing) == 0
    for key, value in head.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_reductions_of_the_triplet_loss():
    x, y = features(8), torch.tensor([0, 0, 0, 1, 1, 1, 2, 3])  # the last two are anchors of no pair
    each = build("triplet", reduction="none", m=1.0)(x, y)
    assert each.shape == (8,) and (each[6:] == 0).all() and (each[:6] > 0).all()
    pairs = torch.tensor([2.0, 2, 2, 2, 2, 2, 0, 0])
    torch.testing.assert_close(build("triplet", reduction="sum", m=1.0)(x, y), (each * pairs).sum())
    torch.testing.assert_close(build("triplet", m=1.0)(x, y), (each * pairs).sum() / pairs.sum())


# ------------------------------------------------------------------------------------------------ gradients


@each_head
@pytest.mark.parametrize("gradient", ["exact", "cgd", "caffe"])
def test_gradient_modes_change_no_value(name, gradient):
    x = features().requires_grad_()
    if gradient == "caffe" and not build(name).spec.unit_weights:
        with pytest.raises(ArgumentError, match=r"^gradient 'caffe' needs unit_weights=True"):
            build(name, gradient=gradient)
        return
    head = build(name, gradient=gradient)
    if gradient == "caffe":
        # It keeps its weights at unit length; so must the others, to be compared.
        head(x, Y)
        assert torch.allclose(head.weight.norm(dim=1), torch.ones(len(head.weight)))
    exact = build(name, gradient="exact")
    exact.load_state_dict(head.state_dict())
    loss = head(x, Y)
    torch.testing.assert_close(loss, exact(x, Y), rtol=1e-5, atol=1e-5)
    assert_finite(head, x, loss)


def test_cgd_has_the_slope_of_the_cosine():
    x = features(dtype=torch.float64).requires_grad_()
    head = build("arcface", gradient="cgd").double()
    found = gradients(head, head(x, Y), x)
    value = head.margin_logits(x, Y).detach()
    cosines = head.cosines(x)
    wanted = F.cross_entropy(value + 4 * (cosines - cosines.detach()), Y)
    expected = gradients(head, wanted, x)
    for key in ("features", "weight"):
        torch.testing.assert_close(found[key], expected[key])


@pytest.mark.parametrize("name", ["normface", "s-softmax", "margin-softmax"])
@pytest.mark.parametrize("path", ["dense", "chunked"])
def test_a_learned_scale(name, path):
    head = build(name, s=4.0, learn_scale=True, path=path)
    x = features()
    head(x, Y).backward()
    step = 1e-2
    values = []
    for delta in (step, -step):
        other = copy.deepcopy(head)
        other.learned_scale.data.fill_(4.0 + delta)
        values.append(float(other(x, Y).detach()))
    assert float(head.learned_scale.grad) == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-2, abs=1e-5)
    assert "s=4 (learned)" in repr(head)
    for low in (0.0, -5.0):
        head.learned_scale.data.fill_(low)
        torch.testing.assert_close(head.logits(x), 0.01 * head.cosines(x))
        assert head(x, Y).isfinite()
    with pytest.raises(ArgumentError, match=r"^learn_scale needs s"):
        MarginSoftmax(4, 3, learn_scale=True)


# ------------------------------------------------------------------------------------------------ classes


@each_head
def test_frozen_weights(name):
    head = build(name, frozen=True)
    assert not head.weight.requires_grad
    x = features().requires_grad_()
    head(x, Y).backward()
    assert head.weight.grad is None and (x.grad != 0).any()
    head = build(name, frozen=True, path="chunked")
    head(x, Y).backward()
    assert head.weight.grad is None


@each_head
def test_a_rotation_of_features_is_one_of_weights(name):
    matrix = torch.linalg.qr(features(D, D, 5).double()).Q
    turn = nn.Linear(D, D, bias=False).double()
    turn.weight.data.copy_(matrix)
    x = features(dtype=torch.float64)
    plain, turned = build(name).double(), build(name, rotation=turn).double()
    plain.weight.data @= matrix  # rows w of the head against x R' are rows w R against x
    if name == "center":
        assert (turned.class_centres == 0).all()
    torch.testing.assert_close(turned(x, Y), plain(x, Y))
    torch.testing.assert_close(turned.logits(x), plain.logits(x))
    torch.testing.assert_close(turned.cosines(x), plain.cosines(x))


def test_a_frozen_head_trains_its_rotation():
    head = build("arcface", frozen=True, rotation=nn.Linear(D, D, bias=False))
    head(features(), Y).backward()
    assert (head.rotation.weight.grad != 0).any()
    assert [name for name, p in head.named_parameters() if p.requires_grad] == ["rotation.weight"]


@pytest.mark.parametrize("name", NAMES)
def test_centres_are_set_to_the_mean_directions(name):
    head = build(name)
    before = head.weight.detach().clone()
    x = features(20, seed=7) * torch.rand(20, 1).add(0.5)
    labels = torch.arange(20) % 4  # class 4 does not occur
    labels[3] = -100
    head.init_centres(x, labels)
    now = head.weight.detach().view(C, -1, D)
    units = x / x.norm(dim=1, keepdim=True)
    for j in range(4):
        mean = units[labels == j].sum(0)
        for row in now[j]:
            torch.testing.assert_close(row / row.norm(), mean / mean.norm())
    torch.testing.assert_close(now.norm(dim=2), before.view(C, -1, D).norm(dim=2))
    assert torch.equal(now[4], before.view(C, -1, D)[4])
    assert head.weight.requires_grad == (name != "triplet")


def test_centres_are_set_where_the_features_are_compared():
    turn = nn.Linear(D, D, bias=False)
    nn.init.orthogonal_(turn.weight)
    head = build("arcface", rotation=turn)
    x, y = features(C), torch.arange(C)
    head.init_centres(x, y)
    torch.testing.assert_close(head.cosines(x).diagonal(), torch.ones(C))
    with pytest.raises(ArgumentError, match=r"^labels must be classes"):
        head.init_centres(x, torch.eye(C))


@pytest.mark.parametrize("name", NAMES)
def test_added_classes(name):
    head = build(name).eval()
    x = features()
    before, logits = head.weight.detach().clone(), head.logits(x).detach()
    assert head.add_classes(3) is head
    assert head.classes == C + 3 and f"classes={C + 3}" in repr(head)
    torch.testing.assert_close(head.logits(x)[:, :C], logits)
    assert torch.equal(head.weight[: len(before)], before)
    fresh = head.weight[len(before) :].detach()
    assert len(fresh) == 3 * head.subcentres and (fresh.norm(dim=1) > 0).all()
    assert 0.5 < fresh.norm(dim=1).mean() / before.norm(dim=1).mean() < 2
    y = torch.tensor([0, 5, 6, 7, 5, 7])
    head.train()(x.requires_grad_(), y).backward()
    if name == "triplet":
        assert not list(head.parameters())
    else:
        assert (head.weight.grad[-3 * head.subcentres :].norm(dim=1) > 0).any()
    # Shapes are those of a head that was built with so many classes.
    built = {key: value.shape for key, value in build(name, classes=C + 3).state_dict().items()}
    assert {key: value.shape for key, value in head.state_dict().items()} == built


def test_added_classes_continue_what_is_given_per_class_and_can_have_features():
    head = build("cosface", m=[0.1, 0.2, 0.3, 0.4, 0.5], class_weights=[1.0, 2, 3, 4, 5])
    x = features()
    head.add_classes(2, features=x, labels=torch.tensor([0, 0, 0, 1, 1, 1]))
    assert head.m_by_class.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.3])
    assert head.class_weights.tolist() == [1, 2, 3, 4, 5, 3, 3]
    mean = F.normalize(F.normalize(x)[3:].sum(0), dim=0)
    torch.testing.assert_close(F.normalize(head.weight[6], dim=0), mean)
    with pytest.raises(ArgumentError, match=r"^classes must be at least 1"):
        head.add_classes(0)
    softmax = build("softmax")
    softmax.bias.data.copy_(torch.arange(5.0))
    softmax.add_classes(2)
    assert softmax.bias.tolist() == [0, 1, 2, 3, 4, 2, 2] and isinstance(softmax.bias, nn.Parameter)
    frozen = build("arcface", frozen=True).add_classes(1)
    assert not frozen.weight.requires_grad


def test_cleaning_with_sub_centres():
    """Two classes of two centres each; of the first, most samples lie at the second centre."""
    head = build("subcenter-arcface", dim=3, classes=2, k=2, m=0.1)
    rows = torch.tensor([[1.0, 0, 0], [0, 2.0, 0], [0, 0, 3.0], [-1.0, 0, 0]])
    head.weight.data.copy_(rows)
    near = [[0.1, 1, 0], [0, 1, 0.2], [0, 5, 0]]
    x = torch.tensor([*near, [1.0, 0, 0], [0, 0, 1.0], [0, 0.1, 1.0], [-1, 0, 0.2], [0, 1, 0]])
    y = torch.tensor([0, 0, 0, 0, 1, 1, 1, -100])
    assert head.clean(x, y).tolist() == [True, True, True, False, True, True, False, False]
    assert torch.equal(head.dominant_weight(x, y), rows[[1, 2]])
    # The second class' odd one stands 78.7 degrees from the dominant centre.
    assert head.clean(x, y, math.radians(80)).tolist() == [True, True, True, False, True, True, True, False]
    one = build("arcface", dim=3, classes=2)
    one.load_state_dict({"weight": head.dominant_weight(x, y)})
    assert one.cosines(x[:7]).argmax(1).tolist()[:3] == [0, 0, 0]


# ------------------------------------------------------------------------------------------------ scale


@pytest.mark.parametrize("name", NAMES)
def test_warning_of_a_scale_that_is_too_small(name):
    bounded = takes(name, "s") and name not in ("sphereface2", "triplet", "normface")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses.create(name, D, 10)  # the default is no reason to warn
        if takes(name, "s"):
            losses.create(name, D, 10, s=suggest_scale(10) + 0.01)
        if takes(name, "learn_scale"):
            losses.create(name, D, 10, s=1.0, learn_scale=True)
        if not bounded:
            losses.create(name, D, 10, **({"s": 1.0} if takes(name, "s") else {}))
    if bounded:
        # exp(1.1 * 10 / 9) odds against nine others, and the scale that makes them nine to one.
        best = 1 / (1 + 9 * math.exp(-1.1 * 10 / 9))
        enough = 0.9 * math.log(9 * 9)
        message = rf"^s = 1\.1 cannot give a class of 10 more than a probability of {best:.2g}, .* {enough:.1f} or more"
        with pytest.warns(UserWarning, match=message):
            losses.create(name, D, 10, s=1.1)


# ------------------------------------------------------------------------------------------------ memory


def test_memory_estimate():
    found = memory_estimate(128, 1000, 64, path="dense")
    assert found.weights == found.gradient == found.optimiser == 1000 * 64 * 4
    assert found.work == 5 * 128 * 1000 * 4
    assert found.total == 3 * 256_000 + 2_560_000
    chunked = memory_estimate(128, 10**6, 64)
    assert chunked.work == 4 * CHUNK_ELEMENTS * 4 == 128 * 2**20
    assert chunked.weights == 256 * 10**6
    assert memory_estimate(128, 1000, 64).work == 4 * 128 * 1000 * 4  # less than one chunk
    assert memory_estimate(8, 1000, 64).work == 4 * 64 * 1000 * 4  # copies of weights are more than logits
    sampled = memory_estimate(128, 10**6, 64, sample_rate=0.1)
    assert sampled.gradient == 256 * 10**6 and sampled.work == 4 * CHUNK_ELEMENTS * 4 + 2 * 25_600_000
    assert memory_estimate(128, 10**6, 64, sample_rate=0.1, sparse=True).gradient == 25_600_000
    assert memory_estimate(128, 100, 64, sample_rate=0.1, sparse=True).gradient == 100 * 64 * 4  # the batch's own
    assert str(memory_estimate(1, 2**28, 1)).startswith("weights 1.00 GiB, gradient 1.00 GiB, optimiser 1.00 GiB")
    for argument in ("batch", "classes", "dim"):
        sizes = {"batch": 1, "classes": 1, "dim": 1, argument: 0}
        with pytest.raises(ArgumentError, match=f"^{argument} must be at least 1, got 0$"):
            memory_estimate(**sizes)
    with pytest.raises(ArgumentError, match=r"^path must be one of 'chunked', 'compiled', 'dense', got 'auto'$"):
        memory_estimate(1, 1, 1, path="auto")
    with pytest.raises(ArgumentError, match=r"^sample_rate must be greater than 0 and at most 1, got 0$"):
        memory_estimate(1, 1, 1, sample_rate=0)


PEAK = r"""
import re, sys, torch, hypersphere as hs
torch.set_num_threads(1)
path, batch, classes, dim = sys.argv[1], *map(int, sys.argv[2:])
def step(head, x, y):
    head(x, y).backward()
def peak():  # of this process alone; ru_maxrss begins at the size of the one that started it
    return int(re.search(r"VmHWM:\s*(\d+) kB", open("/proc/self/status").read())[1]) * 1024
step(hs.losses.CosFace(dim, 10, path=path), torch.randn(4, dim), torch.arange(4))  # code is loaded
head = hs.losses.CosFace(dim, classes, path=path)
head.weight.grad = torch.zeros_like(head.weight)
x, y = torch.randn(batch, dim, requires_grad=True), torch.arange(batch)
before = peak()
step(head, x, y)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
@pytest.mark.parametrize(
    ("path", "batch", "classes", "dim"),
    [("dense", 256, 60_000, 16), ("chunked", 256, 120_000, 16), ("chunked", 4, 600_000, 64)],
)
def test_memory_estimate_against_a_measured_peak(path, batch, classes, dim):
    done = subprocess.run(
        [sys.executable, "-c", PEAK, path, str(batch), str(classes), str(dim)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    estimate = memory_estimate(batch, classes, dim, path=path)
    # A gradient is computed beside the one it is added to.
    assert 0.5 < (int(done.stdout) - estimate.gradient) / estimate.work < 1.5, (int(done.stdout), estimate)


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("x", "labels", "message"),
    [
        (torch.ones(2, D), torch.tensor([0, C]), rf"^labels must lie in \[0, {C}\), got {C} in row 1$"),
        (torch.ones(2, D), torch.tensor([-1, 0]), rf"^labels must lie in \[0, {C}\), got -1 in row 0$"),
        (torch.ones(2, D), torch.tensor([0, 1]).int(), r"^labels must be int64 of shape \(2,\), got torch\.int32 of"),
        (torch.ones(2, D), torch.tensor([True, False]), r"^labels must be int64 of shape \(2,\), got torch\.bool"),
        (torch.ones(2, D), torch.tensor([0, 1, 2]), r"^labels must be int64 .* of shape \(3,\)$"),
        (torch.ones(2, D), torch.tensor([[0, 1]]), r"^labels must be int64 .* of shape \(1, 2\)$"),
        (torch.ones(2, D + 1), torch.tensor([0, 1]), rf"^features must have shape \(B, {D}\), got \(2, {D + 1}\)$"),
        (torch.ones(D), torch.tensor([0]), rf"^features must have shape \(B, {D}\), got \({D},\)$"),
        (torch.ones(2, D).long(), torch.tensor([0, 1]), r"^features must be floating-point, got torch\.int64$"),
        (
            torch.full((2, D), math.nan),
            torch.tensor([3, 1]),
            r"^features must be finite, got nan in row 0, of class 3$",
        ),
        (
            torch.tensor([1.0, -math.inf])[:, None].expand(2, D),
            torch.tensor([3, 1]),
            r"^features must be finite, got -inf in row 1, of class 1$",
        ),
        ([[1.0] * D], torch.tensor([0]), r"^features must be a tensor, got list$"),
        (torch.ones(1, D), np.array([0]), r"^labels must be a tensor, got ndarray$"),
    ],
)
def test_bad_batches_are_named_and_leave_no_trace(name, x, labels, message):
    options = {} if name == "triplet" else {"annealer": LambdaAnnealer()}
    head = build(name, **options)
    head(features(), Y)
    before = copy.deepcopy(head.state_dict())
    with pytest.raises(ArgumentError, match=message):
        head(x, labels)
    assert before.keys() == head.state_dict().keys()
    for key, value in head.state_dict().items():
        assert torch.equal(value, before[key]), key


SHARES_OR_CLASSES = rf"must be int64 of shape \(2,\), or shares of shape \(2, {C}\), "


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(
    ("shares", "message"),
    [
        (torch.full((2, C), 0.5), r"must be at least 0 and add up to 1 in every row, got the sum 2\.5"),
        (
            torch.tensor([[1.5, -0.5, 0, 0, 0]] * 2),
            r"must be at least 0 .*, got the sum 1 and the least -0\.5 in row 0$",
        ),
        (torch.full((2, C), math.nan), "must be at least 0 and add up to 1 in every row, got the sum nan"),
        (torch.full((2, 3), 1 / 3), SHARES_OR_CLASSES + r"got torch\.float32 of shape \(2, 3\)$"),
        (torch.ones(2), SHARES_OR_CLASSES + r"got torch\.float32 of shape \(2,\)$"),
    ],
)
def test_bad_shares_are_named_and_leave_no_trace(name, shares, message):
    head = build(name, annealer=LambdaAnnealer())
    head(features(), Y)
    before = copy.deepcopy(head.state_dict())
    if name not in SOFT:
        message = "must be classes"
    with pytest.raises(ArgumentError, match=f"^labels {message}"):
        head(torch.ones(2, D), shares)
    for key, value in head.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_checks_of_values_are_made_on_the_cpu_or_on_request(monkeypatch):
    """The device of a tensor decides; a tensor that says it is elsewhere stands for one on a GPU."""

    class Elsewhere(torch.Tensor):
        @property
        def device(self):
            return torch.device("cuda")

    wrong = torch.tensor([0, 9]).as_subclass(Elsewhere)
    build("arcface").check(torch.ones(2, D), wrong)  # nothing is read from the device
    with pytest.raises(ArgumentError, match=r"^labels must lie in"):
        build("arcface", validate=True).check(torch.ones(2, D), wrong)
    with pytest.raises(ArgumentError, match=r"^features must be finite"):
        build("arcface", validate=True)(torch.full((1, D), math.nan), torch.tensor([0]))


@pytest.mark.parametrize("name", HEADS)
def test_scores_check_their_features(name):
    head = build(name)
    for method in (head.logits, head.cosines):
        with pytest.raises(ArgumentError, match=r"^features must have shape \(B, 6\), got \(2, 7\)$"):
            method(torch.ones(2, 7))
    with pytest.raises(ArgumentError, match=r"^labels must be classes \(2,\)"):
        head.margin_logits(torch.ones(2, D), torch.full((2, C), 0.2))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("arcface", {"m": 4.0}, r"^m must be at least 0 and at most 3\.14159, got 4\.0$"),
        ("arcface", {"m": -0.1}, r"^m must be at least 0"),
        ("arcface", {"m": math.nan}, r"^m must be at least 0 .* got nan"),
        ("arcface", {"m": [0.1, 0.2, 0.3, 0.4, 9.0]}, r"^m must be at least 0 and at most 3\.14159, got 9\.0$"),
        ("arcface", {"m": [0.1, 0.2]}, r"^m must have shape \(5,\), got \(2,\)$"),
        ("arcface", {"m": Ramp(0.0, 4.0, length=3)}, r"^m must be at least 0 and at most 3\.14159, got 4\.0$"),
        ("arcface", {"m": "large"}, r"^m must be a number, one for each class or a schedule, got str$"),
        ("arcface", {"m": LambdaAnnealer()}, r"^m must be at least 0 and at most 3\.14159"),
        ("cosface", {"m": -1.0}, r"^m must be at least 0, got -1\.0$"),
        ("a-softmax", {"m": 0.5}, r"^m must be at least 1, got 0\.5$"),
        ("l-softmax", {"m": 2.5}, r"^m must be an integer \(a-softmax takes any number from 1 on\), got 2\.5$"),
        ("l-softmax", {"m": [1, 2, 3, 4, 1.5]}, r"^m must be an integer"),
        ("l-softmax", {"m": Ramp(1.0, 2.5, length=3)}, r"^m must be an integer"),
        ("combined", {"m1": 0.0}, r"^m1 must be greater than 0, got 0\.0$"),
        ("combined", {"m2": 4.0}, r"^m2 must be at least 0 and at most 3\.14159, got 4\.0$"),
        ("combined", {"m3": -1.0}, r"^m3 must be at least 0, got -1\.0$"),
        ("sphereface-r", {"m": 0.9}, r"^m must be at least 1, got 0\.9$"),
        ("sphereface-r", {"version": "v1", "m": 0.9}, r"^m must be at least 1, got 0\.9$"),
        ("sphereface-r", {"version": "v3"}, r"^version must be one of 'v0', 'v1', 'v2', got 'v3'$"),
        ("sphereface-r", {"feature_norm": "no"}, r"^feature_norm must be one of 'none', 'hard', 'soft', got 'no'$"),
        ("sphereface-r", {"pull": -1.0}, r"^pull must be at least 0, got -1\.0$"),
        ("sphereface2", {"version": "B"}, r"^version must be one of 'C', 'A', 'M', got 'B'$"),
        ("sphereface2", {"balance": 1.0}, r"^balance must lie between 0 and 1, got 1\.0$"),
        ("sphereface2", {"t": 0.0}, r"^t must be greater than 0, got 0\.0$"),
        ("sphereface2", {"m": -0.1}, r"^m must be at least 0, got -0\.1$"),
        ("sphereface2", {"version": "M", "m": 0.5}, r"^m must be at least 1, got 0\.5$"),
        ("circle", {"m": 1.5}, r"^m must be at least 0 and at most 1, got 1\.5$"),
        ("magface", {"m": (0.8, 0.4)}, r"^m must be two numbers in \[0, pi\] that do not fall, got \(0\.8, 0\.4\)$"),
        ("magface", {"m": 0.5}, r"^m must be two numbers in \[0, pi\] that do not fall, got 0\.5$"),
        ("magface", {"norms": (5.0, 5.0)}, r"^norms must be two increasing numbers above 0, got \(5\.0, 5\.0\)$"),
        ("adaface", {"rate": 2.0}, r"^rate must be at least 0 and at most 1, got 2\.0$"),
        ("curricularface", {"rate": -1.0}, r"^rate must be at least 0 and at most 1, got -1\.0$"),
        ("subcenter-arcface", {"k": 0}, r"^k must be at least 1, got 0$"),
        ("hinge", {"power": 3}, r"^power must be at least 1 and at most 2, got 3$"),
        ("contrastive", {"m": torch.ones(C)}, "^m must be one number: pairs of features have no class"),
        ("triplet", {"m": "far"}, "^m must be a number, one for each class or a schedule, got str$"),
        ("center", {"centre_rate": 1.5}, r"^centre_rate must be at least 0 and at most 1, got 1\.5$"),
        ("w-softmax", {"g": "sigmoid", "k": 0.0}, r"^k must be greater than 0, got 0\.0$"),
        (
            "arcface",
            {"beyond": "far"},
            r"^beyond must be one of 'tangent', 'clip', 'fallback', 'raw', 'easy', got 'far'$",
        ),
        ("arcface", {"s": 0.0}, r"^s must be greater than 0, got 0\.0$"),
        ("arcface", {"gradient": "none"}, r"^gradient must be one of 'exact', 'cgd', 'caffe', got 'none'$"),
        ("arcface", {"reduction": "max"}, r"^reduction must be one of 'mean', 'sum', 'none', got 'max'$"),
        ("arcface", {"path": "fast"}, r"^path must be one of 'auto', 'dense', .*'chunked', got 'fast'$"),
        ("arcface", {"label_smoothing": 1.0}, r"^label_smoothing must be at least 0 and less than 1, got 1\.0$"),
        ("arcface", {"sample_rate": 0.0}, r"^sample_rate must be greater than 0 and at most 1, got 0\.0$"),
        ("arcface", {"sparse": True}, r"^sparse needs sample_rate below 1"),
        ("arcface", {"class_weights": [1.0]}, r"^class_weights must have shape \(5,\), got \(1,\)$"),
        ("arcface", {"class_weights": [-1.0] * 5}, "^class_weights must be at least 0, got -1 for class 0$"),
        ("margin-softmax", {"bias": True}, r"^bias needs unit_weights=False"),
        ("arcface", {"classes": 0}, r"^classes must be at least 1, got 0$"),
        ("arcface", {"dim": 0}, r"^dim must be at least 1, got 0$"),
        ("arcface", {"q": 1}, r"^q is not an option of 'arcface'"),
        ("triplet", {"class_weights": [1.0] * 5}, r"^class_weights is not an option of 'triplet'"),
    ],
)
def test_bad_options_are_named(name, options, message):
    with pytest.raises(ArgumentError, match=message):
        losses.create(name, **{"dim": D, "classes": C, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"psi": "additive-angel"},
            r"^unknown margin 'additive-angel'\. Did you mean 'additive-angle'\? Known: ",
        ),
        ({"g": "cosin"}, r"^unknown angular function 'cosin'\. Did you mean 'cosine'\? Known: cosine, linear"),
    ],
)
def test_unknown_parts_are_named(options, message):
    with pytest.raises(UnknownNameError, match=message):
        MarginSoftmax(D, C, **options)


def test_unknown_losses_are_named():
    with pytest.raises(UnknownNameError, match=r"^unknown loss 'arcfase'\. Did you mean 'arcface'\? Known: a-softmax"):
        hs.losses.create("arcfase", D, C)


# ------------------------------------------------------------------------------------------------ numbers


def paths(name):
    return ("dense",) if name == "triplet" else ("dense", "chunked")


def on_path(name, path):
    return {} if name == "triplet" else {"path": path}


def rows(head):
    """One weight of each class."""
    return head.weight.detach().view(head.classes, -1, head.dim)[:, 0]


def test_soft_normalisation_is_finite_at_the_edges():
    for path in ("dense", "chunked"):
        head = build("sphereface-r", feature_norm="soft", s=3.0, path=path)
        for x in (torch.zeros(6, D), torch.full((6, D), 1e-30), 1e4 * rows(head)[Y], features()[:0]):
            leaf = x.clone().requires_grad_()
            assert_finite(head, leaf, head(leaf, Y[: len(x)]))


@pytest.mark.parametrize("name", [name for name in NAMES if takes(name, "s")])
def test_a_very_large_scale(name):
    for path in paths(name):
        head = build(name, s=1e4, **on_path(name, path))
        for x in (features(), rows(head)[Y], -rows(head)[Y]):
            leaf = x.clone().requires_grad_()
            assert_finite(head, leaf, head(leaf, Y))


# ------------------------------------------------------------------------------------------------ compilation


def compiled_steps(name, options, dynamic_margin=False):
    """Two training steps of a head, compiled and not, with the same numbers."""
    if dynamic_margin and name in dict(MARGINS):
        option = next(o for n, o in MARGINS if n == name)
        ends = (1.0, 1.5) if options.get("version") == "M" else sizes(name, option)
        options = {**options, option: Ramp(*ends, length=5)}
    if name != "triplet":
        options = {**options, "annealer": LambdaAnnealer(5.0, 0.5, minimum=0.0)}
    eager = build(name, **options)
    other = copy.deepcopy(eager)
    torch._dynamo.reset()
    fast = torch.compile(other, fullgraph=True, backend="aot_eager")
    for step in range(2):
        x = features(seed=step).requires_grad_()
        found = []
        for head, call in ((eager, eager), (other, fast)):
            torch.manual_seed(step)
            loss = call(x, Y)
            found.append((loss.detach(), gradients(head, loss, x)))
        (wanted, expected), (value, gradient) = found
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)
        assert gradient.keys() == expected.keys()
        for key in expected:
            torch.testing.assert_close(gradient[key], expected[key], rtol=1e-4, atol=1e-6, msg=key)
        with torch.no_grad():
            for head in (eager, other):
                for parameter in head.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(0.1 * parameter.grad)
    for key, value in eager.state_dict().items():
        torch.testing.assert_close(other.state_dict()[key], value, rtol=1e-4, atol=1e-5, msg=key)


RAW = [("arcface", {"weight_gradient": "raw"}), ("circle", {"weight_gradient": "raw"})]


@pytest.mark.parametrize(("name", "options"), [*VARIANTS, *RAW])
def test_compiled_dense(name, options):
    compiled_steps(name, options | on_path(name, "dense"), dynamic_margin=True)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("softmax", {}),
        ("a-softmax", {"gradient": "caffe"}),
        *RAW,
        ("sphereface-plus", {}),
        ("subcenter-arcface", {}),
        ("adaface", {}),
        ("curricularface", {}),
        ("sphereface2", {"version": "M"}),
        ("hinge", {"power": 2}),
        ("center", {}),
    ],
)
def test_compiled_chunked(name, options):
    compiled_steps(name, options | {"path": "chunked"}, dynamic_margin=True)


@pytest.mark.parametrize(
    ("name", "path"), [*((name, "chunked") for name in HEADS), ("arcface", "dense"), ("subcenter-arcface", "dense")]
)
def test_compiled_sampled(name, path):
    compiled_steps(name, {"path": path, "sample_rate": 0.5, "classes": 16})


@pytest.mark.parametrize(
    "name", ["softmax", "a-softmax", "sphereface-plus", "subcenter-arcface", "adaface", "sphereface2"]
)
def test_the_compiled_path_is_the_dense_one(name, monkeypatch):
    """The head compiles itself; the backend is the one without a compiler, as above."""
    torch._dynamo.reset()
    compiled, compiler = [], torch.compile

    def compile_without_a_compiler(function):
        compiled.append(function.__code__)
        return compiler(function, backend="aot_eager", fullgraph=True)

    monkeypatch.setattr(torch, "compile", compile_without_a_compiler)
    schedules = [{"annealer": LambdaAnnealer(5.0, 0.5, minimum=0.0)} for _ in range(2)]
    dense, fast = build(name, path="dense", **schedules[0]), build(name, path="compiled", **schedules[1])
    assert fast.path == "compiled" and "path='compiled'" in repr(fast)
    for seed in range(2):
        x = features(seed=seed).requires_grad_()
        wanted, loss = dense(x, Y), fast(x, Y)
        torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
        expected = gradients(dense, wanted, x)
        for key, gradient in gradients(fast, loss, x).items():
            torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-6, msg=key)
    assert len(compiled) == 1  # once, not for every batch
    copy = pickle.loads(pickle.dumps(fast))  # what is compiled does not travel with the head
    copy(features(), Y)
    assert len(compiled) == 2 and compiled[0] is not compiled[1]


# ------------------------------------------------------------------------------------------------ copies


FRESH = """
import pickle, sys, torch
heads, x, y, wanted = pickle.load(open(sys.argv[1], "rb"))
for head, loss in zip(heads, wanted):
    found = head(x, y)
    assert torch.equal(found, loss), (head, found, loss)
    found.backward()
print(len(heads))
"""


def test_heads_work_where_they_are_unpickled(tmp_path):
    """The chunked operation finds its rule by name: in a process that built none, unpickling must name it."""
    heads = [build(name, **options, **on_path(name, "chunked")).eval() for name, options in VARIANTS]
    x = features().requires_grad_()
    found = [head(x, Y).detach() for head in heads]
    file = tmp_path / "heads.pkl"
    file.write_bytes(pickle.dumps((heads, x, Y, found)))
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(file)],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(len(VARIANTS))


def test_schedules_are_part_of_the_head():
    head = build("arcface", m=Ramp(0.1, 0.4, milestones=(2, 5)), annealer=LambdaAnnealer())
    assert {"m.steps", "annealer.steps"} <= set(head.state_dict())
    assert all(isinstance(part, Schedule) for part in head.children())
    assert "milestones=(2, 5)" in repr(head) and "gamma=0.12" in repr(head)


# ------------------------------------------------------------------------------------------------ findings


@pytest.mark.parametrize("gradient", ["exact", "cgd", "caffe"])
@pytest.mark.parametrize("version", ["C", "A", "M"])
def test_the_bias_of_binary_problems_has_the_gradient_of_a_bias(version, gradient):
    """By central differences: it is added to every logit, whatever the gradient of the margin."""
    head = hs.losses.SphereFace2(6, 5, version=version, gradient=gradient, loss_weight=1.0).double()
    x = features().double()
    head(x, Y).backward()
    values = []
    for delta in (1e-4, -1e-4):
        other = copy.deepcopy(head)
        other.common_bias.data.add_(delta)
        values.append(float(other(x, Y).detach()))
    assert float(head.common_bias.grad) == pytest.approx((values[0] - values[1]) / 2e-4, rel=1e-5)


def test_evaluation_of_a_sampled_head_compares_with_all_classes_in_chunks(monkeypatch):
    head = hs.losses.CosFace(4, 40_000, sample_rate=0.01)
    assert head.path == "dense" and head.eval().path == "chunked"
    plus = hs.losses.SphereFacePlus(4, 40_000, sample_rate=0.01)
    seen = []
    original = streaming._dense
    monkeypatch.setattr(streaming, "_dense", lambda problem: seen.append(len(problem.weight)) or original(problem))
    plus(torch.randn(3, 4), torch.tensor([1, 2, 3]))
    assert seen == [400]  # the energy, of all classes, was not dense


def test_an_ignored_sample_draws_no_class():
    torch.manual_seed(0)
    head = hs.losses.CosFace(4, 1000, sample_rate=0.01)
    labels, valid = torch.tensor([0, 0, 7]), torch.tensor([False, False, True])
    drawn = torch.cat([head.sample(labels, valid=valid) for _ in range(50)])
    assert (drawn == 7).sum() == 50 and (drawn == 0).sum() < 5
    assert head(torch.randn(3, 4), torch.tensor([-100, -100, 7])).isfinite()


@pytest.mark.parametrize("path", ["dense", "chunked"])
def test_two_losses_of_one_step_with_the_released_gradient(path):
    head = hs.losses.ASoftmax(6, 5, gradient="caffe", path=path)
    x = features().requires_grad_()
    (head(x, Y) + head(x, Y)).backward()
    twice, twice_by_x = head.weight.grad.clone(), x.grad.clone()
    head.zero_grad()
    x.grad = None
    head(x, Y).backward()
    torch.testing.assert_close(twice, 2 * head.weight.grad)
    torch.testing.assert_close(twice_by_x, 2 * x.grad)


@pytest.mark.parametrize("path", ["dense", "chunked"])
@pytest.mark.parametrize(
    ("name", "options", "plain"),
    [("sphereface-r", {"m": 1.4}, {"m": 1.0}), ("sphereface2", {"m": 0.4}, {"m": 0.0})],
)
def test_annealing_of_margins_on_other_classes(name, options, plain, path):
    """From no margin at a large weight to the margin at none."""
    x = features()

    def loss(chosen, weight=None):
        annealer = {} if weight is None else {"annealer": LambdaAnnealer(weight, gamma=0.0, minimum=0.0)}
        head = build(name, path=path, **chosen, **annealer).eval()
        if name == "sphereface2":
            head.common_bias.data.fill_(1.0)
        return head(x, Y)

    torch.testing.assert_close(loss(options, 1e7), loss(plain), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss(options, 1e-7), loss(options), rtol=1e-5, atol=1e-6)
    between = loss(options, 1.0)
    assert not torch.isclose(between, loss(options)) and not torch.isclose(between, loss(plain))


def test_statistics_keep_their_precision_in_16_bit():
    torch.manual_seed(0)
    full, low = hs.losses.AdaFace(6, 5), hs.losses.AdaFace(6, 5, m=[0.1, 0.2, 0.3, 0.4, 0.5]).bfloat16()
    assert low.weight.dtype == torch.bfloat16
    assert {low.norm_mean.dtype, low.m_by_class.dtype} == {torch.float32}
    for _ in range(200):
        x = features()
        full(x, Y)
        low(x.bfloat16(), Y)
    torch.testing.assert_close(low.norm_mean, full.norm_mean, rtol=1e-2, atol=0)
    assert full.double().norm_mean.dtype == torch.float64


def test_a_rotation_in_16_bit():
    head = MarginSoftmax(6, 5, s=8.0, rotation=nn.Linear(6, 6, bias=False), frozen=True).bfloat16()
    assert head(features().bfloat16(), Y).dtype == torch.float32
    assert head(features(), Y).isfinite()


def test_margins_can_be_changed():
    head = build("arcface")
    head.set_margin(m=[0.1, 0.2, 0.3, 0.4, 0.5])
    other = build("arcface", m=[0.1, 0.2, 0.3, 0.4, 0.5])
    x = features()
    torch.testing.assert_close(head(x, Y), other(x, Y))
    head.set_margin(margin=Ramp(0.0, 0.5, length=10))
    assert head.schedules() == {"m": 0.0} and "m.steps" in head.state_dict()
    head.set_margin(m=0.2)
    torch.testing.assert_close(head(x, Y), build("arcface", m=0.2)(x, Y))
    with pytest.raises(ArgumentError, match=r"^m must be at least 0 and at most 3\.14159, got 4"):
        head.set_margin(m=4)
    with pytest.raises(ArgumentError, match=r"^k is no margin of this head, which has m$"):
        head.set_margin(k=1.0)


def test_classes_and_names_take_the_same_options():
    for make in (lambda **o: hs.losses.ArcFace(6, 5, **o), lambda **o: hs.losses.create("arcface", 6, 5, **o)):
        with pytest.raises(ArgumentError, match=r"^marign is not an option of 'arcface'\. Did you mean 'margin'\?"):
            make(marign=0.3)
        with pytest.raises(ArgumentError, match=r"^margin is another name of 'm': give one of them$"):
            make(m=0.3, margin=0.2)
        with pytest.raises(ArgumentError, match=r"^m is in radians .* got 28\.6 \(28\.6 degrees are 0\.499\)$"):
            make(m=28.6)
        with pytest.raises(ArgumentError, match=r"^annealer must be a LambdaAnnealer, got Ramp$"):
            make(annealer=Ramp(0, 1, length=3))
    with pytest.raises(ArgumentError, match="m is not an option of 'normface'"):
        hs.losses.NormFace(6, 5, m=0.3)
    with pytest.raises(ArgumentError, match=r"^m is not enough: .* needs 'm1'"):
        MarginSoftmax(6, 5, psi="combined", m=0.3)
    assert hs.losses.create("cosface", 6, 5, m=np.float32(0.25)).m == 0.25
    assert hs.losses.create("ArcFace", 6, 5, m=np.full(5, 0.25)).m_by_class.tolist() == [0.25] * 5
    assert list(inspect.signature(hs.losses.CosFace).parameters)[:4] == ["dim", "classes", "s", "m"]


def test_names_are_found_however_they_are_written():
    for name in ("arcface", "ArcFace", "arc_face", "AAM-Softmax", "aamsoftmax"):
        assert isinstance(hs.losses.create(name, 6, 5), hs.losses.ArcFace)


def test_the_scale_warning_points_to_the_user():
    for make in (lambda: hs.losses.CosFace(6, 50, s=1.0), lambda: hs.losses.create("cosface", 6, 50, s=1.0)):
        with pytest.warns(UserWarning, match="s = 1 cannot give") as caught:
            make()
        assert Path(caught[0].filename) == Path(__file__)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("sphereface-r", {}, "s=60.0, m=1.4, version=v2"),
        ("ga-softmax", {"g": "linear"}, "g=Linear(), m=4"),
        ("magface", {}, "m=(0.45, 0.8)"),
        ("subcenter-arcface", {"label_smoothing": 0.1, "frozen": True}, "label_smoothing=0.1, frozen=True"),
        ("triplet", {}, "m=0.2"),
        ("softmax", {"reduction": "sum"}, "reduction='sum'"),
    ],
)
def test_what_a_head_shows(name, options, words):
    assert all(word in repr(hs.losses.create(name, 6, 5, **options)) for word in words.split(", "))


# ------------------------------------------------------------------------------------------------ transforms


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adaface", {}, r"^features must be a whole batch where a head in training keeps means of them"),
        ("curricularface", {}, r"^features must be a whole batch where a head in training keeps means of them"),
        ("center", {}, r"^features must be a whole batch where a head in training keeps means of them"),
        ("a-softmax", {"gradient": "caffe"}, r"^gradient 'caffe' divides the weights by their norms in place"),
    ],
)
def test_what_transforms_cannot_do_says_what_to_use(name, options, message):
    head = build(name, **options).train()
    state = copy.deepcopy(head.state_dict())
    named = {key: value.detach() for key, value in head.named_parameters()}

    def loss(given, x, y):
        return torch.func.functional_call(head, given, (x[None], y[None]))

    with pytest.raises(ArgumentError, match=message):
        torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(named, features(), Y)
    for key, value in head.state_dict().items():
        assert torch.equal(value, state[key]), key


@pytest.mark.parametrize("method", ["solve", "newton"])
def test_a_rotated_head_has_gradients_of_each_sample(method):
    rotation = hs.losses.rotation.ClassRotation(6, hs.orthogonal.create("cayley", method=method))
    head = MarginSoftmax(6, 5, s=8.0, psi="additive-cosine", m=0.2, rotation=rotation).double()
    with torch.no_grad():
        head.rotation.free.normal_(std=0.3)
        if method == "newton":
            rotation.carried.copy_(rotation.map.warm_start(rotation.free))
    state = copy.deepcopy(head.state_dict())
    x = features(dtype=torch.float64)

    def loss(free, x, y):
        return torch.func.functional_call(head, {"rotation.free": free}, (x[None], y[None]))

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(head.rotation.free.detach(), x, Y)
    assert all(torch.equal(value, state[key]) for key, value in head.state_dict().items())
    for index, found in enumerate(each):
        one = head(x[index : index + 1], Y[index : index + 1])
        torch.testing.assert_close(found, torch.autograd.grad(one, head.rotation.free)[0], rtol=1e-7, atol=1e-9)


def test_a_penalty_on_the_gradient_trains_through_the_chunked_path():
    """A step whose loss contains a gradient, R1's: the same in chunks, under soft labels and with smoothing."""
    labels = (Y, F.softmax(features(len(Y), C, 3).double(), 1))
    for options, given in [({"label_smoothing": 0.1}, labels[0]), ({"class_weights": W}, labels[0]), ({}, labels[1])]:
        found = []
        for path in ("dense", "chunked"):
            head = build("arcface", path=path, **options).double()
            x = features(dtype=torch.float64).requires_grad_()
            (slope,) = torch.autograd.grad(head(x, given), x, create_graph=True)
            loss = head(x, given) + slope.square().sum()
            found.append({"loss": loss, **gradients(head, loss, x)})
        for key, value in found[0].items():
            torch.testing.assert_close(found[1][key], value, rtol=1e-9, atol=1e-9, msg=key)


def test_a_rotated_head_has_products_with_its_hessian():
    head = build("cosface", rotation="cayley").double().eval()
    named = {key: value.detach() for key, value in head.named_parameters()}
    x, along = features(dtype=torch.float64), features(seed=3, dtype=torch.float64)
    slope = torch.func.grad(lambda x: torch.func.functional_call(head, named, (x, Y)))
    change = torch.func.jvp(slope, (x,), (along,))[1]
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(head(leaf, Y), leaf, create_graph=True)
    torch.testing.assert_close(change, torch.autograd.grad((first * along).sum(), leaf)[0])


def test_numbers_of_a_message_are_read_without_a_warning():
    """torch warns once a process when a tensor with a gradient becomes a number, so a fresh one is needed."""
    code = (
        "import warnings, torch; warnings.simplefilter('error'); import hypersphere as hs\n"
        "x = torch.full((1, 4), torch.nan, requires_grad=True)\n"
        "try: hs.losses.ArcFace(4, 3)(x, torch.tensor([1]))\n"
        "except hs.errors.ArgumentError as error: print(error)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.stdout == "features must be finite, got nan in row 0, of class 1\n", found.stderr
