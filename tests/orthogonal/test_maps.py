"""Orthogonal maps against published numbers, plain loops, central differences, torch, geotorch and scipy."""

import dataclasses
import itertools
import math
import types
from fractions import Fraction

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils.parametrizations import orthogonal as torch_orthogonal
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.precision import float32_products
from hypersphere import geometry
from hypersphere.errors import ArgumentError
from hypersphere.geometry import exact_products, tf32_products
from hypersphere.orthogonal import algebra
from hypersphere.orthogonal.maps import (
    Map,
    canonical,
    cayley,
    create,
    exponential,
    givens,
    gram_schmidt,
    householder,
    householder_product,
    inverse_cayley,
    loewdin,
    maps,
    masked,
    orthogonality_error,
    skew,
    spd,
    unconstrained,
)

P3 = torch.tensor([[2, -1, 0.5], [0.3, 1.5, -0.7], [-0.4, 0.8, 1.2]], dtype=torch.float64)
G3 = torch.tensor([[0.1, -0.2, 0.3], [0.4, 0.5, -0.6], [-0.7, 0.8, 0.9]], dtype=torch.float64)
W3 = torch.tensor([[0, 0.3, -0.2], [0, 0, 0.5], [0, 0, 0]], dtype=torch.float64)

# Every orthogonal map and method that is exact, and those of the iterations with enough steps for any test matrix.
EXACT = {
    "cayley": create("cayley"),
    "cayley newton": create("cayley", method="newton"),
    "gram_schmidt": create("gram_schmidt"),
    "gram_schmidt rows": create("gram_schmidt", orientation="rows"),
    "gram_schmidt newton": create("gs", method="newton"),
    "householder": create("householder"),
    "householder newton": create("hr", form="newton"),
    "householder product": create("hr", form="product"),
    "loewdin": create("loewdin"),
    "loewdin newton": create("ls", method="newton", steps=12),
    "exponential": create("exponential"),
    "exponential fixed": create("exp", max_norm=8.0),
    "givens": create("givens"),
}
NEAR = {"loewdin newton-schulz": create("ls", method="newton-schulz", steps=12)}  # of matrices near orthogonal ones
APPROXIMATE = {
    "cayley neumann": create("cp", method="neumann"),
    "cayley neumann 3": create("cp", method="neumann", terms=3),
}
CONTROLS = {
    "unconstrained": create("unconstrained"),
    "spd": create("spd"),
    **{f"masked {s}": create("masked", structure=s) for s in ("upper", "lower", "banded", "symmetric", "skew")},
    "masked hessenberg": create("masked", structure="upper_hessenberg"),
    "masked lower hessenberg": create("masked", structure="lower_hessenberg"),
}
ALL = EXACT | NEAR | APPROXIMATE | CONTROLS
WARM = {name: m for name, m in EXACT.items() if m.warm_starts}


def close(found, expected, tolerance=1e-10):
    expected = torch.as_tensor(np.asarray(expected), dtype=found.dtype)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance, found


