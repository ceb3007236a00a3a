"""Galleries: enrolment, open-set identification, and files that survive a crash."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hypersphere.errors import ArgumentError, HypersphereError
from hypersphere.metrics.verification import calibrate
from hypersphere.runs import gallery as module
from hypersphere.runs.artefacts import RunError
from hypersphere.runs.gallery import Gallery, Match, fingerprint


def filled(people=4, dim=6, seed=0, **settings):
    generator = torch.Generator().manual_seed(seed)
    gallery = Gallery(**settings)
    for index in range(people):
        gallery.enrol(f"p{index}", torch.randn(3, dim, generator=generator))
    return gallery


def same(a, b):
    return (
        a.names == b.names
        and all(torch.equal(a.templates(name), b.templates(name)) for name in a.names)
        and (a.dim, a.model, a.fingerprint, a.threshold, a.calibration)
        == (b.dim, b.model, b.fingerprint, b.threshold, b.calibration)
    )


# ------------------------------------------------------------------------------------------------- enrol, remove


def test_a_template_is_the_mean_direction_whatever_the_norms():
    gallery = Gallery()
    gallery.enrol("ann", torch.tensor([[100.0, 0.0], [0.0, 1.0]]))
    torch.testing.assert_close(gallery.templates("ann"), torch.full((1, 2), math.sqrt(0.5)))


def test_each_image_can_be_a_template():
    gallery = Gallery()
    features = torch.tensor([[3.0, 4.0], [0.0, -2.0]])
    gallery.enrol("ann", features, average=False)
    torch.testing.assert_close(gallery.templates("ann"), torch.tensor([[0.6, 0.8], [0.0, -1.0]]))
    gallery.enrol("ann", torch.tensor([1.0, 0.0]), extend=True)
    assert gallery.templates("ann").shape == (3, 2)
    assert len(gallery) == 1
    # The nearest template decides.
    assert gallery.identify(torch.tensor([0.1, -5.0]), 0.9).name == "ann"


def test_a_name_is_enrolled_once_unless_it_is_extended():
    gallery = filled()
    with pytest.raises(ArgumentError, match="name must be new, got 'p1'"):
        gallery.enrol("p1", torch.ones(6))
    gallery.enrol("p1", torch.ones(6), extend=True)
    gallery.enrol("new", torch.ones(6), extend=True)
    assert gallery.names == ["p0", "p1", "p2", "p3", "new"]


def test_who_is_removed_is_not_found_again():
    gallery = filled()
    probe = gallery.templates("p2")[0]
    assert gallery.identify(probe, 0.5).name == "p2"
    gallery.remove("p2")
    assert "p2" not in gallery
    assert gallery.identify(probe, -2).name != "p2"
    with pytest.raises(ArgumentError, match="name must be enrolled, got 'p2'"):
        gallery.remove("p2")
    gallery.enrol("p2", probe)
    assert gallery.identify(probe, 0.5) == Match("p2", pytest.approx(1.0))


def test_templates_are_copies():
    gallery = filled()
    features = torch.ones(1, 6)
    gallery.enrol("x", features, average=False)
    features.zero_()
    gallery.templates("x").zero_()
    assert gallery.templates("x").any()


@pytest.mark.parametrize(
    ("name", "features", "message"),
    [
        ("x", torch.ones(5), "features must have the gallery's dimension 6, got 5"),
        ("x", torch.full((2, 6), math.nan), "features must be finite"),
        ("x", torch.full((6,), math.inf), "features must be finite"),
        ("x", torch.zeros(6), "features must have a direction"),
        ("x", torch.stack([torch.ones(6), -torch.ones(6)]), "features must have a direction"),
        ("x", torch.empty(0, 6), "features must hold at least one row"),
        ("x", torch.ones(1, 1, 6), r"features must be \(D,\) or \(N, D\)"),
        ("x", torch.ones(6, dtype=torch.long), r"features must be \(D,\) or \(N, D\)"),
        ("", torch.ones(6), "name must be a text"),
        (7, torch.ones(6), "name must be a text"),
    ],
)
def test_bad_enrolments_change_nothing(name, features, message):
    gallery, before = filled(), filled()
    with pytest.raises(ArgumentError, match=message):
        gallery.enrol(name, features)
    assert same(gallery, before)


def test_a_failed_first_enrolment_does_not_fix_the_dimension():
    gallery = Gallery()
    with pytest.raises(ArgumentError):
        gallery.enrol("x", torch.zeros(6))
    gallery.enrol("x", torch.ones(3))
    assert gallery.dim == 3


def test_half_features_are_enrolled_in_float32():
    gallery = Gallery()
    gallery.enrol("x", torch.randn(3, 8).bfloat16())
    assert gallery.templates("x").dtype == torch.float32
    assert gallery.identify(torch.randn(8).half(), -2).name == "x"


# --------------------------------------------------------------------------------------------------------- search


def test_identification_is_open_set_and_strict():
    gallery = Gallery(threshold=0.5)
    gallery.enrol("ann", torch.tensor([1.0, 0.0, 0.0, 0.0]))
    gallery.enrol("bob", torch.tensor([0.0, 1.0, 0.0, 0.0]))
    found = gallery.identify(torch.tensor([[2.0, 0.2, 0.0, 0.0], [0.0, 0.6, 0.8, 0.0], [1.0, 1.0, 1.0, 1.0]]))
    assert [match.name for match in found] == ["ann", "bob", None]  # 0.5 is not above 0.5
    assert [match.score for match in found[1:]] == pytest.approx([0.6, 0.5])
    assert gallery.identify(torch.tensor([1.0, 1.0, 1.0, 1.0]), 0.49).name == "ann"  # equal: who was enrolled first


@given(st.integers(1, 9), st.integers(1, 8), st.integers(0, 50))
def test_search_names_every_name_once_with_its_best_template(people, k, seed):
    rng = np.random.default_rng(seed)
    gallery = Gallery()
    stored = {}
    for index in range(people):
        rows = rng.normal(size=(rng.integers(1, 5), 4)).astype(np.float32)
        gallery.enrol(f"p{index}", torch.from_numpy(rows), average=False)
        stored[f"p{index}"] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    probe = rng.normal(size=4).astype(np.float32)
    unit = probe / np.linalg.norm(probe)
    expected = sorted(((float((rows @ unit).max()), name) for name, rows in stored.items()), reverse=True)[:k]
    (found,) = gallery.search(torch.from_numpy(probe)[None], k)
    assert [match.name for match in found] == [name for _, name in expected]
    assert [match.score for match in found] == pytest.approx([score for score, _ in expected], abs=1e-6)


def test_an_empty_gallery_knows_nobody():
    gallery = Gallery(3)
    assert gallery.identify(torch.ones(3), 0.0) == Match(None, -math.inf)
    assert gallery.identify(torch.ones(2, 3), -math.inf) == [Match(None, -math.inf)] * 2
    assert gallery.search(torch.ones(2, 3)) == [[], []]
    with pytest.raises(ArgumentError, match="dimension 3, got 4"):
        gallery.identify(torch.ones(4), 0.0)


def test_bad_probes_and_thresholds():
    gallery = filled()
    with pytest.raises(ArgumentError, match="threshold must be given"):
        gallery.identify(torch.ones(6))
    with pytest.raises(ArgumentError, match="threshold must be a number"):
        gallery.identify(torch.ones(6), math.nan)
    with pytest.raises(ArgumentError, match="threshold must be a number"):
        Gallery(threshold=math.nan)
    with pytest.raises(ArgumentError, match="features must be finite"):
        gallery.identify(torch.full((6,), math.nan), 0.5)
    with pytest.raises(ArgumentError, match="k must be at least 1"):
        gallery.search(torch.ones(1, 6), 0)


def test_a_gallery_describes_itself():
    assert str(filled(model="net", threshold=0.25)) == (
        "gallery of 4 names with 4 templates of dimension 6 of net; accepts above 0.2500"
    )
    assert "no threshold" in str(Gallery())


def test_fingerprint_follows_the_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    first = fingerprint(model)
    assert first == fingerprint(model)
    assert len(first) == 64
    model[1].running_mean += 1
    assert fingerprint(model) != first
    assert fingerprint(model.bfloat16()) != fingerprint(model.float())


# ---------------------------------------------------------------------------------------------------------- files


def test_a_saved_gallery_comes_back_whole(tmp_path):
    gallery = filled(model="sphereface-20", fingerprint="ab" * 32, threshold=0.3)
    gallery.enrol("Zoë \n é", torch.randn(2, 6), average=False)
    gallery.save(tmp_path / "people.safetensors")
    assert same(Gallery.load(tmp_path / "people.safetensors"), gallery)
    assert [path.name for path in tmp_path.iterdir()] == ["people.safetensors"]


def test_an_empty_gallery_can_be_saved(tmp_path):
    for gallery in (Gallery(), Gallery(5)):
        gallery.save(tmp_path / "g")
        loaded = Gallery.load(tmp_path / "g")
        assert same(loaded, gallery)
        loaded.enrol("x", torch.ones(5))


def test_other_programs_can_read_the_file(tmp_path):
    from safetensors import safe_open

    filled(threshold=0.5).save(tmp_path / "g.safetensors")
    with safe_open(tmp_path / "g.safetensors", "numpy") as file:
        head = json.loads(file.metadata()["hypersphere"])["facts"]
        assert file.get_tensor("templates").shape == (4, 6)
    assert head["names"] == ["p0", "p1", "p2", "p3"]
    assert head["threshold"] == 0.5


def test_a_calibration_is_kept_with_the_gallery(tmp_path):
    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.rand(400, generator=generator), torch.arange(400) % 2 == 0
    calibration = calibrate(scores, labels, target_far=0.1)
    gallery = filled(threshold=calibration)
    assert gallery.threshold == calibration.threshold
    gallery.save(tmp_path / "g")
    loaded = Gallery.load(tmp_path / "g")
    assert loaded.calibration == calibration
    assert loaded.threshold == calibration.threshold


def test_a_gallery_of_another_model_is_refused(tmp_path):
    filled(model="old", fingerprint="a").save(tmp_path / "g")
    assert len(Gallery.load(tmp_path / "g", fingerprint="a")) == 4
    with pytest.raises(ArgumentError, match="holds features of old"):
        Gallery.load(tmp_path / "g", fingerprint="b")


def test_files_that_are_no_galleries(tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(RunError, match="none does not exist: give the file of a gallery"):
        Gallery.load(tmp_path / "none")
    with pytest.raises(RunError, match="is not a file"):
        Gallery.load(tmp_path)
    (tmp_path / "text").write_text("hello")
    save_file({"x": torch.ones(1)}, tmp_path / "other")
    head = {"format": 9}
    save_file({"templates": torch.ones(1, 2)}, tmp_path / "newer", {"hypersphere_gallery": json.dumps(head)})
    head = {"format": 1, "names": ["a", "a"], "counts": [1, 1]}
    save_file({"templates": torch.ones(2, 2)}, tmp_path / "twice", {"hypersphere_gallery": json.dumps(head)})
    for name, message in [
        ("text", "cannot be read"),
        ("other", "has no tensor 'templates'"),
        ("newer", "is no gallery of version 0.1, its format is 9"),
        ("twice", "has other names than templates"),
    ]:
        with pytest.raises(RunError, match=message):
            Gallery.load(tmp_path / name)
    filled().save(tmp_path / "g")
    whole = (tmp_path / "g").read_bytes()
    (tmp_path / "g").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RunError, match="cannot be read"):
        Gallery.load(tmp_path / "g")


def test_safetensors_is_named_where_it_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(HypersphereError, match="need safetensors"):
        Gallery().save(tmp_path / "g")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failing_disk_leaves_the_old_gallery_and_no_rubbish(tmp_path, monkeypatch, step):
    old = filled(threshold=0.1)
    old.save(tmp_path / "g")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(module.os, step, fail)
    with pytest.raises(OSError, match="disk full"):
        filled(9, threshold=0.2).save(tmp_path / "g")
    monkeypatch.undo()
    assert same(Gallery.load(tmp_path / "g"), old)
    assert [path.name for path in tmp_path.iterdir()] == ["g"]


CRASH = """
import os, sys
from pathlib import Path
import torch
from hypersphere.runs.gallery import Gallery

