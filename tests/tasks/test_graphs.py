"""Citation graphs: files against arrays that were written into them, the network against dense matrices."""

import contextlib
import io
import os
import pickle
import re
import runpy
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hypersphere as hs
from helpers.paths import DOCS, TOOLS
from hypersphere import orthogonal
from hypersphere.data import DataError, inventory, load
from hypersphere.errors import ArgumentError
from hypersphere.evaluate import Outputs, evaluations, measure
from hypersphere.losses import create as create_loss
from hypersphere.models import create
from hypersphere.recipe import load as load_recipe
from hypersphere.report import build
from hypersphere.runs import RunFolder
from hypersphere.tasks.graphs.evaluation import early_stop
from hypersphere.tasks.graphs.figures import embedding
from hypersphere.tasks.graphs.models import GCN, normalised_adjacency, propagate
from hypersphere.train import Trainer
from hypersphere.train.optimiser import parameter_groups

ROOT = Path(os.environ.get("HYPERSPHERE_DATA", "data"))
PARTS = ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index")
CPU = torch.device("cpu")

# ------------------------------------------------------------------------------------ files as they are published


def text(value):
    return b"U" + bytes([len(value)]) + value.encode()


def integer(value):
    return b"J" + struct.pack("<i", value)


def python2_array(array):
    """What Python 2 and its numpy wrote."""
    raw = array.tobytes()
    shape = b"(" + b"".join(map(integer, array.shape)) + b"t"
    return (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01" + shape
        + b"cnumpy\ndtype\nU\x02" + array.dtype.str[1:].encode() + b"K\x00K\x01\x87R(K\x03U\x01<NNN"
        + integer(-1) + integer(-1) + b"K\x00tb\x89T" + struct.pack("<I", len(raw)) + raw + b"tb"
    )  # fmt: skip


def compressed(matrix):
    """Entries of a dense matrix by row, found without scipy."""
    rows, columns = np.nonzero(matrix)
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(matrix)))])
    return starts.astype(np.int32), columns.astype(np.int32), matrix[rows, columns].astype(np.float32)


def python2_matrix(matrix):
    starts, columns, values = compressed(matrix)
    shape = b"(" + b"".join(map(integer, matrix.shape)) + b"t"
    items = text("_shape") + shape + text("indptr") + python2_array(starts)
    items += text("indices") + python2_array(columns) + text("data") + python2_array(values)
    return b"\x80\x02cscipy.sparse.csr\ncsr_matrix\n)\x81}(" + items + b"ub."


def python2_lists(lists):
    body = b"".join(integer(key) + b"](" + b"".join(map(integer, values)) + b"e" for key, values in lists.items())
    return b"\x80\x02ccollections\ndefaultdict\nc__builtin__\nlist\n\x85R(" + body + b"u."


FIRST, TESTED, NODES = 9, [11, 9, 12], 13  # node 10 is in no file
GRAPH = {0: [1, 1, 2], 1: [0, 5], 2: [2, 0], 5: [1], 9: [11], 11: [9, 12], 12: [11], 10: []}
EDGES = [[0, 0, 1, 9, 11], [1, 2, 5, 11, 12]]  # of GRAPH, by hand


def graph_arrays(classes=7, width=6):
    """Features and classes of the 13 nodes."""
    rng = np.random.default_rng(0)
    features = rng.integers(0, 3, (NODES, width)).astype(np.float32)
    features[10] = features[4] = 0
    label = rng.integers(0, classes, NODES)
    label[10] = -1
    return features, label


def write_graph(folder, name="cora", classes=7):
    """The eight files, as Python 2 wrote them."""
    folder.mkdir(parents=True)
    features, label = graph_arrays(classes)
    one_hot = np.eye(classes, dtype=np.int32)
    parts = {"x": slice(0, 4), "allx": slice(0, FIRST), "tx": TESTED}
    for part, nodes in parts.items():
        (folder / f"ind.{name}.{part}").write_bytes(python2_matrix(features[nodes]))
        packed = b"\x80\x02" + python2_array(one_hot[label[nodes]]) + b"."
        (folder / f"ind.{name}.{part.replace('x', 'y')}").write_bytes(packed)
    (folder / f"ind.{name}.graph").write_bytes(python2_lists(GRAPH))
    (folder / f"ind.{name}.test.index").write_text("\n".join(map(str, TESTED)) + "\n")
    return features, label


