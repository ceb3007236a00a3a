"""Energies and orthogonality against closed forms, plain sums, published numbers and their symmetries."""

import itertools
import math

import pytest
import scipy.special
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hypersphere as hs
from hypersphere.energy import (
    MHE,
    Orthogonal,
    Orthonormal,
    base,
    chords,
    create,
    hyperspherical_energy,
    neurons,
    pairs,
    select,
)
from hypersphere.energy.potentials import Gaussian, Riesz
from hypersphere.errors import ArgumentError
from hypersphere.geometry import uniform_directions


def waves(n, d):
    """Rows of sines with a heavier diagonal."""
    values = [[math.sin(1 + 0.7 * i + 1.3 * j) + 0.5 * (i == j) for j in range(d)] for i in range(n)]
    return torch.tensor(values, dtype=torch.float64)


WA = torch.tensor([[1, 2, 2], [-1, 0.5, 3], [0.3, -2, 1], [2, -1, -1]], dtype=torch.float64)
WB = waves(5, 4)
CORNER = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]], dtype=torch.float64)
MIXED = torch.tensor(
    [
        [-1.2, -0.8, 0.9, 0.2, -1.2],
        [-0.2, -0.1, -1.0, 0.7, -1.2],
        [-0.3, 0.1, -0.2, 0.3, 0.7],
        [1.4, -0.6, 0.4, 0.6, -0.6],
    ],
    dtype=torch.float64,
)
BETA = torch.tensor([2.0, 1.0, 1.0, 4.0], dtype=torch.float64)
FULL, HALF = {}, {"half_space": True}
ARC, HALF_ARC = {"angular": True}, {"angular": True, "half_space": True}
SUM = {"reduction": "sum"}
VALUES = [  # matrix, options, then the energies for s = 0, 1, 2
    (WA, SUM, -3.56491188401, 9.20593500792, 7.55289558614),
    (WA, FULL, -0.297075990334, 0.76716125066, 0.629407965512),
    (WA, HALF | SUM, -19.263962998, 41.4257834785, 33.6218800232),
    (WA, HALF, -0.343999339249, 0.739746133544, 0.600390714699),
    (WA, ARC | SUM, -4.98131961915, 8.32924390333, 6.39252066341),
    (WA, ARC, -0.415109968263, 0.694103658611, 0.532710055284),
    (WA, HALF_ARC | SUM, -28.428614872, 36.5101492527, 27.8060701135),
    (WA, HALF_ARC, -0.507653836999, 0.651966950941, 0.496536966313),
    (WB, FULL, -0.131016798009, 1.01728071672, 1.45220252739),
    (WB, HALF, -0.230193559261, 0.918510372841, 1.19026430149),
    (WB, ARC, -0.253214626836, 0.946240479145, 1.354360892),
    (WB, HALF_ARC, -0.397423010546, 0.831927690433, 1.08572328339),
    (CORNER, SUM, -1.57524857581, 10.7686239286, 10.0980762114),
    (CORNER, FULL, -0.131270714651, 0.897385327384, 0.841506350946),
    (CORNER, HALF | SUM, -19.7479191293, 40.7787242351, 32),
    (CORNER, HALF, -0.352641413023, 0.728191504198, 0.571428571429),
    (MIXED, SUM, -4.62849385764, 8.23534023997, 5.75757698688),
    (MIXED, FULL, -0.38570782147, 0.686278353331, 0.47979808224),
    (MIXED, HALF | SUM, -20.855291884, 39.4199645329, 28.9656486747),
    (MIXED, HALF, -0.3724159265, 0.703927938087, 0.517243726334),
]
GRADIENTS = {  # of the mean energy of WA: half space, angular, s
    (False, False, 2): [
        [-0.0832470467697, -0.0679834884752, 0.10960701186],
        [0.112220294686, 0.0613799420855, 0.0271767745477],
        [0.0438734626172, 0.0224310525967, 0.0317000664083],
        [0.00776720654184, -0.0416319815955, 0.0571663946792],
    ],
    (False, False, 0): [
        [-0.013909978897, -0.0401809897257, 0.0471359791742],
        [0.0528197676512, 0.00347194702335, 0.0170279313799],
        [0.0346738053729, 0.0228497111443, 0.0352972806767],
        [0.0151093762045, -0.0245345187565, 0.0547532711654],
    ],
    (False, True, 1): [
        [-0.027029481863, -0.0393000841098, 0.0528148250413],
        [0.0580139497554, 0.0154750836392, 0.0167588026453],
        [0.0305285620911, 0.0186046670947, 0.0280507655621],
        [0.0115208083595, -0.0242180768846, 0.0472596936035],
    ],
    (True, False, 2): [
        [-0.0583176609965, -0.00759962271069, 0.0367584532089],
        [-0.0303620994662, 0.0680060961923, -0.0214550491875],
        [0.00460815775498, -0.00526229596439, -0.0119070392553],
        [-0.0536005221334, -0.00512387870521, -0.102077165562],
    ],
    (True, True, 2): [
        [-0.0577678719891, -0.00761114274214, 0.0364950787367],
        [-0.0302520351608, 0.0675872410484, -0.021348551895],
        [0.00455333818225, -0.00519389887737, -0.0117537992094],
        [-0.0531779811027, -0.00491695168328, -0.101439010522],
    ],
}
RELEASED = {  # s, angular: energies of WA with the conventions of the published code, full and half space
    (0, False): (-0.59415494493, -0.688001105346),
    (1, False): (0.767159322004, 0.739744058221),
    (2, False): (0.629403415532, 0.600385091593),
    (0, True): (0.72940081278, 0.637110689301),
    (1, True): (2.18005954487, 2.04795854253),
    (2, True): (5.25481139661, 4.89836166584),
}
POWERS = [0, 0.5, 1, 2, 3.7]
FORMS = [FULL, HALF, ARC, HALF_ARC]
SEEDS = st.integers(0, 2**32 - 1)


def riesz(distance, s):
    return -math.log(distance) if s == 0 else math.copysign(distance**-s, s)


def plain_energy(rows, s, half_space=False, angular=False, beta=None):
    """The definition: one distance at a time."""
    lengths = [1.0] * len(rows) if beta is None else beta
    units = [[b * p / math.hypot(*row) for p in row] for row, b in zip(rows, lengths, strict=True)]
    if half_space:
        units += [[-p for p in row] for row in units]

    def distance(a, b):
        chord = math.dist(a, b)
        return 2 * math.atan2(chord, math.hypot(*(p + q for p, q in zip(a, b, strict=True)))) if angular else chord

    return math.fsum(2 * riesz(distance(a, b), s) for a, b in itertools.combinations(units, 2))


