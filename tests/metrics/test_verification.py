"""Verification metrics against scikit-learn, published values, and plain loops over pairs and thresholds."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import det_curve, roc_auc_score, roc_curve

from hypersphere.errors import ArgumentError
from hypersphere.metrics import verification
from hypersphere.metrics.basic import equal_error_rate, flip_features, operating_points, pair_scores, pair_similarity
from hypersphere.metrics.folds import _few_frames, fold_accuracy, lfw10, video_similarity, ytf10
from hypersphere.metrics.intervals import student_quantile, wilson_interval
from hypersphere.metrics.pair_stream import PairScores
from hypersphere.metrics.verification import (
    Calibration,
    OperatingPoint,
    auc,
    calibrate,
    det,
    rates_at,
    roc,
    tar_at_far,
    verification_summary,
)

pytestmark = pytest.mark.filterwarnings("ignore:a FAR of")

PUBLISHED_SCORES = torch.tensor([0.9, 0.8, 0.7, 0.35, 0.3, 0.6, 0.5, 0.4, 0.2, 0.1], dtype=torch.float64)
PUBLISHED_SAME = torch.arange(10) < 5
BOTH = [True, False]


def scored(pairs: int = 400, share: float = 0.3, levels: int | None = None, seed: int = 0):
    """Overlapping scores of both kinds; few levels make many ties."""
    generator = torch.Generator().manual_seed(seed)
    same = torch.rand(pairs, generator=generator) < share
    scores = torch.randn(pairs, generator=generator, dtype=torch.float64) + 1.5 * same
    return (scores if levels is None else (scores * levels / 4).round() / levels), same


@st.composite
def few_pairs(draw, least: int = 2, most: int = 40):
    """Scores with many ties and both kinds of pairs, in any order."""
    same = draw(st.lists(st.booleans(), min_size=least - 2, max_size=most - 2)) + BOTH
    values = st.sampled_from([-1.0, -0.5, 0.0, 0.25, 0.5, 1.0, math.inf, -math.inf])
    scores = draw(st.lists(values, min_size=len(same), max_size=len(same)))
    return torch.tensor(scores), torch.tensor(same)


def plain_tar(scores, same, far: float) -> tuple[float, float, float]:
    """The definition: sort all impostors, count."""
    impostors = sorted((float(s) for s, g in zip(scores, same, strict=True) if not g), reverse=True)
    genuine = [float(s) for s, g in zip(scores, same, strict=True) if g]
    allowed = max(k for k in range(len(impostors) + 1) if k / len(impostors) <= far)
    threshold = impostors[allowed] if allowed < len(impostors) else -math.inf
    return (
        threshold,
        sum(s > threshold for s in impostors) / len(impostors),
        sum(s > threshold for s in genuine) / len(genuine),
    )


# ------------------------------------------------------------------------------------------ features to scores


def test_similarities_are_those_of_plain_code():
    a, b = torch.randn(20, 5, dtype=torch.float64), torch.randn(20, 5, dtype=torch.float64)
    for row, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        cosine = sum(p * q for p, q in zip(x, y, strict=True)) / (math.hypot(*x) * math.hypot(*y))
        assert float(pair_similarity(a, b)[row]) == pytest.approx(cosine, abs=1e-12)
        assert float(pair_similarity(a, b, "angle")[row]) == pytest.approx(-math.acos(cosine), abs=1e-7)
        assert float(pair_similarity(a, b, "euclidean")[row]) == pytest.approx(-math.dist(x, y), abs=1e-12)


def test_unit_vectors_are_ordered_alike_by_every_similarity():
    a, b = (torch.nn.functional.normalize(torch.randn(50, 6, dtype=torch.float64)) for _ in range(2))
    orders = [pair_similarity(a, b, kind).argsort().tolist() for kind in ("cosine", "angle", "euclidean")]
    assert orders[0] == orders[1] == orders[2]


@pytest.mark.parametrize("kind", ["cosine", "angle", "euclidean"])
def test_similarities_of_half_and_zero_vectors_are_finite(kind):
    a = torch.tensor([[0.0, 0.0], [300.0, 300.0], [1.0, 0.0]], dtype=torch.float16)
    b = torch.tensor([[1.0, 0.0], [-300.0, -300.0], [0.0, 0.0]], dtype=torch.float16)
    found = pair_similarity(a, b, kind)
    assert found.dtype == torch.float32
    assert found.isfinite().all()
    with pytest.raises(ArgumentError, match="kind must be one of 'cosine', 'angle', 'euclidean', got 'manhattan'"):
        pair_similarity(a, b, "manhattan")


def test_flip_features_are_side_by_side_or_added():
    features, mirrored = torch.randn(4, 3), torch.randn(4, 3)
    both = flip_features(features, mirrored)
    assert torch.equal(both[:, :3], features)
    assert torch.equal(both[:, 3:], mirrored)
    mean = (features.numpy() + mirrored.numpy()) / 2
    expected = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    np.testing.assert_allclose(flip_features(features, mirrored, "add").numpy(), expected, atol=1e-6)
    with pytest.raises(ArgumentError, match="mirrored must have shape"):
        flip_features(features, mirrored[:2])


# ------------------------------------------------------------------------------------------------------ curves


@pytest.mark.parametrize("levels", [None, 8, 2])
def test_curves_and_area_are_those_of_scikit_learn(levels):
    scores, same = scored(levels=levels)
    far, tar, thresholds = roc_curve(same, scores, drop_intermediate=False)
    found = roc(scores, same)
    np.testing.assert_allclose(found.far, far, atol=1e-15)
    np.testing.assert_allclose(found.tar, tar, atol=1e-15)
    np.testing.assert_array_equal(found.thresholds, thresholds)
    assert auc(scores, same) == pytest.approx(roc_auc_score(same, scores), abs=1e-13)
    theirs = det_curve(same, scores)
    ours = det(scores, same)
    pairs = {(round(a, 12), round(b, 12)) for a, b in zip(ours.far.tolist(), ours.frr.tolist(), strict=True)}
    assert {(round(a, 12), round(b, 12)) for a, b in zip(*theirs[:2], strict=True)} <= pairs


def test_det_deviates_are_normal_quantiles():
    curve = det(*scored())
    for rates, found in zip((curve.far, curve.frr), curve.deviates(), strict=True):
        np.testing.assert_allclose(found, stats.norm.ppf(rates), atol=1e-9)


@given(few_pairs())
def test_a_simplified_curve_is_the_same_line(pairs):
    full, simple = roc(*pairs), roc(*pairs, simplify=True)
    assert len(simple.far) <= len(full.far)
    grid = torch.linspace(0, 1, 23, dtype=torch.float64)
    torch.testing.assert_close(simple.interpolate(grid), full.interpolate(grid), rtol=0, atol=1e-12)
    steps = list(zip(simple.far.diff().tolist(), simple.tar.diff().tolist(), strict=True))
    for (run, rise), (next_run, next_rise) in itertools.pairwise(steps):
        assert abs(run * next_rise - rise * next_run) > 1e-9


@given(few_pairs())
def test_area_is_the_chance_that_a_genuine_pair_scores_higher(pairs):
    scores, same = pairs
    genuine, impostors = scores[same].tolist(), scores[~same].tolist()
    wins = sum((a > b) + 0.5 * (a == b) for a in genuine for b in impostors)
    assert auc(scores, same) == wins / (len(genuine) * len(impostors))


def test_interpolation_is_linear_between_points():
    scores, same = scored()
    far, tar, _ = roc_curve(same, scores, drop_intermediate=True)
    grid = np.linspace(0.003, 0.997, 50)
    np.testing.assert_allclose(
        roc(scores, same).interpolate(torch.from_numpy(grid)), np.interp(grid, far, tar), atol=1e-12
    )


@given(few_pairs(), st.sampled_from([-2.0, -0.5, 0.1, 0.25, 1.0, math.inf, -math.inf]))
def test_rates_at_a_threshold(pairs, threshold):
    scores, same = pairs
    genuine, impostors = scores[same].tolist(), scores[~same].tolist()
    expected = [sum(s > threshold for s in kind) / len(kind) for kind in (impostors, genuine)]
    assert rates_at(scores, same, threshold) == tuple(expected)


def test_published_scores_give_the_published_numbers():
    assert auc(PUBLISHED_SCORES, PUBLISHED_SAME) == pytest.approx(0.76)
    assert equal_error_rate(PUBLISHED_SCORES, PUBLISHED_SAME) == pytest.approx(0.4)
    loose, tight = tar_at_far(PUBLISHED_SCORES, PUBLISHED_SAME, [0.2, 1e-3])
    assert (loose.tar, loose.threshold) == (0.6, 0.5)
    assert (tight.tar, tight.threshold) == (0.6, 0.6)
    everything = torch.cat([PUBLISHED_SCORES, PUBLISHED_SCORES]), PUBLISHED_SAME.repeat(2)
    grid = torch.arange(-10000, 10001).double() / 10000
    found = fold_accuracy(*everything, torch.arange(20) // 10, thresholds=grid, strict=True)
    assert found.thresholds == pytest.approx((0.65, 0.65), abs=1e-12)
    assert found.value == pytest.approx(0.8)


def test_all_equal_scores_are_chance():
    scores, same = torch.ones(30), torch.arange(30) < 10
    assert auc(scores, same) == 0.5
    assert equal_error_rate(scores, same) == 0.5
    assert tar_at_far(scores, same, 0.5) == [OperatingPoint(0.5, 1.0, 0.0, 0.0)]
    assert roc(scores, same).far.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("function", [roc, det, auc, equal_error_rate, lambda s, g: tar_at_far(s, g, 0.1)])
@pytest.mark.parametrize(
    ("scores", "same", "message"),
    [
        (torch.zeros(3), torch.ones(3, dtype=torch.bool), "needs pairs of both kinds, got 3 same and 0 different"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.bool), "needs pairs of both kinds, got 0 same and 3 different"),
        (torch.zeros(0), torch.zeros(0, dtype=torch.bool), "needs pairs of both kinds"),
        (torch.tensor([0.0, math.nan]), torch.tensor([True, False]), "scores must not contain NaN"),
        (torch.zeros(3), torch.tensor([True, False]), "equally long vectors"),
        (torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.bool), "equally long vectors"),
        (torch.zeros(2), torch.tensor([0, 2]), "same must be booleans, or numbers 0 and 1"),
    ],
)
def test_scores_that_cannot_be_judged_are_refused(function, scores, same, message):
    with pytest.raises(ArgumentError, match=message):
        function(scores, same)


def test_integer_labels_half_scores_and_strided_input_mean_the_same():
    scores, same = scored(levels=8)
    wide = torch.stack([scores, scores], 1)[:, 0]
    assert auc(wide, same.long()) == auc(scores, same) == auc(scores.half(), same) == auc((scores * 8).long(), same)


# -------------------------------------------------------------------------------------------------- TAR at FAR


@given(few_pairs(), st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.29, 1 / 3, 0.5, 0.9, 1.0]), min_size=1, max_size=4))
def test_tar_at_far_is_the_order_statistic(pairs, fars):
    found = tar_at_far(*pairs, fars)
    for far, point in zip(fars, found, strict=True):
        assert (point.threshold, point.far, point.tar) == plain_tar(*pairs, far)
        assert point.far <= far
    ordered = sorted(found, key=lambda point: point.target_far)
    assert all(a.tar <= b.tar for a, b in itertools.pairwise(ordered))


@pytest.mark.parametrize(("far", "impostors"), [(0.29, 100), (0.07, 100), (0.57, 100), (0.1, 30), (1e-3, 7000)])
def test_a_rate_that_rounds_down_still_allows_its_whole_number(far, impostors):
    scores = torch.cat([torch.arange(impostors).double(), torch.tensor([0.5]).double()])
    same = torch.arange(impostors + 1) == impostors
    (point,) = tar_at_far(scores, same, far)
    assert point.far == round(far * impostors) / impostors


def test_tar_at_far_is_on_scikit_learns_curve():
    scores, same = scored(5000, 0.2)
    far, tar, _ = roc_curve(same, scores, drop_intermediate=False)
    for point in tar_at_far(scores, same, [0.001, 0.01, 0.1, 0.5]):
        assert point.tar == pytest.approx(tar[far <= point.target_far].max(), abs=1e-15)
        assert rates_at(scores, same, point.threshold) == (point.far, point.tar)


@pytest.mark.filterwarnings("error")
def test_few_impostors_for_a_rate_are_warned_of():
    scores, same = scored(200, 0.5)
    with pytest.warns(UserWarning, match=r"a FAR of 0.001 is less than 10 of \d+ impostor pairs"):
        tar_at_far(scores, same, [0.001, 0.5])
    tar_at_far(scores, same, 0.5)


@pytest.mark.parametrize("fars", [-0.1, 1.1, math.nan, [0.1, 2.0], []])
def test_rates_outside_0_and_1_are_refused(fars):
    with pytest.raises(ArgumentError, match="fars must"):
        tar_at_far(*scored(), fars)


@pytest.mark.slow
def test_tar_at_far_is_20_times_faster_than_a_whole_curve():
    generator = torch.Generator().manual_seed(0)
    same = torch.rand(2_000_000, generator=generator) < 0.01
    scores = torch.randn(2_000_000, generator=generator) + 3 * same

    def seconds(function, times):
        took = []
        for _ in range(times):
            start = time.perf_counter()
            result = function()
            took.append(time.perf_counter() - start)
        return min(took), result

    ours, (point,) = seconds(lambda: tar_at_far(scores, same, 1e-4), 5)
    theirs, (far, tar, _) = seconds(lambda: roc_curve(same.numpy(), scores.numpy(), drop_intermediate=False), 2)
    assert point.tar == tar[far <= 1e-4].max()
    assert theirs > 20 * ours


# ------------------------------------------------------------------------------------------------------- folds


def plain_folds(scores, same, folds, thresholds, ties: str, strict: bool) -> tuple[list[float], list[float]]:
    """Every threshold on every fold, one after the other."""
    chosen, accuracies = [], []
    for fold in range(int(folds.max()) + 1):
        row = (scores if scores.dim() == 1 else scores[fold]).tolist()

        def right(threshold, part, row=row):
            total = 0
            for index in part:
                if same[index]:
                    total += row[index] > threshold
                else:
                    total += row[index] < threshold if strict else row[index] <= threshold
            return total

        train = [i for i in range(len(row)) if folds[i] != fold]
        test = [i for i in range(len(row)) if folds[i] == fold]
        counts = [right(t, train) for t in thresholds]
        best = [t for t, count in zip(thresholds, counts, strict=True) if count == max(counts)]
        chosen.append({"mean": sum(best) / len(best), "first": best[0], "last": best[-1]}[ties])
        accuracies.append(right(chosen[-1], test) / len(test))
    return chosen, accuracies


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("ties", ["mean", "first", "last"])
@pytest.mark.parametrize("levels", [None, 4])
def test_fold_accuracy_is_that_of_plain_loops(levels, ties, strict):
    scores, same = scored(60, 0.5, levels, seed=3)
    folds = torch.randint(4, (60,), generator=torch.Generator().manual_seed(1))
    grid = torch.linspace(2, -2, 33, dtype=torch.float64)
    found = fold_accuracy(scores, same, folds, thresholds=grid, ties=ties, strict=strict)
    chosen, accuracies = plain_folds(scores, same, folds, grid.tolist(), ties, strict)
    assert found.thresholds == pytest.approx(chosen, abs=1e-12)
    assert found.folds == pytest.approx(accuracies, abs=1e-12)
    assert found.value == pytest.approx(np.mean(accuracies))
    assert found.standard_error == pytest.approx(stats.sem(accuracies))
    low, high = stats.t.interval(0.95, 3, np.mean(accuracies), stats.sem(accuracies))
    assert found.interval == pytest.approx((max(low, 0), min(high, 1)), abs=1e-3)


def test_scores_may_differ_from_fold_to_fold():
    one, same = scored(60, 0.5, seed=3)
    scores = torch.stack([one, one + 0.7, one * 2])
    folds = torch.arange(60) % 3
    grid = torch.linspace(-2, 2, 41, dtype=torch.float64)
    found = fold_accuracy(scores, same, folds, thresholds=grid)
    chosen, accuracies = plain_folds(scores, same, folds, grid.tolist(), "mean", False)
    assert found.thresholds == pytest.approx(chosen, abs=1e-12)
    assert found.folds == pytest.approx(accuracies, abs=1e-12)
    with pytest.raises(ArgumentError, match="scores must have a row for each of 3 folds, got 2"):
        fold_accuracy(scores[:2], same, folds)


@given(few_pairs(least=12, most=24))
def test_thresholds_between_scores_are_the_best_there_are(pairs):
    scores, same = pairs[0].double().nan_to_num(posinf=2.0, neginf=-2.0), pairs[1].clone()
    same[:6], same[6:12] = True, False
    folds = torch.arange(len(same)) % 3
    found = fold_accuracy(scores, same, folds, ties="first")
    for fold, threshold in enumerate(found.thresholds):
        train = folds != fold
        s, g = scores[train].numpy(), same[train].numpy()
        best = max(((s >= t) == g).sum() for t in [*s, math.inf])
        assert ((s > threshold) == g).sum() == best
        assert threshold not in s


def test_neighbouring_numbers_can_be_told_apart():
    low = 1.0
    high = np.nextafter(low, 2.0)
    scores = torch.tensor([low, high] * 4, dtype=torch.float64)
    found = fold_accuracy(scores, torch.tensor([0, 1] * 4), torch.arange(8) // 4)
    assert found.value == 1.0
    above = np.nextafter(high, 2.0)
    found = fold_accuracy(
        torch.tensor([high, above] * 4, dtype=torch.float64), torch.tensor([0, 1] * 4), torch.arange(8) // 4
    )
    assert found.value == 1.0


def test_a_threshold_never_sees_its_own_fold():
    scores, same = scored(90, 0.5, seed=5)
    folds = torch.arange(90) % 3
    before = fold_accuracy(scores, same, folds)
    changed = torch.where(folds == 1, -scores * 3, scores)
    after = fold_accuracy(changed, same, folds)
    assert after.thresholds[1] == before.thresholds[1]
    assert after.thresholds[0] != before.thresholds[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"folds": torch.tensor([0, 0, 2, 2])}, "folds must not be empty, got none for fold 1"),
        ({"folds": torch.zeros(4, dtype=torch.int64)}, "folds must be at least two"),
        ({"folds": torch.tensor([0, 0, -1, -1])}, "folds must be numbers from 0"),
        ({"folds": torch.tensor([0.0, 0.0, 1.0, 1.0])}, "folds must be int64"),
        ({"same": torch.tensor([1, 0, 0, 0])}, "same needs same-class pairs in the training folds"),
        ({"same": torch.tensor([1, 1, 1, 0])}, "same needs different-class pairs in the training folds"),
        ({"scores": torch.tensor([0.0, math.nan, 1.0, 2.0])}, "scores must be finite"),
        ({"scores": torch.tensor([0.0, math.inf, 1.0, 2.0])}, "scores must be finite"),
        ({"scores": torch.zeros(3)}, "equally long"),
        ({"scores": torch.zeros(0, 4)}, "must have shape"),
        ({"thresholds": torch.zeros(0)}, "thresholds must be a vector"),
        ({"thresholds": torch.tensor([math.nan])}, "thresholds must be a vector of finite numbers"),
        ({"ties": "median"}, "ties must be one of"),
        ({"level": 1.0}, "level must be between 0 and 1"),
    ],
)
def test_folds_that_cannot_be_judged_are_refused(change, message):
    good = {"scores": torch.arange(4.0), "same": torch.tensor([1, 0, 1, 0]), "folds": torch.tensor([0, 0, 1, 1])}
    fold_accuracy(**good)
    with pytest.raises(ArgumentError, match=message):
        fold_accuracy(**(good | change))


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 30])
def test_student_quantile(freedom):
    assert student_quantile(0.95, freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-12)
    assert student_quantile(0.9, freedom) == pytest.approx(stats.t.ppf(0.95, freedom), rel=1e-12)


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (3, 10), (10, 10), (5950, 6000)])
def test_wilson_interval(successes, trials):
    expected = stats.binomtest(successes, trials).proportion_ci(0.9, method="wilson")
    assert wilson_interval(successes, trials, 0.9) == pytest.approx(tuple(expected), abs=1e-12)


# -------------------------------------------------------------------------------------------------- LFW and YTF

LEFT = torch.tensor(
    [[2.0, 1.0], [1.0, 0.2], [0.3, 1.0], [-1.0, 0.5], [0.9, -0.4], [1.2, 0.1], [0.1, 2.0], [-0.5, -1.0]]
).double()
RIGHT = torch.tensor(
    [[1.9, 1.1], [0.2, 1.0], [0.4, 1.2], [0.6, 0.9], [1.0, -0.2], [-0.3, 1.0], [0.2, 1.7], [0.8, 0.3]]
).double()
SAME = torch.tensor([1, 0] * 4)
FOLDS = torch.arange(8) // 4


def test_published_pairs_give_the_published_accuracy():
    centred = lfw10(LEFT, RIGHT, SAME, FOLDS)
    assert centred.thresholds == pytest.approx((0.3789, 0.81975), abs=1e-9)
    assert centred.value == 1.0
    plain = lfw10(LEFT, RIGHT, SAME, FOLDS, centre=False)
    assert plain.thresholds == pytest.approx((0.38445, 0.6914), abs=1e-9)
    assert plain.value == 0.875
    assert "variant sphereface" in str(plain)
    assert "not centred" in str(plain)


def face_pairs(pairs: int = 60, dimension: int = 6):
    """Overlapping pairs of noisy features in 5 folds, and their mirror images."""
    generator = torch.Generator().manual_seed(7)
    draw = lambda: torch.randn(pairs, dimension, generator=generator, dtype=torch.float64)  # noqa: E731
    same = torch.arange(pairs) % 2 == 0
    base = draw()
    left, right = base + draw() + 2, torch.where(same.unsqueeze(1), base, draw()) + draw() + 2
    return left, right, same, torch.arange(pairs) * 5 // pairs, (left + 0.3 * draw(), right + 0.3 * draw())


@pytest.mark.parametrize("variant", ["sphereface", "clcarwin", "insightface", "opensphere"])
def test_variants_are_those_of_plain_code(variant):
    left, right, same, folds, mirrored = face_pairs()
    found = lfw10(left, right, same, folds, mirrored=mirrored, variant=variant)
    a, b, ma, mb, is_same, fold = (x.numpy() for x in (left, right, *mirrored, same, folds))

    def unit(x):
        return x / np.linalg.norm(x, axis=1, keepdims=True)

    accuracies = []
    for test in range(5):
        train = fold != test
        if variant == "sphereface":
            x, y = np.hstack([a, ma]), np.hstack([b, mb])
            mean = np.vstack([x[train], y[train]]).mean(0)
            scores = (unit(x - mean) * unit(y - mean)).sum(1)
            grid = np.arange(-10000, 10001) / 10000
            right_answers = [((scores > t) & is_same) | ((scores < t) & ~is_same) for t in grid]
        elif variant == "clcarwin":
            scores = (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1) + 1e-5)
            grid = np.arange(-1.0, 1.0, 0.005)
            right_answers = [(scores > t) == is_same for t in grid]
        elif variant == "insightface":
            distances = ((unit(a + ma) - unit(b + mb)) ** 2).sum(1)
            grid = np.arange(0, 4, 0.01)
            right_answers = [(distances < t) == is_same for t in grid]
        else:
            scores = (unit((a + ma) / 2) * unit((b + mb) / 2)).sum(1)
            best = max(((scores >= t) == is_same).mean() for t in [*scores, math.inf])
            assert found.value == pytest.approx(best)
            assert found.interval == wilson_interval(round(best * 60), 60)
            assert "none was held out" in found.words
            return
        counts = np.array([answers[train].sum() for answers in right_answers])
        best = np.flatnonzero(counts == counts.max())
        threshold = {"sphereface": grid[best].mean(), "clcarwin": grid[best[-1]], "insightface": grid[best[0]]}[variant]
        if variant == "sphereface":
            answers = ((scores > threshold) & is_same) | ((scores < threshold) & ~is_same)
        else:
            answers = ((scores > threshold) if variant == "clcarwin" else (distances < threshold)) == is_same
        accuracies.append(answers[~train].mean())
        sign = -1 if variant == "insightface" else 1
        assert found.thresholds[test] == pytest.approx(sign * threshold, abs=1e-9)
    assert found.folds == pytest.approx(accuracies)
    assert 0.55 < found.value < 0.99


def test_accuracy_does_not_change_with_a_rotation_or_lengths():
    left, right, same, folds, _ = face_pairs()
    turn = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    assert lfw10(left @ turn, right @ turn, same, folds).folds == lfw10(left, right, same, folds).folds
    lengths = torch.rand(60, 1).double() + 0.1
    plain = lfw10(left, right, same, folds, centre=False)
    assert lfw10(left * lengths, right / lengths, same, folds, centre=False).folds == plain.folds


def test_a_distance_on_the_threshold_means_different():
    left = torch.tensor([[1.0, 0.0]] * 4)
    right = torch.tensor([[0.0025, 1.0], [0.0, 1.0]] * 2)  # squared distances 1.995 and 2
    found = lfw10(left, right, torch.tensor([1, 0, 1, 0]), torch.tensor([0, 0, 1, 1]), variant="insightface")
    assert (found.thresholds, found.value) == ((-2.0, -2.0), 1.0)


def test_centring_keeps_its_digits_far_from_the_origin():
    left, right, same, folds, _ = face_pairs()
    near, far = lfw10(left, right, same, folds), lfw10(left + 1e7, right + 1e7, same, folds)
    assert far.folds == near.folds
    assert far.thresholds == pytest.approx(near.thresholds, abs=1e-4)


def test_zero_features_are_scored():
    left, right, same, folds, _ = face_pairs()
    left[3], right[3], left[4] = 0, 0, 0
    for variant in ("sphereface", "clcarwin", "insightface", "opensphere"):
        assert 0 < lfw10(left.half(), right.half(), same, folds, variant=variant).value <= 1


def test_lfw_arguments_are_checked():
    left, right, same, folds, _ = face_pairs()
    with pytest.raises(ArgumentError, match="variant must be one of"):
        lfw10(left, right, same, folds, variant="best")
    with pytest.raises(ArgumentError, match="centre is of variant 'sphereface'"):
        lfw10(left, right, same, folds, variant="clcarwin", centre=True)
    with pytest.raises(ArgumentError, match="left and right must both be"):
        lfw10(left, right[:5], same, folds)
    with pytest.raises(ArgumentError, match="scores must be finite"):
        lfw10(left * math.nan, right, same, folds)
    assert "features as given" in lfw10(left, right, same, folds).words


FRAMES = torch.tensor(
    [[1, 2, -1, 0.5], [-0.5, 1, 1.5, -2], [0.3, -1.2, 0.8, 1], [0.2, -0.9, 0.4, 1.1]], dtype=torch.float64
)


def test_published_videos_give_the_published_scores():
    pair = torch.tensor([0]), torch.tensor([1])
    videos = torch.tensor([0, 0, 1, 1])
    assert float(video_similarity(FRAMES, videos, *pair)) == pytest.approx(-0.773888084528, abs=1e-12)
    assert float(video_similarity(FRAMES, videos, *pair, "mean_score")) == pytest.approx(-0.501646228834, abs=1e-12)


def video_pairs():
    generator = torch.Generator().manual_seed(2)
    frames = torch.randn(90, 4, generator=generator, dtype=torch.float64) + 1
    videos = torch.arange(90) % 15
    first, second = torch.triu_indices(15, 15, 1)
    same = first % 3 == second % 3
    frames += 1.5 * torch.randn(3, 4, generator=generator, dtype=torch.float64)[videos % 3]
    return frames, videos, first, second, same, torch.arange(105) % 5


@pytest.mark.parametrize("how", ["mean_feature", "mean_score"])
@pytest.mark.parametrize("centre", [None, True, False])
def test_video_accuracy_is_that_of_plain_code(how, centre):
    frames, videos, first, second, same, folds = video_pairs()
    found = ytf10(frames, videos, first, second, same, folds, how=how, centre=centre)
    sets = [frames[videos == v].numpy() for v in range(15)]
    rows = []
    for fold in range(5):
        train = [i for i in range(105) if folds[i] != fold]
        used = [sets[int(side[i])] for i in train for side in (first, second)]
        mean = np.concatenate(used).mean(0)
        if not (how == "mean_score" if centre is None else centre):
            mean = 0 * mean
        row = []
        for i, j in zip(first.tolist(), second.tolist(), strict=True):
            x, y = sets[i] - mean, sets[j] - mean
            if how == "mean_feature":
                x, y = x.mean(0, keepdims=True), y.mean(0, keepdims=True)
            x, y = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (x, y))
            row.append(np.mean([a @ b for a in x for b in y]))
        rows.append(row)
    grid = torch.arange(-10000, 10001).double() / 10000
    expected = fold_accuracy(torch.tensor(rows), same, folds, thresholds=grid, strict=True)
    assert found.folds == expected.folds
    assert found.thresholds == pytest.approx(expected.thresholds, abs=1e-9)


def test_few_frames_of_a_video():
    chosen = _few_frames(torch.tensor([2, 0, 2, 2, 0, 5, 2]), 2, seed=0)
    videos = torch.tensor([2, 0, 2, 2, 0, 5, 2])[chosen]
    assert videos.bincount().tolist() == [2, 0, 2, 0, 0, 1]
    assert len(chosen.unique()) == 5
    drawn = {tuple(sorted(_few_frames(torch.zeros(4).long(), 1, seed).tolist())) for seed in range(40)}
    assert drawn == {(0,), (1,), (2,), (3,)}
    data = video_pairs()
    assert ytf10(*data, most_frames=6).folds == ytf10(*data).folds
    assert "at most 1 random frames" in ytf10(*data, most_frames=1).words


def test_videos_without_frames_are_refused():
    frames, videos, first, second, same, folds = video_pairs()
    with pytest.raises(ArgumentError, match="at least one frame for every video of a pair"):
        ytf10(frames[videos != 3], videos[videos != 3], first, second, same, folds)
    with pytest.raises(ArgumentError, match="videos must be numbers from 0"):
        video_similarity(frames, videos - 1, first, second)
    with pytest.raises(ArgumentError, match="frames must be"):
        video_similarity(frames, videos[:4], first, second)


# --------------------------------------------------------------------------------------------------- intervals


def identity_pairs(people: int = 12, images: int = 3, seed: int = 0):
    """All pairs of images of people; people differ in how well they are recognised."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(people).repeat_interleave(images)
    centres = torch.randn(people, 8, generator=generator, dtype=torch.float64)
    noise = torch.randn(len(labels), 8, generator=generator, dtype=torch.float64)
    features = centres[labels] + noise * (0.3 + torch.rand(people, generator=generator))[labels].unsqueeze(1)
    scores, same = pair_scores(features, labels)
    first, second = torch.triu_indices(len(labels), len(labels), 1)
    return scores, same, (labels[first], labels[second])


