"""Energies and orthogonality against closed forms, plain sums, published numbers and their symmetries."""

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
from hypersphere.energy import MHE, Orthogonal, Orthonormal, create, hyperspherical_energy
from hypersphere.errors import ArgumentError
from hypersphere.geometry import uniform_directions

WA = torch.tensor([[1, 2, 2], [-1, 0.5, 3], [0.3, -2, 1], [2, -1, -1]], dtype=torch.float64)
WB = torch.tensor(
    [[math.sin(1 + 0.7 * i + 1.3 * j) + 0.5 * (i == j) for j in range(4)] for i in range(5)], dtype=torch.float64
)
VECTORS = [  # matrix, half space, reduction, then the energies for s = 0, 1, 2
    (WA, False, "sum", -3.56491188401, 9.20593500792, 7.55289558614),
    (WA, False, "mean", -0.297075990334, 0.76716125066, 0.629407965512),
    (WA, True, "sum", -19.263962998, 41.4257834785, 33.6218800232),
    (WA, True, "mean", -0.343999339249, 0.739746133544, 0.600390714699),
    (WB, False, "mean", -0.131016798009, 1.01728071672, 1.45220252739),
    (WB, True, "mean", -0.230193559261, 0.918510372841, 1.19026430149),
]
GRADIENTS = {  # of the mean energy of WA
    (2, False): [
        [-0.0832470467697, -0.0679834884752, 0.10960701186],
        [0.112220294686, 0.0613799420855, 0.0271767745477],
        [0.0438734626172, 0.0224310525967, 0.0317000664083],
        [0.00776720654184, -0.0416319815955, 0.0571663946792],
    ],
    (0, False): [
        [-0.013909978897, -0.0401809897257, 0.0471359791742],
        [0.0528197676512, 0.00347194702335, 0.0170279313799],
        [0.0346738053729, 0.0228497111443, 0.0352972806767],
        [0.0151093762045, -0.0245345187565, 0.0547532711654],
    ],
    (2, True): [
        [-0.0583176609965, -0.00759962271069, 0.0367584532089],
        [-0.0303620994662, 0.0680060961923, -0.0214550491875],
        [0.00460815775498, -0.00526229596439, -0.0119070392553],
        [-0.0536005221334, -0.00512387870521, -0.102077165562],
    ],
}
POWERS = [0, 0.5, 1, 2, 3.7]


def riesz(distance, s):
    return -math.log(distance) if s == 0 else distance**-s


def plain_energy(rows, s, half_space=False):
    """The definition: one chord at a time."""
    units = [[p / math.hypot(*row) for p in row] for row in rows]
    if half_space:
        units += [[-p for p in row] for row in units]
    return math.fsum(2 * riesz(math.dist(a, b), s) for a, b in itertools.combinations(units, 2))


def energy(x, s, **options):
    return hyperspherical_energy(x, s, reduction="sum", **options).item()


def simplex(n):
    return torch.eye(n, dtype=torch.float64) - 1 / n


def polygon(n):
    angles = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
    return torch.stack([angles.cos(), angles.sin()], 1)


def icosahedron():
    golden = (1 + math.sqrt(5)) / 2
    corners = [(0, a, b * golden) for a, b in itertools.product((1, -1), repeat=2)]
    turned = [(*c[k:], *c[:k]) for c in corners for k in range(3)]
    return torch.tensor(turned, dtype=torch.float64)


def cross_polytope(d):
    return torch.cat([torch.eye(d), -torch.eye(d)]).double()


# Values.


@pytest.mark.parametrize(("w", "half_space", "reduction", "zero", "one", "two"), VECTORS)
def test_published_values(w, half_space, reduction, zero, one, two):
    for s, expected in ((0, zero), (1, one), (2, two)):
        value = hyperspherical_energy(w, s, half_space=half_space, reduction=reduction)
        assert value.item() == pytest.approx(expected, rel=1e-10)
        assert MHE(s=s, half_space=half_space, reduction=reduction)(w).item() == value.item()


