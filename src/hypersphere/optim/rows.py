"""Optimisation of the few rows of a weight that have a gradient, as those of heads with very many classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hypersphere.errors import ArgumentError, check_range
from hypersphere.neurons import is_sharded
from hypersphere.nn.sharding import local
from hypersphere.selection import check_model


class _RowOptimiser(Optimizer):
    """Walks over parameters and those of their rows that have a gradient; a member says what becomes of rows.

    Rows are updated as tensors of their own, of at least 32 bits; nothing in it waits for the device.
    """

    def __init__(self, params: Iterable[Any], lr: float | Tensor, weight_decay: float, **options: Any) -> None:
        check_range("lr", float(lr), 0)
        check_range("weight_decay", weight_decay, 0)
        # Capturable: that counts of steps are loaded as 32-bit numbers onto the device of their parameter.
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **options, "capturable": True})

    def _slots(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names of the state that rows have: ``step`` is a number a row, any other of the size of the row."""
        raise NotImplementedError

    def _move(self, values: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """Update some rows ``(n, ...)`` and their state by their gradient, all of them in place."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        A sharded parameter (``DTensor``) takes the sparse gradient of its own rows, of their local shape, from its
        attribute ``local_grad``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = [(p, _gradient(p), group) for group in self.param_groups for p in group["params"]]
        for parameter, gradient, group in found:
            if gradient is not None:
                self._update(parameter, gradient, group)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those of the own rows of sharded parameters included."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for parameter in group["params"]:
                if getattr(parameter, "local_grad", None) is not None:
                    parameter.local_grad = None

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        held = {"": local(parameter)}
        for name in self._slots(group):
            if name not in state:
                state[name] = _counts(parameter) if name == "step" else torch.zeros_like(parameter)
            held[name] = local(state[name])
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        rows, gradient = _merged(gradient, dtype) if gradient.is_sparse else (None, gradient.to(dtype))
        moved = {name: (value if rows is None else value[rows]).to(dtype) for name, value in held.items()}
        self._move(moved[""], gradient, moved, group)
        for name, value in held.items():
            if rows is None:
                value.copy_(moved[name])
            else:
                value.index_copy_(0, rows, moved[name].to(value.dtype))


class RowSGD(_RowOptimiser):
    r"""SGD with momentum and weight decay that touches only the rows that have a gradient.

    For parameters with a sparse gradient (a head with ``sample_rate`` below 1 and ``sparse=True``) the rows of the
    gradient are updated exactly as :class:`torch.optim.SGD` would, and all others are left alone, with their momentum:
    a step costs what its sampled classes cost. Parameters with a dense gradient are updated as usual, so that one
    optimiser serves a whole model.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate.
        momentum: Momentum.
        weight_decay: Weight decay, added to the gradient.
        nesterov: Nesterov momentum.

    Example:
        >>> import hypersphere as hs
        >>> head = hs.losses.CosFace(8, 1000, sample_rate=0.1, sparse=True)
        >>> optimiser = RowSGD(head.parameters(), lr=0.1, momentum=0.9)
        >>> head(torch.randn(4, 8), torch.tensor([1, 2, 3, 4])).backward()
        >>> optimiser.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        check_range("momentum", momentum, 0)
        if nesterov and not momentum:
            raise ArgumentError("nesterov", "needs momentum above 0")
        super().__init__(params, lr, weight_decay, momentum=momentum, nesterov=nesterov)

    def _slots(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def _move(self, values: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        gradient = gradient.add(values, alpha=group["weight_decay"])
        if group["momentum"]:
            buffer = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
            gradient = gradient.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
        values.sub_(group["lr"] * gradient)


class RowAdamW(_RowOptimiser):
    r"""Adam with decoupled weight decay that touches only the rows that have a gradient.

    A row :math:`w` with gradient :math:`g`, updated for the :math:`t`-th time, becomes

    .. math::

        m &\leftarrow \beta_1 m + (1 - \beta_1) g, \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2, \\
        w &\leftarrow (1 - \eta \lambda) w
            - \eta \, \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}.

    Every row counts its own updates :math:`t`: the means :math:`m` and :math:`v` of a row that a sparse gradient (of a
    head with ``sample_rate`` below 1 and ``sparse=True``) leaves out rest, as do its count and the row itself, which is
    not decayed. So a row that is sampled for the first time late in training takes the first step of
    :class:`torch.optim.AdamW`. (:class:`torch.optim.SparseAdam` counts steps of the whole parameter, which makes that
    step :math:`(1 - \beta_1) / \sqrt{1 - \beta_2}`, about 3, times as long.) With dense gradients all rows count alike,
    and the steps are those of :class:`torch.optim.AdamW`.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate :math:`\eta`.
        betas: Decay :math:`\beta_1, \beta_2` of the means of gradients and of their squares.
        eps: Added to the root of the squares, :math:`\epsilon`.
        weight_decay: Weight decay :math:`\lambda`.

    Example:
        >>> import hypersphere as hs
        >>> head = hs.losses.CosFace(8, 1000, sample_rate=0.1, sparse=True)
        >>> optimiser = RowAdamW(head.parameters(), lr=1e-3)
        >>> head(torch.randn(4, 8), torch.tensor([1, 2, 3, 4])).backward()
        >>> optimiser.step()
        >>> optimiser.state[head.weight]["step"].sum()
        tensor(100.)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        if not (isinstance(betas, (tuple, list)) and len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
            raise ArgumentError("betas", f"must be two numbers of at least 0 and below 1, got {betas!r}")
        check_range("eps", eps, 0)
        super().__init__(params, lr, weight_decay, betas=betas, eps=eps)

    def _slots(self, group: dict[str, Any]) -> tuple[str, ...]:
        return "step", "exp_avg", "exp_avg_sq"

    def _move(self, values: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        first, second = group["betas"]
        count = state["step"].add_(1)
        mean = state["exp_avg"].lerp_(gradient, 1 - first)
        square = state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        values.mul_(1 - group["lr"] * group["weight_decay"])
        root = (square / _warmed(second, count)).sqrt_().add_(group["eps"])
        values.sub_(group["lr"] * mean / _warmed(first, count) / root)


def _warmed(beta: float, count: Tensor) -> Tensor | float:
    """``1 - beta ** count`` with all its digits, where ``beta`` is close to 1, too."""
    return -torch.expm1(count * math.log(beta)) if beta else 1.0


def _gradient(parameter: Any) -> Tensor | None:
    """The gradient of what this process holds of a parameter."""
    gradient, own = parameter.grad, getattr(parameter, "local_grad", None)
    if gradient is not None and is_sharded(parameter):
        gradient = local(gradient.redistribute(placements=parameter.placements))
    if own is not None:
        gradient = own if gradient is None else gradient + own
    if gradient is not None and gradient.is_sparse and gradient.sparse_dim() != 1:
        given = f"got one of {gradient.sparse_dim()} sparse dimensions"
        raise ArgumentError("params", f"must have dense gradients or sparse ones of whole rows, {given}")
    return gradient


def _counts(parameter: Any) -> Tensor:
    """A zero for each row, sharded as the rows are."""
    shape = (*parameter.shape[:1], *[1] * (parameter.dim() - 1))
    if not is_sharded(parameter):
        return torch.zeros(shape, device=parameter.device)
    from torch.distributed import tensor as sharded  # noqa: PLC0415 (half a second, for sharded parameters alone)

    places = [place if place.is_shard(0) else sharded.Replicate() for place in parameter.placements]
    return sharded.zeros(shape, device_mesh=parameter.device_mesh, placements=places)


def _merged(gradient: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows and gradients of a sparse gradient; where a row is there twice, each time with the sum.

    Unlike ``coalesce`` it gives as many rows as there were, for which nothing has to wait for the device. A row that is
    there twice is then updated twice from the same state, to the same values.
    """
    rows, values = gradient._indices()[0], gradient._values().to(dtype)
    if gradient.is_coalesced():
        return rows, values
    ordered, order = rows.sort()
    place = torch.zeros_like(rows)
    place[order[1:]] = (ordered[1:] != ordered[:-1]).cumsum(0)
    return rows, torch.zeros_like(values).index_add_(0, place, values)[place]


def row_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights whose gradients hold some rows alone, by name: of sampled heads and embeddings with ``sparse=True``.

    ``DistributedDataParallel`` takes no such gradients and must leave these to :func:`gather_rows`.

    Example:
        >>> import hypersphere as hs
        >>> head = hs.losses.ArcFace(8, 1000, sample_rate=0.1, sparse=True)
        >>> list(row_parameters(nn.ModuleDict({"body": nn.Linear(4, 8), "head": head})))
        ['head.weight']
    """
    check_model(module)
    sparse = [part for part in module.modules() if getattr(getattr(part, "spec", part), "sparse", False)]
    weights = {id(getattr(part, "weight", None)) for part in sparse}
    return {name: p for name, p in module.named_parameters() if id(p) in weights and p.requires_grad}


BY_NAME: dict[str, Callable[..., Optimizer]] = {"sgd": RowSGD, "adamw": RowAdamW}
"""What stands in for the optimiser of this name where gradients are sparse."""


@torch.no_grad()
def gather_rows(parameters: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    r"""Replace the gradients of parameters that each process has a copy of by their means over all processes.

    Call it between ``backward`` and the optimiser's step (and before gradients are clipped), on every process. Of
    sparse gradients the rows travel and not the whole parameter: the mean has the rows that any process has,
    :math:`\bar g_c = \frac 1 P \sum_p g_c^{(p)}`, where a process without row :math:`c` counts as zero, and each of
    them once (it is coalesced, also where there is one process). A process on which a parameter has no gradient counts
    as zero altogether. The result has the same bits on all processes. Sharded parameters (``DTensor``), whose rows are
    each process's own, are left as they are.

    Args:
        parameters: In the same order on all processes.
        group: The processes; by default all of them.

    Raises:
        ArgumentError: On all processes, where a gradient is sparse on some and dense on others.

    Example:
        >>> import hypersphere as hs
        >>> head = hs.losses.CosFace(8, 1000, sample_rate=0.1, sparse=True)
        >>> head(torch.randn(4, 8), torch.tensor([1, 2, 3, 4])).backward()
        >>> gather_rows(row_parameters(head).values())
        >>> head.weight.grad.indices().shape  # rows that travelled, had there been several processes
        torch.Size([1, 100])
    """
    copied = [p for p in parameters if not is_sharded(p)]
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
    if not (several and copied):
        for p in copied:
            p.grad = p.grad.coalesce() if p.grad is not None and p.grad.is_sparse else p.grad
        return
    own = [-1 if p.grad is None else p.grad._nnz() if p.grad.is_sparse else -2 for p in copied]
    counts = _gathered(torch.tensor(own, device=copied[0].device), group)
    rows = [*zip(*(held.tolist() for held in counts), strict=True)]  # of each parameter, on all processes
    for index, held in enumerate(rows):
        if max(held) >= 0 and min(held) == -2:
            found = f"got both for the parameter at {index}"
            raise ArgumentError("parameters", f"must have sparse gradients on all processes or on none, {found}")
    for p, held in zip(copied, rows, strict=True):
        if max(held) >= 0:
            p.grad = _mean_rows(p, [max(count, 0) for count in held], group)
        elif min(held) == -2:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad.div_(len(held)), group=group)


def _mean_rows(parameter: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """The mean of a parameter's sparse gradients, of which each process has so many rows."""
    rows = torch.zeros(max(counts), dtype=torch.int64, device=parameter.device)
    values = parameter.new_zeros(max(counts), *parameter.shape[1:])
    if parameter.grad is not None:
        rows[: parameter.grad._nnz()] = parameter.grad._indices()[0]
        values[: parameter.grad._nnz()] = parameter.grad._values() / len(counts)
    places, gradients = (
        torch.cat([part[:count] for part, count in zip(_gathered(padded, group), counts, strict=True)])
        for padded in (rows, values)
    )
    mean = torch.sparse_coo_tensor(places.unsqueeze(0), gradients, parameter.shape, check_invariants=False)
    return mean.coalesce()


def _gathered(values: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """A tensor of every process, of the same shape on all."""
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values, group=group)
    return parts
