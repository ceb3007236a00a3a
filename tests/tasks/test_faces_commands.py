"""The commands for faces: features against plain code, rates against scikit-learn, galleries, and clear messages."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import typer
from PIL import Image
from rich.console import Console
from safetensors import safe_open
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

from helpers.paths import ROOT
from hypersphere import cli, losses, recipe
from hypersphere.cli.commands import app
from hypersphere.data.preprocess import Preprocess
from hypersphere.errors import ArgumentError
from hypersphere.evaluate import evaluations, protocols
from hypersphere.metrics import Calibration, ijb, lfw10, megaface, ytf10
from hypersphere.models import create
from hypersphere.runs import RunError, RunFolder
from hypersphere.runs.gallery import Gallery
from hypersphere.tasks.faces import commands as faces_cli
from hypersphere.tasks.faces.align import template
from hypersphere.tasks.faces.data import write_landmarks
from hypersphere.tasks.faces.embed import Embedder, Photo, all_pairs, parse_size, photos
from hypersphere.train import Trainer

HEIGHT, WIDTH = 28, 24
MODEL = {"name": "sfnet-4", "widths": [4, 6, 8, 8], "dim": 16}


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def start(monkeypatch, capsys):
    """Starts the entry point as the installed command does, in this process, with messages that do not wrap."""
    monkeypatch.setattr(faces_cli, "console", Console(width=400))
    monkeypatch.setattr(faces_cli, "errors", Console(stderr=True, width=400))

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["hypersphere", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return Result(stopped.value.code or 0, *capsys.readouterr())

    return run


def write_run(folder: Path, seed: int = 0, data=None, **changes) -> Path:
    """A run with a random network at step 0."""
    data = data or {"name": "image-folder", "path": "none", "size": [HEIGHT, WIDTH], "normalise": "half"}
    plan = recipe.check({"name": "tiny", "data": data, "model": MODEL, "loss": {"name": "cosface"}, **changes})
    run = RunFolder.create(folder, plan, torch.device("cpu"))
    torch.manual_seed(seed)
    shape = (1, 8, 8) if data["name"] == "digits" else (3, HEIGHT, WIDTH)
    model = create(MODEL["name"], shape, widths=MODEL["widths"], dim=MODEL["dim"])
    head = losses.create(plan.loss.name, MODEL["dim"], 3)
    parts = {"model": model, "head": head, "preprocess": Preprocess(shape, plan.data.normalise, plan.data.augment)}
    tensors = {f"{part}.{key}": value for part, module in parts.items() for key, value in module.state_dict().items()}
    if plan.train.ema is not None:
        tensors |= {f"average.{i}": 0.5 * weight for i, weight in enumerate([*model.parameters(), *head.parameters()])}
    run.save_checkpoint(0, tensors, {"pending": []}, keep=1)
    run.write_facts(class_names=["a", "b", "c"])
    if data["name"] == "digits":
        run.write_facts(shape=shape)
    run.finish("finished", 0)
    return folder


def pattern(rng, height=HEIGHT, width=WIDTH):
    """A coloured pattern without fine detail, in bytes as floats."""
    coarse = torch.from_numpy(rng.uniform(0, 255, (1, 3, 4, 4)))
    return F.interpolate(coarse, (height, width), mode="bilinear", align_corners=False)[0].permute(1, 2, 0).numpy()


def write_people(folder: Path, people, each: int, seed: int = 0, noise: float = 25.0) -> Path:
    """Images of people, each a pattern of their own with noise: ``folder/NAME/NAME_0001.png`` and so on."""
    for person in people:
        face = pattern(np.random.default_rng([ord(letter) for letter in person]))
        rng = np.random.default_rng([seed, *map(ord, person)])
        (folder / person).mkdir(parents=True, exist_ok=True)
        for number in range(1, each + 1):
            noisy = face + rng.normal(0, noise, face.shape)
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / person / f"{person}_{number:04d}.png")
    return folder


PEOPLE = ("ann", "bob", "cem", "dia", "eva", "fay")


@pytest.fixture(scope="module")
def run_source(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture(scope="module")
def faces(tmp_path_factory) -> Path:
    return write_people(tmp_path_factory.mktemp("faces"), PEOPLE, each=4)


@pytest.fixture
def run(run_source, tmp_path) -> Path:
    """A run that a test may change."""
    return Path(shutil.copytree(run_source, tmp_path / "run"))


def network(run: Path):
    """The network, loaded without the code under test."""
    (checkpoint,) = (run / "checkpoints").iterdir()
    saved = safetensors.torch.load_file(checkpoint / "state.safetensors")
    model = create(MODEL["name"], (3, HEIGHT, WIDTH), widths=MODEL["widths"], dim=MODEL["dim"]).eval()
    model.load_state_dict({key.removeprefix("model."): v for key, v in saved.items() if key.startswith("model.")})
    return model


def plain_features(run: Path, files, flip="add"):
    """Features by plain code: (x - 127.5) / 128, the network, and the mirror image."""
    model = network(run)
    images = torch.stack([torch.from_numpy(np.array(Image.open(f))).permute(2, 0, 1) for f in files])
    images = (images.double() - 127.5) / 128
    with torch.no_grad():
        model = model.double()
        straight, mirror = model(images), model(images.flip(3))
    if flip == "none":
        return straight.numpy()
    if flip == "concatenate":
        return torch.cat([straight, mirror], 1).numpy()
    total = (straight + mirror).numpy()
    return total / np.linalg.norm(total, axis=1, keepdims=True)


def cosines(features, pairs):
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    return np.array([unit[i] @ unit[j] for i, j in pairs])


# ---------------------------------------------------------------------------------------------------- embed


@pytest.mark.parametrize("flip", ["add", "concatenate", "none"])
def test_embed_writes_the_features_of_plain_code(start, run, faces, tmp_path, flip):
    done = start("embed", run, faces, "-o", tmp_path / "out" / "f.npz", "--flip", flip, "--batch-size", 5)
    assert (done.code, done.err) == (0, "")
    files = sorted(faces.rglob("*.png"))
    assert f"Wrote 24 features of dimension {32 if flip == 'concatenate' else 16}" in done.out
    with np.load(tmp_path / "out" / "f.npz") as found:
        np.testing.assert_allclose(found["features"], plain_features(run, files, flip), atol=1e-5)
        assert found["names"].tolist() == [f"{f.parent.name}/{f.stem}" for f in files]
        assert found["people"].tolist() == [f.parent.name for f in files]
        assert str(found["model"]) == "tiny" and str(found["fingerprint"]).endswith(f"+flip-{flip}")


def test_embed_lists_and_skips_what_cannot_be_read(start, run, faces, tmp_path):
    folder = Path(shutil.copytree(faces, tmp_path / "mixed"))
    (folder / "ann" / "broken.jpg").write_bytes(b"no image")
    content = (folder / "bob" / "bob_0001.png").read_bytes()
    (folder / "bob" / "short.png").write_bytes(content[: len(content) // 2])
    (folder / "notes.txt").write_text("no image, and not called one")
    (folder / ".hidden").mkdir()
    shutil.copy(folder / "bob" / "bob_0001.png", folder / ".hidden" / "bob.png")
    done = start("embed", run, folder, "-o", tmp_path / "f.safetensors")
    assert done.code == 0
    assert "2 images left out" in done.err and "broken.jpg cannot be decoded" in done.err and "short.png" in done.err
    assert "notes" not in done.err
    with safe_open(tmp_path / "f.safetensors", framework="np") as file:
        features, facts = file.get_tensor("features"), file.metadata()
    files = sorted(faces.rglob("*.png"))
    assert json.loads(facts["names"]) == [f"{f.parent.name}/{f.stem}" for f in files]
    np.testing.assert_allclose(features, plain_features(run, files), atol=1e-5)


def test_embed_of_nothing_readable_is_an_error(start, run, tmp_path):
    (tmp_path / "faces").mkdir()
    done = start("embed", run, tmp_path / "faces", "-o", tmp_path / "f.npz")
    assert done.code == 2 and "has no images (formats: .png" in done.err
    (tmp_path / "faces" / "a.png").write_bytes(b"")
    done = start("embed", run, tmp_path / "faces", "-o", tmp_path / "f.npz")
    assert done.code == 2 and "none of 1 images could be read" in done.err and "a.png" in done.err
    assert not (tmp_path / "f.npz").exists()


def test_faces_are_aligned_by_their_landmarks(start, run, faces, tmp_path):
    """Where landmarks lie in the standard places, the image is taken as it is; 3 pixels lower, it moves up by 3."""
    files = sorted(faces.rglob("*.png"))
    marks = {f"{f.parent.name}/{f.name}": template((HEIGHT, WIDTH)) for f in files[:-1]}
    write_landmarks(tmp_path / "landmarks.txt", marks)
    arguments = ("embed", run, faces, "--flip", "none", "--landmarks", tmp_path / "landmarks.txt", "-o")
    done = start(*arguments, tmp_path / "f.npz")
    assert done.code == 0 and f"1 image left out:\n  {files[-1]}: the landmarks file does not have it" in done.err
    with np.load(tmp_path / "f.npz") as found:
        np.testing.assert_allclose(found["features"], plain_features(run, files[:-1], "none"), atol=2e-2)

    lower = {name: points + torch.tensor([0.0, 3.0]) for name, points in marks.items()}
    write_landmarks(tmp_path / "landmarks.txt", lower)
    start(*arguments, tmp_path / "f.npz")
    moved = []
    for file in files[:-1]:
        pixels = np.array(Image.open(file))
        moved.append(tmp_path / "moved" / file.name)
        moved[-1].parent.mkdir(exist_ok=True)
        Image.fromarray(np.concatenate([pixels[3:], np.zeros_like(pixels[:3])])).save(moved[-1])
    with np.load(tmp_path / "f.npz") as found:
        np.testing.assert_allclose(found["features"], plain_features(run, moved, "none"), atol=2e-2)

    write_landmarks(tmp_path / "landmarks.txt", {"nobody/nobody.jpg": torch.rand(5, 2)})
    done = start(*arguments, tmp_path / "g.npz")
    assert done.code == 2 and "of none of the 24 here" in done.err and "ann/ann_0001" in done.err


def test_a_flat_folder_and_single_files(start, run, faces, tmp_path):
    flat = tmp_path / "flat"
    flat.mkdir()
    for name in ("ann_0001", "ann_0002", "bob_0001"):
        shutil.copy(faces / name[:3] / f"{name}.png", flat / f"{name}.png")
    shutil.copy(faces / "eva" / "eva_0001.png", flat / "2024.png")
    assert [(photo.name, photo.person) for photo in photos(flat)] == [
        ("2024", "2024"), ("ann_0001", "ann"), ("ann_0002", "ann"), ("bob_0001", "bob"),
    ]  # fmt: skip
    done = start("embed", run, flat / "bob_0001.png", faces / "ann", "-o", tmp_path / "f.npz")
    assert done.code == 0
    with np.load(tmp_path / "f.npz") as found:
        assert found["names"].tolist() == ["bob_0001", *(f"ann_000{i}" for i in (1, 2, 3, 4))]


def test_a_bar_moves_on_a_terminal_and_never_on_stdout(start, run, faces, tmp_path, monkeypatch):
    monkeypatch.setattr(faces_cli, "errors", Console(stderr=True, width=100, force_terminal=True))
    done = start("embed", run, faces, "-o", tmp_path / "f.npz")
    assert "24/24" in done.err and "24/24" not in done.out


def test_moving_averages_are_the_weights_where_a_run_has_them(tmp_path, faces):
    plain = Embedder(write_run(tmp_path / "plain"), flip="none")
    averaged = Embedder(write_run(tmp_path / "ema", train={"ema": 0.9}), flip="none")
    pairs = zip(plain.model.parameters(), averaged.model.parameters(), strict=True)
    assert all(torch.equal(half, weight / 2) for weight, half in pairs)
    assert plain.fingerprint != averaged.fingerprint


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train": {"ema": 0.5}},
        {"convert": {"name": "tanh"}},
        {"orthogonal": {"name": "cayley"}},
        {"data": {"normalise": "pixel"}},
    ],
    ids=["plain", "averages", "decoupled", "rotations", "mean-image"],
)
def test_a_trained_run_has_the_features_of_its_trainer(faces, tmp_path, changes):
    data = {"name": "image-folder", "path": str(faces), "size": [HEIGHT, WIDTH], "batch_size": 8}
    train = {"steps": 3, "tensorboard": False} | changes.get("train", {})
    plan = recipe.check(
        {
            "model": MODEL,
            "loss": {"name": "cosface"},
            "evaluate": {"metrics": ["classification"]},
            "optimiser": {"lr": 0.001},
        }
        | changes
        | {"data": data | changes.get("data", {}), "train": train}
    )
    run = RunFolder.create(tmp_path / "run", plan, torch.device("cpu"))
    trainer = Trainer(plan, run, torch.device("cpu"))
    trainer.fit()
    found = Embedder(run.path, flip="none")(trainer.data.test.files)
    expected = trainer.outputs().features
    assert float(expected.std(0).max()) > 1e-4  # or anything would do
    torch.testing.assert_close(found.features, expected, rtol=1e-4, atol=1e-5)


def test_a_run_on_grey_images_sees_their_luminance(tmp_path):
    run = write_run(tmp_path / "run", data={"name": "digits", "normalise": "none"})
    embedder = Embedder(run, flip="none")
    assert embedder.shape == (1, 8, 8)
    colours = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    images = [Image.fromarray(image.permute(1, 2, 0).numpy()).convert("L") for image in colours]
    grey = torch.stack([torch.from_numpy(np.array(image))[None] for image in images])
    with torch.no_grad():
        expected = embedder.model(grey.float() / 255)
    torch.testing.assert_close(embedder.features(colours), expected, atol=2e-3, rtol=1e-2)


def test_the_size_of_images_is_that_of_the_run_or_given(tmp_path, run):
    assert Embedder(run).shape == (3, HEIGHT, WIDTH)
    with pytest.raises(RunError, match="give it as HEIGHTxWIDTH"):
        Embedder(run, size=(64, 64))
    assert parse_size(" 112X96") == (112, 96)
    for wrong in ("112", "112x", "0x5", "5x00", "axb"):
        with pytest.raises(ArgumentError, match="must be HEIGHTxWIDTH"):
            parse_size(wrong)
    RunFolder.open(run).write_facts(shape=[3, HEIGHT + 1, WIDTH])  # what the trainer wrote comes before the recipe
    assert Embedder(run).shape == (3, HEIGHT + 1, WIDTH) and Embedder(run, size=(HEIGHT, WIDTH)).shape[1] == HEIGHT
    for shape in ([3, 1024], [], [2, 8, 8]):
        RunFolder.open(run).write_facts(shape=shape)
        with pytest.raises(RunError, match="is not of a network for images"):
            Embedder(run, size=(8, 8))
    data = {"name": "celeba-subset", "normalise": "half"}
    away = write_run(tmp_path / "away", data=data)
    with pytest.raises(RunError, match=r"does not say how large its images are\. Give the size"):
        Embedder(away)
    assert Embedder(away, size=(HEIGHT, WIDTH)).shape == (3, HEIGHT, WIDTH)
    plan = recipe.check({"data": data, "model": {"name": "sfnet-4"}, "loss": {"name": "softmax"}})
    folder = RunFolder.create(tmp_path / "new", plan, torch.device("cpu"))
    with pytest.raises(RunError, match="has no checkpoint yet: train it first"):
        Embedder(folder.path)


def test_photographs_stand_upright_however_the_camera_was_held(run, faces, tmp_path):
    file = faces / "ann" / "ann_0001.png"
    upright = Image.open(file)
    points = template((HEIGHT, WIDTH)).double()[None] + 1
    expected, aligned = Embedder(run)([file]), Embedder(run)([file], points)
    for orientation, stored in ((6, Image.Transpose.ROTATE_90), (8, Image.Transpose.ROTATE_270)):
        turned = tmp_path / f"{orientation}.png"
        exif = Image.Exif()
        exif[0x0112] = orientation
        upright.transpose(stored).save(turned, exif=exif)
        torch.testing.assert_close(Embedder(run)([turned]).features, expected.features)
        torch.testing.assert_close(Embedder(run)([turned], points).features, aligned.features)


# ---------------------------------------------------------------------------------------------------- verify


def lfw_list(path: Path, folds: int, people=PEOPLE) -> list[tuple[str, str, bool]]:
    """A list in the form of LFW with 6 pairs of each kind in a fold; returns what it says."""
    rng = np.random.default_rng(folds)
    lines, found = [f"{folds}\t6"], []
    for _ in range(folds):
        for person in people:
            i, j = rng.choice(4, 2, replace=False) + 1
            lines.append(f"{person}\t{i}\t{j}")
            found.append((f"{person}_{i:04d}", f"{person}_{j:04d}", True))
        for first, second in zip(people, [*people[1:], people[0]], strict=True):
            i, j = rng.integers(1, 5, 2)
            lines.append(f"{first}\t{i}\t{second}\t{j}")
            found.append((f"{first}_{i:04d}", f"{second}_{j:04d}", False))
    path.write_text("\n".join(lines) + "\n")
    return found


def score_list(run, faces, pairs, flip="add"):
    """Cosines and labels of such a list by plain code."""
    names = sorted({name for pair in pairs for name in pair[:2]})
    features = plain_features(run, [faces / name[:3] / f"{name}.png" for name in names], flip)
    scores = cosines(features, [(names.index(a), names.index(b)) for a, b, _ in pairs])
    return features, names, scores, np.array([same for *_, same in pairs])


def tar_by_hand(scores, same, far):
    """The best TAR of all thresholds whose FAR is at most ``far``."""
    lines = np.append(scores, -np.inf)
    return max((scores[same] > t).mean() for t in lines if (scores[~same] > t).mean() <= far)


@pytest.mark.filterwarnings("ignore:a FAR of")
def test_verify_a_list_of_pairs(start, run, faces, tmp_path):
    pairs = lfw_list(tmp_path / "pairs.txt", folds=5)
    done = start(
        *("verify", run, tmp_path / "pairs.txt", "--images", faces, "--samples", 50, "--fars", "0.1,0.5"),
        *("--target-far", 0.1, "-o", tmp_path / "results.json"),
    )
    assert done.code == 0, done.err
    _, names, scores, same = score_list(run, faces, pairs)
    content = json.loads((tmp_path / "results.json").read_text())
    results = content["results"]
    assert results["auc"]["value"] == pytest.approx(roc_auc_score(same, scores), abs=1e-9)
    for far in (0.1, 0.5):
        assert results[f"tar@far={far}"]["value"] == pytest.approx(tar_by_hand(scores, same, far))
    crossing = min(max((scores[~same] >= t).mean(), (scores[same] < t).mean()) for t in scores)
    assert results["eer"]["value"] == pytest.approx(crossing, abs=0.05)
    # The accuracy is of features side by side, centred by the training folds.
    doubled = plain_features(run, [faces / name[:3] / f"{name}.png" for name in names], "concatenate")
    fold, accuracies = np.arange(len(pairs)) // 12, []
    for number in range(5):
        rows = [(names.index(a), names.index(b)) for a, b, _ in pairs]
        others = [i for k, row in enumerate(rows) for i in row if fold[k] != number]
        centred = cosines(doubled - doubled[others].mean(0), rows)
        lines = np.arange(-10_000, 10_001) / 10_000
        right = [((centred > t) & same | (centred < t) & ~same)[fold != number].sum() for t in lines]
        line = lines[np.array(right) == max(right)].mean()
        accuracies.append(((centred > line) & same | (centred < line) & ~same)[fold == number].mean())
    assert results["accuracy"]["value"] == pytest.approx(np.mean(accuracies))
    assert results["accuracy"]["standard_error"] == pytest.approx(np.std(accuracies, ddof=1) / 5**0.5)
    for result in results.values():
        low, high = result["interval"]
        assert low <= result["value"] <= high or result["value"] == pytest.approx(low)
        assert f"{result['value']:.2%}" in done.out and result["words"]
    kept = json.loads((run / "calibration.json").read_text())
    calibration = Calibration.from_dict(kept["calibration"])
    assert kept["calibration"] == content["calibration"] and kept["fingerprint"].endswith("+flip-add")
    impostors = np.sort(scores[~same])[::-1]
    assert calibration.threshold == pytest.approx(impostors[int(0.1 * len(impostors))], abs=1e-6)
    assert f"accept cosine scores above {calibration.threshold:.4f}" in done.out
    assert "60 pairs (30 of one person, 30 of two)" in done.out


@pytest.mark.filterwarnings("ignore:a FAR of")
@pytest.mark.parametrize(("kind", "score"), [("angle", lambda c: -np.arccos(c)), ("euclidean", None)])
def test_scores_of_other_kinds(start, run, faces, tmp_path, kind, score):
    pairs = lfw_list(tmp_path / "pairs.txt", folds=2)
    arguments = ("--images", faces, "--samples", 20, "--target-far", 0.2, "--score", kind, "--flip", "none")
    assert start("verify", run, tmp_path / "pairs.txt", *arguments).code == 0
    features, names, scores, same = score_list(run, faces, pairs, "none")
    if score is None:
        rows = [(names.index(a), names.index(b)) for a, b, _ in pairs]
        scores = -np.array([np.linalg.norm(features[i] - features[j]) for i, j in rows])
    else:
        scores = score(scores)
    impostors = np.sort(scores[~same])[::-1]
    found = json.loads((run / "verification.json").read_text())
    assert found["calibration"]["threshold"] == pytest.approx(impostors[int(0.2 * len(impostors))], abs=1e-4)
    assert found["calibration"]["score"] == kind
    assert (
        "without mirror" in found["results"]["accuracy"]["words"] or "as given" in found["results"]["accuracy"]["words"]
    )


def test_verify_a_folder_compares_all_its_images(start, run, faces, tmp_path):
    done = start("verify", run, faces, "--samples", 20, "--target-far", 0.05, "--fars", 0.05, "--no-store")
    assert (done.code, done.err) == (0, "")
    files = sorted(faces.rglob("*.png"))
    features = plain_features(run, files)
    rows = [(i, j) for j in range(24) for i in range(j)]
    same = np.array([files[i].parent == files[j].parent for i, j in rows])
    found = json.loads((run / "verification.json").read_text())
    assert found["results"]["auc"]["value"] == pytest.approx(roc_auc_score(same, cosines(features, rows)), abs=1e-9)
    assert (found["results"]["auc"]["genuine"], found["results"]["auc"]["impostors"]) == (36, 240)
    assert "accuracy" not in found["results"]  # there are no folds
    assert not (run / "calibration.json").exists()


@pytest.mark.filterwarnings("ignore:a FAR of")
def test_pairs_without_their_images_are_left_out(start, run, faces, tmp_path):
    folder = Path(shutil.copytree(faces, tmp_path / "images"))
    pairs = lfw_list(tmp_path / "pairs.txt", folds=2)
    (folder / "ann" / "ann_0001.png").unlink()
    (folder / "bob" / "bob_0002.png").write_bytes(b"broken")
    done = start("verify", run, tmp_path / "pairs.txt", "--samples", 20, "--target-far", 0.5, "--fars", 0.5)
    assert done.code == 0, done.err
    lost = {"ann_0001", "bob_0002"}
    left = [pair for pair in pairs if not lost & set(pair[:2])]
    used = {name for pair in pairs for name in pair[:2]}
    assert lost <= used  # or the list has changed
    assert "there is no such image" in done.err and "bob_0002.png cannot be decoded" in done.err
    assert f"{len(pairs) - len(left)} pairs are left out" in done.err
    found = json.loads((run / "verification.json").read_text())
    _, _, scores, same = score_list(run, faces, left)
    assert found["results"]["auc"]["value"] == pytest.approx(roc_auc_score(same, scores), abs=1e-9)
    assert found["pairs_left_out"] == len(pairs) - len(left)


@pytest.mark.filterwarnings("default:a FAR of")
def test_verify_says_once_that_a_rate_is_too_small(start, run, faces, tmp_path):
    lfw_list(tmp_path / "pairs.txt", folds=2)
    (tmp_path / "landmarks.txt").write_text("")
    done = start("verify", run, tmp_path / "pairs.txt", "--images", faces, "--samples", 20)
    assert done.code == 0 and done.err.count("a FAR of 0.001 is less than 10 of 12") == 1
    assert f"--landmarks {tmp_path / 'landmarks.txt'} aligns" in done.err


def test_verify_messages(start, run, faces, tmp_path):
    pairs = tmp_path / "pairs.txt"
    lfw_list(pairs, folds=2)
    for arguments, message in (
        (("verify", run, pairs), "Give --images FOLDER"),
        (("verify", run, tmp_path / "none.txt"), "cannot be read"),
        (("verify", run, pairs, "--images", faces, "--score", "dot"), "score must be one of"),
        (("verify", run, pairs, "--images", faces, "--variant", "best"), "variant must be one of"),
        (("verify", run, pairs, "--images", faces, "--flip", "twice"), "flip must be one of"),
        (("verify", run, pairs, "--images", faces, "--fars", "a"), "fars must be numbers"),
        (("verify", run, pairs, "--images", faces, "--target-far", 0), "target_far must be greater than 0"),
        (("verify", run, pairs, "--images", faces, "--size", "12"), "size must be HEIGHTxWIDTH"),
        (("verify", tmp_path, pairs, "--images", faces), "is not a run folder"),
        (("verify", run, faces / "ann"), "must hold images of two people"),
        (("embed", run, faces, "-o", "features.txt"), "must end in .safetensors or .npz"),
    ):
        done = start(*arguments)
        assert done.code == 2 and message in done.err, arguments


def test_all_pairs_against_two_loops():
    found = [Photo(Path(), f"{i}", "abc"[i % 3]) for i in range(14)]
    pairs = all_pairs(found)
    listed = set(zip(pairs.left.tolist(), pairs.right.tolist(), pairs.same.tolist(), strict=True))
    assert listed == {(i, j, i % 3 == j % 3) for j in range(14) for i in range(j)} and len(pairs) == 91
    assert pairs.people.tolist() == [i % 3 for i in range(14)]
    few = all_pairs([Photo(Path(), f"{i}", f"{i % 40}") for i in range(200)], most=50)
    left, right = few.left.tolist(), few.right.tolist()
    assert (int(few.same.sum()), int((~few.same).sum())) == (50, 50) and len({*zip(left, right, strict=True)}) == 100
    assert all(i < j and (i % 40 == j % 40) == same for i, j, same in zip(left, right, few.same.tolist(), strict=True))
    again = all_pairs([Photo(Path(), f"{i}", f"{i % 40}") for i in range(200)], most=50)
    assert torch.equal(few.left, again.left) and torch.equal(few.right, again.right)


# -------------------------------------------------------------------------------------------------- identify


def test_identify_known_people_and_refuse_others(start, run, tmp_path):
    known = write_people(tmp_path / "known", PEOPLE[:4], each=2, seed=1, noise=80)
    probes = write_people(tmp_path / "probes", PEOPLE, each=3, seed=2, noise=80)
    done = start(
        *("identify", run, "--gallery", known, "--probes", probes, "--ranks", "3,1", "--fpirs", "0.5"),
        *("-o", tmp_path / "found.json"),
    )
    assert done.code == 0, done.err
    entries, tried = sorted(known.rglob("*.png")), sorted(probes.rglob("*.png"))
    scores = plain_features(run, tried) @ plain_features(run, entries).T
    owners, people = np.array([f.parent.name for f in entries]), np.array([f.parent.name for f in tried])
    mated = np.isin(people, owners)
    ranks = []
    for row, person in zip(scores[mated], people[mated], strict=True):
        ranks.append(1 + (row[owners != person] > row[owners == person].max()).sum())
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    assert found["rank 1"]["value"] == pytest.approx(np.mean(np.array(ranks) <= 1))
    assert found["rank 3"]["value"] == pytest.approx(np.mean(np.array(ranks) <= 3))
    strangers = np.sort(scores[~mated].max(1))[::-1]
    line = strangers[int(np.ceil(0.5 * len(strangers))) - 1]
    mates = np.array([row[owners == p].max() for row, p in zip(scores[mated], people[mated], strict=True)])
    assert found["DIR at FPIR 0.5"]["value"] == pytest.approx(np.mean((mates > line) & (np.array(ranks) == 1)))
    assert "18 probes of 6 people, 6 of them of unknown ones, against 8 entries of 4 people" in done.out

    again = shutil.copytree(known, tmp_path / "again")
    closed = start("identify", run, "--gallery", known, "--probes", again, "--average")
    assert closed.code == 0 and "DIR" not in closed.out and "nobody to refuse" in closed.out
    assert "against 4 entries" in closed.out


def test_strangers_do_not_narrow_the_interval_of_the_others(start, run, tmp_path):
    """Where all 4 known people are found, the interval is that of 4 trials, however many strangers there are."""
    known = write_people(tmp_path / "known", PEOPLE[:4], each=1, noise=0)
    probes = write_people(tmp_path / "probes", PEOPLE, each=1, noise=0)
    arguments = ("--gallery", known, "--probes", probes, "--ranks", 1, "--fpirs", 1, "-o", tmp_path / "found.json")
    assert start("identify", run, *arguments).code == 0
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    lowest = 4 / (4 + norm.ppf(0.975) ** 2)  # Wilson's bound for 4 of 4
    assert found["rank 1"] == {"value": 1.0, "low": pytest.approx(lowest), "high": 1.0}
    assert found["DIR at FPIR 1"] == {"value": 1.0, "low": pytest.approx(lowest), "high": 1.0}


def test_identify_messages(start, run, faces, tmp_path):
    others = write_people(tmp_path / "others", ["zoe"], each=1)
    done = start("identify", run, "--gallery", faces, "--probes", others)
    assert done.code == 2 and "nobody in" in done.err and "must have one name" in done.err
    done = start("identify", run, "--gallery", faces, "--probes", faces, "--ranks", "1.5")
    assert done.code == 2 and "ranks must be whole numbers" in done.err
    done = start("identify", run, "--gallery", faces, "--probes", faces / "ann" / "..")
    assert done.code == 2 and "24 probes are in the gallery, too, such as" in done.err and "themselves" in done.err
    again = shutil.copytree(faces, tmp_path / "again")
    done = start("identify", run, "--gallery", faces, "--probes", again, "--distractors", others, "--ranks", "1")
    assert done.code == 0 and "24 entries of 6 people and 1 distractors" in done.out.replace("\n", " ")
    write_landmarks(tmp_path / "points.txt", {"ann/ann_0001": template((HEIGHT, WIDTH))})
    done = start("identify", run, "--gallery", faces, "--probes", again, "--landmarks", tmp_path / "points.txt")
    assert done.code == 2 and f"one line for ann/ann_0001, which is {faces}/ann/ann_0001.png and {again}/" in done.err


# --------------------------------------------------------------------------------------------------- gallery


def test_a_gallery_from_calibration_to_search(start, run, faces, tmp_path, monkeypatch):
    people = tmp_path / "people.safetensors"
    known = write_people(tmp_path / "known", PEOPLE[:3], each=3, seed=3, noise=5)
    asked = write_people(tmp_path / "asked", ["ann", "zoe"], each=1, seed=4, noise=5)
    done = start("gallery", "add", run, people, known)
    assert done.code == 0 and "Added ann, bob, cem" in done.out and "3 names with 3 templates" in done.out
    done = start("gallery", "search", run, people, asked)
    assert done.code == 2 and "no threshold yet" in done.err and f"hypersphere verify {run}" in done.err

    assert start("verify", run, faces, "--samples", 20, "--target-far", 0.05, "--fars", 0.05).code == 0
    line = json.loads((run / "calibration.json").read_text())["calibration"]["threshold"]
    done = start("gallery", "search", run, people, asked, "--top", 2, "-o", tmp_path / "found.json")
    assert done.code == 0 and f"known above a cosine of {line:.4f} (FAR 0.05)" in done.out
    found = json.loads((tmp_path / "found.json").read_text())["images"]
    templates = []
    for person in PEOPLE[:3]:
        total = plain_features(run, sorted((known / person).glob("*.png"))).sum(0)
        templates.append(total / np.linalg.norm(total))
    scores = plain_features(run, [entry["image"] for entry in found]) @ np.stack(templates).T
    for entry, row in zip(found, scores, strict=True):
        order = np.argsort(-row)
        assert [near["name"] for near in entry["nearest"]] == [PEOPLE[i] for i in order[:2]]
        assert entry["score"] == pytest.approx(row.max(), abs=1e-5) and entry["known"] == (row.max() > line)
        assert entry["name"] == (PEOPLE[order[0]] if entry["known"] else None)
    assert found[0]["name"] == "ann"
    monkeypatch.setattr(faces_cli, "console", Console(width=80))
    strict = start("gallery", "search", run, people, asked, "--threshold", 1.1)
    assert sum("asked/" in row and "unknown" in row and "0." in row for row in strict.out.splitlines()) == 2  # unbroken
    assert strict.code == 0 and strict.out.count("unknown") == 2
    assert strict.out.endswith("known above a cosine of 1.1000\n")  # the FAR is that of the other threshold

    done = start("gallery", "add", run, people, known / "ann")
    assert done.code == 2 and "has ann already: --extend" in done.err
    assert start("gallery", "add", run, people, known / "ann", "--extend", "--each", "--name", "ann").code == 0
    assert Gallery.load(people).threshold == pytest.approx(line)  # the run had one by now
    listed = start("gallery", "list", people)
    assert "ann  4\nbob  1\ncem  1\n" in listed.out and "3 names with 6 templates" in listed.out
    assert start("gallery", "remove", people, "ann", "cem").code == 0
    assert Gallery.load(people).names == ["bob"]
    assert "must be enrolled" in start("gallery", "remove", people, "ann").err
    start("gallery", "remove", people, "bob")
    assert "has nobody in it" in start("gallery", "search", run, people, asked).err


def test_a_gallery_keeps_to_its_network_and_mirror_images(start, run, faces, tmp_path):
    people = tmp_path / "people.safetensors"
    assert start("gallery", "add", run, people, faces / "ann", "--name", "ann", "--flip", "none").code == 0
    done = start("gallery", "search", run, people, faces / "ann", "--threshold", 0.5)
    assert done.code == 0 and "ann" in done.out  # made as the gallery was, with nothing said
    done = start("gallery", "add", run, people, faces / "bob", "--name", "bob", "--flip", "add")
    assert done.code == 2 and "flip must be 'none' as in the gallery" in done.err
    other = write_run(tmp_path / "other", seed=1)
    done = start("gallery", "search", other, people, faces / "ann", "--threshold", 0.5)
    assert done.code == 2 and "with other weights" in done.err
    broken = tmp_path / "faces" / "dia"
    broken.mkdir(parents=True)
    (broken / "a.png").write_bytes(b"")
    shutil.copytree(faces / "bob", tmp_path / "faces" / "bob")
    done = start("gallery", "add", run, people, tmp_path / "faces")
    assert done.code == 0 and "no readable image of dia" in done.err and Gallery.load(people).names == ["ann", "bob"]


def test_images_prepared_in_another_way_are_warned_of(start, run, faces, tmp_path):
    """Scores of aligned faces say little about faces that are not."""
    people, points = tmp_path / "people.safetensors", tmp_path / "landmarks.txt"
    files = sorted((faces / "ann").glob("*.png"))
    write_landmarks(points, {f"ann/{file.stem}": template((HEIGHT, WIDTH)) for file in files})
    add = ("gallery", "add", run, people, faces / "ann", "--name", "ann")
    assert start(*add, "--landmarks", points).code == 0
    search = ("gallery", "search", run, people, faces / "ann", "--threshold", 0.5)
    assert "do not compare" not in start(*search, "--landmarks", points).err
    said = start(*search).err.replace("\n", " ")
    size = f"images of {HEIGHT}x{WIDTH}"
    assert f"gallery's features are of {size}, aligned by landmarks, but here of {size}, the middle of each" in said
    assert start("verify", run, faces, "--samples", 20, "--target-far", 0.05, "--fars", 0.05).code == 0
    assert "the threshold in" not in start(*search, "--landmarks", points).err  # not the one that is used
    # Nor is it taken for what it is not one of.
    for command in ((*add, "--extend", "--landmarks", points), (*search[:-2], "--landmarks", points)):
        done = start(*command)
        said = done.err.replace("\n", " ")
        assert "the threshold in" in said and f"is of {size}, the middle of each, but here" in said
    assert Gallery.load(people).threshold is None and "there is no threshold yet" in said and done.code != 0
    other = tmp_path / "other.safetensors"
    assert start("gallery", "add", run, other, faces / "ann", "--name", "ann").code == 0
    assert Gallery.load(other).threshold is not None
    done = start("gallery", "search", run, other, faces / "ann", "--landmarks", points)
    assert done.code != 0 and "there is no threshold yet" in done.err.replace("\n", " ")


def test_a_damaged_calibration_is_named(start, run, faces, tmp_path):
    (run / "calibration.json").write_text("{}")
    done = start("gallery", "add", run, tmp_path / "people.safetensors", faces)
    assert done.code == 2 and "calibration.json cannot be read" in done.err
    assert not (tmp_path / "people.safetensors").exists()


# ----------------------------------------------------------------------------------------------- what docs say


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """A user's working folder: images of people, some of whom are not in the gallery, and a run."""
    write_people(tmp_path / "photos", PEOPLE, each=4)
    write_people(tmp_path / "new", ["ann", "bob", "zoe"], each=1, seed=5)
    write_run(tmp_path / "runs" / "faces")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore:a FAR of")
