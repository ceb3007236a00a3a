"""Write LFW's verification pairs from a compact copy: a folder of images, their landmarks and the list of pairs.

The copy is an npz file with JPEG mosaics of 8 x 8 face windows of 144 x 128 pixels (``jpeg``, ``offset``), the name of
each window (``image_name``, such as ``Ann_Veneman_0003``), its five landmarks (``landmark5``), and the pairs (``pair``,
``same``, ``fold``). The result is what LFW itself looks like with landmarks beside it::

    ROOT/images/Ann_Veneman/Ann_Veneman_0003.jpg
    ROOT/landmarks.txt
    ROOT/pairs.txt

Example:
    python tools/import_lfw.py --source copies/lfw_pairs_faces.npz --root data/lfw
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, JpegImagePlugin

from hypersphere.tasks.faces.data import read_pairs, write_landmarks

HEIGHT, WIDTH, SIDE = 144, 128, 8


def images_of(names: list[str]) -> list[str]:
    """``Ann_Veneman_0003`` as ``Ann_Veneman/Ann_Veneman_0003``."""
    return [f"{name.rpartition('_')[0]}/{name}" for name in names]


def write_images(jpeg: np.ndarray[Any, Any], offset: np.ndarray[Any, Any], images: list[str], folder: Path) -> None:
    """Cut the mosaics; their own tables and block boundaries leave the pixels all but as they were."""
    left = iter(images)
    for piece in np.split(jpeg, offset[1:-1]):
        mosaic = Image.open(io.BytesIO(piece.tobytes()))
        tables: dict[str, Any] = {
            "qtables": mosaic.quantization,  # type: ignore[attr-defined]
            "subsampling": JpegImagePlugin.get_sampling(mosaic),
        }
        for index in range(SIDE * SIDE):
            image = next(left, None)
            if image is None:
                return
            y, x = HEIGHT * (index // SIDE), WIDTH * (index % SIDE)
            path = folder / f"{image}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            mosaic.crop((x, y, x + WIDTH, y + HEIGHT)).save(path, **tables)


def pair_lines(images: list[str], pair: np.ndarray[Any, Any], same: np.ndarray[Any, Any], folds: int) -> list[str]:
    """The pairs in the form of LFW's list."""
    lines = [f"{folds}\t{len(pair) // (2 * folds)}"]
    for (left, right), one in zip(pair.tolist(), same.tolist(), strict=True):
        (first, i), (second, j) = (images[place].partition("/")[2].rsplit("_", 1) for place in (left, right))
        lines.append("\t".join([first, str(int(i)), *([] if one else [second]), str(int(j))]))
    return lines


def main() -> None:
    """Write the three and print what the package reads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="the compact copy")
    parser.add_argument("--root", type=Path, required=True, help="folder to write into")
    arguments = parser.parse_args()
    root: Path = arguments.root
    with np.load(arguments.source) as packed:
        images = images_of(packed["image_name"].tolist())
        write_images(packed["jpeg"], packed["offset"], images, root / "images")
        points = torch.from_numpy(packed["landmark5"].astype(np.float32))
        lines = pair_lines(images, packed["pair"], packed["same"], len(np.unique(packed["fold"])))
    write_landmarks(
        root / "landmarks.txt", {f"{image}.jpg": point for image, point in zip(images, points, strict=True)}
    )
    (root / "pairs.txt").write_text("\n".join(lines) + "\n")
    print(f"{root}: {read_pairs(root / 'pairs.txt')}")


if __name__ == "__main__":
    main()
