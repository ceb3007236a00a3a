"""Pictures: that what is drawn is what the heads and runs say, for every loss, file type and command."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from PIL import Image
from safetensors.numpy import save_file
from typer.testing import CliRunner

from helpers.paths import SOURCE
from hypersphere import losses, plot
from hypersphere.cli import plot as plot_cli
from hypersphere.cli.commands import app
from hypersphere.drawing import colour
from hypersphere.errors import ArgumentError
from hypersphere.evaluate import Outputs
from hypersphere.plot import directions, heads, runs, style
from hypersphere.runs import RunError

TINY = ["train.steps=4", "train.log_every=2", "train.tensorboard=false", "model.width=4", "data.batch_size=32"]
DRAWN = sorted(set(losses.losses) - {"triplet", "gan"})
DEGREES = np.linspace(0, 180, heads.POINTS)
THETA = np.radians(DEGREES)


def head(name, **options):
    return losses.create(name, 2, 2, **options)


def lines(axes):
    """Lines with data by label or colour, in the order they were drawn."""
    return [line for line in axes.lines if len(line.get_xdata())]


def line_of(axes, colour):
    found = [line for line in lines(axes) if to_hex(line.get_color()) == colour]
    assert found, f"no line of colour {colour}"
    return found


def panels(figure):
    return figure.axes[:3]


def legend_texts(figure):
    """Texts of all legends of the figure."""
    boxes = [axes.get_legend() for axes in figure.axes if axes.get_legend()] + list(figure.legends)
    return [text.get_text() for box in boxes for text in box.get_texts()]


# -------------------------------------------------------------------------------------------------- margins


@pytest.mark.parametrize("name", DRAWN)
def test_every_loss_with_a_target_function_is_drawn(name):
    one = head(name)
    figure = plot.margins({name: one}, norm=25.0)
    psi, logits, plane = panels(figure)
    cosine, drawn = lines(psi)
    assert np.allclose(cosine.get_ydata(), np.cos(THETA))
    # The head's own training path is the reference: margin_logits of features at these angles.
    with torch.no_grad():
        one.weight.zero_()
        one.weight[:: one.subcentres] = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        if one.subcentres > 1:
            one.weight.copy_(one.weight[:: one.subcentres].repeat_interleave(one.subcentres, 0))
        inner = THETA[5:-5]
        x = torch.from_numpy(25 * np.stack([np.cos(inner), -np.sin(inner)], 1)).float()
        found = one.margin_logits(x, torch.zeros(len(x), dtype=torch.int64))[:, 0]
    target = line_of(logits, colour(0))[0]
    assert np.allclose(target.get_ydata()[5:-5], found, atol=2e-3 * max(1, abs(found).max() / 30))
    assert np.allclose(drawn.get_ydata(), one.psi(torch.from_numpy(THETA), norm=25.0).detach().numpy())
    assert (plane.get_xlim(), plane.get_ylim()) == ((0, 180), (0, 180))
    assert any(re.match(rf"{re.escape(name)}: \d+\.\d°", text) for text in legend_texts(figure))


def test_losses_of_pairs_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="head must have a target function psi, got TripletLoss"):
        plot.margins({"triplet": head("triplet")})
    with pytest.raises(ArgumentError, match=r"losses must have a target function .*'triplet' compares pairs"):
        plot_cli._heads(["triplet"], [])


@pytest.mark.parametrize(
    ("one", "degrees"),
    [
        (head("softmax"), 0.0),
        (head("a-softmax", m=4), 54.0),  # (m - 1) / (m + 1) * 90
        (head("ga-softmax", m=3), 45.0),
        (head("arcface", m=0.5), math.degrees(0.5)),
        # cos a - m = sin a, so sqrt 2 cos(a + 45 degrees) = m
        (head("cosface", m=0.35), 90 - 2 * (math.degrees(math.acos(0.35 / math.sqrt(2))) - 45)),
        (head("sphereface-r", version="v2", m=1.4), 90 - 180 / 2.4),  # m a = 90 - a
        (head("cosface", m=1.9), 90.0),  # out of reach of every sample
    ],
)
def test_margin_in_the_legend(one, degrees):
    assert math.degrees(plot.curves(one).margin) == pytest.approx(degrees, abs=1e-6)
    (text,) = [t for t in legend_texts(plot.margins({"this one": one})) if t.startswith("this one")]
    assert text.startswith(f"this one: {degrees:.1f}°") and ("(never met)" in text) == (degrees == 90)


def test_margin_where_other_classes_depend_on_the_own_angle():
    """CurricularFace before training: hard classes count c^2, so the boundary is not ArcFace's."""
    a = np.linspace(0, np.pi / 4, 400_001)
    own, other = np.cos(a + 0.5), np.cos(np.pi / 2 - a)
    met = np.where(other > own, other**2, other) <= own
    expected = 90 - 2 * np.degrees(a[met].max())
    assert math.degrees(plot.curves(head("curricularface")).margin) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("one", "boundary"),
    [
        (head("arcface", m=0.5, beyond="clip"), lambda t1: t1 + math.degrees(0.5)),
        (head("a-softmax", m=2), lambda t1: 2 * t1),
        (head("sphereface-r", version="v2", m=1.4), lambda t1: 1.4 * t1),
        (head("w-softmax"), lambda t1: t1),
    ],
)
def test_boundaries(one, boundary):
    plane = panels(plot.margins({"one": one}))[2]
    contours = [part for part in plane.collections if not part.filled]
    first, second = (part.get_paths()[0].vertices for part in contours)
    inner = (first[:, 1] > 2) & (first[:, 1] < 170)
    assert inner.sum() > 50
    assert np.allclose(boundary(first[inner, 0]), first[inner, 1], atol=0.25)
    assert np.allclose(np.sort(first, 0), np.sort(second[:, ::-1], 0), atol=1e-6)  # mirror images


