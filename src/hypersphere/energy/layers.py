"""The layers of a model as matrices of neurons: which they are, and how to read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from hypersphere import neurons as reading
from hypersphere import selection
from hypersphere.errors import ArgumentError
from hypersphere.neurons import Layout
from hypersphere.nn.modules import Decoupled
from hypersphere.selection import Choice, Layer, Output, Types


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
        sharded: Function of nothing that returns the weight where it is sharded over processes, else ``None``.
        read: Function of that weight, gathered, that returns the rows.
    """

    name: str
    matrices: Callable[[], Tensor]
    role: str = "hidden"
    constant: bool = False
    taps: int = 1
    in_memory_order: Callable[[], Tensor] | None = None
    sharded: Callable[[], Tensor | None] = lambda: None
    read: Callable[[Tensor], Tensor] = lambda weight: weight

    def unordered(self) -> Tensor:
        """The rows ``(groups, n, d)`` for whom angles are enough: the order of the numbers in them is not defined."""
        return (self.in_memory_order or self.matrices)()


class Selection:
    """Layers of a model; ``+`` joins two selections.

    Args:
        layers: The layers.
        like: Function of nothing that returns a tensor of the model, which says where a sum over no layer is.
        left: What was left out of the model's layers, with the reasons.
    """

    def __init__(
        self,
        layers: Iterable[Neurons],
        like: Callable[[], Tensor] | None = None,
        left: Iterable[Layer] = (),
    ) -> None:
        self.layers = list(layers)
        self.left = tuple(left)
        self._like = like

    def __iter__(self) -> Iterator[Neurons]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __add__(self, other: Selection) -> Selection:
        return Selection([*self.layers, *other.layers], self._like or other._like, [*self.left, *other.left])

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

    def read(found: Tensor) -> Tensor:
        return found if found.dim() == 3 else found.unsqueeze(0)

    def sharded() -> Tensor | None:
        found = rows()
        return found if reading.is_sharded(found) else None

    def matrices() -> Tensor:
        return read(reading.whole(rows()))

    return Selection([Neurons(name, matrices, role, constant, sharded=sharded, read=read)])


def select(
    model: nn.Module,
    *,
    output: Output = "auto",
    types: Types | None = None,
    include: Choice = (),
    exclude: Choice = (),
    skip: str | Iterable[str] | None = (),
    decoupled_only: bool = False,
) -> Selection:
    """The linear, convolution and attention layers of a model, as matrices of neurons.

    A neuron is what makes one output channel, without its bias: a row of a linear layer, a kernel of a convolution
    (transposed ones included). Groups of a grouped convolution see different inputs and are matrices of their own, and
    so are the heads of attention: of ``nn.MultiheadAttention``, and of linear layers called ``query``, ``k_proj``,
    ``qkv``, ``to_q`` and the like in a module that has ``num_heads`` or another number of heads
    (:mod:`hypersphere.neurons`). Shared weights count once. Left out are layers with one neuron (in each group:
    depthwise convolutions) or one input, and weights that are quantised; ``left`` of the selection says so. Embeddings
    and recurrent layers have to be asked for by ``types``. Weights are read when ``matrices`` is called, parametrised
    ones through their parametrisation. A layer with a true attribute ``keeps_angles`` is constant. A model may name
    layers to leave alone unless they are included, by patterns in an attribute ``spared``.

    Args:
        model: Any module, or a layer.
        output: The output layer: its name, a pattern of names (``"heads.*"``), the module, ``None`` (for a feature
            extractor whose classifier is a head apart), or ``"auto"`` for the rule of :mod:`hypersphere.selection`.
        types: Classes of layers, or patterns of their names (``"conv*"``); by default all but embeddings and recurrent
            ones.
        include: Which layers to take: patterns of their names (``"stages.*"``), or a function of name and layer; by
            default all.
        exclude: Which not to take, in the same way.
        skip: Places to leave out: ``"first"``, ``"output"``, ``"shortcut"``, as in
            :func:`hypersphere.selection.select`.
        decoupled_only: Of a model that has decoupled layers take these alone.

    Raises:
        ArgumentError: For a model without such layers or with lazy ones, and for a pattern of ``include`` that no
            layer's name has.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(8, 16, 3, groups=2), nn.Flatten(), nn.Linear(16, 10))
        >>> [(layer.name, layer.role, tuple(layer.matrices().shape)) for layer in select(model)]
        [('0', 'hidden', (2, 8, 36)), ('2', 'output', (1, 10, 16))]
    """
    decoupled = decoupled_only and any(isinstance(module, Decoupled) for module in model.modules())
    selection.check_model(model)
    parents = dict(model.named_modules())
    spared = () if include else getattr(model, "spared", ())
    layouts: dict[str, Layout] = {}

    def obstacle(row: Layer) -> str:
        found = _readable(row)
        if found:
            return found
        layouts[row.name] = layout = _layout(row, parents)
        if layout.n == 1:
            return "one neuron" + (" in each group" if layout.groups > 1 else "")
        if layout.d == 1:
            return "neurons of one number"
        if decoupled and not isinstance(row.module, Decoupled):
            return "not decoupled"
        return "spared by the model" if any(fnmatchcase(row.name, pattern) for pattern in spared) else ""

    rows = selection.select(
        model,
        types=types,
        include=include or None,
        exclude=exclude or None,
        skip=skip,
        output=output,
        obstacle=obstacle,
    )
    if not any(row.kind and not isinstance(row.module, (*reading.EMBEDDINGS, *reading.RECURRENT)) for row in rows):
        raise ArgumentError("target", f"must contain linear or convolution layers, got {type(model).__name__}")
    found = [_neurons(row, layouts[row.name]) for row in rows if row.chosen]
    first = next(row.module for row in rows if row.kind)
    return Selection(found, lambda: next(first.parameters()), [row for row in rows if not row.chosen])


def _readable(row: Layer) -> str:
    """Why the weight of a layer cannot be read; empty where it can."""
    module: Any = row.module
    if isinstance(module, LazyModuleMixin):  # an ordinary class once it has seen a batch
        raise ArgumentError("target", f"must have no lazy layer, got {row.name}: run a batch through the model first")
    if row.tied:
        return f"has the weight of {row.tied}"
    if reading.is_quantised(module):
        return "quantised"
    # A parametrised weight is not looked at: some change whenever they are computed.
    if parametrize.is_parametrized(module, row.weight) or reading.is_ordinary(getattr(module, row.weight)):
        return ""
    return "quantised"


def _layout(row: Layer, parents: Mapping[str, nn.Module]) -> Layout:
    """How to read a layer: by head where it projects for attention."""
    module: Any = row.module
    if isinstance(module, nn.MultiheadAttention):
        return Layout(module, weight=row.weight, heads=module.num_heads)
    layout = Layout(module, weight=row.weight)
    if not reading.is_linear(module):
        return layout
    parent, _, part = row.name.rpartition(".")
    heads = reading.heads(part, layout.n, parents.get(parent, module))
    return Layout(module, weight=row.weight, heads=heads) if heads > 1 else layout


def _neurons(row: Layer, layout: Layout) -> Neurons:
    module, weight = row.module, row.weight

    def sharded() -> Tensor | None:
        found = module._parameters.get(weight)  # of a parametrised weight there is none
        return found if reading.is_sharded(found) else None

    return Neurons(
        row.name,
        lambda: layout.vectors(reading.current(module, weight)),
        row.role,
        bool(getattr(module, "keeps_angles", False)),
        layout.taps,
        lambda: layout.unordered(reading.current(module, weight)),
        sharded,
        layout.vectors,
    )
