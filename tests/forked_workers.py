"""Worker processes of the tests, forked from processes that have imported everything already.

A worker of ``launch`` imports torch, PyG and the package: seconds of computing each, of which a
test that isn't about starting learns nothing. Here ranks have *templates*: Python processes, one
for even and one for odd ranks. Each is started when it is first needed, imports all that once, and
forks the workers of its ranks for each launch of the session. From there on all is the package's:
the worker runs ``_worker_main`` on its own pipe, in its own session, and ends with its launch. No
state goes from one launch to the next: a template only imports, and makes some layers. As with
workers that start from nothing, neighbours' objects have other addresses, so other places in sets.

A launch whose paths or environment aren't those of the templates starts its workers from nothing;
all do where an import starts a thread.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import torch
from torch._dynamo.utils import dump_compile_times
from torch_geometric import nn, template

import pyg_sar
from pyg_sar.comm.launch import _environment, _Worker, _worker_main
from pyg_sar.kernels import ops
from pyg_sar.store import pager

Start = Callable[[int, Mapping[str, str]], _Worker]

# What is read when workers meet, not when a process starts.
READ_LATE = (
    *("GLOO_", "LOCAL_", "MASTER_", "PYG_SAR_", "PYTEST_", "RANK", "TORCHELASTIC_", "WORLD_"),
    "MKL_DISABLE_FAST_MM",  # MKL reads it when it first computes.
    "TORCHINDUCTOR_",  # PyTorch's compiler leaves it behind.
    "XDG_CACHE_HOME",
)
# A command, C++, and what needs a package that isn't everywhere.
NOT_ONCE = ("__main__", "_kernels", "_pager", "triton_attention", "triton_operators", "triton_sums")


def read_early(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if not k.startswith(READ_LATE)}


def searched() -> list[str]:
    """Where modules are looked for, but for those that setuptools brings and adds on import."""
    return [place for place in sys.path if not place.endswith("_vendor")]


# In the template #############################################################


def import_everything() -> None:
    """Imports what workers import when they use it, half a second's work of each."""
    for module in pkgutil.walk_packages(pyg_sar.__path__, "pyg_sar."):
        if not module.name.endswith(NOT_ONCE):
            importlib.import_module(module.name)
    keep_compiled_templates()
    seed_what_is_here()
    common = (nn.GATConv, nn.GATv2Conv, nn.GCNConv, nn.GraphConv, nn.SAGEConv, nn.TransformerConv)
    for layer in common:
        layer(1, 1)  # PyG writes a module for a class when it first makes a layer of it.
    ops.why_missing(), pager.why_missing()  # Loads the libraries.
    # Notes which file each module is of, as registering operators asks of all modules.
    inspect.getmodule(compile("", "no file", "exec"))
    # A worker's end needn't take out the operators that the modules registered, one by one, nor
    # import a package for tables of what PyTorch compiled, which nobody reads: half its time.
    for registered in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        registered.atexit = False
    atexit.unregister(dump_compile_times)


def keep_compiled_templates() -> None:
    """Lets PyG compile its two templates of layers once, not for each class of layers.

    It writes a module for each class from them: a fourth of what short tests take.
    """

    @functools.cache
    def environment(folder: str) -> jinja2.Environment:
        kept = jinja2.Environment(loader=jinja2.FileSystemLoader(folder))
        for name in kept.list_templates(extensions=["jinja"]):
            kept.get_template(name)
        return kept

    template.FileSystemLoader = str
    template.Environment = lambda loader: environment(loader)
    for wing in (nn, nn.conv):
        environment(os.path.dirname(os.path.realpath(wing.__file__)))


def seed_what_is_here() -> None:
    """Lets ``torch.manual_seed`` leave out the kinds of devices that are not here.

    For each of them it would note the stack of who called it, which takes a millisecond.
    """
    for kind in (torch.cuda, torch.mtia, torch.xpu):
        if not kind.is_available():
            vars(kind)["manual_seed_all"] = lambda seed: None


