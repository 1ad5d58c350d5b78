"""A whole graph as it is cut into parts, and a heterogeneous one back from all parts.

A part's file of a heterogeneous graph holds, by the numbers that node types and relations have in
the metadata:

=========================  =======================================================
``type.T/n_id``            global ids of its nodes of type T, ascending
``type.T/node.NAME``       their attributes; ``type.T/graph.NAME`` those that have no row per node
``relation.R/...``         ``edge_index``, ``e_id``, ``halo_n_id``, ``halo_counts``,
                           ``send_index``, ``send_counts``,
                           ``covers``, ``cover_costs``, ``cover_edges``, ``edge.NAME`` as in
                           ``parts.py``, in the numbering of the relation's source and target types
``.../list.K:...``         lists of node ids of a type or relation, as in ``parts.py``
``graph.NAME``             attributes of the graph
=========================  =======================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from pyg_sar.partition.assignment import (
    Assignment,
    EdgeType,
    assign_node_types,
    assign_nodes,
    check_graph,
    count_nodes,
    edges_of_relations,
    with_edges,
)
from pyg_sar.partition.attributes import (
    Attribute,
    Column,
    encode_rows,
    rows_of,
)
from pyg_sar.partition.layout import (
    HeteroPartitionStatistics,
    Layout,
    PartitionStatistics,
    hetero_statistics,
    make_layout,
    partition_statistics,
    rank_nodes,
)
from pyg_sar.partition.levels import check_levels, encode_attributes
from pyg_sar.partition.node_lists import (
    NodeIds,
    NodeList,
    Space,
    WholeList,
    said_of,
    take_lists,
    without_lists,
)
from pyg_sar.partition.parts import (
    AttributeRuns,
    PartTensors,
    SplitLists,
    attribute_tensors,
    decode_attributes,
    merge_lists,
    merged_attributes,
    relation_tensors,
)
from pyg_sar.partition.scratch import Scratch, is_symmetric
from pyg_sar.wording import counted


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """One node type or relation of the whole graph: its rows and attributes.

    ``name`` is ``(type,)`` or ``(source type, relation, target type)``.
    """

    name: tuple[str, ...]
    count: int
    attributes: dict[str, Attribute]
    values: dict[str, Any]
    lists: list[NodeList] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class HeteroSchema:
    """The node types and relations of a partition, in the order of their numbers."""

    types: list[StoreInfo]
    relations: list[StoreInfo]

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as plain values that JSON can hold."""

        def rows(infos: list[StoreInfo]) -> list[dict[str, Any]]:
            return [
                {
                    "name": list(info.name),
                    "count": info.count,
                    "attributes": {k: a.as_dict() for k, a in info.attributes.items()},
                    "values": info.values,
                    "lists": [found.as_dict() for found in info.lists],
                }
                for info in infos
            ]

        return {"types": rows(self.types), "relations": rows(self.relations)}


def attribute_header(columns: Mapping[str, Column]) -> tuple[dict[str, Attribute], dict[str, Any]]:
    """Returns the descriptions of attributes, and the values of those that are stored as JSON."""
    return (
        {name: column.attribute for name, column in columns.items()},
        {name: c.value for name, c in columns.items() if c.attribute.layout == "json"},
    )


