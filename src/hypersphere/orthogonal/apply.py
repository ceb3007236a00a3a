r"""Orthogonal training of any model: neurons stay as they are drawn, and one rotation for each layer is learned."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from hypersphere import neurons, selection
from hypersphere.energy.minimise import minimise
from hypersphere.energy.minimise import refine as minimised
from hypersphere.errors import ArgumentError, check_choice, check_count, check_range, check_seed
from hypersphere.geometry import at_least_float32, normalise
from hypersphere.neurons import Layout, whole
from hypersphere.nn.sharding import TAKE_A_WHOLE_ONE, check_unsharded, put, settle
from hypersphere.orthogonal.adapters import Adapters, adapted_layers
from hypersphere.orthogonal.algebra import product
from hypersphere.orthogonal.maps import Map, create, orthogonality_error
from hypersphere.orthogonal.rotation import BatchedRotations, Rotation, fill, invariants, rotations
from hypersphere.selection import Choice, Layer, Output, Types

M = TypeVar("M", bound=nn.Module)
Init = str | Callable[[Tensor], Any]

_TOGETHER = "_rotated_together"  # attribute of a model that has rotations: the object and its hooks


def apply(
    model: M,
    map: str | Map = "cayley",
    *,
    types: Types | None = None,
    include: Choice | None = None,
    exclude: Choice | None = None,
    skip: str | Iterable[str] | None = ("output",),
    output: Output = "auto",
    init: Init | None = None,
    mean: float = 0.0,
    unit_norm: bool = False,
    gain: float = 1.0,
    refine: int | Mapping[str, Any] = 0,
    start: str = "identity",
    learn_neurons: bool = False,
    blocks: int = 1,
    share_blocks: bool = False,
    sample: float | None = None,
    sampling: str = "uniform",
    sides: str = "in",
    seed: int | None = None,
    **options: Any,
) -> M:
    r"""Orthogonal over-parameterised training (OPT) of a model's layers, in place.

    The present neurons V of each chosen layer are frozen, and the layer computes with :math:`W = R V`, R orthogonal and
    learned. R is the identity at the start, so the model computes what it did. Norms of neurons, angles between them
    and every hyperspherical energy stay as they are, however long it is trained; biases, normalisation and layers that
    are not chosen are trained as always. :func:`merge` gives the plain model back, :func:`check` shows how far
    rotations have come and how exact they are. Build the optimiser afterwards, with no weight decay on the rotations
    (:func:`hypersphere.parameter_groups`).

    The matrices of all layers are computed once in each forward pass of the model, those of equal size together.

    Args:
        model: Any module, or a layer.
        map: How R comes from unconstrained parameters: the name of a map (``hypersphere list orthogonal``) or a map.
        types: Classes of layers, or patterns of their names (``"conv*"``); by default all linear and convolution
            layers, transposed ones and the linear layers of GPT-2 in transformers included, and attention, whose
            queries, keys and values have a rotation each.
        include: Which layers: patterns of their names in the model (``"stages.*"``), or a function of name and layer.
        exclude: Which not, in the same way.
        skip: Places to leave alone: the ``"first"`` layer, the ``"output"``, 1x1 convolutions on a ``"shortcut"``.
        output: The output layer: its name, the module, ``None`` (for a feature extractor whose classifier is a head
            apart), or ``"auto"`` for the rule of :mod:`hypersphere.selection`.
        init: Draw the neurons anew before they are frozen: ``"kaiming"`` (normal, variance 2/d), ``"xavier"`` (normal,
            2/(d+n)), ``"normal"`` (variance 1), or a function that fills a weight in place. Directions of normal
            vectors are uniform on the sphere, which is close to the least energy.
        mean: Mean of the entries that ``init`` draws; above 0 directions crowd together and the energy is high.
        unit_norm: Set the norm of every neuron to ``gain``; zero neurons stay zero.
        gain: Factor on neurons: nothing else can change their norms later.
        refine: Steps that minimise the energy of the neurons before they are frozen, or the arguments of
            :func:`hypersphere.energy.refine`.
        start: ``"identity"``, or ``"normal"``: unconstrained parameters are standard normal numbers, as was published,
            and R is far from the identity.
        learn_neurons: Train V, too, which angles do not survive.
        blocks: Number of equal blocks on the diagonal of R, along the input channels (PE-OPT); layers whose number of
            channels it does not divide get one block.
        share_blocks: One block for all places on the diagonal.
        sample: Turn only so many coordinates at a time, a share up to 1 or a number (S-OPT), at least 2; the first
            chosen layer is rotated whole. :class:`hypersphere.orthogonal.Resampling` draws new ones during training.
        sampling: ``"uniform"``; ``"partition"``: each coordinate comes once before any comes again; ``"blocks"``: all
            coordinates, in random blocks of that size; ``"channels"``: whole input channels.
        sides: ``"in"``: rotate neurons; ``"both"``: rotate the axis of outputs, too (POET), which keeps singular values
            but not the angles.
        seed: Makes all that is drawn a function of this number and the layer's name; by default torch's own source.
        **options: Options of the map.

    Returns:
        The model.

    Raises:
        ArgumentError: For a bad argument, and where no layer is chosen; the model is unchanged then.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> x = torch.randn(5, 8)
        >>> before = model(x)
        >>> torch.allclose(apply(model, "cayley")(x), before, atol=1e-6)
        True
        >>> [name for name, _ in model.named_parameters()]
        ['0.bias', '0.parametrizations.weight.0.free', '2.weight', '2.bias']
    """
    chosen_map = _map(map, options)
    selection.check_model(model)
    check_unsharded(model, "rotate it before fully_shard()")
    if seed is not None:
        check_seed(seed)
    _check(start=start, sides=sides, sampling=sampling, blocks=blocks, gain=gain, sample=sample, init=init, mean=mean)
    rows = selection.select(
        model, types=types, include=include, exclude=exclude, skip=skip, output=output, obstacle=_obstacles(model)
    )
    layers = [Rotated(row.name, row.module, row.weight) for row in selection.chosen(model, rows)]
    if seed is None and (init is not None or start == "normal" or sample is not None):
        seed = int(torch.randint(2**31, ()))
    plans: list[tuple[Rotated, Tensor, list[Rotation]]] = []
    for place, layer in enumerate(layers):  # all that may fail, before any layer is changed
        generator = source(seed, layer.name)
        weight = _prepared(layer, init, mean, unit_norm, gain, refine, generator)
        whole = sample is not None and place == 0 and sides == "in" and len(layers) > 1
        share = None if whole else sample
        axes = ("in", "out")[: 1 + (sides == "both")]
        parts = [_rotation(chosen_map, layer, a, blocks, share_blocks, share, sampling, generator) for a in axes]
        for rotation in parts if start == "normal" else ():
            with torch.no_grad():
                rotation.free.copy_(torch.randn(rotation.free.shape, generator=generator, dtype=rotation.free.dtype))
            rotation.restart()
        plans.append((layer, weight, parts))
    selection.note(rows, "rotate")
    for layer, weight, parts in plans:
        with torch.no_grad():
            layer.value.copy_(weight)
        if not learn_neurons:
            freeze(layer)
        _remember(parts, weight, learned=learn_neurons)
        for rotation in parts:
            rotation.train(layer.module.training)
            parametrize.register_parametrization(layer.module, layer.weight, rotation, unsafe=True)
        layer.parts.register_load_state_dict_post_hook(fill)
        if chosen_map.orthogonal and sides == "in" and not learn_neurons:
            layer.module.keeps_angles = True
    gather(model)
    return model


def _map(map: Any, options: Mapping[str, Any]) -> Map:
    """The map that is meant by a name and options, or by an object."""
    if isinstance(map, str):
        return create(map, **options)
    if options:
        raise ArgumentError(next(iter(options)), "must not be given together with a map that is an object")
    if not isinstance(map, Map):
        shown = getattr(map, "__name__", type(map).__name__)
        raise ArgumentError("map", f"must be the name of a map or a Map (hypersphere.orthogonal.create), got {shown}")
    return map


def _check(
    start: str, sides: str, sampling: str, blocks: int, gain: float, sample: float | None, init: Any, mean: float
) -> None:
    """Raise for the first argument of :func:`apply` that cannot be."""
    check_choice("start", start, ("identity", "normal"))
    check_choice("sides", sides, ("in", "both"))
    check_choice("sampling", sampling, tuple(SAMPLINGS))
    check_count("blocks", blocks)
    check_range("gain", gain, 0, open_low=True)
    if sample is not None:
        check_range("sample", sample, 0, open_low=True)
        if blocks > 1:
            raise ArgumentError("blocks", f"must be 1 with sample, got {blocks}")
    if isinstance(init, str):
        check_choice("init", init, tuple(_DEVIATIONS))
    elif mean:
        raise ArgumentError("mean", f"must be 0 unless init draws the neurons, got {mean:g}")


# --------------------------------------------------------------------------------------------- which layers


class Rotated(NamedTuple):
    """A weight of a model that is rotated, or is going to be.

    Attributes:
        name: Name of the layer.
        module: The module that owns the weight.
        weight: Name of the weight in it.
    """

    name: str
    module: Any
    weight: str = "weight"

    @property
    def value(self) -> Tensor:
        """The weight, as it is rotated."""
        found: Tensor = getattr(self.module, self.weight)
        return found

    @property
    def parts(self) -> Any:
        """Its rotations, in the order in which they act; ``original`` is the weight before them."""
        return self.module.parametrizations[self.weight]


def _obstacles(model: nn.Module) -> Callable[[Layer], str]:
    """Why a layer cannot be rotated; empty where it can."""
    selection.check_model(model)
    holders = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    return lambda row: _obstacle(row, holders)


def _obstacle(row: Layer, holders: Mapping[int, int]) -> str:
    module: Any = row.module
    if parametrize.is_parametrized(module, row.weight):
        own = all(isinstance(part, Rotation) for part in module.parametrizations[row.weight])
        return "rotated already: merge it first" if own else "its weight is parametrised"
    weight = module._parameters.get(row.weight)
    missing = weight is None
    obstacles = {
        "lazy: run a batch through the model first": isinstance(module, LazyModuleMixin),
        "has adapters: unload them first": isinstance(module._modules.get("adapters"), Adapters),
        # torch hands a list of its parameters to the kernel, whatever their names have come to mean.
        f"{row.kind} reads its weights past a rotation": isinstance(module, nn.RNNBase),
        "its gradients are sparse": bool(getattr(module, "sparse", False)),
        "a hook computes its weight": missing and row.weight in vars(module),
        "quantised": neurons.is_quantised(module) or not (missing or neurons.is_ordinary(weight)),
        "no weight of its own": missing,
        "another module shares its weight": holders[id(weight)] > 1,
    }
    return next((why for why, there in obstacles.items() if there), "")


# ---------------------------------------------------------------------------------------------- neurons


_DEVIATIONS: dict[str, Callable[[int, int], float]] = {
    "kaiming": lambda n, d: math.sqrt(2 / d),
    "xavier": lambda n, d: math.sqrt(2 / (n + d)),
    "normal": lambda n, d: 1.0,
}


def source(seed: int | None, name: str) -> torch.Generator | None:
    """A source of random numbers that depends on a seed and a layer's name alone."""
    if seed is None:
        return None
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


