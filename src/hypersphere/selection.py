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
     holds itself or in an ``nn.Sequential``. So is a 1x1 convolution in an ``nn.Sequential`` from the model on, whose
     layers have no names, or one called ``fc``.
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
from hypersphere.errors import ArgumentError, check_choice

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
