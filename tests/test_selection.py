"""Which layer of a model is its output, and which layers are chosen: the same answer for everybody who asks."""

import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hypersphere as hs
from hypersphere.errors import ArgumentError
from hypersphere.orthogonal.adapters import list_adapters
from hypersphere.selection import calls, layers, noted, select, table

LEFT = ("the output", 'the output (skip="output")')


class Parts(nn.Module):
    """A model of parts by name."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        for part in self.children():
            x = part(x)
        return x


class Block(nn.Module):
    """A residual block with a multilayer perceptron, as transformers have them."""

    def __init__(self, d=8):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


def mlp(*sizes):
    """Linear layers with activations between them."""
    parts = [part for a, b in itertools.pairwise(sizes) for part in (nn.ReLU(), nn.Linear(a, b))]
    return parts[1:]


def convolution_classifies():
    """Features, a linear neck on the channels, and a 1x1 convolution that classifies."""
    return Parts(features=nn.Conv2d(3, 8, 3), neck=nn.Linear(6, 6), classifier=nn.Conv2d(8, 5, 1))


def gpt2():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 12, "n_layer": 1, "n_head": 3, "vocab_size": 20, "n_positions": 8}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def bert():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, vocab_size=20))


def vit():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4)
    return transformers.ViTModel(config, add_pooling_layer=False)


class Positions(Parts):
    """A transformer that owns a matrix of positions, as those of timm do."""

    def __init__(self, **parts):
        super().__init__(**parts)
        self.positions = nn.Parameter(torch.zeros(1, 5, 8))


class Residual(nn.Module):
    """The names of a ResNet of torchvision."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(Block(6))
        self.fc = nn.Linear(6, 5)

    def forward(self, x):
        return self.fc(self.layer1(self.bn1(self.conv1(x))).mean((1, 2)))


MODELS = {
    "classifier is a 1x1 convolution": (convolution_classifies, "classifier"),
    "plain": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), *mlp(8, 9, 5)), "5"),
    "all convolutions": (lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Conv2d(8, 5, 1), nn.Flatten()), "2"),
    "resnet": (Residual, "fc"),
    "tied transformer": (gpt2, "lm_head"),
    "classifying transformer": (bert, "classifier"),
    "transformer without classifier": (vit, None),
    "ends with a normalisation": (lambda: nn.Sequential(*mlp(3, 8, 8), nn.BatchNorm1d(8)), None),
    "normalisation without parameters": (
        lambda: nn.Sequential(*mlp(3, 8, 8), nn.LayerNorm(8, elementwise_affine=False)),
        None,
    ),
    "positions": (lambda: Positions(patch=nn.Linear(3, 8), blocks=Block(), head=nn.Linear(8, 5)), "head"),
    "positions, wrapped": (lambda: Parts(inner=Positions(patch=nn.Linear(3, 8), fc=nn.Linear(8, 5))), "inner.fc"),
    "positions without classifier": (lambda: Positions(patch=nn.Linear(3, 8), blocks=nn.Sequential(Block())), None),
    "blocks alone": (lambda: Parts(stem=nn.Linear(3, 8), blocks=nn.ModuleList([Block(), Block()])), None),
    "one block": (lambda: Parts(stem=nn.Linear(3, 8), body=nn.Sequential(Block())), None),
    "wrapped": (lambda: Parts(inner=Parts(inner=Residual())), "inner.inner.fc"),
    "an auxiliary classifier behind": (
        lambda: Parts(
            body=nn.Linear(3, 8),
            classifier=nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 5, 1)),
            auxiliary=nn.Conv2d(8, 5, 1),
        ),
        "classifier.1",
    ),
    "a head of two": (
        lambda: Parts(body=nn.Conv2d(3, 8, 3), head=nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 5))),
        "head.2",
    ),
    "a projection of a feature extractor": (lambda: Parts(body=nn.Linear(3, 8), project=nn.Conv2d(8, 5, 1)), None),
    "a head of the library": (lambda: Parts(body=nn.Sequential(nn.Linear(3, 8)), head=hs.losses.ArcFace(8, 10)), None),
    "a decoder": (lambda: Parts(body=nn.Linear(3, 8), up=nn.ConvTranspose2d(8, 3, 1)), None),
}


def by_selection(model, output):
    return {layer.name: (layer.role, layer.reason) for layer in select(model, skip="output", output=output)}


def by_convert(model, output):
    hs.nn.convert(model, output=output)
    return {row.name: (row.role, row.note) for row in hs.nn.report(model, output=output).rows}


def by_apply(model, output):
    hs.orthogonal.apply(model, output=output)
    found = hs.orthogonal.check(model, output=output)
    return {row.name: (row.role, "") for row in found.rows} | {row.name: (row.role, row.reason) for row in found.left}


def by_adapt(model, output):
    hs.orthogonal.adapt(model, output=output)
    found = hs.orthogonal.check(model, output=output)
    names = list_adapters(model)["default"]["targets"]
    chosen = {name: (row.role, "") for name, row in zip(names, found.rows, strict=True)}
    return chosen | {row.name: (row.role, row.reason) for row in found.left}


