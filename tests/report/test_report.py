"""The run report as text: numbers in it against the run's files and against independent computations."""

import json
import re
from itertools import combinations

import numpy as np
import pytest
from plotly.offline import get_plotlyjs
from safetensors.numpy import load_file, save_file

from helpers.pages import TIGHTNESS, Page, make_run
from hypersphere import report
from hypersphere.drawing import pair_angles
from hypersphere.errors import HypersphereError
from hypersphere.runs import RunError


@pytest.fixture
def runs(tmp_path):
    return [make_run(tmp_path, loss) for loss in TIGHTNESS]


def load(folder):
    return load_file(folder / "features.safetensors")


def test_summary_shows_the_results_and_marks_the_best(runs):
    page = Page(report.build(runs))
    assert page.rows[1] == ["digits-softmax", "softmax", "95.12%", "24.3°", "41.5°", "21.04%", "0.5871"]
    assert page.rows[2] == ["digits-sphereface", "sphereface", "97.31%", "15.0°", "50.2°", "15.63%", "0.5512"]
    assert page.rows[3] == ["digits-arcface", "arcface", "97.31%", "9.5°", "48.9°", "11.88%", "0.5329"]
    sphereface = [("digits-sphereface", value) for value in ("97.31%", "50.2°")]
    arcface = [("digits-arcface", value) for value in ("97.31%", "9.5°", "11.88%", "0.5329")]
    assert sorted(page.best) == sorted(sphereface + arcface)


def test_a_single_run_marks_nothing(runs):
    page = Page(report.build(runs[:1]))
    assert not page.best
    assert "Run report: digits-softmax" in page.text


def test_page_loads_nothing_from_outside(runs):
    page = Page(report.build(runs))
    assert page.addresses == ["data:,"]
    assert not page.tags & {"iframe", "img", "object", "embed"}
    own = page.source.replace(get_plotlyjs(), "")
    assert page.source.count(get_plotlyjs()) == 1
    assert "http" not in own and "@import" not in own and "url(" not in own
    assert str(runs[0].parent) not in own


def test_sphere_draws_unit_features_by_class(runs):
    tensors = load(runs[1])
    figure = Page(report.build(runs)).of_kind("sphere")[1]
    units = tensors["features"] / np.linalg.norm(tensors["features"], axis=1, keepdims=True)
    for label in range(7):
        dots, weight = (t for t in figure["data"] if t.get("legendgroup") == str(label))
        members = np.flatnonzero(tensors["labels"] == label)
        assert dots["name"] == weight["name"] == f"digit {label}"
        assert [row[0] for row in dots["customdata"]] == members.tolist()
        np.testing.assert_allclose(np.stack([dots[a] for a in "xyz"], axis=1), units[members], atol=1e-4)
        centre = units[members].mean(axis=0)
        cosines = units[members] @ centre / np.linalg.norm(centre)
        norms = np.linalg.norm(tensors["features"][members], axis=1)
        expected = np.stack([norms, np.degrees(np.arccos(cosines))], axis=1)
        np.testing.assert_allclose([row[1:] for row in dots["customdata"]], expected, rtol=1e-2)
        np.testing.assert_allclose([weight[a][1] for a in "xyz"], 1.12 * tensors["centres"][label], atol=1e-3)


def test_spheres_share_one_camera(runs):
    first, *others = Page(report.build(runs)).of_kind("sphere")
    assert len(others) == 2
    assert all(figure["layout"]["scene"] == first["layout"]["scene"] for figure in others)


