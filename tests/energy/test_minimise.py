"""Points that minimise energies against known optima, closed forms and what is claimed of weights and half spaces."""

import itertools
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.examples import example
from hypersphere.energy import (
    KoLeo,
    Orthonormal,
    RPCoMHE,
    compressive_energy,
    energies,
    hyperspherical_energy,
    minimise,
    prototypes,
    refine,
)
from hypersphere.errors import ArgumentError
from hypersphere.geometry import normalise

points_on_the_sphere = example("points_on_the_sphere")

OPTIMA = {  # points on the sphere in three dimensions: energies over unordered pairs for s = 0, 1, 2
    2: (-0.693147181, 0.5, 0.25),
    3: (-1.647918433, 1.732050808, 1.0),
    4: (-2.942487759, 3.674234614, 2.25),
    5: (-4.420507155, 6.474691495, 4.25),
    6: (-6.238324625, 9.985281374, 6.75),
    7: (-8.182477864, 14.452977414, 10.25),
    8: (-10.428017781, 19.675287861, 14.336791084),
    9: (-12.887752726, 25.759986531, 19.252868784),
    10: (-15.563123389, 32.716949460, 25.041359722),
    11: (-18.420479721, 40.596450508, 31.834721637),
    12: (-21.606145230, 49.165253058, 39.0),
    16: (-36.106152162, 92.911655303, 78.772649031),
    24: (-75.213984789, 223.347074052, 205.658437998),
    32: (-127.378867615, 412.261274651, 401.5),
}
PACKINGS = {  # best smallest angles in degrees
    4: 109.471220634,
    5: 90.0,
    6: 90.0,
    7: 77.869542155,
    8: 74.858492186,
    9: 70.528779366,
    10: 66.146821988,
    12: 63.434948823,
    14: 55.670570,
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def degrees(found):
    return math.degrees(found.smallest_angle)


def riesz(distance, s):
    return -math.log(distance) if s == 0 else distance**-s


# Known optima.


@pytest.mark.parametrize("n", OPTIMA)
@pytest.mark.parametrize("s", [0, 1, 2])
def test_known_energies(n, s):
    found = minimise((n, 3), s, restarts=6, generator=seeded())
    assert found.energy / 2 == pytest.approx(OPTIMA[n][s], rel=1e-8)
    assert found.agreeing >= 3
    assert hyperspherical_energy(found.points, s, reduction="sum").item() == pytest.approx(found.energy, rel=1e-12)
    torch.testing.assert_close(found.points.norm(dim=1), torch.ones(n, dtype=torch.float64))


@pytest.mark.parametrize("n", PACKINGS)
def test_best_packings(n):
    found = minimise((n, 3), math.inf, restarts=8, steps=100, generator=seeded())
    assert degrees(found) == pytest.approx(PACKINGS[n], abs=1e-3)
    assert found.energy == pytest.approx(-2 * math.sin(found.smallest_angle / 2), rel=1e-9)


def test_icosahedron():
    found = minimise((12, 3), 1, restarts=2, generator=seeded())
    assert found.energy == pytest.approx(98.3305061153, rel=1e-10)
    cosines = sorted((found.points[0] @ found.points.T).tolist())
    a = 1 / math.sqrt(5)
    assert cosines == pytest.approx([-1, *[-a] * 5, *[a] * 5, 1], abs=1e-5)
    assert degrees(found) == pytest.approx(63.4349488, abs=1e-4)


@pytest.mark.parametrize("s", [0, 1, 2, 5])
def test_circle(s):
    for n in (3, 8):
        found = minimise((n, 2), s, generator=seeded())
        expected = n * math.fsum(riesz(2 * math.sin(math.pi * k / n), s) for k in range(1, n))
        assert found.energy == pytest.approx(expected, rel=1e-9)
        assert degrees(found) == pytest.approx(360 / n, abs=1e-3)
        lines = minimise((n, 2), s, half_space=True, generator=seeded())
        expected = 2 * n * math.fsum(riesz(2 * math.sin(math.pi * k / (2 * n)), s) for k in range(1, 2 * n))
        assert lines.energy == pytest.approx(expected, rel=1e-9)
        assert degrees(lines) == pytest.approx(180 / n, abs=1e-3)
    odd = minimise((5, 2), s, angular=True, method="projected", steps=300, generator=seeded())
    expected = 5 * sum(riesz(2 * math.pi * min(k, 5 - k) / 5, s) for k in range(1, 5))
    assert odd.energy == pytest.approx(expected, rel=1e-6)


@given(st.integers(2, 6), st.integers(0, 3), st.sampled_from([0, 1, 2]))
@settings(max_examples=10)
def test_simplex(n, more, s):
    found = minimise((n, n - 1 + more), s, generator=seeded(n))
    side = math.sqrt(2 * n / (n - 1))
    assert found.energy == pytest.approx(n * (n - 1) * riesz(side, s), rel=1e-8)
    cosines = (found.points @ found.points.T)[~torch.eye(n, dtype=torch.bool)]
    torch.testing.assert_close(cosines, torch.full_like(cosines, -1 / (n - 1)), rtol=0, atol=1e-4)


@pytest.mark.parametrize("d", [2, 3, 5])
def test_cross_polytope_and_frames(d):
    for s in (0, 1, 2):
        expected = 2 * d * riesz(2, s) + 2 * d * (2 * d - 2) * riesz(math.sqrt(2), s)
        assert minimise((2 * d, d), s, restarts=4, generator=seeded()).energy == pytest.approx(expected, rel=1e-8)
        lines = minimise((d, d), s, half_space=True, generator=seeded())
        assert lines.energy == pytest.approx(expected, rel=1e-8)
        assert degrees(lines) == pytest.approx(90, abs=1e-3)


@pytest.mark.parametrize("method", ["lbfgs", "projected", "riemannian"])
def test_ten_lines(method):
    found = minimise((10, 3), 2, half_space=True, method=method, restarts=8, generator=seeded())
    assert found.energy == pytest.approx(268.0321, abs=1e-4)
    assert degrees(found) == pytest.approx(45.94, abs=0.01)
    assert found.agreeing == 8


# What the methods do.


@pytest.mark.parametrize("method", ["projected", "riemannian"])
def test_gradient_descent(method):
    start = normalise(torch.randn(6, 3, generator=seeded(), dtype=torch.float64))
    found = minimise(start, 1, method=method, steps=150, trajectory=True)
    assert found.energy / 2 == pytest.approx(OPTIMA[6][1], rel=1e-6)
    assert found.trajectory.shape == (151, 6, 3)
    torch.testing.assert_close(found.trajectory[0], start)
    assert torch.equal(found.trajectory[-1], found.points)
    energies = hyperspherical_energy(found.trajectory, 1, reduction="sum")
    assert (energies.diff() <= 0).all()
    moves = 2 * ((found.trajectory[1:] - found.trajectory[:-1]).norm(dim=2) / 2).arcsin()
    assert moves.max() <= 0.2 + 1e-9
    # With a fixed rate it is one step after the other of plain gradient descent.
    x = start.clone()
    for _ in range(3):
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(hyperspherical_energy(x, 1, reduction="sum"), x)
        move = -1e-3 * gradient
        length = move.norm(dim=1, keepdim=True)
        x = x + move if method == "projected" else x * length.cos() + move / length * length.sin()
        x = (x / x.norm(dim=1, keepdim=True)).detach()
    fixed = minimise(start, 1, method=method, steps=3, lr=1e-3)
    torch.testing.assert_close(fixed.points, x)


def test_lbfgs_path_and_energies_fall():
    found = minimise((9, 3), 2, restarts=3, trajectory=True, generator=seeded())
    energies = hyperspherical_energy(found.trajectory, 2, reduction="sum")
    assert (energies.diff() <= 1e-9).all() and energies[0] > energies[-1]
    torch.testing.assert_close(found.trajectory[-1], found.points)


def test_starts():
    start = torch.randn(8, 3, generator=seeded(3), dtype=torch.float64)
    one = minimise(5 * start, 2)
    assert one.agreeing == 1
    torch.testing.assert_close(minimise(start, 2, steps=0).points, normalise(start))
    more = minimise(start, 2, restarts=4, generator=seeded())
    assert more.energy <= one.energy * (1 + 1e-12)
    again = minimise(start, 2, restarts=4, generator=seeded())
    assert torch.equal(more.points, again.points)
    single = minimise(start.float(), 2)
    assert single.points.dtype == torch.float32 and single.energy == pytest.approx(one.energy, rel=1e-5)
    assert minimise(start.bfloat16(), 2).energy == pytest.approx(one.energy, rel=1e-5)


def test_awkward_points():
    zero = torch.zeros(1, 3, dtype=torch.float64)
    a = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    found = minimise(torch.cat([a, -a + 1e-3, zero]), 2)
    assert (found.points[2] == 0).all() and degrees(found) == pytest.approx(180, abs=1e-3)
    lonely = minimise((1, 3), 2, generator=seeded())
    assert lonely.energy == 0 and math.isnan(lonely.smallest_angle)
    near = torch.cat([a, a + torch.tensor([[0.0, 1e-4, 0.0]])])
    for method in ("lbfgs", "projected", "riemannian"):
        assert degrees(minimise(near, 2, method=method)) == pytest.approx(180, abs=0.1)
    # The same place twice is at rest, as no direction is away from it.
    same = minimise(torch.cat([a, a]), 2)
    assert torch.equal(same.points, torch.cat([a, a]))


def test_other_energies():
    simplex_cosine = -1 / 3
    for energy in ("koleo", "mma", KoLeo(), "uniformity", "separation"):
        found = minimise((4, 3), energy=energy, method="projected", steps=100, restarts=2, generator=seeded())
        assert math.cos(found.smallest_angle) == pytest.approx(simplex_cosine, abs=0.02)
    frame = minimise((3, 3), energy="uniformity", half_space=True, generator=seeded())
    assert degrees(frame) == pytest.approx(90, abs=1e-3)
    with pytest.raises(ArgumentError, match=r"^energy must be a regulariser"):
        minimise((4, 3), energy=torch.nn.ReLU())


OCTAHEDRON = torch.cat([torch.eye(3, dtype=torch.float64), -torch.eye(3, dtype=torch.float64)])
SLOW = {"mhp", "mhc"}


def worst(name, points):
    """Value of a member at the worst of many places on the sphere: a lower bound of what it minimises."""
    places = normalise(torch.randn(50_000, 3, generator=seeded(9), dtype=torch.float64))
    q = (places.unsqueeze(1) - points).square().sum(2)
    return (-q.reciprocal().mean(1) if name == "mhp" else -(-10 * q).exp().mean(1).log() / 10).max().item()


@pytest.mark.parametrize("name", sorted(energies))
def test_every_member_is_as_low_as_the_octahedron(name):
    """Also where lengths count and where the value has kinks, and what is reported is what the points have."""
    steps = 100 if name in SLOW else 200
    found = minimise((6, 3), energy=name, steps=steps, generator=seeded())
    member = energies.create(name).eval()
    if name == "srip":  # which the member estimates by few power iterations
        own = [float(torch.linalg.matrix_norm(x @ x.T - torch.eye(6), 2)) for x in (found.points, OCTAHEDRON)]
    elif name in SLOW:
        own = [worst(name, points) for points in (found.points, OCTAHEDRON)]
    else:
        own = [member(points).item() for points in (found.points, OCTAHEDRON)]
    assert found.energy == pytest.approx(own[0], rel=3e-3 if name in SLOW else 1e-9, abs=1e-12)
    assert found.energy <= own[1] + (1e-3 if name in SLOW else 1e-6)
    torch.testing.assert_close(found.points.norm(dim=1), torch.ones(6, dtype=torch.float64))


def test_projections_are_drawn_at_each_step_and_the_energy_is_that_under_the_last_ones():
    member = RPCoMHE(dim=8, s=1.0)
    held = {key: value.clone() for key, value in member.state_dict().items()}
    start = normalise(torch.randn(6, 40, generator=seeded(), dtype=torch.float64))
    found = minimise(start, energy=member, steps=60, trajectory=True)
    assert all(torch.equal(value, held[key]) for key, value in member.state_dict().items())
    (projections,) = (value for key, value in found.regulariser.bank.named_buffers())
    assert found.energy == pytest.approx(compressive_energy(found.points, projections, 1.0).mean().item(), rel=1e-9)
    fresh = torch.randn(300, 8, 40, generator=seeded(1), dtype=torch.float64)
    before, after = (compressive_energy(x, fresh, 1.0).mean().item() for x in (start, found.points))
    assert after < before - 0.005
    assert found.trajectory.shape == (61, 6, 40) and torch.equal(found.trajectory[-1], found.points)


@pytest.mark.parametrize("name", ["ap-comhe", "adv-comhe", "naive-comhe", "bp-comhe", "group-comhe"])
def test_state_of_a_member_moves_along(name):
    """The energy is that of the member itself as it is at the end, not the plain one of half space."""
    options = {"partition": "random", "s": 1.0} if name == "group-comhe" else {"dim": 8, "s": 1.0}
    found = minimise((6, 40), energy=energies.create(name, **options), steps=5, restarts=2, generator=seeded())
    own = found.regulariser
    assert own(found.points).item() == pytest.approx(found.energy, rel=1e-9)
    assert abs(found.energy - hyperspherical_energy(found.points, 1, half_space=True).item()) > 1e-3
    state = [*own.bank.buffers(), *own.bank.parameters()]
    again = energies.create(name, **options)
    again.prepare(found.points)
    assert state and not any(torch.equal(x, y) for x, y in zip(state, again.state_dict().values(), strict=False))


def test_what_is_refined_counts_the_lengths_for_nothing():
    weight = 5 * torch.randn(6, 3, generator=seeded(2), dtype=torch.float64)
    better = refine(weight, steps=200, energy="orthogonal")
    torch.testing.assert_close(better.norm(dim=1), weight.norm(dim=1))
    assert energies.create("orthogonal")(normalise(better)).item() == pytest.approx(6.0, abs=1e-6)


def test_arguments():
    for argument, options in (
        ("method", {"method": "newton"}),
        ("steps", {"steps": -1}),
        ("restarts", {"restarts": 0}),
        ("lr", {"lr": 0.0}),
        ("max_move", {"max_move": 0.0}),
        ("half_space", {"half_space": 1}),
        ("half_space", {"half_space": 1, "energy": "mma"}),
        ("beta", {"s": math.inf, "beta": torch.ones(4)}),
    ):
        with pytest.raises(ArgumentError, match=f"^{argument} must "):
            minimise((4, 3), **options)
    with pytest.raises(ArgumentError, match=r"^half_space must be True or False, got 1$"):
        energies.create("mma", half_space=1)
    with pytest.raises(ArgumentError, match=r"^points must have shape"):
        minimise(torch.zeros(3))
    for points, told in (
        ((4,), "a tensor (n, d) or the two sizes n and d, got (4,)"),
        (4, "a tensor (n, d) or the two sizes n and d, got 4"),
        ((2.5, 3), "a whole number, got 2.5"),
    ):
        with pytest.raises(ArgumentError, match="^" + re.escape(f"points must be {told}")):
            minimise(points)


def test_options_without_a_meaning_beside_a_member_are_refused():
    beta = torch.ones(4)
    for argument, options in (("s", {"s": 1}), ("angular", {"angular": True}), ("beta", {"beta": beta})):
        with pytest.raises(ArgumentError, match=f"^{argument} must not be given with energy="):
            minimise((4, 3), energy="koleo", **options)
    with pytest.raises(ArgumentError, match=r"^half_space must not be given with energy="):
        minimise((4, 3), energy=energies.create("koleo"), half_space=True)


# What is claimed of them.


def test_orthonormality_leaves_clusters_where_the_energy_does_not():
    """Ten neurons in three dimensions: the frame that orthonormality wants has neighbours far too close."""
    starts = torch.randn(8, 10, 3, generator=seeded(), dtype=torch.float64)
    spread = [degrees(minimise(start, 2)) for start in starts]
    assert spread == pytest.approx([64.8952] * 8, abs=1e-3)
    penalty = Orthonormal(normalised=True)
    frames = [minimise(start, energy=penalty, method="projected", steps=400) for start in starts]
    assert all(frame.energy == pytest.approx(10**2 / 3 - 10, rel=1e-4) for frame in frames)  # a tight frame
    assert sum(degrees(frame) for frame in frames) / 8 < 32 and max(degrees(frame) for frame in frames) < 45


def test_full_space_leaves_opposite_neurons():
    pair = minimise((2, 2), 2, generator=seeded())
    assert degrees(pair) == pytest.approx(180, abs=1e-3)
    assert degrees(minimise((2, 2), 2, half_space=True, generator=seeded())) == pytest.approx(90, abs=1e-3)
    full = minimise((12, 3), 2, generator=seeded())
    cosines = (full.points @ full.points.T).abs().fill_diagonal_(0)
    assert cosines.max() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_heavy_neurons_move_less(seed):
    start = torch.randn(10, 3, generator=seeded(seed), dtype=torch.float64)
    paths = []
    for weight in (1.0, 2.0, 4.0, 10.0):
        beta = torch.ones(10, dtype=torch.float64)
        beta[0] = weight
        found = minimise(start, 2, beta=beta, method="riemannian", lr=4e-3, steps=300, trajectory=True)
        steps = (found.trajectory[1:, 0] - found.trajectory[:-1, 0]).norm(dim=1)
        paths.append(math.degrees(steps.sum().item()))
    assert paths[0] > 5 and all(later < 0.9 * earlier for earlier, later in itertools.pairwise(paths[1:]))
    assert paths[2] < 0.5 * paths[0] and paths[3] < 1


def test_growth_with_the_number_of_points():
    """s = 1 in three dimensions: E / N^2 tends to 1 from below."""
    shares = [minimise((n, 3), 1, restarts=2, generator=seeded()).energy / n**2 for n in (8, 16, 32, 64)]
    assert all(a < b < 1 for a, b in itertools.pairwise(shares))
    gap = [math.log(1 - share) for share in shares]
    assert (gap[-1] - gap[0]) / math.log(64 / 8) == pytest.approx(-0.5, rel=0.05)  # the next term is N^(-1/2)


# Uses.


@pytest.mark.parametrize("shape", [(8, 3), (8, 3, 2, 2), (6, 6)])
def test_refined_starts(shape):
    weight = torch.randn(shape, generator=seeded()) * torch.linspace(0.1, 3, shape[0]).view(-1, *[1] * (len(shape) - 1))
    before = weight.clone()
    better = refine(weight)
    assert torch.equal(weight, before) and better.shape == weight.shape and better.dtype == weight.dtype
    torch.testing.assert_close(better.flatten(1).norm(dim=1), weight.flatten(1).norm(dim=1))
    assert hyperspherical_energy(better.flatten(1)) < hyperspherical_energy(weight.flatten(1))
    lines = refine(weight.bfloat16(), 50, half_space=True)
    assert lines.dtype == torch.bfloat16
    energy = hyperspherical_energy(lines.flatten(1), half_space=True)
    assert energy < hyperspherical_energy(weight.flatten(1), half_space=True)


@pytest.mark.parametrize(
    ("classes", "dim"), [(1, 1), (2, 1), (1, 4), (3, 2), (4, 3), (5, 9), (101, 100), (6, 3), (4, 2)]
)
def test_exact_prototypes(classes, dim):
    points = prototypes(classes, dim, dtype=torch.float64)
    assert points.shape == (classes, dim)
    cosines = points @ points.T
    torch.testing.assert_close(cosines.diagonal(), torch.ones(classes, dtype=torch.float64))
    others = cosines[~torch.eye(classes, dtype=torch.bool)]
    if classes <= dim + 1:
        torch.testing.assert_close(others, torch.full_like(others, -1 / max(classes - 1, 1)))
    else:
        assert sorted(others.round().tolist()) == [-1] * classes + [0] * (classes * (classes - 2))


def test_optimised_prototypes():
    points = prototypes(7, 3, dtype=torch.float64)
    assert hyperspherical_energy(points, reduction="sum").item() / 2 == pytest.approx(OPTIMA[7][2], rel=1e-6)
    assert prototypes(10, 3).dtype == torch.float32
    assert torch.equal(prototypes(10, 3), prototypes(10, 3))
    many = prototypes(60, 8, steps=100)
    start = normalise(torch.randn(60, 8, generator=seeded()))
    assert hyperspherical_energy(many) < 0.95 * hyperspherical_energy(start)
    for bad in ((0, 3), (3, 1), (3, 0)):
        with pytest.raises(ArgumentError, match=r"^(classes|dim) must be"):
            prototypes(*bad)


# The example.


def test_example_of_weights_and_growth():
    length = points_on_the_sphere.path_lengths(points_on_the_sphere.flow(10, 10.0))
    assert length[:2].max() < 3 < length[2:].max()
    found = points_on_the_sphere.growth((8, 16, 32))
    assert [one.s for one in found] == [1, 2, 4]
    assert found[1].energies[32] == pytest.approx(2 * OPTIMA[32][2], rel=1e-8)
    for one in found[1:]:
        measured, theorem = one.exponents
        assert measured == pytest.approx(theorem, rel=0.05)
    theta = torch.tensor([math.pi / 2, math.pi], dtype=torch.float64)
    assert points_on_the_sphere.force(theta, 2, angular=False).tolist() == pytest.approx([0.5, 0], abs=1e-12)
    expected = [2 * (math.pi / 2) ** -3, 2 * math.pi**-3]
    assert points_on_the_sphere.force(theta, 2, angular=True).tolist() == pytest.approx(expected)


def test_example_turns_points_towards_the_eye():
    points = normalise(torch.randn(5, 3, dtype=torch.float64, generator=seeded()))
    moved = points_on_the_sphere.turned(points, points[2])
    torch.testing.assert_close(moved @ moved.T, points @ points.T)
    assert points_on_the_sphere.seen(moved[2]).tolist() == pytest.approx([0, 0, 1], abs=1e-12)


def test_example_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "points.svg"
    points_on_the_sphere.main(["--quick", "-o", str(picture)])
    text = picture.read_text()
    assert "closest neurons: 64.9°" in text and "closest lines: 45.9°" in text and text.count("β = ") == 4
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("half space") and "45.94" in line for line in lines)
    assert lines[-1] == f"picture: {picture}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_thousands_of_points_on_a_gpu():
    found = minimise((12, 3), 1, restarts=4, generator=seeded(), device="cuda")
    assert found.points.is_cuda and found.energy == pytest.approx(98.3305061153, rel=1e-8)
    torch.cuda.reset_peak_memory_stats()
    start = normalise(torch.randn(20_000, 64, generator=seeded())).cuda()
    better = refine(start, 5)
    assert hyperspherical_energy(better) < hyperspherical_energy(start)
    assert torch.cuda.max_memory_allocated() < 1.2e9  # all pairs in float32 would take 1.6e9 bytes
