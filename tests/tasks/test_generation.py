"""Generation: the two players' losses and gradients, spectral norms, energy on one player, scores, grids and runs."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import re
import shutil
import sys
import types

import numpy as np
import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from helpers.paths import ROOT
from hypersphere import recipe, report
from hypersphere.data import DataError, load
from hypersphere.energy import DiscriminatorMHE, energies, hyperspherical_energy, select
from hypersphere.errors import ArgumentError
from hypersphere.evaluate import Outputs, evaluations, measure
from hypersphere.losses import GANLoss, losses
from hypersphere.metrics import class_balance, feature_distance, frechet_distance, generation_score
from hypersphere.models import create, models
from hypersphere.report.sections import sections
from hypersphere.runs import RunError, RunFolder, load_run
from hypersphere.runs import load as load_system
from hypersphere.tasks.generation import evaluation as generation
from hypersphere.tasks.generation import figures as sample_figures
from hypersphere.tasks.generation import models as gans
from hypersphere.train import Trainer

WA = torch.tensor([[1, 2, 2], [-1, 0.5, 3], [0.3, -2, 1], [2, -1, -1]], dtype=torch.float64)
CPU = torch.device("cpu")
GRAY = (1, 8, 8)


def tiny(shape=GRAY, **options):
    torch.manual_seed(3)
    return create("dcgan", shape, **{"widths": (3, 5), "latent": 4, "std": None, **options})


def real(count=6, shape=GRAY, dtype=torch.float32):
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(1), dtype=dtype) * 2 - 1


# --------------------------------------------------------------------------------------------------- networks


def plan(module):
    """Kinds, channels, kernels and strides of the layers with weights, in order."""
    found = []
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            found.append(("dense", layer.in_features, layer.out_features))
        elif isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            kind = "deconv" if isinstance(layer, nn.ConvTranspose2d) else "conv"
            found.append((kind, layer.out_channels, layer.kernel_size[0], layer.stride[0]))
    return found


@pytest.mark.parametrize(
    ("widen", "strided"), [("stride1", (64, 128, 256)), ("stride2", (128, 256, 512))], ids=["printed", "released"]
)
def test_published_layers(widen, strided):
    with torch.device("meta"):
        model = create("dcgan", (3, 32, 32), widen=widen)
        pairs = zip((64, 128, 256), strided, strict=True)
        down = [layer for a, b in pairs for layer in (("conv", a, 3, 1), ("conv", b, 4, 2))]
        assert plan(model.discriminator) == [*down, ("conv", 512, 3, 1), ("dense", 4 * 4 * 512, 1)]
        up = [("deconv", width, 4, 2) for width in (256, 128, 64)]
        assert plan(model.generator) == [("dense", 128, 4 * 4 * 512), *up, ("conv", 3, 3, 1)]
        kinds = [type(layer) for layer in model.generator]
        assert kinds.count(nn.BatchNorm2d) == 3 and kinds.count(nn.BatchNorm1d) == 1
        assert nn.BatchNorm1d not in map(type, create("dcgan", (3, 32, 32), dense_norm=False).generator)
        slopes = {layer.negative_slope for layer in model.modules() if isinstance(layer, nn.LeakyReLU)}
        assert slopes == {0.1}


@pytest.mark.parametrize(
    ("shape", "widths"),
    [
        ((1, 28, 28), (64, 128, 256)),
        ((3, 32, 32), (64, 128, 256, 512)),
        ((3, 64, 64), (64, 128, 256, 512)),
        ((1, 8, 8), (64, 128)),
        ((1, 8, 32), (64, 128)),
    ],
)
def test_default_widths_fit_the_image(shape, widths):
    with torch.device("meta"):
        model = create("dcgan", shape)
        assert model.dim == widths[-1]
        convs = [layer.out_channels for layer in model.discriminator.modules() if isinstance(layer, nn.Conv2d)]
        assert tuple(sorted(set(convs))) == widths
        images = model.generator.eval()(torch.empty(2, 128, device="meta"))
        assert images.shape == (2, *shape)
        assert model.discriminator(images).shape == (2,) and model(images).shape == (2, widths[-1])


@pytest.mark.parametrize(
    ("shape", "options", "argument"),
    [
        ((1, 7, 8), {}, "widths"),
        ((8, 8), {}, "shape"),
        ((3, 512), {}, "shape"),
        *((GRAY, {"widths": widths}, "widths") for widths in ((4,), (4, 4, 4, 4, 4), (4, 0))),
        (GRAY, {"latent": 0}, "latent"),
        (GRAY, {"widen": "no"}, "widen"),
        (GRAY, {"slope": -1.0}, "slope"),
        (GRAY, {"std": 0.0}, "std"),
    ],
)
def test_wrong_options(shape, options, argument):
    with pytest.raises(ArgumentError) as caught:
        create("dcgan", shape, **options)
    assert caught.value.argument == argument


@pytest.mark.parametrize("std", [0.02, None])
def test_first_weights_have_the_deviation(std):
    torch.manual_seed(0)
    model = create("dcgan", (3, 16, 16), widths=(32, 64), std=std)
    dense, deconv = model.generator[0], model.generator[4]
    # With stride 2 and kernel 4 each pixel is a sum over 2x2 taps of every channel.
    fans = {dense: 128, deconv: 64 * 4, model.discriminator.features[0]: 27, model.discriminator.features[2]: 32 * 16}
    assert isinstance(deconv, nn.ConvTranspose2d)
    for layer, fan in fans.items():
        expected = (2 / fan) ** 0.5 if std is None else std
        assert float(layer.weight.detach().std()) == pytest.approx(expected, rel=0.1)
        assert layer.bias is None or not layer.bias.any()


def test_bytes_there_and_back():
    byte = torch.arange(256)
    assert torch.equal(gans.to_bytes((byte - 127.5) / 128), byte.to(torch.uint8))
    plain = recipe.load("digits-gan").data.normalise
    assert plain == "half"


# ----------------------------------------------------------------------------------------------------- losses


def test_published_losses():
    score, fake = torch.tensor([1, -0.5], dtype=torch.float64), torch.tensor([0.2, -2], dtype=torch.float64)
    head = losses.create("gan", 4, 10)
    assert float(head.discriminator(score, fake)) == pytest.approx(1.10620277606, abs=1e-11)
    assert float(head.generator(fake)) == pytest.approx(1.36253344021, abs=1e-11)


@pytest.mark.parametrize(
    ("form", "d", "g"),
    [
        ("non-saturating", lambda r, f: -math.log(1 / (1 + math.exp(-r))), lambda f: math.log(1 + math.exp(-f))),
        ("hinge", lambda r, f: max(0, 1 - r), lambda f: -f),
        ("wasserstein", lambda r, f: -r, lambda f: -f),
    ],
)
def test_forms_against_plain_sums(form, d, g):
    r, f = [0.3, 2.5, -1.2], [-0.4, 1.7, -3.0]
    fakes = {"non-saturating": lambda f: math.log(1 + math.exp(f)), "hinge": lambda f: max(0, 1 + f)}
    on_fake = fakes.get(form, lambda f: f)
    expected = sum(d(x, None) for x in r) / 3 + sum(map(on_fake, f)) / 3
    head = GANLoss(2, 2, form=form)
    assert float(head.discriminator(torch.tensor(r), torch.tensor(f))) == pytest.approx(expected, rel=1e-6)
    assert float(head.generator(torch.tensor(f))) == pytest.approx(sum(map(g, f)) / 3, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["non-saturating", "hinge", "wasserstein"])
def test_losses_of_half_precision_and_large_scores(form, dtype):
    head = GANLoss(2, 2, form=form)
    real_scores, fake = (torch.tensor([x, -x], dtype=dtype).requires_grad_() for x in (3e4, 1e4))
    total = head.discriminator(real_scores, fake) + head.generator(fake)
    assert total.dtype == torch.float32 and total.isfinite()
    for grad in torch.autograd.grad(total, [real_scores, fake]):
        assert grad.isfinite().all()


def test_a_head_without_classes():
    head = GANLoss(5, 10).double()
    features = torch.randn(3, 5, dtype=torch.float64)
    assert head.logits(features).shape == (3, 0) and head.class_vectors.shape == (0, 5)
    assert not list(head.parameters()) and not head.state_dict() and head.schedules() == {}
    with pytest.raises(ArgumentError, match="two players"):
        head(features, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="form"):
        GANLoss(5, 10, form="other")


def gradients(model, terms):
    """Gradients of a sum of losses by parameter name, zero where it has none."""
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(sum(terms), list(parameters.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(parameters.items(), found, strict=True)
    }


@pytest.mark.parametrize("spectral", [False, True])
@pytest.mark.parametrize("form", ["non-saturating", "hinge"])
def test_each_player_has_the_gradient_of_its_own_game(form, spectral):
    """One forward pass of both against two separate games, each with the other player's weights as constants."""
    model = tiny(spectral=spectral).double()
    images = real(dtype=torch.float64)
    reference = copy.deepcopy(model)
    torch.manual_seed(5)
    terms = model.losses(images, torch.zeros(6), GANLoss(5, 10, form=form))
    found = gradients(model, terms)

    torch.manual_seed(5)
    noise = torch.randn(6, 4, dtype=torch.float64)
    reference.discriminator.advance()
    fake = reference.generator(noise)
    d_real, d_fake = reference.discriminator(images), reference.discriminator(fake.detach())
    if form == "hinge":
        d_loss, g_of = F.relu(1 - d_real).mean() + F.relu(1 + d_fake).mean(), torch.neg
    else:
        d_loss, g_of = -(torch.sigmoid(d_real).log() + torch.sigmoid(-d_fake).log()).mean(), lambda s: F.softplus(-s)
    expected = gradients(reference, [d_loss])
    for parameter in reference.discriminator.parameters():
        parameter.requires_grad_(False)
    g_loss = g_of(reference.discriminator(fake)).mean()
    for name, parameter in reference.generator.named_parameters():
        (expected[f"generator.{name}"],) = torch.autograd.grad(g_loss, parameter, retain_graph=True)

    torch.testing.assert_close(torch.stack(terms), torch.stack([d_loss, g_loss]))
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-12, msg=name)
        assert grad.abs().max() > 0, name


