"""Who the workers are: torchrun's environment, the shared store, and the roll call in it."""

from __future__ import annotations

import functools
import ipaddress
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

from pyg_sar.comm.beacon import look_at
from pyg_sar.errors import CommTimeoutError

REMEDY = (
    "Start the workers with torchrun or pyg_sar.launch(), or set RANK, WORLD_SIZE, MASTER_ADDR "
    "and MASTER_PORT for each"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A worker's place in the group.

    Args:
        rank: Its rank.
        world_size: Number of workers.
        local_rank: Its number on its host (``None``: not said).
        local_world_size: Number of workers on its host.
        agent_store: Whether the store lives outside the workers (with torchrun, or ``launch``).
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int
    agent_store: bool


def read_environment(env: Mapping[str, str] | None = None) -> Place | None:
    """Reads torchrun's variables. Returns ``None`` where there are none: a single process.

    Raises:
        ValueError: When they are incomplete or make no sense; names the variable.
    """
    env = os.environ if env is None else env
    if not env.get("RANK") and not env.get("WORLD_SIZE"):
        return None
    world = _read_int(env, "WORLD_SIZE", 1, None)
    rank = _read_int(env, "RANK", 0, world)
    if world > 1:
        if not env.get("MASTER_ADDR"):
            raise ValueError(f"MASTER_ADDR is not set, but WORLD_SIZE={world}. {REMEDY}")
        _read_int(env, "MASTER_PORT", 1, 1 << 16)
    local_world = world
    if env.get("LOCAL_WORLD_SIZE"):
        local_world = _read_int(env, "LOCAL_WORLD_SIZE", 1, world + 1)
    local_rank = None
    if env.get("LOCAL_RANK"):
        local_rank = _read_int(env, "LOCAL_RANK", 0, local_world)
    return Place(
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        local_world_size=local_world,
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _read_int(env: Mapping[str, str], name: str, low: int, high: int | None) -> int:
    text = env.get(name)
    if not text:
        raise ValueError(f"{name} is not set. {REMEDY}")
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a whole number. {REMEDY}") from None
    if value < low or (high is not None and value >= high):
        span = f"at least {low}" if high is None else f"between {low} and {high - 1}"
        raise ValueError(f"{name}={value} must be {span}. {REMEDY}")
    return value


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
    if _is_loopback(str(where[0])):
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


def connect(place: Place, timeout: float) -> dist.Store:
    """Connects to the workers' store; rank 0 hosts it where no launcher does.

    Raises:
        CommTimeoutError: When it isn't reached within ``timeout`` seconds.
        ValueError: When its address makes no sense, or its port is taken.
    """
    if place.rank != 0 or place.agent_store:
        return reconnect(place, timeout)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return _of_this_attempt(host_store(address, port, timeout))
    except OSError as error:
        raise ValueError(f"MASTER_ADDR={address!r} can't be resolved: {error}") from error
    except dist.DistError as error:
        if "EADDRINUSE" not in str(error):
            raise _unreached(place, timeout, error) from error
        raise ValueError(
            f"MASTER_PORT: {address}:{port} is taken by another program; choose another port"
        ) from error


def reconnect(place: Place, timeout: float) -> dist.Store:
    """Returns a connection to the workers' store, by which no other one is kept waiting.

    Raises:
        CommTimeoutError: When it isn't reached within ``timeout`` seconds.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=timeout)
    try:
        store = dist.TCPStore(address, port, is_master=False, timeout=limit)
    except dist.DistError as error:
        raise _unreached(place, timeout, error) from error
    return _of_this_attempt(store)


def _unreached(place: Place, timeout: float, error: BaseException) -> CommTimeoutError:
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    who = "the launcher" if place.agent_store else "rank 0"
    return CommTimeoutError(
        f"Rank {place.rank} did not reach the store of the {place.world_size} workers, which "
        f"{who} hosts at {address}:{port}, within {timeout:g} s ({_first_line(error)}). Is "
        f"every worker started, with the same MASTER_ADDR and MASTER_PORT, and reachable?"
    )


def _of_this_attempt(store: dist.Store) -> dist.Store:
    """torchrun starts all workers anew after a failure, with the same store."""
    return dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]


def claim_rank(store: dist.Store, rank: int) -> None:
    """Raises ``ValueError`` on a rank that two processes claim."""
    if store.add(f"claim/{rank}", 1) > 1:
        raise ValueError(f"RANK={rank} is taken by another process; every worker needs its own")


def call_the_roll(
    store: dist.Store,
    place: Place,
    backend: str,
    timeout: float,
    meanwhile: Callable[[Mapping[int, Mapping[str, Any]]], None] = lambda known: None,
) -> list[dict[str, Any]]:
    """Waits until every rank came and wants the same.

    Args:
        store: The workers' store, in which this rank is claimed.
        place: This worker.
        backend: What it wants.
        timeout: Seconds to wait for the others.
        meanwhile: Called time and again with what is known of those who came, by rank.

    Returns:
        What each rank is (:func:`this_process`), in rank order.

    Raises:
        CommTimeoutError: When ranks are missing after ``timeout`` seconds; names them.
        ValueError: On different backends.
    """
    rank, world = place.rank, place.world_size
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


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _address_towards(host: str) -> str:
    """This host's address on the route to another."""
    family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # Sends nothing: only the route is chosen.
        return str(probe.getsockname()[0])


def addresses_from(host: str) -> list[str]:
    """By which addresses another host may reach this one: that of the route, if there is one.

    Args:
        host: The other host's name or address. Where it is this very host, all of its addresses.
    """
    mine = _address_towards(host)
    if not _is_loopback(mine):
        return [mine]
    entries = [entry for found in psutil.net_if_addrs().values() for entry in found]
    found = [e.address for e in entries if e.family == socket.AF_INET]
    return [address for address in found if not _is_loopback(address)] or [mine]


def interface_to(host: str) -> str | None:
    """The network interface by which this host reaches another, e.g. ``'eth0'``.

    Args:
        host: Its name or address; that of this host itself will do.

    Returns:
        ``None`` where it is reached within the machine only, or can't be found out.
    """
    try:
        mine = _address_towards(host)
        if _is_loopback(mine):
            return None
        for name, addresses in psutil.net_if_addrs().items():
            if any(entry.address == mine for entry in addresses):
                return str(name)
    except OSError:
        pass
    return None


# Processes ###################################################################


def this_process() -> dict[str, Any]:
    """Returns what tells this process from every other: host, process id, time of start."""
    return {"host": _host(), "pid": os.getpid(), "start": _started(os.getpid())}


def is_dead(who: Mapping[str, Any]) -> bool:
    """Returns whether a process of this host is known to have ended (``False``: can't tell)."""
    if who["host"] != _host():
        return False
    if who["start"] is not None:
        return _started(int(who["pid"])) != who["start"]
    try:
        os.kill(int(who["pid"]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def is_stopped(who: Mapping[str, Any]) -> bool | None:
    """Whether a process was stopped (SIGSTOP); ``None`` where this host can't tell."""
    if who["host"] != _host() or (found := look_at(int(who["pid"]))) is None:
        return None
    return found.state == "T"


def _started(pid: int) -> int | None:
    """Returns a process's start time in clock ticks, or ``None``: ended, a zombie, no /proc."""
    found = look_at(pid)
    return None if found is None else found.start


@functools.cache
def _host() -> str:
    """Names the host; containers that share its name differ by their process namespace."""
    try:
        space = os.readlink("/proc/self/ns/pid")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        space = boot = ""
    return f"{socket.gethostname()} {boot} {space}"


# Devices #####################################################################


def default_backend(place: Place) -> str:
    """Returns ``'nccl'`` where every worker of this host has a GPU of its own, else ``'gloo'``."""
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= place.local_world_size
    return "nccl" if enough and dist.is_nccl_available() else "gloo"
