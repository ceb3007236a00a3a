"""Under which conditions a run repeats itself bit for bit, and what differs where it goes on under others.

A run is a function of its recipe and its data, and of how sums are rounded: their order depends on the number of
threads and processes, on the processor (its vector units) or GPU, on the versions of torch and of this package, and on
the flags that choose among torch's kernels. Under equal conditions a run on a CPU repeats itself byte for byte,
interrupted or not. On a GPU torch's kernels with atomic additions (of embeddings and sampled classes, of some
convolutions backward) do so with ``torch.use_deterministic_algorithms(True)``.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from hypersphere.geometry import products_precision

_VERSIONS = ("version", "torch", "numpy", "cuda")
DECISIVE = (*_VERSIONS, "device", "processor", "vectors", "threads", "processes", "flags")
"""Conditions on which the bits of a result depend; what else is recorded explains, should they differ nevertheless."""


def environment(device: torch.device) -> dict[str, str]:
    """What a result may depend on besides the recipe; see :data:`DECISIVE`.

    Example:
        >>> environment(torch.device("cpu"))["torch"] == torch.__version__
        True
    """
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine()
    flags = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "products": products_precision(),
        **({"cudnn.benchmark": torch.backends.cudnn.benchmark} if cuda else {}),
        **({"cudnn.deterministic": torch.backends.cudnn.deterministic} if cuda else {}),
    }
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": f"{device.type} ({name})",
        "processor": _processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "processes": os.environ.get("WORLD_SIZE", "1"),
        "flags": ", ".join(f"{flag}={value}" for flag, value in flags.items()),
    }
    return found | ({"cuda": f"{torch.version.cuda}, cudnn {torch.backends.cudnn.version()}"} if cuda else {})


def _processor() -> str:
    """The model of the CPU, whose libraries choose their kernels by it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs of the decisive conditions, of those that both name: older runs recorded fewer.

    Example:
        >>> differences({"threads": "2", "torch": "2.10"}, {"threads": "1", "torch": "2.10", "flags": ""})
        ['threads: 2 before, 1 now']
    """
    both = [key for key in DECISIVE if key in before and key in now]
    return [f"{key}: {before[key]} before, {now[key]} now" for key in both if before[key] != now[key]]
