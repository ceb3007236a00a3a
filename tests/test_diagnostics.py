"""Diagnostics against published numbers, one-pair-at-a-time versions and their symmetries."""

import itertools
import math
import warnings

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from hypersphere import diagnostics
from hypersphere.diagnostics import (
    angular_fisher_score,
    angular_visual_hardness,
    class_cosine_matrix,
    model_confidence,
    norm_count_correlation,
    pair_angles,
    quadrant_occupancy,
)
from hypersphere.errors import ArgumentError

X = torch.tensor([[1, 2, -1, 0.5], [-0.5, 1, 1.5, -2], [0.3, -1.2, 0.8, 1], [0.2, -0.9, 0.4, 1.1]], dtype=torch.float64)
W = torch.tensor(
    [[0.9, 1.1, -0.6, 0.2], [-1, 0.4, 0.7, -1.3], [0.5, -0.8, 1, 0.6], [-0.2, -1, -0.3, 0.8]], dtype=torch.float64
)
Y = torch.tensor([0, 1, 2, 0])
AVH = torch.tensor([0.0343592403977, 0.0669058038145, 0.06643982041, 0.3605577732], dtype=torch.float64)
CONFIDENCE = torch.tensor([0.986740566456, 0.989059769843, 0.673797239365, 0.0356730004008], dtype=torch.float64)
SEEDS = st.integers(0, 2**32 - 1)
LOW = [torch.bfloat16, torch.float16]


def cosine(a, b):
    """From lists of numbers; 0 where a vector is zero."""
    lengths = math.hypot(*a) * math.hypot(*b)
    return math.fsum(p * q for p, q in zip(a, b, strict=True)) / lengths if lengths else 0.0


def theta(a, b):
    return math.acos(max(-1.0, min(1.0, cosine(a, b))))


def mean_of(rows):
    return [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]


def plain_fisher(rows, labels):
    groups = {label: [x for x, y in zip(rows, labels, strict=True) if y == label] for label in set(labels)}
    means = {label: mean_of(group) for label, group in groups.items()}
    overall = mean_of(rows)
    within = math.fsum(1 - cosine(x, means[y]) for x, y in zip(rows, labels, strict=True))
    return within / math.fsum(len(group) * (1 - cosine(means[y], overall)) for y, group in groups.items())


def plain_class_cosines(rows, labels, classes):
    matrix = torch.full((classes, classes), math.nan, dtype=torch.float64)
    for a, b in itertools.product(range(classes), repeat=2):
        pairs = [
            cosine(rows[i], rows[j])
            for i, j in itertools.permutations(range(len(rows)), 2)
            if labels[i] == a and labels[j] == b
        ]
        if pairs:
            matrix[a, b] = math.fsum(pairs) / len(pairs)
    return matrix