def test_many_features_are_thinned_the_same_way_every_time(tmp_path):
    run = make_run(tmp_path, "softmax", per_class=400)
    page = Page(report.build([run]))
    dots = [t for t in page.of_kind("sphere")[0]["data"] if t.get("mode") == "markers"]
    assert [len(t["x"]) for t in dots] == [2000 // 7] * 7
    assert f"{2000 // 7 * 7} of 2800 features are drawn" in page.text
    assert page.source == report.build([run])


def test_two_dimensions_are_drawn_as_they_are(tmp_path):
    run = make_run(tmp_path, "arcface", dim=2)
    tensors, page = load(run), Page(report.build([run]))
    figure = page.of_kind("sphere")[0]
    dots = next(t for t in figure["data"] if t.get("legendgroup") == "3")
    members = tensors["labels"] == 3
    assert dots["type"] == "scatter" and "scene" not in figure["layout"]
    np.testing.assert_allclose(np.stack([dots["x"], dots["y"]], axis=1), tensors["features"][members], rtol=1e-3)
    assert "2-D features as they are" in page.text


def test_many_dimensions_are_projected_and_said_so(tmp_path):
    run = make_run(tmp_path, "arcface", dim=16)
    tensors, page = load(run), Page(report.build([run]))
    units = tensors["features"] / np.linalg.norm(tensors["features"], axis=1, keepdims=True)
    _, singular, axes = np.linalg.svd(units, full_matrices=False)
    kept = (singular[:3] ** 2).sum() / (singular**2).sum()
    assert f"The 16-D unit features on their first 3 principal axes, which keep {kept:.0%} of the variance" in page.text
    expected = units[tensors["labels"] == 2] @ axes[:3].T
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    dots = next(t for t in page.of_kind("sphere")[0]["data"] if t.get("legendgroup") == "2")
    drawn = np.stack([dots[a] for a in "xyz"], axis=1)
    np.testing.assert_allclose(np.abs(drawn), np.abs(expected), atol=2e-3)  # axes have no sign of their own
    np.testing.assert_allclose(drawn @ drawn.T, expected @ expected.T, atol=5e-3)


def test_more_classes_than_can_be_told_apart(tmp_path):
    page = Page(report.build([make_run(tmp_path, "softmax", dim=16, classes=30, per_class=5)]))
    names = [t["name"] for t in page.of_kind("sphere")[0]["data"] if t.get("mode") == "markers"]
    assert names == [f"digit {i}" for i in range(20)]
    assert "The first 20 of 30 classes are shown" in page.text


def test_centre_histogram_against_a_plain_computation(runs):
    tensors = load(runs[0])
    units = tensors["features"].astype(float)
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    centres = []
    for label in range(7):
        mean = units[tensors["labels"] == label].mean(axis=0)
        centres.append(mean / np.linalg.norm(mean))
    own, other = [], []
    for vector, label in zip(units, tensors["labels"], strict=True):
        angles = [np.degrees(np.arccos(vector @ centre)) for centre in centres]
        own.append(angles.pop(label))
        other.append(min(angles))
    page = Page(report.build(runs))
    traces = page.of_kind("histogram")[0]["data"]
    assert [t["name"] for t in traces] == ["own centre", "nearest other centre"]
    for trace, angles in zip(traces, (own, other), strict=True):
        counts, _ = np.histogram(angles, bins=90, range=(0, 180))
        assert (trace["x0"], trace["dx"]) == (1, 2)
        np.testing.assert_allclose(trace["y"], 100 * counts / len(units), rtol=1e-3)
    assert f"own centre {np.mean(own):.1f}°, nearest other centre {np.mean(other):.1f}°" in page.text


def test_pair_histogram_against_a_plain_computation(runs):
    tensors = load(runs[2])
    units = tensors["unseen_features"].astype(float)
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    labels = tensors["unseen_labels"]
    angles = {True: [], False: []}
    for i, j in combinations(range(len(units)), 2):
        angles[bool(labels[i] == labels[j])].append(np.degrees(np.arccos(units[i] @ units[j])))
    genuine, impostor = Page(report.build(runs)).of_kind("histogram")[5]["data"]
    assert genuine["name"] == "genuine pairs" and impostor["name"] == "impostor pairs"
    for trace, same in ((genuine, True), (impostor, False)):
        counts, _ = np.histogram(angles[same], bins=90, range=(0, 180))
        np.testing.assert_allclose(trace["y"], 100 * counts / len(angles[same]), rtol=1e-3)


def test_histograms_of_runs_share_their_axes(runs):
    layouts = [figure["layout"] for figure in Page(report.build(runs)).of_kind("histogram")[:3]]
    assert layouts[0] == layouts[1] == layouts[2]


@pytest.mark.parametrize(("classes", "each"), [(3, 2000), (2000, 3)])
def test_pairs_are_capped_and_keep_genuine_ones(classes, each):
    labels = np.repeat(np.arange(classes), each)
    genuine, impostor = pair_angles(np.random.default_rng(0).normal(size=(len(labels), 4)), labels, limit=100)
    assert len(genuine) + len(impostor) <= 100 * 99 / 2
    assert len(genuine) >= 30 and len(impostor) >= 30


def test_no_unseen_classes_and_a_single_class(tmp_path):
    page = Page(report.build([make_run(tmp_path, "softmax", classes=1, unseen=0)]))
    (histogram,) = page.of_kind("histogram")
    assert not any(histogram["data"][1]["y"])
    assert "never trained on: genuine" not in page.text


def test_curves_show_terms_apart_with_all_runs(runs):
    page = Page(report.build(runs))
    for title in ("Total loss", "Loss term: loss", "Loss term: mhe", "Test accuracy (%)", "Learning rate"):
        assert title in page.text
    rows = [json.loads(line) for line in (runs[1] / "metrics.jsonl").read_text().splitlines()]
    total, _, mhe, accuracy = page.of_kind("curve")[:4]
    assert [t["name"] for t in total["data"]] == ["digits-softmax", "digits-sphereface", "digits-arcface"]
    train = [row for row in rows if row["split"] == "train"]
    assert mhe["data"][1]["x"] == [row["step"] for row in train]
    np.testing.assert_allclose(mhe["data"][1]["y"], [row["mhe"] for row in train], rtol=1e-4)
    expected = [100 * row["accuracy"] for row in rows if row["split"] == "test"]
    np.testing.assert_allclose(accuracy["data"][1]["y"], expected, rtol=1e-4)
    colors = [[t["line"]["color"] for t in figure["data"]] for figure in page.of_kind("curve")]
    assert all(c == colors[0] for c in colors) and len(set(colors[0])) == 3


@pytest.mark.parametrize(
    ("row", "titles"),
    [
        ({"total": 1.0, "loss": 1.0}, {"Total loss"}),
        ({"loss": 1.0}, {"Loss term: loss"}),
        ({"total": 1.0, "loss": 0.9, "mhe": 0.1}, {"Total loss", "Loss term: loss", "Loss term: mhe"}),
    ],
)
def test_single_term_is_not_drawn_beside_the_same_total(tmp_path, row, titles):
    run = make_run(tmp_path, "softmax", evaluated=False)
    (run / "metrics.jsonl").write_text(json.dumps({"step": 20, "split": "train"} | row) + "\n")
    page = Page(report.build([run]))
    assert set(re.findall(r"Total loss|Loss term: \w+", page.text)) == titles
    assert all(figure["data"][0]["mode"] == "markers" for figure in page.of_kind("curve"))  # one point has no line


def test_run_that_is_not_evaluated_gets_its_curves(tmp_path):
    page = Page(report.build([make_run(tmp_path, "softmax", evaluated=False)]))
    assert page.of_kind("curve") and not page.of_kind("sphere") and not page.of_kind("histogram")
    assert page.rows[1] == ["digits-softmax", "softmax"]


def test_unfinished_last_line_is_ignored(tmp_path):
    run = make_run(tmp_path, "softmax", evaluated=False)
    whole = report.build([run])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 620, "split": "tra')
    assert report.build([run]) == whole


def test_diverged_run(tmp_path):
    run = make_run(tmp_path, "softmax")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 620, "split": "train", "total": NaN, "loss": Infinity, "mhe": 0.1}\n')
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(facts | {"status": "diverged"}))
    (run / "evaluation.json").write_text('{"step": 620, "metrics": {"accuracy": NaN}}')
    tensors = load(run)
    save_file(tensors | {"features": np.full_like(tensors["features"], np.nan)}, run / "features.safetensors")
    page = Page(report.build([run]))
    assert page.of_kind("curve")[0]["data"][0]["y"][-1] is None
    assert page.rows[1][:3] == ["digits-softmax diverged", "softmax", "—"]
    assert not page.of_kind("sphere")


