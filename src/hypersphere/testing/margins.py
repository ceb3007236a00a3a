r"""The contract of margins: a target that falls with the angle, costs something, and has the slope it says.

A member's own ``contract`` may declare ``sizes`` (numbers to try by size, as in ``{"m": (0.2, 0.4)}``; by default those
of a list that :meth:`~hypersphere.margins.Margin.check` allows), ``neutral`` (the sizes that mean no margin, or
``None`` where there are none), ``falls`` (``False`` where the target may rise with the angle) and ``derivative``
(``False`` where the slope is not that of the value, because training holds a factor fixed).
"""

from __future__ import annotations

import inspect
import itertools
import math
from typing import Any

import torch

from hypersphere.angular import Cosine
from hypersphere.errors import ArgumentError
from hypersphere.margins import Margin, margins
from hypersphere.testing import common, numeric
from hypersphere.testing.contract import Contract, variants

CONTRACT = Contract("margin", "margins", "hypersphere.margins:margins")
TRIED = (0.2, 0.5, 1.0, 1.4, 2.0, 3.0)
THETA = torch.linspace(0, math.pi, 201, dtype=torch.float64)
INSIDE = torch.linspace(0.0123, 3.13, 61, dtype=torch.float64)


def members(name: str) -> list[Margin]:
    """The member with each of the options to be tried."""
    return [margins.create(name, **options) for options in variants(CONTRACT, name)]


def size_names(margin: Margin) -> list[str]:
    """Names of the sizes that a margin takes: what its check asks for, else ``m``."""
    found: list[str] = []
    while True:
        try:
            margin.check(**dict.fromkeys(found, 1.0))
        except KeyError as error:
            found.append(str(error.args[0]))
            continue
        except ArgumentError:
            pass
        break
    takes = inspect.signature(margin.psi).parameters
    own = [key for key, p in takes.items() if p.kind is p.KEYWORD_ONLY and p.default is p.empty and key not in found]
    return found + own


def allowed(margin: Margin, sizes: dict[str, float]) -> bool:
    """Whether a margin takes these sizes."""
    try:
        margin.check(**sizes)
    except ArgumentError:
        return False
    return True


def neutral(name: str, margin: Margin) -> dict[str, float] | None:
    """The sizes at which a margin is none."""
    if "neutral" in getattr(type(margin), "contract", {}):
        declared: dict[str, float] | None = CONTRACT.fact(name, "neutral")
        return declared
    names = size_names(margin)
    plain = base(margin)
    for values in itertools.product((0.0, 1.0), repeat=len(names)):
        sizes = dict(zip(names, values, strict=True))
        if allowed(margin, sizes) and bool((margin.psi(THETA, **sizes) - plain).abs().max() < 1e-12):
            return sizes
    raise AssertionError(
        f"no sizes out of 0 and 1 mean no margin; a member that has none declares neutral=None: {name}"
    )


def base(margin: Margin) -> torch.Tensor:
    """What stands there without a margin, at :data:`THETA`."""
    g = getattr(margin, "g", Cosine())
    return g(THETA)


def settings(name: str, margin: Margin) -> list[dict[str, float]]:
    """Sizes to try: each by itself, the others as if there were none."""
    names = size_names(margin)
    declared: dict[str, tuple[float, ...]] = CONTRACT.fact(name, "sizes", {})
    if declared:
        found = [dict(zip(declared, values, strict=True)) for values in itertools.product(*declared.values())]
    elif not names:
        return [{}]
    else:
        start = neutral(name, margin) or {}
        found = [{**start, size: value} for size in names for value in TRIED]
    found = [sizes for sizes in found if allowed(margin, {k: v for k, v in sizes.items() if k in names})]
    assert found, f"no size of {margin} in {TRIED} is allowed: declare some in contract['sizes']"
    return found


def is_none(name: str, margin: Margin, sizes: dict[str, float]) -> bool:
    """Whether these sizes mean no margin."""
    if CONTRACT.fact(name, "neutral", {}) is None:
        return False
    return {key: sizes[key] for key in size_names(margin) if key in sizes} == neutral(name, margin)


def each(name: str) -> list[tuple[Margin, dict[str, Any]]]:
    """All members with all sizes to try."""
    return [(margin, sizes) for margin in members(name) for sizes in settings(name, margin)]


@CONTRACT.check
def is_finite_everywhere(name: str) -> None:
    """Value and slope are finite at every cosine, those that rounding puts beyond 1 included, in float32 or wider."""
    for margin, sizes in each(name):
        for dtype in numeric.FLOATS:
            cosines = torch.tensor([-1.0, 1.0, 0.0, 0.3, -1 - 1e-7, 1 + 1e-7], dtype=dtype, requires_grad=True)
            value = margin(cosines, **sizes)
            assert value.dtype == (dtype if dtype == torch.float64 else torch.float32), f"{dtype} gives {value.dtype}"
            assert value.shape == cosines.shape
            numeric.finite([value, *torch.autograd.grad(value.sum(), cosines)], f"{margin} {sizes} in {dtype}")
        for shape in ((0,), (), (2, 3)):
            assert margin(torch.zeros(shape), **sizes).shape == shape


@CONTRACT.check
def is_the_same_on_angles_and_cosines(name: str) -> None:
    """The value at cosines is the value at their angles."""
    for margin, sizes in each(name):
        # An arccos loses half of the digits at the ends.
        numeric.close(margin(THETA.cos(), **sizes), margin.psi(THETA, **sizes), 4e-7, f"{margin} {sizes} at cosines")


