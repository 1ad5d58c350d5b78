"""Replaces what a script calls while workers run it: datasets, models, files, random seeds.

All is put back when the block ends. Each replacement finds the rank that calls it, since the parts
of one process share the functions that are replaced, and does nothing of its own where rank 0 acts
for all.
"""

from __future__ import annotations

import atexit
import builtins
import copy
import inspect
import io
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, NoReturn

import numpy as np
import torch
import torch.multiprocessing
import torch_geometric.loader
from torch.nn import Module
from torch.optim import Optimizer
from torch_geometric.data import Data, Dataset, HeteroData, InMemoryDataset
from torch_geometric.typing import WITH_TORCH_SPARSE

from pyg_sar.comm.group import current
from pyg_sar.errors import DistributedIndexError
from pyg_sar.nn.global_calls import GlobalCalls
from pyg_sar.tensors.sparse import unsorted_matrices
from pyg_sar.tools.inference import is_distributed
from pyg_sar.tools.models import default_dtype
from pyg_sar.tools.script_files import NoInput, Output, PrivateFiles, called_by_package
from pyg_sar.tools.script_graphs import Graphs
from pyg_sar.tools.script_loaders import divided, in_place_here
from pyg_sar.tools.script_models import Models
from pyg_sar.tools.script_together import Together

Function = Callable[..., Any]


@dataclass
class Worker:
    """A rank that runs the script."""

    together: Together
    graphs: Graphs
    models: Models
    files: PrivateFiles | None
    """``None`` at rank 0, whose files are the script's."""
    at_end: list[partial[Any]] = field(default_factory=list)
    """Functions that the script has registered to be called at its end."""

    def end(self) -> None:
        """Calls those functions, the last first."""
        while self.at_end:
            self.at_end.pop()()