def test_strip_between_the_boundaries_is_shaded():
    plane = panels(plot.margins({"one": head("arcface")}))[2]
    (strip,) = [part for part in plane.collections if part.filled]
    shaded = strip.get_paths()[0].contains_points([[40, 50], [90, 90], [30, 80], [80, 30], [10, 60]])
    assert shaded.tolist() == [True, True, False, False, False]
    assert not [part for part in panels(plot.margins({"one": head("softmax")}))[2].collections if part.filled]


def test_annealed_curve():
    one = plot.annealed(head("a-softmax", m=4), 5.0)
    figure = plot.margins({"a-softmax": one})
    plain, blended = line_of(panels(figure)[0], colour(0))
    k = np.minimum(np.floor(4 * THETA / np.pi), 3)
    psi = (-1.0) ** k * np.cos(4 * THETA) - 2 * k
    assert np.allclose(plain.get_ydata(), psi, atol=1e-6)
    assert np.allclose(blended.get_ydata(), (5 * np.cos(THETA) + psi) / 6, atol=1e-6)
    assert np.allclose(line_of(panels(figure)[1], colour(0))[0].get_ydata(), 30 * blended.get_ydata())
    assert any("lambda$ = 5" in text for text in legend_texts(figure))
    without = plot.margins({"a-softmax": head("a-softmax", m=4)})
    assert len(line_of(panels(without)[0], colour(0))) == 1
    with pytest.raises(ArgumentError, match="lambda must be at least 0, got -1"):
        plot.annealed(one, -1)


def test_annealing_leaves_the_head_alone():
    one = head("arcface")
    assert plot.annealed(one, 3.0) is not one and one.annealer is None
    assert plot.annealed(plot.annealed(one, 3.0), None).annealer is None


def test_logits_of_both_classes():
    figure = plot.margins({"a": head("w-softmax"), "b": head("cosface", s=40.0, m=0.2)}, norm=12.0)
    logits = panels(figure)[1]
    kept, plain = line_of(logits, colour(0))
    margin, other = line_of(logits, colour(1))
    assert np.allclose(kept.get_ydata(), 12 * np.cos(THETA)) and np.allclose(plain.get_ydata(), kept.get_ydata())
    assert np.allclose(margin.get_ydata(), 40 * (np.cos(THETA) - 0.2))
    assert np.allclose(other.get_ydata(), 40 * np.cos(THETA))
    assert "= 12" in logits.get_title(loc="left")
    assert "=" not in panels(plot.margins({"b": head("cosface")}))[1].get_title(loc="left")