def energy(x, s, **options):
    return hyperspherical_energy(x, s, reduction="sum", **options).item()


def slope_of(function, x):
    """Value and gradient of a function of one tensor."""
    x = x.detach().requires_grad_()
    value = function(x)
    return value.detach(), torch.autograd.grad(value, x)[0]


def random_rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


@pytest.mark.parametrize(("w", "options", "zero", "one", "two"), VALUES)
def test_published_values(w, options, zero, one, two):
    for s, expected in ((0, zero), (1, one), (2, two)):
        value = hyperspherical_energy(w, s, **options)
        assert value.item() == pytest.approx(expected, rel=1e-10)
        assert MHE(s=s, **options)(w).item() == value.item()


def test_published_values_of_other_powers():
    assert energy(WA, 0.5) == pytest.approx(10.4253267779, rel=1e-10)
    assert energy(WA, 3) == pytest.approx(6.63044344897, rel=1e-10)
    assert energy(WA, -1) == pytest.approx(-16.6333276783, rel=1e-10)


@pytest.mark.parametrize(("half_space", "angular", "s"), GRADIENTS)
def test_published_gradients(half_space, angular, s):
    _, grad = slope_of(lambda w: hyperspherical_energy(w, s, half_space=half_space, angular=angular), WA)
    expected = torch.tensor(GRADIENTS[half_space, angular, s], dtype=torch.float64)
    torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-11)


def test_published_half_space_gradient_of_the_other_matrix():
    _, grad = slope_of(lambda w: hyperspherical_energy(w, half_space=True), MIXED)
    first = [0.0216113757, 0.0021079961, -0.0129776606, -0.0056285919, -0.0336880506]
    third = [-0.0280793639, 0.0778011871, -0.0149237768, -0.1342283244, 0.0301140202]
    assert grad[0].tolist() == pytest.approx(first, abs=1e-10)
    assert grad[2].tolist() == pytest.approx(third, abs=1e-10)


def test_published_energies_of_weighted_vectors():
    for s, expected in ((0, -12.1320082977), (1, 5.04585984977), (2, 2.74726214899)):
        assert energy(WA, s, beta=BETA) == pytest.approx(expected, rel=1e-10)
    _, grad = slope_of(lambda w: hyperspherical_energy(w, 2, beta=BETA, reduction="sum"), WA)
    expected = [
        [-0.189556042004, -0.168206249479, 0.262984270482],
        [0.327222313765, -0.268825828566, 0.153878409349],
        [-0.198859213917, 0.315244316755, 0.690146397686],
        [0.0124284149209, -0.0127018941629, 0.0375587240046],
    ]
    torch.testing.assert_close(grad, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-11)


def test_published_values_with_padded_norms():
    padded = HALF | {"eps": 1e-4}
    assert hyperspherical_energy(MIXED, **padded).item() == pytest.approx(0.517234478975, rel=1e-10)
    assert hyperspherical_energy(0.01 * MIXED, **padded).item() == pytest.approx(0.488278382735, rel=1e-10)
    twice = MIXED[[0, 0, 1]]
    assert hyperspherical_energy(twice, **padded).item() == pytest.approx(2913.77218013, rel=1e-10)


@pytest.mark.parametrize(("s", "angular"), RELEASED)
def test_published_values_of_the_released_code(s, angular):
    full, half = RELEASED[s, angular]
    for half_space, expected in ((False, full), (True, half)):
        module = MHE(s=s, angular=angular, half_space=half_space, preset="released")
        assert module(WA).item() == pytest.approx(expected, rel=1e-10)
        weights = (0.1, 1.0) if angular and s else (1.0, 10.0)
        assert (module.hidden_weight, module.output_weight) == weights


def test_published_sum_over_layers():
    layers = neurons("a", lambda: WA) + neurons("b", lambda: WB) + neurons("c", lambda: waves(3, 4), "output")
    assert MHE()(layers).item() == pytest.approx(23.8311841234, rel=1e-10)
    assert MHE(hidden_weight=1, output_weight=0)(layers).item() == pytest.approx(2.0816104929, rel=1e-10)
    assert MHE(hidden_weight=0)(layers).item() == pytest.approx(3.01507919433, rel=1e-10)
    # Half space is for hidden layers alone.
    assert MHE(half_space=True)(layers).item() == pytest.approx(4.80573421052, rel=1e-10)
    assert MHE(half_space=True, hidden_weight=0)(layers).item() == pytest.approx(3.01507919433, rel=1e-10)


@pytest.mark.parametrize("s", [-1.5, *POWERS, 20])
@pytest.mark.parametrize("options", FORMS, ids=str)
def test_the_definition(s, options):
    x = torch.randn(6, 4, dtype=torch.float64)
    expected = plain_energy(x.tolist(), s, **options)
    assert energy(x, s, **options) == pytest.approx(expected, rel=1e-9)
    count = 132 if "half_space" in options else 30
    assert hyperspherical_energy(x, s, **options).item() == pytest.approx(expected / count, rel=1e-9)


@pytest.mark.parametrize("half_space", [False, True])
@given(seed=SEEDS, s=st.sampled_from([-1, *POWERS]))
def test_weighted_vectors_by_the_definition(half_space, seed, s):
    x, beta = random_rows(5, 3, seed=seed), 0.5 + random_rows(5, seed=seed + 1).abs()
    expected = plain_energy(x.tolist(), s, half_space, beta=beta.tolist())
    assert energy(x, s, half_space=half_space, beta=beta) == pytest.approx(expected, rel=1e-8, abs=1e-8)
    assert not hyperspherical_energy(x, s, beta=beta.requires_grad_()).requires_grad
    ones = energy(x, s, half_space=half_space, beta=torch.ones(5))
    assert ones == pytest.approx(energy(x, s, half_space=half_space), rel=1e-12)


def test_a_longer_vector_moves_less_and_equal_ones_of_different_length_have_an_energy():
    def force(length):
        beta = torch.tensor([length, 1.0, 1.0, 1.0], dtype=torch.float64)
        return slope_of(lambda w: hyperspherical_energy(w, 2, beta=beta, reduction="sum"), WA)[1][0].norm()

    assert force(4) > force(10) > force(100)
    assert (force(1000) / force(2000)).item() == pytest.approx(2**3, rel=0.01)
    same = torch.ones(2, 3, dtype=torch.float64)
    assert energy(same, 2, beta=torch.tensor([1.0, 4.0])) == pytest.approx(2 / 9, rel=1e-12)


