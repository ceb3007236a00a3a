r"""An energy of your own: a regulariser, a number of the neurons of a layer that training makes smaller.

hypersphere list energies --plugin my_name.py
hypersphere train digits-softmax --plugin my_name.py 'regularisers=[{name: my-name, weight: 0.1}]'
"""

from __future__ import annotations

from torch import Tensor

import hypersphere as hs
from hypersphere.energy import Regulariser
from hypersphere.errors import check_range
from hypersphere.geometry import normalise


@hs.energy.energies.register("my-name")
class MyName(Regulariser):
    r"""Frame potential: the mean of :math:`\cos^p\theta` over all pairs of neurons.

    Args:
        power: The exponent p, an even number.
        hidden_weight: Weight of every hidden layer.
        output_weight: Weight of the output layer.
    """

    def __init__(self, *, power: int = 2, hidden_weight: float = 1.0, output_weight: float = 1.0) -> None:
        super().__init__(hidden_weight=hidden_weight, output_weight=output_weight)
        check_range("power", power, 2)
        self.power = 2 * (power // 2)

    def energy(self, vectors: Tensor, role: str = "hidden") -> Tensor:
        """Value ``(b,)`` of each matrix of a batch ``(b, n, d)``; rows of zeros are padding and count for nothing."""
        directions = normalise(vectors)
        cosines = directions @ directions.mT
        count = directions.detach().square().sum((1, 2))  # of the rows that are not zero: their norm is 1
        own = directions.square().sum(2).pow(self.power).sum(1)
        return (cosines.pow(self.power).sum((1, 2)) - own) / (count * (count - 1)).clamp(min=1)
