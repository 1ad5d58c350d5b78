"""``pyg-sar run script.py``: a PyG script as it is, on several workers.

Every worker runs all of the script. To the script the dataset's graph is the whole graph: its
tensors are node tensors (``pyg_sar.tensors``), of which each worker holds its rows, and its models
are distributed when they are first used. All workers draw the same random numbers, and only what
rank 0 prints and writes is seen (docs/whole-graph.md).
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from pyg_sar.comm.group import current, finalize, join
from pyg_sar.comm.launch import launch, run
from pyg_sar.comm.messages import is_consequence
from pyg_sar.errors import PygSarError, WorkerError
from pyg_sar.files import TemporaryFolder
from pyg_sar.nn.made_edges import made_edges
from pyg_sar.tools.graphs import settings_of
from pyg_sar.tools.models import default_dtype
from pyg_sar.tools.script_files import PrivateFiles
from pyg_sar.tools.script_graphs import Graphs, default_cache
from pyg_sar.tools.script_models import REMEDIES, Models
from pyg_sar.tools.script_patches import Process, Worker
from pyg_sar.tools.script_together import Together
from pyg_sar.tools.start import (
    default_workers,
    device_of_parts,
    hosting_of,
    tell_agent,
    was_launched,
)
from pyg_sar.usage import SCRIPT_WORKERS

EXIT_INTERRUPT = 130

_COURTESY = 2.0  # seconds
_HASHES = "PYTHONHASHSEED"  # The order of sets of texts must be the same on all workers.
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep + "script"
_HOST = {"MKL_DISABLE_FAST_MM": "1"}  # As launch() has it for several parts in a process.


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptConfig:
    """How a script is run: the options of ``pyg-sar run``.

    ``cache`` is by default in the user's cache. With ``float64`` that is the default dtype, and
    datasets give it for float32. Workers leave the tracebacks of their failures in ``folder``, if
    the parent shows them.
    """

    script: str
    arguments: Sequence[str] = ()
    parts: int | None = None
    memory: int | None = None
    store: str | None = None
    cache: str | None = None
    node_ids: Mapping[str, bool] | None = None
    levels: Mapping[str, str] | None = None
    backend: str | None = None
    timeout: float = 1800.0
    float64: bool = False
    folder: str = ""


# Starting ####################################################################


def run_script(config: ScriptConfig, workers: int) -> int:
    """Runs a script on so many workers of this machine, and returns its exit code."""
    env = {_HASHES: os.environ.get(_HASHES, "0")}
    if hosts_parts(config):
        env |= {name: os.environ.get(name, value) for name, value in _HOST.items()}
    options: dict[str, Any] = {"backend": config.backend, "timeout": config.timeout, "env": env}
    start = work
    if hosts_parts(config):
        start, options["backend"] = work_as_host, config.backend or "gloo"
    with TemporaryFolder("pyg_sar-run-") as folder:
        try:
            codes = launch(start, workers, replace(config, folder=str(folder)), **options)
        except KeyboardInterrupt:
            _show(folder / "interrupt", "Traceback (most recent call last):\n")
            sys.stderr.write("KeyboardInterrupt\n")
            sys.stderr.write("pyg-sar run: interrupted; what the script has saved is kept\n")
            return EXIT_INTERRUPT
        except WorkerError as error:
            if not _show(folder / f"failure-{error.rank}"):
                raise
            return 1
    return codes[0]


def run_script_under_torchrun(config: ScriptConfig) -> int:
    """Runs a script in this process, one of torchrun's, and returns its exit code."""
    if _HASHES not in os.environ:
        os.execve(sys.executable, sys.orig_argv, {**os.environ, _HASHES: "0"})
    with join(
        config.backend,
        config.timeout,
        device_of_parts(config.memory, config.store),
        hosts_parts(config),
    ) as comm:
        try:
            return work(config)
        except BaseException as error:
            # torchrun ends all workers as soon as one fails: the one that speaks goes first.
            comm.report(error)
            tell_agent(error)
            other = is_consequence(error, comm.rank)
            time.sleep(_COURTESY * (2 * other + (comm.rank != 0)))
            if other:
                raise
            sys.stderr.write(in_own_lines(error, config.script))
            return 1


