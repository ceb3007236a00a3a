"""Ways of heavy points: gradient descent written out in float64, and what is drawn of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import FancyArrowPatch
from typer.testing import CliRunner

from hypersphere import plot
from hypersphere.cli.commands import app
from hypersphere.drawing import colour
from hypersphere.errors import ArgumentError
from hypersphere.plot import weighted

BETAS = (1.0, 2.0, 4.0, 10.0)


def start(points, seed):
    x = torch.randn(points, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).numpy()
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def plain_descent(u, beta, s, steps, lr, most=0.2):
    """Steps along great circles against the gradient of the sum over ordered pairs, pair by pair."""
    places = [u]
    for _ in range(steps):
        moved = np.empty_like(u)
        for i in range(len(u)):
            slope = np.zeros(3)
            for j in range(len(u)):
                if j != i:
                    gap = beta[i] * u[i] - beta[j] * u[j]
                    # Both (i, j) and (j, i); the gradient of |gap|^-s by u_i.
                    slope += 2 * -(s or 1) * beta[i] * gap / np.linalg.norm(gap) ** (s + 2)
            tangent = -lr * (slope - (slope @ u[i]) * u[i])
            angle = min(np.linalg.norm(tangent), most)
            moved[i] = np.cos(angle) * u[i] + np.sin(angle) * tangent / np.linalg.norm(tangent)
        u = moved
        places.append(u)
    return np.stack(places)


@pytest.mark.parametrize(("beta", "heavy", "s"), [(1.0, 1, 2.0), (4.0, 2, 2.0), (10.0, 1, 1.0), (2.0, 3, 0.0)])
def test_descent(beta, heavy, s):
    found = plot.weighted_paths(beta, points=7, heavy=heavy, s=s, steps=40, lr=2e-3, seed=3)
    lengths = [beta] * heavy + [1.0] * (7 - heavy)
    expected = plain_descent(start(7, 3), lengths, s, 40, 2e-3)
    assert found.places.shape == (41, 7, 3) and np.allclose(found.places, expected, atol=1e-9)
    last = expected[-1] * np.array(lengths)[:, None]
    gaps = [np.linalg.norm(last[i] - last[j]) for i in range(7) for j in range(7) if i != j]
    assert found.energy == pytest.approx(sum(gap**-s if s else -np.log(gap) for gap in gaps), rel=1e-9)
    angles = np.arccos((expected[1:] * expected[:-1]).sum(2).clip(-1, 1))
    assert np.allclose(found.lengths(), np.degrees(angles.sum(0)), atol=1e-3)


@pytest.mark.parametrize("heavy", [1, 2])
def test_heavy_points_move_less(heavy):
    ways = [plot.weighted_paths(beta, heavy=heavy).lengths()[:heavy].sum() for beta in BETAS]
    assert ways[0] > ways[1] > ways[2] > ways[3] and ways[3] < 0.05 * ways[0]


def test_picture(tmp_path):
    figure = plot.weighted_energy(heavy=2, steps=100)
    found = [plot.weighted_paths(beta, heavy=2, steps=100) for beta in BETAS]
    frame = weighted._frame(found, 2)
    assert np.allclose(frame @ frame.T, np.eye(3)) and np.linalg.det(frame) == pytest.approx(1)
    middle = np.concatenate([paths.places[:, :2].reshape(-1, 3) for paths in found]).mean(0)
    assert np.allclose((frame @ middle / np.linalg.norm(middle))[:2], weighted.TILT)
    assert len(figure.axes) == 4
    for axes, paths in zip(figure.axes, found, strict=True):
        moved = " and ".join(f"{length:.1f}°" for length in paths.lengths()[:2])
        assert axes.get_title() == f"$\\beta$ = {paths.beta:g}\nway {moved}"
        turned = paths.places @ frame.T
        for index in range(2):
            front, back = [
                one.get_xydata()
                for one in axes.lines
                if to_hex(one.get_color()) == colour(index) and one.get_linestyle() == "--"
            ][::-1]
            seen = np.where(np.isnan(front), back, front)
            assert np.allclose(seen, turned[:, index, :2]) and (np.isnan(front) != np.isnan(back)).all()
        arrows = [patch for patch in axes.patches if isinstance(patch, FancyArrowPatch)]
        tips = sorted(patch._posA_posB[1] for patch in arrows)
        assert np.allclose(tips, sorted(map(tuple, turned[-1, :2, :2])))
    plot.save(figure, tmp_path / "x.png")


def test_command_and_mistakes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        return CliRunner().invoke(app, ["plot", "weighted-energy", *map(str, arguments)])

    assert command("--steps", 5).output == "Wrote weighted_energy.png\n"
    assert command(1, 3, "--steps", 5, "--points", 4, "-o", "x.svg").output == "Wrote x.svg\n"
    way = plot.weighted_paths(3.0, points=4, steps=5).lengths()[0]
    assert f"way {way:.1f}°" in (tmp_path / "x.svg").read_text()
    for name, options in (
        ("beta", [0]),
        ("points", ["--points", 1]),
        ("heavy", ["--heavy", 11]),
        ("steps", ["--steps", 0]),
        ("lr", ["--lr", 0]),
    ):
        assert str(command(*options).exception).startswith(f"{name} must be ")
    with pytest.raises(ArgumentError, match="betas must be at least one number, got none"):
        plot.weighted_energy([])
