"""Row-sparse optimisers in several processes: copies that gather their rows, and shards with rows of their own."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import hypersphere as hs
from helpers.worlds import worlds
from hypersphere.errors import ArgumentError
from hypersphere.optim import RowAdamW, RowSGD, gather_rows, row_parameters

SIZES = (1, 2, 3, 4)
MAKERS = {
    "sgd": functools.partial(RowSGD, lr=0.1, momentum=0.9, weight_decay=0.05),
    "nesterov": functools.partial(RowSGD, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": functools.partial(RowAdamW, lr=0.05, weight_decay=0.1),
}
of_sizes = pytest.mark.parametrize("size", SIZES)
of_makers = pytest.mark.parametrize("name", MAKERS)


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def sparse(rows, values, size):
    rows = torch.as_tensor(rows, dtype=torch.int64)
    return torch.sparse_coo_tensor(rows.unsqueeze(0), values, (size, *values.shape[1:]), check_invariants=True)


# ------------------------------------------------------------------------------------------------ gathering

ROWS = [[3, 1, 3, 9], [], None, [1, 0, 8, 2, 5, 1, 9]]
"""Of each process: rows that are there twice, none at all, and no gradient."""


def gradients_of(rank, dtype):
    """A sparse gradient, one that is dense, and one that nobody has."""
    rows = ROWS[rank]
    found = None if rows is None else sparse(rows, draw(len(rows), 3, seed=rank, dtype=dtype), 10)
    return found, None if rank == 1 else draw(10, 3, seed=10 + rank, dtype=dtype), None


def gathered(dtype):
    parameters = [torch.nn.Parameter(torch.zeros(10, 3, dtype=dtype)) for _ in range(3)]
    for parameter, gradient in zip(parameters, gradients_of(dist.get_rank(), dtype), strict=True):
        parameter.grad = gradient
    gather_rows(iter(parameters))
    return [parameter.grad for parameter in parameters]


@of_sizes
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_mean_of_all_processes(size, dtype):
    found = worlds(size).run(gathered, dtype)
    given = [gradients_of(rank, dtype) for rank in range(size)]
    of_rows = sum(g[0].double().to_dense() for g in given if g[0] is not None) / size
    of_dense = sum(g[1].double() for g in given if g[1] is not None) / size
    near = functools.partial(
        torch.testing.assert_close, atol=torch.finfo(dtype).eps * 4, rtol=torch.finfo(dtype).eps * 4
    )
    for rows, dense, none in found:
        assert rows.is_coalesced() and rows.dtype == dtype and none is None
        assert rows.indices()[0].tolist() == sorted({row for held in ROWS[:size] for row in held or ()})
        near(rows.to_dense().double(), of_rows)
        near(dense.double(), of_dense)
        assert torch.equal(rows.values(), found[0][0].values()) and torch.equal(dense, found[0][1])


def sparse_on_one():
    parameter = torch.nn.Parameter(torch.zeros(10, 3))
    other = torch.nn.Parameter(torch.zeros(4, 2))
    other.grad = sparse([1], torch.ones(1, 2), 4)
    parameter.grad = torch.ones(10, 3) if dist.get_rank() else sparse([1], torch.ones(1, 3), 10)
    with pytest.raises(ArgumentError) as error:
        gather_rows([other, parameter])
    assert other.grad._nnz() == 1 and other.grad._values().tolist() == [[1.0, 1.0]]
    return str(error.value)


@pytest.mark.parametrize("size", SIZES[1:])
def test_kinds_that_differ_are_seen_by_all(size):
    message = "parameters must have sparse gradients on all processes or on none, got both for the parameter at 1"
    assert worlds(size).run(sparse_on_one) == [message] * size


def gathered_in_halves():
    group = dist.new_subgroups(2)[0]
    parameter = torch.nn.Parameter(torch.zeros(10, 3))
    parameter.grad = sparse([dist.get_rank(), 9], torch.ones(2, 3), 10)
    gather_rows([parameter], group)
    return parameter.grad.to_dense()[:, 0].tolist()


def test_processes_of_a_group():
    found = worlds(4).run(gathered_in_halves)
    assert found[0] == found[1] == [0.5, 0.5] + [0.0] * 7 + [1.0]
    assert found[2] == found[3] == [0.0, 0.0, 0.5, 0.5] + [0.0] * 5 + [1.0]


# ------------------------------------------------------------------------------------------------ copies

CLASSES, BATCH, STEPS = 40, 12, 5


class Model(torch.nn.Module):
    """A network and a sampled head whose samples are given."""

    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(1)
        self.body = torch.nn.Linear(5, 4)
        self.head = hs.losses.create(loss, 4, CLASSES, sample_rate=0.5, sparse=True)
        self.double()

    def forward(self, x, labels, rows):
        self.head.sample = lambda labels, **_: rows
        return self.head(self.body(x), labels)


def batches():
    for step in range(STEPS):
        order = torch.randperm(CLASSES, generator=torch.Generator().manual_seed(step))
        yield draw(BATCH, 5, seed=step), order[:BATCH], order[:20].sort().values


def trained(name, loss, several):
    model = Model(loss)
    rows = row_parameters(model)
    optimiser = MAKERS[name](model.parameters())
    call, share = model, slice(None)
    if several:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, rows)
        call = DistributedDataParallel(model)
        count = BATCH // dist.get_world_size()
        share = slice(dist.get_rank() * count, (dist.get_rank() + 1) * count)
    for x, labels, sample in batches():
        optimiser.zero_grad()
        call(x[share], labels[share], sample).backward()
        gather_rows(rows.values())
        optimiser.step()
    return {key: value.detach() for key, value in model.named_parameters()}


@of_sizes
@pytest.mark.parametrize(("name", "loss"), [("sgd", "cosface"), ("adamw", "arcface"), ("adamw", "subcenter-arcface")])
def test_copies_train_like_one_process_with_the_whole_batch(size, name, loss):
    found = worlds(size).run(trained, name, loss, True)
    wanted = trained(name, loss, False)
    begun = dict(Model(loss).named_parameters())
    for one in found:
        for key, value in wanted.items():
            torch.testing.assert_close(one[key], value, rtol=1e-9, atol=1e-11)
            assert torch.equal(one[key], found[0][key])
            assert not torch.allclose(value, begun[key])


def trained_on_own_samples():
    """Every process draws classes of its own; a dense gradient of the same samples is the reference."""
    found = []
    for kind in (True, False):
        torch.manual_seed(1)
        head = hs.losses.CosFace(4, CLASSES, sample_rate=0.3, sparse=kind).double()
        optimiser = MAKERS["sgd"](head.parameters(), lr=0.1, momentum=0.0, weight_decay=0.0)
        for step in range(3):
            torch.manual_seed(10 * step + dist.get_rank())
            optimiser.zero_grad()
            head(draw(6, 4, seed=step + dist.get_rank()), torch.randint(CLASSES, (6,))).backward()
            assert head.weight.grad.is_sparse == kind
            gather_rows([head.weight])
            optimiser.step()
        found.append(head.weight.detach())
    return found


@pytest.mark.parametrize("size", SIZES[1:])
def test_samples_of_their_own(size):
    found = worlds(size).run(trained_on_own_samples)
    for rows, dense in found:
        torch.testing.assert_close(rows, dense, rtol=1e-12, atol=1e-14)
        assert torch.equal(rows, found[0][0])


# ------------------------------------------------------------------------------------------------ shards


def steps_of(total):
    """Rows of a whole table and their gradients, some of them there twice; the third step is dense."""
    for step in range(6):
        count = 0 if step == 4 else 5
        rows = torch.randint(total, (count,), generator=torch.Generator().manual_seed(step))
        yield None if step == 2 else rows, draw(total if step == 2 else count, 3, seed=step)


def sharded(name, total, dtype):
    """Train the rows that a process holds, from the middle on with an optimiser that was restored."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(total)
    parameter = torch.nn.Parameter(distribute_tensor(draw(total, 3, seed=9, dtype=dtype), mesh, [Shard(0)]))
    own = distribute_tensor(whole, mesh, [Shard(0)]).to_local()
    first = int(own[0]) if len(own) else total
    optimiser = MAKERS[name]([parameter])
    for step, (rows, values) in enumerate(steps_of(total)):
        optimiser.zero_grad()
        assert parameter.grad is None and getattr(parameter, "local_grad", None) is None
        if rows is None:
            parameter.grad = distribute_tensor(values.to(dtype), mesh, [Shard(0)])
        else:
            mine = (rows >= first) & (rows < first + len(own))
            parameter.local_grad = sparse(rows[mine] - first, values[mine].to(dtype), len(own))
        optimiser.step()
        if step == 3:
            saved = copy.deepcopy(optimiser.state_dict())
            optimiser = MAKERS[name]([parameter])
            optimiser.load_state_dict(saved)
    state = optimiser.state[parameter]
    for key, value in state.items():
        assert value.placements == parameter.placements, key
        assert value.shape == ((total, 1) if key == "step" else (total, 3)), key
    return {"": parameter.full_tensor().detach()} | {key: value.full_tensor() for key, value in state.items()}