@pytest.mark.parametrize("levels", [4, 1000])
@pytest.mark.parametrize("corners", [False, True])
def test_a_draw_of_identities_is_a_repetition_of_their_pairs(monkeypatch, corners, levels):
    scores, same, (first, second) = identity_pairs(5)
    scores = (scores * levels).round() / levels
    monkeypatch.setattr(verification, "BOOTSTRAP_ELEMENTS", 1)  # one draw at a time
    found = list(verification._bootstrap(scores, same, (first + 100, second + 100), 6, 3, corners))
    generator = torch.Generator().manual_seed(3)
    for draws in found:
        counts = torch.randint(5, (1, 5), generator=generator)[0].bincount(minlength=5)
        repeats = torch.where(same, counts[first], counts[first] * counts[second])
        repeated, kind = scores.repeat_interleave(repeats), same.repeat_interleave(repeats)
        _, false_accepts, true_accepts = operating_points(repeated, kind)
        assert float(verification._area(draws.false_accepts, draws.true_accepts)) == pytest.approx(
            float(verification._area(false_accepts, true_accepts)), abs=1e-13
        )
        assert float(verification._draw_eer(draws)) == pytest.approx(equal_error_rate(repeated, kind), abs=1e-13)
        impostors = int(false_accepts[-1])
        for far in (0.0, 0.05, 0.3, *(k / impostors for k in range(1, impostors, 3))):
            assert float(verification._draw_tar(draws, far)) == tar_at_far(repeated, kind, far)[0].tar