def write_archive(path, **changes):
    features, label = graph_arrays()
    starts, columns, values = compressed(features)
    arrays = {"indptr": starts, "indices": columns.astype(np.int16), "values": values, "shape": features.shape}
    arrays |= {"edges": np.array(EDGES, np.int32), "label": label.astype(np.int16), "train": np.arange(4)}
    arrays |= {"val": np.arange(4, 9), "test": np.array(sorted(TESTED))}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **(arrays | changes))


def test_planetoid_files_give_back_what_was_written(tmp_path):
    features, label = write_graph(tmp_path / "planetoid")
    data = load("cora", tmp_path)
    assert (
        data.train.images.tolist() == [0, 1, 2, 3] and data.train.shape == () and data.train.images.dtype == torch.int64
    )
    assert data.test.images.tolist() == [9, 11, 12] and len(data.class_names) == 7
    assert data.context["validation"].tolist() == [4, 5, 6, 7, 8]
    for split in (data.train, data.test):
        assert split.labels.tolist() == label[split.images.numpy()].tolist()
    assert data.context["labels"].tolist() == label.tolist() and data.context["labels"][10] == -1
    assert data.context["edges"].tolist() == EDGES
    for row, found in zip(features, data.context["features"].numpy(), strict=True):
        expected = [value / (sum(row) or 1) for value in row]
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert data.context["features"].dtype == torch.float32


def test_validation_has_500_nodes(tmp_path):
    folder = tmp_path / "planetoid"
    write_graph(folder)
    label = np.arange(620) % 7
    for part, count in (("x", 60), ("allx", 620)):
        (folder / f"ind.cora.{part}").write_bytes(python2_matrix(np.ones((count, 6), np.float32)))
        packed = python2_array(np.eye(7, dtype=np.int32)[label[:count]])
        (folder / f"ind.cora.{part.replace('x', 'y')}").write_bytes(b"\x80\x02" + packed + b".")
    (folder / "ind.cora.test.index").write_text("620 622 621")
    data = load("cora", tmp_path)
    assert (len(data.train), len(data.context["validation"]), len(data.test)) == (60, 500, 3)
    assert data.context["validation"][[0, -1]].tolist() == [60, 559]


def test_today_s_pickles_are_read_too(tmp_path):
    """scipy and numpy have moved their classes since the files were written."""
    sparse = pytest.importorskip("scipy.sparse")
    features, _ = write_graph(tmp_path / "planetoid")
    before = load("cora", tmp_path)
    for part, nodes in (("allx", slice(0, FIRST)), ("tx", TESTED)):
        for kind, protocol in ((sparse.csr_matrix, 2), (sparse.csr_array, 5)):
            (tmp_path / f"planetoid/ind.cora.{part}").write_bytes(pickle.dumps(kind(features[nodes]), protocol))
            assert torch.equal(load("cora", tmp_path).context["features"], before.context["features"])
    (tmp_path / "planetoid/ind.cora.graph").write_bytes(pickle.dumps(GRAPH))
    assert torch.equal(load("cora", tmp_path).context["edges"], before.context["edges"])


def test_an_archive_of_arrays_is_the_same_graph(tmp_path):
    write_graph(tmp_path / "files/planetoid")
    write_archive(tmp_path / "archive/planetoid/cora.npz")
    files, archive = (load("cora", tmp_path / part) for part in ("files", "archive"))
    for key, value in files.context.items():
        assert torch.equal(value, archive.context[key]), key
    assert torch.equal(files.test.images, archive.test.images) and torch.equal(files.train.labels, archive.train.labels)


@pytest.mark.parametrize("name", ["cora", "citeseer", "pubmed"])
def test_missing_files_name_themselves(tmp_path, name):
    with pytest.raises(DataError, match=rf"{name} was not found(.|\n)*planetoid(.|\n)*ind\.{name}\.test\.index"):
        load(name, tmp_path)
    write_graph(tmp_path / "planetoid", name, 3)
    (tmp_path / f"planetoid/ind.{name}.ty").unlink()
    with pytest.raises(DataError, match=rf"lacks ind\.{name}\.ty"):
        load(name, tmp_path)


def test_checksums_tell_other_files(tmp_path):
    write_graph(tmp_path / "planetoid")
    row = next(row for row in inventory(tmp_path, verify=True) if row.name == "cora")
    assert row.state == "corrupt" and "ind.cora.x has the MD5" in row.detail


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("content", [b"", b"\x80\x02cos\nsystem\nU\x04true\x85R.", b"\x80\x02K\x01.", b"nonsense \xff"])
def test_bad_files_name_themselves(tmp_path, part, content):
    write_graph(tmp_path / "planetoid")
    path = tmp_path / f"planetoid/ind.cora.{part}"
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        load("cora", tmp_path)
    assert str(path) in str(error.value) and "Get the file again" in str(error.value)