class Count(TorchDispatchMode):
    """Counts products of matrices, not of those with a few vectors."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        self.number += name in ("mm", "bmm", "baddbmm", "addmm") and args[-1].shape[-1] != 8
        return func(*args, **(kwargs or {}))


def random_orthogonal(d, batch=(), dtype=torch.float64):
    return torch.linalg.qr(torch.randn(*batch, d, d, dtype=dtype))[0]


def near_orthogonal(d, batch=(), dtype=torch.float64):
    """Singular values between about 0.6 and 1.4, as the iteration by products wants them."""
    U, V = random_orthogonal(d, batch, dtype), random_orthogonal(d, batch, dtype)
    return U @ torch.diag_embed(0.6 + 0.8 * torch.rand(*batch, d, dtype=dtype)) @ V


def argument(name, d, batch=(), dtype=torch.float64):
    return near_orthogonal(d, batch, dtype) if name in NEAR else torch.randn(*batch, d, d, dtype=dtype) * 0.3


def defect(R):
    return float((R.mT @ R - torch.eye(R.shape[-1], dtype=R.dtype)).abs().max())


# ------------------------------------------------------------------------------------------- published numbers


def test_published_gram_schmidt():
    expected = [
        [0.97014250015, -0.068518870983, 0.23265574081],
        [0.14552137502, 0.93185664537, -0.33236534401],
        [-0.19402850003, 0.35629812911, 0.91400469603],
    ]
    close(gram_schmidt(P3), expected)
    close(householder(P3), expected)
    rows = [
        [0.87287156094, -0.43643578047, 0.21821789024],
        [0.48775731412, 0.79297968247, -0.36506989155],
        [-0.013712790262, 0.42509649813, 0.9050441573],
    ]
    close(gram_schmidt(P3, orientation="rows"), rows)


def test_published_householder_of_negative_determinant():
    expected = [
        [-0.50702012656, 0.82994090002, -0.23265574081],
        [0.76053018985, 0.55778769118, 0.33236534401],
        [0.40561610125, -0.0084257959393, -0.91400469603],
    ]
    close(householder(P3[:, [1, 0, 2]]), expected)


@pytest.mark.parametrize(("method", "steps"), [("svd", None), ("newton", None), ("newton-schulz", 20)])
def test_published_loewdin(method, steps):
    expected = [
        [0.92445212156, -0.27070709765, 0.2685254964],
        [0.3625249164, 0.84226453869, -0.39895630319],
        [-0.11816920043, 0.46616318403, 0.87677130765],
    ]
    close(loewdin(P3, method, steps), expected)


def test_published_newton_schulz_after_five_steps():
    expected = [
        [0.92444720153, -0.27071476076, 0.2685156604],
        [0.36251984578, 0.84225776371, -0.39896174161],
        [-0.11817906304, 0.46614622722, 0.87674491313],
    ]
    X = P3 / P3.norm()
    for _ in range(5):  # the steps as they were published; those of the map are scaled, and have converged by then
        X = 1.5 * X - 0.5 * X @ X.mT @ X
    close(X, expected)
    assert (loewdin(P3, "newton-schulz", 5, "frobenius") - loewdin(P3)).abs().max() < (X - loewdin(P3)).abs().max() / 10


def test_published_canonical():
    expected = [
        [0.36402711122, 0.26087767283, 0.89410687399],
        [0.25914373515, 0.89369671101, 0.36626590512],
        [0.89461096955, 0.36503291433, 0.25772501746],
    ]
    close(canonical(P3).abs(), expected)
    R = canonical(P3)
    assert defect(R) < 1e-12
    images = R.mT @ P3  # diag(sigma) V^T: its rows are orthogonal, with the singular values as lengths
    lengths = np.linalg.svd(P3.numpy(), compute_uv=False)[::-1]
    close(images @ images.mT, np.diag(lengths**2), 1e-10)


def test_published_cayley_and_exponential():
    expected = [
        [0.8115942029, 0.57971014493, -0.072463768116],
        [-0.28985507246, 0.50724637681, 0.8115942029],
        [0.50724637681, -0.63768115942, 0.57971014493],
    ]
    close(cayley(W3), expected)
    close(cayley(W3, "newton"), expected)
    expected = [
        [0.93703243728, 0.32979433769, -0.11491695394],
        [-0.23292116428, 0.83531560521, 0.497991537],
        [0.26022671405, -0.43986763296, 0.85953389856],
    ]
    close(exponential(W3), expected)


def test_published_neumann():
    close(cayley(W3, "neumann", 3), [[0.7894, 0.534, -0.005], [-0.21, 0.4492, 0.7172], [0.491, -0.5228, 0.5302]], 1e-12)
    errors = [float(orthogonality_error(cayley(W3, "neumann", k))) for k in (1, 2, 3, 4, 8)]
    expected = [0.73843950779, 0.044802800389, 0.21877914842, 0.0064695243761, 0.0001348983818]
    assert errors == pytest.approx(expected, rel=1e-9)


def test_published_blocks_of_four_in_a_batch():
    P = torch.zeros(2, 4, 4, dtype=torch.float64)
    rows, columns = torch.triu_indices(4, 4, 1)
    P[0, rows, columns] = torch.tensor([0.1, -0.2, 0.3, 0.4, -0.5, 0.6], dtype=torch.float64)
    P[1, rows, columns] = torch.tensor([-0.3, 0.25, 0.1, -0.05, 0.2, 0.15], dtype=torch.float64)
    first = [
        [0.84721352536, 0.39448966813, -0.3130870382, 0.16906700063],
        [0.085577123774, 0.55499895638, 0.77645585473, -0.28595282822],
        [0.020872469213, -0.10853683991, 0.40889167188, 0.90586516385],
        [-0.52389897725, 0.72427468169, -0.36318096431, 0.26278438739],
    ]
    second = [
        [0.72121212121, -0.52121212121, 0.43636363636, 0.13333333333],
        [0.49696969697, 0.7696969697, -0.024242424242, 0.4],
        [-0.43636363636, 0.1696969697, 0.84242424242, 0.26666666667],
        [-0.20606060606, -0.32727272727, -0.31515151515, 0.86666666667],
    ]
    close(cayley(P), [first, second])


def test_published_spd():
    close(spd(P3), [[4, 0.6, -0.8], [0.6, 2.34, 1.08], [-0.8, 1.08, 2.24]], 1e-12)


def gradient(function, P, G=G3):
    P = P.clone().requires_grad_()
    return torch.autograd.grad((function(P) * G).sum(), P)[0]


@pytest.mark.parametrize("method", ["solve", "newton"])
def test_published_gradient_of_cayley(method):
    found = gradient(create("cayley", method=method), W3)
    close(found[torch.triu_indices(3, 3, 1).unbind()], [-0.64524259609, 1.1451375761, -2.5440033606], 1e-9)
    assert (found.tril() == 0).all()


@pytest.mark.parametrize(("method", "steps"), [("svd", None), ("newton", None), ("newton-schulz", 14)])
def test_published_gradient_of_loewdin(method, steps):
    expected = [
        [-0.052485470457, 0.027517195743, 0.20843236661],
        [0.085008831676, -0.068614074044, -0.067609865065],
        [-0.14980625116, 0.13995163894, -0.094600251869],
    ]
    close(gradient(create("loewdin", method=method, steps=steps), P3), expected, 1e-9)


def test_published_gradient_of_gram_schmidt():
    expected = [
        [-0.055482806678, 0.10328523601, 0],
        [0.23823279486, -0.14755033715, 0],
        [-0.09873943725, 0.40576342717, 0],
    ]
    found = gradient(gram_schmidt, P3)
    close(found, expected)
    assert (found[:, 2] == 0).all()


def test_gradients_at_the_start_are_their_closed_forms():
    identity = torch.eye(3, dtype=torch.float64)
    close(gradient(gram_schmidt, identity), (G3 - G3.mT).tril(-1), 1e-12)
    close(gradient(loewdin, identity), (G3 - G3.mT) / 2, 1e-12)
    close(gradient(cayley, 0 * identity), 2 * (G3 - G3.mT).triu(1), 1e-12)
    close(gradient(exponential, 0 * identity), (G3 - G3.mT).triu(1), 1e-12)
    close(gradient(givens, 0 * identity), (G3.mT - G3).triu(1), 1e-12)
    close(gradient(householder, identity), (G3 - G3.mT).tril(-1), 1e-12)  # d = 3: all signs are plus


# ------------------------------------------------------------------------------------------- plain references


def reference_gram_schmidt(P):
    columns = []
    for u in P.T:
        t = u - sum((e @ u) * e for e in columns)
        t = t - sum((e @ t) * e for e in columns)
        columns.append(t / np.linalg.norm(t))
    return np.stack(columns, 1)


def reference_householder(P):
    """d - 1 reflections with the stable reflector of Golub and Van Loan."""
    A, Q, d = P.copy(), np.eye(len(P)), len(P)
    for k in range(d - 1):
        x = A[k:, k]
        sigma = x[1:] @ x[1:]
        mu = math.sqrt(x[0] ** 2 + sigma)
        first = x[0] - mu if x[0] <= 0 else -sigma / (x[0] + mu)
        v = np.concatenate([[1.0], x[1:] / first])
        H = np.eye(d)
        H[k:, k:] -= 2 / (v @ v) * np.outer(v, v)
        A, Q = H @ A, Q @ H
    return Q


def reference_givens(angles):
    d = len(angles)
    R = np.eye(d)
    for i, j in itertools.combinations(range(d), 2):
        G, (c, s) = np.eye(d), (math.cos(angles[i, j]), math.sin(angles[i, j]))
        G[i, i] = G[j, j] = c
        G[i, j], G[j, i] = -s, s
        R = R @ G
    return R


@pytest.mark.parametrize("d", [1, 2, 3, 7, 20])
def test_maps_are_what_plain_loops_give(d):
    P = torch.randn(d, d, dtype=torch.float64)
    W = P.numpy() * np.triu(np.ones((d, d)), 1)
    W = W - W.T
    identity = np.eye(d)
    close(gram_schmidt(P), reference_gram_schmidt(P.numpy()), 1e-9)
    close(gram_schmidt(P, "rows"), reference_gram_schmidt(P.numpy().T).T, 1e-9)
    close(householder(P), reference_householder(P.numpy()), 1e-9)
    close(givens(P), reference_givens(P.numpy()), 1e-12)
    close(loewdin(P), scipy.linalg.polar(P.numpy())[0], 1e-10)
    close(exponential(P), scipy.linalg.expm(W), 1e-10)
    close(cayley(P), (identity + W) @ np.linalg.inv(identity - W), 1e-10)
    close(spd(P), np.tril(P) @ np.tril(P).T, 1e-12)
    reflected = identity
    for v in (np.tril(P, -1) + identity).T:
        reflected = reflected @ (identity - 2 * np.outer(v, v) / (v @ v))
    close(householder(P, "product"), reflected, 1e-11)


@pytest.mark.parametrize("m", [1, 3, 9])
def test_products_of_reflections_are_those_of_torch(m):
    V = torch.randn(2, 9, m, dtype=torch.float64).tril(-1)
    tau = 2 / (1 + V.square().sum(-2))
    full = torch.cat([V, torch.zeros(2, 9, 9 - m, dtype=V.dtype)], -1)  # torch returns the first m columns only
    expected = torch.linalg.householder_product(full, torch.nn.functional.pad(tau, (0, 9 - m)))
    found = householder_product(V + torch.eye(9, m, dtype=V.dtype))
    close(found, expected, 1e-12)
    close(householder_product(5 * (V + torch.eye(9, m, dtype=V.dtype))), expected, 1e-12)


def test_reflections_in_equal_pairs_and_in_zero_are_the_identity():
    v = torch.randn(5, 2, dtype=torch.float64)
    close(householder_product(v[:, [0, 0, 1, 1]]), np.eye(5), 1e-12)
    V = torch.stack([v[:, 0], torch.zeros(5, dtype=torch.float64)], 1)
    close(householder_product(V), householder_product(v[:, :1]), 1e-12)
    found = gradient(householder_product, V, torch.randn(5, 5, dtype=torch.float64))
    assert found.isfinite().all()
    assert (found[:, 1] == 0).all()
    assert (found[:, 0] != 0).all()


@pytest.mark.parametrize(
    "structure", ["upper", "lower", "banded", "symmetric", "skew", "upper_hessenberg", "lower_hessenberg"]
)
def test_structures(structure):
    d, bandwidth = 6, 2
    P = torch.randn(d, d)
    keep = {
        "upper": lambda i, j: i <= j,
        "lower": lambda i, j: i >= j,
        "banded": lambda i, j: abs(i - j) <= bandwidth,
        "upper_hessenberg": lambda i, j: i <= j + 1,
        "lower_hessenberg": lambda i, j: j <= i + 1,
    }
    R = masked(P, structure, bandwidth)
    free = create("masked", structure=structure, bandwidth=bandwidth).free(d)
    if structure in keep:
        mask = torch.tensor([[keep[structure](i, j) for j in range(d)] for i in range(d)])
        assert torch.equal(R, P * mask)
        assert free == int(mask.sum())
    else:
        assert torch.equal(R.mT, R if structure == "symmetric" else -R)
        assert torch.equal(R.triu(1), P.triu(1))
        assert free == int(
            (torch.autograd.functional.jacobian(lambda x: masked(x, structure), P) != 0).any(0).any(0).sum()
        )


def test_other_implementations_of_the_same_maps():
    """Torch and geotorch read the lower triangle, and torch's Cayley map halves it."""
    d = 5
    X = torch.randn(d, d, dtype=torch.float64)
    for kind, ours in (
        ("matrix_exp", lambda x: exponential(-x.mT)),
        ("cayley", lambda x: cayley(-x.mT / 2)),
        ("householder", lambda x: householder(x, "product")),
    ):
        layer = torch.nn.Linear(d, d, bias=False, dtype=torch.float64)
        torch_orthogonal(layer, orthogonal_map=kind, use_trivialization=False)
        inner = layer.parametrizations.weight
        free = X.clone()
        if kind == "householder":
            free.diagonal().fill_(1)  # torch keeps column signs there
        inner.original.data.copy_(free)
        close(ours(free), layer.weight.detach(), 1e-10)
        theirs = torch.autograd.grad((layer.weight * torch.arange(25.0).reshape(5, 5)).sum(), inner.original)[0]
        mine = gradient(ours, free, torch.arange(25.0, dtype=torch.float64).reshape(5, 5))
        if kind == "householder":
            theirs = theirs.tril(-1)
        close(mine, theirs.detach(), 1e-8)
    geotorch = pytest.importorskip("geotorch")
    for kind, ours in (("expm", exponential), ("cayley", lambda x: cayley(x / 2))):
        rotations = geotorch.SO(torch.Size([d, d]), triv=kind, lower=False).double()
        rotations.base.copy_(torch.eye(d))
        close(ours(X), rotations(X), 1e-10)
        close(gradient(ours, X, X.mT), gradient(rotations, X, X.mT), 1e-8)


