r"""SphereNorm: what follows a cosine sphere convolution where that takes the place of batch normalisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hypersphere.errors import ArgumentError, check_range
from hypersphere.registry import Member


class _BatchStatistics(_BatchNorm):
    """Batch normalisation of ``(N, C, ...)`` with any number of axes, without scale and shift."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


class SphereNorm(nn.Module, metaclass=Member):
    r"""Rescaling of the responses of a cosine sphere convolution, which is the normalisation itself.

    .. math:: y_f = \beta_f\, F_f + \gamma_f

    Responses of :class:`hypersphere.nn.SphereConv2d` lie in [-1, 1] whatever the scale of the kernels and of the input
    and depend on no other sample, so a network can do without batch normalisation: the convolution normalises, this
    module only rescales. It is made to be the ``norm=`` of a model. The four configurations that are compared:

    ============================ ====================================================================
    batch normalisation          ``conv="conv2d", norm="batchnorm2d"``
    SphereNorm                   ``conv=SphereConv2d, norm="identity"``
    SphereNorm, rescaled         ``conv=SphereConv2d, norm=SphereNorm``
    SphereNorm and batch norm    ``conv=SphereConv2d, norm=partial(SphereNorm, batch_norm=True)``
    ============================ ====================================================================

    Mind the names: here beta is the scale and gamma the shift; in batch normalisation it is the other way round. With
    ``batch_norm`` they are applied after it, so that the module is batch normalisation as torch has it.

    Args:
        channels: Number of channels.
        rescale: Apply beta and gamma.
        batch_norm: Normalise over the batch first.
        learn: Learn beta and gamma; otherwise they stay as they are.
        beta: Initial scale.
        gamma: Initial shift.
        eps: Epsilon of the batch normalisation.
        momentum: Momentum of the batch normalisation.
        device: As in torch.
        dtype: As in torch.

    Shape:
        ``(N, C, ...)``, unchanged.

    Example:
        >>> import functools, hypersphere as hs
        >>> net = hs.nn.SphereConv2d(3, 8, 3), SphereNorm(8), nn.ReLU()
        >>> nn.Sequential(*net)(torch.randn(2, 3, 9, 9)).shape
        torch.Size([2, 8, 7, 7])
    """

    beta: Tensor | None
    gamma: Tensor | None

    def __init__(
        self,
        channels: int,
        rescale: bool = True,
        batch_norm: bool = False,
        *,
        learn: bool = True,
        beta: float = 1.0,
        gamma: float = 0.0,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        check_range("channels", channels, 1)
        like = {"device": device, "dtype": dtype}
        self.channels = channels
        self.statistics = _BatchStatistics(channels, eps, momentum, affine=False, **like) if batch_norm else None
        for name, value in {"beta": beta, "gamma": gamma}.items():
            values = torch.full((channels,), float(value), **like)
            if not rescale:
                self.register_parameter(name, None)
            elif learn:
                self.register_parameter(name, nn.Parameter(values))
            else:
                self.register_buffer(name, values)

    def forward(self, x: Tensor) -> Tensor:
        """Rescaled responses, in the shape and type of ``x``."""
        if x.dim() < 2 or x.shape[1] != self.channels:
            raise ArgumentError("input", f"must have shape (N, {self.channels}, ...), got {tuple(x.shape)}")
        if self.statistics is not None:
            x = self.statistics(x)
        if self.beta is None or self.gamma is None:
            return x
        shape = (-1, *(1,) * (x.dim() - 2))
        return (self.beta.view(shape) * x + self.gamma.view(shape)).to(x.dtype)

    def extra_repr(self) -> str:
        """Channels, and whether they are rescaled and by what."""
        learned = isinstance(self.beta, nn.Parameter)
        return f"{self.channels}, rescale={self.beta is not None}" + ("" if learned else ", learn=False")
