"""Tables of published rows, of one pass: in memory, or in the store with a planned cache.

[Note: numbering] Published rows are numbered over all parts that are read here, in the order of the
parts: of parts of this process all that they publish, of others what this process's parts read. In
memory they lie in one tensor in this order, where consumers read them by their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyg_sar.comm.backends import to_bytes
from pyg_sar.comm.host import Host
from pyg_sar.comm.issuer import Work
from pyg_sar.exchange.row_plan import RowPlan, Turn, gap_of, joined_runs, plan_rows, spread
from pyg_sar.ledger import Label
from pyg_sar.store.part_store import PartStore
from pyg_sar.store.row_file import RowFile

_Ints = NDArray[Any]
Read = Callable[[int, int, Tensor], None]
"""``read(start, stop, out)`` fills ``out`` with the published rows from ``start`` to ``stop``."""
Write = Callable[[int, Tensor], None]
"""``write(number, out)`` fills ``out`` with the rows that a part publishes, of one message."""

MOVE_BYTES = 2**20
"""Rows are copied by index in groups of so many bytes, which bounds the memory of the copies."""


class RowCache:
    """The rows of one pass: filled at publications, read and filled again at gathers.

    Args:
        plan: The contents, turn by turn.
        slots: Memory for the rows, of shape ``[plan.num_slots, ...]``; what it held is lost.
        read: Reads rows from the file.
        gap: Runs with at most so many rows between them are read in one request.
    """

    def __init__(self, plan: RowPlan, slots: Tensor, read: Read, gap: int = 0) -> None:
        self.plan, self.slots, self.read, self.gap = plan, slots, read, gap
        self._turns = iter(plan.turns)

    def publish(self, part: int, rows: Tensor) -> None:
        """Takes up those of the rows that a part publishes, ``[n, ...]``, which the plan keeps."""
        _move(rows, self.plan.publish_row[part], self.slots, self.plan.publish_slot[part])

    def gather(self, part: int, out: Tensor) -> int:
        """Fills the halo rows ``[H, ...]`` of the part whose turn it is, and takes up those that
        the plan keeps; returns how many came from the file.
        """
        turn = next(self._turns)
        if part != turn.part:
            raise RuntimeError(f"Part {part} gathers rows at the turn of part {turn.part}")
        _move(self.slots, turn.found_slot, out, turn.found_place)
        self._load(turn, out)
        _move(out, turn.enter_place, self.slots, turn.enter_slot)
        return turn.num_loaded

    def _load(self, turn: Turn, out: Tensor) -> None:
        sizes = turn.run_stop - turn.run_start
        begin, end = joined_runs(turn, self.gap)
        for i, j in zip(begin.tolist(), end.tolist(), strict=True):
            start, stop = int(turn.run_start[i]), int(turn.run_stop[j - 1])
            place, last = int(turn.run_place[i]), int(turn.run_place[j - 1] + sizes[j - 1])
            if last - place == stop - start:  # What lies between is found: the same rows again.
                self.read(start, stop, out[place:last])
                continue
            rows = out.new_empty((stop - start, *out.shape[1:]))
            self.read(start, stop, rows)
            among = spread(turn.run_start[i:j] - start, sizes[i:j])
            _move(rows, among, out, spread(turn.run_place[i:j], sizes[i:j]))


def _move(source: Tensor, rows: _Ints, target: Tensor, places: _Ints) -> None:
    """Sets ``target[places] = source[rows]``, group by group."""
    group = max(1, MOVE_BYTES * source.size(0) // max(source.nbytes, 1)) if source.size(0) else 1
    for start in range(0, rows.size, group):
        some = slice(start, start + group)
        index = torch.from_numpy(rows[some]).to(source.device)
        where = torch.from_numpy(places[some].astype(np.int64)).to(target.device)
        target.index_copy_(0, where, source.index_select(0, index).to(target.device))


def exchange_rows(
    host: Host,
    sends: Mapping[int, Sequence[Tensor]],
    sizes: Mapping[int, Sequence[int]],
    piece: int | None,
    label: Label,
) -> tuple[list[Work], dict[int, list[Tensor]]]:
    """Exchanges rows of one dtype and width with other workers. Their sizes are known there.

    Args:
        host: The process. What is on its way stays in memory.
        sends: By worker, the rows that go there: tensors ``[*, width]``, one after another.
        sizes: By worker, the rows of each tensor that comes from there.
        piece: Bytes that may be on their way at once, in both directions, the same on all workers.
            The rest may wait in the store. ``None``: all rows.
        label: Whom the ledgers charge.

    Returns:
        What to wait for, and by worker the tensors that come, which are there then.
    """
    outer, like = host.outer, next(iter(sends.values()))[0]
    width, row = like.size(1), like.size(1) * like.element_size()
    going = {w: sum(rows.size(0) for rows in tensors) for w, tensors in sends.items()}
    coming = {w: sum(counts) for w, counts in sizes.items()}
    everyone = range(outer.world_size)
    out: dict[int, Tensor] = {}
    if piece is None:
        joins = sum(going[w] for w, tensors in sends.items() if len(tensors) > 1)
        with host.unpaged((joins + sum(coming.values())) * row):
            for w, tensors in sends.items():
                out[w] = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
            into = {w: like.new_empty(count, width) for w, count in coming.items()}
        arrived = {w: list(into[w].split(list(counts))) for w, counts in sizes.items()}
        ways = [out.get(w) for w in everyone], [into.get(w) for w in everyone]
        return [outer.exchange_all(*ways, label=label)], arrived
    arrived = {w: [like.new_empty(n, width) for n in counts] for w, counts in sizes.items()}
    most = max([*going.values(), *coming.values()])
    step = min(max(piece // (2 * len(sends) * max(row, 1)), 1), most)
    with host.unpaged(2 * len(sends) * step * row):
        buffers = {w: (like.new_empty(step, width), like.new_empty(step, width)) for w in sends}
    for start in range(0, most, max(step, 1)):
        into = {}
        for w, (there, here) in buffers.items():
            out[w] = there[: min(max(going[w] - start, 0), step)]
            into[w] = here[: min(max(coming[w] - start, 0), step)]
            _copy(sends[w], start, out[w], to=False)
        ways = [out.get(w) for w in everyone], [into.get(w) for w in everyone]
        outer.exchange_all(*ways, label=label).wait()
        for w in sends:
            _copy(arrived[w], start, into[w], to=True)
    return [], arrived


def _copy(tensors: Sequence[Tensor], start: int, buffer: Tensor, to: bool) -> None:
    """Copies a buffer to rows, from one on, of tensors that lie one after another; or from them."""
    stop, first = start + buffer.size(0), 0
    for tensor in tensors:
        low, high = max(start, first), min(stop, first + tensor.size(0))
        if low < high:
            rows, among = tensor[low - first : high - first], buffer[low - start : high - start]
            (rows if to else among).copy_(among if to else rows)
        first += tensor.size(0)


PLANNING = 64, 16
"""Bytes that planning takes for each halo row, and for each published row."""


def narrowed(index: Tensor) -> Tensor:
    """32-bit numbers where they fit."""
    return index.int() if index.numel() == 0 or int(index.max()) < 2**31 else index


class Routes:
    """Which published rows the parts of this process read, of one plan.

    Args:
        sizes: Rows that each part publishes, or that are read of it here. ``[P]``.
        places: By part of this process, the numbers of its halo rows (see [Note: numbering]).
        leaving: By worker and part of this process, the rows of its table that go there.
        piece: Bytes of rows that are on their way at once (:func:`exchange_rows`).

    Attributes:
        first: The number of each part's first row, and at last how many there are, ``[P + 1]``.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        places: dict[int, Tensor],
        leaving: dict[int, dict[int, Tensor]],
        piece: int | None,
    ) -> None:
        self.sizes, self.places, self.leaving = list(sizes), places, leaving
        self.first, self.piece = [0, *accumulate(sizes)], piece
        self._plans: dict[int, StoredPlan] = {}

    def planning_bytes(self) -> int:
        """Bytes that planning takes at most, about: NumPy's, which the store does not count."""
        halo = sum(places.numel() for places in self.places.values())
        return PLANNING[0] * halo + PLANNING[1] * sum(self.sizes)

    def plan(self, host: Host, store: PartStore, capacity: int) -> StoredPlan:
        """The contents of a cache of so many rows, turn by turn. Made once."""
        found = self._plans.get(capacity)
        if found is None:
            store.make_room(self.planning_bytes())
            found = self._plans[capacity] = StoredPlan(self, host, capacity)
            store.count()  # Planning has given its memory back.
        return found


