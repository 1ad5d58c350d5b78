"""Which communicator is current: ``init``, ``current``, ``finalize``."""

from __future__ import annotations

import math
import os
import threading
from concurrent.futures import Future, wait
from contextvars import ContextVar

import torch
import torch.distributed as dist

from pyg_sar.comm.backends import TRANSPORTS, GroupTransport, Setting
from pyg_sar.comm.communicator import (
    Communicator,
    GroupCommunicator,
    LocalCommunicator,
)
from pyg_sar.comm.failure import NoWatch, is_consequence
from pyg_sar.comm.issuer import Work
from pyg_sar.comm.meeting import meet_neighbours, read_switch
from pyg_sar.comm.payload import COLLECTIVE, Outgoing
from pyg_sar.comm.rendezvous import (
    Place,
    addresses_from,
    call_the_roll,
    claim_rank,
    connect,
    default_backend,
    read_environment,
    reconnect,
)
from pyg_sar.comm.watch import ASK, StoreWatch
from pyg_sar.errors import PygSarError
from pyg_sar.ledger import Label

__all__ = [
    "COLLECTIVE",
    "Communicator",
    "Label",
    "LocalCommunicator",
    "Outgoing",
    "Work",
    "adopt",
    "current",
    "finalize",
    "init",
]


class Scope:
    """Holds the current communicator of a process, or of a thread that is a worker."""

    def __init__(self) -> None:
        self.comm: Communicator | None = None
        self.fallback: LocalCommunicator | None = None
        self.generation = 0


_scope: ContextVar[Scope] = ContextVar("pyg_sar communicator", default=Scope())  # noqa: B039
# The default is one object for the whole process: threads (autograd's on CUDA, data loaders) start
# with an empty context, and must find the process's communicator all the same.


def current() -> Communicator:
    """Returns the current communicator; that of a single process where none was set up."""
    scope = _scope.get()
    if scope.comm is not None and not scope.comm.closed:
        return scope.comm
    if scope.fallback is None:
        scope.fallback = LocalCommunicator()
    return scope.fallback


def init(
    backend: str | None = None,
    *,
    timeout: float = 1800.0,
    device: torch.device | str | None = None,
) -> Communicator:
    """Joins the workers of this run, and returns the communicator (the current one, if any).

    Reads torchrun's environment. Without it, this process is the only worker.

    Workers of one host read each other's rows through shared memory, and use the backend for
    sums and for other hosts. The environment variable ``PYG_SAR_SHARED_MEMORY`` says when: ``auto``
    (the default) where two workers have found that they can, ``0`` never, ``1`` always, with
    an error where workers of one host can't.

    Args:
        backend: ``'gloo'``, ``'nccl'``, ``'mpi'`` or ``'ccl'``. By default ``'nccl'`` where every
            worker of the host has a GPU of its own, else ``'gloo'``.
        timeout: Seconds that an operation, and the start, may take.
        device: Device of this worker. By default the CPU, or ``cuda:LOCAL_RANK`` with NCCL.

    Returns:
        The communicator.

    Raises:
        ValueError: An unknown or missing backend, an incomplete environment (names the variable).
        PygSarError: Workers of one host that can't share memory, though they must.
        CommTimeoutError: Workers that did not come.
        LostWorkerError: A worker that came, and was killed before all had met.
    """
    check_init(backend, timeout)
    scope = _scope.get()
    if scope.comm is not None and not scope.comm.closed:
        if scope.comm.world_size > 1 and backend not in (None, scope.comm.backend):
            raise ValueError(
                f"backend={backend!r}, but this process already uses {scope.comm.backend!r}; "
                f"call pyg_sar.comm.finalize() first"
            )
        return scope.comm
    scope.generation += 1
    target = None if device is None else torch.device(device)
    scope.comm = _open(backend, timeout, target, scope.generation)
    return scope.comm


