r"""Decoupled operators: what stands for the inner product of a kernel and a patch.

.. math:: f(w, x) = H(\|w\|, \|x\|)\; g(\theta_{w,x})

An operator is a magnitude function :math:`h` (one class each, below), an angular function :math:`g`
(:mod:`hypersphere.angular`), and how the norm of the kernel enters. Layers evaluate it for every patch and kernel
(:mod:`hypersphere.nn.functional`); called on vectors it is the plain function :math:`f(w, x)`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeGuard

import torch
from torch import Tensor

from hypersphere import angular as angulars_module
from hypersphere.angular import Angular, Cosine, Sigmoid
from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.geometry import EPS, at_least_float32, full_precision, in_forward_mode, safe_sqrt
from hypersphere.registry import Member, Registry

Sharing = Literal["filter", "layer", "network"]
Weighting = Literal["none", "linear", "joint", "separate"]

operators: Registry[Operator] = Registry("operator")

_MAGNITUDE = ("magnitude", "magnitude_slope", "radius_slope", "divisor_slopes")


def operator(name: str | Operator, **options: Any) -> Operator:
    """Build an operator by name; an instance is passed through, with changed options where some are given.

    Example:
        >>> operator("tanh", angular="sqcos")(torch.tensor([1.0, 0.0]), torch.tensor([3.0, 4.0]))
        tensor(0.3599)
    """
    if not isinstance(name, Operator):
        return operators.create(name, **options)
    if not options:
        return name
    entry = operators.find(type(name))
    if entry is not None:
        entry.check(options)
    own = {option.name: getattr(name, option.name) for option in fields(name)}
    return type(name)(**{**own, **options})


def measures_radius(operator: Operator) -> TypeGuard[RadiusOperator]:
    """Whether the operator measures its radius in units of the mean patch norm."""
    return isinstance(operator, RadiusOperator) and operator.mean_norm


def is_zero(squared_norm: Tensor) -> Tensor:
    """Whether a squared norm counts as that of the zero vector (see :mod:`hypersphere.geometry`)."""
    return squared_norm <= torch.finfo(squared_norm.dtype).tiny


@dataclass(frozen=True)
class Operator(metaclass=Member):
    r"""A decoupled operator :math:`f(w, x) = H(\|w\|, \|x\|)\, g(\theta)`.

    ``weighting`` says how the norm of the kernel enters: ``"none"`` :math:`h(\|x\|)`, ``"linear"``
    :math:`\|w\| h(\|x\|)`, ``"joint"`` :math:`h(\|w\|\|x\|)`, ``"separate"`` :math:`h(\|w\|) h(\|x\|) / \alpha`. Norms
    are :math:`\sqrt{\|\cdot\|^2 + \epsilon}`. A patch of zeros gives 0 and gets no gradient. A kernel of zeros stands
    at a right angle to everything, :math:`H\, g(\pi/2)`, which is 0 but for a linear ``g`` of one's own; it gets a
    gradient by which it leaves zero, up to :math:`1/\sqrt{\epsilon}`, and none with ``eps=0``. In float32 norms must
    lie between 1e-19 and 1.8e19 (their squares between the smallest and largest number); what is shorter counts as
    zero, and what is longer gives 0, too.

    Args:
        angular: Angular function, by name or as an object.
        weighting: How the norm of the kernel enters.
        eps: What is added to the squared norms; 0 for exact scale invariance.
        alpha: Factor of the magnitude.
        k: Steepness of the sigmoid angular function; by default 0.3, or 0.5 to begin with where it is learned.
        learn_k: Learn one ``k`` for each filter, one for the layer, or (with :func:`hypersphere.nn.convert`) one for
            the network.
        k_param: How a learned ``k`` stays positive: ``"abs"`` |raw| + 0.05, ``"softplus"`` softplus(raw) + 0.05, or
            ``"project"``, cut off at 0.05 by :func:`hypersphere.nn.project_weights`.
        weighted_gradients: Multiply the gradient that reaches a kernel through its direction by the kernel's norm,
            so that it does not depend on the norm. Adam divides such factors out again.
    """

    angular: str | Angular = "cosine"
    weighting: Weighting = "none"
    eps: float = EPS
    alpha: float = 1.0
    k: float | None = None
    learn_k: Sharing | None = None
    k_param: Literal["abs", "softplus", "project"] = "abs"
    weighted_gradients: bool = False

    K_MIN: ClassVar[float] = 0.05
    has_radius: ClassVar[bool] = False
    bounded: ClassVar[bool] = False
    knows_slopes: ClassVar[bool] = False
    """Whether the slopes of the magnitude are defined; without them layers are left to autograd."""

    def __post_init__(self) -> None:
        check_choice("weighting", self.weighting, ("none", "linear", "joint", "separate"))
        check_range("eps", self.eps, 0)
        check_range("alpha", self.alpha, 0, open_low=True)
        if self.learn_k is not None:
            check_choice("learn_k", self.learn_k, ("filter", "layer", "network"))
        check_choice("k_param", self.k_param, ("abs", "softplus", "project"))
        g = angulars_module.create(self.angular)
        if isinstance(g, Sigmoid):
            default = 0.5 if self.learn_k and isinstance(self.angular, str) else g.k
            g = Sigmoid(default if self.k is None else self.k)
            if self.learn_k:
                check_range("k", g.k, self.K_MIN, open_low=self.k_param != "project")
        elif self.k is not None or self.learn_k is not None:
            option = "k" if self.k is not None else "learn_k"
            raise ArgumentError(option, f"is the steepness of the angular function 'sigmoid', got it with {g!r}")
        object.__setattr__(self, "angular", g)
        if self.weighted_gradients and self.weighting != "none":
            raise ArgumentError(
                "weighted_gradients", f"must be False with weighting={self.weighting!r}, where the kernel's norm counts"
            )

    @property
    def g(self) -> Angular:
        """The angular function as an object."""
        assert isinstance(self.angular, Angular)
        return self.angular

    # ---------------------------------------------------------------------------------- magnitude

    def magnitude(self, t: Tensor, radius: Tensor | float = 1.0) -> Tensor:
        """Magnitude h at norms ``t`` for the radius R, broadcast against each other."""
        raise NotImplementedError

    def magnitude_slope(self, t: Tensor, radius: Tensor | float = 1.0) -> Tensor:
        """Derivative of h by the norm."""
        raise NotImplementedError

    def radius_slope(self, t: Tensor, radius: Tensor | float = 1.0) -> Tensor:
        """Derivative of h by the radius R."""
        return torch.zeros_like(t)

    def divisor_slopes(self, t: Tensor, radius: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        """Derivatives by the norm and by the radius of t / h, over which the cosine's response is the product."""
        inverse = 1 / self.magnitude(t, radius)
        divisor = t * inverse
        by_norm = (1 - divisor * self.magnitude_slope(t, radius)) * inverse
        return by_norm, -divisor * (self.radius_slope(t, radius) * inverse)

    def __init_subclass__(cls, **options: Any) -> None:
        """Find out which slopes belong to the magnitude: those that are not defined before it."""
        super().__init_subclass__(**options)
        age = {name: next(i for i, kind in enumerate(cls.__mro__) if name in vars(kind)) for name in _MAGNITUDE}
        own = {name for name in _MAGNITUDE if age[name] <= age["magnitude"]}
        cls.knows_slopes = "magnitude_slope" in own and ("radius_slope" in own or not cls.has_radius)
        if "divisor_slopes" not in own:
            cls.divisor_slopes = Operator.divisor_slopes  # type: ignore[method-assign]

    def phi(self, x: Tensor, radius: Tensor | float = 1.0) -> Tensor:
        r"""Where the operator moves an input along its ray, :math:`h(\|x\|)\, x / \|x\|`, ``(..., D)``.

        With the cosine as angular function the operator is the inner product of this with the kernel's direction.

        Example:
            >>> Tanh(eps=0.0).phi(torch.tensor([3.0, 4.0]))
            tensor([0.5999, 0.7999])
        """
        squared_norm = at_least_float32(x).square().sum(-1, keepdim=True)
        t, inverse = self.norms(squared_norm)
        return self.magnitude(t, radius) * x * inverse

    # ----------------------------------------------------------------------------------- response

    def __call__(
        self, w: Tensor, x: Tensor, radius: Tensor | float | None = None, k: Tensor | float | None = None
    ) -> Tensor:
        r"""The operator on vectors that broadcast against each other, over the last axis.

        Args:
            w: Kernels, ``(..., D)``.
            x: Patches, ``(..., D)``.
            radius: Radius R for the operators that have one, ``(...)``; by default that of the options.
            k: Steepness of the sigmoid in place of the own one, ``(...)``.

        Returns:
            ``(...)`` in float32 or wider.

        Example:
            >>> Sphere(eps=0.0)(torch.tensor([[1.0, -2.0, 2.0]]), torch.tensor([2.0, 1.0, 2.0]))
            tensor([0.4444])
        """
        w, x = at_least_float32(w), at_least_float32(x)
        if isinstance(k, (int, float)):
            k = x.new_full((), k)
        radius = getattr(self, "radius", 1.0) if radius is None else radius
        with full_precision(x):
            direction, norms = self.direction(w)
            squared_norm, norms, angles = x.square().sum(-1), norms.squeeze(-1), None
            if self.g.of_angle:
                lost = torch.where(is_zero(norms), 1.0, self.eps / norms.square().clamp(min=self.eps))
                angles = self.angle(direction, x, squared_norm, lost)
            return self.response((direction * x).sum(-1), squared_norm, radius, k, norms, angles=angles)

    def angle(self, direction: Tensor, x: Tensor, squared_norm: Tensor, lost: Tensor) -> Tensor:
        r"""Angles of kernels and patches from the vectors themselves, with all digits near 0 and :math:`\pi`.

        The arccos of :math:`\langle w, x\rangle / \sqrt{(\|w\|^2 + \epsilon)(\|x\|^2 + \epsilon)}`, by way of
        :math:`2 \mp 2\cos\theta = \|\hat w \mp \hat x\|^2 + (1 - \|\hat w\|^2) + (1 - \|\hat x\|^2)`.

        Args:
            direction: Kernels divided by their norms (:meth:`direction`), ``(..., D)`` in float32 or wider.
            x: Patches that broadcast against them, ``(..., D)``.
            squared_norm: Squared norms of the patches, ``(...)``.
            lost: What the squared norms of ``direction`` are less than 1 by, ``(...)``: the share of ``eps``.

        Returns:
            Radians, ``(...)``.

        Example:
            >>> w, x = torch.tensor([1.0, 0.0]), torch.tensor([[5.0, 0.0], [-1.0, 0.0], [1.0, 1e-4]])
            >>> Sphere(eps=0.0).angle(w, x, x.square().sum(-1), torch.zeros(()))
            tensor([0.0000e+00, 3.1416e+00, 1.0000e-04])
        """
        _, inverse = self.norms(squared_norm)
        scaled = x * inverse.unsqueeze(-1)
        lost = lost + torch.where(is_zero(squared_norm), 1.0, self.eps * inverse.square())
        near, far = ((direction + sign * scaled).square().sum(-1) + lost for sign in (-1, 1))
        return 2 * torch.atan2(safe_sqrt(near), safe_sqrt(far))

    def direction(self, w: Tensor, dims: tuple[int, ...] = (-1,)) -> tuple[Tensor, Tensor]:
        r"""Kernels divided by their norms, and these norms :math:`\sqrt{\|w\|^2 + \epsilon}`.

        Unlike a patch, a kernel of zeros gets a gradient where ``eps`` is above 0: it must be able to leave zero.

        Args:
            w: Kernels, any shape, float32 or wider.
            dims: The axes of one kernel.

        Returns:
            The shape of ``w``, and the same with length 1 along ``dims``.
        """
        squared_norm = w.square().sum(dims, keepdim=True) + self.eps
        zero = is_zero(squared_norm)
        norms = torch.where(zero, 1.0, squared_norm).sqrt()
        if self.weighted_gradients:
            w, norms = (_scale_gradient(value, norms.detach()) for value in (w, norms))
        inverse = torch.where(zero, 0.0, 1 / norms)
        return w * inverse, torch.where(zero, 0.0, norms)

    def response(
        self,
        products: Tensor,
        squared_norm: Tensor,
        radius: Tensor | float = 1.0,
        k: Tensor | None = None,
        kernel_norms: Tensor | None = None,
        kernel_radius: Tensor | float | None = None,
        angles: Tensor | None = None,
    ) -> Tensor:
        r"""The operator from products :math:`\langle w / \|w\|, x \rangle` and squared norms :math:`\|x\|^2`.

        Args:
            products: Any shape, float32 or wider.
            squared_norm: Squared norms of the patches, which broadcast to ``products``.
            radius: Radius R, broadcastable.
            k: Steepness of the sigmoid in place of the own one, broadcastable.
            kernel_norms: Norms of the kernels, for a ``weighting`` other than ``"none"``; broadcastable.
            kernel_radius: Radius for the kernels with ``weighting="separate"``; by default ``radius``.
            angles: The angles, where they are known better than by the cosines (:meth:`angle`).

        Returns:
            The shape of ``products``.
        """
        t, inverse = self.norms(squared_norm)
        if self.weighting == "none" or kernel_norms is None:
            h = self.magnitude(t, radius)
        elif self.weighting == "linear":
            h = kernel_norms * self.magnitude(t, radius)
        elif self.weighting == "joint":
            h = self.magnitude(kernel_norms * t, radius)
        else:
            own = self.magnitude(kernel_norms, radius if kernel_radius is None else kernel_radius)
            h = own * self.magnitude(t, radius) / self.alpha
        if type(self.angular) is Cosine:  # one pass over the products, not three
            return products * (h * inverse)
        # In this order the result has the memory format of the products.
        value = self.angle_value(products * inverse, k) if angles is None else self._at(angles, k)
        return value * torch.where(is_zero(squared_norm), 0.0, h)

    def norms(self, squared_norm: Tensor) -> tuple[Tensor, Tensor]:
        """Norms and their inverses from squared norms; for the zero vector some number above 0, and 0."""
        zero, squared = is_zero(squared_norm), squared_norm + self.eps
        # A larger eps keeps it above 0 by itself, and compiled layers need fewer passes without this.
        if self.eps <= torch.finfo(squared_norm.dtype).tiny:
            squared = torch.where(zero, 1.0, squared)
        t = squared.sqrt()
        return t, torch.where(zero, 0.0, 1 / t)

    def _at(self, angles: Tensor, k: Tensor | None) -> Tensor:
        g: Any = self.g
        value: Tensor = g(angles) if k is None else g(angles, k)
        return value

    def angle_value(self, cosines: Tensor, k: Tensor | None = None) -> Tensor:
        """Angular function at the angles of these cosines."""
        g: Any = self.g
        return g.of_cosine(cosines) if k is None else g.of_cosine(cosines, k)


