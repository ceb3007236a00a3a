r"""Which layers of a model are meant, which of them is its output, and why the others are left out.

Everything that acts on the layers of a model asks here: :func:`hypersphere.nn.convert`, energies,
:func:`hypersphere.orthogonal.apply` and :func:`hypersphere.orthogonal.adapt`. A :class:`Layer` is one weight that
holds neurons, with the role that it plays and the reason why it was not chosen; :func:`table` prints them.

The output of a model is one layer or none. By ``output=``:

* a name, a pattern of names or a module: that layer (of a module that holds several: its last one);
* ``None``: there is none. So say for a feature extractor whose classifier is a head apart: then nothing is skipped;
* ``"auto"``, the first of these that applies:

  1. A model that is itself one layer has none. A model that only wraps another one is read as that one.
  2. A model of transformers says it itself, by ``get_output_embeddings()``.
  3. A child of the model called ``classifier``, ``head``, ``heads``, ``logits``, ``lm_head``, ``score``,
     ``qa_outputs`` or ``cls`` ends with it, if its last layer is a linear one or a 1x1 convolution and no normalisation
     follows there. Of several such children the last one counts.
  4. Of other models than those of transformers, it is the last module that has parameters or normalises, in order of
     registration (with an ``example``: of the calls of its forward pass), if that is a linear layer that the model
     holds itself or in an ``nn.Sequential``. So is a 1x1 convolution behind other layers in a model that is an
     ``nn.Sequential``, whose layers have no names, and one called ``fc``.
  5. Otherwise there is none. In particular the last linear layer of a block of a feature extractor is none, and what
     is followed by a normalisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from hypersphere import neurons
from hypersphere.errors import ArgumentError, check_choice, warn

Kind = str | type[nn.Module]
Types = Kind | Iterable[Kind]
Choice = str | Iterable[str] | Callable[[str, nn.Module], bool]
Output = str | nn.Module | None

PLACES = {"first": "the first layer", "output": "the output", "shortcut": "on a shortcut"}
"""Places that ``skip`` knows, as a reason says them."""
_WORDS = frozenset(("classifier", "head", "heads", "logits", "lm_head", "score", "qa_outputs", "cls"))
_SHORTCUT = ("shortcut", "downsample", "skip")
_NORMALISES = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm)
_RARE = (*neurons.EMBEDDINGS, *neurons.RECURRENT)
_NOTES = "_selections"  # attribute of a module: what was decided about its weights, by whom
_SHOWN = 20


@dataclass(frozen=True)
class Layer:
    """A weight of a model that holds neurons, and what was decided about it.

    Attributes:
        name: Name of its module in the model; of a module with several weights, or one that is not called ``weight``,
            with the name of the weight behind a dot.
        module: The module.
        role: ``"hidden"``, or ``"output"``.
        reason: Why it was left out; empty where it was chosen.
        weight: Name of the weight in its module.
        kind: Class of torch's module of this kind, by which ``types`` chooses; empty where it is unknown how to read
            the weight.
        names: All its names, where a module is in the model several times.
        tied: Name of an earlier layer that has the same weight; empty for most.
    """

    name: str
    module: nn.Module
    role: str = "hidden"
    reason: str = ""
    weight: str = "weight"
    kind: str = ""
    names: tuple[str, ...] = ()
    tied: str = ""

    @property
    def chosen(self) -> bool:
        """Whether it was chosen."""
        return not self.reason


# ----------------------------------------------------------------------------------------------- all layers


def layers(model: nn.Module, *, output: Output = "auto", example: Any = None) -> tuple[Layer, ...]:
    """All weights of a model that hold neurons, in order of registration, each once, with their roles.

    Linear layers, convolutions (transposed ones, too), attention, embeddings, recurrent layers, what says ``neurons =
    "rows"`` or ``"columns"`` of its weight, and, with a reason why they are left out, the matrices that other modules
    own.

    Args:
        model: Any module, or a layer.
        output: The output layer: its name, a pattern of names, the module, ``None``, or ``"auto"`` for the rule of
            :mod:`hypersphere.selection`.
        example: An input of the model (a tuple is taken as several, a mapping as keywords). It is run through the model
            to see the order of the calls.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 10))
        >>> [(layer.name, layer.kind, layer.role) for layer in layers(model)]
        [('0', 'Conv2d', 'hidden'), ('3', 'Linear', 'output')]
    """
    found = _found(model)
    outputs = _outputs(model, found, output, None if example is None else calls(model, example))
    return tuple(replace(row, role="output") if row.module in outputs else row for row in found)


def check_model(model: Any) -> None:
    """Raise an :class:`~hypersphere.errors.ArgumentError` for what is no module.

    Example:
        >>> check_model("resnet18")
        Traceback (most recent call last):
        hypersphere.errors.ArgumentError: model must be a module, got str
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError("model", f"must be a module, got {type(model).__name__}")


