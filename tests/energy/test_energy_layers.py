"""Which layers of a model count as neurons, read as which matrices, and the table of their energies."""

import math
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import hypersphere as hs
from hypersphere.energy import (
    MHE,
    Orthonormal,
    RPCoMHE,
    compressive_energy,
    create,
    energies,
    hyperspherical_energy,
    select,
)
from hypersphere.energy.layers import Selection, neurons
from hypersphere.energy.report import report
from hypersphere.energy.theory import floor_energy, random_energy
from hypersphere.errors import ArgumentError


def names(selection):
    return [layer.name for layer in selection]


def roles(selection):
    return {layer.name: layer.role for layer in selection}


def shapes(selection):
    return {layer.name: tuple(layer.matrices().shape) for layer in selection}


def only(model, **options):
    (layer,) = select(model, **options)
    return layer.matrices()


def response(layer, x):
    """A layer's response without bias."""
    with torch.no_grad():
        return layer(x) - layer(torch.zeros_like(x))


# Neurons: what a layer answers to an input is the inner product with them.


def test_linear_layers_are_their_weights():
    layer = nn.Linear(3, 5)
    torch.testing.assert_close(only(layer), layer.weight.unsqueeze(0))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_kernels_of_convolutions(dims, groups):
    layer = getattr(nn, f"Conv{dims}d")(4, 6, 3, groups=groups)
    kernels = only(layer)
    assert kernels.shape == (groups, 6 // groups, 4 // groups * 3**dims)
    x = torch.randn(1, 4, *[3] * dims)
    patches = x.view(groups, 4 // groups * 3**dims, 1)
    torch.testing.assert_close((kernels @ patches).flatten(), response(layer, x).flatten())


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_neurons_of_transposed_convolutions_are_output_channels(dims, groups):
    layer = getattr(nn, f"ConvTranspose{dims}d")(4, 6, 3, groups=groups)
    kernels = only(layer)
    assert kernels.shape == (groups, 6 // groups, 4 // groups * 3**dims)
    x = torch.randn(1, 4, *[1] * dims)  # every output point then sees one tap of each kernel
    by_tap = kernels.unflatten(2, (4 // groups, -1))
    expected = torch.einsum("goct,gc->got", by_tap, x.view(groups, -1))
    torch.testing.assert_close(expected.flatten(), response(layer, x).flatten())


@pytest.mark.parametrize("kind", ["SphereConv2d", "SphereLinear", "SphereConvTranspose2d"])
def test_decoupled_layers_by_kernel(kind):
    layer = getattr(hs.nn, kind)(4, 6, *([] if kind == "SphereLinear" else [3]))
    torch.testing.assert_close(only(layer), layer._by_kernel(layer.weight).flatten(2))
    converted = hs.nn.convert(nn.Sequential(nn.Conv2d(4, 6, 3, groups=2)), "sphere")
    torch.testing.assert_close(only(converted), converted[0]._by_kernel(converted[0].weight).flatten(2))


class Attention(nn.Module):
    """Linear projections with the names and attributes of well-known libraries."""

    def __init__(self, *projections, width=8, **attributes):
        super().__init__()
        for name, rows in projections:
            setattr(self, name, nn.Linear(width, rows))
        for name, value in attributes.items():
            setattr(self, name, value)
        self.out = nn.Linear(width, width)


def test_multihead_attention_by_head():
    layer = nn.MultiheadAttention(8, 2)
    assert shapes(select(layer)) == {"in_proj_weight": (6, 4, 8), "out_proj": (1, 8, 8)}
    query, key, value = layer.in_proj_weight.split(8)
    by_head = [part[4 * head :][:4] for part in (query, key, value) for head in range(2)]
    torch.testing.assert_close(next(iter(select(layer))).matrices(), torch.stack(by_head))
    apart = nn.MultiheadAttention(8, 2, kdim=6, vdim=5)
    expected = {
        "q_proj_weight": (2, 4, 8),
        "k_proj_weight": (2, 4, 6),
        "v_proj_weight": (2, 4, 5),
        "out_proj": (1, 8, 8),
    }
    assert shapes(select(apart)) == expected
    assert set(roles(select(apart)).values()) == {"hidden"}
    inside = nn.Sequential(nn.TransformerEncoderLayer(8, 4, 16), nn.Linear(8, 3))
    assert shapes(select(inside)) == {
        "0.self_attn.in_proj_weight": (12, 2, 8),
        "0.self_attn.out_proj": (1, 8, 8),
        "0.linear1": (1, 16, 8),
        "0.linear2": (1, 8, 16),
        "1": (1, 3, 8),
    }
    assert roles(select(inside))["1"] == "output"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Attention(("query", 8), ("key", 8), num_attention_heads=2, attention_head_size=4), {"query": 2, "key": 2}),
        (Attention(("q_proj", 8), ("k_proj", 4), num_heads=4, num_key_value_heads=2), {"q_proj": 4, "k_proj": 2}),
        (Attention(("q_proj", 8), ("v_proj", 4), num_heads=4, head_dim=2), {"q_proj": 4, "v_proj": 2}),
        (Attention(("qkv", 24), num_heads=4), {"qkv": 12}),
        (Attention(("to_q", 8), ("to_kv", 16), heads=2), {"to_q": 2, "to_kv": 4}),
        (Attention(("c_attn", 24), n_head=2), {"c_attn": 6}),
        (Attention(("query", 8)), {"query": 1}),
        (Attention(("query", 8), num_heads=3), {"query": 1}),
        (Attention(("query", 8), heads=nn.Linear(8, 2)), {"query": 1}),
        (Attention(("first", 8), num_heads=2), {"first": 1}),
    ],
)
def test_attention_made_of_linear_layers(model, expected):
    found = {name: shape[0] for name, shape in shapes(select(model)).items()}
    assert {name: found[name] for name in expected} == expected
    assert found["out"] == 1
    for layer in select(model):
        rows = layer.matrices().flatten(0, 1)
        torch.testing.assert_close(rows, model.get_submodule(layer.name).weight)


def test_attention_reads_its_configuration():
    class Config:
        num_attention_heads, num_key_value_heads = 4, 2

    assert shapes(select(Attention(("q_proj", 8), ("k_proj", 4), config=Config())))["k_proj"] == (2, 2, 8)


def test_layers_that_are_left_out():
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3, groups=4),  # depthwise
        nn.Linear(5, 1),
        nn.Linear(1, 5),
        nn.Embedding(7, 3),
        nn.BatchNorm1d(3),
        nn.Conv2d(4, 8, 3, groups=4),  # two kernels in each group
        nn.Linear(2, 2),
    )
    assert shapes(select(model)) == {"5": (4, 2, 9), "6": (1, 2, 2)}


