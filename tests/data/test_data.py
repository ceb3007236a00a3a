"""Data sets: every format against an independent reading, every complaint, and the open-set division."""

import gzip
import hashlib
import io
import json
import lzma
import os
import pickle
import runpy
import struct
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from helpers.paths import TOOLS
from hypersphere.data import (
    DataError,
    Dataset,
    FolderSplit,
    TensorSplit,
    data_roots,
    datasets,
    inventory,
    load,
)
from hypersphere.data.sources import sources
from hypersphere.data.splits import decode_image, image_files, stratified_split
from hypersphere.errors import ArgumentError, HypersphereError
from hypersphere.registry import UnknownNameError

CIFAR10_NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
CIFAR10_FILES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


@pytest.fixture(autouse=True)
def _no_data_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.delenv("HYPERSPHERE_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


# ---------------------------------------------------------------- files as they are published


def idx_bytes(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder, rng, *, compress=False, train=7, test=3):
    folder.mkdir(parents=True)
    arrays = {}
    for part, count in (("train", train), ("t10k", test)):
        arrays[part] = rng.integers(0, 256, (count, 4, 5), np.uint8), rng.integers(0, 10, count, np.uint8)
        for kind, array in zip(("images-idx3", "labels-idx1"), arrays[part], strict=True):
            name, raw = f"{part}-{kind}-ubyte", idx_bytes(array)
            if compress:
                (folder / f"{name}.gz").write_bytes(gzip.compress(raw))
            else:
                (folder / name).write_bytes(raw)
    return arrays


def python2_batch(pixels, label_lists):
    """What Python 2 and its numpy wrote: protocol 2, byte strings, numpy.core.multiarray."""
    text = lambda value: b"U" + bytes([len(value)]) + value.encode()  # noqa: E731
    integer = lambda value: b"J" + struct.pack("<i", value)  # noqa: E731
    raw = pixels.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
        + integer(pixels.shape[0]) + integer(pixels.shape[1]) + b"\x86"
        + b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNN" + integer(-1) + integer(-1) + b"K\x00tb"
        + b"\x89T" + struct.pack("<I", len(raw)) + raw + b"tb"
    )  # fmt: skip
    items = text("data") + array
    for key, labels in label_lists.items():
        items += text(key) + b"](" + b"".join(map(integer, labels)) + b"e"
    return b"\x80\x02}(" + items + b"u."


def python3_batch(pixels, label_lists, protocol=2):
    return pickle.dumps({b"data": pixels, **{key.encode(): list(v) for key, v in label_lists.items()}}, protocol)


def cifar_arrays(rng, files, count, **classes):
    return {
        file: (
            rng.integers(0, 256, (count, 3072), np.uint8),
            {key: rng.integers(0, size, count).tolist() for key, size in classes.items()},
        )
        for file in files
    }


