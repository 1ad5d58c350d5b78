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
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch_geometric.data import Data
from tqdm import tqdm

from pyg_sar.files import TemporaryFolder, check_folder, check_type, parse_bytes
from pyg_sar.partition.metadata import read_metadata
from pyg_sar.partition.storage import write_partitions
from pyg_sar.policy import SARPolicy
from pyg_sar.tools import plan_runs
from pyg_sar.tools.forecasts import Forecast, Machine, Plan
from pyg_sar.tools.graphs import load_graph, names_in, parse_source, settings_of
from pyg_sar.tools.models import MODELS, call_with, imported_model
from pyg_sar.tools.plan_runs import Samples
from pyg_sar.tools.plan_sample import (
    PartShape,
    PublishedPartition,
    estimated_partitions,
    read_shapes,
)
from pyg_sar.tools.rates import Disk, Rates
from pyg_sar.tools.run import ModelConfig, as_usage_errors, call_of, count_classes, use_features
from pyg_sar.train.flow import call_model

MOST_ESTIMATED = 8
"""Parts of a graph that is not partitioned, at most, if no numbers are given."""
ROWS = 15_000
"""Own nodes, halo rows, and edges / 8 of each of their samples, about."""

Partition = str | os.PathLike[str] | PublishedPartition


@contextmanager
def _partitioned(data: Data | None, root: Partition | int) -> Iterator[Partition]:
    """Yields a partition; a number of parts is one of ``data``, which is there meanwhile."""
    if not isinstance(root, int):
        yield root
        return
    assert data is not None
    with TemporaryFolder("pyg_sar-plan-") as folder:
        write_partitions(data, root, folder / "parts")
        yield folder / "parts"


