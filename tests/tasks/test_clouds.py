"""Point clouds: the data sets, random changes, PointNet and PointNet++ against loops, and what the report shows."""

from __future__ import annotations

import json
import math
import os
import runpy
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from helpers.paths import DOCS, TOOLS
from hypersphere import energy, orthogonal, recipe
from hypersphere.data import DataError, Dataset, TensorSplit, data_roots, inventory, load
from hypersphere.data.preprocess import Preprocess
from hypersphere.errors import ArgumentError
from hypersphere.evaluate import Outputs, measure
from hypersphere.losses import losses
from hypersphere.models import create
from hypersphere.recipe import Augment
from hypersphere.report.sections import sections
from hypersphere.runs import RunFolder, load_run
from hypersphere.tasks.clouds.augmentations import change_clouds
from hypersphere.tasks.clouds.data import SHAPES, unit_ball
from hypersphere.tasks.clouds.evaluation import chosen_clouds, point_contributions
from hypersphere.tasks.clouds.figures import cloud_pictures, project, strength
from hypersphere.tasks.clouds.models import TNet, ball_query, farthest_points, orthogonality, squared_distances
from hypersphere.train import Trainer

SMALL = {"widths": (8, 8, 8, 16, 32), "hidden": (24, 16)}
SMALL2 = {
    "centres": (12, 4),
    "radii": (0.5, 1.0),
    "samples": (6, 5),
    "widths": ((8, 8), (12, 16), (16, 32)),
    "hidden": (24, 16),
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_statistics(model: nn.Module) -> nn.Module:
    """The model in evaluation mode, its normalisation and T-Nets not what they start as."""
    for part in model.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.running_mean.uniform_(-0.2, 0.2)
            part.running_var.uniform_(0.5, 1.5)
        if isinstance(part, TNet):
            nn.init.normal_(part.matrix.weight, std=0.05)
    return model.eval()


# ------------------------------------------------------------------------------------------------ ModelNet40


def write_packed(folder: Path, part: str, points: np.ndarray, labels: list[int], names: list[str]) -> None:
    """Whole 255ths as differences along the points, zigzag-coded, high and low bytes apart."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = np.diff(points, axis=1, prepend=0)
    coded = np.where(steps >= 0, 2 * steps, -2 * steps - 1).transpose(2, 0, 1)
    np.savez_compressed(
        folder / f"modelnet40_{part}_512pts.npz",
        hi=(coded // 256).astype(np.uint8),
        lo=(coded % 256).astype(np.uint8),
        label=np.array(labels, np.uint8),
        class_name=np.array(names),
    )


@pytest.fixture
def grid_points() -> np.ndarray:
    return np.random.default_rng(0).integers(-255, 256, (5, 20, 3))


@pytest.fixture
def packed(tmp_path, grid_points) -> Path:
    write_packed(tmp_path / "modelnet40", "train", grid_points[:3], [0, 1, 1], ["chair", "night_stand"])
    write_packed(tmp_path / "modelnet40", "test", grid_points[3:], [1, 0], ["chair", "night_stand"])
    return tmp_path


def as_sets(clouds_: torch.Tensor) -> list[set[tuple[float, ...]]]:
    return [{tuple(round(float(v), 4) for v in point) for point in cloud.T} for cloud in clouds_]


def normalised(points: np.ndarray) -> np.ndarray:
    """``(N, P, 3)`` as published: less the centroid, over the largest norm."""
    centred = points - points.mean(1, keepdims=True)
    return centred / np.sqrt((centred**2).sum(2)).max(1)[:, None, None]


def test_packed_clouds_are_unpacked_and_normalised(packed, grid_points):
    data = load("modelnet40", packed, points=20)
    assert data.class_names == ("chair", "night_stand")
    assert data.train.shape == (3, 20) and data.train.images.dtype == torch.float32
    assert data.train.labels.tolist() == [0, 1, 1] and data.test.labels.tolist() == [1, 0]
    expected = torch.from_numpy(normalised(grid_points / 255)).transpose(1, 2)
    assert as_sets(data.train.images) == as_sets(expected[:3])
    assert as_sets(data.test.images) == as_sets(expected[3:])
    file_order = torch.from_numpy(normalised(grid_points / 255))[0].T.float()
    assert not torch.allclose(data.train.images[0], file_order, atol=1e-4)  # points are in random order


def test_points_are_drawn_from_the_seed(packed):
    some = load("modelnet40", packed, points=7).train.images
    assert some.shape == (3, 3, 7)
    assert torch.equal(some, load("modelnet40", packed, points=7).train.images)
    assert not torch.equal(some, load("modelnet40", packed, points=7, point_seed=5).train.images)
    torch.testing.assert_close(some.norm(dim=1).amax(1), torch.ones(3))


def test_plain_arrays_give_the_same_clouds(packed, grid_points, tmp_path):
    folder = tmp_path / "other" / "modelnet40"
    folder.mkdir(parents=True)
    for part, chosen, labels in (("train", grid_points[:3], [0, 1, 1]), ("test", grid_points[3:], [1, 0])):
        points = (chosen / 255).astype(np.float32)
        names = np.array(["chair", "night_stand"])
        np.savez(folder / f"modelnet40_{part}.npz", points=points, label=np.array(labels), class_name=names)
    first, second = (load("modelnet40", root, points=20) for root in (packed, tmp_path / "other"))
    torch.testing.assert_close(first.train.images, second.train.images)
    assert torch.equal(first.test.labels, second.test.labels)


@pytest.fixture
def resampled(tmp_path) -> Path:
    """Two shapes of two classes as text, with the second coordinate up."""
    folder = tmp_path / "modelnet40_normal_resampled"
    for kind in ("chair", "night_stand"):
        (folder / kind).mkdir(parents=True)
    (folder / "modelnet40_shape_names.txt").write_text("chair\nnight_stand\n")
    (folder / "modelnet40_train.txt").write_text("chair_0001\nnight_stand_0001\n")
    (folder / "modelnet40_test.txt").write_text("night_stand_0002\n")
    lines = "\n".join(f"{x},{5 * x + 1},{-x},0,0,1" for x in range(4))
    for shape in ("chair/chair_0001", "night_stand/night_stand_0001", "night_stand/night_stand_0002"):
        (folder / f"{shape}.txt").write_text(lines + "\n")
    return tmp_path


def test_text_files_with_the_second_coordinate_up(resampled):
    data = load("modelnet40", resampled, points=4)
    assert data.train.labels.tolist() == [0, 1] and data.test.labels.tolist() == [1]
    cloud = data.train.images[0][:, data.train.images[0, 2].argsort()]
    torch.testing.assert_close(cloud[2], 5 * cloud[1])  # what was second is third, what was first is second
    torch.testing.assert_close(cloud[0], -cloud[1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "chair/chair_0001.txt").unlink(), "chair_0001.txt cannot be read as 4 lines"),
        (lambda f: (f / "chair/chair_0001.txt").write_text("1,2,3\n"), "chair_0001.txt cannot be read as 4 lines"),
        (lambda f: (f / "chair/chair_0001.txt").write_text("a,b,c\n" * 4), "chair_0001.txt cannot be read as 4 lines"),
        (lambda f: (f / "chair/chair_0001.txt").write_text("1,nan,2\n" * 4), "not all of them are finite"),
        (lambda f: (f / "modelnet40_test.txt").write_text("sofa_0001\n"), "line 1: 'sofa_0001' is of no class"),
    ],
)
def test_bad_text_files_name_themselves(resampled, damage, message):
    damage(resampled / "modelnet40_normal_resampled")
    with pytest.raises(DataError, match=message):
        load("modelnet40", resampled, points=4)


def test_bad_arrays_name_themselves(packed, grid_points):
    folder = packed / "modelnet40"
    write_packed(folder, "test", grid_points[3:], [1, 2], ["chair", "night_stand"])
    with pytest.raises(DataError, match=r"modelnet40_test_512pts.npz has labels from 1 to 2, expected 0 to 1"):
        load("modelnet40", packed, points=20)
    write_packed(folder, "test", grid_points[3:], [1, 0], ["chair", "sofa"])
    with pytest.raises(DataError, match="has other class names"):
        load("modelnet40", packed, points=20)
    write_packed(folder, "test", grid_points[3:], [1], ["chair", "night_stand"])
    with pytest.raises(DataError, match=r"shape \(2, 20, 3\) and labels of shape \(1,\)"):
        load("modelnet40", packed, points=20)
    write_packed(folder, "test", grid_points[3:], [[1], [0]], ["chair", "night_stand"])  # a column, as HDF5 files have
    with pytest.raises(DataError, match=r"labels of shape \(2, 1\), expected finite numbers \(N, P, 3\) and \(N,\)"):
        load("modelnet40", packed, points=20)
    whole = (folder / "modelnet40_train_512pts.npz").read_bytes()
    (folder / "modelnet40_train_512pts.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"modelnet40_train_512pts.npz is not a file of ModelNet40"):
        load("modelnet40", packed, points=20)


def test_more_points_than_there_are(packed):
    with pytest.raises(ArgumentError, match=r"points must be at most 20, which .*modelnet40 has, got 21"):
        load("modelnet40", packed, points=21)


def test_missing_files_say_where_they_belong(tmp_path):
    with pytest.raises(DataError) as caught:
        load("modelnet40", tmp_path)
    assert "modelnet.cs.princeton.edu" in str(caught.value)
    for name in ("modelnet40_train_512pts.npz", "modelnet40_train.npz", "modelnet40_shape_names.txt"):
        assert name in str(caught.value)


def test_the_import_tool_copies_the_packed_files(packed, tmp_path):
    tool = runpy.run_path(str(TOOLS / "import_data.py"))
    tool["IMPORTERS"]["modelnet40"](packed, tmp_path / "root")
    assert len(load("modelnet40", tmp_path / "root", points=20).train) == 3


PUBLISHED_TEST_COUNTS = [
    *(100, 50, 100, 20, 100, 100, 20, 100, 100, 20, 20, 20, 86, 20, 86, 20, 100, 100, 20, 20),
    *(20, 100, 100, 86, 20, 100, 100, 20, 100, 20, 100, 20, 20, 100, 20, 100, 100, 100, 20, 20),
]


@pytest.mark.slow
def test_the_real_set_has_the_published_counts():
    if not any((root / "modelnet40").is_dir() for root in data_roots(None)):
        pytest.skip(f"needs ModelNet40 in {os.environ.get('HYPERSPHERE_DATA', 'data')}")
    data = load("modelnet40")
    assert (len(data.train), len(data.test), len(data.class_names)) == (9843, 2468, 40)
    assert data.train.shape == (3, 512)
    assert data.test.labels.bincount().tolist() == PUBLISHED_TEST_COUNTS
    assert data.train.labels.bincount()[data.class_names.index("chair")] == 889
    tall = [data.class_names.index(name) for name in ("person", "bottle", "vase")]
    for index in tall:  # the third coordinate is up
        spread = data.train.images[data.train.labels == index].std(2).mean(0)
        assert spread[2] > 1.2 * spread[:2].max()
    row = next(row for row in inventory(None, verify=True) if row.name == "modelnet40")
    assert row.state == "found"


# ---------------------------------------------------------------------------------------------------- shapes


def test_shapes_are_the_same_for_a_seed_and_lie_in_the_unit_ball():
    data = load("shapes", points=40, train_count=3, test_count=2)
    again = load("shapes", points=40, train_count=3, test_count=2)
    assert data.train.images.shape == (24, 3, 40) and data.test.images.shape == (16, 3, 40)
    assert torch.equal(data.train.images, again.train.images)
    assert not torch.equal(data.train.images[:2], data.test.images[:2])
    assert not torch.equal(data.train.images, load("shapes", points=40, train_count=3, shape_seed=1).train.images)
    torch.testing.assert_close(data.train.images.norm(dim=1).amax(1), torch.ones(24))
    torch.testing.assert_close(data.train.images.mean(2), torch.zeros(24, 3))
    assert data.train.labels.bincount().tolist() == [3] * 8


def residual(name: str, cloud: torch.Tensor) -> torch.Tensor:
    """Distance of points from a surface, by its equation: 0 where they lie on it."""
    x, y, z = cloud.double()
    flat = (x**2 + y**2).sqrt()
    square = torch.maximum(x.abs(), y.abs())
    return {
        "sphere": (x**2 + y**2 + z**2) - 1,
        "bowl": (x**2 + y**2 + z**2) - 1 + z.clamp(min=0),
        "cube": torch.maximum(square, z.abs()) - 1,
        "cylinder": torch.maximum(flat, z.abs()) - 1,
        "cone": torch.where(z > -1, flat - (1 - z) / 2, (flat - 1).clamp(min=0)),
        "pyramid": torch.where(z > -1, square - (1 - z) / 2, (square - 1).clamp(min=0)),
        "torus": (flat - 0.7) ** 2 + z**2 - 0.09,
        "helix": (x - 0.7 * (3 * math.pi * z).cos()).abs() + (y - 0.7 * (3 * math.pi * z).sin()).abs(),
    }[name]


@pytest.mark.parametrize("name", SHAPES)
def test_points_lie_on_their_shape_and_all_over_it(name):
    cloud = SHAPES[name](2, 4000, generator())
    assert cloud.shape == (2, 3, 4000)
    assert residual(name, cloud[0]).abs().max() < 1e-5
    if name in ("cube", "cylinder"):  # each side of the cube and lid of the cylinder has its share of the area
        share = (cloud[0, 2] == 1).double().mean()
        assert share == pytest.approx(1 / 6, abs=0.02)
    if name in ("cone", "pyramid"):
        assert (cloud[0, 2] == -1).double().mean() == pytest.approx(1 / (1 + 5**0.5), abs=0.03)


def test_options_of_shapes_are_checked():
    for options in ({"points": 0}, {"train_count": 0}, {"noise": -1.0}):
        with pytest.raises(ArgumentError, match=f"^{next(iter(options))} must be"):
            load("shapes", **options)


# -------------------------------------------------------------------------------------------- random changes


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 99))
def test_rotation_keeps_norms_heights_and_angles(count, points, seed):
    before = torch.randn(count, 3, points, generator=generator(seed))
    after = change_clouds(before, generator(seed), rotate=True)
    assert torch.equal(after[:, 2], before[:, 2])
    torch.testing.assert_close(after.norm(dim=1), before.norm(dim=1))
    torch.testing.assert_close(after.mT @ after, before.mT @ before, atol=1e-5, rtol=1e-4)


def test_rotation_is_one_of_all_angles_for_each_cloud():
    after = change_clouds(torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1).repeat(4000, 1, 2), generator(), rotate=True)
    assert torch.equal(after[:, :, 0], after[:, :, 1])
    angle = torch.atan2(after[:, 1, 0], after[:, 0, 0])
    quarters = ((angle + math.pi) / (math.pi / 2)).long().clamp(max=3).bincount()
    assert (quarters > 900).all()  # 1,000 each, with a deviation of 27


def test_tilt_is_a_small_rotation_about_all_axes():
    before = torch.eye(3).expand(5000, 3, 3)
    after = change_clouds(before, generator(), tilt=0.06)
    torch.testing.assert_close(after @ after.mT, torch.eye(3).expand(5000, 3, 3), atol=1e-5, rtol=0)
    assert torch.linalg.det(after).min() > 0.999
    # To first order the entries off the diagonal are the angles themselves.
    for i, j in ((2, 1), (0, 2), (1, 0)):
        assert after[:, i, j].std() == pytest.approx(0.06, rel=0.1)
        assert after[:, i, j].abs().max() < 0.18 + 0.18**2
    assert after[:, 2, 1].max() > 0.15


def test_scale_shift_and_jitter_stay_within_their_limits():
    before = unit_ball(torch.randn(500, 3, 64, generator=generator()))
    factor = change_clouds(before, generator(), scale=1.25) / before
    torch.testing.assert_close(factor, factor[:, :1, :1].expand_as(factor))
    assert 0.8 <= factor.min() < 0.82 and 1.23 < factor.max() <= 1.2501
    for bad in (0.0, 0.8):
        with pytest.raises(ArgumentError, match="scale must be at least 1"):
            change_clouds(before, generator(), scale=bad)
    moved = change_clouds(before, generator(), shift=0.1) - before
    assert moved.std(2).max() < 1e-6 and 0.098 < moved.abs().max() < 0.1001
    noise = change_clouds(before, generator(), jitter=0.01) - before
    assert noise.std() == pytest.approx(0.01, rel=0.02) and noise.abs().max() < 0.0501
    wide = change_clouds(torch.zeros(2000, 3, 1000), generator(), jitter=0.01)
    assert wide.abs().max() == pytest.approx(0.05)  # one draw in 1.7 million is cut


def test_shuffling_moves_whole_points_and_the_same_in_all_clouds():
    before = torch.arange(12.0).view(1, 3, 4) + 100 * torch.arange(2.0).view(2, 1, 1)
    after = change_clouds(before, generator(3), shuffle=True)
    order = after[0, 0].long()
    assert sorted(order.tolist()) == [0, 1, 2, 3] and torch.equal(after, before[:, :, order])
    assert order.tolist() != [0, 1, 2, 3]


EVERYTHING = {"rotate": True, "tilt": 0.06, "scale": 1.25, "shift": 0.1, "jitter": 0.01, "shuffle": True}


def test_a_share_of_a_batch_is_changed_as_in_the_whole():
    before = torch.randn(6, 3, 5)
    whole = change_clouds(before, generator(), **EVERYTHING)
    for share in (slice(0, 3), slice(3, 6)):
        part = change_clouds(before[share], generator(), **EVERYTHING, batch_size=6, share=share)
        assert torch.equal(part, whole[share])


def test_nothing_to_change_changes_nothing():
    before = torch.randn(2, 3, 5)
    assert change_clouds(before, generator()) is before


def test_preprocess_changes_clouds_in_training_alone():
    preprocess = Preprocess((3, 9), "none", Augment(**EVERYTHING))
    before = torch.randn(4, 3, 9)
    assert torch.equal(preprocess(before), before)
    after = preprocess.augmented(before, generator(1), 4, slice(0, 4))
    assert torch.equal(after, change_clouds(before, generator(1), **EVERYTHING))
    nodes = torch.arange(5)
    assert torch.equal(Preprocess((), "none", Augment()).augmented(nodes, generator(), 5, slice(0, 5)), nodes)


def test_changes_that_do_not_suit_the_samples_are_refused():
    with pytest.raises(ArgumentError, match="jitter must be left out here: it changes point clouds"):
        Preprocess((3, 32, 32), "none", Augment(jitter=0.01))
    with pytest.raises(ArgumentError, match="flip must be left out here: it changes images"):
        Preprocess((3, 32), "none", Augment(flip=True))


def test_unit_ball_of_degenerate_clouds():
    assert torch.equal(unit_ball(torch.full((2, 3, 1), 7.0)), torch.zeros(2, 3, 1))
    assert unit_ball(torch.zeros(0, 3, 4)).shape == (0, 3, 4)


# -------------------------------------------------------------------------------------------------- PointNet


@pytest.mark.parametrize("t_nets", [False, True])
def test_pointnet_does_not_see_the_order_of_points(t_nets):
    model = random_statistics(create("pointnet", (3, 20), t_nets=t_nets, **SMALL))
    cloud = torch.randn(3, 3, 20)
    order = torch.randperm(20)
    torch.testing.assert_close(model(cloud[:, :, order]), model(cloud), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(model(torch.cat([cloud, cloud[:, :, :4]], 2)), model(cloud), atol=1e-5, rtol=1e-4)


def dense(rows: np.ndarray, layers: nn.Sequential) -> np.ndarray:
    """Linear layers with running statistics and ReLU, in float64."""
    for layer in layers:
        if isinstance(layer, nn.Linear):
            rows = rows @ layer.weight.detach().double().numpy().T
            rows = rows if layer.bias is None else rows + layer.bias.detach().double().numpy()
        elif isinstance(layer, nn.BatchNorm1d):
            scale = layer.weight.detach().double().numpy() / np.sqrt(layer.running_var.double().numpy() + layer.eps)
            rows = (rows - layer.running_mean.double().numpy()) * scale + layer.bias.detach().double().numpy()
        elif isinstance(layer, nn.ReLU):
            rows = np.maximum(rows, 0)
    return rows


def t_net_by_hand(points: np.ndarray, net: TNet) -> np.ndarray:
    pooled = dense(dense(points, net.points).max(0)[None], net.hidden)
    matrix = pooled @ net.matrix.weight.detach().double().numpy().T + net.matrix.bias.detach().double().numpy()
    return matrix.reshape(net.size, net.size)


def test_pointnet_with_t_nets_is_what_was_published():
    model = random_statistics(create("pointnet", (3, 10), t_nets=True, **SMALL))
    cloud = torch.randn(2, 3, 10)
    for features, single in zip(model(cloud), cloud.double().numpy(), strict=True):
        points = single.T
        points = points @ t_net_by_hand(points, model.input_transform)
        points = dense(points, model.first)
        points = points @ t_net_by_hand(points, model.feature_transform)
        expected = dense(dense(points, model.second).max(0)[None], model.hidden)[0]
        np.testing.assert_allclose(features.detach().numpy(), expected, atol=1e-4, rtol=1e-4)


def test_t_nets_change_nothing_before_training():
    turned = create("pointnet", (3, 12), t_nets=True, **SMALL).eval()
    plain = create("pointnet", (3, 12), **SMALL).eval()
    assert [type(x) for x in plain.first] == [type(x) for x in [*turned.first, *turned.second]]
    own = iter(x for x in [*turned.first, *turned.second, *turned.hidden] if isinstance(x, nn.Linear))
    for layer in [*plain.first, *plain.hidden]:
        if isinstance(layer, nn.Linear):
            layer.weight.data.copy_(next(own).weight.data)
    cloud = torch.randn(3, 3, 12)
    torch.testing.assert_close(turned(cloud), plain(cloud), atol=1e-5, rtol=1e-4)


def test_the_transform_term_is_the_published_one_for_32_clouds():
    model = random_statistics(create("pointnet", (3, 6), t_nets=True, **SMALL))
    cloud, labels = torch.randn(32, 3, 6), torch.randint(4, (32,))
    head = losses.create("softmax", 16, 4)
    loss, term = model.losses(cloud, labels, head)
    assert model.loss_names == ("loss", "transform")
    total = 0.0
    for single in cloud.double().numpy():
        points = single.T @ t_net_by_hand(single.T, model.input_transform)
        matrix = t_net_by_hand(dense(points, model.first), model.feature_transform)
        for i in range(8):
            for k in range(8):
                total += (sum(matrix[i, j] * matrix[k, j] for j in range(8)) - (i == k)) ** 2
    assert term.item() == pytest.approx(0.001 * 0.5 * total, rel=1e-4)
    assert loss.item() == pytest.approx(head(model(cloud), labels).item(), rel=1e-6)
    term.backward()
    assert model.feature_transform.matrix.weight.grad.abs().max() > 0
    assert all(p.grad is None for p in model.hidden.parameters())


def test_orthogonality_has_the_right_gradient_and_zero_at_rotations():
    matrices = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(orthogonality, matrices)
    rotations = torch.linalg.qr(torch.randn(4, 5, 5, dtype=torch.float64)).Q
    assert float(orthogonality(rotations)) == pytest.approx(0, abs=1e-25)
    with torch.autocast("cpu", torch.bfloat16):
        assert orthogonality(torch.eye(3, dtype=torch.bfloat16)[None]).dtype == torch.float32


def test_plain_pointnet_has_no_losses_of_its_own():
    model = create("pointnet", (3, 6), **SMALL)
    assert not hasattr(model, "loss_names")
    with pytest.raises(ArgumentError, match="t_nets must be true"):
        model.losses(torch.randn(2, 3, 6), torch.zeros(2, dtype=torch.int64), nn.Identity())


def chain(*widths: int) -> int:
    """Weights of layers without biases, and two numbers for each output of theirs that is normalised."""
    return sum(a * b for a, b in pairwise(widths)) + 2 * sum(widths[1:])


T_NET_TRUNK = chain(1024, 512, 256)
PARAMETERS = {
    "pointnet": chain(3, 64, 64, 64, 128, 1024, 512, 256),
    "tnet": chain(3, 64, 64, 64, 128, 1024, 512, 256)
    + (chain(3, 64, 128, 1024) + T_NET_TRUNK + 256 * 9 + 9)
    + (chain(64, 64, 128, 1024) + T_NET_TRUNK + 256 * 64**2 + 64**2),
    "pointnet2": chain(3, 64, 64, 128) + chain(131, 128, 128, 256) + chain(259, 256, 512, 1024, 512, 256),
}


@pytest.mark.parametrize(
    ("name", "options", "key", "published"),
    [
        ("pointnet", {}, "pointnet", 0.8e6),
        ("pointnet", {"t_nets": True}, "tnet", 3.5e6),
        ("pointnet2", {}, "pointnet2", 1.48e6),
    ],
)
def test_numbers_of_parameters(name, options, key, published):
    model = create(name, (3, 512), **options)
    count = sum(p.numel() for p in model.parameters())
    assert count == PARAMETERS[key]
    assert count + 257 * 40 == pytest.approx(published, rel=0.03)  # with the classifier of 40 classes


def test_dropout_is_where_it_was_published():
    def places(model: nn.Module) -> dict[str, float]:
        return {name: part.p for name, part in model.named_modules() if isinstance(part, nn.Dropout)}

    assert places(create("pointnet", (3, 8))) == {"hidden.6": 0.3}
    assert places(create("pointnet", (3, 8), t_nets=True)) == {"hidden.3": 0.3, "hidden.7": 0.3}
    assert places(create("pointnet2", (3, 8))) == {"hidden.3": 0.5, "hidden.7": 0.5}


def test_energies_and_rotations_leave_t_nets_alone():
    model = create("pointnet", (3, 8), t_nets=True, **SMALL)
    names = [layer.name for layer in energy.select(model, output=None)]
    assert names == ["first.0", "first.3", "second.0", "second.3", "second.6", "hidden.0", "hidden.4"]
    asked = energy.select(model, output=None, include="feature_transform.*")
    assert len(asked) == 6 and all(layer.name.startswith("feature_transform.") for layer in asked)
    before = model.eval()(torch.ones(2, 3, 8))
    orthogonal.apply(model, "cayley", skip=(), exclude="*_transform.*")
    torch.testing.assert_close(model(torch.ones(2, 3, 8)), before, atol=1e-5, rtol=1e-4)
    turned = [name for name, part in model.named_modules() if getattr(part, "is_rotation", False)]
    assert len(turned) == 7 and not any("transform" in name for name in turned)


# ------------------------------------------------------------------------------------------------ PointNet++


def farthest_by_hand(cloud: np.ndarray, count: int) -> list[int]:
    chosen = [0]
    while len(chosen) < count:
        gaps = [min(sum((cloud[:, i] - cloud[:, c]) ** 2) for c in chosen) for i in range(cloud.shape[1])]
        chosen.append(int(np.argmax(gaps)))
    return chosen


def ball_by_hand(centre: np.ndarray, cloud: np.ndarray, radius: float, count: int) -> list[int]:
    inside = [i for i in range(cloud.shape[1]) if sum((cloud[:, i] - centre) ** 2) < radius**2][:count]
    return inside + [inside[0] if inside else 0] * (count - len(inside))


@given(st.integers(1, 25), st.integers(1, 3), st.integers(0, 99))
def test_farthest_points_against_loops(points, batch, seed):
    cloud = torch.randn(batch, 3, points, generator=generator(seed), dtype=torch.float64)
    count = 1 + seed % points
    chosen = farthest_points(cloud, count)
    assert chosen.tolist() == [farthest_by_hand(single, count) for single in cloud.numpy()]
    # What is chosen first from the chosen ones are these again.
    kept = cloud.gather(2, chosen.unsqueeze(1).expand(-1, 3, -1))
    assert farthest_points(kept, max(count // 2, 1)).tolist() == [list(range(max(count // 2, 1)))] * batch


@given(st.integers(1, 25), st.integers(1, 8), st.integers(0, 99), st.sampled_from([0.05, 0.5, 1.0, 9.0]))
def test_ball_query_against_loops(points, count, seed, radius):
    cloud = torch.randn(2, 3, points, generator=generator(seed), dtype=torch.float64)
    centres = torch.randn(2, 3, 4, generator=generator(seed + 1), dtype=torch.float64)
    found = ball_query(centres, cloud, radius, count)
    assert found.dtype == torch.int64
    assert found.tolist() == [
        [ball_by_hand(a[:, s], b, radius, count) for s in range(4)]
        for a, b in zip(centres.numpy(), cloud.numpy(), strict=True)
    ]


def test_a_point_on_the_ball_is_outside_and_equal_points_are_all_there():
    cloud = torch.tensor([[[0.0, 1.0, 0.5, 0.0], [0.0] * 4, [0.0] * 4]])
    assert ball_query(cloud[:, :, :1], cloud, 1.0, 4).tolist() == [[[0, 2, 3, 0]]]
    assert farthest_points(torch.zeros(1, 3, 4), 3).tolist() == [[0, 0, 0]]
    with pytest.raises(ArgumentError, match="count must be"):
        farthest_points(cloud, 5)


def test_distances_of_close_points_keep_their_digits():
    cloud = 100 + 1e-3 * torch.rand(1, 3, 5)
    exact = torch.cdist(cloud.mT.double(), cloud.mT.double()) ** 2
    torch.testing.assert_close(squared_distances(cloud, cloud).double(), exact, rtol=1e-5, atol=1e-12)


def pointnet2_by_hand(model: nn.Module, cloud: np.ndarray) -> np.ndarray:
    """One cloud ``(3, P)``, centre by centre, sampled anew at each level."""
    features = np.zeros((cloud.shape[1], 0))
    for level, count, radius, samples in zip(model.levels, model.centres, model.radii, model.samples, strict=False):
        chosen = farthest_by_hand(cloud, min(count, cloud.shape[1]))
        found = []
        for centre in chosen:
            ball = ball_by_hand(cloud[:, centre], cloud, radius, samples)
            rows = np.concatenate([(cloud[:, ball] - cloud[:, [centre]]).T, features[ball]], axis=1)
            found.append(dense(rows, level).max(0))
        cloud, features = cloud[:, chosen], np.stack(found)
    rows = dense(np.concatenate([cloud.T, features], axis=1), model.levels[-1])
    return dense(rows.max(0)[None], model.hidden)[0]


@pytest.mark.parametrize("points", [30, 12, 9, 3])
def test_pointnet2_is_what_was_published(points):
    """Also with as many points as centres or fewer, all of which are then centres; all balls are whole there."""
    options = SMALL2 if points == 30 else {**SMALL2, "samples": (points, points)}
    model = random_statistics(create("pointnet2", (3, points), **options))
    cloud = unit_ball(torch.randn(3, 3, points))
    features = model(cloud).detach().numpy()
    expected = [pointnet2_by_hand(model, single) for single in cloud.double().numpy()]
    np.testing.assert_allclose(features, expected, atol=1e-4, rtol=1e-4)


def test_pointnet2_does_not_see_the_order_behind_the_first_point():
    model = random_statistics(create("pointnet2", (3, 20), **{**SMALL2, "samples": (20, 12)}))
    cloud = unit_ball(torch.randn(2, 3, 20))
    order = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(19)])
    torch.testing.assert_close(model(cloud[:, :, order]), model(cloud), atol=1e-5, rtol=1e-4)


def test_pointnet2_passes_gradients_to_all_layers_and_points():
    model = create("pointnet2", (3, 20), **SMALL2)
    cloud = unit_ball(torch.randn(4, 3, 20)).requires_grad_()
    model(cloud).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert cloud.grad.isfinite().all() and cloud.grad.abs().max() > 0


# ------------------------------------------------------------------------------------------------ both of them


@pytest.mark.parametrize("name", ["pointnet", "tnet", "pointnet2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_close(name, dtype):
    options = SMALL2 if name == "pointnet2" else {**SMALL, "t_nets": name == "tnet"}
    model = random_statistics(create("pointnet2" if name == "pointnet2" else "pointnet", (3, 32), **options))
    cloud = unit_ball(torch.randn(4, 3, 32))
    exact = model(cloud)
    with torch.autocast("cpu", dtype):
        rough = model(cloud)
    assert rough.isfinite().all()
    assert (rough.float() - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(("name", "options"), [("pointnet", SMALL), ("pointnet2", SMALL2)])
def test_empty_and_single_clouds(name, options):
    model = create(name, (3, 1), **options).eval()
    assert model(torch.zeros(0, 3, 1)).shape == (0, 16)
    assert model(torch.zeros(1, 3, 1)).isfinite().all()
    assert model(torch.zeros(2, 3, 5)).isfinite().all()  # all points at one place


def test_bad_options_are_named():
    for shape in ((3, 32, 32), (2, 10), ()):
        with pytest.raises(ArgumentError, match="shape must be"):
            create("pointnet", shape)
    with pytest.raises(ArgumentError, match="widths must have at least one layer"):
        create("pointnet", (3, 8), widths=(8,), t_nets=True)
    with pytest.raises(ArgumentError, match="widths must have one entry more"):
        create("pointnet2", (3, 8), radii=(0.2,))
    with pytest.raises(ArgumentError, match="radii must be"):
        create("pointnet2", (3, 8), radii=(0.2, 0.0))
    with pytest.raises(ArgumentError, match="dropout must be"):
        create("pointnet", (3, 8), dropout=1.5)


def test_momentum_of_normalisation():
    model = create("pointnet", (3, 8), bn_momentum=0.5, t_nets=True, **SMALL)
    assert {part.momentum for part in model.modules() if isinstance(part, nn.BatchNorm1d)} == {0.5}


TINY = [
    "data.points=24",
    "data.train_count=6",
    "data.test_count=3",
    "data.batch_size=16",
    "train.steps=3",
    "train.log_every=1",
    "train.tensorboard=false",
    "evaluate.every=0",
]


@pytest.mark.parametrize(
    ("name", "more", "terms"),
    [
        ("shapes-pointnet", ["regularisers=[{name: rp-comhe, s: 1, half_space: true, target: all}]"], ["rp-comhe"]),
        ("shapes-pointnet", ["orthogonal={name: cayley, init: kaiming}"], []),
        ("shapes-pointnet-tnet", ["data.augment.tilt=0.06", "regularisers=[{name: mhe, s: 1}]"], ["transform", "mhe"]),
        ("shapes-pointnet2", ["data.augment.shuffle=true"], []),
    ],
)
def test_recipes_train_and_leave_clouds_for_the_report(tmp_path, name, more, terms):
    plan = recipe.load(name, [*TINY, *more])
    run = RunFolder.create(tmp_path / "run", plan, torch.device("cpu"))
    metrics = Trainer(plan, run, torch.device("cpu")).fit()
    rows = [row for row in run.rows() if row["split"] == "train"]
    assert len(rows) == 3
    for term in terms:
        assert math.isfinite(rows[-1][term])
    if "transform" in terms:  # the identity before the first step, and no more behind it
        assert rows[0]["transform"] < 1e-6 < rows[-1]["transform"]
    assert 0 <= metrics["class_accuracy"] <= 1
    drawn = sections(load_run(tmp_path / "run").artefacts)["clouds"].pictures
    assert len(drawn) == 1 and len(drawn[0].figure["data"][0]["x"]) == 12 * 24


# ------------------------------------------------------------------------------------- evaluation and pictures


def outputs(count: int = 9, classes: int = 3) -> Outputs:
    cloud = unit_ball(torch.randn(count, 3, 5))
    labels = torch.arange(count) % classes
    weight = torch.randn(classes, 15)

    def predict(samples: torch.Tensor) -> torch.Tensor:
        return samples.flatten(1) @ weight.T

    split = TensorSplit(cloud, labels)
    data = Dataset("mine", ("chair", "<b>sofa</b>", "näme")[:classes], split, split)
    return Outputs(cloud.flatten(1), predict(cloud), labels, weight, data=data, predict=predict)


def test_class_accuracy_counts_every_class_alike():
    logits = F.one_hot(torch.tensor([0, 0, 0, 1]), 3).float()
    found = Outputs(logits, logits, torch.tensor([0, 0, 1, 1]), torch.eye(3))
    assert measure(found, ["clouds"]) == {"class_accuracy": (1.0 + 0.5) / 2}
    uneven = Outputs(logits, logits, torch.tensor([0, 0, 0, 2]), torch.eye(3))
    assert measure(uneven, ["clouds", "classification"])["class_accuracy"] == 0.5
    assert measure(uneven, ["classification"])["accuracy"] == 0.75


def test_contributions_are_the_derivative_of_the_loss_along_the_way_to_the_centre():
    found = outputs()
    measure(found, [{"name": "clouds", "count": 4}])
    kept = {name.removeprefix("clouds/"): value for name, value in found.artefacts.items()}
    assert kept["points"].shape == (4, 3, 5) and kept["contribution"].shape == (4, 5)
    for index in range(4):
        for point in range(5):
            moved = kept["points"][index].double().clone()
            step = 1e-5

            def loss(cloud: torch.Tensor, index: int = index) -> float:
                logits = cloud.flatten() @ found.weight.double().T
                return float(F.cross_entropy(logits[None], kept["labels"][index : index + 1]))

            nearer, farther = moved.clone(), moved.clone()
            nearer[:, point] *= 1 - step
            farther[:, point] *= 1 + step
            slope = (loss(farther) - loss(nearer)) / (2 * step)
            assert float(kept["contribution"][index, point]) == pytest.approx(slope, abs=1e-4)
    names = [bytes(row.tolist()).rstrip(b"\0").decode() for row in kept["names"]]
    assert names == ["chair", "<b>sofa</b>", "näme"]


def test_wrong_clouds_come_first_and_the_surest_of_them():
    found = outputs(count=30)
    chosen = chosen_clouds(found.logits, found.labels, 10)
    predicted = found.logits.argmax(1)
    right = (predicted == found.labels)[chosen].tolist()
    assert right == sorted(right) and right.count(False) == 5 and len(set(chosen.tolist())) == 10
    sure = found.logits.softmax(1).amax(1)
    wrong = [i for i in range(30) if predicted[i] != found.labels[i]]
    assert chosen[:5].tolist() == sorted(wrong, key=lambda i: -float(sure[i]))[:5]
    all_right = chosen_clouds(F.one_hot(found.labels, 3).float(), found.labels, 10)
    assert len(all_right) == 10 and all_right[0] == 0 and all_right[-1] == 29


def test_nothing_is_kept_without_a_model_or_a_wish():
    found = outputs()
    assert "class_accuracy" in measure(found, [{"name": "clouds", "count": 0}]) and not found.artefacts
    split = TensorSplit(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]))
    images = Outputs(
        torch.eye(2), torch.eye(2), torch.tensor([0, 1]), torch.eye(2),
        data=Dataset("mine", ("a", "b"), split, split), predict=lambda x: x,
    )  # fmt: skip
    with pytest.raises(ArgumentError, match="must be of point clouds"):
        measure(images, ["clouds"])
    assert torch.equal(point_contributions(torch.zeros(1, 3, 2), torch.ones(1, 3, 2)), torch.zeros(1, 2))


def test_the_picture_shows_every_cloud_with_its_answer():
    found = outputs()
    measure(found, [{"name": "clouds", "count": 6}])
    arrays = {name.removeprefix("clouds/"): value.numpy() for name, value in found.artefacts.items()}
    (picture,) = cloud_pictures(arrays)
    json.dumps(picture.figure, allow_nan=False)
    texts = [note["text"] for note in picture.figure["layout"]["annotations"]]
    wrong = int((arrays["labels"] != arrays["predicted"]).sum())
    assert len(texts) == 6 and sum("taken for" in text for text in texts) == wrong > 0
    assert not any("<b>sofa" in text for text in texts)  # names from files are no markup
    assert f"{wrong} test clouds" in picture.caption
    trace = picture.figure["data"][0]
    assert len(trace["x"]) == len(trace["y"]) == len(trace["marker"]["color"]) == 30
    assert max(map(abs, trace["marker"]["color"])) == 1
    empty = {key: value if key == "names" else value[:0] for key, value in arrays.items()}
    assert cloud_pictures(empty) == []


def test_the_view_is_a_rotation_with_up_upwards():
    axes = np.stack(project(np.eye(3)))
    np.testing.assert_allclose(axes @ axes.T, np.eye(3), atol=1e-12)
    assert np.linalg.det(axes) == pytest.approx(1)
    right, up, towards = axes[:, 2]
    assert right == 0 and up > 0.9 and towards > 0  # seen from above


def test_colours_are_relative_to_the_loudest_points():
    values = np.array([0.0, 1.0, -2.0, 100.0])
    assert strength(values).tolist()[0] == 0 and strength(values)[3] == 1
    np.testing.assert_allclose(strength(values), strength(1e-9 * values))
    assert strength(np.zeros(4)).tolist() == [0.0] * 4


def test_the_page_about_clouds_says_what_its_code_prints(capsys):
    page = (DOCS / "clouds.md").read_text(encoding="utf-8")
    code, printed = page.split("```python\n")[1].split("```")[0], page.split("```text\n")[1].split("```")[0]
    exec(compile(code, "docs/clouds.md", "exec"), {})
    assert capsys.readouterr().out == printed
    for word in ("817,512", "3.47 million", "1.47 million"):
        assert word in page
    assert PARAMETERS["pointnet"] + 257 * 40 == 817_512
    assert f"{(PARAMETERS['tnet'] + 257 * 40) / 1e6:.2f}" == "3.47"
    assert f"{(PARAMETERS['pointnet2'] + 257 * 40) / 1e6:.2f}" == "1.47"


# ----------------------------------------------------------------------------------------------- on a CUDA device


def on_cuda(test):
    """Marks a test that needs a CUDA device."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


@on_cuda
@pytest.mark.parametrize("name", ["pointnet", "pointnet2"])
def test_networks_do_not_wait_for_the_device_and_agree_with_the_cpu(name):
    cloud = unit_ball(torch.randn(8, 3, 512))
    on_device = cloud.cuda()
    assert torch.equal(farthest_points(on_device, 128).cpu(), farthest_points(cloud, 128))
    balls = ball_query(on_device[:, :, :64], on_device, 0.4, 32)
    assert torch.equal(balls.cpu(), ball_query(cloud[:, :, :64], cloud, 0.4, 32))
    model = random_statistics(create(name, (3, 512)))
    expected = model(cloud)
    model.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = model(on_device)
        found.sum().backward()
        source = torch.Generator("cuda").manual_seed(0)
        change_clouds(on_device, source, **EVERYTHING)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(found.cpu(), expected, atol=1e-3, rtol=1e-3)


@on_cuda
@pytest.mark.parametrize("name", ["shapes-pointnet", "shapes-pointnet-tnet", "shapes-pointnet2"])
def test_a_captured_step_does_what_the_plain_one_does(tmp_path, name):
    rows = {}
    for capture in ("true", "false"):
        more = ["train.steps=12", f"train.capture={capture}", "data.augment.shuffle=true", "data.augment.tilt=0.06"]
        plan = recipe.load(name, [*TINY, *more])
        run = RunFolder.create(tmp_path / capture, plan, torch.device("cuda", 0))
        Trainer(plan, run, torch.device("cuda", 0)).fit()
        rows[capture] = [row["total"] for row in run.rows() if row["split"] == "train"]
    # PointNet++ sums its gradients in any order, and Adam makes whole steps of those that are next to nothing: two
    # plain runs drift apart as much.
    steps = 3 if name == "shapes-pointnet2" else 12
    assert rows["true"][:steps] == pytest.approx(rows["false"][:steps], rel=1e-2)
    assert len(rows["true"]) == len(rows["false"]) == 12
