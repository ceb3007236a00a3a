r"""Small orthogonal matrices on an axis of a weight: what orthogonal training and fine-tuning learn.

A weight is read as vectors, ``(groups, n, d)``: the neurons of a layer (``axis="in"``), or their coordinates across
the layer (``axis="out"``). A :class:`Rotation` rotates all vectors alike, by one matrix, by blocks on the diagonal, by
a block on some coordinates, or by a butterfly of blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere import selection
from hypersphere.errors import ArgumentError
from hypersphere.geometry import at_least_float32, exact_products, full_precision, transformed
from hypersphere.neurons import Layout, is_sharded, whole
from hypersphere.nn.sharding import is_wrapped, put
from hypersphere.orthogonal.maps import Map


class Rotation(nn.Module):
    r"""Rotates the vectors of a weight by learned orthogonal matrices: :math:`W = R V`, vectors being columns of V.

    A parametrisation in the sense of :mod:`torch.nn.utils.parametrize`; :func:`hypersphere.orthogonal.apply` attaches
    it. The parameter ``free`` of shape ``(count, b, b)`` holds the unconstrained parameters, from which an orthogonal
    map computes the matrices. Each stage rotates the coordinates that its row of ``index`` lists (all, in order, where
    there is no index), cut into blocks of b:

    * one matrix: no index, one block of size d;
    * block diagonal: no index, d / b blocks, or one that is shared by all;
    * stochastic: an index of some coordinates, which :class:`hypersphere.orthogonal.Resampling` draws anew;
    * butterfly: several stages, each with a permutation of all coordinates.

    Args:
        map: The orthogonal map.
        layout: How to read the weight.
        d: Size of a vector.
        groups: Number of groups of vectors with matrices of their own; 1: all share them.
        block: Size b of a block; by default d.
        shared: One block for all places of a stage.
        index: Coordinates that each stage rotates, ``(stages, k b)``.
        dtype: Type of the parameter, float32 or wider.
        device: Where it is.

    Attributes:
        free: The unconstrained parameters of the matrices.
        carried: The warm start of the map, a buffer; ``None`` where it has none.
        gram: What of the first neurons no rotation may change (:func:`invariants`), a buffer; a state without it has
            the neurons that it holds for the first ones.
        master: The neurons in float32, a buffer, where those of the layer have 16 bits: these are rounded, and would
            drift with every draw of other coordinates. A state without it has those of the layer.

    Example:
        >>> from hypersphere.orthogonal import create
        >>> rotation = Rotation(create("cayley"), Layout(nn.Linear(6, 4)), 6, block=3)
        >>> rotation.free.shape, rotation(torch.ones(4, 6)).shape
        (torch.Size([2, 3, 3]), torch.Size([4, 6]))
    """

    is_rotation = True
    """How parameter groups know the parameters that weight decay must spare."""
    carried: Tensor | None
    gram: Tensor | None
    master: Tensor | None
    index: Tensor | None
    back: Tensor | None

    def __init__(
        self,
        map: Map,
        layout: Layout,
        d: int,
        *,
        groups: int = 1,
        block: int | None = None,
        shared: bool = False,
        index: Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        block = block or d
        rotated = d if index is None else index.shape[-1]
        if rotated % block:
            raise ArgumentError("block", f"must divide the {rotated} coordinates that are rotated, got {block}")
        self.map, self.layout, self.d, self.groups, self.block = map, layout, d, groups, block
        self.stages = 1 if index is None else index.shape[0]
        self.places = 1 if shared else rotated // block
        self.shared = shared
        count = self.stages * groups * self.places
        self.free = nn.Parameter(map.start(block, batch=(count,), device=device, dtype=dtype))
        signs = map.signs(block)
        self.register_buffer("signs", None if signs is None else signs.to(self.free), persistent=False)
        self.register_buffer("carried", map.warm_start(self.free.detach()) if map.warm_starts else None)
        self.register_buffer("index", None if index is None else index.to(device=self.free.device, dtype=torch.long))
        self.register_buffer("back", None if self.index is None or rotated < d else self.index.argsort(1))
        self.register_buffer("gram", None)
        self.register_buffer("master", None)
        self.both = False
        """Whether the other axis of the weight is rotated, too."""
        self.absent: list[str] = []
        """What the last state that was loaded did not have, of what belongs to the neurons."""
        self.sampling: str | None = None
        """How new coordinates are drawn during training; ``None``: never."""
        self.taps = 1
        """Numbers of a vector that belong to one input channel, next to each other."""
        self.detached = False
        """Whether it was merged: nothing asks for its matrices any more."""
        self._computed: Tensor | None = None
        """Matrices that were computed together with those of other layers, for one forward pass of the model."""

    @property
    def count(self) -> int:
        """Number of unconstrained parameters."""
        return self.free.shape[0] * self.map.free(self.block)

    def extra_repr(self) -> str:
        """The map and the sizes."""
        return f"{self.map}, d={self.d}, matrices={self.free.shape[0]}, block={self.block}"

    def matrices(self) -> Tensor:
        """The orthogonal matrices ``(count, b, b)``, as they act: the identity at the start."""
        return self._computed if self._computed is not None else compute([self])[0]

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes: not the matrices, which belong to a graph."""
        return self.__dict__ | {"_computed": None}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        own = {name: f"{prefix}{name}" for name in ("carried", "gram", "master")}
        for keys in args[2:4]:  # that are missing, or are not expected
            keys[:] = [key for key in keys if key not in own.values()]
        if own["carried"] not in state_dict:
            # Parameters of their own, from a map without warm start: the one that is here belongs to others.
            self.restart()
        self.absent = [name for name, key in own.items() if key not in state_dict]

    @torch.no_grad()
    def remember(self, weight: Tensor, *, gram: bool = True, master: bool = True) -> None:
        """Take a weight for that of the first neurons: what of it is kept here, and which of that to fill."""
        if gram and self.gram is not None:
            self.gram.copy_(invariants(self.layout.vectors(weight), both=self.both))
        if master and self.master is not None:
            self.master.copy_(weight)

    @torch.no_grad()
    def restart(self) -> None:
        """Compute the warm start of the map anew, for the present parameters."""
        if self.carried is not None:
            self.carried.copy_(self.map.warm_start(whole(self.free)))  # type: ignore[arg-type]

    def forward(self, weight: Tensor) -> Tensor:
        """The rotated weight of the layer."""
        # What fully_shard() computes with in 16 bits it casts all parameters to, and no buffer, as neurons are.
        kind = self.free.dtype if self.free.dtype in (torch.float16, torch.bfloat16) else weight.dtype
        return self.turned(whole(weight) if self.master is None else self.master).to(kind)

    def turned(self, weight: Tensor, *, back: bool = False) -> Tensor:
        """A weight with its vectors rotated, or rotated back, in its own type."""
        return self.layout.weight(self.rotate(self.layout.vectors(weight), back=back), weight)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """The weight that is rotated into this one, for assignments to the layer's weight: its first neurons."""
        wide = self.turned(weight if self.master is None else at_least_float32(weight), back=True)
        self.remember(wide)
        return wide.to(weight.dtype)

    def rotate(self, vectors: Tensor, *, back: bool = False, matrices: Tensor | None = None) -> Tensor:
        r"""Rotate vectors ``(groups, n, d)``, or ``(..., d)`` where there is one group: :math:`v \mapsto R v`.

        Args:
            vectors: The vectors, in any floating-point type; computed in float32 or wider.
            back: Undo the rotation: by :math:`R^\top`, or by :math:`R^{-1}` where R need not be orthogonal.
            matrices: Instead of the present ones, ``(count, b, b)``.

        Returns:
            Same shape and type.
        """
        found = self.matrices() if matrices is None else matrices
        with full_precision(vectors), exact_products():
            wide = at_least_float32(vectors)
            found = found.to(torch.promote_types(found.dtype, wide.dtype))
            wide = wide.to(found.dtype)
            if back:
                found = found.mT if self.exact else torch.linalg.inv(found)
            stages = found.unflatten(0, (self.stages, self.groups, self.places))
            order = range(self.stages - 1, -1, -1) if back else range(self.stages)
            for stage in order:
                wide = self._stage(wide, stages[stage], stage)
        return wide.to(vectors.dtype)

    @property
    def exact(self) -> bool:
        """Whether the matrices are orthogonal to rounding, so that the transpose is the inverse."""
        return self.map.orthogonal and self.map.exact

    def _stage(self, vectors: Tensor, matrices: Tensor, stage: int) -> Tensor:
        """One stage: matrices ``(groups, places, b, b)``."""
        if self.index is None:
            return self._blocks(vectors, matrices)
        index = self.index[stage]
        rotated = self._blocks(vectors.index_select(-1, index), matrices)
        if self.back is not None:
            return rotated.index_select(-1, self.back[stage])
        return vectors.index_copy(-1, index, rotated)

    def _blocks(self, vectors: Tensor, matrices: Tensor) -> Tensor:
        if self.groups == 1 and matrices.shape[1] == 1 and vectors.shape[-1] == self.block:
            return vectors @ matrices[0, 0].mT
        blocks = vectors.unflatten(-1, (-1, self.block))
        if self.groups == 1 and matrices.shape[1] == 1:
            return (blocks @ matrices[0, 0].mT).flatten(-2)
        if self.groups == 1:  # (..., k, b) with a matrix for each block
            lead = blocks.shape[:-2]
            rotated = blocks.reshape(-1, *blocks.shape[-2:]).transpose(0, 1) @ matrices[0].mT
            return rotated.transpose(0, 1).reshape(*lead, -1)
        # (groups, n, k, b): one product for each group and block
        return (blocks.transpose(1, 2) @ matrices.mT).transpose(1, 2).flatten(-2)

    @torch.no_grad()
    def reset(self, index: Tensor | None = None) -> None:
        """Start again from the identity, on other coordinates where an index is given."""
        put(self.free, self.map.start(self.block, batch=(self.free.shape[0],), dtype=self.free.dtype))
        self.restart()
        if index is not None and self.index is not None:
            self.index.copy_(index)
            if self.back is not None:
                self.back.copy_(self.index.argsort(1))

    def dense(self) -> Tensor:
        """All of R, ``(groups, d, d)``, which few need: the rotated unit vectors."""
        eye = torch.eye(self.d, dtype=self.free.dtype, device=self.free.device)
        return self.rotate(eye.expand(self.groups, -1, -1) if self.groups > 1 else eye.unsqueeze(0)).mT


