"""Geometry against plain float64 arithmetic, closed forms, scipy and properties of the sphere."""

import itertools
import math
from contextlib import nullcontext

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hypersphere import geometry as g
from hypersphere.errors import ArgumentError

LOW = (torch.float16, torch.bfloat16)
FLOATS = (*LOW, torch.float32, torch.float64)

# Every function of two sets of vectors (N, D), and what type it answers in: "measure" is float32 or wider, "vector" the
# type of its input.
PAIRS = {
    "cosine": (g.cosine, "measure"),
    "cosine_matrix": (g.cosine_matrix, "measure"),
    "angle": (g.angle, "measure"),
    "angle_matrix": (g.angle_matrix, "measure"),
    "geodesic_distance": (lambda x, y: g.geodesic_distance(x, y, 2.5), "measure"),
    "slerp": (lambda x, y: g.slerp(x, y, 0.3), "vector"),
}
SINGLES = {
    "norm": (g.norm, "measure"),
    "normalise": (g.normalise, "vector"),
    "spherical_mean": (g.spherical_mean, "vector"),
    "frechet_mean": (lambda x: g.spherical_mean(x, intrinsic_steps=5), "vector"),
    "weighted_mean": (lambda x: g.spherical_mean(x, torch.arange(1.0, len(x) + 1)), "vector"),
    "patch_norm": (lambda x: g.patch_norm(x.unsqueeze(0), 2, padding=1), "measure"),
}


# Plain references, one number at a time.


def dot(a, b):
    return math.fsum(p * q for p, q in zip(a, b, strict=True))


def reference_cosine(a, b):
    return dot(a, b) / (math.hypot(*a) * math.hypot(*b))


def reference_angle(a, b):
    return math.acos(max(-1.0, min(1.0, reference_cosine(a, b))))


def reference_unit(a):
    return [p / math.hypot(*a) for p in a]


def reference_slerp(a, b, t):
    u, v = reference_unit(a), reference_unit(b)
    theta = reference_angle(a, b)
    first, second = (math.sin(part * theta) / math.sin(theta) for part in (1 - t, t))
    return [first * p + second * q for p, q in zip(u, v, strict=True)]


def log_map(base, points):
    """Tangent vectors at ``base`` that point to ``points``, their lengths the arcs."""
    inner = points @ base
    tangent = points - inner[:, None] * base
    theta = np.arctan2(np.linalg.norm(tangent, axis=1), inner)
    return tangent / np.linalg.norm(tangent, axis=1)[:, None] * theta[:, None]


def on_circle(angles, **options):
    angles = torch.as_tensor(angles, dtype=torch.float64, **options)
    return torch.stack([angles.cos(), angles.sin()], -1)


def rotation(dim, seed=0):
    return torch.tensor(scipy.stats.special_ortho_group.rvs(dim, random_state=seed), dtype=torch.float64)


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def leaf(x):
    return x.detach().clone().requires_grad_()


def assert_close(actual, expected, atol=1e-12, rtol=0.0):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.detach().double(), expected, atol=atol, rtol=rtol)


# Values.


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_match_plain_arithmetic_in_every_type(dtype):
    x, y = draw(5, 7, dtype=dtype), draw(5, 7, dtype=dtype)
    a, b = x.tolist(), y.tolist()
    exact = 1e-14 if dtype == torch.float64 else 1e-6  # of the input as given, whatever its type
    assert_close(g.norm(x), [math.hypot(*p) for p in a], atol=10 * exact)
    assert_close(g.cosine(x, y), list(map(reference_cosine, a, b)), atol=exact)
    assert_close(g.angle(x, y), list(map(reference_angle, a, b)), atol=2 * exact)
    matrix = [[reference_cosine(p, q) for q in b] for p in a]
    assert_close(g.cosine_matrix(x, y), matrix, atol=exact)
    assert_close(g.angle_matrix(x, y), [[math.acos(c) for c in row] for row in matrix], atol=5 * exact)
    assert_close(g.geodesic_distance(x, y, 3.0), [3 * t for t in map(reference_angle, a, b)], atol=6 * exact)
    rounded = max(exact, torch.finfo(dtype).eps)
    assert_close(g.normalise(x), [reference_unit(p) for p in a], atol=rounded)
    assert_close(g.slerp(x, y, 0.3), [reference_slerp(p, q, 0.3) for p, q in zip(a, b, strict=True)], atol=4 * rounded)


def test_safe_sqrt_values_and_gradients():
    x = torch.tensor([-4.0, 0.0, 1e-30, 2.25, math.inf], requires_grad=True)
    assert_close(g.safe_sqrt(x), [0, 0, 1e-15, 1.5, math.inf], rtol=1e-6)
    g.safe_sqrt(x)[:4].sum().backward()
    assert_close(x.grad, [0, 0, 5e14, 1 / 3, 0], rtol=1e-6)
    assert g.safe_sqrt(torch.tensor(math.nan)).isnan(), "a NaN must not turn into a harmless 0"


def test_norm_keepdim_and_axis():
    x = draw(3, 4, 5)
    expected = np.linalg.norm(x.numpy(), axis=1)
    assert_close(g.norm(x, 1), expected)
    assert g.norm(x, 1, keepdim=True).shape == (3, 1, 5)