class HeteroGraph:
    """A heterogeneous graph, checked and encoded, ready to be partitioned.

    Args:
        data: The graph.
        said: What the caller says of attributes that may hold node ids.
        whole: Edges as int64; else as they are, without a copy.

    Raises:
        ValueError: When a store does not tell its size, edges or attributes can't be used.
    """

    def __init__(
        self, data: HeteroData, said: Mapping[str, bool] | None = None, whole: bool = True
    ) -> None:
        names = data.node_types
        if not names:
            raise ValueError("'data' has no node type; set data['name'].num_nodes")
        self.num_nodes = {name: count_nodes(name, data[name]) for name in names}
        self.edges = edges_of_relations(data, self.num_nodes, whole)
        self.lists: dict[Any, list[WholeList]] = {}
        self._said = said or {}
        most = max(self.num_nodes.values())
        space = Space("the graph", most, most, vectors=False, pairs=False)
        self.columns = self._columns(None, data._global_store, "graph", -2, space)
        self.node_columns = {
            name: self._columns(
                name, data[name], "node", count, Space(f"the node type '{name}'", count, count)
            )
            for name, count in self.num_nodes.items()
        }
        self.edge_columns = {}
        for edge_type, rows in self.edges.items():
            sizes = self.num_nodes[edge_type[0]], self.num_nodes[edge_type[2]]
            space = Space(f"{edge_type}", *sizes, vectors=False)
            self.edge_columns[edge_type] = self._columns(
                edge_type, data[edge_type], "edge", rows.size(1), space
            )

    def _columns(
        self, key: Any, store: Any, level: str, count: int, space: Space
    ) -> dict[str, Column]:
        """Returns the attributes of a store, and moves its lists of node ids to ``lists``."""

        def rows(name: str, value: Any) -> str:
            return level if rows_of(name, value) == count else "graph"

        values = dict(store.items())
        taken, self.lists[key] = take_lists(values, rows, space, self._said)
        rest = {name: value for name, value in values.items() if name not in taken}
        return encode_rows(rest, level, count, space.owner)

    def schema(self) -> HeteroSchema:
        """Returns the types and relations as the metadata describes them."""
        return HeteroSchema(
            [
                StoreInfo(
                    (name,), self.num_nodes[name], *attribute_header(columns), self._listed(name)
                )
                for name, columns in self.node_columns.items()
            ],
            [
                StoreInfo(
                    edge_type,
                    self.edges[edge_type].size(1),
                    *attribute_header(columns),
                    self._listed(edge_type),
                )
                for edge_type, columns in self.edge_columns.items()
            ],
        )

    def _listed(self, key: Any) -> list[NodeList]:
        return [whole.info for whole in self.lists[key]]

    def partition(
        self,
        num_parts: int,
        method: str | Assignment,
        seed: int,
        report: Callable[[str], None],
        scratch: Scratch | None = None,
        marked: Mapping[str, Tensor] | None = None,
    ) -> HeteroPartition:
        """Assigns nodes and edges to parts; ``report`` is called with a line before each stage."""
        given = self.edges, self.num_nodes, num_parts, method, seed, report, scratch, marked
        return HeteroPartition(self, assign_node_types(*given), num_parts, scratch)


class HeteroPartition:
    """A heterogeneous graph and which part owns what.

    Args:
        graph: The graph.
        parts: Part of each node by type.
        num_parts: The number of parts.
        scratch: Where rows grouped by part go. See [Note: bounded memory].
    """

    def __init__(
        self,
        graph: HeteroGraph,
        parts: dict[str, Tensor],
        num_parts: int,
        scratch: Scratch | None = None,
    ) -> None:
        self.graph, self.parts, self.num_parts = graph, parts, num_parts
        self._nodes = {name: rank_nodes(part, num_parts)[:2] for name, part in parts.items()}
        self.layouts: dict[EdgeType, Layout] = {}
        self._lists = {
            name: SplitLists(graph.lists[name], part, num_parts) for name, part in parts.items()
        }
        self._links = {}
        for (source, relation, target), rows in graph.edges.items():
            key = source, relation, target
            other = None if source == target else parts[target]
            self.layouts[key] = make_layout(rows, parts[source], num_parts, other, scratch)
            self._links[key] = SplitLists(graph.lists[key], parts[source], num_parts, other)
        self._node_runs = {
            name: AttributeRuns.of_nodes(columns, parts[name], num_parts, scratch)
            for name, columns in graph.node_columns.items()
        }
        self._edge_runs = {
            name: AttributeRuns.of_edges(columns, self.layouts[name])
            for name, columns in graph.edge_columns.items()
        }

    def statistics(self) -> HeteroPartitionStatistics:
        """Returns the statistics of this partition."""
        masks = {}
        for name, columns in self.graph.node_columns.items():
            column = columns.get("train_mask")
            if column is not None and column.attribute.dtype == "bool":
                masks[name] = column.tensors[""]
        return hetero_statistics(self.parts, self.layouts, masks, self.num_parts)

    def tensors(self, p: int) -> PartTensors:
        """Returns the tensors of part ``p``, by their names in its file."""
        graph = self.graph
        found = attribute_tensors(graph.columns, {})
        for k, (name, columns) in enumerate(graph.node_columns.items()):
            order, offsets = self._nodes[name]
            n_id = order[offsets[p] : offsets[p + 1]].clone()
            runs = self._node_runs[name].part(p)
            rows = {"n_id": n_id, **attribute_tensors(columns, {"node": n_id}, runs=runs)}
            rows |= self._lists[name].tensors(p)
            found |= {f"type.{k}/{key}": value for key, value in rows.items()}
        for k, (edge_type, columns) in enumerate(graph.edge_columns.items()):
            rows = relation_tensors(graph.edges[edge_type], self.layouts[edge_type], p)
            runs = self._edge_runs[edge_type].part(p, rows["e_id"])
            rows |= attribute_tensors(columns, {"edge": rows["e_id"]}, runs=runs)
            rows |= self._links[edge_type].tensors(p)
            found |= {f"relation.{k}/{key}": value for key, value in rows.items()}
        return found


