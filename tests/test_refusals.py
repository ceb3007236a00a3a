"""What is refused changes nothing: every public call that changes something, with bad input of several kinds.

Heads have a walk of their own (``losses/test_head_state.py``): they are many, and change alike.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import hypersphere as hs
from helpers.state import frozen, same, state
from hypersphere.errors import HypersphereError
from hypersphere.nn.modules import Decoupled
from hypersphere.runs.gallery import Gallery

NO_MODELS = [None, "resnet18", 3, torch.ones(2, 2), [nn.Linear(2, 2)]]
BAD_NUMBERS = [math.nan, -1, "x", None]


def plain():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 2)
    )


def decoupled(operator="tanh", **options):
    return hs.nn.convert(plain(), operator, **options)


def tied():
    model = plain()
    model.append(nn.Linear(8, 8))
    model[6].weight = model[4].weight
    return model


def hooked():
    """The second decoupled layer has a weight that a hook computes, which is seen after the first was looked at."""
    model = decoupled("linear")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(model[4])
    return model


def half_folded():
    model = decoupled()
    hs.nn.fold(model[4])
    return model


def rotated(**options):
    return hs.orthogonal.apply(plain(), **{"seed": 1, **options})


def adapted():
    model = hs.orthogonal.adapt(plain(), name="first", train="5", bias="adapter")
    hs.orthogonal.adapt(model, name="second")
    return model


def merged():
    return hs.orthogonal.merge_adapter(adapted(), "first")


def merged_for_good():
    return hs.orthogonal.merge_adapter(adapted(), "first", keep=False)


def sampled():
    return hs.orthogonal.apply(plain(), sample=0.5, seed=0)


def fails(*_):
    raise ZeroDivisionError


def calls(function, /, *bad, **options):
    """Calls of a function of a model, each with one bad argument: keywords, or what stands behind the model."""
    for given in bad:
        positional, keywords = ((), given) if isinstance(given, dict) else (given, {})
        shown = f"{function.__qualname__}(model, {given})"
        yield shown, lambda model, p=positional, k=keywords: function(model, *p, **{**options, **k})


CHOICES = [{"include": "nothing.*"}, {"include": 3}, {"exclude": "*"}, {"skip": "middle"}, {"types": "lstm"}]
CHOICES += [{"types": "no such"}, {"output": "nothing"}, {"output": nn.Linear(2, 2)}, {"include": fails}]
OPERATORS = [{"operator": "no such"}, {"operator": 3}, {"nothing": 1}, {"radius": -1}, {"alpha": math.nan}]
OPERATORS += [{"angular": "sigmoid", "k": -1}, {"k": 1.0}, {"weighting": "heavy"}]
MAPS = [{"map": "no such"}, {"map": nn.Linear(2, 2)}, {"map": None}, {"nothing": 1}, {"sides": "left"}]
MAPS += [{"start": "end"}, {"blocks": 0}, {"blocks": 1.5}, {"gain": -1}, {"gain": math.nan}, {"sample": 0}]
MAPS += [{"sample": math.nan}, {"sample": 0.5, "blocks": 2}, {"sample": 0.5, "sampling": "dice"}, {"init": "no such"}]
MAPS += [{"mean": 1.0}, {"init": fails}, {"refine": -1}, {"refine": {"steps": "x"}}, {"refine": {"nothing": 1}}]
MAPS += [{"seed": "x", "start": "normal"}]
ADAPTERS = [{"method": "lora"}, {"name": "first"}, {"name": "a.b"}, {"name": ""}, {"name": "forward"}, {"name": 3}]
ADAPTERS += [{"targets": "nothing"}, {"targets": fails}, {"targets": 3}, {"block_size": 0}, {"block_size": 1.5}]
ADAPTERS += [{"blocks": 2, "block_size": 2}, {"butterfly": 2}, {"method": "boft", "butterfly": 9}, {"eps": -1}]
ADAPTERS += [{"dropout": 2}, {"dropout": math.nan}, {"cayley": "x"}, {"terms": -1, "cayley": "neumann"}]
ADAPTERS += [{"dtype": "no such"}, {"dtype": 3}, {"bias": "some"}, {"train": "nothing"}, {"train": "4.weight"}]
STATE, CONFIG = hs.orthogonal.adapter_state_dict(hs.orthogonal.adapt(plain()))
SHORT = {key: value[:-1] for key, value in STATE.items()}
LOADS = [(SHORT, CONFIG), ({}, CONFIG), ({**STATE, "more": torch.ones(1)}, CONFIG), (STATE, {"nothing": 1})]
LOADS += [(STATE, None), (None, CONFIG), (STATE, {**CONFIG, "targets": ["nothing"]}), (dict.fromkeys(STATE, 1), CONFIG)]
PEFT = [({}, {"peft_type": "OFT"}), ({"base_model.model.4.oft_R.weight": torch.ones(1, 1)}, {"peft_type": "LORA"})]
PEFT += [({"base_model.model.9.oft_R.weight": torch.ones(1, 28)}, {"peft_type": "OFT", "oft_block_size": 8, "r": 0})]
PEFT += [({"base_model.model.4.oft_R.weight": torch.ones(1, 1)}, None), ("/nowhere", None)]
SPOILED = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 9), nn.Linear(8, 2)
)
IMAGES = torch.ones(2, 3, 3, 3)
BAD_BATCH = ("a second batch that is none", lambda model: hs.nn.recalibrate(model, [IMAGES, torch.ones(2, 2)]))

o = hs.orthogonal
WALK = {
    plain: [
        *calls(hs.nn.convert, *CHOICES, *OPERATORS, {"weighting": "linear", "project": True}),
        ("a batch that is none", lambda m: hs.nn.convert(m, example=torch.ones(2))),
        *calls(o.apply, *CHOICES, *MAPS),
        *calls(o.adapt, {"output": "nothing"}, *(ADAPTERS[0], *ADAPTERS[2:])),
        *calls(o.load_adapter, *LOADS),
        *calls(o.from_peft, *PEFT),
        *calls(o.poet, {"block": 0}, {"sampling": "dice"}, {"terms": -1}, {"nothing": 1}),
        *calls(o.merge, ()),
        *calls(o.merge_adapter, ()),
        *calls(o.unmerge_adapter, ()),
        *calls(o.unload, ()),
        *calls(o.use, ("first",), (None,)),
        *calls(o.drop, ("first",)),
        *calls(o.Resampling, (1,)),
        *calls(o.penalty, ()),
        *calls(hs.nn.init_from, (SPOILED,), ({"0.weight": torch.ones(1)},), (None,), (plain(), -1.0)),
        *calls(hs.nn.recalibrate, ([],), (fails,), (None,)),
        BAD_BATCH,
        *calls(hs.parameter_groups, *({"lr": lr} for lr in BAD_NUMBERS), {"lr": 1.0, "decay": "some"}),
        *calls(hs.parameter_groups, {"head": 3}, {"rules": [hs.optim.Rule("nothing")]}, {"rules": [3]}, lr=1.0),
    ],
    tied: [
        *calls(hs.nn.convert, {"include": "nothing"}),
        *calls(o.apply, {"include": "4"}, {"include": ["0", "6"]}),
        *calls(o.adapt, {"targets": "4"}, {"targets": ["0", "6"]}),
    ],
    decoupled: [
        *calls(hs.nn.convert, *OPERATORS),
        *((f"set_radius({x!r})", lambda m, x=x: m[4].set_radius(x)) for x in [*BAD_NUMBERS, torch.ones(5), [1.0, 2.0]]),
        *(
            (f"set_radius({x!r})", lambda m, x=x: m[4].set_radius(x))
            for x in [np.ones((8, 1)), [[1.0], [1.0, 2]], math.inf]
        ),
        ("set_radius, the last is bad", lambda m: m[4].set_radius(torch.tensor([1.0] * 7 + [math.nan]))),
        ("set_radius, the last is infinite", lambda m: m[4].set_radius(torch.tensor([1.0] * 7 + [math.inf]))),
        ("set_k", lambda m: m[4].set_k(1.0)),
        *((f"set_operator({x})", lambda m, x=x: m[4].set_operator(**{"operator": "tanh", **x})) for x in OPERATORS),
        ("set_operator of a network", lambda m: m[4].set_operator("tanh", angular="sigmoid", learn_k="network")),
        ("adopt of another kind", lambda m: Decoupled.adopt(m[1], "tanh")),
        ("adopt with a bad operator", lambda m: Decoupled.adopt(m[5], "no such")),
        *calls(
            hs.nn.project_weights, *({"s": s} for s in BAD_NUMBERS), {"eps": -1}, {"skip": "middle"}, {"include": 3}
        ),
        *calls(hs.nn.WeightProjection, *({"every": n} for n in [0, math.nan, 1.5, "x"]), {"s": -1}),
        *calls(hs.nn.recalibrate, ([],)),
        BAD_BATCH,
        ("a batch that is none, saturation", lambda m: hs.nn.saturation(m, torch.ones(2, 2))),
        *calls(hs.nn.init_from, (SPOILED,), (plain(), math.nan)),
    ],
    lambda: decoupled("sphere", angular="sigmoid", learn_k="filter"): [
        *((f"set_k({x!r})", lambda m, x=x: m[4].set_k(x)) for x in [*BAD_NUMBERS, torch.ones(5), [1.0, 2.0], 0.05]),
        ("set_k, the last is bad", lambda m: m[4].set_k(torch.tensor([1.0] * 7 + [math.nan]))),
        ("set_radius", lambda m: m[4].set_radius(1.0)),
    ],
    lambda: decoupled("sphere", weighting="linear", include="4"): calls(hs.nn.project_weights, ()),
    hooked: [*calls(hs.nn.fold, ()), *calls(hs.nn.project_weights, ())],
    lambda: decoupled().eval(): [("fuse", lambda model: nn.utils.fuse_conv_bn_eval(model[0], model[1]))],
    half_folded: calls(hs.nn.revert, ()),
    rotated: [
        *calls(o.apply, {"include": "4"}),
        *calls(o.apply, {}),
        *calls(o.rebase, ("sgd",), (nn.Linear(2, 2),)),
        *calls(o.retract, *((bound,) for bound in BAD_NUMBERS)),
        *calls(o.Resampling, (1,)),
        *calls(o.adapt, {"targets": "4"}),
    ],
    sampled: [
        *calls(o.Resampling, *((every,) for every in [0, -1, math.nan, "x", None, 1.5])),
        *calls(o.Resampling, (2, "sgd"), (2, None, "x"), (2, None, None)),
    ],
    adapted: [
        *calls(o.adapt, *ADAPTERS),
        *calls(o.load_adapter, *LOADS, name="third"),
        *calls(o.load_adapter, (STATE, CONFIG), name="first"),
        *calls(o.from_peft, *PEFT, name="third"),
        *calls(o.use, ("third",), (3,)),
        *calls(o.drop, ("third",), (None,)),
        *calls(o.merge_adapter, ("third",)),
        *calls(o.unmerge_adapter, ()),
        *calls(o.apply, {"include": "4"}),
        ("disabled", lambda m: o.disabled(o.merge_adapter(m[4])).__enter__()),
    ],
    merged: [
        *calls(o.adapt, {"name": "third"}),
        *calls(o.load_adapter, (STATE, CONFIG), name="third"),
        *calls(o.use, ("second",), (None,)),
        *calls(o.drop, ("second",), ("first",)),
        *calls(o.merge_adapter, ("second",), ("first",)),
        ("disabled", lambda m: o.disabled(m).__enter__()),
    ],
    merged_for_good: calls(o.unmerge_adapter, ()),
}
"""What is to be refused, by the model that it is tried on."""
EVERY_MODEL = [hs.nn.convert, hs.nn.revert, hs.nn.fold, hs.nn.report, hs.nn.project_weights, hs.nn.WeightProjection]
EVERY_MODEL += [o.apply, o.merge, o.rebase, o.retract, o.check, o.penalty, o.adapt, o.use, o.drop, o.merge_adapter]
EVERY_MODEL += [o.unmerge_adapter, o.unload, o.constrain, o.adapter_state_dict, o.list_adapters, o.poet, o.Resampling]
EVERY_MODEL += [
    hs.nn.recalibrate,
    hs.nn.saturation,
    hs.nn.init_from,
    o.load_adapter,
    o.save_adapter,
    o.from_peft,
    o.to_peft,
]
EVERY_MODEL += [hs.parameter_groups, hs.selection.layers, hs.selection.select, hs.energy.report, o.rotations, o.cached]
EVERY_MODEL += [o.disabled, o.load_adapter_file, hs.optim.row_parameters]
FURTHER = {
    **{hs.nn.WeightProjection: (1,), hs.nn.recalibrate: ([IMAGES],), hs.nn.saturation: (IMAGES,)},
    **{
        hs.nn.init_from: ({},),
        o.use: ("first",),
        o.drop: ("first",),
        o.Resampling: (1,),
        o.load_adapter: (STATE, CONFIG),
    },
    **{
        o.save_adapter: ("/nowhere/file",),
        o.to_peft: ("/nowhere",),
        o.from_peft: ({}, {}),
        o.load_adapter_file: ("/nowhere",),
    },
}


@pytest.mark.parametrize("make", WALK, ids=lambda make: make.__name__)
def test_what_is_refused_changes_nothing(make):
    model = make()
    before, random = state(model), torch.get_rng_state()
    for what, call in WALK[make]:
        with pytest.raises((HypersphereError, ZeroDivisionError, RuntimeError)) as caught:
            call(model)
            pytest.fail(f"{what} was accepted")
        own = not isinstance(caught.value, RuntimeError)  # torch's errors, of a batch that is none, are passed on
        assert own or "batch" in what, f"{what}: {caught.value}"
        same(before, state(model), what)
        if isinstance(caught.value, HypersphereError):
            assert torch.equal(random, torch.get_rng_state()), f"{what} has drawn numbers"
        torch.set_rng_state(random)


@pytest.mark.parametrize("function", EVERY_MODEL, ids=lambda function: function.__qualname__)
def test_what_is_no_module_is_named(function):
    further = {"lr": 0.1} if function is hs.parameter_groups else {}
    for bad in NO_MODELS:
        with pytest.raises(HypersphereError, match="must be a module"):
            result = function(bad, *FURTHER.get(function, ()), **further)
            result = result.__enter__() if hasattr(result, "__enter__") else result
            next(iter(result))


# ------------------------------------------------------------------------------------------------- what is no model


def gallery():
    made = Gallery(2, threshold=0.5)
    made.enrol("ann", torch.tensor([[1.0, 0.0], [1.0, 0.2]]))
    return made


def pairs():
    made = hs.metrics.PairScores(capacity=3)
    made.update(torch.tensor([0.1, 0.5, 0.7, 0.2, 0.3]), torch.tensor([False, True, True, False, False]))
    return made


def registry():
    made = hs.registry.Registry("shape")
    made.register("circle", aliases=("round",))(float)
    return made


X = torch.tensor([0.5, 0.5])
BAD_FEATURES = [[0.5, 0.5], X.numpy(), None, torch.ones(3), torch.ones(2, 3), torch.zeros(2), torch.ones(0, 2)]
BAD_FEATURES += [torch.tensor([0, 1]), torch.tensor([math.nan, 1.0]), torch.tensor([[1.0, 0.0], [-1.0, 0.0]])]
BAD_FEATURES += [torch.ones(1, 1, 2)]
OTHERS = {
    gallery: [
        *((f"enrol({name!r})", lambda g, name=name: g.enrol(name, X)) for name in ["ann", "", 3, None]),
        *((f"enrol(bob, {x})", lambda g, x=x: g.enrol("bob", x)) for x in BAD_FEATURES),
        ("extend", lambda g: g.enrol("ann", torch.tensor([math.inf, 1.0]), extend=True)),
        ("remove", lambda g: g.remove("bob")),
        ("remove a number", lambda g: g.remove(3)),
        ("search", lambda g: g.search(torch.ones(3))),
        ("identify", lambda g: g.identify(X, math.nan)),
    ],
    pairs: [
        ("update: NaN", lambda p: p.update(torch.tensor([0.5, math.nan]), torch.tensor([True, False]))),
        ("update: sizes", lambda p: p.update(torch.ones(2), torch.tensor([True]))),
        ("update: another type", lambda p: p.update(torch.ones(2).double(), torch.tensor([True, False]))),
        ("update: numbers", lambda p: p.update(torch.ones(2), 2 * torch.ones(2))),
        ("update: too many", lambda p: p.update(torch.ones(5), torch.ones(5, dtype=torch.bool))),
        ("update: lists", lambda p: p.update([1.0, 2.0], [True, False])),
        ("merge: capacity", lambda p: p.merge(hs.metrics.PairScores(capacity=4))),
        ("merge: nothing", lambda p: p.merge(None)),
    ],
    registry: [
        ("taken", lambda r: r.register("circle")(int)),
        ("an alias is taken", lambda r: r.register("square", aliases=("box", "Round"))(int)),
        ("remove", lambda r: r.remove("square")),
    ],
}
"""What is to be refused by objects that are no modules."""


@pytest.mark.parametrize("make", OTHERS, ids=lambda make: make.__name__)
def test_objects_that_are_no_models_keep_what_they_have(make):
    subject = make()
    before = frozen(vars(subject))
    for what, call in OTHERS[make]:
        with pytest.raises(HypersphereError):
            call(subject)
            pytest.fail(f"{what} was accepted")
        same(before, frozen(vars(subject)), what)


def test_files_keep_their_bytes(tmp_path):
    people, adapter = tmp_path / "people.safetensors", tmp_path / "adapter.safetensors"
    gallery().save(people)
    hs.orthogonal.save_adapter(adapted(), adapter)
    bytes_before = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in (people, adapter)}
    refused = {
        "an adapter of another name": lambda: hs.orthogonal.save_adapter(adapted(), adapter, "third"),
        "a model without": lambda: hs.orthogonal.save_adapter(plain(), adapter),
        "a gallery of another model": lambda: Gallery.load(people, fingerprint="other"),
        "an adapter as a gallery": lambda: Gallery.load(adapter),
        "a gallery as an adapter": lambda: hs.orthogonal.load_adapter_file(plain(), people),
        "a file that is none": lambda: hs.orthogonal.load_adapter_file(plain(), tmp_path / "nothing"),
        "a folder for peft": lambda: hs.orthogonal.to_peft(plain(), tmp_path / "folder"),
    }
    for what, call in refused.items():
        with pytest.raises(HypersphereError):
            call()
            pytest.fail(f"{what} was accepted")
    assert {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()} == bytes_before


def test_groups_and_draws_that_are_refused_leave_what_there_was():
    optimiser = hs.optim.OGD([nn.Parameter(torch.eye(3))], lr=0.1)
    groups = frozen(optimiser.param_groups)
    for bad in ({"lr": -1.0}, {"lr": math.nan}, {"momentum": -1.0}):
        with pytest.raises((HypersphereError, ValueError)):
            optimiser.add_param_group({"params": [nn.Parameter(torch.eye(2))], **bad})
        same(groups, frozen(optimiser.param_groups), str(bad))
    model = sampled()
    draws = hs.orthogonal.Resampling(model, 2)
    before = state(model)
    for bad in (None, "x", 1.5, math.nan):
        if bad is not None:
            with pytest.raises(HypersphereError):
                draws(bad)
        with pytest.raises(HypersphereError):
            draws.draw(bad)
        same(before, state(model), f"draw({bad})")


def test_every_public_function_that_takes_a_model_is_walked():
    """A new one has to be added above, or here where it changes nothing."""
    of_tensors = {"create", "decoupled", "operator", "factory", "orthogonality_error", "cayley_step", "gather_rows"}
    found = set()
    for package in (hs.nn, hs.orthogonal, hs.optim):
        found |= {getattr(package, key) for key in package.__all__ if inspect.isfunction(getattr(package, key))}
    walked = set(EVERY_MODEL) | {function for function in found if function.__name__ in of_tensors}
    assert found <= walked, {function.__qualname__ for function in found - walked}


@pytest.mark.parametrize("name", ["mhp", "mhc", "rp-comhe", "adv-comhe", "ap-comhe"])
def test_a_step_that_is_none_moves_no_energy(name):
    energy, model = hs.energy.create(name), plain()
    energy.prepare(model)
    before = state(energy)
    for bad in [("x", 0, 0.1), (-1, 0, 0.1), (0.5, 0, 0.1), (0, "x", 0.1), (0, 0, math.nan), (0, 0, "x"), (0, 0, -1.0)]:
        with pytest.raises(HypersphereError):
            energy.advance(*bad)
        same(before, state(energy), str(bad))
    for bad in ("x", 3, None):
        with pytest.raises(HypersphereError):
            energy.prepare(bad)
        same(before, state(energy), str(bad))
