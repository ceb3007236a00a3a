"""A file of a user's own."""

from pathlib import Path

MARGIN = '''"""Mine."""
from __future__ import annotations
from dataclasses import dataclass
from torch import Tensor
import hypersphere as hs

@hs.margins.margins.register("{name}", aliases=("{name}-too",))
@dataclass(frozen=True)
class Mine(hs.margins.Margin):
    """A margin of mine."""

    def psi(self, theta: Tensor, m: float = 0.1) -> Tensor:
        """Target value."""
        return theta.cos() - m
'''


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file