def _found(model: nn.Module) -> list[Layer]:
    check_model(model)
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if "parametrizations" not in name.split(".") and not getattr(module, "is_rotation", False):
            names.setdefault(module, []).append(name)
    rows: list[Layer] = []
    held: dict[int, str] = {}
    for module, called in names.items():
        for weight, kind, reason in _weights(module):
            suffix = "" if weight == "weight" else weight
            own = tuple(f"{name}.{suffix}".strip(".") for name in called)
            tied = ""
            if not isinstance(module, neurons.EMBEDDINGS):  # what shares their weight is a layer for its own sake
                key = _identity(module, weight)
                tied = held.get(key, "")
                held.setdefault(key, own[0] or type(model).__name__)
            rows.append(Layer(own[0], module, "hidden", reason, weight, kind, own, tied))
    return rows


def _weights(module: Any) -> Iterator[tuple[str, str, str]]:
    """The weights of a module that may hold neurons: name, kind and why nobody can read it."""
    known = neurons.weights(module)
    if known:
        kind = _kind(module)
        yield from ((weight, kind, "") for weight in known)
        return
    if neurons.is_quantised(module):
        name = type(module).__name__
        yield "weight", name if name in {kind.__name__ for kind in neurons.PLAIN} else "Linear", ""
        return
    for weight, value in module._parameters.items():
        if value is not None and sum(size > 1 for size in _sizes(value)) > 1 and not normalises(module):
            yield weight, "", 'unknown how its neurons lie (neurons = "rows" or "columns" of the module says it)'


def _sizes(value: Any) -> tuple[int, ...]:
    return () if is_lazy(value) else tuple(value.shape)


