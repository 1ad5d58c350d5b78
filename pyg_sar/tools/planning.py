"""``plan``: what a training will take on a partition, found out on a small graph of its shape.

[Note: how it is predicted] The model makes three training steps on graphs of two sizes that have
the partition's shape (``plan_sample.py``), on as many workers as there are parts, which send each
other rows as hosts do. The bytes of all tensors alive in a worker are counted,
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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.data import BaseData
from tqdm import tqdm

from pyg_sar.files import TemporaryFolder, check_folder, check_type, parse_bytes
from pyg_sar.partition.metadata import read_metadata
from pyg_sar.partition.storage import write_partitions
from pyg_sar.policy import SARPolicy
from pyg_sar.tools import plan_runs
from pyg_sar.tools.forecasts import Forecast, Machine, Plan, Runs
from pyg_sar.tools.graphs import load_graph, parse_source, settings_of
from pyg_sar.tools.models import call_with, imported_model
from pyg_sar.tools.plan_runs import Samples, try_apart
from pyg_sar.tools.plan_sample import PublishedPartition, estimated_partitions, read_shapes
from pyg_sar.tools.rates import Disk, Rates
from pyg_sar.tools.run import ModelConfig, as_usage_errors, call_of, count_classes, use_features
from pyg_sar.train.flow import call_model
from pyg_sar.usage import MODELS

MOST_ESTIMATED = 8
"""Parts of a graph that is not partitioned, at most, if no numbers are given."""
ROWS = 15_000
"""Own nodes, halo rows, and edges / 8 of each of their samples, about."""

Partition = str | os.PathLike[str] | PublishedPartition


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
            nothing: good to choose a number by. Their times are those of counted operators.
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
    if isinstance(model, BaseData | str | os.PathLike):
        kind = type(model).__name__
        raise TypeError(f"plan(model, data): the model comes first (got {kind})")
    for name, function in (("model", model), ("call", call)):
        if not callable(function):
            raise TypeError(f"{name}={function!r} must be a module, or a function")
    check_type("policy", policy or SARPolicy(), SARPolicy, "a SARPolicy or None")
    single = str | os.PathLike | PublishedPartition
    wanted = "a graph, a partition's folder, or several"
    if isinstance(data, HeteroData):
        wanted += "; plan can't predict a HeteroData yet"
    check_type("data", data, Data | single | Sequence, wanted)
    if rates is not None:
        check_type("rates", rates, Rates, "the machine's Rates, or None")
    graph = data if isinstance(data, Data) else None
    estimated = graph is not None and parts is None
    modes = ((1,) if estimated else (1, 2, 3)) if modes is None else modes
    _check_numbers(modes=modes, workers=workers, parts=parts)
    if graph is None and parts is not None:
        raise ValueError(f"parts={parts!r}: what is partitioned has its own number of parts")
    given: Any = data if parts is None else parts
    roots: list[Any] = [given] if isinstance(given, Data | single) else list(given)
    if not roots:
        raise ValueError("'data' needs at least one partition")
    limit = None if memory is None else parse_bytes(memory, "memory")
    if bandwidth is not None and not (isinstance(bandwidth, int | float) and bandwidth > 0):
        raise ValueError(f"bandwidth={bandwidth!r} must be a positive number of bytes per second")
    if hosts is not None and (bandwidth is None or not isinstance(hosts, int) or hosts < 1):
        raise ValueError(f"hosts={hosts!r} must be a number of hosts, with the bandwidth between")
    there = not estimated and not any(isinstance(root, PublishedPartition) for root in roots)
    if not there and (workers, hosts, store) != (None, None, None):
        raise ValueError(
            "workers=, hosts= and store= need partitions that are there, or parts= of the graph "
            "to compare"
        )
    if graph is None:
        _check_one_graph(roots)
    check_folder("store", store)
    if store is not None and limit is None:
        raise ValueError(f"store={os.fspath(store)!r} needs memory=, which says what may stay")
    if estimated and rates is None:
        rates = Rates.measure()  # The estimates' samples are too small to be timed.
    place = None if store is None else os.fspath(store)
    disk = None if place is None else Disk.measure(place)
    policies = {mode: replace(policy or SARPolicy(), mode=mode, push="off") for mode in modes}
    tried = _Tried(
        model, policies, workers, Machine(limit, place, bandwidth, hosts, rates, disk), call
    )
    if graph is not None and estimated:
        roots = list(estimated_partitions(graph, MOST_ESTIMATED))
    published = iter(tried.published([p for p in roots if isinstance(p, PublishedPartition)]))
    forecasts = []
    for root in tqdm(roots, desc="plan", unit="partition", disable=None, leave=False):
        if isinstance(root, PublishedPartition):
            forecasts += next(published)
        elif graph is None:
            forecasts += tried.there(os.fspath(root), os.fspath(root))
        else:
            with TemporaryFolder("pyg_sar-plan-") as folder:
                write_partitions(graph, root, folder / "parts")
                forecasts += tried.there(str(folder / "parts"), str(root))
    if not forecasts:
        raise ValueError(f"workers={workers!r} are more than any of the partitions has parts")
    return Plan(forecasts=forecasts, limit=limit, bandwidth=bandwidth)


def _check_numbers(**given: Sequence[int] | None) -> None:
    for name, numbers in given.items():
        check_type(name, numbers or (), Sequence, "a sequence such as (1, 2)")
        whole = all(isinstance(number, int) and number > 0 for number in numbers or ())
        if numbers is not None and (not numbers or not whole):
            raise ValueError(f"{name}={numbers!r} must be numbers of {name}, such as (1, 2)")


def _check_one_graph(roots: Sequence[Partition]) -> None:
    graphs = set()
    for root in roots:
        if isinstance(root, PublishedPartition):
            graphs.add((root.nodes, root.edges))
        else:
            known = read_metadata(root)
            graphs.add((known.num_nodes, known.num_edges))
    if len(graphs) > 1:
        raise ValueError(
            f"'data' are partitions of different graphs, of {sorted(graphs)} nodes and edges; "
            "compare partitions of one graph"
        )
    if graphs.pop()[0] == 0:
        raise ValueError(f"{roots[0]!r} has no node: there is nothing to plan")


@dataclass(frozen=True, slots=True)
class _Tried:
    """Makes the forecasts of partitions, by mode and number of workers."""

    model: Any
    policies: dict[int, SARPolicy]
    workers: Sequence[int] | None
    machine: Machine
    call: Callable[..., Tensor]

    def published(self, partitions: Sequence[PublishedPartition]) -> list[list[Forecast]]:
        """Returns those of partitions that are not there, which have other samples in each mode."""
        with ExitStack() as stack:
            samples = [
                stack.enter_context(self._samples(parts, mode))
                for parts in partitions
                for mode in self.policies
            ]
            runs = iter(try_apart(samples) if samples else ())
        return [
            [self._published(parts, mode, next(runs)[0]) for mode in self.policies]
            for parts in partitions
        ]

    def _published(self, parts: PublishedPartition, mode: int, runs: Runs) -> Forecast:
        found = self.machine.published(runs, parts, mode)
        name = "published" if parts.like is None else f"{parts.parts} estimated"
        return Forecast(parts=name, workers=parts.parts, mode=mode, **found)

    def _samples(self, parts: PublishedPartition, mode: int) -> Samples:
        rows = plan_runs.ROWS if parts.like is None else ROWS
        return Samples(
            parts, parts.shapes(mode), self.model, [self.policies[mode]], self.call, rows
        )

    def there(self, root: str, name: str) -> list[Forecast]:
        """Returns those of the partition in a folder."""
        shapes, machine = read_shapes(root), self.machine
        most = len(shapes)
        counts = [count for count in self.workers or [most] if count <= most]
        if not counts:
            return []
        fewer = min(counts) < most
        stores = machine.store is not None and fewer
        rows = plan_runs.ROWS * (plan_runs.STORED_ROWS if stores else 1)
        given = root, shapes, self.model, list(self.policies.values()), self.call, rows
        forecasts = []
        with Samples(*given) as samples:
            apart = try_apart([samples])[0]
            hosted = samples.hosted() if fewer else apart
            for k, mode in enumerate(self.policies):
                for count in counts:
                    stored = None
                    if machine.store is not None and machine.limit is not None and count < most:
                        limits = machine.limit, machine.store
                        stored = samples.stored(hosted[k], k, count, *limits)
                    found = machine.forecast(apart[k], hosted[k], count, stored)
                    forecasts.append(Forecast(parts=name, workers=count, mode=mode, **found))
        return forecasts


# ``pyg-sar plan`` ##################################################################


_BITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


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
