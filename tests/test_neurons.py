"""Weights as neurons: against plain float64 readings, what the layers answer, and back again without a change."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import hypersphere as hs
from hypersphere.errors import ArgumentError
from hypersphere.neurons import Layout, current, heads, is_ordinary, shape, weights


class Columns(nn.Module):
    neurons = "columns"

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 7))


def conv1d_of_transformers():
    transformers = pytest.importorskip("transformers")
    return transformers.pytorch_utils.Conv1D(6, 4)


def plain(module, weight):
    """The neurons of a weight by loops, group by group: lists of flat float64 vectors."""
    value = getattr(module, weight).detach().double()
    groups = getattr(module, "groups", 1)
    if getattr(module, "transposed", False):
        inputs = value.shape[0] // groups
        return [
            [value[g * inputs : (g + 1) * inputs, o].flatten() for o in range(value.shape[1])] for g in range(groups)
        ]
    if isinstance(module, Columns) or type(module).__name__ == "Conv1D":
        return [[value[:, o] for o in range(value.shape[1])]]
    if weight == "in_proj_weight":
        groups = 3
    if weight.startswith(("weight_ih", "weight_hh")):
        groups = {"LSTM": 4, "LSTMCell": 4, "GRU": 3, "GRUCell": 3}.get(type(module).__name__, 1)
    rows = value.shape[0] // groups
    return [[value[g * rows + o].flatten() for o in range(rows)] for g in range(groups)]


MODULES = {
    "linear": lambda: nn.Linear(5, 7),
    "conv1d": lambda: nn.Conv1d(4, 6, 3, groups=2),
    "conv2d": lambda: nn.Conv2d(4, 6, (3, 2)),
    "conv3d": lambda: nn.Conv3d(4, 6, (1, 2, 3), groups=2),
    "depthwise": lambda: nn.Conv2d(4, 8, 3, groups=4),
    "transposed 1d": lambda: nn.ConvTranspose1d(4, 6, 3),
    "transposed 2d": lambda: nn.ConvTranspose2d(4, 6, (3, 2), groups=2),
    "transposed 3d": lambda: nn.ConvTranspose3d(4, 6, (1, 2, 3), groups=2),
    "decoupled": lambda: hs.nn.TanhConvTranspose2d(4, 6, 3, groups=2),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "attention of other widths": lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=5),
    "embedding": lambda: nn.Embedding(7, 5),
    "bag": lambda: nn.EmbeddingBag(7, 5),
    "lstm": lambda: nn.LSTM(5, 4, num_layers=2, bidirectional=True, proj_size=3),
    "gru": lambda: nn.GRU(5, 4),
    "rnn": lambda: nn.RNN(5, 4),
    "lstm cell": lambda: nn.LSTMCell(5, 4),
    "gru cell": lambda: nn.GRUCell(5, 4),
    "columns": Columns,
    "conv1d of transformers": conv1d_of_transformers,
}


@pytest.mark.parametrize("kind", MODULES)
def test_vectors_are_the_neurons_written_out_and_go_back(kind):
    module = MODULES[kind]()
    assert weights(module)
    for weight in weights(module):
        value, expected = getattr(module, weight), plain(module, weight)
        assert shape(module, weight) == tuple(value.shape)
        layout = Layout(module, weight=weight)
        found = layout.vectors(value)
        assert (
            found.shape == (layout.groups, layout.n, layout.d) == (len(expected), len(expected[0]), len(expected[0][0]))
        )
        for group, rows in zip(found.detach().double(), expected, strict=True):
            assert torch.equal(group, torch.stack(rows))
        assert torch.equal(layout.weight(found, value), value)
        out = Layout(module, "out", weight=weight)
        assert torch.equal(out.vectors(value), found.mT)
        assert (out.groups, out.n, out.d) == (layout.groups, layout.d, layout.n)
        assert torch.equal(out.weight(found.mT, value), value)
        drawn = torch.randn(found.shape)
        torch.testing.assert_close(layout.vectors(layout.weight(drawn, value)), drawn, rtol=0, atol=0)


def test_all_weights_of_recurrent_layers_are_known():
    module = MODULES["lstm"]()
    assert set(weights(module)) == {name for name, p in module.named_parameters() if p.dim() == 2}
    assert {name: Layout(module, weight=name).groups for name in weights(module)} == {
        name: 1 if "hr" in name else 4 for name in weights(module)
    }


@pytest.mark.parametrize("gate", range(4))
def test_the_neurons_of_a_gate_are_what_the_gate_answers(gate):
    cell = nn.LSTMCell(5, 4, bias=False).double()
    x, h = torch.randn(5, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    c = torch.randn(4, dtype=torch.float64)
    answers = [rows @ x for rows in Layout(cell, weight="weight_ih").vectors(cell.weight_ih)]
    i, f, g, o = (answers[0].sigmoid(), answers[1].sigmoid(), answers[2].tanh(), answers[3].sigmoid())
    new = f * c + i * g
    found = cell(x.unsqueeze(0), (h.unsqueeze(0), c.unsqueeze(0)))
    torch.testing.assert_close(found[1][0], new)
    torch.testing.assert_close(found[0][0], o * new.tanh())
    assert answers[gate].shape == (4,)


def test_heads_of_attention_in_order():
    module = nn.MultiheadAttention(8, 2)
    layout = Layout(module, weight="in_proj_weight", heads=2)
    found = layout.vectors(module.in_proj_weight)
    assert found.shape == (6, 4, 8)
    for part in range(3):
        for head in range(2):
            start = 8 * part + 4 * head
            assert torch.equal(found[2 * part + head], module.in_proj_weight[start : start + 4])
    assert torch.equal(layout.weight(found, module.in_proj_weight), module.in_proj_weight)
    linear = nn.Linear(8, 24)
    assert torch.equal(Layout(linear, heads=6).vectors(linear.weight), torch.stack(linear.weight.split(4)))
    attention = nn.Module()
    attention.num_heads = 2
    assert [heads(name, 24, attention) for name in ("qkv", "kv_proj", "query", "mlp")] == [6, 4, 2, 0]


def test_channels_last_stays_and_needs_no_copy():
    layer = nn.Conv2d(4, 6, 3, groups=2).to(memory_format=torch.channels_last)
    layout = Layout(layer)
    assert layout.unordered(layer.weight).data_ptr() == layer.weight.data_ptr()
    again = layout.weight(layout.vectors(layer.weight), layer.weight)
    assert again.is_contiguous(memory_format=torch.channels_last) and torch.equal(again, layer.weight)
    ordered, unordered = layout.vectors(layer.weight), layout.unordered(layer.weight)
    torch.testing.assert_close(ordered @ ordered.mT, unordered @ unordered.mT)


def test_parametrised_weights_are_read_through_and_types_stay():
    layer = parametrizations.weight_norm(nn.Linear(5, 7))
    assert torch.equal(current(layer), layer.weight)
    assert shape(layer) == (7, 5)
    half = nn.Linear(5, 7).bfloat16()
    layout = Layout(half)
    assert layout.weight(layout.vectors(half.weight).float(), half.weight).dtype == torch.bfloat16
    assert not is_ordinary(torch.ones(2, dtype=torch.int8))
    with pytest.raises(ArgumentError, match=r"^axis must be one of"):
        Layout(half, "rows")


# Rotations of attention: the parametrisation is what attention computes with, in each of its paths.


def written_out(module, x, weight):
    """Attention in plain code, with this weight of the projections."""
    q, k, v = (
        F.linear(x, part, bias) for part, bias in zip(weight.chunk(3), module.in_proj_bias.chunk(3), strict=True)
    )
    q, k, v = (part.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for part in (q, k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
    return F.linear(scores.transpose(1, 2).flatten(2), module.out_proj.weight, module.out_proj.bias)


def turned(model):
    torch.manual_seed(1)
    with torch.no_grad():
        for _, rotation in hs.orthogonal.rotations(model):
            rotation.free.add_(0.3 * torch.randn_like(rotation.free))


def test_projections_of_attention_are_rotated_and_no_path_passes_them_by():
    module = nn.MultiheadAttention(8, 2, batch_first=True).double()
    nn.init.normal_(module.in_proj_bias)
    x, V = torch.randn(3, 5, 8, dtype=torch.float64), module.in_proj_weight.detach().clone()
    before = module(x, x, x)[0]
    hs.orthogonal.apply(module, include="in_proj_weight", output=None)
    torch.testing.assert_close(module(x, x, x)[0], before)
    turned(module)
    ((name, rotation),) = hs.orthogonal.rotations(module)
    assert (name, rotation.free.shape) == ("in_proj_weight", (3, 8, 8))
    W = torch.cat([part @ R.T for part, R in zip(V.chunk(3), rotation.matrices(), strict=True)])
    torch.testing.assert_close(module.in_proj_weight, W)
    expected = written_out(module, x, W)
    assert (expected - before).abs().max() > 1e-3
    torch.testing.assert_close(module(x, x, x)[0], expected)
    module.eval()
    with torch.no_grad():  # torch's fast path
        torch.testing.assert_close(module(x, x, x, need_weights=False)[0], expected)
    module(x, x, x)[0].square().sum().backward()
    assert rotation.free.grad.abs().sum() > 0
    assert hs.orthogonal.check(module).gram < 1e-12
    names = [name for name, _ in nn.MultiheadAttention(8, 2).named_parameters()]
    hs.orthogonal.merge(module)
    assert type(module) is nn.MultiheadAttention
    assert [name for name, _ in module.named_parameters()] == names
    torch.testing.assert_close(module(x, x, x)[0], expected)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage", "ignore:enable_nested_tensor is True")
def test_an_encoder_of_torch_computes_with_its_rotations_in_evaluation():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    hs.orthogonal.apply(model, output=None)
    assert len(list(hs.orthogonal.rotations(model))) == 8
    turned(model)
    trained = model.train()(x)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), trained)
    torch.testing.assert_close(hs.orthogonal.merge(copy.deepcopy(model))(x), trained)


def test_projections_of_other_widths_are_rotated_one_by_one_and_merged_together():
    module = nn.MultiheadAttention(8, 2, kdim=6, vdim=5, batch_first=True).double()
    arguments = [torch.randn(3, 5, d, dtype=torch.float64) for d in (8, 6, 5)]
    hs.orthogonal.apply(module, output=None)
    turned(module)
    expected = module(*arguments)[0]
    other = copy.deepcopy(module)
    hs.orthogonal.merge(module)
    torch.testing.assert_close(module(*arguments)[0], expected)
    torch.testing.assert_close(other(*arguments)[0], expected)
    assert not any("parametrizations" in name for name in module.state_dict())


def test_what_cannot_be_rotated_says_why():
    model = nn.ModuleDict({"lstm": nn.LSTM(4, 4), "cell": nn.LSTMCell(4, 4), "embed": nn.Embedding(5, 4)})
    model["sparse"] = nn.Embedding(5, 4, sparse=True)
    hs.orthogonal.apply(model, types="*", output=None)
    assert [name for name, _ in hs.orthogonal.rotations(model)] == ["cell.weight_ih", "cell.weight_hh", "embed"]
    left = {row.name: row.reason for row in hs.orthogonal.check(model).left}
    assert left == {
        "lstm.weight_ih_l0": "LSTM reads its weights past a rotation",
        "lstm.weight_hh_l0": "LSTM reads its weights past a rotation",
        "sparse": "its gradients are sparse",
    }


def test_energies_of_embeddings_and_gates_for_those_who_ask():
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "lstm": nn.LSTM(4, 3), "linear": nn.Linear(3, 3)})
    assert [layer.name for layer in hs.energy.select(model, output=None)] == ["linear"]
    left = {layer.name: layer.reason for layer in hs.energy.select(model, output=None).left}
    assert left == dict.fromkeys(("embed", "lstm.weight_ih_l0", "lstm.weight_hh_l0"), "not in types")
    found = {
        layer.name: layer.matrices() for layer in hs.energy.select(model, types=("embedding", "lstm"), output=None)
    }
    assert {name: tuple(rows.shape) for name, rows in found.items()} == {
        "embed": (1, 5, 4), "lstm.weight_ih_l0": (4, 3, 4), "lstm.weight_hh_l0": (4, 3, 3)
    }  # fmt: skip
    each = hs.energy.MHE().layer_energies(hs.energy.select(model, types="lstm", output=None))
    gates = [hs.energy.hyperspherical_energy(rows) for rows in model["lstm"].weight_ih_l0.split(3)]
    torch.testing.assert_close(each["lstm.weight_ih_l0"], torch.stack(gates).mean())
