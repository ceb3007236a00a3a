"""The commands for faces (or anything else that is recognised by its features): embed, verify, identify, gallery."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
import safetensors.torch
import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from hypersphere.cli.options import Device
from hypersphere.cli.terminal import console, errors
from hypersphere.data.splits import DataError
from hypersphere.errors import ArgumentError, HypersphereError, check_choice, check_range
from hypersphere.metrics import (
    Calibration,
    Identification,
    Rate,
    Verification,
    calibrate,
    lfw10,
    pool_templates,
    score_pairs,
    verification_summary,
)
from hypersphere.metrics import identify as identify_features
from hypersphere.metrics.neighbours import KINDS, Kind
from hypersphere.runs import RunFolder, atomic_write, pick_device
from hypersphere.runs.gallery import Gallery
from hypersphere.tasks.faces.data import Pairs, find_images, read_landmarks, read_pairs
from hypersphere.tasks.faces.embed import (
    FLIP_WORDS,
    FLIPS,
    Embedded,
    Embedder,
    Flip,
    Photo,
    Skipped,
    all_pairs,
    parse_size,
    photos,
)
from hypersphere.tasks.faces.figures import VerificationPage, write_verification

gallery_app = typer.Typer(
    help="Keep a file of people: add and remove them, and ask who is on an image.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

VARIANTS = ("sphereface", "clcarwin", "insightface", "opensphere")
CALIBRATION = "calibration.json"
"""File of a run in which ``verify`` leaves its threshold."""
LISTED = 20
"""Most images that a message about skipped ones names."""

Run = Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run, whose network makes the features")]
ImageList = Annotated[
    list[Path], typer.Argument(metavar="IMAGES", help="folders (a subfolder is a person) and image files")
]
Landmarks = Annotated[
    Path | None,
    typer.Option(help="file with five points of every image, by which faces are aligned (default: the middle of each)"),
]
FlipOption = Annotated[
    str, typer.Option(help=f"what is done with the mirror image: {', '.join(FLIPS)} (none is twice as fast)")
]
Score = Annotated[str, typer.Option(help=f"how two features are compared: {', '.join(KINDS)}")]
Size = Annotated[
    str | None, typer.Option(metavar="HxW", help="size of the network's images (default: as it was trained)")
]
BatchSize = Annotated[
    int | None, typer.Option(help="images that go through the network at a time (default: 8, or 256 on a GPU)")
]
Workers = Annotated[int, typer.Option(help="threads that decode images")]
Results = Annotated[Path | None, typer.Option("--output", "-o", help="JSON file for the results")]
GalleryFile = Annotated[Path, typer.Argument(metavar="GALLERY", help="file of the gallery, NAME.safetensors")]


# ---------------------------------------------------------------------------------------------------- features


class _Settings(NamedTuple):
    """How images become features, as the options say."""

    landmarks: Path | None
    flip: str
    size: str | None
    device: str
    batch_size: int | None
    workers: int

    def embedder(self, run: Path) -> Embedder:
        check_choice("flip", self.flip, FLIPS)
        size = None if self.size is None else parse_size(self.size)
        return Embedder(run, pick_device(self.device), size=size, flip=cast(Flip, self.flip))

    def images(self, embedder: Embedder) -> str:
        """How images are prepared for the network, in words."""
        how = "the middle of each" if self.landmarks is None else "aligned by landmarks"
        return f"images of {embedder.shape[1]}x{embedder.shape[2]}, {how}"

    def embed(self, embedder: Embedder, found: Sequence[Photo], title: str) -> Embedded:
        """Features of images with a bar on the terminal; what was left out is listed."""
        points = None if self.landmarks is None else _points(self.landmarks, found)
        with _bar(title, len(found)) as bar:
            made = embedder(
                [photo.file for photo in found],
                points,
                batch_size=self.batch_size,
                workers=self.workers,
                progress=bar,
            )
        _list_skipped(made.skipped)
        return made


def _points(file: Path, found: Sequence[Photo]) -> Tensor:
    """Landmarks ``(N, 5, 2)`` of images, NaN for those that the file does not have."""
    known = read_landmarks(file)
    nowhere = torch.full((5, 2), math.nan)
    points, owners = [], dict[str, Path]()
    for photo in found:
        names = (photo.name, f"{photo.file.parent.name}/{photo.file.stem}")  # also where a single image was given
        name = next((name for name in names if name in known), "")
        if name and owners.setdefault(name, photo.file) != photo.file:
            raise DataError(f"{file} has one line for {name}, which is {owners[name]} and {photo.file}: rename one.")
        points.append(known.get(name, nowhere))
    if not any(bool(point.isfinite().all()) for point in points):
        raise DataError(
            f"{file} has landmarks of {len(known):,} images, but of none of the {len(found):,} here. Its first column "
            f"must be the image's place below the folder, such as {found[0].name}."
        )
    return torch.stack(points)


@contextmanager
def _bar(title: str, total: int) -> Iterator[Any]:
    """A progress bar on stderr, where that is a terminal; gives a function that moves it."""
    bar = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    )
    with bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)


def _list_skipped(skipped: Sequence[Skipped]) -> None:
    if not skipped:
        return
    errors.print(f"[bold yellow]warning:[/] {len(skipped)} image{'s' * (len(skipped) > 1)} left out:", highlight=False)
    for one in skipped[:LISTED]:
        text = one.reason if str(one.file) in one.reason else str(one)
        errors.print(f"  {text}", highlight=False, soft_wrap=True, markup=False)
    if len(skipped) > LISTED:
        errors.print(f"  and {len(skipped) - LISTED} more", highlight=False)


def _gather(paths: Sequence[Path]) -> list[Photo]:
    return [photo for path in paths for photo in photos(path)]


def _print(text: str = "") -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as output:
        json.dump(_finite(content), output, indent=2)


def _finite(value: Any) -> Any:
    """The same without NaN and infinity, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def embed(
    run: Run,
    images: ImageList,
    output: Annotated[Path, typer.Option("--output", "-o", help="file to write: .safetensors or .npz")],
    landmarks: Landmarks = None,
    flip: FlipOption = "add",
    size: Size = None,
    device: Device = "auto",
    batch_size: BatchSize = None,
    workers: Workers = 4,
) -> None:
    """Write the features of images to a file, with their names and people."""
    if output.suffix not in (".safetensors", ".npz"):
        raise ArgumentError("output", f"must end in .safetensors or .npz, got {output.name!r}")
    settings = _Settings(landmarks, flip, size, device, batch_size, workers)
    found = _gather(images)
    embedder = settings.embedder(run)
    made = settings.embed(embedder, found, "embed")
    kept = [found[index] for index in made.kept.tolist()]
    features = made.combined(embedder.flip)
    names, people = [photo.name for photo in kept], [photo.person for photo in kept]
    output.parent.mkdir(parents=True, exist_ok=True)
    facts = {"model": embedder.name, "fingerprint": embedder.fingerprint}
    if output.suffix == ".npz":
        np.savez(output, features=features.numpy(), names=np.array(names), people=np.array(people), **facts)  # type: ignore[arg-type]
    else:
        metadata = facts | {"names": json.dumps(names), "people": json.dumps(people)}
        safetensors.torch.save_file({"features": features.contiguous()}, output, metadata)
    _print(f"Wrote {len(features):,} features of dimension {features.shape[1]} to {output}")