@pytest.mark.parametrize("spectral", [False, True])
def test_no_loss_reaches_the_other_player(spectral):
    model = tiny(spectral=spectral)
    d_loss, g_loss = model.losses(real(), torch.zeros(6), GANLoss(5, 10))
    for loss, other in ((d_loss, model.generator), (g_loss, model.discriminator)):
        found = torch.autograd.grad(loss, list(other.parameters()), retain_graph=True, allow_unused=True)
        assert all(grad is None for grad in found)


def test_one_step_for_both_is_two_steps_from_the_same_weights():
    """One optimiser over both players, against one for each, which is what simultaneous updates mean."""
    model = tiny()
    separate = copy.deepcopy(model)
    images, head = real(), GANLoss(5, 10)
    both = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.999))
    each = [
        torch.optim.Adam(p.parameters(), lr=0.01, betas=(0.5, 0.999))
        for p in (separate.discriminator, separate.generator)
    ]
    for step in range(3):
        torch.manual_seed(step)
        both.zero_grad()
        sum(model.losses(images, torch.zeros(6), head)).backward()
        both.step()
        torch.manual_seed(step)
        noise = torch.randn(6, 4)
        fake = separate.generator(noise)
        separate.zero_grad()
        head.discriminator(separate.discriminator(images), separate.discriminator(fake.detach())).backward()
        d_grads = [p.grad.clone() for p in separate.discriminator.parameters()]
        head.generator(separate.discriminator(fake)).backward()
        for p, grad in zip(separate.discriminator.parameters(), d_grads, strict=True):
            p.grad = grad
        for optimiser in each:
            optimiser.step()
    for (name, p), q in zip(model.named_parameters(), separate.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=2e-5, msg=name)
    assert int(model.steps) == 3


