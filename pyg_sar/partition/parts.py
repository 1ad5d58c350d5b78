"""The tensors of one part of a graph, and the whole graph back from all parts.

Tensors of part :math:`p`, with :math:`n_p` nodes, :math:`H_p` halo rows, :math:`E_p` edges and
:math:`P` parts (all int64 but the attributes and what is marked):

===============  =============  ==========================================================
name             shape          content
===============  =============  ==========================================================
n_id             [n_p]          global ids of its nodes, ascending
halo_n_id        [H_p]          global ids of the remote sources of its edges, by (owner, id)
halo_counts      [P]            halo rows per owner
send_index       [sum]          its rows that peers need, by peer, in that peer's halo order (int32)
send_counts      [P]            how many rows each peer needs
covers           [H_p]          bit k: does the cover at ``cover_costs[k]`` pull the row? (uint8)
cover_costs      [K, 2]         what pulled and pushed rows cost in each of K covers (int32)
cover_edges      [1]            edges from other parts
edge_index       [2, E_p]       edges whose target it owns: sources are local (< n_p) or
                                n_p + position in halo_n_id, targets local
e_id             [E_p]          global edge ids (columns of the whole graph's edge_index)
node.NAME        [n_p, ...]     node-level attributes (see ``attributes.py``)
edge.NAME        [E_p, ...]     edge-level attributes
graph.NAME       [...]          graph-level tensors, whole in every part
===============  =============  ==========================================================

Edges of part p are sorted by (unit of the source's owner q, target, source, e_id), where the unit
is (q - p) mod P. Covers are those of ``cover.py``. Versions 3 to 5 sorted by units of several
owners, and held them; version 3 had no covers; versions 1 and 2 sorted by (owner, target, source,
e_id), and their ``send_index`` was int64.

Lists of node ids and pairs of them go to the owners of the nodes. For list ``k`` of a graph, node
type or relation a part has (``list.k:NAME``):

================  =======  ================================================================
name              shape    content
================  =======  ================================================================
place             [K_p]    places in the whole list of the entries that the part owns
ids               [K_p]    of a list of nodes: their local ids, in ascending places
row.NAME          [K_p,.]  attributes that have a row per entry (``edge_label``)
edge_index, ...            of pairs: the same as of edges; the target's owner has them
================  =======  ================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_sar.exchange.cover import stored_covers
from pyg_sar.kernels.ops import sort_edges
from pyg_sar.partition.assignment import restore_adjacency
from pyg_sar.partition.attributes import (
    Attribute,
    Column,
    concatenate_rows,
    decode,
    select_rows,
    tensor_names,
)
from pyg_sar.partition.layout import Layout, make_layout, rank_nodes
from pyg_sar.partition.node_lists import NodeList, WholeList
from pyg_sar.partition.scratch import GroupedRows, Scratch, group_by_part, grouped

PartTensors = dict[str, Tensor]


def relation_tensors(edge_index: Tensor, layout: Layout, p: int) -> PartTensors:
    """Returns the edges into part ``p``, their ids, its halo, and what others need of it."""
    halo = layout.halos[p]
    sends = [layout.send_rows(p, q) for q in range(layout.num_parts)]
    local_edges, e_id = _part_edges(edge_index, layout, p)
    source, target = local_edges
    row = source - layout.nodes(p).numel()
    cut = row >= 0
    covers = stored_covers(row[cut], target[cut], layout.halo_offsets[p].tolist())
    return {
        "halo_n_id": layout.node_order[halo],
        "halo_counts": layout.halo_counts(p),
        "send_index": torch.cat(sends).int(),
        "send_counts": torch.tensor([rows.numel() for rows in sends]),
        "covers": covers.pulled,
        "cover_costs": torch.tensor(covers.costs, dtype=torch.int32).view(-1, 2),
        "cover_edges": torch.tensor([covers.num_edges]),
        "edge_index": local_edges,
        "e_id": e_id,
    }


def attribute_tensors(
    columns: dict[str, Column],
    ids: dict[str, Tensor],
    taken: Container[str] = (),
    runs: Mapping[str, Tensor] | None = None,
) -> PartTensors:
    """Returns the attributes' tensors for the rows ``ids`` of each level, by their names in a file.

    Args:
        columns: The attributes of the whole graph.
        ids: Rows of the levels of which a part holds some rows only.
        taken: Names that are in use.
        runs: These rows of attributes where they are known (:class:`AttributeRuns`).
    """
    tensors: PartTensors = {}
    for name, column in columns.items():
        rows = column.tensors
        if runs and name in runs:
            rows = {"": runs[name]}
        elif column.attribute.level in ids:
            rows = select_rows(column.attribute, rows, ids[column.attribute.level])
        for suffix, full_name in tensor_names(name, column.attribute).items():
            if full_name in tensors or full_name in taken:
                raise ValueError(
                    f"Two attributes would be stored as '{full_name}'; rename '{name}'"
                )
            tensors[full_name] = rows[suffix].clone(memory_format=torch.contiguous_format)
    return tensors


class AttributeRuns:
    """Attributes' rows in scratch files, grouped by part: of dense ones with a row per item.

    Args:
        groups: The grouped rows by the attribute's name.
    """

    def __init__(self, groups: dict[str, GroupedRows]) -> None:
        self._groups = groups

    @classmethod
    def of_nodes(
        cls, columns: dict[str, Column], part: Tensor, num_parts: int, scratch: Scratch | None
    ) -> AttributeRuns:
        """Groups node-level attributes; without ``scratch`` none."""
        if scratch is None:
            return cls({})
        counts = torch.bincount(part, minlength=num_parts)
        found = {
            name: grouped(scratch, rows, part.__getitem__, counts)
            for name, rows in _dense(columns, "node")
        }
        return cls(found)

    @classmethod
    def of_edges(cls, columns: dict[str, Column], layout: Layout) -> AttributeRuns:
        """Groups edge-level attributes, where the layout's edges are in scratch files."""
        edges = layout.edge_order
        if isinstance(edges, Tensor):
            return cls({})
        return cls({name: edges.rows(rows) for name, rows in _dense(columns, "edge")})

    def part(self, p: int, ids: Tensor | None = None) -> dict[str, Tensor]:
        """Returns the rows of part ``p`` by name: ascending, or in the order of its ``ids``."""
        if ids is None or not self._groups:
            return {name: rows.part(p) for name, rows in self._groups.items()}
        place = torch.empty_like(ids)
        place[ids.argsort()] = torch.arange(ids.numel())
        return {name: rows.part(p)[place] for name, rows in self._groups.items()}


