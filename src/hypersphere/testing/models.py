r"""The contract of models: features of ``dim`` numbers, nothing shared, every layer used, layers exchangeable.

A member's own ``contract`` may declare ``options`` and ``variants``, ``shape`` (of a sample, where none of
:data:`SHAPES` will do; ``()`` for places in a context, which it takes by ``attach``), and what does not hold for it:
``trained`` (``False`` where a step of features alone does not train every parameter),
``low`` (``False`` where half precision is too coarse). Large networks are built without memory, so that only their
shapes and names are looked at.
"""

from __future__ import annotations

import copy
import pickle
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere.errors import HypersphereError
from hypersphere.models import models
from hypersphere.testing import common, numeric
from hypersphere.testing.contract import Contract, variants

CONTRACT = Contract("model", "models", "hypersphere.models:models")
SHAPES = ((1, 28, 28), (3, 32, 32), (3, 112, 96), (3, 64), ())
LARGE = 300_000
"""Parameters from which a network is looked at without memory alone."""


@lru_cache(1)  # the model that is looked at
def _shape(name: str, _: Any) -> tuple[int, ...]:
    declared = CONTRACT.fact(name, "shape")
    if declared is not None:
        return tuple(declared)
    refused = []
    for shape in SHAPES:
        try:
            with torch.device("meta"):
                models.create(name, shape, **next(variants(CONTRACT, name)))
        except (HypersphereError, TypeError, RuntimeError, ValueError) as error:
            refused.append(f"{shape}: {error}")
            continue
        return shape
    raise AssertionError(f"it takes samples of none of {SHAPES}: declare contract['shape']\n" + "\n".join(refused))


def shape_of(name: str) -> tuple[int, ...]:
    """Shape of the samples that a member takes."""
    return _shape(name, CONTRACT.entry(name).factory)


def build(name: str, device: str = "cpu", seed: int = 0, **more: Any) -> Any:
    """The member with the same weights every time, with a context where it takes one."""
    torch.manual_seed(seed)
    device = device if shape_of(name) else "cpu"  # a context is checked by its values
    with torch.device(device):
        model: Any = models.create(name, shape_of(name), **{**next(variants(CONTRACT, name)), **more})
        if hasattr(model, "attach"):
            nodes = torch.arange(10)
            model.attach(
                features=numeric.draw(10, 8, dtype=torch.float32).to(device),
                edges=torch.stack([nodes, nodes.roll(1)]).to(device),
            )
    return model


def is_large(name: str) -> bool:
    """Whether a network is only looked at without memory."""
    return sum(p.numel() for p in build(name, "meta").parameters()) > LARGE


def samples(name: str, batch: int = 4, device: str = "cpu") -> Tensor:
    """Samples that a member takes."""
    if not shape_of(name):  # places in a context
        return torch.arange(batch, device=device)
    return numeric.draw(batch, *shape_of(name), seed=1, dtype=torch.float32).to(device)


@CONTRACT.check
def gives_features_of_its_dim(name: str) -> None:
    """Samples become features ``(B, dim)``, of single ones in evaluation, too."""
    for device in ("meta",) if is_large(name) else ("cpu",):
        model = build(name, device)
        assert isinstance(model.dim, int) and model.dim > 0
        assert model(samples(name, 4, device)).shape == (4, model.dim)
        assert model.eval()(samples(name, 1, device)).shape == (1, model.dim)


@CONTRACT.check
def has_no_state_of_others(name: str) -> None:
    """Two of one seed are alike and share nothing, and torch's seed is all that counts."""
    if is_large(name):
        return
    one, other = build(name), build(name)
    common.same_state(other, one)
    assert not {p.data_ptr() for p in one.parameters()} & {p.data_ptr() for p in other.parameters()}
    x = samples(name)
    with torch.no_grad():
        before = other.eval()(x)
        for p in one.parameters():
            p.add_(1.0)
        assert torch.equal(other(x), before), "one model changes with another"
    different = build(name, seed=1).state_dict()
    assert any(not torch.equal(v, different[k]) for k, v in build(name).state_dict().items()), "nothing is drawn"