def test_run_facts_and_recipe_are_shown(runs):
    page = Page(report.build(runs))
    assert ["recipe hash", "3fb1c0de"] in page.rows and ["torch", "2.13.0"] in page.rows
    assert (runs[0] / "recipe.yaml").read_text() in page.text


def test_same_name_is_told_apart_by_folder(tmp_path):
    both = [make_run(tmp_path, "softmax", name="mnist", folder=folder, evaluated=False) for folder in ("a", "b")]
    assert [row[0] for row in Page(report.build(both)).rows[1:3]] == ["mnist (a)", "mnist (b)"]


def test_names_from_files_are_not_markup(tmp_path):
    evil = "</script><script>alert(1)</script>"
    run = make_run(tmp_path, "softmax", name=evil, class_names=[f"{evil}{i}" for i in range(7)])
    (run / "recipe.yaml").write_text(json.dumps({"help": evil, "loss": {"name": "<img src=x onerror=alert(1)>"}}))
    page = Page(report.build([run]))
    assert "<script>alert(1)" not in page.source and "<img" not in page.source.replace(get_plotlyjs(), "")
    assert page.rows[1][:2] == [evil, "<img src=x onerror=alert(1)>"]
    names = [t["name"] for t in page.of_kind("sphere")[0]["data"] if t.get("mode") == "markers"]
    assert all("<" not in name for name in names)


