"""Faces: networks against their published tables, alignment against least squares, lists of pairs and importers."""

from __future__ import annotations

import hashlib
import io
import math
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from helpers.paths import TOOLS
from hypersphere import recipe
from hypersphere.data import DataError, Dataset, TensorSplit, inventory, load
from hypersphere.data.sources import sources
from hypersphere.diagnostics import angular_fisher_score
from hypersphere.errors import ArgumentError
from hypersphere.evaluate import Outputs, measure
from hypersphere.models import create, models
from hypersphere.nn import DecoupledConv2d, DecoupledLinear
from hypersphere.nn import create as layer
from hypersphere.runs import RunFolder
from hypersphere.runs import load as load_system
from hypersphere.tasks.faces.align import align, similarity_transform, template, warp
from hypersphere.tasks.faces.data import (
    AlignedSplit,
    find_images,
    lfw_pairs,
    parse_pairs,
    read_landmarks,
    read_pairs,
    write_landmarks,
)
from hypersphere.train import Trainer

CELEBA = "celeba_subset_train_aligned112x96.npz"
UNITS = {4: (0, 0, 0, 0), 10: (0, 1, 2, 0), 20: (1, 2, 4, 1), 36: (2, 4, 8, 2), 64: (3, 8, 16, 3)}
WIDTHS = (64, 128, 256, 512)
SMALL = {"widths": (3, 4, 5, 6), "dim": 7}


def meta(name, shape=(3, 112, 96), **options):
    """The network without memory."""
    with torch.device("meta"):
        return create(name, shape, **options)


def size(model):
    return sum(p.numel() for p in model.parameters())


# ------------------------------------------------------------------------------------------- SphereFace networks


def sfnet_size(units, pixels):
    """Kernels and slopes of every unit, kernels, biases and slopes of the others, and the last layer."""
    total, before = 0, 3
    for count, width in zip(units, WIDTHS, strict=True):
        total += 9 * before * width + 2 * width + count * 2 * (9 * width * width + width)
        before = width
    return total + (512 * pixels + 1) * 512


@pytest.mark.parametrize(("depth", "units"), UNITS.items())
@pytest.mark.parametrize(("width", "pixels"), [(96, 7 * 6), (112, 7 * 7)])
def test_sphereface_networks_have_the_published_size(depth, units, width, pixels):
    model = meta(f"sfnet-{depth}", (3, 112, width))
    assert size(model) == sfnet_size(units, pixels)
    assert sum(isinstance(module, nn.Conv2d) for module in model.modules()) == depth
    assert model.embed.in_features == 512 * pixels
    assert model(torch.empty(2, 3, 112, width, device="meta")).shape == (2, 512) and model.dim == 512


def test_the_20_layer_network_has_22_667_thousand_parameters():
    assert size(meta("sfnet-20")) == 22_666_944


@pytest.mark.parametrize(("depth", "units"), UNITS.items())
def test_sphereface_layers_in_order(depth, units):
    expected = []
    for count, width in zip(units, WIDTHS, strict=True):
        expected += [(width, 2, True)] + 2 * count * [(width, 1, False)]
    convs = [module for module in meta(f"sfnet-{depth}").modules() if isinstance(module, nn.Conv2d)]
    assert [(conv.out_channels, conv.stride[0], conv.bias is not None) for conv in convs] == expected
    assert all(conv.kernel_size == (3, 3) and conv.padding == (1, 1) for conv in convs)


def functional_sfnet(state, images, units, later=False):
    """The network in functions alone, written from the published description."""
    names = iter(sorted({key.split(".")[1] for key in state if key.startswith("features.")}, key=int))
    act = (lambda x, _: x.clamp(min=0)) if later else (lambda x, slope: torch.where(x > 0, x, slope[:, None, None] * x))
    x = images
    for count in units:
        number = next(names)
        x = F.conv2d(x, state[f"features.{number}.weight"], state[f"features.{number}.bias"], stride=2, padding=1)
        x = act(x, None if later else state[f"features.{next(names)}.weight"])
        for _ in range(count):
            unit = f"features.{next(names)}"
            y = F.conv2d(x, state[f"{unit}.conv1.weight"], state.get(f"{unit}.conv1.bias"), padding=1)
            y = act(y, state.get(f"{unit}.act1.weight"))
            y = F.conv2d(y, state[f"{unit}.conv2.weight"], state.get(f"{unit}.conv2.bias"), padding=1)
            x = act(x + y, None) if later else x + act(y, state[f"{unit}.act2.weight"])
    return x.flatten(1) @ state["embed.weight"].T + state["embed.bias"]


@pytest.mark.parametrize("later", [False, True])
def test_sphereface_networks_compute_what_they_say(later):
    variant = "opensphere" if later else "sphereface"
    model = create("sfnet-20", (3, 32, 24), variant=variant, **SMALL).double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.5)
    images = torch.randn(2, 3, 32, 24, dtype=torch.float64)
    expected = functional_sfnet(model.state_dict(), images, UNITS[20], later)
    torch.testing.assert_close(model(images), expected)


def test_sphereface_starts_as_published():
    torch.manual_seed(0)
    model = create("sfnet-10", (3, 112, 96), dim=64)
    for name, module in model.named_modules():
        if isinstance(module, nn.PReLU):
            assert module.weight.shape[0] in WIDTHS and bool((module.weight == 0.25).all())
        if not isinstance(module, nn.Conv2d | nn.Linear):
            continue
        weight = module.weight.detach()
        if module.bias is not None:
            assert not module.bias.any()
        if ".conv" in name:
            assert abs(float(weight.std()) / 0.01 - 1) < 0.02
            assert float(weight.abs().max()) > 0.03  # no uniform draw of that deviation goes so far
        else:
            bound = math.sqrt(3 / weight[0].numel())
            assert float(weight.abs().max()) <= bound
            assert abs(float(weight.std()) * math.sqrt(3) / bound - 1) < 0.04


