"""Fine-tuning by rotation: OFT, COFT, BOFT, by weights and by inputs, several adapters, merging, saving."""

from __future__ import annotations

import copy
import pickle
import re
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import hypersphere as hs
from hypersphere.errors import ArgumentError, HypersphereError
from hypersphere.orthogonal import adapters as module
from hypersphere.orthogonal.adapters import (
    adapt,
    adapter_state_dict,
    butterfly,
    constrain,
    disabled,
    drop,
    list_adapters,
    load_adapter,
    load_adapter_file,
    merge_adapter,
    save_adapter,
    unload,
    unmerge_adapter,
    use,
)


def str_or_name(value):
    """Names of test cases that are the same in every process."""
    return re.sub(r" at 0x\w+", "", str(value))


def cayley(upper, b):
    """(I + Q)(I - Q)^-1, entry by entry and by an inverse."""
    Q = torch.zeros(b, b, dtype=torch.float64)
    values = iter(upper)
    for i in range(b):
        for j in range(i + 1, b):
            Q[i, j] = next(values)
            Q[j, i] = -Q[i, j]
    eye = torch.eye(b, dtype=torch.float64)
    return (eye + Q) @ torch.linalg.inv(eye - Q)


def dense(adapter):
    """All of R of an adapter with one group, from its numbers, by loops."""
    d, b = adapter.d, adapter.block
    numbers = adapter.free.detach().double().tolist()
    R = torch.eye(d, dtype=torch.float64)
    for stage in range(adapter.stages):
        factor = torch.zeros(d, d, dtype=torch.float64)
        order = []
        if stage == 0:
            order = list(range(d))
        else:  # half-blocks g and g + 2^l next to each other
            half, span = b // 2, 2**stage
            for start in range(0, d // half, 2 * span):
                for g in range(span):
                    for h in (start + g, start + g + span):
                        order += range(h * half, (h + 1) * half)
        per = 1 if adapter.shared else d // b
        for k in range(d // b):
            block = cayley(numbers[stage * per + (0 if adapter.shared else k)], b)
            for i in range(b):
                for j in range(b):
                    factor[order[k * b + i], order[k * b + j]] = block[i, j]
        R = factor @ R
    return R


def stir(model, scale=0.1):
    """Numbers other than zero for every adapter."""
    for name, p in model.named_parameters():
        if ".adapters." in f".{name}":
            nn.init.normal_(p, std=scale)
    return model


def all_adapters(model):
    return [m for m in model.modules() if isinstance(m, module.Adapter)]


# ----------------------------------------------------------------------------------------- published numbers

UPPER = (0.1, -0.2, 0.3, 0.4, -0.5, 0.6), (-0.3, 0.25, 0.1, -0.05, 0.2, 0.15)
BLOCKS = [
    [
        [0.84721352536, 0.39448966813, -0.3130870382, 0.16906700063],
        [0.085577123774, 0.55499895638, 0.77645585473, -0.28595282822],
        [0.020872469213, -0.10853683991, 0.40889167188, 0.90586516385],
        [-0.52389897725, 0.72427468169, -0.36318096431, 0.26278438739],
    ],
    [
        [0.72121212121, -0.52121212121, 0.43636363636, 0.13333333333],
        [0.49696969697, 0.7696969697, -0.024242424242, 0.4],
        [-0.43636363636, 0.1696969697, 0.84242424242, 0.26666666667],
        [-0.20606060606, -0.32727272727, -0.31515151515, 0.86666666667],
    ],
]


class TestPublishedNumbers:
    def test_two_blocks_of_four(self):
        layer = adapt(nn.Linear(8, 8, bias=False).double(), block_size=4)
        with torch.no_grad():
            layer.adapters.default.free.copy_(torch.tensor(UPPER, dtype=torch.float64))
            layer._parameters["weight"].copy_(torch.eye(8))
        # Rows of a weight are neurons: with unit vectors as neurons it is the transpose of R.
        expected = torch.block_diag(*torch.tensor(BLOCKS, dtype=torch.float64))
        torch.testing.assert_close(layer.weight.mT, expected, rtol=0, atol=1e-10)

    def test_projection(self):
        layer = adapt(nn.Linear(8, 3).double(), block_size=4, coft=True, eps=0.5)
        with torch.no_grad():
            layer.adapters.default.free.copy_(torch.tensor(UPPER, dtype=torch.float64))

        def norms():
            blocks = module.unpack(layer.adapters.default.free.detach(), 4)
            return torch.linalg.matrix_norm(blocks - blocks.mT).tolist()

        assert norms() == pytest.approx([1.3490737563, 0.67453687816], rel=1e-9)
        constrain(layer)
        assert norms() == pytest.approx([0.35355339059, 0.35355339059], rel=1e-9)

    def test_butterfly_of_three_factors(self):
        layer = adapt(nn.Linear(8, 8, bias=False).double(), "boft", block_size=2, butterfly=3)
        upper = [[0.2, -0.4, 0.1, 0.3], [-0.1, 0.5, 0.25, -0.35], [0.15, 0.05, -0.45, 0.6]]
        with torch.no_grad():
            layer.adapters.default.free.copy_(torch.tensor(upper, dtype=torch.float64).view(12, 1))
            layer._parameters["weight"].copy_(torch.eye(8))
        first = [
            *(0.86497820367, -0.22961826204, 0.12122498033, 0.14479638009),
            *(-0.26546645637, 0.02301937464, 0.13680562043, -0.27149321267),
        ]
        torch.testing.assert_close(layer.weight[0], torch.tensor(first, dtype=torch.float64), rtol=0, atol=1e-10)

    def test_permutations_of_the_butterfly(self):
        # (Pi x)[i] = x[p[i]] with factor Pi diag(...) Pi^T; what a block turns is listed by the inverse.
        p = [[0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 1, 3, 4, 6, 5, 7], [0, 2, 4, 6, 1, 3, 5, 7]]
        assert torch.equal(butterfly(8, 2, 3).argsort(1), torch.tensor(p))

    def test_number_of_parameters(self):
        model = adapt(nn.Linear(128, 128), blocks=8)
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 960
        shared = adapt(nn.Linear(128, 128), blocks=8, share_blocks=True)
        assert sum(p.numel() for p in shared.parameters() if p.requires_grad) == 120
        factors = adapt(nn.Linear(128, 128), "boft", block_size=8, butterfly=3)
        assert sum(p.numel() for p in factors.parameters() if p.requires_grad) == 3 * 128 * 7 // 2


# --------------------------------------------------------------------------------------- against plain loops

SETTINGS = [
    {"block_size": 4},
    {"blocks": 2},
    {"blocks": 1},
    {"block_size": 4, "share_blocks": True},
    {"method": "boft", "block_size": 2, "butterfly": 3},
    {"method": "boft", "block_size": 4, "butterfly": 1},
    {"method": "boft", "block_size": 4, "butterfly": 2, "share_blocks": True},
    {"block_size": 4, "rescale": True},
    {"method": "boft", "block_size": 2, "butterfly": 2, "rescale": True},
]


@pytest.mark.parametrize("input_centric", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_linear_layers_compute_with_turned_neurons(settings, input_centric):
    layer = nn.Linear(8, 5).double()
    plain = copy.deepcopy(layer)
    stir(adapt(layer, input_centric=input_centric, **settings), 0.5)
    adapter = layer.adapters.default
    W = dense(adapter) @ plain.weight.mT  # (d, n)
    if adapter.log_scale is not None:
        W = W * adapter.log_scale.exp()
    x = torch.randn(3, 2, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x), x @ W + plain.bias, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("terms", [2, 3, 4])
@pytest.mark.parametrize("input_centric", [False, True])
def test_the_series(terms, input_centric):
    layer = nn.Linear(6, 5).double()
    plain = copy.deepcopy(layer)
    stir(adapt(layer, block_size=3, cayley="neumann", terms=terms, input_centric=input_centric), 0.3)
    R = torch.zeros(6, 6, dtype=torch.float64)
    for k, (a, b, c) in enumerate(layer.adapters.default.free.tolist()):
        Q = torch.tensor([[0, a, b], [-a, 0, c], [-b, -c, 0]], dtype=torch.float64)
        powers = sum(torch.linalg.matrix_power(Q, i) for i in range(terms + 1))
        R[3 * k : 3 * k + 3, 3 * k : 3 * k + 3] = (torch.eye(3) + Q) @ powers
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), x @ R @ plain.weight.mT + plain.bias, rtol=1e-12, atol=1e-12)


CONVOLUTIONS = [
    (nn.Conv2d, {"kernel_size": 3, "padding": 1}),
    (nn.Conv2d, {"kernel_size": 3, "stride": 2, "padding": 2, "dilation": 2}),
    (nn.Conv2d, {"kernel_size": (2, 3), "padding": "same", "padding_mode": "circular"}),
    (nn.Conv2d, {"kernel_size": 1}),
    (nn.Conv2d, {"kernel_size": 3, "groups": 2, "stride": 2}),
    (nn.Conv2d, {"kernel_size": 3, "groups": 4}),
    (nn.Conv1d, {"kernel_size": 5, "padding": 2}),
    (nn.Conv3d, {"kernel_size": 2}),
    (nn.ConvTranspose2d, {"kernel_size": 3, "stride": 2, "output_padding": 1}),
    (nn.ConvTranspose2d, {"kernel_size": 3, "groups": 2}),
]


def image_of(layer, size=9):
    return torch.randn(2, 4, *[size] * (layer.weight.dim() - 2))


@pytest.mark.parametrize(("kind", "options"), CONVOLUTIONS, ids=str)
class TestConvolutions:
    def test_identity_changes_nothing(self, kind, options):
        layer = kind(4, 8 if kind is not nn.Conv2d or options.get("groups") != 4 else 4, **options)
        x = image_of(layer)
        expected = layer(x)
        torch.testing.assert_close(adapt(layer, block_size=6)(x), expected, rtol=1e-6, atol=1e-6)

    def test_angles_are_kept_and_merged_equals_unmerged(self, kind, options):
        layer = kind(4, 8, **options)
        groups = layer.groups
        x = image_of(layer)
        before, bits = layer(x), layer.weight.detach().clone()

        def gram(weight):
            if kind is nn.ConvTranspose2d:
                rows = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(2)
            else:
                rows = weight.unflatten(0, (groups, -1)).flatten(2)
            return rows @ rows.mT

        inner = gram(layer.weight).detach()
        stir(adapt(layer, block_size=6), 0.3)
        after = layer(x)
        assert (after - before).abs().max() > 0.1 * before.abs().max()
        torch.testing.assert_close(gram(layer.weight), inner, rtol=1e-5, atol=1e-5)
        merge_adapter(layer)
        assert torch.equal(layer(x), after)
        unmerge_adapter(layer)
        assert torch.equal(layer._parameters["weight"], bits)
        assert torch.equal(layer(x), after)
        plain = unload(merge_adapter(layer))
        assert type(plain) is kind
        assert torch.equal(plain(x), after)


def test_a_convolution_turns_patches():
    """The same as an ordinary convolution of patches that were turned back, patch by patch."""
    layer = nn.Conv2d(4, 5, 3, stride=2, padding=1).double()
    plain = copy.deepcopy(layer)
    stir(adapt(layer, block_size=9), 0.5)
    x = torch.randn(2, 4, 11, 10, dtype=torch.float64)
    patches = F.unfold(x, 3, stride=2, padding=1)  # (N, d, L)
    turned = dense(layer.adapters.default).mT @ patches
    expected = plain.weight.flatten(1) @ turned + plain.bias[:, None]
    torch.testing.assert_close(layer(x).flatten(2), expected, rtol=1e-11, atol=1e-11)


def test_blocks_stay_in_their_channels():
    layer = nn.Conv2d(4, 5, 3)
    before = layer.weight.detach().clone()
    adapt(layer, blocks=4)
    with torch.no_grad():
        layer.adapters.default.free[2].normal_()
    changed = (layer.weight - before).abs().amax((0, 2, 3)) > 1e-3
    assert changed.tolist() == [False, False, True, False]


# --------------------------------------------------------------------------------------------- invariants


@given(st.sampled_from([2, 4, 6]), st.integers(1, 4), st.integers(0, 10**6))
def test_one_factor_is_oft(b, r, seed):
    torch.manual_seed(seed)
    one, two = (nn.Linear(b * r, 3).double() for _ in range(2))
    two.load_state_dict(one.state_dict())
    stir(adapt(one, block_size=b), 0.5)
    adapt(two, "boft", block_size=b, butterfly=1)
    two.adapters.default.free.data.copy_(one.adapters.default.free)
    torch.testing.assert_close(one.weight, two.weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("d", "b"), [(8, 2), (16, 4), (12, 6), (32, 2)])
def test_a_butterfly_is_dense_from_enough_factors_on(d, b):
    factors = 1
    while b * 2 ** (factors - 1) < d:
        factors += 1
    for m in range(1, factors + 1):
        layer = nn.Linear(d, d, bias=False).double()
        nn.init.eye_(layer.weight)
        stir(adapt(layer, "boft", block_size=b, butterfly=m), 0.5)
        filled = (layer.weight.abs() > 1e-12).sum(1)
        assert (filled == min(d, b * 2 ** (m - 1))).all()
        torch.testing.assert_close(layer.weight @ layer.weight.mT, torch.eye(d).double(), rtol=0, atol=1e-12)


@given(st.integers(1, 6), st.floats(1e-4, 2.0), st.booleans(), st.integers(0, 10**6))
def test_bound(r, eps, shared, seed):
    torch.manual_seed(seed)
    layer = adapt(nn.Linear(4 * r, 3).double(), block_size=4, coft=True, eps=eps, share_blocks=shared)
    stir(layer, 1.0)
    constrain(layer)
    adapter = layer.adapters.default
    places = r if shared else 1
    distance = torch.linalg.matrix_norm(adapter.dense()[0] - torch.eye(4 * r))
    assert distance <= 2 * eps * places**0.5 * (1 + 1e-9)
    once = adapter.free.detach().clone()
    constrain(layer)
    torch.testing.assert_close(adapter.free, once, rtol=1e-12, atol=0)


def test_bound_leaves_small_ones_and_others_alone():
    small = adapt(nn.Linear(8, 3), block_size=4, coft=True, eps=10.0)
    free = stir(small).adapters.default.free.detach().clone()
    constrain(small)
    assert torch.equal(small.adapters.default.free, free)
    unbound = stir(adapt(nn.Linear(8, 3), block_size=4), 5.0)
    free = unbound.adapters.default.free.detach().clone()
    constrain(unbound)
    assert torch.equal(unbound.adapters.default.free, free)
    zero = adapt(nn.Linear(8, 3), block_size=4, coft=True)
    constrain(zero)
    assert torch.equal(zero.adapters.default.free, torch.zeros(2, 6))


@pytest.mark.parametrize("input_centric", [False, True])
@pytest.mark.parametrize("settings", [SETTINGS[0], SETTINGS[3], SETTINGS[8]], ids=str)
def test_gradient(settings, input_centric):
    layer = stir(adapt(nn.Linear(8, 3).double(), input_centric=input_centric, **settings), 0.5)
    x = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    named = {name: p for name, p in layer.named_parameters() if p.requires_grad}

    def function(x, *values):
        return torch.func.functional_call(layer, dict(zip(named, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, (x, *named.values()))


def test_gradient_at_the_identity_is_that_of_the_skew_part():
    layer = adapt(nn.Linear(6, 4).double(), blocks=1)
    (layer(torch.randn(9, 6).double()) ** 2).sum().backward()
    assert layer.adapters.default.free.grad.abs().min() > 1e-6
    assert layer._parameters["weight"].grad is None


# ------------------------------------------------------------------------------------------- several adapters


def network():
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4))


class TestSeveralAdapters:
    def test_switching(self):
        model, x = network(), torch.randn(5, 16)
        base = model(x)
        adapt(model, name="one", block_size=8)
        stir(model)
        one = model(x)
        adapt(model, "boft", name="two", targets=["0"], block_size=4, butterfly=2, input_centric=True)
        torch.testing.assert_close(model(x), base, rtol=1e-6, atol=1e-6)
        nn.init.normal_(model[0].adapters.two.free, std=0.3)
        two = model(x)
        assert not torch.allclose(one, two, atol=1e-3)
        for name, expected in (("one", one), (None, base), ("two", two), ("one", one)):
            use(model, name)
            assert torch.equal(model(x), expected)
            trainable = {n for n, p in model.named_parameters() if p.requires_grad}
            assert all(f"adapters.{name}.free" in n for n in trainable)
            assert bool(trainable) == (name is not None)
        assert list(list_adapters(model)) == ["one", "two"]
        with disabled(model):
            assert torch.equal(model(x), base)
        assert torch.equal(model(x), one)
        drop(model, "one")
        assert torch.equal(model(x), base)
        assert list(list_adapters(model)) == ["two"]
        assert type(model[2]) is nn.Linear
        use(model, "two")
        assert torch.equal(model(x), two)
        drop(model, "two")
        assert list_adapters(model) == {}
        assert [type(m) for m in model] == [type(m) for m in network()]
        assert all(p.requires_grad for p in model.parameters())
        assert torch.equal(model(x), base)
        assert not model[0]._forward_pre_hooks

    def test_disabled_between_forward_and_backward(self):
        model, x = network(), torch.randn(5, 16)
        stir(adapt(model, block_size=8, train="4"))
        nn.init.normal_(model[4].weight)
        model(x).sum().backward()
        expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
        model.zero_grad()
        out = model(x)
        with torch.no_grad(), disabled(model):
            model(x)
        out.sum().backward()
        for n, p in model.named_parameters():
            if n in expected:
                assert torch.equal(p.grad, expected[n])

    def test_each_has_its_own_head(self):
        model, x = network(), torch.randn(5, 16)
        base, head = model(x), model[4].weight.detach().clone()
        for name in ("one", "two"):
            adapt(model, name=name, block_size=8, train=["4"])
            torch.testing.assert_close(model(x), base, rtol=1e-6, atol=1e-6)
            nn.init.normal_(model[4].weight)
        two = model(x)
        use(model, "one")
        one = model(x)
        use(model, None)
        assert torch.equal(model[4].weight, head)
        assert torch.equal(model(x), base)
        assert not torch.allclose(one, two)
        use(model, "two")
        assert torch.equal(model(x), two)
        state, config = adapter_state_dict(model, "one")
        assert {"4.weight", "4.bias"} < state.keys()
        other = network()
        other.load_state_dict(unload(model).state_dict())
        assert torch.equal(load_adapter(other, state, config)(x), one)

    def test_merge(self):
        model, x = network(), torch.randn(5, 16)
        bits = {k: v.clone() for k, v in model.state_dict().items()}
        adapt(model, name="one", block_size=8, bias="all")
        adapt(model, name="two", targets=["2"], block_size=8, input_centric=True, rescale=True)
        stir(model)
        two = model(x)
        use(model, "one")
        one = model(x)
        merge_adapter(model, "two")
        torch.testing.assert_close(model(x), two, rtol=1e-6, atol=1e-6)
        with pytest.raises(ArgumentError, match="must not be merged"):
            merge_adapter(model, "one")
        for refused in (lambda: use(model, None), lambda: drop(model, "one"), lambda: adapt(model, name="three")):
            with pytest.raises(ArgumentError, match="must not be merged"):
                refused()
        with pytest.raises(ArgumentError, match="must not be merged"), disabled(model):
            pass
        unmerge_adapter(model)
        assert torch.equal(model(x), two)
        with pytest.raises(ArgumentError, match="must be merged"):
            unmerge_adapter(model)
        use(model, None)
        for key, value in bits.items():
            owner, _, last = key.rpartition(".")
            assert torch.equal(model.get_submodule(owner)._parameters[last], value)
        plain = unload(merge_adapter(model, "one", keep=False))
        assert torch.equal(plain(x), one)
        assert plain.state_dict().keys() == bits.keys()

    def test_merged_without_keeping(self):
        model = merge_adapter(adapt(network(), block_size=8), keep=False)
        with pytest.raises(ArgumentError, match="keep=True"):
            unmerge_adapter(model)

    def test_unload_gives_the_base_back(self):
        model, x = network(), torch.randn(5, 16)
        model[0].bias.requires_grad_(False)
        base = model(x)
        stir(adapt(model, block_size=8, bias="all"))
        nn.init.ones_(model[2].bias)
        assert torch.equal(unload(model)(x), base)
        assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["0.bias"]
        assert set(model.state_dict()) == set(network().state_dict())

    def test_checkpoints_of_the_base_model_fit(self):
        model, other = adapt(network(), block_size=8), network()
        missing, unexpected = model.load_state_dict(other.state_dict(), strict=False)
        assert not unexpected
        assert all("adapters" in key for key in missing)
        x = torch.randn(5, 16)
        torch.testing.assert_close(model(x), other(x), rtol=1e-6, atol=1e-6)

    def test_state_dict_round_trip(self):
        model, x = stir(adapt(network(), block_size=8, rescale=True)), torch.randn(5, 16)
        other = adapt(network(), block_size=8, rescale=True)
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(x), model(x))

    @pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
    @pytest.mark.parametrize("input_centric", [False, True])
    def test_copies_are_their_own(self, clone, input_centric):
        model, x = stir(adapt(network(), block_size=8, input_centric=input_centric)), torch.randn(5, 16)
        expected = model(x)
        other = clone(model)
        assert torch.equal(other(x), expected)
        use(other, None)
        nn.init.zeros_(other[0].adapters.default.free)
        assert torch.equal(model(x), expected)
        unload(other)
        assert type(other[0]) is nn.Linear
        assert torch.equal(model(x), expected)


