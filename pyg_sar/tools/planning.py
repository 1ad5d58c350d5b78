"""``plan``: what a training will take on a partition, found out on a small graph of its shape.

[Note: how it is predicted] The model makes three training steps on graphs of two sizes that have
the partition's shape (``plan_sample.py``), on as many workers as there are parts, all threads of
one process that exchange rows as hosts do. The bytes of all tensors alive in a worker are counted,
the bytes that it sends, and the processor's time of later steps; lines through both sizes give
those of the whole partition. Nothing is known of the model, so any model that runs can be planned.
With fewer workers than parts one process hosts all parts of the sample: each worker's peak is that
of the sum over its parts. For other machines the work of an epoch is counted by operators, and
divided by their rates (``rates.py``).
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data

import pyg_sar.comm.group as group
from pyg_sar.comm.group import current
from pyg_sar.comm.host import split_parts
from pyg_sar.comm.launch import launch
from pyg_sar.convert import distribute
from pyg_sar.engine import analysis
from pyg_sar.files import check_type, parse_bytes
from pyg_sar.kernels import attention_terms
from pyg_sar.ledger import Ledger
from pyg_sar.partition.loading import load_partition
from pyg_sar.partition.metadata import read_metadata
from pyg_sar.policy import SARPolicy
from pyg_sar.reduction.metrics import mean
from pyg_sar.tools.forecasts import Forecast, Plan
from pyg_sar.tools.graphs import names_in, parse_source
from pyg_sar.tools.models import MODELS, imported_model
from pyg_sar.tools.plan_sample import PartShape, PublishedPartition, read_shapes, write_sample
from pyg_sar.tools.rates import LiveBytes, Rates, Work, peak_together
from pyg_sar.tools.run import ModelConfig, UsageError, call_of, count_classes
from pyg_sar.tools.verify import call_with
from pyg_sar.train.flow import call_model

PIECES = (
    (attention_terms, "_PRODUCTS", attention_terms._PRODUCTS),
    (analysis, "_LEAST_BUDGET", analysis._LEAST_BUDGET),
    (analysis, "_MOST_BUDGET", analysis._MOST_BUDGET),
)
"""Sizes of what is computed piece by piece."""
ROWS = 120_000
"""Own nodes, halo rows, and edges / 8, of all parts of the larger sample, about."""
STEPS = 3
"""Steps that are timed; the fastest counts."""
PROCESS = 8 << 20
"""Bytes that training takes in a process beside its tensors: code that is read, the allocator's."""


Partition = str | os.PathLike[str] | PublishedPartition


def _graph_of(root: Partition) -> tuple[int, int]:
    if isinstance(root, PublishedPartition):
        return root.nodes, root.edges
    found = read_metadata(root)
    return found.num_nodes, found.num_edges


