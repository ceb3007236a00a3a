"""Digits of losses at near pairs, near centres and poles, against references in float64 that take differences."""

import copy
import warnings

import pytest
import torch

import hypersphere as hs


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(name, *sizes, seed=1, **options):
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scales that are small on purpose
        return hs.losses.create(name, *sizes, **options)


def off(found, wanted):
    """Largest error by the largest number."""
    found, wanted = found.detach().double(), wanted.detach()
    return float((found - wanted).abs().max() / wanted.abs().max())


# ------------------------------------------------------------------------------------------------ pairs


@pytest.mark.parametrize("norm", [10, 100, 1000])
@pytest.mark.parametrize("one_class", [True, False])
def test_contrastive_keeps_the_digits_of_near_pairs_of_long_features(norm, one_class):
    """Three pairs 1e-2 apart, of one class and of two, at equal and opposite directions."""
    start = norm * torch.nn.functional.normalize(draw(3, 16), dim=1)
    x = torch.cat([start, start + 1e-2 * torch.nn.functional.normalize(draw(3, 16, seed=1), dim=1)]).float()
    y = torch.tensor([0, 1, 2, 0, 1, 2]) if one_class else torch.arange(6)
    leaf = x.clone().requires_grad_()
    penalty = build("contrastive", 16, 6, m=1.0, pair_weight=1.0).penalty(hs.losses.Batch.of(leaf, y))
    (gradient,) = torch.autograd.grad(penalty, leaf)
    wide = x.double().requires_grad_()
    i, j = torch.triu_indices(6, 6, 1)
    distance = (wide[i] - wide[j]).norm(dim=1)
    wanted = (torch.where(y[i] == y[j], distance**2, (1 - distance).relu() ** 2) / 2).mean()
    (expected,) = torch.autograd.grad(wanted, wide)
    assert off(penalty, wanted) < 1e-5
    assert off(gradient, expected) < 1e-5


# ------------------------------------------------------------------------------------------------ centres


@pytest.mark.parametrize("path", ["dense", "chunked"])
@pytest.mark.parametrize("power", [2.0, 1.0, 0.0])
@pytest.mark.parametrize(("angle", "tolerance"), [(1e-2, 1e-4), (1e-3, 1e-3), (3e-4, 3e-3), (1e-5, 0.1)])
def test_the_energy_of_near_centres_has_the_digits_that_directions_leave(path, power, angle, tolerance):
    """A chord z of directions in float32 has a relative error of some 1e-7 / z, and so has the force."""
    head = build("sphereface-plus", 16, 6, path=path, energy_power=power)
    near = at_angle(head.weight[1].detach().double(), torch.tensor(angle, dtype=torch.float64), 1)
    with torch.no_grad():
        head.weight[3] = near.float()
    y = torch.tensor([1, 1, 3, 0])
    found = head.penalty(hs.losses.Batch.of(torch.ones(4, 16), y)).sum()
    (gradient,) = torch.autograd.grad(found, head.weight)
    weight = head.weight.detach().double().requires_grad_()
    units = torch.nn.functional.normalize(weight, dim=1)
    chords = (units[y].unsqueeze(1) - units).norm(dim=2)
    others = torch.arange(6) != y.unsqueeze(1)
    chords = torch.where(others, chords, 1.0)
    wanted = (chords**-power if power else -chords.log()).masked_fill(~others, 0).sum() / 5
    (expected,) = torch.autograd.grad(wanted, weight)
    assert off(found, wanted) < tolerance and off(gradient, expected) < tolerance


def test_the_energy_of_equal_centres_is_finite():
    for power in (0.0, 2.0, 20.0):
        head = build("sphereface-plus", 16, 6, energy_power=power)
        with torch.no_grad():
            head.weight[3] = head.weight[1]
        found = head.penalty(hs.losses.Batch.of(torch.ones(2, 16), torch.tensor([1, 0]))).sum()
        (gradient,) = torch.autograd.grad(found, head.weight)
        assert bool(found.isfinite()) and bool(gradient.isfinite().all())


# ------------------------------------------------------------------------------------------------ types


