"""Compressive energies against published values, plain code and what is known of them."""

from __future__ import annotations

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

import hypersphere as hs
from helpers.examples import example
from hypersphere import energy as E
from hypersphere import recipe
from hypersphere.data import load
from hypersphere.energy.compressive import descend, project
from hypersphere.energy.low_rank import CONDITION
from hypersphere.energy.projections import ProjectionBank, count_sketch, draw, subsampled_hadamard
from hypersphere.errors import ArgumentError
from hypersphere.runs import RunFolder
from hypersphere.sections.regularisers import layers_of
from hypersphere.train.trainer import Trainer

descents = example("compressive_energy")
rotation = example("rotation_training")


def double(rows):
    return torch.tensor(rows, dtype=torch.float64)


W = double([[-1.2, -0.8, 0.9, 0.2, -1.2], [-0.2, -0.1, -1.0, 0.7, -1.2], [-0.3, 0.1, -0.2, 0.3, 0.7],
            [1.4, -0.6, 0.4, 0.6, -0.6]])  # fmt: skip
P1 = double([[0.3, -0.5, 0.6, 0.5, -0.7], [0.8, 0.4, 0.4, 0.8, -0.2], [0.6, 0.9, -1.0, 0.8, -0.3]])
P2 = double([[0.5, 0.9, -0.6, -1.1, -0.2], [-0.4, -0.1, -0.2, 1.1, -0.9], [1.1, -1.1, 1.1, -0.4, 0.5]])
P3 = double([[-1.2, -1.1, 1.1, 0.7, -0.3], [-0.7, 0.9, 0.7, 0.4, 0.1], [0.1, 1.1, 0.1, -1.0, -1.0]])
LEFT = double([[-0.2, -0.8, 0.7, 0.9, 0.1], [-0.8, 0.8, -0.3, -0.2, -0.5]])
RIGHT = double([[-0.1, 0.8], [-0.1, -0.5], [-0.4, -0.2], [-0.4, -0.1]])
CLOSE = {"rtol": 0, "atol": 2e-10}


def reference(rows, s=2.0, half=True):
    """Mean energy of numpy rows, pair by pair."""
    units = [row / np.linalg.norm(row) for row in np.asarray(rows, dtype=float)]
    units += [-unit for unit in units] if half else []
    terms = []
    for i, a in enumerate(units):
        for j, b in enumerate(units):
            if i != j:
                z = np.linalg.norm(a - b)
                terms.append(-math.log(z) if s == 0 else z**-s)
    return float(np.mean(terms))


def gradient(value, at):
    return torch.autograd.grad(value, at)[0]


def leaf(x):
    return x.clone().requires_grad_()


