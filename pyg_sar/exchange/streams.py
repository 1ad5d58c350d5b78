"""Source rows streamed shard by shard from their owners, and their gradients on the way back.

[Note: rounds] Every worker walks the same units (:meth:`HaloPlan.units`) in the same order and
posts its transfers in that order; the communicator's issuing thread carries them out first in,
first out. A fetch that is posted ahead therefore never overtakes a gradient that another worker
posts first, and nothing can deadlock. A unit in which a worker has no part keeps its place (it
counts as fetched ahead, too), or its local peers would change their order; nothing is sent for it.

[Note: lifetimes] A fetched buffer belongs to the consumer from the moment it is handed out. The
stream drops its own reference before it allocates the next one, and consumers must do so too
(``del rows``), or two shards are resident where the policy promises one. The ledger follows the
storage, not a counter that the code would have to keep right. A consumer that keeps nothing of the
rows lets the stream reuse their buffers, each of which has room for all units that it will serve:
the system would otherwise clear a new one's pages, which takes as long as filling them.

[Note: local peers in a stream] Rows of a worker of the same host are read from what it published
(see sharing): the stream publishes its own tensors once, when it starts. A consumer that finds rows
by an index reads them where they are, if all of a unit's rows are of one local peer; for others a
unit's fetch gathers from its owners' publications. Between other workers rows are packed for each
peer. A unit may have some of its peers here and others there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyg_sar.comm.sharing import Incoming, SendBuffer, Sharing, pieces_of
from pyg_sar.exchange.halo import HaloPlan, Unit
from pyg_sar.exchange.rows import (
    RowLayout,
    UnitRows,
    Use,
    add_distinct_rows,
    post_pairs,
    tracked_buffer,
)
from pyg_sar.exchange.shared_rows import SharedRows, shared_rows
from pyg_sar.exchange.wire import Wire
from pyg_sar.ledger import Label

if TYPE_CHECKING:
    from pyg_sar.comm.group import Work


@dataclass(slots=True)
class _Fetch:
    """A unit's rows on their way: into buffers, one per dtype, or where a local peer has them."""

    unit: int
    buffers: list[Tensor]
    in_place: list[Incoming] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)


