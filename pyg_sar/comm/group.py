"""How a process becomes a worker: the environment, the store, the rendezvous, and ``init``.

[Note: starts] torchrun keeps the store when it starts workers anew, and how often it did differs
between hosts: one that joins a job, or whose workers still ran, counts no restart. So rank 0 gives
each start a name, and beats until all have come. Whoever comes waits for a beat: names of starts
before have none.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pyg_sar.comm.backends import TRANSPORTS, GroupTransport, Setting
from pyg_sar.comm.communicator import (
    Communicator,
    GroupCommunicator,
    LocalCommunicator,
)
from pyg_sar.comm.devices import check_gpu, count_gpus, device_of, numbered, place
from pyg_sar.comm.environment import WorkerInfo, adopted, read_environment
from pyg_sar.comm.issuer import Work
from pyg_sar.comm.meeting import meet_local_peers, read_switch, say
from pyg_sar.comm.messages import COLLECTIVE, NoWatch, Outgoing, is_consequence
from pyg_sar.comm.processes import addresses_from, is_loopback, this_process
from pyg_sar.comm.watch import ASK, StoreWatch
from pyg_sar.errors import CommTimeoutError, PygSarError
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

# Where the workers meet #######################################################


def host_store(address: str, port: int, timeout: float = 300.0) -> dist.TCPStore:
    """Hosts a store for workers, in which whoever reaches its port may write.

    Args:
        address: What the workers call this host. Where that is the loopback (``127.0.0.1``,
            ``localhost``), no other host reaches the store; else it listens on all interfaces.
        port: Its port; 0 takes a free one.
        timeout: Seconds that an answer may take.

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
    host = partial(
        dist.TCPStore,
        address,
        port if listener is None else listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.fileno(),
    )
    try:
        store = host()
    except NotImplementedError:  # libuv, the default, takes no socket in older versions of PyTorch.
        store = host(use_libuv=False)
    if listener is not None:
        listener.detach()  # The store closes it.
    return store


def connect(info: WorkerInfo, timeout: float) -> dist.Store:
    """Connects to the workers' store; rank 0 hosts it where no launcher does.

    Raises:
        CommTimeoutError: When it isn't reached within ``timeout`` seconds.
        ValueError: When its address makes no sense, or its port is taken.
    """
    if info.rank != 0 or info.agent_store:
        return reconnect(info, timeout)
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


def reconnect(info: WorkerInfo, timeout: float) -> dist.Store:
    """Returns a connection to the workers' store, by which no other one is kept waiting.

    Raises:
        CommTimeoutError: When it isn't reached within ``timeout`` seconds.
    """
    address, port = info.address, info.port
    limit = timedelta(seconds=timeout)
    try:
        return dist.TCPStore(address, port, is_master=False, timeout=limit)
    except dist.DistError as error:
        raise _unreached(info, timeout, error) from error


def _unreached(info: WorkerInfo, timeout: float, error: BaseException) -> CommTimeoutError:
    address, port = info.address, info.port
    who = "the launcher" if info.agent_store else "rank 0"
    return CommTimeoutError(
        f"Rank {info.rank} did not reach the store of the {info.world_size} workers, which "
        f"{who} hosts at {address}:{port}, within {timeout:g} s ({_first_line(error)}). Is "
        f"every worker started, with the same MASTER_ADDR and MASTER_PORT, and reachable?"
    )


def name_start(store: dist.Store, info: WorkerInfo, timeout: float) -> str:
    """Returns the name of this start of the workers. See [Note: starts].

    Args:
        store: The workers' store, which may have been that of workers before.
        info: This worker.
        timeout: Seconds to wait for rank 0.

    Raises:
        CommTimeoutError: When rank 0 has not come after ``timeout`` seconds.
    """
    if info.rank == 0:
        name = f"start {store.add('starts', 1)}"
        store.set("start", name)
        return name
    end, seen = time.monotonic() + timeout, ("", b"")
    while time.monotonic() < end:
        if store.check(["start"]):
            name = store.get("start").decode()
            beat = store.get(f"beat/{name}") if store.check([f"beat/{name}"]) else b""
            if seen[0] == name and seen[1] != beat:
                return name
            seen = name, beat
        time.sleep(0.01)
    raise CommTimeoutError(
        f"Rank {info.rank} waited {timeout:g} s for rank 0 of {info.world_size} to start"
    )


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]


