"""Node classification: the validation nodes of a graph, and what pictures of all its nodes need."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from hypersphere.data import TensorSplit
from hypersphere.errors import check_range
from hypersphere.evaluate import Metric, Outputs, evaluations
from hypersphere.metrics.basic import accuracy


@evaluations.register(
    "graph",
    metrics=(
        Metric(
            "validation_accuracy",
            "Validation accuracy",
            unit="%",
            better="higher",
            help="Share of the validation nodes of a graph that get the right class. Higher is better.",
        ),
        Metric(
            "validation_loss",
            "Cross-entropy of validation nodes",
            form=".4f",
            better="lower",
            help="Mean cross-entropy of the validation nodes of a graph. Lower is better.",
            detail=True,
        ),
    ),
)
@torch.no_grad()
def graph(outputs: Outputs) -> dict[str, float]:
    """Accuracy and cross-entropy of a graph's validation nodes; leaves the features of all nodes.

    There is nothing for data that is no graph, nor where classes were held out: the others have new numbers then.
    """
    data = outputs.data
    if data is None or "edges" not in data.context or outputs.features_of is None or outputs.predict is None:
        return {}
    labels, validation, edges = (data.context[key] for key in ("labels", "validation", "edges"))
    device = outputs.features.device
    scores = outputs.predict(torch.arange(len(labels), device=device))
    if int(labels.max()) >= scores.shape[1]:
        return {}
    features = outputs.features_of(torch.arange(len(labels), device=device))
    trained = torch.zeros(len(labels), dtype=torch.bool)
    if isinstance(data.train, TensorSplit):
        trained[data.train.images] = True
    names = "\n".join(data.class_names).encode()
    found = {
        "graph/features": features,
        "graph/edges": edges,
        "graph/labels": labels,
        "graph/predicted": scores.argmax(1),
        "graph/trained": trained,
        "graph/classes": torch.tensor(list(names), dtype=torch.uint8),
    }
    outputs.artefacts.update(found)
    chosen = validation.to(device)
    known = labels.to(device)[chosen]
    loss = F.cross_entropy(scores[chosen].float(), known)
    return {"validation_accuracy": accuracy(scores[chosen], known), "validation_loss": float(loss)}


def early_stop(losses: Sequence[float], patience: int = 10) -> int:
    """Number of epochs after which training would have stopped, by the rule that was published for GCN.

    It stops after the first epoch beyond ``patience`` whose validation loss is above the mean of the ``patience``
    losses before it.

    Args:
        losses: Validation loss after each epoch.
        patience: Losses in the mean.

    Example:
        >>> early_stop([3.0, 2.0, 1.0, 2.5], patience=2), early_stop([3.0, 2.0, 1.0], patience=2)
        (4, 3)
    """
    check_range("patience", patience, 1)
    for epoch in range(patience + 1, len(losses)):
        if losses[epoch] > sum(losses[epoch - patience : epoch]) / patience:
            return epoch + 1
    return len(losses)