def test_pairs_broadcast_and_take_an_axis():
    x, y = draw(6, 4), draw(3, 1, 4)
    expected = [[reference_cosine(p, q[0]) for p in x.tolist()] for q in y.tolist()]
    assert_close(g.cosine(x, y), expected)
    assert_close(g.angle(x, y), np.arccos(expected))
    assert_close(g.cosine(x.T, y.transpose(1, 2), dim=-2), expected)
    assert_close(g.angle(x.T, y.transpose(1, 2), dim=-2), np.arccos(expected))
    assert_close(g.geodesic_distance(x.T, y.transpose(1, 2), dim=-2), np.arccos(expected))


def test_matrices_of_batches():
    x, y = draw(2, 3, 5), draw(2, 4, 5)
    for function in (g.cosine_matrix, g.angle_matrix):
        assert function(x, y).shape == (2, 3, 4)
        assert_close(function(x, y)[1], function(x[1], y[1]))
        assert_close(function(y, x), function(x, y).mT)


def test_low_precision_input_types_mix():
    x, y = draw(3, 4), draw(3, 4)
    assert g.cosine_matrix(x.bfloat16(), y.float()).dtype == torch.float32
    assert_close(g.cosine(x.half(), y.float()), g.cosine(x.half().double(), y), atol=1e-6)


def test_geodesic_radius_must_be_positive():
    for radius in (0.0, -1.0, math.nan):
        with pytest.raises(ArgumentError, match="radius must be greater than 0"):
            g.geodesic_distance(torch.ones(2), torch.ones(2), radius)


# Near the poles.


@pytest.mark.parametrize("tiny", [0.0, 1e-12, 1e-9, 3e-8, 1e-5])
def test_angle_keeps_its_digits_next_to_the_poles(tiny):
    x = torch.tensor([2.0, 0.0], dtype=torch.float64)
    y = torch.tensor([[1.0, tiny], [-1.0, tiny]], dtype=torch.float64) * 0.7
    near, far = g.angle(x, y).tolist()
    assert near == pytest.approx(math.atan(tiny), rel=1e-15, abs=0)
    assert far == pytest.approx(math.pi - math.atan(tiny), rel=1e-15)
    turn = rotation(6)[:2]
    near, far = g.angle(x @ turn, y @ turn).tolist()
    assert near == pytest.approx(math.atan(tiny), abs=4e-16)
    assert far == pytest.approx(math.pi - math.atan(tiny), abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_arccos_in_forward_mode_is_that_of_the_backward_pass(dtype):
    """Poles and what rounding puts beyond them included."""
    cosines = torch.tensor([-1.0, 1.0, -1.0001, 1.0001, 0.3, -0.7, 0.9], dtype=dtype)
    values, tangents = torch.func.jvp(g.arccos, (cosines,), (torch.ones_like(cosines),))
    assert torch.equal(values, g.arccos(cosines))
    torch.testing.assert_close(tangents, g.arccos_slope(cosines))


def test_angle_keeps_small_angles_in_float32_that_arccos_cannot_see():
    x, y = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1e-5])
    assert g.angle(x, y).item() == pytest.approx(1e-5, rel=1e-6)
    assert abs(g.arccos(g.cosine(x, y)).item() - 1e-5) > 5e-6


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("tiny", [0.0, 1e-9])
def test_gradients_at_the_poles_are_finite(dtype, sign, tiny):
    x = torch.tensor([[0.6, -0.3, 1.1], [1.0, 0.0, 0.0]], dtype=torch.float64)
    y = sign * 3 * x + tiny * torch.tensor([0.0, 0.7, -0.2], dtype=torch.float64)
    x, y = leaf(x.to(dtype)), leaf(y.to(dtype))
    expected = 0.0 if sign > 0 else math.pi
    slack = {torch.float16: 3e-3, torch.bfloat16: 3e-2, torch.float32: 1e-6, torch.float64: 1e-8}[dtype]
    assert_close(g.angle(x, y), [expected] * 2, atol=slack)
    for name, (function, _) in PAIRS.items():
        for grad in torch.autograd.grad(function(x, y).sum(), (x, y)):
            assert grad.dtype == dtype
            assert grad.isfinite().all(), name
            assert name == "slerp" or grad.abs().max() < 1e5, name  # an arc between opposites swings round at once