def test_defaults_are_power_two_full_space_and_mean():
    assert hyperspherical_energy(WA).item() == pytest.approx(0.629407965512, rel=1e-10)
    assert MHE()(WA).item() == pytest.approx(0.629407965512, rel=1e-10)


@pytest.mark.parametrize("s", POWERS)
def test_closed_forms(s):
    antipodes = torch.tensor([[3.0, 0.0], [-0.1, 0.0]], dtype=torch.float64)
    assert energy(antipodes, s) == pytest.approx(2 * riesz(2, s), rel=1e-12)
    assert energy(antipodes, s, angular=True) == pytest.approx(2 * riesz(math.pi, s), rel=1e-12)
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
        arcs = n * math.fsum(riesz(2 * math.pi * min(k, n - k) / n, s) for k in range(1, n))
        assert energy(polygon(n), s, angular=True) == pytest.approx(
            arcs, rel=1e-7
        )  # opposite points have half the digits


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
        _, grad = slope_of(lambda x: hyperspherical_energy(x, s), points)
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
    ordered = 12
    for s in (1e-4, 1e-5):
        assert (energy(WA, s) - ordered) / s == pytest.approx(energy(WA, 0), abs=5 * s)
    closest = 0.866377460978
    assert (energy(WA, 200) / 2) ** (-1 / 200) == pytest.approx(closest, rel=1e-9)


@pytest.mark.parametrize("options", [*FORMS, SUM, {"eps": 0.1}], ids=str)
def test_a_batch_is_its_matrices(options):
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    together, grads = slope_of(lambda v: (hyperspherical_energy(v, 1, **options) * torch.arange(1.0, 4.0)).sum(), x)
    alone = [slope_of(lambda v: hyperspherical_energy(v, 1, **options), one) for one in x]
    assert hyperspherical_energy(x, 1, **options).tolist() == pytest.approx([a[0].item() for a in alone], rel=1e-12)
    assert together.item() == pytest.approx(sum(k * a[0].item() for k, a in enumerate(alone, 1)), rel=1e-12)
    torch.testing.assert_close(grads, torch.stack([k * a[1] for k, a in enumerate(alone, 1)]))


@pytest.mark.parametrize("half_space", [False, True])
def test_gaussian_potential_by_the_definition(half_space):
    x = torch.randn(5, 3, dtype=torch.float64)
    units = torch.cat([x, -x] if half_space else [x])
    units = units / units.norm(dim=1, keepdim=True)
    expected = 2 * torch.pdist(units).square().mul(-3).exp().sum().item()
    found = pairs.pair_sums(x.unsqueeze(0), Gaussian(3.0), half_space=half_space)
    assert found.item() == pytest.approx(expected, rel=1e-12)


# Symmetries.


@given(SEEDS, st.sampled_from(POWERS), st.sampled_from(FORMS))
def test_symmetries(seed, s, options):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    value = energy(x, s, **options)
    turn = torch.tensor(scipy.stats.ortho_group.rvs(4, random_state=seed))
    lengths = 10 ** torch.empty(5, 1, dtype=torch.float64).uniform_(-10, 10, generator=generator)
    order = torch.randperm(5, generator=generator)
    for same in (x @ turn, x * lengths, x[order]):
        assert energy(same, s, **options) == pytest.approx(value, rel=1e-8, abs=1e-8)
    signs = torch.tensor([[1.0], [-1.0], [1.0], [1.0], [-1.0]])
    flipped = energy(x * signs, s, **options)
    if "half_space" in options:
        assert flipped == pytest.approx(value, rel=1e-9, abs=1e-9)
    else:
        assert abs(flipped - value) > 1e-6


@given(SEEDS, st.sampled_from([0, 1, 2]), st.sampled_from(FORMS))
def test_gradient_is_tangent_pushes_apart_and_scales_inversely(seed, s, options):
    x = random_rows(4, 3, seed=seed)
    value, grad = slope_of(lambda v: hyperspherical_energy(v, s, **options), x)
    assert (grad * x).sum(1).abs().max() < 1e-9 * max(1.0, grad.abs().max().item())
    _, scaled = slope_of(lambda v: hyperspherical_energy(v, s, **options), 4 * x)
    torch.testing.assert_close(scaled, grad / 4, rtol=1e-9, atol=1e-12)
    step = 1e-4 / max(1.0, grad.square().sum().item())
    assert hyperspherical_energy(x - step * grad, s, **options) < value


@given(SEEDS, st.integers(2, 5), st.sampled_from(POWERS))
def test_no_set_beats_the_optimum(seed, n, s):
    x = random_rows(n, 5, seed=seed)
    assert energy(x, s) >= energy(simplex(n), s) - 1e-9
    assert energy(x, s, half_space=True) >= energy(torch.eye(n, dtype=torch.float64), s, half_space=True) - 1e-9


@given(SEEDS, st.integers(2, 6), st.integers(2, 6), st.sampled_from(POWERS), st.booleans())
def test_angles_give_less_energy_than_chords(seed, n, d, s, half_space):
    x = random_rows(n, d, seed=seed)
    chords = energy(x, s, half_space=half_space)
    assert energy(x, s, half_space=half_space, angular=True) < chords


# Derivatives.


@pytest.mark.parametrize("s", [-1, *POWERS])
@pytest.mark.parametrize("options", [*FORMS, SUM, HALF | SUM, {"eps": 0.3}, HALF_ARC | {"eps": 0.3}], ids=str)
def test_gradients(s, options):
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: hyperspherical_energy(v, s, **options), (x,))


@pytest.mark.parametrize(
    "options", [*FORMS, HALF | {"eps": 0.3}, {"beta": BETA}, HALF | {"beta": BETA, "eps": 0.3}], ids=str
)
@pytest.mark.parametrize("s", [0, 2.5])
def test_second_derivatives(s, options):
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda v: hyperspherical_energy(v, s, **options), (x,))


@pytest.mark.parametrize("options", [{"beta": BETA}, HALF | {"beta": BETA, "eps": 0.3}], ids=str)
def test_gradients_of_weighted_vectors(options):
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    for s in (0, 1, 2.5):
        assert torch.autograd.gradcheck(lambda v, s=s: hyperspherical_energy(v, s, **options), (x,))


@pytest.mark.parametrize("half_space", [False, True])
def test_derivatives_of_the_gaussian_potential(half_space):
    x = torch.randn(1, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: pairs.pair_sums(v, Gaussian(1.3), half_space=half_space), (x,))
    assert torch.autograd.gradgradcheck(lambda v: pairs.pair_sums(v, Gaussian(1.3), half_space=half_space), (x,))


