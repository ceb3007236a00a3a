"""Few-shot learning: episodes, classifiers trained side by side, intervals, data sets, and the pictures of all that."""

import base64
import csv
import io
import json
import math
import runpy
import sys
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from torch import nn

from helpers.paths import TOOLS
from hypersphere import losses, recipe
from hypersphere.data import DataError, FolderSplit, TensorSplit, inventory, load
from hypersphere.data.sources import sources
from hypersphere.errors import ArgumentError
from hypersphere.evaluate import Outputs, evaluations, measure
from hypersphere.metrics import EpisodeClassifiers, classify, mean_and_interval, sample_episodes
from hypersphere.metrics import episodes as module
from hypersphere.report.sections import sections
from hypersphere.runs import RunFolder
from hypersphere.tasks.few_shot import data as data_module
from hypersphere.tasks.few_shot import evaluation
from hypersphere.tasks.few_shot.data import FewShotDataset, divide
from hypersphere.tasks.few_shot.figures import accuracy_by_shots, few_shot_figures
from hypersphere.train.trainer import Trainer

RECIPES = [name for name in recipe.embedded() if "few-shot" in name]


@pytest.fixture(autouse=True)
def _no_data_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.delenv("HYPERSPHERE_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


# ---------------------------------------------------------------------------------------------------- episodes


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(4, 9), min_size=3, max_size=6),
    ways=st.integers(1, 3),
    shots=st.integers(1, 2),
    queries=st.integers(1, 2),
    seed=st.integers(0, 2**32 - 1),
)
def test_episodes_have_distinct_classes_and_disjoint_samples_of_them(counts, ways, shots, queries, seed):
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)) * 3 + 1  # labels need not be 0, 1, 2
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]
    drawn = sample_episodes(labels, ways=ways, shots=shots, queries=queries, episodes=7, seed=seed)
    assert drawn.support.shape == (7, ways, shots) and drawn.query.shape == (7, ways, queries)
    for classes, support, query in zip(*(part.tolist() for part in drawn), strict=True):
        assert len(set(classes)) == ways
        for label, own_support, own_query in zip(classes, support, query, strict=True):
            samples = [*own_support, *own_query]
            assert len(set(samples)) == shots + queries
            assert {labels[place].item() for place in samples} == {label}


def test_episodes_are_a_function_of_the_seed_and_fewer_shots_leave_the_first_ones():
    labels = torch.arange(6).repeat(30)
    before = torch.random.get_rng_state()
    drawn, again = (sample_episodes(labels, ways=3, shots=5, queries=4, episodes=50, seed=3) for _ in range(2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))
    other = sample_episodes(labels, ways=3, shots=5, queries=4, episodes=50, seed=4)
    assert not torch.equal(drawn.classes, other.classes) and not torch.equal(drawn.query, other.query)
    fewer = sample_episodes(labels, ways=3, shots=1, queries=4, episodes=50, seed=3)
    assert torch.equal(fewer.query, drawn.query) and torch.equal(fewer.support, drawn.support[:, :, :1])


def test_episodes_that_do_not_fit_into_one_piece_are_drawn_from_one_stream(monkeypatch):
    labels = torch.arange(6).repeat(30)
    monkeypatch.setattr(module, "CHUNK", 20)
    drawn = sample_episodes(labels, ways=3, shots=2, queries=4, episodes=50, seed=3)
    assert len(drawn.classes) == 50
    first, second = drawn.query[:20], drawn.query[20:40]
    assert not torch.equal(first, second)
    assert torch.equal(sample_episodes(labels, ways=3, shots=2, queries=4, episodes=20, seed=3).query, first)


def test_classes_samples_and_places_are_equally_likely():
    sizes = torch.tensor([8, 10, 12, 8, 9])
    labels = torch.arange(5).repeat_interleave(sizes)
    drawn = sample_episodes(labels, ways=3, shots=2, queries=3, episodes=20_000, seed=0)
    # Each class is at each of the three places in a fifth of all episodes.
    for way in range(3):
        counts = drawn.classes[:, way].bincount(minlength=5).numpy()
        assert stats.chisquare(counts).pvalue > 1e-4
    # Pairs of classes, too: without replacement, each ordered pair has probability 1 / 20.
    pairs = (drawn.classes[:, 0] * 5 + drawn.classes[:, 1]).bincount(minlength=25).reshape(5, 5)
    assert pairs.diagonal().sum() == 0
    assert stats.chisquare(pairs[~torch.eye(5, dtype=torch.bool)].numpy()).pvalue > 1e-4
    # Within a class each sample is as likely as another, as support and as query.
    for part in (drawn.support, drawn.query):
        counts = part.flatten().bincount(minlength=len(labels))
        for label in range(5):
            assert stats.chisquare(counts[labels == label].numpy()).pvalue > 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ways": 7}, "ways must be at most the 6 classes that there are, got 7"),
        (
            {"shots": 7, "queries": 4},
            r"queries and shots must be at most the 10 samples of the smallest class \(label 0\)",
        ),
        ({"shots": 0}, "shots must be at least 1, got 0"),
        ({"queries": 0}, "queries must be at least 1"),
        ({"episodes": 0}, "episodes must be at least 1"),
    ],
)
def test_episodes_that_cannot_be_drawn_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        sample_episodes(torch.arange(6).repeat(10), **{"shots": 1, "queries": 2} | options)