def hosts_parts(config: ScriptConfig) -> bool:
    """Returns whether the workers take parts in turn, be it one each, so that these can wait."""
    return any(given is not None for given in (config.parts, config.memory, config.store))


def _show(path: Path, before: str = "") -> bool:
    """Writes what a worker left on standard error, if it did."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return False
    sys.stderr.write(before + text)
    sys.stderr.flush()
    return True


# In a worker #################################################################


def work_as_host(config: ScriptConfig) -> int:
    """:func:`work` of a worker that was started without knowing that its parts take turns."""
    if torch.cuda.is_available():
        finalize()
        join(
            config.backend, config.timeout, device_of_parts(config.memory, config.store), parts=True
        )
    return work(config)


def work(config: ScriptConfig) -> int:
    """Runs a script in each part that this worker hosts, and returns its exit code. Collective."""
    comm, process = current(), Process(float64=config.float64)
    main = _Main(config.script)
    before = sys.modules["__main__"], sys.argv, list(sys.path)
    sys.modules["__main__"], sys.argv = main, [config.script, *config.arguments]
    sys.path[:1] = [os.path.dirname(os.path.realpath(config.script))]
    if comm.rank != 0:
        os.environ |= {"MPLBACKEND": "Agg", "WANDB_MODE": "disabled", "WANDB_SILENT": "true"}
    options: dict[str, Any] = {"memory": config.memory, "store": config.store}
    options |= {"backend": config.backend, "timeout": config.timeout}
    parts = comm.world_size if config.parts is None and hosts_parts(config) else config.parts
    dtype = torch.float64 if config.float64 else None
    try:
        with default_dtype(dtype), process.replaced(), _trace_at_end(config, process):
            codes = run(_run_part, config, process, main, parts=parts, **options)
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:] = before
    return codes[0]


def _run_part(config: ScriptConfig, process: Process, main: _Main) -> int:
    comm = current()
    together = Together(comm)
    cache = default_cache() if config.cache is None else Path(config.cache)
    files = None if comm.rank == 0 else PrivateFiles()
    graphs = Graphs(together, cache, config.node_ids, config.levels)
    space = main.space(comm.rank)
    try:
        together.seed_all()
        process.workers[comm.rank] = Worker(together, graphs, Models(together), files)
        made_edges(comm).all_plain = True
        if comm.rank == 0:
            process.first_thread = threading.get_ident()
        code = _execute(config.script, space)
        process.workers[comm.rank].end()
        together.check_states("its end")
        return max(comm.all_gather_object(code))
    except BaseException as error:
        _note_device(error, comm.device)
        if config.folder and not is_consequence(error, comm.rank):
            _leave(config, f"failure-{comm.rank}", in_own_lines(error, config.script))
        raise
    finally:
        process.workers.pop(comm.rank, None)
        comm.made_edges = None
        comm.layouts.clear()
        graphs.close()
        if files is not None:
            files.close()


def _execute(script: str, space: dict[str, Any]) -> int:
    """Runs a script's code, and returns its exit code."""
    try:
        with io.open_code(os.path.abspath(script)) as file:
            code = compile(file.read(), script, "exec", dont_inherit=True)
        exec(code, space)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return int(end.code or 0)
        sys.stderr.write(f"{end.code}\n")
        return 1
    return 0


