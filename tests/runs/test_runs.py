"""A run is loaded from its folder alone, and damage of any kind is named before anything is changed."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from PIL import Image

import hypersphere as hs
from helpers.paths import FIXTURES
from hypersphere import plugins, recipe
from hypersphere.data import load as load_data
from hypersphere.errors import ArgumentError
from hypersphere.models import models
from hypersphere.runs import RunError, RunFolder, artefacts, described, load_checkpoint, load_run, load_with_data
from hypersphere.runs.loading import load
from hypersphere.train import Trainer
from net import net

CPU = torch.device("cpu")
ROOT = Path(hs.__file__).parent
SHORT = ("train.steps=4", "train.checkpoint_every=2", "train.tensorboard=false", "data.batch_size=64")


def train(folder: Path, name: str = "digits-arcface", *overrides: str) -> Trainer:
    plan = recipe.load(name, [*SHORT, *overrides])
    trainer = Trainer(plan, RunFolder.create(folder, plan, CPU), CPU)
    trainer.fit()
    return trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trainer:
    return train(tmp_path_factory.mktemp("runs") / "run", "digits-arcface", "train.ema=0.5", "train.keep_checkpoints=2")


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A run that a test may change."""
    return Path(shutil.copytree(trained.run.path, tmp_path / "run"))


def state_file(run: Path) -> Path:
    return RunFolder.open(run).latest_checkpoint() / "state.safetensors"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# ------------------------------------------------------------------------------------------------------ systems


def test_a_loaded_system_answers_as_its_trainer(trained):
    system, outputs = hs.load(trained.run.path), trained.outputs()
    images = trained.data.test.images
    assert torch.equal(system.embed(images), outputs.features)
    assert torch.equal(system(images), outputs.logits)
    assert system.classes == trained.data.class_names and system.shape == (1, 8, 8) and system.step == 4
    assert system.recipe.hash == trained.recipe.hash
    predicted = [system.classes.index(prediction.name) for prediction in system.predict(images)]
    assert predicted == outputs.logits.argmax(1).tolist()
    assert system.predict(images[0]).probability == pytest.approx(float(outputs.logits[0].softmax(0).max()))


def test_moving_averages_are_what_is_loaded(trained):
    weight = hs.load(trained.run.path).head.class_vectors
    assert not torch.equal(weight, trained.head.class_vectors)
    state = safetensors.torch.load_file(state_file(trained.run.path))
    assert any(torch.equal(weight, value) for key, value in state.items() if key.startswith("average."))


def test_a_checkpoint_is_loaded_by_its_place(trained):
    folder = trained.run.path / "checkpoints/step-00000002"
    earlier = hs.load(folder)
    assert earlier.step == 2 and hs.load(folder / "state.safetensors").step == 2
    image = trained.data.test.images[:1]
    assert not torch.equal(earlier(image), hs.load(trained.run.path)(image))


def test_every_form_of_an_image_has_the_same_features(trained, tmp_path):
    system = hs.load(trained.run.path)
    images = trained.data.test.images[:3]
    expected = system.embed(images)
    arrays = [image[0].numpy() for image in images]
    files = []
    for number, array in enumerate(arrays):
        files.append(tmp_path / f"{number}.png")
        Image.fromarray(array).save(files[-1])
    forms = {
        "floats": images.float() / 255,
        "list of tensors": list(images),
        "mixed": [images[0], images[1].float() / 255, arrays[2]],
        "arrays": arrays,
        "batch of arrays": np.stack(arrays)[..., None],
        "floats in arrays": np.stack(arrays)[..., None] / 255,
        "pictures": [Image.fromarray(array) for array in arrays],
        "files": files,
        "names": [str(file) for file in files],
        "folder": tmp_path,
        "colours": images.expand(-1, 3, -1, -1),
    }
    for form, given in forms.items():
        torch.testing.assert_close(
            system.embed(given), expected, rtol=1e-4, atol=1e-4, msg=lambda m, f=form: f"{f}: {m}"
        )
    for one in (images[1], arrays[1], files[1], str(files[1]), Image.fromarray(arrays[1])):
        torch.testing.assert_close(system.embed(one), expected[1], rtol=1e-4, atol=1e-4)
    large = Image.fromarray(arrays[1]).resize((32, 16))
    assert system.embed(large).shape == (system.model.dim,)
    assert torch.equal(system.embed(np.array(large)), system.embed(large))
    assert system.embed([]).shape[0] == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(1, 9, 8, dtype=torch.uint8), r"must have shape \(1, 8, 8\) each, got \(1, 9, 8\)"),
        (torch.full((1, 8, 8), 255.0), r"must lie in \[0, 1\]"),
        (torch.full((1, 8, 8), float("nan")), r"must lie in \[0, 1\]"),
        (torch.zeros(1, 8, 8, dtype=torch.int64), r"must be bytes \(uint8\) or floating-point numbers"),
        (np.zeros((2, 8, 8, 5), np.uint8), r"must be \(H, W\)"),
        ({"image": 1}, "must be paths, PIL images, arrays or tensors, got dict"),
    ],
)
def test_what_is_no_image_is_refused(trained, given, message):
    with pytest.raises(ArgumentError, match=message):
        hs.load(trained.run.path).embed(given)


