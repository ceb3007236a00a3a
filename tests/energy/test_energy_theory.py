"""Closed forms, limits and bounds of energies against published numbers, quadrature, optimisation and sampling."""

import itertools
import math

import pytest
import scipy.integrate
import scipy.spatial
import scipy.special
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.polynomial import polynomial as poly

from hypersphere.energy import hyperspherical_energy
from hypersphere.energy import theory as th
from hypersphere.errors import ArgumentError
from hypersphere.geometry import uniform_directions

WA = torch.tensor([[1, 2, 2], [-1, 0.5, 3], [0.3, -2, 1], [2, -1, -1]], dtype=torch.float64)
XA = torch.tensor([[0.5, -1, 2], [1, 1, 0.2], [-0.7, 0.4, 0.9]], dtype=torch.float64)
WB = torch.tensor(
    [
        [-1.2, -0.8, 0.9, 0.2, -1.2],
        [-0.2, -0.1, -1.0, 0.7, -1.2],
        [-0.3, 0.1, -0.2, 0.3, 0.7],
        [1.4, -0.6, 0.4, 0.6, -0.6],
    ],
    dtype=torch.float64,
)
POWERS = [0, 0.5, 1, 2, 3.7]


def riesz(distance, s):
    return -math.log(distance) if s == 0 else distance**-s


def energy(x, s, **options):
    return hyperspherical_energy(x, s, **options).item()


def simplex(n):
    return torch.eye(n, dtype=torch.float64) - 1 / n


def polygon(n):
    angles = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
    return torch.stack([angles.cos(), angles.sin()], 1)


def icosahedron():
    golden = (1 + math.sqrt(5)) / 2
    corners = [(0, a, b * golden) for a, b in itertools.product((1, -1), repeat=2)]
    return torch.tensor([(*c[k:], *c[:k]) for c in corners for k in range(3)], dtype=torch.float64)


def cross_polytope(d):
    return torch.cat([torch.eye(d), -torch.eye(d)]).double()


def e8_roots():
    pairs = []
    for i, j in itertools.combinations(range(8), 2):
        for a, b in itertools.product((2, -2), repeat=2):
            row = [0] * 8
            row[i], row[j] = a, b
            pairs.append(row)
    halves = [signs for signs in itertools.product((1, -1), repeat=8) if math.prod(signs) == 1]
    return torch.tensor(pairs + halves, dtype=torch.float64)


# Random directions.


