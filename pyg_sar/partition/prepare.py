"""A graph as it goes into a partition folder: its metadata, and the tensors of each part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch_geometric.utils import is_undirected

from pyg_sar.partition.attributes import Column, encode_attributes
from pyg_sar.partition.hetero_parts import HeteroGraph, attribute_header
from pyg_sar.partition.node_ids import NodeIds, said_of
from pyg_sar.partition.node_lists import SplitLists, without_lists
from pyg_sar.partition.partitioners import (
    PartitionStatistics,
    assign_nodes,
    make_layout,
    partition_statistics,
)
from pyg_sar.partition.parts import PartTensors, check_graph, part_tensors, with_edges

FORMAT = "pyg_sar.partition.partitioners"
VERSION = 6  # 2 heterogeneous, 3 with units, 4 with covers, 5 with lists, 6 without units

Prepared = tuple[dict[str, Any], PartitionStatistics, Callable[[int], PartTensors]]
"""The metadata without the parts' files, the statistics, and the tensors of each part."""


def prepare_homogeneous(
    data: Any,
    num_parts: int,
    method: Any,
    seed: int,
    report: Callable[[str], None],
    node_ids: NodeIds | None = None,
) -> Prepared:
    """Encodes and partitions a ``Data``; arguments as of ``write_partitions``."""
    data = with_edges(data)
    edge_index, num_nodes = check_graph(data)
    said = said_of(node_ids, data.keys())
    data, lists = without_lists(data, num_nodes, said)
    columns = encode_attributes(data, num_nodes)
    report(f"assigning {num_nodes:,} nodes to {num_parts} part(s)")
    part = assign_nodes(edge_index, num_nodes, num_parts, method, seed, report)
    layout = make_layout(edge_index, part, num_parts)
    statistics = partition_statistics(layout, _train_mask(columns))
    directed = not is_undirected(edge_index, num_nodes=num_nodes)
    header = _header(directed, statistics, columns, method, seed)
    header["num_graphs"] = _num_graphs(columns)
    header["lists"] = [whole.info.as_dict() for whole in lists]
    split = SplitLists(lists, part, num_parts)

    def tensors(p: int) -> PartTensors:
        return part_tensors(edge_index, layout, columns, p) | split.tensors(p)

    return header, statistics, tensors


def prepare_hetero(
    data: Any,
    num_parts: int,
    method: Any,
    seed: int,
    report: Callable[[str], None],
    node_ids: NodeIds | None = None,
) -> Prepared:
    """Encodes and partitions a ``HeteroData``; arguments as of ``write_partitions``."""
    said = said_of(node_ids, {name for store in data.stores for name in store})
    graph = HeteroGraph(data, said)
    total = sum(graph.num_nodes.values())
    report(f"assigning {total:,} nodes of {len(graph.num_nodes)} type(s) to {num_parts} part(s)")
    partition = graph.partition(num_parts, method, seed, report)
    statistics = partition.statistics()
    header = _header(True, statistics, graph.columns, method, seed)
    header["hetero"] = graph.schema().as_dict()
    return header, statistics, partition.tensors


def _header(
    directed: bool,
    statistics: PartitionStatistics,
    columns: dict[str, Column],
    method: Any,
    seed: int,
) -> dict[str, Any]:
    attributes, values = attribute_header(columns)
    return {
        "format": FORMAT,
        "version": VERSION,
        "num_parts": statistics.num_parts,
        "num_nodes": statistics.num_nodes,
        "num_edges": statistics.num_edges,
        "is_directed": directed,
        "method": method if isinstance(method, str) else "vector",
        "seed": seed,
        "statistics": statistics.as_dict(),
        "attributes": {name: attribute.as_dict() for name, attribute in attributes.items()},
        "values": values,
    }


def _num_graphs(columns: dict[str, Column]) -> int | None:
    """One more than the largest graph id of ``batch``, if that is a vector of such ids."""
    column = columns.get("batch")
    if column is None or column.attribute.level != "node" or column.attribute.dtype != "int64":
        return None
    batch = column.tensors[""]
    if batch.dim() != 1 or (batch < 0).any():
        return None
    return int(batch.max()) + 1 if batch.numel() else 0


def _train_mask(columns: dict[str, Column]) -> Tensor | None:
    column = columns.get("train_mask")
    if column is None or column.attribute.dtype != "bool" or column.attribute.level != "node":
        return None
    return column.tensors[""]
