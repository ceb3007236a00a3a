"""Recipes of ImageNet: their constants, and two steps on a folder of small pictures of noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import hypersphere as hs
from hypersphere import recipe
from hypersphere.data import load
from hypersphere.data.preprocess import Preprocess
from hypersphere.errors import ArgumentError
from hypersphere.nn import Decoupled
from hypersphere.orthogonal.rotation import rotations
from hypersphere.recipe.schema import Augment
from hypersphere.runs import RunFolder
from hypersphere.train import Trainer

CPU = torch.device("cpu")
NAMES = ["imagenet-resnet18-mhe", "imagenet-resnet18-dc", "imagenet-cnn10-opt", "imagenet-resnet18-opt"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder with ``imagenet/train`` and ``imagenet/val`` of six classes."""
    root, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for part, count in (("train", 3), ("val", 2)):
        for label in range(6):
            folder = root / "imagenet" / part / f"n{label:08d}"
            folder.mkdir(parents=True)
            for index in range(count):
                picture = Image.fromarray(draw.integers(256, size=(50, 60, 3), dtype=np.uint8))
                picture.save(folder / f"{part}_{index}.JPEG")
    return root


def train(name, folder, pictures, *overrides):
    widths = "model.widths=[4, 6, 8]" if "cnn" in name else "model.widths=[4, 6, 8, 8]"
    small = ["data.size=32", "data.stretch=40", "data.batch_size=4", "data.workers=0", widths]
    short = ["train.steps=2", "train.log_every=1", "train.tensorboard=false", "train.precision=fp32"]
    plan = recipe.load(name, [*small, *short, *overrides])
    run = Trainer(plan, RunFolder.create(folder, plan, CPU), CPU, data_root=pictures)
    return run, run.fit()


@pytest.mark.parametrize("name", NAMES)
def test_they_take_two_steps(name, tmp_path, pictures):
    run, metrics = train(name, tmp_path / "run", pictures)
    assert {"accuracy", "top5_accuracy", "cross_entropy"} <= metrics.keys()
    assert 0 <= metrics["accuracy"] <= metrics["top5_accuracy"] <= 1
    rows = [row for row in run.run.rows() if row["split"] == "train"]
    assert len(rows) == 2 and all(np.isfinite(row["loss"]) for row in rows)
    assert ("mhe" in rows[0]) == (name == NAMES[0]) and ("orthogonal" in rows[0]) == (name == NAMES[1])
    files = sorted((pictures / "imagenet" / "val").rglob("*.JPEG"))
    assert hs.load(tmp_path / "run")(files[:2]).shape == (2, 6)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("imagenet-resnet18-mhe", ["regularisers=[]"]),
        ("imagenet-resnet18-mhe", ["regularisers.0.name=rp-comhe", "model.name=resnet34"]),
        ("imagenet-resnet18-dc", ["convert=null", "project.every=0", "regularisers=[]"]),
        ("imagenet-cnn10-opt", ["orthogonal=null"]),
        ("imagenet-resnet18-opt", ["loss.rotation=null", "model.name=resnet18-opt-a"]),
    ],
)
def test_the_other_rows_of_their_tables_run_too(name, overrides, tmp_path, pictures):
    _, metrics = train(name, tmp_path / "run", pictures, *overrides)
    assert 0 <= metrics["top5_accuracy"] <= 1


def test_what_they_train_is_what_the_tables_say(tmp_path, pictures):
    parts = {name: train(name, tmp_path / name, pictures)[0] for name in NAMES}
    assert not any(isinstance(layer, Decoupled) for layer in parts[NAMES[0]].model.modules())
    converted = [layer for layer in parts[NAMES[1]].model.modules() if isinstance(layer, Decoupled)]
    assert converted and len(converted) == sum(isinstance(m, torch.nn.Conv2d) for m in parts[NAMES[1]].model.modules())
    turned = [name for name, _ in rotations(parts[NAMES[2]].model)]
    assert len(turned) == 10 and not any(name.startswith("embed") for name in turned)
    assert not [*rotations(parts[NAMES[3]].model)] and not parts[NAMES[3]].head.weight.requires_grad


