"""The part of each node (balanced, METIS, random, contiguous, given), and how good that is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_sar.partition.balance import balanced_assignment, metis, undirected_csr

METHODS: tuple[str, ...] = ("balanced", "metis", "random", "contiguous")


def assign_nodes(
    edge_index: Tensor,
    num_nodes: int,
    num_parts: int,
    method: str | Tensor | np.ndarray[Any, Any] = "balanced",
    seed: int = 0,
    report: Callable[[str], None] = lambda line: None,
) -> Tensor:
    r"""Assigns every node to one of ``num_parts`` parts.

    A part without nodes is legal: METIS leaves some empty when there are many parts, and more
    parts than nodes can't all be filled.

    Args:
        edge_index: Edges (source, target), shape ``[2, num_edges]``. ``'balanced'`` and
            ``'metis'`` look at them.
        num_nodes: The number of nodes :math:`N`.
        num_parts: The number of parts :math:`P \geq 1`.
        method: ``'balanced'``: few halo rows, with at most 1.1 times the mean of nodes and of
            edges in each part; an edge is in the part of its target. Where METIS, asked for this,
            has more halo rows than ``'random'``, improves that one. Warns of a limit that can't be
            kept, as when one node has most edges, in graphs with 1,000 nodes and edges per part
            or more. ``'metis'``: few cut edges, parts of nearly equal node counts; where degrees
            are skewed one of them can have most edges. ``'random'``:
            node counts that differ by at most one, drawn from ``seed``. ``'contiguous'``: part
            :math:`\lfloor i P / N \rfloor` for node :math:`i`. Or the assignment itself, an
            integer vector of shape ``[num_nodes]``.
        seed: Seed of all but ``'contiguous'``. The same seed gives the same assignment.
        report: Called with a line of text before each stage that may take long.

    Returns:
        The part of each node, int64, shape ``[num_nodes]``.

    Raises:
        ValueError: When an argument is out of range, or the vector is not an assignment.
        TypeError: When ``num_parts`` or ``seed`` is not an integer.

    Source: Karypis and Kumar, "A Fast and High Quality Multilevel Scheme for Partitioning
    Irregular Graphs", SIAM J. Sci. Comput. 1998, and "Multilevel Algorithms for Multi-Constraint
    Graph Partitioning", SC 1998 (through ``pymetis``).
    """
    check_num_parts(num_parts)
    check_seed(seed)
    if not isinstance(method, str):
        return check_assignment(method, num_nodes, num_parts)
    if method not in METHODS:
        raise ValueError(
            f"Expected 'method' to be one of {', '.join(map(repr, METHODS))} or an integer vector "
            f"of shape [{num_nodes}] (got {method!r})"
        )
    blocks = torch.arange(num_nodes) * num_parts // max(num_nodes, 1)
    if method == "contiguous" or num_parts == 1:
        return blocks
    generator = torch.Generator().manual_seed(seed)
    if method == "random":
        return blocks[torch.randperm(num_nodes, generator=generator)]
    if num_parts >= num_nodes:
        return blocks
    if method == "metis":
        return metis(undirected_csr(edge_index, num_nodes), num_parts, seed)
    if edge_index.numel() == 0:
        return blocks
    random = blocks[torch.randperm(num_nodes, generator=generator)]
    return balanced_assignment(edge_index, num_nodes, random, num_parts, seed, report)


def check_num_parts(num_parts: int) -> None:
    """Raises unless ``num_parts`` is an integer >= 1."""
    if isinstance(num_parts, bool) or not isinstance(num_parts, int):
        raise TypeError(f"Expected 'num_parts' to be an integer (got {num_parts!r})")
    if num_parts < 1:
        raise ValueError(f"Expected 'num_parts' to be at least 1 (got {num_parts})")


def whole_number(name: str, value: Any) -> int:
    """A number of nodes: an integer, also of NumPy or a tensor with one.

    Raises:
        ValueError: When it is another number, or negative.
    """
    single = isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1)
    plain = value.item() if single else value
    if isinstance(plain, bool) or not isinstance(plain, int) or plain < 0:
        raise ValueError(f"Expected '{name}' to be an integer of at least 0 (got {value!r})")
    return plain


def check_seed(seed: int) -> None:
    """Raises unless ``seed`` is an integer that every generator here takes."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"Expected 'seed' to be an integer (got {seed!r})")
    if not 0 <= seed < 2**31:
        raise ValueError(f"Expected 'seed' to be in 0 .. 2**31 - 1 (got {seed})")