# -------------------------------------------------------------------------------------------------- classifiers


class Cosine(nn.Module):
    """A cosine classifier as it is written for one episode: weight normalisation where norms are learned."""

    def __init__(self, weight, scale, learn_norms):
        super().__init__()
        self.v, self.scale = nn.Parameter(weight.clone()), scale
        self.g = nn.Parameter(weight.norm(dim=1)) if learn_norms else None

    def forward(self, x):
        cosines = torch.stack([(x * v).sum(1) / (x.norm(dim=1) * v.norm()) for v in self.v], 1)
        return self.scale * (cosines if self.g is None else cosines * self.g)


@pytest.mark.parametrize("kind", ["baseline", "baseline++", "baseline++ with norms"])
@pytest.mark.parametrize(("shots", "batch_size"), [(1, 4), (3, 4), (2, 100)])  # last batches of 1, 3 and all samples
def test_classifiers_of_all_episodes_are_trained_as_each_is_alone(kind, shots, batch_size):
    episodes, ways, dim, epochs = 4, 5, 7, 6
    generator = torch.Generator().manual_seed(0)
    support = torch.randn(episodes, ways, shots, dim, generator=generator, dtype=torch.float64)
    query = torch.randn(episodes, 11, dim, generator=generator, dtype=torch.float64)
    orders = torch.stack(
        [
            torch.stack([torch.randperm(ways * shots, generator=generator) for _ in range(epochs)])
            for _ in range(episodes)
        ]
    )
    cosine = kind != "baseline"
    model = EpisodeClassifiers(
        *(episodes, ways, dim),
        scale=2.0 if cosine else None,
        learn_norms=kind.endswith("norms"),
        generator=generator,
        dtype=torch.float64,
    )
    alone = []
    for episode in range(episodes):
        weight = model.weight[episode].detach()
        if cosine:
            one = Cosine(weight, 2.0, kind.endswith("norms"))
        else:
            one = nn.Linear(dim, ways, dtype=torch.float64)
            one.weight.data, one.bias.data = weight.clone(), model.bias[episode].detach().clone()
        optimiser = torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9, dampening=0.9, weight_decay=1e-3)
        samples = support[episode].reshape(-1, dim)
        labels = torch.tensor([way for way in range(ways) for _ in range(shots)])
        for order in orders[episode]:
            for start in range(0, len(order), batch_size):
                batch = order[start : start + batch_size]
                optimiser.zero_grad()
                nn.CrossEntropyLoss()(one(samples[batch]), labels[batch]).backward()
                optimiser.step()
        alone.append(one(query[episode]).detach())
    untrained = model(query).detach()
    model.fit(support, orders, batch_size=batch_size, lr=0.05)
    torch.testing.assert_close(model(query).detach(), torch.stack(alone), rtol=1e-10, atol=1e-12)
    assert (model(query) - untrained).abs().max() > 0.05  # it did learn something


@pytest.mark.parametrize("learn_norms", [False, True])
@pytest.mark.parametrize("classifier", ["baseline", "baseline++"])
def test_the_span_of_support_and_weights_is_all_that_training_needs(monkeypatch, classifier, learn_norms):
    generator = torch.Generator().manual_seed(1)
    support = torch.randn(6, 3, 2, 40, generator=generator, dtype=torch.float64)
    query = support.mean(2, keepdim=True) + 3 * torch.randn(6, 3, 30, 40, generator=generator, dtype=torch.float64)
    options = {"epochs": 20, "lr": 0.1, "learn_norms": learn_norms}
    few = classify(support, query, classifier, **options)
    called = []
    monkeypatch.setattr(module, "_in_few_dimensions", lambda _, *both: called.append(1) or both)
    assert torch.equal(few, classify(support, query, classifier, **options)) and called
    assert 0.4 < (few == torch.arange(3)[:, None]).double().mean() < 1  # neither chance nor all


def test_duplicate_and_zero_features_change_no_basis_for_the_worse():
    support = torch.zeros(2, 3, 2, 30)
    support[0, :, :, :3] = torch.eye(3).unsqueeze(1)  # twice the same sample, and nothing at all in episode 1
    for classifier in module.CLASSIFIERS:
        found = classify(support, support, classifier, epochs=30, lr=0.5)
        assert torch.equal(found[0], torch.arange(3).unsqueeze(1).expand(3, 2)), classifier
        assert found[1].unique().numel() == 1  # equal features get the same answer


def test_first_weights_and_orders_are_drawn_for_each_episode_from_the_seed():
    support = torch.randn(1, 3, 2, 8, generator=torch.Generator().manual_seed(0)).expand(5, -1, -1, -1)
    query = torch.randn(1, 3, 40, 8, generator=torch.Generator().manual_seed(1)).expand(5, -1, -1, -1)
    before = torch.random.get_rng_state()
    first, again, other = (classify(support, query, "baseline", epochs=1, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])
    model = EpisodeClassifiers(2000, 5, 16, generator=torch.Generator().manual_seed(0))
    for values in (model.weight, model.bias):  # as torch.nn.Linear: uniform within 1 / sqrt(16)
        assert stats.kstest(values.detach().double().flatten()[:5000].numpy(), "uniform", (-0.25, 0.5)).pvalue > 1e-3
        assert values.abs().max() <= 0.25