@pytest.mark.parametrize("page", ["README.md", "docs/faces.md"])
def test_five_lines_work_on_a_folder_of_images(start, own_folder, page):
    (lines,) = [block.splitlines() for block in blocks(page, "bash") if "verify RUN photos" in block]
    assert len(lines) == 5
    for line in lines:
        _, *words = line.partition("#")[0].replace("RUN", "runs/faces").split()
        done = start(*words)
        assert done.code == 0, (line, done.err)
        if words[1] == "search":
            assert all(name in done.out for name in ("ann_0001.png", "zoe_0001.png", "known above a cosine of"))
    assert {"page.html", "people.safetensors", "features.npz"} <= {path.name for path in own_folder.iterdir()}


@pytest.mark.filterwarnings("ignore:a FAR of")
def test_the_guide_runs(own_folder, capsys):
    exec("\n".join(blocks("docs/faces.md", "python")), {})  # the page's own code
    assert "Match(name=" in capsys.readouterr().out
    (text,) = blocks("docs/faces.md", "yaml")
    (own_folder / "faces.yaml").write_text(text)
    assert recipe.load(own_folder / "faces.yaml").model.name == "sfnet-20"
    commands = [line for block in blocks("docs/faces.md", "bash") for line in block.splitlines()]
    known = typer.main.get_command(app).commands
    for line in commands:
        program, name, *rest = line.split()
        assert program == "hypersphere" and name in known
        group = getattr(known[name], "commands", None)
        command = known[name] if group is None else group[rest[0]]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in line.partition("#")[0].split() if word.startswith("-")} <= options, line