def check_assignment(
    vector: Tensor | np.ndarray[Any, Any], num_nodes: int, num_parts: int
) -> Tensor:
    """Checks a given assignment vector and returns it as int64 on the CPU."""
    if not isinstance(vector, (Tensor, np.ndarray)):
        raise TypeError(
            "Expected 'method' to be a name, a tensor or a NumPy array "
            f"(got {type(vector).__name__}); pass torch.tensor(assignment)"
        )
    part = torch.as_tensor(vector).detach().cpu()
    if part.dtype == torch.bool or part.is_floating_point() or part.is_complex():
        raise ValueError(
            f"Expected the assignment to hold integers (got dtype {part.dtype}); "
            "convert it with .long()"
        )
    if tuple(part.shape) != (num_nodes,):
        raise ValueError(
            f"Expected an assignment of shape [{num_nodes}], one part per node "
            f"(got shape {list(part.shape)})"
        )
    part = part.long()
    wrong = ((part < 0) | (part >= num_parts)).nonzero().view(-1)
    if wrong.numel() > 0:
        node = int(wrong[0])
        raise ValueError(
            f"Expected the assignment to hold parts 0 to {num_parts - 1} (got {int(part[node])} "
            f"at node {node}, {wrong.numel()} nodes in all); correct it or set "
            f"num_parts={max(int(part.max()) + 1, 1)}"
        )
    return part


def offsets_of(counts: Tensor) -> Tensor:
    """``[0, c_0, c_0 + c_1, ...]``: where each group starts, one entry more than ``counts``."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    r"""Nodes and edges grouped by part, and the halo of each part.

    The *rank* of a node is its position when all nodes are sorted by (part, global id): comparing
    ranks compares (owner, global id).

    Attributes:
        part: Part of each node, ``[N]``.
        node_order: Global ids sorted by (part, id), ``[N]``.
        node_offsets: Where each part starts in ``node_order``, ``[P + 1]``.
        node_rank: Inverse of ``node_order``, ``[N]``.
        edge_order: Edge ids sorted by (part of the target, id), ``[E]``.
        edge_offsets: Where each part starts in ``edge_order``, ``[P + 1]``.
        halos: Per part, the ranks of the remote sources of its edges, ascending.
        halo_offsets: Where each owner starts in a part's halo, ``[P, P + 1]``.
        edge_cut: Edges between two parts.
        target_offsets: ``node_offsets`` of the targets' type, the same for nodes of one type.
        target_rank: ``node_rank`` of the targets' type.
    """

    part: Tensor
    node_order: Tensor
    node_offsets: Tensor
    node_rank: Tensor
    edge_order: Tensor
    edge_offsets: Tensor
    halos: list[Tensor]
    halo_offsets: Tensor
    edge_cut: int
    target_offsets: Tensor
    target_rank: Tensor

    @property
    def num_parts(self) -> int:
        """The number of parts."""
        return self.node_offsets.numel() - 1

    def nodes(self, p: int) -> Tensor:
        """Global ids of the nodes of part ``p``, ascending."""
        return self.node_order[self.node_offsets[p] : self.node_offsets[p + 1]]

    def edges(self, p: int) -> Tensor:
        """Ids of the edges whose target is in part ``p``, ascending."""
        return self.edge_order[self.edge_offsets[p] : self.edge_offsets[p + 1]]

    def halo_counts(self, p: int) -> Tensor:
        """Halo rows of part ``p`` per owner, ``[P]``."""
        return self.halo_offsets[p].diff()

    def send_rows(self, p: int, q: int) -> Tensor:
        """Rows of part ``p`` that part ``q`` needs, in the order of ``q``'s halo."""
        start, end = self.halo_offsets[q, p : p + 2].tolist()
        return self.halos[q][start:end] - self.node_offsets[p]


def group_by_part(part: Tensor, num_parts: int) -> tuple[Tensor, Tensor]:
    """Stable sort of positions by part: ``(order, offsets)``."""
    counts = torch.bincount(part, minlength=num_parts)
    values = part.numpy()
    if num_parts <= 2**16:
        values = values.astype(np.uint16)  # NumPy's stable sort is a radix sort for 16 bits.
    order = torch.from_numpy(np.argsort(values, kind="stable"))
    return order, offsets_of(counts)


