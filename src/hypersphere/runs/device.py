"""Where to compute, and in which precision."""

from __future__ import annotations

import torch

from hypersphere.errors import ArgumentError

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Types of the precisions of recipes that compute in half precision."""


def pick_device(name: str = "auto") -> torch.device:
    """The device called ``name``; ``"auto"`` is the first CUDA device where there is one, else the CPU.

    Apple's ``"mps"`` has to be asked for: it knows no float64, so that near angles have fewer digits there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    allowed = "must be 'auto', 'cpu', 'cuda', 'cuda:N' or 'mps'"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ArgumentError("device", f"{allowed}, got {name!r}") from error
    if device.type not in ("cpu", "cuda", "mps"):
        raise ArgumentError("device", f"{allowed}, got {name!r}")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ArgumentError("device", "is 'mps', but torch sees no Metal device here")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise ArgumentError("device", f"is {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices here")
        torch.cuda.set_device(device)  # streams and graphs are made on the current device
    return device
