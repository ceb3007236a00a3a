"""How evenly the neurons of each layer of a model are spread, beside what is possible and what chance gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hypersphere.energy.base import Regulariser
from hypersphere.energy.chords import directions
from hypersphere.energy.layers import Neurons, Selection, select
from hypersphere.energy.pairs import pair_counts, pair_sums
from hypersphere.energy.potentials import Riesz
from hypersphere.energy.theory import floor_energy, random_energy
from hypersphere.errors import ArgumentError
from hypersphere.geometry import angle, at_least_float32, full_precision
from hypersphere.selection import Layer, check_model, table

_TILE = 2**24
"""Most cosines that are held at a time."""


class Row(NamedTuple):
    """The energy of one layer.

    Attributes:
        name: Name in the model.
        role: ``"hidden"`` or ``"output"``.
        groups: Number of matrices: groups of a convolution, heads of attention. Energies are means over them.
        n: Neurons in each.
        d: Numbers in a neuron.
        energy: Mean energy over pairs, or the value of another regulariser.
        floor: What no such set of neurons falls below (:func:`hypersphere.energy.theory.floor_energy`); not a number
            where that is not known, as of other regularisers.
        random: What random directions have on average (:func:`hypersphere.energy.theory.random_energy`); likewise.
        zeros: Neurons that are zero; they have no direction and count in no pair.
        angle: Smallest angle between two neurons of a group, in degrees; in half space between their lines. Not a
            number where there are no two.
    """

    name: str
    role: str
    groups: int
    n: int
    d: int
    energy: float
    floor: float
    random: float
    zeros: int
    angle: float

    @property
    def excess(self) -> float:
        """Energy above the floor."""
        return self.energy - self.floor

    @property
    def percent(self) -> float:
        """Energy above the floor, in percent of the floor."""
        return 100 * self.excess / abs(self.floor) if self.floor else math.nan  # NaN where the floor is


@dataclass(frozen=True, repr=False)
class Report:
    """The energies of the layers of a model; prints as a table.

    Attributes:
        rows: One for each layer.
        s: Riesz exponent; not a number for other regularisers.
        half_space: Whether opposite directions count as equal in hidden layers.
        angular: Whether angles are the distances.
        left: The layers that were left out, with the reasons.
        regulariser: Of what the energies are the values, where that is no mean of Riesz potentials of the neurons.
    """

    rows: tuple[Row, ...]
    s: float
    half_space: bool
    angular: bool
    left: tuple[Layer, ...] = ()
    regulariser: str = ""

    def __str__(self) -> str:
        titles = ("groups", "n", "d", "energy", "floor", "random", "excess", "%", "zeros", "angle")
        lines: list[tuple[str, str, Sequence[str], str]] = []
        for row in self.rows:
            energies = (_cell(value, "z.5f") for value in (row.energy, row.floor, row.random, row.excess))
            percent, smallest = _cell(row.percent, "z.2f"), _cell(row.angle, ".1f")
            sizes = (str(size) for size in (row.groups, row.n, row.d))
            lines.append((row.name, row.role, (*sizes, *energies, percent, str(row.zeros), smallest), ""))
        lines += [(layer.name, layer.role, (), layer.reason) for layer in self.left]
        found = table(dict.fromkeys(titles, "right"), lines)
        if self.regulariser:
            return f"{found}\nvalues of {self.regulariser}"
        space = "half space (output: full)" if self.half_space else "full space"
        return f"{found}\nmean energy over pairs, s = {self.s:g}, {'angles' if self.angular else 'chords'}, {space}"

    __repr__ = __str__


def _cell(value: float, form: str) -> str:
    return "-" if math.isnan(value) else f"{value:{form}}"


@torch.no_grad()
def report(model: nn.Module | Selection, energy: nn.Module | None = None) -> Report:
    """How evenly the neurons of every layer are spread.

    A wide layer starts within 2 % of the least energy there is, so that only the excess over the floor says something.
    Nothing of the model is changed.

    Args:
        model: The model, or layers of one.
        energy: A regulariser. Of one with a Riesz potential of the neurons, such as :class:`hypersphere.energy.MHE`,
            exponent, distance and space are taken; by default s = 2, chords, full space. The output layer is always in
            full space. Of any other the values are its own (its projections and poles are those it has), for which no
            floor is known.

    Example:
        >>> layer = nn.Linear(8, 4)
        >>> _ = nn.init.orthogonal_(layer.weight)
        >>> report(nn.Sequential(nn.Flatten(), layer, nn.ReLU()))
        name  role    groups  n  d   energy    floor   random   excess     %  zeros  angle  note
        1     output       1  4  8  0.50000  0.37500  0.60000  0.12500  33.33      0   90.0
        mean energy over pairs, s = 2, chords, full space
    """
    if not isinstance(model, Selection):
        return _still(model, energy)
    potential = Riesz() if energy is None else getattr(energy, "potential", None)
    half_space = bool(getattr(energy, "half_space", False))
    if isinstance(energy, Regulariser) and (energy.maps_vectors or not isinstance(potential, Riesz)):
        values = energy.layer_energies(model)
        rows = tuple(_row(layer, half_space, values[layer.name]) for layer in model)
        return Report(rows, math.nan, half_space, False, model.left, str(energy))
    if not isinstance(potential, Riesz):
        raise ArgumentError("energy", f"must be a regulariser, got {type(energy).__name__}")
    plain = Riesz(potential.s, potential.angular)
    rows = tuple(_row(layer, half_space, plain) for layer in model)
    return Report(rows, plain.s, half_space, plain.angular, model.left)


def _still(model: nn.Module, energy: nn.Module | None) -> Report:
    """Report of a model's layers, the model in evaluation mode meanwhile."""
    # Some parametrisations change when they are computed in training mode.
    check_model(model)
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        choose: Callable[[nn.Module], Selection] = getattr(energy, "select", select)
        return report(choose(model), energy)
    finally:
        for module, mode in modes.items():
            module.training = mode


