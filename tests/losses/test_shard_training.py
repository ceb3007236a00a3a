"""Divided heads in a user's own loop: models under DDP and FSDP2, precisions, compiled, saved and loaded, growing."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recomputed

import hypersphere as hs
from helpers.worlds import worlds

B, D, C, STEPS = 12, 6, 11, 3


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def full(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def build(name, dtype):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, D)).to(dtype), hs.losses.create(name, D, C).to(dtype)


def batches(dtype):
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(B, 4, generator=generator, dtype=torch.float64).to(dtype)
        yield x, torch.randint(C, (B,), generator=generator)


def train(name, kind, dtype, optimiser, *, parts=1, autocast=False, remember=True):
    """Some steps; everything that was trained, in whole, and the losses."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model, head = build(name, dtype)
    if kind != "one":
        head.shard(mesh())
    called = model
    if kind == "ddp":
        called = DistributedDataParallel(model)
    elif kind == "fsdp":
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh())
        called = fully_shard(model, mesh=mesh())
    makers = {"sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "adamw": lambda p: torch.optim.AdamW(p, 0.01)}
    both = [makers[optimiser](model.parameters()), makers[optimiser](head.parameters())]
    world, rank = (1, 0) if kind == "one" else (world, rank)
    losses = []
    for every, targets in batches(dtype):
        own = slice(rank * B // world, (rank + 1) * B // world)
        x, labels = every[own], targets[own]
        pieces = [x, labels] if parts == 1 else None
        for opt in both:
            opt.zero_grad()
        for part in range(parts):
            some, chosen = pieces or (x[part::parts], labels[part::parts])
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                features = called(some) if remember else recomputed(called, some, use_reentrant=False)
                loss = head(features, chosen) / parts
            loss.backward()
            losses.append(loss.detach())
        clip([*model.parameters(), *head.parameters()], 0.5)
        for opt in both:
            opt.step()
    return losses, {key: full(v) for part in (model, head) for key, v in part.state_dict().items()}


def clip(parameters, most):
    """By the norm of the whole gradient, as docs/scale.md shows it."""
    norms = [full(torch.linalg.vector_norm(p.grad)) for p in parameters if p.grad is not None]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_((most / (total + 1e-6)).clamp(max=1).item())


def same(found, expected, tolerance):
    (losses, state), (expected_losses, expected_state) = found, expected
    assert torch.stack(losses).double().sub(torch.stack(expected_losses).double()).abs().max() <= tolerance
    assert state.keys() == expected_state.keys()
    for key, value in expected_state.items():
        assert (state[key].double() - value.double()).abs().max() <= tolerance, key


@pytest.mark.parametrize(
    ("size", "name", "kind", "optimiser"),
    [
        *((2, "arcface", "ddp", "sgd"), (3, "arcface", "fsdp", "sgd"), (4, "adaface", "ddp", "adamw")),
        *((2, "softmax", "fsdp", "adamw"), (3, "curricularface", "ddp", "sgd"), (4, "normface", "fsdp", "sgd")),
        *((2, "center", "ddp", "sgd"), (4, "subcenter-arcface", "ddp", "sgd"), (1, "cosface", "ddp", "adamw")),
    ],
)
def test_models_under_ddp_and_fsdp(size, name, kind, optimiser):
    (expected,) = worlds(1).run(train, name, "one", torch.float64, optimiser)
    for found in worlds(size).run(train, name, kind, torch.float64, optimiser):
        same(found, expected, 1e-11)


def test_gradients_add_up_over_parts_of_a_batch():
    """On two processes of six samples, in three parts: the parts of one process are other samples."""
    whole, parts = (worlds(2).run(train, "cosface", "ddp", torch.float64, "sgd", parts=parts) for parts in (1, 3))
    for (_, state), (_, expected) in zip(parts, whole, strict=True):
        assert all((state[key] - value).abs().max() <= 1e-11 for key, value in expected.items())


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_features_that_are_computed_again(kind):
    (expected,) = worlds(1).run(train, "arcface", "one", torch.float64, "sgd")
    for found in worlds(2).run(train, "arcface", kind, torch.float64, "sgd", remember=False):
        same(found, expected, 1e-11)


def test_autocast():
    (expected,) = worlds(1).run(train, "arcface", "one", torch.float32, "sgd", autocast=True)
    for found in worlds(3).run(train, "arcface", "ddp", torch.float32, "sgd", autocast=True):
        same(found, expected, 2e-2)


def sparse(optimiser, sharded, many):
    _, head = build("cosface", torch.float64)
    head = hs.losses.create("cosface", D, many, sample_rate=0.4, sparse=True).double()
    rank, world = (dist.get_rank(), dist.get_world_size()) if sharded else (0, 1)
    if sharded:
        head.shard(mesh())
    optimiser = getattr(hs.optim, optimiser)(head.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        x = torch.randn(4, D, generator=generator, dtype=torch.float64)
        labels = torch.randint(many, (4,), generator=generator)
        torch.manual_seed(step + 10 * rank)
        own = slice(rank * 4 // world, (rank + 1) * 4 // world)
        optimiser.zero_grad()
        head(x[own], labels[own]).backward()
        optimiser.step()
    return full(head.weight)


@pytest.mark.parametrize("optimiser", ["RowSGD", "RowAdamW"])
@pytest.mark.parametrize(("size", "classes"), [(1, 11), (2, 11), (3, 11), (4, 3)])
def test_sparse_gradients_of_own_rows(optimiser, size, classes):
    (expected,) = worlds(1).run(sparse, optimiser, False, classes)
    for found in worlds(size).run(sparse, optimiser, True, classes):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------ compiled


def compiled(name, options):
    _, head = build(name, torch.float32)
    head = hs.losses.create(name, D, C, **options)
    other = copy.deepcopy(head)
    head.shard(mesh(), equal_batches=True)
    other.shard(mesh(), equal_batches=True)
    call = torch.compile(other, backend="aot_eager")
    torch.manual_seed(dist.get_rank())
    x, labels = torch.randn(4, D), torch.randint(C, (4,))
    found = []
    for function, owner in ((head, head), (call, other)):
        y = x.clone().requires_grad_()
        loss = function(y, labels)
        loss.backward()
        found.append((loss.detach(), y.grad, full(owner.weight.grad)))
    return found


@pytest.mark.parametrize(("name", "options"), [("arcface", {}), ("cosface", {"path": "chunked"})])
def test_compiled_heads(name, options):
    for plain, quick in worlds(2).run(compiled, name, options):
        for first, second in zip(plain, quick, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------ saved, loaded


def save(folder, name):
    model, head = build(name, torch.float32)
    head.shard(mesh())
    optimiser = torch.optim.SGD(head.parameters(), 0.1, momentum=0.9)
    for x, labels in batches(torch.float32):
        optimiser.zero_grad()
        head(model(x), labels).backward()
        optimiser.step()
    weights, state = get_state_dict(head, optimiser)
    checkpoint.save({"head": weights, "optimiser": state}, checkpoint_id=folder)
    return {key: full(value) for key, value in head.state_dict().items()}, momentum(optimiser)


def momentum(optimiser):
    return [full(state["momentum_buffer"]) for state in optimiser.state.values()]


def load(folder, name, sharded):
    _, head = build(name, torch.float32)
    torch.nn.init.zeros_(head.weight)
    if sharded:
        head.shard(mesh())
    optimiser = torch.optim.SGD(head.parameters(), 0.1, momentum=0.9)
    weights, state = get_state_dict(head, optimiser)
    both = {"head": weights, "optimiser": state}
    checkpoint.load(both, checkpoint_id=folder)
    set_state_dict(head, optimiser, model_state_dict=both["head"], optim_state_dict=both["optimiser"])
    return {key: full(value) for key, value in head.state_dict().items()}, momentum(optimiser)


@pytest.mark.parametrize(("saved", "loaded"), [(1, 3), (2, 1), (3, 4), (4, 2), (4, 0)])
@pytest.mark.parametrize("name", ["arcface", "subcenter-arcface", "softmax"])
def test_any_number_of_processes_loads_what_any_saved(saved, loaded, name, tmp_path):
    """Loaded by 0 processes: by one whose head is whole."""
    expected, expected_momentum = worlds(saved).run(save, str(tmp_path), name)[0]
    for found, found_momentum in worlds(max(loaded, 1)).run(load, str(tmp_path), name, loaded > 0):
        assert all(torch.equal(found[key], value) for key, value in expected.items())
        assert all(map(torch.equal, found_momentum, expected_momentum))


# ------------------------------------------------------------------------------------------------ growing, refusing


def grown(name, sharded):
    _, head = build(name, torch.float64)
    generator = torch.Generator().manual_seed(2)
    x, labels = torch.randn(B, D, generator=generator, dtype=torch.float64), torch.arange(B) % 3
    rank, size = (dist.get_rank(), dist.get_world_size()) if sharded else (0, 1)
    if sharded:
        head.shard(mesh())
    head.init_centres(x[rank::size], labels[rank::size])
    torch.manual_seed(3 + rank)
    head.add_classes(4, x[rank::size], labels[rank::size])
    assert head.weight.shape[0] == head.classes * head.subcentres and (head.shards is not None) == sharded
    vectors = head.class_vectors
    head.eval()  # in training running centres would move by every copy of the batch
    loss = head(x, labels)
    head.unshard()
    return vectors, full(head.weight)[: C * head.subcentres], loss.detach(), head(x, labels).detach()


@pytest.mark.parametrize("name", ["arcface", "subcenter-arcface", "center", "triplet"])
@pytest.mark.parametrize("size", [2, 4])
def test_heads_grow_and_begin_at_the_means_of_all_examples(name, size):
    (whole,) = worlds(1).run(grown, name, False)
    for vectors, weight, together, alone in worlds(size).run(grown, name, True):
        torch.testing.assert_close(vectors[:C], whole[0][:C])
        torch.testing.assert_close(weight, whole[1])
        if name != "triplet":  # of which a batch that comes twice has other pairs
            torch.testing.assert_close(together, alone)


def refusals():
    found = {}

    def refused(key, call):
        try:
            call()
        except hs.errors.ArgumentError as error:
            found[key] = str(error)

    rank, size = dist.get_rank(), dist.get_world_size()
    refused("kind", lambda: hs.losses.ArcFace(4, 5).shard("mesh"))
    refused("dimensions", lambda: hs.losses.ArcFace(4, 5).shard(init_device_mesh("cpu", (1, size))))
    refused("classes", lambda: hs.losses.ArcFace(4, 5 + (rank == 1)).shard())
    refused("options", lambda: hs.losses.ArcFace(4, 5, m=0.5 if rank else 0.4, label_smoothing=0.1 * rank).shard())
    refused("twice", lambda: hs.losses.ArcFace(4, 5).shard().shard())
    head = hs.losses.ArcFace(4, 5).shard()
    x, labels = torch.randn(2, 4), torch.tensor([0, 1])
    refused("labels", lambda: head(x, labels + 7 * (rank == 1)))
    refused("shape", lambda: head(x[:, :3] if rank == 1 else x, labels))
    refused("type", lambda: head(x.double() if rank == 1 else x, labels))
    refused("soft", lambda: head(x, torch.full((2, 5), 0.2) if rank == 1 else labels))
    refused("margin", lambda: hs.losses.ArcFace(4, 5, m=0.5 if rank else 0.4).shard())
    refused("else", lambda: head.logits(x) if rank == 1 else head(x, labels))
    before = full(head.weight)
    assert head(x, labels).isfinite() and torch.equal(before, full(head.weight))
    return found


def test_what_is_refused_on_one_process_is_refused_on_all():
    first, second = worlds(2).run(refusals)
    every = {"kind", "dimensions", "classes", "options", "twice", "labels", "shape", "type", "soft", "margin", "else"}
    assert first.keys() == second.keys() == every
    assert first["labels"] == "labels must lie in [0, 5), got 7 in row 0, on process 1"
    assert second["labels"] == "labels must lie in [0, 5), got 7 in row 0"
    assert "5 on process 0 and 6 on process 1" in first["classes"] and "m=0.5" in first["margin"]
    assert "with labels here and with no labels (logits or cosines) on process 1" in first["else"]
    assert "must have one dimension, got 2" in first["dimensions"]


def given_and_taken():
    plain, divided = hs.losses.ArcFace(4, 5), hs.losses.ArcFace(4, 5).shard()
    expected = full(plain.weight) + dist.get_rank() * 0
    dist.broadcast(expected, 0)
    plain.load_state_dict({"weight": expected})
    divided.load_state_dict(plain.state_dict())
    taken = full(divided.weight)
    plain.load_state_dict({"weight": torch.zeros(5, 4)})
    plain.load_state_dict(divided.state_dict())
    x = torch.randn(2, 4, requires_grad=dist.get_rank() == 0)  # a gradient is needed of one process alone
    divided(x, torch.tensor([0, 1])).backward()
    return expected, taken, plain.weight.detach(), f"process {dist.get_rank()} of 2" in repr(divided)


def seeded_apart():
    """Everything that a head has is that of process 0."""
    torch.manual_seed(dist.get_rank())
    weights = (1.0 + torch.rand(5)).tolist()
    head = hs.losses.ArcFace(4, 5, rotation=nn.Linear(4, 4), class_weights=weights, m=(0.1 * torch.rand(5)).tolist())
    whole = copy.deepcopy(head)
    head.shard()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(5))
    return head(x, torch.tensor([0, 1, 4])).detach(), whole(
        torch.cat([x, x]), torch.tensor([0, 1, 4, 0, 1, 4])
    ).detach()


def test_processes_that_began_apart_have_the_head_of_the_first():
    (first, expected), (second, other) = worlds(2).run(seeded_apart)
    torch.testing.assert_close(first, expected)
    assert torch.equal(first, second) and not torch.allclose(other, expected)


def odd():
    """What strides and versions of tensors make hard."""
    rank = dist.get_rank()
    for dim in (1, 5):
        head = hs.losses.ArcFace(dim, 7).shard()
        for count in (1, 0):  # of one sample on the first process, and of none anywhere
            x = (1.5 * torch.randn(3, dim))[: count * (rank == 0)].requires_grad_()
            head(x, torch.zeros(len(x), dtype=torch.int64)).backward()
    for name, options in (("arcface", {"weight_gradient": "raw"}), ("a-softmax", {"gradient": "caffe"})):
        head = hs.losses.create(name, 6, 7, **options).shard()
        x, labels = torch.randn(3, 6), torch.tensor([0, 1, 2])
        (head(x, labels) + head(2 * x, labels)).backward()
    single = hs.losses.create("a-softmax", 3, 1).shard()
    single(torch.randn(0, 3, requires_grad=True), torch.zeros(0, dtype=torch.int64)).backward()
    kind = torch.float32 if rank else torch.float64  # of soft labels
    soft = hs.losses.ArcFace(6, 2).shard()(torch.randn(3, 6), torch.full((3, 2), 0.5, dtype=kind))
    return full(single.weight).isfinite().all().item(), soft.item()


def test_edges_of_batches_and_steps():
    (first, soft), (second, other) = worlds(2).run(odd)
    assert first and second and soft == other


def twice():
    head = hs.losses.CosFace(4, 5).shard()
    x = torch.randn(2, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(head(x, torch.tensor([0, 1])), x, create_graph=True)
    try:
        slope.sum().backward()
    except RuntimeError as error:
        return "once_differentiable" in str(error)
    return False


def test_second_derivatives_are_refused():
    assert worlds(2).run(twice) == [True, True]


def test_whole_and_divided_heads_take_each_others_states():
    for expected, taken, back, shown in worlds(2).run(given_and_taken):
        assert torch.equal(expected, taken) and torch.equal(expected, back) and shown


def made():
    head = hs.losses.create("arcface", 4, 5, mesh=mesh())
    return head.shards is not None, hs.losses.create("arcface", 4, 5, mesh=None).shards is None


def test_heads_are_built_on_a_mesh():
    assert worlds(2).run(made) == [(True, True)] * 2