def take_large_pages() -> None:
    """Moves the template's memory to pages of 2 MB, where Linux can: since 6.1.

    To start and to end, a worker then handles two hundred of them, not a hundred thousand small
    ones: a fourth of what a worker takes that computes nothing. Where it writes it copies 4 kB.
    """
    size, collapse = 1 << 21, 25  # linux/mman.h: MADV_COLLAPSE
    advise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.match(r"(\w+)-(\w+) rw-p \w+ 00:00 0\s*(\[heap\])?$", line)
        if found is not None:
            start, end = (int(address, 16) for address in found.groups()[:2])
            start, end = -(-start // size) * size, end // size * size
            if start < end:
                advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), collapse)


def serve(descriptor: int) -> None:
    """Forks a worker for each request, until the tests end."""
    import hypothesis  # noqa: F401  # The modules of the tests import these again.
    import numpy
    import oracle  # noqa: F401
    import pytest  # noqa: F401

    import_everything()
    take_large_pages()
    os.set_inheritable(descriptor, False)
    control = Connection(descriptor)
    control.send(os.listdir("/proc/self/task"))
    while True:
        try:
            request = control.recv()
        except EOFError:
            os._exit(0)
        if isinstance(request, int):
            pid, status = os.waitpid(request, os.WNOHANG)
            control.send(os.waitstatus_to_exitcode(status) if pid else None)
            continue
        handles = [recv_handle(control) for _ in range(3)]
        if os.fork() == 0:
            os.setsid()
            control.send(os.getpid())
            control.close()
            folder, environment = request
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            for standard, handle in enumerate(handles[:2], start=1):
                os.dup2(handle, standard)
                os.close(handle)
            numpy.random.seed()  # Each process draws its own; Python's module sees to it itself.
            torch.seed()
            _worker_main(handles[2])
            end_here()
        for handle in handles:
            os.close(handle)


def end_here() -> NoReturn:
    """Ends the process as an interpreter does, but doesn't take apart what was imported.

    That would copy each of the template's pages: it takes longer than most tests.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# In the tests ################################################################


class Forked:
    """As much of ``subprocess.Popen`` as ``launch`` asks for."""

    def __init__(self, template: Template, pid: int) -> None:
        self.template = template
        self.pid = pid
        self.code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            self.code = self.template.ask(self.pid)
        return self.code

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= end:
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(0.005)
        return code


class Template:
    """A process that forks the workers of every second rank."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.control, there = Pipe()
        code = f"import gc, sys; gc.disable(); sys.path[:] = {sys.path!r}; "
        code += f"from forked_workers import serve; serve({there.fileno()})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=dict(environment),
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        there.close()
        # What is forked from a process with other threads may hang.
        self.alone = len(self.answer()) == 1

    def ask(self, request: Any) -> Any:
        self.control.send(request)
        return self.answer()

    def answer(self) -> Any:
        if not self.control.poll(120):
            raise RuntimeError("a template of workers doesn't answer")
        return self.control.recv()

    def fork(self, rank: int, environment: Mapping[str, str]) -> _Worker:
        here, there = Pipe()
        self.control.send((os.getcwd(), dict(environment)))
        for handle in (1, 2, there.fileno()):
            send_handle(self.control, handle, self.process.pid)
        there.close()
        return _Worker(rank, Forked(self, self.answer()), here)  # type: ignore[arg-type]

    def close(self) -> None:
        self.control.close()
        self.process.wait(60)


class Templates:
    """The templates of even and of odd ranks.

    Args:
        start: How workers start from nothing.
    """

    def __init__(self, start: Start) -> None:
        self.from_nothing = start
        self.started: list[Template] = []
        self.like = searched(), read_early(_environment(1, 0, None, None))

    def start(self, rank: int, common: Mapping[str, str]) -> _Worker:
        """Takes the place of ``_Worker.start``."""
        if (searched(), read_early(common)) != self.like:
            return self.from_nothing(rank, common)
        for _ in range(len(self.started), min(2, int(common["WORLD_SIZE"]))):
            self.started.append(Template(common))
        if not all(template.alone for template in self.started):
            return self.from_nothing(rank, common)
        return self.started[rank % 2].fork(
            rank, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )


@contextlib.contextmanager
def templates() -> Iterator[Templates]:
    """Templates that end with the block."""
    found = Templates(_Worker.start)
    try:
        yield found
    finally:
        for template in found.started:
            template.close()
