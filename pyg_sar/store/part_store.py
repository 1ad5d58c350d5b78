r"""Memory of a process that hosts several parts in turn; those that wait are in a file.

[Note: bits] PyTorch's ReLU, :math:`y = \max(x, 0)`, saves :math:`y`; dropout,
:math:`y_i = x_i m_i`, saves :math:`m`, whose values are 0 and :math:`1 / (1 - p)`. Both backward
passes ask one question of each number that was saved: :math:`\partial x_i = \partial y_i` or 0 by
:math:`y_i > 0`, and :math:`\partial x_i = \partial y_i m_i`. A bit answers it. So parts that wait
in a store keep bits, a 32nd of the memory in float32, and nothing is computed again.

Gradients are the same to the bit. What isn't seen to have two values only is saved as it is.

[Note: whose memory it is] Where the next layer saves ReLU's result as its own input, bits beside it
save nothing. Dropout's result is another tensor: ReLU's result is then needed for its own backward
pass alone, and becomes bits when dropout has been computed.
"""

from __future__ import annotations

import math
import os
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from pyg_sar.errors import StoreError
from pyg_sar.store.pager import Pager, PagerCounters, last_error
from pyg_sar.store.row_file import RowFile
from pyg_sar.wording import counted

RESERVE = 0.06, 8 << 20
"""Share of the memory, and bytes, that are left for what the pager has not allocated."""
CACHES = 8
"""Rows of one pass are cached in this part of the memory; two passes overlap."""
LEAST = 0.15
"""Share of the memory that the waiting parts' tensors need at least."""
PUBLISHED = 0.5
"""Share of the memory that all published rows of a pass may take, to be read where they lie."""
LIBRARIES = ("pyg_sar.nn", "pyg_sar.tools")
"""Modules that import, with all that they need, what parts compute with: about 100 MiB."""
AT_ONCE = 3
"""Tensors as large as the largest one that a part needs in memory together, about."""


def available_memory(workers: int) -> int:
    """Bytes that one of a host's workers may take: its share of four fifths of what is free."""
    text = Path("/proc/meminfo").read_text()
    free = next(line for line in text.splitlines() if line.startswith("MemAvailable"))
    return int(free.split()[1]) * 1024 * 4 // (5 * workers)


