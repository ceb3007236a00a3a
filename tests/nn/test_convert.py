"""Conversion of models: against torch's own layers, plain code over unfolded patches, and itself undone."""

import copy
import functools
import io
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import hypersphere as hs
from hypersphere.errors import ArgumentError, HypersphereError
from hypersphere.nn import Decoupled, convert, fold, report, revert

# Each operator once or more, with angular functions and weightings spread over them.
SPREAD = (
    ("sphere", {"angular": "cosine"}),
    ("sphere", {"angular": "sigmoid", "learn_k": "filter"}),
    ("sphere", {"angular": "linear", "weighting": "separate", "alpha": 1.7}),
    ("ball", {"angular": "linear", "weighting": "joint"}),
    ("ball", {"angular": "sigmoid", "learn_k": "layer", "k_param": "softplus"}),
    ("tanh", {"angular": "sqcos", "weighting": "separate", "alpha": 1.5}),
    ("tanh", {"mean_norm": False}),
    ("linear", {"alpha": 0.7}),
    ("linear", {"weighting": "joint", "alpha": 0.7}),
    ("linear", {"weighting": "linear", "alpha": 0.7}),
    ("linear", {"weighting": "separate", "alpha": 0.7}),
    ("linear", {"angular": "sqcos"}),
    ("seg", {"angular": "relucos", "weighting": "linear"}),
    ("log", {"eps": 0.0}),
    ("mix", {"angular": "sigmoid", "weighting": "separate", "beta": 0.5}),
)
by_spread = pytest.mark.parametrize(("name", "options"), SPREAD, ids=str)


class Images(nn.Module):
    """Convolutions of many settings, a shortcut, a transposed convolution, linear layers."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.shortcut = nn.Conv2d(8, 6, 1, stride=2, bias=False)
        self.body = nn.Sequential(
            nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=4),
            nn.PReLU(),
            nn.Conv2d(8, 6, (1, 3), padding="same", padding_mode="circular", dilation=2),
        )
        self.up = nn.ConvTranspose2d(6, 4, 4, stride=2, padding=1, groups=2)
        self.hidden = nn.Linear(4 * 36, 9)
        self.fc = nn.Linear(9, 5, bias=False)

    def forward(self, x):
        x = self.norm(self.stem(x))
        x = self.up(F.gelu(self.body(x) + self.shortcut(x)))
        return self.fc(torch.tanh(self.hidden(x.flatten(1))))


class Signals(nn.Module):
    """One and three spatial axes, and linear layers over several leading axes."""

    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.Conv1d(2, 6, 3, padding=1), nn.SiLU(), nn.ConvTranspose1d(6, 4, 2, stride=2))
        self.mix = nn.Linear(10, 8)
        self.three = nn.Sequential(nn.Conv3d(1, 3, (1, 3, 3)), nn.SiLU(), nn.ConvTranspose3d(3, 2, 2))

    def forward(self, x):
        return self.three(self.mix(F.silu(self.one(x))).unsqueeze(1).unsqueeze(1))


class Tied(nn.Module):
    """An embedding, one block used twice, and an output layer with the weight of the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.block = nn.Linear(6, 6)
        self.same = self.block
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(torch.tanh(self.same(torch.tanh(self.block(self.embed(x))))))


class ReadsWeights(nn.Module):
    """A model that calls one of its layers in another order than it has them and reads the weight of another."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 3)
        self.read = nn.Linear(4, 4)
        self.first = nn.Linear(5, 4)

    def forward(self, x):
        return self.last(F.linear(self.first(x), self.read.weight, self.read.bias))


class Squared(nn.Conv2d):
    """A layer with a forward pass of its own."""

    def forward(self, x):
        return super().forward(x) ** 2


class Three(nn.Conv2d):
    """A layer that is only built differently."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, 3, padding=1)
        self.own = "kept"

    def reset_parameters(self):
        nn.init.ones_(self.weight)


MODELS = {
    "images": (Images, (2, 3, 6, 6)),
    "signals": (Signals, (2, 2, 5)),
    "tied": (Tied, None),
}
by_model = pytest.mark.parametrize("kind", MODELS)


def build(kind, dtype=torch.float64):
    """A model with statistics and an input for it."""
    cls, shape = MODELS[kind]
    model = cls().to(dtype)
    x = torch.randint(0, 11, (3, 4)) if shape is None else torch.randn(shape, dtype=dtype)
    model(x)
    return model, x


def decoupled(model):
    return [name for name, module in model.named_modules() if isinstance(module, Decoupled)]


def gradients(model, x):
    out = model(x)
    points = [p for p in model.parameters() if p.requires_grad]
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return torch.autograd.grad((out * weights).sum(), points)


def same_state(a, b):
    assert list(a) == list(b)
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def cosines(x, weight, eps=1e-4, **window):
    """Cosines of all patches and kernels from patches that are copied out."""
    patches = F.unfold(x, weight.shape[2:], **window)
    kernels = weight.flatten(1)
    scale = (patches.square().sum(1, keepdim=True) + eps).sqrt()
    return (kernels / (kernels.square().sum(1, keepdim=True) + eps).sqrt()) @ (patches / scale)


