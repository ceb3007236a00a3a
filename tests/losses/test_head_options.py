"""Heads from outside: names of the ecosystem, members with options in recipes, and losses in a file of one's own."""

import dataclasses
import math
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F

import hypersphere as hs
from hypersphere import margins, recipe
from hypersphere.angular import Sigmoid
from hypersphere.errors import ArgumentError
from hypersphere.losses import ArcFace, Batch, HeadSpec, MarginSoftmax, SubcenterArcFace, losses, negatives
from hypersphere.losses.negatives import Binary, CircleNegatives, Negatives, OfAngle, Plain
from hypersphere.recipe import RecipeError
from hypersphere.testing import numeric

X, Y = torch.randn(6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64), torch.arange(6) % 5


def same_loss(first, second):
    first, second = first.double(), second.double()
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(first(X, Y), second(X, Y), rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    "sizes",
    [{"num_classes": 10, "embedding_size": 32}, {"in_features": 32, "out_features": 10}, {"classes": 10, "dim": 32}],
)
def test_heads_are_called_as_elsewhere(sizes):
    for head in (ArcFace(**sizes, margin=0.3, scale=16.0), hs.losses.create("arcface", **sizes, m=0.3, s=16.0)):
        assert (head.dim, head.classes, head.m, head.s) == (32, 10, 0.3, 16.0)


def test_an_unknown_keyword_is_answered_with_all_there_are():
    with pytest.raises(ArgumentError, match=r"num_class is not an option of 'arcface'\. .*dim, classes, s, m, beyond"):
        ArcFace(num_class=10, embedding_size=32)
    with pytest.raises(ArgumentError, match="is another name of 'dim': give one of them"):
        ArcFace(num_classes=10, embedding_size=32, in_features=32)


def test_sub_centres_have_their_name_and_recipes_the_old_one():
    assert SubcenterArcFace(8, 5, k=2).subcentres == SubcenterArcFace(8, 5, centres=2).subcentres == 2
    same_loss(SubcenterArcFace(8, 5, k=2), MarginSoftmax(8, 5, s=64.0, m=0.5, psi="additive-angle", subcentres=2))


# ------------------------------------------------------------------------------------------------ spec


def test_a_spec_is_frozen_checked_and_resolved():
    spec = HeadSpec(s=8.0, g=Sigmoid(0.4), psi=margins.create("multiplicative"), gradient="cgd")
    assert spec.psi.g == Sigmoid(0.4) and spec.negatives == OfAngle(g=Sigmoid(0.4), detach=True)
    assert not dataclasses.replace(spec, gradient="exact").negatives.detach
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.s = 2.0
    for options, message in (
        ({"s": 0.0}, "s must be greater than 0"),
        ({"learn_scale": True}, "learn_scale needs s"),
        ({"bias": True}, "bias needs unit_weights=False"),
        ({"psi": "additive-angle"}, "psi must be of type Margin, got 'additive-angle'"),
        ({"subcentres": 0}, "subcentres must be at least 1"),
        ({"unit_weights": False, "negatives": CircleNegatives()}, "negatives needs unit_weights=True"),
        ({"negatives": Binary(), "label_smoothing": 0.1}, "label_smoothing has no meaning for the rule Binary"),
    ):
        with pytest.raises(ArgumentError, match=f"^{message}"):
            HeadSpec(**options)


def test_a_spec_can_be_exchanged():
    head = ArcFace(8, 5).double()
    mean = head(X, Y)
    head.spec = dataclasses.replace(head.spec, reduction="none")
    torch.testing.assert_close(head(X, Y).mean(), mean)


def test_a_given_cosine_is_kept_where_the_head_has_another_function():
    given = margins.create("multiplicative", g="cosine")
    assert MarginSoftmax(8, 5, s=8.0, m=2, psi=given, g="linear").spec.psi is given
    named = MarginSoftmax(8, 5, s=8.0, m=2, psi="multiplicative", g="linear").spec.psi
    assert type(named.g).__name__ == "Linear"


