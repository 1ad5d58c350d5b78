"""Rows in a file without a name: written in one run, read in any runs, past the page cache.

What the system would keep of a file in memory counts as nobody's; here it isn't kept. Where the
file system has direct I/O, blocks go between the disk and a small buffer of this process; elsewhere
the system is told at once that they won't be needed.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import numpy as np
from torch import Tensor

from pyg_sar.errors import StoreError

BLOCK = 4096  # Bytes, to which direct I/O is aligned.
BUFFER = 4 << 20  # Bytes of one request.


def open_unnamed(directory: str | os.PathLike[str]) -> int:
    """Opens a new file that has no name, so that nothing is left of it when the process ends.

    Raises:
        StoreError: There is no such directory, or it can't be written.
    """
    where = os.fspath(directory)
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        for direct in (getattr(os, "O_DIRECT", 0), 0):
            with suppress(OSError):
                return os.open(where, flags | getattr(os, "O_TMPFILE", 0) | direct, 0o600)
        descriptor, name = tempfile.mkstemp(dir=where, prefix="pyg_sar-")
        os.unlink(name)
        return descriptor
    except OSError as error:
        raise StoreError(
            f"store={where!r} can't hold a file ({error}); pass a directory that this process "
            "may write"
        ) from error


class RowFile:
    """A file of runs of bytes in a directory.

    Attributes:
        bytes_read, bytes_written: By requests, in whole blocks.
        waited_ns: Nanoseconds that they took.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._file = open_unnamed(directory)
        self._buffer = mmap.mmap(-1, BUFFER)
        self._bytes = np.frombuffer(self._buffer, np.uint8)
        self._end = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self.bytes_read = self.bytes_written = self.waited_ns = 0
        self._direct = self._takes_direct()

    def _takes_direct(self) -> bool:
        """Tries direct I/O, and switches it off where it does not work."""
        flag, flags = getattr(os, "O_DIRECT", 0), fcntl.fcntl(self._file, fcntl.F_GETFL)
        if not flags & flag:
            return False
        try:
            self.move(BLOCK, 0, write=True)
            self.move(BLOCK, 0, write=False)
        except OSError:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~flag)
            return False
        return True

    def allocate(self, size: int) -> int:
        """Returns the place of ``size`` bytes, a multiple of a block; ``StoreError``: the disk is
        full.
        """
        size = _blocks(size)
        if self._free[size]:
            return self._free[size].pop()
        place, self._end = self._end, self._end + size
        if size:
            try:
                os.posix_fallocate(self._file, place, size)
            except OSError as error:
                self._end = place
                raise self._explained(error, size) from error
        return place

    def free(self, place: int, size: int) -> None:
        """Gives back what :meth:`allocate` returned."""
        self._free[_blocks(size)].append(place)

    def write(self, place: int, data: Tensor) -> None:
        """Writes bytes to a place: ``uint8 [n]``, contiguous."""
        values = data.numpy()
        try:
            for start in range(0, values.size, BUFFER):
                part = values[start : start + BUFFER]
                self._bytes[: part.size] = part
                size = _blocks(part.size)
                self.move(size, place + start, write=True)
                self.bytes_written += size
        except OSError as error:
            raise self._explained(error, values.size) from error
        self._forget(place, values.size)

    def read(self, first: int, out: Tensor) -> None:
        """Fills ``out``, ``uint8 [n]`` and contiguous, with the bytes from ``first`` on."""
        values, stop = out.numpy(), first + out.numel()
        position = first
        try:
            while position < stop:
                begin = position // BLOCK * BLOCK
                size = min(_blocks(stop - begin), BUFFER)
                self.move(size, begin, write=False)
                self.bytes_read += size
                end = min(begin + size, stop)
                values[position - first : end - first] = self._bytes[position - begin : end - begin]
                position = end
        except OSError as error:
            raise self._explained(error, out.numel()) from error
        self._forget(first, out.numel())

    def move(self, size: int, place: int, write: bool) -> None:
        """Moves the buffer's first bytes, whole blocks, to or from a place of the file, by as many
        calls as the system takes for them.
        """
        done, begin = 0, time.perf_counter_ns()
        while done < size:
            view = memoryview(self._buffer)[done:size]
            if write:
                count = os.pwrite(self._file, view, place + done)
            else:
                count = os.preadv(self._file, [view], place + done)
            if count == 0:
                raise OSError(errno.EIO, "the file has ended")
            done += count
        self.waited_ns += time.perf_counter_ns() - begin

    def _forget(self, place: int, size: int) -> None:
        if not self._direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, place, size, os.POSIX_FADV_DONTNEED)

    def _explained(self, error: OSError, size: int) -> StoreError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return StoreError(
                f"store={str(self.directory)!r} has no room for {size:,} more bytes "
                f"({error.strerror}); free some, or pass another directory"
            )
        return StoreError(f"store={str(self.directory)!r} failed: {error}")

    def close(self) -> None:
        """Frees the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