def test_published_values_of_other_powers():
    assert energy(WA, 0.5) == pytest.approx(10.4253267779, rel=1e-10)
    assert energy(WA, 3) == pytest.approx(6.63044344897, rel=1e-10)


@pytest.mark.parametrize(("s", "half_space"), GRADIENTS)
def test_published_gradients(s, half_space):
    w = WA.clone().requires_grad_()
    hyperspherical_energy(w, s, half_space=half_space).backward()
    expected = torch.tensor(GRADIENTS[s, half_space], dtype=torch.float64)
    torch.testing.assert_close(w.grad, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("s", [*POWERS, 20])
@pytest.mark.parametrize("half_space", [False, True])
def test_the_definition(s, half_space):
    x = torch.randn(6, 4, dtype=torch.float64)
    expected = plain_energy(x.tolist(), s, half_space)
    assert energy(x, s, half_space=half_space) == pytest.approx(expected, rel=1e-9)
    pairs = 132 if half_space else 30
    assert hyperspherical_energy(x, s, half_space=half_space).item() == pytest.approx(expected / pairs, rel=1e-9)


def test_defaults_are_power_two_full_space_and_mean():
    assert hyperspherical_energy(WA).item() == pytest.approx(0.629407965512, rel=1e-10)
    assert MHE()(WA).item() == pytest.approx(0.629407965512, rel=1e-10)


@pytest.mark.parametrize("s", POWERS)
def test_closed_forms(s):
    antipodes = torch.tensor([[3.0, 0.0], [-0.1, 0.0]], dtype=torch.float64)
    assert energy(antipodes, s) == pytest.approx(2 * riesz(2, s), rel=1e-12)
    for n in (2, 3, 4, 9):
        side = math.sqrt(2 * n / (n - 1))
        assert energy(simplex(n), s) == pytest.approx(n * (n - 1) * riesz(side, s), rel=1e-12)
    for d in (2, 3, 6):
        closed = 2 * d * riesz(2, s) + 2 * d * (2 * d - 2) * riesz(math.sqrt(2), s)
        assert energy(cross_polytope(d), s) == pytest.approx(closed, rel=1e-12)
        frame = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64)).Q
        assert energy(frame, s, half_space=True) == pytest.approx(closed, rel=1e-12)
    for n in (2, 5, 10):
        closed = n * math.fsum(riesz(2 * math.sin(math.pi * k / n), s) for k in range(1, n))
        assert energy(polygon(n), s) == pytest.approx(closed, rel=1e-12)


def test_famous_configurations():
    for n in (5, 10):
        assert energy(polygon(n), 0) == pytest.approx(-n * math.log(n), rel=1e-12)
        assert energy(polygon(n), 2) == pytest.approx(n * (n**2 - 1) / 12, rel=1e-12)
        assert energy(polygon(n), 4) == pytest.approx(n * (n**2 - 1) * (n**2 + 11) / 720, rel=1e-12)
    assert energy(icosahedron(), 2) == pytest.approx(78, rel=1e-12)
    assert energy(icosahedron(), 1) == pytest.approx(98.3305061153, rel=1e-11)
    assert energy(icosahedron(), 0) == pytest.approx(-43.2122904609, rel=1e-11)


@pytest.mark.parametrize("s", [0, 1, 2])
def test_even_configurations_are_at_rest(s):
    for points in (simplex(5), cross_polytope(3), polygon(7), icosahedron()):
        points.requires_grad_()
        (grad,) = torch.autograd.grad(hyperspherical_energy(points, s), points)
        assert grad.norm() < 1e-12


