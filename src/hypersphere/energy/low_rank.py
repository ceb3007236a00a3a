r"""Weights of low rank that are known by their projections from both sides, and the energy of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere.energy.base import energies
from hypersphere.energy.layers import Neurons, Selection
from hypersphere.energy.mhe import MHE
from hypersphere.errors import check_range
from hypersphere.geometry import at_least_float32, full_precision
from hypersphere.neurons import whole
from hypersphere.selection import Output

CONDITION = 1e6
"""Largest condition number with which a system of equations in float32 is still solved."""


class LowRankBilateral(nn.Module):
    r"""A weight of low rank, known by its two projections: :math:`W = (Y_2 (P_1 Y_2)^{-1} Y_1)^T`.

    A parametrisation (:func:`torch.nn.utils.parametrize.register_parametrization`): of a weight ``(n, ...)`` with n
    neurons of d inputs it keeps the parameters :math:`Y_1` ``(r, n)`` and :math:`Y_2` ``(d, r)``, which start at the
    projections of the weight :math:`P_1 W^T` and :math:`W^T P_2`. A weight of rank r starts as it is. :math:`P_1` stays
    as drawn and is saved with the model. Use ``bp-lowrank`` as regulariser, and look at :meth:`condition` at times.

    Args:
        shape: Shape of the weight.
        rank: r.
        generator: Source of randomness.

    Example:
        >>> from torch.nn.utils import parametrize
        >>> layer = torch.nn.Linear(20, 10)
        >>> layer = parametrize.register_parametrization(layer, "weight", LowRankBilateral(layer.weight.shape, 4))
        >>> torch.linalg.matrix_rank(layer.weight)
        tensor(4)
    """

    left: Tensor
    right: Tensor

    def __init__(self, shape: Sequence[int], rank: int, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        n, d = shape[0], int(torch.Size(shape[1:]).numel())
        check_range("rank", rank, 1, min(n, d))
        self.shape, self.rank = tuple(shape), rank
        self.register_buffer("left", torch.randn(rank, d, generator=generator))
        self.register_buffer("right", torch.randn(n, rank, generator=generator), persistent=False)

    def forward(self, inner: Tensor, outer: Tensor) -> Tensor:
        """The weight of :math:`Y_1` ``(r, n)`` and :math:`Y_2` ``(d, r)``."""
        y1, y2 = at_least_float32(inner), at_least_float32(outer)
        with full_precision(y1):
            # Without the check of the result, for which the processor would wait.
            solved = torch.linalg.solve_ex(self.left.to(y2.dtype) @ y2, y1).result
            return (y2 @ solved).mT.reshape(self.shape).to(inner.dtype)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """:math:`Y_1` and :math:`Y_2` of a weight."""
        columns = weight.flatten(1).mT
        return self.left.to(columns) @ columns, columns @ self.right.to(columns)

    def condition(self, outer: Tensor) -> float:
        r"""Condition number of :math:`P_1 Y_2`; raises :class:`ArithmeticError` above 1e6. Waits for the device.

        Args:
            outer: :math:`Y_2`, ``layer.parametrizations.weight.original1``.
        """
        with torch.no_grad():
            number = torch.linalg.cond(self.left.double() @ whole(outer).double()).item()
        if not number <= CONDITION:
            raise ArithmeticError(f"the condition number of P1 Y2 is {number:.3g}, more than {CONDITION:g}")
        return number


@energies.register("bp-lowrank")
class BPLowRank(MHE):
    r"""Energy of both factors of layers of low rank: :math:`E(Y_1^T) + E(Y_2^T)`.

    The factors are those of :class:`LowRankBilateral`. A layer without that parametrisation is taken as it is, the
    output layer in full space.

    Args:
        s: Riesz exponent, at least 0; 0 is the logarithmic energy.
        half_space: Treat opposite directions as equal.
        angular: Take angles as distances, not chords.
        eps: Added under the root of the norms.
        hidden_weight: Weight of every hidden layer of a model.
        output_weight: Weight of a model's output layer.

    Example:
        >>> from torch.nn.utils import parametrize
        >>> layer = torch.nn.Linear(20, 10)
        >>> layer = parametrize.register_parametrization(layer, "weight", LowRankBilateral(layer.weight.shape, 4))
        >>> BPLowRank()(layer).shape
        torch.Size([])
    """

    def __init__(
        self,
        *,
        s: float = 2.0,
        half_space: bool = True,
        angular: bool = False,
        eps: float = 0.0,
        hidden_weight: float = 1.0,
        output_weight: float = 1.0,
    ) -> None:
        super().__init__(
            s=s,
            half_space=half_space,
            angular=angular,
            eps=eps,
            hidden_weight=hidden_weight,
            output_weight=output_weight,
        )

    def select(self, target: nn.Module | Selection, *, output: Output = "auto", **choice: Any) -> Selection:
        """The factors of the layers of low rank, and the other layers."""
        factors: dict[str, list[Neurons]] = {}
        if isinstance(target, nn.Module):
            for name, module in target.named_modules():
                held = getattr(module, "parametrizations", {})
                if "weight" in held and isinstance(held["weight"][0], LowRankBilateral):
                    weight = held["weight"]
                    factors[name] = [
                        Neurons(f"{name}.Y1", lambda w=weight: whole(w.original0).mT.unsqueeze(0)),  # type: ignore[misc]
                        Neurons(f"{name}.Y2", lambda w=weight: whole(w.original1).mT.unsqueeze(0)),  # type: ignore[misc]
                    ]
        selection = super().select(target, output=output, **choice)
        layers = [found for layer in selection for found in factors.get(layer.name, [layer])]
        return Selection(layers, selection.zero, selection.left)
