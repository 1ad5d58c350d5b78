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

from pyg_sar.comm.hosting import TRANSPORT, Host, PartCommunicator, Started
from pyg_sar.comm.messages import count
from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.exchange.rows import (
    Merge,
    RowLayout,
    RowSink,
    RowSource,
    UnitRows,
    Use,
    add_distinct_rows,
    tracked_buffer,
)
from pyg_sar.exchange.wire import Wire
from pyg_sar.ledger import Label

_PLAN: Label = ("", "", "plan")


@dataclass(frozen=True, slots=True)
class PartRows:
    """The exchange of a part's halo rows (:class:`~pyg_sar.exchange.rows.Exchange`).

    Args:
        plan: The part's halo plan.
    """

    plan: HaloPlan

    @property
    def num_units(self) -> int:
        """Own rows, and all halo rows."""
        return 2

    def source(
        self,
        tensors: Sequence[Tensor],
        label: Label,
        prefetch: int,
        wire: Wire | None,
        use: Use,
        scale: Tensor | None = None,
    ) -> PartSource:
        """See :meth:`~pyg_sar.exchange.rows.Exchange.source`."""
        return PartSource(self.plan, tensors, label, wire, use, scale)

    def sink(
        self,
        totals: Sequence[Tensor],
        label: Label,
        in_flight: bool | None,
        wire: Wire | None,
        merge: Merge | None = None,
    ) -> PartSink:
        """See :meth:`~pyg_sar.exchange.rows.Exchange.sink`."""
        return PartSink(self.plan, totals, label, wire, merge)


# Which rows go where #########################################################


@dataclass(frozen=True, slots=True)
class Routes:
    """Which published rows a plan's parts read. See [Note: published rows].

    Attributes:
        rows: Own rows that the part publishes, ascending.
        index: Where in each other part's table the rows of its halo are, ``[halo_counts[q]]``.
        leaving: By worker, the rows of the table of each part of this process that go there; the
            same object for all parts of a process.
        arriving: By part of another process, how many of its rows come here.
    """

    rows: Tensor
    index: list[Tensor]
    leaving: dict[int, dict[int, Tensor]]
    arriving: dict[int, int]


def routes_of(plan: HaloPlan) -> Routes:
    """The plan's routes, agreed once by all parts together."""
    if plan.agreed.published is None:
        comm: Any = plan.comm
        sends = [plan.send_rows(q) for q in range(plan.world_size)]
        rows = torch.unique(torch.cat(sends))
        positions = [torch.searchsorted(rows, found) for found in sends]
        thing = positions, plan.halo_counts

        def combine(brought: dict[int, Any]) -> Any:
            return _agree(comm.host, brought)

        index, leaving, arriving = comm.come("halo plan", _PLAN, "", thing, combine)()
        plan.agreed.published = Routes(rows, index[plan.rank], leaving, arriving)
    found: Routes = plan.agreed.published
    return found


def _agree(host: Host, brought: dict[int, tuple[list[Tensor], list[int]]]) -> Any:
    """Index by reading part and owner; and what goes to, and comes from, other processes."""
    outer, parts = host.outer, host.parts
    index: dict[int, list[Any]] = {k: [None] * host.num_parts for k in parts}
    leaving: dict[int, dict[int, Tensor]] = {}
    sends: list[Tensor | None] = [None] * outer.world_size
    receives: list[Tensor | None] = [None] * outer.world_size
    for k in parts:
        for q in parts:
            index[k][q] = _narrowed(brought[q][0][k])
    for w, theirs in enumerate(host.hosted):
        if w == outer.rank:
            continue
        leaving[w], messages = {}, []
        for k in parts:
            wanted = [brought[k][0][q] for q in theirs]
            leaving[w][k] = torch.unique(torch.cat(wanted))
            messages += [torch.searchsorted(leaving[w][k], found) for found in wanted]
        sends[w] = torch.cat(messages)
        receives[w] = torch.empty(
            sum(brought[k][1][q] for k in parts for q in theirs), dtype=torch.long
        )
    mine = {str(w): {str(k): t.numel() for k, t in found.items()} for w, found in leaving.items()}
    everyone = outer.all_gather_object(mine)
    outer.exchange_all(sends, receives, label=_PLAN).wait()
    arriving: dict[int, int] = {}
    for w, theirs in enumerate(host.hosted):
        received = receives[w]
        if received is None:
            continue
        arriving |= {q: everyone[w][str(outer.rank)][str(q)] for q in theirs}
        order = [(q, k) for q in theirs for k in parts]  # as they were sent
        sizes = [brought[k][1][q] for q, k in order]
        for (q, k), part in zip(order, received.split(sizes), strict=True):
            index[k][q] = _narrowed(part)
    return index, leaving, arriving


