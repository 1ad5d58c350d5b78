"""Rows of node tensors: side by side in one buffer, from a source, into a sink.

[Note: sources and sinks] A :class:`RowSource` hands out rows of node tensors unit by unit, wherever
they come from: own memory, another worker's, a file. A :class:`RowSink` is its adjoint: it takes
rows that were computed for a unit to where they are added up. Both are opened and closed once per
unit, in the order of the units, by all workers alike.

[Note: lifetimes] Opened rows belong to the consumer until it closes the unit. It must drop them
(``del rows``) before it opens another one, or two units are resident where the policy promises one.
The ledger follows the storage, not a counter that the code would have to keep right.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from pyg_sar.exchange.wire import Wire
from pyg_sar.kernels.ops import gather_sum_
from pyg_sar.ledger import Label

WHOLE = 0.6
"""A copy of all rows takes as long as gathering this part of them."""


def flat_rows(x: Tensor) -> Tensor:
    """``[N, *]`` as ``[N, width]``, also where there are no rows."""
    return x.reshape(x.size(0), x.shape[1:].numel())


def add_rows(out: Tensor, index: Tensor, rows: Tensor) -> None:
    r"""``out[index[k]] += rows[k]`` along the first axis, repeated indices included.

    Shapes: ``out [N, *]``, ``index [K]`` (int64), ``rows [K, *]``.
    """
    if index.numel() == 0 or rows.numel() == 0:
        return
    flat = flat_rows(rows)
    target = out.view(out.size(0), flat.size(1))  # a view, also of columns of a packed buffer
    target.scatter_add_(0, index.view(-1, 1).expand_as(flat), flat)


def add_distinct_rows(out: Tensor, index: Tensor, rows: Tensor) -> None:
    """As :func:`add_rows`, faster where the index ascends."""
    if not bool((index[1:] > index[:-1]).all()):
        add_rows(out, index, rows)
    elif index.numel() and rows.numel():
        flat = flat_rows(rows)
        target = out.view(out.size(0), flat.size(1))
        order = torch.arange(index.numel() + 1, dtype=torch.int32, device=index.device)
        gather_sum_(target, flat, order[:-1], order, index)


@dataclass(frozen=True, slots=True)
class UnitRows:
    """A unit's rows of some node tensors.

    Attributes:
        tensors: One for each node tensor.
        index: Where in these the unit's rows lie, ``[num_rows]``; ``None``: in order, and nothing
            else. Rows that a worker of the same host published are read where they are.
    """

    tensors: list[Tensor]
    index: Tensor | None = None


class RowSource(ABC):
    """Rows of node tensors, unit by unit. See [Note: sources and sinks]."""

    @abstractmethod
    def open(self, unit: int) -> UnitRows:
        """The unit's rows, waited for; those of unit 0 are the worker's own."""

    def close(self, unit: int) -> None:
        """Takes the unit's rows back."""

    def finish(self) -> None:
        """Ends the pass, after the last unit."""


class RowSink(ABC):
    """Takes rows that were computed for units to their owners. See [Note: sources and sinks]."""

    @abstractmethod
    def open(self, unit: int) -> list[Tensor]:
        """Zeroed rows to add to, of each tensor; of unit 0, what own rows are added up in."""

    @abstractmethod
    def close(self, unit: int) -> None:
        """Sends the unit's rows."""

    def finish(self) -> None:
        """Waits until all that came has been added up."""