def test_nearest_means_on_the_sphere_against_a_loop():
    generator = torch.Generator().manual_seed(0)
    support = torch.randn(9, 4, 3, 6, generator=generator, dtype=torch.float64) * 10 ** torch.arange(3).view(3, 1)
    query = torch.randn(9, 4, 5, 6, generator=generator, dtype=torch.float64)
    found = classify(support, query, "nearest").numpy()
    for episode in range(9):
        units = support[episode].numpy() / np.linalg.norm(support[episode].numpy(), axis=2, keepdims=True)
        means = units.mean(axis=1)
        for way in range(4):
            for place in range(5):
                q = query[episode, way, place].numpy()
                angles = [math.acos(q @ m / np.linalg.norm(q) / np.linalg.norm(m)) for m in means]
                assert found[episode, way, place] == int(np.argmin(angles))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("classifier", module.CLASSIFIERS)
def test_half_precision_features_are_classified_in_single_precision(dtype, classifier):
    support = torch.randn(4, 3, 2, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = classify(support, support, classifier, epochs=3)
    assert torch.equal(found, classify(support.float(), support.float(), classifier, epochs=3))


@pytest.mark.parametrize("classifier", module.CLASSIFIERS)
def test_where_it_is_called_changes_no_answer(classifier):
    generator = torch.Generator().manual_seed(0)
    support, query = (torch.randn(8, 3, count, 40, generator=generator) for count in (2, 50))
    exact = classify(support, query, classifier, epochs=20, lr=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(classify(support, query, classifier, epochs=20, lr=0.1), exact)
    with torch.inference_mode():
        for dim in (40, 4):  # with and without the span
            inside = classify(support[..., :dim] * 1, query[..., :dim] * 1, classifier, epochs=20, lr=0.1)
            assert dim == 4 or torch.equal(inside, exact)
    rough = classify(support, query.half(), classifier, epochs=20, lr=0.1)
    assert (rough != exact).double().mean() < 0.01


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("classifier", module.CLASSIFIERS)
def test_a_gpu_gives_the_answers_of_a_cpu(classifier):
    features, labels = (part.cuda() for part in blobs(dim=40, spread=1.5))
    drawn = sample_episodes(labels, ways=5, shots=3, queries=8, episodes=50, seed=1)
    assert drawn.query.is_cuda
    support, query = features.double()[drawn.support], features.double()[drawn.query]
    there = classify(support, query, classifier, epochs=20, lr=0.1)
    assert torch.equal(there.cpu(), classify(support.cpu(), query.cpu(), classifier, epochs=20, lr=0.1))
    options = {"name": "few-shot", "classifier": classifier, "shots": 3, "queries": 8, "episodes": 50}
    found = measure(outputs(features, labels), [options])
    expected = measure(outputs(features.cpu(), labels.cpu()), [options])
    assert found["few_shot_3"] == pytest.approx(expected["few_shot_3"], abs=0.01)  # single precision


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classifier": "base"}, "classifier must be one of 'baseline', 'baseline[+][+]', 'nearest', got 'base'"),
        ({"classifier": "baseline++", "scale": 0.0}, "scale must be greater than 0"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"lr": 0.0}, "lr must be greater than 0"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0"),
    ],
)
def test_classifiers_refuse_constants_that_make_no_sense(options, message):
    with pytest.raises(ArgumentError, match=message):
        classify(torch.ones(1, 2, 1, 3), torch.ones(1, 2, 1, 3), **options)


@pytest.mark.parametrize("query", [(2, 1, 3), (2, 2, 1, 3), (1, 3, 1, 3), (1, 2, 1, 4)])
def test_support_and_queries_of_different_episodes_are_refused(query):
    with pytest.raises(ArgumentError, match=r"support and query must have the shapes .*got \(1, 2, 1, 3\) and"):
        classify(torch.ones(1, 2, 1, 3), torch.ones(query), "nearest")
    with pytest.raises(ArgumentError, match="support must be at least 1"):
        classify(torch.ones(1, 2, 0, 3), torch.ones(1, 2, 1, 3))


# --------------------------------------------------------------------------------------------------- evaluation


def test_the_interval_is_that_of_published_results():
    rng = np.random.default_rng(0)
    values = rng.uniform(0.3, 0.9, 600)
    mean, interval = mean_and_interval(torch.from_numpy(values), "normal")
    assert mean == pytest.approx(np.mean(values), abs=1e-12)
    assert interval == pytest.approx(1.96 * np.std(values) / np.sqrt(600), abs=1e-12)
    # The normal interval of scipy, but for the rounding of 1.96 and the divisor of the variance.
    low, high = stats.norm.interval(0.95, loc=values.mean(), scale=stats.sem(values))
    assert interval == pytest.approx((high - low) / 2, rel=2e-3)
    assert mean_and_interval(torch.tensor([0.25]), "normal") == (0.25, 0.0)
    with pytest.raises(ArgumentError, match=r"values must have shape .* not be empty"):
        mean_and_interval(torch.zeros(0), "normal")