def test_learned_offset_is_in_the_logits():
    one = head("sphereface2")
    with torch.no_grad():
        one.common_bias.fill_(-0.25 * one.s)
    target = line_of(panels(plot.margins({"one": one}))[1], colour(0))[0].get_ydata()
    assert target[0] == pytest.approx(40 * (1 - 0.4 - 0.25)) and target[180] == pytest.approx(40 * (-0.75 - 0.65))


def test_norm_reaches_members_whose_margin_depends_on_it():
    low, high = (plot.curves(head("magface"), norm).psi[0] for norm in (10.0, 110.0))
    assert (low, high) == (pytest.approx(math.cos(0.45)), pytest.approx(math.cos(0.8)))
    with pytest.raises(ArgumentError, match="norm must be greater than 0"):
        plot.curves(head("magface"), 0.0)


def test_many_heads_get_a_panel_of_boundaries_each():
    names = [f"m = {m}" for m in range(1, 10)]
    figure = plot.margins({name: head("a-softmax", m=m + 1) for m, name in enumerate(names)})
    titles = [axes.get_title(loc="left") for axes in figure.axes[3:]]
    assert titles == [f"{name}\n{90 * m / (m + 2):.1f}°" for m, name in enumerate(names)]
    ten = {str(m): head("a-softmax", m=m) for m in range(1, 12)}
    for wrong in (ten, {}):
        with pytest.raises(ArgumentError, match=f"losses must be 1 to 10 at once, got {len(wrong)}"):
            plot.margins(wrong)


def test_equal_curves_can_both_be_seen():
    psi = panels(plot.margins({"a": head("w-softmax"), "b": head("softmax")}))[0]
    first, second = (line_of(psi, colour(index))[0] for index in (0, 1))
    assert first.get_linestyle() == "-" and second.get_linestyle() == "--"


# -------------------------------------------------------------------------------------------------- schedule


def test_schedule():
    annealer = losses.LambdaAnnealer(base=100.0, gamma=0.1, power=1.0, minimum=5.0)
    figure = plot.schedule(head("arcface"), annealer, 1000)
    (weight,), (margin, full) = (lines(axes) for axes in figure.axes)
    steps = weight.get_xdata()
    assert steps[0] == 1 and steps[-1] == 1000
    expected = np.maximum(5, 100 / (1 + 0.1 * steps))
    assert np.allclose(weight.get_ydata(), expected)
    assert np.allclose(full.get_ydata(), math.degrees(0.5))
    # (lambda cos a + cos(a + m)) / (1 + lambda) = sin a, solved for tan a
    tangent = (expected + math.cos(0.5)) / (1 + expected + math.sin(0.5))
    assert np.allclose(margin.get_ydata(), 90 - 2 * np.degrees(np.arctan(tangent)), atol=1e-4)
    with pytest.raises(ArgumentError, match="steps must be at least 1"):
        plot.schedule(head("arcface"), annealer, 0)
    with pytest.raises(ArgumentError, match="psi"):
        plot.schedule(head("triplet"), annealer, 10)


# -------------------------------------------------------------------------------------------------- gradients

ANGLES = torch.tensor([0.2, 0.7, 1.3, 2.0, 2.9], dtype=torch.float64)


def polar(gradient, theta):
    """Parts of vectors along the feature and along the circle towards larger angles."""
    x = torch.stack([theta.cos(), theta.sin()], 1)
    turned = torch.stack([-theta.sin(), theta.cos()], 1)
    return (gradient * x).sum(1), (gradient * turned).sum(1)


def psi4(theta):
    k = (4 * theta / math.pi).floor()
    return (-1) ** k * (4 * theta).cos() - 2 * k, -((-1) ** k) * 4 * (4 * theta).sin()


def test_exact_gradient():
    value, slope = psi4(ANGLES)
    radial, angular = polar(plot.target_gradient(head("a-softmax", m=4), ANGLES, norm=7.0), ANGLES)
    assert torch.allclose(radial, value, atol=1e-5) and torch.allclose(angular, slope, atol=1e-5)
    radial, angular = polar(plot.target_gradient(head("arcface", s=14.0, beyond="clip"), ANGLES, norm=7.0), ANGLES)
    expected = -2 * (ANGLES + 0.5).clamp(max=math.pi).sin()
    assert torch.allclose(radial, torch.zeros(5).double(), atol=1e-5)
    assert torch.allclose(angular, expected, atol=1e-5)


