"""Training images that are tested on in place of the test images: ``data.validation``."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from helpers.runs import noise
from hypersphere import recipe, runs
from hypersphere.data import Dataset, FolderSplit, TensorSplit, load
from hypersphere.errors import ArgumentError
from hypersphere.recipe import RecipeError


def rows_of(split: TensorSplit) -> Counter[bytes]:
    images = zip(split.images, split.labels.tolist(), strict=True)
    return Counter(image.numpy().tobytes() + bytes([label]) for image, label in images)


def plan(*overrides: str) -> recipe.Recipe:
    return recipe.load("digits-softmax", ["data.hold_out=[]", *overrides])


def test_the_training_images_are_divided_and_the_test_images_gone():
    whole = runs.load_data(plan())
    part = runs.load_data(plan("data.validation=200"))
    assert len(part.test) == 200 and len(part.train) == len(whole.train) - 200
    assert rows_of(part.train) + rows_of(part.test) == rows_of(whole.train)
    assert part.class_names == whole.class_names


def test_every_class_has_its_share():
    whole = load("digits")
    counts = whole.train.labels.bincount().double()
    for number in (7, 100, 333, 1000):
        left = whole.with_validation(number).test.labels.bincount(minlength=10)
        assert int(left.sum()) == number
        assert float((left - number * counts / counts.sum()).abs().max()) < 1
    balanced = noise((1, 2, 2), [50] * 7)
    assert sorted(balanced.with_validation(30).test.labels.bincount().tolist()) == [4, 4, 4, 4, 4, 5, 5]


def test_one_image_of_every_class_stays():
    few = noise((1, 2, 2), [1, 1, 2, 40])
    part = few.with_validation(40)
    assert part.test.labels.bincount(minlength=4).tolist() == [0, 0, 1, 39]
    assert part.train.labels.bincount().tolist() == [1, 1, 1, 1]
    with pytest.raises(ArgumentError, match=r"must be between 0 and 40 for the 44 training images of 'noise'.*got 41"):
        few.with_validation(41)
    with pytest.raises(ArgumentError, match="must be between 0 and 40"):
        few.with_validation(-1)


def test_the_choice_does_not_depend_on_the_seed_of_the_run():
    first, second = (runs.load_data(plan("data.validation=150", f"seed={seed}")) for seed in (0, 7))
    assert torch.equal(first.test.images, second.test.images) and torch.equal(first.train.images, second.train.images)
    other = load("digits").with_validation(150, seed=1)
    assert not torch.equal(other.test.images, first.test.images)


def test_it_is_taken_before_classes_are_made_rare_or_held_out():
    chosen = plan("data.validation=200", "data.imbalance.keep={0: 5}", "data.hold_out=[9]")
    part, plain = runs.load_data(chosen), runs.load_data(plan("data.validation=200"))
    kept = plain.test.labels != 9
    assert torch.equal(part.test.images, plain.test.images[kept])  # class 0 is as frequent in it as ever
    assert part.train.labels.bincount()[0] == 5
    assert part.unseen is not None and len(part.unseen) == int((plain.train.labels == 9).sum() + (~kept).sum())
    real = rows_of(load("digits").test)
    assert not real & (rows_of(part.test) + rows_of(part.train))


def test_images_in_folders_are_divided_by_their_files(tmp_path):
    for name, count in (("train/a", 9), ("train/b", 6), ("test/a", 2), ("test/b", 2)):
        (tmp_path / "set" / name).mkdir(parents=True)
        for index in range(count):
            Image.new("RGB", (4, 4)).save(tmp_path / "set" / name / f"{index}.png")
    whole = load("image-folder", tmp_path, path="set", size=(4, 4))
    part = load("image-folder", tmp_path, path="set", size=(4, 4), held_back=5)
    assert isinstance(part.test, FolderSplit) and isinstance(whole.train, FolderSplit)
    assert part.test.labels.bincount().tolist() == [3, 2]
    assert sorted((*part.train.files, *part.test.files)) == sorted(whole.train.files)
    assert all(file.parent.name == "ab"[label] for file, label in zip(part.test.files, part.test.labels, strict=True))


def graph() -> Dataset:
    return replace(noise((1, 2, 2), [4, 4]), context={"edges": torch.zeros(2, 0)})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (graph(), "validation must be 0 for 'noise', whose samples share edges, got 3"),
        (noise((1, 2, 2), [4, 4, 4]).hold_out([0]), "validation must be 0 for 'noise', which has classes to choose or"),
        (
            replace(noise((1, 2, 2), [4]), train=TensorSplit(torch.zeros(4, 3), torch.zeros(4))),
            "validation must be 0 for 'noise', which has no labels of classes",
        ),
    ],
    ids=["graph", "few-shot", "no labels"],
)
def test_what_cannot_be_divided_says_so(data, message):
    assert data.with_validation(0) is data
    with pytest.raises(ArgumentError, match=message):
        data.with_validation(3)


def test_mistakes_name_the_place_in_the_recipe(tmp_path):
    with pytest.raises(RecipeError, match=r"data\.validation must be between 0 and \d+ for the \d+ training images"):
        runs.load_data(plan("data.validation=100000"))
    with pytest.raises(RecipeError, match=r"data\.validation should be greater than or equal to 0"):
        plan("data.validation=-1")
    Path(tmp_path / "recipe.yaml").write_text("name: x\ndata: {name: digits, validation: 1000000}\n")
    with pytest.raises(RecipeError, match=r"recipe.yaml, line 2: data\.validation must be"):
        runs.load_data(recipe.load(tmp_path / "recipe.yaml"))


def test_hashes_tell_what_is_tested_on():
    assert plan("data.validation=0").hash == plan().hash != plan("data.validation=10").hash


def test_alphabets_of_omniglot_may_have_their_older_name():
    old = recipe.load("omniglot-few-shot-baseline", ["data.validation=[Latin]"])
    new = recipe.load("omniglot-few-shot-baseline", ["data.validation_alphabets=[Latin]"])
    assert old.data.options["validation_alphabets"] == ("Latin",) and old.data.validation == 0
    assert old.hash == new.hash != recipe.load("omniglot-few-shot-baseline").hash