def with_projections(name, matrices, inputs=5, **options):
    """A regulariser whose projections of a bare matrix are these ``(m, k, d)``, loaded before its first call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        regulariser = E.create(name, dim=inputs - 1, count=len(matrices), **options)
    state = {f"bank.d{inputs}": matrices, "bank._extra_state": torch.tensor([0, 0, 0])}
    regulariser.load_state_dict({**regulariser.state_dict(), **state})
    return regulariser


class TestPublishedValues:
    @pytest.mark.parametrize(
        ("P", "values"),
        [
            (P1, (-0.413253232274, -0.314273031248, 0.679881160617, 0.78012589111, 0.490783453964, 0.703545079552)),
            (P2, (-0.239510895546, -0.350029076318, 0.806455164054, 0.729413739942, 0.679818360679, 0.56956847745)),
            (P3, (-0.31594558977, -0.350967950152, 0.747237106685, 0.733434368714, 0.589023094724, 0.592223567753)),
        ],
    )
    def test_projected(self, P, values):
        cases = [(s, half) for s in (0, 1, 2) for half in (False, True)]
        found = [E.compressive_energy(W, P, s, half_space=half) for s, half in cases]
        torch.testing.assert_close(torch.stack(found), double(values), **CLOSE)

    @pytest.mark.parametrize(
        ("aggregate", "value", "slope"),
        [
            ("mean", 0.636556778501, [0.0166636853, 0.0357783022, -0.0070263669, 0.0489626273, -0.0376252241]),
            ("max", 0.703545079552, [0.0740423881, 0.0195500118, 0.0373825258, 0.08451992, -0.0449521816]),
        ],
    )
    def test_random_projections(self, aggregate, value, slope):
        regulariser = with_projections("rp-comhe", torch.stack([P1, P2]), aggregate=aggregate, redraw_every=None)
        weights = leaf(W)
        found = regulariser(weights)
        torch.testing.assert_close(found, double(value), **CLOSE)
        torch.testing.assert_close(gradient(found, weights)[0], double(slope), **CLOSE)

    def test_gradients(self):
        weights, P = leaf(W), leaf(P3)
        by_weights, by_P = torch.autograd.grad(E.compressive_energy(weights, P), (weights, P))
        row = [0.14649521519, 0.61653977773, -0.071759262082, -0.35811176839, -0.2248933305]
        torch.testing.assert_close(by_weights[1], double(row), **CLOSE)
        row = [0.0727544314, -0.0885432342, -0.2631864895, 0.3054686611, -0.3398069573]
        torch.testing.assert_close(by_P[2], double(row), **CLOSE)

    @pytest.mark.parametrize(
        ("kind", "value", "slope"),
        [
            ("angle", 2.47812473211, [0.1394127688, 0.5914834856, 2.6854693546, -1.9028067899, 4.7128366415]),
            ("cos", 2.12405073605, [-0.1561619539, 0.6096373643, 2.0698899115, -1.502380042, 4.2883865824]),
            ("frob", 1.45741234249, [-0.053575076, 0.2091506112, 0.710125011, -0.5154272399, 1.4712331086]),
        ],
    )
    def test_preservation_loss(self, kind, value, slope):
        P = leaf(P3)
        found = E.preservation_loss(W, P, kind)
        torch.testing.assert_close(found, double(value), **CLOSE)
        torch.testing.assert_close(gradient(found, P)[0], double(slope), **CLOSE)

    def test_preservation_loss_with_padded_norms(self):
        torch.testing.assert_close(E.preservation_loss(W, P3, eps=1e-4), double(1.45719836232), **CLOSE)

    def test_steps_of_the_projection(self):
        def loss(P):
            return E.preservation_loss(W, P, "cos")

        row = [-1.1843838046, -1.1609637364, 0.8930110089, 0.8502380042, -0.7288386582]
        torch.testing.assert_close(descend(loss, P3, 0.1)[0], double(row), **CLOSE)
        torch.testing.assert_close(loss(descend(loss, P3, 0.1)), double(1.3866600043), **CLOSE)
        torch.testing.assert_close(loss(descend(loss, P3, 0.1, steps=10)), double(0.706505694), rtol=0, atol=1e-9)

    @pytest.mark.parametrize(
        ("loss", "value", "second", "first"),
        [
            (
                "cos",
                0.698318466812,
                [0.1303960613, 0.0493569269, -0.1300191799, 0.1416500734, -0.2372067184],
                [0.1019220949, -0.0596916144, -0.0567376744, -0.1327135478, -0.1267998657],
            ),
            (
                "frob",
                0.585130350999,
                [0.03840852, -0.0024519254, 0.0130172659, -0.0428829445, -0.034158111],
                [0.0122731391, -0.0064872954, -0.0084908694, -0.0192277902, -0.0175210592],
            ),
        ],
    )
    def test_unrolled(self, loss, value, second, first):
        for order, slope in ((True, second), (False, first)):
            regulariser = with_projections("ap-comhe", P3[None], loss=loss, p_steps=0, second_order=order).double()
            regulariser.rate.fill_(0.1)
            weights = leaf(W)
            found = regulariser(weights)
            torch.testing.assert_close(found, double(value), rtol=0, atol=1e-8)
            torch.testing.assert_close(gradient(found, weights)[0], double(slope), rtol=0, atol=3e-8)

    def test_adversarial(self):
        def ascend(steps, half=True):
            return descend(lambda P: -E.compressive_energy(W, P, half_space=half), P3, 0.1, steps)

        row = [0.1072754431, 1.0911456766, 0.0736813511, -0.9694531339, -1.0339806957]
        torch.testing.assert_close(ascend(1)[2], double(row), **CLOSE)
        torch.testing.assert_close(E.compressive_energy(W, ascend(1)), double(0.6758539991), **CLOSE)
        torch.testing.assert_close(E.compressive_energy(W, ascend(10)), double(2.0436357277), rtol=0, atol=1e-8)
        torch.testing.assert_close(E.compressive_energy(W, ascend(1, half=False)), double(0.679736617368), **CLOSE)

    def test_adversarial_regulariser(self):
        options = {"ascent_steps": 0, "rate": 0.1}
        weights = leaf(W)
        found = with_projections("adv-comhe", P3[None], **options)(weights)
        torch.testing.assert_close(found, double(0.6758539991), rtol=0, atol=1e-8)
        row = [-0.0057120473, 0.0109698652, 0.0045903412, 0.004535441, 0.0025974665]
        torch.testing.assert_close(gradient(found, weights)[0], double(row), rtol=0, atol=3e-8)
        outer = with_projections("adv-comhe", P3[None], inner_half_space=False, **options)(W)
        torch.testing.assert_close(outer, double(0.679736617368), rtol=0, atol=1e-8)
        moved = with_projections("adv-comhe", P3[None], ascent_steps=10, unroll=False, decay=0.0).double()
        moved.advance(0, 0, 0.1)
        torch.testing.assert_close(moved(W), double(2.0436357277), rtol=0, atol=1e-8)

    @pytest.mark.parametrize(
        ("groups", "value"), [([[0, 1], [2, 3, 4]], 8.17098606059), ([[0, 2, 4], [1, 3]], 0.851058990579)]
    )
    def test_groups(self, groups, value):
        torch.testing.assert_close(E.create("group-comhe", partition=groups)(W), double(value), **CLOSE)

    def test_bilateral(self):
        first, second = E.compressive_energy(W, LEFT), E.hyperspherical_energy(RIGHT.T @ W, half_space=True)
        torch.testing.assert_close(torch.stack([first, second]), double([1.0068988871, 0.418774219]), **CLOSE)
        bank = {"bank.d5": LEFT[None], "bank.n4": RIGHT.T[None], "bank._extra_state": torch.tensor([0, 0, 0])}
        with pytest.warns(UserWarning, match="infinite variance"):
            regulariser = E.create("bp-comhe", dim=4, redraw_every=0)
        regulariser.load_state_dict(bank)
        torch.testing.assert_close(regulariser(W), double(1.42567310609), **CLOSE)

    def test_low_rank(self):
        layer = nn.Linear(5, 4, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(W)
        low = LowRank(LEFT, RIGHT)
        parametrize.register_parametrization(layer, "weight", low)
        row = [-1.6691392835, -1.0653431046, -0.0600193419, 1.493639939]
        torch.testing.assert_close(layer.weight[:, 0], double(row), **CLOSE)
        row = [-0.6110633055, -0.0160426382, -0.0650697385, -0.2781537756]
        torch.testing.assert_close(layer.weight[:, 4], double(row), **CLOSE)
        torch.testing.assert_close(E.create("bp-lowrank")(layer), double(1.42567310609), **CLOSE)

    def test_other_matrices(self):
        hadamard = subsampled_hadamard(torch.tensor([1, 3, 6]), double([1, -1, -1, 1, 1]), 3)
        signs = double([[1, 1, -1, -1, 1], [1, 1, 1, 1, 1], [1, -1, 1, -1, -1]])
        torch.testing.assert_close(hadamard, 0.5773502692 * signs, **CLOSE)
        torch.testing.assert_close(E.compressive_energy(W, hadamard), double(0.675126664461), **CLOSE)
        sketch = count_sketch(torch.tensor([1, 0, 2, 0, 1]), double([1, -1, -1, 1, -1]), 3)
        torch.testing.assert_close(E.compressive_energy(W, sketch), double(0.646708302364), **CLOSE)


def LowRank(left, right):  # noqa: N802
    """The parametrisation with given projections."""
    low = E.LowRankBilateral((len(right), left.shape[1]), len(left))
    low.left, low.right = left, right
    return low


class TestMatrices:
    @pytest.mark.parametrize("kind", ["gaussian", "srht", "countsketch"])
    def test_mean_square_is_the_identity(self, kind):
        many = draw(torch.empty(20_000, 4, 6), kind, torch.Generator().manual_seed(1))
        square = (many.mT @ many / (4 if kind == "gaussian" else 1)).mean(0)
        torch.testing.assert_close(square, torch.eye(6), rtol=0, atol=0.03)

    def test_hadamard_rows_are_distinct_and_orthogonal(self):
        P = draw(torch.empty(5, 8, 8), "srht", torch.Generator().manual_seed(1))
        torch.testing.assert_close(P @ P.mT, torch.eye(8).expand(5, 8, 8))
        assert not torch.equal(P[0], P[1])

    def test_sketch_has_one_number_a_column(self):
        P = draw(torch.empty(5, 3, 40), "countsketch", torch.Generator().manual_seed(1))
        assert ((P != 0).sum(1) == 1).all()
        assert set(P.unique().tolist()) == {-1.0, 0.0, 1.0}

    def test_bank_draws_by_seed_number_and_name(self):
        def drawn(seed, number, name):
            bank = ProjectionBank()
            bank.redraw(seed, number)
            return bank.get(name, (1, 2, 3), torch.zeros(1))

        first = drawn(1, 2, "a")
        assert torch.equal(first, drawn(1, 2, "a"))
        assert not any(torch.equal(first, other) for other in (drawn(2, 2, "a"), drawn(1, 3, "a"), drawn(1, 2, "b")))

    def test_bank_draws_into_the_same_memory(self):
        bank = ProjectionBank()
        held = bank.get("a", (1, 2, 3), torch.zeros(1))
        before = held.clone()
        bank.redraw(0, 1)
        assert bank.get("a", (1, 2, 3), torch.zeros(1)) is held
        assert not torch.equal(held, before)

    def test_unknown_kind(self):
        with pytest.raises(ArgumentError, match="kind must be one of"):
            ProjectionBank("uniform")


class TestProperties:
    @given(st.integers(0, 10**6), st.sampled_from([0.0, 1.0, 2.0]))
    def test_invariances(self, seed, s):
        generator = torch.Generator().manual_seed(seed)
        rows, P = (torch.randn(5, 9, generator=generator, dtype=torch.float64) for _ in range(2))
        value = E.compressive_energy(rows, P, s)
        scales = torch.rand(5, 1, generator=generator, dtype=torch.float64) + 0.1
        signs = double([[1.0], [-1.0], [1.0], [-1.0], [-1.0]])
        turn = torch.linalg.qr(torch.randn(5, 5, generator=generator, dtype=torch.float64)).Q
        turn_both = torch.linalg.qr(torch.randn(9, 9, generator=generator, dtype=torch.float64)).Q
        order = torch.randperm(5, generator=generator)
        for other in (
            E.compressive_energy(rows * scales * signs, P, s),
            E.compressive_energy(rows[order], P, s),
            E.compressive_energy(rows, -3.7 * turn @ P, s),
            E.compressive_energy(rows @ turn_both, P @ turn_both, s),
        ):
            torch.testing.assert_close(other, value)

    def test_orthogonal_projection_changes_nothing(self):
        turn = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
        torch.testing.assert_close(E.compressive_energy(W, turn), E.hyperspherical_energy(W, half_space=True))
        for kind in ("cos", "frob", "angle"):
            assert E.preservation_loss(W, 3 * turn, kind) < 1e-7

    @given(st.integers(0, 10**6))
    def test_gradients_have_the_right_directions(self, seed):
        generator = torch.Generator().manual_seed(seed)
        rows, P = torch.randn(6, 11, generator=generator).double(), torch.randn(4, 11, generator=generator).double()
        rows.requires_grad_(), P.requires_grad_()
        by_rows, by_P = torch.autograd.grad(E.compressive_energy(rows, P), (rows, P))
        size = by_rows.norm()
        torch.testing.assert_close((rows * by_rows).sum(1) / size, torch.zeros(6).double(), rtol=0, atol=1e-12)
        torch.testing.assert_close((P * by_P).sum() / by_P.norm(), double(0.0), rtol=0, atol=1e-12)
        onto = P.T @ torch.linalg.solve(P @ P.T, P)  # onto the row space of P
        torch.testing.assert_close(by_rows @ onto, by_rows, rtol=0, atol=float(1e-10 * size))

    @pytest.mark.parametrize("aggregate", ["mean", "max"])
    def test_regulariser_agrees_with_plain_code(self, aggregate):
        regulariser = E.create("rp-comhe", dim=6, count=3, aggregate=aggregate)
        rows = torch.randn(7, 10, dtype=torch.float64)
        value = regulariser(rows)
        each = [reference(rows @ P.T) for P in regulariser.bank.d10]
        assert value.item() == pytest.approx(max(each) if aggregate == "max" else np.mean(each), rel=1e-9)
        assert max(each) > np.mean(each)

    def test_groups_agree_with_plain_code(self):
        rows = torch.randn(7, 20, dtype=torch.float64)
        expected = np.mean([reference(rows[:, start : start + 8]) for start in (0, 8, 16)])
        assert E.create("group-comhe")(rows).item() == pytest.approx(expected, rel=1e-9)

    def test_bilateral_agrees_with_plain_code(self):
        for n in (4, 12):  # fewer neurons than mixtures asked for, and more
            regulariser = E.create("bp-comhe", dim=6)
            rows = torch.randn(n, 10, dtype=torch.float64)
            value = regulariser(rows).item()
            left, right = regulariser.bank.d10[0], getattr(regulariser.bank, f"n{n}")[0]
            assert right.shape == (min(6, n), n)
            assert value == pytest.approx(reference(rows @ left.T) + reference(right @ rows), rel=1e-9)

    def test_no_step_is_a_fixed_projection(self):
        found = with_projections("ap-comhe", P3[None], rate=0.0)(W)
        torch.testing.assert_close(found, E.compressive_energy(W, P3))
        found = with_projections("adv-comhe", P3[None], rate=0.0)(W)
        torch.testing.assert_close(found, E.compressive_energy(W, P3))

    def test_small_steps_go_the_right_way(self):
        torch.manual_seed(3)
        rows, P = torch.randn(9, 20, dtype=torch.float64), torch.randn(6, 20, dtype=torch.float64)
        for kind in ("cos", "frob", "angle"):
            moved = descend(lambda P, kind=kind: E.preservation_loss(rows, P, kind), P, 1e-3)
            assert E.preservation_loss(rows, moved, kind) < E.preservation_loss(rows, P, kind)
        moved = descend(lambda P: -E.compressive_energy(rows, P), P, 1e-2)
        assert E.compressive_energy(rows, moved) > E.compressive_energy(rows, P)

    def test_second_order_by_differences(self):
        rows = torch.randn(4, 7, dtype=torch.float64)
        P = torch.randn(1, 5, 7, dtype=torch.float64)

        def value(rows, name, options):
            return with_projections(name, P, inputs=7, rate=0.1, **options)(rows)

        for name, options in (
            ("ap-comhe", {"p_steps": 0, "unroll_steps": 2}),
            ("ap-comhe", {"p_steps": 0, "loss": "angle"}),
            ("adv-comhe", {"ascent_steps": 0}),
        ):
            assert torch.autograd.gradcheck(
                lambda rows, name=name, options=options: value(rows, name, options), leaf(rows), eps=1e-6, atol=1e-5
            )

    def test_stationary_points_stay_under_zeros_and_copies(self):
        # Orthogonal rows are a minimum: with more coordinates, zero or the same once more, they still are one.
        rows = torch.eye(6, dtype=torch.float64)
        for wider in (torch.cat([rows, torch.zeros(6, 3).double()], 1), torch.cat([rows, rows], 1)):
            at = leaf(wider)
            slope = gradient(E.create("group-comhe", partition=[range(wider.shape[1])])(at), at)
            assert slope.abs().max() < 1e-12


class TestExpectation:
    @pytest.mark.parametrize("k", [8, 12, 30])
    @pytest.mark.parametrize("s", [0, 2])
    def test_mean_over_projections(self, k, s):
        rows, projections = torch.randn(6, 40, dtype=torch.float64), 4_000
        regulariser = E.create("rp-comhe", dim=k, count=projections, s=s)
        values = torch.stack([regulariser(rows) for _ in range(5)])  # each with fresh projections
        share, n = 1 / 11, 6  # of the pairs of a neuron and its own mirror image among 12 vectors
        own = -math.log(2) if s == 0 else 0.25
        X = (E.hyperspherical_energy(rows, s, half_space=True).item() - share * own) / (1 - share)
        if s == 2:
            expected = (k * X - 1) / (k - 3)
        else:
            expected = X + (torch.digamma(double(k / 2)) - torch.digamma(double((k - 1) / 2))).item() / 4
        assert len({*values.tolist()}) == 5
        each = E.compressive_energy(rows, regulariser.bank.d40, s)
        error = each.std().item() / math.sqrt(5 * projections)
        assert n * (n - 1) * 4 + 2 * n == 12 * 11
        assert values.mean().item() == pytest.approx((1 - share) * expected + share * own, abs=4 * error)
        assert error < 0.01 * abs(expected - X)  # fine enough to tell it from the energy without projections

    @pytest.mark.parametrize("k", [12, pytest.param(30, marks=pytest.mark.slow)])
    def test_mean_gradient(self, k):
        rows = leaf(torch.randn(6, 40, dtype=torch.float64))
        found = gradient(E.create("rp-comhe", dim=k, count=20_000)(rows), rows)
        plain = gradient(E.hyperspherical_energy(rows, half_space=True), rows)
        assert torch.cosine_similarity(found.flatten(), plain.flatten(), 0) > 0.999
        assert (found.norm() / plain.norm()).item() == pytest.approx(k / (k - 3), rel=0.02)

    def test_noise_falls_with_the_number_of_projections(self):
        rows = torch.randn(6, 40, dtype=torch.float64)
        spread = []
        for count in (1, 16):
            regulariser = E.create("rp-comhe", dim=12, count=count)
            spread.append(torch.stack([regulariser(rows) for _ in range(400)]).var().item())
        assert spread[0] / spread[1] == pytest.approx(16, rel=0.4)

    @pytest.mark.slow
    def test_angles_are_kept_better_with_steps(self):
        rows = torch.linalg.qr(torch.randn(576, 64)).Q.T
        P = torch.randn(30, 576)
        moved = descend(lambda P: E.preservation_loss(rows, P), P, 0.1, steps=1000)
        assert E.preservation_loss(rows, moved) < 0.75 * E.preservation_loss(rows, P)


NAMES = tuple(name for name in E.energies if issubclass(E.energies[name].factory, E.Compressive))
SMALL = {name: {} if name == "group-comhe" else {"dim": 8} for name in NAMES}


def small_model():
    """Two layers of 27 and 36 inputs twice, one below the projection's dimension, one neuron, and the output."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.Conv2d(4, 6, 3), nn.Conv2d(4, 5, 3), nn.Linear(7, 9), nn.Linear(30, 1), nn.Linear(20, 4)
    )


