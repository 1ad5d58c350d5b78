"""Chunks of targets, each with all its in-edges and just the source rows that these need.

For aggregations whose partial states don't merge (median, LSTM, sort, a layer's own
``aggregate()``): HongTu's way through the graph (Wang et al., SIGMOD 2023), over workers. Whatever
needs all in-edges of a target at once is right within a chunk; resident are the rows of one chunk,
or ``1 + prefetch``. A row that several chunks need travels once for each. Where a process hosts
several parts, a part's halo comes once for all of its chunks, and its gradients go once.

Where messages are equal, PyG's median and quantiles give the gradient to those that an unstable
sort of all edges of the graph puts first. A chunk's sort may put others first: outputs are the
same, and the gradient is another of those that are right (a subgradient).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyg_sar.exchange.gather import post_all
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.exchange.part_rows import PartRows, is_hosted
from pyg_sar.exchange.rows import RowSink, RowSource, Travel, UnitRows, add_rows, layout_of
from pyg_sar.ledger import Label, tracked_buffer
from pyg_sar.space.index_space import DistEdgeIndex
from pyg_sar.space.shard import Tile

if TYPE_CHECKING:
    from pyg_sar.comm.group import Work

_PLAN: Label = ("", "", "plan")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk: a range of targets, their edges, and where the sources' rows are.

    A block whose messages are one tile; it has no segments, as no kernel takes it.

    Attributes:
        unit: Its number.
        first, stop: The targets' local ids.
        columns: Columns of ``edge_index``, sorted by target, ``[E_c]``.
        index: Position of each edge's target in the range, ``[E_c]``.
        source: Row of each edge's source in the chunk's buffer, ``[E_c]``.
        local_rows: Own rows that open the buffer, ``[L_c]``.
        halo_rows: Rows of the halo that follow, ``[H_c]``.
        counts: How many of these each worker owns.
        sends: Own rows that each worker needs for its chunk of the same number.
    """

    unit: int
    first: int
    stop: int
    columns: Tensor
    index: Tensor
    source: Tensor
    local_rows: Tensor
    halo_rows: Tensor
    counts: list[int]
    sends: list[Tensor]

    @property
    def num_halo(self) -> int:
        """Remote rows of the chunk."""
        return self.halo_rows.numel()

    def tiles(self, max_edges: int) -> Iterator[Tile]:
        """The chunk as one tile, if it has targets."""
        targets = torch.arange(self.first, self.stop, device=self.index.device)
        edges = slice(0, self.columns.numel())
        if self.stop > self.first:
            yield Tile(self.unit, edges, targets, self.index, self.source, self.columns)


def by_target(target: Tensor, order: Tensor | None) -> Tensor:
    """Columns sorted by target; those of a target as in the whole graph's edge list."""
    if order is not None:
        first = order.argsort()
        return first[target[first].argsort(stable=True)]
    if bool((target[1:] >= target[:-1]).all()):
        return torch.arange(target.numel(), device=target.device)
    return target.argsort(stable=True)


