"""What a network makes of point clouds: accuracy by class, and which points speak for and against the right class."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hypersphere.errors import ArgumentError, check_range
from hypersphere.evaluate import Metric, Outputs, class_accuracies, evaluations

MAX_POINTS = 1024
"""Most points of a cloud that are kept for its picture."""


def point_contributions(loss_gradient: Tensor, clouds: Tensor) -> Tensor:
    r"""What each point adds to a loss, to first order: :math:`x \cdot \partial L / \partial x`.

    It is how much the loss falls when the point moves towards the centre of the cloud, as a share of its way there.

    Args:
        loss_gradient: ``(B, 3, P)``, of the sum of the clouds' losses.
        clouds: ``(B, 3, P)``.

    Returns:
        ``(B, P)``; above 0 where a point speaks against the right class.

    Example:
        >>> point_contributions(torch.ones(1, 3, 2), torch.tensor([[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]]))
        tensor([[3., 0.]])
    """
    return (loss_gradient * clouds).sum(1)


def chosen_clouds(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    """Half of them the wrong ones that are most sure of themselves, then right ones, evenly spaced, where there are.

    Args:
        logits: ``(N, C)``.
        labels: ``(N,)``.
        count: How many at most.

    Returns:
        Places, wrong ones first.

    Example:
        >>> logits = torch.tensor([[9.0, 0.0], [0.0, 1.0], [0.0, 5.0], [2.0, 0.0]])
        >>> chosen_clouds(logits, torch.zeros(4, dtype=torch.int64), 3).tolist()
        [2, 0, 3]
    """
    sure, predicted = logits.float().softmax(1).max(1)
    is_wrong = predicted != labels
    wrong, right = is_wrong.nonzero().flatten(), (~is_wrong).nonzero().flatten()
    wrong = wrong[sure[wrong].argsort(descending=True)][: max(count // 2, count - len(right))]
    spaced = torch.linspace(0, len(right) - 1, min(count - len(wrong), len(right)), device=right.device).long()
    return torch.cat([wrong, right[spaced]])


@evaluations.register(
    "clouds",
    metrics=(
        Metric(
            "class_accuracy",
            "Mean class accuracy",
            unit="%",
            better="higher",
            curve="Mean test accuracy of the classes (%)",
            help="Mean over the classes of the share of their test samples that get the right class. Higher is better.",
        ),
    ),
)
def clouds(outputs: Outputs, *, count: int = 12) -> dict[str, float]:
    """Mean accuracy of the classes; also keeps clouds, wrong and right ones, with what each point adds to the loss.

    Args:
        outputs: What the model puts out.
        count: Clouds that the report shows; 0: none.
    """
    check_range("count", count, 0)
    counts, shares = class_accuracies(outputs)
    found = [share for share, number in zip(shares, counts, strict=True) if number]
    if count and outputs.predict is not None:
        _keep(outputs, count)
    return {"class_accuracy": sum(found) / len(found)} if found else {}


def _keep(outputs: Outputs, count: int) -> None:
    """Leave the artefacts ``clouds/...`` for the report."""
    images, data = outputs.images, outputs.data
    if images is None or data is None or images.shape[1:2] != (3,) or images.dim() != 3:
        raise ArgumentError("outputs", "must be of point clouds (N, 3, P)")
    assert outputs.predict is not None
    chosen = chosen_clouds(outputs.logits, outputs.labels, count)
    labels, scores = outputs.labels[chosen], outputs.logits[chosen].float().softmax(1)
    samples = images[chosen.to(images.device)].to(outputs.features.device).requires_grad_()
    with torch.enable_grad():
        loss = F.cross_entropy(outputs.predict(samples), labels, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, samples)
    encoded = [name.encode()[:64] for name in data.class_names]
    width = max(map(len, encoded))
    kept = {
        "points": samples.detach()[:, :, :MAX_POINTS],
        "contribution": point_contributions(gradient, samples.detach())[:, :MAX_POINTS],
        "labels": labels,
        "predicted": scores.argmax(1),
        "confidence": scores.amax(1),
        "names": torch.tensor([list(name.ljust(width, b"\0")) for name in encoded], dtype=torch.uint8),
    }
    outputs.artefacts.update({f"clouds/{name}": value for name, value in kept.items()})
