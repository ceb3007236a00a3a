"""Names, options and the messages of errors."""

import inspect
import pickle
import sys
import typing
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import hypersphere as hs
from hypersphere.errors import ArgumentError, HypersphereError, check_choice, check_range
from hypersphere.registry import (
    Entry,
    Option,
    Registry,
    UnknownNameError,
    did_you_mean,
    nearest,
    registries,
    registry_of,
)

FAMILIES = (
    hs.losses.losses,
    hs.margins.margins,
    hs.angular.angulars,
    hs.energy.energies,
    hs.nn.layers,
    hs.nn.operators,
    hs.orthogonal.maps,
)


class Shape:
    """A shape on the sphere.

    More words that are not the first line.

    Args:
        owner: Supplied by the caller.
        radius: How far the
            edge is from the centre: an arc.
        name (str): What to call it.
        *args: Not an option.
        **extra: Not one either.

    Example:
        radius: not help
    """

    def __init__(self, owner: str, *args: object, radius: float, name: "str | None" = None, mute=3, **extra: int):
        self.owner, self.radius, self.name = owner, radius, name


class Named:
    """Something with options for every one of its kind.

    Args:
        owner: Supplied by the caller.
        colour: Which colour.
        size: How large.
        weight: How heavy.
    """

    shared_options = ("colour", "size")

    def __init__(self, owner: str, *, colour: str = "red", size: int = 1, weight: float = 2.0) -> None:
        self.given = (owner, colour, size, weight)


class Special(Named):
    """Takes some of them.

    Args:
        owner: Supplied by the caller.
        size: How large this one is.
        **options: See :class:`Named`.
    """

    def __init__(self, owner: str, *, size: int = 5, **options: object) -> None:
        super().__init__(owner, size=size, **options)


class Alone(Named):
    """Takes none of them."""

    shared_options = ()

    def __init__(self, owner: str) -> None:
        super().__init__(owner)


@pytest.fixture
def shapes():
    registry = Registry("shape", positional=("owner",))
    registry.register("Spherical_Cap", aliases=("cap", "Polar_Cap"))(Shape)

    @registry.register("great-circle")
    def circle():
        return "round"

    return registry


# Errors.