@given(few_pairs())
def test_corners_are_the_points_between_runs_of_one_kind(pairs):
    scores, same = pairs
    thresholds = next(verification._bootstrap(scores, same, None, 2, 0, corners=True)).thresholds.tolist()
    levels = sorted(set(scores.tolist()), reverse=True)
    kinds = [{bool(g) for s, g in zip(scores.tolist(), same.tolist(), strict=True) if s == level} for level in levels]
    ends = [levels[i] for i in range(len(levels)) if i + 1 == len(levels) or len(kinds[i] | kinds[i + 1]) == 2]
    assert thresholds == [math.inf, *ends]


def test_intervals_do_not_depend_on_how_many_draws_are_made_at_a_time(monkeypatch):
    scores, same, identities = identity_pairs()
    whole = verification_summary(scores, same, identities=identities, samples=50, fars=[0.1])
    monkeypatch.setattr(verification, "BOOTSTRAP_ELEMENTS", 2000)
    assert verification_summary(scores, same, identities=identities, samples=50, fars=[0.1]) == whole
    other = verification_summary(scores, same, identities=identities, samples=50, fars=[0.1], seed=1)
    assert other["auc"].value == whole["auc"].value
    assert other["auc"].interval != whole["auc"].interval


def test_a_summary_has_the_numbers_their_intervals_and_words():
    scores, same, identities = identity_pairs()
    found = verification_summary(scores, same, identities=identities, samples=200, fars=[0.02, 0.1])
    assert list(found) == ["auc", "eer", "tar@far=0.02", "tar@far=0.1"]
    assert found["auc"].value == auc(scores, same)
    assert found["eer"].value == equal_error_rate(scores, same)
    (point,) = tar_at_far(scores, same, 0.1)
    assert (found["tar@far=0.1"].value, found["tar@far=0.1"].thresholds) == (point.tar, (point.threshold,))
    for result in found.values():
        assert result.interval[0] < result.value < result.interval[1]
        assert "bootstrap draws of 12 identities" in str(result)
        assert "36 genuine and 594 impostor pairs" in str(result)
    narrow = verification_summary(scores, same, samples=200, fars=[])
    assert "bootstrap draws of pairs, too narrow" in narrow["auc"].words
    width = {
        key: result["auc"].interval[1] - result["auc"].interval[0] for key, result in (("i", found), ("p", narrow))
    }
    assert width["i"] > width["p"]


