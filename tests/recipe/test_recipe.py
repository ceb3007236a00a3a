"""Recipes: every mistake with its place, inheritance, overrides, round trips and hashes."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import yaml

from hypersphere import recipe
from hypersphere.data import datasets
from hypersphere.energy import energies
from hypersphere.losses import LambdaAnnealer, losses
from hypersphere.models import models
from hypersphere.nn import operators
from hypersphere.recipe import RecipeError
from hypersphere.recipe.text import Loader


@pytest.fixture
def write(tmp_path: Path):
    """Writes a recipe file and returns its path."""

    def save(text: str, name: str = "recipe.yaml") -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return file

    return save


def mistakes(file: Path | str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        recipe.load(file, overrides)
    return str(caught.value).splitlines()


def one_mistake(file: Path | str, *overrides: str) -> str:
    found = mistakes(file, *overrides)
    assert len(found) == 1, found
    return found[0]


# ------------------------------------------------------------------------------------------------ mistakes

TOP = (
    "name, help, seed, plugins, data, model, loss, optimiser, schedule, train, evaluate, convert, project, "
    "regularisers, orthogonal, adversary, batch_norm, early_stop"
)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        pytest.param(
            "seed: 1\nlos: {name: arcface}\n",
            2,
            f"los is not a known key. Did you mean 'loss'? Allowed: {TOP}",
            id="unknown key at the top",
        ),
        pytest.param("zzz: 1\n", 1, f"zzz is not a known key. Allowed: {TOP}", id="nothing near"),
        pytest.param(
            "schedule:\n  name: cosine\n  warm: 4\n",
            3,
            "schedule.warm is not a known key. Did you mean 'warmup'? Allowed: final, milestones, factor, warmup",
            id="unknown key in a section",
        ),
        pytest.param(
            "data:\n  augment:\n    flipp: true\n",
            3,
            "data.augment.flipp is not a known key. Did you mean 'flip'? Allowed: crop, crop_mode, flip, "
            "vertical_flip, rotate, tilt, scale, shift, jitter, shuffle, parts",
            id="unknown key in a nested section",
        ),
        pytest.param(
            "model:\n  name: digits-cnn\n  widht: 3\n",
            3,
            "model.widht is not a known key. Did you mean 'width'? Allowed: dim, width, conv, linear, norm, act",
            id="unknown option of a part",
        ),
        pytest.param(
            "data:\n  batchsize: 3\n",
            2,
            "data.batchsize is not a known key. Did you mean 'batch_size'? Allowed: test_fraction, split_seed, "
            "batch_size, hold_out, imbalance, validation, normalise, augment, workers",
            id="own keys of a part are allowed beside its options",
        ),
        pytest.param(
            "regularisers:\n  - name: mhe\n    weigth: 3\n",
            3,
            "regularisers.0.weigth is not a known key. Did you mean 'weight'? "
            f"Allowed: {', '.join(option.name for option in energies['mhe'].options)}, "
            "weight, target, schedule, layers",
            id="unknown option of a regulariser",
        ),
        pytest.param(
            "convert:\n  name: tanh\n  radios: 3\n",
            3,
            "convert.radios is not a known key. Did you mean 'radius'? Allowed: angular, weighting, eps, alpha, k, "
            "learn_k, k_param, weighted_gradients, radius, learn_radius, mean_norm, mean_decay, mean_init, "
            "detach_mean, types, include, exclude, skip",
            id="unknown option of an operator",
        ),
        pytest.param(
            "convert:\n  name: sphere\n  radius: 3\n",
            3,
            "convert.radius is not a known key. Allowed: angular, weighting, eps, alpha, k, learn_k, k_param, "
            "weighted_gradients, types, include, exclude, skip",
            id="option of another operator",
        ),
        pytest.param(
            "convert:\n  name: tanh\n  skip: [lost]\n",
            3,
            "convert.skip.0 should be 'first', 'output', 'last' or 'shortcut', got 'lost'",
            id="place to skip",
        ),
        pytest.param(
            "convert:\n  name: tanh\n  radius: 0\n",
            3,
            "convert.radius must be greater than 0.0001, got 0.0",
            id="range of the operator itself",
        ),
        pytest.param(
            "convert:\n  name: tanh\n  k: 0.3\n",
            3,
            "convert.k is the steepness of the angular function 'sigmoid', got it with Cosine()",
            id="option that takes another",
        ),
        pytest.param(
            "convert:\n  angular: sigmoit\n  name: tanh\n",
            2,
            "convert.angular unknown angular function 'sigmoit'. Did you mean 'sigmoid'?",
            id="unknown angular function",
        ),
        pytest.param(
            "convert: {name: tanh, weighting: joint}\nproject:\n  every: 10\n",
            3,
            "project.every must be 0 with convert.weighting = 'joint', where the norm of the kernels counts",
            id="projection of kernels whose norm counts",
        ),
        pytest.param(
            "project: {every: -1}\n", 1, "project.every should be greater than or equal to 0", id="projection"
        ),
        pytest.param(
            "loss:\n  name: arcface\n  annealer:\n    base: 3\n    gama: 2\n",
            5,
            "loss.annealer.gama is not a known key. Did you mean 'gamma'? Allowed: base, gamma, power, minimum, start",
            id="unknown key of an annealer",
        ),
        pytest.param(
            "seed: 1\ntrain:\n  steps: many\n",
            3,
            "train.steps should be a valid integer, unable to parse string as an integer, got 'many'",
            id="wrong type",
        ),
        pytest.param(
            "train:\n\n  tensorboard: 3\n", 3, "train.tensorboard should be a valid boolean", id="wrong boolean"
        ),
        pytest.param("seed: 1\ntrain: 3\n", 2, "train should be a valid dictionary", id="value for a section"),
        pytest.param("loss: arcfase\n", 1, "loss.name unknown loss 'arcfase'. Did you mean", id="bare name for a part"),
        pytest.param("seed: 0\nloss:\n  m: 3\n", 2, "loss.name is missing", id="part without a name"),
        pytest.param("model: {name: digits-cnn, dim: x}\n", 1, "model.dim should be a valid integer", id="option type"),
        pytest.param("train:\n  steps: 0\n", 2, "train.steps should be greater than or equal to 1, got 0", id="range"),
        pytest.param("seed: -1\n", 1, "seed should be greater than or equal to 0, got -1", id="range at the top"),
        pytest.param(
            "optimiser:\n  betas: [0.9, 1.0]\n", 2, "optimiser.betas.1 should be less than 1, got 1.0", id="in a tuple"
        ),
        pytest.param("optimiser:\n  betas: [0.9]\n", 2, "optimiser.betas.1 is missing", id="tuple too short"),
        pytest.param(
            "optimiser:\n  lr: .nan\n", 2, "optimiser.lr should be a finite number, got nan", id="not a number"
        ),
        pytest.param(
            "schedule:\n  name: stepz\n",
            2,
            "schedule.name unknown schedule 'stepz'. Did you mean 'steps'? Known: constant, cosine, linear, steps",
            id="choice",
        ),
        pytest.param(
            "loss:\n  name: arcface\n  m: 9\n",
            3,
            "loss.m must be at least 0 and at most 3.14159, got 9.0",
            id="range of the head itself",
        ),
        pytest.param(
            "loss:\n  name: arcface\n  annealer:\n    gamma: 1\n    base: -1\n",
            5,
            "loss.annealer.base must be at least 0, got -1.0",
            id="range of the annealer itself",
        ),
        pytest.param(
            "regularisers:\n  - {name: mhe, s: 1}\n  - name: mhe\n    s: -1\n",
            4,
            "regularisers.1.s must be at least 0, got -1.0",
            id="range of the energy itself",
        ),
        pytest.param("seed: 1\n\nseed: 2\n", 3, "seed is given twice, first on line 1", id="key twice"),
        pytest.param(
            "train:\n  steps: 1\n  ema: 0.9\n  steps: 2\n",
            4,
            "train.steps is given twice, first on line 2",
            id="key twice in a section",
        ),
        pytest.param("seed: 1\ntrain: [1\nname: x\n", 3, "not valid YAML: expected ',' or ']'", id="invalid YAML"),
        pytest.param("seed: 1\na: b: c\n", 2, "not valid YAML: mapping values are not allowed here", id="two colons"),
        pytest.param(
            "x: !!python/object:os.system {}\n", 1, "not valid YAML: could not determine a constructor", id="unsafe tag"
        ),
        pytest.param("seed: 1\n2: 3\n", 2, "2 keys should be strings", id="number as a key"),
        pytest.param("train:\n  2: 3\n", 2, "train.2 keys should be strings", id="number as a key in a section"),
        pytest.param("seed: 1\nname: a b\n", 2, "name string should match pattern", id="name"),
        pytest.param(
            "schedule:\n  name: steps\n", 1, "schedule.milestones must be given for the schedule 'steps'", id="no steps"
        ),
        pytest.param(
            "schedule:\n  milestones: [3, 2]\n", 2, "schedule.milestones must increase, got [3, 2]", id="order of steps"
        ),
        pytest.param(
            "optimiser:\n  momentum: 0\n  nesterov: true\n",
            3,
            "optimiser.nesterov needs optimiser.momentum above 0",
            id="nesterov",
        ),
        pytest.param(
            "loss:\n  name: cosface\n  reduction: none\n",
            3,
            "loss.reduction must be 'mean' or 'sum' for training",
            id="no single loss",
        ),
        pytest.param(
            "loss:\n  name: cosface\n  sample_rate: 0.5\n  sparse: true\noptimiser:\n  name: adam\n",
            6,
            "optimiser.name must be one of sgd, adamw for loss.sparse=true, got 'adam'",
            id="sparse gradient",
        ),
        pytest.param(
            "schedule:\n  warmup: 11\ntrain:\n  steps: 10\n",
            2,
            "schedule.warmup must not exceed train.steps = 10, got 11",
            id="warm-up",
        ),
    ],
)
def test_mistake_names_file_line_key_and_remedy(write, text, line, message):
    file = write(text)
    found = one_mistake(file)
    assert found.startswith(f"{file}, line {line}: {message}"), found
    if "Allowed:" in message:
        assert found == f"{file}, line {line}: {message}"


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("data:\n  name: digit\n", "data.name", "unknown dataset 'digit'. Did you mean 'digits'? Known: "),
        ("model:\n  name: plain_cn\n", "model.name", "unknown model 'plain_cn'. Did you mean 'plain-cnn'? Known: "),
        ("loss:\n  name: arcfase\n", "loss.name", "unknown loss 'arcfase'. Did you mean 'arcface'? Known: "),
        ("convert:\n  name: tahn\n", "convert.name", "unknown operator 'tahn'. Did you mean 'tanh'? Known: "),
        ("regularisers:\n- name: mhee\n", "regularisers.0.name", "unknown energy 'mhee'. Did you mean 'mhe'? Known: "),
        (
            "evaluate:\n  metrics: [angels]\n",
            "evaluate.metrics.0",
            "unknown evaluation 'angels'. Did you mean 'angles'? Known: ",
        ),
    ],
)
def test_unknown_part(write, text, key, message):
    file = write(text)
    found = one_mistake(file)
    assert found.startswith(f"{file}, line 2: {key} {message}")
    registry = {"data": datasets, "model": models, "loss": losses, "convert": operators}.get(key.split(".")[0])
    if registry is not None:
        assert found.endswith(", ".join(registry))


def test_a_recipe_is_a_mapping(write):
    assert one_mistake(file := write("- 1\n")) == f"{file}: a recipe is a mapping of keys to values, got list"
    assert one_mistake(file := write("hello")) == f"{file}: a recipe is a mapping of keys to values, got str"


def test_value_that_is_none_of_several_types(write):
    file = write("data:\n  hold_out:\n    - 1\n    - [2]\n")
    kinds = ("integer", "string")
    assert mistakes(file) == [f"{file}, line 4: data.hold_out.1 should be a valid {kind}, got [2]" for kind in kinds]


def test_empty_file_is_all_defaults(write):
    assert recipe.load(write("")).model_dump() == recipe.check({}).model_dump()
    assert recipe.load(write("# nothing\n")).hash == recipe.check({}).hash


def test_all_mistakes_are_reported(write):
    file = write("""\
        seed: x
        trian: {}
        train:
          steps: 0
          stepz: 1
        schedule: {factor: 2}
    """)
    starts = [found.split(" ", 4)[:4] for found in mistakes(file)]
    assert sorted(starts) == sorted(
        [str(file) + ",", "line", f"{line}:", key]
        for line, key in ((1, "seed"), (2, "trian"), (4, "train.steps"), (5, "train.stepz"), (6, "schedule.factor"))
    )


def test_all_mistakes_in_parts_are_reported(write):
    file = write("""\
        data: {name: digit}
        model: {name: digits-cnn, wdth: 3, dim: x}
        loss: {name: arcface, q: 1, s: y}
        regularisers: [{name: mhe, t: 1}, {name: mh}]
        evaluate: {metrics: [angels, energie]}
        optimiser: {momentum: 0, nesterov: true}
    """)
    keys = [found.removeprefix(f"{file}, line ").split(" ")[1] for found in mistakes(file)]
    parts = ["data.name", "model.wdth", "model.dim", "loss.q", "loss.s", "regularisers.0.t", "regularisers.1.name"]
    assert sorted(keys) == sorted([*parts, "evaluate.metrics.0", "evaluate.metrics.1", "optimiser.nesterov"])


def test_unknown_recipe_names_the_nearest():
    message = one_mistake("digits-arcfac")
    assert message.startswith("no recipe file or embedded recipe 'digits-arcfac'. Did you mean 'digits-arcface'?")
    assert message.endswith(f"Embedded: {', '.join(recipe.embedded())}")


def test_binary_file(tmp_path):
    file = tmp_path / "model.bin"
    file.write_bytes(b"\xff\xfe\x00\x80")
    assert one_mistake(file).startswith(f"{file} cannot be read as text: ")


def test_check_without_places_names_the_key_alone():
    with pytest.raises(RecipeError, match=r"^train\.steps should be greater than or equal to 1, got 0$"):
        recipe.check({"train": {"steps": 0}})
    with pytest.raises(RecipeError, match=r"^data\.hold_out\.0 should be a valid integer, got \[1\]\n"):
        recipe.check({"data": {"hold_out": [[1]]}})


def test_a_bad_size_found_when_a_part_is_built_is_blamed_on_its_line(write):
    plan = recipe.load(file := write("seed: 1\nmodel:\n  name: plain-cnn\n  dim: 0\n"))
    with pytest.raises(RecipeError) as caught:
        plan.build(models, ("model",), (3, 32, 32))
    assert str(caught.value) == f"{file}, line 4: model.dim must be at least 1, got 0"


def test_build_makes_nested_modules(write):
    plan = recipe.load(write("loss: {name: arcface, m: 0.25, annealer: {base: 7}}\n"))
    head = plan.build(losses, ("loss",), 4, 5)
    assert (head.dim, head.classes, head.m) == (4, 5, 0.25)
    assert isinstance(head.annealer, LambdaAnnealer) and (head.annealer.base, head.annealer.gamma) == (7, 0.12)
    assert plan.loss.options["annealer"]["base"] == 7  # building does not change the recipe


# --------------------------------------------------------------------------------------------- inheritance


def test_base_in_another_file_is_relative_to_the_recipe(write, monkeypatch):
    write("seed: 3\ntrain: {steps: 7, log_every: 2}\nloss: {name: arcface, m: 0.2, s: 8}\n", "shared/base.yaml")
    file = write("base: ../shared/base.yaml\ntrain: {steps: 9}\nloss: {m: 0.3}\n", "mine/recipe.yaml")
    monkeypatch.chdir("/")
    plan = recipe.load(file)
    assert (plan.seed, plan.train.steps, plan.train.log_every) == (3, 9, 2)
    assert plan.loss.name == "arcface" and plan.loss.options["m"] == 0.3 and plan.loss.options["s"] == 8


def test_embedded_base_and_a_new_part_without_the_old_options(write):
    plan = recipe.load(write("base: digits-arcface\nloss: {name: a-softmax}\ndata: {name: cifar10}\n"))
    base = recipe.load("digits-arcface")
    own = {option.name: option.default for option in losses["a-softmax"].options}
    assert plan.loss.options == own  # its own defaults, nothing of arcface's
    assert own["m"] == 4 and own["annealer"] is None and base.loss.options["annealer"] is not None
    assert plan.data.hold_out == base.data.hold_out != () and plan.data.batch_size == base.data.batch_size
    assert plan.optimiser == base.optimiser and plan.train == base.train


def test_lists_are_replaced_not_merged(write):
    plan = recipe.load(write("base: digits-softmax\nschedule: {milestones: [5]}\nregularisers: [{name: mhe}]\n"))
    assert plan.schedule.milestones == (5,) and plan.schedule.name == "steps"
    assert [part.options["s"] for part in plan.regularisers] == [2.0]


def test_mistake_in_the_base_is_placed_there(write):
    parent = write("seed: 1\ntrain:\n  stepz: 3\n", "base.yaml")
    child = write("base: base.yaml\ntrain:\n  stepps: 4\n")
    assert [text.split(": ")[0] for text in mistakes(child)] == [f"{parent}, line 3", f"{child}, line 3"]


def test_mistake_that_replaces_a_value_of_the_base_is_placed_in_the_recipe(write):
    write("train:\n  steps: 5\n", "base.yaml")
    file = write("base: base.yaml\nseed: 1\ntrain:\n  steps: 0\n")
    assert one_mistake(file).startswith(f"{file}, line 4: train.steps should be")


def test_missing_base_is_placed_and_named(write):
    file = write("seed: 1\nbase: digits-arcfac\n")
    assert one_mistake(file).startswith(
        f"{file}, line 2: base: no recipe file or embedded recipe 'digits-arcfac'. Did you mean 'digits-arcface'?"
    )


def test_circular_base(write):
    one, two = write("base: two.yaml\n", "one.yaml"), write("base: one.yaml\n", "two.yaml")
    assert one_mistake(one) == f"{one}: recipes inherit in a circle: {one} -> {two} -> {one}"


def test_circular_base_through_other_spellings_of_the_path(write):
    file = write("base: ../here/recipe.yaml\n", "here/recipe.yaml")
    assert one_mistake(file) == f"{file}: recipes inherit in a circle: {file} -> {file}"


# ----------------------------------------------------------------------------------------------- overrides


def test_overrides_reach_every_depth():
    changes = ["seed=7", "train.steps=20", "data.augment.flip=true", "loss.annealer.base=12", "train.capture=false"]
    plan = recipe.load("digits-arcface", [*changes, "data.hold_out=[1, '2']", "train.clip_norm=null", "help=a b"])
    assert (plan.seed, plan.train.steps, plan.data.augment.flip, plan.train.capture) == (7, 20, True, False)
    assert plan.loss.options["annealer"] == recipe.load("digits-arcface").loss.options["annealer"] | {"base": 12.0}
    assert plan.data.hold_out == (1, "2") and plan.train.clip_norm is None and plan.help == "a b"


def test_override_by_list_index():
    lists = ["regularisers=[{name: mhe, weight: 2}, {name: mhe}]"]
    plan = recipe.load("digits-softmax", [*lists, "regularisers.1.weight=3", "data.hold_out.0=4"])
    assert [part.weight for part in plan.regularisers] == [2, 3]
    assert plan.data.hold_out == (4, 8, 9)


def test_another_name_drops_the_options_of_the_old_part_but_keeps_the_own_fields(write):
    file = write(
        "data: {name: digits, test_fraction: 0.2, batch_size: 7, workers: 2}\n"
        "regularisers: [{name: mhe, s: 1, weight: 4, target: head}]\noptimiser: {name: sgd, lr: 0.3}\n"
    )
    plan = recipe.load(file, ["data.name=image-folder", "data.path=here", "data.size=[3, 4]", "optimiser.name=adam"])
    assert plan.data.batch_size == 7 and plan.data.workers == 2
    options = {"path": "here", "size": (3, 4), "test_fraction": 0.3, "split_seed": 0, "stretch": None}
    assert plan.data.options == options
    assert plan.optimiser.name == "adam" and plan.optimiser.lr == 0.3
    same = recipe.load(file, ["data.name=digits"])
    assert same.data.options["test_fraction"] == 0.2
    regulariser = recipe.load(file, ["regularisers.0.name=MHE"]).regularisers[0]
    assert (regulariser.weight, regulariser.target, regulariser.options["s"]) == (4, "head", 2.0)


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss.name=arcface", "loss.s=8", "loss.annealer.base=3"],
        ["loss.s=8", "loss.annealer.base=3", "loss.name=arcface"],
    ],
)
def test_options_given_by_override_survive_a_new_name_in_any_order(overrides):
    plan = recipe.load("digits-a-softmax", overrides)
    assert plan.loss.options["s"] == 8 and plan.loss.options["m"] == 0.5 and plan.loss.options["annealer"]["base"] == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loss.m", "write key=value, for example loss.m=0.3"),
        ("=3", "write key=value, for example loss.m=0.3"),
        ("loss.m=[1", "expected ',' or ']', but got '<stream end>'"),
        ("seed.x=3", "seed is a value, not a section"),
        ("loss.s.x.y=3", "loss.s is a value, not a section"),
        ("data.hold_out.3=1", "data.hold_out is a list of 3, got the index 3"),
        ("data.hold_out.x=1", "data.hold_out is a list of 3, got the index 'x'"),
        ("data.hold_out.5.0=1", "data.hold_out is a list of 3, got the index 5"),
        ("data.hold_out.²=1", "data.hold_out is a list of 3, got the index '²'"),
        (
            "train.stepz=3",
            "train.stepz is not a known key. Did you mean 'steps'? Allowed: steps, precision, channels_last, compile, "
            "capture, clip_norm, ema, log_every, checkpoint_every, keep_checkpoints, tensorboard",
        ),
        ("loss.annealer.bas=3", "loss.annealer.bas is not a known key. Did you mean 'base'?"),
        ("loss.m=9", "loss.m must be at least 0 and at most 3.14159, got 9.0"),
        ("loss.annealer.base=-1", "loss.annealer.base must be at least 0, got -1.0"),
        ("loss={name: arcface, m: 9}", "loss.m must be at least 0"),
        ("train={stepz: 3}", "train.stepz is not a known key. Did you mean 'steps'?"),
        ("regularisers=[{name: mhe, weight: -1}]", "regularisers.0.weight should be greater than or equal to 0"),
        ("evaluate.metrics=[angels]", "evaluate.metrics.0 unknown evaluation 'angels'. Did you mean 'angles'?"),
        ("seed=", "seed should be a valid integer, got None"),
        ("loss.name=arcfase", "loss.name unknown loss 'arcfase'. Did you mean 'arcface'?"),
    ],
)
def test_bad_override_is_quoted(override, message, write):
    file = write("base: digits-arcface\nevaluate:\n  metrics: [energy]\n")  # the list has places of its own
    assert one_mistake(file, override).startswith(f"override {override!r}: {message}")


def test_list_index_into_nothing_blames_the_override(write):
    file = write("data: {name: digits}\n")
    override = "data.hold_out.0=3"
    assert one_mistake(file, override).startswith(f"override {override!r}: data.hold_out should be a valid tuple")


def test_option_for_a_part_that_has_no_name_yet(write):
    assert one_mistake(write("seed: 1\n"), "loss.m=0.3") == "override 'loss.m=0.3': loss.name is missing"


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 0.001), ("5E-4", 0.0005), ("+2e2", 200.0), (".5e1", 5.0), ("1.e1", 10.0), ("3", 3.0)]
)
def test_numbers_with_exponents_are_numbers(write, text, value):
    assert recipe.load(write(f"optimiser:\n  lr: {text}\n")).optimiser.lr == value
    assert recipe.load("digits-softmax", [f"optimiser.lr={text}"]).optimiser.lr == value
    # Pydantic would also read the text "1e-3": where text is allowed, it must be a number all the same.
    part = recipe.load("digits-softmax", ["regularisers=[{name: mhe}]", f"regularisers.0.s={text}"]).regularisers[0]
    assert part.options["s"] == value


def test_exponents_are_read_as_floats_by_the_loader_itself():
    assert yaml.load("1e-3", Loader=Loader) == 0.001
    assert yaml.load("e-3", Loader=Loader) == "e-3"
    assert yaml.load("12", Loader=Loader) == 12


# ------------------------------------------------------------------------------------------ the whole recipe


SAMPLE_SHAPES = {"digits": (1, 8, 8), "modelnet40": (3, 512), "shapes": (3, 128)}
SAMPLE_SHAPES |= dict.fromkeys(("cora", "citeseer", "pubmed"), ())  # numbers of nodes


@pytest.mark.parametrize("name", recipe.embedded())
def test_embedded_recipes_load_and_their_parts_can_be_built(name):
    plan = recipe.load(name)
    assert plan.name == name and len(plan.help) > 10
    shape = SAMPLE_SHAPES.get(plan.data.name, (3, 32, 32))
    model = plan.build(models, ("model",), shape)
    assert plan.build(losses, ("loss",), model.dim, 10).dim == model.dim
    for milestone in plan.schedule.milestones:
        assert milestone < plan.train.steps


def test_embedded_help_is_that_of_the_recipe():
    assert (
        recipe.embedded()["digits-arcface"] == "Handwritten digits, 3-D features, ArcFace with its margin annealed in"
    )


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["optimiser.lr=1e-5", "optimiser.betas=[0.5, 0.25]", "train.ema=0.9", "data.augment.crop=4"],
        ["regularisers=[{name: mhe, weight: 1e-3, s: 0}, {name: mhe, target: all, half_space: true}]"],
        ["data.hold_out=['1e5', 7, '7', 'null', 'true', '1.5']", "help='1e5'", "name='2e2'"],
        ["model={name: plain-cnn, widths: [4, 8]}", "loss={name: softmax, bias: false}"],
        ["convert={name: mix, parts: [[1, sphere], [0.5, log]], include: ['features.*']}", "project.every=3"],
    ],
)
def test_yaml_round_trip(overrides, write):
    plan = recipe.load("digits-a-softmax", overrides)
    back = recipe.load(write(plan.to_yaml()))
    assert back.model_dump() == plan.model_dump()
    assert back.hash == plan.hash and back.to_yaml() == plan.to_yaml()


def test_yaml_has_every_default(write):
    plan = recipe.load(write("train: {steps: 5}\n"))
    content = yaml.safe_load(plan.to_yaml())
    defaults = {option.name: option.default for option in losses["softmax"].options}
    assert content["train"]["precision"] == "fp32" and content["loss"] == {"name": "softmax", **defaults}
    assert content["loss"]["bias"] is True and content["loss"]["reduction"] == "mean"
    assert content["model"]["act"] == "prelu" and content["data"]["augment"]["crop"] == 0


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "optimiser.lr=0.06",
        "loss.m=3",
        "loss.annealer.gamma=1",
        "data.batch_size=65",
        "model.dim=2",
        "evaluate.metrics=[energy]",
        "data.test_fraction=0.5",
        "regularisers=[{name: mhe}]",
        "train.precision=bf16",
        "convert=tanh",
        "convert={name: tanh, skip: []}",
        "project.every=5",
        "data.augment.crop_mode=reflect",
        "evaluate.recalibrate=2",
        "evaluate.energy=true",
        "data.imbalance.graded=5",
        "data.imbalance.keep={0: 5}",
    ],
)
def test_hash_changes_with_what_determines_the_result(override):
    assert recipe.load("digits-a-softmax", [override]).hash != recipe.load("digits-a-softmax").hash


def test_hash_does_not_change_with_name_help_or_spelling():
    plan = recipe.load("digits-a-softmax", ["loss.m=4", "optimiser.lr=0.05"])
    assert len(plan.hash) == 12 and int(plan.hash, 16) >= 0
    again = ["loss.m=4.0", "optimiser.lr=5e-2", "train.compile=false"]
    assert recipe.load("digits-a-softmax", [*again, "name=other", "help=else"]).hash == plan.hash


RECORDED = {
    "cifar10-a-softmax": "3cb121a63eb2",
    "cifar10-ga-softmax": "6173c22c73a3",
    "cifar10-l-softmax": "e3893d5f1db8",
    "cifar10-spherenet": "1cbcf7a4b5e1",
    "cifar100-cnn9": "31af6ceead42",
    "cifar100-cnn9-dc": "9a65d831d163",
    "cifar100-cnn9-dc-short": "c2031bd5ee0f",
    "cifar100-cnn9-short": "159198ea09a7",
    "cifar100-resnet32-dc": "76c3b753a4a8",
    "digits-64": "0242cde87b56",
    "digits-64-a-softmax": "8fa187bb65a9",
    "digits-64-arcface": "bb3ded0e2f4f",
    "digits-64-l-softmax": "d468061a2241",
    "digits-64-margin-softmax": "5004b3ea3841",
    "digits-64-sphereface-plus": "3d0141d6491e",
    "digits-a-softmax": "2634f3acaadd",
    "digits-arcface": "68335f93a967",
    "digits-dcnet": "2b75b8493d06",
    "digits-softmax": "53c7b0c2b0df",
    "digits-spherenet": "826388c03484",
    "mnist-l-softmax": "793325ef56e3",
}


@pytest.mark.parametrize("name", RECORDED)
def test_hash_is_that_of_recorded_results(name):
    """A key that is new must leave the hash alone where it changes nothing: it says so beside itself (``Later``)."""
    assert recipe.load(name).hash == RECORDED[name]


def test_keys_of_regularisers_change_the_hash_where_they_change_something():
    def of(*options):
        return recipe.load("digits-softmax", [f"regularisers=[{{{', '.join(('name: orthogonal', *options))}}}]"]).hash

    others = ["schedule: {warmup: 3}", "hidden_weight: 2", "output_weight: 2", "target: all", "weight: 2"]
    assert len({of(), *map(of, others)}) == 1 + len(others)
    assert of("schedule: null", "hidden_weight: 1", "output_weight: 1.0", "target: model") == of()


def test_hash_without_seed():
    plan = recipe.load("digits-softmax", ["seed=1"])
    assert plan.hash_without_seed == recipe.load("digits-softmax", ["seed=2"]).hash_without_seed != plan.hash
    assert plan.hash_without_seed != recipe.load("digits-softmax", ["seed=1", "model.dim=2"]).hash_without_seed


def test_an_operator_is_put_in_and_taken_out():
    plan = recipe.load("digits-softmax", ["convert=tanh"])
    assert plan.convert is not None and plan.convert.name == "tanh" and plan.convert.options["angular"] == "cosine"
    assert plan.convert.choice == {"skip": ("shortcut",), "output": None}
    assert recipe.load("digits-softmax", ["convert.name=tanh", "convert.skip=last"]).convert.choice["output"] == "auto"
    back = recipe.load("digits-dcnet", ["convert=null"])
    assert back.convert is None
    assert recipe.load("digits-softmax", ["convert.name=seg", "convert.beta=0.25"]).convert.options["beta"] == 0.25


def test_a_section_that_is_off_in_a_file_can_be_overridden(write):
    file = write(recipe.load("digits-softmax").to_yaml())
    plan = recipe.load(file, ["convert.name=ball", "loss.annealer.base=3"])
    assert plan.convert.name == "ball" and plan.loss.options["annealer"]["base"] == 3


def test_a_recipe_cannot_be_changed():
    plan = recipe.load("digits-softmax")
    with pytest.raises(ValueError, match="frozen"):
        plan.seed = 3
    with pytest.raises(ValueError, match="frozen"):
        plan.train.steps = 3


def test_a_part_may_be_named_alone():
    found = recipe.load("digits-arcface", ["loss=softmax"]).loss.model_dump()
    assert found == recipe.check({"loss": {"name": "softmax"}}).loss.model_dump()
    assert found["name"] == "softmax" and found["bias"] is True and not {"s", "m"} & set(found)


def test_housekeeping_does_not_make_another_run():
    plain = recipe.load("digits-softmax")
    for override in ("train.tensorboard=false", "train.keep_checkpoints=9", "data.workers=3"):
        assert recipe.load("digits-softmax", [override]).hash == plain.hash
    assert recipe.load("digits-softmax", ["train.log_every=7"]).hash != plain.hash


def test_settings_cover_every_key():
    keys = {key for key, _, _ in recipe.settings()}
    assert {"seed", "data.batch_size", "train.clip_norm", "schedule.warmup", "optimiser.lr", "evaluate.every"} <= keys
    assert {"convert", "convert.include", "project.every", "data.augment"} <= keys
    shown = {key: default for key, default, _ in recipe.settings()}
    assert (shown["model.name"], shown["convert.name"], shown["project.s"]) == ("digits-cnn", "None", "1.0")
    resolved = recipe.load("digits-softmax").model_dump()
    assert {key.split(".")[0] for key in keys} == set(resolved)


def test_layers_that_do_not_fit_name_the_part():
    plan = recipe.load("digits-softmax", ["model.conv=relu"])
    with pytest.raises(recipe.RecipeError, match=r"model cannot be built: .*ReLU"):
        plan.build(models, ("model",), (1, 8, 8))
    plan = recipe.load("digits-softmax", ["model.conv=conv3"])
    with pytest.raises(recipe.RecipeError, match=r"model unknown layer 'conv3'\. Did you mean 'conv2d'\?"):
        plan.build(models, ("model",), (1, 8, 8))
