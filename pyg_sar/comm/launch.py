"""Workers started from a script or a notebook: ``launch(fn, num_workers)``.

Workers are fresh Python processes, not forks and not ``multiprocessing``'s: each gets its
environment before it starts (glibc and OpenMP read theirs once), the script that calls ``launch``
isn't run again, and functions defined in it, or in a notebook's cell, travel by value.
"""

from __future__ import annotations

import bdb
import contextlib
import gc
import importlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import CodeType, FunctionType, GenericAlias, ModuleType, UnionType
from typing import Any, TypeVar

import cloudpickle
import torch

from pyg_sar.comm.group import check_init, check_replicas, current, finalize, is_open, join
from pyg_sar.comm.host import Hosting
from pyg_sar.comm.hosting import PartError, check_parts, host_parts
from pyg_sar.comm.messages import RESUME, is_consequence, place_in
from pyg_sar.comm.processes import find_process
from pyg_sar.comm.store import host_store
from pyg_sar.comm.turns import ProcessState
from pyg_sar.comm.watch import HALTED, read_limits
from pyg_sar.errors import LostWorkerError, WorkerError
from pyg_sar.files import check_folder, check_whole
from pyg_sar.store.host_store import PINNED

T = TypeVar("T")

POLL = 0.25  # Seconds between two checks of the workers' processes.
CASCADE = 5.0  # Seconds to wait for the cause when the first error names another rank.
SETTLE = 0.3  # Seconds to wait for a killed worker behind an error that names nobody.
GOODBYE = 60.0  # Seconds a worker may take to end once it has delivered its result.
FAREWELL = 1.0  # Seconds between SIGTERM and SIGKILL.
STARTING = "PYG_SAR_WORKER_STARTS"  # In the environment of a worker that imports its function.


