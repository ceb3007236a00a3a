"""Relatives of the energy against published numbers, plain code, closed forms and their symmetries."""

import copy
import itertools
import math

import pytest
import scipy.special
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hypersphere as hs
from hypersphere.energy import (
    MGD,
    MHC,
    MHP,
    MHS,
    MMA,
    SRIP,
    CosineSum,
    InterClass,
    KoLeo,
    Orthogonal,
    Orthonormal,
    OrthoReg,
    RelaxedMHP,
    Separation,
    Uniformity,
    alignment,
    batch_pairs,
    batch_versus_all,
    caffe_inter_class,
    create,
    hyperspherical_energy,
    hyperspherical_uniformity_gap,
    prototype_loss,
    subset,
)
from hypersphere.energy import minibatch as minibatch_module
from hypersphere.energy import uniformity as uniformity_module
from hypersphere.errors import ArgumentError
from hypersphere.geometry import normalise, uniform_directions

WA = torch.tensor([[1, 2, 2], [-1, 0.5, 3], [0.3, -2, 1], [2, -1, -1]], dtype=torch.float64)
WB = torch.tensor(
    [[math.sin(1 + 0.7 * i + 1.3 * j) + 0.5 * (i == j) for j in range(4)] for i in range(5)], dtype=torch.float64
)
WC = torch.tensor(
    [
        [-1.2, -0.8, 0.9, 0.2, -1.2],
        [-0.2, -0.1, -1.0, 0.7, -1.2],
        [-0.3, 0.1, -0.2, 0.3, 0.7],
        [1.4, -0.6, 0.4, 0.6, -0.6],
    ],
    dtype=torch.float64,
)
XA = torch.tensor([[0.5, -1, 2], [1, 1, 0.2], [-0.7, 0.4, 0.9]], dtype=torch.float64)
LABELS = torch.tensor([0, 2, 2])
POLE = torch.tensor([0.3, 0.2, -1], dtype=torch.float64)


