"""Parameter groups by role: what weight decay must spare, and what has a learning rate of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from hypersphere import selection
from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.neurons import is_sharded
from hypersphere.nn import Decoupled
from hypersphere.nn.sharding import settle
from hypersphere.selection import Choice, Layer, Output, Types, check_model

_ROLES = ("", "-vectors", "-kernels", "-operators", "-rotations", "-matrices")


@dataclass(frozen=True)
class Rule:
    """Another learning rate or weight decay for some parameters: by name, by layer, or both.

    Args:
        match: Pattern of their names, which begin with ``model.`` or ``head.``.
        lr: Factor on the learning rate.
        weight_decay: Weight decay; by default as usual.
        types: Of which layers of the model, by their classes, or patterns of these; with any of the words from here on
            the rule is for what those layers own that :func:`hypersphere.selection.select` chooses.
        include: By patterns of the names of layers (``"features.*"``), or a function of name and layer.
        exclude: Of which not, in the same way.
        skip: Places to leave alone: ``"first"``, ``"output"``, ``"shortcut"``.
        output: The output layer: its name, the module, ``None``, or ``"auto"``.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 4))
        >>> groups = parameter_groups(model, lr=0.1, rules=[Rule("*.bias", lr=2.0), Rule(types="conv2d", lr=0.0)])
        >>> [(group["name"], len(group["params"]), group["lr"]) for group in groups]
        [('model', 1, 0.1), ('model-*.bias', 2, 0.2), ('model-types=conv2d', 1, 0.0)]
    """

    match: str = "*"
    lr: float = 1.0
    weight_decay: float | None = None
    types: Types | None = None
    include: Choice | None = None
    exclude: Choice | None = None
    skip: str | Iterable[str] | None = None
    output: Output = "auto"

    @property
    def _words(self) -> dict[str, Any]:
        words = {key: getattr(self, key) for key in ("types", "include", "exclude", "skip")}
        return {key: value for key, value in words.items() if value is not None and value != ()}

    @property
    def title(self) -> str:
        """How its groups are called."""
        given = [f"{key}={_title(value)}" for key, value in self._words.items()]
        return " ".join([self.match] * (self.match != "*" or not given) + given)

    def parameters(self, model: nn.Module) -> set[Tensor] | None:
        """What the layers that it chooses own; ``None``: it chooses none."""
        if not self._words:
            return None
        rows = selection.select(model, output=self.output, **self._words)
        chosen = selection.chosen(model, rows)
        own: set[Tensor] = {p for row in chosen for part in _parts(row.module) for p in part}
        left = {p for row in rows if not row.chosen and row.kind for p in _weight(row)}
        return own - (left - {p for row in chosen for p in _weight(row)})


def _title(value: Any) -> str:
    values = [value] if isinstance(value, (str, type)) or callable(value) else value
    return ",".join(one if isinstance(one, str) else getattr(one, "__name__", type(one).__name__) for one in values)


def _parts(module: nn.Module) -> Iterator[Iterator[nn.Parameter]]:
    """What a module owns itself, and what its weights are computed from."""
    yield module.parameters(recurse=False)
    if parametrize.is_parametrized(module):
        yield module.parametrizations.parameters()  # type: ignore[union-attr]


def _weight(row: Layer) -> list[Tensor]:
    """The parameters of one weight of a module, or those that it is computed from."""
    module: Any = row.module
    if parametrize.is_parametrized(module, row.weight):
        return list(module.parametrizations[row.weight].parameters())
    return [p for p in (module._parameters.get(row.weight),) if p is not None]


def parameter_groups(
    model: nn.Module,
    head: nn.Module | None = None,
    *,
    lr: float,
    weight_decay: float = 0.0,
    head_lr: float | None = None,
    rotation_lr: float | None = None,
    rotation_decay: float = 0.0,
    decay: str = "all",
    rules: Sequence[Rule] = (),
) -> list[dict[str, Any]]:
    """Groups of trainable parameters for any optimiser, with weight decay where it belongs; the trainer uses the same.

    The name of a group is ``model`` or ``head`` and, for what weight decay spares, the role: the ``-kernels`` of
    decoupled layers whose norm does not count, the radii and steepnesses of their ``-operators``, the ``-rotations`` of
    orthogonal training, the orthogonal ``-matrices`` themselves (with ``orthogonal`` for
    :class:`hypersphere.optim.OGD`, which keeps them so) and, with ``decay="weights"``, the ``-vectors``: biases and
    what normalisations learn. A parameter that several modules share is in one group; the weight of a decoupled layer
    that an ordinary layer shares is decayed for the sake of that one. Groups without parameters are left out. Those of
    a sharded model are the same, of its sharded parameters.

    Args:
        model: The model.
        head: The head, where it is apart.
        lr: Learning rate.
        weight_decay: Weight decay.
        head_lr: Learning rate of the head; by default the same.
        rotation_lr: Learning rate of the model's rotations and orthogonal matrices; by default the same. Those of the
            head have the same ratio to ``head_lr``. Without normalisation layers ten times ``lr`` may be best.
        rotation_decay: Weight decay of the unconstrained parameters of rotations.
        decay: ``"all"``, or ``"weights"``, which spares vectors.
        rules: Rates and decays by name and layer; the first that fits counts. Their groups are called ``-PATTERN``, or
            ``-PATTERN-vectors`` where the decay is spared; of layers ``-types=PATTERN`` and so on. They do not apply to
            the roles above, vectors aside.

    Returns:
        Each with ``name``, ``params``, ``lr`` and ``weight_decay``.

    Raises:
        ArgumentError: For a bad argument, and for a rule that fits no parameter.

    Example:
        >>> import torch, hypersphere as hs
        >>> model = hs.nn.convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 4)), "tanh", output=None)
        >>> groups = hs.parameter_groups(model, hs.losses.ArcFace(4, 10), lr=0.1, weight_decay=5e-4)
        >>> [(group["name"], len(group["params"]), group["weight_decay"]) for group in groups]
        [('model', 2, 0.0005), ('model-kernels', 2, 0.0), ('model-operators', 2, 0.0), ('head', 1, 0.0005)]
        >>> optimiser = torch.optim.SGD(groups, momentum=0.9)
    """
    head_lr, rotation_lr = (lr if rate is None else rate for rate in (head_lr, rotation_lr))
    rates = {"lr": lr, "head_lr": head_lr, "rotation_lr": rotation_lr, "weight_decay": weight_decay}
    for argument, value in {**rates, "rotation_decay": rotation_decay}.items():
        check_range(argument, value, 0)
    check_choice("decay", decay, ("all", "weights"))
    # Not by division where that would round.
    of_head = head_lr if rotation_lr == lr else rotation_lr if head_lr == lr else head_lr * (rotation_lr / lr)
    rotated = {"model": rotation_lr, "head": of_head}
    parts = {"model": (model, lr)} | ({} if head is None else {"head": (head, head_lr)})
    for module, _ in parts.values():
        check_model(module)
        settle(module)
        _check_shared(module)
    for given in rules:
        if not isinstance(given, Rule):
            raise ArgumentError("rules", f"must hold rules (hypersphere.optim.Rule), got {given!r}")
    groups: list[dict[str, Any]] = []
    owned = _owned(model, rules)
    used: set[int] = set()
    seen: set[nn.Parameter] = set()
    for name, (module, rate) in parts.items():
        for suffix, rule, parameters in _members(name, module, decay, rules, owned, used, seen):
            own = rotated[name] if suffix in ("-rotations", "-matrices") else rate
            kept = {"-rotations": rotation_decay, "": weight_decay}.get(suffix, 0.0)
            if rule is not None:
                own = rate * rule.lr
                kept = 0.0 if suffix == f"-{rule.title}-vectors" else weight_decay
                kept = kept if rule.weight_decay is None else rule.weight_decay
            group = {"name": f"{name}{suffix}", "params": parameters, "lr": own, "weight_decay": kept}
            groups.append(group | ({"orthogonal": True} if suffix == "-matrices" else {}))
    for unused in sorted(rule.title for index, rule in enumerate(rules) if index not in used):
        raise ArgumentError(
            "rules", f"has the pattern {unused!r}, which fits no parameter of the model or the head that rules apply to"
        )
    return groups


def _owned(model: nn.Module, rules: Sequence[Rule]) -> list[set[Tensor] | None]:
    """What the layers of each rule own."""
    try:
        return [rule.parameters(model) for rule in rules]
    except ArgumentError as error:
        raise ArgumentError("rules", f"has a choice of layers whose {error}") from error


def _members(
    name: str,
    module: nn.Module,
    decay: str,
    rules: Sequence[Rule],
    owned: Sequence[set[Tensor] | None],
    used: set[int],
    seen: set[nn.Parameter],
) -> list[tuple[str, Rule | None, list[nn.Parameter]]]:
    """The groups of one module: suffix, rule and parameters; notes which rules fit and which parameters are taken."""
    keys = [(None, role) for role in _ROLES] + [(i, usual) for i in range(len(rules)) for usual in ("", "-vectors")]
    members: dict[tuple[int | None, str], list[nn.Parameter]] = {key: [] for key in keys}
    special = _decoupled(module) | _rotations(module)
    for own_name, parameter in module.named_parameters():
        usual = "-vectors" if decay == "weights" and parameter.dim() <= 1 else ""
        fitting = [
            index
            for index, (rule, layers) in enumerate(zip(rules, owned, strict=True))
            if fnmatchcase(f"{name}.{own_name}", rule.match) and (layers is None or parameter in layers)
        ]
        used.update(index for index in fitting if parameter not in special)
        first = fitting[0] if fitting and parameter not in special else None
        if first is not None and rules[first].weight_decay is not None:
            usual = ""
        if parameter.requires_grad and parameter not in seen:
            seen.add(parameter)
            members[first, special.get(parameter, usual)].append(parameter)
    return [
        (suffix, None, found) if index is None else (f"-{rules[index].title}{suffix}", rules[index], found)
        for (index, suffix), found in members.items()
        if found
    ]


def _decoupled(module: nn.Module) -> dict[Tensor, str]:
    """The groups of those parameters of decoupled layers that weight decay does not suit."""
    found: dict[Tensor, str] = {}
    others: set[Tensor] = set()  # a weight that another layer has, too, is decayed for its sake
    for layer in module.modules():
        if isinstance(layer, Decoupled):
            found |= {p: "-operators" for p in (layer.radius_raw, layer.k_raw) if p is not None}
        if isinstance(layer, Decoupled) and layer.operator.weighting == "none":
            found[layer.weight] = "-kernels"
        else:
            others.update(p for name, p in layer.named_parameters(recurse=False) if name == "weight")
    return {p: group for p, group in found.items() if p not in others}


def _check_shared(module: nn.Module) -> None:
    """Raise where ``fully_shard``, called with one layer after the other, made several of one ``k`` that they share."""
    shared: dict[int, nn.Parameter | None] = {}
    layers = [layer for layer in module.modules() if isinstance(layer, Decoupled)]
    for layer in layers:
        learned = layer.k_raw if layer.operator.learn_k == "network" and is_sharded(layer.k_raw) else None
        if learned is not None and shared.setdefault(id(layer.operator), learned) is not learned:
            why = "must share the k of learn_k='network' among its layers, got one that was sharded layer by layer"
            raise ArgumentError("model", f"{why}: call fully_shard() with the whole model alone, or take 'layer'")


def _rotations(module: nn.Module) -> dict[Tensor, str]:
    """The groups of the unconstrained parameters of rotations, of layers and of class vectors."""
    parts: list[Any] = [part for part in module.modules() if getattr(part, "is_rotation", False)]
    return {part.free: "-matrices" if part.map.direct else "-rotations" for part in parts}