def test_the_common_bias_of_sphereface2_is_not_rounded_where_it_is_divided():
    head = build("sphereface2", 8, 5, s=30.0).to(torch.bfloat16)
    assert head.offset().dtype == torch.float32
    assert float(head.offset().detach()) == pytest.approx(float(head.common_bias.detach()) / 30.0, rel=1e-6)


def test_schedules_have_the_digits_of_their_head():
    """A third of the way of a ramp and of an annealer: in a head in float64, to its precision."""
    x, y = draw(4, 8), torch.tensor([0, 1, 2, 3])
    found = []
    for size, start, gamma in (
        (hs.losses.Ramp(0.0, 1.0, length=3), 7.0, 0.3),
        (hs.losses.Ramp(0.0, 1.0, milestones=(1, 5, 6)), 7.0, 0.3),
        (1 / 3, 7.0 / 1.3, 0.0),
    ):
        annealer = hs.losses.LambdaAnnealer(start, gamma, minimum=0.0)
        found.append(float(build("cosface", 8, 5, s=4.0, m=size, annealer=annealer).double()(x, y).detach()))
    assert found[:2] == pytest.approx([found[2]] * 2, rel=1e-13)


# ------------------------------------------------------------------------------------------------ poles

MEMBERS = [
    ("arcface", {"s": 8.0}, lambda t: (t + 0.5).clamp(max=torch.pi).cos()),
    ("arcface", {"s": 8.0, "m": [0.5] * 7}, lambda t: (t + 0.5).clamp(max=torch.pi).cos()),
    ("combined", {"s": 8.0, "m1": 0.9, "m2": 0.3}, lambda t: (0.9 * t + 0.3).clamp(max=torch.pi).cos() - 0.2),
    ("subcenter-arcface", {"s": 8.0, "k": 2}, lambda t: (t + 0.5).clamp(max=torch.pi).cos()),
    ("m-softmax", {"s": 8.0, "m": 1.5, "gradient": "exact"}, lambda t: (1.5 * t).cos()),
    ("ga-softmax", {"s": 8.0, "m": 1.5}, lambda t: 1 - 2 * 1.5 * t / torch.pi),
]


def at_angle(vector, angle, seed):
    """A vector at an angle to another one, of length 3."""
    unit = torch.nn.functional.normalize(vector, dim=0)
    other = draw(len(unit), seed=seed)
    other = torch.nn.functional.normalize(other - (other @ unit) * unit, dim=0)
    return 3 * (angle.cos() * unit + angle.sin() * other)


def reference(head, x, y, psi):
    """The loss of a softmax member written out, angles taken from differences of directions."""
    weight = head.weight.detach().double().requires_grad_()
    u, w = (torch.nn.functional.normalize(v, dim=1) for v in (x, weight))
    w = w.unflatten(0, (head.classes, -1))
    cosines, closest = (u[:, None, None] * w).sum(3).max(2)
    own = w[y, closest.gather(1, y[:, None])[:, 0]]
    theta = 2 * torch.atan2((u - own).norm(dim=1), (u + own).norm(dim=1))
    others = head.spec.g(cosines.clamp(-1 + 1e-15, 1 - 1e-15).acos()) if head.spec.g.of_angle else cosines
    logits = 8 * others.scatter(1, y[:, None], psi(theta)[:, None])
    loss = torch.nn.functional.cross_entropy(logits, y, reduction="none")
    return loss, *torch.autograd.grad(loss.sum(), [x, weight])