@pytest.mark.parametrize(
    ("s", "p", "expected"),
    [
        (1, 2, 1),
        (0.5, 2, 0.942809041582),
        (1, 3, 0.848826363157),
        (2, 3, 1),
        (2, 26, 0.520833333333),
        (2, 575, 0.500872600349),
        (1, 575, 0.707568891951),
        (0, 1, 0),
        (0, 2, -0.19314718056),
        (0, 3, -0.25),
        (0, 26, -0.336773430789),
        (0, 575, -0.3461384296),
    ],
)
def test_published_energies_of_random_directions(s, p, expected):
    assert th.random_energy(s, p + 1) == pytest.approx(expected, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("angular", [False, True])
@pytest.mark.parametrize(("s", "d"), [(0, 2), (0.9, 2), (0, 3), (1, 3), (1.9, 3), (2, 4), (2, 5), (3.7, 40), (2, 300)])
def test_random_directions_against_quadrature(s, d, angular):
    def integrate(f):
        # With x^20 for the angle the kernel's pole at 0 is none.
        parts = [(0, 0.5), (0.5, 0.9), (0.9, 1), (1, math.pi ** (1 / 20))]
        values = (scipy.integrate.quad(lambda x: f(x**20) * 20 * x**19, a, b, limit=200) for a, b in parts)
        return sum(value[0] for value in values)

    def kernel(t):
        return riesz(t if angular else 2 * math.sin(t / 2), s)

    expected = integrate(lambda t: kernel(t) * math.sin(t) ** (d - 2)) / integrate(lambda t: math.sin(t) ** (d - 2))
    assert th.random_energy(s, d, angular=angular) == pytest.approx(expected, rel=1e-7, abs=1e-8)


@pytest.mark.parametrize("angular", [False, True])
@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize(("s", "n", "d"), [(2, 40, 8), (0, 3, 3), (1, 2, 6)])
def test_random_directions_have_this_energy_on_average(s, n, d, half_space, angular):
    x = torch.randn(100_000 // n**2, n, d, dtype=torch.float64)
    values = hyperspherical_energy(x, s, half_space=half_space, angular=angular)
    expected = th.random_energy(s, d, half_space=half_space, angular=angular, n=n)
    assert (values.mean() - expected).abs() < 5 * values.std() / math.sqrt(len(values))


def test_limits_of_random_energy():
    for d in (2, 3, 7):
        assert th.random_energy(d - 1, d) == math.inf
        assert th.random_energy(d, d, half_space=True, n=4) == math.inf
        assert th.random_energy(d - 1, d, angular=True) == math.inf
        assert math.isfinite(th.random_energy(d - 1.1, d))
    assert th.random_energy(1, 4, half_space=True) == th.random_energy(1, 4)
    assert th.random_energy(9, 4, half_space=True, n=1) == pytest.approx(2**-9)
    assert th.random_energy(1, 4, n=1) == th.random_energy(1, 4, half_space=True, n=0) == 0
    huge = th.random_energy(2, 10**6, angular=True)
    assert huge == pytest.approx((math.pi / 2) ** -2, rel=1e-5)
    assert th.random_energy(2, 10**6) == pytest.approx(0.5, rel=1e-5)


# Optimal energies.


def test_published_configurations():
    for s, five, ten, angular, four, cross, ico in (
        (0, -8.04718956217, -23.0258509299, -11.5002548851, -5.88497551807, -12.4766492501, -43.2122904609),
        (1, 13.7638192047, 77.2489979594, 11.9366207319, 7.34846922835, 19.9705627485, 98.3305061153),
        (2, 10, 82.5, 7.91571747206, 4.5, 13.5, 78),
    ):
        assert th.polygon_energy(5, s) == pytest.approx(five, rel=1e-10)
        assert th.polygon_energy(10, s) == pytest.approx(ten, rel=1e-10)
        assert th.polygon_energy(5, s, angular=True) == pytest.approx(angular, rel=1e-10)
        assert th.simplex_energy(4, s) == pytest.approx(four, rel=1e-10)
        assert th.cross_polytope_energy(3, s) == pytest.approx(cross, rel=1e-10)
        assert th.icosahedron_energy(s) == pytest.approx(ico, rel=1e-10)
    assert th.polygon_energy(5, 4) == pytest.approx(6, rel=1e-12)
    assert th.polygon_energy(10, 4) == pytest.approx(152.625, rel=1e-12)
    for n in (2, 7, 64):
        assert th.polygon_energy(n, 0) == pytest.approx(-n * math.log(n), rel=1e-12)
        assert th.polygon_energy(n, 4) == pytest.approx(n * (n**2 - 1) * (n**2 + 11) / 720, rel=1e-12)


@pytest.mark.parametrize("s", POWERS)
def test_configurations_against_their_points(s):
    for angular in (False, True):
        points = energy(polygon(7), s, reduction="sum", angular=angular)
        assert th.polygon_energy(7, s, angular=angular) == pytest.approx(points, rel=1e-10)
    assert th.simplex_energy(6, s) == pytest.approx(energy(simplex(6), s, reduction="sum"), rel=1e-10)
    assert th.cross_polytope_energy(4, s) == pytest.approx(energy(cross_polytope(4), s, reduction="sum"), rel=1e-10)
    assert th.icosahedron_energy(s) == pytest.approx(energy(icosahedron(), s, reduction="sum"), rel=1e-10)


def one_of_each_line(points):
    first = [next(value for value in row if value) > 0 for row in points.tolist()]
    return points[first]


@pytest.mark.parametrize("s", POWERS)
def test_floor_is_attained_by_regular_sets(s):
    flat_simplex = torch.linalg.qr(simplex(5)).R.T[:, :4]  # the same angles in four dimensions
    for points in (flat_simplex, cross_polytope(3), icosahedron(), e8_roots(), polygon(9)):
        assert th.floor_energy(*points.shape, s) == pytest.approx(energy(points, s), rel=1e-10)
    frame, hexagon = torch.eye(6, 8, dtype=torch.float64), polygon(6)
    for lines in (frame, *map(one_of_each_line, (hexagon, icosahedron(), e8_roots()))):
        for angular in (False, True):
            floor = th.floor_energy(*lines.shape, s, half_space=True, angular=angular)
            assert floor == pytest.approx(energy(lines, s, half_space=True, angular=angular), rel=1e-9)
    assert th.floor_energy(9, 2, s, angular=True) == pytest.approx(energy(polygon(9), s, angular=True), rel=1e-10)
    assert th.floor_energy(2, 5, s, angular=True) == pytest.approx(riesz(math.pi, s), rel=1e-9)


def test_angular_floor_is_the_simplex_where_the_kernel_is_convex():
    for n in (3, 4, 6):
        arc = math.acos(-1 / (n - 1))
        assert th.floor_energy(n, 6, 2, angular=True) == pytest.approx(arc**-2, rel=1e-4)
        assert th.floor_energy(n, 6, 0, angular=True) < -math.log(arc) - 1e-3
    # Opposite directions pay for the logarithm: four directions of the plane have less than a simplex.
    assert energy(cross_polytope(2), 0, angular=True) < -math.log(math.acos(-1 / 3))
    assert th.floor_energy(4, 3, 0, angular=True) < energy(cross_polytope(2), 0, angular=True)


def interpolant(nodes, values, slopes):
    """Newton's form of the polynomial with these values and slopes; without a slope the node counts once."""
    xs, table = [], []
    for node, value, slope in zip(nodes, values, slopes, strict=True):
        for _ in range(1 if slope is None else 2):
            xs.append(node)
            table.append(value)
    slope_at = dict(zip(nodes, slopes, strict=True))
    result, basis = [table[0]], [1.0]
    column = table
    for order in range(1, len(xs)):
        column = [
            slope_at[xs[i]] if xs[i] == xs[i + order] else (column[i + 1] - column[i]) / (xs[i + order] - xs[i])
            for i in range(len(column) - 1)
        ]
        basis = poly.polymul(basis, [-xs[order - 1], 1.0])
        result = poly.polyadd(result, [column[0] * c for c in basis])
    return result


@pytest.mark.parametrize(
    ("n", "d"), [(6, 4), (7, 4), (9, 4), (13, 4), (14, 4), (20, 4), (30, 4), (70, 8), (600, 512), (1500, 512)]
)
@pytest.mark.parametrize("s", [0, 2, 5])
def test_floor_has_a_certificate(n, d, s):
    # A polynomial below the kernel whose expansion in Gegenbauer polynomials has no negative coefficient beyond the
    # first proves its bound for every set; at the quadrature's nodes it touches the kernel.
    nodes, weights = th._quadrature(n, d, lines=False)

    def kernel(t):
        return riesz(math.sqrt(2 - 2 * t), s)

    slopes = [None if abs(t + 1) < 1e-12 else (s or 1) * (2 - 2 * t) ** (-s / 2 - 1) for t in nodes]
    h = interpolant(nodes, [kernel(t) for t in nodes], slopes)
    for t in torch.linspace(-1, 0.999, 400, dtype=torch.float64).tolist():
        assert poly.polyval(t, h) <= kernel(t) + 1e-9
    x, w = scipy.special.roots_jacobi(20, (d - 3) / 2, (d - 3) / 2)
    for degree in range(1, len(h)):
        assert (w * poly.polyval(x, h) * scipy.special.eval_gegenbauer(degree, d / 2 - 1, x)).sum() / w.sum() > -1e-9
    mean = (w * poly.polyval(x, h)).sum() / w.sum()
    bound = (n * mean - poly.polyval(1, h)) / (n - 1)
    assert th.floor_energy(n, d, s) == pytest.approx(bound, rel=1e-8)
    assert min(weights) > -1e-12
    assert math.fsum(weights) == pytest.approx(1, rel=1e-12)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(2, 12),
    st.integers(2, 5),
    st.sampled_from([0, 1, 2, 3.7]),
    st.booleans(),
    st.booleans(),
)
def test_no_set_is_below_the_floor(seed, n, d, s, half_space, angular):
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()
    options = {"half_space": half_space, "angular": angular}
    floor = th.floor_energy(n, d, s, **options)
    for _ in range(10):  # downhill, where a bound that is wrong would show
        value = hyperspherical_energy(x, s, **options)
        (grad,) = torch.autograd.grad(value, x)
        with torch.no_grad():
            x = (x / x.norm(dim=1, keepdim=True) - n * grad.clamp(-0.1 / n, 0.1 / n)).requires_grad_()
    assert energy(x.detach(), s, **options) >= floor - 1e-9 * abs(floor) - 1e-12


@pytest.mark.parametrize("half_space", [False, True])
@pytest.mark.parametrize(("n", "d"), [(7, 3), (24, 4), (20, 8), (40, 3)])
def test_floor_is_close(n, d, half_space):
    best = math.inf
    for _ in range(2):
        x = torch.randn(n, d, dtype=torch.float64).requires_grad_()
        solver = torch.optim.LBFGS([x], max_iter=100, line_search_fn="strong_wolfe", tolerance_change=1e-12)

        def closure(x=x, solver=solver):
            solver.zero_grad()
            value = n * hyperspherical_energy(x, 2, half_space=half_space)
            value.backward()
            return value

        solver.step(closure)
        best = min(best, energy(x.detach(), 2, half_space=half_space))
    floor = th.floor_energy(n, d, 2, half_space=half_space)
    assert floor <= best <= 1.02 * floor


def test_floor_rises_with_n_to_the_energy_of_chance_and_stays_below():
    for half_space in (False, True):
        floors = [th.floor_energy(n, 5, 2, half_space=half_space) for n in (2, 5, 6, 9, 10, 11, 20, 70, 500, 10**5)]
        assert floors == sorted(floors)
        assert floors[-1] < th.random_energy(2, 5)
        assert floors[-1] == pytest.approx(th.random_energy(2, 5), rel=1e-2)
    assert th.floor_energy(10**9, 3, 1) < th.random_energy(1, 3)
    n = 1000  # an expansion that is known for the logarithmic energy on the sphere
    expansion = (0.5 - math.log(2)) * n**2 - n / 2 * math.log(n) - 0.0556053 * n
    assert th.floor_energy(n, 3, 0) * n * (n - 1) == pytest.approx(expansion, rel=1e-4)


def test_floor_without_pairs():
    assert th.floor_energy(1, 5, 2) == th.floor_energy(0, 5, 2) == th.floor_energy(0, 5, 2, half_space=True) == 0
    assert th.floor_energy(1, 5, 2, half_space=True) == 0.25
    assert th.floor_energy(1, 2, 2, half_space=True) == pytest.approx(0.25, rel=1e-12)
    assert th.floor_energy(1, 5, 1, half_space=True, angular=True) == pytest.approx(1 / math.pi)


LAYERS = {
    "wide": [(64, 27), *[(64, 576)] * 2, (128, 576), *[(128, 1152)] * 2, (256, 1152), *[(256, 2304)] * 2, (256, 4096)],
    "small": [(32, 27), *[(32, 288)] * 2, (64, 288), *[(64, 576)] * 5, (64, 1024)],
    "three": [(32, 27), (64, 288), (64, 576), (64, 1024)],
}


@pytest.mark.parametrize(
    ("layers", "k", "chance", "floor"),
    [
        ("wide", None, 5.014323176, 5.000226611),
        ("wide", 40, 5.131009703, 5.079289452),
        ("wide", 30, 5.175877868, 5.118611802),
        ("small", None, 5.004826512, 4.977272823),
        ("three", None, 2.013721041, 1.993083347),
    ],
)
def test_published_energies_of_networks(layers, k, chance, floor):
    shapes = [(n, k if k and k < d else d) for n, d in LAYERS[layers]]
    assert sum(th.random_energy(2, d, half_space=True, n=n) for n, d in shapes) == pytest.approx(chance, abs=1e-9)
    assert sum(th.floor_energy(n, d, 2, half_space=True) for n, d in shapes) == pytest.approx(floor, abs=1e-9)


def test_published_energies_of_a_classifier():
    assert 10 * th.random_energy(2, 256) == pytest.approx(5.019762846, abs=1e-9)
    assert 10 * th.floor_energy(100, 256, 2) == pytest.approx(4.95, abs=1e-12)


def test_asymptotic_energies():
    for p, constant in ((1, 0.318309886184), (2, 0.25), (3, 0.212206590789)):
        assert th.asymptotic_energy(50, p + 1, p) == pytest.approx(constant * 2500 * math.log(50), rel=1e-10)
    assert th.asymptotic_energy(10, 4, 2) == pytest.approx(100)
    assert th.asymptotic_energy(10, 2, 4) == pytest.approx(2 * (math.pi**4 / 90) / (2 * math.pi) ** 4 * 10**5)
    for s, tolerance in ((0.5, 0.05), (1, 0.03), (1.5, 0.01), (2, 1e-6), (3, 1e-6)):
        ratio = th.polygon_energy(10_000, s) / th.asymptotic_energy(10_000, 2, s)
        assert ratio == pytest.approx(1, abs=tolerance)
    with pytest.raises(ArgumentError, match=r"^s must be at least 0 and at most 2, got 3$"):
        th.asymptotic_energy(10, 3, 3)


@pytest.mark.parametrize("s", [0, 1, 2])
def test_even_sets_are_at_rest(s):
    north = [[0, 0, 1.0], [0, 0, -1.0]]
    bipyramid = torch.tensor(north + [[*row, 0.0] for row in polygon(3).tolist()], dtype=torch.float64)
    for points in (polygon(7), simplex(5), cross_polytope(3), icosahedron(), bipyramid):
        units = points / points.norm(dim=1, keepdim=True)
        n, d = units.shape
        lifted = [torch.cat([units[:, :at], torch.zeros(n, 1).double(), units[:, at:]], 1) for at in range(d + 1)]
        for same in (units, *lifted, torch.cat([units, units], 1)):
            same.requires_grad_()
            (grad,) = torch.autograd.grad(hyperspherical_energy(same, s), same)
            assert grad.norm() < 1e-12
    moved = (polygon(7) + 0.1 * torch.randn(7, 2)).requires_grad_()
    (grad,) = torch.autograd.grad(hyperspherical_energy(moved, s), moved)
    assert grad.norm() > 1e-4


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.3, 1, 2, 5]))
def test_mean_energy_is_at_least_what_the_mean_logarithm_says(seed, s):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    assert math.log(energy(x, s)) >= s * energy(x, 0) - 1e-12


