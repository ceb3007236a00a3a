r"""Adversarial attacks: small changes of images that a classifier gets wrong, and batches of them to train on.

An attack is called with a function from images to logits, images in [0, 1] and labels; it returns images of the same
shape, in [0, 1] and within its budget. Everything is batched, the loops are over iterations alone, and nothing waits
for the device while a CUDA graph is captured. Parameters get no gradients. The caller puts the model into evaluation
mode (:func:`evaluating`): statistics of a batch would couple its samples.

Budgets and steps are in units of the pixels' range, so that the published 8 of 255 is ``8 / 255``.
"""

from __future__ import annotations

import importlib
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypersphere.errors import ArgumentError, HypersphereError, check_choice, check_range
from hypersphere.geometry import at_least_float32
from hypersphere.metrics.processes import Group, agreed, batches, gathered, share
from hypersphere.registry import Member, Registry

Predict = Callable[[Tensor], Tensor]
Norm = Literal["linf", "l2"]
Loss = Literal["cross-entropy", "margin"]
Labels = Literal["true", "predicted"]

EPS = 8 / 255
"""The published budget, of every pixel."""
TINY = 1e-30
"""What lengths of gradients are at least, where something is divided by them."""


class _AttackType(Member, ABCMeta):
    """Abstract members."""


