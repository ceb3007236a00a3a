r"""Few-shot classification: a new classifier for each of many episodes, on features that stay as they are.

An episode has N new classes ("ways") with K labelled samples each ("shots", its support) and Q samples each to classify
(its queries). All episodes are tensors with the episode as first axis, and their classifiers are trained side by side.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.geometry import full_precision

Classifier = Literal["baseline", "baseline++", "nearest"]
CLASSIFIERS: tuple[Classifier, ...] = ("baseline", "baseline++", "nearest")

CHUNK = 600
"""Most episodes whose features are in memory at a time."""


class Episodes(NamedTuple):
    """Episodes as places in a list of samples.

    Attributes:
        classes: ``(E, N)`` the label of each way.
        support: ``(E, N, K)`` places of the support samples.
        query: ``(E, N, Q)`` places of the queries.
    """

    classes: Tensor
    support: Tensor
    query: Tensor


def sample_episodes(
    labels: Tensor, *, ways: int = 5, shots: int = 5, queries: int = 15, episodes: int = 600, seed: int = 0
) -> Episodes:
    """Draw episodes: classes without replacement, and samples of each without replacement.

    What is drawn is a function of the labels, the number of episodes and the seed. Fewer shots leave the first ones of
    each class, with the same queries, so that accuracies by shots are of the same episodes.

    Args:
        labels: ``(M,)`` class of each sample.
        ways: Classes N of an episode.
        shots: Support samples K of each class.
        queries: Queries Q of each class.
        episodes: Number E of episodes.
        seed: The same seed gives the same episodes.

    Example:
        >>> drawn = sample_episodes(torch.arange(6).repeat(20), ways=3, shots=1, queries=4, episodes=10)
        >>> drawn.classes.shape, drawn.support.shape, drawn.query.shape
        (torch.Size([10, 3]), torch.Size([10, 3, 1]), torch.Size([10, 3, 4]))
    """
    for name, value in (("ways", ways), ("shots", shots), ("queries", queries), ("episodes", episodes)):
        check_range(name, value, 1)
    names, place, counts = labels.cpu().unique(return_inverse=True, return_counts=True)
    if ways > len(names):
        raise ArgumentError("ways", f"must be at most the {len(names)} classes that there are, got {ways}")
    if shots + queries > int(counts.min()):
        least = int(counts.argmin())
        raise ArgumentError(
            "queries",
            f"and shots must be at most the {counts[least]} samples of the smallest class (label {names[least]}), "
            f"got {queries} and {shots}",
        )
    generator = torch.Generator().manual_seed(seed)
    by_class = place.argsort(stable=True)
    first = counts.cumsum(0) - counts
    absent = torch.arange(int(counts.max())) >= counts[:, None]
    parts = []
    for start in range(0, episodes, CHUNK):
        size = min(CHUNK, episodes - start)
        # In the order of random numbers, the first ones are a sample without replacement, whatever follows them.
        chosen = torch.rand(size, len(names), generator=generator).argsort(1)[:, :ways]
        draws = torch.rand(size, ways, absent.shape[1], generator=generator).masked_fill_(absent[chosen], math.inf)
        members = draws.topk(queries + shots, largest=False, sorted=True).indices
        parts.append((names[chosen], by_class[first[chosen].unsqueeze(2) + members]))
    classes, samples = (torch.cat(each).to(labels.device) for each in zip(*parts, strict=True))
    return Episodes(classes, samples[:, :, queries:], samples[:, :, :queries])


class EpisodeClassifiers(nn.Module):
    r"""Linear classifiers of many episodes side by side.

    The scores of a feature :math:`x` are :math:`w_i \cdot x + b_i`, or with a scale :math:`c` those of a cosine
    classifier, :math:`c \cos(w_i, x)`. The first weights are those of :class:`torch.nn.Linear`.

    Args:
        episodes: Number E of episodes.
        ways: Classes N of an episode.
        dim: Feature dimension D.
        scale: Scale c of a cosine classifier; ``None``: scores are inner products, with a bias.
        learn_norms: Multiply the cosines by a learned number for each class, which begins as the norm of its weights.
        generator: Source of the first weights.
        dtype: Type of the weights.

    Shape:
        ``(E, B, D) -> (E, B, N)``.

    Example:
        >>> classifiers = EpisodeClassifiers(10, 5, 64, scale=2.0)
        >>> classifiers(torch.randn(10, 75, 64)).shape
        torch.Size([10, 75, 5])
    """

    def __init__(
        self,
        episodes: int,
        ways: int,
        dim: int,
        *,
        scale: float | None = None,
        learn_norms: bool = False,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if scale is not None:
            check_range("scale", scale, 0, open_low=True)

        def draw(*shape: int) -> nn.Parameter:
            uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
            return nn.Parameter(((2 * uniform - 1) / math.sqrt(dim)).to(dtype))

        self.scale = scale
        self.weight = draw(episodes, ways, dim)
        self.bias = draw(episodes, ways) if scale is None else None
        learned = scale is not None and learn_norms
        self.norms = nn.Parameter(self.weight.detach().norm(dim=2)) if learned else None

    def forward(self, features: Tensor) -> Tensor:
        """Scores ``(E, B, N)`` of features ``(E, B, D)``."""
        if self.scale is None:
            scores = features @ self.weight.mT
            return scores if self.bias is None else scores + self.bias.unsqueeze(1)
        scores = self.scale * (F.normalize(features, dim=2) @ F.normalize(self.weight, dim=2).mT)
        return scores if self.norms is None else scores * self.norms.unsqueeze(1)

    def fit(
        self,
        support: Tensor,
        orders: Tensor,
        *,
        batch_size: int = 4,
        lr: float = 0.01,
        momentum: float = 0.9,
        dampening: float = 0.9,
        weight_decay: float = 1e-3,
    ) -> None:
        """Train every episode's classifier on its support by softmax cross-entropy and SGD, all at once.

        Args:
            support: ``(E, N, K, D)`` features.
            orders: ``(E, epochs, N * K)`` the order in which each episode sees its support, an epoch a row.
            batch_size: Samples a step; the last step of an epoch takes what is left.
            lr: Learning rate.
            momentum: Momentum.
            dampening: Dampening of the momentum.
            weight_decay: Weight decay.
        """
        count, ways, shots, _ = support.shape
        flat = support.detach().flatten(1, 2)
        labels = torch.arange(ways, device=support.device).repeat_interleave(shots)
        episode = torch.arange(count, device=support.device).unsqueeze(1)
        # One optimiser for all: what it does to a number depends on that number alone.
        optimiser = torch.optim.SGD(
            self.parameters(), lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay
        )
        with torch.enable_grad():
            for order in orders.unbind(1):
                samples, targets = flat[episode, order], labels[order]
                for x, y in zip(samples.split(batch_size, 1), targets.split(batch_size, 1), strict=True):
                    # The mean over a batch, but the sum over episodes: none feels how many others there are.
                    loss = F.cross_entropy(self(x).flatten(0, 1), y.flatten(), reduction="sum") / y.shape[1]
                    optimiser.zero_grad()
                    loss.backward()
                    optimiser.step()


def classify(
    support: Tensor,
    query: Tensor,
    classifier: Classifier = "baseline",
    *,
    scale: float = 2.0,
    learn_norms: bool = False,
    epochs: int = 100,
    batch_size: int = 4,
    lr: float = 0.01,
    weight_decay: float = 1e-3,
    seed: int = 0,
) -> Tensor:
    r"""Classify the queries of episodes by their support.

    ``"baseline"`` trains a linear softmax classifier, ``"baseline++"`` one of cosines times ``scale``, both by SGD with
    momentum 0.9 and dampening 0.9 as published; ``"nearest"`` takes the class whose mean of unit features has the
    smallest angle, and trains nothing. Features of less than single precision are taken in single precision.

    Args:
        support: ``(E, N, K, D)`` features.
        query: ``(E, N, Q, D)`` features.
        classifier: Which one.
        scale: Scale of the cosines.
        learn_norms: With ``"baseline++"``, also learn a factor for each class, as released code does.
        epochs: Passes over the support.
        batch_size: Samples a step.
        lr: Learning rate.
        weight_decay: Weight decay.
        seed: Seed of the first weights and of the orders in which the support is seen.

    Returns:
        ``(E, N, Q)`` the way, 0 to N - 1, that each query is taken for.

    Example:
        >>> support = 3 * torch.eye(3).reshape(1, 3, 1, 3)
        >>> classify(support, support, "nearest").flatten()
        tensor([0, 1, 2])
    """
    if support.dim() != 4 or query.dim() != 4 or any(support.shape[i] != query.shape[i] for i in (0, 1, 3)):
        shapes = f"{tuple(support.shape)} and {tuple(query.shape)}"
        raise ArgumentError("support", f"and query must have the shapes (E, N, K, D) and (E, N, Q, D), got {shapes}")
    check_range("support", support.shape[2], 1)
    check_choice("classifier", classifier, CLASSIFIERS)
    check_range("epochs", epochs, 1)
    check_range("batch_size", batch_size, 1)
    check_range("lr", lr, 0, open_low=True)
    check_range("weight_decay", weight_decay, 0)
    if support.dtype in (torch.float16, torch.bfloat16):
        support = support.float()
    flat = query.to(support.dtype).flatten(1, 2)
    # Classifiers are trained also where gradients are switched off, or products rounded.
    with torch.inference_mode(False), full_precision(support):
        if classifier == "nearest":
            means = F.normalize(support, dim=3).mean(2)
            scores = F.normalize(flat, dim=2) @ F.normalize(means, dim=2).mT
        else:
            count, ways, shots, dim = support.shape
            # Seeds of runs and episodes are below 2**32: this is no generator that episodes are drawn from.
            generator = torch.Generator().manual_seed(2**32 + seed)
            model = EpisodeClassifiers(
                count,
                ways,
                dim,
                scale=scale if classifier == "baseline++" else None,
                learn_norms=learn_norms,
                generator=generator,
                dtype=support.dtype,
            ).to(support.device)
            if support.device.type == "cpu":  # elsewhere the steps take as long for any dimension
                support, flat = _in_few_dimensions(model, support, flat)
            orders = torch.rand(count, epochs, ways * shots, generator=generator).argsort(2).to(support.device)
            model.fit(support, orders, batch_size=batch_size, lr=lr, weight_decay=weight_decay)
            with torch.no_grad():
                scores = model(flat)
    return scores.argmax(2).unflatten(1, query.shape[1:3])


def _in_few_dimensions(model: EpisodeClassifiers, support: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Coordinates of support, queries and weights in the span of support and weights, which SGD does not leave.

    Training only adds multiples of the support and of the weights, and turns with the coordinates. What a query has
    outside the span makes it longer, which changes no order of its scores.
    """
    spanning = torch.cat([support.flatten(1, 2), model.weight.detach()], 1)
    if spanning.shape[1] >= spanning.shape[2]:
        return support, query
    basis = torch.linalg.qr(spanning.mT).Q
    model.weight = nn.Parameter(model.weight.detach() @ basis)
    return (support.flatten(1, 2) @ basis).unflatten(1, support.shape[1:3]), query @ basis
