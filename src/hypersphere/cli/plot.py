"""The ``hypersphere plot`` commands."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hypersphere import losses, recipe
from hypersphere.cli.options import Device, Run, RunDataRoot
from hypersphere.cli.terminal import errors
from hypersphere.errors import ArgumentError, HypersphereError, check_choice
from hypersphere.landscape import Landscape
from hypersphere.losses import LambdaAnnealer, MarginSoftmax
from hypersphere.margins import NoMargin
from hypersphere.runs import RunFolder, atomic_write, load_with_data
from hypersphere.runs.evaluation import outputs_of

plot_app = typer.Typer(
    help="Draw pictures for papers and slides: PNG, SVG or PDF, by the ending of the file name.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SELECTION = (
    "w-softmax",
    "a-softmax:m=2",
    "ga-softmax:g=linear,m=2",
    "cosface",
    "arcface",
    "combined",
    "sphereface-r:version=v2",
)

OPERATOR_PARTS = {
    "all": ("plot_operators", "operators.png"),
    "geometry": ("plot_operator_geometry", "operator_geometry.png"),
    "field": ("plot_operator_field", "operator_field.png"),
}
"""What ``plot operators`` can draw: the function, and the file where none is named."""

Output = Annotated[Path | None, typer.Option("--output", "-o", help="file to write: .png, .svg or .pdf")]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="option of every named loss that has it, e.g. m=0.3"),
]
Norm = Annotated[float, typer.Option(help="feature norm at which losses that keep it are drawn")]


@plot_app.command("margins")
def plot_margins(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="LOSS", help="names of losses, each with its own options if need be: a-softmax:m=4"),
    ] = None,
    output: Output = None,
    option: Options = None,
    weight: Annotated[
        float | None, typer.Option("--lambda", help="weight of the plain cosine: draws the annealed curves, too")
    ] = None,
    norm: Norm = 30.0,
) -> None:
    """Draw target functions, logits and decision boundaries of losses, with their angular margins."""
    plots = _plots()
    heads = {}
    for label, head in _heads(names or SELECTION, option or ()):
        heads[label] = head if weight is None else plots.annealed(head, weight)
    _write(plots.margins(heads, norm=norm), output or Path("margins.png"))


@plot_app.command("gradients")
def plot_gradients(output: Output = None) -> None:
    """Draw how the gradients "exact", "cgd" and "caffe" differ, for A-Softmax and ArcFace."""
    _write(_plots().gradients(), output or Path("gradients.png"))


@plot_app.command("schedule")
def plot_schedule(
    name: Annotated[str, typer.Argument(metavar="LOSS", help="a loss, with options: a-softmax:m=3")] = "a-softmax",
    output: Output = None,
    steps: Annotated[int, typer.Option(help="last training step of the picture")] = 20_000,
    base: Annotated[float, typer.Option(help="the annealer's start value")] = 1000.0,
    gamma: Annotated[float, typer.Option(help="speed of its decay per step")] = 0.12,
    power: Annotated[float, typer.Option(help="exponent of its decay")] = 1.0,
    minimum: Annotated[float, typer.Option(help="its lowest value")] = 5.0,
    norm: Norm = 30.0,
) -> None:
    """Draw an annealer's weight over the training steps and the angular margin in force."""
    ((_, head),) = _heads([name], ())
    annealer = LambdaAnnealer(base=base, gamma=gamma, power=power, minimum=minimum)
    _write(_plots().schedule(head, annealer, steps, norm=norm), output or Path("schedule.png"))


@plot_app.command("features")
def plot_features(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="folders of runs, side by side")],
    output: Output = None,
) -> None:
    """Draw the test features of runs on the circle or sphere, and the angles of pairs of them."""
    folders = [RunFolder.open(run).path for run in runs]
    default = folders[0] / "features.png" if len(folders) == 1 else Path("features.png")
    _write(_plots().features(folders), output or default)


@plot_app.command("hardness")
def plot_hardness(
    run: Run,
    output: Output = None,
    device: Device = "auto",
    data_root: RunDataRoot = None,
) -> None:
    """Draw how hard the test samples of a run are, against confidence and norm, and the cosines between classes."""
    folder = RunFolder.open(run)
    system, data = load_with_data(run, data_root, device=device)
    figure = _plots().hardness(outputs_of(system, data), data.class_names, str(folder.facts()["name"]))
    _write(figure, output or folder.path / "hardness.png")


@plot_app.command("energy")
def plot_energy(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="folders of runs; those of one name are one line in its band")
    ],
    output: Output = None,
) -> None:
    """Draw the energy of the layers of runs over the training steps (runs with evaluate.energy=true)."""
    folders = [RunFolder.open(run).path for run in runs]
    default = folders[0] / "energy.png" if len(folders) == 1 else Path("energy.png")
    _write(_plots().energy_curves(folders), output or default)


