"""Margin and scale theory against published numbers, closed forms and brute force."""

import math

import pytest
import scipy.optimize
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from hypersphere.errors import ArgumentError
from hypersphere.losses import theory
from hypersphere.losses.theory import binary_margin, largest_cosine_margin, reachable_probability, softmax_bound

ANGLES = st.floats(0.01, math.pi)


def multiplicative(m):
    """cos(m theta - k pi) - 2k, from its definition."""

    def psi(theta):
        k = (m * theta / math.pi).floor().clamp(0, math.ceil(m) - 1)
        return (m * theta - k * math.pi).cos() - 2 * k

    return psi


def blended(m, weight):
    return lambda theta: (weight * theta.cos() + multiplicative(m)(theta)) / (1 + weight)


def additive_cosine(m):
    return lambda theta: theta.cos() - m


def additive_angle(m):
    return lambda theta: (theta + m).clamp(max=math.pi).cos()


def simplex(classes):
    return F.normalize(torch.eye(classes, dtype=torch.float64) - 1 / classes)


def unit_rows(seed, count, dim):
    return F.normalize(torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


# The margin between two classes.


@pytest.mark.parametrize(
    ("psi", "eta", "degrees"),
    [
        (multiplicative(2), torch.cos, 30.0),
        (multiplicative(4), torch.cos, 54.0),
        (blended(4, 5), torch.cos, 21.2294283),
        (additive_cosine(0.35), torch.cos, 28.6577551),
        (additive_angle(0.5), torch.cos, 28.6478898),
        (torch.cos, lambda theta: (theta / 1.4).cos(), 15.0),
    ],
)
def test_published_margins_at_right_angles(psi, eta, degrees):
    assert math.degrees(binary_margin(psi, math.pi / 2, eta)) == pytest.approx(degrees, abs=1e-7)


def test_other_function_is_the_cosine_by_default():
    psi = multiplicative(3)
    assert binary_margin(psi, 1.3) == binary_margin(psi, 1.3, torch.cos)
    assert binary_margin(psi, 1.3) != binary_margin(psi, 1.3, lambda theta: theta.cos() / 2)


@given(st.floats(1, 12), ANGLES)
def test_multiplicative_margin_has_its_closed_form(m, theta12):
    closed = theory.angular_margin(m, theta12)
    assert closed == pytest.approx((m - 1) / (m + 1) * theta12, abs=1e-14)
    # A slope of 0 where the boundary is at pi/m leaves half of the digits of the cosine.
    assert binary_margin(multiplicative(m), theta12) == pytest.approx(closed, abs=1e-7)


@given(st.floats(0, 1), ANGLES)
def test_additive_margins_have_their_closed_forms(m, theta12):
    assert binary_margin(additive_angle(m), theta12) == pytest.approx(min(m, theta12), abs=1e-7)
    # cos a - cos(theta12 - a) = 2 sin(theta12 / 2) sin(margin / 2)
    sine = m / (2 * math.sin(theta12 / 2))
    half = theta12 / 2 if sine >= math.sin(theta12 / 2) else math.asin(sine)
    assert binary_margin(additive_cosine(m), theta12) == pytest.approx(2 * half, abs=1e-7)


@pytest.mark.parametrize("theta12", [0.4, 1.1, 2.0, 3.0])
@pytest.mark.parametrize("weight", [0.5, 5, 100])
def test_margin_without_closed_form_agrees_with_another_root_finder(theta12, weight):
    psi = blended(4, weight)

    def excess(a):
        return float(psi(torch.tensor(a, dtype=torch.float64))) - math.cos(theta12 - a)

    root = scipy.optimize.brentq(excess, 0, theta12 / 2, xtol=1e-14)
    assert binary_margin(psi, theta12) == pytest.approx(theta12 - 2 * root, abs=1e-10)


def test_an_infeasible_margin_is_the_whole_gap():
    theta12 = math.radians(36)
    assert binary_margin(additive_cosine(0.35), theta12) == theta12
    edge = math.acos(1 - 0.35)
    assert binary_margin(additive_cosine(0.35), edge * (1 - 1e-9)) == pytest.approx(edge, abs=1e-4)
    assert binary_margin(additive_cosine(0.35), edge * (1 + 1e-9)) == pytest.approx(edge, abs=1e-4)
    assert binary_margin(additive_cosine(0.35), edge + 0.2) < edge - 0.1


def test_no_margin_is_zero():
    for theta12 in (0.0, 0.3, math.pi):
        assert binary_margin(torch.cos, theta12) == pytest.approx(0, abs=1e-15)
    assert binary_margin(lambda theta: theta.cos() + 0.3, 1.0) == pytest.approx(0, abs=1e-15)


def test_functions_see_double_precision_and_may_return_numbers():
    seen = set()

    def psi(theta):
        seen.add(theta.dtype)
        return math.cos(2 * theta)

    assert binary_margin(psi, 0.9) == pytest.approx(0.3, abs=1e-12)
    assert seen == {torch.float64}


# The smallest margin that makes classes compact.


def spans(m, centres):
    """Largest angle inside the first class and smallest to any other, by walking once around the circle."""
    circle = torch.arange(0, 2 * math.pi, 2e-4, dtype=torch.float64)
    apart = (circle.unsqueeze(1) - torch.tensor(centres, dtype=torch.float64)).abs()
    theta = torch.minimum(apart, 2 * math.pi - apart)
    regions = []
    for own in range(len(centres)):
        rest = torch.cat([theta[:, :own], theta[:, own + 1 :]], 1)
        inside = multiplicative(m)(theta[:, own]) >= rest.cos().amax(1)
        regions.append((circle[inside] - centres[own] + math.pi) % (2 * math.pi) - math.pi + centres[own])
    first, others = regions[0], torch.cat(regions[1:])
    gaps = (first[:: max(1, len(first) // 500)].unsqueeze(1) - others).abs()
    ends = torch.stack([first.min(), first.max()]).unsqueeze(1) - others
    between = torch.minimum(ends.abs(), 2 * math.pi - ends.abs()).min()
    assert torch.minimum(gaps, 2 * math.pi - gaps).min() >= between - 1e-9
    width = first.max() - first.min()
    return float(torch.minimum(width, 2 * math.pi - width)), float(between)


@pytest.mark.parametrize("theta12", [0.3, 1.0, 2.0])
def test_smallest_margin_of_two_classes(theta12):
    for m, compact in ((theory.m_min(2) + 0.05, True), (theory.m_min(2) - 0.05, False)):
        within, between = spans(m, [0.0, theta12])
        assert (within < between) is compact
    assert theory.m_min(2) == pytest.approx(2 + math.sqrt(3), rel=1e-15)


@pytest.mark.parametrize("classes", [3, 4, 7])
def test_smallest_margin_of_many_classes(classes):
    centres = [2 * math.pi * k / classes for k in range(classes)]
    for m, compact in ((theory.m_min(classes) + 0.05, True), (theory.m_min(classes) - 0.05, False)):
        within, between = spans(m, centres)
        assert (within < between) is compact


# Losses and scales.


@pytest.mark.parametrize(
    ("classes", "s", "expected"),
    [(10, 1, 1.37693492045), (10, 10, 0.000134499001327), (10572, 30, 9.86390968418e-10)],
)
def test_published_bounds(classes, s, expected):
    # The published digits end at the precision of 1 + x, some 1e-16.
    assert softmax_bound(classes, s) == pytest.approx(expected, rel=1e-11, abs=2e-16)


def test_published_scales_and_margins():
    assert theory.suggest_scale(10572, 0.9) == pytest.approx(11.462009971, rel=1e-10)
    assert theory.suggest_scale(10572) == theory.suggest_scale(10572, 0.9)
    assert theory.adacos_scale(10572) == pytest.approx(13.1039185711, rel=1e-11)
    assert largest_cosine_margin(8, 2) == pytest.approx(0.292893218813, rel=1e-11)
    assert theory.magface_minimum_weight() == pytest.approx(22.5866666667, rel=1e-11)


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("s", [0, 0.7, 5])
def test_a_simplex_attains_the_bound(classes, s):
    logits = s * simplex(classes) @ simplex(classes).mT
    loss = F.cross_entropy(logits, torch.arange(classes)).item()
    assert softmax_bound(classes, s) == pytest.approx(loss, rel=1e-12)
    assert reachable_probability(classes, s) == pytest.approx(logits.softmax(1)[0, 0].item(), rel=1e-12)


@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(1, 6), st.floats(0, 8))
def test_no_directions_beat_the_bound(seed, classes, dim, s):
    features, weight = unit_rows(seed, classes, dim), unit_rows(seed + 1, classes, dim)
    labels = torch.arange(classes)
    for x in (features, weight):
        assert F.cross_entropy(s * x @ weight.mT, labels).item() >= softmax_bound(classes, s) - 1e-12


def test_extreme_scales():
    assert softmax_bound(1, 3.0) == 0
    assert reachable_probability(1, 3.0) == 1
    assert softmax_bound(10, 1e308) == 0
    assert reachable_probability(10, 1e308) == 1
    # Far below the precision of 1 + x.
    assert softmax_bound(11, 300) == pytest.approx(10 * math.exp(-330), rel=1e-13, abs=0)
    assert softmax_bound(10**9, 0) == pytest.approx(math.log(10**9), rel=1e-13)
    assert softmax_bound(5, 0) == pytest.approx(math.log(5), rel=1e-13)
    assert reachable_probability(5, 0) == pytest.approx(0.2, rel=1e-13)


@given(st.integers(2, 10**7), st.floats(0.01, 1 - 1e-9))
def test_scale_and_probability_are_inverse(classes, probability):
    s = theory.suggest_scale(classes, probability)
    if probability < 1 / classes:
        assert s == 0  # even equal logits reach more
        assert reachable_probability(classes, s) > probability
    else:
        assert reachable_probability(classes, s) == pytest.approx(probability, rel=1e-9)
        assert s >= 0


def test_scale_of_one_class_is_zero():
    assert theory.suggest_scale(1, 0.999) == 0


@given(st.integers(2, 10**6))
def test_adacos_scale(classes):
    assert theory.adacos_scale(classes) == pytest.approx(math.log((classes - 1) ** math.sqrt(2)), rel=1e-12)


@pytest.mark.parametrize("classes", [2, 3, 5, 40])
def test_largest_cosine_margin_of_regular_centres(classes):
    circle = 2 * math.pi * torch.arange(classes, dtype=torch.float64) / classes
    polygon = torch.stack([circle.cos(), circle.sin()], 1)
    assert largest_cosine_margin(classes, 2) == pytest.approx(smallest_gap(polygon), rel=1e-10)
    for dim in (max(classes - 1, 3), classes + 5):
        assert largest_cosine_margin(classes, dim) == pytest.approx(smallest_gap(simplex(classes)), rel=1e-12)


def smallest_gap(centres):
    """What a feature on its own centre has over the nearest other one."""
    gaps = 1 - centres @ centres.mT
    return gaps.fill_diagonal_(math.inf).min().item()


@given(st.integers(0, 2**32 - 1), st.integers(2, 9), st.integers(2, 6))
def test_no_centres_admit_more(seed, classes, dim):
    assert smallest_gap(unit_rows(seed, classes, dim)) <= largest_cosine_margin(classes, dim) + 1e-12


def test_largest_cosine_margin_of_many_classes_keeps_its_digits():
    assert largest_cosine_margin(10**9, 2) == pytest.approx((2 * math.pi / 10**9) ** 2 / 2, rel=1e-12, abs=0)


@given(st.floats(0, 100), st.floats(0.5, 50), st.floats(1, 200), st.floats(0, 0.5), st.floats(0, 0.5))
def test_magface_weight_balances_the_slopes_at_the_lowest_norm(s, l_a, more_a, l_m, more_m):
    u_a, u_m = l_a + more_a, l_m + more_m
    norm = torch.tensor(l_a, dtype=torch.float64, requires_grad=True)
    penalty = 1 / norm + norm / u_a**2
    (slope,) = torch.autograd.grad(penalty, norm)
    weight = theory.magface_minimum_weight(s, l_a, u_a, l_m, u_m)
    assert -weight * slope.item() == pytest.approx(s * (u_m - l_m) / (u_a - l_a), rel=1e-9, abs=1e-300)


# Bad input.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.angular_margin(0.9, 1), "m must be at least 1, got 0.9"),
        (lambda: theory.angular_margin(2, -0.1), "theta12 must be at least 0 and at most 3.14159, got -0.1"),
        (lambda: binary_margin(torch.cos, 3.2), "theta12 must be at least 0 and at most 3.14159, got 3.2"),
        (lambda: binary_margin(torch.cos, math.nan), "theta12 must be at least 0 and at most 3.14159, got nan"),
        (lambda: binary_margin(lambda t: t * math.nan, 1), "psi must give a number on [0, theta12 = 1], got nan"),
        (lambda: binary_margin(torch.cos, 1, lambda t: t.sub(2).sqrt()), "eta must give a number on [0, theta12 = 1]"),
        (lambda: theory.m_min(1), "classes must be at least 2, got 1"),
        (lambda: softmax_bound(0, 1), "classes must be at least 1, got 0"),
        (lambda: softmax_bound(2, -1), "s must be at least 0, got -1"),
        (lambda: reachable_probability(2, math.nan), "s must be at least 0, got nan"),
        (lambda: reachable_probability(0, 1), "classes must be at least 1, got 0"),
        (lambda: theory.suggest_scale(0), "classes must be at least 1, got 0"),
        (lambda: theory.suggest_scale(3, 1.0), "probability must be greater than 0 and less than 1, got 1.0"),
        (lambda: theory.suggest_scale(3, 0.0), "probability must be greater than 0 and less than 1, got 0.0"),
        (lambda: theory.suggest_scale(1, 2.0), "probability must be greater than 0 and less than 1, got 2.0"),
        (lambda: theory.adacos_scale(1), "classes must be at least 2, got 1"),
        (lambda: largest_cosine_margin(1, 3), "classes must be at least 2, got 1"),
        (lambda: largest_cosine_margin(3, 1), "dim must be at least 2, got 1"),
        (lambda: theory.magface_minimum_weight(s=-1), "s must be at least 0, got -1"),
        (lambda: theory.magface_minimum_weight(l_a=0), "l_a must be greater than 0, got 0"),
        (lambda: theory.magface_minimum_weight(u_a=10), "u_a must be greater than 10, got 10"),
        (lambda: theory.magface_minimum_weight(l_m=-0.1), "l_m must be at least 0, got -0.1"),
        (lambda: theory.magface_minimum_weight(u_m=0.4), "u_m must be at least 0.45, got 0.4"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert message in str(caught.value)
