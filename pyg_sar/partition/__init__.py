"""Partitions: who owns which node, the files, and what a worker loads from them."""

from pyg_sar.partition.assignment import assign_nodes
from pyg_sar.partition.storage import merge_partitions

__all__ = [
    "assign_nodes",
    "merge_partitions",
]
