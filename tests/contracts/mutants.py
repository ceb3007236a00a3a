"""Members with one fault each, which their family's contract must find: ``python -m tests.contracts.mutants``.

A mutant is a member of the package with one thing changed, registered as any other member and nothing else. The table
that the command prints says which check finds it.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import SkipTest

import torch

import hypersphere as hs
from hypersphere import recipe
from hypersphere.testing import Contract

THIS = sys.modules[__name__]
NAME = "mutant"


@dataclass(frozen=True)
class Mutant:
    """A member with a fault: its family, the member, what is wrong, and what makes it of the member's factory."""

    family: str
    member: str
    fault: str
    make: Callable[[Any], Any] = field(compare=False, repr=False)


TABLE: list[Mutant] = []


def add(family: str, member: str, **faults: Any) -> None:
    """Add mutants of a member; a fault is a dictionary of changed attributes or a function of the factory."""
    for fault, change in faults.items():
        make = change if callable(change) else functools.partial(changed, change)
        TABLE.append(Mutant(family, member, fault.replace("_", " "), make))


def changed(changes: dict[str, Any], base: Any) -> Any:
    """A class with other attributes; one of the name of its parent, so that examples in the help are its own."""
    own = {k: v for k, v in changes.items() if v is not None}
    kind = types.new_class(
        base.__name__, (base,), {}, lambda space: space.update({"__module__": __name__, "__doc__": base.__doc__, **own})
    )
    kind.__qualname__ = base.__name__
    return kind


def after(method: str, fault: Callable[..., Any]) -> dict[str, Any]:
    """A change of what a method returns: ``fault(self, result, *arguments)``."""

    def mutated(self: Any, *args: Any, **options: Any) -> Any:
        found = getattr(super(type(self), self), method)(*args, **options)
        return fault(self, found, *args)

    return {method: mutated}


def given(method: str, fault: Callable[..., tuple[Any, ...]]) -> dict[str, Any]:
    """A change of what a method is given: ``fault(self, *arguments)``."""

    def mutated(self: Any, *args: Any, **options: Any) -> Any:
        return getattr(super(type(self), self), method)(*fault(self, *args), **options)

    return {method: mutated}


def function(fault: Callable[..., Any]) -> Callable[[Any], Any]:
    """A change of what a registered function returns: ``fault(result, *arguments)``."""

    def make(base: Any) -> Any:
        @functools.wraps(base)
        def mutated(*args: Any, **options: Any) -> Any:
            return fault(base(*args, **options), *args)

        return mutated

    return make


def calls(fault: Callable[..., Any]) -> Callable[[Any], Any]:
    """A registered function in place of another: ``fault(function, *arguments, **options)``."""

    def make(base: Any) -> Any:
        @functools.wraps(base)
        def mutated(*args: Any, **options: Any) -> Any:
            return fault(base, *args, **options)

        return mutated

    return make


def host(_: Any, value: torch.Tensor, *__: Any) -> torch.Tensor:
    """The value, after the host has looked at it."""
    return value * (value.detach().sum().item() * 0 + 1)


def rough(_: Any, value: torch.Tensor, *__: Any) -> torch.Tensor:
    """The value with the digits of bfloat16."""
    return value.bfloat16().to(value.dtype)


def noisy(_: Any, value: torch.Tensor, *__: Any) -> torch.Tensor:
    """The value and some noise."""
    return value + 0.01 * torch.rand_like(value)


def cut(_: Any, value: torch.Tensor, *__: Any) -> torch.Tensor:
    """The value without its gradient."""
    return value.detach() + 0 * value


def times(factor: float) -> Callable[..., torch.Tensor]:
    """The value times a factor."""
    return lambda _self, value, *_: factor * value


def plus(number: float) -> Callable[..., torch.Tensor]:
    """The value and a number."""
    return lambda _self, value, *_: value + number


def built(
    base: Any, then: Callable[[Any], Any] = id, options: Callable[[dict[str, Any]], Any] = dict, **changes: Any
) -> Any:
    """A class whose objects are built with other options, or changed when they are built."""

    @functools.wraps(base.__init__)
    def start(self: Any, *args: Any, **given: Any) -> None:
        base.__init__(self, *args, **options(given))
        then(self)

    return changed({"__init__": start, **changes}, base)


def nothing(base: Any) -> Any:
    """No fault: the control, which passes."""
    if isinstance(base, type) and issubclass(base, recipe.Section):
        return _section(base)
    return changed({}, base) if isinstance(base, type) else function(lambda found, *_: found)(base)


@contextmanager
def registered(contract: Contract, mutant: Mutant) -> Iterator[str]:
    """The mutant in its registry, under a name of its own."""
    factory = mutant.make(contract.entry(mutant.member).factory)
    contract.registry.register(NAME)(factory)
    if isinstance(factory, type):
        setattr(THIS, factory.__name__, factory)  # where pickle looks for it
    try:
        yield NAME
    finally:
        contract.registry.remove(NAME)


