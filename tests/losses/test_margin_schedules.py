"""Schedules of margins and running averages, against the published constants and plain arithmetic."""

import copy

import pytest
import torch
from torch import nn

import hypersphere as hs
from hypersphere.errors import ArgumentError
from hypersphere.losses import LambdaAnnealer, Ramp, Schedule
from hypersphere.losses.schedules import moving_average


def after(schedule, steps):
    """Value that the training step of this number uses."""
    return float(schedule.value(torch.tensor(steps)))


# ------------------------------------------------------------------------------------------------ annealing

# Where, base, gamma, power, minimum, start.
PUBLISHED = [
    ("sphereface", 1000.0, 0.12, 1.0, 5.0, 0),
    ("sphereface-plus m=4", 1000.0, 0.12, 1.0, 5.0, 2000),
    ("sphereface-plus m=2", 1000.0, 0.11, 1.0, 5.0, 0),
    ("l-softmax MNIST", 1000.0, 2.5e-5, 35.0, 0.0, 0),
    ("l-softmax CIFAR-10", 1000.0, 2e-5, 45.0, 0.0, 0),
    ("l-softmax CIFAR-10+", 1000.0, 1e-5, 45.0, 0.0, 0),
    ("l-softmax defaults", 1.0, 0.0, 1.0, 0.0, 0),
    ("sphereface_pytorch", 1500.0, 0.1, 1.0, 5.0, 0),
]


@pytest.mark.parametrize(("base", "gamma", "power", "minimum", "start"), [row[1:] for row in PUBLISHED],
                         ids=[row[0] for row in PUBLISHED])  # fmt: skip
def test_published_annealing(base, gamma, power, minimum, start):
    annealer = LambdaAnnealer(base, gamma, power, minimum, start)
    assert int(annealer.steps) == start
    for t in range(start + 1, start + 6):
        wanted = max(minimum, base * (1 + gamma * t) ** -power)
        assert float(annealer.value(annealer.advance())) == pytest.approx(wanted, rel=1e-5)
    for t in (100, 1658, 1659, 1660, 10_000, 100_000):
        assert after(annealer, t) == pytest.approx(max(minimum, base * (1 + gamma * t) ** -power), rel=1e-4, abs=1e-30)
    assert int(annealer.steps) == start + 5


def test_the_default_reaches_its_minimum_at_step_1659():
    annealer = LambdaAnnealer()
    assert after(annealer, 1658) > 5.0 == after(annealer, 1659) == after(annealer, 10**6)
    assert after(annealer, 1) == pytest.approx(1000 / 1.12)
    assert annealer.bounds() == (5.0, 1000.0)


def test_annealing_switched_off():
    annealer = LambdaAnnealer(base=0.0)
    assert after(annealer, 1) == after(annealer, 10**6) == 0
    assert annealer.bounds() == (0.0, 0.0)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    heads = []
    for option in (annealer, None):
        torch.manual_seed(0)
        heads.append(hs.losses.ASoftmax(3, 3, annealer=option))
    assert torch.equal(heads[0](x, y), heads[1](x, y))


@pytest.mark.parametrize("argument", ["base", "gamma", "power", "minimum", "start"])
def test_bad_annealers(argument):
    with pytest.raises(ArgumentError, match=f"^{argument} must be at least 0, got -1$"):
        LambdaAnnealer(**{argument: -1})


def test_annealing_blends_cosine_and_margin():
    head = hs.losses.ASoftmax(3, 3, m=4, annealer=LambdaAnnealer(5.0, 0.0, minimum=5.0))
    theta = torch.tensor([0.0, 0.5, 2.0, 3.0])
    psi = hs.losses.ASoftmax(3, 3, m=4).psi(theta)
    torch.testing.assert_close(head.psi(theta), (5 * theta.cos() + psi) / 6)


def test_a_start_goes_on_as_if_trained_before():
    first, second = LambdaAnnealer(), LambdaAnnealer(start=3)
    for _ in range(3):
        first.advance()
    assert first.value(first.advance()) == second.value(second.advance())


