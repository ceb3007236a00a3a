"""Orthogonal training of a small network on 300 digits: it beats ordinary training, and nothing less will do.

Eight networks, one a seed, each with a split, a start and batches of its own, are trained side by side: as the groups
of 1x1 convolutions, whose positions are the images.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hypersphere as hs
from hypersphere.data import load

SEEDS, IMAGES, STEPS, BATCH = 8, 300, 1000, 100
SIZES = ((64, 128), (128, 128), (128, 10))


@dataclass(frozen=True)
class Start:
    """Of all seeds: images ``(8, n, 64)`` and labels, weights ``(8, out, in)``, and the images of each batch."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    weights: list[Tensor]
    batches: Tensor


@functools.cache
def start(mean: float = 0.0) -> Start:
    """Kaiming-normal weights, those of hidden layers with this mean in standard deviations."""
    data = load("digits")
    images = torch.cat([data.train.images, data.test.images]).flatten(1).float() / 255
    labels = torch.cat([data.train.labels, data.test.labels])
    order, batches, weights = [], [], [[] for _ in SIZES]
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        order.append(torch.randperm(len(labels), generator=generator))
        for layer, (inputs, outputs) in enumerate(SIZES):
            drawn = torch.randn(outputs, inputs, generator=generator) + mean * (layer < 2)
            weights[layer].append(drawn * (2 / inputs) ** 0.5)
        batches.append(torch.randint(IMAGES, (STEPS, BATCH), generator=generator))
    places = torch.stack(order)
    (train, test) = places[:, :IMAGES], places[:, IMAGES:]
    stacked = [torch.stack(layer) for layer in weights]
    return Start(images[train], labels[train], images[test], labels[test], stacked, torch.stack(batches))


class Layers(nn.Conv1d):
    """One linear layer for each seed, as a 1x1 convolution in groups; batched products are faster than that."""

    def forward(self, input: Tensor) -> Tensor:
        """``(1, 8 in, n) -> (1, 8 out, n)``."""
        weight, bias = (p.unflatten(0, (SEEDS, -1)) for p in (self.weight.squeeze(2), self.bias))
        return torch.baddbmm(bias.unsqueeze(2), weight, input.view(SEEDS, -1, input.shape[2])).flatten(0, 1)[None]


