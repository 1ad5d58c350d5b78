"""A small graph with the shape of a partition: what :func:`pyg_sar.plan` tries a model on.

[Note: scaled shapes] What a worker holds is a sum of tensors with a row per own node, per halo row,
per edge, or of a fixed size. Where all of these counts of all parts are divided by the same number,
the same operations run in the same order on rows that are fewer in the same proportion. So bytes at
the peak are a line over this proportion, which two sizes determine; and so are bytes sent.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_sar.partition.assignment import assign_nodes
from pyg_sar.partition.attributes import decode, select_rows, tensor_names
from pyg_sar.partition.metadata import PartitionMetadata, read_metadata
from pyg_sar.partition.schema import PartTensors
from pyg_sar.partition.storage import read_part, write_partitions

MOST_PARTS = 8
"""Parts of a published partition that are tried, if they have its halo rows."""
MOST_IN_TURN = 4
"""Parts that are tried in mode 1, where a worker has the rows of one other part at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartShape:
    """Counts of a part: own nodes; halo rows, and edges into own nodes, by the owner of their
    sources; own nodes that others need; edges from a node to itself, which some layers replace.
    """

    nodes: int
    halo: list[int]
    edges: list[int]
    boundary: int
    loops: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedPartition:
    r"""A partition of which a few numbers are known; its parts are taken to be equal.

    In mode 1 a worker has one other part's rows at a time: :data:`MOST_IN_TURN` parts are tried, of
    which each pair has the halo rows that all pairs have, :math:`H / (P (P - 1))`. In modes 2 and 3
    it has all others' at once, so that each part has :math:`H / P`: :data:`MOST_PARTS` parts are
    tried, or more where a part has more halo rows than the others have nodes.

    Attributes:
        parts: Parts :math:`P`, at least 2.
        nodes: Nodes of the graph.
        edges: Columns of its ``edge_index``.
        halo: Halo rows :math:`H` of all parts.
        cut: Edges between parts.
        features: Columns of ``x``.
        classes: Classes of ``y``.
        like: The graph, if it is here: samples then have the first rows of its attributes.

    Raises:
        ValueError: Numbers that no partition has.
    """

    parts: int
    nodes: int
    edges: int
    halo: int
    cut: int
    features: int
    classes: int
    like: Data | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        most = min(self.cut, self.nodes * (self.parts - 1))
        for name, least, largest in (
            ("parts", 2, self.nodes),
            ("features", 1, None),
            ("classes", 1, None),
            ("cut", 0, self.edges),
            ("halo", 0, most),
        ):
            value = getattr(self, name)
            if value < least or (largest is not None and value > largest):
                bound = "" if largest is None else f" and at most {largest}"
                raise ValueError(
                    f"Expected '{name}' of a published partition to be at least {least}{bound} "
                    f"(got {value})"
                )

    def tried(self, mode: int) -> int:
        """Returns the number of parts of its samples."""
        most = max(MOST_PARTS, math.ceil(self.halo / self.nodes) + 1)
        return min(self.parts, MOST_IN_TURN if mode == 1 else most)

    def shapes(self, mode: int) -> list[PartShape]:
        """Returns the parts that are tried for a mode."""
        tried = self.tried(mode)
        nodes, edges = self.nodes // self.parts, self.edges // self.parts
        others = self.parts - 1 if mode == 1 else tried - 1
        halo, cut = (round(count / self.parts / others) for count in (self.halo, self.cut))
        return [
            PartShape(
                nodes=nodes,
                halo=[0 if q == p else halo for q in range(tried)],
                edges=[edges - (tried - 1) * cut if q == p else cut
                       for q in range(tried)],
                boundary=nodes,
                loops=0,
            )
            for p in range(tried)
        ]  # fmt: skip

    def attributes(self, nodes: int, edges: int) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Returns attributes of some nodes and edges, and the level of each."""
        if self.like is None:
            draw = torch.Generator().manual_seed(0)
            x = torch.randn(nodes, self.features, generator=draw)
            return {"x": x, "y": torch.arange(nodes) % self.classes}, {}
        found, levels = {}, {}
        for name, value in self.like.items():
            on_node = self.like.is_node_attr(name)
            dense = isinstance(value, Tensor) and value.layout == torch.strided
            if name != "edge_index" and dense and (on_node or self.like.is_edge_attr(name)):
                first = torch.arange(nodes if on_node else edges) % len(value)
                found[name], levels[name] = value[first], "node" if on_node else "edge"
        return found, levels


def estimated_partitions(data: Data, most: int) -> list[PublishedPartition]:
    """Returns what partitions of a graph into 2, 4, 8, ..., ``most`` parts will have, about.

    The graph is divided into the largest number of them, quickly (``'coarsened'``); the others are
    unions of these parts. The counts are those of the largest part, in each.
    """
    nodes = int(data.num_nodes or 0)
    edge_index = data.edge_index
    if nodes < 2 or edge_index is None or not edge_index.numel():
        raise ValueError("'data' has less than two nodes, or no edges: there is nothing to plan")
    while most > nodes:
        most //= 2
    owner = assign_nodes(edge_index, nodes, most, "coarsened")
    reads, edges = (edge_index[0] * most + owner[edge_index[1]]).unique(return_counts=True)
    found = []
    while most >= 2:
        source, target = reads // most, reads % most
        cut = owner[source] != target
        counts = [
            torch.bincount(parts, many, minlength=most).max() * most
            for parts, many in (
                (owner, None),
                (target, edges),
                (target[cut], None),
                (target[cut], edges[cut]),
            )
        ]
        numbers = dict(zip(("nodes", "edges", "halo", "cut"), map(int, counts), strict=True))
        found.append(PublishedPartition(parts=most, features=1, classes=1, like=data, **numbers))
        reads, same = (reads // 2).unique(return_inverse=True)
        edges = torch.zeros_like(reads).index_add_(0, same, edges)
        most, owner = most // 2, owner // 2
    return found[::-1]


def read_shapes(root: str | os.PathLike[str]) -> list[PartShape]:
    """Reads the counts of all parts, one part's edges at a time; refuses heterogeneous graphs."""
    metadata = read_metadata(root)
    if metadata.hetero:
        raise ValueError(f"'{root}' holds a heterogeneous graph, which plan() can't predict yet")
    return [
        _shape_of(read_part(root, p, verify=False, metadata=metadata), p)
        for p in range(metadata.num_parts)
    ]


