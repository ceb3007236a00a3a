"""Weights that are sharded over processes have the energies, and the gradients, of one process with whole weights."""

from __future__ import annotations

import functools
import gc
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import hypersphere as hs
from helpers.worlds import worlds
from hypersphere.energy import LowRankBilateral, energies, pairs
from hypersphere.errors import ArgumentError
from hypersphere.testing.contract import variants
from hypersphere.testing.energies import CONTRACT

MORE = {
    "mhe": [
        {"s": 0.0, "reduction": "sum"},
        {"eps": 0.1, "half_space": True},
        {"subset": 2},
        {"preset": "released", "angular": True},
    ],
    "koleo": [{"half_space": True, "scaled": True}],
    "rp-comhe": [{"dim": 4, "s": 1.0, "projections_per_neuron": 3.0, "aggregate": "max"}],
    "ap-comhe": [{"dim": 4, "s": 1.0, "share": "dim"}],
    "group-comhe": [{"group_channels": 3, "s": 0.5, "partition": "random"}],
}
SETUPS = {
    "one process": (1, "S0", (7, 6), torch.float64, True, False),
    "two": (2, "S0", (7, 6), torch.float32, True, True),
    "three, uneven": (3, "S0", (7, 6), torch.float64, True, False),
    "four, fewer rows": (4, "S0", (2, 6), torch.float64, False, False),
    "two, replicated": (2, "R", (7, 6), torch.float32, True, True),
    "three, columns": (3, "S1", (6, 5), torch.float64, False, False),
    "four, rows and columns": (4, "S0 S1", (7, 6), torch.float64, True, False),
    "four, hybrid": (4, "R S0", (7, 6), torch.float32, False, True),
    "three, one row": (3, "S0", (1, 6), torch.float32, True, False),
}
"""Processes, placements, shape, type, whether in training mode, whether under autocast."""


def cases(name: str) -> list[dict[str, Any]]:
    found = [*variants(CONTRACT, name), *MORE.get(name, ())]
    if "half_space" in {option.name for option in energies[name].options} and name != "relaxed-mhp":
        found += [{**found[0], "half_space": half_space} for half_space in (False, True)]
    return found


def made(name: str, options: dict[str, Any], train: bool = False) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return energies.create(name, **options).train(train)