@pytest.mark.slow
def test_intervals_over_identities_cover_the_truth():
    truth = np.mean([auc(*identity_pairs(30, 3, seed)[:2]) for seed in range(1000, 1300)])
    hits, narrow = 0, 0
    for seed in range(60):
        scores, same, identities = identity_pairs(30, 3, seed)
        low, high = verification_summary(scores, same, identities=identities, samples=200, fars=[])["auc"].interval
        hits += low <= truth <= high
        low, high = verification_summary(scores, same, samples=200, fars=[])["auc"].interval
        narrow += low <= truth <= high
    assert hits >= 51
    assert narrow < hits


def test_identities_are_checked():
    scores, same, (first, second) = identity_pairs()
    with pytest.raises(ArgumentError, match="identities must be two vectors of 630"):
        verification_summary(scores, same, identities=(first[:4], second))
    with pytest.raises(ArgumentError, match="identities must be equal for the pairs marked as same"):
        verification_summary(scores, ~same, identities=(first, second))
    with pytest.raises(ArgumentError, match="samples must be at least 2"):
        verification_summary(scores, same, samples=1)
    with pytest.raises(ArgumentError, match="level must be between 0 and 1, got 95"):
        verification_summary(scores, same, level=95)


# ------------------------------------------------------------------------------------------------- calibration