def killer(mutant: Mutant) -> tuple[str, str] | None:
    """The first check that a mutant fails, and what it says; ``None`` where it passes all."""
    contract = hs.testing.contract(mutant.family)
    with registered(contract, mutant) as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for check in contract.checks:
            try:
                check(name)
            except SkipTest:
                continue
            except Exception as error:  # noqa: BLE001 (a wrong member may raise anything)
                return check.__name__, f"{type(error).__name__}: {error}".split("\n")[0]
    return None


# ------------------------------------------------------------------------------------------------ losses


add(
    "losses",
    "arcface",
    twice_the_loss=after("forward", times(2)),
    loss_of_the_wrong_sign=after("forward", times(-1)),
    a_constant_is_added=after("forward", plus(0.1)),
    no_gradient=after("forward", cut),
    the_labels_are_shifted=given("forward", lambda s, x, y: (x, torch.where(y >= 0, (y + 1) % s.classes, y))),
    NaN_for_zero_features=given("forward", lambda s, x, y: (x / x.norm(dim=1, keepdim=True), y)),
    features_count_by_their_length=after("forward", lambda s, v, x, y: v * (1 + 0.1 * x.detach().norm())),
    the_first_feature_counts_twice=given("forward", lambda s, x, y: (torch.cat([2 * x[:, :1], x[:, 1:]], 1), y)),
    half_precision_inside=given("forward", lambda s, x, y: (x.bfloat16().to(x.dtype), y)),
    the_host_looks_at_the_loss=after("forward", host),
    noise_on_the_loss=after("forward", noisy),
    logits_with_a_sign=after("logits", times(-1)),
    logits_with_an_offset_of_one_class=after("logits", lambda s, v, x: v + torch.eye(s.classes)[0].to(v)),
    target_twice_the_margin=given("psi", lambda s, t, *more: (t + 0.5, *more)),
    target_that_rises=after("psi", lambda s, v, t, *_: -v),
    slope_of_the_wrong_sign=after("slope", times(-1)),
    slope_with_a_lost_factor=after("slope", times(0.5)),
    last_sample_forgotten=given("forward", lambda s, x, y: (x[:-1], y[:-1]) if len(y) > 1 else (x, y)),
    samples_mixed=given("forward", lambda s, x, y: (x.roll(1, 0), y)),
    the_bias_of_a_class=after("margin_logits", lambda s, v, *_: v + torch.eye(s.classes)[1].to(v)),
)

# ------------------------------------------------------------------------------------------------ margins

add(
    "margins",
    "additive-cosine",
    the_sign_of_the_margin={
        "psi": lambda s, theta, *, m, **_: theta.cos() + m,
        "__call__": lambda s, c, *, m, **_: c.to(torch.promote_types(c.dtype, torch.float32)) + m,
    },
    twice_the_margin={
        "psi": lambda s, theta, *, m, **_: theta.cos() - 2 * m,
        "__call__": lambda s, c, *, m, **_: c.to(torch.promote_types(c.dtype, torch.float32)) - 2 * m,
    },
    cosines_without_a_margin={
        "__call__": lambda s, c, *, m, **_: c.to(torch.promote_types(c.dtype, torch.float32)) - 0 * m
    },
    slope_of_the_wrong_sign=after("slope", times(-1)),
    slope_with_a_lost_factor=after("slope", times(0.5)),
    infinite_slope_at_the_poles={
        "__call__": lambda s, c, *, m, **_: (
            torch.acos(c.to(torch.promote_types(c.dtype, torch.float32)).clamp(-1, 1)).cos() - m
        )
    },
    half_precision={"__call__": lambda s, c, *, m, **_: c - m},
    half_precision_inside=after("__call__", rough),
    the_host_looks=after("__call__", host),
    NaN_is_taken={"check": lambda s, **m: None if m["m"] != m["m"] else hs.margins.AdditiveCosine.check(s, **m)},
    one_margin_for_all={
        "psi": lambda s, theta, *, m, **_: theta.cos() - (m.mean() if isinstance(m, torch.Tensor) else m)
    },
    NaN_beyond_one={
        "__call__": lambda s, c, *, m, **_: torch.acos(c.to(torch.promote_types(c.dtype, torch.float32))).cos() - m
    },
    no_help={"__doc__": "margin"},
    gradient_cut=after("__call__", cut),
)
add(
    "margins",
    "additive-angle",
    rises_beyond_pi={
        "psi": lambda s, theta, *, m, **_: (theta + m).cos(),
        "__call__": lambda s, c, *, m, **_: (hs.geometry.arccos(c) + m).cos(),
    },
    sign_of_the_angle={
        "psi": lambda s, theta, *, m, **_: (theta - m).clamp(min=0).cos(),
        "__call__": lambda s, c, *, m, **_: (hs.geometry.arccos(c) - m).clamp(min=0).cos(),
    },
)

# ------------------------------------------------------------------------------------------------ rules of negatives

