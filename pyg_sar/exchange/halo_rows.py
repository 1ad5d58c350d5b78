"""Halo rows from their owners, and their gradients on the way back.

[Note: order of transfers] Every worker goes through the units (:class:`HaloPlan`) in the same order
and posts its transfers in that order; the communicator's issuing thread carries them out first in,
first out. A fetch that is posted ahead therefore never overtakes a gradient that another worker
posts first, and nothing can deadlock. A unit without rows keeps its place; nothing is sent for it.

[Note: shared memory] Rows of a worker of the same host are read from what it published (see
sharing): a source publishes its own tensors once, when it starts. A consumer that finds rows by an
index reads them where they are; for others they are gathered from there when the unit is opened.
Between other workers rows are packed for each peer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyg_sar.comm.shared_memory import SharedBuffer, Subject
from pyg_sar.comm.sharing import Incoming, Sharing, pieces_of
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.exchange.rows import WHOLE, RowSink, RowSource, Travel, UnitRows, layout_of
from pyg_sar.ledger import Label, tracked_buffer

if TYPE_CHECKING:
    from pyg_sar.comm.group import Work

_PLAN: Label = ("", "", "plan")


@dataclass(frozen=True, slots=True)
class HaloRows:
    """The exchange of a halo plan's rows (:class:`~pyg_sar.exchange.rows.Exchange`)."""

    plan: HaloPlan

    def source(self, tensors: Sequence[Tensor], how: Travel) -> HaloSource:
        """See :meth:`~pyg_sar.exchange.rows.Exchange.source`."""
        return HaloSource(self.plan, tensors, how)

    def sink(self, totals: Sequence[Tensor], how: Travel) -> HaloSink:
        """See :meth:`~pyg_sar.exchange.rows.Exchange.sink`."""
        return HaloSink(self.plan, totals, how)


# Which rows workers of one host read in place ################################


@dataclass(frozen=True, slots=True)
class Published:
    """A plan's exchange with workers of the same host. See [Note: publication] in sharing.

    Attributes:
        rows: Own rows that are published, ascending; ``None``: the first :attr:`count`.
        count: How many these are.
        readers: How many of them each peer takes.
        counts: How many rows each peer publishes, where it has halo rows of this worker.
        index: Positions of the halo rows in each of these publications, ``[halo_counts[q]]``;
            none where they are the publication.
    """

    rows: Tensor | None = None
    count: int = 0
    readers: dict[int, int] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    index: dict[int, Tensor] = field(default_factory=dict)


def published_rows(plan: HaloPlan, sharing: Sharing) -> Published:
    """The plan's exchange with workers of the same host, agreed once by all workers together."""
    plan.published = plan.published or _agree(plan, sharing.ranks)
    found: Published = plan.published
    return found


def _agree(plan: HaloPlan, near: frozenset[int]) -> Published:
    sends = {q: plan.send_rows(q) for q in near if plan.send_rows(q).numel()}
    rows: Tensor | None = torch.unique(torch.cat(list(sends.values()))) if sends else None
    count = 0 if rows is None else rows.numel()
    if rows is not None and count >= WHOLE * plan.num_local:
        rows, count = None, plan.num_local
    counts, index = {}, {}
    for owner, peer in plan.peers[1:]:
        message = found = None
        if peer in sends:
            wanted = sends[peer]
            positions = wanted if rows is None else torch.searchsorted(rows, wanted)
            message = torch.cat([positions.new_tensor([count]), positions])
        if owner in near and plan.halo_counts[owner]:
            found = torch.empty(1 + plan.halo_counts[owner], dtype=torch.long)
        plan.comm.exchange(message, peer, found, owner, label=_PLAN).wait()
        if found is not None:
            counts[owner] = int(found[0])
            index[owner] = found[1:].int() if counts[owner] < 2**31 else found[1:]
    readers = {q: part.numel() for q, part in sends.items()}
    return Published(rows, count, readers, counts, index)


class _Near:
    """The base of both ways of a plan's rows, which knows who is on the same host."""

    def __init__(self, plan: HaloPlan, tensors: Sequence[Tensor], how: Travel) -> None:
        self.plan, self.tensors, self.how = plan, list(tensors), how
        self.layout = layout_of(*[(t.dtype, t.shape[1:]) for t in tensors])
        # What is read in place is not rounded, and results shall not depend on who is near.
        self._sharing = plan.comm.sharing if how.wire.is_exact else None
        self._near = frozenset[int]() if self._sharing is None else self._sharing.ranks


# Rows come ####################################################################


