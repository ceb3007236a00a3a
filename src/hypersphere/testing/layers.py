r"""The contract of layers: modules that models take by name, as convolution, linear layer, normalisation, activation.

What a layer is follows from the options that it requires: ``in_channels`` and so on make a convolution,
``in_features`` a linear layer, ``num_features`` or ``channels`` a normalisation, none an activation.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere.nn import factory, layers
from hypersphere.testing import common, numeric
from hypersphere.testing.contract import Contract, variants

CONTRACT = Contract("layer", "layers", "hypersphere.nn:layers")


def kind(name: str) -> str:
    """What a layer is used as."""
    needed = {option.name for option in CONTRACT.entry(name).options if option.required}
    if "in_channels" in needed:
        return "conv"
    if "in_features" in needed:
        return "linear"
    return "norm" if needed & {"num_features", "channels"} else "act"


def members(name: str, seed: int = 0) -> list[nn.Module]:
    """The member with each of the options to be tried, with the same numbers every time, built as models do."""
    arguments = {"conv": (4, 6, 3), "linear": (4, 6), "norm": (4,), "act": ()}[kind(name)]
    more: dict[str, Any] = {"padding": 1} if kind(name) == "conv" else {}
    found = []
    for options in variants(CONTRACT, name):
        torch.manual_seed(seed)
        found.append(layers.create(name, *arguments, **more, **options))
    return found


def given(name: str, batch: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    """An input that a layer of this kind takes."""
    shape = (batch, 4) if kind(name) == "linear" else (batch, 4, 5, 5)
    return numeric.draw(*shape, seed=1, dtype=dtype)


@CONTRACT.check
def keeps_the_shape_of_its_kind(name: str) -> None:
    """A convolution and a linear layer change the channels alone, a normalisation and an activation nothing."""
    for layer in members(name):
        x = given(name, dtype=torch.float32)
        channels = 6 if kind(name) in ("conv", "linear") else 4
        assert layer(x).shape == (3, channels, *x.shape[2:])
        assert layer.eval()(x[:1]).shape == (1, channels, *x.shape[2:])


@CONTRACT.check
def models_take_it_by_name(name: str) -> None:
    """The factory of its name builds it."""
    arguments = {"conv": (4, 6, 3), "linear": (4, 6), "norm": (4,), "act": ()}[kind(name)]
    assert type(factory(name)(*arguments)) is type(members(name)[0])


@CONTRACT.check
def is_finite_at_the_edges(name: str) -> None:
    """Zero, constant, large and tiny inputs give finite values and gradients."""
    for layer in members(name):
        x = given(name, dtype=torch.float32)
        for case in (torch.zeros_like(x), torch.ones_like(x), 1e3 * x, 1e-12 * x):
            leaf = case.clone().requires_grad_()
            value = layer(leaf)
            leaves = [leaf, *(p for p in layer.parameters() if p.requires_grad)]
            numeric.finite([value, *torch.autograd.grad(value.square().mean(), leaves)], f"{layer}")


@CONTRACT.check
def has_its_gradients(name: str) -> None:
    """The gradients by input and parameters are those of differences, in training and in evaluation."""
    for layer in members(name):
        layer = layer.double()
        names = [n for n, p in layer.named_parameters() if p.requires_grad]
        for mode in (True, False):
            layer.train(mode)

            def response(x: Tensor, *values: Tensor, layer: nn.Module = layer, names: list[str] = names) -> Tensor:
                own = copy.deepcopy(layer)  # running statistics move
                found: Tensor = torch.func.functional_call(own, dict(zip(names, values, strict=True)), (x,))
                return found * numeric.draw(*found.shape, seed=2)

            values = [layer.get_parameter(n).detach() for n in names]
            numeric.gradient(response, given(name), *values, what=f"gradient of {layer}")


@CONTRACT.check
def can_be_transformed(name: str) -> None:
    """In evaluation, ``torch.func`` finds first and second derivatives, of all samples and of each."""
    for layer in members(name):
        layer = layer.double()
        layer(given(name))
        layer.eval()
        names = [n for n, p in layer.named_parameters() if p.requires_grad]

        def response(x: Tensor, *values: Tensor, layer: nn.Module = layer, names: list[str] = names) -> Tensor:
            found: Tensor = torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))
            return found

        values = [layer.get_parameter(n).detach() for n in names]
        numeric.transforms(response, given(name, batch=2)[..., :4, :4], *values, what=f"{layer}")


@CONTRACT.check
def samples_count_by_themselves_in_evaluation(name: str) -> None:
    """In evaluation the response to a sample does not depend on the others of its batch, nor change anything."""
    for layer in members(name):
        layer(given(name, dtype=torch.float32))
        layer.eval()
        x, state = given(name, dtype=torch.float32), copy.deepcopy(layer.state_dict())
        numeric.close(layer(x)[1:2], layer(x[1:2]), 1e-5, f"{layer} of one sample")
        for key, value in layer.state_dict().items():
            assert torch.equal(value, state[key]), f"{layer} changes {key} in evaluation"


@CONTRACT.check
def has_no_state_of_others(name: str) -> None:
    """Two layers share nothing, and one that is loaded from another's state answers alike."""
    for one, other in zip(members(name), members(name, seed=1), strict=True):
        assert not {p.data_ptr() for p in one.parameters()} & {p.data_ptr() for p in other.parameters()}
        with torch.no_grad():
            for p in one.parameters():
                p.add_(0.1)
        x = given(name, dtype=torch.float32)
        one(x)
        other.load_state_dict(one.state_dict())
        numeric.close(other.eval()(x), one.eval()(x), 1e-7, f"{one} loaded")


@CONTRACT.check
def is_finite_in_half_precision(name: str) -> None:
    """In 16 bit and under autocast it is close to float32, and parameters keep their type."""
    for layer in members(name):
        x = given(name, dtype=torch.float32)
        wanted = copy.deepcopy(layer)(x)
        with torch.autocast("cpu", torch.bfloat16):
            numeric.close(copy.deepcopy(layer)(x), wanted, 5e-2, f"{layer} under autocast")
        assert all(p.dtype == torch.float32 for p in layer.parameters())
        low = copy.deepcopy(layer).to(torch.bfloat16)
        numeric.close(low(x.bfloat16()), wanted, 1e-1, f"{layer} in bfloat16")


@CONTRACT.check
def any_layout_will_do(name: str) -> None:
    """Inputs that are not contiguous give the same."""
    for layer in members(name):
        layer.eval()
        x = given(name, dtype=torch.float32)
        if x.dim() == 4:
            numeric.close(layer(x.contiguous(memory_format=torch.channels_last)), layer(x), 1e-5, f"{layer}")
        numeric.close(layer(x.repeat_interleave(2, 0)[::2]), layer(x), 1e-5, f"{layer}")


@CONTRACT.check
def waits_for_nothing(name: str) -> None:
    """Nothing is read off the device."""
    for layer in members(name):
        x = given(name, dtype=torch.float32).requires_grad_()
        layer(x)
        with numeric.Host():
            layer(x).sum().backward()


@CONTRACT.check
def is_one_graph(name: str) -> None:
    """Compiled code has no breaks and gives the same numbers."""
    torch._dynamo.reset()
    numeric.compiled(members(name)[0].eval(), given(name, dtype=torch.float32), tolerance=1e-4)


def _recipe(name: str) -> list[str]:
    return ["model.name=plain-cnn", f"model.{kind(name)}={name}"]


common.add(CONTRACT, build=lambda name: members(name)[0], recipe=_recipe, example=False)