def by_energy(model, output):
    chosen = hs.energy.select(model, output=output)
    return {row.name: (row.role, "") for row in chosen} | {row.name: (row.role, row.reason) for row in chosen.left}


ASKED = {"selection": by_selection, "convert": by_convert, "apply": by_apply, "adapt": by_adapt, "energy": by_energy}


@pytest.mark.parametrize("who", ASKED)
@pytest.mark.parametrize("kind", MODELS)
def test_everybody_knows_the_same_output(kind, who):
    make, output = MODELS[kind]
    if (kind, who) == ("tied transformer", "convert"):  # whose other layers are no linear ones of torch
        with pytest.raises(ArgumentError, match=r'lm_head \(Linear\): the output \(skip="output"\)'):
            hs.nn.convert(make())
        return
    found = ASKED[who](make(), "auto")
    assert [name for name, (role, _) in found.items() if role == "output"] == ([output] if output else [])
    left = [name for name, (_, reason) in found.items() if reason in LEFT]
    if who == "energy":  # counts the output, in its role
        assert not left
        assert not output or found[output][1] == ""
    elif kind == "tied transformer" and who in ("apply", "adapt"):
        assert found[output][1] == "another module shares its weight"
    else:
        assert left == ([output] if output else [])
    assert set(found) == {layer.name for layer in layers(make())}  # nothing is left out in silence


@pytest.mark.parametrize("who", ASKED)
@pytest.mark.parametrize("kind", ["plain", "resnet", "classifying transformer", "classifier is a 1x1 convolution"])
def test_an_explicit_output_wins(kind, who):
    make, usual = MODELS[kind]
    other = next(layer.name for layer in layers(make()) if layer.name != usual and layer.kind in ("Linear", "Conv2d"))
    found = ASKED[who](make(), other)
    assert [name for name, (role, _) in found.items() if role == "output"] == [other]
    assert found[usual][1] not in LEFT
    found = ASKED[who](make(), None)
    assert "output" not in {role for role, _ in found.values()}
    assert not any(reason in LEFT for _, reason in found.values())


def chosen_by_energy(model, **choice):
    return [row.name for row in hs.energy.select(model, **choice)]


def chosen_by_convert(model, **choice):
    return [row.name for row in hs.nn.report(hs.nn.convert(model, **choice)).rows if not row.note]


def chosen_by_apply(model, **choice):
    return [row.name for row in hs.orthogonal.check(hs.orthogonal.apply(model, **choice)).rows]


def chosen_by_adapt(model, **choice):
    return list_adapters(hs.orthogonal.adapt(model, **choice))["default"]["targets"]


@pytest.mark.parametrize("who", [chosen_by_energy, chosen_by_convert, chosen_by_apply, chosen_by_adapt])
@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"types": "conv*", "skip": ()}, ["stem.0", "stem.1", "shortcut"]),
        ({"types": nn.Conv2d, "skip": ("first", "shortcut")}, ["stem.1"]),
        ({"include": "stem.*", "exclude": "*.0", "skip": ()}, ["stem.1"]),
        ({"include": lambda name, layer: layer.weight.shape[0] == 5, "skip": ()}, ["fc"]),
        ({"types": ("linear", nn.Conv2d), "skip": ("output", "shortcut")}, ["stem.0", "stem.1", "neck"]),
    ],
)
def test_everybody_chooses_in_the_same_words(who, choice, expected):
    stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    parts = {"stem": stem, "shortcut": nn.Conv2d(3, 8, 1), "neck": nn.Linear(4, 4), "fc": nn.Linear(4, 5)}
    assert who(Parts(**parts), **choice) == expected