class PartStore:
    """Keeps the tensors of waiting parts, and rows that they publish, within a budget of memory.

    Args:
        parts, all_parts: Parts of this process, and of the graph.
        memory: Bytes that this process may take beyond what it has now, with all libraries loaded.
        directory: Where its files lie; ``None``: nothing can be moved out.

    Attributes:
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
        for name in LIBRARIES:  # Else the first part's turn loads them, and they count as its own.
            import_module(name)
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._statm = open("/proc/self/statm", "rb")  # noqa: SIM115 (each turn reads it)
        self._start = self._resident()
        self._pager = Pager(parts, memory, directory)
        self._spare: defaultdict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._slots, self._fixed = 0, None  # type: int, int | None
        self._arena: int | None = None
        self._saving: list[SavedBits] = []

    def _resident(self) -> int:
        """Bytes of this process in memory."""
        return int(os.pread(self._statm.fileno(), 64, 0).split()[1]) * self._page

    def saving(self) -> SavedBits:
        """Has a part's ReLU and dropout save bits, on the thread that enters it."""
        self._saving.append(SavedBits())
        return self._saving[-1]

    def begin(self, arena: int) -> None:
        """Begins a part's turn, on its thread. Arenas are the parts' numbers in this process."""
        self._arena = arena
        self._pager.turn(arena)
        self.count()
        self._pager.enter(arena)

    def end(self) -> None:
        """Ends the turn."""
        self._pager.enter(None)
        self._arena = None

    def check(self) -> None:
        """Raises :class:`StoreError` where an operation has needed more than the memory."""
        self._check(self._pager.counters())

    def _check(self, found: PagerCounters) -> None:
        if found.overrun_bytes > self._overrun:
            more, self._overrun = found.overrun_bytes - self._overrun, found.overrun_bytes
            raise StoreError(
                f"memory={counted(self.memory, 'bytes')}: an operator of a part needed "
                f"{counted(more, 'bytes')} more at once. {self._remedy_of_operator(more)}"
            )

    def fix(self, budget: int, cache_bytes: int) -> None:
        """Lets paged tensors and caches together take these bytes, whatever the process takes.

        A sample of a graph may then have what the whole graph's tensors may.
        """
        self._fixed, self.cache_bytes = budget, cache_bytes

    def count(self) -> None:
        """Leaves to the pager what nothing else of this process has taken by now.

        Raises:
            StoreError: That is too little, or an operation has needed more.
        """
        found = self._pager.counters()
        self._check(found)
        if self._fixed is not None:
            self._pager.budget = max(self._fixed - self._slots, 1)
            return
        other = self._resident() - self._start - found.resident_bytes
        reserve = max(int(self.memory * RESERVE[0]), RESERVE[1])
        left = self.memory - reserve - other
        if left < self.memory * LEAST:
            least = max(other / (1 - LEAST - RESERVE[0]), (other + RESERVE[1]) / (1 - LEAST))
            raise StoreError(
                f"memory={counted(self.memory, 'bytes')}: {other:,} of them are taken by what "
                "can't wait in the store (libraries' buffers, and small tensors and objects of "
                f"all parts of this process), and {reserve:,} are kept free for more. Allow "
                f"more memory (at least {math.ceil(least):,} bytes), start more workers, or cut "
                "the graph into fewer parts"
            )
        self._pager.budget = left

    def remedy(self, needed: int, enough: int | None = None) -> str:
        """Says what to do where parts need so many bytes at once; ``enough`` leave room for all."""
        parts = max(2 * self._all, -(-self._all * needed // self.memory))
        least = math.ceil((enough or needed) / (1 - RESERVE[0]))
        return (
            f"Cut the graph into more parts (about {parts} instead of {self._all}: pyg-sar "
            f"partition --parts {parts}), or allow more memory (at least {counted(least, 'bytes')})"
        )

    def _remedy_of_operator(self, more: int) -> str:
        """Says what to do where one operator needs so many bytes more.

        Backward passes touch about twice as much; caches of two passes grow with the memory.
        """
        room = self._pager.budget or 0
        others = int(self.memory * (1 - RESERVE[0])) - room - self._slots
        needed = math.ceil((max(others, 0) + 2 * (room + more)) / (1 - 2 / CACHES))
        if 2 * (others + self._slots) > self.memory:
            least = math.ceil(needed / (1 - RESERVE[0]))
            return (
                f"Allow more memory (at least {least:,} bytes): {others + self._slots:,} bytes are "
                "taken by what more parts don't make smaller (libraries' buffers, caches of rows, "
                "and their plan)"
            )
        return self.remedy(self.memory + more, needed)

    def explained(self, error: RuntimeError) -> RuntimeError:
        """Returns the pager's refusal with the remedy; other errors as they are."""
        text = str(error).partition("\n")[0]
        refused = last_error()
        if "API call failed" in text and refused:  # PyTorch's stable ABI tells kernels no more.
            text = refused
        elif not isinstance(error, torch.OutOfMemoryError):
            return error
        wanted = re.search(r"tensor of (\d+) bytes", text)
        more = re.search(r"needed (\d+) bytes more", text)
        needed = AT_ONCE * int(wanted[1]) if wanted else 2 * self.memory
        cause = text.partition(". Cut the graph")[0]
        if "store takes no more" in cause:
            return StoreError(
                f"store={str(self.directory)!r} is full: {cause}. Free some space, or pass another "
                "directory"
            )
        remedy = self._remedy_of_operator(int(more[1])) if more else self.remedy(needed)
        return StoreError(f"memory={counted(self.memory, 'bytes')}: {cause}. {remedy}")

    @contextmanager
    def unpaged(self, size: int = 0) -> Iterator[None]:
        """Makes tensors, of ``size`` bytes, that the system reads or writes, or that all parts use.

        Raises:
            StoreError: There is no room.
        """
        if size > (self._pager.budget or 0):
            raise StoreError(
                f"memory={counted(self.memory, 'bytes')}: rows on their way between workers need "
                f"{size:,} bytes more at once. {self.remedy(self.memory + size)}"
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

    def holds(self, size: int) -> bool:
        """Returns whether published rows of so many bytes stay in memory, beside what waits."""
        room = (self._pager.budget or 0) - LEAST * self.memory
        return size <= min(PUBLISHED * self.memory, room)

    def take_rows(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for published rows. Whoever fills some of them makes room for these."""
        with self.unpaged():
            rows = torch.empty(tuple(shape), dtype=dtype)
        self._slots += rows.nbytes
        return rows

    def give_rows(self, rows: Tensor) -> None:
        """Takes back memory for published rows."""
        self._slots -= rows.nbytes

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
        """Takes back memory for cached rows; the next pass will have it."""
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
        self._statm.close()


# Bits of what ReLU and dropout save ##########################################

LEAST_BITS = 1 << 14
"""Numbers from which bits are kept: a tensor of fewer stays in memory anyway."""
BITS_CHUNK = 1 << 19
"""Numbers that are turned into bits, or back, at a time: what NumPy needs beside."""

RELU = {torch.relu, torch.relu_, F.relu, Tensor.relu, Tensor.relu_}
DROPOUT = {torch.dropout, torch.dropout_, F.dropout}


class SavedBits(TorchFunctionMode):
    """Has ReLU and dropout of CPU tensors save bits, on the thread that enters it.

    See [Note: bits]. Not in :func:`torch.utils.checkpoint.checkpoint` and other blocks that say
    themselves what is saved, and not while PyTorch compiles.

    Attributes:
        kept: Bytes of what was turned into bits since the start.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept = 0
        self._last: weakref.ref[_Saved] | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        of_relu = func in RELU
        if not (of_relu or func in DROPOUT) or not _can_save(args[0] if args else None):
            return func(*args, **named)
        saved: list[_Saved] = []

        def pack(tensor: Tensor) -> _Saved:
            found = _Saved(tensor, of_relu)
            saved.append(found)
            return found

        with saved_tensors_hooks(pack, _Saved.whole):
            out = func(*args, **named)
        if of_relu:
            self._last = weakref.ref(saved[0]) if len(saved) == 1 else None
        elif saved:
            before = self._last() if self._last is not None else None
            if before is not None and before.is_memory_of(args[0]):
                saved.append(before)
            self._last = None
            self.kept += sum(each.become_bits() for each in saved)
        return out


def _rows_of(x: Any) -> Any:
    """Returns a tensor itself, or this part's rows of a tensor of the whole graph."""
    return x.local if hasattr(type(x), "local") else x


def _can_save(x: Any) -> bool:
    return (
        (type(x) is Tensor or hasattr(type(x), "local"))
        and x.requires_grad
        and torch.is_grad_enabled()
        and x.device.type == "cpu"
        and x.is_floating_point()
        and _rows_of(x).numel() >= LEAST_BITS
        and not torch.compiler.is_compiling()
        and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    )


def _wrapped(kind: Any, rows: Any, axis: int, local: Tensor) -> Tensor:
    """Returns rows as the tensor of the whole graph that they were of."""
    out: Tensor = kind(local, rows, axis)
    return out


class _Saved:
    """Holds the tensor that one call has saved, or its bits.

    ``sign``: only whether a number is above 0 matters; else the tensor has 0 and one other value.
    """

    __slots__ = (
        "__weakref__",
        "_bits",
        "_dtype",
        "_shape",
        "_sign",
        "_tensor",
        "_value",
        "_version",
        "_wrap",
    )

    def __init__(self, tensor: Tensor, sign: bool) -> None:
        # PyTorch: what a hook returns must not hold the output itself, whose node holds it.
        whole: Any = tensor.detach()
        self._wrap: Callable[[Tensor], Tensor] = lambda rows: rows
        if hasattr(type(whole), "local"):
            self._wrap = partial(_wrapped, type(whole), whole.rows, whole.axis)
        tensor = _rows_of(whole)
        self._tensor: Tensor | None = tensor
        self._bits = torch.empty(0, dtype=torch.uint8)  # once the tensor is None
        self._version, self._sign = tensor._version, sign
        self._shape, self._dtype, self._value = tensor.shape, tensor.dtype, 1.0

    def is_memory_of(self, x: Tensor) -> bool:
        """Returns whether this is a tensor that is there as a whole, and ``x`` is the same."""
        mine = self._tensor
        x = _rows_of(x)
        same = mine is not None and mine.data_ptr() == x.data_ptr()
        return same and mine is not None and mine.shape == x.shape

    def become_bits(self) -> int:
        """Gives the tensor up for its bits, and returns its bytes; 0: it stays."""
        tensor = self._tensor
        if tensor is None or not tensor.is_contiguous() or tensor.numel() < LEAST_BITS:
            return 0
        if tensor._version != self._version:
            return 0  # Its backward pass says so.
        flat = tensor.detach().view(-1)
        value = 1.0 if self._sign else float(flat[:BITS_CHUNK].max())
        bits = torch.empty(-(-len(flat) // 8), dtype=torch.uint8)
        for start in range(0, len(flat), BITS_CHUNK):
            chunk = flat[start : start + BITS_CHUNK]
            # ReLU hands on the gradient of NaN.
            mask = (chunk <= 0).logical_not_() if self._sign else chunk == value
            if not self._sign and not torch.equal(mask, chunk != 0):
                return 0
            packed = torch.from_numpy(np.packbits(mask.numpy()))
            bits[start // 8 : start // 8 + len(packed)] = packed
        self._tensor, self._bits, self._value = None, bits, value
        return tensor.nbytes

    def whole(self) -> Tensor:
        """The tensor, or one with the same answers; ``RuntimeError``: it was changed in place
        since.
        """
        tensor = self._tensor
        if tensor is not None:
            if tensor._version != self._version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: [{tuple(self._shape)}], the output of relu or dropout, is "
                    f"at version {tensor._version}; expected version {self._version} instead"
                )
            return self._wrap(tensor)
        out = torch.empty(self._shape, dtype=self._dtype)
        flat = out.view(-1)
        for start in range(0, len(flat), BITS_CHUNK):
            chunk = flat[start : start + BITS_CHUNK]
            bits = self._bits[start // 8 : -(-(start + len(chunk)) // 8)].numpy()
            chunk.copy_(torch.from_numpy(np.unpackbits(bits, count=len(chunk))))
        return self._wrap(out if self._value == 1 else out.mul_(self._value))
