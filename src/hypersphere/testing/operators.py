r"""The contract of operators: :math:`f(w, x) = H(\|w\|, \|x\|)\,g(\theta)` from their declared parts, with its slopes.

``bounded``, ``has_radius`` and ``knows_slopes`` of a member are verified. A member's own ``contract`` may declare
``degree`` (the power by which its magnitude grows where norm and radius grow together: 0 for bounded ones with a
radius, 1 for piecewise linear ones) and ``variants`` (options to try beside the defaults).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module

from hypersphere.nn.operators import Operator, operator, operators
from hypersphere.testing import common, numeric
from hypersphere.testing.contract import Contract, variants

CONTRACT = Contract("operator", "operators", "hypersphere.nn.operators:operators")
NORMS = torch.tensor([0.01, 0.3, 0.5, 0.99, 1.29, 1.31, 2.0, 4.0, 9.0], dtype=torch.float64)
RADIUS = torch.tensor(1.3, dtype=torch.float64)
WEIGHTINGS = ("none", "linear", "joint", "separate")


def members(name: str, **more: object) -> list[Operator]:
    """The member with each of the options to be tried."""
    return [operators.create(name, **{**options, **more}) for options in variants(CONTRACT, name)]


@CONTRACT.check
def is_the_product_of_its_parts(name: str) -> None:
    """On vectors it is magnitude times angular function, for every weighting, from norms and angles written out."""
    w, x = numeric.draw(3, 1, 5, seed=1), numeric.draw(1, 4, 5, seed=2)
    for weighting in WEIGHTINGS:
        for g in ("cosine", "linear", "sqcos"):
            for eps in (0.0, 0.1):
                op = operators.create(
                    name, **{**next(variants(CONTRACT, name)), "weighting": weighting, "angular": g, "eps": eps}
                )
                a, b = (v.square().sum(-1).add(eps).sqrt() for v in (w, x))
                cosine = (w * x).sum(-1) / (a * b)
                h = {
                    "none": lambda a, b, op=op: op.magnitude(b, RADIUS),
                    "linear": lambda a, b, op=op: a * op.magnitude(b, RADIUS),
                    "joint": lambda a, b, op=op: op.magnitude(a * b, RADIUS),
                    "separate": lambda a, b, op=op: op.magnitude(a, RADIUS) * op.magnitude(b, RADIUS) / op.alpha,
                }[weighting](a, b)
                values = {"cosine": cosine, "linear": 1 - 2 * cosine.acos() / torch.pi, "sqcos": cosine * cosine.abs()}
                found = op(w, x, radius=RADIUS if op.has_radius else None)
                numeric.close(found, h * values[g], 1e-6, f"{op} on vectors")


@CONTRACT.check
def slopes_are_the_derivatives(name: str) -> None:
    """The slopes of the magnitude and of the divisor are the derivatives by norm and radius."""
    for op in members(name):
        if not op.knows_slopes:
            continue
        smooth = NORMS[(NORMS - RADIUS).abs() > 1e-3]
        numeric.derivative(
            lambda t: op.magnitude(t, RADIUS), lambda t: op.magnitude_slope(t, RADIUS), smooth, f"magnitude of {op}"
        )
        numeric.derivative(
            lambda t: t / op.magnitude(t, RADIUS), lambda t: op.divisor_slopes(t, RADIUS)[0], smooth, f"divisor of {op}"
        )
        t, radii = torch.tensor(0.8, dtype=torch.float64), NORMS[1:]
        if op.has_radius:
            numeric.derivative(
                lambda r: op.magnitude(t.expand_as(r), r),
                lambda r: op.radius_slope(t.expand_as(r), r),
                radii,
                f"magnitude of {op} by its radius",
            )
            numeric.derivative(
                lambda r: t / op.magnitude(t.expand_as(r), r),
                lambda r: op.divisor_slopes(t.expand_as(r), r)[1],
                radii,
                f"divisor of {op} by the radius",
            )
        else:
            assert not bool(op.radius_slope(NORMS, RADIUS).any()), f"{op} has no radius, but a slope by it"


@CONTRACT.check
def magnitude_is_what_it_declares(name: str) -> None:
    """It is at least 0, never falls, is bounded by alpha where it says so, and heeds the radius only if it has one."""
    for op in members(name):
        t = torch.linspace(0, 50, 2001, dtype=torch.float64)
        h = op.magnitude(t, RADIUS)
        assert bool((h >= 0).all()) and float(h.diff().min()) >= -1e-12, f"the magnitude of {op} is negative or falls"
        if op.bounded:
            numeric.close(op.magnitude(t[-1], RADIUS), torch.tensor(op.alpha), 1e-6, f"the bound of {op}")
        else:
            far = op.magnitude(torch.tensor([1e3, 1e9], dtype=torch.float64), RADIUS)
            assert float(far[1]) > 1.5 * float(far[0]), f"{op} is bounded and does not say so"
        other = op.magnitude(t, 2 * RADIUS)
        assert bool((other != h).any()) == op.has_radius, f"{op} says has_radius={op.has_radius}, its magnitude not so"


@CONTRACT.check
def alpha_is_a_factor(name: str) -> None:
    """``alpha`` multiplies the magnitude (of operators with other factors of their own, that of the first part)."""
    for op in members(name):
        if hasattr(op, "beta"):
            continue
        double = operator(op, alpha=2 * op.alpha)
        numeric.close(double.magnitude(NORMS, RADIUS), 2 * op.magnitude(NORMS, RADIUS), 1e-12, f"{op} with twice alpha")


@CONTRACT.check
def radius_is_a_unit_of_the_norm(name: str) -> None:
    """Where norm and radius grow together, the magnitude grows by one power of it, and is alpha at a radius of 1."""
    for op in members(name):
        if not op.has_radius:
            continue
        degree = CONTRACT.fact(name, "degree", 0 if op.bounded else 1)
        grown = op.magnitude(3 * NORMS, 3 * RADIUS)
        numeric.close(grown, 3**degree * op.magnitude(NORMS, RADIUS), 1e-9, f"{op} with three times norm and radius")


@CONTRACT.check
def has_its_gradients(name: str) -> None:
    """The gradients by kernel, patch and radius are those of differences, with every weighting."""
    w, x = numeric.draw(3, 1, 4, seed=3), numeric.draw(1, 2, 4, seed=4)
    for weighting in WEIGHTINGS:
        for op in members(name, weighting=weighting, angular="sqcos"):
            numeric.gradient(lambda a, b: op(a, b), w, x, what=f"gradient of {op}")
            if op.has_radius:
                numeric.gradient(lambda r: op(w, x, radius=r), RADIUS, what=f"gradient of {op} by its radius")


@CONTRACT.check
def can_be_transformed(name: str) -> None:
    """``torch.func`` finds first and second derivatives, on vectors and in layers, of all samples and of each."""
    from hypersphere.nn import DecoupledConv2d, DecoupledLinear

    w, x, image = numeric.draw(3, 1, 4, seed=3), numeric.draw(1, 2, 4, seed=4), numeric.draw(2, 2, 3, 3, seed=5)
    for weighting in WEIGHTINGS:
        for op in members(name, weighting=weighting, angular="sqcos"):
            numeric.transforms(lambda a, b: op(a, b), w, x, what=f"{op}")
            for kernel, patch in ((w, 0 * x), (0 * w, x), (w, 2 * w)):
                numeric.twice(lambda a, b: op(a, b), kernel, patch, what=f"{op} of zero or aligned vectors")
    for weighting in ("none", "joint"):
        op = members(name, weighting=weighting, angular="linear")[0]
        for layer, sample in (
            (DecoupledLinear(4, 3, operator=op), x[0]),
            (DecoupledConv2d(2, 3, 2, operator=op), image),
        ):
            layer = layer.double().eval()

            def response(a: Tensor, b: Tensor, layer: Module = layer) -> Tensor:
                found: Tensor = torch.func.functional_call(layer, {"weight": b}, (a,))
                return found

            numeric.transforms(response, sample, layer.weight.detach(), what=f"{layer}")


@CONTRACT.check
def turns_with_both_vectors(name: str) -> None:
    """Rotating both changes nothing, scaling the kernel neither where its norm does not count."""
    w, x, q = numeric.draw(3, 1, 5, seed=5), numeric.draw(1, 4, 5, seed=6), numeric.rotation(5)
    for weighting in WEIGHTINGS:
        for op in members(name, weighting=weighting, eps=0.0):
            value = op(w, x)
            numeric.close(op(w @ q, x @ q), value, 1e-9, f"{op} rotated")
            numeric.close(op(-w, x), -value, 1e-9, f"{op} with the opposite kernel")
            if weighting == "none":
                numeric.close(op(7 * w, x), value, 1e-9, f"{op} with a longer kernel")


@CONTRACT.check
def is_finite_everywhere(name: str) -> None:
    """Zero, parallel, opposite, tiny and huge vectors give finite values and gradients; zero gives zero."""
    for dtype in numeric.FLOATS:
        for weighting in WEIGHTINGS:
            for op in (member for eps in (0.0, 1e-4) for member in members(name, weighting=weighting, eps=eps)):
                w = torch.tensor([3.0, 0, 4], dtype=dtype)
                for a, b in (
                    (w, 2 * w),
                    (w, -2 * w),
                    (w, 0 * w),
                    (0 * w, w),
                    (0 * w, 0 * w),
                    (w, w * 1e-3),
                    (w, w * 10),
                ):
                    leaves = [v.clone().requires_grad_() for v in (a, b)]
                    value = op(*leaves)
                    assert value.dtype == (dtype if dtype == torch.float64 else torch.float32)
                    numeric.finite([value, *torch.autograd.grad(value, leaves)], f"{op} of {a} and {b}")
                    if not a.any() or not b.any():
                        assert value.item() == 0, f"{op} of a zero vector is {value.item()}"


@CONTRACT.check
def layers_compute_it(name: str) -> None:
    """A linear layer and a convolution compute the operator of their kernels and patches, with its gradients."""
    from hypersphere.nn import DecoupledConv2d, DecoupledLinear

    options = next(variants(CONTRACT, name))
    op = operators.create(name, **options)
    fixed = {"mean_norm": False} if op.has_radius else {}
    for weighting in ("none", "joint"):
        op = operators.create(name, **{**options, **fixed, "weighting": weighting})
        layer = DecoupledLinear(5, 3, operator=op, bias=False).double()
        conv = DecoupledConv2d(2, 3, 2, operator=op, bias=False).double()
        x, image = numeric.draw(4, 5, seed=7), numeric.draw(2, 2, 3, 4, seed=8)
        patches = torch.nn.functional.unfold(image, 2).transpose(1, 2)
        radius = (lambda layer: layer.radius) if op.has_radius else (lambda layer: None)
        for module, given, vectors in ((layer, x, x), (conv, image, patches)):
            leaf, own = given.clone().requires_grad_(), vectors.clone().requires_grad_()
            found = module(leaf)
            found = found.flatten(2).transpose(1, 2) if module is conv else found
            wanted = op(module.weight.flatten(1), own.unsqueeze(-2), radius=radius(module))
            numeric.close(found, wanted, 1e-9, f"{type(module).__name__} with {op}")
            mine = torch.autograd.grad(found.square().sum(), module.weight)[0]
            numeric.close(
                mine, torch.autograd.grad(wanted.square().sum(), module.weight)[0], 1e-8, f"its gradient, {op}"
            )


@CONTRACT.check
def waits_for_nothing(name: str) -> None:
    """Nothing is read off the device."""
    w, x = numeric.draw(3, 1, 4, dtype=torch.float32), numeric.draw(1, 2, 4, dtype=torch.float32)
    for op in members(name):
        with numeric.Host():
            op(w.requires_grad_(), x.requires_grad_()).sum().backward()


@CONTRACT.check
def is_one_graph(name: str) -> None:
    """Compiled code has no breaks and gives the same numbers."""
    torch._dynamo.reset()
    op = members(name)[0]
    numeric.compiled(
        lambda w, x: op(w, x),
        numeric.draw(3, 1, 4, dtype=torch.float32),
        numeric.draw(1, 2, 4, seed=1, dtype=torch.float32),
    )


common.add(CONTRACT, build=lambda name: members(name)[0], recipe=lambda name: [f"convert.name={name}"])