add(
    "rules of negatives",
    "binary",
    slope_of_the_wrong_sign=after("_slope", times(-1)),
    slope_with_a_lost_factor=after("_slope", times(0.5)),
    value_of_the_wrong_sign=after("_value", times(-1)),
    value_without_the_margin={
        "_value": lambda s, c, *p: 2 * ((c + 1) / 2).clamp(min=0).pow(s.t) - 1 + 0 * p[0].square()
    },
    NaN_below_minus_one={"_value": lambda s, c, m: 2 * ((c + 1) / 2).pow(s.t + 0.5) - 1 + m},
    term_of_the_wrong_sign=after("term", times(-1)),
    slope_of_the_term_with_a_lost_factor=after("term_slope", times(0.5)),
    slope_of_the_term_of_the_wrong_side={"term_slope": lambda s, f: (-f).sigmoid()},
    term_that_overflows={"term": lambda s, f: f.exp().log1p()},
    target_of_the_wrong_sign={"target_term": lambda s, f: s.term(f)},
    detached_is_another_value={"value": lambda s, c, *p: c if s.detach else s._value(c, *p)},
    detached_has_its_own_slope={"slope": lambda s, c, *p: s._slope(c, *p)},
    half_precision_inside=after("_value", rough),
    the_host_looks=after("_value", host),
    gradient_cut=after("_value", cut),
)

# ------------------------------------------------------------------------------------------------ angular functions

add(
    "angular functions",
    "linear",
    slope_of_the_wrong_sign=after("slope", times(-1)),
    slope_with_a_lost_factor=after("slope", times(0.5)),
    slope_by_cosines_without_the_chain_rule={"slope_of_cosine": lambda s, c: s.slope(c)},
    inverse_of_the_wrong_sign=after("cosine_at", times(-1)),
    inverse_too_small=after("cosine_at", times(0.9)),
    slope_at_values_of_another_factor=after("slope_at", times(2)),
    value_with_a_lost_factor=after("__call__", times(0.5)),
    rises=after("__call__", times(-1)),
    infinite_slope_at_the_poles={
        "of_cosine": lambda s, c: s(torch.acos(c.to(torch.promote_types(c.dtype, torch.float32)).clamp(-1, 1)))
    },
    NaN_beyond_one={"of_cosine": lambda s, c: s(torch.acos(c.to(torch.promote_types(c.dtype, torch.float32))))},
    half_precision={"of_cosine": lambda s, c: s(hs.geometry.arccos(c).to(c.dtype))},
    half_precision_inside=after("of_cosine", rough),
    the_host_looks=after("of_cosine", host),
    another_function_of_cosines={"of_cosine": lambda s, c: c.to(torch.promote_types(c.dtype, torch.float32)) + 0},
    gradient_cut=after("of_cosine", cut),
)

# ------------------------------------------------------------------------------------------------ operators

add(
    "operators",
    "tanh",
    slope_of_the_wrong_sign=after("magnitude_slope", times(-1))
    | {k: getattr(hs.nn.operators["tanh"].factory, k) for k in ("magnitude", "radius_slope", "divisor_slopes")},
    slope_with_a_lost_factor=after("magnitude_slope", times(0.5))
    | {k: getattr(hs.nn.operators["tanh"].factory, k) for k in ("magnitude", "radius_slope", "divisor_slopes")},
    slope_by_the_radius_of_the_wrong_sign=after("radius_slope", times(-1))
    | {k: getattr(hs.nn.operators["tanh"].factory, k) for k in ("magnitude", "magnitude_slope", "divisor_slopes")},
    slope_of_the_divisor_swapped=after("divisor_slopes", lambda s, v, *_: v[::-1])
    | {k: getattr(hs.nn.operators["tanh"].factory, k) for k in ("magnitude", "magnitude_slope", "radius_slope")},
    lost_alpha={"magnitude": lambda s, t, radius=1.0: (t / radius).tanh()},
    radius_forgotten={"magnitude": lambda s, t, radius=1.0: s.alpha * t.tanh() + 0 * radius},
    radius_the_wrong_way={"magnitude": lambda s, t, radius=1.0: s.alpha * (t * radius).tanh()},
    radius_twice={"magnitude": lambda s, t, radius=1.0: s.alpha * (t / (2 * radius)).tanh()},
    not_bounded={"magnitude": lambda s, t, radius=1.0: s.alpha * (t / radius).log1p()},
    says_unbounded={"bounded": False},
    twice_the_response=after("__call__", times(2)),
    response_of_the_wrong_sign=after("response", times(-1)),
    NaN_for_zero_patches={"norms": lambda s, e: ((e + s.eps).sqrt(), (e + s.eps).rsqrt() if s.eps else 1 / e.sqrt())},
    eps_forgotten={
        "norms": lambda s, e: (e.clamp(min=1e-30).sqrt(), torch.where(e > 0, e.clamp(min=1e-30).rsqrt(), 0.0))
    },
    the_host_looks=after("__call__", host),
    half_precision_inside=after("__call__", rough),
    first_number_counts_twice=given(
        "__call__", lambda s, w, x, *more: (w, torch.cat([2 * x[..., :1], x[..., 1:]], -1), *more)
    ),
    negative_magnitude={"magnitude": lambda s, t, radius=1.0: -s.alpha * (t / radius).tanh()},
)

