"""Memory of a process that hosts several parts in turn; those that wait are in a file."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from pyg_sar.errors import StoreError
from pyg_sar.store.pager import Pager
from pyg_sar.store.row_file import RowFile
from pyg_sar.store.saved_bits import SavedBits

RESERVE = 0.06, 8 << 20
"""Share of the memory, and bytes, that are left for what the pager has not allocated."""
CACHES = 8
"""Rows of one pass are cached in this part of the memory; two passes overlap."""
LEAST = 0.15
"""Share of the memory that the waiting parts' tensors need at least."""
AT_ONCE = 3
"""Tensors as large as the largest one that a part needs in memory together, about."""


def resident_bytes() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def available_memory(workers: int) -> int:
    """Bytes that one of a host's workers may take: its share of four fifths of what is free."""
    text = Path("/proc/meminfo").read_text()
    free = next(line for line in text.splitlines() if line.startswith("MemAvailable"))
    return int(free.split()[1]) * 1024 * 4 // (5 * workers)


class PartStore:
    """Keeps the tensors of waiting parts, and rows that they publish, within a budget of memory.

    Args:
        parts: Parts of this process.
        all_parts: Parts of the graph.
        memory: Bytes that this process may take beyond what it has now.
        directory: Where its files lie; ``None``: nothing can be moved out.

    Attributes:
        memory: Bytes that may be taken.
        rows: The file of published rows, if there is a directory.
        cache_bytes: Bytes of the cache of one pass.

    Raises:
        StoreError: No file can be made, or there are no C++ kernels.
    """

    def __init__(
        self, parts: int, all_parts: int, memory: int, directory: str | os.PathLike[str] | None
    ) -> None:
        self.memory, self.directory = memory, directory
        self._all, self._overrun = all_parts, 0
        self.rows = None if directory is None else RowFile(directory)
        self.cache_bytes = memory // CACHES
        self._start = resident_bytes()
        self._pager = Pager(parts, memory, directory)
        self._spare: defaultdict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._slots, self._fixed = 0, None  # type: int, int | None
        self._arena: int | None = None
        self._saving: list[SavedBits] = []

    def saving(self) -> SavedBits:
        """Has a part's ReLU and dropout save bits, on the thread that enters it."""
        self._saving.append(SavedBits())
        return self._saving[-1]

    def begin(self, arena: int) -> None:
        """Begins a part's turn, on its thread. Arenas are the parts' numbers in this process."""
        self._arena = arena
        self._pager.turn(arena)
        self._limit()
        self._pager.enter(arena)

    def end(self) -> None:
        """Ends the turn."""
        self._pager.enter(None)
        self._arena = None

    def check(self) -> None:
        """Raises :class:`StoreError` where an operation has needed more than the memory."""
        found = self._pager.counters()
        if found.overrun_bytes > self._overrun:
            more, self._overrun = found.overrun_bytes - self._overrun, found.overrun_bytes
            raise StoreError(
                f"memory={self.memory:,} bytes: an operation of a part needed {more:,} bytes more "
                f"at once. {self.remedy(self.memory + more)}"
            )

    def fix(self, budget: int, cache_bytes: int) -> None:
        """Lets paged tensors and caches together take these bytes, whatever the process takes.

        A sample of a graph may then have what the whole graph's tensors may.
        """
        self._fixed, self.cache_bytes = budget, cache_bytes

    def _limit(self) -> None:
        """Leaves to the pager what nothing else of this process has taken."""
        self.check()
        if self._fixed is not None:
            self._pager.budget = max(self._fixed - self._slots, 1)
            return
        other = resident_bytes() - self._start - self._pager.counters().resident_bytes
        left = self.memory - max(int(self.memory * RESERVE[0]), RESERVE[1]) - other
        if left < self.memory * LEAST:
            raise StoreError(
                f"memory={self.memory:,} bytes: {other:,} of them are taken by what can't wait in "
                "the store (libraries' buffers, and small tensors and objects of all parts of this "
                "process). Allow more memory, start more workers, or cut the graph into fewer parts"
            )
        self._pager.budget = left

    def remedy(self, needed: int) -> str:
        """Says what to do where parts need so many bytes at once."""
        parts = max(2 * self._all, -(-self._all * needed // self.memory))
        return (
            f"Cut the graph into more parts (about {parts} instead of {self._all}: pyg-sar "
            f"partition --parts {parts}), or allow more memory"
        )

    def explained(self, error: torch.OutOfMemoryError) -> StoreError:
        """Returns the pager's refusal with the remedy."""
        text = str(error).partition("\n")[0]
        wanted = re.search(r"tensor of (\d+) bytes", text)
        needed = AT_ONCE * int(wanted[1]) if wanted else 2 * self.memory
        cause = text.partition(". Cut the graph")[0]
        if "store takes no more" in cause:
            return StoreError(
                f"store={str(self.directory)!r} is full: {cause}. Free some space, or pass another "
                "directory"
            )
        return StoreError(f"memory={self.memory:,} bytes: {cause}. {self.remedy(needed)}")

    @contextmanager
    def unpaged(self, size: int = 0) -> Iterator[None]:
        """Makes tensors that the system reads or writes, or that all parts use.

        Args:
            size: Their bytes, which the pager makes room for.

        Raises:
            StoreError: There is no room.
        """
        if size > (self._pager.budget or 0):
            raise StoreError(
                f"memory={self.memory:,} bytes: rows on their way between workers need {size:,} "
                f"bytes more at once. {self.remedy(self.memory + size)}"
            )
        if size:
            self.make_room(size)
        arena, self._arena = self._arena, None
        self._pager.enter(None)
        try:
            yield
        finally:
            self._arena = arena
            self._pager.enter(arena)

    def make_room(self, size: int) -> None:
        """Takes bytes from the pager, for what others allocate in this turn. The next counts it."""
        self._pager.budget = max((self._pager.budget or 0) - size, 1)

    def take_slots(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for cached rows."""
        size = torch.Size(shape).numel()
        spare = self._spare[size, dtype]
        if spare:
            return spare.pop().view(tuple(shape))
        self._slots -= sum(slots.nbytes for same in self._spare.values() for slots in same)
        self._spare.clear()
        self._slots += size * dtype.itemsize
        self.make_room(size * dtype.itemsize)
        with self.unpaged():
            return torch.zeros(tuple(shape), dtype=dtype)

    def give_slots(self, slots: Tensor) -> None:
        """Takes back memory for cached rows."""
        self._spare[slots.numel(), slots.dtype].append(slots)

    def counters(self) -> dict[str, int]:
        """Bytes moved, and saved as bits, so far; time that was waited; the most in memory."""
        found = self._pager.counters()
        rows = self.rows
        return {
            "bytes_read": found.bytes_read + (0 if rows is None else rows.bytes_read),
            "bytes_written": found.bytes_written + (0 if rows is None else rows.bytes_written),
            "demand_bytes": found.demand_bytes,
            "demand_faults": found.demand_faults,
            "prefetched_bytes": found.prefetched_bytes,
            "peak_resident_bytes": found.peak_resident_bytes,
            "overrun_bytes": found.overrun_bytes,
            "bits_of_bytes": sum(mode.kept for mode in self._saving),
            "waited_ns": found.waited_ns + (0 if rows is None else rows.waited_ns),
        }

    def close(self) -> None:
        """Brings in what is still alive, and removes the files."""
        self._spare.clear()
        if self.rows is not None:
            self.rows.close()
        self._pager.close()
