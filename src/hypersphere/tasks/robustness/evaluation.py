"""How a model stands up to attacks, and whether the answer can be believed.

A model can look robust because its gradients lead attacks astray ("gradient masking"), not because small changes leave
its answers as they are. Accuracy under attack is therefore measured together with what gives masking away: attacks that
take their gradients elsewhere or need none, more steps, another loss, and budgets under which nothing can be right.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hypersphere.attacks import Attack, DeepFool, Predict, attacked, attacks, gradients, lengths
from hypersphere.errors import ArgumentError, check_range
from hypersphere.evaluate import Metric, Outputs, evaluations
from hypersphere.metrics.processes import Group, batches, gathered, on_first

Bounded = Literal["fgsm", "bim", "pgd", "square"]
"""Attacks that have a budget."""
FACTORS = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Budgets of the curve, in multiples of the one that counts."""
MORE = 5
"""So many times the steps, to see whether they were enough."""
SHOWN = 8
"""Images that are kept for a picture."""
DRAWN = 1000
"""Most features that are kept for a picture."""
TOLERANCE = 0.02
"""Differences of accuracies up to this are taken for noise."""


class Check(NamedTuple):
    """What one check for masking measures.

    Attributes:
        title: What a large value means, in a few words.
        sign: Above this the value is a sign of masking.
        good: What it means if it is not; ``{}`` is the value in percent.
        bad: What it means if it is.
    """

    title: str
    sign: float
    good: str
    bad: str


CHECKS: dict[str, Check] = {
    "masking_transfer": Check(
        "other model's gradients are stronger",
        TOLERANCE,
        "no attack is stronger with another model's gradients than with its own ({} points)",
        "an attack is stronger with another model's gradients than with its own, by {} points: its own lead astray",
    ),
    "masking_gradient_free": Check(
        "no gradients are stronger",
        TOLERANCE,
        "random search without gradients is no stronger than following them ({} points)",
        "random search without gradients is stronger than following them, by {} points",
    ),
    "masking_single_step": Check(
        "one step is stronger than many",
        TOLERANCE,
        "many small steps are no weaker than one large one ({} points)",
        "many small steps are weaker than one large one, by {} points: gradients nearby are of no use",
    ),
    "masking_fgsm": Check(
        "strongest attack beyond one step",
        0.1,
        "one large step finds most of what there is: the strongest attack takes {} points more",
        "one large step misses much of what there is, the strongest attack takes {} points more: its accuracy says "
        "little on its own",
    ),
    "masking_steps": Check(
        "more steps are stronger",
        TOLERANCE,
        f"{MORE} times the steps take {{}} points more: there were enough",
        f"{MORE} times the steps take {{}} points more: there were too few to believe the accuracy",
    ),
    "masking_loss": Check(
        "margin is stronger than cross-entropy",
        0.05,  # the margin is a little stronger with any model
        "climbing the margin of the logits is hardly stronger than climbing the cross-entropy ({} points)",
        "climbing the margin of the logits is stronger than climbing the cross-entropy, by {} points: the latter is "
        "saturated",
    ),
    "masking_zero_gradients": Check(
        "images with zero gradients",
        TOLERANCE,
        "{} % of the images have a gradient of exactly zero",
        "{} % of the images have a gradient of exactly zero: attacks by gradient do not change them",
    ),
    "masking_rises": Check(
        "accuracy rises with the budget",
        TOLERANCE,
        "accuracy falls as the budget grows (largest rise: {} points)",
        "accuracy rises by {} points as the budget grows, which it cannot: attacks fail",
    ),
    "masking_unbounded": Check(
        "right under any change",
        TOLERANCE,
        "with a budget that allows any image, {} % stay right",
        "with a budget that allows any image, {} % stay right, and none should: attacks fail",
    ),
}
"""The checks by metric."""