def _narrowed(index: Tensor) -> Tensor:
    return index.int() if index.numel() == 0 or int(index.max()) < 2**31 else index


# Rows come ####################################################################


class PartSource(RowSource):
    """Own rows, then all halo rows.

    Args:
        plan: The halo plan.
        tensors: Node tensors ``[num_local, *]``, detached.
        label: Whom the ledger charges.
        wire: How rows travel; exactly by default.
        use: How the consumer uses the rows.
        scale: Rows of other parts come multiplied by their number, ``[num_local]``.
    """

    def __init__(
        self,
        plan: HaloPlan,
        tensors: Sequence[Tensor],
        label: Label,
        wire: Wire | None,
        use: Use,
        scale: Tensor | None = None,
    ) -> None:
        self.plan, self.tensors, self.label = plan, list(tensors), label
        self.wire, self.use, self.scale = wire or Wire(), use, scale
        self.layout = RowLayout(tensors)
        self.routes = routes_of(plan)
        self._take: Any = None

    def open(self, unit: int) -> UnitRows:
        """Own rows as they are; halo rows by owner, gathered."""
        if unit == 0:
            self._publish()
            return UnitRows(self.tensors)
        tables, plan = self._take(), self.plan
        buffers = []
        for number, (dtype, width) in enumerate(self.layout.widths):
            shape = plan.num_halo, width
            counted = plan.num_halo if number == 0 else 0
            device = self.tensors[0].device
            buffer = tracked_buffer(plan.comm, self.label[0], counted, shape, dtype, device)
            landing = self.wire.landing(buffer)
            for owner, index in enumerate(self.routes.index):
                if index.numel():
                    into = landing[plan.halo_slice(owner)]
                    torch.index_select(tables[owner][number], 0, index, out=into)
            self.wire.land(buffer)
            buffers.append(buffer)
        return UnitRows(self.layout.unpack(buffers))

    def _publish(self) -> None:
        plan, routes, layout = self.plan, self.routes, self.layout
        comm: Any = plan.comm
        with torch.no_grad():
            tables = [
                self.wire.encode(layout.pack(self.tensors, routes.rows, dtype, self.scale))
                for dtype, _ in layout.widths
            ]

        def combine(brought: dict[int, list[Tensor]]) -> Any:
            return _spread(comm.host, routes, brought, self.label)

        form = ", ".join(f"{dtype} [*, {width}]" for dtype, width in layout.widths)
        self._take = comm.come("rows", self.label, form, tables, combine)
        row = _row_bytes(tables)
        out = {q: n * row for q, n in enumerate(plan.send_counts) if n}
        back = {q: n * row for q, n in enumerate(plan.halo_counts) if n}
        count(comm.ledgers, self.label, out, back, TRANSPORT)


def _row_bytes(tables: Sequence[Tensor]) -> int:
    """Bytes of a row, as it travels."""
    return sum(table.size(1) * table.element_size() for table in tables)