def test_another_head_is_refused():
    with pytest.raises(ArgumentError, match="must be 'gan' for a model of two players, got Softmax"):
        tiny().losses(real(), torch.zeros(6), losses.create("softmax", 5, 10))


def test_noise_is_that_of_the_default_generator():
    model, head = tiny(), GANLoss(5, 10)
    values = []
    for seed in (1, 1, 2):
        again = copy.deepcopy(model)
        torch.manual_seed(seed)
        values.append(torch.stack(again.losses(real(), torch.zeros(6), head)))
    assert torch.equal(values[0], values[1]) and not torch.equal(values[0], values[2])


@pytest.mark.parametrize("spectral", [False, True])
def test_losses_under_autocast(spectral):
    model = tiny(spectral=spectral)
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(0)
        rough = torch.stack(copy.deepcopy(model).losses(real(), torch.zeros(6), GANLoss(5, 10)))
    torch.manual_seed(0)
    exact = torch.stack(model.losses(real(), torch.zeros(6), GANLoss(5, 10)))
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, exact, rtol=0.05, atol=0.02)


# ----------------------------------------------------------------------------------------------- spectral norm


def matrices(discriminator):
    return [x.weight.detach().flatten(1) for x in discriminator.modules() if isinstance(x, nn.Conv2d | nn.Linear)]


def test_spectral_norms_are_one():
    model = tiny(spectral=True)
    for _ in range(100):
        model.discriminator.advance()
    found = [float(torch.linalg.matrix_norm(weight, 2)) for weight in matrices(model.discriminator)]
    assert len(found) == 4
    assert found == pytest.approx([1.0] * 4, abs=1e-4)
    assert max(float(torch.linalg.matrix_norm(w, 2)) for w in matrices(tiny().discriminator)) > 1.05


