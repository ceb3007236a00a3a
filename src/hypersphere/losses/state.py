"""What a head keeps: class weights, scale, sizes of margins and counters, and how they begin, grow and move."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from hypersphere.errors import ArgumentError, check_count
from hypersphere.geometry import at_least_float32, norm, normalise, spherical_mean, transformed
from hypersphere.losses.batch import Batch, Steps, check_features, check_labels, check_values
from hypersphere.losses.pairs import move_centres
from hypersphere.losses.processes import own_share, whole_batch
from hypersphere.losses.registry import losses
from hypersphere.losses.rotation import ClassRotation, make_rotation
from hypersphere.losses.schedules import LambdaAnnealer, Ramp, Schedule
from hypersphere.losses.spec import HeadSpec

MarginSize: TypeAlias = float | list[float] | Tensor | Ramp | Schedule
"""A margin: one number, one for each class, or a schedule over the training steps."""

Kept: TypeAlias = tuple[float | Schedule | None, Tensor | None]
"""A margin as a head keeps it: a number or a schedule, or else one number for each class."""

LEAST_SCALE = 0.01


class HeadState(nn.Module):
    """The tensors of a head, and everything about it that a training step or a growing data set changes.

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        spec: What the head computes.
        margins: Size of each margin by its name.
        annealer: Blends the margin in over the first training steps.
        class_weights: ``(C,)``, how much a sample of each class counts.
        frozen: Do not train the class weights.
        rotation: Name of an orthogonal map, or a module that features go through first.
    """

    spec: HeadSpec
    """What the head computes; see :class:`HeadSpec`."""
    m: float | Schedule | None
    """The margin; ``None`` where it is one for each class."""
    m_by_class: Tensor | None
    class_weights: Tensor | None
    sync_statistics: bool = True
    """Whether what a training step learns of its batch (running means and centres) is that of the batches of all
    processes of ``torch.distributed``, as where the head is replicated; ``False`` where each has a head of its own, or
    calls it alone."""
    narrow_buffers: ClassVar[tuple[str, ...]] = ()
    """Buffers that follow the head into 16 bit; others (margins, running statistics) would lose digits they need."""

    def __init__(
        self,
        dim: int,
        classes: int,
        spec: HeadSpec,
        margins: Mapping[str, MarginSize],
        *,
        annealer: LambdaAnnealer | None,
        class_weights: list[float] | Tensor | None,
        frozen: bool,
        rotation: str | Callable[[Tensor], Tensor] | None,
    ) -> None:
        super().__init__()
        check_count("dim", dim)
        check_count("classes", classes)
        if annealer is not None and not isinstance(annealer, LambdaAnnealer):
            raise ArgumentError("annealer", f"must be a LambdaAnnealer, got {type(annealer).__name__}")
        self.dim, self.classes, self.spec, self.annealer = dim, classes, spec, annealer
        self.rotation = make_rotation(dim, rotation)
        self.margin_names = tuple(margins)
        sizes = {name: self._kept(name, size) for name, size in margins.items()}
        self.check_margins(sizes)
        for name, (size, per_class) in sizes.items():
            setattr(self, name, size)
            self.register_buffer(f"{name}_by_class", per_class)
        learned = spec.s if spec.learn_scale else None
        self.learned_scale = None if learned is None else nn.Parameter(torch.tensor(float(learned)))
        self.register_buffer("class_weights", self._checked_class_weights(class_weights))
        if spec.weight_gradient == "raw" and (frozen or self.rotates_classes):
            raise ArgumentError("weight_gradient", "must not be 'raw' for class weights that are not trained")
        weight = torch.empty(classes * spec.subcentres, dim)
        self.weight = nn.Parameter(weight, requires_grad=not (frozen or self.rotates_classes))
        self.bias = nn.Parameter(torch.empty(classes)) if spec.bias else None
        self.reset_parameters()

    # -------------------------------------------------------------------------------------------- margins

    def _kept(self, name: str, size: MarginSize) -> Kept:
        """A margin as it is kept; nothing is changed."""
        if isinstance(size, list | tuple | Tensor | np.ndarray):
            return None, self._per_class(name, size)
        if not isinstance(size, Schedule | numbers.Real):
            raise ArgumentError(name, f"must be a number, one for each class or a schedule, got {type(size).__name__}")
        return size if isinstance(size, Schedule) else float(size), None

    def _per_class(self, name: str, numbers: Sequence[float] | Tensor | NDArray[Any]) -> Tensor:
        """A finite number for each class, as a tensor beside the weights (or where these will be made)."""
        try:
            device = self.weight.device if hasattr(self, "weight") else None
            tensor = torch.as_tensor(numbers, dtype=torch.get_default_dtype(), device=device).clone()
        except (TypeError, ValueError, RuntimeError) as error:  # texts, lists of unequal length
            raise ArgumentError(name, f"must be {self.classes} numbers, one for each class: {error}") from None
        if tensor.shape != (self.classes,):
            raise ArgumentError(name, f"must have shape ({self.classes},), got {tuple(tensor.shape)}")
        if not bool(tensor.isfinite().all()):
            row = int((~tensor.isfinite()).nonzero()[0])
            raise ArgumentError(name, f"must be finite, got {float(tensor[row])} for class {row}")
        return tensor

    def margin_bounds(self, name: str) -> tuple[float, float]:
        """Least and largest size of a margin, over all classes and steps."""
        return bounds(getattr(self, name), getattr(self, f"{name}_by_class"))

    def check_margins(self, sizes: Mapping[str, Kept]) -> None:
        """Raise :class:`ArgumentError` unless the margins may have these sizes."""
        found = {name: bounds(*kept) for name, kept in sizes.items()}
        for end in (0, 1):
            try:
                self.spec.psi.check(**{name: both[end] for name, both in found.items()})
            except KeyError as error:
                needed = f"the margin {type(self.spec.psi).__name__} needs {error}"
                raise ArgumentError("m", f"is not enough: {needed}; the preset 'combined' takes them") from None

    def set_margin(self, **sizes: MarginSize) -> None:
        """Change margins of a built head, checked as when it was built.

        Args:
            **sizes: ``m``, or the margins of a member with several, each a number, one for each class or a schedule.

        Example:
            >>> head = losses.create("arcface", 8, 3)
            >>> head.set_margin(m=0.3)
            >>> head.m
            0.3
        """
        given = losses.canonical(sizes)
        for name in given:
            if name not in self.margin_names:
                raise ArgumentError(name, f"is no margin of this head, which has {', '.join(self.margin_names)}")
        changed = {name: self._kept(name, size) for name, size in given.items()}
        now = {name: (getattr(self, name), getattr(self, f"{name}_by_class")) for name in self.margin_names}
        self.check_margins(now | changed)
        for name, (size, per_class) in changed.items():
            delattr(self, name)  # a number cannot take the place of a module, which a schedule is
            setattr(self, name, size.to(self.weight.device) if isinstance(size, Schedule) else size)
            setattr(self, f"{name}_by_class", per_class)

    def margin_size(self, name: str, batch: Batch) -> float | Tensor:
        """A margin in a batch: a number, a scalar, ``(B,)``, or ``(1, C)`` for soft labels."""
        size, per_class = getattr(self, name), getattr(self, f"{name}_by_class")
        if per_class is not None:
            return per_class.unsqueeze(0) if batch.soft else per_class[batch.labels]
        return size.value(batch.step(name), batch.norms.dtype) if isinstance(size, Schedule) else size

    # -------------------------------------------------------------------------------------------- schedules

    def advance(self) -> dict[str, Tensor]:
        """Count a training step in every schedule; the counts by name."""
        schedules = {name: getattr(self, name) for name in (*self.margin_names, "annealer")}
        return {name: schedule.advance() for name, schedule in schedules.items() if isinstance(schedule, Schedule)}

    def schedules(self) -> dict[str, float]:
        """Where the schedules stand: ``lambda`` of the annealer, and each margin that has one.

        Example:
            >>> losses.create("cosface", 8, 3, m=Ramp(0.0, 0.4, length=100)).schedules()
            {'m': 0.0}
        """
        named = {name: getattr(self, name) for name in self.margin_names} | {"lambda": self.annealer}
        return {name: float(found.value()) for name, found in named.items() if isinstance(found, Schedule)}

    def annealing(self, steps: Steps, dtype: torch.dtype) -> Tensor | None:
        """Weight of the plain function against the margin; ``None`` where nothing is annealed."""
        if self.annealer is None:
            return None
        return self.annealer.value(None if steps is None else steps.get("annealer"), dtype)

    # -------------------------------------------------------------------------------------------- weights

    @property
    def subcentres(self) -> int:
        """Weight vectors of each class."""
        return self.spec.subcentres

    @property
    def ignore_index(self) -> int:
        """Label of samples that count for nothing."""
        return self.spec.ignore_index

    @property
    def s(self) -> float | None:
        """The constant scale; ``None`` where it is learned, or the feature norm."""
        return None if self.spec.learn_scale else self.spec.s

    def scale(self, norms: Tensor) -> Tensor:
        """Scale of each sample, ``(B,)``, from the norms of their features."""
        if self.learned_scale is not None:
            scale = self.learned_scale.to(norms.dtype)
            # Not a bare clamp: a scale at the bound must be able to grow again.
            return (scale + (scale.clamp(min=LEAST_SCALE) - scale).detach()).expand_as(norms)
        return norms if self.spec.s is None else torch.full_like(norms, self.spec.s)

    def class_bias(self, dtype: torch.dtype) -> Tensor | None:
        """The biases, ``(C,)``, where there are any."""
        return None if self.bias is None else self.bias.to(dtype)

    def target_bias(self, batch: Batch) -> Tensor | float:
        """The biases of the targets, ``(B,)``, or 0."""
        return 0.0 if self.bias is None else self.bias.to(batch.units.dtype)[batch.labels]

    def target_cosines(self, batch: Batch) -> Tensor:
        """Cosines to the targets ``(B,)``, without gradient."""
        rows = normalise(self.weight.detach().unflatten(0, (-1, self.subcentres))[batch.labels].to(batch.units.dtype))
        return (batch.units.detach().unsqueeze(1) * rows).sum(2).amax(1)

    def _checked_class_weights(self, weights: list[float] | Tensor | None) -> Tensor | None:
        if weights is None:
            return None
        tensor = self._per_class("class_weights", weights)
        if bool((tensor < 0).any()):
            row = int((tensor < 0).nonzero()[0])
            raise ArgumentError("class_weights", f"must be at least 0, got {float(tensor[row]):g} for class {row}")
        return tensor

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        wide = {name: buffer for name, buffer in self._buffers.items() if name not in self.narrow_buffers}
        super()._apply(function, recurse)
        for name, buffer in wide.items():
            now = self._buffers[name]
            if buffer is not None and now is not None and now.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = buffer.to(now.device)
        return self

    @property
    def rotates_classes(self) -> bool:
        """Whether the class weights are fixed and only rotated, all together."""
        return isinstance(self.rotation, ClassRotation)

    def _draw(self, weight: Tensor) -> None:
        """Draw class weights."""
        if self.rotates_classes:  # uniform directions, and lengths that do not shrink with the number of classes
            nn.init.kaiming_normal_(weight)
        else:
            nn.init.xavier_uniform_(weight)

    def reset_parameters(self) -> None:
        """Xavier-uniform class weights (Gaussian ones, of variance 2/D, where they are only rotated), zero bias."""
        self._draw(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def rotated(self, features: Tensor) -> Tensor:
        """Features as the classes are compared with them, in float32 or wider."""
        if self.rotation is None:
            return at_least_float32(features)
        if isinstance(self.rotation, ClassRotation):
            return self.rotation(features)
        kept = next((p.dtype for p in self.rotation.parameters()), at_least_float32(features).dtype)
        return at_least_float32(self.rotation(features.to(kept)))

    @torch.no_grad()
    def rotated_weight(self) -> Tensor:
        """The class weights as they act on features, ``(C * subcentres, D)``."""
        if not isinstance(self.rotation, ClassRotation):
            return self.weight.detach()
        return self.rotation.vectors(self.weight).to(self.weight.dtype)

    @property
    def class_vectors(self) -> Tensor:
        """One vector a class, ``(C, D)``: its weight, or the mean direction of its sub-centres where it has several.

        They are among the features: where the head learns a rotation, they are rotated by it.
        """
        weight = self.rotated_weight()
        return weight if self.subcentres == 1 else spherical_mean(weight.unflatten(0, (-1, self.subcentres)))

    def compared(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Weights that a batch is compared with, the targets' places among them, biases and class weights."""
        spec, dtype = self.spec, batch.units.dtype
        class_weights = None if self.class_weights is None else self.class_weights.to(dtype)
        if not self.training or spec.sample_rate == 1:
            return self.weight, batch.labels, self.class_bias(dtype), class_weights
        rows = self.sample(batch.labels, valid=batch.valid)
        bias = None if self.bias is None else self.bias.to(dtype)[rows]
        class_weights = None if class_weights is None else class_weights[rows]
        vectors = rows
        if spec.subcentres > 1:
            places = torch.arange(spec.subcentres, device=rows.device)
            vectors = (rows.unsqueeze(1) * spec.subcentres + places).flatten()
        # The dense gradient by a plain addition of rows: that of an embedding may wait for the device.
        weight = F.embedding(vectors, self.weight, sparse=True) if spec.sparse else self.weight.index_select(0, vectors)
        return weight, torch.searchsorted(rows, batch.labels).clamp(max=len(rows) - 1), bias, class_weights

    @property
    def imitates_caffe(self) -> bool:
        """Whether the step is that of the released SphereFace layer, which divides its weights by their norms."""
        return self.training and self.spec.gradient == "caffe" and self.spec.unit_weights

    @property
    def keeps_unit_weights(self) -> bool:
        """Whether a step sets the weights to unit length and differentiates the products with them as they are."""
        return self.imitates_caffe or (self.training and self.spec.weight_gradient == "raw")

    def make_unit(self) -> None:
        """Set the class weights to unit length, in place, where a step takes them as they are."""
        if not self.keeps_unit_weights:
            return
        if transformed():
            option = "gradient" if self.imitates_caffe else "weight_gradient"
            other = {"gradient": "'exact' or 'cgd'", "weight_gradient": "'tangent'"}[option]
            what = f"{getattr(self.spec, option)!r} divides the weights by their norms in place"
            raise ArgumentError(option, f"{what}, which torch.func does not see: take {other}, or head.eval()")
        if torch.compiler.is_compiling():
            with torch.no_grad():
                self.weight.copy_(normalise(self.weight))
        else:  # unseen by autograd: an earlier loss of the same step may still have to go backward
            self.weight.data.copy_(normalise(self.weight.data))

    # -------------------------------------------------------------------------------------------- classes

    @torch.no_grad()
    def init_centres(self, features: Tensor, labels: Tensor) -> None:
        """Set the weight of every class that occurs to the mean direction of its features, at the length it had.

        Args:
            features: ``(N, D)``.
            labels: ``(N,)``; those of ``ignore_index`` count for nothing.
        """
        self._check_examples(features, labels, self.classes)
        self.weight.copy_(self._centred(self.weight, features, labels))

    def _check_examples(self, features: Tensor, labels: Tensor, classes: int) -> None:
        self._check(features, labels, classes, soft=False)
        if len(features):  # on every device: this is no step, which must not wait for it
            check_values(features, labels, classes, self.spec.ignore_index)

    def _centred(self, weight: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """The weights of classes, turned to the mean directions of their features where they occur."""
        classes = len(weight) // self.subcentres
        features, labels = features.to(weight.device), labels.to(weight.device)
        counted = labels != self.spec.ignore_index
        units, labels = normalise(self.rotated(features))[counted], labels[counted]
        sums = units.new_zeros(classes, self.dim).index_add_(0, labels, units)
        means = normalise(sums).repeat_interleave(self.subcentres, 0)
        found = norm(means) > 0
        lengths = norm(weight)
        lengths = torch.where(lengths > 0, lengths, 1.0)
        return torch.where(found.unsqueeze(1), (means * lengths.unsqueeze(1)).to(weight.dtype), weight)

    @torch.no_grad()
    def add_classes(self, classes: int, features: Tensor | None = None, labels: Tensor | None = None) -> Self:
        """Grow the head by new classes behind the present ones; the present ones keep their weights.

        The weight becomes a new parameter: build the optimiser afterwards. Margins and weights given per class are
        continued with their mean.

        Args:
            classes: How many to add.
            features: ``(N, D)`` examples of the new classes, whose mean directions become their weights.
            labels: ``(N,)`` their classes, counted from the first new one; those of ``ignore_index`` count for nothing.

        Returns:
            The head itself.

        Example:
            >>> losses.create("cosface", 8, 3).add_classes(2).logits(torch.randn(1, 8)).shape
            torch.Size([1, 5])
        """
        check_count("classes", classes)
        if (features is None) != (labels is None):
            missing = "labels" if labels is None else "features"
            raise ArgumentError(missing, "must be given together with the other: examples need their classes")
        if features is not None and labels is not None:
            self._check_examples(features, labels, classes)
        old = self.weight
        fresh = torch.empty(classes * self.subcentres, self.dim, dtype=old.dtype, device=old.device)
        self._draw(fresh)
        fresh *= norm(old).mean() / norm(fresh).mean()
        if features is not None and labels is not None:
            fresh = self._centred(fresh, features, labels)
        self.classes += classes
        grown = torch.cat([old, fresh])
        trained = isinstance(old, nn.Parameter)  # or the running means of a member that trains none
        setattr(self, "weight", nn.Parameter(grown, requires_grad=old.requires_grad) if trained else grown)  # noqa: B010
        if self.bias is not None:
            self.bias = nn.Parameter(torch.cat([self.bias, self.bias.new_full((classes,), float(self.bias.mean()))]))
        for name in (*(f"{margin}_by_class" for margin in self.margin_names), "class_weights"):
            values = getattr(self, name)
            if values is not None:
                setattr(self, name, torch.cat([values, values.mean().expand(classes)]))
        return self

    def moved(self, centres: Tensor, features: Tensor, labels: Tensor, valid: Tensor, rate: float) -> Tensor:
        """Move running centres towards a batch; the centre of each of its samples before that, ``(B, D)``."""
        batch = (features.detach().to(centres.dtype), labels, valid)
        before = move_centres(centres, *(whole_batch(part, self.sync_statistics) for part in batch), rate)
        return own_share(before, len(features), self.sync_statistics)

    def sample(self, labels: Tensor, draws: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
        """Classes of one sampled step in increasing order: the batch's own and random others.

        There are ``int(sample_rate * C)`` of them, or as many as samples where that is more, so that the targets
        always fit and the number does not depend on the labels.

        Args:
            labels: ``(B,)``.
            draws: ``(C,)`` random numbers in [0, 1); the classes with the largest are taken.
            valid: ``(B,)`` which labels count.

        Example:
            >>> losses.create("cosface", 4, 100, sample_rate=0.05).sample(torch.tensor([3, 7])).shape
            torch.Size([5])
        """
        count = min(max(int(self.spec.sample_rate * self.classes), len(labels), 1), self.classes)
        chances = self._chances(labels) if draws is None else draws
        chosen = torch.ones_like(labels, dtype=torch.bool) if valid is None else valid
        chances = chances.scatter_add(0, labels, 2 * chosen.to(chances.dtype))
        return chances.topk(count, sorted=False).indices.sort().values

    def _chances(self, labels: Tensor) -> Tensor:
        """A random number of each class, ``(C,)``."""
        if not transformed():
            return torch.rand(self.classes, device=labels.device)
        try:
            return torch.rand(self.classes, device=labels.device)
        except RuntimeError as error:  # of torch.func.vmap, whose message does not say what is random
            if "randomness" not in str(error):
                raise
            why = (
                "draws classes in training: give torch.func.vmap randomness='different' or 'same', or call head.eval()"
            )
            raise ArgumentError("sample_rate", f"below 1 {why}") from None

    def check(self, features: Tensor, labels: Tensor, soft: bool = True) -> None:
        """Raise :class:`ArgumentError` for features and labels that do not fit, before anything is changed.

        Args:
            features: ``(B, D)``.
            labels: ``(B,)`` of int64, or soft labels ``(B, C)``.
            soft: Whether soft labels are allowed.
        """
        self._check(features, labels, self.classes, soft)
        # Reading values would synchronise a GPU, break a compiled graph, or ask torch.func for a single number.
        readable = labels.device.type == "cpu" or self.spec.validate
        if len(features) and readable and not (torch.compiler.is_compiling() or transformed()):
            check_values(features, labels, self.classes, self.spec.ignore_index)

    def _check(self, features: Tensor, labels: Tensor, classes: int, soft: bool) -> None:
        check_features(features, self.dim)
        if isinstance(labels, Tensor) and labels.is_floating_point() and not soft:
            why = " with probability_floor" if self.spec.probability_floor else ""
            given = f"soft labels of shape {tuple(labels.shape)}"
            raise ArgumentError("labels", f"must be classes ({len(features)},){why}, got {given}")
        check_labels(labels, len(features), classes)


def bounds(size: float | Schedule | None, per_class: Tensor | None) -> tuple[float, float]:
    """Least and largest size of a margin as a head keeps it.

    Example:
        >>> bounds(Ramp(0.0, 0.4, length=10), None)
        (0.0, 0.4)
    """
    if per_class is not None:
        return float(per_class.min()), float(per_class.max())
    assert size is not None
    return size.bounds() if isinstance(size, Schedule) else (size, size)