@pytest.mark.parametrize(
    "potential",
    [Riesz(s, *rest) for s in (-1, 0, 1, 2, 2.5) for rest in ((), (False, False, 0, 3), (True,), (True, True, 0.1, 2))]
    + [Gaussian(2.0)],
    ids=str,
)
def test_slopes_of_potentials(potential):
    q = torch.linspace(0.01, 3.99, 41, dtype=torch.float64)
    value, slope = slope_of(lambda v: potential(v).sum(), q)
    torch.testing.assert_close(potential.slope(q), slope, rtol=1e-10, atol=1e-12)
    both = potential.both(q)
    torch.testing.assert_close(both[0].sum(), value)
    torch.testing.assert_close(both[1], slope, rtol=1e-10, atol=1e-12)
    assert pairs.decode(*potential.code()) == potential


def test_a_gradient_that_stays_in_the_graph_is_the_same():
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    x[1, 2] = 0
    x.requires_grad_()
    for options in (*FORMS, SUM, HALF_ARC | {"eps": 0.3}, {"beta": BETA}, HALF | {"beta": BETA, "eps": 0.3}):
        value = hyperspherical_energy(x, 1, **options).sum()
        (plain,) = torch.autograd.grad(value, x, retain_graph=True)
        (kept,) = torch.autograd.grad(value, x, create_graph=True)
        torch.testing.assert_close(kept.detach(), plain, rtol=1e-10, atol=1e-12)


# Degenerate input and types.


def value_and_gradient(x, s=2.0, **options):
    x = x.detach().clone().requires_grad_()
    value = hyperspherical_energy(x, s, **options)
    (grad,) = torch.autograd.grad(value, x, retain_graph=True)
    assert grad.dtype == x.dtype
    assert value.isfinite()
    assert grad.isfinite().all()
    (kept,) = torch.autograd.grad(value, x, create_graph=True)
    assert kept.isfinite().all()
    (second,) = torch.autograd.grad(kept.square().sum(), x, allow_unused=True)
    # Close to one another second derivatives are beyond the range of float16.
    assert second is None or x.dtype == torch.float16 or second.isfinite().all()
    return value, grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("s", [-1, 0, 1, 2])
@pytest.mark.parametrize("options", [*FORMS, {"eps": 1e-4}, HALF_ARC | {"eps": 1e-4}], ids=str)
def test_duplicate_opposite_and_zero_vectors_stay_finite(dtype, s, options):
    x = torch.randn(1, 3).to(dtype)
    axis = torch.tensor([[1.0, 0.0, 0.0]]).to(dtype)
    for rows in ([x, x], [x, x, x, x * 2], [x, -x], [axis, -axis], [x, x * 0], [x * 0, x * 0], [x, -x, x * 0, x]):
        value_and_gradient(torch.cat(rows), s, **options)


def test_weighted_duplicates_and_zeros_stay_finite():
    x = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [-1.0, -2.0, -3.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    for beta in (torch.ones(5), torch.arange(1.0, 6.0)):
        for options in (FULL, HALF):
            _, grad = value_and_gradient(x, 2, beta=beta, **options)
            assert (grad[3] == 0).all()


@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 1e-4), (torch.float64, 1e-6)])
@pytest.mark.parametrize("angular", [False, True])
def test_equal_directions_count_as_a_short_way_apart_and_do_not_move(dtype, gap, angular):
    same = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]], dtype=dtype)
    value, grad = value_and_gradient(same, 1, angular=angular)
    assert value.item() == pytest.approx(1 / gap, rel=1e-6)
    assert (grad == 0).all()
    opposite = same * torch.tensor([[1.0], [-1.0]], dtype=dtype)
    far = 1 / math.pi if angular else 1 / 2
    value, grad = value_and_gradient(opposite, 1, half_space=True, angular=angular)
    assert value.item() == pytest.approx((4 / gap + 8 * far) / 12, rel=1e-5)
    assert grad.abs().max() < (1e-6 if dtype == torch.float64 else 1e-2)


@pytest.mark.parametrize("options", [*FORMS, {"eps": 0.1}, HALF | {"eps": 0.1}], ids=str)
def test_zero_vectors_are_left_out(options):
    x = torch.cat([WA[:2], torch.zeros(2, 3, dtype=torch.float64), WA[2:]])
    for s in (0, 1):
        expected, slope = value_and_gradient(WA, s, **options)
        value, grad = value_and_gradient(x, s, **options)
        assert value.item() == pytest.approx(expected.item(), rel=1e-12)
        torch.testing.assert_close(grad, torch.cat([slope[:2], torch.zeros_like(slope[:2]), slope[2:]]))
        wide = torch.cat([x, torch.zeros(6, 2, dtype=torch.float64)], 1)
        assert hyperspherical_energy(wide, s, **options).item() == pytest.approx(expected.item(), rel=1e-12)


def test_numbers_that_are_none_are_not_hidden():
    x = torch.randn(4, 3)
    for bad in (math.nan, math.inf):
        x[1, 1] = bad
        assert hyperspherical_energy(x).isnan()


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_no_vectors_and_one_and_two(options):
    far = 1 / math.pi if "angular" in options else 0.5
    for empty in (torch.zeros(0, 3), torch.zeros(3, 0)):
        value, _ = value_and_gradient(empty, **options)
        assert value.item() == 0
    for reduction, share in (("sum", 1), ("mean", 2)):
        value, grad = value_and_gradient(torch.ones(1, 3), 1, reduction=reduction, **options)
        # With its mirror image one vector makes the two ordered pairs of a diameter.
        assert value.item() == pytest.approx(2 * far / share if "half_space" in options else 0, rel=1e-6)
        assert grad.abs().max() < 1e-6
    right = 2 / math.pi if "angular" in options else math.sqrt(0.5)
    value, grad = value_and_gradient(torch.eye(2, 5), 1, **options)
    assert value.item() == pytest.approx((8 * right + 4 * far) / 12 if "half_space" in options else right, rel=1e-6)
    force = 0 if "half_space" in options else right**2 if "angular" in options else 2**-1.5
    assert grad[0, 1].item() == pytest.approx(force, abs=1e-6)
    batch = hyperspherical_energy(torch.zeros(0, 4, 3, requires_grad=True), **options)
    assert batch.shape == (0,) and batch.requires_grad


