"""Decoupled layers the long way, in plain float64: copy out every patch and take the formula with every kernel.

Nothing here calls a convolution, a pooling, ``F.pad`` or a function of the library. Gradients come from autograd over
the formula.
"""

import itertools
import math
from typing import get_args

import numpy as np
import torch

from hypersphere.nn.operators import Weighting, operators

SECOND = {"seg": 0.5, "mix": 1.0}  # default beta
MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def chirp(shape, step, phase):
    """Numbers without a random generator."""
    i = torch.arange(math.prod(shape), dtype=torch.float64)
    return torch.sin(step * i * i + phase).reshape(shape)


def _sphere(t, radius, alpha, beta):
    return alpha * torch.ones_like(t + 0 * radius)


def _ball(t, radius, alpha, beta):
    return alpha * torch.minimum(t / radius, torch.ones_like(t / radius))


def _tanh(t, radius, alpha, beta):
    e = torch.expm1(-2 * t / radius)
    return -alpha * e / (2 + e)


def _seg(t, radius, alpha, beta):
    return alpha * t - (alpha - beta) * torch.relu(t - radius)


def _logarithm(t):
    """Of 1 + t."""
    return torch.asinh(t * (t + 2) / (2 * (t + 1)))


MAGNITUDES = {
    "sphere": _sphere,
    "ball": _ball,
    "tanh": _tanh,
    "linear": lambda t, radius, alpha, beta: alpha * t,
    "seg": _seg,
    "log": lambda t, radius, alpha, beta: alpha * _logarithm(t),
    "mix": lambda t, radius, alpha, beta: alpha * t + beta * _logarithm(t),
}
"""h(t), with exponentials and cut-offs where the library has functions of their own."""


def _sigmoid(c, k):
    k, lift = torch.as_tensor(k, dtype=c.dtype), torch.asin(c)
    end, e = torch.exp(-math.pi / (2 * k)), torch.exp(-lift / k)
    return (1 + end) / (1 - end) * (1 - e) / (1 + e)


ANGULAR_FUNCTIONS = {
    "cosine": lambda c, k: c,
    "linear": lambda c, k: 2 * torch.asin(c) / math.pi,
    "sigmoid": _sigmoid,
    "sqcos": lambda c, k: torch.sign(c) * c**2,
    "relucos": lambda c, k: (c + torch.abs(c)) / 2,
}
"""g at a cosine; the angle enters as its distance from a right angle."""

# What tests go through: the members that have a formula here, by what they say about themselves.
OPERATORS, ANGULARS, WEIGHTINGS = tuple(MAGNITUDES), tuple(ANGULAR_FUNCTIONS), get_args(Weighting)
RADIAL = tuple(name for name in OPERATORS if operators[name].factory.has_radius)
BOUNDED = tuple(name for name in OPERATORS if operators[name].factory.bounded)
ODD = tuple(g for g in ANGULARS if float(ANGULAR_FUNCTIONS[g](torch.tensor(-1.0), 0.3)) == -1)


def magnitude(name, t, radius=1.0, alpha=1.0, beta=None):
    """h(t) of an operator."""
    return MAGNITUDES[name](t, radius, alpha, SECOND.get(name) if beta is None else beta)


def angular(name, c, k=0.3):
    """g of an angular function at a cosine."""
    return ANGULAR_FUNCTIONS[name](c, k)


def respond(
    patches,
    kernels,
    operator,
    g="cosine",
    *,
    weighting="none",
    eps=1e-4,
    alpha=1.0,
    beta=None,
    k=0.3,
    rho=1.0,
    mean="batch",
    detach=False,
):
    """The operator of every patch with every kernel of its group.

    ``patches`` (N, G, L, D), ``kernels`` (G, F, D), ``rho`` and ``k`` numbers or (G * F,), ``mean`` None for R = rho,
    "batch" or one number a group; answers (N, G * F, L).
    """

    def per_kernel(value):
        value = torch.as_tensor(value, dtype=torch.float64)
        return value.reshape(kernels.shape[0], kernels.shape[1], 1) if value.numel() > 1 else value.reshape(())

    alive = patches.ne(0).any(-1, keepdim=True)
    shown = torch.where(alive, patches, 1.0)  # whatever a dead patch holds, its answer is struck out below
    x, w = shown[:, :, None], kernels[None, :, :, None]
    xn = torch.sqrt((x * x).sum(-1) + eps)
    wn = torch.sqrt((w * w).sum(-1) + eps)
    g_of_angle = angular(g, (w * x).sum(-1) / (wn * xn), per_kernel(k))

    radius = per_kernel(rho)
    lengths = torch.where(alive, torch.sqrt((shown * shown).sum(-1, keepdim=True) + eps), math.sqrt(eps))
    scale = lengths.mean((0, 2, 3)) if isinstance(mean, str) else mean
    if scale is not None:
        scale = torch.as_tensor(scale, dtype=torch.float64).reshape(-1, 1, 1)
        scale = scale.detach() if detach else scale
    full = radius if scale is None else radius * scale

    def h(t, r):
        return magnitude(operator, t, r, alpha, beta)

    size = {
        "none": lambda: h(xn, full),
        "linear": lambda: wn * h(xn, full),
        "joint": lambda: h(wn * xn, full),
        "separate": lambda: h(wn, radius) * h(xn, full) / alpha,
    }[weighting]()
    answer = torch.where(alive.unsqueeze(2).squeeze(-1), size * g_of_angle, 0.0)
    return answer.flatten(1, 2)