def test_spectral_norm_of_a_published_matrix():
    layer = nn.Linear(3, 4, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(WA)
    sigma = float(torch.linalg.matrix_norm(WA, 2))
    assert sigma == pytest.approx(4.26152542313, abs=1e-11)
    found = gans.spectral_norm(layer)
    for _ in range(100):
        weight = found.weight
    torch.testing.assert_close(weight, WA / sigma, rtol=1e-9, atol=1e-12)


def vectors(model):
    return [b.clone() for n, b in model.named_buffers() if n.endswith(("._u", "._v"))]


def test_power_iteration_moves_once_a_step():
    model, other = tiny(spectral=True), tiny(spectral=True)
    with torch.no_grad():  # far from where the iteration stands
        for one, two in zip(model.discriminator.parameters(), other.discriminator.parameters(), strict=True):
            one.copy_(torch.randn_like(one))
            two.copy_(one)
    model.losses(real(), torch.zeros(6), GANLoss(5, 10))
    other.discriminator.advance()
    assert all(torch.equal(a, b) for a, b in zip(vectors(model), vectors(other), strict=True))
    before = vectors(model)
    energies.create("mhe-gan")(model)  # looking does not move it, in training neither
    model.train()(real())
    assert all(torch.equal(a, b) for a, b in zip(vectors(model), before, strict=True))
    other.discriminator.advance()
    assert not all(torch.equal(a, b) for a, b in zip(vectors(other), before, strict=True))


# ------------------------------------------------------------------------------------------------------ energy


@pytest.mark.parametrize("spectral", [False, True])
def test_energy_reaches_the_hidden_layers_of_the_discriminator_alone(spectral):
    model = tiny(spectral=spectral)
    energy = energies.create("mhe-gan")
    names = [layer.name for layer in energy.select(model)]
    assert names == ["discriminator.features.0", "discriminator.features.2", "discriminator.features.4"]
    assert len(select(model, output=None)) > len(names)
    energy(model).backward()
    reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    suffix = "parametrizations.weight.original" if spectral else "weight"
    assert reached == {f"{name}.{suffix}" for name in names}


@torch.no_grad()
def test_energy_is_the_sum_of_half_space_logarithmic_ones():
    model = tiny().double()
    rows = [layer.weight.flatten(1) for layer in model.discriminator.features if isinstance(layer, nn.Conv2d)]

    def plain(w):
        both = torch.cat([w, -w])
        units = both / both.norm(dim=1, keepdim=True)
        distances = torch.cdist(units, units)[~torch.eye(len(units), dtype=torch.bool)]
        return -distances.log().mean()

    assert float(DiscriminatorMHE()(model)) == pytest.approx(float(sum(map(plain, rows))), rel=1e-9)
    full = DiscriminatorMHE(s=2.0, half_space=False, include="*.features.0", hidden_weight=3.0)
    assert float(full(model)) == pytest.approx(3 * float(hyperspherical_energy(rows[0], 2.0)), rel=1e-9)


def test_spectral_norm_changes_no_energy():
    model = tiny().double()
    energy = DiscriminatorMHE()
    before = energy(model)
    for layer in model.discriminator.modules():
        if isinstance(layer, nn.Conv2d):
            gans.spectral_norm(layer)
    torch.testing.assert_close(energy(model), before)


def released(w, eps=1e-4):
    """The released code's term, entry by entry."""
    n = len(w)
    doubled = torch.cat([w, -w], dim=1)
    units = doubled / (doubled.square().sum(1, keepdim=True) + eps).sqrt()
    entries = [
        -math.log((2 - 2 * float(units[i] @ units[j]) if i < j else 0.0) + eps) for i in range(n) for j in range(n)
    ]
    return sum(entries) / n**2


def test_energy_of_the_released_code():
    energy = DiscriminatorMHE(preset="released")
    assert float(energy(WA)) == pytest.approx(5.53363158218, abs=1e-10)
    assert released(WA) == pytest.approx(5.53363158218, abs=1e-10)
    model = tiny().double()
    rows = [layer.weight.detach().flatten(1) for layer in model.discriminator.features if isinstance(layer, nn.Conv2d)]
    assert energy(model).item() == pytest.approx(sum(map(released, rows)), rel=1e-9)
    weight = WA.clone().requires_grad_()
    assert torch.autograd.gradcheck(energy, weight)
    bad = torch.cat([WA, WA[:1], torch.zeros(1, 3)]).float().requires_grad_()  # equal neurons, and none
    energy(bad).backward()
    assert energy(bad).isfinite() and bad.grad.isfinite().all()
    assert float(energy(torch.zeros(2, 3))) == 0


# ------------------------------------------------------------------------------------------------------ scores


def test_published_score():
    rows = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]], dtype=torch.float64)
    mean, spread = generation_score(rows, splits=1)
    assert mean == pytest.approx(1.33395510943, abs=1e-11) and spread == 0


def test_score_against_plain_loops():
    generator = np.random.default_rng(0)
    rows = generator.dirichlet(np.full(4, 0.3), size=23)
    rows[3] = (0, 0, 1, 0)
    scores = []
    for part in (rows[:7], rows[7:14], rows[14:21]):  # two are left over
        marginal = [sum(row[k] for row in part) / 7 for k in range(4)]
        total = sum(p * (math.log(p) - math.log(q)) for row in part for p, q in zip(row, marginal, strict=True) if p)
        scores.append(math.exp(total / 7))
    mean, spread = generation_score(torch.from_numpy(rows), splits=3)
    assert mean == pytest.approx(np.mean(scores), rel=1e-12)
    assert spread == pytest.approx(np.std(scores), rel=1e-9)


