"""Rows grouped by part in scratch files, in one pass over each array: partitions in bounded memory.

[Note: bounded memory] With a limit, what has a row per edge or node attribute is never held as a
whole: arrays are read in pieces (memory mapped, they needn't be in memory before), each row is
written to the run of its part in a scratch file, and a part's run is read when the part is written.
A few numbers per node (:data:`PER_NODE`) and one part's tensors have to fit. The files are those of
an unlimited write, to the byte.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pyg_sar.kernels.ops import sort_edges
from pyg_sar.partition.unfinished import Unfinished
from pyg_sar.wording import counted

PER_NODE = 64
"""Bytes for each node that stay in memory: its part, rank and place, and what sorts them."""
_PER_EDGE = 120  # bytes for each edge of a piece that is sorted by part
PER_PART_EDGE = 200
"""Bytes for each edge of the part that is written: ends, ranks, sorts, and the file's tensors."""
_SAID_EVERY = 5.0  # seconds between lines of progress


def offsets_of(counts: Tensor) -> Tensor:
    """Returns ``[0, c_0, c_0 + c_1, ...]``: where groups start, one entry more than ``counts``."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


class Scratch:
    """An existing folder for scratch files, and the bytes of memory that may be taken beside them.

    ``report`` is called with lines of progress; ``unfinished`` is what a run before has left.
    """

    def __init__(
        self,
        folder: Path,
        memory: int,
        report: Callable[[str], None],
        unfinished: Unfinished | None = None,
    ) -> None:
        self.folder, self.memory, self.report = folder, memory, report
        self.unfinished = unfinished
        self._files, self._said = 0, 0.0
        self._stage = ("", 0.0)

    def assignment(self, make: Callable[[], Tensor]) -> Tensor:
        """Returns the part of each node; where a run before has left it, without ``make()``."""
        return make() if self.unfinished is None else self.unfinished.assignment(make)

    def file(self) -> Path:
        """Returns the path of another scratch file."""
        self._files += 1
        return self.folder / f"scratch-{self._files}"

    def say(self, what: str, done: int, total: int) -> None:
        """Reports how far a stage is, and the time left, every few seconds."""
        now = time.monotonic()
        if self._stage[0] != what:
            self._stage = (what, now)
            self._said = now
        if now - self._said >= _SAID_EVERY and done < total:
            self._said, left = now, (now - self._stage[1]) * (total - done) / max(done, 1)
            self.report(f"{what}: {100 * done / total:.0f}%, about {left:.0f} s left")

    def pieces(self, what: str, rows: int, row_bytes: int = 0) -> Iterator[slice]:
        """Yields slices of ``rows`` rows that fit, and reports how far it is and the time left."""
        step = max(self.memory // 8 // (_PER_EDGE + 4 * row_bytes), 2**10)
        for first in range(0, rows, step):
            yield slice(first, min(first + step, rows))
            self.say(what, min(first + step, rows), rows)

    def keep(self, values: Tensor) -> Tensor:
        """Returns the values as a file, memory mapped."""
        if not values.numel():
            return values
        path = self.file()
        values.numpy().tofile(path)
        return torch.from_file(str(path), shared=False, size=values.numel(), dtype=values.dtype)

    def check(self, nodes: list[int], edges: list[int], row_bytes: tuple[float, float]) -> None:
        """Raises ``ValueError`` where a part can't be written within the memory: names one that
        would do.

        ``nodes`` and ``edges`` are those of each part, ``row_bytes`` what the attributes of a node
        and of an edge take, on average.
        """
        fixed, (of_node, of_edge) = PER_NODE * sum(nodes), row_bytes
        most = max(
            2 * of_node * n + (PER_PART_EDGE + 2 * of_edge) * e
            for n, e in zip(nodes, edges, strict=True)
        )
        if fixed + most <= self.memory:
            return
        left, wanted = self.memory - fixed, f"{math.ceil((fixed + most) / 2**20)} MiB"
        remedy = f"memory='{wanted.replace(' ', '')}'"
        if left > 0:
            more = math.ceil(1.2 * len(nodes) * most / left)  # Smaller parts are less even.
            remedy = f"about {counted(max(more, len(nodes) + 1), 'parts')}, or {remedy}"
        raise ValueError(
            f"Expected 'memory' to hold {counted(PER_NODE, 'bytes')} for each of "
            f"{counted(sum(nodes), 'nodes')} and the largest part of {len(nodes)}, {wanted} in all "
            f"(got {self.memory / 2**20:.3g} MiB); choose {remedy}"
        )


class GroupedRows:
    """Rows of an array, shaped as those of ``like``, in a file: those of a part together, in the
    array's order. ``counts`` are the rows of each part, int64 ``[P]``.
    """

    def __init__(self, scratch: Scratch, counts: Tensor, like: Tensor) -> None:
        self._path, self._dtype, self._shape = scratch.file(), like.dtype, list(like.shape[1:])
        self._row = like[:0].new_empty(1, *self._shape).nbytes
        self._offsets = offsets_of(counts)
        self._next = self._offsets[:-1].clone()
        self._path.touch()

    def put(self, rows: Tensor, order: Tensor, bounds: Tensor) -> None:
        """Adds rows: ``order`` sorts them by part, whose runs then start at ``bounds``."""
        if not self._row:
            return
        # As bytes: PyTorch doesn't select from vectors of all dtypes (uint16).
        raw = rows.contiguous().view(len(rows), self._row // rows.itemsize).view(torch.uint8)
        flat = raw.index_select(0, order).view(-1).numpy()
        with self._path.open("r+b") as file:
            for p in bounds.diff().nonzero().view(-1).tolist():
                first, last = (bounds[p : p + 2] * self._row).tolist()
                file.seek(int(self._next[p]) * self._row)
                file.write(flat[first:last].data)
        self._next += bounds.diff()

    def replace(self, p: int, rows: Tensor) -> None:
        """Puts other rows in the place of those of part ``p``."""
        with self._path.open("r+b") as file:
            file.seek(int(self._offsets[p]) * self._row)
            file.write(rows.contiguous().view(-1).view(torch.uint8).numpy().data)

    def part(self, p: int) -> Tensor:
        """Returns the rows of part ``p``."""
        first, last = self._offsets[p : p + 2].tolist()
        found = torch.empty(last - first, *self._shape, dtype=self._dtype)
        if found.nbytes:
            data = np.fromfile(
                self._path, np.uint8, (last - first) * self._row, offset=first * self._row
            )
            found.view(-1).view(torch.uint8).copy_(torch.from_numpy(data))
        return found


def group_by_part(part: Tensor, num_parts: int) -> tuple[Tensor, Tensor]:
    """Sorts positions by part, stably, and returns ``(order, offsets)``."""
    order, offsets = sort_edges(part, num_parts)
    return order.long(), offsets.long()


class GroupedEdges:
    """Edges (source, target), of any integer dtype, ``[2, E]``, grouped by the part of their target
    (``owner``), with their ids.
    """

    def __init__(self, scratch: Scratch, edge_index: Tensor, owner: Tensor, num_parts: int) -> None:
        self._owner, self._targets = owner, edge_index[1]
        self.counts = torch.zeros(num_parts, dtype=torch.long)
        count = edge_index.size(1)
        for piece in scratch.pieces("counting edges", count):
            found = owner[edge_index[1, piece].long()]
            self.counts += torch.bincount(found, minlength=num_parts)
        empty = torch.empty(0, dtype=torch.long)
        self._columns = [GroupedRows(scratch, self.counts, empty) for _ in range(3)]
        for piece in scratch.pieces("edges by part", count):
            source, target = edge_index[:, piece].long()
            order, bounds = group_by_part(owner[target], num_parts)
            ids = torch.arange(piece.start, piece.stop)
            for column, values in zip(self._columns, (source, target, ids), strict=True):
                column.put(values, order, bounds)

    def part(self, p: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns sources, targets and ids of the edges of part ``p``, ids ascending."""
        source, target, ids = (column.part(p) for column in self._columns)
        return source, target, ids

    def sources(self, p: int) -> Tensor:
        """Returns the sources of the edges of part ``p``."""
        return self._columns[0].part(p)

    def owners(self, piece: slice) -> Tensor:
        """Returns the parts of a slice of the edges."""
        return self._owner[self._targets[piece].long()]


def grouped(
    scratch: Scratch, values: Tensor, owners: Callable[[slice], Tensor], counts: Tensor
) -> GroupedRows:
    """Groups the rows of an array by part: ``owners`` returns the parts of a slice of them."""
    found = GroupedRows(scratch, counts, values)
    for piece in scratch.pieces("attributes by part", len(values), values[:1].nbytes):
        found.put(values[piece], *group_by_part(owners(piece), counts.numel()))
    return found


_ODD = 0x9E3779B97F4A7C15 - 2**64


def mixed(values: Tensor) -> Tensor:
    """Returns SplitMix64's hash of each int64 number (Steele et al., OOPSLA 2014)."""
    values = values.long() + _ODD
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ _shifted(values, shift)) * (factor - 2**64)
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, by: int) -> Tensor:
    return (values >> by) & ((1 << (64 - by)) - 1)