@dataclass
class Process:
    """The ranks that run the script in this process."""

    workers: dict[int, Worker] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)
    first_thread: int = 0
    """The thread of rank 0, if it is here."""
    float64: bool = False
    """Is true where datasets give float64 for float32."""

    def here(self) -> Worker | None:
        """Returns the rank that calls, of several workers; ``None`` where rank 0 acts for all."""
        worker = self.workers.get(current().rank)
        if worker is None or worker.together.alone or worker.together.comm.world_size == 1:
            return None
        return worker

    def is_first(self) -> bool:
        """Returns whether what the caller writes is seen."""
        worker = self.workers.get(current().rank)
        return worker is None or worker.files is None

    def widened(self, value: Any) -> Any:
        """Returns a graph with float64 for float32, if that was asked for."""
        if not self.float64 or not isinstance(value, Data | HeteroData) or is_distributed(value):
            return value
        return copy.copy(value).apply(lambda t: t.double() if t.dtype == torch.float32 else t)

    def tell(self, text: str) -> None:
        """Writes a line on standard error, once."""
        if text not in self.told and self.is_first():
            self.told.add(text)
            sys.stderr.write(f"pyg-sar: {text}\n")

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Replaces what the script calls, until the block ends."""
        with ExitStack() as stack:
            put = partial(_put, stack)
            for stream in ("stdout", "stderr"):
                output = Output(getattr(sys, stream), self.is_first)
                stack.callback(output.close)
                put(sys, stream, lambda real, output=output: output)
            put(sys, "stdin", lambda real: NoInput())
            put(atexit, "register", self._at_end)
            if WITH_TORCH_SPARSE:
                unsorted_matrices(put)
            for replace in (self._datasets, self._models, self._files, self._seeds, self._refused):
                replace(put)
            yield

    def _at_end(self, real: Function) -> Function:
        def register(function: Function, *args: Any, **kwargs: Any) -> Function:
            worker = self.workers.get(current().rank)
            if worker is None or sys._getframe(1).f_globals.get("__name__") != "__main__":
                real(function, *args, **kwargs)
            else:  # At the process's end all ranks' output and files would be seen.
                worker.at_end.append(partial(function, *args, **kwargs))
            return function

        return register

    def _on_workers(self, act: Function) -> Function:
        """Returns what replaces a function by ``act(worker, real, ...)``, on workers."""

        def make(real: Function) -> Function:
            def call(*args: Any, **kwargs: Any) -> Any:
                worker = self.here()
                if worker is None:
                    return real(*args, **kwargs)
                return act(worker, real, *args, **kwargs)

            return call

        return make

    # Datasets ----------------------------------------------------------------

    def _datasets(self, put: Function) -> None:
        def in_float32(real: Function) -> Function:
            def make(dataset: Any) -> None:
                # Files stay as others will read them.
                with default_dtype(torch.float32 if self.float64 else None):
                    real(dataset)

            return make

        def widened(real: Function) -> Function:
            return lambda dataset, index: self.widened(real(dataset, index))

        def data(real: Any) -> Any:
            get = self._on_workers(_whole_data)(real.fget)
            return property(get, lambda dataset, value: real.fset(dataset, self.widened(value)))

        def number(real: Any) -> Any:
            return real.getter(self._on_workers(_number)(real.fget))

        for name in ("_download", "_process"):
            put(Dataset, name, in_float32)
            put(Dataset, name, self._on_workers(_make_once))
        put(Dataset, "__getitem__", widened)
        put(Dataset, "__getitem__", self._on_workers(_item))
        put(InMemoryDataset, "data", data)
        for kind in (Dataset, InMemoryDataset):
            for name in ("num_classes", "num_node_features", "num_edge_features"):
                if name in vars(kind):
                    put(kind, name, number)

    # Models ------------------------------------------------------------------

    def _models(self, put: Function) -> None:
        def left_out(name: str) -> Function:
            def keep(
                worker: Worker, real: Function, /, model: Any = None, *_: Any, **__: Any
            ) -> Any:
                self.tell(f"{name} is left out: layers on a distributed graph run as they are")
                return (lambda found: found) if model is None else model

            return self._on_workers(keep)

        put(Module, "__init__", self._on_workers(_note))
        put(Module, "__setstate__", self._on_workers(_note))
        put(Module, "__call__", self._on_workers(_call))
        put(GlobalCalls, "__call__", self._on_workers(_call_layer))
        put(Optimizer, "__init__", self._on_workers(_optimize))
        put(torch, "compile", left_out("torch.compile"))
        put(torch.jit, "script", left_out("torch.jit.script"))

    # Files -------------------------------------------------------------------

    def _files(self, put: Function) -> None:
        def private(method: Function, real: Function) -> Function:
            def call(*args: Any, **kwargs: Any) -> Any:
                worker = self.workers.get(current().rank)
                if worker is None or worker.files is None:
                    return real(*args, **kwargs)
                return method(worker.files, real, *args, **kwargs)

            return call

        for owner in (builtins, io):
            put(owner, "open", partial(private, PrivateFiles.open))
        put(os, "stat", partial(private, PrivateFiles.stat))
        put(os, "mkdir", partial(private, PrivateFiles.mkdir))
        for name in ("remove", "unlink", "rmdir"):
            put(os, name, partial(private, PrivateFiles.remove))
        put(shutil, "rmtree", partial(private, PrivateFiles.remove))
        for name in ("rename", "replace"):
            put(os, name, partial(private, PrivateFiles.rename))
        for name in ("chmod", "utime"):
            put(os, name, partial(private, PrivateFiles.change))
        put(torch, "save", self._on_workers(_save))
        put(torch, "load", self._on_workers(_load))

    # Random seeds ------------------------------------------------------------

    def _seeds(self, put: Function) -> None:
        put(torch, "manual_seed", self._on_workers(_seed))
        put(torch, "seed", self._on_workers(_draw_seed))
        put(np.random, "seed", self._on_workers(_seed))
        put(np.random, "default_rng", self._on_workers(_make_generator))
        put(random, "seed", self._on_workers(_seed))

    # What has no place here --------------------------------------------------

    def _refused(self, put: Function) -> None:
        def refused(name: str, why: str) -> Function:
            def refuse(worker: Worker, real: Function, *args: Any, **kwargs: Any) -> NoReturn:
                raise DistributedIndexError(f"'{name}' under 'pyg-sar run': {why}")

            return self._on_workers(refuse)

        for name, kind in vars(torch_geometric.loader).items():
            if isinstance(kind, type) and "__init__" in vars(kind):
                put(kind, "__init__", self._on_workers(partial(_make_loader, name)))
        put(torch_geometric.loader.DataLoader, "__iter__", self._on_workers(_batches))
        traced = "a distributed model can't be traced: leave the call out (of SummaryWriter: "
        traced += "add_graph)"
        put(torch.jit, "trace", refused("torch.jit.trace", traced))
        workers = "the script starts workers of its own. Run it with python"
        put(torch.multiprocessing, "spawn", refused("torch.multiprocessing.spawn", workers))
        starts = "torch.distributed.init_process_group"
        put(torch.distributed, "init_process_group", refused(starts, workers))


# What workers do instead #####################################################


def _make_once(worker: Worker, real: Function, dataset: Any) -> None:
    worker.together.first(lambda: real(dataset))


def _item(worker: Worker, real: Function, dataset: Any, index: Any) -> Any:
    number = isinstance(index, int | np.integer) or getattr(index, "ndim", 1) == 0
    if not number or len(dataset) != 1:
        return real(dataset, index)
    name = f"{type(dataset).__name__}[{int(index)}]"
    if not is_distributed(dataset.__dict__.get("_data")):
        return worker.graphs.share(lambda: real(dataset, index), name, dataset)
    worker.graphs.check_unchanged(dataset, name)
    found = real(dataset, index)
    if dataset.transform is not None:
        worker.graphs.remember(dataset, found)
    return found


def _whole_data(worker: Worker, real: Function, dataset: Any) -> Any:
    if len(dataset) != 1:
        return real(dataset)
    name = f"{type(dataset).__name__}.data"
    worker.graphs.check_unchanged(dataset, name)
    if not is_distributed(dataset._data):  # From now on it is, with all changes.
        dataset._data = worker.graphs.share(lambda: real(dataset), name)
    return dataset._data


def _number(worker: Worker, real: Function, dataset: Any) -> Any:
    if len(dataset) != 1 or is_distributed(dataset.__dict__.get("_data")):
        return real(dataset)
    return worker.together.first(lambda: int(real(dataset)))


def _note(worker: Worker, real: Function, module: Module, /, *args: Any, **kwargs: Any) -> None:
    real(module, *args, **kwargs)
    worker.models.note(module)


def _call(worker: Worker, real: Function, module: Module, /, *args: Any, **kwargs: Any) -> Any:
    return worker.models.call(real, module, args, kwargs)


def _call_layer(worker: Worker, real: Function, layer: Module, /, *args: Any, **kwargs: Any) -> Any:
    worker.models.before_layer(layer)
    return real(layer, *args, **kwargs)


def _optimize(
    worker: Worker, real: Function, made: Any, /, params: Any, *args: Any, **kwargs: Any
) -> None:
    real(made, worker.models.optimize(params), *args, **kwargs)


def _save(worker: Worker, real: Function, /, obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
    if not called_by_package():
        f = f if worker.files is None else worker.files.place(f, writes=True)
    return real(obj, f, *args, **kwargs)


def _load(worker: Worker, real: Function, /, f: Any, *args: Any, **kwargs: Any) -> Any:
    return real(f if worker.files is None else worker.files.place(f), *args, **kwargs)


def _seed(worker: Worker, real: Function, *args: Any, **kwargs: Any) -> Any:
    """Seeds by rank 0's seed: one that was made from the time is another at each rank."""
    if called_by_package():
        return real(*args, **kwargs)
    (given,) = [*args, *kwargs.values()] or [None]
    if given is None:
        return real(worker.together.new_seed())
    if isinstance(given, int | np.integer):
        given = worker.together.comm.broadcast_object(int(given))
    return real(given)