@torch.no_grad()
def _prepared(
    layer: Rotated,
    init: Init | None,
    mean: float,
    unit_norm: bool,
    gain: float,
    refine: int | Mapping[str, Any],
    generator: torch.Generator | None,
) -> Tensor:
    """The weight of a layer with neurons drawn, refined and scaled."""
    weight, layout = layer.value.detach().clone(), Layout(layer.module, weight=layer.weight)
    if callable(init):
        init(weight)
    vectors = at_least_float32(layout.vectors(weight))
    if isinstance(init, str):
        _, n, d = vectors.shape
        drawn = torch.randn(vectors.shape, generator=generator, dtype=vectors.dtype)
        vectors = (mean + _DEVIATIONS[init](n * len(vectors), d) * drawn).to(vectors.device)
    if refine:
        how = {"steps": refine} if isinstance(refine, int) else dict(refine)
        unknown = [option for option in how if option not in inspect.signature(minimise).parameters]
        if unknown:
            raise ArgumentError("refine", f"must have options of hypersphere.energy.refine, got {unknown[0]!r}")
        with torch.enable_grad():
            vectors = torch.stack([minimised(rows, **how) for rows in vectors])
    if unit_norm:
        vectors = normalise(vectors)
    return layout.weight(gain * vectors, weight)


