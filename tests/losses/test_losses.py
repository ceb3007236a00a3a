"""Heads against published numbers, plain float64 losses, another library and their invariances."""

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hypersphere import losses, margins
from hypersphere.angular import Sigmoid
from hypersphere.errors import ArgumentError
from hypersphere.losses import ArcFace, ASoftmax, LambdaAnnealer, MarginSoftmax, Softmax
from hypersphere.losses.pairs import move_centres

pytestmark = pytest.mark.filterwarnings("ignore:s = .* cannot give a class")  # small scales are deliberate here
PI = math.pi


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def constant(value):
    """Annealer that stays at one weight."""
    return LambdaAnnealer(base=value, gamma=0.0, minimum=value)


def filled(head, weight, **values):
    """The head in float64 with the given weight, parameters and buffers."""
    head = head.double()
    with torch.no_grad():
        for name, value in {"weight": weight, **values}.items():
            getattr(head, name).copy_(torch.as_tensor(value, dtype=torch.float64))
    return head


def gradients(head, features, labels, autocast=False):
    """Loss (the sum of all losses for reduction="none") and gradients by the features and every parameter."""
    features = features.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = head(features, labels)
    grads = torch.autograd.grad(loss.sum(), [features, *head.parameters()])
    return loss.detach(), grads


def assert_same(one, other, rtol=1e-10, atol=1e-11):
    """Losses and gradients, as of gradients()."""
    torch.testing.assert_close(one[0], other[0], rtol=rtol, atol=atol)
    for a, b in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


# ------------------------------------------------------------------------------------------------ published numbers

# Four samples, four classes; the last sample is far from its class.
X = tensor([[1, 2, -1, 0.5], [-0.5, 1, 1.5, -2], [0.3, -1.2, 0.8, 1], [0.2, -0.9, 0.4, 1.1]])
W = tensor([[0.9, 1.1, -0.6, 0.2], [-1, 0.4, 0.7, -1.3], [0.5, -0.8, 1, 0.6], [-0.2, -1, -0.3, 0.8]])
Y = torch.tensor([0, 1, 2, 0])
B = tensor([0.1, -0.2, 0.05, 0])
W3 = torch.stack([W, W.roll(1, 1), -W], 1).flatten(0, 1)  # three centres a class
COSINES = [
    [0.977093006731, -0.339248906202, -0.48, -0.450987616802],
    [-0.152572071214, 0.909091362729, -0.182574185835, -0.809663853433],
    [-0.480191343705, -0.467133188117, 0.939837633545, 0.717682996719],
    [-0.35809142567, -0.627980834732, 0.841182255868, 0.817244288576],
]
SOFT_NORM = 0.278727428471
BIASES = {"C": 15.2527629685, "A": 31.2498447796, "M": 31.2520393868}

# member, options, loss, and what differs from the shared case: state, features, weight
PUBLISHED = [
    ("softmax", {}, 0.916398498663),
    ("softmax", {"bias": False}, 0.938133963005),
    ("margin-softmax", {"unit_weights": False, "bias": True}, 0.916398498663),
    ("margin-softmax", {}, 0.849447507861),
    ("w-softmax", {}, 0.849447507861),
    ("w-softmax", {"g": "linear"}, 0.799690231471),
    ("w-softmax", {"g": "sigmoid", "k": 0.3}, 0.945500498457),
    ("s-softmax", {}, 9.09417213777),
    ("s-softmax", {"s": 1.0}, 1.03037029845),
    ("l-softmax", {"m": 2}, 1.50268333474),
    ("l-softmax", {"m": 3}, 2.59147677796),
    ("l-softmax", {"m": 4}, 3.56332855478),
    ("l-softmax", {"m": 4, "annealer": constant(5.0)}, 1.30857257137),
    ("a-softmax", {"m": 1}, 0.849447507861),
    ("a-softmax", {"m": 2}, 1.23655446868),
    ("a-softmax", {"m": 3}, 1.98995383285),
    ("a-softmax", {"m": 4}, 2.63493943088),
    ("a-softmax", {"m": 4, "annealer": constant(5.0)}, 1.10361006131),
    ("a-softmax", {"m": 4, "reduction": "none"}, [0.186718276628, 1.11759168747, 1.44841302607, 7.78703473335]),
    ("ga-softmax", {}, 2.62711053118),
    ("ga-softmax", {"g": "sigmoid", "k": 0.3}, 2.60774310134),
    ("m-softmax", {}, 13.7030382248),
    ("cosface", {}, 26.8828861572),
    ("cosface", {"s": 30.0}, 12.6830346872),
    *[("arcface", {"beyond": beyond}, 26.6114725989) for beyond in ("raw", "clip", "fallback")],
    ("arcface", {"beyond": "easy"}, 20.1507280998),
    ("combined", {}, 28.5287198566),
    ("sphereface-r", {"version": "v0"}, 26.3070334369),
    ("sphereface-r", {"version": "v1"}, 26.3070334369),
    ("sphereface-r", {}, 19.2372274976),
    ("sphereface-r", {"loss_weight": 50}, 19.2372274976 * 50 / 60),
    ("sphereface-r", {"version": "v1", "feature_norm": "none"}, 1.06354701026),
    ("sphereface-r", {"version": "v1", "feature_norm": "soft"}, 1.06354701026 + SOFT_NORM),
    ("sphereface2", {"loss_weight": 1}, 0.442276014962, {"common_bias": BIASES["C"]}),
    ("sphereface2", {"version": "A", "loss_weight": 1}, 0.313253645462, {"common_bias": BIASES["A"]}),
    ("sphereface2", {"version": "M", "loss_weight": 1}, 0.313847370591, {"common_bias": BIASES["M"]}),
    ("adaface", {}, 28.2036169142),
    ("adaface", {"rate": 0}, 27.6907132444, {"norm_mean": 2.0, "norm_std": 0.5}),
    ("magface", {"norm_weight": 0, "beyond": "easy"}, 19.8933756077, {"features": 10 * X}),
    ("magface", {"beyond": "easy"}, 21.7031231747, {"features": 10 * X}),
    ("curricularface", {}, 23.6134690257),
    ("curricularface", {}, 33.6857406935, {"progress": 0.5}),
    ("subcenter-arcface", {}, 21.0613322832, {"weight": W3}),
    ("circle", {}, 180.524061312),
    ("circle", {"s": 32}, 22.7785713723),
    ("hinge", {"bias": False}, 2.6575),
    ("hinge", {"bias": False, "power": 2}, 6.495675),
    ("center", {"centre_weight": 1.0, "bias": False}, 0.938133963005 + 1.18875, {"class_centres": W}),
]


@pytest.mark.parametrize(
    "published", PUBLISHED, ids=lambda case: "-".join([case[0], *map(str, case[1].values())]).replace("\n", "")
)
def test_published_losses(published):
    name, options, expected, *state = published
    state = dict(*state)
    features = state.pop("features", X)
    head = losses.create(name, 4, 4, **options)
    values = {"bias": B} if head.bias is not None else {}
    found = filled(head, **{"weight": W, **values, **state})(features, Y)
    assert found.tolist() == pytest.approx(expected, rel=1e-10)


def test_published_cosines_and_initial_biases():
    torch.testing.assert_close(filled(ASoftmax(4, 4), W).cosines(X), tensor(COSINES), rtol=0, atol=1e-11)
    for version, classes, bias in (*((v, 4, b) for v, b in BIASES.items()), ("C", 10572, 5.58164893265)):
        head = losses.create("sphereface2", 4, classes, version=version)
        assert head.common_bias.item() == pytest.approx(bias, rel=1e-6)
        # The gradient sums of own and other classes balance where all cosines are 0.
        b = bias
        own = head.psi(tensor(PI / 2)).item() * 40 + b
        other = head.eta(tensor(PI / 2)).item() * 40 + b
        pulls = 0.7 / (1 + math.exp(own)), 0.3 * (classes - 1) / (1 + math.exp(-other))
        assert pulls[0] == pytest.approx(pulls[1], rel=1e-8)


def test_published_states_after_a_step():
    ada = filled(losses.create("adaface", 4, 4), W)
    ada(X, Y)
    assert [ada.norm_mean.item(), ada.norm_std.item()] == pytest.approx([19.8212725715, 99.0058853151], rel=1e-11)
    for start, end in ((0.0, 0.00616982644334), (0.5, 0.501169826443)):
        head = filled(losses.create("curricularface", 4, 4), W, progress=start)
        head(X, Y)
        assert head.progress.item() == pytest.approx(end, rel=1e-11)
        head.eval()(X, Y)
        assert head.progress.item() == pytest.approx(end, rel=1e-11)


