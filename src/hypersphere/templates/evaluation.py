r"""An evaluation of your own: numbers of what a trained model puts out on the test samples.

hypersphere list evaluations --plugin my_name.py
hypersphere train digits-softmax --plugin my_name.py 'evaluate.metrics=[classification, {name: my-name, quantile: 0.1}]'
"""

from __future__ import annotations

import torch

from hypersphere.errors import check_range
from hypersphere.evaluate import Metric, Outputs, evaluations
from hypersphere.geometry import cosine


@evaluations.register(
    "my-name", metrics=(Metric("my_name", "Low target cosine", form=".3f", better="higher", help="Higher is tighter."),)
)
def my_name(outputs: Outputs, quantile: float = 0.05) -> dict[str, float]:
    """Cosine between a sample and its own class that all but a few test samples reach.

    Args:
        outputs: Features ``(N, D)``, logits ``(N, C)``, labels ``(N,)``, class weights ``(C, D)``, the model, the data.
        quantile: Share of the samples that lie below.
    """
    check_range("quantile", quantile, 0, 1)
    cosines = cosine(outputs.features, outputs.weight[outputs.labels])
    return {"my_name": float(torch.quantile(cosines, quantile))}