def blobs(classes=8, each=30, dim=12, spread=0.6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat(each)
    centres = torch.randn(classes, dim, generator=generator)
    return centres[labels] + spread * torch.randn(len(labels), dim, generator=generator), labels


def outputs(features, labels, **more):
    return Outputs(features[:1], features[:1], labels[:1], features[:1], features, labels, **more)


@pytest.mark.parametrize("classifier", module.CLASSIFIERS)
def test_the_evaluation_is_the_mean_over_episodes_that_are_done_one_by_one(classifier, monkeypatch):
    features, labels = blobs(spread=1.5)
    found = measure(
        outputs(features, labels, seed=5),
        [{"name": "few-shot", "ways": 3, "shots": [1, 4], "queries": 6, "episodes": 20, "classifier": classifier}],
    )
    assert list(found) == ["few_shot_1", "few_shot_1_interval", "few_shot_4", "few_shot_4_interval"]
    drawn = sample_episodes(labels, ways=3, shots=4, queries=6, episodes=20, seed=5)
    for shots in (1, 4):
        answers = classify(features[drawn.support[:, :, :shots]], features[drawn.query], classifier, seed=5)
        accuracies = [
            np.mean([[answer == way for answer in row] for way, row in enumerate(episode)])
            for episode in answers.tolist()
        ]
        assert found[f"few_shot_{shots}"] == pytest.approx(np.mean(accuracies))
        assert found[f"few_shot_{shots}_interval"] == pytest.approx(1.96 * np.std(accuracies) / math.sqrt(20))
    assert 0.34 < found["few_shot_1"] < found["few_shot_4"] < 1
    # One number is a list of one, and pieces of episodes change nothing where nothing is drawn in them.
    alone = measure(
        outputs(features, labels, seed=5),
        [{"name": "few-shot", "ways": 3, "shots": 4, "queries": 6, "episodes": 20, "classifier": classifier}],
    )
    assert alone == {key: found[key] for key in ("few_shot_4", "few_shot_4_interval")}


def test_many_episodes_are_classified_piece_by_piece(monkeypatch):
    features, labels = blobs(spread=1.5)
    settings_ = [{"name": "few-shot", "ways": 3, "shots": 2, "queries": 6, "episodes": 50, "classifier": "nearest"}]
    monkeypatch.setattr(evaluation, "CHUNK", 20)
    sizes = []
    original = evaluation.classify
    monkeypatch.setattr(
        evaluation, "classify", lambda s, *rest, **options: sizes.append(len(s)) or original(s, *rest, **options)
    )
    found = measure(outputs(features, labels), settings_)
    assert sizes == [20, 20, 10] and 0.34 < found["few_shot_2"] < 1


def test_chance_and_certainty():
    features, labels = blobs(spread=0.0)
    options = {"name": "few-shot", "episodes": 30, "shots": 1, "queries": 5, "classifier": "nearest"}
    assert measure(outputs(features, labels), [options]) == {"few_shot_1": 1.0, "few_shot_1_interval": 0.0}
    noise = torch.randn(len(labels), 12, generator=torch.Generator().manual_seed(0))
    found = measure(outputs(noise, labels), [options | {"episodes": 300}])
    assert abs(found["few_shot_1"] - 0.2) < 2 * found["few_shot_1_interval"] < 0.05


def test_nothing_is_measured_where_no_class_was_held_out():
    eye = torch.eye(3)
    assert measure(Outputs(eye, eye, torch.arange(3), eye), ["few-shot"]) == {}


def test_runs_with_the_same_seed_see_the_same_episodes_and_other_seeds_other_ones():
    features, labels = blobs(spread=2.0)
    options = [{"name": "few-shot", "episodes": 10, "shots": 1, "queries": 5, "classifier": "nearest"}]
    first, again, other = (measure(outputs(features, labels, seed=seed), options) for seed in (0, 0, 1))
    assert first == again != other
    # A turn of all features is another model with the same angles: on the same episodes it has the same accuracy.
    turn = torch.linalg.qr(torch.randn(12, 12, generator=torch.Generator().manual_seed(0))).Q
    assert measure(outputs(features @ turn, labels, seed=0), options) == first


def test_validation_classes_are_apart_from_novel_ones():
    features, labels = blobs(classes=4, spread=0.0)
    features[labels == 1] = features[labels == 3]  # b and d cannot be told apart
    images = torch.zeros(len(labels), 1, 8, 8, dtype=torch.uint8)
    split = TensorSplit(images, labels)
    data = FewShotDataset("toy", ("x",), split, split, split, ("a", "b", "c", "d"), validation=("b", "d"))
    options = {"name": "few-shot", "ways": 2, "episodes": 20, "shots": 1, "queries": 5, "classifier": "nearest"}
    given_ = outputs(features, labels, data=data)
    found = measure(given_, [options, options | {"part": "validation", "key": "chosen_by"}])
    assert found["few_shot_1"] == 1.0 and found["chosen_by_1"] == 0.5
    with pytest.raises(ArgumentError, match="ways must be at most the 2 classes"):
        measure(given_, [options | {"ways": 3}])
    with pytest.raises(ArgumentError, match="part must be 'novel': the data set has no validation classes"):
        measure(outputs(features, labels), [options | {"part": "validation"}])
    with pytest.raises(ArgumentError, match="part must be one of 'novel', 'validation', got 'test'"):
        measure(given_, [options | {"part": "test"}])
    with pytest.raises(ArgumentError, match="shots must be a number or several, got none"):
        measure(given_, [options | {"shots": []}])


# ---------------------------------------------------------------------------------------------------- pictures


def shown(ways=3, shots=2, episodes=5):
    """What an evaluation of images leaves: image ``n`` has the grey value ``n``."""
    labels = torch.arange(4).repeat(12)
    images = torch.arange(48, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)
    split = TensorSplit(images, labels)
    data = FewShotDataset("toy", ("x",), split, split, split, ("a & b", "<b>", "c", "d"), validation=("c",))
    features = torch.randn(48, 5, generator=torch.Generator().manual_seed(0)) + 2 * torch.randn(4, 5)[labels]
    given_ = outputs(features, labels, data=data)
    options = {"ways": ways, "shots": [1, shots], "queries": 6, "episodes": episodes, "classifier": "nearest"}
    found = measure(given_, [{"name": "few-shot", **options}, {"name": "few-shot", "key": "other", **options}])
    return given_.artefacts, found, labels


def test_artefacts_are_the_first_episodes_and_the_curves():
    artefacts, found, labels = shown()
    kept = [f"few-shot/episodes/{name}" for name in ("names", "prediction", "query", "support")]
    assert sorted(artefacts) == ["few-shot/curve/few_shot", "few-shot/curve/other", *kept]
    support, query, prediction = (artefacts[f"few-shot/episodes/{name}"] for name in ("support", "query", "prediction"))
    assert support.shape == (2, 3, 2, 1, 8, 8) and query.shape == (2, 3, 5, 1, 8, 8) and prediction.shape == (2, 3, 5)
    names = bytes(artefacts["few-shot/episodes/names"].tolist()).decode().split("\n")
    for images in (support, query):
        for episode in range(2):
            for way in range(3):
                own = {labels[int(value)].item() for value in images[episode, way].unique()}
                assert [("a & b", "<b>", "c", "d")[label] for label in own] == [names[3 * episode + way]]
    assert "c" not in names  # it is for validation
    curve = artefacts["few-shot/curve/few_shot"]
    assert curve[:, 0].tolist() == [1, 2]
    assert curve[:, 1:].flatten().tolist() == pytest.approx(
        [found[key] for key in ("few_shot_1", "few_shot_1_interval", "few_shot_2", "few_shot_2_interval")]
    )


def test_the_curve_has_intervals_and_a_line_for_each_classifier():
    curves = {"b": np.array([[5, 0.8, 0.01], [1, 0.5, 0.02]]), "a": np.array([[1, 0.4, 0.03]])}
    picture = accuracy_by_shots(curves)
    first, second = picture.figure["data"]
    assert (first["name"], second["name"]) == ("a", "b")
    assert second["x"] == [1, 5] and second["y"] == [50, 80] and second["error_y"]["array"] == [2, 1]
    assert picture.figure["layout"]["xaxis"]["tickvals"] == [1, 5]


def test_the_picture_of_an_episode_shows_its_images_and_which_are_wrong():
    artefacts, _, _ = shown()
    arrays = {name: value.numpy() for name, value in artefacts.items()}
    drawn = sections(arrays)["few-shot"].pictures
    assert [picture.title for picture in drawn] == ["accuracy by shots", "episode 1", "episode 2"]
    json.dumps([picture.figure for picture in drawn])  # a page can hold it
    support, query, prediction = (arrays[f"few-shot/episodes/{name}"] for name in ("support", "query", "prediction"))
    for number, picture in enumerate(drawn[1:]):
        image, spots = picture.figure["data"]
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(image["source"].split(",")[1]))))
        assert pixels.shape == (3 * 38, 7 * 38 + 9, 4)
        right = 0
        for index, (x, y, told) in enumerate(zip(spots["x"], spots["y"], spots["customdata"], strict=True)):
            way, column = divmod(index, 7)
            tile = support[number, way, column] if column < 2 else query[number, way, column - 2]
            assert pixels[y, x].tolist() == [*[tile[0, 4, 4]] * 3, 255]
            edge = pixels[y - 18, x].tolist()
            if column < 2:
                assert edge[3] == 0 and told.startswith("support: ")
            else:
                hit = prediction[number, way, column - 2] == way
                right += hit
                assert edge == ([46, 160, 67, 255] if hit else [207, 34, 46, 255])
                assert ("taken for" in told) == (not hit)
        assert f"({right} of 15 of these)" in picture.caption
        assert all("<b>" not in told and "& " not in told for told in spots["customdata"])  # names are no markup