def explain(metrics: Mapping[str, float]) -> list[tuple[bool, str]]:
    """Every check for masking that was made: whether it is a sign of masking, and what it says in words.

    Example:
        >>> explain({"masking_unbounded": 0.0})
        [(False, 'with a budget that allows any image, 0.0 % stay right')]
    """
    found = []
    for name, check in CHECKS.items():
        value = metrics.get(name, math.nan)
        if math.isfinite(value):
            bad = value > check.sign
            found.append((bad, (check.bad if bad else check.good).format(f"{100 * value:.1f}")))
    return found


TITLES = {"fgsm": "FGSM", "bim": "BIM", "pgd": "PGD", "square": "Square"}
"""What attacks are called in tables and pictures."""


def _under(name: str, title: str, what: str, *, detail: bool = False) -> Metric:
    words = f"Share of test images that get the right class after {what}. Higher is better."
    return Metric(f"accuracy_{name}", title, unit="%", better="higher", help=words, detail=detail)


@evaluations.register(
    "attacks",
    metrics=(
        _under("natural", "Natural accuracy", "nothing: the images that are attacked, as they are", detail=True),
        _under("fgsm", "Under FGSM", "one step along the sign of the gradient"),
        _under("bim", "Under BIM", "many small steps along the sign of the gradient"),
        _under("pgd", "Under PGD", "many small steps along the sign of the gradient from a random start"),
        _under("square", "Under Square", "random squares that are kept where they help, without gradients"),
        _under("strongest", "Under any attack", "the strongest of all attacks tried, with and without gradients"),
        *(
            _under(
                f"transfer_{name}",
                f"Under {title}, transfer",
                f"{title} on the gradients of another model",
                detail=True,
            )
            for name, title in TITLES.items()
        ),
        Metric(
            "masking_signs",
            "Signs of masking",
            form=".0f",
            better="lower",
            help="How many checks say that gradients lead attacks astray, so that the model looks more robust than it "
            "is.",
        ),
        *(
            Metric(
                name,
                f"Masking: {check.title}",
                unit="%",
                better="lower",
                help=f"A check for misleading gradients; above {check.sign:.0%} it is a sign of them.",
                detail=True,
            )
            for name, check in CHECKS.items()
        ),
        Metric(
            "deepfool_*",
            "Median smallest change, {}",
            better="higher",
            help="Median size ({}) of the smallest change that DeepFool finds for images that are classified rightly. "
            "Higher is more robust.",
            detail=True,
        ),
    ),
    shares=True,
)
def robustness(
    outputs: Outputs,
    *,
    attacks: tuple[Bounded, ...] = ("fgsm", "bim", "pgd"),
    eps: float = 8 / 255,
    steps: int = 20,
    strengths: tuple[float, ...] | None = None,
    images: int = 1000,
    batch_size: int = 500,
    source: str | None = None,
    masking: bool = True,
    queries: int = 300,
    deepfool: int = 200,
) -> dict[str, float]:
    """Accuracy under attacks, and checks of whether it can be believed; images only.

    ``accuracy_NAME`` is the accuracy under the attack of that name, ``accuracy_natural`` that on the same images as
    they are, ``accuracy_transfer_NAME`` that under attacks made for ``source``. ``masking_...`` are the checks
    (:func:`explain` says them in words), ``masking_signs`` how many of them speak for masking. ``accuracy_strongest``
    is the lowest accuracy under any attack of that budget. ``deepfool_l2`` and ``deepfool_linf`` are medians of the
    smallest change that DeepFool finds for images that are classified rightly; those that it does not fool count as
    infinitely far, and there is no median if they are more than half.

    Args:
        outputs: What the model puts out.
        attacks: Names of attacks.
        eps: Budget, in units of the pixels' range.
        steps: Of ``bim`` and ``pgd``.
        strengths: Budgets of the curve; ``None``: multiples of ``eps`` from 0 to 4.
        images: Number of test images, evenly from the split; 0 takes all.
        batch_size: Images at a time.
        source: Folder of a run on the same data, whose model makes transfer attacks; or a recipe and changes, such as
            ``"cifar10-robust seed=100"``, which is trained first.
        masking: Make the checks.
        queries: Squares that ``square`` tries, which needs no gradients.
        deepfool: Number of images for DeepFool, evenly from those; 0 leaves it out.
    """
    check_range("images", images, 0)
    check_range("batch_size", batch_size, 1)
    check_range("queries", queries, 0)
    check_range("deepfool", deepfool, 0)
    for strength in strengths or ():
        check_range("strengths", strength, 0)
    chosen, labels = _samples(outputs, images)
    predict = _required(outputs.predict)
    run = _Measure(predict, chosen, labels, eps, steps, queries, batch_size, outputs.seed, outputs.group)
    found = {"accuracy_natural": run.accuracy(chosen)}
    adversarial: dict[str, Tensor] = {}
    for name in attacks:
        adversarial[name] = run.attacked(name)
        found[f"accuracy_{name}"] = run.accuracy(adversarial[name])
    curves = _curves(run, attacks, strengths or tuple(eps * factor for factor in FACTORS), found)
    if source is not None:
        found |= _transfers(run, attacks, source, outputs)
    if masking:
        found |= _checks(run, attacks, curves, found)
    if deepfool:
        found |= _deepfool(run, deepfool, outputs.artefacts)
    _keep(outputs, run, curves, adversarial, found)
    return found


