"""Margins and heads against published numbers, plain float64 losses, another library and their invariances."""

import copy
import functools
import io
import itertools
import math
import pickle

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from hypersphere.errors import ArgumentError
from hypersphere.losses import ArcFace, ASoftmax, LambdaAnnealer, MarginSoftmax, Softmax, SphereFace, create
from hypersphere.margins import additive_angle, multiplicative

pml = pytest.importorskip("pytorch_metric_learning.losses")


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


# Published case: four samples, four classes; the last sample is far from its class.
X = tensor([[1, 2, -1, 0.5], [-0.5, 1, 1.5, -2], [0.3, -1.2, 0.8, 1], [0.2, -0.9, 0.4, 1.1]])
W = tensor([[0.9, 1.1, -0.6, 0.2], [-1, 0.4, 0.7, -1.3], [0.5, -0.8, 1, 0.6], [-0.2, -1, -0.3, 0.8]])
Y = torch.tensor([0, 1, 2, 0])
B = tensor([0.1, -0.2, 0.05, 0])
COSINES = [
    [0.977093006731, -0.339248906202, -0.48, -0.450987616802],
    [-0.152572071214, 0.909091362729, -0.182574185835, -0.809663853433],
    [-0.480191343705, -0.467133188117, 0.939837633545, 0.717682996719],
    [-0.35809142567, -0.627980834732, 0.841182255868, 0.817244288576],
]
THETA = [0.2, 0.7, 0.9, 1.5, 2.0, 2.5, 3.0]
PSI = {
    1: [
        0.980066577841,
        0.764842187284,
        0.621609968271,
        0.0707372016677,
        -0.416146836547,
        -0.801143615547,
        -0.9899924966,
    ],
    2: [0.921060994003, 0.1699671429, -0.227202094693, -0.9899924966, -1.34635637914, -2.28366218546, -2.96017028665],
    3: [0.82533561491, -0.5048461046, -0.904072142017, -1.78920420057, -2.96017028665, -3.65336468216, -4.91113026188],
    4: [
        0.696706709347,
        -0.942222340669,
        -1.10324158367,
        -2.96017028665,
        -4.14550003381,
        -5.16092847092,
        -6.84385395873,
    ],
    1.5: [
        0.955336489126,
        0.497571047892,
        0.219006687093,
        -0.628173622723,
        -0.9899924966,
        -1.17944064266,
        -1.78920420057,
    ],
}


def constant(value):
    """Annealer that stays at one weight."""
    return LambdaAnnealer(base=value, gamma=0.0, minimum=value)


def margin_head(dim=4, classes=4, **options):
    return MarginSoftmax(dim, classes, **options)


def multiplicative_head(m, dim=4, classes=4, **options):
    return MarginSoftmax(dim, classes, margin=functools.partial(multiplicative, m=m), **options)


def cosface_margin(c):
    return c - 0.35


# name: head, loss of the published case
PUBLISHED = {
    "softmax": (lambda: Softmax(4, 4), 0.916398498663),
    "softmax_nobias": (lambda: Softmax(4, 4, bias=False), 0.938133963005),
    "softmax_as_margin_head": (lambda: margin_head(unit_weights=False, bias=True), 0.916398498663),
    "w_softmax": (margin_head, 0.849447507861),
    "s_softmax_s30": (lambda: margin_head(s=30.0), 9.09417213777),
    "s_softmax_s1": (lambda: margin_head(s=1.0), 1.03037029845),
    "a_softmax_m1": (lambda: ASoftmax(4, 4, m=1), 0.849447507861),
    "a_softmax_m2": (lambda: ASoftmax(4, 4, m=2), 1.23655446868),
    "a_softmax_m3": (lambda: ASoftmax(4, 4, m=3), 1.98995383285),
    "a_softmax_m4": (lambda: ASoftmax(4, 4, m=4), 2.63493943088),
    "a_softmax_m4_lam5": (lambda: ASoftmax(4, 4, m=4, annealer=constant(5.0)), 1.10361006131),
    "l_softmax_m2": (lambda: multiplicative_head(2, unit_weights=False), 1.50268333474),
    "l_softmax_m3": (lambda: multiplicative_head(3, unit_weights=False), 2.59147677796),
    "l_softmax_m4": (lambda: multiplicative_head(4, unit_weights=False), 3.56332855478),
    "l_softmax_m4_lam5": (lambda: multiplicative_head(4, unit_weights=False, annealer=constant(5.0)), 1.30857257137),
    "m_softmax_m1.5_s30": (lambda: multiplicative_head(1.5, s=30.0), 13.7030382248),
    "cosface_m0.35_s64": (lambda: margin_head(s=64.0, margin=cosface_margin), 26.8828861572),
    "cosface_m0.35_s30": (lambda: margin_head(s=30.0, margin=cosface_margin), 12.6830346872),
    "arcface_m0.5_s64": (lambda: ArcFace(4, 4), 26.6114725989),
}

