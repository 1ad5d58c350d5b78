"""Training steps on samples of a partition's shape: what :func:`pyg_sar.plan` counts and times.

[Note: samples of a store] Parts that wait in a store are tried with the real one, in the folder
that the training would have, and with the same share of all parts' bytes in memory as the whole
graph's parts would have. So what is moved out and in is the same share of these bytes, too, and
continues along a line like all else. Where the store refuses a sample, it would the whole graph.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from tqdm import tqdm

import pyg_sar.comm.group as group
from pyg_sar.comm.host import split_parts
from pyg_sar.comm.launch import launch
from pyg_sar.convert import distribute
from pyg_sar.engine import analysis
from pyg_sar.errors import WorkerError
from pyg_sar.files import TemporaryFolder
from pyg_sar.kernels import attention_terms
from pyg_sar.ledger import Ledger
from pyg_sar.partition.loading import load_partition
from pyg_sar.policy import SARPolicy
from pyg_sar.store.part_store import CACHES
from pyg_sar.tools.forecasts import Run, Runs, Stored, left_to_tensors
from pyg_sar.tools.plan_sample import PartShape, PublishedPartition, write_sample
from pyg_sar.tools.rates import LiveBytes, Moved, Work

PIECES = (
    (attention_terms, "_PRODUCTS", attention_terms._PRODUCTS),
    (analysis, "_LEAST_BUDGET", analysis._LEAST_BUDGET),
    (analysis, "_MOST_BUDGET", analysis._MOST_BUDGET),
)
"""Sizes of what is computed piece by piece."""
ROWS = 100_000
"""Own nodes, halo rows, and edges / 8, of all parts of the larger sample, about."""
STORED_ROWS = 2
"""Times as many for a store: large tensors lie in large pages, which take less time than small."""
STEPS = 3
"""Steps that are timed; the fastest counts."""

Call = Callable[..., Tensor]


class Samples:
    """Samples of a partition with these parts, of one or two sizes, in a temporary folder.

    ``rows`` is about what the larger one has (:data:`ROWS`); ``sizes`` are shares of the partition.
    """

    def __init__(
        self,
        root: str | PublishedPartition,
        shapes: Sequence[PartShape],
        model: Any,
        policies: Sequence[SARPolicy],
        call: Call,
        rows: int,
    ) -> None:
        share = min(1.0, rows / max(_rows(shapes), 1))
        self.sizes = [share] if share == 1.0 else [share, share / 4]
        self.parts, self.policies = len(shapes), policies
        self._folder = TemporaryFolder("pyg_sar-plan-")
        if isinstance(model, nn.Module):  # Samples run on the CPU, in other processes.
            model = copy.deepcopy(model).cpu()
        self.jobs = []
        for number, size in enumerate(self.sizes):
            out = str(self._folder.path / str(number))
            write_sample(root, shapes, size, Path(out))
            self.jobs.append((out, model, policies, call, size))

    def __enter__(self) -> Samples:
        return self

    def __exit__(self, *error: object) -> None:
        self._folder.close()

    def hosted(self) -> list[Runs]:
        """Runs one worker that hosts all parts; runs by policy."""
        return self.runs(launch(_try_each, 1, self.jobs, parts=self.parts))

    def runs(self, tried: Sequence[Sequence[Sequence[Run]]]) -> list[Runs]:
        """Returns runs by policy of those of each part, by size and policy."""
        return [
            Runs(self.sizes, [[part[n][k] for part in tried] for n in range(len(self.sizes))])
            for k in range(len(self.policies))
        ]

    def stored(self, hosted: Runs, k: int, workers: int, limit: int, store: str) -> Stored:
        """Runs workers that host parts with a limit of memory and a store, by the k-th policy.

        See [Note: samples of a store].
        """
        groups = split_parts(self.parts, workers)
        left, found = left_to_tensors(limit), []
        if left is None:
            return Stored(self.sizes, [], "the limit leaves nothing to tensors")
        for number, (out, model, policies, call, size) in enumerate(self.jobs):
            budgets = [hosted.share_of(parts, left, number) for parts in groups]
            cache = max(round(limit // CACHES * size), 1)
            given = out, model, policies[k], call, size, budgets, cache
            try:
                # The launch's own limit does not count: each worker fixes it.
                how: Any = {"parts": self.parts, "memory": 1 << 40, "store": store}
                parts = launch(_try_stored, workers, *given, **how)
            except WorkerError as error:
                if "StoreError" not in str(error) and "OutOfMemoryError" not in str(error):
                    raise
                return Stored(self.sizes, [], "a part needs more at once")
            found.append([[parts[p] for p in group] for group in groups])
        return Stored(self.sizes, found, "")


def try_apart(samples: Sequence[Samples]) -> list[list[Runs]]:
    """Runs a worker for each part; for each of the samples, the runs by policy."""
    most_first = sorted(range(len(samples)), key=lambda n: -samples[n].parts)
    jobs = [(samples[n].parts, samples[n].jobs) for n in most_first]
    # Without shared memory rows are sent and received, as between hosts: each is one worker's.
    found = launch(_try_in_turn, jobs[0][0], jobs, env={"PYG_SAR_SHARED_MEMORY": "0"})
    runs = {
        n: samples[n].runs([tried[turn] for tried in found[: samples[n].parts]])
        for turn, n in enumerate(most_first)
    }
    return [runs[n] for n in range(len(samples))]


def _rows(shapes: Sequence[PartShape]) -> int:
    return sum(shape.nodes + sum(shape.halo) + sum(shape.edges) // 8 for shape in shapes)


def _begin_training(root: str, model: Any, policy: SARPolicy, call: Call) -> Callable[[], None]:
    """Loads this worker's part of a sample and makes two steps; returns what makes another one."""
    data = load_partition(root)
    torch.manual_seed(0)
    own = copy.deepcopy(model) if isinstance(model, nn.Module) else model(data)
    own = distribute(own, policy)
    step = partial(train_step, own, data, torch.optim.Adam(own.parameters()), call)
    step()
    step()
    return step


