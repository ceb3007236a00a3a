"""Pictures of operators: that what is drawn is what the operators, kernels and layers say."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Arc, Circle
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import hypersphere as hs
from hypersphere import plot
from hypersphere.cli.commands import app
from hypersphere.drawing import PALETTE
from hypersphere.errors import ArgumentError
from hypersphere.plot import operators
from hypersphere.registry import UnknownNameError

T = np.linspace(0, 4, 401)
MAGNITUDES = {
    "sphere": np.ones_like(T),
    "ball": np.minimum(T, 1),
    "tanh": np.tanh(T),
    "linear": T,
    "seg": np.where(T <= 1, T, 0.5 * T + 0.5),
    "log": np.log(1 + T),
    "mix": T + np.log(1 + T),
}
ANGULARS = {
    "cosine": np.cos,
    "linear": lambda t: 1 - 2 * t / np.pi,
    "sigmoid, k = 0.1": lambda t: np.tanh((np.pi / 2 - t) / 0.2) / np.tanh(np.pi / 0.4),
    "sigmoid, k = 0.3": lambda t: np.tanh((np.pi / 2 - t) / 0.6) / np.tanh(np.pi / 1.2),
    "sigmoid, k = 0.7": lambda t: np.tanh((np.pi / 2 - t) / 1.4) / np.tanh(np.pi / 2.8),
    "sqcos": lambda t: np.cos(t) * abs(np.cos(t)),
    "relucos": lambda t: np.maximum(np.cos(t), 0),
}


def legend_colours(axes):
    legend = axes.get_legend()
    return {
        text.get_text(): to_hex(line.get_color())
        for text, line in zip(legend.get_texts(), legend.get_lines(), strict=True)
    }


def curve(axes, label):
    (found,) = [line for line in axes.lines if line.get_label() == label]
    assert to_hex(found.get_color()) == legend_colours(axes)[label]
    return found.get_xdata(), found.get_ydata()


# -------------------------------------------------------------------------------------------------- curves


def test_magnitudes():
    (axes,) = plot.plot_magnitudes().axes
    assert list(legend_colours(axes)) == list(MAGNITUDES) and len(set(legend_colours(axes).values())) == 7
    for name, expected in MAGNITUDES.items():
        x, y = curve(axes, name)
        assert np.allclose(x, T) and np.allclose(y, expected)
    solid = {line.get_label() for line in axes.lines if line.get_linestyle() == "-"}
    assert solid & set(MAGNITUDES) == {"sphere", "ball", "tanh"}  # the bounded ones


def test_radius_is_marked_only_where_there_is_one():
    assert any("radius" in text.get_text() for text in plot.plot_magnitudes(["seg"]).axes[0].texts)
    assert not plot.plot_magnitudes(["log", "sphere"]).axes[0].texts


def test_angulars():
    (axes,) = plot.plot_angulars().axes
    assert list(legend_colours(axes)) == list(ANGULARS)
    for label, expected in ANGULARS.items():
        x, y = curve(axes, label)
        assert np.allclose(y, expected(np.radians(x))) and (x[0], x[-1]) == (0, 180)
    assert axes.get_xlabel() == r"angle $\theta$ of kernel and input (degrees)"


def test_all_at_once():
    figure = plot.plot_operators()
    magnitudes, angular, *small = figure.axes
    assert np.allclose(curve(magnitudes, "mix")[1], MAGNITUDES["mix"])
    assert np.allclose(curve(angular, "cosine")[1], np.cos(np.linspace(0, np.pi, 361)))
    assert [axes.get_title(loc="center") for axes in small] == list(MAGNITUDES)
    titles = [magnitudes.get_title(loc="left"), angular.get_title(loc="left"), figure.subfigs[1].get_suptitle()]
    assert [title[:3] for title in titles] == ["(a)", "(b)", "(c)"]


# ------------------------------------------------------------------------------------------------ geometry


@pytest.mark.parametrize("name", sorted(MAGNITUDES))
def test_inputs_move_along_their_rays(name):
    (axes,) = plot.plot_operator_geometry([name]).axes
    points = [part.get_offsets()[0] for part in axes.collections]
    moved, inputs = np.array(points[::2]), np.array(points[1::2])
    lengths = np.linalg.norm(inputs, axis=1)
    assert lengths.tolist() == pytest.approx([0.5, 1.5])
    expected = np.interp(lengths, T, MAGNITUDES[name])
    assert np.allclose(moved, expected[:, None] * inputs / lengths[:, None], atol=1e-4)
    (circle,) = [patch for patch in axes.patches if isinstance(patch, Circle)]
    assert circle.radius == 1 and circle.center == (0, 0)
    low, high = np.array([axes.get_xlim(), axes.get_ylim()]).T
    assert ((moved > low) & (moved < high)).all()  # nothing is moved out of the picture


def test_names_of_operators():
    assert [a.get_title(loc="center") for a in plot.plot_operator_geometry(["segmented", "Ball"]).axes] == [
        "seg",
        "ball",
    ]
    with pytest.raises(UnknownNameError, match="unknown operator 'tan'"):
        plot.plot_magnitudes(["tan"])
    with pytest.raises(ArgumentError, match="operators must be at least one name, got none"):
        plot.plot_operator_field([])
    with pytest.raises(ArgumentError, match="operators must be at most 10 at once, got 11"):
        plot.plot_operators(["ball"] * 11)


# --------------------------------------------------------------------------------------------------- field


def test_fields(monkeypatch):
    drawn = []
    from matplotlib.axes import Axes

    contourf = Axes.contourf
    monkeypatch.setattr(Axes, "contourf", lambda *a, **k: drawn.append((a, k)) or contourf(*a, **k))
    figure = plot.plot_operator_field(["seg", "sphere"])
    names = ["cosine", "linear", "sigmoid, k = 0.3", "sqcos", "relucos"]
    grid = figure.axes[:10]
    assert [axes.get_title(loc="center") for axes in grid[:5]] == names
    assert [axes.get_ylabel() for axes in grid[::5]] == ["seg", "sphere"]
    for index, ((axes, x, y, values), options) in enumerate(drawn):
        assert axes is grid[index]
        u, v = np.meshgrid(x, y)
        size = np.hypot(u, v)
        inside = size > 1e-9
        magnitude = np.where(size <= 1, size, 0.5 * size + 0.5) if index < 5 else 1.0
        expected = magnitude * ANGULARS[names[index % 5]](np.arctan2(abs(v), u))
        assert np.allclose(values[inside], expected[inside], atol=1e-6) and (values[~inside] == 0).all()
        levels = np.asarray(options["levels"])
        assert np.allclose(levels, -levels[::-1])  # zero is the middle of the colours
    assert to_rgb(operators.DIVERGING(0.5)) == pytest.approx((1, 1, 1), abs=0.02)


# ---------------------------------------------------------------------------------------------- angle step


def test_angle_step():
    (axes,) = plot.plot_angle_step((0.5, 3.0), 0.4).axes
    arcs = sorted(patch.theta2 for patch in axes.patches if isinstance(patch, Arc))
    expected = [math.degrees(math.atan(0.4 / 3)), math.degrees(math.atan(0.8))]
    assert arcs == pytest.approx(expected)
    texts = {text.get_text() for text in axes.texts}
    assert {rf"$\theta_1$ = {expected[1]:.1f}°", rf"$\theta_2$ = {expected[0]:.1f}°"} <= texts
    ends = {tuple(line.get_xydata()[-1]) for line in axes.lines}
    assert ends == {(0.5, 0.4), (3.0, 0.4)}
    radii = {patch.radius for patch in axes.patches if isinstance(patch, Circle)}
    assert radii == {0.5, 3.0}


@pytest.mark.parametrize(
    ("norms", "step", "message"),
    [
        ((2.0, 1.0), 0.5, "norms must be the smaller one first"),
        ((0.0, 1.0), 0.5, "norms must be greater than 0"),
        ((1.0, 2.0), 0.0, "step must be greater than 0"),
    ],
)
def test_angle_step_mistakes(norms, step, message):
    with pytest.raises(ArgumentError, match=message):
        plot.plot_angle_step(norms, step)


# ------------------------------------------------------------------------------------------------- filters


def mosaic(figure):
    return np.asarray(figure.axes[0].images[0].get_array())


def test_filters_of_colours():
    weight = torch.randn(5, 3, 4, 2)
    image = mosaic(plot.plot_filters(nn.Parameter(weight), columns=3))
    assert image.shape == (2 * 5 - 1, 3 * 3 - 1, 3)
    for index, filters in enumerate(weight.numpy()):
        row, column = divmod(index, 3)
        tile = image[5 * row : 5 * row + 4, 3 * column : 3 * column + 2]
        assert np.allclose(tile, 0.5 + filters.transpose(1, 2, 0) / abs(filters).max() / 2, atol=1e-6)
    assert (image[4] == 1).all() and (image[5:, 6:] == 1).all()  # gaps and the place without a filter


def test_filters_of_one_channel():
    weight = torch.tensor([-2.0, 0.0, 2.0, 1.0]).view(1, 1, 2, 2)
    image = mosaic(plot.plot_filters(torch.cat([weight, torch.zeros_like(weight)])))
    assert to_hex(image[0, 0]) == PALETTE[0] and to_hex(image[1, 0]) == PALETTE[1]
    assert image[0, 1] == pytest.approx([1, 1, 1], abs=0.02)
    assert np.isfinite(image).all() and image[:, 3:] == pytest.approx(np.ones((2, 2, 3)), abs=0.02)


@pytest.mark.parametrize("shape", [(4, 2, 3, 3), (4, 3, 3), (0, 3, 3, 3)])
def test_filters_that_are_no_images(shape):
    with pytest.raises(ArgumentError, match=r"weight must be \(O, 1, kH, kW\) or \(O, 3, kH, kW\), got"):
        plot.plot_filters(torch.zeros(shape))


# ---------------------------------------------------------------------------------------------- parameters


def network():
    """Two layers that learn both, one that learns the radius, and two that learn nothing."""
    sigmoid = hs.nn.create("ball", angular="sigmoid", learn_k="filter")
    return nn.Sequential(
        sigmoid(3, 8, 3), nn.ReLU(), sigmoid(8, 6, 3), hs.nn.create("seg")(6, 4, 3), hs.nn.create("sphere")(4, 4, 3)
    )


def test_parameters(tmp_path):
    model = network()
    values = torch.tensor([0.2, 0.2, 0.2, 0.2, 0.7, 0.7, 1.4, 0.5])
    model[0].set_k(values)
    model[2].set_radius(3.0)
    figure = plot.plot_parameters(model)
    found = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert list(found) == [
        *("0: steepness k", "2: steepness k"),
        *("0: radius $\\rho$", "2: radius $\\rho$", "3: radius $\\rho$"),
    ]
    (bars,) = found["0: steepness k"].patches
    shares, edges, _ = bars.get_data()
    for place, share in ((0.2, 50), (0.7, 25), (1.4, 12.5), (0.5, 12.5)):
        assert shares[np.searchsorted(edges, place) - 1] == pytest.approx(share)
    assert shares.sum() == pytest.approx(100) and edges[0] == 0
    starts = {title: axes.lines[0].get_xdata()[0] for title, axes in found.items()}
    assert all(start == (0.5 if "k" in title.split()[-1] else 1.0) for title, start in starts.items())
    limits = {title: axes.get_xlim() for title, axes in found.items()}
    assert limits["0: steepness k"] == limits["2: steepness k"] and limits["2: steepness k"][1] == pytest.approx(1.47)
    assert limits["0: radius $\\rho$"][1] == pytest.approx(3.15, rel=1e-3)
    plot.save(figure, tmp_path / "figure.png")


def test_parameters_of_some_layers_and_of_one():
    assert [axes.get_title(loc="left") for axes in plot.plot_parameters(network(), ["3"]).axes] == ["3: radius $\\rho$"]
    assert plot.plot_parameters(hs.nn.TanhLinear(3, 4)).axes[0].get_title(loc="left").startswith("TanhLinear: radius")


def test_parameters_where_there_are_none():
    with pytest.raises(ArgumentError, match="model must have decoupled layers that learn k or a radius, got none"):
        plot.plot_parameters(nn.Sequential(nn.Conv2d(3, 4, 3), hs.nn.SphereConv2d(4, 4, 3)))
    with pytest.raises(ArgumentError, match=r"layers must name decoupled layers \(0, 2, 3, 4\), got '1'"):
        plot.plot_parameters(network(), ["1"])
    with pytest.raises(ArgumentError, match="layers must be fewer: 25 histograms, at most 24"):
        plot.plot_parameters(nn.Sequential(*(hs.nn.TanhLinear(2, 2) for _ in range(25))))


# ------------------------------------------------------------------------------------------------- command


def command(*arguments):
    return CliRunner().invoke(app, ["plot", "operators", *map(str, arguments)])


def test_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command("tanh", "seg", "-o", "two.svg").output == "Wrote two.svg\n"
    text = Path("two.svg").read_text()
    assert ">tanh<" in text and ">seg<" in text and ">mix<" not in text
    for part, name in (("all", "operators"), ("geometry", "operator_geometry"), ("field", "operator_field")):
        assert command("--part", part, *(() if part == "field" else ("ball",))).output == f"Wrote {name}.png\n"
        with Image.open(f"{name}.png") as picture:
            assert picture.size[0] > 600
    assert Path("operator_field.png").stat().st_size < 150_000
    done = command("--part", "curves")
    assert done.exit_code != 0
    assert str(done.exception) == "part must be one of 'all', 'geometry', 'field', got 'curves'"
    assert "unknown operator 'tan'" in str(command("tan").exception)