def freeze(layer: Rotated) -> None:
    """Make the weight of a layer a buffer, which no optimiser, weight decay or clipping sees."""
    weight = layer.value
    delattr(layer.module, layer.weight)
    layer.module.register_buffer(layer.weight, weight.detach())


def _rotation(
    map: Map,
    layer: Rotated,
    axis: str,
    blocks: int,
    shared: bool,
    sample: float | None,
    sampling: str,
    generator: torch.Generator | None,
) -> Rotation:
    weight, layout = layer.value, Layout(layer.module, axis, weight=layer.weight)
    groups, n, d, taps = layout.groups, layout.n, layout.d, layout.taps
    # The kernels of a depthwise convolution are few numbers each, and one neuron a group has no angle to keep.
    own = 1 if groups == 1 or (n == 1 and axis == "in") else groups
    index: Tensor | None = None
    block = d
    if sample is not None:
        # One coordinate alone cannot be rotated.
        block = min(d, max(2, round(sample * d) if sample <= 1 else int(sample)))
        if sampling == "channels":
            block = max(1, block // taps) * taps
        index = SAMPLINGS[sampling](d, block, taps, 0, generator).unsqueeze(0)
    elif (d // taps) % blocks == 0:
        block = d // blocks
    dtype = torch.promote_types(weight.dtype, torch.float32)
    found = Rotation(
        map, layout, d, groups=own, block=block, shared=shared, index=index, dtype=dtype, device=weight.device
    )
    found.taps, found.sampling = taps, None if sample is None else sampling
    return found


def _remember(parts: Sequence[Rotation], weight: Tensor, *, learned: bool) -> None:
    """Keep what :func:`check` compares with, and neurons of 16 bits in float32; the first rotation of a weight does."""
    first = parts[0]
    first.both = len(parts) > 1
    first.gram = invariants(first.layout.vectors(weight), both=first.both)
    if weight.dtype in (torch.float16, torch.bfloat16) and not learned:
        first.master = weight.float()


@torch.no_grad()
def absorb(layer: Rotated) -> None:
    """Let neurons become what they are rotated into; of 16-bit ones those in float32, so that no draw rounds them."""
    parts = layer.parts
    value = whole(parts.original) if parts[0].master is None else parts[0].master
    for rotation in parts:
        value = rotation.turned(value)
    put(parts.original, value)
    if parts[0].master is not None:
        parts[0].master.copy_(value)


def _uniform(d: int, p: int, taps: int, turn: int, generator: torch.Generator | None) -> Tensor:
    return torch.randperm(d, generator=generator)[:p]


def _blocks(d: int, p: int, taps: int, turn: int, generator: torch.Generator | None) -> Tensor:
    return torch.randperm(d, generator=generator)[: d // p * p]


def _channels(d: int, p: int, taps: int, turn: int, generator: torch.Generator | None) -> Tensor:
    channels = torch.randperm(d // taps, generator=generator)[: p // taps]
    return (channels.unsqueeze(1) * taps + torch.arange(taps)).flatten()


def _partition(d: int, p: int, taps: int, turn: int, generator: torch.Generator | None) -> Tensor:
    # The last part of a round is filled up with coordinates of its beginning.
    order = torch.randperm(d, generator=generator)
    return order[torch.arange(turn * p, (turn + 1) * p) % d]


SAMPLINGS: dict[str, Callable[[int, int, int, int, torch.Generator | None], Tensor]] = {
    "uniform": _uniform,
    "partition": _partition,
    "blocks": _blocks,
    "channels": _channels,
}
"""How S-OPT picks coordinates: functions of d, p, the numbers of an input channel, the turn in a round and a source."""


# ---------------------------------------------------------------------------------------- all layers at once


def gather(model: nn.Module) -> None:
    """Let the rotations that a model has now be computed together in its forward pass."""
    for module in model.modules():  # what a part of the model had is done by the whole from now on
        for hook in vars(module).pop(_TOGETHER, ()):
            hook.remove()
    found = [rotation for _, rotation in rotations(model)]
    if found:
        together = BatchedRotations(found)
        hooks = [model.register_forward_pre_hook(together.before)]
        hooks.append(model.register_forward_hook(together.after, always_call=True))
        object.__setattr__(model, _TOGETHER, hooks)


@contextmanager
def cached(model: nn.Module) -> Iterator[None]:
    """Compute the matrices of a model's rotations once for all that is done inside.

    For inference with a model that is not merged, and for several backward passes before a step of the optimiser:
    gradients with respect to the matrices are added up and taken to the unconstrained parameters at the end of the
    block; of a sharded model their mean over the processes.

    Example:
        >>> model = apply(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
        >>> with cached(model):
        ...     for _ in range(2):
        ...         model(torch.randn(5, 3)).square().sum().backward()
        >>> model[0].parametrizations.weight[0].free.grad.shape
        torch.Size([1, 3, 3])
    """
    settle(model)
    together = BatchedRotations(rotation for _, rotation in rotations(model))
    if any(rotation._computed is not None for rotation in together.rotations):
        raise ArgumentError("model", "must not be in its forward pass or in another cached() block")
    together.compute(own=True)
    computed = [rotation.matrices() for rotation in together.rotations]
    versions = [rotation.free._version for rotation in together.rotations]
    leaves: list[Tensor] = []
    closed = False

    def refuse(leaf: Tensor) -> None:
        if closed:
            raise ArgumentError("model", "must be done with its backward passes inside the cached() block")

    for rotation, matrices in zip(together.rotations, computed, strict=True):
        leaf = matrices.detach().requires_grad_(matrices.requires_grad)
        if leaf.requires_grad:
            leaf.register_post_accumulate_grad_hook(refuse)
        rotation._computed = leaf
        leaves.append(leaf)
    try:
        yield
    finally:
        together.forget()
        closed = True
    pairs = [(matrices, leaf.grad) for matrices, leaf in zip(computed, leaves, strict=True) if leaf.grad is not None]
    if pairs and versions != [rotation.free._version for rotation in together.rotations]:
        raise ArgumentError("model", "must not be changed inside the cached() block: step the optimiser after it")
    if pairs:
        torch.autograd.backward([matrices for matrices, _ in pairs], [gradient for _, gradient in pairs])


# ------------------------------------------------------------------------------------------ merge and check


@torch.no_grad()
def merge(model: M) -> M:
    """Make the model plain again, in place: weights become what they are rotated into, with no cost left.

    Classes, names and shapes are those of before :func:`apply`; all parameters are trainable.

    Raises:
        ArgumentError: For a model that has no rotation, for example because it was merged before, and a sharded one.

    Example:
        >>> model = apply(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
        >>> merge(model)
        Sequential(
          (0): Linear(in_features=3, out_features=4, bias=True)
          (1): ReLU()
          (2): Linear(in_features=4, out_features=2, bias=True)
        )
    """
    layers = rotated(model)
    if not layers:
        raise ArgumentError("model", "must have a rotated layer, got none (merged before?)")
    check_unsharded(model, TAKE_A_WHOLE_ONE)
    by_module: dict[Any, dict[str, Tensor]] = {}
    for layer in layers:
        by_module.setdefault(layer.module, {})[layer.weight] = layer.value.detach().clone()
        for rotation in layer.parts:
            rotation.detached = True
    for module, values in by_module.items():
        _unparametrise(module, values)
        others = {name: module._parameters.pop(name) for name in list(module._parameters)}
        for name, value in values.items():
            setattr(module, name, nn.Parameter(value))
        module._parameters.update(others)  # behind the weights, as they were: optimisers go by the order
        vars(module).pop("keeps_angles", None)
    gather(model)
    selection.forget(model, "rotate")
    return model


def _unparametrise(module: Any, weights: Iterable[str]) -> None:
    """Take the parametrisations off some weights, and leave the module without these."""
    if set(module.parametrizations) - set(weights):
        for weight in weights:
            parametrize.remove_parametrizations(module, weight, leave_parametrized=False)
            delattr(module, weight)
        return
    # torch would delete a property of the class, which copies of the layer share.
    module.__class__ = type(module).__bases__[0]
    del module.parametrizations


def rotated(model: nn.Module) -> list[Rotated]:
    """The weights of a model that are rotated."""
    selection.check_model(model)
    return [
        Rotated(f"{name}.{weight}".strip(".") if weight != "weight" else name, module, weight)
        for name, module in model.named_modules()
        if parametrize.is_parametrized(module)
        for weight, parts in module.parametrizations.items()
        if all(isinstance(part, Rotation) for part in parts)
    ]


@torch.no_grad()
def rebase(model: nn.Module, optimiser: torch.optim.Optimizer | None = None) -> None:
    """Start again from where training has come: neurons become what they are rotated into, matrices the identity.

    The model computes what it did. For training on the next data set (progressive reuse), and for maps such as Cayley's
    that are best near the identity.

    Args:
        model: The model.
        optimiser: Optimiser whose state of the rotations is to be set to zero.

    Raises:
        ArgumentError: For a model without rotations, and for what is no optimiser.

    Example:
        >>> model = apply(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
        >>> rebase(model)
    """
    layers = rotated(model)
    if not layers:
        raise ArgumentError("model", "must have a rotated layer, got none (merged before?)")
    check_optimiser(optimiser)
    settle(model)
    for layer in layers:
        absorb(layer)
        for rotation in layer.parts:
            rotation.reset()
            forget_state(optimiser, rotation.free)


def check_optimiser(optimiser: Any) -> None:
    """Raise for what is neither an optimiser nor ``None``."""
    if optimiser is not None and not isinstance(optimiser, torch.optim.Optimizer):
        raise ArgumentError("optimiser", f"must be an optimiser of torch, got {type(optimiser).__name__}")


def forget_state(optimiser: torch.optim.Optimizer | None, parameter: nn.Parameter) -> None:
    """Set what an optimiser remembers of a parameter to zero, in place."""
    if optimiser is not None:
        for name, value in optimiser.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                value.fill_(1.0 if name == "mu_product" else 0.0)  # NAdam multiplies that


class Row(NamedTuple):
    r"""How the neurons of one layer are rotated.

    Attributes:
        name: Name of the layer.
        map: The orthogonal map.
        d: Size of the vectors that are rotated.
        n: Number of vectors, in each group.
        matrices: Number and size of the matrices, such as ``"1x576"``.
        free: Number of unconstrained parameters.
        moved: Distance from the identity, :math:`\|R - I\|_F / \sqrt{d}` over all matrices.
        error: Largest :math:`\|R^T R - I\|_F / \sqrt{d}` of a matrix, also of what a warm-started map would give.
        gram: Largest change of an inner product between neurons since the first ones, whatever has become of them by
            training, draws, :func:`rebase` and checkpoints, relative to the largest squared norm; of 256 of more
            neurons. Of singular values where both sides are rotated.
        role: ``"hidden"``, or ``"output"``.
    """

    name: str
    map: str
    d: int
    n: int
    matrices: str
    free: int
    moved: float
    error: float
    gram: float
    role: str = "hidden"


@dataclass(frozen=True, repr=False)
class Report:
    """The rotated layers of a model; prints as a table.

    Attributes:
        rows: One for each rotation.
        left: The layers without one, with the reasons.
    """

    rows: tuple[Row, ...]
    left: tuple[Layer, ...] = ()

    @property
    def error(self) -> float:
        """Largest orthogonality error."""
        return _largest(row.error for row in self.rows)

    @property
    def gram(self) -> float:
        """Largest relative change of an inner product between neurons."""
        return _largest(row.gram for row in self.rows)

    def __str__(self) -> str:
        columns = dict.fromkeys(("map", "neurons", "matrices"), "left")
        columns |= dict.fromkeys(("free", "moved", "error", "gram change"), "right")
        lines: list[tuple[str, str, Sequence[str], str]] = []
        for row in self.rows:
            numbers = (f"{row.free:,}", f"{row.moved:.3f}", f"{row.error:.1e}", f"{row.gram:.1e}")
            lines.append((row.name, row.role, (row.map, f"{row.n}x{row.d}", row.matrices, *numbers), ""))
        lines += [(layer.name, layer.role, (), layer.reason) for layer in self.left]
        total = sum(row.free for row in self.rows)
        return f"{selection.table(columns, lines)}\n{len(self.rows)} rotations, {total:,} unconstrained parameters"

    __repr__ = __str__


def _largest(numbers: Iterable[float]) -> float:
    """The largest number, NaN if one is, which is worse than any."""
    return max(numbers, key=lambda number: (math.isnan(number), number), default=0.0)


@torch.no_grad()
def check(model: nn.Module, *, output: Output = "auto") -> Report:
    """How exact the rotations of a model are, how far they have come, and whether neurons keep their first angles.

    Of a sharded model all processes call this, and each gets the same.

    Args:
        model: The model.
        output: The output layer, where :func:`apply` or :func:`~hypersphere.orthogonal.adapt` has not decided it.

    Example:
        >>> check(apply(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))))
        name  role    map     neurons  matrices  free  moved    error  gram change  note
        0     hidden  cayley  4x3      1x3          3  0.000  0.0e+00      0.0e+00
        2     output  -       -        -            -      -        -            -  the output (skip="output")
        1 rotations, 3 unconstrained parameters
    """
    rows = []
    layers = selection.noted(model, "rotate", output=output)
    roles = {layer.name: layer.role for layer in layers}
    for name, module, weight in (found := rotated(model)):
        parts, layout = module.parametrizations[weight], Layout(module, weight=weight)
        first = parts[0].gram
        if first is None:  # a rotation that was not put there by apply()
            first = invariants(layout.vectors(whole(parts.original)), both=len(parts) > 1)
        drift = _drift(first, layout.vectors(getattr(module, weight)), both=len(parts) > 1)
        for rotation in parts:
            label = f"{name} (outputs)" if rotation.layout.axis == "out" else name
            rows.append(_row(label, rotation, _shape(rotation.layout), drift, roles[name]))
    adapted = adapted_layers(model)
    for name, module in adapted.items():
        for title, adapter in module.adapters.items():
            d = adapter.d
            # Of a quantised weight no neurons can be read; R says it all.
            R = adapter.rotate(
                torch.eye(d, dtype=torch.float64, device=adapter.free.device).expand(adapter.groups, d, d)
            )
            eye = torch.eye(d, dtype=torch.float64, device=R.device)
            error = float((R @ R.mT - eye).abs().max())
            rows.append(_row(f"{name} ({title})", adapter, (adapter.groups, d, d), error, roles[name]))
    taken = {*adapted, *(layer.name for layer in found)}
    obstacle = _obstacles(model)
    left = [
        replace(layer, reason=layer.reason or obstacle(layer) or "not rotated")
        for layer in layers
        if layer.name not in taken
    ]
    return Report(tuple(rows), tuple(left))


def _shape(layout: Layout) -> tuple[int, int, int]:
    return layout.groups, layout.n, layout.d


def _row(name: str, rotation: Rotation, shape: Sequence[int], drift: float, role: str) -> Row:
    matrices = rotation.matrices()
    error = orthogonality_error(matrices).max()
    if rotation.carried is not None:  # what the next step of training will see
        used, _ = rotation.map.refine(whole(rotation.free), at_least_float32(rotation.carried))
        error = torch.maximum(error, orthogonality_error(used).max())
    eye = torch.eye(rotation.block, dtype=matrices.dtype, device=matrices.device)
    moved = (matrices - eye).square().sum((-2, -1)).mean().div(rotation.block).sqrt()
    return Row(
        name,
        rotation.map.name,
        shape[2],
        shape[1],
        f"{len(matrices)}x{rotation.block}",
        rotation.count,
        float(moved),
        float(error),
        drift,
        role,
    )


def _drift(before: Tensor, after: Tensor, *, both: bool) -> float:
    """Largest change of the invariants of vectors, relative to the largest of those before."""
    if not bool(after.isfinite().all()):
        return math.nan
    old, new = before.double(), invariants(after, both=both).to(before.dtype).double()
    return float((new - old).abs().amax() / old.abs().amax().clamp(min=1e-300))


@torch.no_grad()
def retract(model: nn.Module, bound: float = 1e-5, *, scale: bool = True) -> None:
    """Retraction: bring what drifted from step to step back onto the orthogonal group, without a change of any matrix.

    Maps that are invariant to the scale of their unconstrained matrix P continue from P = R, where they are well
    conditioned; warm starts of Newton steps are computed anew where the orthogonality error is beyond ``bound``. Call
    it every hundred steps or so; it waits for the device. Of a sharded model all processes call this.

    Args:
        model: The model.
        bound: Orthogonality error above which a warm start is computed anew.
        scale: Continue from P = R. Without it P keeps its scale, and with it the size of the steps that a rate makes.

    Example:
        >>> model = apply(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), "gram_schmidt", start="normal")
        >>> retract(model)
    """
    selection.check_model(model)
    check_range("bound", bound, 0, infinite=True)
    settle(model)
    found: list[Any] = [part for part in model.modules() if getattr(part, "is_rotation", False)]
    for rotation in found:
        free, renewed = whole(rotation.free), scale and rotation.map.retracts
        if renewed:
            free = rotation.map(free)
            put(rotation.free, free)
        if rotation.carried is not None:
            matrices, _ = rotation.map.refine(free, at_least_float32(rotation.carried))
            if renewed or not bool(orthogonality_error(matrices).max() <= bound):
                rotation.carried.copy_(rotation.map.warm_start(free))


class Penalty(nn.Module):
    """:func:`penalty` as a module, for a sum of regularisers.

    Args:
        squared: The squared norm; otherwise the norm itself.

    Example:
        >>> model = apply(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), "unconstrained")
        >>> Penalty()(model).item()
        0.0
    """

    def __init__(self, squared: bool = True) -> None:
        super().__init__()
        self.squared = squared

    def forward(self, model: nn.Module) -> Tensor:
        """The penalty of a model."""
        return penalty(model, squared=self.squared)


def penalty(model: nn.Module, *, squared: bool = True) -> Tensor:
    r"""How far unconstrained matrices are from orthogonal ones, to be added to a loss (OR, the relaxed form).

    .. math:: \sum_\text{layers} \|R^\top R - I\|_F^2

    Args:
        model: A model with rotations, usually of the map ``unconstrained``.
        squared: The squared norm; otherwise the norm itself, whose gradient does not vanish.

    Example:
        >>> model = apply(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), "unconstrained")
        >>> penalty(model)
        tensor(0., grad_fn=<SumBackward0>)
    """
    terms = []
    for _, rotation in rotations(model):
        R = at_least_float32(rotation.matrices())
        eye = torch.eye(R.shape[-1], dtype=R.dtype, device=R.device)
        distance = (product(R.mT, R) - eye).square().sum((-2, -1))
        terms.append((distance if squared else (distance + 1e-12).sqrt()).sum())
    if not terms:
        raise ArgumentError("model", "must have a rotated layer, got none")
    return torch.stack(terms).sum()
