r"""The contract of orthogonal maps: what a map says about itself (``exact``, ``skew``, ``free``, ``retracts``) holds.

A member's own ``contract`` may declare ``variants`` (options to try beside the defaults), ``waits`` (``True`` where it
waits for the device), ``graph`` (``False`` where it cannot be compiled as one graph), and ``smooth`` (``False`` where
it has no derivative at some ``P``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hypersphere.errors import ArgumentError
from hypersphere.orthogonal import Map, maps, orthogonality_error
from hypersphere.testing import common, numeric
from hypersphere.testing.contract import Contract, variants

CONTRACT = Contract("orthogonal map", "orthogonal maps", "hypersphere.orthogonal:maps")
SIZES = (1, 2, 3, 5)


def members(name: str) -> list[Map]:
    """The member with each of the options to be tried."""
    return [maps.create(name, **options) for options in variants(CONTRACT, name)]


def near_start(member: Map, d: int, *batch: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Free matrices as training meets them: near the start, but not at it."""
    return (member.start(d, batch=batch, dtype=torch.float64) + 0.1 * numeric.draw(*batch, d, d, seed=seed)).to(dtype)


@CONTRACT.check
def begins_at_the_identity(name: str) -> None:
    """At its start the map is the identity, but for the signs that it declares."""
    for member in members(name):
        for d in SIZES:
            signs = member.signs(d)
            wanted = torch.eye(d, dtype=torch.float64) if signs is None else torch.diag(signs.double())
            numeric.close(member(member.start(d, dtype=torch.float64)), wanted, 1e-9, f"{member} at its start")
            assert member.start(d, batch=(2,)).shape == (2, d, d)


@CONTRACT.check
def is_orthogonal_where_it_says(name: str) -> None:
    """An ``exact`` map is orthogonal to rounding, of one determinant, wherever ``P`` is."""
    for member in members(name):
        if not member.exact:
            if not member.direct:
                far = 2 * numeric.draw(4, 5, 5, seed=1)
                assert bool((orthogonality_error(member(far)) > 1e-6).any()), f"{member} is orthogonal, but not exact"
            continue
        for d in SIZES:
            for dtype, least in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
                for size in (0.1, 1.0):
                    P = (member.start(d, batch=(8,), dtype=torch.float64) + size * numeric.draw(8, d, d, seed=2)).to(
                        dtype
                    )
                    R = member(P)
                    assert R.dtype == dtype and R.shape == P.shape
                    error = float(orthogonality_error(R).max())
                    assert error <= least, f"{member} has the orthogonality error {error:g} for d={d} in {dtype}"
                    if member.skew:
                        numeric.close(torch.linalg.det(R.double()), torch.ones(8), 1e-3, f"determinant of {member}")


@CONTRACT.check
def reads_what_it_says(name: str) -> None:
    """A ``skew`` map reads the strict upper triangle alone, and another one more than that."""
    for member in members(name):
        P = near_start(member, 4, seed=3)
        other = P.triu(1) + numeric.draw(4, 4, seed=4).tril()
        same = bool(((member(P) - member(other)).abs() < 1e-12).all())
        assert same == member.skew, f"{member} says skew={member.skew}, which is not so"


@CONTRACT.check
def has_as_many_free_parameters_as_it_says(name: str) -> None:
    """The rank of its derivative is ``free``."""
    for member in members(name):
        if member.direct or not CONTRACT.fact(name, "smooth", True):
            continue
        for d in (2, 4):
            P = near_start(member, d, seed=5)
            jacobian = torch.autograd.functional.jacobian(lambda P, member=member: member(P), P).reshape(d * d, d * d)
            rank = int(torch.linalg.matrix_rank(jacobian, rtol=1e-7))
            assert rank == member.free(d), f"{member} moves in {rank} dimensions, says {member.free(d)} for d={d}"


@CONTRACT.check
def has_its_gradient(name: str) -> None:
    """The gradient is that of differences, at and away from the start."""
    if not CONTRACT.fact(name, "smooth", True):
        return
    weights = numeric.draw(4, 4, seed=6)
    for member in members(name):
        for P in (near_start(member, 4, seed=7), member.start(4, dtype=torch.float64)):
            numeric.gradient(lambda P: member(P) * weights, P, what=f"gradient of {member}")


