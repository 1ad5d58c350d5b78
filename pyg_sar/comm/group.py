"""How a process becomes a worker: the environment, the store, the rendezvous, and ``init``.

[Note: starts] torchrun keeps the store when it starts workers anew, and how often it did differs
between hosts: one that joins a job, or whose workers still ran, counts no restart. So rank 0 gives
each start a name, and beats until all have come. Whoever comes waits for a beat: names of starts
before have none.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pyg_sar.comm.backends import TRANSPORTS, Setting, Transport
from pyg_sar.comm.communicator import Communicator, GroupCommunicator, LocalCommunicator
from pyg_sar.comm.devices import check_gpu, count_gpus, device_of, numbered, place
from pyg_sar.comm.environment import WorkerInfo, adopted, read_environment
from pyg_sar.comm.issuer import Work
from pyg_sar.comm.meeting import meet_local_peers, read_switch, say
from pyg_sar.comm.messages import COLLECTIVE, MemberPosts, Outgoing, Posts, is_consequence
from pyg_sar.comm.processes import addresses_from, this_process
from pyg_sar.comm.processes import place as place_of
from pyg_sar.comm.store import AskedStore, connect, end_with_program, reconnect
from pyg_sar.comm.watch import ASK, StoreWatch
from pyg_sar.errors import CommTimeoutError, PygSarError
from pyg_sar.files import check_whole
from pyg_sar.ledger import Label
from pyg_sar.store.pager import keep_freed
from pyg_sar.wording import counted

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


def name_start(store: AskedStore, info: WorkerInfo, timeout: float) -> str:
    """Returns the name of this start of the workers, in a store that may have been that of workers
    before. See [Note: starts].

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


def claim_rank(store: AskedStore, rank: int) -> None:
    """Raises ``ValueError`` on a rank that two processes claim."""
    if store.add(f"claim/{rank}", 1) > 1:
        raise ValueError(f"RANK={rank} is taken by another process; every worker needs its own")


def wait_for_workers(
    store: AskedStore,
    info: WorkerInfo,
    backend: str,
    timeout: float,
    meanwhile: Callable[[Mapping[int, Mapping[str, Any]]], None] = lambda known: None,
) -> list[dict[str, Any]]:
    """Waits until every rank came and wants the same.

    ``meanwhile`` is called time and again with what is known of those who came, by rank.

    Returns:
        What each rank is (:func:`this_process`), in rank order.

    Raises:
        CommTimeoutError: When ranks are missing after ``timeout`` seconds; names them.
        ValueError: On different backends, or numbers of replicas.
    """
    rank, world = info.rank, info.world_size
    replicas = 1 if info.parts is None else world // info.parts
    mine = {**this_process(), "backend": backend, "world_size": world, "replicas": replicas}
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
        if who["replicas"] != replicas:
            raise ValueError(
                f"replicas: rank {rank} wants {replicas}, rank {other} {who['replicas']}; pass the "
                "same replicas= or mesh= to init() on every rank"
            )
    return everyone


# The current communicator #####################################################


@dataclass(slots=True)
class Scope:
    """Holds the current communicator of a process, or of a thread that is a worker."""

    comm: Communicator | None = None
    fallback: LocalCommunicator | None = None
    generation: int = 0


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
    replicas: int | None = None,
    mesh: DeviceMesh | None = None,
) -> Communicator:
    """Joins the workers of this run, and returns the communicator (the current one, if any).

    .. code-block:: python

        with pyg_sar.init() as comm:  # torchrun --nproc-per-node 4 script.py
            data = pyg_sar.load_partition("parts")
            print(comm.rank, comm.world_size, comm.device)

    Joins the process group of :mod:`torch.distributed` where there is one, as Ray Train has it.
    Else it reads the variables of torchrun, ``srun`` or ``mpirun``, and leaves no default group:
    ``torch.distributed.is_initialized()`` is false, as in one process. Without any, this process is
    the only worker.

    Workers of one host read each other's rows through shared memory, and use the backend for
    sums and for other hosts. The environment variable ``PYG_SAR_SHARED_MEMORY`` says when: ``auto``
    (the default) where two workers have found that they can, ``0`` never, ``1`` always, with
    an error where workers of one host can't.

    Args:
        backend: ``'gloo'``, ``'nccl'`` or ``'ccl'``. By default ``'nccl'`` where every
            worker of the host has a GPU of its own, else ``'gloo'``, which copies what a GPU sends
            and receives through the CPU's memory.
        timeout: Seconds that an operation, and the start, may take.
        device: Device of this worker, where ``load_partition`` puts its data and ``distribute``
            expects the model. By default ``cuda:LOCAL_RANK`` where every worker of the host has a
            GPU of its own, else the CPU; the CPU with ``backend='gloo'``. See
            :mod:`pyg_sar.comm.devices`.
        replicas: Into how many groups of equally many workers all workers are divided, in the order
            of their ranks. Each group shares a graph, and the groups train one model on samples of
            their own: gradients are averaged over them (docs/training.md). By default 1.
        mesh: The same by PyTorch's mesh: ``init_device_mesh("cpu", (R, P),
            mesh_dim_names=("replicate", "part"))`` of R replicas of P workers.

    Returns:
        The communicator of this worker's replica, in which its ``rank`` is the part. ``replica``
        and ``replicas`` are the ``rank`` and ``num_replicas`` of a
        :class:`torch.utils.data.DistributedSampler`.

    Raises:
        ValueError: An unknown or missing backend; a device that isn't there, or another one than
            that of the current communicator; an environment that is incomplete, or says two things
            (names the variables); replicas that the number of workers is no multiple of, or that
            differ between workers; a mesh of other dimensions or ranks.
        TypeError: ``mesh`` is no ``DeviceMesh``.
        PygSarError: Workers of one host that can't share memory, though they must.
        CommTimeoutError: Workers that did not come.
        LostWorkerError: A worker that came, and was killed before all had met.
    """
    if mesh is not None:
        replicas = _replicas_of(mesh, replicas)
    return join(backend, timeout, device, replicas=replicas)


