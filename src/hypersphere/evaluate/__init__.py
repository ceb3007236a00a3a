"""Evaluation: metrics as pure functions, and named groups of them for recipes."""

from hypersphere.evaluate.faces import lfw
from hypersphere.evaluate.named import named_protocols
from hypersphere.evaluate.protocols import METRICS, MISSING, Metric, Outputs, columns, evaluations, measure, table
from hypersphere.evaluate.robustness import CHECKS, explain

__all__ = [
    "CHECKS",
    "METRICS",
    "MISSING",
    "Metric",
    "Outputs",
    "columns",
    "evaluations",
    "explain",
    "lfw",
    "measure",
    "named_protocols",
    "table",
]
