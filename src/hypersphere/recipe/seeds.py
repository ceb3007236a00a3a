"""Seeds that depend on nothing but the seed of a run, a purpose and counts."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def derive_seed(*parts: int | str) -> int:
    """A seed of 63 bits from a seed, a purpose and counts.

    Example:
        >>> derive_seed(0, "epoch", 1) == derive_seed(0, "epoch", 1) != derive_seed(0, "epoch", 2)
        True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def epoch_order(samples: int, seed: int, number: int) -> Tensor:
    """Order of the samples in an epoch, ``(samples,)``.

    Example:
        >>> epoch_order(4, seed=0, number=0).sort().values
        tensor([0, 1, 2, 3])
    """
    return torch.randperm(samples, generator=torch.Generator().manual_seed(derive_seed(seed, "epoch", number)))
