"""RowSGD and RowAdamW against torch's optimisers, and the sampling of classes that they are made for."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import hypersphere as hs
from hypersphere.errors import ArgumentError
from hypersphere.optim import RowAdamW, RowSGD, gather_rows, row_parameters
from hypersphere.testing import numeric

OPTIONS = [
    {"lr": 0.1},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "weight_decay": 0.05},
    {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.05},
    {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.05, "nesterov": True},
]
each_option = pytest.mark.parametrize("options", OPTIONS, ids="-".join)
ROWS = torch.tensor([1, 3, 4, 8])


def table():
    return torch.randn(10, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradient(step, rows=10):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def sparse(rows, values, size=10):
    return torch.sparse_coo_tensor(rows.unsqueeze(0), values, (size, 3), check_invariants=True)


@each_option
def test_dense_gradients_are_those_of_sgd(options):
    mine, theirs = torch.nn.Parameter(table()), torch.nn.Parameter(table())
    first, second = RowSGD([mine], **options), torch.optim.SGD([theirs], **options)
    for step in range(5):
        mine.grad, theirs.grad = gradient(step), gradient(step)
        first.step()
        second.step()
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


@each_option
def test_touched_rows_are_those_of_sgd_and_the_others_stay(options):
    """The rows of a sparse gradient as a table of their own, that SGD updates."""
    whole, part = torch.nn.Parameter(table()), torch.nn.Parameter(table()[ROWS])
    first, second = RowSGD([whole], **options), torch.optim.SGD([part], **options)
    others = torch.ones(10, dtype=torch.bool)
    others[ROWS] = False
    for step in range(5):
        values = gradient(step, len(ROWS))
        whole.grad, part.grad = sparse(ROWS, values), values.clone()
        first.step()
        second.step()
        torch.testing.assert_close(whole[ROWS], part, rtol=1e-12, atol=1e-14)
        assert torch.equal(whole[others], table()[others])
        if options.get("momentum"):
            assert (first.state[whole]["momentum_buffer"][others] == 0).all()


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_of_rows_waits_for_them(nesterov):
    """Two sets of rows in turn: each goes on exactly where its own last step left it."""
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.05, "nesterov": nesterov}
    sets = [torch.tensor([0, 2, 5]), torch.tensor([1, 2, 9])]
    whole = torch.nn.Parameter(table())
    optimiser = RowSGD([whole], **options)
    for step in range(6):
        rows = sets[step % 2]
        rest = torch.ones(10, dtype=torch.bool)
        rest[rows] = False
        before = whole.detach().clone()
        buffer = optimiser.state[whole].get("momentum_buffer", torch.zeros(10, 3)).clone()
        part = torch.nn.Parameter(before[rows].clone())
        reference = torch.optim.SGD([part], **options)
        if step:
            reference.state[part]["momentum_buffer"] = buffer[rows].clone()
        whole.grad = sparse(rows, gradient(step, 3))
        part.grad = gradient(step, 3)
        optimiser.step()
        reference.step()
        assert torch.equal(whole[rest], before[rest])
        assert torch.equal(optimiser.state[whole]["momentum_buffer"][rest], buffer[rest])
        torch.testing.assert_close(whole[rows], part, rtol=1e-12, atol=1e-14)


def test_a_row_given_twice_counts_twice():
    rows = torch.tensor([2, 7, 2])
    values = gradient(0, 3)
    first, second = torch.nn.Parameter(table()), torch.nn.Parameter(table())
    first.grad = sparse(rows, values)
    second.grad = sparse(torch.tensor([2, 7]), torch.stack([values[0] + values[2], values[1]]))
    for parameter in (first, second):
        RowSGD([parameter], lr=0.1, momentum=0.9).step()
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-14)


def test_one_optimiser_for_a_whole_model():
    """A network with dense gradients, a head with sparse ones, a frozen part and a group of another rate."""
    body = torch.nn.Linear(5, 4)
    head = hs.losses.CosFace(4, 50, s=16.0, sample_rate=0.2, sparse=True)
    unused = torch.nn.Parameter(torch.ones(2))
    groups = [{"params": [*body.parameters(), unused]}, {"params": head.parameters(), "lr": 0.5}]
    reference = copy.deepcopy(body)
    optimiser = RowSGD(groups, lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(6, 5)
    before = head.weight.detach().clone()
    for step in range(3):
        optimiser.zero_grad()
        torch.manual_seed(step)
        head(body(x), torch.arange(6)).backward()
        assert head.weight.grad.is_sparse
        for mine, theirs in zip(body.parameters(), reference.parameters(), strict=True):
            theirs.grad = mine.grad.clone()
        optimiser.step()
        plain.step()
    for mine, theirs in zip(body.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert torch.equal(unused, torch.ones(2))
    moved = (head.weight != before).any(1)
    assert moved[:6].all() and 6 < moved.sum() < 50


@pytest.mark.parametrize("path", ["dense", "chunked"])
@pytest.mark.parametrize("name", ["cosface", "softmax", "subcenter-arcface", "sphereface2", "a-softmax"])
def test_sparse_gradients_of_a_sampled_head_are_the_dense_ones(name, path):
    found = []
    for kind in (False, True):
        torch.manual_seed(0)
        head = hs.losses.create(name, 4, 60, sample_rate=0.3, sparse=kind, path=path)
        x = torch.randn(5, 4, requires_grad=True)
        loss = head(x, torch.tensor([3, 59, 3, 20, 0]))
        loss.backward()
        found.append((loss.detach(), x.grad, head.weight.grad))
    (loss, by_x, dense), (again, by_x_again, rows) = found
    assert not dense.is_sparse and rows.is_sparse
    assert torch.equal(loss, again) and torch.equal(by_x, by_x_again)
    torch.testing.assert_close(rows.to_dense(), dense)
    centres = 3 if name == "subcenter-arcface" else 1
    assert rows._indices().shape[1] == 18 * centres


@each_option
def test_state_is_saved_and_restored(options):
    first = torch.nn.Parameter(table())
    optimiser = RowSGD([first], **options)
    for step in range(3):
        first.grad = sparse(ROWS, gradient(step, 4))
        optimiser.step()
    second = torch.nn.Parameter(first.detach().clone())
    other = RowSGD([second], lr=9.0)
    other.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    assert other.param_groups[0]["lr"] == options["lr"]
    for step in range(3, 5):
        first.grad, second.grad = sparse(ROWS, gradient(step, 4)), sparse(ROWS, gradient(step, 4))
        optimiser.step()
        other.step()
    assert torch.equal(first, second)


def test_closure_and_schedule():
    parameter = torch.nn.Parameter(torch.tensor([2.0]))
    optimiser = RowSGD([parameter], lr=0.25)
    schedule = torch.optim.lr_scheduler.StepLR(optimiser, 1, gamma=0.5)

    def closure():
        optimiser.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss

    assert optimiser.step(closure) == 4.0
    assert parameter.item() == 2.0 - 0.25 * 4.0
    schedule.step()
    assert optimiser.step(closure) == 1.0
    assert parameter.item() == 1.0 - 0.125 * 2.0
    assert optimiser.step() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, r"^lr must be at least 0, got -0\.1$"),
        ({"momentum": -0.1}, r"^momentum must be at least 0, got -0\.1$"),
        ({"weight_decay": -1.0}, r"^weight_decay must be at least 0, got -1\.0$"),
        ({"nesterov": True}, r"^nesterov needs momentum above 0$"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ArgumentError, match=message):
        RowSGD([torch.nn.Parameter(torch.ones(1))], **options)


# ------------------------------------------------------------------------------------------------ RowAdamW

ADAM = [
    {"lr": 0.1},
    {"lr": 0.1, "weight_decay": 0.3},
    {"lr": 0.05, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.0},
    {"lr": 0.05, "betas": (0.0, 0.99)},
    {"lr": 0.05, "betas": (0.9, 0.0), "weight_decay": 0.1},
]
each_adam = pytest.mark.parametrize("options", ADAM, ids=str)


class Book:
    """AdamW by the book for each row by itself: lists of numbers in a dictionary of rows."""

    def __init__(self, values, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        self.rows = {row: [*map(float, numbers)] for row, numbers in enumerate(values)}
        self.first = {row: [0.0] * 3 for row in self.rows}
        self.second = {row: [0.0] * 3 for row in self.rows}
        self.times = dict.fromkeys(self.rows, 0)
        self.lr, self.betas, self.eps, self.decay = lr, betas, eps, weight_decay

    def step(self, gradients):
        one, two = self.betas
        for row, gradient in gradients.items():
            self.times[row] += 1
            for i, g in enumerate(gradient):
                self.first[row][i] = one * self.first[row][i] + (1 - one) * g
                self.second[row][i] = two * self.second[row][i] + (1 - two) * g * g
                m = self.first[row][i] / (1 - one ** self.times[row])
                v = self.second[row][i] / (1 - two ** self.times[row])
                w = self.rows[row][i]
                self.rows[row][i] = w - self.lr * self.decay * w - self.lr * m / (math.sqrt(v) + self.eps)

    def table(self):
        return torch.tensor([*self.rows.values()], dtype=torch.float64)


@each_adam
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_with_all_rows_it_is_adamw(options, kind):
    mine, theirs = torch.nn.Parameter(table()), torch.nn.Parameter(table())
    first, second = RowAdamW([mine], **options), torch.optim.AdamW([theirs], **options)
    for step in range(8):
        order = torch.randperm(10)
        mine.grad = gradient(step) if kind == "dense" else sparse(order, gradient(step)[order])
        theirs.grad = gradient(step)
        first.step()
        second.step()
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


@each_adam
def test_rows_are_counted_by_themselves(options):
    """Random rows, some of them twice, all rows at times and none at others."""
    parameter, book = torch.nn.Parameter(table()), Book(table().tolist(), **options)
    optimiser = RowAdamW([parameter], **options)
    generator = torch.Generator().manual_seed(2)
    for step in range(30):
        count = int(torch.randint(8, (), generator=generator))
        rows, values = torch.randint(10, (count,), generator=generator), gradient(step, count)
        by_row = {}
        for row, value in zip(rows.tolist(), values.tolist(), strict=True):
            by_row[row] = [a + b for a, b in zip(by_row.get(row, [0.0] * 3), value, strict=True)]
        parameter.grad = sparse(rows, values)
        if step % 7 == 6:
            parameter.grad, by_row = gradient(step), dict(enumerate(gradient(step).tolist()))
        book.step(by_row)
        optimiser.step()
        torch.testing.assert_close(parameter.detach(), book.table(), rtol=1e-12, atol=1e-13)
    state = optimiser.state[parameter]
    assert state["step"].flatten().tolist() == [*book.times.values()] and len({*book.times.values()}) > 3
    wanted = torch.tensor([*book.second.values()], dtype=torch.float64)
    torch.testing.assert_close(state["exp_avg_sq"], wanted, rtol=1e-12, atol=1e-14)


def test_rows_that_are_left_out_rest():
    parameter = torch.nn.Parameter(table())
    optimiser = RowAdamW([parameter], lr=0.1, weight_decay=0.5)
    parameter.grad = gradient(0)
    optimiser.step()
    before = [parameter.detach().clone(), *(value.clone() for value in optimiser.state[parameter].values())]
    for rows in (ROWS, torch.tensor([], dtype=torch.int64)):
        parameter.grad = sparse(rows, gradient(1, len(rows)))
        optimiser.step()
    others = torch.ones(10, dtype=torch.bool)
    others[ROWS] = False
    for old, new in zip(before, [parameter.detach(), *optimiser.state[parameter].values()], strict=True):
        assert torch.equal(old[others], new[others]) and not (old[ROWS] == new[ROWS]).any()


def test_sparse_adam_differs_by_its_count_alone():
    """Its moments are the same; it corrects them by the steps of the whole, and adds eps before that."""
    mine, theirs = torch.nn.Parameter(table()), torch.nn.Parameter(table())
    first = RowAdamW([mine], lr=0.1, eps=0.0, weight_decay=0.0)
    second = torch.optim.SparseAdam([theirs], lr=0.1, eps=1e-300)
    sets = [torch.tensor([0, 1, 2]), torch.tensor([0, 2, 5, 9]), torch.tensor([0, 2, 9]), torch.tensor([0, 7])]
    times = dict.fromkeys(range(10), 0)
    for step, rows in enumerate(sets, 1):
        before = mine.detach().clone(), theirs.detach().clone()
        mine.grad, theirs.grad = sparse(rows, gradient(step, len(rows))), sparse(rows, gradient(step, len(rows)))
        first.step()
        second.step()
        for row in rows.tolist():
            times[row] += 1
            factors = [math.sqrt(1 - 0.999**t) / (1 - 0.9**t) for t in (times[row], step)]
            moves = [(new - old)[row] for new, old in zip((mine, theirs), before, strict=True)]
            torch.testing.assert_close(moves[0] / factors[0], moves[1] / factors[1], rtol=1e-10, atol=0)
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-12, atol=0)  # which is in every set


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("maker", [RowSGD, RowAdamW])
def test_parameters_of_16_bits_are_updated_in_32(maker, dtype, kind):
    """Each step is that of float32 from the same numbers, rounded once."""
    options = {"lr": torch.tensor(0.01), "weight_decay": 0.1} | ({"momentum": 0.9} if maker is RowSGD else {})
    low = torch.nn.Parameter(table().to(dtype))
    optimiser = maker([low], **options)
    rows = torch.arange(10) if kind == "dense" else torch.tensor([2, 7, 2, 4])
    for step in range(4):
        high = torch.nn.Parameter(low.detach().float())
        other = maker([high], **options)
        other.load_state_dict(copy.deepcopy(optimiser.state_dict()))
        values = gradient(step, len(rows)).to(dtype)
        for parameter, given in ((low, values), (high, values.float())):
            parameter.grad = given if kind == "dense" else sparse(rows, given)
        optimiser.step()
        other.step()
        assert low.dtype == dtype and torch.equal(low, high.to(dtype))
        for name, value in optimiser.state[low].items():
            assert value.dtype == (torch.float32 if name == "step" else dtype)
            assert torch.equal(value, other.state[high][name].to(value.dtype))
    assert not torch.equal(low[2], table()[2].to(dtype)) and low.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@each_adam
def test_state_of_adam_is_saved_and_restored(options, dtype):
    first = torch.nn.Parameter(table().to(dtype))
    optimiser = RowAdamW([first], **options)
    for step in range(260):  # more than 8 bits count
        first.grad = sparse(ROWS, gradient(step, 4).to(dtype))
        optimiser.step()
    second = torch.nn.Parameter(first.detach().clone())
    other = RowAdamW([second], lr=9.0)
    saved = copy.deepcopy(optimiser.state_dict())
    saved["state"][0]["step"] = saved["state"][0]["step"].double()
    other.load_state_dict(saved)
    assert other.state[second]["step"].dtype == torch.float32
    assert other.state[second]["step"].flatten().tolist() == [260.0 * (row in ROWS) for row in range(10)]
    for step in range(260, 263):
        rows = torch.tensor([1, step % 10])
        first.grad, second.grad = (sparse(rows, gradient(step, 2).to(dtype)) for _ in range(2))
        optimiser.step()
        other.step()
    assert torch.equal(first, second)


@pytest.mark.parametrize("maker", [RowSGD, RowAdamW])
def test_rates_are_tensors_that_a_schedule_fills(maker):
    numbers, tensors = torch.nn.Parameter(table()), torch.nn.Parameter(table())
    rate = torch.tensor(0.5, dtype=torch.float64)
    first, second = maker([numbers], lr=0.5, weight_decay=0.1), maker([tensors], lr=rate, weight_decay=0.1)
    for step, factor in enumerate((0.5, 0.125, 0.0)):
        first.param_groups[0]["lr"] = factor
        rate.fill_(factor)
        for parameter in (numbers, tensors):
            parameter.grad = sparse(ROWS, gradient(step, 4))
        before = tensors.detach().clone()
        first.step()
        second.step()
        torch.testing.assert_close(numbers, tensors, rtol=1e-14, atol=0)
    assert torch.equal(tensors, before) and second.param_groups[0]["lr"] is rate


@pytest.mark.parametrize("maker", [RowSGD, RowAdamW])
@pytest.mark.parametrize("shape", [(), (4,), (4, 2, 3), (0, 3)], ids=str)
def test_parameters_of_any_shape(maker, shape):
    values = torch.randn(shape, dtype=torch.float64)
    mine, theirs = torch.nn.Parameter(values.clone()), torch.nn.Parameter(values.clone())
    first = maker([mine], lr=0.1, weight_decay=0.1)
    second = {RowSGD: torch.optim.SGD, RowAdamW: torch.optim.AdamW}[maker]([theirs], lr=0.1, weight_decay=0.1)
    for _ in range(3):
        mine.grad = torch.randn(shape, dtype=torch.float64)
        theirs.grad = mine.grad.clone()
        if len(shape) > 1 and shape[0]:
            mine.grad = mine.grad.to_sparse(1)
        first.step()
        second.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("maker", [RowSGD, RowAdamW])
def test_a_step_with_sparse_gradients_waits_for_nothing(maker):
    options = {"momentum": 0.9} if maker is RowSGD else {}
    head = hs.losses.CosFace(4, 50, s=16.0, sample_rate=0.2, sparse=True)
    optimiser = maker(head.parameters(), lr=torch.tensor(0.1), **options)
    head(torch.randn(6, 4), torch.arange(6)).backward()
    assert not head.weight.grad.is_coalesced()
    with numeric.Host():
        optimiser.step()


@pytest.mark.parametrize("maker", [RowSGD, RowAdamW])
def test_gradients_that_are_not_of_rows_change_nothing(maker):
    first, second = torch.nn.Parameter(table()), torch.nn.Parameter(table())
    first.grad, second.grad = gradient(0), gradient(1).to_sparse()
    with pytest.raises(
        ArgumentError, match=r"^params must have dense .* of whole rows, got one of 2 sparse dimensions$"
    ):
        maker([first, second]).step()
    assert torch.equal(first, table())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, r"^lr must be at least 0, got -0\.1$"),
        ({"betas": (0.9, 1.0)}, r"^betas must be two numbers of at least 0 and below 1, got \(0\.9, 1\.0\)$"),
        ({"betas": (-0.1, 0.9)}, r"^betas must be two numbers"),
        ({"betas": 0.9}, r"^betas must be two numbers of at least 0 and below 1, got 0\.9$"),
        ({"eps": -1e-8}, r"^eps must be at least 0, got -1e-08$"),
        ({"weight_decay": -1.0}, r"^weight_decay must be at least 0, got -1\.0$"),
    ],
)
def test_bad_arguments_of_adam(options, message):
    with pytest.raises(ArgumentError, match=message):
        RowAdamW([torch.nn.Parameter(torch.ones(1))], **options)


def test_closure_of_adam():
    parameter = torch.nn.Parameter(torch.tensor([2.0]))
    optimiser = RowAdamW([parameter], lr=0.25, weight_decay=0.0)

    def closure():
        optimiser.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss

    assert optimiser.step(closure) == 4.0 and optimiser.step() is None
    optimiser.zero_grad()
    assert parameter.grad is None and parameter.item() < 1.51


def test_parameters_with_sparse_gradients_by_name():
    head = hs.losses.CosFace(4, 50, sample_rate=0.2, sparse=True)
    model = torch.nn.ModuleDict({"body": torch.nn.Embedding(9, 4), "rows": torch.nn.Embedding(9, 4, sparse=True)})
    model["head"] = head
    assert row_parameters(model) == {"rows.weight": model["rows"].weight, "head.weight": head.weight}
    model["rows"].weight.requires_grad_(False)
    model["again"] = head
    assert [*row_parameters(model)] == ["head.weight"]
    assert row_parameters(hs.losses.CosFace(4, 50, sample_rate=0.2)) == {}


def test_a_single_process_gathers_its_own_rows():
    rows, plain, none = (torch.nn.Parameter(table()) for _ in range(3))
    given = sparse(torch.tensor([7, 2, 7]), gradient(0, 3))
    rows.grad, plain.grad = given, gradient(1)
    gather_rows(iter([rows, plain, none]))
    assert rows.grad.is_coalesced() and rows.grad.indices().tolist() == [[2, 7]]
    assert torch.equal(rows.grad.to_dense(), given.to_dense())
    assert torch.equal(plain.grad, gradient(1)) and none.grad is None
    gather_rows([])


# ------------------------------------------------------------------------------------------------ sampling


@pytest.mark.parametrize(("rate", "batch", "count"), [(0.1, 8, 100), (0.5, 8, 500), (0.004, 8, 8), (0.999, 3, 999)])
def test_a_sample_holds_the_own_classes_and_others(rate, batch, count):
    head = hs.losses.CosFace(4, 1000, sample_rate=rate)
    labels = torch.randint(1000, (batch,))
    rows = head.sample(labels)
    assert len(rows) == count == max(int(rate * 1000), batch)
    assert (rows.diff() > 0).all()
    assert rows.min() >= 0 and rows.max() < 1000
    assert torch.isin(labels, rows).all()


def test_more_own_classes_than_the_quota():
    head = hs.losses.CosFace(4, 1000, sample_rate=0.01)
    labels = torch.randperm(1000)[:50]
    rows = head.sample(labels)
    assert torch.equal(rows, labels.sort().values)
    assert torch.equal(hs.losses.CosFace(4, 10, sample_rate=0.1).sample(torch.arange(30) % 10), torch.arange(10))
    repeated = head.sample(torch.full((50,), 7))  # room for others, where the batch has few classes
    assert len(repeated) == 50 and 7 in repeated


def test_samples_come_from_torchs_generator_and_reach_every_class():
    head = hs.losses.CosFace(4, 40, sample_rate=0.25)
    labels = torch.tensor([3, 3, 11])
    seen = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        seen.append(head.sample(labels))
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])
    drawn = torch.cat([head.sample(labels) for _ in range(400)]).bincount(minlength=40)
    assert drawn[3] == drawn[11] == 400
    others = torch.cat([drawn[:3], drawn[4:11], drawn[12:]]).double()
    # 8 of 38 each time: mean 84.2 and standard deviation 8.2, so none is 5 of them away.
    assert (others - 400 * 8 / 38).abs().max() < 41
    draws = torch.arange(40) / 40
    assert head.sample(labels, draws).tolist() == [3, 11, *range(32, 40)]
    assert draws[3] == 3 / 40  # what was given stays


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_sampled_step_is_a_head_of_the_sampled_classes(smoothing):
    """The loss and the gradients by the weights that were drawn; the others get none."""
    torch.manual_seed(0)
    head = hs.losses.CosFace(4, 30, s=8.0, sample_rate=0.4, label_smoothing=smoothing)
    x, labels = torch.randn(5, 4), torch.tensor([3, 29, 3, 20, 0])
    state = torch.get_rng_state()
    rows = head.sample(labels)
    torch.set_rng_state(state)
    loss = head(x, labels)
    loss.backward()
    weight = head.weight.detach()[rows].requires_grad_()
    cosines = F.normalize(x) @ F.normalize(weight).mT
    columns = torch.searchsorted(rows, labels)
    logits = 8 * (cosines - 0.35 * F.one_hot(columns, len(rows)))
    wanted = F.cross_entropy(logits, columns, label_smoothing=smoothing)
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(head.weight.grad[rows], weight.grad)
    rest = torch.ones(30, dtype=torch.bool)
    rest[rows] = False
    assert (head.weight.grad[rest] == 0).all() and rest.sum() == 18
    # Evaluation compares with all classes.
    full = hs.losses.CosFace(4, 30, s=8.0, label_smoothing=smoothing)
    full.load_state_dict(head.state_dict())
    assert torch.equal(head.eval()(x, labels), full.eval()(x, labels))


def test_training_with_sampled_classes_separates_them():
    """Every class has its own direction; a fifth of them a step is enough to learn it."""
    torch.manual_seed(0)
    count, dim = 200, 16
    centres = F.normalize(torch.randn(count, dim))
    head = hs.losses.CosFace(dim, count, s=16.0, m=0.1, sample_rate=0.2, sparse=True)
    optimiser = RowSGD(head.parameters(), lr=0.5, momentum=0.9)
    for batch in itertools.islice(itertools.cycle(torch.randperm(count).split(20)), 150):
        optimiser.zero_grad()
        head(centres[batch], batch).backward()
        optimiser.step()
    found = head.logits(centres).argmax(1)
    assert (found == torch.arange(count)).float().mean() > 0.95