def selection(model):
    """The model's layers, the last one as output; what the names of the layers say."""
    rows = [(name, layer) for name, layer in model.named_children()]
    return E.Selection(
        [
            E.Neurons(name, lambda m=m: m.weight.flatten(1).unsqueeze(0), "output" if name == rows[-1][0] else "hidden")
            for name, m in rows
        ]
    )


class TestModel:
    @pytest.mark.parametrize("share", ["dim", "layer"])
    def test_layers_together_are_the_sum_of_layers(self, share):
        model = small_model().double()
        layers = selection(model)
        regulariser = E.create("rp-comhe", dim=8, count=2, share=share, hidden_weight=3, output_weight=0.5)
        found = regulariser(layers)
        expected = 0.0
        for name, layer in list(model.named_children())[:3]:
            rows = layer.weight.flatten(1).detach()
            key = f"d{rows.shape[1]}" if share == "dim" else f"layer:{name}:d{rows.shape[1]}"
            expected += 3 * np.mean([reference(rows @ P.T) for P in getattr(regulariser.bank, key)])
        expected += 3 * reference(model[3].weight.detach()) + 0.5 * reference(model[5].weight.detach(), half=False)
        assert found.item() == pytest.approx(expected, rel=1e-9)
        assert len(list(regulariser.bank.buffers())) == (2 if share == "dim" else 3)

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("share", ["dim", "layer"])
    def test_values_do_not_depend_on_batches(self, name, share, monkeypatch):
        options = SMALL[name] | ({} if name == "group-comhe" else {"share": share})
        model = small_model().double()
        regulariser = E.create(name, **options)
        regulariser.prepare(selection(model))
        regulariser.eval()

        def value():
            total = regulariser(selection(model))
            return total, *torch.autograd.grad(total, [layer.weight for layer in model if layer is not model[4]])

        together = value()
        monkeypatch.setattr("hypersphere.energy.base.CPU_PADDING", 2**21)
        for found, expected in zip(value(), together, strict=True):
            torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize("name", NAMES)
    def test_layer_energies_add_up_and_move_nothing(self, name):
        model = small_model().double()
        regulariser = E.create(name, **SMALL[name])
        regulariser(selection(model))
        state = copy.deepcopy(regulariser.state_dict())
        each = regulariser.layer_energies(selection(model))
        assert regulariser.training
        for key, value in regulariser.state_dict().items():
            assert torch.equal(value, state[key])
        assert each["4"] == 0
        torch.testing.assert_close(sum(each.values()), regulariser.eval()(selection(model)))

    def test_groups_of_a_convolution_are_averaged(self):
        rows = torch.randn(2, 5, 18, dtype=torch.float64)
        regulariser = E.create("rp-comhe", dim=8, redraw_every=0)
        found = regulariser(E.Selection([E.Neurons("a", lambda: rows)]))
        torch.testing.assert_close(found, (regulariser(rows[0]) + regulariser(rows[1])) / 2)

    def test_taps_of_a_kernel_stay_together(self):
        rows = torch.randn(5, 6 * 9, dtype=torch.float64)
        layer = E.Neurons("a", lambda: rows.unsqueeze(0))
        object.__setattr__(layer, "taps", 9)
        found = E.create("group-comhe", group_channels=2)(E.Selection([layer]))
        expected = np.mean([reference(rows[:, start : start + 18]) for start in (0, 18, 36)])
        assert found.item() == pytest.approx(expected, rel=1e-9)
        random = E.create("group-comhe", group_channels=2, partition="random")
        found = random(E.Selection([layer]))
        pairs = random.bank.d54t9.view(3, 2)
        each = [reference(rows.view(5, 6, 9)[:, pair].flatten(1)) for pair in pairs]
        assert found.item() == pytest.approx(np.mean(each), rel=1e-9)
        lists = E.create("group-comhe", partition=pairs.tolist())
        torch.testing.assert_close(lists(E.Selection([layer])), found)

    def test_random_groups_are_drawn_again(self):
        rows = torch.randn(5, 40)
        regulariser = E.create("group-comhe", partition="random")
        assert regulariser(rows) != regulariser(rows)
        order = regulariser.bank.d40t1
        assert torch.equal(order.sort().values, torch.arange(40))

    def test_few_channels_are_one_group(self):
        torch.testing.assert_close(E.create("group-comhe")(W), E.hyperspherical_energy(W, half_space=True))

    def test_few_inputs_are_not_projected(self):
        rows = torch.randn(5, 8)
        for name in ("rp-comhe", "ap-comhe", "adv-comhe", "naive-comhe", "bp-comhe"):
            regulariser = E.create(name, dim=8)
            torch.testing.assert_close(regulariser(rows), E.hyperspherical_energy(rows, half_space=True))
            assert not [key for key in regulariser.state_dict() if key.startswith("bank.d")]

    def test_projections_per_neuron(self):
        layers = E.Selection([E.Neurons(f"l.{n}", lambda n=n: torch.ones(1, n, 20).cumsum(1)) for n in (6, 25, 24)])
        regulariser = E.create("rp-comhe", dim=8, projections_per_neuron=8)
        regulariser.prepare(layers)
        held = {name: tuple(tensor.shape) for name, tensor in regulariser.bank.named_buffers()}
        assert held == {"d20x1": (1, 8, 20), "d20x3": (3, 8, 20)}

    def test_any_map(self):
        rows = torch.randn(5, 9, dtype=torch.float64)
        net = nn.Sequential(nn.Linear(9, 4), nn.Tanh()).double()
        regulariser = E.Compressive(net, s=1)
        assert regulariser(rows).item() == pytest.approx(reference(net(rows).detach(), s=1), rel=1e-9)
        assert len(list(regulariser.parameters())) == 2

    def test_naive_projections_are_learned(self):
        rows = leaf(torch.randn(5, 20))
        regulariser = E.create("naive-comhe", dim=8)
        regulariser.prepare(rows)
        (P,) = regulariser.parameters()
        by_P, by_rows = torch.autograd.grad(regulariser(rows), (P, rows))
        again = leaf(P.detach())
        expected = torch.autograd.grad(E.compressive_energy(rows, again).sum(), (again, rows))
        torch.testing.assert_close((by_P, by_rows), expected)

    @pytest.mark.parametrize("name", ["rp-comhe", "ap-comhe", "adv-comhe", "bp-comhe"])
    def test_other_projections_are_no_parameters(self, name):
        regulariser = E.create(name, dim=8)
        regulariser(leaf(torch.randn(5, 20))).backward()
        assert not list(regulariser.parameters())
        assert not any(buffer.requires_grad or buffer.grad is not None for buffer in regulariser.buffers())


