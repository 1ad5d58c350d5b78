"""Chunks of targets, each with all its in-edges and just the source rows that these need.

For aggregations whose partial states don't merge (median, LSTM, sort, a layer's own
``aggregate()``): HongTu's way through the graph (Wang et al., SIGMOD 2023), over workers. Whatever
needs all in-edges of a target at once is right within a chunk; resident are the rows of one chunk,
or ``1 + prefetch``. A row that several chunks need travels once for each.

Where messages are equal, PyG's median and quantiles give the gradient to those that an unstable
sort of all edges of the graph puts first. A chunk's sort may put others first: outputs are the
same, and the gradient is another of those that are right (a subgradient).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.exchange.rows import RowLayout, UnitRows, add_rows, post_all, tracked_buffer
from pyg_sar.exchange.wire import Wire
from pyg_sar.ledger import Label
from pyg_sar.space.index_space import DistEdgeIndex
from pyg_sar.space.shard import Tile

if TYPE_CHECKING:
    from pyg_sar.comm.group import Work

_PLAN: Label = ("", "", "plan")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk: a range of targets, their edges, and where the sources' rows are.

    Attributes:
        first, stop: The targets' local ids.
        columns: Columns of ``edge_index``, sorted by target, ``[E_c]``.
        index: Position of each edge's target in the range, ``[E_c]``.
        source: Row of each edge's source in the chunk's buffer, ``[E_c]``.
        local_rows: Own rows that open the buffer, ``[L_c]``.
        counts: Halo rows from each worker, which follow.
        sends: Own rows that each worker needs for its chunk of the same number.
    """

    first: int
    stop: int
    columns: Tensor
    index: Tensor
    source: Tensor
    local_rows: Tensor
    counts: list[int]
    sends: list[Tensor]

    @property
    def num_halo(self) -> int:
        """Remote rows of the chunk."""
        return sum(self.counts)


def by_target(target: Tensor, order: Tensor | None) -> Tensor:
    """Columns sorted by target; those of a target as in the whole graph's edge list."""
    if order is not None:
        first = order.argsort()
        return first[target[first].argsort(stable=True)]
    if bool((target[1:] >= target[:-1]).all()):
        return torch.arange(target.numel(), device=target.device)
    return target.argsort(stable=True)


