"""Decoupled layers against patches copied out one by one, published vectors, torch's own layers and invariants."""

import copy
import gc
import io
import itertools
import math
import pickle
import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import hypersphere as hs
from helpers import decoupled_reference as ref
from helpers.decoupled_reference import ANGULARS, OPERATORS, RADIAL, WEIGHTINGS, chirp
from hypersphere.errors import ArgumentError, HypersphereError
from hypersphere.nn import (
    Decoupled,
    DecoupledConv1d,
    DecoupledConv2d,
    DecoupledConv3d,
    DecoupledConvTranspose1d,
    DecoupledConvTranspose2d,
    DecoupledConvTranspose3d,
    DecoupledLinear,
    functional,
)

LOW = (torch.float16, torch.bfloat16)
# Each operator once, with angular functions and weightings spread over them: for sweeps over something else.
SPREAD = (
    ("sphere", "cosine", "none"),
    ("sphere", "sigmoid", "none"),
    ("ball", "cosine", "none"),
    ("ball", "linear", "joint"),
    ("tanh", "sigmoid", "none"),
    ("tanh", "cosine", "separate"),
    ("linear", "cosine", "none"),
    ("linear", "cosine", "linear"),
    ("seg", "sqcos", "none"),
    ("log", "linear", "none"),
    ("mix", "relucos", "linear"),
)
KINDS = {
    "conv1d": (DecoupledConv1d, nn.Conv1d, (2, 4, 6)),
    "conv2d": (DecoupledConv2d, nn.Conv2d, (2, 4, 5, 4)),
    "conv3d": (DecoupledConv3d, nn.Conv3d, (2, 4, 3, 4, 3)),
    "convtranspose1d": (DecoupledConvTranspose1d, nn.ConvTranspose1d, (2, 4, 3)),
    "convtranspose2d": (DecoupledConvTranspose2d, nn.ConvTranspose2d, (2, 4, 3, 2)),
    "convtranspose3d": (DecoupledConvTranspose3d, nn.ConvTranspose3d, (2, 4, 2, 2, 2)),
    "linear": (DecoupledLinear, nn.Linear, (3, 4)),
}
by_operator = pytest.mark.parametrize("name", OPERATORS)
by_angular = pytest.mark.parametrize("g", ANGULARS)
by_spread = pytest.mark.parametrize(("name", "g", "weighting"), SPREAD, ids=lambda value: value)
by_kind = pytest.mark.parametrize("kind", KINDS)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def agree(actual, expected, atol=1e-11, rtol=1e-9):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.detach().double(), expected.detach(), atol=atol, rtol=rtol)


def finite(*tensors):
    return all(bool(t.isfinite().all()) for t in tensors)


def build(kind, *args, name="sphere", g="cosine", **options):
    """A layer in float64 with radii and steepnesses of its kernels drawn apart from each other."""
    layer = KINDS[kind][0](*args, operator=name, angular=g, **options).double()
    outputs = layer.out_features if kind == "linear" else layer.out_channels
    with torch.no_grad():
        if layer.operator.has_radius:
            layer.set_radius(torch.linspace(0.5, 1.6, outputs))
        if layer.operator.learn_k:
            layer.set_k(torch.linspace(0.2, 0.9, outputs) if layer.operator.learn_k == "filter" else tensor(0.4))
    return layer


def plain(layer, x, parameters=None, **options):
    """What the layer should answer, from the reference; ``parameters`` replace the layer's own."""
    own = parameters or dict(layer.named_parameters())
    op = layer.operator
    options = {"weighting": op.weighting, "eps": op.eps, "alpha": op.alpha, **options}
    if hasattr(op, "beta"):
        options["beta"] = op.beta
    if op.has_radius:
        options["rho"] = own["radius_raw"] ** 2 + 1e-4
        if not op.mean_norm:
            options.setdefault("mean", None)
        elif not layer.training:
            options.setdefault("mean", layer.patch_norm_mean)
        options["detach"] = op.detach_mean
    g = type(op.angular).__name__.lower()
    g = {"squarecosine": "sqcos", "relucosine": "relucos"}.get(g, g)
    if g == "sigmoid":
        options["k"] = own["k_raw"].abs() + 0.05 if op.learn_k else op.angular.k
    name = next(n for n in OPERATORS if hs.nn.operators[n].factory is type(op))
    if isinstance(layer, nn.Linear):
        out = ref.fully_connected(x, own["weight"], name, g, **options)
    elif layer.transposed:
        call = {a: getattr(layer, a) for a in ("stride", "padding", "output_padding", "dilation", "groups")}
        call["output_padding"] = options.pop("output_padding", call["output_padding"])
        out = ref.transposed(x, own["weight"], name, g, **call, **options)
    else:
        call = {a: getattr(layer, a) for a in ("stride", "padding", "dilation", "groups")}
        out = ref.convolution(x, own["weight"], name, g, mode=layer.padding_mode, **call, **options)
    if layer.bias is not None:
        shape = (-1, *(1,) * (layer.weight.dim() - 2)) if layer.weight.dim() > 2 else (-1,)
        out = out + own["bias"].reshape(shape)
    return out


def compare(layer, x, *args, **options):
    """Output and the gradients of everything against the reference."""
    x = x.detach().clone().requires_grad_()
    names, points = zip(*((n, p) for n, p in layer.named_parameters() if p.requires_grad), strict=True)
    actual = layer(x, *args)
    copies = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in layer.named_parameters()}
    other = x.detach().clone().requires_grad_()
    expected = plain(layer, other, copies, **options)
    agree(actual, expected)
    upstream = draw(*actual.shape)
    found = torch.autograd.grad(actual, (x, *points), upstream, materialize_grads=True)
    wanted = torch.autograd.grad(expected, (other, *map(copies.get, names)), upstream, materialize_grads=True)
    for name, a, b in zip(("x", *names), found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-8, msg=lambda m, n=name: f"gradient of {n}: {m}")


# Published vectors.


def test_a_convolution_by_hand():
    x = (torch.arange(1, 17, dtype=torch.float64) / 8 - 1).reshape(1, 1, 4, 4)
    kernels = tensor([[1, 0, -1], [2, 0, -2], [1, 0, -1]], [[0.5, 1, 0], [1, -3, 1], [0, 1, 2]])
    expected = {
        ("sphere", "cosine"): (
            (0.408248290464, -0.191273013919, -0.259827920985, -0.170715839911),
            (0.194572921316, 0.106355147793, 0.352156133549, 0.320370419963),
        ),
        ("sphere", "linear"): (
            (0.267720472801, -0.122523168414, -0.167331687037, -0.109216023318),
            (0.124664177004, 0.067836089298, 0.229102785655, 0.207614753191),
        ),
        ("tanh", "cosine"): (
            (0.303329211469, -0.134689606403, -0.180822591086, -0.147456823852),
            (0.186292805423, 0.100133036151, 0.330220588663, 0.316964576247),
        ),
        ("tanh", "linear"): (
            (0.198916791094, -0.086277708449, -0.116451492612, -0.094335990852),
            (0.119359051161, 0.063867464086, 0.214832142723, 0.205407609964),
        ),
        ("ball", "cosine"): (
            (0.390753822906, -0.167465924103, -0.223287898804, -0.170715839911),
            (0.194572921316, 0.106355147793, 0.352156133549, 0.320370419963),
        ),
        ("ball", "linear"): (
            (0.256247976197, -0.107273133842, -0.14379956034, -0.109216023318),
            (0.124664177004, 0.067836089298, 0.229102785655, 0.207614753191),
        ),
        ("seg", "cosine"): (
            (0.505181485541, -0.216506350946, -0.288675134595, -0.254691550491),
            (0.18327368148, 0.094567927123, 0.309447240434, 0.374414952093),
        ),
        ("seg", "linear"): (
            (0.331287183115, -0.138686809792, -0.18590957082, -0.162939761956),
            (0.117424678181, 0.06031789229, 0.20131759195, 0.242638093363),
        ),
        ("log", "cosine"): (
            (0.328774985611, -0.144798349321, -0.194136480206, -0.16899181896),
            (0.156695596529, 0.080513447907, 0.263121653713, 0.317135070998),
        ),
        ("log", "linear"): (
            (0.215603584017, -0.092753034923, -0.125025765611, -0.108113075212),
            (0.100395920713, 0.051353578602, 0.171179480034, 0.205518098397),
        ),
    }
    for (name, g), values in expected.items():
        layer = DecoupledConv2d(1, 2, 3, stride=2, padding=1, operator=name, angular=g, eps=0.0).double()
        with torch.no_grad():
            layer.weight.copy_(kernels.unsqueeze(1))
            if layer.operator.has_radius:
                layer.set_radius(tensor(1, 0.5))
        agree(layer(x).flatten(2)[0], values)
        if layer.operator.has_radius:
            agree(layer.patch_norm_mean, [1.2928382422])


CHIRP_X, CHIRP_W = chirp((1, 2, 4, 4), 0.7, 1.0), chirp((3, 2, 3, 3), 0.3, 0.5)


def chirp_layer(g, k=None, **options):
    learned = {"k": 0.5, "learn_k": "filter"} if k is not None else {}
    layer = DecoupledConv2d(2, 3, 3, operator="sphere", angular=g, **{"eps": 0.0, **learned, **options}).double()
    with torch.no_grad():
        layer.weight.copy_(CHIRP_W)
        if k is not None:
            layer.set_k(k)
    return layer


@pytest.mark.parametrize(
    ("g", "k", "first", "last", "total", "squares", "strided"),
    [
        (
            "linear",
            None,
            (-0.199174120075, 0.156820937775, 0.124884130241, -0.146191452152),
            (0.113869221015, -0.118052320559, 0.100653016345, -0.0812920077474),
            2.25775135694,
            0.936873963502,
            ((0.0208708447274, 0.0612461056525), (0.15781553265, 0.0824592459766)),
        ),
        (
            "cosine",
            None,
            (-0.307782939388, 0.243850032252, 0.194911808223, -0.227624063775),
            (0.177913144215, -0.184375225143, 0.157447509486, -0.127346452031),
            3.48873663622,
            2.24113003986,
            ((0.0327779739769, 0.0960568230623), (0.245364878612, 0.129164802725)),
        ),
        (
            "sigmoid",
            None,
            (-0.483931324178, 0.393106626491, 0.319152661094, -0.368980840021),
            (0.292679604911, -0.302787480648, 0.260330728675, -0.211909456156),
            5.50135153,
            5.61502647533,
            ((0.0551695009684, 0.160682926532), (0.395337946938, 0.214860305575)),
        ),
        (
            "sigmoid",
            tensor(0.2, 0.5, 0.9),
            (-0.654449768321, 0.548646835073, 0.454901843292, -0.51876109323),
            (0.140942470824, -0.146084323798, 0.124673344421, -0.100781743153),
            3.82807800054,
            4.99791645908,
            ((0.0357324567147, 0.104573081276), (0.264885014683, 0.140442476862)),
        ),
    ],
)
def test_sphere_convolution_of_chirps(g, k, first, last, total, squares, strided):
    out = chirp_layer(g, k, padding=1)(CHIRP_X)
    agree(out[0, 0, 0], first, atol=1e-9)
    agree(out[0, 2, 3], last, atol=1e-9)
    agree(out.sum(), total, atol=1e-9)
    agree(out.square().sum(), squares, atol=1e-9)
    agree(chirp_layer(g, k, padding=1, stride=2, eps=1e-4)(CHIRP_X)[0, 1], strided, atol=1e-9)


