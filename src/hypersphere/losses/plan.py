r"""What a step of a head with very many classes costs on several processes, before anything is built.

Time is that of the products alone: logits, and the gradients by features and by classes, each of them
:math:`2 B D K` operations for the whole batch B and the K classes of a process. Bytes are those of rings, in which each
of P processes sends as many as it receives: :math:`(P - 1) n` where all gather n bytes of each, as many where sums of n
bytes are left on each, and :math:`2 (P - 1) n / P` where all get a sum of n bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hypersphere.errors import check_count, check_range
from hypersphere.losses.memory import FLOAT, MemoryEstimate, classes_of_a_step, memory_estimate

LABEL = 8
"""Bytes of a label."""
SIZES = 32
"""Bytes in which a process tells the others what batch it has."""
SEED = 8
"""Bytes that draw the classes of a step."""
STATISTICS = 4
"""Numbers of a sample that are put together: log-sum-exp, largest logit, cosine and angle of the target. ArcFace has
all of them, CosFace no angle."""
PRODUCTS = 3
"""Products of a step: logits, gradient by features, gradient by classes."""
WITHOUT_CLASS_GRADIENT = 3 / 4
"""Time of a step without the gradient by classes: logits are computed twice, so that four products are made in all."""


@dataclass(frozen=True)
class MeasuredHead:
    """A measured step of a head, forward and backward, and where it stands.

    Example:
        >>> MeasuredHead(1, 1, 10**9, 1.0, "").rate
        6000000000000.0
    """

    batch: int
    dim: int
    classes: int
    milliseconds: float
    source: str
    """File, group, name and hardware of the row."""

    @property
    def rate(self) -> float:
        """Operations a second, of the three products; that logits are computed twice is in it."""
        return PRODUCTS * 2 * self.batch * self.dim * self.classes / self.milliseconds * 1e3


MEASURED = MeasuredHead(
    1024,
    512,
    10_000_000,
    96.13156127929688,
    "docs/rows/margin_softmax.json, 'Margin softmax, forward and backward, batch 1024, dimension 512, "
    "10,000,000 classes', ours, 16-bit products, NVIDIA H200",
)
"""What the rate of 16-bit products comes from. None was measured in float32 on a GPU."""


@dataclass(frozen=True)
class HeadPlan:
    """A way to train a head, and what it takes of each process."""

    name: str
    why: str
    memory: MemoryEstimate
    operations: float
    """Of the products of a step, in operations that take as long as those of :attr:`MeasuredHead.rate`."""
    exchanged: Mapping[str, int]
    """Bytes that each process sends in a step, and receives, by what they are."""

    @property
    def bytes_exchanged(self) -> int:
        """All that each process sends in a step."""
        return sum(self.exchanged.values())


def plan_head(
    batch: int,
    classes: int,
    dim: int,
    processes: int = 1,
    *,
    optimiser: str = "sgd",
    sample_rate: float = 0.1,
    low_precision: bool = True,
) -> list[HeadPlan]:
    """The ways to train a head: whole on every process, divided, with sampled classes, with a learned rotation.

    Args:
        batch: Batch size of each process.
        classes: Number of classes C.
        dim: Feature dimension D.
        processes: Number of processes P.
        optimiser: ``"sgd"``, with momentum, or ``"adam"``.
        sample_rate: Share of the classes that the sampled way compares with.
        low_precision: Whether features and products are in 16 bit.

    Example:
        >>> plans = plan_head(128, 10_000_000, 512, 8)
        >>> [plan.name for plan in plans], f"{plans[1].operations / MEASURED.rate * 1e3:.1f} ms"
        (['replicated', 'divided', 'sampled', 'fixed'], '12.0 ms')
    """
    for name, value in (("batch", batch), ("classes", classes), ("dim", dim), ("processes", processes)):
        check_count(name, value)
    check_range("sample_rate", sample_rate, 0, 1, open_low=True)

    def one(name: str, why: str, exchanged: Mapping[str, int], *, share: int, **options: bool | float) -> HeadPlan:
        memory = memory_estimate(
            batch,
            classes,
            dim,
            low_precision=low_precision,
            processes=share,
            optimiser=optimiser,
            **options,  # type: ignore[arg-type]
        )
        compared = -(-classes_of_a_step(batch * share, classes, float(options.get("sample_rate", 1.0))) // share)
        operations = PRODUCTS * 2.0 * batch * share * dim * compared
        operations *= WITHOUT_CLASS_GRADIENT if "rotation" in options else 1
        return HeadPlan(name, why, memory, operations, exchanged)

    others, part = processes - 1, f"1/{processes} of the classes" if processes > 1 else "all classes"
    divided = divided_exchanges(batch, dim, processes, low_precision=low_precision)
    gradient = {"gradient of the classes": 2 * others * classes * dim * FLOAT // processes}
    # The rotation is learned of all features, which every process has: their gradient is summed up on all.
    turned = {"gradient of the features": 2 * others * batch * dim * FLOAT}
    share = f"{100 * sample_rate:.3g} % of the classes a step"
    plans = [
        one("replicated", "each keeps all classes, and their whole gradient is summed up over all", gradient, share=1),
        one("divided", f"each keeps {part}; loss and gradients are exact", divided, share=processes),
        one(
            "sampled",
            f"each keeps {part}, with {share} in the loss and a sparse gradient: an approximation",
            divided | {"seed": SEED * (processes > 1)},
            share=processes,
            sample_rate=sample_rate,
            sparse=True,
        ),
        one(
            "fixed",
            f"each keeps {part}, which stay as drawn while a {dim} x {dim} rotation is learned: another model",
            divided | turned,
            share=processes,
            rotation=True,
        ),
    ]
    return plans if processes > 1 else [plan for plan in plans if plan.name != "divided"]


def divided_exchanges(batch: int, dim: int, processes: int, *, low_precision: bool = False) -> dict[str, int]:
    """Bytes that each process sends, and receives, in a step of a divided head, by what they are.

    Args:
        batch: Batch size of each process.
        dim: Feature dimension D.
        processes: Number of processes P.
        low_precision: Whether features have 16 bit; their gradient is summed up in 32.

    Example:
        >>> divided_exchanges(128, 512, 8)["features and labels"]
        1842176
    """
    others, width = processes - 1, FLOAT // 2 if low_precision else FLOAT
    return {
        "sizes of batches": others * SIZES,
        "features and labels": others * batch * (dim * width + LABEL),
        "statistics": others * batch * processes * STATISTICS * FLOAT,
        "gradient of the features": others * batch * dim * FLOAT,
    }
