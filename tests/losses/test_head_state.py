"""Whatever changes a head does so as a whole or not at all."""

from __future__ import annotations

import copy
import inspect
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hypersphere as hs
from hypersphere.errors import ArgumentError
from hypersphere.losses import LambdaAnnealer, MarginSoftmax, Ramp
from hypersphere.losses.schedules import Schedule
from hypersphere.losses.state import HeadState

D, C = 4, 5
NAMES = [name for name in hs.losses.losses if name != "gan"]
X, Y = torch.randn(6, D, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 4, 0])
NAN_ROW = torch.where(torch.arange(6).unsqueeze(1) == 2, math.nan, X)


def build(name, **options):
    torch.manual_seed(0)
    return hs.losses.create(name, D, C, **options)


def state(head):
    """All that a head is: tensors with their storage, shapes and flags, modules, and plain attributes, of all parts."""
    found = {}
    for path, module in head.named_modules():
        for kind in ("_parameters", "_buffers"):
            for key, value in vars(module)[kind].items():
                kept = None if value is None else (value.detach().clone(), id(value), value.requires_grad)
                found[path, kind, key] = kept
        found[path, "modules"] = {key: id(value) for key, value in module.named_children()}
        plain = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        found[path, "plain"] = copy.deepcopy(plain)
        found[path, "training"] = module.training
    return found


def same(before, now):
    assert list(before) == list(now)
    for key, value in before.items():
        if isinstance(value, tuple):
            assert torch.equal(value[0], now[key][0]) and value[1:] == now[key][1:], key
        else:
            assert value == now[key], key


BAD_EXAMPLES = {
    "labels beyond": (X, torch.tensor([0, 1, 2, 1, 0, 7])),
    "labels below": (X, torch.tensor([0, 1, 0, 1, -1, 0])),
    "labels of another kind": (X, torch.zeros(6)),
    "labels as a list": (X, [0, 1, 0, 1, 0, 1]),
    "labels of another number": (X, torch.tensor([0, 1])),
    "soft labels": (X, torch.full((6, C), 1 / C)),
    "features of another width": (X[:, 1:], torch.zeros(6, dtype=torch.int64)),
    "features of integers": (X.long(), torch.zeros(6, dtype=torch.int64)),
    "features as an array": (X.numpy(), torch.zeros(6, dtype=torch.int64)),
    "features that are none": (NAN_ROW, torch.zeros(6, dtype=torch.int64)),
}
"""Features and labels that no head takes as examples, by what is wrong with them."""

BAD_MARGINS = [math.nan, math.inf, -math.inf, -1.0, "wide", None, torch.ones(C + 1), [0.5] * (C - 1), [0.5, [1.0]]]
BAD_MARGINS += [[0.5, 0.5, 0.5, 0.5, math.nan], [0.5, 0.5, 0.5, 0.5, "x"]]
"""Sizes that no margin may have."""


def mutations(head):
    """Every way to change a head with what must be refused: what is called, and with what."""
    for why, (x, y) in BAD_EXAMPLES.items():
        yield f"init_centres: {why}", lambda x=x, y=y: head.init_centres(x, y)
        yield f"add_classes: {why}", lambda x=x, y=y: head.add_classes(2, x, y)
        if why != "soft labels" or not head.takes_soft_labels:
            yield f"forward: {why}", lambda x=x, y=y: head(x, y)
    for classes in (0, -1, 2.0, 1.5, "2", None, True, math.nan):
        yield f"add_classes({classes!r})", lambda classes=classes: head.add_classes(classes)
    yield "add_classes: features alone", lambda: head.add_classes(2, X)
    yield "add_classes: labels alone", lambda: head.add_classes(2, None, Y)
    for margin, size in itertools.product(head.margin_names, BAD_MARGINS):
        yield f"set_margin({margin}={size})", lambda margin=margin, size=size: head.set_margin(**{margin: size})
    yield "shard without processes", head.shard
    yield "set_margin of another name", lambda: head.set_margin(nothing=1.0)
    now = dict.fromkeys(head.margin_names, (0.1, 0.2) if type(head) is hs.losses.MagFace else 1.0)
    yield "set_margin, of which one is good", lambda: head.set_margin(**now, nothing=1.0)
    yield "set_margin, the last of which is bad", lambda: head.set_margin(**{**now, head.margin_names[-1]: -1.0})


@pytest.mark.parametrize("name", NAMES)
def test_what_is_refused_changes_nothing(name):
    head = build(name, **({} if name == "triplet" else {"annealer": LambdaAnnealer()}))
    head(X, Y)
    before, random = state(head), torch.get_rng_state()
    for what, call in mutations(head):
        with pytest.raises(ArgumentError):
            call()
            pytest.fail(f"{what} was accepted")
        same(before, state(head))
        assert torch.equal(random, torch.get_rng_state()), f"{what} has drawn numbers"
        head.train()
    assert head(X, Y).isfinite()


