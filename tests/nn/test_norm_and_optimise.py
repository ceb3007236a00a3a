"""SphereNorm, projection of kernels, recalibration and initialisation from an ordinary network."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import hypersphere as hs
from helpers.decoupled_reference import chirp
from hypersphere.errors import ArgumentError
from hypersphere.models import PlainCNN
from hypersphere.nn import (
    DecoupledConv1d,
    DecoupledConv2d,
    DecoupledConv3d,
    DecoupledConvTranspose2d,
    DecoupledLinear,
    SphereNorm,
    WeightProjection,
    init_from,
    project_weights,
    recalibrate,
)
from hypersphere.nn.optimise import decoupled_layers

IMAGES = (2, 8, 8)


def images(count=6):
    return torch.randn(count, *IMAGES, dtype=torch.float64)


def network(**options):
    return PlainCNN(IMAGES, widths=(4, 6), convs_per_unit=1, dim=5, **options).double()


def close(actual, expected, atol=1e-11, rtol=1e-9):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.detach().double(), expected.detach(), atol=atol, rtol=rtol)


# SphereNorm.


def test_rescaling_by_published_numbers():
    layer = hs.nn.SphereConv2d(2, 3, 3, padding=1, eps=0.0).double()
    with torch.no_grad():
        layer.weight.copy_(chirp((3, 2, 3, 3), 0.3, 0.5))
    out = layer(chirp((1, 2, 4, 4), 0.7, 1.0))
    norm = SphereNorm(3).double()
    with torch.no_grad():
        norm.beta.copy_(torch.tensor([0.5, 1, 2], dtype=torch.float64))
        norm.gamma.copy_(torch.tensor([0.1, 0, -0.3], dtype=torch.float64))
    close(norm(out)[0, :, 1, 2], [-0.00805326980926, -0.214352234438, -0.103481927261], atol=1e-9)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (4, 3, 5, 2), (4, 3, 2, 2, 2)])
def test_rescaling_begins_as_the_identity_and_needs_no_batch(shape):
    x = torch.randn(shape, dtype=torch.float64)
    for norm in (SphereNorm(3), SphereNorm(3, rescale=False), SphereNorm(3, learn=False)):
        norm.double()
        assert torch.equal(norm.train()(x), x)
        assert torch.equal(norm.eval()(x), x)
    norm = SphereNorm(3, beta=2.0, gamma=-1.0).double()
    close(norm.train()(x), 2 * x - 1)
    assert torch.equal(norm.eval()(x), norm.train()(x))
    assert torch.equal(norm(x[1:2]), norm(x)[1:2])


@pytest.mark.parametrize(
    ("shape", "kind"), [((4, 3), nn.BatchNorm1d), ((4, 3, 5, 2), nn.BatchNorm2d), ((4, 3, 2, 2, 2), nn.BatchNorm3d)]
)
@pytest.mark.parametrize("rescale", [True, False])
def test_with_batch_normalisation_it_is_that(shape, kind, rescale):
    norm = SphereNorm(3, rescale, batch_norm=True, eps=1e-3, momentum=0.2).double()
    ordinary = kind(3, eps=1e-3, momentum=0.2, affine=rescale).double()
    if rescale:
        with torch.no_grad():
            for ours, theirs in ((norm.beta, ordinary.weight), (norm.gamma, ordinary.bias)):
                ours.copy_(torch.randn(3))
                theirs.copy_(ours)
    for _ in range(3):
        x = torch.randn(shape, dtype=torch.float64)
        close(norm(x), ordinary(x))
    close(norm.eval()(x), ordinary.eval()(x))
    assert len(list(norm.parameters())) == 2 * rescale


def test_options_of_the_rescaling():
    assert [name for name, _ in SphereNorm(3).named_parameters()] == ["beta", "gamma"]
    fixed = SphereNorm(3, learn=False, beta=0.5)
    assert not list(fixed.parameters())
    assert fixed.state_dict()["beta"].tolist() == [0.5] * 3
    assert not SphereNorm(3, rescale=False).state_dict()
    assert SphereNorm(3, dtype=torch.float64, device="meta").beta.is_meta
    x = torch.randn(2, 3, 4, dtype=torch.bfloat16)
    assert SphereNorm(3)(x).dtype == torch.bfloat16
    assert "3" in repr(SphereNorm(3))
    for shape in ((2, 4, 5), (3,), (3, 5, 5)):
        with pytest.raises(ArgumentError, match=r"^input must have shape \(N, 3, \.\.\.\), got"):
            SphereNorm(3)(torch.zeros(shape))
    with pytest.raises(ArgumentError, match="channels"):
        SphereNorm(0)


@pytest.mark.parametrize(
    ("options", "parameters", "batch"),
    [
        ({"conv": "conv2d", "norm": "batchnorm2d"}, 20, True),
        ({"conv": hs.nn.SphereConv2d, "norm": "identity"}, 0, False),
        ({"conv": hs.nn.SphereConv2d, "norm": SphereNorm}, 20, False),
        ({"conv": hs.nn.SphereConv2d, "norm": "sphere-norm"}, 20, False),
        ({"conv": hs.nn.SphereConv2d, "norm": functools.partial(SphereNorm, batch_norm=True)}, 20, True),
    ],
    ids=["bn", "spherenorm", "rescaled", "by name", "with bn"],
)
def test_the_four_configurations(options, parameters, batch):
    model, x = network(**options), images()
    kernels = 4 * 2 * 9 + 6 * 4 * 9 + 5 * 6 * 4
    assert sum(p.numel() for p in model.parameters()) == kernels + parameters
    assert torch.allclose(model.train()(x), model.eval()(x)) is not batch
    assert torch.allclose(model.train()(x)[:2], model.train()(x[:2])) is not batch


# Projection.


def kernels_of(layer):
    """One kernel a row, by a loop over the kernels."""
    weight, groups = layer.weight.detach(), getattr(layer, "groups", 1)
    if not getattr(layer, "transposed", False):
        return weight.flatten(1)
    size = weight.shape[0] // groups
    return torch.stack(
        [weight[g * size : (g + 1) * size, o].flatten() for g in range(groups) for o in range(weight.shape[1])]
    )


LAYERS = {
    "linear": (lambda: DecoupledLinear(5, 4), (3, 5)),
    "conv1d": (lambda: DecoupledConv1d(4, 6, 3, groups=2), (2, 4, 5)),
    "conv2d": (lambda: DecoupledConv2d(4, 6, (3, 1), groups=2, operator="tanh"), (2, 4, 5, 5)),
    "conv3d": (lambda: DecoupledConv3d(2, 3, 2, operator="log"), (2, 2, 3, 3, 3)),
    "transposed": (lambda: DecoupledConvTranspose2d(4, 6, (3, 2), groups=2, stride=2, operator="seg"), (2, 4, 3, 3)),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("s", [1.0, 2.5])
def test_projection_of_every_layer(kind, s):
    make, shape = LAYERS[kind]
    layer, x = make().double(), torch.randn(shape, dtype=torch.float64)
    layer.set_operator(layer.operator, eps=0.0)
    before, kernels, weight = layer(x), kernels_of(layer), layer.weight
    project_weights(layer, s)
    assert layer.weight is weight
    close(kernels_of(layer), s * kernels / kernels.norm(dim=1, keepdim=True))
    close(layer(x), before)
    project_weights(layer, s)
    close(kernels_of(layer), s * kernels / kernels.norm(dim=1, keepdim=True))


def test_projection_by_published_numbers():
    layer = DecoupledLinear(3, 2).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -2, 2], [0, 0, 0]]))
    other = copy.deepcopy(layer)
    project_weights(layer)
    close(layer.weight, [[1 / 3, -2 / 3, 2 / 3], [0, 0, 0]])
    project_weights(other, eps=1e-4)
    close(other.kernel_norms(), [0.999994444491, 0], atol=1e-11)


def test_projection_of_a_model():
    model = nn.Sequential(
        nn.Linear(3, 4), hs.nn.SphereLinear(4, 5), nn.BatchNorm1d(5), hs.nn.TanhLinear(5, 6), nn.Linear(6, 2)
    )
    before = copy.deepcopy(model.state_dict())
    weight = model[1].weight
    weight.grad, version = torch.ones_like(weight), weight._version
    project_weights(model)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"1.weight", "3.weight"}
    assert weight.grad.eq(1).all()
    assert weight.requires_grad
    assert weight._version == version + 1  # written once, in place


@pytest.mark.parametrize(
    ("choice", "projected"),
    [
        ({}, "0 1 3"),
        ({"types": "conv*"}, "0 1"),
        ({"include": ["0", "3"]}, "0 3"),
        ({"exclude": lambda name, layer: name == "0"}, "1 3"),
        ({"skip": "output"}, "0 1"),
        ({"skip": ("first", "output"), "output": "1"}, "3"),
    ],
)
def test_projection_of_chosen_layers(choice, projected):
    model = nn.Sequential(
        DecoupledConv2d(2, 3, 3), DecoupledConv2d(3, 4, 3), nn.Flatten(), DecoupledLinear(64, 5), nn.ReLU()
    )
    before = {name: layer.weight.detach().clone() for name, layer in decoupled_layers(model)}
    project_weights(model, s=2.0, **choice)
    for name, layer in decoupled_layers(model):
        if name in projected.split():
            torch.testing.assert_close(layer.weight.flatten(1).norm(dim=1), torch.full((len(layer.weight),), 2.0))
        else:
            assert torch.equal(layer.weight, before[name])
    counting = nn.Sequential(DecoupledLinear(2, 3), DecoupledLinear(3, 2, weighting="linear"))
    project_weights(counting, exclude="1")  # what is left out is no error
    with pytest.raises(ArgumentError, match="types must be among"):
        project_weights(counting, types="nothing")


@pytest.mark.parametrize("weighting", ["linear", "joint", "separate"])
def test_projection_refuses_where_norms_count(weighting):
    model = nn.Sequential(hs.nn.SphereLinear(3, 4), hs.nn.TanhLinear(4, 5, weighting=weighting))
    before = copy.deepcopy(model.state_dict())
    for call in (project_weights, WeightProjection):
        with pytest.raises(ArgumentError, match=rf"1 with weighting='{weighting}'"):
            call(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    project_weights(model, skip_weighted=True)
    close(model[0].kernel_norms(), [1.0] * 4, atol=1e-6)
    assert torch.equal(model[1].weight, before["1.weight"])
    with pytest.raises(ArgumentError, match="s must"):
        project_weights(model[0], s=0.0)
    with pytest.raises(ArgumentError, match="eps"):
        project_weights(model[0], eps=-1.0)


def test_projection_refuses_a_weight_that_others_share():
    model = nn.ModuleDict({"embed": nn.Embedding(7, 3), "out": hs.nn.SphereLinear(3, 7)})
    model["out"].weight = model["embed"].weight
    with pytest.raises(ArgumentError, match="out with a weight that an ordinary module shares"):
        project_weights(model)
    before = model["embed"].weight.clone()
    project_weights(model, skip_weighted=True)
    assert torch.equal(model["embed"].weight, before)
    both = nn.Sequential(hs.nn.SphereLinear(3, 3), hs.nn.SphereLinear(3, 3))
    both[1].weight = both[0].weight
    project_weights(both, s=2.0)
    close(both[1].kernel_norms(), [2.0] * 3, atol=1e-6)


def test_projection_of_parametrised_weights():
    layer = parametrizations.weight_norm(nn.Conv2d(2, 3, 3)).double()
    hs.nn.convert(layer, eps=0.0)
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64)
    before, parameters = layer(x), list(layer.parameters())
    project_weights(layer, s=1.5)
    close(layer.kernel_norms(), [1.5] * 3)
    close(layer(x), before)
    assert all(a is b for a, b in zip(parameters, layer.parameters(), strict=True))


def test_projection_of_the_steepness():
    options = {"operator": "sphere", "angular": "sigmoid", "learn_k": "filter"}
    projected = DecoupledLinear(2, 3, k_param="project", **options)
    free = DecoupledLinear(2, 3, k_param="abs", **options)
    weighted = DecoupledLinear(2, 3, k_param="project", weighting="linear", **options)
    with torch.no_grad():
        for layer in (projected, free, weighted):
            layer.k_raw.copy_(torch.tensor([-1.0, 0.05, 0.6]))
    project_weights(nn.Sequential(projected, free, weighted), skip_weighted=True)
    for layer, first in ((projected, 0.05), (free, -1.0), (weighted, 0.05)):
        close(layer.k_raw, [first, 0.05, 0.6], atol=1e-7)


def test_projection_asks_the_device_nothing():
    """A tensor without values cannot be asked."""
    model = nn.Sequential(*(make() for make, _ in LAYERS.values()), parametrizations.weight_norm(nn.Linear(2, 2)))
    options = {"angular": "sigmoid", "learn_k": "network", "k_param": "project"}
    hs.nn.convert(model.to("meta"), skip=(), **options)
    WeightProjection(model, every=1)()
    assert all(parameter.is_meta for parameter in model.parameters())


def test_projection_every_so_often():
    model = nn.Sequential(hs.nn.SphereLinear(3, 4), nn.Linear(4, 2)).double()
    projection = WeightProjection(model, every=3, s=2.0)
    close(model[0].kernel_norms(), [2.0] * 4)
    expected = 2.0
    for step in range(1, 8):
        with torch.no_grad():
            model[0].weight.mul_(1.5)
        projection()
        expected = 2.0 if step % 3 == 0 else expected * 1.5
        close(model[0].kernel_norms(), [expected] * 4)
    projection(12)
    close(model[0].kernel_norms(), [2.0] * 4)
    assert projection.steps == 12
    with pytest.raises(ArgumentError, match="every"):
        WeightProjection(model, every=0)


def test_training_with_projection_does_not_know_the_first_scale():
    """With projection after every step and eps=0 the path of training does not depend on the initial kernel norms."""
    torch.manual_seed(3)
    model = nn.Sequential(hs.nn.SphereLinear(4, 8, eps=0.0), nn.ReLU(), nn.Linear(8, 3)).double()
    paths = []
    for scale in (0.01, 1.0, 30.0):
        torch.manual_seed(4)
        copied = copy.deepcopy(model)
        with torch.no_grad():
            copied[0].weight.mul_(scale)
        optimiser, projection = torch.optim.SGD(copied.parameters(), lr=0.1), WeightProjection(copied, every=1)
        for _ in range(5):
            optimiser.zero_grad()
            x = torch.randn(6, 4, dtype=torch.float64)
            nn.functional.cross_entropy(copied(x), torch.arange(6) % 3).backward()
            optimiser.step()
            projection()
        paths.append(copied[0].weight.detach())
    close(paths[0], paths[1])
    close(paths[2], paths[1])
    assert (paths[1] - model[0].weight / model[0].weight.norm(dim=1, keepdim=True)).abs().max() > 1e-3


# Statistics.


def drifting(batches):
    """A network whose statistics are those of other data, and batches."""
    model = network(conv=hs.nn.TanhConv2d, bn_momentum=0.3)
    model(5 * images() + 3)
    return model, [images() * (1 + n) for n in range(batches)]


@pytest.mark.parametrize("name", ["ball", "tanh", "seg"])
@pytest.mark.parametrize("weighting", ["none", "joint"])
@pytest.mark.parametrize("groups", [1, 2])
def test_share_of_patches_beyond_the_radius(name, weighting, groups):
    """By comparing every patch with every kernel."""
    options = {"groups": groups, "weighting": weighting, "operator": name, "padding": 1, "stride": 2}
    layer = hs.nn.DecoupledConv2d(4, 6, 3, **options).double()
    layer.set_radius(torch.linspace(0.7, 1.2, 6))
    layer.weight.data.normal_(std=0.2)
    model = nn.Sequential(nn.Dropout(0.5), layer, nn.ReLU(), nn.Dropout(0.5))
    x = torch.randn(5, 4, 7, 6, dtype=torch.float64)
    x[0] = 0
    layer(torch.randn_like(x))  # a mean norm to begin with
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = hs.nn.saturation(model, (x, "labels"))
    patches = nn.functional.unfold(x, 3, padding=1, stride=2).unflatten(1, (groups, -1))
    norms = (patches.square().sum(2) + 1e-4).sqrt()  # (N, groups, places)
    present = patches.square().sum(2) > 0
    wanted = []
    for kernel in range(6):
        group = kernel // (6 // groups)
        length = (layer.weight[kernel].square().sum() + 1e-4).sqrt() if weighting == "joint" else 1.0
        beyond = norms[:, group] * length > layer.radius[kernel] * layer.patch_norm_mean[group]
        wanted.append((beyond & present[:, group]).sum() / present[:, group].sum())
    assert list(found) == ["1"] and found["1"].min() < found["1"].max()
    close(found["1"], torch.stack(wanted))
    assert model.training and layer.training and "_respond" not in vars(layer)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    close(hs.nn.saturation(hs.nn.fold(model.eval()), x)["1"], found["1"])


def test_share_beyond_the_radius_of_unusual_models():
    shared = hs.nn.BallLinear(3, 3)
    twice = nn.Sequential(shared, nn.ReLU(), shared)
    assert hs.nn.saturation(twice, torch.randn(8, 3))["0"].shape == (3,)
    assert hs.nn.saturation(hs.nn.SphereLinear(3, 2), torch.randn(8, 3)) == {}
    assert hs.nn.saturation(hs.nn.TanhLinear(3, 2), torch.zeros(8, 3))[""].tolist() == [0.0, 0.0]
    with pytest.raises(ArgumentError, match="input"):
        hs.nn.saturation(shared, torch.randn(8, 4))
    assert "_respond" not in vars(shared) and shared.training


def test_recalibration_is_the_mean_over_batches():
    model, batches = drifting(3)
    state = copy.deepcopy(model.state_dict())
    convs = [m for m in model.modules() if isinstance(m, DecoupledConv2d)]
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    seen = {layer: [] for layer in (*convs, *norms)}
    hooks = [layer.register_forward_pre_hook(lambda m, args: seen[m].append(args[0].detach())) for layer in seen]
    training = copy.deepcopy(model).train()  # what batch statistics give, one batch at a time
    model.eval()
    assert recalibrate(model, batches) is model
    for hook in hooks:
        hook.remove()
    for layer in convs:
        norms_of = [(nn.functional.unfold(x, 3, padding=1).square().sum(1) + 1e-4).sqrt().mean() for x in seen[layer]]
        assert len(norms_of) == 3
        close(layer.patch_norm_mean, [sum(norms_of) / 3])
    for layer in norms:
        close(layer.running_mean, sum(x.mean((0, 2, 3)) for x in seen[layer]) / 3)
        close(layer.running_var, sum(x.var((0, 2, 3)) for x in seen[layer]) / 3)
        assert layer.momentum == 0.3
    for _, value in training.named_parameters():
        assert value.grad is None
    for name, value in model.named_parameters():
        assert torch.equal(value, state[name])
    assert not any(m.training for m in model.modules())
    assert not any(m._forward_hooks for m in model.modules())
    assert {layer.operator.mean_init for layer in convs} == {"first"}
    assert {layer.operator.mean_decay for layer in convs} == {0.999}


def test_recalibration_puts_everything_back():
    model, batches = drifting(2)
    model.train()
    model.features[1].eval()
    modes = [m.training for m in model.modules()]
    operators = [m.operator for m in model.modules() if isinstance(m, DecoupledConv2d)]
    recalibrate(model, [(x, torch.zeros(6)) for x in batches])
    assert [m.training for m in model.modules()] == modes
    assert [m.operator for m in model.modules() if isinstance(m, DecoupledConv2d)] == operators
    after = copy.deepcopy(model.state_dict())
    for wrong, error in (([], ArgumentError), ([batches[0], torch.zeros(2, 9, 8, 8).double()], Exception)):
        with pytest.raises(error):
            recalibrate(model, wrong)
        assert all(torch.equal(value, after[name]) for name, value in model.state_dict().items())
        assert [m.training for m in model.modules()] == modes
        assert not any(m._forward_hooks for m in model.modules())


class Branches(nn.Module):
    """Dropout, a branch that is not used, and a layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.twice = hs.nn.BallLinear(4, 4, mean_init="zero", mean_decay=1.0)
        self.unused = nn.Sequential(hs.nn.TanhLinear(4, 4), nn.BatchNorm1d(4))
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x=None, other=None):
        return self.norm(self.drop(self.twice(self.twice(x))))