# Heads of every kind, for properties; name: make(dim, classes)
HEADS = {
    "softmax": Softmax,
    "softmax_nobias": functools.partial(Softmax, bias=False),
    "a_softmax": functools.partial(ASoftmax, m=4),
    "a_softmax_real_m": functools.partial(ASoftmax, m=1.5),
    "a_softmax_annealed": lambda dim, classes: ASoftmax(dim, classes, annealer=LambdaAnnealer()),
    "arcface": ArcFace,
    "arcface_annealed": lambda dim, classes: ArcFace(dim, classes, annealer=LambdaAnnealer()),
    "arcface_no_margin": functools.partial(ArcFace, m=0.0, s=8.0),
    "l_softmax": lambda dim, classes: multiplicative_head(3, dim, classes, unit_weights=False),
}
all_heads = pytest.mark.parametrize("name", HEADS)


def fill(head, weight=W, bias=B):
    """The head in float64 with the given parameters."""
    head = head.double()
    with torch.no_grad():
        head.weight.copy_(weight)
        if head.bias is not None:
            head.bias.copy_(bias)
    return head


def gradients(head, features, labels, autocast=False):
    features = features.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = head(features, labels)
    grads = torch.autograd.grad(loss, [features, *head.parameters()])
    return loss, grads


# Plain references: angles, one sample at a time, written as in the papers.


def plain_psi(theta, m):
    k = min(int(m * theta / math.pi), math.ceil(m) - 1)
    if m == int(m):
        return (-1) ** k * math.cos(m * theta) - 2 * k
    return math.cos(m * theta) * math.cos(k * math.pi) - 2 * k


def plain_losses(x, w, y, target, scale=None, weight=0.0):
    """Loss of each sample; ``target(theta)`` replaces the cosine of its own class, blended with ``weight``."""
    losses = []
    for features, label in zip(np.asarray(x), y.tolist(), strict=True):
        cosines = [float(np.dot(features, c) / np.linalg.norm(features) / np.linalg.norm(c)) for c in np.asarray(w)]
        own = cosines[label]
        cosines[label] = (weight * own + target(math.acos(own))) / (1 + weight)
        logits = (np.linalg.norm(features) if scale is None else scale) * np.array(cosines)
        losses.append(scipy.special.logsumexp(logits) - logits[label])
    return np.array(losses)


# Margins.


@pytest.mark.parametrize("m", PSI)
def test_published_multiplicative_margins(m):
    torch.testing.assert_close(multiplicative(tensor(THETA).cos(), m), tensor(PSI[m]), rtol=1e-10, atol=1e-11)


def test_published_additive_margin_past_the_end():
    assert additive_angle(tensor(math.cos(2.9)), 0.5).item() == -1.0


@pytest.mark.parametrize("m", [1, 1.2, 1.5, 2, 2.7, 3, 4, 5, 8, 13])
def test_multiplicative_margin_against_its_definition(m):
    theta = np.linspace(0, math.pi, 1001)
    expected = [plain_psi(t, m) for t in theta]
    values = multiplicative(tensor(np.cos(theta)), m)
    torch.testing.assert_close(values, tensor(expected), rtol=0, atol=1e-7 if m % 1 else 1e-11)


@pytest.mark.parametrize("m", [2, 3, 4, 7])
def test_polynomial_and_angle_forms_agree(m):
    c = torch.linspace(-0.999, 0.999, 400, dtype=torch.float64)
    just_real = multiplicative(c, m + 1e-12)
    torch.testing.assert_close(multiplicative(c, m), just_real, rtol=0, atol=1e-9)


@pytest.mark.parametrize("m", [1, 1.5, 2, 3, 3.3, 4, 6])
def test_multiplicative_margin_at_its_branch_points(m):
    assert multiplicative(tensor(1.0), m).item() == pytest.approx(1, abs=1e-12)
    end = multiplicative(tensor(-1.0), m).item()
    assert end == pytest.approx(plain_psi(math.pi, m), abs=1e-12)
    if m == int(m):
        assert end == 1 - 2 * m
    for k in range(1, math.ceil(m)):
        at = math.cos(k * math.pi / m)
        around = multiplicative(tensor([at - 1e-9, at, at + 1e-9]), m)
        torch.testing.assert_close(around, tensor([1.0 - 2 * k] * 3), rtol=0, atol=1e-7)


