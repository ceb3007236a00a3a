r"""The contract of augmentations: random changes that a captured, resumed or distributed run makes alike.

A member's own ``contract`` may declare ``options`` and ``variants`` (to build it with), ``shape`` (of a sample, where
that of its number of ``dimensions`` will not do), ``keeps_zero`` (``False`` where grey images do not stay so) and
``draws_alone`` (``False`` where a sample's change depends on others of its batch).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hypersphere.data.augmentations import Augmentation, augmentations
from hypersphere.testing import common, numeric
from hypersphere.testing.contract import Contract, variants

CONTRACT = Contract("augmentation", "augmentations", "hypersphere.data.augmentations:augmentations")
SHAPES = {None: (2, 8, 8), 3: (2, 8, 8), 2: (3, 16), 1: (12,)}
BATCH = 6


def members(name: str) -> list[Augmentation]:
    """The member with each of the options to be tried."""
    return [augmentations.create(name, **options) for options in variants(CONTRACT, name)]


def samples(name: str, member: Augmentation, dtype: torch.dtype = torch.float32) -> Tensor:
    """A batch of normalised samples."""
    shape = CONTRACT.fact(name, "shape", SHAPES.get(member.dimensions, (2, 8, 8)))
    return numeric.draw(BATCH, *shape, seed=1, dtype=dtype)


def change(member: Augmentation, x: Tensor, seed: int = 0, share: slice = slice(None)) -> Tensor:
    """The share of a batch of one process, changed."""
    return member.change(x[share], torch.Generator().manual_seed(seed), len(x), share)


@CONTRACT.check
def changes_samples(name: str) -> None:
    """Samples keep shape and type and stay finite, and with some of its options they are changed."""
    changed = []
    for member in members(name):
        for dtype in numeric.FLOATS:
            x = samples(name, member, dtype)
            found = change(member, x)
            assert found.shape == x.shape, f"{member}: shape {tuple(found.shape)}, should be {tuple(x.shape)}"
            assert found.dtype == dtype, f"{member} makes {found.dtype} of {dtype}"
            numeric.finite([found], f"{member} in {dtype}")
            changed.append(not torch.equal(found, x))
    assert any(changed), "it changes nothing: declare options that do in contract['variants']"


@CONTRACT.check
def is_a_function_of_its_draws(name: str) -> None:
    """The same generator gives the same samples, another one others, and torch's own draws are left alone."""
    differs = []
    for member in members(name):
        x = samples(name, member)
        first = change(member, x)
        torch.manual_seed(5)
        wanted = torch.rand(3)
        torch.manual_seed(5)
        assert torch.equal(change(member, x), first), f"{member} differs from run to run"
        assert torch.equal(torch.rand(3), wanted), f"{member} takes draws that are not its own"
        differs.append(not torch.equal(change(member, x, seed=1), first) or torch.equal(first, x))
    assert any(differs), "its draws do not count"


@CONTRACT.check
def is_the_same_on_any_number_of_processes(name: str) -> None:
    """Shares of a batch, changed apart, are the batch changed as a whole, and leave the generator where it is then."""
    for member in members(name):
        x = samples(name, member)
        whole, after = torch.Generator().manual_seed(0), []
        wanted = member.change(x, whole, len(x), slice(None))
        for share in (slice(0, 1), slice(1, 4), slice(4, BATCH), slice(0, 0)):
            own = torch.Generator().manual_seed(0)
            found = member.change(x[share], own, len(x), share)
            numeric.close(found, wanted[share], 1e-6, f"{member} of samples {share.start} to {share.stop}")
            after.append(torch.equal(own.get_state(), whole.get_state()))
        assert all(after), f"{member} draws less for a share, so that what is drawn next differs"


@CONTRACT.check
def draws_for_every_sample(name: str) -> None:
    """Equal samples are not all changed alike."""
    alike = []
    for member in members(name):
        x = samples(name, member)[:1].repeat(BATCH, *[1] * (samples(name, member).dim() - 1))
        found = change(member, x)
        alike.append(bool((found == found[:1]).all()) and not torch.equal(found, x))
    assert not all(alike), "it changes all samples alike"


@CONTRACT.check
def samples_count_by_themselves(name: str) -> None:
    """What becomes of a sample does not depend on the others, unless it declares so."""
    if CONTRACT.fact(name, "draws_alone", True):
        for member in members(name):
            x = samples(name, member)
            other = x.clone()
            other[1:] = other[1:] * 2 + 1
            numeric.close(change(member, other)[:1], change(member, x)[:1], 1e-6, f"{member} beside other samples")


@CONTRACT.check
def leaves_what_it_is_given(name: str) -> None:
    """The samples that come in are not changed themselves: other code may hold them."""
    for member in members(name):
        x = samples(name, member)
        change(member, x)
        assert torch.equal(x, samples(name, member)), f"{member} changes samples in place"


@CONTRACT.check
def takes_the_ends_of_its_draws(name: str) -> None:
    """The least and the largest number that can be drawn are good ones."""
    for member in members(name):
        if type(member).change is Augmentation.change:
            x = samples(name, member)
            for draw in (0.0, 1 - 2**-24):
                found = member(x, torch.full((member.draws, len(x)), draw))
                assert found.shape == x.shape
                numeric.finite([found], f"{member} of draws of {draw}")


@CONTRACT.check
def waits_for_nothing(name: str) -> None:
    """Nothing is read off the device, and no shape depends on values."""
    for member in members(name):
        x, generator = samples(name, member), torch.Generator().manual_seed(0)
        with numeric.Host():
            member.change(x, generator, len(x), slice(None))


@CONTRACT.check
def is_one_graph(name: str) -> None:
    """Compiled code of what it does with its draws has no breaks and gives the same numbers."""
    for member in members(name):
        if type(member).change is Augmentation.change:
            x = samples(name, member)
            draws = torch.rand(member.draws, len(x), generator=torch.Generator().manual_seed(0))
            torch._dynamo.reset()
            numeric.compiled(member, x, draws)


common.add(
    CONTRACT,
    build=lambda name: members(name)[0],
    recipe=lambda name: [f"data.augment.parts=[{{name: {name}}}]"],
)