def test_constants_of_the_published_schedules():
    plans = {name: recipe.load(name) for name in NAMES}
    schedules = {
        "imagenet-resnet18-mhe": (64, 1e-4, (150_000, 300_000, 400_000), 500_000),
        "imagenet-resnet18-dc": (40, 1e-4, (200_000, 375_000, 550_000), 700_000),
        "imagenet-cnn10-opt": (128, 5e-4, (200_000, 375_000, 550_000), 700_000),
        "imagenet-resnet18-opt": (128, 5e-4, (200_000, 375_000, 550_000), 700_000),
    }
    for name, (batch, decay, milestones, steps) in schedules.items():
        plan = plans[name]
        assert (plan.data.batch_size, plan.optimiser.weight_decay) == (batch, decay)
        assert (plan.schedule.milestones, plan.train.steps) == (milestones, steps)
        assert (plan.optimiser.name, plan.optimiser.lr, plan.optimiser.momentum) == ("sgd", 0.1, 0.9)
        assert plan.data.options["size"] == (224, 224) and plan.data.options["stretch"] == (256, 256)
        assert plan.data.augment.flip and not plan.data.augment.crop
    dc = plans["imagenet-resnet18-dc"]
    assert (dc.convert.name, dc.project.every, dc.regularisers[0].weight) == ("tanh", 100, 5e-6)


# ------------------------------------------------------------------------------------------------- windows


def test_images_are_stretched_and_seen_through_windows(tmp_path):
    for part in ("train", "test"):
        (tmp_path / part / "a").mkdir(parents=True)
        # Left half black, right half white, twice as high as wide.
        picture = np.zeros((16, 8, 3), np.uint8)
        picture[:, 4:] = 255
        Image.fromarray(picture).save(tmp_path / part / "a" / "one.png")
    data = load("image-folder", path=str(tmp_path), size=(4, 6), stretch=(8, 8))
    assert data.train.shape == (3, 4, 6)
    whole = data.train.read(0)
    assert whole.shape == (3, 8, 8) and int(whole[:, :, :3].max()) == 0 and int(whole[:, :, 5:].min()) == 255
    again = data.hold_out([]).train.select(torch.tensor([0, 0]), torch.tensor([0, 0]))
    assert torch.equal(again.read(1), whole) and torch.equal(again.join(again, torch.zeros(4)).read(3), whole)
    with pytest.raises(ArgumentError, match=r"stretch must be a height and a width of at least size = \(4, 6\), got"):
        load("image-folder", path=str(tmp_path), size=(4, 6), stretch=(8, 5))


def places(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return seen[:, 0, 0, 0] // 7, seen[:, 0, 0, 0] % 7


def numbered(count: int) -> torch.Tensor:
    """Images (count, 1, 6, 7) whose pixels are numbered."""
    return torch.arange(42, dtype=torch.uint8).view(1, 1, 6, 7).repeat(count, 1, 1, 1)


def test_a_window_is_central_in_evaluation_and_anywhere_in_training():
    preprocess = Preprocess((1, 4, 4), "none", Augment())
    seen = (preprocess(numbered(2)) * 255).round().long()
    assert torch.equal(seen[0, 0], numbered(1)[0, 0, 1:5, 1:5].long())
    count = 6000
    drawn = preprocess.augmented(numbered(count), torch.Generator().manual_seed(0), count, slice(0, count))
    drawn = (drawn * 255).round().long()
    rows, columns = places(drawn)
    for index in range(3):
        assert float((rows == index).float().mean()) == pytest.approx(1 / 3, abs=0.03)
    for index in range(4):
        assert float((columns == index).float().mean()) == pytest.approx(1 / 4, abs=0.03)
    steps = drawn - drawn[:, :, :1, :1]  # each is a window, whole and in one piece
    assert torch.equal(steps, (7 * torch.arange(4).view(4, 1) + torch.arange(4)).expand(count, 1, 4, 4))


def test_windows_do_not_depend_on_the_number_of_processes():
    preprocess, images = Preprocess((1, 4, 4), "none", Augment(flip=True)), numbered(12)

    def part(share):
        return preprocess.augmented(images[share], torch.Generator().manual_seed(3), 12, share)

    assert torch.equal(torch.cat([part(slice(0, 6)), part(slice(6, 12))]), part(slice(0, 12)))


def test_images_of_the_size_that_is_seen_are_changed_as_before():
    images = numbered(5)
    preprocess = Preprocess((1, 6, 7), "none", Augment(flip=True))
    draws = torch.rand(4, 5, generator=torch.Generator().manual_seed(1))
    wanted = torch.where((draws[0] < 0.5).view(5, 1, 1, 1), images.flip(3), images) / 255
    assert torch.equal(preprocess.augmented(images, torch.Generator().manual_seed(1), 5, slice(0, 5)), wanted)


def test_constants_are_measured_where_evaluation_looks(tmp_path):
    (tmp_path / "a").mkdir()
    picture = np.full((8, 8, 3), 255, np.uint8)
    picture[2:6, 2:6] = 51
    for index in range(4):
        Image.fromarray(picture).save(tmp_path / "a" / f"{index}.png")
    data = load("image-folder", path=str(tmp_path), size=(4, 4), stretch=(8, 8))
    preprocess = Preprocess(data.train.shape, "channel", Augment())
    preprocess.measure(data.train)
    torch.testing.assert_close(preprocess.mean.flatten(), torch.full((3,), 0.2))