def draw(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def plain_rows(x, mirrored=False):
    """Unit vectors as lists, the mirror images last."""
    rows = [[v / math.hypot(*row) for v in row] for row in x.tolist()]
    return rows + [[-v for v in row] for row in rows] if mirrored else rows


def with_pole(kind, pole, **options):
    """A member in eval mode whose pole for matrices is the given one."""
    module = kind(**options).eval()
    module.prepare(WA)
    module.get_buffer("pole ")[0].copy_(pole)
    return module


# Published values.


def test_compared_regularisers():
    assert Orthonormal()(WA).item() == pytest.approx(348.4706, rel=1e-12)
    assert Orthonormal(squared=False)(WA).item() == pytest.approx(18.6673672488, rel=1e-11)
    assert Orthonormal(normalised=True)(WA).item() == pytest.approx(2.31698443376, rel=1e-10)
    assert CosineSum()(WA).item() == pytest.approx(-0.150186641149, rel=1e-10)
    assert OrthoReg()(WA).item() == pytest.approx(0.0489613964987, rel=1e-10)
    assert Orthonormal(squared=False)(WC).item() == pytest.approx(5.02295729625, rel=1e-10)
    assert Orthogonal(normalised=True)(WC).item() == pytest.approx(1.19437038516, rel=1e-10)
    assert SRIP(iterations=1, start="ones")(WC).item() == pytest.approx(3.99397784937, rel=1e-10)


def test_uniformity_family():
    assert MHS(distance="chord")(WA).item() == pytest.approx(-0.866377460978, rel=1e-10)
    assert MHS()(WA).item() == pytest.approx(-(0.866377460978**2), rel=1e-10)
    assert MHS(distance="angle")(WA).item() == pytest.approx(-0.896055384571, rel=1e-10)
    for s, total in ((2, 2.01773898927), (1, 2.71222027635), (0, -1.72083935185)):
        assert with_pole(MHP, POLE, s=s)(WA).item() == pytest.approx(-total / 4, rel=1e-10)
    assert with_pole(MHC, POLE)(WA).item() == pytest.approx(1.06329591376, rel=1e-10)
    assert with_pole(MHC, POLE, sharpness=1e5)(WA).item() == pytest.approx(0.961595797776**2, abs=1e-4)
    assert RelaxedMHP()(WA).item() == pytest.approx(1.96209412589, rel=1e-10)
    assert RelaxedMHP(normalised=False)(WA).item() == pytest.approx(5.52630075186, rel=1e-10)
    assert MGD(jitter=0)(WA).item() == pytest.approx(0.367588199213, rel=1e-10)
    assert MGD()(WA).item() == pytest.approx(0.367583373127, rel=1e-10)


def test_neighbouring_losses():
    assert Uniformity()(WA).item() == pytest.approx(-2.86438769172, rel=1e-10)
    assert alignment(XA, WA[:3]).item() == pytest.approx(1.76985740007, rel=1e-10)
    assert KoLeo(eps=1e-300)(WA).item() == pytest.approx(-0.0161142580854, rel=1e-9)
    assert KoLeo(scaled=True, eps=1e-300)(WA).item() == pytest.approx(-1.40240861921, rel=1e-10)
    assert MMA()(WA).item() == pytest.approx(-1.08656079295, rel=1e-10)
    assert Separation()(WA).item() == pytest.approx(0.457109822451, rel=1e-10)
    assert prototype_loss(XA, WA, LABELS).item() == pytest.approx(3.63489566695, rel=1e-10)
    assert hyperspherical_uniformity_gap(XA, WA, LABELS).item() == pytest.approx(1.98207712269, rel=1e-10)


def test_batches_of_classes():
    assert batch_versus_all(WA, LABELS).item() == pytest.approx(0.626607429301, rel=1e-10)
    assert batch_versus_all(WA, LABELS, 0).item() == pytest.approx(-0.275051769202, rel=1e-10)
    assert batch_pairs(WA, LABELS).item() == pytest.approx(0.300347375643, rel=1e-10)
    assert hyperspherical_energy(WB[[0, 2, 3]]).item() == pytest.approx(0.725054072781, rel=1e-10)


def test_inter_class_layer_of_the_released_code():
    distance, gradient = caffe_inter_class(3 * WA, LABELS, 10.0)
    assert distance.item() == pytest.approx(4.17560898853, rel=1e-10)
    expected = torch.zeros(4, 3, dtype=torch.float64)
    expected[0] = torch.tensor([0.123316293694, -0.693722539533, 0.128851762266], dtype=torch.float64)
    expected[2] = torch.tensor([0.55306978322, 0.987987480478, 0.599415121139], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("m", "plain", "plus"),
    [
        (1, 2.05834349951, 2.68495092881),
        (2, 2.30589167321, 2.93249910251),
        (3, 2.53038357876, 3.15699100806),
        (4, 2.80261351514, 3.42922094444),
    ],
)
def test_sphereface_plus_is_a_head_and_a_term(m, plain, plus):
    annealer = hs.losses.LambdaAnnealer(base=5, gamma=0, minimum=0)
    head = hs.losses.create("a-softmax", 3, 4, m=m, annealer=annealer).double()
    with torch.no_grad():
        head.weight.copy_(WA)
    assert head(XA, LABELS).item() == pytest.approx(plain, rel=1e-9)
    assert InterClass(head)(XA, LABELS).item() == pytest.approx(plus, rel=1e-9)
    half = InterClass(head, weight=0.5)(XA, LABELS).item()
    assert half == pytest.approx((plain + plus) / 2, rel=1e-9)


# Definitions, one pair after the other.

HOMES = {"hypersphere.energy.orthogonality", "hypersphere.energy.uniformity"}
energies = hs.energy.energies
EVERY = [name for name in energies if energies[name].factory.__module__ in HOMES]
ANGLES_ONLY = [name for name in EVERY if getattr(energies[name].factory, "contract", {}).get("scale", True)]
HALF = [name for name in EVERY if issubclass(energies[name].factory, uniformity_module._Spread)]


@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(2, 5), st.booleans())
def test_definitions(seed, n, d, half_space):
    x = draw(seed, n, d)
    rows = plain_rows(x, half_space)
    others = [[b for j, b in enumerate(rows) if j != i and j != i + n] for i in range(n)]  # not one's own mirror image
    shortest = [min(math.dist(rows[i], b) for b in others[i]) for i in range(n)]
    angles = [2 * math.asin(min(c / 2, 1)) for c in shortest]
    options = {"half_space": half_space}
    expected = {
        MHS(**options): -(min(shortest) ** 2),
        MHS(distance="chord", **options): -min(shortest),
        MHS(distance="angle", **options): -min(angles),
        KoLeo(**options): -sum(math.log(c + 1e-8) for c in shortest) / n,
        MMA(**options): -sum(angles) / n,
        Separation(**options): sum(1 - c * c / 2 for c in shortest) / n,
        Uniformity(t=1.5, **options): math.log(
            sum(math.exp(-1.5 * math.dist(a, b) ** 2) for a, b in itertools.permutations(rows, 2))
            / (len(rows) * (len(rows) - 1))
        ),
    }
    kernel = torch.tensor([[math.exp(-(math.dist(a, b) ** 2)) for b in rows] for a in rows], dtype=torch.float64)
    kernel += 1e-6 * torch.eye(len(rows), dtype=torch.float64)
    expected[MGD(**options)] = -torch.linalg.slogdet(kernel).logabsdet.item()
    aim = plain_rows(draw(seed + 1, 1, d))[0]
    chords = [math.dist(row, aim) for row in rows]
    expected[with_pole_of(MHP(s=1.0, **options), x, aim)] = -sum(1 / c for c in chords) / len(rows)
    soft = -math.log(sum(math.exp(-10 * c * c) for c in chords) / len(rows)) / 10
    expected[with_pole_of(MHC(**options), x, aim)] = soft
    assert min(chords) ** 2 - 1e-12 <= soft <= min(chords) ** 2 + math.log(len(rows)) / 10 + 1e-12
    for module, value in expected.items():
        assert module(x).item() == pytest.approx(value, rel=1e-7, abs=1e-9), module


