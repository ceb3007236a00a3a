"""One training step, as device work alone, and the same step captured in one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hypersphere.attacks import AdversarialBatch, evaluating
from hypersphere.data.preprocess import Preprocess
from hypersphere.energy import Regulariser, Selection, select
from hypersphere.energy.layers import neurons
from hypersphere.errors import ArgumentError
from hypersphere.orthogonal.rotation import Together, rotations
from hypersphere.runs.device import AUTOCAST
from hypersphere.runs.seeds import derive_seed
from hypersphere.train.batches import Batches
from hypersphere.train.distributed import World
from hypersphere.train.randomness import seed_default_generator


def output_layer(head: nn.Module, target: str = "all") -> Selection:
    """The weights of a head, a row a class, as an output layer.

    Args:
        head: The head.
        target: The option that asks for it, for messages.
    """
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ArgumentError("target", f"must be 'model' with a head that has no matrix of weights, got {target!r}")
    if getattr(head, "centres", 1) > 1:
        raise ArgumentError("target", f"must be 'model' with a head of several centres a class, got {target!r}")
    return neurons("head", lambda: head.weight, "output", constant=not weight.requires_grad)  # type: ignore[arg-type, return-value]


class Objective(nn.Module):
    """Model, head and regularisers as one module: images and labels in, loss terms out.

    Args:
        model: Images ``(B, C, H, W)`` to features ``(B, D)``. One with ``loss_names`` computes the losses of these
            names itself, by ``losses(images, labels, head)``.
        head: Features and labels to a loss.
        regularisers: Title -> (energy, weight, what it is an energy of: ``"model"``, ``"head"`` or ``"all"``).
    """

    weights: Tensor

    def __init__(
        self, model: nn.Module, head: nn.Module, regularisers: Mapping[str, tuple[nn.Module, float, str]]
    ) -> None:
        super().__init__()
        self.model, self.head = model, head
        self.loss_names: tuple[str, ...] = getattr(model, "loss_names", ("loss",))
        self.energies = nn.ModuleDict({title: energy for title, (energy, _, _) in regularisers.items()})
        # On the device, as learning rates are: a captured step follows what is filled in before it.
        weights = torch.tensor([weight for _, weight, _ in regularisers.values()])
        self.register_buffer("weights", weights, persistent=False)
        self.targets = [self._target(energy, target) for energy, _, target in regularisers.values()]
        self.together = Together(rotation for _, rotation in rotations(model))

    def _target(self, energy: nn.Module, target: str) -> nn.Module | Selection:
        """The layers that an energy is of: those of the model are hidden ones, the head is the output layer."""
        if target == "model" and not isinstance(energy, Regulariser):
            return self.model  # a module of a user's own, which knows models alone
        if target == "head":
            return output_layer(self.head, target)
        chosen = energy.select if isinstance(energy, Regulariser) else select
        layers = chosen(self.model, output=None)
        return layers if target == "model" else layers + output_layer(self.head, target)

    @property
    def terms(self) -> list[str]:
        """Names of the terms, the losses first."""
        return [*self.loss_names, *self.energies]

    def prepare(self) -> None:
        """Create the state of the regularisers, on the device of the weights."""
        for energy, target in zip(self.energies.values(), self.targets, strict=True):
            if isinstance(energy, Regulariser):
                energy.prepare(target)
        self.energies.train()

    def advance(self, step: int, seed: int, rate: float) -> None:
        """Make the regularisers ready for a step; all that they draw is a function of the seed and the step."""
        for title, energy in self.energies.items():
            if isinstance(energy, Regulariser):
                energy.advance(step, derive_seed(seed, "energy", title), rate)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The terms, ``(T,)``; their sum is what is minimised."""
        if hasattr(self.model, "loss_names"):
            terms = [*self.model.losses(images, labels, self.head)]  # type: ignore[operator]
        else:
            terms = [self.head(self.model(images), labels)]
        for index, energy in enumerate(self.energies.values()):
            terms.append(self.weights[index] * energy(self.targets[index]))
        return torch.stack([term.float() for term in terms])