@pytest.mark.parametrize("part", PARTS[:-1])
def test_every_shortened_file_is_refused(tmp_path, part):
    write_graph(tmp_path / "planetoid")
    path = tmp_path / f"planetoid/ind.cora.{part}"
    whole = path.read_bytes()
    for length in range(0, len(whole), max(1, len(whole) // 25)):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"ind\.cora"):
            load("cora", tmp_path)


def test_files_run_nothing(tmp_path):
    write_graph(tmp_path / "planetoid")
    trace = tmp_path / "trace"

    class Evil:
        def __reduce__(self):
            return Path.touch, (trace,)

    for payload in (Evil(), {0: [Evil()]}, np.array([Evil()], dtype=object)):
        (tmp_path / "planetoid/ind.cora.graph").write_bytes(pickle.dumps(payload))
        with pytest.raises(DataError, match="Nothing in it was executed"):
            load("cora", tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("part", "content", "message"),
    [
        ("graph", python2_lists({0: [13]}), "edges of nodes other than 0 to 12"),
        ("graph", python2_lists({-1: [3]}), "edges of nodes other than 0 to 12"),
        ("graph", python2_lists({}), "edges of nodes other than"),
        ("test.index", b"9 10", "2 nodes from 9 on, expected 3 from 9 on"),
        ("test.index", b"3 10 11", "3 nodes from 3 on, expected 3 from 9 on"),
        ("y", b"\x80\x02" + python2_array(np.eye(7, dtype=np.int32)[:3]) + b".", "3 rows where .*ind.cora.x has 4"),
        ("tx", python2_matrix(np.ones((3, 5), np.float32)), "5 columns where .*ind.cora.allx has 6"),
        ("ty", b"\x80\x02" + python2_array(np.zeros((3, 7), np.int32)) + b".", "that have no label"),
    ],
)
def test_files_that_do_not_belong_together(tmp_path, part, content, message):
    write_graph(tmp_path / "planetoid")
    (tmp_path / f"planetoid/ind.cora.{part}").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load("cora", tmp_path)


def test_labels_of_more_classes_than_there_are(tmp_path):
    write_graph(tmp_path / "planetoid", "pubmed", classes=7)
    with pytest.raises(DataError, match=r"ind\.pubmed\.\* has 13 labels up to"):
        load("pubmed", tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"edges": np.zeros((3, 4), int)}, {"edges": np.array([[0], [99]])}, {"label": np.full(13, 7)},
        {"train": np.array([-1])}, {"indices": np.full(60, 99)}, {"shape": np.array([13])},
        {"values": np.array([object()])}, {"label": np.eye(13, 7, dtype=int)}, {"val": np.array([[4, 5]])},
        {"values": np.full(np.count_nonzero(graph_arrays()[0]), np.nan, np.float32)},
    ],
)  # fmt: skip
def test_bad_archives_name_themselves(tmp_path, changes):
    path = tmp_path / "planetoid/cora.npz"
    write_archive(path, **changes)
    with pytest.raises(DataError, match=r"cora\.npz"):
        load("cora", tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"cora\.npz"):
        load("cora", tmp_path)


def test_import_copies_the_published_files(tmp_path, monkeypatch, capsys):
    write_graph(tmp_path / "copies/somewhere")
    tool = str(TOOLS / "import_data.py")
    arguments = ["--source", str(tmp_path / "copies"), "--root", str(tmp_path / "root"), "cora"]
    monkeypatch.setattr(sys, "argv", [tool, *arguments])
    runpy.run_path(tool, run_name="__main__")
    assert "cora: corrupt" in capsys.readouterr().out  # found, but no published checksum
    assert load("cora", tmp_path / "root").test.images.tolist() == [9, 11, 12]


