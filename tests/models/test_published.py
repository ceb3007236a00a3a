"""The published networks: layers, sizes, presets, first weights, and how they appear as options."""

from __future__ import annotations

import functools
import inspect
import math
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hypersphere import recipe
from hypersphere.errors import ArgumentError
from hypersphere.losses import Softmax
from hypersphere.models import PlainCNN, create, models
from hypersphere.models.networks import ResidualUnit

MNIST, CIFAR, IMAGENET, FACES = (1, 28, 28), (3, 32, 32), (3, 224, 224), (3, 112, 96)


def plan(text: str) -> list[tuple[int, int, int]]:
    """Convolutions (kernel, filters, stride) from words: ``3*5x64/2`` is three of 5x5 with 64 filters and stride 2."""
    words = [[int(number) for number in re.split(r"[*x/]", word)] for word in text.split()]
    return [(kernel, filters, stride) for times, kernel, filters, stride in words for _ in range(times)]


def units(counts: tuple[int, ...], widths: tuple[int, ...], *, projection: bool) -> str:
    """Stages of basic residual units; a projection comes after the two convolutions of its unit."""
    first, *later = zip(counts, widths, strict=True)
    found = [f"{2 * first[0]}*3x{first[1]}/1"]
    for count, width in later:
        found += [f"1*3x{width}/2 1*3x{width}/1", f"1*1x{width}/2" * projection, f"{2 * (count - 1)}*3x{width}/1"]
    return " ".join(found)


def bottlenecks(count: int, width: int, stride: int) -> str:
    first = f"1*1x{width}/1 1*3x{width}/{stride} 1*1x{4 * width}/1 1*1x{4 * width}/{stride} "
    return first + f"1*1x{width}/1 1*3x{width}/1 1*1x{4 * width}/1 " * (count - 1)


FIVE, TWO, SMALL, USUAL = (5, 5, 5), (2, 2, 2, 2), (16, 32, 64), (64, 128, 256, 512)

