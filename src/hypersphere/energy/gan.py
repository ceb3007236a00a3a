r"""Minimum hyperspherical energy on the discriminator of a GAN."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere.energy.base import energies
from hypersphere.energy.chords import present, smooth_directions
from hypersphere.energy.layers import Selection, select
from hypersphere.energy.mhe import MHE
from hypersphere.errors import check_choice
from hypersphere.selection import Output

RELEASED_EPS = 1e-4


@energies.register("mhe-gan")
class DiscriminatorMHE(MHE):
    r"""MHE of a discriminator's layers alone: the logarithmic energy in half space, as published for GANs.

    No weight was published with the text; those scanned here are 1e-7 to 1e-2. The released code does something else,
    which ``preset="released"`` repeats: mirror images are joined to the neurons along their inputs, which changes no
    angle, so that it is an energy of full space,

    .. math:: \frac{1}{n^2} \Bigl( \sum_{i<j} -\log(\|u_i - u_j\|^2 + 10^{-4}) + \tfrac{n(n+1)}{2} \log 10^4 \Bigr)

    with weight 2e-7, or 2e-6 without spectral normalisation (it is counted twice in a step).

    Args:
        s: Riesz exponent, at least 0; 0 is the logarithmic energy.
        half_space: Treat opposite directions as equal.
        include: Pattern of the names of the layers that count.
        hidden_weight: Weight of every layer.
        preset: ``"thesis"``, or ``"released"`` for the formula above, which has neither s nor half space.

    Example:
        >>> model = nn.ModuleDict({"discriminator": nn.Sequential(nn.Linear(3, 3)), "generator": nn.Linear(2, 3)})
        >>> [layer.name for layer in DiscriminatorMHE().select(model)]
        ['discriminator.0']
    """

    def __init__(
        self,
        *,
        s: float = 0.0,
        half_space: bool = True,
        include: str = "discriminator.*",
        hidden_weight: float = 1.0,
        preset: str = "thesis",
    ) -> None:
        check_choice("preset", preset, ("thesis", "released"))
        super().__init__(s=s, half_space=half_space, hidden_weight=hidden_weight)
        self.include, self.released = include, preset == "released"

    def select(self, target: nn.Module | Selection, *, output: Output = None, **choice: Any) -> Selection:
        """The layers of the discriminator, all of them hidden ones: its output is a single neuron.

        Another ``include`` takes the place of that of the energy.
        """
        if isinstance(target, Selection):
            return target
        return select(target, output=output, **{"include": self.include, **choice})

    @property
    def counts_lengths(self) -> bool:
        """Whether short vectors count less."""
        return self.released or super().counts_lengths

    def energy(self, vectors: Tensor, role: str = "hidden") -> Tensor:
        """Energy of each matrix of a batch."""
        return _released(vectors) if self.released else super().energy(vectors, role)


def _released(vectors: Tensor) -> Tensor:
    """What the released code adds to the loss, but for its weight, of matrices ``(b, n, d)``."""
    there = present(vectors)
    # A neuron and its mirror image side by side have twice its squared norm.
    units = smooth_directions(vectors, RELEASED_EPS / 2)
    squared = 2 - 2 * units @ units.mT
    pairs = (there.unsqueeze(2) & there.unsqueeze(1)).triu(1)
    values = -(torch.where(pairs, squared.clamp(min=0), 1.0) + RELEASED_EPS).log()
    count = there.sum(-1).to(vectors.dtype)
    others = count.square() - pairs.sum((1, 2))
    total = torch.where(pairs, values, 0.0).sum((1, 2)) - others * math.log(RELEASED_EPS)
    return total / count.square().clamp(min=1)