def test_detached_gradient():
    """The value's length along the feature, the cosine's slope along the circle."""
    value, _ = psi4(ANGLES)
    radial, angular = polar(plot.target_gradient(head("a-softmax", m=4, gradient="cgd"), ANGLES), ANGLES)
    assert torch.allclose(radial, value, atol=1e-5) and torch.allclose(angular, -ANGLES.sin(), atol=1e-5)


@pytest.mark.parametrize("weight", [0.0, 5.0])
def test_gradient_of_the_released_layer(weight):
    """(a W + b x) / |(a, b)| with the chain rule's a and b, blended with W."""
    value, slope = psi4(ANGLES)
    a = -slope / ANGLES.sin()
    b = (value - a * ANGLES.cos()) / 10.0
    x = 10 * torch.stack([ANGLES.cos(), ANGLES.sin()], 1)
    own = torch.tensor([[1.0, 0.0]]).double()
    expected = (a.unsqueeze(1) * own + b.unsqueeze(1) * x) / torch.hypot(a, b).unsqueeze(1)
    expected = (expected + weight * own) / (1 + weight)
    annealer = losses.LambdaAnnealer(base=weight, gamma=0.0, minimum=0.0)
    one = head("a-softmax", m=4, gradient="caffe", annealer=annealer)
    assert torch.allclose(plot.target_gradient(one, ANGLES, norm=10.0), expected, atol=1e-5)
    assert int(annealer.steps) == 0  # the head itself was not trained


def test_terms_beside_the_logits_are_left_out():
    radial, _ = polar(plot.target_gradient(head("magface", m=(0.5, 0.5)), ANGLES, norm=20.0), ANGLES)
    assert torch.allclose(radial, torch.zeros(5).double(), atol=1e-4)
    with pytest.raises(ArgumentError, match="norm must be greater than 0"):
        plot.target_gradient(head("magface"), ANGLES, norm=0.0)


def test_gradients_figure():
    figure = plot.gradients()
    assert len(figure.axes) == 9
    assert {'"exact"', '"cgd"', '"caffe"'} == set(legend_texts(figure))
    caption = figure.get_supxlabel()
    assert all(word in caption for word in ("exact:", "cgd ", "caffe:"))
    lengths, turns = figure.axes[0], figure.axes[3]
    degrees = lines(lengths)[0].get_xdata()
    value, slope = psi4(torch.from_numpy(np.radians(degrees)))
    inner = (degrees % 45 > 1) & (degrees % 45 < 44)  # either side of a branch point
    exact = dict(zip(["exact", "cgd", "caffe"], lines(lengths), strict=True))["exact"].get_ydata()
    assert np.allclose(exact[inner], torch.hypot(value, slope)[inner], atol=1e-4)
    at = int(np.argmin(abs(degrees - 90)))
    assert lines(lengths)[2].get_ydata()[at] == pytest.approx(10, rel=1e-3)  # the spike: |x|
    # At 90 degrees the slope of psi is 0, so the exact gradient points back to the origin.
    assert lines(turns)[2].get_ydata()[at] == pytest.approx(-90, abs=1)
    arc = lines(figure.axes[5])  # ArcFace: every gradient is along the circle
    shown = arc[2].get_ydata()
    assert np.allclose((shown - (degrees - 90))[np.isfinite(shown)], 0, atol=1e-3)
    assert np.isfinite(shown[1:-1]).all()  # past 151 degrees, too
    assert set(directions.COLOURS) == {"exact", "cgd", "caffe"}


# -------------------------------------------------------------------------------------------------- features


def write_run(folder, vectors, labels, weights=None, names=(), name="a run"):
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("loss: {name: arcface}\n")
    (folder / "run.json").write_text(json.dumps({"name": name}))
    (folder / "metrics.jsonl").write_text("")
    tensors = {"features": vectors.astype(np.float32), "labels": labels.astype(np.int64)}
    if weights is not None:
        tensors["centres"] = weights.astype(np.float32)
    save_file(tensors, folder / "features.safetensors", metadata={"class_names": json.dumps(list(names))})
    return folder


