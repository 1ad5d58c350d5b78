"""Which part owns which node of a heterogeneous graph, and how good that is for each relation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_sar.partition.partitioners import (
    Layout,
    PartitionStatistics,
    assign_nodes,
    check_assignment,
    check_num_parts,
    format_statistics,
    whole_number,
)

EdgeType = tuple[str, str, str]
Assignment = Mapping[str, Tensor | np.ndarray[Any, Any]]


def assign_node_types(
    edges: Mapping[EdgeType, Tensor],
    num_nodes: Mapping[str, int],
    num_parts: int,
    method: str | Assignment = "balanced",
    seed: int = 0,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Tensor]:
    """Assigns every node of every type to one of ``num_parts`` parts.

    Args:
        edges: Edges (source, target) of each relation, ``[2, E]``.
        num_nodes: Nodes of each type.
        num_parts: The number of parts.
        method: ``'balanced'`` and ``'metis'``: nodes and edges of all types together, as of
            :func:`~pyg_sar.partition.partitioners.assign_nodes`. ``'random'`` and
            ``'contiguous'``: each type by itself, so that its node counts differ by at most one.
            Or the assignment itself: an integer vector for each node type.
        seed: Seed of all but ``'contiguous'``.
        report: Called with a line of text before each stage that may take long.

    Returns:
        The part of each node by type, int64, ``[N_t]``.

    Raises:
        ValueError: When an argument is out of range or a vector is no assignment.
        TypeError: When ``method`` is neither a name nor a mapping of vectors.

    See Also:
        :func:`~pyg_sar.partition.partitioners.assign_nodes`.
    """
    check_num_parts(num_parts)
    if isinstance(method, Mapping):
        return _given(method, num_nodes, num_parts)
    if not isinstance(method, str):
        raise TypeError(
            "Expected 'method' to be a name or a dict {node type: vector} for a HeteroData (got "
            f"{type(method).__name__})"
        )
    nothing = torch.empty(2, 0, dtype=torch.long)
    if method not in ("balanced", "metis"):
        return {
            name: assign_nodes(nothing, count, num_parts, method, (seed + k) % 2**31)
            for k, (name, count) in enumerate(num_nodes.items())
        }
    starts, total = {}, 0
    for name, count in num_nodes.items():
        starts[name], total = total, total + count
    joint = [
        rows + torch.tensor([[starts[source]], [starts[target]]])
        for (source, _, target), rows in edges.items()
    ]
    part = assign_nodes(torch.cat([nothing, *joint], dim=1), total, num_parts, method, seed, report)
    return dict(zip(num_nodes, part.split(list(num_nodes.values())), strict=True))


def _given(method: Assignment, num_nodes: Mapping[str, int], num_parts: int) -> dict[str, Tensor]:
    if set(method) != set(num_nodes):
        missing, unknown = (
            sorted(set(num_nodes) - set(method)),
            sorted(set(method) - set(num_nodes)),
        )
        raise ValueError(
            f"Expected 'method' to hold a vector for each of the node types {sorted(num_nodes)} "
            f"(missing: {missing}, unknown: {unknown})"
        )
    found = {}
    for name, count in num_nodes.items():
        try:
            found[name] = check_assignment(method[name], count, num_parts)
        except (TypeError, ValueError) as error:
            raise type(error)(f"method['{name}']: {error}") from error
    return found


@dataclass(frozen=True, kw_only=True)
class TypeStatistics:
    """Nodes of one type per part, and its training nodes if it has a ``train_mask``."""

    name: str
    nodes: list[int]
    training_nodes: list[int] | None = None


@dataclass(frozen=True, kw_only=True)
class RelationStatistics:
    """Edges of one relation per part, the halo rows that they need, and how many are cut."""

    edge_type: list[str]
    edge_cut: int
    edges: list[int]
    halo: list[int]


@dataclass(frozen=True, kw_only=True)
class HeteroPartitionStatistics(PartitionStatistics):
    """How good a partition of a heterogeneous graph is: sums over types and relations, and each.

    A node that several relations need is a halo row of each: each fetches it for itself.

    Attributes:
        types: Per node type.
        relations: Per relation.
    """

    types: list[TypeStatistics] = field(default_factory=list)
    relations: list[RelationStatistics] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values that JSON can hold."""
        return {
            **super().as_dict(),
            "types": [asdict(row) for row in self.types],
            "relations": [asdict(row) for row in self.relations],
        }

    def __str__(self) -> str:
        lines = [format_statistics(self), f"{'nodes':>12}  {'max/mean':>9}  node type"]
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
    parts: Mapping[str, Tensor],
    layouts: Mapping[EdgeType, Layout],
    train_masks: Mapping[str, Tensor],
    num_parts: int,
) -> HeteroPartitionStatistics:
    """Measures a partition.

    Args:
        parts: Part of each node by type.
        layouts: The relations' layouts.
        train_masks: bool ``[N_t]`` or ``[N_t, k]`` of the types that have one.
        num_parts: The number of parts.
    """

    def count(values: Tensor) -> list[int]:
        found: list[int] = torch.bincount(values, minlength=num_parts).tolist()
        return found

    def training(name: str) -> list[int] | None:
        mask = train_masks.get(name)
        if mask is None:
            return None
        return count(parts[name][mask if mask.dim() == 1 else mask[:, 0]])

    types = [
        TypeStatistics(name=name, nodes=count(part), training_nodes=training(name))
        for name, part in parts.items()
    ]
    relations = [
        RelationStatistics(
            edge_type=list(edge_type),
            edge_cut=layout.edge_cut,
            edges=layout.edge_offsets.diff().tolist(),
            halo=[halo.numel() for halo in layout.halos],
        )
        for edge_type, layout in layouts.items()
    ]
    known = [row.training_nodes for row in types if row.training_nodes is not None]
    edges = _sum([row.edges for row in relations], num_parts)
    nodes = _sum([row.nodes for row in types], num_parts)
    return HeteroPartitionStatistics(
        num_parts=num_parts,
        num_nodes=sum(nodes),
        num_edges=sum(edges),
        edge_cut=sum(row.edge_cut for row in relations),
        nodes=nodes,
        edges=edges,
        halo=_sum([row.halo for row in relations], num_parts),
        training_nodes=_sum(known, num_parts) if known else None,
        types=types,
        relations=relations,
    )


def _sum(rows: list[list[int]], num_parts: int) -> list[int]:
    return [sum(row[p] for row in rows) for p in range(num_parts)]


def count_nodes(name: str, store: Any) -> int:
    """The nodes of a type, from its store.

    Raises:
        ValueError: When the store does not tell.
    """
    x = store.get("x")
    if "num_nodes" not in store and x is not None and hasattr(x, "size"):
        return int(x.size(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = store.num_nodes if store.can_infer_num_nodes else None
    if found is None:
        raise ValueError(
            f"'data' does not tell how many '{name}' nodes it has; set data['{name}'].num_nodes"
        )
    return whole_number(f"data['{name}'].num_nodes", found)