@dataclass(frozen=True)
class RadiusOperator(Operator):
    r"""An operator whose slope changes at a radius :math:`R = \rho\, m`.

    Args:
        radius: Initial radius :math:`\rho` of every kernel.
        learn_radius: Learn one :math:`\rho` for each kernel.
        mean_norm: Measure the radius in units of the mean patch norm :math:`m` of the layer (of each group), without
            which it gets next to no gradient in layers whose patches are long. Training takes the mean of the batch,
            evaluation a moving average.
        mean_decay: Decay of the moving average; take 0.9 to 0.99 for runs of less than a few thousand steps.
        mean_init: What the moving average begins with: the ``"first"`` batch, or ``"zero"``.
        detach_mean: Pass no gradient through the mean of the batch.
    """

    radius: float = 1.0
    learn_radius: bool = True
    mean_norm: bool = True
    mean_decay: float = 0.999
    mean_init: Literal["first", "zero"] = "first"
    detach_mean: bool = False

    has_radius: ClassVar[bool] = True
    RADIUS_MIN: ClassVar[float] = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("radius", self.radius, self.RADIUS_MIN, open_low=True)
        check_range("mean_decay", self.mean_decay, 0, 1)
        check_choice("mean_init", self.mean_init, ("first", "zero"))


@operators.register("sphere")
@dataclass(frozen=True)
class Sphere(Operator):
    r"""The angle alone: :math:`h(t) = \alpha`.

    Example:
        >>> Sphere(angular="linear", eps=0.0)(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 5.0]))
        tensor(0.5000)
    """

    bounded: ClassVar[bool] = True

    def magnitude(self, t: Tensor, radius: Tensor | float = 1.0) -> Tensor:
        """Magnitude at norms."""
        return torch.full_like(t, self.alpha)

    def magnitude_slope(self, t: Tensor, radius: Tensor | float = 1.0) -> Tensor:
        """Derivative by the norm."""
        return torch.zeros_like(t)