def _fastest(step: Callable[[], None]) -> float:
    """Returns the processor's time of the fastest of some steps, of this thread."""
    times = []
    for _ in range(STEPS):
        start = time.thread_time()
        step()
        times.append(time.thread_time() - start)
    return min(times)


def _scale(size: float) -> None:
    # Pieces of a fixed size, too, must be smaller in proportion. See [Note: scaled shapes].
    for module, name, whole in PIECES:
        setattr(module, name, max(int(whole * size), 1))


def _try_in_turn(jobs: Sequence[tuple[int, Sequence[Any]]]) -> list[list[list[Run]]]:
    """Trains on samples of so many parts, most first; runs of each, on each of their workers.

    The first workers go on in a group of their own: a start takes longer than most samples.
    """
    rank, world = group.current().rank, group.current().world_size
    tried = []
    bar = tqdm(jobs, desc="plan", unit="sample", disable=True if rank else None, leave=False)
    for parts, given in bar:
        if rank >= parts:
            break
        if parts < world:
            group.finalize()
            os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(parts)
            world = group.init().world_size
        tried.append(_try_each(given))
    return tried


def _try_each(jobs: Sequence[Any]) -> list[list[Run]]:
    """Trains on samples, one after the other; runs on each worker."""
    return [try_part(*given) for given in jobs]


def try_part(
    root: str, model: Any, policies: Sequence[SARPolicy], call: Call, size: float = 1.0
) -> list[Run]:
    """Trains as each policy says; runs on each worker."""
    _scale(size)
    found = []
    for policy in policies:
        live = LiveBytes()
        with live:
            step = _begin_training(root, model, policy, call)
        seconds = _fastest(step)
        with Ledger(group.current()) as ledger, Work() as work:
            step()
        sent = {peer: ways["out"] for peer, ways in ledger.by_peer().items() if "out" in ways}
        found.append(Run(live.peak, live.log, sent, seconds, work))
        del step
    return found


def _try_stored(
    root: str,
    model: Any,
    policy: SARPolicy,
    call: Call,
    size: float,
    budgets: Sequence[int],
    cache: int,
) -> tuple[Moved, float]:
    """Trains with parts in a store; runs for each part."""
    _scale(size)
    host: Any = group.current().host
    host.store.fix(budgets[host.outer.rank], cache)
    step = _begin_training(root, model, policy, call)
    before = host.store.counters()
    seconds = _fastest(step)
    after = host.store.counters()
    moved = (
        (after[name] - before[name]) / STEPS
        for name in ("bytes_read", "bytes_written", "demand_bytes", "demand_faults")
    )
    return Moved(*moved), seconds


def train_step(model: nn.Module, data: Data, optimizer: torch.optim.Optimizer, call: Call) -> None:
    """Makes a step: the forward pass, a loss of all nodes, its gradients, the update."""
    optimizer.zero_grad()
    out = call(model, data)
    y = data.get("y")
    if isinstance(y, Tensor) and not y.is_floating_point() and out.dim() == 2:
        loss = F.cross_entropy(out, y.view(-1).clamp(0, out.size(1) - 1))
    else:
        loss = out.float().square().mean()
    loss.backward()
    optimizer.step()