def launch(
    fn: Callable[..., T],
    num_workers: int,
    *args: Any,
    parts: int | None = None,
    replicas: int | None = None,
    memory: int | str | None = None,
    store: str | os.PathLike[str] | None = None,
    backend: str | None = None,
    threads_per_worker: int | None = None,
    timeout: float = 1800.0,
    env: Mapping[str, str] | None = None,
) -> list[T]:
    """Runs ``fn(*args)`` on workers of this machine, and returns their results in rank order.

    .. code-block:: python

        def train(root):  # runs in each worker
            data = pyg_sar.load_partition(root)
            model = pyg_sar.distribute(make_model())
            ...
            return float(loss)

        losses = pyg_sar.launch(train, 4, "parts")  # of a folder with 4 parts
        losses = pyg_sar.launch(train, 1, "parts", parts=4, memory="2GiB", store="/scratch")

    Each worker is a new process, in which :func:`pyg_sar.init` was called;
    ``pyg_sar.comm.current()`` is its communicator. PyTorch's default dtype and the states of the
    random generators (PyTorch's on the CPU, NumPy's, Python's) are those of the calling process.
    Functions and arguments may come from a notebook or a script's ``__main__``, closures and
    lambdas included. Such a function travels by value, with only the names that its code mentions:
    ``globals()["name"]`` finds nothing in it.

    With ``parts``, each worker computes several parts of the graph in turn: ``fn`` runs once for
    each part, on a copy of its arguments, and its rank is the part (:func:`pyg_sar.run`).

    Args:
        fn: What each worker runs.
        num_workers: Number of workers.
        *args: Its arguments.
        parts: Parts of the graph, at least ``num_workers``. By default one for each worker.
        replicas: As for :func:`pyg_sar.init`: ``num_workers`` is a multiple of it.
        memory: By how many bytes each worker process may grow after its start, a number or a text
            like ``'2GiB'``. To stay below, tensors of parts that wait are moved to the store. By
            default no limit, or with ``store`` four fifths of the host's free memory, divided by
            its workers.
        store: A directory where parts wait: in files without names, so that nothing is left of
            them; or ``'pinned'``, where a GPU computes: in pinned host memory. By default all parts
            stay in memory.
        backend: As for :func:`pyg_sar.init`.
        threads_per_worker: Threads that each worker computes with. By default
            ``OMP_NUM_THREADS`` where it is set, else this machine's cores divided by the workers.
        timeout: Seconds that one operation between workers may take.
        env: Further environment variables of the workers.

    Returns:
        One result per rank, in their order. Tensors of the whole graph are gathered on every
        worker, and come as plain ones.

    Raises:
        TypeError: When ``fn`` is no function, or can't be sent to another process.
        ValueError: When another argument makes no sense.
        WorkerError: When a worker raised: the first one, with its rank and traceback. All others
            are ended before.
        LostWorkerError: When a worker was killed or crashed; names the rank and the signal.
        RuntimeError: When a worker calls this while it imports the module of its function.
    """
    if STARTING in os.environ:
        raise RuntimeError(
            "launch() was called while a worker imports the module that holds its function: each "
            "worker would start workers. Call what starts workers (launch(), infer(), verify()) "
            "in a function, or under 'if __name__ == \"__main__\":'"
        )
    _check(fn, num_workers, threads_per_worker, env)
    check_init(backend, timeout, replicas)
    check_replicas(replicas or 1, num_workers, who=" of launch()")
    hosting = Hosting.of(parts, memory, store)
    if store != PINNED:
        check_folder("store", store)
    if hosting is not None:
        check_parts(hosting.parts, num_workers // (replicas or 1), backend)
    task = _pack((fn, args), "fn or an argument", -1)
    state = ProcessState(torch.device("cpu"))
    work = _pack((task, backend, timeout, hosting, replicas, state), "the task", -1)
    meeting_place = host_store("127.0.0.1", 0)
    common = _environment(num_workers, meeting_place.port, threads_per_worker, env)
    if hosting is not None:  # MKL would keep a megabyte and more for each thread, so of each part.
        common.setdefault("MKL_DISABLE_FAST_MM", "1")
    workers: list[_Worker] = []
    try:
        for rank in range(num_workers):
            workers.append(_Worker.start(rank, common))
            workers[-1].place = place_in(rank, num_workers // replicas if replicas else None)
        for worker in workers:  # Beside each other: one that was stopped keeps nobody waiting.
            threading.Thread(target=worker.give, args=(work,), daemon=True).start()
        results = _collect(workers)
        for worker in workers:
            worker.wait(GOODBYE)
        if hosting is None:
            return results
        return [cloudpickle.loads(packed) for hosted in results for packed in hosted]
    finally:
        _end(workers)
        del meeting_place  # A traceback that somebody keeps would keep the store's sockets.


def run(
    fn: Callable[..., T],
    *args: Any,
    parts: int | None = None,
    memory: int | str | None = None,
    store: str | os.PathLike[str] | None = None,
    backend: str | None = None,
    timeout: float = 1800.0,
) -> list[T]:
    """Runs ``fn(*args)`` for each part that this process hosts, under torchrun or alone.

    .. code-block:: python

        results = pyg_sar.run(train, "parts", parts=4)  # alone: 4 parts in this process
        # under ``torchrun --nproc-per-node 2``: 2 parts in each of the 2 processes

    A graph that was cut into P parts runs on any number W of worker processes from 1 to P. Each
    process hosts P / W of them in turn: ``fn`` runs once for each part, in a thread of its own, and
    sees what a worker sees; its rank is the part. Where a part waits for the others, the next one
    goes on. Each part has the random states of a process of its own. Results, random numbers
    included, are the same in every bit for every W, if all compute with as many threads.

    Args:
        fn: What each part runs.
        *args: Its arguments; all parts of a process get the same objects. A model, an optimizer, a
            ``torch.Generator`` must be made, or copied, within ``fn``: each part needs its own.
        parts: Parts of the graph. By default one for each worker.
        memory, store: As for :func:`pyg_sar.launch`.
        backend: As for :func:`pyg_sar.init`; several parts need ``'gloo'`` between processes.
        timeout: Seconds that one operation between workers may take.

    Returns:
        The results of the parts of this process, in their order. A tensor of the whole graph is of
        no use here, after the parts have ended: return ``x.full_tensor()`` instead.

    Raises:
        ValueError: More workers than parts, or another backend.
        RuntimeError: With ``parts``, while a module is imported.
    """
    _check_function(fn)
    hosting = Hosting.of(parts, memory, store)
    device = None if hosting is None or is_open() else hosting.device
    comm = join(backend, timeout, device, hosting is not None)
    if hosting is None:
        return [fn(*args)]
    check_parts(hosting.parts, comm.world_size, comm.backend)
    try:
        return host_parts(fn, args, hosting, comm)
    except PartError as failure:
        error = failure.error
        comm.report(error, failure.part)
    raise error  # Not while the failure is handled: it would be its own context.


def _check(fn: Any, num_workers: Any, threads_per_worker: Any, env: Any) -> None:
    _check_function(fn)
    check_whole("num_workers", num_workers)
    check_whole("threads_per_worker", threads_per_worker, optional=True)
    if env is not None and not (
        isinstance(env, Mapping)
        and all(isinstance(text, str) for row in env.items() for text in row)
    ):
        raise TypeError(f"env={env!r} must be a mapping of texts to texts, {{'NAME': 'value'}}")


def _check_function(fn: Any) -> None:
    if not callable(fn):
        raise TypeError(f"fn={fn!r} must be a function, which each worker calls with the arguments")


class _Pickler(cloudpickle.Pickler):
    """Sends torch's namespaces ``torch.ops`` and ``torch.classes`` by name.

    cloudpickle ships each submodule that a function's attribute names match ("classes", say), and
    these two look like modules without being picklable as such. Since version 3.1.3 it leaves out
    the file that a function stands in, which a traceback needs to show the lines.
    """

    def reducer_override(self, obj: Any) -> Any:
        if obj is torch.ops or obj is torch.classes:
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, CodeType):
            make, given = self.dispatch_table[CodeType](obj)
            return make, tuple(obj.co_filename if a == "<dynamic-code>" else a for a in given)
        if isinstance(obj, FunctionType | type):
            _send_generated_by_value(str(getattr(obj, "__module__", "")))
        made = super().reducer_override(obj)
        if isinstance(obj, type) and obj.__module__ == "__main__" and isinstance(made, tuple):
            make, arguments, state, _, _, set_state = made
            named = _named_in_annotations(obj)
            return make, arguments, (set_state, state, named), None, None, _set_named
        return made


def _named_in_annotations(cls: type) -> dict[str, Any]:
    """Returns what the annotations of a class of ``__main__`` name there, where they are texts.

    Annotations are texts under ``from __future__ import annotations``, and in quotes. PyG evaluates
    those of a layer by the names of its module, and the ``__main__`` of a worker is another one.
    """
    texts = " ".join(
        text
        for method in vars(cls).values()
        for text in getattr(method, "__annotations__", {}).values()
        if isinstance(text, str)
    )
    named = set(re.findall(r"[^\W\d]\w*", texts))
    return {
        name: value
        for name, value in vars(sys.modules["__main__"]).items()
        if name in named and _stands_for_type(value)
    }


def _stands_for_type(value: Any) -> bool:
    kinds = type | GenericAlias | UnionType | ModuleType
    return isinstance(value, kinds) or type(value).__module__ == "typing"


def _set_named(cls: type, state: tuple[Callable[..., None], Any, dict[str, Any]]) -> None:
    """Gives a class its state, and ``__main__`` the names that the class's annotations need."""
    set_state, inner, named = state
    for name, value in named.items():
        vars(sys.modules["__main__"]).setdefault(name, value)
    set_state(cls, inner)


def _send_generated_by_value(name: str) -> None:
    """Lets cloudpickle send a function that PyG has generated for a module's class by value.

    PyG writes ``propagate`` and ``edge_updater`` of a layer's class, and ``forward`` of a
    ``Sequential``, to a temporary file when one is first built, and imports it under a name that no
    other process can import.
    """
    if name.endswith(("_propagate", "_edge_updater")) or "sequential_Sequential_" in name:
        module = sys.modules.get(name)
        file = os.path.basename(getattr(module, "__file__", None) or "")
        if module is not None and file.startswith(f"{name}_"):
            cloudpickle.register_pickle_by_value(module)


def _pack(value: Any, what: str, rank: int) -> bytes:
    try:
        buffer = io.BytesIO()
        _Pickler(buffer).dump(value)
        return buffer.getvalue()
    except Exception as error:  # Pickling runs code of the objects: anything may be raised.
        who = "launch()" if rank < 0 else f"rank {rank}"
        raise TypeError(
            f"{who}: {what} can't be sent between processes ({type(error).__name__}: {error}); "
            f"use tensors, numbers, strings, and containers and functions of these"
        ) from error


def _environment(
    num_workers: int, port: int, threads: int | None, env: Mapping[str, str] | None
) -> dict[str, str]:
    """Returns the environment that all workers share."""
    common = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    if threads is None and not common.get("OMP_NUM_THREADS"):
        affinity = getattr(os, "sched_getaffinity", None)  # of Linux
        cores = os.cpu_count() or 1 if affinity is None else len(affinity(0))
        threads = max(1, cores // num_workers)
    if threads is not None:
        common["OMP_NUM_THREADS"] = str(threads)
    # All workers go through a set of strings in one order.
    common.setdefault("PYTHONHASHSEED", "0")
    # Frees large buffers to the system at once; glibc reads this when a process starts.
    common.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    # Large buffers in pages of 2 MB where the system has them: a few faults each, not thousands.
    # A third of the time on one machine, nothing on another (benchmarks/pages.py).
    common.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if any(name == "lo" for _, name in socket.if_nameindex()):
        common.setdefault("GLOO_SOCKET_IFNAME", "lo")
    common |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_workers),
        "LOCAL_WORLD_SIZE": str(num_workers),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # The store is the parent's.
    }
    return common | dict(env or {})