@operators.register("ball")
@dataclass(frozen=True)
class Ball(RadiusOperator):
    r"""Linear up to the radius, constant beyond: :math:`h(t) = \alpha \min(t, R) / R`.

    Example:
        >>> Ball(eps=0.0)(torch.tensor([1.0, 0.0]), torch.tensor([[0.5, 0.0], [9.0, 0.0]]))
        tensor([0.5000, 1.0000])
    """

    bounded: ClassVar[bool] = True

    def magnitude(self, t: Tensor, radius: Tensor | float = 1.0) -> Tensor:
        """Magnitude at norms."""
        return self.alpha * (t / radius).clamp(max=1.0)

    def magnitude_slope(self, t: Tensor, radius: Tensor | float = 1.0) -> Tensor:
        """Derivative by the norm."""
        return torch.where(t < radius, torch.full_like(t, self.alpha) / radius, 0.0)

    def radius_slope(self, t: Tensor, radius: Tensor | float = 1.0) -> Tensor:
        """Derivative by the radius."""
        ratio = t / radius
        return torch.where(ratio < 1, -self.alpha / radius * ratio, 0.0)

    def divisor_slopes(self, t: Tensor, radius: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        """Derivatives of t / h, the larger of norm and radius, which need no h: for far shorter patches that is 0."""
        inside, slope = t < radius, torch.full_like(t, 1 / self.alpha)
        return torch.where(inside, 0.0, slope), torch.where(inside, slope, 0.0)


@operators.register("tanh")
@dataclass(frozen=True)
class Tanh(RadiusOperator):
    r"""A smooth bound: :math:`h(t) = \alpha \tanh(t / R)`.

    Example:
        >>> Tanh(eps=0.0)(torch.tensor([1.0, 0.0]), torch.tensor([[0.5, 0.0], [9.0, 0.0]]))
        tensor([0.4621, 1.0000])
    """

    bounded: ClassVar[bool] = True

    def magnitude(self, t: Tensor, radius: Tensor | float = 1.0) -> Tensor:
        """Magnitude at norms."""
        return self.alpha * (t * (1 / radius)).tanh()

    def magnitude_slope(self, t: Tensor, radius: Tensor | float = 1.0) -> Tensor:
        """Derivative by the norm."""
        return self.alpha / radius * _sech_squared(t * (1 / radius))

    def radius_slope(self, t: Tensor, radius: Tensor | float = 1.0) -> Tensor:
        """Derivative by the radius."""
        ratio = t * (1 / radius)
        return -self.alpha / radius * ratio * _sech_squared(ratio)

    def divisor_slopes(self, t: Tensor, radius: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
        """Derivatives of t / h, the norm times a hyperbolic cotangent, which is ``1 + above``."""
        ratio = (t * (1 / radius)).clamp(min=torch.finfo(t.dtype).tiny)
        above = 2 / (2 * ratio).expm1()
        falling = ratio * above * (above + 2)
        by_norm, by_radius = above + 1 - falling, ratio * falling
        return (by_norm, by_radius) if self.alpha == 1 else (by_norm / self.alpha, by_radius / self.alpha)


@operators.register("linear")
@dataclass(frozen=True)
class Linear(Operator):
    r"""The norm of the patch as it is: :math:`h(t) = \alpha t`; with linear weighting, the inner product.

    Example:
        >>> Linear(weighting="linear")(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
        tensor(11.)
    """

    def magnitude(self, t: Tensor, radius: Tensor | float = 1.0) -> Tensor:
        """Magnitude at norms."""
        return self.alpha * t

    def magnitude_slope(self, t: Tensor, radius: Tensor | float = 1.0) -> Tensor:
        """Derivative by the norm."""
        return torch.full_like(t, self.alpha)


@operators.register("seg", aliases=("segmented",))
@dataclass(frozen=True)
class Seg(RadiusOperator):
    r"""Two linear pieces that meet at the radius: slope :math:`\alpha` up to R, :math:`\beta` beyond.

    Args:
        beta: Slope beyond the radius.

    Example:
        >>> Seg(eps=0.0)(torch.tensor([1.0, 0.0]), torch.tensor([[0.5, 0.0], [9.0, 0.0]]))
        tensor([0.5000, 5.0000])
    """

    beta: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("beta", self.beta, 0)

    def magnitude(self, t: Tensor, radius: Tensor | float = 1.0) -> Tensor:
        """Magnitude at norms."""
        return torch.where(t <= radius, self.alpha * t, self.beta * t + (self.alpha - self.beta) * radius)

    def magnitude_slope(self, t: Tensor, radius: Tensor | float = 1.0) -> Tensor:
        """Derivative by the norm."""
        return torch.where(t <= radius, self.alpha, torch.full_like(t, self.beta))

    def radius_slope(self, t: Tensor, radius: Tensor | float = 1.0) -> Tensor:
        """Derivative by the radius."""
        return torch.where(t <= radius, 0.0, torch.full_like(t, self.alpha - self.beta))


@operators.register("log")
@dataclass(frozen=True)
class Log(Operator):
    r"""Logarithmic growth: :math:`h(t) = \alpha \ln(1 + t)`.

    Example:
        >>> Log(eps=0.0)(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]))
        tensor(0.6931)
    """

    def magnitude(self, t: Tensor, radius: Tensor | float = 1.0) -> Tensor:
        """Magnitude at norms."""
        return self.alpha * t.log1p()

    def magnitude_slope(self, t: Tensor, radius: Tensor | float = 1.0) -> Tensor:
        """Derivative by the norm."""
        return self.alpha / (1 + t)


@operators.register("mix")
@dataclass(frozen=True)
class Mix(Operator):
    r"""A sum of magnitudes, by default :math:`h(t) = \alpha t + \beta \ln(1 + t)`.

    Args:
        beta: Factor of the logarithm.
        parts: Other parts in place of the two: pairs of a factor and the name of an operator without radius.

    Example:
        >>> Mix(eps=0.0)(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]))
        tensor(1.6931)
        >>> Mix(parts=((2.0, "sphere"), (0.5, "linear")), eps=0.0)(torch.tensor([1.0]), torch.tensor([4.0]))
        tensor(4.)
    """

    beta: float = 1.0
    parts: tuple[tuple[float, str], ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("beta", self.beta, 0)
        if self.parts and (self.alpha, self.beta) != (1.0, 1.0):
            raise ArgumentError("parts", f"have factors of their own: leave out alpha={self.alpha}, beta={self.beta}")
        pairs = self.parts or ((self.alpha, "linear"), (self.beta, "log"))
        for factor, name in pairs:
            check_range("parts", factor, 0)
            if operators[name].factory is type(self) or getattr(operators[name].factory, "has_radius", False):
                allowed = ", ".join(o for o in operators if o != "mix" and not operators[o].factory.has_radius)  # type: ignore[attr-defined]
                raise ArgumentError("parts", f"must name operators without a radius ({allowed}), got {name!r}")
        if not sum(factor for factor, _ in pairs) > 0:
            raise ArgumentError("parts", f"must have a factor above 0, got {pairs}")
        object.__setattr__(self, "_parts", tuple((f, operators.create(name)) for f, name in pairs if f))

    def magnitude(self, t: Tensor, radius: Tensor | float = 1.0) -> Tensor:
        """Magnitude at norms."""
        return self._sum([factor * part.magnitude(t) for factor, part in self._pairs])

    def magnitude_slope(self, t: Tensor, radius: Tensor | float = 1.0) -> Tensor:
        """Derivative by the norm."""
        return self._sum([factor * part.magnitude_slope(t) for factor, part in self._pairs])

    @property
    def _pairs(self) -> tuple[tuple[float, Operator], ...]:
        return self._parts  # type: ignore[attr-defined]

    @staticmethod
    def _sum(terms: list[Tensor]) -> Tensor:
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total


def _sech_squared(u: Tensor) -> Tensor:
    """1 - tanh^2 without cancellation for large arguments."""
    decayed = (-2 * u.abs()).exp()
    return 4 * decayed / (1 + decayed).square()


def _scale_gradient(x: Tensor, scale: Tensor) -> Tensor:
    """The first argument, whose derivatives are multiplied by the second."""
    if in_forward_mode():
        fixed = x.detach()
        return fixed + (x - fixed) * scale
    scaled: Tensor = _ScaledGradient.apply(x, scale)
    return scaled


class _ScaledGradient(torch.autograd.Function):
    """The first argument, whose gradient is multiplied by the second."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grads[0] * scale, None
