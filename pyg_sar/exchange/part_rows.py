"""Halo rows of parts that are hosted several to a process, and their gradients on the way back.

[Note: one block of halo rows] A part's sources are two units: its own rows, and the rows of all
other parts at once, in the order of its halo. So each block of edges has all of them together, and
a part's sums are made in the same order wherever the others are: results are the same to the bit
for any number of processes.

[Note: published rows] In each pass a part publishes the rows that other parts need of it, each
once. When all parts of a process have come so far, rows that other processes' parts need go there,
each once per process. Then a consumer that finds rows by an index reads them in these tables, part
after part; for others, and from a store, each part's halo is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm.host import Host, Started
from pyg_sar.comm.messages import count, count_all
from pyg_sar.comm.part_communicator import TRANSPORT, PartCommunicator
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.exchange.part_tables import Routes, StoredTables, Tables, exchange_rows, narrowed
from pyg_sar.exchange.rows import WHOLE, RowSink, RowSource, Travel, UnitRows, layout_of
from pyg_sar.exchange.wire import Wire
from pyg_sar.ledger import Label, tracked_buffer

_PLAN: Label = ("", "", "plan")
_BITS = 60
STORE = "store"
"""The name of reads from files, in ledgers."""


@dataclass(frozen=True, slots=True)
class PartRows:
    """The exchange of a part's halo rows (:class:`~pyg_sar.exchange.rows.Exchange`)."""

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
        rows: Own rows that the part publishes; ``None``: all.
        routes: The same for all parts of a process.
    """

    rows: Tensor | None
    routes: Routes

    def write(
        self, out: Tensor, tensors: Sequence[Tensor], dtype: torch.dtype, how: Travel
    ) -> None:
        """Fills the part's table ``[num_rows, width]`` with its rows of a dtype, as they travel."""
        layout, device = layout_of(*[(t.dtype, t.shape[1:]) for t in tensors]), tensors[0].device
        with torch.no_grad():
            if how.wire.is_exact and device == out.device:
                layout.write(out, tensors, dtype, self.rows, how.scale)
                return
            rows = torch.arange(out.size(0), device=device) if self.rows is None else self.rows
            if rows.numel():
                out.copy_(how.wire.encode(layout.pack(tensors, rows, dtype, how.scale)))


def published_rows(plan: HaloPlan) -> Published:
    """The plan's published rows."""
    if plan.published is None:
        comm: Any = plan.comm
        sends = [plan.send_rows(q).cpu() for q in range(plan.world_size)]
        waits = comm.host.store is not None
        rows: Tensor | None = _by_readers(sends) if waits else torch.unique(torch.cat(sends))
        if rows is not None and rows.numel() >= WHOLE * plan.num_local and not waits:
            rows = None  # All are copied faster than most of them.
        count, positions = plan.num_local, sends
        if rows is not None:
            count, places = rows.numel(), torch.empty(plan.num_local, dtype=torch.long)
            places[rows] = torch.arange(count)
            positions = [places[wanted] for wanted in sends]
            rows = rows.to(plan.send_index.device)
        thing = positions, plan.halo_counts, count

        def combine(brought: dict[int, Any]) -> Any:
            return _agree(comm.host, brought)

        routes = comm.come("halo plan", _PLAN, "", thing, combine)()
        plan.published = Published(rows, routes)
    found: Published = plan.published
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
    """Where each part's halo rows are; and what goes to, and comes from, other processes."""
    outer, parts, where = host.outer, host.parts, host.rows_on
    index: dict[int, list[Any]] = {k: [None] * host.num_parts for k in parts}
    leaving: dict[int, dict[int, Tensor]] = {}
    sends: list[Tensor | None] = [None] * outer.world_size
    receives: list[Tensor | None] = [None] * outer.world_size
    sizes = {k: brought[k][2] for k in parts}
    for k in parts:
        for q in parts:
            index[k][q] = brought[q][0][k]
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
            index[k][q] = part
    away = {w: {k: rows.to(where) for k, rows in found.items()} for w, found in leaving.items()}
    piece = min((size for size in pieces if size is not None), default=None)
    first = [0, *accumulate(sizes[q] for q in range(host.num_parts))]
    places = {
        k: narrowed(torch.cat([part + first[q] for q, part in enumerate(parts)])).to(where)
        for k, parts in index.items()
    }
    return Routes([sizes[q] for q in range(host.num_parts)], places, away, piece)


# Rows come ####################################################################