class Attack(metaclass=_AttackType):
    """Base of the attacks: checks what it is given, and leaves the rest to :meth:`perturb`."""

    in_step: ClassVar[bool] = True
    """Whether it is device work alone, so that it can be part of a captured training step."""

    def __call__(
        self, predict: Predict, images: Tensor, labels: Tensor, generator: torch.Generator | None = None
    ) -> Tensor:
        """Adversarial images.

        Args:
            predict: Images to logits ``(B, C)``, sample by sample: a model in evaluation mode.
            images: ``(B, ...)`` in [0, 1]. Half precision cannot hold a budget; such images are attacked in float32.
            labels: ``(B,)`` classes.
            generator: Source of what is drawn; by default torch's own.
        """
        if not images.is_floating_point():
            raise ArgumentError("images", f"must be floats in [0, 1], got {images.dtype}")
        if labels.dim() != 1 or labels.is_floating_point():
            raise ArgumentError("labels", f"must be classes (B,), got {labels.dtype} of shape {tuple(labels.shape)}")
        if len(images) != len(labels):
            raise ArgumentError("labels", f"must be as many as the {len(images)} images, got {len(labels)}")
        # On a GPU a look at the values would wait for it.
        if images.device.type == "cpu" and images.numel() and not 0 <= images.min() <= images.max() <= 1:
            raise ArgumentError("images", f"must be in [0, 1], got {images.min():g} to {images.max():g}")
        with torch.inference_mode(False), torch.no_grad():
            images, labels = at_least_float32(images.detach()).clone(), labels.to(torch.int64, copy=True)
            if not images.numel():
                return images
            return self.perturb(predict, images, labels, generator)

    @abstractmethod
    def perturb(self, predict: Predict, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        """The attack itself, on checked images, without gradients unless it enables them."""


attacks: Registry[Attack] = Registry("attack")


def create(name: str, **options: Any) -> Attack:
    """Build an attack by name.

    Example:
        >>> predict = lambda images: images @ torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
        >>> create("fgsm", eps=0.1)(predict, torch.tensor([[0.5, 0.4]]), torch.tensor([0]))
        tensor([[0.4000, 0.5000]])
    """
    return attacks.create(name, **options)


# ------------------------------------------------------------------------------------------------ what attacks share


def losses_of(logits: Tensor, labels: Tensor, loss: Loss = "cross-entropy") -> Tensor:
    r"""What an attack raises, for each sample: cross-entropy, or the margin :math:`\max_{k \ne y} z_k - z_y`.

    The cross-entropy of a sample that is classified with great confidence rounds to 0, and so does its gradient; the
    margin has a gradient wherever the logits have one.

    Example:
        >>> losses_of(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([0]), "margin")
        tensor([-1.])
    """
    logits = at_least_float32(logits)
    if loss == "cross-entropy":
        return F.cross_entropy(logits, labels, reduction="none")
    own = labels.unsqueeze(1)
    return logits.scatter(1, own, -torch.inf).amax(1) - logits.gather(1, own).squeeze(1)


def gradients(
    predict: Predict, images: Tensor, labels: Tensor, loss: Loss = "cross-entropy"
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of each sample's loss with respect to its pixels, the losses, and the logits.

    Where a gradient is not a number it counts as 0, so that images stay finite.

    Example:
        >>> slopes, _, _ = gradients(lambda x: x @ torch.eye(2), torch.zeros(1, 2), torch.tensor([0]))
        >>> slopes
        tensor([[-0.5000,  0.5000]])
    """
    with torch.enable_grad():
        images = images.detach().requires_grad_()
        logits = predict(images)
        losses = losses_of(logits, labels, loss)
        # Of the images alone: parameters are given no gradients.
        (found,) = torch.autograd.grad(losses.sum(), images, allow_unused=True) if losses.requires_grad else (None,)
    if found is None:
        raise ArgumentError("predict", "must be differentiable with respect to the images; 'square' needs no gradient")
    return found.nan_to_num(nan=0.0), losses.detach(), logits.detach()


def lengths(vectors: Tensor, norm: Norm | Literal["l1"] = "l2") -> Tensor:
    """Norm of each sample, in the shape ``(B, 1, ...)`` that multiplies samples.

    Example:
        >>> lengths(torch.tensor([[3.0, -4.0]])), lengths(torch.tensor([[3.0, -4.0]]), "linf")
        (tensor([[5.]]), tensor([[4.]]))
    """
    order = {"linf": torch.inf, "l2": 2, "l1": 1}[norm]
    found = torch.linalg.vector_norm(vectors.flatten(1), order, dim=1)
    return found.view(-1, *[1] * (vectors.dim() - 1))


def _ascent(gradient: Tensor, norm: Norm) -> Tensor:
    """The step of norm 1 that raises a linear function most."""
    if norm == "linf":
        return gradient.sign()
    gradient = gradient / lengths(gradient, "linf").clamp(min=TINY)  # squares of tiny numbers would vanish
    return gradient / lengths(gradient).clamp(min=TINY)


def _within(changed: Tensor, images: Tensor, eps: float, norm: Norm) -> Tensor:
    """The nearest images in the budget, then in [0, 1], which takes them no farther from where they were."""
    if norm == "linf":
        changed = torch.minimum(torch.maximum(changed, images - eps), images + eps)
    else:
        change = changed - images
        changed = images + change * (eps / lengths(change).clamp(min=TINY)).clamp(max=1)
    return changed.clamp(0, 1)


class _Best:
    """The strongest images so far of each sample: wrong ones before right ones, then those of the larger loss."""

    def __init__(self, images: Tensor) -> None:
        self.images = images
        self.losses = images.new_full((len(images),), -torch.inf)
        self.wrong = torch.zeros_like(self.losses, dtype=torch.bool)

    def offer(self, images: Tensor, losses: Tensor, wrong: Tensor) -> None:
        better = (wrong & ~self.wrong) | ((wrong == self.wrong) & (losses > self.losses))
        self.images = torch.where(better.view(-1, *[1] * (images.dim() - 1)), images, self.images)
        self.losses, self.wrong = torch.where(better, losses.to(self.losses.dtype), self.losses), self.wrong | wrong


def _all_settled(settled: Tensor) -> bool:
    """Whether there is nothing left to do. A captured step must not ask: it does the rest in vain, with no effect."""
    capturing = settled.is_cuda and torch.cuda.is_current_stream_capturing()
    return not capturing and bool(settled.all())


# ------------------------------------------------------------------------------------------------ by gradients


@dataclass(frozen=True)
class GradientAttack(Attack):
    """Base of the attacks that climb the loss.

    Args:
        eps: Largest change, of every pixel (``"linf"``) or of the image (``"l2"``).
        norm: What is bounded by ``eps``.
        loss: What is raised.
        labels: ``"predicted"`` goes away from what the model says, not from the given labels: in training, these leak
            into the images.
    """

    eps: float = EPS
    norm: Norm = "linf"
    loss: Loss = "cross-entropy"
    labels: Labels = "true"

    def __post_init__(self) -> None:
        check_range("eps", self.eps, 0)
        check_choice("norm", self.norm, ("linf", "l2"))
        check_choice("loss", self.loss, ("cross-entropy", "margin"))
        check_choice("labels", self.labels, ("true", "predicted"))

    def aim(self, predict: Predict, images: Tensor, labels: Tensor) -> Tensor:
        """The classes to leave."""
        return labels if self.labels == "true" else predict(images).argmax(1)


@attacks.register("fgsm")
@dataclass(frozen=True)
class FGSM(GradientAttack):
    r"""Fast gradient sign method: one step of full length, :math:`x + \epsilon\,\mathrm{sign}(\nabla_x J)`.

    Args:
        eps: Largest change, of every pixel (``"linf"``) or of the image (``"l2"``).

    Example:
        >>> predict = lambda images: images @ torch.eye(2)
        >>> FGSM(eps=0.25)(predict, torch.tensor([[0.5, 0.9]]), torch.tensor([0]))
        tensor([[0.2500, 1.0000]])
    """

    def perturb(self, predict: Predict, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        """One step."""
        slope, _, _ = gradients(predict, images, self.aim(predict, images, labels), self.loss)
        return _within(images + self.eps * _ascent(slope, self.norm), images, self.eps, self.norm)


@attacks.register("bim")
@dataclass(frozen=True)
class BIM(GradientAttack):
    """Basic iterative method: small steps of FGSM, each brought back into the budget, from the image itself.

    Args:
        step: Length of a step; ``None``: a quarter of ``eps``, which is the published 2 of 255 for 8.
        steps: Number of steps.
        keep: Return the strongest image on the way, the unchanged one included, not the last: then more steps never
            make a model look better. It takes one more look at the model.

    Example:
        >>> predict = lambda images: images @ torch.eye(2)
        >>> BIM(eps=0.25, steps=2)(predict, torch.tensor([[0.5, 0.75]]), torch.tensor([0]))
        tensor([[0.3750, 0.8750]])
    """

    step: float | None = None
    steps: int = 20
    keep: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("steps", self.steps, 1)
        if self.step is not None:
            check_range("step", self.step, 0)

    def perturb(self, predict: Predict, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        """All steps from the image itself."""
        best = _Best(images)
        last = self.climb(predict, images, images, self.aim(predict, images, labels), best)
        return best.images if self.keep else last

    def climb(self, predict: Predict, images: Tensor, start: Tensor, labels: Tensor, best: _Best) -> Tensor:
        """The last of the images on the way from ``start``; ``best`` sees all of them."""
        length = self.eps / 4 if self.step is None else self.step
        changed = start
        for _ in range(self.steps):
            slope, losses, logits = gradients(predict, changed, labels, self.loss)
            best.offer(changed, losses, logits.argmax(1) != labels)
            changed = _within(changed + length * _ascent(slope, self.norm), images, self.eps, self.norm)
        if self.keep:
            self.look(predict, changed, labels, best)
        return changed

    def look(self, predict: Predict, images: Tensor, labels: Tensor, best: _Best) -> None:
        """Offer images for which no gradient is needed."""
        logits = predict(images)
        best.offer(images, losses_of(logits, labels, self.loss), logits.argmax(1) != labels)


@attacks.register("pgd")
@dataclass(frozen=True)
class PGD(BIM):
    """Projected gradient descent: BIM from random places within the budget.

    Args:
        restarts: Number of random places, one after the other; of all images on the way the strongest is kept.

    Example:
        >>> predict = lambda images: images @ torch.eye(2)
        >>> draws = torch.Generator().manual_seed(0)
        >>> PGD(eps=0.25)(predict, torch.tensor([[0.5, 0.5]]), torch.tensor([0]), draws)
        tensor([[0.2500, 0.7500]])
    """

    restarts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("restarts", self.restarts, 1)
        if self.restarts > 1 and not self.keep:
            raise ArgumentError("restarts", f"must be 1 with keep=False, which returns the last, got {self.restarts}")

    def perturb(self, predict: Predict, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        """All steps from every random place."""
        labels = self.aim(predict, images, labels)
        best = _Best(images)
        if self.keep:
            self.look(predict, images, labels, best)
        for _ in range(self.restarts):
            last = self.climb(predict, images, self.start(images, generator), labels, best)
        return best.images if self.keep else last

    def start(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        """Uniform in the cube or ball around the images, then brought into [0, 1]."""
        options: dict[str, Any] = {"generator": generator, "device": images.device, "dtype": images.dtype}
        if self.norm == "linf":
            noise = 2 * torch.rand(images.shape, **options) - 1
        else:
            noise = torch.randn(images.shape, **options)
            radius = torch.rand(len(images), **options) ** (1 / images[0].numel())
            noise = noise / lengths(noise) * radius.view(-1, *[1] * (images.dim() - 1))
        return _within(images + self.eps * noise, images, self.eps, self.norm)


@attacks.register("deepfool")
@dataclass(frozen=True)
class DeepFool(Attack):
    r"""DeepFool: the small change that takes an image to the nearest boundary of its class, if logits were linear.

    With :math:`w_k = \nabla z_k - \nabla z_y` and :math:`f_k = z_k - z_y`, each step goes to the class with the least
    :math:`|f_k| / \|w_k\|`, until the predicted class changes; the image is changed by the sum of the steps so far,
    stretched by ``1 + overshoot``. There is no budget: the norm of the change is the result. It is an attack by
    gradients, too.

    Args:
        steps: Most steps.
        overshoot: How much farther than to the boundary.
        classes: Number of classes that are considered, the likeliest ones, the image's own included.
        norm: What is to be small.
        labels: ``"predicted"`` leaves the class that the model says, as published; ``"true"`` leaves the given one,
            and images that are misclassified as they are stay so.

    Example:
        >>> predict = lambda images: images @ torch.eye(2)
        >>> DeepFool()(predict, torch.tensor([[0.6, 0.2]]), torch.tensor([0]))
        tensor([[0.3960, 0.4040]])
    """

    contract: ClassVar[Mapping[str, Any]] = {"strength": None}

    steps: int = 50
    overshoot: float = 0.02
    classes: int = 10
    norm: Norm = "l2"
    labels: Labels = "predicted"

    def __post_init__(self) -> None:
        check_range("steps", self.steps, 1)
        check_range("overshoot", self.overshoot, 0)
        check_range("classes", self.classes, 2)
        check_choice("norm", self.norm, ("linf", "l2"))
        check_choice("labels", self.labels, ("true", "predicted"))

    def perturb(self, predict: Predict, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        """All steps, of which a sample takes those until its class changes."""
        logits = predict(images)
        if logits.shape[1] < 2:
            return images
        own = (logits.argmax(1) if self.labels == "predicted" else labels).unsqueeze(1)
        count = min(self.classes, logits.shape[1])
        candidates = logits.scatter(1, own, torch.inf).topk(count).indices  # its own class first
        settled = logits.argmax(1, keepdim=True) != own
        total, changed = torch.zeros_like(images), images
        for _ in range(self.steps):
            if _all_settled(settled):
                break
            move = self._move(predict, changed, candidates)
            open_ = ~settled.view(-1, *[1] * (images.dim() - 1))
            total = torch.where(open_, total + move, total)
            changed = torch.where(open_, (images + (1 + self.overshoot) * total).clamp(0, 1), changed)
            settled = settled | (predict(changed).argmax(1, keepdim=True) != own)
        return changed

    def _move(self, predict: Predict, images: Tensor, candidates: Tensor) -> Tensor:
        """The step to the nearest boundary of the linearised logits."""
        size, count = candidates.shape
        with torch.enable_grad():
            # One copy of an image for each of its candidates: one pass, whatever the layers are made of.
            copies = images.detach().repeat_interleave(count, 0).requires_grad_()
            scores = at_least_float32(predict(copies).gather(1, candidates.reshape(-1, 1)).squeeze(1))
            (slopes,) = torch.autograd.grad(scores.sum(), copies)
        slopes = slopes.nan_to_num(nan=0.0).reshape(size, count, -1)
        scores = scores.detach().view(size, count)
        slopes, gaps = slopes[:, 1:] - slopes[:, :1], (scores[:, 1:] - scores[:, :1]).abs() + 1e-5
        steepness = torch.linalg.vector_norm(slopes, 2 if self.norm == "l2" else 1, dim=2)
        distances = gaps / steepness.clamp(min=TINY)
        nearest = distances.argmin(1, keepdim=True)
        slope = slopes.take_along_dim(nearest.unsqueeze(2), 1).squeeze(1)
        distance = distances.gather(1, nearest)
        step = slope / steepness.gather(1, nearest).clamp(min=TINY) if self.norm == "l2" else slope.sign()
        return (distance * step).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).reshape(images.shape)


# ------------------------------------------------------------------------------------------------ without gradients


@attacks.register("square")
@dataclass(frozen=True)
class Square(Attack):
    """Square attack of Andriushchenko and others: random squares of full strength, kept where they help; no gradients.

    It sees logits alone, so that it works no worse where gradients lie. Vectors count as images of one row.

    Args:
        eps: Largest change of every pixel.
        steps: Number of squares that are tried, each a look at the model.
        share: Of the image's area that the first squares cover; it is halved after 10, 50, 200, 500, 1000, 2000, 4000,
            6000 and 8000 squares, however many there are: more of them never make a model look better.

    Example:
        >>> predict = lambda images: images.flatten(1) @ torch.eye(4)[:, :2]
        >>> draws = torch.Generator().manual_seed(0)
        >>> Square(eps=0.25, steps=50)(predict, torch.full((1, 1, 2, 2), 0.5), torch.tensor([0]), draws)[0, 0, 0]
        tensor([0.2500, 0.7500])
    """

    HALVINGS: ClassVar[tuple[int, ...]] = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)

    eps: float = EPS
    steps: int = 1000
    share: float = 0.8

    def __post_init__(self) -> None:
        check_range("eps", self.eps, 0)
        check_range("steps", self.steps, 0)
        check_range("share", self.share, 0, 1, open_low=True)

    def perturb(self, predict: Predict, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        """Stripes, then one square after the other."""
        shape = images.shape
        maps = images if images.dim() == 4 else images.reshape(len(images), 1, 1, -1)
        size, channels, height, width = maps.shape

        def draw(*sides: int) -> Tensor:
            return torch.rand(size, *sides, generator=generator, device=images.device)

        def signs(*sides: int) -> Tensor:
            return self.eps * (1 - 2 * (draw(*sides) < 0.5).to(images.dtype))

        def offer(changed: Tensor) -> None:
            changed = _within(changed, maps, self.eps, "linf")
            logits = predict(changed.reshape(shape))
            best.offer(changed, losses_of(logits, labels, "margin"), logits.argmax(1) != labels)

        best = _Best(maps)
        offer(maps)
        offer(maps + signs(channels, 1, width))
        rows = torch.arange(height, device=images.device).view(1, 1, -1, 1)
        columns = torch.arange(width, device=images.device).view(1, 1, 1, -1)
        for step in range(self.steps):
            area = self.share * 0.5 ** sum(step >= limit for limit in self.HALVINGS) * height * width
            tall, wide = (max(1, min(round(area**0.5), side)) for side in (height, width))
            corner = draw(2, 1, 1, 1)
            top = (corner[:, 0] * (height - tall + 1)).long()
            left = (corner[:, 1] * (width - wide + 1)).long()
            inside = (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)
            offer(torch.where(inside, maps + signs(channels, 1, 1), best.images))
        return best.images.reshape(shape)


@attacks.register("foolbox")
@dataclass(frozen=True)
class Foolbox(Attack):
    """Any attack of the foolbox library, by the name of its class; for evaluation, ``pip install foolbox``.

    Whatever the model's function trains gets gradients by it.

    Args:
        attack: Name in ``foolbox.attacks``, such as ``"L2CarliniWagnerAttack"`` or ``"BoundaryAttack"``.
        eps: Budget, in the norm of the attack; ``None``: the smallest change that an attack finds.
        options: Arguments of the class.

    Example:
        >>> attack = Foolbox("LinfFastGradientAttack", eps=0.25)
        >>> attack.attack, attack.in_step
        ('LinfFastGradientAttack', False)
    """

    contract: ClassVar[Mapping[str, Any]] = {
        "options": {"attack": "LinfFastGradientAttack", "eps": 0.03},
        "needs": "foolbox",
        "clean": False,
    }

    in_step: ClassVar[bool] = False

    attack: str = "L2CarliniWagnerAttack"
    eps: float | None = None
    options: Mapping[str, Any] | None = None

    def perturb(self, predict: Predict, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        """What foolbox finds, cut to the budget; it draws from torch's own generator."""
        try:
            library = importlib.import_module("foolbox")
        except ModuleNotFoundError as error:
            raise HypersphereError("this attack needs foolbox, which is not installed: pip install foolbox") from error
        kind = getattr(library.attacks, self.attack, None)
        if not isinstance(kind, type):
            raise ArgumentError("attack", f"must be the name of a class in foolbox.attacks, got {self.attack!r}")
        try:
            attack = kind(**(self.options or {}))
        except TypeError as error:
            raise ArgumentError("options", f"must be arguments of foolbox.attacks.{self.attack}: {error}") from error
        model = library.PyTorchModel(_Function(predict).eval(), bounds=(0, 1), device=images.device)
        with torch.enable_grad():
            _, found, _ = attack(model, images, labels, epsilons=self.eps)
        return found.detach()


class _Function(nn.Module):
    """A function as a module, which foolbox wants."""

    def __init__(self, function: Predict) -> None:
        super().__init__()
        self.function = function

    def forward(self, images: Tensor) -> Tensor:
        return self.function(images)


# ------------------------------------------------------------------------------------------------ use


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Put modules into evaluation mode, and each of their parts back into its own mode afterwards.

    Example:
        >>> layer = nn.BatchNorm1d(2)
        >>> with evaluating(layer):
        ...     layer.training
        False
        >>> layer.training
        True
    """
    before = [(part, part.training) for module in modules for part in module.modules()]
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for part, mode in before:
            part.training = mode


def attacked(
    attack: Attack,
    predict: Predict,
    images: Tensor,
    labels: Tensor,
    *,
    batch_size: int = 500,
    seed: int = 0,
    group: Group | None = None,
) -> Tensor:
    """Adversarial images of as many images as there are, so many at a time.

    A transfer attack gives the ``predict`` of another model here than the one that is then tested.

    Of several processes each attacks some of the batches, with the numbers that one process would have drawn for them:
    it draws those of the batches before by attacking these in vain, with scores that cost nothing. An attack of which
    the scores decide how much it draws has other numbers then, as has ``"foolbox"``, which draws from torch's own
    generator.

    Args:
        attack: What to do.
        predict: Images to logits.
        images: ``(N, ...)`` in [0, 1].
        labels: ``(N,)``.
        batch_size: Images at a time.
        seed: Of all that is drawn.
        group: Processes that share the batches, all of which make the same call and get the same result; ``None``:
            this one alone.

    Example:
        >>> predict = lambda images: images @ torch.eye(2)
        >>> attacked(FGSM(eps=0.5), predict, torch.full((3, 2), 0.5), torch.tensor([0, 1, 0]), batch_size=2)
        tensor([[0., 1.],
                [1., 0.],
                [0., 1.]])
    """
    check_range("batch_size", batch_size, 1)
    generator = torch.Generator(images.device).manual_seed(seed)
    own = share(len(images), group, batch_size)
    with agreed(group):
        before = batches(own.start, batch_size) if attack.in_step and own.stop > own.start else []
        if before:
            with torch.no_grad():
                classes = predict(images[:1]).shape[1]
            for rows in before:
                attack(lambda x: x.flatten(1)[:, :1].expand(-1, classes), images[rows], labels[rows], generator)
        found = [
            attack(predict, images[rows], labels[rows], generator) for rows in batches(len(images), batch_size, group)
        ]
        return gathered(found or [attack(predict, images[:0], labels[:0], generator)], group)


class Scaling(Protocol):
    r"""What brings pixels in [0, 1] to what the model sees, :math:`(x - \mu) / \sigma`: the trainer's preprocessing."""

    mean: Tensor
    std: Tensor


class AdversarialBatch:
    r"""Adversarial training: replaces a share of every batch by adversarial images of the model as it is.

    The images are as the model sees them, :math:`(x - \mu) / \sigma`; the budget holds for the pixels :math:`x` in
    [0, 1]. Which images are replaced, the first ones of the batch, does not matter, because batches are drawn at
    random. It is device work alone, and part of a captured step.

    Args:
        attack: What to do.
        share: Of the batch, rounded to whole images; 0.5 weighs natural and adversarial images alike.
        scaling: Has the mean and the spread by which pixels were normalised; ``None``: they were not.

    Example:
        >>> attacker = AdversarialBatch(FGSM(eps=0.5))
        >>> images = torch.full((2, 1, 1, 2), 0.5)
        >>> attacker(lambda x: x.flatten(1), images, torch.tensor([0, 0])).flatten(1)
        tensor([[0.0000, 1.0000],
                [0.5000, 0.5000]])
    """

    def __init__(self, attack: Attack, share: float = 0.5, scaling: Scaling | None = None) -> None:
        check_range("share", share, 0, 1, open_low=True)
        if not attack.in_step:
            raise ArgumentError("attack", f"must be one of this library's own for training, got {attack}")
        self.attack, self.share, self.scaling = attack, share, scaling

    def __call__(
        self, predict: Predict, images: Tensor, labels: Tensor, generator: torch.Generator | None = None
    ) -> Tensor:
        """The batch with adversarial images in it.

        Args:
            predict: Images as given here to logits; the model in evaluation mode (:func:`evaluating`).
            images: ``(B, C, H, W)`` as the model sees them.
            labels: ``(B,)``.
            generator: Source of what the attack draws.
        """
        count = round(self.share * len(images))
        if not count:
            return images
        mean, std = (0.0, 1.0) if self.scaling is None else (self.scaling.mean, self.scaling.std)
        pixels = (images[:count].detach() * std + mean).clamp(0, 1)  # rounding may leave the range
        found = self.attack(lambda changed: predict((changed - mean) / std), pixels, labels[:count], generator)
        adversarial = ((found - mean) / std).to(images.dtype)
        memory = torch.channels_last if images.dim() == 4 and not images.is_contiguous() else torch.contiguous_format
        return torch.cat([adversarial, images[count:]]).contiguous(memory_format=memory)
