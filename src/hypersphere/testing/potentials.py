r"""The contract of potentials: a function of the squared chord with its slope, more the nearer two directions are.

A member's own ``contract`` may declare ``variants`` (options to try beside the defaults) and ``falls`` (``False`` where
the value may rise with the distance).
"""

from __future__ import annotations

import torch

from hypersphere.energy.pairs import pair_sums
from hypersphere.energy.potentials import Potential, decode, potentials
from hypersphere.testing import common, numeric
from hypersphere.testing.contract import Contract, variants

CONTRACT = Contract("potential", "potentials", "hypersphere.energy.potentials:potentials")
SQUARED = torch.linspace(0.05, 3.9, 40, dtype=torch.float64)


def members(name: str) -> list[Potential]:
    """The member with each of the options to be tried."""
    return [potentials.create(name, **options) for options in variants(CONTRACT, name)]


@CONTRACT.check
def slope_is_the_derivative(name: str) -> None:
    """``slope`` is the derivative of the value by the squared chord, and the gradient is, too."""
    for f in members(name):
        numeric.derivative(f, f.slope, SQUARED, f"slope of {f}")
        numeric.gradient(f, SQUARED, what=f"gradient of {f}")


@CONTRACT.check
def both_are_value_and_slope(name: str) -> None:
    """``both`` gives what value and slope give by themselves."""
    for f in members(name):
        value, slope = f.both(SQUARED.clone())
        numeric.close(value, f(SQUARED), 1e-12, f"value of {f}")
        numeric.close(slope, f.slope(SQUARED), 1e-12, f"slope of {f}")


@CONTRACT.check
def falls_with_the_distance(name: str) -> None:
    """The farther apart two directions are, the less they add."""
    if CONTRACT.fact(name, "falls", True):
        for f in members(name):
            assert float(f(SQUARED).diff().max()) < 0, f"{f} rises with the distance"
            assert bool((f.slope(SQUARED) < 0).all()), f"{f} has a slope that rises"


@CONTRACT.check
def is_finite_everywhere(name: str) -> None:
    """Value and slope are finite from the least distance that counts to opposite directions, in their own type."""
    for f in members(name):
        for dtype, floor in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
            for q in (torch.tensor([floor, 1e-3, 2.0, 4.0], dtype=dtype), torch.zeros(0, dtype=dtype)):
                value, slope = f(q), f.slope(q)
                assert value.dtype == slope.dtype == dtype and value.shape == slope.shape == q.shape
                numeric.finite([value, slope], f"{f} in {dtype}")


@CONTRACT.check
def can_be_coded(name: str) -> None:
    """Its options are numbers from which it can be built again: operations take no objects."""
    for f in members(name):
        assert decode(*f.code()) == f


@CONTRACT.check
def sums_over_all_pairs(name: str) -> None:
    """The tiled sum and its gradient are those of all pairs written out, also with mirror images."""
    w = numeric.draw(1, 5, 4, seed=1)
    for f in members(name):
        for half_space in (False, True):
            points = torch.cat([w, -w], 1) if half_space else w
            u = points[0] / points[0].norm(dim=1, keepdim=True)
            q = (u[:, None] - u[None]).square().sum(-1)
            apart = ~torch.eye(len(u), dtype=torch.bool)
            wanted = f(q[apart]).sum().unsqueeze(0)
            numeric.close(pair_sums(w, f, half_space=half_space), wanted, 1e-6, f"sum of {f}")
            numeric.gradient(lambda w: pair_sums(w, f, half_space=half_space), w, what=f"gradient of sums of {f}")


@CONTRACT.check
def waits_for_nothing(name: str) -> None:
    """Nothing is read off the device."""
    for f in members(name):
        with numeric.Host():
            f.both(SQUARED.clone())


@CONTRACT.check
def is_one_graph(name: str) -> None:
    """Compiled code has no breaks and gives the same numbers."""
    torch._dynamo.reset()
    numeric.compiled(members(name)[0], SQUARED.float())


common.add(
    CONTRACT,
    build=lambda name: members(name)[0],
    recipe=lambda name: [f"regularisers=[{{name: pair-energy, potential: {name}}}]"],
)
