"""Angular functions and margins against published numbers, their definitions and closed forms of their slopes."""

import math

import numpy as np
import pytest
import scipy.special
import torch
from hypothesis import given
from hypothesis import strategies as st

import hypersphere as hs
from hypersphere import angular, margins
from hypersphere.angular import Angular, Sigmoid
from hypersphere.errors import ArgumentError, HypersphereError
from hypersphere.margins import (
    AdditiveAngle,
    AdditiveCosine,
    Circle,
    ClippedMultiplicative,
    Combined,
    Margin,
    Multiplicative,
    NoMargin,
)

PI = math.pi
GRID = torch.linspace(0, PI, 401, dtype=torch.float64)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


# Angular functions: value and slope at an angle, written with exponentials where the library uses tanh.


def sigmoid(t, k):
    e, top = math.exp(t / k - PI / (2 * k)), (1 + math.exp(-PI / (2 * k))) / (1 - math.exp(-PI / (2 * k)))
    return top * (1 - e) / (1 + e)


def sigmoid_slope(t, k):
    e, top = math.exp(t / k - PI / (2 * k)), (1 + math.exp(-PI / (2 * k))) / (1 - math.exp(-PI / (2 * k)))
    return -2 * top * e / (k * (1 + e) ** 2)


ANGULARS = {
    "cosine": ({}, math.cos, lambda t: -math.sin(t)),
    "linear": ({}, lambda t: 1 - 2 * t / PI, lambda t: -2 / PI),
    "sigmoid": ({"k": 0.3}, lambda t: sigmoid(t, 0.3), lambda t: sigmoid_slope(t, 0.3)),
    "sqcos": (
        {},
        lambda t: math.copysign(math.cos(t) ** 2, math.cos(t)),
        lambda t: -abs(math.sin(2 * t)),
    ),
    "relucos": ({}, lambda t: max(0.0, math.cos(t)), lambda t: -math.sin(t) if t < PI / 2 else 0.0),
}
by_angular = pytest.mark.parametrize("name", ANGULARS)


def plain(function, theta=GRID):
    return tensor([function(t) for t in theta.tolist()])


def test_published_angular_functions():
    one = tensor(1.0)
    assert angular.create("linear")(one).item() == pytest.approx(0.363380227632, abs=1e-12)
    for k, value in ((0.1, 0.993383410791), (0.3, 0.748305472917), (0.7, 0.478220786913)):
        assert angular.create("sigmoid", k=k)(one).item() == pytest.approx(value, abs=1e-12)


@by_angular
def test_angular_functions_against_their_definitions(name):
    options, value, slope = ANGULARS[name]
    g = angular.create(name, **options)
    torch.testing.assert_close(g(GRID), plain(value), rtol=0, atol=1e-14)
    torch.testing.assert_close(g.of_cosine(GRID.cos()), plain(value), rtol=0, atol=2e-8)
    inside = GRID[1:-1]
    torch.testing.assert_close(g.slope(GRID), plain(slope), rtol=0, atol=1e-13)
    by_cosine = plain(slope, inside) / -inside.sin()
    torch.testing.assert_close(g.slope_of_cosine(inside.cos()), by_cosine, rtol=1e-9, atol=1e-9)
    ends = [1.0, 0.0, 0.0 if name == "relucos" else -1.0]
    assert g(tensor([0, PI / 2, PI])).tolist() == pytest.approx(ends, abs=1e-15)
    assert g.of_cosine(tensor([1.0, 0.0, -1.0])).tolist() == pytest.approx(ends, abs=1e-15)
    leaf = inside.cos().requires_grad_()
    (seen,) = torch.autograd.grad(g.of_cosine(leaf).sum(), leaf)
    torch.testing.assert_close(seen, by_cosine, rtol=1e-9, atol=1e-9)
    assert (g(GRID).diff() <= 0).all()


def test_sigmoid_goes_from_a_step_to_a_line():
    step = angular.create("sigmoid", k=1e-3)(torch.tensor([0.0, 1.5, 1.6, PI]))
    assert step.tolist() == [1, 1, -1, -1]
    torch.testing.assert_close(angular.create("sigmoid", k=1e4)(GRID), 1 - 2 * GRID / PI, rtol=0, atol=1e-8)
    for k in (0.0, -1.0, math.nan):
        with pytest.raises(ArgumentError, match=r"^k must be greater than 0"):
            Sigmoid(k)


