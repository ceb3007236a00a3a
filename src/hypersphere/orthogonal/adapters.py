r"""Fine-tuning by rotation: adapters that rotate the neurons of a frozen model, several for each model.

A pretrained weight :math:`W_0`, neurons being columns, becomes :math:`W = R\,W_0`, with R orthogonal, the identity at
the start, and made of small Cayley blocks: angles between neurons, and with them every hyperspherical energy, stay
those of the pretrained model. Methods are OFT (blocks on the diagonal), COFT (that stays near the identity) and BOFT
(butterflies of blocks), each by rotating the weight or by rotating the layer's inputs (OFTv2), which works with
quantised weights, too (QOFT). One frozen model and a set of rotations for each task, the multi-task form of orthogonal
training, is the same thing: an adapter for each task and :func:`use` to switch.

The parameter of an adapter holds the strict upper triangle of every block, :math:`b(b-1)/2` numbers: what an optimiser
keeps, what is saved and what is counted are the unconstrained parameters. They are spread to matrices by one copy in
front of the map (:class:`Packed`), whose derivative is a selection. The weight of the layer keeps its name in the
model's state, so that checkpoints of the pretrained model go on to fit. Every layer computes its blocks in its own
forward pass, so that parts of a model can be called alone and activations be recomputed;
:func:`hypersphere.orthogonal.cached` computes them once for several passes.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from hypersphere import neurons, selection
from hypersphere.errors import ArgumentError, HypersphereError, check_choice, check_count, check_range
from hypersphere.geometry import at_least_float32, transformed
from hypersphere.neurons import Layout, is_linear, is_ordinary, is_sharded, whole
from hypersphere.nn.sharding import check_unsharded, local, put, settle, writes
from hypersphere.orthogonal.maps import Map, create
from hypersphere.orthogonal.rotation import Rotation
from hypersphere.selection import Choice, Layer, Output, Types

M = TypeVar("M", bound=nn.Module)

_BOOK = "_book_of_adapters"  # attribute of a model that has adapters
_SHOWN = 20
_UNSHARDED_INSTEAD = "use(model, None) lets its base work, and adapter_state_dict(model) gathers what was learned"


# ------------------------------------------------------------------------------------------- one adapter


@dataclass(frozen=True)
class Packed(Map):
    """A map of skew matrices that takes their strict upper triangles ``(..., b(b-1)/2)``, row by row.

    Args:
        inner: The map, one that reads no more than the strict upper triangle.
        block: Size b of the matrices.

    Example:
        >>> Packed(create("cayley"), 2)(torch.tensor([[1.0]]))
        tensor([[[ 0.,  1.],
                 [-1.,  0.]]])
    """

    inner: Map
    block: int

    @property
    def name(self) -> str:
        """That of the map."""
        return self.inner.name

    @property
    def exact(self) -> bool:
        """Whether R is orthogonal to rounding."""
        return self.inner.exact

    def __call__(self, P: Tensor) -> Tensor:
        """``R`` in the type of ``P``."""
        return self.inner(unpack(P, self.block))

    def start(
        self,
        d: int,
        *,
        batch: tuple[int, ...] = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Zeros."""
        return torch.zeros(*batch, self.free(d), device=device, dtype=dtype)


def unpack(P: Tensor, block: int) -> Tensor:
    """Upper triangular matrices ``(..., b, b)`` of what :func:`pack` gave.

    Example:
        >>> unpack(torch.tensor([1.0, 2.0, 5.0]), 3)
        tensor([[0., 1., 2.],
                [0., 0., 5.],
                [0., 0., 0.]])
    """
    upper = torch.triu_indices(block, block, 1, device=P.device)
    full = P.new_zeros(*P.shape[:-1], block**2)
    return full.index_copy(-1, upper[0] * block + upper[1], P).unflatten(-1, (block, block))


def pack(P: Tensor) -> Tensor:
    """The strict upper triangles of matrices ``(..., b, b)`` as :class:`Packed` takes them.

    Example:
        >>> pack(torch.arange(9.0).view(3, 3))
        tensor([1., 2., 5.])
    """
    upper = torch.triu_indices(P.shape[-1], P.shape[-1], 1, device=P.device)
    return P[..., upper[0], upper[1]]