# What a converted model computes.


@by_model
@pytest.mark.parametrize("weighting", ["linear", "joint", "separate"])
def test_the_inner_product_leaves_a_model_as_it_is(kind, weighting):
    model, x = build(kind)
    before, grads = model.eval()(x), gradients(model, x)
    assert convert(model, "linear", weighting=weighting, skip=()) is model
    assert {row.kind for row in report(model).left} <= {"Embedding"}
    torch.testing.assert_close(model(x), before, atol=1e-12, rtol=1e-10)
    for a, b in zip(gradients(model, x), grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-8)


def test_a_converted_network_by_hand():
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 2, stride=2), nn.Flatten())
    model.append(nn.Linear(12, 5)).append(nn.Linear(5, 2))
    model, x = model.double(), torch.randn(3, 2, 4, 4, dtype=torch.float64)
    convert(model, "log", alpha=2.0)
    y = x
    for layer, window in ((model[0], {"padding": 1}), (model[2], {"stride": 2})):
        norms = (F.unfold(y, layer.kernel_size, **window).square().sum(1, keepdim=True) + 1e-4).sqrt()
        y = cosines(y, layer.weight, **window) * 2 * torch.log(1 + norms) + layer.bias[:, None]
        y = y.view(3, layer.out_channels, *((4, 4) if layer is model[0] else (2, 2)))
        y = y.relu() if layer is model[0] else y
    y = y.flatten(1)
    norms = (y.square().sum(1, keepdim=True) + 1e-4).sqrt()
    directions = model[4].weight / (model[4].weight.square().sum(1, keepdim=True) + 1e-4).sqrt()
    y = (y / norms) @ directions.T * 2 * torch.log(1 + norms) + model[4].bias
    torch.testing.assert_close(model(x), model[5](y), atol=1e-12, rtol=1e-10)
    assert type(model[5]) is nn.Linear


@by_model
def test_convert_and_revert_leave_no_trace(kind):
    model, x = build(kind)
    before, attributes, parameters = model(x), [set(vars(m)) for m in model.modules()], list(model.parameters())
    state = copy.deepcopy(model.state_dict())
    convert(model, "tanh", angular="sigmoid", learn_k="filter", exclude=lambda name, layer: name.endswith(".0"))
    assert set(state) < set(model.state_dict())
    assert revert(model) is model
    same_state(model.state_dict(), state)
    assert [set(vars(m)) for m in model.modules()] == attributes
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert not decoupled(model)
    assert all(type(m).__module__.startswith("torch.nn") for m in model.modules() if m is not model)
    model.load_state_dict(state)
    assert torch.equal(model(x), before)


def test_a_single_layer():
    for layer in (nn.Linear(3, 4), nn.Conv1d(3, 4, 2)):
        assert convert(layer, "ball") is layer
        assert isinstance(layer, Decoupled)
        assert report(layer).rows[0].name == ""
        assert revert(layer) is layer
        assert type(layer) in (nn.Linear, nn.Conv1d)


# Which layers are converted.

ALL = ("stem", "shortcut", "body.0", "body.2", "up", "hidden", "fc")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("stem", "body.0", "body.2", "up", "hidden")),
        ({"skip": ()}, ALL),
        ({"skip": "last"}, ALL[:-1]),
        ({"skip": ["first"]}, ALL[1:]),
        ({"skip": ("first", "last", "shortcut")}, ("body.0", "body.2", "up", "hidden")),
        ({"types": nn.Conv2d}, ("stem", "body.0", "body.2")),
        ({"types": (nn.Conv2d, nn.Linear), "skip": ()}, ("stem", "shortcut", "body.0", "body.2", "hidden", "fc")),
        ({"types": nn.modules.conv._ConvNd}, ("stem", "body.0", "body.2", "up")),
        ({"types": "conv*", "skip": ()}, ("stem", "shortcut", "body.0", "body.2", "up")),
        ({"types": ["conv_transpose2d", "linear"]}, ("up", "hidden")),
        ({"include": "body.*"}, ("body.0", "body.2")),
        ({"include": ["body.*", "hid*", "fc"]}, ("body.0", "body.2", "hidden")),
        ({"include": lambda name, module: getattr(module, "groups", 1) > 1}, ("body.0", "up")),
        ({"exclude": "*o*"}, ("stem", "up", "hidden")),
        ({"exclude": ["stem", "up"], "skip": ()}, ("shortcut", "body.0", "body.2", "hidden", "fc")),
        ({"include": "*", "exclude": lambda name, module: isinstance(module, nn.Linear)}, ALL[:1] + ALL[2:5]),
    ],
)
def test_choice_of_layers(options, expected):
    model, x = build("images")
    convert(model, **options)
    assert decoupled(model) == [name for name in ALL if name in expected]
    assert [row.name for row in report(model).converted] == decoupled(model)
    assert all(row.note for row in report(model).left)
    assert model(x).isfinite().all()


