"""Halo rows of parts that are hosted several to a process, and their gradients on the way back.

[Note: one block of halo rows] A part's sources are two units: its own rows, and the rows of all
other parts at once, in the order of its halo. So each block of edges has all of them together, and
a part's sums are made in the same order wherever the others are: results are the same to the bit
for any number of processes.

[Note: published rows] In each pass a part publishes the rows that other parts need of it, each
once. When all parts of a process have come so far, rows that other processes' parts need go there,
each once per process. Then part after part gathers its halo from these tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm.host import Host, Started
from pyg_sar.comm.messages import count, count_all
from pyg_sar.comm.part_communicator import TRANSPORT, PartCommunicator
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.exchange.part_tables import Routes, StoredTables, Tables, exchange_rows, narrowed
from pyg_sar.exchange.rows import (
    RowSink,
    RowSource,
    Travel,
    UnitRows,
    Use,
    add_distinct_rows,
    layout_of,
)
from pyg_sar.ledger import Label, tracked_buffer

_PLAN: Label = ("", "", "plan")
_BITS = 60
STORE = "store"
"""The name of reads from files, in ledgers."""


@dataclass(frozen=True, slots=True)
class PartRows:
    """The exchange of a part's halo rows (:class:`~pyg_sar.exchange.rows.Exchange`).

    Args:
        plan: The part's halo plan.
    """

    plan: HaloPlan

    def source(self, tensors: Sequence[Tensor], how: Travel) -> PartSource:
        """See :meth:`~pyg_sar.exchange.rows.Exchange.source`."""
        return PartSource(self.plan, tensors, how)

    def sink(self, totals: Sequence[Tensor], how: Travel) -> PartSink:
        """See :meth:`~pyg_sar.exchange.rows.Exchange.sink`."""
        return PartSink(self.plan, totals, how)


# Which rows go where #########################################################


@dataclass(frozen=True, slots=True)
class Published:
    """A plan's published rows, agreed once by all parts together. See [Note: published rows].

    Attributes:
        rows: Own rows that the part publishes, those with the same readers one after another.
        routes: The same for all parts of a process.
    """

    rows: Tensor
    routes: Routes


def published_rows(plan: HaloPlan) -> Published:
    """The plan's published rows."""
    if plan.agreed.published is None:
        comm: Any = plan.comm
        sends = [plan.send_rows(q).cpu() for q in range(plan.world_size)]
        rows = _by_readers(sends)
        places = torch.empty(plan.num_local, dtype=torch.long)
        places[rows] = torch.arange(rows.numel())
        positions = [places[found] for found in sends]
        thing = positions, plan.halo_counts, rows.numel()

        def combine(brought: dict[int, Any]) -> Any:
            return _agree(comm.host, brought)

        routes = comm.come("halo plan", _PLAN, "", thing, combine)()
        plan.agreed.published = Published(rows.to(plan.send_index.device), routes)
    found: Published = plan.agreed.published
    return found


def _by_readers(sends: Sequence[Tensor]) -> Tensor:
    """Rows that are sent to anyone: those with the same readers one after another.

    What a part reads of a table that is in a file are then few runs.
    """
    rows, place = torch.unique(torch.cat(list(sends)), return_inverse=True)
    order = torch.arange(rows.numel())
    reader = torch.arange(len(sends)).repeat_interleave(torch.tensor([s.numel() for s in sends]))
    # By sets of readers as numbers of 60 bits, the first readers' at last.
    for start in reversed(range(0, len(sends), _BITS)):
        some = (reader >= start) & (reader < start + _BITS)
        bits = torch.ones((), dtype=torch.long) << (_BITS - 1 - (reader[some] - start))
        key = torch.zeros(rows.numel(), dtype=torch.long).index_add_(0, place[some], bits)
        order = order[key[order].argsort(descending=True, stable=True)]
    return rows[order]


