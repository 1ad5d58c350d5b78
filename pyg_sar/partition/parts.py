"""The tensors of one part of a graph, and the whole graph back from all parts.

A part's nodes (:class:`PartNodes`), edges (:class:`PartEdges`) and entries of lists of node ids
(:class:`PartEntries`) know what the tensors of ``schema.py`` are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Batch, Data, HeteroData

from pyg_sar.errors import DistributedIndexError
from pyg_sar.exchange.cover import StoredCovers, stored_covers
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
from pyg_sar.partition.layout import Layout, NodeOrder, group_edges
from pyg_sar.partition.node_lists import NodeList, WholeList
from pyg_sar.partition.schema import (
    PartTensors,
    StoreInfo,
    global_ids,
    is_hetero,
    make_tensors,
    without_prefix,
)
from pyg_sar.partition.scratch import GroupedRows, Scratch, group_by_part, grouped

# Writing #################################################################################


@dataclass(frozen=True, slots=True)
class PartNodes:
    """The nodes of part ``part``, of which ``order`` are those of all parts."""

    order: NodeOrder
    part: int


class PartEdges:
    """The edges into part ``part``, in the order of its file.

    ``halo`` are ranks of the sources that other parts own; ``edge_index`` are the edges in the
    part's numbering, ``[2, e]``, and ``e_id`` their global ids, ``[e]``.
    """

    def __init__(self, layout: Layout, part: int) -> None:
        self.layout, self.part, self.halo = layout, part, layout.halos[part]
        self.edge_index, self.e_id = _part_edges(layout, part)

    @cached_property
    def covers(self) -> StoredCovers:
        """The covers of the edges from other parts."""
        source, target = self.edge_index
        row = source - self.layout.sources.ids(self.part).numel()
        cut = row >= 0
        offsets = self.layout.halo_offsets[self.part].tolist()
        return stored_covers(row[cut], target[cut], offsets)


@dataclass(frozen=True, slots=True)
class PartEntries:
    """Entries ``place`` of a list of node ids, whose nodes ``ids`` (own numbers) a part owns."""

    place: Tensor
    ids: Tensor


def _part_edges(layout: Layout, p: int) -> tuple[Tensor, Tensor]:
    """Returns the edges of part ``p`` in its numbering, and their global ids, as in the file."""
    source, target, e_id = layout.edges.part(p)
    halo, sources = layout.halos[p], layout.sources
    low, high = sources.offsets[p : p + 2].tolist()
    rank, owner = (x.index_select(0, source) for x in (sources.rank, sources.part))
    targets = layout.targets.offsets[p : p + 2].tolist()
    target = layout.targets.rank.index_select(0, target) - targets[0]
    place = torch.empty(sources.rank.numel(), dtype=torch.int32)  # of halo rows only
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


def attribute_tensors(
    columns: dict[str, Column], ids: dict[str, Tensor], runs: Mapping[str, Tensor] | None = None
) -> PartTensors:
    """Returns the attributes' tensors for the rows ``ids`` of each level, by their names in a file.

    ``ids`` are of the levels of which a part holds some rows only; ``runs`` are these rows of
    attributes where they are known (:class:`AttributeRuns`).
    """
    tensors: PartTensors = {}
    for name, column in columns.items():
        rows = column.tensors
        if runs and name in runs:
            rows = {"": runs[name]}
        elif column.attribute.level in ids:
            rows = select_rows(column.attribute, rows, ids[column.attribute.level])
        for suffix, full_name in tensor_names(name, column.attribute).items():
            if full_name in tensors:
                raise ValueError(
                    f"Two attributes would be stored as '{full_name}'; rename '{name}'"
                )
            tensors[full_name] = rows[suffix].clone(memory_format=torch.contiguous_format)
    return tensors


Owners = Callable[[slice], Tensor]
"""Returns the parts of a slice of rows."""


class AttributeRuns:
    """Attributes' rows in scratch files, grouped by part: of dense ones with a row per item.

    ``owners`` has of each level what returns the parts of its rows, and the rows of each part,
    ``[P]``. Without ``scratch`` there are no files.
    """

    def __init__(
        self,
        columns: dict[str, Column],
        owners: Mapping[str, tuple[Owners, Tensor]],
        scratch: Scratch | None,
    ) -> None:
        self._groups: dict[str, tuple[str, GroupedRows]] = {}
        for name, column in columns.items() if scratch is not None else ():
            level, dense = column.attribute.level, column.attribute.layout == "dense"
            if scratch is not None and level in owners and dense and not column.attribute.dim:
                rows = grouped(scratch, column.tensors[""], *owners[level])
                self._groups[name] = level, rows

    def part(self, p: int, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the rows of part ``p`` by attribute, in the order of its ``ids`` of each level.

        Nodes have that of the files.
        """
        places: dict[str, Tensor] = {}
        found = {}
        for name, (level, rows) in self._groups.items():
            found[name] = rows.part(p)
            if level == "edge":
                if level not in places:
                    places[level] = torch.empty_like(ids[level])
                    places[level][ids[level].argsort()] = torch.arange(ids[level].numel())
                found[name] = found[name][places[level]]
        return found