@pytest.mark.parametrize(("d", "expected"), [(2, -1.57502720448), (3, -2.07977706059), (128, -3.9375300102)])
def test_uniformity_loss_of_the_uniform_distribution(d, expected):
    assert th.uniform_limit(d) == pytest.approx(expected, rel=1e-10)
    x = uniform_directions(1500, d, dtype=torch.float64)
    sampled = torch.pdist(x).square().mul(-2).exp().mean().log().item()
    assert th.uniform_limit(d) == pytest.approx(sampled, abs=0.05)


def test_uniformity_loss_for_other_potentials():
    for d, t in ((5, 0.3), (64, 10.0), (3, 40.0)):
        expected = math.log(scipy.special.hyp0f1(d / 2, t * t)) - 2 * t
        assert th.uniform_limit(d, t) == pytest.approx(expected, rel=1e-10)
    assert math.isfinite(th.uniform_limit(4, 2000.0))


# Diverse neurons.


def test_published_diversity_bound():
    v, y = torch.tensor([1.0, -1, 1, -1]), torch.tensor([0.5, -0.2, 1], dtype=torch.float64)
    found = th.diversity_bound(WA, v, XA, y)
    expected = (2.65041666667, 1.60408866718, 1.32926462544, 2.9049225463)
    assert found[:4] == pytest.approx(expected, rel=1e-10)
    assert found.bound == pytest.approx(2.9049225463 / 1.60408866718)


