"""Messages between the processes of one host, through shared memory and Unix sockets.

[Note: nothing is left] A segment is made by ``memfd_create``: it has no name in any file system,
other processes get it as a file descriptor over a socket, and the kernel frees it with the last
process that maps it, however that ends. It is bound by the memory, not by the size of ``/dev/shm``.
All its pages are allocated when it is made, so that a lack of memory is an error at that place and
never a signal at the first touch.

[Note: two connections] Between two workers there are two connections of whole packets. One carries
messages (which segment, how many bytes; the first time the segment's descriptor itself) and is read
by the issuing thread alone, which sleeps until one comes, and keeps those of other subjects for
later. The other carries what may stay unread when a worker ends: releases, and which segments are
gone. A worker reads these, without waiting, when it needs a segment. A peer that dies closes
both: whoever waits for it knows at once.

[Note: small sums] Where all workers are of one host, what they sum travels, if it is small, in the
packets of messages (:meth:`SharedMemory.swap`): a worker has to sleep until the others come in any
case, and the packet that wakes it brings the numbers. Everyone adds in the order of ranks, as over
gloo.

[Note: resident memory] What a reader touches of a mapped segment counts as resident in the reader
as well. It gives these pages up with each piece that it has read and with each release (the memory
stays the writer's), so that a reader has a mebibyte or two of its local peers' rows mapped, or the
rows of one local peer where it reads them in place, as many as it would else have copied.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_sar.comm.backends import SMALL_SUM, TransportError
from pyg_sar.comm.messages import READ, WROTE, Posts, unlike
from pyg_sar.errors import PygSarError

# Segments #####################################################################

GRAIN = 1 << 16  # bytes: a segment's size is a multiple
SPARE = 4  # a segment serves what is at least this part of it
SMALL = 1 << 20  # bytes up to which a segment serves anything


def shares_memory() -> bool:
    """Returns whether this system has what segments need (Linux)."""
    return hasattr(os, "memfd_create") and hasattr(os, "posix_fallocate")


class Segment:
    """Anonymous shared memory of this process, open for others; ``number`` tells its segments
    apart.

    Raises:
        OSError: When the system has no memory (or no descriptor) left.
    """

    def __init__(self, number: int, capacity: int) -> None:
        self.number, self.capacity = number, capacity
        self.descriptor = os.memfd_create(f"pyg_sar {number}", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.descriptor, 0, capacity)
            self.data = map_bytes(self.descriptor, capacity)[1]
        except BaseException:
            os.close(self.descriptor)
            raise

    def free(self) -> None:
        """Gives the memory back; nobody reads it any more."""
        self.data = torch.empty(0, dtype=torch.uint8)
        os.ftruncate(self.descriptor, 0)
        os.close(self.descriptor)


def map_bytes(descriptor: int, size: int) -> tuple[mmap.mmap, Tensor]:
    """Maps a descriptor's memory; the tensor keeps the mapping alive."""
    mapping = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with torch.inference_mode(False):  # It outlives the operation for which it is made.
        return mapping, torch.frombuffer(mapping, dtype=torch.uint8)