SAMPLE = 256
"""Number of neurons of a group whose inner products are remembered."""


def invariants(vectors: Tensor, *, both: bool = False) -> Tensor:
    """What no rotation of neurons ``(groups, n, d)`` changes: their Gram matrix ``(groups, m, m)``.

    In float32 or wider. Of more than 256 neurons it is that of as many, evenly spread. Where both axes are rotated, it
    is the singular values; of a weight larger than 1,024 both ways the Schatten norms of order 2, 4 and 8.

    Example:
        >>> invariants(torch.tensor([[[3.0, 4.0], [0.0, 1.0]]]))
        tensor([[[25.,  4.],
                 [ 4.,  1.]]])
    """
    kind, wide = torch.promote_types(vectors.dtype, torch.float32), vectors.double()
    _, n, d = wide.shape
    if not both:
        chosen = torch.arange(min(n, SAMPLE), device=wide.device) * n // min(n, SAMPLE)
        wide = wide[:, chosen]
        return (wide @ wide.mT).to(kind)
    if min(n, d) <= 1024:
        return torch.linalg.svdvals(wide).to(kind)
    square = wide @ wide.mT if n <= d else wide.mT @ wide
    sums = [square.diagonal(dim1=-2, dim2=-1).sum(-1), _sum(square), _sum(square @ square)]
    return torch.stack([total ** (1 / order) for total, order in zip(sums, (2, 4, 8), strict=True)], -1).to(kind)