# --------------------------------------------------------------------------------------------- save and load


class TestFiles:
    @pytest.mark.parametrize(
        "settings",
        [
            {"block_size": 8, "targets": ["0"]},
            {"method": "boft", "block_size": 4, "butterfly": 2, "rescale": True, "train": "4", "dtype": torch.float64},
            {"blocks": 2, "cayley": "neumann", "terms": 2, "bias": "adapter", "coft": True, "eps": 0.1},
        ],
        ids=str,
    )
    def test_round_trip(self, settings, tmp_path):
        pytest.importorskip("safetensors")
        model, x = network(), torch.randn(5, 16)
        plain = copy.deepcopy(model)
        stir(adapt(model, **settings))
        for name, p in model.named_parameters():
            if p.requires_grad and "adapters" not in name:
                nn.init.normal_(p)
        use(adapt(model, name="other", block_size=4), "default")
        save_adapter(model, tmp_path / "a.safetensors", "default")
        loaded = load_adapter_file(plain, tmp_path / "a.safetensors", name="mine")
        assert torch.equal(loaded(x), model(x))
        assert list_adapters(loaded)["mine"] == list_adapters(model)["default"]
        turned = load_adapter_file(unload(loaded), tmp_path / "a.safetensors", input_centric=True)
        torch.testing.assert_close(turned(x), model(x), rtol=1e-5, atol=1e-5)
        assert all(a.input_centric for a in all_adapters(turned))

    def test_what_does_not_fit_changes_nothing(self):
        model, x = network(), torch.randn(5, 16)
        state, config = adapter_state_dict(adapt(network(), block_size=8))
        base = model(x)
        with pytest.raises(ArgumentError, match=r"got others: 0\.free, 2\.free"):
            load_adapter(model, state, {**config, "block_size": 4})
        with pytest.raises(ArgumentError, match=r"got others: 2\.free"):
            load_adapter(model, {"0.free": state["0.free"]}, config)
        with pytest.raises(ArgumentError, match="eps needs coft=True"):
            load_adapter(model, state, config, eps=0.1)
        assert type(model[0]) is nn.Linear
        assert torch.equal(model(x), base)
        adapt(model, name="mine", block_size=8)
        with pytest.raises(ArgumentError, match="got others"):
            load_adapter(model, state, {**config, "block_size": 4})
        assert model[0].adapters.active == "mine"
        assert list(list_adapters(model)) == ["mine"]

    def test_foreign_file(self, tmp_path):
        save = pytest.importorskip("safetensors.torch").save_file
        save({"a": torch.zeros(1)}, str(tmp_path / "a.safetensors"))
        with pytest.raises(ArgumentError, match="must be a file of save_adapter"):
            load_adapter_file(network(), tmp_path / "a.safetensors")

    def test_missing_package_is_explained(self, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "safetensors.torch", None)
        with pytest.raises(HypersphereError, match="pip install"):
            save_adapter(adapt(network()), tmp_path / "a.safetensors")


