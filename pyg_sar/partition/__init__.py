"""Partitions: who owns which node, the files, and what a worker loads from them."""

from pyg_sar.partition.assignment import assign_nodes
from pyg_sar.partition.message_flow import message_flow_graphs
from pyg_sar.partition.series import Series, load_series
from pyg_sar.partition.storage import add_attributes, merge_partitions

__all__ = [
    "Series",
    "add_attributes",
    "assign_nodes",
    "load_series",
    "merge_partitions",
    "message_flow_graphs",
]
