"""Who this worker is, as its launcher says it: torchrun, ``srun``, ``mpirun``, or a process group.

[Note: launchers in launchers] Launchers start each other: ``srun`` starts ``torchrun``, or the
daemons of ``mpirun``, and the workers have the variables of both. The innermost one counts:
torchrun, else MPI, else SLURM. Where two say the same, the outer one tells what the inner one does
not (the hosts). ``RANK`` and ``WORLD_SIZE`` that a batch script has set must agree with them.
"""

from __future__ import annotations

import contextlib
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NoReturn

import torch.distributed as dist

from pyg_sar.comm.processes import stopped_processes
from pyg_sar.wording import counted

REMEDY = (
    "Start the workers with torchrun or pyg_sar.launch(), or set RANK, WORLD_SIZE, MASTER_ADDR "
    "and MASTER_PORT for each"
)
HOST = "127.0.0.1"
PORT = 29500  # torchrun's.
PORTS = 10_000, 20_000
"""The first port that a job may be given, and how many; below those that systems give away."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """A worker's rank, those of its host, and where the workers meet.

    Attributes:
        local_rank: Its number on its host (``None``: not said).
        local_world_size: Number of workers on its host.
        agent_store: The store lives outside the workers (with torchrun, or ``launch``).
        address, port: Of the workers' store.
        parts: Number of workers of a replica; ``None``: there is one replica.
    """

    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int
    agent_store: bool
    address: str = HOST
    port: int = PORT
    parts: int | None = None


class Launcher(Enum):
    """The launchers, the innermost first, and the names of their variables (empty: it has none)."""

    TORCHRUN = "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    OPEN_MPI = (
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )
    MPICH = "mpiexec (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
    SRUN = "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""

    def __init__(
        self, title: str, rank: str, world: str, local_rank: str, local_world: str
    ) -> None:
        self.title, self.rank, self.world = title, rank, world
        self.local_rank, self.local_world = local_rank, local_world


TASKS = Launcher.OPEN_MPI, Launcher.MPICH, Launcher.SRUN


def find_launcher(env: Mapping[str, str] | None = None) -> Launcher | None:
    """Returns what started this process as a worker, by its variables; ``None``: nothing did."""
    env = os.environ if env is None else env
    if env.get("RANK") or env.get("WORLD_SIZE"):
        return Launcher.TORCHRUN
    inner = next((one for one in TASKS if _started(one, env)), None)
    return None if inner is None or env.get(inner.world) == "1" else inner


def has_starter(env: Mapping[str, str] | None = None) -> bool:
    """Returns whether a launcher is this worker's parent, without which the run is over."""
    env = os.environ if env is None else env
    launcher = find_launcher(env)
    by_hand = launcher is Launcher.TORCHRUN and "TORCHELASTIC_RUN_ID" not in env
    return launcher is not None and not by_hand


def find_stopped(mine: WorkerInfo) -> dict[int, dict[str, Any]]:
    """Returns this host's stopped processes that are workers of this run, by rank."""
    found = {}
    for who, env in stopped_processes():
        with contextlib.suppress(ValueError):  # Somebody else's.
            info = read_environment(env)
            run = info is not None and (info.world_size, info.address, info.port)
            if info is not None and run == (mine.world_size, mine.address, mine.port):
                found[info.rank] = who
    return found


def read_environment(env: Mapping[str, str] | None = None) -> WorkerInfo | None:
    """Reads the launcher's variables, of this process by default. See [Note: launchers in
    launchers].

    ``None`` where there are none, and where a launcher started one process: no workers then.

    Raises:
        ValueError: When they are incomplete, contradict each other or make no sense; names the
            variable.
    """
    env = os.environ if env is None else env
    task = _task(env)
    if not env.get("RANK") and not env.get("WORLD_SIZE"):
        return None if task is None or task.world_size == 1 else task
    info = _read(Launcher.TORCHRUN, env)
    if info.world_size > 1:
        if not env.get("MASTER_ADDR"):
            raise ValueError(f"MASTER_ADDR is not set, but WORLD_SIZE={info.world_size}. {REMEDY}")
        port = _read_int(env, "MASTER_PORT", 1, 1 << 16)
        info = replace(info, address=env["MASTER_ADDR"], port=port)
    by_hand = not info.agent_store and "TORCHELASTIC_RUN_ID" not in env
    if by_hand and task is not None and task.world_size > 1 and _differ(info, task):
        other = next(one for one in TASKS if _started(one, env))
        _refuse_two(Launcher.TORCHRUN, other, env)
    return info


