"""Orthogonal training and fine-tuning of models whose parameters are sharded: as on one process, or an error."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hypersphere as hs
from helpers.worlds import worlds
from hypersphere.errors import ArgumentError

EVERY_MAP = {
    "cayley": {},
    "cayley newton": {"method": "newton"},
    "cayley neumann": {"method": "neumann"},
    "gram_schmidt": {},
    "gram_schmidt newton": {"method": "newton"},
    "householder": {},
    "householder newton": {"form": "newton"},
    "householder product": {"form": "product"},
    "loewdin": {},
    "loewdin newton-schulz": {"method": "newton-schulz", "steps": 16},
    "exponential": {},
    "givens": {},
    "unconstrained": {},
    "direct": {},
    "spd": {},
    "masked": {"structure": "banded"},
}


def net(dtype=torch.float64):
    """Convolutions with groups and without, linear layers; of 4, 3 and 2 outputs, fewer than there are processes."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Flatten(),
        nn.Linear(4, 4),
        nn.Tanh(),
        nn.Linear(4, 3),
        nn.Tanh(),
        nn.Linear(3, 2),
    ).to(dtype)


def shard(model, how, **options):
    """``fully_shard`` of the model, and of each layer before where that is asked for."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    n = dist.get_world_size()
    two = how == "two by two"
    mesh = init_device_mesh("cpu", (2, n // 2) if two else (n,), mesh_dim_names=("copies", "parts") if two else None)
    for layer in model if how != "whole" else ():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    return model if how == "layers alone" else fully_shard(model, mesh=mesh, **options)


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def place(how):
    """Number and rank of this process among those that share a batch."""
    return (dist.get_world_size(), dist.get_rank()) if how else (1, 0)


def batches(dtype, count, how):
    """The samples and targets of this process; those of one process are all."""
    source = torch.Generator().manual_seed(0)
    n, rank = place(how)
    for _ in range(count):
        x = torch.randn(12, 4, 3, 3, generator=source, dtype=torch.float64).to(dtype)
        y = torch.randn(12, 2, generator=source, dtype=torch.float64).to(dtype)
        yield x.chunk(n)[rank], y.chunk(n)[rank]


def optimiser_of(model, **rates):
    groups = hs.parameter_groups(model, **{"lr": 0.1, "rotation_lr": 0.3, "weight_decay": 0.01, **rates})
    if any("orthogonal" in group for group in groups):
        return hs.optim.OGD(groups, cap=0.3)
    return torch.optim.SGD(groups, momentum=0.9)


def train(model, how, *, steps=3, optimiser=None, after=lambda: None, penalty=lambda model: 0.0, run=None):
    """Losses, gradients and parameters of some steps."""
    found = []
    optimiser = optimiser or optimiser_of(model)
    dtype = next(p.dtype for p in model.parameters())
    for x, y in batches(dtype, steps, how):
        loss = ((run or model)(x) - y).square().mean() + penalty(model)
        loss.backward()
        mean = loss.detach().clone()
        if how:
            dist.all_reduce(mean)
        found.append(mean / place(how)[0])
        found += [whole(p.grad) for p in model.parameters() if p.requires_grad]
        optimiser.step()
        optimiser.zero_grad()
        after()
    return found + [whole(p) for p in model.parameters()]


def differences(many, one):
    return max(
        (mine.double() - ours.double()).abs().max().item()
        for found in many
        for mine, ours in zip(found, one, strict=True)
        if ours.numel()
    )


def equal(n, how, function, *args, within=1e-12):
    """What each of n processes returns is what one with the whole batch does."""
    many = worlds(n).run(function, *args, how=how)
    one = function(*args, how=None)
    assert differences(many, one) < within
    return many, one


def sizes(*cases):
    """Cases by number of processes and what is sharded, so that all of these come with all of those."""
    ways = [(n, how) for n in (3, 2, 4, 1) for how in ("layers", "whole")]
    return [(case, *ways[i % len(ways)]) for i, case in enumerate(cases)]


# ------------------------------------------------------------------------------------------------------ training


def trained_with(name, options, dtype=torch.float64, *, how, **more):
    start = "identity" if name == "direct" else "normal"
    model = hs.orthogonal.apply(net(dtype), name.split()[0], start=start, seed=1, **options, **more)
    return train(shard(model, how) if how else model, how)


@pytest.mark.parametrize(("name", "n", "how"), sizes(*EVERY_MAP) + [("cayley", n, "layers") for n in (1, 2, 4)])
def test_every_map_trains_as_on_one_process(name, n, how):
    many, one = equal(n, how, trained_with, name, EVERY_MAP[name])
    assert len(many) == n
    assert max(gradient.abs().max() for gradient in one[1:4]) > 1e-4


def test_every_map_is_among_them():
    assert {hs.orthogonal.create(name.split()[0]).name for name in EVERY_MAP} == set(hs.orthogonal.maps)


@pytest.mark.parametrize(("name", "n", "how"), sizes("cayley newton", "gram_schmidt", "direct"))
def test_float32(name, n, how):
    equal(n, how, trained_with, name, EVERY_MAP[name], torch.float32, within=1e-5)


SHAPES = {
    "blocks": {"blocks": 2},
    "shared blocks": {"blocks": 2, "share_blocks": True},
    "neurons are learned": {"learn_neurons": True},
    "both sides": {"sides": "both"},
    "neurons are drawn": {"init": "normal", "unit_norm": True, "refine": 2},
}


@pytest.mark.parametrize(("shape", "n", "how"), sizes(*SHAPES))
def test_every_shape_of_rotations_trains_as_on_one_process(shape, n, how):
    more = SHAPES[shape]
    equal(n, how, partial(trained_with, **more), "cayley", {})


# ------------------------------------------------------------------------------------- between steps and outside


def drawn_anew(options, *, how):
    """S-OPT: new coordinates every other step, after an evaluation, which leaves parameters of the model whole."""
    make = hs.orthogonal.poet if "block" in options else hs.orthogonal.apply
    model = make(net(), seed=1, **options)
    model = shard(model, how) if how else model
    optimiser = optimiser_of(model)
    resampling = hs.orthogonal.Resampling(model, 2, optimiser, seed=5)

    def after():
        with torch.no_grad():
            model(torch.ones(2, 4, 3, 3, dtype=torch.float64))
        resampling()

    found = train(model, how, steps=5, optimiser=optimiser, after=after)
    return found + [whole(b).double() for name, b in model.named_buffers() if not name.endswith("back")]


@pytest.mark.parametrize(
    ("options", "n", "how"),
    sizes(
        {"sample": 0.5},
        {"sample": 0.5, "sampling": "partition"},
        {"sample": 0.5, "sampling": "blocks", "map": "cayley", "method": "newton"},
        {"block": 2},
    ),
)
def test_sampled_coordinates(options, n, how):
    equal(n, how, drawn_anew, options)


def brought_back(name, *, how):
    """Retraction, a new base and a report, each of which reads or writes parameters outside of a forward pass."""
    options = EVERY_MAP[name]
    model = hs.orthogonal.apply(net(), name.split()[0], start="normal", seed=1, **options)
    model = shard(model, how) if how else model
    optimiser = optimiser_of(model, rotation_lr=0.02)

    def after():
        with torch.no_grad():
            model(torch.ones(2, 4, 3, 3, dtype=torch.float64))
        hs.orthogonal.retract(model, 0.0)

    found = train(model, how, optimiser=optimiser, after=after)
    rows = [hs.orthogonal.check(model).rows]
    hs.orthogonal.rebase(model, optimiser)
    found += train(model, how, optimiser=optimiser)
    rows += [hs.orthogonal.check(model).rows]
    numbers = [[row.moved, row.error, row.gram] for part in rows for row in part]
    words = [(row.name, row.map, row.d, row.n, row.matrices, row.free, row.role) for part in rows for row in part]
    return [*found, torch.tensor(numbers, dtype=torch.float64)], words


def brought_back_numbers(name, *, how):
    return brought_back(name, how=how)[0]


@pytest.mark.parametrize(("name", "n", "how"), sizes("gram_schmidt newton", "cayley newton", "loewdin"))
def test_retraction_rebase_and_check(name, n, how):
    many, one = worlds(n).run(brought_back, name, how=how), brought_back(name, how=None)
    assert differences([found[0] for found in many], one[0]) < 1e-12
    assert all(found[1] == one[1] for found in many)


def penalised(*, how, squared):
    model = hs.orthogonal.apply(net(), "unconstrained", start="normal", seed=1)
    model = shard(model, how) if how else model
    return train(model, how, penalty=lambda model: 1e-3 * hs.orthogonal.penalty(model, squared=squared))


@pytest.mark.parametrize(("squared", "n", "how"), [(True, 3, "layers"), (False, 2, "whole")])
def test_a_penalty_is_counted_once(squared, n, how):
    equal(n, how, partial(penalised, squared=squared))


def cached_passes(*, how):
    """Two backward passes of each process, with matrices that are computed once."""
    model = hs.orthogonal.apply(net(), start="normal", seed=1)
    model = shard(model, how) if how else model
    losses = []
    with hs.orthogonal.cached(model):
        for x, y in batches(torch.float64, 2, how):
            (model(x) - y).square().mean().backward()
    gradients = [whole(p.grad) for p in model.parameters()]
    with torch.no_grad(), hs.orthogonal.cached(model):
        for x, y in batches(torch.float64, 2, None):
            losses.append((model(x) - y).square().mean())
    return losses + gradients


@pytest.mark.parametrize(("n", "how"), [(3, "layers"), (2, "whole")])
def test_cached_matrices(n, how):
    equal(n, how, cached_passes)


def passes_without_resharding(*, how):
    """A pass before each one that is trained: parameters of the layers that it goes through are whole at the second."""
    model = hs.orthogonal.apply(net(), start="normal", seed=1)
    model = shard(model, how, reshard_after_forward=False) if how else model
    inner = model[0] if how == "layers alone" else model

    def run(x):
        with torch.no_grad():
            inner(x)
        return model(x)

    return train(model, how, run=run)


@pytest.mark.parametrize(("n", "how"), [(3, "layers"), (3, "layers alone"), (2, "whole")])
def test_layers_that_stay_whole_between_two_passes(n, how):
    equal(n, how, passes_without_resharding)


def recomputed(method, *, how):
    """Activations that are computed again in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    model = net()
    if method == "rotations":
        hs.orthogonal.apply(model, "cayley", method="newton", start="normal", seed=1)
    else:
        adapted(model, ADAPTERS[method])
    model = shard(model, how) if how else model
    if how == "whole":
        return train(model, how, run=lambda x: checkpoint(model, x, use_reentrant=False))
    for layer in model:
        forward = layer.forward
        layer.forward = partial(checkpoint, forward, use_reentrant=False)
    return train(model, how)