def _agree(host: Host, brought: dict[int, tuple[list[Tensor], list[int], int]]) -> Routes:
    """Index by reading part and owner; and what goes to, and comes from, other processes."""
    outer, parts, where = host.outer, host.parts, host.rows_on
    index: dict[int, list[Any]] = {k: [None] * host.num_parts for k in parts}
    leaving: dict[int, dict[int, Tensor]] = {}
    sends: list[Tensor | None] = [None] * outer.world_size
    receives: list[Tensor | None] = [None] * outer.world_size
    sizes = {k: brought[k][2] for k in parts}
    for k in parts:
        for q in parts:
            index[k][q] = narrowed(brought[q][0][k]).to(where)
    with host.unpaged():
        for w, theirs in enumerate(host.hosted):
            if w == outer.rank:
                continue
            leaving[w], messages = {}, []
            for k in parts:
                wanted = [brought[k][0][q] for q in theirs]
                leaving[w][k] = torch.unique(torch.cat(wanted))
                messages += [torch.searchsorted(leaving[w][k], found) for found in wanted]
            sends[w] = torch.cat(messages)
            count = sum(brought[k][1][q] for k in parts for q in theirs)
            receives[w] = torch.empty(count, dtype=torch.long)
        mine = [
            [found[k].numel() for k in parts] if (found := leaving.get(w)) else []
            for w in range(outer.world_size)
        ]
        counts, pieces = zip(*outer.all_gather_object((mine, host.piece)), strict=True)
        outer.exchange_all(sends, receives, label=_PLAN).wait()
    for w, theirs in enumerate(host.hosted):
        received = receives[w]
        if received is None:
            continue
        sizes |= dict(zip(theirs, counts[w][outer.rank], strict=True))
        order = [(q, k) for q in theirs for k in parts]  # as they were sent
        cuts = [brought[k][1][q] for q, k in order]
        for (q, k), part in zip(order, received.split(cuts), strict=True):
            index[k][q] = narrowed(part.clone()).to(where)
    away = {w: {k: rows.to(where) for k, rows in found.items()} for w, found in leaving.items()}
    piece = min((size for size in pieces if size is not None), default=None)
    return Routes([sizes[q] for q in range(host.num_parts)], index, away, piece)


# Rows come ####################################################################


class PartSource(RowSource):
    """Own rows, then all halo rows.

    Args:
        plan: The halo plan.
        tensors: Node tensors ``[num_local, *]``, detached.
        how: How rows travel.
    """

    def __init__(self, plan: HaloPlan, tensors: Sequence[Tensor], how: Travel) -> None:
        self.plan, self.tensors, self.label = plan, list(tensors), how.label
        self.wire, self.use, self.scale = how.wire, how.use, how.scale
        self.layout = layout_of(*[(t.dtype, t.shape[1:]) for t in tensors])
        self.published = published_rows(plan)
        self._take: Any = None

    def open(self, unit: int) -> UnitRows:
        """Own rows as they are; halo rows by owner, gathered."""
        if unit == 0:
            self._publish()
            return UnitRows(self.tensors)
        plan, take, self._take = self.plan, self._take, None
        tables: Tables = take()
        buffers = []
        for number, (dtype, width) in enumerate(self.layout.widths):
            counted = plan.num_halo if number == 0 and self.use is Use.KEEPS else 0
            shape, device = (plan.num_halo, width), self.tensors[0].device
            ledgers = plan.comm.ledgers
            buffers.append(tracked_buffer(ledgers, self.label[0], counted, shape, dtype, device))
        self._hold(plan.num_halo)
        rows, size = tables.gather(plan.rank, [self.wire.landing(buffer) for buffer in buffers])
        label = (self.label[0], self.label[1], "load")
        count_all(plan.comm.ledgers, label, 0, size, STORE)
        for ledger in plan.comm.ledgers:
            ledger.gather(label, rows, plan.num_halo)
        for buffer in buffers:
            self.wire.land(buffer)
        return UnitRows(self.layout.unpack(buffers))

    def close(self, unit: int) -> None:
        """Takes the halo rows back."""
        if unit:
            self._hold(-self.plan.num_halo)

    def _hold(self, rows: int) -> None:
        """Has ledgers count halo rows, which are not kept, as resident."""
        if self.use is not Use.KEEPS:
            for ledger in self.plan.comm.ledgers:
                ledger.hold(self.label[0], rows)

    def _publish(self) -> None:
        plan, layout = self.plan, self.layout
        rows, routes = self.published.rows, self.published.routes
        comm: Any = plan.comm
        host: Host = comm.host
        with torch.no_grad():
            messages = [
                self.wire.encode(layout.pack(self.tensors, rows, dtype, self.scale))
                for dtype, _ in layout.widths
            ]
        kinds = [(message.dtype, message.size(1)) for message in messages]
        store = host.store
        name = comm.name_of("rows", self.label, str(kinds))

        def make() -> Tables:
            if store is None or store.rows is None:
                return Tables(host, routes, kinds, self.label)
            return StoredTables(host, routes, kinds, self.label, store, store.rows)

        tables = host.share(plan.rank, name, make)
        tables.publish(plan.rank, messages)
        self._take = host.come(
            plan.rank,
            name,
            None,
            lambda _: Started(tables.exchange(), tables),
            lambda: tables.expects(plan.rank),
        )
        row = _row_bytes(messages)
        out = {q: n * row for q, n in enumerate(plan.send_counts) if n}
        back = {q: n * row for q, n in enumerate(plan.halo_counts) if n}
        count(comm.ledgers, self.label, out, back, TRANSPORT)


def _row_bytes(tables: Sequence[Tensor]) -> int:
    """Bytes of a row, as it travels."""
    return sum(table.size(1) * table.element_size() for table in tables)