# ----------------------------------------------------------------------------------------- kinds of models


class Int8(nn.Module):
    """A linear layer that holds whole numbers and a factor for each row."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        return F.linear(x, self.weight * self.scale, self.bias)


class TestQuantised:
    @pytest.mark.parametrize("rescale", [False, True])
    def test_inputs_are_turned(self, rescale):
        plain = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4))
        model = nn.Sequential(Int8(plain[0]), nn.ReLU(), plain[2])
        plain[0].weight.data = model[0].weight * model[0].scale
        x = torch.randn(5, 16)
        base = plain(x)
        adapt(model, targets="0", block_size=8, rescale=rescale)
        assert type(model[0]) is Int8
        torch.testing.assert_close(model(x), base, rtol=1e-6, atol=1e-6)
        stir(model, 0.3)
        state, config = adapter_state_dict(model)
        expected = load_adapter(plain, state, config)(x)
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model[0](x=x), plain[0](x), rtol=1e-5, atol=1e-6)
        model(x).sum().backward()
        assert model[0].adapters.default.free.grad.abs().sum() > 0
        told = "quantised one: 0; leave it unmerged, or merge into the one before quantisation: load_adapter"
        with pytest.raises(ArgumentError, match=told):
            merge_adapter(model)
        drop(model, "default")
        assert "adapters" not in model[0]._modules

    def test_all_linear_takes_them(self):
        model = adapt(nn.Sequential(Int8(nn.Linear(16, 24)), nn.ReLU(), nn.Linear(24, 4)))
        assert list_adapters(model)["default"]["targets"] == ["0"]


def plain_linear():
    return nn.Linear(16, 24)


def dynamic(dtype):
    """Torch's own, and the linear layer of the weight that its numbers stand for."""

    def make():
        plain = nn.Sequential(nn.Linear(16, 24))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch wants them to be converted to another package
            layer = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}, dtype=dtype)[0]
        plain[0].weight.data = layer.weight().dequantize().clone()
        return layer, plain[0]

    return make