def run(regulariser, model, first, last, every_call=True):
    """A few steps of descent; the values."""
    values = []
    for step in range(first, last):
        if every_call:
            regulariser.advance(step, 5, 0.1)
        loss = regulariser(selection(model))
        loss.backward()
        with torch.no_grad():
            for parameter in [*model.parameters(), *regulariser.parameters()]:
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
        values.append(loss.item())
    return values


CASES = [
    *[(name, SMALL[name]) for name in NAMES],
    ("rp-comhe", {"dim": 8, "redraw_every": 4}),
    ("rp-comhe", {"dim": 8, "redraw_every": None, "kind": "srht", "share": "layer"}),
    ("ap-comhe", {"dim": 8, "mode": "alternate", "p_every": 3}),
    ("ap-comhe", {"dim": 8, "redraw_every": 5, "share": "dim"}),
    ("group-comhe", {"partition": "random", "redraw_every": 4}),
]


class TestState:
    @pytest.mark.parametrize("led", [True, False])
    @pytest.mark.parametrize("prepared", [True, False])
    @pytest.mark.parametrize(("name", "options"), CASES)
    def test_resumed_run_is_the_same(self, name, options, prepared, led):
        torch.manual_seed(1)
        model, regulariser = small_model(), E.create(name, **options)
        run(regulariser, model, 0, 6, led)
        saved = copy.deepcopy((model.state_dict(), regulariser.state_dict()))
        expected = run(regulariser, model, 6, 10, led)
        model, regulariser = small_model(), E.create(name, **options)
        model.load_state_dict(saved[0])
        if prepared:
            regulariser.prepare(selection(model))
        regulariser.load_state_dict(saved[1])
        assert run(regulariser, model, 6, 10, led) == expected
        assert all("." not in key.removeprefix("bank.") for key in saved[1])

    def test_state_survives_a_file(self, tmp_path):
        regulariser = E.create("rp-comhe", dim=8, share="layer")
        model = nn.Sequential(nn.Sequential(nn.Linear(20, 5)), nn.Linear(5, 5), nn.Linear(5, 2))
        regulariser.prepare(model)
        torch.save(regulariser.state_dict(), tmp_path / "state.pt")
        again = E.create("rp-comhe", dim=8, share="layer")
        again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert torch.equal(getattr(again.bank, "layer:0/0:d20"), getattr(regulariser.bank, "layer:0/0:d20"))
        assert again.eval()(model) == regulariser.eval()(model)

    def test_every_process_draws_the_same(self):
        model = small_model()
        found = []
        for steps in ((0, 1, 2, 3, 4, 5), (5,)):  # the second one missed the first steps
            regulariser = E.create("rp-comhe", dim=8, redraw_every=3)
            for step in steps:
                regulariser.advance(step, 7, 0.1)
                regulariser(selection(model))
            found.append(regulariser(selection(model)).item())
        assert found[0] == found[1]

    def test_when_projections_change(self):
        rows = torch.randn(5, 20)
        regulariser = E.create("rp-comhe", dim=8, redraw_every=3)
        values = []
        for step in range(7):
            regulariser.advance(step, 7, 0.1)
            values.append(regulariser(rows).item())
        assert values[0] == values[1] == values[2] != values[3] == values[5] != values[6] != values[0]
        assert E.create("rp-comhe", dim=8, redraw_every=0)(rows) == E.create("rp-comhe", dim=8, redraw_every=None)(rows)
        regulariser.advance(6, 8, 0.1)
        assert regulariser(rows).item() != values[6]

    @pytest.mark.parametrize("name", NAMES)
    def test_nothing_moves_in_evaluation(self, name):
        rows = torch.randn(5, 20)
        regulariser = E.create(name, **SMALL[name])
        regulariser(rows)
        regulariser.eval()
        state = copy.deepcopy(regulariser.state_dict())
        with torch.no_grad():
            values = [regulariser(rows).item() for _ in range(3)]
        assert len(set(values)) == 1
        assert regulariser(rows).item() == values[0]
        assert all(torch.equal(value, state[key]) for key, value in regulariser.state_dict().items())

    def test_a_second_call_before_the_backward_pass(self):
        rows = leaf(torch.randn(5, 20))
        for name in NAMES:
            regulariser = E.create(name, **SMALL[name])
            first, second = regulariser(rows), regulariser(rows)
            (first + second).backward()
        assert rows.grad.isfinite().all()

    def test_projections_move_with_the_learning_rate(self):
        rows = torch.randn(5, 20, dtype=torch.float64)
        regulariser = E.create("ap-comhe", dim=8, mode="alternate", p_every=2, loss="cos", decay=0.01)
        regulariser.prepare(rows)
        regulariser.advance(0, 0, 0.05)
        for step in range(4):
            before = regulariser.bank.d20.clone()
            regulariser.advance(step, 0, 0.05)
            value = regulariser(rows)
            at = leaf(before[0])
            slope = gradient(E.preservation_loss(rows, at, "cos"), at)
            expected = before[0] - (0.05 if step % 2 == 0 else 0.0) * (slope + 0.01 * before[0])
            torch.testing.assert_close(regulariser.bank.d20[0], expected, rtol=1e-7, atol=1e-8)
            torch.testing.assert_close(value, E.compressive_energy(rows, regulariser.bank.d20[0]))

    def test_default_rates(self):
        assert E.create("ap-comhe").rate.item() == pytest.approx(0.1)
        fixed = E.create("ap-comhe", rate=0.3)
        fixed.advance(0, 0, 0.7)
        assert fixed.rate.item() == pytest.approx(0.3)

    def test_growth_of_an_adversary(self):
        rows = torch.randn(6, 12)
        regulariser = E.create("adv-comhe", dim=6, rate=0.01)
        regulariser(rows)
        assert regulariser.growth() == 1
        regulariser(rows[:1] + 0.01 * rows)  # all but the same direction
        with pytest.warns(UserWarning, match="the adversary raised the energy"):
            assert regulariser.growth() > 10