def plan(
    model: nn.Module | Callable[[Data], nn.Module],
    parts: Partition | Sequence[Partition],
    *,
    workers: Sequence[int] | None = None,
    modes: Sequence[int] = (1, 2, 3),
    policy: SARPolicy | None = None,
    memory: int | str | None = None,
    store: bool = False,
    bandwidth: float | None = None,
    hosts: int | None = None,
    call: Callable[[nn.Module, Data], Tensor] = call_model,
    rates: Rates | None = None,
) -> Plan:
    r"""Predicts memory, bytes sent and epoch times of a training on partitions.

    With part :math:`p`'s own nodes :math:`n`, halo rows :math:`h` and edges :math:`e`, the bytes at
    its peak are :math:`a + b(n, h, e)` with :math:`b` homogeneous of degree 1; samples of two sizes
    with the same proportions give both. See [Note: how it is predicted].

    Args:
        model: The model, or what returns it for a part's ``Data``.
        parts: A folder of :func:`pyg_sar.write_partitions`, or several; or what is known of a
            partition that is not here (:class:`~pyg_sar.tools.plan_sample.PublishedPartition`).
        workers: Numbers of them to compare; those of fewer workers than parts host several each.
            By default one for each part. Partitions with fewer parts are left out.
        modes: Of :class:`SARPolicy`, to compare.
        policy: The other settings of layers.
        memory: Bytes that each worker may take beyond its start, or ``'16GiB'``.
        store: Parts that wait may go to a file (``launch(store=...)``).
        bandwidth: Bytes per second of each host's link; by default workers are on one host.
        hosts: Hosts that workers are on, the first ones on the first; by default one each.
        call: The forward pass, where ``model(data.x, data.edge_index)`` is not it.
        rates: Those of another machine (``Rates.measure()`` there): times are then those of the
            operators that were counted, which are good for an order only.

    Returns:
        The plan.

    Raises:
        ValueError: An argument makes no sense, a heterogeneous graph, or several graphs.
        WorkerError: The model fails on the sample.
    """
    for name, function in (("model", model), ("call", call)):
        if not callable(function):
            raise TypeError(f"{name}={function!r} must be a module, or a function")
    check_type("policy", policy or SARPolicy(), SARPolicy, "a SARPolicy or None")
    check_type("modes", modes, Sequence, "a sequence such as (1, 3)")
    check_type("workers", () if workers is None else workers, Sequence, "a sequence such as (1, 2)")
    single = str | os.PathLike | PublishedPartition
    check_type("parts", parts, single | Sequence, "a folder, or several")
    if rates is not None:
        check_type("rates", rates, Rates, "the machine's Rates, or None")
    roots: list[Any] = [parts] if isinstance(parts, single) else list(parts)
    limit = None if memory is None else parse_bytes(memory, "memory")
    if not roots or not modes:
        raise ValueError("'parts' and 'modes' need at least one entry each")
    if bandwidth is not None and not (isinstance(bandwidth, int | float) and bandwidth > 0):
        raise ValueError(f"bandwidth={bandwidth!r} must be a positive number of bytes per second")
    if hosts is not None and (bandwidth is None or not isinstance(hosts, int) or hosts < 1):
        raise ValueError(f"hosts={hosts!r} must be a number of hosts, with the bandwidth between")
    if workers is not None and not (workers and all(isinstance(w, int) and w > 0 for w in workers)):
        raise ValueError(f"workers={workers!r} must be numbers of workers, such as (1, 2, 4)")
    if any(isinstance(root, PublishedPartition) for root in roots) and (workers or hosts):
        raise ValueError("workers= and hosts= need partitions that are there, not published ones")
    graphs = {_graph_of(root) for root in roots}
    if len(graphs) > 1:
        raise ValueError(
            f"'parts' are partitions of different graphs, of {sorted(graphs)} nodes and edges; "
            "compare partitions of one graph"
        )
    if graphs.pop()[0] == 0:
        raise ValueError(f"{roots[0]!r} has no node: there is nothing to plan")
    policies = [replace(policy or SARPolicy(), mode=mode, push="off") for mode in modes]
    machine = _Machine(limit, store, bandwidth, hosts, rates)
    forecasts = []
    for root in roots:
        if isinstance(root, PublishedPartition):
            for mode, chosen in zip(modes, policies, strict=True):
                sizes, apart, _ = _try(root, root.shapes(mode), model, [chosen], call)
                runs = _Runs(sizes, [[part[0] for part in run] for run in apart])
                found = machine.published(runs, root, mode)
                count = root.parts
                forecasts.append(Forecast(parts="published", workers=count, mode=mode, **found))
            continue
        root, shapes = os.fspath(root), read_shapes(root)
        most = len(shapes)
        counts = [most] if workers is None else [count for count in workers if count <= most]
        if not counts:
            continue
        few = min(counts) < most
        sizes, apart, hosted = _try(root, shapes, model, policies, call, few)
        for k, mode in enumerate(modes):
            runs = _Runs(sizes, [[part[k] for part in run] for run in apart])
            together = _Runs(sizes, [[part[k] for part in run] for run in hosted])
            for count in counts:
                found = machine.forecast(runs, together, count)
                forecasts.append(Forecast(parts=root, workers=count, mode=mode, **found))
    if not forecasts:
        raise ValueError(f"workers={workers!r} are more than any of the partitions has parts")
    return Plan(forecasts=forecasts, limit=limit, bandwidth=bandwidth)