def write_cifar10(root, rng, form, count=3):
    arrays = cifar_arrays(rng, CIFAR10_FILES, count, labels=10)
    folder = root / ("cifar-10-batches-bin" if form == "binary" else "cifar-10-batches-py")
    folder.mkdir(parents=True)
    for file, (pixels, labels) in arrays.items():
        if form == "binary":
            rows = [bytes([label]) + row.tobytes() for label, row in zip(labels["labels"], pixels, strict=True)]
            (folder / f"{file}.bin").write_bytes(b"".join(rows))
        else:
            (folder / file).write_bytes(form(pixels, labels))
    if form == "binary":
        (folder / "batches.meta.txt").write_text("\n".join(CIFAR10_NAMES) + "\n\n")
    else:
        (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": CIFAR10_NAMES}, 2))
    return folder, arrays


def write_cifar100(root, rng, form):
    arrays = cifar_arrays(rng, ["train", "test"], 4, coarse_labels=2, fine_labels=5)
    names = {"fine_label_names": list("abcde"), "coarse_label_names": ["low", "high"]}
    folder = root / ("cifar-100-binary" if form == "binary" else "cifar-100-python")
    folder.mkdir(parents=True)
    for file, (pixels, labels) in arrays.items():
        if form == "binary":
            rows = zip(labels["coarse_labels"], labels["fine_labels"], pixels, strict=True)
            (folder / f"{file}.bin").write_bytes(b"".join(bytes([c, f]) + row.tobytes() for c, f, row in rows))
        else:
            (folder / file).write_bytes(form(pixels, labels))
    if form == "binary":
        for key, values in names.items():
            (folder / f"{key}.txt").write_text("\n".join(values) + "\n")
    else:
        (folder / "meta").write_bytes(pickle.dumps(names, 2))
    return folder, arrays


def write_image(path, colour=(10, 200, 30), size=(8, 8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


# ---------------------------------------------------------------- readers


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", "mnist"),
        ("mnist", "MNIST/raw"),
        ("fashion-mnist", "fashion-mnist"),
        ("fashion-mnist", "FashionMNIST/raw"),
    ],
)
def test_idx_sets_are_read_from_every_folder_plain_or_compressed(tmp_path, rng, name, folder, compress):
    arrays = write_idx(tmp_path / folder, rng, compress=compress)
    data = load(name, tmp_path)
    for split, part in ((data.train, "train"), (data.test, "t10k")):
        images, labels = arrays[part]
        assert split.images.dtype == torch.uint8 and split.labels.dtype == torch.int64
        assert split.shape == (1, 4, 5)
        np.testing.assert_array_equal(split.images.numpy(), images[:, None])
        np.testing.assert_array_equal(split.labels.numpy(), labels)
    assert data.name == name and len(data.class_names) == 10


def test_the_named_folder_itself_may_be_the_root_but_no_other(tmp_path, rng):
    write_idx(tmp_path / "mnist", rng)
    assert len(load("mnist", tmp_path / "mnist").train) == 7
    with pytest.raises(DataError):
        load("fashion-mnist", tmp_path / "mnist")  # the same file names, another set


@pytest.mark.parametrize("form", ["binary", python2_batch, python3_batch])
def test_cifar10_is_read_from_every_form(tmp_path, rng, form):
    _, arrays = write_cifar10(tmp_path, rng, form)
    data = load("cifar10", tmp_path)
    assert data.class_names == tuple(CIFAR10_NAMES)
    for split, files in ((data.train, CIFAR10_FILES[:5]), (data.test, CIFAR10_FILES[5:])):
        pixels = np.concatenate([arrays[file][0] for file in files])
        expected = np.stack([pixels[:, :1024], pixels[:, 1024:2048], pixels[:, 2048:]], 1).reshape(-1, 3, 32, 32)
        np.testing.assert_array_equal(split.images.numpy(), expected)
        assert split.labels.tolist() == [label for file in files for label in arrays[file][1]["labels"]]


@pytest.mark.parametrize("labels", ["fine", "coarse"])
@pytest.mark.parametrize("form", ["binary", python2_batch, python3_batch])
def test_cifar100_is_read_from_every_form_with_fine_and_coarse_labels(tmp_path, rng, form, labels):
    _, arrays = write_cifar100(tmp_path, rng, form)
    data = load("cifar100", tmp_path, labels=labels)
    assert data.class_names == (tuple("abcde") if labels == "fine" else ("low", "high"))
    for split, file in ((data.train, "train"), (data.test, "test")):
        assert split.labels.tolist() == arrays[file][1][f"{labels}_labels"]
        np.testing.assert_array_equal(split.images.numpy().reshape(4, 3072), arrays[file][0])


def test_column_major_pickled_arrays_keep_their_pixels(tmp_path, rng):
    folder, arrays = write_cifar10(tmp_path, rng, python3_batch)
    pixels, labels = arrays["test_batch"]
    (folder / "test_batch").write_bytes(python3_batch(np.asfortranarray(pixels), labels))
    np.testing.assert_array_equal(load("cifar10", tmp_path).test.images.numpy().reshape(3, 3072), pixels)


def test_digits_have_known_counts_and_values_and_the_same_division_each_time():
    from sklearn.datasets import load_digits

    first, again, other = load("digits"), load("digits"), load("digits", split_seed=1)
    assert (len(first.train), len(first.test), first.train.shape) == (1258, 539, (1, 8, 8))
    assert torch.equal(first.train.images, again.train.images)
    assert torch.equal(first.test.labels, again.test.labels)
    assert not torch.equal(first.test.images, other.test.images)
    both = torch.cat([first.train.images, first.test.images]).flatten(1).numpy()
    original = [[round(value * 255 / 16) for value in row] for row in load_digits().data]
    assert sorted(map(tuple, both.tolist())) == sorted(map(tuple, original))
    share = first.test.labels.bincount() / (first.test.labels.bincount() + first.train.labels.bincount())
    assert ((share - 0.3).abs() < 0.01).all()
    assert len(load("digits", test_fraction=0.5).test) == pytest.approx(1797 / 2, abs=5)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1.0, 2.0])
def test_a_test_fraction_outside_0_to_1_is_refused(fraction):
    with pytest.raises(ArgumentError, match="test_fraction must be between 0 and 1"):
        load("digits", test_fraction=fraction)


