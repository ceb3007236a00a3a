"""Seeds that depend on nothing but the seed of a run, a purpose and counts."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A seed of 63 bits from a seed, a purpose and counts.

    Example:
        >>> derive_seed(0, "epoch", 1) == derive_seed(0, "epoch", 1) != derive_seed(0, "epoch", 2)
        True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
