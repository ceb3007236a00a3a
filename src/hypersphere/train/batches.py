"""Batches by step number: which images, how they reach the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from hypersphere.data import DataError, FolderSplit, Split, TensorSplit
from hypersphere.errors import ArgumentError
from hypersphere.recipe.seeds import epoch_order
from hypersphere.train.distributed import World


class BatchOrder:
    """Which samples each step sees: a new random order every epoch, incomplete last batches left out.

    Args:
        samples: Number of training samples.
        batch_size: Samples a step.
        seed: The run's seed.

    Example:
        >>> order = BatchOrder(10, 4, seed=0)
        >>> order.indices(0).shape, bool((order.indices(0) == BatchOrder(10, 4, seed=0).indices(0)).all())
        (torch.Size([4]), True)
    """

    def __init__(self, samples: int, batch_size: int, seed: int) -> None:
        if batch_size > samples:
            raise ArgumentError("batch_size", f"must be at most the {samples} training images, got {batch_size}")
        self.samples, self.batch_size, self.seed = samples, batch_size, seed
        self.steps_per_epoch = samples // batch_size

    def epoch(self, number: int) -> Tensor:
        """Order of the samples in one epoch, ``(samples,)``."""
        return epoch_order(self.samples, self.seed, number)

    def indices(self, step: int) -> Tensor:
        """Samples of one step, ``(batch_size,)``."""
        start = step % self.steps_per_epoch * self.batch_size
        return self.epoch(step // self.steps_per_epoch)[start : start + self.batch_size]


class Batches(Protocol):
    """A source of training batches.

    ``inputs`` does what the host must do for a step and returns tensors of fixed shapes; ``load`` turns them into
    images and labels with device work alone, so that it can be part of a captured step.
    """

    def inputs(self, step: int) -> tuple[Tensor, ...]:
        """Tensors for ``load``, of the same shapes at every step."""
        ...

    def load(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Images ``(b, C, H, W)`` uint8 and labels ``(b,)`` of this process' share of the batch."""
        ...


class ResidentBatches:
    """All images on the device; a step costs the host one slice of the epoch's order."""

    def __init__(self, split: TensorSplit, order: BatchOrder, device: torch.device, world: World) -> None:
        self.images, self.labels = split.images.to(device), split.labels.to(device)
        self.order, self.share = order, world.share(order.batch_size)
        self._epoch, self._permutation = -1, self.labels

    def inputs(self, step: int) -> tuple[Tensor, ...]:
        """The indices of this step's images, a view on the device."""
        epoch, position = divmod(step, self.order.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, self.order.epoch(epoch).to(self.labels.device)
        start = position * self.order.batch_size
        return (self._permutation[start + self.share.start : start + self.share.stop],)

    def load(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the images and labels."""
        (indices,) = inputs
        return self.images[indices], self.labels[indices]


class _Files(TorchDataset[Tensor | DataError]):
    def __init__(self, split: FolderSplit) -> None:
        self.split = split

    def __getitem__(self, index: int) -> Tensor | DataError:
        try:
            return self.split.read(index)
        except DataError as error:
            return error  # raised in a worker, it would arrive wrapped in that process' traceback


def _stack(images: list[Tensor | DataError]) -> Tensor | DataError:
    """One batch of decoded images, or the first error among them."""
    errors = [image for image in images if isinstance(image, DataError)]
    return errors[0] if errors else torch.stack([image for image in images if isinstance(image, Tensor)])


class StreamedBatches:
    """Images decoded from files by worker processes, ahead of the steps that need them."""

    def __init__(self, split: FolderSplit, order: BatchOrder, device: torch.device, world: World, workers: int) -> None:
        self.files, self.labels = _Files(split), split.labels
        self.order, self.device, self.workers = order, device, workers
        self.share = world.share(order.batch_size)
        self._next_step = -1
        self._images: Iterator[Tensor | DataError] = iter(())

    def _indices(self, step: int) -> Iterator[list[int]]:
        while True:
            yield self.order.indices(step)[self.share].tolist()
            step += 1

    def inputs(self, step: int) -> tuple[Tensor, ...]:
        """This step's images and labels on the device."""
        if step != self._next_step:
            loader = DataLoader(
                self.files,
                batch_sampler=self._indices(step),
                num_workers=self.workers,
                collate_fn=_stack,
                pin_memory=self.device.type == "cuda",
                prefetch_factor=4 if self.workers else None,
            )
            self._images = iter(loader)
        self._next_step = step + 1
        labels = self.labels[self.order.indices(step)[self.share]]
        images = next(self._images)
        if isinstance(images, DataError):
            raise images
        return images.to(self.device, non_blocking=True), labels.to(self.device)

    def load(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The images and labels as they are."""
        images, labels = inputs
        return images, labels


def make_batches(split: Split, order: BatchOrder, device: torch.device, world: World, workers: int) -> Batches:
    """Resident batches for tensors, streamed ones for files."""
    if isinstance(split, TensorSplit):
        return ResidentBatches(split, order, device, world)
    return StreamedBatches(split, order, device, world, workers)
