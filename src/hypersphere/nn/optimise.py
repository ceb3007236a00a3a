"""What training does for decoupled layers beside gradient steps: kernel norms, statistics, a first state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from hypersphere import selection
from hypersphere.errors import ArgumentError, check_count, check_range
from hypersphere.geometry import at_least_float32
from hypersphere.neurons import is_sharded, whole
from hypersphere.nn.functional import Window, _scaled, _squared_norms
from hypersphere.nn.modules import Decoupled
from hypersphere.nn.operators import is_zero
from hypersphere.nn.operators import operator as create_operator
from hypersphere.nn.sharding import check_unsharded, local, put, settle
from hypersphere.selection import Choice, Output, Types

M = TypeVar("M", bound=nn.Module)


def decoupled_layers(model: nn.Module) -> Iterator[tuple[str, Decoupled]]:
    """The decoupled layers of a model with their names, each once."""
    selection.check_model(model)
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Decoupled))


@torch.no_grad()
def project_weights(
    model: nn.Module,
    s: float = 1.0,
    eps: float = 0.0,
    *,
    types: Types | None = None,
    include: Choice | None = None,
    exclude: Choice | None = None,
    skip: str | Iterable[str] | None = (),
    output: Output = "auto",
    skip_weighted: bool = False,
) -> None:
    r"""Set the norm of every kernel of the decoupled layers to ``s``; call it after ``optimizer.step()``.

    .. math:: w \leftarrow s\, w / \sqrt{\|w\|^2 + \epsilon}

    Unweighted operators do not see the norm, so that the function of the model stays the same, but gradients go with
    its inverse. Also cuts a learned ``k`` with ``k_param="project"`` off at its minimum. Ordinary layers, such as the
    classifier, are left alone, and so is the state of the optimiser. Waits for nothing on the device. Of a sharded
    model all processes call this.

    Args:
        model: The model.
        s: Norm of the kernels.
        eps: What is added to the squared norm; a kernel of zeros stays zero in any case.
        types: Classes of layers, or patterns of their names; this and the next four choose as those of :func:`convert`
            do, by default all decoupled layers.
        include: Which layers: patterns of their names in the model, or a function of name and layer.
        exclude: Which not, in the same way.
        skip: Places to leave alone: ``"first"``, ``"output"``, ``"shortcut"``.
        output: The output layer: its name, the module, ``None``, or ``"auto"``.
        skip_weighted: Leave layers alone whose kernel norm counts, by their ``weighting`` or because another module
            shares the weight; otherwise they are an error.

    Raises:
        ArgumentError: For a layer whose kernel norm counts, and for a weight that a hook computes (as the old
            ``weight_norm`` and pruning do); nothing has been changed then.

    Example:
        >>> import hypersphere as hs
        >>> layer = hs.nn.SphereLinear(3, 2)
        >>> project_weights(layer, s=2.0)
        >>> layer.kernel_norms().allclose(torch.full((2,), 2.0))
        True
    """
    check_range("s", s, 0, open_low=True)
    check_range("eps", eps, 0)
    selection.check_model(model)
    settle(model)
    others = (m for m in model.modules() if not (isinstance(m, Decoupled) and m.operator.weighting == "none"))
    shared = {id(parameter) for module in others for parameter in module._parameters.values() if parameter is not None}
    named = list(decoupled_layers(model))
    if types is not None or include is not None or exclude is not None or skip:
        rows = selection.select(model, types=types, include=include, exclude=exclude, skip=skip, output=output)
        wanted = {row.module for row in rows if row.chosen}
        named = [(name, layer) for name, layer in named if layer in wanted]
    chosen = [layer for name, layer in named if _projectable(name, layer, shared, skip_weighted)]
    plain = [layer for layer in chosen if not parametrize.is_parametrized(layer, "weight")]
    ordinary = [layer for layer in plain if not is_sharded(layer.weight)]
    if ordinary:
        torch._foreach_copy_([layer.weight for layer in ordinary], [_projected(layer, s, eps) for layer in ordinary])
    for layer in plain:
        if is_sharded(layer.weight):
            put(layer.weight, _projected(layer, s, eps))
    for layer in chosen:
        if parametrize.is_parametrized(layer, "weight"):
            layer.weight = _projected(layer, s, eps)  # its parametrisation takes the value apart
    for _, layer in named:
        if layer.operator.k_param == "project" and layer.k_raw is not None:
            local(layer.k_raw).clamp_(min=layer.operator.K_MIN)


def _projectable(name: str, layer: Decoupled, shared: set[int], skip_weighted: bool) -> bool:
    """Whether to project a layer; raises where that would change the function of the model."""
    name = name or type(layer).__name__
    if layer.folded:
        return False
    if layer.operator.weighting != "none" or id(layer._parameters.get("weight")) in shared:
        if skip_weighted:
            return False
        why = "a weight that an ordinary module shares"
        if layer.operator.weighting != "none":
            why = f"weighting={layer.operator.weighting!r}"
        raise ArgumentError("model", f"must have no layer whose kernel norm counts, got {name} with {why}")
    if "weight" in vars(layer):
        raise ArgumentError("model", f"must have no layer whose weight a hook computes, got {name}")
    return True


def _projected(layer: Decoupled, s: float, eps: float) -> Tensor:
    """The weight with kernels of norm ``s``, in its own layout and type."""
    weight = whole(layer.weight)
    kernels = layer._by_kernel(at_least_float32(weight))
    squared_norm = kernels.square().sum(tuple(range(2, kernels.dim())), keepdim=True) + eps
    factors = torch.where(squared_norm > 0, s * squared_norm.rsqrt(), 0.0)
    return layer._by_layout(kernels * factors).to(weight.dtype)


class WeightProjection:
    """Projection of the kernels every so many steps (:func:`project_weights`), and once to begin with.

    Args:
        model: The model.
        every: Steps between projections.
        s: Norm of the kernels.
        eps: What is added to the squared norms.
        skip_weighted: Leave layers alone whose kernel norm counts; otherwise they are an error.

    Example:
        >>> import hypersphere as hs
        >>> model = nn.Sequential(hs.nn.SphereLinear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> optimiser, projection = torch.optim.SGD(model.parameters(), lr=0.1), WeightProjection(model, every=2)
        >>> for _ in range(4):
        ...     model(torch.randn(5, 3)).square().sum().backward()
        ...     optimiser.step()
        ...     projection()
        >>> model[0].kernel_norms().allclose(torch.ones(8))
        True
    """

    def __init__(
        self, model: nn.Module, every: int = 100, s: float = 1.0, eps: float = 0.0, *, skip_weighted: bool = False
    ) -> None:
        check_count("every", every)
        self.model, self.every, self.s, self.eps, self.skip_weighted = model, every, s, eps, skip_weighted
        self.steps = 0
        self.project()

    def project(self) -> None:
        """Project now."""
        project_weights(self.model, self.s, self.eps, skip_weighted=self.skip_weighted)

    def __call__(self, step: int | None = None) -> None:
        """Count one step (or set the number of steps taken) and project where it is the turn."""
        self.steps = self.steps + 1 if step is None else step
        if self.steps % self.every == 0:
            self.project()


# ---------------------------------------------------------------------------------------------- statistics


@torch.no_grad()
def recalibrate(model: M, batches: Iterable[Any]) -> M:
    """Estimate anew the statistics that evaluation uses: those of batch normalisation and mean patch norms.

    They become plain means over the given batches. Only the layers that have them run in training mode: dropout and the
    like are off, as in evaluation. Afterwards modes, momenta and everything else are as before. Layers that no batch
    reaches keep what they had, and all do where an error ends it.

    Args:
        model: The model.
        batches: Inputs on the device of the model. Of a tuple or list the first is taken, as in ``(images, labels)``; a
            mapping is passed by keywords.

    Returns:
        The model.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
        >>> x = torch.randn(100, 3)
        >>> recalibrate(model, [x])(x).mean(0).abs().max() < 1e-5
        tensor(True)
    """
    selection.check_model(model)
    if not isinstance(batches, Iterable):
        raise ArgumentError("batches", f"must be batches to go through, got {type(batches).__name__}")
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    layers = [m for _, m in decoupled_layers(model) if getattr(m.operator, "mean_norm", False)]
    with _training_alone(model, {*norms, *layers}), _averaging(norms, layers):
        empty = True
        for batch in batches:
            empty = False
            _run(model, batch)
        if empty:
            raise ArgumentError("batches", "must not be empty")
    return model


@torch.no_grad()
def saturation(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    r"""Share of the patches of a batch that lie beyond the radius of each kernel.

    A radius learns from one side of it: that of ``ball`` from the patches within, that of ``seg`` from those beyond,
    and ``tanh`` is flat far beyond. Where no patch is on that side the radius is frozen. Patches of zeros do not count.
    The model runs as in evaluation and stays as it is.

    Args:
        model: A model with layers whose operators have a radius.
        batch: Input on the device of the model: a tensor, a tuple or list whose first entry is one, or a mapping of
            keywords.

    Returns:
        Name of the layer -> share for each kernel, ``(O,)`` in [0, 1], for the layers that the batch reaches.

    Example:
        >>> import hypersphere as hs
        >>> saturation(hs.nn.BallLinear(2, 1, eps=0.0), torch.tensor([[0.5, 0.0], [0.0, 2.0], [3.0, 0.0], [0.0, 0.0]]))
        {'': tensor([0.6667])}
    """
    found: dict[str, list[Tensor]] = {}
    layers = {name: layer for name, layer in decoupled_layers(model) if layer.operator.has_radius}

    def measured(name: str, layer: Any) -> Callable[[Tensor, Window | None], Tensor]:
        respond = layer._respond

        def measure(x: Tensor, window: Window | None) -> Tensor:
            squared_norm = _squared_norms(x, window)
            radius, zero = _scaled(layer._radius(), layer._mean_norm()), is_zero(squared_norm)
            if layer.operator.weighting == "joint":  # which compares the product of both norms
                radius = radius / layer._directions(layer.weight, x.dtype)[1]
            # No comparison of every patch with every kernel: the patches are sorted.
            norms = (
                torch.where(zero, -1.0, (squared_norm + layer.operator.eps).sqrt())
                .transpose(0, 1)
                .flatten(1)
                .sort()
                .values
            )
            within = torch.searchsorted(norms, radius.view(len(norms), -1).to(norms.dtype), right=True)
            patches = (~zero).transpose(0, 1).flatten(1).sum(1, keepdim=True)
            found[name] = [*found.get(name, []), ((norms.shape[1] - within) / patches.clamp(min=1)).flatten()]
            return respond(x, window)

        return measure

    try:
        for name, layer in layers.items():
            vars(layer)["_respond"] = measured(name, layer)
        with _training_alone(model, set()):
            _run(model, batch)
    finally:
        for layer in layers.values():
            vars(layer).pop("_respond", None)
    return {name: torch.stack(shares).mean(0) for name, shares in found.items()}


def _run(model: nn.Module, batch: Any) -> None:
    """Run a model on a batch of any form."""
    if isinstance(batch, Mapping):
        model(**batch)
    else:
        model(batch[0] if isinstance(batch, (tuple, list)) else batch)


@contextmanager
def _training_alone(model: nn.Module, chosen: set[Any]) -> Iterator[None]:
    """The model with ``chosen`` modules in training mode, all others in evaluation mode, and nothing compiled."""
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:
            module.training = module in chosen
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _averaging(norms: list[_BatchNorm], layers: list[Decoupled]) -> Iterator[None]:
    """Make running statistics plain means over the batches seen inside."""
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    before = [{name: getattr(norm, name).clone() for name in statistics} for norm in norms]
    momenta = [norm.momentum for norm in norms]
    operators = [layer.operator for layer in layers]
    kept = [(layer.patch_norm_mean.clone(), layer.patch_norm_seen.clone()) for layer in layers]
    sums = {layer: torch.zeros_like(layer.patch_norm_mean, dtype=torch.float64) for layer in layers}
    counts = dict.fromkeys(layers, 0)

    def add(layer: Any, args: Any, output: Any) -> None:
        sums[layer] += layer.patch_norm_mean
        counts[layer] += int(layer.patch_norm_seen)  # an empty batch has no mean
        layer.patch_norm_mean.zero_()
        layer.patch_norm_seen.fill_(False)

    hooks = [layer.register_forward_hook(add) for layer in layers]
    done = False
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
        for layer in layers:
            layer.patch_norm_mean.zero_()
            layer.patch_norm_seen.fill_(False)
            layer.operator = create_operator(layer.operator, mean_init="first")
        yield
        done = True
    finally:
        for hook in hooks:
            hook.remove()
        for norm, momentum, old in zip(norms, momenta, before, strict=True):
            norm.momentum = momentum
            if not (done and norm.num_batches_tracked):
                for name, value in old.items():
                    getattr(norm, name).copy_(value)
        for layer, op, (mean, seen) in zip(layers, operators, kept, strict=True):
            layer.operator = op
            reached = done and counts[layer]
            layer.patch_norm_mean.copy_(sums[layer] / counts[layer] if reached else mean)
            layer.patch_norm_seen.copy_(torch.ones_like(seen) if reached else seen)


def init_from(model: M, trained: nn.Module | Mapping[str, Tensor], s: float = 1.0) -> M:
    """Initialise a decoupled network from an ordinary one of the same structure that was trained.

    Copies all parameters and buffers by name (radius and steepness of the operators stay as they are) and projects the
    kernels of unweighted layers to norm ``s``. Responses then have another scale than before, so let
    :func:`recalibrate` estimate the statistics of batch normalisation and the mean patch norms over some batches before
    evaluating or fine-tuning. With the operator ``linear``, the cosine and batch normalisation in training mode the
    network computes what the ordinary one does.

    Args:
        model: The decoupled network.
        trained: The trained network, or its ``state_dict()``.
        s: Norm of the kernels.

    Returns:
        The decoupled network.

    Raises:
        ArgumentError: Where names or shapes differ.

    Example:
        >>> import hypersphere as hs
        >>> trained = nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8))
        >>> model = nn.Sequential(hs.nn.TanhConv2d(1, 8, 3), nn.BatchNorm2d(8))
        >>> model = recalibrate(init_from(model, trained), [torch.randn(16, 1, 8, 8)])
    """
    check_range("s", s, 0, open_low=True)
    selection.check_model(model)
    check_unsharded(model, "initialise it before fully_shard()")
    state = trained.state_dict() if isinstance(trained, nn.Module) else trained
    if not isinstance(state, Mapping):
        raise ArgumentError("trained", f"must be a module or its state_dict(), got {type(state).__name__}")
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    before = {name: value.clone() for name, value in own.items()}
    try:
        model.load_state_dict(state)  # copies what fits before it says what does not
        project_weights(model, s, skip_weighted=True)
    except (RuntimeError, ArgumentError) as error:
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(before[name])
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError("trained", f"must have the structure of the model: {error}") from None
    return model