class Networks(nn.Sequential):
    """Eight networks 64-128-128-10."""

    def __init__(self, begin: Start):
        layers = [Layers(SEEDS * i, SEEDS * o, 1, groups=SEEDS) for i, o in SIZES]
        super().__init__(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
        with torch.no_grad():
            for layer, weights in zip(layers, begin.weights, strict=True):
                layer.weight.copy_(weights.flatten(0, 1).unsqueeze(2))
                layer.bias.zero_()

    def scores(self, images: Tensor) -> Tensor:
        """``(8, n, 64) -> (8, 10, n)``."""
        return self(images.mT.flatten(0, 1).unsqueeze(0)).view(SEEDS, 10, -1)

    def neurons(self) -> list[Tensor]:
        """Those of the hidden layers, ``(8, n, d)`` in float64."""
        return [self[at].weight.detach().double().unflatten(0, (SEEDS, -1)).squeeze(3) for at in (0, 2)]


@dataclass(frozen=True)
class Outcome:
    """Errors in per cent, ``(8,)``, the trained networks, and relative changes of energies, the largest of any seed."""

    errors: Tensor
    networks: Networks
    change: float
    half_space_change: float

    @property
    def error(self) -> float:
        return self.errors.mean().item()


def energies(networks: Networks, s: float, half_space: bool) -> Tensor:
    return torch.stack([hs.energy.hyperspherical_energy(v, s, half_space=half_space) for v in networks.neurons()])


@functools.cache
def trained(
    name: str,
    *,
    lr: float = 0.1,
    every: int = 0,
    penalty: float = 0.0,
    mean: float = 0.0,
    steps: int = STEPS,
    **options,
) -> Outcome:
    """SGD with momentum 0.9 at 0.01, at ``lr`` for rotations; ``name`` is that of a map, or ordinary, or fixed."""
    begin = start(mean)
    networks = Networks(begin)
    if name in ("ordinary", "fixed"):
        for at in (0, 2):
            networks[at].weight.requires_grad_(name == "ordinary")
        groups = [{"params": [p for p in networks.parameters() if p.requires_grad], "lr": 0.01}]
    else:
        hs.orthogonal.apply(networks, name, exclude="4", seed=0, **options)
        groups = hs.parameter_groups(networks, lr=0.01, rotation_lr=lr)
    kind = hs.optim.OGD if name == "direct" else torch.optim.SGD
    optimiser = kind(groups, momentum=0.9)
    resample = hs.orthogonal.Resampling(networks, every, optimiser) if every else lambda: None
    kinds = ((1.0, False), (2.0, True))
    before = [energies(networks, *kind) for kind in kinds]
    changes = [0.0, 0.0]
    seeds = torch.arange(SEEDS).unsqueeze(1)
    for step in range(steps):
        batch = begin.batches[:, step]
        optimiser.zero_grad()
        # A sum over the networks, so that each goes its own way.
        loss = SEEDS * F.cross_entropy(networks.scores(begin.images[seeds, batch]), begin.labels[seeds, batch])
        if penalty:
            loss = loss + penalty * hs.orthogonal.penalty(networks)
        loss.backward()
        optimiser.step()
        resample()
        if step % 100 == 99:
            for place, (kind, old) in enumerate(zip(kinds, before, strict=True)):
                change = ((energies(networks, *kind) - old) / old).abs().max().item()
                changes[place] = max(changes[place], change)
    return Outcome(errors(networks, begin), networks, *changes)


@torch.no_grad()
def errors(networks: Networks, begin: Start) -> Tensor:
    return 100 * (networks.scores(begin.test_images).argmax(1) != begin.test_labels).float().mean(1)


def opt() -> Outcome:
    return trained("cayley", method="newton", refinements=2)  # products alone, and few of them


def test_rotations_beat_ordinary_training_free_matrices_do_not_and_random_neurons_are_worst():
    ordinary, unconstrained, fixed = (trained(name) for name in ("ordinary", "unconstrained", "fixed"))
    assert opt().error < ordinary.error - 1.0
    assert opt().error < unconstrained.error - 0.8
    assert unconstrained.error > ordinary.error - 0.4
    assert fixed.error > max(ordinary.error, unconstrained.error) + 2.0
    # On every split, whose difficulty all methods share, rotations are ahead of ordinary training.
    assert (opt().errors < ordinary.errors).sum() >= 7


def test_energies_stay_under_rotations_alone():
    assert opt().change < 1e-5
    assert opt().half_space_change < 1e-5
    report = hs.orthogonal.check(opt().networks)
    assert report.error < 1e-5
    assert report.gram < 1e-5
    assert min(row.moved for row in report.rows) > 0.1
    assert trained("unconstrained").half_space_change > 0.01
    assert trained("ordinary").change > 1e-4


def test_networks_side_by_side_are_networks_of_their_own():
    """The first of them, trained alone as linear layers, in the same steps."""
    begin, steps = start(), 25
    for name in ("cayley", "gram_schmidt", "unconstrained"):
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
        with torch.no_grad():
            for layer, weights in zip(model[::2], begin.weights, strict=True):
                layer.weight.copy_(weights[3])
                layer.bias.zero_()
        hs.orthogonal.apply(model, name)
        optimiser = torch.optim.SGD(hs.parameter_groups(model, lr=0.01, rotation_lr=0.1), momentum=0.9)
        for step in range(steps):
            batch = begin.batches[3, step]
            optimiser.zero_grad()
            F.cross_entropy(model(begin.images[3, batch]), begin.labels[3, batch]).backward()
            optimiser.step()
        together = trained(name, steps=steps).networks
        for at, found in zip((0, 2), together.neurons(), strict=True):
            assert (model[at].weight - begin.weights[at // 2][3]).norm() > 0.1
            torch.testing.assert_close(model[at].weight.detach().double(), found[3], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "margin"),
    [
        ("gram_schmidt", {}, 0.5),
        ("direct", {}, 0.5),
        ("cayley", {"sample": 0.25, "every": 20}, 0.5),
        ("unconstrained", {"penalty": 0.1}, 0.2),
    ],
)
def test_every_form_beats_ordinary_training(name, options, margin):
    found = trained(name, **options)
    assert found.error < trained("ordinary").error - margin
    assert found.change < {"direct": 1e-3, "unconstrained": 1e-2}.get(name, 1e-5)


@pytest.mark.slow
def test_learned_neurons_gain_nothing():
    learned = trained("cayley", method="newton", refinements=2, learn_neurons=True)
    assert learned.error > opt().error - 0.3
    assert learned.change > 1e-4


@pytest.mark.slow
def test_fewer_coordinates_at_a_time_learn_less():
    found = [trained("cayley", sample=share, every=20).error for share in (0.25, 1 / 16)]
    assert opt().error - 0.3 < found[0] < found[1] < trained("fixed").error


@pytest.mark.slow
def test_smaller_blocks_learn_less_and_shared_ones_less_still():
    own = [trained("cayley", blocks=k).error for k in (2, 8)]
    shared = [trained("cayley", blocks=k, share_blocks=True).error for k in (2, 8)]
    assert opt().error - 0.3 < own[0] < own[1] < shared[1] < trained("fixed").error + 1
    assert own[0] < shared[0]


@pytest.mark.slow
def test_crowded_neurons_learn_less_or_nothing():
    """A mean of entries brings directions together, and rotations cannot part them."""
    crowded = trained("cayley", method="newton", refinements=2, mean=0.3)
    assert crowded.error > opt().error + 0.1
    assert crowded.error < trained("ordinary", mean=0.3).error - 0.5
    assert trained("cayley", method="newton", refinements=2, mean=1.0).error > 80
