"""Heads that learn of their batch learn the same on several processes that share it."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp

import hypersphere as hs
from helpers.processes import HEADS, everything, work


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(work, (str(folder),), nprocs=2)
    return everything(0, 1), [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("part", ["trained", "observed"])
def test_two_processes_learn_what_one_does(runs, name, part):
    """Also where samples do not count: the mean is over those that do, of which each process has another number."""
    one, two = runs
    for key, expected in one[f"{name}/{part}"].items():
        for found in two:
            torch.testing.assert_close(found[f"{name}/{part}"][key], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", HEADS[:4])
def test_a_head_that_is_called_alone_keeps_to_its_own_batch(runs, name):
    one, two = runs
    for key, expected in one[f"{name}/alone"].items():
        torch.testing.assert_close(two[0][f"{name}/alone"][key], expected, rtol=0, atol=0)


def test_every_head_whose_state_depends_on_the_batch_is_among_them():
    x, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2])
    moving = set()
    for name in hs.losses.losses:
        if name == "gan":  # a model's own loss, of no batch alone
            continue
        head = hs.losses.create(name, 3, 3)
        before = {key: value.clone() for key, value in head.named_buffers()}
        head(x, y)
        if any(not torch.equal(value, before[key]) for key, value in head.named_buffers()):
            moving.add(name)
    assert moving == set(HEADS[:4])