def test_shared_weights_count_once():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    assert names(select(nn.Sequential(first, nn.ReLU(), first, second, nn.Linear(4, 2)))) == ["0", "4"]
    tied = nn.ModuleDict({"embedding": nn.Embedding(9, 4), "head": nn.Linear(4, 9)})
    tied["head"].weight = tied["embedding"].weight
    assert names(select(tied)) == ["head"]


# Roles.


class Backbone(nn.Module):
    def __init__(self, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)


@pytest.mark.parametrize(
    ("model", "output"),
    [
        (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), "2"),
        (Backbone(conv=nn.Conv2d(3, 4, 3), fc=nn.Linear(4, 5)), "fc"),
        (Backbone(encoder=nn.MultiheadAttention(8, 2), heads=nn.Sequential(nn.Linear(8, 5))), "heads.0"),
        (Backbone(conv=nn.Conv2d(3, 4, 3), classifier=nn.Sequential(nn.Dropout(), nn.Conv2d(4, 5, 1))), "classifier.1"),
        (Backbone(conv=nn.Conv2d(3, 4, 3), value=nn.Linear(4, 5)), "value"),
        (Backbone(squeeze=nn.Linear(3, 4), conv=nn.Conv2d(3, 4, 3)), None),  # no classifier after the convolution
        (Backbone(conv=nn.Conv2d(3, 4, 3), expand=nn.Conv2d(4, 5, 1)), None),
        (Backbone(conv=nn.Conv2d(3, 4, 3), head=nn.Conv2d(4, 5, 3)), None),
        (Backbone(conv=nn.Conv2d(3, 4, 3), head=nn.ConvTranspose2d(4, 5, 1)), None),
        (Backbone(fc=nn.Linear(3, 4), attention=nn.MultiheadAttention(8, 2)), None),
        (Backbone(fc=nn.Linear(3, 4), head=nn.Linear(4, 1)), None),  # the output is one neuron
        (nn.Linear(3, 4), None),
    ],
)
def test_the_last_layer_is_the_output_where_it_can_classify(model, output):
    found = roles(select(model))
    assert [name for name, role in found.items() if role == "output"] == ([output] if output else [])
    assert "output" not in roles(select(model, output=None)).values()