def cloud(classes, dim, each=12, noise=0.2, seed=0):
    random = np.random.default_rng(seed)
    weights = random.normal(size=(classes, dim))
    weights /= np.linalg.norm(weights, axis=1, keepdims=True)
    labels = np.tile(np.arange(classes), each)
    vectors = weights[labels] + noise * random.normal(size=(len(labels), dim))
    return vectors * random.uniform(3, 9, size=(len(labels), 1)), labels, weights


def drawn_points(axes):
    """Drawn points by colour."""
    found = {}
    for part in axes.collections:
        if len(part.get_offsets()):
            found.setdefault(to_hex(part.get_facecolor()[0]), []).append(part.get_offsets())
    return {colour: np.concatenate(parts) for colour, parts in found.items()}


def test_features_in_the_plane(tmp_path):
    vectors, labels, weights = cloud(4, 2)
    figure = plot.features([write_run(tmp_path / "one", vectors, labels, weights, ["a", "b", "c$", "_d"], "run $5_")])
    upper = figure.axes[0]
    length = np.linalg.norm(vectors, axis=1).mean()
    points = drawn_points(upper)
    for label in range(4):
        expected = vectors[labels == label] / length
        assert np.allclose(np.sort(points[colour(label)], 0), np.sort(expected, 0), atol=1e-5)
    (circle,) = [patch for patch in upper.patches if hasattr(patch, "radius")]
    assert circle.radius == 1
    arrows = [patch for patch in upper.patches if not hasattr(patch, "radius")]
    tips = np.array([patch._posA_posB[1] for patch in arrows])
    assert np.allclose(tips / np.linalg.norm(tips, axis=1, keepdims=True), weights, atol=1e-5)
    assert legend_texts(figure)[-5:] == ["a", "b", "c\\$", "\u200b_d", "class vector"]
    assert upper.get_title().strip() == "run \\$5_" and f"{length:.3g}" in upper.texts[0].get_text()
    plot.save(figure, tmp_path / "figure.png")


def test_histogram_of_pairs(tmp_path):
    vectors, labels, _ = cloud(3, 2, each=10)
    other = write_run(tmp_path / "two", *cloud(3, 2, each=10, noise=2.0, seed=1)[:2])
    figure = plot.features([write_run(tmp_path / "one", vectors, labels), other])
    lower, beside = figure.axes[2:]
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    angles = np.degrees(np.arccos((units @ units.T).clip(-1, 1)))
    first, second = np.triu_indices(30, 1)
    same = labels[first] == labels[second]
    filled = [patch for patch in lower.patches if patch.get_fill()]
    for patch, chosen in zip(filled, (same, ~same), strict=True):
        counts = np.histogram(angles[first, second][chosen], bins=np.arange(0, 181, runs.BIN_DEGREES))[0]
        data = patch.get_data()
        assert np.allclose(data.values, 100 * counts / chosen.sum(), atol=1e-9)
        assert data.values.sum() == pytest.approx(100)
    texts = [text.get_text() for text in lower.get_legend().get_texts()]
    assert texts[0] == f"same class, mean {angles[first, second][same].mean():.1f}°"
    assert lower.get_ylim() == beside.get_ylim()  # comparable by eye
    assert "class vector" not in legend_texts(figure)


def test_features_on_the_sphere(tmp_path):
    vectors, labels, weights = cloud(5, 3, noise=0.05)
    figure = plot.features([write_run(tmp_path / "one", vectors, labels, weights)])
    points = np.concatenate([drawn_points(figure.axes[0])[colour(label)] for label in range(5)])
    assert len(points) == len(vectors) and (np.linalg.norm(points, axis=1) <= 1 + 1e-6).all()
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    frame = runs._clearest_view(units, labels)
    assert np.allclose(frame @ frame.T, np.eye(3)) and np.linalg.det(frame) == pytest.approx(1)
    assert np.allclose(np.sort(points, 0), np.sort((units @ frame.T)[:, :2], 0), atol=1e-5)
    assert "3-D" in figure.axes[0].texts[0].get_text()
    # Points behind the sphere are fainter than those in front.
    alphas = {part.get_alpha(): len(part.get_offsets()) for part in figure.axes[0].collections}
    assert len(alphas) == 2
    behind = ((units @ frame.T)[:, 2] < 0).sum()
    faint = sum(len(p.get_offsets()) for p in figure.axes[0].collections if p.get_alpha() == min(alphas))
    assert faint == behind > 0


