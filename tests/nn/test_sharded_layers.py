"""Decoupled layers of models whose parameters are sharded: as on one process, or an error."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hypersphere as hs
from helpers.worlds import worlds
from hypersphere.errors import ArgumentError
from hypersphere.nn.operators import operators

ANGULARS = ("cosine", "linear", "sigmoid", "sqcos", "relucos")
WEIGHTINGS = ("none", "linear", "joint", "separate")


def net():
    """Convolutions with groups, transposed and in one dimension, and linear layers; of as few as 2 kernels."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.Tanh(),
        nn.ConvTranspose2d(4, 2, 2),
        nn.Flatten(2),
        nn.Conv1d(2, 3, 4, stride=4),
        nn.Flatten(),
        nn.Linear(12, 5),
        nn.Linear(5, 2),
    ).double()


def shard(model, how, **options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model if how == "layers" else ():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def converted(options, how):
    """A model whose layers measure the patches of all processes."""
    model = hs.nn.convert(net(), **{"output": None, "skip": (), **options})
    for module in model.modules():
        if isinstance(module, hs.nn.Decoupled):
            module.sync_mean = True
    return shard(model, how) if how else model


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def batches(count, how):
    source = torch.Generator().manual_seed(0)
    n, rank = (dist.get_world_size(), dist.get_rank()) if how else (1, 0)
    for _ in range(count):
        x = torch.randn(12, 4, 3, 3, generator=source, dtype=torch.float64)
        y = torch.randn(12, 2, generator=source, dtype=torch.float64)
        yield x.chunk(n)[rank], y.chunk(n)[rank]


def train(model, how, steps=3, after=lambda: None):
    """Losses, gradients, parameters and statistics of some steps."""
    optimiser = torch.optim.SGD(hs.parameter_groups(model, lr=0.02, weight_decay=0.01), momentum=0.9)
    found = []
    for x, y in batches(steps, how):
        loss = (model(x) - y).square().mean()
        loss.backward()
        mean = loss.detach().clone()
        if how:
            dist.all_reduce(mean)
        found.append(mean / (dist.get_world_size() if how else 1))
        found += [whole(p.grad) for p in model.parameters()]
        optimiser.step()
        optimiser.zero_grad()
        after()
    return found + [whole(p) for p in (*model.parameters(), *model.buffers())]


def equal(n, how, function, *args):
    """What each of n processes returns is what one with the whole batch does."""
    one = function(*args, how=None)
    for found in worlds(n).run(function, *args, how=how):
        for mine, ours in zip(found, one, strict=True):
            assert (mine.double() - ours.double()).abs().max() < 1e-12
    return one


def cases():
    """Every operator with every angular function; what else there is comes with each of them in turn."""
    ways = [(n, how) for n in (1, 2, 3, 4) for how in ("layers", "whole")]
    for i, (name, angular) in enumerate(itertools.product(operators, ANGULARS)):
        options = {"operator": name, "angular": angular, "weighting": WEIGHTINGS[(i + i // 5) % 4]}
        if angular == "sigmoid":
            options["learn_k"] = ("filter", "layer")[i // 5 % 2]
        if operators.create(name).has_radius and i % 2:
            options["mean_init"] = "zero" if i % 3 == 0 else "first"
        yield options, *ways[(3 * i + i // 8) % 8]


def trained(options, *, how):
    return train(converted(options, how), how)


@pytest.mark.parametrize(("options", "n", "how"), list(cases()))
def test_operators_train_as_on_one_process(options, n, how):
    one = equal(n, how, trained, options)
    assert max(gradient.abs().max() for gradient in one[1:4]) > 1e-6


def cut_by_torch(options, *, how):
    """Linear layers whose kernels, and whose inputs, lie on several processes (tensor parallelism)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    hs.nn.convert(model, **options)
    if how:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimiser = torch.optim.SGD(hs.parameter_groups(model, lr=0.1, weight_decay=0.01), momentum=0.9)
    found, source = [], torch.Generator().manual_seed(0)
    for _ in range(3):
        loss = model(torch.randn(5, 6, generator=source, dtype=torch.float64)).square().sum()
        loss.backward()
        found += [loss.detach(), *(whole(p.grad) for p in model.parameters())]
        optimiser.step()
        optimiser.zero_grad()
    model.eval()
    hs.nn.project_weights(model, 2.0, skip_weighted=True)
    found += [model(torch.ones(1, 6, dtype=torch.float64)).detach(), model[0].kernel_norms().detach()]
    return found + [whole(tensor) for tensor in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize(
    ("options", "n"),
    [
        ({"operator": "sphere", "angular": "sqcos"}, 2),
        ({"operator": "tanh"}, 4),
        ({"operator": "seg", "mean_norm": False, "angular": "relucos"}, 2),
        ({"operator": "linear", "weighting": "joint"}, 2),
    ],
)
def test_layers_that_are_parallel_in_themselves(options, n):
    equal(n, "layers", cut_by_torch, options)


def cut_by_torch_refused(how):
    try:
        cut_by_torch({"operator": "sphere", "angular": "sigmoid", "learn_k": "filter"}, how=how)
    except ArgumentError as error:
        return str(error)


def test_angles_of_layers_that_are_parallel_in_themselves_are_refused():
    for said in worlds(2).run(cut_by_torch_refused, "layers"):
        assert said.startswith("angular must be a function of the cosine in a layer whose kernels lie on several")


def between_steps(*, how):
    """Kernels and steepnesses are projected and radii set, after an evaluation, which leaves parameters whole."""
    model = converted({"operator": "ball", "angular": "sigmoid", "learn_k": "filter", "k_param": "project"}, how)

    def after():
        with torch.no_grad():
            model(torch.ones(2, 4, 3, 3, dtype=torch.float64))
        hs.nn.project_weights(model, 2.0)

    found = train(model, how, after=after)
    model[2].set_radius(torch.tensor([1.5, 2.5]))
    model[2].set_k(0.7)
    found += train(model, how, after=after)
    hs.nn.recalibrate(model, [x for x, _ in batches(2, how)])
    found += [whole(b) for b in model.buffers()]
    return [*found, model[2].radius.detach(), model[2].k.detach(), model[2].kernel_norms().detach()]


@pytest.mark.parametrize(("n", "how"), [(3, "layers"), (2, "whole")])
def test_what_changes_layers_between_steps(n, how):
    one = equal(n, how, between_steps)
    assert (one[-1] - 2).abs().max() < 1e-12


def told(*, how):
    model = hs.nn.convert(net(), "tanh", angular="sigmoid", learn_k="layer")
    model = shard(model, how) if how else model
    groups = hs.parameter_groups(model, lr=0.1, weight_decay=0.01)
    names = {p: name for name, p in model.named_parameters()}
    return str(hs.nn.report(model)), [(g["name"], g["weight_decay"], [names[p] for p in g["params"]]) for g in groups]


@pytest.mark.parametrize("how", ["layers", "whole"])
def test_the_report_and_groups_are_those_of_one_process(how):
    assert worlds(3).run(told, how=how) == [told(how=None)] * 3


def rotated_too(*, how):
    """Orthogonal training of decoupled layers."""
    model = hs.orthogonal.apply(hs.nn.convert(net(), "linear"), start="normal", seed=1)
    return train(shard(model, how) if how else model, how)


@pytest.mark.parametrize(("n", "how"), [(2, "layers"), (3, "whole")])
def test_decoupled_layers_under_orthogonal_training(n, how):
    equal(n, how, rotated_too)


def test_a_parameter_of_the_network_is_sharded_with_the_whole():
    equal(3, "whole", trained, {"operator": "sphere", "angular": "sigmoid", "learn_k": "network"})


def cut_apart(how):
    try:
        trained({"operator": "sphere", "angular": "sigmoid", "learn_k": "network"}, how=how)
    except ArgumentError as error:
        return str(error)


def test_a_parameter_of_the_network_that_was_cut_apart_is_refused():
    said = worlds(2).run(cut_apart, "layers")
    assert said[0] == said[1]
    assert "fully_shard() with the whole model alone" in said[0]


def in_16_bits(how):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = hs.nn.convert(net().float(), "tanh", angular="sigmoid", learn_k="filter", output=None)
    shard(model, how, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    model(torch.ones(4, 4, 3, 3)).square().sum().backward()
    return [whole(p.grad) for p in model.parameters()]


@pytest.mark.parametrize("how", ["layers", "whole"])
def test_bfloat16(how):
    for gradients in worlds(2).run(in_16_bits, how):
        assert all(bool(gradient.isfinite().all()) for gradient in gradients)
        assert max(gradient.abs().max() for gradient in gradients) > 1e-3


def refused(how):
    plain, model = shard(net(), how), shard(hs.nn.convert(net(), "tanh"), how)
    said = []
    for act in (
        lambda: hs.nn.convert(plain, "tanh"),
        lambda: hs.nn.convert(model, "sphere"),
        lambda: hs.nn.revert(model),
        lambda: hs.nn.fold(model),
        lambda: hs.nn.init_from(model, net()),
        lambda: model[0].set_operator("ball"),
        model[0].release,
    ):
        try:
            act()
        except ArgumentError as error:
            said.append(str(error))
    for whole_one in (plain, model):
        whole_one(torch.ones(2, 4, 3, 3, dtype=torch.float64)).sum().backward()
    return said


@pytest.mark.parametrize("how", ["layers", "whole"])
def test_what_would_change_the_layers_is_refused(how):
    first, second = worlds(2).run(refused, how)
    assert first == second
    assert len(first) == 7
    assert all(text.startswith("model must not be sharded, got one that processes hold together: ") for text in first)
    assert ["full_state_dict" in text for text in first] == [False, False, True, True, False, False, True]