def test_there_are_no_pictures_of_what_is_no_image():
    features, labels = blobs()
    split = TensorSplit(features, labels)
    data = FewShotDataset("toy", ("x",), split, split, split, tuple("abcdefgh"))
    given_ = outputs(features, labels, data=data)
    measure(given_, [{"name": "few-shot", "episodes": 3, "queries": 5, "classifier": "nearest"}])
    assert list(given_.artefacts) == ["few-shot/curve/few_shot"]
    assert len(few_shot_figures({"curve/few_shot": given_.artefacts["few-shot/curve/few_shot"].numpy()})) == 1


# ---------------------------------------------------------------------------------------------------- data sets


def test_dividing_keeps_every_image_once():
    whole = load("digits")
    parts = divide(whole, ["8", "3"], ["0"])
    assert isinstance(parts, FewShotDataset)
    assert parts.unseen_names == ("0", "3", "8") and parts.validation == ("3", "8")
    assert len(parts.train) + len(parts.test) + len(parts.unseen) == 1797
    counts = (whole.train.labels.bincount() + whole.test.labels.bincount())[[0, 3, 8]]
    assert parts.unseen.labels.bincount().tolist() == counts.tolist()
    further = parts.hold_out(["5"])  # what is held out of such a set is novel
    assert further.validation == ("3", "8") and further.unseen_names == ("0", "3", "8", "5")