@given(st.lists(st.integers(0, 4), max_size=40), st.floats(0.05, 0.95), st.integers(0, 99))
def test_a_division_is_disjoint_complete_and_has_every_class_of_two(labels, fraction, seed):
    found = torch.tensor(labels, dtype=torch.int64)
    train, test = stratified_split(found, fraction, seed)
    assert sorted(train.tolist() + test.tolist()) == list(range(len(labels)))
    for label in set(labels):
        assert (found[train] == label).any()
        assert (found[test] == label).any() == (labels.count(label) > 1)


# ---------------------------------------------------------------- image folders


@pytest.mark.parametrize("test_name", ["test", "val"])
def test_image_folder_with_both_parts(tmp_path, test_name):
    write_image(tmp_path / "set/train/cat/1.PNG", (250, 0, 0))
    write_image(tmp_path / "set/train/ant/deep/2.ppm", (0, 250, 0))
    write_image(tmp_path / f"set/{test_name}/ant/3.bmp", (0, 0, 250))
    write_image(tmp_path / f"set/{test_name}/cat/4.webp")
    write_image(tmp_path / f"set/{test_name}/cat/5.jpeg")
    (tmp_path / "set/train/cat/notes.txt").write_text("no image")
    (tmp_path / "set/train/.cache").mkdir()
    data = load("image-folder", path=str(tmp_path / "set"), size=(6, 4))
    assert data.class_names == ("ant", "cat")
    assert data.train.labels.tolist() == [0, 1] and data.test.labels.tolist() == [0, 1, 1]
    assert data.train.shape == (3, 6, 4) and len(data.test) == 3
    image = data.train.read(1)
    assert image.dtype == torch.uint8 and image.is_contiguous()
    assert torch.equal(image, torch.tensor([250, 0, 0], dtype=torch.uint8).view(3, 1, 1).expand(3, 6, 4))


def test_image_folder_without_parts_is_divided_by_class(tmp_path):
    for name in ("a", "b"):
        for i in range(10):
            write_image(tmp_path / f"set/{name}/{i}.png")
    options = {"path": "set", "size": (4, 4), "test_fraction": 0.2}  # relative: below the data root
    data, again = load("image-folder", tmp_path, **options), load("image-folder", tmp_path, **options)
    assert data.test.labels.bincount().tolist() == [2, 2] and data.train.labels.bincount().tolist() == [8, 8]
    assert not set(data.train.files) & set(data.test.files)
    assert data.test.files == again.test.files
    assert all(f.parent.name == "ab"[i] for f, i in zip(data.test.files, data.test.labels.tolist(), strict=True))


def test_reading_scales_the_shorter_side_and_crops_the_centre(tmp_path):
    pixels = np.zeros((10, 40, 3), np.uint8)
    pixels[:, 15:25] = 255  # the central square of a wide image
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    Image.fromarray(pixels.transpose(1, 0, 2)).save(tmp_path / "tall.png")
    Image.fromarray(pixels[:, :, 0]).save(tmp_path / "grey.png")
    files = tuple(tmp_path / name for name in ("wide.png", "tall.png", "grey.png"))
    split = FolderSplit(files, torch.tensor([0, 0, 0]), (10, 10))
    for index in range(3):
        assert split.read(index).shape == (3, 10, 10) and (split.read(index) == 255).all()
    wide = FolderSplit(files, torch.tensor([0, 0, 0]), (5, 10)).read(0)  # scaled by 1/2 it is (5, 20)
    assert (wide[:, :, 4:6] == 255).all() and (wide[:, :, [0, 9]] == 0).all()


def test_empty_and_headless_files_are_left_out_with_one_warning_that_lists_them(tmp_path):
    for i in range(3):
        write_image(tmp_path / f"set/a/{i}.png")
    (tmp_path / "set/a/empty.jpg").touch()
    (tmp_path / "set/a/text.png").write_text("not an image")
    with pytest.warns(UserWarning) as caught:
        data = load("image-folder", path="set", size=(4, 4))
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "2 unreadable" in message and "empty.jpg" in message and "text.png" in message
    assert len(data.train) + len(data.test) == 3


def test_a_class_without_a_readable_image_is_an_error(tmp_path):
    write_image(tmp_path / "set/a/1.png")
    (tmp_path / "set/hollow").mkdir()
    with pytest.raises(DataError, match=r"hollow has no readable image \(0 unreadable"):
        load("image-folder", path="set", size=(4, 4))
    (tmp_path / "set/hollow/zero.png").touch()
    with pytest.raises(DataError, match=r"hollow has no readable image \(1 unreadable"):
        load("image-folder", path="set", size=(4, 4))