def test_the_output_by_name():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    assert roles(select(model, output="1")) == {"0": "hidden", "1": "output", "2": "hidden"}
    assert roles(select(model, output="[12]")) == {"0": "hidden", "1": "output", "2": "output"}
    with pytest.raises(ArgumentError, match=r"^output must be the name or a pattern of 0, 1, 2, got 'fc'"):
        select(model, output="fc")


def test_the_output_stays_the_same_when_layers_are_left_out():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    assert roles(select(model, exclude="2")) == {"0": "hidden", "1": "hidden"}
    assert roles(select(model, include=("0", "2"))) == {"0": "hidden", "2": "output"}


def test_include_and_exclude():
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)), "b": nn.Linear(4, 2)})
    assert names(select(model, include="a.*")) == ["a.0", "a.1"]
    assert names(select(model, include=["a.*", "b"], exclude="*.0")) == ["a.1", "b"]
    with pytest.raises(ArgumentError, match=r"^include must be the name or a pattern of a.0, a.1, b, got 'c\*'"):
        select(model, include=["a.*", "c*"])


def test_decoupled_layers_alone():
    model = nn.Sequential(hs.nn.SphereConv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 2))
    assert roles(select(model, decoupled_only=True)) == {"0": "hidden"}
    assert names(select(model)) == ["0", "1", "2"]
    assert names(select(model[1:], decoupled_only=True)) == ["1", "2"]


def test_layers_that_keep_their_angles_are_constant():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].keeps_angles = True
    assert [layer.constant for layer in select(model)] == [False, True, False]
    full, without = MHE(hidden_weight=1)(model), MHE(hidden_weight=1)(select(model, exclude="1"))
    torch.testing.assert_close(full, without)


# Reading.


def test_weights_are_read_at_the_call_and_gradients_reach_them():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, groups=1), nn.ConvTranspose2d(4, 6, 3, groups=2), nn.Linear(4, 2))
    chosen = select(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    for layer in chosen:
        weight = model.get_submodule(layer.name).weight
        (grad,) = torch.autograd.grad(layer.matrices().square().sum() / 2, weight)
        torch.testing.assert_close(grad, weight.detach())


class Twice(nn.Module):
    def forward(self, w):
        return 2 * w


def test_parametrised_weights_go_through_their_parametrisation():
    layer = nn.Linear(3, 4)
    before = layer.weight.detach().clone()
    parametrize.register_parametrization(layer, "weight", Twice())
    torch.testing.assert_close(only(layer), 2 * before.unsqueeze(0))
    only(layer).sum().backward()
    torch.testing.assert_close(layer.parametrizations.weight.original.grad, torch.full((4, 3), 2.0))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["spectral_norm", "weight_norm", "pruning"])
def test_weights_that_hooks_compute_are_computed_for_every_step(kind):
    layer = nn.Linear(6, 4)
    if kind == "pruning":
        prune.l1_unstructured(layer, "weight", amount=0.5)
    else:
        getattr(nn.utils, kind)(layer)
    optimiser = torch.optim.SGD(layer.parameters(), 0.1)
    buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    chosen = select(layer)
    for _ in range(2):  # a graph of the last step would be gone in the second
        optimiser.zero_grad()
        MHE()(chosen).backward()
        optimiser.step()
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in layer.named_buffers())
    rows = next(iter(chosen)).matrices()[0].detach()
    layer.eval()
    layer(torch.zeros(1, 6))
    torch.testing.assert_close(rows, layer.weight.detach())


def test_no_memory_is_needed():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(64, 256, 3), nn.TransformerEncoderLayer(512, 8), nn.Linear(512, 1000))
    found = select(model)
    assert len(found) == 6
    assert next(iter(found)).matrices().device.type == "meta"


def test_bad_models_are_named():
    with pytest.raises(ArgumentError, match=r"^target must contain linear or convolution layers, got ReLU"):
        select(nn.ReLU())
    with pytest.raises(ArgumentError, match=r"^target must have no lazy layer, got 1: run a batch"):
        select(nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(5)))
    lazy = nn.Sequential(nn.LazyLinear(5))
    lazy(torch.zeros(2, 3))
    assert shapes(select(lazy)) == {"0": (1, 5, 3)}
    with pytest.raises(ArgumentError, match=r"^include must be patterns"):
        select(nn.Linear(2, 3), include=[3])


