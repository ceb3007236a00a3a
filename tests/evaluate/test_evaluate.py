"""Metrics against scikit-learn, NumPy and hand-made geometry."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss, roc_curve, top_k_accuracy_score
from sklearn.metrics.pairwise import cosine_similarity

from hypersphere.errors import ArgumentError
from hypersphere.evaluate import (
    MISSING,
    Outputs,
    evaluations,
    measure,
    shared,
    table,
)
from hypersphere.metrics import accuracy, class_centres, equal_error_rate, pair_scores
from hypersphere.registry import UnknownNameError


def on_circle(*degrees: float, length: float = 1.0) -> torch.Tensor:
    radians = torch.tensor([math.radians(d) for d in degrees], dtype=torch.float64)
    return length * torch.stack([radians.cos(), radians.sin()], 1)


# -------------------------------------------------------------------------------------- metrics as functions


def test_accuracy_is_that_of_scikit_learn():
    logits, labels = torch.randn(200, 5), torch.randint(5, (200,))
    assert accuracy(logits, labels) == pytest.approx(accuracy_score(labels, logits.argmax(1)), abs=1e-12)
    assert 0.1 < accuracy(logits, labels) < 0.35


@pytest.mark.parametrize("k", [1, 2, 5, 6])
def test_top_k_accuracy_is_that_of_scikit_learn(k):
    logits, labels = torch.randn(300, 7), torch.randint(7, (300,))
    outputs = Outputs(torch.zeros(300, 2), logits, labels, torch.zeros(7, 2))
    found = measure(outputs, [{"name": "top-k", "k": k}])
    wanted = top_k_accuracy_score(labels.numpy(), logits.numpy(), k=k, labels=range(7))
    assert found == {f"top{k}_accuracy": pytest.approx(wanted, abs=1e-12)}
    assert found[f"top{k}_accuracy"] == pytest.approx(k / 7, abs=0.12)


def test_top_k_accuracy_needs_as_many_classes():
    outputs = Outputs(torch.zeros(2, 2), torch.zeros(2, 4), torch.tensor([0, 1]), torch.zeros(4, 2))
    with pytest.raises(ArgumentError, match="k must be at most 4, the number of classes, got 5"):
        measure(outputs, ["top-k"])
    with pytest.raises(ArgumentError, match="k must be at least 1"):
        measure(outputs, [{"name": "top-k", "k": 0}])


def test_top_k_accuracy_is_shown_as_it_is_declared():
    shown = evaluations.metric("top5_accuracy")
    assert (shown.title, shown.text(0.5), shown.better) == ("Top-5 accuracy", "50.00%", "higher")
    assert "among the 5 with" in shown.help and shown.curve == "Test accuracy, top 5 (%)"


def test_class_centres_are_mean_directions():
    features, labels = torch.randn(60, 4, dtype=torch.float64) * torch.rand(60, 1) * 9, torch.randint(3, (60,))
    found = class_centres(features, labels, 4)
    for c in range(3):
        rows = features[labels == c].numpy()
        mean = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).mean(0)
        np.testing.assert_allclose(found[c].numpy(), mean / np.linalg.norm(mean), atol=1e-12)
    assert torch.equal(found[3], torch.zeros(4, dtype=torch.float64))


def test_class_centres_do_not_follow_long_features():
    features = torch.cat([on_circle(0, length=1000.0), on_circle(90)])
    torch.testing.assert_close(class_centres(features, torch.tensor([0, 0]), 1), on_circle(45))


def test_pair_scores_are_all_pairs_once():
    features, labels = torch.randn(7, 3, dtype=torch.float64), torch.tensor([0, 1, 0, 2, 1, 1, 0])
    scores, same = pair_scores(features, labels)
    pairs = [(i, j) for i in range(7) for j in range(i + 1, 7)]
    expected = cosine_similarity(features.numpy())
    np.testing.assert_allclose(scores.numpy(), [expected[i, j] for i, j in pairs], atol=1e-12)
    assert same.tolist() == [bool(labels[i] == labels[j]) for i, j in pairs]


def roc_eer(scores: np.ndarray, same: np.ndarray) -> float:
    """Where the ROC polygon crosses FPR = 1 - TPR, from scikit-learn's curve."""
    fpr, tpr, _ = roc_curve(same, scores, drop_intermediate=False)
    gaps = fpr - (1 - tpr)
    after = int(np.argmax(gaps >= 0))
    if after == 0:
        return float(fpr[0])
    share = -gaps[after - 1] / (gaps[after] - gaps[after - 1])
    return float(fpr[after - 1] + share * (fpr[after] - fpr[after - 1]))


