r"""Training that never changes the angle between two neurons: rotate them all together.

The neurons :math:`w_j` of each hidden layer are drawn as He et al. do and then stay as they are. What is learned is one
orthogonal matrix R for each layer, which uses :math:`R w_j`: all angles between the neurons of a layer, and with them
every hyperspherical energy, keep the value that chance gave them, which is close to the least one. The classifier and
batch normalisation are trained as always. ``hs.orthogonal.apply(model)`` is all that it takes; R comes from a free
matrix by Cayley's map and begins as the identity.

    python examples/rotation_training.py -o rotation.png

It is compared with ordinary training, and with matrices R that are random and stay so, on the digits of scikit-learn.

What was seen with seeds 0, 1 and 2 (300 steps of Adam at 1e-2, at 1e-3 for the rotations: Adam moves every entry of a
unconstrained matrix alike, and all of them add up to one rotation):

* The energy of the rotated layers stays as it was to the last digit shown. In ordinary training it moves, up or down,
  by less than 1 %: digits give it no reason to.
* Rotations learn nearly as well: 99.6, 98.7 and 99.3 per cent of the test images, ordinary training 99.4, 99.6 and
  99.6. With all images to train on there is little to gain; with 300 of them, and without normalisation, rotations are
  ahead (``tests/orthogonal/test_orthogonal_digits.py``).
* With random rotations, where only batch normalisation and the classifier learn, it is 96.1, 96.3 and 96.8, at a
  training loss 30 to 130 times as high. So it is the rotations that learn.
* The model is plain again after ``hs.orthogonal.merge(model)``, and recognises the same images.

The script takes about a minute on one core; the picture needs matplotlib.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hypersphere as hs
from hypersphere.data import Dataset, TensorSplit, load

STEPS, BATCH = 300, 64
LEARNING_RATE, ROTATION_RATE = 1e-2, 1e-3
FILTERS = (16, 16, 24, 24)
EVERY = 10
"""Steps between two measurements."""
SMOOTH = 10
"""Number of steps over which the loss is averaged."""


KINDS: Mapping[str, dict[str, Any] | None] = {
    "ordinary": None,
    "rotation learned": {"map": "cayley"},
    "rotation random": {"map": "gram_schmidt", "start": "normal"},
}
"""Arguments of :func:`hypersphere.orthogonal.apply`."""


def build(kind: str) -> nn.Sequential:
    """Four convolutions with batch normalisation, and a linear classifier, which is never turned."""
    parts: list[nn.Module] = []
    channels = 1
    for index, filters in enumerate(FILTERS):
        layer = nn.Conv2d(channels, filters, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        parts += [layer, nn.BatchNorm2d(filters), nn.ReLU()]
        parts += [nn.MaxPool2d(2)] if index % 2 else []
        channels = filters
    model = nn.Sequential(*parts, nn.Flatten(), nn.Linear(4 * channels, 10))
    options = KINDS[kind]
    return model if options is None else hs.orthogonal.apply(model, **options)


def energy(model: nn.Module) -> float:
    """Half-space energy of the kernels as they are used, summed over the hidden layers."""
    layers = [part for part in model.modules() if isinstance(part, nn.Conv2d)]
    with torch.no_grad():
        kernels = (layer.weight.flatten(1).double() for layer in layers)
        return sum(hs.energy.hyperspherical_energy(rows, half_space=True).item() for rows in kernels)


@dataclass(frozen=True)
class Outcome:
    """How a training went.

    Args:
        steps: When it was measured.
        energies: Energy of the hidden layers then.
        accuracies: Share of right answers on the test images then.
        losses: Loss of each step.
    """

    steps: list[int]
    energies: list[float]
    accuracies: list[float]
    losses: list[float]

    @property
    def loss(self) -> float:
        """Mean over the last steps."""
        last = self.losses[-SMOOTH:]
        return sum(last) / len(last)


def accuracy(model: nn.Module, split: TensorSplit) -> float:
    """Share of right answers on a split."""
    model.eval()
    with torch.no_grad():
        right = model(split.images.float() / 255).argmax(1) == split.labels
    model.train()
    return right.float().mean().item()


def train(data: Dataset, kind: str, steps: int, seed: int) -> tuple[nn.Sequential, Outcome]:
    """Train a network of layers of this kind."""
    assert isinstance(data.train, TensorSplit)
    assert isinstance(data.test, TensorSplit)
    torch.manual_seed(seed)
    model = build(kind)
    generator = torch.Generator().manual_seed(seed)
    rate = 0.0 if kind == "rotation random" else ROTATION_RATE
    optimiser = torch.optim.Adam(hs.parameter_groups(model, lr=LEARNING_RATE, rotation_lr=rate))
    outcome = Outcome([], [], [], [])
    for step in range(steps + 1):
        if step % EVERY == 0 or step == steps:
            outcome.steps.append(step)
            outcome.energies.append(energy(model))
            outcome.accuracies.append(accuracy(model, data.test))
        if step < steps:
            batch = torch.randint(len(data.train.labels), (BATCH,), generator=generator)
            optimiser.zero_grad()
            loss = F.cross_entropy(model(data.train.images[batch].float() / 255), data.train.labels[batch])
            loss.backward()
            optimiser.step()
            outcome.losses.append(loss.item())
    return model, outcome


def draw(found: Mapping[str, Outcome], path: Path) -> None:
    """Write a picture: energies, training losses and accuracies against the step."""
    from hypersphere.drawing import colour  # noqa: PLC0415
    from hypersphere.plot import save  # noqa: PLC0415  (only the picture needs matplotlib)
    from hypersphere.plot.style import new_figure, styled  # noqa: PLC0415

    @styled
    def picture() -> None:
        figure = new_figure(11.0, 3.6)
        panels = figure.subplots(1, 3)
        for index, (kind, outcome) in enumerate(found.items()):
            look = {"color": colour(index), "ls": ("-", "-", (0, (4, 1.5)))[index]}
            window = min(SMOOTH, len(outcome.losses))
            losses = torch.tensor(outcome.losses).unfold(0, window, 1).mean(1).tolist()
            panels[0].plot(outcome.steps, outcome.energies, **look, label=kind)
            panels[1].plot(range(window, len(outcome.losses) + 1), losses, **look)
            panels[2].plot(outcome.steps, [100 * value for value in outcome.accuracies], **look)
        titles = ("(a) Half-space energy, sum over layers", "(b) Training loss", "(c) Test accuracy in per cent")
        for axes, title in zip(panels, titles, strict=True):
            axes.set_title(title)
            axes.set_xlabel("step")
        panels[1].set_yscale("log")
        panels[2].set_ylim(80, 100.6)  # from where the curves part
        panels[2].set_yticks(range(80, 101, 5))
        panels[0].legend()
        save(figure, path)

    picture()


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description="Train networks that only rotate their neurons.")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (default: %(default)s)")
    parser.add_argument("-o", dest="picture", type=Path, metavar="PICTURE", help="write the curves there")
    options = parser.parse_args(arguments)

    data = load("digits")
    assert isinstance(data.test, TensorSplit)
    trained = {kind: train(data, kind, options.steps, options.seed) for kind in KINDS}
    found = {kind: outcome for kind, (_, outcome) in trained.items()}
    print("layers          energy:   start     end   last loss   accuracy")
    for kind, outcome in found.items():
        energies = f"{outcome.energies[0]:7.4f} {outcome.energies[-1]:7.4f}"
        print(f"{kind:22}  {energies}{outcome.loss:12.4f}{outcome.accuracies[-1]:11.3f}")
    model = trained["rotation learned"][0]
    print(f"\nlearned rotations\n{hs.orthogonal.check(model)}")
    print(f"as a plain model: accuracy {accuracy(hs.orthogonal.merge(model), data.test):.3f}")
    if options.picture:
        draw(found, options.picture)
        print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
