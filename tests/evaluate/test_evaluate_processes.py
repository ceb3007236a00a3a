"""An evaluation that processes share: the outputs, metrics and files of one process, and its errors on all of them."""

from __future__ import annotations

import functools
import json

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn

from helpers.worlds import worlds
from hypersphere import recipe
from hypersphere.data import Dataset, TensorSplit
from hypersphere.data.splits import FolderSplit
from hypersphere.evaluate import Outputs, evaluations, measure
from hypersphere.metrics.processes import gathered
from hypersphere.runs import RunFolder, System, build, metrics_of, outputs_of, write_evaluation
from hypersphere.tasks.faces import evaluation as faces
from hypersphere.tasks.faces.data import write_landmarks

CPU = torch.device("cpu")
ATTACKS = "{name: attacks, images: 11, batch_size: 3, queries: 4, steps: 2, deepfool: 7, strengths: [0.1]}"


def noise(count=23, unseen=9):
    draw = torch.Generator().manual_seed(1)

    def split(n, classes):
        images = torch.randint(256, (n, 1, 8, 8), generator=draw, dtype=torch.uint8)
        return TensorSplit(images, torch.arange(n) % classes)

    return Dataset("noise", tuple("abcd"), split(20, 4), split(count, 4), split(unseen, 3), tuple("xyz"))


def system_of(data, *changes, batch=4):
    torch.manual_seed(2)
    plan = recipe.load("digits-arcface", [f"evaluate.batch_size={batch}", "model.width=4", *changes])
    model, head, preprocess = build(plan, data.train.shape, len(data.class_names), data.context)
    preprocess.measure(data.train)
    shape = data.train.shape
    return System(model, head, preprocess, data.class_names, plan, shape, True, CPU, "noise")