class _Measure:
    """A model, images and an attack's constants: what every measurement here has in common."""

    def __init__(
        self,
        predict: Predict,
        images: Tensor,
        labels: Tensor,
        eps: float,
        steps: int,
        queries: int,
        batch_size: int,
        seed: int,
        group: Group | None,
    ) -> None:
        self.predict, self.images, self.labels = predict, images, labels
        self.eps, self.steps, self.queries, self.batch_size, self.seed = eps, steps, queries, batch_size, seed
        self.group = group

    def attack(self, name: str, **options: object) -> Attack:
        """An attack with the constants that it takes."""
        known = {option.name for option in attacks[name].options}
        shared = {"eps": self.eps, "steps": self.queries if name == "square" else self.steps} | options
        return attacks.create(name, **{key: value for key, value in shared.items() if key in known})

    def attacked(self, name: str, *, predict: Predict | None = None, **options: object) -> Tensor:
        """Adversarial images, by the gradients of another model if it is given."""
        attack, predict = self.attack(name, **options), predict or self.predict
        return attacked(
            attack,
            predict,
            self.images,
            self.labels,
            batch_size=self.batch_size,
            seed=self.seed,
            group=self.group,
        )

    def in_batches(self, function: Callable[[slice], Tensor], total: int) -> Tensor:
        """What a function finds of each batch of ``total`` rows, each process calling it for some of them."""
        return gathered([function(rows) for rows in batches(total, self.batch_size, self.group)], self.group)

    @torch.no_grad()
    def classes(self, images: Tensor) -> Tensor:
        """Predicted classes."""
        return self.in_batches(lambda rows: self.predict(images[rows]).argmax(1), len(images))

    def accuracy(self, images: Tensor) -> float:
        """Share of right classes."""
        return float((self.classes(images) == self.labels).double().mean())


def _required(function: Predict | None) -> Predict:
    if function is None:
        raise ArgumentError("outputs", "must have a function from images to logits, as those of the trainer do")
    return function


def _samples(outputs: Outputs, count: int) -> tuple[Tensor, Tensor]:
    """Test images in [0, 1], evenly from the split, and their labels."""
    stored = outputs.images
    if stored is None or stored.dtype != torch.uint8 or stored.dim() != 4:
        raise ArgumentError("attacks", "needs test images that are one tensor of bytes; other samples have no range")
    places = _evenly(len(stored), count or len(stored))
    labels = outputs.labels[places.to(outputs.labels.device)]
    return stored[places.to(stored.device)].to(labels.device).float() / 255, labels