@given(st.integers(0, 2**32 - 1), st.sampled_from([torch.relu, torch.tanh, torch.nn.functional.gelu]))
def test_diversity_bound_against_automatic_differentiation(seed, activation):
    generator = torch.Generator().manual_seed(seed)
    w, v, x, y = (torch.randn(*shape, generator=generator).double() for shape in ((5, 4), (5,), (3, 4), (3,)))
    found = th.diversity_bound(w, v, x, y, activation)
    w.requires_grad_()
    loss = (activation(x @ w.T) @ v - y).square().mean() / 2
    (grad,) = torch.autograd.grad(loss, w)
    assert found.loss == pytest.approx(loss.item(), rel=1e-9)
    assert found.gradient == pytest.approx(grad.norm().item(), rel=1e-6, abs=1e-7)
    assert found.residual <= found.bound * (1 + 1e-6)
    jacobian = torch.autograd.functional.jacobian(lambda u: activation(x @ u.T) @ v, w.detach()).flatten(1)
    assert found.sigma_min == pytest.approx(torch.linalg.svdvals(jacobian)[-1].item(), abs=1e-6)


def test_equal_neurons_bound_nothing():
    x = torch.randn(4, 3)
    found = th.diversity_bound(torch.ones(2, 3), torch.ones(2), x, torch.zeros(4))
    assert found.sigma_min < 1e-7
    with pytest.raises(ArgumentError, match=r"^output_weights must have shape \(2,\), got \(3,\)"):
        th.diversity_bound(torch.ones(2, 3), torch.ones(3), x, torch.zeros(4))
    with pytest.raises(ArgumentError, match=r"^inputs and targets must have shapes \(m, 3\) and \(m,\), got"):
        th.diversity_bound(torch.ones(2, 3), torch.ones(2), x, torch.zeros(5))


