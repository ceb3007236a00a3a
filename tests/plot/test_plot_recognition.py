"""Recognition curves: numbers of a plain computation over all probes and pairs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from safetensors.numpy import save_file
from typer.testing import CliRunner

from hypersphere import plot
from hypersphere.cli.commands import app
from hypersphere.drawing import colour
from hypersphere.errors import ArgumentError
from hypersphere.plot import rates
from hypersphere.runs import RunError


def cloud(classes=6, each=12, noise=0.8, dim=4, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(classes), each))
    vectors = rng.normal(size=(classes, dim))[labels] + noise * rng.normal(size=(len(labels), dim))
    return vectors.astype(np.float32), labels


def write_run(folder, test, unseen=None, name="a run"):
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("loss: {name: arcface}\n")
    (folder / "run.json").write_text(json.dumps({"name": name}))
    (folder / "metrics.jsonl").write_text("")
    tensors = {"features": test[0], "labels": test[1]}
    if unseen is not None:
        tensors |= {"unseen_features": unseen[0], "unseen_labels": unseen[1]}
    save_file(tensors, folder / "features.safetensors", metadata={"class_names": "[]", "unseen_names": "[]"})
    return folder


def plain_curves(vectors, labels, gallery):
    """CMC by sorting, and FAR and TAR by counting pairs at every threshold."""
    units = vectors.astype(float) / np.linalg.norm(vectors.astype(float), axis=1, keepdims=True)
    enrolled = [i for i, y in enumerate(labels) if (labels[:i] == y).sum() < gallery]
    ranks = []
    for i in (i for i in range(len(labels)) if i not in enrolled):
        scores = {j: float(units[i] @ units[j]) for j in enrolled}
        mate = max(s for j, s in scores.items() if labels[j] == labels[i])
        ranks.append(1 + sum(s > mate for j, s in scores.items() if labels[j] != labels[i]))
    cmc = [np.mean([rank <= r for rank in ranks]) for r in range(1, len(enrolled) + 1)]
    first, second = np.triu_indices(len(labels), 1)
    scores, same = (units[first] * units[second]).sum(1), labels[first] == labels[second]
    return np.array(cmc), scores[same], scores[~same]


@pytest.mark.parametrize("gallery", [1, 3])
def test_curves(gallery):
    vectors, labels = cloud()
    found = plot.recognition_curves(torch.from_numpy(vectors), torch.from_numpy(labels), gallery=gallery)
    cmc, genuine, impostors = plain_curves(vectors, labels, gallery)
    assert np.allclose(found.cmc, cmc) and 0 < cmc[0] < 1
    assert (found.probes, found.size, found.pairs) == (72 - 6 * gallery, 6 * gallery, 72 * 71 // 2)
    assert found.far[0] == pytest.approx(10 / len(impostors)) and found.far[-1] == 1
    for far, tar in list(zip(found.far, found.tar, strict=True))[::37]:
        allowed = int(far * len(impostors) * (1 + 1e-9))
        # The lowest threshold that lets at most so many impostors through: just above the next one.
        threshold = np.sort(impostors)[::-1][allowed] if allowed < len(impostors) else -2
        assert tar == pytest.approx((genuine > threshold + 1e-6).mean(), abs=1.5 / len(genuine))
    assert (np.diff(found.tar) >= 0).all() and found.tar[-1] == 1
    errors = [abs((impostors >= t).mean() - (genuine < t).mean()) for t in genuine]
    t = genuine[int(np.argmin(errors))]
    assert found.eer == pytest.approx((impostors >= t).mean(), abs=0.02)


def test_a_share_of_the_samples():
    vectors, labels = cloud(each=40)
    found = plot.recognition_curves(torch.from_numpy(vectors), torch.from_numpy(labels), samples=60)
    assert found.pairs == 60 * 59 // 2 and found.probes == 6 * 39
    for name, options in (("gallery", {"gallery": 0}), ("samples", {"samples": 1})):
        with pytest.raises(ArgumentError, match=f"{name} must be at least"):
            plot.recognition_curves(torch.from_numpy(vectors), torch.from_numpy(labels), **options)


def line(axes, index):
    (found,) = [one for one in axes.lines if to_hex(one.get_color()) == colour(index)]
    return found


def test_runs_in_one_picture(tmp_path):
    test, unseen = cloud(seed=1, classes=30, each=4), cloud(seed=2, noise=0.5)
    one = write_run(tmp_path / "one", test, unseen, "x")
    two = write_run(tmp_path / "two", cloud(seed=3), cloud(seed=4), "y")
    left, right = plot.recognition([one, two]).axes
    expected = plot.recognition_curves(*(torch.from_numpy(part) for part in unseen))
    x, y = line(left, 0).get_data()
    assert list(x) == [1, 2, 3, 4, 5, 6] and np.allclose(y, 100 * expected.cmc)
    x, y = line(right, 0).get_data()
    assert (
        np.allclose(x, expected.far) and np.allclose(y, 100 * expected.tar, atol=1e-3) and right.get_xscale() == "log"
    )
    texts = [text.get_text() for axes in (left, right) for text in axes.get_legend().get_texts()]
    assert texts[0] == f"x: rank 1 {100 * expected.cmc[0]:.2f} %" and texts[1].startswith("y: rank 1 ")
    assert texts[2] == f"x: EER {100 * expected.eer:.2f} %"
    assert left.get_title(loc="left") == "(a) CMC, unseen classes: 66 probes in a gallery of 6"
    left, right = plot.recognition([one, two], split="test").axes
    assert left.get_title(loc="left") == "(a) CMC, test split: different numbers of probes"
    assert left.get_xscale() == "log" and len(line(left, 0).get_xdata()) == 30  # beyond those that are marked
    assert rates.MARKED < 30 and line(left, 0).get_marker() == "None" and line(left, 1).get_marker() == "o"
    # A run without unseen classes: the test split of all.
    three = write_run(tmp_path / "three", cloud(seed=5), name="z")
    assert "test split" in plot.recognition([one, three]).axes[0].get_title(loc="left")
    with pytest.raises(RunError, match=r"three has no unseen classes: train it with data\.hold_out"):
        plot.recognition([three], split="unseen")


def test_splits_that_cannot_be_recognised(tmp_path):
    vectors, labels = cloud()
    single = write_run(tmp_path / "single", (vectors, 0 * labels))
    with pytest.raises(RunError, match="single has 1 classes of at most 72 features in this split"):
        plot.recognition([single])
    few = write_run(tmp_path / "few", (vectors[:6], np.arange(6)))
    with pytest.raises(RunError, match="one of more than the 1 that are enrolled"):
        plot.recognition([few])
    with pytest.raises(ArgumentError, match="split must be"):
        plot.recognition([few], split="train")


def test_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = write_run(tmp_path / "one", cloud(), cloud(seed=2))

    def command(*arguments):
        return CliRunner().invoke(app, ["plot", "recognition", *map(str, arguments)])

    assert command(one).output == f"Wrote {one / 'recognition.png'}\n"
    done = command(one, one, "--split", "test", "--gallery", 2, "--samples", 50, "-o", "x.svg")
    assert done.output == "Wrote x.svg\n"
    assert "60 probes in a gallery of 12" in (tmp_path / "x.svg").read_text()