@pytest.mark.parametrize("s", [13, 40])
def test_large_powers_do_not_overflow_on_the_diagonal(s):
    value, _ = value_and_gradient(torch.eye(3), s)
    assert value.item() == pytest.approx(2 ** (-s / 2), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("options", FORMS, ids=str)
def test_half_precision_is_computed_in_float32(dtype, autocast, options):
    x = torch.randn(8, 5).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value, grad = slope_of(lambda v: hyperspherical_energy(v, 2, **options), x)
        expected, slope = slope_of(lambda v: hyperspherical_energy(v, 2, **options), x.float())
    assert value.dtype == torch.float32
    assert value.item() == expected.item()
    assert value.item() == pytest.approx(hyperspherical_energy(x.double(), 2, **options).item(), rel=1e-5)
    assert torch.equal(grad, slope.to(dtype))


def test_autocast_changes_nothing_for_float32():
    x = torch.randn(8, 5)
    with torch.autocast("cpu", torch.bfloat16):
        cast = hyperspherical_energy(x, 2)
    assert cast.dtype == torch.float32
    assert cast.item() == pytest.approx(hyperspherical_energy(x, 2).item(), rel=1e-6)


def test_a_model_in_half_precision_under_autocast_has_the_energy_of_its_weights():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)).bfloat16()
    wide = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    wide.load_state_dict(model.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        value = MHE(half_space=True)(model)
        value.backward()
    expected = MHE(half_space=True)(wide)
    expected.backward()
    assert value.dtype == torch.float32 and value.item() == expected.item()
    assert torch.equal(model[0].weight.grad, wide[0].weight.grad.bfloat16())


def test_layers_of_different_precision_keep_it():
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5).double(), nn.Linear(5, 3))
    value = MHE(output_weight=0)(model)
    assert value.dtype == torch.float64
    wide = MHE().layer_energies(model)["1"]
    assert wide.dtype == torch.float64
    assert wide.item() == pytest.approx(plain_energy(model[1].weight.tolist(), 2) / 20, rel=1e-12)


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_layout_does_not_matter(options):
    wide = torch.randn(10, 8, dtype=torch.float64)
    for x in (wide.T[::2, ::3], wide.T, wide[:, 1:5], wide[:1].expand(3, 8)[:, :4] + 0 * wide[:3, :4]):
        assert x.shape[0] == 3 or not x.is_contiguous()
        value, grad = slope_of(lambda v: hyperspherical_energy(v, 1, **options), x)
        expected, slope = slope_of(lambda v: hyperspherical_energy(v, 1, **options), x.contiguous())
        assert value.item() == pytest.approx(expected.item(), rel=1e-12)
        torch.testing.assert_close(grad, slope, rtol=1e-12, atol=1e-12)


def test_rows_that_share_memory_are_equal_directions():
    one = torch.tensor([[1.0, 2.0, 2.0]])
    assert energy(one.expand(3, 3), 1) == pytest.approx(6e4, rel=1e-5)


# Near neighbours.