def split_list(
    whole: WholeList, sources: NodeOrder, targets: NodeOrder
) -> Callable[[int], PartTensors]:
    """Returns what gives the tensors of each part's entries of a list of node ids."""
    if whole.info.kind == "links":
        layout = group_edges(whole.ids, sources, targets)
    else:
        order, starts = group_by_part(sources.part[whole.ids], sources.num_parts)

    def entries(p: int) -> PartEdges | PartEntries:
        if whole.info.kind == "links":
            return PartEdges(layout, p)
        place = order[starts[p] : starts[p + 1]].clone()
        return PartEntries(place, sources.rank[whole.ids[place]] - sources.offsets[p])

    def tensors(p: int) -> PartTensors:
        rows = make_tensors(whole.info.kind, entries(p))
        return rows | attribute_tensors(whole.columns, {"row": rows["place"]})

    return tensors


# Reading #################################################################################


def decode_attributes(
    attributes: dict[str, Attribute], values: dict[str, Any], tensors: PartTensors
) -> dict[str, Any]:
    """Returns the attributes as ``Data`` held them, ``{name: value}``, for the rows in a part's
    tensors.

    ``values`` are the graph-level plain values.
    """
    decoded = {}
    for name, attribute in attributes.items():
        names = tensor_names(name, attribute)
        rows = {suffix: tensors[full_name] for suffix, full_name in names.items()}
        decoded[name] = decode(attribute, rows, values.get(name))
    return decoded


def decode_list(info: NodeList, ids: Tensor) -> Any:
    """Returns ids in the form and dtype in which the list was given."""
    dtype = getattr(torch, info.attribute.dtype)
    return decode(info.attribute, {"": ids.to(dtype)})


def put_list(store: Any, info: NodeList, value: Any) -> None:
    """Sets an attribute, or an entry of one that is a dict."""
    if info.key is None:
        store[info.name] = value
    else:
        store[info.name] = {**store.get(info.name, {}), info.key: value}


def merge_parts(stores: Sequence[StoreInfo], parts: Sequence[PartTensors]) -> Data | HeteroData:
    """Returns the whole graph from all parts' tensors, nodes and edges in their old order."""
    n_ids: dict[str, list[Tensor]] = {}
    content = [_merge_store(info, parts, n_ids) for info in stores]
    if not is_hetero(stores):
        data = Data(**content[0])
        restore_adjacency(data)
        return data
    found = HeteroData()
    for info, attributes in zip(stores, content, strict=True):
        put_store(found, info, attributes)
    return found


