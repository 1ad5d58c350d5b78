"""Blocks of edges: bucketed by the unit that their source comes in, sorted by target, kept."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.kernels.ops import sort_edges, transpose
from pyg_sar.space.index_space import DistEdgeIndex

_FEW = 1 << 16
"""Edges whose columns are kept whether or not anything asks for them."""


def narrowed(index: Tensor, bound: int) -> Tensor:
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
        where: :attr:`columns`, or what gives them when they are asked for.
    """

    unit: int
    edges: slice
    targets: Tensor
    index: Tensor
    source: Tensor
    where: Tensor | slice | Callable[[], Tensor | slice]

    @property
    def columns(self) -> Tensor | slice:
        """Column of each edge in ``edge_index``, ``[E_tile]``; a slice when sorted already."""
        return self.where() if callable(self.where) else self.where

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
    """A shard's edges as the kernels take them (:mod:`pyg_sar.kernels.ops`), grouped by what they
    add to.

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


class Block(Protocol):
    """Edges whose rows come, or go, together: a shard, a chunk, or edges between two workers."""

    @property
    def unit(self) -> int:
        """The unit of the exchange that serves it."""

    @property
    def segments(self) -> Segments:
        """The edges by target: each reads a row of the unit, and adds to a target."""

    @property
    def columns(self) -> Tensor | slice:
        """Each edge's column of ``edge_index``, in the order of :attr:`segments`."""

    @property
    def by_source(self) -> Segments | None:
        """The result of :meth:`transposed`, if it has been made."""

    def transposed(self, numbered: bool = False) -> Segments:
        """The edges by source: each reads a target, and adds to a row of the unit.

        Args:
            numbered: Whether ``edges`` is needed, the places in :attr:`segments`; else it may be
                ``None``.
        """

    def tiles(self, max_edges: int) -> Iterator[Tile]:
        """Runs of at most ``max_edges`` edges, whose messages are materialized together."""


def _grouped(source: Tensor, offsets: Tensor, edges: Tensor | None = None) -> Segments:
    """Segments without empty ones, of the edges from ``offsets[0]`` to ``offsets[-1]``.

    ``offsets`` are where each target's edges begin, also of those that have none, ``[N + 1]``.
    """
    first = offsets[:-1]
    occurs = offsets[1:] > first
    if bool(occurs.all()):
        return Segments(source, offsets - offsets[0], None, edges)
    first = torch.cat([first[occurs], offsets[-1:]])
    return Segments(source, first - offsets[0], occurs.nonzero().view(-1), edges)


def segments_of(source: Tensor, target: Tensor, num_rows: int, num_targets: int) -> Segments:
    """Any edges as kernels take them, numbered as they are given: each reads a row, ``[E]`` below
    ``num_rows``, and adds to one below ``num_targets``.
    """
    order, offsets = sort_edges(target, num_targets, sort_edges(source, num_rows)[0])
    narrow = max(num_rows, source.numel()) < 2**31
    index = torch.int32 if narrow else torch.int64
    return _grouped(source[order].to(index), offsets.to(index), order.to(index))