@CONTRACT.check
def copies_answer_alike(name: str) -> None:
    """Copied, pickled and loaded models give the same features."""
    if is_large(name):
        return
    model, x = build(name).eval(), samples(name)
    loaded = build(name, seed=1).eval()
    loaded.load_state_dict(model.state_dict())
    wanted = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        numeric.close(other(x), wanted, 1e-6, "features of a copy")


@CONTRACT.check
def samples_count_by_themselves_in_evaluation(name: str) -> None:
    """In evaluation features do not depend on the batch, their order is that of the samples, and no state changes."""
    if is_large(name):
        return
    model, x = build(name), samples(name)
    model(x)
    model.eval()
    state = copy.deepcopy(model.state_dict())
    found = model(x)
    numeric.close(model(x[1:2]), found[1:2], 1e-4, "features of one sample")
    numeric.close(model(x.flip(0)), found.flip(0), 1e-4, "features in another order")
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), f"{key} changes in evaluation"


@CONTRACT.check
def features_depend_on_samples(name: str) -> None:
    """Different samples have different features, and the gradient by samples is that of differences."""
    if is_large(name):
        return
    model, x = build(name).eval(), samples(name)
    found = model(x)
    numeric.finite([found], "features")
    assert not torch.allclose(found[0], found[1]), "two samples have the same features"


@CONTRACT.check
def a_step_trains_every_parameter(name: str) -> None:
    """Every parameter that is trained has a finite gradient, not all of it 0."""
    if is_large(name) or not CONTRACT.fact(name, "trained", True):
        return
    model, x = build(name), samples(name)
    model.train()
    found = model(x)
    (found * numeric.draw(*found.shape, seed=3, dtype=torch.float32)).sum().backward()
    for key, p in model.named_parameters():
        if p.requires_grad:
            numeric.finite([p.grad], f"gradient of {key}")
    total = sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None)
    assert total > 0, "no parameter is trained"


@CONTRACT.check
def layers_are_exchangeable(name: str) -> None:
    """Of the layers that it takes as ``conv``, ``linear``, ``norm`` and ``act``, it builds those that it is given."""
    takes = {option.name for option in CONTRACT.entry(name).options}
    kinds = {"conv": nn.Conv2d, "linear": nn.Linear, "norm": nn.BatchNorm2d, "act": nn.ReLU}
    for option, kind in kinds.items():
        if option not in takes:
            continue
        own = type(f"Own{kind.__name__}", (kind,), {})
        before = [m for m in build(name, "meta").modules() if isinstance(m, kind)]
        given = own if option != "act" else (lambda *_, own=own, **__: own())
        try:
            after = [m for m in build(name, "meta", 0, **{option: given}).modules() if isinstance(m, own)]
        except (HypersphereError, TypeError) as error:
            raise AssertionError(f"{option}= is an option, but a factory is refused: {error}") from error
        assert after or not before, f"{option}= is an option, but none of the given layers is built"


@CONTRACT.check
def is_finite_in_half_precision(name: str) -> None:
    """Under autocast features are close to those of float32, and parameters keep their type."""
    if is_large(name) or not CONTRACT.fact(name, "low", True):
        return
    model, x = build(name).eval(), samples(name)
    wanted = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x)
    numeric.finite([found], "features under autocast")
    error = (found.float() - wanted).norm() / wanted.norm().clamp(min=1e-6)
    assert float(error) < 0.1, f"under autocast features are {float(error):.0%} off"
    assert all(p.dtype == torch.float32 for p in model.parameters())


@CONTRACT.check
def waits_for_nothing(name: str) -> None:
    """A step reads nothing off the device."""
    if is_large(name):
        return
    model, x = build(name), samples(name)
    model(x)
    with numeric.Host(values=False):
        model(x).sum().backward()


common.add(CONTRACT, recipe=lambda name: [f"model.name={name}"], example=False)