def test_sphere_convolution_without_padding():
    agree(chirp_layer("cosine")(CHIRP_X)[0, :, 0, 0], [0.0201410170806, 0.0376922897879, 0.239792197428], atol=1e-9)


@pytest.mark.parametrize(
    ("g", "loss", "by_x", "by_w", "norm_x", "norm_w"),
    [
        (
            "linear",
            -0.417374090989,
            (0.090462408671, -0.0690183600299, -0.281383561205, -0.0912308658613),
            (-0.184061580329, 0.0480751214177, 0.0698827596924),
            0.814454663991,
            0.886635743855,
        ),
        (
            "cosine",
            -0.639536333665,
            (0.141080051732, -0.103573729441, -0.434434177202, -0.142313045842),
            (-0.280895264482, 0.0687266869159, 0.100146909292),
            1.244692765,
            1.35058600785,
        ),
        (
            "sigmoid",
            -0.972841837407,
            (0.22885058107, -0.139944999251, -0.679690482232, -0.232603513329),
            (-0.419922379781, 0.0786754462145, 0.116517917051),
            1.89849492363,
            2.03416985708,
        ),
    ],
)
def test_gradients_of_chirps(g, loss, by_x, by_w, norm_x, norm_w):
    layer, x = chirp_layer(g, padding=1), CHIRP_X.clone().requires_grad_()
    total = (layer(x) * chirp((1, 3, 4, 4), 0.5, 0.0)).sum()
    dx, dw = torch.autograd.grad(total, (x, layer.weight))
    agree(total, loss, atol=1e-9)
    agree(dx[0, 0, 0], by_x, atol=1e-9)
    agree(dw[0, 0, 0], by_w, atol=1e-9)
    agree(dx.norm(), norm_x, atol=1e-9)
    agree(dw.norm(), norm_w, atol=1e-9)


def test_rescaling_of_chirps():
    out = chirp_layer("cosine", padding=1)(CHIRP_X)
    agree(out[0, :, 1, 2], [-0.216106539619, -0.214352234438, 0.0982590363694], atol=1e-9)
    rescale = hs.nn.SphereNorm(3).double()
    agree(rescale(out), out)
    with torch.no_grad():
        scale, shift = rescale.parameters()
        scale.copy_(tensor(0.5, 1, 2))
        shift.copy_(tensor(0.1, 0, -0.3))
    agree(rescale(out)[0, :, 1, 2], [-0.00805326980926, -0.214352234438, -0.103481927261], atol=1e-9)


@pytest.mark.parametrize("eps", [0.0, 1e-4])
@pytest.mark.parametrize(
    ("g", "expected"),
    [
        ("linear", ((-0.173950641668, -0.0120501360931), (0.149443243478, 0.0993645419455))),
        ("cosine", ((-0.269853639713, -0.0189271792574), (0.232594887506, 0.155448501287))),
        ("sigmoid", ((-0.430890834367, -0.0318741663633), (0.376415045856, 0.257144850712))),
    ],
)
def test_patches_of_zeros(g, expected, eps):
    x = torch.zeros(1, 2, 3, 3, dtype=torch.float64)
    x[0, 0, 0, 0] = 1
    out = chirp_layer(g, padding=1, eps=eps)(x)[0, 0]
    agree(out[:2, :2], expected, atol=1e-9 if eps == 0 else 1e-4)
    assert not out[2].any()
    assert not out[:, 2].any()


# Against patches copied out one by one.


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@by_angular
@by_operator
def test_every_combination(name, g, weighting):
    learned = {"learn_k": "filter"} if g == "sigmoid" else {}
    options = {"name": name, "g": g, "weighting": weighting, "alpha": 0.8, **learned}
    if name in ("seg", "mix"):
        options["beta"] = 0.3
    layer = build("conv2d", 4, 6, (3, 2), stride=(2, 1), padding=(1, 0), groups=2, bias=True, **options)
    compare(layer, draw(2, 4, 4, 3))


