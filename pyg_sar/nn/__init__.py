"""Layers, norms and readouts that run on a distributed graph."""

from pyg_sar.engine.kernels.dense import global_attention
from pyg_sar.nn.embedding import NodeEmbedding, gather_embedding, own_rows, scatter_embedding
from pyg_sar.nn.lazy import initialize
from pyg_sar.nn.message_passing import DistMessagePassing
from pyg_sar.nn.norm import (
    NORMS,
    DistBatchNorm,
    DistBatchNorm1d,
    DistDiffGroupNorm,
    DistGraphNorm,
    DistGraphSizeNorm,
    DistHeteroBatchNorm,
    DistInstanceNorm,
    DistInstanceNorm1d,
    DistLayerNorm,
    DistMeanSubtractionNorm,
    DistPairNorm,
    DistSyncBatchNorm,
)
from pyg_sar.nn.pool import DistReadout, global_add_pool, global_max_pool, global_mean_pool
from pyg_sar.space.node_rows import shuffle_nodes

__all__ = [
    "NORMS",
    "DistBatchNorm",
    "DistBatchNorm1d",
    "DistDiffGroupNorm",
    "DistGraphNorm",
    "DistGraphSizeNorm",
    "DistHeteroBatchNorm",
    "DistInstanceNorm",
    "DistInstanceNorm1d",
    "DistLayerNorm",
    "DistMeanSubtractionNorm",
    "DistMessagePassing",
    "DistPairNorm",
    "DistReadout",
    "DistSyncBatchNorm",
    "NodeEmbedding",
    "gather_embedding",
    "global_add_pool",
    "global_attention",
    "global_max_pool",
    "global_mean_pool",
    "initialize",
    "own_rows",
    "scatter_embedding",
    "shuffle_nodes",
]