# Projections.


@pytest.mark.parametrize(
    ("c", "before", "ten", "thirty", "spread_ten", "spread_thirty"),
    [
        (0, 0.5, 0.571428571429, 0.518518518519, 0.0163265306122, 0.00076817558299),
        (0.3, 0.549450549451, 0.642072213501, 0.573463573464, 0.0520143234205, 0.00578546191896),
        (0.6, 0.78125, 0.973214285714, 0.831018518519, 0.309773596939, 0.0415378515089),
        (0.9, 2.63157894737, 3.61654135338, 2.88693957115, 7.71382214936, 1.0498909826),
    ],
)
def test_published_energies_of_projected_pairs(c, before, ten, thirty, spread_ten, spread_thirty):
    assert th.pair_energy(c).item() == pytest.approx(before, rel=1e-10)
    assert th.projected_energy_mean(c, 10).item() == pytest.approx(ten, rel=1e-10)
    assert th.projected_energy_mean(c, 30).item() == pytest.approx(thirty, rel=1e-10)
    assert th.projected_energy_variance(c, 10).item() == pytest.approx(spread_ten, rel=1e-10)
    assert th.projected_energy_variance(c, 30).item() == pytest.approx(spread_thirty, rel=1e-10)


@pytest.mark.parametrize(
    ("c", "before", "ten", "thirty"),
    [
        (0, -0.34657359028, -0.317261904762, -0.337804356202),
        (0.6, -0.235001814623, -0.205690129105, -0.226232580545),
    ],
)
def test_published_logarithmic_energies_of_projected_pairs(c, before, ten, thirty):
    found = (th.pair_energy(c, 0), th.projected_energy_mean(c, 10, 0), th.projected_energy_mean(c, 30, 0))
    assert [value.item() for value in found] == pytest.approx([before, ten, thirty], rel=1e-10)