def test_bounds_of_the_score():
    assert generation_score(torch.eye(7).repeat(10, 1), 1)[0] == pytest.approx(7)
    assert generation_score(torch.eye(7)[:1].repeat(10, 1), 2)[0] == pytest.approx(1)
    assert generation_score(torch.full((10, 5), 0.2), 2)[0] == pytest.approx(1)
    assert generation_score(torch.ones(1, 1), 1) == (1.0, 0.0)
    for rows, splits in ((torch.rand(3), 1), (torch.rand(3, 2), 4), (torch.rand(0, 2), 1), (torch.rand(3, 2), 0)):
        with pytest.raises(ArgumentError):
            generation_score(rows, splits)


def test_distance_of_normal_distributions():
    generator = torch.Generator().manual_seed(0)

    def draw(rank):
        factor = torch.randn(5, rank, generator=generator, dtype=torch.float64)
        return torch.randn(5, generator=generator, dtype=torch.float64), factor @ factor.T

    (m, s), (n, t) = draw(5), draw(5)
    root = scipy.linalg.sqrtm((s @ t).numpy()).real  # another root of the same trace
    expected = float((m - n).square().sum()) + float(np.trace(s.numpy() + t.numpy() - 2 * root))
    assert frechet_distance(m, s, n, t) == pytest.approx(expected, rel=1e-8)
    assert frechet_distance(n, t, m, s) == pytest.approx(expected, rel=1e-8)
    # Closed form where the covariances commute: of every axis the squared difference of the deviations.
    a, b = torch.tensor([1.0, 4.0, 9.0, 0.0, 2.0]), torch.tensor([4.0, 4.0, 0.0, 0.0, 8.0])
    closed = float((m - n).square().sum()) + (1 + 0 + 9 + 0 + 2)
    turn = torch.linalg.qr(torch.randn(5, 5, generator=generator, dtype=torch.float64)).Q
    found = frechet_distance(m, turn @ a.double().diag() @ turn.T, n, turn @ b.double().diag() @ turn.T)
    assert found == pytest.approx(closed, rel=1e-6)
    assert frechet_distance(m, s, m, s) == pytest.approx(0, abs=1e-6)
    low, singular = draw(2)
    assert frechet_distance(low, singular, low, singular) == pytest.approx(0, abs=1e-6)


def test_distance_of_features():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(50, 3, generator=generator), 2 * torch.randn(40, 3, generator=generator) + 1
    ours = feature_distance(x, y)
    m, n = x.numpy().astype(float), y.numpy().astype(float)
    root = scipy.linalg.sqrtm(np.cov(m.T) @ np.cov(n.T)).real
    plain = np.square(m.mean(0) - n.mean(0)).sum() + np.trace(np.cov(m.T) + np.cov(n.T) - 2 * root)
    assert ours == pytest.approx(plain, rel=1e-6)
    assert feature_distance(x[:, :1], x[:, :1] + 3) == pytest.approx(9)
    with pytest.raises(ArgumentError, match="two rows"):
        feature_distance(x[:1], y)
    with pytest.raises(ArgumentError, match="others must have 3 columns"):
        feature_distance(x, y[:, :2])
    with pytest.raises(ArgumentError, match=r"got \(3,\), \(3, 3\), \(2,\), \(2, 2\)"):
        frechet_distance(torch.zeros(3), torch.eye(3), torch.zeros(2), torch.eye(2))


def test_balance_of_classes():
    assert class_balance(torch.tensor([5.0, 5, 5, 5])) == pytest.approx(1)
    assert class_balance(torch.tensor([0.0, 3, 0, 0])) == pytest.approx(0.25)
    shares = [0.5, 0.3, 0.2]
    expected = math.exp(-sum(p * math.log(p) for p in shares)) / 3
    assert class_balance(torch.tensor(shares)) == pytest.approx(expected, rel=1e-6)
    for bad in ([], [0.0, 0.0]):
        with pytest.raises(ArgumentError, match="shares must have shape"):
            class_balance(torch.tensor(bad))


# ------------------------------------------------------------------------------------------- samples and pictures


def test_samples_depend_on_the_seed_and_the_weights_alone():
    model = tiny()
    first = model.sample(5, seed=1)
    assert first.shape == (5, *GRAY) and first.dtype == torch.uint8 and model.training
    model.losses(real(), torch.zeros(6), GANLoss(5, 10))  # moves running statistics alone
    noise = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    images = model.generator.eval()(noise).detach()
    model.train()
    expected = np.clip(np.round(images.double().numpy() * 128 + 127.5), 0, 255)
    assert np.abs(model.sample(5, seed=1).numpy() - expected).max() == 0
    assert not torch.equal(model.sample(5, seed=2), model.sample(5, seed=1))
    assert model.sample(0, seed=1).shape == (0, *GRAY)


def test_large_samples_are_those_of_one_batch(monkeypatch):
    model = tiny()
    whole = model.sample(7, seed=1)
    monkeypatch.setattr(gans, "BATCH", 3)
    assert (whole.int() - model.sample(7, seed=1).int()).abs().max() <= 1


