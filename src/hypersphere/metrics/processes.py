r"""Work that several processes share: each does its part, and all of them have the whole, as one process would.

Whoever shares says so with a ``group`` of ``torch.distributed``; nothing here looks for processes by itself, so that
what one process calls alone never waits. All processes of a group make the same calls with the same arguments.

An error of one process is one of all: :func:`agreed` and whatever gathers tell each other how it went, so that nobody
waits for something that does not come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hypersphere.errors import ArgumentError, HypersphereError, check_count

if TYPE_CHECKING:
    Group: TypeAlias = dist.ProcessGroup
else:
    Group = getattr(dist, "ProcessGroup", Any)  # torch may be built without processes

T = TypeVar("T")


class OtherProcessError(HypersphereError):
    """Another process of the group could not do its part; the message is its own.

    Example:
        >>> print(OtherProcessError("process 1: ann.png cannot be decoded"))
        process 1: ann.png cannot be decoded
    """


def place(group: Group | None) -> tuple[int, int]:
    """Rank of this process in a group, and the size of the group; ``(0, 1)`` without one.

    Example:
        >>> place(None)
        (0, 1)
    """
    if group is None:
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ArgumentError("group", "must have this process among its members, got one of other processes")
    return rank, dist.get_world_size(group)


def share(total: int, group: Group | None = None, unit: int = 1) -> slice:
    r"""The part of ``total`` rows that is this process' own: whole units of rows, in the order of the processes.

    Of :math:`u = \lceil N / \mathrm{unit} \rceil` units process r of P has those from :math:`\lfloor u r / P\rfloor`
    up to :math:`\lfloor u (r + 1) / P\rfloor`, which may be none. With the size of a batch as the unit the batches are
    those of one process, and so is the arithmetic within them.

    Args:
        total: How many rows there are.
        group: The processes; ``None``: this one alone, whose share is everything.
        unit: Rows that stay together.

    Example:
        >>> share(10)
        slice(0, 10, None)
    """
    check_count("total", total, 0)
    check_count("unit", unit)
    rank, size = place(group)
    units = -(-total // unit)
    return slice(*(min(total, units * part // size * unit) for part in (rank, rank + 1)))


def batches(total: int, size: int, group: Group | None = None) -> list[slice]:
    """This process' own among the batches of ``size`` rows, of which the last may be shorter.

    Args:
        total: How many rows there are.
        size: Rows of a batch.
        group: As of :func:`share`.

    Example:
        >>> batches(5, 2)
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    own = share(total, group, size)
    return [slice(start, min(start + size, total)) for start in range(own.start, own.stop, size)]


def gathered(parts: Sequence[Tensor], group: Group | None = None) -> Tensor:
    """The rows of all processes, one after the other in the order of their ranks; without gradient.

    Args:
        parts: This process' rows ``(n_i, ...)``, in as many tensors as it likes, also none. All have one type and,
            but for the number of rows, one shape.
        group: The processes; ``None``: this one alone.

    Returns:
        ``(N, ...)``, the same on all processes, each on the device of its own rows.

    Example:
        >>> gathered([torch.ones(2, 1), torch.zeros(1, 1)]).flatten()
        tensor([1., 1., 0.])
    """
    if group is None:
        return torch.cat(list(parts))
    own = torch.cat(list(parts)).detach() if parts else None
    forms = collected(None if own is None else (own.dtype, tuple(own.shape), own.device.type), group)
    kinds = {(form[0], form[1][1:]): form[2] for form in forms if form is not None}
    if len(kinds) != 1:
        what = f"rows of {sorted(map(str, kinds))}" if kinds else "no tensor from any process"
        raise ArgumentError("parts", f"must have one type and one shape of a row on all processes, got {what}")
    ((dtype, row), kind) = kinds.popitem()
    counts = [0 if form is None else form[1][0] for form in forms]
    # Rows are padded: equal sizes are what all backends can gather.
    backend = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    padded = torch.zeros(max(counts), *row, dtype=dtype, device=backend)
    if own is not None:
        padded[: len(own)] = own
    found = [torch.empty_like(padded) for _ in counts]
    if padded.numel():
        dist.all_gather(found, padded, group=group)
    rows = torch.cat([part[:count] for part, count in zip(found, counts, strict=True)])
    return rows.to(kind if own is None else own.device)


def collected(value: T, group: Group | None = None) -> list[T]:
    """The values of all processes by rank; objects are pickled on the way.

    Args:
        value: Of this process.
        group: The processes; ``None``: this one alone.

    Raises:
        OtherProcessError: A process failed in :func:`agreed` work instead.

    Example:
        >>> collected("here")
        ['here']
    """
    if group is None:
        return [value]
    found = _told(value, None, group)
    for rank, (_, error) in enumerate(found):
        if error is not None:
            raise OtherProcessError(f"process {rank}: {error}")
    return [value for value, _ in found]


@contextmanager
def agreed(group: Group | None = None) -> Iterator[None]:
    """Work that fails on all processes where it fails on one, which raises its own error; the others say which it was.

    It may stand inside of another one, and other processes may be at other places of theirs: they learn of the error
    where they gather something next, at the latest at the end.

    Args:
        group: The processes; ``None``: this one alone.

    Example:
        >>> with agreed():
        ...     share(3)
        slice(0, 3, None)
    """
    try:
        yield
    except Exception as error:
        if group is not None and not is_agreed(error):
            _told(None, f"{'' if isinstance(error, HypersphereError) else f'{type(error).__name__}: '}{error}", group)
            error.add_note(_NOTE)
        raise
    collected(None, group)


def is_agreed(error: BaseException | None) -> bool:
    """Whether all processes know of an error, or of one that it was made of: then all of them come to its handlers.

    Example:
        >>> is_agreed(ValueError()), is_agreed(OtherProcessError("process 1: it failed"))
        (False, True)
    """
    while error is not None:
        if isinstance(error, OtherProcessError) or _NOTE in getattr(error, "__notes__", ()):
            return True
        error = error.__context__
    return False


def on_first(work: Callable[[], T], group: Group | None = None) -> T:
    """What the first process finds, on all of them; the others wait.

    Args:
        work: What to do.
        group: The processes; ``None``: this one alone.

    Example:
        >>> on_first(lambda: 3)
        3
    """
    with agreed(group):
        return cast(T, collected(work() if place(group)[0] == 0 else None, group)[0])


_NOTE = "The other processes know of it."


def _told(value: Any, error: str | None, group: Group) -> list[tuple[Any, str | None]]:
    """The one message that processes exchange: a value, or what went wrong."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (value, error), group=group)
    return found
