"""Citation graphs in the Planetoid files: nodes with features, edges, and few labelled nodes.

A sample is the number of a node; features and edges are what all samples share, and a model takes them by ``attach``.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hypersphere.data.sources import Layout, Source, content, datasets, locate, sources
from hypersphere.data.splits import DataError, Dataset, TensorSplit

_HOME = "https://github.com/kimiyoung/planetoid"
_PARTS = ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index")
_VALIDATION = 500

_SUMS = {
    "cora": (
        *("190831eee19d8f330d89d94b40a65c5a", "78344284e3ff7fd24eb9c307d51351eb", "b29c36916768e1d2f55391c1aa9317ac"),
        *("48bf43f54fa5b86089a4bd0299795f10", "c9083193a57057dd1238321e140194d7", "125d70817fe1fdbfdcad991995e81579"),
        *("b37c419cec179f45834467630c278e4c", "9b822cae1d01f41e8bf8782e20367c0e"),
    ),
    "citeseer": (
        *("baeb0100b5a8af8d41f928113ce0a4e5", "8b99f50aa950fbbf9a7a2b71ff9cac97", "c25ab826a7e95c0922ab625de705f7df"),
        *("356894a73b7a7eff43c3580f2fcf92a4", "28486b4b9c4ee076b4eee2febd89ba86", "f0df7e5f859245e32987bfd224d01657"),
        *("5f88483d5f5cc2b26b987bbbfb695005", "70af39d4dff8aaa5c63f8dc526b16534"),
    ),
    "pubmed": (None,) * len(_PARTS),
}
# In the order of the labels; told by the number of nodes of each class.
_CLASSES = {
    "cora": (
        *("Theory", "Reinforcement learning", "Genetic algorithms", "Neural networks"),
        *("Probabilistic methods", "Case based", "Rule learning"),
    ),
    "citeseer": ("AI", "Machine learning", "Information retrieval", "Databases", "Agents", "HCI"),
    "pubmed": ("0", "1", "2"),
}
for _name, _sums in _SUMS.items():
    sources[_name] = Source(
        _name,
        _HOME,
        (
            Layout(("planetoid",), {f"ind.{_name}.{part}": md5 for part, md5 in zip(_PARTS, _sums, strict=True)}),
            Layout(("planetoid",), {f"{_name}.npz": None}),
        ),
    )


@datasets.register("cora")
def cora(root: Path | None = None) -> Dataset:
    """Citations of 2,708 papers on machine learning with 1,433 words, 7 classes; 140 nodes to train on, 1,000 to test.

    Args:
        root: Data root to search instead of the usual ones.
    """
    return _load("cora", root)


@datasets.register("citeseer")
def citeseer(root: Path | None = None) -> Dataset:
    """Citations of 3,327 papers on computing with 3,703 words, 6 classes; 120 nodes to train on, 1,000 to test.

    Fifteen nodes have neither features nor a class and are in no split; forty-eight others have no edge.

    Args:
        root: Data root to search instead of the usual ones.
    """
    return _load("citeseer", root)


@datasets.register("pubmed")
def pubmed(root: Path | None = None) -> Dataset:
    """Citations of 19,717 papers on diabetes with 500 weighted words, 3 classes; 60 nodes to train on, 1,000 to test.

    Args:
        root: Data root to search instead of the usual ones.
    """
    return _load("pubmed", root)


class _Graph(NamedTuple):
    """A graph as its files have it: ``label`` is -1 where a node has none, ``edges`` ``(2, E)`` go either way."""

    features: NDArray[np.float32]
    edges: NDArray[np.int64]
    label: NDArray[np.int64]
    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]


def _load(name: str, root: Path | None) -> Dataset:
    folder, layout = sources[name].find(root)
    path = locate(folder, f"{name}.npz")
    if f"{name}.npz" in layout.md5 and path is not None:
        graph = _read_arrays(path)
    else:
        path, graph = folder / f"ind.{name}.*", _read_planetoid(folder, name)
    _check(path, graph, len(_CLASSES[name]))
    label = torch.from_numpy(graph.label)
    numbers = [torch.from_numpy(part) for part in (graph.train, graph.validation, graph.test)]
    train, validation, test = (TensorSplit(part, label[part]) for part in numbers)
    # A row adds up to 1, as was published; a node without features stays without.
    total = graph.features.sum(1, keepdims=True)
    features = torch.from_numpy(graph.features / np.where(total == 0, 1, total))
    context = {
        "features": features,
        "edges": torch.from_numpy(_undirected(graph.edges, len(label))),
        "labels": label,
        "validation": validation.images,
    }
    return Dataset(name, _CLASSES[name], train, test, context=context)


def _undirected(edges: NDArray[np.int64], nodes: int) -> NDArray[np.int64]:
    """Every edge once, the lower number first, without those from a node to itself, ``(2, E)``."""
    low, high = edges.min(0), edges.max(0)
    keys = np.unique((low * nodes + high)[low != high])
    return np.stack([keys // nodes, keys % nodes])


def _check(path: Path, graph: _Graph, classes: int) -> None:
    """Raise for numbers of nodes that do not exist and for labels that no class has."""
    nodes = len(graph.features)
    for part in _Graph._fields[2:]:
        if getattr(graph, part).ndim != 1:
            raise _damaged(path, f"has {part} of shape {getattr(graph, part).shape}, expected a list of numbers")
    if not np.isfinite(graph.features).all():
        raise _damaged(path, "has features that are no finite numbers")
    for what, numbers in (("edges", graph.edges), *((part, getattr(graph, part)) for part in _Graph._fields[3:])):
        if not numbers.size or numbers.min() < 0 or numbers.max() >= nodes:
            raise _damaged(path, f"has {what} of nodes other than 0 to {nodes - 1}, or none")
    if len(graph.label) != nodes or graph.label.max() >= classes:
        raise _damaged(path, f"has {len(graph.label)} labels up to {graph.label.max()} for {nodes} nodes")
    if (graph.label[np.concatenate(graph[3:])] < 0).any():
        raise _damaged(path, "has nodes to train or test on that have no label")


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path} {what}: it is damaged or belongs to another data set. Get the file again.")


# ---------------------------------------------------------------------------------------------- one archive


def _read_arrays(path: Path) -> _Graph:
    """A graph from plain arrays.

    They are the features in rows (``indptr``, ``indices``, ``values``, ``shape``), ``edges``, ``label``, and the
    numbers of the nodes ``train``, ``val`` and ``test``.
    """
    try:
        with np.load(io.BytesIO(content(path)), allow_pickle=False) as found:
            rows = _Rows()
            rows.__dict__ |= {key: found[key] for key in ("indptr", "indices")}
            rows.__dict__ |= {"data": found["values"], "_shape": tuple(found["shape"].tolist())}
            others = [found[key].astype(np.int64) for key in ("edges", "label", "train", "val", "test")]
    except (ValueError, KeyError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise _damaged(path, f"is no archive of a graph ({error})") from error
    if others[0].ndim != 2 or len(others[0]) != 2:
        raise _damaged(path, f"has edges of shape {others[0].shape}, expected (2, E)")
    return _Graph(rows.dense(path), *others)


# ---------------------------------------------------------------------------------------------- the pickles


def _read_planetoid(folder: Path, name: str) -> _Graph:
    """A graph from the eight files of Planetoid.

    ``allx`` and ``ally`` are the first nodes, of which ``x`` and ``y`` are those to train on; ``tx`` and ``ty`` belong
    to the nodes whose numbers ``test.index`` lists, in its order. Numbers that it leaves out are nodes with nothing.
    """
    paths = {part: locate(folder, f"ind.{name}.{part}") or folder / f"ind.{name}.{part}" for part in _PARTS}
    matrices = {part: _matrix(paths[part]) for part in ("x", "tx", "allx", "y", "ty", "ally")}
    for inputs, targets in (("x", "y"), ("tx", "ty"), ("allx", "ally")):
        if len(matrices[inputs]) != len(matrices[targets]):
            counts = f"{len(matrices[targets])} rows where {paths[inputs]} has {len(matrices[inputs])}"
            raise _damaged(paths[targets], f"has {counts}")
    tested = _numbers(paths["test.index"])
    first = len(matrices["allx"])
    if len(tested) != len(matrices["tx"]) or not len(tested) or tested.min() < first:
        begin = tested.min() if len(tested) else first
        counts = f"{len(tested)} nodes from {begin} on, expected {len(matrices['tx'])} from {first} on"
        raise _damaged(paths["test.index"], f"has {counts}")
    nodes = int(tested.max()) + 1
    features = np.zeros((nodes, matrices["allx"].shape[1]), np.float32)
    shares = np.zeros((nodes, matrices["ally"].shape[1]), np.float32)
    for whole, begin, end in ((features, "allx", "tx"), (shares, "ally", "ty")):
        if matrices[begin].shape[1] != matrices[end].shape[1]:
            widths = f"{matrices[end].shape[1]} columns where {paths[begin]} has {matrices[begin].shape[1]}"
            raise _damaged(paths[end], f"has {widths}")
        whole[:first], whole[tested] = matrices[begin], matrices[end]
    label = np.where(shares.any(1), shares.argmax(1), -1)
    train = np.arange(len(matrices["x"]))
    validation = np.arange(len(train), min(len(train) + _VALIDATION, first))
    return _Graph(features, _edges(paths["graph"]), label, train, validation, np.sort(tested))


def _matrix(path: Path) -> NDArray[np.float32]:
    """A matrix of a file, dense, whether it is kept in rows of few entries or whole."""
    found = _unpickle(path)
    if isinstance(found, _Rows):
        return found.dense(path)
    if not isinstance(found, np.ndarray) or found.ndim != 2 or found.dtype.kind not in "biuf":
        raise _damaged(path, "holds no matrix of numbers")
    return found.astype(np.float32)


def _edges(path: Path) -> NDArray[np.int64]:
    """Edges ``(2, E)`` of a file that lists the neighbours of every node."""
    found = _unpickle(path)
    try:
        pairs = [(node, other) for node, others in found.items() for other in others]
        return np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise _damaged(path, "holds no lists of neighbours") from error


def _numbers(path: Path) -> NDArray[np.int64]:
    """The numbers of a text file."""
    try:
        return np.array(content(path).split(), dtype=np.int64)
    except (ValueError, OverflowError) as error:
        raise _damaged(path, f"is no list of numbers ({error})") from error


class _Rows:
    """Stands in for a matrix of scipy that is kept in compressed rows."""

    def dense(self, path: Path) -> NDArray[np.float32]:
        """The matrix with its zeros."""
        kept: dict[str, Any] = self.__dict__
        try:
            rows, columns = kept["_shape"] if "_shape" in kept else kept["shape"]
            found = np.zeros((rows, columns), np.float32)
            found[np.repeat(np.arange(rows), np.diff(kept["indptr"])), kept["indices"]] = kept["data"]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise _damaged(path, f"holds no complete matrix ({error})") from error
        return found


# The makers of arrays have moved between versions of numpy; an array says where its own are.
_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("collections", "defaultdict"): defaultdict,
    ("__builtin__", "list"): list,
    ("builtins", "list"): list,
    ("_codecs", "encode"): lambda text, _: text.encode("latin1"),  # with which Python 3 writes bytes for Python 2
    **{(f"numpy.{core}.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0] for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): np.empty(1).__reduce_ex__(5)[0] for core in ("core", "_core")},
    **{(f"scipy.sparse.{part}", kind): _Rows for part in ("csr", "_csr") for kind in ("csr_matrix", "csr_array")},
}


class _GraphUnpickler(pickle.Unpickler):
    """Reads arrays, sparse matrices and dictionaries of lists; whatever else a file asks for is refused."""

    def find_class(self, module: str, name: str) -> Any:
        """What stands for ``module.name``."""
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no Planetoid file needs")
        return _KNOWN[module, name]


def _unpickle(path: Path) -> Any:
    try:
        return _GraphUnpickler(io.BytesIO(content(path)), encoding="latin1").load()
    except (
        pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError, ValueError, OverflowError, MemoryError
    ) as error:  # fmt: skip
        raise DataError(
            f"{path} is not a Planetoid file ({error}), expected a pickle of arrays and lists. Nothing in it was "
            "executed. Get the file again."
        ) from error