def test_calibration_finds_the_threshold_and_says_how_sure_it_is():
    scores, same, identities = identity_pairs(20)
    found = calibrate(scores, same, 0.02, identities=identities, samples=300)
    (point,) = tar_at_far(scores, same, 0.02)
    assert (found.threshold, found.far, found.tar) == (point.threshold, point.far, point.tar)
    assert found.interval[0] <= found.threshold <= found.interval[1]
    assert found.interval[0] < found.interval[1]
    assert found.far_interval[0] < found.far < found.far_interval[1]
    assert found.tar_interval[0] < found.tar < found.tar_interval[1]
    assert found.accept(scores).tolist() == (scores > point.threshold).tolist()
    assert "FAR of at most 0.02" in str(found)
    assert "bootstrap draws of 20 identities" in str(found)


def test_calibration_draws_the_order_statistic(monkeypatch):
    scores, same, (first, second) = identity_pairs(6)
    found = calibrate(scores, same, 0.1, identities=(first, second), samples=40, level=0.5)
    generator = torch.Generator().manual_seed(0)
    thresholds, fars, tars = [], [], []
    for drawn in torch.randint(6, (40, 6), generator=generator):
        counts = drawn.bincount(minlength=6)
        repeats = torch.where(same, counts[first], counts[first] * counts[second])
        repeated, kind = scores.repeat_interleave(repeats), same.repeat_interleave(repeats)
        thresholds.append(plain_tar(repeated, kind, 0.1)[0])
        far, tar = rates_at(repeated, kind, found.threshold)
        fars.append(far)
        tars.append(tar)
    assert found.interval == (sorted(thresholds)[9], sorted(thresholds)[30])
    assert found.tar_interval == pytest.approx((sorted(tars)[9], sorted(tars)[30]))
    least, most = wilson_interval(round(found.far * found.impostors), found.impostors, 0.5)
    assert found.far_interval == pytest.approx((min(sorted(fars)[9], least), max(sorted(fars)[30], most)))


