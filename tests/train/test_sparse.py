"""Optimisers of runs whose head has a sparse gradient."""

import pytest
import torch

import hypersphere as hs
from hypersphere import recipe
from hypersphere.errors import ArgumentError
from hypersphere.optim import RowAdamW, RowSGD
from hypersphere.train.optimiser import make_optimiser, parameter_groups

CPU = torch.device("cpu")


def made(*overrides, sparse=True, model=None):
    """Parameter groups and optimiser of a network and a sampled head."""
    chosen = recipe.load("digits-softmax", [*overrides]).optimiser
    body = torch.nn.Linear(5, 4) if model is None else model
    head = hs.losses.CosFace(4, 50, sample_rate=0.2, sparse=sparse)
    groups = parameter_groups(body, head, chosen, CPU)
    return groups, make_optimiser(groups, chosen), head


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("sgd", RowSGD, {"momentum": 0.5, "nesterov": True}),
        ("adamw", RowAdamW, {"betas": (0.8, 0.95)}),
    ],
)
def test_sparse_gradients_choose_the_kind_that_takes_them(name, kind, options):
    overrides = [f"optimiser.name={name}", "optimiser.weight_decay=0.125", "optimiser.lr=0.5", "optimiser.head_lr=0.5"]
    overrides += ["optimiser.momentum=0.5", "optimiser.nesterov=true", "optimiser.betas=[0.8,0.95]"]
    groups, optimiser, head = made(*overrides)
    assert type(optimiser) is kind
    assert [(group["name"], group.get("sparse", False)) for group in groups] == [("model", False), ("head", True)]
    for group in optimiser.param_groups:
        assert {key: group[key] for key in options} == options and group["weight_decay"] == 0.125
        assert isinstance(group["lr"], torch.Tensor)
    assert [float(group["lr"]) for group in optimiser.param_groups] == [0.5, 0.25]
    state = optimiser.state[head.weight]
    assert state and all(value.shape[0] == 50 and not value.any() for value in state.values())
    before = head.weight.detach().clone()
    head(torch.randn(3, 4), torch.arange(3)).backward()
    optimiser.step()
    assert (head.weight != before).any(1).sum() == 10
    groups, optimiser, _ = made(*overrides, sparse=False)
    assert type(optimiser) is {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
    assert not any("sparse" in group for group in groups)


def test_others_are_refused():
    message = r"^name must be one of sgd, adamw for sparse gradients, got 'adam'$"
    with pytest.raises(ArgumentError, match=message):
        made("optimiser.name=adam")
    made("optimiser.name=adam", sparse=False)
    model = hs.orthogonal.apply(torch.nn.Linear(6, 4), "direct", output=None)
    with pytest.raises(ArgumentError, match=r"^name has no form for sparse gradients where matrices .*, got 'sgd'$"):
        made(model=model)
    made(model=model, sparse=False)