def _evenly(total: int, limit: int) -> Tensor:
    """At most ``limit`` places spread over all: a split may be sorted by class."""
    return torch.linspace(0, total - 1, min(total, limit), dtype=torch.float64).long()


def _curves(
    run: _Measure, names: tuple[Bounded, ...], strengths: tuple[float, ...], found: Mapping[str, float]
) -> dict[str, Tensor]:
    """Accuracy under every attack by budget; what is known already is not measured again."""
    strengths = tuple(sorted({*strengths, 0.0, run.eps}))
    known = {0.0: found["accuracy_natural"]}
    curves = {"eps": torch.tensor(strengths, dtype=torch.float64)}
    for name in names:
        own = known | {run.eps: found[f"accuracy_{name}"]}
        values = [own[e] if e in own else run.accuracy(run.attacked(name, eps=e)) for e in strengths]
        curves[name] = torch.tensor(values, dtype=torch.float64)
    return curves


def _checks(
    run: _Measure, names: tuple[Bounded, ...], curves: Mapping[str, Tensor], found: Mapping[str, float]
) -> dict[str, float]:
    """The checks for masking, and how many of them speak for it."""
    pgd = found["accuracy_pgd"] if "pgd" in names else run.accuracy(run.attacked("pgd"))
    more = run.accuracy(run.attacked("pgd", steps=MORE * run.steps))
    margin = run.accuracy(run.attacked("pgd", loss="margin"))
    square = found["accuracy_square"] if "square" in names else run.accuracy(run.attacked("square"))
    by_gradient = min([pgd, *(found[f"accuracy_{name}"] for name in names if name != "square")])
    transfers = {n: found[key] for n in names if (key := f"accuracy_transfer_{n}") in found}
    result = {
        "accuracy_square": square,
        "accuracy_strongest": min(by_gradient, more, margin, square, *transfers.values()),
        "masking_gradient_free": by_gradient - square,
        "masking_steps": pgd - more,
        "masking_loss": pgd - margin,
        "masking_zero_gradients": _zero_gradients(run),
        "masking_unbounded": run.accuracy(run.attacked("pgd", eps=1.0)),
    }
    if "fgsm" in names:
        result["masking_single_step"] = pgd - found["accuracy_fgsm"]
        result["masking_fgsm"] = found["accuracy_fgsm"] - result["accuracy_strongest"]
    if transfers:
        result["masking_transfer"] = max(found[f"accuracy_{n}"] - value for n, value in transfers.items())
    # One step overshoots when it is large, and that says nothing.
    rises = [rise for name in names if name != "fgsm" for rise in curves[name].diff().tolist()]
    if rises:
        result["masking_rises"] = max(0.0, *rises)
    return result | {"masking_signs": float(sum(bad for bad, _ in explain(result)))}


def _zero_gradients(run: _Measure) -> float:
    """Share of the images whose loss has no slope at all."""

    def flat(rows: slice) -> Tensor:
        return (gradients(run.predict, run.images[rows], run.labels[rows])[0].flatten(1) == 0).all(1)

    return float(run.in_batches(flat, len(run.images)).double().mean())