def eer(scores, same) -> float:
    return equal_error_rate(torch.tensor(scores, dtype=torch.float64), torch.tensor(same, dtype=torch.bool))


def test_equal_error_rate_by_hand():
    scores = [0.9, 0.8, 0.7, 0.35, 0.3, 0.6, 0.5, 0.4, 0.2, 0.1]
    assert eer(scores, [1, 1, 1, 1, 1, 0, 0, 0, 0, 0]) == pytest.approx(0.4, abs=1e-12)
    # Between two points: 1 of 3 accepted wrongly where 1/2 is rejected, then 2 of 3 where 0 is.
    assert eer([0.9, 0.8, 0.5, 0.5, 0.1], [1, 0, 1, 0, 0]) == pytest.approx(0.4, abs=1e-12)


def test_equal_error_rate_at_the_extremes():
    assert eer([3.0, 2.0, 1.0, 0.0], [1, 1, 0, 0]) == 0.0
    assert eer([3.0, 2.0, 1.0, 0.0], [0, 0, 1, 1]) == 1.0
    assert eer([0.5] * 6, [1, 0, 1, 0, 0, 0]) == 0.5  # nothing can be told apart
    assert eer([0.5, 0.5], [1, 0]) == 0.5
    assert eer([math.inf, -math.inf], [1, 0]) == 0.0


def test_equal_error_rate_does_not_depend_on_the_order():
    """With ties, the points inside a block of equal scores cannot be reached."""
    scores, same = [0.7] * 4 + [0.2] * 4, [1, 1, 1, 0, 1, 0, 0, 0]
    expected = eer(scores, same)
    assert expected == pytest.approx(0.25)
    for _ in range(10):
        order = torch.randperm(8).tolist()
        assert eer([scores[i] for i in order], [same[i] for i in order]) == pytest.approx(expected, abs=1e-12)


@given(
    st.lists(
        st.tuples(st.one_of(st.integers(-3, 3).map(float), st.floats(-1, 1)), st.booleans()), min_size=2, max_size=60
    ).filter(lambda rows: len({same for _, same in rows}) == 2)
)
def test_equal_error_rate_is_that_of_scikit_learns_curve(rows):
    scores, same = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    found = equal_error_rate(torch.from_numpy(scores), torch.from_numpy(same))
    assert found == pytest.approx(roc_eer(scores, same), abs=1e-9)
    assert 0 <= found <= 1


def test_equal_error_rate_of_many_scores():
    same = np.random.default_rng(0).random(5000) < 0.2
    scores = np.random.default_rng(1).normal(size=5000) + 1.5 * same
    found = equal_error_rate(torch.from_numpy(scores), torch.from_numpy(same))
    assert found == pytest.approx(roc_eer(scores, same), abs=1e-9)
    assert found == pytest.approx(0.5 * math.erfc(0.75 / math.sqrt(2)), abs=0.02)  # two normals 1.5 apart


@pytest.mark.parametrize(
    ("scores", "same", "message"),
    [
        ([0.1, 0.2], [True, True], "same needs pairs of both kinds, got 2 same and 0 different"),
        ([0.1, 0.2, 0.3], [False] * 3, "same needs pairs of both kinds, got 0 same and 3 different"),
        ([], [], "same needs pairs of both kinds, got 0 same and 0 different"),
        ([0.1, math.nan], [True, False], "scores must not contain NaN"),
        ([0.1, 0.2, 0.3], [True, False], "scores and same must be equally long vectors"),
        ([[0.1, 0.2]], [[True, False]], "scores and same must be equally long vectors"),
    ],
)
def test_equal_error_rate_rejects(scores, same, message):
    with pytest.raises(ArgumentError, match=f"^{message}"):
        equal_error_rate(torch.tensor(scores), torch.tensor(same, dtype=torch.bool))


# ------------------------------------------------------------------------------------------------ evaluations


def outputs(features: torch.Tensor, labels: list[int], **more) -> Outputs:
    classes = max(labels) + 1
    weight = more.pop("weight", torch.eye(classes, features.shape[1]))
    return Outputs(features, torch.randn(len(labels), classes), torch.tensor(labels), weight, **more)


