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
from hypersphere.evaluate import Metric, Outputs, evaluations
from hypersphere.metrics import class_balance, feature_distance, generation_score
from hypersphere.runs import RunFolder, System, load

BATCH = 1000
INCEPTION_BATCH = 64
INCEPTION_SIDE = 299
INCEPTION_FILE = "inception_v3_google-0cc3c7bd.pth"
INCEPTION_URL = f"https://download.pytorch.org/models/{INCEPTION_FILE}"
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

Judge = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Images as bytes ``(B, C, H, W)`` to features ``(B, D)`` and logits ``(B, K)``."""


def _judged(judge: Judge, images: Tensor, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Features and probabilities of images, in batches."""
    found = [judge(part.to(device)) for part in images.split(batch)]
    features, logits = (torch.cat([part[i].float() for part in found]) for i in (0, 1))
    return features, logits.softmax(1)


@lru_cache(maxsize=1)
def _classifier(run: Path, checkpoint: Path | None, time: int, device: torch.device) -> System:
    """Another run with its last weights.

    Kept, since it is asked for at every evaluation; a newer checkpoint, also of the same name, is another one.
    """
    return load(run, device=device)


def _system(words: str, outputs: Outputs, device: torch.device) -> System:
    # Late: a trained run is loaded without the trainer.
    from hypersphere.train.beside import names_recipe, trained  # noqa: PLC0415

    if names_recipe(words):
        return trained(words, outputs.data, device, option="classifier")
    run = Path(words).expanduser().resolve()
    checkpoint = RunFolder.open(run).latest_checkpoint()
    time = 0 if checkpoint is None else checkpoint.stat().st_mtime_ns
    return _classifier(run, checkpoint, time, device)


def _load_classifier(words: str, outputs: Outputs, device: torch.device) -> Judge:
    system = _system(words, outputs, device)
    data, name = outputs.data, system.recipe.data.name
    if data is not None and (system.shape, system.classes) != (data.train.shape, data.class_names):
        theirs, ours = (
            f"{name!r} with {len(system.classes)} classes",
            f"{data.name!r} with {len(data.class_names)} classes",
        )
        raise ArgumentError("classifier", f"must be a run on {ours}, got {words}, which is on {theirs}")
    if not system.head.logits(torch.zeros(1, system.model.dim, device=device)).shape[1]:
        raise ArgumentError("classifier", f"must be a run of a classifier, got {words}, which has no classes")

    @torch.no_grad()
    def judge(images: Tensor) -> tuple[Tensor, Tensor]:
        features = system.model(system.preprocess(images))
        return features, system.head.logits(features)

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


@evaluations.register(
    "generation",
    metrics=(
        Metric(
            "classifier_score",
            "Classifier score",
            form=".3f",
            better="higher",
            help="How sure a classifier that was trained on the same data is of each generated image, and how varied "
            "it finds all of them: between 1 and the number of classes. An inception score by another network. Higher "
            "is better.",
        ),
        Metric(
            "classifier_score_std",
            "Classifier score, deviation",
            form=".3f",
            help="Standard deviation of that score over the parts that were scored by themselves.",
            detail=True,
        ),
        Metric(
            "classifier_score_real",
            "Classifier score of test images",
            form=".3f",
            help="The same score of the test images, which a generator can hope for.",
            detail=True,
        ),
        Metric(
            "inception_score",
            "Inception score",
            form=".3f",
            better="higher",
            help="How sure torchvision's Inception-v3 is of each generated image, and how varied it finds all of them: "
            "between 1 and the number of its classes. Higher is better.",
        ),
        Metric(
            "inception_score_std",
            "Inception score, deviation",
            form=".3f",
            help="Standard deviation of that score over the parts that were scored by themselves.",
            detail=True,
        ),
        Metric(
            "inception_score_real",
            "Inception score of test images",
            form=".3f",
            help="The same score of the test images, which a generator can hope for.",
            detail=True,
        ),
        Metric(
            "classifier_frechet",
            "Fréchet distance",
            form=".3f",
            better="lower",
            help="Distance between that classifier's features of generated and of test images, each taken as a normal "
            "distribution. Lower is better; comparable only with the same classifier.",
        ),
        Metric(
            "class_balance",
            "Class balance",
            unit="%",
            form=".1%",
            better="higher",
            help="How evenly the classes occur among generated images, as that classifier sees them: 100% where all "
            "are equally frequent. Higher is better.",
        ),
    ),
)
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
        classifier: Folder of a finished run of a classifier on the same data, or a recipe and changes, such as
            ``mnist-cnn``, which is trained first; without it nothing is scored.
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