def test_clearest_view_does_not_put_classes_on_top_of_each_other():
    poles = np.array([[0, 0, 1.0], [0, 0, -1.0], [1.0, 0, 0]])
    frame = runs._clearest_view(poles, np.arange(3))
    flat = (poles @ frame.T)[:, :2]
    assert min(np.linalg.norm(flat[i] - flat[j]) for i, j in ((0, 1), (0, 2), (1, 2))) > 0.8
    assert np.linalg.norm(flat, axis=1).min() > 0.4


def test_many_dimensions_and_classes_are_said(tmp_path):
    vectors, labels, weights = cloud(25, 6, each=4)
    figure = plot.features([write_run(tmp_path / "one", vectors, labels, weights)])
    note = figure.axes[0].texts[0].get_text().replace("\n", " ")
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    values = np.linalg.svd(units, compute_uv=False) ** 2
    assert f"6-D directions on 3 principal axes ({values[:3].sum() / values.sum():.0%} of variance)" in note
    assert "20 of 25 classes" in note and sum(map(len, drawn_points(figure.axes[0]).values())) == 80


def test_several_centres_of_a_class_are_all_drawn(tmp_path):
    vectors, labels, weights = cloud(3, 2)
    figure = plot.features(
        [write_run(tmp_path / "one", vectors, labels, np.repeat(weights, 2, axis=0), ["a", "b", "c"])]
    )
    arrows = [patch for patch in figure.axes[0].patches if not hasattr(patch, "radius")]
    assert [to_hex(arrow.get_edgecolor()) for arrow in arrows] == [colour(c) for c in (0, 0, 1, 1, 2, 2)]


def test_features_of_what_is_no_evaluated_run(tmp_path):
    folder = write_run(tmp_path / "one", *cloud(3, 2)[:2])
    (folder / "features.safetensors").unlink()
    with pytest.raises(RunError, match=r"one has no test features: `hypersphere evaluate .*one` makes them"):
        plot.features([folder])
    with pytest.raises(RunError, match="features of 1 dimension"):
        plot.features([write_run(tmp_path / "line", np.ones((4, 1)), np.arange(4))])
    with pytest.raises(ArgumentError, match="runs must be at least one folder"):
        plot.features([])


# -------------------------------------------------------------------------------------------------- hardness


def outputs(classes=4, dim=5, each=30):
    vectors, labels, weights = map(torch.from_numpy, cloud(classes, dim, each, noise=0.4))
    return Outputs(vectors, vectors @ weights.T, labels, weights)


def test_hardness_figure():
    found = outputs()
    figure = plot.hardness(found, ["a", "b", "c", "long name"], "a run")
    left, middle, right = panels(figure)
    x, w, y = (part.numpy() for part in (found.features, found.weight, found.labels))
    angles = np.arccos((x @ w.T / np.linalg.norm(x, axis=1, keepdims=True)).clip(-1, 1))
    hard = angles[np.arange(len(y)), y] / angles.sum(1)
    odds = np.exp(x @ w.T)
    confidence = (odds / odds.sum(1, keepdims=True))[np.arange(len(y)), y]
    for axes, values in ((left, confidence), (middle, np.linalg.norm(x, axis=1))):
        r = np.corrcoef(values, hard)[0, 1]
        assert axes.get_title(loc="left").endswith(f"r = {r:.2f}".replace("-", "\N{MINUS SIGN}"))
        mesh = axes.collections[0].get_array()
        assert mesh.sum() == len(y) and mesh.min() >= 1
    assert left.get_xlim() == (0, 1)
    drawn = np.asarray(right.images[0].get_array())
    units = x / np.linalg.norm(x, axis=1, keepdims=True)
    for a in range(4):
        for b in range(4):
            cosines = units[y == a] @ units[y == b].T
            pairs = cosines[~np.eye(len(cosines), dtype=bool)] if a == b else cosines
            assert drawn[a, b] == pytest.approx(pairs.mean(), abs=1e-6)
    assert [label.get_text() for label in right.get_xticklabels()] == ["a", "b", "c", "long name"]
    assert f"{drawn[0, 1]:.2f}".replace("-", "\N{MINUS SIGN}") in [text.get_text() for text in right.texts]
    assert "a run: 120 test samples" in figure.get_suptitle()