@pytest.mark.parametrize("s", [0, 2])
@pytest.mark.parametrize("k", [8, 12, 30])
def test_projected_energies_by_sampling(k, s):
    w = torch.randn(6, 12, dtype=torch.float64)
    cross = ~torch.eye(6, dtype=torch.bool)
    units = w / w.norm(dim=1, keepdim=True)
    expected = th.projected_energy_mean((units @ units.T)[cross], k, s).mean()
    projected = torch.randn(40_000, 12, k, dtype=torch.float64).mT @ units.T
    projected = projected / projected.norm(dim=1, keepdim=True)
    values = th.pair_energy((projected.mT @ projected)[:, cross], s).mean(1)
    assert (values.mean() - expected).abs() < 4.5 * values.std() / 200


@pytest.mark.parametrize("k", [12, 30])
def test_random_projections_have_the_gradient_of_the_energy_on_average(k):
    w = torch.randn(6, 12, dtype=torch.float64).requires_grad_()
    (direct,) = torch.autograd.grad(hyperspherical_energy(w, 2, half_space=True), w)
    projected = w @ torch.randn(20_000, 12, k, dtype=torch.float64)
    (mean,) = torch.autograd.grad(hyperspherical_energy(projected, 2, half_space=True).mean(), w)
    assert torch.nn.functional.cosine_similarity(mean.flatten(), direct.flatten(), dim=0) > 0.999
    assert (mean.norm() / direct.norm()).item() == pytest.approx(k / (k - 3), rel=0.02)


def test_variance_of_projected_energies_by_sampling():
    u = torch.tensor([[1, 0], [0.3, math.sqrt(0.91)]], dtype=torch.float64)
    projected = torch.randn(200_000, 30, 2, dtype=torch.float64) @ u.T
    cosines = torch.nn.functional.cosine_similarity(projected[..., 0], projected[..., 1])
    assert th.pair_energy(cosines).var().item() == pytest.approx(th.projected_energy_variance(0.3, 30).item(), rel=0.05)


def test_published_bounds_of_preserved_cosines():
    for c, theorem, expected in (
        (0.5, "product", (0.363636363636, 0.666666666667)),
        (0.5, "product_printed", (0.363636363636, 0.666666666667)),
        (0.5, "chord", (0.388888888889, 0.595465966267)),
        (0.0, "product_printed", (-0.0909090909091, 0.111111111111)),
        (0.0, "product", (-0.111111111111, 0.111111111111)),
        (0.0, "chord", (-0.222222222222, 0.186375057176)),
        (-0.5, "product_printed", (-0.545454545455, -0.444444444444)),
        (-0.5, "product", (-0.666666666667, -0.363636363636)),
    ):
        assert th.preserved_cosine(c, 0.1, theorem) == pytest.approx(expected, rel=1e-10)
    for k, e, printed, union, chord in (
        (100, 0.5, 0.831974082, 0.736378398, 0.906976878),
        (1000, 0.2, 0.973229812, 0.959572318, 0.998966606),
    ):
        found = [th.preservation_probability(k, e, t) for t in ("product_printed", "product", "chord")]
        assert found == pytest.approx([printed, union, chord], abs=1e-9)
    assert th.preservation_crossover(0.1) == pytest.approx((0.419354838710, 0.256935540014), rel=1e-10)
    assert th.preservation_crossover(0.5) == pytest.approx((0.714285714286, -0.146410161514), rel=1e-10)
    assert th.preservation_probability(30, 0.5, "product_printed") == pytest.approx(0.047, abs=5e-4)


@pytest.mark.parametrize("e", [0.1, 0.3, 0.5])
def test_crossover_is_where_the_bounds_meet(e):
    low, high = th.preservation_crossover(e)
    for shift, sign in ((-0.01, 1), (0.01, -1)):
        product, chord = th.preserved_cosine(low + shift, e), th.preserved_cosine(low + shift, e, "chord")
        assert sign * (product[0] - chord[0]) > 0
        product, chord = th.preserved_cosine(high + shift, e), th.preserved_cosine(high + shift, e, "chord")
        assert sign * (chord[1] - product[1]) > 0


def projected_cosines(c, k, samples):
    x, y = torch.randn(2, samples, k, dtype=torch.float64)
    return torch.nn.functional.cosine_similarity(x, c * x + math.sqrt(1 - c * c) * y)


@pytest.mark.parametrize("theorem", ["product", "product_printed", "chord"])
@pytest.mark.parametrize("c", [0, 0.3, 0.8])
@pytest.mark.parametrize(("k", "e"), [(60, 0.6), (200, 0.4)])
def test_angles_are_preserved_as_often_as_stated(c, k, e, theorem):
    cosines = projected_cosines(c, k, 5000)
    low, high = th.preserved_cosine(c, e, theorem)
    covered = ((cosines > low) & (cosines < high)).double().mean().item()
    assert covered >= th.preservation_probability(k, e, theorem)


