"""How rows travel: side by side in one buffer; and the whole halo at once, differentiable."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pyg_sar.exchange.halo import HaloPlan
from pyg_sar.exchange.wire import Wire
from pyg_sar.kernels.ops import gather_sum_
from pyg_sar.ledger import Label

if TYPE_CHECKING:
    from pyg_sar.comm.group import Communicator, Work


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


def tracked_buffer(
    comm: Communicator,
    layer: str,
    remote_rows: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """An uninitialized buffer whose remote rows open ledgers count until its storage is freed."""
    ledgers = list(comm.ledgers)
    if not ledgers or remote_rows == 0:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    if device.type == "cpu":
        # The array lives exactly as long as the storage that torch makes of it, views included.
        count = int(np.prod(shape)) * torch.empty((), dtype=dtype).element_size()
        owner: Any = np.empty(max(count, 1), dtype=np.uint8)
        buffer = torch.from_numpy(owner)[:count].view(dtype).view(tuple(shape))
    else:
        owner = buffer = torch.empty(tuple(shape), dtype=dtype, device=device)
    for ledger in ledgers:
        ledger.hold(layer, remote_rows)
        weakref.finalize(owner, ledger.hold, layer, -remote_rows).atexit = False
    return buffer


class Use(Enum):
    """What a consumer of streamed rows does with them."""

    KEEPS = "they are its own"
    PASSES = "it has done with them when it asks for the next unit"
    IN_PLACE = "the same, and it finds them by an index"


@dataclass(frozen=True, slots=True)
class UnitRows:
    """A unit's rows of some source tensors.

    Attributes:
        tensors: One for each source tensor.
        index: Where in these the unit's rows lie, ``[num_rows]``; ``None``: in order, and nothing
            else. Rows that a local peer published are read where they are.
    """

    tensors: list[Tensor]
    index: Tensor | None = None

    def alone(self) -> UnitRows:
        """The unit's rows without others, in order; copied for that."""
        if self.index is None:
            return self
        return UnitRows([tensor.index_select(0, self.index) for tensor in self.tensors])

    def places(self, rows: Tensor) -> Tensor:
        """Where in :attr:`tensors` rows of the unit lie, of the same dtype."""
        return rows if self.index is None else self.index.index_select(0, rows).to(rows.dtype)


