"""A machine's rates; the work of an epoch, and the bytes alive at its peak, by operators.

seconds = flops / dense + bytes / stream + gathered bytes / gather, of one worker: products of
matrices; reading and writing by all other operators; rows that are read by an index (a row per
edge, by operators with an index and by the C++ kernels).
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyg_sar.store.row_file import RowFile
from pyg_sar.tensors import node_tensors
from pyg_sar.tensors.nested import tensors_in

REPEAT = 5
REQUEST, SMALL, FILE = 1 << 20, 1 << 14, 1 << 28
"""Bytes of a request, of a small one, and of the file that a disk is measured with."""
PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1)}
"""Products of matrices, and which arguments are multiplied."""
BY_INDEX = ("index", "index_select", "index_add", "index_put", "scatter", "scatter_add", "gather")
INDICES = (torch.int32, torch.int64)
VIEWS = ("view", "slice", "t", "expand", "detach", "select", "unsqueeze", "squeeze", "alias")


class Work(TorchDispatchMode):
    """Counts what operators of this thread do: flops of products of matrices, bytes that other
    operators move, and bytes of rows that are read, or added to, by an index (``gathered``).
    """

    def __init__(self, flops: float = 0, moved: float = 0, gathered: float = 0) -> None:
        super().__init__()
        self.flops, self.moved, self.gathered = flops, moved, gathered

    def times(self, factor: float) -> Work:
        """Returns the work of a graph that is larger by ``factor``."""
        return Work(self.flops * factor, self.moved * factor, self.gathered * factor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if node_tensors(args, kwargs):
            return NotImplemented  # What its rule calls with this worker's rows comes here next.
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")
        own, operator = name[0] == "pyg_sar", name[2].rstrip("_")
        given = tensors_in(args, kwargs)
        if operator in PRODUCTS:
            one, other = (args[k] for k in PRODUCTS[operator])
            self.flops += 2 * one.numel() * other.size(-1)
        elif own or operator in BY_INDEX:
            entries = max((t.size(-1) for t in given if t.dim() and t.dtype in INDICES), default=0)
            wide = [t for t in (*given, *tensors_in(out)) if t.is_floating_point() and t.dim() > 0]
            row = max((t[:1].numel() * t.element_size() for t in wide if t.dim() > 1), default=8)
            self.gathered += entries * row
        elif operator not in VIEWS:
            self.moved += sum(t.numel() * t.element_size() for t in (*given, *tensors_in(out)))
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Holds what one worker does in a second, with the threads that it has.

    Attributes:
        dense: Floating point operations of products of matrices.
        stream: Bytes read and written in order.
        gather: Bytes of rows read by an index and added up.
    """

    dense: float
    stream: float
    gather: float

    def seconds(self, work: Work) -> float:
        """Returns how long work takes."""
        return work.flops / self.dense + work.moved / self.stream + work.gathered / self.gather

    @classmethod
    def measure(cls) -> Rates:
        """Measures this machine, in a few seconds; the best of some repetitions counts."""
        draw = torch.Generator().manual_seed(0)
        a, b = torch.randn(20_000, 256, generator=draw), torch.randn(256, 256, generator=draw)
        index = torch.randint(20_000, (100_000,), generator=draw)
        total = torch.zeros(20_000, 256)
        wide = torch.randn(1 << 24, generator=draw)
        out = torch.empty_like(wide)
        gathered = index.numel() * 256 * 4

        def add_rows() -> None:
            for piece in index.split(20_000):
                total.index_add_(0, piece, a[piece])

        return cls(
            dense=2 * a.numel() * 256 / _best(lambda: a @ b),
            stream=3 * 4 * wide.numel() / _best(lambda: torch.add(wide, wide, out=out)),
            gather=gathered / _best(add_rows),
        )


def _best(run: Callable[[], object]) -> float:
    # A thread's own time leaves out what other programs take of the processor.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times = []
    for _ in range(REPEAT):
        start = clock()
        run()
        times.append(clock() - start)
    return min(times)


@dataclass(frozen=True, slots=True)
class Moved:
    """Counts what a store moves in a step: bytes read and written; those of the bytes read that a
    part had to wait for, and how often one had to.
    """

    read: float = 0
    written: float = 0
    awaited: float = 0
    waits: float = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """Holds what the disk of a store's folder does.

    Attributes:
        read: Bytes per second, read in requests of :data:`REQUEST` bytes one after the other.
        written: Bytes per second, written so.
        wait: Seconds that a small read takes.
    """

    read: float
    written: float
    wait: float

    def seconds(self, busy: float, moved: Moved) -> float:
        r"""Returns the time of a step that computes for ``busy`` seconds.

        Parts wait for what was not read ahead; all else runs beside them, if the disk has time:
        :math:`\max(\text{busy} + \text{awaited} / r + n w, \; \text{read} / r + \text{written} /
        w')` for n reads that parts waited for.
        """
        waiting = moved.awaited / self.read + moved.waits * self.wait
        return max(busy + waiting, moved.read / self.read + moved.written / self.written)

    @classmethod
    def measure(cls, folder: str | os.PathLike[str]) -> Disk:
        """Measures a folder's disk as stores use it, past the page cache, in some seconds.

        Raises:
            StoreError: The folder holds no file of 256 MiB.
        """
        with RowFile(folder) as file:
            start = file.allocate(FILE)
            _timed(file, start, REQUEST, write=True)  # A disk takes longer for new places.
            written = _timed(file, start, REQUEST, write=True)
            read = _timed(file, start, REQUEST, write=False)
            wait = _timed(file, start, SMALL, write=False)
        return cls(read=FILE / read, written=FILE / written, wait=wait / (FILE // REQUEST))


def _timed(file: RowFile, start: int, size: int, write: bool) -> float:
    """Returns the seconds of requests of a size, one after the other."""
    begin = time.perf_counter()
    for place in range(start, start + FILE, REQUEST):
        file.move(size, place, write)
    return time.perf_counter() - begin


# Bytes that are alive #######################################################################


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operators of this thread make, until they are freed.

    Storages that were there before are not counted, nor those of other threads. ``now`` and
    ``peak`` are bytes alive, ``log`` has nanoseconds of the system's clock, and ``now``, at each
    change.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.log: list[tuple[int, int]] = []
        self._live: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if node_tensors(args, kwargs):
            return NotImplemented  # What its rule calls with this worker's rows comes here next.
        for tensor in tensors_in(args, kwargs):
            self._follow(tensor, counted=False)
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            self._follow(tensor, counted=True)
        return out

    def _follow(self, tensor: Tensor, counted: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        size = storage.nbytes() if counted and not tensor.is_meta else 0
        self._live[key] = weakref.ref(storage, lambda _: self._gone(key)), size
        self._add(size)

    def _gone(self, key: int) -> None:
        self._add(-self._live.pop(key)[1])

    def _add(self, size: int) -> None:
        if size:
            self.now += size
            self.peak = max(self.peak, self.now)
            self.log.append((time.monotonic_ns(), self.now))


def peak_together(logs: Sequence[Sequence[tuple[int, int]]]) -> int:
    """Returns the most bytes that several threads of a process held at once, from their logs."""
    changes = []
    for log in logs:
        before = 0
        for moment, now in log:
            changes.append((moment, now - before))
            before = now
    changes.sort()
    return max(accumulate((change for _, change in changes), initial=0))
