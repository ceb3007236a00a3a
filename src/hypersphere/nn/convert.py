"""Any model with decoupled layers in place of torch's: conversion in place and back, a table of it, folding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from hypersphere.angular import Cosine, angulars
from hypersphere.errors import ArgumentError, check_choice
from hypersphere.geometry import at_least_float32
from hypersphere.nn.functional import _scaled
from hypersphere.nn.modules import KINDS, Decoupled, kind_of
from hypersphere.nn.operators import Linear, Operator
from hypersphere.nn.operators import operator as create_operator
from hypersphere.nn.optimise import decoupled_layers, project_weights

M = TypeVar("M", bound=nn.Module)
Kind = str | type[nn.Module]
Choice = str | Iterable[str] | Callable[[str, nn.Module], bool]

_PLACES = {"first": "the first layer", "last": "the classifier", "shortcut": "on a shortcut"}
_SHORTCUT = ("shortcut", "downsample", "skip")
_WHY = "_why_ordinary"  # attribute of a layer that a conversion has left alone
_FAST = "_fast_path_before"  # attribute of a module whose fast path a conversion has switched off
_SHOWN = 20


def convert(
    model: M,
    operator: str | Operator = "sphere",
    *,
    types: Kind | Iterable[Kind] = tuple(KINDS),
    include: Choice | None = None,
    exclude: Choice | None = None,
    skip: str | Iterable[str] | None = ("last", "shortcut"),
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
    classifier and the 1x1 convolutions on shortcuts, as in the second version of SphereResNet; ``skip="last"`` is the
    first version. A model without a classifier (a backbone) wants ``skip="shortcut"``, and a convolution that
    classifies is to be named in ``exclude``. Left alone in any case are layers that do not compute what torch's layer
    does (subclasses with a forward pass of their own), whose weight another module reads
    (``nn.MultiheadAttention``), and lazy and quantised ones.

    Args:
        model: Any module, or a layer.
        operator: The operator, by name (``hypersphere list operators``) or as an object.
        types: Classes of torch's layers, or patterns of their names (``"conv*"``).
        include: Which layers: patterns of their names in the model (``"stages.*"``), or a function of name and layer.
        exclude: Which not, in the same way.
        skip: Places to leave alone: ``"first"`` layer, ``"last"`` linear layer (the classifier), ``"shortcut"`` (1x1
            convolutions with shortcut, downsample, project or skip in their names).
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
        name  kind    weight   operator  angular  added  note
        0     Conv2d  8x3x3x3  tanh      sqcos        8
        3     Linear  10x288   -         -            0  the classifier (skip="last")
        1 of 2 layers decoupled, 8 parameters added
    """
    op = create_operator(operator, **options)
    if project and op.weighting != "none":
        raise ArgumentError("project", f"must be False with weighting={op.weighting!r}, where the kernel's norm counts")
    why = _choose(
        model, _classes(types), include, exclude, [skip] if isinstance(skip, str) else list(skip or ()), example
    )
    chosen = [module for module, reason in why.items() if not reason]
    if op.learn_k == "network" and len({next(module.parameters()).device for module in chosen}) > 1:
        raise ArgumentError("learn_k", "must not be 'network' for layers on several devices")
    obstacles = _obstacles(model, why)
    for module, reason in why.items():
        vars(module).pop(_WHY, None)
        if reason:
            if not obstacles[module]:  # those are seen on the layer itself, for as long as they last
                setattr(module, _WHY, reason)
        elif isinstance(module, Decoupled):
            module.set_operator(op)
        else:
            Decoupled.adopt(module, op)
    if op.learn_k == "network":
        shared: Any = chosen[0]
        for module in chosen:
            module.k_raw = shared.k_raw
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
    for _, layer in layers:
        layer.release()
    for module in model.modules():
        vars(module).pop(_WHY, None)
    _switch_fast_paths(model)
    return model


# --------------------------------------------------------------------------------------------- which layers


def _layers(model: nn.Module) -> dict[nn.Module, list[str]]:
    """All convolutions and linear layers with their names in the model, in order of registration."""
    known = {kind.__name__ for kind in KINDS}
    found: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        quantised = type(module).__module__.startswith("torch.ao.nn") and type(module).__name__ in known
        if (quantised or isinstance(module, tuple(KINDS))) and "parametrizations" not in name.split("."):
            found.setdefault(module, []).append(name)
    return found


