"""Optimisation on orthogonal matrices: the Cayley retraction, and a gradient descent that keeps them orthogonal."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.geometry import exact_products, full_precision, in_float64
from hypersphere.neurons import is_sharded
from hypersphere.nn.sharding import gathered, local
from hypersphere.orthogonal.algebra import frobenius, polished
from hypersphere.orthogonal.maps import orthogonality_error

FORMS = ("sgd", "adam", "adamw")
RETRACTIONS = ("fixed-point", "exact")
STACK = 1536
"""Matrices up to this size take their step in one batch; larger ones fill a device one by one and need less memory."""
START = 0.5
"""A matrix with a larger error than this (or the bound) was never orthogonal; less may be drift in a resumed run."""


def cayley_step(
    U: Tensor,
    F: Tensor,
    lr: float | Tensor,
    *,
    retraction: str = "exact",
    iterations: int = 2,
    cap: float | None = None,
) -> Tensor:
    r"""One step of gradient descent along a curve of orthogonal matrices.

    .. math::
        \hat W = -F U^T + \tfrac12 U U^T F U^T, \qquad W = \hat W - \hat W^T, \qquad
        U' = (I - \tfrac a2 W)^{-1} (I + \tfrac a2 W)\, U

    The loss begins to fall with the slope :math:`-\lVert W \rVert_F^2`. The fixed-point iteration
    :math:`Y \leftarrow U + \tfrac a2 W (U + Y)` from :math:`Y = U + a W U` needs products alone; T iterations are
    :math:`O(a^{2+T})` away from the exact step, and from orthogonality.

    Args:
        U: Orthogonal matrices, ``(..., d, d)``, in float32 or float64.
        F: Gradients of the loss by ``U``, of the same shape.
        lr: Step size a, a number or a tensor without dimensions.
        retraction: ``"exact"``, to the precision of the type (in float32 up to ``a * ||W||`` of 1,000), or
            ``"fixed-point"``.
        iterations: Number T of fixed-point iterations.
        cap: Largest ``a * ||W||_F`` of a step, in radians about the largest rotation angle; a is lowered to it.
            ``None``: no limit. The fixed-point iteration needs one, below 2.

    Returns:
        The next matrices, ``(..., d, d)``.

    Example:
        >>> cayley_step(torch.eye(2), torch.tensor([[0.0, 2.0], [0.0, 0.0]]), 1.0)
        tensor([[ 0.6000, -0.8000],
                [ 0.8000,  0.6000]])
    """
    _check_orthogonal_parameter("U", U)
    if F.shape != U.shape:
        raise ArgumentError("F", f"must have the shape of U, {tuple(U.shape)}, got {tuple(F.shape)}")
    _check_retraction(retraction, iterations, cap)
    with full_precision(U), exact_products():
        W = _skew(U, -F.to(U.dtype))
        return _retract(U, W, W @ U, lr, retraction, iterations, cap)


class OGD(Optimizer):
    r"""Gradient descent that keeps matrices orthogonal, and is ordinary SGD or Adam for all other parameters.

    Parameters R of groups with ``orthogonal=True`` rotate in steps of the Cayley retraction (:func:`cayley_step`), with
    the momentum M kept in the tangent space. With the gradient F at R, in the form ``"sgd"``:

    .. math::
        M \leftarrow \mu M - F, \quad \hat W = M R^T - \tfrac12 R R^T M R^T, \quad W = \hat W - \hat W^T, \quad
        M \leftarrow W R

    and then a step along W of size :math:`a = \min(lr, c / (\lVert W \rVert_F + 10^{-8}))`. In the form ``"adam"``
    the second moment is one number for each matrix, at step t

    .. math::
        M \leftarrow \beta_1 M - (1 - \beta_1) F, \quad v \leftarrow \beta_2 v + (1 - \beta_2) \lVert F \rVert_F^2,
        \quad r = (1 - \beta_1^t) (\sqrt{v / (1 - \beta_2^t)} + \epsilon)

    and the step goes along W / r, so that ``lr`` is about the angle by which the whole matrix rotates. Weight decay
    does not act on orthogonal matrices: it has no component along them. (Li et al., "Efficient Riemannian Optimization
    on the Stiefel Manifold via the Cayley Transform", 2020; Liu et al., "Orthogonal Over-Parameterized Training",
    2021.)

    Rounding and the fixed-point iteration let matrices drift: a step of length x along one plane, of two iterations,
    shrinks it by about :math:`x^4 / 8`, little at a low rate and much where steps reach the cap. Every ``check_every``
    steps those with :math:`\lVert R^T R - I \rVert_F / \sqrt d` above ``bound`` are made orthogonal again, with one
    warning, and counted in :attr:`corrections`. This check is all that waits for the device. It is left out of steps
    captured in a CUDA graph: call :meth:`orthogonalise` between replays.

    The state lives on the device, ``lr`` may be a tensor, and a ``GradScaler`` is followed without waiting for it.

    Parameters may be sharded (``fully_shard``): each process takes the steps of its own part, with a state of the same
    placement. Orthogonal ones have to be cut between matrices, as those of :func:`hypersphere.orthogonal.apply` are.

    Args:
        params: Parameters or groups of them. Every option below can be set by group.
        lr: Learning rate.
        momentum: Momentum, in the form ``"sgd"``.
        weight_decay: Weight decay of ordinary parameters.
        nesterov: Nesterov momentum of ordinary parameters.
        orthogonal: Parameters are orthogonal matrices ``(..., d, d)`` in float32 or float64, and stay so.
        form: ``"sgd"``, ``"adam"``, or ``"adamw"``, which differs in the weight decay of ordinary parameters alone.
        betas: Decay rates of the moments in the form ``"adam"``.
        eps: Added to the root of the second moment.
        retraction: ``"fixed-point"`` or ``"exact"``.
        iterations: Number of fixed-point iterations.
        cap: Largest step c, or ``None``.
        bound: Largest drift that is left alone.
        check_every: Steps between two checks; 0: only :meth:`orthogonalise` checks.

    Example:
        >>> R, bias = torch.nn.Parameter(torch.eye(3)), torch.nn.Parameter(torch.zeros(3))
        >>> optimiser = OGD([{"params": [R], "orthogonal": True, "lr": 0.5}, {"params": [bias]}], lr=0.1)
        >>> (torch.ones(3) @ R + bias)[0].backward()
        >>> optimiser.step()
        >>> bool((R.T @ R - torch.eye(3)).norm() < 0.05), bias[0].item()
        (True, -0.10000000149011612)
    """

    _step_supports_amp_scaling = True  # a GradScaler then sets grad_scale and found_inf, and does not wait

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.02,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        orthogonal: bool = False,
        form: str = "sgd",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        retraction: str = "fixed-point",
        iterations: int = 2,
        cap: float | None = 1.0,
        bound: float = 1e-4,
        check_every: int = 100,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in ("self", "params", "__class__")}
        # Capturable: that the number of steps taken is loaded onto the device, too. The last two are of the checks.
        super().__init__(params, {**options, "capturable": True, "unchecked": 0, "corrections": 0})

    @property
    def corrections(self) -> int:
        """How many matrices have been made orthogonal again so far."""
        return sum(group["corrections"] for group in self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose options are those of the optimiser where it has none of its own."""
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except ArgumentError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        due = []
        for group in self.param_groups:
            members = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse for p in members):
                raise ArgumentError("params", "must have dense gradients (RowSGD takes sparse ones)")
            if not members:
                continue
            if not group["orthogonal"]:
                self._update(members, group)
                continue
            self._rotate(members, group)
            if group["check_every"] and not (members[0].is_cuda and torch.cuda.is_current_stream_capturing()):
                group["unchecked"] += 1
                if group["unchecked"] >= group["check_every"]:
                    due.append(group)
        if due:
            self._orthogonalise(due)
        return loss

    def orthogonalise(self) -> int:
        """Make the matrices that have drifted beyond the bound orthogonal again; waits for the device.

        By a QR decomposition with a positive diagonal, which moves a matrix by about its drift.

        Returns:
            How many there were.
        """
        return self._orthogonalise([group for group in self.param_groups if group["orthogonal"]])

    @torch.no_grad()
    def _orthogonalise(self, groups: Sequence[dict[str, Any]]) -> int:
        members = [(group, p) for group in groups for p in group["params"]]
        found, largest, where = 0, 0.0, ""
        for (group, p), drifts in zip(members, _drifts([p for _, p in members]), strict=True):
            # Not above infinity: a matrix that is no longer finite is not for this method to hide.
            beyond = [drift for drift in drifts if group["bound"] < drift < float("inf")]
            if not beyond:
                continue
            own = local(p)
            Q, T = torch.linalg.qr(own)
            drift = orthogonality_error(own)[..., None, None]
            Q = torch.where(T.diagonal(dim1=-2, dim2=-1).unsqueeze(-2) < 0, -Q, Q)
            own.copy_(torch.where((drift > group["bound"]) & drift.isfinite(), Q, own))
            found += len(beyond)
            group["corrections"] += len(beyond)
            if max(beyond) > largest:
                largest = max(beyond)
                where = f"parameter {_place(p, group['params'])} of group {_place(group, self.param_groups)}"
                where += f", shape {tuple(p.shape)}"
        for group in groups:
            group["unchecked"] = 0
        if found:
            warnings.warn(
                f"{found} orthogonal {'matrix' if found == 1 else 'matrices'} had drifted by up to {largest:.2g} "
                f"({where}) and {'was' if found == 1 else 'were'} made orthogonal again; "
                "a lower lr, more iterations or retraction='exact' drift less",
                stacklevel=2,
            )
        return found

    def _update(self, members: list[Tensor], group: dict[str, Any]) -> None:
        """A step of ordinary parameters, by torch's own fused kernels."""
        states = [self._prepared(p, group) for p in members]
        gradients, members = [_gradient(p) for p in members], [local(p) for p in members]
        options = {name: group[name] for name in ("lr", "weight_decay")} | {"fused": True, "maximize": False}
        options |= {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        if group["form"] == "sgd":
            buffers = [state.get("momentum_buffer") for state in states]
            options |= {name: group[name] for name in ("momentum", "nesterov")}
            sgd(members, gradients, buffers, dampening=0.0, **options)
        else:
            averages, squares, steps = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))
            beta1, beta2 = group["betas"]
            options |= {"beta1": beta1, "beta2": beta2, "eps": group["eps"], "amsgrad": False}
            options["decoupled_weight_decay"] = group["form"] == "adamw"
            adam(members, gradients, averages, squares, [], steps, **options)

    def _rotate(self, members: list[Tensor], group: dict[str, Any]) -> None:
        """A step of orthogonal parameters, those of one size together."""
        batches = defaultdict(list)
        for p in members:
            key = p.device, p.dtype, p.shape[-1], None if p.shape[-1] <= STACK else p
            batches[key].append((local(p), _gradient(p), self._prepared(p, group)))
        for batch in batches.values():
            with full_precision(batch[0][0]), exact_products():
                self._turn_batch(batch, group)

    def _turn_batch(self, members: list[tuple[Tensor, Tensor, dict[str, Tensor]]], group: dict[str, Any]) -> None:
        batch, gradients, states = (list(column) for column in zip(*members, strict=True))
        U, F = _joined(batch), _joined(gradients)
        scale = getattr(self, "grad_scale", None)
        F = F if scale is None else F / scale
        if group["form"] != "sgd":
            W, motion = self._adam_direction(U, F, states, group["betas"], group["eps"])
        else:
            buffers = [state["momentum_buffer"] for state in states if group["momentum"]]
            W = _skew(U, group["momentum"] * _joined(buffers) - F if buffers else -F)
            motion = W @ U
            self._write(buffers, motion)
        self._write(batch, _retract(U, W, motion, *(group[k] for k in ("lr", "retraction", "iterations", "cap"))))

    def _adam_direction(
        self, U: Tensor, F: Tensor, states: list[dict[str, Tensor]], betas: tuple[float, float], eps: float
    ) -> tuple[Tensor, Tensor]:
        """W and W U; the moments move on."""
        averages, norms, steps = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_norm", "step"))
        torch._foreach_add_(steps, 1.0 if self._found_inf is None else (self._found_inf == 0).float())
        t = torch.cat([step.expand(n.numel()) for step, n in zip(steps, norms, strict=True)]).to(U.dtype)
        # The root of the second moment, since float32 holds no square of a norm beyond 1e19.
        before = in_float64(torch.cat([n.flatten() for n in norms]))
        now = torch.linalg.vector_norm(F, dim=(-2, -1), dtype=before.dtype)
        norm = torch.hypot(math.sqrt(betas[1]) * before, math.sqrt(1 - betas[1]) * now).to(U.dtype)
        scale = ((1 - betas[0] ** t) * (norm / (1 - betas[1] ** t).sqrt() + eps))[:, None, None]
        W = _skew(U, torch.lerp(_joined(averages), -F, 1 - betas[0])) / scale
        motion = W @ U
        self._write(norms, norm)
        self._write(averages, scale * motion)
        return W, motion

    @property
    def _found_inf(self) -> Tensor | None:
        """Above 0 where a GradScaler found a gradient that is not finite: the step must change nothing."""
        return getattr(self, "found_inf", None)

    def _write(self, targets: list[Tensor], values: Tensor) -> None:
        """Spread values over the tensors that they were joined from."""
        if not targets:
            return
        size = values.shape[1:].numel()
        pieces = values.split([t.numel() // size for t in targets])
        shaped = [piece.view(t.shape) for piece, t in zip(pieces, targets, strict=True)]
        if self._found_inf is not None:
            shaped = [torch.where(self._found_inf == 0, new, old) for new, old in zip(shaped, targets, strict=True)]
        torch._foreach_copy_(targets, shaped)

    def _prepared(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of a parameter, zero before its first step; the own part of it."""
        state: dict[str, Tensor] = self.state[p]
        if group["form"] == "sgd":
            if group["momentum"] and "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p)
        elif "step" not in state:
            state["step"] = torch.zeros((), device=p.device)
            state["exp_avg"] = torch.zeros_like(p)
            if group["orthogonal"]:
                state["exp_avg_norm"] = torch.zeros_like(p.detach()[..., 0, 0])
            else:
                state["exp_avg_sq"] = torch.zeros_like(p)
        elif group["orthogonal"] and "exp_avg_sq" in state:  # as version 0.1 saved it
            state["exp_avg_norm"] = state.pop("exp_avg_sq").sqrt()
        return {name: local(value) for name, value in state.items()}


def _skew(U: Tensor, M: Tensor) -> Tensor:
    """The skew-symmetric W whose ``W U`` is the direction M without what would leave the orthogonal matrices."""
    A = M @ U.mT
    A = A - 0.5 * (U @ (U.mT @ A))
    return A - A.mT


def _retract(
    U: Tensor, W: Tensor, motion: Tensor, lr: float | Tensor, retraction: str, iterations: int, cap: float | None
) -> Tensor:
    """A step from U along W; ``motion`` is ``W U``."""
    if cap is not None:
        lr = (cap / (frobenius(W) + 1e-8)).clamp(max=lr)
    if retraction == "exact":
        # (I - K)^-1 (I + K) U = U + (I - K)^-1 2 K U rounds what is added alone: no drift in float32. |K|_2 is at most
        # |K|_F / sqrt(2), the singular values of a skew matrix being pairs.
        U = U + _solve(0.5 * lr * W, lr * motion, math.inf if cap is None else cap / math.sqrt(8))
        # A long step costs the solve digits.
        return U if cap is not None else torch.where(frobenius(lr * W) > 1, polished(U), U)
    Y = U + lr * motion
    for _ in range(iterations):
        Y = U + 0.5 * lr * (W @ (U + Y))
    return Y


def _solve(K: Tensor, B: Tensor, norm: float) -> Tensor:
    """``(I - K)^-1 B`` for a K of a spectral norm of at most ``norm``, to the precision of the type."""
    if norm < 0.9:
        # (I + K) (I + K^2) (I + K^4) ... converges at once, and is many times faster than a decomposition.
        for power in range(max(1, math.ceil(math.log2(math.log(torch.finfo(B.dtype).eps) / math.log(norm))))):
            K = K @ K if power else K
            B = B + K @ B
        return B
    A = torch.eye(B.shape[-1], dtype=B.dtype, device=B.device) - K
    if A.is_cuda and A.dim() > 2:
        # One by one: there is no decomposition of a batch that a CUDA graph can hold, nor one that is faster.
        pairs = zip(A.flatten(0, -3), B.flatten(0, -3), strict=True)
        return torch.stack([torch.linalg.solve_ex(a, b).result for a, b in pairs]).view_as(B)
    return torch.linalg.solve_ex(A, B).result


def _gradient(p: Tensor) -> Tensor:
    """The gradient of the part of a parameter that this process holds."""
    gradient: Any = p.grad
    if is_sharded(gradient):
        sharded: Any = p
        gradient = gradient.redistribute(sharded.device_mesh, sharded.placements)
    return local(gradient)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """All matrices as one batch ``(count, d, d)``."""
    flat = [t.reshape(-1, *t.shape[-2:]) for t in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _place(item: object, items: Sequence[object]) -> int:
    """Index of the very same object; tensors, and what holds them, cannot be compared."""
    return next(index for index, other in enumerate(items) if other is item)


def _drifts(parameters: Sequence[Tensor]) -> list[list[float]]:
    """Orthogonality errors of the matrices in each parameter, waiting for the device once."""
    if not parameters:
        return []
    # All processes look at all matrices, so that they raise, warn and count alike.
    errors = [gathered(orthogonality_error(local(p)), p).flatten() for p in parameters]
    found = torch.cat([error.to(errors[0]) for error in errors])
    return [piece.tolist() for piece in found.cpu().split([len(error) for error in errors])]


def _check_orthogonal_parameter(name: str, p: Tensor) -> None:
    if p.dim() < 2 or p.shape[-1] != p.shape[-2]:
        raise ArgumentError(name, f"must hold square matrices (..., d, d) to be orthogonal, got {tuple(p.shape)}")
    if p.dtype not in (torch.float32, torch.float64):
        raise ArgumentError(name, f"must be float32 or float64, in which a matrix can stay orthogonal, got {p.dtype}")
    sharded: Any = p
    placements = zip(sharded.placements, sharded.device_mesh.shape, strict=True) if is_sharded(p) else ()
    cut = [f"Shard({placement.dim})" for placement, size in placements if size > 1 and placement.is_shard()]
    if any(f"Shard({axis})" in cut for axis in (p.dim() - 2, p.dim() - 1)):
        how = "sharded along an axis before these, or left out of fully_shard() (ignored_params)"
        raise ArgumentError(name, f"must hold matrices (..., d, d) that are {how}, got {cut[0]} of {tuple(p.shape)}")


def _check_retraction(retraction: str, iterations: int, cap: float | None) -> None:
    check_choice("retraction", retraction, RETRACTIONS)
    check_range("iterations", iterations, 0)
    if cap is not None:
        check_range("cap", cap, 0, open_low=True)


def _check_group(group: dict[str, Any]) -> None:
    """Raise an error where options of a group are bad, or its matrices not orthogonal."""
    check_choice("form", group["form"], FORMS)
    _check_retraction(group["retraction"], group["iterations"], group["cap"])
    check_range("lr", float(group["lr"]), 0)
    for name in ("momentum", "weight_decay", "eps", "bound", "check_every"):
        check_range(name, group[name], 0)
    if group["nesterov"] and not group["momentum"]:
        raise ArgumentError("nesterov", "needs momentum above 0")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ArgumentError("betas", f"must be at least 0 and below 1, got {group['betas']}")
    if group["orthogonal"]:
        for p in group["params"]:
            _check_orthogonal_parameter("params", p)
        present = [p for p in group["params"] if not p.is_meta]
        for p, drifts in zip(present, _drifts(present), strict=True):
            if not all(drift <= max(START, group["bound"]) for drift in drifts):
                message = f"must be orthogonal to begin with, got errors up to {max(drifts):.2g} in {tuple(p.shape)}"
                raise ArgumentError("params", message)
