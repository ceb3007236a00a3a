"""How good generated images are: samples to look at, and scores by a classifier that was trained on the same data."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere.data import DataError
from hypersphere.errors import ArgumentError, check_range
from hypersphere.evaluate.protocols import Outputs, evaluations

BATCH = 1000
INCEPTION_BATCH = 64
INCEPTION_SIDE = 299
INCEPTION_FILE = "inception_v3_google-0cc3c7bd.pth"
INCEPTION_URL = f"https://download.pytorch.org/models/{INCEPTION_FILE}"
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def generation_score(probabilities: Tensor, splits: int = 10) -> tuple[float, float]:
    r"""Inception-style score of a classifier's probabilities: how sure they are of each image, and how varied over all.

    .. math:: \exp \frac{1}{n} \sum_i \mathrm{KL}(p(y | x_i) \,\|\, p(y)), \qquad p(y) = \frac{1}{n} \sum_i p(y | x_i)

    It lies between 1 and the number of classes.

    Args:
        probabilities: ``(N, C)``, each row adding up to 1.
        splits: Parts of equal size, one after the other, that are scored by themselves; what is left over does not
            count. Published scores take 10 of 50,000 images.

    Returns:
        Mean and standard deviation over the parts.

    Example:
        >>> generation_score(torch.eye(4), splits=1)
        (4.0, 0.0)
    """
    if probabilities.dim() != 2 or probabilities.shape[1] < 1:
        raise ArgumentError("probabilities", f"must have shape (N, C), got {tuple(probabilities.shape)}")
    check_range("splits", splits, 1, max(len(probabilities), 1))
    if not len(probabilities):
        raise ArgumentError("probabilities", "must not be empty")
    size = len(probabilities) // splits
    parts = probabilities[: splits * size].double().unflatten(0, (splits, size))
    marginal = parts.mean(1, keepdim=True)
    # xlogy: a class of probability 0 adds nothing.
    divergence = torch.xlogy(parts, parts).sum(2) - torch.xlogy(parts, marginal).sum(2)
    scores = divergence.mean(1).exp()
    return float(scores.mean()), float(scores.std(correction=0))


def frechet_distance(mean: Tensor, covariance: Tensor, other_mean: Tensor, other_covariance: Tensor) -> float:
    r"""Squared Fréchet (2-Wasserstein) distance of two normal distributions.

    .. math:: \|m - m'\|^2 + \mathrm{tr}\bigl(S + S' - 2 (S^{1/2} S' S^{1/2})^{1/2}\bigr)

    All roots are those of symmetric matrices, by their eigenvalues in float64; singular matrices are fine.

    Args:
        mean: ``(D,)``.
        covariance: ``(D, D)``, symmetric with eigenvalues of at least 0.
        other_mean: ``(D,)``.
        other_covariance: ``(D, D)``.

    Example:
        >>> eye = torch.eye(2)
        >>> frechet_distance(torch.zeros(2), eye, torch.tensor([3.0, 4.0]), 4 * eye)
        27.0
    """
    if not mean.shape == other_mean.shape == covariance.shape[1:] == other_covariance.shape[1:]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (mean, covariance, other_mean, other_covariance))
        raise ArgumentError("mean", f"and the others must have the shapes (D,), (D, D), (D,) and (D, D), got {shapes}")
    covariance, other_covariance = covariance.double(), other_covariance.double()
    values, vectors = torch.linalg.eigh(covariance)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.mT
    between = torch.linalg.eigvalsh(root @ other_covariance @ root).clamp(min=0).sqrt().sum()
    shift = (mean.double() - other_mean.double()).square().sum()
    distance = shift + covariance.trace() + other_covariance.trace() - 2 * between
    return max(float(distance), 0.0)  # rounding alone brings it below 0


def feature_distance(features: Tensor, others: Tensor) -> float:
    """Fréchet distance of two sets of features ``(N, D)`` and ``(M, D)``, each taken as a normal distribution.

    Example:
        >>> x = torch.randn(20, 3)
        >>> round(feature_distance(x, x + 2), 6)
        12.0
    """
    for name, rows in (("features", features), ("others", others)):
        if rows.dim() != 2 or len(rows) < 2:
            raise ArgumentError(name, f"must have shape (N, D) with two rows or more, got {tuple(rows.shape)}")
    if features.shape[1] != others.shape[1]:
        raise ArgumentError("others", f"must have {features.shape[1]} columns like features, got {others.shape[1]}")
    first, second = features.double(), others.double()
    covariances = [torch.cov(rows.mT).view(rows.shape[1], -1) for rows in (first, second)]
    return frechet_distance(first.mean(0), covariances[0], second.mean(0), covariances[1])


def class_balance(shares: Tensor) -> float:
    r"""How evenly classes occur: :math:`\exp(H) / C` of their shares, 1 for equal ones, 1/C where there is but one.

    Example:
        >>> class_balance(torch.tensor([0.5, 0.5, 0.0, 0.0]))
        0.5
    """
    if shares.dim() != 1 or not shares.any():
        raise ArgumentError("shares", f"must have shape (C,) and not be all 0, got {shares.tolist()}")
    shares = shares.double() / shares.double().sum()
    return float((-torch.xlogy(shares, shares).sum()).exp() / len(shares))


Judge = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Images as bytes ``(B, C, H, W)`` to features ``(B, D)`` and logits ``(B, K)``."""


def _judged(judge: Judge, images: Tensor, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Features and probabilities of images, in batches."""
    found = [judge(part.to(device)) for part in images.split(batch)]
    features, logits = (torch.cat([part[i].float() for part in found]) for i in (0, 1))
    return features, logits.softmax(1)


@lru_cache(maxsize=1)
def _classifier(run: Path, checkpoint: Path | None, time: int, device: torch.device) -> tuple[Any, Judge]:
    """The trainer of another run with its last weights, and its model and head as one function.

    Kept, since it is asked for at every evaluation; a newer checkpoint, also of the same name, is another one.
    """
    from hypersphere.runs import RunFolder  # noqa: PLC0415 (it evaluates, and so imports this)
    from hypersphere.train import Trainer  # noqa: PLC0415 (it evaluates, and so imports this)

    folder = RunFolder.open(run)
    trainer = Trainer(folder.recipe(), folder, device, data_root=folder.data_root())
    trainer.load_weights()
    trainer.model.eval()
    trainer.head.eval()

    @torch.no_grad()
    def judge(images: Tensor) -> tuple[Tensor, Tensor]:
        features = trainer.model(trainer.preprocess(images))
        return features, trainer.head.logits(features)

    return trainer, judge


def _load_classifier(path: str, outputs: Outputs, device: torch.device) -> Judge:
    from hypersphere.runs import RunFolder  # noqa: PLC0415 (it evaluates, and so imports this)

    run = Path(path).expanduser().resolve()
    checkpoint = RunFolder.open(run).latest_checkpoint()
    time = 0 if checkpoint is None else checkpoint.stat().st_mtime_ns
    trainer, judge = _classifier(run, checkpoint, time, device)
    data = outputs.data
    if data is not None and (trainer.data.name, trainer.data.class_names) != (data.name, data.class_names):
        theirs, ours = (f"{d.name!r} with {len(d.class_names)} classes" for d in (trainer.data, data))
        raise ArgumentError("classifier", f"must be a run on {ours}, got {path}, which is on {theirs}")
    if not trainer.head.logits(torch.zeros(1, trainer.model.dim, device=device)).shape[1]:
        raise ArgumentError("classifier", f"must be a run of a classifier, got {path}, which has no classes")
    return judge


def inception_judge(device: torch.device) -> Judge:
    """Torchvision's Inception-v3 with its ImageNet weights, as a judge of images of any size, grey or in colour.

    Nothing is downloaded. Its weights are not those of the graph that published inception scores come from, so scores
    are comparable among each other, and near to published ones at best.

    Raises:
        DataError: Torchvision is not installed, or its weights are not in torch's folder of downloads.
    """
    file = Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION_FILE
    if not file.is_file():
        raise DataError(f"{file} is missing: download {INCEPTION_URL} to it, or leave the option inception out")
    try:
        factory = importlib.import_module("torchvision.models").inception_v3
    except ModuleNotFoundError as error:
        message = "the inception score needs torchvision, which is not installed: pip install torchvision"
        raise DataError(message) from error
    network: nn.Module = factory(weights=None, init_weights=False, transform_input=True)
    network.load_state_dict(torch.load(file, weights_only=True))
    network.to(device).eval()
    mean, std = (torch.tensor(x, device=device).view(3, 1, 1) for x in (IMAGENET_MEAN, IMAGENET_STD))

    @torch.no_grad()
    def judge(images: Tensor) -> tuple[Tensor, Tensor]:
        pixels = (images.float() / 255).expand(-1, 3, -1, -1)
        size = (INCEPTION_SIDE, INCEPTION_SIDE)
        large = nn.functional.interpolate(pixels, size, mode="bilinear", align_corners=False)
        logits = network((large - mean) / std)
        return logits, logits

    return judge


@evaluations.register("generation")
def generation(
    outputs: Outputs,
    *,
    classifier: str | None = None,
    samples: int = 10_000,
    splits: int = 10,
    grid: int = 64,
    inception: bool = False,
) -> dict[str, float]:
    """Samples of a generator as a grid, and their scores by a classifier that was trained on the same data.

    Args:
        outputs: What a model of two players puts out.
        classifier: Folder of a finished run of a classifier on the same data; without it nothing is scored.
        samples: Generated images that are scored; published scores take 50,000.
        splits: Parts that are scored by themselves.
        grid: Images of the grid.
        inception: Also the score by torchvision's Inception-v3, whose weights must be there.
    """
    check_range("samples", samples, 2)
    check_range("splits", splits, 1, samples)
    check_range("grid", grid, 1)
    model: Any = outputs.model
    if not callable(getattr(model, "sample", None)):
        raise ArgumentError("metrics", f"'generation' needs a model that generates, got {type(model).__name__}")
    device = next(model.parameters()).device
    # The same noise whenever a run is evaluated, and for the grid of all runs.
    shown = model.sample(grid, seed=0)
    model.keep(shown)
    steps, kept = model.kept()
    outputs.artefacts.update({"samples/grid": shown, "samples/steps": steps, "samples/progress": kept})
    real = outputs.images
    if real is not None:
        outputs.artefacts["samples/real"] = real[torch.linspace(0, len(real) - 1, min(grid, len(real))).long()]
    found: dict[str, float] = {}
    judges = dict(_judges(classifier, inception, outputs, device))
    if judges:
        made = model.sample(samples, seed=outputs.seed + 1)
    for name, (judge, batch) in judges.items():
        features, chances = _judged(judge, made, batch, device)
        found[f"{name}_score"], found[f"{name}_score_std"] = generation_score(chances, splits)
        if name == "classifier":
            shares = chances.argmax(1).bincount(minlength=chances.shape[1]) / samples
            outputs.artefacts["samples/classes"] = shares
            found["class_balance"] = class_balance(shares)
        if real is not None:
            real_features, real_chances = _judged(judge, real, batch, device)
            found[f"{name}_score_real"] = generation_score(real_chances, min(splits, len(real)))[0]
            if name == "classifier":
                found["classifier_frechet"] = feature_distance(features, real_features)
    return found


def _judges(
    classifier: str | None, inception: bool, outputs: Outputs, device: torch.device
) -> Iterator[tuple[str, tuple[Judge, int]]]:
    """Name, function and batch size of everything that is to judge images."""
    if classifier is not None:
        yield "classifier", (_load_classifier(classifier, outputs, device), BATCH)
    if inception:
        yield "inception", (inception_judge(device), INCEPTION_BATCH)