def with_pole_of(module, x, aim):
    module.eval().prepare(x)
    module.get_buffer("pole ")[0].copy_(3 * torch.tensor(aim, dtype=torch.float64))  # its length does not matter
    return module


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 6))
def test_sums_over_pairs(seed, n, d):
    x = draw(seed, n, d)
    rows = plain_rows(x)
    cosines = [sum(p * q for p, q in zip(a, b, strict=True)) for a, b in itertools.permutations(rows, 2)]
    assert CosineSum()(x).item() == pytest.approx(sum(cosines), abs=1e-9)
    logs = [math.log1p(math.exp(7 * (c - 1))) for c in cosines]
    assert OrthoReg(steepness=7)(x).item() == pytest.approx(sum(logs), rel=1e-9)
    assert RelaxedMHP()(x).item() == pytest.approx(math.sqrt(max(sum(cosines) + n, 0)), abs=1e-6)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 6))
def test_srip_finds_the_spectral_norm(seed, n, d):
    x = draw(seed, n, d)
    eigenvalues = torch.linalg.eigvalsh(x @ x.mT - torch.eye(n, dtype=torch.float64))
    value = SRIP(iterations=400)(x).item()
    assert value == pytest.approx(eigenvalues.abs().max().item(), rel=1e-2)
    assert SRIP(iterations=400, squared=True)(x).item() == pytest.approx(value**2, rel=1e-9)
    few = SRIP()(x).item()
    assert few <= value * (1 + 1e-9) and SRIP(iterations=3)(x).item() >= few * (1 - 1e-9)


# Symmetries, gradients, optima.


@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize("gap", [1e-1, 1e-2, 1e-3])
def test_vectors_near_the_pole_keep_their_digits(gap, half_space):
    """And those near its mirror image."""
    x = torch.randn(4, 3, dtype=torch.float64)
    pole = torch.nn.functional.normalize(torch.randn(3, dtype=torch.float64), dim=0).float()
    x[0] = pole + gap * torch.nn.functional.normalize(x[0], dim=0)
    if half_space:
        x[0] *= -1
    found = []
    for dtype in (torch.float64, torch.float32):
        leaf = x.float().to(dtype).requires_grad_()
        value = with_pole(MHP, pole.to(dtype), half_space=half_space)(leaf)
        found.append((value.item(), *torch.autograd.grad(value, leaf)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6 + 2e-7 / gap)
    assert float((found[1][1] - found[0][1]).norm() / found[0][1].norm()) < 1e-5 + 1e-6 / gap


@pytest.mark.parametrize("name", ["mhp", "mhc"])
@given(seed=st.integers(0, 2**32 - 1))
def test_symmetries_with_the_pole_that_turns_along(name, seed):
    x = draw(seed, 5, 4)
    turn = torch.tensor(scipy.stats.ortho_group.rvs(4, random_state=seed))
    module = create(name).eval()
    value = module(x).item()
    lengths = 10 ** draw(seed + 1, 5, 1)
    for same in (x * lengths, x[torch.randperm(5)]):
        assert module(same).item() == pytest.approx(value, rel=1e-8, abs=1e-8)
    module.get_buffer("pole ")[0] @= turn
    assert module(x @ turn).item() == pytest.approx(value, rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("name", HALF)
@given(seed=st.integers(0, 2**32 - 1))
def test_half_space_ignores_signs(name, seed):
    x = draw(seed, 5, 4)
    signs = torch.tensor([[1.0], [-1.0], [1.0], [1.0], [-1.0]])
    module = create(name, half_space=True).eval()
    assert module(x * signs).item() == pytest.approx(module(x).item(), rel=1e-8, abs=1e-8)
    # An output layer is never half space.
    full = create(name).eval()
    if name in ("mhp", "mhc"):
        full.prepare(x)
    batch = x.unsqueeze(0)
    assert module.energy(batch, "output").item() == pytest.approx(full.energy(batch).item(), rel=1e-12)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize("shape", [(4, 3), (3, 5)])
def test_gradients(name, half_space, shape):
    if half_space and name not in HALF:
        pytest.skip("full space only")
    module = create(name, **({"half_space": True} if half_space else {})).eval()
    x = draw(3, *shape).requires_grad_()
    assert torch.autograd.gradcheck(module, (x,))
    if name in ANGLES_ONLY and name != "relaxed-mhp":
        (gradient,) = torch.autograd.grad(module(x), x)
        assert (gradient * x).sum(1).abs().max() < 1e-9


@given(st.integers(0, 2**32 - 1), st.integers(2, 5))
def test_no_set_beats_the_simplex(seed, n):
    simplex = torch.eye(n, dtype=torch.float64) - 1 / n
    x = draw(seed, n, n)
    for module in (MHS(), MHS(distance="angle"), KoLeo(), MMA(), Separation(), Uniformity(), MGD(), RelaxedMHP()):
        assert module(x) >= module(simplex) - 1e-9
    assert RelaxedMHP()(simplex).item() == pytest.approx(0, abs=1e-12)
    frame = torch.eye(n, dtype=torch.float64)
    for kind in (MHS, MMA, Separation, KoLeo, Uniformity, MGD):
        assert kind(half_space=True)(x) >= kind(half_space=True)(frame) - 1e-9


def test_separation_moves_one_pair_only():
    square = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]]).requires_grad_()
    for distance in ("squared", "chord", "angle"):
        (gradient,) = torch.autograd.grad(MHS(distance=distance)(square), square)
        assert (gradient.norm(dim=1) > 0).sum() == 2


