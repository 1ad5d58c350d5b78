"""Operations between workers that read each other's memory: publish, read in place, send, receive.

[Note: publication] Where rows of one node tensor are wanted by several local peers, the owner
publishes them once, and each local peer reads the rows that it needs from there, in place or by a
copy of these: nothing is packed per reader, nothing goes through a socket. Gradients go back the
other way round: a reader computes them in memory that it shares, and the owner adds them up from
there.

[Note: messages] A writer fills a piece of its own shared memory and sends its readers messages that
say where; each reader uses it in place and releases it, and after the last release the writer fills
it anew. Messages of one subject from one worker to another arrive in the order in which they were
sent, which is the order in which the reader's program expects them. Between subjects it isn't: a
publication is written before, and may be read after, gradients that the same worker sends. Writing
never waits for a reader, so that whatever order workers do this in, nobody waits for a cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm.backends import SMALL_SUM, PeerTensor, Transport, reduced, to_bytes
from pyg_sar.comm.issuer import Issuer, Work
from pyg_sar.comm.messages import count, name_of, num_bytes
from pyg_sar.comm.shared_memory import SharedBuffer, SharedMemory, SharedMessage, Subject
from pyg_sar.ledger import Label, spoken
from pyg_sar.wording import counted

PIECE = 1 << 20  # bytes


def pieces_of(rows: Tensor) -> Iterator[slice]:
    """Yields some rows at a time, of about a mebibyte: a local peer's, read between two pauses."""
    count = max(PIECE // max(rows[:1].numel() * rows.element_size(), 1), 1)
    for start in range(0, rows.size(0), count):
        yield slice(start, start + count)


def as_rows(data: Tensor, rows: int, width: int, dtype: torch.dtype, src: int, rank: int) -> Tensor:
    """Returns bytes as ``[rows, width]``, or raises ``ValueError`` where there are more or less."""
    size = rows * width * dtype.itemsize
    if data.numel() != size:
        raise ValueError(
            f"rank {rank} expects {counted(size, 'bytes')} (shape ({rows}, {width}), {dtype}) from "
            f"rank {src}, which sends {data.numel()}"
        )
    return data.view(dtype).view(rows, width)


# The operations ###############################################################


@dataclass(slots=True)
class Incoming:
    """Rows in a local peer's memory that are on their way: ``[rows, width]``, read only, after
    ``work`` was waited for, until :meth:`release`.
    """

    rows: Tensor
    work: Work = field(init=False)
    message: SharedMessage | None = None
    _held: tuple[Sequence[Any], str, int] = (), "", 0

    def hold(self, ledgers: Sequence[Any], layer: str, count: int) -> None:
        """Has ledgers count remote rows as resident until :meth:`release`."""
        self._held = list(ledgers), layer, count
        for ledger in self._held[0]:
            ledger.hold(layer, count)

    def pause(self) -> None:
        """Gives up what was read so far of the memory, as :meth:`SharedMessage.pause`."""
        if self.message is not None:
            self.message.pause()

    def release(self) -> None:
        """Gives the memory back to the local peer."""
        self.rows = self.rows.new_empty(0)
        if self.message is not None:
            self.message.release()
        self.message = None
        ledgers, layer, count = self._held
        for ledger in ledgers:
            ledger.hold(layer, -count)
        self._held = (), "", 0


class Sharing:
    """Reads and writes the memory of local peers, in the order of the communicator's issuer.

    All workers call these in the same order. Rows of no bytes are neither sent nor expected.
    Ledgers charge ``label``.
    """

    def __init__(
        self, local_peers: SharedMemory, rank: int, issuer: Issuer, ledgers: list[Any]
    ) -> None:
        self.local_peers, self.rank = local_peers, rank
        self.ranks, self.name = local_peers.ranks, local_peers.name
        self._issuer, self._ledgers = issuer, ledgers

    def publish(
        self,
        fill: Callable[[Tensor], None],
        shape: tuple[int, int],
        dtype: torch.dtype,
        readers: Mapping[int, int],
        label: Label,
    ) -> Work:
        """Lets local peers read a copy of rows.

        ``fill`` writes them into a tensor of this shape, ``(rows, width)``, and dtype, on the
        issuing thread. Ledgers count how many of the rows each of the ``readers`` will take. The
        handle is to be waited for before what ``fill`` reads is changed.
        """
        row = shape[1] * dtype.itemsize
        wanted = {peer: number * row for peer, number in readers.items() if number * row}
        if not wanted:
            return Work.completed()
        ledgers, name = list(self._ledgers), name_of(spoken(label), dtype, shape)

        def task() -> None:
            buffer = self.local_peers.take(shape[0] * row)
            fill(buffer.data.view(dtype).view(shape))
            self.local_peers.send(buffer, Subject.PUBLICATION, list(wanted), name)
            count(ledgers, label, wanted, {}, self.local_peers.name)

        return self._issuer.submit(
            task, label, f"publication for ranks {', '.join(map(str, wanted))}"
        )

    def allocate(self, shape: tuple[int, int], dtype: torch.dtype) -> SharedBuffer:
        """Returns uninitialized memory for rows that a local peer will read: fill its ``rows``."""
        buffer = self.local_peers.take(shape[0] * shape[1] * dtype.itemsize)
        buffer.rows = buffer.data.view(dtype).view(shape)
        return buffer

    def send(self, buffer: SharedBuffer, parts: Mapping[int, int], label: Label) -> Work:
        """Lets each local peer read its part of a buffer, which must not be touched any more.

        ``parts`` tells how many of its rows are for each worker, in their order; those of workers
        that are no local peers are left out.
        """
        width, dtype = buffer.rows.size(1), buffer.rows.dtype
        row, where = width * dtype.itemsize, spoken(label)
        pieces, first = [], 0
        for peer, number in parts.items():
            if peer in self.ranks and number * row:
                name = name_of(where, dtype, (number, width))
                pieces.append((peer, first * row, number * row, name))
            first += number
        sizes = {peer: size for peer, _, size, _ in pieces}
        buffer.rows = buffer.rows.new_empty(0)
        ledgers = list(self._ledgers)

        def task() -> None:
            self.local_peers.send_parts(buffer, Subject.ROWS, pieces)
            count(ledgers, label, sizes, {}, self.local_peers.name)

        return self._issuer.submit(task, label, f"rows for ranks {', '.join(map(str, sizes))}")

    def expect(
        self,
        src: int,
        subject: Subject,
        shape: tuple[int, int],
        dtype: torch.dtype,
        label: Label,
        read: int | None = None,
    ) -> Incoming:
        """Expects rows, ``(rows, width)``, to be read where they lie: what ``src`` published, or
        sends.

        ``read`` is how many of them will be read, by which ledgers count; ``None``: all.
        """
        size = (shape[0] if read is None else read) * shape[1] * dtype.itemsize
        found = Incoming(torch.empty(shape if size == 0 else 0, dtype=dtype))
        if size == 0:
            found.work = Work.completed()
            return found
        ledgers, name = list(self._ledgers), name_of(spoken(label), dtype, shape)

        def task() -> None:
            found.message = self.local_peers.receive(src, subject, name)
            found.rows = as_rows(found.message.data, *shape, dtype, src, self.rank)
            count(ledgers, label, {}, {src: size}, self.local_peers.name)

        found.work = self._issuer.submit(task, label, f"rows of rank {src}")
        return found

    def trim(self) -> None:
        """Gives memory that no local peer reads back to the system; it is kept for use again."""
        self.local_peers.trim()

    # Plain exchanges ---------------------------------------------------------

    def exchange(
        self,
        transport: Transport,
        sends: Sequence[PeerTensor],
        recvs: Sequence[PeerTensor],
        ledgers: Sequence[Any],
        label: Label,
    ) -> None:
        """Exchanges tensors, through shared memory with local peers, else by ``transport``."""
        near = [[p for p in tensors if p[0] in self.ranks] for tensors in (sends, recvs)]
        far = [[p for p in tensors if p[0] not in self.ranks] for tensors in (sends, recvs)]
        where = spoken(label)
        for peer, tensor in near[0]:
            buffer = self.local_peers.take(num_bytes(tensor))
            buffer.data.copy_(to_bytes(tensor))
            name = name_of(where, tensor.dtype, tensor.shape)
            self.local_peers.send(buffer, Subject.EXCHANGE, [peer], name)
        if any(far):
            transport.exchange(far[0], far[1], where)
        for peer, target in near[1]:
            name = name_of(where, target.dtype, target.shape)
            message = self.local_peers.receive(peer, Subject.EXCHANGE, name)
            whole = to_bytes(target)
            shape = whole.numel(), 1
            whole.copy_(as_rows(message.data, *shape, torch.uint8, peer, self.rank).view(-1))
            message.release()
        for tensors, name in ((near, self.local_peers.name), (far, transport.name)):
            out, back = ({peer: num_bytes(tensor) for peer, tensor in way} for way in tensors)
            count(ledgers, label, out, back, name)

    # Small sums --------------------------------------------------------------

    def reduces(self, tensor: Tensor) -> bool:
        """Returns whether :meth:`all_reduce` takes a tensor: the same answer on all workers."""
        small = tensor.device.type == "cpu" and num_bytes(tensor) <= SMALL_SUM
        return small and self.local_peers.complete

    def all_reduce(self, tensor: Tensor, op: str, where: str) -> None:
        """Reduces a small contiguous tensor in place, in the order of ranks, as gloo does here."""
        name = name_of(where, tensor.dtype, tensor.shape)
        found = self.local_peers.swap(to_bytes(tensor), name)
        everyones = {rank: data.view(tensor.dtype).view_as(tensor) for rank, data in found.items()}
        everyones[self.rank] = tensor
        tensor.copy_(reduced([everyones[rank] for rank in sorted(everyones)], op))
