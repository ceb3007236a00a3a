r"""Heads whose classes lie on several processes: which are whose, and what is exchanged.

Every process knows the whole batch and its own classes. It reduces these, for every sample, to the numbers that a loss
needs (:class:`~hypersphere.losses.streaming.Statistics`), and what the processes found is put together: log-sum-exps by
a log-sum-exp, whatever concerns the target by a sum in which one process has a part. All that follows, margins above
all, is of size ``(B,)`` and computed alike everywhere. So three exchanges make a step: one gathers features and labels,
one the statistics, and one sums up, in the backward pass, what each process' classes have to say about the features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hypersphere.errors import ArgumentError
from hypersphere.geometry import at_least_float32
from hypersphere.losses.streaming import Statistics
from hypersphere.neurons import is_sharded, whole

if TYPE_CHECKING:
    from hypersphere.losses.state import HeadState

# Torch has renamed them.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)


@dataclass(frozen=True)
class Shards:
    """Which rows of a matrix ``(N, ...)`` lie on which process: torch's own division of a ``DTensor`` by rows.

    A class whose sub-centres lie on two processes belongs to the one that has the first of them.

    Example:
        >>> Shards(None, 1, 3, 8).bounds(), Shards(None, 2, 3, 8).bounds()
        ((3, 6), (6, 8))
        >>> Shards(None, 1, 3, 8, subcentres=2).classes
        (2, 3)
    """

    group: Any
    """Process group."""
    rank: int
    size: int
    """Number of processes."""
    rows: int
    subcentres: int = 1

    @classmethod
    def of(cls, weight: Tensor, subcentres: int = 1) -> Shards | None:
        """Those of a tensor; ``None`` where it is whole."""
        if not is_sharded(weight):
            return None
        mesh: Any = weight.device_mesh  # type: ignore[attr-defined]
        return cls(mesh.get_group(), mesh.get_local_rank(), mesh.size(), weight.shape[0], subcentres)

    def bounds(self, rank: int | None = None) -> tuple[int, int]:
        """First row of a process, by default this one, and the row behind its last."""
        share = -(-self.rows // self.size)
        start = min((self.rank if rank is None else rank) * share, self.rows)
        return start, min(start + share, self.rows)

    def classes_of(self, rank: int) -> tuple[int, int]:
        """First class of a process, and the class behind its last."""
        start, stop = (-(-row // self.subcentres) for row in self.bounds(rank))
        return start, stop

    @property
    def classes(self) -> tuple[int, int]:
        """First class of this process, and the class behind its last."""
        return self.classes_of(self.rank)

    def columns(self, labels: Tensor) -> Tensor:
        """Places of classes among those of this process, -1 of those elsewhere.

        Example:
            >>> Shards(None, 1, 3, 8).columns(torch.tensor([0, 3, 5, 6]))
            tensor([-1,  0,  2, -1])
        """
        first, last = self.classes
        return torch.where((labels >= first) & (labels < last), labels - first, -1)

    # ------------------------------------------------------------------------------------------------ exchanges

    def all(self, values: Tensor) -> Tensor:
        """``(...)`` of every process, ``(P, ...)``; without gradient."""
        flat = values.detach().reshape(-1)
        whole = flat.new_empty(self.size * flat.numel())
        _all_gather(whole, flat, group=self.group)
        return whole.view(self.size, *values.shape)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the processes; without gradient."""
        total = values.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def first(self, values: Tensor) -> Tensor:
        """What the first process has, on all of them."""
        found = values.clone()
        dist.broadcast(found, group_src=0, group=self.group)
        return found

    def gathered(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Rows of every process, ``(sum of sizes, ...)``; without gradient."""
        most = max(sizes)
        padded = rows.detach().new_zeros(most, *rows.shape[1:])
        padded[: len(rows)] = rows.detach()
        whole = self.all(padded)
        if min(sizes) == most:
            return whole.flatten(0, 1)
        return torch.cat([part[:size] for part, size in zip(whole, sizes, strict=True)])

    def scattered(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """The sum over the processes of the rows that belong to this one."""
        most = max(sizes)
        if min(sizes) < most:
            filled = rows.new_zeros(len(sizes), most, *rows.shape[1:])
            for part, own in zip(filled, rows.split(list(sizes)), strict=True):
                part[: len(own)] = own
            rows = filled.flatten(0, 1)
        own = rows.new_empty(most, *rows.shape[1:])
        _reduce_scatter(own.view(-1), rows.reshape(-1), group=self.group)
        return own[: sizes[self.rank]]

    def batch(self, features: Tensor, labels: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """The batch of all processes: features twice, and labels.

        The gradient of the first ones is taken as what every process has alike, that of the second ones as a part that
        each has another one of. What reaches the features of this process is their sum, times the number of processes:
        data-parallel models divide by it.
        """
        same, part, whole = _WholeBatch.apply(features, labels, self, tuple(sizes))
        return same, part, whole

    def entered(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors that are alike on all processes, as the classes of each see them: gradients are summed up."""
        wanted = [t for t in tensors if t.requires_grad]
        found = iter(_Entered.apply(self, *wanted)) if wanted and torch.is_grad_enabled() else iter(wanted)
        return tuple(next(found) if t.requires_grad else t for t in tensors)

    def of_all_classes(self, values: Tensor) -> Tensor:
        """Columns of all classes, ``(B, C)``, from those of this process; a gradient is alike on all processes."""
        return _AllColumns.apply(values, self)

    def chosen(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Rows of classes wherever they are, ``(B, ...)``; a gradient is alike on all processes.

        Args:
            rows: Of the classes of this process.
            columns: ``(B,)`` places among these, -1 of classes elsewhere.
        """
        found = rows.new_zeros(len(columns), *rows.shape[1:]) + 0 * rows.sum()
        if len(rows):
            inside = (columns >= 0).view(-1, *[1] * (rows.dim() - 1))
            found = torch.where(inside, rows[columns.clamp(min=0)], 0.0)
        return _Sum.apply(found, self)

    def own_losses(self, losses: Tensor, own: slice) -> Tensor:
        """Losses of the samples of this process, from those of all; each process' count as its share of the whole."""
        return _OwnLosses.apply(losses, self, own)

    def own_classes(self, rows: Tensor) -> Tensor:
        """The weight vectors of the classes of this process, from its rows: whole classes, with all sub-centres."""
        if self.subcentres == 1 or self.size == 1:
            return rows
        most = self.subcentres - 1
        leads = [self._lead(rank) for rank in range(self.size)]
        lead = leads[self.rank]
        begun = torch.cat([rows[:lead], rows.new_zeros(most - lead, rows.shape[1])])
        # Of all processes, also where nothing is taken: the backward pass sums up on all of them.
        every = _Begun.apply(begun, self)
        behind = [rank * most + place for rank in range(self.rank + 1, self.size) for place in range(leads[rank])]
        missing = -(len(rows) - lead) % self.subcentres
        following = torch.tensor(behind[:missing], dtype=torch.int64, device=rows.device)
        return torch.cat([rows[lead:], every[following]])

    def _lead(self, rank: int) -> int:
        """Rows at the begin of a process that belong to a class of a process before it."""
        start, stop = self.bounds(rank)
        return min(-start % self.subcentres, stop - start)

    def put_together(
        self, found: Statistics, columns: Tensor, bias: Tensor | None, *, softmax: bool
    ) -> tuple[Statistics, Tensor | None]:
        """What all processes found, from what each did; biases of the targets, too, where there are any.

        Args:
            found: Of the classes of this process.
            columns: ``(B,)`` the targets' places among these, -1 where they are elsewhere.
            bias: ``(B,)`` biases of the targets, of any value where they are elsewhere.
            softmax: Whether the reductions are log-sum-exps.
        """
        inside = columns >= 0
        of_target = {"target": found.target, "length": found.length, "angle": found.angle, "bias": bias}
        given = {k: torch.where(inside, v, 0.0) for k, v in of_target.items() if v is not None and v.numel()}
        if found.total.numel():
            given["total"] = found.total
        packed = torch.stack([found.reduced, found.top, *given.values()])
        others = self.all(packed)
        # The gradient of what the others found is theirs.
        whole = torch.cat([others[: self.rank], packed.unsqueeze(0), others[self.rank + 1 :]]).unbind(1)
        reduced, top = whole[0], others[:, 1]
        if softmax:
            most = top.amax(0)
            reduced = (reduced + (top - most)).logsumexp(0)
        else:
            most, reduced = top.amax(0), reduced.sum(0)
        sums = dict(zip(given, (part.sum(0) for part in whole[2:]), strict=True))
        total_bias = sums.pop("bias", bias)
        return found._replace(reduced=reduced, top=most, **sums), total_bias

    # ------------------------------------------------------------------------------------------------ checks

    def agreed(self, head: HeadState, features: Any, labels: Any) -> tuple[list[int], bool]:
        """Sizes of the batches of all processes, after each has checked its own, and whether any needs a gradient.

        Raises:
            ArgumentError: On all processes, where one has something to refuse, or does something else.
        """
        refused: ArgumentError | None = None
        try:
            head.check(features, labels, head.takes_soft_labels and head.spec.soft_labels)
        except ArgumentError as error:
            refused = error
        needs = refused is None and features.requires_grad and torch.is_grad_enabled()
        found = self.met(
            head, features, "nothing" if refused else "soft labels" if labels.dim() == 2 else "labels", needs
        )
        if any(kind == "nothing" for _, kind, _ in found):
            why: list[Any] = [None] * self.size
            dist.all_gather_object(why, refused and refused.args, group=self.group)
            if refused is not None:
                raise refused
            rank = next(rank for rank, reason in enumerate(why) if reason)
            raise ArgumentError(why[rank][0], f"{why[rank][1]}, on process {rank}")
        return [size for size, _, _ in found], any(needs for _, _, needs in found)

    def met(self, head: HeadState, features: Tensor, kind: str, needs: bool = False) -> list[tuple[int, str, bool]]:
        """What all processes come with: the size of the batch, what is asked of it, whether it needs a gradient.

        Raises:
            ArgumentError: Where they ask for different things, or of features of different types.
        """
        given = kind != "nothing"
        facts = [
            len(features) if given else 0,
            _KINDS.index(kind),
            int(needs),
            _TYPES.index(features.dtype) if given else 0,
        ]
        device = "cpu" if head.weight.device.type == "cpu" else head.weight.device
        found = self.all(torch.tensor(facts, device=device)).tolist()
        if any(_KINDS[row[1]] == "nothing" for row in found):
            return [(size, _KINDS[place], bool(asked)) for size, place, asked, _ in found]
        for rank, (_, place, _, dtype) in enumerate(found):
            if _KINDS[place] != kind:
                other = f"with {kind} here and with {_KINDS[place]} on process {rank}"
                raise ArgumentError("features", f"must be given for the same on all processes, got them {other}")
            if dtype != facts[3]:
                theirs = f"got {_TYPES[dtype]} on process {rank}"
                raise ArgumentError("features", f"must have one type on all processes, {features.dtype} here, {theirs}")
        return [(size, _KINDS[place], bool(asked)) for size, place, asked, _ in found]


_KINDS = ["nothing", "labels", "soft labels", "no labels (logits or cosines)"]
_TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def _own_memory(tensor: Tensor) -> Tensor:
    """A copy from the begin of its memory on, with plain strides also of one row or column, as bytes need it."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class _WholeBatch(torch.autograd.Function):
    """See :meth:`Shards.batch`."""

    @staticmethod
    def forward(features: Tensor, labels: Tensor, shards: Shards, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        if labels.is_floating_point():
            whole, targets = shards.gathered(features, sizes), shards.gathered(labels, sizes)
        else:  # in one exchange, as bytes
            parts = [_own_memory(part.detach()).view(torch.uint8) for part in (features, labels.unsqueeze(1))]
            both = shards.gathered(torch.cat(parts, 1), sizes)
            left, right = map(_own_memory, both.split([part.shape[1] for part in parts], 1))
            whole, targets = left.view(features.dtype), right.view(labels.dtype).squeeze(1)
        return whole, at_least_float32(whole).clone(), targets

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        features, _, ctx.shards, ctx.sizes = inputs
        ctx.dtype = features.dtype
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)  # what a member makes no use of is not sent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shards: Shards = ctx.shards
        same, part, _ = grads
        found = [] if part is None else [shards.scattered(part, ctx.sizes)]
        if same is not None:
            found.append(same.split(list(ctx.sizes))[shards.rank])
        if not found:
            return None, None, None, None
        total = found[0] if len(found) == 1 else found[0] + found[1]
        return (total * shards.size).to(ctx.dtype), None, None, None


class _Entered(torch.autograd.Function):
    """See :meth:`Shards.entered`."""

    @staticmethod
    def forward(shards: Shards, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.shards = inputs[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total = ctx.shards.sum(torch.cat([grad.flatten() for grad in grads]))
        parts = total.split([grad.numel() for grad in grads])
        return (None, *(part.view_as(grad) for part, grad in zip(parts, grads, strict=True)))


class _Sum(torch.autograd.Function):
    """Sum over the processes, whose gradient is alike on all of them."""

    @staticmethod
    def forward(values: Tensor, shards: Shards) -> Tensor:
        return shards.sum(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None: ...

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _AllColumns(torch.autograd.Function):
    """See :meth:`Shards.of_all_classes`."""

    @staticmethod
    def forward(values: Tensor, shards: Shards) -> Tensor:
        ends = [shards.classes_of(rank) for rank in range(shards.size)]
        return shards.gathered(values.mT, [stop - start for start, stop in ends]).mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.shards = inputs[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        start, stop = ctx.shards.classes
        return grads[0][:, start:stop], None


class _OwnLosses(torch.autograd.Function):
    """See :meth:`Shards.own_losses`."""

    @staticmethod
    def forward(losses: Tensor, shards: Shards, own: slice) -> Tensor:
        return losses[own].clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        losses, ctx.shards, ctx.own = inputs
        ctx.count = len(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        every = grads[0].new_zeros(ctx.count)
        every[ctx.own] = grads[0] / ctx.shards.size
        return ctx.shards.sum(every), None, None


class _Begun(torch.autograd.Function):
    """As many rows of every process; each row's gradient is the sum of what all processes have to say of it."""

    @staticmethod
    def forward(rows: Tensor, shards: Shards) -> Tensor:
        return shards.all(rows).flatten(0, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.shards = inputs[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shards: Shards = ctx.shards
        return shards.scattered(grads[0], [len(grads[0]) // shards.size] * shards.size), None


class Compared(NamedTuple):
    """The classes that a batch is compared with on this process, and what is known of all that it is compared with."""

    weight: Tensor
    """``(K * subcentres, D)``."""
    columns: Tensor
    """``(B,)`` the targets' places among them, -1 where they are elsewhere."""
    bias: Tensor | None
    """``(K,)``."""
    class_weights: Tensor | None
    """``(K,)``."""
    every: Tensor | None
    """Class weights of all classes compared with, on whatever process."""
    number: int
    """How many these are."""


# ------------------------------------------------------------------------------------------------- there and back


def mesh_for(head: HeadState, mesh: Any) -> Any:
    """The mesh to put a head on, checked on all processes.

    Raises:
        ArgumentError: On all processes, where a mesh is of another kind, or heads differ.
    """
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: PLC0415 - slow to import

    if not (dist.is_available() and dist.is_initialized()):
        raise ArgumentError("mesh", "needs processes: start them by torchrun, and call init_process_group")
    kind = head.weight.device.type
    if mesh is None:
        mesh = init_device_mesh(kind, (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError("mesh", f"must be a DeviceMesh (init_device_mesh), got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ArgumentError("mesh", f"must have one dimension, got {mesh.ndim}: name one of them, as in mesh['head']")
    if mesh.get_coordinate() is None:
        raise ArgumentError("mesh", f"must hold this process, {dist.get_rank()}, got {mesh}")
    words: dict[str, Any] = {
        "member": type(head).__name__,
        "classes": head.classes,
        "dim": head.dim,
        "subcentres": head.subcentres,
        "type": str(head.weight.dtype),
        "device": kind,
        "options": repr(head),
        "sharded": Shards.of(head.weight) is not None,
    }
    _check_alike(words, mesh)
    if words["sharded"]:
        raise ArgumentError("mesh", "cannot take a head that is sharded already: head.unshard() first")
    if mesh.device_type != kind:
        raise ArgumentError("mesh", f"must be of the head's device, {kind}, got {mesh.device_type}")
    return mesh


def _check_alike(words: dict[str, Any], mesh: Any) -> None:
    every: list[Any] = [None] * mesh.size()
    dist.all_gather_object(every, words, group=mesh.get_group())
    for name, first in every[0].items():
        for rank, other in enumerate(every):
            if other[name] != first:
                found = f"{first} on process 0 and {other[name]} on process {rank}"
                raise ArgumentError("mesh", f"needs the same head on all processes, got the {name} {found}")


def divided(tensor: Tensor, mesh: Any) -> Tensor:
    """A tensor by its rows over a mesh, as process 0 has it; of a parameter a new parameter."""
    from torch.distributed.tensor import Shard, distribute_tensor  # noqa: PLC0415 - slow to import

    found = distribute_tensor(tensor.detach(), mesh, [Shard(0)])
    return nn.Parameter(found, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def send_first(head: HeadState, mesh: Any) -> None:
    """Give all processes what the first has beside its classes: scales, rotations, running numbers, sizes by class."""
    group = mesh.get_group()
    for name, tensor in (*head.named_parameters(), *head.named_buffers()):
        if name not in head.class_rows:
            dist.broadcast(tensor.data, group_src=0, group=group)


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor divided as another one, or a divided one whole.

    Example:
        >>> like(torch.ones(2), torch.zeros(2))
        tensor([1., 1.])
    """
    shards = Shards.of(other)
    if shards is None:
        return whole(tensor)
    from torch.distributed.tensor import DTensor, Shard  # noqa: PLC0415 - slow to import

    mesh: Any = other.device_mesh  # type: ignore[attr-defined]
    rows = tensor[slice(*shards.bounds())].to(other.device)
    stride = torch.empty(tensor.shape, device="meta").stride()
    found: Tensor = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=stride)
    return found


def by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those that are whole and those that are divided, for torch's operations on lists, which take one kind.

    Example:
        >>> [len(part) for part in by_kind([torch.ones(1), torch.ones(2)])]
        [2]
    """
    parts: tuple[list[Tensor], list[Tensor]] = [], []
    for tensor in tensors:
        parts[is_sharded(tensor)].append(tensor)
    return [part for part in parts if part]


def local(tensor: Tensor) -> Tensor:
    """The rows of a tensor that this process has, differentiable; all of one that is whole.

    Example:
        >>> local(torch.ones(2)).shape
        torch.Size([2])
    """
    found: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return found
