"""The gradient by class weights: through the division by their norms, or by unit vectors as in the authors' code."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import torch.nn.functional as F

import hypersphere as hs
from hypersphere.errors import ArgumentError

B, D, C = 7, 5, 4


def unit_names():
    for name in hs.losses.losses:
        if name not in ("gan", "triplet") and hs.losses.create(name, D, C).spec.unit_weights:
            yield name


def given(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, D, generator=generator, dtype=torch.float64)
    return x, torch.randint(C, (B,), generator=generator), torch.randn(B, C, generator=generator).double().softmax(1)


def by_weight(name, labels, x, weight, **options):
    head = hs.losses.create(name, D, C, **options).double()
    with torch.no_grad():
        head.weight.copy_(weight.repeat_interleave(head.subcentres, 0))
        head.weight += 0.1 * torch.arange(len(head.weight)).unsqueeze(1)
    loss = head(x, labels)
    loss.backward()
    return loss.item(), head.weight.detach(), head.weight.grad


@pytest.mark.parametrize("name", list(unit_names()))
def test_the_tangential_part_of_the_raw_gradient_is_that_through_the_norm(name):
    x, hard, soft = given()
    weight = torch.randn(C, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    kinds = [hard, soft] if hs.losses.create(name, D, C).takes_soft_labels else [hard]
    for labels, path in itertools.product(kinds, ("dense", "chunked")):
        loss, before, tangent = by_weight(name, labels, x, weight, path=path)
        raw_loss, units, raw = by_weight(name, labels, x, weight, path=path, weight_gradient="raw")
        assert raw_loss == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(units, F.normalize(before, dim=1), rtol=0, atol=1e-14)  # made so by the step
        along = (raw * units).sum(1, keepdim=True)
        tangential = (raw - along * units) / before.norm(dim=1, keepdim=True)
        torch.testing.assert_close(tangential, tangent, rtol=1e-9, atol=1e-12)
        assert float((tangent * before).sum(1).abs().max()) < 1e-12 and float(along.abs().max()) > 1e-6


def test_the_raw_gradient_is_that_of_the_products_with_unit_vectors():
    """As the authors' code has it: a linear layer whose rows were set to unit length, and no derivative of that."""
    x, labels, _ = given()
    weight = torch.randn(C, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    _, units, found = by_weight("cosface", labels, x, weight, s=10.0, m=0.35, weight_gradient="raw")
    rows = units.clone().requires_grad_()
    logits = 10.0 * (F.normalize(x) @ rows.T - 0.35 * F.one_hot(labels, C).double())
    F.cross_entropy(logits, labels).backward()
    torch.testing.assert_close(found, rows.grad, rtol=1e-10, atol=1e-13)
    _, units, found = by_weight("w-softmax", labels, x, weight, weight_gradient="raw")
    rows = units.clone().requires_grad_()
    F.cross_entropy(x @ rows.T, labels).backward()
    torch.testing.assert_close(found, rows.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", ["arcface", "subcenter-arcface", "cosface", "ga-softmax"])
def test_one_share_has_the_raw_gradient_of_its_label(name):
    x, hard, _ = given()
    weight = torch.randn(C, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    options = {"k": 1} if name == "subcenter-arcface" else {}
    found = [
        by_weight(name, labels, x, weight, weight_gradient="raw", **options)[2]
        for labels in (hard, F.one_hot(hard, C).double())
    ]
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


def test_evaluation_changes_no_weight():
    x, labels, _ = given()
    head = hs.losses.CosFace(D, C, weight_gradient="raw").double().eval()
    before = head.weight.detach().clone()
    head(x, labels)
    assert torch.equal(head.weight, before) and "weight_gradient='raw'" in repr(head)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hs.losses.CosFace(D, C, weight_gradient="x"), r"^weight_gradient must be one of 'tangent', 'raw'"),
        (lambda: hs.losses.Softmax(D, C, weight_gradient="raw"), r"^weight_gradient 'raw' needs unit_weights=True"),
        (lambda: hs.losses.CosFace(D, C, weight_gradient="raw", frozen=True), r"^weight_gradient must not be 'raw'"),
        (
            lambda: hs.losses.CosFace(D, C, weight_gradient="raw", rotation="cayley"),
            r"^weight_gradient must not be 'raw' for class weights that are not trained",
        ),
    ],
)
def test_where_it_has_no_meaning_it_is_refused(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


@pytest.mark.parametrize("option", [{"weight_gradient": "raw"}, {"gradient": "caffe"}], ids=str)
def test_losses_that_are_named_have_it_or_refuse_it(option):
    """The message of a loss that compares no directions names others that do, and takes its own side."""
    with pytest.raises(ArgumentError) as caught:
        hs.losses.create("softmax", D, C, **option)
    names = {name for name in hs.losses.losses if re.search(rf"(?<![\w-]){name}(?![\w-])", str(caught.value))}
    having = {"normface", "cosface", "arcface", "a-softmax"}
    assert having <= names
    for name in names:
        if name in having:
            assert hs.losses.create(name, D, C, **option).spec.unit_weights
        else:
            with pytest.raises(ArgumentError, match="needs unit_weights=True"):
                hs.losses.create(name, D, C, **option)


@pytest.mark.parametrize("path", ["dense", "chunked"])
def test_near_the_centre_the_raw_gradient_keeps_its_digits(path):
    """By features it is the other one; by the target's weight it has sin(angle + m) / sin(angle) of an exact angle."""
    for angle in (1e-2, 1e-3):
        x = torch.tensor([[1.0, angle, 0.0]], dtype=torch.float64)
        weight = torch.eye(3, dtype=torch.float64)
        exact = by_precision(torch.float64, x, weight, path)
        for found, expected in zip(by_precision(torch.float32, x, weight, path), exact, strict=True):
            assert float((found.double() - expected).norm() / expected.norm()) < 2e-3


def by_precision(dtype, x, weight, path):
    head = hs.losses.ArcFace(3, 3, s=8.0, path=path, weight_gradient="raw").to(dtype)
    with torch.no_grad():
        head.weight.copy_(weight)
    leaf = x.detach().to(dtype, copy=True).requires_grad_()
    head(leaf, torch.tensor([0])).backward()
    return leaf.grad, head.weight.grad