# ------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("at", ["generic", "start", "orthogonal"])
def test_gradients_against_central_differences(name, at):
    m = ALL[name]
    P = {
        "generic": lambda: argument(name, 4, (2,)),
        "start": lambda: (
            torch.zeros(4, 4, dtype=torch.float64) if name == "masked skew" else m.start(4, dtype=torch.float64)
        ),
        "orthogonal": lambda: random_orthogonal(4),
    }[at]()
    assert gradcheck(m, P.requires_grad_(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", [n for n in ALL if n not in {"loewdin newton", "exponential"}])  # eigh and SVD repeat
def test_second_derivatives_against_central_differences(name):
    P = argument(name, 3).requires_grad_()
    assert gradgradcheck(ALL[name], P, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", WARM)
def test_gradients_of_warm_started_maps_are_those_of_the_exact_ones(name):
    m = WARM[name]
    P = torch.randn(2, 6, 6, dtype=torch.float64) * 0.3 + torch.eye(6, dtype=torch.float64)
    carried = m.warm_start(P)
    P = (P + 1e-5 * torch.randn_like(P)).requires_grad_()
    G = torch.randn_like(P)
    R, onwards = m.refine(P, carried)
    assert not onwards.requires_grad
    found = torch.autograd.grad((R * G).sum(), P, create_graph=True)[0]
    expected = torch.autograd.grad((m(P) * G).sum(), P, create_graph=True)[0]
    close(R.detach(), m(P).detach(), 1e-10)
    close(found.detach(), expected.detach(), 1e-8)
    second = [torch.autograd.grad((g * G).sum(), P)[0] for g in (found, expected)]
    close(second[0], second[1], 1e-6)
    first_only = torch.autograd.grad((m.refine(P, carried)[0] * G).sum(), P)[0]
    close(first_only, expected.detach(), 1e-8)


def test_newton_schulz_gradient_over_the_stated_range():
    """Singular values in a ratio of 3 with the default number of steps, value and gradient in float32."""
    d = 48
    U, V = random_orthogonal(d), random_orthogonal(d)
    P = U @ torch.diag(torch.linspace(0.5, 1.5, d, dtype=torch.float64)) @ V
    G = torch.randn(d, d, dtype=torch.float64)
    value, slope = U @ V, gradient(create("ls"), P, G)
    m = create("ls", method="newton-schulz")
    assert (m(P.float()) - value).abs().max() < 1e-6
    assert orthogonality_error(m(P.float())) < 1e-6
    assert torch.linalg.norm(gradient(m, P.float(), G.float()) - slope) < 1e-5 * torch.linalg.norm(slope)
    close(m(1e3 * P), m(P), 1e-10)  # the scale of P does not count


@pytest.mark.parametrize(("ratio", "steps"), [(3, 5), (10, 6), (100, 9), (1000, 11)])
def test_newton_schulz_takes_few_products_both_ways(ratio, steps):
    """Value and gradient are those of a singular value decomposition in float64, and the products are counted."""
    d = 24
    U, V = random_orthogonal(d), random_orthogonal(d)
    sigma = torch.logspace(0, -math.log10(ratio), d, dtype=torch.float64)
    P, G = (U * sigma) @ V, torch.randn(d, d, dtype=torch.float64)
    C = U.mT @ G @ V.mT
    slope = U @ ((C - C.mT) / (sigma + sigma[:, None])) @ V  # of the Sylvester equation, written out
    m = create("ls", method="newton-schulz", steps=steps)
    rounding = 2e-7 * ratio  # as much as rounding P to float32 may do
    assert orthogonality_error(m(P.float()).double()) < 1e-6
    assert (m(P.float()) - U @ V).abs().max() < rounding
    assert torch.linalg.norm(gradient(m, P.float(), G.float()) - slope) < 20 * rounding * torch.linalg.norm(slope)
    wide = create("ls", method="newton-schulz", steps=steps + 1)
    close(wide(P), U @ V, 1e-9)
    close(gradient(wide, P, G), slope, 1e-6 * ratio)
    leaf = P.float().requires_grad_()
    with Count() as forward:
        R = m(leaf)
    assert forward.number == 2 * steps
    with Count() as backward:
        R.sum().backward()
    assert backward.number <= 3 + 5 * steps


def test_newton_schulz_of_many_steps_has_a_backward_pass_of_as_many():
    P = torch.randn(4, 4, requires_grad=True)
    R = create("ls", method="newton-schulz", steps=60)(P)
    with Count() as backward:
        R.square()[..., 0].sum().backward()
    assert backward.number < 6 * 60


@pytest.mark.parametrize("estimate", [0.7, 1.0])
def test_the_scales_of_newton_schulz_reach_as_far_as_they_say(estimate):
    for steps in range(5, 25):
        for dtype, error in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
            if algebra.reach(steps, dtype) < 4:
                continue
            x = torch.logspace(-math.log10(algebra.reach(steps, dtype)), 0, 500, dtype=torch.float64) / estimate
            for c in algebra.cubic_scales(steps, 1 / algebra.reach(steps, dtype), algebra.ABOVE):
                x = c * x * (3 - (c * x) ** 2) / 2
            assert (x - 1).abs().max() < error


@pytest.mark.parametrize("ratio", [2.0, 3.0, 4.0])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_newton_schulz_by_itself_is_exact_in_each_type(dtype, error, ratio):
    torch.manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(12, 12, dtype=torch.float64))
    P = (left * torch.linspace(1, ratio, 12, dtype=torch.float64)) @ right
    found = create("ls", method="newton-schulz")(P.to(dtype)).double()
    assert (found - left @ right).norm() < error * math.sqrt(12)


# ------------------------------------------------------------------------------------------- invariants

sizes = st.integers(2, 24)
seeds = st.integers(0, 10_000)


@given(sizes, seeds)
@settings(max_examples=15)
def test_every_exact_map_is_orthogonal_and_keeps_the_gram_matrix(d, seed):
    torch.manual_seed(seed)
    V = torch.randn(d, d + 2, dtype=torch.float64)
    for name, m in (EXACT | NEAR).items():
        R = m(argument(name, d) * 5 if name not in NEAR else argument(name, d))
        assert orthogonality_error(R) < 1e-10, name
        assert ((R @ V).mT @ (R @ V) - V.mT @ V).abs().max() < 1e-9, name


@given(sizes, seeds)
@settings(max_examples=15)
def test_symmetries_of_gram_schmidt_and_householder(d, seed):
    torch.manual_seed(seed)
    U = torch.randn(d, d, dtype=torch.float64) + 2 * random_orthogonal(d)
    T = torch.randn(d, d, dtype=torch.float64).triu(1) * 0.3 + torch.diag(0.5 + torch.rand(d, dtype=torch.float64))
    Q, rotation = gram_schmidt(U), random_orthogonal(d)
    close(gram_schmidt(U @ T), Q, 1e-8)
    close(gram_schmidt(rotation @ U), rotation @ Q, 1e-8)
    sign = float(torch.linalg.det(U).sign())
    columns = torch.ones(d, dtype=torch.float64)
    columns[-1] = (-1) ** (d - 1) * sign
    close(householder(U), Q * columns, 1e-9)
    assert torch.linalg.det(Q) == pytest.approx(sign)
    assert torch.linalg.det(loewdin(U)) == pytest.approx(sign)
    assert torch.linalg.det(householder(U)) == pytest.approx((-1) ** (d - 1))
    assert torch.linalg.det(householder(U, "product")) == pytest.approx((-1) ** d)
    for rotation_only in (cayley, exponential, givens):
        assert torch.linalg.det(rotation_only(U)) == pytest.approx(1)
    assert gradient(gram_schmidt, U, torch.randn(d, d, dtype=torch.float64))[:, -1].abs().max() == 0


@given(sizes, seeds)
@settings(max_examples=15)
def test_symmetries_of_loewdin(d, seed):
    torch.manual_seed(seed)
    U, left, right = torch.randn(d, d, dtype=torch.float64), random_orthogonal(d), random_orthogonal(d)
    R = loewdin(U)
    close(loewdin(2.5 * left @ U @ right), left @ R @ right, 1e-8)
    H = R.mT @ U
    close(H, H.mT, 1e-9)
    assert torch.linalg.eigvalsh(H).min() > 0
    for other in (gram_schmidt(U), left, R @ cayley(0.01 * torch.randn(d, d, dtype=torch.float64))):
        assert torch.linalg.norm(U - R) <= torch.linalg.norm(U - other) + 1e-12


@given(sizes, seeds, st.floats(0.01, 3))
@settings(max_examples=15)
def test_symmetries_of_cayley(d, seed, size):
    torch.manual_seed(seed)
    P = size * torch.randn(d, d, dtype=torch.float64)
    R = cayley(P)
    close(cayley(-P), R.mT, 1e-10)
    close(inverse_cayley(R), skew(P), 1e-8 * max(1, float(P.abs().max()) ** 2 * d))
    gaps = [torch.linalg.norm(cayley(t * P / 2) - exponential(t * P)) for t in (1e-3 / size, 5e-4 / size)]
    assert gaps[0] / gaps[1] == pytest.approx(8, rel=0.05)


@given(st.integers(2, 12), seeds, st.integers(0, 9))
@settings(max_examples=20)
def test_the_truncated_series_is_the_cayley_map_but_for_its_last_power(d, seed, terms):
    torch.manual_seed(seed)
    P = torch.randn(d, d, dtype=torch.float64)
    W = skew(P)
    W, P = (x * (0.8 / torch.linalg.matrix_norm(W, 2)) for x in (W, P))
    identity = torch.eye(d, dtype=torch.float64)
    R, power = cayley(P, "neumann", terms), torch.linalg.matrix_power(W, terms + 1)
    close(R, cayley(P) @ (identity - power), 1e-11)
    odd = terms % 2
    close(R.mT @ R - identity, (-2 * power if odd else 0) + (1 if odd else -1) * power @ power, 1e-11)


def test_the_truncated_series_converges():
    P = 0.1 * torch.randn(6, 6, dtype=torch.float64)
    errors = [float((cayley(P, "neumann", k) - cayley(P)).abs().max()) for k in (2, 6, 30)]
    assert errors[0] > 10 * errors[1] > 0
    assert errors[2] < 1e-10


@pytest.mark.parametrize("degree", range(14))
def test_polynomials(degree):
    X, coefficients = torch.randn(2, 3, 3, dtype=torch.float64), torch.randn(degree + 1).tolist()
    expected = sum(c * torch.linalg.matrix_power(X, k) for k, c in enumerate(coefficients))
    close(algebra.polynomial(X, coefficients), expected, 1e-9 * max(1, float(expected.abs().max())))


# ------------------------------------------------------------------------------------------- float32

# Orthogonality error and largest entry of R minus its float64 value, at d = 256 from a start of standard deviation 0.1.
FLOAT32 = {
    "cayley": (1e-6, 1e-6),
    "gram_schmidt": (1e-6, 1e-4),
    "householder": (1e-6, 1e-4),
    "householder product": (2e-6, 2e-6),
    "loewdin": (1e-6, 2e-4),
    "loewdin newton": (1e-6, 2e-4),
    "exponential": (2e-6, 2e-6),
    "givens": (2e-6, 5e-6),
}


@pytest.mark.parametrize("name", FLOAT32)
def test_errors_in_float32(name):
    d = 48 if name == "givens" else 256
    m, P = EXACT[name], 0.1 * torch.randn(d, d)
    R = m(P)
    assert R.dtype == torch.float32
    error, distance = FLOAT32[name]
    assert 0 < orthogonality_error(R.double()) < error
    assert (R - m(P.double())).abs().max() < distance


def test_a_large_skew_matrix_keeps_its_digits():
    """A standard normal start, where a plain solve has an error of 1e-5."""
    P = torch.randn(256, 256)
    W = skew(P)
    plain = torch.linalg.solve(torch.eye(256) - W, torch.eye(256) + W)
    assert orthogonality_error(cayley(P)) < 1e-6 < orthogonality_error(plain)
    assert orthogonality_error(exponential(P)) < 5e-6 < orthogonality_error(torch.matrix_exp(W))


SCALES = (1e-30, 1e-20, 1e-10, 1e-3, 1.0, 1e3, 1e6, 1e10, 1e20, 1e30)


@pytest.mark.parametrize("d", [2, 3, 8, 33])
@pytest.mark.parametrize("name", [n for n in EXACT | NEAR if n != "exponential fixed"])
def test_matrices_of_any_norm_are_orthogonal_in_float32(name, d):
    """And have finite gradients; where the scale of P does not count, these go with its inverse."""
    m = (EXACT | NEAR)[name]
    P, G = near_orthogonal(d, (3,)), torch.randn(3, d, d)
    for scale in SCALES:
        leaf = (scale * P).float().requires_grad_()
        R = m(leaf)
        assert orthogonality_error(R.detach().double()).max() < 3e-6, scale
        found = torch.autograd.grad((R * G).sum(), leaf)[0]
        assert found.isfinite().all()
        if m.retracts:
            assert (R - m(P)).abs().max() < 1e-5, scale
            expected = gradient(m, P, G.double())
            assert torch.linalg.norm(scale * found.double() - expected) < 1e-4 * torch.linalg.norm(expected), scale


@pytest.mark.parametrize("d", [3, 4, 33])
def test_cayley_of_large_matrices_is_that_of_float64(d):
    P = torch.randn(d, d)
    for scale in (1e2, 1e4, 1e6):
        exact = cayley((scale * P).double())
        assert (cayley(scale * P) - exact).abs().max() < 1e-4
    # An odd number of dimensions has an axis that stays; nothing else does.
    R = cayley(1e20 * P)
    assert float(R.trace()) == pytest.approx(2 - d if d % 2 else -d, abs=1e-3)


def inverse_of(A):
    """Of a matrix of fractions, exactly."""
    d = len(A)
    rows = [[*row, *(Fraction(i == j) for j in range(d))] for i, row in enumerate(A)]
    for i in range(d):
        pivot = next(k for k in range(i, d) if rows[k][i])
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [x / rows[i][i] for x in rows[i]]
        rows = [
            row if k == i else [x - row[i] * y for x, y in zip(row, rows[i], strict=True)] for k, row in enumerate(rows)
        ]
    return np.array([row[d:] for row in rows], dtype=object)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e4, 1e8, 1e12])