@pytest.mark.parametrize(("s", "d"), [(2, 26), (1, 3), (0, 2), (0, 26)])
def test_random_directions_have_the_expected_energy(s, d):
    if s:
        log_gamma = scipy.special.gammaln
        logs = log_gamma((d + 1) / 2) + log_gamma((d - s) / 2) - log_gamma(d - s / 2)
        expected = 2 ** (d - s - 1) / math.sqrt(math.pi) * math.exp(logs)
    else:
        expected = -math.log(2) + (scipy.special.digamma(d) - scipy.special.digamma(d / 2)) / 2
    points = uniform_directions(1500, d + 1, dtype=torch.float64)
    assert hyperspherical_energy(points, s).item() == pytest.approx(expected, rel=5e-3)


def test_limits_in_the_power():
    pairs = 12
    for s in (1e-4, 1e-5):
        assert (energy(WA, s) - pairs) / s == pytest.approx(energy(WA, 0), abs=5 * s)
    closest = 0.866377460978
    assert (energy(WA, 200) / 2) ** (-1 / 200) == pytest.approx(closest, rel=1e-9)


# Symmetries.


@given(st.integers(0, 2**32 - 1), st.sampled_from(POWERS), st.booleans())
def test_symmetries(seed, s, half_space):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    value = energy(x, s, half_space=half_space)
    turn = torch.tensor(scipy.stats.ortho_group.rvs(4, random_state=seed))
    lengths = 10 ** torch.empty(5, 1, dtype=torch.float64).uniform_(-10, 10, generator=generator)
    order = torch.randperm(5, generator=generator)
    for same in (x @ turn, x * lengths, x[order]):
        assert energy(same, s, half_space=half_space) == pytest.approx(value, rel=1e-8, abs=1e-8)
    signs = torch.tensor([[1.0], [-1.0], [1.0], [1.0], [-1.0]])
    flipped = energy(x * signs, s, half_space=half_space)
    if half_space:
        assert flipped == pytest.approx(value, rel=1e-9, abs=1e-9)
    else:
        assert abs(flipped - value) > 1e-6


@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 2]), st.booleans())
def test_gradient_is_tangent_pushes_apart_and_scales_inversely(seed, s, half_space):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64).requires_grad_()
    value = hyperspherical_energy(x, s, half_space=half_space)
    (grad,) = torch.autograd.grad(value, x)
    assert (grad * x).sum(1).abs().max() < 1e-9 * max(1.0, grad.abs().max().item())
    longer = (4 * x).detach().requires_grad_()
    (scaled,) = torch.autograd.grad(hyperspherical_energy(longer, s, half_space=half_space), longer)
    torch.testing.assert_close(scaled, grad / 4, rtol=1e-9, atol=1e-12)
    step = 1e-4 / max(1.0, grad.square().sum().item())
    assert hyperspherical_energy(x - step * grad, s, half_space=half_space) < value


@given(st.integers(0, 2**32 - 1), st.integers(2, 5), st.sampled_from(POWERS))
def test_no_set_beats_the_optimum(seed, n, s):
    x = torch.randn(n, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert energy(x, s) >= energy(simplex(n), s) - 1e-9
    assert energy(x, s, half_space=True) >= energy(torch.eye(n, dtype=torch.float64), s, half_space=True) - 1e-9


@pytest.mark.parametrize("s", POWERS)
@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients(s, half_space, reduction):
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda v: hyperspherical_energy(v, s, half_space=half_space, reduction=reduction), (x,)
    )


# Degenerate input and types.


def value_and_gradient(x, s=2.0, **options):
    x = x.detach().clone().requires_grad_()
    value = hyperspherical_energy(x, s, **options)
    (grad,) = torch.autograd.grad(value, x)
    assert grad.dtype == x.dtype
    assert value.isfinite()
    assert grad.isfinite().all()
    return value, grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("s", [0, 1, 2])
@pytest.mark.parametrize("half_space", [False, True])
def test_duplicate_opposite_and_zero_vectors_stay_finite(dtype, s, half_space):
    x = torch.randn(1, 3).to(dtype)
    for rows in ([x, x], [x, x, x, x * 2], [x, -x], [x, x * 0], [x * 0, x * 0], [x, -x, x * 0, x]):
        value_and_gradient(torch.cat(rows), s, half_space=half_space)