SETTINGS = {
    "plain": ((2, 3, 5, 4), (3, 4, 3), {}),
    "stride": ((2, 3, 6, 5), (3, 4, 3), {"stride": 2, "padding": 1}),
    "dilation": ((2, 3, 6, 5), (3, 4, (3, 2)), {"stride": (1, 2), "padding": (2, 1), "dilation": (2, 3)}),
    "groups": ((2, 4, 4, 4), (4, 6, 3), {"groups": 2, "padding": 1}),
    "depthwise": ((2, 3, 4, 4), (3, 6, 3), {"groups": 3, "padding": 1, "stride": 2}),
    "1x1 kernel": ((2, 3, 4, 3), (3, 4, 1), {}),
    "1x1 kernel over padding": ((2, 3, 3, 2), (3, 4, 1), {"stride": 2, "padding": 1}),
    "1x1 input": ((2, 3, 1, 1), (3, 4, 3), {"padding": 1}),
    "wide padding": ((2, 3, 2, 3), (3, 4, 2), {"padding": 3}),
    "kernel of the size of the map": ((2, 3, 4, 3), (3, 4, (4, 3)), {}),
    "same": ((2, 3, 4, 5), (3, 4, (3, 5)), {"padding": "same", "dilation": (1, 2)}),
    "same, even": ((2, 3, 4, 5), (3, 4, (4, 2)), {"padding": "same"}),
    "valid": ((2, 3, 4, 5), (3, 4, 3), {"padding": "valid"}),
    "reflect": ((2, 4, 4, 5), (4, 4, 3), {"padding": (1, 2), "padding_mode": "reflect", "groups": 2}),
    "replicate": ((2, 3, 4, 5), (3, 4, 3), {"padding": 1, "padding_mode": "replicate", "stride": 2}),
    "circular": ((2, 3, 4, 5), (3, 4, (2, 3)), {"padding": (1, 2), "padding_mode": "circular", "dilation": (2, 1)}),
    "circular, same": ((2, 3, 4, 5), (3, 4, (3, 4)), {"padding": "same", "padding_mode": "circular"}),
    "without batch": ((3, 5, 4), (3, 4, 3), {"padding": 1}),
    "batch of one": ((1, 3, 3, 3), (3, 4, 3), {}),
    "one filter": ((2, 1, 3, 3), (1, 1, 2), {}),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@by_spread
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_a_convolution(setting, name, g, weighting):
    shape, args, options = SETTINGS[setting]
    learned = {"learn_k": "filter"} if g == "sigmoid" else {}
    compare(build("conv2d", *args, name=name, g=g, weighting=weighting, **options, **learned), draw(*shape))


OTHER = {
    "1d": ("conv1d", (2, 4, 7), (4, 6, 3), {"stride": 2, "padding": 2, "dilation": 2, "groups": 2}),
    "1d, replicate": ("conv1d", (4, 7), (4, 3, 3), {"padding": 1, "padding_mode": "replicate", "bias": True}),
    "3d": ("conv3d", (2, 4, 3, 4, 3), (4, 4, (2, 3, 1)), {"stride": (1, 2, 1), "padding": (1, 1, 0), "groups": 2}),
    "3d, circular": ("conv3d", (1, 2, 3, 2, 3), (2, 3, 2), {"padding": 1, "padding_mode": "circular"}),
    "transposed": ("convtranspose2d", (2, 3, 3, 4), (3, 4, 3), {}),
    "transposed, stride": (
        "convtranspose2d",
        (2, 3, 3, 2),
        (3, 4, 3),
        {"stride": 2, "padding": 1, "output_padding": 1, "bias": True},
    ),
    "transposed, groups": (
        "convtranspose2d",
        (2, 4, 3, 2),
        (4, 6, (3, 2)),
        {"stride": (2, 3), "padding": (1, 0), "output_padding": (1, 2), "groups": 2, "dilation": (1, 2)},
    ),
    "transposed, stride beyond the kernel": ("convtranspose2d", (2, 3, 2, 2), (3, 2, 2), {"stride": 3}),
    "transposed, 1x1": ("convtranspose2d", (2, 3, 2, 2), (3, 2, 1), {"dilation": 2, "output_padding": 1}),
    "transposed, wide padding": ("convtranspose2d", (2, 3, 4, 4), (3, 2, 2), {"padding": 2}),
    "transposed, without batch": ("convtranspose2d", (3, 3, 2), (3, 2, 3), {"stride": 2}),
    "transposed 1d": ("convtranspose1d", (2, 4, 4), (4, 2, 4), {"stride": 2, "padding": 1, "groups": 2}),
    "transposed 3d": (
        "convtranspose3d",
        (1, 2, 2, 3, 2),
        (2, 3, (1, 2, 3)),
        {"stride": (1, 2, 2), "padding": (0, 0, 1), "output_padding": (0, 1, 0)},
    ),
    "linear": ("linear", (5, 7), (7, 4), {"bias": True}),
    "linear, one row": ("linear", (7,), (7, 4), {}),
    "linear, many axes": ("linear", (2, 1, 3, 7), (7, 4), {}),
    "linear, one unit": ("linear", (2, 1), (1, 1), {}),
}


@by_spread
@pytest.mark.parametrize("setting", OTHER)
def test_other_layers(setting, name, g, weighting):
    kind, shape, args, options = OTHER[setting]
    learned = {"learn_k": "filter"} if g == "sigmoid" else {}
    layer, x = build(kind, *args, name=name, g=g, weighting=weighting, **options, **learned), draw(*shape)
    if kind.startswith("convtranspose") and x.dim() == layer.weight.dim() - 1:
        agree(layer(x), layer(x[None])[0])
        assert layer(x).dim() == x.dim()
    else:
        compare(layer, x)


@by_spread
def test_output_size_of_a_transposed_convolution(name, g, weighting):
    layer, x = build("convtranspose2d", 3, 4, 3, stride=2, name=name, g=g, weighting=weighting), draw(2, 3, 3, 2)
    torch_layer = nn.ConvTranspose2d(3, 4, 3, stride=2).double()
    for size in ([7, 6], [8, 5]):
        wanted = torch_layer(x, output_size=size).shape
        assert layer(x, output_size=size).shape == wanted
        extra = tuple(n - m for n, m in zip(size, (7, 5), strict=True))
        compare(layer, x, size, output_padding=extra)


@pytest.mark.parametrize("name", RADIAL)
@pytest.mark.parametrize(
    "options",
    [{"detach_mean": True}, {"mean_norm": False}, {"learn_radius": False}, {"radius": 2.5, "eps": 0.0}],
    ids=str,
)
@pytest.mark.parametrize("weighting", ["none", "separate"])
def test_options_of_the_radius(name, options, weighting):
    layer = build("conv2d", 4, 6, 3, padding=1, groups=2, name=name, g="sqcos", weighting=weighting, **options)
    x = draw(3, 4, 3, 3)
    compare(layer, x)
    layer(10 * x)
    layer.eval()
    compare(layer, x)
    assert hasattr(layer, "patch_norm_mean") is layer.operator.mean_norm


@by_angular
@pytest.mark.parametrize("name", RADIAL)
def test_evaluation_uses_the_running_mean(name, g):
    layer = build("conv2d", 2, 4, 3, padding=1, groups=2, name=name, g=g)
    layer(3 * draw(4, 2, 4, 4))
    layer.eval()
    before = layer.patch_norm_mean.clone()
    compare(layer, draw(2, 2, 4, 4))
    agree(layer.patch_norm_mean, before, atol=0)
    one, two = draw(2, 1, 2, 4, 4)
    agree(layer(torch.cat([one, two]))[:1], layer(one))  # no sample sees another


def test_a_layer_cannot_be_fooled_by_zero_patches_in_the_mean():
    """A dead patch counts in the mean with the norm that eps gives it, and gets no gradient from it."""
    x = draw(2, 2, 5, 5)
    x[:, :, :4, :4] = 0
    compare(build("conv2d", 2, 4, 2, padding=1, name="tanh", g="linear"), x)
    compare(build("conv2d", 2, 4, 2, padding=1, name="seg", g="linear", eps=0.0), x)


# Derivatives by finite differences and by torch.func.


def call(layer):
    """The layer as a function of its input and parameters."""
    names = [name for name, _ in layer.named_parameters()]

    def f(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    return f, [p.detach().clone().requires_grad_() for p in layer.parameters()]


@by_angular
@by_operator
def test_gradients_match_finite_differences(name, g):
    learned = {"learn_k": "filter"} if g == "sigmoid" else {}
    f, points = call(build("conv2d", 1, 2, 2, padding=1, name=name, g=g, **learned))
    assert torch.autograd.gradcheck(f, (draw(2, 1, 2, 2).requires_grad_(), *points))


@by_spread
def test_second_derivatives(name, g, weighting):
    if name == "mix":
        weighting, g = "none", "cosine"
    learned = {"learn_k": "filter"} if g == "sigmoid" else {}
    f, points = call(build("conv2d", 1, 2, 2, name=name, g=g, weighting=weighting, **learned))
    assert torch.autograd.gradgradcheck(f, (draw(1, 1, 3, 2).requires_grad_(), *points))


def test_second_derivatives_in_evaluation():
    layer = build("convtranspose1d", 1, 2, 2, stride=2, name="tanh", g="linear")
    layer(draw(2, 1, 3))
    f, points = call(layer.eval())
    assert torch.autograd.gradgradcheck(f, (draw(1, 1, 2).requires_grad_(), *points))


@by_spread
def test_gradients_of_single_samples(name, g, weighting):
    layer = build("conv2d", 2, 3, 2, name=name, g=g, weighting=weighting)
    layer(draw(2, 2, 3, 3))
    layer.eval()
    x = draw(4, 2, 3, 3)
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x[None],)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    for i, sample in enumerate(x):
        value = layer(sample[None]).square().sum()
        grads = torch.autograd.grad(value, list(parameters.values()))
        for key, grad in zip(parameters, grads, strict=True):
            agree(found[key][i], grad)


@by_spread
@pytest.mark.parametrize("kind", ["linear", "conv2d", "convtranspose1d"])
def test_transforms_of_torch_func(kind, name, g, weighting):
    """Hessian-vector products in each way, Hessians and per-sample gradients against autograd over the formula."""
    sizes = {"linear": (4, 3), "conv2d": (2, 3, 2), "convtranspose1d": (2, 3, 2)}[kind]
    shape = {"linear": (2, 4), "conv2d": (2, 2, 3, 3), "convtranspose1d": (2, 2, 3)}[kind]
    layer = build(kind, *sizes, name=name, g=g, weighting=weighting).eval()
    formula = {"linear": ref.fully_connected, "conv2d": ref.convolution}.get(kind, ref.transposed)
    x, w, v, u = draw(*shape), layer.weight.detach(), draw(*shape) - 0.5, draw(*layer.weight.shape) + 0.2
    rho = 1.0 if layer.radius is None else layer.radius.detach()

    def by_formula(x, w):
        return formula(x, w, name, g, weighting=weighting, rho=rho, mean=None).sin().sum()

    def own(x, w):
        return torch.func.functional_call(layer, {"weight": w}, (x,)).sin().sum()

    wanted = torch.autograd.functional.vhp(by_formula, (x, w), (v, u))[1]
    gradient = torch.func.grad(own, (0, 1))
    for found in (
        torch.autograd.functional.vhp(own, (x, w), (v, u))[1],
        torch.func.jvp(gradient, (x, w), (v, u))[1],
        torch.func.vjp(gradient, x, w)[1]((v, u)),
    ):
        agree(found[0], wanted[0])
        agree(found[1], wanted[1])
    agree(torch.func.hessian(own)(x, w), torch.autograd.functional.hessian(lambda x: by_formula(x, w), x))
    singly = torch.func.vmap(torch.func.grad(lambda x, w: own(x[None], w), 1), (0, None))(x, w)
    for one, sample in zip(singly, x, strict=True):
        agree(one, torch.autograd.functional.vjp(by_formula, (sample[None], w))[1][1])


@by_spread
def test_vectorised_derivatives(name, g, weighting):
    """Those of torch.autograd, which pass many gradients at once through the custom backward pass."""
    for layer, x in (
        (build("conv2d", 2, 3, 2, name=name, g=g, weighting=weighting), draw(2, 2, 3, 3)),
        (build("linear", 4, 3, name=name, g=g, weighting=weighting), draw(2, 4)),
    ):
        singly = torch.autograd.functional.jacobian(layer, x)
        agree(torch.autograd.functional.jacobian(layer, x, vectorize=True), singly)
        twice = [torch.autograd.functional.hessian(lambda x: layer(x).sin().sum(), x, vectorize=v) for v in (0, 1)]  # noqa: B023
        agree(*twice)


def test_transforms_of_a_layer_in_training_say_what_to_do():
    layer = build("linear", 4, 3, name="tanh")
    parameters, x = {name: p.detach() for name, p in layer.named_parameters()}, draw(5, 4)

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x[None],)).square().sum()

    by_sample = torch.vmap(torch.func.grad(loss), (None, 0))
    with pytest.raises(HypersphereError, match=r"call eval\(\) before, .* or use mean_norm=False"):
        by_sample(parameters, x)
    assert not layer.patch_norm_seen
    layer.eval()
    assert by_sample(parameters, x)["weight"].shape == (5, 3, 4)


# Digits next to 0 and pi.


def near(kernels, angle, length=3.0):
    """Vectors at an angle to kernels, rounded to float32."""
    other = draw(*kernels.shape)
    other = other - (other * kernels).sum(1, keepdim=True) / kernels.square().sum(1, keepdim=True) * kernels
    unit, across = (v / v.norm(dim=1, keepdim=True) for v in (kernels, other))
    return (length * (math.cos(angle) * unit + math.sin(angle) * across)).float()


def angles(x, w):
    """Angles of rows by their tangent in float64, and the unit vectors across ``x`` in which they grow smaller."""
    x, w = (v.detach().double() for v in (x, w))
    product = (x * w).sum(1)
    across = w - (product / x.square().sum(1)).unsqueeze(1) * x
    length = across.norm(dim=1)
    return torch.atan2(length * x.norm(dim=1), product), across / length.unsqueeze(1)


NEAR = (0.0, 1e-4, 1e-3, 1e-2, 0.3, math.pi - 1e-2, math.pi - 1e-3, math.pi - 1e-4, math.pi)


@pytest.mark.parametrize("compose", [False, True])
@pytest.mark.parametrize("angle", NEAR)
def test_linear_layers_keep_the_digits_of_the_angle_to_the_nearest_kernel(angle, compose, monkeypatch):
    if compose:
        monkeypatch.setattr(functional, "_by_hand", lambda operator: False)
    layer = DecoupledLinear(40, 9, operator="sphere", angular="linear", eps=0.0)
    x = near(layer.weight.detach().double(), angle).requires_grad_()
    theta, across = angles(x, layer.weight)
    by_layer, by_operator = layer(x).diagonal(), layer.operator(layer.weight, x)
    for found in (by_layer, by_operator):
        agree(found, 1 - 2 * theta / math.pi, atol=4e-7)
        if 5e-4 < angle < math.pi - 5e-4:  # nearer, the slope of the layer is bounded
            (grad,) = torch.autograd.grad(found.sum(), x)
            wanted = 2 / math.pi * across / x.detach().double().norm(dim=1, keepdim=True)
            assert (grad - wanted).norm(dim=1).max() <= 2e-3 * wanted.norm(dim=1).min()


@pytest.mark.parametrize("name", ["sphere", "tanh", "log"])
def test_the_angle_with_eps_is_that_of_the_formula(name):
    """Also for long vectors, of which eps is a share that rounding hides."""
    for length in (0.1, 3.0, 100.0):
        op = hs.nn.operator(name, angular="linear", eps=1e-4)
        w = (length * draw(5, 8)).float()
        for angle in NEAR:
            x = near(w.double(), angle, length)
            pairs = zip(w.double(), x.double(), strict=True)
            wanted = torch.stack([ref.pair(*pair, name, "linear", eps=1e-4) for pair in pairs])
            agree(op(w, x), wanted, atol=1e-6, rtol=1e-6)


# Reductions.


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("setting", [*SETTINGS, *OTHER])
def test_linear_weighting_gives_torch_its_layer_back(setting):
    if setting in SETTINGS:
        kind, (shape, args, options) = "conv2d", SETTINGS[setting]
    else:
        kind, shape, args, options = OTHER[setting]
    x = draw(*shape)
    for weighting in WEIGHTINGS[1:]:
        layer = build(kind, *args, name="linear", weighting=weighting, **{**options, "bias": True})
        other = KINDS[kind][1](*args, **options, bias=True).double() if "bias" not in options else None
        other = other or KINDS[kind][1](*args, **options).double()
        other.load_state_dict(layer.state_dict())
        agree(layer(x), other(x), atol=1e-12)
        a, b = (torch.autograd.grad(m(x).square().sum(), m.weight)[0] for m in (layer, other))
        agree(a, b, atol=1e-10)


