"""Any model with decoupled layers in place of torch's: conversion in place and back, a table of it, folding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from hypersphere import neurons, selection
from hypersphere.angular import Cosine, angulars
from hypersphere.errors import ArgumentError
from hypersphere.geometry import at_least_float32
from hypersphere.nn.functional import _scaled
from hypersphere.nn.modules import KINDS, Decoupled, kind_of
from hypersphere.nn.operators import Linear, Operator
from hypersphere.nn.operators import operator as create_operator
from hypersphere.nn.optimise import decoupled_layers, project_weights
from hypersphere.nn.sharding import TAKE_A_WHOLE_ONE, check_unsharded, plain_class
from hypersphere.selection import Choice, Layer, Output, Types

M = TypeVar("M", bound=nn.Module)

_FAST = "_fast_path_before"  # attribute of a module whose fast path a conversion has switched off


def convert(
    model: M,
    operator: str | Operator = "sphere",
    *,
    types: Types | None = None,
    include: Choice | None = None,
    exclude: Choice | None = None,
    skip: str | Iterable[str] | None = ("output", "shortcut"),
    output: Output = "auto",
    project: bool = False,
    example: Any = None,
    **options: Any,
) -> M:
    """Give the convolutions and linear layers of a model a decoupled operator, in place.

    Layers stay the same objects with the same parameters and hooks, so that weights, optimisers and checkpoints of the
    model go on to serve; what an operator learns (radius, steepness) is added. :func:`revert` undoes it, and
    :func:`report` shows what became of every layer. On layers that are decoupled already the operator is exchanged.
    Convert before the model is compiled or wrapped for distributed training, and build the optimiser afterwards where
    the operator learns something.

    A layer is converted where ``types``, ``include``, ``exclude`` and ``skip`` agree. By default that is all but the
    output and the 1x1 convolutions on shortcuts, as in the second version of SphereResNet; ``skip="output"`` is the
    first version. For a feature extractor whose classifier is a head apart say ``output=None``. Left alone in any case
    are layers that do not compute what torch's layer does (subclasses with a forward pass of their own), whose weight
    another module reads (``nn.MultiheadAttention``), which have no decoupled kind (attention, embeddings, recurrent
    layers), and lazy and quantised ones.

    Args:
        model: Any module, or a layer.
        operator: The operator, by name (``hypersphere list operators``) or as an object.
        types: Classes of torch's layers, or patterns of their names (``"conv*"``).
        include: Which layers: patterns of their names in the model (``"stages.*"``), or a function of name and layer.
        exclude: Which not, in the same way.
        skip: Places to leave alone: the ``"first"`` layer, the ``"output"``, 1x1 convolutions on a ``"shortcut"`` (with
            shortcut, downsample, project or skip in their names).
        output: The output layer: its name, the module, ``None``, or ``"auto"`` for the rule of
            :mod:`hypersphere.selection`.
        project: Set the norms of kernels to 1 (:func:`hypersphere.nn.project_weights`).
        example: An input of the model (a tuple is taken as several, a mapping as keywords). It is run through the
            model to find the order of the layers, and those that are not called (the model reads their weights itself),
            which are left alone. Without it the order is that of registration.
        **options: Options of the operator; ``learn_k="network"`` makes one parameter that all converted layers share.

    Returns:
        The model.

    Raises:
        ArgumentError: For a bad argument, and where no layer is chosen; the model is unchanged then.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
        >>> convert(model, "tanh", angular="sqcos")(torch.randn(2, 3, 8, 8)).shape
        torch.Size([2, 10])
        >>> report(model)
        name  role    kind    weight   operator  angular  added  note
        0     hidden  Conv2d  8x3x3x3  tanh      sqcos        8
        3     output  Linear  10x288   -         -            0  the output (skip="output")
        1 of 2 layers decoupled, 8 parameters added
    """
    op = create_operator(operator, **options)
    if project and op.weighting != "none":
        raise ArgumentError("project", f"must be False with weighting={op.weighting!r}, where the kernel's norm counts")
    selection.check_model(model)
    check_unsharded(model, "convert it before fully_shard()")
    obstacle = _obstacles(model)
    rows = selection.select(
        model,
        types=types,
        include=include,
        exclude=exclude,
        skip=skip,
        output=output,
        example=example,
        obstacle=obstacle,
    )
    layers: list[Any] = [row.module for row in selection.chosen(model, rows)]
    if op.learn_k == "network" and len({next(module.parameters()).device for module in layers}) > 1:
        raise ArgumentError("learn_k", "must not be 'network' for layers on several devices")
    # Obstacles are seen on the layer itself, for as long as they last.
    selection.note([replace(row, reason="" if obstacle(row) else row.reason) for row in rows], "convert")
    own = create_operator(op, learn_k="layer") if op.learn_k == "network" else op
    for module in layers:
        if isinstance(module, Decoupled):
            module.set_operator(own)
        else:
            Decoupled.adopt(module, own)
    if op.learn_k == "network":
        for module in layers:
            module.operator, module.k_raw = op, layers[0].k_raw
    _switch_fast_paths(model)
    if project:
        project_weights(model, skip_weighted=True)
    return model


def revert(model: M) -> M:
    """Turn every decoupled layer of a model back into torch's, in place; what operators had learned is dropped.

    The inverse of :func:`convert`: the model computes what it did before, and bit for bit where it was not trained.

    Raises:
        ArgumentError: For a model that was folded: the norms of its kernels are lost.

    Example:
        >>> revert(convert(nn.Sequential(nn.Conv2d(3, 8, 3)), "tanh"))
        Sequential(
          (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
        )
    """
    layers = list(decoupled_layers(model))
    for name, layer in layers:
        if layer.folded:
            raise ArgumentError("model", f"must not be folded, got {name or type(layer).__name__}")
    check_unsharded(model, TAKE_A_WHOLE_ONE)
    for _, layer in layers:
        layer.release()
    selection.forget(model, "convert")
    _switch_fast_paths(model)
    return model


# --------------------------------------------------------------------------------------------- which layers


def _obstacles(model: nn.Module) -> Callable[[Layer], str]:
    """Why a layer cannot be converted; empty where it can."""
    readers: dict[nn.Module | None, str] = {}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            readers[module.out_proj] = type(module).__name__
        elif isinstance(module, getattr(nn, "LinearCrossEntropyLoss", ())):
            readers[module.linear] = type(module).__name__  # type: ignore[index]
    return lambda row: _obstacle(row.module, readers.get(row.module))


def _obstacle(module: Any, reader: str | None) -> str:
    if isinstance(module, Decoupled):
        return "folded" if module.folded else ""
    if not issubclass(type(module), tuple(KINDS)):
        quantised = neurons.is_quantised(module)
        return "quantised" if quantised else f"{type(module).__name__} has no decoupled kind"
    parametrised = parametrize.is_parametrized(module)
    base: Any = type(module).__mro__[1] if parametrised else type(module)
    # A parametrised weight is not looked at: some change whenever they are computed.
    obstacles = {
        f"{reader} reads its weight": reader is not None,
        "lazy: run a batch through the model first": isinstance(module, LazyModuleMixin),
        "quantised": not parametrised and not neurons.is_ordinary(module.weight),
        "its forward pass was replaced": "forward" in vars(module),
        f"{base.__name__} has a forward pass of its own": kind_of(base) is None,
    }
    return next((why for why, there in obstacles.items() if there), "")


def _switch_fast_paths(model: nn.Module) -> None:
    """Keep torch's encoders from computing with the weights of decoupled layers past these, or let them again."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            switch = "activation_relu_or_gelu"
        elif isinstance(module, nn.TransformerEncoder):
            switch = "use_nested_tensor"
        else:
            continue
        off = any(isinstance(inner, Decoupled) for inner in module.modules())
        if off and not hasattr(module, _FAST):
            setattr(module, _FAST, getattr(module, switch))
            setattr(module, switch, type(getattr(module, switch))(0))
        elif not off and hasattr(module, _FAST):
            setattr(module, switch, vars(module).pop(_FAST))


# ------------------------------------------------------------------------------------------------- report


class Row(NamedTuple):
    """What became of one layer.

    Attributes:
        name: Name in the model.
        kind: Class of torch's layer.
        shape: Shape of the weight.
        operator: Name of the operator; ``None`` for an ordinary layer.
        angular: Name of the angular function.
        added: Number of parameters that the operator added; one that layers share is counted for the first.
        note: More on the operator, or why the layer was left alone.
        role: ``"hidden"``, or ``"output"``.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    operator: str | None
    angular: str | None
    added: int
    note: str
    role: str = "hidden"


@dataclass(frozen=True, repr=False)
class Report:
    """The layers of a model; prints as a table.

    Attributes:
        rows: One for each weight that holds neurons, in order of registration.
    """

    rows: tuple[Row, ...]

    @property
    def converted(self) -> tuple[Row, ...]:
        """The decoupled layers."""
        return tuple(row for row in self.rows if row.operator is not None)

    @property
    def left(self) -> tuple[Row, ...]:
        """The ordinary layers."""
        return tuple(row for row in self.rows if row.operator is None)

    @property
    def added(self) -> int:
        """Number of parameters that operators added to the model."""
        return sum(row.added for row in self.rows)

    def __str__(self) -> str:
        columns = {"kind": "left", "weight": "left", "operator": "left", "angular": "left", "added": "right"}
        lines = []
        for row in self.rows:
            shape = "x".join(map(str, row.shape))
            values = (row.kind, shape, row.operator or "-", row.angular or "-", str(row.added))
            lines.append((row.name, row.role, values, row.note))
        layers = "1 layer" if len(self.rows) == 1 else f"{len(self.rows)} layers"
        total = f"{len(self.converted)} of {layers} decoupled, {self.added} parameters added"
        return f"{selection.table(columns, lines)}\n{total}"

    __repr__ = __str__


def report(model: nn.Module, *, output: Output = "auto") -> Report:
    """What the layers of a model are: decoupled by which operator, or ordinary and why.

    Args:
        model: The model.
        output: The output layer, where no conversion has decided it (:mod:`hypersphere.selection`).

    Example:
        >>> import hypersphere as hs
        >>> report(nn.Sequential(hs.nn.SphereConv2d(3, 8, 3), nn.LazyLinear(10)))
        name  role    kind        weight   operator  angular  added  note
        0     hidden  Conv2d      8x3x3x3  sphere    cosine       0
        1     output  LazyLinear  10x0     -         -            0  lazy: run a batch through the model first
        1 of 2 layers decoupled, 0 parameters added
        >>> report(hs.nn.TanhLinear(3, 4)).rows[0].added
        4
    """
    selection.check_model(model)
    obstacle = _obstacles(model)
    counted: set[nn.Parameter] = set()
    rows = []
    for layer in selection.noted(model, "convert", output=output):
        module: Any = layer.module
        kind = getattr(module, "torch_class", plain_class(module)).__name__
        shape = neurons.shape(module, layer.weight)
        if not isinstance(module, Decoupled):
            note = layer.reason or obstacle(layer)
            rows.append(Row(layer.name, kind, shape, None, None, 0, note, layer.role))
            continue
        op = module.operator
        learned = {p for p in (module.radius_raw, module.k_raw) if p is not None and p.requires_grad} - counted
        counted |= learned
        notes = [f"weighting={op.weighting}"] if op.weighting != "none" else []
        notes += [f"k learned by {op.learn_k}"] if op.learn_k else []
        notes += ["folded"] if module.folded else []
        names = module._name(), _name(op.angular)
        added = sum(p.numel() for p in learned)
        rows.append(Row(layer.name, kind, shape, *names, added, ", ".join(notes), layer.role))
    return Report(tuple(rows))


def _name(g: Any) -> str:
    entry = angulars.find(type(g))
    return entry.name if entry else type(g).__name__


# ---------------------------------------------------------------------------------------------- inference


@torch.no_grad()
def fold(model: M) -> M:
    """Compute once what depends on the weights alone, in place, for inference.

    Weights become the directions of their kernels, radii are multiplied by the running mean norms, and the operator
    ``linear`` with the cosine, which is an ordinary layer then, becomes torch's. The model computes what it did in
    evaluation, up to rounding. It is in evaluation mode and cannot be trained any more: ``model.train()`` is an error,
    its weights get no gradients, and states from before cannot be loaded. Parametrisations are taken off.

    Raises:
        ArgumentError: For a weight that a hook computes (as the old ``weight_norm`` and pruning do).

    Example:
        >>> model = convert(nn.Sequential(nn.Conv2d(3, 8, 3)), "linear").eval()
        >>> x = torch.randn(2, 3, 5, 5)
        >>> before = model(x)
        >>> torch.allclose(fold(model)(x), before, atol=1e-6), type(model[0]).__name__
        (True, 'Conv2d')
    """
    layers = [(name, layer) for name, layer in decoupled_layers(model) if not layer.folded]
    check_unsharded(model, TAKE_A_WHOLE_ONE)
    for name, layer in layers:
        if "weight" in vars(layer):
            raise ArgumentError(
                "model", f"must have no layer whose weight a hook computes, got {name or type(layer).__name__}"
            )
    model.eval()
    for _, layer in layers:
        _fold(layer)
    return model


def _fold(layer: Decoupled) -> None:
    op: Any = layer.operator
    weight = layer.weight
    kernels = layer._by_kernel(at_least_float32(weight))
    directions, norms = op.direction(kernels, tuple(range(2, kernels.dim())))
    norms = norms.flatten()
    radius, k = layer.radius, layer.k
    plain = isinstance(op, Linear) and isinstance(op.angular, Cosine)
    if plain:
        directions = op.alpha * (directions if op.weighting == "none" else kernels)
    for tensor in list(getattr(layer, "parametrizations", ())):
        parametrize.remove_parametrizations(layer, tensor)
    # A new parameter, since another module may share the old one.
    layer.weight = nn.Parameter(layer._by_layout(directions).to(weight.dtype), requires_grad=False)
    if plain:
        layer.release()
        return
    if op.weighting == "separate":  # the kernel's own magnitude is a factor
        norms = op.magnitude(norms, 1.0 if radius is None else radius) / op.alpha
    radius = None if radius is None else _scaled(radius, layer._mean_norm())
    changes: dict[str, Any] = {"weighting": "linear" if op.weighting == "separate" else op.weighting}
    changes |= {"mean_norm": False} if op.has_radius else {}
    layer._drop_state()
    layer.operator = create_operator(op, **changes)
    layer.folded = True
    layer.radius_raw = layer.k_raw = None
    for name, value in {"folded_norms": norms, "folded_radius": radius, "folded_k": k}.items():
        layer.register_buffer(name, value)
