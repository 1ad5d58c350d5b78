"""Nodes and edges grouped by part, the halo of each part, and statistics of a partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyg_sar.partition.assignment import EdgeType
from pyg_sar.partition.scratch import GroupedEdges, Scratch, group_by_part
from pyg_sar.wording import Shown, counted


@dataclass(frozen=True, slots=True)
class NodeOrder:
    """The nodes of a type grouped by part.

    The *rank* of a node is its position when all nodes are sorted by (part, global id): comparing
    ranks compares (owner, global id).

    Attributes:
        part: Part of each node, ``[N]``.
        order: Global ids sorted by (part, id), ``[N]``.
        offsets: Where each part starts in ``order``, ``[P + 1]``.
        rank: Inverse of ``order``, ``[N]``.
    """

    part: Tensor
    order: Tensor
    offsets: Tensor
    rank: Tensor

    @classmethod
    def of(cls, part: Tensor, num_parts: int) -> NodeOrder:
        """Groups nodes by their parts, int64 ``[N]``."""
        order, offsets = group_by_part(part, num_parts)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(part.numel())
        return cls(part, order, offsets, rank)

    @property
    def num_parts(self) -> int:
        """The number of parts."""
        return self.offsets.numel() - 1

    @property
    def counts(self) -> Tensor:
        """Nodes of each part, ``[P]``."""
        return self.offsets.diff()

    def ids(self, p: int) -> Tensor:
        """Returns the global ids of the nodes of part ``p``, ascending."""
        return self.order[self.offsets[p] : self.offsets[p + 1]]


class SortedEdges:
    """Edges in memory, sorted by the part of their target (``owner``) and their ids.

    ``counts`` are the edges of each part, ``[P]``.
    """

    def __init__(self, edge_index: Tensor, owner: Tensor, num_parts: int) -> None:
        self._edge_index = edge_index
        self._order, self._offsets = group_by_part(owner[edge_index[1]], num_parts)
        self.counts = self._offsets.diff()

    def _ids(self, p: int) -> Tensor:
        return self._order[self._offsets[p] : self._offsets[p + 1]]

    def part(self, p: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns sources, targets and ids of the edges of part ``p``, ids ascending."""
        ids = self._ids(p)
        source, target = (ends.index_select(0, ids) for ends in self._edge_index)
        return source, target, ids

    def sources(self, p: int) -> Tensor:
        """Returns the sources of the edges of part ``p``."""
        return self._edge_index[0].index_select(0, self._ids(p))


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    r"""Edges grouped by the part of their target, and the halo of each part.

    Attributes:
        sources: The nodes of the sources' type.
        targets: Those of the targets' type; the same object where there is one type.
        edges: The edges of each part, sorted by id; in scratch files, if there are such.
        halos: Per part, the ranks of the remote sources of its edges, ascending.
        halo_offsets: Where each owner starts in a part's halo, ``[P, P + 1]``.
        edge_cut: Edges between two parts.
    """

    sources: NodeOrder
    targets: NodeOrder
    edges: SortedEdges | GroupedEdges
    halos: list[Tensor]
    halo_offsets: Tensor
    edge_cut: int

    @property
    def num_parts(self) -> int:
        """The number of parts."""
        return self.sources.num_parts

    def halo_counts(self, p: int) -> Tensor:
        """Returns the number of halo rows of part ``p`` per owner, ``[P]``."""
        return self.halo_offsets[p].diff()

    def send_counts(self, p: int) -> Tensor:
        """Returns the number of rows of part ``p`` that each part needs, ``[P]``."""
        return self.halo_offsets[:, p + 1] - self.halo_offsets[:, p]

    def send_rows(self, p: int, q: int) -> Tensor:
        """Returns the rows of part ``p`` that part ``q`` needs, in the order of ``q``'s halo."""
        start, end = self.halo_offsets[q, p : p + 2].tolist()
        return self.halos[q][start:end] - self.sources.offsets[p]

    def send_index(self, p: int) -> Tensor:
        """Returns the rows of part ``p`` that others need, by part, int32."""
        return torch.cat([self.send_rows(p, q) for q in range(self.num_parts)]).int()


