r"""Deep networks without batch normalisation whose weights start at a wrong scale.

A deep plain network without normalisation trains only if its kernels start at the right size: a factor of 2 in each of
18 layers is a factor of 260,000 in the end. A layer that answers with the cosine does not see the size of its kernels,
and :func:`hypersphere.nn.project_weights` keeps it at 1, so that the size does not matter for the steps either.

    python examples/wrong_scale.py -o losses.png

Two setups on the digits of scikit-learn (8x8 pixels), without batch normalisation, Adam at 1e-3, batches of 64:

* **CNN-18**, kernels as He et al. draw them, times 0.5, 1 and 2. Cosine layers are projected at the start and after
  every step, so that their losses are the same at every scale, here those at the two wrong ones.
* **CNN-12**, all kernels drawn with standard deviation 0.01. Decoupled layers are projected at the start and every 50
  steps, and cosine layers also never.

What was seen with seeds 0, 1 and 2 on one thread (accuracy on the test images after 200 steps, in per cent; rounding
alone, as with two threads, moves the deep networks by several points):

* Ordinary CNN-18 at half the scale 44, 14, 48; at twice the scale 53, 30, 45, with first losses in the thousands.
  Cosine layers 94, 74, 91 at both.
* **At the right scale the ordinary network is as good**: 94, 90, 93 (seed 2 on two threads: 88, where the cosine layers
  had 94), with less than half the training loss.
  What cosine layers bring is that the scale does not matter, not a better network.
* Ordinary CNN-12: 10, 10, 10, no better than guessing. Cosine layers 98, 98, 98, the bounded operator tanh 99, 98, 98.
* Cosine layers that are **never projected**: 96, 10, 64. Their outputs do not depend on the size of the kernels either,
  but their gradients do, so it is the projection that makes them safe.

The ordinary networks recover a part with more steps, and digits are easy. The script takes about a minute on one core;
the picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hypersphere as hs
from hypersphere.data import Dataset, TensorSplit, load

Conv = Callable[..., nn.Module]

BATCH, LEARNING_RATE = 64, 1e-3
STEPS_18, STEPS_12 = 200, 200
SCALES, WRONG = (0.5, 1.0, 2.0), (0.5, 2.0)
SMALL = 0.01
SMOOTH = 10
"""Number of steps over which the drawn loss is averaged."""


@dataclass(frozen=True)
class Layers:
    """What a network is made of.

    Args:
        conv: Convolutions.
        linear: The hidden linear layer of CNN-18.
        project: Bring the kernels to norm 1 at the start and then every so many steps; 0 for never.
    """

    conv: Conv = nn.Conv2d
    linear: Conv = nn.Linear
    project: int = 0


def cnn18(layers: Layers, scale: float) -> nn.Sequential:
    """Three units of six 3x3 convolutions with 12, 24 and 32 filters, a layer of 64 and a classifier.

    The kernels have the standard deviation of He et al. times ``scale``.
    """
    parts: list[nn.Module] = []
    channels = 1
    for filters in (12, 24, 32):
        for _ in range(6):
            parts += [layers.conv(channels, filters, 3, padding=1, bias=False), nn.ReLU()]
            channels = filters
        parts.append(nn.MaxPool2d(2, ceil_mode=True))
    model = nn.Sequential(*parts, nn.Flatten(), layers.linear(32, 64, bias=False), nn.Linear(64, 10, bias=False))
    for part in model[:-1]:  # the classifier is no kernel
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.normal_(part.weight, std=scale * math.sqrt(2 / part.weight[0].numel()))
    return model


def cnn12(layers: Layers) -> nn.Sequential:
    """Two units of six 3x3 convolutions with 12 and 24 filters and a classifier; kernels of deviation 0.01."""
    parts: list[nn.Module] = []
    channels = 1
    for filters in (12, 24):
        for _ in range(6):
            parts += [layers.conv(channels, filters, 3, padding=1, bias=False), nn.ReLU()]
            channels = filters
        parts.append(nn.AvgPool2d(2))
    model = nn.Sequential(*parts, nn.Flatten(), nn.Linear(24 * 4, 10))
    for part in model:
        if isinstance(part, nn.Conv2d):
            nn.init.normal_(part.weight, std=SMALL)
    return model


@dataclass(frozen=True)
class Outcome:
    """How the training went.

    Args:
        losses: Loss of each step.
        accuracy: Share of right answers on the test images.
    """

    losses: list[float]
    accuracy: float


def pixels(split: TensorSplit) -> Tensor:
    """The images of a split as ``(N, 1, 8, 8)`` between 0 and 1."""
    return split.images.float() / 255


def train(data: Dataset, model: nn.Module, project: int, steps: int, seed: int) -> Outcome:
    """Train on the training images of ``data``, and test.

    Args:
        data: Images and labels.
        model: The network.
        project: Bring kernels to norm 1 at the start and then every so many steps; 0 for never.
        steps: Number of steps.
        seed: Seed of the batches.
    """
    assert isinstance(data.train, TensorSplit)
    assert isinstance(data.test, TensorSplit)
    images, labels = pixels(data.train), data.train.labels
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    if project:
        hs.nn.project_weights(model)
    losses = []
    for step in range(1, steps + 1):
        batch = torch.randint(len(images), (BATCH,), generator=generator)
        optimiser.zero_grad()
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimiser.step()
        if project and step % project == 0:
            hs.nn.project_weights(model)
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        right = model(pixels(data.test)).argmax(1) == data.test.labels
    return Outcome(losses, right.float().mean().item())


def by_scale(data: Dataset, steps: int, seed: int) -> dict[str, Outcome]:
    """CNN-18 of ordinary layers at each scale, and of cosine layers at the wrong ones."""
    cosine = Layers(hs.nn.create("sphere"), hs.nn.create("sphere", "linear"), project=1)
    found = {}
    for name, layers, scales in (("ordinary", Layers(), SCALES), ("cosine", cosine, WRONG)):
        for scale in scales:
            torch.manual_seed(seed)
            found[f"{name}, x {scale:g}"] = train(data, cnn18(layers, scale), layers.project, steps, seed)
    return found


def by_operator(data: Dataset, steps: int, seed: int) -> dict[str, Outcome]:
    """CNN-12 of small kernels: ordinary, and with bounded operators."""
    sphere, tanh = hs.nn.create("sphere"), hs.nn.create("tanh", mean_decay=0.99)
    kinds = {
        "ordinary": Layers(),
        "cosine, never projected": Layers(sphere),
        "cosine": Layers(sphere, project=50),
        "tanh": Layers(tanh, project=50),
    }
    found = {}
    for name, layers in kinds.items():
        torch.manual_seed(seed)
        found[name] = train(data, cnn12(layers), layers.project, steps, seed)
    return found


def draw(by_scale: Mapping[str, Outcome], by_operator: Mapping[str, Outcome], path: Path) -> None:
    """Write a picture: training losses of both setups, with the accuracies in the legends."""
    from hypersphere.drawing import colour  # noqa: PLC0415
    from hypersphere.plot import save  # noqa: PLC0415  (only the picture needs matplotlib)
    from hypersphere.plot.style import INK, MUTED, new_figure, styled  # noqa: PLC0415

    @styled
    def picture() -> None:
        figure = new_figure(9.6, 3.9)
        panels = figure.subplots(1, 2)
        titles = ("(a) CNN-18, He initialisation times a factor", "(b) CNN-12, kernels of deviation 0.01")
        for axes, title, found in zip(panels, titles, (by_scale, by_operator), strict=True):
            axes.axhline(math.log(10), color=MUTED, lw=0.9, ls=(0, (1, 1.5)))
            axes.text(
                1, math.log(10), "guessing", transform=axes.get_yaxis_transform(), ha="right", va="bottom", fontsize=8
            )
            for index, (name, outcome) in enumerate(found.items()):
                losses = torch.tensor(outcome.losses)
                window = min(SMOOTH, len(losses))
                means = losses.unfold(0, window, 1).mean(1).tolist()
                steps = range(window, len(losses) + 1)
                # Losses of the cosine networks are equal: the later ones leave gaps.
                hidden = sum(other.losses == outcome.losses for other in list(found.values())[:index])
                looks = {"color": (*map(colour, range(4)), INK)[index], "ls": (0, (3, 3 * hidden)) if hidden else "-"}
                axes.plot(steps, means, **looks, label=f"{name}: {outcome.accuracy:.0%}")
            axes.set_yscale("log")
            axes.set_xlim(left=1)
            axes.set_xlabel("step")
            axes.set_ylabel("training loss" if axes is panels[0] else "")
            axes.set_title(title)
        panels[1].set_yticks([2, 1, 0.5], ["2", "1", "0.5"])
        panels[1].yaxis.minorticks_off()
        panels[0].legend(title="test accuracy", alignment="left", loc="upper right")
        panels[1].legend(title="test accuracy", alignment="left", loc="lower left")
        save(figure, path)

    picture()


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description="Train deep networks whose weights start at a wrong scale.")
    parser.add_argument("--steps", type=int, help=f"training steps (default: {STEPS_18} and {STEPS_12})")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (default: %(default)s)")
    parser.add_argument("-o", dest="picture", type=Path, metavar="PICTURE", help="write the losses there")
    options = parser.parse_args(arguments)

    data = load("digits")
    deep = by_scale(data, options.steps or STEPS_18, options.seed)
    small = by_operator(data, options.steps or STEPS_12, options.seed)
    for title, found in (("CNN-18, He initialisation times a factor", deep), ("CNN-12, deviation 0.01", small)):
        print(f"{title:40}  last loss  accuracy")
        for name, outcome in found.items():
            last = outcome.losses[-SMOOTH:]
            print(f"  {name:38}  {sum(last) / len(last):9.3f}  {outcome.accuracy:8.3f}")
    if options.picture:
        draw(deep, small, options.picture)
        print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