@pytest.mark.parametrize(("d", "limit"), [(2, -1.57502720448), (3, -2.07977706059), (128, -3.9375300102)])
def test_uniform_directions_reach_the_limit(d, limit):
    assert math.log(scipy.special.hyp0f1(d / 2, 4)) - 4 == pytest.approx(limit, rel=1e-10)
    assert Uniformity()(uniform_directions(1500, d, dtype=torch.float64)).item() == pytest.approx(limit, rel=0.01)


# Layouts, types and degenerate input.


@pytest.mark.parametrize("name", EVERY)
def test_padding_does_not_count(name):
    module = create(name).eval()
    x = draw(1, 5, 3)
    value = module(x).item()
    batch = torch.zeros(2, 7, 6, dtype=torch.float64)
    batch[0, :5, :3] = x
    batch[1, :4, :3] = 0.5 * x[1:]
    if name in ("mhp", "mhc"):
        pole = module.get_buffer("pole ")[0].clone()
        last = create(name).eval()
        last.prepare(x)
        expected = [value, with_pole_of(last, x, pole[0].tolist())(x[1:]).item()]
        module.energy(batch)
        module.get_buffer("pole ")[0].zero_()[:, :3] = pole
    else:
        expected = [value, module(0.5 * x[1:]).item()]
    assert module.energy(batch).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_degenerate_rows_stay_finite(name, dtype):
    a, zero = torch.tensor([[1.0, -2.0, 0.5]], dtype=dtype), torch.zeros(1, 3, dtype=dtype)
    sets = ([a], [zero], [a, a], [a, -a], [a, zero], [zero, zero], [a, a, -a, zero, 2 * a], [a[:0]])
    for half_space in (False, True) if name in HALF else (False,):
        for rows in sets:
            module = create(name, **({"half_space": True} if half_space else {}))
            x = torch.cat(rows).requires_grad_()
            value = module(x)
            (gradient,) = torch.autograd.grad(value, x)
            assert value.isfinite() and gradient.isfinite().all() and gradient.dtype == dtype
            assert value.dtype == (dtype if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("name", EVERY)
def test_types_autocast_and_layout(name):
    x = draw(2, 6, 8, dtype=torch.float32).T.bfloat16()[::2]
    assert not x.is_contiguous()
    module = create(name).eval()
    expected = create(name).double().eval()(x.double()).item()
    with torch.autocast("cpu", torch.bfloat16):
        value = module(x)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(expected, rel=2e-5, abs=2e-5)


def test_single_and_no_neurons():
    for name in HALF:
        if name in ("mhp", "mhc"):
            continue
        expected = {"mgd": -math.log1p(1e-6)}.get(name, 0.0)
        assert create(name)(torch.ones(1, 3)).item() == pytest.approx(expected, abs=1e-7)


def test_neighbours_some_rows_at_a_time(monkeypatch):
    x = draw(5, 3, 17, 4)
    whole = {half: uniformity_module.nearest(x, half) for half in (False, True)}
    monkeypatch.setattr(uniformity_module, "CHUNK_ELEMENTS", 3 * 17 * 4)
    for half, found in whole.items():
        for a, b in zip(found, uniformity_module.nearest(x, half), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", EVERY)
def test_on_a_model(name):
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 3))
    module = create(name, hidden_weight=2.0, output_weight=3.0).eval()
    values = module.layer_energies(model)
    assert list(values) == ["0", "3", "5"]
    if name not in ("mhp", "mhc"):
        for layer, value in values.items():
            expected = module(model.get_submodule(layer).weight.flatten(1)).item()
            assert value.item() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    total = 2 * values["0"] + 2 * values["3"] + 3 * values["5"]
    assert module(model).item() == pytest.approx(total.item(), rel=1e-5)
    module(model).backward()
    for index in (0, 3, 5):
        assert model[index].weight.grad.abs().max() > 0 and model[index].bias.grad is None


