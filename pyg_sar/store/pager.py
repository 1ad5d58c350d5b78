"""Keeps CPU tensors of parts that wait in a file, under a budget of memory.

A process that computes several parts of a graph in turn needs one part's tensors at a time. Each
part is an *arena*: tensors of 16 KiB or more that a thread makes after ``pager.enter(arena)`` lie
in pages of the pager, which writes them to a file and brings them back as memory is needed. Their
addresses never change: views, NumPy arrays and kernels need not know.

[Note: States of a region]
A *region* is the memory of one tensor's storage. ``extensions/pager*.cpp`` keeps it as one of

* dirty: in memory, to be read and written;
* clean: in memory, to be read; the file has the same. A thread that writes stops at the
  processor's fault, the pager's handler of SIGSEGV makes the region dirty, and the instruction runs
  again;
* out: in the file alone, its pages given back. A thread that touches it stops likewise, until the
  handler has read it, by evicting others if need be. It is filled at another place and moved here
  in one step, so that no thread sees half of it.

Eviction takes a region's write access first, then writes it, and then takes its pages: a thread
that writes meanwhile waits. A thread that writes while the pager only writes ahead does not wait:
the region stays dirty, and what was written ahead counts for nothing. A region that is freed
while the disk works is given back when that is done. All this is decided under one lock, which is
given up while the disk works; no code under it touches a region, so that the handler may take it.

What the file can't take is found when a place in it is reserved, before anything leaves memory.

What a turn will need is read ahead, for the arena that computes and the next one. All parts run the
same program, step after step: where the last turns of an arena made as many tensors as those before
an earlier turn, of any arena, this turn needs what that one had to wait for. The last 64 turns are
compared, as the layers of a deep model are alike; until these are known, the last 16, or 4. That is
a guess: what it brings in has no access, so that the first touch tells that it was right.

Rules:

1. What is resident is at most the budget. An allocation that can't have this raises. A thread that
   touches a region can't be told of an error: where all else is pinned or the file is full, the
   budget is exceeded, and ``overrun_bytes`` counts by how much. The same holds where the tensors
   that one operator touches don't fit together: then it misses some of them again and again. From
   the ninth time on all of them come in and none goes out until the operator ends, and the next
   allocation raises, once. Operators are counted where PyTorch calls them, those of the C++ kernels
   and those that others call included.
2. System calls don't wait for the handler. ``file.write(tensor.numpy())`` of a region that is out
   fails with ``EFAULT`` ("Bad address"), as does reading into one that is clean, and both of one
   that was brought in on a guess and that nobody has touched: keep it
   in memory with :meth:`Pager.pinned`.
3. A child of ``fork`` allocates as usual and can use what was resident. If it touches what was out
   it ends by SIGSEGV: the file is the parent's.
4. Tensors made by other threads (OpenMP's, autograd's for devices) are ordinary ones.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL, c_char_p, c_int64, c_void_p
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from pyg_sar.errors import StoreError
from pyg_sar.kernels import ops

_LIBRARY = "_pager.so"
_REASON = "_no_pager.txt"
# The library's functions and their arguments. Each returns a number from 0 on, or -1 for an error.
_FUNCTIONS = {
    "pager_open": [c_int64, c_int64, c_char_p, c_int64],
    "pager_close": [],
    "pager_keep_freed": [c_int64],
    "pager_enter": [c_int64],
    "pager_turn": [c_int64],
    "pager_move_out": [c_int64],
    "pager_wait": [],
    "pager_budget": [c_int64],
    "pager_counters": [c_void_p],
    "pager_touch": [c_void_p, c_int64, c_int64],
}


@dataclass(frozen=True, slots=True)
class PagerCounters:
    """Numbers of a pager since it was opened; bytes are those of whole pages.

    Attributes:
        resident_bytes: Bytes of regions in memory, those of freed ones that are kept for the next
            allocation included.
        peak_resident_bytes: The most that ever were.
        stored_bytes: Bytes of the file that regions hold.
        bytes_read: Bytes read from the file.
        bytes_written: Bytes written to it.
        demand_faults: Regions that a thread had to wait for, as they were out.
        demand_bytes: Their bytes.
        prefetched_bytes: Bytes brought in ahead.
        evictions: Regions that went out.
        regions: Regions that are alive, those of closed pagers included.
        overrun_bytes: Bytes brought in beyond the budget (rule 1 of the module).
        waited_ns: Nanoseconds that threads waited for what was out, and for room.
    """

    resident_bytes: int
    peak_resident_bytes: int
    stored_bytes: int
    bytes_read: int
    bytes_written: int
    demand_faults: int
    demand_bytes: int
    prefetched_bytes: int
    evictions: int
    regions: int
    overrun_bytes: int
    waited_ns: int


@cache
def _library() -> CDLL:
    library = CDLL(str(Path(__file__).parent.parent / _LIBRARY))
    library.pager_built_with.restype = library.pager_error.restype = c_char_p
    for name, arguments in _FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int64
    return library


def _call(name: str, *arguments: object) -> int:
    result = int(getattr(_library(), name)(*arguments))
    if result < 0:
        raise RuntimeError(last_error())
    return result


def last_error() -> str:
    """Returns what this thread was refused last: by a call of the pager, or an allocation."""
    text: bytes = _library().pager_error()
    return text.decode()


@cache
def why_missing() -> str | None:
    """Loads the pager's library on first use; returns why there is none, or ``None``.

    Unlike the kernels it is of one version of PyTorch, whose allocator it replaces.
    """
    if (reason := ops.not_built(_LIBRARY, _REASON)) is not None:
        return f"it was {reason}"
    try:
        built_with = _library().pager_built_with().decode()
    except (AttributeError, OSError) as error:
        why = f"pyg_sar/{_LIBRARY} can't be loaded: {error}"
        return f"{why}. It needs the PyTorch it was built with, and this is {torch.__version__}"
    if built_with != torch.__version__.partition("+")[0]:
        return f"it was built with PyTorch {built_with}, and this is {torch.__version__}"
    return None


def counters() -> PagerCounters:
    """Returns exact numbers of this moment: of the process's pager, or of memory that is kept."""
    numbers = (c_int64 * len(fields(PagerCounters)))()
    _call("pager_counters", numbers)
    return PagerCounters(*numbers)


