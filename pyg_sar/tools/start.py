"""Workers as the command line starts, or finds, them: for ``train`` and ``predict``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from pyg_sar.comm.agreement import raised_everywhere
from pyg_sar.comm.devices import count_gpus
from pyg_sar.comm.environment import find_launcher, read_environment
from pyg_sar.comm.group import join
from pyg_sar.comm.host import Hosting
from pyg_sar.comm.launch import launch, run
from pyg_sar.errors import PartitionError
from pyg_sar.files import parse_bytes
from pyg_sar.partition.metadata import read_metadata
from pyg_sar.store.host_store import PINNED
from pyg_sar.wording import counted

T = TypeVar("T")


def on_workers(
    arguments: argparse.Namespace, work: Callable[[Any], T], config: Any
) -> tuple[T, bool]:
    """Runs ``work(config)`` on each worker; returns rank 0's result, and whether it speaks here."""
    options: dict[str, Any] = {"backend": arguments.backend, "timeout": arguments.timeout}
    hosting = hosting_of(arguments)
    if was_launched(arguments.workers):
        device = device_of_parts(hosting.get("memory"), hosting.get("store"))
        place, known, problem = read_environment(), 0, None
        try:
            known = read_metadata(config.parts).num_parts
        except PartitionError as error:  # All workers raise it, once they are joined.
            problem = error
        hosts = bool(hosting) or (place is not None and known > place.world_size)
        with join(arguments.backend, arguments.timeout, device, hosts) as comm:
            with raised_everywhere(comm, PartitionError, "", PartitionError):
                if problem is not None:
                    raise problem
            # Loading tells different partitions apart, on all workers.
            num_parts = max(comm.all_gather_object(known))
            if hosting or comm.world_size < num_parts:
                result = run(work, config, parts=num_parts, **options, **hosting)[0]
            else:
                result = work(config)
            return result, comm.rank == 0
    num_parts = read_metadata(config.parts).num_parts
    workers = default_workers(num_parts, arguments.store)
    workers = workers if arguments.workers is None else arguments.workers
    if not 1 <= workers <= num_parts:
        raise PartitionError(
            f"--workers {workers}: the folder {config.parts!r} has {counted(num_parts, 'parts')}, "
            f"of which each worker takes one or more; start 1 to {counted(num_parts, 'workers')}, "
            f"or partition the graph into {counted(max(workers, 1), 'parts')}"
        )
    if hosting or workers < num_parts:
        hosting["parts"] = num_parts
    return launch(work, workers, config, **options, **hosting)[0], True


def device_of_parts(memory: int | None, store: str | None) -> str | None:
    """Returns where workers compute by where their parts wait, if that decides it."""
    hosting = Hosting.of(1, memory, store)
    return None if hosting is None else hosting.device


def default_workers(parts: int, store: str | None) -> int:
    """Returns how many workers are started for parts: one for each, or for each GPU."""
    gpus = count_gpus() if store == PINNED else 0
    return min(parts, gpus) if gpus else parts


def was_launched(workers: int | None) -> bool:
    """Returns whether a launcher (torchrun, ``srun``, ``mpirun``) has started this worker."""
    launcher = find_launcher()
    if launcher is not None and workers is not None:
        raise ValueError(
            f"--workers starts workers, but {launcher.title} ({launcher.rank}, {launcher.world}) "
            "has started them: leave it out"
        )
    return launcher is not None


def tell_agent(error: BaseException) -> None:
    """Leaves an error, and its traceback, where torchrun's agent looks for the cause."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        get_error_handler().record_exception(error)


def hosting_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns where parts that wait are kept, as far as it was said."""
    options: dict[str, Any] = {}
    if arguments.memory is not None:
        options["memory"] = parse_bytes(arguments.memory, "--memory")
    if arguments.store is not None:
        if arguments.store != PINNED and not Path(arguments.store).is_dir():
            raise ValueError(f"--store {arguments.store}: there is no such folder")
        options["store"] = arguments.store
    return options
