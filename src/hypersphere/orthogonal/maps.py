r"""Maps from an unconstrained tensor ``P`` to an orthogonal matrix ``R``, by name, as objects and as functions.

All of them work on ``(..., d, d)`` tensors, compute in float32 or wider (also under autocast) and answer in the type of
``P``. Their derivatives are closed forms that stay finite for repeated singular values, at the identity and at any
orthogonal ``P``; see :mod:`hypersphere.orthogonal.algebra`. A NaN among the entries that are read is one in
``R``. Orthogonality error in float32 up to d = 1000 or so, for norms of ``P`` from 1e-30 to 1e30 (where a map has
a limit, its options say so), and products of :math:`2d^3` operations in the two passes:

=================================  ==============  ===============================  =================
map                                error           forward                          backward
=================================  ==============  ===============================  =================
gram_schmidt, householder (QR)     1e-6            QR (about 1.3)                   2 and a solve
gram_schmidt, householder, newton  1e-6            1 + 3 a refinement               3
householder, product               3e-6            2 and a triangular solve         4 and a solve
cayley, solve                      1e-6            LU + 2; GPU: Cholesky + 7        2
cayley, newton                     1e-6            2 a refinement + 2               2
cayley, neumann                    |W|^(2k + 2)    3 (terms 4)                      6
loewdin, svd                       1e-6            SVD                              6
loewdin, newton-schulz             1e-6            2 a step                         3 + 14, or 5 a step
exponential                        1e-6            7 + log2(max_norm / 1.6)         10 + 2 a squaring
=================================  ==============  ===============================  =================
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.geometry import at_least_float32, exact_products, full_precision, transformed
from hypersphere.orthogonal import algebra
from hypersphere.orthogonal.algebra import eye, product, skew
from hypersphere.registry import Member, Registry

__all__ = [
    "SPD",
    "Cayley",
    "Exponential",
    "Givens",
    "GramSchmidt",
    "Householder",
    "Loewdin",
    "Map",
    "Masked",
    "Unconstrained",
    "canonical",
    "cayley",
    "create",
    "exact_products",
    "exponential",
    "givens",
    "gram_schmidt",
    "householder",
    "householder_product",
    "inverse_cayley",
    "loewdin",
    "maps",
    "masked",
    "orthogonality_error",
    "skew",
    "spd",
    "unconstrained",
]

maps: Registry[Map] = Registry("orthogonal map")

CAPTURED_NORM = 8.0
"""Spectral norm that an exponential without ``max_norm`` allows for where it cannot measure one."""


def create(name: str, **options: Any) -> Map:
    """Build a map by name; ``hypersphere list orthogonal`` prints the names and their options.

    Example:
        >>> create("cayley")(torch.zeros(2, 2))
        tensor([[1., 0.],
                [0., 1.]])
    """
    return maps.create(name, **options)


def _checked(name: str, x: Tensor) -> Tensor:
    """Square matrices in float32 or wider."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError(name, f"must be a real floating-point tensor, got {kind}")
    if x.dim() < 2 or x.shape[-1] != x.shape[-2] or x.shape[-1] < 1:
        raise ArgumentError(name, f"must hold square matrices (..., d, d), got shape {tuple(x.shape)}")
    return at_least_float32(x)


