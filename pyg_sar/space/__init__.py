"""The distributed ``edge_index``: its operators, its derivations, and what is kept with it."""

from pyg_sar.space.distributed_index import DistEdgeIndex, DistIndex

__all__ = ["DistEdgeIndex", "DistIndex"]
