"""How float32 products are rounded in a test, whatever was set before it and by which of torch's two interfaces."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

MATMUL = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)


@contextmanager
def float32_products(level: str) -> Iterator[None]:
    """``torch.set_float32_matmul_precision`` for a while.

    It sets both interfaces alike, so that torch may ask either. What was there is asked of the newer one alone, which
    always answers, and tests begin with the older one at its default.
    """
    before = [setting.fp32_precision for setting in MATMUL if hasattr(setting, "fp32_precision")]
    torch.set_float32_matmul_precision(level)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        for setting, precision in zip(MATMUL, before, strict=False):
            setting.fp32_precision = precision
