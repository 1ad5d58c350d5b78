"""Layers and norms that run on a distributed graph."""

from pyg_sar.nn.embedding import NodeEmbedding, gather_embedding, own_rows, scatter_embedding
from pyg_sar.nn.message_passing import DistMessagePassing
from pyg_sar.nn.norm import DistBatchNorm, DistBatchNorm1d
from pyg_sar.strategy import OneShotWarning

__all__ = [
    "DistBatchNorm",
    "DistBatchNorm1d",
    "DistMessagePassing",
    "NodeEmbedding",
    "OneShotWarning",
    "gather_embedding",
    "own_rows",
    "scatter_embedding",
]
