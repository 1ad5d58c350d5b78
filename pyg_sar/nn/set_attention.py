r"""Readouts by attention: ``GraphMultisetTransformer`` and ``SetTransformerAggregation``.

A few seeds per graph attend to all its nodes. Their softmax over nodes is one over the nodes of all
workers, and :math:`\sum_j p_{sj} v_j` one sum per graph, seed and head; nodes stay where they are.
What comes after the seeds is computed alike on all workers. With dropout in there, rank 0's result
is everybody's, for the workers' draws differ.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GraphMultisetTransformer, SetTransformerAggregation
from torch_geometric.nn.aggr import utils as blocks
from torch_geometric.utils import softmax

from pyg_sar.comm.collectives import first_workers
from pyg_sar.nn.attention import heads_of, outer_sums, self_attention
from pyg_sar.nn.pool import DistReadout
from pyg_sar.space.graph_index import DistBatch


def _finish(block: blocks.MultiheadAttentionBlock, out: Tensor, x: Tensor) -> Tensor:
    """What a block does after its attention."""
    out = out + x
    if block.layer_norm1 is not None:
        out = block.layer_norm1(out)
    out = out + block.lin(out).relu()
    return out if block.layer_norm2 is None else cast(Tensor, block.layer_norm2(out))


def pool_by_attention(
    pooling: blocks.PoolingByMultiheadAttention, x: Tensor, graphs: DistBatch
) -> Tensor:
    """:class:`PoolingByMultiheadAttention` of nodes ``[n, C]``: ``[num_graphs, seeds, C]``."""
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
    """:class:`SetAttentionBlock` among the nodes of each graph, ``[n, C]``."""
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


MODULES: dict[type, type] = {
    GraphMultisetTransformer: DistGraphMultisetTransformer,
    SetTransformerAggregation: DistSetTransformerAggregation,
}

_DENSE = "it attends within a dense batch of this worker's nodes"

REFUSED: dict[type, str] = {
    blocks.MultiheadAttentionBlock: _DENSE,
    blocks.SetAttentionBlock: _DENSE,
    blocks.InducedSetAttentionBlock: _DENSE,
    blocks.PoolingByMultiheadAttention: _DENSE,
}