def test_linear_weighting_passes_torch_its_gradient_where_no_patch_is_zero():
    layer = build("conv2d", 3, 4, 3, padding=1, stride=2, name="linear", weighting="linear", bias=True)
    other = nn.Conv2d(3, 4, 3, padding=1, stride=2).double()
    other.load_state_dict(layer.state_dict())
    x = draw(2, 3, 5, 5).requires_grad_()
    a, b = (torch.autograd.grad(m(x).square().sum(), x)[0] for m in (layer, other))
    agree(a, b)


def test_seg_and_mix_reduce():
    x = draw(2, 3, 4, 4).requires_grad_()

    def answer(name, radius=None, **options):
        torch.manual_seed(3)
        fixed = {} if radius is None else {"mean_norm": False, "dtype": torch.float64, "radius": radius}
        layer = DecoupledConv2d(3, 4, 3, padding=1, operator=name, **fixed, **options).double()
        with torch.no_grad():
            layer.weight.copy_(chirp((4, 3, 3, 3), 0.4, 0.1))
        out = layer(x)
        return out, *torch.autograd.grad(out.square().sum(), (x, layer.weight))

    def same(a, b):
        for p, q in zip(a, b, strict=True):
            agree(p, q)

    same(answer("seg", 2.0, alpha=0.7, beta=0.7), answer("linear", alpha=0.7))
    same(answer("seg", 2.0, alpha=0.7 / 2, beta=0.0), answer("ball", 2.0, alpha=0.7))
    same(answer("mix", alpha=0.7, beta=0.0), answer("linear", alpha=0.7))
    agree(100 * answer("ball", 100.0)[0], answer("linear")[0])
    agree(answer("ball", 0.01)[0], answer("sphere")[0])
    agree(answer("tanh", 0.01)[0], answer("sphere")[0])


def test_linear_layer_is_a_convolution_over_the_whole_map():
    for name, g, weighting in SPREAD:
        conv = build("conv2d", 3, 4, (2, 3), name=name, g=g, weighting=weighting)
        linear = build("linear", 18, 4, name=name, g=g, weighting=weighting)
        with torch.no_grad():
            linear.weight.copy_(conv.weight.flatten(1))
        x = draw(5, 3, 2, 3)
        agree(linear(x.flatten(1)), conv(x).flatten(1))


def test_stride_groups_and_order_of_channels():
    x = draw(2, 4, 5, 5)
    for name, g, weighting in SPREAD:
        options = {"name": name, "g": g, "weighting": weighting}
        radius = {"mean_norm": False} if name in RADIAL else {}
        fine = build("conv2d", 4, 4, 3, padding=1, **options, **radius)
        coarse = build("conv2d", 4, 4, 3, padding=1, stride=2, **options, **radius)
        coarse.load_state_dict(fine.state_dict())
        agree(coarse(x), fine(x)[..., ::2, ::2])
        order = torch.tensor([2, 0, 3, 1])
        coarse = copy.deepcopy(fine)
        with torch.no_grad():
            coarse.weight.copy_(fine.weight[:, order])
        agree(coarse(x[:, order]), fine(x))
        grouped = build("conv2d", 4, 4, 3, padding=1, groups=2, **options)
        for i in range(2):
            half = build("conv2d", 2, 2, 3, padding=1, **options)
            with torch.no_grad():
                half.weight.copy_(grouped.weight[2 * i : 2 * i + 2])
                if name in RADIAL:
                    half.set_radius(grouped.radius[2 * i : 2 * i + 2])
            agree(half(x[:, 2 * i : 2 * i + 2]), grouped(x)[:, 2 * i : 2 * i + 2])


def test_cosine_on_the_sphere_is_a_convolution_over_norms():
    layer, x = build("conv2d", 3, 4, 3, padding=1, eps=0.0), draw(2, 3, 4, 4)
    unit = nn.functional.normalize(layer.weight.flatten(1), dim=1).view_as(layer.weight)
    product = nn.functional.conv2d(x, unit, padding=1)
    agree(layer(x), product / hs.geometry.patch_norm(x, 3, padding=1))


def test_batch_norm_takes_the_kernel_norms_out_again():
    layer, x = build("conv2d", 3, 4, 3, padding=1, name="linear"), draw(4, 3, 4, 4)
    norm = nn.BatchNorm2d(4, eps=1e-14).double()
    agree(norm(layer(x)), norm(nn.functional.conv2d(x, layer.weight, padding=1)), atol=1e-9)


def test_a_stack_of_cosines_is_a_linear_map_times_a_number():
    x = draw(6, 5)
    for name, g, linear in (("sphere", "cosine", True), ("ball", "cosine", True), ("sphere", "sqcos", False)):
        stack = [DecoupledLinear(5, 5, operator=name, angular=g, eps=0.0).double() for _ in range(3)]
        product = torch.eye(5, dtype=torch.float64)
        out = x
        for layer in stack:
            out = layer(out)
            product = nn.functional.normalize(layer.weight, dim=1) @ product
        ratio = nn.functional.cosine_similarity(out, x @ product.T)
        assert bool((ratio > 1 - 1e-12).all()) is linear


# Bounds and scales.


def test_bounds_of_layers():
    x = 10 * draw(2, 3, 4, 4)
    for name, g in itertools.product(("sphere", "ball", "tanh"), ANGULARS):
        layer = build("conv2d", 3, 4, 3, padding=1, name=name, g=g, alpha=0.7)
        assert float(layer(x).detach().abs().max()) <= 0.7 * (1 + 1e-12)
    for name, g in itertools.product(("linear", "log", "mix"), ANGULARS):
        layer = build("conv2d", 3, 4, 3, padding=1, name=name, g=g)
        norms = (hs.geometry.patch_norm(x, 3, padding=1) ** 2 + 1e-4).sqrt()
        assert bool((layer(x).abs() <= layer.operator.magnitude(norms) * (1 + 1e-12)).all())


def test_scales_of_layers():
    scales = torch.linspace(0.1, 9, 4, dtype=torch.float64).view(-1, 1, 1, 1)
    x = draw(2, 3, 4, 4).requires_grad_()
    for name, g in itertools.product(OPERATORS, ANGULARS):
        layer = build("conv2d", 3, 4, 3, padding=1, name=name, g=g, eps=0.0)
        out = layer(x)
        upstream = draw(*out.shape)
        by_w, by_x = torch.autograd.grad(out, (layer.weight, x), upstream)
        along = (by_w * layer.weight).flatten(1).sum(1)
        agree(along, torch.zeros(4), atol=1e-10)
        if name == "sphere":
            agree((by_x * x).flatten(1).sum(1), torch.zeros(2), atol=1e-10)
        if name in ("sphere", "ball", "tanh"):  # the mean of the batch scales along
            agree(layer(7 * x), out)
        elif name == "seg":
            agree(layer(7 * x), 7 * out)
        with torch.no_grad():
            layer.weight.mul_(scales)
        agree(layer(x), out)
        step = torch.autograd.grad(layer(x), layer.weight, upstream)[0]
        agree(step, by_w / scales)
        taken = (layer.weight - 0.1 * step).flatten(1).norm(dim=1)
        assert bool((taken >= layer.weight.flatten(1).norm(dim=1)).all())  # a step never shortens a kernel


# Zero patches, extreme norms and low precision.


@pytest.mark.parametrize("dtype", [*LOW, torch.float32, torch.float64], ids=str)
@by_operator
def test_dead_input(name, dtype):
    for g, kind in itertools.product(ANGULARS, ("conv2d", "convtranspose2d", "linear")):
        args = (3, 4) if kind == "linear" else (3, 4, 2)
        for weighting in ("none", "separate"):
            torch.manual_seed(1)
            layer = KINDS[kind][0](*args, operator=name, angular=g, weighting=weighting).to(dtype)
            x = draw(2, 3) if kind == "linear" else draw(2, 3, 6, 6)
            x[0] = 0
            x[..., :4] *= 0 if kind == "conv2d" else 1
            x = x.to(dtype).requires_grad_()
            out = layer(x)
            assert out.dtype == dtype
            assert not out[0].any()
            assert not out[..., :3].any() or kind != "conv2d"
            assert out.any()
            grads = torch.autograd.grad(out, (x, *layer.parameters()), draw(*out.shape, dtype=dtype))
            assert finite(out, *grads), (g, kind, weighting)
            assert not grads[0][0].any(), (g, kind, weighting)
            if kind == "conv2d":  # columns that no living patch touches
                assert not grads[0][..., :3].any()
            zeros = torch.zeros_like(x, requires_grad=True)
            out = layer(zeros)
            grads = torch.autograd.grad(out, (zeros, *layer.parameters()), torch.ones_like(out))
            assert not out.any()
            assert finite(*grads)
            assert not grads[0].any()
            layer.eval()
            out = layer(x)
            assert finite(out, *torch.autograd.grad(out, (x, *layer.parameters()), torch.ones_like(out)))


@pytest.mark.parametrize("dtype", [*LOW, torch.float32], ids=str)
def test_padding_alone_is_dead(dtype):
    for name, g in itertools.product(OPERATORS, ANGULARS):
        layer = DecoupledConv2d(2, 3, 2, padding=2, operator=name, angular=g).to(dtype)
        x = draw(1, 2, 2, 2, dtype=dtype).relu().requires_grad_()
        out = layer(x)
        assert not out[..., 0, :].any()
        assert not out[..., -1].any()
        assert finite(out, *torch.autograd.grad(out.sum(), (x, *layer.parameters())))


@by_operator
def test_a_batch_of_zeros_without_eps(name):
    for weighting, size in itertools.product(WEIGHTINGS, (0.05, 20.0)):
        layer = DecoupledConv2d(2, 3, 2, operator=name, weighting=weighting, eps=0.0)
        if name in RADIAL:
            layer.set_radius(size)
        x = torch.zeros(2, 2, 3, 3, requires_grad=True)
        out = layer(x)
        grads = torch.autograd.grad(out, (x, *layer.parameters()), torch.randn_like(out))
        assert not any(t.any() for t in (out, *grads)), weighting


@by_operator
def test_kernels_of_zeros(name):
    for g, weighting, eps in itertools.product(ANGULARS, WEIGHTINGS, (1e-4, 0.0)):
        layer = build("conv2d", 2, 3, 2, name=name, g=g, weighting=weighting, eps=eps)
        with torch.no_grad():
            layer.weight[1] = 0
        x = draw(2, 2, 3, 3).requires_grad_()
        out = layer(x)
        assert not out[:, 1].any()
        grads = torch.autograd.grad(out.square().sum() + out.sum(), (x, *layer.parameters()))
        assert finite(out, *grads), (g, weighting, eps)


