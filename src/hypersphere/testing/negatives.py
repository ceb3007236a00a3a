r"""The contract of rules of negatives: a value of the cosine and its slope, and what a non-target class adds by it.

A member's own ``contract`` may declare ``options`` and ``variants``, ``derivative`` (``False`` where the slope is not
that of the value, because training holds a factor fixed), and ``rises`` (``False`` where the value may fall).
"""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import torch
from torch import Tensor

from hypersphere.losses import MarginSoftmax
from hypersphere.losses.negatives import Negatives, rules
from hypersphere.testing import common, numeric
from hypersphere.testing.contract import Contract, variants

CONTRACT = Contract("rule of negatives", "rules of negatives", "hypersphere.losses.negatives:rules")
COSINES = torch.linspace(-0.97, 0.97, 40, dtype=torch.float64).unsqueeze(0)
Y = torch.tensor([0, 4, 2, 2, 1, 3])


def members(name: str, **more: Any) -> list[Negatives]:
    """The member with each of the options to be tried."""
    return [rules.create(name, **options, **more) for options in variants(CONTRACT, name)]


def parameters(rule: Negatives, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """What a rule takes beside cosines, of a head with a margin."""
    found = rule.parameters({"m": 1.4}, torch.tensor([0.3], dtype=dtype), None)
    return tuple(p.to(dtype) for p in found)


def head(rule: Negatives, **options: Any) -> MarginSoftmax:
    """A head of the rule, with the same weights every time."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return MarginSoftmax(6, 5, s=4.0, psi="additive-cosine", m=0.4, negatives=rule, **options)


@CONTRACT.check
def slope_is_the_derivative(name: str) -> None:
    """``slope`` is the derivative of the value, or 1 where it is detached, and so is the gradient."""
    for rule in members(name):
        p = parameters(rule)
        if CONTRACT.fact(name, "derivative", True) and not rule.plain:
            numeric.derivative(lambda c: rule.value(c, *p), lambda c: rule.slope(c, *p), COSINES, f"slope of {rule}")
            numeric.gradient(lambda c: rule.value(c, *p), COSINES, what=f"gradient of {rule}")
        if not rule.plain:
            leaf = COSINES.clone().requires_grad_()
            (own,) = torch.autograd.grad(rule.value(leaf, *p).sum(), leaf)
            numeric.close(own, rule.slope(COSINES, *p), 1e-6, f"gradient of {rule}")
        one = rule.detached()
        if not rule.plain:
            numeric.close(one.slope(COSINES, *p), torch.ones_like(COSINES), 0, f"slope of {one}")
            numeric.close(one.value(COSINES, *p), rule.value(COSINES, *p), 1e-12, f"value of {one}")


@CONTRACT.check
def value_rises_with_the_cosine(name: str) -> None:
    """A class that is closer never counts for less, and values are finite from -1 to 1 and beyond by rounding."""
    for rule in members(name):
        if CONTRACT.fact(name, "rises", True):
            rise = rule.value(COSINES, *parameters(rule)).diff().min()
            assert float(rise) >= -1e-9, f"{rule} falls with the cosine"
        for dtype in (torch.float32, torch.float64):
            cosines = torch.tensor([[-1.0, -1 - 1e-7, 0.0, 1.0, 1 + 1e-7]], dtype=dtype).requires_grad_()
            p = parameters(rule, dtype)
            value = rule.value(cosines, *p)
            assert value.dtype == dtype and value.shape == cosines.shape
            slopes = () if rule.plain else (rule.slope(cosines.detach(), *p),)
            numeric.finite([value, *torch.autograd.grad(value.sum(), cosines), *slopes], f"{rule} in {dtype}")


@CONTRACT.check
def terms_are_those_of_a_loss(name: str) -> None:
    """Where no softmax follows: terms rise with the logit, that of the target falls, and slopes are derivatives."""
    logits = torch.linspace(-6, 6, 41, dtype=torch.float64) + 0.013
    for rule in members(name):
        if rule.softmax:
            continue
        numeric.derivative(rule.term, rule.term_slope, logits, f"slope of the term of {rule}")
        assert float(rule.term(logits).diff().min()) >= -1e-12 and bool((rule.term(logits) >= 0).all())
        if CONTRACT.fact(name, "target", True):
            numeric.close(rule.target_term(logits), rule.term(-logits), 1e-9, f"term of the target of {rule}")
        far = torch.tensor([-1e4, 1e4], dtype=torch.float32)
        numeric.finite([rule.term(far), rule.term_slope(far)], f"term of {rule}")


@CONTRACT.check
def heads_compute_with_it(name: str) -> None:
    """A head is made of it: the loss, from values written out, on both paths, with the gradients of differences."""
    x = numeric.draw(6, 6, seed=2)
    for rule in members(name):
        if not CONTRACT.fact(name, "target", True):
            continue
        dense, chunked = (head(rule, path=path).double().eval() for path in ("dense", "chunked"))
        cosines = torch.nn.functional.cosine_similarity(x[:, None], dense.weight[None], dim=2)
        own = cosines.gather(1, Y[:, None])
        p = tuple(q.double() for q in rule.parameters({"m": 0.4}, own.squeeze(1).detach(), None))
        others, target = 4 * rule.value(cosines, *p), 4 * (own - 0.4)
        kept = torch.ones(6, 5, dtype=torch.bool).scatter(1, Y[:, None], False)
        if rule.softmax:
            logits = torch.where(kept, others, target)
            wanted = torch.nn.functional.cross_entropy(logits, Y)
        else:
            wanted = ((rule.term(others) * kept).sum(1) + rule.target_term(target.squeeze(1))).mean()
        numeric.close(dense(x, Y), wanted, 1e-6, f"a head of {rule}")
        numeric.close(chunked(x, Y), wanted, 1e-6, f"a head of {rule} in chunks")
        grads = [torch.autograd.grad(h(x, Y), h.weight)[0] for h in (dense, chunked)]
        numeric.close(grads[1], grads[0], 1e-7, f"gradient of a head of {rule} in chunks")


@CONTRACT.check
def heads_with_it_go_on_when_copied(name: str) -> None:
    """A rule and a head of it are copied and pickled, and compute the same."""
    x = numeric.draw(6, 6, seed=2, dtype=torch.float32)
    for rule in members(name):
        one = head(rule, path="chunked").eval()
        for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            if CONTRACT.fact(name, "target", True):
                assert torch.equal(other(x, Y), one(x, Y))


@CONTRACT.check
def waits_for_nothing(name: str) -> None:
    """Nothing is read off the device."""
    for rule in members(name):
        p, cosines = parameters(rule, torch.float32), COSINES.float().requires_grad_()
        with numeric.Host():
            rule.value(cosines, *p).sum().backward()
            if not rule.plain:
                rule.slope(COSINES.float(), *p)
            if not rule.softmax:
                rule.term(COSINES.float()) + rule.term_slope(COSINES.float())


@CONTRACT.check
def is_one_graph(name: str) -> None:
    """Compiled code has no breaks and gives the same numbers."""
    rule = members(name)[0]
    p = parameters(rule, torch.float32)
    torch._dynamo.reset()
    numeric.compiled(lambda c: rule.value(c, *p), COSINES.float())


def _recipe(name: str) -> list[str]:
    return ["loss.name=margin-softmax", "loss.s=30", "loss.psi=additive-cosine", "loss.m=0.3", f"loss.negatives={name}"]


common.add(CONTRACT, build=lambda name: members(name)[0], recipe=_recipe)