@dataclass(frozen=True, slots=True)
class _Runs:
    """The runs on samples: ``runs[size][part]``, and their lines to the whole partition."""

    sizes: list[float]
    runs: list[list[_Run]]

    def line(self, of: Callable[[list[_Run]], float]) -> float:
        """Returns what a number of the parts' runs is on the whole partition."""
        return _line(self.sizes, [of(parts) for parts in self.runs])

    def peak(self, hosted: Sequence[int]) -> int:
        """Returns the most memory that parts of one process take."""
        if len(hosted) == 1:
            return round(self.line(lambda parts: parts[hosted[0]].peak))
        return round(self.line(lambda parts: peak_together([parts[p].log for p in hosted])))

    def sent(self, p: int, to: Collection[int]) -> int:
        """Returns the bytes that part ``p`` sends to others, or to all workers (-1)."""
        return round(self.line(lambda parts: sum(parts[p].sent.get(q, 0) for q in to)))

    def seconds(self, hosted: range, rates: Rates | None) -> float:
        """Returns the time of an epoch of some parts, one after the other."""
        if rates is not None:
            return sum(rates.seconds(self.runs[0][p].work.times(1 / self.sizes[0])) for p in hosted)
        found = self.line(lambda parts: sum(parts[p].seconds for p in hosted))
        return max(found, sum(self.runs[0][p].seconds for p in hosted))


@dataclass(frozen=True, slots=True)
class _Machine:
    """Turns runs into forecasts, by what workers may take of their machines."""

    limit: int | None
    store: bool
    bandwidth: float | None
    hosts: int | None
    rates: Rates | None

    def forecast(self, apart: _Runs, hosted: _Runs, workers: int) -> dict[str, Any]:
        """Returns the fields of a forecast."""
        num_parts = len(apart.runs[0])
        groups, runs = split_parts(num_parts, workers), apart if workers == num_parts else hosted
        memory, stored = [], []
        for parts in groups:
            needs = [runs.peak([p]) for p in parts]
            whole = runs.peak(parts)
            kept = whole
            if self.store and self.limit is not None and len(parts) > 1:
                # A part's tensors must fit; what else waits goes to the store.
                kept = min(whole, max(self.limit - PROCESS, *needs))
            memory.append(PROCESS + kept)
            stored.append(whole - kept)

        def sent_from(places: Sequence[Collection[int]]) -> list[int]:
            """Returns bytes to other places, each of some parts; of collectives all."""
            if len(places) == 1:
                return [0]
            everyone = {-1, *range(num_parts)}
            return [sum(apart.sent(p, everyone - {*parts}) for p in parts) for parts in places]

        seconds = max(runs.seconds(parts, self.rates) for parts in groups)
        if self.bandwidth is not None:
            hosts = split_parts(workers, min(self.hosts or workers, workers))
            links = sent_from([[p for worker in host for p in groups[worker]] for host in hosts])
            seconds += max(links) / self.bandwidth
        sent = sent_from(groups)
        return {"memory": memory, "sent": sent, "seconds": seconds, "stored": stored}

    def published(self, runs: _Runs, parts: PublishedPartition, mode: int) -> dict[str, Any]:
        """Returns the fields of a forecast, with a worker for each of the equal parts."""
        each = range(parts.tried)
        rows = max(runs.sent(p, each) for p in each)
        if mode == 1:  # Those of the pairs that are tried.
            rows = rows * (parts.parts - 1) // (parts.tried - 1)
        sent = rows + max(runs.sent(p, [-1]) for p in each)
        memory = PROCESS + max(runs.peak([p]) for p in each)
        seconds = max(runs.seconds(range(p, p + 1), self.rates) for p in each)
        if self.bandwidth is not None:
            seconds += sent / self.bandwidth
        return {
            "memory": [memory] * parts.parts,
            "sent": [sent] * parts.parts,
            "seconds": seconds,
        }


