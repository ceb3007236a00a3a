"""All that a module is, to be compared before and after a call that was refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

_PARTS = ("_parameters", "_buffers", "_modules")


def frozen(value: Any) -> Any:
    """A value that later changes do not reach: contents of containers and tensors, identities of objects."""
    if isinstance(value, Tensor):
        return id(value), value.requires_grad, value.detach().clone()
    if isinstance(value, dict):
        return {str(key): frozen(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [frozen(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return frozen(vars(value))
    return value if isinstance(value, (int, float, str, type(None), torch.dtype)) else id(value)


def state(model: nn.Module) -> dict[str, Any]:
    """Types, tensors with their storage and flags, children, hooks and every other attribute, of all parts."""
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        held = {key: frozen(value) for key, value in vars(module).items() if key not in _PARTS}
        parts = {part: frozen(vars(module)[part]) for part in _PARTS}
        found[path] = {"itself": (id(module), type(module).__name__), **held, **parts}
    return found


def same(before: Any, now: Any, where: str = "") -> None:
    """Assert that two states are equal, and say where they are not."""
    assert type(before) is type(now), f"{where} is another type"
    if isinstance(before, dict):
        assert list(before) == list(now), f"{where}: {list(before)} became {list(now)}"
        for key, value in before.items():
            same(value, now[key], f"{where}/{key}")
    elif isinstance(before, (list, tuple)):
        assert len(before) == len(now), where
        for place, (old, new) in enumerate(zip(before, now, strict=True)):
            same(old, new, f"{where}/{place}")
    elif isinstance(before, Tensor):
        torch.testing.assert_close(now, before, rtol=0, atol=0, equal_nan=True, msg=lambda why: f"{where}: {why}")
    else:
        assert before == now or before != before, f"{where}: {before} became {now}"