class TestLowRank:
    def layer(self, rank=3):
        layer = nn.Conv2d(4, 8, 3).double()
        low = E.LowRankBilateral(layer.weight.shape, rank, generator=torch.Generator().manual_seed(0))
        return parametrize.register_parametrization(layer, "weight", low), low

    def test_rank_and_projection(self):
        layer, low = self.layer()
        rows = layer.weight.flatten(1)
        assert torch.linalg.matrix_rank(rows) == 3
        torch.testing.assert_close(low.left.double() @ rows.T, layer.parametrizations.weight.original0)
        names = [tuple(p.shape) for p in layer.parametrizations.weight.parameters()]
        assert names == [(3, 8), (36, 3)]
        assert 1 <= low.condition(layer.parametrizations.weight.original1) < CONDITION

    def test_weight_of_that_rank_is_kept(self):
        layer, _ = self.layer()
        weight = (torch.randn(8, 3).double() @ torch.randn(3, 36).double()).view(8, 4, 3, 3)
        layer.weight = weight
        torch.testing.assert_close(layer.weight, weight)

    def test_trains_and_is_saved(self):
        layer, _ = self.layer()
        model = nn.Sequential(layer, nn.Flatten(), nn.Linear(8, 3).double())
        names = [neurons.name for neurons in E.create("bp-lowrank").select(model)]
        assert names == ["0.Y1", "0.Y2", "2"]
        E.create("bp-lowrank")(model).backward()
        assert all(p.grad.norm() > 0 for p in layer.parametrizations.weight.parameters())
        other, _ = self.layer()
        with torch.no_grad():
            other.parametrizations.weight[0].left.zero_()
        other.load_state_dict(layer.state_dict())
        torch.testing.assert_close(other.weight, layer.weight)

    def test_factors_in_training(self):
        layer, _ = self.layer()
        model = nn.Sequential(nn.Conv2d(2, 4, 1).double(), layer, nn.Flatten())
        layers = layers_of(E.create("bp-lowrank"), "all", model, nn.Linear(8, 3))
        assert [neurons.name for neurons in layers] == ["0", "1.Y1", "1.Y2", "head"]
        assert [neurons.role for neurons in layers] == ["hidden", "hidden", "hidden", "output"]

    def test_gradient(self):
        low = E.LowRankBilateral((5, 6), 2)
        y1, y2 = (leaf(y.double()) for y in low.right_inverse(torch.randn(5, 6)))
        assert torch.autograd.gradcheck(low, (y1, y2))

    def test_bad_condition(self):
        low = E.LowRankBilateral((5, 6), 2)
        with pytest.raises(ArithmeticError, match="condition number"):
            low.condition(torch.ones(6, 2))

    def test_bad_rank(self):
        with pytest.raises(ArgumentError, match="rank must be at least 1 and at most 5, got 6"):
            E.LowRankBilateral((5, 6), 6)


