r"""Which projections spread neurons: hyperspherical energy in few dimensions.

64 neurons in 288 dimensions start around one direction and descend on an energy alone, without data. What is compared
is the half-space energy itself and seven compressive ones, which see the neurons through projections to 30 dimensions.
All are judged by the energy **without** projection, whose least value is 0.498, reached by orthogonal neurons.

    python examples/compressive_energy.py -o energies.png

What was seen with seed 0 (500 steps at rate 0.1, from an energy of 2.784; seed 1 gives the same order):

* Fresh random projections in every step do as well as the energy itself (0.525 and 0.529): in the mean their gradient
  is 30/27 times its gradient.
* The **same five projections** in every step leave 0.817, a single one 1.585. Neurons are spread only within the few
  dimensions that the projections see.
* Groups of coordinates and a projection that keeps the angles come close to the energy itself (0.530 and 0.539).
* An **adversarial** projection, which climbs ten steps before each step of the neurons, leaves 0.660. What helps is
  that it moves: with one step instead of ten the neurons end at 1.46, little better than with a fixed projection.
* A projection that is **learned by the same loss** as the neurons (naive) makes its own energy fall to 0.510, as if all
  were solved, while the neurons are still at 1.68.

At ten times the rate the noise of the projections is what is left, and it falls with their number: 0.4990 without
projection, 0.5001 with five of them, 0.5056 with one. So random projections do not minimise this energy better than the
energy itself. Whether their noise is good for training is a matter of data.

The script takes about a minute on one core; the picture needs matplotlib.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import hypersphere as hs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEURONS, INPUTS, DIM = 64, 288, 30
NOISE = 0.3
"""Deviation of the neurons from their common direction, whose coordinates have deviation 1."""
STEPS, RATE = 500, 0.1
FAST = 1.0
"""The rate at which the noise of projections is seen."""
EVERY = 10
"""Steps between two measurements."""

METHODS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "half-space energy": ("mhe", {"half_space": True}),
    "RP, fresh": ("rp-comhe", {"dim": DIM, "count": 5}),
    "RP, five fixed": ("rp-comhe", {"dim": DIM, "count": 5, "redraw_every": None}),
    "RP, one fixed": ("rp-comhe", {"dim": DIM, "count": 1, "redraw_every": None}),
    "AP": ("ap-comhe", {"dim": DIM}),
    "groups": ("group-comhe", {"group_channels": 72}),
    "adversarial": ("adv-comhe", {"dim": DIM}),
    "naive": ("naive-comhe", {"dim": DIM}),
}
NOISY: Mapping[str, tuple[str, dict[str, Any]]] = {
    "half-space energy": METHODS["half-space energy"],
    "RP, 5 fresh": METHODS["RP, fresh"],
    "RP, 1 fresh": ("rp-comhe", {"dim": DIM, "count": 1}),
}


def neurons(seed: int) -> Tensor:
    """Neurons ``(64, 288)`` of lengths near 1 around one direction."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(1, INPUTS, generator=generator)
    return (common + NOISE * torch.randn(NEURONS, INPUTS, generator=generator)) / INPUTS**0.5


def energy(weights: Tensor) -> float:
    """Half-space energy of the neurons as they are."""
    return hs.energy.hyperspherical_energy(weights.detach(), half_space=True).item()


@dataclass(frozen=True)
class Descent:
    """What a descent looked like.

    Args:
        steps: When it was measured.
        energies: Energy without projection then.
        seen: What was descended on then.
    """

    steps: list[int]
    energies: list[float]
    seen: list[float]