def test_the_printed_bound_fails_near_opposite_directions():
    c, k, e = -0.999, 100, 0.9
    cosines = projected_cosines(c, k, 100_000)
    low, high = th.preserved_cosine(c, e, "product_printed")
    failed = 1 - ((cosines > low) & (cosines < high)).double().mean().item()
    stated = 1 - th.preservation_probability(k, e, "product_printed")
    assert stated == pytest.approx(1.603e-4, rel=1e-3)
    assert failed > 3 * stated
    low, high = th.preserved_cosine(c, e)
    assert ((cosines > low) & (cosines < high)).all()


def test_published_distribution_of_a_coordinate():
    y = torch.tensor([-0.5, 0.1, 0.7], dtype=torch.float64)
    assert th.coordinate_cdf(y, 5).tolist() == pytest.approx([0.15625, 0.57475, 0.93925], rel=1e-12)
    p = torch.arange(1, 6).double()
    assert th.projected_uniformity(WB, p).item() == pytest.approx(0.246409731, abs=1e-9)


@pytest.mark.parametrize("d", [2, 3, 4, 5, 6, 11, 64, 1153])
def test_distribution_of_a_coordinate_against_the_beta_distribution(d):
    y = torch.linspace(-1, 1, 41, dtype=torch.float64)
    expected = scipy.stats.beta.cdf((y + 1) / 2, (d - 1) / 2, (d - 1) / 2)
    torch.testing.assert_close(th.coordinate_cdf(y, d), torch.tensor(expected), rtol=0, atol=1e-12)


def test_projected_uniformity_against_scipy_and_as_a_test_of_uniformity():
    x, p = torch.randn(40, 6), torch.randn(3, 6)
    unit_p = p.double() / p.double().norm(dim=1, keepdim=True)
    along = (x.double() / x.double().norm(dim=1, keepdim=True)) @ unit_p.T
    law = scipy.stats.beta(2.5, 2.5, loc=-1, scale=2)
    expected = [scipy.stats.kstest(column.numpy(), law.cdf).statistic for column in along.T]
    assert th.projected_uniformity(x, p).item() == pytest.approx(sum(expected) / 3, abs=1e-7)
    directions = torch.randn(20, 6)
    crowded = th.projected_uniformity(torch.randn(2000, 6) + 1, directions)
    assert th.projected_uniformity(torch.randn(2000, 6), directions) < 0.04 < 0.2 < crowded


# Crowded neurons, holes, and what a layer of ReLUs sees.


@pytest.mark.parametrize(
    ("d", "s", "expected"),
    [(27, 1, 0.71779118206), (1024, 1, 0.70736628575), (1024, 2, 0.50048971597)],
)
def test_more_published_energies_of_random_directions(d, s, expected):
    assert th.random_energy(s, d) == pytest.approx(expected, rel=1e-10)


MEANS = [0, 1e-3, 1e-2, 2e-2, 3e-2, 5e-2]


def test_published_energies_of_crowded_networks():
    """Of the seven layers of 64 neurons of a network, which Gaussian numbers with a mean were drawn for."""
    expected = [3.5117042711, 3.5117046072, 3.5148345954, 3.5532933833, 3.6765853674, 4.2686646368]
    printed = [3.5109, 3.5117, 3.5160, 3.5531, 3.6761, 4.2776]
    for mean, value, table in zip(MEANS, expected, printed, strict=True):
        found = sum(th.crowded_energy(64, d, mean, math.sqrt(2 / d)) for d in (27, *[576] * 5, 1024))
        assert found == pytest.approx(value, abs=1e-10)
        assert found == pytest.approx(table, rel=2.5e-3)


@pytest.mark.parametrize("mean", [0.0, 0.02, 0.05])
def test_crowded_neurons_have_this_energy_on_average(mean):
    d, sigma = 576, math.sqrt(2 / 576)
    x = mean + sigma * torch.randn(20, 64, d, dtype=torch.float64)
    values = hyperspherical_energy(x, 2, half_space=True)
    assert values.mean().item() == pytest.approx(th.crowded_energy(64, d, mean, sigma), rel=3e-3)


def test_published_constants_of_spheres():
    kappas = [0.31830988618, 0.25, 0.21220659079, 0.1875]
    assert [th.sphere_constant(m) for m in range(1, 5)] == pytest.approx(kappas, rel=1e-9)
    facets = [th.expected_holes(1000, d) / 1000 for d in (2, 3, 4)]
    assert facets == pytest.approx([1, 2, 6.7677287322], rel=1e-9)
    assert [th.expected_holes(100, 3, p) for p in (2, 0)] == pytest.approx([16, 200], rel=1e-11)


@given(st.integers(2, 200))
def test_constants_of_spheres_by_recursion_and_area(m):
    assert th.sphere_constant(m) * th.sphere_constant(m - 1) == pytest.approx(1 / (2 * math.pi * m), rel=1e-11)
    log_ball = m / 2 * math.log(math.pi) - scipy.special.gammaln(m / 2 + 1)
    log_area = math.log(2) + (m + 1) / 2 * math.log(math.pi) - scipy.special.gammaln((m + 1) / 2)
    assert math.log(th.sphere_constant(m)) == pytest.approx(log_ball - log_area, rel=1e-9)