@pytest.mark.parametrize("dtype", [*LOW, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["conv2d", "linear"])
def test_parallel_kernels_and_patches(kind, dtype):
    for name, g, eps, sign in itertools.product(OPERATORS, ANGULARS, (1e-4, 0.0), (1, -1)):
        options = {"k": 0.05} if g == "sigmoid" else {}
        args = (4, 2) if kind == "linear" else (1, 2, 2)
        layer = KINDS[kind][0](*args, operator=name, angular=g, eps=eps, **options).to(dtype)
        x = (sign * 2 * layer.weight[:1].detach()).requires_grad_()
        out = layer(x)
        grads = torch.autograd.grad(out, (x, *layer.parameters()), torch.ones_like(out))
        assert finite(out, *grads), (name, g, eps, sign)
        if not (g == "relucos" and sign < 0):
            assert out.detach().flatten()[0].item() * sign > 0


@by_operator
@by_angular
@pytest.mark.parametrize("eps", [0.0, 1e-4, 1e-40])
@pytest.mark.parametrize("sizes", [(1e-10, 1e10), (1e-16, 1e4), (1e-18, 1e18), (0.0, 1e18), (0.0, 1.0)])
def test_very_different_norms_in_one_batch(name, g, eps, sizes):
    """A faint patch must not spoil the gradients of the others, which it meets in the mean norm."""
    layer = DecoupledLinear(4, 3, operator=name, angular=g, eps=eps)
    x = (torch.tensor(sizes).view(2, 1) * torch.randn(2, 4)).requires_grad_()
    out = layer(x)
    out.backward(torch.randn_like(out))
    assert finite(out, x.grad, *(p.grad for p in layer.parameters()))


@by_angular
@pytest.mark.parametrize("name", RADIAL)
@pytest.mark.parametrize("dtype", LOW)
def test_small_gradients_of_the_radius_in_low_precision(name, g, dtype):
    """Long patches and weak gradients, whose products are too small for a float16."""
    operator = hs.nn.operator(name, angular=g)
    x, weight = (1e3 * torch.randn(64, 32)).to(dtype), nn.functional.normalize(torch.randn(8, 32)).to(dtype)
    upstream = (1e-4 * torch.randn(64, 8)).to(dtype)
    found = []
    for wide in (False, True):
        radius = torch.ones(8, requires_grad=True)
        args = [t.double() if wide else t for t in (x, weight, radius, upstream)]
        out, _ = hs.nn.decoupled(*args[:2], operator, radius=args[2])
        found.append(torch.autograd.grad(out, radius, args[3])[0])
    assert (found[0] - found[1]).norm() < 0.03 * found[1].norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1e-8, 1e8])
def test_extreme_norms(dtype, size):
    for name, g in itertools.product(OPERATORS, ANGULARS):
        for weighting, eps in (("none", 1e-4), ("none", 0.0), ("joint", 1e-4)):
            layer = DecoupledConv2d(2, 3, 2, operator=name, angular=g, weighting=weighting, eps=eps).to(dtype)
            x = (size * draw(2, 2, 3, 3)).to(dtype).requires_grad_()
            out = layer(x)
            grads = torch.autograd.grad(out, (x, *layer.parameters()), draw(*out.shape, dtype=dtype))
            assert finite(out, *grads), (name, g, weighting, eps)
            expected = plain(copy.deepcopy(layer).double(), x.double())
            largest = 1e-2 if size < 1 and name in ("linear", "log", "mix", "seg") else 1.0
            torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-6 * largest)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@by_spread
def test_low_precision_is_near_the_reference(name, g, weighting, dtype):
    layer = build("conv2d", 3, 4, 3, padding=1, name=name, g=g, weighting=weighting).to(dtype)
    x = draw(2, 3, 4, 4, dtype=dtype).requires_grad_()
    upstream = draw(2, 4, 4, 4, dtype=dtype)
    out = layer(x)
    exact = copy.deepcopy(layer).double()
    other = x.detach().double().requires_grad_()
    expected = plain(exact, other)
    rough = 3e-2 if dtype == torch.bfloat16 else 4e-3
    found = (out, *torch.autograd.grad(out, (x, layer.weight), upstream))
    wanted = (expected, *torch.autograd.grad(expected, (other, exact.weight), upstream.double()))
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == dtype
        assert ((a.double() - b).norm() / b.norm()).item() < rough


@pytest.mark.parametrize("dtype", LOW, ids=str)
@by_spread
def test_autocast(name, g, weighting, dtype):
    for kind in ("conv2d", "linear"):
        args = (3, 4, 3) if kind == "conv2d" else (12, 4)
        layer = build(kind, *args, name=name, g=g, weighting=weighting).float()
        x = (draw(2, 3, 5, 5) if kind == "conv2d" else draw(6, 12)).float().requires_grad_()
        exact, other = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            out = layer(x)
        assert out.dtype == KINDS[kind][1](*args)(x).dtype or out.dtype == dtype
        found = (out, *torch.autograd.grad(out.float().square().sum(), (x, *layer.parameters())))
        expected = plain(exact, other)
        wanted = torch.autograd.grad(expected.square().sum(), (other, *exact.parameters()))
        for a, b in zip(found, (expected, *wanted), strict=True):
            assert ((a.double() - b).norm() / b.norm().clamp(min=0.1)).item() < 3e-2
    layer = DecoupledConv2d(1, 1, 3, operator=name, angular=g, weighting=weighting)
    with torch.autocast("cpu", dtype=dtype):
        large = layer(torch.full((1, 1, 3, 3), 3e3, requires_grad=True))  # squares overflow float16
    assert finite(large)
    assert finite(*torch.autograd.grad(large.float().sum(), layer.parameters()))


def test_steep_sigmoids():
    for dtype, k in itertools.product((torch.float32, *LOW), (0.05, 0.02, 0.01)):
        layer = DecoupledConv2d(2, 3, 3, padding=1, operator="sphere", angular="sigmoid", k=k).to(dtype)
        x = draw(2, 2, 4, 4, dtype=dtype).requires_grad_()
        out = layer(x)
        assert finite(out, *torch.autograd.grad(out.sum(), (x, layer.weight)))
        assert out.abs().max().item() <= 1


# What surrounds a layer.


@by_spread
def test_frozen_parts(name, g, weighting):
    layer = build("conv2d", 2, 3, 2, name=name, g=g, weighting=weighting)
    x = draw(2, 2, 3, 3)
    own = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    point = x.clone().requires_grad_()
    out = layer(point).square().sum()
    for a, b in zip(own, torch.autograd.grad(out, list(layer.parameters()), retain_graph=True), strict=True):
        agree(a, b)
    by_x = torch.autograd.grad(out, point)[0]
    layer.requires_grad_(False)
    agree(torch.autograd.grad(layer(point).square().sum(), point)[0], by_x)
    assert not layer(x).requires_grad
    with torch.no_grad():
        assert not layer(point).requires_grad


@by_spread
@pytest.mark.parametrize("bias", [False, True])
def test_in_place_operations_on_the_output(name, g, weighting, bias):
    layer = build("conv2d", 2, 3, 2, name=name, g=g, weighting=weighting, bias=bias)
    x = draw(2, 2, 3, 3).requires_grad_()
    expected = torch.autograd.grad((2 * layer(x) + 1).relu().square().sum(), x)[0]
    found = torch.autograd.grad(layer(x).mul_(2).add_(1).relu_().square().sum(), x)[0]
    agree(found, expected)


@by_spread
def test_samples_do_not_depend_on_how_many_are_worked_on_together(name, g, weighting, monkeypatch):
    layer, x = build("conv2d", 2, 3, 2, name=name, g=g, weighting=weighting), draw(5, 2, 3, 3).requires_grad_()
    expected = [layer(x), *torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])]
    for elements in (1, 24):  # one sample at a time; two
        monkeypatch.setattr("hypersphere.nn.functional.CACHED", elements)
        found = [layer(x), *torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])]
        for a, b in zip(found, expected, strict=True):
            agree(a, b)


def test_a_second_backward_pass_through_one_graph():
    layer, x = build("conv2d", 2, 3, 2, name="tanh", g="sigmoid"), draw(2, 2, 3, 3).requires_grad_()
    loss = layer(x).square().sum()
    first = torch.autograd.grad(loss, [x, *layer.parameters()], retain_graph=True)
    second = torch.autograd.grad(loss, [x, *layer.parameters()])
    for a, b in zip(first, second, strict=True):
        agree(a, b)


# Shapes and memory.


@by_spread
@by_kind
def test_empty_batches(kind, name, g, weighting):
    cls, _, shape = KINDS[kind]
    args = (4, 3) if kind == "linear" else (4, 3, 2)
    layer = cls(*args, operator=name, angular=g, weighting=weighting)
    for mode in (True, False):
        layer.train(mode)
        x = torch.zeros(0, *shape[1:], requires_grad=True)
        out = layer(x)
        assert out.shape == (0, *layer(torch.ones(1, *shape[1:])).shape[1:])
        out.sum().backward()
        assert x.grad.shape == x.shape
        assert not layer.weight.grad.any()
    if hasattr(layer, "patch_norm_mean"):
        assert finite(layer.patch_norm_mean)


def test_an_empty_batch_leaves_the_running_mean_alone():
    layer = build("conv2d", 2, 3, 2, name="tanh")
    layer(draw(0, 2, 3, 3))
    x = draw(2, 2, 3, 3)
    layer(x)
    agree(layer.patch_norm_mean, [(hs.geometry.patch_norm(x, 2) ** 2 + 1e-4).sqrt().mean()])
    before = layer.patch_norm_mean.clone()
    layer(draw(0, 2, 3, 3))
    agree(layer.patch_norm_mean, before, atol=0)


def test_memory_format_of_maps_beyond_the_cache():
    """Which are worked on in parts on a CPU."""
    layer = hs.nn.TanhConv2d(2, 64, 3, padding=1)
    x = torch.randn(3, 2, 32, 32)
    assert functional.CACHED < 3 * 64 * 32 * 32
    out = layer(x.to(memory_format=torch.channels_last))
    assert out.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(out, layer(x))


