"""Every loss trains handwritten digits from its recipe, every recipe can start, and the pages on losses hold."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from pathlib import Path

import pytest
import torch

from helpers.paths import ROOT
from hypersphere import recipe
from hypersphere.data import Dataset, TensorSplit
from hypersphere.losses import MarginSoftmax, binary_margin, losses
from hypersphere.losses import head as head_module
from hypersphere.models import models
from hypersphere.runs import RunFolder
from hypersphere.train import Trainer, trainer

CPU = torch.device("cpu")
EMBEDDED = list(recipe.embedded())

# Losses that have no margin between classes; every other one must show one at the end of its training.
WITHOUT_MARGIN = {"softmax", "w-softmax", "s-softmax", "normface", "hinge", "center"}
OF_PAIRS = {"contrastive", "triplet"}  # their margin is a distance between features, not an angle


def recipe_of(loss: str) -> recipe.Recipe:
    """The loss' own recipe where it has one, else the common recipe with the loss put in."""
    own = f"digits-64-{loss}"
    return recipe.load(own) if own in EMBEDDED else recipe.load("digits-64", [f"loss.name={loss}"])


def train(plan: recipe.Recipe, folder: Path) -> Trainer:
    return Trainer(plan, RunFolder.create(folder, plan, CPU), CPU)


def margin_in_degrees(head: MarginSoftmax, between: float = 90.0) -> float:
    """Angle between the regions of two classes, with the margin as it is annealed now."""
    theta = math.radians(between)

    def ahead(own: torch.Tensor) -> torch.Tensor:
        return head.psi(own) - head.eta(theta - own, target=math.cos(float(own)))

    with torch.no_grad():
        return math.degrees(binary_margin(ahead, theta, torch.zeros_like))


# ------------------------------------------------------------------------------------------------ training


@pytest.mark.slow
@pytest.mark.parametrize("loss", sorted(set(losses) - {"gan"}))  # which is for models of two players
def test_every_loss_learns_digits_with_its_margin_in_force(loss, tmp_path, capsys):
    plan = recipe_of(loss)
    assert plan.loss.name == loss and plan.model.options["dim"] == 64 and not plan.data.hold_out
    run = train(plan, tmp_path / "run")
    metrics = run.fit()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    values = [row["total"] for row in rows if row["split"] == "train"]
    head = run.head
    weight = None if head.annealer is None else float(head.annealer.value())
    margin = math.nan if loss == "triplet" else margin_in_degrees(head)  # it has no target value
    with capsys.disabled():
        shown = "no annealing" if weight is None else f"lambda {weight:.4f}"
        print(f"\n{loss:18} accuracy {metrics['accuracy']:.2%}, {shown}, margin {margin:.1f} degrees at 90", end="")
    assert metrics["accuracy"] > 0.95
    assert values and all(math.isfinite(value) for value in values) and values[-1] < values[0]
    assert weight is None or weight < 10
    if loss in OF_PAIRS:
        assert head.m > 0
    elif loss in WITHOUT_MARGIN:
        assert margin == pytest.approx(0, abs=1e-6)
    else:
        assert margin > 10


# ------------------------------------------------------------------------------------------------ building


@pytest.mark.parametrize("loss", losses)
def test_every_loss_has_a_recipe(loss):
    plan = recipe_of(loss)
    head = plan.build(losses, ("loss",), plan.model.options["dim"], 10)
    assert type(head) is losses[loss].factory


SHAPES = {"digits": (1, 8, 8), "mnist": (1, 28, 28), "cifar10": (3, 32, 32), "cifar100": (3, 32, 32)}


CLASSIFIERS = [name for name in EMBEDDED if (plan := recipe.load(name)).data.name in SHAPES and plan.loss.name != "gan"]


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_every_recipe_loads_and_its_head_takes_what_its_model_gives(name):
    plan = recipe.load(name)
    shape = SHAPES[plan.data.name]
    model = plan.build(models, ("model",), shape)
    head = plan.build(losses, ("loss",), model.dim, 10)
    loss = head(model(torch.randn(4, *shape)), torch.tensor([0, 1, 2, 9]))
    assert loss.isfinite() and loss > 0


LONG = [name for name in EMBEDDED if name.endswith("-softmax") and not name.startswith("digits-")]


def test_the_long_recipes_are_found():
    assert {"mnist-l-softmax", "cifar10-l-softmax", "cifar10-a-softmax", "cifar10-ga-softmax"} <= set(LONG)


def random_images(plan, monkeypatch):
    """Noise in place of the recipe's data, a few samples of each class."""
    draw = torch.Generator().manual_seed(0)

    def split(count: int) -> TensorSplit:
        images = torch.randint(256, (count, *SHAPES[plan.data.name]), generator=draw, dtype=torch.uint8)
        return TensorSplit(images, torch.arange(count) % 10)

    data = Dataset(plan.data.name, tuple(map(str, range(10))), split(20), split(10))
    monkeypatch.setattr(trainer, "load_data", lambda *args, **options: data)


