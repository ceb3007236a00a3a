"""The errors a user can cause, each with a message that says what was wrong and what is allowed."""

from __future__ import annotations

import numbers
import sys
import warnings


class HypersphereError(Exception):
    """Base of every error that a user can cause; the command line prints these without a traceback."""

    exit_code = 2
    """What the command line ends with: 2 for wrong input, 1 for a run that failed, 128 + n for signal n."""


class ArgumentError(HypersphereError, ValueError):
    """A bad argument.

    Args:
        argument: Name of the argument.
        message: What it was and what is allowed; the argument's name is put in front.

    Example:
        >>> raise ArgumentError("m", "must be at least 1, got 0.5")
        Traceback (most recent call last):
        hypersphere.errors.ArgumentError: m must be at least 1, got 0.5
    """

    def __init__(self, argument: str, message: str) -> None:
        super().__init__(argument, message)  # both, so that it can be pickled
        self.argument = argument

    def __str__(self) -> str:
        return " ".join(self.args)


def without_workbench(what: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error of something that needs a package which only the workbench brings, with what to install.

    Example:
        >>> print(without_workbench("hypersphere.load", ModuleNotFoundError(name="yaml")))
        hypersphere.load needs yaml, which is not installed: pip install "hypersphere[workbench]"
    """
    text = f'{what} needs {error.name}, which is not installed: pip install "hypersphere[workbench]"'
    return ModuleNotFoundError(text, name=error.name)


def check_range(
    argument: str,
    value: float,
    low: float = float("-inf"),
    high: float = float("inf"),
    *,
    open_low: bool = False,
    infinite: bool = False,
) -> None:
    """Raise :class:`ArgumentError` unless ``low <= value <= high`` (``low < value`` with ``open_low``).

    An infinite number is refused unless ``infinite`` allows it.

    Example:
        >>> check_range("s", 0.0, 0, open_low=True)
        Traceback (most recent call last):
        hypersphere.errors.ArgumentError: s must be greater than 0, got 0.0
    """
    try:
        inside = (value > low if open_low else value >= low) and value <= high
        if inside and (infinite or abs(value) != float("inf")):
            return
    except (TypeError, RuntimeError):  # a text, a tensor of several numbers
        raise ArgumentError(argument, f"must be a number, got {type(value).__name__}") from None
    limits = []
    if low != float("-inf"):
        limits.append(f"{'greater than' if open_low else 'at least'} {low:g}")
    if high != float("inf"):
        limits.append(f"at most {high:g}")
    if not infinite and (value in (float("inf"), float("-inf"))):
        limits.append("finite")
    raise ArgumentError(argument, f"must be {' and '.join(limits) or 'a number'}, got {value}")


def check_count(argument: str, value: int, low: int = 1) -> None:
    """Raise :class:`ArgumentError` unless ``value`` is a whole number of at least ``low``.

    Example:
        >>> check_count("dim", 4.0)
        Traceback (most recent call last):
        hypersphere.errors.ArgumentError: dim must be a whole number, got 4.0
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise ArgumentError(argument, f"must be a whole number, got {value!r}")
    check_range(argument, value, low)


def check_flag(argument: str, value: bool) -> None:
    """Raise :class:`ArgumentError` unless ``value`` is ``True`` or ``False``.

    Example:
        >>> check_flag("half_space", 1)
        Traceback (most recent call last):
        hypersphere.errors.ArgumentError: half_space must be True or False, got 1
    """
    if not isinstance(value, bool):
        raise ArgumentError(argument, f"must be True or False, got {value!r}")


def check_seed(seed: int) -> None:
    """Raise :class:`ArgumentError` unless a seed is a whole number, of any sign.

    Example:
        >>> check_seed("first")
        Traceback (most recent call last):
        hypersphere.errors.ArgumentError: seed must be a whole number, got 'first'
    """
    if not isinstance(seed, numbers.Integral):
        raise ArgumentError("seed", f"must be a whole number, got {seed!r}")


def check_step(step: int, seed: int, rate: float) -> None:
    """Raise :class:`ArgumentError` unless a training step, its seed and its learning rate are such.

    Example:
        >>> check_step(-1, 0, 0.1)
        Traceback (most recent call last):
        hypersphere.errors.ArgumentError: step must be at least 0, got -1
    """
    check_count("step", step, 0)
    check_seed(seed)
    check_range("rate", rate, 0)


def check_choice(argument: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise :class:`ArgumentError` unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise ArgumentError(argument, f"must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def warn(message: str) -> None:
    """Warn the user, at the place in the user's own code from which this package was called.

    Example:
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn("it has no effect")
        >>> str(caught[0].message)
        'it has no effect'
    """
    frame, levels = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("hypersphere.", "torch.")):
        frame, levels = frame.f_back, levels + 1
    warnings.warn(message, stacklevel=levels)