@pytest.mark.parametrize(
    ("method", "n", "how"), [("rotations", 3, "layers"), ("rotations", 2, "whole"), ("oft", 2, "layers")]
)
def test_recomputed_activations(method, n, how):
    equal(n, how, recomputed, method)


def attention(*, how):
    """Queries, keys and values with a rotation each, and a projection whose weight another module reads."""
    torch.manual_seed(3)
    encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Flatten(1, 2), encoder, nn.Flatten(), nn.Linear(36, 2)).double()
    hs.orthogonal.apply(model, output=None, start="normal", seed=1)
    return train(shard(model, how) if how else model, how, run=lambda x: model(x.transpose(1, 3)))


@pytest.mark.parametrize(("n", "how"), [(3, "layers"), (2, "whole")])
def test_attention(n, how):
    equal(n, how, attention)


def test_replicas_of_shards():
    equal(4, "two by two", drawn_anew, {"sample": 0.5})
    equal(4, "two by two", brought_back_numbers, "gram_schmidt newton")
    equal(4, "two by two", cached_passes)
    equal(4, "two by two", switched)
    equal(4, "two by two", orthogonal_steps, {"momentum": 0.9})


def in_16_bits(method, *, how):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = net(torch.float32)
    if method == "rotations":
        hs.orthogonal.apply(model, "cayley", method="newton", start="normal", seed=1)
    elif method == "both sides":
        hs.orthogonal.poet(model, block=2, seed=1)
    else:
        adapted(model, ADAPTERS[method])
    if how:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = shard(model, how, mp_policy=policy)
    return train(model, how, optimiser=optimiser_of(model, lr=0.05, rotation_lr=0.05))


