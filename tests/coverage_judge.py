"""Compares what workers found with one process, and judges.

A case is *exact* where workers give what one process gives, or *refused* where an error says by
name what can't run distributed. Everything else (other numbers, another error, a hang) is a defect.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from coverage_case import Case
from coverage_run import LOW_PRECISION, Pass, Worker, build, one_pass, run_case, run_low
from oracle import error, gradient_scale, parts, workers
from torch import Tensor
from torch_geometric.data import Data

import pyg_sar
from pyg_sar.comm.hosting import PartError

WORLD = 3
EXACT, REFUSED, UNAVAILABLE, NO_LAYER = "exact", "refused", "unavailable", "no layer"
TWICE = 2.0  # flash-attention's rule: our error is at most twice the single process's own

# Comparing ###################################################################


def exact_errors(passes: Sequence[Pass], expected: Pass, least: float = 0.0) -> dict[str, float]:
    """The largest relative error of everything that each worker found, by name.

    Args:
        passes: What workers found.
        expected: What one process found.
        least: Gradients are judged by their largest, which counts as no less than this.
    """
    found: dict[str, float] = {}
    inputs = max(gradient_scale(expected.input_grads), least)
    parameters = max(gradient_scale(expected.parameter_grads), least)
    for rank, one in enumerate(passes):
        pairs = zip(one.outs, expected.outs, strict=True)
        found |= {f"output {k}@{rank}": error(a, b) for k, (a, b) in enumerate(pairs)}
        for name, gradient in expected.input_grads.items():
            found[f"{name}.grad@{rank}"] = error(one.input_grads[name], gradient, inputs)
        for name, gradient in expected.parameter_grads.items():
            found[f"{name}.grad@{rank}"] = error(one.parameter_grads[name], gradient, parameters)
        for name, buffer in expected.buffers.items():
            found[f"{name}@{rank}"] = error(one.buffers[name], buffer)
    return found


def groups(one: Pass) -> dict[str, Tensor]:
    """Outputs, input gradients and parameter gradients, each as one long vector."""
    kinds: dict[str, list[Tensor | None]] = {
        "outputs": list(one.outs),
        "input gradients": list(one.input_grads.values()),
        "parameter gradients": list(one.parameter_grads.values()),
    }
    return {
        name: torch.cat([t.double().flatten() for t in tensors if t is not None])
        for name, tensors in kinds.items()
        if any(t is not None for t in tensors)
    }


def ratios(ours: Pass, theirs: Pass, exact: Pass, dtype: torch.dtype) -> dict[str, float]:
    r"""The workers' error by the single process's, both against float64.

    .. math:: \frac{\|v - v_{64}\|_2}{\max(\|v_1 - v_{64}\|_2, \tfrac{\epsilon}{2}\|v_{64}\|_2)}

    with one unit in the last place of the dtype as the least that counts.
    """
    found = {}
    a, b, c = groups(ours), groups(theirs), groups(exact)
    half = torch.finfo(dtype).eps / 2
    for name, right in c.items():
        own = max(float((b[name] - right).norm()), half * float(right.norm()), 1e-300)
        found[name] = float((a[name] - right).norm()) / own
    return found


# Low precision ###############################################################

MORE_DRAWS = range(1, 25)


@dataclass
class Low:
    """One case in one dtype, on one process and in float64."""

    layer: torch.nn.Module
    dtype: torch.dtype
    runs: dict[int, tuple[Pass, Pass]] = field(default_factory=dict)

    def add(self, case: Case, data: Data, draw: int) -> None:
        """Runs a draw; the float64 result is that of the rounded tensors and parameters."""
        single = one_pass(case, copy.deepcopy(self.layer), data, self.dtype, draw)
        rounded = data.clone()
        for name, value in data:
            if isinstance(value, Tensor) and value.is_floating_point():
                rounded[name] = value.to(self.dtype).double()
        layer = copy.deepcopy(self.layer).double()
        self.runs[draw] = single, one_pass(case, layer, rounded, draw=draw)


def low_precision(case: Case, data: Data) -> dict[str, Low]:
    """The case in every dtype that PyG itself runs it in."""
    found = {}
    for name, dtype in LOW_PRECISION.items():
        low = Low(build(case, dtype), dtype)
        with suppress(RuntimeError):  # PyG has no such operator
            low.add(case, data, 0)
            if all(bool(v.isfinite().all()) for v in groups(low.runs[0][0]).values()):
                found[name] = low
    return found


def low_ratios(case: Case, data: Data, root: Path, low: Low, first: Pass) -> dict[str, float]:
    """The ratios of :func:`ratios`; where one draw says too little, the medians of 25.

    A gradient of one number may come out right by luck, and a rectifier or a maximum may switch
    in one of two results of equal quality.
    """
    found = ratios(first, *low.runs[0], low.dtype)
    if max(found.values(), default=0.0) <= TWICE:
        return found
    for draw in MORE_DRAWS:
        low.add(case, data, draw)
    found_by = workers(run_low, WORLD, root, case, low.layer, low.dtype, MORE_DRAWS)
    passes = zip(MORE_DRAWS, found_by[0], strict=True)
    draws = [found, *(ratios(p, *low.runs[d], low.dtype) for d, p in passes)]
    return {name: median(draw[name] for draw in draws) for name in found}


@dataclass
class Outcome:
    """A row of the table: what was found for one case."""

    name: str
    verdict: str
    reason: str = ""
    strategy: str = ""
    case: str = ""
    error: float = 0.0
    ratios: dict[str, float] = field(default_factory=dict)
    resident: list[int] = field(default_factory=list)
    traffic: float = math.nan
    gathers: bool = False
    problems: list[str] = field(default_factory=list)


def judge(name: str, case: Case, data: Data, root: Path, precise: bool = True) -> Outcome:
    """Runs a case on one process and on workers, and says what holds.

    Args:
        name: The case's name.
        case: The case.
        data: Its graph.
        root: A partition of it.
        precise: Look at low precision as well.
    """
    if not case.default_double:
        return _judge(name, case, data, root, precise)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return _judge(name, case, data, root, precise=False)
    finally:
        torch.set_default_dtype(before)


def _judge(name: str, case: Case, data: Data, root: Path, precise: bool) -> Outcome:
    if case.no_layer:
        return Outcome(name, NO_LAYER, case.why)
    if case.unavailable:
        try:
            case.make()
        except (ImportError, RuntimeError) as missing:
            return Outcome(name, UNAVAILABLE, case.why or str(missing).splitlines()[0])
        return Outcome(name, "", problems=["can be built here after all: give it a real case"])
    plain = build(case)
    expected, low = None, {}
    if not case.refused:
        expected = one_pass(case, copy.deepcopy(plain), data)
        low = low_precision(case, data) if precise else {}
    layers = {key: one.layer for key, one in low.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pyg_sar.errors.OneShotWarning)
            run = workers if precise else parts  # Processes, and parts that this one hosts.
            everyone = run(run_case, WORLD, root, case, plain, layers)
    except (pyg_sar.errors.WorkerError, PartError) as failure:
        return _failed(name, case, failure)
    outcome = Outcome(name, EXACT)
    if case.refused or expected is None:
        outcome.problems.append(f"ran, but was expected to be refused: {case.refused}")
        return outcome
    for key, one in low.items():
        found = low_ratios(case, data, root, one, everyone[0].low[key])
        outcome.ratios[key] = max(found.values(), default=0.0)
        if not outcome.ratios[key] <= TWICE:
            outcome.problems.append(f"{key}: {found} times the single process's error")
    _compare(outcome, everyone, expected, case.tolerance)
    _laws(outcome, case, data, everyone)
    return outcome


def _failed(name: str, case: Case, failure: Exception) -> Outcome:
    cause = failure.__cause__ if isinstance(failure, PartError) else None
    text = f"{type(cause).__name__}: {cause}" if cause is not None else str(failure)
    text = re.sub(r"^Rank \d+ failed: ", "", text.partition("\n\nTraceback")[0])
    outcome = Outcome(name, REFUSED, case.why or text.splitlines()[0])
    named = text.partition(":")[0] in ("ValueError", "TypeError", "DistributedIndexError")
    if not case.refused:
        outcome.problems.append(text)
    elif not named or not re.search(case.refused, text):
        outcome.problems.append(f"refused otherwise than by '{case.refused}': {text}")
    return outcome


def _compare(outcome: Outcome, workers: Sequence[Worker], expected: Pass, tolerance: float) -> None:
    found = exact_errors([w.exact for w in workers], expected)
    wrong = {k: v for k, v in found.items() if not v <= tolerance}
    outcome.error = max(found.values(), default=0.0)
    if wrong:
        outcome.problems.append(f"differs in float64: {wrong}")
    strategies = {tuple(w.strategies) for w in workers}
    outcome.strategy = ", ".join(workers[0].strategies) or "none"
    if len(strategies) > 1 or len({w.case_2 for w in workers}) > 1:
        outcome.problems.append(f"workers chose differently: {strategies}")
    if workers[0].strategies and outcome.strategy != "one_shot":
        outcome.case = "2" if workers[0].case_2 else "1"
    if any(w.left for w in workers):
        outcome.problems.append(f"rows still resident: {[w.left for w in workers]}")


def shards(data: Data, parts: Sequence[Tensor], reverse: bool) -> list[list[int]]:
    """Remote rows of each other worker that a worker has resident with a shard.

    Sources that its own edges need, or, where the sources' worker goes through the edges in the
    backward pass, targets of the other's edges from its nodes.

    Args:
        data: The whole graph.
        parts: The nodes of each worker.
        reverse: Messages go from targets to sources.
    """
    owner = torch.empty(data.num_nodes, dtype=torch.long)
    for rank, nodes in enumerate(parts):
        owner[nodes] = rank
    far, near = data.edge_index.flip(0) if reverse else data.edge_index

    def rows(p: int, q: int) -> int:
        sources = far[(owner[near] == p) & (owner[far] == q)]
        targets = near[(owner[near] == q) & (owner[far] == p)]
        return max(int(sources.unique().numel()), int(targets.unique().numel()))

    return [[rows(p, q) for q in range(len(parts)) if q != p] for p in range(len(parts))]


def _laws(outcome: Outcome, case: Case, data: Data, workers: Sequence[Worker]) -> None:
    """One shard of remote rows, or a hosted part's halo; bytes, relative to the one-shot way's."""
    nodes = [w.nodes for w in workers]
    ways = [False, True] if any(w.reverses for w in workers) else [False]
    counts = [shards(data, nodes, way) for way in ways]
    for rank, w in enumerate(workers):
        most = sum if w.hosted else max
        law = case.relations * max(most(of[rank]) for of in counts)
        peak = max(w.resident.values(), default=0)
        if not outcome.resident or peak * outcome.resident[1] > outcome.resident[0] * law:
            outcome.resident = [peak, law]
        over = {k: n for k, n in w.resident.items() if n > law}
        if outcome.strategy == "sequential" and over and not w.gathers:
            outcome.problems.append(f"rank {rank}: {over} rows resident, at most {law}")
    outcome.gathers = any(w.gathers for w in workers)
    theirs = sum(w.one_shot_bytes for w in workers)
    if theirs:
        outcome.traffic = sum(w.bytes for w in workers) / theirs
