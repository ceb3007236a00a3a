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
from hypersphere.losses.sharding import Compared, Shards, divided, like, local, mesh_for, send_first
from hypersphere.losses.spec import HeadSpec
from hypersphere.neurons import is_sharded, whole

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
    takes_soft_labels: ClassVar[bool] = True
    equal_batches: bool = False
    """Whether all processes of a sharded head give batches of one size and type; see :meth:`shard`."""
    class_rows: ClassVar[tuple[str, ...]] = ("weight", "bias")
    """What has rows for the classes and may be large: it is divided among processes."""
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

    def target_vectors(self, batch: Batch) -> Tensor:
        """Weight vectors of the targets ``(B, subcentres, D)``, in the type of the features, without gradient."""
        shards, rows = self.shards, self.own_weight.detach().unflatten(0, (-1, self.subcentres))
        if shards is None:
            return rows[batch.labels].to(batch.units.dtype)
        return shards.chosen(rows, shards.columns(batch.labels)).to(batch.units.dtype)

    def target_cosines(self, batch: Batch) -> Tensor:
        """Cosines to the targets ``(B,)``, without gradient."""
        return (batch.units.detach().unsqueeze(1) * normalise(self.target_vectors(batch))).sum(2).amax(1)

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
            return whole(self.weight.detach())
        return self.rotation.vectors(whole(self.weight.detach())).to(self.weight.dtype)

    @property
    def class_vectors(self) -> Tensor:
        """One vector a class, ``(C, D)``: its weight, or the mean direction of its sub-centres where it has several.

        They are among the features: where the head learns a rotation, they are rotated by it.
        """
        weight = self.rotated_weight()
        return weight if self.subcentres == 1 else spherical_mean(weight.unflatten(0, (-1, self.subcentres)))

    def compared(self, batch: Batch) -> Compared:
        """The classes that a batch is compared with, those of this process where they lie on several."""
        spec, dtype, shards = self.spec, batch.units.dtype, self.shards
        weight, bias, labels = self.own_weight, self.own_bias(dtype), batch.labels
        every = None if self.class_weights is None else self.class_weights.to(dtype)
        class_weights, columns = every, labels
        if shards is not None:
            first, last = shards.classes
            class_weights, columns = None if every is None else every[first:last], shards.columns(labels)
        if not self.training or spec.sample_rate == 1:
            return Compared(weight, columns, bias, class_weights, every, self.classes)
        sampled = rows = self.sample(labels, valid=batch.valid)
        every = None if every is None else every[sampled]
        inside = None if shards is None else columns >= 0
        if shards is not None:
            rows = sampled[(sampled >= first) & (sampled < last)] - first
        columns = torch.searchsorted(rows, columns).clamp(max=max(len(rows) - 1, 0))
        columns = columns if inside is None else torch.where(inside, columns, -1)
        bias = None if bias is None else bias[rows]
        class_weights = None if class_weights is None else class_weights[rows]
        vectors = rows
        if spec.subcentres > 1:
            places = torch.arange(spec.subcentres, device=rows.device)
            vectors = (rows.unsqueeze(1) * spec.subcentres + places).flatten()
        # The dense gradient by a plain addition of rows: that of an embedding may wait for the device.
        weight = self._sparse_rows(weight, vectors) if spec.sparse else weight.index_select(0, vectors)
        return Compared(weight, columns, bias, class_weights, every, len(sampled))

    def _sparse_rows(self, weight: Tensor, rows: Tensor) -> Tensor:
        """Rows whose gradient is sparse.

        A divided weight cannot have such a one: that of the rows of this process is its ``local_grad``, which
        :class:`hypersphere.optim.RowSGD` and :class:`hypersphere.optim.RowAdamW` take.
        """
        if self.shards is not None and weight.requires_grad:
            weight = weight.detach().requires_grad_()
            weight.register_post_accumulate_grad_hook(self._keep_rows)
        return F.embedding(rows, weight, sparse=True)

    def _keep_rows(self, weight: Tensor) -> None:
        kept, gradient = getattr(self.weight, "local_grad", None), weight.grad
        self.weight.local_grad = gradient if kept is None else kept + gradient  # type: ignore[attr-defined]

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
            rows = local(self.weight.detach()).data
            rows.copy_(normalise(rows))

    # -------------------------------------------------------------------------------------------- several processes

    @property
    def shards(self) -> Shards | None:
        """How the classes lie over processes; ``None`` where each has all of them."""
        return Shards.of(self.weight, self.subcentres)

    @property
    def own_weight(self) -> Tensor:
        """Weight vectors of the classes of this process, whole classes: all of them unless :meth:`shard` was called."""
        shards = self.shards
        return self.weight if shards is None else shards.own_classes(local(self.weight))

    def own_bias(self, dtype: torch.dtype) -> Tensor | None:
        """Biases of the classes of this process, where there are any."""
        if self.bias is None or self.shards is None:
            return self.class_bias(dtype)
        if self.subcentres == 1:
            return local(self.bias).to(dtype)
        from torch.distributed.tensor import Partial  # noqa: PLC0415 - slow to import

        first, last = self.shards.classes
        every: Any = self.bias
        return every.full_tensor(grad_placements=[Partial()])[first:last].to(dtype)

    def whole_batch(self, shards: Shards, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, slice]:
        """The batches of all processes as one: features twice (:meth:`Shards.batch`), labels, and which are our own."""
        if self.equal_batches:
            self.check(features, labels, self.takes_soft_labels and self.spec.soft_labels)
            sizes = [len(features)] * shards.size
        else:
            sizes, needed = shards.agreed(self, features, labels)
            if needed and not features.requires_grad:  # all take part in the backward pass, or none
                features = features.detach().requires_grad_()
        if labels.dim() == 2:  # of whatever type on whichever process
            labels = labels.to(at_least_float32(features).dtype)
        start = sum(sizes[: shards.rank])
        return *shards.batch(features, labels, sizes), slice(start, start + sizes[shards.rank])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        # Of whole and divided heads alike.
        for name in self.class_rows:
            mine, given = getattr(self, name), state_dict.get(prefix + name)
            if mine is None or given is None or is_sharded(mine) == is_sharded(given) or mine.shape != given.shape:
                continue
            state_dict = {**state_dict, prefix + name: like(given, mine)}
        super()._load_from_state_dict(state_dict, prefix, *others)

    def shard(self, mesh: Any = None, *, equal_batches: bool = False) -> Self:
        r"""Divide the classes among processes, each of which then keeps and trains ``C / P`` of them.

        Every process calls the head with a batch of its own, of any size; loss, gradients and what the head learns of
        its batch are those of one process with all the batches. The loss is the same on every process. The gradient
        that reaches the features is P times that of the loss, because data-parallel models (DDP, FSDP2) divide by P;
        ``reduction="none"`` gives the losses of the process' own batch, each of which counts ``1 / P``.

        Values are those that process 0 has. ``weight`` becomes a new parameter, a ``DTensor`` of the shape ``(C, D)``:
        build the optimiser afterwards, and leave the head out of DDP and FSDP. What a head has beside its classes (a
        learned scale, a rotation) gets the same gradient everywhere.

        Args:
            mesh: A ``DeviceMesh`` of one dimension; by default of all processes.
            equal_batches: Promise that all batches have one size and type. Then a step has one exchange less, does not
                wait for the device, and a bad batch on one process is not told to the others.

        Returns:
            The head itself.

        Example:
            >>> head = losses.create("arcface", 512, 1000)  # then, under torchrun: head.shard()
            >>> head.shard()
            Traceback (most recent call last):
            hypersphere.errors.ArgumentError: mesh needs processes: start them by torchrun, and call init_process_group
        """
        if self.spec.sparse and self.subcentres > 1:
            raise ArgumentError("mesh", "cannot take several sub-centres a class with sparse=True: leave that out")
        mesh = mesh_for(self, mesh)
        send_first(self, mesh)
        for name in self.class_rows:
            if getattr(self, name) is not None:
                setattr(self, name, divided(getattr(self, name), mesh))
        # What is learned of a batch is that of the whole, which every process knows.
        self.sync_statistics, self.equal_batches = False, equal_batches
        return self

    @torch.no_grad()
    def unshard(self) -> Self:
        """Put all classes on every process again; called on all of them. Build the optimiser afterwards.

        Example:
            >>> losses.create("arcface", 8, 10).unshard().weight.shape
            torch.Size([10, 8])
        """
        for name in self.class_rows if self.shards else ():
            tensor = getattr(self, name)
            if tensor is not None:
                full = whole(tensor)
                kept = nn.Parameter(full, requires_grad=tensor.requires_grad)
                setattr(self, name, kept if isinstance(tensor, nn.Parameter) else full)
        self.__dict__.pop("sync_statistics", None)
        self.__dict__.pop("equal_batches", None)
        return self

    # -------------------------------------------------------------------------------------------- classes

    @torch.no_grad()
    def init_centres(self, features: Tensor, labels: Tensor) -> None:
        """Set the weight of every class that occurs to the mean direction of its features, at the length it had.

        Args:
            features: ``(N, D)``.
            labels: ``(N,)``; those of ``ignore_index`` count for nothing. Where the classes lie on several processes,
                each gives examples of its own, and all of them count.
        """
        self._check_examples(features, labels, self.classes)
        shards = self.shards
        if shards is None:
            self.weight.copy_(self._centred(self.weight, features, labels))
            return
        features, labels = self._whole_examples(shards, features, labels)
        start, stop = shards.bounds()
        local(self.weight).copy_(self._centred(whole(self.weight), features, labels)[start:stop])

    def _whole_examples(self, shards: Shards, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Examples of all processes."""
        device = self.weight.device
        sizes = shards.all(torch.tensor(len(labels), device=device)).tolist()
        return tuple(shards.gathered(part.to(device), sizes) for part in (features, labels))  # type: ignore[return-value]

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
        if (shards := self.shards) is not None:
            if features is not None and labels is not None:
                features, labels = self._whole_examples(shards, features, labels)
            mesh, equal = self.weight.device_mesh, self.equal_batches  # type: ignore[attr-defined]
            return self.unshard().add_classes(classes, features, labels).shard(mesh, equal_batches=equal)
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

    def centres_of(self, centres: Tensor, labels: Tensor) -> Tensor:
        """Running centres of the classes of a batch, ``(B, D)``."""
        shards = Shards.of(centres)
        if shards is None:
            return centres[labels]
        return shards.chosen(local(centres), shards.columns(labels))

    def moved(self, centres: Tensor, features: Tensor, labels: Tensor, valid: Tensor, rate: float) -> Tensor:
        """Move running centres towards a batch; the centre of each of its samples before that, ``(B, D)``."""
        batch = (features.detach().to(centres.dtype), labels, valid)
        if (shards := Shards.of(centres)) is not None:
            columns = shards.columns(labels)
            before, own = self.centres_of(centres, labels), local(centres)
            if len(own):
                move_centres(own, batch[0], columns.clamp(min=0), valid & (columns >= 0), rate)
            return before
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
        """A random number of each class, ``(C,)``: a function of one that is drawn, the same on all processes."""
        try:
            seed = torch.randint(2**62, (), device=labels.device)
        except RuntimeError as error:  # of torch.func.vmap, whose message does not say what is random
            if not transformed() or "randomness" not in str(error):
                raise
            why = (
                "draws classes in training: give torch.func.vmap randomness='different' or 'same', or call head.eval()"
            )
            raise ArgumentError("sample_rate", f"below 1 {why}") from None
        if (shards := self.shards) is not None:
            seed = shards.first(seed)
        return hashed(seed, self.classes)

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


def hashed(seed: Tensor, count: int) -> Tensor:
    """Numbers ``(count,)`` in [0, 1) that depend on a scalar of int64 and on their place, and on nothing else.

    Example:
        >>> hashed(torch.tensor(3), 2).equal(hashed(torch.tensor(3), 5)[:2])
        True
    """
    bits = torch.arange(1, count + 1, device=seed.device) * -7046029254386353131 + seed
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):  # as splitmix64 begins
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * factor
    wide = torch.float32 if seed.device.type == "mps" else torch.float64
    return ((bits >> 11) & ((1 << 53) - 1)).to(wide) * 2.0**-53


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
