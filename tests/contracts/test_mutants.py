"""A member with a fault fails its family's contract by being registered and nothing else."""

import functools
from collections import Counter

import pytest

import hypersphere as hs
from contracts.mutants import CONTROLS, TABLE, Mutant, after, changed, killer, plus, registered
from hypersphere.testing.losses import target_falls_and_never_helps


def test_every_family_has_ten_mutants():
    counts = Counter(hs.testing.contract(mutant.family).plural for mutant in TABLE)
    assert {family: counts[family] for family in hs.testing.contracts() if counts[family] < 10} == {}


@pytest.mark.parametrize("mutant", TABLE, ids=lambda m: f"{m.family}-{m.member}-{m.fault}")
def test_mutants_are_found(mutant):
    assert killer(mutant) is not None


@pytest.mark.parametrize("control", CONTROLS, ids=lambda m: f"{m.family}-{m.member}")
def test_what_has_no_fault_passes(control):
    assert killer(control) is None


def test_a_target_above_the_angular_function_is_told_so():
    make = functools.partial(changed, after("psi", plus(2.0)))
    mutant = Mutant("losses", "cosface", "easier", make)
    with registered(hs.testing.contract("losses"), mutant) as name, pytest.raises(AssertionError, match="above Cosine"):
        target_falls_and_never_helps(name)