class Step:
    """A training step: batch, augmentation, forward, backward, clipping, optimiser, moving average, record.

    Calling it with the inputs of a step leaves ``record`` holding the loss terms and, of every parameter group, the
    norm of the gradient and of the updated weights. Nothing in it waits for the device or depends on values, so
    :class:`CapturedStep` can replay it.

    Args:
        objective: Model, head and regularisers.
        forward: What to call for the terms: ``objective``, or a compiled or distributed wrapping of it.
        preprocess: Normalisation and augmentation.
        batches: Source of the batches.
        optimiser: With named parameter groups.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        batch_size: Images over all processes.
        world: This process among all.
        seed: The run's seed.
        clip_norm: Largest norm of the whole gradient.
        averages: Moving average of every parameter, by position, and its decay.
        channels_last: Memory format of the images.
        adversary: Attack on the training images.
    """

    def __init__(
        self,
        objective: Objective,
        forward: Callable[[Tensor, Tensor], Tensor],
        preprocess: Preprocess,
        batches: Batches,
        optimiser: torch.optim.Optimizer,
        *,
        precision: str,
        batch_size: int,
        world: World,
        seed: int,
        clip_norm: float | None = None,
        averages: tuple[Sequence[Tensor], float] | None = None,
        channels_last: bool = False,
        adversary: AdversarialBatch | None = None,
    ) -> None:
        self.device = preprocess.mean.device
        self.objective, self.forward, self.preprocess = objective, forward, preprocess
        self.batches, self.optimiser = batches, optimiser
        self.autocast_dtype = AUTOCAST.get(precision)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        if self.scaler.is_enabled():
            self.scaler.scale(torch.zeros((), device=self.device))  # creates its state, which checkpoints need
        self.batch_size, self.share, self.world, self.seed = batch_size, world.share(batch_size), world, seed
        self.clip_norm, self.averages, self.adversary = clip_norm, averages, adversary
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.generator = torch.Generator(self.device)
        self.groups = [str(group["name"]) for group in optimiser.param_groups]
        self.columns = [
            *objective.terms,
            *(f"grad_norm/{group}" for group in self.groups),
            *(f"weight_norm/{group}" for group in self.groups),
        ]
        self.record = torch.zeros(len(self.columns), device=self.device)
        self.rate = float(optimiser.param_groups[0]["base_lr"])
        """Learning rate of the step that comes next, of the first group, for the regularisers."""

    def begin(self, step: int) -> None:
        """Make everything random in a step a function of the seed and the step's number."""
        self.objective.advance(step, self.seed, self.rate)
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
            if self.adversary is not None:
                with evaluating(self.objective.model, self.objective.head):
                    images = self.adversary(self._logits, images, labels, self.generator)
            terms = self.forward(images, labels)
        self.scaler.scale(terms.sum()).backward()
        self.objective.together.forget()
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimiser)
        norms = self._clip()
        self.scaler.step(self.optimiser)
        self.scaler.update()
        if self.averages is not None:
            averages, decay = self.averages
            averaged = [*self.objective.model.parameters(), *self.objective.head.parameters()]
            torch._foreach_lerp_(list(averages), [p.detach() for p in averaged], 1 - decay)
        weights = [[p.detach() for p in group["params"]] for group in self.optimiser.param_groups]
        self.record.copy_(torch.cat([terms.detach(), norms, torch.stack([self._norm(group) for group in weights])]))

    def _logits(self, images: Tensor) -> Tensor:
        """Scores of images, for attacks."""
        scores: Tensor = self.objective.head.logits(self.objective.model(images))  # type: ignore[operator]
        return scores

    def _norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Norm of all of them; of none, as in a head that trains no weights, 0 on the step's device."""
        return get_total_norm(tensors) if tensors else torch.zeros((), device=self.device)

    def _clip(self) -> Tensor:
        """Gradient norms by parameter group, before the whole gradient is scaled down to ``clip_norm``."""
        members = [[p for p in group["params"] if p.grad is not None] for group in self.optimiser.param_groups]
        norms = torch.stack([self._norm([p.grad for p in group if p.grad is not None]) for group in members])
        if self.clip_norm is not None:
            everything = [p for group in members for p in group]
            clip_grads_with_norm_(everything, self.clip_norm, torch.linalg.vector_norm(norms))
        return norms


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