def close_pairs(gap, d, opposite):
    """Twenty pairs of neighbours with that gap, in float32, and their energy in float64 from differences."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(20, d, generator=generator)
    x = x / x.norm(dim=1, keepdim=True)
    away = torch.randn(20, d, generator=generator)
    away = away - (away * x).sum(1, keepdim=True) * x
    y = x + gap * away / away.norm(dim=1, keepdim=True)
    return torch.cat([x, -3 * y if opposite else 3 * y])


def by_differences(x, s, half_space=False, angular=False):
    """Energy in float64, of which no digit is lost: differences and sums, no products."""
    x = x.double()
    units = x / x.norm(dim=1, keepdim=True)
    i, j = torch.triu_indices(len(x), len(x), 1)
    chords = (units[i] - units[j]).norm(dim=1)
    mirrored = (units[i] + units[j]).norm(dim=1)
    near, far = 2 * torch.atan2(chords, mirrored), 2 * torch.atan2(mirrored, chords)
    if not angular:
        near, far = chords, mirrored

    def f(z):
        return -z.log() if s == 0 else z**-s

    if not half_space:
        return 2 * f(near).sum()
    own = torch.full((), math.pi if angular else 2.0, dtype=torch.float64)
    return 4 * (f(near) + f(far)).sum() + 2 * len(x) * f(own)


@pytest.mark.parametrize("gap", [1e-1, 3e-2, 1e-2, 2e-3])
@pytest.mark.parametrize("d", [3, 200])
@pytest.mark.parametrize("few", [10**6, 0], ids=["one by one", "all"])
@pytest.mark.parametrize(("options", "opposite"), [(form, False) for form in FORMS] + [(HALF, True), (HALF_ARC, True)])
def test_near_neighbours_keep_their_digits_in_float32(gap, d, few, options, opposite, monkeypatch):
    monkeypatch.setattr(chords, "FEW_NEAR", few)
    x = close_pairs(gap, d, opposite)
    value, grad = slope_of(lambda v: hyperspherical_energy(v, 2, reduction="sum", **options), x)
    expected, slope = slope_of(lambda v: by_differences(v, 2, **options), x.double())
    # A float32 direction is right to 6e-8, hence a gap to 6e-8 / gap; from a cosine, to the square of that.
    assert value.item() == pytest.approx(expected.item(), rel=2e-7 / gap + 2e-6)
    assert (grad - slope).norm() < (1e-6 / gap + 1e-5) * slope.norm()


# Tiles.


@pytest.mark.parametrize("options", [*FORMS, HALF | {"eps": 0.1}, "beta"], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_values_do_not_depend_on_tiles(options, dtype, monkeypatch):
    x = torch.randn(3, 23, 6, dtype=dtype)
    x[1, 4:9] = 0
    x[2, 7] = x[2, 3] + (0.05 if dtype == torch.float64 else 1e-3)  # differences are for float32 alone
    options = HALF | {"beta": torch.rand(23) + 0.5} if options == "beta" else options
    results = []
    for size in (512, 22, 7, 1):
        monkeypatch.setattr(pairs, "TILE", size)
        monkeypatch.setattr(pairs, "TILE_ELEMENTS", 2**20 if size == 512 else 1)
        results.append(slope_of(lambda v: hyperspherical_energy(v, 2, **options).sum(), x))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    for value, grad in results[1:]:
        assert value.item() == pytest.approx(results[0][0].item(), rel=tolerance)
        assert (grad - results[0][1]).norm() < tolerance * results[0][1].norm()


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_many_vectors_agree_with_the_whole_matrix_of_pairs(options):
    half_space, angular = options.get("half_space", False), options.get("angular", False)
    x = torch.randn(1050 if half_space else 1500, 8, dtype=torch.float64)

    def dense(v):
        units = v / v.norm(dim=1, keepdim=True)
        units = torch.cat([units, -units]) if half_space else units
        off = ~torch.eye(len(units), dtype=torch.bool)
        if half_space:  # a vector and its mirror image: a constant
            off &= ~torch.eye(len(v), dtype=torch.bool).repeat(2, 2)
        chords = (2 - 2 * units @ units.T).masked_fill(~off, 2.0).sqrt()
        distances = 2 * torch.asin(chords / 2) if angular else chords
        own = 2 * len(v) / (math.pi if angular else 2) ** 2 if half_space else 0.0
        return ((distances**-2 * off).sum() + own) / (len(units) * (len(units) - 1))

    value, grad = slope_of(lambda v: hyperspherical_energy(v, 2, **options), x)
    expected, slope = slope_of(dense, x)
    assert value.item() == pytest.approx(expected.item(), rel=1e-10)
    assert (grad - slope).norm() < 1e-10 * slope.norm()


class Sizes(TorchDispatchMode):
    """The largest tensor that any operation returns, those inside the sum over pairs included."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "pair_sums" in str(func):
            with self:
                found = pairs._pair_sums._init_fn(*args, **(kwargs or {}))
        else:
            found = func(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        self.largest = max([self.largest, *(size // 4 for size in sizes)])
        return found


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_no_matrix_of_all_pairs_is_made(options, monkeypatch):
    n, d, tile = 1000, 4, 100
    monkeypatch.setattr(pairs, "TILE", tile)
    monkeypatch.setattr(pairs, "TILE_ELEMENTS", tile**2)
    x = torch.randn(n, d, requires_grad=True)
    with Sizes() as sizes:
        hyperspherical_energy(x, 2, **options).backward()
    assert x.grad.isfinite().all()
    # Indices of the few near pairs are 8 bytes each, so that a tile can take twice its number of elements.
    assert tile**2 <= sizes.largest <= 2 * tile**2 < n**2 / 10


def test_the_memory_check_sees_a_matrix_of_all_pairs():
    x = torch.randn(1000, 4, requires_grad=True)
    with Sizes() as sizes:
        value = hyperspherical_energy(x)
        torch.autograd.grad(value, x, create_graph=True)  # second derivatives do need all pairs
    assert sizes.largest >= 1000**2


# Compiled.


@pytest.mark.parametrize("options", [FULL, HALF_ARC], ids=str)
def test_compiled_as_one_graph(options, monkeypatch):
    torch._dynamo.reset()
    compiled = torch.compile(MHE(s=2, **options), fullgraph=True, backend="aot_eager")
    # Only a derivative of the gradient may take the form that keeps all pairs.
    monkeypatch.setattr(pairs, "_dense", None)
    for x in (WA, WA.T.contiguous().T, torch.cat([WA, WA], 1)[:, 1:4]):
        value, grad = slope_of(compiled, x)
        expected, slope = slope_of(MHE(s=2, **options), x.contiguous())
        assert value.item() == pytest.approx(expected.item(), rel=1e-12)
        torch.testing.assert_close(grad, slope, rtol=1e-12, atol=1e-14)


def test_compiled_with_weights_and_padded_norms():
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda w: hyperspherical_energy(w, 1, beta=BETA, eps=0.1), fullgraph=True, backend="aot_eager"
    )
    expected, slope = slope_of(lambda w: hyperspherical_energy(w, 1, beta=BETA, eps=0.1), WA)
    value, grad = slope_of(compiled, WA)
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(grad, slope)


def test_operation_keeps_what_custom_operations_promise():
    code = Riesz(2.0).code()
    for half_space, grad in itertools.product((False, True), repeat=2):
        for x in (torch.randn(2, 4, 3), torch.randn(3, 4, 2).mT, torch.randn(4, 2, 3).transpose(0, 1)):
            arguments = (x, None, *code, half_space, 0.0, True, grad)
            torch.library.opcheck(pairs._pair_sums, arguments, test_utils=("test_schema", "test_faketensor"))


# Parts of a layer.


def choose(monkeypatch, rows, n):
    """Have the next draw take these rows of n."""
    keys = torch.tensor([[0.1 if i in rows else 0.9 for i in range(n)]])
    monkeypatch.setattr(torch, "rand", lambda shape, device: keys.expand(shape))


@pytest.mark.parametrize("options", FORMS, ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_subsets_average_to_the_whole(size, options, monkeypatch):
    module = MHE(subset=size, **options)
    found = []
    for rows in itertools.combinations(range(5), size):
        choose(monkeypatch, rows, 5)
        found.append(slope_of(module, WB))
        alone = hyperspherical_energy(WB[list(rows)], **options).item()
        assert found[-1][0].item() == pytest.approx(alone, rel=1e-12)
    values, grads = (torch.stack(part).mean(0) for part in zip(*found, strict=True))
    expected, slope = slope_of(lambda w: hyperspherical_energy(w, **options), WB)
    if not options.get("half_space"):
        assert values.item() == pytest.approx(expected.item(), rel=1e-12)
        torch.testing.assert_close(grads, slope)
    else:
        # The pair of a vector and its own image, a constant, is a larger part of a subset: 1 of 2 size - 1, not 1 of 9.
        own = 1 / (math.pi if "angular" in options else 2) ** 2
        rest = (expected.item() * 9 - own) / 8
        share = (2 * size - 2) / (2 * size - 1)
        assert values.item() == pytest.approx(own * (1 - share) + rest * share, rel=1e-12)
        torch.testing.assert_close(grads, slope * share * 9 / 8)


def test_published_subset(monkeypatch):
    choose(monkeypatch, (0, 2, 3), 5)
    assert MHE(subset=3)(WB).item() == pytest.approx(0.725054072781, rel=1e-10)


def test_subsets_are_drawn_anew_in_training_and_not_at_all_in_evaluation():
    module = MHE(subset=3)
    torch.manual_seed(1)
    drawn = [module(WB).item() for _ in range(400)]
    assert len({round(value, 12) for value in drawn}) == 10
    torch.manual_seed(1)
    assert [module(WB).item() for _ in range(5)] == drawn[:5]
    assert sum(drawn) / 400 == pytest.approx(1.45220252739, rel=0.1)
    assert module.eval()(WB).item() == pytest.approx(1.45220252739, rel=1e-10)
    assert MHE(subset=7)(WB).item() == pytest.approx(1.45220252739, rel=1e-10)


def test_subsets_leave_out_zero_vectors_and_the_output_layer():
    x = torch.cat([torch.zeros(20, 3, dtype=torch.float64), WA])
    assert MHE(subset=4)(x).item() == pytest.approx(0.629407965512, rel=1e-10)
    output = neurons("out", lambda: WB, "output")
    for _ in range(5):
        assert MHE(subset=2)(output).item() == pytest.approx(1.45220252739, rel=1e-10)
    both = neurons("narrow", lambda: WA) + neurons("wide", lambda: torch.cat([WA, WA[:1]]))
    # A layer with fewer neurons than the subset, beside one with more, is taken whole.
    assert MHE(subset=4, hidden_weight=1).layer_energies(both)["narrow"].item() == pytest.approx(0.629407965512)


# On a model.


@pytest.mark.parametrize(("s", "half_space"), [(2.0, False), (0.0, True)])
def test_a_model_is_the_weighted_sum_of_its_layers(s, half_space):
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Conv1d(3, 5, 2), nn.Conv3d(2, 3, 1), nn.Sequential(nn.Linear(6, 7))
    ).double()
    hidden = [model[0].weight, model[2].weight, model[3].weight]
    output = model[4][0].weight
    counts = [len(w) * (2 * (2 * len(w) - 1) if half_space else len(w) - 1) for w in hidden]
    energies = [
        plain_energy(w.flatten(1).tolist(), s, half_space) / count for w, count in zip(hidden, counts, strict=True)
    ]
    last = plain_energy(output.tolist(), s) / 42
    module = MHE(s=s, half_space=half_space)
    expected = (1 if half_space else 10) * sum(energies) + last
    assert module(model).item() == pytest.approx(expected, rel=1e-10)
    weighted = MHE(s=s, half_space=half_space, hidden_weight=0.3, output_weight=7)(model)
    assert weighted.item() == pytest.approx(0.3 * sum(energies) + 7 * last, rel=1e-10)
    named = module.layer_energies(model)
    assert list(named) == ["0", "2", "3", "4.0"]
    assert [value.item() for value in named.values()] == pytest.approx([*energies, last], rel=1e-10)
    rows = module.report(model).rows
    assert [row.energy for row in rows] == pytest.approx([*energies, last], rel=1e-10)


SHAPES = st.tuples(st.integers(1, 3), st.integers(2, 9), st.integers(1, 9))


@settings(max_examples=30)
@given(SEEDS, st.lists(st.tuples(SHAPES, st.booleans()), min_size=1, max_size=7), st.sampled_from(FORMS), st.data())
def test_layers_together_are_the_sum_of_layers(seed, layers, options, data):
    matrices = [random_rows(*shape, seed=seed + k) for k, (shape, _) in enumerate(layers)]
    if data.draw(st.booleans()):
        matrices[0][0, 0] = 0
    rows = [matrix.requires_grad_() for matrix in matrices]
    parts = [neurons(str(k), lambda k=k: rows[k], "output" if out else "hidden") for k, (_, out) in enumerate(layers)]
    selection = sum(parts[1:], parts[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "CPU_PADDING", data.draw(st.sampled_from([0, 60, 2**21])))
        value = MHE(s=1, hidden_weight=3, output_weight=5, **options)(selection)
    grads = torch.autograd.grad(value, rows)
    expected = 0.0
    for matrix, (_, out), grad in zip(rows, layers, grads, strict=True):
        own = options | {"half_space": False} if out else options
        groups = [slope_of(lambda v, own=own: hyperspherical_energy(v, 1, **own), group.detach()) for group in matrix]
        weight = (5 if out else 3) / len(groups)
        expected += weight * sum(one.item() for one, _ in groups)
        slopes = weight * torch.stack([slope for _, slope in groups])
        assert (grad - slopes).norm() <= 1e-9 * slopes.norm() + 1e-9
    assert value.item() == pytest.approx(expected, rel=1e-10, abs=1e-10)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 40)), max_size=20), st.integers(0, 4000)
)
def test_batches_hold_every_layer_once_and_little_padding(shapes, padding):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "PADDING", padding)
        found = base.batches(shapes)
    assert sorted(itertools.chain(*found)) == list(range(len(shapes)))
    for members in found:
        chosen = [shapes[index] for index in members]
        area = max(n for _, n, _ in chosen) * max(d for _, _, d in chosen)
        assert sum(groups * (area - n * d) for groups, n, d in chosen) <= padding
    alike = sorted({shape[1:] for shape in shapes})
    assert len(base.batches([(1, *shape) for shape in alike for _ in range(3)])) <= len(alike)