@by_spread
def test_memory_formats(name, g, weighting):
    layer = build("conv2d", 3, 4, 3, padding=1, name=name, g=g, weighting=weighting)
    x = draw(2, 3, 5, 4)
    expected = layer(x)
    last = x.to(memory_format=torch.channels_last).requires_grad_()
    out = layer(last)
    assert out.is_contiguous(memory_format=torch.channels_last)
    agree(out, expected)
    grad = torch.autograd.grad(out.square().sum(), last)[0]
    strided = x.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    agree(layer(strided), expected)
    agree(torch.autograd.grad(layer(strided).square().sum(), strided)[0], grad)
    moved = copy.deepcopy(layer).to(memory_format=torch.channels_last)
    agree(moved(last), expected)
    wide = draw(2, 6, 5, 4)
    agree(layer(wide[:, ::2]), layer(wide[:, ::2].contiguous()))
    ones = tensor(1).expand_as(expected)  # an upstream gradient without memory of its own
    by_weight = [torch.autograd.grad(layer(x), layer.weight, up)[0] for up in (ones, ones.contiguous())]
    agree(*by_weight)
    linear = build("linear", 5, 3, name=name, g=g, weighting=weighting)
    rows = draw(5, 2, 4)
    agree(linear(rows.permute(2, 1, 0)), linear(rows.permute(2, 1, 0).contiguous()))


def test_wrong_shapes():
    layer = DecoupledConv2d(3, 4, 3)
    for shape in ((2, 4, 5, 5), (2, 3, 5), (2, 3, 2, 2), (5,)):
        with pytest.raises((RuntimeError, ValueError)):
            layer(torch.zeros(shape))
    with pytest.raises((RuntimeError, ValueError), match=r"shape \(N, 3, H, W\)"):
        layer(torch.zeros(2, 4, 5, 5))
    with pytest.raises(
        ArgumentError, match=r"input must have the type of the weight, torch.float32, got torch.float64"
    ):
        layer(torch.zeros(2, 3, 5, 5, dtype=torch.float64))
    with pytest.raises((RuntimeError, ValueError)):
        DecoupledLinear(3, 4)(torch.zeros(2, 4))


# The running mean.


@pytest.mark.parametrize(("init", "expected"), [("zero", 0.011992002), ("first", 2.005998)])
def test_running_mean(init, expected):
    layer = DecoupledConv2d(1, 2, 1, operator="tanh", mean_init=init, eps=0.0).double()
    for mean in (2.0, 4.0, 6.0):
        layer(torch.tensor([mean - 1, mean + 1], dtype=torch.float64).view(2, 1, 1, 1))
    agree(layer.patch_norm_mean, [expected])
    layer.eval()
    layer(torch.full((1, 1, 1, 1), 9.0, dtype=torch.float64))
    agree(layer.patch_norm_mean, [expected])


def test_running_mean_of_groups_and_its_decay():
    layer = DecoupledConv2d(4, 4, 2, groups=2, operator="ball", mean_decay=0.9, eps=0.0).double()
    x, y = draw(2, 3, 4, 3, 3)
    means = [hs.geometry.patch_norm(batch, 2, groups=2).mean((0, 2, 3)) for batch in (x, y)]
    layer(x)
    agree(layer.patch_norm_mean, means[0])
    layer(y)
    agree(layer.patch_norm_mean, 0.9 * means[0] + 0.1 * means[1])
    assert layer.patch_norm_mean.shape == (2,)
    with torch.no_grad():
        layer(y)
    agree(layer.patch_norm_mean, 0.81 * means[0] + 0.19 * means[1])


def test_a_batch_of_zeros_does_not_spoil_the_running_mean():
    layer = DecoupledConv2d(1, 2, 1, operator="tanh", eps=0.0)
    layer(torch.zeros(2, 1, 3, 3))
    layer.eval()
    assert finite(layer(torch.ones(1, 1, 3, 3)))


# Radius and steepness.


@pytest.mark.parametrize("name", RADIAL)
def test_radius_parameter(name):
    layer = DecoupledConv2d(2, 3, 2, operator=name)
    assert layer.radius.tolist() == [1.0, 1.0, 1.0]
    assert isinstance(layer.radius_raw, nn.Parameter)
    agree(layer.radius_raw**2 + 1e-4, [1.0] * 3, atol=1e-6)
    layer.set_radius(torch.tensor([0.5, 2.0, 3.0]))
    agree(layer.radius, [0.5, 2, 3], atol=1e-6)
    layer.set_radius(0.25)
    agree(layer.radius, [0.25] * 3, atol=1e-6)
    with torch.no_grad():
        layer.radius_raw.zero_()
    assert layer.radius.min().item() > 0
    assert not DecoupledConv2d(2, 3, 2, operator=name, learn_radius=False).radius_raw.requires_grad
    for bad in (0.0, -1.0, 1e-4, float("nan"), torch.tensor([1.0, 0.0, 1.0])):
        with pytest.raises(ArgumentError):
            layer.set_radius(bad)
    with pytest.raises(ArgumentError):
        DecoupledConv2d(2, 3, 2, operator="log").set_radius(1.0)
    assert DecoupledConv2d(2, 3, 2, operator="log").radius is None


def test_radius_gets_a_gradient_only_with_the_mean():
    """Long patches saturate a fixed radius: its gradient is 1e-24 of what it could be."""
    x = torch.full((1, 1, 1, 1), 30.0, dtype=torch.float64)
    for mean_norm, expected in ((False, -1.050781e-24), (True, -0.419974341614)):
        layer = DecoupledConv2d(1, 1, 1, operator="tanh", mean_norm=mean_norm, eps=0.0).double()
        with torch.no_grad():
            layer.weight.fill_(2.0)
            layer.set_radius(1.0)
        by_raw = torch.autograd.grad(layer(x).sum(), layer.radius_raw)[0]
        agree(by_raw, 2 * layer.radius_raw.detach() * expected, atol=0, rtol=1e-6)


@pytest.mark.parametrize("share", ["filter", "layer"])
@pytest.mark.parametrize("param", ["abs", "softplus", "project"])
def test_learned_steepness(share, param):
    layer = DecoupledConv2d(2, 3, 3, operator="sphere", angular="sigmoid", learn_k=share, k_param=param).double()
    count = 3 if share == "filter" else 1
    agree(layer.k, [0.5] * count, atol=1e-7)
    assert layer.k_raw.shape == (count,)
    layer.set_k(0.75)
    agree(layer.k, [0.75] * count, atol=1e-7)
    values = tensor(0.3, 0.6, 0.9)[:count]
    layer.set_k(values)
    agree(layer.k, values, atol=1e-12)
    for bad in (0.0, -0.3, 0.01, values - 0.3):
        with pytest.raises(ArgumentError):
            layer.set_k(bad)
    agree(layer.k, values, atol=1e-12)
    compare_k = {
        "abs": lambda raw: raw.abs() + 0.05,
        "softplus": lambda raw: nn.functional.softplus(raw) + 0.05,
        "project": lambda raw: raw,
    }[param]
    agree(compare_k(layer.k_raw), values)
    x, raw = draw(2, 2, 4, 4), layer.k_raw.detach().clone().requires_grad_()
    upstream = draw(2, 3, 2, 2)
    expected = ref.convolution(x, layer.weight.detach(), "sphere", "sigmoid", k=compare_k(raw))
    agree(layer(x), expected)
    agree(torch.autograd.grad(layer(x), layer.k_raw, upstream)[0], torch.autograd.grad(expected, raw, upstream)[0])


def test_steepness_of_the_absolute_value():
    layer = DecoupledLinear(2, 2, operator="sphere", angular="sigmoid", learn_k="filter").double()
    with torch.no_grad():
        layer.k_raw.copy_(tensor(0.7, -0.2))
    agree(layer.k, [0.75, 0.25])
    with pytest.raises(ArgumentError):
        DecoupledLinear(2, 2, operator="sphere", angular="sigmoid").set_k(0.4)
    assert "k_raw" not in dict(DecoupledLinear(2, 2, operator="sphere", angular="sigmoid").named_parameters())
    assert DecoupledLinear(2, 2, operator="sphere", angular="sigmoid").operator.angular == hs.angular.Sigmoid(0.3)
    agree(DecoupledLinear(2, 2, operator="sphere", angular="sigmoid", learn_k="layer", k=0.2).k, [0.2], atol=1e-7)


def test_one_projected_step_of_the_steepness():
    options = {"operator": "sphere", "angular": "sigmoid", "learn_k": "filter", "k_param": "project", "eps": 0.0}
    layer = DecoupledLinear(2, 3, **options).double()
    theta = tensor(0.4, 1.2, 2.5)
    with torch.no_grad():
        layer.weight.copy_(torch.stack([theta.cos(), theta.sin()], 1))
        layer.set_k(tensor(0.5, 0.5, 0.06))
    layer(tensor(3, 0)).sum().backward()
    agree(layer.k_raw.grad, [-0.328278361924, -0.496457006486, 9.70557166242e-05])
    torch.optim.SGD([layer.k_raw], lr=0.1).step()
    hs.nn.project_weights(layer)
    agree(layer.k, [0.532827836192, 0.549645700649, 0.0599902944283])
    with torch.no_grad():
        layer.k_raw.fill_(-1.0)
    hs.nn.project_weights(layer)
    agree(layer.k, [0.05] * 3)


# Control of the kernels' norms.


@by_angular
@by_operator
def test_weighted_gradients(name, g):
    torch.manual_seed(5)
    layer = build("conv2d", 2, 3, 3, padding=1, name=name, g=g)
    other = build("conv2d", 2, 3, 3, padding=1, name=name, g=g, weighted_gradients=True)
    other.load_state_dict(layer.state_dict())
    x = draw(2, 2, 4, 4).requires_grad_()
    agree(other(x), layer(x))
    upstream = draw(2, 3, 4, 4)
    points = [(layer.weight, *layer.parameters(), x), (other.weight, *other.parameters(), x)]
    plain_grads, weighted = (
        torch.autograd.grad(m(x), p, upstream, allow_unused=True) for m, p in zip((layer, other), points, strict=True)
    )
    norms = (layer.weight.flatten(1).square().sum(1) + 1e-4).sqrt().view(-1, 1, 1, 1)
    agree(weighted[0], plain_grads[0] * norms)
    for a, b in zip(weighted[2:], plain_grads[2:], strict=True):
        agree(a, b)
    penalty = other.weight.square().sum()  # a regulariser keeps its own gradient
    agree(torch.autograd.grad(penalty, other.weight)[0], 2 * other.weight)


def test_projection_of_kernels():
    layer = DecoupledLinear(3, 1, operator="sphere").double()
    with torch.no_grad():
        layer.weight.copy_(tensor([1, -2, 2]))
    hs.nn.project_weights(layer)
    agree(layer.weight[0], [1 / 3, -2 / 3, 2 / 3])
    with torch.no_grad():
        layer.weight.copy_(tensor([1, -2, 2]))
    hs.nn.project_weights(layer, eps=1e-4)
    agree(layer.weight.norm(), 0.999994444491)