class Chunks:
    """The chunks of a worker's edges, with local targets; every worker has the same number of them.

    Made by all workers together, once per structure. A chunk has at most ``max_edges``, unless a
    single target has more.
    """

    def __init__(self, edge_index: DistEdgeIndex, max_edges: int) -> None:
        plan = edge_index.plan
        for ledger in plan.comm.ledgers:
            ledger.count("bucketing")
        self.plan: HaloPlan = plan
        source, target = edge_index.ends()
        num_targets = edge_index.num_targets
        self.in_degree = torch.bincount(target, minlength=num_targets)
        order = by_target(target, edge_index.order)
        ends = [0, *self.in_degree.cumsum(0).tolist()]
        ranges = self._ranges(ends, max_edges)
        most = torch.tensor([len(ranges)], device=source.device)
        plan.comm.all_reduce(most, "max", label=_PLAN)
        ranges += [(num_targets, num_targets)] * (int(most) - len(ranges))
        parts = [order[ends[a] : ends[b]] for a, b in ranges]
        needs = [torch.unique(source[columns], return_inverse=True) for columns in parts]
        self._parts = PartRows(plan) if is_hosted(plan) else None
        ids = [found for found, _ in needs]
        sends = self._agree(ids) if self._parts is None else [[]] * len(ids)
        self.num_units, own = len(ranges), plan.num_local
        self.blocks: list[Chunk] = []
        for unit, (first, stop) in enumerate(ranges):
            needed, inverse = needs[unit]
            self.blocks.append(
                Chunk(
                    unit=unit,
                    first=first,
                    stop=stop,
                    columns=parts[unit],
                    index=target[parts[unit]] - first,
                    source=inverse,
                    local_rows=needed[needed < own],
                    halo_rows=needed[needed >= own] - own,
                    counts=[part.numel() for part in self._halo_parts(needed)],
                    sends=sends[unit],
                )
            )

    def source(self, tensors: Sequence[Tensor], how: Travel) -> RowSource:
        """See :meth:`~pyg_sar.exchange.rows.Exchange.source`; a scale is not taken."""
        if how.scale is not None:
            raise NotImplementedError("Chunks send rows as they are")
        if self._parts is not None:
            if how.wire is not None and not how.wire.is_exact and self.num_units > 1:
                raise ValueError(
                    f"wire={how.wire.name!r} and parts that a worker hosts together: this layer "
                    f"goes through the gradients of {self.num_units} chunks, which as many workers "
                    "round chunk by chunk, and hosted parts in their sum. Start a worker for each "
                    "part, take wire='exact', or a message_budget for one chunk"
                )
            how = replace(how, in_place=True)
            return _PartSource(self, self._parts.source(tensors, how))
        return ChunkSource(self, tensors, how)

    def sink(self, totals: Sequence[Tensor], how: Travel) -> RowSink:
        """See :meth:`~pyg_sar.exchange.rows.Exchange.sink`; a merge is not taken."""
        if how.merge is not None:
            raise NotImplementedError("Chunks add rows up")
        if self._parts is not None:
            return _PartSink(self, totals, self._parts.sink(totals, how))
        return ChunkSink(self, totals, how)

    @staticmethod
    def _ranges(ends: list[int], max_edges: int) -> list[tuple[int, int]]:
        """Ranges of targets with at most ``max_edges`` in-edges, or a single target."""
        ranges, start = [], 0
        for stop in range(1, len(ends)):
            if ends[stop] - ends[start] > max_edges and stop - 1 > start:
                ranges.append((start, stop - 1))
                start = stop - 1
        return [*ranges, (start, len(ends) - 1)]

    def _halo_parts(self, ids: Tensor) -> list[Tensor]:
        """Sorted ids' halo part as positions within each owner's halo."""
        plan = self.plan
        halo = ids[ids >= plan.num_local] - plan.num_local
        bounds = torch.tensor(plan.halo_offsets, device=ids.device)
        cuts = torch.searchsorted(halo, bounds).tolist()
        return [halo[cuts[q] : cuts[q + 1]] - plan.halo_offsets[q] for q in range(plan.world_size)]

    def _agree(self, ids: list[Tensor]) -> list[list[Tensor]]:
        """Tells each owner what every chunk needs; returns own rows to send, per chunk and peer."""
        plan, comm = self.plan, self.plan.comm
        wanted = [self._halo_parts(chunk) for chunk in ids]
        sends: list[list[Tensor]] = [[chunk.new_empty(0)] * plan.world_size for chunk in ids]
        for owner, peer in plan.peers[1:]:
            mine = torch.tensor([w[owner].numel() for w in wanted], device=ids[0].device)
            theirs = torch.empty_like(mine)
            comm.exchange(mine, owner, theirs, peer, label=_PLAN).wait()
            asked = theirs.new_empty(int(theirs.sum()))
            request = torch.cat([w[owner] for w in wanted])
            comm.exchange(request, owner, asked, peer, label=_PLAN).wait()
            rows = plan.send_rows(peer)[asked]
            for chunk, part in zip(sends, rows.split(theirs.tolist()), strict=True):
                chunk[peer] = part
        return sends


class ChunkSource(RowSource):
    """Source rows chunk by chunk: own rows that it needs, then halo rows."""

    def __init__(self, chunks: Chunks, tensors: Sequence[Tensor], how: Travel) -> None:
        self.chunks, self.tensors, self.label = chunks, list(tensors), how.label
        self.prefetch, self.wire = how.prefetch, how.wire
        self.layout = layout_of(*[(t.dtype, t.shape[1:]) for t in tensors])
        self._posted = 0
        self._pending: deque[tuple[list[Tensor], list[Work]]] = deque()

    def open(self, unit: int) -> UnitRows:
        """The chunk's rows of each tensor."""
        self._post(unit)
        buffers, works = self._pending.popleft()
        for work in works:
            work.wait()
        self._post(unit + self.prefetch)
        local = self.chunks.blocks[unit].local_rows.numel()
        for buffer in buffers:
            self.wire.land(buffer[local:])
        return UnitRows(self.layout.unpack(buffers))

    def _post(self, last: int) -> None:
        plan, ledgers = self.chunks.plan, self.chunks.plan.comm.ledgers
        while self._posted <= min(last, self.chunks.num_units - 1):
            chunk = self.chunks.blocks[self._posted]
            self._posted += 1
            local = chunk.local_rows.numel()
            buffers, works = [], []
            for k, (dtype, width) in enumerate(self.layout.widths):
                counted = chunk.num_halo if k == 0 else 0
                shape, device = (local + chunk.num_halo, width), self.tensors[0].device
                buffer = tracked_buffer(ledgers, self.label[0], counted, shape, dtype, device)
                self.layout.write(buffer[:local], self.tensors, dtype, chunk.local_rows)
                receives = list(self.wire.landing(buffer[local:]).split(chunk.counts))
                sends = [self._packer(rows, dtype) for rows in chunk.sends]
                works.append(post_all(plan, sends, receives, self.label))
                buffers.append(buffer)
            self._pending.append((buffers, works))

    def _packer(self, rows: Tensor, dtype: torch.dtype) -> Callable[[], Tensor] | None:
        """Packs when the issuing thread gets there; ``None`` where there are no rows."""
        if rows.numel() == 0:
            return None
        return lambda: self.wire.encode(self.layout.pack(self.tensors, rows, dtype))