def test_no_false_accepts_do_not_mean_that_there_are_none():
    scores, same = scored(300, 0.5)
    found = calibrate(scores, same, 1e-6, samples=20)
    assert found.far == 0
    assert found.far_interval[1] == pytest.approx(wilson_interval(0, found.impostors)[1])


def test_calibration_survives_json():
    found = calibrate(*scored(), 0.1, samples=20, score="angle")
    again = Calibration.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False)))
    assert again == found
    with pytest.raises(ArgumentError, match=r"wrong or missing \['far', 'fare'\]"):
        Calibration.from_dict({"fare" if key == "far" else key: value for key, value in found.to_dict().items()})


def test_a_threshold_is_not_rounded_to_the_scores_type():
    third = 1 / 3
    scores = torch.tensor([third], dtype=torch.float32)  # above the third in float64
    found = calibrate(torch.tensor([third, 0.9], dtype=torch.float64), torch.tensor([0, 1]), 0.5, samples=10)
    assert found.threshold == third
    assert bool(found.accept(scores)) is (float(scores) > third) is True


@pytest.mark.parametrize("target", [0.0, 1.0, -1.0, math.nan])
def test_calibration_arguments_are_checked(target):
    with pytest.raises(ArgumentError, match="target_far must be"):
        calibrate(*scored(), target)
    with pytest.raises(ArgumentError, match="scores must be finite"):
        calibrate(torch.tensor([math.inf, 0.0]), torch.tensor([0, 1]), 0.1)