class StoredPlan:
    """The planned cache, of so many rows, of a plan's published rows.

    Attributes:
        rows: The plan.
        order: By part, the order in which its halo rows ascend in the numbering; ``None``: theirs.
        written: The parts whose rows are read from the file at all.
    """

    rows: RowPlan

    def __init__(self, routes: Routes, host: Host, capacity: int) -> None:
        first = np.array(routes.first)
        needs = [np.empty(0, np.int64) for _ in routes.sizes]
        self.order: dict[int, Tensor | None] = {}
        for part in host.parts:
            need = routes.places[part].numpy().astype(np.int64)
            order = None
            if (np.diff(need) < 0).any():
                order = np.argsort(need)
                need = need[order]
            needs[part] = need
            self.order[part] = None if order is None else torch.from_numpy(order)
        others = [q for q in range(host.num_parts) if q not in host.parts]
        # Passes overlap: rows of the next one are published before the last are gathered. So rows
        # are cached from their publication on only where all of them are.
        stay = bool(first[-1] <= capacity)
        turns = [*host.parts, *others]
        self.rows = plan_rows(needs, first, capacity, turns, stay)
        used = np.zeros(len(routes.sizes) + 1, np.int64)
        for turn in self.rows.turns:
            begin = np.searchsorted(first, turn.run_start, side="right") - 1
            end = np.searchsorted(first, turn.run_stop - 1, side="right") - 1
            np.add.at(used, begin, 1)
            np.add.at(used, end + 1, -1)
        self.written = np.cumsum(used)[:-1] > 0