class PartSource(RowSource):
    """Own rows, then all halo rows, of detached node tensors ``[num_local, *]``."""

    def __init__(self, plan: HaloPlan, tensors: Sequence[Tensor], how: Travel) -> None:
        self.plan, self.tensors, self.how, self.label = plan, list(tensors), how, how.label
        self.layout = layout_of(*[(t.dtype, t.shape[1:]) for t in tensors])
        self.published, self._held = published_rows(plan), 0
        # All parts' rows are waited for at once: sums of own edges would wait in the store.
        self._tables: Tables | None = self._publish()()

    def open(self, unit: int) -> UnitRows:
        """Own rows as they are; halo rows by owner: where they lie, or gathered."""
        if unit == 0:
            return UnitRows(self.tensors)
        tables, self._tables = self._tables, None
        if tables is None:
            raise RuntimeError("Halo rows are opened once")
        found = self._in_place(tables)
        return self._gathered(tables) if found is None else found

    def _in_place(self, tables: Tables) -> UnitRows | None:
        """The halo rows where they lie, if the consumer and the tables allow it."""
        how, on_cpu = self.how, self.tensors[0].device.type == "cpu"
        if not how.in_place or not how.wire.is_exact or not on_cpu:
            return None
        found = tables.in_place(self.plan.rank)
        if found is None:
            return None
        self._count(0, 0)
        self._hold(self.plan.num_halo)
        rows, places = found
        return UnitRows(rows if self.layout.plain else self.layout.unpack(rows), places)

    def _gathered(self, tables: Tables) -> UnitRows:
        plan, wire, buffers = self.plan, self.how.wire, []
        for number, (dtype, width) in enumerate(self.layout.widths):
            counted = plan.num_halo if number == 0 else 0
            shape, device = (plan.num_halo, width), self.tensors[0].device
            ledgers = plan.comm.ledgers
            buffers.append(tracked_buffer(ledgers, self.label[0], counted, shape, dtype, device))
        self._count(*tables.gather(plan.rank, [wire.landing(buffer) for buffer in buffers]))
        for buffer in buffers:
            wire.land(buffer)
        return UnitRows(self.layout.unpack(buffers))

    def close(self, unit: int) -> None:
        """Takes the halo rows back."""
        if unit:
            self._hold(-self._held)

    def _hold(self, rows: int) -> None:
        """Has ledgers count halo rows that are read where they lie as resident."""
        self._held += rows
        for ledger in self.plan.comm.ledgers:
            ledger.hold(self.label[0], rows)

    def _count(self, rows: int, size: int) -> None:
        """Has ledgers count the halo rows, of which so many came from the store."""
        ledgers, label = self.plan.comm.ledgers, (self.label[0], self.label[1], "load")
        count_all(ledgers, label, 0, size, STORE)
        for ledger in ledgers:
            ledger.gather(label, rows, self.plan.num_halo)

    def _publish(self) -> Callable[[], Tables]:
        plan, wire, published = self.plan, self.how.wire, self.published
        comm: Any = plan.comm
        host: Host = comm.host
        kinds = [_message_kind(wire, *kind) for kind in self.layout.widths]
        store = host.store
        name = comm.name_of("rows", self.label, str(kinds))

        def make() -> Tables:
            size = published.routes.first[-1] * _row_bytes(kinds)
            if store is None or store.rows is None or store.holds(size):
                return Tables(host, published.routes, kinds, self.label)
            return StoredTables(host, published.routes, kinds, self.label, store, store.rows)

        def write(number: int, out: Tensor) -> None:
            published.write(out, self.tensors, self.layout.widths[number][0], self.how)

        tables = host.share(plan.rank, name, make)
        tables.publish(plan.rank, write)
        take = host.come(
            plan.rank,
            name,
            None,
            lambda _: Started(tables.exchange(), tables),
            lambda: tables.expects(plan.rank),
        )
        row = _row_bytes(kinds)
        out = {q: n * row for q, n in enumerate(plan.send_counts) if n}
        back = {q: n * row for q, n in enumerate(plan.halo_counts) if n}
        count(comm.ledgers, self.label, out, back, TRANSPORT)
        return take


def _message_kind(wire: Wire, dtype: torch.dtype, width: int) -> tuple[torch.dtype, int]:
    """Dtype and values of a row as it travels."""
    row = wire.encode(torch.zeros(1, width, dtype=dtype))
    return row.dtype, row.size(1)


def _row_bytes(kinds: Sequence[tuple[torch.dtype, int]]) -> int:
    """Bytes of a row, as it travels."""
    return sum(width * dtype.itemsize for dtype, width in kinds)


# Rows go ######################################################################


class PartSink(RowSink):
    """Rows that were computed for the halo go to their owners, which add them up part by part."""

    def __init__(self, plan: HaloPlan, totals: Sequence[Tensor], how: Travel) -> None:
        self.plan, self.totals, self.how = plan, list(totals), how
        self.label, self.wire = how.label, how.wire
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
        kinds = [_message_kind(self.wire, *kind) for kind in layout.widths]
        piece = published_rows(plan).routes.piece

        def combine(brought: dict[int, Any]) -> Any:
            return _return(comm.host, brought, kinds, piece, self.label)

        form = ", ".join(f"{dtype} [*, {width}]" for dtype, width in layout.widths)
        thing = pieces, plan.send_counts
        self._take = comm.come("gradient rows", self.label, form, thing, combine)
        row = _row_bytes(kinds)
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
            self.how.take_in(self.totals, plan.send_rows(src), self.layout.unpack(buffers))


def _return(
    host: Host,
    brought: dict[int, Any],
    kinds: Sequence[tuple[torch.dtype, int]],
    piece: int | None,
    label: Label,
) -> Any:
    """Messages by part that they come from and part that they are for."""
    outer = host.outer
    found: dict[tuple[int, int], Any] = {
        (k, q): brought[k][0][q] for k in host.parts for q in host.parts if q in brought[k][0]
    }
    works = []
    for number, (dtype, width) in enumerate(kinds) if outer.world_size > 1 else ():
        nothing = torch.empty(0, width, dtype=dtype, device=outer.device)
        sends, sizes, pairs = {}, {}, []
        for w, theirs in enumerate(host.hosted):
            if w == outer.rank:
                continue
            sends[w] = [
                brought[k][0][q][number] if q in brought[k][0] else nothing
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