def _try(
    root: str | PublishedPartition,
    shapes: Sequence[PartShape],
    model: Any,
    policies: Sequence[SARPolicy],
    call: Callable[..., Tensor],
    hosting: bool = False,
) -> tuple[list[float], list[list[list[_Run]]], list[list[list[_Run]]]]:
    """Runs samples of one or two sizes, which are returned first, as shares of the partition.

    Then come runs by size, part and policy: with a worker for each part, and with one worker that
    hosts all, if ``hosting``.
    """
    share = min(1.0, ROWS / max(_rows(shapes), 1))
    sizes = [share] if share == 1.0 else [share, share / 4]
    apart, hosted = [], []
    with tempfile.TemporaryDirectory(prefix="pyg_sar-plan-") as folder:
        for number, size in enumerate(sizes):
            out = str(Path(folder) / str(number))
            write_sample(root, shapes, size, Path(out))
            given = out, model, policies, call, size
            # Without shared memory rows are sent and received, as between hosts: each is one
            # worker's.
            env = {"PYG_SAR_SHARED_MEMORY": "0"}
            apart += launch(_try_threads, 1, len(shapes), *given, env=env)
            if hosting:
                hosted.append(launch(_try_part, 1, *given, parts=len(shapes)))
    return sizes, apart, hosted


