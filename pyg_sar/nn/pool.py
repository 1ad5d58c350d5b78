r"""Readouts: reductions over all nodes of a graph that workers share, one row per graph.

[Note: readouts] An aggregation that is not the ``aggr_module`` of a message passing layer reduces
over nodes of all workers. PyG's own code computes it, with a distributed index
(:mod:`pyg_sar.space.graph_index`): the classes here only see to it that the index is one. The
result is the same on all workers and differentiable; see [Note: gradients of replicated values] in
:mod:`pyg_sar.comm.collectives` for what its gradient means. Train with

.. code-block:: python

    loss = F.cross_entropy(head(readout(x, data.batch)), y, reduction='none')
    pyg_sar.mean(loss).backward()

as for nodes: each worker holds a copy of every graph's loss, and the mean of equal copies is the
mean. A scalar that all workers compute alike goes in as ``pyg_sar.mean(loss.view(1))``.

[Note: readouts by attention] In ``GraphMultisetTransformer`` and ``SetTransformerAggregation`` a
few seeds per graph attend to all its nodes. Their softmax over nodes is one over the nodes of all
workers, and :math:`\sum_j p_{sj} v_j` one sum per graph, seed and head; nodes stay where they are.
The rest is computed alike on all workers. With dropout in it, rank 0's result is everybody's, for
the workers' draws differ.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, cast

import torch
import torch.nn.functional as F
import torch_geometric.nn.aggr as aggr
from torch import Tensor
from torch_geometric.nn import Aggregation, GraphMultisetTransformer, SetTransformerAggregation
from torch_geometric.nn.aggr import utils as blocks
from torch_geometric.nn.aggr.fused import FusedAggregation
from torch_geometric.utils import scatter, softmax

from pyg_sar.comm.collectives import first_workers
from pyg_sar.comm.group import current
from pyg_sar.errors import DistributedIndexError
from pyg_sar.kernels.attention_terms import wide_dtype
from pyg_sar.nn.attention import heads_of, outer_sums, self_attention
from pyg_sar.space.graph_index import DistBatch, dist_batch, one_graph, plain_batch, whole_batch
from pyg_sar.space.node_rows import plain_rows
from pyg_sar.wording import counted

# Functions ###################################################################


def _index(x: Tensor, batch: Tensor | None, size: int | None) -> tuple[DistBatch, int]:
    if x.dim() == 0:
        raise ValueError("Expected node features 'x' of shape [num_local, *] (got a scalar)")
    dim = -1 if x.dim() == 1 else -2
    index = one_graph(x.size(dim), x.device) if batch is None else dist_batch(batch)
    if index.numel() != x.size(dim):
        raise ValueError(
            f"Expected 'batch' to hold the graph of each of the {counted(x.size(dim), 'rows')} of "
            f"'x' (got {index.numel()} at rank {index.comm.rank})"
        )
    if size is not None and size < index.num_graphs:
        raise ValueError(
            f"'size'={size} is less than the {counted(index.num_graphs, 'graphs')} of 'batch'"
        )
    return index, dim


def _pool(x: Tensor, batch: Tensor | None, size: int | None, reduce: str) -> Tensor:
    x = plain_rows(x)
    index, dim = _index(x, batch, size)
    wide = x.to(wide_dtype(x.dtype)) if reduce == "mean" else x  # It counts in the dtype of x.
    out = scatter(wide, index, dim, size or index.num_graphs, reduce).to(x.dtype)
    return out.squeeze(dim) if batch is None and x.dim() > 2 else out


def global_add_pool(x: Tensor, batch: Tensor | None = None, size: int | None = None) -> Tensor:
    r"""Returns the sum of each graph's nodes on all workers, :math:`\sum_p \sum_{n \in V_p} x_n`.

    :func:`torch_geometric.nn.global_add_pool` over workers. The result is the same on all of them.

    Args:
        x: This worker's rows, ``[num_local, F]``.
        batch: Graph of each row, int64 ``[num_local]``; one graph by default.
        size: Number of graphs, the same on all workers.

    Returns:
        ``[num_graphs, F]``.

    Raises:
        ValueError: When sizes don't fit.
    """
    return _pool(x, batch, size, "sum")


def global_mean_pool(x: Tensor, batch: Tensor | None = None, size: int | None = None) -> Tensor:
    """Returns the mean of each graph's nodes on all workers; see :func:`global_add_pool`."""
    return _pool(x, batch, size, "mean")