def whole_numbers():
    layer = Int8(nn.Linear(16, 24))
    plain = nn.Linear(16, 24)
    plain.weight.data, plain.bias.data = layer.weight * layer.scale, layer.bias.data.clone()
    return layer, plain


def columns():
    return pytest.importorskip("transformers").pytorch_utils.Conv1D(24, 16)


def attention():
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


BASES = {
    "linear": (plain_linear, {}, (5, 16)),
    "linear by its inputs": (plain_linear, {"input_centric": True}, (5, 16)),
    "rescaled": (plain_linear, {"rescale": True}, (5, 16)),
    "shared blocks": (plain_linear, {"share_blocks": True}, (5, 16)),
    "columns": (columns, {}, (5, 16)),
    "attention": (attention, {"targets": ["out_proj", "linear1", "linear2"]}, (2, 3, 16)),
    "decoupled": (lambda: hs.nn.SphereLinear(16, 24), {}, (5, 16)),
    "whole numbers": (whole_numbers, {}, (5, 16)),
    "dynamic int8": (dynamic(torch.qint8), {}, (5, 16)),
    "dynamic int8 rescaled": (dynamic(torch.qint8), {"rescale": True}, (5, 16)),
    "dynamic float16": (dynamic(torch.float16), {}, (5, 16)),
    **{
        f"{kind.__name__} {options}": (lambda k=kind, o=options: k(4, 8, **o), {"block_size": 6}, None)
        for kind, options in CONVOLUTIONS
    },
}