def as_batch(data: Data | HeteroData, num_graphs: int | None) -> Data | HeteroData:
    """Returns a graph, which is the batch of ``num_graphs`` graphs from now on, as a ``Batch``.

    ``None``: it is no batch, and stays as it is.
    """
    if num_graphs is not None:
        if not isinstance(data, Batch):
            object.__setattr__(data, "__class__", type(Batch(_base_cls=type(data))))
        object.__setattr__(data, "get_example", _no_example)
        data._num_graphs = num_graphs
    return data


def _no_example(idx: int) -> Any:
    """Stands for ``get_example()``, which ``batch[k]`` and ``to_data_list()`` call."""
    raise DistributedIndexError(
        f"get_example(), to_data_list() and batch[{idx}] can't take single graphs out of this "
        "batch: where the attributes of each begin isn't kept with rows that lie by parts. "
        f"batch.subgraph(batch.batch == {idx}) has the nodes and edges of graph {idx}; or take it "
        "from the batch before write_partitions() or scatter()"
    )


def put_store(data: Data | HeteroData, info: StoreInfo, attributes: Mapping[str, Any]) -> None:
    """Puts attributes into a store of a graph; that of a type or relation is made if need be."""
    if isinstance(data, HeteroData):
        data = data._global_store if info.key is None else data[info.key]
    for name, value in attributes.items():
        data[name] = value


def _merge_store(
    info: StoreInfo, parts: Sequence[PartTensors], n_ids: dict[str, list[Tensor]]
) -> dict[str, Any]:
    """Returns the attributes of a store; puts the ids of its nodes, by part, into ``n_ids``."""
    rows = [without_prefix(part, info.prefix) for part in parts]
    found: dict[str, Any] = {}
    place: dict[str, Tensor] = {}
    for level in info.totals:
        group = info.level_group(level)
        ids = [group.ids(part) for part in parts]
        place[level] = torch.cat(ids).argsort()
        if level == "node":
            n_ids[info.ends[0]] = ids
            found["num_nodes"] = group.total
        else:
            found["edge_index"] = _merge_ids("edge", rows, info, n_ids)[:, place["edge"]]
    found |= merged_attributes(info.attributes, info.values, place, rows)
    for listed, group in zip(info.lists, info.list_groups(), strict=True):
        own = [without_prefix(part, group.prefix) for part in parts]
        order = torch.cat([part["place"] for part in own]).argsort()
        ids_ = _merge_ids(group.kind, own, info, n_ids).index_select(-1, order)
        put_list(found, listed, decode_list(listed, ids_))
        found |= merged_attributes(group.attributes, {}, {"row": order}, own)
    return found


def _merge_ids(
    kind: str, parts: Sequence[PartTensors], info: StoreInfo, n_ids: dict[str, list[Tensor]]
) -> Tensor:
    """Returns the global ids of all parts' edges or entries, one part after the other."""
    source, target = info.ends
    ends = zip(parts, n_ids[source], n_ids[target], strict=True)
    return torch.cat([global_ids(kind, *part) for part in ends], dim=-1)


def merged_attributes(
    attributes: dict[str, Attribute],
    values: dict[str, Any],
    place: dict[str, Tensor],
    parts: Sequence[PartTensors],
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
    """Returns ``data``, the subgraph of the nodes ``kept`` (``[n]``, in the order of their new
    ids), with its part of the whole graph's lists (:func:`without_lists`).
    """
    for whole in lists:
        number = torch.full((num_nodes,), -1)
        number[kept] = torch.arange(kept.numel())
        ids, info = number[whole.ids], whole.info
        there = ids >= 0 if ids.dim() == 1 else (ids >= 0).all(0)
        rows = there.nonzero().view(-1)
        put_list(data, info, decode_list(info, ids.index_select(-1, rows)))
        tensors = attribute_tensors(whole.columns, {"row": rows})
        for name, value in decode_attributes(info.rows, {}, tensors).items():
            data[name] = value
    return data
