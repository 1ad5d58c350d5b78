r"""The plan of a cache of published rows: all reads are known beforehand, so its best contents are.

One process runs P parts in turn, always in the same order. In each pass over the parts every part
*publishes* rows, those of its nodes that other parts need, into a file, rows in the order of parts:
the published rows are numbered :math:`0 \ldots M - 1`. When all have published, part after part
gathers its *halo rows*: a fixed ascending list of positions in :math:`0 \ldots M - 1`.

A cache of C rows in memory saves reads of the file. Since it is known when a row is needed next,
its best contents can be computed beforehand, once per partition: after each turn it holds those C
of the rows at hand, its own and those that were just gathered, whose next use is nearest. No other
choice reads fewer rows (Belady, "A study of replacement algorithms for a virtual-storage computer",
IBM Systems Journal 1966).

[Note: what is at hand] Rows are new in every pass, so a pass begins with an empty cache. Published
rows pass through memory, and may enter the cache then without a read. A gathered row lies in the
part's own buffer, beside the cache: a row that will not be needed soon need not enter at all. Rows
that are needed next at the same turn are equally good to keep, so ties don't change the number of
reads; rows in the cache come first, as they need no copy, then those of lower position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Ints = NDArray[Any]

REQUEST_BYTES = 64 * 1024
"""About the bytes that a disk reads in sequence in the time of one more request."""
JOINED_GAPS = 16
"""A request for several runs reads fewer rows than twice so many gaps."""


# The plan #####################################################################


@dataclass(frozen=True, slots=True)
class Turn:
    """One part's gather: where its halo rows come from, and which rows the cache takes up then.

    Rows of a run have successive positions and successive places.

    Attributes:
        part: The part.
        num_halo: Its halo rows H.
        found_slot: Slots of the rows that the cache holds, int32 ``[n]``.
        found_place: Where each of them goes, a number of a halo row, int32 ``[n]``.
        run_start: First positions of the runs that are read, ascending, ``[R]``.
        run_stop: Where each run ends, ``[R]``.
        run_place: Where the first row of each run goes, ``[R]``.
        enter_slot: Slots that take up a row after the gather, int32 ``[m]``.
        enter_place: Which halo row each of them takes, int32 ``[m]``.
    """

    part: int
    num_halo: int
    found_slot: _Ints
    found_place: _Ints
    run_start: _Ints
    run_stop: _Ints
    run_place: _Ints
    enter_slot: _Ints
    enter_place: _Ints

    @property
    def num_loaded(self) -> int:
        """Halo rows that are read from the file."""
        return int((self.run_stop - self.run_start).sum())


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The contents of the cache in a pass, turn by turn.

    Attributes:
        first: Where each part's published rows begin, and at last their number M. ``[P + 1]``.
        num_slots: Rows that the cache holds, at most.
        publish_row: Of each part, its published rows that enter the cache at publication, counted
            from the part's first.
        publish_slot: Where they go.
        turns: The gathers, in their order.
    """

    first: _Ints
    num_slots: int
    publish_row: tuple[_Ints, ...]
    publish_slot: tuple[_Ints, ...]
    turns: tuple[Turn, ...]


def plan_rows(
    needs: Sequence[_Ints],
    first: Sequence[int] | _Ints,
    capacity: int,
    order: Sequence[int] | None = None,
    published_stay: bool = True,
) -> RowPlan:
    r"""Plans which rows the cache holds after each turn, so that the fewest are read.

    Takes time and memory in proportion to :math:`\sum_k H_k + P C + M`.

    Args:
        needs: Positions of the halo rows of each part, ascending, ``[H_k]`` integers.
        first: Where each part's published rows begin, and at last their number M, ``[P + 1]``.
        capacity: Rows that the cache may hold, beside the halo rows of the part whose turn it is.
        order: The parts in the order of their turns; default: ascending.
        published_stay: Whether rows may enter the cache when they are published. The cache is then
            in use from the first publication on.

    Raises:
        ValueError: There are 2^31 published rows or more.
    """
    offsets = np.asarray(first, np.int64)
    turns = range(len(needs)) if order is None else order
    if offsets[-1] >= 2**31:
        raise ValueError(f"Expected fewer than 2^31 published rows (got {offsets[-1]})")
    lists = [needs[part] for part in turns]
    following, opening = next_uses(lists, int(offsets[-1]))
    contents = _Contents(int(offsets[-1]), min(capacity, int(offsets[-1])), len(needs))
    published: _Ints = np.empty(0, np.int64)
    if published_stay:
        published = np.flatnonzero(opening < len(needs))
        published = published[nearest(opening[published], contents.use.size)]
    slots = contents.enter(published, opening[published])
    bounds = np.searchsorted(published, offsets)
    spans = [slice(*pair) for pair in pairwise(bounds.tolist())]
    return RowPlan(
        first=offsets,
        num_slots=contents.use.size,
        publish_row=tuple(
            published[s] - start for s, start in zip(spans, offsets[:-1], strict=True)
        ),
        publish_slot=tuple(slots[s] for s in spans),
        turns=tuple(
            contents.turn(part, rows, uses)
            for part, rows, uses in zip(turns, lists, following, strict=True)
        ),
    )


