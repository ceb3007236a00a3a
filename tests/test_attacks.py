"""Attacks: against published values, closed forms, plain code of one image at a time, and foolbox."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from helpers.paths import ROOT
from hypersphere import recipe, report
from hypersphere.attacks import (
    BIM,
    FGSM,
    PGD,
    AdversarialBatch,
    DeepFool,
    Square,
    attacked,
    attacks,
    create,
    evaluating,
    gradients,
    lengths,
    losses_of,
)
from hypersphere.cli.commands import app
from hypersphere.data import Dataset, TensorSplit
from hypersphere.errors import ArgumentError
from hypersphere.evaluate import Outputs, evaluations, measure
from hypersphere.recipe import RecipeError
from hypersphere.runs import RunFolder
from hypersphere.tasks.robustness import evaluation as robustness
from hypersphere.tasks.robustness.commands import is_of_attacks
from hypersphere.tasks.robustness.evaluation import CHECKS, explain
from hypersphere.tasks.robustness.figures import attack_pictures
from hypersphere.train import Trainer
from hypersphere.train import trainer as trainer_module

CPU = torch.device("cpu")
BOUNDED = [n for n in attacks if "eps" in {o.name for o in attacks[n].options} and attacks[n].factory.in_step]


def network(seed: int = 0, shape: tuple[int, ...] = (1, 4, 4), classes: int = 4, dtype=torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    size = math.prod(shape)
    layers = nn.Sequential(nn.Flatten(), nn.Linear(size, 24), nn.Tanh(), nn.Linear(24, classes)).to(dtype)
    with torch.no_grad():
        for layer in layers[1::2]:
            layer.weight.mul_(3)
    return layers.eval()


def samples(model: nn.Module, count: int = 40, shape: tuple[int, ...] = (1, 4, 4), seed: int = 1):
    """Images and the classes that the model says, so that all are right at first."""
    draw = torch.Generator().manual_seed(seed)
    images = torch.rand(count, *shape, generator=draw, dtype=next(model.parameters()).dtype)
    with torch.no_grad():
        return images, model(images).argmax(1)


def accuracy(model, images, labels) -> float:
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).double().mean())


def small(name: str, **options):
    """An attack that is quick enough for a test."""
    known = {option.name for option in attacks[name].options}
    return create(name, **{k: v for k, v in ({"steps": 6} | options).items() if k in known})


# ------------------------------------------------------------------------------------------------ published values

A = torch.tensor([[0.02, -0.01, 0.03, 0], [-0.01, 0.02, 0, 0.01], [0, 0.01, -0.02, 0.02]], dtype=torch.float64)
B = torch.tensor([-8, 0.5, 5.5], dtype=torch.float64)
X = torch.tensor([[100, 50, 252, 3]], dtype=torch.float64) / 255
Y = torch.tensor([2])


def published(images):
    return 255 * images @ A.T + B


def test_published_loss_and_gradient():
    slope, loss, logits = gradients(published, X, Y)
    torch.testing.assert_close(logits, torch.tensor([[1.06, 0.53, 1.02]], dtype=torch.float64))
    assert loss.item() == pytest.approx(0.975855844233, rel=1e-10)
    expected = torch.tensor([[0.005536197245, -0.005536197245, 0.024230107032, -0.010153803432]], dtype=torch.float64)
    torch.testing.assert_close(slope / 255, expected, rtol=0, atol=5e-13)


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        (FGSM(), (108, 42, 255, 0)),
        (BIM(steps=3), (106, 44, 255, 0)),
        (BIM(), (108, 42, 255, 0)),
        (BIM(keep=False), (108, 42, 255, 0)),
        (DeepFool(), (99.779404324324, 50.220595675676, 251.448510810811, 3.220595675676)),
    ],
)
def test_published_adversarial_images(attack, expected):
    found = 255 * attack(published, X, Y)
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64), rtol=0, atol=1e-9)


def test_published_sizes_of_changes():
    change = 255 * (FGSM()(published, X, Y) - X)
    assert lengths(change).item() == pytest.approx(12.0830459736, rel=1e-10)
    change = 255 * (DeepFool(steps=1)(published, X, Y) - X)
    assert lengths(change).item() == pytest.approx(0.670915555173, rel=1e-10)
    assert lengths(change, "linf").item() == pytest.approx(0.551489189189, rel=1e-10)


def test_published_loss_of_adversarial_training():
    attacker = AdversarialBatch(FGSM(), share=0.5)
    batch = attacker(published, X.repeat(2, 1), Y.repeat(2))
    losses = losses_of(published(batch), Y.repeat(2))
    assert losses[0].item() == pytest.approx(1.20581394297, rel=1e-10)
    assert losses.mean().item() == pytest.approx(1.0908348936, rel=1e-10)


def test_published_constants_are_the_defaults():
    assert (FGSM().eps, BIM().eps, PGD().eps, BIM().steps) == (8 / 255, 8 / 255, 8 / 255, 20)
    assert BIM().step is None and BIM().eps / 4 == pytest.approx(2 / 255)
    fool = DeepFool()
    assert (fool.classes, fool.overshoot, fool.steps) == (10, 0.02, 50)


# ------------------------------------------------------------------------------------------------ closed forms


def linear(dim: int = 12, classes: int = 3):
    draw = torch.Generator().manual_seed(3)
    weight = torch.randn(classes, dim, generator=draw, dtype=torch.float64)
    images = 0.4 + 0.2 * torch.rand(20, dim, generator=draw, dtype=torch.float64)
    return (lambda x: x @ weight.T), weight, images


@pytest.mark.parametrize(("norm", "dual"), [("linf", 1), ("l2", 2)])
@pytest.mark.parametrize("kind", [FGSM, BIM, PGD])
def test_of_two_linear_classes_the_margin_rises_by_the_dual_norm(kind, norm, dual):
    predict, weight, images = linear(classes=2)
    labels = predict(images).argmax(1)
    eps = 0.05
    before = losses_of(predict(images), labels, "margin")
    after = losses_of(predict(kind(eps=eps, norm=norm)(predict, images, labels)), labels, "margin")
    rise = eps * torch.linalg.vector_norm(weight[0] - weight[1], dual)
    # In the ball, steps from a random place only come close to the end of its axis.
    close = 1e-3 if kind is PGD and norm == "l2" else 1e-6
    torch.testing.assert_close(after - before, rise.expand(20), rtol=close, atol=0)


@pytest.mark.parametrize(("norm", "dual"), [("linf", 1), ("l2", 2)])
def test_deepfool_goes_to_the_nearest_boundary_of_linear_classes_in_one_step(norm, dual):
    predict, weight, images = linear()
    logits = predict(images)
    own = logits.argmax(1)
    gaps = (logits.gather(1, own[:, None]) - logits).abs() + 1e-5
    sizes = torch.linalg.vector_norm(weight[own][:, None] - weight[None], dual, dim=2)
    distances = (gaps / sizes).scatter(1, own[:, None], math.inf)
    found = DeepFool(norm=norm, steps=1)(predict, images, own)
    assert (predict(found).argmax(1) != own).all()
    torch.testing.assert_close(lengths(found - images, norm).squeeze(1), 1.02 * distances.amin(1), rtol=1e-9, atol=0)


def test_margin_and_cross_entropy():
    logits = torch.randn(7, 5, dtype=torch.float64)
    labels = torch.arange(7) % 5
    for row, label, margin, entropy in zip(
        logits.tolist(), labels.tolist(), losses_of(logits, labels, "margin"), losses_of(logits, labels), strict=True
    ):
        others = [z for k, z in enumerate(row) if k != label]
        assert margin.item() == pytest.approx(max(others) - row[label])
        assert entropy.item() == pytest.approx(math.log(sum(map(math.exp, row))) - row[label])


# ------------------------------------------------------------------------------------------------ one image at a time


def bim_of_one(model, image, label, eps, step, steps):
    """Plain float64 code of the definition, for one image."""
    x, low, high = image.clone(), (image - eps).clamp(0, 1), (image + eps).clamp(0, 1)
    for _ in range(steps):
        x = x.requires_grad_()
        loss = F.cross_entropy(model(x[None]), label[None])
        loss.backward()
        x = (x.detach() + step * torch.sign(x.grad)).clamp(0, 1)
        x = torch.max(torch.min(x, high), low)
    return x


def deepfool_of_one(model, image, steps, overshoot=0.02):
    """The published algorithm with its loop over classes, for one image."""
    total, x = torch.zeros_like(image), image.clone()
    own = int(model(image[None]).argmax())
    for _ in range(steps):
        x = x.detach().requires_grad_()
        logits = model(x[None])[0]
        if int(logits.argmax()) != own:
            break
        slopes = [torch.autograd.grad(z, x, retain_graph=True)[0] for z in logits]
        best = (math.inf, None)
        for k, slope in enumerate(slopes):
            if k != own:
                w, f = slope - slopes[own], abs((logits[k] - logits[own]).item()) + 1e-5
                best = min(best, (f / float(w.norm()), f / float(w.norm()) ** 2 * w), key=lambda pair: pair[0])
        total = total + best[1]
        x = (image + (1 + overshoot) * total).clamp(0, 1)
    return x.detach()


def test_bim_is_that_of_one_image_at_a_time():
    model = network(dtype=torch.float64)
    images, labels = samples(model, 12)
    found = BIM(eps=0.1, step=0.03, steps=7, keep=False)(model, images, labels)
    for image, label, changed in zip(images, labels, found, strict=True):
        torch.testing.assert_close(changed, bim_of_one(model, image, label, 0.1, 0.03, 7), rtol=0, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 50])
def test_deepfool_is_that_of_one_image_at_a_time(steps):
    model = network(dtype=torch.float64)
    images, labels = samples(model, 12)
    found = DeepFool(steps=steps)(model, images, labels)
    for image, changed in zip(images, found, strict=True):
        torch.testing.assert_close(changed, deepfool_of_one(model, image, steps), rtol=0, atol=1e-9)
    assert steps < 50 or accuracy(model, found, labels) == 0


def test_the_square_attack_keeps_what_helps_and_nothing_else():
    """Replays the squares from their draws, one image at a time, with masks written as slices."""
    model, eps = network(dtype=torch.float64), 0.2
    images, labels = samples(model, 5)
    found = Square(eps=eps, steps=30)(model, images, labels, torch.Generator().manual_seed(5))
    draws = torch.Generator().manual_seed(5)

    def margin(x, label):
        z = model(x[None])[0].tolist()
        return max(v for k, v in enumerate(z) if k != label) - z[label]

    stripes = torch.rand(5, 1, 1, 4, generator=draws)
    best = []
    for image, label, row in zip(images, labels.tolist(), stripes, strict=True):
        striped = (image + eps * torch.where(row < 0.5, -1, 1).double()).clamp(0, 1)
        best.append(max([image, striped], key=lambda x, label=label: margin(x, label)))
    for step in range(30):
        side = round((0.8 * 16 / (1 if step < 10 else 2)) ** 0.5)
        corners, signs = torch.rand(5, 2, 1, 1, 1, generator=draws), torch.rand(5, 1, 1, 1, generator=draws)
        for i, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
            top, left = (int(c * (4 - side + 1)) for c in corners[i].flatten())
            changed = best[i].clone()
            patch = image[:, top : top + side, left : left + side] + (-eps if signs[i] < 0.5 else eps)
            changed[:, top : top + side, left : left + side] = patch.clamp(0, 1)
            if margin(changed, label) > margin(best[i], label):
                best[i] = changed
    torch.testing.assert_close(found, torch.stack(best), rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------ another library


@pytest.fixture(scope="module")
def foolbox():
    return pytest.importorskip("foolbox")


@pytest.mark.parametrize(
    ("own", "theirs", "options"),
    [
        (FGSM(eps=0.1), "LinfFastGradientAttack", {}),
        (FGSM(eps=0.4, norm="l2"), "L2FastGradientAttack", {}),
        (BIM(eps=0.1, step=0.02, steps=9, keep=False), "LinfBasicIterativeAttack", {"abs_stepsize": 0.02, "steps": 9}),
        (
            BIM(eps=0.4, step=0.1, steps=9, keep=False, norm="l2"),
            "L2BasicIterativeAttack",
            {"abs_stepsize": 0.1, "steps": 9},
        ),
    ],
)
def test_attacks_are_those_of_foolbox(foolbox, own, theirs, options):
    model = network()
    images, labels = samples(model)
    bounded = foolbox.PyTorchModel(model, bounds=(0, 1), device=CPU)
    attack = getattr(foolbox.attacks, theirs)(random_start=False, **options)
    _, expected, _ = attack(bounded, images, labels, epsilons=own.eps)
    torch.testing.assert_close(own(model, images, labels), expected, rtol=0, atol=2e-6)


def test_deepfool_finds_changes_as_small_as_those_of_foolbox(foolbox):
    model = network()
    images, labels = samples(model)
    bounded = foolbox.PyTorchModel(model, bounds=(0, 1), device=CPU)
    theirs, _, fooled = foolbox.attacks.L2DeepFoolAttack(loss="logits")(bounded, images, labels, epsilons=None)
    own = DeepFool()(model, images, labels)
    assert fooled.all() and accuracy(model, own, labels) == 0
    ours, others = (lengths(x - images).median().item() for x in (own, theirs))
    assert ours == pytest.approx(others, rel=0.02)


def test_any_attack_of_foolbox_by_name(foolbox):
    model = network()
    images, labels = samples(model, 10)
    options = {"binary_search_steps": 5, "steps": 80, "stepsize": 0.05, "initial_const": 1.0}
    found = create("foolbox", attack="L2CarliniWagnerAttack", options=options)(model, images, labels)
    assert accuracy(model, found, labels) == 0 and found.min() >= 0 and found.max() <= 1
    # It minimises the change, DeepFool only goes to the nearest boundary of a linear model.
    fast = DeepFool()(model, images, labels)
    assert lengths(found - images).mean() < 1.05 * lengths(fast - images).mean()
    within = create("foolbox", attack="LinfPGD", eps=0.1)(model, images, labels)
    assert (within - images).abs().max() <= 0.1 + 1e-6
    with pytest.raises(ArgumentError, match=r"attack must be the name of a class in foolbox.attacks, got 'Nothing'"):
        create("foolbox", attack="Nothing")(model, images, labels)
    with pytest.raises(ArgumentError, match=r"attack must be the name of a class in foolbox.attacks, got 'base'"):
        create("foolbox", attack="base")(model, images, labels)
    with pytest.raises(ArgumentError, match=r"options must be arguments of foolbox.attacks.LinfPGD: .*stpes"):
        create("foolbox", attack="LinfPGD", options={"stpes": 3})(model, images, labels)


# ------------------------------------------------------------------------------------------------ what holds for all


@given(
    name=st.sampled_from(BOUNDED),
    eps=st.floats(0, 1.5),
    norm=st.sampled_from(["linf", "l2"]),
    loss=st.sampled_from(["cross-entropy", "margin"]),
    labels=st.sampled_from(["true", "predicted"]),
    seed=st.integers(0, 99),
)
def test_budget_and_range(name, eps, norm, loss, labels, seed):
    model = network(seed % 3)
    images, classes = samples(model, 5, seed=seed)
    images = images.round() if seed % 2 else images  # pixels at the ends of the range
    attack = small(name, eps=eps, norm=norm, loss=loss, labels=labels)
    norm = getattr(attack, "norm", "linf")
    found = attack(model, images, classes, torch.Generator().manual_seed(seed))
    assert found.shape == images.shape and found.dtype == images.dtype
    assert found.min() >= 0 and found.max() <= 1
    rounding = 1e-7 if norm == "linf" else 1e-6
    assert lengths(found - images, norm).max() <= eps + rounding


@pytest.mark.parametrize("name", ["bim", "pgd", "square"])
@pytest.mark.parametrize("seed", [0, 1])
def test_more_steps_never_make_a_model_look_better(name, seed):
    model = network(seed)
    images, labels = samples(model, 200)
    labels = torch.where(torch.arange(200) % 9 == 0, (labels + 1) % 4, labels)  # some are wrong at first
    eps = 0.04
    right, losses = [], []
    for steps in range(1, 12):
        found = create(name, eps=eps, steps=steps)(model, images, labels, torch.Generator().manual_seed(0))
        right.append(accuracy(model, found, labels))
        losses.append(losses_of(model(found), labels, "margin").detach())
    assert right == sorted(right, reverse=True) and right[-1] < right[0] <= accuracy(model, images, labels)
    wrong = torch.stack(losses) > 0
    assert (wrong[:-1] <= wrong[1:]).all()  # of every single image


def test_the_last_step_alone_can_make_a_model_look_better():
    """What keeping the strongest image is for: a step across a valley and up the other side."""

    def predict(images):
        pit = 1 - (images[:, :1] - 0.5).abs() * 10  # positive within 0.1 of the middle
        return torch.cat([torch.zeros_like(pit), pit], 1)

    images, labels = torch.full((1, 1), 0.25), torch.tensor([0])
    plain = [BIM(eps=0.5, step=0.2, steps=s, keep=False)(predict, images, labels) for s in (1, 2, 3)]
    assert [accuracy(predict, x, labels) for x in plain] == [0, 1, 0]
    kept = [BIM(eps=0.5, step=0.2, steps=s)(predict, images, labels) for s in (1, 2, 3, 4)]
    assert [accuracy(predict, x, labels) for x in kept] == [0, 0, 0, 0]


def test_random_starts_are_uniform_in_the_ball_and_in_the_cube():
    images = torch.full((4000, 3), 0.5, dtype=torch.float64)
    draws = torch.Generator().manual_seed(0)
    cube = (PGD(eps=0.2).start(images, draws) - images) / 0.2
    assert cube.abs().max() <= 1 and cube.square().mean().item() == pytest.approx(1 / 3, rel=0.03)
    ball = lengths((PGD(eps=0.2, norm="l2").start(images, draws) - images) / 0.2)
    for radius in (0.5, 0.8):  # a ball holds the cube of the radius
        assert (ball < radius).double().mean().item() == pytest.approx(radius**3, abs=0.02)


def test_restarts_are_never_weaker():
    model = network(2)
    images, labels = samples(model, 200)
    once, often = (
        PGD(eps=0.03, steps=3, restarts=n)(model, images, labels, torch.Generator().manual_seed(1)) for n in (1, 6)
    )
    a, b = (losses_of(model(x), labels, "margin") > 0 for x in (once, often))
    assert (a <= b).all() and b.sum() > a.sum()
    with pytest.raises(ArgumentError, match="restarts must be 1 with keep=False"):
        PGD(restarts=2, keep=False)


def test_predicted_labels_leave_what_the_model_says():
    model = network()
    images, said = samples(model)
    wrong = (said + 1) % 4
    found = FGSM(eps=0.1, labels="predicted")(model, images, wrong)
    assert torch.equal(found, FGSM(eps=0.1)(model, images, said))
    assert not torch.equal(found, FGSM(eps=0.1)(model, images, wrong))


def test_deepfool_leaves_alone_what_is_wrong_already_if_labels_are_true():
    model = network()
    images, said = samples(model)
    labels = torch.where(torch.arange(40) < 10, (said + 1) % 4, said)
    found = DeepFool(labels="true")(model, images, labels)
    assert torch.equal(found[:10], images[:10]) and accuracy(model, found, labels) == 0
    assert not torch.equal(DeepFool()(model, images, labels)[:10], images[:10])
    few = DeepFool(classes=2)(model, images, said)
    assert (lengths(few - images) >= lengths(DeepFool()(model, images, said) - images) - 1e-6).float().mean() > 0.7


@pytest.mark.parametrize("name", [*BOUNDED, "deepfool"])
def test_models_are_left_as_they_were(name):
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    model.train()
    model[2].eval()  # a part that is frozen
    model[4].weight.requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    images, labels = torch.rand(6, 1, 4, 4), torch.arange(6) % 4
    kept = images.clone()
    with evaluating(model):
        assert not any(part.training for part in model.modules())
        found = small(name)(model, images, labels)
    assert [part.training for part in model] == [True, True, False, True, True] and model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(images, kept) and not found.requires_grad and images.grad is None


def test_modes_come_back_after_an_error():
    model = nn.Linear(2, 2).train()
    with pytest.raises(KeyError), evaluating(model):
        raise KeyError
    assert model.training


@pytest.mark.parametrize("name", [*BOUNDED, "deepfool"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_attacks_work_where_gradients_are_off(name, mode):
    model = network()
    images, labels = samples(model, 6)
    expected = small(name)(model, images, labels, torch.Generator().manual_seed(0))
    with mode():
        found = small(name)(model, images.clone(), labels.clone(), torch.Generator().manual_seed(0))
    assert torch.equal(found, expected) and not torch.equal(found, images)


@pytest.mark.parametrize("name", [*BOUNDED, "deepfool"])
def test_half_precision_empty_and_single(name):
    model = network()
    images, labels = samples(model, 3)
    for dtype in (torch.float16, torch.bfloat16):
        found = small(name)(model, images.to(dtype), labels)
        assert found.dtype == torch.float32 and found.isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        found = small(name)(model, images, labels)
    assert found.dtype == torch.float32 and found.isfinite().all()
    assert small(name)(model, images[:0], labels[:0]).shape == (0, 1, 4, 4)
    assert small(name)(model, images[:1], labels[:1]).shape == (1, 1, 4, 4)
    double = small(name)(network(dtype=torch.float64), images.double(), labels)
    assert double.dtype == torch.float64


@pytest.mark.parametrize("name", [*BOUNDED, "deepfool"])
@pytest.mark.parametrize("scale", [0.0, math.nan, 1e-30, 1e30])
def test_bad_gradients_leave_images_finite(name, scale):
    model = network()
    images, labels = samples(model, 4)
    for norm in ("linf", "l2"):
        found = small(name, norm=norm)(lambda x: model(x) * scale, images, labels)
        assert found.isfinite().all() and found.min() >= 0 and found.max() <= 1


@pytest.mark.parametrize("name", ["fgsm", "bim", "pgd"])
def test_tiny_gradients_still_have_a_direction(name):
    model = network(dtype=torch.float64)
    images, labels = samples(model, 4)
    for norm in ("linf", "l2"):
        attack = small(name, norm=norm, loss="margin", eps=0.1)
        found, tiny = (
            attack(lambda x, s=s: s * model(x), images, labels, torch.Generator().manual_seed(0)) for s in (1, 1e-25)
        )
        torch.testing.assert_close(found, tiny, rtol=0, atol=1e-9)


def test_mistakes_are_told():
    model = network()
    images, labels = samples(model, 2)
    with pytest.raises(ArgumentError, match=r"images must be floats in \[0, 1\], got torch.uint8"):
        FGSM()(model, (255 * images).byte(), labels)
    with pytest.raises(ArgumentError, match=r"images must be in \[0, 1\], got -1 to "):
        FGSM()(model, images.index_fill(0, torch.tensor([0]), -1.0), labels)
    with pytest.raises(ArgumentError, match="labels must be as many as the 2 images, got 1"):
        FGSM()(model, images, labels[:1])
    for bad in (labels[:, None], F.one_hot(labels).float(), labels.float(), labels[0]):
        with pytest.raises(ArgumentError, match=r"labels must be classes \(B,\), got torch"):
            FGSM()(model, images, bad)
    for dtype in (torch.int32, torch.uint8):
        for name in BOUNDED:
            assert small(name)(model, images, labels.to(dtype)).isfinite().all()
    for predict in (lambda x: model(x.detach()), lambda x: model(torch.zeros_like(x)), lambda x: model(x).detach()):
        with pytest.raises(ArgumentError, match="predict must be differentiable with respect to the images"):
            FGSM()(predict, images, labels)
        assert Square(steps=2)(predict, images, labels).shape == images.shape
    for options, message in (
        ({"eps": -1}, "eps must be at least 0, got -1"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"norm": "l3"}, "norm must be one of 'linf', 'l2', got 'l3'"),
        ({"loss": "hinge"}, "loss must be one of 'cross-entropy', 'margin', got 'hinge'"),
        ({"labels": "none"}, "labels must be one of 'true', 'predicted', got 'none'"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(message)):
            create("pgd", **options)


@pytest.mark.parametrize("name", [*BOUNDED, "deepfool"])
def test_the_memory_format_does_not_matter(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 4)).eval()
    images, labels = samples(model, 6, (3, 5, 5))
    expected = small(name)(model, images, labels, torch.Generator().manual_seed(0))
    model = model.to(memory_format=torch.channels_last)
    images = images.contiguous(memory_format=torch.channels_last)
    found = small(name)(model, images, labels, torch.Generator().manual_seed(0))
    torch.testing.assert_close(found, expected)


def test_single_class_has_nothing_to_attack():
    images, labels = torch.rand(3, 2), torch.zeros(3, dtype=torch.long)
    for name in (*BOUNDED, "deepfool"):
        assert small(name)(lambda x: x.sum(1, keepdim=True), images, labels).isfinite().all()


def test_many_images_go_in_parts():
    model = network()
    images, labels = samples(model, 17)
    whole, parts = (attacked(BIM(eps=0.1), model, images, labels, batch_size=n) for n in (100, 4))
    torch.testing.assert_close(whole, parts)
    a, b, c = (attacked(PGD(steps=1), model, images, labels, seed=s) for s in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)


# ------------------------------------------------------------------------------------------------ training on attacks


class Scaling:
    mean = torch.tensor([0.3, 0.5, 0.6]).view(3, 1, 1)
    std = torch.tensor([0.2, 0.1, 0.4]).view(3, 1, 1)


def colour():
    model = network(shape=(3, 4, 4))
    pixels, labels = samples(model, 10, (3, 4, 4))
    return model, pixels, labels, (pixels - Scaling.mean) / Scaling.std


def test_a_share_of_the_batch_is_attacked_within_the_budget_of_pixels():
    model, pixels, labels, images = colour()
    found = AdversarialBatch(FGSM(eps=0.1), 0.3, Scaling)(model, images, labels)
    assert torch.equal(found[3:], images[3:])
    changed = found * Scaling.std + Scaling.mean
    assert changed.min() >= -1e-6 and changed.max() <= 1 + 1e-6
    change = (changed - pixels)[:3].abs()
    assert change.max() <= 0.1 + 1e-6
    inside = ((pixels > 0.1) & (pixels < 0.9))[:3]
    torch.testing.assert_close(change[inside], torch.full_like(change[inside], 0.1))
    # The same as an attack on the model with the scaling in front of it.
    whole = FGSM(eps=0.1)(lambda x: model((x - Scaling.mean) / Scaling.std), pixels[:3], labels[:3])
    torch.testing.assert_close(changed[:3], whole, rtol=0, atol=1e-5)


def test_shares_formats_and_draws():
    model, _, labels, images = colour()
    for share, count in ((1.0, 10), (0.5, 5), (0.04, 0)):
        found = AdversarialBatch(PGD(eps=0.1, steps=2), share, Scaling)(model, images, labels)
        assert ((found - images).flatten(1).abs().amax(1) > 1e-3).sum() == count
    last = images.contiguous(memory_format=torch.channels_last)
    found = AdversarialBatch(FGSM(), 0.5, Scaling)(model, last, labels)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert AdversarialBatch(FGSM(), 0.5, Scaling)(model, images.bfloat16(), labels).dtype == torch.bfloat16
    attacker = AdversarialBatch(PGD(steps=1, keep=False))
    pixels = torch.rand(4, 3, 4, 4)
    a, b, c = (attacker(model, pixels, labels[:4], torch.Generator().manual_seed(s)) for s in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)
    with pytest.raises(ArgumentError, match="share must be greater than 0"):
        AdversarialBatch(FGSM(), 0.0)
    with pytest.raises(ArgumentError, match="attack must be one of this library's own for training"):
        AdversarialBatch(create("foolbox"))


def test_recipes_of_adversarial_training():
    plain = recipe.load("digits-robust")
    assert plain.adversary is None
    plan = recipe.load("digits-robust-fgsm")
    assert plan.adversary.share == 0.5 and plan.adversary.options["eps"] == 0.15
    assert plan.hash != plain.hash != recipe.load("digits-robust", ["seed=1"]).hash
    assert recipe.check(plan.model_dump(mode="json")).hash == plan.hash
    changed = recipe.load("digits-robust-fgsm", ["adversary.name=pgd"])
    assert changed.adversary.share == 0.5 and changed.adversary.options["eps"] == 8 / 255  # another's are not inherited
    with pytest.raises(RecipeError, match=r"adversary.name must be an attack of this library's own for training"):
        recipe.load("digits-robust", ["adversary.name=foolbox"])
    with pytest.raises(RecipeError, match=r"adversary.eps must be at least 0"):
        recipe.load("digits-robust", ["adversary.name=fgsm", "adversary.eps=-1"])
    with pytest.raises(RecipeError, match=r"adversary.share"):
        recipe.load("digits-robust", ["adversary.name=fgsm", "adversary.share=2"])
    with pytest.raises(RecipeError, match=r"adversary.name unknown attack 'fgms'. Did you mean 'fgsm'\?"):
        recipe.load("digits-robust", ["adversary.name=fgms"])


def test_the_published_setting():
    for name in ("cifar10-robust", "cifar10-robust-dc", "cifar10-robust-fgsm"):
        plan = recipe.load(name)
        assert plan.model.name == "cnn9-dc-adv" and plan.model.options["norm"] == "identity"
        assert (plan.optimiser.name, plan.optimiser.lr, plan.data.batch_size) == ("adam", 1e-3, 128)
        assert plan.project.every == 0  # plain gradients
        (attack,) = [part for part in plan.evaluate.metrics if part.name == "attacks"]
        assert attack.options["eps"] == pytest.approx(8 / 255) and attack.options["steps"] == 20
    assert recipe.load("cifar10-robust-fgsm").adversary.options["eps"] == pytest.approx(8 / 255)


def fit(folder, name, *overrides):
    plan = recipe.load(name, ["train.tensorboard=false", *overrides])
    trainer = Trainer(plan, RunFolder.create(folder, plan, CPU), CPU)
    return trainer, trainer.fit()


@pytest.mark.parametrize("name", sorted(name for name in recipe.embedded() if re.match("(cifar10|mnist)-robust", name)))
def test_recipes_of_published_tasks_take_two_steps(name, tmp_path, monkeypatch):
    channels, side = (1, 28) if name.startswith("mnist") else (3, 32)
    draw = torch.Generator().manual_seed(0)
    split = TensorSplit(
        torch.randint(256, (8, channels, side, side), generator=draw, dtype=torch.uint8), torch.arange(8) % 10
    )
    data = Dataset("noise", tuple(map(str, range(10))), split, split)
    monkeypatch.setattr(trainer_module, "load_data", lambda *args, **options: data)
    place = len(recipe.load(name).evaluate.metrics) - 1
    quick = ("steps=2", "queries=2", "deepfool=2", "images=4", "strengths=[0.1]")
    options = [f"evaluate.metrics.{place}.{option}" for option in quick]
    options += ["train.steps=2", "model.widths=[4, 4, 4]", "data.batch_size=4"]
    trainer, found = fit(tmp_path / name, name, *options)
    assert {"accuracy_fgsm", "accuracy_bim", "accuracy_pgd", "masking_signs"} <= set(found)
    rows = [row for row in trainer.run.rows() if row["split"] == "train"]
    assert rows[-1]["step"] == 2
    assert max(value for key, value in rows[-1].items() if key.startswith("grad_norm/model")) > 0


def test_pixels_must_be_known_to_have_a_budget(tmp_path):
    """The mean image is cropped and flipped with the images, so that it cannot be added to them again."""
    options = ("train.steps=1", "evaluate.metrics=[classification]", "data.normalise=pixel")
    fit(tmp_path / "still", "digits-robust-fgsm", *options)
    for change in ("crop=1", "flip=true", "vertical_flip=true"):
        with pytest.raises(RecipeError, match=r"data.normalise must not be 'pixel' with an adversary"):
            fit(tmp_path / change, "digits-robust-fgsm", *options, f"data.augment.{change}")


def test_a_recipe_trains_on_attacks(tmp_path):
    options = ("train.steps=3", "train.log_every=1", "evaluate.metrics=[classification]", "convert.name=tanh")
    rows = {}
    for name in ("digits-robust", "digits-robust-fgsm"):
        trainer, _ = fit(tmp_path / name, name, *options)
        rows[name] = [row["loss"] for row in trainer.run.rows() if row["split"] == "train"]
    natural, attacked_rows = rows.values()
    assert all(a > n for n, a in zip(natural, attacked_rows, strict=True))
    trainer, _ = fit(tmp_path / "none", "digits-robust-fgsm", *options, "adversary.eps=0")
    same = [row["loss"] for row in trainer.run.rows() if row["split"] == "train"]
    assert same == pytest.approx(natural, rel=1e-5)  # nothing else of the step has changed


# ------------------------------------------------------------------------------------------------ evaluation


def outputs_of(predict, images, labels, classes=4, **more):
    """What the trainer hands to evaluations, of a function."""
    split = TensorSplit((255 * images).round().byte(), labels)
    data = Dataset("noise", tuple(f"class {k}" for k in range(classes)), split, split)
    pixels = split.images.float() / 255
    with torch.no_grad():
        logits = predict(pixels)
    return Outputs(
        pixels.flatten(1), logits, labels, torch.eye(classes), data=data, predict=predict, features_of=predict, **more
    )


QUICK = {"name": "attacks", "images": 0, "queries": 60, "deepfool": 20, "steps": 10, "eps": 0.1}


def clear():
    """A model with gradients that can be followed, and images that it gets right."""
    model = network()
    images, _ = samples(model, 120)
    labels = model((255 * images).round() / 255).argmax(1)
    return model, images, labels


def test_an_honest_model_shows_no_sign_of_masking():
    model, images, labels = clear()
    outputs = outputs_of(model, images, labels)
    found = measure(outputs, [QUICK])
    assert found["accuracy_natural"] == 1 and found["masking_signs"] == 0
    assert found["accuracy_strongest"] <= found["accuracy_bim"] < found["accuracy_natural"]
    assert {name for name in found if name.startswith("masking_")} == {*CHECKS, "masking_signs"} - {"masking_transfer"}
    # Against the attack itself, on the very bytes.
    pixels = outputs.images.float() / 255
    assert found["accuracy_fgsm"] == accuracy(model, FGSM(eps=0.1)(model, pixels, labels), labels)
    assert {evaluations.declared(name) for name in found} <= set(evaluations.metrics())
    kept = outputs.artefacts
    assert kept["attacks/curve_eps"].tolist() == pytest.approx([0, 0.05, 0.1, 0.2, 0.4])
    assert kept["attacks/curve_pgd"][[0, 2]].tolist() == [1, found["accuracy_pgd"]]
    assert (kept["attacks/deepfool_l2"].diff() >= 0).all()
    assert found["deepfool_l2"] == pytest.approx(float(kept["attacks/deepfool_l2"].median()))


def test_saturated_logits_are_found_out():
    model, images, labels = clear()
    found = measure(outputs_of(lambda x: 3000 * model(x), images, labels), [QUICK])
    honest = measure(outputs_of(model, images, labels), [QUICK])
    assert found["masking_zero_gradients"] > 0.5 and found["masking_loss"] > 0.3 and found["masking_signs"] >= 3
    assert found["accuracy_fgsm"] > honest["accuracy_fgsm"] + 0.2  # it looks robust, ...
    assert found["accuracy_square"] == honest["accuracy_square"] < found["accuracy_fgsm"]  # ... and is not


def test_steps_in_the_answer_are_found_out(tmp_path):
    """Rounded inputs have no gradient but a small one of no use: search and other models' gradients do better."""
    model, images, labels = clear()

    def rounded(x):
        return model((8 * x).round() / 8) + 1e-3 * torch.sin(97 * x.flatten(1)[:, :4])

    labels = rounded((255 * images).round() / 255).argmax(1)
    found = measure(outputs_of(rounded, images, labels), [QUICK])
    assert found["masking_gradient_free"] > 0.1 and found["masking_unbounded"] > 0.1
    words = dict(zip([n for n in CHECKS if n in found], explain(found), strict=True))
    assert (
        words["masking_gradient_free"][0]
        and "random search without gradients is stronger" in (words["masking_gradient_free"][1])
    )


