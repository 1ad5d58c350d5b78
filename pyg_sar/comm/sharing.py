"""Operations between workers that read each other's memory: publish, read in place, lend, take in.

[Note: publication] Where rows of one node tensor are wanted by several neighbours, the owner
publishes them once, and each neighbour reads the rows that it needs from there, in place or by a
copy of these: nothing is packed per reader, nothing goes through a socket. Gradients go back the
other way round: a reader computes them in memory that it lends, and the owner adds them up from
there.

[Note: letters] A writer fills a piece of its own shared memory and sends its readers letters that
say where; each reader uses it in place and releases it, and after the last release the writer fills
it anew. Letters of one subject from one worker to another arrive in the order in which they were
sent, which is the order in which the reader's program expects them. Between subjects it isn't: a
publication is written before, and may be read after, gradients that the same worker lends. Writing
never waits for a reader, so that whatever order workers do this in, nobody waits for a cycle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm.backends import Parcel, Transport, to_bytes
from pyg_sar.comm.issuer import Work
from pyg_sar.comm.messages import Posts, count, name_of, num_bytes, spoken
from pyg_sar.ledger import Label

# The interface ################################################################

PIECE = 1 << 20  # bytes


class Subject(IntEnum):
    """What a letter is about."""

    PARCEL = 0
    PUBLICATION = 1
    LOAN = 2


class Letter(ABC):
    """Bytes in a neighbour's memory."""

    data: Tensor
    """``uint8``, read only."""

    def pause(self) -> None:
        """What was read so far need not be resident here any more; all may be read again."""

    @abstractmethod
    def release(self) -> None:
        """Lets the writer have them back. What is a view of them must not be read afterwards."""


class Page(ABC):
    """Memory of this worker that neighbours will read."""

    data: Tensor
    """``uint8``."""


class Neighbours(ABC):
    """What passes letters. See [Note: letters].

    Attributes:
        ranks: The neighbours.
        carries_all: Whether plain exchanges with neighbours should go this way too.
        name: What ledgers call it.
        posts: Where letters are noted: with the backend's messages.
    """

    ranks: frozenset[int]
    carries_all: bool
    name: str
    posts: Posts

    @abstractmethod
    def take(self, size: int) -> Any:
        """A page of ``size`` bytes to write."""

    def send(self, page: Any, subject: Subject, readers: Sequence[int], name: str) -> None:
        """Tells each reader of the page, which is theirs from now on. No reader: gives it back."""
        size = page.data.numel()
        self.send_parts(page, subject, [(reader, 0, size, name) for reader in readers])

    @abstractmethod
    def send_parts(
        self, page: Any, subject: Subject, parts: Sequence[tuple[int, int, int, str]]
    ) -> None:
        """As :meth:`send`: ``(reader, first byte, bytes, name)``; some readers may have none."""

    @abstractmethod
    def receive(self, src: int, subject: Subject, name: str) -> Letter:
        """Waits for the next letter from ``src`` about ``subject``.

        Raises:
            TransportError: The neighbour is gone, or :meth:`abort` was called.
            TimeoutError: It did not come in time.
            MismatchError: It has another name (:func:`pyg_sar.comm.messages.name_of`).
        """

    def trim(self) -> None:
        """Gives memory that nobody holds back to the system."""

    def abort(self) -> None:
        """Ends every wait, from another thread."""

    def close(self) -> None:
        """Frees everything."""