@dataclass(slots=True)
class _Fetch:
    """A unit's rows on their way: into buffers, one per dtype, or where their owner has them."""

    buffers: list[Tensor]
    in_place: list[Incoming] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)


class HaloSource(_Near, RowSource):
    """Own rows, then those of each owner.

    At most the rows of ``1 + prefetch`` units are resident (2/N and 3/N of the graph with the
    worker's own). Traffic in: :math:`H_p F b` bytes. The node tensors ``[num_local, *]`` are
    detached.
    """

    def __init__(self, plan: HaloPlan, tensors: Sequence[Tensor], how: Travel) -> None:
        super().__init__(plan, tensors, how)
        self._posted = 1
        self._pending: deque[_Fetch] = deque()
        self._open: _Fetch | None = None
        self._works: list[Work] = []
        self._shared = Published()
        if self._sharing is not None:
            self._shared = published_rows(plan, self._sharing)

    def open(self, unit: int) -> UnitRows:
        """Own rows as they are; rows of each tensor of the unit's owner, in its halo order."""
        plan, how = self.plan, self.how
        if unit == 0:
            self._publish()
            self._post(how.prefetch)
            return UnitRows(self.tensors)
        self._post(unit)
        fetch = self._open = self._pending.popleft()
        for work in fetch.works:
            work.wait()
        self._post(unit + how.prefetch)
        rows, owner = plan.num_rows[unit], plan.peers[unit][0]
        index = self._shared.index.get(owner)
        if fetch.in_place and how.in_place:
            if plan.comm.ledgers:
                fetch.in_place[0].hold(plan.comm.ledgers, how.label[0], rows)
            found = [incoming.rows for incoming in fetch.in_place]
            found = found if self.layout.plain else self.layout.unpack(found)
            return UnitRows(found, index)
        if fetch.in_place:
            fetch.buffers = self._buffers(unit)
            for incoming, buffer in zip(fetch.in_place, fetch.buffers, strict=True):
                for piece in pieces_of(buffer):
                    if index is None:
                        buffer[piece] = incoming.rows[piece]
                    else:
                        torch.index_select(incoming.rows, 0, index[piece], out=buffer[piece])
                    incoming.pause()
                incoming.release()
            fetch.in_place = []
        filled, fetch.buffers = fetch.buffers, []
        for buffer in filled:
            how.wire.land(buffer)
        return UnitRows(self.layout.unpack(filled))

    def close(self, unit: int) -> None:
        """Gives memory back to its owner."""
        fetch, self._open = self._open, None
        if fetch is None:
            return
        for rows in fetch.in_place:
            rows.release()

    def finish(self) -> None:
        """Waits until others' reading of own rows is under way, before these may be changed."""
        for work in self._works:
            work.wait()

    def _publish(self) -> None:
        """Lets workers of the same host read the own rows. See [Note: shared memory]."""
        found, how, sharing = self._shared, self.how, self._sharing
        if sharing is None:
            return
        for dtype, width in self.layout.widths:
            fill = partial(
                self.layout.write,
                tensors=self.tensors,
                dtype=dtype,
                rows=found.rows,
                scale=how.scale,
            )
            shape = found.count, width
            self._works.append(sharing.publish(fill, shape, dtype, found.readers, how.label))

    def _post(self, last: int) -> None:
        """Posts the fetches of units up to ``last``. See [Note: order of transfers]."""
        plan, how, sharing, shared = self.plan, self.how, self._sharing, self._shared
        while self._posted <= min(last, plan.world_size - 1):
            unit = self._posted
            self._posted += 1
            (owner, peer), rows = plan.peers[unit], plan.num_rows[unit]
            fetch = _Fetch([] if owner in self._near else self._buffers(unit))
            for k, (dtype, width) in enumerate(self.layout.widths):
                pack = landing = None
                if peer not in self._near and plan.send_counts[peer]:
                    pack = partial(self._pack, peer, dtype)
                if fetch.buffers and rows:
                    landing = how.wire.landing(fetch.buffers[k])
                if pack is not None or landing is not None or plan.comm.host is not None:
                    works = plan.comm.exchange(pack, peer, landing, owner, label=how.label)
                    fetch.works.append(works)
                if sharing is not None and owner in self._near:
                    shape, subject = (shared.counts.get(owner, 0), width), Subject.PUBLICATION
                    found = sharing.expect(owner, subject, shape, dtype, how.label, rows)
                    fetch.in_place.append(found)
                    fetch.works.append(found.work)
            self._pending.append(fetch)

    def _buffers(self, unit: int) -> list[Tensor]:
        """Room for a unit's rows."""
        count, layer = self.plan.num_rows[unit], self.how.label[0]
        ledgers, device = self.plan.comm.ledgers, self.tensors[0].device
        found = []
        for k, (dtype, width) in enumerate(self.layout.widths):
            counted = count if k == 0 else 0
            found.append(tracked_buffer(ledgers, layer, counted, (count, width), dtype, device))
        return found

    def _pack(self, peer: int, dtype: torch.dtype) -> Tensor:
        """A peer's message of a dtype, made on the issuing thread when its turn has come."""
        rows = self.plan.send_rows(peer)
        packed = self.layout.pack(self.tensors, rows, dtype, self.how.scale)
        return self.how.wire.encode(packed)


