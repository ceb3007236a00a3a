r"""Regularisers of weights: hyperspherical energy (how evenly directions fill the sphere) and orthogonality."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.geometry import at_least_float32, full_precision, normalise, safe_sqrt
from hypersphere.nn import Decoupled
from hypersphere.registry import Registry

energies: Registry[nn.Module] = Registry("energy")


def create(name: str, **options: Any) -> nn.Module:
    """Build an energy by name; ``hypersphere list energies`` prints the names and their options.

    Example:
        >>> create("mhe", s=1)(torch.eye(3))
        tensor(0.7071)
    """
    return energies.create(name, **options)


def hyperspherical_energy(
    vectors: Tensor, s: float = 2.0, *, half_space: bool = False, reduction: str = "mean"
) -> Tensor:
    r"""Riesz energy of the directions of the rows, over ordered pairs.

    .. math:: E_s = \sum_{i \ne j} \|u_i - u_j\|^{-s}, \qquad E_0 = \sum_{i \ne j} -\log \|u_i - u_j\|

    Args:
        vectors: ``(n, d)``; norms do not matter. Equal directions count as 1e-3 apart (in float32), so the value
            stays finite.
        s: Riesz exponent, at least 0; 0 is the logarithmic energy.
        half_space: Add the mirror image of every vector, so that opposite directions count as equal.
        reduction: ``"mean"`` over the ordered pairs or ``"sum"``.

    Returns:
        Scalar, in float32 or wider; 0 where there is no pair.

    Example:
        >>> hyperspherical_energy(torch.tensor([[1.0, 0.0], [-5.0, 0.0]]), s=1)
        tensor(0.5000)
    """
    check_range("s", s, 0)
    check_choice("reduction", reduction, ("mean", "sum"))
    if vectors.dim() != 2:
        raise ArgumentError("vectors", f"must have shape (n, d), got {tuple(vectors.shape)}")
    units = normalise(at_least_float32(vectors))
    if half_space:
        units = torch.cat([units, -units])
    n = len(units)
    with full_precision(units):
        squared = 2 - 2 * units @ units.mT
    squared = squared.clamp(min=8 * torch.finfo(units.dtype).eps)
    pairs = -0.5 * squared.log() if s == 0 else squared.pow(-s / 2)
    # Filled, not multiplied by 0: a vector's energy with itself is infinite for large s.
    total = pairs.masked_fill(torch.eye(n, dtype=torch.bool, device=units.device), 0.0).sum()
    return total / max(n * (n - 1), 1) if reduction == "mean" else total


def _layers(module: nn.Module) -> list[Any]:
    """The linear and convolution layers of a module."""
    kinds = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | Decoupled
    layers = [layer for layer in module.modules() if isinstance(layer, kinds)]
    if not layers:
        raise ArgumentError("target", f"must contain linear or convolution layers, got {type(module).__name__}")
    return layers


def _kernels(layer: Any) -> Tensor:
    """The kernels of a layer, ``(groups, n, d)``."""
    if isinstance(layer, Decoupled):
        return layer._by_kernel(layer.weight).flatten(2)
    weight: Tensor = layer.weight
    return weight.unflatten(0, (getattr(layer, "groups", 1), -1)).flatten(2)


@energies.register("mhe")
class MHE(nn.Module):
    r"""Minimum hyperspherical energy: the Riesz energy of weight directions as a regulariser.

    Called on a matrix ``(n, d)`` it gives that matrix' energy; called on a module, the sum over its linear and
    convolution weights, a neuron (filter) being a row.

    Args:
        s: Riesz exponent, at least 0; 0 is the logarithmic energy.
        half_space: Treat opposite directions as equal.
        reduction: ``"mean"`` over the ordered pairs of a layer or ``"sum"``.

    Example:
        >>> MHE(s=2)(nn.Linear(4, 8)).shape
        torch.Size([])
    """

    def __init__(self, *, s: float = 2.0, half_space: bool = False, reduction: str = "mean") -> None:
        super().__init__()
        check_range("s", s, 0)
        check_choice("reduction", reduction, ("mean", "sum"))
        self.s, self.half_space, self.reduction = s, half_space, reduction

    def forward(self, target: Tensor | nn.Module) -> Tensor:
        """Energy of a matrix ``(n, d)`` or of the layers of a module: ``()``."""
        if isinstance(target, Tensor):
            return hyperspherical_energy(target, self.s, half_space=self.half_space, reduction=self.reduction)
        return torch.stack([self(_kernels(layer).flatten(0, 1)) for layer in _layers(target)]).sum()

    def extra_repr(self) -> str:
        """The options."""
        return f"s={self.s:g}, half_space={self.half_space}, reduction={self.reduction!r}"


class _Orthogonality(nn.Module):
    r"""A penalty on the inner products of a layer's kernels.

    Called on a matrix ``(n, d)`` whose rows are kernels it gives that matrix' penalty; called on a module, the sum over
    its decoupled layers, or over all its linear and convolution layers where none is decoupled. The kernels of each
    group of channels count by themselves.

    Args:
        squared: Take the squared Frobenius norm, not the norm.
        normalised: Take the directions of the kernels, so that angles alone are penalised.
    """

    def __init__(self, *, squared: bool = True, normalised: bool = False) -> None:
        super().__init__()
        self.squared, self.normalised = squared, normalised

    def _excess(self, products: Tensor) -> Tensor:
        """Inner products of kernels ``(..., n, n)`` less those that are not penalised."""
        raise NotImplementedError

    def forward(self, target: Tensor | nn.Module) -> Tensor:
        """Penalty of a matrix ``(n, d)`` or of the layers of a module: ``()``."""
        if isinstance(target, nn.Module):
            layers = _layers(target)
            layers = [layer for layer in layers if isinstance(layer, Decoupled)] or layers
            return torch.stack([self._penalty(_kernels(layer)) for layer in layers]).sum()
        if target.dim() != 2:
            raise ArgumentError("target", f"must have shape (n, d), got {tuple(target.shape)}")
        return self._penalty(target)

    def _penalty(self, kernels: Tensor) -> Tensor:
        kernels = at_least_float32(kernels)
        with full_precision(kernels):
            if self.normalised:
                kernels = normalise(kernels)
            total = self._excess(kernels @ kernels.mT).square().sum()
        return total if self.squared else safe_sqrt(total)

    def extra_repr(self) -> str:
        """The options."""
        return f"squared={self.squared}, normalised={self.normalised}"


@energies.register("orthonormal")
class Orthonormal(_Orthogonality):
    r"""Distance of a layer's kernels (the columns of W) from orthonormal ones: :math:`\|W^T W - I\|_F^2`.

    With more kernels n than inputs d it cannot fall below n - d.

    Example:
        >>> Orthonormal()(torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0]]))
        tensor(25.)
    """

    def _excess(self, products: Tensor) -> Tensor:
        return products - torch.eye(products.shape[-1], dtype=products.dtype, device=products.device)


@energies.register("orthogonal")
class Orthogonal(_Orthogonality):
    r"""Distance of a layer's kernels from orthogonal ones of any norms: :math:`\|W^T W - \mathrm{diag}(W^T W)\|_F^2`.

    Example:
        >>> Orthogonal()(torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0]]))
        tensor(8.)
    """

    def _excess(self, products: Tensor) -> Tensor:
        return products.masked_fill(torch.eye(products.shape[-1], dtype=torch.bool, device=products.device), 0.0)


__all__ = ["MHE", "Orthogonal", "Orthonormal", "create", "energies", "hyperspherical_energy"]
