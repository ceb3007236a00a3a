"""Training: a recipe and data in, a run folder out."""

from hypersphere.train.callbacks import Callback, EnergyLog, ProgressBar, TensorBoard
from hypersphere.train.trainer import DivergedError, Interrupted, Trainer

__all__ = [
    "Callback",
    "DivergedError",
    "EnergyLog",
    "Interrupted",
    "ProgressBar",
    "TensorBoard",
    "Trainer",
]