@pytest.mark.parametrize("d", [2, 3, 6, 7])
def test_cayley_far_from_the_identity_keeps_all_digits(d, scale, dtype):
    """Value and gradient are those of fractions, whether planes turn, an axis stays, or all but one plane do."""
    P, G = (scale * torch.randn(2, d, d)).to(dtype), torch.randn(2, d, d, dtype=dtype)
    if d > 3:
        P[1] = P[1].masked_fill(torch.arange(d * d).view(d, d) != 1, 0)
    leaf = P.clone().requires_grad_()
    R = cayley(leaf)
    (found,) = torch.autograd.grad((R * G).sum(), leaf, create_graph=True)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    for k in range(2):
        W = np.array([[Fraction(x) for x in row] for row in skew(P[k].double()).tolist()], dtype=object)
        identity = np.array([[Fraction(i == j) for j in range(d)] for i in range(d)], dtype=object)
        right = inverse_of(identity + W)  # of I - W, transposed
        value = torch.tensor((2 * right.T - identity).astype(float))
        M = 2 * right @ np.array([[Fraction(x) for x in row] for row in G[k].tolist()], dtype=object) @ right
        slope = torch.tensor((M - M.T).astype(float)).triu(1)
        assert (R[k] - value).abs().max() < tolerance
        assert (found[k] - slope).norm() < tolerance * slope.norm()


