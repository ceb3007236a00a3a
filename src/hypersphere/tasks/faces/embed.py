"""From image files to features: the network of a run as a function, and folders of images of people."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from hypersphere import orthogonal
from hypersphere.data.splits import DataError, FolderSplit, image_files
from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.metrics import flip_features
from hypersphere.metrics.neighbours import matching_pairs
from hypersphere.runs.artefacts import RunError
from hypersphere.runs.folder import RunFolder
from hypersphere.runs.gallery import fingerprint
from hypersphere.runs.loading import load
from hypersphere.runs.samples import grey
from hypersphere.tasks.faces.data import AlignedSplit, Pairs

Flip = Literal["none", "add", "concatenate"]
FLIPS: tuple[str, ...] = get_args(Flip)
FLIP_WORDS = {
    "none": "features of the image alone",
    "add": "direction of the sum of the features of image and mirror image",
    "concatenate": "features of image and mirror image side by side",
}

# --------------------------------------------------------------------------------------------- folders of images


class Photo(NamedTuple):
    """An image file: where it is, what it is called and who is on it.

    Example:
        >>> Photo(Path("faces/ann/1.jpg"), "ann/1", "ann").person
        'ann'
    """

    file: Path
    name: str
    person: str


def photos(path: Path) -> list[Photo]:
    """The images in a folder, in the order of their names.

    A subfolder is a person. Images that lie in the folder itself are called after their files, without a number at the
    end: ``ann_1.jpg`` and ``ann_2.jpg`` are ann.

    Args:
        path: A folder, or a single image.

    Raises:
        DataError: There is no such folder, or no image in it.

    Example:
        >>> photos(Path("nowhere"))
        Traceback (most recent call last):
        hypersphere.data.splits.DataError: nowhere does not exist: give a folder of images, or an image.
    """
    if path.is_file():
        return [_photo(path, path.parent)]
    if not path.is_dir():
        raise DataError(f"{path} does not exist: give a folder of images, or an image.")
    return [_photo(file, path) for file in image_files(path)]


def _photo(file: Path, folder: Path) -> Photo:
    inside = file.relative_to(folder)
    person = inside.parts[0] if len(inside.parts) > 1 else re.sub(r"[-_ ]*\d+$", "", file.stem) or file.stem
    return Photo(file, inside.with_suffix("").as_posix(), person)


def all_pairs(found: Sequence[Photo], most: int = 200_000, seed: int = 0) -> Pairs:
    """All pairs of images of a folder, or a random part of them.

    Args:
        found: Images with their people.
        most: Most pairs of each kind; more are drawn from at random.
        seed: Of the draw.

    Example:
        >>> print(all_pairs([Photo(Path(f"{name}.jpg"), name, name[0]) for name in ("a1", "a2", "b1")]))
        3 pairs (1 of one person, 2 of two) of 3 images of 2 people in 1 fold
    """
    check_range("most", most, 1)
    numbers: dict[str, int] = {}
    people = torch.tensor([numbers.setdefault(photo.person, len(numbers)) for photo in found])
    generator = torch.Generator().manual_seed(seed)
    genuine = torch.stack(matching_pairs(people, people.argsort(stable=True), people))
    count = len(people)
    if count**2 <= 8 * most:
        impostors = torch.triu_indices(count, count, 1)
    else:  # enough that about twice as many are left without repeats and with the lower number first
        places = torch.randint(count**2, (4 * most,), generator=generator).unique()
        impostors = torch.stack([places // count, places % count])
    parts = []
    for pairs, same in ((genuine, True), (impostors, False)):
        first, second = pairs
        kept = ((first < second) & ((people[first] == people[second]) == same)).nonzero().flatten()
        if len(kept) > most:
            kept = kept[torch.randperm(len(kept), generator=generator)[:most].sort().values]
        parts.append(pairs[:, kept])
    left, right = torch.cat(parts, 1)
    # Pairs takes people from names, so that each name begins with one.
    names = tuple(f"{photo.person}/{photo.name}" for photo in found)
    return Pairs(names, left, right, people[left] == people[right], torch.zeros_like(left))


# -------------------------------------------------------------------------------------------------- the network


class Skipped(NamedTuple):
    """An image that was left out, and why."""

    file: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


@dataclass(frozen=True, eq=False)
class Embedded:
    """Features of the images that could be read.

    Attributes:
        kept: ``(M,)`` int64, places of these images among those that were asked for.
        features: ``(M, D)`` on the CPU.
        mirrored: ``(M, D)`` features of the mirror images, where they were wanted.
        skipped: The other images, with reasons.
    """

    kept: Tensor
    features: Tensor
    mirrored: Tensor | None
    skipped: tuple[Skipped, ...]

    def combined(self, flip: Flip) -> Tensor:
        """One feature an image: ``(M, D)``, or ``(M, 2 D)`` for ``"concatenate"``."""
        if flip == "none" or self.mirrored is None:
            return self.features
        return flip_features(self.features, self.mirrored, flip)


class Embedder:
    """The network of a run's last checkpoint, as a function from images to features. It needs no training data.

    Args:
        run: Folder of the run.
        device: Where to compute.
        size: Height and width of the images that the network takes; by default what it was trained on.
        flip: What is done with the mirror image: ``"add"`` (the direction of the sum, which is that of the mean),
            ``"concatenate"`` or ``"none"``.
        plugins: Files or modules of plugins that the recipe needs.

    Attributes:
        name: Name of the run.
        shape: ``(C, H, W)`` of an image.
        fingerprint: Of the weights and of ``flip``: features with another one do not compare.

    Example:
        >>> Embedder(Path("nowhere"))
        Traceback (most recent call last):
        hypersphere.runs.artefacts.RunError: nowhere does not exist: give a folder that a training run wrote
    """

    def __init__(
        self,
        run: Path,
        device: torch.device | str = "cpu",
        *,
        size: tuple[int, int] | None = None,
        flip: Flip = "add",
        plugins: Sequence[str | Path] = (),
    ) -> None:
        check_choice("flip", flip, FLIPS)
        self.run, self.device, self.flip = RunFolder.open(run), torch.device(device), flip
        system = load(run, plugins=plugins, device=self.device, size=size)
        if not system.images:
            raise RunError(f"{run} is not of a network for images: it takes samples of the shape {system.shape}")
        channels, height, width = system.shape
        self.name, self.shape = system.name, (channels, height, width)
        self.model, self.preprocess = system.model, system.preprocess
        self.dim = int(self.model.dim) * (2 if flip == "concatenate" else 1)
        self.fingerprint = f"{fingerprint(self.model)}+flip-{flip}"

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Features ``(B, D)`` of colour images ``(B, 3, H, W)`` of bytes, without their mirror images."""
        images = images.to(self.device)
        if self.shape[0] == 1:
            images = grey(images)
        return self.model(self.preprocess(images)).float().flatten(1)

    def split(self, files: Sequence[Path], landmarks: Tensor | None = None) -> FolderSplit:
        """Files as images of the network's size: aligned by landmarks ``(N, 5, 2)``, or the middle of each."""
        nobody, size = torch.zeros(len(files), dtype=torch.int64), (self.shape[1], self.shape[2])
        if landmarks is None:
            return FolderSplit(tuple(files), nobody, size)
        return AlignedSplit(tuple(files), nobody, size, landmarks)

    def __call__(
        self,
        files: Sequence[Path],
        landmarks: Tensor | None = None,
        *,
        batch_size: int | None = None,
        workers: int = 4,
        progress: Callable[[int], object] = lambda count: None,
    ) -> Embedded:
        """Features of image files; what cannot be read is left out and listed.

        Args:
            files: N files.
            landmarks: ``(N, 5, 2)``, see :func:`hypersphere.tasks.faces.align.align`; NaN for an image without any,
                which is left out. Without landmarks the middle of every image is taken.
            batch_size: Images that go through the network at a time; by default 256 on a GPU and 8 on a CPU, where
                larger batches leave the cache and take twice as long.
            workers: Threads that decode images.
            progress: Is told how many files are done.
        """
        if batch_size is None:
            batch_size = 256 if self.device.type == "cuda" else 8
        check_range("batch_size", batch_size, 1)
        check_range("workers", workers, 1)
        split = self.split(files, landmarks)
        kept, found, mirrored, skipped = [], [], [], []
        with ThreadPoolExecutor(workers) as pool, orthogonal.cached(self.model):
            for batch in _batches(split, batch_size, pool):
                good = [(index, image) for index, image in batch if isinstance(image, Tensor)]
                skipped += [Skipped(split.files[i], str(image)) for i, image in batch if isinstance(image, DataError)]
                if good:
                    images = torch.stack([image for _, image in good])
                    kept += [index for index, _ in good]
                    found.append(self.features(images).cpu())
                    mirrored += [self.features(images.flip(3)).cpu()] if self.flip != "none" else []
                progress(len(batch))
        if not kept:
            raise DataError(
                f"none of {len(files)} images could be read"
                + (f", the first being {skipped[0].reason}" if skipped else ".")
            )
        return Embedded(torch.tensor(kept), torch.cat(found), torch.cat(mirrored) if mirrored else None, tuple(skipped))


def _batches(split: FolderSplit, size: int, pool: ThreadPoolExecutor) -> Iterator[list[tuple[int, Tensor | DataError]]]:
    """Numbered images, or what was wrong with them, a batch being decoded while the one before is computed on."""

    def read(index: int) -> tuple[int, Tensor | DataError]:
        if isinstance(split, AlignedSplit) and not bool(split.landmarks[index].isfinite().all()):
            return index, DataError("the landmarks file does not have it.")
        try:
            return index, split.read(index)
        except DataError as error:
            return index, error

    ahead = None
    for start in range(0, len(split), size):
        batch = [pool.submit(read, index) for index in range(start, min(start + size, len(split)))]
        if ahead is not None:
            yield [future.result() for future in ahead]
        ahead = batch
    if ahead is not None:
        yield [future.result() for future in ahead]


def parse_size(text: str) -> tuple[int, int]:
    """Height and width from ``112x96``.

    Example:
        >>> parse_size("112x96")
        (112, 96)
    """
    found = re.fullmatch(r"(\d+)x(\d+)", text.strip().lower())
    if found is None or not all(map(int, found.groups())):
        raise ArgumentError("size", f"must be HEIGHTxWIDTH such as 112x96, got {text!r}")
    return int(found[1]), int(found[2])