def test_a_corrupt_jpeg_is_named_when_it_is_read(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "cut.jpg")
    whole = (tmp_path / "cut.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    split = FolderSplit((tmp_path / "cut.jpg", tmp_path / "gone.png"), torch.tensor([0, 0]), (8, 8))
    with pytest.raises(DataError, match=r"cut\.jpg cannot be decoded .*truncated"):
        split.read(0)
    with pytest.raises(DataError, match=r"gone\.png does not exist"):
        split.read(1)


def test_wrong_image_folders_are_explained(tmp_path):
    with pytest.raises(DataError, match=r"no image folder 'nowhere'. Looked for nowhere, .*home.*nowhere"):
        load("image-folder", path="nowhere", size=(4, 4))
    (tmp_path / "bare").mkdir()
    with pytest.raises(DataError, match="bare has no class folders"):
        load("image-folder", path="bare", size=(4, 4))
    write_image(tmp_path / "half/train/a/1.png")
    with pytest.raises(DataError, match="neither test nor val"):
        load("image-folder", path="half", size=(4, 4))
    write_image(tmp_path / "half/test/b/1.png")
    with pytest.raises(DataError, match="same class folders; only one of them has a, b"):
        load("image-folder", path="half", size=(4, 4))
    with pytest.raises(ArgumentError, match="size must be a height and a width"):
        load("image-folder", path="half", size=(4, 0))


# ---------------------------------------------------------------- finding


def test_roots_are_the_given_one_else_the_variable_else_the_usual_ones(monkeypatch, tmp_path):
    home = tmp_path / "home"
    assert data_roots(None) == (Path("data"), home / ".cache/hypersphere/data")
    monkeypatch.setenv("HYPERSPHERE_DATA", "~/sets")
    assert data_roots(None) == (home / "sets",)
    assert data_roots(Path("given")) == (Path("given"),)


def test_the_first_root_that_holds_the_set_is_used(monkeypatch, tmp_path, rng):
    write_idx(tmp_path / "home/.cache/hypersphere/data/mnist", rng, train=1)
    assert len(load("mnist").train) == 1
    write_idx(tmp_path / "data/mnist", rng, train=2)
    assert len(load("mnist").train) == 2
    write_idx(tmp_path / "variable/mnist", rng, train=3)
    monkeypatch.setenv("HYPERSPHERE_DATA", str(tmp_path / "variable"))
    assert len(load("mnist").train) == 3
    write_idx(tmp_path / "given/mnist", rng, train=4)
    assert len(load("mnist", tmp_path / "given").train) == 4


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100"])
def test_a_missing_set_is_explained(tmp_path, name):
    with pytest.raises(DataError) as caught:
        load(name, tmp_path / "root")
    message = str(caught.value)
    assert isinstance(caught.value, HypersphereError)
    source = sources[name]
    assert f"{name} was not found" in message and source.home in message
    assert "--data-root" in message and "HYPERSPHERE_DATA" in message
    for layout in source.layouts:
        assert all(str(tmp_path / "root" / folder) in message for folder in layout.folders)
        assert all(file in message and (md5 or "no MD5") in message for file, md5 in layout.md5.items())
    assert all(str(root) in message for root in data_roots(tmp_path / "root"))


def test_an_incomplete_set_names_what_it_lacks(tmp_path, rng):
    folder, _ = write_cifar100(tmp_path, rng, python2_batch)
    (folder / "meta").unlink()
    with pytest.raises(DataError, match=r"cifar-100-python \(lacks meta\)"):
        load("cifar100", tmp_path)


def test_unknown_names_and_options_are_answered_with_the_nearest():
    with pytest.raises(UnknownNameError, match=r"unknown dataset 'cifar-11'. Did you mean 'cifar10'\?"):
        load("cifar-11")
    with pytest.raises(ArgumentError, match=r"test_fracton is not an option of 'digits'. Did you mean 'test_fraction'"):
        load("digits", test_fracton=0.5)
    with pytest.raises(ArgumentError, match="labels must be one of 'fine', 'coarse', got 'medium'"):
        load("cifar100", labels="medium")


def test_the_registry_shows_every_set_with_its_options():
    images = ("celeba-subset", "cifar10", "cifar100", "digits", "fashion-mnist", "image-folder", "mnist")
    others = ("cora", "citeseer", "pubmed", "modelnet40", "shapes", "cifar100-few-shot", "mini-imagenet", "omniglot")
    assert list(datasets) == sorted([*images, *others])
    assert [str(option) for option in datasets["cifar100"].options] == ["labels='fine'"]
    shown = [o.name for o in datasets["image-folder"].options]
    assert shown == ["path", "size", "test_fraction", "split_seed", "stretch"]
    assert all(entry.help and all(o.help for o in entry.options) for entry in map(datasets.__getitem__, datasets))


# ---------------------------------------------------------------- damaged files


def idx_damage(tmp_path, rng, file, change, compress=False):
    write_idx(tmp_path / "mnist", rng, compress=compress)
    path = tmp_path / "mnist" / file
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError) as caught:
        load("mnist", tmp_path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_damaged_idx_files_are_named_with_what_was_expected(tmp_path, rng):
    images, labels = "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
    message = idx_damage(tmp_path / "1", rng, images, lambda raw: raw[:-5])
    assert "has 151 bytes, expected 156" in message
    message = idx_damage(tmp_path / "7", rng, images, lambda raw: raw + b"more")
    assert "has 160 bytes, expected 156" in message
    message = idx_damage(tmp_path / "2", rng, images, lambda raw: b"\x00\x00\x0d\x03" + raw[4:])
    assert "begins with 0x00000d03, expected 0x00000803" in message
    message = idx_damage(tmp_path / "3", rng, labels, lambda raw: b"")
    assert "expected 0x00000801" in message
    message = idx_damage(tmp_path / "4", rng, labels, lambda raw: raw[:6])
    assert "has 6 bytes" in message
    message = idx_damage(tmp_path / "5", rng, labels, lambda raw: raw[:-1] + b"\x0a")
    assert "has the label 10 at image 2, expected 0 to 9" in message
    message = idx_damage(tmp_path / "6", rng, labels, lambda raw: idx_bytes(np.zeros(2, np.uint8)))
    assert "has 3 images but" in message and "has 2 labels" in message


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"not gzip at all",
        lambda raw: raw[:-8] + b"\0" * 8,
        lambda raw: raw[:12] + b"\xff" * 20 + raw[32:],
    ],
)
def test_a_bad_gzip_file_is_named(tmp_path, rng, change):
    message = idx_damage(tmp_path, rng, "train-images-idx3-ubyte.gz", change, compress=True)
    assert "is not a complete gzip file" in message