class EdgeRun:
    """A block of edges for the kernels, by target and by source: the other one on first use.

    Args:
        unit: The unit of the exchange that serves it.
        source, target: The rows that each edge reads, and adds to, ``[E]``.
        numbers: The number of each edge in a worker's list of edges, if they will be asked for.
        num_rows, num_targets: Rows that are read, and added to.
        by_source: Which of both is made at once.
    """

    def __init__(
        self,
        unit: int,
        source: Tensor,
        target: Tensor,
        numbers: Tensor | None,
        num_rows: int,
        num_targets: int,
        by_source: bool = False,
    ) -> None:
        self.unit, self._by_source, self._size = unit, by_source, (num_rows, num_targets)
        if by_source:
            source, target, self._size = target, source, (num_targets, num_rows)
        found = segments_of(source, target, *self._size)
        self._numbers = numbers
        if numbers is not None and found.edges is not None:
            self._numbers = numbers[found.edges]
        self._first = replace(found, edges=None)
        self._other: Segments | None = None
        self.by_source = self._first if by_source else None

    @property
    def columns(self) -> Tensor:
        """The number of each edge in the list of edges of its target's worker."""
        if self._numbers is None:
            raise RuntimeError("The edges' numbers were not kept")
        return self._numbers

    @property
    def segments(self) -> Segments:
        """The edges by target."""
        return self._sorted(by_source=False, numbered=True)

    def transposed(self, numbered: bool = False) -> Segments:
        """The edges by source; ``numbered``: with their places in the run."""
        return self._sorted(by_source=True, numbered=numbered)

    def tiles(self, max_edges: int) -> Iterator[Tile]:
        """No message is materialized of these edges."""
        raise NotImplementedError("Edges that a cover has split are for kernels")

    def _sorted(self, by_source: bool, numbered: bool) -> Segments:
        if by_source == self._by_source:
            return self._first
        found = self._other
        if found is None or (numbered and found.edges is None):
            given = self._first
            source, offsets, edges = transpose(
                given.source, given.offsets, given.targets, *self._size, numbered=numbered
            )
            found = self._other = _grouped(source, offsets, edges)
            self.by_source = found if by_source else self.by_source
        return found


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


class Shard:
    """One shard of a :class:`Shards`, a block, whose sources come in a unit.

    It doesn't refer to these: neither must wait for Python's collector of circles.
    """

    def __init__(self, unit: int, edges: slice, segments: Segments, order: EdgeOrder) -> None:
        self.unit, self.edges, self.segments, self._order = unit, edges, segments, order
        self.by_source: Segments | None = None
        self._runs: dict[tuple[int, int], tuple[int, int]] = {}

    @property
    def columns(self) -> Tensor | slice:
        """Column in ``edge_index`` of each of the shard's edges, in shard order."""
        return self._order.columns(self.edges)

    def transposed(self, numbered: bool = False) -> Segments:
        """The shard by source: rows of the unit's buffer add up local ids. Made on first use."""
        found = self.by_source
        if found is None or (numbered and found.edges is None):
            given, order = self.segments, self._order
            sizes = order.num_rows[self.unit], order.num_targets
            ends = given.source, given.offsets, given.targets
            found = _grouped(*transpose(*ends, *sizes, numbered=numbered))
            self.by_source = found
        return found

    def tiles(self, max_edges: int) -> Iterator[Tile]:
        """Runs of at most ``max_edges`` edges."""
        for start in range(self.edges.start, self.edges.stop, max(max_edges, 1)):
            yield self.tile(slice(start, min(start + max_edges, self.edges.stop)))

    def tile(self, edges: slice) -> Tile:
        """The index tensors of a run of edges (64-bit, made for its turn)."""
        shard, begin = self.segments, self.edges.start
        start, stop = edges.start - begin, edges.stop - begin
        if (start, stop) not in self._runs:  # A GPU's numbers are waited for once.
            self._runs[start, stop] = _holding(shard.offsets, start, stop)
        first, last = self._runs[start, stop]
        counts = shard.offsets[first : last + 1].clamp(start, stop).diff()
        place = torch.arange(last - first, device=counts.device)
        targets = place + first if shard.targets is None else shard.targets[first:last]
        index = place.repeat_interleave(counts, output_size=stop - start)
        source = shard.source[start:stop].long()
        return Tile(self.unit, edges, targets, index, source, lambda: self._order.columns(edges))


