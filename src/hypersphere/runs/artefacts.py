"""The one form of files of tensors: checkpoints, the outputs of an evaluation, galleries.

A file is safetensors, of which nothing is ever executed. Its metadata has one key, ``hypersphere``, with JSON:

========== =============================================================================================
``schema`` what the file is: ``checkpoint``, ``evaluation`` or ``gallery``
``version`` of that schema
``recipe`` hash of the recipe that it came from, or an empty text
``facts``  what else belongs to it, such as names of classes
``tensors`` SHA-256 of each tensor's name, type, shape and bytes
``digest`` SHA-256 of all of the above
========== =============================================================================================

A digest is checked before its tensor is used, so that damage is found however small it is. Files of version 0.1 have
no such key and are read without these checks.

What belongs to a layer of a model is called ``quantity/place/layer`` (:func:`layer_name`): ``radius/00003/conv1`` is
the radius of the layer ``conv1``, the fourth module of the network. What evaluations leave for pictures is called
``artefact/section/name``. Other names have no meaning beyond the schema's.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hypersphere.errors import HypersphereError

KEY = "hypersphere"
OLD_KEYS = {"class_names", "unseen_names", "hypersphere_gallery"}
"""Metadata of files of version 0.1."""
ARTEFACT = "artefact/"
"""First part of the names of tensors that evaluations left for pictures."""


class RunError(HypersphereError):
    """A run, or a file of one, that cannot be used as asked; the message names it and says what to do."""


class LayerTensor(NamedTuple):
    """What the name of a tensor says: which quantity, and of which layer at which place in the network.

    Example:
        >>> LayerTensor("radius", 3, "conv1").quantity
        'radius'
    """

    quantity: str
    place: int
    layer: str


def layer_name(quantity: str, place: int, layer: str) -> str:
    """Name of a tensor that belongs to a layer.

    Args:
        quantity: What it is.
        place: Number of the layer among the modules of its network, by which layers are sorted.
        layer: Name of the layer.

    Example:
        >>> layer_name("radius", 3, "body.conv1")
        'radius/00003/body.conv1'
    """
    return f"{quantity}/{place:05}/{layer}"


def layer_parts(name: str) -> LayerTensor | None:
    """What :func:`layer_name` made a name of; ``None`` for another kind of name.

    Example:
        >>> layer_parts("radius/00003/body.conv1"), layer_parts("features")
        (LayerTensor(quantity='radius', place=3, layer='body.conv1'), None)
    """
    found = re.fullmatch(r"([^/]+)/(\d{5,})/(.*)", name)
    return None if found is None or name.startswith(ARTEFACT) else LayerTensor(found[1], int(found[2]), found[3])


LATER = (".gram",)
"""Ends of names of tensors that older files do not have; a model that was built again has the values of its start.

The first Gram matrix of rotated neurons.
"""


@dataclass(frozen=True, eq=False)
class Artefact:
    """What a file of tensors holds.

    Args:
        path: Where it is.
        schema: What it is.
        version: Of the schema; 0 for a file of version 0.1.
        recipe: Hash of the recipe, or an empty text.
        facts: What else belongs to it.
        tensors: The tensors by name, on the CPU.
    """

    path: Path
    schema: str
    version: int
    recipe: str
    facts: dict[str, Any]
    tensors: dict[str, Tensor] = field(repr=False)

    def copy_into(self, live: Mapping[str, Tensor]) -> None:
        """Copy the tensors into existing ones of the same names, shapes and types: all of them or none.

        Those whose names end as one of ``LATER`` may be missing, and stay as they are.

        Raises:
            RunError: One is missing, or has another shape or type.
        """
        live = {k: v for k, v in live.items() if k in self.tensors or not k.endswith(LATER)}
        for name, tensor in live.items():
            found = self.tensors.get(name)
            if found is None:
                raise RunError(f"{self.path} has no tensor {name!r}: it was written by another version or recipe")
            for what, its, needed in (
                ("shape", tuple(found.shape), tuple(tensor.shape)),
                ("type", found.dtype, tensor.dtype),
            ):
                if its != needed:
                    raise RunError(
                        f"{self.path}: {name!r} has the {what} {its}, this run needs {needed}: it was written by "
                        "another version or recipe"
                    )
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(self.tensors[name])


def write(
    path: Path,
    schema: str,
    tensors: Mapping[str, Tensor],
    *,
    version: int = 1,
    recipe: str = "",
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write a file that appears whole or not at all, also through a crash or a power cut.

    Args:
        path: File name; its folder must exist. Of a link, the target is replaced.
        schema: What the file is.
        tensors: Tensors by name, wherever they are.
        version: Of the schema.
        recipe: Hash of the recipe.
        facts: What else belongs to it, as JSON knows it.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     write(Path(folder) / "one.safetensors", "gallery", {"x": torch.ones(2)}, facts={"names": ["a"]})
        ...     read(Path(folder) / "one.safetensors", "gallery").facts
        {'names': ['a']}
    """
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    head: dict[str, Any] = {"schema": schema, "version": version, "recipe": recipe, "facts": dict(facts or {})}
    head["tensors"] = {name: _tensor_digest(name, tensor) for name, tensor in kept.items()}
    head["digest"] = _head_digest(head)
    content = _library("safetensors.torch").save(kept, {KEY: json.dumps(head)})
    place = path.resolve()
    beside = place.with_name(f".writing-{place.name}-{uuid.uuid4().hex}")
    try:
        with beside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, place)  # noqa: PTH105 - one step on every system, also over an existing file
    finally:
        beside.unlink(missing_ok=True)
    flush_folder(place.parent)