def claim_rank(store: dist.Store, rank: int) -> None:
    """Raises ``ValueError`` on a rank that two processes claim."""
    if store.add(f"claim/{rank}", 1) > 1:
        raise ValueError(f"RANK={rank} is taken by another process; every worker needs its own")


def wait_for_workers(
    store: dist.Store,
    info: WorkerInfo,
    backend: str,
    timeout: float,
    meanwhile: Callable[[Mapping[int, Mapping[str, Any]]], None] = lambda known: None,
) -> list[dict[str, Any]]:
    """Waits until every rank came and wants the same.

    Args:
        store: The workers' store, in which this rank is claimed.
        info: This worker.
        backend: What it wants.
        timeout: Seconds to wait for the others.
        meanwhile: Called time and again with what is known of those who came, by rank.

    Returns:
        What each rank is (:func:`this_process`), in rank order.

    Raises:
        CommTimeoutError: When ranks are missing after ``timeout`` seconds; names them.
        ValueError: On different backends.
    """
    rank, world = info.rank, info.world_size
    mine = {**this_process(), "backend": backend, "world_size": world}
    store.set(f"who/{rank}", json.dumps(mine))
    known: dict[int, dict[str, Any]] = {}
    end, step = time.monotonic() + timeout, 0
    while True:
        missing = [other for other in range(world) if other not in known]
        # One at a time as a rule; now and then all, lest one that is late hides the others.
        for other in missing if step % 20 == 0 else missing[:1]:
            if store.check([f"who/{other}"]):
                known[other] = json.loads(store.get(f"who/{other}"))
        meanwhile(known)
        if len(known) == world:
            break
        if time.monotonic() > end:
            missing = [other for other in missing if other not in known]
            raise CommTimeoutError(
                f"Rank {rank} waited {timeout:g} s for rank(s) {missing} of {world} to start"
            )
        if missing[0] not in known:
            time.sleep(0.01)
        step += 1
    everyone = [known[other] for other in range(world)]
    for other, who in enumerate(everyone):
        if who["backend"] != backend:
            raise ValueError(
                f"backend: rank {rank} wants {backend!r}, rank {other} {who['backend']!r}; "
                f"pass the same backend= to init() on every rank"
            )
    return everyone


# The current communicator #####################################################


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


def is_open() -> bool:
    """Returns whether :func:`init` has set up the current communicator."""
    comm = _scope.get().comm
    return comm is not None and not comm.closed


def init(
    backend: str | None = None,
    *,
    timeout: float = 1800.0,
    device: torch.device | str | None = None,
) -> Communicator:
    """Joins the workers of this run, and returns the communicator (the current one, if any).

    Joins the process group of :mod:`torch.distributed` where there is one, as Ray Train has it.
    Else it reads the variables of torchrun, ``srun`` or ``mpirun``. Without any, this process is
    the only worker.

    Workers of one host read each other's rows through shared memory, and use the backend for
    sums and for other hosts. The environment variable ``PYG_SAR_SHARED_MEMORY`` says when: ``auto``
    (the default) where two workers have found that they can, ``0`` never, ``1`` always, with
    an error where workers of one host can't.

    Args:
        backend: ``'gloo'``, ``'nccl'``, ``'mpi'`` or ``'ccl'``. By default ``'nccl'`` where every
            worker of the host has a GPU of its own, else ``'gloo'``, which copies what a GPU sends
            and receives through the CPU's memory.
        timeout: Seconds that an operation, and the start, may take.
        device: Device of this worker, where ``load_partition`` puts its data and ``distribute``
            expects the model. By default ``cuda:LOCAL_RANK`` where every worker of the host has a
            GPU of its own, else the CPU; the CPU with ``backend='gloo'``. See
            :mod:`pyg_sar.comm.devices`.

    Returns:
        The communicator.

    Raises:
        ValueError: An unknown or missing backend; a device that isn't there, or another one than
            that of the current communicator; an environment that is incomplete, or says two things
            (names the variables).
        PygSarError: Workers of one host that can't share memory, though they must.
        CommTimeoutError: Workers that did not come.
        LostWorkerError: A worker that came, and was killed before all had met.
    """
    return join(backend, timeout, device)