def test_recalibration_of_unusual_models():
    model = Branches().double()
    with torch.no_grad():
        model.unused[0].patch_norm_mean.fill_(7.0)
        model.unused[0].patch_norm_seen.fill_(True)
        model.unused[1].running_mean.fill_(3.0)
    x = torch.randn(9, 4, dtype=torch.float64)
    recalibrate(model.requires_grad_(False), [{"x": x}])
    first = (x.square().sum(1) + 1e-4).sqrt().mean()
    inner = copy.deepcopy(model.twice).train()(x)
    second = (inner.square().sum(1) + 1e-4).sqrt().mean()
    close(model.twice.patch_norm_mean, [(first + second) / 2])
    inputs = copy.deepcopy(model.twice).train()(inner)  # no dropout
    close(model.norm.running_mean, inputs.mean(0))
    assert model.unused[0].patch_norm_mean == 7
    assert model.unused[1].running_mean.eq(3).all()
    assert model.drop.training
    assert (model.twice.operator.mean_init, model.twice.operator.mean_decay) == ("zero", 1.0)
    plain = nn.Linear(3, 2)
    assert recalibrate(plain, [torch.randn(2, 3)]) is plain


# From an ordinary network.


def trained():
    """An ordinary network with weights and statistics unlike those of a fresh one."""
    model = network(bn_eps=1e-12)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    for _ in range(3):
        model(images())
    return model