def test_shortcuts_are_known_by_their_names():
    names = ["block_shortcut_0", "downsample", "project", "skip_conv", "project_conv", "projection", "main"]
    model = nn.ModuleDict({name: nn.Conv2d(2, 2, 1) for name in names})
    model["shortcut3"] = nn.Conv2d(2, 2, 3)
    convert(model)
    assert decoupled(model) == ["project_conv", "projection", "main", "shortcut3"]


def test_wrong_choices():
    model, _ = build("images")
    state, classes = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    for options, word in (
        ({"skip": "lst"}, "skip"),
        ({"types": nn.ReLU}, "types.*ReLU"),
        ({"types": "conv4d"}, "types.*conv4d"),
        ({"include": [1]}, "include"),
        ({"exclude": [None]}, "exclude"),
        ({"operator": "spere"}, "sphere"),
        ({"alpha": -1}, "alpha"),
        ({"k": 0.3}, "k"),
        ({"weighting": "linear", "project": True}, "project"),
        ({"include": ["fc", "nothing"]}, "include must be the name or a pattern of stem, .*, got 'nothing'"),
        ({"exclude": "*"}, r"fc \(Linear\): in exclude"),
        ({"include": "fc"}, r'fc \(Linear\): the output \(skip="output"\)'),
        ({"types": "linear", "exclude": "hidden"}, r"stem \(Conv2d\): not in types\n.*hidden \(Linear\): in exclude"),
    ):
        with pytest.raises(HypersphereError, match=f"(?s){word}"):
            convert(model, **options)
    assert [type(m) for m in model.modules()] == classes
    same_state(model.state_dict(), state)
    with pytest.raises(ArgumentError, match="no convolution or linear layer"):
        convert(nn.ReLU())
    with pytest.raises(ArgumentError, match="and 4 more"):
        convert(nn.Sequential(*(nn.Linear(2, 2) for _ in range(24))), exclude="*")


def test_an_example_tells_order_and_use():
    model = ReadsWeights().train()
    model.read.eval()
    x = torch.randn(2, 5)
    convert(model, skip="last")
    assert decoupled(model) == ["last", "read"]  # in the order of registration the last is the first
    revert(model)
    for example in (x, (x,), {"x": x}):
        convert(model, skip="last", example=example)
        assert decoupled(model) == ["first"]
        assert {row.name: row.note for row in report(model).left} == {
            "last": 'the output (skip="output")',
            "read": "the example does not call it",
        }
        revert(model)
    convert(model, skip="first", example=x)
    assert decoupled(model) == ["last"]
    assert (model.training, model.read.training, model.first.training) == (True, False, True)
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_an_example_that_fails_changes_nothing():
    model = ReadsWeights().train()
    with pytest.raises(RuntimeError):
        convert(model, example=torch.randn(2, 7))
    assert model.training
    assert not decoupled(model)
    assert not any(m._forward_pre_hooks for m in model.modules())


# Layers that must be left alone.


def test_layers_that_cannot_be_converted():
    model = nn.ModuleDict(
        {
            "own": Squared(2, 2, 1),
            "lazy": nn.LazyConv2d(3, 1),
            "attention": nn.MultiheadAttention(4, 2),
            "patched": nn.Linear(2, 2),
            "good": nn.Linear(2, 2),
            "whole": nn.Linear(2, 2),
        }
    )
    if hasattr(nn, "LinearCrossEntropyLoss"):
        model["loss"] = nn.LinearCrossEntropyLoss(4, 3)
    model["patched"].forward = lambda x: x
    model["whole"].weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    convert(model, skip=())
    assert decoupled(model) == ["good"]
    notes = {row.name: row.note for row in report(model).left}
    assert notes.pop("loss.linear", "LinearCrossEntropyLoss reads its weight") == (
        "LinearCrossEntropyLoss reads its weight"
    )
    assert notes == {
        "own": "Squared has a forward pass of its own",
        "lazy": "lazy: run a batch through the model first",
        "attention.in_proj_weight": "MultiheadAttention has no decoupled kind",
        "attention.out_proj": "MultiheadAttention reads its weight",
        "patched": "its forward pass was replaced",
        "whole": "quantised",
    }
    model["lazy"](torch.randn(1, 2, 3, 3))
    assert not {row.name: row.note for row in report(model).rows}["lazy"]
    convert(model, skip=(), include="lazy")
    assert decoupled(model) == ["lazy", "good"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantised_layers():
    quantised = pytest.importorskip("torch.ao.nn.quantized.dynamic")
    try:
        layer = quantised.Linear(3, 4)
    except RuntimeError:
        pytest.skip("this build of torch has no quantised kernels")
    model = nn.Sequential(nn.Linear(3, 3), layer)
    convert(model, skip=())
    assert decoupled(model) == ["0"]
    assert report(model).rows[1].note == "quantised"


def test_subclasses_that_are_only_built_differently():
    model = nn.Sequential(Three(2, 4), nn.Flatten(), nn.Linear(4 * 9, 2)).double()
    x = torch.randn(2, 2, 3, 3, dtype=torch.float64)
    layer = model[0]
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)  # its own initialisation leaves it as the memory was
    before = model(x)
    convert(model, "sphere")
    assert isinstance(layer, Three)
    assert isinstance(layer, hs.nn.DecoupledConv2d)
    assert layer.own == "kept"
    y = cosines(x, layer.weight, padding=1).view(2, 4, 3, 3) + layer.bias.view(-1, 1, 1)
    torch.testing.assert_close(layer(x), y, atol=1e-12, rtol=1e-10)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ):
        assert type(other[0]) is type(layer)
        assert torch.equal(other(x), model(x))
        assert other[0].weight is not layer.weight
    assert report(model).rows[0].kind == "Three"
    layer.reset_parameters()
    assert layer.weight.eq(1).all()
    with torch.no_grad():
        layer.weight.copy_(copy.deepcopy(other)[0].weight)
    revert(model)
    assert type(layer) is Three
    assert torch.equal(model(x), before)


