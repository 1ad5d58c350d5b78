"""The one thread that issues a communicator's traffic, and the handles it gives out.

[Note: One issuer]
Two ranks that post the same transfers in different orders wait for each other forever. All traffic
of a communicator (halo rows, gradient sums, collectives) therefore goes through one first-in
first-out queue that one thread empties: the order on the wire is the order of the calls, and the
order of the calls is the program's, the same on every rank. A task packs, posts and waits; only
then does the next one start. The caller goes on meanwhile, which is what prefetching is.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from pyg_sar.errors import CommTimeoutError, PygSarError
from pyg_sar.ledger import Label, spoken

Task = Callable[[], None]

SETTLE = 3.0  # Seconds to wait for an aborted task to come back.
GRACE = 5.0  # Seconds a waiter leaves the issuer to report a timeout first, and to end.


class Progress(NamedTuple):
    """How far an issuer is."""

    started: int
    """Operations begun since the communicator exists. About the same on all ranks: those that need
    nothing of a local peer's memory skip what the others read there."""
    ended: int
    """Operations that ended well."""
    pending: int
    """Operations begun or queued and not ended."""
    doing: str
    """The operation under way, or the last one."""


class Work:
    """A transfer under way.

    What was handed to it (the tensors sent and received into) must not be touched before
    :meth:`wait` returned.
    """

    def __init__(self, issuer: Issuer | None, doing: str) -> None:
        self._issuer = issuer
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._then: Callable[[], None] = lambda: None
        self.doing = doing

    @classmethod
    def completed(cls) -> Work:
        """Returns a handle of nothing: already done."""
        work = cls(None, "nothing")
        work._ended.set()
        return work

    def done(self) -> bool:
        """Returns whether the transfer ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the data is there. May be called more than once, from any thread.

        Args:
            timeout: Seconds to wait at most. By default, as long as operations keep ending within
                the communicator's timeout.

        Raises:
            CommTimeoutError: After ``timeout`` (the transfer goes on), or when the communicator
                made no progress within its own timeout (it's broken then).
            LostWorkerError: A worker was lost.
            MismatchError: The workers run different operations.
            WorkerError: Another worker failed.
        """
        issuer = self._issuer
        while issuer is not None and not self._ended.is_set():
            started = issuer.started
            ended = self._ended.wait(issuer.timeout + GRACE if timeout is None else timeout)
            if not ended and timeout is not None:
                raise CommTimeoutError(f"{self.doing} did not end within {timeout:g} s")
            if not ended and issuer.started == started:
                issuer.stuck(self.doing)
                break
        if self._error is not None:
            raise self._error

    def then(self, call: Callable[[], None]) -> None:
        """Has a function called, on any thread, once the transfer has ended; maybe twice."""
        self._then = call
        if self.done():
            call()

    def _end(self, error: BaseException | None = None) -> None:
        """Ends the transfer; the first call counts (the failure watch may be faster)."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()
            self._then()


class Issuer:
    """Runs tasks one after another on a thread of its own.

    Args:
        name: Name of the thread.
        timeout: Seconds that one task may take.
        diagnose: Turns an error of a task and what it was doing into the error to raise.
        abort: Makes a task that is under way end, if it can.
    """

    def __init__(
        self,
        name: str,
        timeout: float,
        diagnose: Callable[[BaseException, str], BaseException],
        abort: Callable[[], None],
    ) -> None:
        self.timeout = timeout
        self.broken: BaseException | None = None
        self._diagnose = diagnose
        self._abort = abort
        self._lock = threading.RLock()
        self._queue: queue.SimpleQueue[tuple[Work, Task] | None] = queue.SimpleQueue()
        self._open: dict[int, Work] = {}
        self.started = self._ended = 0
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._doing = "nothing"
        self._closed = False
        self._idle = threading.Event()
        self._idle.set()
        # A daemon: stuck in a backend's wait, it must not keep the process from ending.
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Task, label: Label, doing: str) -> Work:
        """Queues ``task``; ``doing`` and ``label`` name it in errors and progress.

        Raises:
            PygSarError: The communicator is closed, or broken by an earlier error.
        """
        work = Work(self, f"{doing} [{spoken(label)}]")
        context = contextvars.copy_context()
        inference = torch.is_inference_mode_enabled()
        cuda = torch.cuda.is_initialized()
        mark = torch.cuda.current_stream().record_event() if cuda else None

        def run() -> None:
            # Autograd's state belongs to a thread: take over what concerns writing to a tensor,
            # and never record what packing does.
            with torch.inference_mode(inference), torch.no_grad(), self._after(mark):
                context.run(task)

        with self._lock:
            if self.broken is not None or self._closed:
                self.check()
            self._open[id(work)] = work
            self._queue.put((work, run))
        return work

    @contextlib.contextmanager
    def _after(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """Runs a block after what the caller has queued on a GPU, on a stream of its own.

        It empties this before it goes on: an ended transfer is one whose data is there.
        """
        if mark is None:
            yield
            return
        if mark.device not in self._streams:
            self._streams[mark.device] = torch.cuda.Stream(mark.device)
        stream = self._streams[mark.device]
        stream.wait_event(mark)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def check(self) -> None:
        """Raises where nothing more can be submitted."""
        if isinstance(self.broken, PygSarError):
            raise self.broken
        if self.broken is not None:
            raise PygSarError(
                f"The communicator is broken by an earlier error: {self.broken!r}"
            ) from self.broken
        if self._closed:
            raise PygSarError("The communicator is closed; call pyg_sar.init() again")

    def progress(self) -> Progress:
        """Returns how far this issuer is."""
        return Progress(self.started, self._ended, len(self._open), self._doing)

    def fail(self, error: BaseException) -> None:
        """Breaks the communicator: every open and every later operation raises ``error``."""
        with self._lock:
            if self.broken is None:
                self.broken = error
        # A thread that comes back from the backend's C++ while the interpreter shuts down aborts
        # the process: have it back before a waiter learns of the error, and ends the program.
        self._abort()
        if threading.current_thread() is not self._thread:
            self._idle.wait(SETTLE)
        with self._lock:
            for work in self._open.values():
                work._end(self.broken)
            self._open.clear()

    def stuck(self, doing: str) -> None:
        """Breaks the communicator because the task under way outlived its timeout."""
        cause = TimeoutError(f"no progress within {self.timeout:g} s")
        self.fail(self._diagnose(cause, doing))

    def close(self) -> None:
        """Runs what is queued, then ends the thread. Never raises, never waits without end."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        if self.broken is None and threading.current_thread() is not self._thread:
            self._thread.join(self.timeout + GRACE)

    def _loop(self) -> None:
        while (entry := self._queue.get()) is not None:
            work, handed = entry[0], [entry[1]]
            del entry
            if self.broken is None:
                self._run(work, handed)
            # Hold no buffer while waiting for the next task.
            del work, handed

    def _run(self, work: Work, handed: list[Task]) -> None:
        self._doing = work.doing
        self.started += 1
        error: BaseException | None = None
        self._idle.clear()
        try:
            with torch.profiler.record_function(f"pyg_sar::{work.doing}"):
                handed[0]()
        except BaseException as caught:  # Whatever it is, somebody waits for it.
            error = caught
        finally:
            self._idle.set()
        handed.clear()  # Whoever waited may free the buffers: be no longer among their owners.
        if error is not None:
            if self.broken is None:  # Else it's known, and this is only what followed.
                self.fail(self._diagnose(error, work.doing))
            return
        with self._lock:
            self._open.pop(id(work), None)
            self._ended += 1
        work._end()
