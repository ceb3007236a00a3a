"""Runs as things: their folder, the form of their files, and the system that a run has trained."""

from hypersphere.runs.artefacts import Artefact, RunError, layer_name, layer_parts
from hypersphere.runs.build import build, load_data
from hypersphere.runs.device import pick_device
from hypersphere.runs.evaluation import metrics_of, outputs_of, write_evaluation
from hypersphere.runs.folder import RunFolder, atomic_write, code_version, load_checkpoint
from hypersphere.runs.gallery import Gallery, Match, fingerprint
from hypersphere.runs.loading import load, load_with_data
from hypersphere.runs.read import Run, load_run
from hypersphere.runs.system import Prediction, System, described

__all__ = [
    "Artefact",
    "Gallery",
    "Match",
    "Prediction",
    "Run",
    "RunError",
    "RunFolder",
    "System",
    "atomic_write",
    "build",
    "code_version",
    "described",
    "fingerprint",
    "layer_name",
    "layer_parts",
    "load",
    "load_checkpoint",
    "load_data",
    "load_run",
    "load_with_data",
    "metrics_of",
    "outputs_of",
    "pick_device",
    "write_evaluation",
]