def _draw_seed(worker: Worker, real: Function) -> int:
    if called_by_package():
        return int(real())
    found = worker.together.new_seed()
    torch.manual_seed(found)
    return found


def _make_generator(worker: Worker, real: Function, seed: Any = None) -> Any:
    return real(worker.together.new_seed() if seed is None else seed)


def _make_loader(
    name: str, worker: Worker, real: Function, loader: Any, /, *args: Any, **kwargs: Any
) -> None:
    if "_made_here" not in loader.__dict__:
        given = in_place_here(real, loader, args, kwargs)
        if given is None:
            why = "the script trains on mini-batches of a graph, which need no distributed graph. "
            why += "Run it with python, or on all of one graph"
            if "dataset" in inspect.signature(real).parameters:
                why = "batches of many graphs are divided where PyG's 'DataLoader' makes them: use "
                why += "it, or pyg_sar.scatter(batch)"
            raise DistributedIndexError(f"'{name}' under 'pyg-sar run': {why}")
        args, kwargs = (), given
        loader.__dict__["_made_here"] = True
    real(loader, *args, **kwargs)


def _batches(worker: Worker, real: Function, loader: Any) -> Any:
    found = real(loader)
    many = loader.__dict__.get("_of_many")
    return map(partial(divided, graphs=worker.graphs), found) if many else found


def _put(stack: ExitStack, owner: Any, name: str, make: Function) -> None:
    """Replaces an attribute until the stack is left."""
    own = name in vars(owner)
    real = vars(owner)[name] if own else getattr(owner, name)
    new = make(real)
    if callable(real) and callable(new) and not isinstance(new, Output):
        new = wraps(real)(new)
    setattr(owner, name, new)
    stack.callback(setattr, owner, name, real) if own else stack.callback(delattr, owner, name)
