r"""A potential of your own: what a pair of directions adds to an energy, here with an energy made of it.

hypersphere list potentials --plugin my_name.py
hypersphere train digits-softmax --plugin my_name.py 'regularisers=[{name: my-name, width: 0.5}]'
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

import hypersphere as hs
from hypersphere.energy import Regulariser, potentials
from hypersphere.energy.pairs import pair_sums
from hypersphere.energy.potentials import Potential
from hypersphere.errors import check_range


@potentials.register("my-name")
@dataclass(frozen=True)
class MyName(Potential):
    r"""A Cauchy kernel: :math:`f(q) = 1 / (1 + q / w^2)` of the squared chord :math:`q = \|u - v\|^2`.

    Args:
        width: The chord w at which the value is a half.
    """

    width: float = 1.0

    def __post_init__(self) -> None:
        check_range("width", self.width, 0, open_low=True)

    def __call__(self, q: Tensor) -> Tensor:
        """Value at squared chords ``q``, any shape."""
        return 1 / (1 + q / self.width**2)

    def slope(self, q: Tensor) -> Tensor:
        """Derivative by the squared chord: gradients are computed in the same pass as the values."""
        return -1 / (self.width * (1 + q / self.width**2)).square()


@hs.energy.energies.register("my-name")
class MyNameEnergy(Regulariser):
    """Mean of the potential over all pairs of neurons of a layer.

    Args:
        width: Of the potential.
        hidden_weight: Weight of every hidden layer.
        output_weight: Weight of the output layer.
    """

    def __init__(self, *, width: float = 1.0, hidden_weight: float = 1.0, output_weight: float = 1.0) -> None:
        super().__init__(hidden_weight=hidden_weight, output_weight=output_weight)
        self.potential = MyName(width)

    def energy(self, vectors: Tensor, role: str = "hidden") -> Tensor:
        """Value ``(b,)`` of each matrix of a batch ``(b, n, d)``, without keeping anything of size ``n x n``."""
        return pair_sums(vectors, self.potential, mean=True)
