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

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm.backends import SMALL_SUM, PeerTensor, Transport, reduced, to_bytes
from pyg_sar.comm.issuer import Issuer, Work
from pyg_sar.comm.messages import Posts, count, name_of, num_bytes
from pyg_sar.ledger import Label, spoken
from pyg_sar.wording import counted

# The interface ################################################################

PIECE = 1 << 20  # bytes


class Subject(IntEnum):
    """The subjects of messages: each is a queue of its own."""

    EXCHANGE = 0
    PUBLICATION = 1
    ROWS = 2
    SUM = 3


class Message(ABC):
    """Bytes in a local peer's memory."""

    data: Tensor
    """``uint8``, read only."""

    def pause(self) -> None:
        """Lets what was read so far leave this process's memory; all may be read again."""

    @abstractmethod
    def release(self) -> None:
        """Lets the writer have them back. What is a view of them must not be read afterwards."""


class Buffer(ABC):
    """Memory of this worker that local peers will read."""

    data: Tensor
    """``uint8``."""


class LocalPeers(ABC):
    """Passes messages between workers that share memory. See [Note: messages].

    Attributes:
        ranks: The local peers.
        name: What ledgers call it.
        posts: Where messages are noted: with the backend's messages.
        complete: Whether all workers of the group are local peers of each other that can
            :meth:`swap`; the same on all workers.
    """

    ranks: frozenset[int]
    name: str
    posts: Posts
    complete: bool = False

    @abstractmethod
    def take(self, size: int) -> Any:
        """Returns a buffer of ``size`` bytes to write."""

    def send(self, buffer: Any, subject: Subject, readers: Sequence[int], name: str) -> None:
        """Tells each reader of the buffer, which is theirs from now on. No reader: frees it."""
        size = buffer.data.numel()
        self.send_parts(buffer, subject, [(reader, 0, size, name) for reader in readers])

    @abstractmethod
    def send_parts(
        self, buffer: Any, subject: Subject, parts: Sequence[tuple[int, int, int, str]]
    ) -> None:
        """Sends parts of a buffer: ``(reader, first byte, bytes, name)`` of each."""

    @abstractmethod
    def receive(self, src: int, subject: Subject, name: str) -> Message:
        """Waits for the next message from ``src`` about ``subject``.

        Raises:
            TransportError: The local peer is gone, or :meth:`abort` was called.
            TimeoutError: It did not come in time.
            MismatchError: It has another name (:func:`pyg_sar.comm.messages.name_of`).
        """

    def swap(self, data: Tensor, name: str) -> dict[int, Tensor]:
        """Sends at most ``SMALL_SUM`` bytes to all local peers, and returns theirs by rank.

        Only where all are :attr:`complete`. Errors are those of :meth:`receive`.
        """
        raise NotImplementedError

    def trim(self) -> None:
        """Gives memory that nobody holds back to the system."""

    def abort(self) -> None:
        """Ends every wait, from another thread."""

    def close(self) -> None:
        """Frees everything."""