def _obstacles(model: nn.Module, layers: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """Why a layer cannot be converted; empty where it can."""
    readers: dict[nn.Module | None, str] = {}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            readers[module.out_proj] = type(module).__name__
        elif isinstance(module, getattr(nn, "LinearCrossEntropyLoss", ())):
            readers[module.linear] = type(module).__name__  # type: ignore[index]
    return {module: _obstacle(module, readers.get(module)) for module in layers}


def _obstacle(module: nn.Module, reader: str | None) -> str:
    if isinstance(module, Decoupled):
        return "folded" if module.folded else ""
    if reader is not None:
        return f"{reader} reads its weight"
    if isinstance(module, LazyModuleMixin):
        return "lazy: run a batch through the model first"
    parametrised = parametrize.is_parametrized(module)
    # A parametrised weight is not looked at: some change whenever they are computed.
    if not parametrised and not _is_ordinary(module.weight):
        return "quantised"
    if "forward" in vars(module):
        return "its forward pass was replaced"
    base = type(module).__mro__[1] if parametrised else type(module)
    return "" if kind_of(base) else f"{base.__name__} has a forward pass of its own"


def _is_ordinary(weight: Any) -> bool:
    quantised = type(weight).__module__.startswith("torchao")
    return isinstance(weight, Tensor) and weight.is_floating_point() and not quantised


@torch.no_grad()
def _called(model: nn.Module, layers: Iterable[nn.Module], example: Any) -> list[nn.Module]:
    """The layers that the forward pass calls, in that order."""
    order: dict[nn.Module, None] = {}

    def note(module: nn.Module, args: Any) -> None:
        order.setdefault(module)

    modes = {module: module.training for module in model.modules()}
    hooks = [module.register_forward_pre_hook(note) for module in layers]
    try:
        model.eval()
        with torch.compiler.set_stance("force_eager"):
            if isinstance(example, Mapping):
                model(**example)
            else:
                model(*(example if isinstance(example, tuple) else (example,)))
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    return list(order)


def _classes(types: Kind | Iterable[Kind]) -> tuple[type[nn.Module], ...]:
    """The classes that are meant."""
    found: list[type[nn.Module]] = []
    for kind in [types] if isinstance(types, (str, type)) else types:
        if isinstance(kind, str):
            pattern = kind.lower().replace("-", "").replace("_", "")
            matched = [k for k in KINDS if fnmatchcase(k.__name__.lower(), pattern)]
        else:
            matched = [k for k in KINDS if issubclass(k, kind)]
            matched += [kind] if issubclass(kind, tuple(KINDS)) and kind not in KINDS else []
        if not matched:
            known = ", ".join(k.__name__ for k in KINDS)
            raise ArgumentError(
                "types", f"must be among {known}, got {kind if isinstance(kind, str) else kind.__name__}"
            )
        found += matched
    return tuple(found)


def _matcher(argument: str, choice: Choice) -> Callable[[str, nn.Module], bool]:
    if callable(choice):
        return choice
    patterns = [choice] if isinstance(choice, str) else list(choice)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ArgumentError(argument, f"must be patterns of names or a function, got {patterns}")
    return lambda name, module: any(fnmatchcase(name, pattern) for pattern in patterns)


def _choose(
    model: nn.Module,
    classes: tuple[type[nn.Module], ...],
    include: Choice | None,
    exclude: Choice | None,
    places: list[str],
    example: Any,
) -> dict[nn.Module, str]:
    """Why each layer is left alone; empty for the layers that are chosen, of which there are some."""
    if not isinstance(model, nn.Module):
        raise ArgumentError("model", f"must be a module, got {type(model).__name__}")
    for place in places:
        check_choice("skip", place, tuple(_PLACES))
    layers = _layers(model)
    obstacles = _obstacles(model, layers)
    if example is not None:
        called = _called(model, layers, example)
        idle = [module for module in layers if module not in called]
        obstacles |= {module: obstacles[module] or "the example does not call it" for module in idle}
        layers = {module: layers[module] for module in [*idle, *called]}
    able = [module for module in layers if not obstacles[module]]
    linear = [m for m in layers if isinstance(m, nn.Linear) and "reads" not in obstacles[m]]
    shortcut = [module for module, names in layers.items() if _on_shortcut(module, names)]
    at: dict[str, set[nn.Module]] = {"first": {*able[:1]}, "last": {*linear[-1:]}, "shortcut": {*shortcut}}
    skipped = {module: place for place in reversed(places) for module in at[place] if module is not model}
    reasons = _reasons(layers, obstacles, classes, include, exclude, skipped)
    if all(reasons.values()):
        raise ArgumentError("model", f"must have a layer that is chosen, got {_listed(layers, reasons)}")
    return reasons


def _reasons(
    layers: Mapping[nn.Module, list[str]],
    obstacles: Mapping[nn.Module, str],
    classes: tuple[type[nn.Module], ...] | None,
    include: Choice | None,
    exclude: Choice | None,
    skipped: Mapping[nn.Module, str],
) -> dict[nn.Module, str]:
    """Why each layer is left alone; empty for the layers that are chosen."""
    included = None if include is None else _matcher("include", include)
    excluded = None if exclude is None else _matcher("exclude", exclude)

    def why(module: nn.Module, names: list[str]) -> str:
        if obstacles[module]:
            return obstacles[module]
        if classes is not None and not isinstance(module, classes):
            return "not in types"
        if included and not any(included(name, module) for name in names):
            return "not in include"
        if excluded and any(excluded(name, module) for name in names):
            return "in exclude"
        place = skipped.get(module)
        return f'{_PLACES[place]} (skip="{place}")' if place else ""

    return {module: why(module, names) for module, names in layers.items()}


def _on_shortcut(module: Any, names: list[str]) -> bool:
    if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) or set(module.kernel_size) != {1}:
        return False
    # "project" must be a whole part: mobile networks have a project_conv on their main path.
    return any("project" in name.split(".") or any(word in name.lower() for word in _SHORTCUT) for name in names)


