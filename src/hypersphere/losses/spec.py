"""What a head computes, as one frozen value: scale, weights, angular function, margin, negatives, targets, gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypersphere.angular import Angular, Cosine
from hypersphere.errors import ArgumentError, check_choice, check_count, check_range
from hypersphere.losses.negatives import Negatives, Plain
from hypersphere.margins import Margin, NoMargin

GRADIENTS = ("exact", "cgd", "caffe")
WEIGHT_GRADIENTS = ("tangent", "raw")
REDUCTIONS = ("mean", "sum", "none")
PATHS = ("auto", "dense", "compiled", "chunked")
_LOSSES = (
    "as normface, cosface, arcface, a-softmax and others have it: softmax, hinge, l-softmax and contrastive "
    "keep the lengths of class weights"
)


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    r"""The functions and settings of a :class:`MarginSoftmax`, checked when it is built.

    .. math:: f_{ij} = \text{scale}_{ij} \cdot
        \begin{cases} \psi(\theta_{ij}) & j = y_i \\ \eta(\theta_{ij}) & \text{else} \end{cases}

    It holds no tensors: weights, sizes of margins and counters are the state of the head. ``head.spec`` is the spec of
    a head; another one of the same weights takes its place by assignment::

        head.spec = dataclasses.replace(head.spec, reduction="none")

    Args:
        s: Constant scale, or where a learned one begins; ``None`` keeps the feature norm.
        learn_scale: Whether the scale is trained.
        unit_weights: Whether the directions of the class weights are compared with, or the weights.
        bias: Whether there is a bias per class.
        subcentres: Weight vectors of each class, of which the closest counts.
        g: Angular function of the non-target classes; margins and rules that name none of their own take it.
        psi: Margin function on the target.
        negatives: Rule of the non-target classes.
        gradient: ``"exact"``, ``"cgd"`` or ``"caffe"``.
        weight_gradient: ``"tangent"`` or ``"raw"``, of unit weights.
        label_smoothing: Share of the target that is spread evenly over all classes, in [0, 1).
        probability_floor: Added to every probability inside the logarithm, in [0, 1).
        ignore_index: Label of samples that count for nothing.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        sample_rate: Share of the classes compared with in a training step, in (0, 1].
        sparse: Whether the gradient of the weights is sparse.
        path: ``"auto"``, ``"dense"``, ``"compiled"`` or ``"chunked"``.
        validate: Whether labels and features are checked on every device.

    Example:
        >>> from hypersphere.margins import AdditiveAngle
        >>> HeadSpec(s=64.0, psi=AdditiveAngle()).unit_weights
        True
        >>> HeadSpec(gradient="none")
        Traceback (most recent call last):
        hypersphere.errors.ArgumentError: gradient must be one of 'exact', 'cgd', 'caffe', got 'none'
    """

    s: float | None = None
    learn_scale: bool = False
    unit_weights: bool = True
    bias: bool = False
    subcentres: int = 1
    g: Angular = field(default_factory=Cosine)
    psi: Margin = field(default_factory=NoMargin)
    negatives: Negatives = field(default_factory=Plain)
    gradient: str = "exact"
    weight_gradient: str = "tangent"
    label_smoothing: float = 0.0
    probability_floor: float = 0.0
    ignore_index: int = -100
    reduction: str = "mean"
    sample_rate: float = 1.0
    sparse: bool = False
    path: str = "auto"
    validate: bool = False

    def __post_init__(self) -> None:
        self._check_scale()
        check_choice("gradient", self.gradient, GRADIENTS)
        check_choice("weight_gradient", self.weight_gradient, WEIGHT_GRADIENTS)
        check_choice("reduction", self.reduction, REDUCTIONS)
        check_choice("path", self.path, PATHS)
        check_count("subcentres", self.subcentres)
        check_range("sample_rate", self.sample_rate, 0, 1, open_low=True)
        self._check_functions()
        self._check_targets()
        if self.sparse and self.sample_rate == 1:
            raise ArgumentError("sparse", "needs sample_rate below 1: with all classes the gradient is dense")
        object.__setattr__(self, "psi", self.psi.of(self.g))
        object.__setattr__(self, "negatives", self.negatives.of(self.g).detached(self.gradient == "cgd"))

    def _check_scale(self) -> None:
        if self.s is not None:
            check_range("s", self.s, 0, open_low=True)
        if self.bias and self.unit_weights:
            raise ArgumentError("bias", "needs unit_weights=False: a bias is not a direction")
        if self.learn_scale and self.s is None:
            raise ArgumentError("learn_scale", "needs s, the scale to start from")

    def _check_functions(self) -> None:
        kinds: dict[str, type[Any]] = {"g": Angular, "psi": Margin, "negatives": Negatives}
        for name, kind in kinds.items():
            if not isinstance(value := getattr(self, name), kind):
                raise ArgumentError(name, f"must be of type {kind.__name__}, got {value!r}")
        if not self.unit_weights and self.gradient == "caffe":
            raise ArgumentError("gradient", f"'caffe' needs unit_weights=True, {_LOSSES}")
        if not self.unit_weights and self.weight_gradient == "raw":
            raise ArgumentError("weight_gradient", f"'raw' needs unit_weights=True, {_LOSSES}")
        if not self.unit_weights and self.subcentres > 1 and not isinstance(self.psi, NoMargin):
            raise ArgumentError("subcentres", f"above 1 with a margin needs unit_weights=True, {_LOSSES}")
        if not self.unit_weights and not isinstance(self.g, Cosine):
            raise ArgumentError("g", "needs unit_weights=True: other functions than the cosine act on directions")
        if not self.unit_weights and not self.negatives.plain:
            kind = type(self.negatives)
            raise ArgumentError("negatives", f"needs unit_weights=True: {kind.__name__} acts on cosines")

    def _check_targets(self) -> None:
        for option in ("label_smoothing", "probability_floor"):
            value = getattr(self, option)
            if not 0 <= value < 1:
                raise ArgumentError(option, f"must be at least 0 and less than 1, got {value}")
            if value and not self.negatives.softmax:
                rule = type(self.negatives).__name__
                raise ArgumentError(option, f"has no meaning for the rule {rule}, which has no softmax")
        if self.probability_floor and self.sample_rate < 1:
            raise ArgumentError("probability_floor", f"needs sample_rate=1, all classes, got {self.sample_rate}")
        if self.all_logits and self.path == "chunked":
            raise ArgumentError("path", "must not be 'chunked' with probability_floor and label_smoothing together")

    @property
    def all_logits(self) -> bool:
        """Whether the loss needs all logits at once: smoothed labels weigh every probability with its floor."""
        return bool(self.probability_floor and self.label_smoothing)

    @property
    def linear(self) -> bool:
        """Whether logits are products of features and weights as they are, and a bias."""
        lengths = self.s is None and not self.unit_weights
        return lengths and isinstance(self.psi, NoMargin) and isinstance(self.psi.g, Cosine)

    @property
    def soft_labels(self) -> bool:
        """Whether labels may be soft: shares of all classes."""
        return self.gradient != "caffe"