COUNTS = {  # nodes, edges, features, classes, entries, training nodes, nodes without a class and without an edge
    "cora": (2708, 5278, 1433, 7, 49_216, 140, 0, 0),
    "citeseer": (3327, 4552, 3703, 6, 105_165, 120, 15, 48),
    "pubmed": (19_717, 44_324, 500, 3, 988_031, 60, 0, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_the_real_graphs(name):
    if not (ROOT / f"planetoid/ind.{name}.allx").is_file():
        pytest.skip(f"no {name} in {ROOT}")
    nodes, edges, width, classes, entries, train, without, alone = COUNTS[name]
    data = load(name, ROOT)
    features = data.context["features"]
    assert features.shape == (nodes, width) and data.context["edges"].shape == (2, edges)
    assert int((features != 0).sum()) == entries and len(data.class_names) == classes
    assert (len(data.train), len(data.context["validation"]), len(data.test)) == (train, 500, 1000)
    assert data.train.labels.bincount().tolist() == [20] * classes
    lone = data.context["labels"] < 0
    assert int(lone.sum()) == without and not features[lone].any()
    degrees = data.context["edges"].flatten().bincount(minlength=nodes)
    assert int((degrees == 0).sum()) == alone and bool((degrees[lone] > 0).all())
    sums = features.double().sum(1)
    assert bool(((sums - 1).abs() < 1e-5).logical_or(sums == 0).all())


# ---------------------------------------------------------------------------------------------------- the product


def dense_adjacency(edges, nodes):
    """The definition, entry by entry."""
    matrix = np.eye(nodes)
    for a, b in zip(*edges, strict=True):
        if a != b:
            matrix[a, b] = matrix[b, a] = 1
    return np.array(
        [[matrix[i, j] / (matrix[i].sum() * matrix[j].sum()) ** 0.5 for j in range(nodes)] for i in range(nodes)]
    )


def to_dense(matrix):
    starts, columns, values = (part.numpy() for part in matrix)
    found = np.zeros((len(starts) - 1,) * 2)
    for row in range(len(found)):
        for place in range(starts[row], starts[row + 1]):
            found[row, columns[place]] += values[place]
    return found


graphs = st.integers(1, 7).flatmap(
    lambda n: st.tuples(st.just(n), st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=20))
)


@given(graphs)
def test_normalisation_is_the_dense_one(graph):
    nodes, pairs = graph
    edges = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T
    found = normalised_adjacency(edges, nodes)
    np.testing.assert_allclose(to_dense(found), dense_adjacency(edges.tolist(), nodes), atol=1e-12)
    features = torch.randn(nodes, 3, dtype=torch.float64)
    expected = dense_adjacency(edges.tolist(), nodes) @ features.numpy()
    np.testing.assert_allclose(propagate(features, found), expected, atol=1e-12)


def test_normalisation_of_a_path():
    expected = [[0.5, 0.4082482905, 0], [0.4082482905, 0.3333333333, 0.4082482905], [0, 0.4082482905, 0.5]]
    found = to_dense(normalised_adjacency(torch.tensor([[0, 1], [1, 2]]), 3))
    np.testing.assert_allclose(found, expected, atol=1e-10)


def test_normalisation_against_networkx():
    networkx = pytest.importorskip("networkx")
    pytest.importorskip("scipy")
    graph = networkx.gnm_random_graph(30, 60, seed=1)
    edges = torch.tensor(list(graph.edges)).T
    graph.add_edges_from((node, node) for node in graph)
    laplacian = networkx.normalized_laplacian_matrix(graph, nodelist=range(30)).toarray()
    np.testing.assert_allclose(to_dense(normalised_adjacency(edges, 30)), np.eye(30) - laplacian, atol=1e-12)


def test_layer_against_torch_geometric():
    geometric = pytest.importorskip("torch_geometric.nn")
    edges = torch.randint(0, 12, (2, 30))
    edges = edges[:, edges[0] != edges[1]]
    both = torch.cat([edges, edges.flip(0)], 1).unique(dim=1)
    layer = geometric.GCNConv(5, 4, bias=False)
    features = torch.randn(12, 5)
    expected = layer(features, both)
    found = propagate(features @ layer.lin.weight.T, normalised_adjacency(edges, 12))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("edges", "nodes"),
    [
        (torch.zeros(2, 3), 4), (torch.zeros(3, 2, dtype=torch.int64), 4), (torch.tensor([[0], [4]]), 4),
        (torch.tensor([[-1], [0]]), 4), (torch.zeros(2, 0, dtype=torch.int64), 0),
    ],
)  # fmt: skip
def test_bad_edges(edges, nodes):
    with pytest.raises(ArgumentError):
        normalised_adjacency(edges, nodes)


def random_graph(nodes=11, count=20, seed=0):
    return torch.randint(0, nodes, (2, count), generator=torch.Generator().manual_seed(seed))