class Chunks:
    """The chunks of a worker's edges; every worker has the same number of them.

    Made by all workers together, once per structure.

    Args:
        edge_index: Distributed edges with local targets.
        max_edges: Edges per chunk, unless a single target has more.
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
        sends = self._agree([ids for ids, _ in needs])
        self.chunks = [
            self._chunk(bounds, columns, target, ids, inverse, send)
            for bounds, columns, (ids, inverse), send in zip(
                ranges, parts, needs, sends, strict=True
            )
        ]

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
        for owner, peer in plan.rounds():
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

    def _chunk(
        self,
        bounds: tuple[int, int],
        columns: Tensor,
        target: Tensor,
        ids: Tensor,
        inverse: Tensor,
        sends: list[Tensor],
    ) -> Chunk:
        first, stop = bounds
        return Chunk(
            first=first,
            stop=stop,
            columns=columns,
            index=target[columns] - first,
            source=inverse,
            local_rows=ids[ids < self.plan.num_local],
            counts=[part.numel() for part in self._halo_parts(ids)],
            sends=sends,
        )

    def tile(self, number: int) -> Tile:
        """The chunk as one tile."""
        chunk = self.chunks[number]
        targets = torch.arange(chunk.first, chunk.stop, device=chunk.index.device)
        edges = slice(0, chunk.columns.numel())
        return Tile(number, edges, targets, chunk.index, chunk.source, chunk.columns)


class ChunkStream:
    """Source rows chunk by chunk, fetched ahead.

    Args:
        chunks: The chunks.
        tensors: Source tensors ``[num_local, *]``, detached.
        label: Whom the ledger charges.
        prefetch: Chunks fetched ahead.
        wire: How rows travel; exactly by default.
    """

    def __init__(
        self,
        chunks: Chunks,
        tensors: Sequence[Tensor],
        label: Label,
        prefetch: int,
        wire: Wire | None = None,
    ) -> None:
        self.chunks, self.tensors, self.label = chunks, list(tensors), label
        self.prefetch = prefetch
        self.layout = RowLayout(tensors, wire)
        self._posted = 0
        self._pending: deque[tuple[list[Tensor], list[Work]]] = deque()

    def __iter__(self) -> Iterator[tuple[int, UnitRows]]:
        """Yields ``(chunk number, rows)``. Drop the rows before asking for more."""
        count = len(self.chunks.chunks)
        for number in range(count):
            self._post(max(self.prefetch, 1))
            buffers, works = self._pending.popleft()
            for work in works:
                work.wait()
            self._post(self.prefetch)
            local = self.chunks.chunks[number].local_rows.numel()
            self.layout.land([buffer[local:] for buffer in buffers])
            handed = [UnitRows(self.layout.unpack(buffers))]
            del buffers, works
            yield number, handed.pop()

    def _post(self, ahead: int) -> None:
        while len(self._pending) < ahead and self._posted < len(self.chunks.chunks):
            chunk = self.chunks.chunks[self._posted]
            self._posted += 1
            buffers, works = [], []
            for k, (dtype, width) in enumerate(self.layout.widths()):
                local = chunk.local_rows.numel()
                buffer = tracked_buffer(
                    self.chunks.plan.comm,
                    self.label[0],
                    chunk.num_halo if k == 0 else 0,
                    (local + chunk.num_halo, width),
                    dtype,
                    self.tensors[0].device,
                )
                buffer[:local] = self.layout.pack(self.tensors, chunk.local_rows, dtype)
                receives = list(self.layout.wire.landing(buffer[local:]).split(chunk.counts))
                sends = [self.layout.packer(self.tensors, rows, dtype) for rows in chunk.sends]
                works.append(post_all(self.chunks.plan, sends, receives, self.label))
                buffers.append(buffer)
            self._pending.append((buffers, works))


class ChunkReturn:
    """Returns each chunk's gradient rows to their owners; adjoint of :class:`ChunkStream`.

    Args:
        chunks: The chunks.
        totals: Gradients of the worker's own rows, ``[num_local, *]``, added to in place.
        layer: Whom the ledger charges.
        wire: How rows travel; exactly by default.
    """

    def __init__(
        self, chunks: Chunks, totals: Sequence[Tensor], layer: str, wire: Wire | None = None
    ) -> None:
        chunks.plan.comm.returning()
        self.chunks, self.totals = chunks, list(totals)
        self.label: Label = (layer, "backward", "gradient")
        self.layout = RowLayout(totals, wire)
        self._packed: list[Tensor] = []

    def start(self, number: int) -> list[Tensor]:
        """Zeroed gradient rows of the chunk's buffer."""
        chunk = self.chunks.chunks[number]
        rows = chunk.local_rows.numel() + chunk.num_halo
        self._packed = [
            torch.zeros((rows, width), dtype=dtype, device=self.totals[0].device)
            for dtype, width in self.layout.widths()
        ]
        return self.layout.unpack(self._packed)

    def send(self, number: int) -> None:
        """Sends what was started; call once per chunk, in order."""
        chunk, plan = self.chunks.chunks[number], self.chunks.plan
        local = chunk.local_rows.numel()
        received: list[list[Tensor]] = []
        for packed in self._packed:
            buffers = [packed.new_empty(rows.numel(), packed.size(1)) for rows in chunk.sends]
            wire = self.layout.wire
            sends = [wire.encode(part) for part in packed[local:].split(chunk.counts)]
            post_all(plan, sends, [wire.landing(part) for part in buffers], self.label).wait()
            self.layout.land(buffers)
            received.append(buffers)
        own = self.layout.unpack([packed[:local] for packed in self._packed])
        for total, part in zip(self.totals, own, strict=True):
            add_rows(total, chunk.local_rows, part)
        for peer, rows in enumerate(chunk.sends):
            parts = self.layout.unpack([receives[peer] for receives in received])
            for total, part in zip(self.totals, parts, strict=True):
                add_rows(total, rows, part)
        self._packed = []

    def drain(self) -> None:
        """Nothing is left in flight."""