def test_kept_images_thin_out():
    model = tiny()
    for step in range(1, 12):
        model.steps.fill_(step)
        for _ in range(2):  # an evaluation that is repeated counts once
            model.keep(torch.full((12, *GRAY), step, dtype=torch.uint8))
    steps, images = model.kept()
    assert steps.tolist() == [1, 3, 5, 7, 9, 10, 11]
    assert images.shape == (7, gans.SHOWN, *GRAY)
    assert torch.equal(images[:, 3, 0, 2, 2], steps.to(torch.uint8))
    assert model.state_dict()["kept_steps"].tolist() == [*steps.tolist(), -1]


def test_tiles_are_the_images_in_order():
    images = np.arange(5 * 3 * 2 * 4, dtype=np.uint8).reshape(5, 3, 2, 4)
    grid = sample_figures.tiles(images, columns=3)
    assert grid.shape == (2 * 3 - 1, 3 * 5 - 1, 4)
    for index in range(5):
        row, column = divmod(index, 3)
        tile = grid[row * 3 : row * 3 + 2, column * 5 : column * 5 + 4]
        assert (tile[..., :3] == images[index].transpose(1, 2, 0)).all() and (tile[..., 3] == 255).all()
    assert not grid[2].any() and not grid[:, 4].any() and not grid[3:, 10:].any()
    grey = sample_figures.tiles(images[:, :1], columns=5)
    assert (grey[..., 0] == grey[..., 2]).all()


def test_pictures_of_a_run():
    artefacts = {
        "samples/grid": np.zeros((64, 1, 8, 8), np.uint8),
        "samples/real": np.zeros((10, 3, 8, 8), np.uint8),
        "samples/steps": np.array([20, 10]),
        "samples/progress": np.stack([np.full((10, 1, 8, 8), v, np.uint8) for v in (200, 100)]),
        "samples/classes": np.array([0.25, 0.75]),
    }
    found = {picture.title: picture for picture in sections(artefacts)["samples"].pictures}
    assert list(found) == ["generated images", "test images", "over training", "classes"]
    assert found["over training"].figure["layout"]["yaxis"]["ticktext"] == ["10", "20"]
    assert found["classes"].figure["data"][0]["y"] == [25.0, 75.0]
    for picture in found.values():
        if picture.title != "classes":
            assert picture.figure["data"][0]["source"].startswith("data:image/png;base64,")
    assert [p.title for p in sample_figures.draw({"steps": np.array([5])})] == []


# -------------------------------------------------------------------------------------------------------- runs

SHORT = ["train.tensorboard=false", "model.widths=[3,5]", "model.latent=4", "data.batch_size=16", "train.log_every=1"]


def train(folder, *overrides, name="digits-gan"):
    plan = recipe.load(name, [*(SHORT if name == "digits-gan" else ()), *overrides])
    run = RunFolder.create(folder, plan, CPU)
    trainer = Trainer(plan, run, CPU)
    return trainer, trainer.fit()


def train_classifier(folder, *overrides):
    plan = ("data.hold_out=[]", "train.steps=3", "schedule.milestones=[2]", "model.width=2", "train.tensorboard=false")
    train(folder, *plan, *overrides, name="digits-softmax")
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return train_classifier(tmp_path_factory.mktemp("classifier") / "run")


