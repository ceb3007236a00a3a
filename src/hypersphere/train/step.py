"""One training step, as device work alone, and the same step captured in one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hypersphere.data.preprocess import Preprocess
from hypersphere.losses.sharding import by_kind
from hypersphere.neurons import whole
from hypersphere.optim import gather_rows, row_parameters
from hypersphere.recipe import Work
from hypersphere.recipe.seeds import derive_seed
from hypersphere.runs.device import AUTOCAST
from hypersphere.train.averages import Averages
from hypersphere.train.batches import Batches
from hypersphere.train.distributed import World
from hypersphere.train.objective import Objective
from hypersphere.train.randomness import seed_default_generator


class Step:
    """A training step: batch, augmentation, forward, backward, clipping, optimiser, moving average, record.

    Calling it with the inputs of a step leaves ``record`` holding the loss terms and, of every parameter group, the
    norm of the gradient and of the updated weights. Nothing in it waits for the device or depends on values, so
    :class:`CapturedStep` can replay it.

    Args:
        objective: Model, head and what sections add to the loss.
        forward: What to call for the terms: ``objective``, or a compiled or distributed wrapping of it.
        preprocess: Normalisation and augmentation.
        batches: Source of the batches.
        optimiser: With named parameter groups.
        works: What sections do before a step, and with its samples.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        batch_size: Images over all processes.
        world: This process among all.
        seed: The run's seed.
        clip_norm: Largest norm of the whole gradient.
        averages: Moving averages of the parameters.
        channels_last: Memory format of the images.
    """

    def __init__(
        self,
        objective: Objective,
        forward: Callable[[Tensor, Tensor], Tensor],
        preprocess: Preprocess,
        batches: Batches,
        optimiser: torch.optim.Optimizer,
        works: Sequence[Work],
        *,
        precision: str,
        batch_size: int,
        world: World,
        seed: int,
        clip_norm: float | None = None,
        averages: Averages | None = None,
        channels_last: bool = False,
    ) -> None:
        self.device = preprocess.mean.device
        self.objective, self.forward, self.preprocess = objective, forward, preprocess
        self.batches, self.optimiser, self.works = batches, optimiser, works
        self.autocast_dtype = AUTOCAST.get(precision)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        if self.scaler.is_enabled():
            self.scaler.scale(torch.zeros((), device=self.device))  # creates its state, which checkpoints need
        self.batch_size, self.share, self.world, self.seed = batch_size, world.share(batch_size), world, seed
        self.clip_norm, self.averages = clip_norm, averages
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.generator = torch.Generator(self.device)
        self.rows = [*row_parameters(objective).values()]
        self.groups = [str(group["name"]) for group in optimiser.param_groups]
        self.columns = [
            *objective.terms,
            *(f"grad_norm/{group}" for group in self.groups),
            *(f"weight_norm/{group}" for group in self.groups),
        ]
        self.record = torch.zeros(len(self.columns), device=self.device)
        self.rate = float(optimiser.param_groups[0]["base_lr"])
        """Learning rate of the step that comes next, of the first group, for the sections."""

    def scale_rates(self, factor: float) -> None:
        """Set the learning rates to so many times their base."""
        for group in self.optimiser.param_groups:
            group["lr"].fill_(group["base_lr"] * factor)
        self.rate = self.optimiser.param_groups[0]["base_lr"] * factor

    def begin(self, step: int) -> None:
        """Make everything random in a step a function of the seed and the step's number."""
        for work in self.works:
            work.before(step, self.rate)
        self.generator.manual_seed(derive_seed(self.seed, "augment", step))
        seed_default_generator(self.device, derive_seed(self.seed, "step", step, self.world.rank))

    def run(self, step: int) -> None:
        """Take the step with this number."""
        self.begin(step)
        self(*self.batches.inputs(step))

    def __call__(self, *inputs: Tensor) -> None:
        """Device work of one step."""
        images, labels = self.batches.load(*inputs)
        images = self.preprocess.augmented(images, self.generator, self.batch_size, self.share)
        images = images.contiguous(memory_format=self.memory_format)
        self.optimiser.zero_grad(set_to_none=True)
        # The cast weights of one captured step must not be reused by the next: no cache.
        with torch.autocast(
            self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None, cache_enabled=False
        ):
            # Before the forward pass that may be compiled: maps are a few large operations with state of their own.
            self.objective.together.compute()
            for work in self.works:
                images = work.samples(images, labels, self.generator)
            terms = self.forward(images, labels)
        self.scaler.scale(terms.sum()).backward()
        self.objective.together.forget()
        gather_rows(self.rows)
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimiser)
        norms = self._clip()
        self.scaler.step(self.optimiser)
        self.scaler.update()
        if self.averages is not None:
            self.averages.update()
        weights = [[p.detach() for p in group["params"]] for group in self.optimiser.param_groups]
        self.record.copy_(torch.cat([terms.detach(), norms, torch.stack([self._norm(group) for group in weights])]))

    def _norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Norm of all of them; of none, as in a head that trains no weights, 0 on the step's device."""
        norms = [whole(get_total_norm(part)) for part in by_kind(tensors)]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=self.device)

    def _clip(self) -> Tensor:
        """Gradient norms by parameter group, before the whole gradient is scaled down to ``clip_norm``."""
        members = [[p for p in group["params"] if p.grad is not None] for group in self.optimiser.param_groups]
        norms = torch.stack([self._norm([_values(p.grad) for p in group]) for group in members])
        if self.clip_norm is not None:
            total = torch.linalg.vector_norm(norms)
            for part in by_kind([p for group in members for p in group]):
                clip_grads_with_norm_(part, self.clip_norm, total)
        return norms


def _values(gradient: Tensor | None) -> Tensor:
    """The numbers of a gradient; of a sparse one those of its rows, which has each of them once."""
    assert gradient is not None
    return gradient.values() if gradient.is_sparse else gradient


class CapturedStep:
    """A step recorded once as a CUDA graph and replayed: the host does next to nothing between steps.

    Args:
        step: The step to capture.
        state: Every tensor that a step changes; the trial steps that must precede a capture are undone in them.
        start: The first step that will be taken.
    """

    TRIALS = 3

    def __init__(self, step: Step, state: Mapping[str, Tensor], start: int) -> None:
        self.step = step
        self.inputs = tuple(value.clone() for value in step.batches.inputs(start))
        step.begin(start)  # what is drawn for a step is drawn again before it: trials see no less
        # Detached: a recorded clone would keep gradient nodes of this stream alive, which a capture may not touch.
        before = {name: tensor.detach().clone() for name, tensor in state.items()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self.TRIALS):
                step(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(step.generator)
        with torch.cuda.graph(self.graph):
            step(*self.inputs)
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(before[name])

    def run(self, step: int) -> None:
        """Take the step with this number."""
        self.step.begin(step)
        for buffer, value in zip(self.inputs, self.step.batches.inputs(step), strict=True):
            buffer.copy_(value, non_blocking=True)
        self.graph.replay()
