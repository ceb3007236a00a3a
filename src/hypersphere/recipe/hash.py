"""What makes two recipes the same run."""

from __future__ import annotations

import hashlib
import json
from typing import Any

HOUSEKEEPING: dict[str, Any] = {
    "name": True,
    "help": True,
    "data": {"workers"},
    "train": {"tensorboard", "keep_checkpoints"},
}


_LATER: dict[tuple[str, ...], Any] = {
    ("convert",): None,
    ("orthogonal",): None,
    ("adversary",): None,
    ("loss", "rotation"): None,
    ("loss", "probability_floor"): 0.0,
    ("project",): {"every": 0, "s": 1.0},
    ("data", "augment", "crop_mode"): "zeros",
    **{("data", "augment", key): value for key, value in (("rotate", False), ("shuffle", False), ("scale", 1.0))},
    **{("data", "augment", key): 0.0 for key in ("tilt", "shift", "jitter")},
    ("data", "imbalance"): {"keep": {}, "graded": 0, "seed": 0},
    ("optimiser", "rules"): [],
    ("evaluate", "recalibrate"): 0,
    ("evaluate", "energy"): False,
    **{
        ("model", option): value
        for option, value in {
            **{"stem": "none", "kernel": 3, "pool": "2x2", "pool_last": True, "hidden": [], "fc_bn": False},
            **{"fc_act": False, "fc_bias": False, "fc_decoupled": True, "slope": None, "init": "conv"},
            **{"bn_eps": None, "bn_momentum": None},
        }.items()
    },
}
"""Keys that were added after results had been recorded, with what means "as before": that is left out of the hash."""


_LATER_OF_REGULARISERS: dict[str, Any] = {
    **{"schedule": None, "hidden_weight": 1.0, "output_weight": 1.0, "angular": False, "eps": 0.0},
}
"""The same of every regulariser."""


def digest(content: dict[str, Any]) -> str:
    """Twelve hex digits of a recipe's content, without keys that came later and are as before."""
    for (*sections, key), before in _LATER.items():
        section = content
        for name in sections:
            section = section[name]
        if key in section and section[key] == before:
            del section[key]
    for part in content["regularisers"]:
        for key, before in _LATER_OF_REGULARISERS.items():
            if key in part and part[key] == before:
                del part[key]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
