"""Batches, preprocessing, learning rates, optimisers and seeds, each against an independent computation."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from hypersphere.data import FolderSplit, TensorSplit
from hypersphere.data import load as load_data
from hypersphere.data.preprocess import Preprocess
from hypersphere.data.splits import evaluation_batches
from hypersphere.errors import ArgumentError
from hypersphere.losses import Softmax
from hypersphere.models import DigitsCNN
from hypersphere.recipe import Augment, Optimiser, Schedule
from hypersphere.recipe.seeds import derive_seed
from hypersphere.train.batches import (
    BatchOrder,
    ResidentBatches,
    StreamedBatches,
    make_batches,
)
from hypersphere.train.distributed import World
from hypersphere.train.optimiser import make_optimiser, parameter_groups
from hypersphere.train.randomness import seed_default_generator

CPU = torch.device("cpu")


def split(count: int = 23, shape: tuple[int, int, int] = (3, 5, 4)) -> TensorSplit:
    return TensorSplit(torch.randint(256, (count, *shape), dtype=torch.uint8), torch.randint(7, (count,)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> FolderSplit:
    """Twelve images of the size that is asked for, so that reading them changes nothing."""
    root: Path = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for name in ("cat", "dog", "owl"):
        (root / name).mkdir()
        for number in range(6):
            Image.fromarray(generator.integers(256, size=(6, 5, 3), dtype=np.uint8)).save(root / name / f"{number}.png")
    found = load_data("image-folder", path=str(root), size=(6, 5), test_fraction=1 / 3).train
    assert isinstance(found, FolderSplit) and len(found) == 12
    return found


def resident(files: FolderSplit) -> TensorSplit:
    images = [np.asarray(Image.open(file)).transpose(2, 0, 1).copy() for file in files.files]
    return TensorSplit(torch.from_numpy(np.stack(images)), files.labels)


# ------------------------------------------------------------------------------------------------------- order


def test_every_epoch_is_a_permutation_and_batches_walk_through_it():
    order = BatchOrder(23, 5, seed=3)
    assert order.steps_per_epoch == 4
    for epoch in range(3):
        whole = order.epoch(epoch)
        assert whole.sort().values.tolist() == list(range(23))
        steps = [order.indices(4 * epoch + position) for position in range(4)]
        assert torch.equal(torch.cat(steps), whole[:20])  # an incomplete last batch is left out


def test_order_depends_on_seed_and_epoch_alone():
    order = BatchOrder(50, 10, seed=0)
    assert torch.equal(order.epoch(1), BatchOrder(50, 7, seed=0).epoch(1))
    torch.manual_seed(99)
    assert torch.equal(order.epoch(1), BatchOrder(50, 10, seed=0).epoch(1))
    others = [order.epoch(0), order.epoch(2), BatchOrder(50, 10, seed=1).epoch(1)]
    assert not any(torch.equal(order.epoch(1), other) for other in others)


def test_batch_may_be_everything_but_not_more():
    assert BatchOrder(8, 8, seed=0).indices(5).sort().values.tolist() == list(range(8))
    with pytest.raises(ArgumentError, match="batch_size must be at most the 8 training images, got 9"):
        BatchOrder(8, 9, seed=0)


# --------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("steps", [range(9), [6, 0, 3, 3, 8]])
def test_resident_batches_are_the_images_of_the_order(steps):
    data, order = split(), BatchOrder(23, 6, seed=1)
    batches = ResidentBatches(data, order, CPU, World())
    for step in steps:
        images, labels = batches.load(*batches.inputs(step))
        assert torch.equal(images, data.images[order.indices(step)]) and images.dtype == torch.uint8
        assert torch.equal(labels, data.labels[order.indices(step)])


@pytest.mark.parametrize("kind", ["resident", "streamed"])
def test_shares_make_up_the_whole_batch(kind, folder):
    data = resident(folder) if kind == "resident" else folder
    order = BatchOrder(12, 6, seed=1)
    whole = make_batches(data, order, CPU, World(), 0)
    shares = [make_batches(data, order, CPU, World(rank, 3), 0) for rank in range(3)]
    for step in range(4):
        parts = [share.load(*share.inputs(step)) for share in shares]
        assert all(len(labels) == 2 for _, labels in parts)
        images, labels = whole.load(*whole.inputs(step))
        assert torch.equal(torch.cat([part[0] for part in parts]), images)
        assert torch.equal(torch.cat([part[1] for part in parts]), labels)


def test_a_batch_that_does_not_divide_is_shared_as_evenly_as_can_be():
    order = BatchOrder(23, 6, seed=1)
    data = split()
    parts = [ResidentBatches(data, order, CPU, World(rank, 4)) for rank in range(4)]
    labels = [part.load(*part.inputs(0))[1] for part in parts]
    whole = ResidentBatches(data, order, CPU, World())
    assert [len(part) for part in labels] == [1, 2, 1, 2]
    assert torch.equal(torch.cat(labels), whole.load(*whole.inputs(0))[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_streamed_batches_equal_resident_ones(workers, folder):
    order = BatchOrder(12, 5, seed=2)
    streamed = StreamedBatches(folder, order, CPU, World(), workers)
    expected = ResidentBatches(resident(folder), order, CPU, World())
    steps = [0, 1, 2, 3, 7, 8, 2, 2]  # through epochs, ahead, back, and the same again
    for step in steps if workers == 0 else steps[2:6]:
        images, labels = streamed.load(*streamed.inputs(step))
        wanted = expected.load(*expected.inputs(step))
        assert torch.equal(images, wanted[0]) and torch.equal(labels, wanted[1]), step
        assert images.dtype == torch.uint8


def test_streamed_batches_keep_their_workers_while_steps_follow_each_other(folder):
    streamed = StreamedBatches(folder, BatchOrder(12, 4, seed=2), CPU, World(), 0)
    streamed.inputs(4)
    running = streamed._images
    streamed.inputs(5)
    assert streamed._images is running
    streamed.inputs(5)
    assert streamed._images is not running


def test_make_batches_chooses_by_kind(folder):
    order = BatchOrder(12, 4, seed=0)
    assert isinstance(make_batches(folder, order, CPU, World(), 0), StreamedBatches)
    assert isinstance(make_batches(resident(folder), order, CPU, World(), 0), ResidentBatches)


@pytest.mark.parametrize("batch_size", [1, 5, 12, 100])
def test_evaluation_batches_are_everything_in_order(batch_size, folder):
    data = resident(folder)
    for source in (folder, data):
        found = list(evaluation_batches(source, batch_size, CPU))
        assert [len(labels) for _, labels in found[:-1]] == [batch_size] * (len(found) - 1)
        assert torch.equal(torch.cat([images for images, _ in found]), data.images)
        assert torch.equal(torch.cat([labels for _, labels in found]), data.labels)


# --------------------------------------------------------------------------------------------- normalisation


def measured(data, normalise: str, **augment) -> Preprocess:
    preprocess = Preprocess(data.shape, normalise, Augment(**augment))
    preprocess.measure(data)
    return preprocess


def test_channel_statistics_are_those_of_numpy():
    data = split(40)
    preprocess = measured(data, "channel")
    pixels = data.images.numpy() / 255
    np.testing.assert_allclose(preprocess.mean.flatten(), pixels.mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(preprocess.std.flatten(), pixels.std((0, 2, 3)), rtol=1e-6)
    out = preprocess(data.images).numpy()
    np.testing.assert_allclose(out.mean((0, 2, 3)), 0, atol=1e-6)
    np.testing.assert_allclose(out.std((0, 2, 3)), 1, atol=1e-6)


def test_pixel_mean_is_that_of_numpy_and_the_spread_is_left():
    data = split(40)
    preprocess = measured(data, "pixel")
    pixels = data.images.numpy() / 255
    np.testing.assert_allclose(preprocess(data.images), pixels - pixels.mean(0), atol=1e-6)
    assert preprocess.mean.shape == data.shape and torch.equal(preprocess.std, torch.ones(3, 1, 1))


def test_no_normalisation_is_the_range_0_to_1():
    data = split(40)
    preprocess = measured(data, "none")
    np.testing.assert_array_equal(preprocess(data.images), data.images.numpy().astype(np.float32) / np.float32(255))


def test_half_is_the_range_from_minus_1_to_1_by_the_constants_of_the_papers():
    data = split(40)
    preprocess = measured(data, "half")
    np.testing.assert_allclose(preprocess(data.images), (data.images.numpy() - 127.5) / 128, atol=1e-6)
    assert set(preprocess.state_dict()) == {"mean", "std"}


@pytest.mark.parametrize("value", [0, 5, 9, 128, 255])
def test_constant_channel_is_not_divided_by_the_rounding_of_its_spread(value):
    data = split(37)
    data.images[:, 1] = value
    preprocess = measured(data, "channel")
    assert preprocess.std[1] == 1 and (preprocess.std[[0, 2]] < 1).all()
    assert preprocess(data.images)[:, 1].abs().max() < 1e-6


def test_faint_channel_keeps_its_spread():
    data = split(37)
    data.images[:, 1] = 7
    data.images[0, 1, 0, 0] = 8
    expected = (data.images[:, 1].numpy() / 255).std()
    assert float(measured(data, "channel").std[1]) == pytest.approx(expected, rel=1e-4)


def test_statistics_of_many_images_come_from_evenly_spaced_ones():
    data = split(21)
    preprocess = Preprocess(data.shape, "pixel", Augment())
    preprocess.measure(data, at_most=5)
    np.testing.assert_allclose(preprocess.mean, (data.images[::5] / 255).mean(0), rtol=1e-6)


def test_statistics_of_files(folder):
    np.testing.assert_array_equal(measured(folder, "channel").std, measured(resident(folder), "channel").std)
    assert measured(folder, "channel").mean.shape == (3, 1, 1)


def test_statistics_are_saved_with_the_model():
    preprocess = measured(split(), "channel")
    assert set(preprocess.state_dict()) == {"mean", "std"}
    other = Preprocess((3, 5, 4), "channel", Augment())
    other.load_state_dict(preprocess.state_dict())
    images = split().images
    assert torch.equal(other(images), preprocess(images))


# ----------------------------------------------------------------------------------------------- augmentation


def change_one(image: np.ndarray, draws: np.ndarray, augment: Augment) -> np.ndarray:
    """Pad, crop back to the size, then flip; the four draws are mirror, upend, down and right."""
    crop, (_, height, width) = augment.crop, image.shape
    mode = {"zeros": "constant", "reflect": "symmetric"}[augment.crop_mode]
    padded = np.pad(image, ((0, 0), (crop, crop), (crop, crop)), mode=mode)
    down, right = (math.floor(draw * (2 * crop + 1)) for draw in draws[2:])
    out = padded[:, down : down + height, right : right + width]
    if augment.flip and draws[0] < 0.5:
        out = out[:, :, ::-1]
    if augment.vertical_flip and draws[1] < 0.5:
        out = out[:, ::-1]
    return out


@pytest.mark.parametrize("normalise", ["channel", "pixel"])
@pytest.mark.parametrize(
    "augment",
    [
        {"flip": True},
        {"vertical_flip": True},
        {"crop": 1},
        {"crop": 2, "flip": True},
        {"crop": 6, "flip": True, "vertical_flip": True},  # more padding than image
        {"crop": 2, "crop_mode": "reflect", "flip": True},
        {"crop": 11, "crop_mode": "reflect", "flip": True, "vertical_flip": True},  # mirrored twice and more
    ],
)
def test_augmentation_is_that_of_a_loop_over_images(augment, normalise):
    data = split(40, (2, 5, 4))
    preprocess = measured(data, normalise, **augment)
    draws = torch.rand(4, 40)
    draws[:, 0], draws[:, 1] = 0.0, 1 - 2**-24  # the least and the largest draw
    found = preprocess.change(data.images, draws)
    plain = preprocess(data.images).numpy()
    for index in range(40):
        expected = change_one(plain[index], draws[:, index].numpy(), preprocess.augment)
        np.testing.assert_array_equal(found[index].numpy(), expected)


def test_no_augmentation_is_plain_and_draws_nothing():
    data = split()
    preprocess = measured(data, "channel")
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    found = preprocess.augmented(data.images, generator, 23, slice(0, 23))
    assert torch.equal(found, preprocess(data.images)) and torch.equal(generator.get_state(), before)
    assert torch.equal(preprocess.change(data.images, None), preprocess(data.images))


def test_augmentation_is_a_function_of_the_generator():
    data = split()
    preprocess = measured(data, "channel", crop=1, flip=True)
    one, two, three = (
        preprocess.augmented(data.images, torch.Generator().manual_seed(seed), 23, slice(0, 23)) for seed in (1, 1, 2)
    )
    assert torch.equal(one, two) and not torch.equal(one, three)


def test_augmentation_does_not_depend_on_the_number_of_processes():
    data = split(24)
    preprocess = measured(data, "channel", crop=2, flip=True, vertical_flip=True)

    def part(share: slice) -> torch.Tensor:
        return preprocess.augmented(data.images[share], torch.Generator().manual_seed(5), 24, share)

    whole = part(slice(0, 24))
    assert torch.equal(torch.cat([part(World(rank, 2).share(24)) for rank in range(2)]), whole)
    assert torch.equal(torch.cat([part(World(rank, 3).share(24)) for rank in range(3)]), whole)


def test_flips_and_crops_are_as_frequent_as_they_should_be():
    """Every image has one bright pixel in a corner, so that its place tells what was done."""
    count, crop = 6000, 2
    images = torch.zeros(count, 1, 9, 9, dtype=torch.uint8)
    images[:, 0, 3, 2] = 255
    preprocess = Preprocess((1, 9, 9), "none", Augment(crop=crop, flip=True, vertical_flip=True))
    out = preprocess.augmented(images, torch.Generator().manual_seed(0), count, slice(0, count))[:, 0]
    assert (out.flatten(1).sum(1) == 1).all()
    places = out.flatten(1).argmax(1)
    rows, columns = places // 9, places % 9
    # Unflipped rows are 1 to 5 and flipped ones 3 to 7; columns 0 to 4 and 4 to 8; each offset has share 1/5.
    assert set(rows.tolist()) == set(range(1, 8)) and set(columns.tolist()) == set(range(9))
    wanted = torch.tensor([0, 1, 1, 2, 2, 2, 1, 1, 0]) / 10
    assert (torch.bincount(rows, minlength=9) / count - wanted).abs().max() < 0.02
    wanted = torch.tensor([1, 1, 1, 1, 2, 1, 1, 1, 1]) / 10
    assert (torch.bincount(columns, minlength=9) / count - wanted).abs().max() < 0.02
    up, left = rows < 3, columns < 4
    assert float((up & left).float().mean()) == pytest.approx(float(up.float().mean() * left.float().mean()), abs=0.02)


# ---------------------------------------------------------------------------------------------- learning rate


def rates(steps: int, **options) -> list[float]:
    return [Schedule(**options).at(step, steps) for step in range(steps)]


def test_constant_rate():
    assert rates(5) == [1.0] * 5


def test_steps_rate_falls_from_the_milestone_on():
    found = rates(8, name="steps", milestones=(2, 5), factor=0.5)
    assert found == [1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]


def test_cosine_rate():
    found = rates(10, name="cosine", final=0.2)
    expected = [0.2 + 0.8 * (1 + math.cos(math.pi * t / 10)) / 2 for t in range(10)]
    assert found == pytest.approx(expected, abs=1e-12)
    assert found[0] == 1 and found[5] == pytest.approx(0.6)


def test_linear_rate():
    assert rates(4, name="linear") == pytest.approx([1, 0.75, 0.5, 0.25])
    assert rates(4, name="linear", final=0.2) == pytest.approx([1, 0.8, 0.6, 0.4])


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("constant", [1, 1, 1, 1]),
        ("linear", [1, 0.75, 0.5, 0.25]),
        ("steps", [1, 0.1, 0.1, 0.1]),
        ("cosine", [(1 + math.cos(math.pi * t / 4)) / 2 for t in range(4)]),
    ],
)
def test_warmup_comes_before_the_schedule(name, rest):
    found = rates(8, name=name, warmup=4, milestones=(5,))
    assert found == pytest.approx([0.25, 0.5, 0.75, 1, *rest])


def test_warmup_over_the_whole_run():
    assert rates(4, name="cosine", warmup=4) == pytest.approx([0.25, 0.5, 0.75, 1])


# -------------------------------------------------------------------------------------------------- optimisers


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(4)
    return DigitsCNN((1, 8, 8), dim=4, width=3), Softmax(4, 5)


@pytest.mark.parametrize(
    ("options", "ordinary"),
    [
        ({"name": "sgd", "momentum": 0.0}, torch.optim.SGD),
        ({"name": "sgd"}, lambda p: torch.optim.SGD(p, momentum=0.9)),
        ({"name": "sgd", "nesterov": True, "momentum": 0.8}, lambda p: torch.optim.SGD(p, momentum=0.8, nesterov=True)),
        ({"name": "adam", "betas": (0.8, 0.95)}, lambda p: torch.optim.Adam(p, betas=(0.8, 0.95))),
        ({"name": "adamw"}, torch.optim.AdamW),
    ],
)
def test_optimiser_is_torchs_ordinary_one(options, ordinary):
    recipe = Optimiser(lr=0.05, weight_decay=0.1, head_lr=3.0, decay="weights", **options)
    model, head = pair()
    groups = parameter_groups(model, head, recipe, CPU)
    parameters = [p for group in groups for p in group["params"]]
    mine = make_optimiser(groups, recipe)
    reference_groups = [
        {
            "params": [p.detach().clone().requires_grad_() for p in group["params"]],
            "lr": float(group["base_lr"]),
            "weight_decay": group["weight_decay"],
            "fused": False,
            "foreach": False,
        }
        for group in groups
    ]
    theirs = ordinary(reference_groups)
    references = [p for group in reference_groups for p in group["params"]]
    for step in range(6):
        factor = 1 / (1 + step)  # the rate may change between steps
        for group, reference in zip(mine.param_groups, theirs.param_groups, strict=True):
            group["lr"].fill_(group["base_lr"] * factor)
            reference["lr"] = group["base_lr"] * factor
        for parameter, reference in zip(parameters, references, strict=True):
            parameter.grad = torch.randn_like(parameter)
            reference.grad = parameter.grad.clone()
        mine.step()
        theirs.step()
        for parameter, reference in zip(parameters, references, strict=True):
            torch.testing.assert_close(parameter, reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_creating_the_state_changes_no_parameter_or_rate(name):
    model, head = pair()
    before = [p.detach().clone() for p in [*model.parameters(), *head.parameters()]]
    recipe = Optimiser(name=name, lr=0.25, weight_decay=0.5)
    optimiser = make_optimiser(parameter_groups(model, head, recipe, CPU), recipe)
    for old, new in zip(before, [*model.parameters(), *head.parameters()], strict=True):
        assert torch.equal(old, new) and new.grad is None
        state = optimiser.state[new]
        assert state and all(not value.any() for value in state.values() if isinstance(value, torch.Tensor))
    assert [float(group["lr"]) for group in optimiser.param_groups] == [0.25, 0.25]


def test_parameter_groups_by_module():
    model, head = pair()
    groups = parameter_groups(model, head, Optimiser(lr=0.5, head_lr=4.0, weight_decay=0.01), CPU)
    assert [group["name"] for group in groups] == ["model", "head"]
    assert [group["base_lr"] for group in groups] == [0.5, 2.0] == [float(group["lr"]) for group in groups]
    assert [group["weight_decay"] for group in groups] == [0.01, 0.01]
    assert [id(p) for group in groups for p in group["params"]] == [
        id(p) for module in (model, head) for p in module.parameters()
    ]


def test_decay_of_weights_spares_vectors():
    model, head = pair()
    groups = parameter_groups(model, head, Optimiser(decay="weights", weight_decay=0.01, lr=0.5, head_lr=4.0), CPU)
    assert [group["name"] for group in groups] == ["model", "model-vectors", "head", "head-vectors"]
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0, 0.01, 0.0]
    assert [group["base_lr"] for group in groups] == [0.5, 0.5, 2.0, 2.0]
    names = {id(p): name for name, p in [*model.named_parameters(), *head.named_parameters()]}
    spared = {id(p) for index in (1, 3) for p in groups[index]["params"]}
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.PReLU):
            assert all(id(p) in spared for p in module.parameters())
        elif isinstance(module, nn.Conv2d | nn.Linear):
            assert id(module.weight) not in spared
    assert id(head.bias) in spared and id(head.weight) not in spared
    assert sorted(id(p) for group in groups for p in group["params"]) == sorted(names)


def test_frozen_parameters_and_empty_groups_are_left_out():
    model, _ = pair()
    model.features.requires_grad_(False)
    groups = parameter_groups(model, Softmax(4, 5, bias=False), Optimiser(decay="weights"), CPU)
    assert [group["name"] for group in groups] == ["model", "head"]
    assert [id(p) for p in groups[0]["params"]] == [id(model.embed.weight)]


# -------------------------------------------------------------------------------------------------- randomness


def test_derived_seeds():
    seeds = {derive_seed(seed, purpose, count) for seed in range(5) for purpose in ("a", "b") for count in range(50)}
    assert len(seeds) == 500 and all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62  # all of the 63 bits are used
    assert derive_seed(1, 23) != derive_seed(12, 3) and derive_seed("1") != derive_seed(1)
    assert derive_seed(0, "epoch", 0) == 1887065545650066536  # runs of today can be resumed tomorrow


def test_default_generator():
    seed_default_generator(CPU, 7)
    first = torch.rand(3)
    seed_default_generator(CPU, 7)
    assert torch.equal(torch.rand(3), first)
    seed_default_generator(CPU, 8)
    assert not torch.equal(torch.rand(3), first)