def test_a_run_with_a_classifier(tmp_path, classifier):
    options = f"evaluate.metrics=[{{name: generation, samples: 40, splits: 2, grid: 9, classifier: '{classifier}'}}]"
    trainer, metrics = train(tmp_path / "a", "train.steps=4", "evaluate.every=2", options)
    assert set(metrics) == {
        *("classifier_score", "classifier_score_std", "classifier_score_real", "classifier_frechet", "class_balance")
    }
    assert all(math.isfinite(value) for value in metrics.values())
    rows = [row for row in trainer.run.rows() if row["split"] == "train"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    terms = ("discriminator", "generator", "mhe-gan")
    assert all(row["total"] == pytest.approx(sum(row[term] for term in terms)) for row in rows)
    found = load_run(tmp_path / "a").artefacts
    assert found["samples/grid"].shape == (9, *GRAY) and found["samples/grid"].dtype == np.uint8
    assert found["samples/steps"].tolist() == [2, 4]
    assert found["samples/progress"].shape == (2, 10, *GRAY)
    assert (found["samples/progress"][1, :9] == found["samples/grid"]).all()
    assert found["samples/classes"].sum() == pytest.approx(1)

    # The same numbers by hand, from the classifier's own parts.
    judge = load_system(classifier)
    with torch.no_grad():
        features = judge.model(judge.preprocess(trainer.model.sample(40, seed=1)))
        chances = judge.head.logits(features).softmax(1)
        test = judge.model(judge.preprocess(trainer.data.test.images))
    halves = [generation_score(part, 1)[0] for part in chances.split(20)]
    assert metrics["classifier_score"] == pytest.approx(np.mean(halves), rel=1e-5)
    assert metrics["classifier_score_std"] == pytest.approx(np.std(halves), rel=1e-3, abs=1e-6)
    assert metrics["classifier_frechet"] == pytest.approx(feature_distance(features, test), rel=1e-3)
    page = report.build([tmp_path / "a"])
    assert "Generated images" in page and "over training" in page


def test_another_classifier_in_the_same_folder_is_another_judge(tmp_path):
    trainer, _ = train(tmp_path / "gan", "train.steps=1")
    found = []
    for seed in (0, 1):
        train_classifier(tmp_path / "c", f"seed={seed}")
        options = {"classifier": str(tmp_path / "c"), "samples": 40, "splits": 2}
        found.append(evaluations.create("generation", trainer.outputs(), **options)["classifier_frechet"])
        shutil.rmtree(tmp_path / "c")
    assert found[0] != found[1]


def test_the_same_seed_gives_the_same_run_also_resumed(tmp_path):
    plan = ["train.steps=4", "model.spectral=true", "train.checkpoint_every=2", "evaluate.every=2", "seed=3"]
    one, _ = train(tmp_path / "a", *plan)
    two, _ = train(tmp_path / "b", *plan)
    other, _ = train(tmp_path / "c", *plan, "seed=4")
    # A run that is stopped half way and goes on, with its vectors and its pictures.
    plan_ = recipe.load("digits-gan", [*SHORT, *plan])
    run = RunFolder.create(tmp_path / "d", plan_, CPU)
    stopped = Trainer(plan_, run, CPU)
    stopped.prepare()
    stopped.take_step()
    stopped.take_step()
    resumed = Trainer(plan_, run, CPU)
    resumed.fit()
    states = [t.model.state_dict() for t in (one, two, resumed, other)]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
        assert torch.equal(value, states[2][name]), name
    assert not torch.equal(states[0]["generator.0.weight"], states[3]["generator.0.weight"])
    assert states[2]["kept_steps"].tolist()[:3] == [2, 4, -1]
    assert int(states[0]["steps"]) == 4
    for key in ("discriminator.features.0.parametrizations.weight.0._u", "kept_images"):
        assert key in states[0]


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.precision=bf16", "train.channels_last=true", "train.ema=0.9", "model.spectral=true"),
        ("loss.form=hinge", "regularisers=[]", "evaluate.energy=true"),
        ("loss.form=wasserstein", "model.spectral=true", "regularisers.0.preset=released", "model.widen=stride2"),
    ],
)
def test_options_of_the_trainer(tmp_path, overrides):
    trainer, metrics = train(tmp_path / "a", "train.steps=2", *overrides)
    assert metrics == {}
    assert all(math.isfinite(v) for row in trainer.run.rows() for v in row.values() if isinstance(v, float))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_step_is_the_same_as_any(tmp_path):
    """Noise, power iteration and counts within a CUDA graph."""
    device = torch.device("cuda", 0)
    states = []
    for capture in ("true", "false"):
        options = ["train.steps=6", "model.spectral=true", "evaluate.every=3", f"train.capture={capture}"]
        plan_ = recipe.load("digits-gan", [*SHORT, *options])
        trainer = Trainer(plan_, RunFolder.create(tmp_path / capture, plan_, device), device)
        trainer.fit()
        states.append(trainer.model.state_dict())
    assert int(states[0]["steps"]) == 6 and states[0]["kept_steps"].tolist()[:3] == [3, 6, -1]
    for name, value in states[0].items():
        allowed = 3.0 if name == "kept_images" else 1e-2  # other kernels may round otherwise
        assert (value.float() - states[1][name].float()).abs().max() < allowed, name


def test_regulariser_on_the_head_is_refused(tmp_path):
    with pytest.raises(recipe.RecipeError, match=r"regularisers\.0\.target"):
        train(tmp_path / "a", "train.steps=2", "regularisers=[{name: mhe, target: all}]")


def test_recipes():
    plans = {n: recipe.load(n) for n in ("cifar10-dcgan", "cifar10-dcgan-mhe", "mnist-dcgan", "mnist-dcgan-mhe")}
    for name, plan_ in plans.items():
        assert (plan_.optimiser.name, plan_.optimiser.lr, plan_.optimiser.betas) == ("adam", 1e-4, (0.5, 0.999))
        assert (plan_.data.batch_size, plan_.data.normalise, plan_.optimiser.weight_decay) == (64, "half", 0)
        assert [part.name for part in plan_.regularisers] == (["mhe-gan"] if name.endswith("mhe") else [])
    assert plans["cifar10-dcgan"].train.steps == 200_000 and plans["cifar10-dcgan"].evaluate.every == 5000


def test_the_classifier_of_digits_learns_from_its_first_step_on():
    plan_ = recipe.load("mnist-cnn")
    torch.manual_seed(0)
    model = create(plan_.model.name, (1, 28, 28), **plan_.model.options)
    head = losses.create(plan_.loss.name, model.dim, 10)
    digits = load("digits").train
    images = F.interpolate(digits.images[:32].float(), 28, mode="bilinear")
    images = (images - images.mean()) / images.std()
    constants = {key: getattr(plan_.optimiser, key) for key in ("lr", "momentum", "weight_decay")}
    optimiser = torch.optim.SGD([*model.parameters(), *head.parameters()], **constants)
    seen = []
    for _ in range(3):
        loss = head(model(images), digits.labels[:32])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        seen.append(loss.item())
    assert max(seen) < 4 and seen[-1] < seen[0] / 2  # a rate too large for the network takes it to tens