def test_argument_error_names_its_argument():
    error = ArgumentError("m", "must be at least 1, got 0.5")
    assert str(error) == "m must be at least 1, got 0.5"
    assert error.argument == "m"
    assert isinstance(error, HypersphereError)
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(
    "error", [ArgumentError("m", "is bad"), UnknownNameError("unknown 'x'"), HypersphereError("no")]
)
def test_errors_cross_process_borders(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize(
    ("value", "limits", "message"),
    [
        (0.5, {"low": 1}, "at least 1, got 0.5"),
        (0, {"low": 0, "open_low": True}, "greater than 0, got 0"),
        (4, {"low": 0, "high": 3.5}, "at least 0 and at most 3.5, got 4"),
        (2, {"high": 1}, "at most 1, got 2"),
        (-1, {"low": 0, "high": 1, "open_low": True}, "greater than 0 and at most 1, got -1"),
        (float("nan"), {}, "a number, got nan"),
        (float("nan"), {"low": 0}, "at least 0, got nan"),
        ("x", {"low": 0}, "a number, got str"),
        (torch.ones(2), {"low": 0}, "a number, got Tensor"),
    ],
)
def test_check_range_refuses(value, limits, message):
    with pytest.raises(ArgumentError) as caught:
        check_range("s", value, **limits)
    assert str(caught.value) == f"s must be {message}"
    assert caught.value.argument == "s"


def test_check_range_accepts_its_ends():
    check_range("s", 0, 0, 1)
    check_range("s", 1, 0, 1, open_low=True)
    check_range("s", -1e300)


def test_check_choice():
    check_choice("mode", "a", ("a", "b"))
    with pytest.raises(ArgumentError, match=r"^mode must be one of 'a', 'b', got 'c'$"):
        check_choice("mode", "c", ("a", "b"))


# Nearest names.


def test_nearest():
    known = ["softmax", "arcface", "a-softmax"]
    assert nearest("arcfase", known) == "arcface"
    assert nearest("ARCFACE", known) == "arcface"
    assert nearest("softmx", known) == "softmax"
    assert nearest("zzz", known) is None
    assert nearest("softmax", []) is None


def test_did_you_mean():
    assert did_you_mean("softmx", ["softmax"]) == " Did you mean 'softmax'?"
    assert did_you_mean("zzz", ["softmax"]) == ""


# The registry.


@pytest.mark.parametrize(
    "name", ["spherical-cap", "spherical_cap", "Spherical-CAP", "SPHERICAL_CAP", "cap", "CAP", "polar-cap", "polar_cap"]
)
def test_case_hyphens_underscores_and_aliases_do_not_matter(shapes, name):
    assert name in shapes
    assert shapes[name].name == "spherical-cap"
    assert shapes[name].factory is Shape
    built = shapes.create(name, "me", radius=2.0)
    assert isinstance(built, Shape)
    assert (built.owner, built.radius) == ("me", 2.0)


def test_listing(shapes):
    assert list(shapes) == ["great-circle", "spherical-cap"]
    assert len(shapes) == 2
    assert shapes["cap"].aliases == ("cap", "polar-cap")
    assert 3 not in shapes
    assert "square" not in shapes


def test_register_returns_the_factory_itself():
    def factory():
        return 1

    assert Registry("thing").register("one")(factory) is factory


def test_unknown_name_says_what_is_known(shapes):
    with pytest.raises(UnknownNameError) as caught:
        shapes.create("grate_circle")
    message = "unknown shape 'grate_circle'. Did you mean 'great-circle'? Known: great-circle, spherical-cap"
    assert str(caught.value) == message
    assert isinstance(caught.value, LookupError)
    assert isinstance(caught.value, HypersphereError)
    with pytest.raises(UnknownNameError, match=r"^unknown shape 'xyz'\. Known: great-circle, spherical-cap$"):
        shapes["xyz"]
    with pytest.raises(UnknownNameError, match=r"Known: none yet$"):
        Registry("thing")["x"]


def test_an_alias_can_be_the_nearest_name(shapes):
    with pytest.raises(UnknownNameError, match="Did you mean 'polar-cap'"):
        shapes["poler-cap"]


@pytest.mark.parametrize(
    ("name", "aliases", "taken"),
    [("spherical-cap", (), "spherical-cap"), ("CAP", (), "cap"), ("new", ("Great_Circle",), "great-circle")],
)
def test_names_are_not_given_twice(shapes, name, aliases, taken):
    with pytest.raises(ArgumentError, match=f"^name '{taken}' is already a registered shape$"):
        shapes.register(name, aliases=aliases)(Shape)
    assert len(shapes) == 2
    assert "new" not in shapes


def test_options_come_from_signature_and_docstring(shapes):
    entry = shapes["cap"]
    assert isinstance(entry, Entry)
    assert entry.help == "A shape on the sphere."
    radius, name, mute = entry.options
    assert radius == Option("radius", float, inspect.Parameter.empty, "How far the edge is from the centre: an arc.")
    assert name == Option("name", str | None, None, "What to call it.")
    assert (mute.name, mute.default, mute.help) == ("mute", 3, "")
    assert radius.required
    assert not name.required
    assert [str(option) for option in entry.options] == ["radius", "name=None", "mute=3"]
    assert shapes["great-circle"].options == ()
    assert shapes["great-circle"].help == ""


def test_unknown_options(shapes):
    with pytest.raises(ArgumentError) as caught:
        shapes.create("cap", "me", radios=1.0)
    message = "radios is not an option of 'spherical-cap'. Did you mean 'radius'? (allowed: radius, name, mute)"
    assert str(caught.value) == message
    assert caught.value.argument == "radios"
    with pytest.raises(ArgumentError, match=r"^r is not an option of 'great-circle'\. \(it has no options\)$"):
        shapes.create("great_circle", r=1)


def test_positional_arguments_may_be_named(shapes):
    assert shapes.create("cap", owner="me", radius=1.0).owner == "me"


def test_options_of_the_class_above():
    """A class that passes its options on has those that its parent shares, with their help, behind its own."""
    registry = Registry("thing", positional=("owner",))
    for kind in (Named, Special, Alone):
        registry.register(kind.__name__)(kind)
    assert [str(o) for o in registry["named"].options] == ["colour='red'", "size=1", "weight=2.0"]
    assert [(str(o), o.help) for o in registry["special"].options] == [
        ("size=5", "How large this one is."),
        ("colour='red'", "Which colour."),
    ]
    assert registry["alone"].options == ()
    assert registry.create("special", "me", colour="blue").given == ("me", "blue", 5, 2.0)
    with pytest.raises(ArgumentError, match=r"^weight is not an option of 'special'\. \(allowed: size, colour\)$"):
        registry.create("special", "me", weight=3.0)


def test_options_by_another_name():
    registry = Registry("thing", positional=("owner",), option_aliases={"breadth": "size"})
    registry.register("named")(Named)
    assert registry.canonical({"breadth": 3, "colour": "blue"}) == {"size": 3, "colour": "blue"}
    assert registry.create("named", "me", breadth=3).given == ("me", "red", 3, 2.0)
    with pytest.raises(ArgumentError, match=r"^breadth is another name of 'size': give one of them$") as caught:
        registry.create("named", "me", size=2, breadth=3)
    assert caught.value.argument == "breadth"
    with pytest.raises(ArgumentError, match=r"^breadht is not an option of 'named'"):
        registry.create("named", "me", breadht=3)


# What the package registers.


@pytest.mark.parametrize("registry", FAMILIES, ids=lambda r: r.family)
def test_every_entry_has_help_and_readable_options(registry):
    for name in registry:
        entry = registry[name]
        assert entry.help, name
        for option in entry.options:
            assert option.name not in registry.positional
            assert option.help or entry.factory.__module__.startswith("torch"), (name, option.name)


def test_the_losses():
    assert {"softmax", "a-softmax", "arcface"} <= set(hs.losses.losses)
    options = {o.name: o for o in hs.losses.losses["sphereface"].options}
    shared = hs.losses.MarginSoftmax.shared_options
    assert list(options) == ["m", *shared]
    assert (options["m"].default, options["m"].help) == (4, "Margin, any number from 1 on.")
    assert float in typing.get_args(options["m"].annotation) and hs.losses.Ramp in typing.get_args(
        options["m"].annotation
    )
    with pytest.raises(
        ArgumentError, match=r"margins is not an option of 'arcface'.*\(allowed: s, m, beyond, annealer,"
    ):
        hs.losses.create("ArcFace", 4, 3, margins=0.5)
    assert hs.losses.create("ArcFace", 4, 3, margin=0.25).m == 0.25
    head = hs.losses.create("arc_softmax", 4, 3, s=8.0)
    assert isinstance(head, hs.losses.ArcFace)
    assert (head.dim, head.classes, head.s) == (4, 3, 8.0)


@dataclass
class Above:
    """A dataclass.

    Args:
        size: How large.
        colour: Which colour.
    """

    size: int = 1
    colour: str = "red"


@dataclass
class Below(Above):
    """One with a field more, and its own words on another.

    Args:
        colour: Which colour this one has.
        weight: How heavy.
    """

    weight: float = 2.0


def test_a_dataclass_takes_the_fields_of_the_class_above_with_their_help():
    registry = Registry("thing")
    registry.register("below")(Below)
    assert [(str(option), option.help) for option in registry["below"].options] == [
        ("size=1", "How large."),
        ("colour='red'", "Which colour this one has."),
        ("weight=2.0", "How heavy."),
    ]


def test_the_operators():
    assert list(hs.nn.operators) == ["ball", "linear", "log", "mix", "seg", "sphere", "tanh"]
    options = {option.name: option for option in hs.nn.operators["segmented"].options}
    assert options["angular"].help.startswith("Angular function") and options["radius"].help.startswith(
        "Initial radius"
    )
    assert (options["beta"].default, options["beta"].help) == (0.5, "Slope beyond the radius.")
    with pytest.raises(ArgumentError, match=r"^radius is not an option of 'sphere'\. .*\(allowed: angular, weighting,"):
        hs.nn.create("sphere", radius=2.0)
    made = hs.nn.create("TanH", "Conv-2d", angular="sqcos")(3, 8, 3, padding=1)
    assert isinstance(made, nn.Conv2d) and made.operator == hs.nn.operator("tanh", angular="sqcos")
    assert hs.nn.create("sphere", "linear")(3, 2)(torch.ones(1, 3)).shape == (1, 2)
    with pytest.raises(ArgumentError, match=r"^layer must be one of conv1d, .*, got 'conv4d'"):
        hs.nn.create("sphere", "conv4d")


def test_the_layers():
    assert isinstance(hs.nn.factory("Conv2d")(3, 8, 3, padding=1), nn.Conv2d)
    assert hs.nn.factory("linear")(3, 2, bias=False)(torch.ones(1, 3)).shape == (1, 2)
    assert hs.nn.factory("batchnorm2d") is nn.BatchNorm2d
    assert hs.nn.factory(nn.Tanh) is nn.Tanh
    for name, kind in (("identity", nn.Identity), ("relu", nn.ReLU), ("prelu", nn.PReLU)):
        assert isinstance(hs.nn.factory(name)(), kind)
    with pytest.raises(UnknownNameError, match=r"unknown layer 'conv3'\. Did you mean 'conv2d'"):
        hs.nn.factory("conv3")


# Members that are read when they are needed.


@pytest.fixture
def rooms(tmp_path, monkeypatch):
    """A package whose modules register members."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, text=""):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    yield write
    for name in [name for name in sys.modules if name.split(".")[0] == "rooms"]:
        del sys.modules[name]


def member(name):
    """A module that registers a member and looks the others up while it does."""
    return f"""from test_registry import LAZY

@LAZY.here.register('{name}')
def make():
    return '{name}'
list(LAZY.here)
"""


class LAZY:
    here: Registry


def test_members_are_imported_at_the_first_look_up(rooms, monkeypatch):
    for name in ("__init__", "one/__init__", "two/__init__", "two/extra"):
        rooms(f"rooms/{name}.py")
    rooms("rooms/first.py", member("first"))
    rooms("rooms/one/parts.py", member("in-one"))
    monkeypatch.setitem(sys.modules, "test_registry", sys.modules[__name__])
    LAZY.here = Registry("thing", members=("rooms", "rooms.*.parts"))
    assert "rooms" not in sys.modules and LAZY.here.entries() == ()
    assert LAZY.here.create("first") == "first"
    assert list(LAZY.here) == ["first", "in-one"] and "rooms.two.extra" not in sys.modules
    assert [entry.module for entry in LAZY.here.entries()] == ["rooms.first", "rooms.one.parts"]


@pytest.mark.parametrize("look", [len, list, lambda r: "x" in r, lambda r: r.find(Shape), lambda r: r["x"]])
def test_an_import_that_fails_is_shown_every_time(rooms, look):
    rooms("rooms/__init__.py")
    rooms("rooms/broken.py", "import no_such_module_at_all\n")
    registry = Registry("thing", members=("rooms",))
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
            look(registry)


def test_a_name_of_an_unread_member_is_taken(rooms, monkeypatch):
    rooms("rooms/__init__.py", member("first"))
    monkeypatch.setitem(sys.modules, "test_registry", sys.modules[__name__])
    LAZY.here = Registry("thing", members=("rooms",))
    with pytest.raises(ArgumentError, match="'first' is already a registered thing"):
        LAZY.here.register("first")(Shape)
    assert LAZY.here.create("first") == "first"


def test_the_registry_of_a_kind():
    class Kind:
        pass

    registry = Registry("thing", kind=Kind)
    assert registry_of(Kind) is registry and registry.kind is Kind and registry in registries()
    assert registry_of(Shape) is None and registry_of(Kind | None) is None
    with pytest.raises(ArgumentError, match=r"^kind Kind already has the registry of every thing$"):
        Registry("other", kind=Kind)


def test_remove(shapes):
    shapes.remove("cap")
    assert list(shapes) == ["great-circle"] and "polar-cap" not in shapes
    with pytest.raises(UnknownNameError):
        shapes.remove("cap")
    shapes.register("cap")(Shape)


def _classes_of_members():
    families = hs.testing.contracts().values()
    for registry in (
        contract.registry for contract in families if contract.registry.family not in ("model", "section")
    ):
        for name in registry:
            factory = registry[name].factory
            if inspect.isclass(factory) and factory.__module__.startswith("hypersphere."):
                yield pytest.param(registry, name, id=f"{registry.family}-{name}")


@pytest.mark.parametrize(("registry", "name"), list(_classes_of_members()))
def test_a_class_answers_an_unknown_option_as_create_does(registry, name):
    """Built directly or by name, the answer is the same and lists every option."""
    entry = registry[name]
    with pytest.raises(ArgumentError, match=f"^wrong_option is not an option of '{name}'") as direct:
        entry.factory(wrong_option=2)
    with pytest.raises(ArgumentError) as named:
        registry.create(name, *(3 for _ in entry.positional), wrong_option=2)
    text = str(direct.value)
    assert all(option.name in text for option in entry.options)
    assert text.startswith(str(named.value).partition(" (allowed")[0])


def test_what_is_no_unknown_option_stays_the_error_that_it_is():
    class Mine(hs.energy.MHE):
        def __init__(self, **options):
            super().__init__(**options)

    with pytest.raises(TypeError, match="unexpected keyword argument 'power'"):
        Mine(power=2)  # it is not registered
    with pytest.raises(TypeError, match="positional argument"):
        hs.energy.MHE(2.0)
    assert list(inspect.signature(hs.nn.operators["ball"].factory).parameters)[:2] != ["args", "options"]