def _dense(columns: dict[str, Column], level: str) -> list[tuple[str, Tensor]]:
    return [
        (name, column.tensors[""])
        for name, column in columns.items()
        if (column.attribute.level, column.attribute.layout, column.attribute.dim)
        == (level, "dense", 0)
    ]


def _part_edges(edge_index: Tensor, layout: Layout, p: int) -> tuple[Tensor, Tensor]:
    """Returns the edges of part ``p`` in its numbering, and their global ids, as in the file."""
    source, target, e_id = layout.edge_rows(edge_index, p)
    halo = layout.halos[p]
    low, high = int(layout.node_offsets[p]), int(layout.node_offsets[p + 1])
    rank, owner = (x.index_select(0, source) for x in (layout.node_rank, layout.part))
    targets = layout.target_offsets[p : p + 2].tolist()
    target = layout.target_rank.index_select(0, target) - targets[0]
    place = torch.empty(layout.node_rank.numel(), dtype=torch.int32)  # of halo rows only
    place[halo] = torch.arange(high - low, high - low + halo.numel(), dtype=torch.int32)
    source, remote = rank - low, (owner != p).nonzero().view(-1)
    source[remote] = place[rank[remote]].long()
    # Stable sorts, the last key first; ids ascend already. A part's own nodes come first.
    order, _ = sort_edges(source, high - low + halo.numel())
    order, _ = sort_edges(target, targets[1] - targets[0], order)
    order, first = sort_edges(owner, layout.num_parts, order)
    order = order.roll(-int(first[p]))
    source, target, e_id = (x.index_select(0, order) for x in (source, target, e_id))
    return torch.stack([source, target]), e_id