def read(
    path: Path,
    schema: str,
    *,
    version: int = 1,
    names: Callable[[str], bool] = lambda name: True,
    needed: tuple[str, ...] = (),
    again: str = "write it again",
) -> Artefact:
    """Read a file of :func:`write`, or one of version 0.1, and check its digests.

    Args:
        path: File name.
        schema: What the file must be.
        version: The newest version of the schema that is known.
        names: Which tensors are read.
        needed: Names that must be there.
        again: What to do where the file is damaged, for messages.

    Raises:
        RunError: It cannot be read, is damaged, is of another schema or lacks a tensor.
    """
    library = _library("safetensors")
    try:
        with library.safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys() if names(name)}  # noqa: SIM118 (no mapping)
            every = set(file.keys())
        head = json.loads(metadata[KEY]) if KEY in metadata else None
        facts = {key: json.loads(value) for key, value in metadata.items()} if head is None else {}
    except (OSError, library.SafetensorError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}): {again}") from error
    if head is None:
        if unknown := facts.keys() - OLD_KEYS:
            raise RunError(f"{path} is no {schema} of Hypersphere, its metadata has {min(unknown)!r}: {again}")
        found = Artefact(path, schema, 0, "", facts, tensors)
    else:
        _check_head(path, head, schema, version, again)
        if every != head["tensors"].keys():
            different = min(every ^ head["tensors"].keys())
            raise RunError(f"{path} is damaged: {different!r} is in its list or in its content, not in both: {again}")
        for name, tensor in tensors.items():
            if _tensor_digest(name, tensor) != head["tensors"][name]:
                raise RunError(f"{path} is damaged: the digest of {name!r} is not that of its content: {again}")
        found = Artefact(path, schema, head["version"], head["recipe"], head["facts"], tensors)
    for name in needed:
        if name not in every:
            raise RunError(f"{path} has no tensor {name!r}: {again}")
    return found


def _check_head(path: Path, head: Any, schema: str, version: int, again: str) -> None:
    """Raise :class:`RunError` unless the metadata is whole, of this schema, and not newer than is known."""
    if not isinstance(head, dict) or head.get("digest") != _head_digest(head):
        raise RunError(f"{path} is damaged: the digest of its metadata is not that of its content: {again}")
    if head["schema"] != schema:
        raise RunError(f"{path} is of the schema {head['schema']!r}, not {schema!r}: give another file, or {again}")
    if head["version"] > version:
        raise RunError(
            f"{path} has version {head['version']} of the schema {schema!r}, which a newer Hypersphere wrote: "
            f"this one knows {version}. Update it, or {again}"
        )


def flush_folder(folder: Path) -> None:
    """Make a renaming in a folder last through a power cut, where the system lets a folder be opened."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # pragma: no cover - Windows
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _tensor_digest(name: str, tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    content: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    digest.update(content)
    return digest.hexdigest()


def _head_digest(head: Mapping[str, Any]) -> str:
    content = {key: value for key, value in head.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise HypersphereError(
            'files of tensors need safetensors, which is not installed: pip install "hypersphere[workbench]"'
        ) from None
