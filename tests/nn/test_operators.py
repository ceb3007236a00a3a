"""Decoupled operators as pure functions: published vectors, plain float64 formulas, and what geometry demands."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hypersphere as hs
from helpers import decoupled_reference as ref
from helpers.decoupled_reference import ANGULARS, BOUNDED, ODD, OPERATORS, RADIAL, WEIGHTINGS
from hypersphere.errors import ArgumentError, HypersphereError
from hypersphere.nn.operators import Ball, RadiusOperator, Tanh

LOW = (torch.float16, torch.bfloat16)
FLOATS = (*LOW, torch.float32, torch.float64)

by_operator = pytest.mark.parametrize("name", OPERATORS)
by_angular = pytest.mark.parametrize("g", ANGULARS)
by_weighting = pytest.mark.parametrize("weighting", WEIGHTINGS)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


W0, X0, X1 = tensor(1, -2, 2), tensor(2, 1, 2), tensor(0.1, -0.2, 0.4)


def make(name, g="cosine", **options):
    return hs.nn.operators.create(name, angular=g, **options)


def exact(name, g="cosine", **options):
    return make(name, g, eps=0.0, **options)


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def leaf(x):
    return torch.as_tensor(x, dtype=torch.float64).detach().clone().requires_grad_()


def in_plane(theta):
    """Two vectors of different lengths with this angle between them."""
    theta = torch.as_tensor(theta, dtype=torch.float64)
    return tensor(2, 0), 3 * torch.stack([theta.cos(), theta.sin()], -1)


def agree(actual, expected, atol=1e-11, rtol=1e-10):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.detach().double(), expected, atol=atol, rtol=rtol)


def largest(name, weighting, w, x, eps=0.0, radius=1.0, alpha=1.0):
    """H, which the response reaches where the angle is zero."""
    wn, xn = ((v.detach().square().sum(-1) + eps).sqrt() for v in (w, x))

    def h(t):
        return ref.magnitude(name, t, radius, alpha)

    return {"none": h(xn), "linear": wn * h(xn), "joint": h(wn * xn), "separate": h(wn) * h(xn) / alpha}[weighting]


def finite(*tensors):
    return all(bool(t.isfinite().all()) for t in tensors)


# Published vectors. Twelve digits are printed, so 1e-10 relative and half a unit of the last digit are the tolerance.


def test_norms_and_angles_of_the_vectors():
    for x, length, c, theta in (
        (X0, 3, 0.444444444444, 1.11024233511),
        (X1, 0.458257569496, 0.945610857689, 0.331328991736),
    ):
        agree(hs.geometry.norm(x), length)
        agree(exact("sphere")(W0, x), c)
        agree(exact("sphere", "linear")(W0, x), 1 - 2 * theta / math.pi)
    agree(hs.geometry.norm(W0), 3)


VALUES = {  # x0 then x1: linear, cosine, sigmoid, sqcos
    "sphere": (
        (0.293197777347, 0.444444444444, 0.652433057976, 0.197530864198),
        (0.789069412702, 0.945610857689, 0.978753731904, 0.89417989418),
    ),
    "ball": (
        (0.293197777347, 0.444444444444, 0.652433057976, 0.197530864198),
        (0.361597031228, 0.433333333333, 0.448521306317, 0.409764704999),
    ),
    "tanh": (
        (0.29174784212, 0.442246557194, 0.649206615802, 0.19655402542),
        (0.338244876577, 0.40534840497, 0.419555529486, 0.383301852886),
    ),
    "linear": (
        (0.879593332041, 1.33333333333, 1.95729917393, 0.592592592593),
        (0.361597031228, 0.433333333333, 0.448521306317, 0.409764704999),
    ),
    "seg": (
        (0.586395554694, 0.888888888889, 1.30486611595, 0.395061728395),
        (0.361597031228, 0.433333333333, 0.448521306317, 0.409764704999),
    ),
    "log": (
        (0.406458425429, 0.616130827164, 0.904464269281, 0.273835923184),
        (0.297670342311, 0.356724393532, 0.369227286882, 0.337322459727),
    ),
    "mix": (
        (1.28605175747, 1.9494641605, 2.86176344321, 0.866428515777),
        (0.659267373539, 0.790057726866, 0.817748593199, 0.747087164726),
    ),
}


@by_operator
def test_values_of_every_operator_and_angular_function(name):
    for x, expected in zip((X0, X1), VALUES[name], strict=True):
        for g, value in zip(("linear", "cosine", "sigmoid", "sqcos"), expected, strict=True):
            agree(exact(name, g)(W0, x), value)
            agree(ref.pair(W0, x, name, g, eps=0), value)


@pytest.mark.parametrize(
    ("name", "at_x0", "at_x1"),
    [
        ("ball", 0.444444444444, 0.216666666667),
        ("tanh", 0.402288112731, 0.212952968216),
        ("seg", 1.11111111111, 0.433333333333),
    ],
)
def test_values_with_a_radius(name, at_x0, at_x1):
    radius = tensor(0.8) * 2.5
    agree(exact(name)(W0, X0, radius=radius), [at_x0])
    agree(exact(name)(W0, X1, radius=radius), [at_x1])


@pytest.mark.parametrize(
    ("weighting", "cosine", "linear"),
    [
        ("none", 0.603432169097, 0.398081184207),
        ("linear", 1.81029650729, 1.19424355262),
        ("joint", 0.666502140565, 0.439688128974),
        ("separate", 0.546195574051, 0.360322488694),
    ],
)
def test_values_of_the_weighted_tanh(weighting, cosine, linear):
    for g, value in (("cosine", cosine), ("linear", linear)):
        op = exact("tanh", g, weighting=weighting, alpha=1.5)
        agree(op(W0, X0, radius=tensor(2.0)), [value])


@pytest.mark.parametrize(
    ("name", "g", "x", "expected"),
    [
        (
            "tanh",
            "sigmoid",
            X0,
            (
                (0.066162599774, -0.216458814232, 0.165978645422),
                (0.155269404341, 0.188541419556, 0.110906717386),
                -0.190633597046,
                -1.13616085526,
            ),
        ),
        (
            "seg",
            "sqcos",
            X0,
            (
                (0.096570644719, -0.643072702332, 0.373113854595),
                (0.430178326475, 0.522359396433, 0.307270233196),
                0.197530864198,
                None,
            ),
        ),
        (
            "ball",
            "linear",
            X0,
            (
                (0.008773662722, -0.193020579889, 0.087736627222),
                (0.122831278111, 0.149152266278, 0.087736627222),
                0.0,
                None,
            ),
        ),
        (
            "ball",
            "linear",
            X1,
            (
                (0.161807682849, -0.323615365698, 0.145429849543),
                (-0.011151130708, 0.022302261416, 0.02787782677),
                -0.106981370186,
                None,
            ),
        ),
    ],
)
def test_gradients_at_the_vectors(name, g, x, expected):
    w, x, rho, k = leaf(W0), leaf(x), leaf(1.3), leaf(0.3)
    value = exact(name, g)(w, x, radius=2 * rho, k=k if expected[3] is not None else None)
    for point, wanted in zip((x, w, rho, k), expected, strict=True):
        if wanted is not None:
            (grad,) = torch.autograd.grad(value, point, retain_graph=True, materialize_grads=True)
            agree(grad, wanted)


def test_gradient_of_the_sphere_and_its_weighted_form():
    w = leaf(W0)
    (grad,) = torch.autograd.grad(exact("sphere")(w, X0), w)
    agree(grad, [0.172839506173, 0.20987654321, 0.123456790123])
    (grad,) = torch.autograd.grad(exact("sphere", weighted_gradients=True)(w, X0), w)
    agree(grad, [0.518518518519, 0.62962962963, 0.37037037037])


THETAS = (0, math.pi / 6, 1, math.pi / 2, 2, 3, math.pi)
CURVES = {  # angular function, k: g, dg/dtheta, dg/dk at these angles
    ("linear", None): (
        (1, 0.666666666667, 0.363380227632, 0, -0.273239544735, -0.909859317103, -1),
        (-0.636619772368,) * 7,
        None,
    ),
    ("cosine", None): (
        (1, 0.866025403784, 0.540302305868, 0, -0.416146836547, -0.9899924966, -1),
        (0, -0.5, -0.841470984808, -1, -0.909297426826, -0.14112000806, 0),
        None,
    ),
    ("sigmoid", 0.1): (
        (1, 0.999943664872, 0.993383410791, 0, -0.9730152874, -0.999999059531, -1),
        (None, -0.000566349276201, -0.065949989989, -5.00000150702, -0.266209186228, -1.24187218303e-05, None),
        (0, -0.00588345407473, -0.376393089293, 0, 1.14253353893, 0.00013014452908, 0),
    ),
    ("sigmoid", 0.3): (
        (1, 0.950908680127, 0.748305472917, 0, -0.620584147438, -0.993600758498, -1),
        (None, -0.193409368787, -0.761111971913, -1.68450012015, -1.04942103869, -0.0565155601627, None),
        (0, -0.498482467181, -1.3091256359, 0, 1.38610301363, 0.0846666239359, 0),
    ),
    ("sigmoid", 0.5): (
        (1, 0.85123747168, 0.562549801315, 0, -0.441208702484, -0.972034041299, -1),
        (None, -0.425758028668, -0.800087292429, -1.09033141073, -0.911793842028, -0.223759863629, None),
        (0, -0.428582880073, -0.607313993604, 0, 0.542647359635, 0.110753834698, 0),
    ),
    ("sigmoid", 0.7): (
        (1, 0.784340706247, 0.478220786913, 0, -0.367847285688, -0.952928590743, -1),
        (None, -0.528561734337, -0.751697172695, -0.883729816618, -0.805610302747, -0.359471733654, None),
        (0, -0.251446228716, -0.284146544361, 0, 0.241041828403, 0.078746116632, 0),
    ),
    ("sigmoid", 2.0): ((None, None, 0.379299161351), (), (None, None, -0.0156299425883)),
}


@pytest.mark.parametrize(("g", "k"), CURVES)
def test_curves_over_the_angle(g, k):
    values, slopes, by_k = CURVES[g, k]
    op = exact("sphere", g, k=k)
    for i, theta in enumerate(THETAS):
        angle, shape = leaf(theta), leaf(k or 0.3)
        w, x = in_plane(angle)
        out = op(w, x, k=shape if k else None)
        assert finite(out)
        if i < len(values) and values[i] is not None:
            agree(out, values[i], atol=1e-9)
        if k and i < len(by_k) and by_k[i] is not None:
            agree(torch.autograd.grad(out, shape, retain_graph=True)[0], by_k[i], atol=1e-9)
        if 0 < i < 6 and i < len(slopes):  # at 0 and pi the direction of the gradient is not defined
            agree(torch.autograd.grad(out, angle)[0], slopes[i], atol=1e-9)


def test_small_norms_with_eps():
    agree(make("tanh")(W0, X1), 0.405333858114)
    agree(make("tanh")(W0, 0.01 * X1), 0.00433313449111)
    agree(make("sphere")(W0, 0.01 * X1), 0.393937205405)
    agree(exact("sphere")(W0, 0.01 * X1), 0.945610857689)


def test_slopes_by_the_radius():
    t, one = tensor(30.0), tensor(1.0)
    agree(make("tanh").radius_slope(t, one), [-1.050781e-24], atol=0, rtol=1e-6)
    agree(30 * make("tanh").radius_slope(t, 30 * one), [-0.419974341614])
    agree(30 * make("seg").radius_slope(tensor(40.0), 30 * one), [15])


def test_where_the_operators_move_a_point():
    third = tensor(2, 1, 2) / 3
    for name, length in {
        "sphere": 1,
        "ball": 1,
        "tanh": 0.995054753686,
        "linear": 3,
        "seg": 2,
        "log": 1.38629436112,
        "mix": 4.38629436112,
    }.items():
        op = exact(name)
        agree(op.phi(X0, tensor(1.0)), length * third, atol=1e-11)
        agree(op(W0, X0, radius=tensor(1.0)).reshape(()), (op.phi(X0, tensor(1.0)) * W0).sum() / 3)
    agree(exact("tanh").phi(X0, tensor(1.0)), [0.663369835791, 0.331684917896, 0.663369835791])
    agree(exact("log").phi(X0, tensor(1.0)), [0.924196240747, 0.462098120373, 0.924196240747])
    agree(exact("mix").phi(X0, tensor(1.0)), [2.924196240747, 1.462098120373, 2.924196240747])


@pytest.mark.parametrize(
    ("g", "value", "with_eps", "by_w", "by_x"),
    [
        (
            "linear",
            0.130641686732,
            0.130637301665,
            (0.017202658378, 0.0716002537894, -0.137156330311, 0.0648586714521),
            (0.116825665764, -0.296376521199, 0.144659968681, 0.342636348582),
        ),
        (
            "cosine",
            0.203774208779,
            0.203767465252,
            (0.0264548972801, 0.110109572463, -0.210924181017, 0.0997421127183),
            (0.179658917799, -0.455778999518, 0.222463559289, 0.526919107908),
        ),
        (
            "sigmoid",
            0.332802109161,
            0.332791764245,
            (0.0405830421969, 0.168913202657, -0.323567498597, 0.153009037472),
            (0.27560513144, -0.699186172377, 0.341269441279, 0.808318405632),
        ),
    ],
)
def test_one_pair_on_the_sphere(g, value, with_eps, by_w, by_x):
    w, x = leaf((1, -2, 0.5, 3)), leaf((0.2, 0.4, -1, 0.7))
    out = exact("sphere", g)(w, x)
    agree(out, value)
    agree(make("sphere", g)(w, x), with_eps)
    for grad, wanted in zip(torch.autograd.grad(out, (w, x)), (by_w, by_x), strict=True):
        agree(grad, wanted, atol=1e-9)
    agree(make("sphere")(w, 0.01 * x), 0.161515759518)


# Magnitudes.


@by_operator
@pytest.mark.parametrize("alpha", [1.0, 1.7])
def test_magnitudes_and_their_slopes(name, alpha):
    op = make(name, alpha=alpha)
    assert op.has_radius is (name in RADIAL)
    assert op.bounded is (name in BOUNDED)
    t = tensor(0, 0.01, 0.5, 1.29, 1.31, 4, 30).requires_grad_()
    radius = leaf(1.3)
    expected = ref.magnitude(name, t, radius, alpha)
    agree(op.magnitude(t, radius), expected.detach())
    by_t, by_radius = torch.autograd.grad((expected + 0 * t).sum(), (t, radius), materialize_grads=True)
    for own in (radius.detach(), 1.3):
        slope = op.magnitude_slope(t.detach(), own)
        assert slope.dtype == torch.float64
        agree(slope.expand_as(t), by_t)
    if op.has_radius:
        agree(op.radius_slope(t.detach(), radius.detach()).sum(), by_radius)
        points = (t[1:].detach().requires_grad_(), radius)
        assert torch.autograd.gradcheck(op.magnitude, points)


@by_operator
@pytest.mark.parametrize("alpha", [1.0, 2.5])
def test_slopes_of_the_divisor(name, alpha):
    """Those of t / h by automatic differentiation, over seven orders of magnitude and beyond what exp can hold."""
    op = make(name, alpha=alpha)
    t, radius = leaf(tensor(1e-4, 0.01, 0.3, 0.999, 1.7, 20.0, 900.0)), leaf(1.0)
    wanted = torch.autograd.grad((t / op.magnitude(t, radius.expand(7))).sum(), (t, radius), allow_unused=True)
    by_norm, by_radius = op.divisor_slopes(t.detach(), radius.detach())
    # Where t / h hardly bends, its slope is a small difference.
    agree(by_norm, wanted[0], atol=1e-11, rtol=1e-9)
    agree(by_radius.sum(), 0.0 if wanted[1] is None else wanted[1], atol=1e-12, rtol=1e-9)
    single = op.divisor_slopes(t.detach().float(), radius.detach().float())
    assert all(bool(part.isfinite().all()) for part in single)
    agree(single[0].double(), by_norm, atol=2e-3, rtol=1e-5)
    agree(single[1].double(), by_radius, atol=1e-6, rtol=1e-5)
    faint, long = torch.tensor([1e-18, 1e-10, 1.0]), torch.tensor([1e10, 1e18, 1e21]).unsqueeze(1)
    assert all(bool(part.isfinite().all()) for part in op.divisor_slopes(faint, long))


class Root(hs.nn.Operator):
    def magnitude(self, t, radius=1.0):
        return t.sqrt()


class Squared(Tanh):
    def magnitude(self, t, radius=1.0):
        return (t / radius).tanh().square()


class SquaredWithSlopes(Squared):
    def magnitude(self, t, radius=1.0):
        return super().magnitude(t, radius)

    def magnitude_slope(self, t, radius=1.0):
        return 2 * (t / radius).tanh() * (1 - (t / radius).tanh().square()) / radius

    def radius_slope(self, t, radius=1.0):
        return -t / radius * self.magnitude_slope(t, radius)


class WithoutRadiusSlope(RadiusOperator):
    def magnitude(self, t, radius=1.0):
        return t / (t + radius)

    def magnitude_slope(self, t, radius=1.0):
        return radius / (t + radius).square()


class Mixin:
    def magnitude(self, t, radius=1.0):
        return t / (t + radius)


class Mixed(Mixin, Ball):
    pass


@pytest.mark.parametrize("kind", [Root, Squared, SquaredWithSlopes, WithoutRadiusSlope, Mixed])
def test_operators_of_ones_own(kind):
    """One with h alone is left to autograd, and one that changes h does not keep slopes of another."""
    assert kind.knows_slopes == (kind is SquaredWithSlopes)
    op = kind(eps=0.0, **({"mean_norm": False} if kind.has_radius else {}))
    layer = hs.nn.DecoupledLinear(3, 2, operator=op).double()
    x = draw(4, 3).requires_grad_()
    leaves = [x, *layer.parameters()]
    found = torch.autograd.grad(layer(x).square().sum(), leaves)
    products = x @ (layer.weight / layer.weight.norm(dim=1, keepdim=True)).T
    t = x.norm(dim=1, keepdim=True)
    by_formula = products / t * op.magnitude(t, layer.radius if kind.has_radius else 1.0)
    for a, b in zip(found, torch.autograd.grad(by_formula.square().sum(), leaves), strict=True):
        agree(a, b)


def test_parts_of_a_mix_have_factors_of_their_own():
    with pytest.raises(ArgumentError, match="leave out alpha=3"):
        make("mix", alpha=3.0, parts=((1.0, "linear"),))


@by_operator
def test_magnitudes_grow_from_zero(name):
    op = make(name)
    h = op.magnitude(torch.linspace(0, 5, 201, dtype=torch.float64), tensor(0.7))
    assert bool((h >= 0).all())
    assert bool((h.diff() >= 0).all())
    agree(h[0], 1.0 if name == "sphere" else 0.0)
    if op.bounded:
        assert float(h.max()) <= 1


def test_magnitudes_reduce_to_each_other():
    t, radius, a = torch.linspace(0, 5, 101, dtype=torch.float64), tensor(1.6), 0.8

    def h(name, r=radius, **options):
        return make(name, **options).magnitude(t, r)

    agree(h("seg", alpha=a, beta=a), h("linear", alpha=a))
    agree(h("seg", alpha=a / 1.6, beta=0.0), h("ball", alpha=a))
    agree(h("mix", alpha=a, beta=0.0), h("linear", alpha=a))
    agree(h("mix", alpha=0.3, beta=a), h("linear", alpha=0.3) + h("log", alpha=a))
    assert bool((h("tanh") <= h("ball") + 1e-15).all())
    for name in ("ball", "tanh"):
        agree(h(name, tensor(1e-4))[1:], h("sphere")[1:])
        agree(1e7 * h(name, tensor(1e7)), t, rtol=1e-9)
    base = 10.0
    agree(h("log", alpha=1 / math.log(base)), torch.log10(1 + t))


@by_operator
def test_lipschitz_constants(name):
    """The map behind the cosine stretches no distance by more than its constant, and reaches it."""
    if name == "sphere":
        return
    radius = 0.6
    op = exact(name, alpha=1.2, **({"beta": 0.5} if name in ("seg", "mix") else {}))
    constant = {"ball": 1.2 / radius, "tanh": 1.2 / radius, "mix": 1.7}.get(name, 1.2)
    lengths = torch.logspace(-3, 1, 40, dtype=torch.float64)
    x = torch.nn.functional.normalize(draw(40, 3), dim=1) * lengths[:, None]
    moved = op.phi(x, tensor(radius))
    stretch = torch.pdist(moved) / torch.pdist(x)
    assert float(stretch.max()) <= constant * (1 + 1e-9)
    small = tensor(1e-6, 0, 0)
    assert float((op.phi(small, tensor(radius)) - op.phi(-small, tensor(radius))).norm()) >= 0.999 * constant * 2e-6


def test_the_sphere_has_no_lipschitz_constant():
    step = tensor(1e-12, 0, 0)
    agree(exact("sphere").phi(step, None) - exact("sphere").phi(-step, None), [2, 0, 0])


# Against the formula written out, in every combination.


@by_weighting
@by_angular
@by_operator
def test_matches_the_formula_and_its_gradients(name, g, weighting):
    options = {"alpha": 0.8, **({"beta": 0.3} if name in ("seg", "mix") else {})}
    op = make(name, g, weighting=weighting, **options)
    radius, k = leaf(tensor(0.9, 1.4, 2.2)), leaf(tensor(0.2, 0.5, 0.9))
    w, x = leaf(draw(3, 4)), leaf(draw(6, 4))
    actual = op(w, x[:, None], radius=radius if op.has_radius else None, k=k if g == "sigmoid" else None)
    expected = ref.respond(x[None, None], w[None], name, g, weighting=weighting, k=k, rho=radius, mean=None, **options)[
        0
    ].T
    agree(actual, expected)
    upstream = draw(*actual.shape)
    points = (w, x, radius, k)
    wanted = torch.autograd.grad(expected, points, upstream, materialize_grads=True)
    found = torch.autograd.grad(actual, points, upstream, materialize_grads=True)
    for a, b in zip(found, wanted, strict=True):
        agree(a, b)


@pytest.mark.parametrize(("name", "g"), [("sphere", "cosine"), ("tanh", "sigmoid"), ("log", "linear")])
def test_second_derivatives(name, g):
    op = make(name, g)

    def f(w, x, radius, k):
        return op(w, x, radius=radius if op.has_radius else None, k=k if g == "sigmoid" else None)

    assert torch.autograd.gradgradcheck(f, (leaf(W0), leaf(X0), leaf([1.3]), leaf([0.4])))


def test_function_transforms():
    op = make("tanh", "sigmoid")
    w, x = draw(5, 4), draw(5, 4)
    by_sample = torch.func.vmap(torch.func.grad(op))(w, x)
    rows = [leaf(row) for row in w]
    for row, point, found in zip(rows, x, by_sample, strict=True):
        agree(found, torch.autograd.grad(op(row, point), row)[0])
    jacobian = torch.func.jacrev(lambda x: make("log")(w, x))(x)
    agree(jacobian, torch.func.jacfwd(lambda x: make("log")(w, x))(x))


def test_broadcasting_and_scalars():
    op = exact("ball", "linear")
    w, x = draw(5, 1, 4), draw(1, 3, 4)
    table = op(w, x, radius=tensor(1.0))
    assert table.shape == (5, 3)
    agree(table[2, 1], op(w[2, 0], x[0, 1], radius=torch.tensor(1.0).double()))
    assert op(w[2, 0], x[0, 1]).shape == ()
    agree(op(w, x), table)  # a radius of 1 where none is given


# Invariants.

vectors = st.integers(0, 10**6)


def some(seed, dim=5):
    """Two vectors of lengths between 0.03 and 30, a radius and a k."""
    generator = torch.Generator().manual_seed(seed)
    w, x = torch.randn(2, dim, dtype=torch.float64, generator=generator)
    lengths = 10 ** (3 * torch.rand(4, dtype=torch.float64, generator=generator) - 1.5)
    return w / w.norm() * lengths[0], x / x.norm() * lengths[1], lengths[2:3], (0.05 + lengths[3:4].clamp(max=2))


combinations = st.sampled_from(list(itertools.product(OPERATORS, ANGULARS, WEIGHTINGS)))


@given(vectors, combinations)
def test_bounds(seed, combination):
    name, g, weighting = combination
    w, x, radius, k = some(seed)
    op = exact(name, g, weighting=weighting, alpha=0.9)
    f = op(w, x, radius=radius if op.has_radius else None, k=k if g == "sigmoid" else None).abs()
    assert bool((f <= largest(name, weighting, w, x, radius=radius, alpha=0.9) * (1 + 1e-12)).all())
    if name in BOUNDED and weighting in ("none", "joint", "separate"):
        assert bool((f <= 0.9 * (1 + 1e-12)).all())


@given(vectors, st.sampled_from(list(itertools.product(OPERATORS, ANGULARS))), st.floats(0.01, 100))
def test_kernel_scale(seed, combination, s):
    name, g = combination
    w, x, radius, k = some(seed)
    op = exact(name, g)

    def grad_and_value(w):
        w = leaf(w)
        value = op(w, x, radius=radius if op.has_radius else None, k=k if g == "sigmoid" else None)
        return torch.autograd.grad(value.sum(), w)[0], value

    grad, value = grad_and_value(w)
    scaled_grad, scaled_value = grad_and_value(s * w)
    agree(scaled_value, value)
    agree(s * scaled_grad, grad, atol=1e-9 * float(grad.norm()) + 1e-12, rtol=1e-7)
    assert abs(float(grad @ w)) <= 1e-11 * max(1.0, float(op.magnitude(x.norm(), radius)) * 50)
    weighted = exact(name, g, weighted_gradients=True)
    point = leaf(w)
    out = weighted(point, x, radius=radius if op.has_radius else None, k=k if g == "sigmoid" else None)
    agree(out, value)
    agree(torch.autograd.grad(out.sum(), point)[0], grad * w.norm(), atol=1e-10)


@given(vectors, st.sampled_from(ANGULARS), st.floats(0.01, 100))
def test_input_scale_on_the_sphere(seed, g, s):
    w, x, _, k = some(seed)
    op, x = exact("sphere", g), leaf(x)
    k = k if g == "sigmoid" else None
    value = op(w, x, k=k)
    agree(op(w, s * x, k=k), value)
    if g in ODD:
        agree(op(x, w, k=k), value)  # symmetric
    grad = torch.autograd.grad(value.sum(), x)[0]
    assert abs(float(grad @ x.detach())) < 1e-10
    theta = hs.geometry.angle(w, x.detach()).requires_grad_()
    slope = torch.autograd.grad(ref.angular(g, theta.cos(), 0.3 if k is None else k).sum(), theta)[0]
    agree(grad.norm() * x.norm(), slope.abs(), atol=1e-8, rtol=1e-7)


@given(vectors, st.sampled_from(ANGULARS), st.floats(0.1, 10))
def test_input_and_radius_scale_together(seed, g, s):
    w, x, radius, _ = some(seed)
    for name in RADIAL:
        power = s if name == "seg" else 1
        agree(exact(name, g)(w, s * x, radius=s * radius), power * exact(name, g)(w, x, radius=radius), rtol=1e-9)


def test_weightings_coincide_where_they_must():
    w, x = draw(4, 1, 5), draw(1, 6, 5)
    inner = (w * x).sum(-1)
    for weighting in WEIGHTINGS[1:]:
        agree(make("linear", weighting=weighting)(w, x), inner)
    agree(make("linear")(w, x), inner / (w.square().sum(-1) + 1e-4).sqrt())
    for weighting in ("joint", "separate"):
        agree(make("sphere", "linear", weighting=weighting)(w, x), make("sphere", "linear")(w, x))


def test_the_sigmoid_between_a_step_and_a_line():
    theta = torch.linspace(0.01, 3.13, 101, dtype=torch.float64)
    w, x = in_plane(theta)
    line = exact("sphere", "linear")(w, x)
    agree(exact("sphere", "sigmoid", k=1e4)(w, x), line, atol=1e-8)
    away = (theta - math.pi / 2).abs() > 0.02
    agree(exact("sphere", "sigmoid", k=1e-3)(w, x)[away], line.sign()[away], atol=1e-6)
    for k in (0.1, 0.3, 0.7, 2.0):
        e, end = torch.exp(theta / k - math.pi / (2 * k)), math.exp(-math.pi / (2 * k))
        printed = (1 + end) / (1 - end) * (1 - e) / (1 + e)
        agree(exact("sphere", "sigmoid", k=k)(w, x), printed, atol=1e-10)


# Degenerate vectors and low precision.


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@by_weighting
@pytest.mark.parametrize("eps", [1e-4, 0.0])
def test_zero_vectors_answer_zero(dtype, weighting, eps):
    for name, g in itertools.product(OPERATORS, ANGULARS):
        op = make(name, g, weighting=weighting, eps=eps)
        w, x = (draw(4, dtype=dtype).requires_grad_() for _ in range(2))
        zero = torch.zeros(4, dtype=dtype, requires_grad=True)
        out = op(w, zero)
        assert out.item() == 0
        by_w, by_x = torch.autograd.grad(out, (w, zero))
        assert not by_w.any()
        assert not by_x.any(), (name, g)
        out = op(zero, x)
        assert out.item() == 0
        assert finite(*torch.autograd.grad(out, (zero, x)))
        out = op(zero, zero)
        assert out.item() == 0
        assert not torch.autograd.grad(out, zero)[0].any()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@by_angular
def test_parallel_vectors(dtype, g):
    for name, weighting, eps, sign in itertools.product(OPERATORS, WEIGHTINGS, (1e-4, 0.0), (1, -1)):
        w = torch.tensor([3.0, 0, 4], dtype=dtype, requires_grad=True)
        x = (sign * 2 * w).detach().requires_grad_()
        out = make(name, g, weighting=weighting, eps=eps, k=0.05 if g == "sigmoid" else None)(w, x)
        grads = torch.autograd.grad(out, (w, x))
        assert finite(out, *grads), (name, weighting, eps, sign)
        if weighting == "none":
            size = float(grads[0].norm())
            small = (1e-3 if eps else 1e-6) if dtype == torch.float64 else 1e-2
            assert size <= small * max(1, abs(out.item())), (name, eps, size)
            end = 0 if g == "relucos" and sign < 0 else sign
            h = float(ref.magnitude(name, tensor(10.0)))
            rough = 0.02 if eps and g in ("linear", "sigmoid") else 4 * torch.finfo(dtype).eps + 1e-5
            assert out.item() == pytest.approx(end * h, rel=rough, abs=1e-6)


@pytest.mark.parametrize("size", [1e-8, 1e8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_extreme_norms(dtype, size):
    direction = torch.nn.functional.normalize(draw(2, 6), dim=1).to(dtype)
    for name, g, weighting, eps in itertools.product(OPERATORS, ("cosine", "sigmoid"), WEIGHTINGS, (1e-4, 0.0)):
        for a, b in ((size, 1), (1, size), (size, size)):
            w, x = (direction[0] * a).requires_grad_(), (direction[1] * b).requires_grad_()
            out = make(name, g, weighting=weighting, eps=eps)(w, x)
            assert finite(out, *torch.autograd.grad(out, (w, x))), (name, g, weighting, eps, a, b)
            expected = ref.pair(w.double(), x.double(), name, g, weighting=weighting, eps=eps)
            rounding = 8 * torch.finfo(dtype).eps * float(largest(name, weighting, w.double(), x.double(), eps))
            torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=rounding)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_half_precision_is_that_of_its_input(dtype):
    w, x = draw(4, 1, 9, dtype=dtype), draw(1, 5, 9, dtype=dtype)
    for name, g in itertools.product(OPERATORS, ANGULARS):
        expected = ref.respond(x[None].double(), w[None, :, 0].double(), name, g, mean=None)[0]
        actual = make(name, g)(w, x)
        torch.testing.assert_close(actual.double(), expected, atol=4e-3, rtol=1e-2)
    large = torch.full((1, 9), 300.0, dtype=dtype)  # its square overflows float16
    agree(make("sphere")(large, large), [1.0], atol=5e-3)


# Names and arguments.


def test_the_registry():
    for name, g in itertools.product(OPERATORS, ANGULARS):
        op = make(name, g)
        assert op == make(name, g)
        assert hash(op) == hash(make(name, g))
        assert op.angular == hs.angular.create(g)
        assert hs.nn.operators[name].help
    assert make("sphere").eps == hs.geometry.EPS == 1e-4
    assert make("seg").beta == 0.5
    assert make("mix").beta == 1.0
    assert make("tanh", hs.angular.Sigmoid(0.7)).angular == hs.angular.Sigmoid(0.7)


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("sphere", {"eps": -1e-4}, "eps"),
        ("sphere", {"alpha": 0.0}, "alpha"),
        ("tanh", {"alpha": -1.0}, "alpha"),
        ("tanh", {"radius": 0.0}, "radius"),
        ("ball", {"radius": -2.0}, "radius"),
        ("seg", {"beta": -0.1}, "beta"),
        ("sphere", {"g": "sigmoid", "k": 0.0}, "k"),
        ("sphere", {"g": "sigmoid", "k": -0.3}, "k"),
        ("sphere", {"g": "cosine", "k": 0.3}, "k"),
        ("sphere", {"g": "cosine", "learn_k": "filter"}, "learn_k"),
        ("sphere", {"g": "sigmoid", "learn_k": "kernel"}, "learn_k"),
        ("sphere", {"g": "sigmoid", "learn_k": "filter", "k_param": "exp"}, "k_param"),
        ("sphere", {"weighting": "both"}, "weighting"),
        ("tanh", {"mean_decay": 1.5}, "mean_decay"),
        ("tanh", {"mean_init": "last"}, "mean_init"),
        ("sphere", {"radius": 1.0}, "radius"),
        ("sphere", {"beta": 1.0}, "beta"),
        *(("sphere", {"weighting": w, "weighted_gradients": True}, "weighted_gradients") for w in WEIGHTINGS[1:]),
    ],
)
def test_bad_options_are_named(name, options, word):
    with pytest.raises(ArgumentError) as error:
        make(name, **options)
    assert error.value.argument == word


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(HypersphereError, match="'tanh'"):
        hs.nn.operators.create("tahn")
    with pytest.raises(HypersphereError, match="'cosine'"):
        hs.nn.operators.create("sphere", angular="cosin")
    with pytest.raises(ArgumentError, match="'weighting'"):
        hs.nn.operators.create("sphere", weigthing="none")


# What docs/layers.md says of layers.


def angles_of(kernels, patches, eps):
    """Angles row by row, in float64."""
    w, x = kernels.double(), patches.double()
    a, b = (v.square().sum(1, keepdim=True) + eps for v in (w, x))
    u, v, lost = w / a.sqrt(), x / b.sqrt(), (eps / a + eps / b).squeeze(1)
    return 2 * torch.atan2(((u - v).square().sum(1) + lost).sqrt(), ((u + v).square().sum(1) + lost).sqrt())


ANGLES = (0.0, 1e-3, 1e-2, 0.1)
NEAR_POLES = {  # (eps, norm): how far off the angle is at most, of convolutions and of the nearest of a linear layer
    (0.0, 1.0): ((2e-3, 2e-3, 1e-4, 1e-5), (1e-6, 1e-6, 1e-6, 1e-6)),
    (1e-4, 100.0): ((2e-3, 2e-3, 1e-4, 1e-5), (1e-3, 4e-4, 4e-5, 4e-6)),
    (1e-4, 10.0): ((1e-3, 1e-3, 1e-4, 1e-5), (2e-4, 2e-4, 4e-5, 4e-6)),
    (1e-4, 1.0): ((1e-4, 1e-4, 1e-4, 1e-5), (2e-5, 2e-5, 2e-5, 4e-6)),
}


@pytest.mark.parametrize("size", [8, 64, 576])
@pytest.mark.parametrize(("eps", "norm"), NEAR_POLES)
def test_how_far_angles_next_to_the_poles_are_off(eps, norm, size):
    w, t = torch.randn(2, 200, size, dtype=torch.float64)
    w = w / w.norm(dim=1, keepdim=True)
    t = t - (w * t).sum(1, keepdim=True) * w
    t = t / t.norm(dim=1, keepdim=True)
    kernels = (norm * w).float()
    convolution = hs.nn.SphereConv1d(size, 200, 1, eps=eps, angular="linear")
    layer = hs.nn.SphereLinear(size, 200, eps=eps, angular="linear")
    with torch.no_grad():
        convolution.weight.copy_(kernels.unsqueeze(2))
        layer.weight.copy_(kernels)
        for place, theta in enumerate(ANGLES):
            for sign in (1, -1):
                patches = (sign * norm * (w * math.cos(theta) + t * math.sin(theta))).float()
                wanted = angles_of(kernels, patches, eps)
                values = (
                    convolution(patches.unsqueeze(2)).squeeze(2).diagonal(),
                    layer(patches).diagonal(),
                    hs.nn.operator("sphere", angular="linear", eps=eps)(kernels, patches),
                )
                for value, allowed in zip(values, (*NEAR_POLES[eps, norm], (1e-6,) * 4), strict=True):
                    error = ((1 - value.double()) * (math.pi / 2) - wanted).abs().max()
                    assert error <= allowed[place], (theta, sign)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("eps", [1e-4, 0.0])
def test_a_kernel_of_zeros_is_at_a_right_angle_and_a_patch_of_zeros_is_nothing(eps, weighting):
    """Also with an angular function that is not 0 there; on vectors and in layers."""
    g = hs.angular.Linear(a=-1.0, b=2.0)
    f = hs.nn.operator("log", angular=g, weighting=weighting, eps=eps)
    zero, x = torch.zeros(1, 3, requires_grad=True), torch.tensor([[1.0, 2.0, -0.5]], requires_grad=True)
    layer = hs.nn.LogLinear(3, 1, angular=g, weighting=weighting, eps=eps)
    layer.weight.data.zero_()
    t, n = (float((v.detach().square().sum() + eps).sqrt()) for v in (x, zero))
    h = {
        "none": math.log1p(t),
        "linear": n * math.log1p(t),
        "joint": math.log1p(n * t),
        "separate": math.log1p(n) * math.log1p(t),
    }[weighting]
    for value, kernel in ((f(zero, x), zero), (layer(x), layer.weight)):
        assert value.item() == pytest.approx(h * (2 - math.pi / 2), rel=1e-5)
        (slope,) = torch.autograd.grad(value.sum(), kernel)
        assert bool(slope.any()) == (eps > 0)
        assert slope.norm() <= 1.01 * math.log1p(t) / math.sqrt(eps or 1)
    value = f(x, zero)
    assert value.item() == 0
    assert not any(part.any() for part in torch.autograd.grad(value.sum(), (x, zero)))


@pytest.mark.parametrize("scale", [1e-18, 1e18])
def test_any_scale_within_the_range_of_squares(scale):
    for layer, x in (
        (hs.nn.SphereLinear(5, 4, eps=0.0, angular="linear"), torch.randn(3, 5)),
        (hs.nn.SphereConv2d(2, 3, 2, eps=0.0, angular="sqcos"), torch.randn(2, 2, 4, 4)),
    ):
        wanted = layer(x)
        torch.testing.assert_close(layer(scale * x), wanted, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            layer.weight.mul_(scale)
        torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-6)
