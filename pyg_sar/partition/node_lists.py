"""Lists of node ids and pairs of them, split to the owners of the nodes, and whole again.

A part's file holds for list ``k`` of a graph, node type or relation (``list.k:NAME``):

================  =======  ================================================================
name              shape    content
================  =======  ================================================================
place             [K_p]    places in the whole list of the entries that the part owns
ids               [K_p]    of a list of nodes: their local ids, in ascending places
row.NAME          [K_p, .] attributes that have a row per entry (``edge_label``)
edge_index, ...            of pairs: what ``parts.py`` says of edges; the target's owner has them
================  =======  ================================================================
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_sar.partition.attributes import (
    RESERVED,
    Attribute,
    Column,
    concatenate_rows,
    decode,
    encode,
    level_of,
    rows_of,
    select_rows,
    tensor_names,
)
from pyg_sar.partition.node_ids import Space, integers, is_named, kind_of, list_of
from pyg_sar.partition.partitioners import group_by_part, make_layout, rank_nodes
from pyg_sar.partition.parts import PartTensors, attribute_tensors, relation_tensors

PLACE = "_place"
"""What the places of a list are called on a part: ``train_idx_place``."""


@dataclass(frozen=True, slots=True)
class NodeList:
    """A list of node ids, as the metadata describes it.

    Attributes:
        name: Its attribute's name.
        kind: ``'nodes'`` or ``'links'``.
        attribute: How it was given.
        rows: The attributes with a row per entry.
        key: The key in the dict ``name`` that it is the value of, if there is one.
    """

    name: str
    kind: str
    attribute: Attribute
    rows: dict[str, Attribute]
    key: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain values that JSON can hold."""
        return asdict(self)

    @property
    def count(self) -> int:
        """The number of entries in the whole graph."""
        return self.attribute.shape[-1]


@dataclass(frozen=True, slots=True)
class WholeList:
    """A list of the whole graph: its description, its ids (int64), and the rows of attributes."""

    info: NodeList
    ids: Tensor
    columns: dict[str, Column]


# Writing #####################################################################


def take_lists(
    values: Mapping[str, Any],
    level: Callable[[str, Any], str],
    space: Space,
    said: Mapping[str, bool],
) -> tuple[set[str], list[WholeList]]:
    """Finds the attributes that hold node ids, and those that have a row per id.

    Args:
        values: The attributes by name.
        level: What their rows are otherwise.
        space: The nodes.
        said: What the caller says of attributes.

    Returns:
        The names of all these attributes, and the lists.

    Raises:
        ValueError: When it can't be told whether one holds node ids, or they can't be split.
    """
    found: _Found = {}
    for name, value in values.items():
        if name in ("edge_index", "num_nodes", *RESERVED) or value is None:
            continue
        if isinstance(value, Mapping):
            found |= _of_dict(name, value, space, said.get(name))
        elif kind := kind_of(name, value, level(name, value), space, said.get(name)):
            found[name, None] = kind, value
    taken = {name for name, _ in found}
    columns = _aligned(values, level, found)
    whole = []
    for (name, key), (kind, value) in found.items():
        if f"{name}{PLACE}" in values:
            raise ValueError(f"'{name}{PLACE}' is the name of the places of '{name}'; rename it")
        ids = torch.as_tensor(integers(value))
        attribute = replace(encode(name, value, "row").attribute, dim=ids.dim() - 1)
        rows = columns[name] if key is None else {}
        described = {n: column.attribute for n, column in rows.items()}
        whole.append(WholeList(NodeList(name, kind, attribute, described, key), ids, rows))
        taken |= set(rows)
    return taken, whole


_Found = dict[tuple[str, str | None], tuple[str, Any]]
"""Kind and value of each list, by its name and the key in the dict of that name."""


def _of_dict(name: str, value: Mapping[Any, Any], space: Space, said: bool | None) -> _Found:
    """The lists of a dict such as OGB's ``split_idx``."""
    arrays = [item for item in value.values() if isinstance(item, Tensor) or hasattr(item, "dtype")]
    if said is False or not arrays:
        return {}
    if said is None and not is_named(name):
        if len(arrays) == len(value) and all(integers(item) is not None for item in arrays):
            raise ValueError(
                f"The dict '{name}' of integer tensors can't be stored, unless it holds node ids: "
                f"say write_partitions(..., node_ids=['{name}']), or delete it"
            )
        return {}
    if not all(isinstance(key, str) for key in value):
        raise ValueError(f"Expected the dict '{name}' to have strings for keys (got {list(value)})")
    return {
        (name, key): (kind_of(name, item, "graph", space, True), item)
        for key, item in value.items()
    }


def _aligned(
    values: Mapping[str, Any],
    level: Callable[[str, Any], str],
    found: _Found,
) -> dict[str, dict[str, Column]]:
    """The attributes with a row per entry of a list, by list."""
    counts = {
        name: (kind, rows_of("index", value))
        for (name, key), (kind, value) in found.items()
        if key is None
    }
    columns: dict[str, dict[str, Column]] = {name: {} for name in counts}
    for name, value in values.items():
        if not counts or name in counts or value is None or isinstance(value, str | Mapping):
            continue
        if name in ("edge_index", "num_nodes", *RESERVED):
            continue
        if best := list_of(name, rows_of(name, value), level(name, value), counts):
            columns[best][name] = encode(name, value, "row")
    return columns


def without_lists(
    data: Data, num_nodes: int, said: Mapping[str, bool]
) -> tuple[Data, list[WholeList]]:
    """A graph's lists of node ids, and the graph without them; ``said`` as of ``take_lists``."""
    data = copy.copy(data)  # Drops PyG's cache of levels, which may be stale.
    data.num_nodes, num_edges = num_nodes, data.num_edges

    def level(name: str, value: Any) -> str:
        found = level_of(data, name, value, num_nodes, num_edges)
        return (
            "graph of the batch" if found == "graph" and rows_of(name, value) == graphs else found
        )

    batch = integers(data.get("batch"))
    graphs = int(batch.max()) + 1 if batch is not None and batch.numel() else -2
    space = Space("the graph", num_nodes, num_nodes)
    taken, lists = take_lists(data.to_dict(), level, space, said)
    for name in taken:
        del data[name]
    return data, lists


def restricted(data: Data, lists: Sequence[WholeList], kept: Tensor, num_nodes: int) -> Data:
    """``data``, the subgraph of the nodes ``kept`` (ids ``[n]``), with what is left of the lists.

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
        """The tensors of part ``p``, by their names in its file."""
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


def may_hold_ids(name: str, tensors: PartTensors, attribute: Attribute, space: Space) -> bool:
    """Whether an attribute of a part would be split, or refused, when it is written today."""
    try:
        value = tensors[tensor_names(name, attribute)[""]]
        return kind_of(name, value, attribute.level, space, None) != ""
    except ValueError:
        return True


# Reading #####################################################################


def list_tensors(tensors: PartTensors, number: int) -> PartTensors:
    """The tensors of one list, by their own names."""
    start = f"list.{number}:"
    return {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}


def decode_list(info: NodeList, ids: Tensor) -> Any:
    """Ids in the form and dtype in which the list was given."""
    dtype = getattr(torch, info.attribute.dtype)
    return decode(info.attribute, {"": ids.to(dtype)})


def decode_rows(info: NodeList, tensors: PartTensors) -> dict[str, Any]:
    """The attributes with a row per entry, of the rows in ``tensors``."""
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