def test_opensphere_normalises_features_with_a_first_factor_of_a_tenth():
    model = create("sfnet-10", (3, 32, 32), variant="opensphere", norm="batchnorm2d", **SMALL)
    assert all(conv.bias is None for conv in model.modules() if isinstance(conv, nn.Conv2d))
    features = model(torch.randn(64, 3, 32, 32))
    torch.testing.assert_close(features.std(0, correction=0), torch.full((7,), 0.1), rtol=1e-3, atol=0)
    plain = create("sfnet-10", (3, 32, 32), variant="opensphere", **SMALL)
    assert all(conv.bias is not None for conv in plain.modules() if isinstance(conv, nn.Conv2d))
    assert not any(isinstance(module, nn.PReLU) for module in plain.modules())


@pytest.mark.parametrize("variant", ["sphereface", "opensphere"])
def test_a_last_relu_changes_nothing_else(variant):
    plain, cut = (create("sfnet-4", (3, 32, 32), variant=variant, fc_relu=on, **SMALL) for on in (False, True))
    cut.load_state_dict(plain.state_dict())
    images = torch.randn(4, 3, 32, 32)
    torch.testing.assert_close(cut(images), plain(images).clamp(min=0))
    assert (plain(images) < 0).any()


@pytest.mark.parametrize("variant", ["sphereface", "opensphere"])
def test_decoupled_layers_fit_in(variant):
    options = {"conv": layer("tanh"), "linear": layer("sphere", "linear")}
    model = create("sfnet-10", (3, 32, 32), variant=variant, **options, **SMALL)
    assert sum(isinstance(module, DecoupledConv2d) for module in model.modules()) == 10
    assert isinstance(model.embed, DecoupledLinear)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert any(p.grad is not None and p.grad.any() for p in model.features.parameters())


def test_face_networks_are_options_of_recipes():
    for name in [*(f"sfnet-{depth}" for depth in UNITS), "mobilefacenet"]:
        assert models[name].help and all(option.help for option in models[name].options)
    plan = recipe.check({"model": {"name": "sfnet_20", "variant": "opensphere", "dim": 64}})
    assert plan.model.options["widths"] == (64, 128, 256, 512) and plan.model.options["act"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widths": (4, 4)}, "widths must hold one number for each of the 4 stages"),
        ({"widths": (4, 4, 0, 4)}, "widths must be at least 1"),
        ({"dim": 0}, "dim must be at least 1"),
        ({"variant": "caffe"}, "variant must be one of 'sphereface', 'opensphere'"),
    ],
)
def test_bad_options_of_face_networks(options, message):
    with pytest.raises(ArgumentError, match=message):
        create("sfnet-4", (3, 112, 96), **options)


@pytest.mark.parametrize("name", ["sfnet-4", "mobilefacenet"])
def test_autocast_and_odd_sizes(name):
    model = create(name, (3, 33, 47), **({"widths": (3, 4, 5, 6)} if name == "sfnet-4" else {}), dim=5).eval()
    images = torch.randn(2, 3, 33, 47)
    with torch.autocast("cpu", torch.bfloat16):
        features = model(images)
    assert features.shape == (2, 5) and torch.isfinite(features).all()
    half = model.to(torch.bfloat16)(images.bfloat16())
    assert half.dtype == torch.bfloat16 and torch.isfinite(half).all()


# -------------------------------------------------------------------------------------------------- MobileFaceNet


def test_mobilefacenet_has_a_million_parameters_under_the_known_names():
    model = meta("mobilefacenet")
    assert size(model) == 999_552
    state = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert len(state) == 333
    assert state["conv1.conv.weight"] == (64, 3, 3, 3) and state["dw_conv1.conv.weight"] == (64, 1, 3, 3)
    assert state["blocks.0.conv.0.weight"] == (128, 64, 1, 1) and state["blocks.12.conv.3.weight"] == (512, 1, 3, 3)
    assert state["blocks.14.conv.6.weight"] == (128, 256, 1, 1) and state["conv2.prelu.weight"] == (512,)
    assert state["linear7.conv.weight"] == (512, 1, 7, 6) and state["linear1.bn.running_var"] == (128,)
    assert not any(name.startswith(("linear7.prelu", "linear1.prelu")) for name in state)
    assert tuple(meta("mobilefacenet", (3, 112, 112)).linear7.conv.weight.shape) == (512, 1, 7, 7)