def write_cifar100(folder, each=(3, 2)):
    """CIFAR-100 in its binary form, with so many training and test images of each class; pixels tell the class."""
    given_ = [*data_module._CIFAR_VALIDATION, *data_module._CIFAR_NOVEL]
    names = sorted([*given_, *(f"base{number:02}" for number in range(64))])
    folder.mkdir(parents=True)
    for file, count in zip(("train", "test"), each, strict=True):
        records = [bytes([0, label]) + bytes([label]) * 3072 for _ in range(count) for label in range(100)]
        (folder / f"{file}.bin").write_bytes(b"".join(records))
    (folder / "coarse_label_names.txt").write_text("things\n")
    (folder / "fine_label_names.txt").write_text("\n".join(names) + "\n")
    return names


def test_cifar100_is_divided_by_classes(tmp_path):
    names = write_cifar100(tmp_path / "cifar-100-binary")
    data = load("cifar100-few-shot", tmp_path)
    assert data.name == "cifar100-few-shot" and load("cifar-fs", tmp_path).class_names == data.class_names
    assert (len(data.class_names), len(data.validation), len(data.unseen_names)) == (64, 16, 36)
    assert all(name.startswith("base") for name in data.class_names)
    assert set(data.class_names) | set(data.unseen_names) == set(names)
    assert (len(data.train), len(data.test), len(data.unseen)) == (64 * 3, 64 * 2, 36 * 5)
    for split, known in (
        (data.train, data.class_names),
        (data.test, data.class_names),
        (data.unseen, data.unseen_names),
    ):
        told = [names[pixel] for pixel in split.images[:, 0, 0, 0].tolist()]
        assert told == [known[label] for label in split.labels.tolist()]
    with pytest.raises(DataError, match="cifar100 was not found"):
        load("cifar100-few-shot", tmp_path / "elsewhere")


def test_the_division_of_cifar100_is_by_known_classes():
    validation, novel = data_module._CIFAR_VALIDATION, data_module._CIFAR_NOVEL
    assert len(set(validation)) == 16 and len(set(novel)) == 20 and not set(validation) & set(novel)
    assert list(validation) == sorted(validation) and list(novel) == sorted(novel)
    # Of CIFAR-FS: some that are known to be there.
    assert {"beaver", "tractor", "maple_tree"} < set(validation) and {"worm", "rocket", "leopard"} < set(novel)


def drawing(seed, size=105):
    """A drawing as Omniglot has them: one bit a pixel, black on white."""
    rng = np.random.default_rng(seed)
    pixels = np.full((size, size), 255, np.uint8)
    row, column = rng.integers(10, 80, 2)
    pixels[row : row + 12, column : column + 3] = 0
    file = io.BytesIO()
    Image.fromarray(pixels).convert("1").save(file, "PNG")
    return pixels, file.getvalue()


def write_omniglot(path, alphabets, each=4):
    path.parent.mkdir(parents=True, exist_ok=True)
    written = {}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{path.stem}/", "")
        for alphabet, characters in alphabets.items():
            for character in range(1, characters + 1):
                for drawer in range(1, each + 1):
                    seed = sum(alphabet.encode()) * 10_000 + character * 100 + drawer
                    pixels, raw = drawing(seed)
                    archive.writestr(f"{path.stem}/{alphabet}/character{character:02}/{seed}_{drawer:02}.png", raw)
                    written[f"{alphabet}/character{character:02}", drawer] = pixels
    return written


SMALL = {"Balinese": 2, "Greek": 3, "Latin": 2}


def small_omniglot(root):
    written = write_omniglot(root / "omniglot" / "images_background_small1.zip", SMALL)
    return written | write_omniglot(
        root / "omniglot" / "images_background_small2.zip", {"Greek": 3, "Sanskrit": 1, "Tagalog": 2}
    )