def test_gradients_reach_the_pixels(trained):
    system = hs.load(trained.run.path)
    images = (trained.data.test.images[:2].float() / 255).requires_grad_()
    system.scores(images).sum().backward()
    assert images.grad is not None and bool(images.grad.any())


def test_a_run_is_loaded_in_an_instant_and_without_its_data(run):
    """Beyond torch; nothing of the command line, of reports and of data sets is imported."""
    program = f"""
import sys, time
import torch
start = time.process_time()
import hypersphere as hs
system = hs.load({str(run)!r})
spent = time.process_time() - start
system.predict(torch.zeros(1, 8, 8, dtype=torch.uint8))
heavy = {{"sklearn", "plotly", "typer", "rich", "matplotlib", "tensorboard", "scipy"}} & set(sys.modules)
assert not heavy, heavy
assert "hypersphere.train" not in sys.modules
assert spent < 1, spent
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_other_samples_than_images(tmp_path):
    clouds = train(tmp_path / "clouds", "shapes-pointnet", "train.steps=2", "data.batch_size=16")
    system = hs.load(clouds.run.path)
    samples = clouds.data.test.images[:3]
    assert not system.images
    assert system.embed(samples).shape == (3, system.model.dim) and system.embed(samples[0]).dim() == 1
    torch.testing.assert_close(system.embed(samples.double().numpy()), system.embed(samples))
    assert system.predict(samples[0]).name in system.classes
    with pytest.raises(ArgumentError, match="must be tensors or arrays"):
        system.embed("cloud.txt")


def test_a_generator_is_loaded_with_its_model(tmp_path):
    gan = train(tmp_path / "gan", "digits-gan", "train.steps=2")
    system = hs.load(gan.run.path)
    assert torch.equal(system.model.sample(2, seed=0), gan.model.eval().sample(2, seed=0))


def test_a_graph_network_asks_for_its_graph(tmp_path):
    net.write_graph(tmp_path)
    plan = recipe.load("cora-gcn-opt", [*SHORT, "train.steps=2", "data.batch_size=32"])
    trainer = Trainer(plan, RunFolder.create(tmp_path / "run", plan, CPU), CPU, data_root=tmp_path)
    trainer.fit()
    system = hs.load(tmp_path / "run")
    with pytest.raises(RunError, match=r"needs what its samples share: call system\.attach\(data\)"):
        system(trainer.data.test.images)
    system.attach(trainer.data)
    assert torch.equal(system(trainer.data.test.images), trainer.outputs().logits)
    whole, data = load_with_data(tmp_path / "run", tmp_path)
    assert torch.equal(whole(data.test.images), trainer.outputs().logits)


def test_runs_of_version_0_1_are_loaded(tmp_path):
    data = load_data("digits", hold_out=["7", "8", "9"])
    system = hs.load(FIXTURES / "run-0.1")
    assert system.classes == data.class_names and system.step == 4
    kept = safetensors.torch.load_file(FIXTURES / "run-0.1/features.safetensors")["features"]
    torch.testing.assert_close(system.embed(data.test.images), kept, rtol=1e-3, atol=1e-3)
    run = Path(shutil.copytree(FIXTURES / "run-0.1", tmp_path / "run"))
    facts = json.loads((run / "run.json").read_text())
    del facts["shape"]
    (run / "run.json").write_text(json.dumps(facts))
    with pytest.raises(RunError, match=r"does not say how large its images are.*hypersphere evaluate"):
        hs.load(run)
    assert torch.equal(hs.load(run, size=(8, 8)).embed(data.test.images), system.embed(data.test.images))
    assert hs.load(run, data=data).shape == (1, 8, 8)


def test_what_the_data_set_knew_is_in_the_run(trained):
    facts = trained.run.facts()
    assert {key: facts[key] for key in ("shape", "images", "class_names", "context")} == described(trained.data)


# --------------------------------------------------------------------------------------------------------- plugins

PLUGIN = """
import torch
from hypersphere import models
from hypersphere.models import DigitsCNN

