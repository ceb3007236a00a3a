"""Evaluation: metrics as pure functions, and named groups of them for recipes."""

from hypersphere.evaluate.gallery import Gallery, Match, fingerprint
from hypersphere.evaluate.named import named_protocols
from hypersphere.evaluate.protocols import METRICS, MISSING, Metric, Outputs, columns, evaluations, measure, table

__all__ = [
    "METRICS",
    "MISSING",
    "Gallery",
    "Match",
    "Metric",
    "Outputs",
    "columns",
    "evaluations",
    "fingerprint",
    "measure",
    "named_protocols",
    "table",
]