def test_slope_and_offset_of_the_linear_function():
    g = angular.Linear(a=-0.4, b=0.7)
    torch.testing.assert_close(g(GRID), 0.7 - 0.4 * GRID)
    cosines = torch.linspace(-0.99, 0.99, 9, dtype=torch.float64)
    torch.testing.assert_close(g.cosine_at(g.of_cosine(cosines)), cosines)
    leaf = cosines.clone().requires_grad_()
    (slope,) = torch.autograd.grad(g.of_cosine(leaf).sum(), leaf)
    torch.testing.assert_close(g.slope_of_cosine(cosines), slope)
    layer = hs.nn.TanhConv2d(2, 3, 2, angular=g, eps=0.0, mean_norm=False).double()
    x = torch.randn(2, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    patches = torch.nn.functional.unfold(x, 2).transpose(1, 2)
    theta = torch.nn.functional.cosine_similarity(patches.unsqueeze(2), layer.weight.flatten(1), dim=3).acos()
    wanted = (patches.norm(dim=2, keepdim=True) / layer.radius).tanh() * (0.7 - 0.4 * theta)
    found = layer(x).flatten(2).transpose(1, 2)
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(wanted)
    for a, b in zip(*(torch.autograd.grad(y, [x, *layer.parameters()], weights) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b)
    assert layer(torch.zeros(1, 2, 2, 2, dtype=torch.float64)).count_nonzero() == 0
    with pytest.raises(ArgumentError, match=r"^a must be less than 0"):
        angular.Linear(a=0.5)
    for wrong in ({"a": "x"}, {"a": -math.inf}, {"b": math.nan}, {"b": None}):
        with pytest.raises(ArgumentError, match=r"^[ab] must be a finite number, got"):
            angular.Linear(**wrong)
    assert repr(angular.Linear()) == "Linear()" and repr(g) == "Linear(a=-0.4, b=0.7)"
    with pytest.raises(ArgumentError, match=r"^g must fall from 1 to -1"):
        Multiplicative(g)


def test_a_class_is_no_name():
    with pytest.raises(HypersphereError, match=r"unknown angular function <class .*Sigmoid'>\. Known: cosine"):
        hs.nn.SphereLinear(2, 3, angular=Sigmoid)


def test_own_angular_functions_may_define_either_form():
    class Tent(Angular):
        def __call__(self, theta):
            return 1 - theta / PI

    class Cube(Angular):
        def of_cosine(self, cosines):
            return cosines**3

    torch.testing.assert_close(Tent().of_cosine(GRID.cos()), 1 - GRID / PI, rtol=0, atol=1e-8)
    torch.testing.assert_close(Cube()(GRID), GRID.cos() ** 3)
    assert angular.create(Cube()) == Cube()
    with pytest.raises(NotImplementedError, match="Tent defines no slope"):
        Tent().slope(GRID)


# Margins: value at an angle and its slope. The slope at a kink is that of the flat side.


def times(t, m, g=math.cos):
    """g(m t - k pi) - 2k, k counted by walking along the angle."""
    k = 0
    while m * t >= (k + 1) * PI and k + 1 < m:
        k += 1
    return g(m * t - k * PI) - 2 * k


def times_slope(t, m, slope=lambda u: -math.sin(u)):
    k = 0
    while m * t >= (k + 1) * PI and k + 1 < m:
        k += 1
    return m * slope(m * t - k * PI)


def beyond_starts(m, beyond):
    return {"clip": PI - m, "fallback": PI - m, "easy": PI / 2, "raw": 9.0, "tangent": PI - 2 * m}[beyond]


def plus(t, m, beyond):
    if beyond_starts(m, beyond) > t:
        return math.cos(t) * math.cos(m) - math.sin(t) * math.sin(m)
    line = -math.cos(m) - (t - PI + 2 * m) * math.sin(m)
    return {"clip": -1.0, "fallback": math.cos(t) - m * math.sin(m), "easy": math.cos(t), "tangent": line}[beyond]


def plus_slope(t, m, beyond):
    if beyond_starts(m, beyond) > t:
        return -math.sin(t + m)
    return {"clip": 0.0, "fallback": -math.sin(t), "easy": -math.sin(t), "tangent": -math.sin(m)}[beyond]


def capped(t, a, b, c=0.0):
    return (math.cos(a * t + b) if a * t + b < PI else -1.0) - c


def capped_slope(t, a, b):
    return -a * math.sin(a * t + b) if a * t + b < PI else 0.0


def adaptive(t, m, z):
    turned = min(max(t - m * z, 0), PI)
    return math.cos(turned) - m - m * z


def adaptive_slope(t, m, z):
    return -math.sin(t - m * z) if 0 <= t - m * z <= PI else 0.0


def linear(u):
    return 1 - 2 * u / PI


# case: name, options, sizes, value, slope, whether it never rises (every default must)
CASES = {
    "none": ("none", {}, {}, math.cos, lambda t: -math.sin(t), True),
    "none linear": ("none", {"g": "linear"}, {}, linear, lambda t: -2 / PI, True),
    **{
        f"multiplicative {m}": (
            "multiplicative",
            {},
            {"m": m},
            lambda t, m=m: times(t, m),
            lambda t, m=m: times_slope(t, m),
            True,
        )
        for m in (1, 1.2, 1.5, 2, 2.7, 3, 4, 5, 8, 13)
    },
    "multiplicative linear": (
        "multiplicative",
        {"g": "linear"},
        {"m": 4},
        lambda t: 1 - 8 * t / PI,
        lambda t: -8 / PI,
        True,
    ),
    "multiplicative sigmoid": (
        "multiplicative",
        {"g": Sigmoid(0.3)},
        {"m": 2.5},
        lambda t: times(t, 2.5, lambda u: sigmoid(u, 0.3)),
        lambda t: times_slope(t, 2.5, lambda u: sigmoid_slope(u, 0.3)),
        True,
    ),
    "clipped 1": ("clipped-multiplicative", {}, {"m": 1}, math.cos, lambda t: -math.sin(t), True),
    "clipped 1.4": (
        "clipped-multiplicative",
        {},
        {"m": 1.4},
        lambda t: capped(t, 1.4, 0),
        lambda t: capped_slope(t, 1.4, 0),
        True,
    ),
    "cosine": ("additive-cosine", {}, {"m": 0.35}, lambda t: math.cos(t) - 0.35, lambda t: -math.sin(t), True),
    **{
        f"angle {m} {beyond}": (
            "additive-angle",
            {"beyond": beyond},
            {"m": m},
            lambda t, m=m, b=beyond: plus(t, m, b),
            lambda t, m=m, b=beyond: plus_slope(t, m, b),
            beyond in ("clip", "fallback", "tangent"),
        )
        for m in (0.1, 0.5, 1.5)
        for beyond in margins.BEYOND
    },
    "angle 0": ("additive-angle", {}, {"m": 0}, math.cos, lambda t: -math.sin(t), True),
    "angle pi": ("additive-angle", {"beyond": "clip"}, {"m": PI}, lambda t: -1.0, lambda t: 0.0, True),
    "combined": (
        "combined",
        {},
        {"m1": 1.0, "m2": 0.3, "m3": 0.2},
        lambda t: capped(t, 1, 0.3, 0.2),
        lambda t: capped_slope(t, 1, 0.3),
        True,
    ),
    "combined 0.9": (
        "combined",
        {},
        {"m1": 0.9, "m2": 0.4, "m3": 0.15},
        lambda t: capped(t, 0.9, 0.4, 0.15),
        lambda t: capped_slope(t, 0.9, 0.4),
        True,
    ),
    **{
        f"adaptive {z}": (
            "adaptive",
            {},
            {"m": 0.4, "z": z},
            lambda t, z=z: adaptive(t, 0.4, z),
            lambda t, z=z: adaptive_slope(t, 0.4, z),
            True,
        )
        for z in (-1.0, -0.3, 0.0, 0.5, 1.0)
    },
    # The bracket counts as a constant, so the slope is the one that training sees.
    "circle": (
        "circle",
        {},
        {"m": 0.25},
        lambda t: 0.25**2 - (1 - math.cos(t)) ** 2,
        lambda t: -(1.25 - math.cos(t)) * math.sin(t),
        True,
    ),
}
by_case = pytest.mark.parametrize("case", CASES)


def build(case):
    name, options, sizes, value, slope, falling = CASES[case]
    return margins.create(name, **options), sizes, value, slope, falling


PUBLISHED = [0.2, 0.7, 0.9, 1.5, 2.0, 2.5, 3.0]
PSI = {
    1: "0.980066577841 0.764842187284 0.621609968271 0.0707372016677 -0.416146836547 -0.801143615547 -0.9899924966",
    2: "0.921060994003 0.1699671429 -0.227202094693 -0.9899924966 -1.34635637914 -2.28366218546 -2.96017028665",
    3: "0.82533561491 -0.5048461046 -0.904072142017 -1.78920420057 -2.96017028665 -3.65336468216 -4.91113026188",
    4: "0.696706709347 -0.942222340669 -1.10324158367 -2.96017028665 -4.14550003381 -5.16092847092 -6.84385395873",
    1.5: "0.955336489126 0.497571047892 0.219006687093 -0.628173622723 -0.9899924966 -1.17944064266 -1.78920420057",
}
PSI_GA = {
    "linear": [-0.273239544735, -1.54647908947, -4.09295817894],
    "sigmoid": [-0.620584147438, -1.16137739979, -4.24122440013],
    "cosine": [-0.416146836547, -1.34635637914, -4.14550003381],
}


def both_forms(margin, theta, **m):
    yield margin.psi(tensor(theta), **m)
    yield margin(tensor(theta).cos(), **m)


def test_published_margins():
    expected = [(Multiplicative(), PUBLISHED, {"m": m}, [float(v) for v in row.split()]) for m, row in PSI.items()]
    expected += [(Multiplicative(angular.create(g)), [0.5, 1.0, 2.0], {"m": 4}, row) for g, row in PSI_GA.items()]
    beyond = {"raw": -0.966798192579, "clip": -1.0, "fallback": -1.21067093445, "easy": -0.97095816515}
    expected += [(AdditiveAngle(kind), [2.9], {"m": 0.5}, [value]) for kind, value in beyond.items()]
    expected += [(Multiplicative(), [2.5], {"m": 1.4}, [-1.06354331271])]
    expected += [(ClippedMultiplicative(), [2.5], {"m": 1.4}, [-1.0])]
    for margin, theta, m, values in expected:
        for found in both_forms(margin, theta, **m):
            assert found.tolist() == pytest.approx(values, abs=1e-10), (margin, m)


@by_case
def test_margins_against_their_definitions(case):
    margin, sizes, value, slope, _ = build(case)
    torch.testing.assert_close(margin.psi(GRID, **sizes), plain(value), rtol=0, atol=1e-12)
    # An arccos loses half of the digits at the ends.
    torch.testing.assert_close(margin(GRID.cos(), **sizes), plain(value), rtol=0, atol=2e-7)
    torch.testing.assert_close(margin.slope(GRID, **sizes), plain(slope), rtol=0, atol=1e-11)
    assert margin.slope(tensor([0.0, PI]), **sizes).tolist() == pytest.approx([slope(0.0), slope(PI)], abs=1e-12)
    inside = GRID[10:-10].cos().requires_grad_()
    (by_cosine,) = torch.autograd.grad(margin(inside, **sizes).sum(), inside)
    torch.testing.assert_close(by_cosine, plain(slope, GRID[10:-10]) / -GRID[10:-10].sin(), rtol=1e-8, atol=1e-8)


@by_case
def test_margins_never_rise_and_stay_below_the_function_without_margin(case):
    margin, sizes, _, _, falling = build(case)
    base = getattr(margin, "g", angular.create("cosine"))
    values = margin.psi(GRID, **sizes)
    assert bool((values.diff() <= 1e-13).all()) == falling, "raw and easy margins rise somewhere"
    if falling:
        assert (values <= base(GRID) + 1e-13).all()


@given(st.floats(1, 9) | st.integers(1, 9), st.floats(0, PI), st.sampled_from([torch.float32, torch.float64]))
def test_margins_on_cosines_never_rise_in_any_type(m, shift, dtype):
    c = GRID.cos().to(dtype)
    slack = 500 * torch.finfo(dtype).eps * m**2
    for values in (Multiplicative()(c, m=m), ClippedMultiplicative()(c, m=m), AdditiveAngle()(c, m=shift)):
        assert values.dtype == dtype
        assert (values.diff() <= slack).all()
        assert (values <= c + slack).all()


@pytest.mark.parametrize("m", [2, 3, 4, 7])
def test_polynomial_and_angle_forms_agree(m):
    c = torch.linspace(-1, 1, 400, dtype=torch.float64)
    torch.testing.assert_close(Multiplicative()(c, m=m), Multiplicative().psi(c.arccos(), m=m), rtol=0, atol=1e-11)
    # The slope by the cosine is a Chebyshev polynomial, finite at the ends.
    leaf = c.clone().requires_grad_()
    (slope,) = torch.autograd.grad(Multiplicative()(leaf, m=m).sum(), leaf)
    k = np.minimum(np.floor(m * np.arccos(c.numpy()) / PI + 1e-12), m - 1)
    torch.testing.assert_close(slope, tensor((-1) ** k * m * scipy.special.eval_chebyu(m - 1, c.numpy())))


@pytest.mark.parametrize("m", [1, 1.5, 2, 3, 3.3, 4, 6])
def test_multiplicative_margin_at_its_branch_points(m):
    for margin in (Multiplicative(), Multiplicative("linear")):
        joints = tensor([k * PI / m for k in range(math.ceil(m))])
        values = tensor([1.0 - 2 * k for k in range(math.ceil(m))])
        for shift in (-1e-9, 0, 1e-9):
            at = (joints + shift).clamp(0, PI)
            torch.testing.assert_close(margin.psi(at, m=m), values, rtol=0, atol=1e-7)
            torch.testing.assert_close(margin(at.cos(), m=m), values, rtol=0, atol=1e-7)
        if m == int(m):
            assert margin(tensor(-1.0), m=m).item() == pytest.approx(1 - 2 * m, abs=1e-14)


@pytest.mark.parametrize("name", ["multiplicative", "clipped-multiplicative", "additive-cosine", "additive-angle"])
def test_one_margin_a_sample_is_that_margin_for_each(name):
    margin = margins.create(name)
    sizes = tensor([1, 1.5, 2, 3, 2.2])
    theta = tensor([0.3, 2.9, 1.0, 2.0, 3.1])
    for together, one in (
        (margin.psi(theta, m=sizes), lambda t, m: margin.psi(t, m=m)),
        (margin(theta.cos(), m=sizes), lambda t, m: margin(t.cos(), m=m)),
    ):
        each = torch.stack([one(t, float(m)) for t, m in zip(theta, sizes, strict=True)])
        torch.testing.assert_close(together, each, rtol=0, atol=1e-12)


def test_fallback_steps_down_by_its_formula_and_easy_up():
    m = 0.5
    fallback, easy = AdditiveAngle("fallback"), AdditiveAngle("easy")
    step = fallback.psi(tensor(PI - m - 1e-9), m=m) - fallback.psi(tensor(PI - m + 1e-9), m=m)
    assert step.item() == pytest.approx(math.cos(m) + m * math.sin(m) - 1, abs=1e-7)
    assert easy.psi(tensor(PI / 2 + 1e-9), m=m) > easy.psi(tensor(PI / 2 - 1e-9), m=m) + 0.4


@given(st.floats(0.01, PI), st.sampled_from([torch.float32, torch.float64]))
def test_a_tangent_falls_everywhere_smoothly_and_within_bounds(m, dtype):
    margin, theta = AdditiveAngle("tangent"), GRID.to(dtype)
    low, eps = min(m, PI / 2), 20 * torch.finfo(dtype).eps
    values, slopes = margin.psi(theta, m=m), margin.slope(theta, m=m)
    assert (slopes <= -math.sin(low) + eps).any() and (slopes[1:-1] < 0).all() and (values.diff() < 0).all()
    # Where it begins the slope is sin(m) as well, and nowhere do two neighbours differ by more than an arc of a cosine.
    assert (slopes.diff().abs() <= PI / 400 + eps).all()
    before = theta <= PI - 2 * low
    torch.testing.assert_close(values[before], (theta[before] + m).cos(), rtol=0, atol=eps)
    end = -math.cos(m) - 2 * m * math.sin(m) if m <= PI / 2 else math.cos(m) - PI
    assert values.min().item() == pytest.approx(end, abs=10 * eps) and end >= -1 - PI
    assert values[-1] <= -1 + eps, "less than without a margin"
    # A feature opposite to its class is pulled to it, of which a clipped margin knows nothing.
    cosines = theta[-40:-1].cos().requires_grad_()
    for kind, pulls in (("tangent", True), ("clip", False)):
        (pull,) = torch.autograd.grad(AdditiveAngle(kind)(cosines, m=max(m, 0.4)).sum(), cosines)
        assert bool((pull > 0).all()) == pulls


def test_a_tangent_frees_a_feature_opposite_to_all_classes():
    # All classes in one direction, all features against it: with "clip" every logit is -s and nothing moves.
    weight = torch.tensor([[0.0, 0.0, 1.0]]).repeat(4, 1) + 1e-3 * torch.eye(4, 3)
    x = torch.tensor([[0.01, 0.02, -1.0]]).repeat(4, 1)
    angles = {}
    for kind in ("clip", "tangent"):
        head = hs.losses.ArcFace(3, 4, s=10.0, beyond=kind)
        head.weight.data.copy_(weight)
        leaf = torch.nn.Parameter(x.clone())
        optimiser = torch.optim.SGD([leaf, *head.parameters()], lr=0.1, momentum=0.9)
        for _ in range(100):
            optimiser.zero_grad()
            head(leaf, torch.arange(4)).backward()
            optimiser.step()
        angles[kind] = head.cosines(leaf).diagonal().min().item()
    assert angles["clip"] < -0.9 < 0.9 < angles["tangent"]


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        *[("multiplicative", {"m": m}, "m must be at least 1, got") for m in (0.99, -2, math.nan)],
        ("clipped-multiplicative", {"m": 0.5}, "m must be at least 1, got 0.5"),
        ("additive-cosine", {"m": -0.1}, "m must be at least 0, got -0.1"),
        *[("additive-angle", {"m": m}, r"m must be at least 0 and at most 3\.14") for m in (-0.1, 3.2, math.nan)],
        ("adaptive", {"m": 4.0}, r"m must be at least 0 and at most 3\.14"),
        ("circle", {"m": 1.5}, "m must be at least 0 and at most 1, got 1.5"),
        ("combined", {"m1": 0.0, "m2": 0.0, "m3": 0.0}, "m1 must be greater than 0"),
        ("combined", {"m1": 1.0, "m2": -1.0, "m3": 0.0}, "m2 must be at least 0"),
        ("combined", {"m1": 1.0, "m2": 0.0, "m3": -1.0}, "m3 must be at least 0"),
    ],
)
def test_bad_sizes_name_the_argument(name, sizes, message):
    with pytest.raises(ArgumentError, match=f"^{message}"):
        margins.create(name).check(**sizes)


def test_good_sizes_pass():
    for case in CASES:
        margin, sizes, *_ = build(case)
        margin.check(**{name: size for name, size in sizes.items() if name != "z"})


def test_names_and_own_margins():
    assert margins.create("additive_angle", beyond="easy") == AdditiveAngle("easy")
    assert margins.create(AdditiveCosine()) == AdditiveCosine()
    assert NoMargin("linear") == NoMargin(angular.create("linear"))
    assert Circle() != Combined()
    with pytest.raises(ArgumentError, match=r"^beyond must be one of .*'sideways'"):
        AdditiveAngle("sideways")
    with pytest.raises(NotImplementedError):
        Margin().psi(GRID)
    margins.register("square-test", lambda theta, m: theta.cos() - m * theta.square())
    own = margins.create("square-test")
    torch.testing.assert_close(own(GRID.cos(), m=0.1), GRID.cos() - 0.1 * GRID**2, rtol=0, atol=1e-7)
    torch.testing.assert_close(own.slope(GRID, m=0.1), -GRID.sin() - 0.2 * GRID, rtol=0, atol=1e-12)
