"""Pictures of classes and layers: confusion, class sizes and learned parameters are those of the run."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from hypersphere import plot
from hypersphere.cli.commands import app
from hypersphere.drawing import colour
from hypersphere.errors import ArgumentError
from hypersphere.metrics import confusion_matrix
from hypersphere.runs import RunError, load, load_with_data

TINY = ["train.steps=6", "train.log_every=2", "train.tensorboard=false", "data.batch_size=32"]


def write_run(folder, *, name="a run", class_names=(), **tensors):
    """An evaluated run with these tensors; features and labels, where none are given, are two points of two classes."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("loss: {name: softmax}\n")
    (folder / "run.json").write_text(json.dumps({"name": name}))
    (folder / "metrics.jsonl").write_text("")
    tensors = {"features": np.eye(2, dtype=np.float32), "labels": np.arange(2)} | tensors
    save_file(tensors, folder / "features.safetensors", metadata={"class_names": json.dumps(list(class_names))})
    return folder


def with_answers(folder, labels, predictions, **options):
    features = np.random.default_rng(0).normal(size=(len(labels), 3)).astype(np.float32)
    return write_run(folder, features=features, labels=np.array(labels), predictions=np.array(predictions), **options)


def trained(tmp_path_factory, recipe, *overrides):
    folder = tmp_path_factory.mktemp("runs") / "one"
    arguments = ["train", recipe, *TINY, *overrides, "--folder", str(folder), "--device", "cpu"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def imbalanced(tmp_path_factory):
    """A finished tiny run of digits of which class k has 10 (k + 1) images, with a bias of each class."""
    overrides = ["data.imbalance.graded=10", "loss.bias=true", "model.width=4"]
    return trained(tmp_path_factory, "digits-softmax", *overrides)


@pytest.fixture(scope="module")
def spherenet(tmp_path_factory):
    """A finished tiny run with a steepness for each kernel."""
    return trained(tmp_path_factory, "digits-spherenet")


def command(*arguments):
    return CliRunner().invoke(app, ["plot", *map(str, arguments)])


def failure(*arguments):
    done = command(*arguments)
    assert done.exit_code != 0
    return str(done.exception)


# ----------------------------------------------------------------------------------------------- confusion


def image_of(axes):
    (image,) = axes.images
    return np.ma.filled(np.ma.asarray(image.get_array(), dtype=float), np.nan)


def test_counts():
    labels, predictions = torch.randint(5, (200,)), torch.randint(5, (200,))
    expected = [[sum(int(y == i and p == j) for y, p in zip(labels, predictions, strict=True)) for j in range(5)]
                for i in range(5)]  # fmt: skip
    assert confusion_matrix(predictions, labels, 5).tolist() == expected
    assert confusion_matrix(labels[:0], labels[:0], 2).tolist() == [[0, 0], [0, 0]]
    with pytest.raises(ArgumentError, match=r"predictions must be in \[0, 4\), got 0 to 4"):
        confusion_matrix(torch.tensor([0, 4]), torch.tensor([0, 1]), 4)
    with pytest.raises(ArgumentError, match=r"labels must be in \[0, 4\), got -1 to 1"):
        confusion_matrix(torch.tensor([0, 1]), torch.tensor([-1, 1]), 4)
    with pytest.raises(ArgumentError, match=r"equally long vectors, got \(2,\) and \(3,\)"):
        confusion_matrix(torch.zeros(2).long(), torch.zeros(3).long(), 4)
    with pytest.raises(ArgumentError, match="classes must be at least 1, got 0"):
        confusion_matrix(labels, labels, 0)


def test_confusion(tmp_path):
    one = with_answers(tmp_path / "one", [0, 0, 0, 0, 1, 1], [0, 0, 0, 2, 1, 0], name="x", class_names=["a", "b", "c"])
    two = with_answers(tmp_path / "two", [0, 1, 2, 2], [0, 1, 2, 0], name="x", class_names=["a", "b", "c"])
    left, right, bar = plot.confusion([one, two]).axes
    assert np.allclose(image_of(left), [[75, 0, 25], [50, 50, 0], [np.nan] * 3], equal_nan=True)  # c has no samples
    assert np.allclose(image_of(right), [[100, 0, 0], [0, 100, 0], [50, 0, 50]])
    assert left.images[0].norm.vmin == 0 and left.images[0].norm.vmax == 100 and right.images[0].norm.vmax == 100
    assert left.get_title() == "one\nerror 33.33 % of 6" and right.get_title() == "two\nerror 25.00 % of 4"
    assert [text.get_text() for text in left.get_yticklabels()] == ["a", "b", "c"]
    assert sorted(text.get_text() for text in left.texts) == ["25.0", "50.0", "50.0", "75.0"]
    assert (left.get_xlabel(), left.get_ylabel(), bar.get_ylabel()) == (
        "taken for",
        "true class",
        "share of the class (%)",
    )


def test_confusion_without_right_answers(tmp_path):
    one = with_answers(tmp_path / "one", [0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0], name="x")
    right = with_answers(tmp_path / "two", [0, 1], [0, 1], name="y")
    axes = plot.confusion([one, right], hide_diagonal=True).axes
    assert np.allclose(image_of(axes[0]), [[np.nan, 25], [50, np.nan]], equal_nan=True)
    assert axes[0].images[0].norm.vmax == 50 == axes[1].images[0].norm.vmax  # that of mistakes
    assert axes[0].get_title() == "x\nerror 33.33 % of 6"
    alone = plot.confusion([right], hide_diagonal=True)
    assert np.isfinite(alone.axes[0].images[0].norm.vmax) and not alone.axes[0].texts
    plot.save(alone, tmp_path / "alone.png")


def test_cosines_of_classes(tmp_path):
    rng = np.random.default_rng(1)
    vectors, labels = rng.normal(size=(30, 4)).astype(np.float32), np.arange(30) % 3
    axes = plot.confusion([write_run(tmp_path / "one", features=vectors, labels=labels)], measure="cosines").axes[0]
    units = vectors.astype(float) / np.linalg.norm(vectors.astype(float), axis=1, keepdims=True)
    expected = np.zeros((3, 3))
    for i, j in np.ndindex(3, 3):
        cosines = units[labels == i] @ units[labels == j].T
        expected[i, j] = cosines[~np.eye(10, dtype=bool)].mean() if i == j else cosines.mean()
    assert np.allclose(image_of(axes), expected, atol=1e-6)
    own, other = np.diag(expected).mean(), expected[~np.eye(3, dtype=bool)].mean()
    minus = "\N{MINUS SIGN}"
    assert axes.get_title() == f"a run\nown class {own:.2f}, others {other:.2f}".replace("-", minus)


def test_many_classes_are_a_plain_image(tmp_path):
    labels = np.arange(300) % 100
    figure = plot.confusion([with_answers(tmp_path / "one", labels, (labels + (np.arange(300) < 100)) % 100)])
    axes = figure.axes[0]
    assert image_of(axes).shape == (100, 100) and not axes.texts
    assert np.allclose(np.diag(image_of(axes)), 200 / 3)
    plot.save(figure, tmp_path / "x.png")


def test_confusion_of_a_run(imbalanced, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    system, data = load_with_data(imbalanced)
    images, labels = data.test.images, data.test.labels
    taken = system(images).argmax(1)
    expected = np.array([[(taken[labels == i] == j).double().mean() for j in range(7)] for i in range(7)])
    assert np.allclose(image_of(plot.confusion([imbalanced]).axes[0]), 100 * expected)
    assert command("confusion", imbalanced).output == f"Wrote {imbalanced / 'confusion.png'}\n"
    options = ("--hide-diagonal", "--measure", "cosines", "-o", "x.svg")
    assert command("confusion", imbalanced, imbalanced, *options).output == "Wrote x.svg\n"
    assert "measure must be one of" in failure("confusion", imbalanced, "--measure", "counts").replace("'", "")


def test_confusion_of_older_evaluations(tmp_path):
    with pytest.raises(RunError, match=r"one has no predictions of the test split: `hypersphere evaluate .*one` makes"):
        plot.confusion([write_run(tmp_path / "one")])
    (tmp_path / "one" / "features.safetensors").unlink()
    with pytest.raises(RunError, match=r"one has no test features: `hypersphere evaluate .*one` makes them"):
        plot.confusion([tmp_path / "one"])
    with pytest.raises(ArgumentError, match="runs must be at least one folder of a run, got none"):
        plot.confusion([])


# --------------------------------------------------------------------------------------------- class sizes


def points_of(axes, index=0):
    (found,) = [part for part in axes.collections if to_hex(part.get_facecolor()[0]) == colour(index)]
    return np.asarray(found.get_offsets())


def legend_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_class_size(tmp_path):
    weights = np.array([[3.0, 4.0], [0.0, 2.0], [1.0, 0.0]], dtype=np.float32)
    counts, bias = np.array([10, 200, 30]), np.array([-1.0, 0.5, 0.25], dtype=np.float32)
    one = write_run(tmp_path / "one", name="x", centres=weights, class_counts=counts, bias=bias, class_names="abc")
    two = write_run(tmp_path / "two", name="y", centres=2 * weights[::-1].copy(), class_counts=counts)
    norm, offset = plot.class_size([one, two]).axes
    assert np.allclose(points_of(norm), [[10, 5], [200, 2], [30, 1]])
    assert np.allclose(points_of(norm, 1), [[10, 2], [200, 4], [30, 10]])
    assert np.allclose(points_of(offset), [[10, -1], [200, 0.5], [30, 0.25]]) and len(offset.collections) == 1
    texts = [correlation(counts, values) for values in ([5, 2, 1], [2, 4, 10], bias)]
    assert legend_of(norm) == [f"x: r = {texts[0]}", f"y: r = {texts[1]}"] and legend_of(offset) == [
        f"x: r = {texts[2]}"
    ]
    assert norm.get_xscale() == "log" and not norm.texts
    (alone,) = plot.class_size([two]).axes
    assert [text.get_text() for text in alone.texts] == ["class 0", "class 1", "class 2"]


def correlation(x, y):
    return f"{np.corrcoef(x, y)[0, 1]:.2f}".replace("-", "\N{MINUS SIGN}")


def test_equal_norms_have_no_correlation(tmp_path):
    weights, counts = np.eye(3, dtype=np.float32), np.array([1, 5, 9])
    one = write_run(tmp_path / "one", centres=weights, class_counts=counts, bias=np.zeros(3, dtype=np.float32))
    figure = plot.class_size([one])
    assert [legend_of(axes) for axes in figure.axes] == [["a run: r = undefined"]] * 2
    plot.save(figure, tmp_path / "x.png")


def test_class_size_of_a_run(imbalanced, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    head = load(imbalanced).head
    norm, offset = plot.class_size([imbalanced]).axes
    sizes = 10 * np.arange(1, 8)
    assert np.allclose(points_of(norm), np.stack([sizes, head.weight.detach().norm(dim=1)], 1), atol=1e-5)
    assert np.allclose(points_of(offset), np.stack([sizes, head.bias.detach()], 1), atol=1e-6)
    assert head.bias.detach().abs().max() > 0
    assert command("class-size", imbalanced).output == f"Wrote {imbalanced / 'class_size.png'}\n"
    assert command("class-size", imbalanced, imbalanced).output == "Wrote class_size.png\n"


def test_class_size_needs_sizes_that_differ(tmp_path):
    weights = np.eye(2, dtype=np.float32)
    same = write_run(tmp_path / "same", centres=weights, class_counts=np.array([1000, 1000]))
    with pytest.raises(RunError, match=r"same has 1,000 training images of every class: .*data\.imbalance"):
        plot.class_size([same])
    older = write_run(tmp_path / "older", centres=weights)
    with pytest.raises(RunError, match=r"older has no numbers of training images: `hypersphere evaluate"):
        plot.class_size([older])
    other = write_run(tmp_path / "other", centres=weights, class_counts=np.array([1, 2, 3]))
    with pytest.raises(RunError, match="other has 2 class vectors of 3 classes"):
        plot.class_size([other])


# ------------------------------------------------------------------------------------------------- learned


def heights(axes):
    return axes.patches[0].get_data()


def test_learned(tmp_path):
    k = {"first": np.array([0.1, 0.1, 0.3, 0.9]), "second": np.array([0.5])}
    radius = {"second": np.array([1.0, 3.0])}
    tensors = {f"k/0000{place}/{name}": v.astype(np.float32) for place, (name, v) in enumerate(k.items())}
    tensors |= {f"radius/0000{place}/{name}": v.astype(np.float32) for place, (name, v) in enumerate(radius.items(), 1)}
    folder = write_run(tmp_path / "one", **tensors)
    figure = plot.learned(folder, bins=8)
    first, second, below = figure.axes
    edges = heights(first).edges
    assert np.allclose(edges, np.linspace(0.1 - 0.016, 0.9 + 0.016, 9)) and np.allclose(heights(second).edges, edges)
    assert np.allclose(heights(first).values, [50, 0, 25, 0, 0, 0, 0, 25])
    assert heights(second).values.sum() == pytest.approx(100) and heights(below).values.sum() == pytest.approx(100)
    assert (
        first.get_title(loc="left") == "first (4)\nmean 0.35, sd 0.33"
        and below.get_title(loc="left")[:10] == "second (2)"
    )
    assert first.lines[0].get_xdata() == pytest.approx([0.35, 0.35])
    assert first.get_ylim() == second.get_ylim() and first.get_ylim()[1] >= 100
    plot.save(figure, tmp_path / "x.png")
    (only,) = plot.learned(folder, layers=["fir*"]).axes
    assert only.get_title(loc="left").startswith("first (4)")
    with pytest.raises(
        ArgumentError, match=r"layers has 'firts', no layer\. Did you mean 'first'\? Layers: first, second"
    ):
        plot.learned(folder, layers=["firts"])
    with pytest.raises(ArgumentError, match="bins must be at least 1, got 0"):
        plot.learned(folder, bins=0)


def test_learned_of_a_run(spherenet, tmp_path):
    model = load(spherenet).model
    expected = {
        name: layer.k.detach().numpy()
        for name, layer in model.named_modules()
        if getattr(layer, "k_raw", None) is not None
    }
    assert len(expected) > 2

    def check():
        panels = plot.learned(spherenet).axes
        assert [axes.get_title(loc="left").split(" ")[0] for axes in panels] == list(expected)
        for axes, values in zip(panels, expected.values(), strict=True):
            counts = np.histogram(values, bins=heights(axes).edges)[0]
            assert np.allclose(heights(axes).values, 100 * counts / len(values))

    check()
    assert command("learned", spherenet, "-o", tmp_path / "x.svg").exit_code == 0
    stored = load_file(spherenet / "features.safetensors")
    assert sum(name.startswith("k/") for name in stored) == len(expected)
    features = (spherenet / "features.safetensors").rename(tmp_path / "features.safetensors")
    check()  # of the checkpoint
    features.rename(spherenet / "features.safetensors")


def test_what_learned_nothing(imbalanced):
    assert "has learned no steepness and no radius: train it with convert.learn_k=filter" in failure(
        "learned", imbalanced
    )