def test_the_small_sets_of_omniglot_are_joined_and_divided_by_alphabets(tmp_path):
    written = small_omniglot(tmp_path)
    data = load("omniglot", tmp_path, size=35, test_fraction=0.25)
    assert data.class_names == (*(f"Greek/character0{i}" for i in (1, 2, 3)), "Latin/character01", "Latin/character02")
    assert data.validation == ("Tagalog/character01", "Tagalog/character02")
    assert data.unseen_names == (
        *("Balinese/character01", "Balinese/character02", "Sanskrit/character01"),
        *data.validation,
    )
    assert (len(data.train), len(data.test), len(data.unseen)) == (15, 5, 20) and data.train.shape == (1, 35, 35)
    # 105 is three times 35: each pixel is the mean over nine, and strokes are bright.
    whole = [(data.class_names, data.train), (data.class_names, data.test), (data.unseen_names, data.unseen)]
    found = {name: [] for name in {key for key, _ in written}}
    for names, split in whole:
        for image, label in zip(split.images, split.labels.tolist(), strict=True):
            found[names[label]].append(image[0].numpy())
    for name, images in found.items():
        expected = [255 - np.round(written[name, drawer].reshape(35, 3, 35, 3).mean((1, 3))) for drawer in range(1, 5)]
        for image in images:
            assert min(np.abs(image.astype(float) - other).max() for other in expected) <= 1
        assert len(images) == 4 and len({image.tobytes() for image in images}) == 4


def test_rotated_characters_are_classes_of_their_own(tmp_path):
    small_omniglot(tmp_path)
    plain, turned = load("omniglot", tmp_path), load("omniglot", tmp_path, rotations=True)
    assert len(turned.class_names) == 4 * len(plain.class_names)
    assert len(turned.unseen_names) == 4 * len(plain.unseen_names) and len(turned.validation) == 8
    by_name = {}
    for name in ("Greek/character02/0", "Greek/character02/90", "Greek/character02/180"):
        label = turned.class_names.index(name)
        images = [s.images[s.labels == label] for s in (turned.train, turned.test)]
        by_name[name.rsplit("/", 1)[1]] = {image.numpy().tobytes() for image in torch.cat(images)}
    assert len(by_name["0"]) == 4
    upright = [np.frombuffer(raw, np.uint8).reshape(28, 28) for raw in by_name["0"]]
    assert {np.ascontiguousarray(np.rot90(image)).tobytes() for image in upright} == by_name["90"]
    assert {np.ascontiguousarray(image[::-1, ::-1]).tobytes() for image in upright} == by_name["180"]


def test_the_complete_omniglot_is_tested_on_its_evaluation_alphabets(tmp_path):
    write_omniglot(tmp_path / "omniglot-py" / "images_background.zip", SMALL | {"Tagalog": 1})
    write_omniglot(tmp_path / "omniglot-py" / "images_evaluation.zip", {"Angelic": 2, "Oriya": 1})
    data = load("omniglot", tmp_path)
    assert {name.split("/")[0] for name in data.class_names} == set(SMALL)
    assert {name.split("/")[0] for name in data.unseen_names} == {"Angelic", "Oriya", "Tagalog"}
    other = load("omniglot", tmp_path, novel=("Latin",), validation_alphabets=())
    assert {name.split("/")[0] for name in other.unseen_names} == {"Latin"} and other.validation == ()
    with pytest.raises(ArgumentError, match="novel has 'Latn', which is no alphabet here"):
        load("omniglot", tmp_path, novel=("Latn",))
    with pytest.raises(ArgumentError, match="validation_alphabets must have no alphabet of novel, got Latin in both"):
        load("omniglot", tmp_path, novel=("Latin",), validation=("Latin",))  # the option's older name