# ------------------------------------------------------------------------------------------------ layers

add(
    "layers",
    "linear",
    one_output_too_many=after("forward", lambda s, v, x: torch.nn.functional.pad(v, (0, 1))),
    NaN_for_zero_inputs=given("forward", lambda s, x: (x / x.norm(dim=1, keepdim=True),)),
    gradient_cut=after("forward", cut),
    no_gradient_of_the_input=given("forward", lambda s, x: (x.detach() + 0 * x,)),
    batch_mixed=given("forward", lambda s, x: (x - x.mean(0),)),
    the_host_looks=after("forward", host),
    noise=after("forward", noisy),
    weights_become_half=after("forward", lambda s, v, x: setattr(s.weight, "data", s.weight.data.bfloat16()) or v),
    state_that_is_not_saved=lambda base: built(
        base, lambda self: setattr(self, "shift", torch.rand(1)), forward=lambda s, x: base.forward(s, x) + s.shift
    ),
    evaluation_changes_the_weights=after("forward", lambda s, v, x: s.weight.data.mul_(0.99) is None or v),
)
add(
    "layers",
    "batchnorm2d",
    statistics_of_the_batch_in_evaluation={
        "forward": lambda s, x: torch.nn.functional.batch_norm(x, None, None, s.weight, s.bias, True)
    },
    statistics_move_in_evaluation={
        "forward": lambda s, x: torch.nn.functional.batch_norm(
            x, s.running_mean.mul_(0.9), s.running_var, s.weight, s.bias, s.training
        )
    },
)
add(
    "layers",
    "relu",
    another_shape=after("forward", lambda s, v, x: v.flatten(1)),
    NaN_at_zero=after("forward", lambda s, v, x: v * (x / x)),
)

# ------------------------------------------------------------------------------------------------ potentials

add(
    "potentials",
    "gaussian",
    slope_of_the_wrong_sign=after("slope", times(-1)),
    slope_with_a_lost_factor=after("slope", times(0.5)),
    slope_by_the_chord={"slope": lambda s, q: 2 * q.sqrt() * (-s.t * q).exp() * -s.t},
    value_of_the_wrong_sign=after("__call__", times(-1)) | {"slope": lambda s, q: (-s.t * q).exp() * s.t},
    both_give_something_else={"both": lambda s, q: (s(q), 2 * s.slope(q))},
    both_swapped={"both": lambda s, q: (s.slope(q), s(q))},
    half_precision_inside=after("__call__", rough),
    the_host_looks={"both": lambda s, q: (s(q) * (q.sum().item() * 0 + 1), s.slope(q))},
    NaN_for_opposite_directions=after("__call__", lambda s, v, q: v * (4 - q) / (4 - q)),
    gradient_cut=after("__call__", cut),
    twice_the_value={"__call__": lambda s, q: 2 * (-s.t * q).exp(), "slope": lambda s, q: -2 * s.t * (-s.t * q).exp()},
    no_number_among_its_options={"code": lambda s: ("riesz", [s.t])},
    rises={"__call__": lambda s, q: (s.t * q).exp(), "slope": lambda s, q: s.t * (s.t * q).exp()},
)

# ------------------------------------------------------------------------------------------------ energies

add(
    "energies",
    "pair-energy",
    of_the_wrong_sign=after("energy", times(-1)),
    twice_the_value=after("energy", times(2)),
    gradient_cut=after("energy", cut),
    NaN_for_zero_neurons=given("energy", lambda s, v, *more: (v / v.norm(dim=-1, keepdim=True), *more)),
    lengths_count=after("energy", lambda s, e, v, *_: e * (1 + v.square().sum((1, 2)))),
    zero_neurons_count=after("energy", lambda s, e, v, *_: e * v.shape[1]),
    the_first_coordinate_counts_twice=given(
        "energy", lambda s, v, *more: (torch.cat([2 * v[..., :1], v[..., 1:]], -1), *more)
    ),
    the_order_counts=after(
        "energy", lambda s, e, v, *_: e + 1e-3 * torch.nn.functional.normalize(v, dim=2)[:, :1].sum((1, 2))
    ),
    batches_are_mixed=after("energy", lambda s, e, *_: e.mean().expand_as(e)),
    half_precision_inside=given("energy", lambda s, v, *more: (v.bfloat16().to(v.dtype), *more)),
    the_host_looks=after("energy", host),
    the_weight_of_a_layer_forgotten={"_weight": lambda s, layer: 1.0},
    a_matrix_is_something_else=after("forward", lambda s, v, t: v + 0.5 if isinstance(t, torch.Tensor) else v),
    noise=after("energy", noisy),
    the_last_neuron_forgotten=given("energy", lambda s, v, *more: (v[:, :-1], *more)),
)

# ------------------------------------------------------------------------------------------------ orthogonal maps