def _rows(shapes: Sequence[PartShape]) -> int:
    return sum(shape.nodes + sum(shape.halo) + sum(shape.edges) // 8 for shape in shapes)


def _line(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Continues the line through the values at (one or) two sizes to size 1."""
    if len(sizes) == 1:
        return values[0]
    slope = (values[0] - values[1]) / (sizes[0] - sizes[1])
    return values[0] + slope * (1 - sizes[0])


@dataclass(frozen=True, slots=True)
class _Run:
    """Holds what a part did: bytes alive, with their log, bytes sent by peer, and its time."""

    peak: int
    log: list[tuple[int, int]]
    sent: dict[int, int]
    seconds: float
    work: Work


def _try_threads(parts: int, *given: Any) -> list[list[_Run]]:
    """Returns the runs of workers that are threads, in a process of its own."""
    return launch(_try_part, parts, *given, backend="threads")


def _try_part(
    root: str,
    model: Any,
    policies: Sequence[SARPolicy],
    call: Callable[..., Tensor],
    size: float = 1.0,
) -> list[_Run]:
    """Trains as each policy says; runs on each worker."""
    # Pieces of a fixed size, too, must be smaller in proportion. See [Note: scaled shapes].
    for module, name, whole in PIECES:
        setattr(module, name, max(int(whole * size), 1))
    found = []
    for policy in policies:
        comm = group.current()
        with LiveBytes() as live:
            data = load_partition(root)
            torch.manual_seed(0)
            own = copy.deepcopy(model) if isinstance(model, nn.Module) else model(data)
            trained = distribute(own, policy)
            optimizer = torch.optim.Adam(trained.parameters())
            for _ in range(2):
                _step(trained, data, optimizer, call)
        times = []
        for _ in range(STEPS):
            start = time.thread_time()
            _step(trained, data, optimizer, call)
            times.append(time.thread_time() - start)
        with Ledger(comm) as ledger, Work() as work:
            _step(trained, data, optimizer, call)
        sent = {peer: ways["out"] for peer, ways in ledger.by_peer().items() if "out" in ways}
        found.append(_Run(live.peak, live.log, sent, min(times), work))
        del data, own, trained, optimizer
    return found


def _step(
    model: nn.Module, data: Data, optimizer: torch.optim.Optimizer, call: Callable[..., Tensor]
) -> None:
    optimizer.zero_grad()
    out = call(model, data)
    y = data.get("y")
    if isinstance(y, Tensor) and not y.is_floating_point() and out.dim() == 2:
        values = F.cross_entropy(out, y.view(-1).clamp(0, out.size(1) - 1), reduction="none")
    else:
        values = out.float().square()
    mean(values).backward()
    optimizer.step()


# ``pyg-sar plan`` ##################################################################


PLAN_EPILOG = """\
Each folder is a partition; there is one worker for each part, if --workers says nothing else.
  pyg-sar plan --parts parts4 parts8 --model sage --hidden 256 --layers 3 --memory 16GiB
  pyg-sar plan --parts parts --model net.py:make --bandwidth 1Gb --hosts 2
  pyg-sar plan --parts parts16 --model gat --workers 1 2 4 --memory 2GiB --store /scratch
Exit code 1: nothing fits.
"""

_BITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def add_plan(command: argparse.ArgumentParser) -> Any:
    """Adds the arguments of ``pyg-sar plan``, and returns what adds those of the model."""
    add = command.add_argument
    of_parts = "folders of partitions; or published:parts=32,nodes=...,edges=...,halo=...,..."
    add("--parts", nargs="+", required=True, metavar="DIR", help=of_parts)
    add("--picture", metavar="FILE", help="write a picture of the table: .svg, .png, .pdf")
    add("--workers", nargs="+", type=int, metavar="W", help="to compare (default: one a part)")
    add("--modes", nargs="+", type=int, choices=(1, 2, 3), default=[1, 2, 3], help="to compare")
    add("--memory", metavar="SIZE", help="that a worker may take: 16GiB")
    add("--store", metavar="DIR", help="parts that wait may go to a file, as in train")
    add("--bandwidth", metavar="RATE", help="bits/s of each host's link: 1Gb (default: one host)")
    add("--hosts", type=int, metavar="N", help="that workers are on (default: one each)")
    of_args = "attributes that the model takes: x,edge_index,edge_attr"
    add("--args", type=names_in, metavar="NAMES", help=of_args)
    return command.add_argument_group("model").add_argument


def plan_command(arguments: argparse.Namespace) -> int:
    """Runs ``pyg-sar plan``; returns 0 where a run fits, else 1."""
    call: Any = call_model
    if arguments.args:
        call = call_with(arguments.args)
    elif arguments.model in MODELS:
        call = Stock(arguments.model)
    options = {name: getattr(arguments, name) for name in ("hidden", "layers", "heads", "dropout")}
    found = plan(
        Build(arguments.model, options | {"norm": arguments.norm}),
        [_partition_of(text) for text in arguments.parts],
        workers=arguments.workers,
        modes=arguments.modes,
        policy=SARPolicy(),
        memory=arguments.memory,
        store=arguments.store is not None,
        hosts=arguments.hosts,
        bandwidth=None if arguments.bandwidth is None else parse_rate(arguments.bandwidth),
        call=call,
    )
    sys.stdout.write(f"{found}\n")
    if arguments.picture:
        found.draw(arguments.picture)
    return 0 if found.fitting else 1


def _partition_of(text: str) -> Partition:
    name, options = parse_source(text)
    if name != "published" or not options:
        return text
    known = {field.name for field in fields(PublishedPartition)}
    if set(options) != known or not all(value.isdecimal() for value in options.values()):
        raise ValueError(
            f"--parts {text}: expected whole numbers for all of {', '.join(sorted(known))}"
        )
    return PublishedPartition(**{name: int(value) for name, value in options.items()})


def parse_rate(text: str) -> float:
    """Returns bytes per second of ``'1Gb'``, ``'100Mb'``: bits per second.

    Raises:
        ValueError: It is no such text.
    """
    # A large B would be bytes.
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)b(?:it)?(?:/s|ps)?", text.strip())
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"--bandwidth {text}: expected bits per second, such as 1Gb or 100Mb")
    return float(found[1]) * _BITS[found[2].lower()] / 8


@dataclass(frozen=True, slots=True)
class Build:
    """Builds the model that the command line names, for a part."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, data: Data) -> nn.Module:
        try:
            if self.name not in MODELS:
                return imported_model(self.name, data)
            config = ModelConfig(name=self.name, **self.options)
            return config.stock(data.num_features, count_classes(data, current())).build()
        except (TypeError, ValueError) as error:
            raise UsageError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Stock:
    """Calls a stock model as ``pyg-sar train`` does."""

    name: str

    def __call__(self, model: nn.Module, data: Data) -> Tensor:
        out: Tensor = call_of(self.name, data)(model, data)
        return out