def pieces_of(rows: Tensor) -> Iterator[slice]:
    """Some rows at a time, of about a mebibyte: what is read of a neighbour between two pauses."""
    count = max(PIECE // max(rows[:1].numel() * rows.element_size(), 1), 1)
    for start in range(0, rows.size(0), count):
        yield slice(start, start + count)


def as_rows(data: Tensor, rows: int, width: int, dtype: torch.dtype, src: int, rank: int) -> Tensor:
    """Bytes as ``[rows, width]``.

    Raises:
        ValueError: When there are more or less of them.
    """
    size = rows * width * dtype.itemsize
    if data.numel() != size:
        raise ValueError(
            f"rank {rank} expects {size} bytes (shape ({rows}, {width}), {dtype}) from rank {src}, "
            f"which sends {data.numel()}"
        )
    return data.view(dtype).view(rows, width)


# The operations ###############################################################

Submit = Callable[[Callable[[], None], Label, str], Work]


class Loan:
    """Memory for rows that a neighbour will read: fill :attr:`rows`, then :meth:`Sharing.give`."""

    def __init__(self, page: Page, rows: Tensor) -> None:
        self.page, self.rows = page, rows


class Incoming:
    """Rows in a neighbour's memory that are on their way.

    Attributes:
        work: To wait for before :attr:`rows` is read.
        rows: ``[rows, width]``, read only, until :meth:`release`.
    """

    work: Work

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.letter: Letter | None = None
        self._held: tuple[list[Any], str, int] = [], "", 0

    def hold(self, ledgers: Sequence[Any], layer: str, count: int) -> None:
        """Has ledgers count remote rows as resident until :meth:`release`."""
        self._held = list(ledgers), layer, count
        for ledger in self._held[0]:
            ledger.hold(layer, count)

    def pause(self) -> None:
        """Gives up what was read so far of the memory, as :meth:`Letter.pause`."""
        if self.letter is not None:
            self.letter.pause()

    def release(self) -> None:
        """Gives the memory back to the neighbour."""
        self.rows = self.rows.new_empty(0)
        if self.letter is not None:
            self.letter.release()
        self.letter = None
        ledgers, layer, count = self._held
        for ledger in ledgers:
            ledger.hold(layer, -count)
        self._held = [], "", 0


class Sharing:
    """What a worker does with its neighbours' memory, in the order of its communicator's issuer.

    All workers call these in the same order. Rows of no bytes are neither sent nor expected.

    Args:
        neighbours: What passes the letters.
        rank: This worker.
        submit: Queues a task of the communicator.
        ledgers: The communicator's ledgers.
    """

    def __init__(
        self, neighbours: Neighbours, rank: int, submit: Submit, ledgers: list[Any]
    ) -> None:
        self.neighbours, self.rank = neighbours, rank
        self.ranks = neighbours.ranks
        self._submit, self._ledgers = submit, ledgers

    def publish(
        self,
        fill: Callable[[Tensor], None],
        shape: tuple[int, int],
        dtype: torch.dtype,
        readers: Mapping[int, int],
        label: Label,
    ) -> Work:
        """Lets neighbours read a copy of rows.

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
            page = self.neighbours.take(shape[0] * row)
            fill(page.data.view(dtype).view(shape))
            self.neighbours.send(page, Subject.PUBLICATION, list(wanted), name)
            count(ledgers, label, wanted, {}, self.neighbours.name)

        return self._submit(task, label, f"publication for ranks {', '.join(map(str, wanted))}")

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
            letter = self.neighbours.receive(src, Subject.PUBLICATION, name)
            whole = as_rows(letter.data, *shape, dtype, src, self.rank)
            for piece in pieces_of(out):
                use(whole, piece)
                letter.pause()
            letter.release()
            count(ledgers, label, {}, {src: num_bytes(out)}, self.neighbours.name)

        return self._submit(task, label, f"reading rows of rank {src}")

    def borrow(
        self, src: int, shape: tuple[int, int], rows: int, dtype: torch.dtype, label: Label
    ) -> Incoming:
        """Reads what ``src`` published where it lies.

        Args:
            src: The owner.
            shape: Of the whole publication, ``(rows, width)``.
            rows: How many of them are read, by which the ledgers count.
            dtype: Of the publication.
            label: Whom the ledgers charge.
        """
        size = rows * shape[1] * dtype.itemsize
        return self._await(src, shape, dtype, size, Subject.PUBLICATION, label)

    def lend(self, shape: tuple[int, int], dtype: torch.dtype) -> Loan:
        """Uninitialized memory for rows that a neighbour will read."""
        page = self.neighbours.take(shape[0] * shape[1] * dtype.itemsize)
        return Loan(page, page.data.view(dtype).view(shape))

    def give(self, loan: Loan, parts: Mapping[int, int], label: Label) -> Work:
        """Lets each neighbour read its part of a loan, which must not be touched any more.

        Args:
            loan: The loan.
            parts: How many of its rows are for each worker, in their order; those of workers that
                are no neighbours are left out.
            label: Whom the ledgers charge.
        """
        width, dtype, page = loan.rows.size(1), loan.rows.dtype, loan.page
        row, where = width * dtype.itemsize, spoken(label)
        pieces, first = [], 0
        for peer, number in parts.items():
            if peer in self.ranks and number * row:
                name = name_of(where, dtype, (number, width))
                pieces.append((peer, first * row, number * row, name))
            first += number
        sizes = {peer: size for peer, _, size, _ in pieces}
        loan.rows = loan.rows.new_empty(0)
        ledgers = list(self._ledgers)

        def task() -> None:
            self.neighbours.send_parts(page, Subject.LOAN, pieces)
            count(ledgers, label, sizes, {}, self.neighbours.name)

        return self._submit(task, label, f"rows for ranks {', '.join(map(str, sizes))}")

    def expect(
        self, src: int, shape: tuple[int, int], dtype: torch.dtype, label: Label
    ) -> Incoming:
        """Expects a loan from ``src``."""
        size = shape[0] * shape[1] * dtype.itemsize
        return self._await(src, shape, dtype, size, Subject.LOAN, label)

    def _await(
        self,
        src: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
        size: int,
        subject: Subject,
        label: Label,
    ) -> Incoming:
        """Expects rows of which ``size`` bytes will be read."""
        found = Incoming(torch.empty(shape[0], 0, dtype=dtype))
        found.work = Work.completed()
        if size == 0:
            found.rows = found.rows.new_empty(shape)
            return found
        ledgers, name = list(self._ledgers), name_of(spoken(label), dtype, shape)

        def task() -> None:
            found.letter = self.neighbours.receive(src, subject, name)
            found.rows = as_rows(found.letter.data, *shape, dtype, src, self.rank)
            count(ledgers, label, {}, {src: size}, self.neighbours.name)

        found.work = self._submit(task, label, f"rows of rank {src}")
        return found

    def trim(self) -> None:
        """Gives memory that no neighbour reads back to the system; it is kept for use again."""
        self.neighbours.trim()

    # Plain exchanges ---------------------------------------------------------

    def exchange(
        self,
        transport: Transport,
        sends: Sequence[Parcel],
        recvs: Sequence[Parcel],
        ledgers: Sequence[Any],
        label: Label,
    ) -> None:
        """Exchanges parcels, through shared memory with neighbours, else by ``transport``."""
        near = [[p for p in parcels if p[0] in self.ranks] for parcels in (sends, recvs)]
        far = [[p for p in parcels if p[0] not in self.ranks] for parcels in (sends, recvs)]
        where = spoken(label)
        for peer, tensor in near[0]:
            page = self.neighbours.take(num_bytes(tensor))
            page.data.copy_(to_bytes(tensor))
            name = name_of(where, tensor.dtype, tensor.shape)
            self.neighbours.send(page, Subject.PARCEL, [peer], name)
        if any(far):
            transport.exchange(far[0], far[1], where)
        for peer, target in near[1]:
            name = name_of(where, target.dtype, target.shape)
            letter = self.neighbours.receive(peer, Subject.PARCEL, name)
            whole = to_bytes(target)
            shape = whole.numel(), 1
            whole.copy_(as_rows(letter.data, *shape, torch.uint8, peer, self.rank).view(-1))
            letter.release()
        for parcels, name in ((near, self.neighbours.name), (far, transport.name)):
            out, back = ({peer: num_bytes(tensor) for peer, tensor in way} for way in parcels)
            count(ledgers, label, out, back, name)