def functional_mobilefacenet(state, images):
    """The network in functions alone, from the names and shapes of its weights."""

    def conv(x, weight, norm, slope=None, stride=1):
        kernel = state[f"{weight}.weight"]
        groups = x.shape[1] // kernel.shape[1]
        x = F.conv2d(x, kernel, stride=stride, padding=1 if kernel.shape[2:] == (3, 3) else 0, groups=groups)
        scale = state[f"{norm}.weight"] / (state[f"{norm}.running_var"] + 1e-5).sqrt()
        x = (x - state[f"{norm}.running_mean"][:, None, None]) * scale[:, None, None]
        x = x + state[f"{norm}.bias"][:, None, None]
        if slope is None:
            return x
        return torch.where(x > 0, x, x * state[f"{slope}.weight"][:, None, None])

    x = conv(images, "conv1.conv", "conv1.bn", "conv1.prelu", stride=2)
    x = conv(x, "dw_conv1.conv", "dw_conv1.bn", "dw_conv1.prelu")
    for number in range(15):
        b = f"blocks.{number}.conv"
        stride = 2 if number in (0, 5, 12) else 1
        y = conv(x, f"{b}.0", f"{b}.1", f"{b}.2")
        y = conv(y, f"{b}.3", f"{b}.4", f"{b}.5", stride)
        y = conv(y, f"{b}.6", f"{b}.7")
        x = y if stride == 2 else x + y
    x = conv(x, "conv2.conv", "conv2.bn", "conv2.prelu")
    x = conv(x, "linear7.conv", "linear7.bn")
    return conv(x, "linear1.conv", "linear1.bn").flatten(1)


def test_mobilefacenet_computes_what_it_says():
    model = create("mobilefacenet", (3, 32, 32)).double().eval()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith("running_var"):
                value.uniform_(0.5, 2)
            elif "running_mean" in name or "bias" in name:
                value.normal_(std=0.1)
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(model(images), functional_mobilefacenet(model.state_dict(), images))


def test_mobilefacenet_starts_with_variance_2_over_fan_out():
    model = create("mobilefacenet", (3, 112, 96))
    for name, fan_out in (("conv2.conv", 512), ("linear1.conv", 128), ("blocks.12.conv.3", 9 * 512)):
        weight = model.get_submodule(name).weight.detach()
        assert abs(float(weight.std()) / math.sqrt(2 / fan_out) - 1) < 0.05, name


# ------------------------------------------------------------------------------------------------------ alignment


def least_squares(points, target):
    """The same transform from the normal equations in a, b and the shift."""
    (x, y), (u, v) = points.T, target.T
    one, zero = np.ones_like(x), np.zeros_like(x)
    rows = np.concatenate([np.stack([x, -y, one, zero], 1), np.stack([y, x, zero, one], 1)])
    a, b, s, t = np.linalg.lstsq(rows, np.concatenate([u, v]), rcond=None)[0]
    return np.array([[a, -b, s], [b, a, t]])


coordinates = st.floats(-200, 200, width=32)


@given(st.lists(st.tuples(coordinates, coordinates), min_size=5, max_size=5), st.integers(0, 99))
def test_transform_is_the_least_squares_one(points, seed):
    points = np.array(points, np.float64)
    if np.ptp(points, axis=0).max() < 1:
        return
    target = np.random.default_rng(seed).normal(50, 20, (5, 2))
    found = similarity_transform(torch.from_numpy(points), torch.from_numpy(target))
    np.testing.assert_allclose(found.numpy(), least_squares(points, target), rtol=1e-6, atol=1e-6)


@given(st.floats(-3.1, 3.1), st.floats(0.1, 9), st.floats(-99, 99), st.floats(-99, 99))
def test_transform_recovers_a_known_one(angle, scale, right, down):
    c, s = scale * math.cos(angle), scale * math.sin(angle)
    known = torch.tensor([[c, -s, right], [s, c, down]], dtype=torch.float64)
    points = template().double()
    target = points @ known[:, :2].T + known[:, 2]
    torch.testing.assert_close(similarity_transform(points, target), known)


def test_transform_of_a_batch_is_that_of_each():
    points = torch.randn(2, 3, 5, 2, dtype=torch.float64)
    found = similarity_transform(points, template().double())
    assert found.shape == (2, 3, 2, 3)
    for i in range(2):
        for j in range(3):
            expected = least_squares(points[i, j].numpy(), template().double().numpy())
            np.testing.assert_allclose(found[i, j].numpy(), expected, rtol=1e-8, atol=1e-8)


def test_transform_never_mirrors():
    mirrored = template() * torch.tensor([-1.0, 1.0])
    assert float(torch.linalg.det(similarity_transform(mirrored, template())[:, :2])) > 0


def test_transform_has_gradients_and_takes_whole_numbers_and_halves():
    points = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p: similarity_transform(p, template().double()), points)
    whole = torch.tensor([[30, 52], [66, 52], [48, 72], [34, 92], [63, 92]])
    for kind in (torch.int16, torch.float16, torch.bfloat16):
        found = similarity_transform(whole.to(kind), template())
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, similarity_transform(whole.float(), template()))


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (torch.ones(2, 5, 2), "not all at one place"),
        (torch.full((5, 2), math.nan), "finite"),
        (torch.ones(5, 3), r"must be \(\.\.\., K, 2\)"),
        (torch.ones(4, 2), "like target"),
    ],
)
def test_landmarks_that_give_no_transform(points, message):
    with pytest.raises(ArgumentError, match=message):
        similarity_transform(points, template())


def test_templates_of_both_published_sizes():
    narrow = torch.tensor(
        [[30.2946, 51.6963], [65.5318, 51.5014], [48.0252, 71.7366], [33.5493, 92.3655], [62.7299, 92.2041]]
    )
    torch.testing.assert_close(template(), narrow)
    torch.testing.assert_close(template((112, 112)), narrow + torch.tensor([8.0, 0.0]))
    # Twice as large, a point is between the four pixels into which its own was divided.
    torch.testing.assert_close(template((224, 192)), 2 * narrow + 0.5)
    with pytest.raises(ArgumentError, match="size must be a height and a width"):
        template((0, 96))