@pytest.mark.parametrize("m", [1.5, 2, 3, 4, 6])
def test_slope_of_the_multiplicative_margin(m):
    theta = torch.linspace(0.05, 3.1, 200, dtype=torch.float64)
    c = theta.cos().requires_grad_()
    (slope,) = torch.autograd.grad(multiplicative(c, m).sum(), c)
    k = np.floor(m * theta.numpy() / math.pi)
    if m == int(m):
        expected = (-1) ** k * m * scipy.special.eval_chebyu(int(m) - 1, c.detach().numpy())
    else:
        expected = m * np.sin(m * theta.numpy() - k * math.pi) / np.sin(theta.numpy())
    torch.testing.assert_close(slope, tensor(expected), rtol=1e-8, atol=1e-8)


def test_slope_of_the_additive_margin():
    theta = torch.linspace(0.05, 3.1, 200, dtype=torch.float64)
    c = theta.cos().requires_grad_()
    (slope,) = torch.autograd.grad(additive_angle(c, 0.5).sum(), c)
    expected = torch.where(theta < math.pi - 0.5, (theta + 0.5).sin() / theta.sin(), 0.0)
    torch.testing.assert_close(slope, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("m", [0, 0.1, 0.5, 1.5, math.pi])
def test_additive_margin_against_its_definition(m):
    theta = np.linspace(0, math.pi, 301)
    expected = [-1.0 if t + m >= math.pi else math.cos(t) * math.cos(m) - math.sin(t) * math.sin(m) for t in theta]
    torch.testing.assert_close(additive_angle(tensor(np.cos(theta)), m), tensor(expected), rtol=0, atol=2e-8)


@given(st.floats(1, 9) | st.integers(1, 9), st.floats(0, math.pi), st.sampled_from([torch.float32, torch.float64]))
def test_margins_fall_with_the_angle_and_stay_below_the_cosine(m, shift, dtype):
    c = torch.linspace(0, math.pi, 500, dtype=torch.float64).cos().to(dtype)
    slack = 500 * torch.finfo(dtype).eps * m**2
    for values in (multiplicative(c, m), additive_angle(c, shift)):
        assert values.dtype == dtype
        assert (values.diff() <= slack).all()
        assert (values <= c + slack).all()


def test_margin_types_and_arguments():
    c = torch.tensor([0.3], dtype=torch.bfloat16)
    for m in (1, 2, 1.5):
        assert multiplicative(c, m).dtype == torch.float32
    for m in (0, 0.5):
        assert additive_angle(c, m).dtype == torch.float32
    for m in (0.99, -2, math.nan):
        with pytest.raises(ArgumentError, match=r"^m must be at least 1"):
            multiplicative(c, m)
    for m in (-0.1, 3.2, math.nan):
        with pytest.raises(ArgumentError, match=r"^m must be at least 0 and at most 3\.14"):
            additive_angle(c, m)


# Values and gradients of heads.


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_losses(name):
    make, expected = PUBLISHED[name]
    assert fill(make())(X, Y).item() == pytest.approx(expected, rel=1e-10)


def test_published_cosines_and_samples():
    head = fill(ASoftmax(4, 4))
    torch.testing.assert_close(head.cosines(X), tensor(COSINES), rtol=0, atol=1e-11)
    samples = [head(X[i : i + 1], Y[i : i + 1]).item() for i in range(4)]
    assert samples == pytest.approx([0.186718276628, 1.11759168747, 1.44841302607, 7.78703473335], rel=1e-10)


@pytest.mark.parametrize(
    ("m", "expected"), [(1, 2.05834349951), (2, 2.30589167321), (3, 2.53038357876), (4, 2.80261351514)]
)
def test_another_published_case(m, expected):
    x = tensor([[0.5, -1, 2], [1, 1, 0.2], [-0.7, 0.4, 0.9]])
    w = tensor([[1, 2, 2], [-1, 0.5, 3], [0.3, -2, 1], [2, -1, -1]])
    head = fill(ASoftmax(3, 4, m=m, annealer=constant(5.0)), w)
    assert head(x, torch.tensor([0, 2, 2])).item() == pytest.approx(expected, rel=1e-10)


def test_published_gradients():
    _, (features, weight) = gradients(fill(ASoftmax(4, 4, annealer=constant(5.0))), X, Y)
    expected = tensor([-0.18837874, -0.46539856, 0.22692659, 0.1273904])
    torch.testing.assert_close(features[3], expected, rtol=0, atol=1e-8)
    expected = tensor([-0.098763143, 0.12300345, -0.024022728, -0.30415304])
    torch.testing.assert_close(weight[0], expected, rtol=0, atol=1e-8)


def test_heads_against_plain_losses():
    x, w, y = torch.randn(20, 6).double(), torch.randn(5, 6).double(), torch.randint(5, (20,))
    cases = [
        (ASoftmax(6, 5, m=3), functools.partial(plain_psi, m=3), None, 0.0),
        (ASoftmax(6, 5, m=2.5), functools.partial(plain_psi, m=2.5), None, 0.0),
        (ASoftmax(6, 5, m=4, annealer=constant(2.0)), functools.partial(plain_psi, m=4), None, 2.0),
        (ArcFace(6, 5, s=10.0, m=1.0), lambda t: math.cos(min(t + 1.0, math.pi)), 10.0, 0.0),
        (ArcFace(6, 5, s=10.0, m=0.5, annealer=constant(3.0)), lambda t: math.cos(min(t + 0.5, math.pi)), 10.0, 3.0),
    ]
    for head, target, scale, weight in cases:
        expected = plain_losses(x, w, y, target, scale, weight).mean()
        assert fill(head, w)(x, y).item() == pytest.approx(expected, rel=1e-9)


def test_softmax_is_a_linear_layer_with_cross_entropy():
    head = fill(Softmax(4, 4))
    torch.testing.assert_close(head.logits(X), X @ W.T + B)
    assert head(X, Y).item() == pytest.approx(F.cross_entropy(X @ W.T + B, Y).item(), rel=1e-12)


def test_scaled_softmax_reaches_its_lower_bound_on_the_simplex():
    for classes, s in ((4, 1.0), (10, 3.0)):
        w = torch.eye(classes, dtype=torch.float64) - 1 / classes
        head = fill(ArcFace(classes, classes, s=s, m=0.0), w)
        bound = math.log(1 + (classes - 1) * math.exp(-s * classes / (classes - 1)))
        assert head(w, torch.arange(classes)).item() == pytest.approx(bound, rel=1e-12)


def test_additive_margin_at_a_known_angle():
    # Two opposite classes, the sample at angle t of its own: log(1 + exp(s (cos(pi - t) - cos(t + m)))).
    t, m, s = 0.6, 0.5, 7.0
    head = fill(ArcFace(2, 2, s=s, m=m), tensor([[2.0, 0.0], [-5.0, 0.0]]))
    x = 3 * tensor([[math.cos(t), math.sin(t)]])
    expected = math.log1p(math.exp(s * (-math.cos(t) - math.cos(t + m))))
    assert head(x, torch.tensor([0])).item() == pytest.approx(expected, rel=1e-12)


@all_heads
def test_head_gradients(name):
    head = HEADS[name](4, 3).double()
    if head.s is not None:
        head.s = 4.0
    head.eval()
    parameters = dict(head.named_parameters())
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, 1, 2, 2, 0])

    def loss(features, *values):
        return torch.func.functional_call(head, dict(zip(parameters, values, strict=True)), (features, y))

    assert torch.autograd.gradcheck(loss, (x, *parameters.values()), eps=1e-6, atol=1e-5)


