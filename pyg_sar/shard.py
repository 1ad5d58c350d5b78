"""Edges bucketed by the unit that their source comes in, sorted by target: once per structure."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_sar.halo import HaloPlan
from pyg_sar.index_space import DistEdgeIndex
from pyg_sar.ops import sort_edges


def _narrow(index: Tensor, bound: int) -> Tensor:
    """32-bit indices where they fit: structures are kept, features come and go."""
    return index.int() if bound < 2**31 else index


@dataclass(frozen=True, slots=True)
class Tile:
    """A run of a shard's edges whose messages are materialized together.

    Attributes:
        unit: What it is a piece of: the shard of that unit, or a chunk's number.
        edges: The run in shard order.
        targets: Local ids of the targets that occur, ascending, ``[U]``.
        index: Position of each edge's target in ``targets``, ``[E_tile]``, ascending.
        source: Row of each edge's source in the unit's buffer, ``[E_tile]``.
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
    r"""The edges of one worker as shards.

    Shard 0 holds those from its own nodes, shard u those from the owners of unit u
    (:meth:`HaloPlan.units`).

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
        number = len(plan.units())
        source, unit = self._place(source)
        counts = torch.bincount(unit, minlength=number)
        self._offsets: list[int] = [0, *counts.cumsum(0).tolist()]
        # By target, and a target's edges by source: rows that are near are read one after another.
        order = sort_edges(source, max(u.num_rows for u in plan.units()))[0]
        wide = num_targets * number >= 2**31
        key = (unit.long() if wide else unit).mul_(num_targets).add_(target)
        del unit, target
        order, starts = sort_edges(key, num_targets * number, order)
        del key
        in_order = bool((order[1:] > order[:-1]).all())
        self._columns = None if in_order else order
        narrow = max(plan.num_ids, self.num_edges) < 2**31
        index = torch.int32 if narrow else torch.int64
        if not in_order:
            source = source[order]
        del order
        source = source.to(index)
        starts = starts.to(index)
        self._segments = [
            _grouped(source[self.edges(q)], starts[q * num_targets : (q + 1) * num_targets + 1])
            for q in range(number)
        ]
        self._transposed: dict[int, Segments] = {}

    def _place(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Each source's row in the buffer of its unit, and the unit (32 bits)."""
        plan = self.plan
        if plan.world_size == 1:
            return _narrow(source, plan.num_ids), torch.zeros_like(source, dtype=torch.int32)
        ends = torch.tensor(plan.halo_offsets, device=source.device) + plan.num_local
        owner = torch.bucketize(source, ends[1:], right=True, out_int32=True)
        owner[source < plan.num_local] = plan.rank
        units, places = (torch.tensor(t, device=source.device) for t in plan.places())
        moves = ends[:-1] - places
        moves[plan.rank] = 0
        rows = _narrow(source, plan.num_ids) - _narrow(moves, plan.num_ids)[owner]
        return rows, units.int()[owner]

    def edges(self, unit: int) -> slice:
        """The shard's edges in shard order."""
        return slice(self._offsets[unit], self._offsets[unit + 1])

    def tiles(self, unit: int, max_edges: int) -> list[slice]:
        """Cuts a shard into runs of at most ``max_edges`` edges."""
        shard = self.edges(unit)
        return [
            slice(start, min(start + max_edges, shard.stop))
            for start in range(shard.start, shard.stop, max(max_edges, 1))
        ]

    def columns(self, unit: int) -> Tensor | slice:
        """Column in ``edge_index`` of each of the shard's edges, in shard order."""
        edges = self.edges(unit)
        return edges if self._columns is None else self._columns[edges]

    def tile(self, unit: int, edges: slice) -> Tile:
        """The index tensors of a run of edges (64-bit, made for its turn)."""
        columns = edges if self._columns is None else self._columns[edges].long()
        shard, begin = self._segments[unit], self._offsets[unit]
        start, stop = edges.start - begin, edges.stop - begin
        first, last = _holding(shard.offsets, start, stop)
        counts = shard.offsets[first : last + 1].clamp(start, stop).diff()
        place = torch.arange(last - first, device=counts.device)
        targets = place + first if shard.targets is None else shard.targets[first:last]
        index = place.repeat_interleave(counts)
        return Tile(unit, edges, targets, index, shard.source[start:stop].long(), columns)

    def segments(self, unit: int) -> Segments:
        """The shard by target: local ids add up rows of the unit's buffer."""
        return self._segments[unit]

    def transposed(self, unit: int) -> Segments:
        """The shard by source: rows of the unit's buffer add up local ids. Made on first use."""
        if unit not in self._transposed:
            shard = self._segments[unit]
            order, offsets = sort_edges(shard.source, self.plan.units()[unit].num_rows)
            place = torch.arange(shard.offsets.numel() - 1, device=order.device)
            target = place if shard.targets is None else shard.targets
            index = shard.source.dtype
            target = target.to(index).repeat_interleave(shard.offsets.diff())[order]
            self._transposed[unit] = _grouped(target, offsets.to(index), order.to(index))
        return self._transposed[unit]


def shards_of(edge_index: DistEdgeIndex) -> Shards:
    """The shards of ``edge_index``, made on first use and kept with it."""
    shards: Shards = edge_index.remember("shards", lambda: Shards(edge_index))
    return shards
