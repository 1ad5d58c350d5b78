"""The workers' store: who hosts it, how it is reached, and how it is asked without waiting for it.

[Note: a store that is silent] A TCP store answers ``check``, ``set`` and the like whenever its host
does: there is no timeout where that was stopped, or can't be reached any more. So a thread of its
own asks, and whoever wants to know waits for that thread: as long as it likes, or until the watch
has found out who is lost.

[Note: the program's end] A thread that comes back from C++ while the interpreter shuts down aborts
the process, and a silent store may answer, or be killed, at that very moment. So where an answer is
still waited for as the program ends, its connections to the store are shut down first: the thread
comes back with an error while Python still runs.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pyg_sar.comm.environment import WorkerInfo
from pyg_sar.comm.messages import LAUNCHER, lost, to_error
from pyg_sar.comm.processes import is_loopback
from pyg_sar.errors import CommTimeoutError
from pyg_sar.wording import counted

PROBE = 5.0  # Seconds that one attempt to reach the store's port may take.
REFUSED = 5.0  # Seconds of refusals after which a launcher's store is gone: it was there before.
STEP = 0.1  # Seconds between two looks at what the watch has found.
RETURN = 5.0  # Seconds for a thread to come back from a connection that was shut down.

Check = Callable[[], None]
"""Raises once the watch has found that a worker, or the launcher, is lost."""


def no_check() -> None:
    """Raises nothing."""


# Its host #####################################################################


def host_store(address: str, port: int, timeout: float = 300.0) -> dist.TCPStore:
    """Hosts a store for workers, in which whoever reaches its port may write (0: a free one).

    Where the workers call this host by the loopback (``127.0.0.1``, ``localhost``), no other host
    reaches the store; else it listens on all interfaces. ``timeout``: seconds that an answer may
    take.

    Raises:
        OSError: The address is unknown.
        DistError: The port is taken.
    """
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = None
    if is_loopback(str(where[0])):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(where)
            listener.listen(socket.SOMAXCONN)
        except OSError:  # Maybe by a store of this very process, which is shared then.
            listener.close()
            listener = None
    store = dist.TCPStore(
        address,
        port if listener is None else listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.fileno(),
    )
    if listener is not None:
        listener.detach()  # The store closes it.
    return store


# Connections ##################################################################


def connect(info: WorkerInfo, timeout: float, check: Check = no_check) -> dist.Store:
    """Connects to the workers' store; rank 0 hosts it where no launcher does.

    ``timeout`` are seconds to wait for the store, and for an answer later; ``check`` is called
    meanwhile.

    Raises:
        CommTimeoutError: When it isn't reached within ``timeout`` seconds.
        LostWorkerError: When the launcher that hosts it is gone.
        ValueError: When its address makes no sense, or its port is taken.
    """
    if info.rank != 0 or info.agent_store:
        return reconnect(info, timeout, check)
    address, port = info.address, info.port
    try:
        return host_store(address, port, timeout)
    except OSError as error:
        raise ValueError(f"MASTER_ADDR={address!r} can't be resolved: {error}") from error
    except dist.DistError as error:
        if "EADDRINUSE" not in str(error):
            raise _unreached(info, timeout, error) from error
        raise ValueError(
            f"MASTER_PORT: {address}:{port} is taken by another program; choose another port"
        ) from error


def reconnect(info: WorkerInfo, timeout: float, check: Check = no_check) -> dist.Store:
    """Returns a connection to the workers' store, by which no other one is kept waiting.

    Raises as :func:`connect` does.
    """
    _wait_for_port(info, timeout, check)
    try:
        return dist.TCPStore(
            info.address, info.port, is_master=False, timeout=timedelta(seconds=timeout)
        )
    except dist.DistError as error:
        raise _unreached(info, timeout, error) from error


def _wait_for_port(info: WorkerInfo, timeout: float, check: Check) -> None:
    """Waits until somebody listens where the store is to be."""
    begin = time.monotonic()
    while True:
        try:
            socket.create_connection((info.address, info.port), min(PROBE, timeout)).close()
            return
        except OSError as error:
            waited = time.monotonic() - begin
            refused = isinstance(error, ConnectionRefusedError)
            if refused and info.agent_store and waited > REFUSED:
                how = f"nobody hosts the workers' store at {info.address}:{info.port} any more"
                raise to_error(lost(LAUNCHER, how, info.rank, "the start"), info.rank) from error
            if waited > timeout:
                raise _unreached(info, timeout, error) from error
        check()
        time.sleep(STEP)


def _unreached(info: WorkerInfo, timeout: float, error: BaseException) -> CommTimeoutError:
    who = "the launcher" if info.agent_store else "rank 0"
    first_line = str(error).partition("\n")[0][:300]
    return CommTimeoutError(
        f"Rank {info.rank} did not reach the store of the {counted(info.world_size, 'workers')}, "
        f"which {who} hosts at {info.address}:{info.port}, within {timeout:g} s ({first_line}). Is "
        f"every worker started, with the same MASTER_ADDR and MASTER_PORT, and reachable?"
    )


# Questions ####################################################################


def end_with_program(answer: Future[Any], store: dist.Store | None) -> None:
    """Ends the wait for an answer that needs the store. See [Note: the program's end]."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if answer.done() or not isinstance(store, dist.TCPStore):
        return
    for name in os.listdir("/proc/self/fd"):
        # What is no connection any more, or none to a port, has no such peer.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            inet = connection.family in (socket.AF_INET, socket.AF_INET6)
            if inet and connection.getpeername()[1] == store.port:
                connection.shutdown(socket.SHUT_RDWR)
    wait([answer], RETURN)


class AskedStore:
    """A store that a thread of its own asks. See [Note: a store that is silent].

    Args:
        make: Returns the store; called on that thread.
        check: Called before a question, and while an answer is waited for.
        hear: Called with each answer.
        patience: Seconds to wait for an answer; ``None``: as long as ``check`` allows.
    """

    def __init__(
        self,
        make: Callable[[], dist.Store],
        check: Check = no_check,
        hear: Callable[[], None] = no_check,
        patience: float | None = None,
    ) -> None:
        self.check_workers, self.hear, self.patience = check, hear, patience
        self._make = make
        self._store: dist.Store | None = None
        self._questions: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._questions = queue.SimpleQueue()
        self._last: Future[Any] = Future()
        self._last.set_result(None)
        # A daemon: where the store is silent it never comes back.
        atexit.register(self._end_with_program)
        threading.Thread(target=self._answer, name="pyg_sar store", daemon=True).start()

    def _answer(self) -> None:
        while (entry := self._questions.get()) is not None:
            question, answer = entry
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(error)
            del entry, question, answer  # Nothing is held while it waits for the next one.
        atexit.unregister(self._end_with_program)
        self._store = None

    def _end_with_program(self) -> None:
        end_with_program(self._last, self._store)

    def close(self) -> None:
        """Ends the thread, and lets the store go."""
        self._questions.put(None)

    def raw(self) -> dist.Store:
        """Returns the store itself, once it is reached."""
        return self._ask(self._made)

    def _made(self) -> dist.Store:
        if self._store is None:
            self._store = self._make()
        return self._store

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Returns the answer.

        Raises:
            TimeoutError: There is none within ``patience`` seconds. As long as it hasn't come,
                further questions aren't asked.
        """
        self.check_workers()
        if self.patience is not None and not self._last.done():
            raise TimeoutError("the workers' store does not answer")
        answer: Future[Any] = Future()
        self._last = answer
        self._questions.put((question, answer))
        if self.patience is not None:
            answer.result(self.patience)
        while not wait([answer], STEP).done:
            self.check_workers()
        self.hear()
        return answer.result()

    # The questions, as those of a store --------------------------------------

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._made().set(key, value))

    def get(self, key: str) -> bytes:
        return bytes(self._ask(lambda: self._made().get(key)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._ask(lambda: self._made().multi_get(list(keys))))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(lambda: self._made().check(list(keys))))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(lambda: self._made().add(key, amount)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return bytes(self._ask(lambda: self._made().compare_set(key, expected, desired)))