@CONTRACT.check
def can_be_transformed(name: str) -> None:
    """``torch.func`` finds first and second derivatives, of one matrix and of each of several, and in a layer."""
    from hypersphere import orthogonal

    if not CONTRACT.fact(name, "smooth", True):
        return
    x, weight = numeric.draw(3, 4, seed=11), numeric.draw(5, 4, seed=12)
    for member in members(name):
        for P in (near_start(member, 4, seed=7), member.start(4, dtype=torch.float64)):
            numeric.transforms(member, P, what=f"{member}")
        layer = nn.Linear(4, 5, bias=False, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(weight)
        orthogonal.apply(layer.eval(), member)

        def response(x: Tensor, P: Tensor, layer: nn.Module = layer) -> Tensor:
            found: Tensor = torch.func.functional_call(layer, {"parametrizations.weight.0.free": P}, (x,))
            return found

        P = near_start(member, 4, 1, seed=13)
        numeric.transforms(response, x, P, what=f"a layer with {member}")
        before = {key: value.clone() for key, value in layer.train().state_dict().items()}
        torch.func.grad(lambda P: response(x, P).sum())(P)
        for key, value in layer.state_dict().items():
            assert torch.equal(value, before[key]), f"torch.func changes {key} of a layer with {member}"


@CONTRACT.check
def is_finite_at_the_edges(name: str) -> None:
    """Values and gradients are finite at the start, at zero, at orthogonal and at large matrices, in every type."""
    for member in members(name):
        for dtype in numeric.FLOATS:
            start, turned = member.start(4, dtype=dtype), numeric.rotation(4).to(dtype)
            for P in (
                start,
                turned,
                10 * start,
                start + 3 * numeric.draw(4, 4, dtype=dtype),
                torch.zeros(0, 4, 4, dtype=dtype),
            ):
                leaf = P.clone().requires_grad_()
                R = member(leaf)
                assert R.dtype == dtype and R.shape == P.shape
                numeric.finite([R, *torch.autograd.grad(R.sum(), leaf)], f"{member} in {dtype}")


@CONTRACT.check
def passes_on_what_is_no_number(name: str) -> None:
    """A NaN in ``P`` is one in ``R`` of this matrix, and of no other one, and says so in the orthogonality error."""
    for member in members(name):
        good = member.start(4, batch=(3,), dtype=torch.float32)
        for places in ((slice(None), slice(None)), ([1, 2], [2, 1])):
            P = good.clone()
            P[1][places] = torch.nan
            R = member(P)
            assert bool(R[1].isnan().any()), f"{member} makes {R[1]} of NaN"
            assert bool(orthogonality_error(R).isnan()[1]), f"the orthogonality error of {member} hides NaN"
            numeric.close(R[::2], member(good)[::2], 1e-6, f"{member} beside NaN")


@CONTRACT.check
def batches_are_their_matrices(name: str) -> None:
    """A batch of matrices has the maps of each."""
    for member in members(name):
        P = near_start(member, 4, 2, 3, seed=8)
        each = torch.stack([member(p) for p in P.flatten(0, 1)]).view_as(P)
        numeric.close(member(P), each, 1e-9, f"{member} of a batch")


@CONTRACT.check
def inverse_gives_the_matrix_again(name: str) -> None:
    """``inverse`` of an image is a ``P`` with this image, or an error that says that there is none."""
    for member in members(name):
        R = member(near_start(member, 4, seed=9))
        try:
            P = member.inverse(R)
        except ArgumentError:
            continue
        numeric.close(member(P), R, 1e-6, f"{member} of its inverse")


@CONTRACT.check
def retracts_where_it_says(name: str) -> None:
    """Where it ``retracts``, training may go on from ``P = R``: the image of an image is itself."""
    for member in members(name):
        if member.retracts:
            R = member(near_start(member, 4, seed=10))
            numeric.close(member(R), R, 1e-6, f"{member} of its image")


@CONTRACT.check
def refines_from_its_warm_start(name: str) -> None:
    """``refine`` gives the map near the place of ``warm_start``, with the map's own gradient."""
    weights = numeric.draw(4, 4, seed=11)
    for member in members(name):
        P = near_start(member, 4, seed=12)
        carried = member.warm_start(P)
        assert (carried is not None) == member.warm_starts, f"{member} says warm_starts={member.warm_starts}"
        if carried is None:
            continue
        leaf, other = ((P + 1e-3 * numeric.draw(4, 4, seed=13)).requires_grad_() for _ in range(2))
        R, onward = member.refine(leaf, carried)
        assert onward.shape == carried.shape and not onward.requires_grad
        numeric.close(R, member(other), 1e-6, f"{member} refined")
        (found,), (wanted,) = (
            torch.autograd.grad((m * weights).sum(), p) for m, p in ((R, leaf), (member(other), other))
        )
        numeric.close(found, wanted, 1e-5, f"gradient of {member} refined")


@CONTRACT.check
def turns_a_layer(name: str) -> None:
    """Applied to a layer it starts where the layer is, keeps the lengths of neurons if it is exact, and is undone."""
    from hypersphere import orthogonal

    for member in members(name):
        if member.direct:
            continue
        torch.manual_seed(0)
        layer: Any = torch.nn.Linear(4, 3)
        model = torch.nn.Sequential(layer, torch.nn.Linear(3, 2)).double()
        before = layer.weight.detach().clone()
        orthogonal.apply(model, member, include="0")
        numeric.close(layer.weight, before, 1e-6, f"a layer under {member} at its start")
        with torch.no_grad():
            for parameter in layer.parametrizations.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.02 * numeric.draw(*parameter.shape, seed=14))
        if member.exact:
            numeric.close(layer.weight.norm(dim=1), before.norm(dim=1), 1e-6, f"lengths of neurons under {member}")
        moved = (layer.weight - before).abs().max()
        assert float(moved) > 1e-4, f"{member} moves no neuron"


@CONTRACT.check
def waits_for_nothing(name: str) -> None:
    """Nothing is read off the device."""
    if CONTRACT.fact(name, "waits", False):
        return
    for member in members(name):
        P = near_start(member, 4, dtype=torch.float32).requires_grad_()
        member(P)
        with numeric.Host():
            member(P).sum().backward()


@CONTRACT.check
def is_one_graph(name: str) -> None:
    """Compiled code has no breaks and gives the same numbers."""
    member = members(name)[0]
    torch._dynamo.reset()
    numeric.compiled(member, near_start(member, 4, dtype=torch.float32), tolerance=1e-4)


common.add(CONTRACT, build=lambda name: members(name)[0], recipe=lambda name: [f"orthogonal.name={name}"])