def _spread(host: Host, routes: Routes, brought: dict[int, list[Tensor]], label: Label) -> Any:
    """The tables of all parts: those of this process, and what its parts read of the others."""
    outer = host.outer
    if outer.world_size == 1:
        return brought
    tables: dict[int, Any] = dict(brought)
    works = []
    for number, like in enumerate(brought[host.parts[0]]):
        sends: list[Tensor | None] = [None] * outer.world_size
        receives: list[Tensor | None] = [None] * outer.world_size
        for w, theirs in enumerate(host.hosted):
            if w == outer.rank:
                continue
            wanted = routes.leaving[w]
            sends[w] = torch.cat(
                [brought[k][number].index_select(0, wanted[k]) for k in host.parts]
            )
            sizes = [routes.arriving[q] for q in theirs]
            receives[w] = found = like.new_empty(sum(sizes), *like.shape[1:])
            for q, part in zip(theirs, found.split(sizes), strict=True):
                tables.setdefault(q, []).append(part)
        works.append(outer.exchange_all(sends, receives, label=label))
    return Started(works, tables)


# Rows go ######################################################################


class PartSink(RowSink):
    """Rows that were computed for the halo go to their owners, which add them up part by part.

    Args:
        plan: The halo plan.
        totals: What the part's own rows are added up in, ``[num_local, *]``.
        label: Whom the ledger charges.
        wire: How rows travel; exactly by default.
        merge: Takes in what comes; by default it is added to ``totals``.
    """

    def __init__(
        self,
        plan: HaloPlan,
        totals: Sequence[Tensor],
        label: Label,
        wire: Wire | None = None,
        merge: Merge | None = None,
    ) -> None:
        self.plan, self.totals, self.label = plan, list(totals), label
        self.wire, self._merge = wire or Wire(), merge
        self.layout = RowLayout(totals)
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
            q: [self.wire.encode(packed[plan.halo_slice(q)]) for packed in self._packed]
            for q in range(plan.world_size)
            if plan.halo_counts[q]
        }
        self._packed = []
        widths = [self.wire.encode(torch.zeros(1, w, dtype=d)) for d, w in layout.widths]

        def combine(brought: dict[int, Any]) -> Any:
            return _return(comm.host, brought, widths, self.label)

        form = ", ".join(f"{dtype} [*, {width}]" for dtype, width in layout.widths)
        thing = pieces, plan.send_counts
        self._take = comm.come("gradient rows", self.label, form, thing, combine)
        row = _row_bytes(widths)
        out = {q: n * row for q, n in enumerate(plan.halo_counts) if n}
        back = {q: n * row for q, n in enumerate(plan.send_counts) if n}
        count(comm.ledgers, self.label, out, back, TRANSPORT)

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


def _return(host: Host, brought: dict[int, Any], widths: Sequence[Tensor], label: Label) -> Any:
    """Messages by part that they come from and part that they are for."""
    outer = host.outer
    found: dict[tuple[int, int], Any] = {
        (k, q): brought[k][0][q] for k in host.parts for q in host.parts if q in brought[k][0]
    }
    works = []
    for number, like in enumerate(widths) if outer.world_size > 1 else ():
        sends: list[Tensor | None] = [None] * outer.world_size
        receives: list[Tensor | None] = [None] * outer.world_size
        for w, theirs in enumerate(host.hosted):
            if w == outer.rank:
                continue
            empty = like[:0]
            sends[w] = torch.cat(
                [
                    brought[k][0][q][number] if q in brought[k][0] else empty
                    for q in theirs
                    for k in host.parts
                ]
            )
            order = [(q, k) for k in host.parts for q in theirs]  # as they were sent
            sizes = [brought[k][1][q] for q, k in order]
            receives[w] = arrived = like.new_empty(sum(sizes), like.size(1))
            for pair, part in zip(order, arrived.split(sizes), strict=True):
                if part.numel():
                    found.setdefault(pair, []).append(part)
        works.append(outer.exchange_all(sends, receives, label=label))
    return Started(works, found)


def is_hosted(plan: HaloPlan) -> bool:
    """True where the plan's part shares its process with others."""
    return isinstance(plan.comm, PartCommunicator) and plan.world_size > 1
