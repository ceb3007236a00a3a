"""Rotations on any model: unchanged outputs, kept angles, merged models, resampled coordinates."""

import copy
import itertools
import math
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hypersphere as hs
from hypersphere.errors import ArgumentError
from hypersphere.models import models
from hypersphere.orthogonal.apply import SAMPLINGS
from hypersphere.orthogonal.rotation import Layout, Rotation, invariants

MAPS = [name for name in hs.orthogonal.maps if hs.orthogonal.create(name).exact]


def mlp(*sizes, seed=0):
    torch.manual_seed(seed)
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Everything(nn.Module):
    """One of each kind of layer."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(4, 6, 3, padding=1)
        self.conv2 = nn.Conv2d(6, 8, (3, 2), stride=2, dilation=(1, 2), groups=2, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up = nn.ConvTranspose2d(8, 6, 3, stride=2, groups=2)
        self.conv3 = nn.Conv3d(6, 5, (1, 2, 2), padding=(0, 1, 1))
        self.point = nn.Linear(5, 12, bias=False)
        self.out = nn.Linear(12, 3)

    def forward(self, x):
        x = self.conv1(x)
        x = self.conv2(x.unflatten(2, (4, -1)))
        x = self.up(self.depthwise(x).relu())
        x = self.conv3(x.unsqueeze(2)).flatten(2).mean(2)
        return self.out(self.point(x).relu())


def sample(seed=1):
    return torch.randn(3, 4, 24, generator=torch.Generator().manual_seed(seed))


def turn_at_random(model, size=0.3, seed=3):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, rotation in hs.orthogonal.rotations(model):
            rotation.free.add_(size * torch.randn(rotation.free.shape, generator=generator, dtype=rotation.free.dtype))
            if rotation.carried is not None:
                rotation.carried.copy_(rotation.map.warm_start(rotation.free))


@pytest.mark.parametrize("name", MAPS)
def test_a_fresh_rotation_changes_no_output(name):
    model = Everything()
    before = model(sample())
    hs.orthogonal.apply(model, name)
    torch.testing.assert_close(model(sample()), before, rtol=1e-5, atol=1e-5)
    assert [n for n, _ in hs.orthogonal.rotations(model)] == ["conv1", "conv2", "depthwise", "up", "conv3", "point"]


@pytest.mark.parametrize("name", MAPS)
def test_merged_model_is_plain_and_computes_the_same(name):
    model = Everything()
    plain = copy.deepcopy(model)
    hs.orthogonal.apply(model, name)
    turn_at_random(model)
    before = model(sample())
    assert (before - plain(sample())).abs().max() > 1e-3
    assert hs.orthogonal.merge(model) is model
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in plain.state_dict().items()}
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert all(p.requires_grad for p in model.parameters())
    assert not any(hasattr(m, "keeps_angles") for m in model.modules())
    torch.testing.assert_close(model(sample()), before, rtol=1e-6, atol=1e-6)
    with pytest.raises(ArgumentError, match="merged before"):
        hs.orthogonal.merge(model)


def test_weight_is_the_rotated_neurons_written_out():
    """An independent float64 version, group by group, neuron by neuron."""
    model = Everything().double()
    hs.orthogonal.apply(model, "cayley")
    turn_at_random(model)
    for name in ("conv1", "conv2", "up", "conv3", "point"):
        layer = model.get_submodule(name)
        (rotation,) = layer.parametrizations.weight
        V, W = layer.parametrizations.weight.original, layer.weight
        groups = getattr(layer, "groups", 1)
        assert rotation.free.shape[0] == groups
        for g in range(groups):
            Q = torch.zeros_like(rotation.free[g])
            upper = torch.triu_indices(rotation.d, rotation.d, 1)
            Q[upper[0], upper[1]] = rotation.free[g][upper[0], upper[1]]
            Q = Q - Q.T
            eye = torch.eye(rotation.d, dtype=torch.float64)
            R = (eye + Q) @ torch.linalg.inv(eye - Q)
            if name == "up":
                rows = V.shape[0] // groups
                old = [V[g * rows : (g + 1) * rows, o].flatten() for o in range(V.shape[1])]
                new = [W[g * rows : (g + 1) * rows, o].flatten() for o in range(V.shape[1])]
            else:
                rows = V.shape[0] // groups
                old = [V[g * rows + o].flatten() for o in range(rows)]
                new = [W[g * rows + o].flatten() for o in range(rows)]
            for v, w in zip(old, new, strict=True):
                torch.testing.assert_close(w, R @ v, rtol=1e-10, atol=1e-10)


def test_depthwise_kernels_share_one_rotation():
    model = hs.orthogonal.apply(Everything(), "cayley")
    (rotation,) = model.depthwise.parametrizations.weight
    assert rotation.free.shape == (1, 9, 9)
    turn_at_random(model)
    V, W = model.depthwise.parametrizations.weight.original.flatten(1), model.depthwise.weight.flatten(1)
    torch.testing.assert_close(W, V @ rotation.matrices()[0].T)


def test_only_rotations_the_rest_and_no_neurons_are_parameters():
    model = hs.orthogonal.apply(mlp(6, 8, 8, 3))
    names = {name for name, _ in model.named_parameters()}
    rotations = {f"{i}.parametrizations.weight.0.free" for i in (0, 2)}
    assert names == rotations | {"0.bias", "2.bias", "4.weight", "4.bias"}
    assert sum(r.count for _, r in hs.orthogonal.rotations(model)) == 6 * 5 // 2 + 8 * 7 // 2
    assert "0.parametrizations.weight.original" in model.state_dict()


def test_published_parameter_counts_of_cnn6():
    model = models.create("cnn6-opt", (3, 32, 32))
    hs.orthogonal.apply(model, skip=None)
    found = hs.orthogonal.check(model)
    assert sorted(row.d for row in found.rows) == [27, 576, 576, 576, 576, 576, 1024]
    # unconstrained parameters of the rotations and the plain classifier of 64 x 100
    assert sum(row.free for row in found.rows) + 6400 == 1_358_527


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"include": "2"}, ["2"]),
        ({"exclude": ["0"]}, ["2"]),
        ({"skip": None}, ["0", "2", "4"]),
        ({"skip": ("first", "last")}, ["2"]),
        ({"include": lambda name, layer: layer.out_features == 8 and name == "0"}, ["0"]),
    ],
)
def test_layers_are_chosen(options, names):
    model = hs.orthogonal.apply(mlp(6, 8, 8, 3), **options)
    assert [name for name, _ in hs.orthogonal.rotations(model)] == names


def test_bad_arguments_name_themselves_and_change_nothing():
    model = mlp(6, 8, 3)
    before = copy.deepcopy(model.state_dict())
    cases = [
        ({"include": ["0", "nothing"]}, "include must be the name or a pattern of 0, 2, got 'nothing'"),
        ({"exclude": "*"}, "model must have a layer that is chosen"),
        ({"start": "zero"}, "start must be one of"),
        ({"blocks": 0}, "blocks must be at least 1"),
        ({"sample": 0.0}, "sample must be greater than 0"),
        ({"sample": 0.5, "sampling": "best"}, "sampling must be one of"),
        ({"init": "uniform"}, "init must be one of"),
        ({"sides": "out"}, "sides must be one of"),
        ({"gain": 0}, "gain must be greater than 0"),
    ]
    for options, message in cases:
        with pytest.raises(ArgumentError, match=message):
            hs.orthogonal.apply(model, **options)
    with pytest.raises(hs.registry.UnknownNameError, match="Did you mean 'cayley'"):
        hs.orthogonal.apply(model, "caylay")
    assert list(model.state_dict()) == list(before)
    hs.orthogonal.apply(model)
    with pytest.raises(ArgumentError, match="rotated already: merge it first"):
        hs.orthogonal.apply(model)
    with pytest.raises(ArgumentError, match="got none"):
        hs.orthogonal.penalty(mlp(2, 3, 2))


def test_shared_parametrised_and_lazy_weights_are_left_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].weight = model[0].weight
    nn.utils.parametrizations.weight_norm(model[2])
    with pytest.raises(ArgumentError, match=r"another module shares its weight(.|\n)*its weight is parametrised"):
        hs.orthogonal.apply(model)
    with pytest.raises(ArgumentError, match="lazy"):
        hs.orthogonal.apply(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2)))


# ------------------------------------------------------------------------------------------------ invariance


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cayley", {}),
        ("cayley", {"method": "newton"}),
        pytest.param("gram_schmidt", {}, marks=pytest.mark.slow),
        ("gram_schmidt", {"method": "newton"}),
        pytest.param("householder", {}, marks=pytest.mark.slow),
        pytest.param("loewdin", {}, marks=pytest.mark.slow),
        pytest.param("loewdin", {"method": "newton-schulz"}, marks=pytest.mark.slow),
        ("exponential", {"max_norm": 8.0}),
    ],
)
def test_gram_norms_energies_and_singular_values_survive_a_thousand_steps(name, options):
    """Float32, while the rotations move far."""
    model = mlp(12, 16, 10, 4)
    hs.orthogonal.apply(model, name, **options)
    layers = [model[0], model[2]]
    before = [layer.weight.detach().double() for layer in layers]
    groups = hs.parameter_groups(model, lr=0.02)
    optimiser = torch.optim.SGD(groups, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 12, generator=generator)
    y = torch.randint(4, (64,), generator=generator)
    for step in range(1000):
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()
        if step % 100 == 99:
            hs.orthogonal.retract(model)
    for layer, V in zip(layers, before, strict=True):
        W = layer.weight.detach().double()
        scale = (V @ V.T).abs().max()
        assert ((W @ W.T - V @ V.T).abs().max() / scale) < 1e-5
        torch.testing.assert_close(W.norm(dim=1), V.norm(dim=1), rtol=1e-5, atol=0)
        torch.testing.assert_close(torch.linalg.svdvals(W), torch.linalg.svdvals(V), rtol=1e-4, atol=1e-5)
        for s in (0.0, 1.0, 2.0):
            now, then = (hs.energy.hyperspherical_energy(rows, s) for rows in (W, V))
            torch.testing.assert_close(now, then, rtol=1e-5, atol=1e-5)
    report = hs.orthogonal.check(model)
    assert report.error < 1e-5
    assert report.gram < 1e-5
    assert min(row.moved for row in report.rows) > 0.1


def test_energy_terms_leave_rotated_layers_out_unless_neurons_are_learned():
    model = hs.orthogonal.apply(mlp(6, 8, 8, 3), include="0")
    constant = {layer.name: layer.constant for layer in hs.energy.select(model)}
    assert constant == {"0": True, "2": False, "4": False}
    free = hs.orthogonal.apply(mlp(6, 8, 8, 3), "unconstrained")
    learned = hs.orthogonal.apply(mlp(6, 8, 8, 3), learn_neurons=True)
    for model in (free, learned):
        assert not any(layer.constant for layer in hs.energy.select(model))


# ----------------------------------------------------------------------------------- computed once, together


def count_calls(monkeypatch):
    calls = []
    original = hs.orthogonal.maps["cayley"].factory.__call__

    def counted(self, P):
        calls.append(tuple(P.shape))
        return original(self, P)

    monkeypatch.setattr(hs.orthogonal.maps["cayley"].factory, "__call__", counted)
    return calls


def test_layers_of_equal_size_are_one_batch_once_a_forward_pass(monkeypatch):
    model = hs.orthogonal.apply(mlp(8, 8, 8, 6, 3))
    calls = count_calls(monkeypatch)
    model(torch.randn(2, 8)).sum().backward()
    assert calls == [(3, 8, 8)]
    with torch.no_grad():
        model(torch.randn(2, 8))
    assert len(calls) == 2
    assert all(rotation._computed is None for _, rotation in hs.orthogonal.rotations(model))


def test_gradients_are_those_of_layers_computed_one_by_one():
    model = hs.orthogonal.apply(mlp(8, 8, 8, 6, 3).double())
    turn_at_random(model)
    x = torch.randn(5, 8, dtype=torch.float64)
    model(x).square().sum().backward()
    together = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    y = x
    for layer in model:  # past the hooks of the whole
        y = layer(y)
    y.square().sum().backward()
    for p, expected in zip(model.parameters(), together, strict=True):
        torch.testing.assert_close(p.grad, expected)


def test_cached_block_accumulates_the_same_gradients(monkeypatch):
    model = hs.orthogonal.apply(mlp(8, 8, 8, 3).double())
    turn_at_random(model)
    batches = torch.randn(3, 5, 8, dtype=torch.float64)
    for x in batches:
        model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    calls = count_calls(monkeypatch)
    with hs.orthogonal.cached(model):
        for x in batches:
            model(x).square().sum().backward()
    assert len(calls) == 1
    for p, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient)
    with (
        hs.orthogonal.cached(model),
        pytest.raises(ArgumentError, match="another cached"),
        hs.orthogonal.cached(model),
    ):
        pass


def test_a_failing_forward_pass_leaves_nothing_behind():
    model = hs.orthogonal.apply(mlp(8, 8, 3))
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 5))
    assert all(rotation._computed is None for _, rotation in hs.orthogonal.rotations(model))
    assert model(torch.randn(2, 8)).shape == (2, 3)


def test_deep_copies_are_models_of_their_own():
    model = hs.orthogonal.apply(mlp(8, 8, 3))
    other = copy.deepcopy(model)
    turn_at_random(other)
    x = torch.randn(2, 8)
    assert not torch.allclose(model(x), other(x))
    other(x).sum().backward()
    assert model[0].parametrizations.weight[0].free.grad is None
    assert other[0].parametrizations.weight[0].free.grad is not None


# --------------------------------------------------------------------------------------------- neurons, forms


def test_neurons_are_drawn_from_seed_and_name_alone():
    a = hs.orthogonal.apply(mlp(8, 8, 8, 3, seed=1), init="kaiming", seed=5)
    b = hs.orthogonal.apply(mlp(8, 8, 8, 3, seed=2), init="kaiming", seed=5, include="2")
    torch.testing.assert_close(a[2].weight, b[2].weight)
    assert not torch.allclose(a[0].weight, a[2].weight)
    c = hs.orthogonal.apply(mlp(8, 8, 8, 3), init="kaiming", seed=6)
    assert not torch.allclose(a[2].weight, c[2].weight)


@pytest.mark.parametrize(
    ("init", "sigma"), [("kaiming", (2 / 400) ** 0.5), ("xavier", (2 / 700) ** 0.5), ("normal", 1)]
)
def test_spread_of_drawn_neurons(init, sigma):
    model = hs.orthogonal.apply(nn.Sequential(nn.Linear(400, 300), nn.Linear(300, 2)), "cayley", init=init, mean=0.0)
    weight = model[0].parametrizations.weight.original
    assert weight.std().item() == pytest.approx(sigma, rel=0.02)
    assert abs(weight.mean().item()) < 0.02 * sigma


def test_unit_norms_gain_and_zero_neurons():
    model = mlp(6, 8, 3)
    with torch.no_grad():
        model[0].weight[0] = 0
    hs.orthogonal.apply(model, unit_norm=True, gain=2.5)
    norms = model[0].weight.norm(dim=1)
    assert norms[0] == 0
    torch.testing.assert_close(norms[1:], torch.full((7,), 2.5))
    model(torch.randn(4, 6)).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_refined_neurons_have_less_energy_and_the_same_norms():
    plain, refined = mlp(3, 12, 2), mlp(3, 12, 2)
    hs.orthogonal.apply(plain)
    hs.orthogonal.apply(refined, refine=200)
    before, after = (m[0].weight for m in (plain, refined))
    assert hs.energy.hyperspherical_energy(after, 1.0) < 0.98 * hs.energy.hyperspherical_energy(before, 1.0)
    torch.testing.assert_close(after.norm(dim=1), before.norm(dim=1))


def test_normal_start_is_far_from_the_identity_and_orthogonal():
    model = hs.orthogonal.apply(mlp(16, 16, 3), "gram_schmidt", start="normal", seed=0)
    (row,) = hs.orthogonal.check(model).rows
    assert row.moved > 1
    assert row.error < 1e-5


def test_blocks_follow_input_channels():
    conv = nn.Sequential(nn.Conv2d(6, 8, 3), nn.Conv2d(8, 4, 3), nn.Conv2d(3, 4, 3)).double()
    hs.orthogonal.apply(conv, blocks=2, skip=None)
    counts = [tuple(r.free.shape) for _, r in hs.orthogonal.rotations(conv)]
    assert counts == [(2, 27, 27), (2, 36, 36), (1, 27, 27)]  # three channels are not two halves
    (rotation,) = conv[0].parametrizations.weight
    with torch.no_grad():
        rotation.free[0].normal_()
    V, W = conv[0].parametrizations.weight.original, conv[0].weight
    torch.testing.assert_close(W[:, 3:], V[:, 3:])
    assert not torch.allclose(W[:, :3], V[:, :3])
    R = rotation.dense()[0]
    assert (R[:27, 27:] == 0).all() and (R[27:, :27] == 0).all()
    torch.testing.assert_close(W.flatten(1), V.flatten(1) @ R.T)


def test_shared_blocks_equal_separate_ones_that_are_equal():
    one, two = (nn.Sequential(nn.Linear(12, 5)).double() for _ in range(2))
    two.load_state_dict(one.state_dict())
    hs.orthogonal.apply(one, blocks=3, share_blocks=True, skip=None)
    hs.orthogonal.apply(two, blocks=3, skip=None)
    block = 0.4 * torch.randn(4, 4, dtype=torch.float64)
    with torch.no_grad():
        one[0].parametrizations.weight[0].free[0] = block
        two[0].parametrizations.weight[0].free[:] = block
    torch.testing.assert_close(one[0].weight, two[0].weight)
    assert one[0].parametrizations.weight[0].count == 6
    assert two[0].parametrizations.weight[0].count == 18


def test_one_block_is_ordinary_training():
    one, two = (nn.Sequential(nn.Linear(12, 5)).double() for _ in range(2))
    two.load_state_dict(one.state_dict())
    hs.orthogonal.apply(one, blocks=1, skip=None)
    hs.orthogonal.apply(two, skip=None)
    turn_at_random(one)
    turn_at_random(two)
    torch.testing.assert_close(one[0].weight, two[0].weight)


def test_published_rows_turned_on_some_coordinates():
    """Rows 2 and 0 of the published matrix, turned by 30 degrees; also from both sides."""
    V = torch.tensor([[0.5, -1, 0.2, 0.7], [1, 0.4, -0.6, 0.1], [-0.3, 0.9, 0.8, -1.1]], dtype=torch.float64)

    def turning(angle, index, axis, d):
        # Cayley of tan(angle / 2): [[c, -s], [s, c]]
        rotation = Rotation(
            hs.orthogonal.create("cayley"),
            Layout(nn.Linear(3, 4), axis),
            d,
            block=2,
            index=torch.tensor([index]),
            dtype=torch.float64,
        )
        with torch.no_grad():
            rotation.free[:, 0, 1] = -torch.tan(torch.tensor(angle, dtype=torch.float64) / 2)
        return rotation

    some = turning(torch.pi / 6, [2, 0], "in", 3)(V.T).T
    expected = torch.tensor(
        [
            [0.28301270189, -0.41602540378, 0.57320508076, 0.056217782649],
            [1, 0.4, -0.6, 0.1],
            [-0.50980762114, 1.2794228634, 0.59282032303, -1.3026279442],
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(some, expected, rtol=1e-9, atol=1e-9)
    left, right = turning(torch.pi / 6, [0, 2], "in", 3), turning(torch.pi / 3, [1, 3], "out", 4)
    # W = R V P turns columns by P itself, and vectors by its transpose.
    with torch.no_grad():
        right.free.neg_()
    both = right(left(V.T)).T
    expected = torch.tensor(
        [
            [0.58301270189, 0.34330127019, -0.22679491924, 1.717820323],
            [1, 0.28660254038, -0.6, -0.29641016151],
            [-0.0098076211353, -0.38217967697, 0.79282032303, -0.54330127019],
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(both, expected, rtol=1e-9, atol=1e-9)


# ------------------------------------------------------------------------------------------- stochastic forms


@pytest.mark.parametrize("sampling", list(SAMPLINGS))
def test_resampling_keeps_the_function_the_angles_and_redraws(sampling):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 4)
    )
    start = model(torch.ones(1, 3, 7, 7))
    hs.orthogonal.apply(model, sample=0.25, sampling=sampling, seed=0)
    torch.testing.assert_close(model(torch.ones(1, 3, 7, 7)), start)
    names = dict(hs.orthogonal.rotations(model))
    assert names["0"].index is None  # the first layer is turned whole
    gram = [m.weight.flatten(1).double() @ m.weight.flatten(1).double().T for m in (model[2], model[4])]
    optimiser = torch.optim.Adam(hs.parameter_groups(model, lr=1e-2), lr=1e-2)
    resampling = hs.orthogonal.Resampling(model, 5, optimiser, seed=1)
    generator = torch.Generator().manual_seed(0)
    seen = []
    for step in range(1, 41):
        x = torch.randn(4, 3, 7, 7, generator=generator)
        optimiser.zero_grad()
        F.cross_entropy(model(x), torch.arange(4)).backward()
        optimiser.step()
        before = model(x).detach()
        moved = names["2"].free.detach().clone()
        resampling()
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
        if step % 5 == 0:
            assert moved.abs().max() > 0
            assert (names["2"].free == 0).all()
            state = optimiser.state[names["2"].free]
            assert all((value == 0).all() for value in state.values())
            assert optimiser.state[names["0"].free]["step"] == step  # a whole rotation goes on
            seen.append(names["2"].index.clone())
    assert any(not torch.equal(a, b) for a, b in zip(seen[1:], seen, strict=False))
    for layer, V in zip((model[2], model[4]), gram, strict=True):
        W = layer.weight.flatten(1).double()
        assert (W @ W.T - V).abs().max() / V.abs().max() < 1e-5


def test_coordinates_of_the_samplings():
    generator = torch.Generator().manual_seed(0)
    uniform = SAMPLINGS["uniform"](36, 9, 9, 0, generator)
    assert len(set(uniform.tolist())) == 9
    blocks = SAMPLINGS["blocks"](36, 5, 9, 0, generator)
    assert len(set(blocks.tolist())) == 35
    channels = SAMPLINGS["channels"](36, 18, 9, 0, generator)
    assert len({int(i) // 9 for i in channels}) == 2 and len(set(channels.tolist())) == 18
    parts = [SAMPLINGS["partition"](36, 10, 9, turn, torch.Generator().manual_seed(1)) for turn in range(4)]
    assert sorted(torch.cat(parts[:3]).tolist() + parts[3][:6].tolist()) == list(range(36))
    assert all(len(set(part.tolist())) == 10 for part in parts)


@given(st.integers(2, 12), st.integers(0, 10_000), st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_rounds_on_any_coordinates_keep_the_gram_matrix(d, seed, rounds):
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(d, d + 1, bias=False, dtype=torch.float64)
    model = hs.orthogonal.apply(nn.Sequential(layer), sample=max(1, d // 2), seed=seed, skip=None)
    before = layer.weight @ layer.weight.T
    resampling = hs.orthogonal.Resampling(model, 1, seed=seed)
    (rotation,) = layer.parametrizations.weight
    for _ in range(rounds):
        with torch.no_grad():
            rotation.free.copy_(torch.randn(rotation.free.shape, generator=generator, dtype=torch.float64))
        resampling()
    torch.testing.assert_close(layer.weight @ layer.weight.T, before, rtol=1e-9, atol=1e-9)


def test_a_share_of_all_coordinates_is_rebasing():
    """Sampling all coordinates is the same as turning the whole and starting again."""
    a, b = (nn.Sequential(nn.Linear(5, 4, dtype=torch.float64)) for _ in range(2))
    b.load_state_dict(a.state_dict())
    hs.orthogonal.apply(a, sample=5, skip=None)
    hs.orthogonal.apply(b, skip=None)
    for model in (a, b):
        turn_at_random(model)
    (ra,), (rb,) = a[0].parametrizations.weight, b[0].parametrizations.weight
    order = ra.index[0]
    embedded = torch.zeros(5, 5, dtype=torch.float64)
    embedded[order.unsqueeze(1), order] = ra.matrices()[0].detach()
    torch.testing.assert_close(a[0].weight, a[0].parametrizations.weight.original @ embedded.T)
    before = b[0].weight.detach().clone()
    hs.orthogonal.rebase(b)
    torch.testing.assert_close(b[0].weight, before)
    torch.testing.assert_close(b[0].parametrizations.weight.original, before)
    assert (rb.free == 0).all()


def test_poet_keeps_singular_values_through_merges():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 4))
    hs.orthogonal.poet(model, block=8, seed=0)
    layers = [model[0], model[2]]
    before = [torch.linalg.svdvals(layer.weight.double()) for layer in layers]
    gram = layers[0].weight.double() @ layers[0].weight.double().T
    optimiser = torch.optim.Adam(hs.parameter_groups(model, lr=1e-3, rotation_lr=2e-3))
    resampling = hs.orthogonal.Resampling(model, 20, optimiser)
    x, y = torch.randn(64, 24), torch.randint(4, (64,))
    losses = []
    for _ in range(200):
        optimiser.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimiser.step()
        resampling()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    for layer, old in zip(layers, before, strict=True):
        torch.testing.assert_close(torch.linalg.svdvals(layer.weight.double()), old, rtol=1e-3, atol=1e-4)
    now = layers[0].weight.double() @ layers[0].weight.double().T
    assert (now - gram).abs().max() > 1e-2  # angles are not kept
    assert not getattr(layers[0], "keeps_angles", False)


def test_resampling_needs_something_to_draw():
    with pytest.raises(ArgumentError, match=r"apply\(\.\.\., sample=0.25\)"):
        hs.orthogonal.Resampling(hs.orthogonal.apply(mlp(4, 4, 2)), 5)


# ------------------------------------------------------------------------------------ controls: unconstrained matrices


def test_penalty_is_published_and_pulls_towards_orthogonal_matrices():
    layer = nn.Linear(3, 4, dtype=torch.float64)
    model = hs.orthogonal.apply(nn.Sequential(layer), "unconstrained", skip=None)
    (rotation,) = layer.parametrizations.weight
    P = torch.tensor([[2, -1, 0.5], [0.3, 1.5, -0.7], [-0.4, 0.8, 1.2]], dtype=torch.float64)
    with torch.no_grad():
        rotation.free[0] = P
    value = hs.orthogonal.penalty(model)
    assert value.item() == pytest.approx(28.1892)
    value.backward()
    expected = torch.tensor([[34.1, -27.7, 7.2], [-8.188, 16.748, -6.472], [-9.696, 9.408, 3.28]], dtype=torch.float64)
    torch.testing.assert_close(rotation.free.grad[0], expected, rtol=1e-9, atol=1e-9)
    assert hs.orthogonal.penalty(model, squared=False).item() == pytest.approx(5.3093502427)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(300):
        optimiser.zero_grad()
        hs.orthogonal.penalty(model).backward()
        optimiser.step()
    assert hs.orthogonal.orthogonality_error(rotation.matrices()).max() < 1e-5


def test_merge_and_assignment_with_free_matrices():
    layer = nn.Linear(3, 4, dtype=torch.float64)
    model = hs.orthogonal.apply(nn.Sequential(layer), "unconstrained", skip=None)
    turn_at_random(model)
    target = torch.randn(4, 3, dtype=torch.float64)
    layer.weight = target
    torch.testing.assert_close(layer.weight, target)
    hs.orthogonal.merge(model)
    torch.testing.assert_close(layer.weight.detach(), target)


# ------------------------------------------------------------------------------------------- precision, states


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_keep_their_type(dtype):
    model = mlp(16, 16, 3).to(dtype)
    x = torch.randn(4, 16, dtype=dtype)
    before = model(x)
    hs.orthogonal.apply(model)
    (rotation,) = model[0].parametrizations.weight
    assert rotation.free.dtype == torch.float32
    assert model[0].weight.dtype == dtype
    torch.testing.assert_close(model(x), before)
    model(x).float().square().sum().backward()
    assert rotation.free.grad.isfinite().all() and rotation.free.grad.abs().max() > 0
    turn_at_random(model)
    before = model(x)
    torch.testing.assert_close(hs.orthogonal.merge(model)(x), before)


def test_under_autocast_rotations_are_float32():
    model = hs.orthogonal.apply(mlp(16, 16, 3))
    turn_at_random(model)
    exact = model[0].weight
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model[0].weight, exact, rtol=1e-6, atol=1e-7)
        out = model(torch.randn(4, 16))
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()


def test_channels_last_stays():
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)
    hs.orthogonal.apply(model, skip=None)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("d", "n"), [(1, 3), (5, 2), (2, 5), (3, 1)])
def test_few_and_many_neurons(d, n):
    model = nn.Sequential(nn.Linear(d, n))
    x = torch.randn(4, d)
    before = model(x)
    hs.orthogonal.apply(model, skip=None)
    torch.testing.assert_close(model(x), before)
    model(x).sum().backward()
    turn_at_random(model)
    assert hs.orthogonal.check(model).gram < 1e-5


def test_state_round_trip_into_another_process(tmp_path):
    model = hs.orthogonal.apply(mlp(6, 8, 8, 3), sample=0.5, seed=0)
    turn_at_random(model)
    x = torch.randn(4, 6)
    torch.save({"state": model.state_dict(), "x": x, "y": model(x).detach()}, tmp_path / "state.pt")
    program = textwrap.dedent(
        """
        import sys, torch
        import hypersphere as hs
        from torch import nn
        saved = torch.load(sys.argv[1])
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        hs.orthogonal.apply(model, sample=0.5)
        model.load_state_dict(saved["state"])
        torch.testing.assert_close(model(saved["x"]), saved["y"])
        """
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "state.pt")], check=True, timeout=120, env=environment
    )


@pytest.mark.parametrize("options", [{}, {"method": "newton"}, {"sample": 0.5}])
def test_compiled_models_agree(options):
    model = hs.orthogonal.apply(mlp(6, 8, 8, 3), seed=0, **options) if options else hs.orthogonal.apply(mlp(6, 8, 8, 3))
    turn_at_random(model, 0.1)
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(3):
        x = torch.randn(4, 6)
        for m, call in ((model, compiled), (plain, plain)):
            m.zero_grad()
            call(x).square().sum().backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=lambda m, name=name, step=step: f"{name} at {step}: {m}")
        with torch.no_grad():
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                p.sub_(0.05 * p.grad)
                q.copy_(p)


def test_decoupled_layers_and_transformers_turn_too():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=20, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config).eval()
    tokens = torch.arange(6).unsqueeze(0)
    before = model(tokens).logits
    hs.orthogonal.apply(model, include=["*c_attn", "*c_fc"])
    torch.testing.assert_close(model(tokens).logits, before, rtol=1e-5, atol=1e-5)
    turn_at_random(model)
    assert hs.orthogonal.check(model).gram < 1e-5
    turned = model(tokens).logits
    torch.testing.assert_close(hs.orthogonal.merge(model)(tokens).logits, turned, rtol=1e-5, atol=1e-5)
    decoupled = nn.Sequential(hs.nn.TanhConv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 2)).eval()
    x = torch.randn(2, 3, 3, 3)
    before = decoupled(x)
    torch.testing.assert_close(hs.orthogonal.apply(decoupled)(x), before)


def test_report_prints_a_table():
    model = hs.orthogonal.apply(mlp(6, 8, 8, 3))
    text = str(hs.orthogonal.check(model))
    assert text.splitlines()[0].split() == [
        "name",
        "role",
        "map",
        "neurons",
        "matrices",
        "free",
        "moved",
        "error",
        "gram",
        "change",
        "note",
    ]
    assert text.splitlines()[3].split(maxsplit=9)[-1] == 'the output (skip="output")'
    assert text.endswith("2 rotations, 43 unconstrained parameters")


def changed(before, layer):
    """Largest change of the Gram matrix of a layer, relative to its largest entry, in float64."""
    old, new = (W.detach().flatten(1).double() @ W.detach().flatten(1).double().T for W in (before, layer.weight))
    return float((new - old).abs().max() / old.abs().max())


def trained(model, steps, every=None, rate=0.3):
    """A model after steps that rotate a lot, with draws of other coordinates in between."""
    optimiser = torch.optim.SGD(hs.parameter_groups(model, lr=rate))
    resampling = None if every is None else hs.orthogonal.Resampling(model, every, optimiser)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randn(8, model[0].weight.shape[1], generator=generator)
        model(x.to(model[0].weight.dtype)).float().square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
        if resampling is not None:
            resampling()
    return model


@pytest.mark.parametrize("options", [{}, {"learn_neurons": True}, {"map": "unconstrained"}, {"sample": 0.5}])
def test_a_report_compares_with_the_first_neurons(options, tmp_path):
    model = hs.orthogonal.apply(mlp(6, 300, 6, 3), seed=0, **options)
    first = model[2].weight.detach().clone()
    trained(model, 5, 2 if "sample" in options else None)
    moved = changed(first, model[2])
    assert (moved > 1e-3) == bool(options.keys() & {"learn_neurons", "map"})

    def shown(model):
        row = next(row for row in hs.orthogonal.check(model).rows if row.name == "2")
        assert row.gram == pytest.approx(moved, rel=1e-3, abs=1e-6)

    shown(model)
    hs.orthogonal.rebase(model)
    shown(model)
    state = model.state_dict()
    assert {"0.parametrizations.weight.0.gram", "2.parametrizations.weight.0.gram"} < state.keys()
    assert state["0.parametrizations.weight.0.gram"].shape == (1, 256, 256)  # of 300 neurons
    again = hs.orthogonal.apply(mlp(6, 300, 6, 3, seed=1), seed=0, **options)
    again.load_state_dict(state)
    shown(again)
    shown(copy.deepcopy(again))


def test_sums_over_singular_values_stand_for_those_of_large_weights():
    V = torch.randn(2, 5, 1100, dtype=torch.float64)
    wide = torch.randn(1, 1100, 1030)
    sigma = torch.linalg.svdvals(wide.double())
    expected = torch.stack([sigma.pow(order).sum().pow(1 / order) for order in (2, 4, 8)])
    torch.testing.assert_close(invariants(wide, both=True), expected.float().unsqueeze(0))
    torch.testing.assert_close(invariants(V, both=True), torch.linalg.svdvals(V))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_draws_do_not_round_the_neurons_of_a_half_precision_model(dtype):
    model = mlp(32, 32, 32, 4).to(dtype)
    first = model[2].weight.detach().clone()
    hs.orthogonal.apply(model, sample=0.25, seed=0)
    trained(model, 120, every=2, rate=0.1)
    rotation = model[2].parametrizations.weight[0]
    assert rotation.master.dtype == torch.float32
    assert changed(first, model[2]) < torch.finfo(dtype).eps  # that of one rounding
    old, new = (W.double() @ W.double().T for W in (first, rotation.master))
    assert (new - old).abs().max() / old.abs().max() < 1e-5
    assert hs.orthogonal.check(model).gram == pytest.approx(max(changed(first, model[2]), 1e-6), rel=3)
    assert torch.equal(hs.orthogonal.merge(copy.deepcopy(model))[2].weight, model[2].weight)
    model[2].weight = first  # the neurons are others now
    torch.testing.assert_close(model[2].weight, first, rtol=1e-2, atol=1e-3)


def test_states_of_before_the_first_neurons_were_kept_still_load():
    model = trained(hs.orthogonal.apply(mlp(6, 6, 4).bfloat16(), learn_neurons=False), 3)
    state = model.state_dict()
    older = {key: value for key, value in state.items() if not key.endswith((".gram", ".master"))}
    assert len(older) < len(state)
    again = hs.orthogonal.apply(mlp(6, 6, 4, seed=1).bfloat16())
    again.load_state_dict(older)
    assert torch.equal(again[0].parametrizations.weight[0].master, older["0.parametrizations.weight.original"].float())
    assert hs.orthogonal.check(again).gram < 0.02
    wide = hs.orthogonal.apply(mlp(6, 6, 4, seed=1))  # which needs no master
    wide.load_state_dict(state)
    torch.testing.assert_close(wide[0].weight, model[0].weight.float(), rtol=1e-2, atol=1e-2)
    with pytest.raises(RuntimeError, match=r"Missing key.*\s.*free"):
        again.load_state_dict({key: value for key, value in state.items() if not key.endswith("0.free")})


@pytest.mark.parametrize("options", [{"map": "householder", "form": "product"}, {"map": "loewdin"}, {"sides": "both"}])
def test_a_report_shows_what_is_no_number(options):
    model = hs.orthogonal.apply(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 2)), **options)
    with torch.no_grad():
        model[0].parametrizations.weight[0].free.fill_(torch.nan)
    report = hs.orthogonal.check(model)
    assert math.isnan(report.error)
    assert math.isnan(report.gram)
    assert "nan" in str(report)


def adapted(model, **options):
    """With an adapter that is not the identity."""
    hs.orthogonal.adapt(model, **{"block_size": 4, **options})
    for name, p in model.named_parameters():
        if ".adapters." in name:
            nn.init.normal_(p, std=0.2)
    return model


TRANSFORMED = {
    "whole": hs.orthogonal.apply,
    "warm": lambda model: hs.orthogonal.apply(model, method="newton"),
    "blocks": lambda model: hs.orthogonal.apply(model, blocks=2),
    "sampled": lambda model: hs.orthogonal.apply(model, sample=0.5, seed=0),
    "both sides": lambda model: hs.orthogonal.poet(model, block=4),
    "measured": lambda model: hs.orthogonal.apply(model, "exponential", start="normal", seed=0),
    "oft": adapted,
    "by inputs": lambda model: adapted(model, input_centric=True, rescale=True),
    "butterfly": lambda model: adapted(model, method="boft", butterfly=2),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_rotated_models_can_be_transformed(name):
    """Gradients of each sample and products with the Hessian are those of loops and of double backward."""
    model = TRANSFORMED[name](mlp(8, 8, 8, 3)).double()
    x, y = torch.randn(4, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 1])
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    names, values = tuple(trained), tuple(p.detach().clone() for p in trained.values())
    along = tuple(torch.randn_like(value) for value in values)
    kept = {key: value.clone() for key, value in model.state_dict().items()}

    def loss(values, x, y):
        return F.cross_entropy(torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,)), y)

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(values, x.unsqueeze(1), y.unsqueeze(1))
    curved = torch.func.jvp(lambda *v: torch.func.grad(loss)(v, x, y), values, along)[1]
    assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())
    assert all(rotation._computed is None for _, rotation in hs.orthogonal.rotations(model))
    model.eval()  # from the start, as what is transformed is
    for index in range(4):
        one = torch.autograd.grad(
            F.cross_entropy(model(x[index : index + 1]), y[index : index + 1]), list(trained.values())
        )
        for found, wanted in zip(each, one, strict=True):
            torch.testing.assert_close(found[index], wanted, rtol=1e-7, atol=1e-9)
    slopes = torch.autograd.grad(F.cross_entropy(model(x), y), list(trained.values()), create_graph=True)
    twice = torch.autograd.grad(sum((s * a).sum() for s, a in zip(slopes, along, strict=True)), list(trained.values()))
    for found, wanted in zip(curved, twice, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)


def test_activations_may_be_recomputed():
    """Checkpointing runs layers again in the backward pass, when the forward pass of the model is over."""
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp(8, 8, 8, 6)
            self.out = nn.Linear(6, 3)

        def forward(self, x, recompute=True):
            return self.out(checkpoint(self.body, x, use_reentrant=False) if recompute else self.body(x))

    model = hs.orthogonal.apply(Net())
    turn_at_random(model)
    x = torch.randn(5, 8)
    found = []
    for recompute in (True, False):
        model.zero_grad()
        model(x, recompute).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
        assert all(rotation._computed is None for _, rotation in hs.orthogonal.rotations(model))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_what_a_forward_pass_computed_is_not_used_after_a_change():
    model = hs.orthogonal.apply(mlp(8, 8, 3))
    model(torch.randn(2, 8))  # no backward pass follows
    copied = copy.deepcopy(model)
    (rotation,) = model[0].parametrizations.weight
    before = model[0].weight.detach().clone()
    turn_at_random(model)
    assert not torch.allclose(model[0].weight, before)
    torch.testing.assert_close(copied[0].weight, before)
    loss = model[0](torch.randn(2, 8)).sum() + model(torch.randn(2, 8)).sum()
    loss.backward()
    model(torch.randn(2, 8)).sum().backward()
    model[0](torch.randn(2, 8)).sum().backward()  # a part alone, after the whole
    assert rotation.free.grad.isfinite().all()


# ----------------------------------------------------------------------------------------------- in a user's hands


def test_training_keeps_no_matrices_alive():
    """Neither after steps nor after forward passes without a backward one, nor after the model is gone."""
    import gc
    import weakref

    model = hs.orthogonal.apply(mlp(8, 8, 8, 3))
    size = (1, 8, 8)

    def alive():
        gc.collect()
        return sum(type(o) is torch.Tensor and o.shape[1:] == size[1:] for o in gc.get_objects())

    for _ in range(3):
        model(torch.randn(2, 8)).sum().backward()
    before = alive()
    for step in range(6):
        loss = model(torch.randn(2, 8)).sum()
        if step % 2:
            loss.backward()
    del loss
    assert alive() <= before
    gone = weakref.ref(model[0].parametrizations.weight[0])
    model(torch.randn(2, 8))
    del model
    gc.collect()
    assert gone() is None


def test_two_passes_with_recomputed_activations_before_one_backward_pass():
    from torch.utils.checkpoint import checkpoint

    body = mlp(8, 8, 8, 6)
    model = hs.orthogonal.apply(nn.Sequential(body, nn.Linear(6, 3)))
    turn_at_random(model)
    a, b = torch.randn(2, 5, 8)
    plain = model(a).square().sum() + model(b).square().sum()
    expected = torch.autograd.grad(plain, list(model.parameters()))

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model[1](checkpoint(self.model[0], x, use_reentrant=False))

    net = Checkpointed()
    found = torch.autograd.grad(net(a).square().sum() + net(b).square().sum(), list(model.parameters()))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("change", ["assign", "data", "double", "functional"])
def test_merged_weights_are_those_of_the_present_parameters(change):
    model = hs.orthogonal.apply(mlp(8, 8, 3))
    other = copy.deepcopy(model)
    turn_at_random(other)
    model(torch.randn(2, 8))  # with gradients, and no backward pass
    (rotation,), (wanted,) = model[0].parametrizations.weight, other[0].parametrizations.weight
    if change == "assign":
        model.load_state_dict(other.state_dict(), assign=True)
    elif change == "data":
        rotation.free.data.copy_(wanted.free)
    elif change == "double":
        model.double()
        other = copy.deepcopy(model)
    else:
        name = "0.parametrizations.weight.0.free"
        free = wanted.free.detach().clone().requires_grad_()
        torch.func.functional_call(model, {name: free}, torch.randn(2, 8))
        other = hs.orthogonal.apply(mlp(8, 8, 3))
    merged, expected = hs.orthogonal.merge(model), hs.orthogonal.merge(other)
    torch.testing.assert_close(merged[0].weight, expected[0].weight)


def test_a_map_as_an_object_takes_no_options_and_adapters_are_left_alone():
    with pytest.raises(ArgumentError, match="unit_nrom must not be given together with a map"):
        hs.orthogonal.apply(mlp(4, 4, 2), hs.orthogonal.create("cayley"), unit_nrom=True)
    model = hs.orthogonal.adapt(mlp(8, 8, 4), targets=["0"], block_size=4)
    before = model(torch.ones(1, 8))
    with pytest.raises(ArgumentError, match="unload them first"):
        hs.orthogonal.apply(model)
    torch.testing.assert_close(model(torch.ones(1, 8)), before)
    report = hs.orthogonal.check(model)
    assert [row.name for row in report.rows] == ["0 (default)"]
    assert report.rows[0].free == 2 * 6
    assert report.gram < 1e-5


@pytest.mark.parametrize("options", [{"structure": "skew"}, {"structure": "upper", "init": lambda w: 1 / 0}])
def test_what_fails_changes_nothing(options):
    model = mlp(4, 4, 4, 2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((ArgumentError, ZeroDivisionError)):
        hs.orthogonal.apply(model, "masked", **options)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True))
    assert all(isinstance(layer.weight, nn.Parameter) for layer in model if isinstance(layer, nn.Linear))


def test_misused_cached_blocks_say_so():
    model = hs.orthogonal.apply(mlp(4, 4, 2))
    with hs.orthogonal.cached(model):
        loss = model(torch.randn(3, 4)).sum()
    with pytest.raises(ArgumentError, match="backward passes inside"):
        loss.backward()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentError, match="step the optimiser after it"), hs.orthogonal.cached(model):
        model(torch.randn(3, 4)).sum().backward()
        with torch.no_grad():
            model[0].parametrizations.weight[0].free.add_(0.1)
        optimiser.step()


def test_maps_start_warm_in_training_alone():
    model = hs.orthogonal.apply(mlp(8, 8, 3), "cayley", method="newton")
    (rotation,) = model[0].parametrizations.weight
    kept = rotation.carried.clone()
    model.eval()
    with torch.no_grad():
        rotation.free.normal_(std=0.5)
    out = model(torch.ones(1, 8))  # gradients are recorded, but nothing is trained
    assert torch.equal(rotation.carried, kept)
    exact = copy.deepcopy(model)
    torch.testing.assert_close(hs.orthogonal.merge(exact)(torch.ones(1, 8)), out)
    # A state without a warm start: from a map that has none.
    plain = hs.orthogonal.apply(mlp(8, 8, 3), "cayley")
    turn_at_random(plain, 0.5)
    model.load_state_dict(plain.state_dict())
    model.train()
    torch.testing.assert_close(model(torch.ones(1, 8)), plain(torch.ones(1, 8)), rtol=1e-5, atol=1e-5)
    model.bfloat16()
    assert model(torch.ones(1, 8, dtype=torch.bfloat16)).isfinite().all()


def test_parts_are_merged_and_turned_again_without_remains():
    model = mlp(8, 8, 8, 3)
    hs.orthogonal.apply(model[0], skip=None)
    hs.orthogonal.apply(model, include="2")
    hs.orthogonal.merge(model[0])
    calls = []
    for _, rotation in hs.orthogonal.rotations(model):
        calls.append(rotation.d)
    assert calls == [8]
    model(torch.randn(2, 8)).sum().backward()
    hs.orthogonal.merge(model)
    assert not model._forward_pre_hooks and not model[0]._forward_pre_hooks
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in mlp(8, 8, 8, 3).named_parameters()]


def test_partition_covers_all_coordinates_from_the_start():
    for seed in range(4):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
        hs.orthogonal.apply(model, sample=2, sampling="partition", seed=seed)
        resampling = hs.orthogonal.Resampling(model, 1, seed=seed)
        (rotation,) = model[1].parametrizations.weight
        seen = set(rotation.index.flatten().tolist())
        for _ in range(3):
            resampling()
            seen |= set(rotation.index.flatten().tolist())
        assert seen == set(range(8))


def test_at_least_two_coordinates_are_turned():
    model = hs.orthogonal.apply(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), sample=0.1, skip=None)
    assert [rotation.block for _, rotation in hs.orthogonal.rotations(model)] == [8, 2]
    whole = hs.orthogonal.apply(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), sample=1.0, skip=None)
    assert [rotation.block for _, rotation in hs.orthogonal.rotations(whole)] == [8, 8]


def test_penalty_is_float32_under_autocast():
    model = hs.orthogonal.apply(mlp(64, 64, 3), "unconstrained")
    (rotation,) = model[0].parametrizations.weight
    with torch.no_grad():
        rotation.free[0] = torch.linalg.qr(torch.randn(64, 64)).Q
    with torch.autocast("cpu", torch.bfloat16):
        assert hs.orthogonal.penalty(model) < 1e-8


def test_graph_layers_say_where_their_neurons_are():
    class GraphConvolution(nn.Module):
        neurons = "columns"

        def __init__(self, d, n):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(d, n))

        def forward(self, adjacency, x):
            return adjacency @ (x @ self.weight)

    layer = hs.orthogonal.apply(GraphConvolution(6, 4))
    turn_at_random(layer)
    (rotation,) = layer.parametrizations.weight
    V, W = layer.parametrizations.weight.original, layer.weight
    torch.testing.assert_close(W, rotation.matrices()[0] @ V)
    adjacency, x = torch.rand(5, 5), torch.randn(5, 6)
    torch.testing.assert_close(layer(adjacency, x), adjacency @ ((x @ rotation.matrices()[0]) @ V))
    before = layer(adjacency, x)
    torch.testing.assert_close(hs.orthogonal.merge(layer)(adjacency, x), before)
