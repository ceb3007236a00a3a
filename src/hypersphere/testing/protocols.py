"""The contract of protocols of benchmarks: functions of features and of who they show, as in their examples.

What they take differs from benchmark to benchmark, so the closed point is the example in a member's help.
"""

from __future__ import annotations

import inspect
from itertools import pairwise

from hypersphere.testing import common
from hypersphere.testing.contract import Contract

CONTRACT = Contract("protocol", "protocols", "hypersphere.evaluate:protocols")


@CONTRACT.check
def tells_what_it_takes(name: str) -> None:
    """What a benchmark gives comes first and has no default; everything else is an option with one."""
    entry = CONTRACT.entry(name)
    given = set(inspect.signature(entry.factory).parameters) & set(entry.positional)
    assert given, f"it takes none of {', '.join(entry.positional)}"
    for option in entry.options:
        assert not option.required, f"the option {option.name} has no default"


@CONTRACT.check
def prints_numbers(name: str) -> None:
    """Its example shows a number that was computed."""
    lines = (inspect.getdoc(CONTRACT.entry(name).factory) or "").split("\n")
    shown = [after for line, after in pairwise(lines) if ">>>" in line and ">>>" not in after]
    assert any(any(c.isdigit() for c in line) for line in shown), "its example shows no number"


common.add(CONTRACT)