class ShardStream:
    r"""Source rows of one layer: the local rows, then unit by unit.

    At most the rows of ``1 + prefetch`` remote shards are resident (DESIGN: 2/N and 3/N of the
    graph with the worker's own). Traffic in: :math:`H_p F b` bytes.

    Args:
        plan: The halo plan.
        tensors: Source tensors ``[num_local, *]``, detached.
        label: Whom the ledger charges.
        prefetch: Units fetched ahead.
        wire: How rows travel; exactly by default.
        use: What the consumer does with the rows.
    """

    def __init__(
        self,
        plan: HaloPlan,
        tensors: Sequence[Tensor],
        label: Label,
        prefetch: int,
        wire: Wire | None = None,
        use: Use = Use.KEEPS,
    ) -> None:
        self.plan = plan
        self.tensors = list(tensors)
        self.use = use
        self.label = label
        self.prefetch = prefetch
        self.layout = RowLayout(tensors, wire)
        self._units = plan.units()
        self._posted = 1
        self._pending: deque[_Fetch] = deque()
        self._spare: list[Tensor] = []
        self._lent: list[Tensor] = []
        # What is read in place is not rounded, and results shall not depend on who is near.
        self._sharing = plan.comm.sharing if self.layout.wire.is_exact else None
        self._near = frozenset[int]() if self._sharing is None else self._sharing.ranks

    def __iter__(self) -> Iterator[tuple[int, UnitRows]]:
        """Yields ``(unit, rows)``: rows of each tensor, by owner, in its halo order."""
        published = [] if self._sharing is None else self._publish(self._sharing)
        self._post(self.prefetch)
        yield 0, UnitRows(self.tensors)
        while self._posted < len(self._units) or self._pending:
            if not self._pending:
                self._post(1)
            fetch = self._pending.popleft()
            for work in fetch.works:
                work.wait()
            self._post(self.prefetch)
            unit, in_place = fetch.unit, fetch.in_place
            handed = [self._arrived(fetch)]
            del fetch
            yield unit, handed.pop()
            self._spare, self._lent = self._lent, []
            for rows in in_place:
                rows.release()
        for work in published:
            work.wait()

    def _arrived(self, fetch: _Fetch) -> UnitRows:
        """A unit's rows, and what is to be used again after them."""
        unit = self._units[fetch.unit]
        if fetch.in_place and self._sharing is not None:
            fetch.in_place[0].hold(self.plan.comm.ledgers, self.label[0], unit.num_rows)
            index = shared_rows(self.plan, self._sharing).index[unit.owners[0]]
            return UnitRows(self.layout.unpack([rows.rows for rows in fetch.in_place]), index)
        filled = [buffer[: unit.num_rows] for buffer in fetch.buffers]
        self.layout.land(filled)
        if self.use is not Use.KEEPS and self._posted < len(self._units):
            self._lent = fetch.buffers
        return UnitRows(self.layout.unpack(filled))

    def _publish(self, sharing: Sharing) -> list[Work]:
        """Lets the local peers read the own rows. See [Note: local peers in a stream]."""
        shared = shared_rows(self.plan, sharing)
        return [
            sharing.publish(
                partial(self._fill, shared, dtype),
                (shared.count, width),
                dtype,
                shared.readers,
                self.label,
            )
            for dtype, width in self.layout.widths()
        ]

    def _fill(self, shared: SharedRows, dtype: torch.dtype, out: Tensor) -> None:
        """Writes what is published of a dtype, on the issuing thread."""
        shared.fill(out, self.tensors, self.layout, dtype)

    def _packer(self, peer: int, dtype: torch.dtype) -> Callable[[], Tensor] | None:
        """Makes a peer's message of a dtype, on the issuing thread; ``None``: it has no rows."""
        return self.layout.packer(self.tensors, self.plan.send_rows(peer), dtype)

    def _post(self, ahead: int) -> None:
        """Posts fetches until ``ahead`` are in flight. See [Note: rounds]."""
        while len(self._pending) < ahead and self._posted < len(self._units):
            unit = self._units[self._posted]
            in_place = self.use is Use.IN_PLACE and len(unit.owners) == 1
            in_place &= self._near.issuperset(unit.owners)
            fetch = _Fetch(self._posted, [] if in_place else self._buffers())
            self._posted += 1
            for k, (dtype, width) in enumerate(self.layout.widths()):
                if in_place:
                    self._read_in_place(fetch, unit, dtype, width)
                else:
                    fetch.works += self._fetch(unit, fetch.buffers[k][: unit.num_rows])
            self._pending.append(fetch)

    def _buffers(self) -> list[Tensor]:
        """Room for the next unit's rows, and if it is used again for those of later ones."""
        spare, self._spare = self._spare, []
        count = self._units[self._posted].num_rows
        comm, device = self.plan.comm, self.tensors[0].device
        if count == 0:  # This worker only sends.
            shapes = self.layout.widths()
            return [torch.empty((0, width), dtype=dtype, device=device) for dtype, width in shapes]
        if spare and spare[0].size(0) >= count:
            return spare
        del spare
        if self.use is not Use.KEEPS:
            count = max(unit.num_rows for unit in self._units[self._posted :: 1 + self.prefetch])
        found = []
        for k, (dtype, width) in enumerate(self.layout.widths()):
            counted = count if k == 0 else 0
            shape = count, width
            found.append(tracked_buffer(comm, self.label[0], counted, shape, dtype, device))
        return found

    def _read_in_place(self, fetch: _Fetch, unit: Unit, dtype: torch.dtype, width: int) -> None:
        """Has a local peer's rows read where they are, and sends what others fetch of a unit."""
        assert self._sharing is not None  # Or there would be no local peers.
        fetch.works += post_pairs(self.plan, self._sends(unit, dtype), [], self.label)
        (owner,), (count,) = unit.owners, unit.counts
        shape = shared_rows(self.plan, self._sharing).counts[owner], width
        found = self._sharing.read_in_place(owner, shape, count, dtype, self.label)
        fetch.in_place.append(found)
        fetch.works.append(found.work)

    def _sends(
        self, unit: Unit, dtype: torch.dtype
    ) -> list[tuple[int, Callable[[], Tensor] | None]]:
        """A unit's rows for peers that are no local peers."""
        return [(peer, self._packer(peer, dtype)) for peer in unit.peers if peer not in self._near]

    def _fetch(self, unit: Unit, buffer: Tensor) -> list[Work]:
        """Fetches a unit's rows of one dtype, and sends what others fetch of it."""
        plan = self.plan
        landing = self.layout.wire.landing(buffer)
        receives = list(zip(unit.owners, landing.split(unit.counts), strict=True))
        far = [(owner, rows) for owner, rows in receives if owner not in self._near]
        works = post_pairs(plan, self._sends(unit, buffer.dtype), far, self.label)
        for owner, rows in receives:
            if self._sharing is not None and owner in self._near:
                shared = shared_rows(plan, self._sharing)
                shape = shared.counts[owner], rows.size(1)
                use = partial(shared.gather, owner=owner, out=rows)
                works.append(self._sharing.read(owner, shape, use, rows, self.label))
        return works