def outputs(model):
    empty = torch.zeros(0, 5)
    return Outputs(empty, empty, torch.zeros(0), empty, model=model)


def test_evaluation_of_something_else():
    with pytest.raises(ArgumentError, match="a model that generates, got Linear"):
        measure(outputs(nn.Linear(2, 2)), ["generation"])
    found = outputs(tiny().eval())
    assert measure(found, [{"name": "generation", "grid": 4}]) == {}
    assert set(found.artefacts) == {"samples/grid", "samples/steps", "samples/progress"}
    for options in ({"samples": 1}, {"splits": 0}, {"samples": 5, "splits": 6}, {"grid": 0}):
        with pytest.raises(ArgumentError):
            evaluations.create("generation", outputs(tiny()), **options)


def test_a_classifier_of_other_data(tmp_path, classifier):
    with pytest.raises(RunError):
        evaluations.create("generation", outputs(tiny()), classifier=str(tmp_path))
    held, _ = train(tmp_path / "gan", "train.steps=1", "data.hold_out=[1]")
    with pytest.raises(ArgumentError, match=r"'digits' with 9 classes, got .*'digits' with 10 classes"):
        evaluations.create("generation", held.outputs(), classifier=str(classifier))
    one, _ = train(tmp_path / "gan2", "train.steps=1")
    with pytest.raises(ArgumentError, match="no classes"):
        evaluations.create("generation", one.outputs(), classifier=str(tmp_path / "gan2"))


# --------------------------------------------------------------------------------------------------- inception


def test_inception_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(DataError, match=r"inception_v3_google-0cc3c7bd\.pth is missing: download https://"):
        generation.inception_judge(CPU)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / generation.INCEPTION_FILE).touch()
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(DataError, match="pip install torchvision"):
        generation.inception_judge(CPU)


class Stand(nn.Module):
    """Stands in for the large network: says how large and how bright an image is."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.0))

    def forward(self, images):
        assert images.shape[1:] == (3, 299, 299)
        return torch.stack([self.scale * images.mean((1, 2, 3)), 0 * images[:, 0, 0, 0]], 1)


def test_inception_score_with_its_weights(tmp_path, monkeypatch):
    network = Stand()
    nn.init.constant_(network.scale, 2.0)
    (tmp_path / "checkpoints").mkdir()
    torch.save(network.state_dict(), tmp_path / "checkpoints" / generation.INCEPTION_FILE)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    package = types.ModuleType("torchvision.models")
    package.inception_v3 = lambda **options: Stand()
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", package)
    model = tiny().eval()
    found = evaluations.create("generation", outputs(model), samples=6, splits=1, grid=2, inception=True)
    pixels = model.sample(6, seed=1).double() / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]).double(), torch.tensor([0.229, 0.224, 0.225]).double()
    bright = ((pixels.mean((1, 2, 3))[:, None] - mean) / std).mean(1)
    logits = torch.stack([2 * bright, torch.zeros(6)], 1)
    assert found["inception_score"] == pytest.approx(generation_score(logits.softmax(1), 1)[0], rel=1e-3)


def test_parametrised_weights_are_not_left_cached():
    tiny(spectral=True).losses(real(), torch.zeros(6), GANLoss(5, 10))
    assert not parametrize._cache and not parametrize._cache_enabled


# -------------------------------------------------------------------------------------------------------- page

PAGE = (ROOT / "docs" / "generation.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_code_of_the_page_prints_what_stands_there():
    names = {}
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        for block in blocks("python"):
            exec(compile(block, "docs/generation.md", "exec"), names)
    assert output.getvalue() == "".join(blocks("text"))


def test_page_names_what_there_is():
    for row in re.findall(r"^\| (`(?:digits|mnist|cifar)[^|]*) \|", PAGE, re.MULTILINE):
        for one in row.replace("`", "").split(", "):
            assert recipe.load(one).name == one
    for line in "".join(blocks("bash")).splitlines():
        program, command, name, *overrides = line.split()
        assert (program, command) == ("hypersphere", "train")
        recipe.load(name, [word for word in overrides if "=" in word])
    options = {option.name: option.default for option in models["dcgan"].options}
    shown = dict(re.findall(r"^\| `([a-z_]+)` \| ([^|]*) \|", PAGE.split("Images must be")[0], re.MULTILINE))
    assert set(options) - {"slope"} == set(shown) and "leaky ReLU\n(0.1)" in PAGE and options["slope"] == 0.1
    for name in ("latent", "std"):
        assert float(shown[name]) == options[name]
    assert all((ROOT / "docs" / target).exists() for target in re.findall(r"\]\(([^)#]+)\)", PAGE))
