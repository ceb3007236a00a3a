"""Transforms of ``torch.func`` see what plain formulas have, and what moves with a value refuses them."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from hypersphere.energy import (
    alignment,
    batch_pairs,
    batch_versus_all,
    compressive_energy,
    energies,
    hyperspherical_energy,
    hyperspherical_uniformity_gap,
    preservation_loss,
    prototype_loss,
)
from hypersphere.errors import ArgumentError

SOURCE = torch.Generator().manual_seed(5)
W, ALONG, *MANY = torch.randn(5, 6, 5, generator=SOURCE, dtype=torch.float64)
MANY = torch.stack(MANY)
P = torch.randn(4, 5, generator=SOURCE, dtype=torch.float64)
LABELS = torch.tensor([0, 3, 3, 1])
CLASSES = torch.tensor([0, 1, 2, 0, 1, 2])
BETA = torch.arange(1.0, 7, dtype=torch.float64)


def plain(x, s=1.0, half_space=False, angular=False, beta=None):
    """Mean energy by nothing but the formula."""
    u = x / x.norm(dim=-1, keepdim=True)
    u = torch.cat([u, -u]) if half_space else u
    if beta is not None:
        u = u * beta.unsqueeze(1)
    off = ~torch.eye(len(u), dtype=torch.bool)
    i, j = off.nonzero(as_tuple=True)
    distance = torch.arccos((u[i] * u[j]).sum(1)) if angular else (u[i] - u[j]).norm(dim=1)
    if angular and half_space:
        opposite = (i - j).abs() == len(x)  # where the slope of the arc cosine is infinite
        cosines = torch.where(opposite, 0.0, (u[i] * u[j]).sum(1))
        distance = torch.where(opposite, math.pi, torch.arccos(cosines))
    return distance.pow(-s).mean() if s else -distance.log().mean()


PAIRS = [
    {},
    {"s": 0.0},
    {"half_space": True},
    {"angular": True},
    {"angular": True, "half_space": True, "s": 2.0},
    {"beta": BETA},
]


@pytest.mark.parametrize("options", PAIRS)
def test_derivatives_are_those_of_the_formula(options):
    options = {"s": 1.0, **options}
    ours = lambda x: hyperspherical_energy(x, **options)  # noqa: E731
    formula = lambda x: plain(x, **options)  # noqa: E731
    torch.testing.assert_close(torch.func.grad(ours)(W), torch.func.grad(formula)(W))
    torch.testing.assert_close(torch.func.hessian(ours)(W), torch.func.hessian(formula)(W))
    torch.testing.assert_close(torch.func.jvp(ours, (W,), (ALONG,))[1], torch.func.jvp(formula, (W,), (ALONG,))[1])
    each = torch.stack([torch.func.grad(formula)(x) for x in MANY])
    torch.testing.assert_close(torch.vmap(torch.func.grad(ours))(MANY), each)


FUNCTIONS = {
    "compressive_energy": lambda x: compressive_energy(x, P, 1.0),
    "preservation_loss": lambda x: preservation_loss(x, P),
    "preservation_loss angle": lambda x: preservation_loss(x, P, "angle"),
    "batch_versus_all": lambda x: batch_versus_all(x, LABELS),
    "batch_versus_all anchors": lambda x: batch_versus_all(x, LABELS, half_space=True, unique=True),
    "batch_pairs": lambda x: batch_pairs(x, LABELS),
    "alignment": lambda x: alignment(x, W.flip(0)),
    "prototype_loss": lambda x: prototype_loss(x, MANY[1, :3], CLASSES),
    "gap of features": lambda x: hyperspherical_uniformity_gap(x, MANY[1, :3], CLASSES),
    "gap of prototypes": lambda x: hyperspherical_uniformity_gap(W, x, CLASSES, within=0.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_can_be_transformed(name):
    function = FUNCTIONS[name]
    leaf = W.clone().requires_grad_()
    (slope,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad((slope * ALONG).sum(), leaf)
    torch.testing.assert_close(torch.func.grad(function)(W), slope.detach())
    torch.testing.assert_close(torch.func.jvp(function, (W,), (ALONG,))[1], (slope * ALONG).sum().detach())
    torch.testing.assert_close((torch.func.hessian(function)(W) * ALONG).sum((2, 3)), second)
    step = 1e-5 * ALONG
    torch.testing.assert_close(
        (torch.func.grad(function)(W + step) - torch.func.grad(function)(W - step)) / 2e-5, second, rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(torch.vmap(function)(MANY), torch.stack([function(x) for x in MANY]))


@pytest.mark.parametrize("name", ["mhp", "mhc", "ap-comhe", "adv-comhe"])
def test_what_moves_with_a_value_refuses_transforms_and_stays(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few dimensions
        member = energies.create(name, **({"dim": 4, "s": 1.0} if "comhe" in name else {}))
    member.prepare(W)
    held = {key: value.clone() for key, value in member.state_dict().items()}
    for call in (
        lambda: torch.func.grad(member)(W),
        lambda: torch.vmap(member)(MANY),
        lambda: torch.func.jvp(member, (W,), (ALONG,)),
    ):
        with pytest.raises(ArgumentError, match=r"in training mode.*call eval\(\) before"):
            call()
    for key, value in member.state_dict().items():
        torch.testing.assert_close(value, held[key], rtol=0, atol=0, equal_nan=True)


def test_what_is_drawn_is_drawn_once_for_all_of_a_batch():
    """Also for a first call that is transformed."""
    member = energies.create("rp-comhe", dim=4, s=1.0)
    found = torch.vmap(member)(MANY)
    assert torch.unique(found).numel() == 3
    (projections,) = (value for _, value in member.bank.named_buffers())
    wanted = [compressive_energy(x, projections, 1.0).mean() for x in MANY]
    torch.testing.assert_close(found, torch.stack(wanted))