@pytest.mark.parametrize(
    ("method", "n", "how"), sizes("rotations", "both sides", "oft", "by inputs", "boft with scales")
)
def test_bfloat16(method, n, how):
    many, one = worlds(n).run(in_16_bits, method, how=how), in_16_bits(method, how=None)
    assert all(bool(tensor.isfinite().all()) for found in many for tensor in found)
    assert differences(many, one) < 0.1  # losses and gradients are about 1


def held_together(axis, adapter, *, how):
    """What is learned as ``DTensor``s of any placement without ``fully_shard``; every process has the whole batch."""
    model = adapted(net(), ADAPTERS["boft with scales"]) if adapter else hs.orthogonal.apply(net(), blocks=2)
    if how:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if name in ("free", "log_scale"):
                    placed = Replicate() if axis is None else Shard(axis % parameter.dim())
                    setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placed])))
    optimiser = optimiser_of(model, weight_decay=0.0)
    found = []
    for x, y in batches(torch.float64, 3, None):
        loss = (model(x) - y).square().mean()
        loss.backward()
        found += [loss.detach(), *(whole(p.grad) for p in model.parameters() if p.requires_grad)]
        optimiser.step()
        optimiser.zero_grad()
        hs.orthogonal.retract(model)
    return found + [whole(p) for p in model.parameters()]