# ------------------------------------------------------------------------------------------------ ramps


def test_an_even_ramp():
    ramp = Ramp(0.1, 0.5, length=4)
    found = [after(ramp, t) for t in range(7)]
    assert found == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5])
    assert float(ramp.value()) == pytest.approx(0.1)
    assert float(ramp.value(ramp.advance())) == float(ramp.value()) == pytest.approx(0.2)
    assert ramp.bounds() == (0.1, 0.5) and Ramp(0.5, 0.1, length=3).bounds() == (0.1, 0.5)
    down = Ramp(0.5, 0.1, length=4)
    assert [after(down, t) for t in range(6)] == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1, 0.1])
    assert repr(ramp) == "Ramp(start=0.1, end=0.5, length=4)"


def test_a_ramp_by_jumps():
    ramp = Ramp(0.0, 0.6, milestones=(2, 5, 6))
    assert [after(ramp, t) for t in range(8)] == pytest.approx([0, 0, 0.2, 0.2, 0.2, 0.4, 0.6, 0.6])
    assert repr(ramp) == "Ramp(start=0, end=0.6, milestones=(2, 5, 6))"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"^length or milestones must be given \(one of them\), got None and None$"),
        ({"length": 3, "milestones": (1,)}, r"^length or milestones must be given \(one of them\), got 3 and \(1,\)$"),
        ({"milestones": ()}, r"^length or milestones must be given"),
        ({"length": 0}, r"^length must be at least 1, got 0$"),
    ],
)
def test_bad_ramps(options, message):
    with pytest.raises(ArgumentError, match=message):
        Ramp(0.0, 1.0, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_ramp_keeps_its_steps_in_every_type(dtype):
    """70,001 is no number of float16 and none of bfloat16."""
    even = Ramp(0.0, 1.0, length=70_001).to(dtype)
    jumps = Ramp(0.0, 1.0, milestones=(70_001,)).to(dtype)
    assert after(even, 35_000) == pytest.approx(35_000 / 70_001, rel=1e-6)
    assert after(even, 70_000) < 1 == after(even, 70_001)
    assert after(jumps, 70_000) == 0 and after(jumps, 70_001) == 1
    assert even.steps.dtype == torch.int64


def test_a_schedule_of_ones_own():
    class Wave(Schedule):
        def _at(self, steps):
            return 0.3 + 0.1 * (steps / 2).sin()

        def bounds(self):
            return 0.2, 0.4

    torch.manual_seed(0)
    head = hs.losses.ArcFace(3, 4, s=8.0, m=Wave())
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 2, 3, 3])
    for t in range(1, 4):
        other = hs.losses.ArcFace(3, 4, s=8.0, m=float(0.3 + 0.1 * torch.tensor(t / 2).sin()))
        other.load_state_dict({"weight": head.weight})
        torch.testing.assert_close(head(x, y), other(x, y))
    base = Schedule()
    with pytest.raises(NotImplementedError):
        base.value()
    with pytest.raises(NotImplementedError):
        base.bounds()


@pytest.mark.parametrize(
    "make", [LambdaAnnealer, lambda: Ramp(0.0, 1.0, length=9), lambda: Ramp(0.0, 1.0, None, (1, 4))]
)
def test_schedules_are_saved_and_copied(make):
    schedule = make()
    for _ in range(4):
        schedule.advance()
    assert list(schedule.state_dict()) == ["steps"]
    other = make()
    other.load_state_dict(schedule.state_dict())
    twin = copy.deepcopy(schedule)
    assert schedule.value(schedule.advance()) == other.value(other.advance()) == twin.value(twin.advance())
    assert int(other.steps) == int(twin.steps) == 5


