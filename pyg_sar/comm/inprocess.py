"""Workers as threads of one process: for notebooks, debugging and fast tests.

They compute one at a time (see [Note: One at a time]). All threads share one default random
generator: seed what must be reproducible from generators of its own.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyg_sar.comm.backends import PeerTensor, Transport, TransportError, reduced
from pyg_sar.comm.issuer import ComputeLock
from pyg_sar.comm.messages import (
    MEET,
    PATIENCE,
    READ,
    RECEIVE,
    SEND,
    WROTE,
    GetProgress,
    OnFailure,
    Posts,
    Watch,
    explain,
    failed,
    in_vain,
    is_consequence,
    lost,
    name_of,
    to_error,
    unlike,
)
from pyg_sar.comm.sharing import Buffer, LocalPeers, Message, Subject
from pyg_sar.errors import CommTimeoutError, PygSarError

T = TypeVar("T")
Delivery = tuple[Tensor, threading.Event, str]
"""Content of a mailbox: the sender's tensor, the event that says it was read, and its name."""


class Hub:
    """Holds all that the threads of one group share.

    Args:
        world_size: Number of threads.
        timeout: Seconds that an operation may take.
    """

    def __init__(self, world_size: int, timeout: float) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self.boxes: dict[tuple[int, int], queue.SimpleQueue[Delivery]] = {
            (src, dst): queue.SimpleQueue()
            for src in range(world_size)
            for dst in range(world_size)
        }
        self.messages: dict[tuple[int, int, Subject], queue.SimpleQueue[tuple[Tensor, str]]] = {
            (*pair, subject): queue.SimpleQueue() for pair in self.boxes for subject in Subject
        }
        self.slots: list[tuple[Tensor, str] | None] = [None] * world_size
        self.posts = [Posts() for _ in range(world_size)]
        self.compute_lock = ComputeLock()
        self.changed = threading.Condition()
        self.arrived = self.meetings = 0
        self.left: set[int] = set()
        self.record: dict[str, Any] | None = None
        self.listeners: dict[int, tuple[OnFailure, GetProgress]] = {}

    def fail(self, record: dict[str, Any], by: int) -> dict[str, Any]:
        """Ends all workers because of ``record``; the first call counts, whose record returns."""
        with self.changed:
            if self.record is not None:
                return self.record
            self.record = record
            listeners = dict(self.listeners)
            self.changed.notify_all()
        for other, (on_failure, _) in listeners.items():
            if other != by:
                on_failure(to_error(record, other))
        return record

    def meet(self) -> None:
        """Waits until all threads came here."""
        end = time.monotonic() + self.timeout
        with self.compute_lock.released(), self.changed:
            meeting = self.meetings
            self.arrived += 1
            if self.arrived == self.world_size:
                self.arrived = 0
                self.meetings += 1
                self.changed.notify_all()
            while self.meetings == meeting:
                self.check(end, "all ranks", sorted(self.left))
                self.changed.wait(0.5)

    def take(self, box: queue.SimpleQueue[T], peer: int, end: float | None = None) -> T:
        """Waits for what ``peer`` puts into a box."""
        end = time.monotonic() + self.timeout if end is None else end
        with self.compute_lock.released():
            while True:
                try:
                    return box.get(timeout=0.05)
                except queue.Empty:
                    # It may have put something and left since.
                    self.check(end, f"rank {peer} to send", [peer] if box.empty() else [])

    def check(self, end: float, what: str, needed: Sequence[int]) -> None:
        """Raises when the group has failed, is late, or lacks a thread that is needed."""
        if self.record is not None:
            raise TransportError("another worker failed")
        for rank in needed:
            if rank in self.left:
                raise DesertedError(rank)
        if time.monotonic() > end:
            raise TimeoutError(f"timed out after {self.timeout:g} s waiting for {what}")
        self._compare()

    def _compare(self) -> None:
        """Raises when threads wait in vain: :func:`pyg_sar.comm.messages.in_vain`."""
        if not any(posts.for_long(PATIENCE) for posts in self.posts):
            return
        doing = {rank: say().doing for rank, (_, say) in list(self.listeners.items())}
        # Twice: the first states lie before, the second ones behind a moment that all share.
        first, states = (
            {
                rank: posts.state(doing.get(rank, ""))
                for rank, posts in enumerate(self.posts)
                if rank in self.left or posts.for_long(PATIENCE)
            }
            for _ in range(2)
        )
        same = {rank: s for rank, s in states.items() if rank in first and s == first[rank]}
        ended = self.left & same.keys()
        if found := in_vain(same, ended):
            raise explain(found, same, ended)