# Image shape, feature dimension and convolutions in order, written out from the published tables.
NETWORKS: dict[str, tuple[tuple[int, int, int], int, str]] = {
    "cnn3_sphere": (CIFAR, 256, "1*3x64/1 1*3x96/1 1*3x128/1"),
    "cnn9_sphere": (CIFAR, 256, "3*3x64/1 3*3x96/1 3*3x128/1"),
    "cnn18_sphere": (CIFAR, 256, "6*3x64/1 6*3x96/1 6*3x128/1"),
    "cnn45_sphere": (CIFAR, 256, "15*3x64/1 15*3x96/1 15*3x128/1"),
    "cnn60_sphere": (CIFAR, 256, "20*3x64/1 20*3x96/1 20*3x128/1"),
    "cnn69_sphere": (CIFAR, 256, "23*3x64/1 23*3x96/1 23*3x128/1"),
    "resnet32_sphere": (CIFAR, 128, "1*3x64/1 " + units(FIVE, (64, 96, 128), projection=True)),
    "resnet32_sphere_wide": (CIFAR, 384, "1*3x96/1 " + units(FIVE, (96, 192, 384), projection=True)),
    "resnet18_sphere": (IMAGENET, 1024, "1*7x256/2 " + units(TWO, (256, 512, 768, 1024), projection=True)),
    "cnn9_dc": (CIFAR, 512, "3*3x64/1 3*3x128/1 3*3x256/1"),
    "cnn9_dc_adv": (CIFAR, 256, "3*3x32/1 3*3x64/1 3*3x128/1"),
    "resnet32_dc": (CIFAR, 384, "1*3x96/1 " + units(FIVE, (96, 192, 384), projection=True)),
    "resnet18_modified": (
        IMAGENET,
        1024,
        "1*7x128/2 1*3x128/2 2*3x128/1 1*3x256/2 4*3x256/1 1*3x512/2 6*3x512/1 1*3x1024/2",
    ),
    "mnist2d_dc": (MNIST, 2, "2*3x32/1 2*3x64/1 2*3x128/1"),
    "cnn6_mhe": (CIFAR, 256, "2*3x64/1 2*3x128/1 2*3x256/1"),
    "cnn9_mhe": (CIFAR, 256, "3*3x64/1 3*3x128/1 3*3x256/1"),
    "cnn15_mhe": (CIFAR, 256, "5*3x64/1 5*3x128/1 5*3x256/1"),
    "cnn3_comhe": (CIFAR, 64, "1*3x32/1 1*3x64/1 1*3x64/1"),
    "cnn9_comhe": (CIFAR, 64, "3*3x32/1 3*3x64/1 3*3x64/1"),
    "resnet32_mhe": (CIFAR, 256, "1*3x64/1 " + units(FIVE, (64, 128, 256), projection=False)),
    "resnet32_comhe": (CIFAR, 256, "1*3x64/1 " + units(FIVE, (64, 128, 256), projection=True)),
    "resnet18": (IMAGENET, 512, "1*7x64/2 " + units(TWO, USUAL, projection=True)),
    "resnet34": (IMAGENET, 512, "1*7x64/2 " + units((3, 4, 6, 3), USUAL, projection=True)),
    "resnet50": (
        IMAGENET,
        2048,
        "1*7x64/2 " + bottlenecks(3, 64, 1) + bottlenecks(4, 128, 2) + bottlenecks(6, 256, 2) + bottlenecks(3, 512, 2),
    ),
    "mlp3_opt": (MNIST, 256, ""),
    "cnn6_opt": (CIFAR, 64, "6*3x64/1"),
    "cnn9_opt": (CIFAR, 64, "9*3x64/1"),
    "cnn9_opt_wide": (CIFAR, 256, "3*3x64/1 3*3x128/1 3*3x256/1"),
    "cnn10_opt": (IMAGENET, 256, "1*7x64/2 3*3x64/1 3*3x128/1 3*3x256/1"),
    "cnn4_opt": ((3, 84, 84), 1600, "4*3x64/1"),
    "resnet20_opt": (CIFAR, 64, "1*3x16/1 " + units((3, 3, 3), SMALL, projection=False)),
    "resnet32_opt": (CIFAR, 64, "1*3x16/1 " + units(FIVE, SMALL, projection=False)),
    "resnet18_opt_a": (IMAGENET, 128, "1*7x64/2 " + units(TWO, (64, 128, 128, 128), projection=True)),
    "resnet18_opt_b": (IMAGENET, 512, "1*7x64/2 " + units(TWO, USUAL, projection=True)),
    "mnist3d_opt": (MNIST, 3, "2*3x32/1 2*3x64/1 2*3x128/1"),
    "lsoftmax_mnist2d": (MNIST, 2, "2*5x32/1 2*5x64/1 2*5x128/1"),
    "lsoftmax_mnist": (MNIST, 256, "1*3x64/1 3*3x64/1 3*3x64/1 3*3x64/1"),
    "lsoftmax_cifar10": (CIFAR, 256, "1*3x64/1 4*3x64/1 4*3x96/1 4*3x128/1"),
    "lsoftmax_cifar100": (CIFAR, 512, "1*3x96/1 4*3x96/1 4*3x192/1 4*3x384/1"),
    "lsoftmax_lfw": (FACES, 512, "1*3x64/2 4*3x64/1 4*3x256/1 4*3x256/1 4*3x256/1"),
}
RELEASED = [name for name in NETWORKS if "preset" in inspect.signature(models[name].factory).parameters]
LAYERS = (nn.Conv2d, nn.Linear)


def meta(name: str, shape: tuple[int, int, int] | None = None, **options: Any) -> Any:
    """The network without memory, which costs nothing at any size."""
    with torch.device("meta"):
        return create(name, shape or NETWORKS[name][0], **options)


built = functools.cache(meta)  # for tests that only look


def layers(model: nn.Module) -> list[nn.Conv2d | nn.Linear]:
    return [layer for layer in model.modules() if isinstance(layer, LAYERS)]