# The parent's side ###########################################################


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    pipe: Connection
    failure: WorkerError | None = None
    consequence: bool = False
    place: str = ""
    finished: bool = False
    result: Any = None
    stopped: float | None = None
    """Since when it was seen to be stopped (SIGSTOP)."""

    @classmethod
    def start(cls, rank: int, common: Mapping[str, str]) -> _Worker:
        here, there = Pipe()
        paths = [os.path.abspath(path) for path in sys.path]
        command = (
            f"import gc, sys; gc.disable(); sys.path[:] = {paths!r}; "
            f"from pyg_sar.comm.launch import _worker_main; _worker_main({there.fileno()})"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", command],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            # Ctrl-C reaches the parent alone, which ends each worker with all that it started.
            start_new_session=True,
        )
        there.close()
        return cls(rank, process, here)

    def give(self, work: bytes) -> None:
        """Sends what to do (which waits until the worker reads, if it's large)."""
        with contextlib.suppress(OSError):  # It died at once: reading from it will tell.
            self.pipe.send_bytes(work)

    def read(self) -> None:
        """Takes the worker's message: its result, its error, or its death."""
        try:
            if not self.pipe.poll():
                raise EOFError
            kind, *rest = cloudpickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.failure = self._lost()
        except Exception as error:
            self.failure = WorkerError(
                f"Rank {self.rank} returned what can't be read here: {error!r}", rank=self.rank
            )
        else:
            if kind == "result":
                self.result = rest[0]
            else:
                self.failure, self.consequence = rest
        self.finished = True

    def look(self, limit: float) -> None:
        """Gives it up once it was stopped for ``limit`` seconds."""
        found = find_process(self.process.pid)
        if found is None or found.state != "T":
            self.stopped = None
            return
        self.stopped = self.stopped or time.monotonic()
        if time.monotonic() - self.stopped > limit:
            text = f"Rank {self.rank}{self.place} was lost: {HALTED}. {RESUME}"
            self.failure, self.finished = LostWorkerError(text, rank=self.rank), True

    def _lost(self) -> LostWorkerError:
        code = self.wait(5.0)
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name} (signal {-code})"
        else:
            how = f"ended with exit code {code} before it returned a result"
        who = f"Rank {self.rank}{self.place}"
        return LostWorkerError(f"{who} was lost: it {how}. {RESUME}", rank=self.rank)

    def wait(self, seconds: float) -> int | None:
        """Returns the exit code; ``None``: it still runs."""
        try:
            return self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return None


