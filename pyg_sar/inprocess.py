"""Workers as threads of one process: for notebooks, debugging and fast tests.

They compute one at a time (see [Note: Taking turns]). All threads share one default random
generator: seed what must be reproducible from generators of its own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyg_sar.backends import Parcel, Transport, TransportError
from pyg_sar.errors import CommTimeoutError, PygSarError
from pyg_sar.neighbours import Letter, Neighbours, Page, Subject
from pyg_sar.turns import Turns
from pyg_sar.watch import GetProgress, OnFailure, Watch, failed, is_consequence, lost, to_error

T = TypeVar("T")
Parcels = tuple[Tensor, threading.Event]
"""What lies in a mailbox: the sender's tensor, and the event that says it was read."""


class Hub:
    """What the threads of one group share.

    Args:
        world_size: Number of threads.
        timeout: Seconds that an operation may take.
    """

    def __init__(self, world_size: int, timeout: float) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self.boxes: dict[tuple[int, int], queue.SimpleQueue[Parcels]] = {
            (src, dst): queue.SimpleQueue()
            for src in range(world_size)
            for dst in range(world_size)
        }
        self.letters: dict[tuple[int, int, Subject], queue.SimpleQueue[Tensor]] = {
            (*pair, subject): queue.SimpleQueue() for pair in self.boxes for subject in Subject
        }
        self.slots: list[Tensor | None] = [None] * world_size
        self.turns = Turns()
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
        with self.turns.passed(), self.changed:
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
        with self.turns.passed():
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
        self.turns = hub.turns

    def exchange(self, sends: Sequence[Parcel], recvs: Sequence[Parcel]) -> None:
        end = time.monotonic() + self.hub.timeout
        read = []
        for peer, tensor in sends:
            event = threading.Event()
            self.hub.boxes[self.rank, peer].put((tensor, event))
            read.append((peer, event))
        for peer, target in recvs:
            self._receive(peer, target, end)
        with self.turns.passed():
            for peer, event in read:
                while not event.wait(0.05):
                    self.hub.check(end, f"rank {peer} to receive", [peer])

    def _receive(self, peer: int, target: Tensor, end: float) -> None:
        tensor, event = self.hub.take(self.hub.boxes[peer, self.rank], peer, end)
        if tensor.shape.numel() * tensor.itemsize != target.shape.numel() * target.itemsize:
            raise ValueError(
                f"rank {self.rank} expects {tuple(target.shape)} ({target.dtype}) from rank "
                f"{peer}, which sends {tuple(tensor.shape)} ({tensor.dtype})"
            )
        target.reshape(-1).view(torch.uint8).copy_(tensor.reshape(-1).view(torch.uint8))
        event.set()

    def _all(self, tensor: Tensor) -> list[Tensor]:
        self.hub.slots[self.rank] = tensor
        self.hub.meet()
        return [slot for slot in self.hub.slots if slot is not None]

    def _leave(self) -> None:
        """Waits until all have read the slots, and empties the own one."""
        self.hub.meet()
        self.hub.slots[self.rank] = None

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        # Every thread reduces in rank order, so that all get the same bits.
        stacked = torch.stack([slot.to(tensor.device) for slot in self._all(tensor)])
        match op:
            case "sum" if tensor.dtype == torch.bool:
                result = stacked.any(0)
            case "sum" if tensor.dtype.itemsize == 2 and tensor.is_floating_point():
                result = stacked.sum(0, dtype=torch.float32).to(tensor.dtype)
            case "sum":
                result = stacked.sum(0, dtype=tensor.dtype)
            case "max":
                result = stacked.amax(0)
            case _:
                result = stacked.amin(0)
        self._leave()
        tensor.copy_(result)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        out = [slot.to(tensor.device, copy=True) for slot in self._all(tensor)]
        self._leave()
        return out

    def broadcast(self, tensor: Tensor, src: int) -> None:
        value = self._all(tensor)[src].to(tensor.device, copy=True)
        self._leave()
        tensor.copy_(value)


class ThreadPage(Page):
    """Memory that other threads will read: it is used once."""

    def __init__(self, data: Tensor) -> None:
        self.data = data


class ThreadLetter(Letter):
    """Memory of another thread."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def release(self) -> None:
        del self.data


class ThreadNeighbours(Neighbours):
    """Threads read each other's memory as processes of one host do."""

    name = "shared memory"
    carries_all = False  # A plain exchange between threads is a single copy already.

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub, self.rank = hub, rank
        self.ranks = frozenset(range(hub.world_size)) - {rank}

    def take(self, size: int) -> ThreadPage:
        return ThreadPage(torch.empty(size, dtype=torch.uint8))

    def send_parts(
        self, page: Page, subject: Subject, parts: Sequence[tuple[int, int, int]]
    ) -> None:
        for peer, start, size in parts:
            self.hub.letters[self.rank, peer, subject].put(page.data[start : start + size])

    def receive(self, src: int, subject: Subject) -> ThreadLetter:
        return ThreadLetter(self.hub.take(self.hub.letters[src, self.rank, subject], src))


class HubWatch(Watch):
    """A watch over threads: they can't get lost, only fail."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub = hub
        self.rank = rank

    def start(self, on_failure: OnFailure, progress: GetProgress) -> None:
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

    def report(self, error: BaseException) -> None:
        if not is_consequence(error, self.rank):
            self.hub.fail(failed(self.rank, error), self.rank)

    def close(self) -> None:
        with self.hub.changed:
            self.hub.left.add(self.rank)
            self.hub.changed.notify_all()
            self.hub.listeners.pop(self.rank, None)
