"""Model, head and what sections add to the loss as one module."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hypersphere.orthogonal.rotation import BatchedRotations, rotations
from hypersphere.recipe import Term


class Objective(nn.Module):
    """Model, head and added terms as one module: images and labels in, loss terms out.

    Args:
        model: Images ``(B, C, H, W)`` to features ``(B, D)``. One with ``loss_names`` computes the losses of these
            names itself, by ``losses(images, labels, head)``.
        head: Features and labels to a loss.
        added: Other terms of the loss by title.
    """

    def __init__(self, model: nn.Module, head: nn.Module, added: Mapping[str, Term]) -> None:
        super().__init__()
        self.model, self.head = model, head
        self.loss_names: tuple[str, ...] = getattr(model, "loss_names", ("loss",))
        self.added = nn.ModuleDict(added)
        self.together = BatchedRotations(rotation for _, rotation in rotations(model))

    @property
    def terms(self) -> list[str]:
        """Names of the terms, the losses first."""
        return [*self.loss_names, *self.added]

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The terms, ``(T,)``; their sum is what is minimised."""
        if hasattr(self.model, "loss_names"):
            terms = [*self.model.losses(images, labels, self.head)]  # type: ignore[operator]
        else:
            terms = [self.head(self.model(images), labels)]
        terms += [term() for term in self.added.values()]
        return torch.stack([term.float() for term in terms])
