"""Backbones: shapes, published sizes, exchangeable layers, shortcuts, gradients and precisions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hypersphere.errors import ArgumentError
from hypersphere.losses import Softmax
from hypersphere.models import CifarResNet, DigitsCNN, PlainCNN, ResNet, create
from hypersphere.models.networks import ResidualUnit
from hypersphere.registry import UnknownNameError

SMALL = {
    "plain-cnn": ((2, 9, 11), {"dim": 5, "convs_per_unit": 2, "widths": (3, 4)}),
    "digits-cnn": ((1, 8, 8), {"dim": 3, "width": 4}),
    "cifar-resnet": ((3, 12, 9), {"depth": 8, "widths": (4, 4, 6)}),
    "resnet": ((3, 17, 13), {"units": (1, 2), "widths": (4, 8)}),
}


def small(name: str, **options) -> tuple[nn.Module, torch.Tensor]:
    shape, sizes = SMALL[name]
    return create(name, shape, **{**sizes, **options}), torch.randn(3, *shape)


def size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", SMALL)
def test_output_shape(name):
    model, images = small(name)
    assert model(images).shape == (3, model.dim)
    assert model.dim == {"plain-cnn": 5, "digits-cnn": 3, "cifar-resnet": 6, "resnet": 8}[name]


@pytest.mark.parametrize(
    ("build", "shape", "dim"),
    [
        (PlainCNN, (3, 32, 32), 256),
        (lambda s: PlainCNN(s, dim=7, widths=(4, 4)), (1, 28, 28), 7),
        (lambda s: PlainCNN(s, dim=2, widths=(4, 4, 4), convs_per_unit=1), (1, 8, 15), 2),
        (DigitsCNN, (1, 28, 28), 3),
        (lambda s: CifarResNet(s, depth=8), (3, 32, 32), 64),
        (lambda s: CifarResNet(s, depth=8, dim=11), (3, 32, 32), 11),
        (lambda s: CifarResNet(s, depth=14, widths=(2, 3, 4), shortcut="projection"), (1, 7, 5), 4),
    ],
)
def test_output_shape_of_common_sizes(build, shape, dim):
    model = build(shape)
    assert model(torch.randn(2, *shape)).shape == (2, dim)
    assert model.dim == dim


# -------------------------------------------------------------------------------------- published sizes


@pytest.mark.parametrize(
    ("convs", "published"), [(1, 695040), (3, 1230720), (6, 2034240), (15, 4444800), (20, 5784000), (23, 6587520)]
)
def test_plain_cnn_has_the_published_number_of_parameters(convs, published):
    with torch.device("meta"):
        model = PlainCNN((3, 32, 32), convs_per_unit=convs)
        head = Softmax(model.dim, 10, bias=False)
    assert size(model) + size(head) == published
    assert sum(isinstance(layer, nn.Conv2d) for layer in model.modules()) == 3 * convs


def resnet_size(depth: int, widths: tuple[int, int, int], classes: int, *, projection: bool) -> int:
    """Convolutions without bias, two numbers a channel for each normalisation, a classifier with bias."""
    total = 3 * 3 * 3 * widths[0] + 2 * widths[0]
    before = widths[0]
    for stage, width in enumerate(widths):
        for unit in range((depth - 2) // 6):
            total += 9 * before * width + 9 * width * width + 4 * width
            if projection and (before != width or (stage > 0 and unit == 0)):
                total += before * width + 2 * width
            before = width
    return total + (before + 1) * classes


@pytest.mark.parametrize("shortcut", ["pad", "projection"])
@pytest.mark.parametrize("depth", [8, 20, 32, 110])
def test_resnet_has_the_expected_number_of_parameters(depth, shortcut):
    with torch.device("meta"):
        model = CifarResNet((3, 32, 32), depth=depth, shortcut=shortcut)
        head = Softmax(model.dim, 10)
    expected = resnet_size(depth, (16, 32, 64), 10, projection=shortcut == "projection")
    assert size(model) + size(head) == expected
    if (depth, shortcut) == (20, "pad"):
        assert expected == 269722  # the well-known 0.27 million


@pytest.mark.parametrize("depth", [8, 20, 110])
def test_depth_counts_the_layers_with_weights(depth):
    with torch.device("meta"):
        model = CifarResNet((3, 32, 32), depth=depth, dim=10)
    assert sum(isinstance(layer, nn.Conv2d | nn.Linear) for layer in model.modules()) == depth


def test_digits_cnn_is_the_plain_cnn_with_two_units_of_two():
    digits = DigitsCNN((1, 8, 8), dim=4, width=5)
    plain = PlainCNN((1, 8, 8), dim=4, convs_per_unit=2, widths=(5, 10), act="prelu")
    assert [tuple(p.shape) for p in digits.parameters()] == [tuple(p.shape) for p in plain.parameters()]


# ------------------------------------------------------------------------------------------ exchangeable layers


class MyConv(nn.Conv2d):
    pass


class MyNorm(nn.GroupNorm):
    def __init__(self, channels: int) -> None:
        super().__init__(1, channels)


class MyLinear(nn.Linear):
    pass


def kinds(model: nn.Module, *bases: type[nn.Module]) -> set[type[nn.Module]]:
    return {type(layer) for layer in model.modules() if isinstance(layer, bases)}


@pytest.mark.parametrize(
    ("name", "options"),
    [("plain-cnn", {}), ("digits-cnn", {}), ("cifar-resnet", {"dim": 5}), ("cifar-resnet", {"shortcut": "projection"})],
)
def test_layer_factories_are_used_everywhere(name, options):
    model, images = small(name, conv=MyConv, norm=MyNorm, act=nn.GELU, linear=MyLinear, **options)
    assert kinds(model, nn.Conv2d) == {MyConv}
    assert kinds(model, nn.BatchNorm2d, nn.GroupNorm) == {MyNorm}
    assert kinds(model, nn.ReLU, nn.PReLU, nn.GELU) == {nn.GELU}
    assert kinds(model, nn.Linear) <= {MyLinear}
    plain, _ = small(name, **options)
    for mine, base in ((MyConv, nn.Conv2d), (MyNorm, nn.BatchNorm2d), (MyLinear, nn.Linear)):
        assert sum(isinstance(m, mine) for m in model.modules()) == sum(isinstance(m, base) for m in plain.modules())
    assert model(images).shape == (3, model.dim)


@pytest.mark.parametrize("name", SMALL)
def test_layers_by_name(name):
    model, images = small(name, norm="identity", act="PReLU", conv="Conv2d")
    assert kinds(model, nn.BatchNorm2d, nn.ReLU) == set() and kinds(model, nn.PReLU) == {nn.PReLU}
    assert model(images).shape == (3, model.dim)
    with pytest.raises(UnknownNameError, match=r"unknown layer 'konv2d'\. Did you mean 'conv2d'\?"):
        small(name, conv="konv2d")


@pytest.mark.parametrize("name", SMALL)
def test_no_activation_behind_the_last_layer(name):
    """With one, all features would lie in one orthant."""
    model, images = small(name, **({"dim": 6} if "resnet" in name else {}))
    features = model(torch.randn(64, *images.shape[1:]))
    assert (features < 0).any() and (features > 0).any()


# ---------------------------------------------------------------------------------------------- bad arguments


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PlainCNN((3, 32, 32), dim=0), "dim must be at least 1, got 0"),
        (lambda: PlainCNN((3, 32, 32), convs_per_unit=0), "convs_per_unit must be at least 1, got 0"),
        (lambda: PlainCNN((3, 32, 32), widths=(4, 0)), "widths must be at least 1, got 0"),
        (lambda: PlainCNN((3, 32, 7)), r"shape must be at least 8 pixels high and wide here, got \(3, 32, 7\)"),
        (lambda: PlainCNN((3, 3, 32), widths=(2, 2)), r"shape must be at least 4 pixels .* got \(3, 3, 32\)"),
        (lambda: PlainCNN((3, 32, 32), kernel=4), "kernel must be odd and at least 1, got 4"),
        (lambda: PlainCNN((3, 32, 32), pool="4x4"), "pool must be one of '2x2', '2x2-ceil', '3x3', got '4x4'"),
        (lambda: PlainCNN((3, 32, 32), stem="7x7"), "stem must be one of 'none', '3x3', '3x3-stride2', 'imagenet'"),
        (lambda: PlainCNN((3, 32, 32), stem="3x3", widths=()), "stem needs units"),
        (lambda: PlainCNN((3, 16, 16), stem="imagenet"), "shape must be at least 32 pixels"),
        (lambda: PlainCNN((3, 32, 32), hidden=(0,)), "hidden must be at least 1, got 0"),
        (lambda: PlainCNN((3, 32, 32), init="zero"), "init must be one of 'conv', 'he', .* got 'zero'"),
        (lambda: PlainCNN((3, 32, 32), bn_eps=0.0), "bn_eps must be greater than 0, got 0.0"),
        (lambda: PlainCNN((3, 32, 32), bn_momentum=2.0), "bn_momentum must be at least 0 and at most 1, got 2.0"),
        (
            lambda: ResNet((3, 64, 64), units=(1, 1)),
            r"units must hold one number for each of the 4 stages, got \(1, 1\)",
        ),
        (lambda: ResNet((3, 64, 64), widths=(), units=()), "widths must hold one number for each"),
        (lambda: ResNet((3, 64, 64), strides=(1, 2)), "strides must hold one number for each of the 4 stages"),
        (lambda: ResNet((3, 64, 64), units=(1, 0, 1, 1)), "units must be at least 1, got 0"),
        (lambda: ResNet((3, 64, 64), unit="wide"), "unit must be one of 'basic', .* got 'wide'"),
        (lambda: ResNet((3, 64, 64), stem="none"), "stem must be one of '3x3', '3x3-stride2', 'imagenet', got 'none'"),
        (lambda: ResNet((3, 31, 64)), "shape must be at least 32 pixels"),
        (lambda: DigitsCNN((1, 3, 3)), "shape must be at least 4 pixels"),
        (lambda: DigitsCNN((1, 8, 8), width=0), "width must be at least 1, got 0"),
        (lambda: DigitsCNN((1, 8, 8), dim=0), "dim must be at least 1, got 0"),
        (lambda: CifarResNet((3, 32, 32), depth=21), r"depth must be 6n \+ 2 with n >= 1 .* got 21"),
        (lambda: CifarResNet((3, 32, 32), depth=2), r"depth must be 6n \+ 2 with n >= 1 .* got 2$"),
        (lambda: CifarResNet((3, 32, 32), depth=-4), "depth must be 6n"),
        (lambda: CifarResNet((3, 32, 32), shortcut="padd"), "shortcut must be one of 'pad', 'projection', got 'padd'"),
        (lambda: CifarResNet((3, 32, 32), widths=(4, 2, 8)), "widths must not decrease with shortcut='pad'"),
        (lambda: CifarResNet((3, 32, 32), widths=(0, 2, 8)), "widths must be at least 1, got 0"),
        (lambda: CifarResNet((3, 32, 32), dim=0), "dim must be at least 1, got 0"),
        (lambda: CifarResNet((3, 3, 9)), "shape must be at least 4 pixels"),
    ],
)
def test_bad_size_names_the_argument(build, message):
    with pytest.raises(ArgumentError, match=f"^{message}") as caught:
        build()
    assert caught.value.argument == message.split(" ")[0]


def test_smallest_images_and_shrinking_widths_with_projection_work():
    assert PlainCNN((1, 8, 8), dim=2, widths=(2, 2, 2))(torch.randn(2, 1, 8, 8)).shape == (2, 2)
    model = CifarResNet((1, 4, 4), depth=8, widths=(6, 4, 2), shortcut="projection")
    assert model(torch.randn(2, 1, 4, 4)).shape == (2, 2)


# ------------------------------------------------------------------------------------------------- shortcut


@pytest.mark.parametrize(("inputs", "outputs", "stride"), [(3, 3, 1), (3, 5, 1), (3, 3, 2), (3, 7, 2)])
def test_pad_shortcut_is_every_other_pixel_and_zero_channels(inputs, outputs, stride):
    unit = ResidualUnit(inputs, outputs, stride, "pad", nn.Conv2d, nn.BatchNorm2d, nn.ReLU)
    x = torch.randn(2, inputs, 7, 6)
    expected = torch.zeros(2, outputs, -(-7 // stride), -(-6 // stride))
    for i in range(expected.shape[2]):
        for j in range(expected.shape[3]):
            expected[:, :inputs, i, j] = x[:, :, stride * i, stride * j]
    assert torch.equal(unit._shortcut(x), expected)
    assert unit.project is None


@pytest.mark.parametrize("shortcut", ["pad", "projection"])
def test_residual_unit_is_branch_plus_shortcut(shortcut):
    unit = ResidualUnit(3, 5, 2, shortcut, nn.Conv2d, nn.BatchNorm2d, nn.ReLU).eval()
    x = torch.randn(2, 3, 8, 8)
    y = torch.relu(unit.norm1(nn.functional.conv2d(x, unit.conv1.weight, stride=2, padding=1)))
    y = unit.norm2(nn.functional.conv2d(y, unit.conv2.weight, padding=1))
    if shortcut == "pad":
        y[:, :3] += x[:, :, ::2, ::2]
    else:
        conv, norm = unit.project
        y = y + norm(torch.einsum("bchw,oc->bohw", x[:, :, ::2, ::2], conv.weight[:, :, 0, 0]))
    torch.testing.assert_close(unit(x), torch.relu(y))


def test_a_projection_stands_only_where_the_shape_changes():
    model = CifarResNet((3, 16, 16), depth=20, widths=(4, 8, 16), shortcut="projection")
    units = [unit for unit in model.features if isinstance(unit, ResidualUnit)]
    assert [unit.project is not None for unit in units] == [False] * 3 + [True, False, False] * 2
    assert [unit.stride for unit in units] == [1] * 3 + [2, 1, 1] * 2


def test_resnet_pools_by_the_mean():
    model, images = small("cifar-resnet")
    model.eval()
    torch.testing.assert_close(model(images), model.features(images).flatten(2).mean(2))


# ---------------------------------------------------------------------------------------- training behaviour


@pytest.mark.parametrize(("name", "options"), [(name, {}) for name in SMALL] + [("cifar-resnet", {"dim": 4})])
def test_gradients_reach_every_parameter(name, options):
    model, images = small(name, **options)
    model(images).square().sum().backward()
    for title, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), title
        assert parameter.grad.abs().sum() > 0, title


@pytest.mark.parametrize("name", SMALL)
def test_train_and_eval(name):
    model, images = small(name)
    before = [buffer.clone() for buffer in model.buffers()]
    model(images)
    assert any(not torch.equal(old, new) for old, new in zip(before, model.buffers(), strict=True))
    model.eval()
    before = [buffer.clone() for buffer in model.buffers()]
    with torch.no_grad():
        together = model(images)
        apart = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(together, apart)  # a sample does not depend on the rest of the batch
    assert all(torch.equal(old, new) for old, new in zip(before, model.buffers(), strict=True))


@pytest.mark.parametrize("name", SMALL)
def test_channels_last_gives_the_same(name):
    model, images = small(name)
    model.eval()
    expected = model(images)
    model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(images.to(memory_format=torch.channels_last)), expected)


@pytest.mark.parametrize("name", SMALL)
def test_bfloat16_autocast(name):
    model, images = small(name)
    model.eval()
    expected = model(images)
    with torch.autocast("cpu", torch.bfloat16):
        features = model(images)
    scale = expected.abs().max()
    assert features.isfinite().all() and (features.float() - expected).abs().max() < 0.05 * scale
    features.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_convolutions_start_as_he_et_al():
    model = PlainCNN((3, 8, 8), widths=(64, 96, 128), convs_per_unit=2)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            expected = (2 / (9 * layer.in_channels)) ** 0.5
            assert float(layer.weight.detach().std()) == pytest.approx(expected, rel=0.1)


def test_create_rejects_unknown_names_and_options():
    with pytest.raises(UnknownNameError, match=r"unknown model 'cifar-resnt'\. Did you mean 'cifar-resnet'\?"):
        create("cifar-resnt", (3, 32, 32))
    with pytest.raises(ArgumentError, match=r"depht is not an option of 'cifar-resnet'\. Did you mean 'depth'\?"):
        create("resnet-cifar", (3, 32, 32), depht=20)