def slow_warp(image, matrix, height, width):
    """One pixel at a time, in float64."""
    inverse = np.linalg.inv(np.vstack([matrix, [0, 0, 1]]))
    result = np.zeros((len(image), height, width))
    for v in range(height):
        for u in range(width):
            x, y, _ = inverse @ (u, v, 1)
            left, top = math.floor(x), math.floor(y)
            for i, j in ((left, top), (left + 1, top), (left, top + 1), (left + 1, top + 1)):
                if 0 <= i < image.shape[2] and 0 <= j < image.shape[1]:
                    result[:, v, u] += image[:, j, i] * (1 - abs(x - i)) * (1 - abs(y - j))
    return result


def test_warp_is_bilinear_interpolation_with_black_around():
    rng = np.random.default_rng(0)
    images = rng.uniform(0, 255, (2, 3, 9, 12))
    matrices = np.array([[[0.8, -0.6, 4.0], [0.6, 0.8, -3.0]], [[1.7, 0.2, -5.0], [-0.2, 1.7, 1.5]]])
    found = warp(torch.from_numpy(images), torch.from_numpy(matrices), (10, 7))
    for image, matrix, result in zip(images, matrices, found.numpy(), strict=True):
        np.testing.assert_allclose(result, slow_warp(image, matrix, 10, 7), atol=1e-9)
    assert (found == 0).any()
    whole = torch.from_numpy(images.astype(np.uint8))
    rounded = warp(whole, torch.from_numpy(matrices), (10, 7))
    assert rounded.dtype == torch.uint8
    for image, matrix, result in zip(whole.numpy(), matrices, rounded.numpy(), strict=True):
        assert np.abs(slow_warp(image.astype(float), matrix, 10, 7) - result).max() <= 0.501


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_identity_leaves_images_alone(kind):
    images = torch.randn(2, 3, 8, 6).to(kind)
    same = warp(images.mT.contiguous().mT, torch.eye(3)[:2], (8, 6))
    assert same.dtype == kind
    torch.testing.assert_close(same, images, atol=1e-5, rtol=1e-5)


def test_warp_of_one_pixel_and_of_no_batch():
    dot = torch.full((1, 1, 1, 1), 200, dtype=torch.uint8)
    spread = warp(dot, torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0]]), (3, 4))
    assert spread[0, 0, 1, 2] == 200 and spread.sum() == 200
    assert warp(torch.zeros(0, 3, 5, 5), torch.zeros(0, 2, 3), (2, 2)).shape == (0, 3, 2, 2)
    with pytest.raises(ArgumentError, match=r"images must be \(B, C, H, W\)"):
        warp(torch.zeros(3, 5, 5), torch.eye(3)[:2])


@pytest.mark.parametrize("size", [(112, 96), (112, 112)])
def test_aligned_landmarks_lie_where_they_belong(size):
    """Bright spots at the landmarks of a turned, larger face come to the places of the template."""
    turn = torch.tensor([[1.5, -0.8], [0.8, 1.5]])
    landmarks = (template() @ turn.T + torch.tensor([95.0, 10.0])).double()
    y, x = torch.meshgrid(torch.arange(260.0), torch.arange(240.0), indexing="ij")
    spots = torch.stack([torch.exp(-((x - u) ** 2 + (y - v) ** 2) / 18) for u, v in landmarks.tolist()])
    aligned = align(spots[None].double(), landmarks[None], size)[0]
    v, u = torch.meshgrid(torch.arange(size[0] * 1.0), torch.arange(size[1] * 1.0), indexing="ij")
    mass = aligned.sum((1, 2))
    centres = torch.stack([(aligned * u).sum((1, 2)) / mass, (aligned * v).sum((1, 2)) / mass], 1)
    torch.testing.assert_close(centres.float(), template(size), atol=0.02, rtol=0)


# ---------------------------------------------------------------------------------------------------------- pairs


def lfw_lines(folds, each):
    lines = [f"{folds}\t{each}"]
    for fold in range(folds):
        lines += [f"P{fold}\t{i + 1}\t{i + 2}" for i in range(each)]
        lines += [f"P{fold}\t{i + 1}\tQ{fold}\t{i + 11}" for i in range(each)]
    return lines


