"""Where to compute, and in which precision."""

from __future__ import annotations

import torch

from hypersphere.errors import ArgumentError

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Types of the precisions of recipes that compute in half precision."""


def pick_device(name: str = "auto") -> torch.device:
    """The device called ``name``; ``"auto"`` is the first CUDA device where there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ArgumentError("device", f"must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError("device", f"must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {name!r}")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise ArgumentError("device", f"is {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices here")
        torch.cuda.set_device(device)  # streams and graphs are made on the current device
    return device
