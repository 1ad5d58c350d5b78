"""Where source rows come from: streamed shard by shard from their owners, or all at once.

[Note: rounds] Every worker walks the same units (:meth:`HaloPlan.units`) in the same order and
posts its transfers in that order; the communicator's issuing thread carries them out first in,
first out. A fetch that is posted ahead therefore never overtakes a gradient that another worker
posts first, and nothing can deadlock. A unit in which a worker has no part keeps its place (it
counts as fetched ahead, too), or its neighbours would change their order; nothing is sent for it.

[Note: lifetimes] A fetched buffer belongs to the consumer from the moment it is handed out. The
stream drops its own reference before it allocates the next one, and consumers must do so too
(``del rows``), or two shards are resident where the policy promises one. The ledger follows the
storage, not a counter that the code would have to keep right.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyg_sar.halo import HaloPlan
from pyg_sar.ledger import Label

if TYPE_CHECKING:
    from pyg_sar.comm import Communicator, Work


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


class RowLayout:
    """How the rows of several node tensors travel together: side by side, one message per dtype.

    Args:
        tensors: Node tensors, all of shape ``[num_local, *]``.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
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
            out[:, start:stop] = flat_rows(tensors[k].index_select(0, rows))
        return out

    def packer(
        self, tensors: Sequence[Tensor], rows: Tensor, dtype: torch.dtype
    ) -> Callable[[], Tensor] | None:
        """Packs when the issuing thread gets there; ``None`` where there are no rows."""
        if rows.numel() == 0:
            return None

        def pack() -> Tensor:
            with torch.no_grad():
                return self.pack(tensors, rows, dtype)

        return pack

    def unpack(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Views of the messages as rows of the node tensors, in their order."""
        out: list[Any] = [None] * len(self.shapes)
        for buffer, group in zip(buffers, self.groups.values(), strict=True):
            for k, start, stop in group:
                shape = self.shapes[k]
                rows = buffer[:, start:stop]
                out[k] = rows.unflatten(1, shape) if shape else rows[:, 0]
        return out


class ShardStream:
    r"""Source rows of one layer: the local rows, then unit by unit.

    At most the rows of ``1 + prefetch`` remote shards are resident (DESIGN: 2/N and 3/N of the
    graph with the worker's own). Traffic in: :math:`H_p F b` bytes.

    Args:
        plan: The halo plan.
        tensors: Source tensors ``[num_local, *]``, detached.
        label: Whom the ledger charges.
        prefetch: Units fetched ahead.
    """

    def __init__(
        self, plan: HaloPlan, tensors: Sequence[Tensor], label: Label, prefetch: int
    ) -> None:
        self.plan = plan
        self.tensors = list(tensors)
        self.label = label
        self.prefetch = prefetch
        self.layout = RowLayout(tensors)
        self._units = plan.units()
        self._posted = 1
        self._pending: deque[tuple[int, list[Tensor], list[Work]]] = deque()

    def __iter__(self) -> Iterator[tuple[int, list[Tensor]]]:
        """Yields ``(unit, rows)``: rows of each tensor, by owner, in its halo order."""
        self._post(self.prefetch)
        yield 0, self.tensors
        while self._posted < len(self._units) or self._pending:
            if not self._pending:
                self._post(1)
            unit, buffers, works = self._pending.popleft()
            for work in works:
                work.wait()
            self._post(self.prefetch)
            rows = self.layout.unpack(buffers)
            del buffers, works
            handed = [rows]
            del rows
            yield unit, handed.pop()

    def _post(self, ahead: int) -> None:
        """Posts fetches until ``ahead`` are in flight. See [Note: rounds]."""
        plan, comm = self.plan, self.plan.comm
        while len(self._pending) < ahead and self._posted < len(self._units):
            number, unit = self._posted, self._units[self._posted]
            self._posted += 1
            count = unit.num_rows
            buffers, works = [], []
            for k, (dtype, width) in enumerate(self.layout.widths()):
                buffer = tracked_buffer(
                    comm,
                    self.label[0],
                    count if k == 0 else 0,
                    (count, width),
                    dtype,
                    self.tensors[0].device,
                )
                sends = [
                    (peer, self.layout.packer(self.tensors, plan.send_rows(peer), dtype))
                    for peer in unit.peers
                ]
                receives = list(zip(unit.owners, buffer.split(unit.counts), strict=True))
                works += post_pairs(plan, sends, receives, self.label)
                buffers.append(buffer)
            self._pending.append((number, buffers, works))


class GradientReturn:
    r"""Sends each unit's gradient rows to their owners and adds up what the peers send here.

    Adjoint of :class:`ShardStream`. Traffic: the halo rows' gradients, :math:`H_p F b` bytes out.

    Args:
        plan: The halo plan.
        totals: Gradients of the worker's own rows, ``[num_local, *]``, added to in place.
        layer: Whom the ledger charges.
        overlap: Leave a unit in flight while the next one is worked on.
    """

    def __init__(self, plan: HaloPlan, totals: Sequence[Tensor], layer: str, overlap: bool) -> None:
        self.plan = plan
        self.totals = list(totals)
        self.label: Label = (layer, "backward", "gradient")
        self.overlap = overlap
        self.layout = RowLayout(totals)
        self._units = plan.units()
        self._packed: list[Tensor] = []
        self._pending: tuple[Tensor, list[Tensor], list[Work]] | None = None

    def start(self, unit: int) -> list[Tensor]:
        """Zeroed gradient rows for the sources of a unit: views of what will be sent.

        The worker's own rows are added to directly.
        """
        if unit == 0:
            return self.totals
        rows = self._units[unit].num_rows
        self._packed = [
            torch.zeros((rows, width), dtype=dtype, device=self.totals[0].device)
            for dtype, width in self.layout.widths()
        ]
        return self.layout.unpack(self._packed)

    def send(self, unit: int) -> None:
        """Sends what was started; call once per unit, in the order of the units."""
        if unit == 0:
            return
        self.drain()
        plan, now = self.plan, self._units[unit]
        counts = [plan.send_counts[peer] for peer in now.peers]
        rows = plan.rows_of(now.peers)
        buffers: list[Tensor] = []
        works: list[Work] = []
        for packed in self._packed:
            buffer = packed.new_empty(sum(counts), packed.size(1))
            sends = list(zip(now.owners, packed.split(now.counts), strict=True))
            receives = list(zip(now.peers, buffer.split(counts), strict=True))
            works += post_pairs(plan, sends, receives, self.label)
            buffers.append(buffer)
        self._packed = []
        self._pending = (rows, buffers, works)
        if not self.overlap:
            self.drain()

    def drain(self) -> None:
        """Waits for the unit in flight and adds the peers' gradients to the totals."""
        if self._pending is None:
            return
        rows, buffers, works = self._pending
        self._pending = None
        for work in works:
            work.wait()
        for total, part in zip(self.totals, self.layout.unpack(buffers), strict=True):
            add_rows(total, rows, part)


# The whole halo at once ######################################################


def _fetch_halo(x: Tensor, plan: HaloPlan, label: Label) -> Tensor:
    """Own rows followed by the halo's: ``[num_local, *]`` to ``[num_ids, *]``."""
    x = x.detach()
    flat = flat_rows(x)
    out = tracked_buffer(
        plan.comm, label[0], plan.num_halo, (plan.num_ids, flat.size(1)), x.dtype, x.device
    )
    out[: plan.num_local] = flat
    halo = out[plan.num_local :]

    def packer(rows: Tensor) -> Callable[[], Tensor]:
        return lambda: flat.index_select(0, rows)

    sends = [packer(plan.send_rows(q)) for q in range(plan.world_size)]
    receives = [halo[plan.halo_slice(q)] for q in range(plan.world_size)]
    post_all(plan, sends, receives, label).wait()
    return out.view(plan.num_ids, *x.shape[1:])


def _return_halo(
    ext: Tensor, plan: HaloPlan, label: Label, reduce: Callable[[Tensor, Tensor, Tensor], None]
) -> Tensor:
    """Halo rows go to their owners, which ``reduce(out, rows, values)`` them into their own."""
    flat = flat_rows(ext.detach())
    out = flat[: plan.num_local].clone()
    halo = flat[plan.num_local :]
    sends = [halo[plan.halo_slice(q)].contiguous() for q in range(plan.world_size)]
    receives = [
        flat.new_empty(plan.send_rows(q).numel(), flat.size(1)) for q in range(plan.world_size)
    ]
    post_all(plan, sends, receives, label).wait()
    for q, part in enumerate(receives):
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
    """``[num_local, *]`` to ``[num_ids, *]``; backward: :class:`_HaloReduce`'s forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: HaloPlan, layer: str) -> Tensor:
        ctx.plan, ctx.layer = plan, layer
        return _fetch_halo(x, plan, (layer, "forward", "fetch"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        label = (ctx.layer, "backward", "gradient")
        return _return_halo(grad.contiguous(), ctx.plan, label, add_rows), None, None


class _HaloReduce(torch.autograd.Function):
    """``[num_ids, *]`` to ``[num_local, *]`` by sums; backward: the gather."""

    @staticmethod
    def forward(ctx: Any, ext: Tensor, plan: HaloPlan, layer: str) -> Tensor:
        ctx.plan, ctx.layer = plan, layer
        return _return_halo(ext.contiguous(), plan, (layer, "forward", "reduce"), add_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _fetch_halo(grad, ctx.plan, (ctx.layer, "backward", "fetch")), None, None


def halo_gather(x: Tensor, plan: HaloPlan, layer: str = "") -> Tensor:
    """Own rows followed by all halo rows, differentiable.

    Args:
        x: Node tensor ``[num_local, *]``.
        plan: The halo plan.
        layer: Whom the ledger charges.

    Returns:
        ``[num_ids, *]``.
    """
    for ledger in plan.comm.ledgers:
        ledger.count("halo_gather")
    return _HaloGather.apply(x, plan, layer)


def halo_reduce(ext: Tensor, plan: HaloPlan, reduce: str = "sum", layer: str = "") -> Tensor:
    """Adds (or takes the maximum, minimum of) halo rows to their owners' rows.

    Adjoint of :func:`halo_gather`. Differentiable for ``'sum'`` only.

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
    if reduce == "sum":
        return _HaloReduce.apply(ext, plan, layer)
    if reduce not in ("amax", "amin"):
        raise ValueError(f"Expected 'reduce' to be 'sum', 'amax' or 'amin' (got {reduce!r})")

    def merge(out: Tensor, rows: Tensor, values: Tensor) -> None:
        out.scatter_reduce_(0, rows.view(-1, 1).expand_as(values), values, reduce=reduce)

    return _return_halo(ext.contiguous(), plan, (layer, "forward", "reduce"), merge)