add(
    "orthogonal maps",
    "cayley",
    of_the_wrong_sign=given("evaluate", lambda s, P: (-P,)),
    half_the_angle=given("evaluate", lambda s, P: (P / 2,)),
    nearly_orthogonal=after("evaluate", lambda s, R, P: R * (1 + 1e-3 * P.square().mean())),
    a_reflection=after("evaluate", lambda s, R, P: R * torch.tensor([-1.0] + [1.0] * (R.shape[-1] - 1), dtype=R.dtype)),
    gradient_cut=after("evaluate", cut),
    gradient_of_the_wrong_sign=given("evaluate", lambda s, P: (2 * P.detach() - P,)),
    says_that_it_reads_everything={
        "skew": False,
        "start": lambda s, d, *, batch=(), device=None, dtype=None: torch.zeros(*batch, d, d, dtype=dtype),
    },
    more_free_parameters={"free": lambda s, d: d * d},
    inverse_of_the_wrong_sign={"inverse": lambda s, R: -type(s).__mro__[1].inverse(s, R)},
    refines_something_else=after("refine", lambda s, f, P, c: (f[0].mT, f[1])),
    warm_starts_and_does_not_say={"warm_start": lambda s, P: P},
    retracts_and_does_not={"retracts": True},
    batches_are_mixed=after("evaluate", lambda s, R, P: R.flatten(0, -3).flip(0).view_as(R) if R.dim() > 2 else R),
    the_host_looks=after("evaluate", host),
    half_precision_inside=after("evaluate", rough),
    starts_elsewhere={
        "start": lambda s, d, *, batch=(), device=None, dtype=None: torch.ones(*batch, d, d, dtype=dtype)
    },
)

# ------------------------------------------------------------------------------------------------ attacks

add(
    "attacks",
    "fgsm",
    the_other_way=after("perturb", lambda s, v, predict, x, *_: (2 * x - v).clamp(0, 1)),
    beyond_the_budget=after("perturb", lambda s, v, predict, x, *_: (x + 1.5 * (v - x)).clamp(0, 1)),
    less_than_the_budget=after("perturb", lambda s, v, predict, x, *_: x + 0.3 * (v - x)),
    outside_of_zero_and_one=after("perturb", lambda s, v, predict, x, *_: x + s.eps * (v - x).sign() * 1.0),
    a_small_change_without_a_budget=after("perturb", lambda s, v, *_: (v + 0.01).clamp(0, 1)),
    draws_of_its_own=after("perturb", lambda s, v, predict, x, *_: torch.where(torch.rand_like(x) < 0.9, v, x)),
    images_changed_in_place={"perturb": lambda s, predict, x, y, g: x.add_(s.eps).clamp_(0, 1)},
    labels_ignored=given("perturb", lambda s, p, x, y, g: (p, x, torch.zeros_like(y), g)),
    samples_mixed=after("perturb", lambda s, v, *_: v.flip(0)),
    another_shape=after("perturb", lambda s, v, *_: v.flatten(1)),
    NaN_for_flat_models=after("perturb", lambda s, v, predict, x, *_: v * ((v - x).abs().sum() / (v - x).abs().sum())),
    the_host_looks=after("perturb", host),
    a_gradient_stays=after("__call__", lambda s, v, *_: v.requires_grad_()),
    half_precision=after("__call__", lambda s, v, p, x, *_: v.to(x.dtype)),
)

# ------------------------------------------------------------------------------------------------ models

add(
    "models",
    "digits-cnn",
    another_dim=after("forward", lambda s, v, x: v[:, :-1]),
    no_gradient=after("forward", lambda s, v, x: v.detach()),
    NaN=after("forward", lambda s, v, x: v / 0 * 0),
    samples_mixed=after("forward", lambda s, v, x: v - v.mean(0)),
    samples_in_another_order=after("forward", lambda s, v, x: v.flip(0)),
    the_same_for_every_sample=after("forward", lambda s, v, x: 0 * v + 1),
    noise_in_evaluation=after("forward", noisy),
    the_host_looks=after("forward", host),
    layers_are_its_own=lambda base: built(base, options=lambda o: {**o, "act": "relu"}),
    state_in_evaluation=after("forward", lambda s, v, x: [b.add_(1) for b in s.buffers()] == None or v),
    half_precision_that_overflows=after(
        "forward", lambda s, v, x: v * (float("nan") if torch.is_autocast_enabled("cpu") else 1.0)
    ),
    shares_a_weight_with_others=lambda base: _sharing(base),
)


def _sharing(base: Any) -> Any:
    kept: dict[Any, Any] = {}

    def share(self: Any) -> None:
        layer = next(m for m in self.modules() if isinstance(m, torch.nn.Conv2d))
        layer.weight = kept.setdefault((layer.weight.device, layer.weight.shape), layer.weight)

    return built(base, share)


# ------------------------------------------------------------------------------------------------ data sets