# ------------------------------------------------------------------------------------------------ verification


def verify(
    run: Run,
    pairs: Annotated[
        Path,
        typer.Argument(
            metavar="PAIRS", help="list of pairs in the form of LFW's pairs.txt, or a folder with a subfolder a person"
        ),
    ],
    images: Annotated[
        Path | None, typer.Option(help="folder of the images of the list (default: images or lfw beside it)")
    ] = None,
    landmarks: Landmarks = None,
    target_far: Annotated[float, typer.Option(help="false accept rate that the threshold is for")] = 1e-3,
    fars: Annotated[str, typer.Option(help="false accept rates to report, with commas")] = "0.001,0.01",
    score: Score = "cosine",
    variant: Annotated[str, typer.Option(help=f"how folds are judged: {', '.join(VARIANTS)}")] = "sphereface",
    report: Annotated[Path | None, typer.Option(metavar="PAGE.html", help="also write a page with curves")] = None,
    output: Results = None,
    store: Annotated[bool, typer.Option(help="keep the threshold with the run, for galleries")] = True,
    most_pairs: Annotated[int, typer.Option(help="most pairs of each kind that are made of a folder")] = 200_000,
    samples: Annotated[int, typer.Option(help="bootstrap draws of the intervals")] = 1000,
    flip: FlipOption = "add",
    size: Size = None,
    device: Device = "auto",
    batch_size: BatchSize = None,
    workers: Workers = 4,
) -> None:
    """Judge pairs of images, same person or not: accuracy, error rates and a calibrated threshold, with intervals."""
    check_choice("score", score, KINDS)
    check_choice("variant", variant, VARIANTS)
    rates = _numbers("fars", fars)
    _numbers("target_far", str(target_far))  # now, and not after all images went through the network
    check_range("samples", samples, 2)
    settings = _Settings(landmarks, flip, size, device, batch_size, workers)
    listed, found, places = _pairs(pairs, images, most_pairs)
    embedder = settings.embedder(run)
    _print(str(listed))
    beside = pairs.parent / "landmarks.txt"
    if landmarks is None and pairs.is_file() and beside.is_file():
        errors.print(f"There is a file {beside}; --landmarks {beside} aligns the faces.", highlight=False)
    made = settings.embed(embedder, found, "embed")
    complete = _only(listed, places[made.kept])
    left_out, listed = len(listed) - len(complete), complete
    if left_out:
        errors.print(f"{left_out:,} pairs are left out for want of an image", highlight=False)
    combined = made.combined(embedder.flip)
    scores = score_pairs(combined, combined, torch.stack([listed.left, listed.right], 1), kind=cast(Kind, score))
    identities = (listed.people[listed.left], listed.people[listed.right])
    results: dict[str, Verification] = {}
    with _once():
        if listed.folds > 1:
            mirrored = None if made.mirrored is None else (made.mirrored[listed.left], made.mirrored[listed.right])
            results["accuracy"] = lfw10(
                made.features[listed.left],
                made.features[listed.right],
                listed.same,
                listed.fold,
                mirrored=mirrored,
                variant=cast(Any, variant),
            )
        results |= verification_summary(scores, listed.same, fars=rates, identities=identities, samples=samples)
        calibration = calibrate(scores, listed.same, target_far, identities=identities, score=score, samples=samples)
    how = f"{score} scores, {FLIP_WORDS[embedder.flip]}, {settings.images(embedder)}"
    _show_verification(embedder, results, calibration, how)
    content = {
        "run": str(run),
        "model": embedder.name,
        "fingerprint": embedder.fingerprint,
        "pairs": str(pairs),
        "landmarks": None if landmarks is None else str(landmarks),
        "what": str(listed),
        "how": how,
        "results": {key: dataclasses.asdict(value) | {"text": str(value)} for key, value in results.items()},
        "calibration": calibration.to_dict(),
        "skipped": [str(one) for one in made.skipped],
        "pairs_left_out": left_out,
    }
    output = output or run / "verification.json"
    _write_json(output, content)
    _print(f"Results: {output}")
    if store:
        keep = {
            "fingerprint": embedder.fingerprint,
            "images": settings.images(embedder),
            "pairs": str(pairs),
            "calibration": calibration.to_dict(),
        }
        _write_json(run / CALIBRATION, keep)
        _print(f"Threshold kept in {run / CALIBRATION}")
    if report is not None:
        points = None if landmarks is None else _points(landmarks, found)[made.kept]
        split = embedder.split([found[index].file for index in made.kept.tolist()], points)
        page = VerificationPage(embedder.name, listed, scores, results, calibration, how, split.read, made.skipped)
        _print(f"Report: {write_verification(page, report).resolve()}")