def test_options_that_have_no_meaning():
    with pytest.raises(ArgumentError, match=r"^half_space must be False for relaxed-mhp"):
        create("relaxed-mhp", half_space=True)
    for name, argument, value in (
        ("srip", "iterations", 0),
        ("srip", "start", "random"),
        ("mhs", "distance", "cosine"),
        ("uniformity", "t", 0.0),
        ("koleo", "eps", 0.0),
        ("mgd", "sharpness", -1.0),
        ("mhp", "s", -1.0),
        ("mhc", "inner_steps", -1),
        ("orthoreg", "steepness", 0.0),
    ):
        with pytest.raises(ArgumentError, match=f"^{argument} must be"):
            create(name, **{argument: value})


def test_default_weights_are_the_released_ones():
    found = {name: (create(name).hidden_weight, create(name).output_weight) for name in EVERY}
    assert found["mhs"] == (0.1, 1) and found["mhp"] == (1, 10)
    assert found["relaxed-mhp"] == found["mhc"] == found["mgd"] == (0.01, 0.1)
    assert found["koleo"] == (0.1, 0.1) and found["mma"] == (0.07, 0.07) and found["uniformity"] == (1, 1)


# Poles.


def polygon(n):
    angles = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
    return torch.stack([angles.cos(), angles.sin()], 1)


def test_poles_find_the_holes():
    module = MHP(rate=0.05)
    for _ in range(60):
        value = module(polygon(5))
    assert value.item() == pytest.approx(-5 / 4, rel=1e-6)  # the polarisation of n points on the circle is n^2 / 4
    octahedron = torch.cat([torch.eye(3), -torch.eye(3)]).double()
    module = MHC(rate=0.02, sharpness=20)
    for _ in range(100):
        value = module(octahedron)
    near, far = (2 - 2 * math.cos(math.radians(degrees)) for degrees in (54.7356103, 180 - 54.7356103))
    expected = -math.log((math.exp(-20 * near) + math.exp(-20 * far)) / 2) / 20
    assert value.item() == pytest.approx(expected, abs=1e-5)
    assert near < value < near + math.log(6) / 20


@pytest.mark.parametrize("kind", [MHP, MHC])
@pytest.mark.parametrize("half_space", [False, True])
def test_inner_steps_are_those_of_sgd(kind, half_space):
    x = draw(7, 6, 4)
    module = kind(half_space=half_space, rate=1 / 32)
    module.prepare(x)
    pole = module.get_buffer("pole ")[0, 0].clone().requires_grad_()
    optimiser = torch.optim.SGD([pole], lr=1 / 32, momentum=0.9, weight_decay=5e-4)
    points = normalise(torch.cat([x, -x]) if half_space else x)
    for _ in range(25):
        chords = (points - pole / pole.norm()).square().sum(1)
        soft = -(-10 * chords).exp().mean().log() / 10
        loss = chords.reciprocal().mean() if kind is MHP else -soft
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    module.inner_steps = 25
    module(x)
    torch.testing.assert_close(module.get_buffer("pole ")[0, 0], pole.detach(), rtol=1e-9, atol=1e-12)
    before = module.get_buffer("pole ").clone()
    module.eval()(x)
    assert torch.equal(module.get_buffer("pole "), before)


@pytest.mark.parametrize("kind", [MHP, MHC])
def test_poles_are_saved_and_restored(kind):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    module = kind()
    module.prepare(model)
    for step in range(3):
        module.advance(step, seed=11, rate=0.02)
        module(model)
    fresh = kind()
    fresh.load_state_dict(module.state_dict())
    assert set(module.state_dict()) == {"rate", "pole 0", "pole 2"}
    for one in (module, fresh):
        one.advance(3, seed=11, rate=0.01)
    assert module(model).item() == fresh(model).item()
    for key, value in module.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[key])
    assert fresh.rate.item() == pytest.approx(0.01)


def test_poles_depend_on_the_seed_and_on_nothing_else():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(found))
        module = MHP()
        module.prepare(model)
        module.advance(0, seed, 0.1)
        found.append(module.get_buffer("pole 0").clone())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert (found[0][1] == 0).all()


