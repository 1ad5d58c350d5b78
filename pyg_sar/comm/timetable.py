r"""When each pair of workers exchanges halo rows: pairs grouped into units that run one by one.

Worker :math:`p` needs :math:`n_{pq}` rows of worker :math:`q`. All pairs of a unit travel at the
same time, and a unit's rows are resident together; so within a unit

.. math::
    \sum_q n_{pq} \leq \max_q n_{pq}, \qquad \sum_p n_{pq} \leq \max_p n_{pq}

at every worker: what is resident, coming in as going out, is at most the largest shard, as if
pairs travelled alone. A link (in or out of a worker) that carries its largest pair is then used
once per unit, and small pairs, of which there are many under METIS, share units. Pairs without rows
have no unit.

[Note: finding units] The time of a unit is that of its busiest link, so the sum over units of

.. math:: \max(\max_p \textstyle\sum_q n_{pq}, \max_q \sum_p n_{pq})

is to be small (open-shop scheduling; Gonzalez and Sahni, J. ACM 1976). Two ways are tried and the
better one is taken. *First fit*: pairs by decreasing size, each to the first unit that has room.
*Matchings*: the heaviest perfect matching of what is left makes a unit, until nothing is left
(W - 1 units at most, also where all pairs are alike, which first fit does not promise); then
small pairs move to earlier units that have room.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_Counts = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

_MOST_MATCHED = 128  # workers: each matching takes time as their third power


@dataclass(frozen=True, slots=True, eq=False)
class Timetable:
    """The pairs' rows and units, the same at every worker.

    Attributes:
        rows: Rows that worker p needs of worker q, ``[W, W]``.
        units: The unit in which they travel, 1 or more; 0 where there are none. ``[W, W]``.
    """

    rows: Tensor
    units: Tensor

    @property
    def num_units(self) -> int:
        """The number of units."""
        return int(self.units.max()) if self.units.numel() else 0

    def problem(self, rank: int, needed: Tensor, sent: Tensor) -> str:
        """What is wrong with it as seen by a worker; empty where nothing is.

        Args:
            rank: The worker.
            needed: Rows that it needs per owner, ``[W]``.
            sent: Rows that each worker needs of it, ``[W]``.
        """
        world = needed.numel()
        rows, units = self.rows.long(), self.units.long()
        if tuple(rows.shape) != (world, world) or tuple(units.shape) != (world, world):
            return f"its tables are of shapes {list(rows.shape)} and {list(units.shape)}"
        if bool((rows < 0).any()) or bool((rows.diagonal() != 0).any()):
            return "its counts are negative, or count a worker's own rows"
        if bool(((units > 0) != (rows > 0)).any()) or int(units.max()) > 2 * world:
            return "its units don't fit its rows"
        if not torch.equal(rows[rank], needed.long()) or not torch.equal(
            rows[:, rank], sent.long()
        ):
            return f"its counts differ from those of part {rank}"
        return ""


def make_timetable(rows: Tensor, matchings: bool = True) -> Timetable:
    """Groups pairs into units. See [Note: finding units].

    Args:
        rows: Rows that worker p needs of worker q, ``[W, W]``, integers.
        matchings: Try both ways. Without, only integers are compared, so that workers that make it
            each for itself find the same.
    """
    counts: _Counts = rows.long().numpy()
    best = _first_fit(counts)
    if matchings and 2 < len(counts) <= _MOST_MATCHED:
        best = min(best, _matchings(counts), key=lambda units: _busiest(counts, units))
    return Timetable(rows.int(), torch.from_numpy(best).int())


def _busiest(counts: _Counts, units: _Counts) -> tuple[int, int]:
    """The sum over units of the busiest link's rows, and the number of units."""
    total, number = 0, int(units.max())
    for unit in range(1, number + 1):
        now = np.where(units == unit, counts, 0)
        total += max(int(now.sum(0).max()), int(now.sum(1).max()))
    return total, number


class _Room:
    """Which units still have room for a pair.

    Args:
        counts: Rows of all pairs.
        most: Units at most.
    """

    def __init__(self, counts: _Counts, most: int) -> None:
        self.counts, self.most_in, self.most_out = counts, counts.max(1), counts.max(0)
        self.into = np.zeros((len(counts), most + 1), dtype=np.int64)
        self.out_of = np.zeros_like(self.into)

    def first(self, p: int, q: int, before: int) -> int:
        """The first unit below ``before`` with room for a pair, or 0."""
        rows = self.counts[p, q]
        fits = (self.into[p, 1:before] + rows <= self.most_in[p]) & (
            self.out_of[q, 1:before] + rows <= self.most_out[q]
        )
        return 1 + int(fits.argmax()) if fits.any() else 0

    def add(self, p: int, q: int, unit: int, sign: int = 1) -> None:
        """Puts a pair into a unit, or takes it out."""
        self.into[p, unit] += sign * self.counts[p, q]
        self.out_of[q, unit] += sign * self.counts[p, q]


def _by_size(counts: _Counts, chosen: _Counts) -> list[tuple[int, int]]:
    """The chosen pairs ``[K, 2]``, large ones first."""
    world = len(counts)
    key = [(-int(counts[p, q]), (int(q) - int(p)) % world, int(p), int(q)) for p, q in chosen]
    return [(p, q) for _, _, p, q in sorted(key)]


def _first_fit(counts: _Counts) -> _Counts:
    most = 2 * len(counts)  # a pair meets at most 2 (W - 2) others at its two links
    room, units = _Room(counts, most), np.zeros_like(counts)
    for p, q in _by_size(counts, np.argwhere(counts)):
        units[p, q] = unit = room.first(p, q, most + 1)
        room.add(p, q, unit)
    return units


def _matchings(counts: _Counts) -> _Counts:
    # Imported here, as it adds a warning filter.
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    world = len(counts)
    left = ~np.eye(world, dtype=bool)
    units = np.zeros_like(counts)
    barred = -1.0 - float(counts.max()) * world  # less than what any allowed matching can gain
    for unit in range(1, world):
        p, q = linear_sum_assignment(np.where(left, counts, barred), maximize=True)
        left[p, q] = False
        units[p, q] = np.where(counts[p, q] > 0, unit, 0)
    return _squeezed(counts, units)


def _squeezed(counts: _Counts, units: _Counts) -> _Counts:
    """Pairs of late units moved to earlier ones with room; numbers of emptied units closed up."""
    room = _Room(counts, len(counts))
    for p, q in np.argwhere(units):
        room.add(p, q, int(units[p, q]))
    for unit in range(int(units.max()), 1, -1):
        for p, q in _by_size(counts, np.argwhere(units == unit)):
            found = room.first(p, q, unit)
            if found:
                room.add(p, q, unit, -1)
                room.add(p, q, found)
                units[p, q] = found
    used = np.unique(units[units > 0])
    return np.where(units > 0, np.searchsorted(used, units) + 1, 0)