def test_gradients_of_the_product():
    matrix = normalised_adjacency(random_graph(), 11)
    features = torch.randn(11, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: propagate(x, matrix), features)
    assert torch.autograd.gradgradcheck(lambda x: propagate(x, matrix).square(), features)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_product_in_other_types(dtype):
    matrix = normalised_adjacency(random_graph(), 11)
    features = torch.randn(11, 3).to(dtype).requires_grad_()
    found = propagate(features, matrix)
    found.sum().backward()
    assert found.dtype == features.grad.dtype == dtype
    exact = to_dense(matrix) @ features.detach().double().numpy()
    np.testing.assert_allclose(found.detach().double(), exact, atol=3 * torch.finfo(dtype).eps * np.abs(exact).max())
    column_sums = to_dense(matrix).sum(0)
    np.testing.assert_allclose(features.grad[:, 0].double(), column_sums, rtol=2 * torch.finfo(dtype).eps)


def test_a_single_node_keeps_its_features():
    matrix = normalised_adjacency(torch.zeros(2, 0, dtype=torch.int64), 1)
    assert propagate(torch.tensor([[2.0, -3.0]]), matrix).tolist() == [[2.0, -3.0]]


# ---------------------------------------------------------------------------------------------------- the network


def network(nodes=11, width=7, seed=0, **options):
    torch.manual_seed(seed)
    return GCN((), **options).attach(features=torch.rand(nodes, width), edges=random_graph(nodes))


def dense_forward(model, edges):
    """Numpy, dense and in float64."""
    adjacency = dense_adjacency(edges.tolist(), len(model.features))
    hidden = model.features.double().numpy()
    for layer in model.layers:
        hidden = np.maximum(adjacency @ hidden @ layer.weight.detach().double().numpy().T, 0)
    return adjacency @ hidden


@pytest.mark.parametrize("widths", [(16,), (5, 4), (3,)])
def test_network_is_the_dense_one(widths):
    model = network(widths=widths).eval()
    nodes = torch.tensor([3, 0, 10, 3])
    found = model(nodes)
    assert found.shape == (4, model.dim) and model.dim == widths[-1]
    np.testing.assert_allclose(found.detach(), dense_forward(model, random_graph())[nodes.numpy()], atol=1e-6)
    assert model(torch.zeros(0, dtype=torch.int64)).shape == (0, model.dim)


def test_scores_of_the_published_network():
    """The classifier acts on propagated features: (A H) W is A (H W). The values were computed apart from this code."""
    weights = torch.tensor(
        [
            [-1.2, -0.8, 0.9, 0.2, -1.2],
            [-0.2, -0.1, -1.0, 0.7, -1.2],
            [-0.3, 0.1, -0.2, 0.3, 0.7],
            [1.4, -0.6, 0.4, 0.6, -0.6],
        ]
    ).double()
    model = create("gcn", (), widths=(4,)).attach(features=torch.eye(3).double(), edges=torch.tensor([[0, 1], [1, 2]]))
    head = create_loss("softmax", 4, 2, bias=False).double()
    with torch.no_grad():
        model.layers[0].weight.copy_(weights[:3, :4].T)
        head.weight.copy_(weights[:, 3:].T)
    shares = head.logits(model.eval()(torch.arange(3))).softmax(1)
    expected = [[0.6076449222, 0.3923550778], [0.6405509848, 0.3594490152], [0.6188076117, 0.3811923883]]
    np.testing.assert_allclose(shares.detach(), expected, atol=1e-8)


def test_dropout_is_on_the_inputs_of_both_layers():
    model = network(dropout=0.5)
    nodes = torch.arange(11)
    adjacency = torch.from_numpy(dense_adjacency(random_graph().tolist(), 11)).float()
    torch.manual_seed(5)
    found = model(nodes)
    torch.manual_seed(5)
    hidden = (adjacency @ (F.dropout(model.features, 0.5) @ model.layers[0].weight.T)).relu()
    torch.testing.assert_close(found, adjacency @ F.dropout(hidden, 0.5))
    torch.manual_seed(5)
    assert torch.equal(model(nodes), found) and not torch.equal(model(nodes), found)
    model.eval()
    assert torch.equal(model(nodes), model(nodes))


def test_features_that_are_zero_stay_zero_under_dropout():
    features = torch.rand(40, 50) * (torch.rand(40, 50) < 0.2)
    model = GCN((), dropout=0.25).attach(features=features, edges=random_graph(40))
    seen = torch.stack([model._inputs() for _ in range(300)])
    kept = seen != 0
    assert not kept[:, features == 0].any()
    torch.testing.assert_close(seen[kept], (features / 0.75).expand_as(seen)[kept])
    assert float(kept[:, features != 0].float().mean()) == pytest.approx(0.75, abs=0.005)
    assert not torch.equal(kept[0], kept[1]) and torch.equal(model.eval()._inputs(), features)