def _replicas_of(mesh: Any, replicas: int | None) -> int:
    """Returns the number of replicas of a mesh."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"Expected 'mesh' to be a torch.distributed.DeviceMesh (got {type(mesh).__name__})"
        )
    named = mesh.mesh_dim_names == ("replicate", "part")
    if not named or mesh.mesh.flatten().tolist() != list(range(dist.get_world_size())):
        raise ValueError(
            f"mesh={mesh!r} must have the dimensions ('replicate', 'part') and all "
            f"{counted(dist.get_world_size(), 'workers')} in the order of their ranks: "
            "init_device_mesh('cpu', (R, P), mesh_dim_names=('replicate', 'part'))"
        )
    if replicas not in (None, mesh.size(0)):
        raise ValueError(f"replicas={replicas!r}, but the mesh has {mesh.size(0)}: leave one out")
    return mesh.size(0)


def join(
    backend: str | None,
    timeout: float,
    device: torch.device | str | None = None,
    parts: bool = False,
    replicas: int | None = None,
) -> Communicator:
    """:func:`init`, also of a worker that hosts ``parts``, which are not carried by NCCL."""
    check_init(backend, timeout, replicas)
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
        if replicas not in (None, scope.comm.replicas):
            raise ValueError(
                f"replicas={replicas} at rank {scope.comm.rank}, but the workers have joined as "
                f"{counted(scope.comm.replicas, 'replicas')}: say it at the first start, "
                "pyg_sar.launch(fn, n, replicas=R) or pyg_sar.init(replicas=R)"
            )
        return scope.comm
    scope.generation += 1
    scope.comm = _open(backend, timeout, target, parts, scope.generation, replicas or 1)
    keep_freed(scope.comm.device.type == "cpu")
    return scope.comm


def check_init(backend: str | None, timeout: float, replicas: int | None = None) -> None:
    """Raises ``ValueError`` on arguments of :func:`init` that make no sense."""
    if backend is not None and backend not in TRANSPORTS:
        raise ValueError(f"backend={backend!r} must be one of {', '.join(TRANSPORTS)}")
    if backend is not None:
        TRANSPORTS[backend].check()
    if not (isinstance(timeout, int | float) and math.isfinite(timeout) and timeout > 0):
        raise ValueError(f"timeout={timeout!r} must be a positive number of seconds")
    check_whole("replicas", replicas, optional=True)


def check_replicas(replicas: int, world: int, who: str = "") -> None:
    """Raises ``ValueError`` where so many workers can't be so many replicas."""
    if world % replicas:
        raise ValueError(
            f"replicas={replicas}{who}: {counted(world, 'workers')} can't be divided into so many "
            "groups of equal size; start a multiple of replicas"
        )