# --------------------------------------------------------------------------------------------------- streaming


def chunks(scores, same, size: int):
    return zip(scores.split(size), same.split(size), strict=True)


@given(few_pairs(most=60), st.integers(1, 5), st.integers(1, 40), st.integers(1, 65), st.integers(1, 4))
def test_chunks_give_the_dense_numbers(pairs, few, capacity, size, processes):
    scores = pairs[0].nan_to_num(posinf=2.0, neginf=-2.0)
    same = pairs[1] & (pairs[1].flip(0).cumsum(0).flip(0) <= few)  # most scores are of impostors
    genuine, impostors = int(same.sum()), int((~same).sum())
    capacity = max(capacity, genuine)

    def one_pass(make):
        workers = [make() for _ in range(processes)]
        for index, part in enumerate(chunks(scores, same, size)):
            workers[index % processes].update(*part)
        for other in workers[1:]:
            workers[0].merge(pickle.loads(pickle.dumps(other)))
        assert all(sum(map(len, worker._kept)) <= 2 * capacity for worker in workers)
        return workers[0]

    first = one_pass(lambda: PairScores(capacity))
    assert (first.genuine, first.impostors) == (genuine, impostors)
    fars = [k / impostors for k in range(min(capacity, impostors))]
    assert first.tar_at_far(fars) == tar_at_far(scores, same, fars)
    for far, dense in zip(rates := torch.linspace(0, 1, 9).tolist(), tar_at_far(scores, same, rates), strict=True):
        try:
            assert first.tar_at_far(far) == [dense]
        except ArgumentError:  # refused, but only where scores were dropped
            assert sum(map(len, first._kept)) < impostors
    second = one_pass(first.second_pass)
    assert second.tar_at_far(fars) == tar_at_far(scores, same, fars)
    assert second.auc() == auc(scores, same)
    assert second.equal_error_rate() == pytest.approx(equal_error_rate(scores, same), abs=1e-12)
    grid = torch.linspace(0, 1, 17, dtype=torch.float64)
    torch.testing.assert_close(second.roc().interpolate(grid), roc(scores, same).interpolate(grid), rtol=0, atol=1e-12)
    for found, dense in zip(second.tar_at_far([0.3, 0.7, 1.0]), tar_at_far(scores, same, [0.3, 0.7, 1.0]), strict=True):
        assert found.tar == dense.tar
        assert found.far <= found.target_far
        assert rates_at(scores, same, found.threshold) == (found.far, found.tar)


