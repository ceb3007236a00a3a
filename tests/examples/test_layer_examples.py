"""The examples about layers do what they say, and the numbers in them are the known ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.functional import hessian as autograd_hessian

import hypersphere as hs
from helpers.examples import example
from hypersphere.data import load

conditioning = example("conditioning")
phase_swap = example("phase_swap")
without_activation = example("without_activation")
wrong_scale = example("wrong_scale")


# -------------------------------------------------------------------------------------------------- conditioning

SMALL = conditioning.Problem.of_size(6, 7, 3)


def away(problem):
    """A point that is no optimum."""
    n, m = len(problem.U), len(problem.V)
    return problem.U + 0.3 * conditioning.chirp((n, 3), 3.3, 0.1), problem.V + 0.3 * conditioning.chirp(
        (m, 3), 2.1, 0.2
    )


def by_autograd(F, sphere):
    """The loss of one vector that holds U and V, written with torch."""
    n, m = F.shape

    def value(flat):
        rows = flat.view(n + m, -1)
        if sphere:
            rows = torch.nn.functional.normalize(rows)
        return 0.5 * (rows[:n] @ rows[n:].T - torch.from_numpy(F)).square().sum()

    return value


def stacked(U, V):
    return torch.from_numpy(np.concatenate([U, V])).flatten()


class TestConditioning:
    def test_known_problem(self):
        assert SMALL.U[0] == pytest.approx([0.245793641121, 0.75629185539, 0.606306948216], abs=1e-9)
        assert SMALL.V[0] == pytest.approx([0.780319925568, -0.0581500605873, -0.622671168607], abs=1e-9)
        assert SMALL.cosines[0, 0] == pytest.approx(-0.229710597448, abs=1e-9)
        assert np.linalg.norm(SMALL.cosines) == pytest.approx(3.52189864483, abs=1e-9)

    @pytest.mark.parametrize(
        ("c", "number", "least", "largest", "free"),
        [
            (1, 12.8329557884, 0.46218598007, 5.93121224824, 23.4083071),
            (2, 27.9248899899, 0.443647613125, 12.3888107908, 103.313401),
            (4, 421.246342641, 0.110911903281, 46.7212336126, 1521.89871),
            (8, 6714.38958506, 0.0277279758203, 186.176432063, 24243.7364),
        ],
    )
    def test_known_condition_numbers(self, c, number, least, largest, free):
        point = SMALL.scaled(c)
        product = conditioning.condition(conditioning.hessian(SMALL.cosines, *point))
        assert (product.number, product.least, product.largest) == pytest.approx((number, least, largest), rel=1e-9)
        raw = conditioning.condition(conditioning.sphere_hessian(SMALL.cosines, *point))
        sphere = conditioning.condition(conditioning.on_spheres(SMALL.cosines, *point))
        assert raw.number == pytest.approx(free, rel=1e-7)
        assert sphere.number == pytest.approx(23.4083071259, abs=1e-7)
        assert (product.zeros, raw.zeros, sphere.zeros) == (9, 16, 3)

    def test_known_values_away_from_the_optimum(self):
        U, V = away(SMALL)
        P, Q = conditioning.unit(U), conditioning.unit(V)
        assert conditioning.loss(SMALL.cosines, U, V) == pytest.approx(1.57425650704, abs=1e-9)
        assert conditioning.loss(SMALL.cosines, P, Q) == pytest.approx(1.32213333163, abs=1e-9)
        by_U, by_V = conditioning.sphere_gradient(SMALL.cosines, U, V)
        assert by_U[0] == pytest.approx([0.50704110598, -0.56854293339, 0.305490521073], abs=1e-9)
        assert np.linalg.norm(by_U) == pytest.approx(2.48820851044, abs=1e-9)
        assert np.linalg.norm(by_V) == pytest.approx(1.88480946423, abs=1e-9)

    @pytest.mark.parametrize("sphere", [False, True])
    @pytest.mark.parametrize("place", ["optimum", "elsewhere"])
    def test_derivatives_are_those_of_autograd(self, sphere, place):
        U, V = SMALL.scaled(1.7) if place == "optimum" else away(SMALL)
        value, flat = by_autograd(SMALL.cosines, sphere), stacked(U, V)
        hessian = conditioning.sphere_hessian if sphere else conditioning.hessian
        np.testing.assert_allclose(hessian(SMALL.cosines, U, V), autograd_hessian(value, flat), rtol=0, atol=1e-12)
        gradient = conditioning.sphere_gradient if sphere else conditioning.gradient
        flat.requires_grad_()
        (expected,) = torch.autograd.grad(value(flat), flat)
        found = stacked(*gradient(SMALL.cosines, U, V))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)

    def test_second_derivative_along_the_spheres(self):
        """Along a great circle through every row at once, by differences."""
        U, V = map(conditioning.unit, away(SMALL))
        rows = np.concatenate([U, V])
        side = conditioning.chirp(rows.shape, 0.7, 0.4)
        side -= (side * rows).sum(1, keepdims=True) * rows
        speed = np.linalg.norm(side, axis=1, keepdims=True)

        def at(t):
            moved = rows * np.cos(t * speed) + side / speed * np.sin(t * speed)
            return conditioning.loss(SMALL.cosines, moved[:6], moved[6:])

        h = 1e-3
        expected = (at(h) - 2 * at(0) + at(-h)) / h**2
        found = side.flatten() @ conditioning.sphere_hessian(SMALL.cosines, U, V) @ side.flatten()
        assert found == pytest.approx(expected, rel=1e-5)
        matrix = conditioning.on_spheres(SMALL.cosines, U, V)
        # The free form has nothing on the diagonal along the rows, so nothing is lost without these directions.
        assert np.trace(matrix) == pytest.approx(np.trace(conditioning.sphere_hessian(SMALL.cosines, U, V)), rel=1e-9)

    def test_table(self):
        found = {name: [value.number for value in values] for name, values in conditioning.conditions().items()}
        assert found["G"] == pytest.approx([9.17289, 40.3982, 580.450, 9221.28, 147474.6], rel=1e-4)
        assert found["G, n = k"] == pytest.approx([37.905, 7.319, 5.407, 5.288, 5.280], rel=1e-4)
        assert found["G_S, free rows"] == pytest.approx([87.684, 227.61, 3083.2, 48957, 782974], rel=1e-4)
        assert found["G_S on spheres"] == pytest.approx([87.6837] * 5, rel=1e-6)
        slope = np.polyfit(np.log(conditioning.SCALES[1:]), np.log(found["G"][1:]), 1)[0]
        assert slope == pytest.approx(4, abs=0.1)  # the lemma claims 2
        zeros = {name: {value.zeros for value in values} for name, values in conditioning.conditions([1, 16]).items()}
        assert zeros == {"G": {25}, "G, n = k": {25}, "G_S, free rows": {60}, "G_S on spheres": {10}}

    @given(st.integers(0, 10_000), st.floats(0.2, 5))
    def test_spheres_do_not_feel_any_scale_of_the_rows(self, seed, c):
        scales = np.exp(np.random.default_rng(seed).normal(size=(13, 1)))
        moved = conditioning.on_spheres(SMALL.cosines, c * scales[:6] * SMALL.U, scales[6:] * SMALL.V / c)
        assert conditioning.condition(moved).number == pytest.approx(23.4083071259, rel=1e-9)

    @pytest.mark.parametrize("size", [(6, 7, 3), (3, 7, 3), (2, 9, 4), (20, 30, 5)])
    @pytest.mark.parametrize("c", [1.0, 3.0])
    def test_spectrum(self, size, c):
        problem = conditioning.Problem.of_size(*size)
        values = np.linalg.eigvalsh(conditioning.hessian(problem.cosines, *problem.scaled(c)))
        values = values[values > 1e-9 * values[-1]]
        np.testing.assert_allclose(values, conditioning.spectrum(problem.U, problem.V, c), rtol=1e-9)

    def test_free_rows_are_rescaled_by_the_imbalance(self):
        c = 3.0
        factor = np.concatenate([np.full(18, 1 / c), np.full(21, c)])
        balanced = conditioning.sphere_hessian(SMALL.cosines, SMALL.U, SMALL.V)
        found = conditioning.sphere_hessian(SMALL.cosines, *SMALL.scaled(c))
        np.testing.assert_allclose(found, factor[:, None] * balanced * factor, atol=1e-12)

    @pytest.mark.parametrize(
        ("c", "steps"), [(1, 118), (2, 252), (4, 3912), pytest.param(8, 62494, marks=pytest.mark.slow)]
    )
    def test_gradient_descent(self, c, steps):
        assert len(conditioning.descend(SMALL, c, sphere=False)) - 1 == pytest.approx(steps, rel=0.02)
        losses = conditioning.descend(SMALL, c, sphere=True)
        assert len(losses) - 1 == pytest.approx(215, rel=0.02)
        assert (np.diff(losses) < 0).all() and losses[-1] <= 1e-10 * losses[0] < losses[-2]

    def test_descent_that_does_not_end(self):
        assert len(conditioning.descend(SMALL, 8, sphere=False, limit=7)) == 8

    def test_picture(self, tmp_path, capsys):
        pytest.importorskip("matplotlib")
        picture = tmp_path / "conditioning.svg"
        conditioning.main(["--largest", "2", "-o", str(picture)])
        assert "252 steps" in picture.read_text() and "every c: 215 steps" in picture.read_text()
        text = capsys.readouterr().out
        assert "147,474.571" in text and "c = 2: G     252   G_S on spheres   215" in text


# ---------------------------------------------------------------------------------------------------- phase swap


def chirp(shape, step, phase):
    return torch.sin(step * torch.arange(math.prod(shape), dtype=torch.float64) ** 2 + phase).view(shape)


class TestPhaseSwap:
    def test_known_values(self):
        found = phase_swap.phase_swap(chirp((4, 4), 0.9, 0.2), chirp((4, 4), 1.4, 0.6))
        expected = [-0.210264945338, 0.747331949593, -0.481165724442, 1.43533316108]
        assert found[0].tolist() == pytest.approx(expected, abs=1e-9)

    @given(st.integers(2, 9), st.integers(2, 9), st.floats(0.1, 10))
    def test_own_phases_give_the_image_back(self, height, width, factor):
        image = chirp((height, width), 0.7, 0.1)
        torch.testing.assert_close(phase_swap.phase_swap(image, image), image)
        torch.testing.assert_close(phase_swap.phase_swap(image, factor * image), image)
        torch.testing.assert_close(phase_swap.phase_swap(image, -image), -image)

    def test_magnitudes_and_phases_are_kept(self):
        a, b = torch.randn(2, 12, 11, dtype=torch.float64)
        spectrum = torch.fft.fft2(phase_swap.phase_swap(a, b))
        torch.testing.assert_close(spectrum.abs(), torch.fft.fft2(a).abs())
        ratio = spectrum / torch.fft.fft2(b)  # real and positive where the phases agree
        torch.testing.assert_close(ratio.imag, torch.zeros_like(ratio.imag))
        assert (ratio.real > 0).all()

    def test_correlation_with_the_image_of_the_phases(self):
        """In the plane of waves it is that of the magnitudes, mean left out, whichever image they are of."""
        images = list(phase_swap.photographs().values())
        sizes = [torch.fft.fft2(image).abs().flatten()[1:] for image in images]
        expected = torch.nn.functional.cosine_similarity(*sizes, dim=0).item()
        for a, b in (images, images[::-1]):
            found = phase_swap.correlation(phase_swap.phase_swap(a, b), b)
            assert found == pytest.approx(expected, abs=1e-9)
        assert expected == pytest.approx(
            np.corrcoef(images[1].flatten(), phase_swap.phase_swap(*images).flatten())[0, 1]
        )

    def test_photographs_follow_their_phases(self):
        images = phase_swap.photographs()
        assert all(
            image.shape == (phase_swap.SIZE,) * 2 and 0 <= image.min() < image.max() <= 1 for image in images.values()
        )
        for (magnitude, phase), found in phase_swap.swaps(images).items():
            if phase in images:
                ahead = phase_swap.correlation(found, images[phase])
                others = [phase_swap.correlation(found, images[name]) for name in images if name != phase]
                assert ahead > (0.8 if magnitude in images else 0.2) and ahead > others[0] + 0.2

    def test_picture(self, tmp_path, capsys):
        pytest.importorskip("matplotlib")
        picture = tmp_path / "phases.png"
        phase_swap.main(["-o", str(picture)])
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size < 150_000
        text = capsys.readouterr().out
        assert str(picture) in text and text.count("±") == 8


# -------------------------------------------------------------------------------------------- without activation


class TestWithoutActivation:
    def test_points(self):
        points, classes = without_activation.sample(500, torch.Generator().manual_seed(0))
        assert points.shape == (500, 3) and (points[:, 2] == 1).all() and points.abs().max() <= 1
        expected = [int((x > 0) != (y > 0)) for x, y, _ in points.tolist()]
        assert classes.tolist() == expected and 0.4 < np.mean(expected) < 0.6

    @pytest.mark.parametrize("kind", sorted(without_activation.LAYERS))
    def test_cosines_are_one_matrix_up_to_a_positive_factor(self, kind):
        model = without_activation.build(kind)
        assert [type(part).__name__ for part in model].count("ReLU") == 0 and len(model) == 4
        points, _ = without_activation.sample(200, torch.Generator().manual_seed(0))
        matrix = torch.eye(3)
        for part in model[:-1]:
            rows = part.weight if kind == "ordinary" else torch.nn.functional.normalize(part.weight)
            matrix = rows @ matrix
        with torch.no_grad():
            found, linear = model(points), points @ (model[-1].weight @ matrix).T
        # Two positive multiples of each other have a cosine of 1.
        cosines = torch.nn.functional.cosine_similarity(found, linear)
        assert (cosines > 1 - 1e-5).all() == (kind in ("ordinary", "cosine"))

    def test_same_seed_same_weights(self):
        one, two, other = (without_activation.train("linear", seed, steps=2)[0][0].weight for seed in (1, 1, 2))
        assert torch.equal(one, two) and not torch.equal(one, other)

    def test_picture(self, tmp_path, capsys):
        pytest.importorskip("matplotlib")
        picture = tmp_path / "regions.svg"
        without_activation.main(["--steps", "2", "-o", str(picture)])
        text = picture.read_text()
        assert all(f"{kind}: " in text for kind in without_activation.LAYERS) and text.count("right<") == 4
        assert len(capsys.readouterr().out.splitlines()) == 6

    @pytest.mark.slow
    def test_only_angles_learn_xor(self, capsys):
        without_activation.main(["--seed", "2"])
        rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
        found = {name: float(value) for name, value in rows}
        assert found["ordinary"] < 0.7 and found["cosine"] < 0.7
        assert found["linear"] > 0.95 and found["sigmoid(0.3)"] > 0.95


# --------------------------------------------------------------------------------------------------- wrong scale


class TestWrongScale:
    def test_architectures(self):
        layers = wrong_scale.Layers()
        model = wrong_scale.cnn18(layers, 2.0)
        kernels = [part for part in model if isinstance(part, torch.nn.Conv2d)]
        assert [k.out_channels for k in kernels] == [12] * 6 + [24] * 6 + [32] * 6
        assert not any(isinstance(part, torch.nn.BatchNorm2d) for part in model)
        assert model(torch.rand(2, 1, 8, 8)).shape == (2, 10)
        for kernel in kernels[1:]:
            expected = 2 * math.sqrt(2 / (9 * kernel.in_channels))
            assert kernel.weight.std().item() == pytest.approx(expected, rel=0.15)
        small = wrong_scale.cnn12(layers)
        assert sum(isinstance(part, torch.nn.Conv2d) for part in small) == 12
        assert small[2].weight.std().item() == pytest.approx(0.01, rel=0.15)
        assert small(torch.rand(2, 1, 8, 8)).shape == (2, 10)

    def test_projected_layers_do_not_see_the_scale(self):
        """The same losses whatever the kernels are multiplied with, which is not so for ordinary ones."""
        found = wrong_scale.by_scale(load("digits"), 3, 0)
        small, large = (found[f"cosine, x {scale}"] for scale in ("0.5", "2"))
        assert small.losses == pytest.approx(large.losses, rel=1e-5)
        assert large.accuracy == pytest.approx(small.accuracy, abs=0.01)
        assert found["ordinary, x 2"].losses[0] > 100 * found["ordinary, x 0.5"].losses[0]

    def test_kernels_stay_on_the_sphere(self):
        model = wrong_scale.cnn12(wrong_scale.Layers(hs.nn.create("sphere")))
        wrong_scale.train(load("digits"), model, 1, 2, 0)
        kernels = [part.kernel_norms() for part in model if isinstance(part, hs.nn.Decoupled)]
        assert len(kernels) == 12
        torch.testing.assert_close(torch.cat(kernels), torch.ones(6 * 12 + 6 * 24))

    def test_picture(self, tmp_path, capsys):
        pytest.importorskip("matplotlib")
        picture = tmp_path / "losses.svg"
        wrong_scale.main(["--steps", "2", "-o", str(picture)])
        text = picture.read_text()
        assert "CNN-18" in text and "CNN-12" in text
        assert len(capsys.readouterr().out.splitlines()) == 12

    @pytest.mark.slow
    def test_scale_ruins_the_ordinary_network_only(self, capsys):
        wrong_scale.main([])
        rows = [line.rsplit(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
        found = {row[0].strip(): float(row[2]) for row in rows if len(row) == 3 and row[2].startswith("0.")}
        for scale in ("0.5", "2"):
            cosine, ordinary = (found[f"{name}, x {scale}"] for name in ("cosine", "ordinary"))
            assert cosine > 0.75 and cosine > ordinary + 0.2
        assert found["ordinary"] < 0.2 and found["cosine"] > 0.9 and found["tanh"] > 0.9
