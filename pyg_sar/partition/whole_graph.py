"""A whole graph as it is cut into parts: its stores, checked and encoded, and who owns what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData

from pyg_sar.partition.assignment import (
    assign_node_types,
    assign_nodes,
    check_graph,
    count_nodes,
    edges_of_relations,
    with_edges,
)
from pyg_sar.partition.attributes import Column, encode_all, rows_of
from pyg_sar.partition.layout import (
    Layout,
    NodeOrder,
    PartitionStatistics,
    group_edges,
    hetero_statistics,
    partition_statistics,
)
from pyg_sar.partition.levels import Levels, check_levels
from pyg_sar.partition.node_lists import (
    NodeIds,
    Space,
    WholeList,
    said_of,
    take_lists,
    without_lists,
)
from pyg_sar.partition.parts import (
    AttributeRuns,
    Owners,
    PartEdges,
    PartNodes,
    attribute_tensors,
    split_list,
)
from pyg_sar.partition.schema import (
    FORMAT,
    VERSION,
    PartTensors,
    StoreInfo,
    is_hetero,
    make_tensors,
)
from pyg_sar.partition.scratch import GroupedEdges, Scratch
from pyg_sar.tensors import node_tensors
from pyg_sar.wording import counted

Report = Callable[[str], None]

# The graph ###############################################################################


@dataclass(frozen=True, slots=True)
class WholeStore:
    """A store of the whole graph, encoded: how it is stored, its attributes, its lists of node ids,
    and its edges ``[2, E]``, where it has such.
    """

    info: StoreInfo
    columns: dict[str, Column]
    lists: list[WholeList]
    edges: Tensor | None = None


def _store(
    key: Any,
    prefix: str,
    totals: dict[str, int],
    columns: dict[str, Column],
    lists: list[WholeList],
    edges: Tensor | None = None,
) -> WholeStore:
    attributes = {name: column.attribute for name, column in columns.items()}
    values = {name: c.value for name, c in columns.items() if c.attribute.layout == "json"}
    info = StoreInfo(key, prefix, totals, attributes, values, [whole.info for whole in lists])
    return WholeStore(info, columns, lists, edges)


def _store_of_data(
    data: Any, node_ids: NodeIds | None, levels: Mapping[str, str] | None, whole: bool
) -> WholeStore:
    check_levels(levels, data.keys())
    said = data.get("num_nodes")
    data = with_edges(data)
    edges, count = check_graph(data, whole=whole)
    data, lists = without_lists(data, count, said_of(node_ids, data.keys()), levels)
    known = Levels(data, count, levels)
    values = known.data.to_dict() | {"num_nodes": said}
    columns = encode_all(values, known.told, known.counts, "the graph")
    totals = {"node": count, "edge": edges.size(1)}
    return _store(None, "", totals, columns, lists, edges)


def _stores_of_hetero(data: HeteroData, node_ids: NodeIds | None, whole: bool) -> list[WholeStore]:
    """Returns the stores of the graph, of its types and of its relations."""
    said = said_of(node_ids, {name for store in data.stores for name in store})
    if not data.node_types:
        raise ValueError("'data' has no node type; set data['name'].num_nodes")
    counts = {name: count_nodes(name, data[name]) for name in data.node_types}
    edges = edges_of_relations(data, counts, whole)

    def encoded(
        key: Any, prefix: str, totals: dict[str, int], space: Space, rows: Tensor | None = None
    ) -> WholeStore:
        level, count = next(iter(totals.items()), ("graph", -2))

        def level_by_rows(name: str, value: Any) -> str:
            return level if rows_of(name, value) == count else "graph"

        values = dict((data._global_store if key is None else data[key]).items())
        taken, lists = take_lists(values, level_by_rows, space, said)
        rest = {name: value for name, value in values.items() if name not in taken}
        columns = encode_all(rest, level_by_rows, {level: count}, space.owner)
        return _store(key, prefix, totals, columns, lists, rows)

    most = max(counts.values())
    stores = [encoded(None, "", {}, Space("the graph", most, most, vectors=False, pairs=False))]
    for k, (name, count) in enumerate(counts.items()):
        space = Space(f"the node type '{name}'", count, count)
        stores.append(encoded(name, f"type.{k}/", {"node": count}, space))
    for k, (key, rows) in enumerate(edges.items()):
        space = Space(f"{key}", counts[key[0]], counts[key[2]], vectors=False)
        stores.append(encoded(key, f"relation.{k}/", {"edge": rows.size(1)}, space, rows))
    return stores


# Its parts ###############################################################################


class _SplitStore:
    """A store, and which part owns what of it.

    ``nodes`` are those of each type. Rows grouped by part go to ``scratch``. See [Note: bounded
    memory].
    """

    def __init__(
        self, store: WholeStore, nodes: Mapping[str, NodeOrder], scratch: Scratch | None
    ) -> None:
        self._store, self.key = store, store.info.key
        self.layout: Layout | None = None
        self._levels: dict[str, Callable[[int], Any]] = {}
        owners: dict[str, tuple[Owners, Tensor]] = {}
        ends = [nodes[name] for name in store.info.ends if name in nodes]
        if "node" in store.info.totals:
            self._levels["node"] = partial(PartNodes, ends[0])
            owners["node"] = ends[0].part.__getitem__, ends[0].counts
        if store.edges is not None:
            self.layout = group_edges(store.edges, ends[0], ends[1], scratch)
            self._levels["edge"] = partial(PartEdges, self.layout)
            if isinstance(self.layout.edges, GroupedEdges):
                owners["edge"] = self.layout.edges.owners, self.layout.edges.counts
        self._runs = AttributeRuns(store.columns, owners, scratch)
        self._lists = [split_list(whole, ends[0], ends[1]) for whole in store.lists]

    def tensors(self, p: int) -> PartTensors:
        """Returns the tensors of part ``p``, by their names in its file."""
        store, rows, ids = self._store, PartTensors(), {}
        for level, split in self._levels.items():
            rows |= make_tensors(level, split(p))
            ids[level] = rows["n_id"] if level == "node" else rows["e_id"]
        rows |= attribute_tensors(store.columns, ids, self._runs.part(p, ids))
        for k, listed in enumerate(self._lists):
            rows |= {f"list.{k}:{name}": tensor for name, tensor in listed(p).items()}
        return {store.info.prefix + name: tensor for name, tensor in rows.items()}


Prepared = tuple[dict[str, Any], PartitionStatistics, Callable[[int], PartTensors]]
"""The metadata without the parts' files, the statistics, and the tensors of each part."""