def test_a_truncated_binary_cifar_file_is_named(tmp_path, rng):
    folder, _ = write_cifar10(tmp_path, rng, "binary")
    path = folder / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"data_batch_3\.bin has 9,218 bytes, expected a multiple of 3,073"):
        load("cifar10", tmp_path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"data_batch_3\.bin has 0 bytes"):
        load("cifar10", tmp_path)
    path.write_bytes(bytes([10]) + bytes(3072))
    with pytest.raises(DataError, match=r"data_batch_3\.bin has the label 10 at image 0, expected 0 to 9"):
        load("cifar10", tmp_path)


class Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("file", ["test_batch", "batches.meta"])
def test_a_malicious_pickle_is_refused_without_executing_anything(tmp_path, rng, file, protocol):
    folder, _ = write_cifar10(tmp_path, rng, python2_batch)
    marker = tmp_path / "executed"
    (folder / file).write_bytes(pickle.dumps({"data": Malicious(marker), "label_names": []}, protocol))
    with pytest.raises(DataError, match=rf"{file} is not .* asks for {os.name}\.mkdir.*Nothing in it was executed"):
        load("cifar10", tmp_path)
    assert not marker.exists()
    pickle.loads((folder / file).read_bytes())  # the file does what the reader must not do
    assert marker.exists()


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (b"", "Ran out of input"),
        (b"garbage", "is not a Python CIFAR file"),
        (python2_batch(np.zeros((2, 3072), np.uint8), {"labels": [0, 1]})[:-3000], "truncated"),
        (pickle.dumps([1, 2]), "holds a list, expected a dictionary"),
        (pickle.dumps({"labels": [0]}), "no array 'data'"),
        (pickle.dumps({"data": np.zeros((1, 3072)), "labels": [0]}, 2), "array of type 'f8' where uint8 belongs"),
        (pickle.dumps({"data": np.array([{}, []], object), "labels": [0]}, 2), "array of type 'O8'"),
        (python3_batch(np.zeros((1, 3000), np.uint8), {"labels": [0]}), "no array 'data' of 3,072 bytes"),
        (python3_batch(np.zeros((2, 3072), np.uint8), {"labels": [0]}), "has 2 images but 1 'labels'"),
        (python3_batch(np.zeros((1, 3072), np.uint8), {"label": [0]}), "no list of labels 'labels'"),
        (python3_batch(np.zeros((1, 3072), np.uint8), {"labels": [300]}), "no list of labels 'labels'"),
        (python3_batch(np.zeros((1, 3072), np.uint8), {"labels": [77]}), "has the label 77 at image 0"),
    ],
)
def test_broken_pickles_are_named(tmp_path, rng, raw, complaint):
    folder, _ = write_cifar10(tmp_path, rng, python2_batch)
    (folder / "data_batch_2").write_bytes(raw)
    with pytest.raises(DataError) as caught:
        load("cifar10", tmp_path)
    assert str(folder / "data_batch_2") in str(caught.value) and complaint in str(caught.value)