@CONTRACT.check
def is_nothing_without_a_size(name: str) -> None:
    """At its neutral sizes it is the angular function itself."""
    for margin in members(name):
        sizes = neutral(name, margin)
        if sizes is not None:
            numeric.close(margin.psi(THETA, **sizes), base(margin), 1e-12, f"{margin} without a margin")


@CONTRACT.check
def never_helps(name: str) -> None:
    """The target is at most the value without a margin, and less somewhere."""
    for margin, sizes in each(name):
        lower = base(margin) - margin.psi(THETA, **sizes)
        assert bool((lower >= -1e-12).all()), f"{margin} {sizes} gives more than without a margin: {lower.min():g}"
        if not is_none(name, margin, sizes):
            assert bool((lower > 1e-3).any()), f"{margin} {sizes} changes nothing"


@CONTRACT.check
def falls_with_the_angle(name: str) -> None:
    """The target never rises with the angle."""
    if not CONTRACT.fact(name, "falls", True):
        return
    for margin, sizes in each(name):
        rise = margin.psi(THETA, **sizes).diff().max()
        assert float(rise) <= 1e-12, f"{margin} {sizes} rises by {rise:g}"


@CONTRACT.check
def costs_more_the_wider_it_is(name: str) -> None:
    """A larger size never gives a larger target."""
    if CONTRACT.fact(name, "neutral", {}) is None:
        return
    for margin in members(name):
        tried = settings(name, margin)
        for one, other in itertools.combinations(tried, 2):
            larger = [key for key in one if one[key] < other[key]]
            if len(larger) == 1 and larger[0] in size_names(margin) and all(one[k] <= other[k] for k in one):
                rise = (margin.psi(THETA, **other) - margin.psi(THETA, **one)).max()
                assert float(rise) <= 1e-12, f"{margin} gives more with {other} than with {one}"


@CONTRACT.check
def slope_is_the_derivative(name: str) -> None:
    """``slope`` is the derivative of the target by the angle, and a gradient by cosines that by cosines."""
    if not CONTRACT.fact(name, "derivative", True):
        return
    for margin, sizes in each(name):
        numeric.derivative(
            lambda t: margin.psi(t, **sizes), lambda t: margin.slope(t, **sizes), INSIDE, f"slope of {margin} {sizes}"
        )

        def by_cosine(c: torch.Tensor, margin: Margin = margin, sizes: dict[str, Any] = sizes) -> torch.Tensor:
            leaf = c.detach().clone().requires_grad_()
            return torch.autograd.grad(margin(leaf, **sizes).sum(), leaf)[0]

        numeric.derivative(lambda c: margin(c, **sizes), by_cosine, INSIDE.cos(), f"gradient of {margin} {sizes}")


@CONTRACT.check
def one_size_a_sample_is_that_size_for_each(name: str) -> None:
    """Sizes may be tensors, one a sample."""
    for margin in members(name):
        tried = settings(name, margin)
        theta = torch.linspace(0.1, 3.0, len(tried), dtype=torch.float64)
        together = {key: torch.tensor([float(s[key]) for s in tried], dtype=torch.float64) for key in tried[0]}
        for call, at in ((margin.psi, theta), (margin.__call__, theta.cos())):
            one = torch.stack([call(t, **sizes) for t, sizes in zip(at, tried, strict=True)])
            numeric.close(call(at, **together), one, 1e-9, f"{margin} with a size for each sample")


@CONTRACT.check
def refuses_sizes_that_are_none(name: str) -> None:
    """NaN is no size, and the error names the argument."""
    for margin in members(name):
        if type(margin).check is Margin.check:
            continue
        for size in size_names(margin):
            good = settings(name, margin)[0]
            try:
                margin.check(**{**{k: v for k, v in good.items() if k in size_names(margin)}, size: math.nan})
            except ArgumentError as error:
                assert error.argument == size, f"the error names {error.argument}, should name {size}"
                continue
            raise AssertionError(f"{margin} takes {size}=nan")


@CONTRACT.check
def is_computed_in_full_precision(name: str) -> None:
    """Half precision is that of its input alone, also under autocast."""
    for margin, sizes in each(name):
        for dtype in numeric.LOW:
            cosines = torch.tensor([-1.0, -0.25, 0.5, 1.0], dtype=dtype)
            wanted = margin(cosines.double(), **sizes)
            numeric.close(margin(cosines, **sizes), wanted, 2e-5, f"{margin} in {dtype}")
        with torch.autocast("cpu", torch.bfloat16):
            numeric.close(margin(cosines.float(), **sizes), wanted, 2e-5, f"{margin} under autocast")


@CONTRACT.check
def waits_for_nothing(name: str) -> None:
    """Nothing is read off the device, with numbers or with tensors as sizes."""
    for margin, sizes in each(name):
        cosines = torch.linspace(-1, 1, 9).requires_grad_()
        tensors = {key: torch.full((9,), float(value)) for key, value in sizes.items()}
        with numeric.Host():
            margin(cosines, **sizes).sum().backward()
            margin(cosines, **tensors).sum().backward()


@CONTRACT.check
def is_one_graph(name: str) -> None:
    """Compiled code has no breaks and gives the same numbers."""
    margin = members(name)[0]
    sizes = settings(name, margin)[0]
    torch._dynamo.reset()
    numeric.compiled(lambda c: margin(c, **sizes), torch.linspace(-0.9, 0.9, 9))


def _recipe(name: str) -> list[str]:
    margin = members(name)[0]
    sizes = settings(name, margin)[0]
    if not set(sizes) <= {"m"}:
        return []  # a recipe gives one size to this loss
    return ["loss.name=margin-softmax", "loss.s=30", f"loss.psi={name}", *(f"loss.m={m}" for m in sizes.values())]


common.add(CONTRACT, build=lambda name: members(name)[0], recipe=_recipe)