def test_layers_of_a_network_are_few_batches(monkeypatch):
    blocks = [nn.Conv2d(c, c, 3) for c in (16, 16, 16, 32, 32, 32, 64, 64, 64)]
    model = nn.Sequential(nn.Conv2d(3, 16, 3), *blocks, nn.Linear(64, 10))
    calls = []
    original = MHE.energy
    monkeypatch.setattr(MHE, "energy", lambda self, v, role: calls.append(role) or original(self, v, role))
    MHE()(model)
    assert sorted(calls) == ["hidden"] * 4 + ["output"]  # on a CPU those of equal shape
    calls.clear()
    monkeypatch.setattr(base, "CPU_PADDING", base.PADDING)
    MHE()(model)
    assert sorted(calls) == ["hidden", "output"]


def test_gather_pads_with_zeros_and_returns_the_gradients():
    parts = [torch.randn(2, 3, 4), torch.randn(1, 5, 2), torch.randn(1, 5, 2), torch.randn(1, 1, 1)]
    parts = [part.double().requires_grad_() for part in parts]
    batch = base.gather(parts)
    assert batch.shape == (5, 5, 4)
    assert batch.abs().sum().item() == pytest.approx(sum(part.abs().sum().item() for part in parts))
    assert torch.equal(batch[:2, :3], parts[0]) and torch.equal(batch[3, :, :2], parts[2][0])
    assert torch.autograd.gradcheck(lambda *m: base.gather(m), parts)
    assert torch.autograd.gradgradcheck(lambda *m: base.gather(m).pow(3), parts)


def test_gradients_reach_every_layer_and_no_bias():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    MHE()(model).backward()
    for layer in model:
        assert layer.weight.grad.abs().max() > 0
        assert layer.bias.grad is None


def test_frozen_layers_count_and_get_no_gradient():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    value = MHE()(model)
    model[0].weight.requires_grad_(False)
    partly = MHE()(model)
    assert partly.item() == value.item()
    partly.backward()
    assert model[0].weight.grad is None and model[1].weight.grad.abs().max() > 0
    frozen = MHE()(model.requires_grad_(False))
    assert frozen.item() == value.item() and not frozen.requires_grad
    with torch.inference_mode():
        assert MHE()(model).item() == value.item()


def test_layers_that_keep_their_angles_cost_nothing():
    def unread():
        raise AssertionError

    fixed = neurons("fixed", unread, constant=True)
    assert MHE()(fixed + neurons("free", lambda: WA)).item() == pytest.approx(6.29407965512, rel=1e-10)
    assert MHE(output_weight=0)(neurons("out", unread, "output") + neurons("free", lambda: WA)).item() > 0


