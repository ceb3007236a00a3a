"""What contracts compare with: differences for derivatives, random rotations, and a host that is never asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LOW = (torch.float16, torch.bfloat16)

_FROM_HOST = {torch.tensor, torch.as_tensor, torch.Tensor.new_tensor, torch.Tensor.item, torch.nonzero}
_TO_HOST = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers that are the same each time.

    Example:
        >>> bool((draw(3) == draw(3)).all())
        True
    """
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers.to(dtype)


def rotation(d: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """A random rotation ``(d, d)``.

    Example:
        >>> round(float(torch.linalg.det(rotation(4))), 6)
        1.0
    """
    q, r = torch.linalg.qr(draw(d, d, seed=seed))
    q = q * r.diagonal().sign()
    q[:, 0] *= torch.linalg.det(q).sign()
    return q.to(dtype)


def close(found: Tensor, wanted: Tensor, tolerance: float, what: str = "") -> None:
    """Raise unless two tensors agree up to ``tolerance`` of the larger of 1 and the wanted number."""
    assert found.shape == wanted.shape, f"{what}: shape {tuple(found.shape)}, should be {tuple(wanted.shape)}"
    found, wanted = found.detach().double(), wanted.detach().double()
    error = (found - wanted).abs() / wanted.abs().clamp(min=1)
    # "not all within", so that NaN agrees with nothing.
    assert bool((error <= tolerance).all()), f"{what}: {found} should be {wanted}"


def finite(tensors: Iterable[Tensor | None], what: str = "") -> None:
    """Raise where a tensor is missing or has a number that is none."""
    for tensor in tensors:
        assert tensor is not None, f"{what}: there is no gradient"
        assert bool(tensor.isfinite().all()), f"{what}: {tensor}"


def difference(function: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Central differences of a function of each number, and where they say something (not at kinks and jumps)."""
    left, right = (function(at) - function(at - step)) / step, (function(at + step) - function(at)) / step
    return (left + right) / 2, (left - right).abs() <= 1e-3 * (1 + left.abs() + right.abs())


def derivative(function: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor], at: Tensor, what: str) -> None:
    """Raise unless ``slope`` is the derivative of ``function`` at these numbers (in float64), kinks left out."""
    wanted, smooth = difference(function, at)
    assert bool(smooth.float().mean() > 0.5), f"{what}: the function has kinks everywhere"
    found = slope(at).expand_as(wanted)
    close(found[smooth], wanted[smooth], 2e-5, f"{what} at {at[smooth]}")


def gradient(function: Callable[..., Tensor], *leaves: Tensor, what: str = "the gradient") -> None:
    """Raise unless the gradients of a sum are those of differences, in random directions (all tensors in float64)."""
    own = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    grads = torch.autograd.grad(function(*own).sum(), own, allow_unused=True)
    for index, grad in enumerate(grads):
        for seed in range(2):
            along = draw(*leaves[index].shape, seed=100 + seed)
            along = along / along.norm().clamp(min=1e-12)

            def moved(t: Tensor, index: int = index, along: Tensor = along) -> Tensor:
                places = [leaf + t * along if i == index else leaf for i, leaf in enumerate(leaves)]
                with torch.no_grad():
                    return function(*places).sum()

            wanted, smooth = difference(moved, torch.zeros((), dtype=torch.float64), 1e-5)
            found = torch.zeros_like(wanted) if grad is None else (grad * along).sum()
            if bool(smooth):
                close(found, wanted, 1e-4, f"{what} by argument {index}")


def transforms(function: Callable[..., Tensor], *leaves: Tensor, what: str = "it", tolerance: float = 1e-7) -> None:
    """Raise unless ``torch.func`` differentiates once, twice and sample by sample as plain autograd does.

    The second derivatives of both are compared with differences of the first. All tensors are in float64; the function
    may return any shape.

    Example:
        >>> transforms(lambda x, w: (x * w).sin(), draw(3), draw(3, seed=1))
    """
    func, places = torch.func, tuple(range(len(leaves)))
    along = tuple(draw(*leaf.shape, seed=200 + index) for index, leaf in enumerate(leaves))
    weights = draw(*function(*leaves).shape, seed=300)

    def total(*values: Tensor) -> Tensor:
        return (function(*values) * weights).sum()

    def gradients(*values: Tensor, graph: bool = False) -> list[Tensor]:
        own = [value.detach().clone().requires_grad_() for value in values]
        grads = torch.autograd.grad(total(*own), own, create_graph=graph, materialize_grads=True)
        if not graph:
            return list(grads)
        slope = torch.stack([(g * a).sum() for g, a in zip(grads, along, strict=True)]).sum()
        if not slope.requires_grad:
            return [torch.zeros_like(value) for value in values]
        return list(torch.autograd.grad(slope, own, materialize_grads=True))

    def agree(found: Iterable[Tensor], wanted: Iterable[Tensor], how: str, within: float = tolerance) -> None:
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            close(one, other, within, f"{what}: {how} by argument {index}")

    step = 1e-5
    first, twice = gradients(*leaves), gradients(*leaves, graph=True)
    ahead, behind = (gradients(*(v + s * a for v, a in zip(leaves, along, strict=True))) for s in (step, -step))
    agree(twice, [(b - a) / (2 * step) for a, b in zip(behind, ahead, strict=True)], "the second derivative", 1e-4)
    by_func = func.grad(total, places)
    agree(by_func(*leaves), first, "torch.func.grad")
    slope = torch.stack([(g * a).sum() for g, a in zip(first, along, strict=True)]).sum()
    agree([func.jvp(total, leaves, along)[1]], [slope], "torch.func.jvp")
    agree(func.jvp(by_func, leaves, along)[1], twice, "torch.func.jvp of grad")
    agree(func.vjp(by_func, *leaves)[1](along), twice, "torch.func.vjp of grad")
    rows = func.hessian(total, places)(*leaves)
    products = [sum(torch.tensordot(h, a, a.dim()) for h, a in zip(row, along, strict=True)) for row in rows]
    agree(products, twice, "torch.func.hessian")
    samples = [torch.stack([v, v + 0.1 * a, v - 0.2 * a]) for v, a in zip(leaves, along, strict=True)]
    each = zip(*(gradients(*values) for values in zip(*samples, strict=True)), strict=True)
    agree(torch.vmap(by_func)(*samples), map(torch.stack, each), "torch.vmap of grad")


def twice(function: Callable[..., Tensor], *leaves: Tensor, what: str = "it") -> list[Tensor]:
    """Products with the Hessian of a sum; raise where one is no number, or first derivatives are not those without it.

    For places where powers of a norm have no derivative, such as zero vectors.

    Example:
        >>> twice(lambda x: x.square(), torch.zeros(1))[0] == 2 * draw(1, seed=400).float()
        tensor([True])
    """
    own = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    plain = torch.autograd.grad(function(*own).sum(), own, materialize_grads=True)
    first = torch.autograd.grad(function(*own).sum(), own, create_graph=True, materialize_grads=True)
    for one, other in zip(first, plain, strict=True):
        close(one, other, 1e-12, f"the gradient of {what}, to be differentiated again,")
    along = [draw(*leaf.shape, seed=400 + index, dtype=leaf.dtype) for index, leaf in enumerate(own)]
    slope = torch.stack([(g * a).sum() for g, a in zip(first, along, strict=True)]).sum()
    if not slope.requires_grad:
        return [torch.zeros_like(leaf) for leaf in own]
    second = torch.autograd.grad(slope, own, materialize_grads=True)
    finite(second, f"the second derivative of {what}")
    return list(second)


class Host(TorchFunctionMode):
    """Refuses what would make a GPU wait in a step: numbers read off tensors, tensors made of numbers of the host.

    Example:
        >>> with Host():
        ...     torch.ones(2).sum().item()
        Traceback (most recent call last):
        AssertionError: a step must not wait for the host: item

    Args:
        values: Look at every operation, also those of backward passes. Off where a check of the arguments on the CPU
            may look at values; ``item`` is refused all the same.
    """

    def __init__(self, *, values: bool = True) -> None:
        super().__init__()
        self._below = _Values() if values else nullcontext()

    def __enter__(self) -> Any:
        self._below.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._below.__exit__(*error)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert function not in _FROM_HOST, f"a step must not wait for the host: {function.__name__}"
        return function(*args, **(kwargs or {}))


class _Values(TorchDispatchMode):
    """Sees every operation, those of backward passes included."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert function not in _TO_HOST, f"a step must not wait for the device: {function}"
        return function(*args, **(kwargs or {}))


def compiled(function: Callable[..., Tensor], *arguments: Tensor, tolerance: float = 1e-5) -> None:
    """Raise unless compiled code is one graph that gives the same numbers and gradients.

    The backend runs what was traced as it is: a break of the graph shows in any, and this one takes milliseconds
    where another takes seconds.
    """
    found = []
    for call in (function, torch.compile(function, fullgraph=True, backend="eager", dynamic=False)):
        own = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in arguments]
        value = call(*own)
        leaves = [leaf for leaf in own if leaf.requires_grad]
        grads: Iterable[Tensor | None] = ()
        if value.requires_grad:
            grads = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
        found.append((value.detach(), [g if g is not None else torch.zeros(()) for g in grads]))
    (wanted, expected), (value, own_grads) = found
    close(value, wanted, tolerance, "compiled")
    for one, other in zip(own_grads, expected, strict=True):
        close(one, other, 10 * tolerance, "the gradient of compiled code")