def test_missing_class_names_are_named(tmp_path, rng):
    folder, _ = write_cifar100(tmp_path / "1", rng, python2_batch)
    (folder / "meta").write_bytes(pickle.dumps({"names": []}))
    with pytest.raises(DataError, match="meta has no list of names 'fine_label_names'"):
        load("cifar100", tmp_path / "1")
    folder, _ = write_cifar100(tmp_path / "2", rng, "binary")
    (folder / "fine_label_names.txt").write_text("\n")
    with pytest.raises(DataError, match=r"fine_label_names\.txt has no class names"):
        load("cifar100", tmp_path / "2")


def test_a_file_that_may_not_be_read_is_named(monkeypatch, tmp_path, rng):
    write_idx(tmp_path / "mnist", rng)

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte cannot be read .*Permission denied"):
        load("mnist", tmp_path)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"needs scikit-learn.*hypersphere\[workbench\]"):
        load("digits")


# ---------------------------------------------------------------- inventory


def state(name, root, *, verify):
    return next(row for row in inventory(root, verify=verify) if row.name == name)


def publish(monkeypatch, name, folder, records=None):
    """Take the files of ``folder`` for the published ones."""
    layouts = []
    for layout in sources[name].layouts:
        sums = dict.fromkeys(layout.md5)
        if folder.name in layout.folders:
            for file in sums:
                path = folder / file
                raw = path.read_bytes() if path.exists() else gzip.decompress((folder / f"{file}.gz").read_bytes())
                sums[file] = hashlib.md5(raw).hexdigest()
        layouts.append(replace(layout, md5=sums, records_md5=records or {}))
    monkeypatch.setitem(sources, name, replace(sources[name], layouts=tuple(layouts)))


def test_inventory_has_a_row_for_each_set_and_says_what_is_missing(tmp_path, rng):
    write_idx(tmp_path / "mnist", rng)
    rows = {row.name: row for row in inventory(tmp_path, verify=False)}
    images = ("celeba-subset", "cifar10", "cifar100", "digits", "fashion-mnist", "lfw", "mnist")
    others = ("cora", "citeseer", "pubmed", "modelnet40", "shapes", "mini-imagenet", "omniglot")
    assert list(rows) == sorted([*images, *others])
    assert rows["digits"].state == "embedded" and rows["digits"].folder is None
    assert (rows["mnist"].state, rows["mnist"].folder) == ("found", tmp_path / "mnist")
    assert rows["mnist"].detail == "4 files, not verified"
    assert rows["cifar10"].state == "missing" and "https://www.cs.toronto.edu" in rows["cifar10"].detail


@pytest.mark.parametrize("compress", [False, True])
def test_verify_compares_the_decompressed_content(monkeypatch, tmp_path, rng, compress):
    write_idx(tmp_path / "mnist", rng, compress=compress)
    row = state("mnist", tmp_path, verify=True)
    assert row.state == "corrupt"
    assert "train-images-idx3-ubyte" in row.detail and "expected 6bbc9ace898e44ae57da46a324031adb" in row.detail
    publish(monkeypatch, "mnist", tmp_path / "mnist")
    row = state("mnist", tmp_path, verify=True)
    assert row.state == "found"
    assert row.detail == "4 files, 7 training and 3 test images, checksums ok"


def test_verify_finds_one_changed_byte(monkeypatch, tmp_path, rng):
    folder, _ = write_cifar10(tmp_path, rng, "binary")
    publish(monkeypatch, "cifar10", folder)
    assert "15 training and 3 test images, checksums ok" in state("cifar10", tmp_path, verify=True).detail
    raw = bytearray((folder / "data_batch_4.bin").read_bytes())
    raw[100] ^= 1
    (folder / "data_batch_4.bin").write_bytes(raw)
    row = state("cifar10", tmp_path, verify=True)
    assert row.state == "corrupt" and "data_batch_4.bin has the MD5" in row.detail
    assert state("cifar10", tmp_path, verify=False).state == "found"


def test_verify_accepts_the_same_records_in_another_pickle(monkeypatch, tmp_path, rng):
    folder, arrays = write_cifar100(tmp_path, rng, python2_batch)
    records = {}
    for file, (pixels, labels) in arrays.items():
        rows = zip(labels["coarse_labels"], labels["fine_labels"], pixels, strict=True)
        records[file] = hashlib.md5(b"".join(bytes([c, f]) + row.tobytes() for c, f, row in rows)).hexdigest()
    publish(monkeypatch, "cifar100", folder, records)
    assert state("cifar100", tmp_path, verify=True).detail.endswith("checksums ok")
    (folder / "train").write_bytes(python3_batch(*arrays["train"]))
    row = state("cifar100", tmp_path, verify=True)
    assert row.state == "found" and row.detail.endswith("content ok (not the published file: train)")
    changed = arrays["train"][0].copy()
    changed[0, 0] ^= 1
    (folder / "train").write_bytes(python3_batch(changed, arrays["train"][1]))
    assert state("cifar100", tmp_path, verify=True).state == "corrupt"
    (folder / "train").write_bytes(b"broken")
    assert "is not a Python CIFAR file" in state("cifar100", tmp_path, verify=True).detail