def plan(
    model: nn.Module | Callable[[Data], nn.Module],
    data: Data | Partition | Sequence[Partition],
    *,
    parts: Sequence[int] | None = None,
    workers: Sequence[int] | None = None,
    modes: Sequence[int] | None = None,
    policy: SARPolicy | None = None,
    memory: int | str | None = None,
    store: str | os.PathLike[str] | None = None,
    bandwidth: float | None = None,
    hosts: int | None = None,
    call: Callable[[nn.Module, Data], Tensor] = call_model,
    rates: Rates | None = None,
) -> Plan:
    r"""Predicts memory, bytes sent and epoch times of a training on partitions.

    .. code-block:: python

        plan = pyg_sar.plan(model, data, memory="4GiB")  # a graph: how many parts?
        plan = pyg_sar.plan(model, "parts", memory="4GiB", bandwidth=125e6)  # a partition
        print(plan)  # a row for each partition, number of workers and mode
        plan.best  # the fastest that fits: memory in bytes, seconds and bytes sent per epoch

    With part :math:`p`'s own nodes :math:`n`, halo rows :math:`h` and edges :math:`e`, the bytes at
    its peak are :math:`a + b(n, h, e)`, where :math:`b` grows in proportion to its arguments.
    Training steps on samples of two sizes with the same proportions give both. See [Note: how it is
    predicted].

    Args:
        model: The model, or what returns it for a part's ``Data``.
        data: A folder of :func:`pyg_sar.write_partitions`, or several; or a graph that is not
            partitioned yet; or what is known of a partition that is not here
            (:class:`~pyg_sar.tools.plan_sample.PublishedPartition`).
        parts: Numbers of them to compare, of a graph that is not partitioned yet. It is partitioned
            into a temporary folder, as large as the graph, for one number after the other. By
            default 2, 4 and 8 parts are estimated from one quick division, which writes
            nothing: their memory is good to choose a number by.
        workers: Numbers of them to compare; those of fewer workers than parts host several each.
            By default one for each part. Partitions with fewer parts are left out.
        modes: Of :class:`SARPolicy`, to compare; by default all three, of estimates the first.
        policy: The other settings of layers.
        memory: By how many bytes each worker may grow after its start, or ``'16GiB'``.
        store: A folder where parts that wait may go (``launch(store=...)``), with ``memory``.
            Samples use it, and its disk is measured.
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
    if modes is None:
        modes = (1,) if isinstance(data, Data) and parts is None else (1, 2, 3)
    check_type("policy", policy or SARPolicy(), SARPolicy, "a SARPolicy or None")
    check_type("modes", modes, Sequence, "a sequence such as (1, 3)")
    check_type("workers", () if workers is None else workers, Sequence, "a sequence such as (1, 2)")
    single = str | os.PathLike | PublishedPartition
    check_type("data", data, Data | single | Sequence, "a graph, a partition's folder, or several")
    graph = data if isinstance(data, Data) else None
    if rates is not None:
        check_type("rates", rates, Rates, "the machine's Rates, or None")
    if graph is None and parts is not None:
        raise ValueError(f"parts={parts!r}: what is partitioned has its own number of parts")
    if graph is not None and parts is None and (workers, store) != (None, None):
        raise ValueError("workers= and store= need partitions, or parts= of the graph to compare")
    if parts is not None:
        check_type("parts", parts, Sequence, "a sequence such as (2, 4)")
        if not all(isinstance(count, int) and count > 0 for count in parts):
            raise ValueError(f"parts={parts!r} must be numbers of parts, such as (2, 4)")
    given: Any = data if parts is None else parts
    given = [graph] if given is graph else given
    roots: list[Any] = [given] if isinstance(given, single) else list(given)
    limit = None if memory is None else parse_bytes(memory, "memory")
    if not roots or not modes:
        raise ValueError("'data', 'parts' and 'modes' need at least one entry each")
    if bandwidth is not None and not (isinstance(bandwidth, int | float) and bandwidth > 0):
        raise ValueError(f"bandwidth={bandwidth!r} must be a positive number of bytes per second")
    if hosts is not None and (bandwidth is None or not isinstance(hosts, int) or hosts < 1):
        raise ValueError(f"hosts={hosts!r} must be a number of hosts, with the bandwidth between")
    if workers is not None and not (workers and all(isinstance(w, int) and w > 0 for w in workers)):
        raise ValueError(f"workers={workers!r} must be numbers of workers, such as (1, 2, 4)")
    if any(isinstance(root, PublishedPartition) for root in roots) and (workers or hosts):
        raise ValueError("workers= and hosts= need partitions that are there, not published ones")
    if graph is None:
        _check_one_graph(roots)
    policies = {mode: replace(policy or SARPolicy(), mode=mode, push="off") for mode in modes}
    check_folder("store", store)
    if store is not None and limit is None:
        raise ValueError(f"store={os.fspath(store)!r} needs memory=, which says what may stay")
    place = None if store is None else os.fspath(store)
    disk = None if place is None else Disk.measure(place)
    machine = Machine(limit, place, bandwidth, hosts, rates, disk)
    forecasts = []
    if graph is not None and parts is None:
        partitions, roots = estimated_partitions(graph, MOST_ESTIMATED), []
        forecasts = _published(partitions, model, policies, machine, call, estimated=True)
    for root in tqdm(roots, desc="plan", unit="partition", disable=None, leave=False):
        with _partitioned(graph, root) as partition:
            named = str(root) if graph is not None else None
            forecasts += _forecasts(partition, named, model, policies, workers, machine, call)
    if not forecasts:
        raise ValueError(f"workers={workers!r} are more than any of the partitions has parts")
    return Plan(forecasts=forecasts, limit=limit, bandwidth=bandwidth)


def _check_one_graph(roots: Sequence[Partition]) -> None:
    known = [r if isinstance(r, PublishedPartition) else read_metadata(r) for r in roots]
    graphs = {
        (r.nodes, r.edges) if isinstance(r, PublishedPartition) else (r.num_nodes, r.num_edges)
        for r in known
    }
    if len(graphs) > 1:
        raise ValueError(
            f"'data' are partitions of different graphs, of {sorted(graphs)} nodes and edges; "
            "compare partitions of one graph"
        )
    if graphs.pop()[0] == 0:
        raise ValueError(f"{roots[0]!r} has no node: there is nothing to plan")


def _published(
    partitions: Sequence[PublishedPartition],
    model: Any,
    policies: dict[int, SARPolicy],
    machine: Machine,
    call: Callable[..., Tensor],
    estimated: bool,
) -> list[Forecast]:
    """Returns those of partitions that are not there, of which all samples are tried at once."""
    tried = [(one, mode) for one in partitions for mode in policies]
    most = max(one.tried for one, _ in tried)
    rows = ROWS if estimated else plan_runs.ROWS
    with ExitStack() as stack:
        samples = [
            stack.enter_context(
                Samples(one, _padded(one.shapes(mode), most), model, [policies[mode]], call, rows)
            )
            for one, mode in tried
        ]
        runs = plan_runs.apart(samples)
    return [
        Forecast(
            parts=f"{one.parts} estimated" if estimated else "published",
            workers=one.parts,
            mode=mode,
            **machine.published(found, one, mode),
        )
        for (one, mode), (found,) in zip(tried, runs, strict=True)
    ]


def _padded(shapes: list[PartShape], count: int) -> list[PartShape]:
    """Returns so many parts, of which those beyond the given ones have a node and an edge."""
    more = range(len(shapes), count)
    empty = [0] * len(more)
    parts = [replace(one, halo=one.halo + empty, edges=one.edges + empty) for one in shapes]
    for p in more:
        edges = [int(q == p) for q in range(count)]
        parts.append(PartShape(nodes=1, halo=[0] * count, edges=edges, boundary=0, loops=0))
    return parts


def _forecasts(
    root: Partition,
    name: str | None,
    model: Any,
    policies: dict[int, SARPolicy],
    workers: Sequence[int] | None,
    machine: Machine,
    call: Callable[..., Tensor],
) -> list[Forecast]:
    """Returns those of a partition, by number of workers and mode."""
    if isinstance(root, PublishedPartition):
        return _published([root], model, policies, machine, call, estimated=False)
    folder, shapes = os.fspath(root), read_shapes(root)
    most = len(shapes)
    counts = [most] if workers is None else [count for count in workers if count <= most]
    if not counts:
        return []
    limited = machine.store is not None and min(counts) < most
    rows = plan_runs.ROWS * (plan_runs.STORED_ROWS if limited else 1)
    forecasts = []
    with Samples(folder, shapes, model, list(policies.values()), call, rows) as samples:
        apart = plan_runs.apart([samples])[0]
        hosted = samples.hosted() if min(counts) < most else apart
        for k, mode in enumerate(policies):
            for count in counts:
                stored = None
                if machine.store is not None and machine.limit is not None and count < most:
                    stored = samples.stored(hosted[k], k, count, machine.limit, machine.store)
                found = machine.forecast(apart[k], hosted[k], count, stored)
                forecasts.append(Forecast(parts=name or folder, workers=count, mode=mode, **found))
    return forecasts


# ``pyg-sar plan`` ##################################################################


PLAN_EPILOG = """\
Each folder is a partition; there is one worker for each part, if --workers says nothing else.
  pyg-sar plan --parts parts4 parts8 --model sage --hidden 256 --layers 3 --memory 16GiB
  pyg-sar plan graph.pt --model gat --memory 4GiB
  pyg-sar plan graph.pt --parts 2 4 8 --model gat --memory 4GiB
  pyg-sar plan --parts parts --model net.py:make --bandwidth 1Gb --hosts 2
  pyg-sar plan --parts parts16 --model gat --workers 1 2 4 --memory 2GiB --store /scratch
