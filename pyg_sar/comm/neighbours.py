"""Workers that read each other's memory: those of one host, or threads of one process.

[Note: letters] A writer fills a piece of its own shared memory and sends its readers letters that
say where; each reader uses it in place and releases it, and after the last release the writer fills
it anew. Letters of one subject from one worker to another arrive in the order in which they were
sent, which is the order in which the reader's program expects them. Between subjects it isn't: a
publication is written before, and may be read after, gradients that the same worker lends. Writing
never waits for a reader, so that whatever order workers do this in, nobody waits for a cycle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from pyg_sar.comm.posts import Posts

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
            MismatchError: It has another name (:func:`pyg_sar.comm.posts.name_of`).
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