@pytest.mark.parametrize("missing", ["recipe.yaml", "run.json", "metrics.jsonl"])
def test_missing_file_is_named(tmp_path, missing):
    run = make_run(tmp_path, "softmax")
    (run / missing).unlink()
    with pytest.raises(RunError, match=rf"softmax has no {missing}.*give a folder"):
        report.build([run])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", "{", "run.json is not valid JSON"),
        ("evaluation.json", "[1]", "evaluation.json must hold a JSON object, got list"),
        ("recipe.yaml", "a: [", "recipe.yaml is not valid YAML"),
        ("metrics.jsonl", '{"step"\n{"step": 1}\n', "metrics.jsonl, line 1 is not valid JSON"),
        ("metrics.jsonl", '{"total": 1}\n', "metrics.jsonl, line 1 is not an object with a step"),
        ("features.safetensors", "nonsense", "features.safetensors cannot be read.*evaluate the run again"),
    ],
)
def test_damaged_file_is_named(tmp_path, name, content, message):
    run = make_run(tmp_path, "softmax")
    (run / name).write_text(content)
    with pytest.raises(RunError, match=message):
        report.build([run])


def test_features_without_labels_are_named(tmp_path):
    run = make_run(tmp_path, "softmax")
    save_file({"features": np.zeros((2, 3), np.float32)}, run / "features.safetensors")
    with pytest.raises(RunError, match="has no tensor 'labels'"):
        report.build([run])


def test_missing_folder_and_no_folder(tmp_path):
    with pytest.raises(HypersphereError, match=r"nowhere does not exist"):
        report.build([tmp_path / "nowhere"])
    with pytest.raises(RunError, match="no run folder was given"):
        report.build([])


def test_write_replaces_the_file_whole_or_not_at_all(tmp_path, runs):
    output = tmp_path / "reports" / "report.html"
    assert report.write(runs[:1], output) == output
    first = output.read_text(encoding="utf-8")
    assert first == report.build(runs[:1])
    (runs[1] / "run.json").unlink()
    with pytest.raises(RunError):
        report.write(runs, output)
    assert output.read_text(encoding="utf-8") == first
    assert [path.name for path in output.parent.iterdir()] == ["report.html"]


# ------------------------------------------------------------------------------------------------ layers


def add_tensors(run, **tensors):
    """Further tensors in the file of an evaluation; of names, two underscores stand for a slash, one for a dot."""
    metadata = {"class_names": json.dumps([f"digit {i}" for i in range(7)])}
    more = {name.replace("__", "/").replace("_", "."): value for name, value in tensors.items()}
    save_file(load(run) | more, run / "features.safetensors", metadata=metadata)
    return run


