r"""Weights as neurons: which parameters of a module hold some, and each of them as vectors ``(groups, n, d)`` and back.

A neuron is what makes one output, without its bias: a row of a linear layer, a kernel of a convolution, the embedding
of one token. Neurons that see different inputs or answer different questions are in groups of their own: those of a
grouped convolution, of queries, keys and values, of the gates of a recurrent layer and, where asked for, of the heads
of attention. Energies, rotations and adapters all read weights this way.

| module | weight | groups |
|---|---|---|
| linear layer | ``(n, d)`` | 1, or heads |
| convolution | ``(g n, d / taps, *kernel)`` | g |
| transposed convolution | ``(g d / taps, n, *kernel)`` | g |
| ``Conv1D`` of transformers, ``neurons = "columns"`` | ``(d, n)`` | 1, or heads |
| ``nn.MultiheadAttention`` | ``in_proj_weight (3 n, d)``, or ``q_proj_weight`` and so on | 3 or 1, times heads |
| embedding | ``(n, d)`` | 1 |
| ``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and their cells | ``weight_ih_l0 (gates n, d)`` and so on | gates |
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hypersphere.errors import ArgumentError, check_choice

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
PLAIN = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)
"""Classes whose one weight is a layer of neurons."""

_GATES = {"LSTM": 4, "LSTMCell": 4, "GRU": 3, "GRUCell": 3}
_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_QUERIES = ("q", "query", "q_proj", "query_proj", "q_lin", "to_q", "wq")
_KEYS = ("k", "key", "k_proj", "key_proj", "k_lin", "to_k", "wk", "v", "value", "v_proj", "value_proj", "v_lin")
_VALUES = ("to_v", "wv", "kv", "kv_proj", "key_value", "to_kv")
_FUSED = ("qkv", "qkv_proj", "query_key_value", "to_qkv", "wqkv", "c_attn", "in_proj")
_PROJECTIONS = frozenset(_QUERIES + _KEYS + _VALUES + _FUSED)


# ------------------------------------------------------------------------------------------ what holds neurons


def holds_columns(module: nn.Module) -> bool:
    """Whether a layer holds its neurons in the columns of a matrix.

    So does the linear layer of GPT-2 and its kin in transformers, and any layer that says ``neurons = "columns"``.

    Example:
        >>> holds_columns(nn.Linear(3, 4))
        False
    """
    if getattr(module, "neurons", None) == "columns":
        return True
    return any(kind.__name__ == "Conv1D" for kind in type(module).__mro__) and hasattr(module, "nf")


def is_ordinary(weight: Any) -> bool:
    """Whether a weight is a tensor of floating-point numbers, and not a quantised one.

    Example:
        >>> is_ordinary(torch.ones(2)), is_ordinary(torch.ones(2, dtype=torch.int8)), is_ordinary(None)
        (True, False, False)
    """
    if type(weight) is nn.Parameter:  # no more than torch.compile can follow
        return weight.is_floating_point()
    quantised = type(weight).__module__.startswith("torchao")
    return isinstance(weight, Tensor) and weight.is_floating_point() and not quantised


def is_sharded(weight: Any) -> bool:
    """Whether a weight is held by several processes together: a ``DTensor``, as FSDP2 makes them.

    Example:
        >>> is_sharded(torch.ones(2))
        False
    """
    return isinstance(weight, Tensor) and hasattr(type(weight), "full_tensor")  # as torch.compile sees it, too


def whole(weight: Tensor, *, own: bool = False) -> Tensor:
    """All rows of a weight that is sharded over processes; any other as it is.

    All processes of its mesh have to call it, and each gets all rows. The gradient is sharded as the weight is. It is
    that of one process where all compute the same of the rows, counted once and not once for each.

    Args:
        weight: A tensor, or a ``DTensor`` of any placements, of uneven shards, too.
        own: What a process computes of the rows depends on its own data: the gradient is the mean over the processes,
            as that of data-parallel training.

    Raises:
        ArgumentError: Where this process is not among those that hold the weight.

    Example:
        >>> whole(torch.ones(2))
        tensor([1., 1.])
    """
    if not is_sharded(weight):
        return weight
    sharded: Any = weight
    mesh = sharded.device_mesh
    if mesh.get_coordinate() is None:
        raise ArgumentError("weight", f"must be held by this process, too, got one on the processes of {mesh}")
    if not own:
        found: Tensor = sharded.full_tensor()
        return found
    from torch.distributed.tensor import Partial  # noqa: PLC0415 (only where torch is built with it)

    found = sharded.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if found.requires_grad:
        found.register_hook(lambda gradient: gradient / mesh.size())
    return found


def is_quantised(module: Any) -> bool:
    """Whether this is a quantised layer, of whatever class: one of torch's, or a linear one without a floating weight.

    Example:
        >>> is_quantised(nn.Linear(3, 4))
        False
    """
    if type(module).__module__.startswith("torch.ao.nn") and type(module).__name__ in {kind.__name__ for kind in PLAIN}:
        return True
    sizes = (getattr(module, name, None) for name in ("in_features", "out_features"))
    if not all(isinstance(size, int) for size in sizes) or parametrize.is_parametrized(module):
        return False
    return not is_ordinary(getattr(module, "weight", None))


def is_linear(module: nn.Module) -> bool:
    """Whether this is a linear layer: torch's, that of GPT-2, or a quantised one of whatever class.

    Example:
        >>> is_linear(nn.Linear(3, 4)), is_linear(nn.Conv2d(3, 4, 1))
        (True, False)
    """
    quantised = is_quantised(module) and hasattr(module, "in_features")
    return isinstance(module, nn.Linear) or holds_columns(module) or quantised


def weights(module: Any) -> tuple[str, ...]:
    """Names of a module's own parameters that hold neurons; none for a module that is not known to have any.

    Example:
        >>> weights(nn.Conv2d(3, 4, 3)), weights(nn.MultiheadAttention(8, 2)), weights(nn.BatchNorm2d(4))
        (('weight',), ('in_proj_weight',), ())
    """
    if isinstance(module, nn.MultiheadAttention):
        return tuple(name for name in _ATTENTION if getattr(module, name) is not None)
    if isinstance(module, nn.RNNBase):
        return tuple(name for name in module._flat_weights_names if name.startswith("weight"))
    if isinstance(module, nn.RNNCellBase):
        return ("weight_ih", "weight_hh")
    known = isinstance(module, (*PLAIN, *EMBEDDINGS)) or getattr(module, "neurons", None) in ("rows", "columns")
    return ("weight",) if known or holds_columns(module) else ()


def current(module: Any, weight: str = "weight") -> Tensor:
    """A weight as it is now.

    One that a hook computes before each forward pass (pruning, and torch's older spectral and weight norms) is computed
    here: what the hook has left belongs to the graph of a step that is over. One that is sharded over processes, or
    computed by a parametrisation of such parameters, is gathered (:func:`whole`).

    Args:
        module: Its owner.
        weight: Its name.

    Example:
        >>> current(nn.Linear(3, 4)).shape
        torch.Size([4, 3])
    """
    if weight in vars(module):
        for hook in module._forward_pre_hooks.values():
            if getattr(hook, "_tensor_name", None) == weight:
                masked: Tensor = hook.apply_mask(module)
                return masked
            if getattr(hook, "name", None) == weight and hasattr(hook, "compute_weight"):
                # A spectral norm must not go on with its power iteration.
                computed: Tensor = hook.compute_weight(module, *([False] if hasattr(hook, "eps") else []))
                return computed
    if parametrize.is_parametrized(module, weight):
        makes = module.parametrizations[weight]
        sharded = {name: whole(held) for name, held in makes.named_parameters() if is_sharded(held)}
        if sharded:  # what is not a parameter is no DTensor, and the two do not mix
            made: Tensor = torch.func.functional_call(makes, sharded, ())
            return made
    return whole(getattr(module, weight))


def shape(module: Any, weight: str = "weight") -> tuple[int, ...]:
    """Shape of a weight that holds neurons, which is not looked at where the module's sizes say it.

    Example:
        >>> shape(nn.ConvTranspose2d(4, 6, 3)), shape(nn.MultiheadAttention(8, 2), "in_proj_weight")
        ((4, 6, 3, 3), (24, 8))
    """
    # A parametrised weight is not looked at where that can be helped: some change whenever they are computed.
    if hasattr(module, "kernel_size") and hasattr(module, "transposed"):
        channels = module.out_channels, module.in_channels
        rows, columns = reversed(channels) if module.transposed else channels
        return rows, columns // module.groups, *module.kernel_size
    if isinstance(module, nn.Linear) or is_quantised(module):
        return module.out_features, module.in_features
    if parametrize.is_parametrized(module, weight) and hasattr(module.parametrizations[weight], "original"):
        return tuple(module.parametrizations[weight].original.shape)
    return tuple(getattr(module, weight).shape)


def heads(name: str, rows: int, parent: nn.Module) -> int:
    """How many heads of attention make up the neurons of a linear layer; 0 for a layer that is no projection of one.

    Those are layers called ``query``, ``k_proj``, ``qkv``, ``to_q`` and the like in a module that has ``num_heads`` or
    another number of heads, of its own or of its ``config``.

    Args:
        name: Name of the layer in its parent.
        rows: Number of its neurons.
        parent: The module that holds it.

    Example:
        >>> attention = nn.Module()
        >>> attention.num_heads = 4
        >>> heads("qkv", 24, attention), heads("out", 8, attention)
        (12, 0)
    """
    part = name.lower()
    count = _number(parent, _HEADS) if part in _PROJECTIONS else 0
    if not count:
        return 0
    size = _number(parent, ("head_dim", "attention_head_size"))
    if size and rows % size == 0:
        return rows // size
    if part in _KEYS + _VALUES:
        count = _number(parent, _KEY_HEADS) or count
    groups = count * (3 if part in _FUSED else 2 if "kv" in part or part == "key_value" else 1)
    return groups if rows % groups == 0 else 1


def _number(parent: nn.Module, attributes: Iterable[str]) -> int:
    """The first of the attributes of a module, or of its configuration, that is a whole number; 0 if there is none."""
    for owner in (parent, getattr(parent, "config", None)):
        for attribute in attributes:
            value = getattr(owner, attribute, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


# ------------------------------------------------------------------------------------------- weight <-> vectors


class Layout:
    """How a weight is read as vectors ``(groups, n, d)``, and written back.

    Args:
        module: Its owner.
        axis: ``"in"``: a vector is a neuron; ``"out"``: a vector holds one coordinate of all neurons (of a group).
        weight: Its name, one of :func:`weights`.
        heads: Split the neurons of each group into so many groups: the heads of attention, in the order of the rows.

    Attributes:
        groups: Number of groups.
        n: Vectors in each.
        d: Numbers in a vector.
        taps: Numbers of a neuron that belong to one input channel, next to each other: those of a kernel.

    Example:
        >>> Layout(nn.Conv2d(8, 16, 3, groups=2)).vectors(torch.zeros(16, 4, 3, 3)).shape
        torch.Size([2, 8, 36])
        >>> Layout(nn.MultiheadAttention(8, 2), weight="in_proj_weight", heads=2).vectors(torch.zeros(24, 8)).shape
        torch.Size([6, 4, 8])
    """

    def __init__(self, module: nn.Module, axis: str = "in", *, weight: str = "weight", heads: int = 1) -> None:
        check_choice("axis", axis, ("in", "out"))
        self.axis, self.heads = axis, heads
        self.parts = _parts(module, weight)
        self.by_column = bool(getattr(module, "transposed", False)) or holds_columns(module)
        rows, columns, *taps = shape(module, weight)
        self.taps = math.prod(taps)
        n, d = (columns, rows // self.parts) if self.by_column else (rows // self.parts, columns)
        self.groups = self.parts * heads
        self.n, self.d = n // heads, d * self.taps
        if axis == "out":
            self.n, self.d, self.taps = self.d, self.n, 1

    def vectors(self, weight: Tensor) -> Tensor:
        """``(groups, n, d)``, a view where there is one."""
        # Input channels of all groups come first in the weight of a transposed layer: (in, out / groups, ...).
        rows = weight.unflatten(0, (self.parts, -1)).transpose(1, 1 + self.by_column).flatten(2)
        if self.heads > 1:
            rows = rows.unflatten(1, (self.heads, -1)).flatten(0, 1)
        return rows if self.axis == "in" else rows.mT

    def unordered(self, weight: Tensor) -> Tensor:
        """The neurons, their numbers in whatever order spares a copy: enough for whom angles are enough."""
        last = not self.by_column and self.heads == 1 and not weight.is_contiguous()
        if last and weight.movedim(1, -1).is_contiguous():  # channels last
            return weight.movedim(1, -1).unflatten(0, (self.parts, -1)).flatten(2)
        return self.vectors(weight)

    def weight(self, vectors: Tensor, like: Tensor) -> Tensor:
        """The weight, in the shape, type and memory format of another."""
        rows = vectors if self.axis == "in" else vectors.mT
        if self.heads > 1:
            rows = rows.unflatten(0, (self.parts, self.heads)).flatten(1, 2)
        if self.by_column:
            channels = like.shape[0] // self.parts
            found = rows.unflatten(2, (channels, -1)).transpose(1, 2).reshape(like.shape)
        else:
            found = rows.reshape(like.shape)
        found = found.to(like.dtype)
        last = like.dim() == 4 and not like.is_contiguous() and like.is_contiguous(memory_format=torch.channels_last)
        return found.contiguous(memory_format=torch.channels_last) if last else found


def _parts(module: Any, weight: str) -> int:
    """Groups of neurons of a module's weight, heads apart."""
    if isinstance(module, nn.MultiheadAttention):
        return 3 if weight == "in_proj_weight" else 1
    if isinstance(module, RECURRENT):
        gates = next((_GATES[kind.__name__] for kind in type(module).__mro__ if kind.__name__ in _GATES), 1)
        return 1 if weight.startswith("weight_hr") else gates  # that of an LSTM with proj_size
    return int(getattr(module, "groups", 1))
