"""Near pairs keep their digits in every type, form and order of the derivative."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

from hypersphere.energy import (
    batch_pairs,
    batch_versus_all,
    chords,
    energies,
    hyperspherical_energy,
    preservation_loss,
)
from hypersphere.energy.minibatch import cross_sums
from hypersphere.energy.pairs import pair_sums
from hypersphere.energy.potentials import Riesz, Softplus

BETA = torch.tensor([1.5, 1.5, 0.7, 1.0, 2.0])


def near_pair(dtype, gap, opposite=False):
    """Five vectors, of which the first two are that far apart, or nearly opposite."""
    x = torch.randn(5, 7, dtype=torch.float64)
    away = x[2] - (x[2] @ x[0]) / (x[0] @ x[0]) * x[0]
    x[1] = 3 * (x[0] + gap * x[0].norm() * away / away.norm()) * (-1 if opposite else 1)
    return x.to(dtype)


def reference(x, s=2.0, half_space=False, beta=None, eps=0.0):
    """Sum over ordered pairs and its gradient in 80-bit numbers, from differences."""
    w = x.numpy().astype(np.longdouble)
    squared = (w**2).sum(1, keepdims=True) + np.longdouble(eps)
    u = w / np.sqrt(squared)
    gaps = eps / squared[:, 0]
    lengths = np.ones(len(w), dtype=np.longdouble) if beta is None else beta.numpy().astype(np.longdouble)
    total, by_u = np.longdouble(0), np.zeros_like(u)
    for sign in (1, -1) if half_space else (1,):
        for i in range(len(w)):
            for j in range(len(w)):
                if i == j:
                    continue
                q = ((u[i] - sign * u[j]) ** 2).sum() + gaps[i] + gaps[j]
                q = (lengths[i] - lengths[j]) ** 2 + lengths[i] * lengths[j] * q
                total += q ** (-s / 2)
                # Less what is along u[i], which has no part in the gradient where lengths are 1.
                force = sign * u[j] - (u[i] if eps == 0 else 0)
                by_u[i] += 2 * s * q ** (-s / 2 - 1) * lengths[i] * lengths[j] * force
    if half_space:
        own = (4 - 2 * gaps) * lengths**2
        total = 2 * total + 2 * (own ** (-s / 2)).sum()
        by_u = 2 * by_u - (4 * s * lengths**2 * own ** (-s / 2 - 1))[:, None] * u * (1 if eps else 0)
    by_w = (by_u - (by_u * u).sum(1, keepdims=True) * u) / np.sqrt(squared)
    return float(total), torch.from_numpy(by_w.astype(np.float64))


@pytest.mark.parametrize(
    ("dtype", "gap"),
    [(torch.float32, 1e-2), (torch.float32, 1e-3), (torch.float32, 3e-4), (torch.float64, 1e-2), (torch.float64, 3e-6)],
)
@pytest.mark.parametrize("options", [{}, {"half_space": True}, {"beta": BETA}, {"half_space": True, "beta": BETA}])
@pytest.mark.parametrize("opposite", [False, True])
def test_near_pairs_keep_their_digits_with_and_without_a_graph(dtype, gap, options, opposite):
    x = near_pair(dtype, gap, opposite)
    value, slope = reference(x, **options)
    leaf = x.clone().requires_grad_()
    found = hyperspherical_energy(leaf, 2.0, reduction="sum", **options)
    (plain,) = torch.autograd.grad(found, leaf, retain_graph=True)
    (kept,) = torch.autograd.grad(found, leaf, create_graph=True)
    tolerance = 10 * torch.finfo(dtype).eps / gap + (2e-6 if dtype == torch.float32 else 1e-12)
    assert found.item() == pytest.approx(value, rel=tolerance)
    for gradient in (plain, kept.detach()):
        assert float((gradient.double() - slope).norm() / slope.norm()) < 3 * tolerance


@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize("gap", [1.2e-4, 2e-4, 1e-2])
@pytest.mark.parametrize("s", [0.0, 1.0])
def test_angles_of_near_pairs_keep_their_digits(s, gap, half_space):
    """Down to the least chord of float32, with and without a graph."""
    x = near_pair(torch.float32, gap)
    slopes = []
    for dtype, graph in ((torch.float64, False), (torch.float32, False), (torch.float32, True)):
        leaf = x.to(dtype).requires_grad_()
        found = hyperspherical_energy(leaf, s, angular=True, half_space=half_space)
        slopes.append(torch.autograd.grad(found, leaf, create_graph=graph)[0].detach())
    for slope in slopes[1:]:
        assert float((slope.double() - slopes[0]).norm() / slopes[0].norm()) < 1e-5 + 1e-6 / gap


@pytest.mark.parametrize(
    "energy",
    [
        lambda x: hyperspherical_energy(x, 0.0, angular=True),
        lambda x: pair_sums(x[None], Riesz(1.0, True, half_turns=True, offset=1e-4))[0],
        lambda x: batch_versus_all(x, torch.tensor([0, 1]), angular=True),
        lambda x: batch_pairs(x, torch.tensor([0, 1])),
    ],
)
@pytest.mark.parametrize("gap", [1e-2, 1e-3, 1e-4, 3e-5])
def test_angles_of_opposite_pairs_keep_their_digits(energy, gap):
    """Near half a turn, where 4 less the squared chord has lost what the slope of an angle divides by."""
    x = near_pair(torch.float32, gap, opposite=True)[:3]
    found = []
    for dtype, graph in ((torch.float64, False), (torch.float32, False), (torch.float32, True)):
        leaf = x.to(dtype, copy=True).requires_grad_()
        value = energy(leaf)
        slope = torch.autograd.grad(value, leaf, create_graph=graph)[0].detach().double()
        found.append((value.item(), slope[:2]))
    for value, slope in found[1:]:
        assert value == pytest.approx(found[0][0], rel=1e-6)
        assert float((slope - found[0][1]).norm() / found[0][1].norm()) < 1e-5 + 3e-7 / gap


def test_the_angle_of_an_opposite_pair_has_the_slope_of_the_arc():
    """In float64, of one pair, whose gradient is written out."""
    x = near_pair(torch.float64, 1e-5, opposite=True)[:2]
    u = [row / row.norm() for row in x]
    away = -u[1] + (u[1] @ u[0]) * u[0]
    leaf = x.clone().requires_grad_()
    value = hyperspherical_energy(leaf, 1.0, angular=True)
    assert value.item() == pytest.approx(1 / (math.pi - math.atan(1e-5)), rel=1e-14)
    wanted = -away / away.norm() * value.item() ** 2 / x[0].norm()
    for graph in (False, True):
        (slope,) = torch.autograd.grad(value, leaf, create_graph=graph, retain_graph=True)
        assert float((slope[0].detach() - wanted).norm() / wanted.norm()) < 1e-10


def test_angles_of_shortened_vectors_with_their_own_images_keep_their_digits():
    """Also those of long vectors, which hardly are shortened, and whose images are nearly opposite."""
    x = torch.randn(5, 7)
    x *= torch.logspace(-1, 2, 5)[:, None] / x.norm(dim=1, keepdim=True)
    slopes = []
    for dtype, graph in ((torch.float64, False), (torch.float32, False), (torch.float32, True)):
        leaf = x.to(dtype).requires_grad_()
        found = hyperspherical_energy(leaf, 0.0, angular=True, half_space=True, eps=1e-4)
        slopes.append(torch.autograd.grad(found, leaf, create_graph=graph)[0].detach().double())
    for slope in slopes[1:]:  # row by row, as gradients by long vectors are small
        assert float(((slope - slopes[0]).norm(dim=1) / slopes[0].norm(dim=1)).max()) < 1e-5


def test_a_second_derivative_of_a_near_pair_keeps_its_digits():
    x, along = near_pair(torch.float32, 1e-2), torch.randn(5, 7)
    found = []
    for dtype in (torch.float64, torch.float32):
        leaf = x.to(dtype).requires_grad_()
        (grad,) = torch.autograd.grad(hyperspherical_energy(leaf), leaf, create_graph=True)
        found += torch.autograd.grad((grad * along).sum(), leaf)
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 3e-4


def test_shortened_directions_keep_their_digits():
    x = near_pair(torch.float32, 1e-3)
    value, slope = reference(x, eps=1e-6)
    leaf = x.clone().requires_grad_()
    found = hyperspherical_energy(leaf, reduction="sum", eps=1e-6)
    for graph in (False, True):
        (grad,) = torch.autograd.grad(found, leaf, create_graph=graph, retain_graph=True)
        assert found.item() == pytest.approx(value, rel=1e-3)
        assert float((grad.detach().double() - slope).norm() / slope.norm()) < 3e-3


@pytest.mark.parametrize(("dtype", "least", "rest"), [(torch.float32, 1e-15, 1e-6), (torch.float64, 1e-21, 1e-14)])
@pytest.mark.parametrize("few", [10**6, 0])
@pytest.mark.parametrize("mirrored", [False, True])
def test_all_ways_to_a_chord_agree(dtype, least, rest, few, mirrored, monkeypatch):
    monkeypatch.setattr(chords, "FEW_NEAR", few)
    x = torch.randn(2, 30, 12, dtype=torch.float64)
    x[:, 15:] = (x[:, :15] + torch.logspace(-6, 0, 15, dtype=torch.float64)[:, None] * x[:, 15:]) * (1 - 2 * mirrored)
    units = chords.directions(x, 0.0)[0].to(dtype)
    rows, columns = units[:, :20], units[:, 7:]
    wide = units.numpy().astype(np.longdouble)
    sign = 1 - 2 * mirrored
    wanted = ((wide[:, :20, None] - sign * wide[:, None, 7:]) ** 2).sum(-1)
    for found in (
        chords.squared_chords(rows, columns, mirrored=mirrored, look=True),
        chords.squared_chords(rows, columns, mirrored=mirrored),
        chords.smooth_chords(rows, columns, mirrored=mirrored),
        torch.vmap(lambda a, b: chords.squared_chords(a[None], b[None], mirrored=True))(rows, columns),
    ):
        q = found[int(mirrored)].reshape(2, 20, 23).numpy()
        near = wanted < chords.NEAR
        assert near.sum() > 10
        error = np.abs(q - wanted)
        assert (error[near] <= least + rest * wanted[near]).all()
        assert error[~near].max() <= 2 * rest


def test_parts_of_split_products_are_exact_where_float64_is_slow():
    units = chords.directions(torch.randn(1, 40, 600), 0.0)[0]
    units = torch.cat([units, units + 1e-4 * torch.randn_like(units)], 1)
    lengths, products = chords._split(units, units)
    double = units.double()
    wanted = (double.unsqueeze(2) - double.unsqueeze(1)).square().sum(-1)
    found = (lengths[0] - products[0]) + (lengths[1] - products[1])
    assert float((found - wanted).abs().max()) < 2e-7
    assert float((found - wanted)[wanted < 1e-4].abs().max()) < 3e-9


def test_anchors_near_a_row_keep_their_digits():
    x = near_pair(torch.float32, 1e-3)
    own, sums = torch.arange(5), []
    for dtype in (torch.float64, torch.float32):
        leaf = x.to(dtype).requires_grad_()
        weights = torch.rand(5, generator=torch.Generator().manual_seed(1)).to(dtype)
        each = cross_sums(leaf[None], leaf[None], own, Riesz(1.5))
        together = cross_sums(leaf[None], leaf[None], own, Riesz(1.5), weights=weights[None])
        torch.testing.assert_close((each * weights).sum(1), together, rtol=1e-6, atol=0)
        for total in ((each * weights).sum(), together.sum()):
            for graph in (False, True):
                sums.append(torch.autograd.grad(total, leaf, create_graph=graph, retain_graph=True)[0].detach())
    for wide, narrow in zip(sums[:4], sums[4:], strict=True):
        torch.testing.assert_close(wide, sums[0], rtol=1e-8, atol=1e-6)
        assert float((narrow - wide).norm() / wide.norm()) < 1e-3
    (pairs,) = pair_sums(x[None].double(), Riesz(1.5))
    torch.testing.assert_close(cross_sums(x[None].double(), x[None].double(), own, Riesz(1.5)).sum(), pairs)


@pytest.mark.parametrize("eps", [0.0, 1e-4])
@pytest.mark.parametrize("norm", [1e-25, 1e-15, 1e-13, 1e13, 1e18, 1e25])
def test_gradients_that_can_be_differentiated_take_every_norm(norm, eps):
    """Squares of a norm may be numbers of float32 whose powers, of which derivatives are made, are none."""
    x, slopes = torch.randn(4, 5), []
    x[0] *= norm
    for dtype, graph in ((torch.float64, False), (torch.float32, False), (torch.float32, True)):
        leaf = x.to(dtype, copy=True).requires_grad_()
        total = pair_sums(leaf[None], Riesz(), eps=eps).sum()
        slopes.append(torch.autograd.grad(total, leaf, create_graph=graph)[0].detach().double())
    for slope in slopes[1:]:
        assert float(((slope - slopes[0]).norm(dim=1) / slopes[0].norm(dim=1)).max()) < 1e-5


def test_orthoreg_sums_all_ordered_pairs():
    x = torch.randn(1, 5, 3, dtype=torch.float64)
    units = x[0] / x[0].norm(dim=1, keepdim=True)
    cosines = (units @ units.T)[~torch.eye(5, dtype=torch.bool)]
    wanted = (1 + (10 * (cosines - 1)).exp()).log().sum()
    torch.testing.assert_close(pair_sums(x, Softplus(10.0))[0], wanted)


# Norms.

NORMS = [(1e-30,), (1e25,), (1e-30, 1e12, 1.0, 1e-25, 1e30, 1e20)]


@pytest.mark.parametrize("norms", NORMS)
@pytest.mark.parametrize("name", sorted(energies))
def test_float32_takes_every_norm_that_it_has(name, norms):
    """Value and gradient are those of float64, or infinite where float32 has no such number; never something else."""
    if name == "bp-comhe" and len(norms) > 1:
        return  # mixtures of its neurons are all the longest one
    options = {"dim": 4, "s": 1.0} if "dim" in {option.name for option in energies[name].options} else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few dimensions
        member = energies.create(name, **options).eval()
    lengths = torch.tensor(norms, dtype=torch.float64).unsqueeze(1)
    w = (lengths * torch.randn(6, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).float()
    found = []
    for dtype in (torch.float64, torch.float32):
        leaf = w.to(dtype).requires_grad_()
        value = member(leaf)
        found += [value.detach().double(), *torch.autograd.grad(value, leaf)]
    value, slope, near, near_slope = found
    if value > 1e38:
        assert near == math.inf
    else:
        torch.testing.assert_close(near, value, rtol=1e-5, atol=1e-6)
        size = slope.norm(dim=1)
        error = (near_slope.double() - slope).norm(dim=1) / size
        assert (error < 1e-3)[(size > 1e-35) & (size < 1e38)].all()


@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1e9, 1e15, 1e18])
@pytest.mark.parametrize("name", ["orthonormal", "orthogonal", "srip"])
def test_deviations_are_right_where_their_squares_are_not_numbers(name, shape, scale):
    member = energies.create(name, squared=False)
    w = (scale * torch.randn(shape, dtype=torch.float64)).float()
    values, slopes = zip(
        *(value_and_slope(member, w.to(dtype)) for dtype in (torch.float64, torch.float32)), strict=True
    )
    torch.testing.assert_close(values[1].double(), values[0], rtol=2e-5, atol=0)
    if scale < 1e12:
        torch.testing.assert_close(slopes[1].double(), slopes[0], rtol=1e-3, atol=1e-4 * float(slopes[0].abs().max()))


def value_and_slope(member, w):
    leaf = w.clone().requires_grad_()
    value = member(leaf)
    return value.detach(), *torch.autograd.grad(value, leaf)


def test_functions_take_every_norm_too():
    w = torch.randn(6, 5, dtype=torch.float64).float()
    labels = torch.tensor([0, 3, 3])
    for function in (
        lambda x: hyperspherical_energy(x, 1, half_space=True),
        lambda x: hyperspherical_energy(x, 1, beta=torch.arange(1.0, 7)),
        lambda x: batch_versus_all(x, labels),
        lambda x: batch_pairs(x, labels),
        lambda x: preservation_loss(x, torch.eye(5)[:3]),
    ):
        for scale in (1e-25, 1e25):
            torch.testing.assert_close(function(w * scale), function(w), rtol=1e-5, atol=1e-6)


def test_the_jitter_of_a_determinant_is_what_was_given():
    """The determinant of ones plus jitter is the jitter to the power n - 1, times the sum of n and jitter."""
    same = torch.ones(3, 2, dtype=torch.float64)
    wanted = -math.log((3 + 1e-6) * 1e-6**2)
    assert energies.create("mgd")(same).item() == pytest.approx(wanted, rel=1e-11)
