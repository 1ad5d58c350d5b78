"""Who the workers are: torchrun's environment, the shared store, and the roll call in it."""

from __future__ import annotations

import functools
import ipaddress
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

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
        _read_int(env, "MASTER_PORT", 0, 1 << 16)
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


def connect(place: Place, timeout: float) -> dist.Store:
    """Connects to the workers' store; rank 0 hosts it where no launcher does.

    Raises:
        CommTimeoutError: When it isn't reached, or not all workers came, within ``timeout`` s.
    """
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    limit = timedelta(seconds=timeout)
    try:
        store: dist.Store = next(dist.rendezvous("env://", timeout=limit))[0]
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise ValueError(
                f"MASTER_PORT: {where} is taken by another program; choose another port"
            ) from error
        raise CommTimeoutError(
            f"Rank {place.rank} did not meet the {place.world_size} workers at {where} within "
            f"{timeout:g} s ({_first_line(error)}). Is every worker started, with the same "
            f"MASTER_ADDR and MASTER_PORT, and reachable?"
        ) from error
    return _of_this_attempt(store)


def _of_this_attempt(store: dist.Store) -> dist.Store:
    """torchrun starts all workers anew after a failure, with the same store."""
    return dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def reconnect(timeout: float) -> dist.Store:
    """Returns another connection to the store that :func:`connect` met at, once that was done."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=timeout),
    )
    return _of_this_attempt(store)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]


def call_the_roll(
    store: dist.Store, place: Place, backend: str, timeout: float
) -> list[dict[str, Any]]:
    """Waits until every rank came, once, and wants the same.

    Returns:
        What each rank is (:func:`this_process`), in rank order.

    Raises:
        CommTimeoutError: When ranks are missing after ``timeout`` seconds; names them.
        ValueError: On a rank that two processes claim, or different backends.
    """
    rank, world = place.rank, place.world_size
    if store.add(f"claim/{rank}", 1) > 1:
        raise ValueError(f"RANK={rank} is taken by another process; every worker needs its own")
    mine = {**this_process(), "backend": backend, "world_size": world}
    store.set(f"who/{rank}", json.dumps(mine))
    keys = [f"who/{other}" for other in range(world)]
    end = time.monotonic() + timeout
    while not store.check(keys):
        if time.monotonic() > end:
            missing = [r for r, key in enumerate(keys) if not store.check([key])]
            raise CommTimeoutError(
                f"Rank {rank} waited {timeout:g} s for rank(s) {missing} of {world} to start"
            )
        time.sleep(0.01)
    everyone = [json.loads(store.get(key)) for key in keys]
    for other, who in enumerate(everyone):
        if who["backend"] != backend:
            raise ValueError(
                f"backend: rank {rank} wants {backend!r}, rank {other} {who['backend']!r}; "
                f"pass the same backend= to init() on every rank"
            )
    return everyone


def interface_to(host: str) -> str | None:
    """The network interface by which this host reaches another, e.g. ``'eth0'``.

    Args:
        host: Its name or address; that of this host itself will do.

    Returns:
        ``None`` where it is reached within the machine only, or can't be found out.
    """
    try:
        family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # Sends nothing: only the route is chosen.
            mine = str(probe.getsockname()[0])
        if ipaddress.ip_address(mine.partition("%")[0]).is_loopback:
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


def _started(pid: int) -> int | None:
    """Returns a process's start time in clock ticks, or ``None``: ended, a zombie, no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in parentheses, may hold anything; fields are counted from behind it.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


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