def descend(name: str, options: Mapping[str, Any], *, seed: int, steps: int, rate: float = RATE) -> Descent:
    """Gradient descent of the neurons on an energy of this name."""
    weights = neurons(seed).requires_grad_()
    regulariser = hs.energy.create(name, **options)
    regulariser.prepare(weights)
    found = Descent([], [], [])
    optimiser = torch.optim.SGD([weights, *regulariser.parameters()], lr=rate)
    for step in range(steps + 1):
        regulariser.advance(step, seed, rate)
        optimiser.zero_grad()
        value = regulariser(weights)
        if step % EVERY == 0 or step == steps:
            found.steps.append(step)
            found.energies.append(energy(weights))
            found.seen.append(value.item())
        value.backward()
        optimiser.step()
    return found


def run(
    methods: Mapping[str, tuple[str, dict[str, Any]]], *, seed: int, steps: int, rate: float = RATE
) -> dict[str, Descent]:
    """The descents of several methods."""
    return {
        title: descend(name, options, seed=seed, steps=steps, rate=rate) for title, (name, options) in methods.items()
    }


def least() -> float:
    """Energy of orthogonal neurons."""
    return hs.energy.hyperspherical_energy(torch.eye(INPUTS)[:NEURONS], half_space=True).item()


def draw(found: Mapping[str, Descent], noisy: Mapping[str, Descent], path: Path) -> None:
    """Write a picture: energies above the least one against the step, and what the naive projection sees."""
    from hypersphere.drawing import colour  # noqa: PLC0415
    from hypersphere.plot import save  # noqa: PLC0415  (only the picture needs matplotlib)
    from hypersphere.plot.style import INK, new_figure, styled  # noqa: PLC0415

    def curve(axes: Axes, index: int, descent: Descent, values: Sequence[float], label: str, **look: Any) -> None:
        looks = {"color": INK, "ls": (0, (4, 1.5)), "zorder": 3} if index == 0 else {"color": colour(index - 1)}
        axes.plot(descent.steps, [value - least() for value in values], **(looks | look), label=label)

    @styled
    def picture() -> None:
        figure = new_figure(10.4, 4.2)
        left, right = figure.subplots(1, 2)
        for index, (title, descent) in enumerate(found.items()):
            curve(left, index, descent, descent.energies, f"{title}: {descent.energies[-1]:.3f}")
        naive = found["naive"]
        label = f"naive, as it sees it: {naive.seen[-1]:.3f}"
        curve(left, len(found) - 1, naive, naive.seen, label, ls=(0, (1, 1.2)))
        for index, (title, descent) in enumerate(noisy.items()):
            curve(right, index, descent, descent.energies, f"{title}: {descent.energies[-1]:.4f}")
        left.set_title(f"(a) Descent at rate {RATE:g}")
        right.set_title(f"(b) Noise at rate {FAST:g}")
        left.set_ylabel("energy without projection, above the least")
        for axes, columns in ((left, 2), (right, 1)):
            axes.set_yscale("log")
            axes.set_xlabel("step")
            axes.legend(title="energy at the end", alignment="left", ncols=columns, loc="upper right")
        left.set_ylim(0.008, 60)
        save(figure, path)

    picture()


def main(arguments: Sequence[str] | None = None) -> None:
    """Descend and print as the command line says."""
    parser = argparse.ArgumentParser(description="Spread neurons by compressive energies.")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of descent (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of neurons and projections (default: %(default)s)")
    parser.add_argument("-o", dest="picture", type=Path, metavar="PICTURE", help="write the curves there")
    options = parser.parse_args(arguments)

    found = run(METHODS, seed=options.seed, steps=options.steps)
    noisy = run(NOISY, seed=options.seed, steps=options.steps, rate=FAST)
    for rate, descents in ((RATE, found), (FAST, noisy)):
        print(f"rate {rate:g}{'':16}energy: start     end   as descended on")
        for title, descent in descents.items():
            print(f"  {title:26}{descent.energies[0]:8.4f}{descent.energies[-1]:8.4f}{descent.seen[-1]:18.4f}")
    print(f"orthogonal neurons: {least():.4f}")
    if options.picture:
        draw(found, noisy, options.picture)
        print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
