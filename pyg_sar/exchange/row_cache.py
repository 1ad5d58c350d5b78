"""A cache of published rows during one pass, filled and read as planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyg_sar.exchange.row_plan import RowPlan, Turn, joined_runs, spread

_Ints = NDArray[Any]
Read = Callable[[int, int, Tensor], None]
"""``read(start, stop, out)`` fills ``out`` with the published rows from ``start`` to ``stop``."""

MOVE_BYTES = 2**20
"""Rows are copied by index in groups of so many bytes, which bounds the memory of the copies."""


class RowCache:
    """The rows of one pass: filled at publications, read and filled again at gathers.

    Args:
        plan: The contents, turn by turn.
        slots: Memory for the rows, of shape ``[plan.num_slots, ...]``; what it held is lost.
        read: Reads rows from the file.
        gap: Runs with at most so many rows between them are read in one request.

    Attributes:
        loaded: Halo rows that came from the file.
        found: Halo rows that came from the cache.
        requests: Calls of ``read``.

    Raises:
        ValueError: When ``slots`` does not have the plan's number of rows.
    """

    def __init__(self, plan: RowPlan, slots: Tensor, read: Read, gap: int = 0) -> None:
        if slots.dim() < 2 or slots.size(0) != plan.num_slots:
            raise ValueError(
                f"Expected 'slots' of {plan.num_slots} rows, as the plan has (got shape "
                f"{list(slots.shape)})"
            )
        self.plan, self.slots, self.read, self.gap = plan, slots, read, gap
        self.loaded = self.found = self.requests = 0
        self._published = [False] * len(plan.turns)
        self._next = 0

    def publish(self, part: int, rows: Tensor) -> None:
        """Takes up the published rows of a part that the plan keeps.

        Args:
            part: The part.
            rows: All rows that it publishes, of the shape ``[n, ...]``.

        Raises:
            ValueError: When they are not as many as the plan has, not of the slots' shape and
                dtype, when they came before, or after the first gather.
        """
        self._check(rows, int(np.diff(self.plan.first)[part]), f"the rows of part {part}")
        if self._published[part] or self._next:
            raise ValueError(f"Part {part} publishes rows twice, or after the first gather")
        self._published[part] = True
        _move(rows, self.plan.publish_row[part], self.slots, self.plan.publish_slot[part])

    def gather(self, part: int, out: Tensor) -> None:
        """Fills the halo rows of the part whose turn it is, and takes up those that the plan keeps.

        Args:
            part: The part.
            out: Memory for its halo rows, of shape ``[H, ...]``.

        Raises:
            ValueError: When ``out`` has another shape or dtype than the halo rows, when it is
                another part's turn, or when rows of a part that the plan keeps were not published.
        """
        if self._next == len(self.plan.turns) or part != self.plan.turns[self._next].part:
            raise ValueError(
                f"Part {part} gathers at turn {self._next} of "
                f"{[turn.part for turn in self.plan.turns]}; make a cache for each pass"
            )
        turn = self.plan.turns[self._next]
        self._check(out, turn.num_halo, f"the halo rows of part {part}")
        for other, kept in enumerate(self.plan.publish_row):
            if kept.size and not self._published[other]:
                raise ValueError(f"Part {part} gathers rows before part {other} has published")
        self._next += 1
        _move(self.slots, turn.found_slot, out, turn.found_place)
        self._load(turn, out)
        _move(out, turn.enter_place, self.slots, turn.enter_slot)
        self.found += turn.found_slot.size
        self.loaded += turn.num_loaded

    def _load(self, turn: Turn, out: Tensor) -> None:
        sizes = turn.run_stop - turn.run_start
        begin, end = joined_runs(turn, self.gap)
        self.requests += begin.size
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

    def _check(self, rows: Tensor, count: int, name: str) -> None:
        expected = (count, *self.slots.shape[1:])
        if tuple(rows.shape) != expected or rows.dtype != self.slots.dtype:
            raise ValueError(
                f"Expected {name} as {self.slots.dtype} of shape {list(expected)} (got "
                f"{rows.dtype}, shape {list(rows.shape)})"
            )


def _move(source: Tensor, rows: _Ints, target: Tensor, places: _Ints) -> None:
    """Sets ``target[places] = source[rows]``, group by group."""
    group = max(1, MOVE_BYTES * source.size(0) // max(source.nbytes, 1)) if source.size(0) else 1
    for start in range(0, rows.size, group):
        some = slice(start, start + group)
        index = torch.from_numpy(rows[some]).to(source.device)
        where = torch.from_numpy(places[some].astype(np.int64)).to(target.device)
        target.index_copy_(0, where, source.index_select(0, index).to(target.device))
