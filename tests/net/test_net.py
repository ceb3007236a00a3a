"""Nothing that runs, recipes and saved files rest on has changed: compared with golden files (see ``net.py``)."""

from __future__ import annotations

import json
import math
import shutil

import pytest

from helpers.paths import FIXTURES
from net import net


def golden(name):
    return json.loads((net.GOLDEN / f"{name}.json").read_text())


def compare(found, expected, exact, place=""):
    """Equal to the last bit on the machine of the golden file, and within rounding on others."""
    if isinstance(expected, dict):
        assert list(found) == list(expected), place
        for key in expected:
            compare(found[key], expected[key], exact, f"{place}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), place
        for index, (a, b) in enumerate(zip(found, expected, strict=True)):
            compare(a, b, exact, f"{place}/{index}")
    elif isinstance(expected, float) and not exact:
        assert math.isclose(found, expected, rel_tol=2e-2, abs_tol=2e-2), f"{place}: {found}, not {expected}"
    else:
        assert found == expected, f"{place}: {found}, not {expected}"


@pytest.mark.parametrize("name", net.RUNS)
def test_a_short_run_takes_the_same_steps(name, tmp_path, capsys):
    expected = golden(f"run-{name}")
    exact = expected.pop("machine") == net.machine()
    found = json.loads(json.dumps(net.trajectory(name, tmp_path)))
    if not exact:
        for one in (found, expected):
            del one["bytes"]
    compare(found, expected, exact)


def test_recipes_keep_their_hashes():
    assert net.recipe_hashes() == golden("recipes")


def test_the_state_of_every_part_keeps_its_names():
    assert net.state_names() == golden("states")


@pytest.mark.parametrize("name", ["run-0.1", "run-0.1-layers"])
def test_a_run_folder_of_version_0_1_is_measured_and_reported_as_then(name, tmp_path, capsys):
    run = tmp_path / name
    shutil.copytree(FIXTURES / name, run)
    before = json.loads((run / "evaluation.json").read_text())
    net.command("evaluate", str(run), "--device", "cpu")
    net.command("report", str(run))
    after = json.loads((run / "evaluation.json").read_text())
    assert after["step"] == before["step"]
    for metric, value in before["metrics"].items():
        assert after["metrics"][metric] == pytest.approx(value, rel=1e-3, abs=2e-3), metric
    assert (run / "report.html").stat().st_size > 1e5


def test_a_gallery_of_version_0_1_finds_who_is_in_it(tmp_path, capsys):
    gallery = tmp_path / "gallery.safetensors"
    shutil.copy(FIXTURES / "gallery-0.1.safetensors", gallery)
    where = (str(FIXTURES / "run-0.1"), str(gallery))
    net.command("gallery", "search", *where, str(FIXTURES / "photos"), "--threshold", "0.5")
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("digit0", "digit1", "digit2"))
