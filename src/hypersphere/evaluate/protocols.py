"""Published evaluation protocols by name: ``lfw10``, ``ytf10``, ``megaface`` and ``ijb``.

A protocol takes features of a benchmark (tensors) and what the benchmark says about them, and returns numbers with
intervals and in words. The same functions are members of :mod:`hypersphere.metrics`; here they have names, which
``hypersphere list protocols`` shows with their options.

Example:
    >>> import torch
    >>> left, right = torch.tensor([[1.0, 0.1], [1.0, 0.0]] * 2), torch.tensor([[1.0, 0.2], [0.0, 1.0]] * 2)
    >>> same, folds = torch.tensor([True, False] * 2), torch.tensor([0, 0, 1, 1])
    >>> protocols.create("lfw10", left, right, same, folds, variant="insightface").value
    1.0
"""

from __future__ import annotations

from typing import Any

from hypersphere.metrics import ijb, lfw10, megaface, ytf10
from hypersphere.registry import Registry

protocols: Registry[Any] = Registry(
    "protocol",
    positional=(
        *("left", "right", "same", "folds", "mirrored"),
        *("frames", "videos", "first", "second"),
        *("probes", "probe_ids", "distractors"),
        *("features", "templates", "media", "subjects", "pairs", "gallery"),
        "group",
    ),
)
"""Protocols by name; what a benchmark gives (features, pairs, people) are arguments, as is who computes (``group``);
everything else is an option."""

protocols.register("lfw10", aliases=("lfw",))(lfw10)
protocols.register("ytf10", aliases=("ytf",))(ytf10)
protocols.register("megaface")(megaface)
protocols.register("ijb", aliases=("ijb-b", "ijb-c"))(ijb)