def _listed(layers: Mapping[nn.Module, list[str]], why: Mapping[nn.Module, str]) -> str:
    """The layers of a model, for a message."""
    lines = [f"{names[0] or 'the model'} ({type(m).__name__}): {why[m]}" for m, names in layers.items()]
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"and {len(lines) - _SHOWN} more"]
    return "\n  ".join(["these:", *lines]) if lines else "no convolution or linear layer"


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
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    operator: str | None
    angular: str | None
    added: int
    note: str


@dataclass(frozen=True, repr=False)
class Report:
    """The convolutions and linear layers of a model; prints as a table.

    Attributes:
        rows: One for each layer, in order of registration.
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
        cells = [("name", "kind", "weight", "operator", "angular", "added", "note")]
        for row in self.rows:
            shape = "x".join(map(str, row.shape))
            cells.append((row.name, row.kind, shape, row.operator or "-", row.angular or "-", str(row.added), row.note))
        width = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = []
        for *texts, added, note in cells:
            padded = [text.ljust(width[i]) for i, text in enumerate(texts)]
            lines.append("  ".join([*padded, added.rjust(width[-2]), note]).rstrip())
        layers = "1 layer" if len(self.rows) == 1 else f"{len(self.rows)} layers"
        lines.append(f"{len(self.converted)} of {layers} decoupled, {self.added} parameters added")
        return "\n".join(lines)

    __repr__ = __str__


def report(model: nn.Module) -> Report:
    """What the convolutions and linear layers of a model are: decoupled by which operator, or ordinary and why.

    Example:
        >>> import hypersphere as hs
        >>> report(nn.Sequential(hs.nn.SphereConv2d(3, 8, 3), nn.LazyLinear(10)))
        name  kind        weight   operator  angular  added  note
        0     Conv2d      8x3x3x3  sphere    cosine       0
        1     LazyLinear  10x0     -         -            0  lazy: run a batch through the model first
        1 of 2 layers decoupled, 0 parameters added
        >>> report(hs.nn.TanhLinear(3, 4)).rows[0].added
        4
    """
    layers = _layers(model)
    obstacles = _obstacles(model, layers)
    counted: set[nn.Parameter] = set()
    rows = []
    for module, names in layers.items():
        kind = getattr(module, "torch_class", type(module))
        shape = _shape(module)
        if not isinstance(module, Decoupled):
            note = obstacles[module] or getattr(module, _WHY, "")
            rows.append(Row(names[0], kind.__name__, shape, None, None, 0, note))
            continue
        op = module.operator
        learned = {p for p in (module.radius_raw, module.k_raw) if p is not None and p.requires_grad} - counted
        counted |= learned
        notes = [f"weighting={op.weighting}"] if op.weighting != "none" else []
        notes += [f"k learned by {op.learn_k}"] if op.learn_k else []
        notes += ["folded"] if module.folded else []
        added = sum(p.numel() for p in learned)
        rows.append(Row(names[0], kind.__name__, shape, module._name(), _name(op.angular), added, ", ".join(notes)))
    return Report(tuple(rows))


def _shape(layer: Any) -> tuple[int, ...]:
    """Shape of the weight, which is not looked at."""
    if hasattr(layer, "in_features"):
        return layer.out_features, layer.in_features
    channels = layer.out_channels, layer.in_channels
    rows, columns = reversed(channels) if layer.transposed else channels
    return rows, columns // layer.groups, *layer.kernel_size


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