def test_classes_made_for_subclasses_are_found_again():
    model = nn.Sequential(Three(1, 1), Three(1, 1), nn.Linear(2, 2))
    convert(model)
    assert type(model[0]) is type(model[1])


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_encoders_of_torch_do_not_pass_converted_layers_by(norm_first):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[0, 3:] = True
    with torch.no_grad():
        ordinary = model.eval()(x, src_key_padding_mask=mask)
    convert(model, "sphere", angular="linear", skip=())
    assert decoupled(model) == [f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)]
    for masked in ({}, {"src_key_padding_mask": mask}):
        with torch.no_grad():
            trained, evaluated = model.train()(x, **masked), model.eval()(x, **masked)
        assert evaluated.shape == trained.shape
        keep = ~mask if masked else torch.ones_like(mask)
        torch.testing.assert_close(evaluated[keep], trained[keep], atol=1e-10, rtol=1e-8)
        assert (evaluated - ordinary)[keep].abs().max() > 0.01
    again = copy.deepcopy(model)
    with torch.no_grad():
        torch.testing.assert_close(again(x), model(x))
    convert(model, "tanh")
    revert(model)
    assert model.layers[0].activation_relu_or_gelu == 1
    assert model.use_nested_tensor is (not norm_first)
    with torch.no_grad():
        assert torch.equal(model(x, src_key_padding_mask=mask), ordinary)


# Objects keep their identity.


def test_parameters_hooks_and_optimisers_stay():
    model, x = build("images")
    model.eval()
    parameters, modules = dict(model.named_parameters()), list(model.modules())
    calls = []
    model.stem.register_forward_hook(lambda module, args, out: calls.append(out))
    model.hidden.weight.register_hook(calls.append)
    model.fc.requires_grad_(False)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    convert(model, "sphere", skip=())
    assert list(model.modules()) == modules
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert not model.fc.weight.requires_grad
    before = copy.deepcopy(model.state_dict())
    first = model(x).square().sum()
    first.backward()
    assert len(calls) == 2
    torch.testing.assert_close(calls[0], model.stem(x))
    optimiser.step()
    changed = [name for name, value in model.named_parameters() if not torch.equal(value, before[name])]
    assert changed == [name for name in parameters if name != "fc.weight"]
    assert model(x).square().sum() < first


def test_states_of_the_ordinary_model_load():
    model, x = build("images")
    other, _ = build("images")
    convert(model, "tanh", angular="sigmoid", learn_k="layer", skip=())
    model.load_state_dict(other.state_dict())
    for name, value in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    again, _ = build("images")
    convert(again, "tanh", angular="sigmoid", learn_k="layer", skip=())
    model(x)
    model.stem.set_radius(1.7)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(x), model.eval()(x))


def test_shared_layers_and_tied_weights():
    model, x = build("tied")
    convert(model, "tanh", skip=())
    assert model.same is model.block
    assert model.out.weight is model.embed.weight
    assert [row.name for row in report(model).rows] == ["embed", "block", "out"]
    assert [row.name for row in report(model).converted] == ["block", "out"]
    assert report(model).left[0].note == "Embedding has no decoupled kind"
    assert len([name for name, _ in model.named_parameters() if "radius" in name]) == 2
    copied = copy.deepcopy(model)
    assert copied.out.weight is copied.embed.weight
    assert copied.same is copied.block
    torch.testing.assert_close(copied.eval()(x), model.eval()(x))
    revert(model)
    for pattern, expected in (("same", ["block"]), ("block", ["block"])):  # either name will do
        assert decoupled(convert(revert(model), include=pattern)) == expected
    with pytest.raises(ArgumentError):
        convert(revert(model), exclude="same")
    with torch.no_grad():
        fold(convert(revert(model), "sphere", skip=()))
    assert model.out.weight is not model.embed.weight  # the embedding keeps its norms
    assert (model.embed.weight.norm(dim=1) - 1).abs().max() > 0.1