@models.models.register("runs-own-net")
class OwnNet(DigitsCNN):
    "A network in a user's own file."
"""


def test_a_missing_plugin_is_named_and_not_loaded_by_itself(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(PLUGIN)
    digest = plugins.load(file).digest
    try:
        train(tmp_path / "run", "digits-softmax", "model.name=runs-own-net", "train.steps=2")
    finally:
        models.remove("runs-own-net")
        plugins._loaded.pop(digest)
        plugins._named.pop(str(file.resolve()))
    (entry,) = [one for one in RunFolder(tmp_path / "run").facts()["plugins"] if one["digest"] == digest]
    assert entry["members"] == [["model", "runs-own-net"]]
    with pytest.raises(RunError, match=r"plugins that are not loaded: own .*--plugin .*own\.py .*plugins="):
        hs.load(tmp_path / "run")
    try:
        assert type(hs.load(tmp_path / "run", plugins=[file]).model).__name__ == "OwnNet"
    finally:
        models.remove("runs-own-net")


# ---------------------------------------------------------------------------------------------------------- damage


def rewritten(file: Path, change) -> None:
    """The file written anew, whole and with right digests, after a change of its tensors."""
    found = artefacts.read(file, "checkpoint")
    tensors = dict(found.tensors)
    change(tensors)
    artefacts.write(file, "checkpoint", tensors, recipe=found.recipe, facts=found.facts)


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def cut_in_the_header(file):
    file.write_bytes(file.read_bytes()[:40])


def empty(file):
    file.write_bytes(b"")


def flipped(file, place, mask=1):
    content = bytearray(file.read_bytes())
    content[place] ^= mask
    file.write_bytes(bytes(content))


def flip_of(file, name):
    """One bit in the middle of a tensor's bytes."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    start, end = json.loads(content[8 : 8 + size])[name]["data_offsets"]
    flipped(file, 8 + size + (start + end) // 2)


def in_facts(file):
    flipped(file, file.read_bytes().index(b"version") + 11, 3)  # a digit of the metadata


def shape(tensors):
    tensors["head.weight"] = tensors["head.weight"][:-1]


def kind(tensors):
    tensors["head.weight"] = tensors["head.weight"].double()


def missing(tensors):
    del tensors["head.weight"]


def schema(file):
    artefacts.write(file, "evaluation", {"features": torch.ones(1)})


def newer(file):
    artefacts.write(file, "checkpoint", {"x": torch.ones(1)}, version=9)


def foreign(file):
    safetensors.torch.save_file(safetensors.torch.load_file(file), file, {"format": '"pt"'})


DAMAGE = {
    "truncated": (cut, "cannot be read"),
    "truncated header": (cut_in_the_header, "cannot be read"),
    "empty": (empty, "cannot be read"),
    "bit of a tensor": (lambda file: flip_of(file, "head.weight"), "the digest of 'head.weight'"),
    "bit of a statistic": (lambda file: flip_of(file, "preprocess.mean"), "the digest of 'preprocess.mean'"),
    "metadata": (in_facts, "the digest of its metadata|cannot be read"),
    "shape": (lambda file: rewritten(file, shape), r"'head.weight' has the shape \(\d+, \d+\), this run needs"),
    "dtype": (lambda file: rewritten(file, kind), "'head.weight' has the type torch.float64, this run needs"),
    "missing": (lambda file: rewritten(file, missing), "has no tensor 'head.weight'"),
    "schema": (schema, "is of the schema 'evaluation', not 'checkpoint'"),
    "newer": (newer, "has version 9 .* newer Hypersphere"),
    "foreign": (foreign, "is no checkpoint of Hypersphere"),
    "gone": (Path.unlink, "cannot be read"),
}


@pytest.mark.parametrize("kind_of", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_changes_nothing(run, kind_of):
    damage, message = DAMAGE[kind_of]
    file = state_file(run)
    damage(file)
    before = contents(run)
    with pytest.raises(RunError, match=message) as failed:
        load(run)
    assert str(file.parent) in str(failed.value)
    assert "delete" in str(failed.value) or "another version or recipe" in str(failed.value)
    plan = RunFolder.open(run).recipe()
    trainer = Trainer(plan, RunFolder.open(run), CPU)
    live = {name: tensor.detach().clone() for name, tensor in trainer.system.weights().items()}
    with pytest.raises(RunError, match=message):
        load_checkpoint(file.parent, trainer.system.weights(), plan)
    assert all(torch.equal(live[name], tensor) for name, tensor in trainer.system.weights().items())
    assert contents(run) == before
    shutil.rmtree(file.parent)  # what the message says to do
    assert load(run).step == 2


def test_a_checkpoint_of_another_recipe_is_refused(run, tmp_path):
    other = train(tmp_path / "other", "digits-arcface", "train.ema=0.5", "loss.m=0.1")
    shutil.rmtree(state_file(run).parent)
    shutil.copytree(state_file(other.run.path).parent, run / "checkpoints/step-00000004")
    with pytest.raises(RunError, match=r"is of another recipe \(\w+, not \w+\)"):
        load(run)


def test_files_of_two_steps_are_refused(run):
    newer_state = state_file(run).with_name("state.json")
    shutil.copy(run / "checkpoints/step-00000002/state.json", newer_state)
    with pytest.raises(RunError, match="has files of two steps, 4 and 2"):
        load(run)
    newer_state.write_text("{")
    with pytest.raises(RunError, match=r"state\.json is not valid JSON.*delete"):
        load(run)


@pytest.mark.parametrize("name", ["features", "labels", "artefact/x/y"])
def test_damaged_features_are_named(run, name):
    file = run / "features.safetensors"
    found = artefacts.read(file, "evaluation")
    artefacts.write(file, "evaluation", {**found.tensors, "artefact/x/y": torch.ones(5)}, facts=found.facts)
    flip_of(file, name)
    with pytest.raises(RunError, match=rf"features\.safetensors is damaged: the digest of '{name}'.*evaluate the run"):
        load_run(run)


def test_a_damaged_gallery_is_named(tmp_path):
    from hypersphere.runs import Gallery

    gallery = Gallery(3)
    gallery.enrol("ann", torch.ones(3))
    gallery.save(tmp_path / "g")
    flip_of(tmp_path / "g", "templates")
    with pytest.raises(RunError, match=r"g is damaged: the digest of 'templates'.*enrol its people again"):
        Gallery.load(tmp_path / "g")


@pytest.mark.parametrize("path", ["nowhere", ".", "file"])
def test_what_is_no_run_is_named(tmp_path, path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="nowhere does not exist" if path == "nowhere" else "is not a run folder"):
        load(tmp_path / path)


def test_a_run_without_a_checkpoint_says_what_to_do(tmp_path):
    plan = recipe.load("digits-softmax", SHORT)
    RunFolder.create(tmp_path / "run", plan, CPU)
    with pytest.raises(RunError, match=r"has no checkpoint yet: train it first, `hypersphere resume"):
        load(tmp_path / "run")


def test_names_of_the_tensors_of_layers_go_back_and_forth():
    for layer in ("conv1", "body.0.conv", "a/b", ""):
        assert artefacts.layer_parts(artefacts.layer_name("radius", 3, layer)) == ("radius", 3, layer)
    for name in ("features", "artefact/00003/x", "radius/conv1", "radius/3/conv1"):
        assert artefacts.layer_parts(name) is None


def test_a_file_is_the_same_bytes_again(tmp_path):
    for name in ("a", "b"):
        artefacts.write(tmp_path / name, "gallery", {"y": torch.ones(2), "x": torch.zeros(3)}, facts={"q": [1], "p": 2})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# ------------------------------------------------------------------------------------------------------- the house


def test_only_the_trainers_package_its_command_and_tables_make_trainers():
    found = {
        str(file.relative_to(ROOT))
        for file in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name | ast.Attribute)
        and "Trainer" in (getattr(node, "id", ""), getattr(node, "attr", ""))
    }
    # The contract of sections stands beside the house, and tries them in runs.
    makers = {"cli/train.py", "reproduce/work.py", "testing/sections.py"}
    assert {file for file in found if not file.startswith("train/")} == makers