def decode_attributes(
    attributes: dict[str, Attribute], values: dict[str, Any], tensors: PartTensors
) -> dict[str, Any]:
    """Returns the attributes as ``Data`` held them, ``{name: value}``, for the part's rows.

    Args:
        attributes: How each is stored.
        values: The graph-level plain values.
        tensors: The part's tensors.
    """
    decoded = {}
    for name, attribute in attributes.items():
        names = tensor_names(name, attribute)
        rows = {suffix: tensors[full_name] for suffix, full_name in names.items()}
        decoded[name] = decode(attribute, rows, values.get(name))
    return decoded


def merge_parts(
    attributes: dict[str, Attribute],
    values: dict[str, Any],
    num_nodes: int,
    parts: list[PartTensors],
) -> Data:
    """Returns the whole graph from all parts' tensors, nodes and edges in their old order."""
    place = {
        "node": torch.cat([part["n_id"] for part in parts]).argsort(),
        "edge": torch.cat([part["e_id"] for part in parts]).argsort(),
    }
    edges = [torch.cat([part["n_id"], part["halo_n_id"]])[part["edge_index"]] for part in parts]
    data = Data(
        edge_index=torch.cat(edges, dim=1)[:, place["edge"]],
        num_nodes=num_nodes,
        **merged_attributes(attributes, values, place, parts),
    )
    restore_adjacency(data)
    return data


def merged_attributes(
    attributes: dict[str, Attribute],
    values: dict[str, Any],
    place: dict[str, Tensor],
    parts: list[PartTensors],
) -> dict[str, Any]:
    """Returns the whole graph's attributes; ``place`` sorts the joined rows of a level."""
    whole = dict(parts[0])
    for name, attribute in attributes.items():
        if attribute.level not in place:
            continue
        names = tensor_names(name, attribute)
        rows = [{suffix: part[full] for suffix, full in names.items()} for part in parts]
        joined = concatenate_rows(attribute, rows)
        joined = select_rows(attribute, joined, place[attribute.level])
        whole.update((names[suffix], tensor) for suffix, tensor in joined.items())
    return decode_attributes(attributes, values, whole)


def restricted(data: Data, lists: Sequence[WholeList], kept: Tensor, num_nodes: int) -> Data:
    """Returns ``data``, the subgraph of the nodes ``kept`` (``[n]``), with its part of the lists.

    Args:
        data: The subgraph without lists, as of :func:`without_lists`.
        lists: Those of the whole graph.
        kept: The nodes, in the order of their new ids.
        num_nodes: Nodes of the whole graph.
    """
    for whole in lists:
        number = torch.full((num_nodes,), -1)
        number[kept] = torch.arange(kept.numel())
        ids, info = number[whole.ids], whole.info
        there = ids >= 0 if ids.dim() == 1 else (ids >= 0).all(0)
        rows = there.nonzero().view(-1)
        put_list(data, info.name, info.key, decode_list(info, ids.index_select(-1, rows)))
        tensors = attribute_tensors(whole.columns, {"row": rows})
        for name, value in decode_rows(info, tensors).items():
            data[name] = value
    return data


