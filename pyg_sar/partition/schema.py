"""The partition format, declared once: a graph's stores, and what tensors a part has of each.

[Note: one declaration] :data:`TENSORS` says of each tensor of a part's file its name, dtype, shape,
bounds, order and how it is made. Parts are written (``parts.py``), checked (``part_checks.py``) and
put together again by this table, and docs/partitioning.md has it as a page. So a new tensor is a
row here and the code that reads it; :data:`VERSION` then goes up, and older partitions are refused.

A part's file of a ``Data`` has the tensors of nodes and of edges, and attributes as of
``attributes.py``: ``node.NAME`` and ``edge.NAME`` hold the part's rows, ``graph.NAME`` is whole in
every part. Of a ``HeteroData`` names begin with ``type.T/`` and ``relation.R/``, by the numbers of
node types and relations in the metadata. Tensors of list k of node ids begin with ``list.k:``, its
attributes with a row per entry with ``list.k:row.``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyg_sar.partition.attributes import Attribute, tensor_names
from pyg_sar.partition.node_lists import NodeList
from pyg_sar.wording import counted

FORMAT = "pyg_sar.partition"
VERSION = 6

PartTensors = dict[str, Tensor]
"""Tensors of a part by name."""

KINDS = {
    "node": "nodes",
    "edge": "edges",
    "nodes": "lists",
    "links": "pairs",
}
"""The kinds of rows that are split among parts: nodes, edges, entries of lists of node ids."""

MOST_COVERS = 8
"""Covers of a part: their bits are in one byte."""

SIZES = {
    "n": "its nodes, of the sources' type",
    "m": "its nodes, of the targets' type",
    "h": "halo rows: nodes of other parts that its edges come from",
    "e": "its edges, or entries of a list",
    "s": "rows that other parts need of it, each once for each part",
    "k": "covers",
    "P": "parts",
    "N": "nodes of the whole graph, of the sources' type",
    "E": "edges, or entries of the list, of the whole graph",
}
"""The sizes in shapes and bounds."""


@dataclass(frozen=True, slots=True)
class PartRows:
    """Tensors of one kind in one part, by their own names, with sizes by the letters of
    :data:`SIZES` and the global ids of the part's nodes, of the sources' type; for checks that
    the table adds.
    """

    tensors: PartTensors
    sizes: dict[str, int]
    own: Tensor


@dataclass(frozen=True, slots=True)
class PartTensor:
    """A tensor that every part has for each of its kinds of rows.

    Attributes:
        name: Its name in the file, after the store's and the list's.
        kinds: The kinds of rows, of :data:`KINDS`, that have it.
        shape: Numbers, and letters of :data:`SIZES`.
        content: What it holds, in words.
        make: Returns it, of a ``PartNodes``, ``PartEdges`` or ``PartEntries`` (``parts.py``).
        dtype: Its dtype.
        below: Sums of sizes that its values are below, from 0 on: one for all, or one for each row.
        ascends: Values ascend, without duplicates.
        counted_by: The tensor ``[P]`` with the number of its rows for each other part; values
            ascend in each of these runs.
        once: All parts together hold each number below ``below`` once.
        problem: Returns what else is wrong with it, or ``''``.
    """

    name: str
    kinds: tuple[str, ...]
    shape: tuple[int | str, ...]
    content: str
    make: Callable[[Any], Tensor]
    dtype: torch.dtype = torch.int64
    below: tuple[str, ...] = ()
    ascends: bool = False
    counted_by: str = ""
    once: bool = False
    problem: Callable[[PartRows], str] = lambda rows: ""


def _own_in_halo(rows: PartRows) -> str:
    own, halo = rows.own, rows.tensors["halo_n_id"]
    if not own.numel() or not halo.numel():
        return ""
    place = torch.searchsorted(own, halo).clamp_(max=own.numel() - 1)
    return "it names nodes of the part itself" if bool((own[place] == halo).any()) else ""


def _wrong_costs(rows: PartRows) -> str:
    costs = rows.tensors["cover_costs"]
    good = costs.size(0) <= MOST_COVERS and bool((costs >= 0).all())
    return "" if good else f"it does not hold the costs of 0 to {MOST_COVERS}"


def _other_cut(rows: PartRows) -> str:
    cut = int((rows.tensors["edge_index"][0] >= rows.sizes["n"]).sum())
    covered = int(rows.tensors["cover_edges"])
    return "" if covered == cut else f"there are {counted(cut, 'edges')} from other parts"


_EDGES = ("edge", "links")

# fmt: off
TENSORS: tuple[PartTensor, ...] = (
    PartTensor(
        "n_id", ("node",), ("n",), "global ids of its nodes",
        lambda nodes: nodes.order.ids(nodes.part).clone(),
        below=("N",), ascends=True, once=True,
    ),
    PartTensor(
        "place", ("nodes",), ("e",), "places in the whole list of the entries whose nodes it owns",
        lambda entries: entries.place, below=("E",), ascends=True, once=True,
    ),
    PartTensor(
        "ids", ("nodes",), ("e",), "their nodes, by their own numbers",
        lambda entries: entries.ids, below=("n",),
    ),
    PartTensor(
        "place", ("links",), ("e",), "places in the whole list of the pairs whose targets it owns",
        lambda pairs: pairs.e_id, below=("E",), once=True,
    ),
    PartTensor(
        "halo_n_id", _EDGES, ("h",), "global ids of the sources that other parts own, by owner",
        lambda edges: edges.layout.sources.order[edges.halo],
        below=("N",), counted_by="halo_counts", problem=_own_in_halo,
    ),
    PartTensor(
        "halo_counts", _EDGES, ("P",), "halo rows of each owner",
        lambda edges: edges.layout.halo_counts(edges.part),
    ),
    PartTensor(
        "send_index", _EDGES, ("s",),
        "its rows that other parts need, by part, in the order of that part's halo",
        lambda edges: edges.layout.send_index(edges.part),
        dtype=torch.int32, below=("n",), counted_by="send_counts",
    ),
    PartTensor(
        "send_counts", _EDGES, ("P",), "how many rows each part needs",
        lambda edges: edges.layout.send_counts(edges.part),
    ),
    PartTensor(
        "covers", _EDGES, ("h",), "bit i: the cover at `cover_costs[i]` pulls the row",
        lambda edges: edges.covers.pulled, dtype=torch.uint8,
    ),
    PartTensor(
        "cover_costs", _EDGES, ("k", 2), "what a pulled row and a pushed one cost in each cover",
        lambda edges: torch.tensor(edges.covers.costs, dtype=torch.int32).view(-1, 2),
        dtype=torch.int32, problem=_wrong_costs,
    ),
    PartTensor(
        "cover_edges", _EDGES, (1,), "edges from other parts",
        lambda edges: torch.tensor([edges.covers.num_edges]), problem=_other_cut,
    ),
    PartTensor(
        "edge_index", _EDGES, (2, "e"),
        "edges whose target it owns: sources by their own numbers, then n + place in the halo; "
        "sorted by ((owner of the source - part) mod P, target, source, id)",
        lambda edges: edges.edge_index, below=("n + h", "m"),
    ),
    PartTensor(
        "e_id", ("edge",), ("e",), "global ids of its edges: columns of the whole `edge_index`",
        lambda edges: edges.e_id, below=("E",), once=True,
    ),
)
# fmt: on
"""Every tensor of a part but attributes, in the order of the file."""


def tensors_of(kind: str) -> list[PartTensor]:
    """Returns the tensors of a kind of rows."""
    return [tensor for tensor in TENSORS if kind in tensor.kinds]


def make_tensors(kind: str, rows: Any) -> PartTensors:
    """Returns the tensors of a part's ``PartNodes``, ``PartEdges`` or ``PartEntries``, by name."""
    return {tensor.name: tensor.make(rows) for tensor in tensors_of(kind)}


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of one kind that are split among parts: nodes, edges, or entries of a list.

    Attributes:
        kind: Of :data:`KINDS`.
        prefix: How the names of its tensors begin.
        ends: The node types of sources and targets; ``''`` in a ``Data``.
        total: Rows in the whole graph.
        listed: The list, of entries of one.
    """

    kind: str
    prefix: str
    ends: tuple[str, str]
    total: int
    listed: NodeList | None = None

    @property
    def attributes(self) -> dict[str, Attribute]:
        """The attributes with a row per entry of a list."""
        return {} if self.listed is None else self.listed.rows

    def names(self) -> list[str]:
        """Returns the names of its tensors."""
        return [self.prefix + tensor.name for tensor in tensors_of(self.kind)]

    def ids(self, tensors: PartTensors) -> Tensor:
        """Returns the numbers of a part's rows in the whole graph or list."""
        (name,) = (tensor.name for tensor in tensors_of(self.kind) if tensor.once)
        return tensors[self.prefix + name]


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """A store of the whole graph, as the metadata describes it.

    A ``Data`` is one store, of nodes and edges. A ``HeteroData`` has one of its own, one for each
    node type and one for each relation.

    Attributes:
        key: The node type or relation; ``None``: the graph itself.
        prefix: How the names of its tensors begin.
        totals: Nodes (``'node'``) and edges (``'edge'``) of the whole graph, where it has such.
        attributes: How each attribute is stored.
        values: The values of those that are no tensors.
        lists: Lists of node ids.
    """

    key: Any
    prefix: str
    totals: dict[str, int]
    attributes: dict[str, Attribute]
    values: dict[str, Any]
    lists: list[NodeList] = field(default_factory=list)

    @property
    def ends(self) -> tuple[str, str]:
        """The node types of its sources and targets; ``''`` in a ``Data``."""
        if isinstance(self.key, tuple):
            return self.key[0], self.key[2]
        return self.key or "", self.key or ""

    def level_group(self, level: str) -> RowGroup:
        """Returns its nodes or edges."""
        return RowGroup(level, self.prefix, self.ends, self.totals[level])

    def list_groups(self) -> list[RowGroup]:
        """Returns the lists' entries."""
        return [
            RowGroup(info.kind, f"{self.prefix}list.{k}:", self.ends, info.count, info)
            for k, info in enumerate(self.lists)
        ]

    def groups(self) -> list[RowGroup]:
        """Returns all of its rows that are split among parts: nodes come first."""
        return [*map(self.level_group, self.totals), *self.list_groups()]

    def names(self) -> Iterator[str]:
        """Yields the names of its tensors in a part's file."""
        stored = [(self.prefix, self.attributes)]
        for group in self.groups():
            yield from group.names()
            stored.append((group.prefix, group.attributes))
        for prefix, attributes in stored:
            for name, attribute in attributes.items():
                yield from (prefix + full for full in tensor_names(name, attribute).values())

    def as_dict(self) -> dict[str, Any]:
        """Returns attributes, values and lists as plain values that JSON can hold."""
        return {
            "attributes": {name: asdict(found) for name, found in self.attributes.items()},
            "values": self.values,
            "lists": [asdict(found) for found in self.lists],
        }


def is_hetero(stores: Sequence[StoreInfo]) -> bool:
    """Returns whether these are the stores of a ``HeteroData``."""
    return not stores[0].totals


def without_prefix(tensors: PartTensors, prefix: str) -> PartTensors:
    """Returns the tensors whose names begin so, by the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def global_ids(kind: str, rows: PartTensors, sources: Tensor, targets: Tensor) -> Tensor:
    """Returns a part's edges ``[2, e]``, or the nodes ``[e]`` of a list, by global ids.

    ``sources`` and ``targets`` are those of the part's nodes of these types.
    """
    if kind == "nodes":
        return sources[rows["ids"]]
    source, target = rows["edge_index"]
    return torch.stack([torch.cat([sources, rows["halo_n_id"]])[source], targets[target]])
