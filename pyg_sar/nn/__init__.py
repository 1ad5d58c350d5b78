"""Layers and norms that run on a distributed graph."""

from pyg_sar.nn.embedding import NodeEmbedding, gather_embedding, own_rows, scatter_embedding
from pyg_sar.nn.graph_norm import (
    DistGraphNorm,
    DistGraphSizeNorm,
    DistInstanceNorm,
    DistInstanceNorm1d,
    DistLayerNorm,
    DistMeanSubtractionNorm,
    DistPairNorm,
)
from pyg_sar.nn.message_passing import DistMessagePassing
from pyg_sar.nn.norm import (
    NORMS,
    DistBatchNorm,
    DistBatchNorm1d,
    DistDiffGroupNorm,
    DistHeteroBatchNorm,
    DistSyncBatchNorm,
)
from pyg_sar.strategy import OneShotWarning

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
    "DistSyncBatchNorm",
    "NodeEmbedding",
    "OneShotWarning",
    "gather_embedding",
    "own_rows",
    "scatter_embedding",
]
