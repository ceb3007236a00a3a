r"""Hyperspherical energy rescues a rare class.

Digits in a plane: a small network maps 8x8 images to 2-D features, and an ordinary linear classifier tells the ten
classes apart by the direction of the feature. Of class 0 only 5 training images are left, against about 125 of the
others.

    python examples/rare_class.py -o rare_class.png

* Without a regulariser the other nine classes take the whole circle. The direction of class 0 ends up next to that of
  another class, and not one of its test images is recognised.
* With the hyperspherical energy of the classifier's ten weight vectors in the loss (MHE, weight 1) these stay 36
  degrees apart, the most that is possible, and class 0 has a sector of its own.

Each network has another start, another order of images and another choice of the 5 images; all are trained side by
side, in one product of matrices. The directions always spread. Whether the network then also moves the class there is a
matter of luck, and of the other constants: it fails in about one network of five, in most of them without momentum, and
with a little less weight decay some networks without the energy find room for the class, too. The constants were chosen
on the starts shown here; from others fewer images of the class are recognised, though still most of them.

``hypersphere train digits-rare-class`` trains one such network. The picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hypersphere as hs
from hypersphere.data import load
from hypersphere.geometry import angle_matrix

RARE, LEFT, CLASSES = 0, 5, 10
INPUTS, WIDTH, BATCH = 64, 64, 128
STEPS, LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 1500, 0.1, 0.9, 5e-4
CLIP = 0.5
"""Largest norm of a network's gradient: two directions that nearly meet at the start would throw each other far off."""
KINDS = {"without": "no regulariser", "with": "MHE on the classifier"}


class Result(NamedTuple):
    """A trained network.

    Attributes:
        accuracy: Share of right answers on test images.
        rare: The same of the rare class.
        gap: Angle from the rare class' weight vector to the nearest other one, in degrees.
        features: Of the test images, ``(N, 2)``.
        labels: Their classes ``(N,)``.
        weights: Of the classifier, ``(10, 2)``.
    """

    accuracy: float
    rare: float
    gap: float
    features: Tensor
    labels: Tensor
    weights: Tensor


class Networks(nn.Module):
    """Networks of two hidden layers with batch normalisation, 2-D features and a linear classifier, side by side.

    Args:
        count: Number of networks S.
        generator: Source of the first weights.
    """

    def __init__(self, count: int, generator: torch.Generator) -> None:
        super().__init__()
        sizes = ((INPUTS, WIDTH), (WIDTH, WIDTH), (WIDTH, 2))
        bounds = [inputs**-0.5 for inputs, _ in sizes]
        self.layers = nn.ParameterList(
            bound * (2 * torch.rand(count, *size, generator=generator) - 1)
            for size, bound in zip(sizes, bounds, strict=True)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(count * WIDTH) for _ in range(2))
        spread = math.sqrt(6 / (2 + CLASSES))
        self.classifier = nn.Parameter(spread * (2 * torch.rand(count, CLASSES, 2, generator=generator) - 1))

    def forward(self, images: Tensor) -> Tensor:
        """Features ``(S, B, 2)`` of images ``(S, B, 64)``, every network's own."""
        x = images
        for layer, norm in zip(self.layers, self.norms, strict=False):
            x = (x @ layer).transpose(0, 1)  # a channel of each network is a channel of the normalisation
            x = norm(x.flatten(1)).view(x.shape).relu().transpose(0, 1)
        return x @ self.layers[-1]

    def clip_gradients(self) -> None:
        """Scale the gradient of each network down to the norm :data:`CLIP`."""
        count = len(self.classifier)
        gradients = [p.grad.view(count, -1) for p in self.parameters() if p.grad is not None]
        norms = torch.cat(gradients, 1).norm(dim=1, keepdim=True)
        for gradient in gradients:
            gradient.mul_((CLIP / norms).clamp(max=1))