Merge = Callable[[Tensor, Sequence[Tensor]], None]
"""Adds rows that came for some own rows ``[K]``, int64, to these: ``[K, *]`` of each tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class Travel:
    """How the rows of a pass come, and how those go that are computed for other workers.

    Attributes:
        label: Whom the ledger charges.
        prefetch: Units fetched ahead, 0 or 1.
        wire: How rows travel.
        in_place: The consumer finds rows that come by an index, and has done with them when it
            closes the unit: they may be handed out where they lie.
        scale: Rows for other workers travel multiplied by their number, ``[num_local]``.
        in_flight: A unit's computed rows may travel over a network while the next unit is worked
            on; ``None``: not even between workers of one host.
        merge: Takes in computed rows that come; ``None``: they are added to the totals.
    """

    label: Label
    prefetch: int = 1
    wire: Wire = field(default_factory=Wire)
    in_place: bool = False
    scale: Tensor | None = None
    in_flight: bool | None = True
    merge: Merge | None = None

    def take_in(self, totals: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> None:
        """Takes in computed rows that came for some own rows, of each tensor."""
        if self.merge is not None:
            self.merge(index, rows)
            return
        for total, part in zip(totals, rows, strict=True):
            add_distinct_rows(total, index, part)


class Exchange(Protocol):
    """Units of rows, and the sources and sinks by which they come and go."""

    def source(self, tensors: Sequence[Tensor], how: Travel) -> RowSource:
        """Rows of ``tensors [num_local, *]``, which are detached."""

    def sink(self, totals: Sequence[Tensor], how: Travel) -> RowSink:
        """Takes rows to their owners, which add them up in ``totals [num_local, *]``."""


class RowLayout:
    """How the rows of several node tensors travel together: side by side, one message per dtype.

    Args:
        kinds: Dtype and shape of a row of each.

    Attributes:
        groups: By dtype, ``(tensor's number, first column, last column)``.
        widths: Columns of each message, with its dtype.
        plain: Each message is a tensor's rows, as they are.
    """

    def __init__(self, kinds: Sequence[tuple[torch.dtype, torch.Size]]) -> None:
        self.shapes = [shape for _, shape in kinds]
        self.groups: dict[torch.dtype, list[tuple[int, int, int]]] = {}
        for k, (dtype, _) in enumerate(kinds):
            group = self.groups.setdefault(dtype, [])
            start = group[-1][2] if group else 0
            group.append((k, start, start + self.shapes[k].numel()))
        self.plain = len(self.groups) == len(kinds) and all(len(s) == 1 for s in self.shapes)
        self.widths = [(dtype, group[-1][2]) for dtype, group in self.groups.items()]

    def write(
        self,
        out: Tensor,
        tensors: Sequence[Tensor],
        dtype: torch.dtype,
        rows: Tensor | None,
        scale: Tensor | None = None,
    ) -> None:
        """Writes rows of the tensors of a dtype side by side into ``out [num_rows, width]``.

        ``rows`` of ``None`` are the first ones; ``scale [num_local]`` multiplies them.
        """
        with torch.no_grad():
            for k, start, stop in self.groups[dtype]:
                flat, columns = flat_rows(tensors[k]), out[:, start:stop]
                if rows is not None:
                    torch.index_select(flat, 0, rows, out=columns)
                elif scale is None:
                    columns.copy_(flat[: out.size(0)])
                else:
                    torch.mul(flat[: out.size(0)], scale[: out.size(0)].unsqueeze(1), out=columns)
                    continue
                if scale is not None:
                    columns *= scale[rows].unsqueeze(1)

    def pack(
        self,
        tensors: Sequence[Tensor],
        rows: Tensor,
        dtype: torch.dtype,
        scale: Tensor | None = None,
    ) -> Tensor:
        """Rows of the tensors of a dtype side by side, ``[num_rows, width]``."""
        group = self.groups[dtype]
        if len(group) == 1 and scale is None:
            with torch.no_grad():
                return flat_rows(tensors[group[0][0]].index_select(0, rows))
        out = tensors[group[0][0]].new_empty(rows.numel(), group[-1][2])
        self.write(out, tensors, dtype, rows, scale)
        return out

    def unpack(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Views of the messages as rows of the node tensors, in their order."""
        out: list[Any] = [None] * len(self.shapes)
        for buffer, group in zip(buffers, self.groups.values(), strict=True):
            for k, start, stop in group:
                shape = self.shapes[k]
                rows = buffer[:, start:stop]
                out[k] = rows.unflatten(1, shape) if shape else rows[:, 0]
        return out


@lru_cache(256)
def layout_of(*kinds: tuple[torch.dtype, torch.Size]) -> RowLayout:
    """The layout of node tensors of these dtypes, and of these shapes of a row."""
    return RowLayout(kinds)
