"""What an evaluation sees of a trained model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from hypersphere.data import Dataset
from hypersphere.metrics.processes import Group


@dataclass(frozen=True)
class Outputs:
    """What a model and its head put out on the test split, and on classes that training did not see.

    Attributes:
        features: ``(N, D)`` test features.
        logits: ``(N, C)`` scores without margin.
        labels: ``(N,)``.
        weight: ``(C, D)`` class weights.
        unseen_features: ``(M, D)`` features of held-out classes.
        unseen_labels: ``(M,)``.
        class_counts: ``(C,)`` number of training images of each class.
        data: The data set, for evaluations that look at samples.
        model: The model, in evaluation mode.
        features_of: Samples as the data set holds them, but images as floats in [0, 1], to features ``(B, D)``;
            differentiable.
        predict: The same to scores ``(B, C)``.
        seed: The run's seed, for what an evaluation draws.
        data_root: Where data sets are looked for, where that was said.
        artefacts: Where an evaluation leaves tensors for the pictures of the report, as ``section/name``.
        group: Processes that evaluate together, each with these outputs: an evaluation that ``shares`` divides its
            work over them. ``None``: this one alone.
        together: Whether these processes hold the weights of model or head together, so that all of them have to call
            these alike; then each does all of the work.
    """

    features: Tensor
    logits: Tensor
    labels: Tensor
    weight: Tensor
    unseen_features: Tensor | None = None
    unseen_labels: Tensor | None = None
    class_counts: Tensor | None = None
    data: Dataset | None = None
    model: nn.Module | None = None
    features_of: Callable[[Tensor], Tensor] | None = None
    predict: Callable[[Tensor], Tensor] | None = None
    seed: int = 0
    data_root: Path | None = None
    artefacts: dict[str, Tensor] = field(default_factory=dict)
    group: Group | None = None
    together: bool = False

    @property
    def images(self) -> Tensor | None:
        """Test samples as the data set holds them, where they are one tensor."""
        return None if self.data is None else getattr(self.data.test, "images", None)
