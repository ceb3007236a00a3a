"""Randomness that depends on nothing but the seed, a purpose and a count.

No generator state is ever saved: what a step draws is a function of the seed and the number of that step, so a
resumed run draws what the uninterrupted run would have drawn.
"""

from __future__ import annotations

import torch


def seed_default_generator(device: torch.device, seed: int) -> None:
    """Seed what dropout and the like draw from on ``device``."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