def butterfly(d: int, block: int, factors: int) -> Tensor:
    """Coordinates that the factors of a butterfly rotate, ``(factors, d)``, blocks next to each other.

    Factor l couples half-block g with half-block g + 2^l in groups of 2^(l+1) half-blocks.

    Example:
        >>> butterfly(8, 2, 3).tolist()
        [[0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 1, 3, 4, 6, 5, 7], [0, 4, 1, 5, 2, 6, 3, 7]]
    """
    places = torch.arange(d)
    if factors == 1:
        return places.unsqueeze(0)
    return torch.stack([places.view(-1, 2, 2**level, block // 2).transpose(1, 2).flatten() for level in range(factors)])


class Adapter(Rotation):
    """The rotation of one layer in one adapter; what :func:`adapt` makes.

    Args:
        map: The map.
        layout: How the weight is read.
        d: Size of a neuron.
        outputs: Number of neurons.
        rescale: Learn a factor for every neuron.
        dropout: Share of the blocks of one factor that are the identity in a training step.
        eps: Bound of :func:`constrain`; ``None``: no bound.
        input_centric: Turn inputs instead of the weight.
        **options: Those of a :class:`~hypersphere.orthogonal.Rotation`.

    Example:
        >>> adapter = Adapter(Packed(create("cayley"), 2), Layout(nn.Linear(6, 4)), 6, 4, block=2)
        >>> adapter.free.shape, adapter(torch.ones(4, 6)).shape
        (torch.Size([3, 1]), torch.Size([4, 6]))
    """

    log_scale: nn.Parameter | None

    def __init__(
        self,
        map: Map,
        layout: Layout,
        d: int,
        outputs: int,
        *,
        rescale: bool = False,
        dropout: float = 0.0,
        eps: float | None = None,
        input_centric: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(map, layout, d, **options)
        for name in ("index", "back"):  # they follow from the sizes
            self.register_buffer(name, getattr(self, name), persistent=False)
        self.dropout, self.eps, self.input_centric = dropout, eps, input_centric
        # A logarithm, so that the factor is positive wherever an optimiser goes.
        self.log_scale = nn.Parameter(self.free.new_zeros(outputs)) if rescale else None

    @property
    def exact(self) -> bool:
        """Here ``back`` means the transpose, with which inputs are rotated, and never the inverse."""
        return True

    def matrices(self) -> Tensor:
        """The blocks, some of them the identity where there is dropout."""
        found = super().matrices()
        if not (self.training and self.dropout > 0):
            return found
        parts = found.unflatten(0, (self.stages, -1))
        factor = torch.randint(self.stages, (1, 1), device=found.device)
        dropped = torch.rand(parts.shape[:2], device=found.device) < self.dropout
        dropped &= torch.arange(self.stages, device=found.device).unsqueeze(1) == factor
        eye = torch.eye(self.block, dtype=found.dtype, device=found.device)
        return torch.where(dropped[..., None, None], eye, parts).flatten(0, 1)

    def forward(self, weight: Tensor) -> Tensor:
        """The weight of the adapted layer; computed in float32 or wider, in the type of ``weight``."""
        weight = whole(weight)
        vectors = self.rotate(at_least_float32(self.layout.vectors(weight)))
        if self.log_scale is not None:
            vectors = vectors * whole(self.log_scale).exp().view(vectors.shape[:2]).unsqueeze(-1)
        return self.layout.weight(vectors, weight)

    def inputs(self, x: Tensor) -> Tensor:
        """Inputs ``(..., d)`` for the layer as it was: the transpose of R on each."""
        return self.rotate(x, back=True)

    def outputs(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """Outputs ``(..., n)`` of the layer as it was, each but for its bias times its factor."""
        assert self.log_scale is not None
        scale = self.log_scale.exp().to(y.dtype)
        return y * scale if bias is None else (y - bias) * scale + bias

    @torch.no_grad()
    def constrain(self) -> None:
        """Bring the blocks back into the bound."""
        if self.eps is not None:
            radius = self.eps / math.sqrt(self.free.shape[0] // self.stages)
            free = whole(self.free)
            norm = math.sqrt(2) * torch.linalg.vector_norm(at_least_float32(free), dim=-1, keepdim=True)
            put(self.free, free * (radius / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1))


# --------------------------------------------------------------------------------------- adapters of a layer


class Adapters(nn.ModuleDict):
    """The adapters of one layer, by name, and which of them is at work."""

    def __init__(self) -> None:
        super().__init__()
        self.active: str | None = None
        self.merged: str | None = None
        self.kept: Tensor | None = None
        """The weight that was there before the adapter was merged into it."""
        self.hooks: list[Any] = []

    def working(self, *, input_centric: bool) -> Adapter | None:
        """The adapter that rotates inputs, or the weight, in a forward pass now."""
        if self.active is None or self.merged is not None or self.active not in self:
            return None
        found: Any = self[self.active]
        return found if found.input_centric is input_centric else None

    def before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hook before the forward pass: rotate the inputs."""
        adapter = self.working(input_centric=True)
        if adapter is None:
            return None
        if args:
            return (adapter.inputs(args[0]), *args[1:]), kwargs
        name = "input" if "input" in kwargs else "x"
        return args, {**kwargs, name: adapter.inputs(kwargs[name])}

    def after(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Hook after it: scale the outputs."""
        adapter = self.working(input_centric=True)
        if adapter is not None and _is_dynamic(layer):
            output = _dequantised(args[0] if args else next(iter(kwargs.values())), output.detach(), layer)
        if adapter is None or adapter.log_scale is None:
            return output
        bias: Any = getattr(layer, "bias", None)
        return adapter.outputs(output, bias() if callable(bias) else bias)  # torch's quantised layers have a method


class _Dequantised(torch.autograd.Function):
    """The outputs of one of torch's dynamically quantised layers, with the gradient by its inputs that it lacks.

    It is that of the linear layer with the weight that the whole numbers stand for.
    """

    @staticmethod
    def forward(x: Tensor, outputs: Tensor, layer: Any) -> Tensor:
        return outputs.view_as(outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Any], output: Tensor) -> None:
        ctx.layer = inputs[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] @ ctx.layer.weight().dequantize().to(grads[0]), None, None


def _dequantised(x: Tensor, outputs: Tensor, layer: Any) -> Tensor:
    """The outputs, with that gradient; ``torch.func`` and forward mode get it by a product."""
    if not transformed():
        return _Dequantised.apply(x, outputs, layer)
    products = x @ layer.weight().dequantize().mT.to(x)
    return outputs + (products - products.detach())


def _is_dynamic(layer: nn.Module) -> bool:
    """Whether this is torch's dynamically quantised linear layer, whose kernel has no backward pass."""
    kind = type(layer)
    return kind.__module__ == "torch.ao.nn.quantized.dynamic.modules.linear" and kind.__name__ == "Linear"


class _Rotated(nn.Module):
    """What a layer is besides its own class while adapters rotate its weight."""

    plain: type[nn.Module]
    adapters: Adapters

    @property
    def weight(self) -> Tensor | None:
        """The weight as it is rotated; the frozen one is the parameter of this name."""
        try:
            weight, adapter = self._parameters["weight"], self.adapters.working(input_centric=False)
            if is_sharded(weight) and sys._getframe(1).f_globals.get("__name__", "").startswith("torch.distributed."):
                return weight  # fully_shard() and checkpoints ask for the parameter by its name
            return weight if adapter is None or weight is None else adapter(weight)
        except AttributeError as error:  # torch would take it for a missing property, and the frozen weight instead
            raise RuntimeError(str(error)) from error

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _revived, (self.plain,), vars(self)


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _rotated_class(plain: type[nn.Module]) -> type[nn.Module]:
    if plain not in _classes:
        about = {"plain": plain, "__module__": plain.__module__, "__qualname__": plain.__qualname__}
        _classes[plain] = type(plain.__name__, (_Rotated, plain), about)
    return _classes[plain]


def _revived(plain: type[nn.Module]) -> nn.Module:
    made = _rotated_class(plain)
    return made.__new__(made)


def _install(layer: Any, name: str, adapter: Adapter) -> None:
    holder: Adapters = layer.adapters if isinstance(layer._modules.get("adapters"), Adapters) else Adapters()
    layer.adapters = holder
    holder[name] = adapter
    holder.train(layer.training)
    if adapter.input_centric and not holder.hooks:
        holder.hooks.append(layer.register_forward_pre_hook(holder.before, with_kwargs=True))
        holder.hooks.append(layer.register_forward_hook(holder.after, with_kwargs=True))
    if not adapter.input_centric and not isinstance(layer, _Rotated):
        layer.__class__ = _rotated_class(type(layer))
    layer.keeps_angles = True


def _uninstall(layer: Any) -> None:
    for hook in layer.adapters.hooks:
        hook.remove()
    if isinstance(layer, _Rotated):
        layer.__class__ = layer.plain  # type: ignore[assignment]
    del layer.adapters, layer.keeps_angles


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that have adapters, by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m._modules.get("adapters"), Adapters)}


# ---------------------------------------------------------------------------------------- adapters of a model


@dataclass
class _Book:
    """What a model with adapters remembers."""

    trainable: set[str]
    """Parameters that were trainable before the first adapter."""
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    extras: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Values of the model's own parameters that an adapter trains, while it is not active."""
    base: dict[str, Tensor] = field(default_factory=dict)
    """Those of the base model, while an adapter is active that trains them."""
    active: str | None = None
    merged: str | None = None


def _book(model: nn.Module, name: str | None = None) -> _Book:
    selection.check_model(model)
    book: _Book | None = vars(model).get(_BOOK)
    if book is None:
        raise ArgumentError("model", "must be a module that adapt() was called with, got one without adapters")
    if name is not None and name not in book.configs:
        raise ArgumentError("name", f"must be one of {', '.join(map(repr, book.configs))}, got {name!r}")
    return book


def chosen_name(model: nn.Module, name: str | None) -> str:
    """The adapter that is meant; ``None`` means the active one."""
    book = _book(model, name)
    name = book.active if name is None else name
    if name is None:
        raise ArgumentError("name", "must be given where no adapter is active")
    return name


def adapt(
    model: M,
    method: str = "oft",
    *,
    name: str = "default",
    targets: Choice | None = None,
    types: Types | None = None,
    include: Choice | None = None,
    exclude: Choice | None = None,
    skip: str | Iterable[str] | None = ("output",),
    output: Output = "auto",
    block_size: int | None = None,
    blocks: int | None = None,
    share_blocks: bool = False,
    butterfly: int | None = None,
    coft: bool = False,
    eps: float | None = None,
    rescale: bool = False,
    cayley: str = "exact",
    terms: int = 4,
    input_centric: bool | None = None,
    dropout: float = 0.0,
    dtype: torch.dtype | str | None = None,
    bias: str = "none",
    train: str | Iterable[str] = (),
) -> M:
    r"""Add an adapter to a model, in place: layers compute with :math:`W = R\,W_0 \operatorname{diag}(s)`.

    :math:`W_0` holds the present neurons as columns; R is orthogonal, block diagonal or a butterfly, the identity at
    the start, so that the model computes what it did. The model is frozen but for the new adapter (and ``train``,
    ``bias``), which is active. Build the optimiser afterwards; angles between neurons stay as they are however long it
    is trained.

    Linear layers, convolutions of all kinds (strides, dilation, groups and padding as they may be; groups have
    rotations of their own, but for depthwise ones), transposed ones and the linear layers of GPT-2 in transformers can
    be adapted, and by their inputs any quantised linear layers that have ``in_features`` and ``out_features`` and pass
    a gradient to their inputs. Torch's dynamically quantised ones pass none; they get that of the weight that their
    whole numbers stand for. Those with quantised inputs are refused.

    Args:
        model: Any module, or a layer.
        method: ``"oft"``: blocks on the diagonal of R. ``"boft"``: a product of ``butterfly`` such matrices, each on
            another permutation of the coordinates.
        name: Name of the adapter.
        targets: Which layers: whole names, last parts of names (``"q_proj"``, ``"self.query"``), patterns of whole
            names (``"encoder.*.dense"``), ``"all-linear"``, or a function of name and layer. A layer named so that
            cannot be adapted is an error. By default ``"all-linear"``: all linear layers that can be, but the output
            layer; that one where it is the only linear layer and ``output`` does not name it.
        types: Classes of layers, or patterns of their names (``"conv*"``), in place of ``targets``, as in
            :func:`hypersphere.selection.select`; layers that cannot be adapted are left out.
        include: Which layers, in place of ``targets``: patterns of whole names, or a function of name and layer.
        exclude: Which not, in the same way.
        skip: Places to leave alone where ``targets`` does not name layers: ``"first"``, ``"output"``, ``"shortcut"``.
        output: The output layer: its name, the module, ``None`` (for a feature extractor whose classifier is a head
            apart), or ``"auto"`` for the rule of :mod:`hypersphere.selection`.
        block_size: Size b of a block; by default 32, and 4 for butterflies. A layer whose neurons have a size that it
            does not divide takes the nearest divisor. Coordinates of a convolution's neuron are those of one input
            channel after the other.
        blocks: Number of blocks instead of their size; as many as input channels make each block rotate one kernel.
        share_blocks: One block for all places on the diagonal.
        butterfly: Number m of factors of ``"boft"``, by default 2; R is dense from :math:`m = \log_2(2d/b)` on. Neurons
            must have a size divisible by :math:`b\,2^{m-1}`, and b must be even.
        coft: Bound how far R is from the identity; call :func:`constrain` after every step of the optimiser.
        eps: The bound of ``coft``, by default 6e-5: :math:`\|R - I\|_F \le 2\,\text{eps}`.
        rescale: Learn a positive factor :math:`s_i` for every neuron, too, which changes no angle.
        cayley: ``"exact"``, or ``"neumann"``: products alone, see ``terms``.
        terms: Terms k of the Neumann series; an even number is more exact than the next odd one, and blocks have to
            stay small (spectral norm well below 1).
        input_centric: Turn the inputs of linear layers instead of their weights (OFTv2), which is the same function. It
            is cheaper where there are fewer input vectors than neurons, keeps no rotated weight for the backward
            pass, and is the way for quantised weights. By default these alone. Convolutions always rotate the weight.
        dropout: Multiplicative dropout: in every training step, one factor of the butterfly (of OFT: the only one) is
            drawn, and each of its blocks is the identity with this probability.
        dtype: Type of the parameters; by default float32, or float64 for a model of that type.
        bias: Train biases of ``"all"`` layers, of those with an ``"adapter"``, or ``"none"``.
        train: Other parameters to train and to save with the adapter, such as a new head (``"classifier"``): names and
            patterns as of targets, of modules or of parameters. They belong to the adapter: another adapter, and the
            base model, have their own values of them.

    Returns:
        The model.

    Raises:
        ArgumentError: For a bad argument, a name that is taken, a target that no layer has, and a layer that cannot be
            adapted; the model is unchanged then.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        >>> x = torch.randn(5, 64)
        >>> before = model(x)
        >>> torch.allclose(adapt(model, block_size=16)(x), before, atol=1e-5)
        True
        >>> {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        {'0.adapters.default.free': (4, 120)}
    """
    selection.check_model(model)
    check_unsharded(model, "adapt it before fully_shard()")
    check_choice("method", method, ("oft", "boft"))
    check_choice("cayley", cayley, ("exact", "neumann"))
    check_choice("bias", bias, ("none", "all", "adapter"))
    bound = _bound(coft, eps)
    check_range("dropout", dropout, 0, 1)
    if block_size is not None and blocks is not None:
        raise ArgumentError("blocks", "must not be given together with block_size")
    if method == "oft" and butterfly not in (None, 1):
        raise ArgumentError("butterfly", f'must not be given with method="oft", got {butterfly}')
    factors = (butterfly or 2) if method == "boft" else 1
    if blocks is None:
        block_size = (32 if method == "oft" else 4) if block_size is None else block_size
    for argument, number in (("block_size", block_size), ("blocks", blocks), ("butterfly", factors), ("terms", terms)):
        if number is not None:
            check_count(argument, number, 0 if argument == "terms" else 1)
    check_name(name)
    book: _Book = vars(model).get(_BOOK) or _Book({n for n, p in model.named_parameters() if p.requires_grad})
    if name in book.configs:
        raise ArgumentError("name", f"must not be taken, got {name!r}: drop it first")
    if book.merged is not None:
        raise ArgumentError("model", f"must not be merged, got one with {book.merged!r} in its weights")
    config: dict[str, Any] = {
        "method": method,
        "block_size": block_size,
        "blocks": blocks,
        "share_blocks": share_blocks,
        "butterfly": factors,
        "coft": coft,
        "eps": bound,
        "rescale": rescale,
        "cayley": cayley,
        "terms": terms,
        "input_centric": input_centric,
        "dropout": dropout,
        "dtype": _type_name(dtype),
        "bias": bias,
        "train": [train] if isinstance(train, str) else list(train),
    }
    choice = {"types": types, "include": include, "exclude": exclude, "skip": skip}
    rows = _selected(model, targets, choice, output, input_centric)
    layers: dict[str, Any] = {row.name: row.module for row in rows if row.chosen}
    made = {layer_name: _adapter(layer_name, layer, config) for layer_name, layer in layers.items()}
    extras = _extra_parameters(model, config["train"], bias, layers)
    config["targets"] = list(layers)
    selection.note(rows, "rotate")
    object.__setattr__(model, _BOOK, book)
    for layer_name, adapter in made.items():
        _install(layers[layer_name], name, adapter)
    book.configs[name] = config
    own = _own_parameters(model)
    # The base model's values, as they are where no adapter has others.
    book.extras[name] = {n: book.base.get(n, own[n].data).clone() for n in extras}
    use(model, name)
    return model


def _bound(coft: bool, eps: float | None) -> float:
    if eps is None:
        return 6e-5
    check_range("eps", eps, 0, open_low=True)
    if not coft:
        raise ArgumentError("eps", f"needs coft=True, whose bound it is, got {eps:g}")
    return eps


def check_name(name: Any) -> None:
    """Raise for what cannot be the name of an adapter."""
    if not isinstance(name, str) or not name or "." in name or hasattr(Adapters, name) or name in vars(Adapters()):
        raise ArgumentError("name", f"must be a word that is not a method of torch's modules, got {name!r}")


def _type_name(dtype: Any) -> str | None:
    """The name of a floating-point type, such as ``"float32"``."""
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    found = torch.float32 if name is None else getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ArgumentError("dtype", f"must be a floating-point type of torch, or its name, got {dtype!r}")
    return name


# --------------------------------------------------------------------------------------------- which layers


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.endswith("." + pattern) or fnmatchcase(name, pattern)


def _selected(
    model: nn.Module, targets: Choice | None, choice: dict[str, Any], output: Output, input_centric: bool | None
) -> list[Layer]:
    """All layers of a model, those that are to be adapted without a reason."""
    if targets is not None and not (choice["types"] is choice["include"] is None):
        raise ArgumentError("targets", "must not be given together with types or include")
    found = {row.name: row for row in selection.layers(model, output=output) if _has_kind(row)}
    holders = Counter(id(p) for module in model.modules() for p in module._parameters.values())

    def obstacle(row: Layer) -> str:
        return _obstacle(row.module, holders, input_centric) if _has_kind(row) else f"no adapter for {row.kind}"

    if targets is None and choice["types"] is choice["include"] is None:
        targets = "all-linear"
    wanted, named = _wanted(found, targets)
    for name in named:
        if why := obstacle(found[name]):
            raise ArgumentError("targets", f"must not have {name or type(model).__name__}: {why}")
    linear = [row.role for row in found.values() if is_linear(row.module)]
    if named or (output == "auto" and targets == "all-linear" and linear == ["output"]):
        choice = {**choice, "skip": ()}
    rows = selection.select(model, output=output, obstacle=obstacle, **choice)
    decided = [row if row.reason or row.name in wanted else replace(row, reason="not in targets") for row in rows]
    selection.chosen(model, decided, "targets")
    return decided


def _has_kind(row: Layer) -> bool:
    return isinstance(row.module, neurons.PLAIN) or is_linear(row.module)


def _wanted(found: Mapping[str, Layer], targets: Choice | None) -> tuple[set[str], set[str]]:
    """The layers that ``targets`` means, and those of them that it names; of ``None`` all."""
    if targets is None or ("" in found and targets == "all-linear"):  # the model is a layer
        return set(found), set(found) if targets else set()
    if callable(targets):
        wanted = {name for name, row in found.items() if targets(name, row.module)}
        return wanted, wanted
    if not isinstance(targets, Iterable):
        raise ArgumentError("targets", f"must be names, patterns or a function, got {targets!r}")
    patterns = [targets] if isinstance(targets, str) else list(targets)
    named = {name for pattern in patterns if pattern != "all-linear" for name in _hits(found, pattern)}
    linear = {name: row.role for name, row in found.items() if is_linear(row.module) and "all-linear" in patterns}
    # Nothing is skipped beside what is named.
    return named | {name for name, role in linear.items() if not named or role != "output"}, named


def _hits(found: Mapping[str, Layer], pattern: str) -> set[str]:
    """The layers that a name or a pattern means; a whole name means one, also if others end like that."""
    hits = {pattern} if pattern in found else {name for name in found if _matches(name, pattern)}
    if not hits:
        names = [*list(found)[:_SHOWN], *(["..."] if len(found) > _SHOWN else [])]
        raise ArgumentError("targets", f"must be among {', '.join(names) or 'no layers'}, got {pattern!r}")
    return hits


def _obstacle(module: Any, holders: Mapping[int, int], input_centric: bool | None) -> str:
    weight = module._parameters.get("weight")
    ordinary, kind = is_ordinary(weight), type(module)
    obstacles = {
        "it is lazy: run a batch through the model first": isinstance(module, LazyModuleMixin),
        "its weight is parametrised: merge that first": parametrize.is_parametrized(module, "weight"),
        "another module shares its weight": ordinary and holders[id(weight)] > 1,
        "it is quantised and not linear": not (ordinary or is_linear(module)),
        "its kind has no gradient by its inputs: of torch's quantised layers, those of quantize_dynamic() are taken": (
            not ordinary and kind.__module__.startswith("torch.ao.nn") and not _is_dynamic(module)
        ),
        "attention reads its weight and does not call it: input_centric must be None": (
            bool(input_centric) and kind.__name__ == "NonDynamicallyQuantizableLinear"
        ),
    }
    return next((why for why, there in obstacles.items() if there), "")


def _nearest_divisor(d: int, wanted: int) -> int:
    """The divisor nearest to a number; of two the smaller."""
    return min((abs(n - wanted), n) for n in range(1, d + 1) if d % n == 0)[1]


def _adapter(name: str, layer: Any, config: Mapping[str, Any]) -> Adapter:
    weight = layer._parameters.get("weight")
    ordinary = is_ordinary(weight)
    layout = Layout(layer)
    if ordinary:
        count, n, d = layout.vectors(weight).shape
        outputs = count * n
        groups = 1 if count == 1 or n == 1 else count
    else:
        groups, d, outputs = 1, layer.in_features, layer.out_features
    if config["blocks"] is not None:
        block = d // _nearest_divisor(d, config["blocks"])
    else:
        block = _nearest_divisor(d, config["block_size"])
    factors = config["butterfly"]
    index = None
    if factors > 1:
        if block % 2 or d % (block * 2 ** (factors - 1)):
            raise ArgumentError(
                "butterfly",
                f"must be such that neurons of {name or 'the layer'} have a size divisible by block_size * "
                f"2^(butterfly - 1), with an even block_size, got {factors} and {block} for a size of {d}",
            )
        index = butterfly(d, block, factors)
    options = {} if config["cayley"] == "exact" else {"method": "neumann", "terms": config["terms"]}
    dtype = torch.float32 if config["dtype"] is None else getattr(torch, config["dtype"])
    if ordinary and config["dtype"] is None:
        dtype = torch.promote_types(weight.dtype, dtype)
    asked = bool(config["input_centric"]) and is_linear(layer)
    return Adapter(
        Packed(create("cayley", **options), block),
        layout,
        d,
        outputs,
        groups=groups,
        block=block,
        shared=config["share_blocks"],
        index=index,
        rescale=config["rescale"],
        dropout=config["dropout"],
        eps=config["eps"] if config["coft"] else None,
        input_centric=asked or not ordinary,
        dtype=dtype,
        device=next((t.device for t in (*layer.parameters(), *layer.buffers())), None),
    )


def _own_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model that are not of its adapters."""
    inside = {p for layer in adapted_layers(model).values() for p in layer.adapters.parameters()}
    return {name: p for name, p in model.named_parameters() if p not in inside}


def _extra_parameters(
    model: nn.Module, patterns: Iterable[str], bias: str, layers: Mapping[str, nn.Module]
) -> list[str]:
    """Names of the model's own parameters that are trained with an adapter."""
    own = _own_parameters(model)
    rotated = {f"{name}.weight".lstrip(".") for name in layers}
    chosen: set[str] = set()
    for pattern in patterns:
        hits = set()
        for name in own:
            parts = name.split(".")
            found = any(_matches(".".join(parts[: end + 1]), pattern) for end in range(len(parts)))
            if name == pattern or (found and pattern not in own):
                hits.add(name)
        if not hits or hits & rotated:
            what = f"the frozen weight {min(hits & rotated)}" if hits else "no parameter"
            raise ArgumentError("train", f"must be names of parameters or modules, got {what} by {pattern!r}")
        chosen |= hits
    if bias != "none":
        where = {f"{name}.bias".lstrip(".") for name in layers}
        chosen |= {n for n in own if n.rpartition(".")[2] == "bias" and (bias == "all" or n in where)}
    return [name for name in own if name in chosen]


# ----------------------------------------------------------------------------------------- use, drop, disable


def list_adapters(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The adapters of a model: the configuration of each, by name.

    Example:
        >>> model = adapt(nn.Linear(8, 8), name="first")
        >>> list(list_adapters(adapt(model, name="second")))
        ['first', 'second']
    """
    selection.check_model(model)
    book: _Book | None = vars(model).get(_BOOK)
    return {} if book is None else {name: dict(config) for name, config in book.configs.items()}


def _switch(model: nn.Module, book: _Book, name: str | None) -> None:
    """Let another adapter, or none, be at work; values change hands without a copy into them, of whole parameters."""
    if name == book.active:
        return
    settle(model)
    own = _own_parameters(model) if book.base or (name is not None and book.extras[name]) else {}
    if book.active is not None:
        for key in book.extras[book.active]:
            book.extras[book.active][key] = _exchanged(own[key], book.base.pop(key))
    if name is not None:
        for key, value in book.extras[name].items():
            book.base[key] = _exchanged(own[key], value)
    book.active = name
    for layer in adapted_layers(model).values():
        layer.adapters.active = name


def _exchanged(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Give a parameter another value; the one that it had."""
    if is_sharded(parameter):  # whose memory belongs to fully_shard()
        before = parameter.detach().clone()
        put(parameter, value)
        return before
    before, parameter.data = parameter.data, value.to(parameter.device)
    return before


def use(model: nn.Module, name: str | None) -> None:
    """Let one adapter of a model be at work and trainable, and all others frozen; ``None``: the base model.

    Example:
        >>> model = adapt(nn.Linear(8, 8), name="first")
        >>> use(adapt(model, name="second"), "first")
        >>> [name for name, p in model.named_parameters() if p.requires_grad]
        ['adapters.first.free']
    """
    book = _book(model, name)
    if book.merged is not None:
        raise ArgumentError("model", f"must not be merged, got one with {book.merged!r} in its weights")
    _switch(model, book, name)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if name is not None:
        own = _own_parameters(model) if book.extras[name] else {}
        for key in book.extras[name]:
            own[key].requires_grad_(True)
        for layer in adapted_layers(model).values():
            if name in layer.adapters:
                layer.adapters[name].requires_grad_(True)


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Within it the model computes what its base does; nothing else of its adapters changes.

    Example:
        >>> model = adapt(nn.Linear(8, 8))
        >>> with disabled(model):
        ...     reference = model(torch.ones(8))
    """
    book = _book(model)
    if book.merged is not None:
        raise ArgumentError("model", f"must not be merged, got one with {book.merged!r} in its weights")
    before = book.active
    _switch(model, book, None)
    try:
        yield
    finally:
        _switch(model, book, before)


def drop(model: nn.Module, name: str) -> None:
    """Remove an adapter; after that of the active one the base model is at work, after the last the model is plain.

    Example:
        >>> model = adapt(nn.Linear(8, 8))
        >>> drop(model, "default")
        >>> model
        Linear(in_features=8, out_features=8, bias=True)
    """
    book = _book(model, str(name))  # None is none of them
    check_unsharded(model, _UNSHARDED_INSTEAD)
    if book.merged is not None:
        raise ArgumentError("model", f"must not be merged, got one with {book.merged!r} in its weights")
    if book.active == name:
        use(model, None)
    for layer in adapted_layers(model).values():
        if name in layer.adapters:
            del layer.adapters[name]
            if not len(layer.adapters):
                _uninstall(layer)
    del book.configs[name], book.extras[name]
    if not book.configs:
        unload(model)


# ------------------------------------------------------------------------------------------- merge and unload


@torch.no_grad()
def merge_adapter(model: M, name: str | None = None, *, keep: bool = True) -> M:
    """Put an adapter into the weights of its layers: the model computes the same at no cost beyond its own.

    What is merged is what an adapter that rotates weights computes in training, bit for bit: every kind of layer,
    stride, padding, dilation and input size is right by construction.

    Args:
        model: The model.
        name: The adapter; by default the active one.
        keep: Keep the present weights, in the memory of the CPU, so that :func:`unmerge_adapter` restores their very
            bits. ``False`` saves that memory and cannot be undone.

    Returns:
        The model.

    Raises:
        ArgumentError: For a model that is merged already, and for quantised weights, which cannot be rotated.

    Example:
        >>> model = merge_adapter(adapt(nn.Linear(8, 8)))
        >>> unmerge_adapter(model)
    """
    name = chosen_name(model, name)
    book = _book(model)
    layers = {n: layer for n, layer in adapted_layers(model).items() if name in layer.adapters}
    for layer_name, layer in layers.items():
        if not is_ordinary(layer._parameters.get("weight")):
            why = f"must have weights that can be rotated, got a quantised one: {layer_name or type(layer).__name__}"
            how = "load_adapter(original, *adapter_state_dict(model))"
            raise ArgumentError("model", f"{why}; leave it unmerged, or merge into the one before quantisation: {how}")
    use(model, name)
    settle(model)
    for layer in layers.values():
        weight, adapter = layer._parameters["weight"], layer.adapters[name]
        training, adapter.training = adapter.training, False  # no dropout
        rotated = adapter(weight)
        adapter.training = training
        layer.adapters.kept = local(weight).to("cpu", copy=is_sharded(weight)) if keep else None
        if is_sharded(weight):
            put(weight, rotated)
        else:
            weight.data = rotated
    for layer in adapted_layers(model).values():
        layer.adapters.merged = name
    book.merged = name
    return model


@torch.no_grad()
def unmerge_adapter(model: nn.Module) -> None:
    """Undo :func:`merge_adapter`: weights are those of before, bit for bit, and the adapter is active.

    Example:
        >>> model = adapt(nn.Linear(8, 8))
        >>> before = model._parameters["weight"].clone()
        >>> unmerge_adapter(merge_adapter(model))
        >>> torch.equal(model._parameters["weight"], before)
        True
    """
    book = _book(model)
    if book.merged is None:
        raise ArgumentError("model", "must be merged, got one that is not")
    layers = [layer for layer in adapted_layers(model).values() if book.merged in layer.adapters]
    if any(layer.adapters.kept is None for layer in layers):
        raise ArgumentError("model", "must have been merged with keep=True: the weights of before are lost")
    settle(model)
    for layer in layers:
        weight = layer._parameters["weight"]
        if is_sharded(weight):
            local(weight).copy_(layer.adapters.kept)
        else:
            weight.data = layer.adapters.kept.to(weight.device, weight.dtype)
        layer.adapters.kept = None
    for layer in adapted_layers(model).values():
        layer.adapters.merged = None
    book.merged = None


def unload(model: M) -> M:
    """Remove all adapters: classes, names and what is trainable are as before the first; what was merged stays.

    Without :func:`merge_adapter` this gives the base model back.

    Example:
        >>> model = unload(merge_adapter(adapt(nn.Linear(8, 8))))
        >>> type(model).__name__, list(model.state_dict())
        ('Linear', ['weight', 'bias'])
    """
    book = _book(model)
    check_unsharded(model, _UNSHARDED_INSTEAD)
    if book.merged is None:
        _switch(model, book, None)
    for layer in list(adapted_layers(model).values()):
        _uninstall(layer)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in book.trainable)
    delattr(model, _BOOK)
    selection.forget(model, "rotate")
    return model


@torch.no_grad()
def constrain(model: nn.Module) -> None:
    r"""Bring the blocks of adapters with ``coft`` back into their bound; call it after every ``optimiser.step()``.

    .. math:: Q \leftarrow Q \min(1, \rho / \|Q\|_F), \qquad \rho = \text{eps} / \sqrt{r}

    for the skew matrix Q of each of r blocks, as Hugging Face's peft does in its forward pass. With
    :math:`\|R_i - I\|_F \le 2\|Q_i\|_F` this gives :math:`\|R - I\|_F \le 2\,\text{eps}` for OFT, m times that for a
    butterfly of m factors; a shared block counts once, which gives :math:`\|R - I\|_F \le 2\sqrt{d/b}\,\text{eps}`. The
    first implementation of OFT bounds the norm of a raw matrix by :math:`\epsilon b^2 / \sqrt r`: its :math:`\epsilon`
    is ``eps`` here divided by :math:`b^2`. Nothing waits for the device.

    Example:
        >>> model = adapt(nn.Linear(8, 8), coft=True, eps=0.1)
        >>> _ = nn.init.ones_(model.adapters.default.free)
        >>> constrain(model)
        >>> round(model.adapters.default.free.norm().item() * 2**0.5, 6)
        0.1
    """
    selection.check_model(model)
    settle(model)
    for module in model.modules():
        if isinstance(module, Adapter):
            module.constrain()


# --------------------------------------------------------------------------------------------- save and load


def adapter_state_dict(model: nn.Module, name: str | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of an adapter, and the plain configuration that :func:`load_adapter` takes with them.

    Tensors are ``<layer>.free``, ``<layer>.log_scale`` and, under their names in the model, those that are trained with
    the adapter. Those of a sharded model are whole: all processes call this, and each gets all of them.

    Args:
        model: The model.
        name: The adapter; by default the active one.

    Example:
        >>> state, config = adapter_state_dict(adapt(nn.Linear(64, 8)))
        >>> {key: tuple(value.shape) for key, value in state.items()}, config["block_size"]
        ({'free': (2, 496)}, 32)
    """
    name = chosen_name(model, name)
    book = _book(model)
    state = {key: whole(value.detach()) for key, value in _tensors(model, name).items()}
    own = _own_parameters(model)
    state |= {k: whole(own[k].detach() if book.active == name else v) for k, v in book.extras[name].items()}
    return state, dict(book.configs[name])


def _tensors(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    return {
        f"{layer_name}.{key}".lstrip("."): parameter
        for layer_name, layer in adapted_layers(model).items()
        if name in layer.adapters
        for key, parameter in layer.adapters[name].named_parameters()
    }


@torch.no_grad()
def load_adapter(
    model: M, state: Mapping[str, Tensor], config: Mapping[str, Any], *, name: str = "default", **options: Any
) -> M:
    """Add an adapter from what :func:`adapter_state_dict` gave; it is active.

    Args:
        model: A model with the same layers.
        state: The tensors.
        config: The configuration.
        name: Name of the adapter in this model.
        **options: What to change in the configuration: ``input_centric`` for a model that is quantised, say.

    Returns:
        The model.

    Raises:
        ArgumentError: Where tensors do not fit; the model is unchanged then.

    Example:
        >>> state, config = adapter_state_dict(adapt(nn.Linear(64, 8)))
        >>> list(list_adapters(load_adapter(nn.Linear(64, 8), state, config, name="loaded")))
        ['loaded']
    """
    selection.check_model(model)
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ArgumentError("state", f"must hold tensors by name, got {type(state).__name__}")
    if not isinstance(config, Mapping):
        raise ArgumentError("config", f"must be a mapping of options, got {type(config).__name__}")
    if not {**config, **options}.get("coft"):  # recorded all the same, as the default is
        config = {option: value for option, value in config.items() if option != "eps"}
    config = {**config, **options}
    for option in config:
        if option not in inspect.signature(adapt).parameters or option in ("model", "name"):
            raise ArgumentError("config", f"must have options of hypersphere.orthogonal.adapt, got {option!r}")
    active, notes = vars(model)[_BOOK].active if _BOOK in vars(model) else None, selection.kept(model)
    adapt(model, name=name, **config)
    book = _book(model, name)
    own = _own_parameters(model)
    places: dict[str, Tensor] = {**_tensors(model, name), **{key: own[key] for key in book.extras[name]}}
    wrong = sorted(places.keys() ^ state.keys())
    wrong += [key for key in places if key in state and places[key].shape != state[key].shape]
    if wrong:
        drop(model, name)
        if _BOOK in vars(model):
            use(model, active)
        selection.restore(notes)
        shown = ", ".join([*wrong[:_SHOWN], *(["..."] if len(wrong) > _SHOWN else [])])
        raise ArgumentError("state", f"must have the tensors of the adapter in their shapes, got others: {shown}")
    for key, place in places.items():
        place.copy_(state[key])
    return model


def save_adapter(model: nn.Module, path: str | PathLike[str], name: str | None = None) -> None:
    """Write an adapter to one safetensors file, its configuration in the file's metadata.

    Of a sharded model all processes call this; the first of them writes, and all go on once the file is there.

    Args:
        model: The model.
        path: The file.
        name: The adapter; by default the active one.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_adapter(adapt(nn.Linear(64, 8)), f"{folder}/oft.safetensors")
        ...     model = load_adapter_file(nn.Linear(64, 8), f"{folder}/oft.safetensors")
    """
    state, config = adapter_state_dict(model, name)
    tensors = {key: value.cpu().contiguous() for key, value in state.items()}
    library, metadata = safetensors(), {"hypersphere_adapter": json.dumps(config)}
    with writes(model) as here:
        if here:
            library.save_file(tensors, str(path), metadata=metadata)


def load_adapter_file(model: M, path: str | PathLike[str], *, name: str = "default", **options: Any) -> M:
    """Add an adapter from a file of :func:`save_adapter`; arguments are those of :func:`load_adapter`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_adapter(adapt(nn.Linear(64, 8)), f"{folder}/oft.safetensors")
        ...     layer = load_adapter_file(nn.Linear(64, 8), f"{folder}/oft.safetensors", name="mine")
        >>> list(list_adapters(layer))
        ['mine']
    """
    selection.check_model(model)
    if not Path(path).is_file():
        raise ArgumentError("path", f"must be a file of save_adapter(), got {path}, which is none")
    with safetensors("safetensors").safe_open(str(path), framework="pt") as file:
        metadata = file.metadata() or {}
        if "hypersphere_adapter" not in metadata:
            raise ArgumentError("path", f"must be a file of save_adapter(), got {path}")
        state = {key: file.get_tensor(key) for key in list(file.keys())}
    return load_adapter(model, state, json.loads(metadata["hypersphere_adapter"]), name=name, **options)


def safetensors(name: str = "safetensors.torch") -> Any:
    """The module, or an error that says how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise HypersphereError(
            'files of adapters need safetensors, which is not installed: pip install "hypersphere[workbench]"'
        ) from None
