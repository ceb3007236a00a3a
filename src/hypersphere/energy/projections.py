r"""Random matrices that bring vectors to few dimensions, drawn again at times and kept with a run.

What is drawn depends on a seed, a number of the draw and the name of the matrix alone, so that all processes of a run
draw the same, and a resumed run what it would have drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from hypersphere.errors import check_choice

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(method: F) -> F:
    """Keep a function out of graphs, as ``torch.compiler.disable``, which imports the compiler where it decorates."""
    found: Any = _disable_dynamo(method)
    return cast(F, found)


def untransformed() -> Any:
    """Context in which torch.func is not at work: for what is drawn, in which no transform has a part."""
    return torch._C._DisableFuncTorch()


KINDS = ("gaussian", "srht", "countsketch")
"""Random matrices by name."""


def subsampled_hadamard(rows: Tensor, signs: Tensor, dim: int) -> Tensor:
    r"""Rows of a Hadamard matrix with signs of the columns: :math:`P = R H D / \sqrt k`.

    With random rows and signs :math:`E[P^T P] = I` (subsampled randomised Hadamard transform).

    Args:
        rows: k different numbers ``(..., k)`` of rows of the matrix, in Sylvester order.
        signs: ``(..., d)``, 1 or -1.
        dim: k.

    Returns:
        ``(..., k, d)``, type of ``signs``.

    Example:
        >>> subsampled_hadamard(torch.tensor([0, 1, 2, 3]), torch.ones(3), 4)
        tensor([[ 0.5000,  0.5000,  0.5000],
                [ 0.5000, -0.5000,  0.5000],
                [ 0.5000,  0.5000, -0.5000],
                [ 0.5000, -0.5000, -0.5000]])
    """
    common = rows.unsqueeze(-1) & torch.arange(signs.shape[-1], device=rows.device)
    for shift in (32, 16, 8, 4, 2, 1):  # folds all bits onto the last one: whether the number of ones is odd
        common = common ^ (common >> shift)
    return (1 - 2 * (common & 1)) * signs.unsqueeze(-2) * dim**-0.5


def count_sketch(rows: Tensor, signs: Tensor, dim: int) -> Tensor:
    r"""The matrix with one number in each column: ``signs`` ``(..., d)`` in the rows ``rows`` ``(..., d)``.

    With random rows and signs :math:`E[P^T P] = I`. It may send a vector to zero, and two sparse ones to one direction.

    Args:
        rows: Where the number of each column is, from 0 to k - 1.
        signs: ``(..., d)``, 1 or -1.
        dim: k.

    Returns:
        ``(..., k, d)``, type of ``signs``.

    Example:
        >>> count_sketch(torch.tensor([1, 0, 1]), torch.tensor([1.0, 1.0, -1.0]), 2)
        tensor([[ 0.,  1.,  0.],
                [ 1.,  0., -1.]])
    """
    empty = signs.new_zeros(*signs.shape[:-1], dim, signs.shape[-1])
    return empty.scatter(-2, rows.unsqueeze(-2), signs.unsqueeze(-2))


@torch.no_grad()
def draw(out: Tensor, kind: str, generator: torch.Generator) -> Tensor:
    r"""Fill ``out`` with random projections.

    Args:
        out: ``(count, k, d)``; a vector of integers gets a random permutation, whatever the kind.
        kind: ``"gaussian"`` for independent N(0, 1), :math:`E[P^T P] = k I`; ``"srht"`` for
            :func:`subsampled_hadamard` (needs k <= d) or ``"countsketch"`` for :func:`count_sketch`, both of
            :math:`E[P^T P] = I`.
        generator: Source of randomness, on the device of ``out``.

    Returns:
        ``out``.

    Example:
        >>> draw(torch.empty(1, 2, 3), "countsketch", torch.Generator().manual_seed(0)).abs().sum(1)
        tensor([[1., 1., 1.]])
    """
    check_choice("kind", kind, KINDS)
    if not out.is_floating_point():
        return out.copy_(torch.randperm(out.numel(), generator=generator, device=out.device))
    if kind == "gaussian":
        return out.normal_(generator=generator)
    count, dim, d = out.shape
    options: dict[str, Any] = {"generator": generator, "device": out.device}
    signs = (2 * torch.randint(2, (count, d), **options) - 1).to(out.dtype)
    if kind == "countsketch":
        return out.copy_(count_sketch(torch.randint(dim, (count, d), **options), signs, dim))
    order = 1 << (d - 1).bit_length()
    rows = torch.rand(count, order, **options).argsort(1)[:, :dim]
    return out.copy_(subsampled_hadamard(rows, signs, dim))


class ProjectionBank(nn.Module):
    """Random tensors by name, made when first asked for, as buffers that are saved and restored with their module.

    A state can be loaded before anything was asked for: what it holds is then made.

    Args:
        kind: What :func:`draw` is to draw.
        learned: Hold parameters, not buffers.

    Example:
        >>> bank = ProjectionBank("gaussian")
        >>> bank.get("d8", (1, 3, 8), like=torch.zeros(1)).shape, list(bank.state_dict())
        (torch.Size([1, 3, 8]), ['d8', '_extra_state'])
    """

    def __init__(self, kind: str = "gaussian", *, learned: bool = False) -> None:
        super().__init__()
        check_choice("kind", kind, KINDS)
        self.kind, self.learned = kind, learned
        self.drawn: tuple[int, int] | None = None
        """Seed and number of the last draw."""
        self.calls = 0
        """How often the owner was called without anybody telling it the step."""

    def get(self, name: str, shape: Sequence[int], like: Tensor, *, integer: bool = False) -> Tensor:
        """The tensor of this name, made with this shape if there is none, on the device and of the type of ``like``.

        Integers (``integer``) are a permutation.
        """
        held = self._parameters if self.learned else self._buffers
        found = held.get(name)
        dtype = torch.int64 if integer else like.dtype
        if found is None or found.device != like.device or found.dtype != dtype:
            found = self._make(name, shape, like.device, dtype, found)
        return found

    @uncompiled
    def _make(
        self, name: str, shape: Sequence[int], device: torch.device, dtype: torch.dtype, found: Tensor | None
    ) -> Tensor:
        """A new tensor, drawn, or the one found with another type or device."""
        with untransformed():
            if found is None or found.is_meta:
                value = self._draw(name, torch.empty(*shape, device=device, dtype=dtype))
            else:
                value = found.detach().to(device, dtype)
            return self._hold(name, value)

    def _hold(self, name: str, value: Tensor) -> Tensor:
        if self.learned:
            value = nn.Parameter(value)
            self.register_parameter(name, value)
        else:
            self.register_buffer(name, value)
        return value

    def _draw(self, name: str, out: Tensor) -> Tensor:
        if out.is_meta:
            return out
        seed, number = self.drawn or (0, 0)
        key = hashlib.blake2b(f"{seed} {number} {name}".encode(), digest_size=8).digest()
        return draw(out, self.kind, torch.Generator(out.device).manual_seed(int.from_bytes(key, "big") >> 1))

    @uncompiled
    def redraw(self, seed: int, number: int) -> None:
        """Draw everything again, in place; nothing happens where the last draw had this seed and number."""
        if (seed, number) == self.drawn:
            return
        self.drawn = (seed, number)
        with untransformed():
            for name, tensor in (*self.named_buffers(), *self.named_parameters()):
                self._draw(name, tensor.detach())

    def get_extra_state(self) -> Tensor:
        """Seed and number of the last draw, and the calls counted, as a tensor of integers."""
        return torch.tensor([*(self.drawn or (-1, -1)), self.calls])

    def set_extra_state(self, state: Tensor) -> None:
        """What :meth:`get_extra_state` gave."""
        seed, number, self.calls = state.tolist()
        self.drawn = None if number < 0 else (seed, number)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        held = self._parameters if self.learned else self._buffers
        for key, value in state_dict.items():
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and "." not in name and name != "_extra_state" and name not in held:
                self._hold(name, torch.empty_like(value))
        super()._load_from_state_dict(state_dict, prefix, *args)