@pytest.mark.parametrize("s", [1.0, 3.0])
def test_batch_normalisation_makes_linear_convolutions_ordinary_ones(s):
    model, x = trained(), images()
    other = network(conv=functools.partial(hs.nn.LinearConv2d, eps=0.0), bn_eps=1e-12)
    assert init_from(other, model, s) is other
    close(other.train()(x), copy.deepcopy(model).train()(x), atol=1e-8, rtol=1e-8)
    assert (other.eval()(x) - model.eval()(x)).abs().max() > 1e-3  # statistics are those of other responses
    recalibrate(other, [x])
    close(other.eval()(x), recalibrate(model, [x]).eval()(x), atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("source", ["module", "state"])
def test_initialisation_copies_everything(source):
    model = trained()
    other = network(conv=functools.partial(hs.nn.TanhConv2d, angular="sigmoid", learn_k="filter"))
    for layer in other.features:
        if isinstance(layer, DecoupledConv2d):
            layer.set_radius(1.7)
    init_from(other, model if source == "module" else model.state_dict(), s=2.0)
    state = other.state_dict()
    for name, value in model.state_dict().items():
        if name.endswith("weight") and value.dim() == 4:
            close(state[name], 2 * value / value.flatten(1).norm(dim=1).view(-1, 1, 1, 1))
        else:
            assert torch.equal(state[name], value), name
    close(other.features[0].radius, [1.7] * 4)
    before = network()
    weighted = init_from(network(conv=functools.partial(hs.nn.TanhConv2d, weighting="linear")), before)
    assert torch.equal(weighted.features[0].weight, before.features[0].weight)  # there the norms count


def test_initialisation_needs_the_same_structure():
    with pytest.raises(ArgumentError, match=r"trained.*structure"):
        init_from(network(conv=hs.nn.SphereConv2d), PlainCNN(IMAGES, widths=(4, 8), convs_per_unit=1, dim=5))
    with pytest.raises(ArgumentError, match="s must"):
        init_from(network(conv=hs.nn.SphereConv2d), network(), s=-1.0)


def test_a_weight_that_counts_elsewhere_is_not_projected():
    free = hs.nn.SphereLinear(3, 4)
    counted = hs.nn.DecoupledLinear(3, 4, operator="linear", weighting="linear")
    counted.weight = free.weight
    model, x = nn.ModuleList([free, counted]), torch.randn(2, 3)
    before = counted(x)
    hs.nn.project_weights(model, skip_weighted=True)
    assert torch.equal(counted(x), before)