@pytest.mark.parametrize("name", LONG)
def test_recipes_of_published_tasks_take_two_steps(name, tmp_path, monkeypatch):
    shrunk = ["train.steps=2", "train.tensorboard=false", "data.batch_size=4", "evaluate.batch_size=5"]
    plan = recipe.load(name, shrunk)
    random_images(plan, monkeypatch)
    run = train(plan, tmp_path / "run")
    assert 0 <= run.fit()["accuracy"] <= 1
    assert run.head.annealer is None or int(run.head.annealer.steps) == 2


@pytest.mark.parametrize("name", ["mnist-l-softmax", "cifar10-l-softmax"])
def test_large_published_rates_do_not_blow_the_features_up(name, tmp_path, monkeypatch):
    """At a rate of 0.1 a last layer without normalisation does, within ten steps."""
    shrunk = ["train.steps=8", "train.tensorboard=false", "data.batch_size=16", "train.log_every=1"]
    plan = recipe.load(name, [*shrunk, "evaluate.every=100"])
    random_images(plan, monkeypatch)
    run = train(plan, tmp_path / "run")
    run.fit()
    assert max(row["total"] for row in run.run.rows() if row["split"] == "train") < 15


# Lambda after some steps, from the published schedules: 1000 (1 + gamma t)^-power, at least the minimum.
@pytest.mark.parametrize(
    ("name", "step", "expected"),
    [
        ("mnist-l-softmax", 10_000, 0.405648192073),
        ("cifar10-l-softmax", 10_000, 1000 * 1.2**-45),
        ("cifar10-a-softmax", 1000, 8.26446280992),
        ("cifar10-a-softmax", 64_000, 5.0),
        ("digits-64-l-softmax", 200, 1000 * 1.45**-35),
    ],
)
def test_lambda_follows_the_published_schedule(name, step, expected):
    annealer = recipe.load(name).build(losses, ("loss",), 8, 10).annealer
    assert float(annealer.value(torch.tensor(step))) == pytest.approx(expected, rel=1e-4)


# ------------------------------------------------------------------------------------------------ pages

PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("losses", "scale_and_margin")}


def printed(page: str) -> list[str]:
    """Lines that the page's Python blocks print, run one after the other."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        for block in blocks:
            exec(compile(block, f"docs/{page}.md", "exec"), names)
    return output.getvalue().splitlines()


@pytest.mark.parametrize("page", PAGES)
def test_code_of_the_pages_runs_and_prints_what_stands_there(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = PAGES[page].splitlines()
    for line in printed(page):
        assert line in lines, line


@pytest.mark.parametrize("page", PAGES)
def test_links_and_images_of_the_pages_exist(page):
    targets = re.findall(r"\]\(([^)#]+)\)", PAGES[page])
    assert targets
    for target in targets:
        assert target.startswith("https://") or (ROOT / "docs" / target).exists(), target


def test_numbers_of_classes_at_which_the_path_changes_are_those_of_the_code():
    (sentence,) = re.findall(r"`\"auto\"`, the default, (.*?)\.\n", PAGES["losses"], re.DOTALL)
    expected = [head_module.COMPILED_FROM, head_module.CHUNKED_FROM["cpu"], head_module.CHUNKED_FROM["cuda"]]
    assert [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]+", sentence)] == expected


COMMANDS = [line for page in PAGES.values() for line in re.findall(r"^hypersphere train (.*)$", page, re.MULTILINE)]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_of_the_pages_name_recipes_and_options_that_exist(line):
    name, *overrides = line.split("#")[0].split()
    assert recipe.load(name, overrides).name == name


@pytest.mark.parametrize("loss", sorted(set(losses) - {"gan"}))  # which is on the page on generation
def test_the_table_of_losses_has_every_name_alias_and_default(loss):
    (row,) = re.findall(rf"^\| `{re.escape(loss)}`.*$", PAGES["losses"], re.MULTILINE)
    entry = losses[loss]
    shared = set(MarginSoftmax.shared_options) - {"gradient"}
    for alias in entry.aliases:
        assert f"`{alias}`" in row
    for option in entry.options:
        if option.name not in shared and (option.name != "gradient" or option.default != "exact"):
            assert f"`{option}`" in row, str(option)


def test_the_page_names_the_recipes_that_exist():
    named = set(re.findall(r"`((?:digits|mnist|cifar10)-[a-z0-9-]+)`", PAGES["losses"]))
    assert named == {"digits-64", *LONG, *(name for name in EMBEDDED if name.startswith("digits-64-"))}
