"""``plan``: what a training will take on a partition, found out on a small graph of its shape.

[Note: how it is predicted] The model makes three training steps on graphs of two sizes that have
the partition's shape (``plan_sample.py``), on as many workers as there are parts, all threads of
one process that exchange rows as hosts do. The bytes of all tensors alive in a worker are counted,
and the bytes that it sends; lines through both sizes give those of the whole partition. Nothing is
known of the model, so any model that runs can be planned. Times are not measured on samples, which
lie in caches: the work of an epoch is counted by operators, and divided by rates (``rates.py``).
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data

import pyg_sar.comm.group as group
from pyg_sar.comm.group import current
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
from pyg_sar.tools.graphs import names_in
from pyg_sar.tools.models import MODELS, imported_model
from pyg_sar.tools.plan_sample import PartShape, read_shapes, write_sample
from pyg_sar.tools.rates import LiveBytes, Rates, Work, read_rates
from pyg_sar.tools.run import ModelConfig, UsageError, call_of, count_classes
from pyg_sar.tools.verify import call_with
from pyg_sar.train.flow import call_model

PIECES = (
    (attention_terms, "_PRODUCTS", attention_terms._PRODUCTS),
    (analysis, "_LEAST_BUDGET", analysis._LEAST_BUDGET),
    (analysis, "_MOST_BUDGET", analysis._MOST_BUDGET),
)
"""Sizes of what is computed piece by piece."""
ROWS = 24_000
"""Own nodes, halo rows, and edges / 8, of all parts of the larger sample, about."""
PROCESS = 8 << 20
"""Bytes that training takes in a process beside its tensors: code that is read, the allocator's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """A row of a :class:`Plan`.

    Attributes:
        parts: The partition.
        workers: One for each of its parts.
        mode: Of :class:`SARPolicy`.
        memory: Bytes at the peak of each worker, beyond the start of its process.
        sent: Bytes that each worker sends in an epoch, where all rows are pulled.
        seconds: Of an epoch, by the machine's rates.
    """

    parts: str
    workers: int
    mode: int
    memory: list[int]
    sent: list[int]
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Forecasts, and the one to take. ``print`` shows a table.

    Attributes:
        forecasts: By partition and mode.
        limit: Bytes that a worker may take; ``None``: any.
        bandwidth: Bytes per second between workers; ``None``: they share memory.
    """

    forecasts: list[Forecast]
    limit: int | None
    bandwidth: float | None

    @property
    def fitting(self) -> list[Forecast]:
        """The forecasts within the limit of memory."""
        return [f for f in self.forecasts if self.limit is None or max(f.memory) <= self.limit]

    @property
    def best(self) -> Forecast | None:
        """The fastest that fits; among those within 2 %, the one that takes least memory."""
        if not self.fitting:
            return None
        fastest = min(one.seconds for one in self.fitting)
        equal = [one for one in self.fitting if one.seconds <= 1.02 * fastest]
        return min(equal, key=lambda one: max(one.memory))

    def __str__(self) -> str:
        lines = [f"{'workers':>7}  {'mode':>4}  {'memory/worker':>13}  {'sent/epoch':>10}  "
                 f"{'s/epoch':>8}  parts"]  # fmt: skip
        for one in self.forecasts:
            mark = "*" if one is self.best else " " if one in self.fitting else "too large"
            lines.append(
                f"{one.workers:>7}  {one.mode:>4}  {_size(max(one.memory)):>13}  "
                f"{_size(sum(one.sent)):>10}  {one.seconds:>8.3g}  {one.parts} {mark}".rstrip()
            )
        return "\n".join([*lines, self._why()])

    def _why(self) -> str:
        if self.best is None:
            least = min(self.forecasts, key=lambda one: max(one.memory))
            return (
                f"None fits into {_size(self.limit or 0)}; the least is {_size(max(least.memory))} "
                f"(mode {least.mode}, {least.workers} workers): take more parts, or host several "
                "in turn with --memory and --store"
            )
        limit = "" if self.limit is None else f" of those within {_size(self.limit)}"
        return (
            f"* take mode {self.best.mode} with {self.best.workers} workers: the shortest "
            f"epoch{limit}. Memory is beyond the start of a process, which takes some 350 MB"
        )


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def plan(
    model: nn.Module | Callable[[Data], nn.Module],
    parts: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    modes: Sequence[int] = (1, 2, 3),
    policy: SARPolicy | None = None,
    memory: int | str | None = None,
    bandwidth: float | None = None,
    call: Callable[[nn.Module, Data], Tensor] = call_model,
    rates: Rates | None = None,
) -> Plan:
    r"""Predicts memory, bytes sent and epoch times of a training with one worker for each part.

    With part :math:`p`'s own nodes :math:`n`, halo rows :math:`h` and edges :math:`e`, the bytes at
    its peak are :math:`a + b(n, h, e)` with :math:`b` homogeneous of degree 1; samples of two sizes
    with the same proportions give both. See [Note: how it is predicted].

    Args:
        model: The model, or what returns it for a part's ``Data``.
        parts: A folder of :func:`pyg_sar.write_partitions`, or several.
        modes: Of :class:`SARPolicy`, to compare.
        policy: The other settings of layers.
        memory: Bytes that each worker may take beyond its start, or ``'16GiB'``.
        bandwidth: Bytes per second of each worker's link; by default workers are on one host.
        call: The forward pass, where ``model(data.x, data.edge_index)`` is not it.
        rates: The machine's; measured once, and kept, where they are not given.

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
    check_type("parts", parts, str | os.PathLike | Sequence, "a folder, or several")
    if rates is not None:
        check_type("rates", rates, Rates, "the machine's Rates, or None")
    roots = [parts] if isinstance(parts, str | os.PathLike) else list(parts)
    limit = None if memory is None else parse_bytes(memory, "memory")
    if not roots or not modes:
        raise ValueError("'parts' and 'modes' need at least one entry each")
    if bandwidth is not None and not (isinstance(bandwidth, int | float) and bandwidth > 0):
        raise ValueError(f"bandwidth={bandwidth!r} must be a positive number of bytes per second")
    graphs = {(found.num_nodes, found.num_edges) for found in map(read_metadata, roots)}
    if len(graphs) > 1:
        raise ValueError(
            f"'parts' are partitions of different graphs, of {sorted(graphs)} nodes and edges; "
            "compare partitions of one graph"
        )
    if graphs.pop()[0] == 0:
        raise ValueError(f"{os.fspath(roots[0])!r} has no node: there is nothing to plan")
    rates = rates or read_rates()
    policies = [replace(policy or SARPolicy(), mode=mode, push="off") for mode in modes]
    forecasts = []
    for root in roots:
        found = _try(os.fspath(root), model, policies, call)
        for mode, (peaks, sent, works) in zip(modes, found, strict=True):
            seconds = max(rates.seconds(work) for work in works)
            if bandwidth is not None:
                seconds += max(sent) / bandwidth
            forecast = Forecast(
                parts=os.fspath(root),
                workers=len(peaks),
                mode=mode,
                memory=peaks,
                sent=sent,
                seconds=seconds,
            )
            forecasts.append(forecast)
    return Plan(forecasts=forecasts, limit=limit, bandwidth=bandwidth)


Found = tuple[list[int], list[int], list[Work]]
"""Of each worker: bytes at the peak, bytes sent, and the work of an epoch."""


def _try(
    root: str, model: Any, policies: Sequence[SARPolicy], call: Callable[..., Tensor]
) -> list[Found]:
    """Returns what each policy takes on the whole partition."""
    shapes = read_shapes(root)
    share = min(1.0, ROWS / max(_rows(shapes), 1))
    sizes = [share] if share == 1.0 else [share, share / 2]
    given = root, shapes, sizes, model, policies, call
    # Without shared memory rows are sent and received, as between hosts: each is one worker's.
    runs = launch(_try_sizes, 1, *given, env={"PYG_SAR_SHARED_MEMORY": "0"})[0]
    found = []
    for k in range(len(policies)):
        workers = [[run[p][k] for run in runs] for p in range(len(shapes))]
        peaks = [PROCESS + _line(sizes, [run.peak for run in w]) for w in workers]
        sent = [_line(sizes, [run.sent for run in w]) for w in workers]
        works = [w[0].work.times(1 / share) for w in workers]
        found.append((peaks, sent, works))
    return found


def _try_sizes(
    root: str,
    shapes: Sequence[PartShape],
    sizes: Sequence[float],
    model: Any,
    policies: Sequence[SARPolicy],
    call: Callable[..., Tensor],
) -> list[list[list[_Run]]]:
    """Returns the runs on samples: by size, worker and policy. In a process of its own."""
    runs = []
    with tempfile.TemporaryDirectory(prefix="pyg_sar-plan-") as folder:
        for number, size in enumerate(sizes):
            out = Path(folder) / str(number)
            write_sample(root, shapes, size, out)
            # Pieces of a fixed size, too, must be smaller in proportion. See [Note: scaled shapes].
            for module, name, whole in PIECES:
                setattr(module, name, max(int(whole * size), 1))
            given = str(out), model, policies, call
            runs.append(launch(_try_part, len(shapes), *given, backend="threads"))
    return runs


def _rows(shapes: Sequence[PartShape]) -> int:
    return sum(shape.nodes + sum(shape.halo) + sum(shape.edges) // 8 for shape in shapes)


def _line(sizes: Sequence[float], values: Sequence[int]) -> int:
    """Continues the line through the values at (one or) two sizes to size 1."""
    if len(sizes) == 1:
        return values[0]
    slope = (values[0] - values[1]) / (sizes[0] - sizes[1])
    return round(values[0] + slope * (1 - sizes[0]))


@dataclass(frozen=True, slots=True)
class _Run:
    peak: int
    sent: int
    work: Work


def _try_part(
    root: str, model: Any, policies: Sequence[SARPolicy], call: Callable[..., Tensor]
) -> list[_Run]:
    """Trains as each policy says; runs on each worker."""
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
        with Ledger(comm) as ledger, Work() as work:
            _step(trained, data, optimizer, call)
        found.append(_Run(live.peak, ledger.sent, work))
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
Each folder is a partition; there is one worker for each part.
  pyg-sar plan --parts parts4 parts8 --model sage --hidden 256 --layers 3 --memory 16GiB
  pyg-sar plan --parts parts --model net.py:make --bandwidth 1Gb
The machine's rates are measured once, and kept in the user's cache. Exit code 1: nothing fits.
"""

_BITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def add_plan(command: argparse.ArgumentParser) -> Any:
    """Adds the arguments of ``pyg-sar plan``, and returns what adds those of the model."""
    add = command.add_argument
    add("--parts", nargs="+", required=True, metavar="DIR", help="folders of partitions")
    add("--modes", nargs="+", type=int, choices=(1, 2, 3), default=[1, 2, 3], help="to compare")
    add("--memory", metavar="SIZE", help="that a worker may take: 16GiB")
    add("--bandwidth", metavar="RATE", help="bits/s of each link: 1Gb (default: one host)")
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
        arguments.parts,
        modes=arguments.modes,
        policy=SARPolicy(),
        memory=arguments.memory,
        bandwidth=None if arguments.bandwidth is None else parse_rate(arguments.bandwidth),
        call=call,
    )
    sys.stdout.write(f"{found}\n")
    return 0 if found.fitting else 1


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
