"""Every member of every family keeps its family's contract; a new member is tested by being registered."""

import warnings

import pytest

import hypersphere as hs

CASES = [
    pytest.param(name, check, id=f"{family}-{name}-{check.__name__}")
    for family in hs.testing.contracts()
    for name, check in hs.testing.cases(family)
]


@pytest.mark.parametrize(("name", "check"), CASES)
def test_contract(name, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes that are small on purpose
        check(name)