class _Main(types.ModuleType):
    """The module ``__main__``: to each part of the process its own."""

    def __init__(self, script: str) -> None:
        super().__init__("__main__")
        self.__dict__["_script"] = script
        self.__dict__["_spaces"] = {}

    def space(self, rank: int) -> dict[str, Any]:
        """Makes the namespace of a rank."""
        own = types.ModuleType("__main__")
        own.__dict__.update(
            __builtins__=sys.modules["builtins"], __file__=os.path.abspath(self._script)
        )
        self._spaces[rank] = own
        return own.__dict__

    def __getattribute__(self, name: str) -> Any:
        mine = super().__getattribute__("__dict__")
        own = mine["_spaces"].get(current().rank) if "_spaces" in mine else None
        if own is None or name in ("_script", "_spaces", "space", "__class__"):
            return super().__getattribute__(name)
        return getattr(own, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value


# Failures ####################################################################


def _note_device(error: BaseException, device: torch.device) -> None:
    """Notes on PyTorch's error of tensors on the CPU and on a GPU that the script chose neither."""
    text = str(error).lower()
    apart = "same device" in text or ("cpu" in text and "cuda" in text)
    torchs = isinstance(error, RuntimeError | TypeError) and not isinstance(error, PygSarError)
    if device.type == "cuda" and apart and torchs:
        error.add_note(f"The graph is on {device}: {REMEDIES[0]}")


def in_own_lines(error: BaseException, script: str) -> str:
    """Returns an error's traceback without the frames of what runs the script."""
    found = traceback.TracebackException.from_exception(error, compact=True)
    todo, seen = [found], set()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        _shorten(one.stack, script)
        if not one.stack:
            one.stack = None  # type: ignore[assignment]  # No heading: an error of syntax.
        todo += [other for other in (one.__cause__, one.__context__) if other is not None]
        todo += one.exceptions or []
    return "".join(found.format())


def _shorten(stack: traceback.StackSummary, script: str) -> None:
    first = next((k for k, frame in enumerate(stack) if frame.filename == script), None)
    kept = [
        frame
        for k, frame in enumerate(stack)
        if (first is None or k >= first) and not frame.filename.startswith(_HERE)
    ]
    stack[:] = kept if first is not None else []


def _leave(config: ScriptConfig, name: str, text: str) -> None:
    path = Path(config.folder) / name
    path.with_suffix(".tmp").write_text(text, encoding="utf-8")
    path.with_suffix(".tmp").replace(path)


@contextmanager
def _trace_at_end(config: ScriptConfig, process: Process) -> Iterator[None]:
    """Has rank 0 leave the lines where it is when the parent ends it, as on Ctrl-C."""
    if not config.folder or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        frames = sys._current_frames()
        if process.first_thread in frames:
            stack = traceback.extract_stack(frames[process.first_thread])
            _shorten(stack, config.script)
            _leave(config, "interrupt", "".join(stack.format()))
            with suppress(RuntimeError):  # It was writing just then.
                sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ``pyg-sar run`` ##################################################################


def run_command(arguments: argparse.Namespace) -> int:
    """Runs ``pyg-sar run``, and returns the script's exit code."""
    if not Path(arguments.script).is_file():
        raise FileNotFoundError(2, "No such file", arguments.script)
    cache = arguments.cache
    config = settings_of(
        ScriptConfig,
        arguments,
        arguments=tuple(arguments.arguments),
        cache=None if cache is None else os.path.abspath(cache),
        node_ids=arguments.node_ids or None,
        **hosting_of(arguments),
    )
    if arguments.parts is not None and arguments.parts < 1:
        raise ValueError(f"--parts {arguments.parts} must be at least 1")
    if was_launched(arguments.workers):
        return run_script_under_torchrun(config)
    workers = default_workers(arguments.parts or SCRIPT_WORKERS, config.store)
    workers = workers if arguments.workers is None else arguments.workers
    if workers < 1 or (config.parts is not None and not workers <= config.parts):
        raise ValueError(
            f"--workers {workers} must be from 1 to the number of parts ({config.parts or 'any'})"
        )
    return run_script(config, workers)