def test_angle_gradient_has_unit_length_however_small_the_angle():
    # Moving y off x changes the angle at rate 1 / |y|, also where the cosine is flat.
    for tiny in (1e-9, 1e-3, 1.0):
        for sign in (1, -1):
            y = leaf(torch.tensor([sign * 0.5, 0.5 * tiny], dtype=torch.float64))
            (grad,) = torch.autograd.grad(g.angle(torch.tensor([3.0, 0.0], dtype=torch.float64), y), y)
            assert grad.norm().item() == pytest.approx(1 / y.detach().norm().item(), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_arccos_value_is_exact_and_slope_bounded(dtype):
    eps = torch.finfo(dtype).eps
    c = leaf(torch.tensor([1.5, 1.0, 1 - eps / 2, 0.3, -0.7, -1.0, -2.0], dtype=dtype))
    theta = g.arccos(c)
    assert_close(theta, [math.acos(max(-1.0, min(1.0, v))) for v in c.tolist()], atol=2 * eps)
    (slope,) = torch.autograd.grad(theta.sum(), c)
    bound = -1 / math.sqrt(eps)
    expected = [bound, bound, bound, -1 / math.sqrt(1 - 0.09), -1 / math.sqrt(1 - 0.49), bound, bound]
    assert_close(slope, expected, rtol=1e-5)


def test_arccos_takes_half_input_to_float32():
    assert g.arccos(torch.tensor([0.5], dtype=torch.bfloat16)).dtype == torch.float32


def test_cosine_never_leaves_its_range_and_keeps_its_gradient():
    x = torch.randn(2000, 3)
    factor = torch.rand(2000, 1) * 10 + 0.1
    assert (F.normalize(x, dim=1).square().sum(1) > 1).any(), "the rounding that this test is about does occur"
    for y in (x * factor, -x * factor):
        assert g.cosine(x, y).abs().max() <= 1
        assert g.cosine_matrix(x[:300], y[:300]).abs().max() <= 1
    # Nearly parallel: rounding takes many of these cosines past 1, and none may lose its small gradient there.
    side = torch.linalg.cross(x, torch.randn(2000, 3))
    y = leaf(x + 1e-4 * side / side.norm(dim=1, keepdim=True) * x.norm(dim=1, keepdim=True))
    for cosines in (g.cosine(x, y), torch.stack([g.cosine_matrix(x[i : i + 1], y[i : i + 1]) for i in range(2000)])):
        (grad,) = torch.autograd.grad(cosines.sum(), y)
        assert_close(g.norm(grad) * g.norm(y), np.full(2000, 1e-4), atol=1e-6)


# Zero vectors.


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zero_vectors(dtype):
    zero = torch.zeros(3, dtype=dtype)
    x = leaf(torch.stack([zero, draw(3, dtype=dtype), zero]))
    y = leaf(torch.stack([draw(3, dtype=dtype), zero, zero]))
    assert g.norm(x)[0] == 0
    assert (g.normalise(x)[[0, 2]] == 0).all()
    assert (g.cosine(x, y) == 0).all()
    assert_close(g.angle(x, y), [math.pi / 2] * 3, atol=1e-6)
    assert (g.cosine_matrix(x, y)[:, 1:] == 0).all()
    assert_close(g.angle_matrix(x, y)[[0, 2]], [[math.pi / 2] * 3] * 2, atol=1e-6)
    for name, (function, _) in PAIRS.items():
        grads = torch.autograd.grad((function(x, y) * draw(*function(x, y).shape)).sum(), (x, y))
        for vectors, grad in zip((x, y), grads, strict=True):
            assert grad.isfinite().all(), name
            assert (grad[vectors.eq(0).all(-1)] == 0).all(), name
    for name, (function, _) in SINGLES.items():
        if name != "patch_norm":  # its vectors are patches
            (grad,) = torch.autograd.grad((function(x) * draw(*function(x).shape)).sum(), x)
            assert grad.isfinite().all(), name
            assert (grad[[0, 2]] == 0).all(), name


class Watched(TorchDispatchMode):
    """Someone stands between the operations and the numbers, which are not looked at then."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("dtype", "lost", "kept"), [(torch.float32, 1e-20, 1e-18), (torch.float64, 1e-155, 1e-153)])
def test_where_a_vector_counts_as_zero_unless_it_is_looked_at(dtype, lost, kept):
    x = torch.tensor([[0.6, 0.8]], dtype=dtype)
    tiny = leaf(x * lost)
    assert_close(g.normalise(tiny), x.double(), rtol=1e-5)
    with Watched():
        assert (g.normalise(tiny) == 0).all()
        assert g.cosine(tiny, x).item() == 0
        (grad,) = torch.autograd.grad(g.cosine(tiny, x[:, [1, 0]]).sum(), tiny)
        assert (grad == 0).all()
        assert_close(g.normalise(x * kept), x.double(), rtol=1e-5)
        assert g.cosine(x * kept, x).item() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("name", PAIRS)
def test_float32_takes_every_norm_that_it_has(name):
    """Values and slopes are those of float64 on a processor; elsewhere no direction is 0 in silence."""
    function = PAIRS[name][0]
    lengths = torch.tensor([[1e-37], [1e-25], [1.0], [1e25], [1e37]], dtype=torch.float64)
    x, y = (lengths * draw(5, 4)).float(), (lengths.flip(0) * draw(5, 4)).float()
    near, wanted = (leaf(x), leaf(y)), (leaf(x.double()), leaf(y.double()))
    assert_close(function(*near), function(*wanted), rtol=1e-5, atol=1e-5)
    weights = draw(*function(*near).shape)
    slopes = [torch.autograd.grad((function(*v) * weights).sum(), v) for v in (near, wanted)]
    for found, right, v in zip(*slopes, wanted, strict=True):
        size = v.detach().norm(dim=1, keepdim=True)
        usual = size.squeeze(1) < 1e30  # beyond, slopes are less than the least normal number
        assert_close((found * size)[usual], (right * size)[usual], rtol=1e-4, atol=1e-4)
    with Watched():
        assert function(x[3:4], y[2:3]).isnan().any()
    assert torch.compile(g.normalise, backend="eager")(x)[3].isnan().all()


@pytest.mark.parametrize("norms", [1e-37, 1e25])
def test_norms_of_every_size(norms):
    x = leaf((norms * draw(3, 4)).float())
    assert_close(g.norm(x).double(), x.detach().double().norm(dim=1), rtol=1e-6)
    (slope,) = torch.autograd.grad(g.norm(x).sum(), x)
    assert_close(slope.double(), F.normalize(x.detach().double(), eps=0), rtol=1e-5)


SMOOTH = [*(name for name in PAIRS if name != "slerp"), "norm", "normalise", "self"]


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("name", SMOOTH)
def test_second_derivatives_at_zero_vectors(name, watched):
    """They are finite and 0 there, elsewhere those of plain arithmetic; first ones are the same with and without."""
    y, zero = draw(4, 3), torch.tensor([False, True, False, False])
    function = {**{k: f for k, (f, _) in SINGLES.items()}, "self": lambda x: g.angle(x, x.detach())}.get(name)
    function = function or (lambda x: PAIRS[name][0](x, y))
    x, along = leaf(draw(4, 3).masked_fill(zero[:, None], 0)), draw(4, 3).masked_fill(zero[:, None], 0)
    weights, aside = draw(*function(x).shape), draw(4, 3)

    def total(x):
        return (function(x).square() * weights).sum()

    with Watched() if watched else nullcontext():
        (plain,) = torch.autograd.grad(total(x), x)
        (first,) = torch.autograd.grad(total(x), x, create_graph=True)
        (second,) = torch.autograd.grad((first * aside).sum(), x, retain_graph=True)
        (turned,) = torch.autograd.grad((first * along).sum(), x)
    assert torch.equal(plain, first)
    assert (second[zero] == 0).all()
    step = 1e-6
    near = [torch.autograd.grad(total(v), v)[0] for v in (leaf(x + step * along), leaf(x - step * along))]
    assert_close(turned, (near[0] - near[1]) / (2 * step), rtol=1e-5, atol=1e-6)
    assert_close(torch.func.jvp(torch.func.grad(total), (x.detach(),), (along,))[1], turned, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["norm", "normalise"])
def test_what_is_traced_serves_for_zero_vectors(name):
    function, x = SINGLES[name][0], draw(3, 4)
    traced = torch.jit.trace(function, x)
    x[1] = 0
    assert_close(traced(x), function(x))


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("name", ["norm", "normalise"])
def test_many_gradients_at_a_time(name, watched):
    x = leaf(draw(3, 4).index_fill(0, torch.tensor(1), 0))
    with Watched() if watched else nullcontext():
        y = SINGLES[name][0](x)
        many = draw(5, *y.shape)
        (together,) = torch.autograd.grad(y, x, many, is_grads_batched=True, retain_graph=True)
        alone = [torch.autograd.grad(y, x, one, retain_graph=True)[0] for one in many]
    assert_close(together, torch.stack(alone))


def test_nan_and_infinity_are_not_hidden():
    bad = torch.tensor([[math.nan, 1.0]])
    for function, _ in PAIRS.values():
        assert function(bad, torch.ones(1, 2)).isnan().any()
    assert g.patch_norm(bad.unsqueeze(0), 1).isnan().any()
    assert g.normalise(torch.tensor([math.inf, 1.0])).isnan().any()


# Gradients, types, layouts, sizes.


@pytest.mark.parametrize("name", PAIRS)
def test_pair_gradients(name):
    x, y = leaf(draw(3, 4)), leaf(draw(3, 4))
    assert torch.autograd.gradcheck(PAIRS[name][0], (x, y), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SINGLES)
def test_single_gradients(name):
    assert torch.autograd.gradcheck(SINGLES[name][0], (leaf(draw(3, 4)),), eps=1e-6, atol=1e-6)


def test_more_gradients():
    check = torch.autograd.gradcheck
    assert check(g.arccos, (leaf(torch.linspace(-0.9, 0.9, 7, dtype=torch.float64)),))
    assert check(g.safe_sqrt, (leaf(torch.linspace(0.5, 2, 4, dtype=torch.float64)),))
    assert check(g.slerp, (leaf(draw(2, 3)), leaf(draw(2, 3)), leaf(torch.tensor([0.2, 1.4], dtype=torch.float64))))
    assert check(lambda x, w: g.spherical_mean(x, w, intrinsic_steps=2), (leaf(draw(4, 3)), leaf(draw(4).abs() + 0.1)))
    assert check(lambda x: g.patch_norm(x, (3, 2), 2, 1, (1, 2), groups=2), (leaf(draw(2, 4, 5, 6)),))


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_half_input_gives_float32_measures_and_finite_gradients(dtype, autocast):
    x, y = leaf(draw(4, 6, dtype=dtype)), leaf(draw(4, 6, dtype=dtype))
    calls = [(f, kind, (x, y)) for f, kind in PAIRS.values()] + [(f, kind, (x,)) for f, kind in SINGLES.values()]
    for function, kind, arguments in calls:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = function(*arguments)
        assert result.dtype == (torch.float32 if kind == "measure" else dtype)
        exact = function(*(a.detach().double() for a in arguments))
        assert_close(result, exact, atol=5e-6 if kind == "measure" else 2 * torch.finfo(dtype).eps)
        for grad in torch.autograd.grad(result.float().sum(), arguments):
            assert grad.dtype == dtype
            assert grad.isfinite().all()


def test_autocast_changes_nothing_for_float32():
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    calls = [(f, (x, y)) for f, _ in PAIRS.values()] + [(f, (x,)) for f, _ in SINGLES.values()]
    calls.append((lambda: g.von_mises_fisher(x[0], 3.0, 8, generator=torch.Generator().manual_seed(1)), ()))
    for function, arguments in calls:
        plain = function(*arguments)
        with torch.autocast("cpu", torch.bfloat16):
            cast = function(*arguments)
        assert cast.dtype == torch.float32
        torch.testing.assert_close(cast, plain, atol=1e-7, rtol=1e-6)


def test_full_precision_switches_autocast_off_inside_only():
    a = torch.randn(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with g.full_precision(a):
            assert (a @ a).dtype == torch.float32
        assert (a @ a).dtype == torch.bfloat16
    with g.full_precision(torch.empty(2, device="meta")):
        pass


def test_at_least_float32():
    for dtype, wide in zip(FLOATS, (torch.float32, torch.float32, torch.float32, torch.float64), strict=True):
        assert g.at_least_float32(torch.ones(1, dtype=dtype)).dtype == wide


def test_layout_does_not_matter():
    base, other = draw(8, 10), draw(8, 10)
    x, y = base.T[::2, 1::2], other.T[::2, 1::2]
    assert not x.is_contiguous()
    for function, _ in PAIRS.values():
        assert_close(function(x, y), function(x.contiguous(), y.contiguous()))
    for function, _ in SINGLES.values():
        assert_close(function(x), function(x.contiguous()))


def test_empty_batches_and_single_rows():
    none, one, two = torch.zeros(0, 3), torch.randn(1, 3), torch.randn(2, 3)
    for name, (function, _) in PAIRS.items():
        assert function(none, none).shape[0] == 0, name
        assert function(none, one).shape[0] == 0, name
        x = leaf(none)
        assert torch.autograd.grad(function(x, none).sum(), x)[0].shape == (0, 3)
        torch.testing.assert_close(
            function(one, one * 2), function(one.double(), one.double() * 2).float(), atol=1e-3, rtol=0
        )
    assert g.cosine_matrix(none, two).shape == (0, 2)
    assert g.cosine_matrix(two, none).shape == (2, 0)
    assert g.norm(none).shape == (0,)
    assert g.normalise(none).shape == (0, 3)
    assert g.spherical_mean(none).tolist() == [0, 0, 0]
    assert_close(g.spherical_mean(one, intrinsic_steps=3), g.normalise(one[0]).double(), atol=1e-6)
    assert g.patch_norm(torch.zeros(0, 4, 5, 5), 3, groups=2).shape == (0, 2, 3, 3)
    assert g.uniform_directions(0, 3).shape == (0, 3)
    assert g.von_mises_fisher(torch.ones(3), 1.0, 0).shape == (0, 3)


def test_one_dimension():
    x, y = torch.tensor([[2.0], [-3.0], [4.0]]), torch.tensor([[5.0], [5.0], [-1.0]])
    assert_close(g.normalise(x), [[1], [-1], [1]], atol=1e-7)
    assert g.cosine(x, y).tolist() == [1, -1, -1]
    assert_close(g.angle(x, y), [0, math.pi, math.pi], atol=1e-6)
    assert set(g.uniform_directions(50, 1).flatten().round(decimals=6).tolist()) == {1.0, -1.0}


def _chain(x, y):
    return (
        g.cosine(x, y),
        g.angle(x, y),
        g.angle_matrix(x, y),
        g.slerp(x, y, 0.3),
        g.spherical_mean(x, intrinsic_steps=2),
        g.patch_norm(x.unsqueeze(0), 3, padding=1),
    )


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_as_one_graph_gives_the_same_numbers(backend):
    torch._dynamo.reset()
    x, y = torch.randn(6, 5), torch.randn(6, 5)
    x[2] = 0
    results = []
    for chain in (_chain, torch.compile(_chain, fullgraph=True, backend=backend)):
        a, b = leaf(x), leaf(y)
        values = chain(a, b)
        results.append([*values, *torch.autograd.grad(sum(v.square().sum() for v in values), (a, b))])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, atol=1e-5, rtol=1e-5)


# Norms of patches.


def reference_patch_norm(x, kernel, stride, padding, dilation, groups):
    """Pads and copies out every patch."""
    x = np.pad(x, [(0, 0), (0, 0), *((p, p) for p in padding)])
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    starts = [range(0, size - span + 1, s) for size, span, s in zip(x.shape[2:], spans, stride, strict=True)]
    result = np.zeros((x.shape[0], groups, *map(len, starts)))
    parts = np.split(x, groups, axis=1)
    for place in itertools.product(*(range(len(r)) for r in starts)):
        window = tuple(slice(r[i], r[i] + n, d) for r, i, n, d in zip(starts, place, spans, dilation, strict=True))
        for group, part in enumerate(parts):
            patch = part[(slice(None), slice(None), *window)]
            result[(slice(None), group, *place)] = np.linalg.norm(patch.reshape(len(patch), -1), axis=1)
    return result


@pytest.mark.parametrize("size", [(11,), (7, 10), (5, 6, 7)], ids=str)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("groups", [1, 3])
def test_patch_norm_matches_copied_patches(size, stride, padding, dilation, groups):
    x = draw(2, 6, *size)
    x[1, :, : size[0] // 2 + 2] = 0
    n = len(size)
    expected = reference_patch_norm(x.numpy(), (3, 2, 1)[:n], (stride,) * n, (padding,) * n, (dilation,) * n, groups)
    kernel = (3, 2, 1)[:n]
    assert_close(g.patch_norm(x, kernel, stride, padding, dilation, groups), expected)
    # ... and it has the shape of the convolution's output.
    convolve = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
    weight = draw(groups * 2, 6 // groups, *kernel)
    output = convolve(x, weight, None, stride, padding, dilation, groups)
    assert output.shape[2:] == expected.shape[2:]
    bound = g.norm(weight.flatten(1)).view(1, -1, *[1] * n) * torch.tensor(expected).repeat_interleave(2, 1)
    assert (output.abs() <= bound + 1e-9).all()


def test_patch_norm_with_settings_per_axis_matches_unfold():
    x = draw(2, 4, 9, 8)
    settings = {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0), "dilation": (1, 3)}
    columns = F.unfold(x, **settings).unflatten(1, (2, -1))
    result = g.patch_norm(x, **settings, groups=2)
    assert_close(result.flatten(2), columns.square().sum(2).sqrt())


def test_patch_norm_of_zero_patches_is_zero_with_zero_gradient():
    x = torch.zeros(1, 2, 8, 8)
    x[..., :3] = 1e4 * torch.rand(8, 3)
    x = leaf(x)
    result = g.patch_norm(x, 3, padding=1)
    assert (result[..., 4:] == 0).all()
    result.sum().backward()
    assert x.grad.isfinite().all()
    assert (x.grad[..., 5:] == 0).all()


def test_patch_norm_says_what_is_wrong():
    with pytest.raises(ArgumentError, match=r"x must have shape \(N, C, \*spatial\).*got \(2, 3\)"):
        g.patch_norm(torch.zeros(2, 3), 3)
    for groups in (0, 2):
        with pytest.raises(ArgumentError, match=f"groups must divide the 3 channels of x, got {groups}"):
            g.patch_norm(torch.zeros(1, 3, 4), 3, groups=groups)
    with pytest.raises(ArgumentError, match="kernel_size must have 2 entries"):
        g.patch_norm(torch.zeros(1, 3, 4, 4), (3,))


# Random directions.


def mean_resultant(dim, concentration):
    """Length of the mean of a von Mises-Fisher distribution."""
    if concentration == 0:
        return 0.0
    return scipy.special.ive(dim / 2, concentration) / scipy.special.ive(dim / 2 - 1, concentration)


@pytest.mark.parametrize("dim", [2, 3, 10])
def test_uniform_directions_are_uniform(dim):
    count = 20_000
    x = g.uniform_directions(count, dim, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    assert_close(g.norm(x), torch.ones(count), atol=1e-14)
    beta = scipy.stats.beta((dim - 1) / 2, (dim - 1) / 2)
    for axis in range(min(dim, 3)):
        assert scipy.stats.kstest((x[:, axis].numpy() + 1) / 2, beta.cdf).pvalue > 1e-3
    assert_close(x.T @ x / count, np.eye(dim) / dim, atol=5 / math.sqrt(count) / dim)


def test_uniform_directions_options():
    def make(seed, **options):
        return g.uniform_directions(4, 3, generator=torch.Generator().manual_seed(seed), **options)

    assert torch.equal(make(1), make(1))
    assert not torch.equal(make(1), make(2))
    assert make(1).dtype == torch.float32
    assert make(1, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert g.uniform_directions(4, 3, device="meta").device.type == "meta"
    for argument, call in (("count", (-1, 3)), ("dim", (2, 0))):
        with pytest.raises(ArgumentError, match=f"^{argument} must be at least"):
            g.uniform_directions(*call)


@pytest.mark.parametrize("dim", [2, 3, 10])
@pytest.mark.parametrize("concentration", [0, 1, 50, 1e4])
def test_von_mises_fisher_moments(dim, concentration):
    count = 20_000
    mean = draw(dim) * 7
    x = g.von_mises_fisher(mean, concentration, count, generator=torch.Generator().manual_seed(5))
    assert_close(g.norm(x), torch.ones(count), atol=1e-10)
    mu = mean / mean.norm()
    cosines = x @ mu
    length = mean_resultant(dim, concentration)
    variance = 1 / dim if concentration == 0 else 1 - length**2 - (dim - 1) * length / concentration
    assert cosines.mean().item() == pytest.approx(length, abs=4.5 * math.sqrt(variance / count))
    assert cosines.var().item() == pytest.approx(variance, rel=0.1)
    # Around the mean every tangent direction is as likely.
    tangent = x - cosines.unsqueeze(1) * mu
    spread = (1 - length**2 - variance) / (dim - 1)
    assert g.norm(tangent.mean(0)).item() < 4.5 * math.sqrt(spread * (dim - 1) / count)
    projector = torch.eye(dim, dtype=torch.float64) - torch.outer(mu, mu)
    assert_close(tangent.T @ tangent / count, spread * projector, atol=0.05 * spread + 4 * spread / math.sqrt(count))


@pytest.mark.parametrize("concentration", [1, 50, 1e4, 1e12])
def test_von_mises_fisher_on_the_ordinary_sphere_has_the_exact_distribution(concentration):
    mean = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    x = g.von_mises_fisher(mean, concentration, 20_000, generator=torch.Generator().manual_seed(7))
    gap = 1 - x[:, 2].numpy()  # exponential, cut off at 2
    exact = scipy.stats.truncexpon(b=2 * concentration, scale=1 / concentration)
    assert scipy.stats.kstest(gap, exact.cdf).pvalue > 1e-3


@pytest.mark.parametrize("dim", [2, 3, 10])
@pytest.mark.parametrize("concentration", [1, 50])
def test_von_mises_fisher_against_scipy(dim, concentration):
    mean = np.ones(dim) / math.sqrt(dim)
    theirs = scipy.stats.vonmises_fisher(mean, concentration).rvs(5000, random_state=11)
    ours = g.von_mises_fisher(torch.tensor(mean), concentration, 5000, generator=torch.Generator().manual_seed(11))
    for axis in (mean, np.eye(dim)[0]):
        assert scipy.stats.ks_2samp(theirs @ axis, ours.numpy() @ axis).pvalue > 1e-3


def test_von_mises_fisher_options():
    def make(seed, dtype=torch.float32):
        mean = torch.tensor([1.0, 2.0, 3.0], dtype=dtype)
        return g.von_mises_fisher(mean, 2.0, 5, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(make(1), make(1))
    assert not torch.equal(make(1), make(2))
    assert make(1, torch.float16).dtype == torch.float16
    bad = [
        ("concentration", (torch.ones(3), -1.0, 2)),
        ("concentration", (torch.ones(3), math.nan, 2)),
        ("concentration", (torch.ones(3), math.inf, 2)),
        ("count", (torch.ones(3), 1.0, -2)),
        ("mean", (torch.ones(1), 1.0, 2)),
        ("mean", (torch.ones(2, 3), 1.0, 2)),
        ("mean", (torch.zeros(3), 1.0, 2)),
    ]
    for argument, call in bad:
        with pytest.raises(ArgumentError, match=f"^{argument} must "):
            g.von_mises_fisher(*call)


# Means and arcs.


def test_spherical_mean_is_the_direction_of_the_sum():
    x = draw(3, 5, 4)
    for batch, rows in enumerate(x.tolist()):
        total = np.sum([reference_unit(row) for row in rows], axis=0)
        assert_close(g.spherical_mean(x)[batch], reference_unit(total.tolist()))


def test_integer_weights_repeat_points():
    x, counts = draw(4, 3), torch.tensor([3, 0, 1, 2])
    repeated = x.repeat_interleave(counts, 0)
    for steps in (0, 4):
        weighted = g.spherical_mean(x, counts, intrinsic_steps=steps)
        assert_close(weighted, g.spherical_mean(repeated, intrinsic_steps=steps))
        assert_close(g.spherical_mean(x, 10.0 * counts, intrinsic_steps=steps), weighted)


def test_frechet_mean_on_a_circle_is_the_mean_angle():
    angles = torch.tensor([0.1, 0.3, 1.4], dtype=torch.float64)
    weights = torch.tensor([1.0, 1.0, 4.0], dtype=torch.float64)
    x = on_circle(angles) * torch.tensor([[2.0], [0.1], [30.0]])
    assert_close(g.spherical_mean(x, intrinsic_steps=1), on_circle(angles.mean()))
    exact = on_circle((angles * weights).sum() / 6)
    assert_close(g.spherical_mean(x, weights, intrinsic_steps=1), exact)
    assert (g.spherical_mean(x, weights) - exact).norm() > 1e-3, "the plain mean is another point"


@pytest.mark.parametrize("dim", [3, 8])
def test_frechet_mean_has_balanced_logarithms(dim):
    side, arc = draw(20, dim), torch.rand(20, 1, dtype=torch.float64) * math.radians(50)
    side[:, 0] = 0
    x = arc.cos() * torch.eye(dim, dtype=torch.float64)[0] + arc.sin() * g.normalise(side)
    weights = torch.rand(20, dtype=torch.float64)
    mean = g.spherical_mean(x, weights, intrinsic_steps=40).numpy()
    assert np.linalg.norm(mean) == pytest.approx(1, abs=1e-14)
    assert np.linalg.norm(weights.numpy() @ log_map(mean, x.numpy())) < 1e-12
    plain = g.spherical_mean(x, weights).numpy()
    assert np.linalg.norm(weights.numpy() @ log_map(plain, x.numpy())) > 1e-3
    ten = g.spherical_mean(x.float(), weights, intrinsic_steps=10)
    assert_close(ten, mean, atol=1e-6)


def test_means_without_a_direction_are_zero():
    opposite = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    for steps in (0, 3):
        assert g.spherical_mean(opposite, intrinsic_steps=steps).tolist() == [0, 0]
        assert g.spherical_mean(opposite, torch.zeros(2), intrinsic_steps=steps).tolist() == [0, 0]
    with pytest.raises(ArgumentError, match="intrinsic_steps must be at least 0"):
        g.spherical_mean(opposite, intrinsic_steps=-1)


@pytest.mark.parametrize("t", [-1.0, 0.0, 0.25, 0.5, 1.0, 2.5])
def test_slerp_on_a_circle_adds_angles(t):
    start, end = 0.4, 2.9
    assert_close(g.slerp(3 * on_circle(start), 0.1 * on_circle(end), t), on_circle(start + t * (end - start)))


def test_slerp_ends_and_speed():
    x, y = draw(6, 5), draw(6, 5)
    assert_close(g.slerp(x, y, 0), g.normalise(x))
    assert_close(g.slerp(x, y, 1), g.normalise(y))
    assert_close(g.slerp(x, x, 0.4), g.normalise(x))
    for t in (0.1, 0.35, 0.8):
        point = g.slerp(x, y, t)
        assert_close(g.norm(point), torch.ones(6))
        assert_close(g.angle(x, point), t * g.angle(x, y))
        assert_close(g.angle(point, y), (1 - t) * g.angle(x, y))
        assert_close(g.slerp(y, x, 1 - t), point)


def test_slerp_fraction_as_a_tensor():
    x, y, t = draw(3, 4), draw(3, 4), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    rows = torch.stack([g.slerp(x[i], y[i], t[i].item()) for i in range(3)])
    assert_close(g.slerp(x, y, t), rows)
    assert g.slerp(x[0], y[0], t).shape == (3, 4)
    assert g.slerp(x.float(), y.float(), t).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [2, 3, 17])
def test_slerp_between_opposite_points_stays_on_the_sphere(dtype, dim):
    x = draw(50, dim, dtype=dtype)
    x[0] = torch.eye(dim, dtype=dtype)[0]
    eps = torch.finfo(dtype).eps
    for t in (0.25, 0.5):
        point = g.slerp(x, -3 * x, t)
        assert_close(g.norm(point), torch.ones(50), atol=8 * eps)
        assert_close(g.angle(x, point), np.full(50, t * math.pi), atol=20 * eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("multiple", [5, 12, 100, 1e4])
def test_slerp_next_to_opposite_points_stays_on_the_sphere(dtype, multiple):
    eps = torch.finfo(dtype).eps
    u = g.normalise(draw(50, 8))
    side = draw(50, 8)
    side = g.normalise(side - (side * u).sum(-1, keepdim=True) * u)
    y = (-math.cos(multiple * eps) * u + math.sin(multiple * eps) * side).to(dtype)
    point = g.slerp(u.to(dtype), y, 0.25)
    assert_close(g.norm(point), torch.ones(50), atol=8 * eps)
    assert_close(g.slerp(u.to(dtype), y, 1.0), y.double(), atol=20 * eps)


# Properties.

seeds = st.integers(0, 2**32 - 1)
dims = st.integers(2, 40)
exponents = st.floats(-10, 10)


def vectors(seed, count, dim, dtype=torch.float64):
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@given(seeds, dims)
def test_turning_everything_changes_no_cosine_and_turns_every_point(seed, dim):
    x, y, turn = vectors(seed, 4, dim), vectors(seed + 1, 4, dim), rotation(dim, seed)
    for function in (g.cosine, g.angle, g.cosine_matrix, g.angle_matrix):
        assert_close(function(x @ turn, y @ turn), function(x, y), atol=1e-10)
    for t in (-0.4, 0.7):
        assert_close(g.slerp(x @ turn, y @ turn, t), g.slerp(x, y, t) @ turn, atol=1e-9)
    assert_close(g.spherical_mean(x @ turn), g.spherical_mean(x) @ turn, atol=1e-9)


@given(seeds, dims, exponents, exponents, st.sampled_from([torch.float32, torch.float64]))
def test_lengths_do_not_matter(seed, dim, first, second, dtype):
    x, y = vectors(seed, 4, dim, dtype), vectors(seed + 1, 4, dim, dtype)
    tolerance = 500 * torch.finfo(dtype).eps
    for function in (g.cosine, g.angle, g.cosine_matrix, lambda a, b: g.slerp(a, b, 0.3)):
        assert_close(function(x * 10**first, y * 10**second), function(x, y).double(), atol=tolerance)
    assert_close(g.norm(x * 10**first), g.norm(x).double() * 10**first, rtol=tolerance)
    assert_close(g.normalise(x * 10**first), g.normalise(x).double(), atol=tolerance)


@given(seeds, dims)
def test_arcs_are_a_metric(seed, dim):
    x, y, z = vectors(seed, 3, dim)
    a, b, c = g.angle(x, y), g.angle(y, z), g.angle(x, z)
    assert c <= a + b + 1e-14
    assert abs(a - b) <= c + 1e-14
    assert a + b + c <= 2 * math.pi + 1e-14
    assert g.angle(y, x) == a
    assert g.angle(x, x) == 0
    assert_close(g.angle(x, -y), math.pi - a, atol=1e-14)
    assert 0 <= a <= math.pi


@given(seeds, dims, st.floats(0, 1e-6), st.sampled_from([1.0, -1.0]), st.sampled_from(FLOATS))
def test_cosines_stay_in_their_range(seed, dim, offset, sign, dtype):
    x = vectors(seed, 5, dim, dtype)
    y = (sign * (x.double() + offset * vectors(seed + 1, 5, dim))).to(dtype)
    for values in (g.cosine(x, y), g.cosine_matrix(x, y), g.cosine_matrix(x, x)):
        assert values.abs().max() <= 1
    for values in (g.angle(x, y), g.angle_matrix(x, y)):
        assert values.min() >= 0
        assert values.max() <= float(np.float32(math.pi))


@given(seeds, dims)
def test_the_two_ways_to_an_angle_agree(seed, dim):
    x, y = vectors(seed, 4, dim), vectors(seed + 1, 4, dim)
    assert_close(g.angle_matrix(x, y).diagonal(), g.angle(x, y), atol=1e-9)
    assert_close(g.angle(x, y).cos(), g.cosine(x, y), atol=1e-14)