def test_a_single_neuron_has_no_energy_and_still_trains():
    layer = nn.Linear(3, 1)
    value = MHE()(layer)
    assert value.item() == 0
    (value + layer(torch.ones(1, 3)).sum()).backward()
    assert (layer.weight.grad == 1).all()
    hidden = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    assert MHE()(hidden).item() == pytest.approx(10 * hyperspherical_energy(hidden[0].weight).item(), rel=1e-6)


def test_a_layer_by_itself_is_hidden_and_a_shared_layer_counts_once():
    layer = nn.Linear(3, 4)
    alone = MHE()(layer).item()
    assert alone == pytest.approx(10 * hyperspherical_energy(layer.weight).item())
    assert MHE(half_space=True)(layer).item() == pytest.approx(
        hyperspherical_energy(layer.weight, half_space=True).item()
    )
    shared = nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU())
    assert MHE(output_weight=10)(shared).item() == pytest.approx(alone)


def test_groups_of_a_convolution_are_averaged():
    layer = nn.Conv2d(6, 9, 2, groups=3).double()
    groups = layer.weight.flatten(1).chunk(3)
    expected = sum(plain_energy(rows.tolist(), 2) / 6 for rows in groups) / 3
    assert MHE(hidden_weight=1)(layer).item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Conv3d])
@pytest.mark.parametrize("groups", [1, 2])
def test_channels_last_changes_nothing(kind, groups):
    format_ = torch.channels_last if kind is nn.Conv2d else torch.channels_last_3d
    model = nn.Sequential(kind(4, 6, 3, groups=groups), kind(6, 8, 2), nn.Linear(5, 3)).double()
    last = nn.Sequential(kind(4, 6, 3, groups=groups), kind(6, 8, 2), nn.Linear(5, 3)).double()
    last.load_state_dict(model.state_dict())
    last = last.to(memory_format=format_)
    assert not last[0].weight.is_contiguous()
    for options in FORMS:
        values = [MHE(s=1, **options)(m) for m in (model, last)]
        assert values[0].item() == pytest.approx(values[1].item(), rel=1e-12)
        grads = [
            torch.autograd.grad(v, [p for p in m.parameters() if p.dim() > 1])
            for v, m in zip(values, (model, last), strict=True)
        ]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_second_derivatives_through_a_model(options):
    model = nn.Sequential(nn.Conv2d(2, 4, 2), nn.Conv2d(4, 3, 1, groups=1), nn.Linear(4, 3)).double()
    weights = [layer.weight for layer in model]
    module = MHE(s=1, **options)

    def gradients(**kwargs):
        return torch.autograd.grad(module(model), weights, **kwargs)

    ways = [torch.randn_like(w) for w in weights]
    along = sum((g * v).sum() for g, v in zip(gradients(create_graph=True), ways, strict=True))
    products = torch.autograd.grad(along, weights)
    sides = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            for weight, way in zip(weights, ways, strict=True):
                weight.add_(way, alpha=step)
        sides.append(gradients())
    for product, upper, lower in zip(products, *sides, strict=True):
        torch.testing.assert_close(product, (upper - lower) / 2e-5, rtol=1e-5, atol=1e-7)


def test_a_model_is_compiled_with_its_gradient():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 2, groups=2), nn.Flatten(), nn.Linear(4, 3)).double()
    selection = select(model)
    compiled = torch.compile(lambda: MHE(half_space=True)(selection), fullgraph=True, backend="aot_eager")
    weights = [model[k].weight for k in (0, 1, 3)]
    value, expected = compiled(), MHE(half_space=True)(model)
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    found = [torch.autograd.grad(v, weights) for v in (value, expected)]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_energy_of_a_decoupled_transposed_convolution_is_that_of_its_kernels():
    layer = hs.nn.DecoupledConvTranspose2d(3, 4, 2)
    expected = hyperspherical_energy(layer.weight.transpose(0, 1).flatten(1))
    assert MHE(hidden_weight=1)(layer).item() == pytest.approx(expected.item(), rel=1e-6)


# Arguments.


def test_create_and_repr():
    module = create("MHE", s=1, half_space=True, reduction="sum")
    assert isinstance(module, MHE)
    assert module(WA).item() == pytest.approx(41.4257834785, rel=1e-10)
    assert repr(module) == "MHE(s=1, half_space=True, angular=False, reduction='sum')"


@pytest.mark.parametrize(
    ("argument", "options"),
    [("s", {"s": math.nan}), ("reduction", {"reduction": "max"}), ("eps", {"eps": -1.0})],
)
def test_bad_options_are_named(argument, options):
    with pytest.raises(ArgumentError, match=f"^{argument} must be "):
        hyperspherical_energy(WA, **options)
    with pytest.raises(ArgumentError, match=f"^{argument} must be "):
        MHE(**options)


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("s", {"s": -1.0}),
        ("subset", {"subset": 1}),
        ("preset", {"preset": "paper"}),
        ("hidden_weight", {"hidden_weight": -1.0}),
        ("output_weight", {"output_weight": math.nan}),
    ],
)
def test_bad_options_of_a_regulariser_are_named(argument, options):
    with pytest.raises(ArgumentError, match=f"^{argument} must be "):
        MHE(**options)


def test_options_that_exclude_each_other():
    with pytest.raises(ArgumentError, match=r"^subset estimates a mean"):
        MHE(subset=3, reduction="sum")
    with pytest.raises(ArgumentError, match=r"^beta needs chords"):
        hyperspherical_energy(WA, beta=BETA, angular=True)
    with pytest.raises(ArgumentError, match=r"^beta must have shape \(4,\), got \(3,\)"):
        hyperspherical_energy(WA, beta=BETA[:3])


def test_bad_targets_are_named():
    for shape in ((3,), (2, 3, 4, 5)):
        with pytest.raises(ArgumentError, match=r"^vectors must have shape \(n, d\) or \(b, n, d\), got"):
            hyperspherical_energy(torch.zeros(shape))
    with pytest.raises(ArgumentError, match=r"^target must have shape \(n, d\), got \(2, 3, 4\)"):
        MHE()(torch.zeros(2, 3, 4))
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


def test_no_gradient_is_computed_that_nobody_wants(monkeypatch):
    wanted, original = [], pairs._pair_sums
    monkeypatch.setattr(pairs, "_pair_sums", lambda *args: (wanted.append(args[-1]), original(*args))[1])
    weight = nn.Parameter(torch.randn(5, 3))
    with torch.no_grad():
        value = hyperspherical_energy(weight)
    torch.testing.assert_close(value, hyperspherical_energy(weight).detach())
    assert wanted == [False, True]