def _check_kind(data: Data | HeteroData) -> None:
    """Raises where a graph is divided already, or where its class, derived from PyG's, redefines
    what that has: parts hold tensors, no classes.
    """
    if node_tensors(data.to_dict()):
        raise ValueError(
            "'data' is divided among the workers already: use it as it is. To divide it anew pass "
            "one of plain tensors, the x.full_tensor() of each"
        )
    base = HeteroData if isinstance(data, HeteroData) else Data
    derived = type(data).__mro__[: type(data).__mro__.index(base)]
    own = {name for one in derived if not issubclass(one, Batch) for name in vars(one)}
    lost = sorted(name for name in own if not name.startswith("_") and hasattr(base, name))
    if lost:
        raise TypeError(
            f"'data' is a {type(data).__name__}, which redefines {', '.join(lost)}, but workers "
            f"get a {base.__name__}: pass {base.__name__}.from_dict(data.to_dict()) if "
            f"{base.__name__}'s own are right for it"
        )


def prepare(
    data: Any,
    num_parts: int,
    method: Any,
    seed: int,
    report: Report,
    *,
    node_ids: NodeIds | None = None,
    levels: Mapping[str, str] | None = None,
    balance_training: bool = False,
    scratch: Scratch | None = None,
) -> Prepared:
    """Encodes and partitions a graph; arguments as of ``write_partitions``."""
    _check_kind(data)
    if isinstance(data, HeteroData):
        if levels:
            raise ValueError("'levels' is for a Data: the stores of a HeteroData say what rows are")
        stores = _stores_of_hetero(data, node_ids, whole=scratch is None)
    else:
        stores = [_store_of_data(data, node_ids, levels, whole=scratch is None)]
    row_bytes = _row_bytes(stores, "node"), _row_bytes(stores, "edge")
    if scratch is not None:  # Nothing need be assigned where not even equal parts would fit.
        nodes, edges = (
            [total // num_parts + (p < total % num_parts) for p in range(num_parts)]
            for total in (_total(stores, "node"), _total(stores, "edge"))
        )
        scratch.check(nodes, edges, row_bytes)
    masks = _train_masks(stores)
    marked = _marked(masks, method) if balance_training else None
    parts = _assign(stores, num_parts, method, seed, report, scratch, marked)
    order = {name: NodeOrder.of(part, num_parts) for name, part in parts.items()}
    split = [_SplitStore(store, order, scratch) for store in stores]
    layouts = {one.key: one.layout for one in split if one.layout is not None}
    if is_hetero([store.info for store in stores]):
        statistics: PartitionStatistics = hetero_statistics(order, layouts, masks)
    else:
        statistics = partition_statistics(layouts[None], masks.get(""))
    if scratch is not None:
        scratch.check(statistics.nodes, statistics.edges, row_bytes)

    def tensors(p: int) -> PartTensors:
        return {name: tensor for one in split for name, tensor in one.tensors(p).items()}

    header = _header(stores, statistics, method, seed)
    header["batched"] = data.num_graphs if isinstance(data, Batch) else None
    return header, statistics, tensors


def _total(stores: Sequence[WholeStore], level: str) -> int:
    """Returns the nodes or edges of all stores."""
    return sum(store.info.totals.get(level, 0) for store in stores)


def _row_bytes(stores: Sequence[WholeStore], level: str) -> float:
    """Returns the bytes of a level's attributes per row, on average over the stores."""
    total = sum(
        tensor.nbytes
        for store in stores
        for column in store.columns.values()
        if column.attribute.level == level
        for tensor in column.tensors.values()
    )
    return total / max(_total(stores, level), 1)


def _assign(
    stores: Sequence[WholeStore],
    num_parts: int,
    method: Any,
    seed: int,
    report: Report,
    scratch: Scratch | None,
    marked: dict[str, Tensor] | None,
) -> dict[str, Tensor]:
    """Returns the part of each node by type."""
    counts = {store.info.ends[0]: store.info.totals["node"] for store in stores
              if "node" in store.info.totals}  # fmt: skip
    what = counted(sum(counts.values()), "nodes")
    if is_hetero([store.info for store in stores]):
        what += f" of {counted(len(counts), 'types')}"
    report(f"assigning {what} to {counted(num_parts, 'parts')}")
    edges = {store.info.key: store.edges for store in stores if store.edges is not None}

    pos = {
        store.info.ends[0]: store.columns["pos"].tensors[""]
        for store in stores
        if "pos" in store.columns
        and "node" in store.info.totals
        and store.columns["pos"].attribute.layout == "dense"
    }

    def assign() -> Tensor:
        if None in edges:
            one = None if marked is None else marked[""]
            given = edges[None], counts[""], num_parts, method, seed, report, scratch, one
            return assign_nodes(*given, pos.get(""))
        all_types = edges, counts, num_parts, method, seed, report, scratch, marked
        several = assign_node_types(*all_types, pos)
        return torch.cat(list(several.values()))

    part = assign() if scratch is None else scratch.assignment(assign)
    return dict(zip(counts, part.split(list(counts.values())), strict=True))


# The metadata ############################################################################


def _header(
    stores: Sequence[WholeStore], statistics: PartitionStatistics, method: Any, seed: int
) -> dict[str, Any]:
    described = [store.info.as_dict() for store in stores]
    header = {
        "format": FORMAT,
        "version": VERSION,
        "num_parts": statistics.num_parts,
        "num_nodes": statistics.num_nodes,
        "num_edges": statistics.num_edges,
        "method": method if isinstance(method, str) else "vector",
        "seed": seed,
        "statistics": statistics.as_dict(),
        "attributes": described[0]["attributes"],
        "values": described[0]["values"],
    }
    if stores[0].edges is not None:
        header["lists"] = described[0]["lists"]
        return header
    header["hetero"] = {"types": [], "relations": []}
    for store, row in zip(stores[1:], described[1:], strict=True):
        (level, count), key = *store.info.totals.items(), store.info.key
        name = [key] if level == "node" else list(key)
        kind = "types" if level == "node" else "relations"
        header["hetero"][kind].append({"name": name, "count": count, **row})
    return header


# Training nodes ##########################################################################


def _train_masks(stores: Sequence[WholeStore]) -> dict[str, Tensor]:
    """Returns ``train_mask`` of each type that has one, ``[N]`` or ``[N, k]``."""
    masks = {}
    for store in stores:
        column = store.columns.get("train_mask")
        kind = None if column is None else (column.attribute.dtype, column.attribute.level)
        if column is not None and kind == ("bool", "node"):
            masks[store.info.ends[0]] = column.tensors[""]
    return masks


def _marked(masks: Mapping[str, Tensor], method: Any) -> dict[str, Tensor]:
    """Returns the training nodes of each type that has some; of masks ``[N, k]`` the first
    split.
    """
    if not isinstance(method, str) or method not in ("balanced", "coarsened"):
        given = repr(method) if isinstance(method, str) else "an assignment"
        raise ValueError(
            f"balance_training=True is for method='balanced' and 'coarsened' (got {given})"
        )
    found = {k: mask if mask.dim() == 1 else mask[:, 0] for k, mask in masks.items()}
    if not any(bool(mask.any()) for mask in found.values()):
        raise ValueError("balance_training=True needs a 'train_mask' with training nodes")
    return found