def _part(which: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return function(lambda data, *_: replace(data, **{which: change(getattr(data, which))}))


def _split(**changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda split: replace(split, **{key: change(getattr(split, key)) for key, change in changes.items()})


add(
    "data sets",
    "digits",
    labels_from_one=_part("train", _split(labels=lambda y: y + 1)),
    negative_labels=_part("test", _split(labels=lambda y: y - 1)),
    labels_mixed=_part(
        "train", _split(labels=lambda y: y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))])
    ),
    labels_of_another_type=_part("train", _split(labels=lambda y: y.float())),
    one_label_too_few=_part("train", _split(labels=lambda y: y[:-1])),
    tested_on_what_is_trained_on=function(lambda data, *_: replace(data, test=data.train)),
    nothing_to_test=_part("test", _split(images=lambda x: x[:0], labels=lambda y: y[:0])),
    another_order_every_time=_part(
        "train", lambda s: (lambda p: replace(s, images=s.images[p], labels=s.labels[p]))(torch.randperm(len(s)))
    ),
    images_of_another_shape=_part("test", _split(images=lambda x: x[:, :, 1:])),
    not_finite=_part("train", _split(images=lambda x: x.float() / 0)),
    a_class_without_samples=function(lambda data, *_: replace(data, class_names=(*data.class_names, "ten"))),
    two_classes_of_one_name=function(lambda data, *_: replace(data, class_names=("0", *data.class_names[:-1]))),
    no_file_and_no_word_about_it=calls(
        lambda base, *a, **o: (_ for _ in ()).throw(hs.errors.HypersphereError("failed"))
    ),
)

# ------------------------------------------------------------------------------------------------ evaluations


def _metrics(change: Callable[[float], Any]) -> Callable[[Any], Any]:
    return function(lambda found, *_: {key: change(value) for key, value in found.items()})


add(
    "evaluations",
    "classification",
    of_the_wrong_sign=_metrics(lambda v: -v),
    twice_the_value=_metrics(lambda v: 2 * v),
    a_percentage=_metrics(lambda v: 100 * v),
    one_minus_it=_metrics(lambda v: 1 - v),
    a_tensor=_metrics(torch.tensor),
    not_finite=_metrics(lambda v: v / 0.0 if v else float("nan")),
    noise=_metrics(lambda v: v + float(torch.rand(()))),
    the_order_counts=function(lambda found, o: {k: v + 0.01 * float(o.features[0, 0]) for k, v in found.items()}),
    lengths_count=function(lambda found, o: {k: v + 0.01 * float(o.features.norm()) for k, v in found.items()}),
    outputs_changed=function(lambda found, o: (o.logits.mul_(2), found)[1]),
    the_last_sample_forgotten=calls(
        lambda base, o: base(replace(o, logits=o.logits[:-1], labels=o.labels[:-1])) | {"last": float(o.labels[-1])}
    ),
    labels_shifted=calls(lambda base, o: base(replace(o, labels=(o.labels + 1) % 4))),
    names_that_are_none=function(lambda found, *_: {1: 1.0, **found}),
)

# ------------------------------------------------------------------------------------------------ protocols


def _options(base: Any, **defaults: Any) -> Any:
    signature = inspect.signature(base)
    own = calls(lambda f, *a, **o: f(*a, **o))(base)
    own.__signature__ = signature.replace(
        parameters=[p.replace(default=defaults.get(p.name, p.default)) for p in signature.parameters.values()]
    )
    return own


for _name in ("lfw10", "ytf10", "megaface"):
    add(
        "protocols",
        _name,
        nothing_found=function(lambda found, *_: None),
        features_without_a_direction=calls(lambda base, x, *a, **o: base(x * 0 + 1, *a, **o)),
        features_in_another_order=calls(lambda base, first, *a, **o: base(first.roll(1, 0), *a, **o)),
        an_option_without_a_default=lambda base: _options(
            base, level=inspect.Parameter.empty, ranks=inspect.Parameter.empty
        ),
        no_help=lambda base: setattr(own := nothing(base), "__doc__", "protocol") or own,
        no_example=lambda base: setattr(own := nothing(base), "__doc__", base.__doc__.split("Example:")[0]) or own,
    )

# ------------------------------------------------------------------------------------------------ optimisers


def _stepping(then: Callable[[Any, list[torch.Tensor]], None]) -> Callable[[Any], Any]:
    """A maker of optimisers, after each step of which something is done to it, beside its parameters as they were."""

    def make(base: Any) -> Any:
        @functools.wraps(base)
        def maker(groups: Any, **options: Any) -> Any:
            made = base(groups, **options)
            step = made.step

            @torch.no_grad()
            def stepped(*args: Any) -> None:
                before = [p.detach().clone() for group in made.param_groups for p in group["params"]]
                step(*args)
                then(made, before)

            made.step = stepped
            return made

        return maker

    return make


