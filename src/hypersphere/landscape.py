r"""Loss landscapes: what a model measures on a line or plane through its weights, in random directions.

.. math:: f(a, b) = L(\theta^* + a\,\delta + b\,\eta)

The directions :math:`\delta` and :math:`\eta` are random, and every filter of theirs is as long as the matching filter
of :math:`\theta^*`, so that landscapes of networks of different scale can be compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.geometry import at_least_float32

Measured = float | Tensor | Mapping[str, float | Tensor]

_DRAWS = {"gaussian": torch.randn, "uniform": torch.rand}


@dataclass(frozen=True)
class Landscape:
    """Measurements on a grid around a model's weights.

    Attributes:
        coordinates: Multiples of each direction ``(points,)``, float64, the same for both.
        values: Measurements by name, each ``(points,)`` or ``(points, points)``, float64 on the CPU; the first index is
            that of the first direction.
        seed: What the directions were drawn with.

    Example:
        >>> layer = nn.Linear(2, 3)
        >>> found = landscape(layer, lambda: layer.weight.square().sum(), dimensions=2, points=5)
        >>> found.dimensions, found.values["loss"].shape
        (2, torch.Size([5, 5]))
    """

    coordinates: Tensor
    values: dict[str, Tensor]
    seed: int

    @property
    def dimensions(self) -> int:
        """Number of directions."""
        return next(iter(self.values.values())).dim()


def landscape(
    model: nn.Module | Iterable[Tensor],
    evaluate: Callable[[], Measured],
    *,
    span: float = 1.5,
    points: int = 21,
    dimensions: int = 1,
    distribution: str = "gaussian",
    normalise: str | None = "filter",
    vectors: bool = False,
    seed: int = 0,
) -> Landscape:
    r"""Measure a model on a grid of random directions through its weights.

    What moves are the trainable parameters of two dimensions and more: of a plain network its filters, of one that is
    trained orthogonally the unconstrained matrices of its rotations. A model is put in evaluation mode, so that
    statistics of batch normalisation stay; its modes and, bit by bit, its parameters are as before at the end, also
    after an error. Directions are drawn from the seed, the same on every device, and the first is the same with one
    dimension as with two. There is no gradient unless ``evaluate`` enables it.

    Args:
        model: A model, or the very tensors to move; these are measured in whatever mode their model is.
        evaluate: Called at every point of the grid without arguments; returns a number or several by name.
        span: The grid goes from ``-span`` to ``span``.
        points: Points along each direction, at least 2; the weights themselves are on the grid if it is odd.
        dimensions: 1 or 2 directions.
        distribution: Of the entries of a direction: ``"gaussian"``, or ``"uniform"`` in [0, 1].
        normalise: ``"filter"`` makes each filter of a direction as long as the matching filter of the weights,
            ``"layer"`` each tensor, ``None`` nothing. A filter is a row of a matrix and the weights of an output
            channel, of a rotation's unconstrained matrices a column. A filter (or tensor) of zeros does not move then.
        vectors: Move parameters of fewer dimensions, biases and those of normalisation, as well; each is one filter.
        seed: Seed of the directions.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.constant_(layer.weight, 3.0)
        >>> found = landscape(layer, lambda: layer.weight.norm(), points=3, normalise="layer")
        >>> found.coordinates, round(float(found.values["loss"][1]), 4)
        (tensor([-1.5000,  0.0000,  1.5000], dtype=torch.float64), 4.2426)
    """
    check_range("span", span, 0, open_low=True)
    check_range("points", points, 2)
    if dimensions not in (1, 2):
        raise ArgumentError("dimensions", f"must be 1 or 2, got {dimensions}")
    check_choice("distribution", distribution, tuple(_DRAWS))
    if normalise is not None:
        check_choice("normalise", normalise, ("filter", "layer"))
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    parameters: list[Tensor]
    if isinstance(model, nn.Module):
        parameters = [p for p in model.parameters() if p.requires_grad and (vectors or p.dim() >= 2)]
    else:
        parameters = list(model)
    if not parameters:
        raise ArgumentError("model", "must have trainable parameters to move, got none")
    rotations = {p: m for m in modules if getattr(m, "is_rotation", False) for p in m.parameters(recurse=False)}
    # Not the seed itself: weights that were drawn with the same one would be the directions.
    digest = hashlib.blake2b(f"landscape/{seed}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    # All of the first direction before the second, so that one dimension is a part of two.
    directions = [
        [_direction(p, rotations.get(p), distribution, normalise, generator) for p in parameters]  # type: ignore[call-overload]
        for _ in range(dimensions)
    ]
    # Symmetric, and exactly zero in the middle.
    coordinates = span * torch.arange(1 - points, points, 2, dtype=torch.float64) / (points - 1)
    found: dict[str, list[Tensor]] = {}
    origin = [p.detach().clone() for p in parameters]
    with torch.no_grad(), _kept(modules, parameters, origin):
        for place in torch.cartesian_prod(*[coordinates] * dimensions).view(-1, dimensions).tolist():
            for index, (p, start) in enumerate(zip(parameters, origin, strict=True)):
                # In place and seen by autograd's versions, so that whatever is computed from a parameter knows.
                p.copy_(sum((a * d[index] for a, d in zip(place, directions, strict=True)), start))
            measured = evaluate()
            for name, value in (measured if isinstance(measured, Mapping) else {"loss": measured}).items():
                found.setdefault(name, []).append(torch.as_tensor(value, dtype=torch.float64).detach())
    shape = (points,) * dimensions
    # Only now from the device, which need not wait at every point.
    return Landscape(coordinates, {name: torch.stack(v).cpu().view(shape) for name, v in found.items()}, seed)


@contextmanager
def _kept(modules: list[nn.Module], parameters: list[Tensor], origin: list[Tensor]) -> Iterator[None]:
    """Evaluation mode, and everything as before at the end."""
    modes = [module.training for module in modules]
    # The warm starts of rotations are near the matrices of the weights themselves, not of those on the grid.
    carried = [(module, module.carried) for module in modules if getattr(module, "carried", None) is not None]
    try:
        for module in modules:
            module.training = False
        for module, _ in carried:
            module.carried = None  # type: ignore[assignment]
        yield
    finally:
        torch._foreach_copy_(parameters, origin)
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for module, state in carried:
            module.carried = state


@torch.no_grad()
def _direction(
    parameter: Tensor,
    rotation: nn.Module | None,
    distribution: str,
    normalise: str | None,
    generator: torch.Generator,
) -> Tensor:
    """A random direction for a parameter, in float32 or wider, drawn on the CPU."""
    weight = at_least_float32(parameter.detach())
    drawn = _DRAWS[distribution](weight.shape, generator=generator, dtype=weight.dtype).to(weight.device)
    if getattr(getattr(rotation, "map", None), "skew", False):
        # Of such a matrix no more than this is read; a direction into the rest would lead nowhere.
        weight, drawn = weight.triu(1), drawn.triu(1)
    if normalise is None:
        return drawn
    axes: int | tuple[int, ...] = tuple(range(weight.dim()))
    if normalise == "filter" and weight.dim() >= 2:
        axes = tuple(range(1, weight.dim())) if rotation is None else -2
    wanted, length = (torch.linalg.vector_norm(x, dim=axes, keepdim=True) for x in (weight, drawn))
    return drawn * torch.where(length > 0, wanted / length, 0.0)


__all__ = ["Landscape", "landscape"]
