r"""An attack of your own: small changes of images that a model gets wrong, to judge it or to train on.

hypersphere list attacks --plugin my_name.py
hypersphere train digits-softmax --plugin my_name.py adversary.name=my-name adversary.eps=0.1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hypersphere.attacks import Attack, Predict, attacks
from hypersphere.errors import check_range


@attacks.register("my-name")
@dataclass(frozen=True)
class MyName(Attack):
    """Random signs: every pixel is changed by ``eps`` up or down, the worst of a few draws for each image.

    Args:
        eps: Largest change of a pixel, of a range from 0 to 1.
        draws: Number of draws.
    """

    eps: float = 8 / 255
    draws: int = 4

    def __post_init__(self) -> None:
        check_range("eps", self.eps, 0)
        check_range("draws", self.draws, 1)

    def perturb(self, predict: Predict, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        """Changed images within ``eps`` and within [0, 1]; ``predict`` gives logits ``(B, C)``."""
        worst, least = images, torch.full((len(images),), torch.inf, device=images.device)
        own = labels.unsqueeze(1)
        for _ in range(self.draws):
            signs = torch.rand(images.shape, generator=generator, device=images.device).sub(0.5).sign()
            changed = (images + self.eps * signs).clamp(0, 1)
            logits = predict(changed).float()
            others = logits.scatter(1, own, -torch.inf).amax(1)
            margin = logits.gather(1, own).squeeze(1) - others
            better = margin < least
            worst = torch.where(better.view(-1, *[1] * (images.dim() - 1)), changed, worst)
            least = torch.where(better, margin, least)
        return worst