def _collect(workers: Sequence[_Worker]) -> list[Any]:
    """Returns the results, or raises the failure that came first."""
    deadline: float | None = None
    silent_after = read_limits()[0]
    while not all(worker.finished for worker in workers):
        by_pipe = {worker.pipe: worker for worker in workers if not worker.finished}
        limit = POLL if deadline is None else deadline - time.monotonic()
        ready = wait(list(by_pipe), max(0.0, min(limit, POLL)))
        for pipe, worker in by_pipe.items():
            # A dead worker's children may keep its pipe open.
            if pipe in ready or worker.process.poll() is not None:
                worker.read()
            elif len(workers) > 1:  # Nobody waits for a single one but the user who stopped it.
                worker.look(silent_after)
        failed = [worker for worker in workers if worker.failure is not None]
        if failed and deadline is None:
            known = any(not worker.consequence for worker in failed)
            deadline = time.monotonic() + (SETTLE if known else CASCADE)
        if any(isinstance(w.failure, LostWorkerError) and not w.consequence for w in failed):
            break
        if deadline is not None and time.monotonic() >= deadline:
            break
    # Causes first, and of these lost workers.
    order = [(w.consequence, not isinstance(w.failure, LostWorkerError), w) for w in workers]
    for _, _, worker in sorted(order, key=lambda entry: entry[:2]):
        if worker.failure is not None:
            raise worker.failure
    return [worker.result for worker in workers]