def test_no_method_that_changes_a_head_is_forgotten():
    """The walk above calls all methods of heads but those that take nothing or change nothing."""
    called = {"add_classes", "forward", "init_centres", "set_margin", "shard"}
    takes_nothing = {"reset_parameters", "advance", "schedules", "offset", "typical_norm", "details", "extra_repr"}
    takes_nothing |= {"unshard"}
    reads = {"annealing", "check", "check_margins", "class_bias", "cosines", "eta", "logits", "margin_bounds", "psi"}
    reads |= {"margin_logits", "margin_size", "margin_sizes", "path_for", "penalty", "plain_value", "rotated", "slope"}
    reads |= {"rule_parameters", "sample", "sample_loss", "scale", "target_cosines", "target_vectors", "rotated_weight"}
    reads |= {"clean", "dominant_weight", "own_bias", "centres_of"}
    of_a_step = {"compared", "make_unit", "moved", "whole_batch"}  # of a batch that was checked
    found = set()
    for kind in {type(build(name)) for name in NAMES} | {HeadState, MarginSoftmax}:
        own = (base for base in kind.__mro__ if base.__module__.startswith("hypersphere."))
        found |= {key for base in own for key, value in vars(base).items() if inspect.isfunction(value)}
    found = {key for key in found if not key.startswith("_")}
    assert found == called | takes_nothing | reads | of_a_step


@pytest.mark.parametrize("name", NAMES)
def test_ignored_examples_of_new_classes_count_for_nothing(name):
    head = build(name)
    old = head.weight.detach().clone()
    head.add_classes(3, X, torch.tensor([0, 1, 0, 1, -100, -100]))
    assert torch.equal(head.weight[: len(old)], old)
    rows = F.normalize(head.weight.detach().double(), dim=1).view(C + 3, -1, D)
    for new, of in ((0, [0, 2]), (1, [1, 3])):
        mean = sum(X[i].double() / X[i].double().norm() for i in of)
        torch.testing.assert_close(rows[C + new], (mean / mean.norm()).expand_as(rows[C + new]), rtol=0, atol=1e-6)


def test_an_ignored_label_may_be_the_number_of_a_class_that_is_added():
    head = hs.losses.CosFace(D, C, ignore_index=C + 1)
    head.add_classes(2, X[:2], torch.tensor([0, 1]))
    torch.testing.assert_close(F.normalize(head.weight[C:], dim=1), F.normalize(X[:2], dim=1))


def test_a_row_far_behind_is_not_overwritten():
    head = hs.losses.CosFace(8, 200)
    old = head.weight.detach().clone()
    head.add_classes(2, torch.randn(5, 8), torch.tensor([0, 1, 0, 1, -100]))
    assert torch.equal(head.weight[:200], old)
    with pytest.raises(ArgumentError, match=r"^labels must lie in \[0, 2\), got -1 in row 1$"):
        head.add_classes(2, torch.randn(2, 8), torch.tensor([0, -1]))
    assert head.classes == 202 and len(head.weight) == 202


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("l-softmax", {"m": 1.5}, r"^m must be an integer \(a-softmax takes any number from 1 on\), got 1\.5$"),
        ("l-softmax", {"m": [1, 2, 3, 2.5, 1]}, r"^m must be an integer .* got 2\.5$"),
        ("magface", {"m": 0.3}, r"^m must be two numbers in \[0, pi\] that do not fall, got 0\.3$"),
        ("magface", {"m": (0.5, 0.3)}, r"^m must be two numbers .* got \(0\.5, 0\.3\)$"),
        ("contrastive", {"m": Ramp(0.0, 1.0, length=3)}, "^m must be one number: pairs of features"),
        ("triplet", {"m": [0.1] * C}, "^m must be one number: pairs of features"),
        ("combined", {"m2": 0.5, "m3": -1.0}, r"^m3 must be at least 0, got -1"),
        ("cosface", {"m": math.inf}, r"^m must be at least 0 and finite, got inf$"),
        ("arcface", {"m": [0.1, 0.2, 0.3, math.nan, 0.4]}, r"^m must be finite, got nan for class 3$"),
        ("margin-softmax", {"m": 0.5}, r"^m must be 0 with psi='none' and these negatives, which have no margin$"),
    ],
)
def test_margins_are_refused_alike_when_built_and_when_changed(name, sizes, message):
    for call in (lambda: build(name, **sizes), lambda: build(name).set_margin(**sizes)):
        with pytest.raises(ArgumentError, match=message):
            call()