def rare_digits(seeds: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images ``(S, M, 64)`` and labels ``(S, M)`` of each seed to train on; ``(S, N, 64)`` and ``(N,)`` to test on."""
    sets = [load("digits", imbalance={"keep": {RARE: LEFT}, "seed": seed}) for seed in range(seeds)]
    train, test = (torch.stack([getattr(s, part).images.flatten(1) for s in sets]) / 255 for part in ("train", "test"))
    mean = train.mean(1, keepdim=True)
    return train - mean, torch.stack([s.train.labels for s in sets]), test - mean, sets[0].test.labels


def batches(count: int, size: int, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Indices ``(S, BATCH)`` of ``size`` images, in a new order each epoch and for each of ``count`` networks."""
    per_epoch = size // BATCH
    for step in range(steps):
        if step % per_epoch == 0:
            order = torch.rand(count, size, generator=generator).argsort(1)
        yield order[:, step % per_epoch * BATCH :][:, :BATCH]


def train(seeds: int, *, regularised: bool, steps: int = STEPS) -> list[Result]:
    """Train a network for each seed; those with and without the energy start alike and see the same images."""
    images, labels, test_images, test_labels = rare_digits(seeds)
    generator = torch.Generator().manual_seed(0)
    networks = Networks(seeds, generator)
    optimiser = torch.optim.SGD(networks.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    networks_of = torch.arange(seeds).unsqueeze(1)
    for chosen in batches(seeds, images.shape[1], steps, generator):
        scores = networks(images[networks_of, chosen]) @ networks.classifier.mT
        loss = seeds * F.cross_entropy(scores.flatten(0, 1), labels[networks_of, chosen].flatten())
        if regularised:
            loss = loss + hs.energy.hyperspherical_energy(networks.classifier, s=2).sum()
        optimiser.zero_grad()
        loss.backward()
        networks.clip_gradients()
        optimiser.step()
    networks.eval()
    with torch.no_grad():
        features = networks(test_images)
        right = (features @ networks.classifier.mT).argmax(2) == test_labels
        accuracy, rare = right.double().mean(1), right[:, test_labels == RARE].double().mean(1)
        weights = networks.classifier.detach()
    return [
        Result(float(accuracy[i]), float(rare[i]), gap(weights[i]), features[i], test_labels, weights[i])
        for i in range(seeds)
    ]


def gap(weights: Tensor) -> float:
    """Angle from the rare class' weight vector to the nearest other one, in degrees."""
    angles = angle_matrix(weights, weights)[RARE]
    angles[RARE] = math.pi
    return math.degrees(angles.min().item())


def draw(found: Mapping[str, Sequence[Result]], path: Path) -> None:
    """Write a picture: features and classifier of one seed, without and with MHE, and accuracies of all seeds."""
    from hypersphere.plot import save  # noqa: PLC0415  (only the picture needs matplotlib)
    from hypersphere.plot.style import new_figure, styled  # noqa: PLC0415

    @styled
    def picture() -> None:
        figure = new_figure(10.4, 3.5)
        left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 0.85])
        # A typical network: the one in the middle when they are ordered by what the energy gives the rare class.
        order = sorted(range(len(found["with"])), key=lambda seed: found["with"][seed].rare)
        for axes, letter, (kind, results) in zip((left, middle), "ab", found.items(), strict=True):
            shown = results[order[len(order) // 2]]
            draw_plane(axes, shown)
            title = f"({letter}) {KINDS[kind]}\nclass {RARE}: {shown.rare:.0%} of its test images right"
            axes.set_title(title, loc="center")
        draw_bars(right, found)
        save(figure, path)

    picture()


def draw_plane(axes: Any, result: Result) -> None:
    """Directions and lengths of the features, the classifier's directions around them."""
    from matplotlib.patheffects import withStroke  # noqa: PLC0415

    from hypersphere.drawing import colour  # noqa: PLC0415
    from hypersphere.plot.style import FAINT, INK  # noqa: PLC0415

    lengths = result.features.norm(dim=1)
    # Lengths differ by orders of magnitude from class to class; their root fits on paper.
    points = result.features * (lengths / lengths.quantile(0.98)).sqrt().div(lengths.clamp(min=1e-6)).unsqueeze(1)
    turns = torch.linspace(0, 2 * math.pi, 200)
    axes.plot(turns.cos(), turns.sin(), color=FAINT, lw=1, zorder=0)
    units = result.weights / result.weights.norm(dim=1, keepdim=True)
    halo = [withStroke(linewidth=2.6, foreground="white")]
    for label in [*range(1, CLASSES), RARE]:  # the rare class on top
        rare = label == RARE
        shade = INK if rare else colour(label)
        own = points[result.labels == label]
        look = {"s": 20, "zorder": 5, "lw": 0.6, "edgecolor": "white"} if rare else {"s": 9, "alpha": 0.55, "lw": 0}
        axes.scatter(own[:, 0], own[:, 1], color=shade, **look)
        x, y = units[label].tolist()
        axes.plot([0, x], [0, y], color=shade, lw=2.4 if rare else 1.4, zorder=4 if rare else 3)
        axes.text(
            1.14 * x,
            1.14 * y,
            str(label),
            color=shade,
            ha="center",
            va="center",
            fontsize=11 if rare else 9,
            fontweight="bold",
            path_effects=halo,
            zorder=7 if rare else 6,
        )
    axes.set_aspect("equal")
    axes.set_xlim(-1.28, 1.28)
    axes.set_ylim(-1.28, 1.28)
    axes.axis("off")


def draw_bars(axes: Any, found: Mapping[str, Sequence[Result]]) -> None:
    """Mean accuracies over the seeds, and a dot a seed."""
    from hypersphere.drawing import colour  # noqa: PLC0415
    from hypersphere.plot.style import INK, MUTED  # noqa: PLC0415

    for place, (kind, results) in enumerate(found.items()):
        shade = (MUTED, colour(0))[place]
        for group, key in enumerate(("accuracy", "rare")):
            values = [100 * getattr(result, key) for result in results]
            mean, x = sum(values) / len(values), group + (place - 0.5) * 0.38
            axes.bar(x, mean, 0.36, color=shade, alpha=0.75, label=None if group else KINDS[kind])
            spread = [x + 0.26 * (index / max(1, len(values) - 1) - 0.5) for index in range(len(values))]
            axes.scatter(spread, values, s=9, color=INK, alpha=0.6, lw=0, zorder=3)
            inside = mean > 20  # percent: there is room in the bar, below the dots
            look = {"color": "white", "fontweight": "bold"} if inside else {"color": INK}
            axes.text(x, 12 if inside else mean + 4, f"{mean:.0f} %", ha="center", fontsize=9, **look)
    axes.set_xticks([0, 1], ["all classes", "class 0\n(5 training images)"])
    axes.set_ylim(0, 132)
    axes.set_yticks(range(0, 101, 25))
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("right answers on test images (%)")
    count = len(next(iter(found.values())))
    axes.set_title(f"(c) Means; a dot a network, {count} of each", loc="center")
    axes.legend(loc="upper center")


def main(arguments: Sequence[str] | None = None) -> dict[str, list[Result]]:
    """Train with and without the energy, as the command line says."""
    parser = argparse.ArgumentParser(description="Train on digits with a rare class, without and with MHE.")
    parser.add_argument("--seeds", type=int, default=24, help="number of networks (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of 128 images (default: %(default)s)")
    parser.add_argument("-o", dest="picture", type=Path, metavar="PICTURE", help="write the picture there")
    options = parser.parse_args(arguments)

    found = {kind: train(options.seeds, regularised=kind == "with", steps=options.steps) for kind in KINDS}
    print(f"{options.seeds} networks           all classes  class {RARE}  its angle to the nearest class")
    for kind, results in found.items():
        accuracy, rare, angle = (sum(result[i] for result in results) / len(results) for i in range(3))
        print(f"{KINDS[kind]:22} {accuracy:10.1%} {rare:8.1%}  {angle:.1f} degrees")
    if options.picture:
        draw(found, options.picture)
        print(f"picture: {options.picture}")
    return found


if __name__ == "__main__":
    main()