def test_published_pairs_and_centres():
    same = torch.tensor([False, True])
    assert losses.contrastive(X[:2], X[2:], same, margin=3.0).mean().item() == pytest.approx(3.73, rel=1e-12)
    assert losses.triplet(X[3], X[0], X[2]).item() == pytest.approx(11.3, rel=1e-12)
    for pairs, expected in (("batch", 203.306046013), ("anchor", 172.455932836)):
        assert losses.circle_pairs(X, Y, m=0.4, s=80.0, pairs=pairs).item() == pytest.approx(expected, rel=1e-10)
    moved = W.clone()
    before = move_centres(moved, X, Y, torch.ones(4, dtype=torch.bool), 1.0)
    torch.testing.assert_close(before, W[Y])
    assert (W[0] - moved[0]).tolist() == pytest.approx([0.2, 0.366666666667, -0.2, -0.4], abs=1e-11)
    torch.testing.assert_close(moved[3], W[3])
    torch.testing.assert_close(moved[1], W[1] + (X[1] - W[1]) / 2)


class Sampled(losses.CosFace):
    """CosFace on fixed classes of a step."""

    def sample(self, labels, draws=None, valid=None):
        return torch.tensor([0, 1, 2])


def test_published_sampling_of_classes():
    head = losses.create("cosface", 4, 8, sample_rate=0.5)
    draws = tensor([0.1, 0.9, 0.2, 0.8, 0.7, 0.3, 0.6, 0.4])
    assert head.sample(torch.tensor([5, 5, 2]), draws).tolist() == [1, 2, 3, 5]
    assert draws[5] == 0.3, "the draws are the caller's"
    _, (features, weight) = gradients(sampled := filled(Sampled(4, 4, sample_rate=0.75), W), X, Y)
    assert sampled(X, Y).item() == pytest.approx(24.7883789046, rel=1e-10)
    assert sampled.eval()(X, Y).item() == pytest.approx(26.8828861572, rel=1e-10)
    _, (other_features, other_weight) = gradients(filled(losses.CosFace(4, 3), W[:3]), X, Y)
    torch.testing.assert_close(features, other_features)
    torch.testing.assert_close(weight, torch.cat([other_weight, torch.zeros(1, 4)]))


@pytest.mark.parametrize(
    ("m", "sample", "f", "by_x", "by_w"),
    [
        (
            4,
            3,
            -9.02636386385,
            [3.33944317625, 6.91197364302, -3.54533171483, -1.86849412222],
            [-1.18989901946, -6.32975834293, 3.06531447238, 4.23234057158],
        ),
        (
            2,
            0,
            3.53681955463,
            [1.7071357606, 0.678411102357, -0.534624152525, -0.12352512643],
            [-0.299683647834, 2.67356489581, -1.10300157708, 1.01906253018],
        ),
    ],
)
def test_published_target_gradients_of_l_softmax(m, sample, f, by_x, by_w):
    head = filled(losses.create("l-softmax", 4, 4, m=m), W)
    x = X[sample : sample + 1].clone().requires_grad_()
    target = head.margin_logits(x, torch.tensor([0]))[0, 0]
    features, weight = torch.autograd.grad(target, [x, head.weight])
    assert target.item() == pytest.approx(f, rel=1e-10)
    assert features[0].tolist() == pytest.approx(by_x, rel=1e-9)
    assert weight[0].tolist() == pytest.approx(by_w, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "options", "by_x", "by_w", "digits"),
    [
        (
            "a-softmax",
            {"annealer": constant(5.0)},
            [-0.18837874, -0.46539856, 0.22692659, 0.1273904],
            [-0.098763143, 0.12300345, -0.024022728, -0.30415304],
            1e-8,
        ),
        (
            "a-softmax",
            {"annealer": constant(5.0), "gradient": "caffe"},
            [-0.120867029391, -0.325662934677, 0.155252538725, 0.0896160644194],
            [-0.0777485207524, 0.174298012189, -0.0352719704826, -0.303047541779],
            1e-11,
        ),
        (
            "sphereface-r",
            {"version": "v1", "gradient": "cgd"},
            [-5.01850499398, -5.64527192192, 5.64004678374, -5.75732949493],
            [-3.2919238151, 3.38284616255, -1.25686774419, -7.56259995864],
            1e-10,
        ),
    ],
    ids=["exact", "caffe", "cgd"],
)
def test_published_gradients(name, options, by_x, by_w, digits):
    _, (features, weight) = gradients(filled(losses.create(name, 4, 4, **options), W), X, Y)
    assert features[3].tolist() == pytest.approx(by_x, abs=digits)
    assert weight[0].tolist() == pytest.approx(by_w, abs=digits)


def chirp(rows, columns, step, phase):
    i = torch.arange(rows * columns, dtype=torch.float64)
    return torch.sin(step * i**2 + phase).reshape(rows, columns)


V9 = {
    "linear": [1.20084384347, 2.53859760346, 5.61005912294, 1.83089471919, 1.13940925208, 7.229040565],
    "cosine": [1.30531025496, 2.39210763939, 5.51507322316, 1.9134017519, 1.18631192011, 11.136915741],
    "sigmoid": [1.54253930829, 2.44143985182, 5.4687989989, 2.12262890125, 1.30420305074, 17.5172258924],
}
V9_GRADIENTS = {
    "linear": ([-0.202629748971, 0.10594879737, 0.248685487832, -0.441660984217, 0.319019106627], 1.46004511654),
    "cosine": ([-0.0880437596515, 0.210711615483, 0.167876718586, -0.337730875249, 0.236046419913], 1.65394279495),
    "sigmoid": ([0.0189821448105, 0.319824464526, 0.120557095837, -0.240527652465, 0.13976942268], 1.33410440829),
}


@pytest.mark.parametrize("g", V9)
def test_published_heads_of_every_angular_function(g):
    x, w, y = chirp(4, 5, 1.3, 0.4), chirp(5, 3, 0.8, 0.9).T, torch.tensor([0, 2, 1, 1])
    heads = [
        losses.create("w-softmax", 5, 3, g=g),
        losses.create("ga-softmax", 5, 3, g=g, m=2),
        losses.create("ga-softmax", 5, 3, g=g, m=4),
        losses.create("ga-softmax", 5, 3, g=g, m=4, annealer=constant(5.0)),
        losses.create("s-softmax", 5, 3, g=g, s=1.0),
        losses.create("s-softmax", 5, 3, g=g, s=30.0),
    ]
    assert [filled(head, w)(x, y).item() for head in heads] == pytest.approx(V9[g], rel=1e-10)
    psi = heads[2].psi(tensor([0.5, 1.0, 2.0]))
    torch.testing.assert_close(
        heads[2].eta(tensor([0.5, 1.0])), heads[2].spec.g(tensor([0.5, 1.0])), rtol=0, atol=1e-14
    )
    assert psi[1].item() == pytest.approx({"linear": -1.54647908947, "cosine": -1.34635637914}.get(g, -1.16137739979))
    _, (features, weight) = gradients(heads[2], x, y)
    row, norm = V9_GRADIENTS[g]
    assert features[0].tolist() == pytest.approx(row, abs=1e-10)
    assert weight.norm().item() == pytest.approx(norm, rel=1e-10)


SPHEREFACE_PLUS = {
    1: (2.05834349951, 2.68495092881),
    2: (2.30589167321, 2.93249910251),
    3: (2.53038357876, 3.15699100806),
    4: (2.80261351514, 3.42922094444),
}


def test_published_sphereface_plus():
    x = tensor([[0.5, -1, 2], [1, 1, 0.2], [-0.7, 0.4, 0.9]])
    w = tensor([[1, 2, 2], [-1, 0.5, 3], [0.3, -2, 1], [2, -1, -1]])
    y = torch.tensor([0, 2, 2])

    def loss(name, **options):
        return filled(losses.create(name, 3, 4, **options), w)(x, y).item()

    for m, (plain, plus) in SPHEREFACE_PLUS.items():
        assert loss("a-softmax", m=m, annealer=constant(5.0)) == pytest.approx(plain, rel=1e-10)
        assert loss("sphereface+", m=m, annealer=constant(5.0)) == pytest.approx(plus, rel=1e-10)
    energies = {2.0: 0.626607429301, 0.0: -0.275051769202}
    for power, energy in energies.items():
        for path in ("dense", "chunked"):
            both = loss("sphereface+", m=1, energy_power=power, energy_weight=3.0, path=path)
            assert both - loss("a-softmax", m=1) == pytest.approx(3 * energy, rel=1e-9)
    assert loss("am-softmax", s=30) == pytest.approx(37.1991788884, rel=1e-10)


# ------------------------------------------------------------------------------------------------ plain losses

# Every member once more, from the angles, one pair at a time. Each gives the loss of every sample.


