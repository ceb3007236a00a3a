r"""Graph networks: backbones that map numbers of nodes ``(B,)`` to features ``(B, dim)`` of these nodes.

The graph is no input: it is the same for all samples, and the network takes it once, by ``attach``.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from hypersphere.errors import ArgumentError, check_range
from hypersphere.geometry import at_least_float32
from hypersphere.models.networks import Layer, models
from hypersphere.nn import factory

Rows = tuple[Tensor, Tensor, Tensor]
"""A sparse matrix in compressed rows: where each row begins ``(N + 1,)``, columns ``(K,)`` and values ``(K,)``."""


def normalised_adjacency(edges: Tensor, nodes: int) -> Rows:
    r"""The adjacency matrix with self loops, normalised on both sides, in compressed rows.

    .. math:: \hat A = \tilde D^{-1/2} (A + I) \tilde D^{-1/2}, \quad \tilde D_{ii} = \sum_j (A + I)_{ij}

    A is symmetric with ones for edges, however often and in whichever direction they are given, and zeros on its
    diagonal. A node without edges keeps its own features, with the weight 1.

    Args:
        edges: ``(2, E)`` int64, numbers of nodes.
        nodes: Number of nodes N.

    Returns:
        Where each row begins ``(N + 1,)``, columns ``(K,)``, both int64, and values ``(K,)`` float64.

    Example:
        >>> starts, columns, values = normalised_adjacency(torch.tensor([[0, 1], [1, 2]]), 3)
        >>> starts.tolist(), columns.tolist(), round(float(values[1]), 4)
        ([0, 2, 5, 7], [0, 1, 0, 1, 2, 1, 2], 0.4082)
    """
    check_range("nodes", nodes, 1)
    if edges.dtype != torch.int64 or edges.dim() != 2 or len(edges) != 2:
        raise ArgumentError("edges", f"must be int64 of shape (2, E), got {edges.dtype} of shape {tuple(edges.shape)}")
    if edges.numel() and not 0 <= int(edges.min()) <= int(edges.max()) < nodes:
        raise ArgumentError("edges", f"must join nodes 0 to {nodes - 1}, got {int(edges.min())} to {int(edges.max())}")
    loops = torch.arange(nodes, device=edges.device).expand(2, -1)
    rows, columns = torch.cat([edges, edges.flip(0), loops], 1)
    keys = (rows * nodes + columns).unique()
    rows, columns = keys // nodes, keys % nodes
    degrees = rows.bincount(minlength=nodes)
    values = (degrees[rows] * degrees[columns]).double().rsqrt()
    return torch.cat([degrees.new_zeros(1), degrees.cumsum(0)]), columns, values


def propagate(features: Tensor, matrix: Rows) -> Tensor:
    r"""The product :math:`\hat A H` of a symmetric sparse matrix with features.

    The sum of a row is taken in the order of its columns, on every device and in the backward pass, too: the same
    inputs give the same bits. Half-precision features are added up in float32.

    Args:
        features: H, ``(N, D)``.
        matrix: A symmetric matrix in compressed rows, each of which has an entry.

    Returns:
        ``(N, D)``, of the type of ``features``.

    Example:
        >>> path = normalised_adjacency(torch.tensor([[0, 1], [1, 2]]), 3)
        >>> propagate(torch.ones(3, 1, dtype=torch.float64), path).flatten()
        tensor([0.9082, 1.1498, 0.9082], dtype=torch.float64)
    """
    product: Tensor = _Propagate.apply(features, *matrix)
    return product


class _Propagate(torch.autograd.Function):
    """The product; the matrix is symmetric, so its backward pass is the product with the gradient."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, starts: Tensor, columns: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(starts, columns, values)
        wide = at_least_float32(features)
        terms = wide[columns] * values.to(wide.dtype).unsqueeze(1)
        # Unsafe: not looking at the numbers, which would wait for the device.
        return torch.segment_reduce(terms, "sum", offsets=starts, unsafe=True).to(features.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        product: Tensor = _Propagate.apply(gradients[0], *ctx.saved_tensors)
        return product, None, None, None


@models.register("gcn")
class GCN(nn.Module):
    r"""Graph convolutional network of Kipf and Welling, up to its classifier.

    .. math:: H_0 = X, \quad H_{l+1} = \mathrm{act}(\hat A H_l W_l), \quad F = \hat A H_L

    with dropout on every :math:`H_l`. The published network has one hidden layer and the scores
    :math:`\hat A H_1 W_1`; they are :math:`F W_1`, so :math:`W_1` is a plain head without bias. The rows of a
    layer's weight are neurons as in any linear layer, of the dimension of the features in front of it.

    Args:
        shape: Shape of one sample, ``()``: a number.
        widths: Neurons of the hidden layers.
        dropout: Share of the entries set to zero in front of every layer, the classifier included.
        linear: Linear layer.
        act: Activation layer.

    Shape:
        ``(B,)`` int64 -> ``(B, dim)``.

    Example:
        >>> network = GCN(()).attach(features=torch.randn(3, 8), edges=torch.tensor([[0, 1], [1, 2]]))
        >>> network(torch.tensor([2, 0])).shape
        torch.Size([2, 16])
    """

    features: Tensor
    starts: Tensor
    columns: Tensor
    values: Tensor
    entries: Tensor

    def __init__(
        self,
        shape: tuple[int, ...] = (),
        *,
        widths: tuple[int, ...] = (16,),
        dropout: float = 0.5,
        linear: Layer = "linear",
        act: Layer = "relu",
    ) -> None:
        super().__init__()
        if tuple(shape):
            raise ArgumentError("shape", f"must be () for the number of a node, got {tuple(shape)}")
        if not widths:
            raise ArgumentError("widths", "must have at least one hidden layer")
        for width in widths:
            check_range("widths", width, 1)
        check_range("dropout", dropout, 0, 1)
        self.widths, self.dim = tuple(widths), widths[-1]
        self.linear, self.act = factory(linear), factory(act)()
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList()  # built by attach, which knows the features

    def attach(self, features: Tensor, edges: Tensor, **_: Tensor) -> GCN:
        """Take the graph, and build the layers with Xavier-uniform weights; a second call takes another graph.

        Args:
            features: X, ``(N, D)``.
            edges: ``(2, E)`` int64, see :func:`normalised_adjacency`.
            **_: What else a data set knows of its graph.

        Returns:
            The network itself.
        """
        if features.dim() != 2 or not features.is_floating_point():
            message = f"must be floating-point of shape (N, D), got {features.dtype} of shape {tuple(features.shape)}"
            raise ArgumentError("features", message)
        first: Any = self.layers[0] if self.layers else None
        if first is not None and first.in_features != features.shape[1]:
            raise ArgumentError("features", f"must be (N, {first.in_features}) as before, got {tuple(features.shape)}")
        starts, columns, values = normalised_adjacency(edges, len(features))
        graph = {"features": features, "starts": starts, "columns": columns, "values": values.to(features.dtype)}
        graph["entries"] = features.flatten().nonzero().flatten()
        for name, tensor in graph.items():
            self.register_buffer(name, tensor, persistent=False)
        sizes = (features.shape[1], *self.widths)
        if not self.layers:
            for inputs, outputs in itertools.pairwise(sizes):
                layer: Any = self.linear(inputs, outputs, bias=False)
                nn.init.xavier_uniform_(layer.weight)
                self.layers.append(layer)
            self.layers.to(features.device, features.dtype)
        return self

    def forward(self, nodes: Tensor) -> Tensor:
        """Features ``(B, dim)`` of nodes ``(B,)``."""
        if not self.layers:
            raise ArgumentError("model", "must have its graph: call attach(features=..., edges=...) first")
        matrix = (self.starts, self.columns, self.values)
        hidden = self._inputs()
        for layer in self.layers:
            hidden = self.dropout(self.act(propagate(layer(hidden), matrix)))
        return propagate(hidden, matrix).index_select(0, nodes)

    def _inputs(self) -> Tensor:
        """Features with dropout of those that are not zero: few, and the others stay zero in any case."""
        if not self.training:
            return self.features
        flat = self.features.flatten()
        dropped = torch.zeros_like(flat).index_copy_(0, self.entries, self.dropout(flat[self.entries]))
        return dropped.view_as(self.features)