@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 9.766e-4), (torch.float64, 4.215e-8)])
def test_equal_directions_count_as_a_short_way_apart(dtype, gap):
    x = torch.ones(2, 3, dtype=dtype)
    assert hyperspherical_energy(x, 1).item() == pytest.approx(1 / gap, rel=1e-3)
    assert gap == pytest.approx(math.sqrt(8 * torch.finfo(dtype).eps), rel=1e-3)


def test_zero_vectors_are_at_right_angles_to_everything_and_get_no_gradient():
    x = torch.cat([WA, torch.zeros(2, 3, dtype=torch.float64)])
    value, grad = value_and_gradient(x, 1, reduction="sum")
    right_angles = 2 * (2 * 4 + 1)
    assert value.item() == pytest.approx(9.20593500792 + right_angles / math.sqrt(2), rel=1e-10)
    assert (grad[4:] == 0).all()


@pytest.mark.parametrize("half_space", [False, True])
def test_no_vectors_and_one(half_space):
    value, _ = value_and_gradient(torch.zeros(0, 3), half_space=half_space)
    assert value.item() == 0
    for reduction, share in (("sum", 1), ("mean", 2)):
        value, grad = value_and_gradient(torch.ones(1, 3), 2, half_space=half_space, reduction=reduction)
        # With its mirror image one vector makes the two ordered pairs of a diameter.
        assert value.item() == pytest.approx(2 * 0.25 / share if half_space else 0, rel=1e-6)
        assert grad.abs().max() < 1e-6


@pytest.mark.parametrize("s", [13, 40])
def test_large_powers_do_not_overflow_on_the_diagonal(s):
    value, _ = value_and_gradient(torch.eye(3), s)
    assert value.item() == pytest.approx(2 ** (-s / 2), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_computed_in_float32(dtype, autocast):
    x = torch.randn(8, 5).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = hyperspherical_energy(x, 2)
    assert value.dtype == torch.float32
    expected = hyperspherical_energy(x.detach().double(), 2).item()
    assert value.item() == pytest.approx(expected, rel=1e-5)
    assert torch.autograd.grad(value, x)[0].dtype == dtype


def test_autocast_changes_nothing_for_float32():
    x = torch.randn(8, 5)
    with torch.autocast("cpu", torch.bfloat16):
        cast = hyperspherical_energy(x, 2)
    assert cast.dtype == torch.float32
    assert cast.item() == pytest.approx(hyperspherical_energy(x, 2).item(), rel=1e-6)


def test_layout_does_not_matter():
    x = torch.randn(10, 8, dtype=torch.float64).T[::2, ::3]
    assert not x.is_contiguous()
    assert energy(x, 2) == pytest.approx(energy(x.contiguous(), 2), rel=1e-12)


def test_compiled_as_one_graph():
    torch._dynamo.reset()
    compiled = torch.compile(MHE(s=2, half_space=True), fullgraph=True, backend="aot_eager")
    assert compiled(WA).item() == pytest.approx(0.600390714699, rel=1e-10)


# On a model.


def test_a_model_is_the_sum_of_its_layers():
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Conv1d(3, 5, 2), nn.Conv3d(2, 3, 1), nn.ModuleList([nn.Linear(6, 7)])
    ).double()
    weights = [model[0].weight, model[2].weight, model[3].weight, model[4][0].weight]
    for s, half_space in ((2.0, False), (0.0, True)):
        pairs = [len(w) * (2 * (2 * len(w) - 1) if half_space else len(w) - 1) for w in weights]
        expected = sum(
            plain_energy(w.flatten(1).tolist(), s, half_space) / p for w, p in zip(weights, pairs, strict=True)
        )
        assert MHE(s=s, half_space=half_space)(model).item() == pytest.approx(expected, rel=1e-10)