def test_poles_of_layers_do_not_depend_on_the_batching(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(3, 5), nn.Linear(5, 2))
    values = []
    for padding in (2**21, 0):
        monkeypatch.setattr("hypersphere.energy.base.CPU_PADDING", padding)
        module = MHC()
        values.append([module(model).item() for _ in range(3)])
    assert values[0] == pytest.approx(values[1], rel=1e-5)


def test_a_matrix_of_another_shape_gets_another_pole():
    module = MHP()
    module(draw(0, 4, 3))
    assert module(draw(0, 4, 5)).isfinite()
    assert module.get_buffer("pole ").shape == (2, 1, 5)


# Classes of a batch.


def riesz(distance, s):
    return -math.log(distance) if s == 0 else distance**-s


@pytest.mark.parametrize("s", [0, 1, 2, 3.5])
@pytest.mark.parametrize("angular", [False, True])
@pytest.mark.parametrize("half_space", [False, True])
def test_each_label_once_is_the_mean_energy(s, angular, half_space):
    x = draw(4, 7, 4).requires_grad_()
    options = {"angular": angular, "half_space": half_space}
    expected = hyperspherical_energy(x, s, **options)
    for labels in (torch.randperm(7), torch.arange(7).repeat(3)):
        value = batch_versus_all(x, labels, s, **options)
        assert value.item() == pytest.approx(expected.item(), rel=1e-10)
        torch.testing.assert_close(
            torch.autograd.grad(value, x)[0],
            torch.autograd.grad(expected, x, retain_graph=True)[0],
            rtol=1e-9,
            atol=1e-12,
        )
    value = batch_pairs(x, torch.arange(7).repeat(2), s, **options)
    assert value.item() == pytest.approx(expected.item(), rel=1e-10)


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_batch_versus_all_one_pair_at_a_time(seed, labels):
    x = draw(seed, 5, 3)
    rows = plain_rows(x)

    def mean(chosen):
        terms = [riesz(math.dist(rows[y], rows[j]), 2) for y in chosen for j in range(5) if j != y]
        return sum(terms) / len(terms)

    picked = torch.tensor(labels)
    assert batch_versus_all(x, picked).item() == pytest.approx(mean(labels), rel=1e-9)
    assert batch_versus_all(x, picked, unique=True).item() == pytest.approx(mean(set(labels)), rel=1e-9)
    ignored = torch.cat([picked, torch.tensor([-100, -100])])
    assert batch_versus_all(x, ignored, ignore_index=-100).item() == pytest.approx(mean(labels), rel=1e-9)
    classes = set(labels)
    pairs = [riesz(math.dist(rows[a], rows[b]), 2) for a, b in itertools.permutations(classes, 2)]
    expected = sum(pairs) / max(len(pairs), 1)
    assert batch_pairs(x, picked, angular=False).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("gradient", ["both", "anchor"])
@pytest.mark.parametrize("options", [{}, {"half_space": True}, {"angular": True, "s": 1.0}, {"unique": True}], ids=str)
def test_gradient_of_batch_versus_all(gradient, options):
    x, labels = draw(6, 6, 3).requires_grad_(), torch.tensor([1, 4, 4, 0])

    def direct(w):
        """By the plain energy of each pair, over the whole matrix."""
        u = normalise(w)
        others = u.detach() if gradient == "anchor" else u
        chosen = labels.unique() if options.get("unique") else labels
        c = u[chosen] @ others.mT
        chords = [2 - 2 * c, 2 + 2 * c] if options.get("half_space") else [2 - 2 * c]
        own = chosen.unsqueeze(1) == torch.arange(6)
        s = options.get("s", 2.0)
        if options.get("angular"):
            terms = [(c.masked_fill(own, 0)).arccos() ** -s]
        else:
            terms = [q.masked_fill(own, 1) ** (-s / 2) for q in chords]
        total = sum(t.masked_fill(own, 0).sum() for t in terms)
        if options.get("half_space"):
            return (total + len(chosen) * 2**-s) / len(chosen) / 11
        return total / len(chosen) / 5

    value, expected = batch_versus_all(x, labels, gradient=gradient, **options), direct(x)
    assert value.item() == pytest.approx(expected.item(), rel=1e-10)
    torch.testing.assert_close(torch.autograd.grad(value, x)[0], torch.autograd.grad(expected, x)[0])


def test_anchor_gradient_is_half_in_expectation():
    x = draw(8, 6, 3).requires_grad_()
    both, anchor = (
        torch.autograd.grad(batch_versus_all(x, torch.arange(6), gradient=kind), x)[0] for kind in ("both", "anchor")
    )
    torch.testing.assert_close(both, 2 * anchor)


