"""Evaluation: what is measured of a trained model, by name for recipes, and how it is shown.

An evaluation takes :class:`Outputs` and returns metrics; it declares with :class:`Metric` how these are shown:

    >>> from hypersphere.evaluate import Metric, evaluations
    >>> @evaluations.register("sure", metrics=(Metric("sure", "Sure answers", unit="%", better="higher"),))
    ... def sure(outputs, *, above: float = 0.9):
    ...     return {"sure": float((outputs.logits.softmax(1).amax(1) > above).double().mean())}
    >>> evaluations.metric("sure").text(0.5)
    '50.00%'
    >>> evaluations.remove("sure")
"""

from hypersphere.evaluate.outputs import Outputs
from hypersphere.evaluate.protocols import protocols
from hypersphere.evaluate.registry import Metric, evaluations, measure
from hypersphere.evaluate.shared import class_accuracies
from hypersphere.evaluate.table import MISSING, Cell, columns, details, table

__all__ = [
    "MISSING",
    "Cell",
    "Metric",
    "Outputs",
    "class_accuracies",
    "columns",
    "details",
    "evaluations",
    "measure",
    "protocols",
    "table",
]
