r"""The contract of attacks: images within their budget that a model gets wrong more often.

A member's own ``contract`` may declare ``options`` and ``variants`` (to build it with), ``strength`` (the name of the
option that bounds the change, by default ``eps``; ``None`` where there is no budget), ``norm`` (of the budget, where
the member has no option of that name), ``raises`` (``False`` where single samples may be left with a smaller loss),
``clean`` (``False`` where parameters may get gradients), and ``needs`` (a library that it calls).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor

from hypersphere.attacks import Attack, attacks, lengths, losses_of
from hypersphere.testing import common, numeric
from hypersphere.testing.contract import Contract, variants

CONTRACT = Contract("attack", "attacks", "hypersphere.attacks:attacks")
LABELS = torch.tensor([0, 1, 2, 1])
SHAPE = (4, 2, 3, 3)


def members(name: str, **more: Any) -> list[Attack]:
    """The member with each of the options to be tried, of few steps where it takes them."""
    library = CONTRACT.fact(name, "needs")
    if library is not None and find_spec(library) is None:
        raise SkipTest(f"needs {library}, which is not installed")
    takes = {option.name for option in CONTRACT.entry(name).options}
    usual = {"steps": 10} | more
    return [
        attacks.create(
            name, **{k: v for k, v in usual.items() if k in takes} | options | {k: more[k] for k in more if k in takes}
        )
        for options in variants(CONTRACT, name)
    ]


def predict(images: Tensor) -> Tensor:
    """Logits of three classes, smooth in the pixels."""
    weight = numeric.draw(3, 18, seed=3, dtype=torch.float32).to(images.dtype)
    return (images.flatten(1) - 0.5) @ weight.T * 2 + (images.flatten(1) ** 2) @ weight.flip(0).T / 4


def images() -> Tensor:
    """Images in [0, 1] that reach both ends."""
    return torch.rand(SHAPE, generator=torch.Generator().manual_seed(1)).mul(1.2).sub(0.1).clamp(0, 1)


def attack(member: Attack, x: Tensor, labels: Tensor = LABELS) -> Tensor:
    """What a member makes of images, drawing the same every time."""
    torch.manual_seed(0)
    return member(predict, x, labels, torch.Generator().manual_seed(0))


def strength(name: str) -> str | None:
    """The option that bounds the change."""
    found: str | None = CONTRACT.fact(name, "strength", "eps")
    return found


def change(name: str, member: Attack, x: Tensor, found: Tensor) -> Tensor:
    """Length of the change of each image in the norm of the budget."""
    return lengths(found - x, CONTRACT.fact(name, "norm", getattr(member, "norm", "linf"))).flatten()


def norms(name: str) -> tuple[dict[str, Any], ...]:
    """Options that choose a norm."""
    takes = {option.name for option in CONTRACT.entry(name).options}
    return ({"norm": "linf"}, {"norm": "l2"}) if "norm" in takes else ({},)


@CONTRACT.check
def gives_images_within_the_budget(name: str) -> None:
    """Images of the same shape and in [0, 1], no farther away than the budget, in every norm that it knows."""
    x = images()
    for options in norms(name):
        for eps in (0.02, 0.3):
            limit = {} if strength(name) is None else {str(strength(name)): eps}
            for member in members(name, **options, **limit):
                found = attack(member, x)
                assert found.shape == x.shape and found.dtype == x.dtype
                assert float(found.min()) >= 0 and float(found.max()) <= 1, f"{member} leaves [0, 1]"
                if limit:
                    far = float(change(name, member, x, found).max())
                    assert far <= eps * (1 + 1e-4) + 1e-6, f"{member} changes an image by {far:g}"
                    assert far > 0.5 * eps, f"{member} hardly changes an image: by {far:g}"


@CONTRACT.check
def does_nothing_without_a_budget(name: str) -> None:
    """With a budget of 0 images stay as they are."""
    if strength(name) is not None:
        for member in members(name, **{str(strength(name)): 0.0}):
            numeric.close(attack(member, images()), images(), 1e-6, f"{member} of no strength")


@CONTRACT.check
def raises_the_loss(name: str) -> None:
    """The loss of every sample is at least that of the image itself, and together it is larger."""
    x = images()
    for options in norms(name):
        for member in members(name, **options):
            labels = predict(x).argmax(1)  # all right
            before = losses_of(predict(x), labels)
            after = losses_of(predict(attack(member, x, labels)), labels)
            assert float(after.sum()) > float(before.sum()), f"{member} does not raise the loss"
            if CONTRACT.fact(name, "raises", True):
                assert bool((after >= before - 1e-5).all()), f"{member} lowers the loss of a sample"


@CONTRACT.check
def is_a_function_of_its_generator(name: str) -> None:
    """The same draws give the same images, and torch's own draws are left alone."""
    for member in members(name):
        x = images()
        first = attack(member, x)
        assert torch.equal(attack(member, x), first), f"{member} differs from run to run"
        if not CONTRACT.fact(name, "needs"):
            torch.manual_seed(5)
            wanted = torch.rand(3)
            torch.manual_seed(5)
            member(predict, x, LABELS, torch.Generator().manual_seed(0))
            assert torch.equal(torch.rand(3), wanted), f"{member} takes draws that are not its own"