@plot_app.command("dynamics")
def plot_dynamics(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="folders of runs; those that differ in the seed alone are one line"),
    ],
    output: Output = None,
    layers: Annotated[bool, typer.Option("--layers", help="also the energy of every layer on its own")] = False,
) -> None:
    """Draw energy, test error and, of orthogonal training, the orthogonality error over the training steps."""
    folders = [RunFolder.open(run).path for run in runs]
    default = folders[0] / "dynamics.png" if len(folders) == 1 else Path("dynamics.png")
    _write(_plots().dynamics(folders, layers=layers), output or default)


@plot_app.command("landscape")
def plot_landscape(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="folders of runs, side by side")],
    output: Output = None,
    dimensions: Annotated[int, typer.Option(help="1 or 2 random directions")] = 2,
    points: Annotated[int, typer.Option(help="points along each direction")] = 21,
    span: Annotated[float, typer.Option(help="how far to go, in lengths of the filters")] = 1.5,
    distribution: Annotated[str, typer.Option(help="of the directions: gaussian or uniform")] = "gaussian",
    normalise: Annotated[str, typer.Option(help="lengths of the directions: by filter, layer or none")] = "filter",
    split: Annotated[str, typer.Option(help="test or train images")] = "test",
    images: Annotated[int | None, typer.Option(help="number of images, evenly from the split (default: all)")] = None,
    head: Annotated[bool, typer.Option(help="move the weights of the head, too")] = True,
    seed: Annotated[int, typer.Option(help="seed of the directions")] = 0,
    values: Annotated[Path | None, typer.Option(help="also write the numbers: .npz or .json")] = None,
    device: Device = "auto",
    data_root: RunDataRoot = None,
) -> None:
    """Draw loss and error of runs in random directions around their weights, all in the same scale."""
    plots = _plots()
    if values is not None and values.suffix not in (".npz", ".json"):
        raise ArgumentError("values", f"must end in .npz or .json, got {values.name!r}")
    folders = [RunFolder.open(run) for run in runs]
    names = [str(folder.facts()["name"]) for folder in folders]
    found = []
    bar = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
    )
    with bar:
        for folder, name in zip(folders, names, strict=True):
            task = bar.add_task(name, total=points**dimensions)
            found.append(
                plots.run_landscape(
                    *load_with_data(folder.path, data_root, device=device),
                    split=split,
                    images=images,
                    head=head,
                    progress=lambda task=task: bar.advance(task),
                    dimensions=dimensions,
                    points=points,
                    span=span,
                    distribution=distribution,
                    normalise=None if normalise == "none" else normalise,
                    seed=seed,
                )
            )
    if values is not None:
        _write_values(found, folders, values)
    default = folders[0].path / "landscape.png" if len(folders) == 1 else Path("landscape.png")
    _write(plots.landscapes(found, names), output or default)


@plot_app.command("operators")
def plot_operators(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="OPERATOR", help="names of operators (default: all)")
    ] = None,
    output: Output = None,
    part: Annotated[str, typer.Option(help=f"what to draw: {', '.join(OPERATOR_PARTS)}")] = "all",
) -> None:
    """Draw decoupled operators: magnitudes, angular functions, and what they do to inputs in the plane."""
    check_choice("part", part, tuple(OPERATOR_PARTS))
    function, default = OPERATOR_PARTS[part]
    _write(getattr(_plots(), function)(names or None), output or Path(default))


@plot_app.command("confusion")
def plot_confusion(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="folders of evaluated runs, side by side")],
    output: Output = None,
    hide_diagonal: Annotated[
        bool, typer.Option("--hide-diagonal", help="leave right answers out: colours are those of mistakes")
    ] = False,
    measure: Annotated[
        str, typer.Option(help="shares of each class, or cosines: mean cosines of features of two classes")
    ] = "shares",
) -> None:
    """Draw which classes runs take for which in the test split, in percent of each class."""
    folders, default = _folders(runs, "confusion.png")
    _write(_plots().confusion(folders, hide_diagonal=hide_diagonal, measure=measure), output or default)


@plot_app.command("class-size")
def plot_class_size(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="folders of evaluated runs whose classes differ in size")
    ],
    output: Output = None,
) -> None:
    """Draw norm and bias of the class vectors of runs against the number of training images (data.imbalance)."""
    folders, default = _folders(runs, "class_size.png")
    _write(_plots().class_size(folders), output or default)


@plot_app.command("learned")
def plot_learned(
    run: Run,
    output: Output = None,
    layer: Annotated[
        list[str] | None, typer.Option("--layer", help="name of a layer, or a pattern such as 'body.*' (default: all)")
    ] = None,
    bins: Annotated[int, typer.Option(help="number of bins")] = 30,
) -> None:
    """Draw histograms of the steepness and the radius that the layers of a run learned."""
    folders, default = _folders([run], "learned.png")
    _write(_plots().learned(folders[0], layers=layer or (), bins=bins), output or default)


@plot_app.command("recognition")
def plot_recognition(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="folders of evaluated runs, a line each")],
    output: Output = None,
    split: Annotated[str, typer.Option(help="unseen classes, test, or auto: unseen where all runs have them")] = "auto",
    gallery: Annotated[int, typer.Option(help="samples of each class that are enrolled; the others are probes")] = 1,
    samples: Annotated[int, typer.Option(help="most samples of which all pairs are compared")] = 4000,
) -> None:
    """Draw CMC and ROC curves of the features of runs: identification by rank, verification by false accept rate."""
    folders, default = _folders(runs, "recognition.png")
    figure = _plots().recognition(folders, split=split, gallery=gallery, samples=samples)
    _write(figure, output or default)


