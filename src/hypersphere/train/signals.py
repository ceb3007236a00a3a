"""Ctrl-C and a polite kill: a stop after the current step, with a checkpoint."""

from __future__ import annotations

import signal
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager

from hypersphere.errors import HypersphereError


class Interrupted(HypersphereError):  # noqa: N818 (not an error of anyone's)
    """Training was asked to stop; ``signal_number`` says how."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number


class Stop:
    """Notes the signal that asks training to stop.

    Example:
        >>> stop = Stop()
        >>> with stop.listening(alone=True):
        ...     stop.signal is None
        True
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt  # asked twice: stop at once
        self.signal = number

    @contextmanager
    def listening(self, *, alone: bool) -> Iterator[None]:
        """Listen while training.

        Args:
            alone: This is the only process; several would stop at different steps.
        """
        # Threads other than the main one cannot receive signals.
        heard = alone and threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if heard else ()
        before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