def turned_by_hand(weight, numbers, adapter, scale):
    """The weight of an adapted layer in float64, with gradients by its numbers: blocks by an inverse."""
    vectors, b = adapter.layout.vectors(weight), adapter.block
    upper = torch.triu_indices(b, b, 1)
    Q = torch.zeros(len(numbers), b, b, dtype=torch.float64).index_put(
        (torch.arange(len(numbers))[:, None], *upper[:, None]), numbers
    )
    Q = Q - Q.mT
    eye = torch.eye(b, dtype=torch.float64)
    R = ((eye + Q) @ torch.linalg.inv(eye - Q)).unflatten(0, (adapter.groups, -1))
    R = R.expand(len(vectors), vectors.shape[-1] // b, b, b)
    turned = torch.einsum("gkij,gnkj->gnki", R, vectors.unflatten(-1, (-1, b))).flatten(-2)
    return adapter.layout.weight(turned * scale.view(*turned.shape[:2], 1), weight)


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated")
@pytest.mark.parametrize("name", BASES)
def test_every_kind_of_base_has_the_gradient_of_float64(name):
    torch.manual_seed(0)
    make, settings, size = BASES[name]
    made = make()
    layer, plain = made if isinstance(made, tuple) else (made, copy.deepcopy(made))
    plain = plain.double()
    x = torch.randn(size) if size else image_of(layer)
    found = stir(adapt(layer, **{"block_size": 8, **settings}), 0.3)(x)
    G = torch.randn_like(found)
    (found * G).sum().backward()

    weights, leaves = {}, []
    for place, adapted in module.adapted_layers(layer).items():
        adapter = adapted.adapters.default
        numbers, scale = (
            None if p is None else p.detach().double().requires_grad_() for p in (adapter.free, adapter.log_scale)
        )
        where = f"{place}.weight".lstrip(".")
        factor = (
            torch.ones(adapter.layout.vectors(plain.get_parameter(where)).shape[:2]) if scale is None else scale.exp()
        )
        weights[where] = turned_by_hand(plain.get_parameter(where).detach(), numbers, adapter, factor)
        leaves += [(adapter.free, numbers)] + ([] if scale is None else [(adapter.log_scale, scale)])
    expected = torch.func.functional_call(plain, weights, x.double())
    (expected * G).sum().backward()
    loose = {"rtol": 0.1, "atol": 0.1} if "int8" in name else {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(found.double(), expected, **loose)
    for own, reference in leaves:
        assert own.grad is not None
        error = (own.grad - reference.grad).norm() / reference.grad.norm()
        # Rounded inputs only count where a factor of the outputs is learned.
        assert error < (2e-2 if "int8 rescaled" in name else 1e-5), error


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated")
def test_dynamic_layers_can_be_transformed():
    torch.manual_seed(0)
    layer = stir(adapt(dynamic(torch.qint8)()[0], block_size=8), 0.3)
    free, x = layer.adapters.default.free, torch.randn(3, 16)

    def loss(free, x):
        return torch.func.functional_call(layer, {"adapters.default.free": free}, (x,)).sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(free.detach(), x.unsqueeze(1))
    along = torch.randn_like(free)
    slope = torch.func.jvp(lambda free: loss(free, x), (free.detach(),), (along,))[1]
    for index, found in enumerate(each):
        (wanted,) = torch.autograd.grad(layer(x[index : index + 1]).sum(), free)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(slope, (each.sum(0) * along).sum(), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated")
def test_quantised_layers_that_pass_no_gradient_are_refused():
    model = nn.Sequential(torch.ao.quantization.QuantStub(), nn.Linear(16, 24)).eval()
    model.qconfig = torch.ao.quantization.get_default_qconfig("fbgemm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = torch.ao.quantization.prepare(model)
        prepared(torch.randn(4, 16))
        static = torch.ao.quantization.convert(prepared)
    with pytest.raises(ArgumentError, match="must not have 1: its kind has no gradient by its inputs"):
        adapt(static, targets="1")
    assert "adapters" not in static[1]._modules


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("input_centric", [False, True])
def test_half_precision(dtype, input_centric):
    model, x = network().to(dtype), torch.randn(5, 16).to(dtype)
    base = model(x)
    adapt(model, block_size=8, input_centric=input_centric)
    assert {a.free.dtype for a in all_adapters(model)} == {torch.float32}
    assert torch.equal(model(x), base)
    stir(model, 0.2)
    out = model(x)
    assert out.dtype == dtype
    wide = copy.deepcopy(model).float()
    torch.testing.assert_close(out.float(), wide(x.float()), rtol=0.1, atol=0.02)
    out.float().sum().backward()
    assert all(a.free.grad.isfinite().all() for a in all_adapters(model))
    merged = merge_adapter(model)
    assert {p.dtype for name, p in merged.named_parameters() if "adapters" not in name} == {dtype}
    if not input_centric:
        assert torch.equal(merged(x), out)


def test_autocast():
    model, x = stir(adapt(network(), block_size=8), 0.2), torch.randn(5, 16)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
        R = model[0].adapters.default.matrices()
    assert out.dtype == torch.bfloat16
    assert hs.orthogonal.orthogonality_error(R).max() < 1e-6
    torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("input_centric", [False, True])
@pytest.mark.parametrize("method", ["oft", "boft"])
def test_compiled(method, input_centric):
    torch._dynamo.reset()
    model, x = stir(adapt(network(), method, block_size=4, input_centric=input_centric)), torch.randn(5, 16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = model(x)
    expected.sum().backward()
    grads = [a.free.grad.clone() for a in all_adapters(model)]
    model.zero_grad()
    out = compiled(x)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    out.sum().backward()
    for adapter, grad in zip(all_adapters(model), grads, strict=True):
        torch.testing.assert_close(adapter.free.grad, grad, rtol=1e-4, atol=1e-5)
    with disabled(model):
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations(reentrant):
    model, x = stir(adapt(network(), block_size=8)), torch.randn(5, 16, requires_grad=True)
    model(x).square().sum().backward()
    grads = [a.free.grad.clone() for a in all_adapters(model)]
    model.zero_grad()
    out = model[3:](checkpoint(model[:3], x, use_reentrant=reentrant))
    out.square().sum().backward()
    for adapter, grad in zip(all_adapters(model), grads, strict=True):
        torch.testing.assert_close(adapter.free.grad, grad)


def test_matrices_once_for_several_passes():
    model, x = stir(adapt(network(), block_size=8)), torch.randn(6, 16)
    expected = model(x)
    expected.square().sum().backward()
    grads = [a.free.grad.clone() for a in all_adapters(model)]
    model.zero_grad()
    with hs.orthogonal.cached(model):
        for part in x.split(2):
            model(part).square().sum().backward()
    for adapter, grad in zip(all_adapters(model), grads, strict=True):
        torch.testing.assert_close(adapter.free.grad, grad, rtol=1e-4, atol=1e-5)


def test_decoupled_layers():
    model, x = hs.nn.convert(network(), "sphere"), torch.randn(5, 16)
    base = model(x)
    torch.testing.assert_close(adapt(model, block_size=8)(x), base, rtol=1e-5, atol=1e-5)
    stir(model, 0.2)
    out = model(x)
    assert (out - base).abs().max() > 0.01
    state, config = adapter_state_dict(model)
    unload(model)
    turned = load_adapter(model, state, config, input_centric=True)
    torch.testing.assert_close(turned(x), out, rtol=1e-4, atol=1e-5)


def test_an_error_in_a_rotation_is_not_taken_for_a_missing_weight(monkeypatch):
    layer = adapt(nn.Linear(8, 8))

    def broken(self):
        raise AttributeError("broken")

    monkeypatch.setattr(module.Adapter, "matrices", broken)
    with pytest.raises(RuntimeError, match="broken"):
        layer(torch.randn(2, 8))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("settings", [{}, {"input_centric": True}, {"method": "boft", "rescale": True, "dropout": 0.3}])
def test_nothing_waits_for_the_device(settings):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    model = adapt(network().cuda(), coft=True, eps=0.5, block_size=4, **settings)
    x, y = torch.randn(32, 16, device="cuda"), torch.randint(4, (32,), device="cuda")
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2, capturable=True)

    def step():
        optimiser.zero_grad(set_to_none=False)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimiser.step()
        constrain(model)
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first = step().item()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(50):
        graph.replay()
    assert loss.item() < first
    model.eval()
    out = model(x)
    merged = merge_adapter(model)(x)
    torch.testing.assert_close(merged, out, rtol=1e-5, atol=1e-5)
    before = model[0]._parameters["weight"]
    assert model[0].adapters.kept.device.type == "cpu"
    unmerge_adapter(model)
    assert before.is_cuda


def test_attention_of_torch():
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(3, 5, 16)
    base = model(x)
    adapt(model, targets=["out_proj", "linear1", "linear2"], block_size=8)
    torch.testing.assert_close(model(x), base, rtol=1e-5, atol=1e-5)
    stir(model, 0.3)
    slow = model(x.requires_grad_())
    assert (slow - base).abs().max() > 0.01
    with torch.no_grad():
        torch.testing.assert_close(model(x), slow, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(unload(merge_adapter(model))(x), slow, rtol=1e-5, atol=1e-5)
    with pytest.raises(ArgumentError, match="attention reads its weight"):
        adapt(model, targets="out_proj", input_centric=True)


def test_dropout():
    layer = stir(adapt(nn.Linear(32, 8), "boft", block_size=4, butterfly=3, dropout=0.5), 0.3)
    adapter, x = layer.adapters.default, torch.randn(4, 32)
    eye = torch.eye(4)
    layer.eval()
    full = layer(x)
    assert torch.equal(layer(x), full)
    whole = adapter.matrices()
    layer.train()
    dropped = torch.zeros(24)
    for _ in range(300):
        found = adapter.matrices()
        is_eye = (found == eye).all(-1).all(-1)
        assert torch.equal(found[~is_eye], whole[~is_eye])
        assert is_eye.view(3, 8).any(1).sum() <= 1  # one factor a time
        dropped += is_eye
    # A third of the time its factor is drawn, and then it is dropped half of the time.
    assert (dropped / 300).mean() == pytest.approx(1 / 6, abs=0.02)
    assert dropped.min() > 20
    after = merge_adapter(layer)(x)
    torch.testing.assert_close(after, full)


def test_energies_stay():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    start = [
        hs.energy.hyperspherical_energy(layer.matrices()[0]).item() for layer in hs.energy.select(model, output=None)
    ]
    stir(adapt(model, targets=["0", "3"], rescale=True), 0.3)
    layers = hs.energy.select(model, output=None)
    assert [layer.constant for layer in layers] == [True, True]
    end = [hs.energy.hyperspherical_energy(layer.matrices()[0]).item() for layer in layers]
    assert end == pytest.approx(start, rel=1e-5)


def test_neither_a_weight_of_another_class_nor_a_shared_one():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    with pytest.raises(ArgumentError, match="another module shares its weight"):
        adapt(model, targets="0")
    model = hs.orthogonal.apply(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    with pytest.raises(ArgumentError, match="parametrised"):
        adapt(model, targets="0")
    with pytest.raises(ArgumentError, match="lazy"):
        adapt(nn.Sequential(nn.LazyLinear(8)))
    with pytest.raises(ArgumentError, match=r"targets must choose a layer(.|\n)*0 \(Linear\): the output"):
        adapt(nn.Sequential(nn.Linear(8, 8)), output="0")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "lora"}, "method must be one of"),
        ({"cayley": "lu"}, "cayley must be one of"),
        ({"bias": "some"}, "bias must be one of"),
        ({"block_size": 8, "blocks": 2}, "blocks must not be given together"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"butterfly": 2}, "butterfly must not be given"),
        ({"method": "boft", "block_size": 4, "butterfly": 4}, "butterfly must be such"),
        ({"method": "boft", "block_size": 1}, "even block_size"),
        ({"eps": 0.0}, "eps must be greater than 0"),
        ({"eps": 0.1}, "eps needs coft=True, whose bound it is, got 0.1"),
        ({"dropout": 1.5}, "dropout must be"),
        ({"name": "a.b"}, "name must be a word"),
        ({"name": "keys"}, "name must be a word"),
        ({"name": "active"}, "name must be a word"),
        ({"targets": "q_proj"}, "targets must be among 0, 2, 4, got 'q_proj'"),
        ({"targets": lambda name, layer: False}, "targets must choose a layer"),
        ({"targets": "0", "train": "7"}, "train must be names"),
        ({"targets": "0", "train": "0"}, "the frozen weight 0.weight"),
    ],
    ids=str_or_name,
)
def test_bad_arguments_change_nothing(settings, message):
    model = network()
    with pytest.raises(ArgumentError, match=message):
        adapt(model, **settings)
    assert [type(m) for m in model] == [type(m) for m in network()]
    assert all(p.requires_grad for p in model.parameters())
    assert list_adapters(model) == {}


def test_unknown_adapters():
    with pytest.raises(ArgumentError, match="without adapters"):
        use(network(), "default")
    model = adapt(network())
    with pytest.raises(ArgumentError, match="must be one of 'default', got 'other'"):
        use(model, "other")
    with pytest.raises(ArgumentError, match="must not be taken"):
        adapt(model)
    use(model, None)
    with pytest.raises(ArgumentError, match="must be given where no adapter is active"):
        merge_adapter(model)


def test_targets():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.v_proj, self.mlp = nn.Linear(8, 8), nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8))

    model = nn.Sequential(Block(), Block(), nn.Linear(8, 2))

    def found(targets):
        layers = list_adapters(adapt(model, targets=targets))["default"]["targets"]
        unload(model)
        return layers

    assert found("q_proj") == ["0.q_proj", "1.q_proj"]
    assert found(["1.v_proj", "q_proj"]) == ["0.q_proj", "1.q_proj", "1.v_proj"]
    assert found("1.*") == ["1.q_proj", "1.v_proj", "1.mlp.0"]
    assert found("mlp.0") == ["0.mlp.0", "1.mlp.0"]
    assert found(None) == found("all-linear") == [*found("0.*"), *found("1.*")]
    assert found("2") == ["2"]
    assert found(["all-linear", "1.mlp.0"]) == found(None)
    assert found(["all-linear", "2"]) == [*found(None), "2"]
    assert found(lambda name, layer: name == "2") == ["2"]


