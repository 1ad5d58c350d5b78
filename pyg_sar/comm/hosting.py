"""Several parts of a graph in one worker process: each is a rank, they compute in turn.

[Note: parts and workers] A graph is cut once into P parts; W processes host them, a run of parts
each. Every part is a rank of its own: a thread with its own call stack, model and communicator,
whose world has P ranks. Where a part waits for others, the next one computes (see turns). So a
model's layers are gone through part by part, without its knowing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from pyg_sar.comm.communicator import Communicator
from pyg_sar.comm.group import adopt, current
from pyg_sar.comm.host import Host, Hosting
from pyg_sar.comm.messages import failed, is_consequence
from pyg_sar.comm.part_communicator import TRANSPORT, PartCommunicator, module_in_import
from pyg_sar.errors import PygSarError
from pyg_sar.files import check_whole
from pyg_sar.wording import counted

T = TypeVar("T")

M_ARENA_MAX, M_MMAP_THRESHOLD = -8, -3  # of glibc's malloc.h


def check_parts(parts: int, num_workers: int, backend: str | None) -> None:
    """Raises ``ValueError`` where workers can't host parts."""
    check_whole("parts", parts)
    if backend == TRANSPORT:
        raise ValueError(
            f"parts={parts} are asked for within a part, which hosts none; call "
            "pyg_sar.run(parts=) once, around all that the parts do"
        )
    if num_workers > parts:
        raise ValueError(
            f"parts={parts} can be hosted by 1 to {counted(parts, 'workers')} (got {num_workers}); "
            "start fewer workers, or partition the graph into more parts"
        )
    if backend not in (None, "gloo", "local"):
        gpus = ": call pyg_sar.init('gloo', device='cuda') before" if backend == "nccl" else ""
        raise ValueError(f"parts={parts} needs backend='gloo' (got {backend!r}){gpus}")


# The parts of a process ######################################################


class PartError(Exception):
    """A part of this process failed; with replicas it is ``None``, as errors name workers."""

    def __init__(self, part: int | None, error: BaseException) -> None:
        super().__init__(f"part {part}")
        self.part, self.error = part, error


def _share_heap() -> None:
    """Has glibc keep one heap for the threads of all parts, which compute one at a time anyway.

    With a heap each, memory that one part has freed would be of no use to the others.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)  # as launch() has it


def _keep_apart(processors: set[int]) -> None:
    """Lets a part's thread compute on one processor, and its OpenMP threads on the others.

    Each part's thread has OpenMP threads of its own, which sleep between two operators. Linux may
    wake them on the processor of the part's thread: then one waits for the other
    (``benchmarks/larger_than_memory.py``, GAT). Does nothing where the threads are not as many as
    the processors of this process. By its number a process takes another one than its neighbours.
    """
    if len(processors) < 2 or torch.get_num_threads() != len(processors):
        return
    own = {sorted(processors)[os.getpid() % len(processors)]}
    with contextlib.suppress(OSError):  # Where the system forbids it.
        os.sched_setaffinity(0, processors - own)  # OpenMP's threads have it from who starts them.
        torch.ones(1 << 17).add_(1)
        os.sched_setaffinity(0, own)
        _widen_children()


@functools.cache
def _widen_children() -> None:
    """Gives processes that parts fork, such as those that load data, all processors again."""

    def widen() -> None:
        if isinstance(current(), PartCommunicator):
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))

    os.register_at_fork(after_in_child=widen)


class _NotOfParts:
    """Stands for the default group of ``torch.distributed``, whose ranks are workers, not parts.

    Who asks for rank and size alone, as PyTorch's ``DataLoader`` does, gets the part's. Where
    PyTorch describes an error of it, it prints this object in place of the error.
    """

    def __init__(self, parts: int, workers: int) -> None:
        self._text = (
            f"torch.distributed's default group is that of the {counted(workers, 'workers')}, not "
            f"of the {counted(parts, 'parts')} that this program runs for. Call "
            "rank, world_size, all_reduce(), all_gather() or broadcast() of pyg_sar.comm.current()"
        )

    def rank(self) -> int:
        return current().rank

    def size(self) -> int:
        return current().world_size

    def __repr__(self) -> str:
        return self._text

    def __getattr__(self, name: str) -> Any:
        raise PygSarError(self._text)


@contextlib.contextmanager
def _without_default_group(parts: int, workers: int) -> Iterator[None]:
    """Refuses calls of ``torch.distributed`` without a group that would add up workers' values.

    This package's own calls name their group.
    """
    if not dist.is_available() or not dist.is_initialized():
        yield
        return
    group = dist.group.WORLD
    dist.group.WORLD = cast(Any, _NotOfParts(parts, workers))
    try:
        yield
    finally:
        dist.group.WORLD = group


def host_parts(
    fn: Callable[..., T], args: Sequence[Any], hosting: Hosting, outer: Communicator
) -> list[T]:
    """Runs ``fn(*args)`` for each part that this worker hosts, and returns their results in order.

    Raises:
        PartError: A part failed.
        RuntimeError: This is called while a module is imported.
    """
    # What PyG generates for a layer imports its module, and would wait in a part's thread.
    if name := module_in_import():
        raise RuntimeError(
            f"parts were started while the module {name!r} is imported: they would wait for each "
            "other, as layers import it, too. Call what starts parts (run(parts=), verify()) in a "
            "function, or under 'if __name__ == \"__main__\":'"
        )
    _share_heap()
    host = Host(hosting, outer)
    on_cpu = outer.device.type == "cpu" and hasattr(os, "sched_setaffinity")  # Linux
    processors = os.sched_getaffinity(0) if on_cpu else set()
    results: dict[int, T] = {}
    failures: list[tuple[bool, int, BaseException]] = []

    def run(part: int) -> None:
        comm = PartCommunicator(host, part)
        adopt(comm)
        if outer.device.type == "cuda":
            torch.cuda.set_device(outer.device)  # Of this thread.
            # A GPU's backward passes share a thread otherwise: one that waits would hold up all.
            torch.autograd.set_multithreading_enabled(False)
        try:
            host.turns.begin(part)
            if processors:
                _keep_apart(processors)
            with host.saving():
                results[part] = fn(*args)
        except BaseException as caught:  # SystemExit included: the caller must learn of it.
            error: BaseException = caught
            if host.store is not None and isinstance(caught, RuntimeError):
                error = host.store.explained(caught)
            comm.report(error)
            failures.append((is_consequence(error, host.speaker(part)), part, error))
            del error  # Its traceback has this frame: all the part's tensors would live on.
        finally:
            comm.close()
            host.leave(part)

    threads = [
        threading.Thread(target=run, args=(part,), name=f"pyg_sar part {part}", daemon=True)
        for part in host.parts
    ]
    try:
        with _without_default_group(hosting.parts, outer.world_size):
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
    except BaseException as error:  # KeyboardInterrupt: the parts must not run on.
        host.turns.fail(failed(-1, error))
        raise
    # What only cycles, or the other parts' errors, keep alive is freed: closing brings in the rest.
    _, part, cause = min(failures, key=lambda found: found[:2], default=(False, -1, None))
    failures.clear()
    gc.collect()
    if cause is not None:
        if host.store is not None:
            host.store.close()
        cause.add_note(f"in part {part}")
        raise PartError(part if outer.across is None else None, cause) from cause
    host.close()
    return [results[part] for part in host.parts]