class DesertedError(TransportError):
    """A thread that is still needed has already ended."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} had already ended")
        self.rank = rank


class ThreadTransport(Transport):
    """Hands tensors from thread to thread: one copy, from the sender's into the receiver's."""

    name = "threads"

    def __init__(self, hub: Hub, rank: int, device: torch.device) -> None:
        super().__init__(rank, hub.world_size, device)
        self.hub = hub
        self.compute_lock = hub.compute_lock
        self.posts = hub.posts[rank]

    def exchange(
        self, sends: Sequence[PeerTensor], recvs: Sequence[PeerTensor], where: str = ""
    ) -> None:
        end = time.monotonic() + self.hub.timeout
        read = []
        ways = (RECEIVE, recvs), (SEND, sends)
        names = [(way, p, name_of(where, t.dtype, t.shape)) for way, all in ways for p, t in all]
        with self.posts.waiting(names) as posts:
            for (peer, tensor), post in zip(sends, posts[len(recvs) :], strict=True):
                event = threading.Event()
                self.hub.boxes[self.rank, peer].put((tensor, event, post.name))
                read.append((peer, event))
            for (peer, target), post in zip(recvs, posts, strict=False):
                self._receive(peer, target, end, post.name)
            with self.compute_lock.released():
                for peer, event in read:
                    while not event.wait(0.05):
                        self.hub.check(end, f"rank {peer} to receive", [peer])

    def _receive(self, peer: int, target: Tensor, end: float, name: str) -> None:
        tensor, event, sent = self.hub.take(self.hub.boxes[peer, self.rank], peer, end)
        if sent != name:
            raise unlike(self.rank, peer, name, sent)
        target.reshape(-1).view(torch.uint8).copy_(tensor.reshape(-1).view(torch.uint8))
        event.set()

    @contextlib.contextmanager
    def _all(self, tensor: Tensor, where: str) -> Iterator[list[Tensor]]:
        """Everyone's tensor, until all have left the block."""
        name = name_of(where, tensor.dtype, tensor.shape)
        with self.posts.waiting([(MEET, peer, name) for peer in self.others()]):
            self.hub.slots[self.rank] = tensor, name
            self.hub.meet()
        slots = [slot for slot in self.hub.slots if slot is not None]
        for rank, (_, other) in enumerate(slots):
            if other != name:
                raise unlike(self.rank, rank, name, other)
        yield [slot[0].to(tensor.device) for slot in slots]
        with self.posts.waiting([(MEET, peer, name) for peer in self.others()]):
            self.hub.meet()
        self.hub.slots[self.rank] = None

    def all_reduce(self, tensor: Tensor, op: str, where: str = "") -> None:
        # Every thread reduces in rank order, so that all get the same bits.
        with self._all(tensor, where) as everyone:
            result = reduced(everyone, op)
        tensor.copy_(result)

    def all_gather(self, tensor: Tensor, where: str = "") -> list[Tensor]:
        with self._all(tensor, where) as everyone:
            return [found.clone() for found in everyone]

    def broadcast(self, tensor: Tensor, src: int, where: str = "") -> None:
        with self._all(tensor, where) as everyone:
            value = everyone[src].clone()
        tensor.copy_(value)


class ThreadBuffer(Buffer):
    """Memory that other threads will read: it is used once."""

    def __init__(self, data: Tensor) -> None:
        self.data = data


class ThreadMessage(Message):
    """Memory of another thread."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def release(self) -> None:
        del self.data


class ThreadPeers(LocalPeers):
    """Threads read each other's memory as processes of one host do."""

    name = "shared memory"
    carries_all = False  # A plain exchange between threads is a single copy already.

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub, self.rank, self.posts = hub, rank, hub.posts[rank]
        self.ranks = frozenset(range(hub.world_size)) - {rank}

    def take(self, size: int) -> ThreadBuffer:
        return ThreadBuffer(torch.empty(size, dtype=torch.uint8))

    def send_parts(
        self, buffer: Buffer, subject: Subject, parts: Sequence[tuple[int, int, int, str]]
    ) -> None:
        for peer, start, size, name in parts:
            self.posts.note(f"{WROTE} {subject:d}", peer, name)
            self.hub.messages[self.rank, peer, subject].put(
                (buffer.data[start : start + size], name)
            )

    def receive(self, src: int, subject: Subject, name: str) -> ThreadMessage:
        with self.posts.waiting([(f"{READ} {subject:d}", src, name)]):
            data, sent = self.hub.take(self.hub.messages[src, self.rank, subject], src)
        if sent != name:
            raise unlike(self.rank, src, name, sent)
        return ThreadMessage(data)


class HubWatch(Watch):
    """A watch over threads: they can't get lost, only fail."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub = hub
        self.rank = rank

    def start(self, on_failure: OnFailure, progress: GetProgress, posts: Posts) -> None:
        with self.hub.changed:
            self.hub.listeners[self.rank] = (on_failure, progress)

    def diagnose(self, error: BaseException, doing: str) -> PygSarError:
        if isinstance(error, DesertedError):
            how = "its program had already ended (do all ranks run the same operations?)"
            record = self.hub.fail(lost(error.rank, how, self.rank, doing), self.rank)
            return to_error(record, self.rank)
        reason = self._tell(error, doing)
        mine = failed(self.rank, reason)
        record = self.hub.fail(mine, self.rank)
        return reason if record is mine else to_error(record, self.rank)

    def _tell(self, error: BaseException, doing: str) -> PygSarError:
        if not isinstance(error, TimeoutError):
            return PygSarError(f"Rank {self.rank}: {doing} failed: {error}")
        others = []
        for rank, (_, progress) in sorted(self.hub.listeners.items()):
            now = progress()
            others.append(f"rank {rank} has ended {now.ended} operations, last: {now.doing}")
        return CommTimeoutError(
            f"Rank {self.rank}: {doing} did not end in time: {error}; {'; '.join(others)}. "
            f"Do all ranks run the same operations in the same order?"
        )

    def report(self, error: BaseException, rank: int | None = None) -> None:
        who = self.rank if rank is None else rank
        if not is_consequence(error, who):
            self.hub.fail(failed(who, error), self.rank)

    def close(self) -> None:
        with self.hub.changed:
            self.hub.left.add(self.rank)
            self.hub.changed.notify_all()
            self.hub.listeners.pop(self.rank, None)