def test_what_cannot_be_adapted_is_left_out_with_the_reason_unless_it_is_named():
    def make():
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
        nn.utils.parametrizations.weight_norm(model[1])
        model[3].weight = model[2].weight
        return model

    model = adapt(make())
    assert list_adapters(model)["default"]["targets"] == ["0"]
    left = {row.name: row.reason for row in hs.orthogonal.check(model).left}
    assert left["1"] == "its weight is parametrised: merge that first"
    assert left["2"] == left["3"] == "another module shares its weight"
    with pytest.raises(ArgumentError, match="targets must not have 1: its weight is parametrised"):
        adapt(make(), targets=["0", "1"])
    with pytest.raises(ArgumentError, match="targets must not be given together with types or include"):
        adapt(make(), targets="0", types="linear")


@pytest.mark.parametrize(
    ("d", "wanted", "block"), [(64, 32, 32), (27, 32, 27), (48, 32, 24), (37, 32, 37), (100, 32, 25)]
)
def test_nearest_divisor(d, wanted, block):
    assert adapt(nn.Linear(d, 3), block_size=wanted).adapters.default.block == block


def test_one_input():
    layer, x = nn.Linear(1, 3), torch.randn(4, 1)
    base = layer(x)
    assert torch.equal(adapt(layer)(x), base)
    assert layer.adapters.default.free.shape == (1, 0)