def test_the_square_attack_takes_its_queries_wherever_it_is_asked_for():
    model, images, labels = clear()
    outputs = outputs_of(model, images, labels)
    options = QUICK | {"deepfool": 0, "steps": 1, "queries": 80}
    asked = measure(outputs, [options | {"attacks": ["fgsm", "square"]}])
    assert asked["accuracy_square"] == measure(outputs, [options])["accuracy_square"]
    expected = attacked(Square(0.1, 80), model, outputs.images.float() / 255, labels)
    assert asked["accuracy_square"] == accuracy(model, expected, labels)
    unchecked = measure(outputs, [options | {"attacks": ["square"], "masking": False}])
    assert unchecked["accuracy_square"] == asked["accuracy_square"]
    assert outputs.artefacts["attacks/curve_square"][2] == asked["accuracy_square"]


def test_an_attack_without_a_budget_changes_nothing():
    model, images, labels = clear()
    found = measure(outputs_of(model, images, labels), [QUICK | {"eps": 0.0}])
    assert found["accuracy_strongest"] == found["accuracy_pgd"] == found["accuracy_natural"] == 1
    assert "masking_rises" not in found  # there is one budget alone


def test_images_that_deepfool_does_not_fool_are_not_near():
    """Without a gradient it leaves images as they are: that is no change of size 0 that fools."""
    model, images, labels = clear()
    outputs = outputs_of(lambda x: F.one_hot(model(x).argmax(1), 4) + 0 * x.flatten(1)[:, :4], images, labels)
    found = measure(outputs, [QUICK | {"masking": False}])
    assert "deepfool_l2" not in found and "deepfool_linf" not in found
    assert outputs.artefacts["attacks/deepfool_l2"].isinf().all()
    (picture,) = attack_pictures({k.split("/")[1]: v for k, v in outputs.artefacts.items() if "deepfool" in k})
    assert picture.figure["data"][0]["y"] == [None] * 20