# Rows go ######################################################################


class PartSink(RowSink):
    """Rows that were computed for the halo go to their owners, which add them up part by part.

    Args:
        plan: The halo plan.
        totals: What the part's own rows are added up in, ``[num_local, *]``.
        how: How rows travel.
    """

    def __init__(self, plan: HaloPlan, totals: Sequence[Tensor], how: Travel) -> None:
        self.plan, self.totals, self.label = plan, list(totals), how.label
        self.wire, self._merge = how.wire, how.merge
        self.layout = layout_of(*[(t.dtype, t.shape[1:]) for t in totals])
        self._packed: list[Tensor] = []
        self._take: Any = None

    def open(self, unit: int) -> list[Tensor]:
        """Zeroed rows for the halo; of unit 0, what own rows are added up in."""
        if unit == 0:
            return self.totals
        device = self.totals[0].device
        self._packed = [
            torch.zeros((self.plan.num_halo, width), dtype=dtype, device=device)
            for dtype, width in self.layout.widths
        ]
        return self.layout.unpack(self._packed)

    def close(self, unit: int) -> None:
        """Hands the halo's rows to their owners."""
        if unit == 0:
            return
        plan, layout = self.plan, self.layout
        comm: Any = plan.comm
        pieces = {
            q: [self._piece(packed[plan.halo_slice(q)]) for packed in self._packed]
            for q in range(plan.world_size)
            if plan.halo_counts[q]
        }
        self._packed = []
        device = self.totals[0].device
        like = [torch.zeros(1, width, dtype=dtype, device=device) for dtype, width in layout.widths]
        widths = [self.wire.encode(row) for row in like]
        piece = published_rows(plan).routes.piece

        def combine(brought: dict[int, Any]) -> Any:
            return _return(comm.host, brought, widths, piece, self.label)

        form = ", ".join(f"{dtype} [*, {width}]" for dtype, width in layout.widths)
        thing = pieces, plan.send_counts
        self._take = comm.come("gradient rows", self.label, form, thing, combine)
        row = _row_bytes(widths)
        out = {q: n * row for q, n in enumerate(plan.halo_counts) if n}
        back = {q: n * row for q, n in enumerate(plan.send_counts) if n}
        count(comm.ledgers, self.label, out, back, TRANSPORT)

    def _piece(self, rows: Tensor) -> Tensor:
        """Rows for one owner; in the store each owner's are memory of their own."""
        message = self.wire.encode(rows)
        comm: Any = self.plan.comm
        return message if comm.host.store is None else message.clone()

    def finish(self) -> None:
        """Waits for the rows of all parts, and takes them in, in their order."""
        plan, found = self.plan, self._take()
        for src in range(plan.world_size):
            messages = found.pop((src, plan.rank), None)
            if messages is None:
                continue
            buffers = []
            for (dtype, width), message in zip(self.layout.widths, messages, strict=True):
                buffer = message
                if message.dtype != dtype or message.size(1) != width:
                    buffer = message.new_empty(message.size(0), width, dtype=dtype)
                    self.wire.landing(buffer).copy_(message)
                    self.wire.land(buffer)
                buffers.append(buffer)
            index, rows = plan.send_rows(src), self.layout.unpack(buffers)
            if self._merge is not None:
                self._merge(index, rows)
                continue
            for total, part in zip(self.totals, rows, strict=True):
                add_distinct_rows(total, index, part)


def _return(
    host: Host, brought: dict[int, Any], widths: Sequence[Tensor], piece: int | None, label: Label
) -> Any:
    """Messages by part that they come from and part that they are for."""
    outer = host.outer
    found: dict[tuple[int, int], Any] = {
        (k, q): brought[k][0][q] for k in host.parts for q in host.parts if q in brought[k][0]
    }
    works = []
    for number, like in enumerate(widths) if outer.world_size > 1 else ():
        sends, sizes, pairs = {}, {}, []
        for w, theirs in enumerate(host.hosted):
            if w == outer.rank:
                continue
            sends[w] = [
                brought[k][0][q][number] if q in brought[k][0] else like[:0]
                for q in theirs
                for k in host.parts
            ]
            order = [(q, k) for k in host.parts for q in theirs]  # as they were sent
            sizes[w] = [brought[k][1][q] for q, k in order]
            pairs.append((w, order))
        some, arrived = exchange_rows(host, sends, sizes, piece, label)
        works += some
        for w, order in pairs:
            for pair, part in zip(order, arrived[w], strict=True):
                if part.numel():
                    found.setdefault(pair, []).append(part)
    return Started(works, found)


def is_hosted(plan: HaloPlan) -> bool:
    """True where the plan's part shares its process with others."""
    return isinstance(plan.comm, PartCommunicator) and plan.world_size > 1
