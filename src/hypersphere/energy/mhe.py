r"""Minimum hyperspherical energy: the Riesz energy of directions, of matrices and of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hypersphere.energy.base import Regulariser, energies
from hypersphere.energy.chords import present
from hypersphere.energy.pairs import pair_sums
from hypersphere.energy.potentials import Riesz
from hypersphere.energy.shards import Mesh, agreed, mesh_of, of_shards
from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.geometry import at_least_float32, full_precision


def hyperspherical_energy(
    vectors: Tensor,
    s: float = 2.0,
    *,
    half_space: bool = False,
    angular: bool = False,
    beta: Tensor | None = None,
    reduction: str = "mean",
    eps: float = 0.0,
) -> Tensor:
    r"""Riesz energy of the directions of the rows, over ordered pairs.

    .. math:: E_s = \sum_{i \ne j} \rho(u_i, u_j)^{-s}, \qquad E_0 = \sum_{i \ne j} -\log \rho(u_i, u_j)

    Args:
        vectors: ``(n, d)``, or a batch ``(b, n, d)``; norms do not matter and zero vectors are left out. Directions
            closer than 1e-4 (1e-6 in float64) count as that far apart and have no gradient.
        s: Riesz exponent; 0 is the logarithmic energy, below 0 the terms are :math:`-\rho^{-s}`. On the circle a near
            pair of chords hardly curves with s = -1: its second derivative is off by a rounding over :math:`\rho^2`.
        half_space: Add the mirror image of every vector, so that opposite directions count as equal.
        angular: Take the angle as distance :math:`\rho`, not the chord.
        beta: Lengths ``(n,)`` of the vectors in place of 1, constants: a longer vector moves less.
        reduction: ``"mean"`` over the ordered pairs (in half space of the 2n vectors) or ``"sum"``.
        eps: Added under the root of the norms; then short vectors count less.

    Returns:
        Scalar (of a batch ``(b,)``), in float32 or wider; 0 where there is no pair.

    Example:
        >>> hyperspherical_energy(torch.tensor([[1.0, 0.0], [-5.0, 0.0]]), s=1)
        tensor(0.5000)
    """
    options = Riesz(s, angular), half_space, beta, reduction, eps
    return of_shards(lambda rows: _energy(rows, *options, mesh_of(vectors)), vectors)


def _energy(
    vectors: Tensor,
    potential: Riesz,
    half_space: bool,
    beta: Tensor | None,
    reduction: str,
    eps: float,
    mesh: Mesh = None,
) -> Tensor:
    check_choice("reduction", reduction, ("mean", "sum"))
    check_range("eps", eps, 0)
    if vectors.dim() not in (2, 3):
        raise ArgumentError("vectors", f"must have shape (n, d) or (b, n, d), got {tuple(vectors.shape)}")
    batch = at_least_float32(vectors if vectors.dim() == 3 else vectors.unsqueeze(0))
    if beta is not None:
        if beta.shape != vectors.shape[-2:-1]:
            raise ArgumentError("beta", f"must have shape ({vectors.shape[-2]},), got {tuple(beta.shape)}")
        if potential.angular:
            raise ArgumentError("beta", "needs chords: vectors of different lengths have no distance on the sphere")
        beta = beta.detach().to(batch).expand(batch.shape[:2])
    with full_precision(batch):
        total = pair_sums(
            batch, potential, half_space=half_space, beta=beta, eps=eps, mean=reduction == "mean", mesh=mesh
        )
    return total if vectors.dim() == 3 else total.squeeze(0)


@energies.register("mhe")
class MHE(Regulariser):
    r"""Minimum hyperspherical energy: the Riesz energy of weight directions as a regulariser.

    Called on a matrix ``(n, d)`` it gives that matrix' energy; called on a model,
    :math:`\lambda_h \sum_\text{hidden} E + \lambda_o E_\text{output}`, a neuron (filter) being a row. The output layer
    is always taken in full space.

    Args:
        s: Riesz exponent, at least 0; 0 is the logarithmic energy.
        half_space: Treat opposite directions as equal.
        angular: Take angles as distances, not chords.
        reduction: ``"mean"`` over the ordered pairs of a layer or ``"sum"``.
        subset: Take as many neurons of each hidden layer, drawn anew at every call in training mode: an unbiased
            estimate of the mean for very wide layers (in half space without the pairs of a neuron and its own image).
        eps: Added under the root of the norms; by default 0.
        hidden_weight: Weight of every hidden layer of a model; by default 10, in half space 1.
        output_weight: Weight of a model's output layer; by default 1.
        preset: ``"thesis"``, or ``"released"`` for the conventions of the published code: ``eps`` 1e-4, twice the
            logarithmic energy, angles in half turns plus 1e-4, and weights 1 and 10 (of powers of angles 0.1 and 1).

    Example:
        >>> MHE(s=2)(torch.nn.Linear(4, 8)).shape
        torch.Size([])
    """

    later_options: ClassVar[Mapping[str, Any]] = {"angular": False, "eps": 0.0}

    def __init__(
        self,
        *,
        s: float = 2.0,
        half_space: bool = False,
        angular: bool = False,
        reduction: str = "mean",
        subset: int | None = None,
        eps: float | None = None,
        hidden_weight: float | None = None,
        output_weight: float | None = None,
        preset: str = "thesis",
    ) -> None:
        check_range("s", s, 0)
        check_choice("reduction", reduction, ("mean", "sum"))
        check_choice("preset", preset, ("thesis", "released"))
        released = preset == "released"
        weights = (1.0 if half_space else 10.0, 1.0)
        if released:
            weights = (0.1, 1.0) if angular and s > 0 else (1.0, 10.0)
        super().__init__(
            hidden_weight=weights[0] if hidden_weight is None else hidden_weight,
            output_weight=weights[1] if output_weight is None else output_weight,
        )
        if eps is None:
            eps = 1e-4 if released else 0.0
        check_range("eps", eps, 0)
        if subset is not None:
            check_range("subset", subset, 2)
            if reduction == "sum":
                raise ArgumentError("subset", "estimates a mean: it cannot be combined with reduction='sum'")
        self.half_space, self.reduction, self.subset, self.eps = half_space, reduction, subset, eps
        self.potential = Riesz(s, angular)
        if released:
            self.potential = Riesz(
                s, angular, angular, 1e-4 if angular else 0.0, 2.0 if s == 0 and not angular else 1.0
            )

    def energy(self, vectors: Tensor, role: str = "hidden") -> Tensor:
        """Energy of each matrix of a batch."""
        hidden = role == "hidden"
        if hidden and self.training and self.subset is not None and self.subset < vectors.shape[1]:
            vectors = _draw_rows(vectors, self.subset, self.mesh)
        half_space = self.half_space and hidden
        return _energy(vectors, self.potential, half_space, None, self.reduction, self.eps, self.mesh)

    @property
    def counts_lengths(self) -> bool:
        """Whether short vectors count less."""
        return self.eps > 0

    def extra_repr(self) -> str:
        """The options."""
        options = f"s={self.potential.s:g}, half_space={self.half_space}, angular={self.potential.angular}"
        return f"{options}, reduction={self.reduction!r}"


def _draw_rows(vectors: Tensor, size: int, mesh: Mesh) -> Tensor:
    """So many of the rows that have a direction, of each matrix, without replacement: ``(b, size, d)``."""
    keys = agreed(torch.rand(vectors.shape[:2], device=vectors.device), mesh)
    keys = keys + ~present(vectors)  # those without come last
    chosen = keys.topk(size, largest=False).indices
    return vectors.gather(1, chosen.unsqueeze(2).expand(-1, -1, vectors.shape[2]))