def join(
    backend: str | None,
    timeout: float,
    device: torch.device | str | None = None,
    parts: bool = False,
) -> Communicator:
    """:func:`init`, also of a worker that hosts ``parts``, which are not carried by NCCL."""
    check_init(backend, timeout)
    target = None if device is None else device_of(device)
    scope = _scope.get()
    if scope.comm is not None and is_open():
        if scope.comm.world_size > 1 and backend not in (None, scope.comm.backend):
            raise ValueError(
                f"backend={backend!r}, but this process already uses {scope.comm.backend!r}; "
                f"call pyg_sar.comm.finalize() first"
            )
        here = scope.comm.device
        if target is not None and target not in (here, torch.device(here.type)):
            raise ValueError(
                f"device='{device}' at rank {scope.comm.rank}, but this worker already computes "
                f"on {here}: leave it out, or call pyg_sar.comm.finalize() first"
            )
        return scope.comm
    scope.generation += 1
    scope.comm = _open(backend, timeout, target, parts, scope.generation)
    return scope.comm


def check_init(backend: str | None, timeout: float) -> None:
    """Raises ``ValueError`` on arguments of :func:`init` that make no sense."""
    if backend is not None and backend not in TRANSPORTS:
        hint = " ('threads' is for pyg_sar.launch())" if backend == "threads" else ""
        raise ValueError(f"backend={backend!r} must be one of {', '.join(TRANSPORTS)}{hint}")
    if backend is not None:
        TRANSPORTS[backend].check()
    if not (isinstance(timeout, int | float) and math.isfinite(timeout) and timeout > 0):
        raise ValueError(f"timeout={timeout!r} must be a positive number of seconds")


def _open(
    backend: str | None, timeout: float, device: torch.device | None, parts: bool, generation: int
) -> Communicator:
    if backend is not None:
        TRANSPORTS[backend].check()
    if backend is not None and not TRANSPORTS[backend].uses_store:
        info = WorkerInfo(
            rank=0, world_size=1, local_rank=None, local_world_size=1, agent_store=True
        )
        device = device or TRANSPORTS[backend].choose_device(info)
        setting = Setting(info=info, store=None, timeout=timeout, device=device)
        return GroupCommunicator(TRANSPORTS[backend](setting), NoWatch(), timeout)
    found = adopted() or read_environment()
    switch = read_switch()
    if found is None or found.world_size == 1:
        if found is not None:
            device = place(found, backend, device).device
        elif device is not None:
            check_gpu(device, 0, count_gpus())
        return LocalCommunicator(None if device is None else numbered(device), timeout)
    chosen = place(found, backend, device, parts)
    kind, device = TRANSPORTS[chosen.backend], chosen.device
    root = connect(found, timeout)
    again = found.agent_store and "TORCHELASTIC_RUN_ID" in os.environ
    start = name_start(root, found, timeout) if again else "start"
    prefix = f"{start}/pyg_sar/{generation}"
    store = dist.PrefixStore(prefix, root)
    # A connection of its own: it must not queue behind a backend that waits for a key.
    watch = StoreWatch(dist.PrefixStore(f"{prefix}/watch", reconnect(found, ASK)), found)

    def meet(known: Mapping[int, Mapping[str, Any]]) -> None:
        if again and found.rank == 0:
            root.add(f"beat/{start}", 1)
        watch.meet(known)

    try:
        claim_rank(store, found.rank)
    except dist.DistError as error:
        raise watch.diagnose(error, "the start") from error
    watch.begin()
    setting = Setting(
        info=found, store=dist.PrefixStore("group", store), timeout=timeout, device=device
    )
    try:
        return _join(store, kind, setting, switch, watch, meet)
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
    meet: Callable[[Mapping[int, Mapping[str, Any]]], None],
) -> Communicator:
    """Meets the others. Ends with the error of one that fails meanwhile."""
    info, timeout = setting.info, setting.timeout
    everyone = wait_for_workers(store, info, kind.name, timeout, meet)
    if len({who["host"] for who in everyone}) > 1:
        watch.serve_status(addresses_from(info.address))
    if setting.device.type != "cpu":
        switch = "0"  # Rows on a GPU are not for processes to read.
    meeting = dist.PrefixStore("local peers", store)
    local_peers = meet_local_peers(meeting, info, everyone, switch, timeout, watch.check)
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
    transport = made.result()
    # Who ended at once would close connections that others are still about to open.
    say(store, info.rank, info.world_size, "joined", True, "to join", timeout, watch.check)
    return GroupCommunicator(transport, watch, timeout, local_peers)


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