class Torn:
    # A file whose process dies when half of the content is written.
    def __init__(self, file): self.file = file
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def write(self, content):
        self.file.write(content[: len(content) // 2])
        self.file.flush()
        os._exit(9)

def save(path):
    gallery = Gallery.load(path)
    gallery.enrol("new", torch.ones(6))
    step, replace, opened = path.name, os.replace, Path.open
    if step == "write":
        Path.open = lambda self, *mode: Torn(opened(self, *mode))
    elif step == "after":
        os.replace = lambda *places: (replace(*places), os._exit(9))
    else:
        setattr(os, step, lambda *_: os._exit(9))
    gallery.save(path)

for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        save(Path(name))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, name
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_dies_while_saving_leaves_a_whole_gallery(tmp_path):
    steps = ["write", "fsync", "replace", "after"]
    old = filled(threshold=0.1)
    for step in steps:
        (tmp_path / step).mkdir()
        old.save(tmp_path / step / step)
    environment = os.environ | {"PYTHONPATH": str(Path(module.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    files = [str(tmp_path / step / step) for step in steps]
    subprocess.run([sys.executable, "-W", "ignore", "-c", CRASH, *files], env=environment, check=True)
    for step, file in zip(steps, files, strict=True):
        loaded = Gallery.load(file)
        if step == "after":
            assert loaded.names == [*old.names, "new"]
        else:
            assert same(loaded, old)
            assert len(list((tmp_path / step).iterdir())) == 2  # what was being written lies beside it
        loaded.enrol("later", torch.ones(6))
        loaded.save(file)
        assert "later" in Gallery.load(file)


def test_a_link_goes_on_pointing_to_the_gallery(tmp_path):
    (tmp_path / "real").mkdir()
    filled().save(tmp_path / "real" / "g")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "g")
    gallery = filled(7)
    gallery.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert same(Gallery.load(tmp_path / "real" / "g"), gallery)