# ------------------------------------------------------------------------------------------ protocols by name


def test_protocols_have_names():
    assert list(protocols) == ["ijb", "lfw10", "megaface", "ytf10"]
    functions = {"lfw10": lfw10, "lfw": lfw10, "ytf": ytf10, "megaface": megaface, "IJB-C": ijb}
    assert all(protocols[name].factory is function for name, function in functions.items())
    for name in protocols:  # what a benchmark gives is no option
        options = {option.name for option in protocols[name].options}
        assert options and not options & {"left", "frames", "probes", "features", "same", "distractors", "gallery"}
        assert all(option.help for option in protocols[name].options)
    assert not set(protocols) & set(evaluations)


@pytest.mark.parametrize("unit", [False, True])
def test_ijb_against_loops(unit):
    rng = np.random.default_rng(0)
    templates = rng.permutation(np.repeat(np.arange(30), 6))
    media = rng.integers(0, 3, len(templates)) + 10 * templates
    subject = rng.integers(0, 8, 30)
    centres = rng.normal(size=(8, 6))
    features = centres[subject[templates]] + rng.normal(size=(len(templates), 6))
    pooled = []
    for t in range(30):
        rows = [features[(templates == t) & (media == m)] for m in np.unique(media[templates == t])]
        if unit:
            rows = [row / np.linalg.norm(row, axis=1, keepdims=True) for row in rows]
        mean = np.mean([row.mean(0) for row in rows], axis=0)
        pooled.append(mean / np.linalg.norm(mean))
    pooled = np.array(pooled)
    pairs = [(i, j) for j in range(30) for i in range(j)]
    same = np.array([subject[i] == subject[j] for i, j in pairs])
    gallery = [int(np.flatnonzero(subject == s)[0]) for s in np.unique(subject)[:-2]]
    probes = [t for t in range(30) if t not in gallery]
    found = protocols.create(
        "ijb", torch.from_numpy(features), templates, media, subject[templates], pairs=pairs, gallery=gallery,
        probes=probes, fars=(0.1,), fpirs=(0.25,), ranks=(1, 2), samples=20, unit=unit,
    )  # fmt: skip
    scores = cosines(pooled, pairs)
    assert found.verification["auc"].value == pytest.approx(roc_auc_score(same, scores))
    assert found.verification["tar@far=0.1"].value == pytest.approx(tar_by_hand(scores, same, 0.1))
    against = pooled[probes] @ pooled[gallery].T
    own = np.array([subject[gallery] == subject[t] for t in probes])
    mated = own.any(1)
    best = against.argmax(1)
    right = own[np.arange(len(probes)), best] & mated
    assert found.identification.rank_k(1).value == pytest.approx(right[mated].mean())
    strangers = np.sort(against[~mated].max(1))[::-1]
    line = strangers[int(np.ceil(0.25 * len(strangers))) - 1]
    assert found.identification.dir_at_fpir(0.25).value == pytest.approx(
        (right & (against.max(1) > line))[mated].mean()
    )
    assert "TAR at a FAR of at most 0.1" in str(found) and "rank-1 identification" in str(found)


