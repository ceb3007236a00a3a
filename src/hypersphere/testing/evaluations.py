r"""The contract of evaluations: numbers of what a model puts out, which better outputs make better.

A member that needs more than outputs (samples, a data set on disk, another model) says so by an error, and is then held
to that. A member's own ``contract`` may declare ``options`` (to run it with).
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import torch

from hypersphere.errors import HypersphereError
from hypersphere.evaluate import Outputs, columns, evaluations
from hypersphere.testing import common, numeric
from hypersphere.testing.contract import Contract, options

CONTRACT = Contract("evaluation", "evaluations", "hypersphere.evaluate:evaluations")
CLASSES, EACH, D = 4, 12, 5


def outputs(noise: float = 0.4) -> Outputs:
    """What a model puts out whose features are its class weights and noise; one class is rare in training."""
    labels = torch.arange(CLASSES).repeat_interleave(EACH)
    weight = torch.eye(CLASSES, D)
    features = weight[labels] + noise * numeric.draw(len(labels), D, seed=1, dtype=torch.float32)
    unseen = torch.eye(3, D)[torch.arange(3).repeat_interleave(6)]
    return Outputs(
        features=features,
        logits=8 * torch.nn.functional.normalize(features) @ weight.T,
        labels=labels,
        weight=weight,
        unseen_features=unseen + noise * numeric.draw(18, D, seed=2, dtype=torch.float32),
        unseen_labels=torch.arange(3).repeat_interleave(6),
        class_counts=torch.tensor([100, 90, 80, 20]),
    )


def measured(name: str, given: Outputs) -> dict[str, float] | None:
    """Metrics of a member, or ``None`` where it needs more than outputs and says so."""
    try:
        return evaluations.create(name, given, **options(CONTRACT, name))
    except HypersphereError as error:
        assert len(str(error)) > 20, f"it stops and says only {error}"
        return None


def same(one: dict[str, float], other: dict[str, float], what: str) -> None:
    """Raise unless two sets of metrics agree."""
    assert one.keys() == other.keys(), f"{what}: {sorted(one)} and {sorted(other)}"
    for key, value in one.items():
        assert abs(value - other[key]) <= 1e-4 * max(1, abs(value)), f"{what}: {key} is {other[key]}, was {value}"


@CONTRACT.check
def gives_numbers_that_can_be_written(name: str) -> None:
    """Metrics are finite numbers of Python by name, which JSON holds."""
    for noise in (0.4, 0.0):
        found = measured(name, outputs(noise))
        if found is None:
            return
        assert all(type(key) is str and type(value) in (int, float) for key, value in found.items()), found
        assert all(math.isfinite(value) for value in found.values()), found
        assert json.loads(json.dumps(found)) == found


@CONTRACT.check
def leaves_what_it_is_given(name: str) -> None:
    """Outputs are not changed, and measured again they are the same."""
    given, untouched = outputs(), outputs()
    first = measured(name, given)
    if first is not None:
        for key in ("features", "logits", "labels", "weight", "unseen_features"):
            assert torch.equal(getattr(given, key), getattr(untouched, key)), f"{key} are changed"
        torch.rand(5)
        same(first, measured(name, outputs()) or {}, "measured again")


@CONTRACT.check
def has_no_order_of_samples(name: str) -> None:
    """The order of the samples does not count."""
    given = outputs()
    first = measured(name, given)
    if first is not None:
        order, unseen = (
            torch.randperm(CLASSES * EACH, generator=torch.Generator().manual_seed(0)),
            torch.arange(18).flip(0),
        )
        assert given.unseen_features is not None and given.unseen_labels is not None
        mixed = replace(
            given,
            features=given.features[order],
            logits=given.logits[order],
            labels=given.labels[order],
            unseen_features=given.unseen_features[unseen],
            unseen_labels=given.unseen_labels[unseen],
        )
        same(first, measured(name, mixed) or {}, "in another order")


@CONTRACT.check
def turns_with_the_features(name: str) -> None:
    """Rotating features and class weights changes nothing, lengthening them neither."""
    given = outputs()
    first = measured(name, given)
    if first is not None:
        q = numeric.rotation(D, dtype=torch.float32) * 3
        assert given.unseen_features is not None
        turned = replace(
            given, features=given.features @ q, weight=given.weight @ q, unseen_features=given.unseen_features @ q
        )
        same(first, measured(name, turned) or {}, "rotated")


@CONTRACT.check
def better_outputs_are_better(name: str) -> None:
    """Less noise moves every metric the way that it declares as better, to the end of its scale where it has one."""
    perfect, good, bad = (measured(name, outputs(noise)) for noise in (0.0, 0.25, 0.9))
    if perfect is None or good is None or bad is None:
        return
    for key, metric in columns([perfect]).items():
        if key not in good or key not in bad or metric.better not in ("higher", "lower"):
            continue
        sign = 1 if metric.better == "higher" else -1
        assert sign * perfect[key] >= sign * good[key] - 1e-6, f"{key} of perfect outputs is {perfect[key]}"
        assert sign * good[key] >= sign * bad[key] - 1e-6, f"{key} is {good[key]}, of worse outputs {bad[key]}"
        if "%" in metric.form:
            assert perfect[key] == (1.0 if sign > 0 else 0.0), f"{key} of perfect outputs is {perfect[key]}"
            assert 0 <= bad[key] <= 1
    classes = [key for key in perfect if key.startswith("accuracy/")]
    assert all(perfect[key] == 1.0 and bad[key] <= 1 for key in classes)


@CONTRACT.check
def is_shown(name: str) -> None:
    """Every metric has a title, a format that takes it, and help."""
    found = measured(name, outputs())
    if found:
        for key, metric in columns([found]).items():
            assert metric.title and any(c.isdigit() for c in metric.text(found[key])), key


common.add(
    CONTRACT, recipe=lambda name: [f"evaluate.metrics=[{name}]"] if not options(CONTRACT, name) else [], example=False
)