# ------------------------------------------------------------------------------------------------ rules


@pytest.mark.parametrize(
    ("member", "options"),
    [
        ("circle", {"s": 32.0, "m": 0.2, "psi": "circle", "negatives": "circle"}),
        ("hinge", {"unit_weights": False, "bias": True, "negatives": {"name": "hinge", "power": 1}}),
        ("arcface", {"s": 64.0, "m": 0.5, "psi": {"name": "additive-angle", "beyond": "clip"}}),
    ],
)
def test_members_are_names_for_choices_of_parts(member, options):
    own = {key: value for key, value in options.items() if key in ("s", "m")}
    same_loss(losses.create(member, 8, 5, **own), MarginSoftmax(8, 5, **options))


def test_a_hardened_rule_has_a_constant_where_curricularface_has_a_running_mean():
    curricular = hs.losses.create("curricularface", 8, 5, s=16.0).double().eval()
    curricular.progress.fill_(0.4)
    rule = {"name": "hardened", "progress": 0.4}
    psi = {"name": "additive-angle", "beyond": "fallback"}
    other = MarginSoftmax(8, 5, s=16.0, m=0.5, psi=psi, negatives=rule).double().eval()
    other.weight.data.copy_(curricular.weight)
    torch.testing.assert_close(curricular(X, Y), other(X, Y), rtol=1e-12, atol=0)


def test_rules_are_listed_with_their_options():
    assert [str(o) for o in negatives.rules["binary"].options] == ["t=3.0", "margin=True", "detach=False"]
    assert negatives.create(Plain()) == Plain()
    with pytest.raises(LookupError, match=r"unknown rule of negatives 'circel'\. Did you mean 'circle'"):
        MarginSoftmax(8, 5, negatives="circel")


# ------------------------------------------------------------------------------------------------ recipes

BASE = ("loss.name=margin-softmax", "loss.s=16", "loss.m=0.3")


def head_of(*options):
    plan = recipe.load("digits-64", [*BASE, *options])
    assert recipe.check(plan.model_dump(mode="json")).hash == plan.hash
    return plan.build(losses, ("loss",), 8, 5)


def test_recipes_name_members_with_their_options():
    head = head_of(
        "loss.psi={name: additive-angle, beyond: easy}",
        "loss.g={name: sigmoid, k: 0.5}",
        "loss.negatives={name: circle}",
    )
    assert head.spec.psi == margins.create("additive-angle", beyond="easy") and head.spec.g == Sigmoid(0.5)
    assert isinstance(head.spec.negatives, CircleNegatives)
    nested = head_of("loss.m=2", "loss.psi={name: multiplicative, g: {name: sigmoid, k: 0.4}}")
    assert nested.spec.psi.g == Sigmoid(0.4)
    assert head_of("loss.m=2", "loss.psi={name: multiplicative}", "loss.g=linear").spec.psi.g == hs.angular.create(
        "linear"
    )
    assert head_of("loss.psi.name=additive-angle", "loss.psi.beyond=raw").spec.psi.beyond == "raw"


def test_options_that_are_given_and_those_left_out_are_one_recipe():
    short, long = (
        recipe.load("digits-64", [*BASE, f"loss.psi={{name: additive-angle{more}}}"])
        for more in ("", ", beyond: tangent")
    )
    assert short.hash == long.hash


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "loss.psi={name: additive-angle, beyondd: easy}",
            r"loss\.psi\.beyondd is not a known key\. Did you mean 'beyond'",
        ),
        ("loss.psi={name: additive-angle, beyond: hard}", r"loss\.psi\.beyond must be one of 'tangent'"),
        ("loss.psi={name: additiv-angle}", r"loss\.psi\.name unknown margin 'additiv-angle'\. Did you mean"),
        ("loss.psi=additiv-angle", r"loss\.psi unknown margin 'additiv-angle'\. Did you mean"),
        ("loss.psi={beyond: easy}", r"loss\.psi\.name must be given, the name of the margin"),
        ("loss.g={name: sigmoid, k: -1}", r"loss\.g\.k must be greater than 0, got -1"),
        ("loss.negatives=[1]", r"loss\.negatives should be a valid"),
    ],
)
def test_mistakes_in_options_of_members_are_placed(option, message):
    with pytest.raises(RecipeError, match=message):
        head_of(option)


