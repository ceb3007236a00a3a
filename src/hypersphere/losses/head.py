"""The margin-softmax head: every loss of the family is a choice of its parts."""

from __future__ import annotations

import importlib.util
import inspect
import numbers
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypersphere import angular
from hypersphere import margins as margin_functions
from hypersphere.angular import Angular, Cosine
from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.geometry import at_least_float32, full_precision, norm, normalise, spherical_mean
from hypersphere.losses.negatives import Negatives, OfAngle, Plain
from hypersphere.losses.rotation import ClassRotation, make_rotation
from hypersphere.losses.schedules import LambdaAnnealer, Ramp, Schedule
from hypersphere.losses.streaming import ClassProblem, Statistics, class_cosines, class_statistics, scaled
from hypersphere.losses.theory import reachable_probability, suggest_scale
from hypersphere.margins import Margin, NoMargin
from hypersphere.registry import Registry

losses: Registry[MarginSoftmax] = Registry(
    "loss",
    positional=("dim", "classes"),
    option_aliases={"margin": "m", "scale": "s"},
    members=("hypersphere.losses.members",),
)

MarginSize: TypeAlias = float | list[float] | Tensor | Ramp | Schedule
"""A margin: one number, one for each class, or a schedule over the training steps."""

Steps: TypeAlias = dict[str, Tensor] | None
"""Counts of a training step's schedules; ``None`` outside of training, where margins stand as they are."""

GRADIENTS = ("exact", "cgd", "caffe")
PATHS = ("auto", "dense", "compiled", "chunked")
CHUNKED_FROM = {"cpu": 32_768, "cuda": 262_144}
"""Number of classes from which the chunked path is the faster one, by device; measured."""
COMPILED_FROM = 1_024
"""Number of classes from which a GPU gains enough by compiled code to make up for the time to compile it."""
CAN_COMPILE = importlib.util.find_spec("triton") is not None
LEAST_SCALE = 0.01
LEAST_PROBABILITY = 0.9


def create(name: str, dim: int, classes: int, **options: Any) -> MarginSoftmax:
    """Build a head by name; ``hypersphere list losses`` prints the names and their options.

    Args:
        name: Name or alias; hyphens and underscores are the same.
        dim: Feature dimension D.
        classes: Number of classes C.
        **options: The member's own options.

    Example:
        >>> create("sphereface", 64, 10, m=3).classes
        10
    """
    return losses.create(name, dim, classes, **options)


