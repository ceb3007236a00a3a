r"""The contract of data sets: two parts of labelled samples, the same every time, or an error that says what to do.

A member's own ``contract`` may declare ``options`` (to build it with).
"""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from hypersphere.data import DataError, datasets
from hypersphere.errors import HypersphereError
from hypersphere.testing import common
from hypersphere.testing.contract import Contract, options

CONTRACT = Contract(datasets.family, f"{datasets.family}s", "hypersphere.data:datasets")


def absent(name: str) -> HypersphereError | None:
    """The error of a member whose files are not there, or ``None`` where it needs none."""
    return _made(name, CONTRACT.entry(name).factory)[1]


def made(name: str) -> Any:
    """A member that needs no files, or ``None``."""
    return _made(name, CONTRACT.entry(name).factory)[0]


@lru_cache(1)  # the data set that is looked at
def _made(name: str, _: Any) -> tuple[Any, HypersphereError | None]:
    try:
        return _fresh(name), None
    except HypersphereError as error:
        return None, error


def _fresh(name: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return datasets.create(name, Path(folder), **options(CONTRACT, name))


@CONTRACT.check
def says_what_is_missing(name: str) -> None:
    """Without its files it stops with a :class:`DataError` that names itself or the folder, and what to do."""
    error = absent(name)
    if error is not None:
        assert isinstance(error, DataError), f"the error is {type(error).__name__}: {error}"
        text = str(error)
        assert len(text) > 30 and ("not found" in text or "no " in text.lower() or "needs" in text), f"it says {text!r}"


@CONTRACT.check
def has_two_parts_of_labelled_samples(name: str) -> None:
    """Training and test samples are of one shape, not empty, and each has a label that names a class."""
    data = made(name)
    if data is None:
        return
    assert len(data.class_names) == len(set(data.class_names)) >= 1
    for part in (data.train, data.test):
        assert len(part) == len(part.labels) > 0 and part.labels.dtype == torch.int64
        assert part.shape == data.train.shape
        assert 0 <= int(part.labels.min()) <= int(part.labels.max()) < len(data.class_names)
        if hasattr(part, "images"):
            assert len(part.images) == len(part) and tuple(part.images.shape[1:]) == tuple(part.shape)
            assert part.images.dtype == torch.uint8 or bool(part.images.isfinite().all())
    assert set(data.train.labels.unique().tolist()) == set(range(len(data.class_names))), "a class is not trained on"


@CONTRACT.check
def is_the_same_every_time(name: str) -> None:
    """Made again it has the same samples in the same order, whatever torch has drawn."""
    data = made(name)
    if data is None:
        return
    torch.rand(7)
    other = _fresh(name)
    for one, two in ((data.train, other.train), (data.test, other.test)):
        assert torch.equal(one.labels, two.labels)
        if hasattr(one, "images"):
            assert torch.equal(one.images, two.images), "made again it has other samples"
            assert one.images.data_ptr() != two.images.data_ptr() or len(one) == 0, "two share their samples"


@CONTRACT.check
def parts_have_nothing_in_common(name: str) -> None:
    """No test sample is one to train on."""
    data = made(name)
    if data is None or not hasattr(data.train, "images"):
        return
    seen = {bytes(image.numpy().tobytes()) for image in data.train.images}
    common_ones = sum(bytes(image.numpy().tobytes()) in seen for image in data.test.images)
    assert common_ones <= 0.01 * len(data.test), f"{common_ones} of {len(data.test)} test samples are trained on"


@CONTRACT.check
def samples_say_something_of_their_class(name: str) -> None:
    """The nearest mean of a class is right more often than chance."""
    data = made(name)
    if data is None or not hasattr(data.train, "images") or len(data.class_names) < 2:
        return
    train, test = (part.images.flatten(1).double() for part in (data.train, data.test))
    train, test = (x.sort(1).values if data.train.images.dtype != torch.uint8 else x for x in (train, test))
    means = torch.stack([train[data.train.labels == k].mean(0) for k in range(len(data.class_names))])
    right = (torch.cdist(test, means).argmin(1) == data.test.labels).double().mean()
    assert float(right) > 1.3 / len(data.class_names), (
        f"the nearest mean is right for {float(right):.1%}: labels are mixed"
    )


@CONTRACT.check
def classes_can_be_held_out(name: str) -> None:
    """Held out classes are neither trained on nor tested on."""
    data = made(name)
    if data is None or len(data.class_names) < 2:
        return
    part = data.hold_out([0])
    assert part.class_names == data.class_names[1:] and part.unseen is not None
    assert len(part.train) + len(part.test) + len(part.unseen) - len(data.unseen or ()) == len(data.train) + len(
        data.test
    )


@CONTRACT.check
def refuses_options_that_it_has_not(name: str) -> None:
    """An option that it does not take is named."""
    try:
        datasets.create(name, None, **options(CONTRACT, name), no_such_option=1)
    except HypersphereError as error:
        assert "no_such_option" in str(error)
        return
    raise AssertionError("it takes any option")


common.add(CONTRACT, recipe=lambda name: [f"data.name={name}", *_options(name), "data.hold_out=[]"], example=False)


def _options(name: str) -> list[str]:
    return [f"data.{key}={list(v) if isinstance(v, tuple) else v}" for key, v in options(CONTRACT, name).items()]