def angles(x, w):
    return torch.stack([torch.stack([torch.acos(a @ b / (a.norm() * b.norm())) for b in w]) for a in x])


def entropy(logits, y):
    return torch.stack([torch.exp(row - row[k]).sum().log() for row, k in zip(logits, y, strict=True)])


def times(m, g=torch.cos):
    def psi(t, *_):
        k = 0
        while m * t.item() > (k + 1) * PI and k + 1 < m:
            k += 1
        return g(m * t - k * PI) - 2 * k

    return psi


def plus(m, beyond="tangent"):
    def psi(t, *_):
        limit = {"clip": PI - m, "fallback": PI - m, "easy": PI / 2, "raw": 4.0, "tangent": PI - 2 * m}[beyond]
        if t.item() < limit:
            return t.cos() * math.cos(m) - t.sin() * math.sin(m)
        line = -math.cos(m) - (t - PI + 2 * m) * math.sin(m)
        return {"clip": 0 * t - 1, "fallback": t.cos() - m * math.sin(m), "easy": t.cos(), "tangent": line}[beyond]

    return psi


def cosine(t, *_):
    return t.cos()


def linear(t, *_):
    return 1 - 2 * t / PI


def square(t, *_):
    return t.cos() ** 2 * (1 if t.item() < PI / 2 else -1)


def sigmoid(k):
    def g(t, *_):
        e, end = torch.exp(t / k - PI / (2 * k)), math.exp(-PI / (2 * k))
        return (1 + end) / (1 - end) * (1 - e) / (1 + e)

    return g


def blended(weight, psi, g=cosine):
    return lambda t, *more: (weight * g(t) + psi(t, *more)) / (1 + weight)


def family(psi, eta=cosine, scale=None):
    """Logits of the family: ``psi(angle, norm, label)``, ``eta(angle, own angle)``, scale of a number or the norm."""

    def logits(x, p, y):
        t = angles(x, p["weight"])
        s = p.get("learned_scale", scale)
        rows = []
        for i, k in enumerate(y.tolist()):
            n = x[i].norm()
            row = [psi(t[i, j], n, k) if j == k else eta(t[i, j], t[i, k]) for j in range(len(t[i]))]
            rows.append(torch.stack(row) * (n if s is None else s))
        return torch.stack(rows)

    return logits


def raw(psi=cosine):
    """Logits with the lengths of weights and features, and a bias where there is one."""

    def logits(x, p, y):
        rows = []
        for a, k in zip(x, y.tolist(), strict=True):
            row = []
            for j, b in enumerate(p["weight"]):
                t = torch.acos(a @ b / (a.norm() * b.norm()))
                row.append(a.norm() * b.norm() * (psi(t) if j == k else t.cos()))
            rows.append(torch.stack(row) + p.get("bias", 0))
        return torch.stack(rows)

    return logits


def closest(psi, centres, scale):
    def logits(x, p, y):
        t = angles(x, p["weight"]).unflatten(1, (-1, centres)).amin(2)
        return torch.stack(
            [
                torch.stack([scale * (psi(t[i, j]) if j == k else t[i, j].cos()) for j in range(len(t[i]))])
                for i, k in enumerate(y.tolist())
            ]
        )

    return logits


def curriculum(x, p, y, m=0.5, s=8.0, progress=0.3):
    t = angles(x, p["weight"])
    own = torch.stack([t[i, k].cos().detach() for i, k in enumerate(y)])
    progress = 0.01 * own.mean() + 0.99 * progress

    def eta(other, mine):
        c = other.cos()
        return c if c.item() <= math.cos(mine.item() + m) else c * (progress + c)

    return family(plus(m, "fallback"), eta, s)(x, p, y)


def circles(x, p, y, m=0.25, s=8.0):
    c = angles(x, p["weight"]).cos()
    own = F.one_hot(y, c.shape[1]).bool()
    near, far = (1 + m - c.detach()).clamp(min=0), (c.detach() + m).clamp(min=0)
    return torch.where(own, s * near * (c - (1 - m)), s * far * (c - m))


def quality(x, p, y, m=0.4, s=8.0, mean=2.0, std=0.5):
    n = x.detach().norm(dim=1)
    mean, std = 0.99 * mean + 0.01 * n.mean(), 0.99 * std + 0.01 * n.std()

    def psi(t, norm, _):
        z = (0.333 * (norm.detach() - mean) / (std + 1e-3)).clamp(-1, 1)
        return torch.cos(torch.clamp(t - m * z, 0, PI)) - m * (1 + z)

    return family(psi, scale=s)(x, p, y)


def magnitude(x, p, y):
    def margin(n):
        return 0.45 + 0.35 * (n.clamp(10, 110) - 10) / 100

    logits = family(lambda t, n, _: torch.cos(torch.clamp(t + margin(n), max=PI)), scale=8.0)(x, p, y)
    a = x.norm(dim=1).clamp(10, 110)
    return entropy(logits, y) + 35 * (1 / a + a / 110**2)


def binary(version, m):
    def bend(u):
        return 2 * ((u + 1) / 2) ** 3 - 1

    def values(x, p, y):
        t, b = angles(x, p["weight"]), p["common_bias"]
        found = []
        for i, k in enumerate(y.tolist()):
            turned = {"C": t[i, k], "A": t[i, k] + m, "M": t[i, k] * m}[version].clamp(max=PI)
            shift = m if version == "C" else 0.0
            loss = 0.7 * torch.log1p(torch.exp(-8 * (bend(turned.cos()) - shift) - b))
            for j in range(len(t[i])):
                if j != k:
                    loss = loss + 0.3 * torch.log1p(torch.exp(8 * (bend(t[i, j].cos()) + shift) + b))
            found.append(50 / 8 * loss)
        return torch.stack(found)

    return values


def soft_norm(x, p, y):
    logits = family(cosine, lambda t, _: torch.cos(t / 1.4))(x, p, y)
    return 2 / 3 * entropy(logits, y) + 0.01 * (x.norm(dim=1) - 3).abs()


def with_energy(x, p, y, m=4, weight=2.0, power=3.0):
    w = F.normalize(p["weight"])
    energy = [sum((w[k] - w[j]).norm() ** -power for j in range(len(w)) if j != k) / (len(w) - 1) for k in y.tolist()]
    return entropy(family(times(m))(x, p, y), y) + weight * torch.stack(energy)


def hinge(power):
    def values(x, p, y):
        f = x @ p["weight"].T + p["bias"]
        sign = 2 * F.one_hot(y, f.shape[1]) - 1
        return (1 - sign * f).clamp(min=0).pow(power).sum(1)

    return values


def with_pairs(x, p, y, m=2.5):
    pairs = [
        (a - b).norm() ** 2 / 2 if k == j else (m - (a - b).norm()).clamp(min=0) ** 2 / 2
        for (a, k), (b, j) in itertools.combinations(zip(x, y.tolist(), strict=True), 2)
    ]
    return entropy(raw()(x, p, y), y) + 0.1 * sum(pairs) / len(pairs)


def with_centres(x, p, y):
    return entropy(raw()(x, p, y), y) + 0.5 / 2 * torch.stack([(a - 0.5).square().sum() for a in x])


def triplets(y, squared):
    """Mined (anchor, positive, negative): the closest negative farther than the positive, or the farthest."""
    for a, p in itertools.permutations(range(len(y)), 2):
        others = [n for n in range(len(y)) if y[n] != y[a]]
        if y[a] != y[p] or not others:
            continue
        farther = [n for n in others if squared[a, n] > squared[a, p]]
        n = min(farther, key=lambda n: squared[a, n]) if farther else max(others, key=lambda n: squared[a, n])
        yield a, p, n


def mined(x, p, y):
    u = F.normalize(x)
    squared = (u.unsqueeze(0) - u.unsqueeze(1)).square().sum(2)
    of = [[] for _ in y]
    for a, p_, n in triplets(y.tolist(), squared.detach()):
        of[a].append((squared[a, p_] - squared[a, n] + 0.2).clamp(min=0))
    return torch.stack([torch.stack(terms).mean() if terms else x.sum() * 0 for terms in of])


@dataclass
class Case:
    """A member with options and its plain version: the logits of a softmax, or the loss of every sample."""

    kind: str  # what it normalises: none, weight, both; aware: both, but the feature norm counts elsewhere
    logits: Callable | None = None
    losses: Callable | None = None
    options: dict = field(default_factory=dict)
    state: dict = field(default_factory=dict)
    factor: float = 1.0  # on the features
    exact: bool = True  # whether its gradient is that of its value; brackets and norms that count as constants are not

    def values(self, x, p, y):
        return entropy(self.logits(x, p, y), y) if self.losses is None else self.losses(x, p, y)