@pytest.mark.parametrize("shape", [(8, 16, 10), (3, 4, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_arcface_agrees_with_pytorch_metric_learning(shape, dtype):
    count, dim, classes = shape
    head = ArcFace(dim, classes, s=32.0, m=0.4).to(dtype)
    theirs = pml.ArcFaceLoss(classes, dim, margin=math.degrees(0.4), scale=32.0)
    theirs.W.data = head.weight.detach().T.clone()
    x, y = torch.randn(count, dim, dtype=dtype), torch.randint(classes, (count,))
    own = head.cosines(x).gather(1, y.unsqueeze(1))
    assert (own > math.cos(math.pi - 0.4)).all(), "beyond that angle the two define different targets"
    compare_with_pml(head, theirs, x, y)


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # their constructor, with numpy 2
@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sphereface_agrees_with_pytorch_metric_learning(m, dtype):
    head = SphereFace(6, 5, m=m).to(dtype)
    theirs = pml.SphereFaceLoss(5, 6, margin=m, scale=1)
    theirs.W.data = head.weight.detach().T.clone()
    compare_with_pml(head, theirs, torch.randn(12, 6, dtype=dtype), torch.randint(5, (12,)))


def compare_with_pml(head, theirs, x, y):
    loss, (features, weight) = gradients(head, x, y)
    other = x.clone().requires_grad_()
    value = theirs(other, y)
    value.backward()
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if x.dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(loss, value, **tolerance)
    torch.testing.assert_close(features, other.grad, **tolerance)
    torch.testing.assert_close(weight, theirs.W.grad.T, **tolerance)


# Reductions and invariances.


def test_no_margin_is_the_plain_loss():
    x, y = torch.randn(7, 5), torch.randint(3, (7,))
    directions = ASoftmax(5, 3, m=1)
    plain = F.cross_entropy(F.linear(x, F.normalize(directions.weight)), y)
    torch.testing.assert_close(directions(x, y), plain)
    sphere = ArcFace(5, 3, s=9.0, m=0.0)
    plain = F.cross_entropy(9 * F.linear(F.normalize(x), F.normalize(sphere.weight)), y)
    torch.testing.assert_close(sphere(x, y), plain)


def test_a_heavy_annealer_leaves_the_plain_cosine_and_none_the_full_margin():
    def loss(weight):
        return fill(ASoftmax(4, 4, annealer=constant(weight)))(X, Y).item()

    assert loss(1e12) == pytest.approx(0.849447507861, rel=1e-9)
    assert loss(0.0) == pytest.approx(2.63493943088, rel=1e-9)
    values = [loss(weight) for weight in (0.0, 0.5, 2.0, 10.0, 100.0)]
    assert values == sorted(values, reverse=True)


@given(st.integers(0, 2**32 - 1))
def test_a_wider_margin_costs_more_on_every_sample(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 5, generator=generator, dtype=torch.float64)
    w = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    y = torch.tensor([2])
    for heads in (
        [ASoftmax(5, 4, m=m) for m in (1, 1.5, 2, 2.5, 3, 4, 6)],
        [ArcFace(5, 4, s=8.0, m=m) for m in (0, 0.2, 0.5, 1.0, 2.0, 3.0)],
    ):
        values = [fill(head, w)(x, y).item() for head in heads]
        assert all(a <= b + 1e-9 for a, b in itertools.pairwise(values))


@all_heads
@pytest.mark.parametrize("seed", range(3))
def test_invariances(name, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    w = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (6,), generator=generator)
    b = torch.randn(4, generator=generator, dtype=torch.float64)
    head = HEADS[name](5, 4).eval()
    value = fill(head, w, b)(x, y).item()

    def loss(features, weight, labels=y, bias=b):
        return pytest.approx(fill(head, weight, bias)(features, labels).item(), rel=1e-9)

    turn = torch.tensor(scipy.stats.ortho_group.rvs(5, random_state=seed))
    assert value == loss(x @ turn, w @ turn)
    order = torch.randperm(4, generator=generator)
    assert value == loss(x, w[order], torch.argsort(order)[y], b[order])
    samples = torch.randperm(6, generator=generator)
    assert value == loss(x[samples], w, y[samples])
    rows = 10 ** torch.empty(4, 1, dtype=torch.float64).uniform_(-6, 6, generator=generator)
    assert (value == loss(x, w * rows)) == head.unit_weights
    lengths = 10 ** torch.empty(6, 1, dtype=torch.float64).uniform_(-3, 1, generator=generator)
    assert (value == loss(x * lengths, w)) == (head.s is not None)


@all_heads
def test_directions_get_tangent_gradients(name):
    head = fill(HEADS[name](4, 4))
    _, grads = gradients(head, X, Y)
    along_features = (grads[0] * X).sum(1).abs().max()
    along_weights = (grads[1] * W).sum(1).abs().max()
    assert (along_features < 1e-12) == (head.s is not None)
    assert (along_weights < 1e-12) == head.unit_weights


def test_logits_have_no_margin_and_margin_logits_only_on_the_own_class():
    cosines = tensor(COSINES)
    norms = X.square().sum(1, keepdim=True).sqrt()
    for head, scale, target in (
        (ASoftmax(4, 4), norms, functools.partial(plain_psi, m=4)),
        (ArcFace(4, 4), 64.0, lambda t: math.cos(t + 0.5)),
    ):
        fill(head)
        torch.testing.assert_close(head.logits(X), scale * cosines, rtol=0, atol=1e-9)
        expected = cosines.clone()
        for i, label in enumerate(Y):
            expected[i, label] = target(math.acos(cosines[i, label]))
        torch.testing.assert_close(head.margin_logits(X, Y), scale * expected, rtol=0, atol=1e-9)
    plain = fill(Softmax(4, 4))
    torch.testing.assert_close(plain.margin_logits(X, Y), plain.logits(X))


# Degenerate input.


@all_heads
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_degenerate_features_and_weights_stay_finite(name, dtype):
    head = HEADS[name](6, 3).to(dtype)
    weight = head.weight.detach()
    rows = [weight[0], -weight[0], 1e6 * weight[0], -1e-6 * weight[0], 0 * weight[0], weight[0] * 1e-25]
    x, y = torch.stack(rows), torch.zeros(6, dtype=torch.int64)
    loss, grads = gradients(head, x, y)
    assert loss.isfinite()
    assert all(grad.isfinite().all() for grad in grads)
    with torch.no_grad():
        head.weight[1] = 0
        head.weight[2] = head.weight[0]
    loss, grads = gradients(head, x, torch.tensor([0, 1, 2, 0, 1, 2]))
    assert loss.isfinite()
    assert all(grad.isfinite().all() for grad in grads)


def test_a_zero_feature_has_no_preference():
    zero = torch.zeros(1, 6)
    for head in (ASoftmax(6, 3), Softmax(6, 3), ArcFace(6, 3, m=0.0)):
        loss, (features, *_) = gradients(head, zero, torch.tensor([1]))
        assert loss.item() == pytest.approx(math.log(3), rel=1e-6)
        if head.unit_weights:
            assert (features == 0).all()
    # At a right angle to everything the additive margin still counts.
    loss, _ = gradients(ArcFace(6, 3, s=4.0, m=0.5), zero, torch.tensor([1]))
    expected = math.log(2 + math.exp(-4 * math.sin(0.5))) + 4 * math.sin(0.5)
    assert loss.item() == pytest.approx(expected, rel=1e-6)


@all_heads
def test_one_class_one_sample_no_sample(name):
    loss, grads = gradients(HEADS[name](4, 1), torch.randn(3, 4), torch.zeros(3, dtype=torch.int64))
    assert loss.item() == pytest.approx(0, abs=1e-5)
    assert all(grad.isfinite().all() for grad in grads)
    head = HEADS[name](4, 3)
    loss, _ = gradients(head, torch.randn(1, 4), torch.tensor([2]))
    assert loss.shape == ()
    loss, grads = gradients(head, torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    assert loss.item() == 0
    assert all((grad == 0).all() for grad in grads)
    assert head.logits(torch.zeros(0, 4)).shape == (0, 3)
    assert head.margin_logits(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)).shape == (0, 3)


def test_a_one_dimensional_feature():
    head = fill(ArcFace(1, 2, s=2.0, m=0.5), tensor([[3.0], [-1.0]]))
    expected = math.log1p(math.exp(2 * (-1 - math.cos(0.5))))
    assert head(tensor([[7.0]]), torch.tensor([0])).item() == pytest.approx(expected, rel=1e-7)


def test_a_large_scale_stays_finite():
    loss, grads = gradients(ArcFace(8, 5, s=1e4), torch.randn(6, 8), torch.randint(5, (6,)))
    assert loss.isfinite()
    assert all(grad.isfinite().all() for grad in grads)


# Types.


@all_heads
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["features", "all", "autocast"])
def test_half_precision(name, dtype, mode):
    head = HEADS[name](8, 5).eval()
    if mode == "all":
        head = head.to(dtype)
    parameter_type = head.weight.dtype
    x, y = torch.randn(6, 8).to(dtype), torch.randint(5, (6,))
    loss, grads = gradients(head, x, y, mode == "autocast")
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        logits = head.logits(x)
    assert loss.dtype == logits.dtype == torch.float32
    assert head.weight.dtype == parameter_type
    assert [grad.dtype for grad in grads] == [dtype, *[parameter_type] * (len(grads) - 1)]
    assert all(grad.isfinite().all() for grad in grads)
    exact, exact_grads = gradients(copy.deepcopy(head).double(), x.double(), y)
    assert loss.item() == pytest.approx(exact.item(), rel=2e-5)
    for grad, other in zip(grads, exact_grads, strict=True):
        torch.testing.assert_close(grad.double(), other, rtol=2e-2, atol=2e-2 * other.abs().max().item() + 1e-12)


@all_heads
def test_autocast_changes_nothing_for_float32(name):
    head = HEADS[name](8, 5).eval()
    x, y = torch.randn(6, 8), torch.randint(5, (6,))
    plain, plain_grads = gradients(head, x, y)
    cast, cast_grads = gradients(head, x, y, autocast=True)
    torch.testing.assert_close(cast, plain, rtol=1e-6, atol=1e-6)
    for a, b in zip(cast_grads, plain_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_layout_of_features_does_not_matter():
    x = torch.randn(16, 12, dtype=torch.float64).T[::2, ::2]
    assert not x.is_contiguous()
    y = torch.randint(5, (6,))
    for make in HEADS.values():
        head = make(8, 5).double().eval()
        assert head(x, y).item() == pytest.approx(head(x.contiguous(), y).item(), rel=1e-12)


# Annealing.


def test_published_schedules():
    released = LambdaAnnealer()
    slow = LambdaAnnealer(gamma=2.5e-5, power=35.0, minimum=0.0)
    for annealer, values in (
        (released, {1: 892.857142857, 100: 76.9230769231, 1000: 8.26446280992, 1659: 5.0, 28000: 5.0}),
        (slow, {1: 999.125393629, 1000: 421.371066384, 10000: 0.405648192073, 30000: 3.11650835828e-06}),
    ):
        for step, expected in values.items():
            annealer.steps.fill_(step)
            assert annealer.value().item() == pytest.approx(expected, rel=1e-5)
    released.steps.fill_(1658)
    assert released.value().item() > 5


def test_annealer_switched_off():
    annealer = LambdaAnnealer(base=0.0)
    annealer.advance()
    assert annealer.value().item() == 0


def test_annealer_arguments():
    for name in ("base", "gamma", "power", "minimum"):
        with pytest.raises(ArgumentError, match=f"^{name} must be at least 0, got -1"):
            LambdaAnnealer(**{name: -1.0})
    assert repr(LambdaAnnealer()) == "LambdaAnnealer(base=1000, gamma=0.12, power=1, minimum=5)"


def test_the_counter_advances_before_use_and_in_training_only():
    head = fill(ASoftmax(4, 4, annealer=LambdaAnnealer()))
    target = functools.partial(plain_psi, m=4)
    for step in (1, 2, 3):
        expected = plain_losses(X, W, Y, target, None, 1000 / (1 + 0.12 * step)).mean()
        assert head(X, Y).item() == pytest.approx(expected, rel=1e-6)
        assert head.annealer.steps.item() == step
    head.eval()
    for _ in range(3):
        assert head(X, Y).item() == pytest.approx(expected, rel=1e-6)
        assert head.annealer.steps.item() == 3
    head.train()
    head.logits(X)
    head.margin_logits(X, Y)
    assert head.annealer.steps.item() == 3


def test_the_counter_is_saved_and_restored():
    head = ASoftmax(4, 4, annealer=LambdaAnnealer())
    for _ in range(7):
        head(X.float(), Y)
    state = head.state_dict()
    assert state["annealer.steps"].item() == 7
    assert state["annealer.steps"].dtype == torch.int64
    other = ASoftmax(4, 4, annealer=LambdaAnnealer())
    other.load_state_dict(state)
    assert other(X.float(), Y).item() == head(X.float(), Y).item()
    assert other.annealer.steps.item() == 8
    assert head.half().annealer.steps.dtype == torch.int64


# As modules.


@all_heads
def test_copies_are_the_same_head(name):
    head = HEADS[name](4, 3)
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 1, 0])
    head(x, y)
    buffer = io.BytesIO()
    torch.save(head.state_dict(), buffer)
    buffer.seek(0)
    restored = HEADS[name](4, 3)
    restored.load_state_dict(torch.load(buffer, weights_only=True))
    expected = copy.deepcopy(head)(x, y).item()
    assert pickle.loads(pickle.dumps(head))(x, y).item() == expected
    assert restored(x, y).item() == expected
    clone = copy.deepcopy(head)
    with torch.no_grad():
        clone.weight.zero_()
    assert head(x, y).item() == expected, "a copy shares nothing with its original"


@all_heads
def test_parameters(name):
    head = HEADS[name](6, 3)
    assert head.weight.shape == (3, 6)
    bound = math.sqrt(6 / (3 + 6))
    assert head.weight.abs().max() <= bound
    names = {"weight", "bias"} if head.bias is not None else {"weight"}
    assert {n for n, _ in head.named_parameters()} == names
    before = head.weight.clone()
    head.reset_parameters()
    assert not torch.equal(head.weight, before)
    if head.bias is not None:
        assert head.bias.tolist() == [0, 0, 0]


def test_initial_weights_spread_over_the_xavier_range():
    weight = Softmax(40, 60).weight
    bound = math.sqrt(6 / 100)
    assert scipy.stats.kstest(weight.detach().flatten().numpy(), "uniform", (-bound, 2 * bound)).pvalue > 1e-3


@pytest.mark.parametrize("name", ["softmax", "a_softmax", "a_softmax_real_m", "a_softmax_annealed", "arcface"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_as_one_graph_gives_the_same_numbers(name, backend):
    torch._dynamo.reset()
    head = HEADS[name](6, 4)
    other = copy.deepcopy(head)
    compiled = torch.compile(other, fullgraph=True, backend=backend)
    x, y = torch.randn(5, 6), torch.tensor([0, 1, 2, 3, 3])
    for _ in range(2):
        loss, grads = gradients(head, x, y)
        again, again_grads = gradients(compiled, x, y)
        torch.testing.assert_close(again, loss, rtol=1e-5, atol=1e-5)
        for a, b in zip(again_grads, grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    if head.annealer is not None:
        assert other.annealer.steps.item() == head.annealer.steps.item() == 2


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_backward_uses_the_margin_of_its_own_step(backend):
    # The weight falls by 40 % from the first step to the second: a backward that reads the counter late is far off.
    torch._dynamo.reset()
    head = ASoftmax(6, 4, annealer=LambdaAnnealer(base=10, gamma=0.5, power=3, minimum=0))
    compiled = torch.compile(copy.deepcopy(head), fullgraph=True, backend=backend)
    x, y = torch.randn(5, 6), torch.tensor([0, 1, 2, 3, 3])
    for _ in range(3):
        for a, b in zip(gradients(compiled, x, y)[1], gradients(head, x, y)[1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_rejected_batch_does_not_advance_the_counter():
    head = fill(ASoftmax(4, 4, annealer=LambdaAnnealer()))
    with pytest.raises(ArgumentError, match="labels"):
        head(X, torch.full_like(Y, 9))
    assert head.annealer.steps.item() == 0


def test_training_with_a_margin_separates_classes():
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(60) % 3
    x = torch.eye(3)[y] * 3 + torch.randn(60, 3, generator=generator) * 0.3
    for name in ("a_softmax_annealed", "arcface", "softmax"):
        head = HEADS[name](3, 3)
        optimiser = torch.optim.Adam(head.parameters(), lr=0.05)
        for _ in range(60):
            optimiser.zero_grad()
            head(x, y).backward()
            optimiser.step()
        assert (head.logits(x).argmax(1) == y).all(), name


# Arguments.


@all_heads
def test_bad_calls_name_the_argument(name):
    head = HEADS[name](4, 3)
    y = torch.tensor([0, 1])
    for bad in (torch.zeros(2, 5), torch.zeros(4), torch.zeros(2, 4, 1), torch.zeros(())):
        with pytest.raises(ArgumentError, match=r"^features must have shape \(B, 4\), got"):
            head(bad, y)
        with pytest.raises(ArgumentError, match=r"^features must have shape \(B, 4\), got"):
            head.logits(bad)
    x = torch.zeros(2, 4)
    for bad in (torch.tensor([0, 1, 2]), torch.tensor([[0], [1]]), torch.tensor(0), y.int(), y.float()):
        with pytest.raises(ArgumentError, match=r"^labels must be int64 of shape \(2,\), got torch\."):
            head(x, bad)
    for bad, shown in (([0, 3], 3), ([-1, 0], -1), ([0, -100], -100)):
        with pytest.raises(ArgumentError, match=rf"^labels must lie in \[0, 3\), got {shown}$"):
            head(x, torch.tensor(bad))


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("dim", lambda: Softmax(0, 3)),
        ("classes", lambda: ArcFace(4, 0)),
        ("s", lambda: ArcFace(4, 3, s=0.0)),
        ("s", lambda: ArcFace(4, 3, s=-1.0)),
        ("m", lambda: ArcFace(4, 3, m=-0.1)),
        ("m", lambda: ArcFace(4, 3, m=28.6)),
        ("m", lambda: ASoftmax(4, 3, m=0.5)),
        ("bias", lambda: MarginSoftmax(4, 3, bias=True)),
    ],
)
def test_bad_options_name_the_argument(argument, make):
    with pytest.raises(ArgumentError) as caught:
        make()
    assert caught.value.argument == argument
    assert str(caught.value).startswith(f"{argument} ")


def test_names_and_repr():
    assert SphereFace is ASoftmax
    assert isinstance(create("sphereface", 4, 3), ASoftmax)
    assert isinstance(create("softmax", dim=4, classes=3, bias=False), Softmax)
    assert "dim=4, classes=3, s=64.0, unit_weights=True" in repr(ArcFace(4, 3))