def test_classification():
    given = outputs(torch.randn(50, 3), torch.randint(4, (50,)).tolist())
    found = evaluations.create("classification", given)
    probabilities = given.logits.double().softmax(1)
    assert found["accuracy"] == pytest.approx(accuracy_score(given.labels, given.logits.argmax(1)))
    expected = log_loss(given.labels.numpy(), probabilities.numpy(), labels=range(4))
    assert found["cross_entropy"] == pytest.approx(expected, rel=1e-5)
    assert set(found) == {"accuracy", "cross_entropy"}


def test_angles_on_hand_made_geometry():
    """Class 0 lies 10 degrees around 0, class 1 20 degrees around 90, class 2 at 150: lengths do not matter."""
    features = torch.cat([on_circle(-10, 10), on_circle(70, 110, length=5.0), on_circle(150, length=0.1)])
    found = evaluations.create("angles", outputs(features, [0, 0, 1, 1, 2]))
    assert found["mean_angle"] == pytest.approx((10 + 10 + 20 + 20 + 0) / 5, abs=1e-6)
    assert found["min_centre_angle"] == pytest.approx(60, abs=1e-6)


def test_angles_leave_out_classes_without_samples():
    weight = torch.randn(6, 2)  # six classes, of which the test split has two
    found = evaluations.create("angles", outputs(on_circle(0, 40), [1, 4], weight=weight))
    assert found["min_centre_angle"] == pytest.approx(40, abs=1e-5)
    alone = evaluations.create("angles", outputs(on_circle(0, 40), [1, 1], weight=weight))
    assert set(alone) == {"mean_angle"} and alone["mean_angle"] == pytest.approx(20, abs=1e-5)


def test_opposite_centres_are_180_degrees_apart():
    found = evaluations.create("angles", outputs(on_circle(0, 180), [0, 1]))
    assert found == {"mean_angle": pytest.approx(0, abs=1e-6), "min_centre_angle": pytest.approx(180, abs=1e-5)}


def test_verification_is_the_equal_error_rate_of_all_unseen_pairs():
    features, labels = torch.randn(30, 3), torch.randint(3, (30,))
    given = outputs(torch.randn(4, 3), [0, 1, 2, 0], unseen_features=features, unseen_labels=labels)
    scores, same = pair_scores(features, labels)
    expected = roc_eer(scores.double().numpy(), same.numpy())
    assert evaluations.create("verification", given) == {"eer": pytest.approx(expected, abs=1e-6)}


def test_verification_without_unseen_classes_is_nothing():
    seen = outputs(torch.randn(4, 3), [0, 1, 2, 0])
    assert evaluations.create("verification", seen) == {}
    one = outputs(torch.randn(4, 3), [0, 1, 2, 0], unseen_features=torch.randn(5, 3), unseen_labels=torch.zeros(5))
    assert evaluations.create("verification", one) == {}


def test_verification_takes_evenly_spaced_samples_of_many(monkeypatch):
    monkeypatch.setattr(shared, "MAX_PAIR_SAMPLES", 5)
    features, labels = torch.randn(9, 3), torch.tensor([0, 1, 2, 0, 1, 2, 0, 0, 1])
    given = outputs(torch.randn(1, 3), [0], unseen_features=features, unseen_labels=labels)
    part = torch.tensor([0, 2, 4, 6, 8])
    expected = equal_error_rate(*pair_scores(features[part], labels[part]))
    assert evaluations.create("verification", given) == {"eer": expected}
    monkeypatch.setattr(shared, "MAX_PAIR_SAMPLES", 9)
    assert evaluations.create("verification", given) == {"eer": equal_error_rate(*pair_scores(features, labels))}


def test_accuracy_of_every_class_and_of_the_rare_ones():
    labels = torch.tensor([0, 0, 1, 1, 1, 3])
    guesses = torch.tensor([0, 2, 1, 1, 0, 3])
    given = Outputs(torch.ones(6, 2), torch.eye(4)[guesses], labels, torch.ones(4, 2))
    assert evaluations.create("per-class", given) == {"accuracy/0": 0.5, "accuracy/1": 2 / 3, "accuracy/3": 1.0}
    assert evaluations.create("rare", given) == {}
    for counts, expected in [([4, 10, 3, 5], 0.5), ([4, 3, 1, 10], (0.5 + 2 / 3) / 2), ([5, 5, 9, 10], None)]:
        found = evaluations.create("rare", dataclasses.replace(given, class_counts=torch.tensor(counts)))
        assert found == ({} if expected is None else {"rare_accuracy": pytest.approx(expected)})