@pytest.mark.parametrize("k_param", ["abs", "project"])
def test_one_steepness_for_the_network(k_param):
    model, x = build("images")
    count = sum(p.numel() for p in model.parameters())
    convert(model, "sphere", angular="sigmoid", learn_k="network", k_param=k_param)
    layers = [m for m in model.modules() if isinstance(m, Decoupled)]
    assert len({id(layer.k_raw) for layer in layers}) == 1
    assert sum(p.numel() for p in model.parameters()) == count + 1
    assert report(model).added == 1
    assert len({value.data_ptr() for name, value in model.state_dict().items() if name.endswith("k_raw")}) == 1
    layers[2].set_k(0.8)
    assert all(layer.k.item() == pytest.approx(0.8) for layer in layers)
    grads = []
    for layer in layers:  # the gradient is the sum over layers
        others = [other for other in layers if other is not layer]
        kept = layer.k_raw
        for other in others:
            other.k_raw = nn.Parameter(kept.detach().clone())
        grads.append(torch.autograd.grad(model(x).sum(), kept)[0])
        for other in others:
            other.k_raw = kept
    torch.testing.assert_close(torch.autograd.grad(model(x).sum(), layers[0].k_raw)[0], sum(grads))
    other, _ = build("images")
    convert(other, "sphere", angular="sigmoid", learn_k="network", k_param=k_param)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.eval()(x), model.eval()(x))
    copied = copy.deepcopy(model).float()
    assert len({id(m.k_raw) for m in copied.modules() if isinstance(m, Decoupled)}) == 1


def test_one_steepness_needs_one_device():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ArgumentError, match="learn_k"):
        convert(model, angular="sigmoid", learn_k="network", skip=())
    assert not decoupled(model)


def test_another_operator():
    model, x = build("images")
    convert(model, "tanh", angular="sigmoid", learn_k="filter")
    model(x)
    model.stem.set_radius(3.0)
    state = convert(build("images")[0], "seg").state_dict()
    convert(model, "seg")
    assert {key for key in model.state_dict() if "raw" in key or "patch" in key} == {
        key for key in state if "raw" in key or "patch" in key
    }
    assert model.stem.radius.eq(1).all()
    assert not model.stem.patch_norm_seen
    convert(model, "log", include="body.*")
    operators = {row.name: row.operator for row in report(model).rows}
    assert operators == {
        **dict.fromkeys(("stem", "up", "hidden"), "seg"),
        **dict.fromkeys(("body.0", "body.2"), "log"),
        **dict.fromkeys(("shortcut", "fc"), None),
    }
    preset = nn.Sequential(hs.nn.SphereConv2d(2, 3, 1), nn.Flatten(), nn.Linear(3, 2))
    assert report(convert(preset, "ball")).rows[0].operator == "ball"


def test_projection_at_conversion():
    model, x = build("images")
    before = copy.deepcopy(convert(copy.deepcopy(model), eps=0.0).eval())(x)
    convert(model, project=True, eps=0.0)
    for name, layer in model.named_modules():
        if isinstance(layer, Decoupled):
            ones = torch.ones(len(layer.kernel_norms()), dtype=torch.float64)
            torch.testing.assert_close(layer.kernel_norms(), ones, msg=name)
    assert (model.fc.weight.norm(dim=1) - 1).abs().max() > 0.01
    torch.testing.assert_close(model.eval()(x), before, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_types(dtype):
    model, x = build("images", dtype)
    convert(model, "tanh", angular="sigmoid", learn_k="filter")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert model.stem.weight.dtype == dtype
    assert {model.stem.radius_raw.dtype, model.stem.k_raw.dtype, model.stem.patch_norm_mean.dtype} == {wide}
    model(x).sum().backward()
    assert model.stem.radius_raw.grad.dtype == wide
    assert model.stem.weight.grad.dtype == dtype
    assert fold(model)(x).dtype == dtype


def test_on_the_meta_device():
    with torch.device("meta"):
        model = Images()
    convert(model, "tanh", angular="sigmoid", learn_k="network")
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert model(torch.randn(2, 3, 6, 6, device="meta")).shape == (2, 5)
    assert revert(model)(torch.randn(2, 3, 6, 6, device="meta")).shape == (2, 5)


@by_model
def test_copies_and_files(kind):
    model, x = build(kind)
    convert(model, "tanh", angular="sigmoid", learn_k="network")
    model(x)
    model.eval()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        same_state(other.state_dict(), model.state_dict())
        assert torch.equal(other(x), model(x))
        assert report(other) == report(model)
        assert not decoupled(revert(other))
    assert decoupled(model)


# Parametrised weights.

PARAMETRISED = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.parametrize("kind", PARAMETRISED)
def test_parametrised_layers(kind):
    make = PARAMETRISED[kind]
    model = nn.Sequential(make(nn.Conv2d(2, 4, 3)), nn.Flatten(), make(nn.Linear(16, 6)), nn.Linear(6, 3)).double()
    x = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    state = copy.deepcopy(model.state_dict())
    convert(model, "sphere", skip="last")
    same_state(model.state_dict(), state)  # no step of the power iteration either
    assert decoupled(model) == ["0", "2"]
    out = model.train()(x)
    y = cosines(x, model.eval()[0].weight).view(3, 4, 2, 2) + model[0].bias.view(-1, 1, 1)
    expected = model[2].weight @ y.flatten(1).T
    scales = [(t.square().sum(1) + 1e-4).sqrt() for t in (model[2].weight, y.flatten(1))]
    expected = expected.T / scales[0] / scales[1][:, None] + model[2].bias
    torch.testing.assert_close(model(x), model[3](expected), atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(out, model(x), atol=0.3, rtol=0.3)
    for parameter, grad in zip(
        model.parameters(), torch.autograd.grad(model(x).square().sum(), list(model.parameters())), strict=True
    ):
        assert grad.shape == parameter.shape
    other = copy.deepcopy(model)
    assert torch.equal(other(x), model(x))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))
    other.load_state_dict(state)
    before = model(x)
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is hs.nn.DecoupledConv2d
    assert isinstance(model[0].weight, nn.Parameter)
    torch.testing.assert_close(model(x), before, atol=1e-12, rtol=1e-9)
    fold(model)
    assert not parametrize.is_parametrized(model[2])
    torch.testing.assert_close(model(x), before, atol=1e-12, rtol=1e-9)
    revert(other)
    assert parametrize.is_parametrized(other[0], "weight")
    assert isinstance(other[0], nn.Conv2d)
    same_state(other.state_dict(), state)


