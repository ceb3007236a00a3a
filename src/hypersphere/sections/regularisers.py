"""``regularisers:``, energies of weights added to the loss, and how evenly the neurons of every layer are spread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

import pydantic
import torch
from pydantic import Field
from torch import Tensor, nn

from hypersphere import energy, selection
from hypersphere.energy import MHE, Selection, energies, select
from hypersphere.energy.layers import neurons
from hypersphere.energy.report import Report, report
from hypersphere.errors import ArgumentError
from hypersphere.optimisers import Groups
from hypersphere.recipe.explain import Location
from hypersphere.recipe.hash import Later
from hypersphere.recipe.part import Layers, Part, Schedule
from hypersphere.recipe.schema import Recipe
from hypersphere.recipe.section import Section, Term, Training, Work, sections
from hypersphere.recipe.seeds import derive_seed
from hypersphere.registry import Registry


class Regulariser(Part):
    """A term added to the loss: ``weight`` times an energy of weights.

    ``target`` says of which: the ``model``'s layers, all of them hidden ones; the ``head``'s, the output layer; or
    ``all`` of them. ``layers`` chooses among those of the model, with the words of the other sections: ``layers:
    {include: "features.*", skip: first}``.
    """

    registry: ClassVar[Registry[Any]] = energies
    weight: float = Field(1.0, ge=0)
    target: Literal["model", "head", "all"] = "model"
    schedule: Annotated[Schedule | None, Later(None)] = Field(
        None, description="of the weight; by default it stays as it is"
    )
    layers: Annotated[Layers | None, Later(None)] = Field(
        None, description="which of the model's layers (types, include, exclude, skip); by default all of them"
    )


@sections.register("regularisers")
class Regularisers(Section, pydantic.RootModel[tuple[Regulariser, ...]]):
    """Energies of weights that are added to the loss."""

    model_config = pydantic.ConfigDict(frozen=True)
    contract: ClassVar[Mapping[str, Any]] = {
        "recipe": ("regularisers=[{name: rp-comhe, weight: 0.1}, {name: mhe, target: head}]",),
        "first": True,
    }
    root: tuple[Regulariser, ...] = ()

    def __iter__(self) -> Iterator[Regulariser]:  # type: ignore[override]
        return iter(self.root)

    def __len__(self) -> int:
        return len(self.root)

    def __getitem__(self, index: int) -> Regulariser:
        return self.root[index]

    @classmethod
    def field(cls) -> tuple[Any, Any]:
        """Every recipe has them, if none."""
        return cls, cls()

    def mistakes(self, recipe: Recipe) -> Iterator[tuple[Location, str]]:
        """Schedules that do not fit the run, and the half space of an output layer."""
        for index, part in enumerate(self):
            if part.schedule is not None:
                for key, text in part.schedule.mistakes(recipe.train.steps):
                    yield ("regularisers", index, "schedule", key), text
            if part.target == "head" and part.options.get("half_space"):
                message = "must be false for the target 'head': an output layer is full space (use target all or model)"
                yield ("regularisers", index, "half_space"), message
            if part.target == "head" and part.layers is not None:
                message = "must not be given for the target 'head': it chooses among the layers of the model"
                yield ("regularisers", index, "layers"), message

    def train(self, run: Training) -> Work:
        """The terms of the loss, and the energies of layers where they are asked for."""
        return _Energies(self, run)


class _Energies(Work):
    def __init__(self, parts: Regularisers, run: Training) -> None:
        self.parts, self.run, self.steps = parts, run, run.recipe.train.steps
        self.split = "energy" if run.recipe.evaluate.energy else None
        self.found: dict[str, Term] = {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(run.recipe.seed, "regularisers"))
            for index, part in enumerate(parts):
                title = part.name if part.name not in self.found else f"{part.name}-{index}"
                with run.recipe.blamed("regularisers", index):
                    self.found[title] = self._term(part, index, run.recipe.build(energies, ("regularisers", index)))

    def _term(self, part: Regulariser, index: int, value: nn.Module) -> Term:
        """The term, its state there and on the device of the weights."""
        target = self._layers(part, index, value)
        term = Term(value, target, part.weight).to(self.run.device)
        if isinstance(value, energy.Regulariser):
            value.prepare(target)
        return term.train()

    def _layers(self, part: Regulariser, index: int, value: nn.Module) -> nn.Module | Selection:
        if part.layers is None:
            return layers_of(value, part.target, self.run.model, self.run.head)
        with self.run.recipe.blamed("regularisers", index, "layers"):
            layers = some_layers(value, part.layers, self.run.model)
        return layers + output_layer(self.run.head, part.target) if part.target == "all" else layers

    def terms(self) -> Mapping[str, Term]:
        return self.found

    def group(self, groups: Groups) -> None:
        learned = [p for term in self.found.values() for p in term.parameters() if p.requires_grad]
        if learned:
            base = self.run.recipe.optimiser.lr
            rate = torch.tensor(base, device=self.run.device)
            groups.append({"name": "regularisers", "params": learned, "weight_decay": 0.0, "lr": rate, "base_lr": base})

    def before(self, step: int, rate: float) -> None:
        for (title, term), part in zip(self.found.items(), self.parts, strict=True):
            if part.schedule is not None:
                term.weight.fill_(part.weight * part.schedule.at(step, self.steps))
            if isinstance(term.value, energy.Regulariser):
                # All that it draws is a function of the seed and the step.
                term.value.advance(step, derive_seed(self.run.recipe.seed, "energy", title), rate)

    def state(self) -> Mapping[str, Tensor]:
        learned = self._modules().state_dict(keep_vars=True)
        return {name: value for name, value in learned.items() if isinstance(value, Tensor)}

    def restored(self, state: Mapping[str, Tensor]) -> None:
        # Not all that a regulariser saves is a tensor that it holds.
        self._modules().load_state_dict(dict(state), strict=False)

    def _modules(self) -> nn.ModuleDict:
        return nn.ModuleDict({title: term.value for title, term in self.found.items()})

    def logged(self) -> Mapping[str, float]:
        pairs = zip(self.found.items(), self.parts, strict=True)
        return {f"weight/{title}": float(term.weight) for (title, term), part in pairs if part.schedule is not None}

    def measured(self, step: int) -> Mapping[str, Any]:
        found = layer_energies(self.run.model, self.run.head)
        layers = {
            row.name: {"role": row.role, "n": row.n, "d": row.d, "floor": row.floor, "random": row.random}
            for row in found.rows
        }
        kind = {"s": found.s, "half_space": found.half_space, "angular": found.angular}
        self.run.keep("energy.json", {**kind, "layers": layers})
        return {f"energy/{row.name}": row.energy for row in found.rows}


def layers_of(value: nn.Module, target: str, model: nn.Module, head: nn.Module) -> nn.Module | Selection:
    """The layers that an energy is of: those of the model are hidden ones, the head is the output layer."""
    if target == "model" and not isinstance(value, energy.Regulariser):
        return model  # a module of a user's own, which knows models alone
    if target == "head":
        return output_layer(head, target)
    chosen = value.select if isinstance(value, energy.Regulariser) else select
    layers = chosen(model, output=None)
    return layers if target == "model" else layers + output_layer(head, target)


def some_layers(value: nn.Module, words: Layers, model: nn.Module) -> Selection:
    """Those layers of the model that an energy is of and that a recipe chooses, of which there must be some."""
    selects = value.select if isinstance(value, energy.Regulariser) else select
    layers = selects(model, **words.choice)
    if not len(layers):
        selection.chosen(model, layers.left)
    return layers


def output_layer(head: nn.Module, target: str = "all") -> Selection:
    """The weights of a head, a row a class, as an output layer.

    Args:
        head: The head.
        target: The option that asks for it, for messages.
    """
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ArgumentError("target", f"must be 'model' with a head that has no matrix of weights, got {target!r}")
    if getattr(head, "subcentres", 1) > 1:
        raise ArgumentError("target", f"must be 'model' with a head of several sub-centres a class, got {target!r}")
    return neurons("head", lambda: cast(Tensor, head.weight), "output", constant=not weight.requires_grad)


def layer_energies(model: nn.Module, head: nn.Module, value: energy.Regulariser | None = None) -> Report:
    """Energy of every layer of a model and of its head, beside the least there is and that of random directions.

    Args:
        model: The model.
        head: Its head, which counts where it has one vector a class.
        value: Energy to measure; by default in half space with s = 2, the same for all runs to be compared. The head,
            as output layer, is always measured in full space.
    """
    layers = select(model, output=None)
    if getattr(head, "subcentres", 1) == 1:
        layers += output_layer(head)
    return report(layers, value or MHE(half_space=True))
