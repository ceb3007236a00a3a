"""The margin-softmax head: every loss of the family is a choice of its parts."""

from __future__ import annotations

import importlib.util
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hypersphere import angular, margins
from hypersphere.angular import Angular, Cosine
from hypersphere.errors import ArgumentError
from hypersphere.geometry import at_least_float32, full_precision, norm, normalise, transformed
from hypersphere.losses import negatives as rules
from hypersphere.losses.batch import Batch, Steps, check_angles, check_features
from hypersphere.losses.negatives import Negatives
from hypersphere.losses.objective import (
    Added,
    annealed,
    cross_entropy,
    negative_logits,
    reduced,
    sample_losses,
    takes_angle,
    target_logits,
)
from hypersphere.losses.registry import HeadType, losses
from hypersphere.losses.schedules import LambdaAnnealer, Schedule
from hypersphere.losses.spec import HeadSpec
from hypersphere.losses.state import HeadState, Kept, MarginSize
from hypersphere.losses.streaming import ClassProblem, class_cosines, own_rows, scaled, target_angles
from hypersphere.margins import Margin, NoMargin
from hypersphere.neurons import whole

CHUNKED_FROM = {"cpu": 32_768, "cuda": 262_144}
"""Number of classes from which the chunked path is the faster one, by device; measured."""
COMPILED_FROM = 1_024
"""Number of classes from which a GPU gains enough by compiled code to make up for the time to compile it."""
CAN_COMPILE = importlib.util.find_spec("triton") is not None