@functools.cache
def mesh_of(axes: int = 1) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    size = dist.get_world_size()
    return (
        init_device_mesh("cpu", (size,)) if axes == 1 else init_device_mesh("cpu", (2, size // 2), mesh_dim_names=AXES)
    )


AXES = ("copies", "shards")


def sharded(weight: Tensor, placements: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    kinds = [Replicate() if kind == "R" else Shard(int(kind[1:])) for kind in placements.split()]
    return nn.Parameter(distribute_tensor(weight, mesh_of(len(kinds)), kinds))


def evaluated(energy: Any, weight: Tensor, autocast: bool = False, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Value of a matrix and three times its gradient, the second time that it is asked for."""
    for _ in range(2):
        torch.manual_seed(seed)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            value = energy(weight)
    gradient = torch.autograd.grad(3 * value, weight)[0] if value.requires_grad else torch.zeros_like(weight)
    return value.detach(), gradient


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def close(found: Tensor, wanted: Tensor, what: str) -> None:
    tolerance = 1e-12 if wanted.dtype == torch.float64 else 1e-5
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, what
    error = float((found - wanted).detach().abs().max()) if wanted.numel() else 0.0
    assert error <= tolerance * max([1.0, *wanted.detach().abs().flatten().tolist()]), f"{what}: {error}"


# ------------------------------------------------------------------------------------------------------- matrices


def all_of_a_matrix(placements: str, shape: Any, dtype: torch.dtype, train: bool, autocast: bool) -> dict[str, Any]:
    weight = sharded(drawn(shape, dtype), placements)
    found = {}
    for name in energies:
        found[name] = []
        for options in cases(name):
            # Other draws on every process, unless they agree on them.
            value, gradient = evaluated(made(name, options, train), weight, autocast, seed=dist.get_rank())
            assert isinstance(gradient, type(weight.data)), f"{name} has a gradient that is not sharded"
            assert gradient.placements == weight.placements, name
            assert gradient.to_local().shape == weight.to_local().shape, name
            found[name].append((value, gradient.full_tensor()))
    return found


@functools.cache
def matrices(setup: str) -> list[dict[str, Any]]:
    size, *rest = SETUPS[setup]
    return worlds(size).run(all_of_a_matrix, *rest)


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("name", energies)
def test_a_sharded_matrix_has_the_value_and_the_gradient_of_the_whole(name, setup):
    _, _, shape, dtype, train, autocast = SETUPS[setup]
    for case, options in enumerate(cases(name)):
        weight = drawn(shape, dtype).requires_grad_()
        value, gradient = evaluated(made(name, options, train), weight, autocast)
        for found in matrices(setup):
            close(found[name][case][0], value, f"{name} with {options}")
            close(found[name][case][1], gradient, f"gradient of {name} with {options}")


def functions_of_a_matrix() -> dict[str, Any]:
    weight, rank = sharded(drawn((7, 5), torch.float64), "S0"), dist.get_rank()
    found = {"energy": evaluated(lambda w: hs.energy.hyperspherical_energy(w, 1, beta=BETA), weight)}
    P = drawn((2, 3, 5), torch.float64)
    found["compressive"] = evaluated(lambda w: hs.energy.compressive_energy(w, P).sum(), weight)
    found["preservation"] = evaluated(lambda w: hs.energy.preservation_loss(w, P).sum(), weight)
    found["subset"] = evaluated(lambda w: hs.energy.subset(w, 3).square().sum(), weight, seed=rank)
    labels = LABELS[rank]
    for function in (hs.energy.batch_versus_all, hs.energy.batch_pairs):
        found[function.__name__] = evaluated(lambda w, f=function: f(w, labels), weight)
    distance, gradient = hs.energy.caffe_inter_class(weight, labels, 10.0)
    found["caffe"] = distance, gradient
    better = hs.energy.refine(weight, steps=3, restarts=2)
    assert better.placements == weight.placements
    found["refine"] = better.full_tensor()
    found["gap"] = evaluated(lambda w: hs.energy.hyperspherical_uniformity_gap(BETA.diag()[:, :5], w, CLASSES), weight)
    return {
        key: (value[0], value[1].full_tensor() if hasattr(value[1], "full_tensor") else value[1])
        if isinstance(value, tuple)
        else value
        for key, value in found.items()
    }


BETA = torch.linspace(1, 2, 7, dtype=torch.float64)
CLASSES = torch.arange(7)
LABELS = [torch.tensor([0, 1, 1, 4]), torch.tensor([2, 6, 0, 3]), torch.tensor([5, 5, 5, 1])]


@pytest.mark.parametrize("size", [1, 3])
def test_functions_of_a_matrix(size):
    weight = drawn((7, 5), torch.float64).requires_grad_()
    P = drawn((2, 3, 5), torch.float64)
    wanted = {
        "energy": evaluated(lambda w: hs.energy.hyperspherical_energy(w, 1, beta=BETA), weight),
        "compressive": evaluated(lambda w: hs.energy.compressive_energy(w, P).sum(), weight),
        "preservation": evaluated(lambda w: hs.energy.preservation_loss(w, P).sum(), weight),
        "subset": evaluated(lambda w: hs.energy.subset(w, 3).square().sum(), weight),
        "gap": evaluated(lambda w: hs.energy.hyperspherical_uniformity_gap(BETA.diag()[:, :5], w, CLASSES), weight),
    }
    results = worlds(size).run(functions_of_a_matrix)
    for rank, found in enumerate(results):
        for key, (value, gradient) in wanted.items():
            close(found[key][0], value, key)
            close(found[key][1], gradient, f"gradient of {key}")
        assert torch.equal(found["refine"], results[0]["refine"])
        energy = hs.energy.hyperspherical_energy
        assert energy(found["refine"]) < energy(weight)
        distance, gradient = hs.energy.caffe_inter_class(weight, LABELS[rank], 10.0)
        close(found["caffe"][0], distance, "caffe")
        close(found["caffe"][1], gradient, "caffe")


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", ["batch_versus_all", "batch_pairs"])
def test_energies_of_a_batch_are_those_of_data_parallel_training(name, size):
    """Each process has labels of its own, and the gradient is that of the mean of their values."""
    weight = drawn((7, 5), torch.float64).requires_grad_()
    own = [evaluated(lambda w, labels=labels: getattr(hs.energy, name)(w, labels), weight) for labels in LABELS[:size]]
    for rank, found in enumerate(worlds(size).run(functions_of_a_matrix)):
        close(found[name][0], own[rank][0], name)
        close(found[name][1], torch.stack([gradient for _, gradient in own]).mean(0), f"gradient of {name}")


# --------------------------------------------------------------------------------------------------------- models


class Mixed(nn.Module):
    """Layers of all kinds; the last is the output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, groups=2, padding=1)
        self.up = nn.ConvTranspose2d(6, 5, 2)
        self.attention = nn.MultiheadAttention(6, 3, batch_first=True)
        self.normed = parametrizations.weight_norm(nn.Linear(6, 7))
        self.low_rank = nn.Linear(7, 8, bias=False)
        self.tied = nn.Linear(7, 8)
        self.tied.weight = self.low_rank.weight
        self.embedding = nn.Embedding(5, 6)
        self.classifier = nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.up(self.conv(images).relu()).flatten(2)[..., :6]
        tokens = self.attention(tokens, tokens, tokens, need_weights=False)[0]
        hidden = self.normed(tokens.mean(1)).tanh()
        return self.classifier(self.low_rank(hidden).relu() + self.tied(hidden))


def mixed(dtype: torch.dtype = torch.float64, low_rank: bool = False) -> Any:
    torch.manual_seed(3)
    model = Mixed()
    if low_rank:  # fully_shard() wants modules that share a parameter to be wrapped together
        model.tied = nn.Linear(7, 8)
        parametrize.register_parametrization(model.low_rank, "weight", LowRankBilateral((8, 7), 2))
    return Whole(model).to(dtype)


class Whole(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.discriminator = model

    def forward(self, images: Tensor) -> Tensor:
        return self.discriminator(images)


def split(model: nn.Module, how: str) -> None:
    from torch.distributed.fsdp import fully_shard

    if how == "columns":
        found = {p: sharded(p.detach(), f"S{p.dim() - 1}") for p in model.parameters()}
        for layer in model.modules():
            for name, p in layer._parameters.items():
                layer._parameters[name] = None if p is None else found[p]
        return
    mesh = mesh_of(2 if how == "hybrid" else 1)
    for layer in list(model.modules())[:1:-1] if how == "layers" else []:
        if list(layer.parameters(recurse=False)) and not isinstance(layer, parametrize.ParametrizationList):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def named(how: str) -> list[str]:
    """Energies of every kind of code; all of them under fully_shard() of the model and of its layers."""
    return list(energies) if how in ("model", "layers") else ["koleo", "mhe", "mhp", "orthonormal", "rp-comhe"]


def of_a_model(how: str, low_rank: bool) -> dict[str, Any]:
    model = mixed(low_rank=low_rank)
    split(model, how)
    found: dict[str, Any] = {}
    for name in named(how):
        torch.manual_seed(dist.get_rank())
        energy = made(name, cases(name)[0], train=True)
        model.zero_grad()
        value = energy(model)
        value.backward()
        gradients = {key: p.grad for key, p in model.named_parameters()}
        for key, p in model.named_parameters():
            assert p.grad is None or p.grad.placements == p.placements, (name, key)
        each = energy.layer_energies(model)
        found[name] = value.detach(), each, {key: g if g is None else g.full_tensor() for key, g in gradients.items()}
    found["report"] = [str(hs.energy.report(model)), str(made("mhe", {"half_space": True}).report(model))]
    found["report"].append(str(made("koleo", {}).report(model)))
    return found


MODELS = [(2, "columns", False), (2, "model", False), (3, "layers", True), (4, "hybrid", False)]


@functools.cache
def models(size: int, how: str, low_rank: bool) -> list[dict[str, Any]]:
    return worlds(size).run(of_a_model, how, low_rank)


@pytest.mark.parametrize(("setup", "name"), [(setup, name) for setup in MODELS for name in named(setup[1])], ids=str)
def test_a_sharded_model_has_the_value_and_the_gradients_of_the_whole(setup, name):
    model = mixed(low_rank=setup[-1])
    torch.manual_seed(0)
    energy = made(name, cases(name)[0], train=True)
    value = energy(model)
    value.backward()
    each = energy.layer_energies(model)
    assert value != 0
    for found in models(*setup):
        close(found[name][0], value.detach(), name)
        assert list(found[name][1]) == list(each)
        for key, one in each.items():
            close(found[name][1][key], one.detach(), f"{name} of {key}")
        for key, p in model.named_parameters():
            gradient = found[name][2][key]
            assert (gradient is None) == (p.grad is None), (name, key)
            if gradient is not None:
                close(gradient, p.grad, f"gradient of {name} by {key}")


@pytest.mark.parametrize("setup", MODELS, ids=str)
def test_report_of_a_sharded_model(setup):
    model = mixed(low_rank=setup[-1])
    energies_of = None, made("mhe", {"half_space": True}), made("koleo", {})
    for found in models(*setup):
        assert found["report"] == [str(hs.energy.report(model, energy)) for energy in energies_of]


# ------------------------------------------------------------------------------------------------------ training


def steps(how: str, before: bool) -> dict[str, Any]:
    """Two steps of training on a share of the batch, and what the model then is."""
    from torch.distributed.tensor import DTensor

    rank, size = (dist.get_rank(), dist.get_world_size()) if how else (0, 1)
    model, energy = mixed(), made("mhe", {"half_space": True}, train=True)
    if how:
        split(model, how)
    images, labels = IMAGES.chunk(size)[rank], TARGETS.chunk(size)[rank]
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    values = []
    for _ in range(2):
        value = energy(model) if before else None
        loss = nn.functional.cross_entropy(model(images), labels)
        value = energy(model) if value is None else value  # of parameters that may still be whole
        optimiser.zero_grad()
        (loss + value).backward()
        optimiser.step()
        values.append(value.detach())
    assert not how or all(isinstance(p, DTensor) for p in model.parameters())
    return {"values": torch.stack(values)} | {
        key: p.full_tensor().detach() if how else p.detach() for key, p in model.named_parameters()
    }


IMAGES = drawn((6, 4, 5, 5), torch.float64)
TARGETS = torch.arange(6) % 3


@pytest.mark.parametrize(("size", "how", "before"), [(2, "model", False), (3, "model", True), (2, "hybrid", False)])
def test_a_step_of_sharded_training_is_that_of_one_process(size, how, before):
    wanted = steps("", before)
    for found in worlds(size).run(steps, how, before):
        for key, value in wanted.items():
            close(found[key], value, key)


# ------------------------------------------------------------------------------------------ pairs that are shared out


class Counting:
    """How many pairs this process computes, and how large the largest tensor of them is."""

    def __init__(self) -> None:
        self.pairs, self.original = 0, pairs.squared_chords

    def __call__(self, rows: Tensor, columns: Tensor, **options: Any) -> Any:
        found = self.original(rows, columns, **options)
        self.pairs += found[0].numel()
        return found

    def __enter__(self) -> Counting:
        self.kept = pairs.SHARED, pairs.TILE, pairs.TILE_ELEMENTS
        pairs.squared_chords = self
        pairs.SHARED, pairs.TILE, pairs.TILE_ELEMENTS = 30, 4, 16
        return self

    def __exit__(self, *_: object) -> None:
        pairs.squared_chords = self.original
        pairs.SHARED, pairs.TILE, pairs.TILE_ELEMENTS = self.kept


PAIRED = [
    ("mhe", {}),
    ("mhe", {"s": 1.0, "half_space": True, "reduction": "sum"}),
    ("mhe", {"eps": 0.5, "half_space": True}),
    ("mhe", {"angular": True, "half_space": True}),
    ("pair-energy", {"potential": "gaussian", "half_space": True}),
    ("orthoreg", {}),
    ("uniformity", {"half_space": True}),
]


def many(placements: str, dtype: torch.dtype) -> list[Any]:
    weight, found = sharded(drawn((37, 5), dtype), placements), []
    beta = torch.linspace(1, 2, 37)
    functions = [made(*case) for case in PAIRED]
    functions += [lambda w: hs.energy.hyperspherical_energy(w, beta=beta, half_space=True)]
    for function in functions:
        with Counting() as count:
            value, gradient = evaluated(function, weight)
            with torch.no_grad():
                assert abs(float(function(weight) - value)) <= 1e-6 * abs(float(value))
        found.append((value, gradient.full_tensor(), count.pairs))
    return found


@pytest.mark.parametrize(
    ("size", "placements", "dtype"),
    [(1, "S0", torch.float64), (2, "S0", torch.float64), (3, "S0", torch.float32), (4, "S0 S1", torch.float64)],
)
def test_pairs_of_many_vectors_are_shared_out(size, placements, dtype):
    beta = torch.linspace(1, 2, 37)
    functions = [made(*case) for case in PAIRED]
    functions += [lambda w: hs.energy.hyperspherical_energy(w, beta=beta, half_space=True)]
    results = worlds(size).run(many, placements, dtype)
    for case, function in enumerate(functions):
        weight = drawn((37, 5), dtype).requires_grad_()
        with Counting() as alone:
            value, gradient = evaluated(function, weight)
            function(weight)
        counts = [found[case][2] for found in results]
        assert sum(counts) == alone.pairs and max(counts) < 1.3 * alone.pairs / size, counts
        for found in results:
            close(found[case][0], value, f"{case}")
            close(found[case][1], gradient, f"gradient of {case}")


@pytest.mark.parametrize("grad", [False, True])
def test_parts_of_a_sum_add_up_to_it(grad):
    vectors = drawn((2, 37, 5), torch.float64)
    vectors[1, 3] = 0
    for half_space, eps in ((False, 0.0), (True, 0.0), (True, 0.3)):
        options = (vectors, None, "Riesz", hs.energy.potentials.create("riesz").code()[1], half_space, eps, True, grad)
        total, gradient = pairs._pair_sums(*options)
        with Counting():
            parts = [pairs._pair_sums(*options, part, 3) for part in range(3)]
        close(sum(part[0] for part in parts), total, "parts")
        close(sum(part[1] for part in parts), gradient, "gradients of parts")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("n", [300, 5000])
def test_parts_of_a_fused_sum_add_up_to_it(n):
    from hypersphere.energy import fused

    vectors = drawn((1, n, 64), torch.float32).cuda()
    units = nn.functional.normalize(vectors, dim=2)
    options = units, torch.ones(1, n, device="cuda"), None, hs.energy.potentials.create("riesz"), True
    for grad in (False, True):
        total, gradient = fused.tiled(*options, grad)
        parts = [fused.tiled(*options, grad, part, 3) for part in range(3)]
        assert torch.allclose(sum(part[0] for part in parts), total, rtol=1e-5)
        found = sum(part[1] for part in parts)
        assert (found - gradient).norm() <= 2e-3 * gradient.norm()


# ------------------------------------------------------------------------------------------------------- the rest


def what_is_left() -> dict[str, Any]:
    """Sizes of the tensors that are alive between forward and backward pass, and which had been gathered."""
    model = nn.Sequential(*(nn.Linear(31, 53, bias=False) for _ in range(4)))
    split(model, "model")
    energy, most = made("mhe", {}), 0
    original = energy.energy

    def measured(vectors: Tensor, role: str = "hidden") -> Tensor:
        nonlocal most
        gc.collect()
        most = max(most, alive())
        return original(vectors, role)

    def alive() -> int:
        storages = {
            x.untyped_storage().data_ptr()
            for x in gc.get_objects()
            if type(x) in (Tensor, nn.Parameter) and x.untyped_storage().nbytes() >= 4 * 31 * 53
        }
        return len(storages)

    energy.energy = measured
    gc.collect()
    before = alive()
    value = energy(model)
    gc.collect()
    after = alive()
    value.backward()
    return {"most": most - before, "after": after - before}


def test_one_whole_layer_is_held_at_a_time():
    for found in worlds(3).run(what_is_left):
        assert found["most"] == 1 and found["after"] == 0


def second(name: str) -> Tensor:
    weight = sharded(drawn((7, 5), torch.float64), "S0")
    (gradient,) = torch.autograd.grad(made(name, {})(weight), weight, create_graph=True)
    (found,) = torch.autograd.grad(gradient.full_tensor().square().sum(), weight)
    return found.full_tensor()


@pytest.mark.parametrize("name", ["mhe", "koleo", "orthonormal"])
def test_second_derivatives(name):
    weight = drawn((7, 5), torch.float64).requires_grad_()
    (gradient,) = torch.autograd.grad(made(name, {})(weight), weight, create_graph=True)
    (wanted,) = torch.autograd.grad(gradient.square().sum(), weight)
    for found in worlds(3).run(second, name):
        close(found, wanted, name)


class Scaled(hs.energy.Regulariser):
    """One of a user's own, with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def energy(self, vectors: Tensor, role: str = "hidden") -> Tensor:
        return self.scale * vectors.square().sum((1, 2))


def own_energy() -> Any:
    weight, energy = sharded(drawn((7, 5), torch.float64), "S0"), Scaled()
    layers = hs.energy.neurons("head", lambda: weight, "output") + hs.energy.neurons("plain", BETA.diag)
    energy(layers).backward()
    frozen = weight.detach()
    (only,) = torch.autograd.grad(energy(frozen), energy.scale)
    return energy.scale.grad, weight.grad.full_tensor(), only, energy(frozen).requires_grad


def test_an_energy_with_parameters_of_its_own():
    weight = drawn((7, 5), torch.float64)
    square = weight.square().sum()
    for scale, gradient, only, needed in worlds(2).run(own_energy):
        close(scale, square + BETA.square().sum(), "parameter")
        close(gradient, 4 * weight, "weight")
        close(only, square, "parameter alone")
        assert needed


def refusals() -> list[str]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate

    found = []
    for energy in (made("mhe", {}), made("rp-comhe", {})):
        for shape in ((4,), (2, 3, 4)):
            with pytest.raises(ArgumentError) as error:
                energy(sharded(torch.ones(shape), "S0"))
            found.append(str(error.value))
    first = DeviceMesh("cpu", [0])
    weight = DTensor.from_local(torch.eye(3), first, [Replicate()], run_check=False)
    try:
        found.append(float(made("mhe", {})(weight)))
    except ArgumentError as error:
        found.append(str(error))
    # What follows still finds all processes.
    found.append(float(made("mhe", {})(sharded(torch.eye(3), "S0"))))
    return found


def test_refusals_come_on_all_processes():
    first, other = worlds(2).run(refusals)
    for found in (first, other):
        assert found[:2] == [f"target must have shape (n, d), got {shape}" for shape in ("(4,)", "(2, 3, 4)")]
        assert found[2:4] == found[:2]
        assert found[-1] == 0.5
    assert first[4] == 0.5
    assert other[4].startswith("weight must be held by this process, too, got one on the processes of DeviceMesh")


def compiled(name: str) -> tuple[Tensor, Tensor]:
    weight = sharded(drawn((7, 5), torch.float64), "S0")
    torch._dynamo.reset()
    function = torch.compile(made(name, {}), backend="aot_eager", fullgraph=True)
    value, gradient = evaluated(function, weight)
    return value, gradient.full_tensor()


@pytest.mark.parametrize("name", ["mhe", "koleo"])
def test_compiled(name):
    weight = drawn((7, 5), torch.float64).requires_grad_()
    value, gradient = evaluated(made(name, {}), weight)
    for found in worlds(2).run(compiled, name):
        close(found[0], value, name)
        close(found[1], gradient, f"gradient of {name}")