@by_kind
def test_projection_leaves_every_answer(kind):
    args = (4, 6) if kind == "linear" else (4, 6, 2)
    for name, g in itertools.product(OPERATORS, ("cosine", "sigmoid")):
        options = {} if kind == "linear" else {"groups": 2}
        layer = build(kind, *args, name=name, g=g, eps=0.0, **options)
        x = draw(*KINDS[kind][2])
        before = layer(x)
        identity = layer.weight
        hs.nn.project_weights(layer, s=2.0)
        assert layer.weight is identity
        agree(layer(x), before)
        agree(layer.kernel_norms(), torch.full((6,), 2.0))
        once = layer.weight.detach().clone()
        hs.nn.project_weights(layer, s=2.0)
        agree(layer.weight, once, atol=1e-15)


def test_projected_training_forgets_the_scale_it_began_with():
    x, target = draw(8, 4), draw(8, 3)
    answers = []
    for scale in (0.1, 1.0, 30.0):
        layer = DecoupledLinear(4, 3, operator="sphere", angular="linear", eps=0.0).double()
        with torch.no_grad():
            layer.weight.copy_(scale * chirp((3, 4), 0.9, 0.2))
        hs.nn.project_weights(layer)
        optimiser = torch.optim.SGD(layer.parameters(), lr=0.3)
        for _ in range(3):
            optimiser.zero_grad()
            (layer(x) - target).square().mean().backward()
            optimiser.step()
            hs.nn.project_weights(layer)
        answers.append(layer.weight.detach())
    agree(answers[0], answers[1])
    agree(answers[2], answers[1])


