"""Layers, norms and readouts that run on a distributed graph."""

from pyg_sar.graph_index import DistBatch, dist_batch
from pyg_sar.nn.message_passing import DistMessagePassing
from pyg_sar.nn.norm import DistBatchNorm, DistBatchNorm1d
from pyg_sar.nn.pool import DistReadout, global_add_pool, global_max_pool, global_mean_pool
from pyg_sar.node_rows import shuffle_nodes
from pyg_sar.ring import global_attention
from pyg_sar.strategy import OneShotWarning

__all__ = [
    "DistBatch",
    "DistBatchNorm",
    "DistBatchNorm1d",
    "DistMessagePassing",
    "DistReadout",
    "OneShotWarning",
    "dist_batch",
    "global_add_pool",
    "global_attention",
    "global_max_pool",
    "global_mean_pool",
    "shuffle_nodes",
]