def test_gradients_reach_every_layer_and_no_bias():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    MHE()(model).backward()
    for layer in model:
        assert layer.weight.grad.abs().max() > 0
        assert layer.bias.grad is None


def test_a_single_neuron_has_no_energy_and_still_trains():
    layer = nn.Linear(3, 1)
    value = MHE()(layer)
    value.backward()
    assert value.item() == 0
    assert (layer.weight.grad == 0).all()


def test_a_layer_by_itself_and_a_shared_layer_count_once():
    layer = nn.Linear(3, 4)
    alone = MHE()(layer).item()
    assert alone == pytest.approx(hyperspherical_energy(layer.weight).item())
    assert MHE()(nn.Sequential(layer, nn.ReLU(), layer)).item() == pytest.approx(alone)


# Arguments.


def test_create_and_repr():
    module = create("MHE", s=1, half_space=True, reduction="sum")
    assert isinstance(module, MHE)
    assert module(WA).item() == pytest.approx(41.4257834785, rel=1e-10)
    assert repr(module) == "MHE(s=1, half_space=True, reduction='sum')"


@pytest.mark.parametrize(
    ("argument", "options"), [("s", {"s": -1.0}), ("s", {"s": math.nan}), ("reduction", {"reduction": "max"})]
)
def test_bad_options_are_named(argument, options):
    with pytest.raises(ArgumentError, match=f"^{argument} must be "):
        hyperspherical_energy(WA, **options)
    with pytest.raises(ArgumentError, match=f"^{argument} must be "):
        MHE(**options)


def test_bad_targets_are_named():
    for shape in ((3,), (2, 3, 4)):
        with pytest.raises(ArgumentError, match=r"^vectors must have shape \(n, d\), got"):
            hyperspherical_energy(torch.zeros(shape))
    with pytest.raises(ArgumentError, match=r"^target must contain linear or convolution layers, got ReLU"):
        MHE()(nn.ReLU())


# Orthogonality.


def chirp(shape, step, phase):
    i = torch.arange(math.prod(shape), dtype=torch.float64)
    return torch.sin(step * i.square() + phase).reshape(shape)


def plain_orthogonality(rows, keep_norms, normalised):
    """Both penalties on lists of numbers, one pair of kernels after the other."""
    if normalised:
        rows = [[v / math.hypot(*row) for v in row] for row in rows]
    total = 0.0
    for i, first in enumerate(rows):
        for j, second in enumerate(rows):
            if i == j and keep_norms:
                continue
            total += (sum(a * b for a, b in zip(first, second, strict=True)) - (i == j)) ** 2
    return total


def test_orthonormality_of_known_kernels():
    weight = chirp((3, 2, 3, 3), 0.3, 0.5).flatten(1).requires_grad_()
    value = Orthonormal()(weight)
    assert value.item() == pytest.approx(198.925274339, abs=1e-9)
    (grad,) = torch.autograd.grad(value, weight)
    assert grad[:, 0].tolist() == pytest.approx([14.6089154515, -5.57979976052, -11.6255858956], abs=1e-9)
    assert grad.norm().item() == pytest.approx(178.433489108, abs=1e-8)
    assert Orthonormal(normalised=True)(weight).item() == pytest.approx(0.207121568037, abs=1e-9)


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        (Orthonormal, 25.0, [[16.0, 40.0, 8.0], [8.0, 20.0, 4.0]]),
        (Orthogonal, 8.0, [[0.0, 8.0, 8.0], [8.0, 16.0, 0.0]]),
    ],
)
def test_penalties_of_two_kernels(kind, value, gradient):
    weight = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    found = kind()(weight)
    assert found.item() == pytest.approx(value, rel=1e-12)
    assert torch.autograd.grad(found, weight)[0].tolist() == gradient
    assert kind(squared=False)(weight).item() == pytest.approx(math.sqrt(value), rel=1e-12)
    assert kind(normalised=True)(weight).item() == pytest.approx(0.8, rel=1e-12)