class ChunkSink(RowSink):
    """Takes each chunk's gradient rows to their owners; adjoint of :class:`ChunkSource`."""

    def __init__(self, chunks: Chunks, totals: Sequence[Tensor], how: Travel) -> None:
        self.chunks, self.totals, self.label = chunks, list(totals), how.label
        self.wire = how.wire
        self.layout = layout_of(*[(t.dtype, t.shape[1:]) for t in totals])
        self._packed: list[Tensor] = []

    def open(self, unit: int) -> list[Tensor]:
        """Zeroed gradient rows of the chunk's buffer."""
        chunk = self.chunks.blocks[unit]
        rows, device = chunk.local_rows.numel() + chunk.num_halo, self.totals[0].device
        self._packed = [
            torch.zeros((rows, width), dtype=dtype, device=device)
            for dtype, width in self.layout.widths
        ]
        return self.layout.unpack(self._packed)

    def close(self, unit: int) -> None:
        """Sends what was opened, and takes in what comes."""
        chunk, plan, wire = self.chunks.blocks[unit], self.chunks.plan, self.wire
        local = chunk.local_rows.numel()
        received: list[list[Tensor]] = []
        for packed in self._packed:
            buffers = [packed.new_empty(rows.numel(), packed.size(1)) for rows in chunk.sends]
            sends = [wire.encode(part) for part in packed[local:].split(chunk.counts)]
            post_all(plan, sends, [wire.landing(part) for part in buffers], self.label).wait()
            for buffer in buffers:
                wire.land(buffer)
            received.append(buffers)
        own = self.layout.unpack([packed[:local] for packed in self._packed])
        for total, part in zip(self.totals, own, strict=True):
            add_rows(total, chunk.local_rows, part)
        for peer, rows in enumerate(chunk.sends):
            parts = self.layout.unpack([receives[peer] for receives in received])
            for total, part in zip(self.totals, parts, strict=True):
                add_rows(total, rows, part)
        self._packed = []


# A hosted part ################################################################


class _PartSource(RowSource):
    """Source rows chunk by chunk, of a part whose halo comes at once."""

    def __init__(self, chunks: Chunks, rows: RowSource) -> None:
        self._chunks, self._source = chunks, rows
        self._rows: list[UnitRows] = []

    def open(self, unit: int) -> UnitRows:
        """The chunk's rows of each tensor, copied."""
        if unit == 0:
            self._rows = [self._source.open(0), self._source.open(1)]
        chunk, (own, halo) = self._chunks.blocks[unit], self._rows
        there = chunk.halo_rows if halo.index is None else halo.index[chunk.halo_rows]
        places = chunk.local_rows, there
        pairs = zip(own.tensors, halo.tensors, strict=True)
        return UnitRows(
            [
                torch.cat(
                    [rows.index_select(0, place) for rows, place in zip(pair, places, strict=True)]
                )
                for pair in pairs
            ]
        )

    def finish(self) -> None:
        """Lets go of the rows."""
        self._rows = []
        for unit in range(2):
            self._source.close(unit)
        self._source.finish()


class _PartSink(RowSink):
    """Adds up the gradient rows of all chunks; those of the halo go to their owners at once."""

    def __init__(self, chunks: Chunks, totals: Sequence[Tensor], rows: RowSink) -> None:
        self._chunks, self._like, self._sink = chunks, totals, rows
        self._totals: list[list[Tensor]] = []
        self._opened: list[Tensor] = []

    def open(self, unit: int) -> list[Tensor]:
        """Zeroed gradient rows of the chunk's buffer."""
        if unit == 0:
            self._totals = [self._sink.open(0), self._sink.open(1)]
        chunk = self._chunks.blocks[unit]
        count = chunk.local_rows.numel() + chunk.num_halo
        self._opened = [total.new_zeros(count, *total.shape[1:]) for total in self._like]
        return list(self._opened)

    def close(self, unit: int) -> None:
        """Adds up what was opened."""
        chunk = self._chunks.blocks[unit]
        local = chunk.local_rows.numel()
        for rows, own, halo in zip(self._opened, *self._totals, strict=True):
            add_rows(own, chunk.local_rows, rows[:local])
            add_rows(halo, chunk.halo_rows, rows[local:])
        self._opened = []

    def finish(self) -> None:
        """Sends the halo's gradients, and takes in what comes."""
        self._totals = []
        for unit in range(2):
            self._sink.close(unit)
        self._sink.finish()
