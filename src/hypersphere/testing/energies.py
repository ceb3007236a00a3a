r"""The contract of energies and other regularisers: numbers of a layer's neurons that heed what they say they heed.

A member's own ``contract`` may declare what does not hold for it: ``rotation``, ``permutation``, ``scale`` or
``gradient`` as ``False`` (it draws projections, keeps a neuron's order, counts lengths, or holds a part fixed),
``optimum`` (``"simplex"``, the default; ``"cross"``, the vectors plus and minus those of an orthonormal basis, for
half-space members ``"orthonormal"``; or ``None``), ``options`` and ``variants``, ``graph`` (``False`` where it cannot
be compiled as one graph), ``falls`` (``False`` where an adversary may raise the value while it is minimised),
``transforms`` (``False`` where transforms of ``torch.func`` do not see through it), and
``waits`` (``True`` where a value waits for the device, which a captured step must not).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hypersphere.energy import Regulariser, energies, minimise
from hypersphere.geometry import normalise
from hypersphere.testing import common, numeric
from hypersphere.testing.contract import Contract, variants

CONTRACT = Contract("energy", "energies", "hypersphere.energy:energies")
SHAPE = (6, 5)


def members(name: str) -> list[Any]:
    """The member with each of the options to be tried."""
    return [energies.create(name, **options) for options in variants(CONTRACT, name)]


def value(energy: Any, vectors: Tensor) -> Tensor:
    """Value of a matrix, with nothing drawn anew."""
    torch.manual_seed(0)
    found: Tensor = energy.eval()(vectors)
    return found


def holds(name: str, fact: str) -> bool:
    """Whether a property is promised."""
    return bool(CONTRACT.fact(name, fact, True))


@CONTRACT.check
def is_a_number_of_a_matrix(name: str) -> None:
    """Of any number of neurons, none included, it is one finite number, in float32 or wider, with a finite gradient."""
    for energy in members(name):
        for dtype in numeric.FLOATS:
            for n in (0, 1, 2, SHAPE[0]):
                vectors = numeric.draw(n, SHAPE[1], dtype=dtype).requires_grad_()
                found = value(energy, vectors)
                assert found.shape == () and found.dtype == (dtype if dtype == torch.float64 else torch.float32)
                grads = torch.autograd.grad(found, vectors, allow_unused=True) if found.requires_grad else ()
                numeric.finite([found, *(g for g in grads if g is not None)], f"{name} of {n} neurons in {dtype}")


@CONTRACT.check
def is_finite_at_the_edges(name: str) -> None:
    """Equal, opposite, zero, tiny and long neurons give finite values and gradients."""
    w = numeric.draw(*SHAPE, dtype=torch.float32)
    same, opposite, zero, long, tiny = (w.clone() for _ in range(5))
    same[1], opposite[1], zero[1], long[1], tiny[1] = w[0], -w[0], 0, 1e4 * w[0], 1e-12 * w[1]
    for energy in members(name):
        for case in (same, opposite, zero, long, tiny, torch.zeros(SHAPE), torch.ones(SHAPE)):
            leaf = case.clone().requires_grad_()
            found = value(energy, leaf)
            numeric.finite([found], f"{name} of {case}")
            numeric.finite(torch.autograd.grad(found, leaf), f"gradient of {name} of {case}")


@CONTRACT.check
def does_not_count_zero_neurons(name: str) -> None:
    """A neuron that is zero, as padding is, changes nothing."""
    if holds(name, "padding"):
        for energy in members(name):
            w = numeric.draw(*SHAPE, seed=1)
            padded = torch.cat([w, torch.zeros(2, SHAPE[1], dtype=w.dtype)])
            numeric.close(value(energy, padded), value(energy, w), 1e-6, f"{name} with zero neurons")


@CONTRACT.check
def turns_with_the_sphere(name: str) -> None:
    """Rotating all neurons changes nothing."""
    if holds(name, "rotation"):
        for energy in members(name):
            w = numeric.draw(*SHAPE, seed=2)
            numeric.close(value(energy, w @ numeric.rotation(SHAPE[1])), value(energy, w), 1e-6, f"{name} rotated")


@CONTRACT.check
def has_no_order(name: str) -> None:
    """The order of the neurons does not count."""
    if holds(name, "permutation"):
        for energy in members(name):
            w = numeric.draw(*SHAPE, seed=3)
            numeric.close(value(energy, w[[3, 0, 5, 1, 4, 2]]), value(energy, w), 1e-6, f"{name} in another order")


@CONTRACT.check
def heeds_directions_alone(name: str) -> None:
    """The lengths of neurons change nothing, and the gradient is tangent."""
    if not holds(name, "scale"):
        return
    for energy in members(name):
        w = numeric.draw(*SHAPE, seed=4)
        lengths = torch.tensor([[0.1], [1], [3], [10], [0.5], [2]], dtype=w.dtype)
        numeric.close(value(energy, lengths * w), value(energy, w), 1e-6, f"{name} with other lengths")
        leaf = w.clone().requires_grad_()
        (grad,) = torch.autograd.grad(value(energy, leaf), leaf)
        along = (grad * w).sum(1)
        assert float(along.abs().max()) <= 1e-6 * (1 + float(grad.abs().max())), f"{name} has a gradient along neurons"


@CONTRACT.check
def has_its_gradient(name: str) -> None:
    """The gradient is that of differences."""
    if holds(name, "gradient"):
        for energy in members(name):
            w = numeric.draw(*SHAPE, seed=5)
            numeric.gradient(lambda w: value(energy, w), w, what=f"gradient of {name}")


@CONTRACT.check
def can_be_transformed(name: str) -> None:
    """In evaluation, ``torch.func`` and a second backward pass find first and second derivatives."""
    if not holds(name, "transforms"):
        return
    for energy in members(name)[:1]:
        energy.eval()
        many, along = numeric.draw(3, *SHAPE, seed=10), numeric.draw(*SHAPE, seed=11)
        w = many[0]

        def slope(w: Tensor, *, graph: bool = False, energy: Any = energy) -> Tensor:
            leaf = w if graph else w.clone().requires_grad_()
            (grad,) = torch.autograd.grad(energy(leaf), leaf, create_graph=graph)
            return grad

        step = 1e-5 * along
        turn, pushed = (slope(w + step) - slope(w - step)) / 2e-5, (slope(w) * along).sum()
        by_func = torch.vmap(torch.func.grad(energy))(many)
        numeric.close(by_func, torch.stack([slope(x) for x in many]), 1e-7, f"the gradient of {name} by torch.func")
        pair: Any = torch.func.jvp(energy, (w,), (along,))
        numeric.close(pair[0], energy(w), 1e-9, f"{name} in forward mode")
        numeric.close(pair[1], pushed, 1e-7, f"{name} pushed forward")
        leaf = w.clone().requires_grad_()
        seconds = {
            "by torch.func": (torch.func.hessian(energy)(w) * along).sum((2, 3)),
            "by a second backward pass": torch.autograd.grad((slope(leaf, graph=True) * along).sum(), leaf)[0],
        }
        for how, second in seconds.items():
            numeric.close(second, turn, 1e-4, f"the second derivative of {name} {how}")
        dead = w.clone()
        dead[2] = 0
        numeric.twice(energy, dead, what=f"{name} with a zero neuron")


@CONTRACT.check
def falls_along_its_gradient(name: str) -> None:
    """Short steps against the gradient lower it."""
    for energy in members(name):
        w = numeric.draw(*SHAPE, seed=6)
        first = float(value(energy, w))
        for _ in range(5):
            leaf = w.clone().requires_grad_()
            (grad,) = torch.autograd.grad(value(energy, leaf), leaf)
            w = w - 1e-3 * grad / grad.norm().clamp(min=1e-12)
        assert float(value(energy, w)) < first, f"{name} went from {first} to {float(value(energy, w))}"


@CONTRACT.check
def is_least_where_it_says(name: str) -> None:
    """No random set of neurons has less than the one that is known to be best."""
    best = CONTRACT.fact(name, "optimum", "simplex")
    if best is None:
        return
    d = SHAPE[1]
    basis = torch.eye(d + 1, dtype=torch.float64)
    simplex = basis - 1 / (d + 1)
    corners = {"simplex": simplex, "cross": torch.cat([basis, -basis]), "orthonormal": basis}[best]
    for energy in members(name):
        least = float(value(energy, corners))
        for seed in range(10):
            found = numeric.draw(*corners.shape, seed=20 + seed)
            found = found / found.norm(dim=1, keepdim=True)
            found = found - found.mean(1, keepdim=True) if best == "simplex" else found
            assert float(value(energy, found)) >= least - 1e-9, f"{name} is {least} where it should be least"


@CONTRACT.check
def is_what_minimise_says(name: str) -> None:
    """``minimise`` reports what the member has at the points that it returns, which is no more than at the start."""
    for energy in members(name)[:1]:
        if isinstance(energy, Regulariser):
            start = normalise(numeric.draw(*SHAPE, seed=9))
            found = minimise(start, energy=energy, steps=20)
            assert found.regulariser is not None and found.regulariser is not energy
            own, first = (found.regulariser.objective(x.unsqueeze(0)).squeeze(0) for x in (found.points, start))
            numeric.close(own, torch.tensor(found.energy), 1e-6, f"{name} of what was minimised")
            if holds(name, "falls"):
                assert found.energy <= float(first) + 1e-9, f"{name} rose from {first} to {found.energy}"


@CONTRACT.check
def batches_are_their_matrices(name: str) -> None:
    """A batch of matrices has the values of each."""
    for energy in members(name):
        if isinstance(energy, Regulariser) and holds(name, "batches"):
            energy.eval()
            w = numeric.draw(3, *SHAPE, seed=7)
            torch.manual_seed(0)
            together = energy.energy(w)
            assert together.shape == (3,)
            for i in range(3):
                torch.manual_seed(0)
                numeric.close(energy.energy(w[i : i + 1])[0], together[i], 1e-6, f"{name} of matrix {i} of a batch")


@CONTRACT.check
def a_model_is_the_sum_of_its_layers(name: str) -> None:
    """On a model it is the sum of its layers, each times the weight of its role."""
    for options in variants(CONTRACT, name):
        takes = {option.name for option in CONTRACT.entry(name).options}
        weights = {key: w for key, w in (("hidden_weight", 2.0), ("output_weight", 0.5)) if key in takes}
        energy = energies.create(name, **{**options, **weights})
        if not isinstance(energy, Regulariser) or not holds(name, "model"):
            continue
        torch.manual_seed(1)
        model = nn.ModuleDict({"discriminator": nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4))})
        energy.eval()
        wanted = sum(
            (energy.output_weight if layer.role == "output" else energy.hidden_weight)
            * energy.energy(layer.matrices(), layer.role).mean()
            for layer in energy.select(model)
        )
        assert isinstance(wanted, Tensor), f"{name} sees no layer"
        numeric.close(energy(model), wanted, 1e-5, f"{name} of a model")


@CONTRACT.check
def is_computed_in_full_precision(name: str) -> None:
    """Half precision is that of its input alone, also under autocast."""
    for energy in members(name):
        for dtype in numeric.LOW:
            w = numeric.draw(*SHAPE, seed=8, dtype=dtype)
            numeric.close(value(energy, w), value(energy, w.float()), 1e-3, f"{name} in {dtype}")
        with torch.autocast("cpu", torch.bfloat16):
            numeric.close(value(energy, w.float()), value(energy, w), 1e-3, f"{name} under autocast")


@CONTRACT.check
def waits_for_nothing(name: str) -> None:
    """Nothing is read off the device in a step, made ready as a trainer does."""
    if CONTRACT.fact(name, "waits", False):
        return
    for energy in members(name):
        w = numeric.draw(*SHAPE, dtype=torch.float32).requires_grad_()
        if isinstance(energy, Regulariser):
            energy.train()
            energy.prepare(w)
            energy.advance(0, 0, 0.1)
        energy(w).backward()
        if isinstance(energy, Regulariser):
            energy.advance(1, 0, 0.1)
        with numeric.Host():
            energy(w).backward()


@CONTRACT.check
def is_one_graph(name: str) -> None:
    """Compiled code has no breaks and gives the same numbers."""
    if not holds(name, "graph"):
        return
    energy = members(name)[0].eval()
    w = numeric.draw(*SHAPE, dtype=torch.float32)
    if isinstance(energy, Regulariser):
        energy.prepare(w)
    energy(w)
    torch._dynamo.reset()
    numeric.compiled(energy, w, tolerance=1e-4)


def _recipe(name: str) -> list[str]:
    return [f"regularisers=[{{name: {name}, weight: 0.1}}]"]


common.add(CONTRACT, build=lambda name: members(name)[0], recipe=_recipe)
