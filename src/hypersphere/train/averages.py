"""Moving averages of the weights of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hypersphere.losses.sharding import by_kind


class Averages:
    """Moving average of every parameter, where a run has them.

    Args:
        parameters: What to average.
        decay: What a step leaves of the average; ``None``: there are none.

    Example:
        >>> weight = nn.Parameter(torch.zeros(1))
        >>> averages = Averages([weight], decay=0.5)
        >>> _ = weight.data.fill_(4.0)
        >>> averages.update()
        >>> with averages.in_place():
        ...     weight.item()
        2.0
        >>> weight.item()
        4.0
    """

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float | None) -> None:
        self.parameters, self.decay = list(parameters), decay
        self.values = [p.detach().clone() for p in self.parameters] if decay is not None else []

    def update(self) -> None:
        """Take the parameters of a step in: device work alone."""
        if self.decay is not None:
            now = by_kind([p.detach() for p in self.parameters])
            for averages, parameters in zip(by_kind(self.values), now, strict=True):
                torch._foreach_lerp_(averages, parameters, 1 - self.decay)

    def replaced(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start anew with parameters whose values mean something else now."""
        anew = set(parameters)
        for average, parameter in zip(self.values, self.parameters, strict=self.decay is not None):
            if parameter in anew:
                average.copy_(parameter.detach())

    def state(self) -> dict[str, Tensor]:
        """The averages, by name."""
        return {f"average.{index}": value for index, value in enumerate(self.values)}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the averages in place of the parameters, where there are any."""
        if self.decay is None:
            yield
            return
        parameters = [p.detach() for p in self.parameters]
        trained = [p.clone() for p in parameters]
        self._copy(parameters, self.values)
        try:
            yield
        finally:
            self._copy(parameters, trained)

    @staticmethod
    def _copy(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        for there, here in zip(by_kind(to), by_kind(values), strict=True):
            torch._foreach_copy_(there, here)
