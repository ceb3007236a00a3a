"""Metrics that processes share have the numbers of one process, bit for bit, and errors of one are those of all."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from helpers.worlds import worlds
from hypersphere import attacks, metrics
from hypersphere.errors import ArgumentError
from hypersphere.metrics import PairScores, neighbours, processes, verification
from hypersphere.metrics.processes import OtherProcessError, agreed, batches, gathered, on_first, share

SIZES = [1, 2, 3, 4]
EVERYBODY = pytest.mark.parametrize("size", SIZES)


def group():
    return dist.group.WORLD


def outcome(work):
    """What work gives, or its error in words."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - shown by the test that asked
        return f"{type(error).__name__}: {error}"


def same(found, wanted):
    """Whether nested results are equal to the last bit."""
    if isinstance(wanted, torch.Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], value) for key, value in wanted.items())
    if isinstance(wanted, tuple | list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return repr(found) == repr(wanted)  # NaN as well


# ------------------------------------------------------------------------------------------------ shares


def shares():
    return {(total, unit): share(total, group(), unit) for total in range(13) for unit in (1, 2, 5)}


@EVERYBODY
def test_shares_are_whole_units_in_order_and_nearly_even(size):
    found = worlds(size).run(shares)
    for total, unit in found[0]:
        rows = [list(range(total))[part[total, unit]] for part in found]
        assert [*itertools.chain(*rows)] == [*range(total)]
        units = [-(-len(part) // unit) for part in rows]
        assert max(units) - min(units) <= 1
        assert all(len(part) % unit == 0 for part in rows if part and part[-1] != total - 1)


def own_batches():
    return [list(range(11))[rows] for rows in batches(11, 3, group())]


@EVERYBODY
def test_batches_are_those_of_one_process(size):
    assert [*itertools.chain(*worlds(size).run(own_batches))] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]
    assert [list(range(11))[rows] for rows in batches(11, 3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]


def test_shares_need_counts_and_membership():
    with pytest.raises(ArgumentError, match="unit must be at least 1, got 0"):
        share(3, None, 0)
    with pytest.raises(ArgumentError, match="total must be a whole number"):
        share(2.5)
    found = worlds(2).run(a_group_of_the_first)
    assert found[0] == slice(0, 4, None)
    assert found[1].startswith("ArgumentError: group must have this process among its members")


def a_group_of_the_first():
    first = dist.new_group([0])
    return outcome(lambda: share(4, first))


def rows(dtype, counts):
    torch.manual_seed(0)
    whole = (9 * torch.randn(sum(counts), 2, 3)).to(dtype)
    start = sum(counts[: dist.get_rank()])
    own = whole[start : start + counts[dist.get_rank()]]
    parts = [part for part in own.split(2) if len(part)]
    return gathered(parts, group()), whole


@EVERYBODY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_rows_are_gathered_in_order_whoever_has_how_many(size, dtype):
    for counts in ([3, 0, 5, 1], [0, 4, 0, 0] if size > 1 else [4], [1, 1, 1, 1]):
        for found, whole in worlds(size).run(rows, dtype, counts[:size]):
            assert same(found, whole)


def odd_rows():
    wrong = outcome(lambda: gathered([torch.zeros(2, 2 + dist.get_rank())], group()))
    nothing = outcome(lambda: gathered([], group()))
    return wrong, nothing, gathered([torch.tensor([dist.get_rank()])], group())


def test_rows_of_different_shapes_are_refused_everywhere():
    for wrong, nothing, after in worlds(3).run(odd_rows):
        assert wrong.startswith("ArgumentError: parts must have one type and one shape of a row")
        assert "(2,)" in wrong and "(4,)" in wrong and "no tensor from any process" in nothing
        assert after.tolist() == [0, 1, 2]


# ------------------------------------------------------------------------------------------------ errors


class DamagedError(processes.HypersphereError):
    """An error that its message says all of."""


def failing(where, kind):
    """An error on one process: within, between two gatherings, behind the last one, or in nested work."""

    def work():
        with agreed(group()):
            if where == "first":
                fail()
            gathered([torch.zeros(1)], group())
            with agreed(group()):
                if where == "nested":
                    fail()
                gathered([torch.zeros(1)], group())
            if where == "wrapped":
                try:
                    with agreed(group()):
                        fail()
                except kind as error:
                    raise ArgumentError("metrics", "is blamed") from error
            if where == "last":
                fail()

    def fail():
        if dist.get_rank() == 1:
            raise kind("ann.png cannot be decoded")

    found = outcome(work)
    return found, gathered([torch.tensor([dist.get_rank()])], group()).tolist()


@pytest.mark.parametrize("where", ["first", "nested", "wrapped", "last"])
@pytest.mark.parametrize("kind", [ValueError, DamagedError])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_an_error_of_one_process_is_one_of_all(size, kind, where):
    for rank, (found, after) in enumerate(worlds(size).run(failing, where, kind)):
        name = "" if kind is DamagedError else "ValueError: "
        if rank == 1:
            own = "ArgumentError: metrics is blamed" if where == "wrapped" else f"{kind.__name__}: ann.png"
            assert found.startswith(own)
        else:
            assert found == f"OtherProcessError: process 1: {name}ann.png cannot be decoded"
        assert after == list(range(size))  # nobody is left behind in another exchange


def of_the_first(fails):
    def work():
        if fails:
            raise ArgumentError("k", "must be less")
        return dist.get_rank(), "found"

    return outcome(lambda: on_first(work, group()))


@EVERYBODY
def test_what_the_first_process_finds_is_known_to_all(size):
    assert worlds(size).run(of_the_first, False) == [(0, "found")] * size
    first, *others = worlds(size).run(of_the_first, True)
    assert first == "ArgumentError: k must be less"
    assert others == ["OtherProcessError: process 0: k must be less"] * (size - 1)


def test_one_process_needs_nobody():
    with pytest.raises(ZeroDivisionError), agreed():
        raise ZeroDivisionError
    assert on_first(lambda: 3) == 3 and processes.collected("x") == ["x"]
    assert issubclass(OtherProcessError, processes.HypersphereError)


# ------------------------------------------------------------------------------------------------ search


def features(seed=0, n=60, dim=6):
    draw = torch.Generator().manual_seed(seed)
    found = torch.randint(-2, 3, (n, dim), generator=draw).float()  # many equal scores
    return found + (found == 0).all(1, keepdim=True)


def searches(through):
    gallery, probes = features(1, 300), features(2, 23)
    small = 9000  # bytes: tens of chunks
    ids, owners = torch.arange(23) % 7, torch.arange(300) % 11
    return {
        "search": [
            metrics.search(probes, gallery, k, kind=kind, memory=small, group=through)
            for k in (1, 5, 300)
            for kind in neighbours.KINDS
        ],
        "one chunk": metrics.search(probes, gallery, 3, group=through),
        "parts": metrics.search(probes, iter(gallery.split(37)), 4, memory=small, group=through),
        "float64": metrics.search(probes.double(), gallery.double(), 4, memory=2 * small, group=through),
        "no probes": metrics.search(probes[:0], gallery, 4, memory=small, group=through),
        "pairs": metrics.score_pairs(
            gallery, probes, torch.stack([torch.arange(300), torch.arange(300) % 23], 1), memory=small, group=through
        ),
        "no pairs": metrics.score_pairs(gallery, probes, torch.zeros(0, 2, dtype=torch.long), group=through),
        "identify": vars(
            metrics.identify(
                probes,
                ids,
                gallery,
                owners,
                [features(3, 50), features(4, 3)],
                fpirs=(0.1,),
                memory=small,
                group=through,
            )
        ),
        "megaface": vars(
            metrics.megaface(probes, ids, [gallery, features(5, 7)], fars=(1e-2,), memory=100_000, group=through)
        ),
        "ijb": str(
            metrics.ijb(
                gallery,
                torch.arange(300) // 4,
                torch.arange(300) // 2,
                torch.arange(300) // 12,
                pairs=[(a, b) for a in range(20) for b in range(a)],
                gallery=range(0, 75, 3),
                probes=range(1, 75, 3),
                fars=(0.1,),
                samples=30,
                group=through,
            )
        ),
    }


def shared_searches():
    found, alone = searches(group()), searches(None)
    return {key: same(found[key], alone[key]) for key in alone}, gathered([found["search"][3][0]], group())


@EVERYBODY
def test_a_search_that_processes_share_finds_what_one_finds(size):
    for equal, everywhere in worlds(size).run(shared_searches):
        assert all(equal.values()), equal
        first, *others = everywhere.chunk(size)
        assert all(torch.equal(first, other) for other in others)


def bad_searches():
    probes, gallery = features(2, 5), features(1, 40)
    gallery[17, 2] = torch.nan
    calls = {
        "nan": lambda: metrics.search(probes, gallery, 2, memory=3000, group=group()),
        "k": lambda: metrics.search(probes, gallery[:3], 5, group=group()),
        "faiss": lambda: metrics.search(probes, gallery, 2, backend="faiss", group=group()),
        "file": lambda: metrics.search(probes, damaged(gallery), 2, memory=3000, group=group()),
        "after": lambda: metrics.search(probes, gallery[18:], 1, memory=3000, group=group())[1].shape,
    }
    return {name: outcome(call) for name, call in calls.items()}


def damaged(gallery):
    yield gallery[:10]
    if dist.get_rank() == dist.get_world_size() - 1:
        raise OSError("part-2.npy is cut short")
    yield gallery[20:30]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_search_that_fails_does_so_on_all_processes(size):
    for rank, found in enumerate(worlds(size).run(bad_searches)):
        assert found["nan"].startswith("ArgumentError: gallery must hold finite features only")
        assert found["k"] == "ArgumentError: gallery must hold at least k = 5 vectors, got 3"
        assert found["faiss"].startswith("ArgumentError: group must be None with the backend 'faiss'")
        assert found["file"].endswith("part-2.npy is cut short")
        assert found["file"].startswith("OSError" if rank == size - 1 else f"OtherProcessError: process {size - 1}: ")
        assert found["after"] == (5, 1)


def alone_among_several():
    """Without a group nobody waits, even where a default group is there and the others do not call."""
    return searches(None)["identify"]["size"] if dist.get_rank() == 1 else None


def test_a_metric_of_one_process_waits_for_nobody():
    assert worlds(3).run(alone_among_several) == [None, 353, None]


# ------------------------------------------------------------------------------------------------ verification


def scored(n=900):
    draw = torch.Generator().manual_seed(3)
    first, second = torch.randint(40, (2, n), generator=draw)
    second = torch.where(torch.rand(n, generator=draw) < 0.2, first, second)
    scores = (torch.randn(n, generator=draw) + (first == second)).mul(4).round() / 4
    return scores, first == second, (first, second)


def intervals(through, samples):
    scores, same_, people = scored()
    options = {"samples": samples, "group": through}
    return {
        "summary": {
            key: vars(value)
            for key, value in metrics.verification_summary(
                scores, same_, fars=(0.05, 0.2), identities=people, **options
            ).items()
        },
        "pairs": {
            key: vars(value) for key, value in metrics.verification_summary(scores, same_, fars=[], **options).items()
        },
        "threshold": vars(metrics.calibrate(scores, same_, 0.1, identities=people, **options)),
    }


def shared_intervals(samples, elements):
    before, verification.BOOTSTRAP_ELEMENTS = verification.BOOTSTRAP_ELEMENTS, elements
    try:
        found, alone = intervals(group(), samples), intervals(None, samples)
        scores, same_, people = scored()
        drawn = sum(
            len(x.true_accepts) for x in verification._bootstrap(scores, same_, people, samples, 0, group=group())
        )
    finally:
        verification.BOOTSTRAP_ELEMENTS = before
    return {key: same(found[key], alone[key]) for key in alone}, drawn


@EVERYBODY
@pytest.mark.parametrize(("samples", "elements"), [(200, 2**22), (50, 900 * 7), (2, 2**22)])
def test_intervals_whose_draws_processes_share_are_those_of_one(size, samples, elements):
    found = worlds(size).run(shared_intervals, samples, elements)
    for equal, _ in found:
        assert all(equal.values()), equal
    assert sum(drawn for _, drawn in found) == samples  # none of them twice


def streamed(through, capacity):
    scores, same_, _ = scored()
    own = share(len(scores), through)

    def fed(stream):
        for rows in range(own.start, own.stop, 100):
            chunk = slice(rows, min(rows + 100, own.stop))
            stream.update(scores[chunk], same_[chunk])
        return stream.all(through)

    first = fed(PairScores(capacity))
    second = fed(first.second_pass())
    numbers = [(part.genuine, part.impostors, part.tar_at_far([0.02, 0.05])) for part in (first, second)]
    return *numbers, second.auc(), second.equal_error_rate(), tuple(second.roc())


def shared_stream(capacity):
    scores, same_, _ = scored()
    whole = metrics.auc(scores, same_), metrics.equal_error_rate(scores, same_), metrics.tar_at_far(scores, same_, 0.05)
    found = streamed(group(), capacity)
    return same(found, streamed(None, capacity)), found[2:4], (found[0][2][1], found[1][2][1]), whole


@EVERYBODY
@pytest.mark.parametrize("capacity", [250, 2**20])
def test_streams_of_pairs_are_put_together_on_all_processes(size, capacity):
    for equal, (auc, eer), points, whole in worlds(size).run(shared_stream, capacity):
        assert equal and (auc, eer) == whole[:2]
        assert all(point == whole[2][0] for point in points)


def test_a_stream_stays_as_it_is_when_all_is_asked_for():
    stream = PairScores()
    stream.update(torch.tensor([0.9, 0.1]), torch.tensor([True, False]))
    both = stream.all().merge(stream)
    assert (stream.impostors, both.impostors) == (1, 2) and stream.all().roc().far.tolist() == [0, 0, 1]


# ------------------------------------------------------------------------------------------------ attacks


def victims():
    draw = torch.Generator().manual_seed(4)
    weight = torch.randn(12, 5, generator=draw)
    images, labels = torch.rand(11, 3, 2, 2, generator=draw), torch.randint(5, (11,), generator=draw)
    return (lambda x: torch.tanh(x.flatten(1) @ weight)), images, labels


def adversarial(through, batch_size):
    predict, images, labels = victims()
    members = [
        attacks.FGSM(),
        attacks.PGD(steps=3, restarts=2),
        attacks.PGD(steps=2, norm="l2", loss="margin"),
        attacks.Square(eps=0.1, steps=20),
        attacks.DeepFool(steps=5),
    ]
    options = {"batch_size": batch_size, "seed": 3, "group": through}
    found = [attacks.attacked(attack, predict, images, labels, **options) for attack in members]
    return [*found, attacks.attacked(members[1], predict, images[:0], labels[:0], **options)]


def shared_attacks():
    return [same(adversarial(group(), size), adversarial(None, size)) for size in (2, 3, 11, 500)]


@EVERYBODY
def test_attacks_that_processes_share_draw_what_one_draws(size):
    assert worlds(size).run(shared_attacks) == [[True] * 4] * size


def test_the_draws_of_a_batch_are_not_those_of_another():
    """Else what comes before a process' share would not matter."""
    predict, images, labels = victims()
    whole = attacks.attacked(attacks.PGD(steps=1, keep=False), predict, images, labels, batch_size=4)
    part = attacks.attacked(attacks.PGD(steps=1, keep=False), predict, images[4:], labels[4:], batch_size=4)
    assert not torch.equal(whole[4:], part)