S = {"s": 8.0}
EXACT = {"gradient": "exact"}
PER_CLASS = [0.25, 0.5, 0.75, 0.125]
# Named by the member and what is special; every registered member must occur.
CASES = {
    "margin-softmax": Case(
        "both", family(lambda t, *_: t.cos() - 0.2, scale=8.0), options={**S, "psi": "additive-cosine", "m": 0.2}
    ),
    "margin-softmax raw": Case(
        "none", raw(times(3)), options={"psi": "multiplicative", "m": 3, "unit_weights": False, "bias": True}
    ),
    "softmax": Case("none", raw()),
    "softmax no bias": Case("none", raw(), options={"bias": False}),
    "l-softmax": Case("none", raw(times(3)), options={"m": 3}),
    "l-softmax annealed": Case("none", raw(blended(2.0, times(4))), options={"annealer": constant(2.0)}),
    "a-softmax": Case("weight", family(times(4))),
    "a-softmax 2.5": Case("weight", family(times(2.5)), options={"m": 2.5}),
    "a-softmax annealed": Case("weight", family(blended(2.0, times(4))), options={"annealer": constant(2.0)}),
    "w-softmax": Case("weight", family(cosine)),
    "w-softmax sigmoid": Case("weight", family(sigmoid(0.7), sigmoid(0.7)), options={"g": "sigmoid", "k": 0.7}),
    "ga-softmax": Case("weight", family(times(4, linear), linear)),
    "ga-softmax s": Case(
        "both", family(times(2, sigmoid(0.3)), sigmoid(0.3), 8.0), options={**S, "m": 2, "g": Sigmoid(0.3)}
    ),
    "ga-softmax annealed": Case(
        "weight", family(blended(2.0, times(3, linear), linear), linear), options={"m": 3, "annealer": constant(2.0)}
    ),
    "s-softmax": Case("both", family(cosine, scale=8.0), options=S),
    "s-softmax square": Case("both", family(square, square, 8.0), options={**S, "g": "sqcos", "learn_scale": True}),
    "m-softmax": Case("both", family(times(1.5), scale=8.0), options={**S, **EXACT}),
    "normface": Case("both", family(cosine)),
    "cosface": Case("both", family(lambda t, *_: t.cos() - 0.35, scale=8.0), options=S),
    **{
        f"arcface {beyond}": Case(
            "both", family(plus(1.2, beyond), scale=8.0), options={**S, "m": 1.2, "beyond": beyond}
        )
        for beyond in margins.BEYOND
    },
    "arcface by class": Case(
        "both", family(lambda t, _, k: plus(PER_CLASS[k])(t), scale=8.0), options={**S, "m": PER_CLASS}
    ),
    "combined": Case(
        "both",
        family(lambda t, *_: (0.9 * t + 0.4).clamp(max=PI).cos() - 0.15, scale=8.0),
        options={**S, "m1": 0.9, "m2": 0.4, "m3": 0.15},
    ),
    "sphereface-r v0": Case("weight", family(times(1.4)), options={"version": "v0", "feature_norm": "none", **EXACT}),
    "sphereface-r v1": Case(
        "both", family(lambda t, *_: (1.4 * t).clamp(max=PI).cos(), scale=8.0), options={**S, "version": "v1", **EXACT}
    ),
    "sphereface-r v2": Case("both", family(cosine, lambda t, _: torch.cos(t / 1.4), 8.0), options={**S, **EXACT}),
    "sphereface-r soft": Case(
        "aware", losses=soft_norm, options={"feature_norm": "soft", "s": 3.0, "loss_weight": 2.0, **EXACT}
    ),
    **{
        f"sphereface2 {version}": Case("both", losses=binary(version, m), options={**S, **EXACT, "version": version})
        for version, m in (("C", 0.4), ("A", 0.5), ("M", 1.7))
    },
    "sphereface-plus": Case("weight", losses=with_energy, options={"energy_weight": 2.0, "energy_power": 3.0}),
    "subcenter-arcface": Case("both", closest(plus(0.5), 3, 8.0), options=S),
    "adaface": Case("aware", quality, options=S, state={"norm_mean": 2.0, "norm_std": 0.5}, exact=False),
    "magface": Case("aware", losses=magnitude, options=S, factor=15.0),
    "curricularface": Case("both", curriculum, options=S, state={"progress": 0.3}),
    "circle": Case("both", circles, options=S, exact=False),
    "hinge": Case("none", losses=hinge(1)),
    "hinge squared": Case("none", losses=hinge(2), options={"power": 2}),
    "contrastive": Case("none", losses=with_pairs, options={"m": 2.5}),
    "center": Case("none", losses=with_centres, options={"centre_weight": 0.5}, state={"class_centres": 0.5}),
    "triplet": Case("both", losses=mined),
}
every = pytest.mark.parametrize("case", CASES)
seeds = pytest.mark.parametrize("seed", range(3))


def build(case, dim=5, classes=4, **more):
    head = losses.create(case.split()[0], dim, classes, **{**CASES[case].options, **more}).double()
    with torch.no_grad():
        for name, value in CASES[case].state.items():
            getattr(head, name).fill_(value)
    return head


def draw(seed, case, batch=8, dim=5, classes=4):
    """Head, features and labels at random, biases included."""
    generator = torch.Generator().manual_seed(seed)
    head = build(case, dim, classes)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    with torch.no_grad():
        head.weight.copy_(normal(*head.weight.shape))
        if head.bias is not None:
            head.bias.copy_(normal(classes) / 2)
    x = CASES[case].factor * normal(batch, dim)
    return head, x, torch.randint(classes, (batch,), generator=generator), generator


BOTH_PATHS = [(case, path) for case in CASES for path in ("dense", "chunked") if (case, path) != ("triplet", "chunked")]


@pytest.mark.parametrize(("case", "path"), BOTH_PATHS)
@seeds
def test_members_against_plain_losses(case, path, seed):
    head, x, y, generator = draw(seed, case)
    head.spec = dataclasses.replace(head.spec, path=path, reduction="none")
    parameters = {"weight": head.weight} | dict(head.named_parameters())
    leaves = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
    features, inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = CASES[case].values(inputs, leaves, y)
    found = head(features, y)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    share = torch.rand(len(y), generator=generator, dtype=torch.float64)
    trained = dict(head.named_parameters())
    grads = torch.autograd.grad(found @ share, [features, *trained.values()])
    others = torch.autograd.grad(expected @ share, [inputs, *(leaves[name] for name in trained)])
    for grad, other in zip(grads, others, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-8, atol=1e-9)


def test_a_negative_as_far_as_the_positive_is_not_farther():
    x, y = tensor([[1, 0], [0, 1], [0, -1], [-1, 0]]), torch.tensor([0, 0, 1, 1])
    # From (1, 0) the negatives are at 2, as far as the positive, and at 4, which is taken.
    head = losses.create("triplet", 2, 2, reduction="none").double()
    torch.testing.assert_close(head(x, y), mined(x, {}, y))
    assert head(x, y).tolist() == [0.0] * 4


# ------------------------------------------------------------------------------------------------ gradient rules

# The formula is that of one weight a class and a scale that is not trained.
SKIPPED = ("subcenter-arcface", "normface", "s-softmax square")


@pytest.mark.parametrize(
    "case", [c for c, entry in CASES.items() if entry.logits and entry.kind != "none" and c not in SKIPPED]
)
@pytest.mark.parametrize("path", ["dense", "chunked"])
def test_detached_gradients_are_their_formula(case, path):
    head, x, y, _ = draw(5, case)
    head = filled(build(case, gradient="cgd", path=path), head.weight)
    w = head.weight.detach()
    f = CASES[case].logits(x, {"weight": w}, y)
    upstream = (f.softmax(1) - F.one_hot(y, 4)) / len(y)
    c, n, lengths = angles(x, w).cos(), x.norm(dim=1), w.norm(dim=1)
    scale = n if head.s is None else torch.full_like(n, head.s)
    by_x, by_w = torch.zeros_like(x), torch.zeros_like(w)
    for i, j in itertools.product(range(len(x)), range(len(w))):
        u, v = x[i] / n[i], w[j] / lengths[j]
        by_x[i] += upstream[i, j] * scale[i] * (v - c[i, j] * u) / n[i]
        if head.s is None:
            by_x[i] += upstream[i, j] * f[i, j] / n[i] * u
        by_w[j] += upstream[i, j] * scale[i] * (u - c[i, j] * v) / lengths[j]
    assert_same(gradients(head, x, y), (entropy(f, y).mean(), (by_x, by_w)), rtol=1e-8)


