"""Pictures of recognition by features: who is it (CMC), and are these two the same (ROC)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from hypersphere.drawing import Floats, balanced_subset, colour
from hypersphere.errors import check_choice, check_range
from hypersphere.metrics import identify, pair_scores, roc
from hypersphere.metrics.basic import crossing_rate
from hypersphere.plot.evaluated import Evaluated, evaluated
from hypersphere.plot.style import new_figure, styled
from hypersphere.runs import RunError
from hypersphere.runs.read import Features

SPLITS = ("auto", "unseen", "test")
MAX_RANK = 100
RATES = 400
"""Points of a ROC curve, evenly on the logarithmic axis."""
FEWEST = 10
"""False accepts at the left end of a ROC curve: with fewer a rate is chance."""
MARKED = 25
"""Most ranks that are marked."""


@dataclass(frozen=True)
class Curves:
    """What recognition curves draw of one run.

    Attributes:
        cmc: Share of probes whose mate is among the r best, for r = 1, 2, ...: ``(K,)``.
        far: False accept rates, rising: ``(T,)``.
        tar: True accept rates at the lowest threshold with at most that false accept rate: ``(T,)``.
        eer: Equal-error rate.
        probes: Number of probes.
        size: Number of entries of the gallery.
        pairs: Number of pairs.
    """

    cmc: Floats
    far: Floats
    tar: Floats
    eer: float
    probes: int
    size: int
    pairs: int


def recognition_curves(features: Tensor, labels: Tensor, *, gallery: int = 1, samples: int = 4000) -> Curves:
    r"""CMC and ROC of features by their cosines, with the metrics of :mod:`hypersphere.metrics`.

    The first samples of every class are enrolled, and the others are probes that are looked for among them. Pairs are
    those of all samples, or of an even share of each class where these are too many.

    Args:
        features: ``(N, D)``.
        labels: ``(N,)``.
        gallery: How many samples of each class are enrolled.
        samples: Most samples of which all pairs are compared.

    Example:
        >>> found = recognition_curves(torch.eye(3).repeat(2, 1), torch.arange(3).repeat(2))
        >>> found.cmc, found.probes, found.eer
        (array([1., 1., 1.]), 3, 0.0)
    """
    check_range("gallery", gallery, 1)
    check_range("samples", samples, 2)
    order = labels.argsort(stable=True)
    _, counts = labels.unique(return_counts=True)
    place = torch.arange(len(labels)) - (counts.cumsum(0) - counts).repeat_interleave(counts)  # within the class
    enrolled, probes = order[place < gallery], order[place >= gallery]
    depth = min(len(enrolled), MAX_RANK)
    found = identify(features[probes], labels[probes], features[enrolled], labels[enrolled], ranks=(depth,))
    chosen = torch.from_numpy(balanced_subset(labels.numpy(), samples))
    scores, same = pair_scores(features[chosen], labels[chosen])
    curve = roc(scores, same)
    impostors = int((~same).count_nonzero())
    least = min(1.0, FEWEST / impostors)
    far = torch.logspace(math.log10(least), 0, RATES, dtype=torch.float64).clamp(max=1)
    reached = torch.searchsorted(curve.far, far * (1 + 1e-12), right=True) - 1  # no straight lines between thresholds
    return Curves(
        found.cmc.numpy(),
        far.numpy(),
        curve.tar[reached].numpy(),
        float(crossing_rate(curve.far, curve.tar)),
        len(probes),
        len(enrolled),
        len(scores),
    )


@styled
def recognition(runs: Sequence[Path], *, split: str = "auto", gallery: int = 1, samples: int = 4000) -> Figure:
    """CMC and ROC curves of runs: how often the right class is among the best, and the false accepts it takes.

    A CMC curve has the share of probes whose class is among the r best of a gallery; a ROC curve, over a logarithmic
    axis, the share of pairs of one class that are accepted where so many pairs of two classes are. It begins where 10
    of these are accepted.

    Args:
        runs: Folders of evaluated training runs, a line each.
        split: ``"unseen"`` classes, the ``"test"`` split, or ``"auto"``: unseen ones where all runs have them.
        gallery: How many samples of each class are enrolled; the others are probes.
        samples: Most samples of which all pairs are compared, evenly from the classes.
    """
    check_choice("split", split, SPLITS)
    found = evaluated(runs, limit=40)
    if split == "auto":
        split = "unseen" if all(one.run.unseen is not None for one in found) else "test"
    curves = [_curves(one, split, gallery, samples) for one in found]
    figure = new_figure(9.2, 3.9)
    left, right = figure.subplots(1, 2)
    for index, (one, curve) in enumerate(zip(found, curves, strict=True)):
        ranks = np.arange(1, len(curve.cmc) + 1)
        marker = "o" if len(ranks) <= MARKED else None
        first = f"{one.title}: rank 1 {100 * curve.cmc[0]:.2f} %"
        left.plot(ranks, 100 * curve.cmc, color=colour(index), marker=marker, markersize=3, label=first)
        error = f"{one.title}: EER {100 * curve.eer:.2f} %"
        right.plot(curve.far, 100 * curve.tar, color=colour(index), label=error, drawstyle="steps-post")
    deepest = max(len(curve.cmc) for curve in curves)
    if deepest > MARKED:
        left.set_xscale("log")
        left.xaxis.set_major_formatter("{x:g}")
    else:
        left.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_xscale("log")
    left.set_xlabel("rank")
    left.set_ylabel("right class among the best (%)")
    right.set_xlabel("false accept rate")
    right.set_ylabel("true accept rate (%)")
    which = "unseen classes" if split == "unseen" else "test split"
    left.set_title(f"(a) CMC, {which}: {_numbers([(c.probes, c.size) for c in curves], 'probes in a gallery of')}")
    right.set_title(f"(b) ROC: {_numbers([(c.pairs,) for c in curves], 'pairs')}")
    for axes in (left, right):
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -1.0), min(high, 101.0))
        axes.legend(loc="best", frameon=True, framealpha=0.85, edgecolor="none")
    return figure


def _numbers(values: Sequence[tuple[int, ...]], words: str) -> str:
    """Numbers with words between them, or, where runs differ in them, the words alone."""
    if len(set(values)) > 1:
        return f"different numbers of {words.split(maxsplit=1)[0]}"
    first, *rest = (f"{value:,}" for value in values[0])
    return " ".join([first, words, *rest])


def _curves(one: Evaluated, split: str, gallery: int, samples: int) -> Curves:
    features = _of_split(one, split)
    sizes = np.unique(features.labels, return_counts=True)[1]
    if len(sizes) < 2 or sizes.max() <= gallery:
        raise RunError(
            f"{one.folder} has {len(sizes)} classes of at most {sizes.max()} features in this split: recognition needs "
            f"2 classes, and one of more than the {gallery} that are enrolled"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rates that rest on few pairs, where the curve ends
        vectors = torch.from_numpy(features.vectors).float()  # what was measured has no more digits
        return recognition_curves(vectors, torch.from_numpy(features.labels), gallery=gallery, samples=samples)


def _of_split(one: Evaluated, split: str) -> Features:
    if split == "test":
        return one.test
    if one.run.unseen is None:
        raise RunError(f"{one.folder} has no unseen classes: train it with data.hold_out, or draw split=test")
    return one.run.unseen
