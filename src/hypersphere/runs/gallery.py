"""A gallery of people (or things) that can be enrolled, removed and recognised, and kept in a file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hypersphere.errors import ArgumentError, check_range
from hypersphere.geometry import at_least_float32, normalise, spherical_mean
from hypersphere.metrics.neighbours import MEMORY, search
from hypersphere.metrics.verification import Calibration
from hypersphere.runs import artefacts
from hypersphere.runs.artefacts import RunError

SCHEMA, VERSION = "gallery", 2
"""Of the file; version 1 was that of Hypersphere 0.1, with a head of another form."""


class Match(NamedTuple):
    """A name with the cosine of its best template; the name is None where nobody is similar enough.

    Example:
        >>> Match("ann", 0.75).name
        'ann'
    """

    name: str | None
    score: float


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of a model's weights and buffers with their names: features of different models do not compare.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> before = fingerprint(model)
        >>> nn.init.zeros_(model.bias).equal(model.bias), fingerprint(model) == before
        (True, False)
    """
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Gallery:
    """Names with one or more template directions each, searched by cosine.

    The gallery lives on the CPU in float32; :meth:`identify` and :meth:`search` run on the device of their features.

    Args:
        dim: Length of a feature; taken from the first one that is enrolled where it is not given.
        model: Name of the model that makes the features.
        fingerprint: :func:`fingerprint` of its weights.
        images: How images were prepared for it, in words: their size, whether faces were aligned.
        threshold: Score above which a match is accepted, or the calibration for that model it comes from.

    Example:
        >>> gallery = Gallery(threshold=0.5)
        >>> gallery.enrol("ann", torch.tensor([[1.0, 0.0], [1.0, 0.2]]))
        >>> gallery.identify(torch.tensor([3.0, 0.3])).name, gallery.identify(torch.tensor([-1.0, 0.0])).name
        ('ann', None)
    """

    def __init__(
        self,
        dim: int | None = None,
        *,
        model: str = "",
        fingerprint: str = "",
        images: str = "",
        threshold: float | Calibration | None = None,
    ) -> None:
        if dim is not None:
            check_range("dim", dim, 1)
        self.dim, self.model, self.fingerprint, self.images = dim, model, fingerprint, images
        self.calibration = threshold if isinstance(threshold, Calibration) else None
        if self.calibration is not None and self.calibration.score != "cosine":
            raise ArgumentError("threshold", f"must be for cosine scores, got one for {self.calibration.score} scores")
        self.threshold = threshold.threshold if isinstance(threshold, Calibration) else threshold
        if self.threshold is not None:
            check_range("threshold", self.threshold, infinite=True)
        self._templates: dict[str, Tensor] = {}
        self._stacked: tuple[list[str], Tensor] | None = None

    # ---------------------------------------------------------------------------------------------- who is in it

    @property
    def names(self) -> list[str]:
        """In the order of enrolment."""
        return list(self._templates)

    def templates(self, name: str) -> Tensor:
        """Unit vectors ``(T, D)`` of a name."""
        return self._templates[self._enrolled(name)].clone()

    def __len__(self) -> int:
        return len(self._templates)

    def __contains__(self, name: object) -> bool:
        return name in self._templates

    def __str__(self) -> str:
        count = sum(len(x) for x in self._templates.values())
        accepted = "no threshold" if self.threshold is None else f"accepts above {self.threshold:.4f}"
        made = f" of {self.model}" if self.model else ""
        return f"gallery of {len(self)} names with {count} templates of dimension {self.dim}{made}; {accepted}"

    # --------------------------------------------------------------------------------------------------- changes

    def enrol(self, name: str, features: Tensor, *, average: bool = True, extend: bool = False) -> None:
        """Add somebody.

        Args:
            name: Must be new, unless ``extend``.
            features: ``(D,)`` or ``(N, D)`` features of images of that person, of any norm.
            average: Keep their mean direction as one template; otherwise each image is a template.
            extend: Add to the templates of a name that is enrolled already.

        Example:
            >>> gallery = Gallery()
            >>> gallery.enrol("ann", torch.eye(2))
            >>> gallery.templates("ann")
            tensor([[0.7071, 0.7071]])
        """
        if not isinstance(name, str) or not name:
            raise ArgumentError("name", f"must be a text that is not empty, got {name!r}")
        if name in self._templates and not extend:
            raise ArgumentError("name", f"must be new, got {name!r}, which is enrolled; extend=True adds templates")
        rows = self._rows(features)
        if not len(rows):
            raise ArgumentError("features", "must hold at least one row, got none")
        found = spherical_mean(rows).unsqueeze(0) if average else normalise(rows)
        if not bool(found.any(1).all()):
            raise ArgumentError("features", "must have a direction, got zero vectors or features that cancel")
        self.dim = rows.shape[1]
        old = self._templates.get(name, found[:0])
        self._templates[name] = torch.cat([old, found])
        self._stacked = None

    def remove(self, name: str) -> None:
        """Take a name out, with all its templates.

        Example:
            >>> gallery = Gallery()
            >>> gallery.enrol("ann", torch.ones(2))
            >>> gallery.remove("ann")
            >>> len(gallery)
            0
        """
        del self._templates[self._enrolled(name)]
        self._stacked = None

    # ---------------------------------------------------------------------------------------------------- search

    def search(self, features: Tensor, k: int = 5, *, memory: int = MEMORY) -> list[list[Match]]:
        """The ``k`` most similar names of every feature, whatever the threshold.

        Args:
            features: ``(N, D)``.
            k: Number of names; fewer come back from a smaller gallery.
            memory: As in :func:`hypersphere.metrics.search`.

        Returns:
            For every feature its matches, best first; a name occurs once, with its best template. Equal scores are
            in the order of enrolment.

        Example:
            >>> gallery = Gallery()
            >>> gallery.enrol("ann", torch.tensor([1.0, 0.0]))
            >>> gallery.search(torch.tensor([[2.0, 0.0]]))
            [[Match(name='ann', score=1.0)]]
        """
        check_range("k", k, 1)
        rows = self._rows(features)
        if not self._templates:
            return [[] for _ in rows]
        if self._stacked is None:
            owners = [name for name, found in self._templates.items() for _ in found]
            self._stacked = owners, torch.cat(list(self._templates.values()))
        owners, templates = self._stacked
        # The k-1 names before the last can fill at most this many places with their templates.
        sizes = sorted((len(x) for x in self._templates.values()), reverse=True)
        scores, places = search(
            rows.to(features.device), templates, min(len(owners), sum(sizes[: k - 1]) + 1), memory=memory
        )
        result = []
        for row_scores, row_places in zip(scores.tolist(), places.tolist(), strict=True):
            best: dict[str, float] = {}
            for score, place in zip(row_scores, row_places, strict=True):
                best.setdefault(owners[place], score)
            result.append([Match(name, score) for name, score in list(best.items())[:k]])
        return result

    def identify(self, features: Tensor, threshold: float | None = None, *, memory: int = MEMORY) -> Any:
        """Who it is, or nobody.

        Args:
            features: ``(D,)`` or ``(N, D)``.
            threshold: The best score must be greater; the gallery's own by default, -1 or less for a closed set.
            memory: As in :func:`hypersphere.metrics.search`.

        Returns:
            A :class:`Match` for one feature, a list of them for several. Its name is None where the best score is
            not above the threshold; in an empty gallery the score is -inf.

        Example:
            >>> gallery = Gallery()
            >>> gallery.enrol("ann", torch.tensor([1.0, 0.0]))
            >>> gallery.identify(torch.tensor([0.6, 0.8]), threshold=0.5).name
            'ann'
        """
        threshold = self.threshold if threshold is None else threshold
        if threshold is None:
            raise ArgumentError("threshold", "must be given, since this gallery was saved without a calibrated one")
        check_range("threshold", threshold, infinite=True)  # refuses NaN, which would accept nobody in silence
        best = [found[0] if found else Match(None, -float("inf")) for found in self.search(features, 1, memory=memory)]
        result = [match if match.score > threshold else Match(None, match.score) for match in best]
        return result[0] if features.dim() == 1 else result

    def _rows(self, features: Tensor) -> Tensor:
        if not isinstance(features, Tensor):
            raise ArgumentError("features", f"must be a tensor, got {type(features).__name__}")
        rows = features.detach().unsqueeze(0) if features.dim() == 1 else features.detach()
        if rows.dim() != 2 or not rows.is_floating_point() or not rows.shape[1]:
            raise ArgumentError(
                "features", f"must be (D,) or (N, D) floating point numbers, got {tuple(features.shape)} {rows.dtype}"
            )
        if self.dim is not None and rows.shape[1] != self.dim:
            raise ArgumentError("features", f"must have the gallery's dimension {self.dim}, got {rows.shape[1]}")
        rows = at_least_float32(rows.cpu()).float()
        if not bool(rows.isfinite().all()):
            raise ArgumentError("features", "must be finite, got NaN or infinity")
        return rows

    def _enrolled(self, name: str) -> str:
        if name not in self._templates:
            raise ArgumentError("name", f"must be enrolled, got {name!r}, which is not among {len(self)} names")
        return name

    # ----------------------------------------------------------------------------------------------------- files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file of the form of :mod:`hypersphere.runs.artefacts`: templates, and everything else as its facts.

        The file is written beside its place, flushed to the disk, and then renamed over the old one in one step: a
        crash at any moment leaves the old gallery or the new one, whole.

        Args:
            path: File name; its folder must exist.

        Example:
            >>> from tempfile import TemporaryDirectory
            >>> with TemporaryDirectory() as folder:
            ...     Gallery(2, threshold=0.3).save(f"{folder}/people.safetensors")
            ...     Gallery.load(f"{folder}/people.safetensors").threshold
            0.3
        """
        head = {
            "dim": self.dim,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "images": self.images,
            "threshold": self.threshold,
            "calibration": None if self.calibration is None else self.calibration.to_dict(),
            "names": self.names,
            "counts": [len(x) for x in self._templates.values()],
        }
        templates = torch.cat([torch.empty(0, self.dim or 0), *self._templates.values()])
        artefacts.write(Path(path), SCHEMA, {"templates": templates}, version=VERSION, facts=head)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, fingerprint: str | None = None) -> Gallery:
        """Read what :meth:`save` has written.

        Args:
            path: File name.
            fingerprint: Of the model that will make the probes; a gallery of another model is refused.

        Example:
            >>> from tempfile import TemporaryDirectory
            >>> with TemporaryDirectory() as folder:
            ...     Gallery(2, model="net").save(f"{folder}/people.safetensors")
            ...     Gallery.load(f"{folder}/people.safetensors").model
            'net'
        """
        place, again = Path(path), "give the file of a gallery, or enrol its people again"
        if not place.is_file():
            raise RunError(f"{place} {'is not a file' if place.exists() else 'does not exist'}: {again}")
        found = artefacts.read(place, SCHEMA, version=VERSION, needed=("templates",), again=again)
        head = found.facts if found.version else found.facts.get("hypersphere_gallery", {"format": None})
        if not found.version and head["format"] != 1:
            raise RunError(f"{place} is no gallery of version 0.1, its format is {head['format']}: {again}")
        templates, names, counts = found.tensors["templates"], head["names"], head["counts"]
        if templates.dtype != torch.float32 or templates.dim() != 2:
            raise RunError(f"{place} has templates {tuple(templates.shape)} {templates.dtype}, not (T, D): {again}")
        if len(set(names)) != len(names) or len(counts) != len(names) or sum(counts) != len(templates):
            raise RunError(f"{place} has other names than templates: {again}")
        if fingerprint is not None and head["fingerprint"] != fingerprint:
            made = head["model"] or "another model"
            raise ArgumentError("fingerprint", f"must be that of the gallery, which holds features of {made}")
        threshold = Calibration.from_dict(head["calibration"]) if head["calibration"] else head["threshold"]
        made_by = {key: head[key] for key in ("dim", "model", "fingerprint")}
        gallery = cls(**made_by, images=head.get("images", ""), threshold=threshold)  # older files do not say
        gallery._templates = dict(zip(names, (x.clone() for x in templates.split(counts)), strict=True))
        return gallery