def test_few_images_are_taken_from_all_of_a_sorted_split():
    model, images, labels = clear()
    order = labels.argsort(stable=True)
    outputs = outputs_of(model, images[order], labels[order])
    measure(outputs, [QUICK | {"masking": False, "deepfool": 12}])
    places = [int(i * 119 / 11) for i in range(12)]
    pixels = outputs.images.float()[places] / 255
    sizes = lengths(DeepFool()(model, pixels, outputs.labels[places]) - pixels).flatten().sort().values
    torch.testing.assert_close(outputs.artefacts["attacks/deepfool_l2"], sizes)


def test_words_of_the_checks():
    values = dict.fromkeys(CHECKS, 0.0)
    assert [bad for bad, _ in explain(values)] == [False] * len(CHECKS)
    assert [bad for bad, _ in explain(dict.fromkeys(CHECKS, 0.5))] == [True] * len(CHECKS)
    assert all("50.0" in words and "{" not in words for _, words in explain(dict.fromkeys(CHECKS, 0.5)))
    assert explain({"accuracy": 1.0, "masking_steps": math.nan}) == []
    assert len({check.title for check in CHECKS.values()}) == len(CHECKS)


def test_what_cannot_be_attacked_is_told():
    model, images, labels = clear()
    outputs = outputs_of(model, images, labels)
    with pytest.raises(ArgumentError, match="needs test images that are one tensor of bytes"):
        measure(Outputs(outputs.features, outputs.logits, labels, outputs.weight, predict=model), [QUICK])
    with pytest.raises(ArgumentError, match="must have a function from images to logits"):
        measure(outputs_of(model, images, labels).__class__(**{**vars(outputs), "predict": None}), [QUICK])
    for name, value in (("batch_size", 0), ("queries", -1), ("images", -1), ("deepfool", -1), ("strengths", (-0.1,))):
        with pytest.raises(ArgumentError, match=f"{name} must be at least"):
            measure(outputs, [QUICK | {name: value}])
    with pytest.raises(RecipeError, match=r"evaluate.metrics.2.attacks.0 should be 'fgsm', 'bim', 'pgd' or 'square'"):
        recipe.load("digits-robust", ["evaluate.metrics.2.attacks=[fgms]"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A trained run and another of the same data."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs")
    quick = "{name: attacks, eps: 0.15, images: 60, steps: 5, queries: 20, deepfool: 20}"
    options = ["train.steps=60", "convert.name=sphere", f"evaluate.metrics=[classification, {quick}]"]
    other, _ = fit(folder / "other", "digits-robust", "train.steps=60", "seed=7", "evaluate.metrics=[classification]")
    target, metrics = fit(folder / "target", "digits-robust", *options)
    return target, metrics, other


def test_a_run_is_attacked_and_reported(runs):
    target, metrics, _ = runs
    assert metrics["accuracy"] > 0.8 and metrics["accuracy_pgd"] < metrics["accuracy_natural"]
    assert metrics["masking_unbounded"] == 0
    page = report.build([target.run.path])
    assert "checks for masked gradients" in page and "images before and after" in page and "Under PGD" in page


def test_transfer_attacks_from_another_run_on_the_command_line(runs):
    target, _, other = runs
    command = ["attack", str(target.run.path), "--source", str(other.run.path), "--eps", "0.15", "--images", "40"]
    command += ["--steps", "5", "--deepfool", "0", "--device", "cpu", "--attack", "fgsm"]
    result = CliRunner().invoke(app, [*command, "--keep"])
    assert result.exit_code == 0, result.output
    kept = json.loads((target.run.path / "evaluation.json").read_text())["metrics"]
    assert f"{kept['accuracy_transfer_fgsm']:.2%}" in result.output and "another model's gradients" in result.output
    assert "accuracy" in kept and kept["masking_transfer"] == kept["accuracy_fgsm"] - kept["accuracy_transfer_fgsm"]
    # The same by hand.
    outputs, source = target.outputs(), other.outputs()
    places = torch.linspace(0, len(outputs.labels) - 1, 40, dtype=torch.float64).long()
    images, labels = outputs.images[places].float() / 255, outputs.labels[places]
    found = FGSM(eps=0.15)(source.predict, images, labels)
    assert kept["accuracy_transfer_fgsm"] == pytest.approx(accuracy(outputs.predict, found, labels))
    accuracies = [value for name, value in kept.items() if name.startswith("accuracy_")]
    assert kept["accuracy_strongest"] <= min(accuracies) and "accuracy_bim" not in kept  # it was measured before


def test_other_models_gradients_count_for_the_strongest_attack(monkeypatch):
    """A model without gradients of use, which those of another one give away."""
    model, images, labels = clear()
    saturated = outputs_of(lambda x: 3000 * model(x), images, labels)
    monkeypatch.setattr(robustness, "source_predict", lambda *_: model)
    options = QUICK | {"attacks": ["fgsm"], "source": "other", "queries": 0, "steps": 1, "deepfool": 0, "eps": 0.3}
    found = measure(saturated, [options])
    others = [value for name, value in found.items() if name.startswith("accuracy_") and "transfer" not in name]
    assert found["accuracy_transfer_fgsm"] == found["accuracy_strongest"] <= min(others)
    assert found["masking_fgsm"] == found["accuracy_fgsm"] - found["accuracy_transfer_fgsm"] > 0.1


def test_kept_attacks_replace_those_before_and_nothing_else(runs, tmp_path):
    """Of two budgets, metrics would contradict each other; what other evaluations have left stays."""
    folder = tmp_path / "copy"
    shutil.copytree(runs[0].run.path, folder)
    kept = json.loads((folder / "evaluation.json").read_text())
    kept["metrics"] |= {"accuracy_transfer_pgd": 0.5, "masking_transfer": 0.5, "accuracy_recalibrated": 0.25}
    (folder / "evaluation.json").write_text(json.dumps(kept))
    tensors = load_file(folder / "features.safetensors")
    tensors |= {"artefact/few-shot/curve/x": torch.ones(3), "artefact/attacks/transfer_pgd": torch.ones(2)}
    save_file(tensors, folder / "features.safetensors", {"class_names": "[]", "unseen_names": "[]"})
    command = ["attack", str(folder), "--images", "5", "--attack", "fgsm", "--no-masking", "--deepfool", "0", "--keep"]
    result = CliRunner().invoke(app, [*command, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    names = set(json.loads((folder / "evaluation.json").read_text())["metrics"])
    assert {"accuracy", "accuracy_recalibrated", "accuracy_fgsm", "accuracy_natural"} <= names
    assert not {name for name in names if name.startswith(("accuracy_transfer", "masking", "deepfool", "accuracy_pgd"))}
    after = load_file(folder / "features.safetensors")
    assert torch.equal(after["artefact/few-shot/curve/x"], torch.ones(3))
    assert "artefact/attacks/transfer_pgd" not in after and "artefact/attacks/curve_fgsm" in after
    (folder / "evaluation.json").unlink()
    result = CliRunner().invoke(app, [*command, "--device", "nowhere"])  # told before anything is done
    assert "has no evaluation yet" in str(result.exception)


def test_every_metric_of_attacks_is_told_from_others(runs):
    _, metrics, _ = runs
    known = {name for name in metrics if is_of_attacks(name)}
    others = set(metrics) - known
    assert {"accuracy_strongest", "masking_signs", "deepfool_linf"} <= known
    assert "accuracy" in others and not {n for n in others if n.startswith(("accuracy_", "masking", "deepfool"))}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--eps", "1e400"], "eps must be a number or a fraction such as 8/255, got '1e400'"),
        (["--eps", "8/0"], "eps must be a number or a fraction such as 8/255, got '8/0'"),
        (["--attack", "foo"], "should be 'fgsm', 'bim', 'pgd' or 'square', got 'foo'"),
        (["--source", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_on_the_command_line(runs, options, message):
    result = CliRunner().invoke(app, ["attack", str(runs[0].run.path), "--device", "cpu", "--images", "5", *options])
    assert result.exit_code and message in str(result.exception)


# ------------------------------------------------------------------------------------------------ pictures


def test_pictures_show_what_was_measured():
    model, images, labels = clear()
    outputs = outputs_of(model, images, labels)
    found = measure(outputs, [QUICK])
    artefacts = {name.split("/", 1)[1]: value.numpy() for name, value in outputs.artefacts.items()}
    artefacts["transfer_fgsm"] = np.array([0.1, 0.75])
    pictures = {picture.title: picture for picture in attack_pictures(artefacts)}
    json.dumps([picture.figure for picture in pictures.values()], allow_nan=False)
    curve = pictures["accuracy by strength of the attack"].figure["data"]
    assert [trace["name"] for trace in curve] == ["FGSM", "FGSM, transfer", "BIM", "PGD"]
    assert curve[0]["x"] == pytest.approx([0, 12.75, 25.5, 51, 102]) and curve[1]["y"] == [75.0]
    assert curve[0]["y"][2] == pytest.approx(100 * found["accuracy_fgsm"], rel=1e-3)
    checks = pictures["checks for masked gradients"]
    assert len(checks.figure["data"][0]["x"]) == 8  # all but transfer, for which there was no other run
    features = pictures["adversarial features"].figure
    assert sum(len(trace["x"]) for trace in features["data"]) == 120
    crosses = sum(trace["marker"]["symbol"].count("x") for trace in features["data"])
    assert crosses == round(120 * (1 - min(found[f"accuracy_{n}"] for n in ("fgsm", "bim", "pgd"))))
    assert features["layout"]["xaxis"]["range"] == pictures["natural features"].figure["layout"]["xaxis"]["range"]
    grid = np.array(pictures["images before and after"].figure["data"][0]["z"])
    assert grid.shape == (3 * 66, 8 * 66, 3) and len(pictures) == 6
    texts = [a["text"] for a in pictures["images before and after"].figure["layout"]["annotations"]]
    assert len(texts) == 8 and all(re.fullmatch(r"class \d<br>→ class \d", text) for text in texts)
    assert any(text[6] != text[-1] for text in texts)
    assert attack_pictures({}) == []


# ------------------------------------------------------------------------------------------------ claims


@pytest.mark.slow
def test_on_digits_fgsm_alone_flatters_bounded_operators(tmp_path):
    """They look far more robust than the baseline under FGSM, not under BIM, and transfer gives it away."""
    options = ["evaluate.metrics.2.deepfool=0", "evaluate.metrics.2.queries=1"]
    _, baseline = fit(tmp_path / "baseline", "digits-robust", *options)
    source, _ = fit(tmp_path / "source", "digits-robust", "seed=5", "evaluate.metrics=[classification]")
    options.append(f"evaluate.metrics.2.source={source.run.path}")
    for own in (["convert.name=sphere"], ["convert.name=tanh", "convert.mean_decay=0.99"]):
        _, found = fit(tmp_path / own[0], "digits-robust", *own, *options)
        assert found["accuracy_fgsm"] > baseline["accuracy_fgsm"] + 0.2
        assert abs(found["accuracy_bim"] - baseline["accuracy_bim"]) < 0.06
        assert found["accuracy_fgsm"] > found["accuracy_transfer_fgsm"]
        assert found["masking_transfer"] > 0 and found["masking_fgsm"] > 0.1 and found["masking_signs"] >= 2


@pytest.mark.slow
def test_training_on_attacks_makes_digits_robust(tmp_path):
    options = ["evaluate.metrics.2.deepfool=0", "evaluate.metrics.2.masking=false"]
    _, natural = fit(tmp_path / "natural", "digits-robust", *options)
    _, hardened = fit(tmp_path / "hardened", "digits-robust-fgsm", *options)
    assert hardened["accuracy"] > 0.9
    assert hardened["accuracy_pgd"] > natural["accuracy_pgd"] + 0.25
    assert hardened["accuracy_fgsm"] > natural["accuracy_fgsm"] + 0.3


# ------------------------------------------------------------------------------------------------ the page

PAGE = (ROOT / "docs" / "robustness.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_code_of_the_page_prints_what_stands_there():
    names: dict[str, object] = {}
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        for block in blocks("python"):
            exec(compile(block, "docs/robustness.md", "exec"), names)
    assert output.getvalue() == "".join(blocks("text"))


def test_the_page_names_every_attack_check_and_recipe_and_no_other():
    named = set(re.findall(r"^\| `([a-z_]+)` \|", PAGE, re.MULTILINE))
    assert named >= {*attacks, *CHECKS}
    recipes = set(re.findall(r"`([a-z0-9]+-robust[a-z0-9-]*)", PAGE))
    assert recipes == {
        file.stem for file in (ROOT / "src" / "hypersphere" / "tasks" / "robustness" / "recipes").glob("*.yaml")
    }
    for name, check in CHECKS.items():
        row = re.search(rf"^\| `{name}` .*$", PAGE, re.MULTILINE)[0]
        assert f"above {check.sign:g}" in row
    for block in blocks("yaml"):
        content = yaml.safe_load(block)
        for part in content.get("evaluate", {}).get("metrics", []):
            if isinstance(part, dict):
                part.pop("source")
        recipe.check({"data": {"name": "digits"}, **content})