def test_compiled_code_calls_what_cayley_calls_without():
    W = skew(torch.randn(2, 5, 5) * torch.tensor([1.0, 1e6]).view(2, 1, 1)).requires_grad_()
    R, G = algebra.cayley(W), torch.randn(2, 5, 5)
    (M,) = torch.autograd.grad((R * G).sum(), W)
    assert torch.equal(torch.ops.hypersphere.cayley_by_solve(W), R)
    assert torch.equal(torch.ops.hypersphere.cayley_slope(W, R, G), M)
    leaf = torch.empty(2, 5, 5, device="meta", requires_grad=True)  # no numbers to look at
    cayley(leaf).sum().backward()
    assert leaf.grad.shape == leaf.shape


@pytest.mark.parametrize("name", WARM)
def test_refining_along_a_random_walk_stays_exact(name):
    """200 steps of relative size 1e-2 with a drift, in float32, against the exact map after every ten."""
    d, m = 64, WARM[name]
    P = m.start(d, batch=(2,))
    carried = m.warm_start(P)
    start = m(P)
    drift = torch.randn_like(P)
    for step in range(200):
        P = P + (1e-2 * torch.randn_like(P) + 3e-3 * drift) / (2 * math.sqrt(d))  # spectral norms 1e-2 and 3e-3
        R, carried = m.refine(P, carried)
        if step % 10 == 9:
            exact = m(P.double())
            assert (R - exact).abs().max() < 1e-5
            assert orthogonality_error(R).max() < 1e-6
    assert (torch.linalg.matrix_norm(R - start) / math.sqrt(d) > 0.1).all()  # it has come somewhere