def test_the_output_by_name_pattern_and_module():
    model = Parts(body=nn.Linear(3, 4), tops=nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    for output in ("tops.2", "tops", "*.2", model.tops, model.tops[2]):
        assert [row.name for row in layers(model, output=output) if row.role == "output"] == ["tops.2"]
    with pytest.raises(ArgumentError, match=r"^output must be the name or a pattern of body, tops.0, tops.2, got 'fc'"):
        layers(model, output="fc")
    with pytest.raises(ArgumentError, match=r"^output must be a layer of the model, got Linear"):
        layers(model, output=nn.Linear(2, 2))


def test_an_example_decides_the_order():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.norm, self.first = nn.Linear(4, 3), nn.LayerNorm(4), nn.Linear(5, 4)

        def forward(self, x):
            return self.last(self.norm(self.first(x)))

    model, x = Backwards(), torch.randn(2, 5)
    assert [type(module).__name__ for module in calls(model, x)] == ["Backwards", "Linear", "LayerNorm", "Linear"]
    assert [row.name for row in layers(model) if row.role == "output"] == ["first"]
    assert [row.name for row in layers(model, example=x) if row.role == "output"] == ["last"]
    assert {row.name: row.reason for row in select(model, skip=("first", "output"), example=x)} == {
        "last": 'the output (skip="output")',
        "first": 'the first layer (skip="first")',
    }


def test_a_layer_alone_is_chosen_whatever_is_skipped():
    for layer in (nn.Linear(3, 4), nn.Conv2d(3, 4, 1), nn.Embedding(3, 4)):
        (row,) = select(layer, types="*", skip=("first", "output", "shortcut"))
        assert (row.name, row.role, row.reason) == ("", "hidden", "")


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (None, ["conv", "linear", "attention.in_proj_weight", "attention.out_proj"]),
        ("conv*", ["conv"]),
        (nn.Linear, ["linear", "attention.out_proj"]),
        ([nn.Conv2d, "embedding"], ["embed", "conv"]),
        ("lstm", [f"lstm.weight_{kind}_l0" for kind in ("ih", "hh")]),
        (nn.RNNBase, [f"lstm.weight_{kind}_l0" for kind in ("ih", "hh")]),
        ("multihead_attention", ["attention.in_proj_weight"]),
    ],
)
def test_types(types, expected):
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(5, 4),
            "conv": nn.Conv2d(3, 4, 3),
            "linear": nn.Linear(4, 4),
            "lstm": nn.LSTM(4, 4),
            "attention": nn.MultiheadAttention(4, 2),
        }
    )
    assert [row.name for row in select(model, types=types) if row.chosen] == expected
    with pytest.raises(ArgumentError, match=r"^types must be among Linear, .*, got ReLU"):
        select(model, types=nn.ReLU)


def test_matrices_that_nobody_can_read_are_named():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up, self.scale = nn.Parameter(torch.ones(2, 3, 4)), nn.Parameter(torch.ones(1, 1, 4))

    model = nn.Sequential(Experts(), nn.Linear(4, 4))
    unread, linear = layers(model)
    assert (unread.name, linear.name) == ("0.gate_up", "1")
    assert "unknown how its neurons lie" in unread.reason
    assert "0.gate_up" in str(hs.energy.report(model))
    assert "0.gate_up" in str(hs.nn.report(model))


def test_decisions_stay_with_the_layers_until_they_are_undone():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    hs.nn.convert(model, output="0")
    assert [row.note for row in hs.nn.report(model).rows] == ['the output (skip="output")', "", ""]
    assert [row.role for row in hs.nn.report(model).rows] == ["output", "hidden", "hidden"]
    hs.nn.revert(model)
    assert [row.role for row in noted(model, "convert")] == ["hidden", "hidden", "output"]
    hs.orthogonal.apply(model, exclude="1")
    assert [row.reason for row in hs.orthogonal.check(model).left] == ["in exclude", 'the output (skip="output")']
    hs.orthogonal.merge(model)
    assert not any("_selections" in vars(module) for module in model.modules())


def test_the_table_fills_up_and_aligns():
    lines = table({"a": "right", "b": "left"}, [("x", "hidden", ["10", "y"], ""), ("longer", "output", [], "why")])
    assert lines.splitlines() == [
        "name    role     a  b  note",
        "x       hidden  10  y",
        "longer  output   -  -  why",
    ]


def _decoupled():
    return hs.nn.convert(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "sphere", output=None)


@pytest.mark.parametrize(
    "call",
    [
        lambda **words: hs.selection.select(_decoupled(), **words),
        lambda **words: hs.nn.convert(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "sphere", output=None, **words),
        lambda **words: hs.nn.project_weights(_decoupled(), **words),
        lambda **words: hs.energy.select(_decoupled(), **words),
        lambda **words: hs.energy.MHE().select(_decoupled(), **words),
        lambda **words: hs.orthogonal.apply(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), output=None, **words),
        lambda **words: hs.orthogonal.adapt(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), output=None, **words),
        lambda **words: hs.parameter_groups(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), lr=1.0, rules=[hs.optim.Rule(**words)]
        ),
    ],
    ids=["select", "convert", "project_weights", "energy", "regulariser", "apply", "adapt", "rule"],
)
def test_a_pattern_of_no_layer_has_the_same_answer_everywhere(call):
    """An error for what is to be taken, a warning at the user's line for what is to be left out."""
    with pytest.raises(ArgumentError, match=r"include must be the name or a pattern of 0, 1, got 'nothing\.\*'"):
        call(include=["0", "nothing.*"])
    text = r"exclude has the pattern 'nothing\.\*', which is that of no layer: there are 0, 1"
    with pytest.warns(UserWarning, match=text) as caught:
        call(exclude=["0", "nothing.*"])
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.parametrize(
    ("model", "told"), [(nn.Linear(3, 3), "'' (the model itself)"), (nn.ReLU(), "a layer (there is none)")]
)
@pytest.mark.parametrize("argument", ["output", "include"])
def test_a_layer_without_a_name_is_told_apart_from_no_layer(model, told, argument):
    text = f"{argument} must be the name or a pattern of {told}, got 'foo'"
    with pytest.raises(ArgumentError, match=f"^{re.escape(text)}$"):
        hs.selection.select(model, **{argument: "foo"})
