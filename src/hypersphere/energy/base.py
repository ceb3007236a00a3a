r"""What all regularisers share: a name, a matrix or a model as argument, and layers computed together.

A regulariser maps a matrix ``(n, d)``, whose rows are neurons, to a number. Called on a model it gives the weighted sum
over its layers, those of a model computed in few batches: matrices are padded with zeros to a common shape, which no
regulariser counts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from hypersphere.energy.layers import Neurons, Selection, select
from hypersphere.energy.shards import Mesh, mesh_of, of_shards
from hypersphere.errors import ArgumentError, check_range, check_step
from hypersphere.geometry import at_least_float32, full_precision, transformed
from hypersphere.neurons import is_sharded
from hypersphere.registry import Member, Registry
from hypersphere.selection import Output

if TYPE_CHECKING:
    from hypersphere.energy.report import Report

energies: Registry[nn.Module] = Registry("energy")


def create(name: str, **options: Any) -> nn.Module:
    """Build a regulariser by name; ``hypersphere list energies`` prints the names and their options.

    Example:
        >>> create("mhe", s=1)(torch.eye(3))
        tensor(0.7071)
    """
    return energies.create(name, **options)


PADDING = 2**21
"""Elements that padding may add to a batch of layers, where it saves launches."""
CPU_PADDING = 0
"""The same on a processor, which gains nothing."""


def batches(shapes: Sequence[tuple[int, int, int]], device: torch.device | None = None) -> list[list[int]]:
    """Which of the matrices ``(groups, n, d)`` to pad to one shape, so that batches are few and padding is small.

    Args:
        shapes: Of the matrices.
        device: Where they are; on a CPU only equal shapes are put together.

    Example:
        >>> batches([(1, 64, 576), (1, 16, 27), (1, 4096, 9216)])
        [[2], [0, 1]]
    """
    found: list[list[int]] = []
    allowed = CPU_PADDING if device is not None and device.type == "cpu" else PADDING
    order = sorted(range(len(shapes)), key=lambda index: (-shapes[index][1] * shapes[index][2], index))
    padding = 0
    for index in order:
        groups, n, d = shapes[index]
        if found:
            _, first_n, first_d = shapes[found[-1][0]]
            added = groups * (first_n * first_d - n * d)
            if n <= first_n and d <= first_d and padding + added <= allowed:
                found[-1].append(index)
                padding += added
                continue
        found.append([index])
        padding = 0
    return found


class _Gather(torch.autograd.Function):
    """Matrices ``(groups, n, d)`` as one batch, padded with zeros; the gradient comes back as views of one tensor."""

    @staticmethod
    def forward(ctx: Any, *matrices: Tensor) -> Tensor:
        n, d = (max(m.shape[axis] for m in matrices) for axis in (1, 2))
        batch = matrices[0].new_zeros(sum(m.shape[0] for m in matrices), n, d)
        start = 0
        # Neighbours of one shape are copied together: a copy of each layer would cost more than the energy.
        for (_, rows, columns), members in itertools.groupby(matrices, key=lambda m: m.shape):
            run = list(members)
            stop = start + sum(m.shape[0] for m in run)
            batch[start:stop, :rows, :columns] = torch.cat(run)
            start = stop
        ctx.shapes = [m.shape for m in matrices]
        return batch

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        parts = grads[0].split([shape[0] for shape in ctx.shapes])
        return tuple(part[:, : shape[1], : shape[2]] for part, shape in zip(parts, ctx.shapes, strict=True))


def gather(matrices: Sequence[Tensor]) -> Tensor:
    """Matrices ``(groups, n, d)`` one below the other, padded with zeros: ``(sum of groups, largest n, largest d)``."""
    batch: Tensor = matrices[0] if len(matrices) == 1 else _Gather.apply(*matrices)
    return batch


class Regulariser(nn.Module, metaclass=Member):
    """A term of the loss that depends on weights alone.

    Called on a matrix ``(n, d)`` of row vectors it gives that matrix' value. Called on a model it gives the sum over
    the layers, each weighted by what it is: a hidden layer or the output layer (the last linear one). The groups of a
    grouped convolution and the heads of an attention layer count by themselves and are averaged.

    Args:
        hidden_weight: Weight of every hidden layer.
        output_weight: Weight of the output layer.
    """

    decoupled_only = False
    """Whether a model that has decoupled layers is judged by these alone."""
    ordered = False
    """Whether the order of the numbers in a neuron matters, as it does to one that keeps a vector of its own."""
    maps_vectors = False
    """Whether it looks at images of the vectors, so that nothing known of sets of vectors holds for its value."""
    powers: ClassVar[tuple[float, ...]] = ()
    """Through which powers of its smooth form (:meth:`objective`) a value with kinks, such as the nearest neighbour, is
    minimised; none where it is smooth."""
    mesh: Mesh = None
    """During a call: the processes that compute the same value, where the weight is sharded over some. They share large
    sums of pairs out (``pair_sums(..., mesh=self.mesh)``)."""

    later_options: ClassVar[Mapping[str, Any]] = {"hidden_weight": 1.0, "output_weight": 1.0}

    def __init__(self, *, hidden_weight: float = 1.0, output_weight: float = 1.0) -> None:
        super().__init__()
        check_range("hidden_weight", hidden_weight, 0)
        check_range("output_weight", output_weight, 0)
        self.hidden_weight, self.output_weight = hidden_weight, output_weight

    def energy(self, vectors: Tensor, role: str = "hidden") -> Tensor:
        """Value of each matrix of a batch ``(b, n, d)`` in float32 or wider: ``(b,)``; zero rows do not count."""
        raise NotImplementedError

    @property
    def counts_lengths(self) -> bool:
        """Whether the lengths of vectors count, not their directions alone."""
        return False

    @property
    def moves(self) -> bool:
        """Whether training draws or moves something that the value depends on, which is then no fixed function."""
        return False

    def objective(self, vectors: Tensor, power: float = math.inf) -> Tensor:
        """What :func:`hypersphere.energy.minimise` makes least, of each set of vectors ``(b, n, d)``: ``(b,)``.

        By default the energy. A member that looks for something by itself, such as the worst place on the sphere, looks
        for it everywhere.

        Args:
            vectors: In float32 or wider.
            power: Of members that have ``powers`` a finite one asks for a smooth form, which tends to the value as the
                power grows.
        """
        return self.energy(vectors)

    def forward(self, target: Tensor | nn.Module | Selection) -> Tensor:
        """Value of a matrix ``(n, d)``, or weighted sum over the layers of a model: ``()``.

        Of weights that are sharded over processes (``DTensor``, ``fully_shard``) it is that of the whole weights, on
        every process; all of them have to call it.
        """
        if isinstance(target, Tensor):
            if target.dim() != 2:
                raise ArgumentError("target", f"must have shape (n, d), got {tuple(target.shape)}")
            if is_sharded(target):
                matrix = Neurons("", lambda: target, read=lambda rows: rows.unsqueeze(0))
                return self._of_shards(matrix, target).squeeze(0)
            with full_precision(target):
                return self.energy(at_least_float32(target).unsqueeze(0)).squeeze(0)
        selection = self.select(target)
        layers = [layer for layer in selection if not layer.constant and self._weight(layer)]
        if not layers:
            return selection.zero()
        terms = [
            self._weight(batch[0]) / values.numel() * len(batch) * values.sum()
            for batch, values in self._values(layers)
        ]
        return torch.stack([term.to(terms[0].device) for term in terms]).sum()  # a model may be spread over devices

    def select(self, target: nn.Module | Selection, *, output: Output = "auto", **choice: Any) -> Selection:
        """The layers of a model that this regulariser looks at.

        Args:
            target: The model; a selection is taken as it is.
            output: The output layer, as in :func:`hypersphere.energy.select`.
            choice: ``types``, ``include``, ``exclude`` and ``skip``, as there.
        """
        if isinstance(target, Selection):
            return target
        return select(target, output=output, decoupled_only=self.decoupled_only, **choice)

    def _weight(self, layer: Neurons) -> float:
        return self.output_weight if layer.role == "output" else self.hidden_weight

    def _values(self, layers: Sequence[Neurons]) -> Iterator[tuple[list[Neurons], Tensor]]:
        """Batches of layers of one role, number of groups, type and device, and the values of their groups in order."""
        held = [layer.sharded() for layer in layers]
        for layer, weight in zip(layers, held, strict=True):
            if weight is not None:
                yield [layer], self._of_shards(layer, weight)
        layers = [layer for layer, weight in zip(layers, held, strict=True) if weight is None]
        matrices = [at_least_float32(layer.matrices() if self.ordered else layer.unordered()) for layer in layers]
        kinds: dict[tuple[str, int, torch.dtype, torch.device], list[int]] = {}
        for index, layer in enumerate(layers):
            rows = matrices[index]
            kinds.setdefault((layer.role, len(rows), rows.dtype, rows.device), []).append(index)
        for (role, *_), indices in kinds.items():
            shapes = [(m.shape[0], m.shape[1], m.shape[2]) for m in (matrices[index] for index in indices)]
            for members in batches(shapes, matrices[indices[0]].device):
                chosen = [indices[member] for member in members]
                batch = [layers[index] for index in chosen]
                with full_precision(matrices[chosen[0]]):
                    yield batch, self._batch_energy(batch, [matrices[index] for index in chosen], role)

    def _of_shards(self, layer: Neurons, weight: Tensor) -> Tensor:
        """Values of the groups of a layer with a sharded weight: the mean over the groups, for each."""

        def mean(rows: Tensor) -> Tensor:
            self.mesh = mesh_of(weight)
            try:
                with full_precision(rows):
                    return self._batch_energy([layer], [at_least_float32(layer.read(rows))], layer.role).mean()
            finally:
                self.mesh = None

        groups = layer.read(torch.empty(weight.shape, device="meta")).shape[0]
        return of_shards(mean, weight, *self.parameters()).expand(groups)

    def _batch_energy(self, layers: Sequence[Neurons], matrices: Sequence[Tensor], role: str) -> Tensor:
        """Values of the groups of layers that make up a batch, layer by layer."""
        return self.energy(gather(matrices), role)

    def layer_energies(self, target: nn.Module | Selection) -> dict[str, Tensor]:
        """Value of every layer of a model, without weights: name -> ``()``, the mean over the layer's groups.

        Nothing is drawn or moved for it, in training mode neither.
        """
        selection = self.select(target)
        found: dict[str, Tensor] = {}
        training = self.training
        try:
            self.eval()
            for batch, values in self._values(list(selection)):
                means = values.view(len(batch), -1).mean(1)
                found |= {layer.name: value for layer, value in zip(batch, means.unbind(), strict=True)}
        finally:
            self.train(training)
        return {layer.name: found[layer.name] for layer in selection}

    def report(self, model: nn.Module | Selection) -> Report:
        """Value of every layer, and what is known of it: :func:`hypersphere.energy.report` of this regulariser.

        Example:
            >>> [row.name for row in create("koleo").report(nn.Sequential(nn.Linear(8, 4), nn.ReLU())).rows]
            ['0']
        """
        from hypersphere.energy.report import report  # noqa: PLC0415 (which looks at regularisers)

        return report(model, self)

    def _move(self) -> None:
        """Called before something of its own moves along with a value, which must not be where transforms look on."""
        if transformed():
            what = f"{type(self).__name__} in training mode, which moves with every value"
            raise ArgumentError("target", f"must not be a tensor of torch.func for {what}: call eval() before")

    def prepare(self, target: Tensor | nn.Module | Selection) -> None:
        """Create whatever state the value of this target needs (projections, poles), as buffers."""

    def advance(self, step: int, seed: int, rate: float) -> None:
        """Make ready for a training step: draw what is random, all of it a function of ``seed`` and ``step``.

        Whoever trains calls this before every step, outside of what is compiled or captured; without such calls a
        regulariser that draws does so by itself at every call in training mode.

        Args:
            step: Number of the step, from 0.
            seed: The run's seed; the same in all processes, so that all draw the same.
            rate: Current learning rate.
        """
        check_step(step, seed, rate)