def _open(
    backend: str | None,
    timeout: float,
    device: torch.device | None,
    parts: bool,
    generation: int,
    replicas: int,
) -> Communicator:
    found = adopted() or read_environment()
    switch = read_switch()
    if found is None:
        check_replicas(replicas, 1)
        if device is not None:
            check_gpu(device, 0, count_gpus())
        return LocalCommunicator(None if device is None else numbered(device), timeout)
    check_replicas(replicas, found.world_size, who=f" at rank {found.rank}")
    if replicas > 1:
        found = replace(found, parts=found.world_size // replicas)
    if found.world_size == 1:
        return LocalCommunicator(numbered(place(found, backend, device).device), timeout)
    chosen = place(found, backend, device, parts)
    kind, device = TRANSPORTS[chosen.backend], chosen.device
    again = found.agent_store and "TORCHELASTIC_RUN_ID" in os.environ
    watch = StoreWatch(None, found)
    watch.begin()

    def check() -> None:
        if not found.agent_store:  # Rank 0, which hosts the store, may come later.
            watch.hear()
        watch.check()

    root = AskedStore(partial(connect, found, timeout, check), watch.check, watch.hear)
    store: AskedStore | None = None
    try:
        start = name_start(root, found, timeout) if again else "start"
        prefix = f"{start}/pyg_sar/{generation}"
        shared = dist.PrefixStore(prefix, root.raw())
        store = AskedStore(lambda: shared, watch.check, watch.hear)

        def make() -> dist.Store:
            # A connection of its own: it must not queue behind a backend that waits for a key.
            own = reconnect(found, ASK, watch.hear)
            return dist.PrefixStore(f"{prefix}/watch", own)

        def meet(known: Mapping[int, Mapping[str, Any]]) -> None:
            if again and found.rank == 0:
                root.add(f"beat/{start}", 1)
            watch.meet(known)

        watch.use(make)
        claim_rank(store, found.rank)
        group = dist.PrefixStore("group", shared)
        setting = Setting(info=found, store=group, timeout=timeout, device=device)
        return _join(store, shared, kind, setting, switch, watch, meet)
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
    finally:
        root.close()
        if store is not None:
            store.close()


def _join(
    store: AskedStore,
    shared: dist.Store,
    kind: type[Transport],
    setting: Setting,
    switch: str,
    watch: StoreWatch,
    meet: Callable[[Mapping[int, Mapping[str, Any]]], None],
) -> Communicator:
    """Meets the others. Ends with the error of one that fails meanwhile."""
    info, timeout = setting.info, setting.timeout
    everyone = wait_for_workers(store, info, kind.name, timeout, meet)
    if len(set(map(place_of, everyone))) > 1:
        watch.serve_status(addresses_from(info.address))
    if setting.device.type != "cpu":
        switch = "0"  # Rows on a GPU are not for processes to read.
    parts = info.parts or info.world_size
    replica, part = divmod(info.rank, parts)
    groups = [range(at, at + parts) for at in range(0, info.world_size, parts)]
    members = groups[replica]
    own = replace(info, rank=part, world_size=parts)
    of_group, found = store, everyone[members.start : members.stop]
    if info.parts:
        inner = dist.PrefixStore(f"replica {replica}", shared)
        of_group = AskedStore(lambda: inner, store.check_workers, store.hear)
    local_peers = meet_local_peers(of_group, own, found, switch, timeout)
    if info.parts:
        of_group.close()
    if setting.device.type == "cuda":
        torch.cuda.set_device(setting.device)  # Of this thread, too.
    made: Future[list[Transport]] = Future()

    def make() -> None:
        try:
            made.set_result(_transports(kind, setting, groups))
        except BaseException as error:
            made.set_exception(error)

    # On a thread that can be left behind: nothing ends a backend's wait for a worker that is gone.
    at_end = partial(end_with_program, made, setting.store)
    atexit.register(at_end)
    made.add_done_callback(lambda _: atexit.unregister(at_end))
    threading.Thread(target=make, name="pyg_sar start", daemon=True).start()
    while not wait([made], 0.1).done:
        watch.check()
    transports = made.result()
    # Who ended at once would close connections that others are still about to open.
    say(store, info, "joined", True, "to join", timeout)
    if info.parts is None:
        return GroupCommunicator(transports[0], watch, timeout, local_peers)
    posts = Posts()
    for transport in transports:
        transport.posts = MemberPosts(posts, transport.members)
    if parts == 1:
        across = GroupCommunicator(transports[0], watch, timeout, posts=posts)
        alone = LocalCommunicator(setting.device, timeout)
        alone.place_among(across)
        return alone
    comm = GroupCommunicator(transports[0], watch, timeout, local_peers, posts)
    comm.place_among(GroupCommunicator(transports[1], watch, timeout, main=comm))
    return comm


def _transports(
    kind: type[Transport], setting: Setting, groups: Sequence[Sequence[int]]
) -> list[Transport]:
    """Opens what carries tensors within a replica, if it has several workers, and across them."""
    if setting.info.parts is None:
        return [kind(setting)]
    found: list[Transport] = []
    for axis in (groups, list(zip(*groups, strict=True))):
        if len(axis[0]) > 1:
            world = found[0].world if found else None
            found.append(kind(replace(setting, groups=axis, world=world)))
    return found


def finalize() -> None:
    """Ends the current communicator, if there is one. Never raises."""
    scope = _scope.get()
    comm, scope.comm, scope.fallback = scope.comm, None, None
    if "torch._dynamo" in sys.modules:  # Where load_partition() has changed it.
        torch.compiler.set_stance("default")
    if comm is not None:
        comm.close()
        keep_freed(False)


def adopt(comm: Communicator) -> None:
    """Makes ``comm`` the current one of this thread (and of what it starts in its context)."""
    _scope.set(Scope(comm))