class TestEdges:
    def test_partition_that_no_layer_has_is_blamed_on_the_recipe(self, tmp_path):
        plan = recipe.load("digits-softmax", ["regularisers=[{name: group-comhe, partition: [[0], [999]]}]"])
        device = torch.device("cpu")
        trainer = Trainer(plan, RunFolder.create(tmp_path / "run", plan, device), device)
        with pytest.raises(recipe.RecipeError, match=r"regularisers\.0\.partition must hold channels from 0 to"):
            trainer.prepare()

    @pytest.mark.parametrize("name", NAMES)
    def test_model_without_pairs(self, name):
        model = nn.Conv2d(4, 4, 3, groups=4)
        regulariser = E.create(name, **SMALL[name])
        assert regulariser(model).item() == 0
        assert regulariser.layer_energies(model) == {}

    @pytest.mark.parametrize("name", ["rp-comhe", "naive-comhe", "bp-comhe", "group-comhe"])
    def test_model_that_gets_its_weights_later(self, name):
        model = nn.Sequential(nn.Linear(40, 5, device="meta"), nn.Linear(5, 3, device="meta"))
        regulariser = E.create(name, **SMALL[name])
        assert regulariser(model).is_meta
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        other = E.create(name, **SMALL[name])
        other.prepare(model)
        regulariser.eval()
        other.eval()
        assert regulariser(model).item() == pytest.approx(other(model).item(), rel=1e-6)

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    def test_degenerate_rows_are_finite(self, name, dtype):
        row = torch.randn(20)
        many = torch.stack([row, row, -row, torch.zeros(20), 1e-3 * torch.randn(20)]).to(dtype)
        for rows in (many, many[:2], many[:1], many[3:4], torch.zeros(3, 20, dtype=dtype), many.repeat(2, 2)[::2, ::2]):
            at = leaf(rows)
            value = E.create(name, **SMALL[name])(at)
            assert value.dtype == torch.float32
            assert value.isfinite()
            slope = gradient(value, at)
            # Mixtures of copies nearly meet: their gradient may be more than the largest number of 16 bits.
            assert slope.isfinite().all() or (dtype == torch.float16 and not slope.isnan().any())

    @pytest.mark.parametrize("name", NAMES)
    def test_one_neuron_has_no_energy(self, name):
        assert E.create(name, **SMALL[name])(torch.randn(1, 20)) == 0

    @pytest.mark.parametrize("name", [name for name in NAMES if name != "bp-comhe"])  # which draws by their number
    def test_zero_rows_do_not_count(self, name):
        rows = torch.randn(5, 20, dtype=torch.float64)
        first = E.create(name, **SMALL[name])(rows)
        more = torch.cat([rows, torch.zeros(2, 20)]).double()
        torch.testing.assert_close(E.create(name, **SMALL[name])(more), first)

    def test_options_are_checked(self):
        for name, options, message in (
            ("rp-comhe", {"dim": 3}, r"dim must be greater than s \+ 1 = 3"),
            ("rp-comhe", {"count": 0}, "count must be at least 1"),
            ("rp-comhe", {"aggregate": "sum"}, "aggregate must be one of"),
            ("rp-comhe", {"share": "all"}, "share must be one of"),
            ("rp-comhe", {"redraw_every": -1}, "redraw_every must be at least 0"),
            ("rp-comhe", {"projections_per_neuron": 0}, "projections_per_neuron must be greater than 0"),
            ("ap-comhe", {"loss": "sin"}, "loss must be one of"),
            ("ap-comhe", {"mode": "both"}, "mode must be one of"),
            ("ap-comhe", {"p_every": 0}, "p_every must be at least 1"),
            ("adv-comhe", {"ascent_steps": -1}, "ascent_steps must be at least 0"),
            ("group-comhe", {"partition": "odd"}, "partition must be one of"),
            ("group-comhe", {"partition": [[]]}, "partition must have a channel"),
            ("rp-comhe", {"s": -1}, "s must be at least 0"),
        ):
            with pytest.raises(ArgumentError, match=message):
                E.create(name, **options)
        with pytest.raises(ArgumentError, match="from 0 to 4, got 5"):
            E.create("group-comhe", partition=[[0, 5]])(W)
        with pytest.raises(ArgumentError, match="target must have shape"):
            E.create("rp-comhe")(torch.zeros(3))
        with pytest.raises(ArgumentError, match="projections must have shape"):
            E.compressive_energy(W, P1[:, :4])

    def test_warnings(self):
        with pytest.warns(UserWarning, match="infinite variance"):
            E.create("rp-comhe", dim=5)
        with pytest.warns(UserWarning, match="groups of 4 coordinates"):
            E.create("group-comhe", group_channels=4)(torch.randn(5, 20))
        E.create("rp-comhe", dim=6)

    def test_project(self):
        vectors, P = torch.randn(4, 5, 7), torch.randn(2, 3, 6, 7)
        found = project(vectors, P)
        for b in range(4):
            for m in range(3):
                torch.testing.assert_close(found[b, m], vectors[b] @ P[b // 2, m].T)

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler's own
    @pytest.mark.parametrize("led", [True, False])
    @pytest.mark.parametrize("name", ["rp-comhe", "adv-comhe"])
    def test_compiled(self, name, led):
        model = nn.Sequential(nn.Linear(20, 6), nn.Linear(6, 3))
        layers = selection(model)
        x = torch.randn(4, 20)
        plain, traced = (E.create(name, **SMALL[name]) for _ in range(2))
        if led:
            plain.prepare(layers), traced.prepare(layers)
        compiled = torch.compile(lambda x: model(x).square().mean() + traced(layers))
        for step in range(3):
            if led:
                plain.advance(step, 0, 0.1), traced.advance(step, 0, 0.1)
            expected = model(x).square().mean() + plain(layers)
            found = compiled(x)
            torch.testing.assert_close(found, expected)
            slopes = [torch.autograd.grad(value, model[0].weight)[0] for value in (found, expected)]
            torch.testing.assert_close(*slopes)

    @pytest.mark.parametrize("name", ["rp-comhe", "naive-comhe", "bp-comhe", "group-comhe"])
    def test_is_one_graph(self, name):
        model = nn.Sequential(nn.Linear(20, 6), nn.Linear(6, 3))
        regulariser = E.create(name, **SMALL[name])
        regulariser.prepare(selection(model))
        regulariser.advance(0, 0, 0.1)
        compiled = torch.compile(regulariser, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(selection(model)), regulariser(selection(model)))


class TestDescents:
    def descend(self, title, methods=descents.METHODS, **options):
        name, settings = methods[title]
        return descents.descend(name, settings, **{"seed": 0, "steps": 500, **options})

    def test_start_and_least_energy(self):
        assert descents.least() == pytest.approx((126 * 0.5 + 0.25) / 127)
        start = self.descend("half-space energy", steps=0)
        assert start.energies[0] == pytest.approx(reference(descents.neurons(0).double().numpy()), rel=1e-5)
        assert start.energies[0] > 2.5

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", [0, 1])
    def test_fresh_projections_spread_neurons_and_fixed_ones_do_not(self, seed):
        titles = ("half-space energy", "RP, fresh", "RP, five fixed", "RP, one fixed", "groups", "AP")
        exact, fresh, five, one, groups, kept = (self.descend(title, seed=seed).energies[-1] for title in titles)
        assert abs(fresh - exact) < 0.02
        assert abs(groups - exact) < 0.02
        assert exact < kept < fresh + 0.1
        assert fresh + 0.1 < five < one - 0.1

    @pytest.mark.slow
    def test_a_learned_projection_deceives_itself(self):
        naive = self.descend("naive")
        assert naive.seen[-1] < 0.55
        assert naive.energies[-1] > 1.0

    @pytest.mark.slow
    def test_an_adversary_leaves_more_than_fresh_projections(self):
        assert self.descend("adversarial").energies[-1] > self.descend("RP, fresh").energies[-1] + 0.05

    @pytest.mark.slow
    def test_noise_falls_with_projections(self):
        exact, five, one = (
            self.descend(title, descents.NOISY, rate=1.0).energies[-1] - descents.least() for title in descents.NOISY
        )
        assert exact < 0.7 * five
        assert five < 0.5 * one

    @pytest.mark.slow
    def test_command(self, tmp_path, capsys):
        descents.main(["--steps", "12", "-o", str(tmp_path / "energies.png")])
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 2 + len(descents.METHODS) + len(descents.NOISY) + 2
        assert (tmp_path / "energies.png").stat().st_size > 10_000


def gram_schmidt_rows(M):
    return hs.orthogonal.create("gram_schmidt", orientation="rows")(M)


class TestRotation:
    M = double([[2, 1, 0], [1, 3, 1], [0, 1, 4]])

    def test_published_values(self):
        R = gram_schmidt_rows(self.M)
        rows = [
            [0.894427191, 0.4472135955, 0],
            [-0.4082482905, 0.8164965809, 0.4082482905],
            [0.1825741858, -0.3651483717, 0.9128709292],
        ]
        torch.testing.assert_close(R, double(rows), **CLOSE)
        turned = double([1.3416407865, 0.8164965809, 0.7302967433])
        torch.testing.assert_close(R @ torch.ones(3).double(), turned, **CLOSE)

    def test_published_gradient(self):
        M, T = leaf(self.M), torch.arange(9).double().view(3, 3) / 10
        slope = gradient((gram_schmidt_rows(M) * T).sum(), M)
        rows = [[0.01585282, -0.03170564, -0.23174841], [-0.0214698968, 0.0429397937, -0.1073494843], [0, 0, 0]]
        torch.testing.assert_close(slope, double(rows), rtol=0, atol=5e-9)

    @given(st.integers(0, 10**6), st.integers(2, 12))
    def test_is_gram_schmidt(self, seed, d):
        M = torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        rows = []
        for row in M.numpy():
            for _ in range(2):  # twice is enough
                for other in rows:
                    row = row - (row @ other) * other  # noqa: PLW2901
            rows.append(row / np.linalg.norm(row))
        torch.testing.assert_close(gram_schmidt_rows(M), torch.tensor(np.array(rows)), rtol=0, atol=1e-8)

    def test_layers_keep_angles(self):
        energies = []
        for kind in rotation.KINDS:
            torch.manual_seed(0)
            model = rotation.build(kind)
            energies.append(rotation.energy(model))
            turned = kind != "ordinary"
            assert [neurons.constant for neurons in E.select(model)] == [turned] * 4 + [False]
        assert energies == pytest.approx([energies[0]] * 3, abs=1e-5)
        kernels = [layer.weight.flatten(1).double() for layer in model if isinstance(layer, nn.Conv2d)]
        expected = sum(reference(rows.detach().numpy()) for rows in kernels)
        assert energies[-1] == pytest.approx(expected, abs=1e-9)

    @pytest.mark.slow
    def test_training(self):
        data = load("digits")
        found = {kind: rotation.train(data, kind, 100, 0)[1] for kind in rotation.KINDS}
        for kind, outcome in found.items():
            drift = max(abs(value - outcome.energies[0]) for value in outcome.energies)
            assert (drift < 1e-4) == (kind != "ordinary")
        learned, fixed = found["rotation learned"], found["rotation random"]
        assert learned.energies[0] == pytest.approx(found["ordinary"].energies[0], abs=1e-4)
        assert learned.loss < 0.5 * fixed.loss
        assert learned.accuracies[-1] > fixed.accuracies[-1] + 0.02

    @pytest.mark.slow
    def test_command(self, tmp_path, capsys):
        rotation.main(["--steps", "11", "-o", str(tmp_path / "rotation.png")])
        lines = capsys.readouterr().out.splitlines()
        assert [line.split("  ")[0] for line in lines[1:4]] == list(rotation.KINDS)
        plain, before = lines[-2].split()[-1], lines[2].split()[-1]
        assert plain == before
        assert (tmp_path / "rotation.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["ap-comhe", "adv-comhe"])
def test_frozen_weights_have_no_gradient(name):
    rows = torch.randn(5, 12)
    energy = E.create(name, dim=6)
    assert not energy(rows).requires_grad
    assert energy(rows.requires_grad_()).requires_grad