def check_init(backend: str | None, timeout: float) -> None:
    """Raises ``ValueError`` on arguments of :func:`init` that make no sense."""
    if backend is not None and backend not in TRANSPORTS:
        hint = " ('threads' is for pyg_sar.launch())" if backend == "threads" else ""
        raise ValueError(f"backend={backend!r} must be one of {', '.join(TRANSPORTS)}{hint}")
    if not (isinstance(timeout, int | float) and math.isfinite(timeout) and timeout > 0):
        raise ValueError(f"timeout={timeout!r} must be a positive number of seconds")


def _open(
    backend: str | None, timeout: float, device: torch.device | None, generation: int
) -> Communicator:
    if backend is not None:
        TRANSPORTS[backend].check()
    if backend is not None and not TRANSPORTS[backend].uses_store:
        place = Place(rank=0, world_size=1, local_rank=None, local_world_size=1, agent_store=True)
        device = device or TRANSPORTS[backend].choose_device(place)
        setting = Setting(place=place, store=None, timeout=timeout, device=device)
        return GroupCommunicator(TRANSPORTS[backend](setting), NoWatch(), timeout)
    found = read_environment()
    switch = read_switch()
    if found is None or found.world_size == 1:
        if found is not None and device is None:
            device = TRANSPORTS[backend or default_backend(found)].choose_device(found)
        return LocalCommunicator(device, timeout)
    kind = TRANSPORTS[backend or default_backend(found)]
    device = device or kind.choose_device(found)
    store = dist.PrefixStore(f"pyg_sar/{generation}", connect(found, timeout))
    # A connection of its own: it must not queue behind a backend that waits for a key.
    told = dist.PrefixStore(f"pyg_sar/{generation}/watch", reconnect(found, ASK))
    watch = StoreWatch(told, found)
    try:
        claim_rank(store, found.rank)
    except dist.DistError as error:
        raise watch.diagnose(error, "the start") from error
    watch.begin()
    setting = Setting(
        place=found, store=dist.PrefixStore("group", store), timeout=timeout, device=device
    )
    try:
        return _join(store, kind, setting, switch, watch)
    except BaseException as error:
        # A connection that broke: who was lost?
        named = isinstance(error, PygSarError) or not isinstance(error, RuntimeError)
        cause = error if named else watch.diagnose(error, "the start")
        if not is_consequence(cause, found.rank):
            watch.report(cause)
        watch.close()
        if cause is error:
            raise
        raise cause from error


def _join(
    store: dist.Store,
    kind: type[GroupTransport],
    setting: Setting,
    switch: str,
    watch: StoreWatch,
) -> Communicator:
    """Meets the others. Ends with the error of one that fails meanwhile."""
    place, timeout = setting.place, setting.timeout
    everyone = call_the_roll(store, place, kind.name, timeout, watch.meet)
    if len({who["host"] for who in everyone}) > 1:
        watch.light(addresses_from(os.environ["MASTER_ADDR"]))
    if setting.device.type != "cpu":
        switch = "0"  # Rows on a GPU are not for processes to read.
    meeting = dist.PrefixStore("neighbours", store)
    neighbours = meet_neighbours(meeting, place, everyone, switch, timeout, watch.check)
    if setting.device.type == "cuda":
        torch.cuda.set_device(setting.device)  # Of this thread, too.
    made: Future[GroupTransport] = Future()

    def make() -> None:
        try:
            made.set_result(kind(setting))
        except BaseException as error:
            made.set_exception(error)

    # On a thread that can be left behind: nothing ends a backend's wait for a worker that is gone.
    threading.Thread(target=make, name="pyg_sar start", daemon=True).start()
    while not wait([made], 0.1).done:
        watch.check()
    return GroupCommunicator(made.result(), watch, timeout, neighbours)


def finalize() -> None:
    """Ends the current communicator, if there is one. Never raises."""
    scope = _scope.get()
    comm, scope.comm, scope.fallback = scope.comm, None, None
    if comm is not None:
        comm.close()


def adopt(comm: Communicator) -> None:
    """Makes ``comm`` the current one of this thread (and of what it starts in its context)."""
    scope = Scope()
    scope.comm = comm
    _scope.set(scope)
