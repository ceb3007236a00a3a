"""How much memory a head takes, before it is built."""

from __future__ import annotations

from dataclasses import dataclass

from hypersphere.errors import check_choice, check_range
from hypersphere.losses.streaming import CHUNK_ELEMENTS

FLOAT = 4
DENSE_MATRICES = 5
"""Matrices of batch x classes that the dense path holds at its peak; measured."""
FUSED_ELEMENTS = 2**28
"""Probabilities that the kernels of the chunked path hold at once."""
CHUNK_MATRICES = 4
"""Matrices of batch x chunk (or chunk x dim, where that is larger) that the chunked path holds; measured."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a training step of a head takes."""

    weights: int
    gradient: int
    optimiser: int
    work: int
    """Logits and what is made of them, at the peak of forward and backward pass."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradient + self.optimiser + self.work

    def __str__(self) -> str:
        parts = {name: getattr(self, name) for name in ("weights", "gradient", "optimiser", "work", "total")}
        return ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in parts.items())


def memory_estimate(
    batch: int,
    classes: int,
    dim: int,
    *,
    path: str = "chunked",
    sample_rate: float = 1.0,
    sparse: bool = False,
    low_precision: bool = False,
    rotation: bool = False,
) -> MemoryEstimate:
    """Memory of one training step of a head with weights in float32, SGD and momentum.

    Args:
        batch: Batch size B.
        classes: Number of classes C.
        dim: Feature dimension D.
        path: ``"chunked"``, ``"compiled"`` or ``"dense"``, as :attr:`MarginSoftmax.path` says.
        sample_rate: Share of the classes compared with in a step.
        sparse: Whether the gradient holds the sampled classes only.
        low_precision: Whether the products are in 16 bit, as under autocast on a GPU; the chunked path then keeps a
            16-bit copy of the weights.
        rotation: Whether the class weights are fixed and a D x D rotation of them is learned.

    Example:
        >>> print(memory_estimate(1024, 1_000_000, 512))
        weights 1.91 GiB, gradient 1.91 GiB, optimiser 1.91 GiB, work 0.12 GiB, total 5.85 GiB
    """
    for name, value in (("batch", batch), ("classes", classes), ("dim", dim)):
        check_range(name, value, 1)
    check_choice("path", path, ("chunked", "compiled", "dense"))
    check_range("sample_rate", sample_rate, 0, 1, open_low=True)
    compared = min(max(int(sample_rate * classes), min(batch, classes)), classes)
    table = classes * dim * FLOAT
    rows = compared * dim * FLOAT
    turn = dim * dim * FLOAT if rotation else 0
    gradient = turn or (rows if sparse and compared < classes else table)
    copied = (1 if rotation else 2) * rows if compared < classes else 0  # the sampled weights and their gradient
    if path != "chunked":
        work = DENSE_MATRICES * batch * compared * FLOAT
    elif low_precision:
        work = rows // 2 + min(batch * compared, FUSED_ELEMENTS) * FLOAT // 2
    else:
        work = CHUNK_MATRICES * min(max(batch, dim) * compared, CHUNK_ELEMENTS) * FLOAT
    return MemoryEstimate(table + turn, gradient, turn or table, work + copied)
