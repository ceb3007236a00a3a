"""A trained system: model, head and preprocessing as one function of images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hypersphere import orthogonal
from hypersphere.data import Dataset
from hypersphere.data.preprocess import Preprocess
from hypersphere.data.splits import image_files
from hypersphere.losses import MarginSoftmax
from hypersphere.metrics.processes import Group, agreed, gathered, share
from hypersphere.recipe import Recipe
from hypersphere.runs.artefacts import RunError
from hypersphere.runs.device import AUTOCAST
from hypersphere.runs.samples import Sample, batches, is_single

BATCH = 256
"""Most samples that go through a model at a time."""


class Prediction(NamedTuple):
    """The class that a sample most likely is of.

    Example:
        >>> Prediction("cat", 0.9).name
        'cat'
    """

    name: str
    probability: float


@dataclass(eq=False)
class System:
    """A trained model with its head and preprocessing: from images to features, scores and classes.

    Images are files, folders, PIL images, arrays ``(H, W)`` or ``(H, W, C)`` or ``(N, H, W, C)``, or tensors
    ``(C, H, W)`` or ``(N, C, H, W)``, of bytes or of floating-point numbers in [0, 1]; one of them, or a list. Files,
    pictures and arrays of bytes are brought to the size that the model takes. One image gives one answer, several give
    as many. Samples of other kinds are arrays or tensors.

    Processes that are given the same images and a ``group`` each compute some batches, and get the answers for all.

    Args:
        model: From samples to features ``(B, D)``, in evaluation mode.
        head: From features to scores of the classes.
        preprocess: From bytes to what the model takes.
        classes: Names of the classes.
        recipe: What was trained.
        shape: Shape of a sample, ``(C, H, W)`` of an image.
        images: Whether samples are images.
        device: Where to compute.
        name: Of the run.
        step: How many steps it was trained.
        missing: Names of what all samples share, such as the edges of a graph, and the model does not have yet.

    Example:
        >>> import hypersphere as hs
        >>> system = hs.load("runs/digits")  # doctest: +SKIP
        >>> system.predict("three.png")  # doctest: +SKIP
        Prediction(name='3', probability=0.98)
    """

    model: Any
    head: MarginSoftmax
    preprocess: Preprocess
    classes: tuple[str, ...]
    recipe: Recipe
    shape: tuple[int, ...]
    images: bool
    device: torch.device
    name: str = ""
    step: int = 0
    missing: tuple[str, ...] = ()

    @torch.no_grad()
    def __call__(self, images: Sample | Sequence[Sample], *, group: Group | None = None) -> Tensor:
        """Scores of the classes without margin ``(N, C)``, or ``(C,)`` for one image."""
        return self._found(images, self.head.logits, group)

    @torch.no_grad()
    def embed(self, images: Sample | Sequence[Sample], *, group: Group | None = None) -> Tensor:
        """Features ``(N, D)``, or ``(D,)`` for one image; the cosine compares them."""
        return self._found(images, lambda features: features, group)

    def predict(self, images: Sample | Sequence[Sample], *, group: Group | None = None) -> Any:
        """The most likely class of every image, with its share of the softmax over the scores.

        Returns:
            A :class:`Prediction` for one image, a list of them for several.
        """
        scores = self(images, group=group)
        if not self.classes or scores.shape[-1] != len(self.classes):
            raise RunError(f"run {self.name!r} is of no classifier: its head has {scores.shape[-1]} scores")
        best, places = scores.reshape(-1, scores.shape[-1]).float().softmax(1).max(1)
        found = [Prediction(self.classes[i], p) for i, p in zip(places.tolist(), best.tolist(), strict=True)]
        return found[0] if is_single(images, self.shape, self.images) else found

    def attach(self, data: Dataset | Mapping[str, Tensor]) -> System:
        """Take what all samples share, such as the features and edges of a graph, from a data set or by name."""
        context = data.context if isinstance(data, Dataset) else data
        self.model.attach(**{name: tensor.to(self.device) for name, tensor in context.items()})
        self.missing = ()
        return self

    def scores(self, samples: Tensor) -> Tensor:
        """Scores ``(B, C)`` of a batch on the device, of which images are floats in [0, 1]; differentiable."""
        return self.head.logits(self.features(samples))

    def features(self, samples: Tensor) -> Tensor:
        """Features ``(B, D)`` of a batch on the device, of which images are floats in [0, 1]; differentiable."""
        with self.autocast():
            features: Tensor = self.model(self.preprocess.scaled(samples) if self.images else samples)
        return features.float()

    def autocast(self) -> torch.autocast:
        """The precision that the recipe computes in."""
        dtype = AUTOCAST.get(self.recipe.train.precision)
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    def weights(self) -> dict[str, Tensor]:
        """The tensors that model, head and preprocessing consist of, by name, one that layers share once."""
        return weights({"model": self.model, "head": self.head, "preprocess": self.preprocess})

    def _features(self, given: Sample | Sequence[Sample]) -> Iterator[Tensor]:
        if self.missing:
            names = ", ".join(f"{name}=..." for name in self.missing)
            raise RunError(
                f"the model of run {self.name!r} needs what its samples share: call system.attach(data) with the data "
                f"set, or system.attach(dict({names}))"
            )
        self.model.eval()
        self.head.eval()
        with orthogonal.cached(self.model):
            for batch in batches(given, self.shape, self.images, BATCH):
                samples = batch.to(self.device)
                scaled = self.images and samples.is_floating_point()
                with self.autocast():
                    features = self.model((self.preprocess.scaled if scaled else self.preprocess)(samples))
                yield features.float()

    def _found(self, given: Any, answer: Callable[[Tensor], Tensor], group: Group | None) -> Tensor:
        """Answers to the features of all samples, of which each process computes some batches."""
        if is_single(given, self.shape, self.images):
            return torch.cat([answer(features) for features in self._features(given)])[0]
        with agreed(group):
            if group is not None:
                several = image_files(Path(given)) if isinstance(given, str | Path) else given
                if not len(several):
                    return torch.zeros(0, device=self.device)
                given = several[share(len(several), group, BATCH)]
            found = [answer(features) for features in self._features(given)]
            return gathered(found, group) if found or group is not None else torch.zeros(0, device=self.device)


def weights(parts: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The tensors of modules as ``part.name``; one that layers share is named once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for part, module in parts.items():
        for name, tensor in module.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                found[f"{part}.{name}"] = tensor
                seen.add(id(tensor))
    return found


def described(data: Dataset) -> dict[str, Any]:
    """What a run keeps of its data set, so that it can be loaded without it.

    Example:
        >>> from hypersphere.data import load
        >>> described(load("digits", hold_out=["9"]))["class_names"]
        ['0', '1', '2', '3', '4', '5', '6', '7', '8']
    """
    context = {
        name: [str(tensor.dtype).removeprefix("torch."), [*tensor.shape]] for name, tensor in data.context.items()
    }
    return {
        "shape": [*data.train.shape],
        "images": data.train.holds_images,
        "class_names": [*data.class_names],
        "context": context,
    }


def parameters(*modules: nn.Module) -> list[nn.Parameter]:
    """Parameters of modules, in the order in which moving averages are kept."""
    return [parameter for module in modules for parameter in module.parameters()]
