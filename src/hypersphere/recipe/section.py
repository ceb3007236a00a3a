"""Sections of a recipe that act in a run: each is one file with its keys and a few hooks.

A run calls the hooks of all its sections in this order, and within each in the order of :func:`kinds`:

1. ``convert``: layers in place of layers of the model that was built;
2. ``rotate``: weights that are computed from others;
3. ``train``: the section's :class:`Work`, with the terms that it adds to the loss;
4. ``joined``: the terms of all sections are known; ``group``: the optimiser's parameter groups, then the optimiser
   itself (``start``);
5. the model is wrapped for several processes (shard), the last checkpoint is loaded (``state``, ``restored``), and the
   step is captured;
6. around every step ``before`` and ``after``, on the host; ``samples`` within it, as device work that is captured;
7. ``logged`` with every row of training metrics, ``measured`` at every evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic.fields import FieldInfo
from torch import Tensor, nn

from hypersphere.data import Dataset
from hypersphere.optimisers import Groups
from hypersphere.recipe.explain import Location
from hypersphere.recipe.hash import Later
from hypersphere.registry import Registry

if TYPE_CHECKING:
    from hypersphere.recipe.schema import Recipe


@dataclass
class Training:
    """What the work of a section sees of a run.

    Args:
        recipe: What is trained.
        model: The model.
        head: The head.
        preprocess: Normalisation of the samples.
        device: Where all of them are.
        data: The data set.
        keep: Writes a JSON file of this name and content into the run folder.
        replaced: To be called with parameters whose values mean something else now: their averages start anew.
    """

    recipe: Recipe
    model: nn.Module
    head: nn.Module
    preprocess: nn.Module
    device: torch.device
    data: Dataset
    keep: Callable[[str, Mapping[str, Any]], None]
    replaced: Callable[[Iterable[nn.Parameter]], None]


class Term(nn.Module):
    """A term of the loss: ``weight`` times ``value`` of a target.

    Args:
        value: Gives the number.
        target: What it is a number of, a model, say; it is no part of the term.
        weight: A number on the device, so that a captured step follows what is filled in.

    Example:
        >>> term = Term(nn.Flatten(0), torch.ones(()), 3.0)
        >>> term()
        tensor([3.])
    """

    weight: Tensor

    def __init__(self, value: nn.Module, target: Any, weight: float) -> None:
        super().__init__()
        self.value = value
        self._target = (target,)
        self.register_buffer("weight", torch.tensor(weight), persistent=False)

    @property
    def target(self) -> Any:
        """What it is a number of."""
        return self._target[0]

    def forward(self) -> Tensor:
        """The term, ``()``."""
        return self.weight * self.value(self._target[0])


class Work:
    """What a section does in training; a hook does nothing unless it is overridden."""

    split: str | None = None
    """``split`` of the rows that :meth:`measured` gives."""

    def terms(self) -> Mapping[str, Term]:
        """Terms of the loss, by title."""
        return {}

    def joined(self, terms: Mapping[str, Term]) -> None:
        """The terms of all sections are there, by title."""

    def group(self, groups: Groups) -> None:
        """Change parameter groups or add some, before there is an optimiser."""

    def start(self, optimiser: torch.optim.Optimizer) -> None:
        """The optimiser is there; no step has been taken and no checkpoint loaded."""

    def before(self, step: int, rate: float) -> None:
        """The step with this number, from 0, is taken next, at this learning rate of the first group."""

    def samples(self, samples: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        """The batch as the model sees it, in the step: device work alone, which a captured step replays."""
        return samples

    def after(self, step: int) -> None:
        """So many steps have been taken."""

    def state(self) -> Mapping[str, Tensor]:
        """Every tensor that a step changes and no other part of the run holds, by name."""
        return {}

    def restored(self, state: Mapping[str, Tensor]) -> None:
        """The tensors of :meth:`state` have the values of a checkpoint."""

    def logged(self) -> Mapping[str, float]:
        """Columns of a row of training metrics."""
        return {}

    def measured(self, step: int) -> Mapping[str, Any]:
        """A row of metrics of its own, at the start and at every evaluation; only asked for where ``split`` is set."""
        return {}


class Section:
    """A section of a recipe that acts in a run: a pydantic model of its keys with this class beside it.

    ``@sections.register("key")`` adds it to recipes, where it may be left out. See :mod:`hypersphere.recipe.section`
    for when each hook is called.
    """

    @classmethod
    def field(cls) -> tuple[Any, Any]:
        """Type and default of its key in a recipe."""
        text = (cls.__doc__ or "").split("\n", 1)[0]
        return Annotated[cls | None, Later(None)], FieldInfo(default=None, description=text)

    def mistakes(self, recipe: Recipe) -> Iterator[tuple[Location, str]]:
        """What takes several values of the recipe to see: where, and what is wrong."""
        return iter(())

    def convert(self, model: Any, recipe: Recipe) -> Any:
        """The model with other layers."""
        return model

    def rotate(self, model: Any, recipe: Recipe) -> Any:
        """The model with weights that are computed from others."""
        return model

    def train(self, run: Training) -> Work | None:
        """What it does in training, if it does anything."""
        return None

    @classmethod
    def without(cls, run: Training) -> Work | None:
        """What is to be done in training where a recipe leaves the section out."""
        return None


sections = Registry[Section]("section", positional=("root",), members=("hypersphere.sections",))
"""Sections of recipes by key."""

ORDER = ("convert", "project", "regularisers", "orthogonal", "adversary", "batch_norm", "early_stop")
"""The order in which hooks of sections are called; those of plugins follow as they were registered."""


def kinds() -> dict[str, type[Section]]:
    """Every section by its key, in the order in which hooks are called."""
    len(sections)  # reads the members
    found: dict[str, Any] = {entry.name.replace("-", "_"): entry.factory for entry in sections.entries()}
    return {key: found[key] for key in (*ORDER, *(key for key in found if key not in ORDER))}