def adopted() -> WorkerInfo | None:
    """Returns this worker's place in the process group that the script, or Ray, has set up.

    ``None`` where :mod:`torch.distributed` has no process group, or one of a single worker.

    Raises:
        ValueError: ``RANK`` or ``WORLD_SIZE`` is another one, or its store is not a TCP store.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    env = os.environ
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, value in (("RANK", rank), ("WORLD_SIZE", world)):
        if env.get(name, str(value)) != str(value):
            raise ValueError(
                f"{name}={env[name]}, but torch.distributed's process group says {value}; "
                f"unset {name}, or call pyg_sar.init() before init_process_group()"
            )
    if world == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        raise ValueError(
            f"torch.distributed's process group has a {type(store).__name__}, in which workers "
            "can't watch each other; set it up with init_method='env://' or 'tcp://HOST:PORT', or "
            "call pyg_sar.init() first"
        )
    given: dict[str, str] = {"RANK": str(rank), "WORLD_SIZE": str(world)}
    local = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    given |= {name: env[name] for name in local if env.get(name)}
    info = _read(Launcher.TORCHRUN, given)
    return replace(info, agent_store=True, address=store.host, port=store.port)


# One launcher's variables #####################################################


def _started(launcher: Launcher, env: Mapping[str, str]) -> bool:
    """Returns whether a launcher has started this very process.

    A batch script has ``SLURM_PROCID`` too; only ``srun`` starts steps.
    """
    if launcher is Launcher.SRUN:
        return bool(env.get("SLURM_PROCID") and env.get("SLURM_STEP_NUM_TASKS"))
    return bool(env.get(launcher.rank) or env.get(launcher.world))


def _task(env: Mapping[str, str]) -> WorkerInfo | None:
    """Returns what MPI or SLURM says; the innermost of them."""
    found = [(one, _read(one, env)) for one in TASKS if _started(one, env)]
    if not found:
        return None
    (launcher, info), outer = found[0], None
    for other, said in found[1:]:
        if not _differ(info, said):
            outer = said
            if info.local_rank is None:
                info = replace(
                    info, local_rank=said.local_rank, local_world_size=said.local_world_size
                )
        elif launcher is Launcher.OPEN_MPI and other is Launcher.MPICH:
            _refuse_two(launcher, other, env)
    if info.world_size == 1:
        return info
    of_slurm = launcher is Launcher.SRUN or outer is not None
    address = env.get("MASTER_ADDR") or _first_host(launcher, info, env, of_slurm)
    port = _job_port(env)
    if env.get("MASTER_PORT"):
        port = _read_int(env, "MASTER_PORT", 1, 1 << 16)
    return replace(info, address=address, port=port)


def _read(launcher: Launcher, env: Mapping[str, str]) -> WorkerInfo:
    world = _read_int(env, launcher.world, 1, None)
    rank = _read_int(env, launcher.rank, 0, world)
    local_world, local_rank = world, None
    if launcher is Launcher.SRUN:
        local_world = _tasks_of_node(env) or world
    elif env.get(launcher.local_world):
        local_world = _read_int(env, launcher.local_world, 1, world + 1)
    if env.get(launcher.local_rank):
        local_rank = _read_int(env, launcher.local_rank, 0, local_world)
    return WorkerInfo(
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        local_world_size=local_world,
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and launcher is Launcher.TORCHRUN,
    )


def _differ(one: WorkerInfo, other: WorkerInfo) -> bool:
    return (one.rank, one.world_size) != (other.rank, other.world_size)


def _refuse_two(one: Launcher, other: Launcher, env: Mapping[str, str]) -> NoReturn:
    def said(by: Launcher) -> str:
        return f"{by.rank}={env.get(by.rank)}, {by.world}={env.get(by.world)}"

    raise ValueError(
        f"{said(one)}, but {other.title} says {said(other)}: which one is this worker's? Unset "
        f"{one.rank} and {one.world}, or {other.rank} and {other.world}"
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


# Where they meet ##############################################################


def _first_host(
    launcher: Launcher, info: WorkerInfo, env: Mapping[str, str], of_slurm: bool
) -> str:
    """Returns the host of the first worker."""
    nodes = env.get("SLURM_STEP_NODELIST") if of_slurm else None
    nodes = nodes or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    told = launcher is Launcher.SRUN or bool(env.get(launcher.local_world))
    if told and info.local_world_size == info.world_size:
        return HOST
    if nodes:
        return first_node(nodes)
    raise ValueError(
        f"MASTER_ADDR is not set, and {launcher.title} doesn't name the hosts of its "
        f"{counted(info.world_size, 'workers')}; give all of them the first worker's host and a "
        "free port there: MASTER_ADDR=HOST0 MASTER_PORT=29500 (mpirun -x MASTER_ADDR -x "
        "MASTER_PORT)"
    )


def first_node(nodes: str) -> str:
    """Returns the first host of SLURM's list: ``'gpu[003-007,9],cpu1'`` begins with
    ``'gpu003'``.
    """
    found = re.match(r"(?:[\w.-]|\[[\w,-]+\])+", nodes)
    if found is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes!r} is not a list of hosts")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", found[0])


def _tasks_of_node(env: Mapping[str, str]) -> int | None:
    """Returns how many tasks SLURM started on this host: entry ``SLURM_NODEID`` of ``2(x3),1``."""
    counts: list[int] = []
    for entry in filter(None, env.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        if found is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE: {entry!r} is not a number of tasks")
        counts += [int(found[1])] * int(found[2] or 1)
    if len(counts) == 1:
        return counts[0]
    return counts[_read_int(env, "SLURM_NODEID", 0, len(counts))] if counts else None


def _job_port(env: Mapping[str, str]) -> int:
    """Returns a port that all workers of a job agree on; jobs at one time rarely have the same."""
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID")
    job = next((env[name] for name in names if env.get(name)), None)
    if job is None:
        return PORT
    text = f"{job}.{env.get('SLURM_STEP_ID', '')}"
    return PORTS[0] + zlib.crc32(text.encode()) % PORTS[1]
