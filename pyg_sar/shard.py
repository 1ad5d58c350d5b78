"""Edges bucketed by the owner of their source and sorted by target: made once per structure."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_sar.halo import HaloPlan
from pyg_sar.index_space import DistEdgeIndex
from pyg_sar.ops import sort_edges


@dataclass(frozen=True, slots=True)
class Tile:
    """A run of a shard's edges whose messages are materialized together.

    Attributes:
        unit: What it is a piece of: the shard of that owner, or a chunk's number.
        edges: The run in shard order.
        targets: Local ids of the targets that occur, ascending, ``[U]``.
        index: Position of each edge's target in ``targets``, ``[E_tile]``, ascending.
        source: Row of each edge's source in the owner's buffer, ``[E_tile]``.
        columns: Column of each edge in ``edge_index``, ``[E_tile]``; a slice when sorted already.
    """

    unit: int
    edges: slice
    targets: Tensor
    index: Tensor
    source: Tensor
    columns: Tensor | slice

    @property
    def num_edges(self) -> int:
        """Edges of the tile."""
        return self.edges.stop - self.edges.start

    @property
    def target_rows(self) -> Tensor:
        """Local id of each edge's target, ``[E_tile]``."""
        return self.targets.index_select(0, self.index)


@dataclass(frozen=True, slots=True)
class Segments:
    """A shard's edges as the kernels take them (:mod:`pyg_sar.ops`), grouped by what they add to.

    The integers but ``targets`` are of one dtype: int32 where they fit, else int64.

    Attributes:
        source: The row that each edge reads, ``[E]``; ascending within a target.
        offsets: The first edge of each target, and at last E: ``[U + 1]``.
        targets: The row that is added to, ``[U]``, int64, ascending; ``None``: rows 0 to U - 1.
        edges: Each edge's number in shard order, by which edge-level data are found, ``[E]``;
            ``None``: in order.
    """

    source: Tensor
    offsets: Tensor
    targets: Tensor | None
    edges: Tensor | None


def _grouped(source: Tensor, offsets: Tensor, edges: Tensor | None = None) -> Segments:
    """Segments without empty ones, of the edges from ``offsets[0]`` to ``offsets[-1]``.

    Args:
        source: The rows of these edges.
        offsets: Where each target's edges begin, also of those that have none, ``[N + 1]``.
        edges: The edges' numbers.
    """
    first = offsets[:-1]
    occurs = offsets[1:] > first
    if bool(occurs.all()):
        return Segments(source, offsets - offsets[0], None, edges)
    first = torch.cat([first[occurs], offsets[-1:]])
    return Segments(source, first - offsets[0], occurs.nonzero().view(-1), edges)


def _holding(offsets: Tensor, start: int, stop: int) -> tuple[int, int]:
    """The run of targets that has the run of edges. Reads a few of the numbers."""
    if start == stop:
        return 0, 0
    numbers = range(offsets.numel())

    def at(number: int) -> int:
        return int(offsets[number])

    return bisect_right(numbers, start, key=at) - 1, bisect_right(numbers, stop - 1, key=at)


def empty_tile(device: torch.device) -> Tile:
    """A tile without edges."""
    nothing = torch.empty(0, dtype=torch.long, device=device)
    return Tile(0, slice(0, 0), nothing, nothing, nothing, nothing)


class Shards:
    r"""The edges of one worker as shards: shard q holds the edges from worker q's nodes to here.

    Within a shard edges are sorted by target, so that tiles of it touch few targets.

    Args:
        edge_index: Distributed edges ``[2, E]`` with local targets.

    Attributes:
        in_degree: Edges into each target node, ``[num_targets]``.
    """

    def __init__(self, edge_index: DistEdgeIndex) -> None:
        plan = edge_index.plan
        for ledger in plan.comm.ledgers:
            ledger.count("bucketing")
        self.plan: HaloPlan = plan
        source, target = edge_index.ends()
        self.num_edges = source.numel()
        num_targets = edge_index.num_targets
        self.in_degree = torch.bincount(target, minlength=num_targets)
        offsets = torch.tensor(plan.halo_offsets, device=source.device) + plan.num_local
        owner = torch.bucketize(source, offsets[1:], right=True, out_int32=True)
        owner[source < plan.num_local] = plan.rank
        counts = torch.bincount(owner, minlength=plan.world_size)
        self._offsets: list[int] = [0, *counts.cumsum(0).tolist()]
        # By target, and a target's edges by source: rows that are near are read one after another.
        order = sort_edges(source, plan.num_ids)[0]
        wide = num_targets * plan.world_size >= 2**31
        key = (owner.long() if wide else owner).mul_(num_targets).add_(target)
        del owner, target
        order, starts = sort_edges(key, num_targets * plan.world_size, order)
        del key
        in_order = bool((order[1:] > order[:-1]).all())
        self._columns = None if in_order else order
        first = offsets[:-1].clone()
        first[plan.rank] = 0
        narrow = max(plan.num_ids, self.num_edges) < 2**31
        index = torch.int32 if narrow else torch.int64
        if not in_order:
            source = source[order]
        del order
        source = (source - first.repeat_interleave(counts)).to(index)
        starts = starts.to(index)
        self._segments = [
            _grouped(source[self.edges(q)], starts[q * num_targets : (q + 1) * num_targets + 1])
            for q in range(plan.world_size)
        ]
        self._transposed: dict[int, Segments] = {}

    def edges(self, owner: int) -> slice:
        """The shard's edges in shard order."""
        return slice(self._offsets[owner], self._offsets[owner + 1])

    def tiles(self, owner: int, max_edges: int) -> list[slice]:
        """Cuts a shard into runs of at most ``max_edges`` edges."""
        shard = self.edges(owner)
        return [
            slice(start, min(start + max_edges, shard.stop))
            for start in range(shard.start, shard.stop, max(max_edges, 1))
        ]

    def tile(self, owner: int, edges: slice) -> Tile:
        """The index tensors of a run of edges (64-bit, made for its turn)."""
        columns = edges if self._columns is None else self._columns[edges].long()
        shard, begin = self._segments[owner], self._offsets[owner]
        start, stop = edges.start - begin, edges.stop - begin
        first, last = _holding(shard.offsets, start, stop)
        counts = shard.offsets[first : last + 1].clamp(start, stop).diff()
        place = torch.arange(last - first, device=counts.device)
        targets = place + first if shard.targets is None else shard.targets[first:last]
        index = place.repeat_interleave(counts)
        return Tile(owner, edges, targets, index, shard.source[start:stop].long(), columns)

    def segments(self, owner: int) -> Segments:
        """The shard by target: local ids add up rows of the owner's buffer."""
        return self._segments[owner]

    def transposed(self, owner: int) -> Segments:
        """The shard by source: rows of the owner's buffer add up local ids. Made on first use."""
        if owner not in self._transposed:
            shard, plan = self._segments[owner], self.plan
            count = plan.num_local if owner == plan.rank else plan.halo_counts[owner]
            order, offsets = sort_edges(shard.source, count)
            place = torch.arange(shard.offsets.numel() - 1, device=order.device)
            target = place if shard.targets is None else shard.targets
            index = shard.source.dtype
            target = target.to(index).repeat_interleave(shard.offsets.diff())[order]
            self._transposed[owner] = _grouped(target, offsets.to(index), order.to(index))
        return self._transposed[owner]


def shards_of(edge_index: DistEdgeIndex) -> Shards:
    """The shards of ``edge_index``, made on first use and kept with it."""
    shards: Shards = edge_index.remember("shards", lambda: Shards(edge_index))
    return shards