def test_detaching_changes_only_margins_that_turn_the_slope():
    _, x, y, _ = draw(0, "cosface")
    for name in ("cosface", "normface", "s-softmax", "arcface", "combined"):
        torch.manual_seed(1)
        exact = losses.create(name, 5, 4, s=8.0).double()
        detached = losses.create(name, 5, 4, s=8.0, gradient="cgd").double()
        detached.load_state_dict(exact.state_dict())
        (value, grads), (other, others) = gradients(exact, x, y), gradients(detached, x, y)
        assert value == other
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(grads, others, strict=True)) == (
            name not in ("arcface", "combined")
        )


def caffe(x, w, y, m, weight):
    """Gradients of the released layer; the rows of ``w`` are unit vectors."""
    t = angles(x, w)
    f = family(blended(weight, times(m)))(x, {"weight": w}, y)
    upstream = (f.softmax(1) - F.one_hot(y, len(w))) / len(y)
    by_x, by_w = torch.zeros_like(x), upstream.T @ x
    for i, k in enumerate(y.tolist()):
        for j in range(len(w)):
            if j != k:
                by_x[i] += upstream[i, j] * w[j]
                continue
            theta = t[i, k].item()
            branch = min(int(m * theta / PI), math.ceil(m) - 1)
            psi = math.cos(m * theta - branch * PI) - 2 * branch
            slope = m * math.sin(m * theta - branch * PI) / math.sin(theta)
            along = (psi - math.cos(theta) * slope) / x[i].norm()
            direction = (slope * w[k] + along * x[i]) / math.hypot(slope, along)
            by_x[i] += upstream[i, k] * (direction + weight * w[k]) / (1 + weight)
    return by_x, by_w


@seeds
@pytest.mark.parametrize("path", ["dense", "chunked"])
@pytest.mark.parametrize(("m", "weight"), [(4, 0.0), (4, 5.0), (1.5, 2.0), (1, 0.0)])
def test_gradients_of_the_released_layer(m, weight, path, seed):
    head, x, y, _ = draw(seed, "a-softmax")
    w = F.normalize(head.weight.detach())
    head = filled(ASoftmax(5, 4, m=m, annealer=constant(weight), gradient="caffe", path=path), 3 * head.weight)
    found = gradients(head, x, y)
    torch.testing.assert_close(head.weight.detach(), w, msg="the rows become unit vectors in place")
    exact = filled(ASoftmax(5, 4, m=m, annealer=constant(weight)), w)
    value, (features, _) = gradients(exact, x, y)
    assert_same(found, (value, caffe(x, w, y, m, weight)), rtol=1e-8)
    assert torch.allclose(found[1][0], features, rtol=1e-8, atol=1e-10) == (m == 1)
    head.eval()
    assert head(x, y).item() == pytest.approx(value.item(), rel=1e-12)


def test_the_released_layer_is_exact_where_the_margin_vanishes():
    head, x, y, _ = draw(0, "a-softmax")
    differences = []
    for weight in (10.0, 1e3, 1e8):
        exact, released = (
            gradients(filled(ASoftmax(5, 4, annealer=constant(weight), gradient=g), head.weight), x, y)[1][0]
            for g in ("exact", "caffe")
        )
        differences.append((exact - released).abs().max().item())
    assert differences[0] > 30 * differences[1] > 1e-6
    assert differences[2] < 1e-7


# ------------------------------------------------------------------------------------------------ another library