def store_tensors(tensors: PartTensors, kind: str, number: int) -> PartTensors:
    """Returns the tensors of one node type (``kind='type'``) or relation, by their own names."""
    start = f"{kind}.{number}/"
    return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}


def set_attributes(store: Any, attributes: Mapping[str, Any]) -> None:
    """Puts attributes into a store of a ``HeteroData``."""
    for name, value in attributes.items():
        store[name] = value


def merge_hetero(
    schema: HeteroSchema,
    attributes: dict[str, Attribute],
    values: dict[str, Any],
    parts: list[PartTensors],
) -> HeteroData:
    """Returns the whole graph from all parts' tensors, nodes and edges in their old order."""
    data = HeteroData()
    set_attributes(data._global_store, decode_attributes(attributes, values, parts[0]))
    ids: dict[Any, list[Tensor]] = {}
    for k, info in enumerate(schema.types):
        rows = [store_tensors(part, "type", k) for part in parts]
        (name,) = info.name
        ids[name] = [part["n_id"] for part in rows]
        place = {"node": torch.cat(ids[name]).argsort()}
        data[name].num_nodes = info.count
        set_attributes(data[name], merged_attributes(info.attributes, info.values, place, rows))
        merge_lists(data[name], info.lists, rows, ids[name], ids[name])
    for k, info in enumerate(schema.relations):
        rows = [store_tensors(part, "relation", k) for part in parts]
        source, _, target = info.name
        place = {"edge": torch.cat([part["e_id"] for part in rows]).argsort()}
        edges = []
        for p, part in enumerate(rows):
            known = torch.cat([ids[source][p], part["halo_n_id"]])
            row, column = part["edge_index"]
            edges.append(torch.stack([known[row], ids[target][p][column]]))
        data[info.name].edge_index = torch.cat(edges, dim=1)[:, place["edge"]]
        set_attributes(
            data[info.name], merged_attributes(info.attributes, info.values, place, rows)
        )
        merge_lists(data[info.name], info.lists, rows, ids[source], ids[target])
    return data


FORMAT = "pyg_sar.partition"
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
    balance_training: bool = False,
    scratch: Scratch | None = None,
    *,
    levels: Mapping[str, str] | None = None,
) -> Prepared:
    """Encodes and partitions a ``Data``; arguments as of ``write_partitions``."""
    check_levels(levels, data.keys())
    data = with_edges(data)
    edge_index, num_nodes = check_graph(data, whole=scratch is None)
    said = said_of(node_ids, data.keys())
    data, lists = without_lists(data, num_nodes, said, levels)
    columns = encode_attributes(data, num_nodes, levels)
    rows = _row_bytes(columns, "node"), _row_bytes(columns, "edge")
    if scratch is not None and isinstance(num_parts, int) and num_parts > 0:
        scratch.check_even(num_parts, num_nodes, edge_index.size(1), rows)
    report(f"assigning {counted(num_nodes, 'nodes')} to {counted(num_parts, 'parts')}")
    marked = None
    if balance_training:
        marked = _marked({"": _train_mask(columns)}, method)[""]
    given = edge_index, num_nodes, num_parts, method, seed, report, scratch, marked
    if scratch is None:
        part = assign_nodes(*given)
    else:
        part = scratch.assignment(lambda: assign_nodes(*given))
    layout = make_layout(edge_index, part, num_parts, scratch=scratch)
    statistics = partition_statistics(layout, _train_mask(columns))
    if scratch is not None:
        scratch.check(statistics.nodes, statistics.edges, rows)
    directed = not is_symmetric(edge_index)
    header = _header(directed, statistics, columns, method, seed)
    header["num_graphs"] = _num_graphs(columns)
    header["lists"] = [whole.info.as_dict() for whole in lists]
    split = SplitLists(lists, part, num_parts)
    nodes = AttributeRuns.of_nodes(columns, part, num_parts, scratch)
    edges = AttributeRuns.of_edges(columns, layout)

    def tensors(p: int) -> PartTensors:
        n_id = layout.nodes(p)
        found = {"n_id": n_id.clone(), **relation_tensors(edge_index, layout, p)}
        runs = nodes.part(p) | edges.part(p, found["e_id"])
        ids = {"node": n_id, "edge": found["e_id"]}
        found |= attribute_tensors(columns, ids, found, runs)
        return found | split.tensors(p)

    return header, statistics, tensors


