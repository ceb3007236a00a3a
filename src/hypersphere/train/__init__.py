"""Training: a recipe and data in, a run folder out."""

from hypersphere.train.callbacks import Callback, ProgressBar, TensorBoard
from hypersphere.train.records import DivergedError
from hypersphere.train.signals import Interrupted
from hypersphere.train.trainer import Trainer

__all__ = [
    "Callback",
    "DivergedError",
    "Interrupted",
    "ProgressBar",
    "TensorBoard",
    "Trainer",
]