def _kind(module: nn.Module) -> str:
    """The name by which a type is asked for; that of torch where the class is one of torch's kinds."""
    if neurons.holds_columns(module) and hasattr(module, "nf"):
        return "Linear"
    for kind in (*neurons.PLAIN, nn.MultiheadAttention, *neurons.EMBEDDINGS):
        if isinstance(module, kind):
            return kind.__name__
    if isinstance(module, neurons.RECURRENT):
        return next(kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch."))
    return type(module).__name__


def _identity(module: Any, weight: str) -> int:
    """A number that modules with the same weight share."""
    if parametrize.is_parametrized(module, weight):
        held = module.parametrizations[weight]
        originals = [*held._parameters.values(), *held._buffers.values()]
        return id(originals[0]) if originals else id(module)
    found = module._parameters.get(weight)
    return id(module) if found is None else id(found)


def normalises(module: nn.Module) -> bool:
    """Whether a module is a normalisation, of torch or of whatever library.

    Example:
        >>> normalises(nn.BatchNorm2d(4)), normalises(nn.Linear(4, 4))
        (True, False)
    """
    return isinstance(module, _NORMALISES) or "Norm" in type(module).__name__


def calls(model: nn.Module, example: Any) -> list[nn.Module]:
    """The modules that a forward pass calls, in that order, as often as it does; the model stays as it is.

    Args:
        model: The model.
        example: An input of it: a tuple is taken as several, a mapping as keywords.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        >>> [type(module).__name__ for module in calls(model, torch.ones(3))]
        ['Sequential', 'Linear', 'ReLU']
    """
    order: list[nn.Module] = []

    def note(module: nn.Module, args: Any) -> None:
        order.append(module)

    modes = {module: module.training for module in model.modules()}
    hooks = [module.register_forward_pre_hook(note) for module in modes]
    try:
        model.eval()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            if isinstance(example, Mapping):
                model(**example)
            else:
                model(*(example if isinstance(example, tuple) else (example,)))
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    return order


# ------------------------------------------------------------------------------------------------ the output


def _outputs(
    model: nn.Module, rows: Sequence[Layer], output: Output, order: Sequence[nn.Module] | None
) -> set[nn.Module]:
    """The modules that are the output: one or none, or all that a pattern says."""
    if output is None:
        return set()
    if isinstance(output, nn.Module):
        found = _last(output, rows)
        if found is None:
            raise ArgumentError("output", f"must be a layer of the model, got {type(output).__name__}")
        return {found}
    if output == "auto":
        found = _decided(model, rows, order)
        return set() if found is None else {found}
    named = {row.module for row in rows if any(fnmatchcase(name, output) for name in row.names)}
    container = dict(model.named_modules()).get(output)
    if not named and container is not None:
        found = _last(container, rows)
        named = set() if found is None else {found}
    if not named:
        raise ArgumentError("output", f"must be the name or a pattern of {_list(rows)}, got {output!r}")
    return named


def _last(part: nn.Module, rows: Sequence[Layer]) -> nn.Module | None:
    """The last layer within a part of a model."""
    inside = set(part.modules())
    found = [row.module for row in rows if row.module in inside]
    return found[-1] if found else None


def _decided(model: nn.Module, rows: Sequence[Layer], order: Sequence[nn.Module] | None) -> nn.Module | None:
    """The output by the rule above."""
    known = {row.module for row in rows if row.kind}  # not what owns a matrix beside its layers, such as positions
    inner: nn.Module | None = model
    while inner is not None:  # a model that only wraps another one is read as that
        model, inner = inner, _wrapped(inner, known)
    if model in known:
        return None
    said: Any = getattr(model, "get_output_embeddings", None)
    answer = said() if callable(said) else None
    if answer in known:
        return answer
    events = _events(model, known, order)
    for name, child in reversed(list(model.named_children())):
        inside = set(child.modules()) if name.lower() in _WORDS else set()
        ends = [module for module in events if module in inside]
        if ends and ends[-1] in known and _may_classify(ends[-1]):
            return ends[-1]
    if callable(said) or not events or events[-1] not in known or not _may_classify(events[-1]):
        return None
    path = _path(model, events[-1])
    named = not (isinstance(model, nn.Sequential) and len(known) > 1) and path[:1] != ["fc"]
    return None if not path or (named and isinstance(events[-1], neurons.CONVOLUTIONS)) else events[-1]


def _wrapped(model: nn.Module, known: set[nn.Module]) -> nn.Module | None:
    """The one child that has all parameters of a model; ``None`` where there is none that is a model itself."""
    children = [child for child in model.children() if any(True for _ in (*child.parameters(), *child.buffers()))]
    if len(children) != 1 or children[0] in known or any(value is not None for value in model._parameters.values()):
        return None
    return None if isinstance(children[0], (nn.ModuleList, nn.ModuleDict)) else children[0]


def _events(model: nn.Module, known: set[nn.Module], order: Sequence[nn.Module] | None) -> list[nn.Module]:
    """The modules inside of a model that have parameters or normalise, in order of registration or of the calls."""
    found: dict[nn.Module, None] = {}
    for name, module in model.named_modules():
        if "parametrizations" in name.split(".") or getattr(module, "is_rotation", False) or module is model:
            continue
        if module in known or normalises(module) or any(value is not None for value in module._parameters.values()):
            found[module] = None
    return list(found) if order is None else [module for module in order if module in found]


def _may_classify(module: Any) -> bool:
    """Whether a layer is a linear one, or a 1x1 convolution without groups."""
    if isinstance(module, neurons.CONVOLUTIONS):
        return set(module.kernel_size) == {1} and module.groups == 1
    return neurons.is_linear(module) or getattr(module, "neurons", None) == "rows"


def _path(model: nn.Module, module: nn.Module) -> list[str]:
    """The names that lead from a model to a module through nothing but ``nn.Sequential``; none where others do."""
    for name, child in model.named_children():
        if child is module:
            return [name]
        if isinstance(child, nn.Sequential) and (rest := _path(child, module)):
            return [name, *rest]
    return []


# -------------------------------------------------------------------------------------------------- choosing


def select(
    model: nn.Module,
    *,
    types: Types | None = None,
    include: Choice | None = None,
    exclude: Choice | None = None,
    skip: str | Iterable[str] | None = (),
    output: Output = "auto",
    example: Any = None,
    obstacle: Callable[[Layer], str] | None = None,
) -> tuple[Layer, ...]:
    """The layers of a model, those that are chosen without a ``reason``, all others with it.

    Args:
        model: Any module, or a layer.
        types: Classes of layers, or patterns of their names (``"conv*"``); by default all but embeddings and recurrent
            layers.
        include: Which layers: patterns of their names in the model (``"stages.*"``), each of which must be that of some
            layer, or a function of name and layer.
        exclude: Which not, in the same way; a pattern that is that of no layer leaves out nothing, and is warned of.
        skip: Places to leave alone: the ``"first"`` layer, the ``"output"``, 1x1 convolutions on a ``"shortcut"`` (with
            shortcut, downsample, project or skip in their names). ``"last"`` is an older word for the output.
        output: The output layer: its name, a pattern of names, the module, ``None``, or ``"auto"`` for the rule of
            :mod:`hypersphere.selection`.
        example: An input of the model, which is run through it to find the order of the layers, and those that are not
            called (the model reads their weights itself), which are left out. Without it the order is that of
            registration.
        obstacle: Why a layer cannot be taken, whatever is asked for; empty where it can.

    Returns:
        All layers, in order of registration.

    Raises:
        ArgumentError: For a bad argument.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 10))
        >>> [(layer.name, layer.reason) for layer in select(model, types="linear", skip="output")]
        [('0', 'not in types'), ('2', ''), ('4', 'the output (skip="output")')]
    """
    places = ["output" if place == "last" else place for place in ([skip] if isinstance(skip, str) else skip or ())]
    for place in places:
        check_choice("skip", place, tuple(PLACES))
    rows = _found(model)
    order = None if example is None else calls(model, example)
    outputs = _outputs(model, rows, output, order)
    wanted = _kinds_wanted(types, rows)
    included = None if include is None else _matcher("include", include, rows)
    excluded = None if exclude is None else _matcher("exclude", exclude, rows)
    obstacles = [row.reason or ("" if obstacle is None else obstacle(row)) for row in rows]
    if order is not None:
        obstacles = [
            why or ("" if row.module in order else "the example does not call it")
            for why, row in zip(obstacles, rows, strict=True)
        ]
    _check_named("include", include, rows, obstacles)
    able = [row for row, why in zip(rows, obstacles, strict=True) if not why and not isinstance(row.module, _RARE)]
    if order is not None:
        able.sort(key=lambda row: order.index(row.module))

    def skipped(row: Layer) -> str:
        at = {"first": row in able[:1], "output": row.module in outputs, "shortcut": _on_shortcut(row)}
        place = next((place for place in places if at[place] and row.module is not model), None)
        return f'{PLACES[place]} (skip="{place}")' if place else ""

    def why(row: Layer) -> str:
        if not wanted(row):
            return "not in types"
        if included and not included(row):
            return "not in include"
        if excluded and excluded(row):
            return "in exclude"
        return skipped(row)

    return tuple(
        replace(row, role="output" if row.module in outputs else "hidden", reason=obstacle or why(row))
        for row, obstacle in zip(rows, obstacles, strict=True)
    )


def _kinds_wanted(types: Types | None, rows: Sequence[Layer]) -> Callable[[Layer], bool]:
    if types is None:
        return lambda row: not isinstance(row.module, _RARE)
    recurrent = (nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell)
    known = (*neurons.PLAIN, nn.MultiheadAttention, *neurons.EMBEDDINGS, *recurrent)
    names = dict.fromkeys([*(kind.__name__ for kind in known), *(row.kind for row in rows if row.kind)])
    classes: list[type[nn.Module]] = []
    kinds: set[str] = set()
    for kind in [types] if isinstance(types, (str, type)) else types:
        if isinstance(kind, str):
            pattern = kind.lower().replace("-", "").replace("_", "")
            matched = {name for name in names if fnmatchcase(name.lower(), pattern)}
        else:
            matched = {k.__name__ for k in known if issubclass(k, kind) or issubclass(kind, k)}
            matched |= {row.kind for row in rows if isinstance(row.module, kind) and row.kind}
            classes.append(kind)
        if not matched:
            given = kind if isinstance(kind, str) else kind.__name__
            raise ArgumentError("types", f"must be among {', '.join(names)}, got {given}")
        # The linear layer of transformers is one, too.
        kinds |= matched if isinstance(kind, str) else {"Linear"} & {kind.__name__}
    return lambda row: row.kind in kinds or isinstance(row.module, tuple(classes))


def _matcher(argument: str, choice: Choice, rows: Sequence[Layer]) -> Callable[[Layer], bool]:
    if callable(choice):
        return lambda row: any(choice(name, row.module) for name in row.names)
    patterns = [choice] if isinstance(choice, str) else list(choice) if isinstance(choice, Iterable) else [choice]
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ArgumentError(argument, f"must be patterns of names or a function, got {choice!r}")
        if any(fnmatchcase(name, pattern) for row in rows for name in row.names):
            continue
        if argument == "include":
            raise ArgumentError(argument, f"must be the name or a pattern of {_list(rows)}, got {pattern!r}")
        warn(f"{argument} has the pattern {pattern!r}, which is that of no layer: there are {_list(rows)}")
    return lambda row: any(fnmatchcase(name, pattern) for name in row.names for pattern in patterns)


def _check_named(argument: str, choice: Choice | None, rows: Sequence[Layer], obstacles: Sequence[str]) -> None:
    """Raise for a layer that is asked for by its whole name, and cannot be taken."""
    asked = {choice} if isinstance(choice, str) else set() if choice is None or callable(choice) else set(choice)
    for row, obstacle in zip(rows, obstacles, strict=True):
        if obstacle and asked & set(row.names) - {""}:
            raise ArgumentError(argument, f"must not name {row.name}: {obstacle}")


def _on_shortcut(row: Layer) -> bool:
    module: Any = row.module
    if not isinstance(module, neurons.CONVOLUTIONS) or set(module.kernel_size) != {1}:
        return False
    # "project" must be a whole part: mobile networks have a project_conv on their main path.
    return any("project" in name.split(".") or any(word in name.lower() for word in _SHORTCUT) for name in row.names)


def _list(rows: Sequence[Layer]) -> str:
    names = [row.name or "'' (the model itself)" for row in rows if not row.reason] or ["a layer (there is none)"]
    return ", ".join([*names[:_SHOWN], *(["..."] if len(names) > _SHOWN else [])])


def chosen(model: nn.Module, rows: Iterable[Layer], argument: str = "model") -> list[Layer]:
    """The chosen ones of all layers of a model, of which there must be some.

    Args:
        model: The model.
        rows: Its layers.
        argument: The argument to blame where none is chosen.

    Raises:
        ArgumentError: Where there is none, with the reason for each.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        >>> [layer.name for layer in chosen(model, select(model, include="0"))]
        ['0']
    """
    rows = list(rows)
    found = [row for row in rows if row.chosen]
    if not found:
        lines = [f"{row.name or 'the model'} ({type(row.module).__name__}): {row.reason}" for row in rows]
        if len(lines) > _SHOWN:
            lines[_SHOWN:] = [f"and {len(lines) - _SHOWN} more"]
        listed = "\n  ".join(["these:", *lines]) if lines else "no convolution or linear layer"
        verb = "have a layer that is chosen" if argument == "model" else "choose a layer"
        raise ArgumentError(argument, f"must {verb}, got {listed}")
    return found


# ------------------------------------------------------------------------------------- what was decided, shown


def note(rows: Iterable[Layer], by: str) -> None:
    """Keep on the modules themselves what somebody decided about them, for :func:`noted`.

    Args:
        rows: The layers.
        by: Who decided.
    """
    for row in rows:
        held = dict(vars(row.module).get(_NOTES, {}))
        held[by, row.weight] = (row.role, row.reason)
        object.__setattr__(row.module, _NOTES, held)


def noted(model: nn.Module, by: str, *, output: Output = "auto") -> tuple[Layer, ...]:
    """All layers of a model with what was decided about them; ``reason`` is empty where nothing was.

    Args:
        model: The model.
        by: Who decided.
        output: The output, where nothing was decided.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        >>> note(select(model, skip="first", output="0"), "me")
        >>> [(layer.role, layer.reason) for layer in noted(model, "me")]
        [('output', 'the first layer (skip="first")'), ('hidden', '')]
    """
    found = []
    for row in layers(model, output=output):
        role, reason = vars(row.module).get(_NOTES, {}).get((by, row.weight), (row.role, row.reason))
        found.append(replace(row, role=role, reason=reason))
    return tuple(found)


def forget(model: nn.Module, by: str) -> None:
    """Drop what :func:`note` has kept."""
    for module in model.modules():
        held = vars(module).pop(_NOTES, {})
        rest = {key: value for key, value in held.items() if key[0] != by}
        if rest:
            object.__setattr__(module, _NOTES, rest)


def kept(model: nn.Module) -> dict[nn.Module, Any]:
    """What :func:`note` has kept of all layers, for :func:`restore`.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        >>> before = kept(model)
        >>> note(select(model, skip="first"), "me")
        >>> restore(before)
        >>> noted(model, "me")[0].reason
        ''
    """
    return {module: vars(module).get(_NOTES) for module in model.modules()}


def restore(before: Mapping[nn.Module, Any]) -> None:
    """Put back what :func:`kept` has found."""
    for module, held in before.items():
        if held is None:
            vars(module).pop(_NOTES, None)
        else:
            object.__setattr__(module, _NOTES, held)


def table(columns: Mapping[str, str], rows: Iterable[tuple[str, str, Sequence[str], str]]) -> str:
    """The table that all reports print: name and role of each layer, what the report tells of it, and why it was left.

    Args:
        columns: Title of each column -> ``"left"`` or ``"right"``, how it is aligned.
        rows: Name, role, cells and note of each layer. Where cells are missing (all of them, for a layer that was left
            out) there are dashes.

    Example:
        >>> print(table({"size": "right"}, [("0", "hidden", ["12"], ""), ("2", "output", [], 'skip="output"')]))
        name  role    size  note
        0     hidden    12
        2     output     -  skip="output"
    """
    cells = [("name", "role", *columns, "note")]
    cells += [(name, role, *values, *["-"] * (len(columns) - len(values)), note) for name, role, values, note in rows]
    aligned = ("left", "left", *columns.values())
    width = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        padded = [
            text.rjust(size) if side == "right" else text.ljust(size)
            for text, size, side in zip(line[:-1], width[:-1], aligned, strict=True)
        ]
        lines.append("  ".join([*padded, line[-1]]).rstrip())
    return "\n".join(lines)