# ----------------------------------------------------------------------------------------------- transformers


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, num_labels=3
    )
    return transformers.BertForSequenceClassification(config), ["query", "value", "output.dense"]


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), ["q_proj", "k_proj", "v_proj", "o_proj"]


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config), ["c_attn", "mlp.c_proj"]


def vit():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=16, patch_size=4
    )
    return transformers.ViTForImageClassification(config), ["projection", "*attention*"]


def batch(model):
    if "pixel_values" in model.main_input_name:
        return {"pixel_values": torch.randn(2, 3, 16, 16)}
    return {"input_ids": torch.randint(50, (2, 7))}


@pytest.mark.parametrize("make", [bert, llama, gpt2, vit])
class TestTransformers:
    @pytest.mark.parametrize("settings", [{}, {"input_centric": True}, {"method": "boft", "rescale": True}], ids=str)
    def test_gradients_files_and_merging(self, make, settings, tmp_path):
        model, targets = make()
        model.eval()
        data = batch(model)
        base = model(**data).logits
        adapt(model, targets=targets, **settings)
        torch.testing.assert_close(model(**data).logits, base, rtol=1e-5, atol=1e-5)
        stir(model, 0.2)
        out = model(**data).logits
        assert (out - base).abs().max() > 3e-3 * base.abs().max()
        out.square().sum().backward()
        for name, p in model.named_parameters():
            assert p.requires_grad == ("adapters" in name)
            assert p.grad is None if not p.requires_grad else p.grad.abs().sum() > 0, name
        merge_adapter(model)
        torch.testing.assert_close(model(**data).logits, out, rtol=1e-5, atol=1e-5)
        plain = unload(model)
        plain.save_pretrained(tmp_path)
        loaded = type(plain).from_pretrained(tmp_path).eval()
        torch.testing.assert_close(loaded(**data).logits, out, rtol=1e-5, atol=1e-5)

    def test_all_linear_leaves_the_output_alone(self, make):
        model, _ = make()
        chosen = list_adapters(adapt(model))["default"]["targets"]
        assert not any(name in ("lm_head", "classifier") for name in chosen)
        kinds = [m for m in model.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
        assert len(chosen) == len(kinds) - 1

    def test_checkpointed_training(self, make):
        model, targets = make()
        model.train()
        for dropout in (m for m in model.modules() if isinstance(m, nn.Dropout)):
            dropout.p = 0.0
        data = batch(model)
        stir(adapt(model, targets=targets))
        model(**data).logits.square().sum().backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        # The second is its name in older releases of transformers.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        model(**data).logits.square().sum().backward()
        for n, p in model.named_parameters():
            if n in grads:
                torch.testing.assert_close(p.grad, grads[n], rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------- claims


@pytest.mark.slow
def test_butterflies_reach_further_with_as_many_parameters():
    """Distance to a random orthogonal matrix, over sqrt(2d), after fitting."""
    d = 64
    target = torch.linalg.qr(torch.randn(d, d))[0]
    target[:, 0] *= target.det().sign()

    def distance(method, **settings):
        layer = nn.Linear(d, d, bias=False)
        nn.init.eye_(layer.weight)
        stir(adapt(layer, method, **settings), 0.1)
        optimiser = torch.optim.Adam([layer.adapters.default.free], lr=0.03)
        for _ in range(300):
            optimiser.zero_grad()
            loss = (layer.weight - target).square().sum()
            loss.backward()
            optimiser.step()
        return (layer.weight - target).norm().item() / (2 * d) ** 0.5, layer.adapters.default.free.numel()

    found = [distance("boft", block_size=2, butterfly=m) for m in (1, 2, 4, 6)]
    distances = [value for value, _ in found]
    assert distances == sorted(distances, reverse=True)
    assert distances[0] - distances[-1] > 0.1
    oft, number = distance("oft", block_size=8)
    assert (found[-1][1], number) == (192, 224)
    assert distances[-1] < oft


class LowRank(nn.Module):
    """The weight plus a product of two thin matrices, at first zero."""

    def __init__(self, weight):
        super().__init__()
        self.a = nn.Parameter(torch.randn(8, weight.shape[1]) / weight.shape[1] ** 0.5)
        self.b = nn.Parameter(torch.zeros(weight.shape[0], 8))

    def forward(self, weight):
        return weight + self.b @ self.a


def prepared(body, way):
    """A copy of a network to be fine-tuned."""
    body = copy.deepcopy(body)
    if way == "lora":
        body.requires_grad_(False)
        for layer in (body[0], body[2]):
            parametrize.register_parametrization(layer, "weight", LowRank(layer.weight))
    return (
        body
        if way in ("full", "lora")
        else adapt(body, targets=["0", "2"], **({"coft": True, "eps": 0.5} if way == "coft" else {}))
    )


def fit(body, head, x, y, lr, steps):
    own = [p for p in [*body.parameters(), *head.parameters()] if p.requires_grad]
    optimiser = torch.optim.Adam(own, lr=lr)
    for _ in range(steps):
        index = torch.randint(len(x), (100,))
        optimiser.zero_grad()
        F.cross_entropy(head(body(x[index])), y[index]).backward()
        optimiser.step()
        constrain(body)


@torch.no_grad()
def accuracy(body, head, x, y):
    return (head(body(x)).argmax(1) == y).float().mean().item()


@torch.no_grad()
def energies(body):
    return [hs.energy.hyperspherical_energy(layer.weight.double()).item() for layer in (body[0], body[2])]


@pytest.mark.slow
def test_fine_tuning_keeps_energies_and_what_was_learned():
    """Pretrained on the digits 0 to 4, fine-tuned on 5 to 9 with another head."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    old, new = ((x[chosen], y[chosen] % 5) for chosen in (y < 5, y >= 5))
    body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
    head, fresh = nn.Linear(128, 5), nn.Linear(128, 5)
    fit(body, head, *old, 1e-3, 200)
    assert accuracy(body, head, *old) > 0.97
    start = energies(body)
    changes, kept = {}, {}
    for way in ("full", "lora", "oft", "coft"):
        tuned, other = prepared(body, way), copy.deepcopy(fresh)
        fit(tuned, other, *new, 3e-3, 150)
        assert (tuned[2].weight - body[2].weight).norm() > 0.02 * body[2].weight.norm()
        assert accuracy(tuned, other, *new) > 0.85
        changes[way] = max(abs(b / a - 1) for a, b in zip(start, energies(tuned), strict=True))
        kept[way] = accuracy(tuned, head, *old)
    assert min(changes["full"], changes["lora"]) > 1e-3
    assert max(changes["oft"], changes["coft"]) < 1e-5
    assert kept["coft"] > max(kept["full"], kept["lora"], kept["oft"])
