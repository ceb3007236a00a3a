"""How much memory a head takes, before it is built."""

from __future__ import annotations

from dataclasses import dataclass

from hypersphere.errors import check_choice, check_count, check_range
from hypersphere.losses.streaming import CHUNK_ELEMENTS

FLOAT = 4
DENSE_MATRICES = 5
"""Matrices of batch x classes that the dense path holds at its peak; measured."""
FUSED_ELEMENTS = 2**28
"""Probabilities that the kernels of the chunked path hold at once."""
CHUNK_MATRICES = 4
"""Matrices of batch x chunk (or chunk x dim, where that is larger) that the chunked path holds; measured."""
BATCH_MATRICES = 10
"""Matrices of batch x dim that are made of the gathered batch of several processes, at most; measured."""
PAIR_BYTES = 5
"""For each pair of samples of that batch: which have the same target, as a flag and as a number."""
DRAW_BYTES = 64
"""For each class, on every process, while the classes of a step are drawn; measured, 24 to 64."""
OPTIMISERS = {"sgd": 1, "adam": 2}
"""Numbers that an optimiser keeps beside each weight."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a training step of a head takes, on one process."""

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
    processes: int = 1,
    optimiser: str = "sgd",
) -> MemoryEstimate:
    """Memory of one training step of a head with weights in float32.

    Where the classes are divided among P processes (:meth:`HeadState.shard`), each has ``ceil(C / P)`` of them, and
    compares them with the batches of all: work is that of the process with most classes and ``P * B`` samples.

    Args:
        batch: Batch size B, on each process.
        classes: Number of classes C.
        dim: Feature dimension D.
        path: ``"chunked"``, ``"compiled"`` or ``"dense"``, as :attr:`MarginSoftmax.path` says.
        sample_rate: Share of the classes compared with in a step.
        sparse: Whether the gradient holds the sampled classes only.
        low_precision: Whether the products are in 16 bit, as under autocast on a GPU; the chunked path then keeps a
            16-bit copy of the weights.
        rotation: Whether the class weights are fixed and a D x D rotation of them is learned.
        processes: Number of processes P that the classes are divided among.
        optimiser: ``"sgd"``, with momentum, or ``"adam"``.

    Example:
        >>> print(memory_estimate(1024, 1_000_000, 512))
        weights 1.91 GiB, gradient 1.91 GiB, optimiser 1.91 GiB, work 0.12 GiB, total 5.85 GiB
        >>> print(memory_estimate(128, 1_000_000, 512, processes=8))
        weights 0.24 GiB, gradient 0.24 GiB, optimiser 0.24 GiB, work 0.15 GiB, total 0.86 GiB
    """
    for name, value in (("batch", batch), ("classes", classes), ("dim", dim)):
        check_range(name, value, 1)
    check_choice("path", path, ("chunked", "compiled", "dense"))
    check_choice("optimiser", optimiser, tuple(OPTIMISERS))
    check_count("processes", processes)
    batch *= processes
    sampled = classes_of_a_step(batch, classes, sample_rate)
    compared = -(-sampled // processes)
    table = -(-classes // processes) * dim * FLOAT
    rows = compared * dim * FLOAT
    turn = dim * dim * FLOAT if rotation else 0
    gradient = turn or (rows if sparse and sampled < classes else table)
    copied = (1 if rotation else 2) * rows if sampled < classes else 0  # the sampled weights and their gradient
    if path != "chunked":
        work = DENSE_MATRICES * batch * compared * FLOAT
    elif low_precision:
        work = rows // 2 + min(batch * compared, FUSED_ELEMENTS) * FLOAT // 2
    else:
        work = CHUNK_MATRICES * min(max(batch, dim) * compared, CHUNK_ELEMENTS) * FLOAT
    if processes > 1:
        work += batch * (BATCH_MATRICES * dim * FLOAT + PAIR_BYTES * batch)
    work = max(work + copied, DRAW_BYTES * classes if sampled < classes else 0)  # drawn before anything is compared
    return MemoryEstimate(table + turn, gradient, OPTIMISERS[optimiser] * (turn or table), work)


def classes_of_a_step(batch: int, classes: int, sample_rate: float) -> int:
    """How many classes a batch is compared with: the sampled share, and at least its own targets.

    Example:
        >>> classes_of_a_step(128, 1000, 0.5), classes_of_a_step(128, 1000, 0.01)
        (500, 128)
    """
    check_range("sample_rate", sample_rate, 0, 1, open_low=True)
    return min(max(int(sample_rate * classes), batch), classes)