def group_edges(
    edge_index: Tensor,
    sources: NodeOrder,
    targets: NodeOrder | None = None,
    scratch: Scratch | None = None,
) -> Layout:
    """Groups edges (source, target), int64 ``[2, E]``, by part, and finds the halos.

    By default the targets' type is that of the sources. With ``scratch`` the grouped edges, of any
    integer dtype, and the halos go there. See [Note: bounded memory].
    """
    targets = sources if targets is None else targets
    part, num_parts = sources.part, sources.num_parts
    edges: SortedEdges | GroupedEdges
    if scratch is None:
        edges = SortedEdges(edge_index, targets.part, num_parts)
    else:
        edges = GroupedEdges(scratch, edge_index, targets.part, num_parts)
    halos, edge_cut = [], 0
    needed = torch.zeros(part.numel(), dtype=torch.bool)
    for p in range(num_parts):
        source = edges.sources(p)
        remote = source[part[source] != p]
        edge_cut += remote.numel()
        ranks = sources.rank[remote]
        needed[ranks] = True
        halo = needed.nonzero().view(-1)
        halos.append(halo if scratch is None else scratch.keep(halo))
        needed[ranks] = False
    return Layout(
        sources=sources,
        targets=targets,
        edges=edges,
        halos=halos,
        halo_offsets=torch.stack([torch.searchsorted(halo, sources.offsets) for halo in halos]),
        edge_cut=edge_cut,
    )


@dataclass(frozen=True, kw_only=True)
class PartitionStatistics(Shown):
    r"""Counts that tell how good a partition is.

    Attributes:
        num_parts: Parts :math:`P`.
        num_nodes: Nodes :math:`N`.
        num_edges: Edges (columns of ``edge_index``).
        edge_cut: Edges whose source and target are in different parts.
        nodes: Nodes per part :math:`n_p`.
        edges: Edges per part (those whose target it owns).
        halo: Halo rows per part :math:`H_p`.
        training_nodes: Training nodes per part; ``None`` without ``train_mask``. Of a mask
            ``[N, k]``, those of the first split.
    """

    num_parts: int
    num_nodes: int
    num_edges: int
    edge_cut: int
    nodes: list[int]
    edges: list[int]
    halo: list[int]
    training_nodes: list[int] | None = None

    @property
    def edge_cut_fraction(self) -> float:
        """Cut edges over edges."""
        return self.edge_cut / max(self.num_edges, 1)

    @property
    def replication_factor(self) -> float:
        r""":math:`\sum_p (n_p + H_p) / N`: copies of a node that exist, on average."""
        return (sum(self.nodes) + sum(self.halo)) / max(self.num_nodes, 1)

    @property
    def balance(self) -> dict[str, float]:
        """Maximum over mean, of nodes, edges, halo rows and (if known) training nodes."""
        counts = {"nodes": self.nodes, "edges": self.edges, "halo rows": self.halo}
        if self.training_nodes is not None:
            counts["training nodes"] = self.training_nodes
        return {name: _balance(values) for name, values in counts.items()}

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as plain values that JSON can hold."""
        derived = ("edge_cut_fraction", "replication_factor", "balance")
        return asdict(self) | {name: getattr(self, name) for name in derived}

    def __str__(self) -> str:
        """Returns a table with one row for each of the first parts."""
        columns: list[tuple[str, list[int]]] = [("nodes", self.nodes), ("edges", self.edges)]
        if self.training_nodes is not None:
            columns.append(("training nodes", self.training_nodes))
        columns.append(("halo rows", self.halo))
        cut = f"{counted(self.edge_cut, 'edges')} ({100 * self.edge_cut_fraction:.2f}%)"
        copies = f"{self.replication_factor:.3f} (own and halo rows over nodes)"
        lines = [
            f"{counted(self.num_nodes, 'nodes')} and {counted(self.num_edges, 'edges')} in "
            f"{counted(self.num_parts, 'parts')}",
            f"edge cut            {cut}",
            f"replication factor  {copies}",
            _row("part", [name for name, _ in columns]),
        ]
        for p in range(min(self.num_parts, _SHOWN)):
            lines.append(_row(str(p), [f"{values[p]:,}" for _, values in columns]))
        if self.num_parts > _SHOWN:
            lines.append(_row("...", [f"({self.num_parts - _SHOWN} more)"]))
        lines.append(_row("max/mean", [f"{self.balance[name]:.3f}" for name, _ in columns]))
        return "\n".join(lines)


_SHOWN = 16  # parts


def _row(name: str, cells: list[str]) -> str:
    return f"{name:>8}" + "".join(f"  {cell:>14}" for cell in cells)


def partition_statistics(layout: Layout, train_mask: Tensor | None = None) -> PartitionStatistics:
    """Measures a partition; ``train_mask`` is bool ``[N]``, or ``[N, k]``, of which the first split
    counts.
    """
    row = _type_statistics("", layout.sources, train_mask)
    return PartitionStatistics(**_totals([row], [_relation_statistics([], layout)]))


@dataclass(frozen=True, kw_only=True)
class TypeStatistics(Shown):
    """Nodes of one type per part, and its training nodes if it has a ``train_mask``."""

    name: str
    nodes: list[int]
    training_nodes: list[int] | None = None


@dataclass(frozen=True, kw_only=True)
class RelationStatistics(Shown):
    """Edges of one relation per part, the halo rows that they need, and how many are cut."""

    edge_type: list[str]
    edge_cut: int
    edges: list[int]
    halo: list[int]


@dataclass(frozen=True, kw_only=True)
class HeteroPartitionStatistics(PartitionStatistics):
    """Counts for a partition of a heterogeneous graph: sums over types and relations, and each.

    A node that several relations need is a halo row of each: each fetches it for itself.

    Attributes:
        types: Per node type.
        relations: Per relation.
    """

    types: list[TypeStatistics] = field(default_factory=list)
    relations: list[RelationStatistics] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [super().__str__(), f"{'nodes':>12}  {'max/mean':>9}  node type"]
        for kind in self.types:
            lines.append(f"{sum(kind.nodes):>12,}  {_balance(kind.nodes):>9.3f}  {kind.name}")
        lines.append(f"{'edges':>12}  {'cut':>8}  {'halo rows':>10}  {'max/mean':>9}  relation")
        for row in self.relations:
            share = 100 * row.edge_cut / max(sum(row.edges), 1)
            lines.append(
                f"{sum(row.edges):>12,}  {share:>7.2f}%  {sum(row.halo):>10,}  "
                f"{_balance(row.edges):>9.3f}  {' '.join(row.edge_type)}"
            )
        return "\n".join(lines)


def _balance(values: list[int]) -> float:
    return max(values) * len(values) / sum(values) if sum(values) else 1.0


def hetero_statistics(
    nodes: Mapping[str, NodeOrder],
    layouts: Mapping[EdgeType, Layout],
    train_masks: Mapping[str, Tensor],
) -> HeteroPartitionStatistics:
    """Measures a partition: of nodes and training nodes by type, and the relations' layouts."""
    types = [_type_statistics(name, order, train_masks.get(name)) for name, order in nodes.items()]
    relations = [_relation_statistics([*key], layout) for key, layout in layouts.items()]
    return HeteroPartitionStatistics(**_totals(types, relations), types=types, relations=relations)