@losses.register("margin-softmax")
class MarginSoftmax(HeadState, metaclass=HeadType):
    r"""Softmax cross-entropy over logits made of a scale, an angular function and a margin.

    .. math:: f_{ij} = \text{scale}_{ij} \cdot
        \begin{cases} \psi(\theta_{ij}) & j = y_i \\ \eta(\theta_{ij}) & \text{else} \end{cases}

    The scale is :math:`s` where given, else the feature norm :math:`\|x_i\|`; without ``unit_weights`` it is
    :math:`\|W_j\| \|x_i\|` (and a bias is possible): the plain linear classifier. :math:`\eta` is the angular function
    ``g`` (or another rule of ``negatives``) and :math:`\psi` a margin of it. Every published loss is a named preset of
    this class, and the options from ``annealer`` on work with each of them.

    Labels are targets ``(B,)`` or soft labels ``(B, C)`` (mixup): then the loss is the expectation of the losses of all
    targets under them. Class weights, label smoothing and the mean are those of
    :func:`torch.nn.functional.cross_entropy`; :func:`~hypersphere.losses.objective.sample_losses` says it in a formula.
    With many classes nothing of size ``(B, C)`` is ever held (see :attr:`path`).

    What the head computes is its :class:`HeadSpec` (``head.spec``); what it keeps is listed in :class:`HeadState`. A
    loss of your own is a subclass that chooses the parts and, where these do not do, overrides these methods, as the
    members of this package do:

    ======================= ==========================================================================
    :meth:`check_margins`   which sizes of the margins are refused
    :meth:`margin_sizes`    the margin's arguments in a batch, where they depend on its samples
    :meth:`rule_parameters` parameters of the rule of negatives, where they depend on the batch
    :meth:`plain_value`     target value without the margin
    :meth:`offset`          a learned number added to every value
    :meth:`sample_loss`     loss of each sample from its target logit and what its negatives amount to
    ``loss_factor``         what that is multiplied with
    :meth:`penalty`         what is added to each sample's loss
    :meth:`typical_norm`    feature norm at which :meth:`psi` is shown
    :meth:`details`         what else ``print`` shows
    ``reset_parameters``    how class weights begin
    ``add_classes``         what else grows with the classes
    ``takes_soft_labels``   whether labels may be soft
    ``softmax_scale``       whether a constant scale bounds the probability that can be reached
    ``narrow_buffers``      buffers that follow the head into 16 bit
    ``class_rows``          tensors with rows for classes, which :meth:`shard` divides among processes
    ``shared_options``      options of this class that recipes may give beside the subclass' own
    ======================= ==========================================================================

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        s: Constant scale; ``None`` keeps the feature norm.
        m: Margin: a number, one for each class, or a schedule such as :class:`Ramp`.
        psi: Margin function on the target, by name, as a mapping ``{"name": ..., option: ...}`` or as an instance; see
            :mod:`hypersphere.margins`.
        g: Angular function of the non-target classes, given likewise; see :mod:`hypersphere.angular`.
        negatives: Rule of the non-target classes, given likewise; see :mod:`hypersphere.losses.negatives`.
        subcentres: Weight vectors of each class, of which the closest counts.
        unit_weights: Compare with the directions of the class weights only.
        bias: Add a bias per class (only without ``unit_weights``).
        learn_scale: Train the scale, from ``s`` on.
        annealer: Blends the margin in over the first training steps.
        gradient: ``"exact"``, ``"cgd"`` (the margin changes the value, the slope stays that of the cosine) or
            ``"caffe"`` (what the released SphereFace layer computes).
        weight_gradient: By class weights that are compared by their directions: ``"tangent"``, through the division by
            their norms, so that it is orthogonal to them; or ``"raw"``, the gradient by unit vectors without that, and
            a training step sets the weights to unit length first, as the authors' code does.
        class_weights: ``(C,)``; a sample counts by its class' weight, and the mean is the weighted mean (that of soft
            labels is by the number of samples).
        label_smoothing: Share of the target that is spread evenly over all classes, in [0, 1).
        probability_floor: Added to every probability inside the logarithm, which bounds the loss of a sample. The
            released code of SphereNet and of the decoupled networks has 1e-4, with ``label_smoothing=0.01``. The two
            together need all logits at once.
        ignore_index: Samples with this label count for nothing.
        reduction: ``"mean"``, ``"sum"`` or ``"none"`` (one loss a sample).
        sample_rate: Share of the classes compared with in a training step: the targets and random others.
        sparse: With ``sample_rate``, give the weights a sparse gradient, for :class:`hypersphere.optim.RowSGD`.
        path: ``"dense"``, ``"compiled"``, ``"chunked"`` or ``"auto"``, which chooses by the number of classes; see
            :attr:`path`.
        validate: Check labels and features on every device; by default only on the CPU outside of compiled code.
        frozen: Do not train the class weights: they stay the random directions they begin as.
        rotation: Name of an orthogonal map (``"cayley"``), with which the head learns no class weights but a rotation
            of fixed Gaussian ones, D (D - 1) / 2 parameters for any number of classes; see :class:`ClassRotation`. Or
            any module, which is applied to the features first.

    Shape:
        features ``(B, D)``, labels ``(B,)`` in [0, C) or ``(B, C)``, weight ``(C, D)``, loss ``()``.

    Example:
        >>> head = MarginSoftmax(8, 3, s=16.0, psi="additive-cosine", m=0.35)
        >>> head(torch.randn(4, 8), torch.tensor([0, 1, 2, 2])).shape
        torch.Size([])
    """

    shared_options: ClassVar[tuple[str, ...]] = (
        "annealer",
        "gradient",
        "weight_gradient",
        "class_weights",
        "label_smoothing",
        "probability_floor",
        "ignore_index",
        "reduction",
        "sample_rate",
        "sparse",
        "path",
        "validate",
        "frozen",
        "rotation",
    )
    later_options: ClassVar[Mapping[str, Any]] = {
        **{"rotation": None, "probability_floor": 0.0, "weight_gradient": "tangent"},
        **{"negatives": "plain", "subcentres": 1},
    }
    loss_factor: float = 1.0
    softmax_scale: ClassVar[bool] = True

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        s: float | None = None,
        m: MarginSize = 0.0,
        psi: str | Margin = "none",
        g: str | Angular = "cosine",
        negatives: str | Negatives = "plain",
        subcentres: int = 1,
        unit_weights: bool = True,
        bias: bool = False,
        learn_scale: bool = False,
        annealer: LambdaAnnealer | None = None,
        gradient: str = "exact",
        weight_gradient: str = "tangent",
        class_weights: list[float] | Tensor | None = None,
        label_smoothing: float = 0.0,
        probability_floor: float = 0.0,
        ignore_index: int = -100,
        reduction: str = "mean",
        sample_rate: float = 1.0,
        sparse: bool = False,
        path: str = "auto",
        validate: bool = False,
        frozen: bool = False,
        rotation: str | Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        spec = HeadSpec(
            s=s,
            learn_scale=learn_scale,
            unit_weights=unit_weights,
            bias=bias,
            subcentres=subcentres,
            g=angular.create(g),
            psi=margins.create(psi),
            negatives=rules.create(negatives),
            gradient=gradient,
            weight_gradient=weight_gradient,
            label_smoothing=label_smoothing,
            probability_floor=probability_floor,
            ignore_index=ignore_index,
            reduction=reduction,
            sample_rate=sample_rate,
            sparse=sparse,
            path=path,
            validate=validate,
        )
        sizes: Mapping[str, MarginSize] = m if isinstance(m, Mapping) else {"m": m}
        super().__init__(
            dim,
            classes,
            spec,
            sizes,
            annealer=annealer,
            class_weights=class_weights,
            frozen=frozen,
            rotation=rotation,
        )

    # -------------------------------------------------------------------------------------------- extension points

    def check_margins(self, sizes: Mapping[str, Kept]) -> None:
        """Raise :class:`ArgumentError` unless the margins may have these sizes; nothing is changed before."""
        super().check_margins(sizes)
        if type(self.spec.psi) is NoMargin and not self.spec.negatives.takes_parameters:
            for name, kept in sizes.items():
                if kept[1] is not None or kept[0] != 0:
                    raise ArgumentError(name, "must be 0 with psi='none' and these negatives, which have no margin")

    def margin_sizes(self, batch: Batch) -> dict[str, Any]:
        """The margin's arguments in a batch: numbers, scalars, ``(B,)``, or ``(1, C)`` for soft labels."""
        return {name: self.margin_size(name, batch) for name in self.margin_names}

    def rule_parameters(
        self, batch: Batch, sizes: Mapping[str, Any], target: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Parameters of the rule of negatives: scalars or ``(B, 1)``, or ``(B, C)`` of each target for soft labels.

        Args:
            batch: The batch.
            sizes: The margin's arguments.
            target: ``(B,)`` target cosines, where they are known already; see :meth:`target_cosines`. For soft labels
                those of all classes, ``(B, C)``.
        """
        rule = self.spec.negatives
        if target is None:
            target = self.target_cosines(batch) if rule.needs_target else batch.units.new_empty(0)
        return rule.parameters(sizes, target, batch.annealing)

    def plain_value(self, cosines: Tensor, angles: Tensor | None = None) -> Tensor:
        """Value of the target without its margin, at cosines of any shape, whose angles may be known, too."""
        if angles is not None and self.spec.g.of_angle:
            return self.spec.g(angles)
        return self.spec.g.of_cosine(cosines)

    def offset(self) -> Tensor | None:
        """A learned number added to every value."""
        return None

    def sample_loss(self, negatives: Tensor, target: Tensor) -> Tensor:
        """Loss of each target, of the shape of its logit: the cross-entropy, or the sum of binary terms.

        Args:
            negatives: The rule's reduction of the non-target logits.
            target: Target logits. Where a softmax follows, both may be less a constant of the sample, which they
                differ from each other without: that of large logits would take the digits of their difference along.
        """
        if not self.spec.negatives.softmax:
            return self.spec.negatives.target_term(target) + negatives
        return cross_entropy(self.spec, negatives, target)

    def penalty(self, batch: Batch) -> Tensor | float:
        """What is added to each sample's loss: ``(B,)`` or a number, or ``(1, C)`` of each target for soft labels."""
        return 0.0

    def typical_norm(self) -> float:
        """Feature norm at which the target function is shown, where the margin depends on it."""
        return 1.0

    def details(self) -> dict[str, Any]:
        """What else there is to know of this head; each value is shown as it prints."""
        shown: dict[str, Any] = {}
        if not isinstance(self.spec.g, Cosine):
            shown["g"] = self.spec.g
        if self.subcentres > 1:
            shown["subcentres"] = self.subcentres
        for name in self.margin_names:
            size = getattr(self, name)
            if type(self.spec.psi) is not NoMargin and not isinstance(size, Schedule):
                shown[name] = "per class" if size is None else f"{size:g}"
        return shown

    # -------------------------------------------------------------------------------------------- scores

    @property
    def path(self) -> str:
        """How the classes are gone through: ``"dense"``, ``"compiled"`` or ``"chunked"``.

        ``"dense"`` holds all logits of a batch at once, ``"compiled"`` does so in code made by ``torch.compile`` (at
        the first batch), ``"chunked"`` never does. ``"auto"`` chose by the number of classes and the device.
        """
        shards = self.shards
        classes = self.classes if shards is None else -(-self.classes // shards.size)
        return self.path_for(max(int(classes * self.spec.sample_rate), 1) if self.training else classes)

    def path_for(self, compared: int) -> str:
        """The path for a comparison with this many classes."""
        if self.spec.path != "auto":
            return self.spec.path
        kind = self.weight.device.type
        if compared >= CHUNKED_FROM.get(kind, CHUNKED_FROM["cuda"]) and not self.spec.all_logits:
            return "chunked"
        return "compiled" if kind == "cuda" and compared >= COMPILED_FROM and CAN_COMPILE else "dense"

    def cosines(self, features: Tensor) -> Tensor:
        """Cosines to every class weight: ``(B, D) -> (B, C)``, in float32 or wider."""
        check_features(features, self.dim)
        with full_precision(features):
            return self._products(normalise(self.rotated(features)))

    def _products(self, units: Tensor, unit: bool = True) -> Tensor:
        """Products of ``(B, D)`` directions with every class, the closest sub-centre of each: ``(B, C)``."""
        shards = self.shards
        if shards is None:
            return class_cosines(units, self.weight, self.subcentres, unit)
        with torch.no_grad():
            sizes = [len(units)] * shards.size
            if not self.equal_batches:
                sizes = [size for size, _, _ in shards.met(self, units, "no labels (logits or cosines)")]
            every = class_cosines(shards.gathered(units, sizes), self.own_weight, self.subcentres, unit)
            return shards.of_all_classes(every).split(sizes)[shards.rank].contiguous()

    def logits(self, features: Tensor) -> Tensor:
        """Scores without margin, for prediction: ``(B, D) -> (B, C)``, in float32 or wider.

        Of a head whose classes lie on several processes (:meth:`shard`) all of these call it, each with a batch of its
        own, and there is no gradient.
        """
        check_features(features, self.dim)
        with full_precision(features):
            x = self.rotated(features)
            if not self.spec.unit_weights:
                bias = None if self.bias is None else whole(self.bias).to(x.dtype)
                if self.spec.s is None and self.shards is None and self.subcentres == 1:
                    return F.linear(x, self.weight.to(x.dtype), bias)
                products = self._products(normalise(x), unit=False)
                return scaled(products, self.scale(norm(x)), None, bias)
            cosines = self._products(normalise(x))
            return scaled(self.spec.g.of_cosine(cosines), self.scale(norm(x)), None, None)

    def margin_logits(self, features: Tensor, labels: Tensor) -> Tensor:
        """Scores with the margin on each sample's target: ``(B, D), (B,) -> (B, C)``, margins as they are now."""
        self.check(features, labels, soft=False)
        with full_precision(features):
            x = self.rotated(features)
            batch = Batch.of(x, labels, annealing=self.annealing(None, x.dtype))
            dtype, place, unit = batch.units.dtype, labels.unsqueeze(1), self.spec.unit_weights
            weight = whole(self.weight)
            cosines = class_cosines(batch.units, weight, self.subcentres, unit)
            sizes, scale = self.margin_sizes(batch), self.scale(batch.norms)
            added = Added(self.offset(), None if self.bias is None else whole(self.bias).to(dtype))
            plain = cosines.gather(1, place).squeeze(1)
            length = None if self.spec.unit_weights else norm(weight.to(dtype))[labels]
            angles = None
            if takes_angle(self, sizes):
                own = ClassProblem(batch.units, weight, labels, scale, subcentres=self.subcentres, unit=unit)
                angles = target_angles(x, weight[own_rows(own)]).to(dtype)
            target = target_logits(self, batch, plain, length, scale, sizes, added, angles)
            target = target if added.bias is None else target + added.bias[labels]
            logits = negative_logits(self, cosines, scale, self.rule_parameters(batch, sizes, plain), added)
            return logits.scatter(1, place, target.unsqueeze(1))

    def psi(self, theta: Tensor, label: int = 0, norm: float | None = None) -> Tensor:
        """Target value at angles to the target, as annealed now: the function under the head.

        Args:
            theta: Angles in radians, any shape.
            label: Class, where the margin differs between classes.
            norm: Feature norm, for members whose margin depends on it; a typical one by default.

        Example:
            >>> losses.create("a-softmax", 8, 3, m=2).psi(torch.tensor([0.0, torch.pi]))
            tensor([ 1., -3.])
        """
        check_angles(theta)
        batch, sizes = self._described(theta, label, norm)
        return annealed(self.spec.psi.psi(theta, **sizes), self.plain_value(theta.cos(), theta), batch.annealing)

    def slope(self, theta: Tensor, label: int = 0, norm: float | None = None) -> Tensor:
        """Derivative of :meth:`psi` by the angle."""
        check_angles(theta)
        with torch.enable_grad():
            leaf = theta.detach().clone().requires_grad_()
            return torch.autograd.grad(self.psi(leaf, label, norm).sum(), leaf)[0]

    def eta(self, theta: Tensor, target: float = 1.0, label: int = 0) -> Tensor:
        """Value of a non-target class at these angles, with the cosine ``target`` to the target."""
        check_angles(theta)
        batch, sizes = self._described(theta, label, None)
        parameters = self.rule_parameters(batch, sizes, theta.new_tensor(target))
        return self.spec.negatives.value(theta.cos(), *parameters)

    def _described(self, theta: Tensor, label: int, length: float | None) -> tuple[Batch, dict[str, Any]]:
        """A batch of one class and feature norm, and the margin's arguments in it as scalars that fit the angles."""
        norms = theta.new_tensor([self.typical_norm() if length is None else length])
        labels = torch.tensor([label], device=self.weight.device)
        none = theta.new_empty(1, 0)
        batch = Batch(none, none, norms, labels, annealing=self.annealing(None, theta.dtype))
        found = self.margin_sizes(batch)
        return batch, {k: v.to(theta).reshape(()).detach() if isinstance(v, Tensor) else v for k, v in found.items()}

    # -------------------------------------------------------------------------------------------- loss

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Loss of a batch: ``(B, D), (B,)`` or ``(B, C) -> ()``; 0 for an empty batch."""
        shards, part, own = self.shards, None, slice(None)
        if shards is None:
            self.check(features, labels, self.takes_soft_labels and self.spec.soft_labels)
        else:
            features, part, labels, own = self.whole_batch(shards, features, labels)
        steps = self.advance() if self.training else None
        low = _low_precision(features)  # before autocast is switched off for everything but the products
        path = self.path
        compiles = path == "compiled" or (path == "chunked" and self.weight.is_cuda and CAN_COMPILE)
        compiled = labels.dim() == 1 and compiles and not (torch.compiler.is_compiling() or transformed())
        with full_precision(features):
            if self.rotation is not None:  # outside of compiled code, which gains nothing there
                features = self.rotated(features)
                part = None if shards is None else shards.entered(features)[0]
            loss = (_compiled(self) if compiled else _loss)(self, features, labels, steps, low, part)
        return loss if shards is None or loss.dim() == 0 else shards.own_losses(loss, own)

    def extra_repr(self) -> str:
        """Sizes, scale, margin, what differs from the defaults, and the path."""
        scale = self.s if self.learned_scale is None else f"{float(self.learned_scale.detach()):g} (learned)"
        shown = {"dim": self.dim, "classes": self.classes, "s": scale, **self.details()}
        usual = HeadSpec()
        for name in ("gradient", "weight_gradient", "label_smoothing", "probability_floor", "reduction", "sample_rate"):
            if (value := getattr(self.spec, name)) != getattr(usual, name):
                shown[name] = repr(value)
        if self.class_weights is not None:
            shown["class_weights"] = "given"
        if not self.weight.requires_grad and isinstance(self.weight, torch.nn.Parameter) and not self.rotates_classes:
            shown["frozen"] = True
        if (shards := self.shards) is not None:
            first, last = shards.classes
            shown["own"] = f"{first}..{last - 1} (process {shards.rank} of {shards.size})"
        shown["path"] = repr(self.path)
        return ", ".join(f"{name}={value}" for name, value in shown.items())


def _loss(
    head: MarginSoftmax, features: Tensor, labels: Tensor, steps: Steps, low: bool, part: Tensor | None = None
) -> Tensor:
    x = at_least_float32(features)
    batch = Batch.of(x, labels, head.ignore_index, steps, head.annealing(steps, x.dtype))
    if part is not None:
        batch = batch._replace(part=at_least_float32(part))
    return reduced(*sample_losses(head, batch, low), head.spec.reduction)


_compiled_losses: weakref.WeakKeyDictionary[MarginSoftmax, Callable[..., Tensor]] = weakref.WeakKeyDictionary()


def _compiled(head: MarginSoftmax) -> Callable[..., Tensor]:
    """The loss of a head as compiled code, kept beside the head: it cannot be pickled with it."""
    if head not in _compiled_losses:
        # Code of its own: torch.compile gives up on code that it has compiled for too many modules.
        own = types.FunctionType(_loss.__code__.replace(), _loss.__globals__)
        _compiled_losses[head] = torch.compile(own)
    return _compiled_losses[head]


def _low_precision(features: Tensor) -> bool:
    kind = features.device.type
    return features.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(kind)