def _row(layer: Neurons, half_space: bool, what: Riesz | Tensor) -> Row:
    """What there is to say of a layer, by the mean of a potential over its pairs or by the value of a regulariser."""
    half_space = half_space and layer.role != "output"
    matrices = at_least_float32(layer.matrices().detach())
    groups, n, d = matrices.shape
    with full_precision(matrices):
        units, inverse = directions(matrices, 0.0)
        valid = (inverse != 0).squeeze(2)
        smallest = math.degrees(_smallest_angle(units, valid, half_space))
        counts: list[int] = valid.sum(1).tolist()
        if isinstance(what, Tensor):
            energies = what.item(), math.nan, math.nan
        else:
            means = pair_sums(matrices, what, half_space=half_space) / pair_counts(matrices, half_space)
            energies = means.double().mean().item(), *_known(what, counts, d, half_space)
    return Row(layer.name, layer.role, groups, n, d, *energies, groups * n - sum(counts), smallest)


def _known(potential: Riesz, counts: Sequence[int], d: int, half_space: bool) -> tuple[float, float]:
    """Floor, and the energy of random directions, of matrices with that many neurons each."""
    s, angular = potential.s, potential.angular
    floors = [floor_energy(count, d, s, half_space=half_space, angular=angular) for count in counts]
    chances = [random_energy(s, d, half_space=half_space, angular=angular, n=count) for count in counts]
    return math.fsum(floors) / len(counts), math.fsum(chances) / len(counts)


def _smallest_angle(units: Tensor, valid: Tensor, half_space: bool) -> float:
    """Smallest angle between two directions of one matrix, or between two lines."""
    groups, n, _ = units.shape
    best, pair = -math.inf, None
    tile = max(1, _TILE // max(groups * n, 1))
    for start in range(0, n, tile):
        cosines = units[:, start : start + tile] @ units.mT
        if half_space:
            cosines.abs_()
        cosines.masked_fill_(~(valid[:, start : start + tile, None] & valid[:, None]), -math.inf)
        cosines.diagonal(start, 1, 2).fill_(-math.inf)
        top, index = cosines.flatten().max(0)
        if top.item() > best:
            group, row, column = (int(i) for i in torch.unravel_index(index, cosines.shape))
            best, pair = top.item(), (units[group, start + row], units[group, column])
    if pair is None:
        return math.nan
    found = angle(pair[0].cpu().double(), pair[1].cpu().double()).item()
    return min(found, math.pi - found) if half_space else found
