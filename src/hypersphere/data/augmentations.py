"""Random changes of training samples, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from hypersphere.registry import Member, Registry


class Augmentation(metaclass=Member):
    """A random change of training samples; one of your own implements ``__call__`` and says how much it draws.

    It is device work without a wait and without shapes that depend on values, since it is part of a captured step. All
    that it draws comes in as ``draws``, so that a resumed run and any number of processes change a sample alike.

    Example:
        >>> class Dim(Augmentation):
        ...     '''Darker samples.'''
        ...     draws = 1
        ...     def __call__(self, samples, draws):
        ...         return samples * draws[0].view(-1, 1, 1, 1)
        >>> Dim().change(torch.ones(2, 1, 3, 3), torch.Generator().manual_seed(0), 4, slice(0, 2)).shape
        torch.Size([2, 1, 3, 3])
    """

    draws: ClassVar[int] = 1
    """Uniform numbers in [0, 1) for each sample."""
    dimensions: ClassVar[int | None] = 3
    """Dimensions of the samples that it changes: 3 for images ``(C, H, W)``; ``None`` for all."""

    def __call__(self, samples: Tensor, draws: Tensor) -> Tensor:
        """Changed samples ``(b, ...)``, images normalised, by the numbers ``(draws, b)``."""
        raise NotImplementedError

    def change(self, samples: Tensor, generator: torch.Generator, batch_size: int, share: slice) -> Tensor:
        """The samples of one process, changed.

        Args:
            samples: ``(b, ...)``.
            generator: Source of the draws, on the device of the samples; every process draws for all of the batch.
            batch_size: Samples over all processes.
            share: Which of them are given.
        """
        draws = torch.rand(self.draws, batch_size, generator=generator, device=samples.device)[:, share]
        return self(samples, draws)


F = TypeVar("F", bound=Callable[..., Augmentation])

augmentations = Registry[Augmentation](
    "augmentation", kind=Augmentation, members=("hypersphere.tasks.*.augmentations",)
)
"""Augmentations by name: parts of ``data.augment`` in a recipe."""


def register(name: str, *, aliases: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Decorator that adds an augmentation under a name."""
    return augmentations.register(name, aliases=aliases)