@pytest.mark.parametrize("kind", [Orthonormal, Orthogonal])
@pytest.mark.parametrize("options", [{}, {"squared": False}, {"normalised": True}], ids=str)
def test_gradients_of_orthogonality(kind, options):
    weight = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(kind(**options), (weight,))


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 6))
def test_orthogonality_against_loops_and_its_floor(seed, n, d):
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for kind in (Orthonormal, Orthogonal):
        for normalised in (False, True):
            expected = plain_orthogonality(x.tolist(), kind is Orthogonal, normalised)
            assert kind(normalised=normalised)(x).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert Orthonormal()(x).item() >= max(0, n - d) - 1e-9
    basis = torch.linalg.qr(x.mT).Q.mT  # orthonormal rows
    assert Orthonormal()(basis).item() == pytest.approx(0, abs=1e-24)
    scaled = basis * torch.arange(1, len(basis) + 1).unsqueeze(1)
    assert Orthogonal()(scaled).item() == pytest.approx(0, abs=1e-20)


@pytest.mark.parametrize("kind", [Orthonormal, Orthogonal])
def test_orthogonality_of_a_module(kind):
    """Decoupled layers alone where there are any, each group by itself, of a transposed one the kernels it has."""
    ordinary = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), nn.Linear(5, 3))
    groups = [*ordinary[0].weight.flatten(1).chunk(2), ordinary[2].weight]
    expected = sum(plain_orthogonality(rows.tolist(), kind is Orthogonal, False) for rows in groups)
    assert kind()(ordinary).item() == pytest.approx(expected, rel=1e-5)
    decoupled = hs.nn.DecoupledConvTranspose1d(3, 4, 2, operator="tanh")
    mixed = nn.Sequential(ordinary, hs.nn.SphereConv2d(2, 5, 3), decoupled)
    rows = [mixed[1].weight.flatten(1), decoupled.weight.transpose(0, 1).flatten(1)]
    expected = sum(plain_orthogonality(one.tolist(), kind is Orthogonal, True) for one in rows)
    value = kind(normalised=True)(mixed)
    assert value.item() == pytest.approx(expected, rel=1e-5)
    value.backward()
    assert ordinary[0].weight.grad is None and decoupled.radius_raw.grad is None
    assert decoupled.weight.grad.abs().max() > 0


@pytest.mark.parametrize("kind", [Orthonormal, Orthogonal])
def test_orthogonality_of_degenerate_kernels(kind):
    for options in ({}, {"squared": False}, {"normalised": True}):
        for values in (torch.zeros(3, 4), torch.zeros(0, 4), torch.eye(3), torch.ones(1, 3)):
            rows = values.clone().requires_grad_()
            value = kind(**options)(rows)
            assert value.isfinite() and torch.autograd.grad(value, rows)[0].isfinite().all()


def test_orthogonality_is_computed_in_float32_under_autocast():
    x = torch.randn(6, 5)
    with torch.autocast("cpu", torch.bfloat16):
        value = Orthonormal()(x)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(Orthonormal()(x.double()).item(), rel=1e-5)


def test_orthogonality_is_created_by_name_and_refuses_what_it_cannot_take():
    module = create("orthogonal", normalised=True)
    assert repr(module) == "Orthogonal(squared=True, normalised=True)"
    with pytest.raises(ArgumentError, match=r"^target must have shape \(n, d\), got \(3,\)"):
        module(torch.zeros(3))
    with pytest.raises(ArgumentError, match=r"^target must contain linear or convolution layers, got ReLU"):
        module(nn.ReLU())


def test_energy_of_a_decoupled_transposed_convolution_is_that_of_its_kernels():
    layer = hs.nn.DecoupledConvTranspose2d(3, 4, 2)
    expected = hyperspherical_energy(layer.weight.transpose(0, 1).flatten(1))
    assert MHE()(layer).item() == pytest.approx(expected.item(), rel=1e-6)