def test_all_scores_that_fit_give_everything_in_one_pass():
    scores, same = scored(500, 0.2, levels=20)
    found = PairScores(capacity=500)
    for part in chunks(scores, same, 37):
        found.update(*part)
    assert found.auc() == auc(scores, same)
    assert found.equal_error_rate() == equal_error_rate(scores, same)
    for ours, theirs in zip(found.roc(), roc(scores, same), strict=True):
        assert torch.equal(ours, theirs)


def test_what_is_not_kept_is_refused_and_not_guessed():
    scores, same = scored(1000, 0.05, seed=4)
    found = PairScores(capacity=60)
    for part in chunks(scores, same, 50):
        found.update(*part)
    impostors = int((~same).sum())
    assert found.tar_at_far(50 / impostors) == tar_at_far(scores, same, 50 / impostors)
    with pytest.raises(ArgumentError, match=rf"capacity is too small: .* capacity of {impostors}, got 60, or a second"):
        found.auc()
    with pytest.raises(ArgumentError, match=r"capacity is too small: .* got 60"):
        found.tar_at_far(0.5)
    with pytest.raises(ArgumentError, match="capacity must hold every genuine score, got 60"):
        found.update(torch.zeros(60).double(), torch.ones(60, dtype=torch.bool))


def test_scores_below_those_that_another_process_dropped_do_not_count():
    low, high = PairScores(capacity=2), PairScores(capacity=2)
    low.update(torch.tensor([0.5, 0.0, 0.1]), torch.tensor([True, False, False]))
    high.update(torch.arange(2, 10) / 10, torch.zeros(8, dtype=torch.bool))
    low.merge(high)
    assert low.tar_at_far(0.1)[0].threshold == pytest.approx(0.8)
    with pytest.raises(ArgumentError, match=r"this needs a capacity of 3, got 2"):
        low.tar_at_far(0.2)


def test_a_second_pass_must_see_the_same_pairs():
    scores, same = scored(200, 0.1, seed=4)
    first = PairScores(capacity=30)
    first.update(scores, same)
    second = first.second_pass()
    second.update(scores[:100], same[:100])
    with pytest.raises(ArgumentError, match="second_pass must see all"):
        second.auc()
    with pytest.raises(ArgumentError, match="second_pass must follow a first pass"):
        second.update(scores[100:], same[100:])
        second.second_pass()
    assert second.auc() == auc(scores, same)
    without_genuine = first.second_pass()
    without_genuine.update(scores[~same][:5], same[~same][:5])
    with pytest.raises(ArgumentError, match=r"second_pass must see all \d+ impostor .* got 5 and 0"):
        without_genuine.auc()
    without_genuine.update(scores[~same][5:], same[~same][5:])
    assert without_genuine.auc() == auc(scores, same)


def test_accumulators_that_do_not_fit_are_refused():
    scores, same = scored(50)
    first = PairScores(capacity=50)
    first.update(scores, same)
    with pytest.raises(ArgumentError, match="other must have the same capacity and be of the same pass"):
        first.merge(PairScores(capacity=40))
    with pytest.raises(ArgumentError, match="other must have the same capacity and be of the same pass"):
        first.merge(first.second_pass())
    with pytest.raises(ArgumentError, match=r"scores must all have one type, got torch.float32 after torch.float64"):
        first.update(scores.float(), same)
    with pytest.raises(ArgumentError, match="scores must not contain NaN"):
        first.update(scores * math.nan, same)
    with pytest.raises(ArgumentError, match="scores must be finite"):
        first.update(scores - math.inf, same)
    with pytest.raises(ArgumentError, match="needs pairs of both kinds"):
        PairScores().auc()
    with pytest.raises(ArgumentError, match="capacity must be at least 1"):
        PairScores(0)
    assert first.merge(PairScores(capacity=50)).auc() == auc(scores, same)


@pytest.mark.gpu
def test_numbers_are_the_same_on_the_device():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    scores, same, (first, second) = identity_pairs()
    device = [x.cuda() for x in (scores, same, first, second)]
    assert auc(*device[:2]) == auc(scores, same)
    assert tar_at_far(*device[:2], [0.02, 0.5]) == tar_at_far(scores, same, [0.02, 0.5])
    folds = torch.arange(len(scores)) % 10
    assert fold_accuracy(*device[:2], folds).folds == fold_accuracy(scores, same, folds).folds
    ours = calibrate(*device[:2], 0.05, identities=(device[2], device[3]), samples=50)
    assert ours == calibrate(scores, same, 0.05, identities=(first, second), samples=50)
    found = PairScores(capacity=50)
    for part in chunks(*device[:2], 100):
        found.update(*part)
    assert found.tar_at_far(0.05) == tar_at_far(scores, same, 0.05)
    left, right, kind, fold, mirrored = face_pairs()
    on_device = lfw10(left.cuda(), right.cuda(), kind, fold, mirrored=(mirrored[0].cuda(), mirrored[1].cuda()))
    assert on_device.folds == lfw10(left, right, kind, fold, mirrored=mirrored).folds


@pytest.mark.parametrize("kind", ["random", "ties", "largest at the end", "mostly -inf"])
def test_the_largest_of_many_scores_are_found_by_blocks(kind):
    scores = torch.randn(20_011, generator=torch.Generator().manual_seed(0))
    if kind == "ties":
        scores = (4 * scores).round()
    elif kind == "largest at the end":
        scores[-7:] = 50 + torch.arange(7.0)  # behind the last whole block
    elif kind == "mostly -inf":
        scores[torch.randperm(len(scores), generator=torch.Generator().manual_seed(1))[:-3]] = -torch.inf
    for count in (1, 5, 19):
        assert len(scores) >= 16 * count * verification.BLOCK  # else the blocks are not looked at
        assert torch.equal(verification._largest(scores, count), scores.sort(descending=True).values[:count])
    same = torch.arange(len(scores)) % 2 == 0
    (point,) = tar_at_far(scores, same, 0.0015)
    impostors = scores[~same].sort(descending=True).values
    assert point.threshold == float(impostors[int(0.0015 * len(impostors))])
