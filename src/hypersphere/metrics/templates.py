"""Templates: one feature of several images of somebody, and the protocols of IJB-A, -B and -C."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hypersphere.errors import ArgumentError
from hypersphere.geometry import at_least_float32, normalise
from hypersphere.metrics.identification import Identification, identify
from hypersphere.metrics.neighbours import MEMORY, Kind, check_features, score_pairs
from hypersphere.metrics.processes import Group
from hypersphere.metrics.verification import Verification, verification_summary


def pool_templates(
    features: Tensor, templates: Tensor | Sequence[Any], media: Tensor | Sequence[Any], *, unit: bool = True
) -> tuple[list[Any], Tensor]:
    r"""One direction for every template, from images that come in media (a photograph, the frames of a video).

    An image weighs :math:`1 / (\text{images of its medium in the template} \cdot \text{media of the template})`, so
    that a long video counts as much as a photograph.

    Args:
        features: ``(N, D)``.
        templates: ``(N,)`` template of each image: whole numbers or names.
        media: ``(N,)`` medium of each image; the same medium in two templates is two media.
        unit: Average directions. Otherwise the features as they are, so that long ones weigh more.

    Returns:
        The T templates in the order of their first image, and unit vectors ``(T, D)`` (zero where directions cancel).

    Example:
        >>> photo_and_video = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> pool_templates(photo_and_video, ["ann"] * 3, [1, 2, 2])
        (['ann'], tensor([[0.7071, 0.7071]]))
    """
    check_features("features", features)
    lists = [x.tolist() if isinstance(x, Tensor | np.ndarray) else list(x) for x in (templates, media)]
    for name, values in zip(("templates", "media"), lists, strict=True):
        if len(values) != len(features):
            raise ArgumentError(name, f"must name each of {len(features)} features, got {len(values)}")
    if not bool(features.isfinite().all()):
        raise ArgumentError("features", "must be finite, got NaN or infinity")
    names: dict[Any, int] = {}
    groups: dict[tuple[int, Any], int] = {}
    owner = [names.setdefault(x, len(names)) for x in lists[0]]
    group = [groups.setdefault(x, len(groups)) for x in zip(owner, lists[1], strict=True)]
    owner_of_group = torch.tensor([x for x, _ in groups], dtype=torch.long, device=features.device)
    x = normalise(at_least_float32(features)) if unit else at_least_float32(features)
    inside = _group_means(x, torch.tensor(group, dtype=torch.long, device=x.device), len(groups))
    return list(names), normalise(_group_means(inside, owner_of_group, len(names))).to(features.dtype)


def _group_means(x: Tensor, group: Tensor, groups: int) -> Tensor:
    counts = group.bincount(minlength=groups).unsqueeze(1)
    return x.new_zeros(groups, x.shape[1]).index_add_(0, group, x) / counts


@dataclass(frozen=True)
class TemplateResults:
    """What :func:`ijb` found.

    Attributes:
        verification: TAR at the wanted rates, AUC and equal-error rate of the pairs of templates; empty without pairs.
        identification: Ranks of the probe templates in the gallery; ``None`` without a gallery.
    """

    verification: Mapping[str, Verification]
    identification: Identification | None

    def __str__(self) -> str:
        lines = [f"{name}: {found}" for name, found in self.verification.items()]
        return "\n".join([*lines, *([] if self.identification is None else [str(self.identification)])])


def ijb(
    features: Tensor,
    templates: Tensor | Sequence[Any],
    media: Tensor | Sequence[Any],
    subjects: Tensor | Sequence[Any],
    *,
    pairs: Sequence[tuple[Any, Any]] | Tensor | None = None,
    gallery: Sequence[Any] | Tensor | None = None,
    probes: Sequence[Any] | Tensor | None = None,
    fars: Sequence[float] = (1e-4, 1e-3, 1e-2),
    ranks: Sequence[int] = (1, 5, 10),
    fpirs: Sequence[float] = (0.01, 0.1),
    unit: bool = False,
    kind: Kind = "cosine",
    samples: int = 1000,
    memory: int = MEMORY,
    group: Group | None = None,
) -> TemplateResults:
    """Templates of several images, as in IJB-A, -B and -C: TAR at FAR of pairs, ranks and open-set DIR at FPIR.

    A template's feature is :func:`~hypersphere.metrics.pool_templates`: the mean over its media of the mean over the
    images of a medium. Probe templates of subjects that are not in the gallery are the open set.

    Args:
        features: ``(N, D)``, one an image.
        templates: ``(N,)`` template of each image: whole numbers or names.
        media: ``(N,)`` medium of each image (a photograph, a video).
        subjects: ``(N,)`` who is on each image; a template is of one subject.
        pairs: Pairs of templates for verification, ``(L, 2)``.
        gallery: Templates of the gallery, with probes.
        probes: Templates that are looked for.
        fars: False accept rates of the pairs.
        ranks: Ranks to report.
        fpirs: False positive identification rates to report.
        unit: Average directions, not features as they are.
        kind: As in :func:`~hypersphere.metrics.search`.
        samples: Draws of the bootstrap; take fewer for millions of pairs.
        memory: As in :func:`~hypersphere.metrics.search`.
        group: As in :func:`~hypersphere.metrics.search`.

    Example:
        >>> features = torch.tensor([[1.0, 0.0], [1.0, 0.2], [0.9, 0.1], [0.0, 1.0], [0.1, 1.0]])
        >>> found = ijb(features, [1, 1, 2, 3, 4], [1, 2, 3, 4, 5], "aaabb", gallery=[1, 3], probes=[2, 4])
        >>> found.identification.rank
        tensor([1, 1])
    """
    if (gallery is None) != (probes is None):
        raise ArgumentError("gallery" if gallery is None else "probes", "must be given, too: they go together")
    if pairs is None and gallery is None:
        raise ArgumentError("pairs", "or gallery and probes must be given: there is nothing to compare")
    names, pooled = pool_templates(features, templates, media, unit=unit)
    place = {name: index for index, name in enumerate(names)}
    owner = _owners(_plain(templates), _plain(subjects), len(features))

    def places(argument: str, chosen: Sequence[Any]) -> Tensor:
        unknown = next((name for name in chosen if name not in place), None)
        if unknown is not None:
            raise ArgumentError(argument, f"must be templates that have images, got {unknown!r}")
        return torch.tensor([place[name] for name in chosen], dtype=torch.int64, device=pooled.device)

    verification: Mapping[str, Verification] = {}
    if pairs is not None:
        listed = _plain(pairs)
        first, second = ([pair[side] for pair in listed] for side in (0, 1))
        rows = torch.stack([places("pairs", first), places("pairs", second)], 1)
        number: dict[Any, int] = {}
        left, right = (
            torch.tensor([number.setdefault(owner[name], len(number)) for name in side]) for side in (first, second)
        )
        scores = score_pairs(pooled, pooled, rows, kind=kind, memory=memory, group=group).cpu()
        verification = verification_summary(
            scores, left == right, fars=fars, identities=(left, right), samples=samples, group=group
        )
    identification = None
    if gallery is not None and probes is not None:
        enrolled, looked = _plain(gallery), _plain(probes)
        identification = identify(
            pooled[places("probes", looked)],
            [owner[name] for name in looked],
            pooled[places("gallery", enrolled)],
            [owner[name] for name in enrolled],
            ranks=ranks,
            fpirs=fpirs,
            kind=kind,
            memory=memory,
            group=group,
        )
    return TemplateResults(verification, identification)


def _plain(values: Any) -> list[Any]:
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _owners(templates: list[Any], subjects: list[Any], count: int) -> dict[Any, Any]:
    """The subject of each template."""
    if len(subjects) != count or len(templates) != count:
        raise ArgumentError("subjects", f"must name each of {count} features, got {len(subjects)}")
    owner: dict[Any, Any] = {}
    for template, subject in zip(templates, subjects, strict=True):
        if owner.setdefault(template, subject) != subject:
            raise ArgumentError("subjects", f"must be one for each template, got two for {template!r}")
    return owner