def test_verify_reports_files_without_a_checksum_that_do_not_load(monkeypatch, tmp_path, rng):
    folder, _ = write_cifar10(tmp_path, rng, "binary")
    publish(monkeypatch, "cifar10", folder)
    layouts = tuple(replace(layout, md5=dict.fromkeys(layout.md5)) for layout in sources["cifar10"].layouts)
    monkeypatch.setitem(sources, "cifar10", replace(sources["cifar10"], layouts=layouts))
    (folder / "batches.meta.txt").write_text("only\ntwo\n")
    row = state("cifar10", tmp_path, verify=True)
    assert row.state == "corrupt" and "expected 0 to 1" in row.detail


# ---------------------------------------------------------------- held-out classes


def tiny_set(train_labels, test_labels, classes):
    """Each image carries its own number, so that it can be followed."""
    numbers = torch.arange(len(train_labels) + len(test_labels), dtype=torch.uint8).view(-1, 1, 1, 1)
    labels = torch.tensor([*train_labels, *test_labels], dtype=torch.int64)
    train, test = (TensorSplit(numbers[part], labels[part]) for part in (
        slice(len(train_labels)), slice(len(train_labels), None)
    ))  # fmt: skip
    return Dataset("tiny", tuple(f"class{i}" for i in range(classes)), train, test)


def test_hold_out_moves_and_relabels():
    part = tiny_set([0, 1, 2, 3], [3, 2, 1, 0], 4).hold_out(["class2", 0])
    assert part.class_names == ("class1", "class3") and part.unseen_names == ("class0", "class2")
    assert part.train.images.flatten().tolist() == [1, 3] and part.train.labels.tolist() == [0, 1]
    assert part.test.images.flatten().tolist() == [4, 6] and part.test.labels.tolist() == [1, 0]
    assert part.unseen.images.flatten().tolist() == [0, 2, 5, 7] and part.unseen.labels.tolist() == [0, 1, 1, 0]


def test_held_out_classes_keep_the_order_of_the_class_names():
    part = tiny_set(range(9), [], 9).hold_out([8, 0])
    assert part.unseen_names == ("class0", "class8") and part.unseen.labels.tolist() == [0, 1]


@given(st.data(), st.integers(2, 6))
def test_hold_out_keeps_every_image_with_its_class_name(data, classes):
    label_lists = st.lists(st.integers(0, classes - 1), max_size=20)
    train_labels, test_labels = data.draw(label_lists), data.draw(label_lists)
    held = data.draw(st.lists(st.integers(0, classes - 1), max_size=classes - 1))
    whole = tiny_set(train_labels, test_labels, classes)
    spelled = [data.draw(st.sampled_from([index, f"class{index}"])) for index in held]
    part = whole.hold_out(spelled)
    if not held:
        assert part is whole
        return
    assert set(part.unseen_names) == {f"class{i}" for i in held}
    assert len(part.class_names) + len(part.unseen_names) == classes
    true_name = {number: f"class{label}" for number, label in enumerate([*train_labels, *test_labels])}
    found = {}
    for split, names in (
        (part.train, part.class_names),
        (part.test, part.class_names),
        (part.unseen, part.unseen_names),
    ):
        for number, label in zip(split.images.flatten().tolist(), split.labels.tolist(), strict=True):
            assert number not in found
            found[number] = names[label]
    assert found == true_name
    assert all(number < len(train_labels) for number in part.train.images.flatten().tolist())
    assert all(number >= len(train_labels) for number in part.test.images.flatten().tolist())


def test_holding_out_twice_adds_to_the_unseen():
    part = tiny_set([0, 1, 2, 3], [3, 2, 1, 0], 4).hold_out([2]).hold_out(["class0"])
    assert part.class_names == ("class1", "class3") and part.unseen_names == ("class2", "class0")
    assert part.unseen.images.flatten().tolist() == [2, 5, 0, 7] and part.unseen.labels.tolist() == [0, 0, 1, 1]


