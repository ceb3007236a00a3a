r"""A schedule of your own: how a learning rate, or the weight of a regulariser, changes over the steps.

hypersphere list schedules --plugin my_name.py
hypersphere train digits-softmax --plugin my_name.py 'schedule={name: my-name, cycles: 2}'
"""

from __future__ import annotations

import math

from hypersphere.errors import check_range
from hypersphere.schedules import Factor, schedules


@schedules.register("my-name")
def my_name(*, cycles: int = 3, final: float = 0.0) -> Factor:
    """Half cosines from 1 to a last value, several times over.

    Args:
        cycles: How often it starts again.
        final: The last value, as a share of the first.
    """
    check_range("cycles", cycles, 1)
    check_range("final", final, 0, 1)

    def factor(step: int, progress: float) -> float:
        """Of the rate at a step; the progress goes from 0 to 1 after the warm-up."""
        part = min(progress * cycles, cycles - 1e-9) % 1
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * part))

    return factor