# ------------------------------------------------------------------------------------------------ own


OWN = '''
"""A loss, a rule and a margin of one's own."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hypersphere.losses import Batch, MarginSoftmax, losses, negatives
from hypersphere.margins import Margin, margins


@negatives.register("squared")
@dataclass(frozen=True)
class Squared(negatives.Negatives):
    """Only the strength of a similarity counts."""

    power: float = 2.0

    def _value(self, cosines, *parameters):
        return cosines.abs() ** self.power

    def _slope(self, cosines, *parameters):
        return self.power * cosines.abs() ** (self.power - 1) * cosines.sign()


@margins.register("cubic")
@dataclass(frozen=True)
class Cubic(Margin):
    """theta -> cos(theta) - m theta^3."""

    def psi(self, theta, *, m, **_):
        return theta.cos() - m * theta**3


@losses.register("own")
class Own(MarginSoftmax):
    """A margin that shrinks with the norm, and a pull on the norm."""

    contract = {"logits": False}

    def __init__(self, dim: int, classes: int, *, s: float = 16.0, m: float = 0.1, pull: float = 0.5, **options):
        self.pull = pull
        super().__init__(dim, classes, s=s, m=m, psi="cubic", negatives="squared", **options)

    def margin_sizes(self, batch: Batch):
        return {"m": self.m / (1 + batch.norms)}

    def penalty(self, batch: Batch):
        return self.pull * (batch.norms - 1).square()

    def typical_norm(self):
        return 3.0

    def details(self):
        return super().details() | {"pull": self.pull}
'''

USE = """
import torch
import torch.nn.functional as F

import hypersphere as hs
from hypersphere import plugins, recipe

plugins.load("own.py")
plan = recipe.load("digits-64", ["loss.name=own", "loss.pull=0.25"])
head = plan.build(hs.losses.losses, ("loss",), 8, 5).double()
assert "pull=0.25" in repr(head) and abs(float(head.psi(torch.tensor(1.0)) - (torch.tensor(1.0).cos() - 0.025))) < 1e-6
x, y = torch.randn(6, 8).double(), torch.arange(6) % 5
cosines = F.normalize(x) @ F.normalize(head.weight).T
target = cosines[torch.arange(6), y]
theta, norms = target.acos(), x.norm(dim=1)
logits = 16 * cosines.abs() ** 2
logits[torch.arange(6), y] = 16 * (theta.cos() - 0.1 / (1 + norms) * theta**3)
wanted = (F.cross_entropy(logits, y, reduction="none") + 0.25 * (norms - 1) ** 2).mean()
torch.testing.assert_close(head(x, y), wanted)
for path in ("dense", "chunked"):
    other = hs.losses.create("own", 8, 5, pull=0.25, path=path, gradient="exact").double()
    other.load_state_dict(head.state_dict())
    torch.testing.assert_close(other(x, y), wanted)
print("done")
"""


def test_a_loss_a_margin_and_a_rule_in_a_file_of_ones_own(tmp_path):
    (tmp_path / "own.py").write_text(textwrap.dedent(OWN))
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr


class Shifted(MarginSoftmax):
    """Weights of any length, and a number that all classes share."""

    def offset(self):
        return torch.tensor(0.7, dtype=torch.float64)


