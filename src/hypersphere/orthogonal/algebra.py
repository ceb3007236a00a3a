r"""Matrix functions with exact, cheap derivatives: what the orthogonal maps are made of.

Everything works on ``(..., d, d)`` tensors in float32 or float64, products are true float32 in both passes whatever the
process allows elsewhere, and nothing but the singular and the eigenvalue decomposition waits for the device. Backward
passes are closed forms of a few products, written with differentiable operations, so that they have derivatives, too.
Transforms of ``torch.func`` and forward mode see torch's own operations instead, of the same value.
Squares are taken of matrices over their largest entry, so that no norm is too large or too small for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hypersphere.geometry import exact_products, full_precision, transformed


@contextmanager
def _exact(x: Tensor) -> Iterator[None]:
    """Exact products, and autocast off for the device of ``x``."""
    with full_precision(x), exact_products():
        yield


def eye(x: Tensor) -> Tensor:
    """Identity of the size, type and device of the matrices ``x``, without their leading dimensions."""
    return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


def _unit(M: Tensor, dim: int | tuple[int, int] = (-2, -1)) -> tuple[Tensor, Tensor]:
    """``M`` over its largest entry, or column over their own, and these entries; 1 for zeros."""
    largest = M.detach().abs().amax(dim, keepdim=True)
    largest = torch.where(largest > 0, largest, 1)
    return M / largest, largest


def frobenius(M: Tensor) -> Tensor:
    """Frobenius norm of matrices of any scale, ``(..., 1, 1)``.

    Example:
        >>> frobenius(1e30 * torch.eye(4))
        tensor([[2.0000e+30]])
    """
    unit, largest = _unit(M)
    return _squared(unit).sqrt() * largest


def skew(P: Tensor) -> Tensor:
    r"""Skew matrix :math:`W = U - U^T` of the strict upper triangle :math:`U` of ``P``; the rest is not read.

    Example:
        >>> skew(torch.ones(2, 2))
        tensor([[ 0.,  1.],
                [-1.,  0.]])
    """
    return _Skew.forward(P) if transformed() else _Skew.apply(P)


class _Skew(torch.autograd.Function):
    """Two passes over the matrices each way."""

    @staticmethod
    def forward(P: Tensor) -> Tensor:
        upper = P.triu(1)
        return upper - upper.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return (grads[0] - grads[0].mT).triu(1)


class _Product(torch.autograd.Function):
    """A product and, in its backward pass, two, all of them exact."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        with _exact(a):
            return a @ b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        left, right = ctx.needs_input_grad
        return (product(grads[0], b.mT) if left else None, product(a.mT, grads[0]) if right else None)


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of matrices with equal leading dimensions, under :func:`exact_products` in both passes.

    Example:
        >>> product(torch.ones(1, 2), torch.ones(2, 1))
        tensor([[2.]])
    """
    if torch.compiler.is_compiling():  # nothing to set in a compiled graph
        return a @ b
    return _Product.forward(a, b) if transformed() else _Product.apply(a, b)


class _SolveTriangular(torch.autograd.Function):
    """``T^-1 B`` for a triangular ``T``."""

    @staticmethod
    def forward(T: Tensor, B: Tensor, upper: bool) -> Tensor:
        with _exact(T):
            return torch.linalg.solve_triangular(T, B, upper=upper)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.upper = inputs[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None]:
        T, X = ctx.saved_tensors
        d_B = solve_triangular(T.mT, grads[0], upper=not ctx.upper)
        if not ctx.needs_input_grad[0]:
            return None, d_B, None
        d_T = product(d_B, X.mT)
        return (-d_T.triu() if ctx.upper else -d_T.tril()), d_B, None


def solve_triangular(T: Tensor, B: Tensor, *, upper: bool = True) -> Tensor:
    """``T^-1 B`` for triangular ``T`` with non-zero diagonal, exact in both passes.

    Example:
        >>> solve_triangular(torch.tensor([[2.0, 1.0], [0.0, 1.0]]), torch.eye(2))
        tensor([[ 0.5000, -0.5000],
                [ 0.0000,  1.0000]])
    """
    return _SolveTriangular.forward(T, B, upper) if transformed() else _SolveTriangular.apply(T, B, upper)


def polynomial(X: Tensor, coefficients: Sequence[float]) -> Tensor:
    r""":math:`\sum_k c_k X^k` with about :math:`2\sqrt{n}` products for degree :math:`n` (Paterson and Stockmeyer).

    Example:
        >>> polynomial(2 * torch.eye(1), [1, 1, 1, 1])
        tensor([[15.]])
    """
    identity, degree = eye(X), len(coefficients) - 1
    width = max(1, round(math.sqrt(degree)))
    powers = [X]
    while len(powers) < width:
        powers.append(product(powers[(len(powers) - 1) // 2], powers[len(powers) // 2]))

    def block(first: int, last: int) -> Tensor:
        total = coefficients[first] * identity
        for power in range(1, last - first + 1):
            total = total + coefficients[first + power] * powers[power - 1]
        return total

    # The highest block also takes the power that the lower ones are multiplied by.
    start = max(0, (degree - 1) // width * width)
    total = block(start, degree)
    while start:
        start -= width
        total = block(start, start + width - 1) + product(total, powers[-1])
    return total if degree else total.expand_as(X)


def spectral_norm(M: Tensor, steps: int = 4) -> Tensor:
    """Estimate from below of the largest singular value, ``(..., 1, 1)``, by ``steps`` power steps of 8 vectors.

    It is no more than 10 per cent or so too small, and does not wait for the device.

    Example:
        >>> spectral_norm(torch.diag(torch.tensor([1.0, 3.0])))
        tensor([[3.0000]])
    """
    M, scale = _unit(M.detach())
    index = torch.arange(8 * M.shape[-1], dtype=M.dtype, device=M.device).reshape(-1, 8)
    x = ((index * 0.6180339887) % 1 - 0.5).expand(*M.shape[:-2], -1, -1)
    tiny = torch.finfo(M.dtype).tiny
    largest = M.new_zeros(())
    with _exact(M):
        for _ in range(steps):
            x = x / torch.linalg.vector_norm(x, dim=-2, keepdim=True).clamp(min=tiny)
            y = M @ x
            largest = torch.linalg.vector_norm(y, dim=-2, keepdim=True).amax(-1, keepdim=True)
            x = M.mT @ y
    return largest * scale


# ------------------------------------------------------------------------------------------------------- Cayley


FAR = 1e3
"""Spectral norm from which :math:`I - W` is too far from orthogonal for a solve, where one may look at it."""


def _far(W: Tensor) -> Tensor | None:
    """Which of the skew matrices are beyond :data:`FAR`; ``None`` where none is."""
    far = torch.linalg.vector_norm(W, math.inf, dim=(-2, -1)) > FAR / W.shape[-1]
    if bool(far.any()):
        far = far & (spectral_norm(W)[..., 0, 0] > FAR)
    return far if bool(far.any()) else None


def _in_planes(W: Tensor) -> tuple[Tensor, Tensor]:
    r"""``Q`` and ``B`` of :math:`(I - W)^{-1} = QBQ^T`, in float64 on the host.

    ``Q`` is orthogonal, its columns in pairs the planes in which W turns, and the axis that stays in an odd number of
    dimensions at the end; ``B`` has a block :math:`[[1, m], [-m, 1]] / (1 + m^2)` for each plane, and 1 for the axis.
    """
    unit, scale = _unit(W.to("cpu", torch.float64))
    d = W.shape[-1]
    U = torch.linalg.eigh(1j * unit)[1].flip(-1)[..., : d // 2]
    Q = torch.linalg.qr(torch.stack([U.real, U.imag], -1).flatten(-2), mode="complete")[0]  # in null spaces, too
    m = (Q.mT @ unit @ Q).diagonal(1, -2, -1)[..., ::2]
    m = m.masked_fill(m.abs() <= 10 * torch.finfo(m.dtype).eps * m.abs().amax(-1, keepdim=True), 0) * scale[..., 0]
    c = 1 / (1 + m * m)
    above = torch.stack([m * c, torch.zeros_like(m)], -1).flatten(-2)[..., : d - 1]
    c = torch.nn.functional.pad(c.repeat_interleave(2, -1), (0, d % 2), value=1.0)
    return Q, torch.diag_embed(c) + torch.diag_embed(above, 1) - torch.diag_embed(above, -1)


def _by_solve(W: Tensor) -> Tensor:
    """The Cayley map of ``W`` on the host, by a solve where that has no digits to lose."""
    identity = eye(W)
    with _exact(W):
        lu, pivots, _ = torch.linalg.lu_factor_ex(identity - W)
        R = polished(torch.linalg.lu_solve(lu, pivots, identity + W))  # a large W costs the solve digits
        if (far := _far(W)) is not None:
            Q, B = _in_planes(W[far])
            R[far] = (Q @ (2 * B - eye(B)) @ Q.mT).to(R)
    return R


def _cayley_slope(R: Tensor, G: Tensor) -> Tensor:
    half = G + product(R.mT, G)
    return (half + product(half, R.mT)) / 2


def _slope(W: Tensor, R: Tensor, G: Tensor) -> Tensor:
    """The gradient by ``W`` on the host, where :math:`(R + I)/2 = (I - W)^{-1}` cancels for a large ``W``.

    It is skew there: :math:`X^TAX` with :math:`X = (I - W)^{-1}`, :math:`A = GR^T - RG^T`.
    """
    M = _cayley_slope(R, G)
    if (far := _far(W)) is not None:
        Q, B = _in_planes(W[far])
        A = Q.mT @ G[far].to(Q) @ Q @ (2 * B - eye(B)).mT
        M[far] = (Q @ (B.mT @ (A - A.mT) @ B) @ Q.mT).to(M)
    return M


_OPAQUE = {
    f: torch.library.custom_op(f"hypersphere::cayley{f.__name__}", mutates_args=())(f) for f in (_by_solve, _slope)
}
"""Both for where numbers cannot be looked at."""
for _opaque in _OPAQUE.values():
    _opaque.register_fake(lambda W, *others: torch.empty_like(W))


def _on_host(f: Any, W: Tensor, *others: Tensor) -> Tensor:
    """``f`` itself where its tensors have numbers, which spares the dispatch of the opaque one."""
    recorded = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    known = type(W) is Tensor and W.device.type == "cpu" and not recorded
    found: Tensor = (f if known else _OPAQUE[f])(W, *others)
    return found


def _solved(W: Tensor) -> Tensor:
    """The Cayley map of ``W`` with no wait for the device.

    A GPU factorises no batch inside a captured CUDA graph but by Cholesky, so it is :math:`(I - W)^T (I + W^TW)^{-1}`
    there, which has the digits for spectral norms up to :data:`FAR`.
    """
    if not W.is_cuda:
        return _on_host(_by_solve, W)
    identity = eye(W)
    A = identity - W
    L = _cholesky(identity + W.mT @ W)
    half = torch.linalg.solve_triangular(L, identity.expand_as(L), upper=False)
    X = A.mT @ (half.mT @ half)
    return polished(2 * (X + X @ (identity - A @ X)) - identity)  # that product squared the condition number


def _cholesky(S: Tensor) -> Tensor:
    """Cholesky factors on a GPU; batches of large ones cannot be captured in a CUDA graph, so these go one by one."""
    if S.shape[-1] < 1024 or S.numel() == S.shape[-1] ** 2:
        return torch.linalg.cholesky_ex(S)[0]
    single = S.reshape(-1, *S.shape[-2:]).unbind(0)
    return torch.stack([torch.linalg.cholesky_ex(matrix)[0] for matrix in single]).view(S.shape)


class _Cayley(torch.autograd.Function):
    """``(I + W)(I - W)^-1`` by a solve, or by Newton steps from the result for a ``W`` nearby."""

    @staticmethod
    def forward(W: Tensor, nearby: Tensor | None, refinements: int) -> Tensor:
        identity = eye(W)
        A = identity - W
        with _exact(W):
            if nearby is None:
                return _solved(W)
            A, X = (M.reshape(-1, *W.shape[-2:]) for M in (A, torch.lerp(identity, nearby, 0.5)))
            for step in range(refinements):
                # What fast products lose before the last step, that finds.
                with exact_products("ieee" if step == refinements - 1 else "tf32"):
                    residual = torch.baddbmm(identity, A, X, alpha=-1)
                with exact_products("tf32"):
                    X = torch.baddbmm(X, X, residual)
            A, X = A.view(W.shape), X.view(W.shape)
            # |X|_F^2 <= d for the inverse, and on the way to it from the new start. Skew: |W|_2^2 <= |W|_F^2 / 2.
            start = A.mT / (1 + _squared(W).clamp(max=torch.finfo(W.dtype).max) / 2)  # not 0, from which nothing grows
            X = torch.where(_squared(X) <= 1.5 * W.shape[-1], X, start)
            return polished(torch.add(-identity, X, alpha=2))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None, int], output: Tensor) -> None:
        ctx.save_for_backward(output, *([] if output.is_cuda else inputs[:1]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        R, *host = ctx.saved_tensors
        if not host:
            return _cayley_slope(R, grads[0]), None, None
        M = _on_host(_slope, host[0].detach(), R.detach(), grads[0].detach())
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # a derivative of this one is wanted
            slope = _cayley_slope(R, grads[0])
            M = M + (slope - slope.detach())
        return M, None, None


def cayley(W: Tensor, nearby: Tensor | None = None, refinements: int = 2) -> Tensor:
    r""":math:`R = (I + W)(I - W)^{-1}` of skew ``W``.

    The backward pass is two products with ``R``: :math:`M = \tfrac12 (R^T + I) G (R^T + I)`. Beyond a spectral norm of
    :data:`FAR` both passes take W apart into planes, where it is not on a GPU.

    Args:
        W: Skew matrices.
        nearby: The result for a ``W'`` nearby: then ``refinements`` steps :math:`X \leftarrow X + X(I - (I - W)X)` of
            :math:`X = (I - W)^{-1} = (R + I)/2` take the place of the solve. Where they diverge
            (:math:`\|W - W'\|_2 \ge 1`), ``X`` is started anew at :math:`(I - W)^T / c`, from which later calls
            converge.
        refinements: Number of steps, two products each.

    Example:
        >>> cayley(torch.zeros(2, 2))
        tensor([[1., 0.],
                [0., 1.]])
    """
    if transformed():
        return torch.linalg.solve(eye(W) - W, eye(W) + W)  # these two commute
    return _Cayley.apply(W, nearby, refinements)


def polished(R: Tensor, precision: str = "tf32", scale: float = 1.0) -> Tensor:
    r"""A nearly orthogonal matrix with its error squared, down to rounding: :math:`R + \tfrac12 R (I - R^TR)`.

    Of a small correction few digits will do, so its product is a fast one. With ``scale`` that of ``scale * R``.
    """
    flat = R.reshape(-1, *R.shape[-2:])
    defect = torch.baddbmm(eye(R), flat.mT, flat, alpha=-(scale**2))
    with exact_products(precision):
        return torch.baddbmm(flat, flat, defect, beta=scale, alpha=0.5 * scale).view(R.shape)


def _squared(M: Tensor) -> Tensor:
    """Squared Frobenius norm, ``(..., 1, 1)``."""
    return torch.linalg.vector_norm(M, dim=(-2, -1), keepdim=True).square()


# ------------------------------------------------------------------------------------------------- Gram-Schmidt


class _Orthonormalise(torch.autograd.Function):
    """``P = Q T`` with upper triangular ``T``, by QR or by Newton steps from a ``T^-1`` nearby.

    Returns Q, then T and the sign of det P (QR) or T^-1 and nothing (Newton).
    """

    @staticmethod
    def forward(P: Tensor, N: Tensor | None, refinements: int) -> tuple[Tensor, Tensor, Tensor]:
        with _exact(P):
            if N is None:
                packed, tau = torch.geqrf(P)
                signs = 1 - 2 * (packed.diagonal(dim1=-2, dim2=-1) < 0).to(P.dtype)
                # Each reflection with tau != 0 has determinant -1.
                det = signs.prod(-1) * (1 - 2 * ((tau != 0).sum(-1) % 2)).to(P.dtype)
                Q = torch.linalg.householder_product(packed, tau) * signs.unsqueeze(-2)
                return Q, packed.triu() * signs.unsqueeze(-1), det
            d, first = P.shape[-1], N
            good = torch.ones_like(N[..., :1, :1], dtype=torch.bool)
            scale_of = torch.ones(d, d, dtype=P.dtype, device=P.device).triu(1) + 0.5 * eye(P)
            for step in range(refinements):
                # What fast products lose before the last step, that finds.
                with exact_products("ieee" if step == refinements - 1 else "tf32"):
                    Q = P @ N
                    U = (Q.mT @ Q - eye(P)) * scale_of
                good = good & (U.diagonal(dim1=-2, dim2=-1) < 1).all(-1)[..., None, None]  # or a sign of N flips
                with exact_products("tf32"):
                    N = N - N @ U
            with exact_products("tf32"):
                Q = Q - Q @ U
            # |Q|_F^2 = d for the limit and less on the way to it from below.
            good = good & (_squared(Q) <= 1.5 * d)
            scale = _squared(P).clamp(torch.finfo(P.dtype).tiny, torch.finfo(P.dtype).max).rsqrt()
            signs = torch.where(first.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(P.dtype)
            N = torch.where(good, N, torch.diag_embed(signs) * scale)
            return torch.where(good, Q, P * signs.unsqueeze(-2) * scale), N, P.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None, int], output: tuple[Tensor, ...]) -> None:
        ctx.newton = inputs[1] is not None
        ctx.save_for_backward(inputs[0], *output[:2])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        P, Q, factor = ctx.saved_tensors
        A = product(Q.mT, grads[0])
        B = product(Q, (A - A.mT).tril(-1))
        again = torch.is_grad_enabled() and not torch.compiler.is_compiling()  # a derivative of this one is wanted
        if ctx.newton and not again:
            return product(B, factor.mT), None, None
        T, dead = guarded(product(Q.mT, P).triu() if again else factor, P)
        return solve_triangular(T, B.masked_fill(dead.unsqueeze(-2), 0).mT).mT, None, None


def guarded(T: Tensor, P: Tensor) -> tuple[Tensor, Tensor]:
    """The triangular factor of ``P`` with the identity's rows for columns that depend on others; which these are."""
    unit, scale = _unit(P)
    length = torch.linalg.vector_norm(unit, dim=-2) * scale[..., 0]
    dead = T.diagonal(dim1=-2, dim2=-1).abs() <= 10 * torch.finfo(P.dtype).eps * length
    return torch.where(dead.unsqueeze(-1), eye(T), T), dead