def test_selections_add_up():
    model, weight = nn.Sequential(nn.Linear(4, 8)), nn.Parameter(torch.randn(10, 8))
    both = select(model, output=None) + neurons("head", lambda: weight, "output")
    assert roles(both) == {"0": "hidden", "head": "output"}
    expected = 10 * hyperspherical_energy(model[0].weight) + hyperspherical_energy(weight)
    torch.testing.assert_close(MHE()(both), expected)
    grouped = neurons("heads", lambda: weight.view(2, 5, 8), constant=True)
    assert shapes(grouped) == {"heads": (2, 5, 8)}
    assert next(iter(grouped)).constant


def test_a_sum_over_no_layer():
    for model in (nn.Linear(3, 1), nn.Linear(3, 1).double(), nn.Linear(3, 1).bfloat16()):
        chosen = select(model)
        assert len(chosen) == 0
        assert chosen.zero().item() == 0
        assert chosen.zero().dtype == (torch.float64 if model.weight.dtype == torch.float64 else torch.float32)
    assert select(nn.Linear(3, 1, device="meta")).zero().device.type == "meta"
    assert Selection([]).zero().item() == 0


def test_the_energy_of_a_model_averages_groups():
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Flatten(), nn.Linear(8, 3)).double()
    halves = model[0].weight.flatten(1).split(4)
    expected = 10 * sum(hyperspherical_energy(half) for half in halves) / 2 + hyperspherical_energy(model[2].weight)
    torch.testing.assert_close(MHE()(model), expected)


@pytest.mark.slow
def test_a_model_is_compiled_as_one_graph():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.MultiheadAttention(8, 2), nn.Linear(8, 3))
    compiled = torch.compile(MHE(half_space=True), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(model), MHE(half_space=True)(model))


def test_quantised_weights_are_left_out():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    model[0].weight = nn.Parameter(torch.ones(4, 3, dtype=torch.int8), requires_grad=False)
    assert names(select(model)) == ["1"]


# The report.


def test_report_of_a_model():
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.ReLU(), nn.Linear(8, 12), nn.Linear(12, 3))
    with torch.no_grad():
        model[2].weight[5] = 0
    for half_space in (False, True):
        conv, linear, output = report(model, MHE(s=1, half_space=half_space)).rows
        assert (conv.name, conv.role, conv.groups, conv.n, conv.d) == ("0", "hidden", 2, 4, 18)
        assert (output.name, output.role, output.groups, output.n, output.d) == ("3", "output", 1, 3, 12)
        halves = [hyperspherical_energy(w, 1, half_space=half_space) for w in model[0].weight.flatten(1).split(4)]
        assert conv.energy == pytest.approx((sum(halves) / 2).item(), rel=1e-6)
        assert conv.floor == pytest.approx(floor_energy(4, 18, 1, half_space=half_space))
        assert conv.random == pytest.approx(random_energy(1, 18, half_space=half_space, n=4))
        assert (conv.zeros, linear.zeros) == (0, 1)
        assert linear.floor == pytest.approx(floor_energy(11, 8, 1, half_space=half_space))
        assert output.energy == pytest.approx(hyperspherical_energy(model[3].weight, 1).item(), rel=1e-6)
        assert output.floor == pytest.approx(floor_energy(3, 12, 1))
        assert linear.excess == pytest.approx(linear.energy - linear.floor)
        assert linear.percent == pytest.approx(100 * (linear.energy / linear.floor - 1))
        assert linear.excess > 0


@pytest.mark.parametrize("half_space", [False, True])
def test_smallest_angle(half_space, monkeypatch):
    degrees = torch.tensor([0.0, 100.0, 130.0, 278.0], dtype=torch.float64) * math.pi / 180
    rows = torch.stack([degrees.cos(), degrees.sin()], 1)
    model = nn.Linear(2, 5)
    model.weight = nn.Parameter(torch.cat([torch.zeros(1, 2).double(), rows]).float())
    for tile in (2**24, 6, 1):  # of 5 x 5 cosines all, one row, less than a row
        monkeypatch.setattr(sys.modules["hypersphere.energy.report"], "_TILE", tile)
        (row,) = report(model, MHE(half_space=half_space)).rows
        assert row.angle == pytest.approx(2 if half_space else 30, rel=1e-5)
    close = nn.Linear(2, 2)
    close.weight = nn.Parameter(torch.tensor([[1.0, 0.0], [1.0, 1e-5]]))
    assert report(close).rows[0].angle == pytest.approx(math.degrees(1e-5), rel=1e-3)
    with torch.no_grad():
        close.weight.zero_()
    empty = report(close).rows[0]
    assert math.isnan(empty.angle)
    assert (empty.energy, empty.floor, empty.zeros) == (0, 0, 2)
    assert "-" in str(report(close)).splitlines()[1].split()