Exit code 1: nothing fits.
"""

_BITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def add_plan(command: argparse.ArgumentParser) -> Any:
    """Adds the arguments of ``pyg-sar plan``, and returns what adds those of the model."""
    add = command.add_argument
    of_parts = "folders of partitions; or published:parts=32,nodes=...,edges=...,halo=...,..."
    of_graph = "one that is not partitioned yet, as of pyg-sar partition: --parts are then numbers "
    of_graph += "(default: 2, 4 and 8, estimated)"
    add("source", nargs="?", metavar="GRAPH", help=of_graph)
    add("--parts", nargs="+", metavar="DIR", help=of_parts)
    add("--data-root", default=None, metavar="DIR", help="where datasets are, or are put")
    add("--picture", metavar="FILE", help="write a picture of the table: .svg, .png, .pdf")
    add("--workers", nargs="+", type=int, metavar="W", help="to compare (default: one a part)")
    add("--modes", nargs="+", type=int, choices=(1, 2, 3), help="to compare (default: all)")
    add("--memory", metavar="SIZE", help="that a worker may take: 16GiB")
    of_store = "with --memory: parts that wait go to a file here, as in train; its disk is tried"
    add("--store", metavar="DIR", help=of_store)
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
        call = partial(_call_stock, arguments.model)
    data: Any
    parts = None
    if arguments.source is None and arguments.parts is None:
        raise ValueError("pyg-sar plan takes a GRAPH, or --parts with folders of partitions")
    if arguments.source is None:
        data = [_partition_of(text) for text in arguments.parts]
    else:
        if arguments.parts and not all(text.isdecimal() for text in arguments.parts):
            raise ValueError(f"--parts {' '.join(arguments.parts)}: GRAPH needs numbers of parts")
        data = load_graph(arguments.source, root=arguments.data_root)
        parts = [int(text) for text in arguments.parts] if arguments.parts else None
    found = plan(
        partial(_build, settings_of(ModelConfig, arguments, name=arguments.model)),
        data,
        parts=parts,
        workers=arguments.workers,
        modes=arguments.modes,
        policy=SARPolicy(),
        memory=arguments.memory,
        store=arguments.store,
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
    known = {field.name for field in fields(PublishedPartition)} - {"like"}
    if set(options) != known or not all(value.isdecimal() for value in options.values()):
        raise ValueError(
            f"--parts {text}: expected whole numbers for all of {', '.join(sorted(known))}"
        )
    return PublishedPartition(**{name: int(value) for name, value in options.items()})


def parse_rate(text: str) -> float:
    """Returns bytes per second of ``'1Gb'``, ``'100Mb'``: bits per second."""
    # A large B would be bytes.
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)b(?:it)?(?:/s|ps)?", text.strip())
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"--bandwidth {text}: expected bits per second, such as 1Gb or 100Mb")
    return float(found[1]) * _BITS[found[2].lower()] / 8


def _build(config: ModelConfig, data: Data) -> nn.Module:
    """Builds the model that the command line names, for a part."""
    with as_usage_errors():
        use_features(data, own=config.own)
        if config.own:
            return imported_model(config.name, data)
        return config.stock(data.num_features, count_classes(data)).build()


def _call_stock(name: str, model: nn.Module, data: Data) -> Tensor:
    """Calls a stock model as ``pyg-sar train`` does."""
    return call_of(name, data)(model, data)