class Pool:
    """The segments of one worker: written, held until all readers have done, and used again.

    A holder of a segment is its writer, from :meth:`take` on, or a reader that was told of it.
    ``forget`` is called with each segment that is given back to the system, before that happens.
    """

    def __init__(self, rank: int, forget: Callable[[Segment], None]) -> None:
        self.rank = rank
        self._forget = forget
        self._lock = threading.RLock()
        self._next = 0
        self._free: list[Segment] = []
        self._held: dict[int, tuple[Segment, int]] = {}

    def take(self, size: int) -> Segment:
        """Returns a segment of at least ``size`` bytes for the caller to write and then to release.

        Raises:
            PygSarError: When there is no memory for it.
        """
        with self._lock:
            fitting = [s for s in self._free if size <= s.capacity <= max(SMALL, SPARE * size)]
            if fitting:
                segment = min(fitting, key=lambda s: s.capacity)
                self._free.remove(segment)
            else:
                for smaller in [s for s in self._free if s.capacity < size]:
                    self._drop(smaller)
                segment = self._make(-(-max(size, 1) // GRAIN) * GRAIN)
            self._held[segment.number] = segment, 1
            return segment

    def _make(self, capacity: int) -> Segment:
        self._next += 1
        try:
            return Segment(self._next, capacity)
        except OSError as error:
            raise PygSarError(
                f"Rank {self.rank} can't get {capacity / 2**20:.1f} MiB of shared memory "
                f"({error}). Start fewer workers on this host, or set PYG_SAR_SHARED_MEMORY=0: "
                f"rows then travel by the network backend"
            ) from error

    def hold(self, segment: Segment) -> None:
        """Adds one holder."""
        with self._lock:
            self._held[segment.number] = segment, self._held[segment.number][1] + 1

    def release(self, number: int) -> None:
        """Takes one holder away; after the last the segment may be used again."""
        with self._lock:
            segment, holders = self._held.pop(number)
            if holders > 1:
                self._held[number] = segment, holders - 1
            else:
                self._free.append(segment)

    def _drop(self, segment: Segment) -> None:
        self._free.remove(segment)
        self._forget(segment)
        segment.free()

    def trim(self) -> None:
        """Gives the segments that nobody holds back to the system."""
        with self._lock:
            for segment in list(self._free):
                self._drop(segment)

    def sizes(self) -> tuple[int, int]:
        """Returns the bytes of the segments that are held, and of those that are free."""
        with self._lock:
            held = sum(segment.capacity for segment, _ in self._held.values())
            return held, sum(segment.capacity for segment in self._free)

    def close(self) -> None:
        """Closes all descriptors; what readers still map stays theirs."""
        with self._lock:
            segments = [*self._free, *(segment for segment, _ in self._held.values())]
            self._free, self._held = [], {}
            for segment in segments:
                os.close(segment.descriptor)


# Messages #####################################################################


class Subject(IntEnum):
    """The subjects of messages: each is a queue of its own."""

    EXCHANGE = 0
    PUBLICATION = 1
    ROWS = 2
    SUM = 3


PACKET = "<BQQQQ"
"""Subject, segment, its capacity, first byte, bytes. The message's name follows, and the bytes of a
small sum, which are in no segment."""
NAME = 400  # Bytes of a message's name that travel: its last ones.
FORGET, RELEASE = 254, 255  # Subjects of packets that are no messages.
GIVE_UP = 1 << 16  # bytes above which a reader gives a message's pages up


class Header(NamedTuple):
    """A message: where its bytes are, and what it says of them."""

    subject: int
    segment: int
    start: int
    size: int
    name: bytes
    data: bytes


@dataclass(slots=True)
class Link:
    """The two connections to a local peer, and what each side knows of the other's segments.

    Attributes:
        peer: Its rank.
        messages, releases: The connections.
        told: Segments of this worker whose descriptors the local peer has.
        mapped: Segments of the local peer that are mapped here.
        early: Messages that came before they were expected.
    """

    peer: int
    messages: socket.socket
    releases: socket.socket
    told: set[int]
    mapped: dict[int, tuple[mmap.mmap, Tensor]]
    early: list[Header]


class SharedBuffer:
    """A piece of a segment of this worker, ``uint8``, that local peers will read."""

    rows: Tensor
    """The same as ``[rows, width]``, where it is for rows."""

    def __init__(self, segment: Segment, size: int) -> None:
        self.segment, self.size = segment, size
        self.data = segment.data[:size]


class SharedMessage:
    """A piece of a local peer's segment: ``data``, ``uint8``, is read only."""

    def __init__(
        self, owner: SharedMemory, link: Link, segment: int, start: int, size: int
    ) -> None:
        self._owner, self._link, self._segment = owner, link, segment
        self._mapping, whole = link.mapped[segment]
        self.data = whole[start : start + size]

    def pause(self) -> None:
        """Lets what was read so far leave this process's memory; all may be read again."""
        if self.data.numel() > GIVE_UP:
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def release(self) -> None:
        """Lets the writer have the piece back. What is a view of it must not be read afterwards."""
        self.pause()
        # A writer that has ended needs it no more; one that died is noticed by whoever waits.
        with contextlib.suppress(TransportError, TimeoutError):
            packet = struct.pack(PACKET, RELEASE, self._segment, 0, 0, 0)
            self._owner.post(self._link, self._link.releases, packet)


class SharedMemory:
    """Passes messages between the workers of a host. See [Note: messages] in sharing.

    Links are connections to the local peers (:func:`pyg_sar.comm.meeting.meet_local_peers`);
    ``timeout`` are the seconds that a wait may take.

    Attributes:
        complete: All workers of the group are local peers of each other: they can :meth:`swap`.
        posts: Where messages are noted: with the backend's.
    """

    name = "shared memory"

    def __init__(
        self, rank: int, links: Mapping[int, Link], timeout: float, complete: bool = False
    ) -> None:
        self.rank, self.timeout, self.complete = rank, timeout, complete
        self.ranks = frozenset(links)
        self.posts = Posts()
        self._links = dict(links)
        self._pool = Pool(rank, self._forget)
        self._reading = threading.Lock()

    # Writing -----------------------------------------------------------------

    def take(self, size: int) -> SharedBuffer:
        """Returns a buffer of ``size`` bytes to write."""
        self._collect()
        return SharedBuffer(self._pool.take(size), size)

    def send(
        self, buffer: SharedBuffer, subject: Subject, readers: Sequence[int], name: str
    ) -> None:
        """Tells each reader of the buffer, which is theirs from now on. No reader: frees it."""
        self.send_parts(buffer, subject, [(reader, 0, buffer.size, name) for reader in readers])

    def send_parts(
        self, buffer: SharedBuffer, subject: Subject, parts: Sequence[tuple[int, int, int, str]]
    ) -> None:
        """Sends parts of a buffer: ``(reader, first byte, bytes, name)`` of each."""
        segment = buffer.segment
        for peer, start, size, name in parts:
            link = self._links[peer]
            self._pool.hold(segment)
            packet = struct.pack(PACKET, subject, segment.number, segment.capacity, start, size)
            packet += name.encode()[-NAME:]
            new = segment.number not in link.told
            # As a rule nobody waits here; but whoever has ended reads no messages.
            with self.posts.waiting([(f"{WROTE} {subject:d}", peer, name)]):
                self.post(link, link.messages, packet, segment.descriptor if new else None)
            link.told.add(segment.number)
        self._pool.release(segment.number)

    def _forget(self, segment: Segment) -> None:
        for link in self._links.values():
            if segment.number in link.told:
                link.told.remove(segment.number)
                packet = struct.pack(PACKET, FORGET, segment.number, 0, 0, 0)
                with contextlib.suppress(TransportError, TimeoutError):
                    self.post(link, link.releases, packet)

    def post(
        self, link: Link, connection: socket.socket, packet: bytes, descriptor: int | None = None
    ) -> None:
        """Sends a packet; waits only where the peer has left hundreds unread."""
        rights = []
        if descriptor is not None:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        end = time.monotonic() + self.timeout
        while True:
            try:
                connection.sendmsg([packet], rights, socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                self._wait(connection, select.POLLOUT, end, f"rank {link.peer} to read messages")
            except OSError as error:
                raise TransportError(f"rank {link.peer} can't be reached: {error}") from error

    def _collect(self) -> None:
        """Takes in what has arrived beside messages."""
        with self._reading:
            for link in self._links.values():
                with contextlib.suppress(OSError):  # Nothing more, or gone.
                    while packet := link.releases.recv(
                        struct.calcsize(PACKET), socket.MSG_DONTWAIT
                    ):
                        about, segment, *_ = struct.unpack(PACKET, packet)
                        if about == RELEASE:
                            self._pool.release(segment)
                        else:
                            link.mapped.pop(segment, None)

    def trim(self) -> None:
        """Gives memory that nobody holds back to the system."""
        self._collect()
        self._pool.trim()

    # Reading -----------------------------------------------------------------

    def swap(self, data: Tensor, name: str) -> dict[int, Tensor]:
        """Sends at most ``SMALL_SUM`` bytes to all workers, and returns theirs by rank."""
        # In the packets themselves: they are copied anyway, and nothing is to be released.
        subject, size = Subject.SUM, data.numel()
        packet = struct.pack(PACKET, subject, 0, 0, 0, size) + name.encode()[-NAME:]
        packet += data.numpy().tobytes()
        with self.posts.waiting([(f"{WROTE} {subject:d}", peer, name) for peer in self._links]):
            for link in self._links.values():
                self.post(link, link.messages, packet)
        with self.posts.waiting([(f"{READ} {subject:d}", peer, name) for peer in self._links]):
            headers = {peer: self._expect(peer, subject, name) for peer in self._links}
        return {
            peer: torch.frombuffer(bytearray(header.data), dtype=torch.uint8)
            for peer, header in headers.items()
        }

    def receive(self, src: int, subject: Subject, name: str) -> SharedMessage:
        """Waits for the next message from ``src`` about ``subject``.

        Raises:
            TransportError: The local peer is gone, or :meth:`abort` was called.
            TimeoutError: It did not come in time.
            MismatchError: It has another name (:func:`pyg_sar.comm.messages.name_of`).
        """
        with self.posts.waiting([(f"{READ} {subject:d}", src, name)]):
            found = self._expect(src, subject, name)
        return SharedMessage(self, self._links[src], found.segment, found.start, found.size)

    def drop_unread(self) -> None:
        """Gives back all rows that were sent here and not received."""
        for link in self._links.values():
            with contextlib.suppress(TimeoutError):
                while True:  # What no wait is needed for.
                    self._next_early(link, time.monotonic())
            early, link.early = link.early, []
            for found in early:
                if found.subject == Subject.SUM:  # Another worker's barrier.
                    link.early.append(found)
                else:
                    SharedMessage(self, link, found.segment, found.start, found.size).release()

    def _expect(self, src: int, subject: Subject, name: str) -> Header:
        """Returns the next message about a subject, which must have this name."""
        link = self._links[src]
        found = self._find(link, subject)
        link.early.remove(found)
        if found.name != name.encode()[-NAME:]:
            raise unlike(self.rank, src, name, found.name.decode(errors="replace"))
        return found

    def _find(self, link: Link, subject: Subject) -> Header:
        """Returns the next message about a subject; others are kept."""
        end = time.monotonic() + self.timeout
        while (found := next((e for e in link.early if e.subject == subject), None)) is None:
            self._next_early(link, end)
        return found

    def _next_early(self, link: Link, end: float) -> None:
        """Waits for the next message, which joins those that came before they were expected."""
        (about, segment, capacity, start, size), rest = self._next(link, end)
        if about == Subject.SUM:
            named = len(rest) - size
            link.early.append(Header(about, segment, start, size, rest[:named], rest[named:]))
            return
        if segment not in link.mapped:  # The kernel drops what doesn't fit the limit.
            raise PygSarError(
                f"Rank {self.rank} got no file descriptor of rank {link.peer}'s shared memory: too "
                f"many open files (ulimit -n). Raise the limit, or set PYG_SAR_SHARED_MEMORY=0"
            )
        if start + size > capacity:
            raise PygSarError(
                f"Rank {self.rank} got rows of rank {link.peer} that end at byte {start + size} of "
                f"a segment of {capacity}. Set PYG_SAR_SHARED_MEMORY=0"
            )
        link.early.append(Header(about, segment, start, size, rest, b""))

    def _next(self, link: Link, end: float) -> tuple[tuple[int, int, int, int, int], bytes]:
        """Returns the next packet and what follows; its descriptor, if it has one, is mapped."""
        head = struct.calcsize(PACKET)
        while True:
            try:
                packet, rights, _, _ = link.messages.recvmsg(
                    head + NAME + SMALL_SUM, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                self._wait(link.messages, select.POLLIN, end, f"rank {link.peer} to send")
                continue
            except OSError as error:
                raise TransportError(f"rank {link.peer} can't be reached: {error}") from error
            if not packet:
                raise TransportError(f"rank {link.peer} closed its connection")
            about, segment, capacity, start, size = struct.unpack(PACKET, packet[:head])
            for _, _, data in rights:
                (descriptor,) = array.array("i", data)
                try:
                    link.mapped[segment] = map_bytes(descriptor, capacity)
                finally:
                    os.close(descriptor)
            return (about, segment, capacity, start, size), packet[head:]

    def _wait(self, connection: socket.socket, event: int, end: float, what: str) -> None:
        poll = select.poll()
        with contextlib.suppress(ValueError):  # Closed: the next call on it says so.
            poll.register(connection, event)
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                raise TimeoutError(f"timed out after {self.timeout:g} s waiting for {what}")

    # Its end -----------------------------------------------------------------

    def abort(self) -> None:
        """Ends every wait, from another thread."""
        for link in self._links.values():
            for connection in (link.messages, link.releases):
                with contextlib.suppress(OSError):  # Closed by the peer.
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Frees everything."""
        for link in self._links.values():
            link.messages.close()
            link.releases.close()
            link.mapped.clear()
        self._pool.close()