def outcome(work):
    """What work gives, or its error in words."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - shown by the test that asked
        return f"{type(error).__name__}: {error}"


NAMES = ("features", "logits", "labels", "weight", "unseen_features", "unseen_labels", "class_counts")


# ------------------------------------------------------------------------------------------------ outputs and metrics


def evaluated(count, batch, group="all"):
    """Outputs, metrics and what is left for pictures, of all processes together or of one."""
    data = noise(count)
    system = system_of(data, f"evaluate.metrics=[classification, angles, verification, energy, {ATTACKS}]", batch=batch)
    outputs = outputs_of(system, data, group=dist.group.WORLD if group == "all" else None)
    metrics = metrics_of(system, outputs)
    return {name: getattr(outputs, name) for name in NAMES}, metrics, outputs.artefacts


alone = functools.cache(functools.partial(evaluated, group="none"))


@pytest.mark.parametrize(("size", "count", "batch"), [(1, 23, 4), (2, 23, 4), (3, 23, 4), (3, 2, 1), (2, 23, 500)])
def test_outputs_and_metrics_that_processes_share_are_those_of_one(size, count, batch):
    outputs, metrics, pictures = alone(count, batch)
    assert {"accuracy", "eer", "accuracy_pgd", "masking_signs", "accuracy_strongest"} <= metrics.keys()
    for found, measured, left in worlds(size).run(evaluated, count, batch):
        assert all(torch.equal(found[name], outputs[name]) for name in NAMES)
        assert measured == metrics and left.keys() == pictures.keys()
        assert all(torch.equal(left[name].nan_to_num(), value.nan_to_num()) for name, value in pictures.items())


CALLS: list[str] = []


def counted(kind):
    """Which processes call an evaluation, whether it sees the others, and whether it may call for another one."""
    CALLS.clear()

    @evaluations.register("counted", shares=kind == "shares")
    def evaluate(outputs: Outputs) -> dict[str, float]:
        CALLS.append("group" if outputs.group is not None else "alone")
        if outputs.group is None:
            return {"rank": float(dist.get_rank())} | measure(outputs, ["angles"])
        return {"ranks": float(gathered([torch.tensor([dist.get_rank()])], outputs.group).sum())}

    data = noise()
    try:
        given = outputs_of(system_of(data), data, group=dist.group.WORLD)
        given = Outputs(**{**vars(given), "together": kind == "together"})
        return [*CALLS, *measure(given, ["counted"]).items()], [*CALLS]
    finally:
        evaluations.remove("counted")


@pytest.mark.parametrize("size", [1, 3])
def test_an_evaluation_that_does_not_share_is_called_once_and_told(size):
    for rank, (found, calls) in enumerate(worlds(size).run(counted, "plain")):
        assert dict(found)["rank"] == 0 and "mean_angle" in dict(found)
        assert calls == (["alone"] if rank == 0 else [])
    for found, calls in worlds(size).run(counted, "shares"):
        assert found == [("ranks", size * (size - 1) / 2)] and calls == ["group"]
    for rank, (found, calls) in enumerate(worlds(size).run(counted, "together")):
        assert dict(found)["rank"] == rank and calls == ["alone"]


def written(folder):
    data = noise()
    system = system_of(data, "evaluate.metrics=[classification, angles]")
    outputs = outputs_of(system, data, group=dist.group.WORLD)
    metrics = metrics_of(system, outputs)
    run = RunFolder(folder / "shared")
    found = outcome(lambda: write_evaluation(run, system, outputs, metrics, 3))
    alone = outputs_of(system, data)
    write_evaluation(RunFolder(folder / f"alone-{dist.get_rank()}"), system, alone, metrics_of(system, alone), 3)
    return found


@pytest.mark.parametrize("size", [1, 3])
def test_the_first_process_writes_what_one_writes(size, tmp_path):
    for name in ("shared", *(f"alone-{rank}" for rank in range(size))):
        (tmp_path / name).mkdir()
    assert worlds(size).run(written, tmp_path) == [None] * size
    files = {path.name for path in (tmp_path / "shared").iterdir()}
    assert files == {"evaluation.json", "features.safetensors"}
    for name in files:
        assert (tmp_path / "shared" / name).read_bytes() == (tmp_path / "alone-0" / name).read_bytes()
    assert json.loads((tmp_path / "shared" / "evaluation.json").read_text())["step"] == 3
    for name in files:
        (tmp_path / "shared" / name).unlink()
    (tmp_path / "shared").rmdir()
    first, *others = worlds(size).run(written, tmp_path)
    assert first.startswith("FileNotFoundError")
    assert all(other.startswith("OtherProcessError: process 0: FileNotFoundError") for other in others)


# ------------------------------------------------------------------------------------------------ errors


def with_damage(folder):
    data = noise()
    size, files = (8, 8), tuple(sorted(folder.iterdir()))
    images = FolderSplit(files, torch.arange(len(files)) % 4, size)
    colour = TensorSplit(data.train.images.expand(-1, 3, -1, -1), data.train.labels)
    data = Dataset("files", data.class_names, colour, images)
    system = system_of(data, batch=2)
    found = outcome(lambda: outputs_of(system, data, group=dist.group.WORLD))
    return found, gathered([torch.tensor([dist.get_rank()])], dist.group.WORLD).tolist()


@pytest.mark.parametrize("size", [1, 3])
def test_a_damaged_image_in_one_share_is_named_on_all_processes(size, tmp_path):
    for number in range(9):
        Image.new("RGB", (8, 8), (20 * number, 0, 0)).save(tmp_path / f"{number}.png")
    (tmp_path / "8.png").write_bytes(b"no picture")
    for rank, (found, after) in enumerate(worlds(size).run(with_damage, tmp_path)):
        assert after == [*range(size)]
        assert f"{tmp_path / '8.png'} cannot be decoded" in found
        assert found.startswith(
            "DataError" if rank == size - 1 else f"OtherProcessError: process {size - 1}: {tmp_path}"
        )


def wrong_option():
    data = noise()
    system = system_of(data, "evaluate.metrics=[classification, {name: top-k, k: 9}]")
    outputs = outputs_of(system, data, group=dist.group.WORLD)
    return outcome(lambda: metrics_of(system, outputs)), set(measure(outputs, ["classification"]))


def test_a_wrong_option_is_told_to_all_processes_and_blamed_on_its_line():
    for rank, (found, after) in enumerate(worlds(3).run(wrong_option)):
        start, words = (
            ("OtherProcessError: process 0: ", "k must") if rank else ("RecipeError", "evaluate.metrics.1.k must")
        )
        assert found.startswith(start) and f"{words} be at most 4" in found
        assert after == {"accuracy", "cross_entropy"}


# ------------------------------------------------------------------------------------------------ faces


def on_faces(folder, batch):
    before, faces.BATCH = faces.BATCH, batch
    read = []

    def features_of(images):
        read.append(len(images))
        return images.mean((2, 3)) - 0.3

    split = TensorSplit(torch.zeros(1, 3, 112, 96, dtype=torch.uint8), torch.zeros(1, dtype=torch.long))
    eye = torch.eye(3)
    parts = {"data": Dataset("x", ("a",), split, split), "features_of": features_of, "data_root": folder}
    given = Outputs(eye, eye, torch.arange(3), eye, group=dist.group.WORLD, **parts)
    try:
        found = outcome(lambda: measure(given, ["lfw"]))
        own = sum(read) // 2
        return found, own, outcome(lambda: measure(Outputs(eye, eye, torch.arange(3), eye, **parts), ["lfw"]))
    finally:
        faces.BATCH = before
        faces._pairs.cache_clear()
        faces._faces.cache_clear()


def little_lfw(root):
    """Two folds of pairs of three people with two images each, some of them alike across people."""
    points = torch.tensor([[30.3, 51.7], [65.5, 51.5], [48.0, 71.7], [33.5, 92.4], [62.7, 92.2]])
    landmarks = {}
    for index, name in enumerate(("Ann", "Bob", "Cid")):
        (root / "lfw" / "images" / name).mkdir(parents=True)
        for number in (1, 2):
            file = f"{name}/{name}_{number:04}.png"
            Image.new("RGB", (96, 112), (70 * index, 40 * number, 200 - 70 * index)).save(
                root / "lfw" / "images" / file
            )
            landmarks[file] = points
    write_landmarks(root / "lfw" / "landmarks.txt", landmarks)
    fold = ["Ann\t1\t2", "Bob\t1\t2", "Ann\t1\tBob\t1", "Bob\t2\tCid\t1"]
    (root / "lfw" / "pairs.txt").write_text("\n".join(["2\t2", *fold, "Cid\t1\t2", *fold[:1], *fold[2:]]) + "\n")


@pytest.mark.parametrize("size", [1, 3])
def test_each_process_reads_its_share_of_lfw(size, tmp_path):
    little_lfw(tmp_path)
    found = worlds(size).run(on_faces, tmp_path, 2)
    assert all(shared == alone and "lfw_accuracy" in alone for shared, _, alone in found)
    assert sum(own for _, own, _ in found) == 6 and max(own for _, own, _ in found) <= 2 * -(-3 // size)
    file = tmp_path / "lfw" / "images" / "Cid" / "Cid_0002.png"
    file.write_bytes(b"no picture")
    assert all(str(file) in shared for shared, _, _ in worlds(size).run(on_faces, tmp_path, 2))


# ------------------------------------------------------------------------------------------------ weights held together


def held_together(count):
    """A model whose weights processes hold together: each of them takes part in every forward pass."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    data = noise(count)
    system = system_of(data, "evaluate.metrics=[classification, angles]", batch=3)
    before = outputs_of(system, data)
    wanted = metrics_of(system, before)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in system.model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(system.model, mesh=mesh)
    found = outputs_of(system, data, group=dist.group.WORLD)
    equal = [torch.equal(getattr(found, name), getattr(before, name)) for name in NAMES]
    return found.together, before.together, equal, metrics_of(system, found) == wanted


@pytest.mark.parametrize("size", [2, 3])
def test_weights_that_processes_hold_together_are_there_for_all(size):
    for together, before, equal, metrics in worlds(size).run(held_together, 10):
        assert (together, before) == (True, False)
        assert all(equal) and metrics