def test_a_counter_of_a_compiled_step():
    """The value that the step used counts in its backward pass, not the one that the counter has moved on to."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.ramp = Ramp(0.0, 10.0, length=10)

        def forward(self, x):
            return (x * self.ramp.value(self.ramp.advance())).square().sum()

    torch._dynamo.reset()
    plain = Scaled()
    fast = Scaled()
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
    for t in range(1, 4):
        found = []
        for module in (plain, compiled):
            x = torch.tensor([3.0], requires_grad=True)
            module(x).backward()
            found.append(x.grad.item())
        assert found[0] == found[1] == pytest.approx(2 * 3.0 * t**2)
    assert int(plain.ramp.steps) == int(fast.ramp.steps) == 3


# ------------------------------------------------------------------------------------------------ averages


def test_moving_average():
    average = torch.tensor(2.0)
    assert float(moving_average(average, torch.tensor(6.0), 0.25)) == 3.0 == float(average)
    result = moving_average(average, torch.tensor(7.0, dtype=torch.float64), 0.5)
    assert float(result) == 5.0 == float(average) and result.dtype == torch.float32
    result += 1
    assert float(average) == 5.0  # a copy


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_an_average_of_no_samples_stays(value):
    average = torch.tensor(2.0)
    assert float(moving_average(average, torch.tensor(value), 0.5)) == 2.0 == float(average)


def test_moving_average_is_a_well_formed_operation():
    torch.library.opcheck(torch.ops.hypersphere.moving_average.default, (torch.tensor(2.0), torch.tensor(6.0), 0.25))
    torch.library.opcheck(torch.ops.hypersphere.count_step.default, (torch.zeros((), dtype=torch.int64),))


class Averaged(nn.Module):
    """Divides by the running mean of what it gets; a compiled backward pass must not read the mean again."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor(1.0))

    def forward(self, x):
        return (x / moving_average(self.mean, x.detach().mean(), 0.5)).square().sum()


def test_moving_average_compiled_saved_and_restored():
    torch._dynamo.reset()
    plain, fast = Averaged(), Averaged()
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
    mean = 1.0
    for value in (3.0, 8.0, float("nan"), 1.0):
        mean = mean if value != value else (mean + value) / 2
        found = []
        for module in (plain, compiled):
            x = torch.tensor([value], requires_grad=True)
            module(x).backward()
            found.append(x.grad.item())
        assert float(plain.mean) == float(fast.mean) == mean
        if value == value:
            assert found[0] == found[1] == pytest.approx(2 * value / mean**2)
    resumed = Averaged()
    resumed.load_state_dict(fast.state_dict())
    assert float(resumed.mean) == mean


@pytest.mark.parametrize(
    ("name", "buffers"), [("adaface", ("norm_mean", "norm_std")), ("curricularface", ("progress",))]
)
def test_running_statistics_of_heads(name, buffers):
    """They follow the batches in training only, skip what cannot be measured, and are saved."""
    torch.manual_seed(0)
    head = hs.losses.create(name, 4, 3, rate=0.5)
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    before = [float(getattr(head, buffer)) for buffer in buffers]
    head.eval()(x, y)
    assert [float(getattr(head, buffer)) for buffer in buffers] == before
    norms = x.norm(dim=1).clamp(1e-3, 100)
    own = (nn.functional.normalize(x) * nn.functional.normalize(head.weight.detach())[y]).sum(1)
    values = {"norm_mean": norms.mean(), "norm_std": norms.std(), "progress": own.mean()}
    head.train()(x, y)
    for old, buffer in zip(before, buffers, strict=True):
        assert float(getattr(head, buffer)) == pytest.approx((old + float(values[buffer])) / 2, rel=1e-5)
    now = [float(getattr(head, buffer)) for buffer in buffers]
    head(x[:0], y[:0])
    head(x, torch.full_like(y, -100))
    assert [float(getattr(head, buffer)) for buffer in buffers] == now
    if name == "adaface":
        head(x[:1], y[:1])  # one norm has a mean and no spread
        assert float(head.norm_std) == now[1] and float(head.norm_mean) != now[0]
    other = hs.losses.create(name, 4, 3, rate=0.5)
    other.load_state_dict(head.state_dict())
    assert torch.equal(head(x, y), other(x, y))
    assert all(torch.equal(getattr(head, buffer), getattr(other, buffer)) for buffer in buffers)