def _pairs(path: Path, images: Path | None, most: int) -> tuple[Pairs, list[Photo], Tensor]:
    """The pairs of a list or of a folder, the image files that there are, and their places in ``pairs.images``."""
    if path.is_dir():
        found = photos(path)
        listed = all_pairs(found, most)
        for same, kind in ((True, "two images of one person"), (False, "images of two people")):
            if not bool((listed.same == same).any()):
                raise DataError(f"{path} must hold {kind}: put the images of each person into a subfolder there.")
        return listed, found, torch.arange(len(found))
    listed = read_pairs(path)
    folders = [images] if images is not None else [path.parent / name for name in ("images", "lfw", ".")]
    for folder in folders:
        files = find_images(folder, listed.images) if folder.is_dir() else {}
        if files:
            break
    else:
        looked = " or ".join(map(str, folders))
        raise DataError(f"no image of {path}, such as {listed.images[0]}.jpg, is in {looked}. Give --images FOLDER.")
    missing = [Skipped(folder / name, "there is no such image") for name in listed.images if name not in files]
    _list_skipped(missing)
    there = [index for index, name in enumerate(listed.images) if name in files]
    names = [listed.images[index] for index in there]
    return listed, [Photo(files[name], name, name.partition("/")[0]) for name in names], torch.tensor(there)