def next_uses(lists: Sequence[_Ints], num_rows: int) -> tuple[list[_Ints], _Ints]:
    """Returns the turn at which each halo row is needed next, and that of each row's first use.

    A row that is not needed again has the number of turns.
    """
    never = len(lists)
    upcoming = np.full(num_rows, never, np.int32)
    found: list[_Ints] = []
    for turn in reversed(range(never)):
        uses = upcoming[lists[turn]]
        upcoming[lists[turn]] = turn
        found.append(uses)
    return found[::-1], upcoming


def nearest(uses: _Ints, room: int) -> NDArray[np.bool_]:
    """Selects the ``room`` entries of the nearest uses; of equal ones the first."""
    if uses.size <= room:
        return np.ones(uses.size, np.bool_)
    total = np.cumsum(np.bincount(uses))
    limit = int(np.searchsorted(total, room, side="right"))
    chosen: NDArray[np.bool_] = uses < limit
    chosen[np.flatnonzero(uses == limit)[: room - int(chosen.sum())]] = True
    return chosen


class _Contents:
    """The cache while it is planned.

    Attributes:
        slot: The slot of each row, or -1, ``[M]``.
        row: The row in each slot, ``[C]``; of free slots it means nothing.
        use: The turn at which the row of each slot is needed next; ``never``: the slot is free.
        free: The free slots, in the first ``num_free`` entries, ``[C]``.
    """

    def __init__(self, num_rows: int, num_slots: int, never: int) -> None:
        self.slot = np.full(num_rows, -1, np.int32)
        self.row = np.zeros(num_slots, np.int32)
        self.use = np.full(num_slots, never, np.int32)
        self.free = np.arange(num_slots, dtype=np.int32)[::-1].copy()
        self.num_free, self.never = num_slots, never

    def enter(self, rows: _Ints, uses: _Ints) -> _Ints:
        """Puts rows into free slots, and returns these."""
        end, self.num_free = self.num_free, self.num_free - rows.size
        slots: _Ints = np.sort(self.free[self.num_free : end])
        self.slot[rows], self.row[slots], self.use[slots] = slots, rows, uses
        return slots

    def leave(self, slots: _Ints) -> None:
        """Frees slots."""
        self.slot[self.row[slots]], self.use[slots] = -1, self.never
        begin, self.num_free = self.num_free, self.num_free + slots.size
        self.free[begin : self.num_free] = slots

    def turn(self, part: int, rows: _Ints, uses: _Ints) -> Turn:
        """Plans the gather of ``rows``, which are needed next at ``uses``."""
        slot = self.slot[rows]
        found = np.flatnonzero(slot >= 0).astype(np.int32)
        loaded = np.flatnonzero(slot < 0).astype(np.int32)
        start, stop, place = _runs(rows, loaded)
        found_slot = slot[found]
        self.use[found_slot] = uses[found]
        self.leave(found_slot[uses[found] == self.never])
        fresh = loaded[uses[loaded] != self.never]
        if fresh.size > self.num_free:
            held = np.flatnonzero(self.use != self.never)
            kept = nearest(np.concatenate([self.use[held], uses[fresh]]), self.use.size)
            self.leave(held[~kept[: held.size]])
            fresh = fresh[kept[held.size :]]
        slots = self.enter(rows[fresh], uses[fresh])
        return Turn(part, rows.size, found_slot, found, start, stop, place, slots, fresh)


def _runs(rows: _Ints, places: _Ints) -> tuple[_Ints, _Ints, _Ints]:
    """Returns first positions, ends and first places of the runs of ``rows[places]``."""
    if places.size == 0:
        nothing = np.empty(0, np.int64)
        return nothing, nothing, nothing
    positions = rows[places].astype(np.int64)
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    begin = np.concatenate([[0], breaks])
    end = np.concatenate([breaks, [places.size]])
    return positions[begin], positions[end - 1] + 1, places[begin].astype(np.int64)


def spread(starts: _Ints, sizes: _Ints) -> _Ints:
    """Returns ``starts[i], starts[i] + 1, ...``, ``sizes[i]`` numbers for each i."""
    before = np.cumsum(sizes) - sizes
    numbers: _Ints = np.repeat(starts - before, sizes) + np.arange(sizes.sum())
    return numbers


# Requests #####################################################################


def gap_of(row_bytes: int) -> int:
    """Returns the number of rows that are read as fast as a further request would be answered."""
    return REQUEST_BYTES // max(row_bytes, 1)


def joined_runs(turn: Turn, gap: int) -> tuple[_Ints, _Ints]:
    """Returns for each request its first run and the one after its last.

    Runs of one request begin within the same :data:`JOINED_GAPS` gaps of the file, and are shorter
    than that: a request that serves several runs reads them into memory of its own.
    """
    if turn.run_start.size == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    longest = max(JOINED_GAPS * gap, 1)
    apart = turn.run_start[1:] - turn.run_stop[:-1] > gap
    apart |= np.diff(turn.run_start // longest) > 0
    long = turn.run_stop - turn.run_start >= longest
    breaks = np.flatnonzero(apart | long[1:] | long[:-1]) + 1
    return np.concatenate([[0], breaks]), np.concatenate([breaks, [turn.run_start.size]])