def prepare_hetero(
    data: Any,
    num_parts: int,
    method: Any,
    seed: int,
    report: Callable[[str], None],
    node_ids: NodeIds | None = None,
    balance_training: bool = False,
    scratch: Scratch | None = None,
    *,
    levels: Mapping[str, str] | None = None,
) -> Prepared:
    """Encodes and partitions a ``HeteroData``; arguments as of ``write_partitions``."""
    if levels:
        raise ValueError("'levels' is for a Data: the stores of a HeteroData say what rows are")
    said = said_of(node_ids, {name for store in data.stores for name in store})
    graph = HeteroGraph(data, said, whole=scratch is None)
    total = sum(graph.num_nodes.values())
    report(
        f"assigning {counted(total, 'nodes')} of {counted(len(graph.num_nodes), 'types')} to "
        f"{counted(num_parts, 'parts')}"
    )
    marked = None
    if balance_training:
        masks = {name: _train_mask(columns) for name, columns in graph.node_columns.items()}
        marked = _marked(masks, method)
    partition = graph.partition(num_parts, method, seed, report, scratch, marked)
    statistics = partition.statistics()
    if scratch is not None:
        nodes = sum(
            _row_bytes(c, "node") * graph.num_nodes[t] for t, c in graph.node_columns.items()
        )
        edges = sum(
            _row_bytes(c, "edge") * graph.edges[t].size(1) for t, c in graph.edge_columns.items()
        )
        rows = nodes / max(statistics.num_nodes, 1), edges / max(statistics.num_edges, 1)
        scratch.check(statistics.nodes, statistics.edges, rows)
    header = _header(True, statistics, graph.columns, method, seed)
    header["hetero"] = graph.schema().as_dict()
    return header, statistics, partition.tensors


def _row_bytes(columns: Mapping[str, Column], level: str) -> float:
    """Returns the bytes of a level's attributes per row."""
    return sum(
        tensor.nbytes / max(column.attribute.shape[column.attribute.dim], 1)
        for column in columns.values()
        if column.attribute.level == level
        for tensor in column.tensors.values()
    )


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
    """Returns the largest graph id of ``batch`` and one, if that is a vector of such ids."""
    column = columns.get("batch")
    if column is None or column.attribute.level != "node" or column.attribute.dtype != "int64":
        return None
    batch = column.tensors[""]
    if batch.dim() != 1 or (batch < 0).any():
        return None
    return int(batch.max()) + 1 if batch.numel() else 0


def _marked(masks: Mapping[str, Tensor | None], method: Any) -> dict[str, Tensor]:
    """Returns the training nodes of each type that has some; of masks ``[N, k]`` the first split.

    Raises:
        ValueError: There are none, or the method does not balance them.
    """
    if not isinstance(method, str) or method not in ("balanced", "coarsened"):
        given = repr(method) if isinstance(method, str) else "an assignment"
        raise ValueError(
            f"balance_training=True is for method='balanced' and 'coarsened' (got {given})"
        )
    found = {k: mask if mask.dim() == 1 else mask[:, 0] for k, mask in masks.items()
             if mask is not None}  # fmt: skip
    if not any(bool(mask.any()) for mask in found.values()):
        raise ValueError("balance_training=True needs a 'train_mask' with training nodes")
    return found


def _train_mask(columns: Mapping[str, Column]) -> Tensor | None:
    column = columns.get("train_mask")
    if column is None or column.attribute.dtype != "bool" or column.attribute.level != "node":
        return None
    return column.tensors[""]