@pytest.mark.parametrize("name", WARM)
def test_the_error_of_one_step_falls_with_the_stated_power(name):
    """Quadratic convergence, of the last correction of Cayley's map, too."""
    d, m = 32, dataclasses.replace(WARM[name], refinements=1 if name.startswith("cayley") else 2)
    P = m.start(d, dtype=torch.float64)
    step = torch.randn(d, d, dtype=torch.float64)
    step = step / torch.linalg.matrix_norm(skew(step) if m.skew else step, 2)
    errors = [float(orthogonality_error(m.refine(P + x * step, m.warm_start(P))[0])) for x in (0.2, 0.1, 0.02)]
    assert 10 < errors[0] / errors[1] < 30
    assert errors[2] < 1e-6
    default = WARM[name]
    assert orthogonality_error(default.refine(P + 0.1 * step, default.warm_start(P))[0]) < 1e-8


@pytest.mark.parametrize("name", WARM)
def test_a_step_beyond_all_norms_is_forgotten(name):
    m, P = WARM[name], torch.randn(8, 8)
    _, carried = m.refine(1e25 * P, m.warm_start(P))
    assert carried.isfinite().all()
    for _ in range(60):
        R, carried = m.refine(P, carried)
    close(R, m(P), 1e-4)


@pytest.mark.parametrize("name", WARM)
@pytest.mark.parametrize("size", [0.5, 3.0, 300.0])
def test_a_step_too_large_to_refine_stays_finite_and_recovers(name, size):
    d, m = 16, WARM[name]
    P = m.start(d, batch=(2,))
    carried = m.warm_start(P)
    P[1] += size * torch.randn(d, d)
    exact = m(P.double())
    for _ in range(60):
        R, carried = m.refine(P, carried)
        assert R.isfinite().all()
        assert R.abs().max() < 2 * d
        assert (R[0] - exact[0]).abs().max() < 1e-5  # the other matrices of the batch are not touched
    if size < 100:  # the condition of P is beyond float32 otherwise
        kept = slice(0, d - 1) if name == "householder newton" else slice(0, d)  # the last column goes with det P
        assert (R[1] - exact[1])[:, kept].abs().max() < (1e-5 if name == "cayley newton" else 1e-3)
    recovered, _ = m.refine(P, m.warm_start(P))
    assert orthogonality_error(recovered).max() < 2e-6


@pytest.mark.parametrize("norm", [0.0, 0.3, 1.5, 3.1, 7.9])
def test_a_fixed_norm_of_the_exponential_serves_all_smaller_ones(norm):
    P = torch.randn(2, 32, 32)
    P = P * norm / torch.linalg.matrix_norm(skew(P), 2)[:, None, None]
    expected = torch.matrix_exp(skew(P.double()))
    for max_norm in (8.0, None):
        assert (exponential(P, max_norm) - expected).abs().max() < 2e-6
    assert (exponential(P.double(), 8.0) - expected).abs().max() < 1e-13


def test_the_exponential_takes_few_products():
    """Five for the polynomial, one for each squaring and two that correct R; twice as many but for these backwards."""

    P = torch.randn(2, 6, 6, requires_grad=True)
    with Count() as forward:
        R = create("exponential", max_norm=8.0)(P)
    assert forward.number == 5 + 3 + 2
    with Count() as backward:
        R.sum().backward()
    assert backward.number == 2 * (5 + 3)


def test_spectral_norm_estimate():
    for d in (1, 2, 8, 64):
        M = torch.randn(5, d, d)
        exact = torch.linalg.matrix_norm(M, 2)
        found = algebra.spectral_norm(M)[:, 0, 0]
        assert (found <= exact * (1 + 1e-5)).all()
        assert (found >= 0.8 * exact).all()


# ------------------------------------------------------------------------------------------- degenerate input