@pytest.mark.parametrize(("n", "d", "tolerance"), [(400, 2, 0.05), (400, 3, 0.03), (2000, 4, 0.06)])
def test_holes_between_random_directions_by_convex_hulls(n, d, tolerance):
    source = torch.Generator().manual_seed(0)
    sums = []
    for _ in range(6 if d == 4 else 40):
        hull = scipy.spatial.ConvexHull(uniform_directions(n, d, generator=source, dtype=torch.float64).numpy())
        radii = (2 + 2 * hull.equations[:, -1]) ** 0.5  # the offset of a facet is minus the cosine of its cap
        sums.append([(radii**p).sum() for p in (0, 1, 2)])
    found = torch.tensor(sums).mean(0)
    for p in (0, 1, 2):
        assert found[p].item() == pytest.approx(th.expected_holes(n, d, p), rel=tolerance)


def test_published_means_of_the_activation_kernel():
    expected = [0.074339408178, 0.063473762745, 0.062544052644]
    assert [th.activation_kernel_mean(d) for d in (3, 27, 576)] == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("d", [2, 3, 8])
def test_activation_kernel_counts_inputs_to_which_both_neurons_answer(d):
    u, v, x = (torch.randn(200_000, d, dtype=torch.float64) for _ in range(3))
    cosine = (u * v).sum(1) / (u.norm(dim=1) * v.norm(dim=1))
    k = 0.5 - cosine.acos() / (2 * math.pi)
    assert (k.square().mean() - th.activation_kernel_mean(d)).abs() < 5 * k.square().std() / math.sqrt(len(k))
    both = ((u * x).sum(1) > 0) & ((v * x).sum(1) > 0)
    assert (both.double() - k).mean().abs() < 5 * (both.double() - k).std() / math.sqrt(len(k))


def test_activation_discrepancy():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, dtype=torch.float64, generator=generator)
    k = [[0.5 - math.acos(min(1.0, (a @ b / a.norm() / b.norm()).item())) / (2 * math.pi) for b in x] for a in x]
    expected = sum(value**2 for row in k for value in row) / 1600 - th.activation_kernel_mean(6)
    found = th.activation_discrepancy(x)
    assert found.item() == pytest.approx(expected, abs=1e-8)
    R, _ = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=generator))
    torch.testing.assert_close(th.activation_discrepancy(3 * x @ R), found, rtol=0, atol=1e-12)
    crowded = th.activation_discrepancy(x + 1)
    even = th.activation_discrepancy(torch.cat([x, -x]))
    assert 0 <= even < found < crowded
    assert th.activation_discrepancy(torch.randn(2000, 6, generator=generator)) == pytest.approx(0, abs=2e-3)
    # One neuron is as uneven as can be.
    assert th.activation_discrepancy(x[:1]).item() == pytest.approx(0.25 - th.activation_kernel_mean(6))
    with pytest.raises(ArgumentError, match="weights must have shape"):
        th.activation_discrepancy(x[0])


def test_bad_arguments_are_named():
    for call, name in (
        (lambda: th.random_energy(-1, 3), "s"),
        (lambda: th.random_energy(1, 1), "d"),
        (lambda: th.floor_energy(-1, 3, 2), "n"),
        (lambda: th.projected_energy_mean(0.0, 3), "k"),
        (lambda: th.projected_energy_mean(0.0, 9, 1), "s"),
        (lambda: th.projected_energy_variance(0.0, 5), "k"),
        (lambda: th.preserved_cosine(2.0, 0.1), "cosine"),
        (lambda: th.preserved_cosine(0.0, 1.0), "e"),
        (lambda: th.preserved_cosine(0.0, 0.1, "best"), "theorem"),
        (lambda: th.preservation_probability(0, 0.1), "k"),
        (lambda: th.uniform_limit(3, 0), "t"),
        (lambda: th.coordinate_cdf(0.0, 1), "d"),
        (lambda: th.projected_uniformity(torch.eye(3), torch.ones(4)), "directions"),
        (lambda: th.crowded_energy(0, 4, 0.0, 1.0), "n"),
        (lambda: th.crowded_energy(2, 3, 0.0, 1.0), "d"),
        (lambda: th.crowded_energy(2, 4, 0.0, 0.0), "deviation"),
        (lambda: th.sphere_constant(0), "m"),
        (lambda: th.expected_holes(9, 1), "d"),
        (lambda: th.expected_holes(9, 3, -1.0), "power"),
        (lambda: th.activation_kernel_mean(1), "d"),
    ):
        with pytest.raises(ArgumentError, match=f"^{name} must "):
            call()