def test_pairs_of_ten_folds_are_counted_and_placed(tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_text("\n".join(lfw_lines(10, 300)) + "\n\n")
    pairs = read_pairs(path)
    assert len(pairs) == 6000 and pairs.folds == 10
    assert pairs.fold.bincount().tolist() == [600] * 10
    assert all(pairs.same[pairs.fold == fold].sum() == 300 for fold in range(10))
    assert pairs.same.dtype == torch.bool and pairs.left.dtype == torch.int64
    # Pair 5 of the mismatched ones of fold 3.
    place = 3 * 600 + 300 + 5
    names = pairs.images[int(pairs.left[place])], pairs.images[int(pairs.right[place])]
    assert names == ("P3/P3_0006", "Q3/Q3_0016") and not pairs.same[place] and pairs.fold[place] == 3
    assert len(set(pairs.images)) == len(pairs.images) == 10 * (301 + 300)
    people = pairs.people
    assert len(people.unique()) == 20
    assert torch.equal(people[pairs.left] == people[pairs.right], pairs.same)
    expected = "6,000 pairs (3,000 of one person, 3,000 of two) of 6,010 images of 20 people in 10 folds"
    assert str(pairs) == expected


def test_pairs_with_blanks_one_fold_and_names_with_blanks():
    assert parse_pairs(["1", "Ann 1 2", "Ann 12 Bob 345"]).images[2:] == ("Ann/Ann_0012", "Bob/Bob_0345")
    assert parse_pairs(["1", "Ann Lee\t1\t2", "Ann Lee\t1\tBob\t1"]).images[0] == "Ann Lee/Ann Lee_0001"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [], "line 1: expected the number of folds.*got 'an empty list'"),
        (lambda lines: ["ten 300", *lines[1:]], "line 1: expected the number of folds.*got 'ten 300'"),
        (lambda lines: ["0 2", *lines[1:]], "line 1: expected the number of folds"),
        (
            lambda lines: lines[:-1],
            "has 7 pairs, but its first line announces 8: 2 folds of 2 of one person and 2 of two",
        ),
        (lambda lines: [*lines, "A\t1\t2"], "has 9 pairs, but its first line announces 8"),
        (lambda lines: [*lines[:2], "A\t1\tB\t2", *lines[3:]], r"line 3: expected NAME i j, got 'A\\t1\\tB\\t2'"),
        (lambda lines: [*lines[:3], "A\t1\t2", *lines[4:]], r"line 4: expected NAME i OTHER j, got 'A\\t1\\t2'"),
        (lambda lines: [*lines[:3], "A\t1\tB\tx", *lines[4:]], r"line 4: expected NAME i OTHER j"),
        (lambda lines: [*lines[:3], "A\t1\tA\t2", *lines[4:]], "line 4: expected a pair of two people, got A twice"),
        (lambda lines: [lines[0], "", *lines[2:]], "line 2: expected NAME i j, got ''"),
        (lambda lines: [lines[0], "\t1\t2", *lines[2:]], "line 2: expected NAME i j"),
    ],
)
def test_damaged_lists_of_pairs_say_where(tmp_path, change, message):
    path = tmp_path / "pairs.txt"
    path.write_text("\n".join(change(lfw_lines(2, 2))))
    with pytest.raises(DataError, match=message) as error:
        read_pairs(path)
    assert str(path) in str(error.value)