@pytest.mark.parametrize("name", ALL)
def test_shapes_types_and_layouts(name):
    m = ALL[name]
    P = argument(name, 5, (2, 3), torch.float32)
    R = m(P)
    assert R.shape == P.shape
    for index in itertools.product(range(2), range(3)):
        close(R[index], m(P[index]), 2e-6)
    close(m(P.mT.contiguous().mT), R, 2e-6)
    close(m(P.transpose(0, 1)), R.transpose(0, 1), 2e-6)
    assert m(P[:0]).shape == (0, 3, 5, 5)
    for dtype in (torch.float16, torch.bfloat16):
        low = m(P.to(dtype))
        assert low.dtype == dtype
        assert torch.equal(low, m(P.to(dtype).float()).to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(m(P), R)
        leaf = P.clone().requires_grad_()
        inside = torch.autograd.grad(m(leaf).square()[..., 0].sum(), leaf)[0]
    leaf = P.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(m(leaf).square()[..., 0].sum(), leaf)[0], inside)


@pytest.mark.parametrize("name", EXACT | NEAR)
def test_one_dimension_and_an_empty_batch_have_gradients(name):
    m = (EXACT | NEAR)[name]
    P = torch.full((1, 1), -2.0, requires_grad=True)
    R = m(P)
    assert R.abs().item() == 1
    assert torch.autograd.grad(R.sum(), P)[0] == 0
    empty = torch.empty(0, 3, 3, requires_grad=True)
    assert torch.autograd.grad(m(empty).sum(), empty)[0].shape == (0, 3, 3)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("kind", ["zero", "rank 1", "zero column", "equal columns"])
def test_singular_matrices_give_finite_results(name, kind):
    m, P = EXACT[name], torch.randn(4, 4)
    if kind == "zero":
        P = torch.zeros(4, 4)
    elif kind == "rank 1":
        P = P[:, :1] * P[:1]
    elif kind == "zero column":
        P[:, 1] = 0
    else:
        P[:, 1] = P[:, 3]
    P.requires_grad_()
    R = m(P)
    assert R.isfinite().all()
    found = torch.autograd.grad((R * torch.randn(4, 4)).sum(), P)[0]
    assert found.isfinite().all()
    assert found.abs().max() < 1e4
    if name != "loewdin newton":  # which stays singular where P is, and says so by its error
        assert orthogonality_error(R) < 1e-6
    if m.warm_starts:
        R, carried = m.refine(P, m.warm_start(P))
        assert R.isfinite().all()
        assert carried.isfinite().all()


def test_columns_that_depend_on_others_pass_no_gradient():
    P = torch.randn(4, 4, dtype=torch.float64)
    P[:, 1] = 2 * P[:, 0]
    found = gradient(gram_schmidt, P, torch.randn(4, 4, dtype=torch.float64))
    assert (found[:, 1] == 0).all()
    assert found[:, 0].abs().min() > 0


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(3),
        torch.zeros(2, 3),
        torch.zeros(2, 2, dtype=torch.int64),
        torch.zeros(2, 2, dtype=torch.complex64),
        1.0,
    ],
)
def test_bad_matrices_are_named(bad):
    for m in ALL.values():
        with pytest.raises(ArgumentError, match=r"^P must"):
            m(bad)
    with pytest.raises(ArgumentError, match=r"^R must"):
        orthogonality_error(bad)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cayley", {"method": "lu"}),
        ("cayley", {"terms": -1}),
        ("cayley", {"refinements": 0}),
        ("gram_schmidt", {"orientation": "up"}),
        ("gram_schmidt", {"method": "svd"}),
        ("householder", {"form": "rows"}),
        ("loewdin", {"method": "qr"}),
        ("loewdin", {"steps": 0}),
        ("loewdin", {"scale": "max"}),
        ("exponential", {"max_norm": 0.0}),
        ("masked", {"structure": "diagonal"}),
        ("masked", {"bandwidth": -1}),
        ("givens", {"angle": 1}),
    ],
)
def test_bad_options_are_named(name, options):
    with pytest.raises(ArgumentError, match=f"^{next(iter(options))} "):
        create(name, **options)


# ------------------------------------------------------------------------------------------- the interface


def test_names():
    aliases = {"gs": "gram-schmidt", "hr": "householder", "ls": "loewdin", "cp": "cayley", "exp": "exponential"}
    aliases |= {"upt": "unconstrained", "or": "unconstrained", "gram_schmidt": "gram-schmidt"}
    for alias, name in aliases.items():
        assert maps[alias].name == name
    assert {"givens", "spd", "masked"} <= set(maps)
    for name in maps:
        assert maps[name].help
        assert all(option.help for option in maps[name].options)
        assert isinstance(create(name), Map)
        assert create(name) == create(name)
        assert hash(create(name)) == hash(create(name))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("d", [1, 2, 5])
def test_starts(name, d):
    m = ALL[name]
    if name == "masked skew":
        with pytest.raises(ArgumentError, match="structure"):
            m.start(d)
        return
    P = m.start(d, batch=(2,), dtype=torch.float64)
    assert P.shape == (2, d, d)
    assert P.dtype == torch.float64
    signs = m.signs(d)
    close(m(P), torch.diag(torch.ones(d) if signs is None else signs).double().expand(2, d, d), 1e-9)
    if name == "householder":
        assert signs.tolist() == [1.0] * (d - 1) + [(-1.0) ** (d - 1)]
    if m.skew:
        noise = torch.randn(2, d, d, dtype=torch.float64).tril()
        close(m(P + noise), m(P), 0.0)


def test_free_parameters_are_the_rank_of_the_derivative():
    d = 4
    for name, m in (EXACT | CONTROLS).items():
        P = torch.randn(d, d, dtype=torch.float64)
        jacobian = torch.autograd.functional.jacobian(m, P).reshape(d * d, d * d)
        assert m.free(d) == int(torch.linalg.matrix_rank(jacobian, rtol=1e-8)), name


@pytest.mark.parametrize("name", EXACT | CONTROLS)
def test_inverses(name):
    m = (EXACT | CONTROLS)[name]
    P = 0.3 * torch.randn(3, 4, 4, dtype=torch.float64)
    if name == "spd":
        P = P.tril() + torch.eye(4, dtype=torch.float64)
    R = m(P)
    if name in {"givens", "householder product"}:
        with pytest.raises(ArgumentError):
            m.inverse(R)
        return
    close(m(m.inverse(R)), R, 1e-9)
    if m.retracts:
        assert torch.equal(m.inverse(R), R)
    if m.skew:
        close(m.inverse(R), P.triu(1), 1e-8)
        close(m.inverse(R.float()), P.triu(1).float(), 1e-4)


