"""The registry of evaluations, and how each of them says what its metrics are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

from hypersphere.errors import ArgumentError
from hypersphere.evaluate.outputs import Outputs
from hypersphere.metrics.processes import agreed, on_first
from hypersphere.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Metric:
    """What a metric is called and how it is shown, declared by the evaluation that computes it.

    Tables, curves, rows of results and reports read it; a metric that nobody declared is shown under its own name.

    Attributes:
        name: Name in what the evaluation returns. A ``*`` stands for anything: ``"accuracy/*"`` declares a family of
            metrics, and the places of ``{}`` in the texts take what the stars stood for.
        title: Heading of its column.
        unit: ``"%"`` for a share, which is shown times 100; ``"°"`` and so on follow the number.
        form: Format of the number; by default two decimals for shares and four significant digits for others.
        better: Which direction is better, if any: the best value of a column is marked.
        curve: Title of its curve over the training steps; by default the title with the unit.
        help: What it says, in a sentence or two.
        detail: Shown among the details in place of a column of its own.

    Example:
        >>> Metric("recall", "Recall", unit="%", better="higher").text(0.25)
        '25.00%'
    """

    name: str
    title: str
    unit: str = ""
    form: str = ""
    better: Literal["higher", "lower"] | None = None
    curve: str = ""
    help: str = ""
    detail: bool = False

    def __post_init__(self) -> None:
        if self.form and (self.unit == "%") != self.form.endswith("%"):
            raise ArgumentError("form", f"must end in % for shares and for nothing else, got {self.form!r}")
        object.__setattr__(self, "form", self.form or (".2%" if self.unit == "%" else ".4g"))
        object.__setattr__(self, "curve", self.curve or self.title + (f" ({self.unit})" if self.unit else ""))

    @property
    def scale(self) -> int:
        """What a value is multiplied by to be in :attr:`unit`."""
        return 100 if self.unit == "%" else 1

    def text(self, value: float) -> str:
        """A value as people read it."""
        return f"{value:{self.form}}{'' if self.unit == '%' else self.unit}"

    def of(self, name: str) -> Metric | None:
        """This metric under a name that it is the pattern of, or ``None``.

        Example:
            >>> Metric("recall/*", "Recall of class {}").of("recall/3").title
            'Recall of class 3'
        """
        found = re.fullmatch("(.*)".join(map(re.escape, self.name.split("*"))), name)
        if found is None:
            return None
        stars = [part.replace("_", " ") for part in found.groups()]

        def filled(text: str) -> str:
            parts = text.split("{}")
            return parts[0] + "".join(star + part for star, part in zip(stars, parts[1:], strict=False))

        return replace(self, name=name, title=filled(self.title), curve=filled(self.curve), help=filled(self.help))


class Evaluations(Registry[dict[str, float]]):
    """Evaluations by name, with the metrics that they declare."""

    def __init__(self, members: tuple[str, ...] = ()) -> None:
        super().__init__("evaluation", positional=("outputs",), members=members)
        self._metrics: dict[str, tuple[Metric, ...]] = {}
        self._further: tuple[Metric, ...] = ()
        self._sharing: set[str] = set()

    def register(
        self, name: str, *, aliases: tuple[str, ...] = (), metrics: tuple[Metric, ...] = (), shares: bool = False
    ) -> Callable[[F], F]:
        """Decorator that adds an evaluation, which says what its metrics are.

        Args:
            name: Its name.
            aliases: Other names.
            metrics: What it measures; one that it does not declare is shown under its own name.
            shares: Of several processes all call it, and it divides its work over ``outputs.group``. Other evaluations
                are called by the first process alone, which tells the others what it found.
        """
        add = super().register(name, aliases=aliases)

        def declare(factory: F) -> F:
            add(factory)
            own = name.lower().replace("_", "-")
            self._metrics[own] = metrics
            (self._sharing.add if shares else self._sharing.discard)(own)
            return factory

        return declare

    def shares(self, evaluation: str) -> bool:
        """Whether an evaluation divides its work over processes.

        Example:
            >>> evaluations.shares("angles")
            False
        """
        return self[evaluation].name in self._sharing

    def declare(self, *metrics: Metric) -> None:
        """Say how metrics are shown that no evaluation of the registry computes."""
        self._further += metrics

    def metrics(self, evaluation: str | None = None) -> tuple[Metric, ...]:
        """What an evaluation declares, or everything that is declared.

        Example:
            >>> [metric.name for metric in evaluations.metrics("angles")]
            ['mean_angle', 'min_centre_angle']
        """
        if evaluation is not None:
            return self._metrics[self[evaluation].name]
        return (*(metric for name in self for metric in self._metrics[name]), *self._further)

    def metric(self, name: str) -> Metric:
        """How a metric is shown: as declared, by the pattern that says most of its name, or under its own name.

        Example:
            >>> evaluations.metric("accuracy").title, evaluations.metric("my_score").title
            ('Test accuracy', 'My score')
        """
        declared = self.declared(name)
        return declared.of(name) or declared

    def declared(self, name: str) -> Metric:
        """The declaration of a metric, which for one of a family has the pattern as its name.

        Example:
            >>> evaluations.declared("accuracy/3").name
            'accuracy/*'
        """
        for metric in sorted(self.metrics(), key=lambda one: ("*" in one.name, -len(one.name.replace("*", "")))):
            if metric.of(name) is not None:
                return metric
        plain = name.replace("_", " ")
        return Metric(name, plain[:1].upper() + plain[1:], help=f"{name}, as its evaluation gives it.")


evaluations = Evaluations(members=("hypersphere.tasks.*.evaluation",))


def measure(outputs: Outputs, names: Iterable[str | Mapping[str, Any]]) -> dict[str, float]:
    """All metrics of the named evaluations.

    With a group of processes in the outputs all of them make the same call, and all get the same metrics. Artefacts are
    complete on the first one, which writes.

    Args:
        outputs: What the model puts out.
        names: Names, or mappings of a ``name`` and options.

    Example:
        >>> import torch
        >>> eye = torch.eye(3)
        >>> measure(Outputs(eye, eye, torch.arange(3), eye), ["classification", "angles"])["accuracy"]
        1.0
    """
    result: dict[str, float] = {}
    with agreed(outputs.group):
        for part in names:
            name, options = (part, {}) if isinstance(part, str) else (part["name"], {**part})
            options.pop("name", None)
            shared = evaluations.shares(name) and not outputs.together
            # One that does not share knows of no other processes, and must not wait for them.
            given = outputs if shared else replace(outputs, group=None)
            work = partial(evaluations.create, name, given, **options)
            found = work() if shared or outputs.together else on_first(work, outputs.group)
            for key in result.keys() & found.keys():
                raise ArgumentError("metrics", f"has two evaluations that give {key!r}; the second is {name!r}")
            result |= found
    return result