def _moved(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    """An optimiser whose parameters end somewhere else: ``change(after, before)``."""

    def then(made: Any, before: list[torch.Tensor]) -> None:
        for p, old in zip([p for group in made.param_groups for p in group["params"]], before, strict=True):
            p.copy_(change(p, old))

    return _stepping(then)


def _forget(made: Any, _: Any) -> None:
    for state in made.state.values():
        for key in [key for key, value in state.items() if isinstance(value, torch.Tensor)]:
            state[key] = float(state[key].sum())


def _grow(made: Any, _: Any) -> None:
    for state in made.state.values():
        state["another"] = torch.zeros(len(state))


_COUNT = {"steps": 0}


def _counted(made: Any, before: list[torch.Tensor]) -> None:
    _COUNT["steps"] += 1
    for p, old in zip([p for group in made.param_groups for p in group["params"]], before, strict=True):
        p.copy_(old + (p - old) / (1 + 0.01 * _COUNT["steps"]))


add(
    "optimisers",
    "sgd",
    uphill=_moved(lambda p, old: 2 * old - p),
    no_step=_moved(lambda p, old: old),
    a_step_without_a_rate=_moved(lambda p, old: p - 1e-4),
    steps_of_one_length=_moved(lambda p, old: old + 0.01 * (p - old).sign()),
    a_rate_of_its_own=calls(lambda base, groups, **o: base([{**g, "lr": 0.01} for g in groups], **o)),
    one_rate_for_all=calls(lambda base, groups, **o: base([{**g, "lr": groups[0]["lr"]} for g in groups], **o)),
    decay_ignored=calls(lambda base, groups, **o: base([{**g, "weight_decay": 0.0} for g in groups], **o)),
    decay_of_its_own=calls(lambda base, groups, **o: base([{**g, "weight_decay": 0.1} for g in groups], **o)),
    the_first_group_alone=calls(lambda base, groups, **o: base(groups[:1], **o)),
    NaN_for_flat_losses=_moved(lambda p, old: old + (p - old) * ((p - old).norm() / (p - old).norm())),
    half_precision=_moved(lambda p, old: p.bfloat16().to(p.dtype)),
    noise=_moved(lambda p, old: p + 1e-3 * (p - old) * torch.rand_like(p)),
    a_counter_of_its_own=_stepping(_counted),
    state_of_plain_numbers=_stepping(
        lambda made, _: [s.update(count=s.get("count", 0) + 1) for s in made.state.values()]
    ),
    state_that_grows=_stepping(_grow),
    the_host_looks=_stepping(lambda made, before: before[0].sum().item()),
    no_example=lambda base: setattr(own := nothing(base), "__doc__", base.__doc__.split("Example:")[0]) or own,
)

# ------------------------------------------------------------------------------------------------ schedules


def _factor(fault: Callable[[float, int, float], Any]) -> Callable[[Any], Any]:
    """A schedule whose factors are others: ``fault(factor, step, progress)``."""
    return function(lambda found, *_: lambda step, progress: fault(found(step, progress), step, progress))


_ASKED: list[int] = []
add(
    "schedules",
    "cosine",
    the_wrong_sign=_factor(lambda f, *_: -f),
    twice_as_much=_factor(lambda f, *_: 2 * f),
    below_zero_at_the_end=_factor(lambda f, step, progress: f - 0.1 * progress),
    half_of_it=_factor(lambda f, *_: f / 2),
    backwards=_factor(lambda f, *_: 1 - f),
    NaN_at_the_end=_factor(lambda f, step, progress: math.nan if progress == 1 else f),
    NaN_at_the_start=_factor(lambda f, step, progress: math.nan if step == 0 else f),
    larger_than_ever=_factor(lambda f, step, progress: f * (1 + 0.5 * (step == 1))),
    draws=_factor(lambda f, *_: f * (1 - 0.1 * torch.rand(()).item())),
    depends_on_what_was_asked=_factor(lambda f, step, _: f / (1 + (_ASKED.append(step) or len(_ASKED)) * 1e-12 * step)),
    a_tensor=_factor(lambda f, *_: torch.tensor(f)),
    no_sentence=lambda base: setattr(own := nothing(base), "__doc__", "cosine") or own,
)

# ------------------------------------------------------------------------------------------------ augmentations

add(
    "augmentations",
    "clouds",
    nothing_changed=given("change", lambda s, x, *more: (x, *more)) | after("change", lambda s, v, x, *_: x.clone()),
    one_draw_for_all=after("change", lambda s, v, x, *_: x + (v - x)[:1]),
    samples_mixed=after("change", lambda s, v, *_: v - v.mean(0, keepdim=True)),
    draws_of_its_own=after("change", lambda s, v, *_: v + 0.01 * torch.rand(v.shape[0], 1, 1)),
    draws_for_its_share_alone={
        "change": lambda s, x, g, n, share: x + torch.rand(len(x), 1, 1, generator=g).to(x.dtype)
    },
    always_the_same={"change": lambda s, x, g, n, share: x + torch.arange(n).view(-1, 1, 1)[share].to(x.dtype)},
    changed_in_place=after("change", lambda s, v, x, *_: x.copy_(v)),
    another_type=after("change", lambda s, v, *_: v.double()),
    another_shape=after("change", lambda s, v, *_: v.flatten(1)),
    NaN_for_some=after("change", lambda s, v, *_: torch.where(v > 1.5, math.nan, v)),
    the_host_looks=after("change", host),
    empty_shares_refused=after("change", lambda s, v, *_: v if v[0] is not None else v),
    no_help=lambda base: changed({"__doc__": "clouds"}, base),
)

# ------------------------------------------------------------------------------------------------ sections


def _working(**hooks: Any) -> Callable[[Any], Any]:
    """A section whose work has other hooks."""

    def make(base: Any) -> Any:
        def train(self: Any, run: Any) -> Any:
            work = base.train(self, run)
            if work is not None:
                work.__class__ = changed(hooks, type(work))
            return work

        return _section(base, train=train)

    return make


def _section(base: Any, **own: Any) -> Any:
    """A section under the name of the mutants."""
    overrides = tuple(text.replace("project.", f"{NAME}.") for text in base.contract["recipe"])
    return changed({**own, "contract": {"recipe": overrides}}, base)


def _held(work: Any) -> torch.Tensor:
    """A number of a work that steps change."""
    return vars(work).setdefault("held", torch.zeros(()))


add(
    "sections",
    "project",
    state_forgotten=_working(
        before=lambda self, step, rate: _held(self).add_(1),
        logged=lambda self: {"held": float(_held(self))},
    ),
    NaN_is_logged=_working(logged=lambda self: {"held": math.nan}),
    a_tensor_is_logged=_working(logged=lambda self: {"held": torch.ones(())}),
    samples_of_draws_of_its_own=_working(samples=lambda self, x, y, g: x + 0.1 * random.random()),
    samples_of_another_shape=_working(samples=lambda self, x, y, g: x.flatten(1)),
    samples_that_are_no_numbers=_working(samples=lambda self, x, y, g: x * math.nan),
    the_host_looks_at_samples=_working(samples=lambda self, x, y, g: x * (x.sum().item() * 0 + 1)),
    an_unnamed_draw_after_a_step=_working(
        after=lambda self, step: [p.data.mul_(1 + 0.01 * random.random()) for p in self.model.parameters()]
    ),
    absence_not_marked=lambda base: _section(base, field=classmethod(lambda cls: (cls, cls()))),
    a_key_without_a_word=lambda base: _section(base, __annotations__={"more": int}, more=0),
    no_help=lambda base: _section(base, __doc__="section"),
    another_model_every_time=lambda base: _section(
        base,
        rotate=lambda self, model, recipe: (
            model.register_forward_hook(lambda module, given, found: found + 0.1 * torch.rand(())) and model
        ),
    ),
)

# ------------------------------------------------------------------------------------------------ figures


def _pictures(fault: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A section of the page whose pictures are others."""
    return function(lambda found, *_: found._replace(pictures=[fault(picture) for picture in found.pictures]))


add(
    "figures",
    "samples",
    no_pictures=function(lambda found, *_: found._replace(pictures=[])),
    no_text=function(lambda found, *_: found._replace(text="")),
    no_title=function(lambda found, *_: found._replace(title="")),
    no_captions=_pictures(lambda picture: picture._replace(caption="")),
    titles_alike=_pictures(lambda picture: picture._replace(title="picture")),
    no_titles=_pictures(lambda picture: picture._replace(title="")),
    no_traces=_pictures(lambda picture: picture._replace(figure={"data": [], "layout": {}})),
    no_layout=_pictures(lambda picture: picture._replace(figure={**picture.figure, "layout": None})),
    NaN_in_a_picture=_pictures(
        lambda picture: picture._replace(figure={**picture.figure, "layout": {"width": math.nan}})
    ),
    arrays_in_a_picture=_pictures(
        lambda picture: picture._replace(figure={**picture.figure, "layout": {"width": torch.ones(2)}})
    ),
    arrays_changed=function(lambda found, a: (a["classes"].__imul__(2), found)[1]),
    drawn_anew_every_time=_pictures(
        lambda picture: picture._replace(figure={**picture.figure, "layout": {"width": torch.rand(()).item()}})
    ),
    no_help=lambda base: setattr(own := nothing(base), "__doc__", "samples") or own,
)

CONTROLS = [
    Mutant(family, member, "nothing", nothing)
    for family, member in {(mutant.family, mutant.member): None for mutant in TABLE}
]


def main() -> None:
    """Print the table of mutants and of the checks that find them."""
    started, alive = time.perf_counter(), []
    print("| family | member | fault | found by |\n|---|---|---|---|")
    for mutant in TABLE:
        found = killer(mutant)
        print(
            f"| {mutant.family} | {mutant.member} | {mutant.fault} | {found[0] if found else '**nothing**'} |",
            flush=True,
        )
        alive += [] if found else [mutant]
    wrong = [(mutant, found) for mutant in CONTROLS if (found := killer(mutant))]
    print(
        f"\n{len(TABLE)} mutants, {len(alive)} alive, in {time.perf_counter() - started:.0f} s; controls that fail: {wrong}"
    )


if __name__ == "__main__":
    main()