@pytest.mark.parametrize("name", ["cayley", "exponential", "householder", "spd", "masked upper", "gram_schmidt"])
def test_matrices_out_of_range_have_no_inverse(name):
    R = torch.diag(torch.tensor([1.0, 1.0, 1.0, -1.0]))
    bad = {"householder": torch.eye(4), "gram_schmidt": 2 * torch.eye(4), "masked upper": torch.ones(4, 4)}.get(name, R)
    with pytest.raises(ArgumentError, match=r"^R "):
        ALL[name].inverse(bad)


def test_logarithms_of_large_rotations():
    """Angles up to 3.1, close to the half turn at which the logarithm ends."""
    angles = torch.tensor([3.1, 0.0, 1e-3], dtype=torch.float64)
    planes = torch.block_diag(*[torch.tensor([[0, a], [-a, 0]], dtype=torch.float64) for a in angles])
    basis = random_orthogonal(6)
    W = basis @ planes @ basis.mT
    R = torch.matrix_exp(W)
    close(create("exp").inverse(R), W.triu(1), 1e-9)
    turn = torch.matrix_exp(basis @ torch.block_diag(planes[:2, :2] * (4 / 3.1), planes[2:, 2:]) @ basis.mT)
    close(exponential(create("exp").inverse(turn)), turn, 1e-9)  # four is a turn of 2 pi - 4 the other way


def test_maps_without_warm_start_refine_by_being_called():
    for name, m in ALL.items():
        P = argument(name, 3)
        if m.warm_starts:
            assert m.warm_start(P).shape == P.shape
        else:
            assert m.warm_start(P) is None
            assert torch.equal(m.refine(P, P)[0], m(P))
    low = WARM["cayley newton"].warm_start(torch.zeros(2, 2, dtype=torch.bfloat16))
    assert low.dtype == torch.float32
    R, carried = WARM["cayley newton"].refine(torch.zeros(2, 2, dtype=torch.bfloat16), low)
    assert (R.dtype, carried.dtype) == (torch.bfloat16, torch.float32)


def test_products_are_exact_whatever_the_process_allows():
    seen = []

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            seen.append(torch.backends.mkldnn.matmul.fp32_precision)
            return g

    with float32_products("medium"):
        with exact_products():
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
            assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
            assert not tf32_products()
        with exact_products("tf32"):  # on a GPU alone
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
            assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "medium"
        assert tf32_products()
        with pytest.raises(RuntimeError), exact_products():
            raise RuntimeError
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        P = torch.randn(3, 3, requires_grad=True)
        exponential(Recorded.apply(P)).sum().backward()
        assert seen == ["bf16"]  # restored by the time the rest of the backward pass runs


def test_products_are_exact_by_either_interface_of_torch(monkeypatch):
    """After the newer one was used the older one raises an error when it is read; a torch may have it alone."""
    with float32_products("highest"):
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        with pytest.raises(RuntimeError, match="mix of the legacy and new"):
            torch.get_float32_matmul_precision()
        assert tf32_products()
        with exact_products():
            assert not tf32_products()
        assert tf32_products()
    older = types.SimpleNamespace(allow_tf32=True)
    monkeypatch.setattr(geometry, "_MATMUL", (older, types.SimpleNamespace()))
    monkeypatch.setattr(geometry, "_BY_NAME", False)
    with exact_products():
        assert older.allow_tf32 is False
        with exact_products("tf32"):
            assert older.allow_tf32 is True
        assert older.allow_tf32 is False
    assert older.allow_tf32 is True


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT | NEAR | APPROXIMATE)
def test_compiled_in_one_graph(name):
    m = ALL[name]
    P = argument(name, 5, (2,), torch.float32)
    G = torch.randn_like(P)
    torch._dynamo.reset()
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    leaf = P.clone().requires_grad_()
    R = compiled(leaf)
    close(R.detach(), m(P), 1e-5)
    close(torch.autograd.grad((R * G).sum(), leaf)[0], gradient(m, P, G), 1e-4)
    if m.warm_starts:
        carried = m.warm_start(P)
        close(
            torch.compile(m.refine, fullgraph=True, backend="aot_eager")(P, carried)[0], m.refine(P, carried)[0], 1e-5
        )


def test_unconstrained_is_the_identity():
    assert torch.equal(unconstrained(P3), P3)
    assert create("unconstrained").free(3) == 9
    assert not create("unconstrained").orthogonal


# ------------------------------------------------------------------------------------------- on a GPU

CAPTURABLE = {
    "cayley": create("cayley"),
    "cayley newton": create("cayley", method="newton"),
    "cayley neumann": create("cayley", method="neumann", terms=8),
    "gram_schmidt newton": create("gs", method="newton"),
    "householder newton": create("hr", form="newton"),
    "householder product": create("hr", form="product"),
    "loewdin newton-schulz": create("ls", method="newton-schulz"),
    "exponential": create("exp"),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CAPTURABLE)
def test_captured_with_tf32_allowed(name):
    """Both passes in a CUDA graph, replayed along a walk, against float64 on the CPU: no wait and no TF32 product."""
    d, m = 96, CAPTURABLE[name]
    with float32_products("high"):
        P = m.start(d, batch=(3,), device="cuda").requires_grad_()
        G = torch.randn(3, d, d, device="cuda")
        carried = m.warm_start(P)

        def step():
            R = m(P)
            if carried is not None:
                R, onwards = m.refine(P, carried)
                carried.copy_(onwards)
            (P.grad,) = torch.autograd.grad((R * G).sum(), P)
            return R.detach()

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            R = step()
        for _ in range(20):
            with torch.no_grad():
                P += 1e-2 * torch.randn_like(P) / (2 * math.sqrt(d))
            graph.replay()
        exact = P.detach().cpu().double().requires_grad_()
        reference = create("ls") if "loewdin" in name else m
        expected = reference(exact)
        slope = torch.autograd.grad((expected * G.cpu()).sum(), exact)[0]
        assert (R.cpu() - expected).abs().max() < 1e-5
        assert (P.grad.cpu() - slope).norm() < 1e-5 * slope.norm()
        assert orthogonality_error(R).max() < 3e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", EXACT)
def test_the_device_gives_what_the_processor_gives(name):
    for d in (1, 2, 5, 40):
        P = argument(name, d, (4,))
        P[0] = torch.eye(d)
        G = torch.randn_like(P)
        close(EXACT[name](P.cuda()).cpu(), EXACT[name](P), 1e-9)
        close(gradient(EXACT[name], P.cuda(), G.cuda()).cpu(), gradient(EXACT[name], P, G), 1e-7)