def test_projection_and_weighting_exclude_each_other():
    model = nn.Sequential(DecoupledLinear(3, 4, operator="sphere"), nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = model[1].weight.clone()
    hs.nn.project_weights(model)
    agree(model[1].weight, before.double(), atol=0)
    agree(model[0].weight.norm(dim=1), torch.ones(4), atol=1e-6)
    for weighting in WEIGHTINGS[1:]:
        with pytest.raises(ArgumentError):
            hs.nn.project_weights(DecoupledLinear(3, 4, operator="tanh", weighting=weighting))
        with pytest.raises(ArgumentError, match="weighted_gradients"):
            DecoupledLinear(3, 4, operator="tanh", weighting=weighting, weighted_gradients=True)


def test_rotation_of_a_step():
    for length, angle in ((0.01, 1.4711276743), (1, 0.0996686524912), (100, 0.000999999666667)):
        layer = DecoupledLinear(2, 1, operator="sphere", weighted_gradients=True, eps=0.0).double()
        with torch.no_grad():
            layer.weight.copy_(tensor([length, 0.0]))
        layer(tensor(0, 4)).sum().backward()
        agree(layer.weight.grad.norm(), 1.0)
        moved = (layer.weight - 0.1 * layer.weight.grad).detach()
        agree(hs.geometry.angle(moved, layer.weight.detach()), [angle])


@by_kind
def test_kernel_norms(kind):
    args = (4, 6) if kind == "linear" else (4, 6, 2)
    options = {} if kind == "linear" else {"groups": 2}
    layer = build(kind, *args, **options)
    weight = layer.weight.detach()
    if kind.startswith("convtranspose"):
        rows = [weight[2 * (o // 3) : 2 * (o // 3) + 2, o % 3].norm() for o in range(6)]
    else:
        rows = [weight[o].norm() for o in range(6)]
    agree(layer.kernel_norms(), torch.stack(rows))


# Layers as modules.


@by_kind
@by_operator
def test_state_dictionaries(name, kind):
    cls, torch_class, shape = KINDS[kind]
    args = (4, 3) if kind == "linear" else (4, 3, 2)
    layer, other = cls(*args, operator=name), torch_class(*args, bias=False)
    assert layer.bias is None
    assert isinstance(layer, torch_class)
    assert isinstance(layer, Decoupled)
    if name in RADIAL:
        assert set(layer.state_dict()) == {"weight", "radius_raw", "patch_norm_mean", "patch_norm_seen"}
    else:
        assert set(layer.state_dict()) == set(other.state_dict())
    layer.load_state_dict(other.state_dict())
    agree(layer.weight, other.weight.double(), atol=0)
    biased = cls(*args, operator=name, bias=True)
    biased.load_state_dict(torch_class(*args).state_dict())
    nn.Sequential(biased).load_state_dict(nn.Sequential(torch_class(*args)).state_dict())
    with pytest.raises(RuntimeError):
        layer.load_state_dict({})
    with pytest.raises(RuntimeError):
        layer.load_state_dict(torch_class(*args).state_dict())  # a bias too many
    x = torch.randn(shape)
    out = biased(x)  # the bias comes after the angular function
    with torch.no_grad():
        biased.bias.add_(5.0)
    torch.testing.assert_close(biased(x), out + 5.0)


def equal_layers(a, b, x):
    assert set(a.state_dict()) == set(b.state_dict())
    for key, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[key]), key
    assert a.operator == b.operator
    assert torch.equal(a(x), b(x))


def test_copies_and_files():
    x = torch.randn(2, 4, 4, 4)
    layer = DecoupledConv2d(4, 4, 3, groups=2, operator="tanh", angular="sigmoid", learn_k="filter", alpha=1.5)
    layer.set_radius(torch.linspace(0.5, 2, 4))
    layer.set_k(torch.linspace(0.2, 0.8, 4))
    layer(3 * x)
    layer.eval()
    fresh = DecoupledConv2d(4, 4, 3, groups=2, operator="tanh", angular="sigmoid", learn_k="filter", alpha=1.5)
    fresh.load_state_dict(layer.state_dict())
    equal_layers(fresh.eval(), layer, x)
    equal_layers(copy.deepcopy(layer), layer, x)
    equal_layers(pickle.loads(pickle.dumps(layer)), layer, x)
    preset = hs.nn.MixConv2d(4, 4, 3)
    equal_layers(pickle.loads(pickle.dumps(preset)), preset, x)
    equal_layers(copy.deepcopy(preset), preset, x)
    assert type(copy.deepcopy(preset)) is hs.nn.MixConv2d
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    equal_layers(torch.load(file, weights_only=False), layer, x)
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        copied.weight.mul_(-1)
    assert not torch.equal(copied.weight, layer.weight)
    for key, value in layer.double().state_dict().items():
        assert value.dtype == torch.float64 or not value.dtype.is_floating_point, key
    assert layer(x.double()).dtype == torch.float64


def test_meta_device_and_dtype_arguments():
    layer = DecoupledConv2d(2, 3, 3, operator="tanh", angular="sigmoid", learn_k="layer", device="meta")
    assert all(p.is_meta for p in layer.parameters())
    assert all(b.is_meta for b in layer.buffers())
    layer = DecoupledConv2d(2, 3, 3, operator="tanh", dtype=torch.float64)
    assert {p.dtype for p in layer.parameters()} == {torch.float64}
    assert layer(draw(1, 2, 3, 3)).dtype == torch.float64


def test_representation():
    text = repr(DecoupledConv2d(2, 3, 3, padding=1, operator="tanh", angular="sqcos"))
    assert "tanh" in text.lower()
    assert "sqcos" in text.lower() or "squarecosine" in text.lower()
    assert "2, 3, kernel_size=(3, 3)" in text
    assert "padding=(1, 1)" in text
    text = repr(hs.nn.SphereLinear(4, 5, angular="linear"))
    assert "in_features=4" in text
    assert "sphere" in text.lower()
    assert "linear" in text.lower().replace("spherelinear", "")


@by_kind
def test_adopt_and_release(kind):
    _, torch_class, shape = KINDS[kind]
    args = (4, 3) if kind == "linear" else (4, 3, 2)
    module = torch_class(*args, dtype=torch.float64)
    x = draw(*shape)
    before = module(x)
    weight, bias = module.weight, module.bias
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    module.tag = "kept"
    adopted = Decoupled.adopt(module, hs.nn.operators.create("tanh", angular="sigmoid", learn_k="filter"))
    assert adopted is module
    assert type(module) is KINDS[kind][0]
    assert module.weight is weight
    assert module.bias is bias
    assert module.tag == "kept"
    assert {t.dtype for t in module.state_dict().values() if t.dtype.is_floating_point} == {torch.float64}
    agree(module(x), plain(module, x))
    assert len(calls) == 1
    assert "radius_raw" in dict(module.named_parameters())
    module.release()
    assert type(module) is torch_class
    assert set(module.state_dict()) == {"weight", "bias"}
    assert module.weight is weight
    agree(module(x), before)
    assert len(calls) == 2
    assert repr(module) == repr(torch_class(*args))


@pytest.mark.parametrize("kind", ["conv2d", "convtranspose1d", "linear"])
def test_adopt_a_parametrised_layer(kind):
    _, torch_class, shape = KINDS[kind]
    args = (4, 3) if kind == "linear" else (4, 3, 2)
    module = nn.utils.parametrizations.weight_norm(torch_class(*args).double())
    x = draw(*shape)
    before = module(x)
    raw = module.parametrizations.weight.original1
    Decoupled.adopt(module, "log", angular="linear")
    assert isinstance(module, KINDS[kind][0])
    agree(module(x), plain(module, x, {"weight": module.weight, "bias": module.bias}))
    module(x).sum().backward()
    assert raw.grad.any()
    copied = copy.deepcopy(module)
    agree(copied(x), module(x))
    copied.load_state_dict(module.state_dict())
    module.release()
    assert isinstance(module, torch_class)
    assert not isinstance(module, Decoupled)
    agree(module(x), before)
    nn.utils.parametrize.remove_parametrizations(module, "weight")
    agree(module(x), before)


def test_adopt_refuses_what_it_does_not_know():
    with pytest.raises(HypersphereError):
        Decoupled.adopt(nn.ReLU(), hs.nn.operators.create("sphere"))

    class Own(nn.Conv2d):
        def forward(self, x):
            return -super().forward(x)

    with pytest.raises(HypersphereError):
        Decoupled.adopt(Own(1, 1, 1), hs.nn.operators.create("sphere"))


# Names.


@by_kind
def test_create_every_layer(kind):
    cls, _, shape = KINDS[kind]
    args = (4, 3) if kind == "linear" else (4, 3, 2)
    for name in OPERATORS:
        torch.manual_seed(2)
        layer = hs.nn.create(name, layer=kind, angular="sqcos", eps=1e-3)(*args)
        assert isinstance(layer, cls)
        assert layer.operator == hs.nn.operators.create(name, angular="sqcos", eps=1e-3)
        torch.manual_seed(2)
        stem = kind.replace("conv", "Conv").replace("transpose", "Transpose").replace("linear", "Linear")
        preset = getattr(hs.nn, name.capitalize() + stem)(*args, angular="sqcos", eps=1e-3)
        assert isinstance(preset, cls)
        equal_layers(preset, layer, torch.randn(shape))
    conv = hs.nn.create("tanh")(3, 8, 3, padding=1, bias=True)
    assert conv(torch.randn(2, 3, 4, 4)).shape == (2, 8, 4, 4)
    assert conv.bias is not None


def test_operators_by_object():
    op = hs.nn.operators.create("tanh", angular="linear", alpha=2.0)
    layer = DecoupledConv2d(2, 3, 3, operator=op)
    assert layer.operator == op
    agree(layer(torch.randn(1, 2, 3, 3)).abs().max() <= 2, 1)
    again = DecoupledConv2d(2, 3, 3, operator=op, alpha=1.0)
    assert again.operator == hs.nn.operators.create("tanh", angular="linear", alpha=1.0)


def test_errors_name_the_argument():
    with pytest.raises(HypersphereError, match="'sphere'"):
        DecoupledConv2d(2, 3, 3, operator="spere")
    with pytest.raises(HypersphereError, match="conv2d"):
        hs.nn.create("sphere", layer="conv4d")
    for options, word in (
        ({"eps": -1.0}, "eps"),
        ({"alpha": 0.0}, "alpha"),
        ({"operator": "tanh", "radius": -1.0}, "radius"),
        ({"angular": "sigmoid", "k": 0.0}, "k"),
        ({"weigting": "none"}, "weigting"),
        ({"operator": "sphere", "radius": 1.0}, "radius"),
    ):
        with pytest.raises(ArgumentError) as error:
            DecoupledConv2d(2, 3, 3, **options)
        assert error.value.argument == word
        with pytest.raises(ArgumentError):
            hs.nn.create(options.get("operator", "sphere"), **{k: v for k, v in options.items() if k != "operator"})(
                2, 3, 3
            )
    with pytest.raises(ValueError, match="groups"):
        DecoupledConv2d(3, 4, 3, groups=2)


# Compilers.


@pytest.mark.parametrize(
    ("kind", "name", "g", "weighting"),
    [
        ("conv2d", "tanh", "sigmoid", "none"),
        pytest.param("linear", "ball", "linear", "joint", marks=pytest.mark.slow),
    ],
)
def test_compiled_layers(kind, name, g, weighting):
    torch._dynamo.reset()
    args, shape = ((4, 3), (3, 4)) if kind == "linear" else ((2, 3, 2), (2, 2, 4, 4))
    learned = {"learn_k": "filter"} if g == "sigmoid" else {}
    eager = KINDS[kind][0](*args, operator=name, angular=g, weighting=weighting, **learned)
    other = copy.deepcopy(eager)
    compiled = torch.compile(other, fullgraph=True)
    for _ in range(2):
        x = torch.randn(shape)
        answers = []
        for call_layer, layer in ((eager, eager), (compiled, other)):
            point = x.clone().requires_grad_()
            out = call_layer(point)
            grads = torch.autograd.grad(out.square().sum(), (point, *layer.parameters()))
            answers.append((out, *grads, *layer.buffers()))
        for a, b in zip(*answers, strict=True):
            torch.testing.assert_close(b, a, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(("g", "groups"), [("cosine", 1), ("sigmoid", 2)])
def test_what_is_compiled_has_the_same_gradients(name, g, groups, monkeypatch):
    """As it is handed to a compiler, for layers one behind the other, against autograd of torch's operations."""
    torch._dynamo.reset()
    layers = [build("conv2d", *pair, 3, name=name, g=g, groups=groups, padding=1) for pair in ((2, 4), (4, 6))]
    net = nn.Sequential(layers[0], nn.BatchNorm2d(4), nn.ReLU(inplace=True), layers[1]).double()
    by_hand = functional._by_hand
    x, d_y = draw(3, 2, 5, 5), draw(3, 6, 5, 5)
    answers = []
    for call in (net, torch.compile(net, backend="aot_eager", fullgraph=True)):
        monkeypatch.setattr(functional, "_by_hand", (lambda _: False) if call is net else by_hand)
        point = x.clone().requires_grad_()
        out = call(point)
        answers.append((out, *torch.autograd.grad(out, (point, *net.parameters()), d_y)))
    for a, b in zip(*answers, strict=True):
        agree(b, a)


@pytest.mark.parametrize("name", ["sphere", "tanh"])
def test_what_is_compiled_keeps_the_output_for_the_layer_behind(name):
    """The products would have to become the output once more in the backward pass of every layer that needs it."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    torch._dynamo.reset()
    kept = []

    def forward_compiler(graph, _):
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        kept.extend(node for node in output.args[0] if node is not None)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=forward_compiler,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    net = nn.Sequential(DecoupledConv2d(3, 5, 3, operator=name), nn.BatchNorm2d(5), nn.ReLU())
    net[0].to(torch.bfloat16)
    x = torch.randn(2, 3, 7, 7, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(net, backend=backend, fullgraph=True)(x).sum().backward()
    maps = [str(node.target) for node in kept if node.meta["val"].shape == (2, 5, 5, 5)]
    assert maps
    assert "aten.convolution.default" not in maps


def test_exported_layer():
    layer = DecoupledConv2d(2, 3, 3, padding=1, operator="tanh", angular="linear")
    layer(torch.randn(2, 2, 4, 4))
    layer.eval()
    x = torch.randn(2, 2, 4, 4)
    program = torch.export.export(layer, (x,))
    torch.testing.assert_close(program.module()(x), layer(x))


# What frameworks do to layers.


@pytest.mark.parametrize("training", [False, True])
def test_inference_mode(training):
    layer, x = build("conv2d", 2, 3, 2, name="tanh", g="sigmoid").train(training), draw(2, 2, 3, 3)
    with torch.no_grad():
        expected = layer(x)
    layer.patch_norm_seen.zero_()
    with torch.inference_mode():
        agree(layer(x).clone(), expected)


def test_gradients_of_inputs_that_depend_on_each_other():
    operator, directions = hs.nn.operator("sphere", eps=0.0), draw(4, 4).requires_grad_()
    total = hs.nn.decoupled(2 * directions, directions, operator)[0].sum()
    (expected,) = torch.autograd.grad(total, directions, retain_graph=True)
    (found,) = torch.autograd.grad(total, directions, create_graph=True)
    agree(found, expected)


@by_spread
def test_forward_mode_derivatives(name, g, weighting):
    layer = build(
        "conv2d", 2, 3, 2, name=name, g=g, weighting=weighting, **({"mean_norm": False} if name in RADIAL else {})
    )
    x, tangent = draw(2, 2, 3, 3), draw(2, 2, 3, 3) + 1
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        found = torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent
    step = 1e-6
    agree(found, (layer(x + step * tangent) - layer(x - step * tangent)).detach() / (2 * step), 1e-6)
    linear, point = build("linear", 5, 3, name=name, g=g, weighting=weighting).eval(), draw(5)
    agree(torch.func.jacfwd(linear)(point), torch.func.jacrev(linear)(point))
    twice = torch.func.jacfwd(torch.func.jacfwd(lambda v: linear(v).sum()))(point)
    agree(twice, torch.func.hessian(lambda v: linear(v).sum())(point))
    agree(twice, torch.autograd.functional.hessian(lambda v: linear(v).sum(), point))


def test_layers_begin_on_the_meta_device():
    with torch.device("meta"):
        layer = hs.nn.TanhConv2d(2, 3, 2, angular="sigmoid", learn_k="filter", radius=0.5)
    layer = layer.to_empty(device="cpu")
    for tensor in (*layer.parameters(), layer.patch_norm_mean):
        tensor.data.fill_(math.nan)
    layer.patch_norm_seen.fill_(7)
    layer.reset_parameters()
    assert layer.weight.isfinite().all()
    assert torch.allclose(layer.radius, torch.tensor(0.5)) and torch.allclose(layer.k, torch.tensor(0.5))
    assert layer.patch_norm_mean == 1 and layer.patch_norm_seen == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_keep_nothing_and_compute_the_same(reentrant):
    layer, x = build("conv2d", 2, 3, 2, name="sphere", g="sigmoid"), draw(2, 2, 3, 3).requires_grad_()
    expected = torch.autograd.grad(layer(x).sigmoid().sum(), [x, layer.weight])
    kept = []

    def run(x):
        y = layer(x)
        kept.append(weakref.ref(y.untyped_storage()))
        return y.sigmoid()

    y = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=reentrant)
    gc.collect()
    assert kept[0]() is None
    y.sum().backward()
    for a, b in zip((x.grad, layer.weight.grad), expected, strict=True):
        agree(a, b)


def test_saved_tensor_hooks_see_the_output():
    layer, x = build("conv2d", 2, 3, 2, name="sphere", g="cosine"), draw(2, 2, 3, 3).requires_grad_()
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (shapes.append(tuple(t.shape)), t)[1], lambda t: t):
        y = layer(x)
    assert tuple(y.shape) in shapes
    agree(torch.autograd.grad(y.square().sum(), x)[0], torch.autograd.grad(layer(x).square().sum(), x)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_average_of_norms_keeps_moving_in_low_precision(dtype):
    layer = hs.nn.TanhConv2d(2, 3, 2, mean_decay=0.999)
    x = draw(2, 2, 3, 3).float()
    layer(x)
    first = layer.patch_norm_mean.clone()
    layer = layer.to(dtype)
    assert layer.weight.dtype == dtype and torch.equal(layer.patch_norm_mean, first)
    layer(2 * x.to(dtype))
    assert 1.0005 < layer.patch_norm_mean / first < 1.0015


def test_averaged_copies():
    layer, x = hs.nn.TanhConv2d(2, 3, 2), draw(2, 2, 3, 3).float()
    average = torch.optim.swa_utils.AveragedModel(layer, use_buffers=True)
    for scale in (1.0, 3.0):
        layer(scale * x)
        average.update_parameters(layer)
    assert average.module.patch_norm_seen == 1
    assert average.module.patch_norm_mean > layer.patch_norm_mean * 0.5


def test_a_projected_steepness_comes_back_from_below_its_limit():
    layer = build("linear", 3, 2, name="sphere", g="sigmoid", learn_k="layer", k_param="project")
    with torch.no_grad():
        layer.k_raw.fill_(-1.0)
    assert layer.k.item() == pytest.approx(hs.nn.Operator.K_MIN)
    layer(draw(4, 3)).square().sum().backward()
    assert layer.k_raw.grad != 0


def test_the_printed_layer_names_what_was_changed():
    text = repr(hs.nn.TanhConv2d(2, 3, 2, radius=0.5, angular="sigmoid", k=0.7))
    assert "operator=tanh" in text and "Sigmoid(k=0.7)" in text and "radius=0.5" in text and "eps" not in text