# Rows go ######################################################################


class HaloSink(_Near, RowSink):
    """Rows that were computed for a unit go to their owner, which adds them to its own.

    The other way round as :class:`HaloSource`: a row for each halo row, :math:`H_p F b` bytes out.

    [Note: rows in flight] What was computed for one unit travels while the next one is worked on.
    Between workers of one host that takes no memory: the rows stay where they were computed, and
    the owner takes them from there. Over a network they take a buffer at either end.
    """

    def __init__(self, plan: HaloPlan, tensors: Sequence[Tensor], how: Travel) -> None:
        super().__init__(plan, tensors, how)
        self._packed: list[Tensor | SharedBuffer] = []
        self._pending: tuple[int, list[Tensor], list[Incoming], list[Work]] | None = None

    def open(self, unit: int) -> list[Tensor]:
        """Zeroed rows for the unit's halo rows: views of what will be sent."""
        if unit == 0:
            return self.tensors
        rows, owner = self.plan.num_rows[unit], self.plan.peers[unit][0]
        found = []
        for dtype, width in self.layout.widths:
            if self._sharing is not None and owner in self._near:
                buffer = self._sharing.allocate((rows, width), dtype)
                self._packed.append(buffer)
                found.append(buffer.rows.zero_())
            else:
                device = self.tensors[0].device
                found.append(torch.zeros((rows, width), dtype=dtype, device=device))
                self._packed.append(found[-1])
        return self.layout.unpack(found)

    def close(self, unit: int) -> None:
        """Sends the unit's rows, after those of the unit before it have been taken in."""
        if unit == 0:
            return
        self.finish()
        plan, how, sharing = self.plan, self.how, self._sharing
        owner, peer = plan.peers[unit]
        coming = plan.send_counts[peer]
        far: list[Tensor] = []
        near: list[Incoming] = []
        works: list[Work] = []
        for (dtype, width), packed in zip(self.layout.widths, self._packed, strict=True):
            send = landing = None
            if isinstance(packed, Tensor) and plan.halo_counts[owner]:
                send = partial(how.wire.encode, packed)
            if peer not in self._near:
                device = self.tensors[0].device
                far.append(torch.empty((coming, width), dtype=dtype, device=device))
                landing = how.wire.landing(far[-1]) if coming else None
            if send is not None or landing is not None or plan.comm.host is not None:
                works.append(plan.comm.exchange(send, owner, landing, peer, label=how.label))
            if sharing is not None and isinstance(packed, SharedBuffer):
                works.append(sharing.send(packed, {owner: plan.halo_counts[owner]}, how.label))
            if sharing is not None and peer in self._near:
                shape = coming, width
                near.append(sharing.expect(peer, Subject.ROWS, shape, dtype, how.label))
                works.append(near[-1].work)
        self._packed = []
        self._pending = unit, far, near, works
        network = not self._near.issuperset((owner, peer))
        if how.in_flight is None or (network and not how.in_flight):
            self.finish()

    def finish(self) -> None:
        """Waits for the unit in flight and takes in what came from its peer."""
        if self._pending is None:
            return
        unit, far, near, works = self._pending
        self._pending = None
        for work in works:
            work.wait()
        peer = self.plan.peers[unit][1]
        if far and self.plan.send_counts[peer]:
            for buffer in far:
                self.how.wire.land(buffer)
            self.how.take_in(self.tensors, self.plan.send_rows(peer), self.layout.unpack(far))
        elif near and self.plan.send_counts[peer]:
            own = self.plan.send_rows(peer)
            for piece in pieces_of(near[0].rows):
                parts = [arrival.rows[piece] for arrival in near]
                self.how.take_in(self.tensors, own[piece], self.layout.unpack(parts))
                del parts
                for arrival in near:
                    arrival.pause()
        for arrival in near:
            arrival.release()