def test_ijb_messages():
    features = torch.eye(3)
    with pytest.raises(ArgumentError, match="nothing to compare"):
        ijb(features, [0, 1, 2], [0, 1, 2], [0, 1, 2])
    with pytest.raises(ArgumentError, match="probes must be given, too"):
        ijb(features, [0, 1, 2], [0, 1, 2], [0, 1, 1], gallery=[0], pairs=[(0, 1), (1, 2)])
    with pytest.raises(ArgumentError, match="two for 0"):
        ijb(features, [0, 0, 1], [0, 1, 2], [0, 1, 2], gallery=[0], probes=[1])
    with pytest.raises(ArgumentError, match="probes must be templates that have images, got 7"):
        ijb(features, [0, 1, 2], [0, 1, 2], [0, 1, 0], gallery=[0], probes=[7])
    with pytest.raises(ArgumentError, match="must name each of 3 features, got 2"):
        ijb(features, [0, 1, 2], [0, 1, 2], [0, 1], gallery=[0], probes=[1])


# ------------------------------------------------------------------------------------------------- real data

FACES = Path(os.environ.get("HYPERSPHERE_FACES", "none"))
"""Folder that tools/import_lfw.py wrote, with a run of tools/import_weights.py --run in it, called mobilefacenet."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:a FAR of")
@pytest.mark.skipif(not (FACES / "mobilefacenet" / "recipe.yaml").is_file(), reason="needs LFW and MobileFaceNet")
def test_the_commands_reach_the_published_accuracy_on_lfw(start, tmp_path):
    run = Path(shutil.copytree(FACES / "mobilefacenet", tmp_path / "run"))
    done = start(
        *("verify", run, FACES / "pairs.txt", "--landmarks", FACES / "landmarks.txt"),
        *("--report", tmp_path / "page.html"),
    )
    assert done.code == 0, done.err
    print(done.out)
    found = json.loads((run / "verification.json").read_text())["results"]
    accuracy = found["accuracy"]
    assert (accuracy["genuine"], accuracy["impostors"]) == (3000, 3000)
    assert abs(accuracy["value"] - 0.9917) < accuracy["standard_error"]
    assert found["eer"]["value"] < 0.015 and found["auc"]["value"] > 0.995
    assert (tmp_path / "page.html").is_file()