@pytest.mark.parametrize("path", ["dense", "chunked"])
@pytest.mark.parametrize(("name", "options", "psi"), MEMBERS)
def test_gradients_next_to_the_centre_of_a_class_have_their_digits(name, options, psi, path):
    head = build(name, 24, 7, reduction="none", path=path, **options)
    angles = torch.tensor([1e-1, 1e-2, 1e-3, 1e-4, 1e-5])
    y = torch.tensor([0, 1, 2, 3, 3])
    rows = head.weight.detach().double().view(7, -1, 24)[:, 0]
    x = torch.stack([at_angle(rows[c], a, int(c)) for c, a in zip(y, angles.double(), strict=True)]).float()
    leaf = x.clone().requires_grad_()
    loss = head(leaf, y)
    found = torch.autograd.grad(loss.sum(), [leaf, head.weight])
    shared = head(leaf, torch.nn.functional.one_hot(y, 7).float())
    (by_shares,) = torch.autograd.grad(shared.sum(), leaf)
    wanted, by_features, by_weight = reference(head, x.double().requires_grad_(), y, psi)
    torch.testing.assert_close(loss.detach().double(), wanted.detach(), rtol=1e-5, atol=1e-6)
    for i in range(len(y)):
        assert off(found[0][i], by_features[i]) < 1e-4, float(angles[i])
        assert off(by_shares[i], by_features[i]) < 3e-7 / float(angles[i]) + 1e-5, float(angles[i])
    assert off(found[1], by_weight) < 1e-4
    torch.testing.assert_close(shared, loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", ["dense", "chunked"])
@pytest.mark.parametrize("psi", ["additive-cosine", "circle"])
def test_a_plain_function_of_angles_that_is_blended_in_has_its_digits(psi, path):
    """The margin is one of cosines; the linear function beside it falls with slope 2 / pi at the centre, too."""
    options = {"s": 16.0, "m": 0.1, "psi": psi, "g": "linear", "path": path, "reduction": "sum"}
    annealer = hs.losses.LambdaAnnealer(base=3.0, gamma=0.0, power=1.0, minimum=3.0)
    head = build("margin-softmax", 12, 7, annealer=annealer, **options)
    y = torch.tensor([0, 1, 2])
    angles = torch.tensor([1e-2, 1e-3, 1e-4], dtype=torch.float64)
    x = torch.stack([at_angle(w, angle, 5) for w, angle in zip(head.weight[:3].detach().double(), angles, strict=True)])
    found, wanted = by_features(head, x, y, torch.float32), by_features(head, x.float(), y, torch.float64)
    assert off(found, wanted) < 1e-3


@pytest.mark.parametrize("path", ["dense", "chunked"])
def test_values_next_to_the_opposite_of_a_class_have_their_digits(path):
    """ArcFace as written down, past pi: a rising target, whose slope at pi is that at 0.5."""
    head = build("arcface", 24, 7, s=8.0, m=0.5, beyond="raw", reduction="none", path=path)
    y = torch.arange(4)
    angles = torch.pi - torch.tensor([1e-1, 1e-2, 1e-3, 1e-4], dtype=torch.float64)
    x = torch.stack([at_angle(head.weight[c].detach().double(), a, int(c)) for c, a in zip(y, angles, strict=True)])
    leaf = x.float().requires_grad_()
    loss = head(leaf, y)
    (found,) = torch.autograd.grad(loss.sum(), leaf)
    wide = leaf.detach().double().requires_grad_()
    wanted, by_features, _ = reference(head, wide, y, lambda t: (t + 0.5).cos())
    torch.testing.assert_close(loss.detach().double(), wanted.detach(), rtol=1e-6, atol=1e-6)
    for i in range(4):
        assert off(found[i], by_features[i]) < 1e-4, float(angles[i])


@pytest.mark.parametrize("path", ["dense", "chunked"])
def test_compiled_code_has_the_same_digits(path):
    torch._dynamo.reset()
    head = build("arcface", 24, 7, s=8.0, reduction="none", path=path)
    y = torch.tensor([0, 1, 1])
    x = torch.stack(
        [at_angle(head.weight[c].detach().double(), torch.tensor(1e-4).double(), i) for i, c in enumerate(y)]
    )
    found = []
    for call in (head, torch.compile(head, backend="aot_eager", fullgraph=True)):
        leaf = x.float().requires_grad_()
        found.append(torch.autograd.grad(call(leaf, y).sum(), [leaf, head.weight]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["arcface", "ga-softmax", "subcenter-arcface"])
def test_shares_have_finite_gradients_at_the_poles(name):
    """On a class, opposite to it, and nowhere."""
    head = build(name, 16, 5).eval()
    own = head.weight.detach().view(5, -1, 16)[:, 0]
    shares = torch.softmax(draw(5, 5), 1).float()
    for x in (own, -own, 0 * own, 1e-30 * own):
        leaf = x.clone().requires_grad_()
        for gradient in torch.autograd.grad(head(leaf, shares), [leaf, head.weight]):
            assert bool(gradient.isfinite().all())


@pytest.mark.parametrize(
    ("name", "options"),
    [("l-softmax", {"m": (1, 3, 4)}), ("arcface", {"weight_gradient": "raw"}), ("adaface", {})],
)
def test_compiled_steps_take_weights_as_they_are(name, options):
    """Weights that are no directions, or are so already, are given to the angles as they are: one graph still."""
    torch._dynamo.reset()
    x, y = draw(6, 8).float(), torch.arange(6) % 5
    found = []
    for compiles in (False, True):
        sizes = {key: hs.losses.Ramp(*m) if key == "m" else m for key, m in options.items()}
        head = build(name, 8, 5, **sizes).train()
        call = torch.compile(head, backend="aot_eager", fullgraph=True) if compiles else head
        leaf = x.clone().requires_grad_()
        found.append(torch.autograd.grad(call(leaf, y), [leaf, head.weight]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


# ------------------------------------------------------------------------------------------------ large logits


@pytest.mark.parametrize("scale", [1e2, 1e4])
@pytest.mark.parametrize("labels", ["hard", "soft"])
@pytest.mark.parametrize("path", ["dense", "chunked"])
def test_probabilities_of_large_logits_add_up_to_one(path, labels, scale):
    """Two classes nearly alike: what is left of their logits is small, and the sum of the gradients by them is not."""
    weight = draw(7, 5)
    weight[2] = weight[1] + draw(5, seed=1) / scale
    x = ((weight[1] + 0.3 * draw(16, 5, seed=2)) * scale).float()
    y = torch.zeros(16, dtype=torch.int64)
    head = build("softmax", 5, 7, path=path)
    with torch.no_grad():
        head.weight.copy_(weight)
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    given = y if labels == "hard" else torch.nn.functional.one_hot(y, 7).float()
    (by_x,) = torch.autograd.grad(head(leaf, given), leaf)
    loss = torch.nn.functional.cross_entropy(wide @ head.weight.detach().double().T, y)
    assert off(by_x, torch.autograd.grad(loss, wide)[0]) < 2e-6


@pytest.mark.parametrize("name", ["softmax", "hinge", "center", "contrastive"])
@pytest.mark.parametrize("labels", ["hard", "soft"])
@pytest.mark.parametrize("path", ["dense", "chunked"])
@pytest.mark.parametrize("size", [0.0, 1e-25, 1e15])
def test_linear_logits_have_their_gradient_at_features_of_any_size(name, labels, path, size):
    if labels == "soft" and name in ("center", "contrastive"):
        pytest.skip("no soft labels")
    weights = {"center": {"centre_weight": 0.0}, "contrastive": {"pair_weight": 0.0}}.get(name, {})
    head = build(name, 4, 5, path=path, **weights).eval()
    x = (size * draw(2, 4)).float().requires_grad_()
    wide = x.detach().double().requires_grad_()
    logits = wide @ head.weight.detach().double().T + head.bias.detach().double()
    y = logits.argmin(1)  # where no gradient vanishes
    (by_x,) = torch.autograd.grad(head(x, torch.nn.functional.one_hot(y, 5).float() if labels == "soft" else y), x)
    if name == "hinge":
        signs = 1 - 2 * torch.nn.functional.one_hot(y, 5)
        loss = (1 + signs * logits).relu().sum(1).mean()
    else:
        loss = torch.nn.functional.cross_entropy(logits, y)
    assert off(by_x, torch.autograd.grad(loss, wide)[0]) < 1e-6


# ------------------------------------------------------------------------------------------------ float64 as reference


def by_features(head, x, y, dtype):
    """Gradient by the features of a copy of a head in a type."""
    leaf = x.to(dtype).requires_grad_()
    return torch.autograd.grad(copy.deepcopy(head).to(dtype)(leaf, y), leaf)[0].double()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("l-softmax", {"m": 1, "label_smoothing": 0.3}),
        ("l-softmax", {"m": 2, "label_smoothing": 0.3}),
        ("margin-softmax", {"m": 0.25, "psi": "circle", "unit_weights": False}),
        ("a-softmax", {"m": 2.5, "gradient": "caffe"}),
    ],
)
def test_cosines_that_rounding_takes_past_one_keep_their_gradient(name, options):
    head = build(name, 57, 10, **options)
    if head.spec.unit_weights:
        head.weight.data = torch.nn.functional.normalize(head.weight.data)
    angle, rows = torch.tensor(1e-4, dtype=torch.float64), head.weight.detach().double()
    near = [at_angle(row, angle, seed) for seed, row in enumerate(rows)]
    x, y = 7.8 * torch.stack(near).float(), torch.arange(10)
    assert off(by_features(head, x, y, torch.float32), by_features(head, x, y, torch.float64)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_long_feature_leaves_the_pairs_of_the_others_their_digits(dtype):
    x = draw(1, 16) + 1e-2 * draw(12, 16, seed=1)
    x[0] *= 1e7
    x = x.to(dtype).requires_grad_()
    y = torch.arange(12) % 3
    penalty = build("contrastive", 16, 3, pair_weight=1.0).to(dtype).penalty(hs.losses.Batch.of(x, y))
    wide, (i, j) = x.detach().double().requires_grad_(), torch.triu_indices(12, 12, 1)
    wanted = hs.losses.contrastive(wide[i], wide[j], y[i] == y[j]).mean()
    rows = y > 0  # of other classes than the long one
    found, expected = torch.autograd.grad(penalty, x)[0][rows], torch.autograd.grad(wanted, wide)[0][rows]
    assert off(found, expected) < (1e-5 if dtype == torch.float32 else 1e-7)


@pytest.mark.parametrize("spread", [1e-2, 1e-3])
def test_triplets_of_near_features_are_those_of_their_digits(spread):
    x, y = (10 * draw(8) + spread * draw(12, 8, seed=1)).float(), torch.arange(12) % 4
    head = build("triplet", 8, 4)
    assert off(by_features(head, x, y, torch.float32), by_features(head, x, y, torch.float64)) < 1e-5


def test_triplets_of_long_anchors_keep_the_digits_of_their_difference():
    a, p, n = 1e4 * draw(200, 8), torch.zeros(200, 8), torch.full((200, 8), 1e-2)
    anchor = a.float()
    wanted = hs.losses.triplet(anchor.double(), p.double(), n.double())
    assert off(hs.losses.triplet(anchor, p, n), wanted) < 1e-6


@pytest.mark.parametrize("labels", ["hard", "soft"])
@pytest.mark.parametrize(("name", "classes", "parameter"), [("softmax", 2, "bias"), ("sphereface2", 6, "common_bias")])
def test_the_gradient_of_a_16_bit_bias_is_rounded_once(name, classes, parameter, labels):
    """What targets and others add to it cancels here in part."""
    for seed in range(20):
        head = build(name, 6, classes, seed=seed).bfloat16()
        y = torch.randint(classes, (8,), generator=torch.Generator().manual_seed(seed))
        x, given = draw(8, 6, seed=seed).bfloat16(), y
        if labels == "soft":
            given = torch.nn.functional.one_hot(y, classes).bfloat16()
        (found,) = torch.autograd.grad(head(x, given), getattr(head, parameter))
        wide = copy.deepcopy(head).double()
        (wanted,) = torch.autograd.grad(wide(x.double(), y), getattr(wide, parameter))
        assert off(found, wanted) < 5e-3


@pytest.mark.parametrize("size", [1e-25, 1e25])
@pytest.mark.parametrize("path", ["dense", "chunked"])
@pytest.mark.parametrize("name", ["cosface", "arcface", "a-softmax"])
def test_directions_of_any_norm_are_compared(name, path, size):
    head, x, y = build(name, 8, 6, path=path).eval(), draw(12, 8), torch.arange(12) % 6
    wanted = head(x.float(), y)
    found = head((size * x).float(), y) if name != "a-softmax" else wanted  # whose scale is the norm
    assert off(found, wanted) < 1e-5
    head.weight.data *= size
    assert off(head(x.float(), y), wanted) < 1e-5
