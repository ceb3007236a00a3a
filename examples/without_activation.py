r"""Which layers are nonlinear by themselves: XOR without any activation function.

Two inputs, uniform between -1 and 1, belong to class 1 where their signs differ. A constant 1 is appended in place of
biases, and three layers of 64 units and a linear classifier are to tell the classes apart, with no activation anywhere.
The layers are ordinary ones or answer with a function of the angle alone.

    python examples/without_activation.py -o regions.png

* Ordinary layers are one linear map, and no linear map can do it.
* Layers of **cosines** cannot either. Each divides its input by one positive number, its norm, so that the whole stack
  is :math:`A x / \rho(x)` with one matrix A, and a positive factor does not move a boundary between two classes: it is
  a straight line. (In a convolution the factor differs from place to place, so there cosines are a little more than
  linear.)
* Layers **linear in the angle** or with its **sigmoid** are nonlinear in each unit, and learn it.

The picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hypersphere as hs

WIDTH, DEPTH, CLASSES = 64, 3, 2
STEPS, BATCH, LEARNING_RATE = 800, 128, 3e-3
POINTS = 2_000
"""Number of training points, and of test points."""

LAYERS: Mapping[str, Callable[[int, int], nn.Module]] = {
    "ordinary": lambda inputs, outputs: nn.Linear(inputs, outputs, bias=False),
    "cosine": hs.nn.create("sphere", "linear"),
    "linear": hs.nn.create("sphere", "linear", angular="linear"),
    "sigmoid(0.3)": hs.nn.create("sphere", "linear", angular="sigmoid", k=0.3),
}


def sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points ``(count, 3)``, the last coordinate 1, and whether the signs of the other two differ ``(count,)``."""
    points = torch.rand(count, 2, generator=generator) * 2 - 1
    return with_one(points), (points.prod(1) < 0).long()


def with_one(points: Tensor) -> Tensor:
    """Points ``(N, 2)`` with a 1 appended, ``(N, 3)``."""
    return F.pad(points, (0, 1), value=1.0)


def build(kind: str) -> nn.Sequential:
    """Three layers of this kind and a linear classifier."""
    sizes = (3, *[WIDTH] * DEPTH)
    layers = [LAYERS[kind](inputs, outputs) for inputs, outputs in itertools.pairwise(sizes)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES, bias=False))


def train(kind: str, seed: int, steps: int = STEPS) -> tuple[nn.Sequential, float]:
    """Train a network with layers of this kind; returns it with its share of right answers on new points."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    points, classes = sample(POINTS, generator)
    model = build(kind)
    optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for _ in range(steps):
        batch = torch.randint(POINTS, (BATCH,), generator=generator)
        optimiser.zero_grad()
        F.cross_entropy(model(points[batch]), classes[batch]).backward()
        optimiser.step()
    points, classes = sample(POINTS, generator)
    with torch.no_grad():
        return model, (model(points).argmax(1) == classes).float().mean().item()


def draw(found: Mapping[str, tuple[nn.Sequential, float]], path: Path) -> None:
    """Write a picture: for each kind of layer how sure the network is of which class, over the square."""
    from hypersphere.plot import save  # noqa: PLC0415  (only the picture needs matplotlib)
    from hypersphere.plot.operators import DIVERGING  # noqa: PLC0415
    from hypersphere.plot.style import INK, new_figure, styled  # noqa: PLC0415

    side = torch.linspace(-1, 1, 81)
    grid = torch.cartesian_prod(side, side)  # the first coordinate is that of the rows

    @styled
    def picture() -> None:
        figure = new_figure(9.6, 2.55)
        panels = figure.subplots(1, len(found), sharey=True)
        for axes, (kind, (model, accuracy)) in zip(panels, found.items(), strict=True):
            with torch.no_grad():
                sure = model(with_one(grid)).softmax(1)[:, 1].view(len(side), -1).T
            levels = torch.linspace(0, 1, 11).tolist()
            filled = axes.contourf(side.numpy(), side.numpy(), sure.numpy(), levels=levels, cmap=DIVERGING)
            axes.axhline(0, color=INK, lw=0.9, ls=(0, (3, 1.6)))
            axes.axvline(0, color=INK, lw=0.9, ls=(0, (3, 1.6)))
            axes.set_title(f"{kind}: {accuracy:.0%} right", loc="center")
            axes.set_aspect("equal")
            axes.set_xticks([-1, 0, 1])
            axes.set_yticks([-1, 0, 1])
            axes.grid(False)
        bar = figure.colorbar(filled, ax=panels, shrink=0.8, pad=0.01)
        bar.set_ticks([0, 0.5, 1])
        bar.set_label("probability of\n“signs differ”")
        save(figure, path)

    picture()


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the four networks as the command line says."""
    parser = argparse.ArgumentParser(description="Learn XOR with layers that have no activation function.")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of 128 points (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the points (default: %(default)s)")
    parser.add_argument("-o", dest="picture", type=Path, metavar="PICTURE", help="write the decision regions there")
    options = parser.parse_args(arguments)

    print("layers        accuracy")
    found = {}
    for kind in LAYERS:
        found[kind] = train(kind, options.seed, options.steps)
        print(f"{kind:12}  {found[kind][1]:8.3f}")
    if options.picture:
        draw(found, options.picture)
        print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