def global_max_pool(x: Tensor, batch: Tensor | None = None, size: int | None = None) -> Tensor:
    """Returns the maximum of each graph's nodes on all workers; see :func:`global_add_pool`.

    Equal maxima share the gradient evenly, also without ``batch``.
    """
    return _pool(x, batch, size, "max")


# Modules #####################################################################


class DistReadout(Aggregation):
    """Makes an aggregation reduce over the nodes of all workers. See [Note: readouts].

    Called as in PyG, with ``index`` being ``data.batch`` of :func:`pyg_sar.load_partition` (or
    made by :func:`pyg_sar.space.dist_batch`), or without one for a single graph.

    Raises:
        DistributedIndexError: On several workers, when ``index`` is an ordinary tensor: whether it
            numbers graphs or this worker's own nodes can't be seen.
        ValueError: On several workers, when called with ``ptr``.
    """

    def __call__(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
        **kwargs: Any,
    ) -> Tensor:
        name, rank = type(self).__name__, current().rank
        if current().world_size == 1:  # Local is global.
            if ptr is not None:
                index = torch.arange(ptr.numel() - 1, device=ptr.device)
                index = whole_batch(index.repeat_interleave(ptr.diff()), index.numel(), current())
            elif index is not None:
                index = dist_batch(index)
        elif ptr is not None:
            raise ValueError(
                f"{name} got 'ptr' at rank {rank}: graphs that workers share have no contiguous "
                "rows; pass 'index' (data.batch)"
            )
        if index is None:
            index = one_graph(x.size(dim), x.device)
        elif not isinstance(index, DistBatch):
            raise DistributedIndexError(
                f"{name} got an ordinary 'index' at rank {rank}. Pass data.batch of "
                "pyg_sar.load_partition() or pyg_sar.space.dist_batch(batch) to reduce over the "
                "nodes of all workers; reduce edges at this worker's own nodes by "
                "torch_geometric.utils.scatter()"
            )
        size = index.num_graphs if dim_size is None else dim_size
        if size < index.num_graphs:
            raise ValueError(
                f"{name} got 'dim_size'={size} for {counted(index.num_graphs, 'graphs')} at rank "
                f"{rank}"
            )
        index = whole_batch(plain_batch(index), size, index.comm)
        plain = next(chain(self.parameters(), self.buffers()), None) is None
        wide = x.to(wide_dtype(x.dtype)) if plain else x  # PyG counts nodes in the dtype of x.
        out: Any = super().__call__(wide, index=index, dim_size=size, dim=dim, **kwargs)
        if wide.dtype == x.dtype:
            return cast(Tensor, out)
        # FusedAggregation has a list of results.
        return [o.to(x.dtype) for o in out] if isinstance(out, list) else out.to(x.dtype)  # type: ignore[return-value]


# By attention ################################################################


def _finish(block: blocks.MultiheadAttentionBlock, out: Tensor, x: Tensor) -> Tensor:
    """Returns the block's output, after its attention gave ``out``."""
    out = out + x
    if block.layer_norm1 is not None:
        out = block.layer_norm1(out)
    out = out + block.lin(out).relu()
    return out if block.layer_norm2 is None else cast(Tensor, block.layer_norm2(out))