def test_radii_and_steepnesses_of_layers_against_a_plain_computation(tmp_path):
    rng = np.random.default_rng(0)
    first, second, third = (rng.gamma(9, 0.1, size=n).astype(np.float32) for n in (32, 64, 8))
    run = add_tensors(
        make_run(tmp_path, "softmax"),
        radius__00002__features_0=first,
        radius__00010__features_3=second,  # behind the first, whatever the order of their names
        k__00010__features_3=third,
    )
    page = Page(report.build([run]))
    radius, k = page.of_kind("histogram")[-2:]
    boxes, means = radius["data"]
    assert boxes["x"] == means["x"] == [1, 2] and means["customdata"] == ["features.0", "features.3"]
    assert boxes["customdata"][0] == means["customdata"]
    np.testing.assert_allclose(means["y"], [first.mean(), second.mean()], rtol=1e-3)
    shares, centres = np.array(boxes["z"]), np.array(boxes["y"])
    for column, values in zip(shares.T, (first, second), strict=True):
        nearest = np.abs(values[:, None] - centres).argmin(axis=1)
        expected = 100 * np.bincount(nearest, minlength=len(centres)) / len(values)
        np.testing.assert_allclose(column, expected, atol=0.1)
    low, high = min(first.min(), second.min()), max(first.max(), second.max())
    assert f"From {low:.3g} to {high:.3g}" in page.text
    assert k["data"][0]["x"] == [1] and "Steepness k: digits-softmax" in page.text


def test_equal_values_of_layers_fall_into_one_box(tmp_path):
    run = add_tensors(make_run(tmp_path, "softmax"), k__00001__a=np.full(3, 0.5, np.float32))
    shares = np.array(Page(report.build([run])).of_kind("histogram")[-1]["data"][0]["z"])
    assert shares.max() == shares.sum() == 100


@pytest.mark.parametrize("channels", [1, 3])
def test_filters_are_a_grid_of_pictures(tmp_path, channels):
    rng = np.random.default_rng(0)
    filters = rng.normal(size=(10, channels, 3, 5)).astype(np.float32)
    filters[4] = 0
    page = Page(report.build([add_tensors(make_run(tmp_path, "softmax"), filters=filters)]))
    (figure,) = page.of_kind("filters")
    image = np.array(figure["data"][0]["z"])
    zoom = 128 // (4 * 6)  # about 128 pixels for four filters of five weights and a gap
    tall, wide = 3 * zoom + 3, 5 * zoom + 3  # a frame and a gap
    columns = (image.shape[1] + 1) // wide
    assert image.shape == (tall * -(-10 // columns) - 1, wide * columns - 1, 4)
    seen = np.zeros(image.shape[:2], bool)
    for index, one in enumerate(filters):
        top, left = tall * (index // columns), wide * (index % columns)
        tile = image[top : top + tall - 1, left : left + wide - 1]
        seen[top : top + tall - 1, left : left + wide - 1] = True
        assert (tile[..., 3] == 1).all() and (tile[[0, -1], :, :3] == 136).all() and (tile[:, [0, -1], :3] == 136).all()
        scaled = one / max(np.abs(one).max(), 1e-9)
        expected = np.broadcast_to(127.5 * (1 + scaled.transpose(1, 2, 0)), (3, 5, 3))
        for shift in range(zoom):
            np.testing.assert_allclose(tile[1 + shift : -1 : zoom, 1 + shift : -1 : zoom, :3], expected, atol=0.51)
    assert not image[~seen].any()  # transparent between them
    assert "All 10 filters, 3x5" in page.text


def test_of_very_many_filters_the_first_are_shown(tmp_path):
    run = add_tensors(make_run(tmp_path, "softmax"), filters=np.ones((300, 1, 2, 2), np.float32))
    page = Page(report.build([run]))
    image = np.array(page.of_kind("filters")[0]["data"][0]["z"])
    zoom = 128 // (16 * 3)
    assert (image[..., 3] == 1).sum() == 256 * (2 * zoom + 2) ** 2 and "The first 256 of 300 filters" in page.text


def test_layers_that_cannot_be_drawn_are_left_out(tmp_path):
    broken = {"filters": np.full((2, 3, 3, 3), np.nan, np.float32), "k__00001__a": np.array([1, np.inf], np.float32)}
    page = Page(report.build([add_tensors(make_run(tmp_path, "softmax"), **broken)]))
    assert not page.of_kind("filters") and "Steepness" not in page.text
    assert "Layers" not in page.text