# Ours, theirs. Their angular margins are in degrees and fall back to cos t - m sin m past pi; ours takes a line there.
PML = {
    "arcface": (
        {"s": 32.0, "m": 0.9, "beyond": "fallback"},
        lambda theirs: theirs.ArcFaceLoss(5, 6, margin=math.degrees(0.9), scale=32),
    ),
    "cosface": ({"s": 32.0, "m": 0.3}, lambda theirs: theirs.CosFaceLoss(5, 6, margin=0.3, scale=32)),
    **{f"a-softmax {m}": ({"m": m}, lambda theirs, m=m: theirs.SphereFaceLoss(5, 6, margin=m)) for m in (1, 2, 3, 4)},
    **{
        f"l-softmax {m}": ({"m": m}, lambda theirs, m=m: theirs.LargeMarginSoftmaxLoss(5, 6, margin=m))
        for m in (1, 2, 3, 4)
    },
    # Their temperature is the inverse of a scale that is not trained.
    "normface": ({"s": 20.0, "learn_scale": False}, lambda theirs: theirs.NormalizedSoftmaxLoss(5, 6, 0.05)),
    "subcenter-arcface": (
        {"s": 32.0, "m": 0.4, "k": 2, "beyond": "fallback"},
        lambda theirs: theirs.SubCenterArcFaceLoss(
            num_classes=5, embedding_size=6, margin=math.degrees(0.4), scale=32, sub_centers=2
        ),
    ),
}


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # theirs, with numpy 2
@pytest.mark.parametrize("case", PML)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_heads_agree_with_pytorch_metric_learning(case, dtype):
    options, make = PML[case]
    head = losses.create(case.split()[0], 6, 5, **options).to(dtype)
    theirs = make(pytest.importorskip("pytorch_metric_learning.losses"))
    theirs.W.data = head.weight.detach().T.clone()
    x, y = torch.randn(12, 6, dtype=dtype), torch.randint(5, (12,))
    other = x.clone().requires_grad_()
    value = theirs(other, y)
    value.backward()
    tolerance = {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    assert_same(gradients(head, x, y), (value.detach(), (other.grad, theirs.W.grad.T)), **tolerance)


def compare_pairs(ours, theirs, x):
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours, theirs = ours(a), theirs(b)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(
        *(torch.autograd.grad(v, t)[0] for v, t in ((ours, a), (theirs, b))), rtol=1e-8, atol=1e-9
    )


@seeds
def test_pairs_agree_with_pytorch_metric_learning(seed):
    parts = ("losses", "distances", "reducers")
    pml_losses, distances, reducers = (pytest.importorskip(f"pytorch_metric_learning.{part}") for part in parts)
    torch.manual_seed(seed)
    x, y = torch.randn(9, 4, dtype=torch.float64), torch.tensor([0, 0, 1, 1, 1, 2, 2, 3, 0])
    theirs = pml_losses.CircleLoss(m=0.4, gamma=20)
    compare_pairs(lambda x: losses.circle_pairs(x, y, m=0.4, s=20.0, pairs="anchor"), lambda x: theirs(x, y), x)
    # Theirs takes every triplet or those given; ours mines them, so they are given.
    squared = torch.cdist(F.normalize(x), F.normalize(x)).square()
    a, p, n = (torch.tensor(part) for part in zip(*triplets(y.tolist(), squared), strict=True))
    theirs = pml_losses.TripletMarginLoss(0.2, distance=distances.LpDistance(power=2), reducer=reducers.MeanReducer())
    compare_pairs(lambda x: losses.TripletLoss(4, 4).double()(x, y), lambda x: theirs(x, y, (a, p, n)), x)
    compare_pairs(
        lambda x: losses.triplet(*(F.normalize(x)[i] for i in (a, p, n))).mean(), lambda x: theirs(x, y, (a, p, n)), x
    )

    # Theirs adds d and margin - d, or d^2 and margin - d^2: the squares of each kind come from its terms one by one.
    def their_contrastive(x):
        distance = distances.LpDistance(normalize_embeddings=False)
        loss = pml_losses.ContrastiveLoss(0, 2.5, distance=distance, reducer=reducers.DoNothingReducer())
        terms = loss(x, y)
        return sum(terms[kind]["losses"].square().sum() for kind in ("pos_loss", "neg_loss")) / 4

    i, j = torch.triu_indices(9, 9, 1)
    compare_pairs(lambda x: losses.contrastive(x[i], x[j], y[i] == y[j], 2.5).sum(), their_contrastive, x)


# ------------------------------------------------------------------------------------------------ special cases

# A member that is another one at some value: both, and whether to the last bit.
SAME = [
    ("a-softmax", {"m": 1}, "w-softmax", {}, True),
    ("a-softmax", {"m": 1}, "margin-softmax", {}, True),
    ("l-softmax", {"m": 1}, "softmax", {"bias": False}, False),
    ("ga-softmax", {"m": 1}, "w-softmax", {"g": "linear"}, True),
    ("ga-softmax", {"m": 1, "g": "sigmoid", "k": 0.7}, "w-softmax", {"g": "sigmoid", "k": 0.7}, True),
    *[("ga-softmax", {"m": m, "g": "cosine"}, "a-softmax", {"m": m}, True) for m in (2, 2.5, 4)],
    ("ga-softmax", {**S, "m": 1.5, "g": "cosine"}, "m-softmax", {**S, **EXACT}, True),
    ("a-softmax", {"annealer": constant(1e15)}, "w-softmax", {}, False),
    ("l-softmax", {"annealer": constant(1e15)}, "softmax", {"bias": False}, False),
    ("arcface", {**S, "annealer": constant(1e15)}, "s-softmax", S, False),
    ("m-softmax", {**S, "m": 1, **EXACT}, "s-softmax", S, True),
    ("cosface", {**S, "m": 0}, "s-softmax", S, True),
    ("arcface", {**S, "m": 0}, "s-softmax", S, True),
    ("normface", {**S, "learn_scale": False}, "s-softmax", S, True),
    ("combined", {**S, "m1": 1, "m2": 0.4, "m3": 0}, "arcface", {**S, "beyond": "clip", "m": 0.4}, False),
    ("combined", {**S, "m1": 1, "m2": 0, "m3": 0.3}, "cosface", {**S, "m": 0.3}, False),
    ("combined", {**S, "m1": 1.4, "m2": 0, "m3": 0}, "sphereface-r", {**S, "version": "v1", **EXACT}, False),
    *[("sphereface-r", {**S, "m": 1, "version": v, **EXACT}, "s-softmax", S, v != "v2") for v in ("v0", "v1", "v2")],
    ("sphereface-r", {"m": 2.5, "version": "v0", "feature_norm": "none", **EXACT}, "a-softmax", {"m": 2.5}, True),
    ("sphereface-r", {**S, "m": 1.4, "version": "v0"}, "m-softmax", {**S, "m": 1.4}, True),
    ("subcenter-arcface", {**S, "k": 1}, "arcface", S, True),
    ("adaface", {**S, "h": 0.0}, "cosface", {**S, "m": 0.4}, False),
    ("magface", {**S, "m": (0.5, 0.5), "norm_weight": 0.0}, "arcface", {**S, "beyond": "clip"}, False),
    ("sphereface-plus", {"energy_weight": 0.0}, "a-softmax", {}, True),
    ("contrastive", {"pair_weight": 0.0}, "softmax", {}, True),
    ("center", {"centre_weight": 0.0}, "softmax", {}, True),
    # So many samples that every class is drawn.
    ("cosface", {**S, "sample_rate": 0.5}, "cosface", S, False),
    ("subcenter-arcface", {**S, "sample_rate": 0.5}, "subcenter-arcface", S, False),
    ("softmax", {"sample_rate": 0.5}, "softmax", {}, False),
    *[
        ("margin-softmax", {**S, "psi": psi, "m": m}, name, {**S, "m": m}, True)
        for psi, name, m in (("additive-angle", "arcface", 0.5), ("additive-cosine", "cosface", 0.35))
    ],
]


@pytest.mark.parametrize("same", SAME, ids=lambda c: f"{c[0]}{list(c[1].values())}={c[2]}")
def test_special_cases(same):
    name, options, other_name, other_options, bitwise = same
    _, x, y, _ = draw(6, "softmax")
    one = losses.create(name, 5, 4, **options).double()
    other = losses.create(other_name, 5, 4, **other_options).double()
    other.load_state_dict(one.state_dict(), strict=False)
    found, expected = gradients(one, x, y), gradients(other, x, y)
    if bitwise:
        assert found[0] == expected[0]
        assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
    assert_same(found, expected, rtol=1e-9)


def test_l_softmax_with_unit_weights_is_a_softmax():
    head, x, y, _ = draw(7, "l-softmax")
    w = F.normalize(head.weight.detach())
    for m in (2, 3, 4):
        one, (features, weight) = gradients(filled(losses.create("l-softmax", 5, 4, m=m), w), x, y)
        other, (other_features, tangent) = gradients(filled(ASoftmax(5, 4, m=m), w), x, y)
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(features, other_features)
        torch.testing.assert_close(weight - (weight * w).sum(1, keepdim=True) * w, tangent)


def test_adaface_goes_from_arcface_to_cosface_with_the_norm():
    head, x, y, _ = draw(8, "adaface")
    x = F.normalize(x)
    for norm, name in ((20.0, "cosface"), (1e-3, "arcface")):
        ada = filled(losses.create("adaface", 5, 4, s=8.0), head.weight, norm_mean=20.0, norm_std=1.0).eval()
        other = filled(losses.create(name, 5, 4, s=8.0, m=0.4), head.weight)
        assert_same(gradients(ada, norm * x, y), gradients(other, norm * x, y), rtol=1e-8, atol=1e-7)
    ada = filled(losses.create("adaface", 5, 4), head.weight, norm_mean=20.0, norm_std=1.0)
    theta = tensor([0.5, 1.0, 2.0])
    for norm, expected in ((20, theta.cos() - 0.4), (1, (theta + 0.4).cos()), (90, (theta - 0.4).cos() - 0.8)):
        torch.testing.assert_close(ada.psi(theta, norm=norm), expected)


def test_annealing_goes_from_the_plain_loss_to_the_full_margin():
    for name, plain in (("a-softmax", "w-softmax"), ("arcface", "s-softmax"), ("ga-softmax", "w-softmax")):
        options = {"g": "linear"} if name == "ga-softmax" else {"s": 64.0} if name == "arcface" else {}

        def loss(weight, name=name):
            return filled(losses.create(name, 4, 4, annealer=constant(weight)), W)(X, Y).item()

        assert loss(1e12) == pytest.approx(filled(losses.create(plain, 4, 4, **options), W)(X, Y).item(), rel=1e-9)
        assert loss(0.0) == pytest.approx(filled(losses.create(name, 4, 4), W)(X, Y).item(), rel=1e-12)
        values = [loss(weight) for weight in (0.0, 0.5, 2.0, 10.0, 100.0)]
        assert values == sorted(values, reverse=True)


# ------------------------------------------------------------------------------------------------ two classes

# Boundary of the first class: what is 0 at the angles t1 and t2 to both centres; the gap between both classes' regions.
BOUNDARIES = {
    "w-softmax": ({}, lambda t1, t2: math.cos(t1) - math.cos(t2), lambda t12: 0.0),
    **{
        f"a-softmax {m}": (
            {"m": m},
            lambda t1, t2, m=m: math.cos(m * t1) - math.cos(t2),
            lambda t12, m=m: (m - 1) / (m + 1) * t12,
        )
        for m in (2, 4, 1.5)
    },
    "a-softmax annealed": (
        {"annealer": constant(5.0)},
        lambda t1, t2: blended(5.0, times(4))(tensor(t1)).item() - math.cos(t2),
        None,
    ),
    "cosface": (
        {},
        lambda t1, t2: math.cos(t1) - 0.35 - math.cos(t2),
        lambda t12: 2 * math.asin(0.35 / (2 * math.sin(t12 / 2))),
    ),
    "arcface": ({}, lambda t1, t2: math.cos(t1 + 0.5) - math.cos(t2), lambda t12: 0.5),
    "sphereface-r": ({}, lambda t1, t2: math.cos(t1) - math.cos(t2 / 1.4), lambda t12: 0.4 / 2.4 * t12),
    # s_n^2 + (s_p - 1)^2 = 2 m^2
    "circle": ({"m": 0.5}, lambda t1, t2: math.cos(t2) ** 2 + (math.cos(t1) - 1) ** 2 - 2 * 0.5**2, None),
}
PUBLISHED_GAPS = {
    "a-softmax 2": 30.0,
    "a-softmax 4": 54.0,
    "a-softmax annealed": 21.2294283,
    "cosface": 28.6577551,
    "arcface": 28.6478898,
    "sphereface-r": 15.0,
}


@pytest.mark.parametrize("case", BOUNDARIES)
@pytest.mark.parametrize("theta12", [0.95, PI / 2, 2.2])
def test_boundaries_between_two_classes(case, theta12):
    options, boundary, gap = BOUNDARIES[case]
    head = losses.create(case.split()[0], 2, 2, **options)
    found = losses.binary_margin(head.psi, theta12, head.eta)
    if gap is not None:
        assert found == pytest.approx(gap(theta12), abs=1e-7)
    if theta12 == PI / 2 and case in PUBLISHED_GAPS:
        assert math.degrees(found) == pytest.approx(PUBLISHED_GAPS[case], abs=1e-6)
    t1 = (theta12 - found) / 2
    assert boundary(t1, theta12 - t1) == pytest.approx(0, abs=1e-7)
    # On the boundary both logits are equal, for either class.
    head = filled(head, tensor([[2.0, 0.0], [3 * math.cos(theta12), 3 * math.sin(theta12)]]))
    x = 1.7 * tensor([[math.cos(t), math.sin(t)] for t in (t1, theta12 - t1)])
    y = torch.tensor([0, 1])
    torch.testing.assert_close(*head.margin_logits(x, y).T, rtol=0, atol=1e-4)
    assert head(x, y).item() == pytest.approx(math.log(2), abs=1e-4)


def test_boundary_of_softmax_is_a_plane():
    head = filled(Softmax(4, 2), W[:2], bias=B[:2])
    normal, offset = W[0] - W[1], B[0] - B[1]
    x = X - ((X @ normal + offset) / normal.square().sum()).unsqueeze(1) * normal
    torch.testing.assert_close(*head.logits(x).T, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------ shape of the targets

THETA = torch.linspace(0, PI, 501, dtype=torch.float64)


@pytest.mark.parametrize("beyond", ["easy", "raw"])
@pytest.mark.parametrize("name", ["arcface", "subcenter-arcface", "magface", "curricularface"])
def test_unprotected_targets_rise_somewhere(name, beyond):
    assert (losses.create(name, 8, 5, beyond=beyond).psi(THETA).diff() > 1e-6).any()


def test_a_triplet_has_no_target_value():
    with pytest.raises(ArgumentError, match="the triplet loss compares features, not classes"):
        losses.create("triplet", 8, 5).psi(THETA)


@pytest.mark.parametrize(
    ("name", "options", "slope"),
    [
        ("w-softmax", {}, lambda t: -math.sin(t)),
        ("ga-softmax", {"m": 4}, lambda t: -8 / PI),
        ("a-softmax", {"m": 3}, lambda t: -3 * abs(math.sin(3 * t))),
        ("a-softmax", {"m": 3, "annealer": constant(5.0)}, lambda t: -(5 * math.sin(t) + 3 * abs(math.sin(3 * t))) / 6),
        ("cosface", {}, lambda t: -math.sin(t)),
        ("arcface", {"beyond": "clip"}, lambda t: -math.sin(t + 0.5) if t < PI - 0.5 else 0.0),
        ("arcface", {}, lambda t: -math.sin(min(t, PI - 1.0) + 0.5)),
        ("sphereface2", {}, lambda t: -3 * ((1 + math.cos(t)) / 2) ** 2 * math.sin(t)),
        ("sphereface-r", {}, lambda t: -math.sin(t)),
        ("combined", {"m1": 0.9, "m2": 0.2, "m3": 0.1}, lambda t: -0.9 * math.sin(0.9 * t + 0.2)),
    ],
)
def test_slopes_of_targets_are_their_closed_forms(name, options, slope):
    found = losses.create(name, 8, 5, **options).double().slope(THETA)
    assert found.tolist() == pytest.approx([slope(t) for t in THETA.tolist()], abs=1e-11)


def test_values_of_other_classes():
    r = losses.create("sphereface-r", 4, 4, m=1.4)
    assert r.eta(tensor(2.5)).item() == pytest.approx(-0.213267275384, abs=1e-11)
    curricular = losses.create("curricularface", 4, 4)
    curricular.progress.fill_(0.5)
    theta = tensor([0.5, 1.0, 1.5])
    c, limit = theta.cos(), math.cos(0.8 + 0.5)
    torch.testing.assert_close(curricular.eta(theta, target=math.cos(0.8)), torch.where(c > limit, c * (0.5 + c), c))
    # The threshold rises again past pi: a class at 3.0 is below cos(3.5), one at 2.7 above.
    assert curricular.eta(tensor([3.0, 2.7]), target=math.cos(3.0)).tolist() == pytest.approx(
        [math.cos(3.0), math.cos(2.7) * (0.5 + math.cos(2.7))]
    )
    by_class = losses.create("arcface", 4, 4, m=PER_CLASS)
    for k, m in enumerate(PER_CLASS):
        torch.testing.assert_close(by_class.psi(theta, label=k), (theta + m).cos())


# ------------------------------------------------------------------------------------------------ invariances

few = settings(max_examples=3)
SEED = st.integers(0, 2**32 - 1)


@every
@few
@given(SEED)
def test_lengths_count_as_the_normalisation_says(case, seed):
    head, x, y, generator = draw(seed, case)
    head.eval()
    value, w = head(x, y).item(), head.weight.detach().clone()
    rows = 10 ** torch.empty(len(w), 1, dtype=torch.float64).uniform_(-6, 6, generator=generator)
    lengths = torch.empty(8, 1, dtype=torch.float64).uniform_(0.3, 3, generator=generator)
    by_features = head(x * lengths, y).item()
    assert (by_features == pytest.approx(value, rel=1e-9)) == (CASES[case].kind == "both")
    assert (filled(head, w * rows)(x, y).item() == pytest.approx(value, rel=1e-9)) == (CASES[case].kind != "none")


@every
@few
@given(SEED)
def test_directions_get_tangent_gradients(case, seed):
    head, x, y, _ = draw(seed, case)
    for rule in ("exact", "cgd"):
        head = filled(build(case, **({} if case == "triplet" else {"gradient": rule})), head.weight)
        names = [name for name, _ in head.named_parameters()]
        _, (features, *parameters) = gradients(head, x, y)
        along = (features * x).sum(1).abs().max() / (features.abs().max() * x.abs().max())
        assert (along < 1e-12) == (CASES[case].kind == "both" or case == "adaface"), "adaface detaches the norm"
        if "weight" in names:
            weight = parameters[names.index("weight")]
            along = (weight * head.weight).sum(1).abs().max() / weight.abs().max()
            assert (along < 1e-12) == (CASES[case].kind != "none")


MULTIPLIED, ADDED = (1, 1.5, 2, 2.5, 3, 4, 6), (0, 0.2, 0.5, 1.0, 2.0, 3.0)
ORDERED = [
    ("a-softmax", {}, MULTIPLIED),
    ("l-softmax", {}, (1, 2, 3, 4, 6)),
    ("ga-softmax", {}, MULTIPLIED),
    ("m-softmax", S, MULTIPLIED),
    *[("sphereface-r", {**S, "version": v}, MULTIPLIED) for v in ("v0", "v1", "v2")],
    ("cosface", S, ADDED),
    ("arcface", S, ADDED),
    ("subcenter-arcface", S, ADDED),
    ("a-softmax", {}, [constant(1 / share - 1) for share in (1e-6, 0.1, 0.5, 0.9, 1.0)]),
]


@pytest.mark.parametrize(("name", "options", "sizes"), ORDERED, ids=lambda v: v if isinstance(v, str) else "")
@few
@given(SEED)
def test_a_wider_margin_costs_more_on_every_sample(name, options, sizes, seed):
    _, x, y, _ = draw(seed, "a-softmax")
    found = []
    for size in sizes:
        key = "annealer" if isinstance(size, LambdaAnnealer) else "m"
        head = losses.create(name, 5, 4, **options, **{key: size}, reduction="none").double()
        weight = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found.append(filled(head, weight)(x, y))
    for narrow, wide in itertools.pairwise(found):
        assert (wide >= narrow - 1e-9).all()
    assert (found[-1] > found[0] + 1e-9).any()  # not at every size: all angles may be beyond the ends of two margins


@given(SEED, st.integers(2, 6), st.floats(0.5, 40))
def test_scaled_softmax_stays_above_its_bound(seed, classes, s):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(classes, 3, generator=generator, dtype=torch.float64)
    head = filled(losses.create("s-softmax", 3, classes, s=s), w)
    bound = math.log1p((classes - 1) * math.exp(-s * classes / (classes - 1)))
    balanced = torch.arange(2 * classes) % classes
    x = torch.randn(2 * classes, 3, generator=generator, dtype=torch.float64)
    for features in (x, w[balanced]):
        assert head(features, balanced).item() >= bound * (1 - 1e-12)
    any_labels = torch.randint(classes, (2 * classes,), generator=generator)
    assert head(x, any_labels).item() >= math.log1p((classes - 1) * math.exp(-2 * s))
    simplex = torch.eye(classes, dtype=torch.float64) - 1 / classes
    head = filled(losses.create("s-softmax", classes, classes, s=s), simplex)
    assert head(simplex, torch.arange(classes)).item() == pytest.approx(bound, rel=1e-9, abs=1e-15)


def test_logits_have_no_margin_and_margin_logits_only_on_the_own_class():
    norms = X.norm(dim=1, keepdim=True)
    cosines = tensor(COSINES)
    for name, scale, target in (("a-softmax", norms, times(4)), ("arcface", 64.0, plus(0.5))):
        head = filled(losses.create(name, 4, 4), W)
        torch.testing.assert_close(head.logits(X), scale * cosines, rtol=0, atol=1e-9)
        expected = cosines.clone()
        for i, label in enumerate(Y):
            expected[i, label] = target(cosines[i, label].acos())
        torch.testing.assert_close(head.margin_logits(X, Y), scale * expected, rtol=0, atol=1e-9)
    plain = filled(Softmax(4, 4), W, bias=B)
    torch.testing.assert_close(plain.logits(X), X @ W.T + B)
    torch.testing.assert_close(plain.margin_logits(X, Y), plain.logits(X))
    scaled = filled(MarginSoftmax(4, 4, s=3.0, unit_weights=False, bias=True), W, bias=B)
    torch.testing.assert_close(scaled.logits(X), 3 * (X / norms) @ W.T + B)
    torch.testing.assert_close(scaled.margin_logits(X, Y), scaled.logits(X))
    with pytest.raises(ArgumentError, match=r"^g needs unit_weights=True"):
        MarginSoftmax(4, 4, g="linear", unit_weights=False)


@pytest.mark.parametrize("case", [case for case, entry in CASES.items() if entry.logits])
def test_margin_logits_are_what_the_loss_is_made_of(case):
    head, x, y, _ = draw(9, case)
    head.eval()
    torch.testing.assert_close(F.cross_entropy(head.margin_logits(x, y), y), head(x, y), rtol=1e-9, atol=1e-10)


# ------------------------------------------------------------------------------------------------ known angles


def test_additive_margin_at_a_known_angle():
    # Two opposite classes, the sample at angle t of its own: log(1 + exp(s (cos(pi - t) - cos(t + m)))).
    t, m, s = 0.6, 0.5, 7.0
    head = filled(ArcFace(2, 2, s=s, m=m), tensor([[2.0, 0.0], [-5.0, 0.0]]))
    x = 3 * tensor([[math.cos(t), math.sin(t)]])
    expected = math.log1p(math.exp(s * (-math.cos(t) - math.cos(t + m))))
    assert head(x, torch.tensor([0])).item() == pytest.approx(expected, rel=1e-12)
    line = filled(ArcFace(1, 2, s=2.0, m=m), tensor([[3.0], [-1.0]]))
    expected = math.log1p(math.exp(2 * (-1 - math.cos(m))))
    assert line(tensor([[7.0]]), torch.tensor([0])).item() == pytest.approx(expected, rel=1e-7)


def test_a_zero_feature_has_no_preference():
    zero = torch.zeros(1, 6)
    for head in (ASoftmax(6, 3), Softmax(6, 3), ArcFace(6, 3, m=0.0)):
        loss, (features, *_) = gradients(head, zero, torch.tensor([1]))
        assert loss.item() == pytest.approx(math.log(3), rel=1e-6)
        if head.spec.unit_weights:
            assert (features == 0).all()
    # At a right angle to everything the additive margin still counts.
    loss, _ = gradients(ArcFace(6, 3, s=4.0, m=0.5), zero, torch.tensor([1]))
    expected = math.log(2 + math.exp(-4 * math.sin(0.5))) + 4 * math.sin(0.5)
    assert loss.item() == pytest.approx(expected, rel=1e-6)


# ------------------------------------------------------------------------------------------------ state


def test_published_schedules():
    released = LambdaAnnealer()
    slow = LambdaAnnealer(gamma=2.5e-5, power=35.0, minimum=0.0)
    for annealer, values in (
        (released, {1: 892.857142857, 100: 76.9230769231, 1000: 8.26446280992, 1659: 5.0, 28000: 5.0}),
        (slow, {1: 999.125393629, 1000: 421.371066384, 10000: 0.405648192073, 30000: 3.11650835828e-06}),
    ):
        for step, expected in values.items():
            assert annealer.value(torch.tensor(step)).item() == pytest.approx(expected, rel=1e-5)
            annealer.steps.fill_(step - 1)
            assert annealer.value(annealer.advance()).item() == pytest.approx(expected, rel=1e-5)
    assert released.value(torch.tensor(1658)).item() > 5
    assert LambdaAnnealer(start=2000).value().item() == 5
    off = LambdaAnnealer(base=0.0)
    assert off.value(off.advance()).item() == 0
    assert [annealer.bounds() for annealer in (released, slow, off)] == [(5.0, 1000.0), (0.0, 1000.0), (0.0, 0.0)]


def test_the_counter_advances_before_use_and_in_training_only():
    head = filled(ASoftmax(4, 4, annealer=LambdaAnnealer()), W)
    for step in (1, 2, 3):
        plain = family(blended(1000 / (1 + 0.12 * step), times(4)))(X, {"weight": W}, Y)
        expected = entropy(plain, Y).mean().item()
        assert head(X, Y).item() == pytest.approx(expected, rel=1e-6)
        assert head.annealer.steps.item() == step
    head.eval()
    for _ in range(3):
        assert head(X, Y).item() == pytest.approx(expected, rel=1e-6)
    head.train()
    head.logits(X)
    head.margin_logits(X, Y)
    head.psi(THETA)
    assert head.annealer.steps.item() == 3
    assert head.annealer.steps.dtype == torch.int64


@pytest.mark.parametrize("name", ["center", "triplet"])
def test_running_centres_move_in_training_only(name):
    head, x, y, _ = draw(10, name)
    centres = head.class_centres if name == "center" else head.weight
    data = x if name == "center" else F.normalize(x)
    expected = centres.clone()
    for k in range(4):
        own = data[y == k]
        expected[k] += 0.5 * (own - centres[k]).sum(0) / (1 + len(own))
    head.eval()(x, y)
    assert not torch.allclose(centres, expected)
    head.train()(x, y)
    torch.testing.assert_close(centres, expected)


@every
def test_parameters(case):
    head = build(case, 6, 4)
    rows = 4 * head.subcentres
    assert head.weight.shape == (rows, 6)
    names = {
        "bias": head.bias is not None,
        "learned_scale": head.learned_scale is not None,
        "common_bias": case.startswith("sphereface2"),
    }
    expected = {name for name, there in names.items() if there} | ({"weight"} if case != "triplet" else set())
    assert {n for n, _ in head.named_parameters()} == expected
    if not case.startswith("l-softmax"):
        assert head.weight.abs().max() <= math.sqrt(6 / (rows + 6))
    before = head.weight.clone()
    head.reset_parameters()
    assert not torch.equal(head.weight, before)
    if head.bias is not None:
        assert head.bias.tolist() == [0] * 4


def test_initial_weights_have_their_distributions():
    weight, bound = Softmax(40, 60).weight, math.sqrt(6 / 100)
    assert scipy.stats.kstest(weight.detach().flatten().numpy(), "uniform", (-bound, 2 * bound)).pvalue > 1e-3
    weight = losses.create("l-softmax", 40, 60).weight
    assert scipy.stats.kstest(weight.detach().flatten().numpy(), "norm", (0, math.sqrt(2 / 40))).pvalue > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("case", ["softmax", "a-softmax 2.5", "arcface clip", "adaface", "sphereface2 C"])
def test_compiled_by_inductor_gives_the_same_numbers(case):
    torch._dynamo.reset()
    head = build(case).float()
    # The weight falls by 40 % from the first step to the second: a backward that reads the counter late is far off.
    head.annealer = LambdaAnnealer(base=10, gamma=0.5, power=3, minimum=0)
    compiled = torch.compile(copy.deepcopy(head), fullgraph=True)
    x, y = torch.randn(6, 5), torch.tensor([0, 1, 2, 3, 3, 1])
    for _ in range(3):
        assert_same(gradients(compiled, x, y), gradients(head, x, y), rtol=1e-4, atol=1e-5)


def test_training_with_a_margin_separates_classes():
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(60) % 3
    x = torch.eye(3)[y] * 3 + torch.randn(60, 3, generator=generator) * 0.3
    heads = {
        "softmax": {},
        "a-softmax": {"annealer": LambdaAnnealer()},
        "arcface": {},
        "sphereface2": {},
        "m-softmax": {},
        "hinge": {},
    }
    for name, options in heads.items():
        head = losses.create(name, 3, 3, **options)
        optimiser = torch.optim.Adam(head.parameters(), lr=0.05)
        for _ in range(60):
            optimiser.zero_grad()
            head(x, y).backward()
            optimiser.step()
        assert (head.logits(x).argmax(1) == y).all(), name


def test_names_and_repr():
    assert losses.SphereFace is ASoftmax
    assert losses.AMSoftmax is losses.CosFace
    for alias, kind in (("sphereface", ASoftmax), ("Arc_Softmax", ArcFace), ("centre-loss", losses.CenterLoss)):
        assert isinstance(losses.create(alias, 4, 3), kind)
    assert repr(ArcFace(4, 3)) == "ArcFace(dim=4, classes=3, s=64.0, m=0.5, path='dense')"
    assert "s=None, m=4" in repr(ASoftmax(4, 3))
    assert "s=10 (learned), path" in repr(losses.NormFace(4, 3))
    assert "m=per class" in repr(ArcFace(4, 4, m=PER_CLASS))
    assert "gradient='cgd'" in repr(losses.SphereFaceR(4, 3))