def _shape_of(tensors: PartTensors, part: int) -> PartShape:
    halo, nodes = tensors["halo_counts"], tensors["n_id"].numel()
    source, target = tensors["edge_index"]
    owner = torch.bucketize(source, nodes + halo.cumsum(0), right=True)
    owner[source < nodes] = part
    return PartShape(
        nodes=nodes,
        halo=halo.tolist(),
        edges=torch.bincount(owner, minlength=halo.numel()).tolist(),
        boundary=tensors["send_index"].unique().numel(),
        loops=int((source == target).sum()),
    )


def write_sample(
    root: str | PublishedPartition, shapes: Sequence[PartShape], share: float, out: Path
) -> None:
    """Writes a partition whose counts are those of ``shapes`` times ``share``, edges at random.

    Nodes and edges have rows of the attributes of one part.
    """
    draw = torch.Generator().manual_seed(0)
    nodes = [_scaled(shape.nodes, share) for shape in shapes]
    starts = [sum(nodes[:p]) for p in range(len(shapes))]
    boundary = [
        torch.randperm(n, generator=draw)[: _scaled(shape.boundary, share)] + start
        for shape, n, start in zip(shapes, nodes, starts, strict=True)
    ]
    pieces = []
    for p, shape in enumerate(shapes):
        for q, edges in enumerate(shape.edges):
            pool = boundary[q] if q != p else torch.arange(nodes[q]) + starts[q]
            rows = min(_scaled(shape.halo[q], share), pool.numel()) if q != p else pool.numel()
            count = max(_scaled(edges, share), rows if q != p else 0) if edges else 0
            chosen = pool[torch.randperm(pool.numel(), generator=draw)[:rows]]
            source = chosen[torch.randint(max(rows, 1), (count,), generator=draw)]
            if q != p:
                source[:rows] = chosen  # Each halo row is needed.
            target = torch.randint(max(nodes[p], 1), (count,), generator=draw) + starts[p]
            if q == p:
                loops = min(_scaled(shape.loops, share), count)
                other = (target - starts[p] + (target == source).long()) % max(nodes[p], 1)
                target = torch.cat([source[:loops], other[loops:] + starts[p]])
            pieces.append(torch.stack([source, target]))
    data = Data(edge_index=torch.cat(pieces, 1), num_nodes=sum(nodes))
    if isinstance(root, PublishedPartition):
        attributes, levels = root.attributes(data.num_nodes, data.num_edges)
    else:
        metadata = read_metadata(root)
        attributes = _attributes(metadata, data.num_nodes, data.num_edges)
        levels = {name: metadata.attributes[name].level for name in attributes}
    for name, value in attributes.items():
        data[name] = value
    owner = torch.repeat_interleave(torch.tensor(nodes))
    none = dict.fromkeys(data.to_dict(), False)
    write_partitions(data, len(shapes), out, owner, node_ids=none, levels=levels)


def _scaled(count: int, share: float) -> int:
    return max(round(count * share), 1) if count else 0


def _attributes(metadata: PartitionMetadata, nodes: int, edges: int) -> dict[str, Tensor]:
    """Returns tensors with a row per node or edge: rows of the part that has most edges."""
    sizes = [(info.num_edges, info.num_nodes) for info in metadata.parts]
    p = sizes.index(max(sizes))
    part, found = read_part(metadata.root, p, verify=False, metadata=metadata), {}
    rows = {"node": (nodes, sizes[p][1]), "edge": (edges, sizes[p][0])}
    for name, of in metadata.attributes.items():
        if of.level == "graph":
            continue
        count, there = rows[of.level]
        tensors = {suffix: part[full] for suffix, full in tensor_names(name, of).items()}
        chosen = select_rows(of, tensors, torch.arange(count) % max(there, 1))
        form = "tensor" if of.layout == "dense" else of.form
        found[name] = decode(replace(of, form=form), chosen)
    return found
