r"""An image is known by the phases of its waves, not by their heights.

The Fourier transform writes an image as a sum of waves, each with a magnitude and a phase. This example puts the
magnitudes of one image together with the phases of another,

.. math:: \operatorname{Re}\,\mathcal F^{-1}\big(|\mathcal F A|\,e^{i\arg\mathcal F B}\big),

and what comes out looks like B, the image of the phases. It does so even with magnitudes of pure noise, while
magnitudes with phases of noise show nothing. It is the same division that a layer of cosines makes of its patches: the
angle is kept, the size is dropped.

    python examples/phase_swap.py -o phases.png

The two images are part of scikit-learn: a temple and a flower, grey, cut to a square. The correlations over
pixels understate what the eye sees where the magnitudes are random, because the long waves, which decide how bright
each part is, are then far too small. With random phases the correlations are chance and vary widely from one noise to
the next: nearly all of the magnitude is in a few long waves, and a few long waves may well fit. The picture needs
matplotlib.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

SIZE = 120
"""Height and width of the images."""
GREYS = 31
"""Shades in the picture, less one."""
DRAWS = 20
"""Number of noises over which a correlation with noise is averaged."""


def phase_swap(magnitude: Tensor, phase: Tensor) -> Tensor:
    """The image with the magnitudes of one image and the phases of another.

    Args:
        magnitude: Image whose magnitudes are taken, ``(..., H, W)``.
        phase: Image whose phases are taken, ``(..., H, W)``.

    Returns:
        ``(..., H, W)``.

    Example:
        >>> image = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
        >>> phase_swap(3 * image, image)  # another magnitude, the same phases
        tensor([[ 3.,  6.],
                [ 9., 15.]])
    """
    return torch.fft.ifft2(torch.polar(torch.fft.fft2(magnitude).abs(), torch.fft.fft2(phase).angle())).real


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson correlation over the pixels of two images ``(H, W)``."""
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()


def photographs() -> dict[str, Tensor]:
    """Two photographs of scikit-learn in grey, ``(120, 120)``, with values between 0 and 1."""
    from sklearn.datasets import load_sample_images  # noqa: PLC0415  (slow to import)

    found = {}
    for name, image in zip(("temple", "flower"), load_sample_images().images, strict=True):
        grey = torch.from_numpy(image.astype("float64")).mean(-1) / 255
        top, left = ((side - 3 * SIZE) // 2 for side in grey.shape)
        square = grey[top : top + 3 * SIZE, left : left + 3 * SIZE]
        found[name] = F.avg_pool2d(square[None, None], 3)[0, 0]
    return found


def swaps(images: dict[str, Tensor], seed: int = 0) -> dict[tuple[str, str], Tensor]:
    """All exchanges of two images and white noise, by the names of where magnitudes and phases come from."""
    first = next(iter(images.values()))
    noise = torch.randn(first.shape, generator=torch.Generator().manual_seed(seed), dtype=first.dtype)
    sources = {**images, "noise": noise}
    one, other = images
    pairs = [(one, other), (other, one), *(pair for name in images for pair in (("noise", name), (name, "noise")))]
    return {(a, b): phase_swap(sources[a], sources[b]) for a, b in pairs}


def draw(images: dict[str, Tensor], found: dict[tuple[str, str], Tensor], path: Path) -> None:
    """Write a picture: a row for each image, with what its phases and what its magnitudes alone look like.

    The correlations in it are those with the image of the row.
    """
    from hypersphere.plot import save  # noqa: PLC0415  (only the picture needs matplotlib)
    from hypersphere.plot.style import DPI, MUTED, new_figure, styled  # noqa: PLC0415

    one, other = images
    columns = {
        "image": lambda name: images[name],
        "its phases,\nmagnitudes of the other": lambda name: found[other if name == one else one, name],
        "its phases,\nrandom magnitudes": lambda name: found["noise", name],
        "its magnitudes,\nrandom phases": lambda name: found[name, "noise"],
    }
    # Two screen pixels for every pixel, which also keeps the file small; noise does not compress.
    tile, gap, head, foot = 2 * SIZE, 14, 48, 30
    width, height = len(columns) * (tile + gap) - gap, head + 2 * (tile + foot)

    @styled
    def picture() -> None:
        figure = new_figure(width / DPI, height / DPI)
        figure.set_layout_engine("none")
        for row, name in enumerate(images):
            for column, (title, image_of) in enumerate(columns.items()):
                image = image_of(name)
                left, bottom = column * (tile + gap), (1 - row) * (tile + foot) + foot
                axes = figure.add_axes((left / width, bottom / height, tile / width, tile / height))
                low, high = image.quantile(0.01).item(), image.quantile(0.99).item()
                shades = image.sub(low).div(high - low).clamp(0, 1).mul(GREYS).round()
                axes.imshow(shades.numpy(), cmap="gray", aspect="auto", interpolation="nearest")
                axes.set_axis_off()
                chance = " by chance" * (column == len(columns) - 1)
                note = f"correlation {correlation(image, images[name]):.2f}{chance}" if column else name
                axes.text(0.5, -0.03, note, transform=axes.transAxes, ha="center", va="top", fontsize=7, color=MUTED)
                if row == 0:
                    axes.set_title(title, loc="center", fontsize=8.5, pad=4)
        save(figure, path)

    picture()


def main(arguments: Sequence[str] | None = None) -> None:
    """Exchange the phases as the command line says."""
    parser = argparse.ArgumentParser(description="Put the magnitudes of one image together with the phases of another.")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default: %(default)s)")
    parser.add_argument("-o", dest="picture", type=Path, metavar="PICTURE", help="write the images there")
    options = parser.parse_args(arguments)

    images = photographs()
    seeds = range(options.seed, options.seed + DRAWS)
    drawn = [swaps(images, seed) for seed in seeds]
    print("magnitudes  phases  " + "".join(f"{f'corr. with {name}':>20}" for name in images))
    for magnitude, phase in drawn[0]:
        row = f"{magnitude:10}  {phase:6}  "
        for image in images.values():
            values = torch.tensor([correlation(found[magnitude, phase], image) for found in drawn])
            spread = f" ± {values.std().item():.3f}" if "noise" in (magnitude, phase) else ""
            row += f"{f'{values.mean().item():.3f}{spread}':>20}"
        print(row)
    print(f"with noise: mean and standard deviation over {DRAWS} noises")
    if options.picture:
        draw(images, drawn[0], options.picture)
        print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