def _end(workers: Sequence[_Worker]) -> None:
    """Ends every process that still runs."""
    for signum, patience in ((signal.SIGTERM, FAREWELL), (signal.SIGKILL, 10.0)):
        running = [worker for worker in workers if worker.process.poll() is None]
        for worker in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signum)
        end = time.monotonic() + patience
        for worker in running:
            worker.wait(end - time.monotonic())
    for worker in workers:
        worker.pipe.close()


# The worker's side ###########################################################


def _worker_main(descriptor: int) -> None:
    """Runs a worker: reads the function from the pipe, and writes its result or error to it."""
    pipe = Connection(descriptor)
    os.set_inheritable(descriptor, False)
    rank = int(os.environ["RANK"])
    try:
        work = pipe.recv_bytes()
        threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
        os.environ[STARTING] = "1"
        task, backend, timeout, hosting, replicas, state = cloudpickle.loads(work)
        if hosting is None:
            fn, args = cloudpickle.loads(task)
        # What is imported by now stays: going through it time and again takes a second.
        gc.freeze()
        gc.enable()
        if hosting is not None:
            cloudpickle.loads(task)  # What modules set when they are imported is set for all parts.
        del os.environ[STARTING]
        state.restore(ProcessState(state.device))
        device = None if hosting is None else hosting.device
        comm = join(backend, timeout, device, hosting is not None, replicas)
        result = fn(*args) if hosting is None else host_parts(_packed, (task,), hosting, comm)
        message = _pack(("result", result), "the result", rank)
        finalize()
        pipe.send_bytes(message)
    except BaseException as caught:  # SystemExit and KeyboardInterrupt included: somebody waits.
        error, part = caught, None
        if isinstance(caught, PartError):
            error, part = caught.error, caught.part
            rank = rank if part is None else part
        if isinstance(error, bdb.BdbQuit):
            error = _no_terminal(error)
        comm = current()
        comm.report(error, part)
        pipe.send_bytes(_pack(("failure", *_describe(error, rank, comm.place)), "the error", rank))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # Closed: nothing to lose.
                stream.flush()
        # The ordinary end would wait for what hangs in the backend.
        os._exit(1)


def _no_terminal(error: BaseException) -> BaseException:
    """Returns the error for ``breakpoint()`` in a worker process, whose input is empty."""
    reason = RuntimeError(
        "breakpoint() has no terminal in a worker process of launch(). Debug with "
        "pyg_sar.run(fn, parts=P), whose parts take turns in the calling process; or attach a "
        f"debugger to the worker (its process id is {os.getpid()} in this run)"
    )
    return reason.with_traceback(error.__traceback__)


def _packed(task: bytes) -> bytes:
    """Runs a part's task on objects of its own: parts must not share a model.

    Its result is packed here, while the part can still gather tensors of the whole graph.
    """
    fn, args = cloudpickle.loads(task)
    return _pack(fn(*args), "the result", current().rank)


def _end_with_parent(pipe: Connection) -> None:
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


def _describe(error: BaseException, rank: int, place: str = "") -> tuple[WorkerError, bool]:
    """Returns the error for the parent, and whether it only follows from another rank's."""
    text = "".join(traceback.format_exception(error))
    consequence = is_consequence(error, rank)
    if isinstance(error, WorkerError) and consequence:
        return type(error)(str(error), rank=error.rank, traceback=text), True
    message = f"Rank {rank}{place} failed: {type(error).__name__}: {error}\n\n{text}"
    return WorkerError(message, rank=rank, traceback=text), consequence
