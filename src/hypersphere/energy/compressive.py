r"""Compressive hyperspherical energy: the energy of neurons brought to few dimensions.

In many dimensions nearly all directions are nearly orthogonal, and the energy hardly changes. The compressive energy is
that of projected directions,

.. math:: E(W) = \frac{1}{n(n-1)} \sum_{i \ne j} f_s(\|g(w_i) - g(w_j)\|), \qquad g(w) = P w / \|P w\|,

and its variants differ in where P comes from: at random, such that it keeps angles, against the neurons, from groups of
coordinates. A layer of few inputs is not projected, nor is the output layer, whose energy is that of full space. All
layers of a model are computed together: those of equal fan-in in one product with all projections, and then all pairs
of all projections in few batches.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypersphere.energy.base import Regulariser, batches, energies, gather
from hypersphere.energy.chords import smooth_directions
from hypersphere.energy.layers import Neurons, Selection
from hypersphere.energy.pairs import pair_counts, pair_sums
from hypersphere.energy.potentials import Riesz
from hypersphere.energy.projections import ProjectionBank, uncompiled
from hypersphere.errors import ArgumentError, check_choice, check_range, check_step
from hypersphere.geometry import at_least_float32, full_precision, safe_sqrt, transformed
from hypersphere.neurons import whole

Target: TypeAlias = Tensor | nn.Module | Selection

START_RATE = 0.1
"""Rate of the steps of a projection before anybody said what the learning rate is."""
GROWTH = 10.0
"""An adversary that raised its energy that many times found a pair of neurons that it can make meet."""


def project(vectors: Tensor, projections: Tensor) -> Tensor:
    """Images of vectors under several projections, in one product.

    Args:
        vectors: ``(b, n, d)``.
        projections: ``(u, m, k, d)``: m projections, for each u-th part of the batch its own.

    Returns:
        ``(b, m, n, k)``.

    Example:
        >>> project(torch.ones(1, 2, 3), torch.ones(1, 5, 4, 3)).shape
        torch.Size([1, 5, 2, 4])
    """
    (b, n, d), (u, m, k, _) = vectors.shape, projections.shape
    flat = projections.reshape(u, m * k, d)
    images = vectors @ flat[0].mT if u == 1 else vectors.reshape(u, -1, d) @ flat.mT
    return images.reshape(b, n, m, k).transpose(1, 2)


def compressive_energy(
    vectors: Tensor,
    projections: Tensor,
    s: float = 2.0,
    *,
    half_space: bool = True,
    angular: bool = False,
    eps: float = 0.0,
) -> Tensor:
    r"""Mean energy of projected vectors over ordered pairs.

    .. math:: E = \frac{1}{n(n-1)} \sum_{i \ne j} f_s\left(\left\|
        \frac{P w_i}{\|P w_i\|} - \frac{P w_j}{\|P w_j\|}\right\|\right)

    Args:
        vectors: ``(n, d)``, a vector a row; the gradient lies in the row space of P.
        projections: ``(k, d)``, or several ``(m, k, d)``; their scale does not matter.
        s: Riesz exponent; 0 is the logarithmic energy.
        half_space: Treat opposite directions as equal.
        angular: Take angles as distances, not chords.
        eps: Added under the root of the norms.

    Returns:
        ``()``, or ``(m,)``, in float32 or wider.

    Example:
        >>> compressive_energy(torch.eye(3), torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, 0.5]]), s=1)
        tensor(0.7813)
    """
    images = _images(vectors, projections)
    with full_precision(images):
        values = _mean_energy(images, Riesz(s, angular), half_space, eps)
    return values if projections.dim() == 3 else values.squeeze(0)


def preservation_loss(vectors: Tensor, projections: Tensor, kind: str = "frob", *, eps: float = 0.0) -> Tensor:
    r"""How far projections change the angles between vectors.

    Of the cosines :math:`c_{ij}` between vectors and :math:`c'_{ij}` between their images it is

    * ``"angle"``: :math:`\sum_{i \ne j} (\arccos c_{ij} - \arccos c'_{ij})^2`,
    * ``"cos"``: :math:`\sum_{i \ne j} (c_{ij} - c'_{ij})^2`,
    * ``"frob"``: :math:`\sqrt{\sum_{ij} (c_{ij} - c'_{ij})^2}`.

    Args:
        vectors: ``(n, d)``, a vector a row.
        projections: ``(k, d)``, or several ``(m, k, d)``; their scale does not matter.
        kind: One of the three.
        eps: Added under the root of the norms.

    Returns:
        ``()``, or ``(m,)``, in float32 or wider.

    Example:
        >>> preservation_loss(torch.eye(2), torch.tensor([[1.0, 1.0], [0.0, 2.0]]))
        tensor(0.6325)
    """
    vectors = whole(vectors)
    images = _images(vectors, projections)
    with full_precision(images):
        losses = _preservation(at_least_float32(vectors).unsqueeze(0), images.unsqueeze(0), kind, eps).squeeze(0)
    return losses if projections.dim() == 3 else losses.squeeze(0)


def _images(vectors: Tensor, projections: Tensor) -> Tensor:
    """Images ``(m, n, k)`` of a matrix of vectors, in float32 or wider."""
    vectors = at_least_float32(whole(vectors))
    if vectors.dim() != 2:
        raise ArgumentError("vectors", f"must have shape (n, d), got {tuple(vectors.shape)}")
    if projections.dim() not in (2, 3) or projections.shape[-1] != vectors.shape[-1]:
        shape = f"(k, {vectors.shape[-1]}) or (m, k, {vectors.shape[-1]})"
        raise ArgumentError("projections", f"must have shape {shape}, got {tuple(projections.shape)}")
    matrices = projections.to(vectors.dtype).reshape(1, -1, *projections.shape[-2:])
    with full_precision(vectors):
        return project(vectors.unsqueeze(0), matrices).squeeze(0)


def _mean_energy(vectors: Tensor, potential: Riesz, half_space: bool, eps: float) -> Tensor:
    """Mean energies ``(b,)`` of ``(b, n, d)``."""
    return pair_sums(vectors, potential, half_space=half_space, eps=eps) / pair_counts(vectors, half_space)


def _cosines(vectors: Tensor, eps: float) -> Tensor:
    """Cosines ``(..., n, n)`` of the rows ``(..., n, d)``, twice differentiable; 0 for zero rows."""
    units = smooth_directions(vectors, eps)
    return units @ units.mT


def _preservation(vectors: Tensor, images: Tensor, kind: str, eps: float) -> Tensor:
    """Losses ``(b, m)`` of vectors ``(b, n, d)`` and images ``(b, m, n, k)``."""
    check_choice("kind", kind, ("frob", "cos", "angle"))
    before, after = _cosines(vectors, eps).unsqueeze(1), _cosines(images, eps)
    if kind == "frob":
        return safe_sqrt((before - after).square().sum((-2, -1)))
    own = torch.eye(vectors.shape[1], dtype=torch.bool, device=vectors.device)
    # The slope of the arc cosine is infinite at 1, where the diagonal is.
    before, after = (values.masked_fill(own, 0.0) for values in (before, after))
    if kind == "angle":
        before, after = (values.clamp(-1 + 1e-7, 1 - 1e-7).acos() for values in (before, after))
    return (before - after).square().sum((-2, -1))


def descend(
    objective: Callable[[Tensor], Tensor],
    projections: Tensor,
    rate: Tensor | float,
    steps: int = 1,
    *,
    decay: float = 0.0,
    unroll: bool = False,
) -> Tensor:
    r"""Steps :math:`P \leftarrow P - \eta\,(\partial L / \partial P + \lambda P)` of projections.

    Args:
        objective: L, as a function of the projections: ``()``.
        projections: P.
        rate: :math:`\eta`.
        steps: How many.
        decay: :math:`\lambda`.
        unroll: Keep the steps differentiable by whatever the objective depends on.

    Returns:
        The moved projections, like P.

    Example:
        >>> descend(lambda P: P.square().sum(), torch.ones(2), rate=0.25, steps=2)
        tensor([0.2500, 0.2500])
    """
    if transformed():  # whose own gradients can be differentiated, by whatever is looked for
        for _ in range(steps):
            projections = projections - rate * (torch.func.grad(objective)(projections) + decay * projections)
        return projections if unroll else projections.detach()
    unroll = unroll and torch.is_grad_enabled()
    with torch.enable_grad():
        projections = projections.detach().requires_grad_()
        for _ in range(steps):
            (gradient,) = torch.autograd.grad(objective(projections), projections, create_graph=unroll)
            projections = projections - rate * (gradient + decay * projections)
            if not unroll:
                projections = projections.detach().requires_grad_()
    return projections if unroll else projections.detach()


@dataclasses.dataclass(frozen=True, eq=False)
class _Stack:
    """Layers that are compressed together: as many groups, as many inputs.

    Args:
        layers: The layers.
        matrices: Their neurons, each ``(groups, n, d)``.
    """

    layers: list[Neurons] = dataclasses.field(default_factory=list)
    matrices: list[Tensor] = dataclasses.field(default_factory=list)

    @property
    def d(self) -> int:
        """Inputs of a neuron."""
        return self.matrices[0].shape[2]

    @property
    def n(self) -> int:
        """Neurons of the largest layer."""
        return max(matrix.shape[1] for matrix in self.matrices)


class Compressive(Regulariser):
    r"""Energy of neurons after a map to fewer dimensions: what all compressive energies share.

    Called on a matrix ``(n, d)`` it gives that matrix' energy; called on a model,
    :math:`\lambda_h \sum_\text{hidden} E(g(W)) + \lambda_o E_\text{output}`, the output layer in full space and not
    mapped. A layer with one neuron has no energy. By itself this class takes any function as map; its subclasses bring
    theirs.

    Args:
        compress: The map g, of ``(b, n, d)`` to ``(b, n, k)``; its results are normalised. A module's parameters are
            found among those of this one.
        s: Riesz exponent, at least 0; 0 is the logarithmic energy.
        half_space: Treat opposite directions as equal.
        angular: Take angles as distances, not chords.
        eps: Added under the root of the norms.
        hidden_weight: Weight of every hidden layer of a model.
        output_weight: Weight of a model's output layer.

    Example:
        >>> Compressive(lambda vectors: vectors[..., :2].tanh(), s=1)(torch.eye(3)[:2])
        tensor(0.6381)
    """

    maps_vectors = True
    shared_options: ClassVar[tuple[str, ...]] = ("s", "half_space", "angular", "eps", "hidden_weight", "output_weight")
    later_options: ClassVar[Mapping[str, Any]] = {"angular": False, "eps": 0.0}
    contract: ClassVar[Mapping[str, Any]] = {
        "options": {"dim": 4, "s": 1.0},
        "rotation": False,
        "optimum": None,
        "model": False,
    }

    def __init__(
        self,
        compress: Callable[[Tensor], Tensor] | None = None,
        *,
        s: float = 2.0,
        half_space: bool = True,
        angular: bool = False,
        eps: float = 0.0,
        hidden_weight: float = 1.0,
        output_weight: float = 1.0,
    ) -> None:
        super().__init__(hidden_weight=hidden_weight, output_weight=output_weight)
        check_range("s", s, 0)
        check_range("eps", eps, 0)
        self.half_space, self.eps = half_space, eps
        self.potential = Riesz(s, angular)
        self.compress = compress

    @property
    def counts_lengths(self) -> bool:
        """Whether short vectors count less, or the map may tell vectors of different lengths apart."""
        return self.eps > 0 or self.compress is not None

    def energy(self, vectors: Tensor, role: str = "hidden") -> Tensor:
        """Energy of each matrix of a batch, as it is: ``(b, n, d)`` -> ``(b,)``."""
        return _mean_energy(vectors, self.potential, self.half_space and role == "hidden", self.eps)

    def objective(self, vectors: Tensor, power: float = math.inf) -> Tensor:
        """Energy of the images of each set of vectors, under what was drawn for a matrix."""
        ((_, values),) = self._values([Neurons("", lambda: vectors)])
        return values

    def forward(self, target: Target) -> Tensor:
        """Value of a matrix ``(n, d)``, or weighted sum over the layers of a model: ``()``."""
        if isinstance(target, Tensor):
            ((_, values),) = self._values(list(self._layers(target)))
            return values.squeeze(0)
        return super().forward(target)

    def _layers(self, target: Target) -> Selection:
        if isinstance(target, Tensor):
            if target.dim() != 2:
                raise ArgumentError("target", f"must have shape (n, d), got {tuple(target.shape)}")
            return Selection([Neurons("", lambda: whole(target).unsqueeze(0))])
        return self.select(target)

    def _stack_key(self, layer: Neurons, n: int, d: int) -> tuple[Any, ...] | None:
        """What layers have in common that are compressed together, beside groups and inputs; ``None``: not at all."""
        return ()

    def _stacks(self, layers: Sequence[Neurons]) -> tuple[list[_Stack], list[_Stack]]:
        """The layers that are taken as they are, one by one, and those that are compressed."""
        plain: list[_Stack] = []
        stacks: dict[tuple[Any, ...], _Stack] = {}
        for layer in layers:
            matrices = at_least_float32(layer.matrices())
            groups, n, d = matrices.shape
            key = None if layer.role == "output" or n < 2 else self._stack_key(layer, n, d)
            if key is None:
                plain.append(_Stack([layer], [matrices]))
            else:
                stack = stacks.setdefault((groups, d, *key), _Stack())
                stack.layers.append(layer)
                stack.matrices.append(matrices)
        return plain, list(stacks.values())

    def _compressed(self, stack: _Stack) -> list[Tensor]:
        """Images ``(b, m, n, k)``, whose energies are averaged over m and added up over the list."""
        assert self.compress is not None
        return [self.compress(gather(stack.matrices)).unsqueeze(1)]

    def _aggregate(self, values: Tensor) -> Tensor:
        """Energies ``(b, m)`` of m images as one number: ``(b,)``."""
        return values.mean(1)

    def _values(self, layers: Sequence[Neurons]) -> Iterator[tuple[list[Neurons], Tensor]]:
        if not layers:
            return
        plain, stacks = self._stacks(layers)
        # A single neuron and its mirror image are no pair, so it is taken without, like the output layer.
        full = [stack for stack in plain if stack.layers[0].role == "output" or stack.n < 2]
        half = [stack for stack in plain if stack not in full]
        with full_precision((plain or stacks)[0].matrices[0]):
            images = [[stack.matrices[0].unsqueeze(1)] for stack in half] + [
                self._compressed(stack) for stack in stacks
            ]
            parts = [part.flatten(0, 1) for parts in images for part in parts]
            values = iter(self._energies(parts, "hidden"))
            found = [[self._aggregate(next(values).view(part.shape[:2])) for part in parts] for parts in images]
            outputs = self._energies([stack.matrices[0] for stack in full], "output")
        yield from ((stack.layers, value) for stack, value in zip(full, outputs, strict=True))
        for stack, sums in zip(half + stacks, found, strict=True):
            yield stack.layers, sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)

    def _energies(self, parts: Sequence[Tensor], role: str) -> list[Tensor]:
        """Energies of matrices ``(b, n, k)`` of several shapes, in few batches."""
        found: dict[int, Tensor] = {}
        shapes = [(part.shape[0], part.shape[1], part.shape[2]) for part in parts]
        for members in batches(shapes, parts[0].device if parts else None):
            values = self.energy(gather([parts[index].contiguous() for index in members]), role)
            found.update(zip(members, values.split([len(parts[index]) for index in members]), strict=True))
        return [found[index] for index in range(len(parts))]

    def extra_repr(self) -> str:
        """The options."""
        return f"s={self.potential.s:g}, half_space={self.half_space}"


class _Drawn(Compressive):
    """A compressive energy that draws: the state, and when it is drawn."""

    def __init__(
        self, *, redraw_every: int | None, kind: str = "gaussian", learned: bool = False, **options: Any
    ) -> None:
        super().__init__(**options)
        check_range("redraw_every", redraw_every or 0, 0)
        self.redraw_every = redraw_every or None
        self.bank = ProjectionBank(kind, learned=learned)
        self._led = False  # whether somebody else says when a step begins

    @property
    def moves(self) -> bool:
        """Whether what was drawn is drawn again, or learned."""
        return self.redraw_every is not None or self.bank.learned

    def prepare(self, target: Target) -> None:
        """Draw the projections of a matrix' or a model's layers, as buffers (or, if learned, parameters)."""
        layers = [layer for layer in self._layers(target) if not layer.constant and self._weight(layer)]
        with torch.no_grad():
            for stack in self._stacks(layers)[1]:
                self._prepare(stack)

    def _prepare(self, stack: _Stack) -> None:
        """Create the state of a stack."""
        raise NotImplementedError

    def advance(self, step: int, seed: int, rate: float) -> None:
        """Draw again, where it is time: what is drawn depends on the seed and ``step // redraw_every`` alone."""
        check_step(step, seed, rate)
        self._led = True
        self._advance(step, seed, rate)

    def _advance(self, step: int, seed: int, rate: float | None) -> None:
        self.bank.redraw(seed, step // self.redraw_every if self.redraw_every else 0)

    @uncompiled
    def _lead(self, target: Target) -> None:
        """A step that nobody announced; a captured graph replays what was drawn before."""
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self.prepare(target)
            self._advance(self.bank.calls, 0, None)
            self.bank.calls += 1

    def forward(self, target: Target) -> Tensor:
        """Value of a matrix ``(n, d)``, or weighted sum over the layers of a model: ``()``."""
        if self.training and not self._led:
            self._lead(target)
        return super().forward(target)


class _Projected(_Drawn):
    """A compressive energy of matrices P, one for all layers of equal inputs or for each layer."""

    def __init__(self, *, dim: int, count: int, share: str, s: float = 2.0, **options: Any) -> None:
        super().__init__(s=s, **options)
        check_range("dim", dim, 1)
        check_range("count", count, 1)
        check_choice("share", share, ("dim", "layer"))
        if dim <= s + 1:
            raise ArgumentError("dim", f"must be greater than s + 1 = {s + 1:g}: the mean is infinite, got {dim}")
        if dim <= 2 * s + 1:
            warnings.warn(
                f"energies of projections to dim={dim} dimensions have an infinite variance; "
                f"take more than 2 s + 1 = {2 * s + 1:g}",
                stacklevel=3,
            )
        self.dim, self.count, self.share = dim, count, share

    def _count(self, n: int) -> int:
        """Projections of a layer with n neurons."""
        return self.count

    def _stack_key(self, layer: Neurons, n: int, d: int) -> tuple[Any, ...] | None:
        return None if d <= self.dim else (self._count(n),)

    def _bank_names(self, stack: _Stack, shared: str) -> list[str]:
        """Names of the tensors of a stack: one for all its layers, or one for each."""
        if self.share == "dim" or not stack.layers[0].name:
            return [shared]
        # The name of a buffer must have no dot.
        return [f"layer:{layer.name.replace('/', '//').replace('.', '/')}:{shared}" for layer in stack.layers]

    def _held(self, stack: _Stack) -> list[Tensor]:
        """The projections in the bank for a stack: for all its layers or for each ``(m, k, d)``."""
        count = self._count(stack.n)
        shared = f"d{stack.d}" if count == self.count else f"d{stack.d}x{count}"
        return [
            self.bank.get(name, (count, self.dim, stack.d), stack.matrices[0])
            for name in self._bank_names(stack, shared)
        ]

    def _prepare(self, stack: _Stack) -> None:
        self._held(stack)

    def _projections(self, stack: _Stack, vectors: Tensor) -> Tensor:
        """Projections ``(u, m, k, d)`` of a stack: a copy, since the bank may change before the backward pass."""
        return torch.stack(self._held(stack))

    def _compressed(self, stack: _Stack) -> list[Tensor]:
        vectors = gather(stack.matrices)
        return [project(vectors, self._projections(stack, vectors))]

    def extra_repr(self) -> str:
        """The options."""
        return f"dim={self.dim}, count={self.count}, share={self.share!r}, {super().extra_repr()}"


@energies.register("rp-comhe")
class RPCoMHE(_Projected):
    r"""Energy under random projections (RP-CoMHE): the mean of :math:`E(W P_c^T)` over them, or the largest.

    With fresh Gaussian projections and s = 2 its mean gradient is :math:`k/(k-3)` times that of the half-space energy:
    it is that energy with noise. With fixed ones it sees their row space alone.

    Args:
        dim: Number k of dimensions; a layer with no more inputs is taken as it is.
        count: Number C of projections.
        aggregate: ``"mean"`` of the projections, or ``"max"``.
        redraw_every: Draw new projections after so many steps; 0 or ``None`` for never.
        share: ``"dim"``: layers of equal inputs have common projections; ``"layer"``: each has its own.
        kind: ``"gaussian"``, ``"srht"`` or ``"countsketch"``; the last can send a neuron to zero.
        projections_per_neuron: In place of ``count``: a layer of n neurons has n divided by this number, at least 1.

    Example:
        >>> energy = RPCoMHE(dim=8, count=2)
        >>> energy(torch.randn(5, 20)).shape
        torch.Size([])
    """

    def __init__(
        self,
        *,
        dim: int = 30,
        count: int = 5,
        aggregate: str = "mean",
        redraw_every: int | None = 1,
        share: str = "dim",
        kind: str = "gaussian",
        projections_per_neuron: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dim=dim, count=count, share=share, redraw_every=redraw_every, kind=kind, **options)
        check_choice("aggregate", aggregate, ("mean", "max"))
        if projections_per_neuron is not None:
            check_range("projections_per_neuron", projections_per_neuron, 0, open_low=True)
        self.aggregate, self.projections_per_neuron = aggregate, projections_per_neuron

    def _count(self, n: int) -> int:
        if self.projections_per_neuron is None:
            return self.count
        return max(1, int(n // self.projections_per_neuron))

    def _aggregate(self, values: Tensor) -> Tensor:
        return values.mean(1) if self.aggregate == "mean" else values.max(1).values


@energies.register("naive-comhe")
class NaiveCoMHE(_Projected):
    r"""Energy under projections that are learned by the same loss: a negative control.

    The projections become easy, not the neurons diverse. They are parameters of this module: call :meth:`prepare` on
    the model first, and give ``parameters()`` to the optimiser along with those of the model.

    Args:
        dim: Number of dimensions; a layer with no more inputs is taken as it is.
        count: Number of projections.
        share: ``"dim"``: layers of equal inputs have common projections; ``"layer"``: each has its own.

    Example:
        >>> energy = NaiveCoMHE(dim=8)
        >>> energy.prepare(torch.randn(5, 20))
        >>> [tuple(parameter.shape) for parameter in energy.parameters()]
        [(1, 8, 20)]
    """

    def __init__(self, *, dim: int = 30, count: int = 1, share: str = "layer", **options: Any) -> None:
        super().__init__(dim=dim, count=count, share=share, redraw_every=None, learned=True, **options)


class _Moving(_Projected):
    """An energy whose projections descend on an objective of their own, which subclasses define."""

    rate: Tensor
    pace: Tensor
    contract: ClassVar[Mapping[str, Any]] = {**Compressive.contract, "graph": False}

    def __init__(
        self,
        *,
        steps: int,
        every: int,
        unroll_steps: int,
        second_order: bool,
        rate: float | None,
        decay: float,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        for name, value, low in (("unroll_steps", unroll_steps, 0), ("decay", decay, 0), ("rate", rate or 0, 0)):
            check_range(name, value, low)
        self.steps, self.every, self.unroll_steps = steps, every, unroll_steps
        self.second_order, self.decay = second_order, decay
        self._fixed_rate = rate
        start = torch.tensor(START_RATE if rate is None else rate)
        # Buffers, because a captured graph reads the rate anew at each replay. The second is 0 in steps without a move.
        self.register_buffer("rate", start, persistent=False)
        self.register_buffer("pace", start.clone(), persistent=False)

    @uncompiled
    def forward(self, target: Target) -> Tensor:
        """Value of a matrix ``(n, d)``, or weighted sum over the layers of a model: ``()``; never compiled."""
        if self.training:
            self._move()
        return super().forward(target)  # the compiler takes no gradient within a loss

    @property
    def moves(self) -> bool:
        """Whether projections are drawn again, or descend."""
        return super().moves or self.steps > 0

    def _advance(self, step: int, seed: int, rate: float | None) -> None:
        super()._advance(step, seed, rate)
        if rate is not None and self._fixed_rate is None:
            self.rate.fill_(rate)
        self.pace.copy_(self.rate if step % self.every == 0 else torch.zeros_like(self.rate))

    def _held(self, stack: _Stack) -> list[Tensor]:
        if self.rate.device != stack.matrices[0].device:
            self.to(stack.matrices[0].device)
        return super()._held(stack)

    def _objective(self, vectors: Tensor, projections: Tensor) -> Tensor:
        """What projections ``(u, m, k, d)`` minimise for vectors ``(b, n, d)``: ``()``."""
        raise NotImplementedError

    def _projections(self, stack: _Stack, vectors: Tensor) -> Tensor:
        held = self._held(stack)
        projections = torch.stack(held)
        still = vectors.detach()
        if self.training and self.steps:
            projections = descend(
                lambda P: self._objective(still, P), projections, self.pace, self.steps, decay=self.decay
            )
            with torch.no_grad():
                torch._foreach_copy_(held, list(projections.unbind()))
        if self.unroll_steps:
            # Frozen weights have nothing to differentiate.
            through = self.second_order and (vectors.requires_grad or transformed())
            seen = vectors if through else still
            projections = descend(
                lambda P: self._objective(seen, P), projections, self.rate, self.unroll_steps, unroll=through
            )
        return projections


@energies.register("ap-comhe")
class APCoMHE(_Moving):
    r"""Energy under a projection that keeps the angles between the neurons (AP-CoMHE).

    The projection P, random at first, follows the gradient of :func:`preservation_loss`. ``"unroll"`` takes one further
    step in the loss, :math:`P' = P - \eta\,\partial L/\partial P`, and differentiates it, too; ``"alternate"`` takes P
    as it is.

    Args:
        dim: Number of dimensions; a layer with no more inputs is taken as it is.
        count: Number of projections.
        mode: ``"unroll"`` or ``"alternate"``.
        loss: How angles are compared: ``"frob"``, ``"cos"`` or ``"angle"``, see :func:`preservation_loss`.
        unroll_steps: Steps in the loss (unrolled).
        second_order: Let gradients flow through these steps.
        p_every: Move P after so many steps of training; by default 10 if alternating, else 1.
        p_steps: How many steps P moves then.
        rate: Size :math:`\eta` of the steps; ``None`` for the learning rate, 0.1 until that is known.
        decay: Weight decay of P.
        redraw_every: Draw a new P after so many steps; 0 or ``None`` for never. Often makes it a random projection.
        share: ``"layer"``: each layer has its own P; ``"dim"``: layers of equal inputs have a common one.

    Example:
        >>> energy = APCoMHE(dim=8)
        >>> energy(torch.randn(5, 20)).shape
        torch.Size([])
    """

    def __init__(
        self,
        *,
        dim: int = 30,
        count: int = 1,
        mode: str = "unroll",
        loss: str = "frob",
        unroll_steps: int = 1,
        second_order: bool = True,
        p_every: int | None = None,
        p_steps: int = 1,
        rate: float | None = None,
        decay: float = 5e-7,
        redraw_every: int | None = None,
        share: str = "layer",
        **options: Any,
    ) -> None:
        check_choice("mode", mode, ("unroll", "alternate"))
        check_choice("loss", loss, ("frob", "cos", "angle"))
        check_range("p_every", 1 if p_every is None else p_every, 1)
        check_range("p_steps", p_steps, 0)
        unrolled = mode == "unroll"
        every = (1 if unrolled else 10) if p_every is None else p_every
        super().__init__(
            dim=dim,
            count=count,
            share=share,
            redraw_every=redraw_every,
            rate=rate,
            decay=decay,
            steps=p_steps,
            every=every,
            unroll_steps=unroll_steps if unrolled else 0,
            second_order=second_order,
            **options,
        )
        self.loss = loss

    def _objective(self, vectors: Tensor, projections: Tensor) -> Tensor:
        return _preservation(vectors, project(vectors, projections), self.loss, self.eps).sum()


@energies.register("adv-comhe")
class AdvCoMHE(_Moving):
    r"""Energy under a projection that raises it (adversarial CoMHE): :math:`\min_W \max_P E(W P^T)`.

    Without a limit a projection can make two neurons meet, so it moves by few and small steps only. :meth:`growth`
    says how far it went.

    Args:
        dim: Number of dimensions; a layer with no more inputs is taken as it is.
        count: Number of projections.
        ascent_steps: Steps of P before each step of training.
        unroll: Take one further step in the loss and let gradients flow through it.
        inner_half_space: Raise the energy of half space; by default as ``half_space``.
        rate: Size of the steps; ``None`` for the learning rate, 0.1 until that is known.
        decay: Weight decay of P.
        redraw_every: Draw a new P after so many steps; 0 or ``None`` for never.
        share: ``"layer"``: each layer has its own P; ``"dim"``: layers of equal inputs have a common one.

    Example:
        >>> energy = AdvCoMHE(dim=8)
        >>> energy(torch.randn(5, 20)).shape
        torch.Size([])
    """

    contract: ClassVar[Mapping[str, Any]] = {**_Moving.contract, "falls": False}
    first: Tensor
    last: Tensor

    def __init__(
        self,
        *,
        dim: int = 30,
        count: int = 1,
        ascent_steps: int = 10,
        unroll: bool = True,
        inner_half_space: bool | None = None,
        rate: float | None = None,
        decay: float = 5e-7,
        redraw_every: int | None = None,
        share: str = "layer",
        **options: Any,
    ) -> None:
        check_range("ascent_steps", ascent_steps, 0)
        super().__init__(
            dim=dim,
            count=count,
            share=share,
            redraw_every=redraw_every,
            rate=rate,
            decay=decay,
            steps=ascent_steps,
            every=1,
            unroll_steps=int(unroll),
            second_order=True,
            **options,
        )
        self.inner_half_space = self.half_space if inner_half_space is None else inner_half_space
        self.register_buffer("first", torch.tensor(torch.nan))
        self.register_buffer("last", torch.tensor(torch.nan))

    def _objective(self, vectors: Tensor, projections: Tensor) -> Tensor:
        images = project(vectors, projections).flatten(0, 1)
        return -_mean_energy(images, self.potential, self.inner_half_space, self.eps).sum()

    def forward(self, target: Target) -> Tensor:
        """Value of a matrix ``(n, d)``, or weighted sum over the layers of a model: ``()``."""
        value = super().forward(target)
        if self.training:
            with torch.no_grad():
                self.last.copy_(value)
                self.first.copy_(torch.where(self.first.isnan(), self.last, self.first))
        return value

    def growth(self) -> float:
        """The last value in training over the first one; waits for the device, and warns above 10."""
        ratio = float(self.last / self.first)
        if ratio > GROWTH:
            warnings.warn(
                f"the adversary raised the energy {ratio:.3g} times: take fewer or smaller steps", stacklevel=2
            )
        return ratio


@energies.register("group-comhe")
class GroupCoMHE(_Drawn):
    r"""Energy of parts of the neurons (group CoMHE): the mean over groups of input channels, each with all its taps.

    A layer of no more channels than one group has is taken as it is. In groups of few coordinates the closest pair
    decides: linear layers and kernels of one tap need larger groups, such as 32.

    Args:
        group_channels: Channels of a group.
        partition: ``"consecutive"`` channels, ``"random"`` ones, or lists of the channels of each group.
        redraw_every: Draw a new random partition after so many steps; 0 or ``None`` for never.

    Example:
        >>> energy = GroupCoMHE(group_channels=10)
        >>> energy(torch.randn(5, 20)).shape
        torch.Size([])
    """

    contract: ClassVar[Mapping[str, Any]] = {**Compressive.contract, "options": {"group_channels": 3, "s": 0.5}}

    def __init__(
        self,
        *,
        group_channels: int = 8,
        partition: str | Sequence[Sequence[int]] = "consecutive",
        redraw_every: int | None = 1,
        **options: Any,
    ) -> None:
        super().__init__(redraw_every=redraw_every, **options)
        check_range("group_channels", group_channels, 1)
        if isinstance(partition, str):
            check_choice("partition", partition, ("consecutive", "random"))
        elif not partition or not all(len(group) for group in partition):
            raise ArgumentError("partition", "must have a channel in each of its groups")
        self.group_channels, self.partition = group_channels, partition
        self._columns: dict[tuple[int, int, torch.device], Tensor] = {}
        self._warned = False

    def _stack_key(self, layer: Neurons, n: int, d: int) -> tuple[Any, ...] | None:
        taps = getattr(layer, "taps", 1)
        channels = d // taps
        if not isinstance(self.partition, str):
            return (taps,)
        if channels <= self.group_channels:
            return None
        least = 2 * self.potential.s + 1
        if self.group_channels * taps <= least and not self._warned:
            self._warned = True
            warnings.warn(f"groups of {self.group_channels * taps} coordinates: take more than {least:g}", stacklevel=2)
        return (taps,)

    @property
    def moves(self) -> bool:
        """Whether a partition is drawn again."""
        return self.partition == "random" and super().moves

    def _taps(self, stack: _Stack) -> int:
        taps: int = getattr(stack.layers[0], "taps", 1)
        return taps

    def _prepare(self, stack: _Stack) -> None:
        self._order(stack)

    def _order(self, stack: _Stack) -> Tensor | None:
        """Columns of the vectors (``d`` for none) in the order of the groups; ``None`` if as they are."""
        taps, like = self._taps(stack), stack.matrices[0]
        channels = stack.d // taps
        if self.partition == "consecutive":
            return None
        if self.partition == "random":
            order = self.bank.get(f"d{stack.d}t{taps}", (channels,), like, integer=True)
            return (order.unsqueeze(1) * taps + torch.arange(taps, device=like.device)).flatten()
        key = (stack.d, taps, like.device)
        if key not in self._columns:
            self._columns[key] = self._listed(stack.d, taps).to(like.device)
        return self._columns[key]

    def _listed(self, d: int, taps: int) -> Tensor:
        """Columns of the listed groups, each filled up with ``d``."""
        assert not isinstance(self.partition, str)
        groups = [list(group) for group in self.partition]
        wrong = [channel for group in groups for channel in group if not 0 <= channel < d // taps]
        if wrong:
            raise ArgumentError("partition", f"must hold channels from 0 to {d // taps - 1}, got {wrong[0]}")
        columns = [torch.tensor(group).unsqueeze(1).mul(taps).add(torch.arange(taps)).flatten() for group in groups]
        return nn.utils.rnn.pad_sequence(columns, batch_first=True, padding_value=d).flatten()

    def _compressed(self, stack: _Stack) -> list[Tensor]:
        vectors, order = gather(stack.matrices), self._order(stack)
        width = self.group_channels * self._taps(stack)
        if not isinstance(self.partition, str):
            vectors = F.pad(vectors, (0, 1))
            width = max(map(len, self.partition)) * self._taps(stack)
        if order is not None:
            vectors = vectors[..., order]
        vectors = F.pad(vectors, (0, -vectors.shape[2] % width))
        return [vectors.unflatten(2, (-1, width)).transpose(1, 2)]

    def extra_repr(self) -> str:
        """The options."""
        return f"group_channels={self.group_channels}, partition={self.partition!r}, {super().extra_repr()}"


@energies.register("bp-comhe")
class BPCoMHE(_Projected):
    r"""Energy under projections from both sides (bilateral CoMHE): :math:`E(W P_1^T) + E(P_2 W)`.

    :math:`P_1` brings the neurons to few dimensions, :math:`P_2` mixes them to few neurons (no more than there are).

    Args:
        dim: Number of dimensions and of mixtures; a layer with no more inputs is taken as it is.
        count: Number of projections.
        redraw_every: Draw new ones after so many steps; 0 or ``None`` for never.
        share: ``"dim"``: layers of equal inputs (and neurons) have common projections; ``"layer"``: each has its own.

    Example:
        >>> energy = BPCoMHE(dim=8)
        >>> energy(torch.randn(5, 20)).shape
        torch.Size([])
    """

    contract: ClassVar[Mapping[str, Any]] = {
        **Compressive.contract,
        "padding": False,
        "permutation": False,
        "scale": False,
    }

    def __init__(
        self, *, dim: int = 30, count: int = 1, redraw_every: int | None = 1, share: str = "dim", **options: Any
    ) -> None:
        super().__init__(dim=dim, count=count, redraw_every=redraw_every, share=share, **options)

    def _stack_key(self, layer: Neurons, n: int, d: int) -> tuple[Any, ...] | None:
        return None if d <= self.dim else (n,)

    @property
    def counts_lengths(self) -> bool:
        """Long neurons outweigh short ones in a mixture."""
        return True

    def _mixtures(self, stack: _Stack) -> list[Tensor]:
        shape = (self.count, min(self.dim, stack.n), stack.n)
        return [self.bank.get(name, shape, stack.matrices[0]) for name in self._bank_names(stack, f"n{stack.n}")]

    def _prepare(self, stack: _Stack) -> None:
        super()._prepare(stack)
        self._mixtures(stack)

    def _compressed(self, stack: _Stack) -> list[Tensor]:
        # The columns of the weights, projected, are the rows of the mixtures.
        mixed = project(gather(stack.matrices).mT, torch.stack(self._mixtures(stack))).mT
        return [*super()._compressed(stack), mixed]