class RowReturn:
    r"""Sends rows that each unit was worked out for to their owners, which :meth:`_take` them in.

    The other way round as :class:`ShardStream`: a row for each halo row, :math:`H_p F b` bytes out.

    [Note: rows in flight] What is computed for one unit travels while the next one is worked
    on. Between local peers that takes no memory: the rows stay where they were computed, and the
    owner takes them from there. Over a network they take a buffer at either end, which a policy
    with one prefetched unit affords where the backward pass fetches none.

    Args:
        plan: The halo plan.
        totals: What the worker's own rows take them into, ``[num_local, *]``, in place.
        label: Whom the ledger charges.
        prefetch: Units fetched ahead; 0 leaves nothing in flight.
        refetches: Whether rows are fetched meanwhile.
        wire: How rows travel; exactly by default.
    """

    in_pieces = True  # rows of local peers are taken in some at a time

    def __init__(
        self,
        plan: HaloPlan,
        totals: Sequence[Tensor],
        label: Label,
        prefetch: int,
        refetches: bool = False,
        wire: Wire | None = None,
    ) -> None:
        self.plan = plan
        self.totals = list(totals)
        self.label = label
        self.prefetch, self.refetches = prefetch, refetches
        self.layout = RowLayout(totals, wire)
        self._units = plan.units()
        self._packed: list[Tensor | SendBuffer] = []
        self._pending: tuple[Unit, list[Tensor], list[Incoming], list[Work]] | None = None
        # What is read in place is not rounded, and results shall not depend on who is near.
        self._sharing = plan.comm.sharing if self.layout.wire.is_exact else None
        self._near = frozenset[int]() if self._sharing is None else self._sharing.ranks

    def _take(self, peer: int, place: slice, rows: Sequence[Tensor]) -> None:
        """Takes in rows of a peer: those for this place of :meth:`HaloPlan.send_rows`."""
        raise NotImplementedError

    def start(self, unit: int) -> list[Tensor]:
        """Zeroed rows for the halo rows of a unit: views of what will be sent.

        The worker's own rows are added to directly.
        """
        if unit == 0:
            return self.totals
        rows, near = self._units[unit].num_rows, self._near.intersection(self._units[unit].owners)
        found = []
        for dtype, width in self.layout.widths():
            if self._sharing is not None and near:
                buffer = self._sharing.allocate((rows, width), dtype)
                self._packed.append(buffer)
                found.append(buffer.rows.zero_())
            else:
                device = self.totals[0].device
                found.append(torch.zeros((rows, width), dtype=dtype, device=device))
                self._packed.append(found[-1])
        return self.layout.unpack(found)

    def send(self, unit: int) -> None:
        """Sends what was started; call once per unit, in the order of the units but for the own."""
        if unit == 0:
            return
        self.drain()
        now, far, near = self._units[unit], [], []
        works: list[Work] = []
        for (dtype, width), packed in zip(self.layout.widths(), self._packed, strict=True):
            far.append(self._swap(packed, now, dtype, width, works))
            near += self._expect(now, dtype, width)
        self._packed = []
        self._pending = (now, far, near, works + [arrival.work for arrival in near])
        network = not self._near.issuperset((*now.owners, *now.peers))
        if self.prefetch == 0 or (network and self.refetches and self.prefetch == 1):
            self.drain()

    def _swap(
        self,
        packed: Tensor | SendBuffer,
        unit: Unit,
        dtype: torch.dtype,
        width: int,
        works: list[Work],
    ) -> Tensor:
        """Sends rows to a unit's owners; returns where those of its far peers will be."""
        whole = packed.rows if isinstance(packed, SendBuffer) else packed
        peers = [peer for peer in unit.peers if peer not in self._near]
        counts = [self.plan.send_counts[peer] for peer in peers]
        buffer = torch.empty((sum(counts), width), dtype=dtype, device=self.totals[0].device)
        going = zip(unit.owners, whole.split(unit.counts), strict=True)
        encoded = self.layout.encoded
        sends = [(owner, encoded(rows)) for owner, rows in going if owner not in self._near]
        landing = self.layout.wire.landing(buffer)
        receives = list(zip(peers, landing.split(counts), strict=True)) if counts else []
        works += post_pairs(self.plan, sends, receives, self.label)
        if self._sharing is not None and isinstance(packed, SendBuffer):
            # After the network has read its part: the memory is given away.
            parts = dict(zip(unit.owners, unit.counts, strict=True))
            works.append(self._sharing.send(packed, parts, self.label))
        return buffer

    def _expect(self, unit: Unit, dtype: torch.dtype, width: int) -> list[Incoming]:
        """Rows of a unit's peers that share memory."""
        if self._sharing is None:
            return []
        counts = {peer: self.plan.send_counts[peer] for peer in unit.peers if peer in self._near}
        receive = self._sharing.receive
        return [receive(peer, (n, width), dtype, self.label) for peer, n in counts.items()]

    def drain(self) -> None:
        """Waits for the unit in flight and takes in what came from its peers."""
        if self._pending is None:
            return
        unit, far, near, works = self._pending
        self._pending = None
        for work in works:
            work.wait()
        self.layout.land(far)
        peers = [peer for peer in unit.peers if peer not in self._near]
        counts = [self.plan.send_counts[peer] for peer in peers]
        for peer, *part in zip(peers, *(buffer.split(counts) for buffer in far), strict=False):
            self._take(peer, slice(None), self.layout.unpack(part))
        for k, peer in enumerate(peer for peer in unit.peers if peer in self._near):
            arrived = near[k :: len(unit.peers) - len(peers)]
            everything = [slice(0, arrived[0].rows.size(0))]
            for piece in pieces_of(arrived[0].rows) if self.in_pieces else everything:
                parts = [arrival.rows[piece] for arrival in arrived]
                self._take(peer, piece, self.layout.unpack(parts))
                del parts
                for arrival in arrived:
                    arrival.pause()
            for arrival in arrived:
                arrival.release()


class GradientReturn(RowReturn):
    """Sends gradients of source rows to their owners, which add them up.

    Adjoint of :class:`ShardStream`. All workers make one together.

    Args:
        plan: The halo plan.
        totals: Gradients of the worker's own rows, ``[num_local, *]``, added to in place.
        layer: Whom the ledger charges.
        prefetch: Units fetched ahead; 0 leaves nothing in flight.
        refetches: Whether rows are fetched meanwhile.
        wire: How rows travel; exactly by default.
    """

    def __init__(
        self,
        plan: HaloPlan,
        totals: Sequence[Tensor],
        layer: str,
        prefetch: int,
        refetches: bool = False,
        wire: Wire | None = None,
    ) -> None:
        plan.comm.returning()
        label: Label = (layer, "backward", "gradient")
        super().__init__(plan, totals, label, prefetch, refetches, wire)

    def _take(self, peer: int, place: slice, rows: Sequence[Tensor]) -> None:
        own = self.plan.send_rows(peer)[place]
        for total, part in zip(self.totals, rows, strict=True):
            add_distinct_rows(total, own, part)
