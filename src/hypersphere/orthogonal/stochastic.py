"""Orthogonal training in small pieces: a few coordinates at a time (S-OPT), on one side of a weight or both (POET)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hypersphere.errors import ArgumentError, check_count, check_seed
from hypersphere.neurons import whole
from hypersphere.nn.sharding import settle
from hypersphere.orthogonal.apply import SAMPLINGS, absorb, apply, check_optimiser, forget_state, rotated, source
from hypersphere.orthogonal.rotation import Rotation

M = TypeVar("M", bound=nn.Module)


class Resampling:
    """Draws new coordinates for the rotations of a model every so many steps; call it after ``optimiser.step()``.

    Neurons become what they are rotated into, so that the model computes what it did; the small matrices start again
    from the identity on other coordinates, and what the optimiser remembers of them is set to zero. Rotations of whole
    layers are left alone. All that is drawn is a function of the seed, the layer's name and the number of the round, so
    that a resumed run, and every process of a distributed one, draws the same; all that changes are tensors in place,
    so that a captured step goes on to serve.

    Args:
        model: A model to which :func:`hypersphere.orthogonal.apply` was applied with ``sample=``.
        every: Steps between two draws (inner iterations).
        optimiser: The optimiser of the model.
        seed: Seed of the draws.

    Example:
        >>> import hypersphere as hs
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> model = hs.orthogonal.apply(model, sample=0.25)
        >>> optimiser = torch.optim.SGD(hs.parameter_groups(model, lr=0.01), momentum=0.9)
        >>> resampling = Resampling(model, every=2, optimiser=optimiser)
        >>> for _ in range(4):
        ...     model(torch.randn(5, 8)).square().sum().backward()
        ...     optimiser.step()
        ...     resampling()
        >>> resampling.steps
        4
    """

    def __init__(
        self, model: nn.Module, every: int, optimiser: torch.optim.Optimizer | None = None, seed: int = 0
    ) -> None:
        check_count("every", every)
        check_seed(seed)
        check_optimiser(optimiser)
        self.model, self.every, self.optimiser, self.seed = model, every, optimiser, seed
        self.layers = [layer for layer in rotated(model) if any(rotation.sampling for rotation in layer.parts)]
        if not self.layers:
            raise ArgumentError(
                "model", "must have layers that rotate some coordinates at a time: apply(..., sample=0.25)"
            )
        self.steps = 0
        settle(model)
        for name, rotation in self._rotated():
            # Where training has not begun, the first round is one of these, too.
            free = whole(rotation.free)
            if torch.equal(free, rotation.map.start(rotation.block, batch=free.shape[:1]).to(free)):
                rotation.reset(self._coordinates(name, rotation, 0).unsqueeze(0))

    def _rotated(self) -> Iterator[tuple[str, Rotation]]:
        for layer in self.layers:
            for side, rotation in enumerate(layer.parts):
                yield f"{layer.name}/{side}", rotation

    def __call__(self, step: int | None = None) -> None:
        """Count one step (or set the number of steps taken) and draw where it is the turn."""
        if step is not None:
            check_count("step", step, 0)
        self.steps = self.steps + 1 if step is None else step
        if self.steps and self.steps % self.every == 0:
            self.draw(self.steps // self.every)

    @torch.no_grad()
    def draw(self, number: int) -> None:
        """Begin the round with this number."""
        check_count("number", number, 0)
        settle(self.model)
        for layer in self.layers:
            absorb(layer)
        for name, rotation in self._rotated():
            rotation.reset(self._coordinates(name, rotation, number).unsqueeze(0))
            forget_state(self.optimiser, rotation.free)

    def parameters(self) -> list[nn.Parameter]:
        """The unconstrained parameters that a draw sets back."""
        return [rotation.free for _, rotation in self._rotated()]

    def _coordinates(self, name: str, rotation: Rotation, number: int) -> Tensor:
        turn = 0
        if rotation.sampling == "partition":
            number, turn = divmod(number, math.ceil(rotation.d / rotation.block))
        generator = source(self.seed, f"{name}/{number}")
        return SAMPLINGS[rotation.sampling or "uniform"](rotation.d, rotation.block, rotation.taps, turn, generator)


def poet(
    model: M, block: float = 256, *, sampling: str = "blocks", terms: int = 4, unit_norm: bool = True, **options: Any
) -> M:
    r"""Training by rotations of both axes (POET), :math:`W = R\, W_0 P`, in small pieces, in place.

    Singular values of every weight stay as they are; angles do not. Each side is rotated by blocks on a random
    permutation of all coordinates (``sampling="blocks"``), or by one block on some of them (``"uniform"``); a
    :class:`Resampling` draws new ones every few hundred steps, which also keeps the truncated series of the map in the
    range where it is exact.

    Args:
        model: The model.
        block: Size of a block, or its share of the side; a side that is smaller is rotated whole.
        sampling: ``"blocks"`` or ``"uniform"``.
        terms: Terms of the Neumann series of Cayley's map; an even number is more exact than the next odd one.
        unit_norm: Set neurons to norm 1 first, which is best for training from the start; for a pretrained model say
            ``False``, and it computes what it did.
        **options: Those of :func:`hypersphere.orthogonal.apply`.

    Returns:
        The model.

    Example:
        >>> model = poet(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)), block=4)
        >>> [tuple(p.shape) for name, p in model.named_parameters() if name.endswith("free")]
        [(2, 4, 4), (4, 4, 4)]
    """
    options = {"method": "neumann", "terms": terms, **options}
    return apply(model, "cayley", sides="both", sample=block, sampling=sampling, unit_norm=unit_norm, **options)
