"""The layers of a model as matrices of neurons: which they are, and how to read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from hypersphere.errors import ArgumentError
from hypersphere.nn.convert import _is_ordinary, _matcher, _shape
from hypersphere.nn.modules import KINDS, Decoupled

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_QUERIES = ("q", "query", "q_proj", "query_proj", "q_lin", "to_q", "wq")
_KEYS = ("k", "key", "k_proj", "key_proj", "k_lin", "to_k", "wk", "v", "value", "v_proj", "value_proj", "v_lin")
_VALUES = ("to_v", "wv", "kv", "kv_proj", "key_value", "to_kv")
_FUSED = ("qkv", "qkv_proj", "query_key_value", "to_qkv", "wqkv", "c_attn", "in_proj")
_PROJECTIONS = frozenset(_QUERIES + _KEYS + _VALUES + _FUSED)
_CLASSIFIER = {"classifier", "head", "heads", "fc", "logits"}


@dataclass(frozen=True)
class Neurons:
    """A layer's neurons: ``matrices()`` gives ``(groups, n, d)``, a neuron a row, from the layer's weight as it is now.

    Args:
        name: Name of the layer in its model.
        matrices: Function of nothing that returns the rows; gradients reach the weight.
        role: ``"hidden"`` or ``"output"``.
        constant: Whether training cannot change the angles between the neurons.
        taps: Numbers of a neuron that belong to one input channel, next to each other: those of a kernel.
        in_memory_order: The same rows, their numbers in whatever order spares a copy.
    """

    name: str
    matrices: Callable[[], Tensor]
    role: str = "hidden"
    constant: bool = False
    taps: int = 1
    in_memory_order: Callable[[], Tensor] | None = None

    def unordered(self) -> Tensor:
        """The rows ``(groups, n, d)`` for whom angles are enough: the order of the numbers in them is not defined."""
        return (self.in_memory_order or self.matrices)()


class Selection:
    """Layers of a model; ``+`` joins two selections.

    Args:
        layers: The layers.
        like: Function of nothing that returns a tensor of the model, which says where a sum over no layer is.
    """

    def __init__(self, layers: Iterable[Neurons], like: Callable[[], Tensor] | None = None) -> None:
        self.layers = list(layers)
        self._like = like

    def __iter__(self) -> Iterator[Neurons]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __add__(self, other: Selection) -> Selection:
        return Selection([*self.layers, *other.layers], self._like or other._like)

    def zero(self) -> Tensor:
        """0 on the layers' device, in float32 or wider."""
        if not self.layers and self._like is None:
            return torch.zeros(())
        like = self._like() if self._like else self.layers[0].matrices()
        return torch.zeros((), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


def neurons(name: str, rows: Callable[[], Tensor], role: str = "hidden", *, constant: bool = False) -> Selection:
    """A matrix that is no layer of a model, such as the class weights of a head, to be added to a selection.

    Args:
        name: What to call it.
        rows: Function of nothing that returns ``(n, d)``, or ``(groups, n, d)``.
        role: ``"hidden"`` or ``"output"``.
        constant: Whether training cannot change the angles between the neurons.

    Example:
        >>> weight = nn.Parameter(torch.randn(10, 8))
        >>> both = select(nn.Linear(4, 8), output=None) + neurons("head", lambda: weight, "output")
        >>> [(layer.name, layer.role, layer.matrices().shape) for layer in both]
        [('', 'hidden', torch.Size([1, 8, 4])), ('head', 'output', torch.Size([1, 10, 8]))]
    """

    def matrices() -> Tensor:
        found = rows()
        return found if found.dim() == 3 else found.unsqueeze(0)

    return Selection([Neurons(name, matrices, role, constant)])


@dataclass(frozen=True)
class _Candidate:
    """A weight of a model that holds neurons, whether chosen or not."""

    name: str
    owner: nn.Module
    matrices: Callable[[], Tensor]
    n: int
    d: int
    classifies: bool
    taps: int = 1
    in_memory_order: Callable[[], Tensor] | None = None


def select(
    model: nn.Module,
    *,
    output: str | None = "last",
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    decoupled_only: bool = False,
) -> Selection:
    """The linear, convolution and attention layers of a model, as matrices of neurons.

    A neuron is what makes one output channel, without its bias: a row of a linear layer, a kernel of a convolution
    (transposed ones included). Groups of a grouped convolution see different inputs and are matrices of their own, and
    so are the heads of attention: of ``nn.MultiheadAttention``, and of linear layers called ``query``, ``k_proj``,
    ``qkv``, ``to_q`` and the like in a module that has ``num_heads`` or another number of heads. Shared weights count
    once. Left out are layers with one neuron (in each group: depthwise convolutions) or one input, and weights that
    are quantised; embeddings are not looked at. Weights are read when ``matrices`` is called, parametrised ones through
    their parametrisation. A layer with a true attribute ``keeps_angles`` is constant. A model may name layers to leave
    alone unless they are included, by patterns in an attribute ``spared``.

    Args:
        model: Any module, or a layer.
        output: The output layer. ``"last"``: the last layer in order of registration if it is a linear one, or a 1x1
            convolution with a name such as ``classifier`` or ``head``; a model that is itself one layer has none, and
            for a model without a classifier (a backbone) say ``None``. Otherwise a pattern of its name (``"heads.*"``).
        include: Which layers to take: patterns of their names (``"stages.*"``); by default all.
        exclude: Which not to take, in the same way.
        decoupled_only: Of a model that has decoupled layers take these alone.

    Raises:
        ArgumentError: For a model without linear and convolution layers or with lazy ones, and for a pattern that no
            layer's name has.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(8, 16, 3, groups=2), nn.Flatten(), nn.Linear(16, 10))
        >>> [(layer.name, layer.role, tuple(layer.matrices().shape)) for layer in select(model)]
        [('0', 'hidden', (2, 8, 36)), ('2', 'output', (1, 10, 16))]
    """
    found = list(_candidates(model))
    if not found:
        raise ArgumentError("target", f"must contain linear or convolution layers, got {type(model).__name__}")
    names = [candidate.name for candidate in found]
    if output == "last":
        last = found[-1]
        outputs = {last.name} if last.classifies and last.owner is not model else set()
    else:
        outputs = _matching("output", () if output is None else output, names)
    included = _matching("include", include, names) or set(names)
    excluded = _matching("exclude", exclude, names)
    if not include:
        excluded |= _matching("exclude", getattr(model, "spared", ()), names)
    decoupled = decoupled_only and any(isinstance(candidate.owner, Decoupled) for candidate in found)
    layers = [
        Neurons(
            candidate.name,
            candidate.matrices,
            "output" if candidate.name in outputs else "hidden",
            bool(getattr(candidate.owner, "keeps_angles", False)),
            candidate.taps,
            candidate.in_memory_order,
        )
        for candidate in found
        if candidate.n > 1
        and candidate.d > 1
        and candidate.name in included - excluded
        and (not decoupled or isinstance(candidate.owner, Decoupled))
    ]
    return Selection(layers, lambda: next(found[0].owner.parameters()))


def _matching(argument: str, choice: str | Iterable[str], names: Sequence[str]) -> set[str]:
    """The names that have one of the patterns; each pattern must be that of some name."""
    matched: set[str] = set()
    for pattern in [choice] if isinstance(choice, str) else choice:
        matches = _matcher(argument, [pattern])
        hits = {name for name in names if matches(name, nn.Identity())}
        if not hits:
            raise ArgumentError(argument, f"must be the name or a pattern of {', '.join(names)}, got {pattern!r}")
        matched |= hits
    return matched


def _candidates(model: nn.Module) -> Iterator[_Candidate]:
    """All weights of a model that hold neurons, in order of registration, each once."""
    seen: set[int] = set()
    modules: Mapping[str, nn.Module] = dict(model.named_modules())
    for name, module in modules.items():
        if "parametrizations" in name.split("."):
            continue
        if isinstance(module, nn.MultiheadAttention):
            yield from _attention(name, module, seen)
        elif isinstance(module, tuple(KINDS)):
            parent = modules.get(name.rpartition(".")[0], module)
            candidate = _layer(name, module, parent)
            if candidate is not None and not _is_seen(module, "weight", seen):
                yield candidate
        elif type(module).__name__ == "Conv1D" and hasattr(module, "nf") and not _is_seen(module, "weight", seen):
            yield _turned(name, module, modules.get(name.rpartition(".")[0], module))


def _is_seen(owner: nn.Module, attribute: str, seen: set[int]) -> bool:
    """Whether a weight was met before; from now on it was."""
    if parametrize.is_parametrized(owner, attribute):
        originals = list(owner.parametrizations[attribute].parameters(recurse=False))  # type: ignore[index, union-attr]
        key = id(originals[0]) if originals else id(owner)
    else:
        key = id(owner._parameters.get(attribute, owner))
    if key in seen:
        return True
    seen.add(key)
    return False


def _attention(name: str, module: nn.MultiheadAttention, seen: set[int]) -> Iterator[_Candidate]:
    """The projections of queries, keys and values, by head; that of the result is a layer of its own."""
    heads, size = module.num_heads, module.head_dim
    parts = {"in_proj_weight": (3 * heads, module.embed_dim)}
    if not module._qkv_same_embed_dim:
        widths = {"q": module.embed_dim, "k": module.kdim, "v": module.vdim}
        parts = {f"{part}_proj_weight": (heads, width) for part, width in widths.items()}
    for attribute, (groups, width) in parts.items():
        if not _is_seen(module, attribute, seen):

            def matrices(attribute: str = attribute, groups: int = groups) -> Tensor:
                weight: Tensor = getattr(module, attribute)
                return weight.unflatten(0, (groups, -1))

            yield _Candidate(f"{name}.{attribute}".lstrip("."), module, matrices, size, width, False)


def _layer(name: str, module: Any, parent: nn.Module) -> _Candidate | None:
    """A layer; ``None`` for a weight that is not made of floating-point numbers."""
    if isinstance(module, LazyModuleMixin):  # an ordinary class once it has seen a batch
        raise ArgumentError("target", f"must have no lazy layer, got {name}: run a batch through the model first")
    # A parametrised weight is not looked at: some change whenever they are computed.
    if not parametrize.is_parametrized(module, "weight"):
        weight = module.weight
        # An ordinary parameter needs no more than torch.compile can follow.
        if not (weight.is_floating_point() if type(weight) is nn.Parameter else _is_ordinary(weight)):
            return None
    rows, columns, *taps = _shape(module)
    transposed = bool(getattr(module, "transposed", False))
    groups: int = getattr(module, "groups", 1)
    heads = 0 if transposed or groups > 1 else _heads(name.rpartition(".")[2].lower(), rows, parent)
    groups = heads or groups
    n, d = (columns, rows // groups) if transposed else (rows // groups, columns)

    def matrices() -> Tensor:
        # Grouped input channels come first in a transposed layer's weight: (in, out / groups, ...).
        return _weight(module).unflatten(0, (groups, -1)).transpose(1, 1 + transposed).flatten(2)

    def in_memory_order() -> Tensor:
        weight = _weight(module)
        if not weight.is_contiguous() and weight.movedim(1, -1).is_contiguous():  # channels last
            return weight.movedim(1, -1).unflatten(0, (groups, -1)).flatten(2)
        return matrices()

    classifies = isinstance(module, nn.Linear) or (
        set(taps) == {1} and not _CLASSIFIER.isdisjoint(name.lower().split("."))
    )
    classifies &= groups == 1 and not heads and not transposed and not isinstance(parent, nn.MultiheadAttention)
    size = math.prod(taps)
    return _Candidate(name, module, matrices, n, d * size, classifies, size, None if transposed else in_memory_order)


def _turned(name: str, module: Any, parent: nn.Module) -> _Candidate:
    """The linear layer of GPT-2 and its kin in transformers, whose weight has a neuron in each column."""
    d, n = module.weight.shape
    groups = _heads(name.rpartition(".")[2].lower(), n, parent) or 1
    return _Candidate(name, module, lambda: module.weight.mT.unflatten(0, (groups, -1)), n // groups, d, False)


def _heads(part: str, rows: int, parent: nn.Module) -> int:
    """How many heads make up the rows of a projection of an attention layer; 0 for any other layer."""
    heads = _number(parent, _HEADS) if part in _PROJECTIONS else 0
    if not heads:
        return 0
    size = _number(parent, ("head_dim", "attention_head_size"))
    if size and rows % size == 0:
        return rows // size
    if part in _KEYS + _VALUES:
        heads = _number(parent, _KEY_HEADS) or heads
    groups = heads * (3 if part in _FUSED else 2 if "kv" in part or part == "key_value" else 1)
    return groups if rows % groups == 0 else 1


def _number(parent: nn.Module, attributes: Iterable[str]) -> int:
    """The first of the attributes of a module, or of its configuration, that is a whole number; 0 if there is none."""
    for owner in (parent, getattr(parent, "config", None)):
        for attribute in attributes:
            value = getattr(owner, attribute, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


def _weight(module: Any) -> Tensor:
    """A layer's weight as it is now.

    One that a hook computes before each forward pass (pruning, and torch's older spectral and weight norms) is computed
    here: what the hook has left belongs to the graph of a step that is over.
    """
    if "weight" in vars(module):
        for hook in module._forward_pre_hooks.values():
            if getattr(hook, "_tensor_name", None) == "weight":
                masked: Tensor = hook.apply_mask(module)
                return masked
            if getattr(hook, "name", None) == "weight" and hasattr(hook, "compute_weight"):
                # A spectral norm must not go on with its power iteration.
                computed: Tensor = hook.compute_weight(module, *([False] if hasattr(hook, "eps") else []))
                return computed
    weight: Tensor = module.weight
    return weight
