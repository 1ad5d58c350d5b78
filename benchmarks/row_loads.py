"""What a plan of cached rows reads in a pass, and whether it delivers the rows that are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyg_sar.exchange.row_plan import RowPlan, Turn, joined_runs, spread

_Ints = NDArray[Any]


def _require(right: bool, turn: Turn | None = None) -> None:
    if not right:
        where = "" if turn is None else f" at the turn of part {turn.part}"
        raise ValueError(f"The plan of cached rows is wrong{where}: plan it again (plan_rows)")


def check_plan(plan: RowPlan, needs: Sequence[_Ints]) -> None:
    """Simulates a pass with the numbers of rows in place of rows.

    Raises:
        ValueError: When a halo row would be filled twice, not at all, or with another row, or
            when a slot is out of range or taken twice at once.
    """
    slots = np.full(plan.num_slots, -1, np.int64)
    published = zip(pairwise(plan.first), plan.publish_row, plan.publish_slot, strict=True)
    for (start, stop), row, slot in published:
        _require(row.size == 0 or bool(row.min() >= 0 and row.max() < stop - start))
        _require(bool((slots[slot] == -1).all()) and np.unique(slot).size == slot.size)
        slots[slot] = start + row
    _require(sorted(turn.part for turn in plan.turns) == list(range(len(needs))))
    for turn in plan.turns:
        out = np.full(turn.num_halo, -1, np.int64)
        _require(bool((turn.found_slot >= 0).all() and (turn.enter_slot >= 0).all()), turn)
        out[turn.found_place] = slots[turn.found_slot]
        sizes = turn.run_stop - turn.run_start
        out[spread(turn.run_place, sizes)] = spread(turn.run_start, sizes)
        _require(turn.found_place.size + turn.num_loaded == turn.num_halo, turn)
        _require(np.array_equal(out, needs[turn.part]), turn)
        _require(np.unique(turn.enter_slot).size == turn.enter_slot.size, turn)
        slots[turn.enter_slot] = out[turn.enter_place]


@dataclass(frozen=True, slots=True)
class Loads:
    """Reads of the file in a pass.

    Attributes:
        rows: Halo rows that come from the file.
        found: Halo rows that come from the cache.
        requests: Requests, each for rows of successive positions.
        read: Rows that the requests read, with those between two runs.
    """

    rows: int
    found: int
    requests: int
    read: int

    @property
    def mean(self) -> float:
        """Rows per request."""
        return self.read / max(self.requests, 1)


def loads(plan: RowPlan, gap: int = 0) -> Loads:
    """Counts what a pass reads.

    Args:
        plan: The plan.
        gap: Runs with at most so many rows between them are read in one request.
    """
    rows = sum(turn.num_loaded for turn in plan.turns)
    found = sum(turn.found_slot.size for turn in plan.turns)
    requests = read = 0
    for turn in plan.turns:
        begin, end = joined_runs(turn, gap)
        requests += begin.size
        read += int((turn.run_stop[end - 1] - turn.run_start[begin]).sum())
    return Loads(rows, found, requests, read)