def test_first_weights_are_xavier_uniform():
    model = network(width=1000, widths=(16,))
    bound = (6 / 1016) ** 0.5
    weight = model.layers[0].weight.detach()
    assert float(weight.abs().max()) <= bound and float(weight.std()) == pytest.approx(bound / 3**0.5, rel=0.02)
    assert model.layers[0].bias is None


def test_the_graph_is_no_part_of_the_state():
    model = network()
    assert list(model.state_dict()) == ["layers.0.weight"]
    other = model.attach(features=torch.rand(5, 7), edges=torch.tensor([[0, 1], [1, 2]]), labels=torch.zeros(5))
    assert other is model and len(model.layers) == 1 and model(torch.tensor([4])).shape == (1, 16)
    with pytest.raises(ArgumentError, match=r"features must be \(N, 7\) as before"):
        model.attach(features=torch.rand(5, 8), edges=torch.tensor([[0], [1]]))


@pytest.mark.parametrize(
    "options", [{"widths": ()}, {"widths": (0,)}, {"dropout": 1.5}, {"dropout": -0.1}, {"shape": (3, 8, 8)}]
)
def test_bad_options(options):
    with pytest.raises(ArgumentError):
        GCN(**options)


def test_a_network_without_its_graph_says_so():
    with pytest.raises(ArgumentError, match="call attach"):
        GCN(())(torch.tensor([0]))
    with pytest.raises(ArgumentError, match="features"):
        GCN(()).attach(features=torch.zeros(3, 2, dtype=torch.int64), edges=torch.tensor([[0], [1]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_network_in_half_precision(dtype):
    model = network().eval()
    exact = model(torch.arange(11))
    with torch.autocast("cpu", dtype):
        torch.testing.assert_close(model(torch.arange(11)).float(), exact, atol=0.02, rtol=0.02)
    low = model.to(dtype)(torch.arange(11))
    assert low.dtype == dtype
    torch.testing.assert_close(low.float(), exact, atol=0.02, rtol=0.02)


def test_its_neurons_are_found():
    """Rows of the weight are neurons of the dimension of the features."""
    layers = list(hs.energy.select(network(), output=None))
    assert [(layer.name, tuple(layer.matrices().shape)) for layer in layers] == [("layers.0", (1, 16, 7))]
    converted = hs.nn.convert(network(), "sphere", skip=())
    assert type(converted.layers[0]).__name__ != "Linear" and converted(torch.arange(3)).isfinite().all()


@pytest.mark.parametrize("map", ["cayley", "gram-schmidt"])
def test_orthogonal_training_keeps_the_gram_matrix(map):
    model = network(width=20, dropout=0.2)
    before = model.layers[0].weight.detach().clone()
    orthogonal.apply(model, map, skip=())
    head = create_loss("softmax", 16, 3, bias=False)
    optimiser = torch.optim.SGD(hs.parameter_groups(model, head, lr=0.5), lr=0.5)
    labels = torch.arange(11) % 3
    losses = []
    for _ in range(30):
        optimiser.zero_grad()
        loss = head(model(torch.arange(11)), labels)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    after = model.layers[0].weight.detach()
    assert losses[-1] < losses[0] and not torch.allclose(after, before, atol=1e-2)
    torch.testing.assert_close(after @ after.T, before @ before.T, atol=2e-4, rtol=1e-4)


# ---------------------------------------------------------------------------------------- training and evaluation


@pytest.fixture
def planted(tmp_path):
    """Three groups of nodes, joined within, whose words differ: a graph that can be learned."""
    rng = np.random.default_rng(1)
    nodes, classes, width = 120, 3, 24
    label = np.arange(nodes) % classes
    features = (rng.random((nodes, width)) < 0.15).astype(np.float32)
    features[np.arange(nodes), label * 8 + rng.integers(0, 8, nodes)] = 1
    left = rng.integers(0, nodes, 300)
    right = (left + classes * rng.integers(1, 30, 300)) % nodes  # the same class
    starts, columns, values = compressed(features)
    arrays = {"indptr": starts, "indices": columns, "values": values, "shape": features.shape, "label": label}
    arrays |= {"edges": np.stack([left, right]), "train": np.arange(12), "val": np.arange(12, 42)}
    (tmp_path / "planetoid").mkdir()
    np.savez(tmp_path / "planetoid/pubmed.npz", **arrays, test=np.arange(42, nodes))
    return tmp_path


def fit(root, recipe, *changes):
    plan = load_recipe(recipe, ["data.batch_size=12", "train.steps=40", "train.tensorboard=false", *changes])
    run = RunFolder.create(root / f"run-{len(list(root.iterdir()))}", plan, CPU)
    trainer = Trainer(plan, run, CPU, data_root=root)
    return trainer, trainer.fit()


@pytest.mark.parametrize("recipe", ["pubmed-gcn", "pubmed-gcn-opt", "pubmed-gcn-mhe", "pubmed-gcn-comhe"])
def test_recipes_learn_a_planted_graph(planted, recipe):
    trainer, metrics = fit(planted, recipe)
    assert metrics["accuracy"] > 0.8 and metrics["validation_accuracy"] > 0.8
    groups = {group["name"]: group["weight_decay"] for group in trainer._step.optimiser.param_groups}
    first = "model-rotations" if recipe.endswith("opt") else "model"
    assert groups == {first: 5e-4, "head-head.*": 0.0}
    layer = trainer.model.layers[0]
    if recipe.endswith("opt"):
        gram = layer.weight @ layer.weight.T
        drawn = layer.parametrizations.weight.original
        torch.testing.assert_close(gram, drawn @ drawn.T, rtol=1e-3, atol=1e-2)
    page = build([trainer.run.path])
    assert "nodes by class" in page and "on two principal axes" in page


def test_a_run_repeats_itself_and_validates_what_it_says(planted):
    trainer, metrics = fit(planted, "pubmed-gcn", "train.steps=5")
    _, again = fit(planted, "pubmed-gcn", "train.steps=5")
    assert metrics == again
    data = trainer.data
    nodes = data.context["validation"]
    with torch.no_grad():
        scores = trainer.head.logits(trainer.model.eval()(nodes))
    right = [int(row.argmax()) == int(data.context["labels"][node]) for row, node in zip(scores, nodes, strict=True)]
    assert metrics["validation_accuracy"] == pytest.approx(sum(right) / len(right))
    expected = F.nll_loss(scores.log_softmax(1), data.context["labels"][nodes])
    assert metrics["validation_loss"] == pytest.approx(float(expected), rel=1e-5)


def test_decay_of_the_model_alone():
    model, head = network(), create_loss("softmax", 16, 3, bias=False)
    recipe = load_recipe("cora-gcn", ["optimiser.weight_decay=0.1"]).optimiser
    groups = parameter_groups(model, head, recipe, CPU)
    assert {group["name"]: group["weight_decay"] for group in groups} == {"model": 0.1, "head-head.*": 0.0}


def test_evaluation_is_silent_where_there_is_no_graph(planted):
    eye = torch.eye(3)
    assert measure(Outputs(eye, eye, torch.arange(3), eye), ["graph"]) == {}
    trainer, metrics = fit(planted, "pubmed-gcn", "train.steps=2", "data.hold_out=[1]", "data.batch_size=8")
    assert "accuracy" in metrics and "validation_accuracy" not in metrics
    assert "nodes by class" not in build([trainer.run.path])  # its classes would have the names of others
    assert "graph" in evaluations


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 12))
def test_early_stopping_is_the_published_rule(losses, patience):
    """Whole numbers: sums and comparisons are exact however they are written."""
    seen = []
    for epoch, loss in enumerate(losses):  # as the loop of training would go
        seen.append(loss)
        if epoch > patience and patience * seen[-1] > sum(seen[-(patience + 1) : -1]):
            break
    assert early_stop(losses, patience) == len(seen)


def test_early_stopping_needs_a_patience():
    with pytest.raises(ArgumentError):
        early_stop([1.0], 0)


def test_recipes_are_the_published_settings():
    for name, batch in (("cora", 140), ("citeseer", 120), ("pubmed", 60)):
        plan = load_recipe(f"{name}-gcn")
        assert (plan.data.name, plan.data.batch_size, plan.train.steps) == (name, batch, 200)
        assert (plan.optimiser.name, plan.optimiser.lr, plan.optimiser.weight_decay) == ("adam", 0.01, 5e-4)
        assert plan.optimiser.rules[0].match == "head.*" and plan.loss.options["bias"] is False
        assert (plan.model.options["widths"], plan.model.options["dropout"]) == ((16,), 0.5)
        assert load_recipe(f"{name}-gcn-opt").orthogonal.name == "cayley"


# --------------------------------------------------------------------------------------------------------- picture


def artefacts(nodes=6, dim=3):
    rng = np.random.default_rng(0)
    names = np.frombuffer(b"One\nTwo", np.uint8)
    found = {"features": rng.standard_normal((nodes, dim)), "edges": np.array([[0, 1], [1, 2]]), "classes": names}
    labels = np.array([0, 1, -1, 1, 0, 1])[:nodes]
    return found | {"labels": labels, "predicted": np.zeros(nodes, int), "trained": np.arange(nodes) == 0}


def test_picture_of_a_graph():
    (picture,) = embedding(artefacts())
    lines, one, two = picture.figure["data"]
    assert (one["name"], two["name"]) == ("One", "Two")
    assert len(lines["x"]) == 3 and lines["x"][2] is None  # node 2 has no class and is not drawn, nor is its edge
    assert one["marker"]["symbol"] == ["circle", "circle"] and two["marker"]["symbol"] == ["x"] * 3
    assert one["marker"]["size"] == [11, 5] and two["customdata"][0] == [1, "One"]
    assert lines["x"][:2] == [one["x"][0], two["x"][0]] and lines["y"][:2] == [one["y"][0], two["y"][0]]
    assert "5 of 6 nodes" in picture.caption and "60% of all nodes" in picture.caption


def test_picture_lies_on_the_two_widest_axes():
    given = artefacts() | {"features": np.array([[3, 0, 0.0], [-1, 0, 0], [0, 2, 0], [0, -4, 0], [1, 0, 0], [0, 1, 0]])}
    (picture,) = embedding(given)
    points = {
        tuple(np.round([x, y], 6))
        for trace in picture.figure["data"][1:]
        for x, y in zip(trace["x"], trace["y"], strict=True)
    }
    units = np.array([[1, 0], [-1, 0], [0, -1], [0, 1]])
    spread = [[a, b] for a, b in points]
    distances = sorted(np.linalg.norm(np.subtract(a, b)) for i, a in enumerate(spread) for b in spread[:i])
    expected = sorted(np.linalg.norm(a - b) for i, a in enumerate(units) for b in units[:i])
    np.testing.assert_allclose(distances, expected, atol=1e-3)
    assert "100% of the variance" in picture.caption


@pytest.mark.parametrize("dim", [1, 2])
def test_pictures_of_narrow_features(dim):
    (picture,) = embedding(artefacts(dim=dim))
    assert all(value is None or np.isfinite(value) for trace in picture.figure["data"] for value in trace["y"])


# ------------------------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_product_and_dropout_on_a_gpu():
    model = network(nodes=300, width=40).cuda()
    nodes = torch.arange(300, device="cuda")
    weight = model.layers[0].weight
    torch.manual_seed(0)
    for _ in range(3):
        model(nodes).square().sum().backward()
        weight.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(nodes).square().sum().backward()
    found = []
    for _ in range(2):
        torch.manual_seed(7)
        weight.grad.zero_()
        graph.replay()
        found.append(weight.grad.clone())
    assert torch.equal(*found) and bool(found[0].any())
    graph.replay()
    assert not torch.equal(weight.grad, found[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_product_on_a_gpu_is_that_of_the_cpu():
    matrix = normalised_adjacency(random_graph(500, 3000), 500)
    features = torch.randn(500, 16, dtype=torch.float64)
    expected = propagate(features, matrix)
    found = propagate(features.cuda(), tuple(part.cuda() for part in matrix))
    torch.testing.assert_close(found.cpu(), expected)


def test_networks_are_modules_that_can_be_saved(tmp_path):
    model = network()
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = network(seed=1)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other.eval().layers[0].weight, model.layers[0].weight) and isinstance(other, nn.Module)


def test_code_of_the_page_prints_what_stands_there():
    page = (DOCS / "graphs.md").read_text()
    output, names = io.StringIO(), {}
    with contextlib.redirect_stdout(output):
        for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
            exec(compile(block, "docs/graphs.md", "exec"), names)
    assert output.getvalue() == "".join(re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    assert names["network"].layers[0].parametrizations
    assert set(re.findall(r"\bhs\.(\w+)", page)) <= set(hs.__all__)  # other tests import more than that
    for name, (nodes, edges, width, classes, _, train, *_) in COUNTS.items():
        assert f"| {name.title()} | {nodes:,} | {edges:,} | {width:,} | {classes} | {train} |" in page