@pytest.mark.parametrize(
    ("name", "size"), [("magface", (0.1, 0.2)), ("contrastive", 3.0), ("triplet", 1.5), ("l-softmax", 2)]
)
def test_a_changed_margin_is_in_force(name, size):
    changed, built = build(name), build(name, m=size)
    changed.set_margin(m=size)
    assert torch.equal(changed(X, Y), built(X, Y)) and not torch.equal(changed(X, Y), build(name)(X, Y))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hs.losses.ArcFace(4.0, C), r"^dim must be a whole number, got 4\.0$"),
        (lambda: hs.losses.ArcFace(D, 5.5), r"^classes must be a whole number, got 5\.5$"),
        (lambda: hs.losses.ArcFace(D, True), "^classes must be a whole number, got True$"),
        (lambda: MarginSoftmax(D, C, subcentres=1.5), r"^subcentres must be a whole number, got 1\.5$"),
        (lambda: hs.losses.SubcenterArcFace(D, C, k=1.5), r"^k must be a whole number, got 1\.5$"),
        (lambda: hs.losses.ArcFace(D, C, s=math.inf), r"^s must be greater than 0 and finite, got inf$"),
        (lambda: hs.losses.GASoftmax(D, C, s=math.inf), r"^s must be greater than 0 and finite, got inf$"),
        (lambda: Ramp(0, math.nan, length=2), r"^end must be a number, got nan$"),
        (lambda: Ramp(math.inf, 1.0, length=2), r"^start must be finite, got inf$"),
        (lambda: Ramp(0, 1.0, length=2.5), r"^length must be a whole number, got 2\.5$"),
        (lambda: Ramp(0, 1.0, milestones=(1, 2.5)), r"^milestones must be a whole number, got 2\.5$"),
        (lambda: LambdaAnnealer(base=math.inf), r"^base must be at least 0 and finite, got inf$"),
        (lambda: hs.losses.WSoftmax(D, C, k=0.5), r"^k is the steepness of g='sigmoid' .* 'cosine', got 0\.5$"),
        (lambda: hs.losses.GASoftmax(D, C, k=0.5), r"^k is the steepness of g='sigmoid' .* 'linear', got 0\.5$"),
        (lambda: hs.losses.Softmax(D, C, gradient="caffe"), r"^gradient 'caffe' needs unit_weights=True"),
        (
            lambda: hs.losses.SphereFaceR(D, C, feature_norm="none", s=30.0),
            "^s has no meaning with feature_norm='none'",
        ),
        (lambda: hs.losses.SphereFaceR(D, C, loss_weight=math.nan), r"^loss_weight must be greater than 0, got nan$"),
    ],
)
def test_what_has_no_meaning_is_refused(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 2, -3, 4, 5], r"^class_weights must be at least 0, got -3 for class 2$"),
        ([1.0, 2, 3, math.inf, 5], r"^class_weights must be finite, got inf for class 3$"),
        (np.array([1.0, math.nan, 3, 4, 5]), r"^class_weights must be finite, got nan for class 1$"),
        (torch.ones(4), r"^class_weights must have shape \(5,\), got \(4,\)$"),
        ("heavy", "^class_weights must be 5 numbers, one for each class"),
        ([[1.0], [1.0, 2.0]], "^class_weights must be 5 numbers, one for each class"),
    ],
)
def test_class_weights_that_are_none_are_named_by_their_class(weights, message):
    with pytest.raises(ArgumentError, match=message):
        hs.losses.CosFace(D, C, class_weights=weights)


def test_soft_labels_that_are_none_are_named_by_their_row():
    head = hs.losses.CosFace(D, C)
    labels = torch.full((6, C), 1 / C)
    labels[4] *= 2
    with pytest.raises(
        ArgumentError, match=r"^labels must .* in every row, got the sum 2 and the least 0\.4 in row 4$"
    ):
        head(X, labels)


@pytest.mark.parametrize("version", ["v0", "v1", "v2"])
def test_a_loss_weight_counts_for_every_feature_norm(version):
    """With the norm of the features there is no s to divide by."""
    for norm, divisor in (("none", 1.0), ("soft", 30.0), ("hard", 60.0)):
        heads = [
            build("sphereface-r", version=version, feature_norm=norm, pull=0.0, loss_weight=w) for w in (None, 6.0)
        ]
        plain, weighted = (head.double()(X.double(), Y).item() for head in heads)
        assert weighted == pytest.approx(plain * 6.0 / divisor, rel=1e-12)


def test_a_schedule_that_takes_the_place_of_a_number_is_where_the_head_is():
    head = hs.losses.CosFace(D, C).to("meta")
    head.set_margin(m=Ramp(0.0, 0.3, length=5))
    assert isinstance(head.m, Schedule) and head.m.steps.device.type == "meta"
    assert isinstance(head.weight, nn.Parameter)