@CONTRACT.check
def leaves_what_it_is_given(name: str) -> None:
    """Images, labels and parameters are not changed, and parameters get no gradients."""
    scale = torch.nn.Parameter(torch.ones(()))
    for member in members(name):
        x, labels = images(), LABELS.clone()
        member(lambda images: predict(images) * scale, x, labels, torch.Generator().manual_seed(0))
        assert torch.equal(x, images()) and torch.equal(labels, LABELS), f"{member} changes what it is given"
        if CONTRACT.fact(name, "clean", True):
            assert scale.grad is None, f"{member} gives a parameter a gradient"
        with torch.no_grad():
            assert not attack(member, x).requires_grad


@CONTRACT.check
def takes_any_batch(name: str) -> None:
    """Empty batches, single images, vectors and half precision are attacked, too, the last ones in float32."""
    for member in members(name):
        x = images()
        assert attack(member, x[:0], LABELS[:0]).shape == (0, *SHAPE[1:])
        assert attack(member, x[:1], LABELS[:1]).shape == (1, *SHAPE[1:])
        assert attack(member, x.flatten(1)).shape == (4, 18)
        for dtype in numeric.LOW:
            assert attack(member, x.to(dtype)).dtype == torch.float32


@CONTRACT.check
def stays_finite_where_gradients_are_none(name: str) -> None:
    """A flat model, one that is sure, and one whose gradient is NaN leave images finite."""
    x = images()
    flat = lambda images: predict(images) * 0
    sure = lambda images: predict(images) * 1e6
    for member in members(name):
        for model in (flat, sure):
            found = member(model, x, LABELS, torch.Generator().manual_seed(0))
            assert bool(found.isfinite().all()) and 0 <= float(found.min()) <= float(found.max()) <= 1


@CONTRACT.check
def samples_count_by_themselves(name: str) -> None:
    """Where nothing is drawn, the image made of a sample does not depend on the others of its batch."""
    x = images()
    for member in members(name):
        other = member(predict, x, LABELS, torch.Generator().manual_seed(1))
        if torch.equal(other, attack(member, x)) and not CONTRACT.fact(name, "needs"):
            numeric.close(attack(member, x[1:2], LABELS[1:2]), attack(member, x)[1:2], 1e-5, f"{member} of one sample")


@CONTRACT.check
def waits_for_nothing_in_a_step(name: str) -> None:
    """One that says ``in_step`` reads nothing off the device, but to see whether it may stop."""
    for member in members(name):
        if member.in_step and CONTRACT.fact(name, "settles", True):
            x = images()
            with numeric.Host(values=False):
                member.perturb(predict, x, LABELS, torch.Generator().manual_seed(0))


common.add(
    CONTRACT,
    build=lambda name: members(name)[0],
    recipe=lambda name: [f"adversary.name={name}"] if members(name)[0].in_step else [],
)