class Tables:
    """Published rows of one pass, in memory; ``kinds`` are dtype and width of each message."""

    def __init__(
        self, host: Host, routes: Routes, kinds: Sequence[tuple[torch.dtype, int]], label: Label
    ) -> None:
        self.host, self.routes, self.kinds, self.label = host, routes, kinds, label
        self._row_bytes = [width * dtype.itemsize for dtype, width in kinds]
        self._rows: list[Tensor] = []
        self._leaving: dict[int, list[list[Tensor]]] = {}  # by worker, of each message
        self._arriving: list[list[tuple[int, Tensor]]] = [[] for _ in kinds]
        self._order, self._gathered = list(host.parts), 0

    def publish(self, part: int, write: Write) -> None:
        """Takes in a part's table."""
        messages = self._room(part)
        for number, message in enumerate(messages):
            write(number, message)
        k, pieces = part - self.host.parts.start, self.routes.piece is not None
        for w, wanted in self.routes.leaving.items():
            sizes = [wanted[p].numel() for p in self.host.parts]
            if w not in self._leaving and pieces:
                self._leaving[w] = [[m.new_empty(0, m.size(1))] * len(sizes) for m in messages]
            elif w not in self._leaving:
                with self.host.unpaged(sum(sizes) * sum(self._row_bytes)):
                    self._leaving[w] = [[m.new_empty(sum(sizes), m.size(1))] for m in messages]
            for rows, message in zip(self._leaving[w], messages, strict=True):
                if pieces:
                    rows[k] = message.index_select(0, wanted[part])
                else:
                    torch.index_select(message, 0, wanted[part], out=rows[0].split(sizes)[k])
        self._keep(part, messages)

    def exchange(self) -> list[Any]:
        """Exchanges rows with other processes, when all parts of this one have published."""
        host, works = self.host, []
        sizes = {w: [self.routes.sizes[q] for q in host.hosted[w]] for w in self.routes.leaving}
        for number in range(len(self.kinds) if sizes else 0):
            sends = {w: self._leaving[w][number] for w in sizes}
            some, arrived = exchange_rows(host, sends, sizes, self.routes.piece, self.label)
            works += some
            for w, tensors in arrived.items():
                self._arriving[number] += zip(host.hosted[w], tensors, strict=True)
        self._leaving.clear()
        return works

    def _settle(self) -> None:
        """Takes in the tables that came from other processes."""
        arrived, self._arriving = self._arriving, [[] for _ in self.kinds]
        tables: dict[int, list[Tensor]] = {}
        for message in arrived:
            for q, rows in message:
                tables.setdefault(q, []).append(rows)
        for q in sorted(tables):
            self._keep(q, tables[q])

    def expects(self, part: int) -> bool:
        """True where a part may gather now."""
        return True

    def in_place(self, part: int) -> tuple[list[Tensor], Tensor] | None:
        """All published rows of each message, and which of them are a part's halo rows.

        ``None`` where they don't lie in memory: :meth:`gather` fills buffers with them.
        """
        self._settle()
        rows = list(self._rows)
        self._count()
        return rows, self.routes.places[part]

    def gather(self, part: int, into: Sequence[Tensor]) -> tuple[int, int]:
        """Fills a part's halo rows, of each message, in the order of its halo.

        Returns:
            Rows that were read from the store, and their bytes.
        """
        self._settle()
        loaded = [self._gather(part, number, out) for number, out in enumerate(into)]
        self._count()
        rows = max(loaded, default=0)  # of each message the same
        return rows, rows * sum(self._row_bytes)

    def _count(self) -> None:
        self._gathered += 1
        if self._gathered == len(self._order):
            self._close()

    # Where the rows are ------------------------------------------------------

    def _room(self, part: int) -> list[Tensor]:
        """Room for a part's rows, of each message. Its pages come when they are written."""
        first, store = self.routes.first, self.host.store
        if not self._rows:
            self._rows = [
                self.host.take_rows((first[-1], width), dtype) for dtype, width in self.kinds
            ]
        if isinstance(store, PartStore):
            store.make_room((first[part + 1] - first[part]) * sum(self._row_bytes))
        return [rows[first[part] : first[part + 1]] for rows in self._rows]

    def _keep(self, part: int, messages: Sequence[Tensor]) -> None:
        if part not in self.host.parts:  # Others were written there.
            for room, rows in zip(self._room(part), messages, strict=True):
                room.copy_(rows)

    def _gather(self, part: int, number: int, out: Tensor) -> int:
        """Fills a part's halo rows of a message; returns how many were read from the store."""
        rows, places = self._rows[number], self.routes.places[part]
        if out.device != rows.device:
            pin = out.device.type == "cuda"
            buffer = torch.empty(out.shape, dtype=out.dtype, pin_memory=pin)
            torch.index_select(rows, 0, places, out=buffer)
            out.copy_(buffer, non_blocking=True)
        else:
            torch.index_select(rows, 0, places, out=out)
        return 0

    def _close(self) -> None:
        store = self.host.store
        if isinstance(store, PartStore):
            for rows in self._rows:
                store.give_rows(rows)
        self._rows = []