def rank_nodes(part: Tensor, num_parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """``node_order``, ``node_offsets`` and ``node_rank`` of a :class:`Layout`."""
    order, offsets = group_by_part(part, num_parts)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(part.numel())
    return order, offsets, rank


def make_layout(
    edge_index: Tensor, part: Tensor, num_parts: int, target_part: Tensor | None = None
) -> Layout:
    """Groups nodes and edges by part and finds the halos.

    Args:
        edge_index: Edges (source, target), int64, shape ``[2, num_edges]``.
        part: Part of each node, int64, shape ``[num_nodes]``.
        num_parts: The number of parts.
        target_part: Part of each target node, where targets are of another type than sources.
    """
    num_nodes = part.numel()
    node_order, node_offsets, node_rank = rank_nodes(part, num_parts)
    target_offsets, target_rank = node_offsets, node_rank
    if target_part is not None:
        _, target_offsets, target_rank = rank_nodes(target_part, num_parts)
    target_owner = part if target_part is None else target_part
    edge_order, edge_offsets = group_by_part(target_owner[edge_index[1]], num_parts)
    halos, edge_cut = [], 0
    needed = torch.zeros(num_nodes, dtype=torch.bool)
    for p in range(num_parts):
        source = edge_index[0, edge_order[edge_offsets[p] : edge_offsets[p + 1]]]
        remote = source[part[source] != p]
        edge_cut += remote.numel()
        ranks = node_rank[remote]
        needed[ranks] = True
        halos.append(needed.nonzero().view(-1))
        needed[ranks] = False
    halo_offsets = torch.stack([torch.searchsorted(halo, node_offsets) for halo in halos])
    return Layout(
        part=part,
        node_order=node_order,
        node_offsets=node_offsets,
        node_rank=node_rank,
        edge_order=edge_order,
        edge_offsets=edge_offsets,
        halos=halos,
        halo_offsets=halo_offsets,
        edge_cut=edge_cut,
        target_offsets=target_offsets,
        target_rank=target_rank,
    )


@dataclass(frozen=True, kw_only=True)
class PartitionStatistics:
    r"""How good a partition is.

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
        return {
            name: max(values) * len(values) / sum(values) if sum(values) else 1.0
            for name, values in counts.items()
        }

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values that JSON can hold."""
        return {
            "edge_cut": self.edge_cut,
            "edge_cut_fraction": self.edge_cut_fraction,
            "replication_factor": self.replication_factor,
            "balance": self.balance,
            "nodes": self.nodes,
            "edges": self.edges,
            "halo": self.halo,
            "training_nodes": self.training_nodes,
        }

    def __str__(self) -> str:
        return format_statistics(self)


def partition_statistics(layout: Layout, train_mask: Tensor | None = None) -> PartitionStatistics:
    """Measures a partition.

    Args:
        layout: The partition.
        train_mask: bool ``[N]``, or ``[N, k]``, of which the first split is counted.
    """
    training = None
    if train_mask is not None:
        mask = train_mask if train_mask.dim() == 1 else train_mask[:, 0]
        training = torch.bincount(layout.part[mask], minlength=layout.num_parts).tolist()
    return PartitionStatistics(
        num_parts=layout.num_parts,
        num_nodes=layout.part.numel(),
        num_edges=layout.edge_order.numel(),
        edge_cut=layout.edge_cut,
        nodes=layout.node_offsets.diff().tolist(),
        edges=layout.edge_offsets.diff().tolist(),
        halo=[halo.numel() for halo in layout.halos],
        training_nodes=training,
    )


def format_statistics(statistics: PartitionStatistics, max_rows: int = 16) -> str:
    """A table of the statistics, with one row per part for the first ``max_rows`` parts."""
    s = statistics
    columns: list[tuple[str, list[int]]] = [("nodes", s.nodes), ("edges", s.edges)]
    if s.training_nodes is not None:
        columns.append(("training nodes", s.training_nodes))
    columns.append(("halo rows", s.halo))
    lines = [
        f"{s.num_nodes:,} nodes and {s.num_edges:,} edges in {s.num_parts:,} part(s)",
        f"edge cut            {s.edge_cut:,} edges ({100 * s.edge_cut_fraction:.2f}%)",
        f"replication factor  {s.replication_factor:.3f} (own and halo rows over nodes)",
        table_row("part", [name for name, _ in columns]),
    ]
    for p in range(min(s.num_parts, max_rows)):
        lines.append(table_row(str(p), [f"{values[p]:,}" for _, values in columns]))
    if s.num_parts > max_rows:
        lines.append(table_row("...", [f"({s.num_parts - max_rows} more)"]))
    lines.append(table_row("max/mean", [f"{s.balance[name]:.3f}" for name, _ in columns]))
    return "\n".join(lines)


def table_row(name: str, cells: list[str]) -> str:
    return f"{name:>8}" + "".join(f"  {cell:>14}" for cell in cells)