class Hyper(nn.Module):
    """A parametrisation with a linear layer of its own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, weight):
        return self.inner(weight)


def test_layers_inside_of_parametrisations_are_no_layers_of_the_model():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    parametrize.register_parametrization(model[0], "weight", Hyper())
    convert(model, skip=())
    assert decoupled(model) == ["0", "1"]
    assert [row.shape for row in report(model).rows] == [(4, 3), (2, 4)]


def test_one_step_of_the_power_iteration_a_call():
    torch.manual_seed(1)
    layers = []
    for _ in range(2):
        torch.manual_seed(1)
        layers.append(parametrizations.spectral_norm(nn.Linear(5, 4)))
    convert(layers[0], "sphere")
    x = torch.randn(2, 5)
    for _ in range(2):
        for layer in layers:
            layer(x)
        same_state(layers[0].state_dict(), layers[1].state_dict())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_that_hooks_compute():
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    convert(model)
    w = model[0].weight_v
    torch.testing.assert_close(
        model[0](x), F.linear(x / (x.square().sum(1, keepdim=True) + 1e-4).sqrt(), w / w.norm(dim=1)[:, None], None)
        + model[0].bias, atol=1e-3, rtol=1e-3
    )  # fmt: skip
    for change in (fold, hs.nn.project_weights):
        with pytest.raises(ArgumentError, match="hook"):
            change(model)


# The table.


def test_report():
    model, _ = build("images")
    assert [row.operator for row in report(model).rows] == [None] * 7
    assert {row.note for row in report(model).rows} == {""}
    convert(model, "tanh", weighting="joint", angular="sigmoid", learn_k="filter", exclude="up")
    found = report(model)
    rows = {row.name: row for row in found.rows}
    assert list(rows) == list(ALL)
    assert rows["stem"] == hs.nn.Row(
        "stem", "Conv2d", (8, 3, 3, 3), "tanh", "sigmoid", 16, "weighting=joint, k learned by filter"
    )
    assert rows["up"] == hs.nn.Row("up", "ConvTranspose2d", (6, 2, 4, 4), None, None, 0, "in exclude")
    added = sum(p.numel() for name, p in model.named_parameters() if name.endswith("_raw"))
    assert found.added == added == 2 * (8 + 8 + 6 + 9)
    lines = str(found).splitlines()
    assert len(lines) == 9
    assert repr(found) == str(found)
    assert lines[0].split() == ["name", "role", "kind", "weight", "operator", "angular", "added", "note"]
    assert lines[1].split(maxsplit=7)[:7] == ["stem", "hidden", "Conv2d", "8x3x3x3", "tanh", "sigmoid", "16"]
    assert lines[-1] == "4 of 7 layers decoupled, 62 parameters added"
    convert(model, "tanh", learn_radius=False, include="stem")
    assert report(model).rows[0].added == 0
    assert "folded" in str(report(fold(model)))
    assert str(report(nn.ReLU())).endswith("0 of 0 layers decoupled, 0 parameters added")


# Inference.


@by_spread
@by_model
def test_folding(kind, name, options):
    model, x = build(kind)
    convert(model, name, skip=(), **options)
    for module in model.modules():
        if isinstance(module, Decoupled):
            if module.radius_raw is not None:
                module.set_radius(torch.linspace(0.3, 2, module._kernels()))
            if module.k_raw is not None:
                module.set_k(torch.linspace(0.2, 0.9, len(module.k_raw)))
    model(3 * x if x.is_floating_point() else x)
    model.eval()
    before = model(x)
    layers = [m for m in model.modules() if isinstance(m, Decoupled)]
    assert fold(model) is model
    torch.testing.assert_close(model(x), before, atol=1e-12, rtol=1e-9)
    assert not model.training
    plain = name == "linear" and options.get("angular", "cosine") == "cosine"
    for layer in layers:
        assert isinstance(layer, Decoupled) is not plain
        assert not layer.weight.requires_grad
        if plain:
            assert type(layer).__module__.startswith("torch.nn")
        else:
            norms = layer.kernel_norms()
            torch.testing.assert_close(norms, torch.ones_like(norms), atol=1e-2, rtol=0)
            assert layer.folded
    assert not [key for key in model.state_dict() if "raw" in key or "patch" in key]
    torch.testing.assert_close(fold(model)(x), before, atol=1e-12, rtol=1e-9)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(copied(x), model(x))
    if x.is_floating_point():  # attacks and saliency maps still work
        x.requires_grad_()
        assert torch.autograd.grad(model(x).square().sum(), x)[0].any()


def test_a_folded_model_says_what_it_cannot_do():
    model, x = build("images")
    state = convert(model, "sphere", skip=()).state_dict()
    state = copy.deepcopy(state)
    fold(model)
    for change in (nn.Module.train, revert):
        with pytest.raises(ArgumentError, match="fold"):
            change(model)
    with pytest.raises(RuntimeError, match="folded_norms"):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match="folded_norms"):
        convert(build("images")[0], "sphere", skip=()).load_state_dict(model.state_dict())
    with pytest.raises(ArgumentError, match="folded"):
        convert(model, "tanh")
    other = fold(convert(build("images")[0], "sphere", skip=()))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))
    assert model.eval() is model


def test_folding_before_the_first_batch():
    model, x = Images().double().eval(), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    convert(model, "ball", skip=())
    model.stem.patch_norm_mean.fill_(5.0)  # not seen yet, so it does not count
    before = model(x)
    model.train()
    assert not fold(model).training
    torch.testing.assert_close(model(x), before, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_folding_in_low_precision(dtype):
    model, x = build("images", torch.float32)
    convert(model, "tanh", angular="linear", weighting="linear")
    model(x)
    model, x = model.to(dtype).eval(), x.to(dtype)
    before = model(x)
    torch.testing.assert_close(fold(model)(x), before, atol=2e-2, rtol=2e-2)


# What is made of models afterwards.


def small():
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 3, 2, stride=2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(3 * 36, 6), nn.Tanh(), nn.Linear(6, 3))
    x = torch.randn(4, 2, 3, 3)
    convert(model, "tanh", angular="sigmoid", learn_k="network")
    model(x)
    return model, x


@pytest.mark.slow
def test_compiled():
    model, x = small()
    expected = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for mode in (True, False):
        model.train(mode)
        expected.train(mode)
        torch.testing.assert_close(compiled(x), expected(x))
    for a, b in zip(gradients(compiled, x), gradients(expected, x), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    folded = torch.compile(fold(copy.deepcopy(model)), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(folded(x), expected(x))


@pytest.mark.parametrize("folded", [False, True])
def test_exported(folded):
    model, x = small()
    model.eval()
    exported = torch.export.export(
        fold(model) if folded else model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)
    )
    torch.testing.assert_close(exported.module()(x[:3]), model(x[:3]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("folded", [False, True])
def test_onnx(tmp_path, folded):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, x = small()
    model.eval()
    if folded:
        fold(model)
    shapes = ({0: torch.export.Dim("batch")},)
    program = torch.onnx.export(model, (x,), dynamo=True, dynamic_shapes=shapes, verbose=False)
    program.save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: x[:3].numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x[:3]).detach(), atol=1e-5, rtol=1e-4)


# Models as people have them.


def own(name, **options):
    from hypersphere import models

    return models.create(name, (3, 16, 16), **options), torch.randn(2, 3, 16, 16)


def transformers_model(name, **options):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(num_labels=5, **options)
    return getattr(transformers, f"{name}ForImageClassification")(config), torch.randn(2, 3, 32, 32)


def torchvision_model(name, **options):
    return getattr(pytest.importorskip("torchvision").models, name)(num_classes=5, **options), torch.randn(2, 3, 32, 32)


def timm_model(name, **options):
    return pytest.importorskip("timm").create_model(name, num_classes=5, **options), torch.randn(2, 3, 32, 32)


TOKENS = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 2}
REAL = {
    "plain-cnn": (functools.partial(own, "plain-cnn", widths=(4, 6), dim=8), 7, 0),
    "resnet": (functools.partial(own, "resnet", widths=(4, 6), units=(1, 1), stem="3x3"), 6, 1),
    "hf-resnet": (
        functools.partial(transformers_model, "ResNet", embedding_size=4, hidden_sizes=[8, 16], depths=[1, 1]),
        10,
        2,
    ),
    "hf-convnext": (
        functools.partial(transformers_model, "ConvNext", hidden_sizes=[4, 6, 8, 10], depths=[1, 1, 1, 1]),
        17,
        0,
    ),
    "hf-vit": (functools.partial(transformers_model, "ViT", image_size=32, patch_size=8, **TOKENS), 14, 0),
    "hf-efficientnet": (
        functools.partial(
            transformers_model,
            "EfficientNet",
            image_size=32,
            hidden_dim=320,
            width_coefficient=0.25,
            depth_coefficient=0.25,
        ),
        37,
        0,
    ),
    # These two libraries are tried where they are installed.
    "torchvision-resnet": (functools.partial(torchvision_model, "resnet18"), 21, 3),
    "torchvision-vgg": (functools.partial(torchvision_model, "vgg11"), 11, 0),
    "torchvision-convnext": (functools.partial(torchvision_model, "convnext_tiny"), 59, 0),
    "torchvision-vit": (functools.partial(torchvision_model, "vit_b_32", image_size=32), 26, 0),
    "timm-resnet": (functools.partial(timm_model, "resnet18"), 21, 3),
    "timm-convnext": (functools.partial(timm_model, "convnext_atto"), 41, 0),
    "timm-vit": (functools.partial(timm_model, "vit_tiny_patch16_224", img_size=32), 50, 0),
}


def answers(model, x):
    out = model(x)
    return getattr(out, "logits", out)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", REAL)
def test_real_models(name):
    make, layers, shortcuts = REAL[name]
    model, x = make()
    model, x = model.double().eval(), x.double()
    with torch.no_grad():  # away from the zeros and ones of a fresh model
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    before, state = answers(model, x), copy.deepcopy(model.state_dict())
    points = list(model.parameters())
    grads = torch.autograd.grad(before.square().sum(), points, materialize_grads=True, allow_unused=True)
    convert(model, "linear", weighting="linear", skip=(), example=x)
    assert len(report(model).converted) == layers
    after = answers(model, x)
    torch.testing.assert_close(after, before, atol=1e-10, rtol=1e-8)
    scale = max(float(grad.abs().max()) for grad in grads)
    found = torch.autograd.grad(after.square().sum(), points, materialize_grads=True, allow_unused=True)
    for a, b in zip(found, grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10 * scale, rtol=1e-7)
    revert(model)
    assert torch.equal(answers(model, x), before)
    convert(model, "tanh", angular="sigmoid", learn_k="network")
    assert len(report(model).converted) == layers - shortcuts - any(isinstance(m, nn.Linear) for m in model.modules())
    model.load_state_dict(state)
    answers(model.train(), x).square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert all(m.radius_raw.grad.any() for m in model.modules() if isinstance(m, Decoupled))
    model.eval()
    sphere = answers(model, x)
    assert (sphere - before).abs().max() > 1e-4
    torch.testing.assert_close(answers(fold(model), x), sphere, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("model", ["resnet18", nn.Conv2d])
def test_what_is_no_model_is_named(model):
    with pytest.raises(ArgumentError, match=r"^model must be a module, got (str|type)$"):
        convert(model, "sphere")


@pytest.mark.parametrize("operator", sorted(hs.nn.operators))
@pytest.mark.parametrize("angular", ["cosine", "sqcos"])
def test_a_fusion_with_batch_normalisation_is_right_or_refused(operator, angular):
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(3, 4, 3, bias=True), nn.BatchNorm2d(4)
    nn.init.uniform_(norm.weight, -2, 2)
    nn.init.normal_(norm.running_mean)
    x = torch.randn(2, 3, 5, 5)
    layer = convert(conv, operator, angular=angular).eval()
    norm.eval()
    with pytest.raises(ArgumentError, match=r"^weight of a decoupled layer cannot be fused with batch normalisation"):
        nn.utils.fuse_conv_bn_eval(layer, norm)
    if angular == "cosine":
        torch.testing.assert_close(nn.utils.fuse_conv_bn_eval(fold(layer), norm)(x), norm(layer(x)))
    else:
        with pytest.raises(ArgumentError, match="cannot be fused"):
            nn.utils.fuse_conv_bn_eval(fold(layer), norm)


def test_a_fusion_of_linear_layers_is_refused():
    with pytest.raises(ArgumentError, match="cannot be fused"):
        nn.utils.fuse_linear_bn_eval(hs.nn.SphereLinear(3, 4).eval(), nn.BatchNorm1d(4).eval())


def test_values_for_kernels_keep_their_digits_however_they_are_given():
    layer = hs.nn.TanhLinear(3, 2).double()
    for given in ([0.1, 0.7], np.array([0.1, 0.7]), torch.tensor([0.1, 0.7], dtype=torch.float64)):
        layer.set_radius(given)
        torch.testing.assert_close(
            layer.radius, torch.tensor([0.1, 0.7], dtype=torch.float64, device="cpu"), rtol=0, atol=1e-15
        )


@pytest.mark.parametrize("change", [convert, hs.orthogonal.apply])
def test_tied_layers_are_named_with_the_reason(change):
    """A layer that is asked for by its name is not left out without a word."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.LazyLinear(4), nn.Linear(4, 2))
    model[1].weight = model[0].weight
    name = "3" if change is convert else "1"
    with pytest.raises(ArgumentError, match=rf"^include must not name {name}: "):
        change(model, include=["2", name])
    shown = str((hs.nn.report if change is convert else hs.orthogonal.check)(change(model)))
    assert ("lazy: run a batch" if change is convert else "another module shares its weight") in shown
