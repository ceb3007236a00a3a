"""Evaluation: metrics as pure functions, and named groups of them for recipes."""

from hypersphere.evaluate.metrics import accuracy, class_centres, equal_error_rate, pair_scores
from hypersphere.evaluate.protocols import METRICS, MISSING, Metric, Outputs, evaluations, measure, table

__all__ = [
    "METRICS",
    "MISSING",
    "Metric",
    "Outputs",
    "accuracy",
    "class_centres",
    "equal_error_rate",
    "evaluations",
    "measure",
    "pair_scores",
    "table",
]
