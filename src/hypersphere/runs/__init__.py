"""Runs as things: their folder, what is in it, and the model, head and preprocessing that a recipe describes."""

from hypersphere.runs.build import build
from hypersphere.runs.folder import RunError, RunFolder, atomic_write, code_version, load_checkpoint

__all__ = ["RunError", "RunFolder", "atomic_write", "build", "code_version", "load_checkpoint"]