def test_classes_some_at_a_time(monkeypatch):
    x, labels = draw(9, 50, 6).requires_grad_(), torch.arange(13) % 7
    whole = batch_versus_all(x, labels, half_space=True)
    (expected,) = torch.autograd.grad(whole, x)
    regular = OrthoReg()(x)
    monkeypatch.setattr(minibatch_module, "CHUNK_ELEMENTS", 13 * 8)
    parts = batch_versus_all(x, labels, half_space=True)
    assert parts.item() == pytest.approx(whole.item(), rel=1e-12)
    torch.testing.assert_close(torch.autograd.grad(parts, x)[0], expected, rtol=1e-10, atol=1e-14)
    assert OrthoReg()(x).item() == pytest.approx(regular.item(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_degenerate_classes(dtype):
    a, zero = torch.tensor([[1.0, -2.0, 0.5]], dtype=dtype), torch.zeros(1, 3, dtype=dtype)
    for rows in ([a], [zero], [a, a], [a, -a], [a, zero, -a], [zero, zero]):
        for labels in ([0], [0] * 3, [], list(range(len(rows)))):
            x = torch.cat(rows).requires_grad_()
            picked = torch.tensor(labels, dtype=torch.int64)
            for half_space in (False, True):
                for value in (
                    batch_versus_all(x, picked, half_space=half_space),
                    batch_versus_all(x, picked, half_space=half_space, angular=True),
                    batch_pairs(x, picked, half_space=half_space),
                ):
                    assert value.isfinite() and torch.autograd.grad(value, x)[0].isfinite().all()


def test_near_classes_keep_their_digits():
    x = torch.tensor([[1.0, 0.0, 0.0], [1.0, 2e-3, 0.0], [0.0, 0.0, 1.0], [-1.0, 0.0, 3e-3]])
    for half_space in (False, True):
        value = batch_versus_all(x, torch.tensor([0]), half_space=half_space).item()
        expected = batch_versus_all(x.double(), torch.tensor([0]), half_space=half_space).item()
        assert value == pytest.approx(expected, rel=1e-4)


def test_subsets_average_to_the_whole():
    means = [hyperspherical_energy(WB[list(rows)]) for rows in itertools.combinations(range(5), 3)]
    assert torch.stack(means).mean().item() == pytest.approx(hyperspherical_energy(WB).item(), rel=1e-12)
    generator = torch.Generator().manual_seed(0)
    drawn = subset(WB, 3, generator)
    assert drawn.shape == (3, 4) and len({tuple(row) for row in drawn.tolist()} & {tuple(r) for r in WB.tolist()}) == 3
    assert torch.equal(drawn, subset(WB, 3, torch.Generator().manual_seed(0)))
    assert not torch.equal(drawn, subset(WB, 3, generator))
    counts = torch.zeros(5)
    for _ in range(400):
        counts += (subset(WB, 2, generator).unsqueeze(1) == WB).all(2).sum(0)
    assert (counts / 400 - 0.4).abs().max() < 0.1
    with pytest.raises(ArgumentError, match=r"^size must be at least 2"):
        subset(WB, 1)


def test_inter_class_takes_any_head_with_one_vector_a_class():
    head = InterClass(hs.losses.create("arcface", 8, 10, reduction="none"), form="pairs", s=1.0)
    x, y = torch.randn(4, 8), torch.tensor([0, 1, 1, 5])
    expected = head.head(x, y) + batch_pairs(head.head.weight, y, 1.0)
    torch.testing.assert_close(head(x, y), expected)
    ignored = InterClass(hs.losses.create("cosface", 8, 10))
    y[1] = -100
    assert ignored(x, y).isfinite()
    ignored(x, y).backward()
    assert ignored.head.weight.grad[7].abs().max() > 0
    with pytest.raises(ArgumentError, match=r"^head must have one class vector a class"):
        InterClass(hs.losses.create("subcenter-arcface", 8, 10))
    with pytest.raises(ArgumentError, match=r"^form must be"):
        InterClass(ignored.head, form="some")
    for bad in ((torch.zeros(3), y), (torch.zeros(3, 2), torch.zeros(2, 3))):
        with pytest.raises(ArgumentError, match="must have shape"):
            batch_versus_all(*bad)


# Features and prototypes.


def test_alignment_and_prototypes():
    for alpha in (0.5, 1, 2, 3):
        pairs = zip(plain_rows(XA), plain_rows(WA), strict=False)
        expected = sum(math.dist(a, b) ** alpha for a, b in pairs) / 3
        assert alignment(XA, WA[:3], alpha).item() == pytest.approx(expected, rel=1e-10)
    x = XA.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: alignment(z, WA[:3], 1.5), (x,))
    assert torch.autograd.grad(alignment(x, XA), x)[0].isfinite().all()
    w = WA.clone().requires_grad_()
    (only,) = torch.autograd.grad(prototype_loss(x, w, LABELS), (x,))
    assert only.abs().max() > 0 and not prototype_loss(XA, w, LABELS).requires_grad
    gap = hyperspherical_uniformity_gap(x, w, LABELS, between=0.0)
    by_x, by_w = torch.autograd.grad(gap, (x, w))
    assert by_x.abs().max() > 0 and (by_w == 0).all()
    energy = hyperspherical_uniformity_gap(XA, w, LABELS, within=0.0)
    assert energy.item() == pytest.approx(hyperspherical_energy(WA).item(), rel=1e-12)
    with pytest.raises(ArgumentError, match=r"^y must have the shape"):
        alignment(XA, WA)


def test_compiled_as_one_graph():
    torch._dynamo.reset()
    for name in ("orthonormal", "srip", "orthoreg", "mhs", "koleo", "mgd", "uniformity"):
        module = create(name)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert compiled(WA).item() == pytest.approx(module(WA).item(), rel=1e-9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", EVERY)
def test_captured_on_a_gpu(name):
    """Values and gradients of a CUDA graph, replayed on other weights, are those of the CPU."""
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 10))
    here, there = create(name), create(name).cuda()
    other = copy.deepcopy(model).cuda()
    weights = [layer.weight for layer in other if isinstance(layer, nn.Linear)]
    there.prepare(other)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            torch.autograd.grad(there(other), weights)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = there(other)
        gradients = torch.autograd.grad(value, weights)
    here.prepare(model)
    for module in (here, there):
        module.advance(0, 3, 0.05)
    with torch.no_grad():
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.copy_(torch.randn_like(p))
            q.copy_(p)
    graph.replay()
    expected = here(model)
    assert value.item() == pytest.approx(expected.item(), rel=1e-4)
    by_weight = torch.autograd.grad(expected, [layer.weight for layer in model if isinstance(layer, nn.Linear)])
    for found, wanted in zip(gradients, by_weight, strict=True):
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-3, atol=1e-4 * wanted.abs().max().item())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_many_classes_on_a_gpu():
    weight = torch.randn(100_000, 64, generator=torch.Generator().manual_seed(0)).cuda().requires_grad_()
    labels = torch.arange(512, device="cuda") * 7
    before = torch.cuda.memory_allocated()  # graphs of other tests may be alive
    torch.cuda.reset_peak_memory_stats()
    value = batch_versus_all(weight, labels)
    (gradient,) = torch.autograd.grad(value, weight)
    assert torch.cuda.max_memory_allocated() - before < 8e8
    rows = weight.detach().double()
    units = normalise(rows)
    q = (2 - 2 * units[labels] @ units.mT).scatter(1, labels.unsqueeze(1), math.inf)
    assert value.item() == pytest.approx((1 / q).sum().item() / 512 / 99_999, rel=1e-5)
    assert (gradient * weight).sum(1).abs().max() < 1e-6