def test_correlation_with_a_constant_is_not_invented():
    found = outputs()
    units = found.features / found.features.norm(dim=1, keepdim=True)
    figure = plot.hardness(Outputs(units.float(), found.logits, found.labels, found.weight.float()))
    assert panels(figure)[1].get_title(loc="left").endswith("r = undefined")


def test_hardness_with_many_classes_and_several_centres(tmp_path):
    found = outputs(classes=24)
    far = torch.nn.functional.normalize(torch.randn(24, 5, generator=torch.manual_seed(0), dtype=torch.float64))
    doubled = torch.stack([-found.weight, found.weight, far - 2 * found.weight], 1).flatten(0, 1)
    chosen = runs._class_vectors(doubled, found.features, found.labels, 24)
    assert torch.allclose(chosen, found.weight)
    one, several = (
        plot.hardness(Outputs(found.features, found.logits, found.labels, w)) for w in (found.weight, doubled)
    )
    assert panels(one)[0].get_title(loc="left") == panels(several)[0].get_title(loc="left")
    assert not panels(one)[2].texts  # no room for 576 numbers
    plot.save(several, tmp_path / "figure.png")


# -------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF"), ("PNG", b"\x89PNG")]
)
def test_file_types(ending, start, tmp_path):
    figure = plot.schedule(head("arcface"), losses.LambdaAnnealer(), 5)
    first, second = (plot.save(figure, tmp_path / "new" / f"{name}.{ending}") for name in "ab")
    assert first.read_bytes().startswith(start) and first.read_bytes() == second.read_bytes()
    assert len(list((tmp_path / "new").iterdir())) == 2  # nothing half-written is left


def test_unknown_file_type(tmp_path):
    figure = plot.schedule(head("arcface"), losses.LambdaAnnealer(), 5)
    with pytest.raises(ArgumentError, match=r"output must end in \.png, \.svg, \.pdf, got 'x\.gif'"):
        plot.save(figure, tmp_path / "x.gif")
    assert not list(tmp_path.iterdir())


def test_png_is_light_and_nearly_exact(tmp_path, monkeypatch):
    figure = plot.gradients()
    light = plot.save(figure, tmp_path / "light.png")
    monkeypatch.setattr(style, "HEAVY", 10**9)
    full = plot.save(figure, tmp_path / "full.png")
    assert light.stat().st_size < 200_000 < full.stat().st_size
    a, b = (np.asarray(Image.open(file).convert("RGB"), dtype=float) for file in (light, full))
    assert a.shape == b.shape and abs(a - b).mean() < 1 and (a[0, 0] == 255).all()


def test_settings_of_the_user_neither_matter_nor_change(tmp_path):
    def picture(name):
        return plot.save(plot.margins({"one": head("arcface")}), tmp_path / f"{name}.svg").read_bytes()

    before = picture("before")
    with mpl.rc_context({"lines.linewidth": 9, "axes.facecolor": "black"}):
        assert picture("after") == before
        assert mpl.rcParams["lines.linewidth"] == 9 and mpl.rcParams["axes.facecolor"] == "black"