@of_sizes
@of_makers
@pytest.mark.parametrize(("total", "dtype"), [(10, torch.float64), (5, torch.bfloat16), (3, torch.float64)])
def test_shards_are_rows_of_one_table(size, name, total, dtype):
    """Also where processes hold unlike many rows, or none."""
    found = worlds(size).run(sharded, name, total, dtype)
    whole = torch.nn.Parameter(draw(total, 3, seed=9, dtype=dtype))
    optimiser = MAKERS[name]([whole])
    for rows, values in steps_of(total):
        whole.grad = values.to(dtype) if rows is None else sparse(rows, values.to(dtype), total)
        optimiser.step()
    wanted = {"": whole.detach()} | optimiser.state[whole]
    for one in found:
        assert one.keys() == wanted.keys()
        for key, value in one.items():
            assert torch.equal(value, wanted[key]), key


def sharded_head_of_two_gradients():
    """A regulariser gives a dense gradient beside that of the rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.full((4, 2), 2.0), mesh, [Shard(0)])
    count = len(parameter.to_local())
    parameter.local_grad = sparse([0], torch.ones(1, 2), count) if count else sparse([], torch.ones(0, 2), count)
    optimiser = RowSGD([parameter], lr=1.0)
    gather_rows([parameter])
    optimiser.step()
    optimiser.zero_grad(set_to_none=False)
    assert parameter.local_grad is None and (parameter.grad.to_local() == 0).all()
    return parameter.to_local().tolist()


@of_sizes
def test_gradients_of_both_kinds_are_added(size):
    for held in worlds(size).run(sharded_head_of_two_gradients):
        assert held == [[-2.0, -2.0], *[[-1.0, -1.0]] * (len(held) - 1)][: len(held)]


def distributed_otherwise(name):
    """Columns on each process, and whole copies."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for place in (Shard(1), Replicate()):
        parameter = torch.nn.Parameter(distribute_tensor(draw(5, 3), mesh, [place]))
        optimiser = MAKERS[name]([parameter])
        for step in range(3):
            optimiser.zero_grad()
            given = distribute_tensor(draw(5, 3, seed=step), mesh, [Replicate() if step else place])
            (parameter * given).sum().backward()
            optimiser.step()
        found.append(parameter.full_tensor().detach())
    return found


@of_sizes
@of_makers
def test_dense_gradients_of_other_placements(size, name):
    found = worlds(size).run(distributed_otherwise, name)
    whole = torch.nn.Parameter(draw(5, 3))
    optimiser = MAKERS[name]([whole])
    for step in range(3):
        whole.grad = draw(5, 3, seed=step)
        optimiser.step()
    for one in found:
        for value in one:
            torch.testing.assert_close(value, whole.detach(), rtol=1e-12, atol=1e-14)
