"""The published networks by name: each is :class:`PlainCNN` or :class:`ResNet` with its layers fixed.

A name fixes the layers; what experiments vary (widths, normalisation, activation, layer families, ...) stays an option.
Where the released code differs from the paper, the option ``preset`` chooses, and an option that the two set
differently has the default ``None``, which takes the value of the preset. Whatever is given explicitly wins.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal

from torch import nn

from hypersphere.errors import check_choice
from hypersphere.models.networks import PlainCNN, ResNet, Shape, models
from hypersphere.registry import Entry

# What makes a network the one of its name, and is no option of it.
_FIXED = {
    *("convs_per_unit", "kernel", "pool", "pool_last", "hidden", "fc_bias"),
    *("units", "strides"),
    *("stem", "slope"),
}


def _text(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)


def _publish(
    name: str, build: type[nn.Module], text: str, released: dict[str, Any] | None = None, **paper: Any
) -> None:
    """Register ``build`` with other defaults under ``name``; ``released`` is what the preset of that name changes."""
    released = released or {}
    paper = {"init": "he", **paper}
    parameters = [inspect.Parameter("shape", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Shape)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    helps = {"shape": "Shape ``(C, H, W)`` of one image."}
    printed: dict[str, Any] = {}
    for option in Entry(name, build, (), ("shape",)).options:
        default, annotation, help_ = paper.get(option.name, option.default), option.annotation, option.help
        if option.name in released:
            printed[option.name] = default
            help_ += f" By the preset: {default!r}, released {released[option.name]!r}."
            default, annotation = None, annotation | None
        if option.name not in _FIXED:
            parameters.append(inspect.Parameter(option.name, keyword, default=default, annotation=annotation))
            helps[option.name] = help_
    if released:
        presets = Literal["paper", "released"]
        parameters.append(inspect.Parameter("preset", keyword, default="paper", annotation=presets))
        helps["preset"] = "Whose values the options have that are not given: the paper's or the released code's."
        text += f" Released: {_text(released)}" + (f" (paper: {_text(printed)})." if _text(printed) else ".")

    def network(shape: Shape, *, preset: str = "paper", **options: Any) -> nn.Module:
        check_choice("preset", preset, ("paper", "released"))
        given = {key: value for key, value in options.items() if value is not None or key not in released}
        return build(shape, **{**paper, **(released if preset == "released" else {}), **given})

    # Recipes, the command line and messages read names, types, defaults and help from these.
    network.__name__ = network.__qualname__ = name
    network.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    network.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    vars(network)["later_options"] = Entry(name, build, (), ("shape",)).later
    network.__doc__ = f"{text}\n\nArgs:\n" + "\n".join(f"    {key}: {value}" for key, value in helps.items())
    models.register(name)(network)


# The nearest that torch has to the batch normalisation of the TensorFlow code.
_BN = {"bn_eps": 1e-3, "bn_momentum": 1e-3}

# ------------------------------------------------------------------------------------------------ SphereNet

for _depth in (3, 9, 18, 45, 60, 69):
    _publish(
        f"cnn{_depth}_sphere",
        PlainCNN,
        f"SphereNet's CNN-{_depth}: 3 x {_depth // 3} convolutions, FC 256.",
        {"widths": (128, 192, 256), "fc_bn": False, **_BN},  # with linear and sigmoid layers they have fc_bn=True
        convs_per_unit=_depth // 3,
        fc_bn=True,
    )
for _suffix, _widths in {"sphere": (64, 96, 128), "sphere_wide": (96, 192, 384)}.items():
    _publish(
        f"resnet32_{_suffix}",
        ResNet,
        f"SphereNet's ResNet-32 with {'/'.join(map(str, _widths))} filters for CIFAR.",
        _BN,
        units=(5, 5, 5),
        widths=_widths,
        stem="3x3",
    )
_publish("resnet18_sphere", ResNet, "SphereNet's wide ResNet-18 for ImageNet.", widths=(256, 512, 768, 1024))

# ------------------------------------------------------------------------------------------- decoupled networks

_publish("cnn9_dc", PlainCNN, "Decoupled CNN-9: 3 x 3 convolutions, FC 512.", _BN, widths=(64, 128, 256), dim=512)
_publish(
    "cnn9_dc_adv",
    PlainCNN,
    "Decoupled CNN-9 of the adversarial experiments: 3 x 3 convolutions, FC 256, no normalisation.",
    widths=(32, 64, 128),
    norm="identity",
)
_publish(
    "resnet32_dc",
    ResNet,
    "Decoupled ResNet-32 for CIFAR.",
    _BN,
    units=(5, 5, 5),
    widths=(96, 192, 384),
    stem="3x3",
    root_relu=False,
)
_publish(
    "resnet18_modified",
    ResNet,
    "Decoupled modified ResNet-18 for ImageNet: a convolution in front of the units changes the size.",
    {"units": (1, 2, 3, 1), "strides": (1, 2, 2, 2), **_BN},
    units=(1, 2, 3, 0),
    widths=(128, 256, 512, 1024),
    strides=(2, 2, 2, 2),
    unit="sphereface",
    act="prelu",
    slope=0.0,
    init="sphereface",
)
_publish(
    "mnist2d_dc",
    PlainCNN,
    "Decoupled MNIST network with 2-D features to draw: 3 x 2 convolutions, FC 256, FC 2.",
    convs_per_unit=2,
    widths=(32, 64, 128),
    pool="2x2-ceil",
    hidden=(256,),
    dim=2,
)

# ------------------------------------------------------------------------------------- hyperspherical energy

for _depth in (6, 9, 15):
    _publish(
        f"cnn{_depth}_mhe",
        PlainCNN,
        f"CNN-{_depth} of MHE and CoMHE: 3 x {_depth // 3} convolutions, FC 256.",
        _BN,
        convs_per_unit=_depth // 3,
        widths=(64, 128, 256),
    )
for _depth in (3, 9):
    _publish(
        f"cnn{_depth}_comhe",
        PlainCNN,
        f"Small CNN-{_depth} of CoMHE: 3 x {_depth // 3} convolutions, FC 64.",
        _BN,
        convs_per_unit=_depth // 3,
        widths=(32, 64, 64),
        dim=64,
    )
for _suffix, _shortcut in {"mhe": "pad", "comhe": "projection"}.items():
    _publish(
        f"resnet32_{_suffix}",
        ResNet,
        f"ResNet-32 of {_suffix.upper().replace('COM', 'CoM')} for CIFAR, four times as wide as usual.",
        units=(5, 5, 5),
        widths=(64, 128, 256),
        stem="3x3",
        shortcut=_shortcut,
    )
_publish("resnet18", ResNet, "ResNet-18 for ImageNet.")
_publish("resnet34", ResNet, "ResNet-34 for ImageNet.", units=(3, 4, 6, 3))
_publish("resnet50", ResNet, "ResNet-50 for ImageNet, with bottlenecks.", units=(3, 4, 6, 3), unit="bottleneck")

# ---------------------------------------------------------------------------------------- orthogonal training

_publish(
    "mlp3_opt",
    PlainCNN,
    "MLP-3 of OPT for MNIST: two hidden layers of 256 with ReLU.",
    widths=(),
    hidden=(256,),
    fc_act=True,
    fc_bias=True,
    norm="identity",
    init="xavier",
)
for _depth in (6, 9):
    _publish(
        f"cnn{_depth}_opt",
        PlainCNN,
        f"CNN-{_depth} of OPT: 3 x {_depth // 3} convolutions, FC 64.",
        _BN,
        convs_per_unit=_depth // 3,
        widths=(64, 64, 64),
        dim=64,
    )
_publish("cnn9_opt_wide", PlainCNN, "Wide CNN-9 of OPT: 3 x 3 convolutions, FC 256.", _BN, widths=(64, 128, 256))
_publish(
    "cnn10_opt",
    PlainCNN,
    "CNN-10 of OPT for ImageNet: a 7x7 convolution and pooling, 3 x 3 convolutions, FC 256.",
    widths=(64, 128, 256),
    stem="imagenet",
)
_publish(
    "cnn4_opt",
    PlainCNN,
    "CNN-4 of OPT for few-shot learning: 4 convolutions, and the last map is the feature.",
    convs_per_unit=1,
    widths=(64, 64, 64, 64),
    dim=None,
)
for _depth in (20, 32):
    _publish(
        f"resnet{_depth}_opt",
        ResNet,
        f"ResNet-{_depth} of OPT for CIFAR.",
        units=((_depth - 2) // 6,) * 3,
        widths=(16, 32, 64),
        stem="3x3",
        shortcut="pad",
    )
_publish("resnet18_opt_a", ResNet, "ResNet-18A of OPT for ImageNet, with 128-D features.", widths=(64, 128, 128, 128))
_publish("resnet18_opt_b", ResNet, "ResNet-18B of OPT for ImageNet, with 512-D features.")
_publish(
    "mnist3d_opt",
    PlainCNN,
    "MNIST network of OPT with 3-D features to draw: 3 x 2 convolutions with 3x3 pooling, FC 3.",
    convs_per_unit=2,
    widths=(32, 64, 128),
    pool="3x3",
    dim=3,
)

# -------------------------------------------------------------------------------------------------- L-Softmax

_CAFFE: dict[str, Any] = {"pool": "2x2-ceil", "act": "prelu", "slope": 0.25}
_CAFFE_RELEASED = {"dim": 512, "widths": (64, 128, 256), "fc_bn": True, "fc_act": True, "act": "relu"}

_publish(
    "lsoftmax_mnist2d",
    PlainCNN,
    "L-Softmax network for MNIST with 2-D features to draw: 3 x 2 convolutions of 5x5, FC 2.",
    convs_per_unit=2,
    widths=(32, 64, 128),
    kernel=5,
    dim=2,
    **_CAFFE,
)
_publish(
    "lsoftmax_mnist",
    PlainCNN,
    "L-Softmax network for MNIST: a convolution, 3 x 3 convolutions, one FC.",
    _CAFFE_RELEASED,
    widths=(64, 64, 64),
    stem="3x3",
    **_CAFFE,
)
_publish(
    "lsoftmax_cifar10",
    PlainCNN,
    "L-Softmax network for CIFAR-10: a convolution, 3 x 4 convolutions, one FC.",
    _CAFFE_RELEASED,
    convs_per_unit=4,
    stem="3x3",
    **_CAFFE,
)
_publish(
    "lsoftmax_cifar100",
    PlainCNN,
    "L-Softmax network for CIFAR-100: a convolution, 3 x 4 convolutions, FC 512.",
    convs_per_unit=4,
    widths=(96, 192, 384),
    stem="3x3",
    dim=512,
    **_CAFFE,
)
_publish(
    "lsoftmax_lfw",
    PlainCNN,
    "L-Softmax network for faces: a convolution with stride 2, 4 x 4 convolutions, FC 512.",
    convs_per_unit=4,
    widths=(64, 256, 256, 256),
    stem="3x3-stride2",
    pool_last=False,
    dim=512,
    **_CAFFE,
)