def pieces_of(rows: Tensor) -> Iterator[slice]:
    """Yields some rows at a time, of about a mebibyte: a local peer's, read between two pauses."""
    count = max(PIECE // max(rows[:1].numel() * rows.element_size(), 1), 1)
    for start in range(0, rows.size(0), count):
        yield slice(start, start + count)


def as_rows(data: Tensor, rows: int, width: int, dtype: torch.dtype, src: int, rank: int) -> Tensor:
    """Returns bytes as ``[rows, width]``.

    Raises:
        ValueError: When there are more or less of them.
    """
    size = rows * width * dtype.itemsize
    if data.numel() != size:
        raise ValueError(
            f"rank {rank} expects {counted(size, 'bytes')} (shape ({rows}, {width}), {dtype}) from "
            f"rank {src}, which sends {data.numel()}"
        )
    return data.view(dtype).view(rows, width)


# The operations ###############################################################


class SendBuffer:
    """Memory for rows that a local peer will read: fill :attr:`rows`, then :meth:`Sharing.send`."""

    def __init__(self, memory: Buffer, rows: Tensor) -> None:
        self.memory, self.rows = memory, rows


@dataclass(slots=True)
class Incoming:
    """Rows in a local peer's memory that are on their way.

    Attributes:
        work: To wait for before :attr:`rows` is read.
        rows: ``[rows, width]``, read only, until :meth:`release`.
    """

    rows: Tensor
    work: Work = field(init=False)
    message: Message | None = None
    _held: tuple[Sequence[Any], str, int] = (), "", 0

    def hold(self, ledgers: Sequence[Any], layer: str, count: int) -> None:
        """Has ledgers count remote rows as resident until :meth:`release`."""
        self._held = list(ledgers), layer, count
        for ledger in self._held[0]:
            ledger.hold(layer, count)

    def pause(self) -> None:
        """Gives up what was read so far of the memory, as :meth:`Message.pause`."""
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

    Args:
        local_peers: What passes the messages.
        rank: This worker.
        issuer: Carries out the communicator's tasks.
        ledgers: The communicator's ledgers.
    """

    def __init__(
        self, local_peers: LocalPeers, rank: int, issuer: Issuer, ledgers: list[Any]
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

        Args:
            fill: Writes the rows into a tensor; called on the issuing thread.
            shape: Of that tensor, ``(rows, width)``.
            dtype: Of that tensor.
            readers: How many of the rows each reader will take, for the ledgers.
            label: Whom the ledgers charge.

        Returns:
            The handle to wait for before what ``fill`` reads is changed.
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

    def read(
        self,
        src: int,
        shape: tuple[int, int],
        use: Callable[[Tensor, slice], None],
        out: Tensor,
        label: Label,
    ) -> Work:
        """Reads what ``src`` published.

        Args:
            src: The owner.
            shape: Of the whole publication, ``(rows, width)``.
            use: Called with it and some rows of ``out`` at a time, on the issuing thread; must keep
                nothing of it.
            out: What ``use`` fills, by whose size the ledgers count; nothing is read if it's empty.
            label: Whom the ledgers charge.
        """
        if out.numel() == 0:
            return Work.completed()
        ledgers, dtype = list(self._ledgers), out.dtype
        name = name_of(spoken(label), dtype, shape)

        def task() -> None:
            message = self.local_peers.receive(src, Subject.PUBLICATION, name)
            whole = as_rows(message.data, *shape, dtype, src, self.rank)
            for piece in pieces_of(out):
                use(whole, piece)
                message.pause()
            message.release()
            count(ledgers, label, {}, {src: num_bytes(out)}, self.local_peers.name)

        return self._issuer.submit(task, label, f"reading rows of rank {src}")

    def allocate(self, shape: tuple[int, int], dtype: torch.dtype) -> SendBuffer:
        """Returns uninitialized memory for rows that a local peer will read."""
        buffer = self.local_peers.take(shape[0] * shape[1] * dtype.itemsize)
        return SendBuffer(buffer, buffer.data.view(dtype).view(shape))

    def send(self, buffer: SendBuffer, parts: Mapping[int, int], label: Label) -> Work:
        """Lets each local peer read its part of a buffer, which must not be touched any more.

        Args:
            buffer: The buffer.
            parts: How many of its rows are for each worker, in their order; those of workers that
                are no local peers are left out.
            label: Whom the ledgers charge.
        """
        width, dtype, memory = buffer.rows.size(1), buffer.rows.dtype, buffer.memory
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
            self.local_peers.send_parts(memory, Subject.ROWS, pieces)
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
        """Expects rows, to be read where they lie.

        Args:
            src: Their owner.
            subject: What it published, or the rows that it sends by :meth:`send`.
            shape: Of all of them, ``(rows, width)``.
            dtype: Of them.
            label: Whom the ledgers charge.
            read: How many of them will be read, by which ledgers count; ``None``: all.
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