def test_report_prints_a_table():
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3))
    nn.init.orthogonal_(model[0].weight)
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(3))
    table = str(report(model, MHE(half_space=True)))
    assert table == repr(report(model, MHE(half_space=True)))
    lines = table.splitlines()
    cells = [" ".join(line.split()) for line in lines[:3]]
    assert cells == [
        "name role groups n d energy floor random excess % zeros angle note",
        "0 hidden 1 3 6 0.45000 0.45000 0.58333 0.00000 0.00 0 90.0",
        "1 output 1 3 3 0.50000 0.33333 inf 0.16667 50.00 0 90.0",
    ]
    assert lines[3] == "mean energy over pairs, s = 2, chords, half space (output: full)"
    assert len({len(line) for line in lines[1:3]}) == 1


def test_report_follows_angles_and_precision():
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU()).bfloat16()
    row = report(model, MHE(s=0, angular=True)).rows[0]
    assert row.energy == pytest.approx(hyperspherical_energy(model[0].weight, 0, angular=True).item(), rel=1e-5)
    assert row.random == pytest.approx(random_energy(0, 6, angular=True))
    assert row.percent == pytest.approx(100 * (row.energy - row.floor) / abs(row.floor))
    assert report(select(model)).rows[0].energy == report(model).rows[0].energy


def test_report_changes_nothing():
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 4)), nn.Dropout(), nn.Linear(4, 3))
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    generator = torch.get_rng_state()
    report(model)
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def test_report_gives_the_value_of_the_regulariser_itself():
    model = nn.Sequential(nn.Linear(12, 6), nn.Linear(6, 4))
    weights = [layer.weight.detach() for layer in model]
    found = report(model, Orthonormal())
    assert [row.energy for row in found.rows] == pytest.approx([Orthonormal()(w).item() for w in weights])
    projecting = RPCoMHE(dim=6, share="layer")
    rows = report(model, projecting).rows
    projections = projecting.bank.get("layer:0:d12", (5, 6, 12), weights[0])
    assert rows[0].energy == pytest.approx(compressive_energy(weights[0], projections).mean().item(), rel=1e-6)
    assert rows[1].energy == pytest.approx(hyperspherical_energy(weights[1]).item(), rel=1e-6)
    for row in (*found.rows, *rows):
        assert math.isnan(row.floor) and math.isnan(row.random) and math.isnan(row.percent) and row.angle > 0
    assert str(found).splitlines()[-1].startswith("values of Orthonormal(")
    with pytest.raises(ArgumentError, match=r"^energy must be a regulariser, got ReLU"):
        report(model, nn.ReLU())


@pytest.mark.parametrize("name", sorted(energies))
def test_every_member_reports(name):
    model = nn.Sequential(nn.Linear(40, 6), nn.ReLU(), nn.Linear(6, 4))
    member = create(name, **({"include": "*"} if name == "mhe-gan" else {}))
    member.prepare(model)
    assert str(member.report(model)) == str(report(model, member))


def test_a_wide_layer_starts_close_to_the_floor():
    row = report(nn.Conv2d(64, 64, 3)).rows[0]
    assert row.floor == pytest.approx(0.49219, abs=1e-5)
    assert row.random == pytest.approx(0.50087, abs=1e-5)
    assert 0 < row.percent < 2


def test_linear_layers_with_neurons_in_columns():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=12, n_layer=1, n_head=3, vocab_size=20, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    found = {layer.name: layer for layer in select(model)}
    shapes = {name: tuple(layer.matrices().shape) for name, layer in found.items()}
    block = "transformer.h.0"
    assert shapes == {
        f"{block}.attn.c_attn": (9, 4, 12),
        f"{block}.attn.c_proj": (1, 12, 12),
        f"{block}.mlp.c_fc": (1, 48, 12),
        f"{block}.mlp.c_proj": (1, 12, 48),
        "lm_head": (1, 20, 12),
    }
    weight = model.transformer.h[0].attn.c_attn.weight
    assert torch.equal(found[f"{block}.attn.c_attn"].matrices()[4], weight[:, 16:20].T)  # keys of the second head
    assert [layer.name for layer in found.values() if layer.role == "output"] == ["lm_head"]