@plot_app.command("weighted-energy")
def plot_weighted_energy(
    betas: Annotated[
        list[float] | None, typer.Argument(metavar="BETA", help="weights of the heavy points (default: 1 2 4 10)")
    ] = None,
    output: Output = None,
    points: Annotated[int, typer.Option(help="number of points on the sphere")] = 10,
    heavy: Annotated[int, typer.Option(help="how many of them are heavy")] = 1,
    s: Annotated[float, typer.Option(help="exponent of the energy")] = 2.0,
    steps: Annotated[int, typer.Option(help="number of steps")] = 300,
    lr: Annotated[float, typer.Option(help="step size")] = 4e-3,
    seed: Annotated[int, typer.Option(help="of the start")] = 0,
) -> None:
    """Draw the ways of points on the sphere under gradient descent of the weighted energy."""
    plots = _plots()
    figure = plots.weighted_energy(
        betas or (1.0, 2.0, 4.0, 10.0), points=points, heavy=heavy, s=s, steps=steps, lr=lr, seed=seed
    )
    _write(figure, output or Path("weighted_energy.png"))


def _folders(runs: Sequence[Path], name: str) -> tuple[list[Path], Path]:
    """Folders of runs, and the file where none is named: in the folder of a single run, here for several."""
    folders = [RunFolder.open(run).path for run in runs]
    return folders, folders[0] / name if len(folders) == 1 else Path(name)


def _plots() -> types.ModuleType:
    """The drawing functions; matplotlib is slow to import and no other command needs it."""
    try:
        return import_module("hypersphere.plot")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        raise HypersphereError(
            'pictures need matplotlib, which is not installed: pip install "hypersphere[workbench]"'
        ) from error


def _write_values(found: Sequence[Landscape], folders: Sequence[RunFolder], file: Path) -> None:
    """Coordinates, and of every quantity an array ``(runs, points, ...)``."""
    arrays = {name: np.stack([one.values[name].numpy() for one in found]) for name in found[0].values}
    arrays |= {"coordinates": found[0].coordinates.numpy(), "runs": np.array([folder.path.name for folder in folders])}
    arrays["seed"] = np.array(found[0].seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".npz":
        np.savez(file, **arrays)  # type: ignore[arg-type]
    else:
        content = {name: array.astype(object) for name, array in arrays.items()}
        for name in found[0].values:
            content[name][~np.isfinite(arrays[name])] = None  # JSON has no infinity
        with atomic_write(file) as text:
            json.dump({name: array.tolist() for name, array in content.items()}, text)
    typer.echo(f"Wrote {file}")


def _write(figure: Any, output: Path) -> None:
    typer.echo(f"Wrote {_plots().save(figure, output)}")


def _heads(names: Sequence[str], shared: Sequence[str]) -> list[tuple[str, MarginSoftmax]]:
    """Label and head of each ``NAME`` or ``NAME:key=value,key=value``, with shared options where a loss has them."""
    for option in shared:
        if "=" not in option:
            raise ArgumentError("option", f"must be KEY=VALUE, got {option!r}")
    found: dict[str, MarginSoftmax] = {}
    used: set[str] = set()
    for spec in names:
        name, _, text = spec.partition(":")
        entry = losses.losses[name]
        own = re.split(r",(?=\w+=)", text) if text else []
        known = {*(o.name for o in entry.options), *losses.losses.option_aliases}
        common = [option for option in shared if option.partition("=")[0] in known]
        used.update(common)
        given = [*common, *own]
        head = _head(entry.name, given)
        label = _label(entry.name, head, given)
        if label in found:
            raise ArgumentError("losses", f"must differ, got {spec!r} twice")
        found[label] = head
    for option in shared:
        if option not in used:
            raise ArgumentError("option", f"{option!r} is of none of the losses {', '.join(names)}")
    return list(found.items())


def _head(name: str, options: Sequence[str]) -> MarginSoftmax:
    """A head of two classes in the plane; options are checked as those of a recipe."""
    plan = recipe.load("digits-softmax", [f"loss.name={name}", *(f"loss.{option}" for option in options)])
    head: MarginSoftmax = plan.build(losses.losses, ("loss",), 2, 2)
    if type(head).forward is not MarginSoftmax.forward:
        raise ArgumentError("losses", f"must have a target function psi(theta): {name!r} compares pairs of features")
    return head


def _label(name: str, head: MarginSoftmax, options: Sequence[str]) -> str:
    """The name with the given options and the margins."""
    shown = dict(option.split("=", 1) for option in options)
    if type(head.spec.psi) is not NoMargin:  # a subclass says that the margin is elsewhere
        for key in head.margin_names:
            size = getattr(head, key)
            if isinstance(size, float):
                shown.setdefault(key, f"{size:g}")
    return f"{name} ({', '.join(f'{key}={value}' for key, value in shown.items())})" if shown else name