def keep_freed(on: bool) -> bool:
    """Has this process keep the memory of freed CPU tensors of 1 MiB or more for the next ones.

    The system clears each page that it gives, which takes as long as writing it. Tensors of all
    threads are meant. With what is kept they take at most what they have taken at once, in the last
    8,192 such allocations. Does nothing while a :class:`Pager` is open, whose budget says what
    is kept; goes on when that is closed.

    Args:
        on: Whether to keep it. What is kept goes back to the system when this ends.

    Returns:
        Whether it is kept now: not where the pager's library is missing, where the process may have
        so many addresses only (``ulimit -v``), or where another allocator has a higher priority.
    """
    if not sys.platform.startswith("linux") or why_missing() is not None:
        return False
    return bool(_call("pager_keep_freed", on))


class Pager:
    """The process's pager; a context manager that closes it.

    Allocations that find no room raise ``torch.OutOfMemoryError`` (a ``RuntimeError``), which names
    the bytes wanted, the budget and the remedy.

    Args:
        arenas: Number of arenas, which take turns in the order 0, 1, ..., arenas - 1, 0, ...
        budget: Bytes that may be in memory, or ``None``: no limit.
        directory: The folder of the file, which has no name: nothing is left when the process ends,
            in whatever way. ``None``: nothing can be moved out, and the budget is only watched.
        io_threads: Threads that read and write ahead, 1 to 8.

    Raises:
        StoreError: There is a pager already, the system is not Linux, the library is missing or of
            another PyTorch, or no file can be made.
    """

    def __init__(
        self,
        arenas: int,
        budget: int | None,
        directory: str | os.PathLike[str] | None,
        io_threads: int = 1,
    ) -> None:
        if arenas < 1:
            raise ValueError(f"expected 1 arena or more (got arenas={arenas})")
        if budget is not None and budget < 1:
            raise ValueError(f"expected a budget of 1 byte or more, or None (got budget={budget})")
        if not 1 <= io_threads <= 8:
            raise ValueError(f"expected 1 to 8 I/O threads (got io_threads={io_threads})")
        if not sys.platform.startswith("linux"):
            raise StoreError(f"tensors can be moved out on Linux only (this is {sys.platform})")
        if (reason := why_missing()) is not None:
            raise StoreError(
                f"tensors can't be moved out without pyg_sar's C++ pager: {reason}. Install it "
                "beside this PyTorch, with a C++ compiler at hand"
            )
        self.arenas = arenas
        self._budget = budget
        self._process = os.getpid()
        self._open = False
        where = "" if directory is None else os.path.abspath(directory)
        place = f"a pager with its file in {where}" if where else "a pager"
        with _named(f"{place} can't be opened"):
            _call("pager_open", arenas, budget or 0, os.fsencode(where), io_threads)
        self._open = True

    @property
    def budget(self) -> int | None:
        """Bytes that may be in memory; ``None``: no limit. A lower one evicts at once."""
        return self._budget

    @budget.setter
    def budget(self, bytes: int | None) -> None:
        if bytes is not None and bytes < 1:
            raise ValueError(f"expected a budget of 1 byte or more, or None (got {bytes})")
        self._call("pager_budget", bytes or 0)
        self._budget = bytes

    def enter(self, arena: int | None) -> None:
        """Lets this thread's allocations come from an arena; ``None``: from the usual allocator."""
        self._call("pager_enter", -1 if arena is None else self._checked(arena))

    def turn(self, arena: int) -> None:
        """Says that an arena computes now: the one before it is farthest, the next one nearest."""
        self._call("pager_turn", self._checked(arena))

    def move_out(self, arena: int) -> None:
        """Moves out all of an arena now, but for what is pinned.

        Raises:
            StoreError: There is no store, or it takes no more. Nothing is lost.
        """
        with _named(f"arena {arena} can't be moved out"):
            self._call("pager_move_out", self._checked(arena))

    def touch(self, tensor: Tensor) -> bool:
        """Brings a tensor in. It may go out again when others come: see :meth:`pinned`.

        Args:
            tensor: A tensor on the CPU.

        Returns:
            True where the tensor is the pager's.

        Raises:
            StoreError: There is no room for it.
        """
        return self._touch(tensor, False, 0)

    @contextmanager
    def pinned(self, tensor: Tensor, *, write: bool = False) -> Iterator[Tensor]:
        """Brings a tensor in, and keeps it in memory until the end of the block: for system calls.

        Args:
            tensor: A tensor on the CPU.
            write: Makes it ready to be written too.

        Raises:
            StoreError: There is no room for it.
        """
        ours = self._touch(tensor, write, 1)
        try:
            yield tensor
        finally:
            if ours and self._open:
                self._touch(tensor, False, -1)

    def wait(self) -> None:
        """Returns when nothing is left to be brought in or written ahead."""
        self._call("pager_wait")

    def counters(self) -> PagerCounters:
        """Returns exact numbers of this moment."""
        self._check()
        return counters()

    def close(self) -> None:
        """Gives PyTorch its own allocator back, and brings in all tensors that are still alive.

        They stay valid until they are freed. The budget doesn't hold for them any more.

        Raises:
            StoreError: They can't be brought in; the pager stays open.
        """
        if self._open and os.getpid() == self._process:
            with _named("the pager can't be closed"):
                _call("pager_close")
            self._open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _touch(self, tensor: Tensor, write: bool, pins: int) -> bool:
        if tensor.device.type != "cpu":
            raise ValueError(f"expected a tensor on the CPU (got one on {tensor.device})")
        with _named("a tensor can't be brought in"):
            return bool(self._call("pager_touch", tensor.untyped_storage().data_ptr(), write, pins))

    def _checked(self, arena: int) -> int:
        if not 0 <= arena < self.arenas:
            raise ValueError(f"expected an arena from 0 to {self.arenas - 1} (got {arena})")
        return arena

    def _call(self, name: str, *arguments: object) -> int:
        self._check()
        return _call(name, *arguments)

    def _check(self) -> None:
        if not self._open:
            raise StoreError("this pager is closed")
        if os.getpid() != self._process:
            raise StoreError("this pager is another process's, of which this one is a fork")


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise StoreError(f"{what}: {error}") from None
