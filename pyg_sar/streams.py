"""Source rows streamed shard by shard from their owners, and their gradients on the way back.

[Note: rounds] Every worker walks the same rounds (:meth:`HaloPlan.rounds`) in the same order and
posts the same transfers in the same order, also where a shard is empty; the communicator's issuing
thread carries them out first in, first out. A fetch that is posted ahead therefore never overtakes
a gradient that another worker posts first, and nothing can deadlock.

[Note: lifetimes] A fetched buffer belongs to the consumer from the moment it is handed out. The
stream drops its own reference before it allocates the next one, and consumers must do so too
(``del rows``), or two shards are resident where the policy promises one. The ledger follows the
storage, not a counter that the code would have to keep right.

[Note: neighbours in a stream] Rows of a worker of the same host are read from what it published
(see sharing): the stream publishes its own tensors once, when it starts, and a round's fetch
gathers from the owner's publication. Between other workers rows are packed for each peer. A round
may have one of its peers here and the other there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyg_sar.exchange import RowLayout, add_rows, tracked_buffer
from pyg_sar.halo import HaloPlan
from pyg_sar.ledger import Label
from pyg_sar.shared_rows import SharedRows, shared_rows
from pyg_sar.sharing import Incoming, Loan, Sharing

if TYPE_CHECKING:
    from pyg_sar.comm import Work


class ShardStream:
    r"""Source rows of one layer, one owner at a time: the local rows, then round by round.

    At most ``1 + prefetch`` remote shards are resident (DESIGN: 2/N and 3/N of the graph with the
    worker's own). Traffic in: :math:`H_p F b` bytes.

    Args:
        plan: The halo plan.
        tensors: Source tensors ``[num_local, *]``, detached.
        label: Whom the ledger charges.
        prefetch: Shards fetched ahead.
    """

    def __init__(
        self, plan: HaloPlan, tensors: Sequence[Tensor], label: Label, prefetch: int
    ) -> None:
        self.plan = plan
        self.tensors = list(tensors)
        self.label = label
        self.prefetch = prefetch
        self.layout = RowLayout(tensors)
        self._rounds = plan.rounds()
        self._posted = 0
        self._pending: deque[tuple[int, list[Tensor], list[Work]]] = deque()
        self._sharing = plan.comm.sharing
        self._near = frozenset[int]() if self._sharing is None else self._sharing.ranks

    def __iter__(self) -> Iterator[tuple[int, list[Tensor]]]:
        """Yields ``(owner, rows)``: rows of each tensor, in the owner's halo order."""
        published = [] if self._sharing is None else self._publish(self._sharing)
        self._post(self.prefetch)
        yield self.plan.rank, self.tensors
        while self._posted < len(self._rounds) or self._pending:
            if not self._pending:
                self._post(1)
            owner, buffers, works = self._pending.popleft()
            for work in works:
                work.wait()
            self._post(self.prefetch)
            rows = self.layout.unpack(buffers)
            del buffers, works
            handed = [rows]
            del rows
            yield owner, handed.pop()
        for work in published:
            work.wait()

    def _publish(self, sharing: Sharing) -> list[Work]:
        """Lets the neighbours read the own rows. See [Note: neighbours in a stream]."""
        shared = shared_rows(self.plan, sharing)
        return [
            sharing.publish(
                partial(shared.fill, tensors=self.tensors, layout=self.layout, dtype=dtype),
                (shared.count, width),
                dtype,
                shared.readers,
                self.label,
            )
            for dtype, width in self.layout.widths()
        ]

    def _post(self, ahead: int) -> None:
        """Posts fetches until ``ahead`` are in flight. See [Note: rounds]."""
        plan = self.plan
        while len(self._pending) < ahead and self._posted < len(self._rounds):
            owner, peer = self._rounds[self._posted]
            self._posted += 1
            count = plan.halo_counts[owner]
            buffers: list[Tensor] = []
            works: list[Work] = []
            for k, (dtype, width) in enumerate(self.layout.widths()):
                buffer = tracked_buffer(
                    plan.comm,
                    self.label[0],
                    count if k == 0 else 0,
                    (count, width),
                    dtype,
                    self.tensors[0].device,
                )
                works += self._fetch(owner, peer, buffer)
                buffers.append(buffer)
            self._pending.append((owner, buffers, works))

    def _fetch(self, owner: int, peer: int, buffer: Tensor) -> list[Work]:
        """Fetches the rows of one dtype from ``owner``, and sends ``peer`` what it fetches."""
        comm, works = self.plan.comm, []
        if not {owner, peer} <= self._near:
            rows = self.plan.send_rows(peer)
            send = (
                None if peer in self._near else self.layout.packer(self.tensors, rows, buffer.dtype)
            )
            recv = None if owner in self._near else buffer
            works.append(comm.exchange(send, peer, recv, owner, label=self.label))
        if self._sharing is not None and owner in self._near:
            shared: SharedRows = shared_rows(self.plan, self._sharing)
            shape = shared.counts.get(owner, 0), buffer.size(1)
            use = partial(shared.gather, owner=owner, out=buffer)
            works.append(self._sharing.read(owner, shape, use, buffer, self.label))
        return works


class GradientReturn:
    r"""Sends each shard's gradient rows to their owner and adds up what the peers send here.

    Adjoint of :class:`ShardStream`. Traffic: the halo rows' gradients, :math:`H_p F b` bytes out.

    [Note: gradients in flight] What is computed for one shard travels while the next one is worked
    on. Between neighbours that takes no memory: the rows stay where they were computed, and the
    owner adds them from there. Over a network they take a buffer at either end, which a policy
    with one prefetched shard affords where the backward pass fetches none.

    Args:
        plan: The halo plan.
        totals: Gradients of the worker's own rows, ``[num_local, *]``, added to in place.
        layer: Whom the ledger charges.
        prefetch: Shards fetched ahead; 0 leaves nothing in flight.
        refetches: Whether shards are fetched meanwhile.
    """

    def __init__(
        self,
        plan: HaloPlan,
        totals: Sequence[Tensor],
        layer: str,
        prefetch: int,
        refetches: bool = False,
    ) -> None:
        self.plan = plan
        self.totals = list(totals)
        self.label: Label = (layer, "backward", "gradient")
        self.prefetch, self.refetches = prefetch, refetches
        self.layout = RowLayout(totals)
        self._peers = dict(plan.rounds())
        self._packed: list[Tensor | Loan] = []
        self._pending: tuple[int, list[Tensor | Incoming], list[Work]] | None = None
        self._sharing = plan.comm.sharing
        self._near = frozenset[int]() if self._sharing is None else self._sharing.ranks

    def start(self, owner: int) -> list[Tensor]:
        """Zeroed gradient rows for the sources of ``owner``: views of what will be sent.

        The worker's own rows are added to directly.
        """
        if owner == self.plan.rank:
            return self.totals
        rows = self.plan.halo_counts[owner]
        found = []
        for dtype, width in self.layout.widths():
            if self._sharing is not None and owner in self._near:
                loan = self._sharing.lend((rows, width), dtype)
                self._packed.append(loan)
                found.append(loan.rows.zero_())
            else:
                device = self.totals[0].device
                found.append(torch.zeros((rows, width), dtype=dtype, device=device))
                self._packed.append(found[-1])
        return self.layout.unpack(found)

    def send(self, owner: int) -> None:
        """Sends what was started; call once per round, in the order of the rounds."""
        if owner == self.plan.rank:
            return
        self.drain()
        peer = self._peers[owner]
        arriving: list[Tensor | Incoming] = []
        works: list[Work] = []
        for (dtype, width), packed in zip(self.layout.widths(), self._packed, strict=True):
            arriving.append(self._swap(packed, owner, peer, dtype, width, works))
        self._packed = []
        self._pending = (peer, arriving, works)
        far = not {owner, peer} <= self._near
        if self.prefetch == 0 or (far and self.refetches and self.prefetch == 1):
            self.drain()

    def _swap(
        self,
        packed: Tensor | Loan,
        owner: int,
        peer: int,
        dtype: torch.dtype,
        width: int,
        works: list[Work],
    ) -> Tensor | Incoming:
        """Sends rows to ``owner``; returns where those of ``peer`` will be."""
        shape = self.plan.send_rows(peer).numel(), width
        arriving: Tensor | None = None
        if self._sharing is not None and isinstance(packed, Loan):
            works.append(self._sharing.give(packed, owner, self.label))
        if peer not in self._near:
            arriving = torch.empty(shape, dtype=dtype, device=self.totals[0].device)
        send = packed if isinstance(packed, Tensor) else None
        if send is not None or arriving is not None:
            exchange = self.plan.comm.exchange
            works.append(exchange(send, owner, arriving, peer, label=self.label))
        if arriving is not None or self._sharing is None:
            assert arriving is not None
            return arriving
        expected = self._sharing.expect(peer, shape, dtype, self.label)
        works.append(expected.work)
        return expected

    def drain(self) -> None:
        """Waits for the round in flight and adds the peer's gradients to the totals."""
        if self._pending is None:
            return
        peer, arriving, works = self._pending
        self._pending = None
        for work in works:
            work.wait()
        rows = self.plan.send_rows(peer)
        buffers = [a.rows if isinstance(a, Incoming) else a for a in arriving]
        for total, part in zip(self.totals, self.layout.unpack(buffers), strict=True):
            add_rows(total, rows, part)
        for a in arriving:
            if isinstance(a, Incoming):
                a.release()