class StoredTables(Tables):
    """Published rows of one pass in the store's file, beside a planned cache in memory."""

    def __init__(
        self,
        host: Host,
        routes: Routes,
        kinds: Sequence[tuple[torch.dtype, int]],
        label: Label,
        store: PartStore,
        file: RowFile,
    ) -> None:
        super().__init__(host, routes, kinds, label)
        self._store, self._file = store, file
        capacity = store.cache_bytes // max(sum(self._row_bytes), 1)
        self.plan = routes.plan(host, store, capacity)
        self._places: list[dict[int, int]] = [{} for _ in kinds]
        self._caches = []
        for number, (dtype, width) in enumerate(kinds):
            slots = store.take_slots((self.plan.rows.num_slots, width), dtype)
            self._caches.append(self._cache(number, slots))

    def _cache(self, number: int, slots: Tensor) -> RowCache:
        first, row = self.plan.rows.first, self._row_bytes[number]

        def read(start: int, stop: int, out: Tensor) -> None:
            data = to_bytes(out)
            part = int(np.searchsorted(first, start, side="right")) - 1
            while start < stop:
                end = min(stop, int(first[part + 1]))
                size = (end - start) * row
                if size and self.plan.written[part]:  # Else it lies between rows that are read.
                    place = self._places[number][part] + (start - int(first[part])) * row
                    self._file.read(place, data[:size])
                data, start = data[size:], end
                part += 1

        return RowCache(self.plan.rows, slots, read, gap_of(row))

    def expects(self, part: int) -> bool:
        """In the order that the cache was planned for. Turns may begin elsewhere after a wait."""
        return self._order[self._gathered] == part

    def in_place(self, part: int) -> None:
        """Rows lie in the file and in the cache."""

    def _room(self, part: int) -> list[Tensor]:
        count = self.routes.sizes[part]
        return [torch.empty(count, width, dtype=dtype) for dtype, width in self.kinds]

    def _keep(self, part: int, messages: Sequence[Tensor]) -> None:
        for number, message in enumerate(messages):
            self._caches[number].publish(part, message)
            if self.plan.written[part]:
                data = to_bytes(message)
                place = self._places[number][part] = self._file.allocate(data.numel())
                self._file.write(place, data)

    def _gather(self, part: int, number: int, out: Tensor) -> int:
        order = self.plan.order[part]
        if order is None:
            return self._caches[number].gather(part, out)
        rows = torch.empty_like(out)
        loaded = self._caches[number].gather(part, rows)
        out.index_copy_(0, order, rows)
        return loaded

    def _close(self) -> None:
        for cache, places, row in zip(self._caches, self._places, self._row_bytes, strict=True):
            self._store.give_slots(cache.slots)
            for part, place in places.items():
                self._file.free(place, self.routes.sizes[part] * row)
        self._caches = []