def test_energy_of_the_classifier():
    """Three unit vectors at right angles: all pairs sqrt(2) apart, so 1 / 2 with s = 2."""
    found = evaluations.create("energy", outputs(torch.randn(3, 3), [0, 1, 2], weight=torch.diag(torch.arange(1.0, 4))))
    assert found == {"energy": pytest.approx(0.5, abs=1e-6)}
    weight = torch.randn(5, 3, dtype=torch.float64)
    units = (weight / weight.norm(dim=1, keepdim=True)).numpy()
    pairs = [1 / np.sum((units[i] - units[j]) ** 2) for i in range(5) for j in range(5) if i != j]
    found = evaluations.create("energy", outputs(torch.randn(1, 3), [0], weight=weight))
    assert found["energy"] == pytest.approx(np.mean(pairs), rel=1e-9)


def test_measure_joins_the_named_evaluations():
    unseen = {"unseen_features": torch.randn(8, 3), "unseen_labels": torch.arange(8) % 2}
    given = outputs(torch.randn(6, 3), [0, 1, 2, 0, 1, 2], **unseen)
    assert measure(given, []) == {}
    assert set(measure(given, ["energy", "verification"])) == {"energy", "eer"}
    everything = measure(given, ["classification", "per-class", "rare", "angles", "verification", "energy"])
    classification = {"accuracy", "mean_angle", "min_centre_angle", "eer", "energy"}
    assert set(everything) == classification | {"cross_entropy", "accuracy/0", "accuracy/1", "accuracy/2"}
    assert all(isinstance(value, float) for value in everything.values())
    with pytest.raises(UnknownNameError, match=r"unknown evaluation 'angels'\. Did you mean 'angles'\?"):
        measure(given, ["angels"])


# ------------------------------------------------------------------------------------------------------ table


def column(name: str, *values: float | None) -> list[tuple[str, bool]]:
    rows = table([{} if value is None else {name: value} for value in values])
    return [tuple(row[0]) for row in rows]


def test_table_formats():
    assert column("accuracy", 0.98765) == [("98.77%", False)]
    assert column("mean_angle", 12.3456) == [("12.3°", False)]
    assert column("min_centre_angle", 102.25) == [("102.2°", False)]
    assert column("eer", 0.5) == [("50.00%", False)]
    assert column("energy", 0.123456) == [("0.1235", False)]
    assert column("energy", None, 0.5) == [(MISSING, False), ("0.5000", False)]
    assert table([{}, {"cross_entropy": 1.0}]) == [[], []]
    assert column("energy", math.nan, math.inf) == [(MISSING, False)] * 2


@pytest.mark.parametrize("name", ["accuracy", "mean_angle", "energy", "eer", "min_centre_angle"])
def test_table_marks_the_best_of_each_column(name):
    higher = evaluations.metric(name).better == "higher"
    assert [best for _, best in column(name, 1, 2, 3)] == [not higher, False, higher]


def test_table_marks_what_looks_equally_good_and_nothing_alone():
    assert [best for _, best in column("mean_angle", 3.01, 3.04, 5.0)] == [True, True, False]
    assert [best for _, best in column("accuracy", 0.5)] == [False]
    assert [best for _, best in column("accuracy", 0.5, None)] == [False, False]
    assert [best for _, best in column("accuracy", 0.5, None, 0.4, math.nan)] == [True, False, False, False]


def test_table_has_a_column_for_every_metric_and_no_other():
    everywhere = ("accuracy", "mean_angle", "min_centre_angle", "eer", "energy")
    found = table([{"accuracy": 0.5}, dict.fromkeys(everywhere, 0.25)])
    assert [cell.text for cell in found[0]] == ["50.00%"] + [MISSING] * 4
    assert [cell.text for cell in found[1]] == ["25.00%", "0.2°", "0.2°", "25.00%", "0.2500"]
    assert table([]) == []


def test_every_metric_is_explained():
    for metric in evaluations.metrics():
        assert metric.title and len(metric.help) > 20