def _deepfool(run: _Measure, count: int, artefacts: dict[str, Tensor]) -> dict[str, float]:
    """Medians of the smallest changes of images that are classified rightly, in two norms; all of them are kept."""
    chosen = _evenly(len(run.labels), count).to(run.labels.device)
    images, labels = run.images[chosen], run.labels[chosen]
    right = run.classes(images) == labels
    images, labels = images[right], labels[right]
    if not len(images):
        return {}
    # A copy of an image for each class is in memory.
    size = max(1, run.batch_size // 5)
    changed = attacked(DeepFool(), run.predict, images, labels, batch_size=size, seed=run.seed, group=run.group)
    missed = run.classes(changed) == labels  # where there is no slope the change is 0, which must not look small
    result = {}
    norms: tuple[Literal["l2", "linf"], ...] = ("l2", "linf")
    for norm in norms:
        sizes = lengths(changed - images, norm).flatten().masked_fill(missed, torch.inf).sort().values
        artefacts[f"attacks/deepfool_{norm}"] = sizes.float().cpu()
        if math.isfinite(median := float(sizes.median())):
            result[f"deepfool_{norm}"] = median
    return result


@torch.no_grad()
def _keep(
    outputs: Outputs,
    run: _Measure,
    curves: Mapping[str, Tensor],
    adversarial: Mapping[str, Tensor],
    found: Mapping[str, float],
) -> None:
    """Leave for pictures: curves, checks, features and a few images, natural and under the strongest attack."""
    kept = {f"curve_{name}": curve for name, curve in curves.items()}
    kept["checks"] = torch.tensor([found.get(name, math.nan) for name in CHECKS], dtype=torch.float64)
    for name in adversarial:
        if (value := found.get(f"accuracy_transfer_{name}")) is not None:
            kept[f"transfer_{name}"] = torch.tensor([run.eps, value])
    if adversarial:
        strongest = min(adversarial, key=lambda name: found[f"accuracy_{name}"])
        changed, part = adversarial[strongest], _evenly(len(run.labels), DRAWN).to(run.labels.device)
        natural_classes, classes = run.classes(run.images), run.classes(changed)
        if outputs.features_of is not None:
            kept["natural"] = _features(outputs.features_of, run.images[part], run)
            kept["adversarial"] = _features(outputs.features_of, changed[part], run)
            kept["labels"], kept["fooled"] = run.labels[part], (classes != run.labels)[part]
        # First those that were right and are not any more.
        telling = (natural_classes == run.labels).int() + (classes != run.labels).int()
        shown = telling.argsort(descending=True, stable=True)[:SHOWN]
        kept["images"] = torch.stack([run.images[shown], changed[shown]]).mul(255).round().byte()
        kept["classes"] = torch.stack([natural_classes[shown], classes[shown]])
    if outputs.data is not None:
        kept["names"] = torch.frombuffer(bytearray("\n".join(outputs.data.class_names).encode()), dtype=torch.uint8)
    outputs.artefacts.update({f"attacks/{name}": value.cpu().contiguous() for name, value in kept.items()})


def _features(features_of: Predict, images: Tensor, run: _Measure) -> Tensor:
    return run.in_batches(lambda rows: features_of(images[rows]), len(images)).float()


def _transfers(run: _Measure, names: tuple[Bounded, ...], source: str, outputs: Outputs) -> dict[str, float]:
    """Accuracy under the attacks that are made for another model."""
    # Late: a trained run is loaded without the trainer.
    from hypersphere.train.beside import names_recipe  # noqa: PLC0415

    def measured(group: Group | None) -> dict[str, float]:
        other, here = source_predict(source, outputs), copy.copy(run)
        here.group = group
        return {f"accuracy_transfer_{name}": here.accuracy(here.attacked(name, predict=other)) for name in names}

    # One that is trained for this is known to the process that trained it.
    return on_first(lambda: measured(None), run.group) if names_recipe(source) else measured(run.group)


def source_predict(source: str | Path, outputs: Outputs) -> Predict:
    """The function from images to logits of another run's last checkpoint, or of a recipe that is trained for it.

    Args:
        source: Folder of the run, or name of the recipe and changes.
        outputs: Of the model that will be tested, which says what the images are and where.
    """
    data = outputs.data
    # Late: a trained run is loaded without the trainer.
    from hypersphere.train.beside import other  # noqa: PLC0415

    system = other(source, data, outputs.labels.device, option="source")
    if data is not None and (data.train.shape, data.class_names) != (system.shape, system.classes):
        name = system.recipe.data.name
        raise ArgumentError("source", f"must be a run on the same images and classes, got {name!r}")
    return system.scores
