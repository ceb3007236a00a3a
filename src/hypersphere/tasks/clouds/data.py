"""Point clouds: ModelNet40, and simple shapes drawn from a seed.

A cloud is ``(3, P)`` float32, its points in no order; the third coordinate points up. Clouds lie in the unit ball.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hypersphere.data.sources import Layout, Source, content, datasets, locate, sources
from hypersphere.data.splits import DataError, Dataset, TensorSplit
from hypersphere.errors import ArgumentError, check_range
from hypersphere.tasks.clouds.augmentations import change_clouds

Floats = NDArray[np.float32]


def unit_ball(clouds: Tensor) -> Tensor:
    """Clouds moved to their mean and scaled so that the farthest point is at distance 1.

    Args:
        clouds: ``(..., 3, P)``; a cloud of one point, or of equal ones, becomes zeros.

    Example:
        >>> unit_ball(torch.tensor([[0.0, 4.0], [0.0, 0.0], [1.0, 1.0]]))
        tensor([[-1.,  1.],
                [ 0.,  0.],
                [ 0.,  0.]])
    """
    centred = clouds - clouds.mean(-1, keepdim=True)
    size = centred.square().sum(-2, keepdim=True).amax(-1, keepdim=True).sqrt()
    return centred / torch.where(size > 0, size, 1.0)


# ------------------------------------------------------------------------------------------------- ModelNet40

_PACKED = {
    "train": ("modelnet40_train_512pts.npz", "5085ad7fb94012dc74fdac2e1591cdc9"),
    "test": ("modelnet40_test_512pts.npz", "d763dbacdf73bd2bc5fd27600990fabb"),
}
_PLAIN = {part: f"modelnet40_{part}.npz" for part in ("train", "test")}
_LISTS = {part: f"modelnet40_{part}.txt" for part in ("train", "test")}
_NAMES = "modelnet40_shape_names.txt"

sources["modelnet40"] = Source(
    "modelnet40",
    "https://modelnet.cs.princeton.edu (clouds drawn from its meshes: modelnet40_normal_resampled of PointNet++)",
    (
        Layout(("modelnet40",), dict(_PACKED.values())),
        Layout(("modelnet40",), dict.fromkeys(_PLAIN.values())),
        Layout(("modelnet40_normal_resampled",), dict.fromkeys([_NAMES, *_LISTS.values()])),
    ),
)


@datasets.register("modelnet40")
def modelnet40(root: Path | None = None, points: int = 512, point_seed: int = 0) -> Dataset:
    """Clouds on the surfaces of 40 kinds of things, 9,843 to train on and 2,468 to test on.

    Read are ``modelnet40_train.npz`` and ``modelnet40_test.npz`` with ``points`` ``(N, P, 3)`` (the third coordinate
    up), ``label`` ``(N,)`` and ``class_name`` ``(40,)``; the same packed with 512 points; and the text files of
    ``modelnet40_normal_resampled``, where the second coordinate is up.

    Args:
        root: Data root to search instead of the usual ones.
        points: Points of each cloud, drawn from those in the files.
        point_seed: Seed of that draw.
    """
    check_range("points", points, 1)
    folder, layout = sources["modelnet40"].find(root)
    if _NAMES in layout.md5:
        names = _lines(folder / _NAMES)
        parts = {part: _read_texts(folder, file, names, points) for part, file in _LISTS.items()}
    else:
        files = {part: folder / name for part, name in zip(("train", "test"), layout.md5, strict=True)}
        found = {part: _read_arrays(path) for part, path in files.items()}
        names = found["train"][2]
        if found["test"][2] != names:
            raise DataError(f"{files['test']} has other class names than {files['train']}. Get both files again.")
        parts = {part: (clouds, labels) for part, (clouds, labels, _) in found.items()}
    splits = []
    for number, part in enumerate(("train", "test")):
        clouds, labels = parts[part]
        if points > clouds.shape[1]:
            raise ArgumentError("points", f"must be at most {clouds.shape[1]}, which {folder} has, got {points}")
        splits.append(TensorSplit(_drawn(clouds, points, point_seed + number), torch.from_numpy(labels)))
    train, test = splits
    return Dataset("modelnet40", names, train, test)


def _drawn(clouds: Floats, points: int, seed: int) -> Tensor:
    """So many points of each cloud ``(N, P, 3)``, in random order, as ``(N, 3, points)`` in the unit ball."""
    # The files may have them in an order along the surface, of which a network must learn nothing.
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(clouds.shape[:2], generator=generator).argsort(1)[:, :points, None]
    return unit_ball(torch.from_numpy(clouds).gather(1, order.expand(-1, -1, 3)).transpose(1, 2).contiguous())


def _read_arrays(path: Path) -> tuple[Floats, NDArray[np.int64], tuple[str, ...]]:
    """Clouds ``(N, P, 3)``, labels ``(N,)`` and names of the classes from a file of arrays, packed or not."""
    plain = locate(path.parent, path.name)
    assert plain is not None  # the folder was chosen because it holds it
    try:
        with np.load(io.BytesIO(content(plain))) as arrays:
            clouds = arrays["points"].astype(np.float32) if "points" in arrays else _unpack(arrays["hi"], arrays["lo"])
            labels = arrays["label"].astype(np.int64)
            names = tuple(map(str, arrays["class_name"].tolist()))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{plain} is not a file of ModelNet40 ({error}). Get the file again.") from error
    if clouds.ndim != 3 or clouds.shape[2] != 3 or labels.shape != clouds.shape[:1] or not np.isfinite(clouds).all():
        raise DataError(
            f"{plain} has clouds of shape {clouds.shape} and labels of shape {labels.shape}, expected finite numbers "
            "(N, P, 3) and (N,). Get the file again."
        )
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(names):
        raise DataError(
            f"{plain} has labels from {labels.min()} to {labels.max()}, expected 0 to {len(names) - 1}. The file is "
            "damaged or belongs to another data set."
        )
    return clouds, labels, names


def _unpack(high: NDArray[np.uint8], low: NDArray[np.uint8]) -> Floats:
    """Clouds ``(N, P, 3)`` from differences of neighbouring points, zigzag-coded in 255ths, two bytes each."""
    coded = high.astype(np.int32) * 256 + low
    differences = (coded >> 1) ^ -(coded & 1)
    return np.ascontiguousarray(np.cumsum(differences, axis=2).transpose(1, 2, 0) / 255, dtype=np.float32)


def _read_texts(folder: Path, file: str, names: tuple[str, ...], points: int) -> tuple[Floats, NDArray[np.int64]]:
    """The first points of the clouds in a list of shapes, each a text file with x, y, z (and normals) in a line."""
    shapes = _lines(folder / file)
    clouds = np.empty((len(shapes), points, 3), dtype=np.float32)
    labels = np.empty(len(shapes), dtype=np.int64)
    for index, shape in enumerate(shapes):
        kind = shape.rpartition("_")[0]
        if kind not in names:
            raise DataError(f"{folder / file}, line {index + 1}: {shape!r} is of no class in {folder / _NAMES}.")
        path = folder / kind / f"{shape}.txt"
        try:
            with path.open(encoding="utf-8") as lines:
                rows = [list(map(float, line.split(",")[:3])) for line in islice(lines, points)]
            # Up is the second coordinate there.
            clouds[index] = np.asarray(rows, dtype=np.float32).reshape(points, 3)[:, [2, 0, 1]]
            if not np.isfinite(clouds[index]).all():
                raise ValueError("not all of them are finite numbers")
        except (OSError, ValueError, IndexError) as error:
            raise DataError(
                f"{path} cannot be read as {points} lines of x, y, z ({error}). Get the file again, or fewer points."
            ) from error
        labels[index] = names.index(kind)
    return clouds, labels


def _lines(path: Path) -> tuple[str, ...]:
    return tuple(content(path).decode("utf-8", "replace").split())


# ----------------------------------------------------------------------------------------------------- shapes

sources["shapes"] = Source("shapes", "drawn from a seed", ())

Draw = Callable[[int, int, torch.Generator], Tensor]


def _uniform(n: int, points: int, generator: torch.Generator, low: float = 0.0, high: float = 1.0) -> Tensor:
    return low + (high - low) * torch.rand(n, points, generator=generator)


def _turn(n: int, points: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    angle = _uniform(n, points, generator, 0, 2 * math.pi)
    return angle.cos(), angle.sin()


def _sphere(n: int, points: int, generator: torch.Generator) -> Tensor:
    normal = torch.randn(n, 3, points, generator=generator)
    return normal / torch.linalg.vector_norm(normal, dim=1, keepdim=True)


def _bowl(n: int, points: int, generator: torch.Generator) -> Tensor:
    x, y, z = _sphere(n, points, generator).unbind(1)
    return torch.stack([x, y, -z.abs()], 1)


def _cube(n: int, points: int, generator: torch.Generator) -> Tensor:
    inside = 2 * torch.rand(n, 3, points, generator=generator) - 1
    face = torch.randint(3, (n, 1, points), generator=generator)
    side = inside.gather(1, face).sign()
    return inside.scatter(1, face, torch.where(side == 0, 1.0, side))


def _cylinder(n: int, points: int, generator: torch.Generator) -> Tensor:
    cos, sin = _turn(n, points, generator)
    place = _uniform(n, points, generator, -1.5, 1.5)  # half a part for each lid, which has half the area of the side
    radius = torch.where(place.abs() > 1, _uniform(n, points, generator).sqrt(), 1.0)
    return torch.stack([radius * cos, radius * sin, place.clamp(-1, 1)], 1)


def _cone(n: int, points: int, generator: torch.Generator) -> Tensor:
    cos, sin = _turn(n, points, generator)
    radius = _uniform(n, points, generator).sqrt()
    base = _uniform(n, points, generator) < 1 / (1 + math.sqrt(5))  # share of the area, for height 2 and radius 1
    return torch.stack([radius * cos, radius * sin, torch.where(base, -1.0, 1 - 2 * radius)], 1)


def _pyramid(n: int, points: int, generator: torch.Generator) -> Tensor:
    size = _uniform(n, points, generator).sqrt()
    along, across = _uniform(n, points, generator, -1, 1), torch.ones(n, points)
    side = torch.randint(4, (n, points), generator=generator)
    x = torch.where(side % 2 == 0, along, across) * torch.where(side < 2, 1.0, -1.0)
    y = torch.where(side % 2 == 0, across, along) * torch.where(side < 2, 1.0, -1.0)
    base = _uniform(n, points, generator) < 1 / (1 + math.sqrt(5))
    return torch.stack([size * x, size * y, torch.where(base, -1.0, 1 - 2 * size)], 1)


def _torus(n: int, points: int, generator: torch.Generator) -> Tensor:
    (cos, sin), (out, up) = _turn(n, points, generator), _turn(n, points, generator)
    radius = 0.7 + 0.3 * out
    return torch.stack([radius * cos, radius * sin, 0.3 * up], 1)


def _helix(n: int, points: int, generator: torch.Generator) -> Tensor:
    height = _uniform(n, points, generator, -1, 1)
    angle = 3 * math.pi * height
    return torch.stack([0.7 * angle.cos(), 0.7 * angle.sin(), height], 1)


SHAPES: dict[str, Draw] = {
    "sphere": _sphere,
    "bowl": _bowl,
    "cube": _cube,
    "cylinder": _cylinder,
    "cone": _cone,
    "pyramid": _pyramid,
    "torus": _torus,
    "helix": _helix,
}
"""Shape -> points ``(n, 3, points)`` on its surface, or along its line, drawn from a generator."""


@datasets.register("shapes")
def shapes(
    root: Path | None = None,
    points: int = 128,
    train_count: int = 100,
    test_count: int = 40,
    noise: float = 0.02,
    shape_seed: int = 0,
) -> Dataset:
    """Clouds on 8 simple shapes, stretched, turned about the vertical and noisy; drawn from a seed, needs no files.

    Args:
        root: Not used.
        points: Points of each cloud.
        train_count: Clouds of each shape to train on.
        test_count: Clouds of each shape to test on.
        noise: Deviation of the points from their surface.
        shape_seed: Seed of all that is drawn.
    """
    for name, value in (("points", points), ("train_count", train_count), ("test_count", test_count)):
        check_range(name, value, 1)
    check_range("noise", noise, 0)
    splits = []
    for number, count in enumerate((train_count, test_count)):
        generator = torch.Generator().manual_seed(2 * shape_seed + number)
        drawn = torch.cat([draw(count, points, generator) for draw in SHAPES.values()])
        stretch = 0.7 + 0.6 * torch.rand(len(drawn), 3, 1, generator=generator)
        turned = change_clouds(drawn * stretch, generator, rotate=True)
        noisy = unit_ball(turned) + noise * torch.randn(drawn.shape, generator=generator)
        labels = torch.arange(len(SHAPES)).repeat_interleave(count)
        splits.append(TensorSplit(unit_ball(noisy), labels))
    train, test = splits
    return Dataset("shapes", tuple(SHAPES), train, test)