class SplitLists:
    """Lists of the whole graph and which part owns what of them.

    Args:
        lists: The lists of one graph, node type or relation.
        part: Part of each (source) node.
        num_parts: The number of parts.
        target_part: Part of each target where targets are of another type.
    """

    def __init__(
        self,
        lists: Sequence[WholeList],
        part: Tensor,
        num_parts: int,
        target_part: Tensor | None = None,
    ) -> None:
        self._lists = lists
        self._split: list[Callable[[int], PartTensors]] = []
        for whole in lists:
            if whole.info.kind == "links":
                self._split.append(_split_links(whole.ids, part, num_parts, target_part))
            else:
                self._split.append(_split_nodes(whole.ids, part, num_parts))

    def tensors(self, p: int) -> PartTensors:
        """Returns the tensors of part ``p``, by their names in its file."""
        found: PartTensors = {}
        for k, (whole, split) in enumerate(zip(self._lists, self._split, strict=True)):
            rows = split(p)
            rows |= attribute_tensors(whole.columns, {"row": rows["place"]})
            found |= {f"list.{k}:{name}": tensor for name, tensor in rows.items()}
        return found


def _split_nodes(ids: Tensor, part: Tensor, num_parts: int) -> Callable[[int], PartTensors]:
    order, starts = group_by_part(part[ids], num_parts)
    _, first, rank = rank_nodes(part, num_parts)

    def tensors(p: int) -> PartTensors:
        place = order[starts[p] : starts[p + 1]].clone()
        return {"place": place, "ids": rank[ids[place]] - first[p]}

    return tensors


def _split_links(
    edges: Tensor, part: Tensor, num_parts: int, target_part: Tensor | None
) -> Callable[[int], PartTensors]:
    layout = make_layout(edges, part, num_parts, target_part)

    def tensors(p: int) -> PartTensors:
        found = relation_tensors(edges, layout, p)
        return {"place": found.pop("e_id"), **found}

    return tensors


# Reading #####################################################################


def list_tensors(tensors: PartTensors, number: int) -> PartTensors:
    """Returns the tensors of one list, by their own names."""
    start = f"list.{number}:"
    return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}


def decode_list(info: NodeList, ids: Tensor) -> Any:
    """Returns ids in the form and dtype in which the list was given."""
    dtype = getattr(torch, info.attribute.dtype)
    return decode(info.attribute, {"": ids.to(dtype)})


def decode_rows(info: NodeList, tensors: PartTensors) -> dict[str, Any]:
    """Returns the attributes with a row per entry, for the rows in ``tensors``."""
    return {
        name: decode(attribute, {s: tensors[n] for s, n in tensor_names(name, attribute).items()})
        for name, attribute in info.rows.items()
    }


def put_list(store: Any, name: str, key: str | None, value: Any) -> None:
    """Sets an attribute, or an entry of one that is a dict."""
    if key is None:
        store[name] = value
    else:
        store[name] = {**store.get(name, {}), key: value}


def merge_lists(
    store: Any,
    lists: Sequence[NodeList],
    parts: Sequence[PartTensors],
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
) -> None:
    """Puts the whole lists into a store, in their old order, with the graph's own ids.

    Args:
        store: Where they go.
        lists: What they are.
        parts: The tensors of each part.
        sources: Global ids of each part's (source) nodes.
        targets: The same of the targets.
    """
    for k, info in enumerate(lists):
        rows = [list_tensors(part, k) for part in parts]
        order = torch.cat([part["place"] for part in rows]).argsort()
        found = []
        for part, source, target in zip(rows, sources, targets, strict=True):
            if info.kind == "nodes":
                found.append(source[part["ids"]])
            else:
                row, column = part["edge_index"]
                found.append(
                    torch.stack([torch.cat([source, part["halo_n_id"]])[row], target[column]])
                )
        ids = torch.cat(found, dim=-1).index_select(-1, order)
        put_list(store, info.name, info.key, decode_list(info, ids))
        whole: PartTensors = {}
        for name, attribute in info.rows.items():
            names = tensor_names(name, attribute)
            pieces = [{s: part[full] for s, full in names.items()} for part in rows]
            joined = select_rows(attribute, concatenate_rows(attribute, pieces), order)
            whole |= {names[suffix]: tensor for suffix, tensor in joined.items()}
        for name, value in decode_rows(info, whole).items():
            store[name] = value