@pytest.mark.parametrize("options", [{}, {"half_space": True}, {"s": 0.0}, {"angular": True}])
def test_second_derivatives_of_batch_versus_all(options):
    labels = torch.tensor([0, 2, 2])
    weight = WB.clone().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: batch_versus_all(x, labels, **options), weight)


def test_penalty_of_a_gradient_that_is_partly_of_a_batch():
    x = draw(3, 6, 4).requires_grad_()
    labels = torch.arange(6)

    def penalty(energy):
        (slope,) = torch.autograd.grad(energy(x) + x.square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    expected = penalty(hyperspherical_energy)
    torch.testing.assert_close(penalty(lambda x: batch_versus_all(x, labels)), expected, rtol=1e-9, atol=1e-12)


def test_second_derivatives_of_orthoreg():
    assert torch.autograd.gradgradcheck(OrthoReg(), WB.clone().requires_grad_())


@pytest.mark.parametrize("regulariser", [create("mhe", subset=4), MHP(), MHC()])
def test_energies_of_layers_draw_and_move_nothing(regulariser):
    model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3))
    regulariser.prepare(model)
    before = copy.deepcopy(regulariser.state_dict())
    first, second = (regulariser.layer_energies(model) for _ in range(2))
    assert first == second
    assert regulariser.training
    assert all(torch.equal(before[key], value) for key, value in regulariser.state_dict().items())


@pytest.mark.parametrize("half_space", [False, True])
def test_uniformity_beyond_the_range_of_numbers_is_low(half_space):
    x = torch.eye(4).requires_grad_()
    value = Uniformity(t=200.0, half_space=half_space)(x)
    value.backward()
    assert value.item() < -85
    assert x.grad.isfinite().all()
    exact = Uniformity(t=200.0)(torch.eye(4, dtype=torch.float64))
    assert exact.item() == pytest.approx(-400)