class EdgeOrder:
    """The order of a worker's edges by unit, target and row of the unit's buffer.

    Attributes:
        num_rows: Rows of each unit.
        num_targets: Target nodes.
    """

    def __init__(self, edge_index: DistEdgeIndex) -> None:
        plan = edge_index.plan
        self._plan, self._ends, self.num_targets = plan, edge_index.ends(), edge_index.num_targets
        self._joined = plan.comm.host is not None and plan.world_size > 1
        self.num_rows = [plan.num_local, plan.num_halo]
        if not self._joined:
            self.num_rows = [plan.num_rows[unit] for unit in range(plan.world_size)]
        self._in_order = False
        self._columns: Tensor | None = None

    def sorted(self) -> tuple[Tensor, Tensor]:
        """Each edge's row in its unit's buffer, in this order; and where each target's edges begin.

        Columns of edges are asked for by edge-level data alone: of many they are made again.
        """
        rows, order, starts = self._sort()
        self._in_order = bool((order[1:] > order[:-1]).all())
        self._columns = order if order.numel() <= _FEW else None
        return rows if self._in_order else rows[order], starts

    def columns(self, edges: slice) -> Tensor | slice:
        """Column in ``edge_index`` of each of a run of edges in this order."""
        if self._in_order:
            return edges
        if self._columns is None:
            self._columns = self._sort()[1]
        return self._columns[edges].long()

    def _sort(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each edge's row in its unit's buffer; edges by unit, target and row; each one's start."""
        source, target = self._ends
        world = len(self.num_rows)
        rows, unit = self._place(source)
        order = sort_edges(rows, max(self.num_rows))[0]
        keys = self.num_targets * world
        # By target, and a target's edges by row: rows that are near are read one after another.
        if world == 1:
            return rows, *sort_edges(target, keys, order)
        key = (unit.long() if keys >= 2**31 else unit).mul_(self.num_targets).add_(target)
        del unit
        return rows, *sort_edges(key, keys, order)

    def _place(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Each source's row in the buffer of its unit, and the unit (32 bits)."""
        plan = self._plan
        if plan.world_size == 1:
            return narrowed(source, plan.num_ids), source[:0]
        source = narrowed(source, plan.num_ids).contiguous()
        sizes, units = [plan.num_local, plan.num_halo], [0, 1]
        if not self._joined:
            sizes = [plan.num_local, *plan.halo_counts]
            units = [
                0,
                *((owner - plan.rank) % plan.world_size for owner in range(plan.world_size)),
            ]
        starts = source.new_tensor([0, *accumulate(sizes[:-1])])
        run = torch.bucketize(source, starts[1:], right=True, out_int32=True)
        unit = torch.tensor(units, dtype=torch.int32, device=source.device).index_select(0, run)
        return source - starts.index_select(0, run), unit


class Shards:
    """The edges of one worker, with local targets, as shards.

    Shard 0 holds those from its own nodes, shard u those from the owner of unit u
    (:class:`~pyg_sar.exchange.halo.HaloPlan`); where a process hosts several parts, shard 1 those
    from all halo nodes (``exchange/part_rows.py``).

    Within a shard edges are sorted by target, so that tiles of it touch few targets.

    Attributes:
        in_degree: Edges into each target node, ``[num_targets]``.
        num_rows: Rows of each unit.
        segments: Each shard by target: local ids add up rows of the unit's buffer.
        blocks: The shards.
    """

    def __init__(self, edge_index: DistEdgeIndex) -> None:
        plan = edge_index.plan
        for ledger in plan.comm.ledgers:
            ledger.count("bucketing")
        self.plan: HaloPlan = plan
        target = edge_index.ends()[1]
        self.num_edges, self.num_targets = target.numel(), edge_index.num_targets
        self.in_degree = torch.bincount(target, minlength=self.num_targets)
        order = EdgeOrder(edge_index)
        self.num_rows, count = order.num_rows, self.num_targets
        rows, starts = order.sorted()
        narrow = max(plan.num_ids, self.num_edges) < 2**31
        index = torch.int32 if narrow else torch.int64
        rows, starts = rows.to(index), starts.to(index)
        units = range(len(self.num_rows))
        offsets: list[int] = starts[:: max(count, 1)].tolist() if count else [0, 0]
        offsets += [offsets[-1]] * (len(units) + 1 - len(offsets))
        edges = [slice(offsets[unit], offsets[unit + 1]) for unit in units]
        self.segments = [
            _grouped(rows[edges[u]], starts[u * count : (u + 1) * count + 1]) for u in units
        ]
        self.blocks = [Shard(u, edges[u], self.segments[u], order) for u in units]


def shards_of(edge_index: DistEdgeIndex) -> Shards:
    """The shards of ``edge_index``, made on first use and kept with it."""
    shards: Shards = edge_index.remember("shards", lambda: Shards(edge_index))
    return shards
