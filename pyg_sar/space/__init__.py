"""The distributed ``edge_index``: its operators, its derivations, and what is kept with it."""

from pyg_sar.space.distributed_index import DistEdgeIndex, DistIndex
from pyg_sar.space.graph_index import DistBatch, dist_batch

__all__ = [
    "DistBatch",
    "DistEdgeIndex",
    "DistIndex",
    "dist_batch",
]