def _sum(M: Tensor) -> Tensor:
    return M.square().sum((-2, -1))


def fill(parts: Any, keys: Any) -> None:
    """Hook of a weight's rotations after a state was loaded: what it did not have is that of the neurons it had."""
    parts[0].remember(parts.original, gram="gram" in parts[0].absent, master="master" in parts[0].absent)


def compute(rotations: Sequence[Rotation], *, own: bool = False) -> list[Tensor]:
    """The matrices of several rotations, those of equal size and map in one batch.

    Args:
        rotations: The rotations.
        own: As of :func:`hypersphere.neurons.whole`, for sharded parameters.
    """
    if torch.compiler.is_compiling():
        return _compute(rotations, write=True, own=own)
    if transformed():
        return _compute(rotations, write=False, own=own)  # what they transform must change nothing
    # Activations may be recomputed in the backward pass, of layers that find their matrices in the forward pass and
    # have to compute them then: what is saved for them is no part of what is recomputed, in either.
    recomputed = torch._C._current_graph_task_id() != -1
    # Detached, or a saved result and what computed it would keep each other alive; torch puts the graph back.
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, _itself):
        return _compute(rotations, write=not recomputed, own=own)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _compute(rotations: Sequence[Rotation], *, write: bool, own: bool) -> list[Tensor]:
    found: dict[Rotation, Tensor] = {}
    alike: dict[tuple[Any, ...], list[Rotation]] = {}
    for rotation in rotations:
        # Parameters that are not being trained may be others than those of the warm start: a running average, say.
        warm = rotation.carried is not None and rotation.training and torch.is_grad_enabled() and not transformed()
        key = (rotation.map, rotation.block, rotation.free.device, rotation.free.dtype, warm)
        alike.setdefault(key, []).append(rotation)
    for (map, *_, warm), members in alike.items():
        free = _joined([whole(rotation.free, own=own) for rotation in members])
        if warm:
            carried = [rotation.carried for rotation in members if rotation.carried is not None]
            matrices, onward = map.refine(free, at_least_float32(_joined(carried)))
            if write:
                _write(carried, onward)
        else:
            matrices = map(free)
        if members[0].signs is not None:
            matrices = matrices * members[0].signs
        parts = matrices.split([rotation.free.shape[0] for rotation in members])
        found |= dict(zip(members, parts, strict=True))
    return [found[rotation] for rotation in rotations]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