def test_a_missing_or_binary_list_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.txt cannot be read"):
        read_pairs(tmp_path / "none.txt")
    (tmp_path / "image.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    for read in (read_pairs, read_landmarks):
        with pytest.raises(DataError, match=r"image\.jpg cannot be read"):
            read(tmp_path / "image.jpg")


# ------------------------------------------------------------------------------------------- images and landmarks


def test_images_are_found_in_every_format_and_missing_ones_left_out(tmp_path):
    for name in ("A B/A B_0001.jpg", "C/C_0001.PNG", "J.R./J.R._0002.webp", "D/D_0001.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    names = ["A B/A B_0001", "C/C_0001.PNG", "J.R./J.R._0002", "D/D_0001", "E/E_0001"]
    found = find_images(tmp_path, names)
    assert {name: path.name for name, path in found.items()} == {
        "A B/A B_0001": "A B_0001.jpg",
        "C/C_0001.PNG": "C_0001.PNG",
        "J.R./J.R._0002": "J.R._0002.webp",
    }
    with pytest.raises(DataError, match="there is no folder"):
        find_images(tmp_path / "none", names)


def test_landmarks_come_back_as_they_were_written(tmp_path):
    path = tmp_path / "landmarks.txt"
    written = {"Ann Lee/Ann Lee_0001.jpg": torch.arange(10.0).view(5, 2) / 4, "J.R./J.R._0002": torch.ones(5, 2) * -3}
    write_landmarks(path, written)
    found = read_landmarks(path)
    assert list(found) == ["Ann Lee/Ann Lee_0001", "J.R./J.R._0002"]
    assert all(torch.equal(a, b) for a, b in zip(found.values(), written.values(), strict=True))
    path.write_text("\na.png 1 2 3 4 5 6 7 8 9 10\n")
    assert read_landmarks(path)["a"][4].tolist() == [9, 10]


@pytest.mark.parametrize("line", ["a.jpg 1 2 3", "a.jpg 1 2 3 4 5 6 7 8 9 x", "a.jpg 1 2 3 4 5 6 7 8 9 nan"])
def test_damaged_landmarks_say_where(tmp_path, line):
    path = tmp_path / "landmarks.txt"
    path.write_text(f"b.jpg 1 2 3 4 5 6 7 8 9 10\n{line}\n")
    with pytest.raises(DataError, match="line 2: expected the name of an image and 10 numbers"):
        read_landmarks(path)


def test_faces_are_aligned_when_they_are_read(tmp_path):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (2, 60, 50, 3), np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    landmarks = torch.tensor(rng.uniform(10, 50, (2, 5, 2)))
    split = AlignedSplit((tmp_path / "0.png", tmp_path / "1.png"), torch.tensor([4, 5]), (112, 96), landmarks)
    assert split.shape == (3, 112, 96) and len(split) == 2
    for number in range(2):
        matrix = least_squares(landmarks[number].numpy(), template().double().numpy())
        expected = slow_warp(pixels[number].transpose(2, 0, 1).astype(float), matrix, 112, 96)
        assert np.abs(split.read(number).numpy() - expected).max() < 0.6  # rounding
    turned = split.select(torch.tensor([1, 0]), torch.tensor([0, 1]))
    assert torch.equal(turned.read(0), split.read(1)) and turned.labels.tolist() == [0, 1]
    people = Dataset("two", ("a", "b"), *(replace(split, labels=torch.tensor([0, 1])) for _ in range(2)))
    unseen = people.hold_out(["b"]).unseen
    assert len(unseen) == 2 and torch.equal(unseen.read(0), split.read(1))  # held out, they are aligned as before

    (tmp_path / "0.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"0\.png cannot be decoded"):
        split.read(0)
    flat = AlignedSplit(split.files, split.labels, (112, 96), torch.ones(2, 5, 2))
    with pytest.raises(DataError, match=r"1\.png cannot be aligned: points must be finite and not all at one place"):
        flat.read(1)


# ------------------------------------------------------------------------------------------------- part of CelebA


def pack(images, side, kind, **options):
    """Mosaics of ``side`` times ``side`` images ``(N, H, W, 3)`` end to end, the last filled up with black."""
    _, height, width, _ = images.shape
    pieces = []
    for start in range(0, len(images), side * side):
        mosaic = np.zeros((side * height, side * width, 3), np.uint8)
        for number, image in enumerate(images[start : start + side * side]):
            y, x = divmod(number, side)
            mosaic[y * height : (y + 1) * height, x * width : (x + 1) * width] = image
        Image.fromarray(mosaic).save(buffer := io.BytesIO(), kind, **options)
        pieces.append(np.frombuffer(buffer.getvalue(), np.uint8))
    return np.concatenate(pieces), np.cumsum([0, *map(len, pieces)])


def smooth(rng, count, height, width):
    """Images that compress well, each different."""
    ramp = np.linspace(0, 1, height)[:, None, None] * np.ones((1, width, 1))
    return (ramp * rng.uniform(50, 255, (count, 1, 1, 3))).astype(np.uint8)


def write_celeba(folder, rng, people=4, each=27):
    images = smooth(rng, people * each, 112, 96)
    person = np.tile(np.arange(people, dtype=np.int16), each)
    webp, offset = pack(images, 10, "webp", lossless=True)
    folder.mkdir(parents=True)
    numbers = np.array([7, 30, 500, 9000][:people], np.int16)
    np.savez(folder / CELEBA, webp=webp, offset=offset, person=person, celeba_identity=numbers, image=person)
    return images.transpose(0, 3, 1, 2), person


@pytest.mark.parametrize("folder", ["celeba-subset", "faces"])
def test_the_part_of_celeba_is_read_and_divided(tmp_path, folder):
    images, person = write_celeba(tmp_path / folder, np.random.default_rng(0))
    data = load("celeba-subset", tmp_path, unseen_identities=1, test_fraction=1 / 9)
    assert data.class_names == ("7", "30", "500") and data.unseen_names == ("9000",)
    assert data.train.shape == (3, 112, 96)
    assert data.train.labels.bincount().tolist() == [24] * 3 and data.test.labels.bincount().tolist() == [3] * 3
    for split, label, first in ((data.train, 1, None), (data.unseen, 0, 3)):
        found = {image.tobytes() for image in split.images[split.labels == label].numpy()}
        assert found <= {image.tobytes() for image in images[person == (label if first is None else first)]}
    assert len(data.unseen) == 27
    again = load("celeba-subset", tmp_path, unseen_identities=1, test_fraction=1 / 9)
    assert torch.equal(again.train.images, data.train.images)
    with pytest.raises(ArgumentError, match="unseen_identities must be at least 0 and at most 3, got 4"):
        load("celeba-subset", tmp_path, unseen_identities=4)


def test_the_inventory_checks_the_part_of_celeba(tmp_path, monkeypatch):
    def row():
        return next(row for row in inventory(tmp_path, verify=True) if row.name == "celeba-subset")

    assert row().state == "missing" and "mmlab" in row().detail and CELEBA in row().detail
    write_celeba(tmp_path / "celeba-subset", np.random.default_rng(0))
    assert row().state == "corrupt"  # not the known file
    path = tmp_path / "celeba-subset" / CELEBA
    known = sources["celeba-subset"].layouts[0].md5
    monkeypatch.setitem(known, CELEBA, hashlib.md5(path.read_bytes()).hexdigest())
    assert row().state == "found" and "checksums ok" in row().detail
    path.write_bytes(path.read_bytes()[:-999])
    with pytest.raises(DataError, match="is not the packed part of CelebA"):
        load("celeba-subset", tmp_path)
    np.savez(path, webp=np.zeros(3, np.uint8))
    with pytest.raises(DataError, match="is not the packed part of CelebA"):
        load("celeba-subset", tmp_path)


@pytest.mark.parametrize("change", [{"person": np.full(108, 9, np.int16)}, {"person": np.zeros(999, np.int16)}])
def test_labels_of_celeba_that_do_not_fit(tmp_path, change):
    write_celeba(tmp_path / "faces", np.random.default_rng(0))
    path = tmp_path / "faces" / CELEBA
    with np.load(path) as packed:
        arrays = dict(packed)
    np.savez(path, **{**arrays, **change})
    with pytest.raises(DataError, match=r"has the label 9|has 200 images, but 999 labels"):
        load("celeba-subset", tmp_path)


def test_a_recipe_trains_on_faces(tmp_path):
    write_celeba(tmp_path / "faces", np.random.default_rng(0), people=3, each=6)
    plan = recipe.check(
        {
            "data": {"name": "celeba-subset", "batch_size": 4, "normalise": "half", "augment": {"flip": True}},
            "model": {"name": "sfnet-4", "widths": [2, 3, 4, 5], "dim": 6},
            "loss": {"name": "cosface"},
            "optimiser": {"lr": 0.001},
            "train": {"steps": 2, "tensorboard": False},
            "evaluate": {"metrics": ["classification"]},
        }
    )
    run = RunFolder.create(tmp_path / "run", plan, torch.device("cpu"))
    metrics = Trainer(plan, run, torch.device("cpu"), data_root=tmp_path).fit()
    assert 0 <= metrics["accuracy"] <= 1 and math.isfinite(metrics["cross_entropy"])


# ------------------------------------------------------------------------------------------------------ importers


def run_tool(name, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(TOOLS / name), run_name="__main__")


def test_the_importer_of_lfw_writes_images_landmarks_and_pairs(tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    images = smooth(rng, 70, 144, 128)
    names = [f"A_{person}_{number:04d}" for person in range(35) for number in (1, 12)]
    jpeg, offset = pack(images, 8, "jpeg", quality=95)
    landmarks = rng.integers(0, 128, (70, 5, 2)).astype(np.int16)
    pair = np.array([[0, 1], [2, 3], [0, 2], [4, 6], [8, 9], [68, 69], [8, 10], [66, 68]], np.int16)
    arrays = {"pair": pair, "same": np.array([1, 1, 0, 0] * 2, bool), "fold": np.array([0] * 4 + [1] * 4, np.int8)}
    source = tmp_path / "faces.npz"
    np.savez(source, jpeg=jpeg, offset=offset, image_name=np.array(names), landmark5=landmarks, **arrays)
    run_tool("import_lfw.py", monkeypatch, "--source", source, "--root", tmp_path / "lfw")
    assert "8 pairs (4 of one person, 4 of two)" in capsys.readouterr().out

    root = tmp_path / "lfw"
    pairs, points = read_pairs(root / "pairs.txt"), read_landmarks(root / "landmarks.txt")
    assert (root / "pairs.txt").read_text().splitlines()[:4] == ["2\t2", "A_0\t1\t12", "A_1\t1\t12", "A_0\t1\tA_1\t1"]
    named = [f"{name[:-5]}/{name}" for name in names]
    assert [pairs.images[i] for i in pairs.left] == [named[i] for i in pair[:, 0]]
    assert [pairs.images[i] for i in pairs.right] == [named[i] for i in pair[:, 1]]
    assert pairs.same.tolist() == arrays["same"].tolist() and pairs.fold.tolist() == arrays["fold"].tolist()
    np.testing.assert_array_equal(torch.stack([points[name] for name in named]).numpy(), landmarks)
    files = find_images(root / "images", named)
    assert len(files) == 70
    for name, image in zip(named, images, strict=True):
        assert np.abs(np.asarray(Image.open(files[name])).astype(int) - image).mean() < 2


def test_the_importer_of_weights_checks_and_writes_them(tmp_path, monkeypatch, capsys):
    model = create("mobilefacenet", (3, 112, 96))
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    np.savez(tmp_path / "weights.npz", **state)
    run_tool("import_weights.py", monkeypatch, tmp_path / "weights.npz", tmp_path / "weights.safetensors")
    assert "333 tensors of mobilefacenet" in capsys.readouterr().out
    found = safetensors.torch.load_file(tmp_path / "weights.safetensors")
    assert found.keys() == state.keys() and all((found[name].numpy() == state[name]).all() for name in state)

    run_tool("import_weights.py", monkeypatch, tmp_path / "weights.npz", tmp_path / "run", "--run", "--classes", "4")
    write_celeba(tmp_path / "faces", np.random.default_rng(0), each=40)
    system = load_system(tmp_path / "run")
    images = torch.randint(0, 256, (2, 3, 112, 96), dtype=torch.uint8)
    expected = model.eval()((images.float() - 127.5) / 128)
    torch.testing.assert_close(system.model(system.preprocess(images)), expected)

    del state["linear1.conv.weight"]
    np.savez(tmp_path / "weights.npz", **state)
    with pytest.raises(SystemExit, match=r"has no weights of this network(.|\n)*linear1\.conv\.weight"):
        run_tool("import_weights.py", monkeypatch, tmp_path / "weights.npz", tmp_path / "other.safetensors")


# ------------------------------------------------------------------------------------------------------ real data


def fold_accuracies(features, pairs):
    """The published protocol for pairs in folds, in plain numpy: centred on the other folds, their best threshold."""
    left, right, same, fold = (value.numpy() for value in (pairs.left, pairs.right, pairs.same, pairs.fold))
    thresholds = np.arange(-10_000, 10_001) / 10_000
    found = []
    for number in range(pairs.folds):
        others = fold != number
        centred = features - np.concatenate([features[left[others]], features[right[others]]]).mean(0)
        centred /= np.linalg.norm(centred, axis=1, keepdims=True)
        scores = (centred[left] * centred[right]).sum(1)
        accepted = len(scores[others & same]) - np.searchsorted(np.sort(scores[others & same]), thresholds, "right")
        refused = np.searchsorted(np.sort(scores[others & ~same]), thresholds, "left")
        right_ones = accepted + refused
        threshold = thresholds[right_ones == right_ones.max()].mean()
        tested = (scores > threshold) & same | (scores < threshold) & ~same
        found.append(tested[~others].mean())
    return np.array(found)


def test_fold_accuracies_of_separate_and_of_random_people():
    pairs = parse_pairs(lfw_lines(4, 20))
    features = np.eye(8)[pairs.people.numpy()]
    assert fold_accuracies(features, pairs).tolist() == [1.0] * 4
    noise = np.random.default_rng(0).normal(size=features.shape)
    assert 0.3 < fold_accuracies(noise, pairs).mean() < 0.7


FACES = Path(os.environ.get("HYPERSPHERE_FACES", "none"))
"""Folder that tools/import_lfw.py wrote, with mobilefacenet.safetensors of tools/import_weights.py in it."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not (FACES / "mobilefacenet.safetensors").is_file(), reason="needs LFW and MobileFaceNet")
def test_mobilefacenet_reaches_its_accuracy_on_lfw():
    pairs, points = read_pairs(FACES / "pairs.txt"), read_landmarks(FACES / "landmarks.txt")
    files = find_images(FACES / "images", pairs.images)
    assert (len(pairs), pairs.folds, len(files), len(pairs.images)) == (6000, 10, 7701, 7701)
    marks = torch.stack([points[name] for name in pairs.images])
    split = AlignedSplit(tuple(files[name] for name in pairs.images), torch.zeros(7701), (112, 96), marks)
    model = create("mobilefacenet", (3, 112, 96)).eval()
    model.load_state_dict(safetensors.torch.load_file(FACES / "mobilefacenet.safetensors"))
    features = []
    with torch.inference_mode():
        for start in range(0, 7701, 100):
            images = torch.stack([split.read(i) for i in range(start, min(start + 100, 7701))])
            images = (images.float() - 127.5) / 128
            features.append(torch.cat([model(images), model(images.flip(3))], 1))
    accuracy = fold_accuracies(torch.cat(features).double().numpy(), pairs)
    assert abs(accuracy.mean() - 0.9917) < accuracy.std(ddof=1) / math.sqrt(10)


# ------------------------------------------------------------------------------------------- evaluation on pairs


def little_lfw(root: Path) -> None:
    """Two folds of pairs of three people, each image of one colour that is nearly that of its person."""
    (root / "lfw" / "images").mkdir(parents=True)
    colours = {"Ann": (200, 30, 30), "Bob": (30, 200, 30), "Cid": (30, 30, 200)}
    points = torch.tensor([[30.3, 51.7], [65.5, 51.5], [48.0, 71.7], [33.5, 92.4], [62.7, 92.2]])
    landmarks = {}
    for name, colour in colours.items():
        (root / "lfw" / "images" / name).mkdir()
        for number in (1, 2):
            shade = tuple(value + 3 * number for value in colour)
            file = f"{name}/{name}_{number:04}.png"
            Image.new("RGB", (96, 112), shade).save(root / "lfw" / "images" / file)
            landmarks[file] = points
    write_landmarks(root / "lfw" / "landmarks.txt", landmarks)
    fold = ["Ann\t1\t2", "Bob\t1\t2", "Ann\t1\tBob\t1", "Bob\t2\tCid\t1"]
    (root / "lfw" / "pairs.txt").write_text("\n".join(["2\t2", *fold, "Cid\t1\t2", *fold[:1], *fold[2:]]) + "\n")


def test_lfw_evaluation_compares_aligned_faces_and_their_mirror_images(tmp_path):
    little_lfw(tmp_path)
    pairs, faces = lfw_pairs(tmp_path, (112, 96))
    assert len(pairs) == 8 and faces.shape == (3, 112, 96) and len(faces) == 6
    split = TensorSplit(torch.zeros(1, 3, 112, 96, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    seen = []

    def features_of(images: torch.Tensor) -> torch.Tensor:
        seen.append(images)
        return images.mean((2, 3)) - 0.3

    outputs = Outputs(
        torch.eye(3),
        torch.eye(3),
        torch.arange(3),
        torch.eye(3),
        data=Dataset("x", ("a",), split, split),
        features_of=features_of,
    )
    found = measure(outputs, [{"name": "lfw", "folder": str(tmp_path)}])
    assert found["lfw_accuracy"] == 1.0 and found["lfw_eer"] == 0.0 and found["lfw_standard_error"] == 0.0
    assert len(seen) == 2 and torch.equal(seen[0].flip(3), seen[1]) and float(seen[0].max()) <= 1
    colour = seen[0][pairs.images.index("Bob/Bob_0002")].mean((1, 2)) * 255
    torch.testing.assert_close(colour, torch.tensor([36.0, 206.0, 36.0]), atol=12, rtol=0)
    assert measure(replace(outputs, features_of=None), ["lfw"]) == {}
    assert measure(replace(outputs, data_root=tmp_path), ["lfw"]) == found
    grey = TensorSplit(torch.zeros(1, 1, 112, 96, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    with pytest.raises(DataError, match=r"needs a network of colour images.*\(1, 112, 96\)"):
        measure(replace(outputs, data=Dataset("x", ("a",), grey, grey)), [{"name": "lfw", "folder": str(tmp_path)}])


def test_fisher_score_of_the_test_features():
    features = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [0.0, 3.0]])
    labels = torch.tensor([0, 0, 1, 1])
    outputs = Outputs(features, torch.zeros(4, 2), labels, torch.eye(2))
    expected = float(angular_fisher_score(features, labels))
    assert expected > 0 and measure(outputs, ["fisher"]) == {"angular_fisher_score": expected}


def test_lfw_that_lacks_something_says_what(tmp_path):
    with pytest.raises(DataError, match=r"lfw was not found[\s\S]*pairs\.txt"):
        lfw_pairs(tmp_path)
    little_lfw(tmp_path)
    (tmp_path / "lfw" / "images" / "Cid" / "Cid_0002.png").unlink()
    with pytest.raises(DataError, match=r"no image for 1 faces of pairs\.txt, such as Cid/Cid_0002"):
        lfw_pairs(tmp_path)
