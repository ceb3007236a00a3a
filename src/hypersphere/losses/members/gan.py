"""The losses of two players: a discriminator that scores images, and a generator that wants high scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hypersphere.errors import ArgumentError, check_choice, check_range
from hypersphere.geometry import at_least_float32
from hypersphere.losses.registry import losses
from hypersphere.registry import Member

FORMS = ("non-saturating", "hinge", "wasserstein")


@losses.register("gan")
class GANLoss(nn.Module, metaclass=Member):
    r"""Adversarial losses of scores: non-saturating (logistic), hinge or Wasserstein; for models of two players.

    ================ ========================================= =======================
    form             discriminator                             generator
    ================ ========================================= =======================
    non-saturating   :math:`\mathrm{softplus}(-r) + \mathrm{softplus}(f)` :math:`\mathrm{softplus}(-f)`
    hinge            :math:`\max(0, 1 - r) + \max(0, 1 + f)`   :math:`-f`
    wasserstein      :math:`f - r`                             :math:`-f`
    ================ ========================================= =======================

    r are scores of real images, f those of generated ones; each term is the mean over a batch. The Wasserstein form
    needs a discriminator with bounded slopes (``model.spectral``). There are no classes: this head has no weights, its
    class vectors are none, and its logits have no columns.

    Args:
        dim: Feature dimension of the model; the losses do not depend on it.
        classes: Number of classes of the data; not looked at.
        form: ``"non-saturating"``, ``"hinge"`` or ``"wasserstein"``.

    Shape:
        scores ``(B,)``, losses ``()``.

    Example:
        >>> head = GANLoss(8, 10, form="hinge")
        >>> head.discriminator(torch.tensor([0.5]), torch.tensor([-2.0])), head.generator(torch.tensor([-2.0]))
        (tensor(0.5000), tensor(2.))
    """

    contract: ClassVar[Mapping[str, Any]] = {"classes": False}

    shared_options: ClassVar[tuple[str, ...]] = ()
    subcentres: ClassVar[int] = 0
    """Weight vectors of each class: it has none."""
    class_vectors: Tensor

    def __init__(
        self, dim: int, classes: int, *, form: Literal["non-saturating", "hinge", "wasserstein"] = "non-saturating"
    ) -> None:
        super().__init__()
        check_range("dim", dim, 1)
        check_range("classes", classes, 1)
        check_choice("form", form, FORMS)
        self.dim, self.form = dim, form
        self.register_buffer("class_vectors", torch.empty(0, dim), persistent=False)

    def discriminator(self, real: Tensor, fake: Tensor) -> Tensor:
        """Loss of the discriminator from its scores of real and of generated images, both ``(B,)``."""
        real, fake = at_least_float32(real), at_least_float32(fake)
        if self.form == "hinge":
            return (1 - real).relu().mean() + (1 + fake).relu().mean()
        if self.form == "wasserstein":
            return fake.mean() - real.mean()
        return F.softplus(-real).mean() + F.softplus(fake).mean()

    def generator(self, fake: Tensor) -> Tensor:
        """Loss of the generator from the scores ``(B,)`` of its images."""
        fake = at_least_float32(fake)
        return F.softplus(-fake).mean() if self.form == "non-saturating" else -fake.mean()

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Raises an error: a model with losses of its own must be trained with this, not one that gives features."""
        raise ArgumentError("loss", "'gan' needs a model of two players, such as 'dcgan', got one that gives features")

    def logits(self, features: Tensor) -> Tensor:
        """No scores of no classes: ``(B, D) -> (B, 0)``."""
        return at_least_float32(features)[:, :0]

    def schedules(self) -> dict[str, float]:
        """There are none."""
        return {}

    def extra_repr(self) -> str:
        """The form."""
        return f"form={self.form!r}"