class _Aliases(type):
    """Lets every head be built with ``margin=`` for ``m=`` and ``scale=`` for ``s=``."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        options = losses.canonical(options)
        entry = losses.find(cls)
        if entry is not None:
            entry.check(option for option in options if option not in losses.positional)
        head = super().__call__(*args, **options)
        if message := head._scale_warning():
            warnings.warn(message, stacklevel=_levels_to_the_user())
        return head

    @property
    def __signature__(cls) -> inspect.Signature:
        """That of ``__init__``, for help and editors, which would see the one above."""
        signature = inspect.signature(vars(cls).get("__init__", MarginSoftmax.__init__))
        return signature.replace(parameters=list(signature.parameters.values())[1:], return_annotation=cls)


@losses.register("margin-softmax")
class MarginSoftmax(nn.Module, metaclass=_Aliases):
    r"""Softmax cross-entropy over logits made of a scale, an angular function and a margin.

    .. math:: f_{ij} = \text{scale}_{ij} \cdot
        \begin{cases} \psi(\theta_{ij}) & j = y_i \\ \eta(\theta_{ij}) & \text{else} \end{cases}

    The scale is :math:`s` where given, else the feature norm :math:`\|x_i\|`; without ``unit_weights`` it is
    :math:`\|W_j\| \|x_i\|` (and a bias is possible): the plain linear classifier. :math:`\eta` is the angular function
    ``g`` and :math:`\psi` a margin of it. Every published loss is a named preset of this class, and the options from
    ``annealer`` on work with each of them.

    Labels are classes ``(B,)`` or shares of classes ``(B, C)`` (mixup): then the loss is the expectation of the loss
    under those shares. With many classes nothing of size ``(B, C)`` is ever held (see :attr:`path`).

    Args:
        dim: Feature dimension D.
        classes: Number of classes C.
        s: Constant scale; ``None`` keeps the feature norm.
        m: Margin: a number, one for each class, or a schedule such as :class:`Ramp`.
        psi: Margin function on the own class, by name or as an instance; see :mod:`hypersphere.margins`.
        g: Angular function of the other classes, by name or as an instance; see :mod:`hypersphere.angular`.
        unit_weights: Compare with the directions of the class weights only.
        bias: Add a bias per class (only without ``unit_weights``).
        learn_scale: Train the scale, from ``s`` on.
        annealer: Blends the margin in over the first training steps.
        gradient: ``"exact"``, ``"cgd"`` (the margin changes the value, the slope stays that of the cosine) or
            ``"caffe"`` (what the released SphereFace layer computes).
        class_weights: ``(C,)``; a sample counts by its class' weight, and the mean is the weighted mean.
        label_smoothing: Share of the target that is spread evenly over all classes, in [0, 1).
        probability_floor: Added to every probability inside the logarithm, which bounds the loss of a sample. The
            released code of SphereNet and of the decoupled networks has 1e-4, with ``label_smoothing=0.01``. The two
            together need all logits at once.
        ignore_index: Samples with this label count for nothing.
        reduction: ``"mean"``, ``"sum"`` or ``"none"`` (one loss a sample).
        sample_rate: Share of the classes compared with in a training step: the batch's own and random others.
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

    later_options: ClassVar[Mapping[str, Any]] = {"rotation": None, "probability_floor": 0.0}
    shared_options: ClassVar[tuple[str, ...]] = (
        "annealer",
        "gradient",
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
    softmax_scale: ClassVar[bool] = True
    """Whether a constant scale bounds the probability that can be reached."""

    def __init__(
        self,
        dim: int,
        classes: int,
        *,
        s: float | None = None,
        m: MarginSize = 0.0,
        psi: str | Margin = "none",
        g: str | Angular = "cosine",
        unit_weights: bool = True,
        bias: bool = False,
        learn_scale: bool = False,
        annealer: LambdaAnnealer | None = None,
        gradient: str = "exact",
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
        super().__init__()
        check_range("dim", dim, 1)
        check_range("classes", classes, 1)
        if s is not None:
            check_range("s", s, 0, open_low=True)
        if bias and unit_weights:
            raise ArgumentError("bias", "needs unit_weights=False: a bias is not a direction")
        if learn_scale and s is None:
            raise ArgumentError("learn_scale", "needs s, the scale to start from")
        if annealer is not None and not isinstance(annealer, LambdaAnnealer):
            raise ArgumentError("annealer", f"must be a LambdaAnnealer, got {type(annealer).__name__}")
        check_choice("gradient", gradient, GRADIENTS)
        check_choice("reduction", reduction, ("mean", "sum", "none"))
        check_choice("path", path, PATHS)
        check_range("sample_rate", sample_rate, 0, 1, open_low=True)
        for option, value in (("label_smoothing", label_smoothing), ("probability_floor", probability_floor)):
            self._check_share(option, value)
        if sparse and sample_rate == 1:
            raise ArgumentError("sparse", "needs sample_rate below 1: with all classes the gradient is dense")
        self.dim, self.classes = dim, classes
        self.unit_weights, self.annealer, self.gradient = unit_weights, annealer, gradient
        self.label_smoothing, self.ignore_index, self.reduction = label_smoothing, ignore_index, reduction
        self.probability_floor = probability_floor
        self._check_floor(sample_rate, path)
        self.sample_rate, self.sparse, self.validate = sample_rate, sparse, validate
        self.rotation = make_rotation(dim, rotation)
        self._path = path
        self.g = angular.create(g)
        if not unit_weights and not isinstance(self.g, Cosine):
            raise ArgumentError("g", "needs unit_weights=True: other functions than the cosine act on directions")
        self.psi_function = self._margin_function(psi)
        self.negatives = self._negatives()
        sizes: dict[str, Any] = m if isinstance(m, dict) else {"m": m}
        self._margin_names = tuple(sizes)
        for name, size in sizes.items():
            setattr(self, name, self._margin_size(name, size))
        self._check_margins()
        self.s: float | None = None if learn_scale else s
        self.learned_scale = nn.Parameter(torch.tensor(float(s))) if learn_scale and s is not None else None
        self.class_weights: Tensor | None
        self.register_buffer("class_weights", self._checked_class_weights(class_weights))
        fixed = frozen or self._turns_classes
        self.weight = nn.Parameter(torch.empty(classes * self.centres, dim), requires_grad=not fixed)
        self.bias = nn.Parameter(torch.empty(classes)) if bias else None
        self.reset_parameters()

    # -------------------------------------------------------------------------------------------- parts

    centres: int = 1
    """Weight vectors of each class."""
    m: float | Schedule | None
    """The margin; ``None`` where it is one for each class."""
    m_by_class: Tensor | None

    def _rule_is_softmax(self) -> bool:
        return True

    def _check_share(self, option: str, value: float) -> None:
        if not 0 <= value < 1:
            raise ArgumentError(option, f"must be at least 0 and less than 1, got {value}")
        if value and not self._rule_is_softmax():
            raise ArgumentError(option, f"has no meaning for {type(self).__name__}, which has no softmax")

    @property
    def _all_logits(self) -> bool:
        """Whether the loss needs all logits at once: smoothed labels weigh every probability with its floor."""
        return bool(self.probability_floor and self.label_smoothing)

    def _check_floor(self, sample_rate: float, path: str) -> None:
        if self.probability_floor and sample_rate < 1:
            raise ArgumentError("probability_floor", f"needs sample_rate=1, all classes, got {sample_rate}")
        if self._all_logits and path == "chunked":
            raise ArgumentError("path", "must not be 'chunked' with probability_floor and label_smoothing together")

    def _takes_shares(self) -> bool:
        """Whether labels may be shares of classes."""
        return self.gradient != "caffe" and not self.probability_floor

    def _margin_function(self, psi: str | Margin) -> Margin:
        if psi == "none":
            return NoMargin(self.g)
        if psi == "multiplicative":
            return margin_functions.Multiplicative(self.g)
        return margin_functions.create(psi)

    def _negatives(self) -> Negatives:
        """The rule of the non-target classes."""
        if isinstance(self.g, Cosine):
            return Plain()
        return OfAngle(g=self.g, detach=self.gradient == "cgd")

    def _margin_size(self, name: str, size: MarginSize) -> float | Schedule | None:
        """Keep a margin as a number or a schedule, or as the buffer ``<name>_by_class``."""
        per_class = None
        if isinstance(size, list | tuple | Tensor | np.ndarray):
            per_class = torch.as_tensor(size, dtype=torch.get_default_dtype()).clone()
            if per_class.shape != (self.classes,):
                raise ArgumentError(name, f"must have shape ({self.classes},), got {tuple(per_class.shape)}")
        self.register_buffer(f"{name}_by_class", per_class)
        if per_class is not None:
            return None
        if not isinstance(size, Schedule | numbers.Real):
            raise ArgumentError(name, f"must be a number, one for each class or a schedule, got {type(size).__name__}")
        return size if isinstance(size, Schedule) else float(size)

    def _margin_bounds(self, name: str) -> tuple[float, float]:
        size, per_class = getattr(self, name), getattr(self, f"{name}_by_class")
        if per_class is not None:
            return float(per_class.min()), float(per_class.max())
        return size.bounds() if isinstance(size, Schedule) else (size, size)

    def _check_margins(self) -> None:
        bounds = {name: self._margin_bounds(name) for name in self._margin_names}
        for end in (0, 1):
            try:
                self.psi_function.check(**{name: both[end] for name, both in bounds.items()})
            except KeyError as error:
                needed = f"the margin {type(self.psi_function).__name__} needs {error}"
                raise ArgumentError("m", f"is not enough: {needed}; the preset 'combined' takes them") from None

    def _scale_warning(self) -> str | None:
        """What to tell a user whose scale is too small to be of use."""
        if self.s is None or not self.softmax_scale or not self.unit_weights:  # free norms are factors on the scale
            return None
        best = reachable_probability(self.classes, self.s)
        if best >= LEAST_PROBABILITY:
            return None
        enough = suggest_scale(self.classes, LEAST_PROBABILITY)
        return (
            f"s = {self.s:g} cannot give a class of {self.classes:,} more than a probability of {best:.2g}, so the "
            f"loss stays large; {enough:.1f} or more reaches {LEAST_PROBABILITY} (hypersphere.losses.suggest_scale)"
        )

    def _checked_class_weights(self, weights: list[float] | Tensor | None) -> Tensor | None:
        if weights is None:
            return None
        tensor = torch.as_tensor(weights, dtype=torch.get_default_dtype()).clone()
        if tensor.shape != (self.classes,) or not bool((tensor >= 0).all()):
            raise ArgumentError(
                "class_weights", f"must be {self.classes} numbers of at least 0, got shape {tuple(tensor.shape)}"
            )
        return tensor

    narrow_buffers: ClassVar[tuple[str, ...]] = ()
    """Buffers that follow the head into 16 bit; others (margins, running statistics) would lose digits they need."""

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> MarginSoftmax:
        wide = {name: buffer for name, buffer in self._buffers.items() if name not in self.narrow_buffers}
        super()._apply(function, recurse)
        for name, buffer in wide.items():
            now = self._buffers[name]
            if buffer is not None and now is not None and now.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = buffer.to(now.device)
        return self

    def set_margin(self, **sizes: MarginSize) -> None:
        """Change margins of a built head, checked as when it was built.

        Args:
            **sizes: ``m``, or the margins of a member with several, each a number, one for each class or a schedule.

        Example:
            >>> head = create("arcface", 8, 3)
            >>> head.set_margin(m=0.3)
            >>> head.m
            0.3
        """
        for name, size in losses.canonical(sizes).items():
            if name not in self._margin_names:
                raise ArgumentError(name, f"is no margin of this head, which has {', '.join(self._margin_names)}")
            kept = self._margin_size(name, size)
            delattr(self, name)  # a number cannot take the place of a module, which a schedule is
            setattr(self, name, kept)
            per_class = getattr(self, f"{name}_by_class")
            if per_class is not None:
                setattr(self, f"{name}_by_class", per_class.to(self.weight.device))
        self._check_margins()

    @property
    def _turns_classes(self) -> bool:
        """Whether the class weights are fixed and only turned, all together."""
        return isinstance(self.rotation, ClassRotation)

    def _draw(self, weight: Tensor) -> None:
        """Draw class weights."""
        if self._turns_classes:  # uniform directions, and lengths that do not shrink with the number of classes
            nn.init.kaiming_normal_(weight)
        else:
            nn.init.xavier_uniform_(weight)

    def reset_parameters(self) -> None:
        """Xavier-uniform class weights (Gaussian ones, of variance 2/D, where they are only turned), zero bias."""
        self._draw(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    # -------------------------------------------------------------------------------------------- scores

    @property
    def path(self) -> str:
        """How the classes are gone through: ``"dense"``, ``"compiled"`` or ``"chunked"``.

        ``"dense"`` holds all logits of a batch at once, ``"compiled"`` does so in code made by ``torch.compile`` (at
        the first batch), ``"chunked"`` never does. ``"auto"`` chose by the number of classes and the device.
        """
        return self._path_for(max(int(self.classes * self.sample_rate), 1) if self.training else self.classes)

    def _path_for(self, compared: int) -> str:
        """The path for a comparison with this many classes."""
        if self._path != "auto":
            return self._path
        kind = self.weight.device.type
        if compared >= CHUNKED_FROM.get(kind, CHUNKED_FROM["cuda"]) and not self._all_logits:
            return "chunked"
        return "compiled" if kind == "cuda" and compared >= COMPILED_FROM and CAN_COMPILE else "dense"

    @property
    def class_vectors(self) -> Tensor:
        """One vector a class, ``(C, D)``: its weight, or the mean direction of its centres where it has several.

        They are among the features: where the head learns a rotation, they are turned by it.
        """
        weight = self._turned_weight()
        return weight if self.centres == 1 else spherical_mean(weight.unflatten(0, (-1, self.centres)))

    @torch.no_grad()
    def _turned_weight(self) -> Tensor:
        """The class weights as they act on features."""
        if not isinstance(self.rotation, ClassRotation):
            return self.weight.detach()
        return self.rotation.vectors(self.weight).to(self.weight.dtype)

    @property
    def _compiles(self) -> bool:
        """Whether the many small operations around the products run as compiled code."""
        path = self.path
        return path == "compiled" or (path == "chunked" and self.weight.is_cuda and CAN_COMPILE)

    def cosines(self, features: Tensor) -> Tensor:
        """Cosines to every class weight: ``(B, D) -> (B, C)``, in float32 or wider."""
        self._check_features(features)
        with full_precision(features):
            return class_cosines(normalise(self._turned(features)), self.weight, self.centres)

    def logits(self, features: Tensor) -> Tensor:
        """Scores without margin, for prediction: ``(B, D) -> (B, C)``, in float32 or wider."""
        self._check_features(features)
        with full_precision(features):
            x = self._turned(features)
            if not self.unit_weights:
                bias = self._bias(x.dtype)
                if self.s is None and self.learned_scale is None:
                    return F.linear(x, self.weight.to(x.dtype), bias)
                products = class_cosines(normalise(x), self.weight, self.centres, unit=False)
                return scaled(products, self._scale(norm(x)), None, bias)
            cosines = class_cosines(normalise(x), self.weight, self.centres)
            return scaled(self.g.of_cosine(cosines), self._scale(norm(x)), None, None)

    def margin_logits(self, features: Tensor, labels: Tensor) -> Tensor:
        """Scores with the margin on each sample's own class: ``(B, D), (B,) -> (B, C)``, margins as they are now."""
        self._check(features, labels, shares=False)
        with full_precision(features):
            x = self._turned(features)
            norms, units = norm(x), normalise(x)
            cosines = class_cosines(units, self.weight, self.centres, self.unit_weights)
            own = labels.unsqueeze(1)
            parameters = self._margins(norms, labels, None)
            plain = cosines.gather(1, own).squeeze(1)
            length = None if self.unit_weights else norm(self.weight.to(x.dtype))[labels]
            target = self._target(plain, length, self._scale(norms), parameters, None)
            values = self.negatives.value(cosines, *self._rule_parameters(plain, parameters, None))
            logits = scaled(values, self._scale(norms), self._offset(), self._bias(x.dtype))
            return logits.scatter(1, own, (target + self._own_bias(labels, x.dtype)).unsqueeze(1))

    def psi(self, theta: Tensor, label: int = 0, norm: float | None = None) -> Tensor:
        """Target value at angles to the own class, as annealed now: the function under the head.

        Args:
            theta: Angles in radians, any shape.
            label: Class, where the margin differs between classes.
            norm: Feature norm, for members whose margin depends on it; a typical one by default.

        Example:
            >>> create("a-softmax", 8, 3, m=2).psi(torch.tensor([0.0, torch.pi]))
            tensor([ 1., -3.])
        """
        parameters = self._described(theta, label, norm)
        return self._annealed(self.psi_function.psi(theta, **parameters), self._plain(theta.cos()), None)

    def slope(self, theta: Tensor, label: int = 0, norm: float | None = None) -> Tensor:
        """Derivative of :meth:`psi` by the angle."""
        with torch.enable_grad():
            leaf = theta.detach().clone().requires_grad_()
            return torch.autograd.grad(self.psi(leaf, label, norm).sum(), leaf)[0]

    def eta(self, theta: Tensor, own: float = 1.0, label: int = 0) -> Tensor:
        """Value of a non-target class at these angles, with the cosine ``own`` to the own class."""
        parameters = self._described(theta, label, None)
        return self.negatives.value(theta.cos(), *self._rule_parameters(theta.new_tensor(own), parameters, None))

    def _described(self, theta: Tensor, label: int, length: float | None) -> dict[str, Any]:
        """The margin's arguments at one class and feature norm, as scalars that fit the angles."""
        norms = theta.new_tensor([self._typical_norm() if length is None else length])
        labels = torch.tensor([label], device=self.weight.device)
        found = self._margins(norms, labels, None)
        return {k: v.to(theta).reshape(()).detach() if isinstance(v, Tensor) else v for k, v in found.items()}

    def _typical_norm(self) -> float:
        return 1.0

    # -------------------------------------------------------------------------------------------- loss

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Loss of a batch: ``(B, D), (B,)`` or ``(B, C) -> ()``; 0 for an empty batch."""
        self._check(features, labels, self._takes_shares())
        steps = self._advance() if self.training else None
        low = self._low_precision(features)  # before autocast is switched off for everything but the products
        compiled = labels.dim() == 1 and not torch.compiler.is_compiling() and self._compiles
        with full_precision(features):
            if self.rotation is not None:  # outside of compiled code, which gains nothing there
                features = self._turned(features)
            return (_compiled(self) if compiled else _loss)(self, features, labels, steps, low)

    def _loss(self, features: Tensor, labels: Tensor, steps: Steps, low: bool) -> Tensor:
        x = at_least_float32(features)
        return self._reduce(*(self._soft(x, labels, steps) if labels.dim() == 2 else self._hard(x, labels, steps, low)))

    def _hard(self, x: Tensor, labels: Tensor, steps: Steps, low: bool) -> tuple[Tensor, Tensor]:
        """Loss and weight of every sample with one class each."""
        valid = labels != self.ignore_index
        labels = torch.where(valid, labels, 0)
        norms, units = norm(x), normalise(x)
        scale = self._scale(norms)
        parameters = self._margins(norms, labels, steps, valid)
        weight, columns, bias = self._trained_classes(labels, valid, x.dtype)
        rule = self._rule_parameters(self._own_cosines(units, labels), parameters, steps, valid)
        raw = not self.unit_weights or (self.gradient == "caffe" and self.training)
        problem = ClassProblem(
            units,
            weight,
            columns,
            scale,
            self.negatives,
            rule,
            offset=self._offset(),
            bias=bias,
            subcentres=self.centres,
            unit=not raw,
            total=self.label_smoothing > 0 and not self._all_logits,
            low=low,
        )
        found = class_statistics(problem, chunked=self.path == "chunked")
        if self.gradient == "caffe" and self.unit_weights and self.training:
            target = self._caffe_target(found, units, labels, scale, parameters, steps)
        else:
            target = self._target(found.target, None if self.unit_weights else found.length, scale, parameters, steps)
        target = target + self._own_bias(labels, x.dtype)
        compared, total = len(weight) // self.centres, found.total
        if self._all_logits:
            cosines = class_cosines(units, weight, self.centres, not raw)
            total = self._floored_total(cosines, scale, rule, target, labels)
        values = self._sample_loss(found.negatives, total, target, compared) + self._penalty(x, norms, labels, valid)
        weights = valid.to(values.dtype)
        if self.class_weights is not None:
            weights = weights * self.class_weights.to(values.dtype)[labels]
        return torch.where(valid, values, 0.0), weights

    def _soft(self, x: Tensor, shares: Tensor, steps: Steps) -> tuple[Tensor, Tensor]:
        """Loss and weight of every sample with shares of classes: the expectation of the loss of each."""
        shares = shares.to(x.dtype)
        norms, units = norm(x), normalise(x)
        scale = self._scale(norms)
        cosines = class_cosines(units, self.weight, self.centres, self.unit_weights)
        parameters = {k: _column(v) for k, v in self._margins(norms, None, steps).items()}
        expected = (shares * cosines).sum(1)
        # Margins of each class (1, C) count by their shares, as a hard label takes that of its own class.
        sizes = {k: _expected(v, shares) for k, v in parameters.items()}
        values = self.negatives.value(cosines, *self._rule_parameters(expected, sizes, steps))
        logits = scaled(values, scale, self._offset(), self._bias(x.dtype))
        length = None if self.unit_weights else norm(self.weight.to(x.dtype))
        target = self._target(cosines, length, scale.unsqueeze(1), parameters, steps)
        if self.bias is not None:
            target = target + self.bias.to(x.dtype)
        # The sum over the other classes, from both sides: nothing is subtracted from a sum that contains it.
        if self.negatives.softmax:
            left = F.pad(logits[:, :-1].logcumsumexp(1), (1, 0), value=float("-inf"))
            right = F.pad(logits[:, 1:].flip(1).logcumsumexp(1).flip(1), (0, 1), value=float("-inf"))
            negatives = torch.logaddexp(left, right) if self.classes > 1 else left
        else:
            terms = self.negatives.term(logits)
            left = F.pad(terms[:, :-1].cumsum(1), (1, 0))
            negatives = left + F.pad(terms[:, 1:].flip(1).cumsum(1).flip(1), (0, 1))
        total = logits.sum(1, keepdim=True) - logits
        own = self._sample_loss(negatives, total, target, self.classes)
        loss = (shares * own).sum(1) + self._penalty(x, norms, shares, None)
        weights = torch.ones_like(loss)
        if self.class_weights is not None:
            weights = shares @ self.class_weights.to(x.dtype)
        return loss, weights

    def _reduce(self, values: Tensor, weights: Tensor) -> Tensor:
        weighted = values * weights
        if self.reduction == "none":
            return weighted
        if self.reduction == "sum":
            return weighted.sum()
        total = weights.sum()
        return weighted.sum() / torch.where(total > 0, total, 1.0)

    def _floored_total(
        self, cosines: Tensor, scale: Tensor, rule: tuple[Any, ...], target: Tensor, labels: Tensor
    ) -> Tensor:
        """What stands for the sum of the other logits where probabilities have a floor: that of their logarithms."""
        logits = scaled(self.negatives.value(cosines, *rule), scale, self._offset(), self._bias(cosines.dtype))
        own = labels.unsqueeze(1)
        shares = logits.scatter(1, own, target.unsqueeze(1)).softmax(1)
        return (shares + self.probability_floor).log().scatter(1, own, 0.0).sum(1)

    def _sample_loss(self, negatives: Tensor, total: Tensor, target: Tensor, compared: int) -> Tensor:
        """Cross-entropy of each sample from the log-sum-exp of the other of ``compared`` classes and its own logit."""
        if compared == 1:
            return 0 * target
        if self.probability_floor:
            target = ((target - negatives).sigmoid() + self.probability_floor).log()  # as total is of the others
            loss = -target
        else:
            loss = F.softplus(negatives - target, threshold=50)
        if self.label_smoothing:
            loss = loss + self.label_smoothing * (target - (target + total) / compared)
        return loss

    def _penalty(self, x: Tensor, norms: Tensor, labels: Tensor, valid: Tensor | None) -> Tensor | float:
        """What a member adds to each sample's loss beside the softmax: ``(B,)`` or a number."""
        return 0.0

    # -------------------------------------------------------------------------------------------- pieces

    def _turned(self, features: Tensor) -> Tensor:
        if self.rotation is None:
            return at_least_float32(features)
        if isinstance(self.rotation, ClassRotation):
            return self.rotation(features)
        kept = next((p.dtype for p in self.rotation.parameters()), at_least_float32(features).dtype)
        return at_least_float32(self.rotation(features.to(kept)))

    def _scale(self, norms: Tensor) -> Tensor:
        """Scale of each sample ``(B,)``."""
        if self.learned_scale is not None:
            scale = self.learned_scale.to(norms.dtype)
            # Not a bare clamp: a scale at the bound must be able to grow again.
            return (scale + (scale.clamp(min=LEAST_SCALE) - scale).detach()).expand_as(norms)
        return norms if self.s is None else torch.full_like(norms, self.s)

    def _offset(self) -> Tensor | None:
        """A learned number added to every value, of members that have one."""
        return None

    def _bias(self, dtype: torch.dtype) -> Tensor | None:
        return None if self.bias is None else self.bias.to(dtype)

    def _own_bias(self, labels: Tensor, dtype: torch.dtype) -> Tensor | float:
        return 0.0 if self.bias is None else self.bias.to(dtype)[labels]

    def _advance(self) -> dict[str, Tensor]:
        """Count a training step in every schedule."""
        schedules = {name: getattr(self, name) for name in (*self._margin_names, "annealer")}
        return {name: schedule.advance() for name, schedule in schedules.items() if isinstance(schedule, Schedule)}

    def schedules(self) -> dict[str, float]:
        """Where the schedules stand: ``lambda`` of the annealer, and each margin that has one.

        Example:
            >>> create("cosface", 8, 3, m=Ramp(0.0, 0.4, length=100)).schedules()
            {'m': 0.0}
        """
        named = {name: getattr(self, name) for name in self._margin_names} | {"lambda": self.annealer}
        return {name: float(found.value()) for name, found in named.items() if isinstance(found, Schedule)}

    def _margins(
        self, norms: Tensor, labels: Tensor | None, steps: Steps, valid: Tensor | None = None
    ) -> dict[str, Any]:
        """The margin's arguments: numbers, scalars, ``(B,)``, or ``(C,)`` as ``(1, C)`` without labels."""
        return {name: self._margin(name, labels, steps) for name in self._margin_names}

    def _margin(self, name: str, labels: Tensor | None, steps: Steps) -> float | Tensor:
        size, per_class = getattr(self, name), getattr(self, f"{name}_by_class")
        if per_class is not None:
            return per_class.unsqueeze(0) if labels is None else per_class[labels]
        return size.value(_count(steps, name)) if isinstance(size, Schedule) else size

    def _rule_parameters(
        self, own: Tensor, parameters: dict[str, Any], steps: Steps, valid: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Parameters of the non-target rule, scalars or ``(B, 1)``, from own cosines ``(B,)``."""
        return ()

    def _own_cosines(self, units: Tensor, labels: Tensor) -> Tensor:
        """Cosines to the own classes without gradient, for rules that depend on them."""
        return units.new_empty(0)

    def _annealing(self, steps: Steps, like: Tensor) -> Tensor | None:
        """Weight of the plain function against the margin."""
        return None if self.annealer is None else self.annealer.value(_count(steps, "annealer")).to(like.dtype)

    def _annealed(self, value: Tensor, plain: Tensor, steps: Steps) -> Tensor:
        weight = self._annealing(steps, value)
        return value if weight is None else (weight * plain + value) / (1 + weight)

    def _plain(self, cosines: Tensor) -> Tensor:
        """What the own class would have without its margin."""
        return self.g.of_cosine(cosines)

    def _target_value(self, cosines: Tensor, parameters: dict[str, Any], steps: Steps) -> Tensor:
        value = self._annealed(self.psi_function(cosines, **parameters), self._plain(cosines), steps)
        return cosines + (value - cosines).detach() if self.gradient == "cgd" else value

    def _target(
        self,
        own: Tensor,
        length: Tensor | None,
        scale: Tensor,
        parameters: dict[str, Any],
        steps: Steps,
    ) -> Tensor:
        """Logits of the own classes; ``length`` holds the norms of their weights where these are no unit vectors."""
        if length is None:
            return self._with_offset(self._target_value(own, parameters, steps)) * scale
        if isinstance(self.psi_function, NoMargin):
            return own * scale
        cosines = (own / torch.where(length > 0, length, 1.0)).clamp(-1, 1)
        return self._target_value(cosines, parameters, steps) * length * scale

    def _with_offset(self, values: Tensor) -> Tensor:
        offset = self._offset()
        return values if offset is None else values + offset

    def _caffe_target(
        self,
        found: Statistics,
        units: Tensor,
        labels: Tensor,
        scale: Tensor,
        parameters: dict[str, Any],
        steps: Steps,
    ) -> Tensor:
        r"""Target logits with the gradient of the released SphereFace layer.

        The layer's input is :math:`x' = \text{scale}\,\hat x`. By the weights it differentiates the plain product; by
        :math:`x'` it takes the true direction :math:`a W_y + b x'` of the margin's gradient, divides the pair (a, b) by
        its length, and blends the result with the plain product's :math:`W_y` as the annealer says.
        """
        with torch.no_grad():
            cosines = found.target.clamp(-1, 1)
            value = self._target(cosines, None, scale, parameters, steps)
        inputs = units * scale.unsqueeze(1)
        own = self.weight.detach().unflatten(0, (-1, self.centres))[labels].to(units.dtype)
        closest = (own * units.detach().unsqueeze(1)).sum(2).argmax(1)
        own = own[torch.arange(len(own), device=own.device), closest]
        psi, pull = torch.func.vjp(lambda c: self.psi_function(c, **_detached(parameters)), cosines)[:2]
        (slope,) = pull(torch.ones_like(psi))
        along = (psi - cosines * slope) / torch.where(scale > 0, scale, 1.0).detach()
        length = torch.hypot(slope, along)
        inverse = torch.where(length > 0, 1 / torch.where(length > 0, length, 1.0), 0.0).unsqueeze(1)
        direction = (slope.unsqueeze(1) * own + along.unsqueeze(1) * inputs.detach()) * inverse
        weight = self._annealing(steps, units)
        if weight is not None:
            direction = (direction + weight * own) / (1 + weight)
        surrogate = self._with_offset(found.target) * scale + (inputs * (direction - own).detach()).sum(1)
        return value + (surrogate - surrogate.detach())

    def _trained_classes(
        self, labels: Tensor, valid: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Weights to compare with, the samples' places among them, and the biases."""
        if self.gradient == "caffe" and self.unit_weights and self.training:
            if torch.compiler.is_compiling():
                with torch.no_grad():
                    self.weight.copy_(normalise(self.weight))
            else:  # unseen by autograd: an earlier loss of the same step may still have to go backward
                self.weight.data.copy_(normalise(self.weight.data))
        if not self.training or self.sample_rate == 1:
            return self.weight, labels, self._bias(dtype)
        rows = self.sample(labels, valid=valid)
        bias = None if self.bias is None else self.bias.to(dtype)[rows]
        if self.centres > 1:
            rows_of = (rows.unsqueeze(1) * self.centres + torch.arange(self.centres, device=rows.device)).flatten()
        else:
            rows_of = rows
        # The dense gradient by a plain addition of rows: that of an embedding may wait for the device.
        weight = F.embedding(rows_of, self.weight, sparse=True) if self.sparse else self.weight.index_select(0, rows_of)
        return weight, torch.searchsorted(rows, labels).clamp(max=len(rows) - 1), bias

    def sample(self, labels: Tensor, draws: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
        """Classes of one sampled step in increasing order: the batch's own and random others.

        There are ``int(sample_rate * C)`` of them, or as many as samples where that is more, so that the own classes
        always fit and the number does not depend on the labels.

        Args:
            labels: ``(B,)``.
            draws: ``(C,)`` random numbers in [0, 1); the classes with the largest are taken.
            valid: ``(B,)`` which labels count.

        Example:
            >>> CosFace = losses["cosface"].factory
            >>> CosFace(4, 100, sample_rate=0.05).sample(torch.tensor([3, 7])).shape
            torch.Size([5])
        """
        count = min(max(int(self.sample_rate * self.classes), len(labels), 1), self.classes)
        chances = torch.rand(self.classes, device=labels.device) if draws is None else draws
        chosen = torch.ones_like(labels, dtype=torch.bool) if valid is None else valid
        chances = chances.scatter_add(0, labels, 2 * chosen.to(chances.dtype))
        return chances.topk(count, sorted=False).indices.sort().values

    def _low_precision(self, features: Tensor) -> bool:
        kind = features.device.type
        return features.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(kind)

    # -------------------------------------------------------------------------------------------- classes

    @torch.no_grad()
    def init_centres(self, features: Tensor, labels: Tensor) -> None:
        """Set the weight of every class that occurs to the mean direction of its features, at the length it had.

        Args:
            features: ``(N, D)``.
            labels: ``(N,)``; those of ``ignore_index`` count for nothing.
        """
        self._check(features, labels, shares=False)
        features, labels = features.to(self.weight.device), labels.to(self.weight.device)
        counted = labels != self.ignore_index
        units, labels = normalise(self._turned(features))[counted], labels[counted]
        sums = units.new_zeros(self.classes, self.dim).index_add_(0, labels, units)
        means = normalise(sums).repeat_interleave(self.centres, 0)
        found = norm(means) > 0
        lengths = norm(self.weight)
        lengths = torch.where(lengths > 0, lengths, 1.0)
        self.weight.copy_(torch.where(found.unsqueeze(1), means * lengths.unsqueeze(1), self.weight))

    @torch.no_grad()
    def add_classes(self, classes: int, features: Tensor | None = None, labels: Tensor | None = None) -> MarginSoftmax:
        """Grow the head by new classes behind the present ones; the present ones keep their weights.

        The weight becomes a new parameter: build the optimiser afterwards. Margins and weights given per class are
        continued with their mean.

        Args:
            classes: How many to add.
            features: ``(N, D)`` examples of the new classes, whose mean directions become their weights.
            labels: ``(N,)`` their classes, counted from the first new one.

        Returns:
            The head itself.

        Example:
            >>> create("cosface", 8, 3).add_classes(2).logits(torch.randn(1, 8)).shape
            torch.Size([1, 5])
        """
        check_range("classes", classes, 1)
        old = self.weight
        self.classes += classes
        fresh = torch.empty(classes * self.centres, self.dim, dtype=old.dtype, device=old.device)
        self._draw(fresh)
        fresh *= norm(old).mean() / norm(fresh).mean()
        grown = torch.cat([old, fresh])
        trained = isinstance(old, nn.Parameter)  # or the running means of a member that trains none
        setattr(self, "weight", nn.Parameter(grown, requires_grad=old.requires_grad) if trained else grown)  # noqa: B010
        if self.bias is not None:
            self.bias = nn.Parameter(torch.cat([self.bias, self.bias.new_full((classes,), float(self.bias.mean()))]))
        for name in (*(f"{margin}_by_class" for margin in self._margin_names), "class_weights"):
            values = getattr(self, name)
            if values is not None:
                setattr(self, name, torch.cat([values, values.mean().expand(classes)]))
        if (features is None) != (labels is None):
            missing = "labels" if labels is None else "features"
            raise ArgumentError(missing, "must be given together with the other: examples need their classes")
        if features is not None and labels is not None:
            self.init_centres(features, labels + self.classes - classes)
        return self

    # -------------------------------------------------------------------------------------------- checks

    def _check_features(self, features: Tensor) -> None:
        if features.dim() != 2 or features.shape[1] != self.dim:
            raise ArgumentError("features", f"must have shape (B, {self.dim}), got {tuple(features.shape)}")
        if not features.is_floating_point():
            raise ArgumentError("features", f"must be floating-point, got {features.dtype}")

    def _check(self, features: Tensor, labels: Tensor, shares: bool = True) -> None:
        self._check_features(features)
        batch = len(features)
        if labels.is_floating_point():
            if not shares:
                why = " with probability_floor" if self.probability_floor else ""
                given = f"shares of shape {tuple(labels.shape)}"
                raise ArgumentError("labels", f"must be classes ({batch},){why}, got {given}")
            if labels.shape != (batch, self.classes):
                expected = f"({batch},) of int64 or ({batch}, {self.classes})"
                raise ArgumentError("labels", f"must have shape {expected}, got {tuple(labels.shape)}")
        elif labels.dtype != torch.int64 or labels.shape != (batch,):
            raise ArgumentError(
                "labels", f"must be int64 of shape ({batch},), got {labels.dtype} of shape {tuple(labels.shape)}"
            )
        # Reading values would synchronise a GPU or break a compiled graph.
        if torch.compiler.is_compiling() or not batch or not (labels.device.type == "cpu" or self.validate):
            return
        if not bool(features.isfinite().all()):
            raise ArgumentError("features", "must be finite, got NaN or infinite values")
        self._check_label_values(labels)

    def _check_label_values(self, labels: Tensor) -> None:
        if labels.dim() == 2:
            if bool((labels < 0).any()) or not bool(((labels.sum(1) - 1).abs() < 1e-2).all()):
                raise ArgumentError("labels", "must be at least 0 and add up to 1 in every row")
            return
        wrong = (labels != self.ignore_index) & ((labels < 0) | (labels >= self.classes))
        if bool(wrong.any()):
            raise ArgumentError("labels", f"must lie in [0, {self.classes}), got {int(labels[wrong][0])}")

    def _details(self) -> dict[str, Any]:
        """What else there is to know of this head; each value is shown as it prints."""
        shown: dict[str, Any] = {}
        if not isinstance(self.g, Cosine):
            shown["g"] = self.g
        if self.centres > 1:
            shown["centres"] = self.centres
        for name in self._margin_names:
            size = getattr(self, name)
            if type(self.psi_function) is not NoMargin and not isinstance(size, Schedule):
                shown[name] = "per class" if size is None else f"{size:g}"
        return shown

    def extra_repr(self) -> str:
        """Sizes, scale, margin, what differs from the defaults, and the path."""
        scale = self.s if self.learned_scale is None else f"{float(self.learned_scale.detach()):g} (learned)"
        shown = {"dim": self.dim, "classes": self.classes, "s": scale, **self._details()}
        defaults = {
            "gradient": "exact",
            "label_smoothing": 0.0,
            "probability_floor": 0.0,
            "reduction": "mean",
            "sample_rate": 1.0,
        }
        shown |= {name: repr(getattr(self, name)) for name, usual in defaults.items() if getattr(self, name) != usual}
        if self.class_weights is not None:
            shown["class_weights"] = "given"
        if not self.weight.requires_grad and isinstance(self.weight, nn.Parameter) and not self._turns_classes:
            shown["frozen"] = True
        shown["path"] = repr(self.path)
        return ", ".join(f"{name}={value}" for name, value in shown.items())


def _loss(head: MarginSoftmax, features: Tensor, labels: Tensor, steps: Steps, low: bool) -> Tensor:
    return head._loss(features, labels, steps, low)


_compiled_losses: weakref.WeakKeyDictionary[MarginSoftmax, Callable[..., Tensor]] = weakref.WeakKeyDictionary()


def _compiled(head: MarginSoftmax) -> Callable[..., Tensor]:
    """The loss of a head as compiled code, kept beside the head: it cannot be pickled with it."""
    if head not in _compiled_losses:
        # Code of its own: torch.compile gives up on code that it has compiled for too many modules.
        own = types.FunctionType(_loss.__code__.replace(), _loss.__globals__)
        _compiled_losses[head] = torch.compile(own)
    return _compiled_losses[head]


def angular_function(g: str | Angular, k: float) -> Angular:
    """An angular function by name, the sigmoid of steepness ``k``.

    Example:
        >>> angular_function("sigmoid", 0.5)
        Sigmoid(k=0.5)
    """
    return angular.Sigmoid(k) if g == "sigmoid" else angular.create(g)


def _levels_to_the_user() -> int:
    """How far up the caller is that is not this package, for a warning to point there."""
    frame, levels = sys._getframe(2), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("hypersphere."):
        frame, levels = frame.f_back, levels + 1
    return levels


def _count(steps: Steps, name: str) -> Tensor | None:
    return None if steps is None else steps.get(name)


def _column(value: Any) -> Any:
    """A per-sample value ``(B,)`` as a column; numbers, scalars and rows ``(1, C)`` as they are."""
    return value.unsqueeze(1) if isinstance(value, Tensor) and value.dim() == 1 else value


def _expected(value: Any, shares: Tensor) -> Any:
    """A row ``(1, C)`` of numbers of each class as the mean ``(B, 1)`` under shares ``(B, C)``; others as they are."""
    per_class = isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == shares.shape[1]
    return (shares * value).sum(1, keepdim=True) if per_class else value


def _detached(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: v.detach() if isinstance(v, Tensor) else v for name, v in parameters.items()}