@torch.no_grad()
def _write(targets: Sequence[Tensor], values: Tensor) -> None:
    torch._foreach_copy_(list(targets), list(values.split([len(target) for target in targets])))


class BatchedRotations:
    """Batched rotations: the matrices of all rotations of a model, computed before and forgotten after a forward pass.

    Layers of equal size are one batch; a layer that is called on its own computes its matrix itself, and so does one
    that ``fully_shard`` was called with.

    Args:
        rotations: The rotations.
    """

    def __init__(self, rotations: Iterable[Rotation]) -> None:
        self.rotations = list(rotations)
        self._opened: list[bool] = []
        self._apart: set[nn.Module] | None = None

    def before(self, module: nn.Module, args: Any) -> None:
        """Hook before the forward pass: compute, unless that was done further out."""
        new = all(rotation._computed is None for rotation in self.rotations)
        self._opened.append(new)
        if new:
            if self._apart is None and self._is_sharded(module):
                # A part that was sharded by itself has whole parameters for sure in its own forward pass alone, and
                # gathers the gradients of what was computed there.
                parts = (part for part in module.modules() if part is not module and is_wrapped(part))
                self._apart = {inner for part in parts for inner in part.modules()}
            self.compute()

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook after it, also where it failed: forget."""
        if self._opened and self._opened.pop():
            self.forget()

    def _is_sharded(self, module: nn.Module) -> bool:
        return any(is_sharded(rotation.free) for rotation in self.rotations) or (
            not torch.compiler.is_compiling() and is_wrapped(module)
        )

    def compute(self, *, own: bool = False) -> None:
        """Compute the matrices of all rotations, but for those of layers that have to do it themselves.

        Args:
            own: As of :func:`compute`.
        """
        apart = self._apart or ()
        chosen = [rotation for rotation in self.rotations if not rotation.detached and rotation not in apart]
        for rotation, matrices in zip(chosen, compute(chosen, own=own), strict=True):
            rotation._computed = matrices

    def forget(self) -> None:
        """Let layers compute their matrices themselves again."""
        for rotation in self.rotations:
            rotation._computed = None


def rotations(model: nn.Module) -> Iterator[tuple[str, Rotation]]:
    """The rotations of a model, each with the name of its layer.

    Example:
        >>> import hypersphere as hs
        >>> model = hs.orthogonal.apply(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
        >>> [(name, rotation.d) for name, rotation in rotations(model)]
        [('0', 3)]
    """
    selection.check_model(model)
    for name, module in model.named_modules():
        if isinstance(module, Rotation):
            layer, *rest = re.split(r"(?:^|\.)(?:parametrizations|adapters)\.", name)
            weight = rest[0].split(".")[0] if f"{layer}.parametrizations.".lstrip(".") in name else "weight"
            yield layer if weight == "weight" else f"{layer}.{weight}".lstrip("."), module
