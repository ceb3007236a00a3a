"""The energy of any potential, one of a user's own included."""

from __future__ import annotations

from torch import Tensor

from hypersphere.energy import potentials
from hypersphere.energy.base import Regulariser, energies
from hypersphere.energy.pairs import pair_sums
from hypersphere.energy.potentials import Potential


@energies.register("pair-energy")
class PairEnergy(Regulariser):
    r"""Mean of a potential over all pairs of directions, :math:`\frac{1}{n(n-1)}\sum_{i\ne j} f(\|u_i - u_j\|^2)`.

    Args:
        potential: Of a pair, by name or as an instance; see :mod:`hypersphere.energy.potentials`.
        half_space: Treat opposite directions of hidden layers as equal.
        hidden_weight: Weight of every hidden layer of a model.
        output_weight: Weight of a model's output layer.

    Example:
        >>> import torch
        >>> PairEnergy(potential="gaussian")(torch.eye(3))
        tensor(0.0183)
    """

    def __init__(
        self,
        *,
        potential: str | Potential = "riesz",
        half_space: bool = False,
        hidden_weight: float = 1.0,
        output_weight: float = 1.0,
    ) -> None:
        super().__init__(hidden_weight=hidden_weight, output_weight=output_weight)
        self.potential, self.half_space = potentials.create(potential), half_space

    def energy(self, vectors: Tensor, role: str = "hidden") -> Tensor:
        """Mean over the pairs of each matrix of a batch."""
        half_space = self.half_space and role == "hidden"
        return pair_sums(vectors, self.potential, half_space=half_space, mean=True, mesh=self.mesh)

    def extra_repr(self) -> str:
        """The options."""
        return f"{self.potential}, half_space={self.half_space}"