def convolutions(model: nn.Module) -> list[tuple[int, int, int]]:
    found = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    assert all(layer.padding == ((layer.kernel_size[0] - 1) // 2,) * 2 for layer in found)  # all keep the size
    return [(layer.kernel_size[0], layer.out_channels, layer.stride[0]) for layer in found]


def tiny(name: str, **options: Any) -> Any:
    """The network with a few filters, and images for it."""
    shape, _, convs = NETWORKS[name]
    stages = 4 if (shape == IMAGENET and name != "cnn10_opt") or name in ("cnn4_opt", "lsoftmax_lfw") else 3
    small = (2, 64, 65)
    return create(name, small, **{"widths": (3,) * stages if convs else (), **options}), torch.randn(3, *small)


def test_every_published_network_is_here():
    generic = {name for name in models if inspect.isclass(models[name].factory)}
    assert {name.replace("_", "-") for name in NETWORKS} == set(models) - generic


# ------------------------------------------------------------------------------------------------- layers and sizes


@pytest.mark.parametrize("name", NETWORKS)
def test_convolutions_in_order(name):
    assert convolutions(built(name)) == plan(NETWORKS[name][2])
    assert all(layer.bias is None for layer in layers(built(name))) == (name != "mlp3_opt")


@pytest.mark.parametrize("name", NETWORKS)
def test_features_have_the_published_dimension(name):
    shape, dim, _ = NETWORKS[name]
    model = built(name)
    assert model.dim == dim
    assert model(torch.empty(2, *shape, device="meta")).shape == (2, dim)


@pytest.mark.parametrize(
    ("name", "maps"),
    [
        ("cnn9_sphere", [32, 16, 8, 4]),
        ("cnn4_opt", [84, 42, 21, 10, 5]),
        ("lsoftmax_mnist", [28, 14, 7, 4]),
        ("mnist3d_opt", [28, 14, 7, 4]),
        ("cnn10_opt", [112, 56, 28, 14, 7]),
        ("lsoftmax_lfw", [56, 28, 14, 7]),
        ("resnet18", [112, 56, 28, 14, 7]),
        ("resnet18_modified", [112, 56, 28, 14, 7, 4]),
        ("resnet32_sphere", [32, 16, 8]),
    ],
)
def test_maps_shrink_as_published(name, maps):
    model = meta(name)
    seen: list[int] = []
    for layer in model.features:
        layer.register_forward_hook(lambda _layer, _inputs, out: seen.append(out.shape[2]))
    model(torch.empty(2, *NETWORKS[name][0], device="meta"))
    assert [seen[0]] + [new for old, new in pairwise(seen) if new != old] == maps


def count(model: nn.Module, classes: int, norms: bool) -> int:
    """Parameters with a classifier that has no bias; without ``norms`` kernels only."""
    with torch.device("meta"):
        head = Softmax(model.dim, classes, bias=False)
    own = model.parameters() if norms else (layer.weight for layer in layers(model))
    return sum(p.numel() for p in (*own, *head.parameters()))


@pytest.mark.parametrize(
    ("name", "options", "classes", "expected"),
    [
        ("cnn3_sphere", {"fc_bn": False}, 10, 695_040),
        ("cnn9_sphere", {"fc_bn": False}, 10, 1_230_720),
        ("cnn9_sphere", {}, 10, 1_230_720 + 512),
        ("cnn18_sphere", {"fc_bn": False}, 10, 2_034_240),
        ("cnn45_sphere", {"fc_bn": False}, 10, 4_444_800),
        ("cnn60_sphere", {"fc_bn": False}, 10, 5_784_000),
        ("cnn69_sphere", {"fc_bn": False}, 10, 6_587_520),
        ("cnn9_sphere", {"fc_bn": False, "widths": (16, 32, 48)}, 10, 283_120),
        ("cnn9_sphere", {"preset": "released"}, 10, 3_859_712),
        ("cnn9_sphere", {"fc_bn": False, "widths": (256, 384, 512)}, 10, 13_320_192),
        ("resnet32_sphere", {}, 10, 2_635_904),
        ("resnet32_sphere_wide", {}, 10, 16_702_176),
        ("resnet32_sphere_wide", {}, 100, 16_736_736),
        ("resnet18_sphere", {}, 1000, 67_868_416),
        ("resnet18", {}, 1000, 11_689_512 - 1000),  # the well-known numbers have 1000 biases
        ("resnet34", {}, 1000, 21_797_672 - 1000),
        ("resnet50", {}, 1000, 25_557_032 - 1000),
        ("resnet20_opt", {}, 10, 269_722 - 10),
    ],
)
def test_number_of_parameters(name, options, classes, expected):
    assert count(meta(name, **options), classes, norms=True) == expected


@pytest.mark.parametrize(
    ("name", "options", "classes", "expected"),
    [
        ("cnn9_dc", {}, 100, 4_067_008),
        ("cnn9_dc_adv", {}, 10, 1_006_944),
        ("resnet32_dc", {}, 100, 16_721_952),
        ("resnet18", {}, 1000, 11_678_912),
        ("resnet18_modified", {}, 1000, 24_193_408),
        ("resnet18_modified", {"preset": "released"}, 1000, 42_920_320),
        ("cnn6_opt", {}, 100, 257_984),
        ("cnn9_opt_wide", {}, 100, 2_992_832),
        ("mlp3_opt", {}, 10, 784 * 256 + 256 * 256 + 2560),
    ],
)
def test_number_of_weights(name, options, classes, expected):
    assert count(meta(name, **options), classes, norms=False) == expected


@pytest.mark.parametrize(
    ("name", "options", "classes", "millions", "tolerance"),
    [
        ("cnn9_sphere", {}, 10, 160, 0.5),
        ("cnn9_sphere", {"preset": "released"}, 10, 637, 0.5),
        ("cnn69_sphere", {}, 10, 1529, 0.5),
        ("resnet32_sphere", {}, 10, 679, 0.5),
        ("resnet32_sphere_wide", {}, 10, 2475, 0.5),
        ("resnet18_sphere", {}, 0, 20_112, 0.5),
        ("cnn9_dc", {}, 100, 268.2, 0.05),
        ("cnn9_dc_adv", {}, 10, 67.5, 0.05),
    ],
)
def test_multiply_adds_per_image(name, options, classes, millions, tolerance):
    model = meta(name, **options)
    done = [classes * model.dim]
    for layer in layers(model):
        layer.register_forward_hook(lambda at, _, out: done.append(out[0].numel() * at.weight[0].numel()))
    model.eval()(torch.empty(1, *NETWORKS[name][0], device="meta"))
    assert sum(done) / 1e6 == pytest.approx(millions, abs=tolerance)


@pytest.mark.parametrize(
    ("name", "neurons"),
    [
        (
            "cnn9_mhe",
            "64x27 64x576 64x576 128x576 128x1152 128x1152 256x1152 256x2304 256x2304 256x4096",
        ),
        ("cnn6_opt", "64x27 64x576 64x576 64x576 64x576 64x576 64x1024"),
        ("cnn9_opt", "64x27 64x576 64x576 64x576 64x576 64x576 64x576 64x576 64x576 64x1024"),
    ],
)
def test_number_and_dimension_of_the_neurons(name, neurons):
    sizes = [layer.weight.flatten(1).shape for layer in layers(built(name))]
    assert " ".join(f"{number}x{dimension}" for number, dimension in sizes) == neurons


def test_fully_connected_layers():
    sizes = {
        name: [tuple(f.weight.shape) for f in layers(built(name)) if isinstance(f, nn.Linear)] for name in NETWORKS
    }
    assert sizes["mlp3_opt"] == [(256, 784), (256, 256)]
    assert sizes["mnist2d_dc"] == [(256, 2048), (2, 256)]
    assert sizes["cnn10_opt"] == [(256, 12_544)]
    assert sizes["lsoftmax_lfw"] == [(512, 7 * 6 * 256)]
    assert sizes["cnn4_opt"] == []
    assert all(sizes[name] == [] for name in NETWORKS if name.startswith("resnet"))
    assert all(len(sizes[name]) == 1 for name in NETWORKS if "sphere" in name and "cnn" in name)


def test_fc_equals_a_convolution_over_the_whole_map():
    model, images = tiny("cnn3_comhe", dim=5)
    model.eval()
    kernel = model.embed.weight.unflatten(1, (3, 8, 8))
    expected = F.conv2d(model.features(images), kernel).flatten(1)
    torch.testing.assert_close(model(images), expected)


# ------------------------------------------------------------------------------------------- what follows what


def kinds(model: nn.Module) -> list[str]:
    """Class names of the leaves in order, without the identities."""
    leaves = [layer for layer in model.modules() if not list(layer.children()) and not isinstance(layer, nn.Identity)]
    return [type(layer).__name__ for layer in leaves if not isinstance(layer, nn.Sequential)]


def test_order_inside_the_plain_networks():
    block = ["Conv2d", "BatchNorm2d", "ReLU"]
    unit = [*block, "MaxPool2d"]
    assert kinds(built("cnn3_sphere")) == [*unit * 3, "Linear", "BatchNorm2d"]
    assert kinds(meta("cnn3_sphere", preset="released")) == [*unit * 3, "Linear"]
    assert kinds(built("cnn3_comhe")) == [*unit * 3, "Linear"]
    assert kinds(built("cnn9_dc_adv")) == [*[*["Conv2d", "ReLU"] * 3, "MaxPool2d"] * 3, "Linear"]
    assert kinds(built("cnn4_opt")) == unit * 4
    assert kinds(built("cnn10_opt"))[:7] == [*unit, *block]
    assert kinds(built("mlp3_opt")) == ["Linear", "ReLU"] * 2
    assert kinds(built("mnist2d_dc"))[-5:] == ["MaxPool2d", "Linear", "BatchNorm2d", "ReLU", "Linear"]
    block = ["Conv2d", "BatchNorm2d", "PReLU"]
    assert kinds(built("lsoftmax_mnist")) == [*block, *[*block * 3, "MaxPool2d"] * 3, "Linear"]
    assert kinds(built("lsoftmax_lfw"))[-4:] == [*block, "Linear"]  # no pooling after the last unit


@pytest.mark.parametrize(("name", "activates"), [("resnet32_sphere", True), ("resnet32_dc", False)])
def test_activation_of_the_stem(name, activates):
    assert kinds(meta(name).features[:3])[2:] == (["ReLU"] if activates else [])
    assert kinds(meta(name, root_relu=not activates).features[:3])[2:] == ([] if activates else ["ReLU"])


@pytest.mark.parametrize("kind", ["basic", "bottleneck", "preactivation", "sphereface"])
@pytest.mark.parametrize("changes", [False, True])
def test_residual_units_in_plain_words(kind, changes):
    inputs, stride = (3, 2) if changes and kind != "sphereface" else (8, 1)
    unit = ResidualUnit(inputs, 8, stride, "projection", "conv2d", "batchnorm2d", "prelu", kind=kind, slope=0.1)
    for norm in [layer for layer in unit.modules() if isinstance(layer, nn.BatchNorm2d)]:
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.normal_(norm.bias)
    x = torch.randn(4, inputs, 7, 6)

    def conv(y, layer):
        return F.conv2d(y, layer.weight, stride=layer.stride, padding=layer.weight.shape[-1] // 2)

    def bn(y, layer):
        mean, var = y.mean((0, 2, 3), keepdim=True), y.var((0, 2, 3), keepdim=True, correction=0)
        return (y - mean) / (var + 1e-5).sqrt() * layer.weight[:, None, None] + layer.bias[:, None, None]

    def prelu(y):
        return torch.where(y > 0, y, 0.1 * y)

    shortcut = x
    if kind == "preactivation":
        start = prelu(bn(x, unit.norm1))
        if unit.project is not None:
            (layer,) = unit.project
            shortcut = conv(start, layer)
        expected = conv(prelu(bn(conv(start, unit.conv1), unit.norm2)), unit.conv2) + shortcut
    else:
        y = prelu(bn(conv(x, unit.conv1), unit.norm1))
        y = bn(conv(y, unit.conv2), unit.norm2)
        if kind == "bottleneck":
            assert unit.conv1.out_channels == unit.conv2.out_channels == 2
            y = bn(conv(prelu(y), unit.conv3), unit.norm3)
        if unit.project is not None:
            shortcut = bn(conv(x, unit.project[0]), unit.project[1])
        expected = y + shortcut if kind == "sphereface" else prelu(y + shortcut)
    torch.testing.assert_close(unit(x), expected)
    assert (unit.project is not None) == (inputs == 3)


def test_preactivated_network_ends_with_normalisation_and_activation():
    model = meta("resnet32_comhe", unit="preactivation")
    assert kinds(model.features[:3]) == ["Conv2d"] and kinds(model.features[-2:]) == ["BatchNorm2d", "ReLU"]
    assert convolutions(model) == plan(NETWORKS["resnet32_comhe"][2])


# --------------------------------------------------------------------------------------------------- presets


def test_batch_norm_of_the_released_code():
    for name in RELEASED:
        norms = [layer for layer in meta(name, preset="released").modules() if isinstance(layer, nn.BatchNorm2d)]
        expected = (1e-5, 0.1) if name.startswith("lsoftmax") else (1e-3, 1e-3)
        assert {(norm.eps, norm.momentum) for norm in norms} == {expected}, name
    for name in NETWORKS:
        norms = [layer for layer in built(name).modules() if isinstance(layer, nn.BatchNorm2d)]
        assert {(norm.eps, norm.momentum) for norm in norms} <= {(1e-5, 0.1)}, name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cnn9_sphere", "3*3x128/1 3*3x192/1 3*3x256/1"),
        ("lsoftmax_mnist", "1*3x64/1 3*3x64/1 3*3x128/1 3*3x256/1"),
        ("lsoftmax_cifar10", "1*3x64/1 4*3x64/1 4*3x128/1 4*3x256/1"),
        ("resnet18_modified", "1*7x128/2 2*3x128/1 1*3x256/2 4*3x256/1 1*3x512/2 6*3x512/1 1*3x1024/2 2*3x1024/1"),
        ("resnet32_dc", NETWORKS["resnet32_dc"][2]),
    ],
)
def test_convolutions_of_the_released_code(name, expected):
    model = meta(name, preset="released")
    assert convolutions(model) == plan(expected)
    shape = NETWORKS[name][0]
    assert model(torch.empty(2, *shape, device="meta")).shape == (2, model.dim)


@pytest.mark.parametrize("name", ["lsoftmax_mnist", "lsoftmax_cifar10"])
def test_released_l_softmax_networks_end_with_norm_and_relu(name):
    model = meta(name, preset="released")
    assert model.dim == 512 and kinds(model)[-3:] == ["Linear", "BatchNorm2d", "ReLU"]
    assert "PReLU" not in kinds(model)


def test_explicit_options_win_over_the_preset():
    model = meta("cnn9_sphere", preset="released", widths=(64, 96, 128), bn_momentum=0.1, fc_bn=True)
    assert convolutions(model) == plan(NETWORKS["cnn9_sphere"][2]) and kinds(model)[-1] == "BatchNorm2d"
    norm = model.features[1]
    assert (norm.eps, norm.momentum) == (1e-3, 0.1)
    assert meta("lsoftmax_mnist", preset="released", fc_act=False, dim=7).dim == 7


def test_a_preset_exists_where_there_is_something_to_choose():
    assert "cnn9_mhe" in RELEASED and "resnet18" not in RELEASED and "lsoftmax_lfw" not in RELEASED
    with pytest.raises(ArgumentError, match="preset is not an option of 'resnet18'"):
        create("resnet18", IMAGENET, preset="released")
    with pytest.raises(ArgumentError, match=r"^preset must be one of 'paper', 'released', got 'code'"):
        create("cnn9_mhe", CIFAR, preset="code")


# -------------------------------------------------------------------------------------------------- options


def test_names_show_their_own_defaults():
    shown = {name: {o.name: o.default for o in models[name].options} for name in NETWORKS}
    assert shown["cnn9_dc"]["dim"] == 512 and shown["cnn9_dc"]["widths"] == (64, 128, 256)
    assert shown["resnet32_dc"]["root_relu"] is False and shown["resnet32_sphere"]["root_relu"] is True
    assert shown["resnet32_mhe"]["shortcut"] == "pad" and shown["resnet32_comhe"]["shortcut"] == "projection"
    assert shown["cnn9_sphere"]["widths"] is None and shown["cnn9_sphere"]["preset"] == "paper"
    assert shown["lsoftmax_lfw"]["act"] == "prelu" and shown["cnn9_dc_adv"]["norm"] == "identity"
    for name in NETWORKS:
        assert not {"convs_per_unit", "units", "stem", "kernel"} & set(shown[name])
        assert all(option.help for option in models[name].options), name
    assert "Released: widths=(128, 192, 256), fc_bn=False" in models["cnn9_sphere"].help
    assert "(paper: widths=(64, 96, 128), fc_bn=True)" in models["cnn9_sphere"].help


def test_unknown_options_are_reported():
    with pytest.raises(ArgumentError, match=r"widhts is not an option of 'cnn9-mhe'\. Did you mean 'widths'\?"):
        create("cnn9_mhe", CIFAR, widhts=(1, 2, 3))
    with pytest.raises(ArgumentError, match="units is not an option of 'resnet32-dc'"):
        create("resnet32_dc", CIFAR, units=(1, 1, 1))


@pytest.mark.parametrize("name", NETWORKS)
def test_recipes_build_the_same_network(name):
    """A recipe fills in every default, and the preset must still decide."""
    for preset in ["paper", "released"] if name in RELEASED else ["paper"]:
        given = {"preset": preset} if name in RELEASED else {}
        plan = recipe.check({"model": {"name": name, **given}})
        plan = recipe.check({"model": plan.model.model_dump(mode="json")})
        with torch.device("meta"):
            model = plan.build(models, ("model",), NETWORKS[name][0])
        assert repr(model) == repr(meta(name, **given) if given else built(name))


class MyConv(nn.Conv2d):
    pass


class MyLinear(nn.Linear):
    pass


@pytest.mark.parametrize("name", ["resnet32_sphere", "resnet18_opt_a", "resnet50"])
def test_shortcuts_are_ordinary_unless_asked(name):
    """They are found by their name, too."""
    for decoupled in (False, True):
        model = meta(name, conv=MyConv, shortcut_decoupled=decoupled)
        shortcuts = {n for n, layer in model.named_modules() if isinstance(layer, nn.Conv2d) and "project" in n}
        assert len(shortcuts) == sum(isinstance(u, ResidualUnit) and u.project is not None for u in model.modules())
        assert shortcuts
        for title, layer in model.named_modules():
            if isinstance(layer, nn.Conv2d):
                assert (type(layer) is MyConv) == (decoupled or title not in shortcuts), title


def test_fully_connected_layers_are_ordinary_if_asked():
    assert {type(f) for f in layers(meta("mnist2d_dc", linear=MyLinear)) if isinstance(f, nn.Linear)} == {MyLinear}
    ordinary = meta("mnist2d_dc", linear=MyLinear, fc_decoupled=False)
    assert {type(f) for f in layers(ordinary) if isinstance(f, nn.Linear)} == {nn.Linear}


# ------------------------------------------------------------------------------------------------ first weights


@pytest.mark.parametrize(("name", "options"), [("cnn3_sphere", {}), ("lsoftmax_mnist", {"preset": "released"})])
def test_all_kernels_start_as_he_et_al(name, options):
    torch.manual_seed(0)
    for layer in layers(create(name, NETWORKS[name][0], **options)):
        weight = layer.weight.detach()
        fan_in = weight[0].numel()
        assert float(weight.std()) == pytest.approx(math.sqrt(2 / fan_in), rel=0.1)
        assert float(weight.abs().max()) > 3 * math.sqrt(2 / fan_in)  # normal, not uniform


def test_modified_resnet_starts_as_sphereface():
    torch.manual_seed(0)
    model = create("resnet18_modified", (3, 64, 64), widths=(16, 32, 32, 48))
    inside = {m for unit in model.modules() if isinstance(unit, ResidualUnit) for m in unit.modules()}
    for layer in layers(model):
        weight = layer.weight.detach()
        if layer in inside:
            assert float(weight.std()) == pytest.approx(0.01, rel=0.1)
        else:
            area = layer.kernel_size[0] ** 2
            bound = math.sqrt(6 / (area * (layer.in_channels + layer.out_channels)))
            assert 0.98 * bound < float(weight.abs().max()) <= bound
    slopes = [layer.weight for layer in model.modules() if isinstance(layer, nn.PReLU)]
    assert [len(slope) for slope in slopes] == [16, 16, 16, 32, 32, 32, 32, 32, 32, 32, 48]
    assert all((slope == 0).all() for slope in slopes)


@pytest.mark.parametrize(("init", "scale"), [("normal", 1.0), ("xavier", math.sqrt(2 / (784 + 256)))])
def test_first_weights_of_the_mlp(init, scale):
    torch.manual_seed(0)
    model = create("mlp3_opt", MNIST, init=init)
    assert float(model.hidden[0].weight.detach().std()) == pytest.approx(scale, rel=0.02)
    assert all((layer.bias == 0).all() for layer in layers(model))


def test_prelu_of_the_caffe_networks_has_a_slope_for_each_channel():
    model = meta("lsoftmax_mnist2d")
    assert [layer.num_parameters for layer in model.modules() if isinstance(layer, nn.PReLU)] == [
        32,
        32,
        64,
        64,
        128,
        128,
    ]
    assert float(create("lsoftmax_mnist2d", (1, 8, 8)).features[2].weight.detach().unique()) == 0.25


def test_plain_cnn_still_draws_the_same_weights():
    """Recorded results depend on these: layers in order with torch's own weights, then He's for the convolutions."""
    for name, options, sizes, dim in (
        ("plain-cnn", {"dim": 4, "widths": (3, 5), "convs_per_unit": 1}, [(1, 3), (3, 5)], 4),
        ("digits-cnn", {"width": 3}, [(1, 3), (3, 3), (3, 6), (6, 6)], 3),
    ):
        torch.manual_seed(5)
        model = create(name, (1, 8, 8), **options)
        after = torch.rand(1)
        torch.manual_seed(5)
        convs = [nn.Conv2d(i, o, 3, bias=False) for i, o in sizes]
        embed = nn.Linear(4 * sizes[-1][1], dim, bias=False)
        for conv in convs:
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        assert torch.equal(after, torch.rand(1))
        for mine, plain in zip(layers(model), [*convs, embed], strict=True):
            assert torch.equal(mine.weight, plain.weight)


# ------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("name", [n for n in NETWORKS if n not in ("cnn45_sphere", "cnn60_sphere", "cnn69_sphere")])
def test_a_step_moves_everything(name):
    torch.manual_seed(0)
    model, images = tiny(name)
    # Random signs: behind a normalisation the plain sum of squares is constant.
    features = model(images)
    (features * torch.randn_like(features)).sum().backward()
    for title, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), title
    moved = sum(bool(p.grad.abs().sum() > 0) for p in model.parameters())
    assert moved > 0.9 * len(list(model.parameters()))  # a ReLU may be dead at this size
    assert model.eval()(images[:1]).shape == (1, model.dim)


def test_normalisation_after_the_fc_is_over_the_batch():
    model, images = tiny("cnn3_sphere")
    features = model(images)
    torch.testing.assert_close(features.mean(0), torch.zeros(256), atol=1e-4, rtol=0)
    assert isinstance(PlainCNN(CIFAR, fc_bn=True, norm="identity").after[0][0], nn.Identity)