def test_hold_out_of_image_folders_moves_the_files(tmp_path):
    for name in ("a", "b", "c"):
        for i in range(4):
            write_image(tmp_path / f"set/{name}/{i}.png")
    part = load("image-folder", path="set", size=(4, 4), hold_out=["b"])
    assert part.class_names == ("a", "c") and part.unseen_names == ("b",)
    assert {file.parent.name for file in part.unseen.files} == {"b"} and len(part.unseen) == 4
    assert part.unseen.shape == (3, 4, 4) and part.unseen.labels.tolist() == [0] * 4
    assert {file.parent.name for file in part.train.files + part.test.files} == {"a", "c"}


@pytest.mark.parametrize("bad", ["clas1", "1", 4, -1])
def test_a_bad_class_is_answered_with_the_list(bad):
    with pytest.raises(ArgumentError) as caught:
        tiny_set([0, 1], [0], 4).hold_out([0, bad])
    message = str(caught.value)
    assert message.startswith(f"hold_out has {bad!r}, which is no class of 'tiny'.")
    assert message.endswith("Classes: 0 class0, 1 class1, 2 class2, 3 class3")
    assert ("Did you mean 'class1'?" in message) == (bad == "clas1")


def test_hold_out_must_leave_a_class():
    with pytest.raises(ArgumentError, match="must leave at least one class"):
        tiny_set([0, 1], [0], 2).hold_out([0, 1])


# ---------------------------------------------------------------- the importer of compact copies


@pytest.fixture(scope="module")
def importer():
    return runpy.run_path(str(TOOLS / "import_data.py"))


def test_the_importer_writes_what_the_package_reads(tmp_path, rng, importer):
    source, root = tmp_path / "source", tmp_path / "root"
    source.mkdir()
    names = {"fine_label_names": list("abcde"), "coarse_label_names": ["low", "high"], "source": "somewhere"}
    (source / "cifar100_label_names.json").write_text(json.dumps(names))
    images = rng.integers(0, 256, (6, 32, 32, 3), np.uint8)
    fine, coarse = rng.integers(0, 5, 6, np.uint8), rng.integers(0, 2, 6, np.uint8)
    for name, part in (("train_1of2", slice(0, 3)), ("train_2of2", slice(3, 5)), ("test", slice(5, 6))):
        strips = []
        for image in images[part]:
            Image.fromarray(image).save(buffer := io.BytesIO(), "webp", lossless=True)
            strips.append(np.frombuffer(buffer.getvalue(), np.uint8))
        offset = np.cumsum([0, *map(len, strips)])
        np.savez(
            source / f"cifar100_{name}.npz",
            webp=np.concatenate(strips), offset=offset, fine=fine[part], coarse=coarse[part],
        )  # fmt: skip
    importer["import_cifar100"](source, root)
    data = load("cifar100", root)
    np.testing.assert_array_equal(data.train.images.numpy(), images[:5].transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(data.test.images.numpy(), images[5:].transpose(0, 3, 1, 2))
    assert data.train.labels.tolist() == fine[:5].tolist() and data.class_names == tuple("abcde")
    assert load("cifar100", root, labels="coarse").test.labels.tolist() == coarse[5:].tolist()

    (source / "package").mkdir()
    for name in CIFAR10_FILES:
        Image.fromarray(images[:1].reshape(1, 1024, 3)).save(source / "package" / f"{name}.png")
    (source / "package/train_lables.json").write_text("[0, 1, 2, 3, 4]")
    (source / "package/test_lables.json").write_text("[9]")
    importer["import_cifar10"](source, root)
    data = load("cifar10", root)
    assert data.train.labels.tolist() == [0, 1, 2, 3, 4] and data.test.labels.tolist() == [9]
    np.testing.assert_array_equal(data.test.images.numpy(), images[:1].transpose(0, 3, 1, 2))

    arrays = write_idx(tmp_path / "plain", rng)
    for path in (tmp_path / "plain").iterdir():
        (source / f"{path.name}.xz").write_bytes(lzma.compress(path.read_bytes()))
    importer["import_mnist"](source, root)
    np.testing.assert_array_equal(load("mnist", root).train.images[:, 0].numpy(), arrays["train"][0])


def test_the_importer_names_what_it_does_not_find(tmp_path, importer):
    with pytest.raises(SystemExit, match=r"there is no train_lables\.json in"):
        importer["import_cifar10"](tmp_path, tmp_path)


@pytest.mark.parametrize("read", [decode_image, image_files])
def test_images_that_do_not_exist_are_said_so(tmp_path, read):
    """There is nothing that could be replaced or deleted."""
    with pytest.raises(DataError, match=r"nowhere does not exist: give .*folder of images") as told:
        read(tmp_path / "nowhere")
    assert "delete" not in str(told.value) and "decoded" not in str(told.value)