class Map(metaclass=Member):
    """A function from ``P`` to ``R``, both ``(..., d, d)``; subclasses are frozen dataclasses of their options.

    A map of your own needs :meth:`evaluate` and, under a name, ``@maps.register(name)``.

    Example:
        >>> @dataclass(frozen=True)
        ... class Transposed(Map):
        ...     def evaluate(self, P):
        ...         return gram_schmidt(P).mT
        >>> Transposed()(torch.tensor([[3.0, -1.0], [4.0, 2.0]]))
        tensor([[ 0.6000,  0.8000],
                [-0.8000,  0.6000]])
    """

    skew: ClassVar[bool] = False
    """Whether only the strict upper triangle of ``P`` is read; such maps start at 0, the others at the identity."""
    orthogonal: ClassVar[bool] = True
    """False for controls whose ``R`` is not orthogonal."""
    direct: ClassVar[bool] = False
    """Whether ``P`` is ``R`` itself, which an optimiser has to keep orthogonal."""

    @property
    def name(self) -> str:
        """Its name in the registry; of a class that is not in it that of the class."""
        entry = maps.find(type(self))
        return entry.name if entry else type(self).__name__

    @property
    def exact(self) -> bool:
        """Whether ``R`` is orthogonal to rounding wherever the map is used, so that its transpose undoes it."""
        return self.orthogonal and not self.direct

    @property
    def retracts(self) -> bool:
        """Whether the map is a retraction: every ``R`` is its own image, so that ``P`` may go on from ``R``."""
        return False

    def evaluate(self, P: Tensor) -> Tensor:
        """``R`` of a ``P`` in float32 or wider, with autocast off."""
        raise NotImplementedError

    def __call__(self, P: Tensor) -> Tensor:
        """``R`` in the type of ``P``."""
        wide = _checked("P", P)
        with full_precision(P):
            return self.evaluate(wide).to(P.dtype)

    @property
    def warm_starts(self) -> bool:
        """Whether :meth:`refine` starts warm: from the solution of the step before, which :meth:`warm_start` gives."""
        return False

    def start(
        self,
        d: int,
        *,
        batch: tuple[int, ...] = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The ``P`` at which ``R`` is the identity, but for :meth:`signs`."""
        if self.skew:
            return torch.zeros(*batch, d, d, device=device, dtype=dtype)
        return torch.eye(d, device=device, dtype=dtype).repeat(*batch, 1, 1)

    def signs(self, d: int) -> Tensor | None:
        """The diagonal of ``R`` at the start, or ``None`` where it is the identity."""
        return None

    def free(self, d: int) -> int:
        """Number of unconstrained parameters."""
        return d * (d - 1) // 2

    def inverse(self, R: Tensor) -> Tensor:
        """A ``P`` whose ``R`` this is; an :class:`~hypersphere.errors.ArgumentError` where there is none."""
        wide = _checked("R", R)
        with full_precision(R), torch.no_grad():
            P = self.preimage(wide)
            difference = (self.evaluate(P) - wide).abs()
        tolerance = 1e-9 if R.dtype == torch.float64 else 1e-4 if R.dtype == torch.float32 else 3e-2
        # "not all within", so that NaN is no answer either.
        if not bool((difference <= tolerance * wide.abs().amax((-2, -1), keepdim=True).clamp(min=1)).all()):
            raise ArgumentError("R", f"is not in the range of {self}")
        return P.to(R.dtype)

    def preimage(self, R: Tensor) -> Tensor:
        """A candidate for :meth:`inverse`, which checks it."""
        return R

    def warm_start(self, P: Tensor) -> Tensor | None:
        """The warm start of :meth:`refine` for this ``P``, computed anew; ``None`` where the map has none."""
        return None

    def refine(self, P: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        """``R`` by products alone from the warm start of a ``P`` nearby, and the next warm start (no gradient)."""
        return self(P), carried


@maps.register("cayley", aliases=("cp",))
@dataclass(frozen=True)
class Cayley(Map):
    r"""Cayley map :math:`R = (I + W)(I - W)^{-1}` of the skew matrix of the strict upper triangle of ``P``.

    ``R`` is a rotation without eigenvalue -1. Every method has the backward pass of two products with ``R``,
    :math:`M = \tfrac12 (R^T + I) G (R^T + I)`, but for ``neumann``, which is differentiated as the polynomial it is.
    Its sums cancel where ``W`` is large: of 340 random matrices each, the relative error of the gradient was up to 5e-6
    at a spectral norm of 10, 3e-5 at 100, 4e-4 at 1,000 and 5e-3 at 10,000 in float32, and 2e-12 at 1,000 in float64.
    Beyond 1,000 it is so on a GPU, in second derivatives and under ``torch.func``; otherwise ``W`` is taken apart into
    planes there, at some ten times the cost, and ``R`` and gradient have the digits of the type at every norm.

    Args:
        method: ``"solve"``: a factorisation, no wait; on a GPU for spectral norms of W up to 1,000, beyond which R is
            not orthogonal there. ``"newton"``: the same when called; :meth:`refine`, for the same norms, starts from
            the last ``R`` and refines :math:`(I - W)^{-1} = (R + I)/2` with products alone, exact to rounding while
            the spectral norm of the change of ``W`` is below 0.03 (two refinements) or 0.15 (three), convergent below
            1. Beyond, it is started anew at :math:`(I - W)^T / c`, finite and convergent over the next steps: look at
            the orthogonality error and call :meth:`warm_start` where it is large. ``"neumann"``: the truncated series
            :math:`(I + W)(I + W + \dots + W^k) = C (I - W^{k+1})` with the exact map :math:`C`, for spectral norms
            below 1. Its :math:`R^TR - I` is :math:`-W^{2k+2}` for even k and :math:`-2W^{k+1} + W^{2k+2}` for odd
            ones, so take an even one.
        terms: Number k of terms of ``neumann``.
        refinements: Newton steps of ``newton`` at each call of :meth:`refine`, two products each.

    Example:
        >>> Cayley()(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
        tensor([[ 0.,  1.],
                [-1.,  0.]])
    """

    method: str = "solve"
    terms: int = 4
    refinements: int = 3
    skew: ClassVar[bool] = True
    contract: ClassVar[Mapping[str, Any]] = {"variants": ({"method": "newton"},)}

    @property
    def exact(self) -> bool:
        """Not for the truncated series."""
        return self.method != "neumann"

    def __post_init__(self) -> None:
        check_choice("method", self.method, ("solve", "newton", "neumann"))
        check_range("terms", self.terms, 0)
        check_range("refinements", self.refinements, 1)

    @property
    def warm_starts(self) -> bool:
        """Whether :meth:`refine` starts warm, from the solution of the step before."""
        return self.method == "newton"

    def evaluate(self, P: Tensor) -> Tensor:
        """``R`` of a ``P`` in float32 or wider."""
        W = skew(P)
        if self.method == "neumann":
            return algebra.polynomial(W, [1.0, *[2.0] * self.terms, 1.0])
        return algebra.cayley(W)

    def preimage(self, R: Tensor) -> Tensor:
        """Strict upper triangle of the inverse Cayley map, which is no preimage under the truncated series."""
        return inverse_cayley(R).triu(1)

    def warm_start(self, P: Tensor) -> Tensor | None:
        """``R``."""
        with torch.no_grad():
            return at_least_float32(self(P)) if self.warm_starts else None

    def refine(self, P: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        """``R``, twice: with and without gradient."""
        if not self.warm_starts:
            return self(P), carried
        with full_precision(P):
            R = algebra.cayley(skew(_checked("P", P)), carried, self.refinements)
        return R.to(P.dtype), R.detach()


class _Orthonormalised(Map):
    """What the maps by QR share: the triangular factor, refined from one step to the next."""

    refinements: int

    @property
    def retracts(self) -> bool:
        """Scale and triangle of ``P`` do not count."""
        return True

    def warm_start(self, P: Tensor) -> Tensor | None:
        """The inverse of the triangular factor."""
        if not self.warm_starts:
            return None
        with full_precision(P), torch.no_grad():
            wide = self._transposed(_checked("P", P))
            _, T, det = algebra.orthonormalise(wide)
            T, _ = algebra.guarded(T, wide)
            return algebra.solve_triangular(T, eye(T).expand_as(T)) * self._column_signs(det, T.shape[-1])

    def refine(self, P: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        """``R`` and the refined inverse of the triangular factor."""
        if not self.warm_starts:
            return self(P), carried
        with full_precision(P):
            R, carried, _ = algebra.orthonormalise(self._transposed(_checked("P", P)), carried, self.refinements)
        return self._transposed(R).to(P.dtype), carried

    def _transposed(self, P: Tensor) -> Tensor:
        """``P`` with the vectors to orthonormalise in columns, and back."""
        return P

    def _column_signs(self, det: Tensor, d: int) -> Tensor | float:
        """What the columns of the factor with positive diagonal are multiplied by."""
        return 1.0


@maps.register("gram_schmidt", aliases=("gs",))
@dataclass(frozen=True)
class GramSchmidt(_Orthonormalised):
    r"""Gram-Schmidt orthonormalisation of the columns of ``P``, as the factor Q of a QR with positive diagonal.

    Unchanged if ``P`` is multiplied on the right by an upper triangular matrix with positive diagonal, so the scale of
    ``P`` only sets the size of steps; the last column has gradient 0. The determinant is the sign of that of ``P``.
    A column that depends on those before it gets some direction orthogonal to the others, and no gradient.

    Args:
        orientation: ``"columns"`` or ``"rows"`` are orthonormalised, first to last.
        method: ``"qr"``, or ``"newton"``: the same when called; :meth:`refine` starts from the inverse of the
            triangular factor and refines it with products alone, exact to rounding while the relative change of ``P``
            is below 0.02 (two refinements) or 0.1 (three). A larger one that makes it diverge starts it anew at a
            multiple of the identity, finite and convergent over the next steps: look at the orthogonality error and
            call :meth:`warm_start` where it is large.
        refinements: Newton steps of ``newton`` at each call of :meth:`refine`, three products each.

    Example:
        >>> GramSchmidt()(torch.tensor([[3.0, -1.0], [4.0, 2.0]]))
        tensor([[ 0.6000, -0.8000],
                [ 0.8000,  0.6000]])
    """

    orientation: str = "columns"
    method: str = "qr"
    refinements: int = 3
    contract: ClassVar[Mapping[str, Any]] = {"variants": ({"method": "newton"}, {"orientation": "rows"})}

    def __post_init__(self) -> None:
        check_choice("orientation", self.orientation, ("columns", "rows"))
        check_choice("method", self.method, ("qr", "newton"))
        check_range("refinements", self.refinements, 1)

    @property
    def warm_starts(self) -> bool:
        """Whether :meth:`refine` starts warm, from the solution of the step before."""
        return self.method == "newton"

    def evaluate(self, P: Tensor) -> Tensor:
        """``R`` of a ``P`` in float32 or wider."""
        return self._transposed(algebra.orthonormalise(self._transposed(P))[0])

    def _transposed(self, P: Tensor) -> Tensor:
        return P.mT if self.orientation == "rows" else P


@maps.register("householder", aliases=("hr",))
@dataclass(frozen=True)
class Householder(_Orthonormalised):
    r"""Product of Householder reflections; its determinant is fixed: -1 to the number of reflections.

    Args:
        form: ``"qr"``: the d - 1 reflections that make ``P`` upper triangular with positive diagonal but for its last
            entry. That is Gram-Schmidt with its last column times :math:`(-1)^{d-1} \operatorname{sign} \det P`, which
            is how it is computed: at ``P = I``, where reflectors are 0/0, value and gradient are those of the limit.
            ``"newton"``: the same with the warm start of :class:`GramSchmidt`, and with the sign that det P had at the
            last :meth:`warm_start`. ``"product"``: the columns of the strict
            lower triangle of ``P`` with a diagonal of ones are the d reflectors themselves
            (:func:`torch.linalg.householder_product`); at the start ``R`` is minus the identity.
        refinements: Newton steps of ``newton`` at each call of :meth:`refine`, three products each.

    Example:
        >>> Householder()(torch.tensor([[3.0, -1.0], [4.0, 2.0]]))
        tensor([[ 0.6000,  0.8000],
                [ 0.8000, -0.6000]])
    """

    form: str = "qr"
    refinements: int = 3
    contract: ClassVar[Mapping[str, Any]] = {"variants": ({"form": "newton"}, {"form": "product"})}

    def __post_init__(self) -> None:
        check_choice("form", self.form, ("qr", "newton", "product"))
        check_range("refinements", self.refinements, 1)

    @property
    def warm_starts(self) -> bool:
        """Whether :meth:`refine` starts warm, from the solution of the step before."""
        return self.form == "newton"

    @property
    def retracts(self) -> bool:
        """Scale and triangle of ``P`` do not count, but for the reflectors of a product."""
        return self.form != "product"

    def evaluate(self, P: Tensor) -> Tensor:
        """``R`` of a ``P`` in float32 or wider."""
        if self.form == "product":
            return algebra.reflections(P.tril(-1) + eye(P))
        Q, _, det = algebra.orthonormalise(P)
        return Q * self._column_signs(det, P.shape[-1])

    def signs(self, d: int) -> Tensor | None:
        """The diagonal of ``R`` at the start."""
        if self.form == "product":
            return -torch.ones(d)
        return torch.cat([torch.ones(d - 1), torch.tensor([(-1.0) ** (d - 1)])])

    def preimage(self, R: Tensor) -> Tensor:
        """``R`` itself, which needs the determinant of a product of reflections."""
        if self.form == "product":
            raise ArgumentError("form", "must be 'qr' or 'newton' for an inverse, got 'product'")
        return R

    def _column_signs(self, det: Tensor, d: int) -> Tensor:
        last = (-1.0) ** (d - 1) * det[..., None, None]
        return torch.cat([torch.ones_like(last).expand(*det.shape, 1, d - 1), last], -1)


@maps.register("loewdin", aliases=("ls",))
@dataclass(frozen=True)
class Loewdin(Map):
    r"""Loewdin's symmetric orthogonalisation :math:`R = P (P^TP)^{-1/2}`, the orthogonal matrix nearest to ``P``.

    Its derivative only has sums of singular values in denominators, so it is finite at the identity and for repeated
    singular values. A singular ``P`` gives one of its nearest orthogonal matrices (``svd``) or a finite matrix that is
    not orthogonal in the null space (iterations); pairs of zero singular values pass no gradient.

    Args:
        method: ``"svd"`` waits for the device. ``"newton"`` is :math:`X \leftarrow (X + X^{-T})/2` and scaling, for any
            condition; its backward pass waits. ``"newton-schulz"`` is :math:`X \leftarrow \tfrac32 X - \tfrac12 XX^TX`,
            each step scaled by the range that the singular values can have by then: products alone and no wait in both
            passes. With five steps the error is below 1e-6 for singular values in a ratio of up to 4 (in float64 six,
            and below 1e-12), and each further step allows for one 2.5 times as large: 6 steps for 10, 9 for 100, 11
            for 1,000. The backward pass takes no more than five products a step.
        steps: Of the iteration; if not given 10 (``newton``), or 5 and in float64 6 (``newton-schulz``).
        scale: Of the start of Newton-Schulz: by the largest singular value, estimated with a few vectors
            (``"spectral"``), by the Frobenius norm (``"frobenius"``), which takes more steps, or ``"none"``, for
            singular values between 0.5 and 1.5, as training keeps them that continues from ``P = R`` now and then.

    Example:
        >>> Loewdin()(torch.tensor([[2.0, 0.0], [0.0, -3.0]]))
        tensor([[ 1.,  0.],
                [ 0., -1.]])
    """

    method: str = "svd"
    steps: int | None = None
    scale: str = "spectral"
    contract: ClassVar[Mapping[str, Any]] = {
        "variants": ({"method": "newton"}, {"method": "newton-schulz", "steps": 16})
    }

    def __post_init__(self) -> None:
        check_choice("method", self.method, ("svd", "newton", "newton-schulz"))
        check_choice("scale", self.scale, ("spectral", "frobenius", "none"))
        if self.steps is not None:
            check_range("steps", self.steps, 1)

    @property
    def retracts(self) -> bool:
        """The symmetric factor of ``P`` does not count."""
        return True

    def evaluate(self, P: Tensor) -> Tensor:
        """``R`` of a ``P`` in float32 or wider."""
        steps = self.steps or (5 + (P.dtype == torch.float64) if self.method == "newton-schulz" else 10)
        return algebra.polar(P, self.method, steps, self.scale)


@maps.register("exponential", aliases=("exp",))
@dataclass(frozen=True)
class Exponential(Map):
    r"""Matrix exponential :math:`R = e^W` of the skew matrix of the strict upper triangle of ``P``: all rotations.

    Args:
        max_norm: The spectral norm of ``W`` up to which the result is exact (:math:`\pi` reaches every rotation). It
            fixes the number of squarings; a larger ``W`` gives a matrix that is not orthogonal. ``None`` measures it,
            which waits for the device; in a captured CUDA graph and in compiled code it is 8.

    Example:
        >>> Exponential()(torch.tensor([[0.0, math.pi], [0.0, 0.0]])).round(decimals=5).diagonal()
        tensor([-1., -1.])
    """

    max_norm: float | None = None
    skew: ClassVar[bool] = True
    contract: ClassVar[Mapping[str, Any]] = {"variants": ({"max_norm": 8.0},), "waits": True}

    def __post_init__(self) -> None:
        if self.max_norm is not None:
            check_range("max_norm", self.max_norm, 0, open_low=True)

    def evaluate(self, P: Tensor) -> Tensor:
        """``R`` of a ``P`` in float32 or wider."""
        W = skew(P)
        return algebra.exponential(W, self._norm(W.detach()) if self.max_norm is None else self.max_norm)

    @staticmethod
    def _norm(W: Tensor) -> float:
        if torch.compiler.is_compiling() or (W.is_cuda and torch.cuda.is_current_stream_capturing()):
            return CAPTURED_NORM
        if transformed():  # nobody asks there
            return 0.0
        if not W.numel():
            return 0.0
        # Both bound the spectral norm: the largest row sum, and the estimate with some room.
        bound = torch.minimum(W.abs().sum(-1).amax(-1), 1.2 * algebra.spectral_norm(W)[..., 0, 0]).amax().item()
        return bound if math.isfinite(bound) else 1.0

    def preimage(self, R: Tensor) -> Tensor:
        """Strict upper triangle of the principal logarithm."""
        return _logarithm(R).triu(1)


@maps.register("givens")
@dataclass(frozen=True)
class Givens(Map):
    r"""Product :math:`\prod_{i<j} G(i, j, \theta_{ij})` of plane rotations in lexicographic order.

    The angles are the strict upper triangle of ``P``; :math:`G_{ii} = G_{jj} = \cos\theta`,
    :math:`G_{ij} = -\sin\theta`, :math:`G_{ji} = \sin\theta`. Computed in 2 d - 3 stages of disjoint rotations, a few
    operations on the whole matrix (twice that in the backward pass, which keeps only ``R``): for d up to a hundred.

    Example:
        >>> Givens()(torch.tensor([[0.0, math.pi / 6], [0.0, 0.0]]))
        tensor([[ 0.8660, -0.5000],
                [ 0.5000,  0.8660]])
    """

    skew: ClassVar[bool] = True

    def evaluate(self, P: Tensor) -> Tensor:
        """``R`` of a ``P`` in float32 or wider."""
        return algebra.givens(P)

    def preimage(self, R: Tensor) -> Tensor:
        """Not offered."""
        raise ArgumentError("map", "must have an inverse, got 'givens'")


@maps.register("unconstrained", aliases=("upt", "or"))
@dataclass(frozen=True)
class Unconstrained(Map):
    """``R = P``: no constraint, the control; also the map of the relaxed form, which adds a penalty.

    Example:
        >>> Unconstrained()(torch.ones(1, 1))
        tensor([[1.]])
    """

    orthogonal: ClassVar[bool] = False

    def evaluate(self, P: Tensor) -> Tensor:
        """``P``."""
        return P

    def free(self, d: int) -> int:
        """Number of unconstrained parameters."""
        return d * d


@maps.register("direct", aliases=("ogd",))
@dataclass(frozen=True)
class Direct(Map):
    """``R = P``, which the optimiser has to keep orthogonal.

    :class:`hypersphere.optim.OGD` does.

    Example:
        >>> Direct()(torch.ones(1, 1))
        tensor([[1.]])
    """

    direct: ClassVar[bool] = True

    def evaluate(self, P: Tensor) -> Tensor:
        """``P``."""
        return P


@maps.register("spd")
@dataclass(frozen=True)
class SPD(Map):
    r"""Symmetric positive semidefinite :math:`R = LL^T` with the lower triangle :math:`L` of ``P``.

    Every neuron stays within 90 degrees of its start.

    Example:
        >>> SPD()(torch.tensor([[2.0, 9.0], [1.0, 1.0]]))
        tensor([[4., 2.],
                [2., 2.]])
    """

    orthogonal: ClassVar[bool] = False

    def evaluate(self, P: Tensor) -> Tensor:
        """``R`` of a ``P`` in float32 or wider."""
        L = P.tril()
        return product(L, L.mT)

    def free(self, d: int) -> int:
        """Number of unconstrained parameters."""
        return d * (d + 1) // 2

    def preimage(self, R: Tensor) -> Tensor:
        """Cholesky factor."""
        return torch.linalg.cholesky_ex(R)[0]


STRUCTURES = ("upper", "lower", "banded", "symmetric", "skew", "upper_hessenberg", "lower_hessenberg")


@maps.register("masked")
@dataclass(frozen=True)
class Masked(Map):
    """``P`` with entries set to zero or tied together.

    Args:
        structure: ``"upper"``, ``"lower"`` (triangular), ``"banded"``, ``"upper_hessenberg"``, ``"lower_hessenberg"``
            (triangular with one more diagonal), ``"symmetric"`` or ``"skew"`` (both from the upper triangle).
        bandwidth: Diagonals on each side of the main one that ``"banded"`` keeps.

    Example:
        >>> Masked("symmetric")(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([[1., 2.],
                [2., 4.]])
    """

    structure: str = "upper"
    bandwidth: int = 1
    orthogonal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choice("structure", self.structure, STRUCTURES)
        check_range("bandwidth", self.bandwidth, 0)

    def evaluate(self, P: Tensor) -> Tensor:
        """``R`` of a ``P`` in float32 or wider."""
        if self.structure == "skew":
            return skew(P)
        if self.structure == "symmetric":
            return P.triu() + P.triu(1).mT
        lower, upper = self._diagonals(P.shape[-1])
        return P.triu(-lower).tril(upper)

    def start(
        self,
        d: int,
        *,
        batch: tuple[int, ...] = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The identity, which no skew matrix is."""
        if self.structure == "skew":
            raise ArgumentError("structure", "must be one that holds the identity for a start, got 'skew'")
        return super().start(d, batch=batch, device=device, dtype=dtype)

    def free(self, d: int) -> int:
        """Number of unconstrained parameters."""
        if self.structure in ("symmetric", "skew"):
            return d * (d + 1) // 2 - (d if self.structure == "skew" else 0)
        return sum(max(0, d - abs(k)) for side in [self._diagonals(d)] for k in range(-side[0], side[1] + 1))

    def _diagonals(self, d: int) -> tuple[int, int]:
        """How many diagonals are kept below and above the main one."""
        return {
            "upper": (0, d),
            "lower": (d, 0),
            "banded": (self.bandwidth, self.bandwidth),
            "upper_hessenberg": (1, d),
            "lower_hessenberg": (d, 1),
        }[self.structure]


def cayley(P: Tensor, method: str = "solve", terms: int = 4) -> Tensor:
    """:class:`Cayley` as a function.

    Example:
        >>> cayley(torch.zeros(1, 1))
        tensor([[1.]])
    """
    return Cayley(method, terms)(P)


def gram_schmidt(P: Tensor, orientation: str = "columns") -> Tensor:
    """:class:`GramSchmidt` as a function.

    Example:
        >>> gram_schmidt(-3 * torch.eye(1))
        tensor([[-1.]])
    """
    return GramSchmidt(orientation)(P)


def householder(P: Tensor, form: str = "qr") -> Tensor:
    """:class:`Householder` as a function.

    Example:
        >>> householder(torch.eye(2)).diagonal()
        tensor([ 1., -1.])
    """
    return Householder(form)(P)


def householder_product(V: Tensor) -> Tensor:
    r"""Product :math:`\prod_j (I - 2 v_j v_j^T / \|v_j\|^2)` over the columns of ``V`` ``(..., d, m)``, first to last.

    A zero column is no reflection and passes no gradient. Equal neighbours cancel.

    Example:
        >>> householder_product(torch.tensor([[1.0, 1.0], [1.0, 1.0]])).abs().round(decimals=5)
        tensor([[1., 0.],
                [0., 1.]])
    """
    if not isinstance(V, Tensor) or not V.is_floating_point() or V.dim() < 2:
        raise ArgumentError("V", "must be a real floating-point tensor (..., d, m)")
    with full_precision(V):
        return algebra.reflections(at_least_float32(V)).to(V.dtype)


def loewdin(P: Tensor, method: str = "svd", steps: int | None = None, scale: str = "spectral") -> Tensor:
    """:class:`Loewdin` as a function.

    Example:
        >>> loewdin(-3 * torch.eye(1))
        tensor([[-1.]])
    """
    return Loewdin(method, steps, scale)(P)


def canonical(P: Tensor) -> Tensor:
    r"""Canonical orthogonalisation :math:`P V \Sigma^{-1}` with :math:`P = U \Sigma V^T`, by ascending singular values.

    Its columns are the left singular vectors, each up to its sign; not meant for training.

    Example:
        >>> canonical(torch.tensor([[3.0, 0.0], [0.0, 2.0]])).abs()
        tensor([[0., 1.],
                [1., 0.]])
    """
    wide = _checked("P", P)
    with full_precision(wide), exact_products():
        return torch.linalg.svd(wide)[0].flip(-1).to(P.dtype)


def exponential(P: Tensor, max_norm: float | None = None) -> Tensor:
    """:class:`Exponential` as a function.

    Example:
        >>> exponential(torch.zeros(1, 1))
        tensor([[1.]])
    """
    return Exponential(max_norm)(P)


def givens(P: Tensor) -> Tensor:
    """:class:`Givens` as a function.

    Example:
        >>> givens(torch.zeros(1, 1))
        tensor([[1.]])
    """
    return Givens()(P)


def unconstrained(P: Tensor) -> Tensor:
    """:class:`Unconstrained` as a function.

    Example:
        >>> unconstrained(torch.ones(1, 1))
        tensor([[1.]])
    """
    return Unconstrained()(P)


def spd(P: Tensor) -> Tensor:
    """:class:`SPD` as a function.

    Example:
        >>> spd(3 * torch.eye(1))
        tensor([[9.]])
    """
    return SPD()(P)


def masked(P: Tensor, structure: str = "upper", bandwidth: int = 1) -> Tensor:
    """:class:`Masked` as a function.

    Example:
        >>> masked(torch.ones(2, 2), "lower")
        tensor([[1., 0.],
                [1., 1.]])
    """
    return Masked(structure, bandwidth)(P)


def inverse_cayley(R: Tensor) -> Tensor:
    r"""The skew :math:`W = (R - I)(R + I)^{-1}` whose Cayley map is ``R``, which must have no eigenvalue -1.

    Example:
        >>> inverse_cayley(torch.tensor([[0.0, 1.0], [-1.0, 0.0]]))
        tensor([[ 0.,  1.],
                [-1.,  0.]])
    """
    wide = _checked("R", R)
    identity = eye(wide)
    with full_precision(wide), exact_products():
        W = torch.linalg.solve_ex(wide + identity, wide - identity)[0]  # the two factors commute
    return ((W - W.mT) / 2).to(R.dtype)


def _logarithm(R: Tensor) -> Tensor:
    """Principal logarithm of rotations without eigenvalue -1, in float64.

    The square root of such a rotation is the polar factor of I + R. A few of them bring it near the identity, where
    log R = 2 artanh of its inverse Cayley map.
    """
    root = R.double()
    halvings = 5
    for _ in range(halvings):
        root = algebra.polar(eye(root) + root)
    series = [0.0 if k % 2 == 0 else 2.0 / k for k in range(18)]
    return (algebra.polynomial(inverse_cayley(root), series) * 2**halvings).to(R.dtype)


def orthogonality_error(R: Tensor) -> Tensor:
    r"""How far matrices are from orthogonal, :math:`\|R^TR - I\|_F / \sqrt d`.

    Args:
        R: ``(..., d, d)``.

    Returns:
        ``(...)`` in float32 or wider.

    Example:
        >>> orthogonality_error(2 * torch.eye(3))
        tensor(3.)
    """
    wide = _checked("R", R)
    defect = product(wide.mT, wide) - eye(wide)
    return torch.linalg.vector_norm(defect, dim=(-2, -1)) / math.sqrt(wide.shape[-1])