def test_matplotlib_is_imported_when_needed_and_without_pyplot():
    program = (
        "import sys, hypersphere.cli; assert 'matplotlib' not in sys.modules;"
        "import hypersphere.plot as p; from hypersphere import losses;"
        "p.margins({'a': losses.ArcFace(2, 2)}); assert 'matplotlib.pyplot' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -------------------------------------------------------------------------------------------------- command line


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished tiny run of real digits."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    done = CliRunner().invoke(app, ["train", "digits-softmax", *TINY, "--folder", str(folder), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    return folder


def command(*arguments):
    return CliRunner().invoke(app, ["plot", *map(str, arguments)])


def failure(*arguments):
    done = command(*arguments)
    assert done.exit_code != 0 and done.output == ""
    return str(done.exception)


def test_commands_are_listed():
    assert "plot" in CliRunner().invoke(app, ["--help"]).output
    text = command("--help").output
    names = ("margins", "gradients", "features", "hardness", "schedule")
    names += ("confusion", "class-size", "learned", "recognition", "weighted-energy")
    assert all(f" {name} " in text for name in names)


def test_margins_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command("margins", "arcface").output == "Wrote margins.png\n"
    with Image.open("margins.png") as picture:
        assert picture.size[0] > 1000
    assert command("margins", "-o", "all.svg").output == "Wrote all.svg\n"
    text = Path("all.svg").read_text()
    assert all(name in text for name in ("w-softmax", "a-softmax (m=2): 30.0°", "ga-softmax", "(g=linear, m=2)"))
    assert all(
        name in text for name in ("cosface (m=0.35)", "arcface", "combined (m1=1, m2=0.3, m3=0.2)", "version=v2")
    )


def test_options_of_losses(tmp_path):
    found = dict(plot_cli._heads(["arcface", "cosface:m=0.1", "softmax", "arcface:m=0.2,s=8"], ["m=0.3", "bias=false"]))
    assert list(found) == [
        "arcface (m=0.3)",
        "cosface (m=0.1)",
        "softmax (bias=false)",
        "arcface (m=0.2, s=8)",
    ]
    assert [h.m for h in found.values()][:2] == [0.3, 0.1] and found["softmax (bias=false)"].bias is None
    assert found["arcface (m=0.2, s=8)"].s == 8
    done = command("margins", "sphereface:m=3", "--option", "margin=2", "--lambda", "4", "-o", tmp_path / "a.svg")
    assert done.exit_code != 0 and "another name" in str(done.exception)
    done = command("margins", "sphereface", "--option", "margin=2", "--lambda", "4", "-o", tmp_path / "a.svg")
    assert done.exit_code == 0 and "a-softmax (margin=2" in (tmp_path / "a.svg").read_text()


def test_mistakes_in_losses(tmp_path):
    assert "unknown loss 'arcfac'. Did you mean 'arcface'?" in failure("margins", "arcfac")
    assert failure("margins", "arcface", "--option", "m") == "option must be KEY=VALUE, got 'm'"
    assert failure("margins", "arcface", "--option", "q=1") == "option 'q=1' is of none of the losses arcface"
    assert "loss.m must be at least 0 and at most 3.14159, got 9" in failure("margins", "arcface:m=9")
    assert "loss.x is not a known key" in failure("margins", "arcface:x=9")
    assert failure("margins", "arcface", "arcface") == "losses must differ, got 'arcface' twice"
    assert "'triplet' compares pairs of features" in failure("margins", "triplet")
    assert "norm must be greater than 0" in failure("margins", "arcface", "--norm", "0")
    assert "lambda must be at least 0" in failure("margins", "arcface", "--lambda", "-1")
    assert "output must end in" in failure("margins", "arcface", "-o", tmp_path / "x.jpg")


def test_gradients_and_schedule_commands(tmp_path):
    for name in ("gradients", "schedule"):
        file = tmp_path / f"{name}.pdf"
        assert command(name, "-o", file).output == f"Wrote {file}\n" and file.stat().st_size > 5000
    assert "minimum must be at least 0" in failure("schedule", "arcface", "--minimum", "-1")


def test_commands_on_a_run(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command("features", trained).output == f"Wrote {trained / 'features.png'}\n"
    assert command("features", trained, trained, "-o", "two.svg").output == "Wrote two.svg\n"
    assert Path("two.svg").read_text().count("digits-softmax") == 2
    assert command("hardness", trained, "--device", "cpu").output == f"Wrote {trained / 'hardness.png'}\n"
    assert command("hardness", trained, "--device", "cpu", "-o", "h.svg").exit_code == 0
    text = Path("h.svg").read_text()
    assert "digits-softmax: 379 test samples" in text and re.search(r"confidence: r = (\N{MINUS SIGN})?0\.\d\d", text)
    for name in ("features", "hardness"):
        assert "nowhere does not exist: give a folder" in failure(name, tmp_path / "nowhere")


def test_message_without_matplotlib(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib.figure")

    monkeypatch.setattr(plot_cli, "import_module", missing)
    assert "pictures need matplotlib" in failure("gradients") and "hypersphere[workbench]" in failure("gradients")

    def broken(name):
        raise ModuleNotFoundError("No module named 'other'", name="other")

    monkeypatch.setattr(plot_cli, "import_module", broken)
    assert failure("gradients") == "No module named 'other'"
