"""Parameter groups: every parameter once, decay where it belongs, and the training of the trainer by plain SGD."""

import copy

import pytest
import torch
from torch import nn

import hypersphere as hs
from hypersphere import recipe
from hypersphere.errors import ArgumentError
from hypersphere.optim import Rule
from hypersphere.runs import RunFolder
from hypersphere.train import Trainer

CPU = torch.device("cpu")


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 6)
    )
    hs.nn.convert(model, "tanh", include="0", output=None)
    hs.orthogonal.apply(model, include="2", output=None)
    return model, hs.losses.ArcFace(6, 10)


def names(group, model, head):
    known = {p: name for name, p in nn.ModuleDict({"model": model, "head": head}).named_parameters()}
    return [known[p] for p in group["params"]]


def test_groups_by_role():
    model, head = parts()
    groups = hs.parameter_groups(
        model, head, lr=0.1, weight_decay=0.01, head_lr=0.4, rotation_lr=0.2, rotation_decay=0.003, decay="weights"
    )
    found = {group["name"]: (names(group, model, head), group["lr"], group["weight_decay"]) for group in groups}
    assert found == {
        "model": (["model.5.weight"], 0.1, 0.01),
        "model-vectors": (["model.0.bias", "model.1.weight", "model.1.bias", "model.2.bias", "model.5.bias"], 0.1, 0.0),
        "model-kernels": (["model.0.weight"], 0.1, 0.0),
        "model-operators": (["model.0.radius_raw"], 0.1, 0.0),
        "model-rotations": (["model.2.parametrizations.weight.0.free"], 0.2, 0.003),
        "head": (["head.weight"], 0.4, 0.01),
    }


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.LBFGS])
def test_any_optimiser_takes_them(kind):
    model, head = parts()
    groups = hs.parameter_groups(model, head, lr=0.1)
    if kind is torch.optim.LBFGS:  # takes one group alone
        groups = [p for group in groups for p in group["params"]]
    optimiser = kind(groups)
    head(model(torch.randn(4, 3, 5, 5)), torch.tensor([1, 2, 3, 4])).backward()
    before = [p.detach().clone() for p in head.parameters()]
    optimiser.step(lambda: head(model(torch.ones(4, 3, 5, 5)), torch.tensor([1, 2, 3, 4])).detach())
    assert all(not torch.equal(p, old) for p, old in zip(head.parameters(), before, strict=True))


def test_every_parameter_once_and_frozen_ones_never():
    model, head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)
    model[1].weight = model[0].weight
    head.weight = model[2].weight
    model[0].bias.requires_grad_(False)
    groups = hs.parameter_groups(model, head, lr=0.1)
    taken = [p for group in groups for p in group["params"]]
    assert len(taken) == len(set(taken)) == 5
    assert set(taken) == {p for p in (*model.parameters(), *head.parameters()) if p.requires_grad}


def test_a_kernel_that_an_ordinary_layer_shares_is_decayed():
    model = nn.Sequential(hs.nn.SphereLinear(4, 4), nn.Linear(4, 4), hs.nn.SphereLinear(4, 4))
    model[1].weight = model[0].weight
    found = {group["name"]: len(group["params"]) for group in hs.parameter_groups(model, lr=0.1)}
    assert found == {"model": 2 + sum(p is not None for p in (model[0].bias, model[2].bias)), "model-kernels": 1}


def test_matrices_are_for_an_optimiser_that_keeps_them_orthogonal():
    model = hs.orthogonal.apply(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), "direct")
    groups = hs.parameter_groups(model, lr=0.1, weight_decay=0.5)
    optimiser = hs.optim.OGD(groups, momentum=0.9)
    for _ in range(5):
        optimiser.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimiser.step()
    assert {group["name"]: group.get("orthogonal", False) for group in groups} == {
        "model": False,
        "model-matrices": True,
    }
    ((_, rotation),) = hs.orthogonal.rotations(model)
    R = rotation.free[0].detach()
    torch.testing.assert_close(R.T @ R, torch.eye(4), atol=2e-2, rtol=0)
    assert (R - torch.eye(4)).norm() > 0.05


def test_rules_and_mistakes():
    model, head = parts()
    rules = [Rule("model.5.*", lr=3.0, weight_decay=0.7), Rule("*.bias", lr=2.0)]
    found = {
        group["name"]: (names(group, model, head), group["lr"], group["weight_decay"])
        for group in hs.parameter_groups(model, head, lr=0.1, weight_decay=0.01, decay="weights", rules=rules)
    }
    assert found["model-model.5.*"] == (["model.5.weight", "model.5.bias"], pytest.approx(0.3), 0.7)
    assert found["model-*.bias-vectors"] == (["model.0.bias", "model.1.bias", "model.2.bias"], 0.2, 0.0)
    with pytest.raises(ArgumentError, match=r"^rules has the pattern 'model.9.\*', which fits no parameter"):
        hs.parameter_groups(model, lr=0.1, rules=[Rule("model.9.*")])
    for wrong in ({"lr": -1}, {"lr": 0.1, "weight_decay": -1}, {"lr": 0.1, "decay": "some"}):
        with pytest.raises(ArgumentError, match=f"^{list(wrong)[-1]} must be"):
            hs.parameter_groups(model, **wrong)