def pool_by_attention(
    pooling: blocks.PoolingByMultiheadAttention, x: Tensor, graphs: DistBatch
) -> Tensor:
    """Returns :class:`PoolingByMultiheadAttention` of nodes ``[n, C]``: ``[graphs, seeds, C]``."""
    attn, x = pooling.mab.attn, pooling.lin(x).relu()
    seed = pooling.seed[0]
    query = heads_of(attn, seed, 0)
    key, value = heads_of(attn, x, 1), heads_of(attn, x, 2)
    scores = torch.einsum("nhd,shd->nhs", key, query) / attn.head_dim**0.5
    weights = softmax(scores, graphs, num_nodes=graphs.num_graphs)
    weights = F.dropout(weights, attn.dropout, attn.training)
    out = outer_sums(weights, value, graphs)  # [graphs, heads, seeds, d]
    out = attn.out_proj(out.transpose(1, 2).flatten(2))
    return _finish(pooling.mab, out, seed.expand_as(out))


def encode(block: blocks.SetAttentionBlock, x: Tensor, graphs: DistBatch) -> Tensor:
    """Returns :class:`SetAttentionBlock` among the nodes of each graph, ``[n, C]``."""
    return _finish(block.mab, self_attention(block.mab.attn, x, graphs), x)


def _agreed(out: Tensor, readout: Any, graphs: DistBatch) -> Tensor:
    random = readout.training and readout.dropout > 0
    return first_workers(out, graphs.comm) if random else out


class DistGraphMultisetTransformer(DistReadout, GraphMultisetTransformer):
    """:class:`GraphMultisetTransformer` of graphs that workers share."""

    def forward(self, x: Tensor, index: DistBatch, **_: Any) -> Tensor:
        out = pool_by_attention(self.pma1, x, index)
        for encoder in self.encoders:
            out = encoder(out)
        return _agreed(self.pma2(out).squeeze(1), self, index)


class DistSetTransformerAggregation(DistReadout, SetTransformerAggregation):
    """:class:`SetTransformerAggregation` of graphs that workers share."""

    def forward(self, x: Tensor, index: DistBatch, **_: Any) -> Tensor:
        for encoder in self.encoders:
            x = encode(encoder, x, index)
        out = pool_by_attention(self.pma, x, index)
        for decoder in self.decoders:
            out = decoder(out)
        return _agreed(out.flatten(1, 2) if self.concat else out.mean(dim=1), self, index)


# Tables ######################################################################

_EXACT: tuple[type[Aggregation], ...] = (
    aggr.SumAggregation,
    aggr.MeanAggregation,
    aggr.MaxAggregation,
    aggr.MinAggregation,
    aggr.MulAggregation,
    aggr.VarAggregation,
    aggr.StdAggregation,
    aggr.SoftmaxAggregation,
    aggr.PowerMeanAggregation,
    aggr.MultiAggregation,
    aggr.DegreeScalerAggregation,
    aggr.AttentionalAggregation,
    aggr.Set2Set,
    aggr.DeepSetsAggregation,
    aggr.VariancePreservingAggregation,
    FusedAggregation,
)

MODULES: dict[type, type] = {
    kind: type(f"Dist{kind.__name__}", (DistReadout, kind), {"__module__": __name__})
    for kind in _EXACT
} | {
    GraphMultisetTransformer: DistGraphMultisetTransformer,
    SetTransformerAggregation: DistSetTransformerAggregation,
}

_ORDER = "its result depends on the order of the nodes"
_RANKS = "ranks of nodes can't be merged from those on each worker"

_DENSE = "it attends within a dense batch of this worker's nodes"

REFUSED: dict[type, str] = {
    aggr.MedianAggregation: _RANKS,
    aggr.QuantileAggregation: _RANKS,
    aggr.SortAggregation: _RANKS,
    aggr.LSTMAggregation: _ORDER,
    aggr.GRUAggregation: _ORDER,
    aggr.MLPAggregation: _ORDER,
    aggr.LCMAggregation: _ORDER,
    aggr.PatchTransformerAggregation: _ORDER,
    aggr.EquilibriumAggregation: "it differentiates a sum over the nodes within its forward pass",
    blocks.MultiheadAttentionBlock: _DENSE,
    blocks.SetAttentionBlock: _DENSE,
    blocks.InducedSetAttentionBlock: _DENSE,
    blocks.PoolingByMultiheadAttention: _DENSE,
}