@pytest.mark.parametrize(("axis", "adapter", "n"), [(0, False, 3), (1, False, 2), (None, False, 2), (0, True, 4)])
def test_parameters_of_any_placement(axis, adapter, n):
    equal(n, "by hand", held_together, axis, adapter)


# ------------------------------------------------------------------------------------------------------ adapters

ADAPTERS = {
    "oft": {"block_size": 2},
    "shared blocks": {"block_size": 2, "share_blocks": True},
    "series": {"blocks": 2, "cayley": "neumann", "terms": 4},
    "bound": {"block_size": 2, "coft": True, "eps": 0.05},
    "boft": {
        "method": "boft",
        "block_size": 2,
        "butterfly": 2,
        "include": ["0", "4", "6"],
        "types": ("conv2d", "linear"),
    },
    "boft with scales": {"method": "boft", "block_size": 2, "butterfly": 2, "include": ["4", "6"], "rescale": True},
    "by inputs": {"block_size": 2, "input_centric": True, "rescale": True, "bias": "all"},
    "a head": {"block_size": 2, "train": "8", "bias": "adapter"},
}


def adapted(model, options, **more):
    """The model with an adapter of random blocks."""
    targets = {} if "include" in options else {"targets": ["0", "2", "4", "6"]}
    hs.orthogonal.adapt(model, **targets, **options, **more)
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".adapters." in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=source, dtype=torch.float64))
    return model


def adapter_trained(kind, *, how):
    model = adapted(net(), ADAPTERS[kind])
    model = shard(model, how) if how else model
    optimiser = optimiser_of(model)
    return train(model, how, optimiser=optimiser, after=lambda: hs.orthogonal.constrain(model))


@pytest.mark.parametrize(("kind", "n", "how"), [*sizes(*ADAPTERS), ("a head", 4, "layers")])
def test_every_adapter_trains_as_on_one_process(kind, n, how):
    _, one = equal(n, how, adapter_trained, kind)
    assert max(gradient.abs().max() for gradient in one[1:4]) > 1e-4


def switched(*, how):
    """Two adapters, one with a head of its own, while others work, and merged."""
    model = adapted(net(), ADAPTERS["a head"], name="first")
    adapted(model, ADAPTERS["by inputs"], name="second")
    model = shard(model, how) if how else model
    x = next(batches(torch.float64, 1, None))[0]
    found = []

    def look():
        with torch.no_grad():
            found.append(model(x))

    for name in ("first", "second", None, "first"):
        hs.orthogonal.use(model, name)
        look()
        if name:
            found.extend(train(model, how, steps=1, optimiser=optimiser_of(model)))
            with hs.orthogonal.disabled(model):
                look()
    before = [whole(p) for p in model.parameters()]
    hs.orthogonal.merge_adapter(model)
    found += [whole(p) for p in model.parameters()]
    look()
    hs.orthogonal.unmerge_adapter(model)
    look()
    assert all(torch.equal(whole(p), b) for p, b in zip(model.parameters(), before, strict=True))
    found.append(torch.tensor([[row.moved, row.error] for row in hs.orthogonal.check(model).rows]))
    return found + [value for name in ("first", "second") for value in state_of(model, name)]


