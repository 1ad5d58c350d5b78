"""Memory that the workers of one host share: segments without a name, and the pool they come from.

[Note: nothing is left] A segment is made by ``memfd_create``: it has no name in any file system,
other processes get it as a file descriptor over a socket, and the kernel frees it with the last
process that maps it, however that ends. It is bound by the memory, not by the size of ``/dev/shm``.
All its pages are allocated when it is made, so that a lack of memory is an error at that place and
never a signal at the first touch.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from pyg_sar.errors import PygSarError

GRAIN = 1 << 16  # bytes: a segment's size is a multiple
SPARE = 4  # a segment serves what is at least this part of it
SMALL = 1 << 20  # bytes up to which a segment serves anything


def shares_memory() -> bool:
    """Whether this system has what segments need (Linux)."""
    return hasattr(os, "memfd_create") and hasattr(os, "posix_fallocate")


class Segment:
    """Anonymous shared memory of this process, open for others.

    Args:
        number: Its number among those of this worker.
        capacity: Its size in bytes.

    Raises:
        OSError: When the system has no memory (or no descriptor) left.
    """

    def __init__(self, number: int, capacity: int) -> None:
        self.number, self.capacity = number, capacity
        self.descriptor = os.memfd_create(f"pyg_sar {number}", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.descriptor, 0, capacity)
            self.data = map_bytes(self.descriptor, capacity)[1]
        except BaseException:
            os.close(self.descriptor)
            raise

    def free(self) -> None:
        """Gives the memory back; nobody reads it any more."""
        self.data = torch.empty(0, dtype=torch.uint8)
        os.ftruncate(self.descriptor, 0)
        os.close(self.descriptor)


def map_bytes(descriptor: int, size: int) -> tuple[mmap.mmap, Tensor]:
    """Maps a descriptor's memory; the tensor keeps the mapping alive."""
    mapping = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with torch.inference_mode(False):  # It outlives the operation for which it is made.
        return mapping, torch.frombuffer(mapping, dtype=torch.uint8)


class Pool:
    """The segments of one worker: lent, held until all readers have done, and used again.

    A holder of a segment is its writer, from :meth:`take` on, or a reader that was told of it.

    Args:
        rank: This worker, for errors.
        forget: Called with each segment that is given back to the system, before that happens.
    """

    def __init__(self, rank: int, forget: Callable[[Segment], None]) -> None:
        self.rank = rank
        self._forget = forget
        self._lock = threading.RLock()
        self._next = 0
        self._free: list[Segment] = []
        self._held: dict[int, tuple[Segment, int]] = {}

    def take(self, size: int) -> Segment:
        """A segment of at least ``size`` bytes for the caller to write and then to release.

        Raises:
            PygSarError: When there is no memory for it.
        """
        with self._lock:
            fitting = [s for s in self._free if size <= s.capacity <= max(SMALL, SPARE * size)]
            if fitting:
                segment = min(fitting, key=lambda s: s.capacity)
                self._free.remove(segment)
            else:
                for smaller in [s for s in self._free if s.capacity < size]:
                    self._drop(smaller)
                segment = self._make(-(-max(size, 1) // GRAIN) * GRAIN)
            self._held[segment.number] = segment, 1
            return segment

    def _make(self, capacity: int) -> Segment:
        self._next += 1
        try:
            return Segment(self._next, capacity)
        except OSError as error:
            raise PygSarError(
                f"Rank {self.rank} can't get {capacity / 2**20:.1f} MiB of shared memory "
                f"({error}). Start fewer workers on this host, or set PYG_SAR_SHARED_MEMORY=0: "
                f"rows then travel by the network backend"
            ) from error

    def hold(self, segment: Segment) -> None:
        """One more holder."""
        with self._lock:
            self._held[segment.number] = segment, self._held[segment.number][1] + 1

    def release(self, number: int) -> None:
        """One holder less; after the last the segment may be lent again."""
        with self._lock:
            segment, holders = self._held.pop(number)
            if holders > 1:
                self._held[number] = segment, holders - 1
            else:
                self._free.append(segment)

    def _drop(self, segment: Segment) -> None:
        self._free.remove(segment)
        self._forget(segment)
        segment.free()

    def trim(self) -> None:
        """Gives the segments that nobody holds back to the system."""
        with self._lock:
            for segment in list(self._free):
                self._drop(segment)

    def sizes(self) -> tuple[int, int]:
        """Bytes of the segments that are held, and of those that are free."""
        with self._lock:
            held = sum(segment.capacity for segment, _ in self._held.values())
            return held, sum(segment.capacity for segment in self._free)

    def close(self) -> None:
        """Closes all descriptors; what readers still map stays theirs."""
        with self._lock:
            segments = [*self._free, *(segment for segment, _ in self._held.values())]
            self._free, self._held = [], {}
            for segment in segments:
                os.close(segment.descriptor)
