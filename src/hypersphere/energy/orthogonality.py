r"""Orthogonality of neurons as a regulariser, and what has been called that.

Published weights of these terms are around 1e-5 for all layers (srip is tuned to the task), but the default weight is
1 as everywhere. Rows that are zero do not count: padding cannot be told from a neuron that died. Where there are more
neurons n than inputs d, products of inputs ``(d, d)`` give what products of neurons ``(n, n)`` would. A value that is
larger than any number of its type is infinite and has no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hypersphere.energy.base import Regulariser, energies
from hypersphere.energy.chords import present, unit_vectors
from hypersphere.energy.layers import Neurons
from hypersphere.energy.pairs import pair_sums
from hypersphere.energy.potentials import Softplus
from hypersphere.errors import check_choice, check_range
from hypersphere.geometry import normalise, safe_sqrt, scales


class _Orthogonality(Regulariser):
    r"""A penalty on the inner products of a layer's kernels.

    Called on a matrix ``(n, d)`` whose rows are kernels it gives that matrix' penalty; called on a module, the sum over
    its decoupled layers, or over all its linear and convolution layers where none is decoupled. The kernels of each
    group of channels count by themselves, and the groups add up.

    Args:
        squared: Take the square of the norm of the deviation, not the norm.
        normalised: Take the directions of the kernels, so that angles alone are penalised.
        hidden_weight: Weight of every hidden layer of a model; 1e-5 in published experiments.
        output_weight: Weight of a model's output layer.
    """

    decoupled_only = True
    contract: ClassVar[Mapping[str, Any]] = {"scale": False, "optimum": "orthonormal"}

    def __init__(
        self,
        *,
        squared: bool = True,
        normalised: bool = False,
        hidden_weight: float = 1.0,
        output_weight: float = 1.0,
    ) -> None:
        super().__init__(hidden_weight=hidden_weight, output_weight=output_weight)
        self.squared, self.normalised = squared, normalised

    def _values(self, layers: Sequence[Neurons]) -> Iterator[tuple[list[Neurons], Tensor]]:
        # A layer's value is the mean over its groups; here they add up.
        for batch, values in super()._values(layers):
            yield batch, values * (values.numel() // len(batch))

    @property
    def counts_lengths(self) -> bool:
        """Whether the lengths of kernels count."""
        return not self.normalised

    def _deviation(self, kernels: Tensor, scale: Tensor, valid: Tensor) -> tuple[Tensor, Tensor | float]:
        """Of what the Frobenius norm is the deviation ``(b, ...)``, and what adds to its square ``(b,)``.

        Args:
            kernels: ``(b, n, d)``, times ``scale``.
            scale: Power of two, at most 1, for each matrix ``(b, 1, 1)``, with which no product overflows.
            valid: Which of the kernels are not zero ``(b, n)``.
        """
        raise NotImplementedError

    def energy(self, vectors: Tensor, role: str = "hidden") -> Tensor:
        """Penalty of each matrix of a batch; infinite where it is larger than any number of its type."""
        valid = present(vectors).to(vectors.dtype)
        kernels = unit_vectors(vectors) if self.normalised else vectors
        scale = scales(kernels, (1, 2)).clamp(max=1)
        deviation, more = self._deviation(kernels * scale, scale, valid)
        if self.squared:
            return deviation.square().sum((1, 2)) + more
        # The square may be no number of this type where the root is one.
        fit = scales(deviation, (1, 2)).clamp(max=2.0**50).view(-1)
        return safe_sqrt((deviation * fit.view(-1, 1, 1)).square().sum((1, 2)) + more * fit * fit) / fit

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

    def _deviation(self, kernels: Tensor, scale: Tensor, valid: Tensor) -> tuple[Tensor, Tensor | float]:
        n, d = kernels.shape[-2:]
        if n <= d:
            return (kernels @ kernels.mT - torch.diag_embed(valid) * scale * scale) / scale / scale, 0.0
        eye = torch.eye(d, dtype=kernels.dtype, device=kernels.device)
        # The products of inputs have the same eigenvalues but for zeros.
        return (kernels.mT @ kernels - eye * scale * scale) / scale / scale, valid.sum(1) - d


@energies.register("orthogonal")
class Orthogonal(_Orthogonality):
    r"""Distance of a layer's kernels from orthogonal ones of any norms: :math:`\|W^T W - \mathrm{diag}(W^T W)\|_F^2`.

    With ``normalised=True`` it is the sum of squared cosines over ordered pairs. With more kernels than inputs it is a
    difference, right to a few roundings of :math:`\sum_i \|w_i\|^4`: one kernel 10,000 times longer than the others
    leaves no digits of float32, and eight of float64.

    Example:
        >>> Orthogonal()(torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0]]))
        tensor(8.)
    """

    def _deviation(self, kernels: Tensor, scale: Tensor, valid: Tensor) -> tuple[Tensor, Tensor | float]:
        n, d = kernels.shape[-2:]
        if n <= d:
            own = torch.eye(n, dtype=torch.bool, device=kernels.device)
            return (kernels @ kernels.mT).masked_fill(own, 0.0) / scale / scale, 0.0
        fit = scales(kernels, (1, 2))
        kernels, scale = kernels * fit, scale * fit
        squared = (kernels.mT @ kernels).square().sum((1, 2)) - kernels.square().sum(2).square().sum(1)
        return safe_sqrt(squared).view(-1, 1, 1) / scale / scale, 0.0


@energies.register("srip")
class SRIP(_Orthogonality):
    r"""Spectral restricted isometry: the largest singular value of :math:`W^T W - I`, by power iteration.

    Of :math:`M = W^T W - I` and a start vector v, v becomes :math:`Mv/\|Mv\|` ``iterations`` times, then
    :math:`\sigma = \|Mv\|`. The gradient is that of this value, iterations included. M itself is never formed.

    Args:
        squared: Take the square of the singular value.
        normalised: Take the directions of the kernels.
        iterations: Number of iterations.
        start: ``"sine"`` (:math:`v_i = \sin i^2`, as good as a random one and always the same) or ``"ones"``.
        hidden_weight: Weight of every hidden layer of a model.
        output_weight: Weight of a model's output layer.

    Example:
        >>> SRIP(iterations=20)(torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0]]))
        tensor(5.)
    """

    contract: ClassVar[Mapping[str, Any]] = {"scale": False, "permutation": False, "optimum": "orthonormal"}
    powers = tuple(4.0**k for k in (3, 5, 7))

    def __init__(
        self,
        *,
        squared: bool = False,
        normalised: bool = False,
        iterations: int = 2,
        start: str = "sine",
        hidden_weight: float = 1.0,
        output_weight: float = 1.0,
    ) -> None:
        super().__init__(
            squared=squared, normalised=normalised, hidden_weight=hidden_weight, output_weight=output_weight
        )
        check_range("iterations", iterations, 1)
        check_choice("start", start, ("sine", "ones"))
        self.iterations, self.start = iterations, start

    def _deviation(self, kernels: Tensor, scale: Tensor, valid: Tensor) -> tuple[Tensor, Tensor | float]:
        v = valid
        if self.start == "sine":
            places = torch.arange(1, kernels.shape[1] + 1, dtype=torch.float64, device=kernels.device)
            v = valid * places.square().sin().to(kernels.dtype)
        v = v.unsqueeze(2)
        for _ in range(self.iterations):
            v = normalise(kernels @ (kernels.mT @ v) - scale * scale * v, dim=1)
        return (kernels @ (kernels.mT @ v) - scale * scale * v) / scale / scale, 0.0

    def objective(self, vectors: Tensor, power: float = math.inf) -> Tensor:
        r"""The singular value itself, at a finite power p a smooth form of it, :math:`(\sum_k |\lambda_k|^p)^{1/p}`.

        Few iterations find no more than a part of it, and the points that make that part least leave the rest as it is.
        """
        kernels = unit_vectors(vectors) if self.normalised else vectors
        gram = kernels @ kernels.mT - torch.diag_embed(present(vectors).to(kernels.dtype))
        sizes = torch.linalg.eigvalsh(gram).abs()
        largest = sizes.amax(1)
        if power != math.inf:
            logs = sizes.clamp(min=torch.finfo(sizes.dtype).tiny).log()
            largest = ((power * logs).logsumexp(1) / power).exp()
        return largest.square() if self.squared else largest

    def extra_repr(self) -> str:
        """The options."""
        return f"{super().extra_repr()}, iterations={self.iterations}, start={self.start!r}"


@energies.register("orthoreg")
class OrthoReg(Regulariser):
    r"""OrthoReg: :math:`\sum_{i \ne j} \log(1 + \exp(L (c_{ij} - 1)))`, which pushes acute angles apart.

    Directions that meet at more than a right angle are hardly touched, whatever the name says.

    Args:
        steepness: L.
        hidden_weight: Weight of every hidden layer of a model; 1e-5 in published experiments.
        output_weight: Weight of a model's output layer.

    Example:
        >>> OrthoReg()(torch.tensor([[2.0, 0.0], [1.0, 0.0]]))  # 2 log 2
        tensor(1.3863)
    """

    def __init__(self, *, steepness: float = 10.0, hidden_weight: float = 1.0, output_weight: float = 1.0) -> None:
        super().__init__(hidden_weight=hidden_weight, output_weight=output_weight)
        self.potential = Softplus(steepness)

    def energy(self, vectors: Tensor, role: str = "hidden") -> Tensor:
        """Sum over the ordered pairs of each matrix of a batch."""
        return pair_sums(vectors, self.potential, mesh=self.mesh)

    def extra_repr(self) -> str:
        """The options."""
        return f"steepness={self.potential.steepness:g}"


@energies.register("cosine-sum")
class CosineSum(Regulariser):
    r"""Sum of cosines over ordered pairs, :math:`\sum_{i \ne j} c_{ij} = \|\sum_i u_i\|^2 - n`.

    It only centres the directions: opposite pairs are as good to it as a simplex. No penalty of orthogonality.

    Args:
        hidden_weight: Weight of every hidden layer of a model; 1e-5 in published experiments.
        output_weight: Weight of a model's output layer.

    Example:
        >>> CosineSum()(torch.tensor([[3.0, 0.0], [-1.0, 0.0]]))
        tensor(-2.)
    """

    def energy(self, vectors: Tensor, role: str = "hidden") -> Tensor:
        """Sum of cosines of each matrix of a batch."""
        return unit_vectors(vectors).sum(1).square().sum(1) - present(vectors).sum(1)


__all__ = ["SRIP", "CosineSum", "OrthoReg", "Orthogonal", "Orthonormal"]
