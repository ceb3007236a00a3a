"""Parameter groups by role: what weight decay must spare, and what has a learning rate of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

from torch import Tensor, nn

from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.nn import Decoupled
from hypersphere.selection import check_model

_ROLES = ("", "-vectors", "-kernels", "-operators", "-rotations", "-matrices")


class RuleLike(Protocol):
    """What a rule says: which parameters, a factor on their learning rate, and their weight decay."""

    @property
    def match(self) -> str:
        """Pattern of names."""

    @property
    def lr(self) -> float:
        """Factor on the learning rate."""

    @property
    def weight_decay(self) -> float | None:
        """Weight decay; ``None``: as usual."""


@dataclass(frozen=True)
class Rule:
    """Another learning rate or weight decay for parameters by name.

    Args:
        match: Pattern of their names, which begin with ``model.`` or ``head.``.
        lr: Factor on the learning rate.
        weight_decay: Weight decay; by default as usual.

    Example:
        >>> groups = parameter_groups(nn.Linear(3, 4), lr=0.1, rules=[Rule("*.bias", lr=2.0)])
        >>> [(group["name"], group["lr"]) for group in groups]
        [('model', 0.1), ('model-*.bias', 0.2)]
    """

    match: str
    lr: float = 1.0
    weight_decay: float | None = None


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
    rules: Sequence[RuleLike] = (),
) -> list[dict[str, Any]]:
    """Groups of trainable parameters for any optimiser, with weight decay where it belongs; the trainer uses the same.

    The name of a group is ``model`` or ``head`` and, for what weight decay spares, the role: the ``-kernels`` of
    decoupled layers whose norm does not count, the radii and steepnesses of their ``-operators``, the ``-rotations`` of
    orthogonal training, the orthogonal ``-matrices`` themselves (with ``orthogonal`` for
    :class:`hypersphere.optim.OGD`, which keeps them so) and, with ``decay="weights"``, the ``-vectors``: biases and
    what normalisations learn. A parameter that several modules share is in one group; the weight of a decoupled layer
    that an ordinary layer shares is decayed for the sake of that one. Groups without parameters are left out.

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
        rules: Rates and decays by name; the first that fits counts. Their groups are called ``-PATTERN``, or
            ``-PATTERN-vectors`` where the decay is spared. They do not apply to the roles above, vectors aside.

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
    for given in rules:
        if not hasattr(given, "match"):
            raise ArgumentError("rules", f"must hold rules (hypersphere.optim.Rule), got {given!r}")
    groups: list[dict[str, Any]] = []
    used: set[str] = set()
    seen: set[nn.Parameter] = set()
    for name, (module, rate) in parts.items():
        for suffix, rule, parameters in _members(name, module, decay, rules, used, seen):
            own = rotated[name] if suffix in ("-rotations", "-matrices") else rate
            kept = {"-rotations": rotation_decay, "": weight_decay}.get(suffix, 0.0)
            if rule is not None:
                own = rate * rule.lr
                kept = 0.0 if suffix == f"-{rule.match}-vectors" else weight_decay
                kept = kept if rule.weight_decay is None else rule.weight_decay
            group = {"name": f"{name}{suffix}", "params": parameters, "lr": own, "weight_decay": kept}
            groups.append(group | ({"orthogonal": True} if suffix == "-matrices" else {}))
    for unused in sorted({rule.match for rule in rules} - used):
        raise ArgumentError(
            "rules", f"has the pattern {unused!r}, which fits no parameter of the model or the head that rules apply to"
        )
    return groups


def _members(
    name: str,
    module: nn.Module,
    decay: str,
    rules: Sequence[RuleLike],
    used: set[str],
    seen: set[nn.Parameter],
) -> list[tuple[str, RuleLike | None, list[nn.Parameter]]]:
    """The groups of one module: suffix, rule and parameters; notes which rules fit and which parameters are taken."""
    by_suffix = {f"-{rule.match}{usual}": rule for rule in reversed(rules) for usual in ("-vectors", "")}
    members: dict[str, list[nn.Parameter]] = {suffix: [] for suffix in (*_ROLES, *reversed(by_suffix))}
    special = _decoupled(module) | _rotations(module)
    for own_name, parameter in module.named_parameters():
        usual = "-vectors" if decay == "weights" and parameter.dim() <= 1 else ""
        fitting = [rule for rule in rules if fnmatchcase(f"{name}.{own_name}", rule.match)]
        used.update(rule.match for rule in fitting if parameter not in special)
        if fitting:
            usual = f"-{fitting[0].match}{usual if fitting[0].weight_decay is None else ''}"
        if parameter.requires_grad and parameter not in seen:
            seen.add(parameter)
            members[special.get(parameter, usual)].append(parameter)
    return [(suffix, by_suffix.get(suffix), parameters) for suffix, parameters in members.items() if parameters]


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


def _rotations(module: nn.Module) -> dict[Tensor, str]:
    """The groups of the unconstrained parameters of rotations, of layers and of class vectors."""
    parts: list[Any] = [part for part in module.modules() if getattr(part, "is_rotation", False)]
    return {part.free: "-matrices" if part.map.direct else "-rotations" for part in parts}
