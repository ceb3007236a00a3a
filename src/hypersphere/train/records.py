"""What steps leave on the device: fetched when a row is due, looked at, and averaged."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hypersphere.errors import HypersphereError
from hypersphere.runs import RunFolder
from hypersphere.train.step import Step

MIN_LOSS_SCALE = 2.0**-10
"""A loss scale below this means that gradients overflow however small they are made."""


class DivergedError(HypersphereError):
    """The loss or a gradient is no longer a number."""

    exit_code = 1


def diverged(run: RunFolder, step: int, what: str, groups: Sequence[str]) -> DivergedError:
    """The error of a run that diverged.

    Args:
        run: Where the run is.
        step: The step at which that was seen.
        what: What is no longer a number.
        groups: Parameter groups whose gradients or weights are not finite.
    """
    where = f" (parameter group {', '.join(map(repr, groups))})" if groups else " (all gradients were still finite)"
    checkpoint = run.latest_checkpoint()
    kept = f"the last good checkpoint is {checkpoint}" if checkpoint else "there was no checkpoint yet"
    return DivergedError(
        f"training diverged at step {step}: {what}{where}; {kept}. "
        "Start a new run with a lower optimiser.lr, train.clip_norm=1 or schedule.warmup"
    )


class Records:
    """Records of steps that no row of metrics covers yet.

    Args:
        step: The step.
        length: Most records that are left on the device.
        run: Where the run is, for messages.
    """

    def __init__(self, step: Step, length: int, run: RunFolder) -> None:
        self.step, self.run = step, run
        self.pending: list[list[float]] = []
        self._history = torch.zeros(length, len(step.columns), device=step.device)
        self._recorded = 0

    def note(self) -> None:
        """Keep the record of the step that was taken, without waiting for it."""
        self._history[self._recorded].copy_(self.step.record, non_blocking=True)
        self._recorded += 1

    def collect(self, taken: int) -> None:
        """Fetch the records of the last of so many steps and look at them: the only wait in training."""
        rows = self.step.world.mean(self._history[: self._recorded]).double().tolist()
        first = taken - self._recorded
        self._recorded = 0
        scaler = self.step.scaler
        if scaler.is_enabled() and scaler.get_scale() < MIN_LOSS_SCALE:
            raise diverged(self.run, taken, "every gradient overflows in fp16", self.step.groups)
        for offset, row in enumerate(rows):
            self._check_finite(first + offset + 1, dict(zip(self.step.columns, row, strict=True)))
        self.pending += rows

    def _check_finite(self, step: int, record: dict[str, float]) -> None:
        terms = self.step.objective.terms
        bad = [name for name, value in record.items() if not math.isfinite(value)]
        # With a loss scaler, an overflowing gradient is skipped and the scale lowered: part of its work.
        harmless = self.step.scaler.is_enabled() and all(name.startswith("grad_norm/") for name in bad)
        if not bad or harmless:
            return
        lost = [name for name in bad if name in terms]
        if lost:
            what = f"{lost[0]!r} became {record[lost[0]]}"
        elif any(name.startswith("grad_norm/") for name in bad):
            what = "the gradient became non-finite"
        else:
            what = "the weights became non-finite"
        groups = dict.fromkeys(name.split("/", 1)[1] for name in bad if name not in terms)
        raise diverged(self.run, step, what, list(groups))

    def means(self) -> dict[str, float]:
        """Means over the steps since the last row, the sum of all loss terms first; nothing where there were none."""
        if not self.pending:
            return {}
        means = torch.tensor(self.pending, dtype=torch.float64).mean(0).tolist()
        self.pending = []
        values = dict(zip(self.step.columns, means, strict=True))
        return {"total": sum(values[term] for term in self.step.objective.terms)} | values