def draw(seed, n=12, d=4, classes=3):
    """Features off the origin, centres and labels in which every class has two samples or more."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64) + 1
    w = torch.randn(classes, d, generator=generator, dtype=torch.float64)
    y = (torch.arange(n) % classes)[torch.randperm(n, generator=generator)]
    return x, w, y, generator


def rotation(seed, d=4):
    return torch.tensor(scipy.stats.ortho_group.rvs(d, random_state=seed))


def lengths(n, generator):
    return 10 ** torch.empty(n, 1, dtype=torch.float64).uniform_(-8, 8, generator=generator)


def close(actual, expected, tolerance=1e-8):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


# Angular visual hardness and confidence.


def test_published_hardness_and_confidence():
    close(angular_visual_hardness(X, W, Y), AVH, 1e-11)
    close(model_confidence(X @ W.mT, Y), CONFIDENCE, 1e-11)


@given(SEEDS, st.integers(1, 5), st.integers(2, 6))
def test_hardness_is_its_definition(seed, classes, d):
    x, w, y, _ = draw(seed, 7, d, classes)
    expected = [
        theta(a, w[label].tolist()) / math.fsum(theta(a, b) for b in w.tolist())
        for a, label in zip(x.tolist(), y.tolist(), strict=True)
    ]
    # Arccos keeps half of the digits near 0, also in the plain version.
    close(angular_visual_hardness(x, w, y), torch.tensor(expected, dtype=torch.float64), 1e-6)


@given(SEEDS)
def test_hardness_ignores_norms_rotation_and_the_order_of_classes(seed):
    x, w, y, generator = draw(seed)
    value = angular_visual_hardness(x, w, y)
    turn, order = rotation(seed), torch.randperm(3, generator=generator)
    close(angular_visual_hardness(x * lengths(12, generator), w * lengths(3, generator), y), value)
    close(angular_visual_hardness(x @ turn, w @ turn, y), value)
    close(angular_visual_hardness(x, w[order], order.argsort()[y]), value)
    assert ((value >= 0) & (value <= 1)).all()
    every = [angular_visual_hardness(x, w, torch.full((12,), label)) for label in range(3)]
    close(torch.stack(every).sum(0), torch.ones(12, dtype=torch.float64))


def test_small_own_angles_keep_their_digits_in_float32():
    w = torch.eye(3)
    x = torch.tensor([[1.0, 1e-5, 0.0]])
    expected = 1e-5 / (1e-5 + (math.pi / 2 - 1e-5) + math.pi / 2)
    assert angular_visual_hardness(x, w, torch.tensor([0])).item() == pytest.approx(expected, rel=1e-5)


def test_hardness_of_degenerate_samples():
    w = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]])
    x = torch.tensor([[3.0, 0.0], [-2.0, 0.0], [0.0, 0.0]])
    close(angular_visual_hardness(x, w, torch.zeros(3, dtype=torch.int64)), torch.tensor([0, 2 / 3, 1 / 3]), 1e-6)
    # A class vector of zero is at right angles; coinciding centres share equally.
    zero = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    close(angular_visual_hardness(torch.tensor([[0.0, 1.0]]), zero, torch.tensor([1])), torch.tensor([0.5]), 1e-6)
    one = torch.tensor([[4.0, 0.0]])
    close(angular_visual_hardness(one, one.expand(4, 2), torch.tensor([2])), torch.tensor([0.25]), 1e-6)
    close(angular_visual_hardness(one, one, torch.tensor([0])), torch.tensor([1.0]), 1e-6)
    nan = torch.tensor([[math.nan, 1.0]])
    assert angular_visual_hardness(nan, w, torch.tensor([0])).isnan().all()


@given(SEEDS, st.floats(0.01, 200))
def test_confidence_is_its_definition(seed, scale):
    x, w, y, generator = draw(seed)
    logits = scale * x @ w.mT
    value = model_confidence(logits, y)
    expected = [
        1 / math.fsum(math.exp(min(f - row[label], 700)) for f in row)
        for row, label in zip(logits.tolist(), y.tolist(), strict=True)
    ]
    close(value, torch.tensor(expected, dtype=torch.float64), 1e-9)
    order = torch.randperm(3, generator=generator)
    close(model_confidence(logits[:, order], order.argsort()[y]), value)
    close(model_confidence(logits + 1e3, y), value)


def test_confidence_of_extreme_logits():
    logits = torch.tensor([[1e4, -1e4], [-1e4, 1e4]])
    assert model_confidence(logits, torch.tensor([0, 0])).tolist() == [1, 0]


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_half_precision_is_computed_in_float32(dtype):
    x, w, logits = X.to(dtype), W.to(dtype), (X @ W.mT).to(dtype)
    y = torch.tensor([0, 1, 0, 0])
    counts = torch.tensor([1, 5, 9, 2])
    with torch.autocast("cpu", torch.bfloat16):
        pairs = [
            (angular_visual_hardness(x, w, y), angular_visual_hardness(x.double(), w.double(), y)),
            (model_confidence(logits, y), model_confidence(logits.double(), y)),
            (angular_fisher_score(x, y), angular_fisher_score(x.double(), y)),
            (angular_fisher_score(x, y, normalise=True), angular_fisher_score(x.double(), y, normalise=True)),
            (class_cosine_matrix(x, y), class_cosine_matrix(x.double(), y)),
            (norm_count_correlation(w, counts), norm_count_correlation(w.double(), counts)),
            *zip(pair_angles(x, y), pair_angles(x.double(), y), strict=True),
            *zip(quadrant_occupancy(x[:, :2]), quadrant_occupancy(x[:, :2].double()), strict=True),
        ]
    for low, high in pairs:
        assert low.dtype == torch.float32
        assert high.dtype == torch.float64
        close(low, high.float(), 2e-6)


def test_strided_input_and_gradients():
    x, w = X.mT.contiguous().mT, W.repeat_interleave(2, 1)[:, ::2]
    y = torch.stack([Y, Y], 1)[:, 0]
    assert not (x.is_contiguous() or w.is_contiguous() or y.is_contiguous())
    close(angular_visual_hardness(x, w, y), AVH, 1e-11)
    close(model_confidence((w @ x.mT).mT, y), CONFIDENCE, 1e-11)
    close(angular_fisher_score(x, y), angular_fisher_score(X, Y))
    close(class_cosine_matrix(x, y), class_cosine_matrix(X, Y))
    for strided, plain in zip(pair_angles(x, y), pair_angles(X, Y), strict=True):
        close(strided, plain)
    x = X.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: angular_visual_hardness(v, W, Y), (x,))
    assert torch.autograd.gradcheck(lambda v: angular_fisher_score(v, Y), (x,))


# Angular Fisher score.


def test_fisher_score_of_features_with_known_cosines():
    # Class means (1.5, 2) and (0, 5), mean (1, 3): both have the cosine 3 / sqrt(10) with it.
    x = torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 5.0]], dtype=torch.float64)
    y = torch.tensor([4, 4, 1])
    within = (1 - 0.6) + (1 - 0.8)
    assert angular_fisher_score(x, y).item() == pytest.approx(within / 3 / (1 - 3 / math.sqrt(10)), rel=1e-12)
    # Directions: means (0.5, 0.5) and (0, 1), mean (1, 2) / 3.
    half = math.sqrt(0.5)
    between = 2 * (1 - 3 / math.sqrt(10)) + 1 - 2 / math.sqrt(5)
    assert angular_fisher_score(x, y, normalise=True).item() == pytest.approx(2 * (1 - half) / between, rel=1e-12)


@given(SEEDS, st.integers(2, 4))
def test_fisher_score_is_its_definition(seed, classes):
    x, _, y, _ = draw(seed, classes=classes)
    assert angular_fisher_score(x, y).item() == pytest.approx(plain_fisher(x.tolist(), y.tolist()), rel=1e-9)
    units = x / torch.linalg.vector_norm(x, dim=1, keepdim=True)
    expected = plain_fisher(units.tolist(), y.tolist())
    assert angular_fisher_score(x, y, normalise=True).item() == pytest.approx(expected, rel=1e-9)


@given(SEEDS, st.floats(1e-6, 1e6))
def test_symmetries_of_the_fisher_score(seed, factor):
    x, _, y, generator = draw(seed)
    order, classes = torch.randperm(12, generator=generator), torch.tensor([-7, 100, 3])
    for normalise in (False, True):
        value = angular_fisher_score(x, y, normalise)
        for same in (
            angular_fisher_score(x * factor, y, normalise),
            angular_fisher_score(x @ rotation(seed), y, normalise),
            angular_fisher_score(x, classes[y], normalise),
            angular_fisher_score(x[order], y[order], normalise),
        ):
            close(same, value)
    scaled = x * (1 + torch.rand(12, 1, generator=generator, dtype=torch.float64))
    close(angular_fisher_score(scaled, y, normalise=True), angular_fisher_score(x, y, normalise=True))
    assert (angular_fisher_score(scaled, y) - angular_fisher_score(x, y)).abs() > 1e-9


def test_fisher_score_orders_tight_and_wide_classes():
    centres = torch.tensor([[3.0, 0.5], [0.5, 3.0]]).double()
    y = torch.arange(40) % 2
    noise = torch.randn(40, 2).double()
    scores = [angular_fisher_score(centres[y] + spread * noise, y).item() for spread in (1e-9, 0.1, 1.0)]
    assert scores[0] < scores[1] < scores[2]
    # 1 - cos of such angles is 1e-19: nothing would be left of it as a difference.
    assert scores[0] * 1e16 == pytest.approx(scores[1], rel=0.2)


def test_fisher_score_warns_of_features_around_the_origin():
    x = torch.tensor([[1.0, 0.0], [-1.0, 1e-4], [0.0, 1.0], [0.0, -1.0]]).double()
    y = torch.arange(4)
    with pytest.warns(UserWarning, match="close to the origin") as caught:
        angular_fisher_score(x, y)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="close to the origin"):
        angular_fisher_score(x, y, normalise=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The mean is 2e-3 of the mean norm of the class means here.
        angular_fisher_score(x + torch.tensor([2e-3, 0.0]), y)
        # Short features are no reason.
        angular_fisher_score(1e-12 * (x + 1), y)


def test_fisher_score_without_two_classes_is_nan_and_zero_vectors_are_not():
    assert angular_fisher_score(X, torch.full((4,), 5)).isnan()
    assert angular_fisher_score(X[:0], Y[:0]).isnan()
    padded = torch.cat([X, torch.zeros(2, 4).double()])
    labels = torch.tensor([0, 1, 2, 0, 1, 3])
    expected = plain_fisher(padded.tolist(), labels.tolist())
    assert angular_fisher_score(padded, labels).item() == pytest.approx(expected, rel=1e-10)
    assert angular_fisher_score(torch.zeros(4, 3), torch.tensor([0, 0, 1, 1])).item() == 1


# Cosines between classes.


@given(SEEDS, st.integers(0, 9), st.integers(1, 5))
def test_class_cosines_are_their_definition(seed, n, classes):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    x[: n // 4] = 0
    y = torch.randint(0, classes, (n,), generator=generator)
    expected = plain_class_cosines(x.tolist(), y.tolist(), classes)
    close(class_cosine_matrix(x, y, classes), expected, 1e-12)
    seen = int(y.max()) + 1 if n else 0
    close(class_cosine_matrix(x, y), expected[:seen, :seen], 1e-12)
    turned = x @ rotation(seed, 3) * lengths(n, generator)
    close(class_cosine_matrix(turned, y, classes), expected, 1e-9)
    order = torch.randperm(classes, generator=generator)
    close(class_cosine_matrix(x, order.argsort()[y], classes), expected[order][:, order], 1e-12)


def test_class_cosines_are_undefined_only_without_pairs():
    x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    matrix = class_cosine_matrix(x, torch.tensor([0, 0, 2]), 4)
    nan = math.nan
    close(matrix, torch.tensor([[1, nan, 0, nan], [nan] * 4, [0, nan, nan, nan], [nan] * 4]))
    # The self-product of a single sample leaves rounding that must not be taken for a pair.
    alone = class_cosine_matrix(torch.randn(200, 64), torch.arange(200))
    assert torch.equal(alone.isnan(), torch.eye(200, dtype=torch.bool))


@pytest.mark.parametrize("seed", range(3))
def test_class_cosines_of_many_samples_in_float32(seed):
    torch.manual_seed(seed)
    x, y = torch.randn(100_000, 3) + 1, torch.randint(0, 2, (100_000,))
    close(class_cosine_matrix(x, y).double(), class_cosine_matrix(x.double(), y), 1e-5)
    same = torch.randn(1, 7).expand(1000, 7)
    matrix = class_cosine_matrix(same, torch.arange(1000) % 3)
    close(matrix, torch.ones(3, 3), 1e-5)
    assert matrix.max() <= 1


# Norms and counts.


@given(SEEDS, st.integers(2, 20))
def test_correlation_agrees_with_another_implementation(seed, classes):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(classes, 5, generator=generator, dtype=torch.float64)
    counts = torch.randperm(1000, generator=generator)[:classes]
    expected = scipy.stats.pearsonr([math.hypot(*row) for row in w.tolist()], counts.tolist()).statistic
    value = norm_count_correlation(w, counts)
    assert value.item() == pytest.approx(expected, abs=1e-9)
    close(norm_count_correlation(1e-9 * w @ rotation(seed, 5), 1e9 * counts.double() - 7), value, 1e-6)
    close(norm_count_correlation(w, -counts), -value)
    order = torch.randperm(classes, generator=generator)
    close(norm_count_correlation(w[order], counts[order]), value)


def test_correlation_of_constants_is_nan():
    w, counts = torch.randn(6, 4), torch.arange(6)
    assert norm_count_correlation(w, torch.full((6,), 3)).isnan()
    assert norm_count_correlation(w[:1], counts[:1]).isnan()
    assert norm_count_correlation(w[:0], counts[:0]).isnan()
    units = torch.nn.functional.normalize(torch.randn(500, 64))
    assert len(units.norm(dim=1).unique()) > 1  # equal up to rounding
    assert norm_count_correlation(units, torch.arange(500)).isnan()
    assert norm_count_correlation(torch.zeros(6, 4), counts).isnan()
    # A difference of a ten-thousandth is not rounding.
    assert norm_count_correlation(torch.diag(1 + 1e-4 * counts), counts).item() == pytest.approx(1, abs=1e-3)


def test_correlation_keeps_large_counts_apart():
    counts = torch.tensor([2**40, 2**40 + 1, 2**40 + 2])
    assert norm_count_correlation(torch.diag(torch.tensor([1.0, 2.0, 3.0])), counts).item() == pytest.approx(1)


# Quadrants.


def test_quadrants_are_counted_counterclockwise():
    for quadrant, point in enumerate([(1.0, 2.0), (-1.0, 2.0), (-1.0, -2.0), (1.0, -2.0)]):
        shares, zeros = quadrant_occupancy(torch.tensor([point, (0.0, 0.0), point, point]))
        assert shares.tolist() == [0.75 if k == quadrant else 0 for k in range(4)]
        assert zeros.item() == 0.25


@given(SEEDS, st.integers(1, 40))
def test_quadrants_follow_the_angle(seed, n):
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    quadrants = [int(math.atan2(b, a) % (2 * math.pi) / (math.pi / 2)) for a, b in x.tolist()]
    shares, zeros = quadrant_occupancy(x)
    assert shares.tolist() == pytest.approx([quadrants.count(k) / n for k in range(4)])
    assert zeros.item() == 0
    turned, _ = quadrant_occupancy(torch.stack([-x[:, 1], x[:, 0]], 1))
    close(turned, shares.roll(1))


def test_axes_after_a_relu_are_in_the_first_quadrant():
    x = torch.randn(1000, 2)
    shares, zeros = quadrant_occupancy(x.relu())
    dead = (x <= 0).all(1).float().mean().item()
    assert 0 < dead < 1
    assert zeros.item() == pytest.approx(dead)
    assert shares.tolist() == pytest.approx([1 - dead, 0, 0, 0])
    axes = torch.tensor([[-1.0, 0.0], [0.0, -1.0], [-0.0, 1.0], [-0.0, -0.0]])
    shares, zeros = quadrant_occupancy(axes)
    assert (shares.tolist(), zeros.item()) == ([0.25, 0.25, 0, 0.25], 0.25)


# Angles of pairs.


@given(SEEDS, st.integers(0, 9), st.integers(1, 4))
def test_pair_angles_are_their_definition(seed, n, classes):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(-1, classes, (n,), generator=generator)
    angles = {True: [], False: []}
    for i, j in itertools.combinations(range(n), 2):
        angles[bool(y[i] == y[j])].append(theta(x[i].tolist(), x[j].tolist()))
    positive, negative = pair_angles(x, y)
    for actual, expected in ((positive, angles[True]), (negative, angles[False])):
        close(actual, torch.tensor(expected, dtype=torch.float64), 1e-6)
    turned = pair_angles(x @ rotation(seed, 3) * lengths(n, generator), 5 - y)
    close(turned[0], positive, 1e-6)
    close(turned[1], negative, 1e-6)


@pytest.mark.parametrize(("n", "limit"), [(2, 2), (3, 2), (7, 7), (8, 7), (100, 33), (1001, 1000)])
def test_pairs_are_limited_and_always_the_same(n, limit):
    x, y = torch.randn(n, 2), torch.arange(n)
    positive, negative = pair_angles(x, y, limit)
    kept = min(n, limit)
    assert len(positive) == 0
    assert len(negative) == kept * (kept - 1) // 2
    again = pair_angles(x, torch.zeros(n, dtype=torch.int64), limit)[0]
    assert torch.equal(again, negative)


def test_limited_samples_are_spread_over_the_batch():
    # Angles to the first sample tell which samples were taken.
    circle = torch.arange(101, dtype=torch.float64) / 50
    x = torch.stack([circle.cos(), circle.sin()], 1)
    _, negative = pair_angles(x, torch.arange(101), limit=5)
    close(negative[:4], torch.tensor([0.5, 1.0, 1.5, 2.0], dtype=torch.float64), 1e-7)


def test_default_limit():
    _, negative = pair_angles(torch.randn(1500, 2), torch.arange(1500))
    assert len(negative) == 1000 * 999 // 2


def test_zero_vectors_are_at_right_angles():
    x = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    for angles in pair_angles(x, torch.tensor([0, 0, 1])):
        close(angles, torch.full_like(angles, math.pi / 2), 1e-6)


# Empty batches and bad input.


def test_empty_batches():
    none, labels = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
    assert angular_visual_hardness(none, torch.randn(3, 4), labels).shape == (0,)
    assert model_confidence(none, labels).shape == (0,)
    assert class_cosine_matrix(none, labels).shape == (0, 0)
    assert class_cosine_matrix(none, labels, 2).isnan().all()
    assert [len(angles) for angles in pair_angles(none, labels)] == [0, 0]
    shares, zeros = quadrant_occupancy(torch.zeros(0, 2))
    assert shares.shape == (4,)
    assert shares.isnan().all()
    assert zeros.isnan()


LABELS = "labels must be int64 of shape (4,), got torch.int64 of shape (3,)"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: angular_visual_hardness(X[0], W, Y), "features must be floating point of shape (B, D), got"),
        (lambda: angular_visual_hardness(X.long(), W, Y), "features must be floating point of shape (B, D), got"),
        (lambda: angular_visual_hardness(X, W[0], Y), "weight must be floating point of shape (C, 4), got"),
        (lambda: angular_visual_hardness(X, W[:, :3], Y), "weight must have shape (C, 4), got (4, 3)"),
        (lambda: angular_visual_hardness(X, W, Y[:3]), LABELS),
        (lambda: angular_visual_hardness(X, W, Y.int()), "labels must be int64 of shape (4,), got torch.int32"),
        (lambda: angular_visual_hardness(X, W[:2], Y), "labels must lie in [0, 2), got 2"),
        (lambda: angular_visual_hardness(X, W, Y - 1), "labels must lie in [0, 4), got -1"),
        (lambda: model_confidence(X[0], Y), "logits must be floating point of shape (B, C), got"),
        (lambda: model_confidence(X, Y + 2), "labels must lie in [0, 4), got 4"),
        (lambda: model_confidence(X, Y[:3]), LABELS),
        (lambda: angular_fisher_score(X.unsqueeze(0), Y), "features must be floating point of shape (N, D), got"),
        (lambda: angular_fisher_score(X, Y[:3]), LABELS),
        (lambda: class_cosine_matrix(X[0], Y), "features must be floating point of shape (N, D), got"),
        (lambda: class_cosine_matrix(X, Y[:3]), LABELS),
        (lambda: class_cosine_matrix(X, Y, 2), "labels must lie in [0, 2), got 2"),
        (lambda: class_cosine_matrix(X, Y - 1), "got -1"),
        (lambda: class_cosine_matrix(X, Y, -1), "classes must be at least 0, got -1"),
        (lambda: norm_count_correlation(W[0], Y), "weight must be floating point of shape (C, D), got"),
        (lambda: norm_count_correlation(W, Y[:3]), "counts must have shape (4,), got (3,)"),
        (lambda: quadrant_occupancy(X), "features must have shape (N, 2), got (4, 4)"),
        (lambda: quadrant_occupancy(X[0]), "features must be floating point of shape (N, 2), got"),
        (lambda: quadrant_occupancy(X[:, :2] * math.nan), "features must not contain NaN"),
        (lambda: pair_angles(X[0], Y), "features must be floating point of shape (N, D), got"),
        (lambda: pair_angles(X, Y[:3]), LABELS),
        (lambda: pair_angles(X, Y, limit=1), "limit must be at least 2, got 1"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert message in str(caught.value)


def test_public_names():
    assert all(callable(getattr(diagnostics, name)) for name in diagnostics.__all__)
    assert len(diagnostics.__all__) == 7