@pytest.mark.parametrize(
    "options", [{"psi": "none"}, {"psi": "multiplicative", "m": 2}, {"s": 3.0, "bias": True}], ids=str
)
@pytest.mark.parametrize("path", ["dense", "chunked"])
def test_an_offset_is_that_of_targets_too_where_weights_have_lengths(path, options):
    torch.manual_seed(0)
    head = Shifted(4, 3, unit_weights=False, path=path, **options).double()
    x, y = 2 * torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    if head.bias is not None:
        torch.nn.init.normal_(head.bias)
    length, scale = head.weight.norm(dim=1), x.norm(dim=1, keepdim=True)
    cosines = F.normalize(x) @ F.normalize(head.weight).T
    target = F.one_hot(y, 3).bool()
    own = torch.where(cosines < 0, -1 - 2 * cosines**2, 2 * cosines**2 - 1) if "m" in options else cosines
    logits = (torch.where(target, own, cosines) * length + 0.7) * options.get("s", scale)
    logits = logits if head.bias is None else logits + head.bias
    wanted = F.cross_entropy(logits, y)
    torch.testing.assert_close(head.margin_logits(x, y), logits)
    torch.testing.assert_close(head(x, y), wanted)
    torch.testing.assert_close(head(x, target.double()), wanted)


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("path", ["dense", "chunked"])
def test_second_derivatives_of_l_softmax_at_a_zero_weight_are_finite(path, m):
    """They are those of the same labels as shares of the classes."""
    torch.manual_seed(0)
    head = hs.losses.LSoftmax(4, 3, m=m, path=path).double()
    head.weight.data[1] = 0
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 1, 1])

    def loss(weight, x, labels):
        return torch.func.functional_call(head, {"weight": weight}, (x, labels))

    found = numeric.twice(lambda w, x: loss(w, x, y), head.weight, x)
    shares = F.one_hot(y, 3).double()
    for one, other in zip(found, numeric.twice(lambda w, x: loss(w, x, shares), head.weight, x), strict=True):
        torch.testing.assert_close(one, other)


def test_members_override_nothing_private():
    private = {name for kind in MarginSoftmax.__mro__ for name in vars(kind) if name.startswith("_") and name[1] != "_"}
    for name in losses:
        member = losses[name].factory
        if issubclass(member, MarginSoftmax) and member is not MarginSoftmax:
            assert not (vars(member).keys() & private), name


def test_every_extension_point_is_on_the_list_of_the_class():
    listed = MarginSoftmax.__doc__.split("Args:")[0]
    found = [entry.factory for entry in losses.entries()]
    members = [kind for kind in found if issubclass(kind, MarginSoftmax) and kind is not MarginSoftmax]
    names = {name for member in members for name in vars(member) if hasattr(MarginSoftmax, name)}
    for name in names - {"forward", "psi", "contract", "weight", "renamed_options", "set_margin"}:
        assert name.startswith("_") or name in listed, name


def test_soft_labels_of_a_batch():
    batch = Batch.of(X, F.one_hot(Y, 5).double())
    assert batch.soft and batch.valid is None and batch.labels.dtype == X.dtype
    masked = Batch.of(X, torch.where(Y == 2, -100, Y), ignore_index=-100)
    assert not masked.soft and masked.valid.tolist() == (Y != 2).tolist() and int(masked.labels.min()) == 0
    assert math.isclose(float(batch.norms[0]), float(X[0].norm()))


def test_a_rule_without_a_value_says_so():
    with pytest.raises(NotImplementedError):
        Negatives().value(X)


def test_sampled_classes_say_what_vmap_has_to_be_told():
    head = losses.create("cosface", 4, 20, sample_rate=0.5)
    x, y = torch.randn(2, 3, 4), torch.randint(20, (2, 3))
    with pytest.raises(ArgumentError, match=r"^sample_rate below 1 draws classes in training: give torch\.func\.vmap "):
        torch.func.vmap(head)(x, y)
    assert torch.func.vmap(head, randomness="different")(x, y).shape == (2,)


@pytest.mark.parametrize("method", ["psi", "slope", "eta"])
@pytest.mark.parametrize(("theta", "given"), [([0.0, 1.0], "list"), (torch.tensor([0, 1]), "torch.int64")])
def test_angles_that_are_no_tensor_of_floats_are_refused(method, theta, given):
    with pytest.raises(ArgumentError, match=f"^theta must be a tensor of floating-point numbers, got {given}$"):
        getattr(losses.create("arcface", 4, 3), method)(theta)