@pytest.mark.parametrize("name", ["digits-dcnet", "digits-softmax"])
def test_plain_sgd_trains_what_the_trainer_does(name, tmp_path):
    changes = ["train.steps=6", "train.log_every=3", "data.batch_size=32", "optimiser.name=sgd", "optimiser.lr=0.05"]
    changes += [
        "optimiser.momentum=0.9",
        "optimiser.weight_decay=0.01",
        "optimiser.head_lr=2",
        "optimiser.decay=weights",
    ]
    changes += ["train.precision=fp32", "schedule.name=constant", "schedule.warmup=0", "train.clip_norm=null"]
    changes += ["project.every=0", "regularisers=[]"]
    plan = recipe.load(name, changes)
    trainer = Trainer(plan, RunFolder.create(tmp_path / "run", plan, CPU), CPU)
    model, head = copy.deepcopy(trainer.model), copy.deepcopy(trainer.head)
    batches, labels = [], []
    hooks = [
        trainer.model.register_forward_pre_hook(
            lambda module, args: batches.append(args[0].clone()) if module.training else None
        ),
        trainer.head.register_forward_pre_hook(lambda module, args: labels.append(args[1].clone())),
    ]
    trainer.fit()
    for hook in hooks:
        hook.remove()
    groups = hs.parameter_groups(model, head, lr=0.05, weight_decay=0.01, head_lr=0.1, decay="weights")
    optimiser = torch.optim.SGD(groups, momentum=0.9, fused=True)
    before = copy.deepcopy(model.state_dict())
    for x, y in zip(batches[-6:], labels[-6:], strict=True):
        optimiser.zero_grad()
        head(model.train()(x), y).backward()
        optimiser.step()
    found, expected = model.state_dict(), trainer.model.state_dict()
    moved = 0.0
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=0, msg=lambda m, key=key: f"{key}: {m}")
        moved = max(moved, float((value.float() - before[key].float()).abs().max()))
    assert moved > 1e-3


class Attends(nn.Module):
    """Layers of several weights, tied ones, and a parametrised one."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.attention = nn.MultiheadAttention(4, 2)
        self.down = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.up = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"types": "conv2d"}, {"conv.weight", "conv.bias"}),
        ({"types": nn.Conv2d, "match": "*.bias"}, {"conv.bias"}),
        (
            {"include": ("attention.in_proj_weight", "down")},
            {
                *("attention.in_proj_weight", "attention.in_proj_bias", "down.bias"),
                *("down.parametrizations.weight.original0", "down.parametrizations.weight.original1"),
            },
        ),
        (
            {"types": "linear", "exclude": "down", "skip": "output", "output": "up"},
            {"attention.out_proj.weight", "attention.out_proj.bias"},
        ),
        ({"include": lambda name, layer: name == "up"}, {"up.weight", "up.bias"}),
    ],
)
def test_rules_choose_layers_in_the_words_of_the_selector(words, expected):
    """What the chosen layers own has the rate of the rule, each parameter once; the head never has."""
    model, head = Attends(), nn.Linear(4, 2)
    groups = hs.parameter_groups(model, head, lr=0.1, rules=[Rule(lr=3.0, **words)])
    found = {name for group in groups if group["lr"] > 0.2 for name in names(group, model, head)}
    assert found == {f"model.{name}" for name in expected}
    everything = [p for group in groups for p in group["params"]]
    assert set(everything) == {*model.parameters(), *head.parameters()} and len(everything) == len(set(everything))
    chosen = {layer.name.split(".")[0] for layer in hs.selection.select(model, **words_of(words)) if layer.chosen}
    assert chosen == {name.split(".")[0] for name in expected}


def words_of(words):
    return {key: value for key, value in words.items() if key != "match"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"include": "nothing"}, "^rules has a choice of layers whose include must be the name or a pattern of conv, "),
        ({"types": "conv2d", "exclude": "conv"}, "^rules has a choice of layers whose model must have a layer that is"),
    ],
)
def test_rules_for_layers_that_are_not_there_are_mistakes(words, text):
    with pytest.raises(ArgumentError, match=text):
        hs.parameter_groups(Attends(), lr=0.1, rules=[Rule(**words)])