def pair(w, x, operator, g="cosine", **options):
    """f(w, x) of single vectors; the radius is ``rho`` unless a ``mean`` is given."""
    return respond(x[None, None, None], w[None, None], operator, g, **{"mean": None, **options}).reshape(())


def tuple_of(value, axes):
    return (value,) * axes if isinstance(value, int) else tuple(value)


def take_padded(x, axis, before, after, mode):
    """Pad (or crop, where negative) one axis by a list of indices, the last of which is a zero."""
    size = x.shape[axis]
    numbers = np.arange(size)
    if mode == "zeros":
        index = np.concatenate([np.full(max(before, 0), size), numbers, np.full(max(after, 0), size)])
        index = index[max(-before, 0) : len(index) - max(-after, 0)]
        x = torch.cat([x, torch.zeros_like(x.narrow(axis, 0, 1))], axis)
    else:
        index = np.pad(numbers, (before, after), mode=MODES[mode])
    return x.index_select(axis, torch.as_tensor(index))


def cut(x, size, stride, dilation, groups):
    """Patches (N, G, L, D) of an input padded already, and the spatial size of the output."""
    reach = [d * (s - 1) for d, s in zip(dilation, size, strict=True)]
    counts = [(n - r - 1) // step + 1 for n, r, step in zip(x.shape[2:], reach, stride, strict=True)]
    found = []
    for position in itertools.product(*map(range, counts)):
        window = [slice(p * s, p * s + r + 1, d) for p, s, r, d in zip(position, stride, reach, dilation, strict=True)]
        patch = x[(slice(None), slice(None), *window)]
        found.append(patch.reshape(x.shape[0], groups, -1))
    return torch.stack(found, 2), counts


def convolution(x, weight, operator, g="cosine", *, stride=1, padding=0, dilation=1, groups=1, mode="zeros", **options):
    """A decoupled convolution in one, two or three dimensions."""
    axes = weight.dim() - 2
    if x.dim() == axes + 1:
        call = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "mode": mode}
        return convolution(x[None], weight, operator, g, **call, **options)[0]
    size = tuple(weight.shape[2:])
    stride, dilation = tuple_of(stride, axes), tuple_of(dilation, axes)
    if padding == "same":
        total = [d * (s - 1) for d, s in zip(dilation, size, strict=True)]
        sides = [(t // 2, t - t // 2) for t in total]
    else:
        sides = [(p, p) for p in tuple_of(0 if padding == "valid" else padding, axes)]
    for axis, (before, after) in enumerate(sides, start=2):
        x = take_padded(x, axis, before, after, mode)
    patches, counts = cut(x, size, stride, dilation, groups)
    kernels = weight.reshape(groups, weight.shape[0] // groups, -1)
    return respond(patches, kernels, operator, g, **options).unflatten(-1, counts)


def transposed(
    x, weight, operator, g="cosine", *, stride=1, padding=0, output_padding=0, dilation=1, groups=1, **options
):
    """A decoupled transposed convolution: one over the input spread by the stride, with the kernel turned round."""
    axes = weight.dim() - 2
    size = tuple(weight.shape[2:])
    settings = (tuple_of(v, axes) for v in (stride, padding, output_padding, dilation))
    stride, padding, output_padding, dilation = settings
    for axis, (s, p, extra, d, taps) in enumerate(
        zip(stride, padding, output_padding, dilation, size, strict=True), start=2
    ):
        n = x.shape[axis]
        wide = x.new_zeros(*x.shape[:axis], (n - 1) * s + 1, *x.shape[axis + 1 :])
        x = wide.index_add(axis, torch.arange(n) * s, x)
        x = take_padded(x, axis, d * (taps - 1) - p, d * (taps - 1) - p + extra, "zeros")
    patches, counts = cut(x, size, (1,) * axes, dilation, groups)
    turned = weight.flip(tuple(range(2, weight.dim()))).unflatten(0, (groups, -1))  # (G, C/G, F, *size)
    kernels = turned.transpose(1, 2).flatten(2)
    return respond(patches, kernels, operator, g, **options).unflatten(-1, counts)


def fully_connected(x, weight, operator, g="cosine", **options):
    """A decoupled linear layer over the last axis."""
    rows = x.reshape(1, 1, -1, x.shape[-1])
    return respond(rows, weight[None], operator, g, **options)[0].T.reshape(*x.shape[:-1], weight.shape[0])