def _type_statistics(name: str, nodes: NodeOrder, mask: Tensor | None) -> TypeStatistics:
    training = None
    if mask is not None:
        chosen = nodes.part[mask if mask.dim() == 1 else mask[:, 0]]
        training = torch.bincount(chosen, minlength=nodes.num_parts).tolist()
    return TypeStatistics(name=name, nodes=nodes.counts.tolist(), training_nodes=training)


def _relation_statistics(edge_type: list[str], layout: Layout) -> RelationStatistics:
    return RelationStatistics(
        edge_type=edge_type,
        edge_cut=layout.edge_cut,
        edges=layout.edges.counts.tolist(),
        halo=[halo.numel() for halo in layout.halos],
    )


def _totals(
    types: Sequence[TypeStatistics], relations: Sequence[RelationStatistics]
) -> dict[str, Any]:
    """Returns the fields of :class:`PartitionStatistics`."""
    num_parts = len(types[0].nodes)

    def total(rows: list[list[int]]) -> list[int]:
        return [sum(row[p] for row in rows) for p in range(num_parts)]

    nodes, edges = total([row.nodes for row in types]), total([row.edges for row in relations])
    known = [row.training_nodes for row in types if row.training_nodes is not None]
    return {
        "num_parts": num_parts,
        "num_nodes": sum(nodes),
        "num_edges": sum(edges),
        "edge_cut": sum(row.edge_cut for row in relations),
        "nodes": nodes,
        "edges": edges,
        "halo": total([row.halo for row in relations]),
        "training_nodes": total(known) if known else None,
    }
