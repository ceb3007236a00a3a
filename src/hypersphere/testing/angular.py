r"""The contract of angular functions: what falls with the angle, with the slopes and the inverse that it says.

A member's own ``contract`` may declare ``ends`` (its values at 0 and pi, by default 1 and -1), ``variants`` (options
to try beside the defaults), and ``inverse`` or ``slope`` (``False`` where it defines none and cannot be used in
custom backward passes).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hypersphere import angular
from hypersphere.angular import Angular
from hypersphere.testing import common, numeric
from hypersphere.testing.contract import Contract, variants

CONTRACT = Contract("angular function", "angular functions", "hypersphere.angular:angulars")
THETA = torch.linspace(0, math.pi, 201, dtype=torch.float64)
INSIDE = torch.linspace(0.0123, 3.13, 61, dtype=torch.float64)


def members(name: str) -> list[Angular]:
    """The member with each of the options to be tried."""
    return [angular.angulars.create(name, **options) for options in variants(CONTRACT, name)]


@CONTRACT.check
def is_finite_everywhere(name: str) -> None:
    """Value and slope are finite at every cosine, those that rounding puts beyond 1 included, in float32 or wider."""
    for g in members(name):
        for dtype in numeric.FLOATS:
            cosines = torch.tensor([-1.0, 1.0, 0.0, 0.3, -1 - 1e-7, 1 + 1e-7], dtype=dtype, requires_grad=True)
            value = g.of_cosine(cosines)
            assert value.dtype == (dtype if dtype == torch.float64 else torch.float32), f"{dtype} gives {value.dtype}"
            numeric.finite([value, *torch.autograd.grad(value.sum(), cosines)], f"{g} in {dtype}")
        for shape in ((0,), (), (2, 3)):
            assert g.of_cosine(torch.zeros(shape)).shape == g(torch.zeros(shape)).shape == shape


@CONTRACT.check
def has_its_ends(name: str) -> None:
    """It goes from 1 at the angle 0 to -1 at pi, or from and to what it declares."""
    for g in members(name):
        ends = CONTRACT.fact(name, "ends", (1.0, -1.0))
        numeric.close(g(THETA[[0, -1]]), torch.tensor(ends, dtype=torch.float64), 1e-9, f"{g} at its ends")


@CONTRACT.check
def falls_with_the_angle(name: str) -> None:
    """It never rises."""
    for g in members(name):
        assert float(g(THETA).diff().max()) <= 1e-12, f"{g} rises"


@CONTRACT.check
def can_be_transformed(name: str) -> None:
    """``torch.func`` finds first and second derivatives, at angles and at cosines, of all and of each."""
    theta = INSIDE[3:-3:12]
    for g in members(name):
        numeric.transforms(g, theta, what=f"{g} at angles")
        numeric.transforms(g.of_cosine, theta.cos(), what=f"{g} at cosines")


@CONTRACT.check
def is_the_same_on_angles_and_cosines(name: str) -> None:
    """The value at cosines is the value at their angles."""
    for g in members(name):
        numeric.close(g.of_cosine(THETA.cos()), g(THETA), 4e-7, f"{g} at cosines")


@CONTRACT.check
def slopes_are_the_derivatives(name: str) -> None:
    """``slope``, ``slope_of_cosine``, ``slope_at`` and the gradient are the derivatives of the values."""
    for g in members(name):
        cosines = INSIDE.cos()
        if CONTRACT.fact(name, "slope", True):
            numeric.derivative(g, g.slope, INSIDE, f"slope of {g}")
            numeric.derivative(g.of_cosine, g.slope_of_cosine, cosines, f"slope_of_cosine of {g}")
        if CONTRACT.fact(name, "inverse", True):
            middle = cosines[cosines.abs() < 0.9]
            numeric.derivative(g.of_cosine, lambda c: g.slope_at(g.of_cosine(c), c), middle, f"slope_at of {g}")

        def gradient(c: Tensor, g: Angular = g) -> Tensor:
            leaf = c.detach().clone().requires_grad_()
            return torch.autograd.grad(g.of_cosine(leaf).sum(), leaf)[0]

        numeric.derivative(g.of_cosine, gradient, cosines, f"gradient of {g}")


@CONTRACT.check
def inverse_gives_the_value_again(name: str) -> None:
    """``cosine_at`` of a value is a cosine with this value."""
    if not CONTRACT.fact(name, "inverse", True):
        return
    for g in members(name):
        cosines = torch.linspace(-1, 1, 101, dtype=torch.float64)
        values = g.of_cosine(cosines)
        found = g.cosine_at(values)
        assert bool((found.abs() <= 1 + 1e-12).all()), f"cosine_at of {g} gives {found}"
        numeric.close(g.of_cosine(found), values, 1e-6, f"{g} of its inverse")


@CONTRACT.check
def slopes_are_finite_at_the_ends(name: str) -> None:
    """Slopes by the cosine are finite at the poles, where an arccos has none."""
    for g in members(name):
        if CONTRACT.fact(name, "slope", True):
            for dtype in (torch.float32, torch.float64):
                ends = torch.tensor([-1.0, 0.0, 1.0], dtype=dtype)
                numeric.finite([g.slope_of_cosine(ends), g.slope(ends.acos())], f"slope of {g}")
                if CONTRACT.fact(name, "inverse", True):
                    numeric.finite([g.slope_at(g.of_cosine(ends), ends)], f"slope_at of {g}")


@CONTRACT.check
def is_computed_in_full_precision(name: str) -> None:
    """Half precision is that of its input alone, also under autocast."""
    for g in members(name):
        for dtype in numeric.LOW:
            cosines = torch.tensor([-1.0, -0.25, 0.5, 1.0], dtype=dtype)
            wanted = g.of_cosine(cosines.double())
            numeric.close(g.of_cosine(cosines), wanted, 2e-5, f"{g} in {dtype}")
        with torch.autocast("cpu", torch.bfloat16):
            numeric.close(g.of_cosine(cosines.float()), wanted, 2e-5, f"{g} under autocast")


@CONTRACT.check
def waits_for_nothing(name: str) -> None:
    """Nothing is read off the device."""
    for g in members(name):
        with numeric.Host():
            g.of_cosine(torch.linspace(-1, 1, 9).requires_grad_()).sum().backward()
            if CONTRACT.fact(name, "slope", True):
                g.slope_of_cosine(torch.linspace(-1, 1, 9))


@CONTRACT.check
def is_one_graph(name: str) -> None:
    """Compiled code has no breaks and gives the same numbers."""
    torch._dynamo.reset()
    numeric.compiled(members(name)[0].of_cosine, torch.linspace(-0.9, 0.95, 8))


@CONTRACT.check
def works_in_heads_and_layers(name: str) -> None:
    """A head and a layer that are given it compute with it."""
    from hypersphere import losses, nn

    x = numeric.draw(3, 4, dtype=torch.float32).requires_grad_()
    head = losses.create("w-softmax", 4, 3, g=members(name)[0])
    layer = nn.SphereLinear(4, 3, angular=members(name)[0], bias=False)
    with torch.no_grad():
        layer.weight.copy_(head.weight)
    theta = torch.nn.functional.cosine_similarity(x[:, None], head.weight[None], dim=2).acos()
    wanted = members(name)[0](theta)
    numeric.close(head.logits(x), x.norm(dim=1, keepdim=True) * wanted, 1e-3, "logits of a head")
    numeric.close(layer(x), wanted, 1e-3, "responses of a layer")
    numeric.finite(torch.autograd.grad(head(x, torch.tensor([0, 1, 2])), [x, head.weight]), "gradients of a head")


common.add(CONTRACT, build=lambda name: members(name)[0], recipe=lambda name: ["loss.name=w-softmax", f"loss.g={name}"])
