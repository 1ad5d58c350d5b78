"""Operations between workers that read each other's memory: publish, read in place, lend, take in.

[Note: publication] Where rows of one node tensor are wanted by several neighbours, the owner
publishes them once, and each neighbour reads the rows that it needs from there, in place or by a
copy of these: nothing is packed per reader, nothing goes through a socket. Gradients go back the
other way round: a reader computes them in memory that it lends, and the owner adds them up from
there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm.backends import Parcel, Transport, to_bytes
from pyg_sar.comm.issuer import Work
from pyg_sar.comm.neighbours import Letter, Neighbours, Page, Subject, as_rows, pieces_of
from pyg_sar.comm.payload import count, num_bytes, spoken
from pyg_sar.comm.posts import name_of
from pyg_sar.ledger import Label

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