def state_of(model, name):
    return list(hs.orthogonal.adapter_state_dict(model, name)[0].values())


@pytest.mark.parametrize(("n", "how"), [(3, "layers"), (2, "whole"), (4, "layers")])
def test_adapters_that_change_places(n, how):
    equal(n, how, switched)


def written(folder, *, how):
    model = adapted(net(), ADAPTERS["a head"])
    model = shard(model, how) if how else model
    found = train(model, how)
    hs.orthogonal.save_adapter(model, folder / "a.safetensors")
    read = hs.orthogonal.load_adapter_file(net(), folder / "a.safetensors")  # by all, so it has to be there
    hs.orthogonal.drop(hs.orthogonal.adapt(read, targets="4", name="other"), "other")
    linear = shard(hs.orthogonal.adapt(net(), targets="4"), how) if how else hs.orthogonal.adapt(net(), targets="4")
    hs.orthogonal.to_peft(linear, folder / "peft")
    other = hs.orthogonal.from_peft(net(), folder / "peft")
    return found + [whole(p) for p in other.parameters()] + state_of(read, "default")


@pytest.mark.parametrize(("n", "how"), [(3, "layers"), (2, "whole")])
def test_files_of_adapters(tmp_path, n, how):
    pytest.importorskip("safetensors")
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    many = worlds(n).run(written, tmp_path / "many", how=how)
    one = written(tmp_path / "one", how=None)
    assert differences(many, one) < 1e-12


def failed_write(folder, *, how):
    model = shard(adapted(net(), ADAPTERS["oft"]), how)
    try:
        hs.orthogonal.save_adapter(model, folder / "missing" / "a.safetensors")
    except Exception:  # noqa: BLE001 (of whatever library)
        return "raised"
    return "went on"


def test_a_file_that_cannot_be_written_hangs_nobody(tmp_path):
    pytest.importorskip("safetensors")
    assert worlds(2).run(failed_write, tmp_path, how="layers") == ["raised", "went on"]


# ---------------------------------------------------------------------------------------------- states, refusals


