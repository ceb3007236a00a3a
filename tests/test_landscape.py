"""Loss landscapes and training dynamics: against closed forms and plain loops, and what their commands draw."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from torch import nn
from typer.testing import CliRunner

import hypersphere as hs
from hypersphere import plot, recipe
from hypersphere.cli.commands import app
from hypersphere.drawing import colour
from hypersphere.errors import ArgumentError
from hypersphere.landscape import Landscape, landscape
from hypersphere.plot import energy
from hypersphere.runs import RunError, RunFolder, load_with_data

TINY = ["train.steps=4", "train.log_every=2", "train.tensorboard=false", "model.width=4", "data.batch_size=32"]


def network():
    """Filters of several shapes, one of them zero, and parameters of normalisation."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.PReLU(4), nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 2)
    )
    with torch.no_grad():
        model[0].weight[1] = 0
        model[1].weight.uniform_(0.5, 2)
    model[5].weight.requires_grad_(False)
    return model


def moved(model, **options):
    """The directions, measured as how far parameters are from where they were: lists by parameter."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = []

    def measure():
        found.append({name: (p.detach() - before[name]).double() for name, p in model.named_parameters()})
        return 0.0

    landscape(model, measure, span=1.0, points=3, **options)
    return found


# ------------------------------------------------------------------------------------------------ closed forms


@pytest.mark.parametrize("normalise", ["filter", "layer"])
def test_squared_norm_has_a_known_landscape(normalise):
    layer = nn.Linear(7, 5, dtype=torch.float64)
    found = landscape(layer, lambda: layer.weight.square().sum(), dimensions=2, points=7, span=2.0, normalise=normalise)
    f, x = found.values["loss"].numpy(), found.coordinates.numpy()
    assert np.allclose(x, [-2, -4 / 3, -2 / 3, 0, 2 / 3, 4 / 3, 2]) and x[3] == 0
    # |w + a d + b e|^2 with |d| = |e| = |w|: whatever the directions are, mirrored points add up to this.
    size = float(layer.weight.detach().square().sum())
    total = f + f[::-1] + f[:, ::-1] + f[::-1, ::-1]
    assert np.allclose(total, 4 * size * (1 + x[:, None] ** 2 + x[None] ** 2), rtol=1e-12)
    # What is left is a (w, d), b (w, e) and ab (d, e): linear along each axis.
    rest = f - size * (1 + x[:, None] ** 2 + x[None] ** 2)
    assert np.allclose(np.diff(rest, n=2, axis=0), 0, atol=1e-10) and np.abs(rest).max() > 1e-3
    assert np.allclose(np.diff(rest, n=2, axis=1), 0, atol=1e-10)


def test_plane_of_a_quadratic_loss():
    torch.manual_seed(3)
    weight, goal = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    start = weight.clone()
    options = {"dimensions": 2, "seed": 8}
    found = landscape([weight], lambda: (weight - goal).square().mean(), points=5, span=1.5, **options)
    assert torch.equal(weight, start)
    steps = []  # the same directions, as they are drawn: at (-1, -1), (-1, 0) and so on
    landscape(
        [weight], lambda: steps.append((weight - start).numpy()) or 0.0, points=3, span=1, normalise=None, **options
    )
    second, first = steps[5], steps[7]
    w = start.numpy()
    for i, a in enumerate(np.linspace(-1.5, 1.5, 5)):
        for j, b in enumerate(np.linspace(-1.5, 1.5, 5)):
            rows = [
                w[r]
                + np.linalg.norm(w[r])
                * (a * first[r] / np.linalg.norm(first[r]) + b * second[r] / np.linalg.norm(second[r]))
                for r in range(4)
            ]
            expected = np.mean((np.stack(rows) - goal.numpy()) ** 2)
            assert float(found.values["loss"][i, j]) == pytest.approx(expected, rel=1e-12)


# ------------------------------------------------------------------------------------------------ directions


def test_filters_are_as_long_as_those_of_the_weights():
    model = network()
    for steps in (moved(model)[2], moved(model)[0], moved(model, distribution="uniform")[2]):
        assert {name for name, d in steps.items() if bool(d.any())} == {"0.weight", "4.weight"}
        for name in ("0.weight", "4.weight"):
            weight = dict(model.named_parameters())[name].detach().double()
            for d, w in zip(steps[name], weight, strict=True):
                assert float(d.norm()) == pytest.approx(float(w.norm()), rel=1e-5)
                assert w.norm() == 0 or float((d * w).sum().abs()) < 0.99 * float(w.norm()) ** 2
    assert bool((moved(model, distribution="uniform")[2]["4.weight"] >= 0).all())
    # Layers as a whole: the zero filter moves, too.
    d = moved(model, normalise="layer")[2]["0.weight"]
    assert float(d.norm()) == pytest.approx(float(model[0].weight.detach().norm()), rel=1e-5) and d[1].norm() > 0


def test_directions_as_they_are_drawn():
    model = nn.Linear(100, 100)
    gaussian = moved(model, normalise=None, seed=5)[2]["weight"]
    assert float(gaussian.std()) == pytest.approx(1, abs=0.02) and abs(float(gaussian.mean())) < 0.03
    uniform = moved(model, normalise=None, distribution="uniform")[2]["weight"]
    assert float(uniform.mean()) == pytest.approx(0.5, abs=0.01) and float(uniform.std()) == pytest.approx(
        12**-0.5, abs=0.01
    )


def test_directions_are_not_the_weights_of_the_same_seed():
    torch.manual_seed(7)
    drawn = torch.randn(20, 30)
    steps = []
    landscape([drawn], lambda: steps.append(drawn.clone()) or 0.0, points=3, seed=7)
    cosine = nn.functional.cosine_similarity((steps[2] - steps[1]).flatten(), steps[1].flatten(), dim=0)
    assert abs(float(cosine)) < 0.2


def test_vectors_move_when_asked():
    model = network()
    steps = moved(model, vectors=True)[2]
    assert not steps["5.weight"].any(), "frozen"
    for name in ("0.bias", "1.weight", "2.weight", "4.bias", "5.bias"):
        weight = dict(model.named_parameters())[name].detach()
        assert float(steps[name].norm()) == pytest.approx(float(weight.norm()), rel=1e-5), name
    assert not steps["1.bias"].any(), "zero in the weights"


def test_seeds_and_a_line_of_the_plane():
    layer = nn.Linear(5, 4)

    def run(**options):
        return landscape(layer, lambda: layer.weight.sin().sum(), points=5, **options).values["loss"]

    state = torch.get_rng_state()
    plane = run(dimensions=2, seed=3)
    assert torch.equal(torch.get_rng_state(), state), "draws are its own"
    assert torch.equal(plane, run(dimensions=2, seed=3)) and not torch.equal(plane, run(dimensions=2, seed=4))
    assert torch.equal(plane[:, 2], run(dimensions=1, seed=3))
    assert not torch.equal(plane[2], plane[:, 2]), "two directions"
    assert plane[2, 2] == layer.weight.sin().sum().double()


class Turn(nn.Module):
    """As a rotation of the library: square matrices, of which a skew map reads the strict upper triangle."""

    is_rotation = True

    def __init__(self, skew):
        super().__init__()
        self.map = SimpleNamespace(skew=skew)
        self.free = nn.Parameter(torch.randn(3, 4, 4))
        self.register_buffer("carried", torch.ones(2))


@pytest.mark.parametrize("skew", [False, True])
def test_free_matrices_move_by_columns(skew):
    turn = Turn(skew)
    step = moved(turn)[2]["free"]
    read = turn.free.detach().double()
    if skew:
        assert not step.tril().any()
        read = read.triu(1)
    for block in range(3):
        for column in range(4):
            assert float(step[block, :, column].norm()) == pytest.approx(
                float(read[block, :, column].norm()), rel=1e-5, abs=1e-12
            )


def test_carried_state_is_out_of_the_way():
    turn = Turn(True)
    carried = turn.carried
    seen = []
    landscape(turn, lambda: seen.append(turn.carried) or 0.0, points=2)
    assert seen == [None, None] and turn.carried is carried and "carried" in turn.state_dict()


# ------------------------------------------------------------------------------------------------ what stays


def test_everything_is_as_before():
    model = network()
    with torch.no_grad():
        model[4].weight[0, 0] = -0.0
        model[4].weight[0, 1] = float("nan")
    model[3].eval()
    model(torch.randn(4, 2, 3, 3))
    bits = {name: t.numpy().tobytes() for name, t in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    calls = []

    def measure():
        calls.append([m.training for m in model.modules()])
        assert not torch.is_grad_enabled()
        model(torch.randn(8, 2, 3, 3))
        if len(calls) == 3:
            raise ValueError("enough")
        return 0.0

    with pytest.raises(ValueError, match="enough"):
        landscape(model, measure, points=5)
    assert not any(map(any, calls)), "evaluation mode"
    calls.append(None)
    landscape(model, lambda: calls.append(None) or model(torch.randn(8, 2, 3, 3)).sum(), points=2, dimensions=2)
    assert {name: t.numpy().tobytes() for name, t in model.state_dict().items()} == bits
    assert [m.training for m in model.modules()] == modes and not model[3].training
    assert [p.requires_grad for p in model.parameters()].count(False) == 1


@given(st.sampled_from([torch.float16, torch.bfloat16, torch.float64]), st.integers(2, 6), st.sampled_from([1, 2]))
def test_any_precision(dtype, points, dimensions):
    layer = nn.Linear(3, 4, dtype=dtype)
    before = layer.weight.detach().clone()
    found = landscape(layer, lambda: layer.weight.double().square().sum(), points=points, dimensions=dimensions)
    assert torch.equal(layer.weight, before) and layer.weight.dtype == dtype
    values = found.values["loss"]
    assert values.dtype == torch.float64 and values.shape == (points,) * dimensions and bool(values.isfinite().all())
    size = float(before.double().square().sum())
    corner = values[(0,) * dimensions] + values[(-1,) * dimensions]  # cross terms of two directions cancel below
    if dimensions == 2:
        corner = (corner + values[0, -1] + values[-1, 0]) / 2
    rough = 1e-10 if dtype == torch.float64 else 3e-2
    assert float(corner) == pytest.approx(2 * size * (1 + dimensions * 1.5**2), rel=rough)


def test_several_measurements():
    layer = nn.Linear(2, 2)
    found = landscape(layer, lambda: {"one": 1, "norm": layer.weight.norm()}, points=3)
    assert found.dimensions == 1 and found.seed == 0 and list(found.values) == ["one", "norm"]
    assert found.values["one"].tolist() == [1, 1, 1] and not found.values["norm"].requires_grad


def test_gradients_can_be_measured():
    layer = nn.Linear(3, 2, dtype=torch.float64)

    def measure():
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(layer.weight.square().sum(), layer.weight)
        return gradient.square().sum() / 4 - layer.weight.square().sum()

    assert float(landscape(layer, measure).values["loss"].abs().max()) < 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"span": 0.0}, "span must be greater than 0"),
        ({"points": 1}, "points must be at least 2"),
        ({"dimensions": 3}, "dimensions must be 1 or 2, got 3"),
        ({"distribution": "cauchy"}, "distribution must be one of 'gaussian', 'uniform'"),
        ({"normalise": "row"}, "normalise must be one of 'filter', 'layer'"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ArgumentError, match=message):
        landscape(nn.Linear(2, 2), lambda: 0.0, **options)
    for nothing in (nn.PReLU(), []):
        with pytest.raises(ArgumentError, match="must have trainable parameters"):
            landscape(nothing, lambda: 0.0)


def test_orthogonal_network_stays_orthogonal():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    hs.orthogonal.apply(model, "cayley")
    rotation = model[0].parametrizations.weight[0]
    with torch.no_grad():
        rotation.free.copy_(torch.randn(rotation.free.shape).triu(1))
    neurons = model[0].parametrizations.weight.original.clone()
    reference = (neurons @ neurons.T).double()
    here = model[0].weight.detach().clone()
    seen = []

    def measure():
        weight = model[0].weight.double()
        seen.append(weight)
        return {"gram": (weight @ weight.T - reference).abs().max(), "moved": (weight - here).norm()}

    found = landscape(model, measure, dimensions=2, points=3)
    assert float(found.values["gram"].max()) < 1e-5
    away = found.values["moved"]
    assert float(away[1, 1]) < 1e-5 and float(away[0, 0]) > 0.3
    assert torch.equal(model[0].parametrizations.weight.original, neurons)


# ------------------------------------------------------------------------------------------------ pictures


def bowls(count, points=5, inf=False):
    x = torch.linspace(-1.5, 1.5, points, dtype=torch.float64)
    found = []
    for index in range(count):
        loss = 0.01 + (index + 1) * (x[:, None] ** 2 + 2 * x[None] ** 2)
        error = 1 - (-loss).exp()
        if inf:
            loss[0, 0] = math.inf
        found.append(Landscape(x, {"loss": loss, "error": error}, 0))
    return found


def test_surfaces_share_their_scale(tmp_path):
    figure = plot.landscapes(bowls(2), ["one", "two"])
    solid = [axes for axes in figure.axes if axes.name == "3d"]
    assert len(solid) == 4 and len(figure.axes) == 10, "two surfaces and contours of each quantity, and two colour bars"
    limits = {axes.get_title().split("\n")[1].split(":")[0]: set() for axes in solid}
    for axes in solid:
        limits[axes.get_title().split("\n")[1].split(":")[0]].add(axes.get_zlim())
    assert limits["error"] == {(0.0, 100.0)} and len(limits["loss"]) == 1
    low, high = limits["loss"].pop()
    assert (low, high) == pytest.approx((math.log10(0.01), math.log10(0.01 + 2 * 3 * 1.5**2))), (
        "a wide scale is logarithmic"
    )
    values = bowls(2)[1].values["error"]
    assert solid[3].get_title() == f"two\nerror: mean {100 * values.mean():.3g} %, trained 0.995 %"
    plot.save(figure, tmp_path / "two.png")


def test_contours_are_the_right_way_round():
    figure = plot.landscapes(bowls(1, points=21), ["one"])
    flat = next(axes for axes in figure.axes if axes.name != "3d" and axes.get_xlabel() == r"$\alpha$")
    inner = next(p for p in flat.collections[-1].get_paths() if len(p.vertices)).vertices
    # The second direction is twice as steep, so that contours are wider in the first.
    assert np.ptp(inner[:, 0]) > 1.2 * np.ptp(inner[:, 1])


@pytest.mark.parametrize("points", [2, 5])
def test_points_without_a_value_and_flat_landscapes(points, tmp_path):
    plot.save(plot.landscapes(bowls(1, points, inf=True), ["a $b"]), tmp_path / "a.png")
    x = torch.linspace(-1, 1, points)
    flat = Landscape(x, {"loss": torch.zeros(points, points), "error": torch.full((points, points), 0.9)}, 0)
    plot.save(plot.landscapes([flat], ["flat"]), tmp_path / "b.svg")
    nothing = Landscape(x, {"loss": torch.full((points,), math.nan)}, 0)
    with pytest.raises(ArgumentError, match="must have finite values, got none of 'loss'"):
        plot.landscapes([nothing], ["nothing"])
    with pytest.raises(ArgumentError, match="at least one"):
        plot.landscapes([], [])
    with pytest.raises(ArgumentError, match="same quantities"):
        plot.landscapes([flat, nothing], ["", ""])


def test_curves_along_one_direction():
    x = torch.linspace(-1, 1, 5, dtype=torch.float64)
    loss, error = x**2 + 1, x.abs() / 2
    figure = plot.landscapes([Landscape(x, {"loss": loss, "error": error}, 0)], ["run"])
    left, right = figure.axes
    assert np.allclose(left.lines[0].get_ydata(), loss) and np.allclose(right.lines[0].get_ydata(), 100 * error)
    assert (
        right.get_ylabel() == "error (%)"
        and right.get_legend().get_texts()[0].get_text() == "run: mean 30 %, trained 0 %"
    )


# ------------------------------------------------------------------------------------------------ runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished tiny run of real digits, with a running average of the weights."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    arguments = ["train", "digits-softmax", *TINY, "train.ema=0.5", "evaluate.energy=true", "--folder", str(folder)]
    done = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
    assert done.exit_code == 0, done.output
    return folder


def opened(folder):
    return load_with_data(folder)


def command(*arguments):
    return CliRunner().invoke(app, ["plot", *map(str, arguments)])


def failure(*arguments):
    done = command(*arguments)
    assert done.exit_code != 0
    return str(done.exception)


def test_middle_of_a_run_is_its_evaluation(trained):
    system, data = opened(trained)
    before = {name: t.clone() for name, t in system.weights().items()}
    found = plot.run_landscape(system, data, dimensions=2, points=3)
    metrics = RunFolder.open(trained).evaluation()["metrics"]
    assert float(found.values["error"][1, 1]) == pytest.approx(1 - metrics["accuracy"], abs=1e-9)
    assert float(found.values["loss"][1, 1]) == pytest.approx(metrics["cross_entropy"], rel=1e-5)
    assert float(found.values["loss"].min()) < float(found.values["loss"].max())
    assert all(torch.equal(before[name], t) for name, t in system.weights().items())


def test_images_of_a_run(trained, monkeypatch):
    system, data = opened(trained)
    seen = []
    original = system.model.forward
    monkeypatch.setattr(system.model, "forward", lambda x: seen.append(len(x)) or original(x))
    head = system.head.weight.detach().clone()
    part = plot.run_landscape(system, data, split="train", images=50, points=2, head=False, span=1e-3)
    assert seen == [50, 50] and torch.equal(head, system.head.weight) and system.head.weight.requires_grad
    images, labels = data.train.images, data.train.labels
    chosen = [i * len(labels) // 50 for i in range(50)]
    assert len(set(labels[chosen].tolist())) == 7
    system.model.eval()
    with torch.no_grad():
        logits = system.head.logits(original(system.preprocess(images[chosen])))
    expected = nn.functional.cross_entropy(logits, labels[chosen])
    assert float(part.values["loss"].mean()) == pytest.approx(float(expected), rel=1e-3)
    # Without the head its weights do not move.
    weights = []
    plot.run_landscape(
        system, data, images=5, points=2, head=False, progress=lambda: weights.append(system.head.weight.clone())
    )
    assert torch.equal(*weights)
    plot.run_landscape(system, data, images=5, points=2, progress=lambda: weights.append(system.head.weight.clone()))
    assert not torch.equal(*weights[2:])
    with pytest.raises(ArgumentError, match="split must be one of"):
        plot.run_landscape(system, data, split="unseen")
    with pytest.raises(ArgumentError, match="images must be at least 1"):
        plot.run_landscape(system, data, images=0)


def test_features_that_are_not_finite_are_wrong(trained, monkeypatch):
    system, data = opened(trained)
    original = system.model.forward

    def broken(x):
        features = original(x)
        features[0] = math.inf
        return features

    plain = plot.run_landscape(system, data, points=3, images=20)
    monkeypatch.setattr(system.model, "forward", broken)
    found = plot.run_landscape(system, data, points=3, images=20)
    assert found.values["loss"].tolist() == [math.inf] * 3
    assert bool(((found.values["error"] - plain.values["error"]) * 20 <= 1).all())
    assert bool((found.values["error"] >= plain.values["error"]).all())
    # Even a label of 0, which the scores of a zero feature would give.
    data.test.labels.zero_()
    assert bool((plot.run_landscape(system, data, points=3, images=1).values["error"] == 1).all())


def test_landscape_command(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = ("--points", 3, "--images", 30, "--device", "cpu")
    done = command("landscape", trained, *few, "--values", "v.json")
    assert done.stdout == f"Wrote v.json\nWrote {trained / 'landscape.png'}\n" and done.exit_code == 0
    done = command("landscape", trained, trained, *few, "--values", "new/v.npz", "-o", "two.svg", "--seed", 1)
    assert done.stdout == "Wrote new/v.npz\nWrote two.svg\n"
    assert Path("two.svg").read_text().count("digits-softmax") == 4
    one, two = json.loads(Path("v.json").read_text()), np.load("new/v.npz")
    assert one["runs"] == ["one"] and two["runs"].tolist() == ["one", "one"] and int(two["seed"]) == 1
    assert np.shape(one["loss"]) == (1, 3, 3) and two["error"].shape == (2, 3, 3)
    assert one["coordinates"] == two["coordinates"].tolist() == [-1.5, 0, 1.5]
    assert one["loss"][0][1][1] == two["loss"][1, 1, 1] and one["loss"][0][0][0] != two["loss"][1, 0, 0]
    assert np.array_equal(two["loss"][0], two["loss"][1])
    line = command("landscape", trained, *few, "--dimensions", 1, "--normalise", "none", "--no-head", "-o", "line.svg")
    assert line.exit_code == 0 and "(a) Loss" in Path("line.svg").read_text()
    assert "values must end in .npz or .json" in failure("landscape", trained, "--values", "v.txt")
    assert "dimensions must be 1 or 2" in failure("landscape", trained, "--dimensions", 3, "--device", "cpu")
    assert "does not exist" in failure("landscape", tmp_path / "nowhere")


def test_values_that_json_does_not_know(trained, tmp_path, monkeypatch):
    broken = Landscape(torch.tensor([-1.0, 0.0, 1.0]), {"loss": torch.tensor([1.0, math.inf, math.nan])}, 0)
    monkeypatch.setattr(plot, "run_landscape", lambda *a, **o: broken)
    done = command("landscape", trained, "--values", tmp_path / "v.json", "-o", tmp_path / "x.png", "--device", "cpu")
    assert done.exit_code == 0 and json.loads((tmp_path / "v.json").read_text())["loss"] == [[1.0, None, None]]


# ------------------------------------------------------------------------------------------------ dynamics


def run_of(folder, rows, overrides=(), layers=("a", "b")):
    """A run folder with these rows of metrics."""
    folder.mkdir()
    plan = recipe.load("digits-softmax", list(overrides))
    (folder / "recipe.yaml").write_text(plan.to_yaml())
    (folder / "run.json").write_text(json.dumps({"name": plan.name, "status": "finished"}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    floors = {name: {"floor": 0.1, "random": 0.5} for name in layers}
    facts = {"s": 2, "half_space": True, "angular": False, "layers": floors}
    (folder / "energy.json").write_text(json.dumps(facts))
    return folder


def rows(scale, orthogonal=None):
    found = [{"step": s, "split": "energy", "energy/a": scale / (s + 1), "energy/b": 2.0} for s in (0, 10, 20)]
    found += [{"step": s, "split": "test", "accuracy": 1 - 0.1 * scale / s} for s in (10, 20)]
    found += [{"step": s, "split": "train", "total": 1.0} for s in (10, 20)]
    if orthogonal is not None:
        found += [
            {
                "step": s,
                "split": "orthogonality",
                "orthogonality/a": s * orthogonal,
                "orthogonality/b": 0.0,
                "moved/a": 9.0,
            }
            for s in (0, 10, 20)
        ]
    return found


def drawn(axes, index):
    (line,) = [line for line in axes.lines if to_hex(line.get_color()) == colour(index)]
    return line.get_xdata(), line.get_ydata()


def test_dynamics(tmp_path):
    one = run_of(tmp_path / "one", rows(1.0), ["seed=1"])
    two = run_of(tmp_path / "two", rows(3.0), ["seed=2"])
    other = run_of(tmp_path / "other", rows(2.0, orthogonal=1e-7), ["optimiser.lr=0.07"])
    figure = plot.dynamics([one, other, two])
    left, middle, right = figure.axes
    x, y = drawn(left, 0)
    assert list(x) == [0, 10, 20] and np.allclose(y, [2 / (s + 1) + 2 for s in x])
    assert left.get_ylabel() == "energy (s = 2, half space)"
    band = left.collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx(5) and band[:, 1].min() == pytest.approx(1 / 21 + 2)
    assert len(left.collections) == 1, "one run has no band"
    x, y = drawn(middle, 0)
    assert list(x) == [10, 20] and np.allclose(y, [2, 1])
    x, y = drawn(right, 1)
    assert np.isnan(y[0]) and np.allclose(y[1:], [1e-6, 2e-6]) and right.get_yscale() == "log"
    assert right.get_ylim() == pytest.approx((1e-6, 1e-5))
    assert [t.get_text() for t in figure.legends[0].get_texts()] == [
        "digits-softmax, one (2 runs)",
        "digits-softmax, other",
    ]
    figure = plot.dynamics([one, two], layers=True)
    assert [axes.get_title(loc="left") for axes in figure.axes][1:] == ["(b) Test error", "a", "b"]
    assert (
        np.allclose(drawn(figure.axes[3], 0)[1], 2)
        and figure.legends[0].get_texts()[0].get_text() == "digits-softmax (2 runs)"
    )
    plot.save(figure, tmp_path / "x.png")


def test_dynamics_of_runs_without_some_quantity(tmp_path):
    tests = run_of(tmp_path / "tests", [row for row in rows(1.0) if row["split"] == "test"])
    figure = plot.dynamics([tests], layers=True)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["(a) Test error"]
    # Rotations that have not moved from the identity have no error that a logarithm could show.
    still = run_of(tmp_path / "still", rows(1.0, orthogonal=0.0))
    assert len(plot.dynamics([still]).axes) == 2
    wide = [f"layer{i}" for i in range(energy.COLUMNS + 1)]
    many = [{"step": 0, "split": "energy"} | {f"energy/{name}": 1.0 for name in wide}]
    figure = plot.dynamics([tests, run_of(tmp_path / "many", many, ["seed=4"], wide)], layers=True)
    assert len(figure.axes) == 2 + len(wide)
    nothing = run_of(tmp_path / "nothing", [row for row in rows(1.0) if row["split"] == "train"])
    with pytest.raises(RunError, match=r"evaluate\.energy=true"):
        plot.dynamics([nothing])
    with pytest.raises(ArgumentError, match="at least one folder"):
        plot.dynamics([])


def test_dynamics_command(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command("dynamics", trained).output == f"Wrote {trained / 'dynamics.png'}\n"
    assert command("dynamics", trained, "--layers", "-o", "d.svg").output == "Wrote d.svg\n"
    text = Path("d.svg").read_text()
    assert "Energy, sum over the hidden layers" in text and "features.0" in text and "Orthogonality" not in text