def test_bad_archives_of_omniglot_name_themselves(tmp_path):
    with pytest.raises(DataError, match=r"omniglot was not found(.|\n)*images_background_small1.zip"):
        load("omniglot", tmp_path)
    small_omniglot(tmp_path)
    path = tmp_path / "omniglot" / "images_background_small2.zip"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"images_background_small2.zip is not a complete archive"):
        load("omniglot", tmp_path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("set/Greek/character01/a.png", b"no image")
    with pytest.raises(DataError, match=r"images_background_small2.zip is not a complete archive"):
        load("omniglot", tmp_path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", b"none here")
    with pytest.raises(DataError, match=r"images_background_small2.zip has no drawings"):
        load("omniglot", tmp_path)


def test_the_import_copies_the_small_sets_and_the_inventory_checks_them(tmp_path, monkeypatch, capsys):
    small_omniglot(tmp_path / "copies")
    tool = TOOLS / "import_data.py"
    monkeypatch.setattr(
        sys, "argv", ["import", "--source", f"{tmp_path}/copies", "--root", f"{tmp_path}/data", "omniglot"]
    )
    runpy.run_path(str(tool), run_name="__main__")
    assert "omniglot: corrupt" in capsys.readouterr().out  # these are not the published files
    layouts = tuple(replace(layout, md5=dict.fromkeys(layout.md5)) for layout in sources["omniglot"].layouts)
    monkeypatch.setitem(sources, "omniglot", replace(sources["omniglot"], layouts=layouts))
    row = next(row for row in inventory(tmp_path / "data", verify=True) if row.name == "omniglot")
    assert row.state == "found" and "2 files, " in row.detail


def write_mini_imagenet(folder, each=4):
    """Lists of 3 base, 1 validation and 2 novel classes with images of one colour each."""
    (folder / "images").mkdir(parents=True)
    for file, labels in (("train", ("n1", "n2", "n3")), ("val", ("n4",)), ("test", ("n5", "n6"))):
        rows = [(f"{label}{place:08}.jpg", label) for label in labels for place in range(each)]
        with (folder / f"{file}.csv").open("w", newline="") as stream:
            csv.writer(stream).writerows([("filename", "label"), *rows])
        for name, label in rows:
            Image.new("RGB", (20, 10), (40 * int(label[1:]), 0, 0)).save(folder / "images" / name, quality=100)


def test_mini_imagenet_is_read_from_its_lists(tmp_path):
    folder = tmp_path / "mini-imagenet"
    write_mini_imagenet(folder)
    data = load("mini-imagenet", tmp_path, size=12, test_fraction=0.25)
    assert (data.class_names, data.unseen_names, data.validation) == (("n1", "n2", "n3"), ("n4", "n5", "n6"), ("n4",))
    assert (len(data.train), len(data.test), len(data.unseen)) == (9, 3, 12)
    assert isinstance(data.unseen, FolderSplit) and data.train.shape == (3, 12, 12)
    for names, split in ((data.class_names, data.train), (data.unseen_names, data.unseen)):
        for place in range(len(split)):
            red = split.read(place)[0].float().mean().item()
            assert names[int(split.labels[place])] == f"n{round(red / 40)}"
    features = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    given_ = outputs(features, data.unseen.labels, data=data)
    measure(given_, [{"name": "few-shot", "ways": 2, "shots": 1, "queries": 2, "episodes": 3, "classifier": "nearest"}])
    assert given_.artefacts["few-shot/episodes/query"].shape == (2, 2, 2, 3, 12, 12)


def test_missing_and_bad_files_of_mini_imagenet_name_themselves(tmp_path):
    with pytest.raises(DataError, match=r"mini-imagenet was not found(.|\n)*meta-learning-lstm(.|\n)*train.csv"):
        load("mini-imagenet", tmp_path)
    folder = tmp_path / "mini-imagenet"
    write_mini_imagenet(folder)
    (folder / "images" / "n500000001.jpg").unlink()
    with pytest.raises(DataError, match=r"images/n500000001.jpg is missing, which .*test.csv, line 3, names"):
        load("mini-imagenet", tmp_path)
    for content, message in [
        ("filename,label\nn400000000.jpg\n", "val.csv, line 2: expected a file and its class, got 'n400000000.jpg'"),
        ("n400000000.jpg,n4\n", "val.csv must begin with the line 'filename,label'"),
        ("", "val.csv must begin with the line"),
        ("filename,label\nn400000000.jpg,n1\n", "val.csv has the class 'n1', which train.csv has, too"),
    ]:
        (folder / "images" / "n500000001.jpg").touch()
        (folder / "val.csv").write_text(content)
        with pytest.raises(DataError, match=message):
            load("mini-imagenet", tmp_path)


# ------------------------------------------------------------------------------------------------------ recipes


def test_there_are_recipes_for_both_baselines_and_both_with_rotations():
    sets = {"cifar100-few-shot", "omniglot-few-shot", "mini-imagenet-few-shot"}
    assert {f"{name}-{kind}" for name in sets for kind in ("baseline", "baseline-pp", "opt", "opt-pp")} < set(RECIPES)
    for name in RECIPES:
        plan = recipe.load(name)
        episodes = next(part for part in plan.evaluate.metrics if getattr(part, "name", part) == "few-shot")
        wanted = "baseline" if plan.loss.name == "softmax" else "baseline++"
        assert episodes.options["classifier"] == wanted, name
        assert (plan.orthogonal is not None) == ("-opt" in name), name


def test_free_norms_of_class_weights_make_up_for_a_small_scale():
    head = losses.create("margin-softmax", 64, 64, s=2, unit_weights=False)  # a warning here would be an error
    with torch.no_grad():
        head.weight.copy_(6 * torch.eye(64))
        probabilities = head.logits(0.1 * torch.eye(64)).softmax(1).diagonal()
    torch.testing.assert_close(probabilities, torch.full((64,), math.exp(12) / (math.exp(12) + 63)))
    with pytest.warns(UserWarning, match="s = 2 cannot give a class of 64 more than"):
        losses.create("s-softmax", 64, 64, s=2)


def test_accuracies_are_named_by_their_shots():
    names = ("few_shot_5", "few_shot_5_interval", "few_shot_nearest_1", "few_shot_nearest_1_interval")
    titles = [evaluations.metric(name).title for name in names]
    assert titles[:2] == ["5-shot accuracy", "5-shot accuracy, interval"]
    assert titles[2:] == ["1-shot accuracy, nearest mean", "1-shot accuracy, nearest mean, interval"]


@pytest.mark.slow
def test_the_digits_recipe_is_far_above_chance(tmp_path):
    plan = recipe.load("digits-few-shot", ["train.tensorboard=false"])
    device = torch.device("cpu")
    found = Trainer(plan, RunFolder.create(tmp_path / "run", plan, device), device).fit()
    assert found["accuracy"] > 0.97
    assert 0.35 < found["few_shot_1"] < found["few_shot_5"] and found["few_shot_5"] > 0.55