class RowLayout:
    """How the rows of several node tensors travel together: side by side, one message per dtype.

    Args:
        tensors: Node tensors, all of shape ``[num_local, *]``.
        wire: How they travel.
    """

    def __init__(self, tensors: Sequence[Tensor], wire: Wire | None = None) -> None:
        self.wire = wire or Wire()
        self.shapes = [tuple(t.shape[1:]) for t in tensors]
        self.groups: dict[torch.dtype, list[tuple[int, int, int]]] = {}
        for k, tensor in enumerate(tensors):
            group = self.groups.setdefault(tensor.dtype, [])
            start = group[-1][2] if group else 0
            group.append((k, start, start + int(np.prod(self.shapes[k]))))

    def widths(self) -> list[tuple[torch.dtype, int]]:
        """Values per row of each message."""
        return [(dtype, group[-1][2]) for dtype, group in self.groups.items()]

    def row_bytes(self) -> int:
        """Bytes per row of all messages together."""
        return sum(w * torch.empty((), dtype=d).element_size() for d, w in self.widths())

    def pack(self, tensors: Sequence[Tensor], rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows' values of ``dtype`` side by side, ``[num_rows, width]``."""
        group = self.groups[dtype]
        if len(group) == 1:
            return flat_rows(tensors[group[0][0]].index_select(0, rows))
        out = tensors[group[0][0]].new_empty(rows.numel(), group[-1][2])
        for k, start, stop in group:
            torch.index_select(flat_rows(tensors[k]), 0, rows, out=out[:, start:stop])
        return out

    def packer(
        self, tensors: Sequence[Tensor], rows: Tensor, dtype: torch.dtype
    ) -> Callable[[], Tensor] | None:
        """Packs when the issuing thread gets there; ``None`` where there are no rows."""
        if rows.numel() == 0:
            return None

        def pack() -> Tensor:
            with torch.no_grad():
                return self.wire.encode(self.pack(tensors, rows, dtype))

        return pack

    def encoded(self, rows: Tensor) -> Callable[[], Tensor]:
        """Rounds rows that are packed already when the issuing thread gets there."""
        return lambda: self.wire.encode(rows)

    def land(self, buffers: Sequence[Tensor]) -> None:
        """Puts what arrived in its place."""
        for buffer in buffers:
            self.wire.land(buffer)

    def unpack(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Views of the messages as rows of the node tensors, in their order."""
        out: list[Any] = [None] * len(self.shapes)
        for buffer, group in zip(buffers, self.groups.values(), strict=True):
            for k, start, stop in group:
                shape = self.shapes[k]
                rows = buffer[:, start:stop]
                out[k] = rows.unflatten(1, shape) if shape else rows[:, 0]
        return out


# The whole halo at once ######################################################


def _fetch_halo(x: Tensor, plan: HaloPlan, label: Label, wire: Wire) -> Tensor:
    """Own rows followed by the halo's: ``[num_local, *]`` to ``[num_ids, *]``."""
    x = x.detach()
    flat = flat_rows(x)
    out = tracked_buffer(
        plan.comm, label[0], plan.num_halo, (plan.num_ids, flat.size(1)), x.dtype, x.device
    )
    out[: plan.num_local] = flat
    halo = out[plan.num_local :]

    def packer(rows: Tensor) -> Callable[[], Tensor]:
        return lambda: wire.encode(flat.index_select(0, rows))

    sends = [packer(plan.send_rows(q)) for q in range(plan.world_size)]
    landing = wire.landing(halo)
    receives = [landing[plan.halo_slice(q)] for q in range(plan.world_size)]
    post_all(plan, sends, receives, label).wait()
    wire.land(halo)
    return out.view(plan.num_ids, *x.shape[1:])


def _return_halo(
    ext: Tensor,
    plan: HaloPlan,
    label: Label,
    reduce: Callable[[Tensor, Tensor, Tensor], None],
    wire: Wire,
) -> Tensor:
    """Halo rows go to their owners, which ``reduce(out, rows, values)`` them into their own."""
    flat = flat_rows(ext.detach())
    out = flat[: plan.num_local].clone()
    halo = flat[plan.num_local :]
    sends = [wire.encode(halo[plan.halo_slice(q)]) for q in range(plan.world_size)]
    rows = [flat.new_empty(count, flat.size(1)) for count in plan.send_counts]
    post_all(plan, sends, [wire.landing(part) for part in rows], label).wait()
    for q, part in enumerate(rows):
        wire.land(part)
        if part.numel():
            reduce(out, plan.send_rows(q), part)
    return out.view(plan.num_local, *ext.shape[1:])


def post_pairs(
    plan: HaloPlan,
    sends: Sequence[tuple[int, Tensor | Callable[[], Tensor] | None]],
    receives: Sequence[tuple[int, Tensor]],
    label: Label,
) -> list[Work]:
    """Exchanges with some peers at once, ``(peer, rows)`` each; nothing where there are none."""
    if not sends and not receives:
        return []
    if len(sends) <= 1 and len(receives) <= 1:
        (dst, rows), (src, buffer) = (*sends, (-1, None))[0], (*receives, (-1, None))[0]
        return [plan.comm.exchange(rows, dst, buffer, src, label=label)]
    going: list[Any] = [None] * plan.world_size
    coming: list[Any] = [None] * plan.world_size
    for peer, rows in sends:
        going[peer] = rows
    for peer, buffer in receives:
        coming[peer] = buffer
    return [plan.comm.exchange_all(going, coming, label=label)]


def post_all(
    plan: HaloPlan,
    sends: Sequence[Tensor | Callable[[], Tensor] | None],
    receives: Sequence[Tensor],
    label: Label,
) -> Work:
    """Exchanges with all peers at once; the worker's own entries are left out."""
    own = plan.rank
    return plan.comm.exchange_all(
        [None if q == own else send for q, send in enumerate(sends)],
        [None if q == own else receive for q, receive in enumerate(receives)],
        label=label,
    )


class _HaloGather(torch.autograd.Function):
    """``[num_local, *]`` to ``[num_ids, *]``. Its adjoint is :class:`_HaloReduce`.

    Each calls the other in its backward pass, so that both can be differentiated any number of
    times.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: HaloPlan, label: Label, wire: Wire) -> Tensor:
        ctx.given = plan, (label[0], "backward", "gradient"), wire
        return _fetch_halo(x, plan, label, wire)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.given[0].comm.returning()
        return _HaloReduce.apply(grad, *ctx.given), None, None, None


class _HaloReduce(torch.autograd.Function):
    """``[num_ids, *]`` to ``[num_local, *]`` by sums. Its adjoint is :class:`_HaloGather`."""

    @staticmethod
    def forward(ctx: Any, ext: Tensor, plan: HaloPlan, label: Label, wire: Wire) -> Tensor:
        ctx.given = plan, (label[0], "backward", "fetch"), wire
        return _return_halo(ext.contiguous(), plan, label, add_rows, wire)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _HaloGather.apply(grad, *ctx.given), None, None, None


def halo_gather(x: Tensor, plan: HaloPlan, layer: str = "", wire: Wire | None = None) -> Tensor:
    """Own rows followed by all halo rows, differentiable any number of times.

    Args:
        x: Node tensor ``[num_local, *]``.
        plan: The halo plan.
        layer: Whom the ledger charges.
        wire: How rows travel; exactly by default.

    Returns:
        ``[num_ids, *]``.
    """
    for ledger in plan.comm.ledgers:
        ledger.count("halo_gather")
    return _HaloGather.apply(x, plan, (layer, "forward", "fetch"), wire or Wire())


def halo_reduce(ext: Tensor, plan: HaloPlan, reduce: str = "sum", layer: str = "") -> Tensor:
    """Adds (or takes the maximum, minimum of) halo rows to their owners' rows.

    Adjoint of :func:`halo_gather`. Differentiable for ``'sum'`` only, any number of times.

    Args:
        ext: ``[num_ids, *]``.
        plan: The halo plan.
        reduce: ``'sum'``, ``'amax'`` or ``'amin'``.
        layer: Whom the ledger charges.

    Returns:
        ``[num_local, *]``.
    """
    for ledger in plan.comm.ledgers:
        ledger.count("halo_reduce")
    label = (layer, "forward", "reduce")
    if reduce == "sum":
        return _HaloReduce.apply(ext, plan, label, Wire())
    if reduce not in ("amax", "amin"):
        raise ValueError(f"Expected 'reduce' to be 'sum', 'amax' or 'amin' (got {reduce!r})")

    def merge(out: Tensor, rows: Tensor, values: Tensor) -> None:
        out.scatter_reduce_(0, rows.view(-1, 1).expand_as(values), values, reduce=reduce)

    return _return_halo(ext.contiguous(), plan, label, merge, Wire())