def _only(pairs: Pairs, places: Tensor) -> Pairs:
    """The pairs of which both images are among those at ``places``, with the numbers that they have there."""
    rows = torch.full((len(pairs.images),), -1).index_copy_(0, places, torch.arange(len(places)))
    left, right = rows[pairs.left], rows[pairs.right]
    both = (left >= 0) & (right >= 0)
    if not bool(both.any()):
        raise DataError("no pair has two images that could be read.")
    _, fold = pairs.fold[both].unique(return_inverse=True)  # a fold may have lost all its pairs
    names = tuple(pairs.images[index] for index in places.tolist())
    return Pairs(names, left[both], right[both], pairs.same[both], fold)


@contextmanager
def _once() -> Iterator[None]:
    """Show a warning once, however many computations raise it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for message in dict.fromkeys(str(one.message) for one in caught):
        warnings.warn(message, stacklevel=4)


def _numbers(argument: str, text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ArgumentError(argument, f"must be numbers with commas between them, got {text!r}") from None
    for number in found:
        check_range(argument, number, 0, 1, open_low=True)
    return found


def _show_verification(
    embedder: Embedder, results: dict[str, Verification], calibration: Calibration, how: str
) -> None:
    _print(f"{embedder.name}: {how}")
    _print()
    grid = _table("", f"{calibration.level:.0%} interval")
    for found in results.values():
        error = "" if math.isnan(found.standard_error) else f" ± {found.standard_error:.2%}"
        grid.add_row(found.title, f"{found.value:.2%}{error}", f"[{found.interval[0]:.2%}, {found.interval[1]:.2%}]")
    console.print(grid, markup=False)
    if "accuracy" in results:
        _print(f"accuracy: {results['accuracy'].words}")
    _print(f"threshold: {calibration}")


def _table(first: str, last: str) -> Table:
    grid = Table(box=None, pad_edge=False, padding=(0, 2))
    grid.add_column(first, style="cyan", no_wrap=True)
    grid.add_column("value", justify="right", no_wrap=True)
    grid.add_column(last, justify="right", no_wrap=True)
    return grid


# ---------------------------------------------------------------------------------------------- identification


def identify(
    run: Run,
    gallery: Annotated[Path, typer.Option(metavar="DIR", help="images of known people, a subfolder each")],
    probes: Annotated[Path, typer.Option(metavar="DIR", help="images to look for, a subfolder a person")],
    distractors: Annotated[
        Path | None, typer.Option(metavar="DIR", help="images of nobody who is looked for, to hide the others among")
    ] = None,
    landmarks: Landmarks = None,
    average: Annotated[bool, typer.Option("--average", help="one mean feature for each person of the gallery")] = False,
    ranks: Annotated[str, typer.Option(help="ranks to report, with commas")] = "1,5,10",
    fpirs: Annotated[
        str, typer.Option(help="false positive rates for probes of unknown people, with commas")
    ] = "0.01,0.1",
    score: Score = "cosine",
    output: Results = None,
    flip: FlipOption = "add",
    size: Size = None,
    device: Device = "auto",
    batch_size: BatchSize = None,
    workers: Workers = 4,
) -> None:
    """Look for probes among known people: how often the right one is first, and whether unknown people are refused."""
    check_choice("score", score, KINDS)
    wanted = _ranks(ranks)
    rates = _numbers("fpirs", fpirs)
    settings = _Settings(landmarks, flip, size, device, batch_size, workers)
    known, looked = photos(gallery), photos(probes)
    hidden = [] if distractors is None else photos(distractors)
    if not {photo.person for photo in known} & {photo.person for photo in looked}:
        raise DataError(
            f"nobody in {probes} ({looked[0].person}, ...) is in {gallery} ({known[0].person}, ...): subfolders of one "
            "person must have one name."
        )
    enrolled = {photo.file.resolve() for photo in known}
    both = [photo.file for photo in looked if photo.file.resolve() in enrolled]
    if both:
        raise DataError(
            f"{len(both):,} probes are in the gallery, too, such as {both[0]}, and would find themselves: take them "
            "out of one of the two folders."
        )
    embedder = settings.embedder(run)
    made = settings.embed(embedder, [*known, *looked, *hidden], "embed")
    features, kept = made.combined(embedder.flip), made.kept
    ends = (len(known), len(known) + len(looked))
    parts = (kept < ends[0], (kept >= ends[0]) & (kept < ends[1]), kept >= ends[1])
    everyone = [photo.person for photo in (*known, *looked, *hidden)]
    entries, tried, others = (features[part] for part in parts)
    owners, people = ([everyone[index] for index in kept[part].tolist()] for part in parts[:2])
    if average:
        owners, entries = pool_templates(entries, owners, list(range(len(owners))))
    people_known = set(owners)
    strangers = sum(person not in people_known for person in people)
    result = identify_features(
        tried.to(embedder.device),
        people,
        entries.to(embedder.device),
        owners,
        others.to(embedder.device) if len(others) else None,
        ranks=wanted,
        fpirs=rates if strangers else (),
        kind=cast(Kind, score),
    )
    rows = _identification_rows(result)
    how = f"{score} scores, {FLIP_WORDS[embedder.flip]}" + (", one mean feature a person" if average else "")
    _print(
        f"{len(people):,} probes of {len(set(people)):,} people, {strangers:,} of them of unknown ones, against "
        f"{len(entries):,} entries of {len(people_known):,} people"
        + (f" and {len(others):,} distractors" if len(others) else "")
    )
    _print(f"{embedder.name}: {how}")
    _print()
    grid = _table("", "95% interval")
    for title, rate in rows.items():
        grid.add_row(title, f"{rate.value:.2%}", f"[{rate.low:.2%}, {rate.high:.2%}]")
    console.print(grid, markup=False)
    _print("intervals: bootstrap over the people of the probes")
    if not strangers:
        _print("open set: every probe is of somebody in the gallery, so that there is nobody to refuse")
    if output is not None:
        content = {
            "run": str(run),
            "fingerprint": embedder.fingerprint,
            "gallery": str(gallery),
            "probes": str(probes),
            "how": how,
            "results": {key: rate._asdict() for key, rate in rows.items()},
            "cmc": result.cmc.tolist(),
            "skipped": [str(one) for one in made.skipped],
        }
        _write_json(output, content)
        _print(f"Results: {output}")


def _ranks(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ArgumentError("ranks", f"must be whole numbers with commas between them, got {text!r}") from None
    check_range("ranks", min(found, default=0), 1)
    return sorted(set(found))


def _identification_rows(result: Identification) -> dict[str, Rate]:
    """The numbers of an identification by what they are called."""
    rows = {f"rank {k}": result.rank_k(k) for k in result.ranks}
    return rows | {f"DIR at FPIR {fpir:g}": result.dir_at_fpir(fpir) for fpir in result.fpirs}


# ----------------------------------------------------------------------------------------------------- gallery


@gallery_app.command("add")
def gallery_add(
    run: Run,
    file: GalleryFile,
    images: ImageList,
    name: Annotated[str | None, typer.Option(help="all images are of this person (default: by subfolder)")] = None,
    each: Annotated[bool, typer.Option("--each", help="keep every image as a template, not their mean")] = False,
    extend: Annotated[bool, typer.Option("--extend", help="add templates to people who are in it already")] = False,
    landmarks: Landmarks = None,
    flip: Annotated[
        str | None, typer.Option(help=f"what is done with the mirror image: {', '.join(FLIPS)} (default: add)")
    ] = None,
    size: Size = None,
    device: Device = "auto",
    batch_size: BatchSize = None,
    workers: Workers = 4,
) -> None:
    """Add people to a gallery, which is made where it is not there."""
    found = _gather(images)
    if name is not None:
        found = [photo._replace(person=name) for photo in found]
    gallery = Gallery.load(file) if file.exists() else None
    if gallery is not None and not extend:
        again = sorted({photo.person for photo in found if photo.person in gallery})
        if again:
            raise HypersphereError(
                f"{file} has {', '.join(again)} already: --extend adds templates, `hypersphere gallery remove` takes "
                "people out"
            )
    settings, embedder = _for_gallery(run, gallery, landmarks, flip, size, device, batch_size, workers)
    if gallery is None:
        gallery = Gallery(model=embedder.name, fingerprint=embedder.fingerprint, images=settings.images(embedder))
    made = settings.embed(embedder, found, "embed")
    features = made.combined(embedder.flip)
    rows: dict[str, list[int]] = {}
    for row, index in enumerate(made.kept.tolist()):
        rows.setdefault(found[index].person, []).append(row)
    for person, places in rows.items():
        gallery.enrol(person, features[places], average=not each, extend=extend)
    calibration = _calibration(run, settings, embedder)
    if calibration is not None:
        gallery.calibration, gallery.threshold = calibration, calibration.threshold
    file.parent.mkdir(parents=True, exist_ok=True)
    gallery.save(file)
    _print(f"Added {', '.join(rows)}" if len(rows) <= LISTED else f"Added {len(rows):,} people")
    missing = sorted({photo.person for photo in found} - rows.keys())
    if missing:
        errors.print(f"[bold yellow]warning:[/] no readable image of {escape(', '.join(missing))}", highlight=False)
    _print(f"{file}: {gallery}")


@gallery_app.command("remove")
def gallery_remove(
    file: GalleryFile, names: Annotated[list[str], typer.Argument(metavar="NAME", help="people to take out")]
) -> None:
    """Take people out of a gallery."""
    gallery = Gallery.load(file)
    for name in names:
        gallery.remove(name)
    gallery.save(file)
    _print(f"{file}: {gallery}")


@gallery_app.command("list")
def gallery_list(file: GalleryFile) -> None:
    """Show who is in a gallery."""
    gallery = Gallery.load(file)
    for name in gallery.names:
        _print(f"{name}  {len(gallery.templates(name))}")
    _print(f"{file}: {gallery}")


@gallery_app.command("search")
def gallery_search(
    run: Run,
    file: GalleryFile,
    images: ImageList,
    top: Annotated[int, typer.Option(help="how many of the nearest people to show")] = 1,
    threshold: Annotated[
        float | None, typer.Option(help="cosine above which somebody is known (default: the calibrated one)")
    ] = None,
    output: Results = None,
    landmarks: Landmarks = None,
    size: Size = None,
    device: Device = "auto",
    batch_size: BatchSize = None,
    workers: Workers = 4,
) -> None:
    """Say who is on images: a name where the score is above the threshold, else unknown."""
    check_range("top", top, 1)
    gallery = Gallery.load(file)
    if not len(gallery):
        raise HypersphereError(
            f"{file} has nobody in it: add people with `hypersphere gallery add {run} {file} IMAGES`"
        )
    found = _gather(images)
    settings, embedder = _for_gallery(run, gallery, landmarks, None, size, device, batch_size, workers)
    calibration = _calibration(run, settings, embedder) if threshold is None else None
    kept = gallery.threshold if gallery.images in ("", settings.images(embedder)) else None
    line = threshold if threshold is not None else calibration.threshold if calibration else kept
    if line is None:
        raise HypersphereError(
            f"there is no threshold yet that tells known from unknown people: `hypersphere verify {run} FOLDER` finds "
            "one from a folder with a subfolder a person, or give --threshold"
        )
    made = settings.embed(embedder, found, "search")
    nearest = gallery.search(made.combined(embedder.flip).to(embedder.device), top)
    grid = Table(box=None, pad_edge=False, padding=(0, 2))
    for title in ("image", "who", "score", "nearest"):
        grid.add_column(title, overflow="fold")
    rows = []
    for index, matches in zip(made.kept.tolist(), nearest, strict=True):
        photo, best = found[index], matches[0]
        known = best.score > line
        rows.append(
            {
                "image": str(photo.file),
                "name": best.name if known else None,
                "score": best.score,
                "known": known,
                "nearest": [match._asdict() for match in matches],
            }
        )
        near = ", ".join(f"{match.name} {match.score:.4f}" for match in matches) if top > 1 or not known else ""
        who = f"[bold green]{escape(str(best.name))}[/]" if known else "[yellow]unknown[/]"
        grid.add_row(escape(str(photo.file)), who, f"{best.score:.4f}", escape(near))
    # Where nobody looks, lines that other programs can read: a console breaks them at its width, which is 80 then.
    (console if console.is_terminal else Console(file=console.file, width=1000)).print(grid)
    rate = f" (FAR {calibration.target_far:g})" if calibration else ""
    _print(f"known above a cosine of {line:.4f}{rate}")
    if output is not None:
        _write_json(output, {"threshold": line, "images": rows, "skipped": [str(one) for one in made.skipped]})
        _print(f"Results: {output}")


def _for_gallery(
    run: Path, gallery: Gallery | None, landmarks: Path | None, flip: str | None, *rest: Any
) -> tuple[_Settings, Embedder]:
    """Settings and network of a gallery's features, which are made as its first ones were."""
    own = None if gallery is None else gallery.fingerprint.partition("+flip-")[2] or "none"
    if own is not None and flip not in (None, own):
        raise ArgumentError("flip", f"must be {own!r} as in the gallery, got {flip!r}")
    settings = _Settings(landmarks, own or flip or "add", *rest)
    embedder = settings.embedder(run)
    if gallery is not None and gallery.fingerprint != embedder.fingerprint:
        raise HypersphereError(
            f"the gallery holds features of {gallery.model or 'another model'} with other weights than {run} has now: "
            "use that run, or make a new gallery"
        )
    if gallery is not None:
        _same_images("the gallery's features are", gallery.images, settings.images(embedder))
    return settings, embedder


def _same_images(whose: str, kept: str, now: str) -> bool:
    """Whether images are prepared like those that something was made of, as far as is known; warns if not."""
    if kept in ("", now):
        return True
    warning = f"[bold yellow]warning:[/] {escape(whose)} of {escape(kept)}, but here of {escape(now)}: "
    errors.print(f"{warning}scores do not compare", highlight=False)
    return False


def _calibration(run: Path, settings: _Settings, embedder: Embedder) -> Calibration | None:
    """The threshold that ``verify`` kept with a run, if it is one for cosines of features of images like these."""
    file = RunFolder.open(run).path / CALIBRATION
    if not file.is_file():
        return None
    try:
        kept = json.loads(file.read_text())
        found, own = Calibration.from_dict(kept["calibration"]), kept["fingerprint"]
        images = str(kept.get("images", ""))
    except (ValueError, KeyError, TypeError) as error:
        raise HypersphereError(f"{file} cannot be read ({error}): delete it and verify again") from error
    if own != embedder.fingerprint or found.score != "cosine":
        return None
    return found if _same_images(f"the threshold in {file} is", images, settings.images(embedder)) else None
