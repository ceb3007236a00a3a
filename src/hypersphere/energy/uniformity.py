r"""Uniformity of directions by other measures than an energy: separation, polarisation, covering and others.

Every member is something to minimise: a separation or a determinant, of which more is better, enters with a minus sign.
Zero vectors have no direction and do not count; with fewer than two directions the pairwise members are 0. The default
weights of hidden and output layers are those of the released code of the uniformity family (Liu et al., 2021).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import hardtanh

from hypersphere.energy.base import Regulariser, energies, gather
from hypersphere.energy.chords import FLOOR, present, smooth_chords, unit_vectors
from hypersphere.energy.layers import Neurons, Selection
from hypersphere.energy.mhe import hyperspherical_energy
from hypersphere.energy.pairs import pair_counts, pair_sums
from hypersphere.energy.potentials import Gaussian, Riesz
from hypersphere.energy.projections import untransformed
from hypersphere.errors import ArgumentError, check_choice, check_flag, check_range, check_step
from hypersphere.geometry import angle, at_least_float32, cosine, norm, normalise, safe_sqrt, scales
from hypersphere.neurons import whole

CHUNK_ELEMENTS = 2**23
"""Cosines computed at a time in a search for neighbours."""
POWERS = tuple(4.0**k for k in range(3, 11))
"""Through which the nearest neighbour is approached; from lower ones all starts fall into the same minimum."""
PLACES = 64
"""Least number of places from which the worst one is looked for."""
CLIMBS = 20
FIRST_TURN, LARGEST_TURN = 0.1, 0.3
"""Radians that such a place moves at first and at most."""


@torch.no_grad()
def nearest(vectors: Tensor, half_space: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The nearest other direction of each row, some rows at a time: nothing of size n x n is kept.

    Args:
        vectors: ``(b, n, d)``.
        half_space: Count the mirror image of every other vector as a vector.

    Returns:
        Indices ``(b, n)``, signs ``(b, n)`` (-1 where the mirror image is nearest), and which rows have a neighbour
        ``(b, n)``.

    Example:
        >>> nearest(torch.tensor([[[1.0, 0.0], [0.8, 0.6], [-1.0, 0.1]]]), half_space=True)[0]
        tensor([[2, 0, 0]])
    """
    units, valid = unit_vectors(vectors), present(vectors)
    batch, n, _ = units.shape
    # No writing in place, which torch.vmap refuses.
    indices, found = [units.new_zeros(batch, 0, dtype=torch.int64)], [units.new_zeros(batch, 0)]
    for start in range(0, n, step := max(CHUNK_ELEMENTS // max(batch * n, 1), 1)):
        cosines = units[:, start : start + step] @ units.mT
        own = (
            torch.arange(n, device=units.device)
            == torch.arange(start, start + cosines.shape[1], device=units.device)[:, None]
        )
        closeness = (cosines.abs() if half_space else cosines).masked_fill(own | ~valid.unsqueeze(1), -2.0)
        best = closeness.max(2).indices
        indices.append(best)
        found.append(cosines.gather(2, best.unsqueeze(2)).squeeze(2))
    signs = torch.where((torch.cat(found, 1) < 0) & half_space, -1.0, 1.0).to(units.dtype)
    return torch.cat(indices, 1), signs, valid & (valid.sum(1, keepdim=True) > 1)


class _Spread(Regulariser):
    """A member that knows half space, which is for hidden layers only."""

    def __init__(self, *, half_space: bool, hidden_weight: float, output_weight: float) -> None:
        check_flag("half_space", half_space)
        super().__init__(hidden_weight=hidden_weight, output_weight=output_weight)
        self.half_space = half_space

    def _half(self, role: str) -> bool:
        return self.half_space and role == "hidden"

    def _neighbours(self, vectors: Tensor, role: str) -> tuple[Tensor, Tensor, Tensor]:
        """Directions ``(b, n, d)``, their nearest neighbours, and which of them count ``(b, n)``."""
        units = unit_vectors(vectors)
        indices, signs, counted = nearest(vectors, self._half(role))
        found = units.gather(1, indices.unsqueeze(2).expand_as(units)) * signs.unsqueeze(2)
        return units, found, counted

    def extra_repr(self) -> str:
        """The options."""
        return f"half_space={self.half_space}"


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """Mean over the rows that count, ``(b, n) -> (b,)``; 0 where there is none."""
    return torch.where(counted, values, 0.0).sum(1) / counted.sum(1).clamp(min=1)


def _soft_chords(vectors: Tensor, half_space: bool, power: float) -> tuple[Tensor, Tensor]:
    r"""Smooth form of the chord to the nearest other direction, :math:`(\sum_j \rho_{ij}^{-p})^{-1/p}`.

    All pairs are held at once.

    Returns:
        ``(b, n)``, 1 where there is no other; and which rows have a neighbour.
    """
    units, valid = unit_vectors(vectors), present(vectors)
    places = torch.arange(units.shape[1], device=units.device)
    q, p = smooth_chords(units, units, own=places, mirrored=half_space)
    q = q if p is None else torch.minimum(q, p)
    pairs = valid.unsqueeze(1) & valid.unsqueeze(2) & (places != places.unsqueeze(1))
    counted = pairs.any(2)
    alone = ~counted.unsqueeze(2) & (places == places.unsqueeze(1))  # no logarithm of nothing
    logs = torch.where(pairs, -0.5 * torch.where(pairs, q, 1.0).clamp(min=FLOOR[q.dtype]).log(), -math.inf)
    logs = torch.where(alone, 0.0, logs)
    return (-(power * logs).logsumexp(2) / power).exp(), counted


def _chord(a: Tensor, b: Tensor) -> Tensor:
    return safe_sqrt((a - b).square().sum(-1))


def _arc(chord: Tensor) -> Tensor:
    """Angle of a chord."""
    return 2 * torch.asin(hardtanh(chord / 2))


class _Nearest(_Spread):
    """A member that is a mean over rows of a function of the chord to the nearest other direction."""

    powers = POWERS

    def _of(self, chords: Tensor, counted: Tensor) -> Tensor:
        """Value ``(b,)`` of chords to the nearest neighbours ``(b, n)``."""
        raise NotImplementedError

    def objective(self, vectors: Tensor, power: float = math.inf) -> Tensor:
        """The value, at a finite power with a smooth nearest neighbour."""
        if power == math.inf:
            return self.energy(vectors)
        return self._of(*_soft_chords(vectors, self.half_space, power))


@energies.register("mhs", aliases=("maximum-hyperspherical-separation",))
class MHS(_Spread):
    r"""Maximum separation: minus the smallest distance of two directions, :math:`-\min_{i \ne j} \rho(u_i, u_j)`.

    The gradient moves the closest pair only (one of them, where several are equally close).

    Args:
        half_space: Count the mirror image of every vector as a vector.
        distance: ``"squared"`` chord, ``"chord"`` or ``"angle"``.
        hidden_weight: Weight of every hidden layer of a model.
        output_weight: Weight of a model's output layer.

    Example:
        >>> MHS(distance="angle")(torch.tensor([[1.0, 0.0], [0.0, 3.0], [-1.0, 0.0]]))
        tensor(-1.5708)
    """

    powers = POWERS

    def __init__(
        self,
        *,
        half_space: bool = False,
        distance: str = "squared",
        hidden_weight: float = 0.1,
        output_weight: float = 1.0,
    ) -> None:
        super().__init__(half_space=half_space, hidden_weight=hidden_weight, output_weight=output_weight)
        check_choice("distance", distance, ("squared", "chord", "angle"))
        self.distance = distance

    def energy(self, vectors: Tensor, role: str = "hidden") -> Tensor:
        """Minus the separation of each matrix of a batch."""
        if not vectors.shape[1]:
            return vectors.sum((1, 2))
        units, found, counted = self._neighbours(vectors, role)
        squared = torch.where(counted, (units - found).square().sum(-1), math.inf)
        closest = squared.detach().min(1, keepdim=True).indices.unsqueeze(2).expand(-1, -1, units.shape[2])
        a, b = units.gather(1, closest).squeeze(1), found.gather(1, closest).squeeze(1)
        if self.distance == "angle":
            value = angle(a, b)
        else:
            value = (a - b).square().sum(-1) if self.distance == "squared" else _chord(a, b)
        return torch.where(counted.any(1), -value, 0.0)

    def objective(self, vectors: Tensor, power: float = math.inf) -> Tensor:
        """Minus the separation, at a finite power with a smooth minimum."""
        if power == math.inf:
            return self.energy(vectors)
        chords, counted = _soft_chords(vectors, self.half_space, power)
        some = counted.any(1)
        logs = torch.where(counted | ~some.unsqueeze(1), -chords.log(), -math.inf)
        chord = (-(power * logs).logsumexp(1) / power).exp()
        value = _arc(chord) if self.distance == "angle" else chord.square() if self.distance == "squared" else chord
        return torch.where(some, -value, 0.0)

    def extra_repr(self) -> str:
        """The options."""
        return f"{super().extra_repr()}, distance={self.distance!r}"


@energies.register("koleo")
class KoLeo(_Nearest):
    r"""Differential entropy by nearest neighbours (KoLeo).

    .. math:: -\frac1n \sum_i \log(\min_{j \ne i} \|u_i - u_j\| + \epsilon)

    The neighbour is chosen without gradient; both ends of the distance are moved.

    Args:
        half_space: Count the mirror image of every vector as a vector.
        scaled: Multiply the distances by n under the logarithm: the entropy estimate up to a constant.
        eps: Added to the distances.
        hidden_weight: Weight of every hidden layer of a model.
        output_weight: Weight of a model's output layer.

    Example:
        >>> KoLeo()(torch.eye(3))  # minus log sqrt 2
        tensor(-0.3466)
    """

    def __init__(
        self,
        *,
        half_space: bool = False,
        scaled: bool = False,
        eps: float = 1e-8,
        hidden_weight: float = 0.1,
        output_weight: float = 0.1,
    ) -> None:
        super().__init__(half_space=half_space, hidden_weight=hidden_weight, output_weight=output_weight)
        check_range("eps", eps, 0, open_low=True)
        self.scaled, self.eps = scaled, eps

    def energy(self, vectors: Tensor, role: str = "hidden") -> Tensor:
        """Value of each matrix of a batch."""
        units, found, counted = self._neighbours(vectors, role)
        return self._of(_chord(units, found), counted)

    def _of(self, chords: Tensor, counted: Tensor) -> Tensor:
        value = _mean(-(chords + self.eps).log(), counted)
        if self.scaled:
            value = value - counted.sum(1).clamp(min=1).to(value.dtype).log()
        return value

    def extra_repr(self) -> str:
        """The options."""
        return f"{super().extra_repr()}, scaled={self.scaled}"


@energies.register("mma", aliases=("minimal-angle",))
class MMA(_Nearest):
    r"""Maximise the minimal angle: :math:`-\frac1n \sum_i \min_{j \ne i} \theta_{ij}`.

    Args:
        half_space: Count the mirror image of every vector as a vector.
        hidden_weight: Weight of every hidden layer of a model; 0.03 was published for networks with skip connections.
        output_weight: Weight of a model's output layer.

    Example:
        >>> MMA()(torch.eye(3))
        tensor(-1.5708)
    """

    def __init__(self, *, half_space: bool = False, hidden_weight: float = 0.07, output_weight: float = 0.07) -> None:
        super().__init__(half_space=half_space, hidden_weight=hidden_weight, output_weight=output_weight)

    def energy(self, vectors: Tensor, role: str = "hidden") -> Tensor:
        """Minus the mean smallest angle of each matrix of a batch."""
        units, found, counted = self._neighbours(vectors, role)
        return -_mean(angle(units, found), counted)

    def _of(self, chords: Tensor, counted: Tensor) -> Tensor:
        return -_mean(_arc(chords), counted)


@energies.register("separation")
class Separation(_Nearest):
    r"""What places hyperspherical prototypes: :math:`\frac1n \sum_i \max_{j \ne i} \cos(u_i, u_j)`.

    Args:
        half_space: Count the mirror image of every vector as a vector.
        hidden_weight: Weight of every hidden layer of a model.
        output_weight: Weight of a model's output layer.

    Example:
        >>> Separation()(torch.tensor([[1.0, 0.0], [-2.0, 0.0]]))
        tensor(-1.)
    """

    def __init__(self, *, half_space: bool = False, hidden_weight: float = 1.0, output_weight: float = 1.0) -> None:
        super().__init__(half_space=half_space, hidden_weight=hidden_weight, output_weight=output_weight)

    def energy(self, vectors: Tensor, role: str = "hidden") -> Tensor:
        """Mean largest cosine of each matrix of a batch."""
        units, found, counted = self._neighbours(vectors, role)
        return _mean(1 - (units - found).square().sum(-1) / 2, counted)

    def _of(self, chords: Tensor, counted: Tensor) -> Tensor:
        return _mean(1 - chords.square() / 2, counted)


@energies.register("uniformity", aliases=("gaussian-potential",))
class Uniformity(_Spread):
    r"""Uniformity loss of Wang and Isola: :math:`\log \frac{1}{n(n-1)} \sum_{i \ne j} \exp(-t \|u_i - u_j\|^2)`.

    Of uniform directions in D dimensions it tends to :math:`\log {}_0F_1(; D/2; t^2) - 2t`.

    Args:
        t: Sharpness of the potential. In float32 there is no gradient where :math:`t \|u_i - u_j\|^2` is above 87 for
            all pairs.
        half_space: Count the mirror image of every vector as a vector.
        hidden_weight: Weight of every hidden layer of a model.
        output_weight: Weight of a model's output layer.

    Example:
        >>> Uniformity()(torch.tensor([[1.0, 0.0], [-2.0, 0.0]]))
        tensor(-8.)
    """

    def __init__(
        self, *, t: float = 2.0, half_space: bool = False, hidden_weight: float = 1.0, output_weight: float = 1.0
    ) -> None:
        super().__init__(half_space=half_space, hidden_weight=hidden_weight, output_weight=output_weight)
        self.potential = Gaussian(t)

    def energy(self, vectors: Tensor, role: str = "hidden") -> Tensor:
        """Logarithm of the mean potential of each matrix of a batch."""
        half_space = self._half(role)
        total = pair_sums(vectors, self.potential, half_space=half_space, mesh=self.mesh)
        some = present(vectors).sum(1) > (0 if half_space else 1)
        # Where every potential is too small for a number, that is as low as it gets, not as if there were no pair.
        logarithm = torch.where(some, total, 1.0).clamp(min=torch.finfo(total.dtype).tiny).log()
        return torch.where(some, logarithm - pair_counts(vectors, half_space).log(), 0.0)

    def extra_repr(self) -> str:
        """The options."""
        return f"t={self.potential.t:g}, {super().extra_repr()}"


@energies.register("mgd", aliases=("maximum-gram-determinant",))
class MGD(_Spread):
    r"""Maximum Gram determinant: :math:`-\log\det(K + \delta I)`, :math:`K_{ij} = \exp(-\epsilon \|u_i - u_j\|^2)`.

    It holds n x n numbers and takes a Cholesky factor of them, in float64.

    Args:
        sharpness: :math:`\epsilon` of the kernel.
        jitter: :math:`\delta`, which keeps the value of equal directions finite.
        half_space: Count the mirror image of every vector as a vector.
        hidden_weight: Weight of every hidden layer of a model.
        output_weight: Weight of a model's output layer.

    Example:
        >>> MGD()(torch.eye(2)), MGD()(torch.ones(2, 2))
        (tensor(0.0185), tensor(13.1224))
    """

    def __init__(
        self,
        *,
        sharpness: float = 1.0,
        jitter: float = 1e-6,
        half_space: bool = False,
        hidden_weight: float = 0.01,
        output_weight: float = 0.1,
    ) -> None:
        super().__init__(half_space=half_space, hidden_weight=hidden_weight, output_weight=output_weight)
        check_range("sharpness", sharpness, 0, open_low=True)
        check_range("jitter", jitter, 0)
        self.sharpness, self.jitter = sharpness, jitter

    def energy(self, vectors: Tensor, role: str = "hidden") -> Tensor:
        """Minus the logarithm of the determinant of each matrix of a batch."""
        units, valid = normalise(vectors.double()), present(vectors)
        q = 2 - 2 * units @ units.mT
        pairs = valid.unsqueeze(1) & valid.unsqueeze(2)
        # A row without direction gets a 1 on the diagonal, which the determinant does not notice.
        rest = torch.diag_embed(torch.where(valid, self.jitter, torch.ones((), dtype=torch.float64, device=q.device)))
        kernels = [torch.where(pairs, (-self.sharpness * q).exp(), 0.0)]
        if self._half(role):
            # With mirror images K is [[A, B], [B, A]], whose determinant is that of A + B times that of A - B.
            mirrored = torch.where(pairs, (-self.sharpness * (4 - q)).exp(), 0.0)
            kernels = [kernels[0] + mirrored, kernels[0] - mirrored]
        factor = torch.linalg.cholesky_ex(torch.stack(kernels) + rest).L
        return (-2 * factor.diagonal(dim1=-2, dim2=-1).log().sum((0, 2))).to(vectors.dtype)


@energies.register("relaxed-mhp", aliases=("r-mhp",))
class RelaxedMHP(Regulariser):
    r"""Relaxed polarisation: :math:`\|\sum_i u_i\|`, which is 0 where the directions balance.

    Args:
        normalised: Take directions; without, the vectors themselves, as the released code does.
        half_space: Must be ``False``: with mirror images the sum is always 0.
        hidden_weight: Weight of every hidden layer of a model.
        output_weight: Weight of a model's output layer.

    Example:
        >>> RelaxedMHP()(torch.eye(4))
        tensor(2.)
    """

    def __init__(
        self,
        *,
        normalised: bool = True,
        half_space: bool = False,
        hidden_weight: float = 0.01,
        output_weight: float = 0.1,
    ) -> None:
        super().__init__(hidden_weight=hidden_weight, output_weight=output_weight)
        if half_space:
            raise ArgumentError("half_space", "must be False for relaxed-mhp: with mirror images the sum is always 0")
        self.normalised = normalised

    @property
    def counts_lengths(self) -> bool:
        """Whether vectors are summed, not directions."""
        return not self.normalised

    def energy(self, vectors: Tensor, role: str = "hidden") -> Tensor:
        """Norm of the sum of each matrix of a batch."""
        if self.normalised:
            return norm(unit_vectors(vectors).sum(1))
        scale = scales(vectors, (1, 2))
        return norm((vectors * scale).sum(1)) / scale.view(-1)

    def extra_repr(self) -> str:
        """The options."""
        return f"normalised={self.normalised}"


class _Poles(_Spread):
    """A member with a pole of its own for every layer, which looks for the worst place on the sphere.

    At each call in training mode the pole takes ``inner_steps`` steps of gradient descent with momentum, with the
    learning rate of the run (``rate`` before :meth:`advance` told it); then the pole is a constant and the value is a
    function of the weights. Poles and their momenta are buffers, saved and restored with ``state_dict``.

    What is minimised (:meth:`objective`) is the value at the worst place of all.
    """

    ordered = True
    powers = tuple(4.0**k for k in (3, 5, 7))
    momentum, decay = 0.9, 5e-4
    contract: ClassVar[Mapping[str, Any]] = {"rotation": False, "optimum": None, "batches": False, "model": False}

    def __init__(
        self, *, half_space: bool, inner_steps: int, rate: float, hidden_weight: float, output_weight: float
    ) -> None:
        super().__init__(half_space=half_space, hidden_weight=hidden_weight, output_weight=output_weight)
        check_range("inner_steps", inner_steps, 0)
        check_range("rate", rate, 0)
        self.inner_steps = inner_steps
        self.rate: Tensor
        self.register_buffer("rate", torch.tensor(float(rate)))

    # State: of every layer a buffer (2, groups, d) with pole and momentum.

    def _state(self, name: str, like: Tensor) -> Tensor:
        """Pole and momentum ``(2, b, d)`` of the layer with this name and matrices ``(b, n, d)``."""
        key = _key(name)
        shape = (2, like.shape[0], like.shape[2])
        state = self._buffers.get(key)
        if state is None or state.shape != shape:
            with untransformed():
                state = torch.zeros(shape, dtype=like.dtype, device=like.device)
                self.register_buffer(key, state)
                self._draw(key, 0)
        elif state.device != like.device or state.dtype != like.dtype:
            state = state.to(like.device, like.dtype)
            self.register_buffer(key, state)
        if self.rate.device != like.device:
            self.rate = self.rate.to(like.device)
        return state

    def _draw(self, key: str, seed: int) -> None:
        state = self._buffers[key]
        assert state is not None
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {key}".encode()))
        state[0].copy_(torch.randn(state.shape[1:], generator=generator))
        state[1].zero_()

    def prepare(self, target: Tensor | nn.Module | Selection) -> None:
        """Create the poles of a matrix or of all layers of a model."""
        if isinstance(target, Tensor):
            self._state("", at_least_float32(whole(target)).unsqueeze(0))
            return
        for layer in self.select(target):
            self._state(layer.name, at_least_float32(layer.matrices()))

    def advance(self, step: int, seed: int, rate: float) -> None:
        """Note the learning rate; at the first step, draw the poles."""
        check_step(step, seed, rate)
        self.rate.fill_(rate)
        if step == 0:
            for key in [key for key in self._buffers if key.startswith(PREFIX)]:
                self._draw(key, seed)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Poles of layers that have not been seen yet are taken as they come.
        for key, value in state_dict.items():
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and name.startswith(PREFIX):
                held = self._buffers.get(name)
                if held is None or held.shape != value.shape:
                    self.register_buffer(name, torch.empty_like(value, device=self.rate.device))
        super()._load_from_state_dict(state_dict, prefix, *args)

    # Values.

    def energy(self, vectors: Tensor, role: str = "hidden") -> Tensor:
        """Value of each matrix of a batch; the poles are those of matrices, not of a model's layers."""
        return self._with_state(vectors, role, [self._state("", vectors)])

    def _batch_energy(self, layers: Sequence[Neurons], matrices: Sequence[Tensor], role: str) -> Tensor:
        states = [self._state(layer.name, rows) for layer, rows in zip(layers, matrices, strict=True)]
        return self._with_state(gather(matrices), role, states)

    def _with_state(self, vectors: Tensor, role: str, states: Sequence[Tensor]) -> Tensor:
        units, valid = unit_vectors(vectors), present(vectors)
        half_space = self._half(role)
        moves = self.training and self.inner_steps > 0
        if moves:
            self._move()
        with torch.no_grad():
            poles, momenta = (gather([state[part].unsqueeze(1) for state in states]) for part in (0, 1))
            if moves:
                for _ in range(self.inner_steps):
                    poles, momenta = self._inner_step(units.detach(), valid, poles, momenta, half_space)
                starts = 0
                for state in states:
                    part = slice(starts, starts := starts + state.shape[1])
                    state[0].copy_(poles[part, 0, : state.shape[2]])
                    state[1].copy_(momenta[part, 0, : state.shape[2]])
        aims = normalise(poles)
        doubled = 2 * (units @ aims.mT).squeeze(2)
        moving = doubled - doubled.detach()  # whose derivative needs no difference of near numbers
        q = (units.detach() - aims).square_().sum(2) - moving
        p = (units.detach() + aims).square_().sum(2) + moving if half_space else None
        return self._value(q, p, valid)[0]

    def _inner_step(
        self, units: Tensor, valid: Tensor, poles: Tensor, momenta: Tensor, half_space: bool
    ) -> tuple[Tensor, Tensor]:
        aims = normalise(poles)
        # A pole that seeks a hole needs no more digits of what is near it than products have.
        q = 2 - 2 * (units @ aims.mT).squeeze(2)
        _, slopes = self._value(q, 4 - q if half_space else None, valid)
        gradient = 2 * (slopes.unsqueeze(1) @ units)  # downhill for the pole is uphill for the value
        gradient = (gradient - (gradient * aims).sum(2, keepdim=True) * aims) / norm(poles, keepdim=True)
        momenta = self.momentum * momenta + gradient + self.decay * poles
        return poles - self.rate * momenta, momenta

    def _value(self, q: Tensor, p: Tensor | None, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Value ``(b,)`` at squared chords from the pole ``(b, n)``, and its slopes by these ``(b, n)``.

        In half space p are those from its mirror image, which count as well.
        """
        raise NotImplementedError

    # Values at the worst place.

    def objective(self, vectors: Tensor, power: float = math.inf) -> Tensor:
        r"""Value at the worst place on the sphere, found from many, of each set of vectors.

        At a finite power a smooth maximum over the places found, :math:`\frac1p \log \sum_k \exp(p f_k)`. The poles of
        training play no part and stay as they are.
        """
        units, valid = unit_vectors(vectors), present(vectors)
        climbs = 3 * CLIMBS if power == math.inf else CLIMBS
        values, _ = self._at_places(units, valid, self._worst_places(units.detach(), valid, climbs))
        if power == math.inf:
            return values.amax(1)
        return ((power * values).logsumexp(1) - math.log(values.shape[1])) / power

    def _at_places(self, units: Tensor, valid: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Values ``(b, m)`` of directions ``(b, n, d)`` at places ``(b, m, d)``, and their slopes by the places."""
        b, m, _ = places.shape
        q = 2 - 2 * (places @ units.mT)
        q = q.flatten(0, 1)
        values, slopes = self._value(q, 4 - q if self.half_space else None, valid.repeat_interleave(m, 0))
        gradient = -2 * (slopes.view(b, m, -1) @ units)
        return values.view(b, m), gradient - (gradient * places).sum(2, keepdim=True) * places

    @torch.no_grad()
    def _worst_places(self, units: Tensor, valid: Tensor, climbs: int) -> Tensor:
        """Where the value is largest among its surroundings, ``(b, m, d)``: from places that are always the same."""
        b, n, d = units.shape
        count = max(PLACES, 4 * (n + d))
        places = torch.randn(count, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        places = normalise(places).to(units).expand(b, count, d)
        tiny = torch.finfo(units.dtype).tiny
        values, slopes = self._at_places(units, valid, places)
        rates = FIRST_TURN / norm(slopes, keepdim=True).clamp(min=tiny)
        for _ in range(climbs):
            move = rates * slopes
            move = move * (LARGEST_TURN / norm(move, keepdim=True).clamp(min=LARGEST_TURN))
            tried = normalise(places + move)
            reached, new_slopes = self._at_places(units, valid, tried)
            better = (reached >= values).unsqueeze(2)
            # The next step fits the curvature that this one has met.
            bend = -((tried - places) * (new_slopes - slopes)).sum(2, keepdim=True)
            length = (tried - places).square().sum(2, keepdim=True)
            fitting = torch.where(bend > tiny, length / bend.clamp(min=tiny), 2 * rates)
            rates = torch.where(better, fitting, rates / 4)
            places = torch.where(better, tried, places)
            slopes = torch.where(better, new_slopes, slopes)
            values = torch.where(better.squeeze(2), reached, values)
        return places


PREFIX = "pole "


def _key(name: str) -> str:
    """Name of a buffer, which may not contain dots."""
    return PREFIX + name.replace(".", "/")


@energies.register("mhp", aliases=("maximum-hyperspherical-polarization",))
class MHP(_Poles):
    r"""Maximum polarisation: :math:`-\min_v \frac1n \sum_i \|u_i - v\|^{-s}`, the pole v on the sphere.

    Where the pole feels the least force there is a hole. The pole is found as described below, and the directions then
    move towards it.

    Args:
        s: Riesz exponent; 0 is the logarithmic potential.
        half_space: Count the mirror image of every vector as a vector.
        inner_steps: Steps of the pole at each call in training mode.
        rate: Learning rate of the pole, until a trainer tells that of the run.
        hidden_weight: Weight of every hidden layer of a model.
        output_weight: Weight of a model's output layer.

    Example:
        >>> MHP()(torch.eye(3)) < 0
        tensor(True)
    """

    def __init__(
        self,
        *,
        s: float = 2.0,
        half_space: bool = False,
        inner_steps: int = 10,
        rate: float = 0.1,
        hidden_weight: float = 1.0,
        output_weight: float = 10.0,
    ) -> None:
        super().__init__(
            half_space=half_space,
            inner_steps=inner_steps,
            rate=rate,
            hidden_weight=hidden_weight,
            output_weight=output_weight,
        )
        check_range("s", s, 0)
        self.potential = Riesz(s)

    def _value(self, q: Tensor, p: Tensor | None, valid: Tensor) -> tuple[Tensor, Tensor]:
        floor = FLOOR[q.dtype]
        safe = torch.where(valid & (q > floor), q, floor)
        value, slope = self.potential(safe), torch.where(q > floor, self.potential.slope(safe), 0.0)
        if p is not None:
            other = torch.where(valid & (p > floor), p, floor)
            value = (value + self.potential(other)) / 2
            slope = (slope - torch.where(p > floor, self.potential.slope(other), 0.0)) / 2
        share = valid.to(q.dtype) / valid.sum(1, keepdim=True).clamp(min=1)
        return -(value * share).sum(1), -slope * share


@energies.register("mhc", aliases=("minimum-hyperspherical-covering",))
class MHC(_Poles):
    r"""Minimum covering: :math:`\max_v \min_i \|u_i - v\|^2`, the largest hole, with a smooth minimum.

    .. math:: \max_v -\frac1\gamma \log \frac1n \sum_i \exp(-\gamma \|u_i - v\|^2)

    Between the hard value and that plus :math:`\log(n)/\gamma`.

    Args:
        sharpness: :math:`\gamma`.
        half_space: Count the mirror image of every vector as a vector.
        inner_steps: Steps of the pole at each call in training mode.
        rate: Learning rate of the pole, until a trainer tells that of the run.
        hidden_weight: Weight of every hidden layer of a model.
        output_weight: Weight of a model's output layer.

    Example:
        >>> MHC()(torch.eye(3)) > 0
        tensor(True)
    """

    def __init__(
        self,
        *,
        sharpness: float = 10.0,
        half_space: bool = False,
        inner_steps: int = 10,
        rate: float = 0.1,
        hidden_weight: float = 0.01,
        output_weight: float = 0.1,
    ) -> None:
        super().__init__(
            half_space=half_space,
            inner_steps=inner_steps,
            rate=rate,
            hidden_weight=hidden_weight,
            output_weight=output_weight,
        )
        check_range("sharpness", sharpness, 0, open_low=True)
        self.sharpness = sharpness

    def _value(self, q: Tensor, p: Tensor | None, valid: Tensor) -> tuple[Tensor, Tensor]:
        count = valid.sum(1)
        # All rows zero: nothing to cover, and no logarithm of nothing.
        logits = torch.where(valid | (count == 0).unsqueeze(1), -self.sharpness * q, -math.inf)
        number = count.clamp(min=1).to(q.dtype)
        if p is not None:
            mirrored = torch.where(valid | (count == 0).unsqueeze(1), -self.sharpness * p, -math.inf)
            total = torch.logaddexp(logits.logsumexp(1), mirrored.logsumexp(1))
            slope = (logits - total.unsqueeze(1)).exp() - (mirrored - total.unsqueeze(1)).exp()
            number = 2 * number
        else:
            total = logits.logsumexp(1)
            slope = (logits - total.unsqueeze(1)).exp()
        value = -(total - number.log()) / self.sharpness
        return torch.where(count > 0, value, 0.0), slope


# Functions of features and prototypes.


def alignment(x: Tensor, y: Tensor, alpha: float = 2.0) -> Tensor:
    r"""Alignment of pairs of features (Wang and Isola): the mean of :math:`\|\hat x_i - \hat y_i\|^\alpha`.

    Args:
        x: ``(n, d)``; norms do not matter.
        y: ``(n, d)``, what is to lie where ``x`` does.
        alpha: Exponent.

    Returns:
        Scalar in float32 or wider.

    Example:
        >>> alignment(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 5.0]]))
        tensor(2.)
    """
    check_range("alpha", alpha, 0, open_low=True)
    if x.shape != y.shape or x.dim() != 2:
        raise ArgumentError("y", f"must have the shape (n, d) of x, got {tuple(y.shape)} for {tuple(x.shape)}")
    squared = (unit_vectors(at_least_float32(x)) - unit_vectors(at_least_float32(y))).square().sum(1)
    return (squared if alpha == 2 else safe_sqrt(squared).pow(alpha)).mean()


def prototype_loss(features: Tensor, prototypes: Tensor, labels: Tensor) -> Tensor:
    r"""Loss of hyperspherical prototype networks: the sum over the batch of :math:`(1 - \cos(z_i, p_{y_i}))^2`.

    Args:
        features: z ``(m, d)``.
        prototypes: p ``(C, d)``, fixed; see :func:`hypersphere.energy.prototypes`.
        labels: y ``(m,)``.

    Returns:
        Scalar in float32 or wider.

    Example:
        >>> prototype_loss(torch.eye(2), torch.eye(2), torch.tensor([0, 0]))
        tensor(1.)
    """
    return (1 - cosine(features, whole(prototypes.detach())[labels])).square().sum()


def hyperspherical_uniformity_gap(
    features: Tensor, prototypes: Tensor, labels: Tensor, *, between: float = 1.0, within: float = 1.0
) -> Tensor:
    r"""Hyperspherical uniformity gap in its energy form: prototypes spread out, features gather around theirs.

    .. math:: a \operatorname*{mean}_{i \ne j} \|p_i - p_j\|^{-2}
        + b \operatorname*{mean}_c \operatorname*{mean}_{y_i = c} \|\hat z_i - p_c\|

    with the directions of the prototypes, which get no gradient from the second term; classes that the batch lacks do
    not count there.

    Args:
        features: z ``(m, d)``.
        prototypes: ``(C, d)``, trained.
        labels: ``(m,)``.
        between: a.
        within: b.

    Returns:
        Scalar in float32 or wider.

    Example:
        >>> hyperspherical_uniformity_gap(torch.eye(3), torch.eye(3), torch.tensor([0, 1, 2]))
        tensor(0.5000)
    """
    z, p = (unit_vectors(at_least_float32(x)) for x in (features, whole(prototypes.detach())))
    distances = _chord(z, p[labels])
    ones = torch.ones_like(distances)
    counts, sums = (distances.new_zeros(len(p)).index_add(0, labels, values) for values in (ones, distances))
    means = sums / counts.clamp(min=1)
    return between * hyperspherical_energy(prototypes) + within * means.sum() / (counts > 0).sum().clamp(min=1)