def orthonormalise(P: Tensor, N: Tensor | None = None, refinements: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    r"""Orthonormal columns ``Q`` with :math:`P = QT`, ``T`` upper triangular with positive diagonal.

    The backward pass is :math:`Q\,\mathrm{tril}(A - A^T, -1)\,T^{-T}` with :math:`A = Q^T G`. A column that depends on
    those before it gets some direction orthogonal to the rest and passes no gradient.

    Args:
        P: Square matrices.
        N: The inverse of ``T`` of matrices nearby: then ``refinements`` steps take the place of the factorisation,
            :math:`Q = PN`, :math:`E = Q^TQ - I`, :math:`U = \mathrm{triu}(E, 1) + \mathrm{diag}(E)/2`, and both ``Q``
            and ``N`` lose their product with ``U``. Signs on the diagonal of ``N`` stay as they are. Where the steps
            diverge, ``N`` is started anew at a multiple of the identity, from which later calls converge.
        refinements: Number of steps, three products each.

    Returns:
        ``Q``; without gradient ``T`` and the sign of det P, or with ``N`` given the new ``N`` and an empty tensor.

    Example:
        >>> orthonormalise(torch.tensor([[3.0, -1.0], [4.0, 2.0]]))[0]
        tensor([[ 0.6000, -0.8000],
                [ 0.8000,  0.6000]])
    """
    return _by_qr(P, N) if transformed() else _Orthonormalise.apply(P, N, refinements)


def _by_qr(P: Tensor, N: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The same by torch's operations, for matrices of full rank, with the signs of ``N`` and no refinement of it."""
    Q, T = torch.linalg.qr(P)
    signs = torch.where(T.detach().diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(P.dtype)
    Q = Q * signs.unsqueeze(-2)
    T = (T * signs.unsqueeze(-1)).detach()
    if N is None:
        return Q, T, torch.linalg.det(Q.detach()).sign()
    signs = torch.where(N.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(P.dtype).unsqueeze(-2)
    return Q * signs, torch.linalg.solve_triangular(T, eye(T).expand_as(T), upper=True) * signs, P.new_empty(0)


def reflections(V: Tensor) -> Tensor:
    r"""Product :math:`\prod_j (I - 2 v_j v_j^T / \|v_j\|^2)` over the columns of ``V`` in compact form.

    With unit columns :math:`U` it is :math:`I - U T U^T`, :math:`T^{-1} = \mathrm{triu}(U^TU, 1) + I/2`: two products
    and a triangular solve. A zero column is no reflection and passes no gradient.

    Args:
        V: ``(..., d, m)``.

    Returns:
        ``(..., d, d)``.

    Example:
        >>> reflections(torch.tensor([[1.0], [2.0]]))
        tensor([[ 0.6000, -0.8000],
                [-0.8000, -0.6000]])
    """
    V, _ = _unit(V, -2)  # at least as long as 1 then, or zero
    length = torch.linalg.vector_norm(V, dim=-2, keepdim=True)
    zero = length == 0  # false for NaN, which must not pass for 0
    U = torch.where(zero, 0, V / torch.where(zero, 1, length))
    inverse = product(U.mT, U).triu(1) + 0.5 * torch.eye(V.shape[-1], dtype=V.dtype, device=V.device)
    return torch.eye(V.shape[-2], dtype=V.dtype, device=V.device) - product(U, solve_triangular(inverse, U.mT))


# -------------------------------------------------------------------------------------------------------- polar


class _Sylvester(torch.autograd.Function):
    """The skew ``K`` with ``H K + K H = C`` for symmetric positive definite ``H`` and skew ``C``."""

    @staticmethod
    def forward(H: Tensor, C: Tensor, V: Tensor | None, sigma: Tensor | None, steps: int, ratio: float) -> Tensor:
        with _exact(C):
            if V is None or sigma is None:
                found = _conjugate_gradients if sylvester_steps(ratio, C.dtype) <= 5 * steps else _sign_iteration
                return found(H, C, steps, ratio)
            sums = sigma.unsqueeze(-1) + sigma.unsqueeze(-2)
            dead = sums <= 10 * torch.finfo(C.dtype).eps * sigma.amax(-1, keepdim=True).unsqueeze(-1)
            K = (V.mT @ C @ V).masked_fill(dead, 0) / sums.masked_fill(dead, 1)
            return V @ K @ V.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        H, _, V, sigma, ctx.steps, ctx.ratio = inputs
        ctx.save_for_backward(H, V, sigma, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, None, None, None, None]:
        H, V, sigma, K = ctx.saved_tensors
        G = grads[0]
        d_C = _Sylvester.apply(H, (G - G.mT) / 2, V, sigma, ctx.steps, ctx.ratio)
        if not ctx.needs_input_grad[0]:
            return None, d_C, None, None, None, None
        L = product(d_C, K)  # both skew, so that K d_C is its transpose
        return L + L.mT, d_C, None, None, None, None


def _conjugate_gradients(H: Tensor, C: Tensor, steps: int, ratio: float) -> Tensor:
    """``H K + K H = C`` by conjugate gradients, one product a step: both terms are the same but for a transpose."""
    C, size = _unit(C)

    def quotient(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(b > 0, a / torch.where(b > 0, b, 1), 0)

    K, residual, direction, squared = torch.zeros_like(C), C, C, _squared(C)
    for _ in range(sylvester_steps(ratio, C.dtype)):
        half = H @ direction
        image = half - half.mT
        step = quotient(squared, (direction * image).sum((-2, -1), keepdim=True))
        K, residual = K + step * direction, residual - step * image
        before, squared = squared, _squared(residual)
        direction = residual + quotient(squared, before) * direction
    return K * size


def _sign_iteration(H: Tensor, C: Tensor, steps: int, ratio: float) -> Tensor:
    """``H K + K H = C`` by the sign of ``[[H, C], [0, -H]]``, which is ``[[I, 2K], [0, -I]]``: five products a step."""
    size = spectral_norm(H)
    A, B = H / size, C
    for c in cubic_scales(steps, 1 / ratio, ABOVE):
        A, B = c * A, c * B
        square, mixed = A @ A, A @ B
        B = 1.5 * B - 0.5 * (A @ (mixed + mixed.mT) + B @ square)
        A = 1.5 * A - 0.5 * A @ square
    return B / (2 * size)


class _Polar(torch.autograd.Function):
    """Nearest orthogonal matrix; the second and third result are V and the singular values, where they are known."""

    @staticmethod
    def forward(P: Tensor, method: str, steps: int, scale: str) -> tuple[Tensor, Tensor, Tensor]:
        with _exact(P):
            if method == "svd":
                usable, finite = _finite(P)
                left, sigma, right = torch.linalg.svd(usable)
                return torch.where(finite, polished(left @ right), math.nan), right.mT, sigma
            none = P.new_empty(0)
            found = _newton_polar(P, steps) if method == "newton" else _newton_schulz(P, steps, scale)
            return found, none.clone(), none

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        P, ctx.method, ctx.steps, ctx.scale = inputs
        ctx.save_for_backward(P, *output)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        P, R, V, sigma = ctx.saved_tensors
        A = product(R.mT, grads[0])
        H, size = _unit(product(R.mT, P))
        H = (H + H.mT) / 2
        if ctx.method == "svd":
            sigma = sigma / size[..., 0]
        elif ctx.method == "newton":
            with _exact(P):
                sigma, V = torch.linalg.eigh(_finite(H.detach())[0])
                sigma = sigma.clamp(min=0)
        else:
            V = sigma = None
        ratio = _NEAR[1] / _NEAR[0] if ctx.scale == "none" else reach(ctx.steps, P.dtype)
        K = _Sylvester.apply(H, A - A.mT, V, sigma, ctx.steps, ratio)
        return product(R, K) / size, None, None, None


def _finite(M: Tensor) -> tuple[Tensor, Tensor]:
    """The identity in the place of matrices that a decomposition would stop at; which are not among them."""
    finite = M.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    return torch.where(finite, M, eye(M)), finite


def _newton_polar(P: Tensor, steps: int) -> Tensor:
    """Newton's iteration ``X <- (c X + (c X)^-T) / 2`` with the scale c that balances both terms."""
    tiny = torch.finfo(P.dtype).tiny
    X, _ = _unit(P)
    X = X / _squared(X).sqrt().clamp(min=tiny)
    for _ in range(steps):
        inverse, _ = torch.linalg.inv_ex(X)
        # A singular matrix stays as it is: finite and, as its error says, not orthogonal.
        usable = inverse.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
        inverse = torch.where(usable, inverse, X.mT)
        c = (_squared(inverse) / _squared(X).clamp(min=tiny)) ** 0.25
        X = torch.where(usable, (c * X + inverse.mT / c) / 2, X)
    return polished(X)


ABOVE = 1.5
"""How much larger than its estimate a largest singular value may be, for Newton-Schulz steps."""
_NEAR = (0.5, 1.5)
"""Range of the singular values that are taken as they are."""


def _newton_schulz(P: Tensor, steps: int, scale: str, more: int = 0) -> Tensor:
    """Cubic steps, each scaled by what is known of the range of the singular values, and ``more`` at the end."""
    if scale == "none":
        X, (low, high) = P, _NEAR
    else:
        X, _ = _unit(P)
        size = spectral_norm(X) if scale == "spectral" else _squared(X).sqrt()
        X = X / size.clamp(min=torch.finfo(P.dtype).tiny)
        low, high = 1 / reach(steps, P.dtype), ABOVE if scale == "spectral" else 1.0
    for c in cubic_scales(steps + more, low, high):
        X = polished(X, "ieee", c)
    return X


def cubic_scales(steps: int, low: float, high: float) -> list[float]:
    r"""Factors c of cubic Newton-Schulz steps :math:`X \leftarrow \tfrac32 cX - \tfrac12 c^3 XX^TX`.

    With singular values in [low, high], :math:`c = \sqrt{3 / (low^2 + low\,high + high^2)}` takes both ends to the
    same value, the next ``low``, and none beyond 1, the next ``high`` (Chen and Chow, "A stable scaling of
    Newton-Schulz", 2014). No value is taken below a tenth, where its digits would be lost.

    Example:
        >>> [round(c, 3) for c in cubic_scales(4, 0.5, 1.5)]
        [0.961, 1.193, 1.031, 1.001]
    """
    found = []
    for _ in range(steps):
        c = min(math.sqrt(3 / (low**2 + low * high + high**2)), 1.7 / high)
        found.append(c)
        low, high = min(x * (3 - x * x) / 2 for x in (c * low, c * high)), 1.0
    return found


def reach(steps: int, dtype: torch.dtype) -> float:
    """Ratio of singular values for which so many Newton-Schulz steps suffice, to an error of 1e-6 in float32.

    In float64 it is to one of 1e-12, for which one of the steps is.

    Example:
        >>> reach(5, torch.float32), reach(6, torch.float64)
        (4.0, 4.0)
    """
    return 4.0 * 2.52 ** max(steps - 5 - (dtype == torch.float64), -1)


def sylvester_steps(ratio: float, dtype: torch.dtype) -> int:
    r"""Conjugate gradient steps of a polar backward pass, for singular values in this ratio.

    To an error of 1e-6 in float32 and of 1e-12 in float64. A step divides it by
    :math:`(\sqrt{ratio} + 1) / (\sqrt{ratio} - 1)`.

    Example:
        >>> sylvester_steps(3.0, torch.float32), sylvester_steps(10.0, torch.float32)
        (12, 23)
    """
    root = math.sqrt(ratio)
    return math.ceil(math.log(2e12 if dtype == torch.float64 else 2e6) / math.log((root + 1) / (root - 1)))


def polar(P: Tensor, method: str = "svd", steps: int = 10, scale: str = "spectral") -> Tensor:
    r"""Orthogonal factor :math:`R` of :math:`P = RH` with symmetric positive semidefinite :math:`H`.

    The backward pass is :math:`R K` with :math:`HK + KH = A - A^T`, :math:`A = R^TG`, which only has sums of singular
    values in its denominators; pairs whose sum is 0 pass no gradient.

    Args:
        P: Square matrices.
        method: ``"svd"``, ``"newton"`` (inverses) or ``"newton-schulz"`` (products only, also in the backward pass).
        steps: Of the iteration.
        scale: Of the start of Newton-Schulz: by the estimated largest singular value (``"spectral"``), by the norm
            (``"frobenius"``), or ``"none"``.

    Example:
        >>> polar(2 * torch.eye(2))
        tensor([[1., 0.],
                [0., 1.]])
    """
    if transformed():
        # Its iterations are differentiable as they are; a singular value decomposition is not where two are equal.
        # Their derivatives converge a little later.
        return _newton_schulz(P, steps, scale, 2) if method == "newton-schulz" else _newton_polar(P, max(steps, 12))
    return _Polar.apply(P, method, steps, scale)[0]


# -------------------------------------------------------------------------------------------- exponential, Givens

TAYLOR = {torch.float32: (12, 1.6), torch.float64: (16, 0.8)}
"""Degree of the Taylor polynomial by type, and the spectral norm up to which its error is below one rounding."""


def exponential(W: Tensor, max_norm: float) -> Tensor:
    r"""Exponential of normal matrices whose spectral norm is at most ``max_norm``: a Taylor polynomial and squarings.

    Five products (float32) or six (float64) and :math:`\lceil\log_2(\mathrm{max\_norm} / 1.6)\rceil` squarings; two
    products for each in the backward pass.

    Example:
        >>> exponential(torch.tensor([[0.0, 1.0], [-1.0, 0.0]]), 4.0)
        tensor([[ 0.5403,  0.8415],
                [-0.8415,  0.5403]])
    """
    degree, reach = TAYLOR[W.dtype]
    squarings = max(0, math.ceil(math.log2(max(max_norm, 1e-9) / reach)))
    return torch.linalg.matrix_exp(W) if transformed() else _Exponential.apply(W, degree, squarings)


def _exponential(W: Tensor, degree: int, squarings: int) -> Tensor:
    """The same as a chain of products that autograd sees."""
    R = polynomial(W * 0.5**squarings, [1 / math.factorial(k) for k in range(degree + 1)])
    for _ in range(squarings):
        R = product(R, R)
    return R


class _Exponential(torch.autograd.Function):
    """Paterson and Stockmeyer's polynomial, squarings, and both backwards; what rounding did to R is taken off it."""

    @staticmethod
    def forward(ctx: Any, W: Tensor, degree: int, squarings: int) -> Tensor:
        width = round(math.sqrt(degree))
        coefficients = [1 / math.factorial(k) for k in range(degree + 1)]
        starts = list(range(0, (degree - 1) // width * width + 1, width))
        identity = eye(W)
        parts: list[Tensor] = []
        with _exact(W):
            powers = [W.reshape(-1, *W.shape[-2:]) * 0.5**squarings]
            while len(powers) < width:
                powers.append(powers[(len(powers) - 1) // 2] @ powers[len(powers) // 2])
            for start in reversed(starts):
                last = degree if start == starts[-1] else start + width - 1
                block = coefficients[start] * identity
                for k in range(start + 1, last + 1):
                    block = torch.add(block, powers[k - start - 1], alpha=coefficients[k])
                parts.append(torch.baddbmm(block, parts[-1], powers[-1]) if parts else block)
            chain = [parts.pop()]
            for squaring in range(squarings):
                square = chain[-1] @ chain[-1]
                # Each doubles the error of the one before.
                chain.append(polished(square) if squaring % 8 == 7 else square)
            R = polished(chain.pop())
        ctx.save_for_backward(W, *powers, *parts, *chain)
        ctx.degree, ctx.squarings = degree, squarings
        return R.view(W.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        W, *saved = ctx.saved_tensors
        degree, squarings = ctx.degree, ctx.squarings
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # a derivative of this one is wanted
            W = W.view_as(W)
            found = torch.autograd.grad(_exponential(W, degree, squarings), W, grads[0], create_graph=True)
            return found[0], None, None
        width = round(math.sqrt(degree))
        starts = list(range(0, (degree - 1) // width * width + 1, width))
        powers, parts, chain = saved[:width], saved[width : len(saved) - squarings], saved[len(saved) - squarings :]
        slopes: list[Any] = [0.0] * width
        with _exact(W):
            G = grads[0].reshape(-1, *W.shape[-2:])
            for X in reversed(chain):
                G = torch.baddbmm(G @ X.mT, X.mT, G)
            for start, part in zip(starts, [*reversed(parts), None], strict=True):
                last = degree if part is None else start + width - 1
                for k in range(start + 1, last + 1):
                    slopes[k - start - 1] = slopes[k - start - 1] + G / math.factorial(k)
                if part is not None:
                    slopes[-1] = slopes[-1] + part.mT @ G
                    G = G @ powers[-1].mT
            for k in range(width - 1, 0, -1):  # each power is the product of those of its halves
                left, right = (k - 1) // 2, k // 2
                slopes[left] = slopes[left] + slopes[k] @ powers[right].mT
                slopes[right] = slopes[right] + powers[left].mT @ slopes[k]
        return (slopes[0] * 0.5**squarings).view(W.shape), None, None


class _Givens(torch.autograd.Function):
    """Product of the rotations of all pairs of axes, in 2 d - 3 stages of disjoint rotations.

    Pairs (i, j) of one sum i + j are disjoint, and two pairs that share an axis are in the lexicographic order of their
    sums. A stage is ``R <- R * cosines + R[:, partner] * sines``.
    """

    @staticmethod
    def forward(angles: Tensor) -> Tensor:
        return _turned(angles)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        # With A = R_t^T G_t after stage t, the slope of the angle of (i, j) is A_ji - A_ij, and A before the stage is
        # B A B^T.
        angles, R = ctx.saved_tensors
        A = product(R.mT, grads[0])
        A = A - A.mT
        slopes = torch.zeros_like(A)
        index = torch.arange(A.shape[-1], device=A.device)
        for cosines, sines, partner in reversed(_stages(angles)):
            here = (index.unsqueeze(-1) < index) & (partner.unsqueeze(-1) == index)
            slopes = torch.where(here, -A, slopes)
            A = _rotate(_rotate(A, cosines, -sines, partner).mT, cosines, -sines, partner).mT
        return slopes


def _stages(angles: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Cosines, signed sines and partners of all axes for each stage; an axis without a partner is its own."""
    d = angles.shape[-1]
    axis = torch.arange(d, device=angles.device)
    other = 1 + torch.arange(max(2 * d - 3, 0), device=angles.device).unsqueeze(-1) - axis
    paired = (other >= 0) & (other < d) & (other != axis)
    partner = torch.where(paired, other, axis)
    angle = torch.where(paired, angles[..., torch.minimum(axis, partner), torch.maximum(axis, partner)], 0)
    cosines, sines = angle.cos(), angle.sin() * torch.where(axis < partner, 1, -1)
    return list(zip(cosines.unbind(-2), sines.unbind(-2), partner.unbind(0), strict=True))


def _turned(angles: Tensor) -> Tensor:
    """The identity, turned stage by stage."""
    R = eye(angles).expand_as(angles)
    for cosines, sines, partner in _stages(angles):
        R = _rotate(R, cosines, sines, partner)
    return R.clone() if R.shape[-1] == 1 else R


def _rotate(R: Tensor, cosines: Tensor, sines: Tensor, partner: Tensor) -> Tensor:
    return R * cosines.unsqueeze(-2) + R[..., partner] * sines.unsqueeze(-2)


def givens(angles: Tensor) -> Tensor:
    r"""Product :math:`\prod_{i<j} G(i, j, \theta_{ij})` of plane rotations in lexicographic order.

    Args:
        angles: ``(..., d, d)``, of which the strict upper triangle is read.

    Example:
        >>> givens(torch.tensor([[0.0, math.pi / 6], [0.0, 0.0]]))
        tensor([[ 0.8660, -0.5000],
                [ 0.5000,  0.8660]])
    """
    return _Givens.forward(angles) if transformed() else _Givens.apply(angles)