def resumed(method, *, how):
    """A whole state of a sharded model, taken into another one and into one on a single process, and merged there."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )

    def build():
        if method == "rotations":
            return hs.orthogonal.apply(net(), "cayley", method="newton", start="normal", seed=1)
        return adapted(net(), ADAPTERS[method])

    model = shard(build(), how) if how else build()
    found = train(model, how)
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=options)
    again = shard(build(), how) if how else build()
    set_model_state_dict(again, dict(state), options=options)  # which puts parts in their place
    found += train(again, how)
    single = build()
    single.load_state_dict(state)
    plain = hs.orthogonal.merge(single) if method == "rotations" else hs.orthogonal.merge_adapter(single)
    x = next(batches(torch.float64, 1, None))[0]
    with torch.no_grad():
        return [*found, plain(x), model(x)]


@pytest.mark.parametrize(("method", "n", "how"), [("rotations", 3, "layers"), ("a head", 2, "layers")])
def test_states(method, n, how):
    many, _ = equal(n, how, resumed, method)
    assert all((found[-2] - found[-1]).abs().max() < 1e-12 for found in many)


def refused(how):
    """What each of these says of a sharded model, which it leaves as it is."""
    rotated = shard(hs.orthogonal.apply(net()), how)
    with_adapter = shard(adapted(net(), ADAPTERS["oft"]), how)
    plain = shard(net(), how)
    state, config = hs.orthogonal.adapter_state_dict(adapted(net(), ADAPTERS["oft"]))
    said = []
    for act in (
        lambda: hs.orthogonal.apply(plain),
        lambda: hs.orthogonal.merge(rotated),
        lambda: hs.orthogonal.adapt(plain),
        lambda: hs.orthogonal.load_adapter(plain, state, config),
        lambda: hs.orthogonal.drop(with_adapter, "default"),
        lambda: hs.orthogonal.unload(with_adapter),
    ):
        try:
            act()
        except ArgumentError as error:
            said.append(str(error))
    for model in (rotated, with_adapter, plain):
        model(torch.ones(2, 4, 3, 3, dtype=torch.float64)).sum().backward()
    return said


@pytest.mark.parametrize("how", ["layers", "whole"])
def test_what_would_change_the_layers_is_refused(how):
    first, second = worlds(2).run(refused, how)
    assert first == second
    assert len(first) == 6
    assert all(text.startswith("model must not be sharded, got one that processes hold together: ") for text in first)
    assert ["before fully_shard()" in text for text in first] == [True, False, True, True, False, False]
    assert "full_state_dict=True" in first[1]
    assert "adapter_state_dict(model)" in first[4]


# ------------------------------------------------------------------------------------- groups and orthogonal steps


def groups_of(method, *, how):
    model = net()
    if method == "rotations":
        hs.orthogonal.apply(model, include=["0", "4"], types=("conv2d", "linear"))
    elif method == "matrices":
        hs.orthogonal.apply(model, "direct")
    else:
        adapted(model, ADAPTERS[method])
    model = shard(model, how) if how else model
    with torch.no_grad():
        model(torch.ones(2, 4, 3, 3, dtype=torch.float64))  # which leaves some parameters whole
    rules = [hs.optim.Rule("*.bias", lr=2.0), hs.optim.Rule(types="linear", include="[468]", lr=0.5)]
    rules = rules if method == "rotations" else []
    groups = hs.parameter_groups(model, lr=0.1, weight_decay=0.01, rotation_lr=0.3, decay="weights", rules=rules)
    sharded = {hasattr(p, "full_tensor") for group in groups for p in group["params"]}
    names = {p: name for name, p in model.named_parameters()}
    assert sharded == {bool(how)}
    return [
        {**group, "params": [(names[p], tuple(p.shape)) for p in group["params"]], "lr": group["lr"]}
        for group in groups
    ]


@pytest.mark.parametrize(("method", "n", "how"), sizes("rotations", "matrices", "a head"))
def test_parameter_groups_are_those_of_one_process(method, n, how):
    one = groups_of(method, how=None)
    assert all(found == one for found in worlds(n).run(groups_of, method, how=how))
    assert {"rotations": "model-rotations", "matrices": "model-matrices", "a head": "model-rotations"}[method] in {
        group["name"] for group in one
    }


def orthogonal_steps(options, *, how):
    """Several matrices a parameter, fewer than there are processes in some, beside ordinary parameters."""
    model = hs.orthogonal.apply(net(), "direct", blocks=2)
    model = shard(model, how) if how else model
    groups = hs.parameter_groups(model, lr=0.1, rotation_lr=0.4, weight_decay=0.01)
    optimiser = hs.optim.OGD(groups, **options)
    found = train(model, how, steps=4, optimiser=optimiser)
    state = [whole(value) for values in optimiser.state.values() for value in values.values()]
    count = optimiser.orthogonalise() + optimiser.corrections
    with torch.no_grad():
        for group in optimiser.param_groups if "bound" in options else ():
            for p in group["params"] if group["orthogonal"] else ():
                p.mul_(1.01)
    return found + state + [torch.tensor([float(count), float(optimiser.orthogonalise())])]


@pytest.mark.filterwarnings("ignore:.*had drifted")
@pytest.mark.parametrize(
    ("options", "n", "how"),
    sizes(
        {"momentum": 0.9},
        {"form": "adam"},
        {"form": "adamw", "retraction": "exact", "cap": None},
        {"momentum": 0.9, "cap": 1.9, "bound": 1e-13, "check_every": 1},
        {"momentum": 0.5, "nesterov": True},
    ),
)
def test_orthogonal_steps(options, n, how):
    many, one = equal(n, how, orthogonal_steps, options)
    assert all(torch.equal(found[-1], one[-1]) for found in many)
    assert one[-1][0] > 0 or "bound" not in options


def cut_within(how):
    """A matrix whose rows are on several processes, and matrices that are not orthogonal on one of them alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    matrices = torch.eye(4).repeat(3, 1, 1)
    matrices[2] *= 9
    said = []
    for tensor in (torch.eye(4), matrices):
        try:
            hs.optim.OGD([nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)]))], orthogonal=True)
        except ArgumentError as error:
            said.append(str(error))
    return said


def test_matrices_that_cannot_take_orthogonal_steps_are_refused_by_all():
    first, *others = worlds(3).run(cut_within, None)
    assert all(said == first for said in others)
    assert "ignored_params" in first[0]
    assert "(4, 4)" in first[0]
    assert first[1] == "params must be orthogonal to begin with, got errors up to 80 in (3, 4, 4)"
